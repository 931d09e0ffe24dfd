//! Writes of peers that are told to the application when all of them is in place, without a message.
//!
//! Every part of such a write announces its arrival, and the one of the greatest index says that it is. They are counted here, each once; no order is
//! needed. Such a write is never carried twice, so what has been told is the application's to use.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use weft_plan::Time;

use super::announce::ANNOUNCEMENTS_MAX;
use super::connect::has;
use super::{Core, PeerError};
use crate::session::{Session, TOLD_BIT, Via};
use crate::transfer::{PartLimits, PeerId, Request, SubmitError, cut};
use crate::transport::{Arrival, Transport};

/// Tags of writes that are only committed have this bit, those of writes that applications are told of [`TOLD_BIT`]. All others belong to
/// announcements.
pub(super) const COMMIT_BIT: u64 = 1 << 62;

/// Writes of one peer that may be half there: twice as many as it may have under way. Beyond that the one of which nothing has come for
/// longest is given up. Its sender has given it up before, for parts of one that is alive keep coming.
const TAGS_MAX: usize = 2 * ANNOUNCEMENTS_MAX;
/// Parts of one peer's writes that are counted; beyond that, the same.
const PARTS_MAX: usize = 1 << 16;
/// Parts that writes may be cut into which are to be told, all together: half of what is counted, because lanes that share the end of a transfer cut it finer than
/// was foreseen. A peer that sends more than are counted, under one number, loses its path.
pub(super) const TOLD_PARTS_MAX: usize = PARTS_MAX / 2;
/// Writes of one peer that are there and that nobody has heard of. A peer that has more loses its path, and comes back on another: there is no way to ask it
/// to wait, and it must not fill this agent's memory. An application that wants to be told must listen.
const UNHEARD_MAX: usize = 4096;

/// What has arrived from one peer.
#[derive(Debug, Default)]
pub(super) struct Arrived {
    tags: BTreeMap<u64, Parts>,
    /// The tags by when something last came of them.
    by_age: BTreeMap<u64, u64>,
    next_age: u64,
    parts: usize,
    /// Whole, and not yet among the events: its number and how many parts it had.
    unheard: VecDeque<(u32, u32)>,
}

#[derive(Debug, Default)]
struct Parts {
    seen: BTreeSet<u32>,
    total: Option<u32>,
    age: u64,
}

/// The tag of a write under a number, told apart from all others of this agent by a serial number.
pub(super) fn tag_of(number: u32, serial: u64) -> u64 {
    TOLD_BIT | (serial & 0x3fff_ffff) << 32 | u64::from(number)
}

impl Arrived {
    /// A part is in place. False where the peer does what none does that means well.
    fn arrive(&mut self, arrival: Arrival) -> bool {
        let parts = self.tags.entry(arrival.tag).or_default();
        self.by_age.remove(&parts.age);
        self.next_age += 1;
        parts.age = self.next_age;
        self.by_age.insert(parts.age, arrival.tag);
        let index = arrival.index & !Arrival::LAST;
        if arrival.index & Arrival::LAST != 0 {
            parts.total = Some(index.saturating_add(1));
        }
        self.parts += usize::from(parts.seen.insert(index));
        let count = parts.seen.len() as u32;
        if parts.total == Some(count) && parts.seen.last().is_some_and(|last| last + 1 == count) {
            self.forget(arrival.tag);
            if self.unheard.len() >= UNHEARD_MAX {
                return false;
            }
            self.unheard.push_back((arrival.tag as u32, count));
        }
        while self.parts > PARTS_MAX || self.tags.len() > TAGS_MAX {
            match self.by_age.first_key_value() {
                Some((_, &oldest)) if oldest != arrival.tag => self.forget(oldest),
                // What has just come is all there is.
                _ => {
                    self.forget(arrival.tag);
                    return false;
                }
            }
        }
        true
    }

    /// The next write that is whole.
    pub(super) fn next(&mut self) -> Option<(u32, u32)> {
        self.unheard.pop_front()
    }

    /// How many parts are counted of what is not whole.
    #[cfg(test)]
    pub(super) fn parts(&self) -> usize {
        self.parts
    }

    fn forget(&mut self, tag: u64) {
        if let Some(parts) = self.tags.remove(&tag) {
            self.parts -= parts.seen.len();
            self.by_age.remove(&parts.age);
        }
    }
}

impl<T: ?Sized + Transport> Core<T> {
    /// A part of a peer's write is in place. The session says whether it counts, and when: until the peer has proved that it is behind the path, whoever
    /// opened it has only said whose it is.
    pub(super) fn on_arrival(&mut self, via: u32, arrival: Arrival, now: Time) {
        // Nobody waits for parts that are only to be committed.
        if arrival.tag & COMMIT_BIT != 0 {
            return;
        }
        let Some(peer) = self.paths.at(via).and_then(|path| path.peer) else {
            return;
        };
        if let Some(session) = self.peers.at_mut(peer.0).and_then(|p| p.session.as_mut()) {
            session.on_arrival(Via(via), arrival, now);
            self.count_told(peer);
            self.touch(peer);
        }
    }

    /// Counts the parts that the session has found to be the peer's.
    pub(super) fn count_told(&mut self, peer: PeerId) {
        while let Some(state) = self.peers.at_mut(peer.0)
            && let Some((via, arrival)) = state.session.as_mut().and_then(Session::next_told)
        {
            if !state.arrived.arrive(arrival) {
                self.close_path(via.0);
            }
        }
    }

    /// Whether the peer could count all parts of a write beside those that are under way, whichever of the transports to it carries them. Says how many they may be.
    pub(super) fn may_tell(&self, request: &Request) -> Result<usize, PeerError> {
        self.may_announce(request.peer)?;
        let mut parts = 0;
        for leg in request.legs.iter() {
            let kinds = (leg.local().place.kind(), leg.remote().place.kind());
            let reaching = self.slots.iter().map(|slot| slot.transport.capabilities());
            let reaching = reaching.filter(|c| self.identity(request.peer).is_some_and(|peer| has(peer, c.name)));
            let limits = reaching.filter_map(|c| {
                c.carriage(kinds.0, kinds.1).map(|carriage| PartLimits {
                    max_bytes: carriage.max_op_bytes,
                    max_runs: c.max_op_runs,
                    align: carriage.align,
                })
            });
            // Where nothing carries it there is no way, which is found out elsewhere.
            let Some(limits) = limits.reduce(PartLimits::tightest) else {
                continue;
            };
            let mut at = 0;
            while at < leg.bytes() {
                at = cut(leg, at, limits);
                parts += 1;
                if parts > TOLD_PARTS_MAX {
                    return Err(PeerError::TooManyParts { max: TOLD_PARTS_MAX });
                }
            }
        }
        let told = self.peers.at(request.peer.0).map_or(0, |state| state.told_parts);
        match told + parts > TOLD_PARTS_MAX {
            true => Err(SubmitError::TooManyAnnounced.into()),
            false => Ok(parts),
        }
    }
}
