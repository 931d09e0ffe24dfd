//! Peers on the same host: memory that is mapped or copied by the initiator alone.
//!
//! The initiator's own threads carry out both reads and writes. Memory that Weft allocated is mapped from its owner; foreign memory
//! is copied by the kernel, process to process; where the kernel refuses, it goes through a ring that both ends share. The owner
//! stays passive, so a frozen one delays nobody, and the initiator's deadline and cancel are exact.
//!
//! A path is one socket. Keys are presented over it, and only the right one is answered with a descriptor or an address. What keeps
//! a region from being touched after its owner took it back is told in `ledger.rs`.
//!
//! Any process of the host can call, because the socket has a name and no file. Only callers of the same user, or of root, are let
//! in; agents of different users reach each other by another transport. And a caller is nobody until it has presented a key: it
//! cannot hold up a release, and of those that do not even introduce themselves only a few are kept.
//!
//! ```
//! use weft_fabric::shared_memory::{SharedMemory, SharedMemoryOptions};
//! use weft_fabric::Clock;
//! use weft_protocol::{Epoch, Transport};
//! let transport = SharedMemory::start(SharedMemoryOptions::default(), Epoch(1), Clock::start())?;
//! assert_eq!(transport.capabilities().address.transport(), "shared_memory");
//! # Ok::<(), weft_fabric::shared_memory::StartError>(())
//! ```

mod address;
mod atomics;
mod bouncer;
mod devices;
mod exchange;
mod foreign;
mod frame;
mod ledger;
mod moves;
mod path;
mod poller;
mod process;
mod ring;
mod socket;
mod target;
#[cfg(test)]
mod tests;
mod transport;
mod worker;

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use thiserror::Error;
use weft_plan::{LinkCost, Time};
use weft_protocol::{
    Capabilities, Carriage, Epoch, Failure, Loss, Memory, PathId, PeerAddress, RegionKey, RegionTable, Signal,
};

use crate::Clock;
use crate::cuda::Devices;
use crate::fork::{NotInherited, Origin};
use crate::memory::{MemoryError, Seen};
use devices::InFlight;
use ledger::{Entry, Hazard, HazardView, Ledger};
use path::Path;
use poller::{Poller, Watch};
use process::Process;
use socket::Socket;
use target::BorrowedMapping;
use worker::Worker;

pub use address::host_identity;
pub use exchange::DescriptorExchange;
pub(crate) use frame::check as check_frame;

/// How to move memory between processes of one host.
#[derive(Clone, Debug)]
pub struct SharedMemoryOptions {
    pub foreign: Foreign,
    /// What posts copy themselves between two polls, in the caller's thread; more waits for `poll`.
    pub inline_bytes_max: u64,
    /// What one call of `poll` copies before it returns.
    pub poll_bytes_max: u64,
    /// Share large copies with a helper thread.
    pub helper: bool,
    /// Paths at a time, those that others opened included.
    pub paths_max: usize,
    /// How long a new path may take until both ends have introduced themselves.
    pub handshake_max: Time,
    /// What peers are told of the speed of this transport.
    pub cost: LinkCost,
    /// How long a worker stays on a GPU after a copy, for the next one, once several have followed each other as soon. Zero: never.
    pub gpu_stay: Duration,
}

impl Default for SharedMemoryOptions {
    fn default() -> SharedMemoryOptions {
        SharedMemoryOptions {
            foreign: Foreign::Auto,
            inline_bytes_max: 256 << 10,
            poll_bytes_max: 4 << 20,
            helper: true,
            paths_max: 4096,
            handshake_max: Time::from_secs(5),
            cost: crate::cost_unmeasured(address::NAME),
            gpu_stay: weft_gpu::STAY,
        }
    }
}

/// How to reach memory that Weft did not allocate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Foreign {
    /// By the kernel's copy between processes; through the ring once it has refused.
    #[default]
    Auto,
    /// By the kernel's copy only.
    ProcessVm,
    /// Through the ring only.
    Bounce,
}

