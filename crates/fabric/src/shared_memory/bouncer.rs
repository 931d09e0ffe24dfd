//! The initiator's side of the bounce ring: moves that the target carries out, a slot at a time, in order.

use std::collections::VecDeque;
use std::ops::Range;

use weft_plan::Time;
use weft_protocol::{Direction, Failure, Loss, Memory, OpId, PathId, Refusal, RegionKey, Signal};

use super::frame::{Bounce, Frame, MAX_BOUNCE_RUNS};
use super::path::{Path, Running};
use super::ring::{Ring, SLOT_BYTES, SLOTS};
use crate::Clock;
use crate::copy;
use crate::memory::HostMemory;

/// Moves through the ring of one path.
#[derive(Debug, Default)]
pub(super) struct Bouncer {
    ring: Option<Ring>,
    free: Vec<u32>,
    generation: u32,
    /// What the target has been asked for. It answers in this order.
    asked: VecDeque<Asked>,
    moves: VecDeque<Bouncing>,
}

#[derive(Debug)]
struct Asked {
    slot: u32,
    generation: u32,
    op: OpId,
    range: Range<u64>,
}

/// A move through the ring. Its `at` is where the answers are; the questions run ahead.
#[derive(Debug)]
struct Bouncing {
    running: Running,
    asked_to: u64,
    /// A write that is in place and is being read back for its checksum.
    verifies: bool,
    /// Ends like this as soon as the target is out of its memory.
    ending: Option<Failure>,
}

impl Bouncing {
    fn range(&self) -> &Range<u64> {
        &self.running.part.range
    }
    /// Whether the target writes into its own memory for this move.
    fn writes(&self) -> bool {
        self.running.part.direction == Direction::Write && !self.verifies
    }
    fn near(&self) -> &HostMemory {
        let memory = self.running.part.leg.local().memory.as_any();
        memory
            .downcast_ref()
            .expect("the kind of memory was checked when the move began")
    }
    /// Copies between the local pieces of `range` and a slot.
    fn copy(&self, range: &Range<u64>, slot: *mut u8, into_slot: bool) -> Result<(), Refusal> {
        let near = self.near();
        let mut at = slot;
        for (offset, _, len) in self.running.part.leg.pieces(range.clone()) {
            assert!(offset + len <= near.len(), "the leg lies within its region");
            // SAFETY: the near side was just checked; a range in a slot holds at most the slot's bytes.
            unsafe {
                match into_slot {
                    true => near.take(offset, at, len as usize),
                    false => near.put(offset, at, len as usize),
                }?;
                at = at.add(len as usize);
            }
        }
        Ok(())
    }
}

impl Bouncer {
    pub(super) fn push(&mut self, mut running: Running) {
        if let Some(sums) = &mut running.sums {
            sums.leave_near();
        }
        self.moves.push_back(Bouncing {
            asked_to: running.at,
            running,
            verifies: false,
            ending: None,
        });
    }

