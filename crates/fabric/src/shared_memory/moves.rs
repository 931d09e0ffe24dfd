//! How a move runs: begun, copied in parts, finished.

use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{Done, Failure, Loss, Op, Refusal, Signal};

use super::devices::ForDevice;
use super::frame::Frame;
use super::path::{Path, Running};
use super::target::{Reach, Target};
use super::worker::{Fault, Part, Peer, Sums, Worker};
use crate::cuda::{self, CudaMemory};
use crate::memory::HostMemory;

/// A process that was seen alive so lately still has its number: numbers are given out in turn, and thousands of processes have to begin
/// before one is used again.
const SEEN_LATELY: Time = Time::from_ms(1);

/// What a step of a move came to.
enum Step {
    Copied,
    /// The kernel keeps us out of the owner's process.
    Barred,
    Failed(Failure),
}

impl Path {
    /// Takes a move on. It is carried out here and now if it is no larger than `inline_bytes`, which is then less.
    pub(super) fn begin(
        &mut self,
        op: &Op,
        part: &weft_protocol::Move,
        inline_bytes: &mut u64,
        worker: &mut Worker,
        now: Time,
        signals: &mut Vec<Signal>,
    ) {
        let bytes = part.range.end.saturating_sub(part.range.start);
        if now >= op.deadline {
            return self.complete(op.id, Err(Failure::Expired), signals);
        }
        if part.range.end > part.leg.bytes() || part.range.start > part.range.end {
            return self.complete(op.id, Err(Refusal::Malformed.into()), signals);
        }
        let near = part.leg.local().memory.as_any();
        if !near.is::<HostMemory>() && !near.is::<CudaMemory>() {
            return self.complete(op.id, Err(Refusal::Unsupported.into()), signals);
        }
        let running = Running {
            id: op.id,
            deadline: op.deadline,
            at: part.range.start,
            sums: part.checksum.then(Sums::begin),
            part: part.clone(),
        };
        let key = part.leg.remote().key;
        match self.targets.get(&key).map(Arc::clone) {
            None => {
                self.waiting.push_back(running);
                self.ask(key);
            }
            Some(target) => {
                if is_for_device(&running, &target) {
                    self.route(running, &target, None, signals);
                } else if bytes <= *inline_bytes {
                    *inline_bytes -= bytes;
                    self.route(running, &target, Some(worker), signals);
                } else {
                    self.route(running, &target, None, signals);
                }
            }
        }
    }

    /// Sends a move the way its target is reached. With a worker it is carried out at once where that is possible.
    fn route(
        &mut self,
        running: Running,
        target: &Arc<Target>,
        worker: Option<&mut Worker>,
        signals: &mut Vec<Signal>,
    ) {
        if let Err(refusal) = self.admits(&running, target) {
            return self.complete(running.id, Err(refusal.into()), signals);
        }
        let empty = running.part.range.is_empty();
        if is_for_device(&running, target) {
            return match empty {
                true => self.finish_device(running, cuda::Sums::default(), target, signals),
                false => self.for_devices.push_back(ForDevice::new(running, Arc::clone(target))),
            };
        }
        if self.bounces && matches!(target.reach, Reach::Foreign(_)) && !empty {
            self.bouncer.push(running);
        } else if let Some(worker) = worker {
            self.step(running, target, worker, u64::MAX, signals);
        } else {
            self.queue.push_back(running);
        }
    }

    /// Everything about a move that can be refused before a byte is touched.
    fn admits(&mut self, running: &Running, target: &Target) -> Result<(), Refusal> {
        let leg = &running.part.leg;
        if !self.ledger().is_some_and(|ledger| ledger.is_live(target.entry)) {
            self.targets.remove(&leg.remote().key);
            return Err(Refusal::Released);
        }
        target.permits(running.part.direction)?;
        // A leg lies within the region as this side was told of it; only where that is wrong must the spans be looked at.
        if leg.remote().len > target.len {
            let mut spans = leg.remote_spans().pieces(running.part.range.clone());
            if spans.any(|span| span.offset + span.len > target.len) {
                return Err(Refusal::OutOfBounds);
            }
        }
        Ok(())
    }

    /// The target of some waiting moves is known now, or will never be.
    pub(super) fn on_target(
        &mut self,
        key: weft_protocol::RegionKey,
        found: Result<Arc<Target>, Failure>,
        signals: &mut Vec<Signal>,
    ) {
        for _ in 0..self.waiting.len() {
            let Some(running) = self.waiting.pop_front() else { break };
            if running.part.leg.remote().key != key {
                self.waiting.push_back(running);
                continue;
            }
            match &found {
                Ok(target) => self.route(running, target, None, signals),
                Err(failure) => self.complete(running.id, Err(*failure), signals),
            }
        }
        if let Some(wanted) = self.wanted.get_mut(&key) {
            *wanted = found.err();
        }
        // There is room for another question.
        let unasked = self.waiting.front().map(|running| running.part.leg.remote().key);
        for key in unasked.into_iter().chain(self.atomics.wanted()) {
            self.ask(key);
        }
    }

    /// Copies up to `budget` bytes of the move that has waited longest, and tells how many.
    pub(super) fn turn(&mut self, worker: &mut Worker, budget: u64, signals: &mut Vec<Signal>) -> u64 {
        let Some(running) = self.queue.pop_front() else {
            return 0;
        };
        let Some(target) = self.targets.get(&running.part.leg.remote().key).map(Arc::clone) else {
            self.complete(running.id, Err(Refusal::Released.into()), signals);
            return 0;
        };
        self.step(running, &target, worker, budget, signals)
    }

