//! Objects in a bucket as places: a transport that has no peers.
//!
//! What is read of an object becomes requests for ranges of it, several at a time; what is written waits as a [draft](ObjectMemory) until a commit makes it the
//! object. The client is asynchronous and lives on one thread a bucket; that thread never touches anybody's memory: what it has received is put there by
//! whoever turns the agent, and what it sends it has a copy of. So an end is a fence at once, whatever the server does.
//!
//! ```no_run
//! use weft_fabric::object::{Bucket, BucketOptions, ObjectMemory, ObjectOptions};
//! let bucket = Bucket::connect("s3://blocks/models", &BucketOptions::default().endpoint("http://127.0.0.1:3900"))?;
//! let object = ObjectMemory::open(&bucket, "weights", ObjectOptions::sized(1 << 30))?;
//! # Ok::<(), weft_fabric::object::ObjectError>(())
//! ```

mod bucket;
mod credentials;
mod draft;
mod moving;
mod place;
mod told;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use object_store::multipart::PartId;
use weft_plan::{PlaceKind, Time};
use weft_protocol::{
    Body, Capabilities, Carriage, Done, Epoch, Failure, Grant, Loss, Memory, Op, OpId, PathId, PeerAddress, Progress,
    Refusal, Region, RegionKey, RegionTable, Signal, Transport,
};

use crate::Live;
use crate::clock::Clock;
use crate::fork::NotInherited;
use crate::here::{HerePaths, LOST};
use crate::memory::HostMemory;

use draft::Staging;
use moving::{Running, Work};

pub use bucket::{Asked, Bucket, BucketOptions, ListedObject, ObjectError, SecretKey};
pub use place::{ObjectMemory, ObjectOptions, PART_BYTES_MIN};

const NAME: &str = "object";
/// What one part of a move should carry: enough to be worth a request, few enough that several are under way.
const OP_BYTES_MAX: u64 = 4 << 20;
const INFLIGHT_MAX: usize = 64;
const RUNNING_MAX: usize = 256;
/// What is copied in one turn, so that nobody waits long for it.
const TURN_BYTES: u64 = 4 << 20;

/// How objects are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectHereOptions {
    /// Requests under way at a time.
    pub depth: usize,
    /// Memory for what has been written and not committed.
    pub staging_bytes: u64,
}

impl Default for ObjectHereOptions {
    fn default() -> ObjectHereOptions {
        ObjectHereOptions {
            depth: 16,
            staging_bytes: 256 << 20,
        }
    }
}

impl ObjectHereOptions {
    pub fn depth(self, depth: usize) -> ObjectHereOptions {
        ObjectHereOptions { depth, ..self }
    }
    pub fn staging_bytes(self, staging_bytes: u64) -> ObjectHereOptions {
        ObjectHereOptions { staging_bytes, ..self }
    }
}

/// What the thread of a bucket has to say.
enum Event {
    /// The bytes of a request, in pieces as they came.
    Received {
        number: u64,
        request: usize,
        ended: Result<Vec<Bytes>, Failure>,
    },
    PartSent {
        object: Arc<dyn Memory>,
        part: u64,
        generation: u64,
        ended: Result<PartId, Failure>,
    },
    Committed {
        number: u64,
        ended: Result<(), Failure>,
    },
}

/// Where it says so.
struct Inbox {
    events: Mutex<VecDeque<Event>>,
    bell: NotInherited<OwnedFd>,
}

