//! What happens between two ends of a path: packets, retries, landings, and the end of a path.
//!
//! A path over a network is lossy below and reliable above, as a NIC makes it: a packet is sent again until it arrives or the retries
//! are used up, and then the side that sent it gives the path up, while what it sent before may still be under way. A path
//! within a host is executed by its initiator alone, as shared memory is.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use weft_plan::{Bytes, Time};
use weft_protocol::memory::Digest;
use weft_protocol::{
    Access, Arrival, Body, Direction, Done, Failure, Loss, Move, Op, OpId, PathId, Refusal, RegionTable, Signal,
};

use crate::transport::Fabric;
use crate::world::{Happening, NodeId, State};

/// One end of a fabric: what a [`SimTransport`](crate::SimTransport) stands on.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) node: NodeId,
    pub(crate) alive: bool,
    pub(crate) fabric: Fabric,
    /// The zero of this life's clock.
    pub(crate) start: Time,
    pub(crate) table: RegionTable,
    pub(crate) paths: BTreeMap<PathId, (u32, Side)>,
    pub(crate) inbox: Vec<Signal>,
    /// Slots that have been released while a peer was inside.
    pub(crate) leaving: BTreeSet<u32>,
    pub(crate) next_path: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Opener,
    Acceptor,
}

impl Side {
    pub(crate) fn other(self) -> Side {
        match self {
            Side::Opener => Side::Acceptor,
            Side::Acceptor => Side::Opener,
        }
    }
}

/// A path between two ends.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) fabric: Fabric,
    pub(crate) opener: Half,
    pub(crate) acceptor: Half,
}

/// One side of a path.
#[derive(Debug)]
pub(crate) struct Half {
    pub(crate) node: NodeId,
    /// The end and the number that it has given the path; unknown at the acceptor until the path is opened.
    pub(crate) seat: Option<(usize, PathId)>,
    pub(crate) stage: Stage,
    pub(crate) ops: BTreeMap<OpId, Outgoing>,
    /// What the far side has asked for and what became of it. An entry outlives the operation, so that nothing repeats it.
    inbound: BTreeMap<OpId, Inbound>,
    /// Closed, but what it has queued still goes out, as it does from a socket whose owner has given up.
    draining: bool,
    /// When what this side sends next can depart.
    free_at: Time,
    /// Before this nothing may arrive here where order is kept.
    last_arrival: Time,
    /// How much earlier than its poster this side believes a deadline to be over.
    clock_error: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Opening,
    Open,
    Closed,
}

/// A move that this side has posted.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) job: Arc<Job>,
    landed: BTreeSet<u32>,
    cancelling: bool,
}

/// A move as it travels.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) op: OpId,
    pub(crate) part: Move,
    /// On the world's clock.
    pub(crate) deadline: Time,
    /// What a write carries, in the order of the part.
    bytes: Vec<u8>,
    packet_bytes: u64,
}

