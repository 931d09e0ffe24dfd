//! Writes of peers that are told to the application when all of them is in place, without a message.
//!
//! Every part of such a write announces its arrival, and the one of the greatest index says that it is. They are counted here, each once; no order is
//! needed. Such a write is never carried twice, so what has been told is the application's to use.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Core;
use crate::transfer::PeerId;
use crate::transport::{Arrival, Transport};

/// Tags of writes that applications are told of have this bit; those of writes that are only committed the next. All others belong to
/// announcements.
pub(super) const TOLD_BIT: u64 = 1 << 63;
pub(super) const COMMIT_BIT: u64 = 1 << 62;

/// Writes of one peer that may be half there. Beyond that the oldest is given up, which its sender must have done before.
const TAGS_MAX: usize = 1024;
/// Parts of one peer's writes that are counted, and writes that the application has not heard of. A peer that has more loses its path.
const PARTS_MAX: usize = 1 << 16;
const UNHEARD_MAX: usize = 4096;

/// What has arrived from one peer.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    tags: BTreeMap<u64, Parts>,
    /// Oldest first.
    order: VecDeque<u64>,
    parts: usize,
    /// Whole, and not yet among the events: its number and how many parts it had.
    unheard: VecDeque<(u32, u32)>,
}

#[derive(Debug, Default)]
struct Parts {
    seen: BTreeSet<u32>,
    total: Option<u32>,
}

/// The tag of a write under a number, told apart from all others of this agent by a serial number.
pub(super) fn tag_of(number: u32, serial: u64) -> u64 {
    TOLD_BIT | (serial & 0x3fff_ffff) << 32 | u64::from(number)
}

impl Arrived {
    /// A part is in place. False where the peer has left more unfinished than any that means well.
    fn arrive(&mut self, arrival: Arrival) -> bool {
        if !self.tags.contains_key(&arrival.tag) {
            self.order.push_back(arrival.tag);
            if self.tags.len() >= TAGS_MAX {
                self.give_up_oldest();
            }
        }
        let parts = self.tags.entry(arrival.tag).or_default();
        let index = arrival.index & !Arrival::LAST;
        if arrival.index & Arrival::LAST != 0 {
            parts.total = Some(index.saturating_add(1));
        }
        self.parts += usize::from(parts.seen.insert(index));
        let count = parts.seen.len() as u32;
        if parts.total == Some(count) && parts.seen.last().is_some_and(|last| last + 1 == count) {
            self.forget(arrival.tag);
            self.unheard.push_back((arrival.tag as u32, count));
        }
        self.parts <= PARTS_MAX && self.unheard.len() <= UNHEARD_MAX
    }

    /// The next write that is whole.
    pub(super) fn next(&mut self) -> Option<(u32, u32)> {
        self.unheard.pop_front()
    }

    fn give_up_oldest(&mut self) {
        while let Some(tag) = self.order.pop_front() {
            if self.tags.contains_key(&tag) {
                self.forget(tag);
                return;
            }
        }
    }

    fn forget(&mut self, tag: u64) {
        if let Some(parts) = self.tags.remove(&tag) {
            self.parts -= parts.seen.len();
        }
        // Those that have ended are dropped once they are most of what is there.
        if self.order.len() > 2 * TAGS_MAX {
            let tags = &self.tags;
            self.order.retain(|tag| tags.contains_key(tag));
        }
    }
}

impl<T: ?Sized + Transport> Core<T> {
    pub(super) fn on_told_part(&mut self, peer: PeerId, via: u32, arrival: Arrival) {
        let Some(state) = self.peers.at_mut(peer.0) else { return };
        match state.arrived.arrive(arrival) {
            true => self.touch(peer),
            false => self.close_path(via),
        }
    }
}
