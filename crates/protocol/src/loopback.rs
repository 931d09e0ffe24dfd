//! The reference transport: several endpoints in one process, joined by a mutex.
//!
//! It is the shortest honest reading of what [`Transport`] promises, and what the others are compared with. Nothing moves
//! outside [`Transport::poll`], and each poll moves a bounded number of bytes, so that a cancel, a deadline, a release or a full
//! queue meets operations that wait and operations that are half done, the same way every time.
//!
//! ```
//! use weft_plan::Time;
//! use weft_protocol::{Epoch, Loopback, Signal, Transport};
//! let network = Loopback::new();
//! let mut a = network.endpoint("a", Epoch(1));
//! let b = network.endpoint("b", Epoch(2));
//! let path = a.open(&b.capabilities().address, Time::ZERO).unwrap();
//! let mut signals = Vec::new();
//! a.poll(Time::ZERO, &mut signals);
//! assert!(matches!(signals[0], Signal::Opened { path: opened } if opened == path));
//! ```

mod placed;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use weft_plan::{Bandwidth, LinkCost, Picos, PlaceKind, Spans, Time};

use crate::atomic::Atomic;
use crate::error::{Failure, Loss, Refusal};
use crate::leg::Direction;
use crate::memory::{Digest, HostBytes};
use crate::region::{Access, Epoch, Region, RegionKey, RegionTable};
use crate::transport::{
    Body, Capabilities, Carriage, Done, Grant, Move, Op, OpId, PathId, PeerAddress, Progress, Signal, Transport,
};

use placed::bytes_of;

pub use placed::PlacedMemory;

const MAX_INFLIGHT_OPS: usize = 64;
const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// What one poll moves: less than the largest operation, so that operations are seen half done.
const BYTES_PER_POLL: u64 = 256 << 10;
const OPS_PER_POLL: usize = 16;
/// Signals that wait for an endpoint which does not poll. Beyond it, its peers' operations wait, until their deadline.
const MAX_INBOX: usize = 1024;

const COST: LinkCost = LinkCost {
    latency: Picos::from_ns(500),
    per_span: Picos::from_ns(20),
    bandwidth: Bandwidth::from_bytes_per_sec(5_000_000_000),
};

/// A network inside this process. Clones are the same network.
#[derive(Clone, Debug, Default)]
pub struct Loopback {
    network: Arc<Mutex<Network>>,
}

impl Loopback {
    pub fn new() -> Loopback {
        Loopback::default()
    }

    /// Joins the network under a name. A later endpoint of the same name takes it over, as a restarted agent does.
    pub fn endpoint(&self, name: &str, epoch: Epoch) -> LoopbackEndpoint {
        self.endpoint_carrying(name, epoch, vec![Carriage::host(COST, 1 << 20)])
    }

    /// The same, of a transport that moves other kinds of memory: [`PlacedMemory`] stands for what is not host memory.
    pub fn endpoint_carrying(&self, name: &str, epoch: Epoch, carries: Vec<Carriage>) -> LoopbackEndpoint {
        let mut network = lock(&self.network);
        let port = network.ports.len();
        network.ports.push(Port {
            table: RegionTable::new(epoch),
            carries: carries.iter().map(|c| (c.near, c.far)).collect(),
            paths: BTreeMap::new(),
            inbox: VecDeque::new(),
            next_path: 0,
            next_turn: PathId(0),
        });
        network.names.insert(name.to_string(), port);
        let address = PeerAddress(format!("loopback:{name}"));
        LoopbackEndpoint {
            network: Arc::clone(&self.network),
            port,
            scratch: vec![0; 64 << 10],
            capabilities: Capabilities {
                max_op_runs: 1024,
                max_inflight_ops: MAX_INFLIGHT_OPS,
                max_message_bytes: MAX_MESSAGE_BYTES,
                reliable_messages: true,
                awaits_vouching: true,
                atomics: carries.iter().any(|c| c.far == PlaceKind::Dram),
                ..Capabilities::new("loopback", address, carries)
            },
        }
    }
}

/// One end of a [`Loopback`] network. Dropping it is the death of its agent: its peers lose their paths.
#[derive(Debug)]
pub struct LoopbackEndpoint {
    network: Arc<Mutex<Network>>,
    port: usize,
    scratch: Vec<u8>,
    capabilities: Capabilities,
}

#[cfg(test)]
impl LoopbackEndpoint {
    /// The same under another name, as one of several transports that an agent has.
    pub(crate) fn called(mut self, transport: &'static str) -> LoopbackEndpoint {
        let Capabilities { name, address, .. } = &mut self.capabilities;
        *address = PeerAddress(format!("{transport}:{}", address.rest()));
        *name = transport;
        self
    }