impl Inbox {
    fn tell(&self, event: Event) {
        self.events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(event);
        let one = 1u64;
        // SAFETY: eight bytes are read from a live local; a counter that is full has been rung already.
        unsafe { libc::write(self.bell.as_raw_fd(), (&raw const one).cast(), 8) };
    }
    fn take(&self) -> Option<Event> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
    fn is_empty(&self) -> bool {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
    fn calm(&self) {
        let mut count = 0u64;
        // SAFETY: eight bytes are written to a live local; a counter that is empty is no error.
        unsafe { libc::read(self.bell.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inbox")
    }
}

/// The transport of an agent's objects. It has no peers.
#[derive(Debug)]
pub struct ObjectHere {
    capabilities: Capabilities,
    options: ObjectHereOptions,
    clock: Clock,
    table: RegionTable,
    paths: HerePaths,
    running: BTreeMap<u64, Running>,
    next_running: u64,
    /// Reads with requests left to make, and writes with bytes left to take, each in their order.
    asking: VecDeque<u64>,
    writing: VecDeque<u64>,
    /// Reads that servers have, and parts that are on their way to them.
    requests: usize,
    sending: usize,
    /// The next write has no memory before one of those has come there.
    waits_for_room: bool,
    inbox: Arc<Inbox>,
    staging: Staging,
    ready: Vec<Signal>,
    count: Counted,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    requests: u64,
    bytes_read: u64,
    bytes_written: u64,
    parts_sent: u64,
    commits: u64,
    failed: u64,
    in_flight_most: u64,
}

impl ObjectHere {
    /// Nobody is asked for anything before an object is registered and moved. The clock is the one that deadlines are of.
    pub fn start(epoch: Epoch, clock: Clock, options: ObjectHereOptions) -> io::Result<ObjectHere> {
        let cost = crate::cost_unmeasured(NAME);
        let carries = vec![
            Carriage::new(PlaceKind::Dram, PlaceKind::Object, cost, OP_BYTES_MAX),
            Carriage::new(PlaceKind::Object, PlaceKind::Dram, cost, OP_BYTES_MAX),
        ];
        let mut capabilities = Capabilities::new(NAME, PeerAddress(format!("{NAME}:here")), carries);
        capabilities.max_op_runs = 4096;
        capabilities.max_inflight_ops = INFLIGHT_MAX;
        Ok(ObjectHere {
            capabilities,
            options,
            clock,
            table: RegionTable::new(epoch),
            paths: HerePaths::default(),
            running: BTreeMap::new(),
            next_running: 0,
            asking: VecDeque::new(),
            writing: VecDeque::new(),
            requests: 0,
            sending: 0,
            waits_for_room: false,
            inbox: Arc::new(Inbox {
                events: Mutex::default(),
                bell: crate::bell::silent()?,
            }),
            staging: Staging::of(options.staging_bytes),
            ready: Vec::new(),
            count: Counted::default(),
        })
    }

    /// Takes an operation on, or says at once why not.
    fn accept(&mut self, path: PathId, op: &Op, now: Time) {
        let accepted = match &op.body {
            _ if now >= op.deadline => Err(Failure::Expired),
            Body::Move(part) => self.accept_move(part).map_err(Failure::from),
            Body::Commit(commit) => match self.table.lookup(&commit.region.key) {
                Err(refusal) => Err(refusal.into()),
                Ok(region) => match object_of(&*region.memory) {
                    // Memory has nothing to be committed.
                    None => return self.complete(path, op.id, Ok(Done::default())),
                    Some(object) if !object.is_writable() => Err(Refusal::NotWritable.into()),
                    Some(_) => Ok((Work::Commit(Arc::clone(&region.memory), None), [commit.region.key; 2])),
                },
            },
            Body::Message(_) | Body::Atomic(_) => Err(Refusal::Unsupported.into()),
        };
        let (work, uses) = match accepted {
            Ok(accepted) => accepted,
            Err(failure) => return self.complete(path, op.id, Err(failure)),
        };
        let number = self.next_running;
        self.next_running += 1;
        match &work {
            Work::Read(_) => self.asking.push_back(number),
            Work::Write(_) => self.writing.push_back(number),
            Work::Commit(..) => {}
        }
        let is_commit = matches!(work, Work::Commit(..));
        let running = Running {
            path,
            id: op.id,
            deadline: op.deadline,
            work,
            uses,
        };
        self.running.insert(number, running);
        if is_commit {
            self.advance_commit(number);
        }
    }

    /// Does what can be done now; tells whether there is more to do at once.
    fn pump(&mut self, now: Time) -> bool {
        let mut left = TURN_BYTES;
        while left > 0
            && let Some(&number) = self.writing.front()
        {
            match self.take_in(number, &mut left) {
                moving::TakenIn::More => {}
                // Where it has ended it is not in the queue any more.
                moving::TakenIn::Ended => self.writing.retain(|writing| *writing != number),
                // Parts are on their way, and make room when they have come there.
                moving::TakenIn::NoRoom => break,
            }
        }
        while self.requests < self.options.depth
            && let Some(&number) = self.asking.front()
        {
            if !self.ask_next(number, now) {
                self.asking.retain(|asking| *asking != number);
            }
        }
        left == 0 && !self.writing.is_empty()
    }

    /// Enters what the threads of buckets have said, as much as is copied in one turn; tells whether there was anything.
    fn take_events(&mut self) -> bool {
        let (mut any, mut left) = (false, TURN_BYTES);
        while left > 0
            && let Some(event) = self.inbox.take()
        {
            any = true;
            match event {
                Event::Received { number, request, ended } => {
                    self.requests -= 1;
                    left = left.saturating_sub(self.on_received(number, request, ended));
                }
                Event::PartSent {
                    object,
                    part,
                    generation,
                    ended,
                } => self.on_part_sent(&object, part, generation, ended),
                Event::Committed { number, ended } => self.on_committed(number, ended),
            }
        }
        any
    }

    /// An operation has come to its end.
    fn settle(&mut self, number: u64, outcome: Result<Done, Failure>) {
        let Some(running) = self.running.remove(&number) else {
            return;
        };
        running.stop();
        // What waited for a commit may go on.
        self.waits_for_room = false;
        self.asking.retain(|asking| *asking != number);
        self.writing.retain(|writing| *writing != number);
        self.count.failed += u64::from(outcome.is_err());
        let path = running.path;
        self.complete(path, running.id, outcome);
        if let (Ok(_), Some(arrival)) = (outcome, running.arrival()) {
            self.ready.push(Signal::Arrived { path, arrival });
        }
        self.tell_lost(path);
    }

    fn complete(&mut self, path: PathId, op: OpId, outcome: Result<Done, Failure>) {
        self.ready.push(Signal::Completed { path, op, outcome });
    }

    /// Says that a path has gone, once nothing is under way on it any more.
    fn tell_lost(&mut self, path: PathId) {
        let under_way = self.running.values().any(|running| running.path == path);
        self.paths.end(path, under_way, &mut self.ready);
    }

    fn stop_all(&mut self, failure: Failure, which: impl Fn(&Running) -> bool) {
        let found = self.running.iter().filter(|(_, running)| which(running));
        let found: Vec<u64> = found.map(|(number, _)| *number).collect();
        for number in found {
            self.settle(number, Err(failure));
        }
    }
}

pub(crate) fn object_of(memory: &dyn Memory) -> Option<&ObjectMemory> {
    memory.as_any().downcast_ref()
}

impl Transport for ObjectHere {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        if region.key.epoch != self.table.epoch() {
            return Err(Refusal::StaleEpoch);
        }
        let memory = region.memory.as_any();
        match memory.downcast_ref::<HostMemory>() {
            Some(host) => host.look_up_file(),
            None if object_of(&*region.memory).is_some() => {}
            None => return Err(Refusal::Unsupported),
        }
        if self.table.lookup(&region.key).is_err() {
            self.table.insert(region.clone());
        }
        Ok(Grant::default())
    }

    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        match self.table.remove(key) {
            Some(_) => {
                self.stop_all(Refusal::Released.into(), |running| running.uses.contains(key));
                Ok(Progress::Idle)
            }
            None => Err(self.table.lookup(key).err().unwrap_or(Refusal::UnknownKey)),
        }
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
        Ok(accepted)
    }

    fn cancel(&mut self, path: PathId, op: OpId, _now: Time) {
        let mut running = self.running.iter();
        let found = running.find(|(_, running)| (running.path, running.id) == (path, op));
        if let Some((&number, _)) = found {
            self.settle(number, Err(Failure::Cancelled));
        }
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        let any = self.take_events();
        if self.running.values().any(|running| now >= running.deadline) {
            self.stop_all(Failure::Expired, |running| now >= running.deadline);
        }
        let more = self.pump(now);
        signals.append(&mut self.ready);
        match any || more {
            true => Progress::Busy,
            false => Progress::Idle,
        }
    }
}

impl Live for ObjectHere {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.inbox.bell.as_fd()
    }

    fn next_timeout(&self) -> Option<Time> {
        let can_ask = !self.asking.is_empty() && self.requests < self.options.depth;
        let can_write = !self.writing.is_empty() && !self.waits_for_room;
        if !self.ready.is_empty() || can_ask || can_write {
            return Some(Time::ZERO);
        }
        self.running.values().map(|running| running.deadline).min()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let Counted {
            requests,
            bytes_read,
            bytes_written,
            parts_sent,
            commits,
            failed,
            in_flight_most,
        } = self.count;
        if self.next_running == 0 {
            return Vec::new();
        }
        vec![
            ("requests", requests),
            ("bytes_read", bytes_read),
            ("bytes_written", bytes_written),
            ("parts_sent", parts_sent),
            ("commits", commits),
            ("failed", failed),
            ("in_flight_most", in_flight_most),
            ("draft_bytes", self.staging.used()),
        ]
    }

    fn arm(&mut self) -> Progress {
        self.inbox.calm();
        match self.inbox.is_empty() {
            true => Progress::Idle,
            false => Progress::Busy,
        }
    }
}

impl Drop for ObjectHere {
    fn drop(&mut self) {
        self.running.values().for_each(Running::stop);
    }
}
