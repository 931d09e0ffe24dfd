//! A store of KV blocks with its bytes: memory, then files, on the transfers of an agent.
//!
//! What decides is [`shelf`](weft_protocol::block::shelf), a machine a tier; what is here has the bytes. What is put goes from the caller's memory to the first
//! tier, and to each tier of files that is written through, by ordinary transfers with a deadline; a put is answered when every such tier has it, or has
//! said why not. What is read lands in the caller's memory: from files without a copy between, from memory by one. Every block is summed on the way
//! in and on the way out, and what is not what was put is a miss.
//!
//! No call waits for a disk: queues are bounded, and what does not fit is refused at once and counted. See [docs/store.md].
//!
//! [docs/store.md]: https://github.com/weft-ai/weft/blob/main/docs/store.md

mod builder;
mod calls;
mod error;
mod events;
pub mod inspect;
mod members;
mod porter;
mod stat;
mod tier;
mod turn;
mod worth;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use weft_fabric::fork::OfProcess;
use weft_protocol::block::shelf::{ShelfPut, Verdict, Write};
use weft_protocol::block::{Hold, Sealed, Shape};

use crate::agent::Agent;
use crate::ending::Ending;
use crate::error::Error;
use crate::memory::Memory;
use calls::{GetCall, PurgeCall, PutCall};
use turn::{Cargo, Shared, span, spans};

pub use builder::StoreBuilder;
pub use calls::{Answer, GetOutcome, Purged, PutOutcome, Wanted, WhyNot};
pub use error::StoreError;
pub use events::{BlockEvent, TakenEvents, TierKind};
pub use members::{MembersStat, Peers, Whereabouts};
pub use porter::{BlockAt, Errand, ErrandEnd, NamedEvent, Porter, PorterOptions};
pub use stat::{StoreStat, TierStat};
pub use tier::{FileTier, WriteTo};
pub use weft_protocol::block::directory::{Counts as MembersCounts, MemberStat};
pub use weft_protocol::block::policy::{Kind, UnknownPolicy};
pub use weft_protocol::block::shelf::format::TenantKey;
pub use weft_protocol::block::shelf::{Condition, Counts, Durability, PutFailed, PutRefused, Trouble, Wrong};
pub use weft_protocol::block::{
    BlockId, BlockLine, Hint, HitRule, Namespace, Part, Priority, Shape as BlockShape, Tally,
};
pub use worth::Worth;

/// How long a store that is closed waits for what is under way.
const FAREWELL: Duration = Duration::from_secs(10);

/// A store. Clones are the same store; with the last one it is closed.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: OfProcess<Arc<Shared>>,
    thread: OfProcess<Mutex<Option<JoinHandle<()>>>>,
}

/// What blocks of one model and one tenant are called by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    namespace: Namespace,
    tenant: TenantKey,
    block_tokens: usize,
}

impl Space {
    /// Out of all [fields](weft_protocol::block::Field): one that is missing, unknown or given twice is refused by name.
    pub fn new<'a>(fields: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Space, Error> {
        let fields: Vec<(&str, &str)> = fields.into_iter().collect();
        let namespace = Namespace::from_fields(fields.iter().copied()).map_err(StoreError::from)?;
        let value = |wanted: &str| {
            fields
                .iter()
                .find(|(name, _)| *name == wanted)
                .map_or("", |(_, value)| *value)
        };
        Ok(Space {
            namespace,
            tenant: TenantKey::of(value("tenant")),
            block_tokens: value("block_tokens").parse().unwrap_or(1),
        })
    }
    /// For names that never leave this process: keys are all that tells blocks apart.
    pub fn nameless() -> Space {
        let fields = weft_protocol::block::Field::ALL.map(|field| (field.name(), "none"));
        let fields = fields.map(|(name, value)| (name, if name == "block_tokens" { "1" } else { value }));
        Space::new(fields).expect("all fields")
    }
    /// Blocks of a prompt, one for each that is full.
    pub fn chain(&self, tokens: &[u32]) -> Vec<BlockId> {
        BlockId::chain(&self.namespace, tokens, self.block_tokens)
    }
    /// The block that an engine calls by a key of its own.
    pub fn key(&self, key: &[u8]) -> Result<BlockId, Error> {
        Ok(BlockId::of_key(&self.namespace, key).map_err(StoreError::from)?)
    }
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }
    pub fn tenant(&self) -> TenantKey {
        self.tenant
    }
}

/// A block to be put: where in the memory it is, its parts one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub id: BlockId,
    pub offset: u64,
    /// Which parts there are, as bits.
    pub parts: u8,
    pub parent: Parent,
}