    pub(super) fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        self.moves.iter().map(|bouncing| bouncing.running.deadline)
    }

    pub(super) fn cancel(&mut self, path: PathId, op: OpId, signals: &mut Vec<Signal>) {
        if let Some(at) = self.moves.iter().position(|bouncing| bouncing.running.id == op) {
            self.stop(path, at, Failure::Cancelled, signals);
        }
    }

    /// Ends the moves whose near side is this region. Also those that end later touch it no more.
    pub(super) fn release(&mut self, path: PathId, near: &RegionKey, signals: &mut Vec<Signal>) {
        let mut at = 0;
        while let Some(bouncing) = self.moves.get(at) {
            let uses = bouncing.running.part.leg.local().key == *near;
            if !(uses && self.stop(path, at, Refusal::Released.into(), signals)) {
                at += 1;
            }
        }
    }

    /// Ends a move before it is done: at once, which is `true`, or as soon as the target is out of its memory. From here on it asks
    /// for nothing, and what is answered is not looked at.
    fn stop(&mut self, path: PathId, at: usize, cause: Failure, signals: &mut Vec<Signal>) -> bool {
        let failure = *self.moves[at].ending.get_or_insert(cause);
        if !self.withdraw(&self.moves[at]) {
            return false;
        }
        if let Some(bouncing) = self.moves.remove(at) {
            signals.push(completed(path, bouncing.running.id, failure));
        }
        true
    }

    /// At the deadline a move ends, come what may. The target looks at the same clock and claims nothing any more.
    pub(super) fn expire(&mut self, path: PathId, now: Time, signals: &mut Vec<Signal>) {
        while let Some(at) = self.moves.iter().position(|bouncing| now >= bouncing.running.deadline) {
            self.withdraw(&self.moves[at]);
            if let Some(bouncing) = self.moves.remove(at) {
                signals.push(completed(path, bouncing.running.id, Failure::Expired));
            }
        }
    }

    /// Ends all moves, and tells whether the target is certainly out of its memory.
    pub(super) fn end(&mut self, path: PathId, loss: Loss, signals: &mut Vec<Signal>) -> bool {
        let mut all_fenced = true;
        while let Some(bouncing) = self.moves.pop_front() {
            let withdrawn = self.withdraw(&bouncing);
            let fenced = withdrawn || loss == Loss::ClosedByPeer;
            all_fenced &= fenced;
            let failure = Failure::PathLost { loss, fenced };
            signals.push(completed(path, bouncing.running.id, failure));
        }
        all_fenced
    }

    /// Takes back what has been asked for a move. `false`: the target is inside its memory for it.
    fn withdraw(&self, bouncing: &Bouncing) -> bool {
        let Some(ring) = &self.ring else { return true };
        let mut out = true;
        for asked in self.asked.iter().filter(|asked| asked.op == bouncing.running.id) {
            ring.withdraw(asked.slot, asked.generation);
            out &= !ring.is_claimed(asked.slot, asked.generation);
        }
        // What the target writes for a read goes into the ring, never into memory of ours.
        out || !bouncing.writes()
    }
}

#[cfg(test)]
impl Bouncer {
    /// What the target does before it touches its memory.
    pub(super) fn claim_oldest(&self) {
        let asked = self.asked.front().expect("something was asked");
        let ring = self.ring.as_ref().expect("a slot is in use");
        assert!(ring.claim(asked.slot, asked.generation));
    }
}

impl Path {
    /// Asks for as much as there are slots for.
    pub(super) fn pump_bounces(&mut self, clock: &Clock, signals: &mut Vec<Signal>) {
        if self.bouncer.moves.is_empty() {
            return;
        }
        if self.bouncer.ring.is_none() {
            match Ring::create() {
                Ok((ring, file)) => {
                    self.bouncer.ring = Some(ring);
                    self.bouncer.free = (0..SLOTS).rev().collect();
                    self.send(&Frame::Ring, vec![file]);
                }
                Err(_) => {
                    // This process has no memory or descriptor to spare; another path may need none.
                    let loss = Loss::System(libc::ENOMEM);
                    self.bouncer.end(self.id, loss, signals);
                    return;
                }
            }
        }
        let mut at = 0;
        while at < self.bouncer.moves.len() {
            match self.bouncer.next_ask(at, clock) {
                Ok(Some(frame)) => self.send(&Frame::Bounce(frame), Vec::new()),
                Ok(None) => at += 1,
                // It asks for nothing more, and may be over.
                Err(refusal) => {
                    self.bouncer.stop(self.id, at, refusal.into(), signals);
                }
            }
        }
    }

