//! Collectives: a [`Communicator`] is one rank of a group of processes that call the same things in the same order.
//!
//! Collectives of one communicator run one after the other, in the order in which they were made; what is to overlap is
//! [grouped](Communicator::group), or made on communicators of its own ([`split`](Communicator::split)). Sends and receives go beside
//! them, and wait only for earlier ones to or from the same rank. Ranks on one host exchange
//! messages through an arena in shared memory, others through whatever paths their agents have.
//!
//! A call that fails fails on every rank, with an error that names the rank that is to blame, and the communicator is of no further
//! use: [`shrink`](Communicator::shrink) makes a new one of those that are left.

pub(crate) mod board;
mod bootstrap;
mod call;
mod choice;
#[cfg(test)]
mod conformance;
mod conversation;
mod device;
mod exchange;
mod failure;
mod inbox;
mod membership;
mod pending;
mod prepare;
mod quantized;
mod schedule;
mod seat;
mod state;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

use weft_fabric::fork::{Forked, OfProcess};
use weft_fabric::memory::HostMemory;
use weft_plan::{Rank, Time};
use weft_protocol::Memory as _;
use weft_protocol::group::{LONG_BYTES, View};

use crate::agent::Agent;
use crate::ending::Ending;
use crate::error::Error;
use crate::memory::{Memory, after};
use bootstrap::Listening;
use call::Described;
use inbox::{Inbox, Queued};
use state::{Ended, State};

pub use bootstrap::{JoinOptions, Member};
pub use call::Call;
pub use device::{DeviceCause, DeviceTeam, DeviceTeamOptions, NoTeam, Symmetric};
pub use failure::CollectiveFailed;
pub use membership::ShrinkOptions;
pub use pending::Pending;
pub use prepare::{CallError, Operator};
pub use quantized::QuantizedOptions;
pub use schedule::{Schedule, Way};

/// How long a thread whose call somebody else takes further sleeps before it looks whether it has to do so itself.
const TAKE_OVER: Duration = Duration::from_micros(500);

/// One rank of a group. Clones are the same rank.
///
/// When the last clone and the last handle of a call go while something is under way, it is given up, and the other ranks are told.
///
/// It belongs to the process that made it. In a forked child every call is [`Error::Forked`], and dropping it does nothing.
#[derive(Clone, Debug)]
pub struct Communicator {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    agent: Agent,
    rank: Rank,
    ranks: u32,
    options: JoinOptions,
    nothing: Memory,
    /// How many calls had ended well on all its ranks in the group that it is what is left of.
    inherited: OnceLock<u64>,
    member: OfProcess<Membership>,
}

/// What makes a rank one of its group, in the process that has joined it.
#[derive(Debug)]
struct Membership {
    board: Arc<Listening>,
    /// That of the group that this one was made of: ranks that were slower may still ask there what was agreed on.
    #[expect(dead_code, reason = "held for what its end does")]
    parent: Option<Arc<Listening>>,
    /// What quantised calls work in.
    quantized: Mutex<Option<Memory>>,
    state: Mutex<State>,
    inbox: Arc<Inbox>,
    /// Threads that take the calls further themselves.
    drivers: AtomicU32,
    stopping: AtomicBool,
    worker: OnceLock<Option<JoinHandle<()>>>,
}

/// The board of a group, and that of the group that it was made of.
type Boards = (Arc<Listening>, Option<Arc<Listening>>);

/// Bytes in host memory: of something registered, or of somebody else's.
#[derive(Clone, Debug)]
pub struct Part {
    held: Held,
    offset: u64,
    len: u64,
}

/// What keeps the bytes where they are while the part is in use.
#[derive(Clone, Debug)]
enum Held {
    Registered(Memory),
    Foreign(Arc<HostMemory>),
}

impl From<&Memory> for Part {
    fn from(memory: &Memory) -> Part {
        memory.part(0..memory.len())
    }
}

impl From<&Part> for Part {
    fn from(part: &Part) -> Part {
        part.clone()
    }
}

impl From<HostMemory> for Part {
    /// Memory that is not registered. Making it so for a single call would cost more than a small call does, and ranks on this host could
    /// not map foreign memory anyway.
    fn from(memory: HostMemory) -> Part {
        Part {
            len: memory.len(),
            held: Held::Foreign(Arc::new(memory)),
            offset: 0,
        }
    }
}

impl Memory {
    /// A part of the memory, for a collective.
    ///
    /// # Panics
    /// Where the range is not within the memory, or the memory is not host memory.
    pub fn part(&self, range: Range<u64>) -> Part {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "bytes {range:?} of {}",
            self.len()
        );
        assert!(
            self.inner.host_memory().is_some(),
            "collectives take host memory, and this is {}",
            self.place()
        );
        Part {
            held: Held::Registered(self.clone()),
            offset: range.start,
            len: range.end - range.start,
        }
    }
}

