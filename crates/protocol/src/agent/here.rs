//! Moves among this agent's own places: lanes without a session, because nobody is at their far end.
//!
//! A transport that reaches [`Reach::Here`] is opened at its own address. What it opens is a lane to [`PeerId::HERE`]; there is no handshake, for
//! there is nobody to prove anything to. A spill to a file, or a copy between host memory and a device, is then an ordinary transfer.

use weft_plan::Time;

use super::connect::{Rail, RailState};
use super::paths::Stage;
use super::{Core, Event, Reach, Slot};
use crate::error::Loss;
use crate::region::{RegionKey, RemoteRegion};
use crate::transfer::{LaneId, PeerId};
use crate::transport::Transport;

/// The lanes to this agent's own places: opened when the core is first turned, and again when they are lost.
#[derive(Debug, Default)]
pub(super) struct Here {
    rails: Vec<Rail>,
}

impl Here {
    pub(super) fn new<T: ?Sized + Transport>(slots: &[Slot<T>], backoff: Time) -> Here {
        let own = slots.iter().enumerate().filter(|(_, slot)| slot.reach == Reach::Here);
        let rails = own.flat_map(|(index, slot)| {
            let address = &slot.transport.capabilities().address;
            (0..slot.paths).map(move |_| Rail::new(index, address.clone(), backoff, Time::ZERO))
        });
        Here { rails: rails.collect() }
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
