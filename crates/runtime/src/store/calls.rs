//! Calls under way: what each block of them has come to, and the handle that waits for all of it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use weft_fabric::fork::OfProcess;
use weft_protocol::block::BlockId;
use weft_protocol::block::shelf::{PutFailed, PutRefused, Read, Trouble};
use weft_protocol::transfer::PeerId;

use super::turn::{CallId, Cargo, Shared, State, Waiting, spans};
use crate::ending::Ending;
use crate::error::Error;
use crate::interrupt;
use crate::memory::Memory;

/// What came of putting a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "a block that is nowhere has to be computed again"]
pub struct PutOutcome {
    /// In which tiers it is now, as bits; the first tier is the lowest.
    pub tiers: u8,
    /// Whether this put brought it anywhere.
    pub new: bool,
    /// Why it is not in one of them, where it was to be: the last that said no.
    pub why: Option<WhyNot>,
}

impl PutOutcome {
    /// Whether it can be read from somewhere.
    pub fn is_there(&self) -> bool {
        self.tiers != 0
    }
    /// Whether it is in this tier, by its number.
    pub fn is_in(&self, tier: usize) -> bool {
        tier < 8 && self.tiers >> tier & 1 == 1
    }
}

/// Why a tier does not have a block that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WhyNot {
    #[error(transparent)]
    Refused(#[from] PutRefused),
    #[error(transparent)]
    Failed(#[from] PutFailed),
}

/// What came of reading a block. Where it is a miss the memory holds anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what was missed holds anything"]
pub enum GetOutcome {
    Hit {
        tier: usize,
        parts: u8,
        bytes: u32,
    },
    /// Read from another store, which had it in this tier of its own.
    Elsewhere {
        peer: PeerId,
        tier: usize,
        parts: u8,
        bytes: u32,
    },
    Miss,
}

impl GetOutcome {
    pub fn is_hit(&self) -> bool {
        !matches!(self, GetOutcome::Miss)
    }
}

/// What came of a purge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Purged {
    /// Records that were erased, in all tiers.
    pub erased: u64,
    /// Blocks that stay because they are held, or followed by such: purge again.
    pub left: usize,
    /// Why a tier may still have records of the tenant.
    pub failed: Option<Trouble>,
}

/// A block to be read, and where to in the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub id: BlockId,
    pub offset: u64,
}

#[derive(Debug)]
pub(super) struct PutCall {
    pub(super) outcomes: Vec<PutOutcome>,
    pub(super) left: usize,
    pub(super) ending: Arc<Ending<Vec<PutOutcome>>>,
}

#[derive(Debug)]
pub(super) struct GetCall {
    pub(super) memory: Memory,
    pub(super) wanted: Vec<Wanted>,
    pub(super) outcomes: Vec<GetOutcome>,
    pub(super) left: usize,
    pub(super) ending: Arc<Ending<Vec<GetOutcome>>>,
}

#[derive(Debug)]
pub(super) struct PurgeCall {
    pub(super) purged: Purged,
    pub(super) tiers_left: usize,
    pub(super) ending: Arc<Ending<Purged>>,
}

/// An answer that is under way: wait for it, poll it, or await it. What it is about goes on when it is dropped.
#[derive(Debug)]
#[must_use = "what nobody looks at may fail without anybody knowing"]
pub struct Answer<T: Clone> {
    pub(super) shared: OfProcess<Arc<Shared>>,
    pub(super) ending: Arc<Ending<T>>,
}

impl<T: Clone> Clone for Answer<T> {
    fn clone(&self) -> Answer<T> {
        Answer {
            shared: self.shared.clone(),
            ending: self.ending.clone(),
        }
    }
}

impl<T: Clone> Answer<T> {
    /// Has it come? Makes progress while asking.
    pub fn poll(&self) -> Option<Result<T, Error>> {
        let shared = match self.shared.get() {
            Ok(shared) => shared,
            Err(forked) => return Some(Err(forked.into())),
        };
        if !self.ending.is_ended() {
            shared.turn();
        }
        self.ending.result()
    }

    /// Waits for it, which by the store's deadline is not for ever.
    pub fn wait(&self) -> Result<T, Error> {
        loop {
            if let Some(result) = self.wait_for(Duration::from_secs(3600)) {
                return result;
            }
        }
    }

    /// The same, but no longer than `timeout`; `None` means that it is still under way.
    pub fn wait_for(&self, timeout: Duration) -> Option<Result<T, Error>> {
        let shared = match self.shared.get() {
            Ok(shared) => shared,
            Err(forked) => return Some(Err(forked.into())),
        };
        if let Some(result) = self.ending.result() {
            return Some(result);
        }
        let until = Instant::now() + timeout;
        let _waiting = Waiting::begin(&shared.bell);
        loop {
            let next = shared.turn();
            if let Some(result) = self.ending.result() {
                return Some(result);
            }
            if shared.stopped.load(Ordering::Acquire) && shared.is_idle() {
                return Some(Err(Error::Stopped));
            }
            if interrupt::has_happened() {
                return Some(Err(Error::Interrupted));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            // Somebody else may take a transfer in between, so no wait is long.
            let step = left.min(Duration::from_millis(if next.is_some() { 1 } else { 5 }));
            match shared.some_transfer() {
                Some(transfer) => drop(transfer.wait_for(step)),
                None if shared.awaits_members() => shared.wait_for_members(step),
                None => self.ending.sleep(step),
            }
        }
    }

    pub fn is_ended(&self) -> bool {
        self.ending.is_ended() || self.shared.get().is_err()
    }
}

impl<T: Clone> Future for Answer<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T, Error>> {
        match self.shared.get() {
            Ok(_) => self.ending.poll(context),
            Err(forked) => Poll::Ready(Err(forked.into())),
        }
    }
}

