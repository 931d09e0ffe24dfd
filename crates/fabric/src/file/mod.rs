//! Files and block devices as places: a transport that has no peers.
//!
//! A part of a move becomes requests of the kernel, by io_uring, or by plain calls on threads of its own where there is none. Nothing here waits: what the kernel
//! has is looked after until it has ended, and until then neither side of it is let go. So a cancel, a deadline and a release end an
//! operation when the kernel has let go of its memory, and not before; only reads that are [staged](FileOptions::staged), which the kernel has no memory of
//! the caller's for, end at once.
//!
//! ```
//! use weft_fabric::file::{FileMemory, FileOptions};
//! use weft_protocol::{HostBytes, Memory};
//! let folder = tempfile::tempdir()?;
//! let file = FileMemory::open(folder.path().join("spill"), FileOptions::sized(1 << 20))?;
//! file.write(4096, b"block");
//! assert_eq!(file.len(), 1 << 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod accept;
mod flights;
mod kernel;
mod layout;
mod place;
mod ring;
mod running;
mod staging;
mod support;
mod worker;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use weft_plan::{PlaceKind, Time};
use weft_protocol::{
    Capabilities, Carriage, Direction, Done, Epoch, Failure, Grant, Loss, Memory, Op, OpId, PathId, PeerAddress,
    Progress, Refusal, Region, RegionKey, RegionTable, Signal, Transport,
};

use crate::Live;
use crate::fork::NotInherited;
use crate::here::{HerePaths, LOST};
use crate::memory::HostMemory;

use kernel::{Ended, Kernel, Target};
use layout::{Layout, REQUEST_BYTES_MAX, Request};
use running::{Flight, Flown, Moving, Running, Work};
use staging::Staging;

pub use kernel::{Means, NoRing};
pub use place::{Alignment, Direct, FileError, FileMemory, FileOptions, NoDirect};
pub use support::{DirectorySupport, Support};

const NAME: &str = "file";
/// What one part should carry: enough requests to fill the queue by a few parts, few enough that sums are taken while others move.
const OP_BYTES_MAX: u64 = 1 << 20;
const INFLIGHT_MAX: usize = 64;
const RUNNING_MAX: usize = 256;
/// How long a transport that goes waits for what the kernel has. What has not come back by then keeps its memory for ever.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// How files are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileHereOptions {
    pub means: Means,
    /// Requests that the kernel has at a time.
    pub depth: usize,
    /// Host memory that is registered with the ring at most, which pins it. The system's own limit may be lower.
    pub registered_bytes: u64,
    /// Memory for what has to be staged.
    pub staging_bytes: u64,
}

impl Default for FileHereOptions {
    fn default() -> FileHereOptions {
        FileHereOptions {
            means: Means::Auto,
            depth: 64,
            registered_bytes: 64 << 20,
            staging_bytes: 8 << 20,
        }
    }
}

impl FileHereOptions {
    pub fn means(self, means: Means) -> FileHereOptions {
        FileHereOptions { means, ..self }
    }
    pub fn depth(self, depth: usize) -> FileHereOptions {
        FileHereOptions { depth, ..self }
    }
    pub fn registered_bytes(self, registered_bytes: u64) -> FileHereOptions {
        FileHereOptions {
            registered_bytes,
            ..self
        }
    }
    pub fn staging_bytes(self, staging_bytes: u64) -> FileHereOptions {
        FileHereOptions { staging_bytes, ..self }
    }
}

/// The transport of an agent's own files. It has no peers.
#[derive(Debug)]
pub struct FileHere {
    capabilities: Capabilities,
    options: FileHereOptions,
    epoch: Epoch,
    table: RegionTable,
    /// What its owner wants back, and the kernel is in the middle of.
    releasing: Vec<RegionKey>,
    /// Where the descriptors of registered files are registered with the ring, by slot.
    files: HashMap<u32, [Option<u32>; 2]>,
    /// Where host memory is; none where it could not be.
    buffers: HashMap<u32, Option<(u16, u64)>>,
    buffer_of_staging: Option<Option<u16>>,
    /// From the first file on.
    kernel: Option<Kernel>,
    no_ring: Option<NoRing>,
    /// Beside a ring, for files that it is not right for.
    threads: Option<Kernel>,
    paths: HerePaths,
    running: BTreeMap<u64, Running>,
    next_running: u64,
    /// Operations with something left to begin, in their order.
    queue: VecDeque<u64>,
    flights: Vec<Flight>,
    free_flights: Vec<u32>,
    /// Requests that the kernel had no room for.
    again: VecDeque<u32>,
    staging: Staging,
    spare_layouts: Vec<Layout>,
    /// Writes whose memory is to be summed, now that the kernel has them.
    to_sum: Vec<u64>,
    ended: Vec<Ended>,
    ready: Vec<Signal>,
    event: NotInherited<OwnedFd>,
    count: Counted,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    requests: u64,
    pieces: u64,
    bytes_past: u64,
    bytes_cached: u64,
    bytes_staged: u64,
    continued: u64,
    retried: u64,
    registered_bytes: u64,
    commits: u64,
    in_flight_most: u64,
}

