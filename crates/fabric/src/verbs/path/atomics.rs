//! Atomic operations on a path: asked for in one frame, carried out by the target's CPU, and answered in another.
//!
//! Only the CPU's own are atomic with those that come by other transports and from the owner: most devices are so among their own
//! alone. Once a request is with the device, nobody here knows whether the target has seen it. So it is never repeated, and one
//! that is not answered ends as unanswered or with its path, both of which say that it may have happened.

use weft_plan::Time;
use weft_protocol::{Atomic, Done, Failure, Op, Refusal};

use super::super::INFLIGHT_OPS_MAX;
use super::super::message::{AtomicAsk, Frame, Parcel};
use super::super::ops::{Serial, Work};
use super::{Outgoing, Path, World, open};
use crate::far_clock::FarClock;

/// What a target needs to know of its peer's clock, and the questions that wait until it does.
#[derive(Debug, Default)]
pub(super) struct Target {
    far_clock: FarClock,
    /// A reading of the peer's clock is on its way.
    reading: bool,
    held: Vec<AtomicAsk>,
}

/// The peer has asked for more than it may hold open.
pub(super) struct TooMany;

impl Path {
    /// Asks the peer.
    pub(super) fn take_atomic(&mut self, op: &Op, atomic: &Atomic, now: Time) {
        let serial = self.ops.insert(open(op, Work::Atomic { sent: false }));
        let question = Frame::AtomicAsk(AtomicAsk {
            serial: serial.0,
            deadline: op.deadline,
            key: atomic.region.key,
            offset: atomic.offset,
            act: atomic.act,
        });
        self.parcels.push_back(Outgoing {
            parcel: Parcel::frame(&question),
            op: Some(serial),
            answer: false,
        });
        self.await_answer(now);
    }

    /// Ends one early: without a trace where it has not been sent, else without an answer.
    pub(super) fn end_atomic(&mut self, serial: Serial, failure: Failure, world: &mut World<'_>) {
        let sent = match self.ops.find(serial).map(|op| &op.work) {
            Some(Work::Atomic { sent }) => *sent,
            _ => return,
        };
        let failure = match failure {
            Failure::Cancelled | Failure::Expired if sent => Failure::Unanswered,
            other => other,
        };
        if !sent {
            self.unqueue(serial);
            self.answered();
        }
        self.complete(serial, Err(failure), world);
    }

    pub(super) fn on_atomic_answer(&mut self, serial: Serial, found: Result<u64, Refusal>, world: &mut World<'_>) {
        self.answered();
        if matches!(
            self.ops.find(serial).map(|op| &op.work),
            Some(Work::Atomic { sent: true })
        ) {
            self.complete(serial, found.map(Done::found).map_err(Failure::Refused), world);
        }
    }

    /// The target's side: carried out here and now, or as soon as the peer has said what time it is for it.
    pub(super) fn on_atomic_ask(&mut self, ask: AtomicAsk, world: &mut World<'_>) -> Result<(), TooMany> {
        let now = world.clock.now();
        if self.target.far_clock.is_known() {
            self.carry_out(&ask, world);
        } else if self.target.held.len() < INFLIGHT_OPS_MAX {
            self.target.held.push(ask);
        } else {
            return Err(TooMany);
        }
        if self.target.far_clock.is_stale(now) && !self.target.reading {
            self.target.reading = true;
            self.say(&Frame::ReadClock { sent: now });
        }
        Ok(())
    }

    pub(super) fn on_clock(&mut self, sent: Time, read: Time, world: &mut World<'_>) {
        if !std::mem::take(&mut self.target.reading) {
            return;
        }
        self.target.far_clock.learn(sent, read, world.clock.now());
        for ask in std::mem::take(&mut self.target.held) {
            self.carry_out(&ask, world);
        }
    }

    fn carry_out(&mut self, ask: &AtomicAsk, world: &mut World<'_>) {
        let found = if self.target.far_clock.may_have_reached(ask.deadline, world.clock.now()) {
            Err(Refusal::Late)
        } else {
            world.regions.table.atomic(&ask.key, ask.offset, ask.act)
        };
        self.reply(&Frame::AtomicAnswer {
            serial: ask.serial,
            found,
        });
    }
}