#[derive(Debug, Default)]
struct Inbound {
    landed: BTreeSet<u32>,
    verdict: Option<Verdict>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Verdict {
    Done(Done),
    Refused(Refusal),
    Cancelled,
}

#[derive(Clone, Debug)]
pub(crate) enum Packet {
    Syn {
        address: Arc<str>,
    },
    SynAck,
    Reset,
    Message(Arc<[u8]>),
    Write {
        job: Arc<Job>,
        index: u32,
    },
    Read {
        job: Arc<Job>,
    },
    ReadData {
        job: Arc<Job>,
        index: u32,
        bytes: Arc<Vec<u8>>,
        sum: Option<u64>,
    },
    Cancel {
        op: OpId,
    },
    Verdict {
        op: OpId,
        verdict: Verdict,
    },
}

impl Wire {
    pub(crate) fn half(&self, side: Side) -> &Half {
        match side {
            Side::Opener => &self.opener,
            Side::Acceptor => &self.acceptor,
        }
    }
    pub(crate) fn half_mut(&mut self, side: Side) -> &mut Half {
        match side {
            Side::Opener => &mut self.opener,
            Side::Acceptor => &mut self.acceptor,
        }
    }
}

impl Half {
    pub(crate) fn new(node: NodeId, seat: Option<(usize, PathId)>, clock_error: Time) -> Half {
        Half {
            node,
            seat,
            stage: Stage::Opening,
            ops: BTreeMap::new(),
            inbound: BTreeMap::new(),
            draining: false,
            free_at: Time::ZERO,
            last_arrival: Time::ZERO,
            clock_error,
        }
    }
}

impl Job {
    fn total(&self) -> u64 {
        self.part.range.end - self.part.range.start
    }
    /// An empty move is one empty packet: there must be something to answer.
    fn packets(&self) -> u32 {
        self.total().div_ceil(self.packet_bytes).max(1) as u32
    }
    /// Where a packet's bytes are, counted from the start of the part.
    fn within(&self, index: u32) -> Range<usize> {
        let start = u64::from(index) * self.packet_bytes;
        start as usize..(start + self.packet_bytes).min(self.total()) as usize
    }
    fn of_leg(&self, within: &Range<usize>) -> Range<u64> {
        self.part.range.start + within.start as u64..self.part.range.start + within.end as u64
    }
    fn wanted(&self) -> Access {
        match self.part.direction {
            Direction::Read => Access::READ,
            Direction::Write => Access::WRITE,
        }
    }
    /// The far bytes of the whole part, checksummed in their order.
    fn far_sum(&self, memory: &dyn weft_protocol::Memory) -> Option<u64> {
        self.part.checksum.then(|| {
            let mut digest = Digest::default();
            for piece in self.part.leg.remote_spans().pieces(self.part.range.clone()) {
                memory.digest(piece.offset, piece.len, &mut digest);
            }
            digest.finish()
        })
    }
}

impl State {
    /// Posts as many operations as there is room for.
    pub(crate) fn post(&mut self, wire_id: u32, side: Side, ops: &[Op]) -> Result<usize, Loss> {
        let Some(wire) = self
            .wires
            .get_mut(&wire_id)
            .filter(|w| w.half(side).stage == Stage::Open)
        else {
            return Err(Loss::Closed);
        };
        let room = wire.fabric.max_inflight_ops.saturating_sub(wire.half(side).ops.len());
        let mut accepted = ops.len().min(room);
        if accepted > 0 && self.chance.chance(self.faults.short_post) {
            self.tally.short_posts += 1;
            accepted = self.chance.below(accepted as u64 + 1) as usize;
        }
        for op in &ops[..accepted] {
            self.start(wire_id, side, op);
        }
        Ok(accepted)
    }

    fn start(&mut self, wire_id: u32, side: Side, op: &Op) {
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let fabric = wire.fabric;
        let half = wire.half_mut(side);
        let Some((end, _)) = half.seat else { return };
        match &op.body {
            Body::Message(bytes) => {
                let outcome = if bytes.len() > fabric.max_message_bytes {
                    Err(Refusal::Malformed.into())
                } else {
                    self.send(wire_id, side, Packet::Message(bytes.clone()), bytes.len());
                    Ok(Done::default())
                };
                self.complete(wire_id, side, op.id, outcome);
            }
            Body::Move(part) => {
                let mut bytes = Vec::new();
                if part.direction == Direction::Write && !fabric.local {
                    bytes = gather(part);
                }
                let job = Arc::new(Job {
                    op: op.id,
                    part: part.clone(),
                    deadline: self.ends[end].start.saturating_add(op.deadline),
                    bytes,
                    packet_bytes: fabric.packet_bytes,
                });
                let outgoing = Outgoing {
                    job: job.clone(),
                    landed: BTreeSet::new(),
                    cancelling: false,
                };
                half.ops.insert(op.id, outgoing);
                if fabric.local {
                    self.schedule_copy(wire_id, side, &job, 0);
                } else if part.direction == Direction::Read {
                    self.send(wire_id, side, Packet::Read { job }, 64);
                } else {
                    for index in 0..job.packets() {
                        let size = 64 + job.within(index).len();
                        self.send(
                            wire_id,
                            side,
                            Packet::Write {
                                job: job.clone(),
                                index,
                            },
                            size,
                        );
                    }
                }
            }
        }
    }

    /// Cancels a move: at once where no one else acts on it, else by asking the far side to act on it no more.
    pub(crate) fn cancel(&mut self, wire_id: u32, side: Side, op: OpId) {
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let local = wire.fabric.local;
        let Some(outgoing) = wire.half_mut(side).ops.get_mut(&op) else {
            return;
        };
        if local || outgoing.job.part.direction == Direction::Read {
            self.complete(wire_id, side, op, Err(Failure::Cancelled));
        } else if !std::mem::replace(&mut outgoing.cancelling, true) {
            self.send(wire_id, side, Packet::Cancel { op }, 64);
        }
    }

