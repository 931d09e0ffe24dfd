//! Paths: whose they are, when they carry transfers, and what their loss means.

use std::collections::VecDeque;
use std::sync::Arc;

use weft_plan::Time;

use super::connect::{Peer, RailState};
use super::{Core, Event, Reach};
use crate::error::Loss;
use crate::session::{self, Peek, Session, SessionLoss, Via};
use crate::transfer::{Lane, LaneId, PeerId};
use crate::transport::{PathId, Transport};

#[derive(Debug)]
pub(super) struct Path {
    pub(super) slot: usize,
    pub(super) id: PathId,
    /// Unknown until the first message on a path that a peer has opened.
    pub(super) peer: Option<PeerId>,
    pub(super) stage: Stage,
    /// The engine knows it as a lane.
    pub(super) carries: bool,
    /// Messages that the transport had no room for.
    pub(super) outbox: VecDeque<Arc<[u8]>>,
    /// Parcels that came before the session vouched for the path.
    pub(super) early: Vec<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// We asked for it and wait for the transport's word.
    Opening,
    /// Open, but the session does not vouch for it.
    Open,
    /// Carries transfers.
    Joined,
    /// We have closed it and wait for its end.
    Closing,
}

impl<T: ?Sized + Transport> Core<T> {
    /// The transports that carry transfers to a peer now.
    pub fn transports(&self, peer: PeerId) -> Vec<&'static str> {
        let paths = self.paths.iter().map(|(_, path)| path);
        let joined = paths.filter(|path| path.peer == Some(peer) && path.stage == Stage::Joined);
        let mut names: Vec<_> = joined
            .map(|path| self.slots[path.slot].transport.capabilities().name)
            .collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// How many paths carry transfers to a peer over the transport of this name now.
    pub fn path_count(&self, peer: PeerId, transport: &str) -> usize {
        let paths = self.paths.iter().map(|(_, path)| path);
        let joined = paths.filter(|path| path.peer == Some(peer) && path.stage == Stage::Joined);
        joined
            .filter(|path| self.slots[path.slot].transport.capabilities().name == transport)
            .count()
    }

    /// A path that carries transfers to a peer over the transport of this name, with that transport.
    pub fn path_over(&mut self, peer: PeerId, transport: &str) -> Option<(&mut T, PathId)> {
        let (_, path) = self.paths.iter().find(|(_, path)| {
            path.peer == Some(peer)
                && path.stage == Stage::Joined
                && self.slots[path.slot].transport.capabilities().name == transport
        })?;
        let (slot, id) = (path.slot, path.id);
        Some((&mut *self.slots[slot].transport, id))
    }

    pub(super) fn new_path(&mut self, slot: usize, id: PathId, peer: Option<PeerId>, stage: Stage) -> u32 {
        let via = self.next_path;
        self.next_path += 1;
        let path = Path {
            slot,
            id,
            peer,
            stage,
            carries: false,
            outbox: VecDeque::new(),
            early: Vec::new(),
        };
        self.paths.insert(via, path);
        self.by_path[slot].insert(id.0, via);
        via
    }

    /// Closes a path. The transport's word that it is gone follows, after the ends of its operations.
    pub(super) fn close_path(&mut self, via: u32) {
        if let Some(path) = self.paths.at_mut(via).filter(|p| p.stage != Stage::Closing) {
            path.stage = Stage::Closing;
            path.outbox.clear();
            self.slots[path.slot].transport.close(path.id);
            self.posted[path.slot] = true;
        }
    }

    pub(super) fn on_accepted(&mut self, slot: usize, id: PathId, now: Time) {
        if self.slots[slot].reach == Reach::Here {
            // Nobody has been told where it is.
            self.slots[slot].transport.close(id);
            return;
        }
        let via = self.new_path(slot, id, None, Stage::Open);
        let by = now.saturating_add(self.settings.handshake_max);
        self.unclaimed.push_back((by, via));
        // Whoever opens paths and says nothing pushes out only others that have said nothing.
        if self.unclaimed.len() > self.settings.unclaimed_paths_max
            && let Some((_, oldest)) = self.unclaimed.pop_front()
        {
            self.give_up_unclaimed(oldest);
        }
    }

    pub(super) fn expire_unclaimed(&mut self, now: Time) {
        while let Some(&(by, via)) = self.unclaimed.front() {
            if by > now && self.is_unclaimed(via) {
                return;
            }
            self.unclaimed.pop_front();
            self.give_up_unclaimed(via);
        }
    }

    fn is_unclaimed(&self, via: u32) -> bool {
        self.paths.at(via).is_some_and(|path| path.stage == Stage::Open)
    }

    fn give_up_unclaimed(&mut self, via: u32) {
        if self.is_unclaimed(via) {
            self.close_path(via);
        }
    }

