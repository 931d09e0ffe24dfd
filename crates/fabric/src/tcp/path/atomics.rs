//! Atomic operations on a path: asked for in one frame, carried out by the target's CPU, and answered in another.
//!
//! Once a request is staged, nobody here knows whether the target has seen it. So it is never repeated, and one that is not
//! answered ends as unanswered or with its path, both of which say that it may have happened.

use std::collections::BTreeMap;

use weft_plan::Time;
use weft_protocol::{Atomic, Done, Failure, Loss, Op, OpId, Refusal};

use super::{Path, World, completed};
use crate::tcp::connection::Gone;
use crate::tcp::frame::{AtomicRequest, Frame};

/// Where atomic operations go: with the small moves and the messages.
const CONNECTION: usize = 0;

/// Atomic operations that the peer may still answer, by their number on the wire.
#[derive(Debug, Default)]
pub(super) struct Atomics {
    asked: BTreeMap<u64, Asked>,
    next_wire: u64,
}

#[derive(Debug)]
struct Asked {
    id: OpId,
    deadline: Time,
    /// Completed; the peer's answer means nothing any more.
    ended: bool,
}

impl Atomics {
    pub(super) fn len(&self) -> usize {
        self.asked.len()
    }

    pub(super) fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        self.asked.values().filter(|a| !a.ended).map(|a| a.deadline)
    }
}

impl Path {
    pub(super) fn post_atomic(&mut self, op: &Op, atomic: &Atomic) -> Option<usize> {
        let connection = self.connections[CONNECTION].as_mut()?;
        if connection.outbound.is_crowded() {
            return None;
        }
        let wire = self.atomics.next_wire;
        self.atomics.next_wire += 1;
        connection.outbound.stage(&Frame::AtomicRequest(AtomicRequest {
            op: wire,
            deadline: op.deadline,
            key: atomic.region.key,
            offset: atomic.offset,
            act: atomic.act,
        }));
        let asked = Asked {
            id: op.id,
            deadline: op.deadline,
            ended: false,
        };
        self.atomics.asked.insert(wire, asked);
        Some(CONNECTION)
    }

    /// The target's side: checked as every request is, then carried out here and now.
    pub(super) fn on_atomic_request(&mut self, index: usize, request: AtomicRequest, world: &mut World<'_>) {
        let now = world.clock.now();
        let outcome = if self.far_clock.may_have_reached(request.deadline, now) {
            Err(Refusal::Late)
        } else {
            world.regions.atomic(&request.key, request.offset, request.act)
        };
        if let Some(connection) = &mut self.connections[index] {
            connection.outbound.stage(&Frame::AtomicReply {
                op: request.op,
                outcome,
            });
        }
        self.compare_clocks(index, now);
    }

    pub(super) fn on_atomic_reply(
        &mut self,
        index: usize,
        wire: u64,
        outcome: Result<u64, Refusal>,
        world: &mut World<'_>,
    ) -> Result<(), Gone> {
        let asked = self.atomics.asked.remove(&wire).filter(|_| index == CONNECTION);
        let asked = asked.ok_or(Gone::GARBAGE)?;
        if !asked.ended {
            let outcome = outcome.map(Done::found).map_err(Failure::from);
            world.signals.push(completed(self.id, asked.id, outcome));
        }
        Ok(())
    }

    /// Waits no longer for an answer.
    pub(super) fn cancel_atomic(&mut self, id: OpId, world: &mut World<'_>) {
        self.leave_unanswered(|asked| asked.id == id, world);
    }

    pub(super) fn expire_atomics(&mut self, now: Time, world: &mut World<'_>) {
        self.leave_unanswered(|asked| asked.deadline <= now, world);
    }

    /// Ends all of them with the path, and tells whether there were any that the peer has not answered.
    pub(super) fn lose_atomics(&mut self, loss: Loss, fenced: bool, world: &mut World<'_>) -> bool {
        let asked = std::mem::take(&mut self.atomics.asked);
        let any = !asked.is_empty();
        for asked in asked.into_values().filter(|a| !a.ended) {
            let failure = Failure::PathLost { loss, fenced };
            world.signals.push(completed(self.id, asked.id, Err(failure)));
        }
        any
    }

    fn leave_unanswered(&mut self, which: impl Fn(&Asked) -> bool, world: &mut World<'_>) {
        for asked in self.atomics.asked.values_mut().filter(|a| !a.ended && which(a)) {
            asked.ended = true;
            world
                .signals
                .push(completed(self.id, asked.id, Err(Failure::Unanswered)));
        }
    }
}
