//! Whoever turns a store: takes in what has ended, and posts what its shelves want written or read.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use weft_fabric::memory::HostMemory;
use weft_plan::{Span, Spans, Time};
use weft_protocol::block::shelf::{PurgeId, PutId, Read, ShelfEvent, ShelfPut, Trouble, Verdict, Write};
use weft_protocol::block::{Open, Sealed, Shape};
use weft_protocol::memory::Digest;
use weft_protocol::{Failure, HostBytes as _, Refusal};

use super::calls::{GetCall, PurgeCall, PutCall};
use super::events::{Queue, TierKind};
use super::members::{Lend, Link};
use super::tier::{Bytes, Tier, WriteTo};
use crate::agent::Agent;
use crate::error::Error;
use crate::memory::Memory;
use crate::transfer::Transfer;

/// Names a call under way.
pub(super) type CallId = u64;

/// What a store's handles, its calls under way and its thread share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) agent: Agent,
    pub(super) shape: Shape,
    pub(super) block_bytes: u32,
    pub(super) deadline: Duration,
    /// Whether what is read from files goes to memory, too.
    pub(super) promote: bool,
    pub(super) state: Mutex<State>,
    pub(super) bell: Arc<Bell>,
    pub(super) stopped: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) tiers: Vec<Tier>,
    flights: Vec<Flight>,
    /// Flights that have ended, and that somebody is taking in.
    landing: usize,
    pub(super) given: CallId,
    /// Which block of which call a put is of.
    pub(super) putting: HashMap<(usize, PutId), (CallId, usize)>,
    pub(super) puts: BTreeMap<CallId, PutCall>,
    pub(super) gets: BTreeMap<CallId, GetCall>,
    pub(super) purging: HashMap<(usize, PurgeId), CallId>,
    pub(super) purges: BTreeMap<CallId, PurgeCall>,
    /// What blocks are verified in.
    scratch: Option<Memory>,
    pub(super) hits: Vec<u64>,
    /// Its place among other stores.
    pub(super) link: Option<Link>,
    pub(super) misses: u64,
    pub(super) told: Queue,
}

/// A transfer under way, and what it is for.
#[derive(Debug)]
struct Flight {
    transfer: Transfer,
    cargo: Cargo,
}

#[derive(Debug)]
pub(super) enum Cargo {
    Payload {
        tier: usize,
        puts: Vec<(PutId, Sealed)>,
    },
    Pages {
        tier: usize,
        extent: u32,
        chunk: usize,
    },
    Get {
        call: CallId,
        tier: usize,
        reads: Vec<(usize, Read)>,
    },
    /// From a slab to the tier below.
    Down {
        from: usize,
        read: Read,
        put: PutId,
        open: Open,
    },
    /// From a file to the slab.
    Up {
        from: usize,
        read: Read,
        write: Write,
    },
    Scrub {
        tier: usize,
        read: Read,
        into: Memory,
    },
    /// From a file to where another store reads it.
    Lend {
        tier: usize,
        read: Read,
        lend: Lend,
    },
}

/// What ended, with what was found where it landed.
enum Landed {
    Payload,
    Pages,
    /// The checksum of each block.
    Get(Vec<Result<u64, Trouble>>),
    Sealed(Option<Sealed>, Result<u64, Trouble>),
    Scrub(Result<u64, Trouble>),
}

/// Wakes the store's thread, unless somebody waits who does its work.
#[derive(Debug, Default)]
pub(super) struct Bell {
    pub(super) thread: OnceLock<Thread>,
    waiters: AtomicUsize,
}

impl Bell {
    pub(super) fn ring(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Bell>) {
        if self.waiters.load(Ordering::Acquire) == 0 {
            self.ring();
        }
    }
}

/// Somebody waits and turns the store meanwhile.
pub(super) struct Waiting<'a>(&'a Bell);

impl Waiting<'_> {
    pub(super) fn begin(bell: &Bell) -> Waiting<'_> {
        bell.waiters.fetch_add(1, Ordering::AcqRel);
        Waiting(bell)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::AcqRel);
        // What others have under way is the thread's again.
        self.0.ring();
    }
}