    /// Ends what is past its deadline. The far side believes every deadline to be over no later than this side does.
    pub(crate) fn expire(&mut self, end: usize) {
        let now = self.now;
        let mut over = Vec::new();
        for &(wire_id, side) in self.ends[end].paths.values() {
            if let Some(wire) = self.wires.get(&wire_id) {
                let late = wire.half(side).ops.values().filter(|o| o.job.deadline <= now);
                over.extend(late.map(|o| (wire_id, side, o.job.op)));
            }
        }
        for (wire_id, side, op) in over {
            self.complete(wire_id, side, op, Err(Failure::Expired));
        }
    }

    pub(crate) fn complete(&mut self, wire_id: u32, side: Side, op: OpId, outcome: Result<Done, Failure>) {
        let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(side)) else {
            return;
        };
        half.ops.remove(&op);
        if let Some((end, path)) = half.seat {
            self.signal(end, Signal::Completed { path, op, outcome });
        }
    }

    fn signal(&mut self, end: usize, signal: Signal) {
        let end_state = &mut self.ends[end];
        if !end_state.alive {
            return;
        }
        let node = end_state.node;
        end_state.inbox.push(signal);
        self.ready.insert(node);
        let (now, ends) = (self.now, &self.ends);
        self.trace.line(now, || {
            format!(
                "node {} ({}): {:?}",
                node.0,
                ends[end].fabric.name,
                ends[end].inbox.last()
            )
        });
    }

    /// Puts a packet on the wire as soon as the wire is free.
    pub(crate) fn send(&mut self, wire_id: u32, from: Side, packet: Packet, size: usize) {
        let now = self.now;
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let bandwidth = wire.fabric.cost.bandwidth;
        let half = wire.half_mut(from);
        let depart = now.max(half.free_at);
        half.free_at = depart.saturating_add(bandwidth.time_for(Bytes(size as u64)));
        let at = half.free_at;
        self.schedule(
            at,
            Happening::Attempt {
                wire: wire_id,
                from,
                packet,
                attempt: 0,
            },
        );
    }

    /// One attempt to get a packet across.
    pub(crate) fn attempt(&mut self, wire_id: u32, from: Side, packet: Packet, attempt: u32) {
        let Some(wire) = self.wires.get(&wire_id) else { return };
        let fabric = wire.fabric;
        let (near, far) = (wire.half(from).node, wire.half(from.other()).node);
        let half = wire.half(from);
        let goes_out = match packet {
            Packet::Reset => true,
            Packet::Write { .. } => half.stage != Stage::Closed || half.draining,
            _ => half.stage != Stage::Closed,
        };
        if !goes_out {
            return;
        }
        if !fabric.local {
            let lost = self.chance.chance(self.faults.loss);
            if lost {
                self.tally.losses += 1;
            }
            if lost || !self.passes(near, far) {
                self.try_again(wire_id, from, packet, attempt);
                return;
            }
            if self.chance.chance(self.faults.unacknowledged) {
                self.tally.unacknowledged += 1;
                self.try_again(wire_id, from, packet.clone(), attempt);
            }
            if self.chance.chance(self.faults.duplication) {
                self.tally.duplicates += 1;
                self.travel(wire_id, from, packet.clone());
            }
        }
        self.travel(wire_id, from, packet);
    }

    fn try_again(&mut self, wire_id: u32, from: Side, packet: Packet, attempt: u32) {
        let Some(wire) = self.wires.get(&wire_id) else { return };
        let fabric = wire.fabric;
        match packet {
            Packet::Message(_) => {}
            _ if attempt < fabric.retries_max => {
                let wait = Time::from_ps(fabric.retry_after.as_ps() << attempt.min(6));
                let at = self.now.saturating_add(wait);
                self.schedule(
                    at,
                    Happening::Attempt {
                        wire: wire_id,
                        from,
                        packet,
                        attempt: attempt + 1,
                    },
                );
            }
            Packet::Reset => {}
            _ => {
                self.tally.given_up_paths += 1;
                // A path that was never open has carried nothing that could still land.
                let opening = wire.half(from).stage == Stage::Opening;
                self.fall_silent(wire_id, from, opening);
            }
        }
    }

