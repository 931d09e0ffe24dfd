//! Atomic operations on a path: asked for in one frame, carried out by the target's CPU, and answered in another; or carried out by the
//! devices, where both ends want it.
//!
//! Only the CPU's own are atomic with those that come by other transports and from the owner: most devices are so among their own
//! alone. Once a request is with the device, nobody here knows whether the target has seen it. So it is never repeated, and one
//! that is not answered ends as unanswered or with its path, both of which say that it may have happened.

use weft_plan::Time;
use weft_protocol::atomic::check_word;
use weft_protocol::{Atomic, Done, Failure, Op, Refusal};

use super::super::INFLIGHT_OPS_MAX;
use super::super::message::{AtomicAsk, Frame, Location, Parcel};
use super::super::ops::{Asking, AskingStage, NO_TARGET, Serial, Work};
use super::super::targets::{Found, State};
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
    /// Asks the peer, or the device once it is known where the word is.
    pub(super) fn take_atomic(&mut self, op: &Op, atomic: &Atomic, world: &mut World<'_>) -> Result<(), Refusal> {
        let mut asking = Asking {
            atomic: atomic.clone(),
            target: NO_TARGET,
            stage: AskingStage::AwaitsTarget,
        };
        if !world.device_atomics {
            let serial = self.ops.insert(open(op, Work::Atomic(asking)));
            self.question(serial, world);
            return Ok(());
        }
        let key = atomic.region.key;
        let (index, ask) = match self.targets.find_or_ask(&key) {
            Found::Here(index) => (index, false),
            Found::Ask(index) => (index, true),
            Found::Full => return Err(Refusal::Unsupported),
        };
        let target = self.targets.at(index).ok_or(Refusal::UnknownKey)?;
        let state = target.state;
        if state == State::Revoked {
            return Err(Refusal::Released);
        }
        target.moves += 1;
        asking.target = index;
        let serial = self.ops.insert(open(op, Work::Atomic(asking)));
        if ask {
            self.ask(&Frame::Resolve { key }, world.now);
        }
        if let State::Known(location) = state {
            self.place_atomic(serial, Ok(location), world);
        }
        Ok(())
    }

    /// The peer has said where the word is, and who operates on it, or that it is out of reach.
    pub(super) fn place_atomic(&mut self, serial: Serial, answer: Result<Location, Refusal>, world: &mut World<'_>) {
        let Some(Work::Atomic(asking)) = self.ops.find(serial).map(|op| &mut op.work) else {
            return;
        };
        let checked = answer.and_then(|location| {
            check_word(location.access, location.len, asking.atomic.offset)?;
            Ok(location)
        });
        match checked {
            Ok(location) if location.atomics => {
                asking.stage = AskingStage::Waiting;
                self.waiting.push_back(serial);
            }
            Ok(_) => self.question(serial, world),
            Err(refusal) => self.complete(serial, Err(refusal.into()), world),
        }
    }

    /// Queues the question to the peer.
    fn question(&mut self, serial: Serial, world: &World<'_>) {
        let Some(op) = self.ops.find(serial) else { return };
        let deadline = op.deadline;
        let Work::Atomic(asking) = &mut op.work else { return };
        asking.stage = AskingStage::Queued;
        let question = Frame::AtomicAsk(AtomicAsk {
            serial: serial.0,
            deadline,
            key: asking.atomic.region.key,
            offset: asking.atomic.offset,
            act: asking.atomic.act,
        });
        self.parcels.push_back(Outgoing {
            parcel: Parcel::frame(&question),
            op: Some(serial),
            answer: false,
        });
        self.await_answer(world.now);
    }

    /// Ends one early: without a trace where it has not been sent, else without an answer. The device may still be at it, but not at
    /// any memory of the poster's.
    pub(super) fn end_atomic(&mut self, serial: Serial, failure: Failure, world: &mut World<'_>) {
        let Some(Work::Atomic(asking)) = self.ops.find(serial).map(|op| &op.work) else {
            return;
        };
        let (sent, queued) = (asking.is_sent(), asking.stage == AskingStage::Queued);
        let failure = match failure {
            Failure::Cancelled | Failure::Expired if sent => Failure::Unanswered,
            other => other,
        };
        self.unqueue(serial);
        if queued {
            self.answered();
        }
        self.complete(serial, Err(failure), world);
    }

    pub(super) fn on_atomic_answer(&mut self, serial: Serial, found: Result<u64, Refusal>, world: &mut World<'_>) {
        self.answered();
        if matches!(
            self.ops.find(serial).map(|op| &op.work),
            Some(Work::Atomic(asking)) if asking.stage == AskingStage::Asked
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
