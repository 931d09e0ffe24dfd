//! The life of an established session: sealed messages in and out, acknowledgements, signs of life.

use weft_plan::Time;

use super::arrivals::Ready;
use super::config::{MAX_EVENTS, MAX_REGIONS};
use super::event::{CloseReason, Misbehaviour, SessionEvent, SessionLoss, Via};
use super::stream::{ACK_DELAY, ACK_EVERY, Turn};
use super::wire::{self, Control, Message, Traffic};
use super::{Acks, Session, State};

impl Session {
    /// Handles a message. `None` if it is not what it should be.
    pub(super) fn receive(&mut self, via: Via, bytes: &[u8], now: Time) -> Option<()> {
        match Message::decode(bytes).ok()? {
            Message::Traffic => self.on_traffic(via, bytes, now),
            Message::Join { .. } => self.on_join(via, bytes, now),
            greeting => self.on_greeting(via, bytes, greeting, now),
        }
    }

    pub(super) fn on_open_timeout(&mut self, now: Time) {
        if self.patience_end() <= now {
            let cause = if self.paths.any_joined() {
                SessionLoss::Silent
            } else {
                SessionLoss::NoPath
            };
            self.end(cause);
            return;
        }
        self.repeat_greeting(now);
        self.announce_paths(now);
        if self.acks.due.is_some_and(|due| due <= now) {
            self.acks.due = None;
            self.acks.at_once = true;
        }
        for via in self.outbox.on_timeout(now) {
            if let Some(path) = self.paths.find(via) {
                path.on_failure();
            }
        }
        if self.next_heartbeat().is_some_and(|due| due <= now) {
            self.send_heartbeat();
        }
    }

