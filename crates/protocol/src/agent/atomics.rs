//! Atomic operations on peers' words: which path carries each, and what it means that one has ended.
//!
//! One that a path has accepted is never posted again, unless its target has said that it cannot be done this way; so it happens
//! once at most. One that waits has certainly not happened. Nothing orders them among each other, nor against transfers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use thiserror::Error;
use weft_plan::Time;

use super::connect::has;
use super::{Core, Event, PeerError};
use crate::atomic::Atomic;
use crate::error::{Failure, Loss, Refusal};
use crate::transfer::{PeerId, SubmitError};
use crate::transport::{Body, Capabilities, Done, Op, OpId, Transport};

/// Those to one peer that may be under way or wait.
const ATOMICS_MAX: usize = 4096;
/// Which share of a path's places they may take, so that messages and moves find room beside them.
const PLACES_SHARE: usize = 8;
/// How long a peer's queue rests at first when a path has no room, and at most: each time in vain doubles it.
const ROOM_AGAIN: Time = Time::from_us(50);
const ROOM_AGAIN_MAX: Time = Time::from_ms(10);

/// An atomic operation, numbered by the agent and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AtomicId(pub u64);

/// An atomic operation that brought no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{cause}, over {transport}; {}", if *.may_have_happened { "it may have been carried out" } else { "it was not carried out" })]
pub struct AtomicError {
    pub peer: PeerId,
    pub cause: Failure,
    /// The transport that it was on, else the one that it would have gone over, else `none`.
    pub transport: &'static str,
    /// It was sent, and what became of it is not known. Otherwise the word is as if it had never been asked for.
    pub may_have_happened: bool,
}

/// All that are not over.
#[derive(Debug, Default)]
pub(super) struct Atomics {
    open: BTreeMap<AtomicId, Open>,
    peers: BTreeMap<PeerId, Queue>,
    /// Deadlines of those for which they have not passed.
    deadlines: BTreeSet<(Time, AtomicId)>,
    /// Peers for which something may be posted.
    ready: Vec<PeerId>,
    /// Peers that rest until then.
    resting: BTreeSet<(Time, PeerId)>,
    next: u64,
}

#[derive(Debug)]
struct Open {
    peer: PeerId,
    atomic: Atomic,
    deadline: Time,
    /// The path that has accepted it.
    on: Option<u32>,
    /// Transports that cannot do it.
    avoid: Vec<&'static str>,
    /// The deadline has passed, and its transport has been told.
    overdue: bool,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<AtomicId>,
    /// Those that wait and those under way.
    open: usize,
    /// The paths that carry atomic operations, the quickest first.
    lanes: Vec<Lane>,
    /// How long it has rested, the last time in vain.
    rested: Time,
}

#[derive(Debug)]
struct Lane {
    via: u32,
    transport: &'static str,
    latency: Time,
    inflight: usize,
    inflight_max: usize,
}

/// Where an operation may go.
enum Choice {
    Lane(u32),
    /// There is a path, but full.
    Full,
    /// No path that is open can carry it.
    Nowhere,
}

impl Atomics {
    /// The number of an operation at its transport. The engine's have the topmost bit clear, and messages the next one.
    pub(super) const BITS: u64 = 3 << 62;

    pub(super) fn add_lane(&mut self, peer: PeerId, via: u32, capabilities: &Capabilities) {
        if !capabilities.atomics {
            return;
        }
        let queue = self.peers.entry(peer).or_default();
        queue.lanes.push(Lane {
            via,
            transport: capabilities.name,
            latency: capabilities.latency().into(),
            inflight: 0,
            inflight_max: (capabilities.max_inflight_ops / PLACES_SHARE).max(1),
        });
        queue.lanes.sort_by_key(|lane| lane.latency);
        self.wake(peer);
    }

    /// How many paths to a peer carry atomic operations.
    #[cfg(test)]
    pub(super) fn lane_count(&self, peer: PeerId) -> usize {
        self.peers.get(&peer).map_or(0, |queue| queue.lanes.len())
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let rested = self.resting.first().map(|(at, _)| *at);
        deadline.into_iter().chain(rested).min()
    }