    fn step(
        &mut self,
        mut running: Running,
        target: &Target,
        worker: &mut Worker,
        budget: u64,
        signals: &mut Vec<Signal>,
    ) -> u64 {
        let start = running.at;
        let end = running.part.range.end.min(start.saturating_add(budget));
        loop {
            match self.copy_some(&mut running, target, worker, end) {
                Step::Copied if running.at == running.part.range.end => {
                    let copied = running.at - start;
                    self.finish(running, signals);
                    return copied;
                }
                Step::Copied if running.at >= end => {
                    let copied = running.at - start;
                    self.queue.push_back(running);
                    return copied;
                }
                Step::Copied => {}
                Step::Barred => {
                    self.bounces = true;
                    running.at = running.part.range.start;
                    running.sums = running.part.checksum.then(Sums::begin);
                    self.bouncer.push(running);
                    return 0;
                }
                Step::Failed(failure) => {
                    if failure == Failure::Refused(Refusal::Released) {
                        self.targets.remove(&running.part.leg.remote().key);
                    }
                    self.complete(running.id, Err(failure), signals);
                    return 0;
                }
            }
        }
    }

    fn copy_some(&mut self, running: &mut Running, target: &Target, worker: &mut Worker, end: u64) -> Step {
        // Whether the number is still the owner's is looked at again before anybody is told that the move is done.
        if matches!(target.reach, Reach::Foreign(_)) && !self.was_seen_alive() {
            if self.is_hung_up() {
                return Step::Failed(lost(Loss::ClosedByPeer));
            }
            self.seen_alive = self.now;
        }
        let Some(ledger) = self.ledger() else {
            return Step::Failed(lost(Loss::Closed));
        };
        let memory = running.part.leg.local().memory.as_any();
        let near: &HostMemory = memory
            .downcast_ref()
            .expect("the kind of memory was checked when the move began");
        let copied = worker.copy(Part {
            direction: running.part.direction,
            leg: &running.part.leg,
            range: running.at..end,
            near,
            target,
            peer: &Peer {
                process: self.process.as_ref(),
                ledger,
                hazard_tag: self.id.0,
            },
            sums: running.sums.as_mut(),
        });
        match copied {
            Ok(bytes) => {
                running.at += bytes;
                Step::Copied
            }
            Err(Fault::Released) => Step::Failed(Refusal::Released.into()),
            Err(Fault::OutOfBounds) => Step::Failed(Refusal::OutOfBounds.into()),
            Err(Fault::Forbidden) if self.may_bounce => Step::Barred,
            Err(Fault::Forbidden) => Step::Failed(Refusal::Unsupported.into()),
            Err(Fault::Gone) => Step::Failed(lost(Loss::ClosedByPeer)),
            Err(Fault::NoMemory) if self.is_hung_up() => Step::Failed(lost(Loss::ClosedByPeer)),
            Err(Fault::NoMemory) => Step::Failed(Refusal::Unsupported.into()),
            Err(Fault::Vanished) => Step::Failed(Refusal::NoMemory.into()),
            Err(Fault::System(errno)) => Step::Failed(lost(Loss::System(errno))),
        }
    }

    /// Whether the peer has gone, as is asked before anybody is told that a move is done.
    fn has_gone(&mut self) -> bool {
        let gone = self.is_hung_up();
        if !gone {
            self.seen_alive = self.now;
        }
        gone
    }

    fn was_seen_alive(&self) -> bool {
        self.now.saturating_sub(self.seen_alive) < SEEN_LATELY
    }

    /// All bytes are in place. A peer that has gone meanwhile may not have been the one that we copied from.
    pub(super) fn finish(&mut self, running: Running, signals: &mut Vec<Signal>) {
        if self.has_gone() {
            return self.complete(running.id, Err(lost(Loss::ClosedByPeer)), signals);
        }
        let done = match running.sums.map(Sums::finish) {
            None => Ok(Done::default()),
            Some((far, Some(near))) => Ok(Done::moved(Some(far), Some(near))),
            Some((far, None)) => Done::moved_to_host(&running.part, Some(far)),
        };
        match done {
            Ok(done) => self.announce(&running, done, signals),
            Err(refusal) => self.complete(running.id, Err(refusal.into()), signals),
        }
    }

    /// The same of what a device has copied, which has summed both ends. Memory that is mapped here is the peer's, whether it lives or not, and it is
    /// enough to have seen it lately.
    pub(super) fn finish_device(
        &mut self,
        running: Running,
        sums: cuda::Sums,
        target: &Target,
        signals: &mut Vec<Signal>,
    ) {
        let lately = !matches!(target.reach, Reach::Foreign(_)) && self.was_seen_alive();
        if !lately && self.has_gone() {
            return self.complete(running.id, Err(lost(Loss::ClosedByPeer)), signals);
        }
        let sums = running.part.checksum.then_some(sums);
        let done = Done::moved(sums.map(|sums| sums.far), sums.map(|sums| sums.near));
        self.announce(&running, done, signals);
    }

    /// Tells the peer of a write that it wants to be told of, and then completes it.
    fn announce(&mut self, running: &Running, done: Done, signals: &mut Vec<Signal>) {
        match running.part.arrival {
            Some(arrival) if running.part.direction == weft_protocol::Direction::Write => {
                self.send_for(running.id, running.deadline, done, &Frame::Arrived(arrival), signals);
            }
            _ => self.complete(running.id, Ok(done), signals),
        }
    }
}

/// Whether one side of a move is a device's.
fn is_for_device(running: &Running, target: &Target) -> bool {
    matches!(target.reach, Reach::Device { .. }) || running.part.leg.local().memory.as_any().is::<CudaMemory>()
}

fn lost(loss: Loss) -> Failure {
    Failure::PathLost { loss, fenced: true }
}