impl Shared {
    /// A put that was under way in a tier has ended.
    pub(super) fn on_put(
        &self,
        state: &mut State,
        call: CallId,
        nth: usize,
        tier: usize,
        ended: Result<(), PutFailed>,
    ) {
        let Some(put) = state.puts.get_mut(&call) else { return };
        let outcome = &mut put.outcomes[nth];
        match ended {
            Ok(()) => {
                outcome.tiers |= 1 << tier;
                outcome.new = true;
            }
            Err(failed) => outcome.why = Some(failed.into()),
        }
        put.left -= 1;
        self.end_put(state, call);
    }

    pub(super) fn end_put(&self, state: &mut State, call: CallId) {
        if state.puts.get(&call).is_some_and(|put| put.left == 0)
            && let Some(put) = state.puts.remove(&call)
        {
            put.ending.end_and_wake(Ok(put.outcomes));
        }
    }

    pub(super) fn on_hit(&self, state: &mut State, call: CallId, nth: usize, tier: usize, read: &Read) {
        let outcome = GetOutcome::Hit {
            tier,
            parts: read.parts,
            bytes: read.length,
        };
        state.hits.resize(state.tiers.len(), 0);
        state.hits[tier] += 1;
        self.settle_get(state, call, nth, outcome);
    }

    pub(super) fn settle_get(&self, state: &mut State, call: CallId, nth: usize, outcome: GetOutcome) {
        let Some(get) = state.gets.get_mut(&call) else { return };
        get.outcomes[nth] = outcome;
        get.left -= 1;
        if get.left == 0
            && let Some(get) = state.gets.remove(&call)
        {
            get.ending.end_and_wake(Ok(get.outcomes));
        }
    }

    /// Looks for blocks of a call in the tiers from this one on, whose bytes take a transfer; those that are nowhere are misses. What is only in the slab
    /// by now is a miss too: it was looked for there before.
    pub(super) fn look_in(&self, state: &mut State, call: CallId, mut nths: Vec<usize>, from: usize) {
        let now = self.now();
        for tier in from..state.tiers.len() {
            if nths.is_empty() || !state.gets.contains_key(&call) {
                return;
            }
            if state.tiers[tier].slab().is_some() {
                continue;
            }
            let mut found: Vec<(usize, Read)> = Vec::new();
            let wanted = &state.gets[&call].wanted;
            let ids: Vec<(usize, BlockId)> = nths.iter().map(|nth| (*nth, wanted[*nth].id)).collect();
            nths.clear();
            for (nth, id) in ids {
                match state.tiers[tier].shelf.read(&id, now) {
                    Some(read) => found.push((nth, read)),
                    None => nths.push(nth),
                }
            }
            // Files are read in their order, whatever that of the call.
            found.sort_unstable_by_key(|(_, read)| (read.extent, read.offset));
            for reads in found.chunk_by(|(_, a), (_, b)| a.extent == b.extent) {
                let GetCall { memory, wanted, .. } = &state.gets[&call];
                let memory = memory.clone();
                let far = spans(reads.iter().map(|(nth, read)| (wanted[*nth].offset, read.length)));
                let near = spans(reads.iter().map(|(_, read)| (read.offset, read.length)));
                let data = state.tiers[tier].data(reads[0].1.extent).clone();
                match self.post(&data, near, &memory, far, false) {
                    Ok(transfer) => {
                        let reads = reads.to_vec();
                        self.fly(state, transfer, Cargo::Get { call, tier, reads });
                    }
                    Err(trouble) => {
                        for (nth, read) in reads {
                            let _ = state.tiers[tier].shelf.end_read(read.read, Err(trouble), now);
                            nths.push(*nth);
                        }
                    }
                }
            }
        }
        if self.look_elsewhere(state, call, &nths) {
            return;
        }
        for nth in nths {
            state.misses += 1;
            self.settle_get(state, call, nth, GetOutcome::Miss);
        }
    }

    pub(super) fn on_purged(&self, state: &mut State, call: CallId, ended: Result<u64, Trouble>) {
        let Some(purge) = state.purges.get_mut(&call) else {
            return;
        };
        match ended {
            Ok(erased) => purge.purged.erased += erased,
            Err(trouble) => purge.purged.failed = Some(trouble),
        }
        purge.tiers_left -= 1;
        if purge.tiers_left == 0
            && let Some(purge) = state.purges.remove(&call)
        {
            purge.ending.end_and_wake(Ok(purge.purged));
        }
    }
}