/// Which block one follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Parent {
    /// The one before it in the call; none, for the first.
    #[default]
    Before,
    None,
    Is(BlockId),
}

impl Block {
    /// All parts, after the block before it in the call.
    pub fn new(id: BlockId, offset: u64) -> Block {
        Block {
            id,
            offset,
            parts: u8::MAX,
            parent: Parent::Before,
        }
    }
    pub fn parts(self, parts: u8) -> Block {
        Block { parts, ..self }
    }
    pub fn after(self, parent: BlockId) -> Block {
        let parent = Parent::Is(parent);
        Block { parent, ..self }
    }
    pub fn first(self) -> Block {
        let parent = Parent::None;
        Block { parent, ..self }
    }
}

impl Store {
    /// A store of blocks of these parts, on an agent's transfers. Give it tiers, then open it.
    pub fn builder(agent: &Agent, shape: &Shape) -> StoreBuilder {
        StoreBuilder::new(agent, shape)
    }

    /// Bytes of a block that has all its parts.
    pub fn block_bytes(&self) -> u64 {
        let parts = self.inner.shared.get().map(|shared| shared.block_bytes);
        parts.map_or(1, |bytes| u64::from(bytes).max(1))
    }

    fn shared(&self) -> Result<&Arc<Shared>, Error> {
        Ok(self.inner.shared.get()?)
    }

    /// Puts blocks from this memory, which must stay as it is until the answer.
    pub fn put(&self, space: &Space, memory: &Memory, blocks: &[Block]) -> Result<Answer<Vec<PutOutcome>>, Error> {
        let shared = self.shared()?;
        check_memory(shared, memory)?;
        let all = u8::MAX >> (8 - shared.shape.parts().len());
        for block in blocks {
            let parts = block.parts & all;
            let known = shared.shape.parts().len();
            if parts == 0 || block.parts != u8::MAX && block.parts != parts {
                let parts = block.parts;
                return Err(StoreError::NoSuchPart { parts, known }.into());
            }
            check_bounds(memory, block.offset, bytes_of(&shared.shape, parts))?;
        }
        let ending = Arc::new(Ending::default());
        let answer = Answer {
            shared: self.inner.shared.clone(),
            ending: ending.clone(),
        };
        let mut writes: Vec<(usize, usize, Write)> = Vec::new();
        {
            let mut state = shared.lock();
            let now = shared.now();
            state.given += 1;
            let call = state.given;
            let mut outcomes = vec![PutOutcome::default(); blocks.len()];
            for (nth, block) in blocks.iter().enumerate() {
                let parent = match block.parent {
                    Parent::Is(parent) => Some(parent),
                    Parent::Before => nth.checked_sub(1).map(|before| blocks[before].id),
                    Parent::None => None,
                };
                let mut taken = false;
                for tier in 0..state.tiers.len() {
                    let through = state.tiers[tier].write == WriteTo::Through;
                    if tier > 0 && !through && taken {
                        continue;
                    }
                    match state.tiers[tier]
                        .shelf
                        .put(space.tenant, block.id, parent, block.parts & all, now)
                    {
                        Ok(ShelfPut::AlreadyThere) => {
                            outcomes[nth].tiers |= 1 << tier;
                            taken = true;
                        }
                        Ok(ShelfPut::Write(write)) => {
                            taken = true;
                            state.putting.insert((tier, write.put), (call, nth));
                            writes.push((tier, nth, write));
                        }
                        Err(refused) => outcomes[nth].why = Some(refused.into()),
                    }
                }
            }
            let left = writes.len();
            state.puts.insert(call, PutCall { outcomes, left, ending });
            shared.end_put(&mut state, call);
        }
        self.write(shared, memory, blocks, writes);
        Ok(answer)
    }