    fn travel(&mut self, wire_id: u32, from: Side, packet: Packet) {
        let (now, chance, faults) = (self.now, &mut self.chance, &self.faults);
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let latency = wire.fabric.cost.latency;
        let mut at = now.saturating_add(latency);
        if wire.fabric.local {
            let half = wire.half_mut(from.other());
            at = at.max(half.last_arrival);
            half.last_arrival = at;
        } else {
            at = at.saturating_add(Time::from_ps(chance.below(latency.as_ps().max(1))));
            if chance.chance(faults.delay) {
                self.tally.delays += 1;
                at = at.saturating_add(Time::from_ps(chance.below(latency.as_ps().max(1)) * 400));
            }
        }
        self.schedule(
            at,
            Happening::Delivery {
                wire: wire_id,
                to: from.other(),
                packet,
            },
        );
    }

    pub(crate) fn deliver(&mut self, wire_id: u32, to: Side, packet: Packet) {
        if let Packet::Syn { address } = &packet {
            self.on_syn(wire_id, address);
            return;
        }
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let local = wire.fabric.local;
        let half = wire.half_mut(to);
        match half.stage {
            Stage::Closed => {
                let tells = !matches!(packet, Packet::Reset);
                let half_node = half.node;
                if tells && self.nodes[half_node.0 as usize].up {
                    self.send(wire_id, to, Packet::Reset, 64);
                }
                return;
            }
            // Whatever comes from the acceptor shows that it has accepted.
            Stage::Opening if !matches!(packet, Packet::Reset) => {
                half.stage = Stage::Open;
                if let Some((end, path)) = half.seat {
                    self.signal(end, Signal::Opened { path });
                }
            }
            _ => {}
        }
        match packet {
            Packet::Syn { .. } | Packet::SynAck => {}
            Packet::Reset => {
                let opening = self.wires[&wire_id].half(to).stage == Stage::Opening;
                self.lose(
                    wire_id,
                    to,
                    if opening { Loss::Unreachable } else { Loss::ClosedByPeer },
                    true,
                );
            }
            Packet::Message(bytes) => self.on_message(wire_id, to, &bytes, local),
            Packet::Write { job, index } => self.on_write(wire_id, to, &job, index),
            Packet::Read { job } => self.on_read(wire_id, to, &job),
            Packet::ReadData { job, index, bytes, sum } => self.on_read_data(wire_id, to, &job, index, &bytes, sum),
            Packet::Cancel { op } => {
                let inbound = self
                    .wires
                    .get_mut(&wire_id)
                    .map(|w| w.half_mut(to).inbound.entry(op).or_default());
                if let Some(inbound) = inbound.filter(|i| i.verdict.is_none()) {
                    inbound.verdict = Some(Verdict::Cancelled);
                    let verdict = Verdict::Cancelled;
                    self.send(wire_id, to, Packet::Verdict { op, verdict }, 64);
                }
            }
            Packet::Verdict { op, verdict } => {
                if self.wires[&wire_id].half(to).ops.contains_key(&op) {
                    let outcome = match verdict {
                        Verdict::Done(done) => Ok(done),
                        Verdict::Refused(refusal) => Err(Failure::Refused(refusal)),
                        Verdict::Cancelled => Err(Failure::Cancelled),
                    };
                    self.complete(wire_id, to, op, outcome);
                }
            }
        }
    }

    fn on_syn(&mut self, wire_id: u32, address: &str) {
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        if wire.acceptor.stage != Stage::Opening {
            return;
        }
        let node = wire.acceptor.node;
        let listener = self
            .ends
            .iter()
            .rposition(|e| e.alive && e.node == node && e.fabric.name == wire.fabric.name);
        let Some(end) = listener else {
            wire.acceptor.stage = Stage::Closed;
            self.send(wire_id, Side::Acceptor, Packet::Reset, 64);
            return;
        };
        debug_assert_eq!(self.nodes[node.0 as usize].name, address);
        let path = self.ends[end].new_path(wire_id, Side::Acceptor);
        wire.acceptor.seat = Some((end, path));
        wire.acceptor.stage = Stage::Open;
        self.signal(end, Signal::Accepted { path });
        self.send(wire_id, Side::Acceptor, Packet::SynAck, 64);
    }

