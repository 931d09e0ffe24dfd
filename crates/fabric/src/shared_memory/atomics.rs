//! Atomic operations: by this CPU on memory that is mapped here, else by the owner's CPU, which is asked over the socket.
//!
//! On mapped memory an operation is as quick and as certain as one of the owner's own, and the owner's ledger and our hazard stand
//! around it as around every copy. Foreign memory has no address here, and the kernel's copies are not atomic; so the owner is
//! asked, and what it has been asked and has not answered may have happened.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::atomic::check_word;
use weft_protocol::{Atomic, Done, Failure, Loss, Op, OpId, PathId, Refusal, RegionKey, Signal};

use super::bouncer::deadline_mono_ns;
use super::frame::{AtomicAsk, Frame};
use super::ledger::Hazard;
use super::path::Path;
use super::target::{Reach, Target};
use crate::Clock;
use crate::memory::word_atomic;

/// Answers that nobody waits for any more, beyond which the owner is asked for nothing new.
const UNHEARD_MAX: usize = 64;

/// The atomic operations of one path that are not over.
#[derive(Debug, Default)]
pub(super) struct Atomics {
    /// Those whose target is not known yet.
    waiting: VecDeque<Waiting>,
    /// What the owner has been asked for, by number.
    asked: BTreeMap<u32, Asked>,
    next: u32,
    /// How many of those asked for have ended before the answer.
    unheard: usize,
}

#[derive(Debug)]
struct Waiting {
    id: OpId,
    deadline: Time,
    atomic: Atomic,
}

#[derive(Debug)]
struct Asked {
    id: OpId,
    deadline: Time,
    /// Completed; the owner's answer means nothing any more.
    ended: bool,
}

impl Atomics {
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        let asked = self.asked.values().filter(|a| !a.ended).map(|a| a.deadline);
        self.waiting.iter().map(|w| w.deadline).chain(asked)
    }

    /// The owner leaves too much unanswered.
    pub(super) fn is_crowded(&self) -> bool {
        self.unheard >= UNHEARD_MAX
    }

    /// The region that is waited for longest.
    pub(super) fn wanted(&self) -> Option<RegionKey> {
        self.waiting.front().map(|w| w.atomic.region.key)
    }

    pub(super) fn expire(&mut self, path: PathId, now: Time, signals: &mut Vec<Signal>) {
        self.give_up(path, Failure::Expired, |_, deadline| deadline <= now, signals);
    }

    pub(super) fn cancel(&mut self, path: PathId, op: OpId, signals: &mut Vec<Signal>) {
        self.give_up(path, Failure::Cancelled, |id, _| id == op, signals);
    }

    /// Ends everything, and tells whether the owner certainly carries out none of it any more.
    pub(super) fn end(&mut self, path: PathId, loss: Loss, signals: &mut Vec<Signal>) -> bool {
        let fenced = self.asked.is_empty() || loss == Loss::ClosedByPeer;
        let asked = std::mem::take(&mut self.asked).into_values();
        let asked = asked.filter(|a| !a.ended).map(|a| a.id);
        for id in self.waiting.drain(..).map(|w| w.id).chain(asked) {
            signals.push(completed(path, id, Err(Failure::PathLost { loss, fenced })));
        }
        fenced
    }

    /// What has not left ends by `cause`. What has left may have happened, and its answer is not waited for.
    fn give_up(&mut self, path: PathId, cause: Failure, which: impl Fn(OpId, Time) -> bool, signals: &mut Vec<Signal>) {
        self.waiting.retain(|waiting| {
            let over = which(waiting.id, waiting.deadline);
            if over {
                signals.push(completed(path, waiting.id, Err(cause)));
            }
            !over
        });
        for asked in self.asked.values_mut() {
            if !asked.ended && which(asked.id, asked.deadline) {
                asked.ended = true;
                self.unheard += 1;
                signals.push(completed(path, asked.id, Err(Failure::Unanswered)));
            }
        }
    }
}

impl Path {
    /// Takes an atomic operation on, and carries it out at once where the memory is mapped.
    pub(super) fn begin_atomic(
        &mut self,
        op: &Op,
        atomic: &Atomic,
        hazard: &Hazard,
        clock: &Clock,
        signals: &mut Vec<Signal>,
    ) {
        let key = atomic.region.key;
        let waiting = Waiting {
            id: op.id,
            deadline: op.deadline,
            atomic: atomic.clone(),
        };
        match self.targets.get(&key).map(Arc::clone) {
            Some(target) => self.carry_out(&waiting, &target, hazard, clock, signals),
            None => {
                self.atomics.waiting.push_back(waiting);
                self.ask(key);
            }
        }
    }

