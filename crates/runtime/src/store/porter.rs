//! Errands: batches of blocks between an engine's memory and a store, on a thread of their own.
//!
//! An engine's scheduler may not wait, not even for a checksum. It hands a [`Porter`] errands, each under a number of its own choosing, and asks later which have
//! ended; what asks whether a block is there is answered at once, from the index. Reads go before writes. What is under way is bounded, what waits is bounded, and what does
//! not fit ends at once with nothing done. Blocks are called by the engine's keys.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weft_fabric::bell::Bell;
use weft_fabric::fork::OfProcess;

use super::{Answer, Block, BlockId, GetOutcome, Hint, Parent, PutOutcome, Space, Store, TierKind, Wanted};
use crate::error::Error;
use crate::memory::Memory;

/// A piece of an errand has at most so many bytes, so that a read does not stand behind a long write.
const SLICE_BYTES: u64 = 32 << 20;

/// How a porter is to be.
#[derive(Clone, Copy, Debug)]
pub struct PorterOptions {
    /// Bytes that wait at most. An errand that does not fit ends at once.
    pub queue_bytes: u64,
    /// Bytes under way at most; below what the store's tiers have under way, or they refuse.
    pub under_way_bytes: u64,
    /// Whether it remembers what blocks are called by, so that events can say so.
    pub names: bool,
}

impl Default for PorterOptions {
    fn default() -> PorterOptions {
        PorterOptions {
            queue_bytes: 4 << 30,
            under_way_bytes: 128 << 20,
            names: false,
        }
    }
}

/// A block of an errand: what the engine calls it, and where it is or goes to.
#[derive(Clone, Debug)]
pub struct BlockAt {
    /// What the engine calls it.
    pub key: Vec<u8>,
    /// Where it is, or goes to.
    pub memory: Memory,
    /// Its first byte there.
    pub offset: u64,
    /// Which one it follows, where that is another than the one before it in the errand; nothing follows an empty key.
    pub after: Option<Vec<u8>>,
}

/// What a porter can be asked for.
#[derive(Clone, Debug)]
pub enum Errand {
    Put(Vec<BlockAt>),
    Get(Vec<BlockAt>),
    /// Which of these are there?
    Find(Vec<Vec<u8>>),
    /// Remove these, unless they are held or others follow them.
    Evict(Vec<Vec<u8>>),
    /// A request has gone through these, from its head on; nothing is told of it.
    Use {
        keys: Vec<Vec<u8>>,
        hint: Hint,
    },
}

/// An errand that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct ErrandEnd {
    /// The caller's number of it.
    pub job: u64,
    /// For each block whether it is where it was to be: in the store, in memory, found, or gone.
    pub done: Vec<bool>,
    /// Bytes of the blocks that are.
    pub bytes: u64,
    /// Since it was handed over.
    pub took: Duration,
    /// Why not all is done, as far as that is known: the last reason of several.
    pub why: Option<String>,
}

/// A block has come or gone, by the engine's key.
pub type NamedEvent = (Vec<u8>, bool, usize, TierKind);

/// Carries errands out. With the last handle it ends what is under way, and what waits comes to nothing.
#[derive(Debug)]
pub struct Porter {
    shared: Arc<Shared>,
    thread: OfProcess<Mutex<Option<JoinHandle<()>>>>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    space: Space,
    options: PorterOptions,
    state: Mutex<State>,
    /// Somebody waits for everything to end.
    ended: Condvar,
    news: Bell,
    thread: Mutex<Option<std::thread::Thread>>,
    stopped: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Carried>,
    waiting_bytes: u64,
    /// Errands that the thread has taken and that have not ended.
    taken: usize,
    ended: Vec<ErrandEnd>,
    refused: u64,
    names: HashMap<BlockId, Vec<u8>>,
    unnamed: u64,
}

/// An errand that is carried out.
#[derive(Debug)]
struct Carried {
    job: u64,
    errand: Errand,
    ids: Vec<BlockId>,
    begun: Instant,
    next: usize,
    done: Vec<bool>,
    bytes: u64,
    why: Option<String>,
    under_way: Vec<Slice>,
}

/// Blocks of an errand whose answer is under way.
#[derive(Debug)]
struct Slice {
    blocks: Range<usize>,
    bytes: u64,
    answer: Asked,
}

#[derive(Debug)]
enum Asked {
    Put(Answer<Vec<PutOutcome>>),
    Get(Answer<Vec<GetOutcome>>),
}

impl Wake for Shared {
    fn wake(self: Arc<Shared>) {
        if let Some(thread) = &*lock(&self.thread) {
            thread.unpark();
        }
    }
}