impl State {
    pub(super) fn of(tiers: Vec<Tier>, told: Queue) -> State {
        State {
            tiers,
            told,
            ..State::default()
        }
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> Time {
        self.agent.shared().map_or(Time::ZERO, |shared| shared.clock.now())
    }

    /// The store's thread: asleep while there is nothing to do.
    pub(super) fn run(&self) {
        while !self.stopped.load(Ordering::Acquire) {
            let next = self.turn();
            let under_way = !self.lock().flights.is_empty();
            let timeout = next.map(|next| Duration::from(next.saturating_sub(self.now())));
            match (timeout, under_way) {
                (Some(timeout), _) => std::thread::park_timeout(timeout.max(Duration::from_micros(100))),
                // Whoever ends a transfer wakes this thread, or somebody else who turns.
                (None, true) => std::thread::park_timeout(Duration::from_millis(50)),
                (None, false) => std::thread::park(),
            }
        }
    }

    /// Takes in what has ended and posts what is due; says when there is something to do by itself.
    pub(super) fn turn(&self) -> Option<Time> {
        loop {
            if self.sum_landed() {
                continue;
            }
            let ended: Vec<Flight> = {
                let mut state = self.lock();
                let flights = std::mem::take(&mut state.flights);
                let (ended, under_way) = flights.into_iter().partition(|flight| flight.transfer.is_ended());
                state.flights = under_way;
                let ended: Vec<Flight> = ended;
                state.landing += ended.len();
                ended
            };
            if ended.is_empty() {
                let mut state = self.lock();
                self.pump(&mut state);
                if state.link.as_ref().is_some_and(Link::has_landed) {
                    continue;
                }
                return state.tiers.iter().filter_map(|tier| tier.shelf.next_timeout()).min();
            }
            for Flight { transfer, cargo } in ended {
                let result = match transfer.poll() {
                    Some(Ok(_)) => Ok(()),
                    Some(Err(error)) => Err(trouble(&error)),
                    None => Err(Trouble::Refused),
                };
                // Bytes are looked at without the lock.
                let landed = self.look(&cargo, result);
                let mut state = self.lock();
                self.land(&mut state, cargo, landed, result);
                self.pump(&mut state);
                state.landing -= 1;
            }
        }
    }

    /// A transfer that is under way, for somebody to wait for.
    pub(super) fn some_transfer(&self) -> Option<Transfer> {
        self.lock().flights.first().map(|flight| flight.transfer.clone())
    }

    pub(super) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.flights.is_empty() && state.landing == 0 && !state.link.as_ref().is_some_and(Link::is_fetching)
    }

    /// Nobody has the store any more: gives its files back, and tells whoever still waits. What is stuck keeps them.
    pub(super) fn close(&self) {
        if !self.is_idle() {
            return;
        }
        let (tiers, puts, gets, purges) = {
            let mut state = self.lock();
            let calls = (
                std::mem::take(&mut state.puts),
                std::mem::take(&mut state.gets),
                std::mem::take(&mut state.purges),
            );
            (std::mem::take(&mut state.tiers), calls.0, calls.1, calls.2)
        };
        drop(tiers);
        puts.into_values()
            .for_each(|call| call.ending.end_and_wake(Err(Error::Stopped)));
        gets.into_values()
            .for_each(|call| call.ending.end_and_wake(Err(Error::Stopped)));
        purges
            .into_values()
            .for_each(|call| call.ending.end_and_wake(Err(Error::Stopped)));
    }

    /// Posts a copy; its end wakes whoever turns.
    pub(super) fn post(
        &self,
        from: &Memory,
        near: Spans,
        to: &Memory,
        far: Spans,
        commit: bool,
    ) -> Result<Transfer, Trouble> {
        let copy = self.agent.copy(from, to).map_err(|error| trouble(&error))?;
        let copy = copy.spans(near, far).deadline(self.deadline).checksum(false);
        let copy = if commit { copy.commit() } else { copy };
        let transfer = copy.post().map_err(|error| trouble(&error))?;
        let waker = Waker::from(self.bell.clone());
        let mut awaited = transfer.clone();
        let _ = Pin::new(&mut awaited).poll(&mut Context::from_waker(&waker));
        Ok(transfer)
    }

    pub(super) fn fly(&self, state: &mut State, transfer: Transfer, cargo: Cargo) {
        state.flights.push(Flight { transfer, cargo });
        // It may have ended before anybody could be woken for it.
        self.bell.clone().wake();
    }