    pub(super) fn on_message(&mut self, via: u32, payload: &[u8], now: Time) {
        let Some(path) = self.paths.at(via).filter(|p| p.stage != Stage::Closing) else {
            return;
        };
        let (slot, known) = (path.slot, path.peer);
        let peer = match known.map_or_else(|| self.claim(via, payload, now), Ok) {
            Ok(peer) => peer,
            Err(stranger) => {
                // Over an unreliable transport a message may be spoiled, or overtake the one that says who it is from.
                if stranger || self.slots[slot].transport.capabilities().reliable_messages {
                    self.close_path(via);
                }
                return;
            }
        };
        if let Some(session) = self.peers.at_mut(peer.0).and_then(|p| p.session.as_mut()) {
            session.on_message(Via(via), payload, now);
            self.touch(peer);
        }
    }

    /// Finds out whose path this is from the first message on it. The error tells whether it is certainly nobody's.
    fn claim(&mut self, via: u32, payload: &[u8], now: Time) -> Result<PeerId, bool> {
        let peer = match session::peek(payload).map_err(|_| false)? {
            Peek::Hello if self.peers.len() < self.settings.peers_max => {
                let config = self.config();
                let session = Session::accept(config, (self.random)(), Via(via), now);
                let id = self.new_peer(None);
                if let Some(state) = self.peers.at_mut(id.0) {
                    state.first = via;
                    state.session = Some(session);
                }
                id
            }
            Peek::Join { session } => {
                let is_meant = |p: &Peer| p.over.is_none() && p.session.as_ref().and_then(Session::id) == Some(session);
                let meant = self.peers.iter().find(|(_, peer)| is_meant(peer));
                PeerId(meant.ok_or(true)?.0)
            }
            _ => return Err(true),
        };
        if let Some(path) = self.paths.at_mut(via) {
            path.peer = Some(peer);
        }
        Ok(peer)
    }

    /// The session vouches for a path: from now on it carries transfers.
    pub(super) fn on_joined(&mut self, peer: PeerId, via: u32, now: Time) {
        let Some(transport) = self.become_lane(peer, via) else {
            return;
        };
        if let Some(state) = self.peers.at_mut(peer.0) {
            state.rejoin_by = None;
            let using = |rail: &&mut super::connect::Rail| rail.state == RailState::Using(via);
            if let Some(rail) = state.rails.iter_mut().find(using) {
                rail.calm(self.settings.backoff_min);
            }
        }
        self.events.push_back(Event::PathUp { peer, transport });
        self.on_early_parcels(via, now);
        self.post_parcels(peer, now);
    }

    /// Makes a lane of an open path, and tells of which transport.
    pub(super) fn become_lane(&mut self, peer: PeerId, via: u32) -> Option<&'static str> {
        let path = self.paths.at_mut(via)?;
        if path.stage != Stage::Open || path.peer != Some(peer) {
            return None;
        }
        path.stage = Stage::Joined;
        path.carries = true;
        self.slots[path.slot].transport.vouch(path.id);
        self.posted[path.slot] = true;
        let slot = &self.slots[path.slot];
        let capabilities = slot.transport.capabilities();
        self.engine.add_lane(Lane {
            preference: slot.preference,
            ..Lane::of(capabilities, LaneId(via), peer)
        });
        self.atomics.add_lane(peer, via, capabilities);
        Some(capabilities.name)
    }

    pub(super) fn on_lost(&mut self, via: u32, loss: Loss, fenced: bool, now: Time) {
        let Some(path) = self.paths.remove(via) else { return };
        self.by_path[path.slot].remove(path.id.0);
        let transport = self.slots[path.slot].transport.capabilities().name;
        let Some(peer) = path.peer else { return };
        if peer == PeerId::HERE {
            self.on_lost_here(via, path.slot, path.carries, loss, fenced, now);
            return;
        }
        if path.carries {
            self.engine.on_lane_lost(LaneId(via), loss, fenced, now);
            self.on_atomic_lane_lost(peer, via, loss, fenced);
        }
        let backoff_max = self.settings.backoff_max;
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        if let Some(session) = &mut state.session {
            session.on_path_lost(Via(via), now);
        }
        let using = state.rails.iter_mut().find(|r| r.state == RailState::Using(via));
        let known = using.as_ref().is_some_and(|rail| rail.known);
        if let Some(rail) = using {
            rail.back_off(backoff_max, now);
        }
        if let Some(attempt) = &mut state.attempt {
            attempt.last_loss = loss;
        }
        let unknown = state.identity.is_none();
        if unknown && !state.accepted {
            // A handshake does not survive its path; it begins again on the next one.
            state.session = None;
        }
        if unknown && state.accepted {
            self.part(peer, SessionLoss::PathLost, now);
        }
        if path.carries {
            self.events.push_back(Event::PathDown { peer, transport, loss });
        }
        self.on_parcel_path_lost(peer, via, now);
        self.consider_gone(peer, loss, known, now);
        self.forget_if_cut_off(peer);
        self.touch(peer);
    }
}