    /// Serves nothing any more on the paths that there are, as a process that was stopped.
    pub(crate) fn freeze(&mut self) {
        let mut network = lock(&self.network);
        let paths = network.ports[self.port].paths.values_mut();
        paths.for_each(|path| path.vouched = false);
    }
}

impl Transport for LoopbackEndpoint {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        let mut network = lock(&self.network);
        let table = &mut network.ports[self.port].table;
        if region.key.epoch != table.epoch() {
            return Err(Refusal::StaleEpoch);
        }
        let kind = region.place.kind();
        if !self
            .capabilities
            .carries
            .iter()
            .any(|c| c.near == kind || c.far == kind)
        {
            return Err(Refusal::Unsupported);
        }
        table.insert(region.clone());
        Ok(Grant::default())
    }

    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        let mut network = lock(&self.network);
        let table = &mut network.ports[self.port].table;
        match table.remove(key) {
            // Peers are inside a region only while they hold the lock, and now this side holds it.
            Some(_) => Ok(Progress::Idle),
            None => match table.lookup(key) {
                Err(refusal) => Err(refusal),
                Ok(_) => Err(Refusal::UnknownKey),
            },
        }
    }

    fn open(&mut self, peer: &PeerAddress, _now: Time) -> Result<PathId, Loss> {
        if peer.transport() != self.capabilities.name {
            return Err(Loss::Unreachable);
        }
        let mut network = lock(&self.network);
        let near = network.ports[self.port].new_path_id();
        let Some(&far_port) = network.names.get(peer.rest()) else {
            network.ports[self.port].inbox.push_back(Signal::Lost {
                path: near,
                loss: Loss::Unreachable,
                fenced: true,
            });
            return Ok(near);
        };
        if far_port == self.port {
            // Nobody else is there: the path ends where it begins.
            network.ports[self.port].add_path(near, self.port, near);
            network.ports[self.port].inbox.push_back(Signal::Opened { path: near });
            return Ok(near);
        }
        let far = network.ports[far_port].new_path_id();
        network.ports[self.port].add_path(near, far_port, far);
        network.ports[far_port].add_path(far, self.port, near);
        network.ports[self.port].inbox.push_back(Signal::Opened { path: near });
        network.ports[far_port].inbox.push_back(Signal::Accepted { path: far });
        Ok(near)
    }

    fn vouch(&mut self, path: PathId) {
        if let Some(path) = lock(&self.network).ports[self.port].paths.get_mut(&path) {
            path.vouched = true;
        }
    }

    fn close(&mut self, path: PathId) {
        lock(&self.network).close(self.port, path);
    }

    fn post(&mut self, path: PathId, ops: &[Op], _now: Time) -> Result<usize, Loss> {
        let mut network = lock(&self.network);
        let state = network.ports[self.port].paths.get_mut(&path).ok_or(Loss::Closed)?;
        let room = MAX_INFLIGHT_OPS - state.queue.len();
        let accepted = ops.len().min(room);
        state.queue.extend(ops[..accepted].iter().cloned().map(Queued::new));
        Ok(accepted)
    }

    fn cancel(&mut self, path: PathId, op: OpId, _now: Time) {
        let mut network = lock(&self.network);
        let port = &mut network.ports[self.port];
        let Some(state) = port.paths.get_mut(&path) else { return };
        let Some(at) = state.queue.iter().position(|q| q.op.id == op) else {
            return;
        };
        state.queue.remove(at);
        port.inbox.push_back(Signal::Completed {
            path,
            op,
            outcome: Err(Failure::Cancelled),
        });
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        let mut network = lock(&self.network);
        let port = &mut network.ports[self.port];
        signals.extend(port.inbox.drain(..));
        port.expire(now, signals);
        let mut bytes_left = BYTES_PER_POLL;
        let mut idle_turns = 0;
        for _ in 0..OPS_PER_POLL {
            let Some(path) = network.ports[self.port].next_turn() else {
                break;
            };
            let moved = network.step(self.port, path, &mut bytes_left, &mut self.scratch, signals);
            // Paths whose far end does not poll make no progress; once all of them have had a turn, waiting is all there is.
            idle_turns = if moved { 0 } else { idle_turns + 1 };
            if bytes_left == 0 || idle_turns > network.ports[self.port].paths.len() {
                break;
            }
        }
        let port = &network.ports[self.port];
        let waiting = port.paths.values().any(|path| !path.queue.is_empty());
        if (waiting && idle_turns == 0) || !port.inbox.is_empty() {
            Progress::Busy
        } else {
            Progress::Idle
        }
    }
}

impl Drop for LoopbackEndpoint {
    fn drop(&mut self) {
        let mut network = lock(&self.network);
        let paths: Vec<PathId> = network.ports[self.port].paths.keys().copied().collect();
        for path in paths {
            network.close(self.port, path);
        }
        let port = self.port;
        network.names.retain(|_, held| *held != port);
    }
}

