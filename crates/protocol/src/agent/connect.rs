//! Peers: connecting, being connected to, keeping paths open, and parting.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use weft_plan::Time;
use weft_plan::route::Distance;

use super::arrived::Arrived;
use super::parcels::Parcels;
use super::paths::Stage;
use super::rails::pair_up;
use super::{ConnectError, Core, ENDINGS_MAX, Event, PeerError, Reach, Target};
use crate::error::Loss;
use crate::session::{CloseReason, Config, Identity, NotificationId, Session, SessionError, SessionLoss, Via};
use crate::transfer::{PeerId, TransferId};
use crate::transport::{PeerAddress, Transport};

#[derive(Debug)]
pub(super) struct Peer {
    /// Absent while the first path is being opened.
    pub(super) session: Option<Session>,
    /// Known once the session is established.
    pub(super) identity: Option<Identity>,
    /// The peer came to us.
    pub(super) accepted: bool,
    /// The path that carries the handshake.
    pub(super) first: u32,
    /// The paths that this side keeps open; none where the peer came to us, because then the peer does.
    pub(super) rails: Vec<Rail>,
    /// How this side tries to reach the peer, where it does.
    pub(super) attempt: Option<Attempt>,
    /// Published names of which the session still has to be told something, because its queue was full.
    unsaid: BTreeSet<String>,
    /// Announcements that wait for room in the session's queue, in their order.
    pub(super) unsent: VecDeque<TransferId>,
    /// Announcements that the peer holds until their parts are there, and whose transfers are under way.
    pub(super) awaited: BTreeMap<NotificationId, TransferId>,
    /// How many announcements there are in all.
    pub(super) announced: usize,
    /// Into how many parts those may be cut that the peer counts for its application.
    pub(super) told_parts: usize,
    pub(super) parcels: Parcels,
    /// Its writes that the application is told of.
    pub(super) arrived: Arrived,
    /// The session has ended, and is kept until then to answer a peer that has not heard of it.
    pub(super) over: Option<Time>,
    /// The peer has closed its last path: it has until then to come back.
    pub(super) rejoin_by: Option<Time>,
    /// As entered among the timers.
    pub(super) timer: Option<Time>,
}

/// A path that is opened, and opened again when it is lost.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) slot: usize,
    pub(super) address: PeerAddress,
    backoff: Time,
    pub(super) state: RailState,
    /// The peer was there once.
    pub(super) known: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RailState {
    /// To be opened at this time.
    Waiting(Time),
    /// The path of this number is being opened, or is open.
    Using(u32),
}

/// The way to a session.
#[derive(Debug)]
pub(super) struct Attempt {
    target: Target,
    /// The addresses that a transport here understands, and which comes next.
    candidates: Vec<(usize, PeerAddress)>,
    next: usize,
    pub(super) last_loss: Loss,
}

impl Peer {
    /// When something of this peer falls due.
    pub(super) fn due(&self) -> Option<Time> {
        if self.over.is_some() {
            return self.over;
        }
        let session = self.session.as_ref().and_then(Session::next_timeout);
        let attempt = self.attempt.as_ref().filter(|_| self.identity.is_none());
        let rails = self.rails.iter().filter_map(Rail::due);
        rails
            .chain(session)
            .chain(attempt.map(|a| a.target.deadline))
            .chain(self.rejoin_by)
            .chain(self.parcels.resend_at)
            .min()
    }

    fn address(&self) -> PeerAddress {
        let candidates = self.attempt.as_ref().and_then(|a| a.candidates.first());
        match (self.rails.first(), candidates) {
            (Some(rail), _) => rail.address.clone(),
            (None, Some((_, address))) => address.clone(),
            (None, None) => PeerAddress(String::new()),
        }
    }
}

impl Rail {
    pub(super) fn new(slot: usize, address: PeerAddress, backoff: Time, at: Time) -> Rail {
        Rail {
            slot,
            address,
            backoff,
            state: RailState::Waiting(at),
            known: false,
        }
    }

