//! Teams whose kernels reach peers through a proxy: over shared memory, TCP or RDMA, by this process's agent.
//!
//! A kernel that includes `weft/device.cuh` puts, gets, signals and waits. For peers whose heap it cannot map it writes requests into a ring in host memory; a thread of [`ProxyTeam`] takes them out and posts
//! them as ordinary transfers and atomic operations, one-sidedly, into the peer's heap. What goes when, and why it ends, is decided by `weft_protocol::proxy`.
//!
//! The heaps of such a team are host memory that is pinned for the device. Nothing that the proxy does needs the device to have room for a kernel, so a kernel may fill the device and
//! wait; and what every transport carries, from and to, is host memory. A program without a GPU uses the same ring from its own threads, by a [`Caller`].

mod caller;
mod thread;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use weft_fabric::cuda::ring::RingLayout;
use weft_fabric::cuda::{Device, Layout, ProxiedTeam, RANKS_MAX, SIGNALS, TeamView};
use weft_fabric::fork::Origin;
use weft_fabric::memory::HostMemory;
use weft_protocol::HostBytes;
use weft_protocol::proxy::{Failure, Proxy, Shape};
use weft_protocol::region::Access;

use crate::agent::Agent;
use crate::error::Error;
use crate::memory::{Held, Memory};
use crate::peer::{Peer, Remote};

pub use caller::Caller;
pub use weft_protocol::proxy::{BadRequest, Failure as TeamFailure};

use caller::Claims;
use thread::Worker;

const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Who a team is, and what its ranks agree on.
#[derive(Clone, Debug)]
pub struct ProxyOptions {
    /// What the team is called: heaps are published under it, so that one agent can be in several teams.
    pub name: String,
    /// For each rank who it is: a connected peer, or nobody for those that are here. Those must follow each other.
    pub peers: Vec<Option<Peer>>,
    /// Bytes of every heap that are the application's; the same for all ranks.
    pub data_bytes: u64,
    /// How long a request may take, and a kernel waits. At most an hour.
    pub deadline: Duration,
    /// The device whose kernels ask. Without one, threads do, by [`ProxyTeam::caller`].
    pub device: Option<Arc<Device>>,
    /// For so long after the last request the proxy looks at the ring without a pause; a kernel cannot wake it. It turns the agent meanwhile.
    pub busy: Duration,
    /// Between two looks when nothing has been asked for that long.
    pub nap: Duration,
}

impl ProxyOptions {
    pub fn new(name: &str, peers: Vec<Option<Peer>>) -> ProxyOptions {
        ProxyOptions {
            name: name.to_owned(),
            peers,
            data_bytes: 0,
            deadline: Duration::from_secs(30),
            device: None,
            busy: Duration::from_millis(1),
            nap: Duration::from_micros(50),
        }
    }

    /// The ranks that are here.
    fn here(&self) -> Result<Range<usize>, Error> {
        let wrong = |why: &str| Err(Error::Formation(format!("team {:?}: {why}", self.name)));
        let (ranks, is_here) = (self.peers.len(), |rank: &usize| self.peers[*rank].is_none());
        if !(1..=RANKS_MAX).contains(&ranks) {
            return wrong(&format!("it has {ranks} ranks, and may have 1 to {RANKS_MAX}"));
        }
        let Some(first) = (0..ranks).find(is_here) else {
            return wrong("none of its ranks is here");
        };
        let here = first..(first..ranks).find(|rank| !is_here(rank)).unwrap_or(ranks);
        if (here.end..ranks).any(|rank| is_here(&rank)) {
            return wrong("the ranks that are here do not follow each other");
        }
        if self.deadline.is_zero() || self.deadline > DEADLINE_MAX {
            return wrong("its deadline is not between nothing and an hour");
        }
        Ok(here)
    }
}

/// A team that is over: make another. The first reason is told, with what is known of it.
#[derive(Clone, Debug)]
pub struct TeamFailed {
    pub team: String,
    pub failure: Failure,
    /// What the agent said, where it was the one to find out.
    pub cause: Option<Error>,
}