    /// What there is to be found where the bytes of a transfer landed.
    fn look(&self, cargo: &Cargo, result: Result<(), Trouble>) -> Landed {
        match cargo {
            Cargo::Payload { .. } => Landed::Payload,
            Cargo::Pages { .. } => Landed::Pages,
            Cargo::Get { call, reads, .. } => {
                let target = {
                    let state = self.lock();
                    let call = &state.gets[call];
                    let offsets: Vec<u64> = reads.iter().map(|(nth, _)| call.wanted[*nth].offset).collect();
                    (call.memory.clone(), offsets)
                };
                let sum = |(offset, (_, read)): (u64, &(usize, Read))| {
                    result.and_then(|()| sum_of(&target.0, offset, read.length))
                };
                Landed::Get(target.1.into_iter().zip(reads).map(sum).collect())
            }
            Cargo::Down { from, read, open, .. } => {
                let slab = self.lock().tiers[*from].data(read.extent).clone();
                let sealed = result.and_then(|()| self.seal_from(open.clone(), &slab, read.offset, read.parts));
                let sum = sealed
                    .as_ref()
                    .map(|sealed| sealed.payload_sum(&self.shape))
                    .map_err(|trouble| *trouble);
                Landed::Sealed(sealed.ok(), sum)
            }
            Cargo::Up { from: _, read, write } => {
                let slab = self.lock().tiers[0].data(write.extent).clone();
                let sealed = result.and_then(|()| self.seal_from(write.open.clone(), &slab, write.offset, read.parts));
                let sum = sealed
                    .as_ref()
                    .map(|sealed| sealed.payload_sum(&self.shape))
                    .map_err(|trouble| *trouble);
                Landed::Sealed(sealed.ok(), sum)
            }
            Cargo::Lend { read, lend, .. } => Landed::Scrub(result.and_then(|()| self.sum_lent(lend, read))),
            Cargo::Scrub { read, into, .. } => Landed::Scrub(result.and_then(|()| sum_of(into, 0, read.length))),
        }
    }

    fn land(&self, state: &mut State, cargo: Cargo, landed: Landed, result: Result<(), Trouble>) {
        let now = self.now();
        match (cargo, landed) {
            (Cargo::Payload { tier, puts }, _) => {
                for (put, sealed) in puts {
                    state.tiers[tier].shelf.on_written(put, result.map(|()| sealed), now);
                }
            }
            (Cargo::Pages { tier, extent, chunk }, _) => {
                let tier = &mut state.tiers[tier];
                tier.shelf.on_pages(extent, result, now);
                if let Bytes::Files(files) = &mut tier.bytes {
                    files.give_back(chunk);
                }
            }
            (Cargo::Get { call, tier, reads }, Landed::Get(sums)) => {
                let mut again = Vec::new();
                let mut right = Vec::new();
                for ((nth, read), sum) in reads.into_iter().zip(sums) {
                    match state.tiers[tier].shelf.end_read(read.read, sum, now) {
                        Verdict::Right => right.push((nth, read)),
                        Verdict::Wrong | Verdict::Failed(_) => {
                            state.touch(read.id);
                            again.push(nth);
                        }
                    }
                }
                if self.promote && state.tiers[0].slab().is_some() {
                    self.keep_copies(state, call, tier, &right);
                }
                for (nth, read) in right {
                    self.on_hit(state, call, nth, tier, &read);
                }
                self.look_in(state, call, again, tier + 1);
            }
            (Cargo::Down { from, read, put, .. }, Landed::Sealed(sealed, sum)) => {
                // What failed below says nothing of this slab.
                let verdict = match result {
                    Ok(()) => state.tiers[from].shelf.end_read(read.read, sum, now),
                    Err(trouble) => {
                        state.tiers[from].shelf.drop_read(read.read);
                        Verdict::Failed(trouble)
                    }
                };
                let ended = match (verdict, sealed) {
                    (Verdict::Right, Some(sealed)) => Ok(sealed),
                    (Verdict::Failed(trouble), _) => Err(trouble),
                    _ => Err(Trouble::Refused),
                };
                state.tiers[from + 1].shelf.on_written(put, ended, now);
            }
            (Cargo::Up { from, read, write }, Landed::Sealed(sealed, sum)) => {
                let verdict = state.tiers[from].shelf.end_read(read.read, sum, now);
                let ended = match (verdict, sealed) {
                    (Verdict::Right, Some(sealed)) => Ok(sealed),
                    _ => Err(Trouble::Refused),
                };
                self.end_copy(state, write, ended);
            }
            (Cargo::Lend { tier, read, lend }, Landed::Scrub(sum)) => self.on_lent(state, tier, &read, lend, sum),
            (Cargo::Scrub { tier, read, into }, Landed::Scrub(sum)) => {
                let _ = state.tiers[tier].shelf.end_scrub(&read, sum, now);
                state.scratch = Some(into);
            }
            (cargo, _) => unreachable!("{cargo:?} landed as something else"),
        }
    }