impl Porter {
    /// For blocks of this space in this store.
    pub fn new(store: &Store, space: &Space, options: PorterOptions) -> Result<Porter, Error> {
        let shared = Arc::new(Shared {
            store: store.clone(),
            space: space.clone(),
            options,
            state: Mutex::new(State::default()),
            ended: Condvar::new(),
            news: Bell::new(std::iter::empty()).map_err(Error::system("making a porter's descriptor"))?,
            thread: Mutex::new(None),
            stopped: AtomicBool::new(false),
        });
        let thread = {
            let shared = shared.clone();
            let spawned = std::thread::Builder::new()
                .name("weft-porter".to_owned())
                .spawn(move || shared.run());
            spawned.map_err(Error::system("starting a porter's thread"))?
        };
        *lock(&shared.thread) = Some(thread.thread().clone());
        Ok(Porter {
            shared,
            thread: OfProcess::new(Mutex::new(Some(thread))),
        })
    }

    /// Hands an errand over. It ends under this number, and what does not fit ends with nothing done.
    pub fn send(&self, job: u64, errand: Errand) -> Result<(), Error> {
        self.thread.get()?;
        let bytes = self.shared.bytes_of(&errand);
        let carried = Carried::new(job, errand);
        let mut state = self.shared.lock();
        if self.shared.stopped.load(Ordering::Acquire) || state.waiting_bytes + bytes > self.shared.options.queue_bytes
        {
            state.refused += 1;
            let why = Some(format!("{} bytes wait, and no more fit", state.waiting_bytes));
            let ended = carried.end(why);
            self.shared.tell(&mut state, ended);
            return Ok(());
        }
        state.waiting_bytes += bytes;
        state.waiting.push_back(carried);
        drop(state);
        self.shared.clone().wake();
        Ok(())
    }

    /// Whether a block is there, by what the index says now.
    pub fn has(&self, key: &[u8]) -> Result<bool, Error> {
        let id = self.shared.space.key(key)?;
        let there = self.shared.store.tiers_of(&id)? != 0;
        if there && self.shared.options.names {
            let mut state = self.shared.lock();
            state.names.entry(id).or_insert_with(|| key.to_vec());
        }
        Ok(there)
    }

    /// What has ended since the last time.
    pub fn take_ended(&self) -> Vec<ErrandEnd> {
        // In a forked child nobody carries errands, and the parent's thread may have held the lock.
        if self.thread.get().is_err() {
            return Vec::new();
        }
        let mut state = self.shared.lock();
        if state.ended.is_empty() {
            return Vec::new();
        }
        // Whoever ends something from now on makes it readable again.
        self.shared.news.sleep(Some(Duration::ZERO));
        std::mem::take(&mut state.ended)
    }