    /// The target has answered the oldest question. `false`: it has answered something else.
    pub(super) fn on_bounced(&mut self, slot: u32, result: Result<(), Refusal>, signals: &mut Vec<Signal>) -> bool {
        let bouncer = &mut self.bouncer;
        let Some(asked) = bouncer.asked.pop_front().filter(|asked| asked.slot == slot) else {
            return false;
        };
        bouncer.free.push(slot);
        let Some(at) = bouncer
            .moves
            .iter()
            .position(|bouncing| bouncing.running.id == asked.op)
        else {
            // The move has ended before.
            return true;
        };
        let refused = result.err().map(Failure::from);
        if let Some(failure) = bouncer.moves[at].ending.or(refused) {
            bouncer.stop(self.id, at, failure, signals);
            return true;
        }
        let ring = bouncer.ring.as_ref().expect("a slot was in use");
        let bouncing = &mut bouncer.moves[at];
        let data = ring.slot(slot);
        if !bouncing.writes() {
            if let Some(sums) = &mut bouncing.running.sums {
                let bytes = (asked.range.end - asked.range.start) as usize;
                // SAFETY: the slot holds the range.
                sums.take_up_far(|far| unsafe { copy::sum(data, bytes, far) });
            }
            if !bouncing.verifies
                && let Err(refusal) = bouncing.copy(&asked.range, data, false)
            {
                bouncer.stop(self.id, at, refusal.into(), signals);
                return true;
            }
        }
        bouncing.running.at = asked.range.end;
        if bouncing.running.at == bouncing.range().end {
            if bouncing.writes() && bouncing.running.sums.is_some() {
                bouncing.verifies = true;
                bouncing.running.at = bouncing.range().start;
                bouncing.asked_to = bouncing.running.at;
            } else if let Some(done) = bouncer.moves.remove(at) {
                self.finish(done.running, signals);
            }
        }
        true
    }
}

impl Bouncer {
    /// Fills a free slot with the next question of a move, if there is one. An error: its own memory is not there.
    fn next_ask(&mut self, at: usize, clock: &Clock) -> Result<Option<Bounce>, Refusal> {
        let bouncing = &mut self.moves[at];
        let end = bouncing.range().end;
        if bouncing.ending.is_some() || bouncing.asked_to == end {
            return Ok(None);
        }
        let (Some(ring), Some(slot)) = (&self.ring, self.free.pop()) else {
            return Ok(None);
        };
        let start = bouncing.asked_to;
        let mut stop = start;
        for (_, _, len) in bouncing.running.part.leg.pieces(start..end).take(MAX_BOUNCE_RUNS) {
            stop = (stop + len).min(start + SLOT_BYTES as u64);
            if stop - start == SLOT_BYTES as u64 {
                break;
            }
        }
        let range = start..stop;
        if bouncing.writes()
            && let Err(refusal) = bouncing.copy(&range, ring.slot(slot), true)
        {
            self.free.push(slot);
            return Err(refusal);
        }
        bouncing.asked_to = stop;
        self.generation = (self.generation + 1) & (u32::MAX >> 2);
        ring.offer(slot, self.generation);
        let leg = &bouncing.running.part.leg;
        let frame = Bounce {
            slot,
            generation: self.generation,
            direction: if bouncing.verifies {
                Direction::Read
            } else {
                bouncing.running.part.direction
            },
            verify: bouncing.verifies,
            deadline_mono_ns: deadline_mono_ns(bouncing.running.deadline, clock),
            key: leg.remote().key,
            spans: leg.remote_spans().slice(range.clone()),
        };
        self.asked.push_back(Asked {
            slot,
            generation: self.generation,
            op: bouncing.running.id,
            range,
        });
        Ok(Some(frame))
    }
}

/// A deadline of this agent on the clock that all processes of the host share. Never later than the agent means it.
pub(super) fn deadline_mono_ns(deadline: Time, clock: &Clock) -> u64 {
    let mono = mono_now_ns();
    mono.saturating_add(deadline.saturating_sub(clock.now()).as_ns())
}

pub(super) fn mono_now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the result has a place; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    (time.tv_sec as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(time.tv_nsec as u64)
}

fn completed(path: PathId, op: OpId, failure: Failure) -> Signal {
    Signal::Completed {
        path,
        op,
        outcome: Err(failure),
    }
}