    /// Carries out what the shelves have found places for: files first, because their disk works while memory is copied and summed.
    fn write(&self, shared: &Arc<Shared>, memory: &Memory, blocks: &[Block], mut writes: Vec<(usize, usize, Write)>) {
        let all = u8::MAX >> (8 - shared.shape.parts().len());
        writes.sort_by_key(|(tier, _, write)| (std::cmp::Reverse(*tier), write.extent, write.offset));
        let mut posted = Vec::new();
        let mut copies = Vec::new();
        for group in writes.chunk_by(|(a, _, x), (b, _, y)| (a, x.extent) == (b, y.extent)) {
            let (tier, _, first) = &group[0];
            let (data, is_slab) = {
                let state = shared.lock();
                let tier = &state.tiers[*tier];
                (tier.data(first.extent).clone(), tier.slab().is_some())
            };
            if is_slab {
                copies.push((data, group));
                continue;
            }
            let near = spans(group.iter().map(|(_, nth, write)| (blocks[*nth].offset, write.length)));
            let far = spans(group.iter().map(|(_, _, write)| (write.offset, write.length)));
            posted.push((group, shared.post(memory, near, &data, far, first.commit)));
        }
        let mut sums: Vec<Option<Sealed>> = vec![None; blocks.len()];
        for (slab, group) in copies {
            for (_, nth, write) in group {
                let block = &blocks[*nth];
                let sealed = shared.copy_sealed(
                    &slab,
                    write.offset,
                    memory,
                    block.offset,
                    block.parts & all,
                    write.open.clone(),
                );
                sums[*nth] = sealed.as_ref().ok().cloned();
                let mut state = shared.lock();
                let write = Write {
                    open: write.open.clone(),
                    ..*write
                };
                shared.end_copy(&mut state, write, sealed);
            }
        }
        for (group, transfer) in posted {
            let mut puts = Vec::with_capacity(group.len());
            let mut failed = Vec::new();
            for (tier, nth, write) in group {
                let block = &blocks[*nth];
                let sealed = match &sums[*nth] {
                    Some(sealed) => Ok(sealed.clone()),
                    None => shared.seal_from(write.open.clone(), memory, block.offset, block.parts & all),
                };
                match sealed {
                    Ok(sealed) => {
                        sums[*nth] = Some(sealed.clone());
                        puts.push((write.put, sealed));
                    }
                    Err(trouble) => failed.push((*tier, write.put, trouble)),
                }
            }
            let tier = group[0].0;
            let mut state = shared.lock();
            let now = shared.now();
            match transfer {
                Ok(transfer) => {
                    // What could not be summed stays where it was put, without a record.
                    if !failed.is_empty() {
                        drop(state);
                        let _ = transfer.wait();
                        state = shared.lock();
                    }
                    shared.fly(&mut state, transfer, Cargo::Payload { tier, puts });
                }
                Err(trouble) => {
                    for (put, _) in puts {
                        state.tiers[tier].shelf.on_written(put, Err(trouble), now);
                    }
                }
            }
            for (tier, put, _) in failed {
                state.tiers[tier].shelf.abandon(put);
            }
        }
        shared.turn();
    }

    /// Reads blocks into this memory, each whole at its offset. A miss says nothing of why: the block is nowhere, or what was there was not what was put.
    pub fn get(&self, memory: &Memory, wanted: &[Wanted]) -> Result<Answer<Vec<GetOutcome>>, Error> {
        let shared = self.shared()?;
        check_memory(shared, memory)?;
        for wanted in wanted {
            check_bounds(memory, wanted.offset, shared.block_bytes.into())?;
        }
        let ending = Arc::new(Ending::default());
        let answer = Answer {
            shared: self.inner.shared.clone(),
            ending: ending.clone(),
        };
        if wanted.is_empty() {
            ending.end_and_wake(Ok(Vec::new()));
            return Ok(answer);
        }
        let (call, slab_reads) = {
            let mut state = shared.lock();
            let now = shared.now();
            state.given += 1;
            let call = state.given;
            let mut slab_reads = Vec::new();
            let mut elsewhere = Vec::new();
            let slab = state.tiers[0].slab().cloned();
            for (nth, wanted) in wanted.iter().enumerate() {
                match slab
                    .is_some()
                    .then(|| state.tiers[0].shelf.read(&wanted.id, now))
                    .flatten()
                {
                    Some(read) => slab_reads.push((nth, read)),
                    None => elsewhere.push(nth),
                }
            }
            let get = GetCall {
                memory: memory.clone(),
                wanted: wanted.to_vec(),
                outcomes: vec![GetOutcome::Miss; wanted.len()],
                left: wanted.len(),
                ending,
            };
            state.gets.insert(call, get);
            shared.look_in(&mut state, call, elsewhere, 0);
            (call, slab.map(|slab| (slab, slab_reads)))
        };
        if let Some((slab, reads)) = slab_reads {
            let copied: Vec<_> = reads
                .into_iter()
                .map(|(nth, read)| {
                    (
                        nth,
                        read,
                        copy_out(&slab, read.offset, memory, wanted[nth].offset, read.length),
                    )
                })
                .collect();
            let mut state = shared.lock();
            let now = shared.now();
            let mut again = Vec::new();
            for (nth, read, sum) in copied {
                match state.tiers[0].shelf.end_read(read.read, sum, now) {
                    Verdict::Right => shared.on_hit(&mut state, call, nth, 0, &read),
                    _ => {
                        state.touch(read.id);
                        again.push(nth);
                    }
                }
            }
            shared.look_in(&mut state, call, again, 1);
        }
        shared.turn();
        Ok(answer)
    }

