//! Peers and the paths to them: opening, accepting, joining, losing, opening again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use weft_plan::Time;

use super::{ConnectError, Core, Event, PeerError, Reach};
use crate::error::Loss;
use crate::region::RemoteRegion;
use crate::session::{self, Identity, Peek, Session, SessionLoss, Via};
use crate::transfer::{Lane, LaneId, PeerId};
use crate::transport::{PathId, PeerAddress, Transport};

#[derive(Debug)]
pub(super) struct Peer {
    /// Absent while the first path is being opened.
    pub(super) session: Option<Session>,
    /// Known once the session is established.
    pub(super) identity: Option<Identity>,
    pub(super) accepted: bool,
    /// The path that carried the handshake.
    first: u32,
    /// The paths that this side keeps open; none where the peer came to us, because then the peer does.
    rails: Vec<Rail>,
    /// Where [`Core::connect`] was told to look, and which of those comes next.
    candidates: Vec<(usize, PeerAddress)>,
    next_candidate: usize,
    connect_deadline: Time,
    last_loss: Loss,
    pub(super) regions: BTreeMap<String, RemoteRegion>,
    /// As entered among the timers.
    pub(super) timer: Option<Time>,
}

/// A path that is opened, and opened again when it is lost.
#[derive(Debug)]
struct Rail {
    slot: usize,
    address: PeerAddress,
    backoff: Time,
    state: RailState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RailState {
    /// To be opened at this time.
    Waiting(Time),
    /// The path of this number is being opened, or is open.
    Using(u32),
}

#[derive(Debug)]
pub(super) struct Path {
    pub(super) slot: usize,
    pub(super) id: PathId,
    pub(super) peer: Option<PeerId>,
    pub(super) stage: Stage,
    /// Messages that the transport had no room for.
    pub(super) outbox: VecDeque<Arc<[u8]>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// We asked for it and wait for the transport's word.
    Opening,
    /// Open, but the session has not confirmed it.
    Open,
    /// Carries transfers.
    Lane,
    /// We have closed it and wait for its end.
    Closing,
}

impl Peer {
    /// When something of this peer falls due.
    pub(super) fn due(&self) -> Option<Time> {
        let session = self.session.as_ref().and_then(Session::next_timeout);
        let connecting = (self.identity.is_none() && !self.accepted).then_some(self.connect_deadline);
        let rails = self.rails.iter().filter_map(|r| match r.state {
            RailState::Waiting(at) => Some(at),
            RailState::Using(_) => None,
        });
        rails.chain(session).chain(connecting).min()
    }
}

impl<T: ?Sized + Transport> Core<T> {
    /// Starts a session with the agent at these addresses, tried in order until the deadline. [`Event::Connected`] or
    /// [`Event::ConnectFailed`] follows.
    pub fn connect(&mut self, addresses: &[PeerAddress], deadline: Time, now: Time) -> Result<PeerId, ConnectError> {
        let Some(first) = addresses.first() else {
            return Err(ConnectError::NoAddress);
        };
        let max = self.settings.peers_max;
        if self.peers.len() >= max {
            return Err(ConnectError::TooManyPeers { max });
        }
        let candidates: Vec<_> = addresses
            .iter()
            .filter_map(|a| self.slot_named(a.transport()).map(|slot| (slot, a.clone())))
            .collect();
        if candidates.is_empty() {
            return Err(ConnectError::NoTransport { address: first.clone() });
        }
        let id = self.new_peer(false, candidates, deadline);
        self.next_rail(id, now);
        Ok(id)
    }

    /// Ends a session. The peer is told; [`Event::PeerLost`] follows, and the end of every transfer with it.
    pub fn disconnect(&mut self, peer: PeerId, now: Time) {
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        match &mut state.session {
            Some(session) => {
                session.close(now);
                self.touched.push(peer);
            }
            None => self.drop_peer(peer, SessionLoss::Closed, now),
        }
    }

    pub(super) fn established(&mut self, peer: PeerId) -> Result<&mut Session, PeerError> {
        match self.peers.at_mut(peer.0) {
            Some(Peer { session: Some(session), identity: Some(_), .. }) => Ok(session),
            _ => Err(PeerError::NotConnected),
        }
    }

    /// Does something with every established session.
    pub(super) fn to_established(&mut self, mut act: impl FnMut(&mut Session)) {
        for (number, peer) in self.peers.iter_mut() {
            if let (Some(session), Some(_)) = (&mut peer.session, &peer.identity) {
                act(session);
                self.touched.push(PeerId(number));
            }
        }
    }