    /// The target of some waiting operations is known now, or will never be.
    pub(super) fn resume_atomics(
        &mut self,
        key: RegionKey,
        found: &Result<Arc<Target>, Failure>,
        hazard: &Hazard,
        clock: &Clock,
        signals: &mut Vec<Signal>,
    ) {
        for _ in 0..self.atomics.waiting.len() {
            let Some(waiting) = self.atomics.waiting.pop_front() else {
                break;
            };
            if waiting.atomic.region.key != key {
                self.atomics.waiting.push_back(waiting);
                continue;
            }
            match found {
                Ok(target) => self.carry_out(&waiting, target, hazard, clock, signals),
                Err(failure) => self.complete(waiting.id, Err(*failure), signals),
            }
        }
    }

    /// The owner has answered. `false`: to nothing that it was asked.
    pub(super) fn on_atomic_answer(
        &mut self,
        ask: u32,
        found: Result<u64, Refusal>,
        signals: &mut Vec<Signal>,
    ) -> bool {
        let Some(asked) = self.atomics.asked.remove(&ask) else {
            return false;
        };
        if asked.ended {
            self.atomics.unheard -= 1;
        } else {
            let outcome = found.map(Done::found).map_err(Failure::from);
            self.complete(asked.id, outcome, signals);
        }
        true
    }

    fn carry_out(
        &mut self,
        waiting: &Waiting,
        target: &Target,
        hazard: &Hazard,
        clock: &Clock,
        signals: &mut Vec<Signal>,
    ) {
        let Atomic { region, offset, act } = &waiting.atomic;
        // A deadline that comes between a look at the clock and the instruction has not passed: nothing is told before it is done.
        if clock.now() >= waiting.deadline {
            return self.complete(waiting.id, Err(Failure::Expired), signals);
        }
        if let Err(refusal) = check_word(target.access, target.len, *offset) {
            return self.complete(waiting.id, Err(refusal.into()), signals);
        }
        let Some(ledger) = self.ledger().map(Arc::clone) else {
            let loss = Loss::Closed;
            return self.complete(waiting.id, Err(Failure::PathLost { loss, fenced: true }), signals);
        };
        let Reach::Mapped(mapping) = &target.reach else {
            if !ledger.is_live(target.entry) {
                self.targets.remove(&region.key);
                return self.complete(waiting.id, Err(Refusal::Released.into()), signals);
            }
            return self.ask_atomic(waiting, clock);
        };
        let Some(inside) = hazard.enter(self.id.0, &ledger, target.entry) else {
            self.targets.remove(&region.key);
            return self.complete(waiting.id, Err(Refusal::Released.into()), signals);
        };
        // SAFETY: the word lies within the region, as was just checked, and the mapping holds the region whole, writable because
        // the region is. The ledger says that it lives, and the guard keeps it so.
        let found = unsafe { word_atomic(mapping.as_ptr().add(*offset as usize), *act) };
        drop(inside);
        let outcome = match found {
            // A peer that has gone meanwhile may not have been the one whose memory this was.
            Ok(_) if self.is_hung_up() => Err(Failure::PathLost {
                loss: Loss::ClosedByPeer,
                fenced: true,
            }),
            found => found.map(Done::found).map_err(Failure::from),
        };
        self.complete(waiting.id, outcome, signals);
    }

    fn ask_atomic(&mut self, waiting: &Waiting, clock: &Clock) {
        let ask = self.atomics.next;
        self.atomics.next = self.atomics.next.wrapping_add(1);
        let asked = Asked {
            id: waiting.id,
            deadline: waiting.deadline,
            ended: false,
        };
        self.atomics.asked.insert(ask, asked);
        let frame = Frame::Atomic(AtomicAsk {
            ask,
            deadline_mono_ns: deadline_mono_ns(waiting.deadline, clock),
            key: waiting.atomic.region.key,
            offset: waiting.atomic.offset,
            act: waiting.atomic.act,
        });
        self.send(&frame, Vec::new());
    }
}

fn completed(path: PathId, op: OpId, outcome: Result<Done, Failure>) -> Signal {
    Signal::Completed { path, op, outcome }
}
