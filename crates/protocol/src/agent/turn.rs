//! One turn: timeouts, posts, polls, and what follows from them.

use weft_plan::Time;

use super::atomics::{AtomicId, Atomics};
use super::parcels::is_parcel;
use super::{Core, Event};
use crate::session::{SessionEvent, Via};
use crate::transfer::{LaneId, PeerId, Post, TransferEvent};
use crate::transport::{Body, Op, OpId, Progress, Signal, Transport};

/// Rounds in one turn before others get theirs.
const ROUNDS_MAX: usize = 8;
/// Moves handed to a transport at once.
const BATCH_MAX: usize = 64;
/// Messages that wait for room on one path. The session sends again what is dropped beyond that.
const OUTBOX_MAX: usize = 256;
/// Messages, atomic operations and moves share the transport's numbers; the engine counts up from zero.
pub(super) const MESSAGE_BIT: u64 = 1 << 63;

impl<T: ?Sized + Transport> Core<T> {
    /// A whole turn over every transport. [`Progress::Busy`]: something was done or is left to do, so call again at once.
    ///
    /// It goes round again only for what it has itself set going, so that whoever shares the core waits for one round of
    /// copying at most.
    pub fn pump(&mut self, now: Time) -> Progress {
        let mut progress = Progress::Idle;
        for round in 0..ROUNDS_MAX {
            for slot in 0..self.slots.len() {
                if self.poll_slot(slot, now) == Progress::Busy {
                    progress = Progress::Busy;
                }
            }
            // After the poll: what has come in speaks for a peer that would otherwise be found silent.
            if round == 0 {
                self.on_timeouts(now);
            }
            if !self.flush(now) {
                break;
            }
        }
        progress
    }

    /// A short turn: posts what there is to post, and polls only the transports that took something.
    pub fn push(&mut self, now: Time) -> Progress {
        let mut progress = Progress::Idle;
        for _ in 0..ROUNDS_MAX {
            let flushed = self.flush(now);
            // A release may have set something going without leaving anything to hand over.
            let posted = self.posted.contains(&true);
            if flushed || posted {
                progress = Progress::Idle;
            }
            if !posted {
                break;
            }
            for slot in 0..self.slots.len() {
                if self.posted[slot] && self.poll_slot(slot, now) == Progress::Busy {
                    progress = Progress::Busy;
                }
            }
        }
        progress
    }