    fn on_message(&mut self, wire_id: u32, to: Side, bytes: &[u8], local: bool) {
        let Some((end, path)) = self.wires[&wire_id].half(to).seat else {
            return;
        };
        let mut payload = bytes.to_vec();
        if !local {
            self.flip(&mut payload);
        }
        self.signal(end, Signal::Message { path, payload });
    }

    fn flip(&mut self, bytes: &mut [u8]) {
        if !bytes.is_empty() && self.chance.chance(self.faults.flip) {
            self.tally.flips += 1;
            let bit = self.chance.below(bytes.len() as u64 * 8);
            bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
    }

    fn on_write(&mut self, wire_id: u32, to: Side, job: &Arc<Job>, index: u32) {
        let Some(verdict) = self.land(wire_id, to, job, index) else {
            return;
        };
        let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(to)) else {
            return;
        };
        half.inbound.entry(job.op).or_default().verdict = Some(verdict);
        if let (Verdict::Done(_), Some(arrival), Some((end, path))) = (verdict, job.part.arrival, half.seat) {
            self.arrived(end, path, arrival);
        }
        self.send(wire_id, to, Packet::Verdict { op: job.op, verdict }, 64);
    }

    fn arrived(&mut self, end: usize, path: PathId, arrival: Arrival) {
        self.signal(end, Signal::Arrived { path, arrival });
    }

    /// Puts a packet of a write in place, and tells what became of the write where that is now known.
    fn land(&mut self, wire_id: u32, to: Side, job: &Job, index: u32) -> Option<Verdict> {
        let within = job.within(index);
        let mut bytes = job.bytes[within.clone()].to_vec();
        if job.part.checksum {
            self.flip(&mut bytes);
        }
        let half = self.wires.get_mut(&wire_id)?.half_mut(to);
        let (end, _) = half.seat?;
        let inbound = half.inbound.entry(job.op).or_default();
        if inbound.verdict.is_some() || inbound.landed.contains(&index) {
            return None;
        }
        if self.now >= job.deadline.saturating_sub(half.clock_error) {
            return Some(Verdict::Refused(Refusal::Late));
        }
        let leg = &job.part.leg;
        let table = &self.ends[end].table;
        let region = match table.check(
            &leg.remote().key,
            job.wanted(),
            &leg.remote_spans().slice(job.part.range.clone()),
        ) {
            Ok(region) => region,
            Err(refusal) => return Some(Verdict::Refused(refusal)),
        };
        let mut at = 0;
        for (_, far, len) in leg.pieces(job.of_leg(&within)) {
            region.memory.write(far, &bytes[at..at + len as usize]);
            at += len as usize;
        }
        inbound.landed.insert(index);
        let all = inbound.landed.len() as u32 == job.packets();
        all.then(|| {
            Verdict::Done(Done {
                far_sum: job.far_sum(&*region.memory),
            })
        })
    }