impl FileHere {
    /// Asks nothing of the kernel before a file is registered, unless it must be io_uring.
    pub fn start(epoch: Epoch, options: FileHereOptions) -> io::Result<FileHere> {
        let event = crate::bell::silent()?;
        let cost = crate::cost_unmeasured(NAME);
        let carries = vec![
            Carriage::new(PlaceKind::Dram, PlaceKind::File, cost, OP_BYTES_MAX),
            Carriage::new(PlaceKind::File, PlaceKind::Dram, cost, OP_BYTES_MAX),
        ];
        let mut capabilities = Capabilities::new(NAME, PeerAddress(format!("{NAME}:here")), carries);
        capabilities.max_op_runs = 4096;
        capabilities.max_inflight_ops = INFLIGHT_MAX;
        let mut here = FileHere {
            capabilities,
            options,
            epoch,
            table: RegionTable::new(epoch),
            releasing: Vec::new(),
            files: HashMap::new(),
            buffers: HashMap::new(),
            buffer_of_staging: None,
            kernel: None,
            no_ring: None,
            threads: None,
            paths: HerePaths::default(),
            running: BTreeMap::new(),
            next_running: 0,
            queue: VecDeque::new(),
            flights: Vec::new(),
            free_flights: Vec::new(),
            again: VecDeque::new(),
            staging: Staging::of(options.staging_bytes),
            spare_layouts: Vec::new(),
            to_sum: Vec::new(),
            ended: Vec::new(),
            ready: Vec::new(),
            event,
            count: Counted::default(),
        };
        if options.means == Means::Ring {
            here.start_kernel()?;
        }
        Ok(here)
    }

    /// Why it is threads that files are reached by, once that is known.
    pub fn no_ring(&self) -> Option<NoRing> {
        self.no_ring
    }

    fn start_kernel(&mut self) -> io::Result<()> {
        if self.kernel.is_none() {
            let (kernel, no_ring) = Kernel::start(self.options.means, self.options.depth, self.event.as_fd())?;
            (self.kernel, self.no_ring) = (Some(kernel), no_ring);
        }
        Ok(())
    }

    fn start_kernel_for(&mut self, file: &FileMemory) -> io::Result<()> {
        self.start_kernel()?;
        if self.goes_by_threads(file) && self.threads.is_none() {
            self.threads = Some(Kernel::threads(self.event.as_fd())?);
        }
        Ok(())
    }

    /// Whether a file is reached by threads although there is a ring.
    fn goes_by_threads(&self, file: &FileMemory) -> bool {
        file.is_of_fuse() && self.no_ring.is_none()
    }

    fn in_flight(&self) -> usize {
        self.flights.len() - self.free_flights.len()
    }

    fn complete(&mut self, path: PathId, op: OpId, outcome: Result<Done, Failure>) {
        self.ready.push(Signal::Completed { path, op, outcome });
    }

    /// Begins what there is room for.
    fn pump(&mut self, now: Time) {
        while let Some(flight) = self.again.pop_front() {
            if !self.ask(flight) {
                break;
            }
        }
        while let Some(&number) = self.queue.front() {
            let Some(running) = self.running.get_mut(&number).filter(|running| running.has_more()) else {
                self.queue.pop_front();
                continue;
            };
            if now >= running.deadline {
                self.queue.pop_front();
                self.stop(number, Failure::Expired);
                continue;
            }
            if self.flights.len() - self.free_flights.len() >= self.options.depth || !self.again.is_empty() {
                break;
            }
            if !self.begin_next(number) {
                break;
            }
        }
        if let Some(kernel) = &mut self.kernel {
            kernel.flush();
        }
        while let Some(number) = self.to_sum.pop() {
            if let Some(Running {
                work: Work::Move(moving),
                ..
            }) = self.running.get_mut(&number)
                && moving.handed_over.is_none()
            {
                moving.handed_over = moving.sum().ok();
            }
        }
    }