    /// When to turn again if no transport has anything before.
    pub fn next_timeout(&self) -> Option<Time> {
        let peers = self.timers.first().map(|(at, _)| *at);
        let unclaimed = self.unclaimed.front().map(|(by, _)| *by);
        [
            self.engine.next_timeout(),
            self.atomics.next_timeout(),
            self.here.next_timeout(),
            self.stages.next_timeout(),
            peers,
            unclaimed,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn on_timeouts(&mut self, now: Time) {
        if self.engine.next_timeout().is_some_and(|at| at <= now) {
            self.engine.on_timeout(now);
        }
        self.on_atomics_due(now);
        self.open_here(now);
        self.on_stages_due(now);
        self.ask_held_stages(now);
        self.expire_unclaimed(now);
        while let Some(&(at, peer)) = self.timers.first() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            let Some(state) = self.peers.at_mut(peer.0) else {
                continue;
            };
            state.timer = None;
            if let Some(session) = &mut state.session
                && session.next_timeout().is_some_and(|at| at <= now)
            {
                session.on_timeout(now);
            }
            self.on_peer_due(peer, now);
            self.on_parcels_due(peer, now);
            self.touch(peer);
        }
    }

    /// Hands over everything that the engine and the sessions want done; tells whether there was anything.
    fn flush(&mut self, now: Time) -> bool {
        if self.events.len() + self.untaken <= self.settings.events_max / 2 {
            self.touched.append(&mut self.stalled);
        }
        let mut any = self.open_laid(now);
        loop {
            any |= self.feed_stages(now);
            any |= self.post_atomics(now);
            any |= self.post_moves(now);
            // Nothing is left to post now; but what follows may give rise to more.
            let mut more = false;
            while let Some((LaneId(via), op)) = self.engine.next_cancel() {
                more = true;
                if let Some(path) = self.paths.at(via) {
                    self.slots[path.slot].transport.cancel(path.id, op, now);
                    self.posted[path.slot] = true;
                }
            }
            while let Some(event) = self.engine.next_event() {
                more = true;
                self.on_transfer_event(event, now);
            }
            while let Some(peer) = self.touched.pop() {
                more = true;
                self.settle(peer, now);
            }
            if !more {
                return any;
            }
            any = true;
        }
    }

    fn post_moves(&mut self, now: Time) -> bool {
        let mut any = false;
        let mut batch = std::mem::take(&mut self.batch);
        let mut next = self.engine.next_post();
        while let Some(Post { lane, op }) = next {
            any = true;
            batch.push(op);
            next = self.engine.next_post();
            while batch.len() < BATCH_MAX && next.as_ref().is_some_and(|post| post.lane == lane) {
                batch.extend(next.take().map(|post| post.op));
                next = self.engine.next_post();
            }
            let accepted = self.post_batch(lane, &mut batch, now);
            // What was given back may go another way.
            if !accepted && next.is_none() {
                next = self.engine.next_post();
            }
        }
        self.batch = batch;
        any
    }

    /// Hands moves over. False if some were not accepted.
    fn post_batch(&mut self, lane: LaneId, batch: &mut Vec<Op>, now: Time) -> bool {
        let accepted = match self.paths.at(lane.0) {
            Some(path) => {
                self.posted[path.slot] = true;
                // A path that is gone says so by a signal of its own; until then its moves are only not accepted.
                self.slots[path.slot].transport.post(path.id, batch, now).unwrap_or(0)
            }
            None => 0,
        };
        let all = accepted >= batch.len();
        // Given back from the last to the first, so that they are posted again in their order.
        while batch.len() > accepted {
            if let Some(op) = batch.pop() {
                self.engine.unaccepted(Post { lane, op });
            }
        }
        batch.clear();
        all
    }

    fn poll_slot(&mut self, slot: usize, now: Time) -> Progress {
        self.posted[slot] = false;
        let mut signals = std::mem::take(&mut self.signals);
        let progress = self.slots[slot].transport.poll(now, &mut signals);
        for signal in signals.drain(..) {
            self.on_signal(slot, signal, now);
        }
        self.signals = signals;
        progress
    }

    fn on_signal(&mut self, slot: usize, signal: Signal, now: Time) {
        let path = match &signal {
            Signal::Accepted { path } => {
                self.on_accepted(slot, *path, now);
                return;
            }
            Signal::Opened { path }
            | Signal::Lost { path, .. }
            | Signal::Completed { path, .. }
            | Signal::Message { path, .. }
            | Signal::Arrived { path, .. } => *path,
        };
        let Some(&via) = self.by_path[slot].at(path.0) else {
            return;
        };
        match signal {
            Signal::Completed { op, outcome, .. } => {
                if op.0 & MESSAGE_BIT == 0 {
                    self.engine.on_completion(LaneId(via), op, outcome, now);
                } else {
                    self.engine.on_room(LaneId(via));
                    if op.0 & Atomics::BITS == Atomics::BITS {
                        self.on_atomic_completed(AtomicId(op.0 & !Atomics::BITS), outcome);
                    }
                }
                let Some(path) = self.paths.at(via) else { return };
                let (peer, waits) = (path.peer, !path.outbox.is_empty());
                if let Some(peer) = peer {
                    self.atomics.wake(peer);
                }
                if waits {
                    self.send_waiting(via, now);
                }
                if let Some(peer) = peer {
                    self.post_parcels(peer, now);
                }
            }
            Signal::Arrived { arrival, .. } => self.on_arrival(via, arrival, now),
            Signal::Message { payload, .. } if is_parcel(&payload) => self.on_parcel(via, payload, now),
            Signal::Message { payload, .. } => self.on_message(via, &payload, now),
            Signal::Opened { .. } => self.on_opened(via, now),
            Signal::Lost { loss, fenced, .. } => self.on_lost(via, loss, fenced, now),
            Signal::Accepted { .. } => {}
        }
    }

    fn on_transfer_event(&mut self, event: TransferEvent, now: Time) {
        match event {
            TransferEvent::Cut { id, tag, parts } => {
                self.announce(id, Some((tag, parts)), now);
            }
            TransferEvent::Recall { id, tag } => self.recall_announcement(id, tag, now),
            TransferEvent::Ended { id, outcome } => {
                if self.on_hop_ended(id, &outcome, now) {
                    return;
                }
                self.end_announcement(id, outcome.is_ok(), now);
                self.events.push_back(Event::Ended { id, outcome });
            }
            TransferEvent::FenceWanted { peer, lane } => {
                if let Ok(session) = self.established(peer) {
                    // Where the session cannot ask, the deadline is the fence.
                    let _ = session.ask_fence(Via(lane.0), now);
                    self.touch(peer);
                }
            }
        }
    }

    /// Sends what a session has to say, hears what it has learnt, and notes when it falls due.
    fn settle(&mut self, peer: PeerId, now: Time) {
        self.send_messages(peer, now);
        self.count_told(peer);
        loop {
            // What nobody takes holds the peer back, not this agent's memory down.
            if self.events.len() + self.untaken >= self.settings.events_max {
                if !self.stalled.contains(&peer) {
                    self.stalled.push(peer);
                }
                break;
            }
            let state = self.peers.at_mut(peer.0);
            if let Some((number, parts)) = state.and_then(|p| p.arrived.next()) {
                self.events.push_back(Event::Arrived { peer, number, parts });
                continue;
            }
            let Some(event) = self.peers.at_mut(peer.0).and_then(|p| p.session.as_mut()?.next_event()) else {
                break;
            };
            self.on_session_event(peer, event, now);
        }
        self.say_unsaid(peer, now);
        self.announce_unsent(peer, now);
        self.send_messages(peer, now);
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        let due = state.due();
        if state.timer != due {
            if let Some(before) = state.timer {
                self.timers.remove(&(before, peer));
            }
            state.timer = due;
            self.timers.extend(due.map(|at| (at, peer)));
        }
    }

    fn on_session_event(&mut self, peer: PeerId, event: SessionEvent, now: Time) {
        match event {
            SessionEvent::Established { identity, .. } => self.on_established(peer, identity, now),
            SessionEvent::PathJoined { via } => self.on_joined(peer, via.0, now),
            SessionEvent::PathWanted => self.hurry_rails(peer, now),
            SessionEvent::Published { name, .. } => self.events.push_back(Event::Published { peer, name }),
            SessionEvent::Withdrawn { name } => self.events.push_back(Event::Withdrawn { peer, name }),
            SessionEvent::Notified { payload } => self.events.push_back(Event::Notified { peer, payload }),
            SessionEvent::NotificationDelivered { id } => {
                self.on_announcement_delivered(peer, id, now);
                self.events.push_back(Event::Delivered { peer, id });
            }
            SessionEvent::FenceAsked { label, via } => {
                if let Some(Via(via)) = via {
                    // What the peer holds for done may have arrived here unseen.
                    if let Some(slot) = self.paths.at(via).map(|path| path.slot) {
                        self.poll_slot(slot, now);
                    }
                    // A closed path acts on nothing any more, whatever of it is still under way.
                    self.close_path(via);
                }
                if let Ok(session) = self.established(peer) {
                    session.fence_done(label, now);
                }
            }
            SessionEvent::Fenced { via } => {
                self.engine.on_lane_fenced(LaneId(via.0), now);
            }
            SessionEvent::LeaseAsked {
                id, region, duration, ..
            } => {
                let duration = duration.min(self.settings.lease_max);
                let granted = self.regions.lease(peer, id, &region, duration, now);
                if let Ok(session) = self.established(peer) {
                    session.answer_lease(id, granted.map(|()| duration), now);
                }
            }
            SessionEvent::LeaseGranted { id, until } => self.events.push_back(Event::Leased { peer, lease: id, until }),
            SessionEvent::LeaseRefused { id, refusal } => {
                self.events.push_back(Event::LeaseRefused {
                    peer,
                    lease: id,
                    refusal,
                });
            }
            SessionEvent::LeaseReturned { id } => {
                self.regions.end_lease(peer, id);
            }
            SessionEvent::LeaseExpired { id } => {
                if !self.regions.end_lease(peer, id) {
                    self.events.push_back(Event::LeaseEnded { peer, lease: id });
                }
            }
            SessionEvent::Lost { cause } => self.part(peer, cause, now),
        }
    }

    fn send_messages(&mut self, peer: PeerId, now: Time) {
        while let Some((Via(via), bytes)) = self
            .peers
            .at_mut(peer.0)
            .and_then(|p| p.session.as_mut()?.next_message())
        {
            if let Some(path) = self.paths.at_mut(via).filter(|p| p.outbox.len() < OUTBOX_MAX) {
                path.outbox.push_back(bytes.into());
                self.send_waiting(via, now);
            }
        }
    }

    /// Posts the messages that wait for room on a path.
    pub(super) fn send_waiting(&mut self, via: u32, now: Time) {
        let Some(path) = self.paths.at_mut(via) else { return };
        let transport = &mut self.slots[path.slot].transport;
        while let Some(bytes) = path.outbox.front() {
            let op = Op::new(
                OpId(MESSAGE_BIT | self.next_message),
                now.saturating_add(self.settings.session.silence_max),
                Body::Message(bytes.clone()),
            );
            if transport.post(path.id, std::slice::from_ref(&op), now) != Ok(1) {
                return;
            }
            self.next_message += 1;
            self.posted[path.slot] = true;
            path.outbox.pop_front();
        }
    }

    pub(super) fn touch(&mut self, peer: PeerId) {
        if self.touched.last() != Some(&peer) {
            self.touched.push(peer);
        }
    }
}