    fn on_read(&mut self, wire_id: u32, to: Side, job: &Arc<Job>) {
        let now = self.now;
        let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(to)) else {
            return;
        };
        let Some((end, _)) = half.seat else { return };
        let inbound = half.inbound.entry(job.op).or_default();
        if inbound.verdict.is_some() {
            return;
        }
        inbound.verdict = Some(Verdict::Done(Done::default()));
        let leg = &job.part.leg;
        let checked = if now >= job.deadline.saturating_sub(half.clock_error) {
            Err(Refusal::Late)
        } else {
            self.ends[end].table.check(
                &leg.remote().key,
                job.wanted(),
                &leg.remote_spans().slice(job.part.range.clone()),
            )
        };
        let region = match checked {
            Ok(region) => region,
            Err(refusal) => {
                let verdict = Verdict::Refused(refusal);
                self.send(wire_id, to, Packet::Verdict { op: job.op, verdict }, 64);
                return;
            }
        };
        let mut bytes = vec![0; job.total() as usize];
        let mut at = 0;
        for piece in leg.remote_spans().pieces(job.part.range.clone()) {
            region
                .memory
                .read(piece.offset, &mut bytes[at..at + piece.len as usize]);
            at += piece.len as usize;
        }
        let sum = job.far_sum(&*region.memory);
        let bytes = Arc::new(bytes);
        for index in 0..job.packets() {
            let size = 64 + job.within(index).len();
            let packet = Packet::ReadData {
                job: job.clone(),
                index,
                bytes: bytes.clone(),
                sum,
            };
            self.send(wire_id, to, packet, size);
        }
    }

    fn on_read_data(&mut self, wire_id: u32, to: Side, job: &Job, index: u32, source: &[u8], sum: Option<u64>) {
        let within = job.within(index);
        let mut bytes = source[within.clone()].to_vec();
        if job.part.checksum {
            self.flip(&mut bytes);
        }
        let now = self.now;
        let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(to)) else {
            return;
        };
        let Some(outgoing) = half.ops.get_mut(&job.op) else {
            return;
        };
        if now >= job.deadline || !outgoing.landed.insert(index) {
            return;
        }
        let mut at = 0;
        for (near, _, len) in job.part.leg.pieces(job.of_leg(&within)) {
            job.part.leg.local().memory.write(near, &bytes[at..at + len as usize]);
            at += len as usize;
        }
        if outgoing.landed.len() as u32 == job.packets() {
            self.complete(wire_id, to, job.op, Ok(Done { far_sum: sum }));
        }
    }

    fn schedule_copy(&mut self, wire_id: u32, from: Side, job: &Job, index: u32) {
        let now = self.now;
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let cost = wire.fabric.cost;
        let half = wire.half_mut(from);
        let start = if index == 0 {
            now.saturating_add(cost.latency)
        } else {
            now
        };
        half.free_at = start
            .max(half.free_at)
            .saturating_add(cost.bandwidth.time_for(Bytes(job.within(index).len() as u64)));
        let at = half.free_at;
        self.schedule(
            at,
            Happening::Copy {
                wire: wire_id,
                from,
                op: job.op.0,
            },
        );
    }

    /// Copies the next piece of a move that its initiator executes itself, after asking the owner's table again.
    pub(crate) fn copy(&mut self, wire_id: u32, from: Side, op: u64) {
        let now = self.now;
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let far = wire.half(from.other());
        let (far_seat, far_closed) = (far.seat, far.stage == Stage::Closed);
        if far_closed {
            // Nobody is there to be told of an arrival, so nothing may arrive.
            self.lose(wire_id, from, Loss::ClosedByPeer, true);
            return;
        }
        let Some(outgoing) = wire.half_mut(from).ops.get_mut(&OpId(op)) else {
            return;
        };
        let job = outgoing.job.clone();
        if job.deadline <= now {
            return;
        }
        let index = outgoing.landed.len() as u32;
        outgoing.landed.insert(index);
        let Some((end, far_path)) = far_seat else { return };
        let leg = &job.part.leg;
        let spans = leg.remote_spans().slice(job.part.range.clone());
        let region = match self.ends[end].table.check(&leg.remote().key, job.wanted(), &spans) {
            Ok(region) => region,
            Err(refusal) => {
                self.complete(wire_id, from, job.op, Err(refusal.into()));
                return;
            }
        };
        let mut scratch = Vec::new();
        for (near, far, len) in leg.pieces(job.of_leg(&job.within(index))) {
            scratch.resize(len as usize, 0);
            match job.part.direction {
                Direction::Read => {
                    region.memory.read(far, &mut scratch);
                    leg.local().memory.write(near, &scratch);
                }
                Direction::Write => {
                    leg.local().memory.read(near, &mut scratch);
                    region.memory.write(far, &scratch);
                }
            }
        }
        if index + 1 < job.packets() {
            self.schedule_copy(wire_id, from, &job, index + 1);
            return;
        }
        let far_sum = job.far_sum(&*region.memory);
        self.complete(wire_id, from, job.op, Ok(Done { far_sum }));
        if let (Direction::Write, Some(arrival)) = (job.part.direction, job.part.arrival) {
            self.arrived(end, far_path, arrival);
        }
    }

    /// Ends one side of a path: its operations complete, then it is lost, and it acts on nothing that comes later.
    pub(crate) fn lose(&mut self, wire_id: u32, side: Side, loss: Loss, fenced: bool) {
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let half = wire.half_mut(side);
        if half.stage == Stage::Closed {
            return;
        }
        half.stage = Stage::Closed;
        half.inbound.clear();
        let ops = std::mem::take(&mut half.ops);
        let seat = half.seat;
        let fenced = fenced || wire.fabric.local;
        if wire.opener.stage == Stage::Closed && wire.acceptor.stage == Stage::Closed {
            self.wires.remove(&wire_id);
        }
        let Some((end, path)) = seat else { return };
        self.ends[end].paths.remove(&path);
        for (op, outgoing) in ops {
            let fenced = fenced || outgoing.job.part.direction == Direction::Read;
            let outcome = Err(Failure::PathLost { loss, fenced });
            self.signal(end, Signal::Completed { path, op, outcome });
        }
        self.signal(end, Signal::Lost { path, loss, fenced });
    }

    /// One side takes the other for dead, which need not be so, and may go without a word.
    fn fall_silent(&mut self, wire_id: u32, side: Side, fenced: bool) {
        let mute = self.chance.chance(self.faults.mute);
        if let Some(wire) = self.wires.get_mut(&wire_id).filter(|_| mute) {
            wire.half_mut(side).draining = true;
        }
        self.lose(wire_id, side, Loss::Silent, fenced);
        if !mute {
            self.send(wire_id, side, Packet::Reset, 64);
        }
    }

    /// Closes one side and tells the other.
    pub(crate) fn close(&mut self, wire_id: u32, side: Side) {
        self.send(wire_id, side, Packet::Reset, 64);
        self.lose(wire_id, side, Loss::Closed, false);
    }

    pub(crate) fn crash(&mut self, node: NodeId, told: bool) {
        for end in 0..self.ends.len() {
            if self.ends[end].node == node {
                self.end_life(end, told);
            }
        }
        self.nodes[node.0 as usize].up = told;
    }

    /// The end of an agent's life: it hears no more, and its peers learn of it from its kernel, or from the silence.
    pub(crate) fn end_life(&mut self, end: usize, told: bool) {
        let state = &mut self.ends[end];
        if !std::mem::replace(&mut state.alive, false) {
            return;
        }
        state.inbox.clear();
        let paths = std::mem::take(&mut state.paths);
        for (wire_id, side) in paths.into_values() {
            let Some(wire) = self.wires.get_mut(&wire_id) else {
                continue;
            };
            let half = wire.half_mut(side);
            half.stage = Stage::Closed;
            half.ops.clear();
            half.inbound.clear();
            half.seat = None;
            let over = wire.half(side.other()).stage == Stage::Closed;
            if over {
                self.wires.remove(&wire_id);
            } else if told || wire.fabric.local {
                self.send(wire_id, side, Packet::Reset, 64);
            }
        }
    }

    /// Cuts an open path, one in use if there is one: at both sides as a reset does, or at one, which then believes that its peer
    /// is silent.
    pub(crate) fn reset_path(&mut self, pick: u64) -> bool {
        let is_open = |w: &Wire| w.opener.stage == Stage::Open && w.acceptor.stage == Stage::Open;
        let is_used = |w: &Wire| !w.opener.ops.is_empty() || !w.acceptor.ops.is_empty();
        let open = self.wires.iter().filter(|(_, wire)| is_open(wire));
        let (used, unused): (Vec<_>, Vec<_>) = open.partition(|(_, wire)| is_used(wire));
        let open: Vec<u32> = if used.is_empty() { unused } else { used }
            .iter()
            .map(|(id, _)| **id)
            .collect();
        if open.is_empty() {
            return false;
        }
        let wire_id = open[(pick % open.len() as u64) as usize];
        self.tally.closed_paths += 1;
        let how = self.chance.below(4);
        self.note(&[4, u64::from(wire_id), how], || {
            format!("path {wire_id} is cut, manner {how}")
        });
        match how {
            0 => self.fall_silent(wire_id, Side::Opener, false),
            1 => self.fall_silent(wire_id, Side::Acceptor, false),
            _ => {
                self.lose(wire_id, Side::Opener, Loss::ClosedByPeer, true);
                self.lose(wire_id, Side::Acceptor, Loss::ClosedByPeer, true);
            }
        }
        true
    }
}

impl End {
    pub(crate) fn new_path(&mut self, wire: u32, side: Side) -> PathId {
        let path = PathId(self.next_path);
        self.next_path += 1;
        self.paths.insert(path, (wire, side));
        path
    }
}

/// What a write carries, in the order of the part.
fn gather(part: &Move) -> Vec<u8> {
    let mut bytes = vec![0; (part.range.end - part.range.start) as usize];
    let mut at = 0;
    for piece in part.leg.local_spans().pieces(part.range.clone()) {
        part.leg
            .local()
            .memory
            .read(piece.offset, &mut bytes[at..at + piece.len as usize]);
        at += piece.len as usize;
    }
    bytes
}