    /// Begins the next request of an operation; false where there is no room for it now.
    fn begin_next(&mut self, number: u64) -> bool {
        let Some(running) = self.running.get_mut(&number) else {
            return true;
        };
        let (act, request, staged, buffer) = match &mut running.work {
            Work::Move(moving) => {
                let request = moving.layout.requests[moving.next];
                let act = if moving.to_file() { Flown::Write } else { Flown::Read };
                let staged = match request.staged.then(|| self.staging.take()) {
                    Some(None) => return false,
                    taken => taken.flatten(),
                };
                moving.next += 1;
                let last = moving.next == moving.layout.requests.len();
                if last && moving.to_file() && moving.part.checksum {
                    self.to_sum.push(number);
                }
                (act, request, staged, moving.buffer)
            }
            Work::Commit(commit) => {
                let Some(step) = commit.next.take() else { return true };
                (Flown::Commit(step), Request::default(), None, None)
            }
        };
        let index = free_flight(&mut self.flights, &mut self.free_flights);
        let flight = &mut self.flights[index as usize];
        flight.of = number;
        (flight.act, flight.request, flight.done, flight.past) = (act, request, 0, request.past);
        (flight.staging, flight.buffer) = (staged.map(|(piece, _)| piece), None);
        (flight.first, flight.retries, flight.is_asked_to_stop) = (0, 0, false);
        flight.keeps = None;
        flight.memory.clear();
        running.open += 1;
        let mut refused = None;
        if let Work::Move(moving) = &running.work {
            let memory = moving.layout.memory(&request);
            match staged {
                Some((_, start)) => {
                    if act == Flown::Write {
                        refused = gather(moving.host(), memory, start.as_ptr()).err();
                    }
                    flight.memory.push(libc::iovec {
                        iov_base: start.as_ptr().cast(),
                        iov_len: request.len as usize,
                    });
                    self.count.bytes_staged += request.len;
                }
                None => {
                    let start = moving.host().as_ptr();
                    let stretches = memory.iter().map(|(at, len)| libc::iovec {
                        iov_base: start.wrapping_add(*at as usize).cast(),
                        iov_len: *len as usize,
                    });
                    flight.memory.extend(stretches);
                    flight.buffer = buffer;
                }
            }
            self.count.pieces += memory.len() as u64;
            match request.past {
                true => self.count.bytes_past += request.len,
                false => self.count.bytes_cached += request.len,
            }
        }
        if staged.is_some() {
            let buffer = self.staging_buffer();
            self.flights[index as usize].buffer = buffer;
        }
        self.count.requests += 1;
        self.count.in_flight_most = self.count.in_flight_most.max(self.in_flight() as u64);
        match refused {
            Some(refusal) => {
                self.fail(number, refusal.into());
                self.land(index);
            }
            None => {
                self.ask(index);
            }
        }
        true
    }

    /// Where the memory for what is staged is registered with the ring.
    fn staging_buffer(&mut self) -> Option<u16> {
        if self.buffer_of_staging.is_none() {
            let (memory, ring) = (self.staging.memory()?, self.kernel.as_mut()?.ring()?);
            // SAFETY: the memory is as old as this transport, and goes after the ring.
            let added = unsafe { ring.add_buffer(memory.as_ptr(), memory.len()) };
            self.buffer_of_staging = Some(added.ok());
        }
        self.buffer_of_staging.flatten()
    }

    /// Tells the end of an operation that has come to it.
    fn settle(&mut self, number: u64) {
        let Some(running) = self.running.get(&number) else {
            return;
        };
        if running.open > 0 || running.has_more() {
            return;
        }
        let Some(running) = self.running.remove(&number) else {
            return;
        };
        let whole = !running.incomplete
            && match &running.work {
                Work::Move(moving) => moving.next == moving.layout.requests.len(),
                Work::Commit(commit) => commit.next.is_none(),
            };
        let outcome = match (running.ending, &running.work) {
            (Some(failure), _) if failure == LOST || !whole => Err(failure),
            (_, Work::Commit(_)) => {
                self.count.commits += 1;
                Ok(Done::default())
            }
            (_, Work::Move(moving)) => moved(moving).map_err(Failure::from),
        };
        let arrival = match &running.work {
            Work::Move(moving) if moving.part.direction == Direction::Write => moving.part.arrival,
            _ => None,
        };
        let path = running.path;
        self.complete(path, running.id, outcome);
        if let (Ok(_), Some(arrival)) = (outcome, arrival) {
            self.ready.push(Signal::Arrived { path, arrival });
        }
        if let Work::Move(moving) = running.work
            && self.spare_layouts.len() < INFLIGHT_MAX
        {
            self.spare_layouts.push(moving.layout);
        }
        self.tell_lost(path);
    }

