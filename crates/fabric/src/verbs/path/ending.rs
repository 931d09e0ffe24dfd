//! How operations and paths end: on time, once, and not before the device is done with the memory.

use weft_plan::Time;
use weft_protocol::{Done, Failure, Loss, Refusal, Signal};
use weft_sys::verbs as sys;

use super::super::message::Frame;
use super::super::number;
use super::super::ops::{AskingStage, OpenOp, Serial, Stage, Work};
use super::super::setup::Errand;
use super::{Outgoing, Parcel, Path, Phase, Segment, World};

/// How long a queue pair in error may take to give everything back. Its destruction is a fence as well, if a slower one.
const DRAIN_MAX: Time = Time::from_secs(1);
/// Progress of others puts the end of a wait off, but not for longer than so many graces.
const GRACES_MAX: u64 = 10;

/// How long the device is waited for over what has ended at `since`, when it last completed anything at `moved`.
pub(super) fn patience(since: Time, moved: Time, grace: Time) -> Time {
    let most = grace.saturating_mul(GRACES_MAX);
    since.max(moved).saturating_add(grace).min(since.saturating_add(most))
}

impl Path {
    pub(in super::super) fn cancel(&mut self, id: weft_protocol::OpId, world: &mut World<'_>) {
        if let Some(serial) = self.ops.pick(|op| op.id == id).first() {
            self.end(*serial, Failure::Cancelled, world);
        }
    }

    /// Ends operations whose time is over, and resets the queue where the device does not let go of them.
    pub(super) fn expire(&mut self, world: &mut World<'_>) {
        let now = world.now;
        for serial in self.ops.pick(|op| op.ending.is_none() && op.deadline <= now) {
            self.end(serial, Failure::Expired, world);
        }
        let (moved, grace) = (self.moved, world.options.grace);
        let stuck = |op: &OpenOp| op.ending.is_some_and(|(_, since)| patience(since, moved, grace) <= now);
        if !self.ops.pick(stuck).is_empty() {
            self.lose(Loss::Silent, world);
        }
    }

    /// Ends an operation early: at once where the device has nothing of it, else as soon as it has not.
    pub(super) fn end(&mut self, serial: Serial, failure: Failure, world: &mut World<'_>) {
        let Some(op) = self.ops.find(serial) else { return };
        if op.ending.is_some() {
            return;
        }
        match &op.work {
            Work::Message { .. } => self.end_message(serial, failure, world),
            Work::Atomic(_) => self.end_atomic(serial, failure, world),
            Work::Move(_) if op.posted == 0 => {
                self.unqueue(serial);
                self.complete(serial, Err(failure), world);
            }
            Work::Move(_) => {
                op.ending = Some((failure, world.now));
                self.grace_at = self.grace_at.min(world.now.saturating_add(world.options.grace));
                self.unqueue(serial);
            }
        }
    }

    /// A message is copied when it is packed, so it ends at once; but one that has been begun goes on to its end.
    fn end_message(&mut self, serial: Serial, failure: Failure, world: &mut World<'_>) {
        let place = self.parcels.iter().position(|outgoing| outgoing.op == Some(serial));
        match place {
            // Too late: all of it is with the device.
            None if failure == Failure::Cancelled => return,
            None => {}
            Some(place) if self.parcels[place].parcel.is_begun() => self.parcels[place].op = None,
            Some(place) => {
                self.parcels.remove(place);
            }
        }
        self.complete(serial, Err(failure), world);
    }

    pub(super) fn unqueue(&mut self, serial: Serial) {
        self.waiting.retain(|waiting| *waiting != serial);
        self.stalled.retain(|stalled| *stalled != serial);
        self.parcels.retain(|outgoing| outgoing.op != Some(serial));
    }

    /// Goes on with an operation that the device has nothing of any more.
    pub(super) fn settle(&mut self, serial: Serial, world: &mut World<'_>) {
        let Some(op) = self.ops.find(serial) else { return };
        if op.flushed {
            return self.settle_flushed(serial, world);
        }
        let ending = op.ending;
        let moving = match &mut op.work {
            Work::Message { packed: true } => return self.complete(serial, Ok(Done::default()), world),
            Work::Message { packed: false } => return,
            Work::Atomic(asking) => {
                if let AskingStage::Found(before) = asking.stage {
                    self.complete(serial, Ok(Done::found(before)), world);
                }
                return;
            }
            Work::Move(moving) => moving,
        };
        let checksum = moving.part.checksum;
        match (moving.stage, ending) {
            (Stage::HandedOver, None) if checksum => {
                moving.stage = Stage::AwaitsSum;
                let leg = &moving.part.leg;
                let question = Frame::Sum {
                    serial: serial.0,
                    key: leg.remote().key,
                    spans: leg.remote_spans().slice(moving.part.range.clone()),
                };
                self.ask(&question, world.now);
            }
            // What ended too late has not ended early.
            (Stage::HandedOver, _) if !checksum => self.complete(serial, Ok(Done::default()), world),
            (_, Some((failure, _))) => self.complete(serial, Err(failure), world),
            (_, None) => {}
        }
    }