    /// A copy into the slab has ended. That it did not become a block says nothing of the memory.
    pub(super) fn end_copy(&self, state: &mut State, write: Write, ended: Result<Sealed, Trouble>) {
        let now = self.now();
        let shelf = &mut state.tiers[0].shelf;
        match ended {
            Ok(sealed) => shelf.on_written(write.put, Ok(sealed), now),
            Err(_) => shelf.abandon(write.put),
        }
    }

    /// Posts what is due, and tells calls what has come of them.
    pub(super) fn pump(&self, state: &mut State) {
        let now = self.now();
        for tier in 0..state.tiers.len() {
            state.tiers[tier].shelf.on_timeout(now);
            while let Some(event) = state.tiers[tier].shelf.next_event() {
                self.on_event(state, tier, event, now);
            }
            self.write_pages(state, tier, now);
            self.scrub(state, tier, now);
        }
        // What was posted may have failed at once.
        for tier in 0..state.tiers.len() {
            while let Some(event) = state.tiers[tier].shelf.next_event() {
                self.on_event(state, tier, event, now);
            }
        }
        self.turn_members(state);
    }

    fn write_pages(&self, state: &mut State, nth: usize, now: Time) {
        loop {
            let tier = &mut state.tiers[nth];
            let Bytes::Files(files) = &mut tier.bytes else { return };
            if !files.has_chunk() {
                return;
            }
            let Some(pages) = tier.shelf.next_pages(now) else {
                return;
            };
            let (chunk, from, near, to, far) = files.stage(&pages);
            let extent = pages.extent;
            match self.post(&from, near, &to, far, pages.commit) {
                Ok(transfer) => {
                    let cargo = Cargo::Pages {
                        tier: nth,
                        extent,
                        chunk,
                    };
                    self.fly(state, transfer, cargo);
                }
                Err(trouble) => {
                    files.give_back(chunk);
                    tier.shelf.on_pages(extent, Err(trouble), now);
                }
            }
        }
    }

    fn scrub(&self, state: &mut State, nth: usize, now: Time) {
        if state.tiers[nth].slab().is_some() || state.tiers[nth].shelf.next_timeout().is_none() {
            return;
        }
        if state.scratch.is_none() {
            state.scratch = self.agent.allocate(self.block_bytes as usize).ok();
        }
        let Some(into) = state.scratch.clone() else { return };
        let Some(read) = state.tiers[nth].shelf.scrub(now) else {
            return;
        };
        state.scratch = None;
        let (near, far) = (span(read.offset, read.length), span(0, read.length));
        match self.post(&state.tiers[nth].data(read.extent).clone(), near, &into, far, false) {
            Ok(transfer) => {
                let cargo = Cargo::Scrub { tier: nth, read, into };
                self.fly(state, transfer, cargo);
            }
            Err(trouble) => {
                let _ = state.tiers[nth].shelf.end_scrub(&read, Err(trouble), now);
                state.scratch = Some(into);
            }
        }
    }

    fn on_event(&self, state: &mut State, tier: usize, event: ShelfEvent, now: Time) {
        state.told.push(tier, TierKind::of(&state.tiers[tier]), &event);
        match event {
            ShelfEvent::PutDone { put, ended, id } => {
                state.touch(id);
                if let Some((call, nth)) = state.putting.remove(&(tier, put)) {
                    self.on_put(state, call, nth, tier, ended);
                }
            }
            ShelfEvent::PurgeDone { purge, ended } => {
                if let Some(call) = state.purging.remove(&(tier, purge)) {
                    self.on_purged(state, call, ended);
                }
            }
            ShelfEvent::Removed { id, read: None, .. } => state.touch(id),
            ShelfEvent::Removed {
                id,
                parent,
                tenant,
                parts,
                read: Some(read),
            } => {
                state.touch(id);
                let below = state
                    .tiers
                    .get_mut(tier + 1)
                    .filter(|below| below.write == WriteTo::Back);
                let put = below.map(|below| below.shelf.put(tenant, id, parent, parts, now));
                match put {
                    Some(Ok(ShelfPut::Write(write))) => self.send_down(state, tier, read, write, now),
                    // It is there already, or there is no room for it.
                    _ => state.tiers[tier].shelf.drop_read(read.read),
                }
            }
            _ => {}
        }
    }

    fn send_down(&self, state: &mut State, from: usize, read: Read, write: Write, now: Time) {
        let (near, far) = (span(read.offset, read.length), span(write.offset, write.length));
        let (slab, data) = (
            state.tiers[from].data(read.extent).clone(),
            state.tiers[from + 1].data(write.extent).clone(),
        );
        match self.post(&slab, near, &data, far, write.commit) {
            Ok(transfer) => {
                let Write { put, open, .. } = write;
                self.fly(state, transfer, Cargo::Down { from, read, put, open });
            }
            Err(trouble) => {
                state.tiers[from].shelf.drop_read(read.read);
                state.tiers[from + 1].shelf.on_written(write.put, Err(trouble), now);
            }
        }
    }