    /// Says that a path has gone, once nothing is under way on it any more.
    fn tell_lost(&mut self, path: PathId) {
        let under_way = self.running.values().any(|running| running.path == path);
        self.paths.end(path, under_way, &mut self.ready);
    }

    fn stop_all(&mut self, failure: Failure, which: impl Fn(&Running) -> bool) {
        let found: Vec<u64> = self
            .running
            .iter()
            .filter(|(_, running)| which(running))
            .map(|(number, _)| *number)
            .collect();
        for number in found {
            self.stop(number, failure);
        }
    }

    /// Enters what has come back from the kernel; tells whether anything has.
    fn reap(&mut self) -> bool {
        let Some(kernel) = &mut self.kernel else { return false };
        let mut ended = std::mem::take(&mut self.ended);
        kernel.reap(&mut ended);
        if let Some(threads) = &mut self.threads {
            threads.reap(&mut ended);
        }
        let any = !ended.is_empty();
        for Ended { token, result } in ended.drain(..) {
            self.on_ended(token as u32, result);
        }
        self.ended = ended;
        any
    }
}

fn free_flight(flights: &mut Vec<Flight>, free: &mut Vec<u32>) -> u32 {
    free.pop().unwrap_or_else(|| {
        flights.push(Flight::default());
        flights.len() as u32 - 1
    })
}

fn directory(naming: &place::Naming) -> Target {
    use std::os::fd::AsRawFd;
    Target {
        fd: naming.directory.as_raw_fd(),
        slot: None,
    }
}

/// Both checksums of a move that is done. What the kernel was given is summed twice: when it was handed over, and when it came back. A file that was read is summed where
/// its bytes landed; nobody else has seen them.
fn moved(moving: &Moving) -> Result<Done, Refusal> {
    if !moving.part.checksum {
        return Ok(Done::default());
    }
    let now = moving.sum()?;
    let host = moving.handed_over.unwrap_or(now);
    Ok(match moving.file_is_far {
        true => Done::moved(Some(now), Some(host)),
        false => Done::moved(Some(host), Some(now)),
    })
}

/// Copies pieces of memory to where they follow each other.
fn gather(host: &HostMemory, memory: &[(u64, u64)], mut to: *mut u8) -> Result<(), Refusal> {
    for (at, len) in memory {
        // SAFETY: as many bytes as the request has, which a piece of the staging memory holds.
        unsafe { host.take(*at, to, *len as usize) }?;
        to = to.wrapping_add(*len as usize);
    }
    Ok(())
}

fn scatter(host: &HostMemory, memory: &[(u64, u64)], mut from: *const u8) -> Result<(), Refusal> {
    for (at, len) in memory {
        // SAFETY: as many bytes as the request has, which a piece of the staging memory holds.
        unsafe { host.put(*at, from, *len as usize) }?;
        from = from.wrapping_add(*len as usize);
    }
    Ok(())
}