    /// Completes an operation that the device has given back unfinished.
    fn settle_flushed(&mut self, serial: Serial, world: &mut World<'_>) {
        let loss = match self.phase {
            Phase::Failing { loss, .. } => loss,
            _ => Loss::Closed,
        };
        let Some(op) = self.ops.find(serial) else { return };
        let ending = op.ending.map(|(failure, _)| failure);
        let write = op.work.acts_there();
        let failure = match ending {
            Some(failure) if op.refused => failure,
            // Packets of a write may still be on their way; a read, or a message, has no more to land anywhere.
            _ if write => Failure::PathLost { loss, fenced: false },
            Some(failure) => failure,
            None => Failure::PathLost { loss, fenced: true },
        };
        self.unfenced |= write;
        self.complete(serial, Err(failure), world);
    }

    /// The device could not carry out a request: the queue pair is in error.
    pub(super) fn on_failed(&mut self, status: sys::ibv_wc_status, world: &mut World<'_>) {
        let loss = match status {
            sys::IBV_WC_RETRY_EXC_ERR | sys::IBV_WC_RNR_RETRY_EXC_ERR | sys::IBV_WC_RESP_TIMEOUT_ERR => Loss::Silent,
            sys::IBV_WC_REM_ACCESS_ERR => {
                // The device of the peer has refused what the peer itself had allowed: the memory has gone in the meantime.
                let first = self.segments.front().and_then(|segment| segment.op);
                if let Some(op) = first.and_then(|op| self.ops.find(op))
                    && op.work.target().is_some()
                {
                    op.ending = Some((Refusal::Released.into(), world.now));
                    op.refused = true;
                }
                Loss::ClosedByPeer
            }
            sys::IBV_WC_REM_INV_REQ_ERR | sys::IBV_WC_REM_OP_ERR => Loss::ClosedByPeer,
            sys::IBV_WC_LOC_PROT_ERR | sys::IBV_WC_LOC_ACCESS_ERR => Loss::System(libc::EFAULT),
            _ => Loss::System(libc::EIO),
        };
        self.lose(loss, world);
    }

    /// Resets the queue. What the device had comes back; when all of it has, the path is over.
    pub(in super::super) fn lose(&mut self, loss: Loss, world: &mut World<'_>) {
        if matches!(self.phase, Phase::Failing { .. } | Phase::Over) {
            return;
        }
        if !matches!(loss, Loss::Closed | Loss::ClosedByPeer) {
            world.counters.failed_paths += 1;
        }
        let loss = match self.phase {
            Phase::Closing { .. } => Loss::Closed,
            _ => loss,
        };
        // Nothing has come through a queue pair that was never connected.
        let connecting = matches!(self.phase, Phase::Connecting { .. } | Phase::Answering { .. });
        self.received_all |= connecting || matches!(self.phase, Phase::Introducing { .. });
        self.phase = Phase::Failing {
            loss,
            until: world.now.saturating_add(DRAIN_MAX),
            since: world.counters.polls,
        };
        self.waiting.clear();
        self.stalled.clear();
        self.parcels.clear();
        self.answers = 0;
        // One that is being connected is in other hands, and ends with them.
        if !connecting {
            self.reset_queue(world);
        }
        for serial in self.ops.pick(|op| op.posted == 0) {
            let Some(op) = self.ops.find(serial) else { continue };
            // Only the device's part of a write is over; the peer's part of an atomic operation may not be.
            let fenced = !matches!(&op.work, Work::Atomic(asking) if asking.is_sent());
            let failure = op
                .ending
                .map_or(Failure::PathLost { loss, fenced }, |(failure, _)| failure);
            self.unfenced |= !fenced;
            self.complete(serial, Err(failure), world);
        }
    }

    /// The device will receive nothing more through the queue pair. What it has received is among the completions.
    pub(in super::super) fn on_received_all(&mut self, world: &World<'_>) {
        self.received_all = true;
        if let Phase::Failing { since, .. } = &mut self.phase {
            *since = world.counters.polls;
        }
    }

    /// Moves the queue pair to its error state, so that the peer touches nothing through it any more, and posts a last request:
    /// once that has come back, everything has.
    fn reset_queue(&mut self, world: &mut World<'_>) {
        let Some(pair) = &self.pair else { return };
        let failed = pair.fail().is_ok();
        if self.segments.is_empty() {
            return;
        }
        world.batch.clear();
        world.batch.send_nothing();
        let (id, posted) = (self.id, self.posted);
        let list = world.batch.finish(|_| number::request(id, posted));
        // SAFETY: one request without any bytes.
        if failed && unsafe { pair.post(list) }.is_ok() {
            self.posted += 1;
            self.segments.push_back(Segment {
                end: self.posted,
                bytes: 0,
                op: None,
                staged: false,
                landing: None,
            });
        }
        world.batch.clear();
    }