    /// A path to this peer may have room.
    pub(super) fn wake(&mut self, peer: PeerId) {
        if self.open.is_empty() {
            return;
        }
        let waits = self.peers.get(&peer).is_some_and(|queue| !queue.waiting.is_empty());
        if waits && self.ready.last() != Some(&peer) {
            self.ready.push(peer);
        }
    }

    /// Takes one out of all lists. What it was on has a place more.
    fn remove(&mut self, id: AtomicId) -> Option<Open> {
        let open = self.open.remove(&id)?;
        self.deadlines.remove(&(open.deadline, id));
        if let Some(queue) = self.peers.get_mut(&open.peer) {
            queue.open -= 1;
            if open.on.is_none() {
                queue.waiting.retain(|waiting| *waiting != id);
            }
            if let Some(lane) = queue.lane(open.on) {
                lane.inflight -= 1;
            }
        }
        Some(open)
    }

    fn of_peer(&self, peer: PeerId) -> Vec<AtomicId> {
        let of_peer = self.open.iter().filter(|(_, open)| open.peer == peer);
        of_peer.map(|(id, _)| *id).collect()
    }
}

impl Queue {
    fn lane(&mut self, via: Option<u32>) -> Option<&mut Lane> {
        self.lanes.iter_mut().find(|lane| Some(lane.via) == via)
    }

    /// A lane of the quickest transport that can, the one with the least on it.
    fn choose(&self, avoid: &[&'static str]) -> Choice {
        let able = || self.lanes.iter().filter(|lane| !avoid.contains(&lane.transport));
        let Some(quickest) = able().next() else {
            return Choice::Nowhere;
        };
        let class = able().filter(|lane| lane.transport == quickest.transport);
        match class.min_by_key(|lane| lane.inflight) {
            Some(lane) if lane.inflight < lane.inflight_max => Choice::Lane(lane.via),
            _ => Choice::Full,
        }
    }
}

impl<T: ?Sized + Transport> Core<T> {
    /// Asks for an atomic operation on a word of a peer's region. [`Event::AtomicEnded`] follows, by the deadline.
    pub fn atomic(&mut self, peer: PeerId, atomic: Atomic, deadline: Time, now: Time) -> Result<AtomicId, PeerError> {
        self.established(peer)?;
        let queue = self.atomics.peers.entry(peer).or_default();
        if queue.open >= ATOMICS_MAX {
            return Err(SubmitError::TooManyAtomics.into());
        }
        let id = AtomicId(self.atomics.next);
        self.atomics.next += 1;
        queue.open += 1;
        queue.waiting.push_back(id);
        self.atomics.deadlines.insert((deadline, id));
        let open = Open {
            peer,
            atomic,
            deadline,
            on: None,
            avoid: Vec::new(),
            overdue: false,
        };
        self.atomics.open.insert(id, open);
        if deadline <= now {
            self.end_atomic(id, Err(Failure::Expired));
        }
        self.atomics.wake(peer);
        Ok(id)
    }

    /// Waits no longer for an atomic operation. Its [`Event::AtomicEnded`] still comes, and says what is known of it.
    pub fn cancel_atomic(&mut self, id: AtomicId, now: Time) {
        let Some(open) = self.atomics.open.get(&id) else { return };
        match open.on {
            None => self.end_atomic(id, Err(Failure::Cancelled)),
            Some(via) => {
                if let Some(path) = self.paths.at(via) {
                    let op = OpId(Atomics::BITS | id.0);
                    self.slots[path.slot].transport.cancel(path.id, op, now);
                    self.posted[path.slot] = true;
                }
            }
        }
    }

    /// Hands over what there is room for; tells whether there was anything.
    pub(super) fn post_atomics(&mut self, now: Time) -> bool {
        let mut any = false;
        while let Some(peer) = self.atomics.ready.pop() {
            any = true;
            self.post_atomics_of(peer, now);
        }
        any
    }