    /// When it is to be opened, where it is not open.
    pub(super) fn due(&self) -> Option<Time> {
        match self.state {
            RailState::Waiting(at) => Some(at),
            RailState::Using(_) => None,
        }
    }

    /// It has proved good: the next loss is met without delay.
    pub(super) fn calm(&mut self, backoff_min: Time) {
        self.backoff = backoff_min;
        self.known = true;
    }

    /// Waits before the next attempt, longer each time.
    pub(super) fn back_off(&mut self, max: Time, now: Time) {
        self.state = RailState::Waiting(now.saturating_add(self.backoff));
        self.backoff = self.backoff.saturating_add(self.backoff).min(max);
    }
}

impl<T: ?Sized + Transport> Core<T> {
    /// Starts a session with an agent. [`Event::Connected`] or [`Event::ConnectFailed`] follows.
    pub fn connect(&mut self, target: Target, now: Time) -> Result<PeerId, ConnectError> {
        let Some(first) = target.addresses.first() else {
            return Err(ConnectError::NoAddress);
        };
        let max = self.settings.peers_max;
        if self.peers.len() >= max {
            return Err(ConnectError::TooManyPeers { max });
        }
        let candidates = self.candidates(&target.addresses);
        if candidates.is_empty() {
            let address = first.clone();
            return Err(ConnectError::NoTransport { address });
        }
        let id = self.new_peer(Some(Attempt {
            target,
            candidates,
            next: 0,
            last_loss: Loss::Silent,
        }));
        self.try_next(id, now);
        Ok(id)
    }

    /// Which transport here goes to which address, in the order of the addresses.
    pub(super) fn candidates(&self, addresses: &[PeerAddress]) -> Vec<(usize, PeerAddress)> {
        let mut candidates: Vec<(usize, usize)> = Vec::new();
        let names: BTreeSet<&str> = addresses.iter().map(PeerAddress::transport).collect();
        for name in names {
            let theirs = addresses.iter().enumerate().filter(|(_, a)| a.transport() == name);
            let (order, theirs): (Vec<usize>, Vec<&PeerAddress>) = theirs.unzip();
            let (slots, ours) = self.rails_of(name);
            let met = pair_up(&theirs, &ours, &[]);
            candidates.extend(order.iter().zip(met).filter_map(|(at, met)| Some((*at, slots[met?]))));
        }
        candidates.sort_unstable();
        let candidates = candidates.into_iter();
        candidates.map(|(at, slot)| (slot, addresses[at].clone())).collect()
    }