/// Why the transport did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    #[error("{step} failed: {source}")]
    System { step: &'static str, source: io::Error },
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The transport between processes of one host.
#[derive(Debug)]
pub struct SharedMemory {
    /// First, so that they wait for what is under way before anything goes that it touches.
    devices: Devices,
    flights: Vec<InFlight>,
    origin: Origin,
    /// Whose turn it is to have devices copy.
    device_turn: usize,
    options: SharedMemoryOptions,
    capabilities: Capabilities,
    epoch: Epoch,
    clock: Clock,
    table: RegionTable,
    ledger: Ledger,
    /// The ledger entry of each region that is registered or still being left.
    entries: HashMap<RegionKey, Admitted>,
    worker: Worker,
    poller: Arc<Poller>,
    listener: NotInherited<OwnedFd>,
    /// Given up for a moment to turn a caller away when no descriptor is left.
    reserve: Option<OwnedFd>,
    /// In the order of their numbers, which only grow.
    paths: Vec<Path>,
    next_path: u32,
    /// Paths that have gone. Their peers may still be inside our memory: their threads until they close too, their devices until they say so or their
    /// processes have ended.
    lingering: Vec<Lingering>,
    /// What the next call of `poll` has to say.
    ready: Vec<Signal>,
    quick_polls: u32,
    /// What posts may still copy themselves before the next poll.
    inline_bytes: u64,
    /// A post has left work for whoever polls.
    posted: bool,

    /// Whose turn it is to copy.
    turn: usize,
    datagram: Box<[u8]>,
}

#[derive(Debug)]
struct Admitted {
    entry: Entry,
    memory: Arc<dyn Memory>,
    /// The owner wants it back; peers may still be inside.
    revoked: bool,
}

#[derive(Debug)]
struct Lingering {
    id: PathId,
    watch: Watch,
    _socket: Socket,
    process: Option<Process>,
    hazard: HazardView,
    /// Regions that the peer was given; it lingers only as long as there are any.
    given: HashSet<Entry>,
    /// The other end is closed too, so that no thread of the peer's is inside any more: only devices.
    closed: bool,
}

impl Lingering {
    fn is_inside(&self, entry: Entry) -> bool {
        match self.closed {
            true => self.hazard.is_inside_by_device(&HashSet::from([entry])),
            false => self.hazard.is_inside(entry),
        }
    }

    /// The other end has closed. `false` where there is nothing left to wait for. The socket of a process that was killed may close before the driver has stopped
    /// its devices; its descriptor tells when all its files have been closed, those of the driver among them.
    fn close(&mut self) -> bool {
        self.closed = true;
        self.watch.forget_socket();
        self.may_be_inside()
    }

    fn may_be_inside(&self) -> bool {
        if !self.closed {
            return true;
        }
        let lives = self.process.as_ref().is_some_and(|process| !process.has_ended());
        self.hazard.is_inside_by_device(&self.given) && lives
    }
}

fn capabilities(address: PeerAddress, cost: LinkCost) -> Capabilities {
    let mut carries = vec![Carriage::host(cost, 4 << 20)];
    if weft_gpu::is_likely() {
        carries.extend(crate::cuda::carriages());
    }
    let mut capabilities = Capabilities::new(address::NAME, address, carries);
    // Thousands of spans at both ends are one launch of a device.
    capabilities.max_op_runs = 4 * weft_gpu::PIECES_MAX;
    capabilities.max_inflight_ops = 256;
    capabilities.max_message_bytes = frame::MAX_MESSAGE_BYTES;
    capabilities.reliable_messages = true;
    capabilities.atomics = true;
    capabilities
}

impl SharedMemory {
    /// Starts listening for peers on this host. No thread is started.
    pub fn start(options: SharedMemoryOptions, epoch: Epoch, clock: Clock) -> Result<SharedMemory, StartError> {
        let failed = |step| move |source| StartError::System { step, source };
        let poller = Arc::new(Poller::new().map_err(failed("creating a poller"))?);
        let (name, listener) = listen(epoch).map_err(failed("listening"))?;
        poller
            .watch_listener(&listener)
            .map_err(failed("watching the listener"))?;
        let reserve = poller::reserve_descriptor().map_err(failed("reserving a descriptor"))?;
        let worker = Worker::new(Hazard::new()?, options.helper);
        let inline_bytes = options.inline_bytes_max;
        let devices = Devices::new(options.gpu_stay);
        Ok(SharedMemory {
            capabilities: capabilities(address::address(&name), options.cost),
            options,
            epoch,
            clock,
            table: RegionTable::new(epoch),
            ledger: Ledger::new()?,
            entries: HashMap::new(),
            worker,
            devices,
            flights: Vec::new(),
            origin: Origin::here(),
            device_turn: 0,
            poller,
            listener,
            reserve: Some(reserve),
            paths: Vec::new(),
            next_path: 0,
            lingering: Vec::new(),
            ready: Vec::new(),
            quick_polls: 0,
            inline_bytes,
            posted: false,
            turn: 0,
            datagram: vec![0; frame::MAX_DATAGRAM_BYTES].into_boxed_slice(),
        })
    }

    /// Asks for a peer's region to be mapped, to be borrowed later. [`SharedMemory::mapping`] tells how it went.
    pub fn request_map(&mut self, path: PathId, key: RegionKey) -> Result<(), Loss> {
        let path = self.path_mut(path).ok_or(Loss::Closed)?;
        if let Some(loss) = path.broken {
            return Err(loss);
        }
        if !path.targets.contains_key(&key) {
            path.wanted.insert(key, None);
            path.ask(key);
        }
        Ok(())
    }

    /// A peer's region, mapped read-only where it lies: its pages are shared, nothing is copied.
    ///
    /// `None` while the peer has not answered. A region that its owner has released, or that is not memory which Weft
    /// allocated, is refused. How long it may be used is agreed by a lease, elsewhere.
    pub fn mapping(&mut self, path: PathId, key: &RegionKey) -> Result<Option<Arc<dyn Seen>>, Failure> {
        let lost = Failure::PathLost {
            loss: Loss::Closed,
            fenced: true,
        };
        let path = self.path_mut(path).ok_or(lost)?;
        let ledger = path.ledger().ok_or(lost)?.clone();
        let Some(target) = path.targets.get(key) else {
            return match path.wanted.get(key).copied().flatten() {
                None => Ok(None),
                Some(failure) => {
                    path.wanted.remove(key);
                    Err(failure)
                }
            };
        };
        if !ledger.is_live(target.entry) {
            path.targets.remove(key);
            return Err(weft_protocol::Refusal::Released.into());
        }
        let borrowed = BorrowedMapping::new(target, ledger)?;
        path.wanted.remove(key);
        Ok(Some(Arc::new(borrowed)))
    }

    fn path_index(&self, path: PathId) -> Option<usize> {
        self.paths.binary_search_by_key(&path, |p| p.id).ok()
    }

    fn path_mut(&mut self, path: PathId) -> Option<&mut Path> {
        self.path_index(path).map(|at| &mut self.paths[at])
    }
}

/// Listens under a name that no other agent of this host has.
fn listen(epoch: Epoch) -> io::Result<(String, NotInherited<OwnedFd>)> {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    loop {
        let count = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("weft-{:x}-{}-{count}", epoch.0, std::process::id());
        match Socket::listen(&name) {
            Ok(listener) => return Ok((name, listener)),
            // A process of another namespace may have the same number.
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) && count < 1 << 20 => {}
            Err(error) => return Err(error),
        }
    }
}