impl fmt::Display for TeamFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "team {:?} is over: {}", self.team, self.failure)?;
        match &self.cause {
            Some(cause) => write!(f, " ({cause})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for TeamFailed {}

/// The ring's memory: bytes for transfers, words for both sides to look at.
#[derive(Clone, Debug)]
struct Words {
    memory: Memory,
    host: Arc<HostMemory>,
}

impl Words {
    fn allocate(agent: &Agent, bytes: u64) -> Result<Words, Error> {
        let memory = agent.allocate(bytes as usize)?;
        match &memory.inner.memory {
            Held::Host(host) => Ok(Words {
                host: host.clone(),
                memory,
            }),
            Held::Other(_) => Err(Error::Formation("memory of an agent that is not the host's".to_owned())),
        }
    }
    fn load(&self, at: u64) -> u64 {
        self.host.read_word(at).expect("a word at a multiple of eight")
    }
    fn store(&self, at: u64, value: u64) {
        self.host.write_word(at, value).expect("a word at a multiple of eight");
    }
    fn read(&self, at: u64, into: &mut [u8]) {
        self.host.read(at, into);
    }
    fn write(&self, at: u64, from: &[u8]) {
        self.host.write(at, from);
    }
}

/// A peer behind the proxy, and its heap.
#[derive(Clone, Debug)]
struct Far {
    peer: Peer,
    heap: Remote,
}

/// What the thread and the handles share.
#[derive(Debug)]
struct State {
    /// Of all of it: a forked child has a copy of the tickets, and the very ring and heaps of its parent.
    origin: Origin,
    name: String,
    here: Range<usize>,
    ranks: usize,
    layout: Layout,
    deadline: Duration,
    ring: Words,
    heaps: Vec<Words>,
    stop: AtomicBool,
    abort: AtomicBool,
    failed: OnceLock<TeamFailed>,
}

impl State {
    fn failed(&self, failure: Failure, cause: Option<Error>) -> TeamFailed {
        TeamFailed {
            team: self.name.clone(),
            failure,
            cause,
        }
    }

    /// What a kernel, a caller or a peer has written of a failure.
    fn told(&self, nth: usize) -> Option<Failure> {
        let words = [
            self.heaps[nth].load(Layout::FAILED_AT),
            self.ring.load(RingLayout::failed(nth)),
        ];
        words.into_iter().find_map(Failure::of_word)
    }

    /// Writes a failure where kernels, callers and the host look for it. The first stays.
    fn tell(&self, failure: Failure) {
        for (nth, rank) in self.here.clone().enumerate() {
            let word = failure.word(rank as u32);
            for (memory, at) in [
                (&self.heaps[nth], Layout::FAILED_AT),
                (&self.ring, RingLayout::failed(nth)),
            ] {
                if memory.load(at) == 0 {
                    memory.store(at, word);
                }
            }
        }
    }

    fn check(&self) -> Result<(), Error> {
        self.origin.check()?;
        if let Some(failed) = self.failed.get() {
            return Err(Error::Team(Box::new(failed.clone())));
        }
        match (0..self.heaps.len()).find_map(|nth| self.told(nth)) {
            Some(failure) => Err(Error::Team(Box::new(self.failed(failure, None)))),
            None if self.abort.load(Ordering::Acquire) => {
                Err(Error::Team(Box::new(self.failed(Failure::Aborted, None))))
            }
            None => Ok(()),
        }
    }
}

/// Ranks of this process in a team with others, whom their kernels reach through a proxy: heaps, ring and the thread that serves it.
///
/// Every rank calls [`join`](ProxyTeam::join) with the same name and sizes. Before the team is dropped its kernels have ended, and the ranks have met in a last barrier: whoever drops it earlier
/// is lost to the others.
#[derive(Debug)]
pub struct ProxyTeam {
    agent: Agent,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
    device: Option<ProxiedTeam>,
    claims: Arc<Claims>,
}

impl ProxyTeam {
    /// Makes the heaps of the ranks that are here, and waits for those of the others, at most as long as the deadline is.
    pub fn join(agent: &Agent, options: ProxyOptions) -> Result<ProxyTeam, Error> {
        let here = options.here()?;
        let ranks = options.peers.len();
        let layout = Layout::of_host(options.data_bytes).map_err(|error| Error::Formation(error.to_string()))?;
        let ring = Words::allocate(agent, RingLayout::BYTES)?;
        let heaps = here.clone().map(|_| Words::allocate(agent, layout.bytes));
        let heaps = heaps.collect::<Result<Vec<Words>, Error>>()?;
        let device = match &options.device {
            None => None,
            Some(device) => {
                let hosts: Vec<_> = heaps.iter().map(|heap| heap.host.clone()).collect();
                let (who, what) = ((here.start, ranks), (options.deadline, options.data_bytes));
                let team = ProxiedTeam::new(device, who, what, &hosts, &ring.host);
                Some(team.map_err(|error| Error::Formation(error.to_string()))?)
            }
        };
        for (rank, heap) in here.clone().zip(&heaps) {
            agent.publish(&published(&options.name, rank), &heap.memory, Access::READ_WRITE)?;
        }
        let mut team = ProxyTeam {
            agent: agent.clone(),
            state: Arc::new(State {
                origin: Origin::here(),
                name: options.name.clone(),
                here: here.clone(),
                ranks,
                layout,
                deadline: options.deadline,
                ring,
                heaps,
                stop: AtomicBool::new(false),
                abort: AtomicBool::new(false),
                failed: OnceLock::new(),
            }),
            thread: None,
            device,
            claims: Arc::default(),
        };
        let mut far = Vec::with_capacity(ranks);
        for (rank, peer) in options.peers.iter().enumerate() {
            far.push(match peer {
                None => None,
                Some(peer) => {
                    let heap = peer.region(&published(&options.name, rank), options.deadline)?;
                    if heap.len() != layout.bytes {
                        let (found, needed) = (heap.len(), layout.bytes);
                        let why = format!("the heap of rank {rank} has {found} bytes, and those here have {needed}");
                        return Err(Error::Formation(why));
                    }
                    let peer = peer.clone();
                    Some(Far { peer, heap })
                }
            });
        }
        let core = Proxy::new(Shape {
            ranks: ranks as u32,
            here: here.start as u32..here.end as u32,
            heap_bytes: layout.bytes,
            inline_bytes: weft_fabric::cuda::ring::INLINE_BYTES,
            stage_bytes: weft_fabric::cuda::ring::STAGE_BYTES,
            slots: weft_fabric::cuda::ring::SLOTS,
            deadline: options.deadline.into(),
        });
        let worker = Worker::new(
            agent.clone(),
            team.state.clone(),
            far,
            core,
            (options.busy, options.nap),
        );
        let thread = std::thread::Builder::new()
            .name("weft-proxy".to_owned())
            .spawn(move || worker.run())
            .map_err(Error::system("starting the proxy"))?;
        team.thread = Some(thread);
        Ok(team)
    }

    pub fn name(&self) -> &str {
        &self.state.name
    }
    pub fn ranks(&self) -> usize {
        self.state.ranks
    }
    /// The ranks of this process.
    pub fn here(&self) -> Range<usize> {
        self.state.here.clone()
    }
    /// Where the application's part of every heap begins.
    pub fn data_at(&self) -> u64 {
        self.state.layout.data_at
    }
    /// Where one of the words for signals lies in every heap; none beyond the last.
    pub fn signal_at(&self, nth: u64) -> Option<u64> {
        (nth < SIGNALS).then(|| self.state.layout.signals_at + nth * 8)
    }
    /// The heap of a rank that is here: host memory, of which kernels and peers change any byte at any time.
    pub fn heap(&self, rank: usize) -> Result<&Memory, Error> {
        Ok(&self.state.heaps[self.nth(rank)?].memory)
    }

    /// What a kernel is passed for a rank that is here. The kernel must have ended before the team is dropped.
    pub fn view(&self, rank: usize) -> Result<TeamView, Error> {
        self.state.origin.check()?;
        let nth = self.nth(rank)?;
        let view = self.device.as_ref().and_then(|device| device.view(nth));
        view.ok_or_else(|| Error::Formation(format!("team {:?} has no device", self.state.name)))
    }

    /// The calls of `weft/device.cuh` for a thread of the host, in a team without a device.
    pub fn caller(&self, rank: usize) -> Result<Caller, Error> {
        self.state.origin.check()?;
        let nth = self.nth(rank)?;
        match self.device {
            Some(_) => Err(Error::Formation(format!(
                "team {:?} is asked by kernels, and slots are claimed on their device",
                self.state.name
            ))),
            None => Ok(Caller::new(self.state.clone(), self.claims.clone(), nth)),
        }
    }

    /// Ends all waits of the ranks that are here; the others are told. Nothing can be asked of the team afterwards. In a forked child it does nothing.
    pub fn abort(&self) {
        if !self.state.origin.is_here() {
            return;
        }
        self.state.abort.store(true, Ordering::Release);
        for nth in 0..self.state.heaps.len() {
            self.state.ring.store(RingLayout::abort(nth), 1);
        }
    }

    /// Why the team is over, if it is. What is on a stream may still fail: whoever wants to know of a kernel waits for its stream first.
    pub fn check(&self) -> Result<(), Error> {
        self.state.check()
    }

    fn nth(&self, rank: usize) -> Result<usize, Error> {
        let nth = rank.checked_sub(self.state.here.start);
        nth.filter(|nth| *nth < self.state.heaps.len())
            .ok_or_else(|| Error::Formation(format!("rank {rank} of team {:?} is not here", self.state.name)))
    }
}

impl Drop for ProxyTeam {
    fn drop(&mut self) {
        if !self.state.origin.is_here() {
            // A forked child has neither the thread nor the device, and ends neither.
            std::mem::forget((self.thread.take(), self.device.take()));
            return;
        }
        for nth in 0..self.state.heaps.len() {
            self.state.ring.store(RingLayout::abort(nth), 1);
        }
        // Waits for kernels, which the thread may have to tell first that they wait in vain.
        drop(self.device.take());
        self.state.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed; there is nobody left to tell.
            let _ = thread.join();
        }
        for rank in self.state.here.clone() {
            // It may be gone with the agent already.
            let _ = self.agent.withdraw(&published(&self.state.name, rank));
        }
    }
}

/// Under which name a heap is published.
fn published(team: &str, rank: usize) -> String {
    format!("weft.heap/{team}/{rank}")
}