    pub(super) fn next_open_timeout(&self) -> Option<Time> {
        [
            Some(self.patience_end()),
            self.handshake.next_repeat(),
            self.paths.next_timeout(),
            self.acks.due,
            self.outbox.next_timeout(),
            self.next_heartbeat(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Tells the peer of the paths that this end has opened, as often as it takes.
    pub(super) fn announce_paths(&mut self, now: Time) {
        let Some(open) = &mut self.open else {
            return;
        };
        while let Some(path) = self.paths.next_join(now) {
            let mut message = wire::encode_join(open.session, open.number, path.label);
            open.number += 1;
            open.keys.seal(path.label, &mut message);
            path.on_announced(now);
            self.made.push_back((path.via, message));
        }
    }

    /// The next traffic message, if there is a reason for one.
    pub(super) fn make_traffic(&mut self) -> Option<(Via, Vec<u8>)> {
        if !matches!(self.state, State::Open | State::Closing { .. }) {
            return None;
        }
        if self.outbox.is_ready() {
            let path = self.paths.best(self.outbox.resend_from())?;
            let (via, label) = (path.via, path.label);
            return self.seal_traffic(via, label);
        }
        if !self.acks.at_once {
            return None;
        }
        let heard_on = self
            .acks
            .via
            .and_then(|via| self.paths.find(via))
            .map(|path| (path.via, path.label));
        let (via, label) = heard_on.or_else(|| self.paths.best(None).map(|path| (path.via, path.label)))?;
        self.seal_traffic(via, label)
    }

    /// Goes on where too many events stood in the way.
    pub(super) fn resume(&mut self) {
        self.stalled = false;
        if matches!(self.state, State::Open | State::Closing { .. }) {
            self.take_turns(self.now);
            self.acks.at_once = true;
        }
    }

    /// Hands notifications on whose data is in place, and tells the peer.
    pub(super) fn deliver(&mut self, ready: Vec<Ready>) {
        for Ready { id, payload } in ready {
            self.events.push_back(SessionEvent::Notified { payload });
            self.say(Control::Delivered { id });
        }
    }

    /// An authenticated peer does what the protocol does not allow: there is nothing more to be had from it.
    pub(super) fn on_misbehaviour(&mut self, misbehaviour: Misbehaviour) {
        self.say(Control::Goodbye {
            reason: CloseReason::Misbehaved,
        });
        if let Some(farewell) = self.make_traffic() {
            self.made.push_back(farewell);
        }
        self.end(SessionLoss::Misbehaved(misbehaviour));
    }

    fn on_traffic(&mut self, via: Via, bytes: &[u8], now: Time) -> Option<()> {
        let open = self.open.as_mut()?;
        let path = self.paths.find(via)?;
        let label = path.label;
        let opened = open.keys.open(label, bytes)?;
        let mut traffic = match Traffic::decode(opened) {
            Ok(traffic) => traffic,
            Err(malformed) => {
                self.on_misbehaviour(malformed.into());
                return None;
            }
        };
        if !open.replay.admit(traffic.number) {
            return None;
        }
        if self.state == State::Ended {
            // The peer's goodbye may be acknowledged once more, so that it need not wait.
            let farewell = self.parted.then(|| self.seal_traffic(via, label)).flatten();
            self.made.extend(farewell);
            return Some(());
        }
        if path.on_heard(now) {
            self.events.push_back(SessionEvent::PathJoined { via });
            self.count_early();
        }
        self.heard = now;
        self.finish_handshake();
        match self.outbox.acknowledge(traffic.next, traffic.selective, now) {
            Ok(brought) => {
                if let Some((via, sample)) = brought.sample
                    && let Some(path) = self.paths.find(via)
                {
                    path.on_round_trip(sample);
                }
                let delivered = brought.notifications.into_iter();
                self.events
                    .extend(delivered.map(|id| SessionEvent::NotificationDelivered { id }));
            }
            Err(_) => {
                self.on_misbehaviour(Misbehaviour::FalseAck);
                return None;
            }
        }
        if let State::Closing { goodbye, .. } = self.state
            && self.outbox.is_acknowledged(goodbye)
        {
            self.end(SessionLoss::Closed);
            return Some(());
        }
        if traffic.worried {
            self.acks.at_once = true;
            self.acks.via = Some(via);
        }
        self.on_controls(via, &mut traffic, now);
        Some(())
    }

    fn on_controls(&mut self, via: Via, traffic: &mut Traffic<'_>, now: Time) {
        loop {
            let (sequence, body) = match traffic.next_control() {
                Ok(Some(control)) => control,
                Ok(None) => return,
                Err(malformed) => return self.on_misbehaviour(malformed.into()),
            };
            if let Some(path) = self.paths.find(via) {
                path.on_spoken(now);
            }
            self.acks.via = Some(via);
            match self.inbox.offer(sequence, body) {
                Turn::Now if self.events.len() >= MAX_EVENTS => {
                    // Left unacknowledged: the peer sends it again, and meanwhile accepts no more than its window.
                    self.stalled = true;
                    return;
                }
                Turn::Now => {
                    self.inbox.advance();
                    self.on_control(body, now);
                    self.take_turns(now);
                    self.acknowledge_soon(now);
                }
                Turn::Later | Turn::Past => self.acks.at_once = true,
            }
            if self.state == State::Ended {
                return;
            }
        }
    }

    /// Handles the controls that came early and whose turn it is now.
    fn take_turns(&mut self, now: Time) {
        while self.state != State::Ended {
            if self.events.len() >= MAX_EVENTS {
                self.stalled = true;
                return;
            }
            let Some(body) = self.inbox.take_early() else {
                return;
            };
            self.inbox.advance();
            self.on_control(&body, now);
        }
    }

    fn acknowledge_soon(&mut self, now: Time) {
        self.acks.pending += 1;
        if self.acks.pending >= ACK_EVERY {
            self.acks.at_once = true;
        }
        self.acks.due.get_or_insert(now.saturating_add(ACK_DELAY));
    }

    fn on_control(&mut self, body: &[u8], now: Time) {
        let handled = Control::decode(body)
            .map_err(Misbehaviour::from)
            .and_then(|control| self.handle(control, now));
        if let Err(misbehaviour) = handled {
            self.on_misbehaviour(misbehaviour);
        }
    }

    fn handle(&mut self, control: Control<'_>, now: Time) -> Result<(), Misbehaviour> {
        match control {
            Control::Publish { name, region } => {
                if Some(region.key.epoch) != self.identity().map(|identity| identity.epoch) {
                    return Err(Misbehaviour::StaleRegion);
                }
                self.regions.insert(name.to_owned(), region.clone());
                if self.regions.len() > MAX_REGIONS {
                    return Err(Misbehaviour::Flood);
                }
                let name = name.to_owned();
                self.events.push_back(SessionEvent::Published { name, region });
            }
            Control::Withdraw { name } => {
                if let Some((name, _)) = self.regions.remove_entry(name) {
                    self.events.push_back(SessionEvent::Withdrawn { name });
                }
            }
            Control::Notify { payload, after: None } => {
                let payload = payload.to_vec();
                self.events.push_back(SessionEvent::Notified { payload });
            }
            Control::Notify {
                payload,
                after: Some(after),
            } => {
                let ready = self.arrivals.hold(after.tag, after.parts, after.id, payload)?;
                self.deliver(ready);
            }
            Control::Delivered { id } => {
                if self.awaited.remove(&id).is_some() {
                    self.events.push_back(SessionEvent::NotificationDelivered { id });
                }
            }
            Control::Revoke { tag } => self.arrivals.revoke(tag),
            Control::Fence { label } => self.on_fence(label, now),
            Control::FenceDone { label } => {
                if let Some(via) = self.paths.via(label) {
                    self.events.push_back(SessionEvent::Fenced { via });
                }
            }
            Control::Joined { label } => {
                if let Some(via) = self.paths.via(label) {
                    for arrival in self.paths.on_joined(label) {
                        self.count(via, arrival);
                    }
                }
            }
            Control::LeaseAsk { id, region, duration } => {
                match self.leases.on_ask(id, region, duration, self.config.epoch)? {
                    Ok(event) => self.events.push_back(event),
                    Err(answer) => self.say(answer),
                }
            }
            Control::LeaseRenew { id, duration } => match self.leases.on_renew(id, duration) {
                Ok(event) => self.events.push_back(event),
                Err(answer) => self.say(answer),
            },
            Control::LeaseAnswer { id, granted } => self.events.extend(self.leases.on_answer(id, granted)),
            Control::LeaseReturn { id } => self.events.extend(self.leases.on_return(id)),
            Control::Goodbye { reason } => self.on_goodbye(reason),
        }
        if self.outbox.is_flooded() {
            return Err(Misbehaviour::Flood);
        }
        Ok(())
    }

    fn on_fence(&mut self, label: u64, now: Time) {
        let via = self.paths.via(label);
        match via {
            Some(via) => {
                self.drop_path(via, now);
                let via = Some(via);
                self.events.push_back(SessionEvent::FenceAsked { label, via });
            }
            None => {
                // The path never reached this end, and from now on it never will.
                self.paths.bar(label, None);
                self.say(Control::FenceDone { label });
            }
        }
    }

    fn on_goodbye(&mut self, reason: CloseReason) {
        let closing = matches!(self.state, State::Closing { .. });
        self.parted = true;
        self.acks.at_once = true;
        if let Some(farewell) = self.make_traffic() {
            self.made.push_back(farewell);
        }
        self.end(if closing {
            SessionLoss::Closed
        } else {
            SessionLoss::ClosedByPeer { reason }
        });
    }

    fn on_join(&mut self, via: Via, bytes: &[u8], now: Time) -> Option<()> {
        if !matches!(self.state, State::Open | State::Closing { .. }) {
            return None;
        }
        let open = self.open.as_mut()?;
        let (number, label) = wire::decode_join(bytes).ok()?;
        let opened = open.keys.open(label, bytes)?;
        if !matches!(Message::decode(opened), Ok(Message::Join { session }) if session == open.session) {
            return None;
        }
        if !open.replay.admit(number) {
            return None;
        }
        let known = self.paths.find(via).is_some();
        if !self.paths.accept(via, label) {
            return None;
        }
        self.heard = now;
        self.finish_handshake();
        // Anything at all tells the peer that the path has joined.
        self.acks.at_once = true;
        self.acks.via = Some(via);
        if !known {
            self.events.push_back(SessionEvent::PathJoined { via });
        }
        Some(())
    }

    fn seal_traffic(&mut self, via: Via, label: u64) -> Option<(Via, Vec<u8>)> {
        let worried = self.is_worried();
        let open = self.open.as_mut()?;
        let (next, selective) = (self.inbox.next(), self.inbox.selective());
        let mut w = wire::begin_traffic(worried, open.number, next, &selective, self.outbox.ready_bytes());
        open.number += 1;
        self.outbox.fill(&mut w, via, self.now);
        open.keys.seal(label, &mut w.buf);
        self.acks = Acks::default();
        self.sent = self.now;
        Some((via, w.buf))
    }

    fn send_heartbeat(&mut self) {
        let on: Vec<(Via, u64)> = if self.is_worried() {
            self.paths.joined().map(|path| (path.via, path.label)).collect()
        } else {
            // In turn, so that a path which swallows everything does not make this end look dead.
            self.paths
                .in_turn()
                .map(|path| (path.via, path.label))
                .into_iter()
                .collect()
        };
        for (via, label) in on {
            let message = self.seal_traffic(via, label);
            self.made.extend(message);
        }
    }

    /// Signs of life come when there was nothing else to send; more often, and on every path, when nothing is heard.
    fn next_heartbeat(&self) -> Option<Time> {
        let heartbeat = self.open.as_ref()?.heartbeat;
        let hurried = self.sent.saturating_add(Time::from_ns(heartbeat.as_ns() / 4));
        let due = self
            .sent
            .saturating_add(heartbeat)
            .min(self.worried_from().max(hurried));
        self.paths.any_joined().then_some(due)
    }

    fn is_worried(&self) -> bool {
        self.worried_from() <= self.now
    }

    fn worried_from(&self) -> Time {
        // The peer knows this end's patience and shows itself four times as often, so two signs of life are overdue.
        let half = Time::from_ns(self.config.silence_max.as_ns() / 2);
        self.heard.saturating_add(half)
    }

    fn patience_end(&self) -> Time {
        self.heard.max(self.stranded).saturating_add(self.config.silence_max)
    }
}