    /// What was just read from a file, and is right, is kept in memory as well.
    fn keep_copies(&self, state: &mut State, call: CallId, tier: usize, right: &[(usize, Read)]) {
        let now = self.now();
        let Some((memory, offsets)) = state.gets.get(&call).map(|call| {
            let offsets: Vec<u64> = right.iter().map(|(nth, _)| call.wanted[*nth].offset).collect();
            (call.memory.clone(), offsets)
        }) else {
            return;
        };
        for ((_, read), offset) in right.iter().zip(offsets) {
            // What was purged or evicted meanwhile does not come back.
            if state.tiers[tier].shelf.parts_of(&read.id) == 0 {
                continue;
            }
            let put = state.tiers[0]
                .shelf
                .put(read.tenant, read.id, read.parent, read.parts, now);
            if let Ok(ShelfPut::Write(write)) = put {
                let slab = state.tiers[0].data(write.extent).clone();
                let sealed = self.copy_sealed(&slab, write.offset, &memory, offset, read.parts, write.open.clone());
                self.end_copy(state, write, sealed);
            }
        }
    }

    /// Copies a block's parts from one memory to another, with their checksums on the way.
    pub(super) fn copy_sealed(
        &self,
        to: &Memory,
        offset: u64,
        from: &Memory,
        at: u64,
        parts: u8,
        open: Open,
    ) -> Result<Sealed, Trouble> {
        let (to, from) = (host(to)?, host(from)?);
        self.sealed_by(open, parts, |start, length, digest| {
            to.copy_in(offset + start, from, at + start, length, digest)
        })
    }

    /// The block that lies here, sealed by its checksums.
    pub(super) fn seal_from(&self, open: Open, memory: &Memory, at: u64, parts: u8) -> Result<Sealed, Trouble> {
        let memory = host(memory)?;
        self.sealed_by(open, parts, |start, length, digest| {
            memory.digest(at + start, length as u64, digest)
        })
    }

    fn sealed_by(
        &self,
        mut open: Open,
        parts: u8,
        mut take: impl FnMut(u64, usize, &mut Digest) -> Result<(), Refusal>,
    ) -> Result<Sealed, Trouble> {
        let mut start = 0;
        for (nth, part) in self.shape.parts().iter().enumerate() {
            if parts >> nth & 1 == 1 {
                let mut digest = Digest::default();
                take(start, part.bytes as usize, &mut digest).map_err(|_| Trouble::Refused)?;
                open.fill(nth, 0, part.bytes, digest.finish())
                    .map_err(|_| Trouble::Refused)?;
                start += u64::from(part.bytes);
            }
        }
        open.seal().map_err(|_| Trouble::Refused)
    }
}

fn host(memory: &Memory) -> Result<&HostMemory, Trouble> {
    memory.inner.host_memory().ok_or(Trouble::Refused)
}

pub(super) fn sum_of(memory: &Memory, offset: u64, length: u32) -> Result<u64, Trouble> {
    let mut digest = Digest::default();
    let summed = host(memory)?.digest(offset, length.into(), &mut digest);
    summed.map(|()| digest.finish()).map_err(|_| Trouble::Refused)
}

pub(super) fn span(offset: u64, length: u32) -> Spans {
    Spans::contiguous(offset, length.into())
}

pub(super) fn spans(pieces: impl IntoIterator<Item = (u64, u32)>) -> Spans {
    let mut spans = Spans::new();
    for (offset, length) in pieces {
        let len = u64::from(length);
        spans.push(Span { offset, len });
    }
    spans
}

/// What a transfer's failure says of the medium.
fn trouble(error: &Error) -> Trouble {
    match error.failure() {
        Some(Failure::Refused(Refusal::NoRoom)) => Trouble::NoRoom,
        Some(Failure::Refused(Refusal::ReadOnly)) => Trouble::ReadOnly,
        Some(Failure::Refused(Refusal::DeviceFailed)) => Trouble::DeviceFailed,
        Some(Failure::Refused(Refusal::NoMemory)) => Trouble::BytesGone,
        Some(Failure::Expired) => Trouble::Late,
        Some(Failure::PathLost { .. }) => Trouble::DeviceFailed,
        _ => Trouble::Refused,
    }
}