impl Part {
    /// `len` bytes from byte `at` of the part on, which has them.
    fn within(&self, at: u64, len: u64) -> Part {
        Part {
            held: self.held.clone(),
            offset: self.offset + at,
            len,
        }
    }

    /// Where its bytes are, for kernels.
    fn bytes(&self) -> (&HostMemory, u64) {
        (self.host(), self.offset)
    }

    /// No bytes of the same memory.
    fn nothing(&self) -> Part {
        Part { len: 0, ..self.clone() }
    }

    fn host(&self) -> &HostMemory {
        match &self.held {
            Held::Registered(memory) => memory.inner.host_memory().expect("parts are of host memory"),
            Held::Foreign(host) => host,
        }
    }

    /// Makes sure that other ranks can read it where it lies, where that is worth it.
    fn lend(&mut self, agent: &Agent, far: bool) -> Result<(), Error> {
        if let Held::Registered(memory) = &self.held {
            memory.check_owner(agent.shared()?)?;
        }
        if let (Held::Foreign(host), true) = (&self.held, far && self.len >= LONG_BYTES) {
            self.held = Held::Registered(agent.register_shared(host.clone())?);
        }
        match &self.held {
            Held::Registered(memory) if memory.is_lent() => Ok(()),
            Held::Registered(memory) => memory.lent().map(drop),
            Held::Foreign(_) => Ok(()),
        }
    }

    /// Where its bytes are in this process.
    fn addresses(&self) -> Range<usize> {
        let start = self.host().as_ptr() as usize + self.offset as usize;
        start..start + self.len as usize
    }

    /// Whether it lies `at` bytes into another part.
    fn begins_at(&self, other: &Part, at: Option<u64>) -> bool {
        let (own, whole) = (self.addresses(), other.addresses());
        let offset = at.and_then(|at| usize::try_from(at).ok());
        own.end <= whole.end && offset.and_then(|offset| whole.start.checked_add(offset)) == Some(own.start)
    }

    fn overlaps(&self, other: &Part) -> bool {
        let (a, b) = (self.addresses(), other.addresses());
        !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end
    }

    /// What an execution sees of it, and has in its stead. It has been lent before, where it can be.
    fn into_view(self) -> View {
        let Part { held, offset, len } = self;
        let (key, memory): (_, Arc<dyn weft_protocol::Memory>) = match held {
            Held::Registered(memory) => (memory.inner.lent.get().copied(), memory.inner),
            Held::Foreign(host) => (None, host),
        };
        View {
            memory,
            offset,
            len,
            key,
        }
    }
}

impl Communicator {
    pub fn rank(&self) -> Rank {
        self.inner.rank
    }
    /// How many ranks the group has.
    pub fn size(&self) -> u32 {
        self.inner.ranks
    }
    /// How many calls have ended well on this rank. It is also the number of the first that has not, as errors tell it.
    pub fn calls_ended(&self) -> Result<u64, Error> {
        Ok(self.inner.member()?.lock().ended_well())
    }
    /// In a group that is [what is left](Communicator::shrink) of another: how many calls of that one have ended well on every rank of
    /// this. Whoever has got further has results that others do not have.
    pub fn calls_ended_before(&self) -> Option<u64> {
        self.inner.inherited.get().copied()
    }
    pub fn agent(&self) -> &Agent {
        &self.inner.agent
    }

    fn default_deadline(&self) -> Time {
        self.inner.options.deadline.into()
    }
    fn nothing(&self) -> Part {
        self.inner.nothing.part(0..0)
    }

    /// Runs a call to its end, where nothing is under way that it would have to wait for.
    fn run_at_once(&self, call: &mut Described) -> Option<Result<(), Error>> {
        if call.is_pairwise() {
            return None;
        }
        let member = match self.inner.member() {
            Ok(member) => member,
            Err(forked) => return Some(Err(forked.into())),
        };
        let mut state = member.lock_if_free().filter(|state| state.has_no_call())?;
        let left = state.run(call);
        tell(state.take_ended(), state);
        Some(match left {
            Ok(None) => Ok(()),
            Ok(Some(outcome)) => self.see_through(&self.pending(outcome)),
            Err(error) => Err(error),
        })
    }

    /// Waits for the end of a call that is the caller's alone: one whose wait is interrupted is given up.
    fn see_through(&self, pending: &Pending) -> Result<(), Error> {
        let ended = pending.wait();
        if matches!(ended, Err(Error::Interrupted)) {
            let mut state = self.inner.member()?.lock();
            state.give_up();
            tell(state.take_ended(), state);
        }
        ended
    }

    fn start(&self, call: Described) -> Result<Pending, Error> {
        let pending = self.leave(call)?;
        self.inner.employ()?;
        Ok(pending)
    }

