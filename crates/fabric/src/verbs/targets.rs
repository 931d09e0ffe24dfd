//! A peer's regions as one path knows them: asked for once by key, then named directly to the device.

use std::collections::HashMap;

use weft_protocol::{Direction, Leg, Move, Refusal, RegionKey};

use super::message::Location;

/// Far regions that a path remembers; one that is not in use makes room for the next.
const TARGETS_MAX: usize = 4096;

#[derive(Debug)]
pub(super) struct Target {
    pub key: RegionKey,
    pub state: State,
    /// Moves that are open on it.
    pub moves: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The peer has been asked.
    Asked,
    Known(Location),
    /// The peer wants it back, and is told once the device has nothing left of it.
    Revoked,
}

/// The far regions of a path.
#[derive(Debug, Default)]
pub(super) struct Targets {
    entries: Vec<Option<Target>>,
    free: Vec<u32>,
    by_key: HashMap<RegionKey, u32>,
    /// Slots that the peer wants back and that have not been let go of.
    revoked: Vec<u32>,
    /// The one that was found last, which is usually the one that is wanted next.
    last: Option<(RegionKey, u32)>,
}

/// What came of looking a region up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Here(u32),
    /// It was not known: ask the peer.
    Ask(u32),
    Full,
}

impl Targets {
    pub(super) fn find_or_ask(&mut self, key: &RegionKey) -> Found {
        if let Some((last, index)) = self.last
            && last == *key
        {
            return Found::Here(index);
        }
        if let Some(&index) = self.by_key.get(key) {
            self.last = Some((*key, index));
            return Found::Here(index);
        }
        if self.by_key.len() >= TARGETS_MAX && !self.forget_idle() {
            return Found::Full;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.entries[index as usize] = Some(Target {
            key: *key,
            state: State::Asked,
            moves: 0,
        });
        self.by_key.insert(*key, index);
        Found::Ask(index)
    }

    pub(super) fn at(&mut self, index: u32) -> Option<&mut Target> {
        self.entries.get_mut(index as usize)?.as_mut()
    }

    pub(super) fn by_key(&self, key: &RegionKey) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// Marks what is known of a slot of the peer's as wanted back, under whatever keys; returns which that are.
    pub(super) fn revoke(&mut self, slot: u32) -> Vec<u32> {
        let found: Vec<u32> = self.with_slot(slot).collect();
        for &index in &found {
            if let Some(target) = self.at(index) {
                target.state = State::Revoked;
            }
        }
        if !found.is_empty() && !self.revoked.contains(&slot) {
            self.revoked.push(slot);
        }
        found
    }

    /// The slots that the peer wants back.
    pub(super) fn revoked(&self) -> &[u32] {
        &self.revoked
    }

    pub(super) fn with_slot(&self, slot: u32) -> impl Iterator<Item = u32> + '_ {
        let found = self.by_key.iter().filter(move |(key, _)| key.slot == slot);
        found.map(|(_, index)| *index)
    }

    /// Forgets all that is known of a slot.
    pub(super) fn remove_slot(&mut self, slot: u32) {
        for index in self.with_slot(slot).collect::<Vec<_>>() {
            self.remove(index);
        }
        self.revoked.retain(|revoked| *revoked != slot);
    }

    pub(super) fn remove(&mut self, index: u32) {
        if let Some(target) = self.entries.get_mut(index as usize).and_then(Option::take) {
            self.by_key.remove(&target.key);
            self.free.push(index);
            self.last = None;
        }
    }

    /// Forgets a region that no move is open on. Should its owner want it back, it is let go of already.
    fn forget_idle(&mut self) -> bool {
        let idle = |target: &Option<Target>| {
            target
                .as_ref()
                .is_some_and(|t| t.moves == 0 && matches!(t.state, State::Known(_)))
        };
        let Some(index) = self.entries.iter().position(idle) else {
            return false;
        };
        self.remove(index as u32);
        true
    }
}

/// May this move touch the region? Asked here with the owner's own words, so that a wrong one costs nobody the path.
pub(super) fn permits(location: &Location, part: &Move) -> Result<(), Refusal> {
    let access = location.access;
    match part.direction {
        Direction::Read if !access.read => return Err(Refusal::NotReadable),
        Direction::Write if !access.write => return Err(Refusal::NotWritable),
        // A checksum tells what is in the memory, to somebody who may not read it.
        Direction::Write if part.checksum && !access.read => return Err(Refusal::Unsupported),
        _ => {}
    }
    // A leg lies within its region as the initiator knows it, which is usually how the owner knows it.
    if part.leg.remote().len > location.len && far_end(&part.leg, part) > location.len {
        return Err(Refusal::OutOfBounds);
    }
    Ok(())
}

/// One past the last far byte that a part of a leg touches.
fn far_end(leg: &Leg, part: &Move) -> u64 {
    let pieces = leg.remote_spans().pieces(part.range.clone());
    pieces.map(|piece| piece.offset + piece.len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use weft_protocol::Epoch;

    use super::*;

    fn key(slot: u32) -> RegionKey {
        RegionKey {
            epoch: Epoch(1),
            slot,
            secret: 5,
        }
    }

    #[test]
    fn a_region_is_asked_for_once() {
        let mut targets = Targets::default();
        let Found::Ask(index) = targets.find_or_ask(&key(3)) else {
            panic!("an unknown region was found");
        };
        assert_eq!(targets.find_or_ask(&key(3)), Found::Here(index));
        assert_eq!(targets.with_slot(3).collect::<Vec<_>>(), [index]);
        targets.remove(index);
        assert_eq!(targets.with_slot(3).count(), 0);
        assert!(matches!(targets.find_or_ask(&key(3)), Found::Ask(_)));
    }

    #[test]
    fn a_slot_is_given_back_under_all_of_its_keys() {
        let mut targets = Targets::default();
        let guessed = RegionKey { secret: 6, ..key(3) };
        for key in [key(3), guessed, key(4)] {
            assert!(matches!(targets.find_or_ask(&key), Found::Ask(_)));
        }
        assert_eq!(targets.revoke(3).len(), 2);
        assert_eq!(targets.revoke(3).len(), 2, "asked twice");
        assert_eq!(targets.revoked(), [3]);
        assert!(
            targets
                .with_slot(3)
                .collect::<Vec<_>>()
                .into_iter()
                .all(|i| targets.at(i).unwrap().state == State::Revoked)
        );
        targets.remove_slot(3);
        assert_eq!((targets.with_slot(3).count(), targets.with_slot(4).count()), (0, 1));
        assert!(targets.revoked().is_empty() && targets.revoke(3).is_empty());
    }

    #[test]
    fn idle_regions_make_room_and_busy_ones_do_not() {
        let mut targets = Targets::default();
        for slot in 0..TARGETS_MAX as u32 {
            let Found::Ask(index) = targets.find_or_ask(&key(slot)) else {
                panic!("an unknown region was found");
            };
            targets.at(index).unwrap().moves = 1;
        }
        assert_eq!(targets.find_or_ask(&key(u32::MAX)), Found::Full);
        let target = targets.at(7).unwrap();
        target.moves = 0;
        target.state = State::Known(Location {
            iova: 0,
            len: 1,
            rkey: 0,
            access: weft_protocol::Access::READ,
            atomics: false,
        });
        assert_eq!(targets.find_or_ask(&key(u32::MAX)), Found::Ask(7));
    }
}