    pub(super) fn on_opened(&mut self, via: u32, now: Time) {
        let Some(path) = self.paths.at_mut(via) else { return };
        let Some(peer) = path.peer else { return };
        if path.stage != Stage::Opening {
            return;
        }
        path.stage = Stage::Open;
        let config = self.config();
        let Some(state) = self.peers.at_mut(peer.0) else {
            self.close_path(via);
            return;
        };
        match &mut state.session {
            Some(session) => session.add_path(Via(via), now),
            None => {
                state.first = via;
                state.session = Some(Session::initiate(config, (self.random)(), Via(via), now));
            }
        }
        self.touched.push(peer);
    }

    pub(super) fn on_accepted(&mut self, slot: usize, id: PathId, now: Time) {
        let via = self.new_path(slot, id, None, Stage::Open);
        self.unclaimed.push_back((now.saturating_add(self.settings.handshake_max), via));
        // Whoever opens paths and says nothing pushes out only others that have said nothing.
        while self.unclaimed.len() > self.settings.unclaimed_paths_max {
            if let Some((_, oldest)) = self.unclaimed.pop_front() {
                self.give_up_unclaimed(oldest);
            }
        }
    }

    pub(super) fn expire_unclaimed(&mut self, now: Time) {
        while let Some(&(by, via)) = self.unclaimed.front() {
            let waits = self.paths.at(via).is_some_and(|p| p.stage == Stage::Open);
            if waits && by > now {
                break;
            }
            self.unclaimed.pop_front();
            if waits {
                self.give_up_unclaimed(via);
            }
        }
    }

    fn give_up_unclaimed(&mut self, via: u32) {
        if self.paths.at(via).is_some_and(|p| p.stage == Stage::Open) {
            self.close_path(via);
        }
    }

    pub(super) fn on_message(&mut self, via: u32, payload: &[u8], now: Time) {
        let Some(path) = self.paths.at(via) else { return };
        let (slot, known) = (path.slot, path.peer);
        let peer = match known {
            Some(peer) => peer,
            None => match self.claim(via, payload, now) {
                Ok(peer) => peer,
                Err(stranger) => {
                    // Over an unreliable transport an early message may overtake the one that says who it is from.
                    if stranger || self.slots[slot].transport.capabilities().reliable_messages {
                        self.close_path(via);
                    }
                    return;
                }
            },
        };
        if let Some(Peer { session: Some(session), .. }) = self.peers.at_mut(peer.0) {
            session.on_message(Via(via), payload, now);
            self.touched.push(peer);
        }
    }

    /// Finds out whose path this is from the first message on it. The error tells whether it certainly is nobody's.
    fn claim(&mut self, via: u32, payload: &[u8], now: Time) -> Result<PeerId, bool> {
        let peer = match session::peek(payload).map_err(|_| false)? {
            Peek::Hello if self.peers.len() < self.settings.peers_max => {
                let config = self.config();
                let session = Session::accept(config, (self.random)(), Via(via), now);
                let id = self.new_peer(true, Vec::new(), Time::MAX);
                let state = self.peers.at_mut(id.0).expect("the peer was entered just now");
                state.first = via;
                state.session = Some(session);
                id
            }
            Peek::Join { session } => {
                let joined = self.peers.iter().find(|(_, p)| p.identity.is_some() && p.session.as_ref().is_some_and(|s| s.id() == Some(session)));
                PeerId(joined.ok_or(true)?.0)
            }
            _ => return Err(true),
        };
        if let Some(path) = self.paths.at_mut(via) {
            path.peer = Some(peer);
        }
        Ok(peer)
    }

    pub(super) fn on_lost(&mut self, via: u32, loss: Loss, fenced: bool, now: Time) {
        let Some(path) = self.paths.remove(via) else { return };
        self.by_path[path.slot].remove(path.id.0);
        let transport = self.slots[path.slot].transport.capabilities().name;
        let Some(peer) = path.peer else { return };
        self.engine.on_lane_lost(LaneId(via), loss, fenced, now);
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        state.last_loss = loss;
        if path.stage != Stage::Opening {
            if let Some(session) = &mut state.session {
                session.on_path_lost(Via(via), now);
            }
        }
        if state.identity.is_some() && path.stage != Stage::Opening {
            self.events.push_back(Event::PathDown { peer, transport, loss });
        }
        if let Some(rail) = state.rails.iter_mut().find(|r| r.state == RailState::Using(via)) {
            rail.state = RailState::Waiting(now.saturating_add(rail.backoff));
            rail.backoff = doubled(rail.backoff, self.settings.backoff_max);
        }
        if state.identity.is_none() {
            // A handshake does not survive its path. Ours starts again elsewhere; the peer's does too, if it wants.
            if state.accepted {
                self.drop_peer(peer, SessionLoss::Closed, now);
                return;
            }
            state.session = None;
        }
        self.touched.push(peer);
    }

