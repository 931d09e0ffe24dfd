//! Entries of blocks, in slices that are gone through one at a time; and which members are to know of a block.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use super::super::BlockId;
use super::wire::REPLICAS_MAX;

/// Whoever goes through all entries does so by these, one a turn.
pub(super) const SLICES: usize = 256;

/// Tells of a block that some member has it: which member, by the number of its life here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Replica {
    pub(super) member: u32,
    pub(super) tiers: u8,
    pub(super) parts: u8,
}

/// The few members that are known to have a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Replicas {
    count: u8,
    list: [Replica; REPLICAS_MAX],
}

impl Default for Replicas {
    fn default() -> Replicas {
        let nobody = Replica {
            member: u32::MAX,
            tiers: 0,
            parts: 0,
        };
        Replicas {
            count: 0,
            list: [nobody; REPLICAS_MAX],
        }
    }
}

impl Replicas {
    pub(super) fn as_slice(&self) -> &[Replica] {
        &self.list[..usize::from(self.count)]
    }
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }
    /// Adds one, or writes over what was known of the same member. `false`: there is no place for it.
    pub(super) fn set(&mut self, replica: Replica) -> bool {
        let count = usize::from(self.count);
        if let Some(known) = self.list[..count].iter_mut().find(|one| one.member == replica.member) {
            *known = replica;
            return true;
        }
        if count == REPLICAS_MAX {
            return false;
        }
        self.list[count] = replica;
        self.count += 1;
        true
    }
    pub(super) fn retain(&mut self, keep: impl Fn(&Replica) -> bool) {
        let mut left = Replicas::default();
        for replica in self.as_slice().iter().filter(|one| keep(one)) {
            left.set(*replica);
        }
        *self = left;
    }
}

/// What came of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Added,
    Removed,
    Same,
    /// As many others have the block as one entry names.
    NoPlace,
}

/// A map by blocks whose ids somebody else has chosen: the salt keeps them from choosing equal hashes.
#[derive(Clone, Debug)]
pub(super) struct Sliced<V> {
    slices: Vec<HashMap<BlockId, V, Salt>>,
    salt: Salt,
}

impl<V> Sliced<V> {
    pub(super) fn new(salt: u64) -> Sliced<V> {
        let salt = Salt(salt);
        Sliced {
            slices: (0..SLICES).map(|_| HashMap::with_hasher(salt)).collect(),
            salt,
        }
    }
    fn slice(&self, id: &BlockId) -> usize {
        (self.salt.hash_one(id) >> 32) as usize % SLICES
    }
    pub(super) fn find(&self, id: &BlockId) -> Option<&V> {
        self.slices[self.slice(id)].get(id)
    }
    /// The slice that an entry belongs into.
    pub(super) fn around(&mut self, id: &BlockId) -> &mut HashMap<BlockId, V, Salt> {
        let slice = self.slice(id);
        &mut self.slices[slice]
    }
    pub(super) fn nth(&mut self, slice: usize) -> &mut HashMap<BlockId, V, Salt> {
        &mut self.slices[slice]
    }
    pub(super) fn len(&self) -> usize {
        self.slices.iter().map(HashMap::len).sum()
    }
}

impl Sliced<Replicas> {
    pub(super) fn set(&mut self, id: BlockId, replica: Replica, lives: impl Fn(u32) -> bool) -> Change {
        let slice = self.around(&id);
        if replica.tiers == 0 {
            let Some(replicas) = slice.get_mut(&id) else {
                return Change::Same;
            };
            let before = replicas.count;
            replicas.retain(|one| one.member != replica.member);
            let removed = replicas.count < before;
            if replicas.is_empty() {
                slice.remove(&id);
            }
            return if removed { Change::Removed } else { Change::Same };
        }
        let replicas = slice.entry(id).or_default();
        let before = replicas.count;
        if !replicas.set(replica) {
            // Of those that are gone and not swept out yet none keeps a place.
            replicas.retain(|one| lives(one.member));
            return match replicas.set(replica) {
                true => Change::Added,
                false => Change::NoPlace,
            };
        }
        if replicas.count > before {
            Change::Added
        } else {
            Change::Same
        }
    }
}

/// Hashes ids of blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Salt(u64);

impl Salt {
    pub(super) fn of(salt: u64) -> Salt {
        Salt(salt)
    }
}

impl BuildHasher for Salt {
    type Hasher = Salted;
    fn build_hasher(&self) -> Salted {
        Salted(self.0)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Salted(u64);

impl Hasher for Salted {
    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u64(&mut self, word: u64) {
        self.0 = mix(self.0 ^ word);
    }
    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

/// Every bit of the answer depends on every bit of the question.
pub(super) fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word ^ word >> 32
}

/// A member as far as placing is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    /// A digest of name and epoch: the same everywhere.
    pub(super) digest: u64,
    /// The number of its life here; 0 is this agent.
    pub(super) member: u32,
}

/// The members that are told of a block, best first: those of the highest weights, which every member computes alike. When a member comes or goes only the blocks
/// that are placed with it move.
pub(super) fn placed<'a>(seats: impl IntoIterator<Item = &'a Seat>, id: &BlockId) -> [Option<Seat>; super::COPIES] {
    let mut best: [Option<(u64, Seat)>; super::COPIES] = [None; super::COPIES];
    for seat in seats {
        let mut next = Some((mix(seat.digest ^ mix(id.other_hash())), *seat));
        for place in &mut best {
            let better = match (&next, &place) {
                (Some((weight, seat)), Some((other, there))) => (weight, seat.digest) > (other, there.digest),
                (next, _) => next.is_some(),
            };
            if better {
                std::mem::swap(place, &mut next);
            }
        }
    }
    best.map(|place| place.map(|(_, seat)| seat))
}