    fn post_atomics_of(&mut self, peer: PeerId, now: Time) {
        let waiting = self.atomics.peers.get(&peer).map_or(0, |queue| queue.waiting.len());
        for _ in 0..waiting {
            let Some(queue) = self.atomics.peers.get_mut(&peer) else {
                return;
            };
            let Some(id) = queue.waiting.pop_front() else { return };
            let Some(open) = self.atomics.open.get(&id) else {
                continue;
            };
            match queue.choose(&open.avoid) {
                Choice::Lane(via) => {
                    if !self.post_atomic(id, via, now) {
                        self.rest(peer, id, via, now);
                        return;
                    }
                }
                Choice::Full => {
                    queue.waiting.push_front(id);
                    return;
                }
                Choice::Nowhere if self.may_come(peer, &open.avoid) => {
                    if let Some(queue) = self.atomics.peers.get_mut(&peer) {
                        queue.waiting.push_back(id);
                    }
                }
                Choice::Nowhere => self.end_atomic(id, Err(Refusal::Unsupported.into())),
            }
        }
    }

    fn post_atomic(&mut self, id: AtomicId, via: u32, now: Time) -> bool {
        let (Some(open), Some(path)) = (self.atomics.open.get_mut(&id), self.paths.at(via)) else {
            return false;
        };
        let op = Op::new(
            OpId(Atomics::BITS | id.0),
            open.deadline,
            Body::Atomic(open.atomic.clone()),
        );
        self.posted[path.slot] = true;
        // A path that is gone says so by a signal of its own; until then it only does not accept.
        let accepted = self.slots[path.slot]
            .transport
            .post(path.id, std::slice::from_ref(&op), now);
        if accepted != Ok(1) {
            return false;
        }
        open.on = Some(via);
        if let Some(queue) = self.atomics.peers.get_mut(&open.peer) {
            queue.rested = Time::ZERO;
            if let Some(lane) = queue.lane(Some(via)) {
                lane.inflight += 1;
            }
        }
        true
    }

    /// A path has not accepted an operation: it waits for a completion there, or for a while where there is nothing to complete.
    fn rest(&mut self, peer: PeerId, id: AtomicId, via: u32, now: Time) {
        let Some(queue) = self.atomics.peers.get_mut(&peer) else {
            return;
        };
        queue.waiting.push_front(id);
        if queue.lane(Some(via)).is_some_and(|lane| lane.inflight > 0) {
            return;
        }
        queue.rested = queue
            .rested
            .saturating_add(queue.rested)
            .max(ROOM_AGAIN)
            .min(ROOM_AGAIN_MAX);
        let until = now.saturating_add(queue.rested);
        self.atomics.resting.insert((until, peer));
    }