    /// Closes the path. After it returns the peer touches no memory of ours through it. Where it could not anyway, what the device
    /// has may finish; the rest has ended.
    pub(in super::super) fn close(&mut self, world: &mut World<'_>) {
        if !matches!(self.phase, Phase::Live) || self.admitted != 0 {
            return self.lose(Loss::Closed, world);
        }
        self.phase = Phase::Closing {
            until: world.now.saturating_add(world.options.grace),
        };
        let closed = Failure::PathLost {
            loss: Loss::Closed,
            fenced: true,
        };
        for serial in self.ops.pick(|_| true) {
            self.end(serial, closed, world);
        }
        self.parcels.retain(|outgoing| outgoing.parcel.is_begun());
        self.answers = self.parcels.iter().filter(|outgoing| outgoing.answer).count();
        self.go_on_closing(world);
        self.pump(world);
    }

    /// Says goodbye once the device is done with everything else, and ends once that has arrived.
    pub(super) fn go_on_closing(&mut self, world: &mut World<'_>) {
        let idle = self.segments.is_empty() && self.parcels.is_empty();
        if !matches!(self.phase, Phase::Closing { .. }) || !idle {
            return;
        }
        if self.bye_said {
            return self.lose(Loss::Closed, world);
        }
        self.bye_said = true;
        self.parcels.push_back(Outgoing {
            parcel: Parcel::frame(&Frame::Bye),
            op: None,
            answer: false,
        });
    }

    /// Has the queue pair destroyed by somebody who can wait for it.
    fn destroy_pair(&mut self) {
        if let Some(pair) = self.pair.take() {
            self.errands.push(Errand::Destroy { path: self.id, pair });
        }
    }

    /// The queue pair is no more. What the device had given back before is among the completions.
    pub(in super::super) fn on_destroyed(&mut self, world: &World<'_>) {
        self.destroyed = true;
        if let Phase::Failing { since, .. } = &mut self.phase {
            *since = world.counters.polls;
        }
    }

    /// Ends a path that the device has given everything back of. Where that takes too long, has the queue pair destroyed, and ends
    /// the path after that. Returns the queue pair's number if this was its end.
    pub(in super::super) fn reap(&mut self, world: &mut World<'_>) -> Option<u32> {
        let Phase::Failing { loss, until, since } = self.phase else {
            return None;
        };
        if world.dry <= since {
            return None;
        }
        // A queue pair that is in error and has given everything back is as good as none: no device touches anything through it, here
        // and from there. Of another one that is known only once it is destroyed.
        if !self.is_drained() && !self.destroyed {
            if world.now >= until {
                self.destroy_pair();
            }
            return None;
        }
        self.destroy_pair();
        let left = self.posted;
        self.advance(left, false, world);
        for serial in self.ops.pick(|_| true) {
            self.complete(serial, Err(Failure::PathLost { loss, fenced: true }), world);
        }
        self.granted.clear();
        if self.told {
            world.signals.push(Signal::Lost {
                path: self.id,
                loss,
                fenced: !self.unfenced,
            });
        }
        if is_worth_a_goodbye(loss) && !(self.bye_said && loss == Loss::ClosedByPeer) {
            self.letters.push(super::Letter::Goodbye { token: self.token });
        }
        self.phase = Phase::Over;
        Some(self.number)
    }
}

/// Is there somebody who may hear it? A letter that cannot arrive keeps others waiting.
fn is_worth_a_goodbye(loss: Loss) -> bool {
    !matches!(
        loss,
        Loss::Silent | Loss::Unreachable | Loss::System(libc::ENETDOWN | libc::ENODEV)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_of_others_puts_the_end_of_a_wait_off_but_not_for_ever() {
        let (grace, since) = (Time::from_ms(10), Time::from_ms(100));
        assert_eq!(patience(since, Time::ZERO, grace), Time::from_ms(110));
        assert_eq!(patience(since, Time::from_ms(150), grace), Time::from_ms(160));
        assert_eq!(patience(since, Time::from_secs(9), grace), Time::from_ms(200));
    }

    #[test]
    fn nobody_says_goodbye_to_the_absent() {
        assert!(is_worth_a_goodbye(Loss::Closed) && is_worth_a_goodbye(Loss::Garbage));
        assert!(!is_worth_a_goodbye(Loss::Silent) && !is_worth_a_goodbye(Loss::System(libc::ENETDOWN)));
    }
}
