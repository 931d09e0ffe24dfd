//! One turn: timeouts, posts, polls, and what follows from them.

use std::collections::BTreeSet;
use std::sync::Arc;

use weft_plan::Time;

use super::connect::{Peer, Stage};
use super::{Core, Event};
use crate::session::{Session, SessionEvent, Via};
use crate::transfer::{LaneId, PeerId, Post, TransferEvent};
use crate::transport::{Body, Op, OpId, Progress, Signal, Transport};

/// Rounds in one turn before others get theirs.
const ROUNDS_MAX: usize = 8;
/// Moves handed to a transport at once.
const BATCH_MAX: usize = 64;
/// Messages that wait for room on one path. The session sends again what is dropped beyond that.
const OUTBOX_MAX: usize = 256;
/// Messages and moves share the transport's numbers; the engine counts up from zero.
const MESSAGE_BIT: u64 = 1 << 63;

impl<T: ?Sized + Transport> Core<T> {
    /// A whole turn over every transport. [`Progress::Busy`]: call again at once.
    pub fn pump(&mut self, now: Time) -> Progress {
        self.on_timeouts(now);
        let mut progress = Progress::Idle;
        for _ in 0..ROUNDS_MAX {
            self.flush(now);
            let mut polled = Progress::Idle;
            for slot in 0..self.slots.len() {
                if self.poll_slot(slot, now) == Progress::Busy {
                    polled = Progress::Busy;
                }
            }
            progress = polled;
            if progress == Progress::Idle && !self.flush(now) {
                return Progress::Idle;
            }
        }
        progress
    }

    /// A short turn: posts what there is to post, and polls only the transports that took something.
    pub fn push(&mut self, now: Time) -> Progress {
        let mut progress = Progress::Idle;
        for _ in 0..ROUNDS_MAX {
            if !self.flush(now) {
                break;
            }
            progress = Progress::Idle;
            for slot in 0..self.slots.len() {
                if std::mem::take(&mut self.posted[slot]) && self.poll_slot(slot, now) == Progress::Busy {
                    progress = Progress::Busy;
                }
            }
        }
        progress
    }

    /// Polls one transport, the one whose owner was woken, and does what follows.
    pub fn pump_slot(&mut self, slot: usize, now: Time) -> Progress {
        let progress = self.poll_slot(slot, now);
        self.flush(now);
        progress
    }

    /// When to turn again if no transport has anything before.
    pub fn next_timeout(&self) -> Option<Time> {
        let peers = self.timers.first().map(|(at, _)| *at);
        let unclaimed = self.unclaimed.front().map(|(by, _)| *by);
        [self.engine.next_timeout(), peers, unclaimed].into_iter().flatten().min()
    }

    fn on_timeouts(&mut self, now: Time) {
        if self.engine.next_timeout().is_some_and(|at| at <= now) {
            self.engine.on_timeout(now);
        }
        self.expire_unclaimed(now);
        while let Some(&(at, peer)) = self.timers.first() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            let Some(state) = self.peers.at_mut(peer.0) else { continue };
            state.timer = None;
            if let Some(session) = &mut state.session {
                if session.next_timeout().is_some_and(|at| at <= now) {
                    session.on_timeout(now);
                }
            }
            self.on_peer_due(peer, now);
            self.touched.push(peer);
        }
    }

    /// Hands over everything that the engine and the sessions want done; tells whether there was anything.
    fn flush(&mut self, now: Time) -> bool {
        let mut any = false;
        loop {
            let mut more = self.post_moves(now);
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
            self.post_batch(lane, &mut batch, now);
        }
        self.batch = batch;
        any
    }

    fn post_batch(&mut self, lane: LaneId, batch: &mut Vec<Op>, now: Time) {
        let accepted = match self.paths.at(lane.0) {
            Some(path) => {
                self.posted[path.slot] = true;
                // A path that is gone says so by a signal of its own; until then its moves are only not accepted.
                self.slots[path.slot].transport.post(path.id, batch, now).unwrap_or(0)
            }
            None => 0,
        };
        // Given back from the last to the first, so that they are posted again in their order.
        while batch.len() > accepted {
            if let Some(op) = batch.pop() {
                self.engine.unaccepted(Post { lane, op });
            }
        }
        batch.clear();
    }

    fn poll_slot(&mut self, slot: usize, now: Time) -> Progress {
        let mut signals = std::mem::take(&mut self.signals);
        let progress = self.slots[slot].transport.poll(now, &mut signals);
        for signal in signals.drain(..) {
            self.on_signal(slot, signal, now);
        }
        self.signals = signals;
        progress
    }

    fn on_signal(&mut self, slot: usize, signal: Signal, now: Time) {
        let number = |path: crate::transport::PathId| self.by_path[slot].at(path.0).copied();
        match signal {
            Signal::Completed { path, op, outcome } => {
                let Some(via) = number(path) else { return };
                if op.0 & MESSAGE_BIT == 0 {
                    self.engine.on_completion(LaneId(via), op, outcome, now);
                }
                self.send_waiting(via, now);
            }
            Signal::Arrived { path, arrival } => {
                let Some(peer) = number(path).and_then(|via| self.paths.at(via)?.peer) else { return };
                if let Some(Peer { session: Some(session), .. }) = self.peers.at_mut(peer.0) {
                    session.on_arrival(arrival, now);
                    self.touched.push(peer);
                }
            }
            Signal::Message { path, payload } => {
                if let Some(via) = number(path) {
                    self.on_message(via, &payload, now);
                }
            }
            Signal::Opened { path } => {
                if let Some(via) = number(path) {
                    self.on_opened(via, now);
                }
            }
            Signal::Accepted { path } => self.on_accepted(slot, path, now),
            Signal::Lost { path, loss, fenced } => {
                if let Some(via) = number(path) {
                    self.on_lost(via, loss, fenced, now);
                }
            }
        }
    }

    fn on_transfer_event(&mut self, event: TransferEvent, now: Time) {
        match event {
            TransferEvent::Cut { id, tag, parts } => {
                let Some(announcement) = self.announcements.get_mut(&id) else { return };
                if announcement.tag != Some(tag) {
                    return;
                }
                announcement.after = Some((tag, parts));
                self.announce(id, now);
            }
            TransferEvent::Ended { id, outcome } => {
                self.on_ended(id, outcome.is_ok(), now);
                self.events.push_back(Event::Ended { id, outcome });
            }
            TransferEvent::FenceWanted { lane } => {
                let Some(peer) = self.lost_lanes.get(&lane.0).copied() else { return };
                if let Ok(session) = self.established(peer) {
                    session.ask_fence(Via(lane.0), now);
                    self.touched.push(peer);
                }
            }
        }
    }

    /// Sends what a session has to say, hears what it has learnt, and notes when it falls due.
    fn settle(&mut self, peer: PeerId, now: Time) {
        while let Some(event) = self.peers.at_mut(peer.0).and_then(|p| p.session.as_mut()?.next_event()) {
            self.on_session_event(peer, event, now);
        }
        while let Some((Via(via), bytes)) = self.peers.at_mut(peer.0).and_then(|p| p.session.as_mut()?.next_message()) {
            if let Some(path) = self.paths.at_mut(via) {
                if path.outbox.len() < OUTBOX_MAX {
                    path.outbox.push_back(bytes.into());
                    self.send_waiting(via, now);
                }
            }
        }
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
}