    /// How many blocks of a chain, from the first on, are a hit: every part where its rule wants it. The blocks count as used.
    pub fn match_prefix(&self, chain: &[BlockId]) -> Result<usize, Error> {
        self.match_prefix_with(chain, Hint::default())
    }

    /// The same, with what is known of the request.
    pub fn match_prefix_with(&self, chain: &[BlockId], hint: Hint) -> Result<usize, Error> {
        let shared = self.shared()?;
        let mut state = shared.lock();
        let parts = |id: &BlockId| {
            let tiers = state.tiers.iter().map(|tier| tier.shelf.parts_of(id));
            tiers.into_iter().find(|parts| *parts != 0).unwrap_or(0)
        };
        let hit = shared.shape.hit(chain.iter().map(parts));
        for tier in &mut state.tiers {
            let here: Vec<BlockId> = chain[..hit]
                .iter()
                .copied()
                .filter(|id| tier.shelf.parts_of(id) != 0)
                .collect();
            tier.shelf.request(&here, hint);
        }
        Ok(hit)
    }

    /// In which tiers a block is, as bits.
    pub fn tiers_of(&self, id: &BlockId) -> Result<u8, Error> {
        let state = self.shared()?.lock();
        let there = state
            .tiers
            .iter()
            .enumerate()
            .filter(|(_, tier)| tier.shelf.parts_of(id) != 0);
        Ok(there.fold(0, |bits, (nth, _)| bits | 1 << nth))
    }

    /// Keeps the leading blocks of a chain that are there from leaving, for as long as the answer lives.
    pub fn hold(&self, chain: &[BlockId]) -> Result<Held, Error> {
        let shared = self.shared()?;
        let mut state = shared.lock();
        let is_there = |id: &&BlockId| state.tiers.iter().any(|tier| tier.shelf.parts_of(id) != 0);
        let count = chain.iter().take_while(is_there).count();
        let mut holds = Vec::with_capacity(state.tiers.len());
        for tier in &mut state.tiers {
            let here: Vec<BlockId> = chain[..count]
                .iter()
                .copied()
                .filter(|id| tier.shelf.parts_of(id) != 0)
                .collect();
            holds.push(tier.shelf.hold(&here).0);
        }
        Ok(Held {
            shared: self.inner.shared.clone(),
            holds,
            count,
        })
    }

    /// Removes blocks from all tiers, from the last to the first, unless they are held or others follow them; says how many are nowhere any more.
    pub fn evict(&self, chain: &[BlockId]) -> Result<usize, Error> {
        let shared = self.shared()?;
        let mut state = shared.lock();
        for id in chain.iter().rev() {
            for tier in state.tiers.iter_mut().rev() {
                tier.shelf.evict(*id);
            }
        }
        shared.pump(&mut state);
        let gone = |id: &&BlockId| state.tiers.iter().all(|tier| tier.shelf.parts_of(id) == 0);
        Ok(chain.iter().filter(gone).count())
    }

    /// Removes all that a tenant has, from every tier and for good; what is held stays, and is counted.
    pub fn purge(&self, tenant: &str) -> Result<Answer<Purged>, Error> {
        let shared = self.shared()?;
        let tenant = TenantKey::of(tenant);
        let ending = Arc::new(Ending::default());
        let mut state = shared.lock();
        state.given += 1;
        let call = state.given;
        let mut left = 0;
        for tier in 0..state.tiers.len() {
            let (purge, stay) = state.tiers[tier].shelf.purge(tenant);
            left += stay;
            state.purging.insert((tier, purge), call);
        }
        let purged = Purged {
            erased: 0,
            left,
            failed: None,
        };
        let tiers_left = state.tiers.len();
        let purge = PurgeCall {
            purged,
            tiers_left,
            ending: ending.clone(),
        };
        state.purges.insert(call, purge);
        shared.pump(&mut state);
        Ok(Answer {
            shared: self.inner.shared.clone(),
            ending,
        })
    }