#[derive(Debug, Default)]
struct Network {
    ports: Vec<Port>,
    names: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct Port {
    table: RegionTable,
    carries: Vec<(PlaceKind, PlaceKind)>,
    paths: BTreeMap<PathId, Path>,
    inbox: VecDeque<Signal>,
    next_path: u32,
    /// The path from which the next turn is looked for, so that none starves.
    next_turn: PathId,
}

#[derive(Debug)]
struct Path {
    far_port: usize,
    far_path: PathId,
    /// This side lets the far side reach its regions.
    vouched: bool,
    queue: VecDeque<Queued>,
}

#[derive(Debug)]
struct Queued {
    op: Op,
    /// Bytes of a move that are in place.
    moved: u64,
    /// Of the near and of the far side, where checksums are asked for.
    sums: Option<[Digest; 2]>,
}

impl Queued {
    fn new(op: Op) -> Queued {
        let wants_sum = matches!(&op.body, Body::Move(part) if part.checksum);
        Queued {
            op,
            moved: 0,
            sums: wants_sum.then(Default::default),
        }
    }
}

impl Port {
    fn new_path_id(&mut self) -> PathId {
        let id = PathId(self.next_path);
        self.next_path += 1;
        id
    }

    fn add_path(&mut self, id: PathId, far_port: usize, far_path: PathId) {
        self.paths.insert(
            id,
            Path {
                far_port,
                far_path,
                vouched: false,
                queue: VecDeque::new(),
            },
        );
    }

    fn expire(&mut self, now: Time, signals: &mut Vec<Signal>) {
        for (&path, state) in &mut self.paths {
            state.queue.retain(|queued| {
                let over = queued.op.deadline <= now;
                if over {
                    signals.push(Signal::Completed {
                        path,
                        op: queued.op.id,
                        outcome: Err(Failure::Expired),
                    });
                }
                !over
            });
        }
    }

    /// The next path with something to do, each in its turn.
    fn next_turn(&mut self) -> Option<PathId> {
        let waits = |(id, path): (&PathId, &Path)| (!path.queue.is_empty()).then_some(*id);
        let path = self
            .paths
            .range(self.next_turn..)
            .find_map(waits)
            .or_else(|| self.paths.iter().find_map(waits))?;
        self.next_turn = PathId(path.0.saturating_add(1));
        Some(path)
    }

    fn lose(&mut self, id: PathId, loss: Loss) -> Option<Path> {
        let path = self.paths.remove(&id)?;
        for queued in &path.queue {
            self.inbox.push_back(Signal::Completed {
                path: id,
                op: queued.op.id,
                outcome: Err(Failure::PathLost { loss, fenced: true }),
            });
        }
        self.inbox.push_back(Signal::Lost {
            path: id,
            loss,
            fenced: true,
        });
        Some(path)
    }
}

impl Network {
    fn close(&mut self, port: usize, path: PathId) {
        if let Some(lost) = self.ports[port].lose(path, Loss::Closed) {
            self.ports[lost.far_port].lose(lost.far_path, Loss::ClosedByPeer);
        }
    }

