//! Atomic operations: carried out by the initiator within a host, and by the target over a network, once for each.

use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{Atomic, Done, Failure, Loss, Op, OpId, Refusal};

use super::{Packet, Side, Stage, Verdict};
use crate::world::{Happening, State};

/// An atomic operation as it travels.
#[derive(Debug)]
pub(crate) struct AtomicJob {
    pub(crate) op: OpId,
    pub(crate) atomic: Atomic,
    /// On the world's clock.
    pub(crate) deadline: Time,
}

impl State {
    pub(super) fn start_atomic(&mut self, wire_id: u32, side: Side, op: &Op, atomic: &Atomic) {
        let now = self.now;
        let Some(wire) = self.wires.get_mut(&wire_id) else {
            return;
        };
        let fabric = wire.fabric;
        let half = wire.half_mut(side);
        let Some((end, _)) = half.seat else { return };
        let deadline = self.ends[end].clock.on_world_clock(op.deadline);
        if deadline <= now {
            return self.complete(wire_id, side, op.id, Err(Failure::Expired));
        }
        let job = Arc::new(AtomicJob {
            op: op.id,
            atomic: atomic.clone(),
            deadline,
        });
        half.atomics.insert(op.id, job.clone());
        if fabric.local {
            let happening = Happening::Atomic {
                wire: wire_id,
                from: side,
                op: op.id.0,
            };
            self.schedule(now.saturating_add(fabric.cost.latency.into()), happening);
        } else {
            self.send(wire_id, side, Packet::Atomic { job }, 64);
        }
    }

    /// The initiator's own instruction on memory that it shares with the owner.
    pub(crate) fn atomic_here(&mut self, wire_id: u32, from: Side, op: u64) {
        let Some(wire) = self.wires.get(&wire_id) else { return };
        let far = wire.half(from.other());
        let (far_seat, far_closed) = (far.seat, far.stage == Stage::Closed);
        let Some(job) = wire.half(from).atomics.get(&OpId(op)).cloned() else {
            return;
        };
        if far_closed {
            self.lose(wire_id, from, Loss::ClosedByPeer, true);
            return;
        }
        let Some((end, _)) = far_seat.filter(|_| job.deadline > self.now) else {
            return;
        };
        let found = self.execute(end, &job);
        self.complete(wire_id, from, job.op, found.map(Done::found).map_err(Failure::from));
    }

    /// The target's side. A packet that comes again finds the verdict, and changes nothing.
    pub(super) fn on_atomic(&mut self, wire_id: u32, to: Side, job: &AtomicJob) {
        let now = self.now;
        let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(to)) else {
            return;
        };
        let Some((end, _)) = half.seat else { return };
        if half.inbound.entry(job.op).or_default().verdict.is_some() {
            return;
        }
        let verdict = if now >= job.deadline.saturating_sub(half.clock_error) {
            Verdict::Refused(Refusal::Late)
        } else {
            match self.execute(end, job) {
                Ok(before) => Verdict::Done(Done::found(before)),
                Err(refusal) => Verdict::Refused(refusal),
            }
        };
        if let Some(half) = self.wires.get_mut(&wire_id).map(|w| w.half_mut(to)) {
            half.inbound.entry(job.op).or_default().verdict = Some(verdict);
        }
        self.send(wire_id, to, Packet::Verdict { op: job.op, verdict }, 64);
    }

    /// Waits no longer for an operation: nothing has been done of one that the initiator would carry out itself, and of another
    /// nobody here knows.
    pub(super) fn give_up_atomic(&mut self, wire_id: u32, side: Side, op: OpId, cause: Failure) {
        let Some(wire) = self.wires.get(&wire_id) else { return };
        if wire.half(side).atomics.contains_key(&op) {
            let cause = if wire.fabric.local { cause } else { Failure::Unanswered };
            self.complete(wire_id, side, op, Err(cause));
        }
    }

    fn execute(&self, end: usize, job: &AtomicJob) -> Result<u64, Refusal> {
        let Atomic { region, offset, act } = &job.atomic;
        self.ends[end].table.atomic(&region.key, *offset, *act)
    }
}