    /// Leaves a call to whoever takes it further.
    fn leave(&self, call: Described) -> Result<Pending, Error> {
        let outcome = Arc::new(Ending::default());
        let deadline = after(self.inner.agent.shared()?, call.deadline.into());
        let member = self.inner.member()?;
        member.inbox.push(Queued {
            call,
            outcome: outcome.clone(),
            deadline,
        });
        // Nobody takes anything further after the end.
        if member.inbox.is_closed() {
            member.stop();
        }
        Ok(self.pending(outcome))
    }

    fn pending(&self, outcome: Arc<Ending<()>>) -> Pending {
        Pending {
            group: self.inner.clone(),
            outcome,
        }
    }

    fn new(agent: Agent, state: State, boards: Boards, options: JoinOptions) -> Result<Communicator, Error> {
        let (board, parent) = boards;
        let nothing = agent.allocate(1)?;
        let inner = Inner {
            rank: state.rank,
            ranks: state.ranks,
            agent,
            options,
            nothing,
            inherited: OnceLock::new(),
            member: OfProcess::new(Membership {
                board,
                parent,
                quantized: Mutex::new(None),
                inbox: state.inbox(),
                state: Mutex::new(state),
                drivers: AtomicU32::new(0),
                stopping: AtomicBool::new(false),
                worker: OnceLock::new(),
            }),
        };
        let inner = Arc::new(inner);
        let mut world = inner.agent.shared()?.lock();
        world.groups.retain(|group| group.strong_count() > 0);
        world.groups.push(Arc::downgrade(&inner));
        drop(world);
        Ok(Communicator { inner })
    }
}

impl Inner {
    fn member(&self) -> Result<&Membership, Forked> {
        self.member.get()
    }

    /// The agent is being closed: gives up what is under way, tells the others, and takes on nothing more.
    pub(crate) fn stop(&self) {
        if let Ok(member) = self.member() {
            member.stop();
        }
    }

    /// Has a thread that takes calls further which nobody waits for.
    fn employ(self: &Arc<Inner>) -> Result<(), Forked> {
        self.member()?.worker.get_or_init(|| {
            let group = Arc::downgrade(self);
            let work = move || {
                while let Some(group) = group.upgrade() {
                    let member = group.member().ok();
                    let Some(member) = member.filter(|member| !member.stopping.load(Ordering::Relaxed)) else {
                        return;
                    };
                    member.work();
                }
            };
            let worker = std::thread::Builder::new().name("weft-group".to_owned());
            // Without the thread, calls go on whenever somebody waits for one.
            worker.spawn(work).ok()
        });
        Ok(())
    }
}

impl Membership {
    fn stop(&self) {
        // Whoever takes calls further sees this and lets go of the state.
        self.inbox.close();
        self.stopping.store(true, Ordering::Relaxed);
        let mut state = self.lock();
        state.stop();
        tell(state.take_ended(), state);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The state, unless somebody has it, who then also does what there is to do.
    fn lock_if_free(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Takes the calls further, unless somebody does.
    fn advance_if_free(&self) {
        if let Some(state) = self.lock_if_free() {
            advance(state);
        }
    }

    /// Takes the calls further until one of them has ended, or there is something else that the caller waits for.
    fn drive_until(&self, outcome: &Ending<()>, met: impl Fn() -> bool) {
        let _driving = Driving::begin(self);
        while !outcome.is_ended() && !met() {
            match self.lock_if_free() {
                Some(state) => advance(state),
                None => outcome.sleep(TAKE_OVER),
            }
        }
    }

    fn work(&self) {
        let stirs = self.inbox.stirs();
        let state = self.lock();
        if state.is_idle() || self.drivers.load(Ordering::Relaxed) > 0 {
            drop(state);
            // It looks up now and then, in case that the last handle is gone.
            return self.inbox.rest(stirs, Duration::from_millis(20));
        }
        advance(state);
    }
}

/// Takes the calls a step further.
fn advance(mut state: MutexGuard<'_, State>) {
    state.advance();
    tell(state.take_ended(), state);
}

/// Tells whoever waits for calls that they have ended, without the mutex: those who are woken may make the next call.
fn tell(ended: Vec<Ended>, state: MutexGuard<'_, State>) {
    drop(state);
    for (outcome, result) in ended {
        outcome.end_and_wake(result);
    }
}

/// A thread that takes the calls further itself, until it leaves, however it does.
struct Driving<'a>(&'a Membership);

impl Driving<'_> {
    fn begin(group: &Membership) -> Driving<'_> {
        group.drivers.fetch_add(1, Ordering::Relaxed);
        Driving(group)
    }
}

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        self.0.drivers.fetch_sub(1, Ordering::Relaxed);
        self.0.inbox.stir();
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.inbox.stir();
        let state = self.state.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        state.withdraw();
    }
}