    /// Advances the first operation of a path by what the budget allows; tells whether anything moved.
    fn step(
        &mut self,
        port: usize,
        path: PathId,
        bytes_left: &mut u64,
        scratch: &mut [u8],
        signals: &mut Vec<Signal>,
    ) -> bool {
        let Some(state) = self.ports[port].paths.get_mut(&path) else {
            return false;
        };
        let (far_port, far_path) = (state.far_port, state.far_path);
        let Some(mut queued) = state.queue.pop_front() else {
            return false;
        };
        let announces = match &queued.op.body {
            Body::Message(_) => true,
            Body::Move(part) => part.arrival.is_some(),
            Body::Atomic(_) | Body::Commit(_) => false,
        };
        let far = &self.ports[far_port];
        let served =
            far.paths.get(&far_path).is_some_and(|path| path.vouched) || matches!(queued.op.body, Body::Message(_));
        if !served || announces && far.inbox.len() >= MAX_INBOX {
            self.put_back(port, path, queued);
            return false;
        }
        let outcome = match &queued.op.body {
            Body::Message(bytes) if bytes.len() > MAX_MESSAGE_BYTES => Err(Refusal::Malformed.into()),
            Body::Message(bytes) => {
                self.ports[far_port].inbox.push_back(Signal::Message {
                    path: far_path,
                    payload: bytes.to_vec(),
                });
                Ok(Done::default())
            }
            Body::Atomic(Atomic { region, offset, act }) => {
                let far = &self.ports[far_port].table;
                let found = far.atomic(&region.key, *offset, *act);
                found.map(Done::found).map_err(Failure::from)
            }
            Body::Commit(commit) => {
                let nothing = Spans::new();
                let far = &self.ports[far_port].table;
                let checked = match port == far_port {
                    true => far.check_own(&commit.region.key, &nothing),
                    false => far.check(&commit.region.key, Access::WRITE, &nothing),
                };
                let placed = |region: &Region| match region.memory.as_any().downcast_ref::<PlacedMemory>() {
                    Some(memory) => memory.commit(commit),
                    None => Ok(()),
                };
                let done = checked.and_then(placed).map(|()| Done::default());
                done.map_err(Failure::from)
            }
            Body::Move(part) if !self.carries(port, part) => Err(Refusal::Unsupported.into()),
            Body::Move(part) => {
                let total = part.range.end - part.range.start;
                let len = (total - queued.moved).min(*bytes_left);
                let from = part.range.start + queued.moved;
                let (near, far) = (&self.ports[port].table, &self.ports[far_port].table);
                let ends = match port == far_port {
                    true => Ends::Own(near),
                    false => Ends::Two { near, far },
                };
                match carry(ends, part, from..from + len, &mut queued.sums, scratch) {
                    Err(refusal) => Err(refusal.into()),
                    Ok(()) => {
                        queued.moved += len;
                        *bytes_left -= len;
                        if queued.moved < total {
                            self.put_back(port, path, queued);
                            return true;
                        }
                        if let (Direction::Write, Some(arrival)) = (part.direction, part.arrival) {
                            if let Ok(region) = self.ports[far_port].table.lookup(&part.leg.remote().key)
                                && let Some(memory) = region.memory.as_any().downcast_ref::<PlacedMemory>()
                            {
                                memory.on_part(arrival);
                            }
                            self.ports[far_port].inbox.push_back(Signal::Arrived {
                                path: far_path,
                                arrival,
                            });
                        }
                        let sums = queued.sums.take().map(|[near, far]| (near.finish(), far.finish()));
                        Ok(Done::moved(sums.map(|(_, far)| far), sums.map(|(near, _)| near)))
                    }
                }
            }
        };
        signals.push(Signal::Completed {
            path,
            op: queued.op.id,
            outcome,
        });
        true
    }

    /// Whether the transport at this port moves bytes between such places.
    fn carries(&self, port: usize, part: &Move) -> bool {
        let (near, far) = (part.leg.local().place.kind(), part.leg.remote().place.kind());
        self.ports[port].carries.contains(&(near, far))
    }

    fn put_back(&mut self, port: usize, path: PathId, queued: Queued) {
        if let Some(state) = self.ports[port].paths.get_mut(&path) {
            state.queue.push_front(queued);
        }
    }
}

/// Whose regions the two ends of a move are among.
#[derive(Clone, Copy)]
enum Ends<'a> {
    Two {
        near: &'a RegionTable,
        far: &'a RegionTable,
    },
    /// Both are this agent's own.
    Own(&'a RegionTable),
}

/// Moves bytes `range` of a leg. Both keys are checked every time, so that a release takes effect in the middle of an operation.
fn carry(
    ends: Ends<'_>,
    part: &Move,
    range: std::ops::Range<u64>,
    sums: &mut Option<[Digest; 2]>,
    scratch: &mut [u8],
) -> Result<(), Refusal> {
    let leg = &part.leg;
    let wanted = match part.direction {
        Direction::Read => Access::READ,
        Direction::Write => Access::WRITE,
    };
    // The whole of the part is checked, not only what moves now: a move that is out of bounds moves nothing.
    let spans = leg.remote_spans().slice(part.range.clone());
    let region = match ends {
        Ends::Two { near, far } => {
            near.lookup(&leg.local().key)?;
            far.check(&leg.remote().key, wanted, &spans)?
        }
        Ends::Own(own) => {
            own.lookup(&leg.local().key)?;
            own.check_own(&leg.remote().key, &spans)?
        }
    };
    let (near, far) = (bytes_of(&*leg.local().memory)?, bytes_of(&*region.memory)?);
    for (near_offset, far_offset, len) in leg.pieces(range) {
        let (from, to): ((&dyn HostBytes, u64), (&dyn HostBytes, u64)) = match part.direction {
            Direction::Read => ((far, far_offset), (near, near_offset)),
            Direction::Write => ((near, near_offset), (far, far_offset)),
        };
        let mut done = 0;
        while done < len {
            let chunk = (len - done).min(scratch.len() as u64);
            let bytes = &mut scratch[..chunk as usize];
            from.0.read(from.1 + done, bytes);
            to.0.write(to.1 + done, bytes);
            done += chunk;
        }
        if let Some([near_sum, far_sum]) = sums {
            near.digest(near_offset, len, near_sum)?;
            far.digest(far_offset, len, far_sum)?;
        }
    }
    Ok(())
}

/// A panic elsewhere leaves the network as consistent as a killed process would; the other endpoints go on.
fn lock(network: &Mutex<Network>) -> MutexGuard<'_, Network> {
    network.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