impl Transport for FileHere {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        if region.key.epoch != self.epoch {
            return Err(Refusal::StaleEpoch);
        }
        let memory = region.memory.as_any();
        let file: Option<&FileMemory> = memory.downcast_ref();
        match (file, memory.downcast_ref::<HostMemory>()) {
            (Some(file), _) => self.start_kernel_for(file).map_err(|_| Refusal::Unsupported)?,
            (_, Some(host)) => host.look_up_file(),
            (None, None) => return Err(Refusal::Unsupported),
        }
        if self.table.lookup(&region.key).is_err() {
            if let (Some(file), Some(ring)) = (file, self.kernel.as_mut().and_then(Kernel::ring)) {
                let add = |fd| if fd < 0 { None } else { ring.add_file(fd) };
                self.files.insert(region.key.slot, file.descriptors().map(add));
            }
            self.table.insert(region.clone());
        }
        Ok(Grant::default())
    }

    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        if self.table.remove(key).is_some() {
            self.releasing.push(*key);
            self.stop_all(Refusal::Released.into(), |running| running.uses(key));
        }
        let Some(at) = self.releasing.iter().position(|known| known == key) else {
            return Err(self.table.lookup(key).err().unwrap_or(Refusal::UnknownKey));
        };
        if self.running.values().any(|running| running.uses(key)) {
            return Ok(Progress::Busy);
        }
        self.releasing.swap_remove(at);
        let (files, buffer) = (self.files.remove(&key.slot), self.buffers.remove(&key.slot));
        if let Some(ring) = self.kernel.as_mut().and_then(Kernel::ring) {
            files
                .into_iter()
                .flatten()
                .flatten()
                .for_each(|slot| ring.remove_file(slot));
            if let Some(Some((buffer, len))) = buffer {
                ring.remove_buffer(buffer);
                self.count.registered_bytes -= len;
            }
        }
        Ok(Progress::Idle)
    }

    fn open(&mut self, peer: &PeerAddress, _now: Time) -> Result<PathId, Loss> {
        self.paths.open(peer, &self.capabilities.address, &mut self.ready)
    }

    fn vouch(&mut self, _path: PathId) {}

    fn close(&mut self, path: PathId) {
        if self.paths.close(path) {
            self.stop_all(LOST, |running| running.path == path);
            self.tell_lost(path);
        }
    }

    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        if !self.paths.is_open(path) {
            return Err(Loss::Closed);
        }
        let held = self.running.values().filter(|running| running.path == path).count();
        let room = INFLIGHT_MAX
            .saturating_sub(held)
            .min(RUNNING_MAX.saturating_sub(self.running.len()));
        let accepted = ops.len().min(room);
        for op in &ops[..accepted] {
            self.accept(path, op, now);
        }
        self.pump(now);
        Ok(accepted)
    }

    fn cancel(&mut self, path: PathId, op: OpId, _now: Time) {
        let mut running = self.running.iter();
        let found = running.find(|(_, running)| (running.path, running.id) == (path, op));
        if let Some((&number, _)) = found {
            self.stop(number, Failure::Cancelled);
        }
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        let any = self.reap();
        if self.running.values().any(|r| r.ending.is_none() && now >= r.deadline) {
            self.stop_all(Failure::Expired, |r| r.ending.is_none() && now >= r.deadline);
        }
        if any || !self.queue.is_empty() || !self.again.is_empty() {
            self.pump(now);
        } else if let Some(kernel) = &mut self.kernel {
            kernel.flush();
        }
        signals.append(&mut self.ready);
        match any || !self.again.is_empty() {
            true => Progress::Busy,
            false => Progress::Idle,
        }
    }
}

impl Live for FileHere {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn next_timeout(&self) -> Option<Time> {
        if !self.ready.is_empty() || !self.again.is_empty() {
            return Some(Time::ZERO);
        }
        let open = self.running.values().filter(|running| running.ending.is_none());
        open.map(|running| running.deadline).min()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let Counted {
            requests,
            pieces,
            bytes_past,
            bytes_cached,
            bytes_staged,
            continued,
            retried,
            registered_bytes,
            commits,
            in_flight_most,
        } = self.count;
        if self.kernel.is_none() {
            return Vec::new();
        }
        vec![
            ("io_uring", u64::from(self.no_ring.is_none())),
            ("requests", requests),
            ("pieces", pieces),
            ("bytes_direct", bytes_past),
            ("bytes_cached", bytes_cached),
            ("bytes_staged", bytes_staged),
            ("continued", continued),
            ("retried", retried),
            ("registered_bytes", registered_bytes),
            ("commits", commits),
            ("in_flight_most", in_flight_most),
        ]
    }

    /// The event is rung by every completion, and silent again once somebody is about to sleep on it.
    fn arm(&mut self) -> Progress {
        let Some(kernel) = &mut self.kernel else {
            return Progress::Idle;
        };
        kernel::calm(self.event.as_fd());
        match kernel.has_ended() || self.threads.as_mut().is_some_and(Kernel::has_ended) {
            true => Progress::Busy,
            false => Progress::Idle,
        }
    }
}

impl Drop for FileHere {
    fn drop(&mut self) {
        self.stop_all(LOST, |_| true);
        let since = Instant::now();
        while self.in_flight() > 0 && since.elapsed() < LAST_WAIT {
            if !self.reap() {
                kernel::wait(self.event.as_fd(), Duration::from_millis(100));
                kernel::calm(self.event.as_fd());
            }
        }
        if self.in_flight() > 0 {
            // The kernel has memory that it may still write to. It stays where it is.
            std::mem::forget((self.kernel.take(), self.threads.take()));
            std::mem::forget(std::mem::take(&mut self.flights));
            std::mem::forget(std::mem::take(&mut self.running));
            self.staging.leak();
        }
    }
}

const _: () = assert!(OP_BYTES_MAX.is_multiple_of(place::PAGE) && REQUEST_BYTES_MAX.is_multiple_of(place::PAGE));