    /// Begins to read blocks from files into memory; says of how many. It is a wish: nothing is answered, and what has no place is left.
    pub fn prefetch(&self, chain: &[BlockId]) -> Result<usize, Error> {
        let shared = self.shared()?;
        let mut state = shared.lock();
        let now = shared.now();
        let mut begun = 0;
        if state.tiers[0].slab().is_none() {
            return Ok(0);
        }
        for id in chain {
            let found = (1..state.tiers.len()).find(|tier| state.tiers[*tier].shelf.parts_of(id) != 0);
            let Some(from) = found.filter(|_| state.tiers[0].shelf.parts_of(id) == 0) else {
                continue;
            };
            let Some(read) = state.tiers[from].shelf.read(id, now) else {
                continue;
            };
            let put = state.tiers[0].shelf.put(read.tenant, *id, read.parent, read.parts, now);
            let Ok(ShelfPut::Write(write)) = put else {
                state.tiers[from].shelf.drop_read(read.read);
                continue;
            };
            let data = state.tiers[from].data(read.extent).clone();
            let slab = state.tiers[0].data(write.extent).clone();
            let (near, far) = (span(read.offset, read.length), span(write.offset, read.length));
            match shared.post(&data, near, &slab, far, false) {
                Ok(transfer) => {
                    begun += 1;
                    shared.fly(&mut state, transfer, Cargo::Up { from, read, write });
                }
                Err(_) => {
                    state.tiers[from].shelf.drop_read(read.read);
                    state.tiers[0].shelf.abandon(write.put);
                }
            }
        }
        Ok(begun)
    }

    /// What has come and gone since the last time, in order, and no more than `most` of it; see [`StoreBuilder::events`].
    pub fn take_events(&self, most: usize) -> Result<TakenEvents, Error> {
        Ok(self.shared()?.lock().told.take(most))
    }

    /// What it holds, what has happened, and which tier is set aside for what.
    pub fn stat(&self) -> Result<StoreStat, Error> {
        let shared = self.shared()?;
        let state = shared.lock();
        let tiers = state.tiers.iter().enumerate();
        let tiers = tiers
            .map(|(nth, tier)| TierStat::of(tier, state.hits.get(nth).copied().unwrap_or(0)))
            .collect();
        Ok(StoreStat {
            tiers,
            misses: state.misses,
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The thread is the parent's, and so is what is under way.
        let (Ok(shared), Ok(thread)) = (self.shared.get(), self.thread.get()) else {
            return;
        };
        let until = std::time::Instant::now() + FAREWELL;
        while !shared.is_idle() && std::time::Instant::now() < until {
            shared.turn();
            match shared.some_transfer() {
                Some(transfer) => drop(transfer.wait_for(Duration::from_millis(5))),
                None => shared.wait_for_members(Duration::from_millis(5)),
            }
        }
        shared.leave_members();
        shared.stopped.store(true, Ordering::Release);
        shared.bell.ring();
        let thread = thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
        shared.close();
    }
}

/// Keeps blocks from leaving while it lives.
#[derive(Debug)]
#[must_use = "blocks are held no longer than this lives"]
pub struct Held {
    shared: OfProcess<Arc<Shared>>,
    holds: Vec<Hold>,
    count: usize,
}

impl Held {
    /// How many blocks of the chain are held.
    pub fn count(&self) -> usize {
        self.count
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Ok(shared) = self.shared.get() {
            let mut state = shared.lock();
            for (tier, hold) in state.tiers.iter_mut().zip(&self.holds) {
                tier.shelf.release(*hold);
            }
        }
    }
}

fn bytes_of(shape: &Shape, parts: u8) -> u64 {
    let there = shape
        .parts()
        .iter()
        .enumerate()
        .filter(|(nth, _)| parts >> nth & 1 == 1);
    there.map(|(_, part)| u64::from(part.bytes)).sum()
}

fn check_memory(shared: &Arc<Shared>, memory: &Memory) -> Result<(), Error> {
    memory.check_owner(shared.agent.shared()?)?;
    match memory.inner.host_memory() {
        Some(_) => Ok(()),
        None => Err(StoreError::NotHostMemory.into()),
    }
}

fn check_bounds(memory: &Memory, offset: u64, bytes: u64) -> Result<(), StoreError> {
    let has = memory.len();
    match offset.checked_add(bytes) {
        Some(end) if end <= has => Ok(()),
        _ => Err(StoreError::Outside { offset, bytes, has }),
    }
}

/// One copy from the slab, with its checksum.
fn copy_out(slab: &Memory, offset: u64, to: &Memory, at: u64, length: u32) -> Result<u64, Trouble> {
    let (Some(slab), Some(to)) = (slab.inner.host_memory(), to.inner.host_memory()) else {
        return Err(Trouble::Refused);
    };
    let mut digest = weft_protocol::memory::Digest::default();
    let copied = to.copy_in(at, slab, offset, length as usize, &mut digest);
    copied.map(|()| digest.finish()).map_err(|_| Trouble::Refused)
}