    /// Becomes readable when something has ended that nobody has taken.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.news.as_fd()
    }

    /// Whether nothing waits and nothing is under way.
    pub fn is_idle(&self) -> bool {
        if self.thread.get().is_err() {
            return true;
        }
        let state = self.shared.lock();
        state.waiting.is_empty() && state.taken == 0
    }

    /// Errands that ended at once because they did not fit.
    pub fn refused(&self) -> u64 {
        if self.thread.get().is_err() {
            return 0;
        }
        self.shared.lock().refused
    }

    /// Waits until nothing waits and nothing is under way, at most so long; says whether that came about.
    pub fn drain(&self, most: Duration) -> bool {
        if self.thread.get().is_err() {
            return true;
        }
        let busy = |state: &mut State| !state.waiting.is_empty() || state.taken > 0;
        let waited = self.shared.ended.wait_timeout_while(self.shared.lock(), most, busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// What has come and gone, by the keys that were put or found through this porter; how much was lost; and how much could not be named so far, because
    /// it was there before. See [`super::StoreBuilder::events`].
    pub fn take_events(&self, most: usize) -> Result<(Vec<NamedEvent>, u64, u64), Error> {
        let taken = self.shared.store.take_events(most)?;
        let mut named = Vec::with_capacity(taken.events.len());
        let mut state = self.shared.lock();
        for event in taken.events {
            let Some(key) = state.names.get(&event.id).cloned() else {
                state.unnamed += 1;
                continue;
            };
            if !event.stored && self.shared.store.tiers_of(&event.id)? == 0 {
                state.names.remove(&event.id);
            }
            named.push((key, event.stored, event.tier, event.kind));
        }
        Ok((named, taken.lost, state.unnamed))
    }
}

impl Drop for Porter {
    fn drop(&mut self) {
        // In a forked child there is no such thread.
        let Ok(thread) = self.thread.get() else { return };
        self.shared.stopped.store(true, Ordering::Release);
        self.shared.clone().wake();
        if let Some(thread) = lock(thread).take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn bytes_of(&self, errand: &Errand) -> u64 {
        match errand {
            Errand::Put(records) | Errand::Get(records) => records.len() as u64 * self.store.block_bytes(),
            _ => 0,
        }
    }

    fn tell(&self, state: &mut State, ended: ErrandEnd) {
        state.ended.push(ended);
        self.news.ring();
    }

    fn run(self: Arc<Shared>) {
        let waker = Waker::from(self.clone());
        let mut context = Context::from_waker(&waker);
        // Reads before writes, each in their order.
        let mut carried: [VecDeque<Carried>; 2] = [VecDeque::new(), VecDeque::new()];
        let mut under_way = 0;
        loop {
            let stopped = self.stopped.load(Ordering::Acquire);
            for mut errand in self.take() {
                match errand.errand {
                    _ if stopped => self.end(errand, Some("the porter has stopped".to_owned())),
                    Errand::Put(_) => carried[1].push_back(errand),
                    Errand::Get(_) => carried[0].push_back(errand),
                    _ => {
                        let why = self.answer(&mut errand).err().map(|error| error.to_string());
                        self.end(errand, why);
                    }
                }
            }
            let mut moved = false;
            for queue in &mut carried {
                for errand in queue.iter_mut() {
                    let landed = errand.poll(&mut context);
                    under_way -= landed;
                    moved |= landed > 0;
                    while !stopped && errand.next < errand.done.len() && under_way < self.options.under_way_bytes {
                        under_way += self.begin(errand);
                        moved = true;
                    }
                }
                while let Some(nth) = queue.iter().position(|errand| errand.is_over(stopped)) {
                    let mut errand = queue.remove(nth).expect("it was just there");
                    let why = errand.why.take();
                    self.end(errand, why);
                }
            }
            match moved {
                // What has begun may have ended already.
                true => {}
                false if stopped && carried.iter().all(VecDeque::is_empty) => return,
                false => std::thread::park(),
            }
        }
    }

    fn take(&self) -> VecDeque<Carried> {
        let mut state = self.lock();
        let taken = std::mem::take(&mut state.waiting);
        state.taken += taken.len();
        taken
    }

    fn end(&self, carried: Carried, why: Option<String>) {
        let silent = matches!(carried.errand, Errand::Use { .. });
        let bytes = self.bytes_of(&carried.errand);
        let mut state = self.lock();
        state.taken -= 1;
        state.waiting_bytes -= bytes;
        if self.options.names && matches!(carried.errand, Errand::Put(_)) {
            for (id, _) in carried.ids.iter().zip(&carried.done).filter(|(_, done)| !**done) {
                state.names.remove(id);
            }
        }
        if !silent {
            let ended = carried.end(why);
            self.tell(&mut state, ended);
        }
        self.ended.notify_all();
    }

    /// What needs no bytes.
    fn answer(&self, carried: &mut Carried) -> Result<(), Error> {
        match &carried.errand {
            Errand::Find(keys) => {
                for (key, done) in keys.iter().zip(&mut carried.done) {
                    *done = self.store.tiers_of(&self.space.key(key)?)? != 0;
                }
            }
            Errand::Evict(keys) => {
                let ids = self.ids(keys)?;
                self.store.evict(&ids)?;
                for (id, done) in ids.iter().zip(&mut carried.done) {
                    *done = self.store.tiers_of(id)? == 0;
                }
            }
            Errand::Use { keys, hint } => {
                let ids = self.ids(keys)?;
                self.store.match_prefix_with(&ids, *hint)?;
            }
            Errand::Put(_) | Errand::Get(_) => {}
        }
        Ok(())
    }

    fn ids(&self, keys: &[Vec<u8>]) -> Result<Vec<BlockId>, Error> {
        keys.iter().map(|key| self.space.key(key)).collect()
    }

    /// Begins with the next blocks of an errand that lie in one memory; says how many bytes are under way now that were not before.
    fn begin(&self, carried: &mut Carried) -> u64 {
        let from = carried.next;
        let begun = self.try_begin(carried);
        match begun {
            Ok(bytes) => bytes,
            Err(error) => {
                carried.why = Some(error.to_string());
                // These come to nothing; those after them may be better.
                carried.next = carried.next.max(from + 1);
                0
            }
        }
    }

    fn try_begin(&self, carried: &mut Carried) -> Result<u64, Error> {
        let (Errand::Put(records) | Errand::Get(records)) = &carried.errand else {
            return Ok(0);
        };
        if carried.ids.is_empty() {
            let keys = records.iter().map(|record| self.space.key(&record.key));
            match keys.collect() {
                Ok(ids) => carried.ids = ids,
                Err(error) => {
                    carried.next = records.len();
                    return Err(error);
                }
            }
        }
        let each = self.store.block_bytes();
        let memory = &records[carried.next].memory;
        let fits = usize::try_from(SLICE_BYTES / each).unwrap_or(usize::MAX).max(1);
        let alike = records[carried.next..].iter().take(fits);
        let count = alike
            .take_while(|record| Arc::ptr_eq(&record.memory.inner, &memory.inner))
            .count();
        let blocks = carried.next..carried.next + count;
        carried.next = blocks.end;
        let bytes = count as u64 * each;
        let answer = match &carried.errand {
            Errand::Put(_) => {
                let mut wanted = Vec::with_capacity(count);
                for nth in blocks.clone() {
                    let parent = match &records[nth].after {
                        None if nth == 0 => Parent::None,
                        None => Parent::Is(carried.ids[nth - 1]),
                        Some(key) if key.is_empty() => Parent::None,
                        Some(key) => Parent::Is(self.space.key(key)?),
                    };
                    let block = Block::new(carried.ids[nth], records[nth].offset);
                    wanted.push(Block { parent, ..block });
                }
                if self.options.names {
                    let mut state = self.lock();
                    for nth in blocks.clone() {
                        state.names.insert(carried.ids[nth], records[nth].key.clone());
                    }
                }
                Asked::Put(self.store.put(&self.space, memory, &wanted)?)
            }
            _ => {
                let wanted = |nth: usize| Wanted {
                    id: carried.ids[nth],
                    offset: records[nth].offset,
                };
                let wanted: Vec<Wanted> = blocks.clone().map(wanted).collect();
                Asked::Get(self.store.get(memory, &wanted)?)
            }
        };
        carried.under_way.push(Slice { blocks, bytes, answer });
        Ok(bytes)
    }
}

impl Carried {
    fn new(job: u64, errand: Errand) -> Carried {
        let count = match &errand {
            Errand::Put(records) | Errand::Get(records) => records.len(),
            Errand::Find(keys) | Errand::Evict(keys) => keys.len(),
            Errand::Use { .. } => 0,
        };
        Carried {
            job,
            errand,
            ids: Vec::new(),
            begun: Instant::now(),
            next: 0,
            done: vec![false; count],
            bytes: 0,
            why: None,
            under_way: Vec::new(),
        }
    }

    /// Takes in what has been answered; says how many bytes are no longer under way.
    fn poll(&mut self, context: &mut Context<'_>) -> u64 {
        let mut landed = 0;
        let mut left = Vec::new();
        for mut slice in std::mem::take(&mut self.under_way) {
            let done = match &mut slice.answer {
                Asked::Put(answer) => Pin::new(answer).poll(context).map(|said| {
                    said.map(|outcomes| {
                        let why = outcomes.iter().rev().find_map(|outcome| outcome.why);
                        let done = outcomes.iter().map(PutOutcome::is_there).collect::<Vec<_>>();
                        (done, why.map(|why| why.to_string()))
                    })
                }),
                Asked::Get(answer) => Pin::new(answer)
                    .poll(context)
                    .map(|said| said.map(|outcomes| (outcomes.iter().map(GetOutcome::is_hit).collect(), None))),
            };
            match done {
                Poll::Pending => {
                    left.push(slice);
                    continue;
                }
                Poll::Ready(Ok((done, why))) => {
                    let there = done.iter().filter(|done| **done).count() as u64;
                    self.bytes += slice.bytes / done.len().max(1) as u64 * there;
                    self.done[slice.blocks].copy_from_slice(&done);
                    self.why = why.or(self.why.take());
                }
                Poll::Ready(Err(error)) => self.why = Some(error.to_string()),
            }
            landed += slice.bytes;
        }
        self.under_way = left;
        landed
    }

    fn is_over(&self, stopped: bool) -> bool {
        self.under_way.is_empty() && (stopped || self.next == self.done.len())
    }

    fn end(self, why: Option<String>) -> ErrandEnd {
        let whole = self.done.iter().all(|done| *done);
        ErrandEnd {
            job: self.job,
            done: self.done,
            bytes: self.bytes,
            took: self.begun.elapsed(),
            why: why.filter(|_| !whole),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