    /// The transports of a name: where they stand, and their own addresses.
    fn rails_of(&self, name: &str) -> (Vec<usize>, Vec<&PeerAddress>) {
        let reachable = self
            .slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.reach != Reach::Here);
        let capabilities = reachable.map(|(at, slot)| (at, slot.transport.capabilities()));
        let of_name = capabilities.filter(|(_, capabilities)| capabilities.name == name);
        of_name
            .map(|(slot, capabilities)| (slot, &capabilities.address))
            .unzip()
    }

    /// Ends a session. The peer is told; [`Event::PeerLost`] follows, and the end of every transfer with it.
    pub fn disconnect(&mut self, peer: PeerId, now: Time) {
        self.part_because(peer, CloseReason::Done, now);
    }

    /// As [`disconnect`](Core::disconnect), by an agent that is being closed. The peer may take it for dead from then on, so whoever lives on never says so.
    pub fn depart(&mut self, peer: PeerId, now: Time) {
        self.part_because(peer, CloseReason::Leaving, now);
    }

    fn part_because(&mut self, peer: PeerId, reason: CloseReason, now: Time) {
        match self.peers.at_mut(peer.0).map(|p| p.session.as_mut()) {
            Some(Some(session)) => session.close_because(reason, now),
            Some(None) => self.part(peer, SessionLoss::Closed, now),
            None => {}
        }
        self.touch(peer);
    }

    pub(super) fn established(&mut self, peer: PeerId) -> Result<&mut Session, PeerError> {
        match self.peers.at_mut(peer.0) {
            Some(Peer {
                session: Some(session),
                identity: Some(_),
                over: None,
                ..
            }) => Ok(session),
            _ => Err(PeerError::NotConnected),
        }
    }

    pub(super) fn config(&self) -> Config {
        Config {
            addresses: self.addresses(),
            ..self.settings.session.clone()
        }
    }

    /// Begins the handshake on a path that has opened, or adds the path to the session that there is.
    pub(super) fn on_opened(&mut self, via: u32, now: Time) {
        let mut config = self.config();
        let Some(path) = self.paths.at_mut(via).filter(|p| p.stage == Stage::Opening) else {
            return;
        };
        path.stage = Stage::Open;
        let Some(peer) = path.peer else { return };
        if peer == PeerId::HERE {
            self.on_opened_here(via);
            return;
        }
        let Some(state) = self.peers.at_mut(peer.0).filter(|p| p.over.is_none()) else {
            self.close_path(via);
            return;
        };
        match &mut state.session {
            Some(session) => session.add_path(Via(via), now),
            None => {
                if let Some(attempt) = &state.attempt {
                    config.expected_name = attempt.target.name.clone();
                    config.expected_epoch = attempt.target.epoch;
                }
                state.first = via;
                state.session = Some(Session::initiate(config, (self.random)(), Via(via), now));
            }
        }
        self.touch(peer);
    }

    pub(super) fn on_established(&mut self, peer: PeerId, identity: Identity, now: Time) {
        let rivals: Vec<(PeerId, bool)> = self
            .peers
            .iter()
            .filter(|(number, p)| *number != peer.0 && p.over.is_none())
            .filter_map(|(number, p)| p.identity.as_ref().map(|other| (PeerId(number), other)))
            .filter(|(_, other)| other.name == identity.name && other.epoch != identity.epoch)
            .map(|(rival, other)| (rival, other.epoch < identity.epoch))
            .collect();
        // One name is one agent. A later life takes the name over from an earlier one, never the other way round.
        let late = rivals.iter().any(|(_, earlier)| !earlier);
        let refused = rivals.iter().filter(|(_, earlier)| *earlier && !late);
        let refused: Vec<_> = refused.map(|(rival, _)| (*rival, CloseReason::Replaced)).collect();
        let own = late.then_some((peer, CloseReason::NameTaken));
        for (refused, reason) in refused.into_iter().chain(own) {
            if let Some(session) = self.peers.at_mut(refused.0).and_then(|p| p.session.as_mut()) {
                session.close_because(reason, now);
            }
            self.touch(refused);
        }
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        let (accepted, first) = (state.accepted, state.first);
        state.identity = Some(identity.clone());
        if !accepted {
            self.lay_rails(peer, &identity, now);
        }
        let published: Vec<String> = self.regions.names().map(str::to_owned).collect();
        if let Some(state) = self.peers.at_mut(peer.0) {
            state.unsaid.extend(published);
        }
        self.say_unsaid(peer, now);
        self.events.push_back(Event::Connected {
            peer,
            identity,
            accepted,
        });
        self.on_joined(peer, first, now);
    }

    /// How far away a peer is, as its own word and ours about the host tell.
    pub(super) fn distance(&self, identity: &Identity) -> Distance {
        match identity.host == self.settings.session.host {
            true => Distance::SameHost,
            false => Distance::OtherHost,
        }
    }

    /// Now that the peer has said where else it can be reached, opens as many paths as are wanted.
    fn lay_rails(&mut self, peer: PeerId, identity: &Identity, now: Time) {
        let distance = self.distance(identity);
        let backoff = self.settings.backoff_min;
        let Some(state) = self.peers.at(peer.0) else { return };
        let mut laid = Vec::new();
        let names: BTreeSet<&str> = self.slots.iter().map(|s| s.transport.capabilities().name).collect();
        for name in names {
            let theirs: Vec<_> = identity.addresses.iter().filter(|a| a.transport() == name).collect();
            let (slots, ours) = self.rails_of(name);
            // An address that has worked is better than one that the peer believes it has.
            let used = |slot: usize| {
                state
                    .rails
                    .iter()
                    .find(|rail| rail.slot == slot)
                    .map(|rail| &rail.address)
            };
            let met: Vec<_> = slots
                .iter()
                .enumerate()
                .filter_map(|(our, slot)| {
                    let used = used(*slot)?;
                    Some((our, theirs.iter().position(|their| *their == used)?))
                })
                .collect();
            for (our, their) in pair_up(&ours, &theirs, &met).into_iter().enumerate() {
                let slot = slots[our];
                let Some(address) = used(slot).or_else(|| their.map(|their| theirs[their])) else {
                    continue;
                };
                let kind = &self.slots[slot];
                let there = state.rails.iter().filter(|rail| rail.slot == slot).count();
                let missing = if kind.reach.joins(distance) {
                    kind.paths.saturating_sub(there)
                } else {
                    0
                };
                laid.extend((0..missing).map(|_| Rail::new(slot, address.clone(), backoff, now)));
            }
        }
        // In the order of preference, whatever the names.
        laid.sort_by_key(|rail| rail.slot);
        if let Some(state) = self.peers.at_mut(peer.0) {
            state.rails.extend(laid);
        }
    }

    /// Tells a peer what is or is no longer published under a name.
    fn say(&mut self, peer: PeerId, name: &str, now: Time) -> Result<(), SessionError> {
        let region = self.regions.published(name);
        let session = self.established(peer).map_err(|_| SessionError::Ended)?;
        let said = match &region {
            Some(region) => session.publish(name, region, now),
            None => session.withdraw(name, now),
        };
        match (said, self.peers.at_mut(peer.0)) {
            (Ok(()), _) => self.touch(peer),
            // Every acknowledgement makes room, and is an occasion to say it; and so does a withdrawal that was left unsaid.
            (Err(SessionError::QueueFull | SessionError::TooManyRegions), Some(state)) => {
                state.unsaid.insert(name.to_owned());
            }
            // The session is over: what else could be wrong was found before it was published.
            (Err(_), _) => {}
        }
        said
    }

    pub(super) fn say_to_all(&mut self, name: &str, now: Time) {
        let peers: Vec<PeerId> = self.peers.iter().map(|(number, _)| PeerId(number)).collect();
        for peer in peers {
            // What cannot be said now is said later, or has become pointless.
            let _ = self.say(peer, name, now);
        }
    }

    /// Tells a peer what its full queue had no room for.
    pub(super) fn say_unsaid(&mut self, peer: PeerId, now: Time) {
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        let mut unsaid = std::mem::take(&mut state.unsaid);
        while let Some(name) = unsaid.pop_first() {
            if self.say(peer, &name, now) == Err(SessionError::QueueFull) {
                break;
            }
        }
        if let Some(state) = self.peers.at_mut(peer.0) {
            state.unsaid.append(&mut unsaid);
        }
    }

    /// What falls due at a peer besides its session: paths to open, and the end of an attempt or of a linger.
    pub(super) fn on_peer_due(&mut self, peer: PeerId, now: Time) {
        let Some(state) = self.peers.at(peer.0) else { return };
        if let Some(until) = state.over {
            if until <= now {
                self.forget(peer);
            }
            return;
        }
        match &state.attempt {
            Some(attempt) if state.identity.is_none() => {
                if attempt.target.deadline <= now {
                    let (address, loss) = (state.address(), attempt.last_loss);
                    let error = match state.session {
                        Some(_) => ConnectError::Expired { address },
                        None => ConnectError::NoPath { address, loss },
                    };
                    self.forget(peer);
                    self.events.push_back(Event::ConnectFailed { peer, error });
                    return;
                }
                let waits = |rail: &Rail| matches!(rail.state, RailState::Waiting(at) if at <= now);
                if state.rails.iter().any(waits) {
                    self.try_next(peer, now);
                }
            }
            _ => {
                if state.rejoin_by.is_some_and(|by| by <= now) {
                    self.part(peer, SessionLoss::NoPath, now);
                    return;
                }
                for index in 0..state.rails.len() {
                    self.open_rail(peer, index, now);
                }
            }
        }
    }

    /// The session has no path left: those that wait need not wait for long.
    pub(super) fn hurry_rails(&mut self, peer: PeerId, now: Time) {
        let soon = now.saturating_add(self.settings.backoff_min);
        if let Some(state) = self.peers.at_mut(peer.0) {
            for rail in &mut state.rails {
                if let RailState::Waiting(at) = &mut rail.state {
                    *at = soon.min(*at);
                }
            }
        }
    }

    /// Tries the next address. There is one rail at a time until the session is established.
    fn try_next(&mut self, peer: PeerId, now: Time) {
        let backoff = self.settings.backoff_min;
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        let Some(attempt) = &mut state.attempt else { return };
        let (slot, address) = attempt.candidates[attempt.next % attempt.candidates.len()].clone();
        attempt.next += 1;
        let backoff = state.rails.pop().map_or(backoff, |before| before.backoff);
        state.rails.push(Rail::new(slot, address, backoff, now));
        self.open_rail(peer, 0, now);
    }

    fn open_rail(&mut self, peer: PeerId, index: usize, now: Time) {
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        let Some(rail) = state.rails.get_mut(index) else { return };
        if !matches!(rail.state, RailState::Waiting(at) if at <= now) {
            return;
        }
        match self.slots[rail.slot].transport.open(&rail.address, now) {
            Ok(id) => {
                self.posted[rail.slot] = true;
                let (slot, via) = (rail.slot, self.next_path);
                rail.state = RailState::Using(via);
                self.new_path(slot, id, Some(peer), Stage::Opening);
            }
            Err(loss) => {
                let known = rail.known;
                rail.back_off(self.settings.backoff_max, now);
                if let Some(attempt) = &mut state.attempt {
                    attempt.last_loss = loss;
                }
                self.consider_gone(peer, loss, known, now);
            }
        }
        self.touch(peer);
    }

    /// After a loss that left a peer without a path: how long to hope.
    ///
    /// A peer that has closed its last path, or died, gets a moment to come back; one whose host answers that nobody listens
    /// any more is gone; `known`: it was there before, at the same address. Anything else may be the network's fault and gets the whole patience of the session.
    pub(super) fn consider_gone(&mut self, peer: PeerId, loss: Loss, known: bool, now: Time) {
        let pathless = self.is_pathless(peer);
        let rejoin_by = now.saturating_add(self.settings.rejoin_max);
        let Some(state) = self
            .peers
            .at_mut(peer.0)
            .filter(|p| p.identity.is_some() && p.over.is_none())
        else {
            return;
        };
        match loss {
            // Where it once was there is nobody any more.
            Loss::Refused if pathless && known => self.part(peer, SessionLoss::Gone, now),
            Loss::Refused | Loss::Unreachable if pathless => self.part(peer, SessionLoss::NoPath, now),
            Loss::ClosedByPeer if pathless => state.rejoin_by = Some(rejoin_by),
            _ => {}
        }
    }

    pub(super) fn new_peer(&mut self, attempt: Option<Attempt>) -> PeerId {
        let id = PeerId(self.next_peer);
        self.next_peer += 1;
        let peer = Peer {
            session: None,
            identity: None,
            accepted: attempt.is_none(),
            first: u32::MAX,
            rails: Vec::new(),
            attempt,
            unsaid: BTreeSet::new(),
            unsent: VecDeque::new(),
            awaited: BTreeMap::new(),
            announced: 0,
            told_parts: 0,
            parcels: Parcels::default(),
            arrived: Arrived::default(),
            over: None,
            rejoin_by: None,
            timer: None,
        };
        self.peers.insert(id.0, peer);
        self.touch(id);
        id
    }

    /// The session has ended. The number is dead for the application; the session may be needed a little longer.
    pub(super) fn part(&mut self, peer: PeerId, cause: SessionLoss, now: Time) {
        let linger = now.saturating_add(self.settings.handshake_max);
        let Some(state) = self.peers.at_mut(peer.0).filter(|p| p.over.is_none()) else {
            return;
        };
        let silent = matches!(cause, SessionLoss::Silent | SessionLoss::PathLost);
        match &state.identity {
            Some(identity) => {
                let name = identity.name.clone();
                self.engine.on_peer_gone(peer, loss_of(&cause), now);
                self.on_atomics_peer_gone(peer, loss_of(&cause), now);
                self.on_stages_peer_gone(peer, loss_of(&cause), now);
                self.endings.insert(peer, cause.clone());
                self.ended.push_back(peer);
                if self.ended.len() > ENDINGS_MAX
                    && let Some(oldest) = self.ended.pop_front()
                {
                    self.endings.remove(&oldest);
                }
                self.events.push_back(Event::PeerLost {
                    peer,
                    name,
                    cause: cause.clone(),
                });
            }
            // Nobody here has asked for it or heard of it.
            None if state.accepted => {}
            // Nobody has refused us: there is time until the deadline.
            None if silent => {
                state.session = None;
                let first = state.first;
                self.close_path(first);
                return;
            }
            None => {
                let error = ConnectError::NoSession {
                    address: state.address(),
                    cause: cause.clone(),
                };
                self.events.push_back(Event::ConnectFailed { peer, error });
            }
        }
        if silent || matches!(cause, SessionLoss::NoPath | SessionLoss::Gone | SessionLoss::Closed) {
            self.forget(peer);
        } else if let Some(state) = self.peers.at_mut(peer.0) {
            state.over = Some(linger);
            state.rails.clear();
            self.touch(peer);
            self.forget_if_cut_off(peer);
        }
    }

    /// A session that is over is kept to answer its peer. Without a path there is nobody to answer.
    pub(super) fn forget_if_cut_off(&mut self, peer: PeerId) {
        let over = self.peers.at(peer.0).is_some_and(|p| p.over.is_some());
        if over && self.is_pathless(peer) {
            self.forget(peer);
        }
    }

    fn is_pathless(&self, peer: PeerId) -> bool {
        !self.paths.iter().any(|(_, path)| path.peer == Some(peer))
    }

    pub(super) fn forget(&mut self, peer: PeerId) {
        if let Some(state) = self.peers.remove(peer.0) {
            if let Some(at) = state.timer {
                self.timers.remove(&(at, peer));
            }
            self.drop_unsent(state.unsent);
        }
        self.engine.forget_peer(peer);
        let of_peer = self.paths.iter().filter(|(_, path)| path.peer == Some(peer));
        let vias: Vec<u32> = of_peer.map(|(via, _)| via).collect();
        for via in vias {
            self.close_path(via);
        }
    }
}

/// Whether a peer has said that it is reached by the transport of this name.
pub(super) fn has(identity: &Identity, transport: &str) -> bool {
    identity
        .addresses
        .iter()
        .any(|address| address.transport() == transport)
}

/// The end of a session as its transfers see it.
fn loss_of(cause: &SessionLoss) -> Loss {
    match cause {
        SessionLoss::Silent | SessionLoss::NoPath | SessionLoss::Gone => Loss::Silent,
        SessionLoss::ClosedByPeer { .. } => Loss::ClosedByPeer,
        SessionLoss::Misbehaved(_) => Loss::Garbage,
        _ => Loss::Closed,
    }
}
