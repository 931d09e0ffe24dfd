//! Moves among this agent's own places: lanes without a session, because nobody is at their far end.
//!
//! A transport that reaches [`Reach::Here`] is opened at its own address. What it opens is a lane to [`PeerId::HERE`]; there is no handshake, for
//! there is nobody to prove anything to. A spill to a file, or a copy between host memory and a device, is then an ordinary transfer.
//! Most agents never have a file or a device: a lane is opened with the first place that it leads to.

use weft_plan::{PlaceKind, Time};

use super::connect::{Rail, RailState};
use super::paths::Stage;
use super::{Core, Event, Reach, Slot};
use crate::error::Loss;
use crate::region::{RegionKey, RemoteRegion};
use crate::transfer::{LaneId, PeerId};
use crate::transport::Transport;

/// The lanes to this agent's own places: opened with the first of these, and again when they are lost.
#[derive(Debug, Default)]
pub(super) struct Here {
    rails: Vec<Rail>,
    /// Transports that lead to no place yet, by slot.
    unlaid: Vec<usize>,
    /// There are rails that nobody has looked at since they were laid.
    laid: bool,
    backoff: Time,
}

impl Here {
    pub(super) fn new<T: ?Sized + Transport>(slots: &[Slot<T>], backoff: Time) -> Here {
        let own = slots.iter().enumerate().filter(|(_, slot)| slot.reach == Reach::Here);
        let mut here = Here {
            unlaid: own.map(|(index, _)| index).collect(),
            backoff,
            ..Here::default()
        };
        for (index, slot) in slots.iter().enumerate() {
            // Host memory is a place from the start.
            let host = PlaceKind::Dram;
            if slot.transport.capabilities().carriage(host, host).is_some() {
                here.lay(index, slot);
            }
        }
        here
    }

    /// A place has come that a transport leads to.
    pub(super) fn lay<T: ?Sized + Transport>(&mut self, index: usize, slot: &Slot<T>) {
        let Some(at) = self.unlaid.iter().position(|unlaid| *unlaid == index) else {
            return;
        };
        self.unlaid.swap_remove(at);
        self.laid = true;
        let address = &slot.transport.capabilities().address;
        let rail = || Rail::new(index, address.clone(), self.backoff, Time::ZERO);
        self.rails.extend((0..slot.paths).map(|_| rail()));
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.rails.iter().filter_map(Rail::due).min()
    }
}

impl<T: ?Sized + Transport> Core<T> {
    /// Memory of this agent as the far end of a transfer to [`PeerId::HERE`].
    pub fn own_region(&self, key: &RegionKey) -> Option<RemoteRegion> {
        self.registered(key).map(|(_, remote)| remote)
    }

    /// Opens lanes whose first place has come since; tells whether there were any. What is to go over them has been posted already, and waits for no timer.
    pub(super) fn open_laid(&mut self, now: Time) -> bool {
        let laid = std::mem::take(&mut self.here.laid);
        if laid {
            self.open_here(now);
        }
        laid
    }

    /// Opens the lanes to this agent's own places that are due.
    pub(super) fn open_here(&mut self, now: Time) {
        for index in 0..self.here.rails.len() {
            let rail = &mut self.here.rails[index];
            if rail.due().is_none_or(|at| at > now) {
                continue;
            }
            match self.slots[rail.slot].transport.open(&rail.address, now) {
                Ok(id) => {
                    self.posted[rail.slot] = true;
                    rail.state = RailState::Using(self.next_path);
                    let slot = rail.slot;
                    self.new_path(slot, id, Some(PeerId::HERE), Stage::Opening);
                }
                Err(_) => rail.back_off(self.settings.backoff_max, now),
            }
        }
    }

    /// The path is a lane at once.
    pub(super) fn on_opened_here(&mut self, via: u32) {
        let backoff = self.settings.backoff_min;
        if let Some(rail) = self.here.rails.iter_mut().find(|r| r.state == RailState::Using(via)) {
            rail.calm(backoff);
        }
        if let Some(transport) = self.become_lane(PeerId::HERE, via) {
            let peer = PeerId::HERE;
            self.events.push_back(Event::PathUp { peer, transport });
        }
    }

    pub(super) fn on_lost_here(&mut self, via: u32, slot: usize, carried: bool, loss: Loss, fenced: bool, now: Time) {
        let (peer, backoff_max) = (PeerId::HERE, self.settings.backoff_max);
        if let Some(rail) = self.here.rails.iter_mut().find(|r| r.state == RailState::Using(via)) {
            rail.back_off(backoff_max, now);
        }
        if carried {
            self.engine.on_lane_lost(LaneId(via), loss, fenced, now);
            self.on_atomic_lane_lost(peer, via, loss, fenced);
            let transport = self.slots[slot].transport.capabilities().name;
            self.events.push_back(Event::PathDown { peer, transport, loss });
        }
    }
}