    /// The session vouches for a path: from now on it carries transfers.
    pub(super) fn on_joined(&mut self, peer: PeerId, via: u32) {
        let Some(path) = self.paths.at_mut(via) else { return };
        if path.stage != Stage::Open || path.peer != Some(peer) {
            return;
        }
        path.stage = Stage::Lane;
        let capabilities = self.slots[path.slot].transport.capabilities();
        let transport = capabilities.name;
        self.engine.add_lane(Lane {
            id: LaneId(via),
            peer,
            transport,
            cost: capabilities.cost,
            max_op_bytes: capabilities.max_op_bytes,
            max_op_runs: capabilities.max_op_runs,
            max_inflight_ops: capabilities.max_inflight_ops,
            max_inflight_bytes: capabilities.max_op_bytes.saturating_mul(capabilities.max_inflight_ops as u64),
        });
        if let Some(rail) = self.peers.at_mut(peer.0).and_then(|p| p.rails.iter_mut().find(|r| r.state == RailState::Using(via))) {
            rail.backoff = self.settings.backoff_min;
        }
        self.events.push_back(Event::PathUp { peer, transport });
    }

    pub(super) fn on_established(&mut self, peer: PeerId, identity: Identity, now: Time) {
        let rivals: Vec<(PeerId, bool)> = self
            .peers
            .iter()
            .filter_map(|(number, p)| p.identity.as_ref().map(|i| (PeerId(number), i)))
            .filter(|(other, i)| *other != peer && i.name == identity.name && i.epoch != identity.epoch)
            .map(|(other, i)| (other, i.epoch < identity.epoch))
            .collect();
        // One name is one agent. A later life takes the name over from an earlier one, never the other way round.
        if rivals.iter().any(|(_, earlier)| !earlier) {
            self.refuse_name(peer, now);
            return;
        }
        for (rival, _) in rivals {
            self.refuse_name(rival, now);
        }
        let same_host = identity.host == self.settings.host;
        let names: Vec<(&'static str, Reach, usize)> = self
            .slots
            .iter()
            .map(|s| (s.transport.capabilities().name, s.reach, s.paths))
            .collect();
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        let accepted = state.accepted;
        if !accepted {
            for (slot, (name, reach, wanted)) in names.into_iter().enumerate() {
                if reach == Reach::SameHost && !same_host {
                    continue;
                }
                // The address that has worked is better than the one that the peer believes it has.
                let used = state.rails.iter().find(|r| r.slot == slot).map(|r| r.address.clone());
                let told = identity.addresses.iter().find(|a| a.transport() == name).cloned();
                let Some(address) = used.or(told) else { continue };
                let missing = wanted.saturating_sub(state.rails.iter().filter(|r| r.slot == slot).count());
                let rail = || Rail { slot, address: address.clone(), backoff: self.settings.backoff_min, state: RailState::Waiting(now) };
                state.rails.extend(std::iter::repeat_with(rail).take(missing));
            }
        }
        let first = state.first;
        state.identity = Some(identity.clone());
        let published: Vec<_> = self.regions.published().map(|(name, region)| (name.to_owned(), region)).collect();
        if let Ok(session) = self.established(peer) {
            for (name, region) in &published {
                session.publish(name, region, now);
            }
        }
        self.events.push_back(Event::Connected { peer, identity, accepted });
        self.on_joined(peer, first);
        self.touched.push(peer);
    }

    fn refuse_name(&mut self, peer: PeerId, now: Time) {
        if let Some(Peer { session: Some(session), .. }) = self.peers.at_mut(peer.0) {
            session.close(now);
            self.touched.push(peer);
        }
    }

    pub(super) fn on_session_lost(&mut self, peer: PeerId, cause: SessionLoss, now: Time) {
        self.drop_peer(peer, cause, now);
    }

    /// What falls due at a peer besides its session: rails to open, and the end of an attempt to connect.
    pub(super) fn on_peer_due(&mut self, peer: PeerId, now: Time) {
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        if state.identity.is_none() {
            if !state.accepted && state.connect_deadline <= now {
                let address = state.address();
                let error = match state.session {
                    Some(_) => ConnectError::Expired { address },
                    None => ConnectError::NoPath { address, loss: state.last_loss },
                };
                self.fail_connect(peer, error);
                return;
            }
            let due = state.rails.iter().any(|r| matches!(r.state, RailState::Waiting(at) if at <= now));
            if due {
                self.next_rail(peer, now);
            }
            return;
        }
        for index in 0..self.peers.at(peer.0).map_or(0, |p| p.rails.len()) {
            self.open_rail(peer, index, now);
        }
    }

    /// Opens the rail of the next candidate, of which there is one at a time until the session is established.
    fn next_rail(&mut self, peer: PeerId, now: Time) {
        let backoff = self.settings.backoff_min;
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        let (slot, address) = state.candidates[state.next_candidate % state.candidates.len()].clone();
        state.next_candidate += 1;
        let backoff = state.rails.pop().map_or(backoff, |r| r.backoff);
        state.rails.push(Rail { slot, address, backoff, state: RailState::Waiting(now) });
        self.open_rail(peer, 0, now);
    }

    fn open_rail(&mut self, peer: PeerId, index: usize, now: Time) {
        let Some(rail) = self.peers.at_mut(peer.0).and_then(|p| p.rails.get_mut(index)) else { return };
        if !matches!(rail.state, RailState::Waiting(at) if at <= now) {
            return;
        }
        let (slot, address) = (rail.slot, rail.address.clone());
        match self.slots[slot].transport.open(&address, now) {
            Ok(id) => {
                let via = self.new_path(slot, id, Some(peer), Stage::Opening);
                self.with_rail(peer, index, |rail| rail.state = RailState::Using(via));
            }
            Err(loss) => {
                let max = self.settings.backoff_max;
                self.with_rail(peer, index, |rail| {
                    rail.state = RailState::Waiting(now.saturating_add(rail.backoff));
                    rail.backoff = doubled(rail.backoff, max);
                });
                if let Some(state) = self.peers.at_mut(peer.0) {
                    state.last_loss = loss;
                }
            }
        }
        self.touched.push(peer);
    }

    fn with_rail(&mut self, peer: PeerId, index: usize, act: impl FnOnce(&mut Rail)) {
        if let Some(rail) = self.peers.at_mut(peer.0).and_then(|p| p.rails.get_mut(index)) {
            act(rail);
        }
    }

    fn slot_named(&self, transport: &str) -> Option<usize> {
        self.slots.iter().position(|s| s.transport.capabilities().name == transport)
    }

    fn new_peer(&mut self, accepted: bool, candidates: Vec<(usize, PeerAddress)>, connect_deadline: Time) -> PeerId {
        let id = PeerId(self.next_peer);
        self.next_peer += 1;
        let peer = Peer {
            session: None,
            identity: None,
            accepted,
            first: u32::MAX,
            rails: Vec::new(),
            candidates,
            next_candidate: 0,
            connect_deadline,
            last_loss: Loss::Silent,
            regions: BTreeMap::new(),
            timer: None,
        };
        self.peers.insert(id.0, peer);
        self.touched.push(id);
        id
    }

    fn new_path(&mut self, slot: usize, id: PathId, peer: Option<PeerId>, stage: Stage) -> u32 {
        let via = self.next_path;
        self.next_path += 1;
        self.paths.insert(via, Path { slot, id, peer, stage, outbox: VecDeque::new() });
        self.by_path[slot].insert(id.0, via);
        via
    }

    /// Closes a path. The transport's word that it is gone follows, after the ends of its operations.
    pub(super) fn close_path(&mut self, via: u32) {
        if let Some(path) = self.paths.at_mut(via) {
            path.stage = Stage::Closing;
            let (slot, id) = (path.slot, path.id);
            self.slots[slot].transport.close(id);
        }
    }

    fn fail_connect(&mut self, peer: PeerId, error: ConnectError) {
        self.forget(peer);
        self.events.push_back(Event::ConnectFailed { peer, error });
    }

    fn drop_peer(&mut self, peer: PeerId, cause: SessionLoss, now: Time) {
        let Some(state) = self.peers.at(peer.0) else { return };
        match &state.identity {
            Some(identity) => {
                let name = identity.name.clone();
                self.engine.on_peer_gone(peer, Loss::Closed, now);
                self.forget(peer);
                self.events.push_back(Event::PeerLost { peer, name, cause });
            }
            // Nobody here has asked for it or heard of it.
            None if state.accepted => self.forget(peer),
            None => {
                let address = state.address();
                self.fail_connect(peer, ConnectError::NoSession { address, cause });
            }
        }
    }

    fn forget(&mut self, peer: PeerId) {
        if let Some(Peer { timer: Some(at), .. }) = self.peers.remove(peer.0) {
            self.timers.remove(&(at, peer));
        }
        let vias: Vec<u32> = self.paths.iter().filter(|(_, p)| p.peer == Some(peer)).map(|(via, _)| via).collect();
        for via in vias {
            self.close_path(via);
        }
    }
}

impl Peer {
    fn address(&self) -> PeerAddress {
        match (self.rails.first(), self.candidates.first()) {
            (Some(rail), _) => rail.address.clone(),
            (None, Some((_, address))) => address.clone(),
            (None, None) => PeerAddress(String::new()),
        }
    }
}

fn doubled(backoff: Time, max: Time) -> Time {
    backoff.saturating_add(backoff).min(max)
}
