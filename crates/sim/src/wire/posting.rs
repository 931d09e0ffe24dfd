//! The initiator's side: operations begin, go on where the initiator executes them itself, and complete.

use std::collections::BTreeSet;
use std::sync::Arc;

use weft_plan::Bytes;
use weft_protocol::{Body, Direction, Done, Failure, Loss, Move, Op, OpId, Refusal, RegionKey, Signal};

use super::{Job, Outgoing, Packet, Side, Stage};
use crate::world::{Happening, State};

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
        let room = wire.fabric.max_inflight_ops.saturating_sub(wire.half(side).open());
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
            Body::Atomic(atomic) => self.start_atomic(wire_id, side, op, atomic),
            // Simulated memory has nothing to be committed.
            Body::Commit(_) => self.complete(wire_id, side, op.id, Ok(Done::default())),
            Body::Move(part) => {
                if let Err(refusal) = self.ends[end].table.lookup(&part.leg.local().key) {
                    self.complete(wire_id, side, op.id, Err(refusal.into()));
                    return;
                }
                let mut bytes = Vec::new();
                if part.direction == Direction::Write && !fabric.local {
                    bytes = gather(part);
                }
                let job = Arc::new(Job {
                    op: op.id,
                    part: part.clone(),
                    deadline: self.ends[end].clock.on_world_clock(op.deadline),
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

    fn schedule_copy(&mut self, wire_id: u32, from: Side, job: &Job, index: u32) {
        let now = self.now;
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let cost = wire.fabric.cost;
        let half = wire.half_mut(from);
        let start = if index == 0 {
            now.saturating_add(cost.latency.into())
        } else {
            now
        };
        half.free_at = start
            .max(half.free_at)
            .saturating_add(cost.bandwidth.time_for(Bytes(job.within(index).len() as u64)).into());
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
                    region.memory.bytes().read(far, &mut scratch);
                    leg.local().memory.bytes().write(near, &scratch);
                }
                Direction::Write => {
                    leg.local().memory.bytes().read(near, &mut scratch);
                    region.memory.bytes().write(far, &scratch);
                }
            }
        }
        if index + 1 < job.packets() {
            self.schedule_copy(wire_id, from, &job, index + 1);
            return;
        }
        let far_sum = job.far_sum(&*region.memory);
        let done = Done::moved_to_host(&job.part, far_sum);
        self.complete(wire_id, from, job.op, done.map_err(Failure::Refused));
        if let (Direction::Write, Some(arrival)) = (job.part.direction, job.part.arrival) {
            self.arrived(end, far_path, arrival);
        }
    }

    /// Cancels a move: at once where no one else acts on it, else by asking the far side to act on it no more.
    pub(crate) fn cancel(&mut self, wire_id: u32, side: Side, op: OpId) {
        self.give_up_atomic(wire_id, side, op, Failure::Cancelled);
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
        let (mut over, mut unanswered) = (Vec::new(), Vec::new());
        for &(wire_id, side) in self.ends[end].paths.values() {
            if let Some(wire) = self.wires.get(&wire_id) {
                let late = wire.half(side).ops.values().filter(|o| o.job.deadline <= now);
                over.extend(late.map(|o| (wire_id, side, o.job.op)));
                let late = wire.half(side).atomics.values().filter(|job| job.deadline <= now);
                unanswered.extend(late.map(|job| (wire_id, side, job.op)));
            }
        }
        for (wire_id, side, op) in unanswered {
            self.give_up_atomic(wire_id, side, op, Failure::Expired);
        }
        for (wire_id, side, op) in over {
            self.complete(wire_id, side, op, Err(Failure::Expired));
        }
    }

    /// Ends what would still touch a near side that is being released. A write over the network has taken its bytes already.
    pub(crate) fn release_near(&mut self, end: usize, key: &RegionKey) {
        let paths: Vec<(u32, Side)> = self.ends[end].paths.values().copied().collect();
        for (wire_id, side) in paths {
            let Some(wire) = self.wires.get(&wire_id) else { continue };
            let (local, half) = (wire.fabric.local, wire.half(side));
            let touches = |part: &Move| part.leg.local().key == *key && (local || part.direction == Direction::Read);
            let ops = half.ops.iter().filter(|(_, outgoing)| touches(&outgoing.job.part));
            let ops: Vec<OpId> = ops.map(|(op, _)| *op).collect();
            for op in ops {
                self.complete(wire_id, side, op, Err(Refusal::Released.into()));
            }
        }
    }

    pub(crate) fn complete(&mut self, wire_id: u32, side: Side, op: OpId, outcome: Result<Done, Failure>) {
        let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(side)) else {
            return;
        };
        half.ops.remove(&op);
        half.atomics.remove(&op);
        if let Some((end, path)) = half.seat {
            self.signal(end, Signal::Completed { path, op, outcome });
        }
    }

    pub(super) fn signal(&mut self, end: usize, signal: Signal) {
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
}

/// What a write carries, in the order of the part.
fn gather(part: &Move) -> Vec<u8> {
    let mut bytes = vec![0; (part.range.end - part.range.start) as usize];
    let mut at = 0;
    for piece in part.leg.local_spans().pieces(part.range.clone()) {
        part.leg
            .local()
            .memory
            .bytes()
            .read(piece.offset, &mut bytes[at..at + piece.len as usize]);
        at += piece.len as usize;
    }
    bytes
}