    /// Whether a path to the peer may yet open that carries atomic operations.
    fn may_come(&self, peer: PeerId, avoid: &[&'static str]) -> bool {
        let Some(identity) = self.identity(peer) else {
            return false;
        };
        let distance = self.distance(identity);
        self.slots.iter().any(|slot| {
            let capabilities = slot.transport.capabilities();
            capabilities.atomics
                && slot.reach.joins(distance)
                && has(identity, capabilities.name)
                && !avoid.contains(&capabilities.name)
        })
    }

    pub(super) fn on_atomic_completed(&mut self, id: AtomicId, outcome: Result<Done, Failure>) {
        let Some(open) = self.atomics.open.get_mut(&id) else {
            return;
        };
        let outcome = match outcome {
            // It was carried out, or so its transport says, and what it found is lost.
            Ok(done) => done.before.ok_or(Failure::Unanswered),
            Err(Failure::Refused(Refusal::Late)) => Err(Failure::Expired),
            Err(Failure::Cancelled | Failure::Refused(Refusal::Unsupported)) if open.overdue => Err(Failure::Expired),
            Err(Failure::Refused(Refusal::Unsupported)) => return self.try_otherwise(id),
            Err(failure) => Err(failure),
        };
        let peer = open.peer;
        self.end_atomic(id, outcome);
        self.atomics.wake(peer);
    }

    /// The target cannot do it this way, so it has not been done, and may be asked for another way.
    fn try_otherwise(&mut self, id: AtomicId) {
        let Some(open) = self.atomics.open.get_mut(&id) else {
            return;
        };
        let peer = open.peer;
        let Some(queue) = self.atomics.peers.get_mut(&peer) else {
            return;
        };
        if let Some(lane) = queue.lane(open.on.take()) {
            lane.inflight -= 1;
            if !open.avoid.contains(&lane.transport) {
                open.avoid.push(lane.transport);
            }
        }
        queue.waiting.push_front(id);
        self.atomics.wake(peer);
    }

    pub(super) fn on_atomics_due(&mut self, now: Time) {
        while let Some(&(at, peer)) = self.atomics.resting.first().filter(|(at, _)| *at <= now) {
            self.atomics.resting.remove(&(at, peer));
            self.atomics.wake(peer);
        }
        while let Some(&(at, id)) = self.atomics.deadlines.first().filter(|(at, _)| *at <= now) {
            self.atomics.deadlines.remove(&(at, id));
            let Some(open) = self.atomics.open.get_mut(&id) else {
                continue;
            };
            open.overdue = true;
            match open.on {
                None => self.end_atomic(id, Err(Failure::Expired)),
                // Its transport knows the deadline too; it says what is known of the operation.
                Some(_) => self.cancel_atomic(id, now),
            }
        }
    }

    /// A path is gone. What it has accepted and not completed, against its transport's promise, is unknown.
    pub(super) fn on_atomic_lane_lost(&mut self, peer: PeerId, via: u32, loss: Loss, fenced: bool) {
        for id in self.atomics.of_peer(peer) {
            if self.atomics.open.get(&id).is_some_and(|open| open.on == Some(via)) {
                self.end_atomic(id, Err(Failure::PathLost { loss, fenced }));
            }
        }
        if let Some(queue) = self.atomics.peers.get_mut(&peer) {
            queue.lanes.retain(|lane| lane.via != via);
        }
        self.drop_idle_queue(peer);
        self.atomics.wake(peer);
    }

    /// The peer is gone for good: what waits has not happened, and what is under way is not waited for.
    pub(super) fn on_atomics_peer_gone(&mut self, peer: PeerId, loss: Loss, now: Time) {
        for id in self.atomics.of_peer(peer) {
            let waits = self.atomics.open.get(&id).is_some_and(|open| open.on.is_none());
            if waits {
                self.end_atomic(id, Err(Failure::PathLost { loss, fenced: true }));
            } else {
                self.cancel_atomic(id, now);
            }
        }
    }

    fn end_atomic(&mut self, id: AtomicId, outcome: Result<u64, Failure>) {
        let transport = self.transport_of(id);
        let Some(open) = self.atomics.remove(id) else { return };
        self.drop_idle_queue(open.peer);
        let outcome = outcome.map_err(|cause| AtomicError {
            peer: open.peer,
            cause,
            transport,
            may_have_happened: open.on.is_some() && cause.may_have_happened(),
        });
        self.events.push_back(Event::AtomicEnded { id, outcome });
    }

    /// The transport that an operation is on, else the one that it would go over.
    fn transport_of(&self, id: AtomicId) -> &'static str {
        let Some(open) = self.atomics.open.get(&id) else {
            return "none";
        };
        let queue = self.atomics.peers.get(&open.peer);
        let lanes = || queue.into_iter().flat_map(|queue| &queue.lanes);
        let on = lanes().find(|lane| Some(lane.via) == open.on);
        on.or_else(|| lanes().next()).map_or("none", |lane| lane.transport)
    }

    /// A queue without paths and without anything open is nobody's.
    fn drop_idle_queue(&mut self, peer: PeerId) {
        let idle = |queue: &Queue| queue.open == 0 && queue.lanes.is_empty();
        if self.atomics.peers.get(&peer).is_some_and(idle) {
            self.atomics.peers.remove(&peer);
            self.atomics.resting.retain(|(_, resting)| *resting != peer);
        }
    }
}
