//! A transport that misbehaves within what the contract allows, the same way for the same seed.

use std::collections::{BTreeMap, BTreeSet};

use weft_plan::Time;

use crate::error::{Failure, Loss, Refusal};
use crate::leg::Direction;
use crate::region::{Region, RegionKey};
use crate::seeded::Seeded;
use crate::transport::{
    Body, Capabilities, Done, Grant, Move, Op, OpId, PathId, PeerAddress, Progress, Signal, Transport,
};

/// How often what goes wrong, each from 0 (never) to 1 (always). The default is harmless.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub seed: u64,
    /// A message is lost, and its sender told that it was sent.
    pub drop_message: f64,
    /// A message arrives twice.
    pub duplicate_message: f64,
    /// A completion, message or arrival is told late, by up to `delay_max`, and so out of order.
    pub delay: f64,
    pub delay_max: Time,
    /// A read succeeds with one byte wrong.
    pub spoil_read: f64,
    /// A move or an atomic operation is not carried out and fails as on a lost path, though the path lives on.
    pub lose_move: f64,
    /// An atomic operation is carried out, and its answer lost.
    pub lose_answer: f64,
    /// No more operations are accepted in this post.
    pub refuse_post: f64,
}

/// Wraps a transport and adds [`Faults`].
#[derive(Debug)]
pub struct Faulty<T> {
    inner: T,
    capabilities: Capabilities,
    faults: Faults,
    random: Seeded,
    /// Reads that may come back spoiled.
    reads: BTreeMap<(PathId, OpId), Move>,
    /// Atomic operations whose answers may be lost.
    atomics: BTreeSet<(PathId, OpId)>,
    /// Second copies of messages, whose completions nobody waits for.
    copies: BTreeSet<OpId>,
    next_copy: u64,
    /// What will be told, and from when on.
    held: Vec<(Time, Signal)>,
}

impl<T: Transport> Faulty<T> {
    pub fn new(inner: T, faults: Faults) -> Faulty<T> {
        let mut capabilities = inner.capabilities().clone();
        if faults.drop_message > 0.0 || faults.duplicate_message > 0.0 || faults.delay > 0.0 {
            capabilities.reliable_messages = false;
        }
        Faulty {
            inner,
            capabilities,
            faults,
            random: Seeded::new(faults.seed),
            reads: BTreeMap::new(),
            atomics: BTreeSet::new(),
            copies: BTreeSet::new(),
            next_copy: u64::MAX,
            held: Vec::new(),
        }
    }

    /// When something that was held back is due.
    pub fn next_timeout(&self) -> Option<Time> {
        self.held.iter().map(|(due, _)| *due).min()
    }

    /// Ends an operation that never reaches the transport below.
    fn complete(&mut self, path: PathId, op: OpId, outcome: Result<Done, Failure>, now: Time) {
        self.held.push((now, Signal::Completed { path, op, outcome }));
    }

    fn send_copy(&mut self, path: PathId, op: &Op, now: Time) {
        let copy = Op {
            id: OpId(self.next_copy),
            ..op.clone()
        };
        self.next_copy -= 1;
        if matches!(self.inner.post(path, std::slice::from_ref(&copy), now), Ok(1)) {
            self.copies.insert(copy.id);
        }
    }

    fn spoil(&mut self, part: &Move) {
        let len = part.range.end - part.range.start;
        if len == 0 {
            return;
        }
        let at = part.range.start + self.random.below(len);
        if let Some(span) = part.leg.local_spans().pieces(at..at + 1).next() {
            let Some(memory) = part.leg.local().memory.host() else {
                return;
            };
            let mut byte = [0];
            memory.read(span.offset, &mut byte);
            memory.write(span.offset, &[byte[0] ^ 0x10]);
        }
    }

    /// What the transport below said, as far as it gets through.
    fn pass_on(&mut self, mut signal: Signal, now: Time, signals: &mut Vec<Signal>) {
        if let Signal::Completed { path, op, outcome } = &mut signal {
            if self.copies.remove(op) {
                return;
            }
            if let Some(part) = self.reads.remove(&(*path, *op))
                && outcome.is_ok()
                && self.random.chance(self.faults.spoil_read)
            {
                self.spoil(&part);
                // Who moves the bytes sums what it has left behind.
                if let (Ok(done), Ok(near_sum)) = (&mut *outcome, part.near_sum()) {
                    done.near_sum = near_sum;
                }
            }
            if self.atomics.remove(&(*path, *op)) && outcome.is_ok() && self.random.chance(self.faults.lose_answer) {
                *outcome = Err(Failure::Unanswered);
            }
        }
        match &signal {
            Signal::Completed { .. } | Signal::Message { .. } | Signal::Arrived { .. } => {
                if self.faults.delay > 0.0 && self.random.chance(self.faults.delay) {
                    let late = Time::from_ns(self.random.below(self.faults.delay_max.as_ns().max(1)));
                    self.held.push((now.saturating_add(late), signal));
                    return;
                }
            }
            Signal::Lost { path, .. } => {
                // Nothing may follow the loss of a path.
                let path = *path;
                signals.extend(
                    self.held
                        .extract_if(.., |(_, held)| held.path() == path)
                        .map(|(_, held)| held),
                );
                self.reads.retain(|(on, _), _| *on != path);
                self.atomics.retain(|(on, _)| *on != path);
            }
            Signal::Opened { .. } | Signal::Accepted { .. } => {}
        }
        signals.push(signal);
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        self.inner.register(region)
    }
    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        self.inner.release(key)
    }
    fn open(&mut self, peer: &PeerAddress, now: Time) -> Result<PathId, Loss> {
        self.inner.open(peer, now)
    }
    fn vouch(&mut self, path: PathId) {
        self.inner.vouch(path);
    }
    fn close(&mut self, path: PathId) {
        self.inner.close(path);
    }

    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        // A post of nothing tells whether the path lives, before anything is pretended about it.
        self.inner.post(path, &[], now)?;
        for (i, op) in ops.iter().enumerate() {
            if self.random.chance(self.faults.refuse_post) {
                return Ok(i);
            }
            let is_message = matches!(op.body, Body::Message(_));
            if is_message && self.random.chance(self.faults.drop_message) {
                self.complete(path, op.id, Ok(Done::default()), now);
                continue;
            }
            if !is_message && self.random.chance(self.faults.lose_move) {
                let loss = Loss::Silent;
                self.complete(path, op.id, Err(Failure::PathLost { loss, fenced: true }), now);
                continue;
            }
            if self.inner.post(path, std::slice::from_ref(op), now)? == 0 {
                return Ok(i);
            }
            match &op.body {
                Body::Message(_) if self.random.chance(self.faults.duplicate_message) => self.send_copy(path, op, now),
                Body::Move(part) if part.direction == Direction::Read && self.faults.spoil_read > 0.0 => {
                    self.reads.insert((path, op.id), part.clone());
                }
                Body::Atomic(_) if self.faults.lose_answer > 0.0 => {
                    self.atomics.insert((path, op.id));
                }
                _ => {}
            }
        }
        Ok(ops.len())
    }

    fn cancel(&mut self, path: PathId, op: OpId, now: Time) {
        self.inner.cancel(path, op, now);
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        let mut fresh = Vec::new();
        let progress = self.inner.poll(now, &mut fresh);
        signals.extend(self.held.extract_if(.., |(due, _)| *due <= now).map(|(_, held)| held));
        for signal in fresh {
            self.pass_on(signal, now, signals);
        }
        progress
    }
}
