//! Open addressing over slots: ids are uniformly random, so their first bits are the hash, and an entry is four bytes.

/// Where the records of an arena are, by their hashes. The records themselves are the caller's.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// A slot in the lower bits, and above them bits of its hash, so that records are seldom read in vain.
    entries: Vec<u32>,
}

const SLOT_BITS: u32 = 27;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;
const EMPTY: u32 = u32::MAX;

/// Arenas have fewer records than this.
pub(super) const SLOTS_MAX: usize = SLOT_MASK as usize;

impl Table {
    /// For so many records: three quarters of the entries are used then.
    pub(super) fn new(records: usize) -> Table {
        assert!(records <= SLOTS_MAX, "more records than 27 bits can number");
        Table {
            entries: vec![EMPTY; records + records / 3 + 2],
        }
    }

    pub(super) fn bytes(&self) -> usize {
        4 * self.entries.len()
    }

    /// The slot with this hash that is the one meant.
    #[inline]
    pub(super) fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mut at = self.home(hash);
        loop {
            let entry = self.entries[at];
            if entry == EMPTY {
                return None;
            }
            if entry & !SLOT_MASK == tag(hash) && is_it(entry & SLOT_MASK) {
                return Some(entry & SLOT_MASK);
            }
            at = self.after(at);
        }
    }

    /// Adds a slot that is not there yet.
    #[inline]
    pub(super) fn insert(&mut self, hash: u64, slot: u32) {
        let mut at = self.home(hash);
        while self.entries[at] != EMPTY {
            at = self.after(at);
        }
        self.entries[at] = tag(hash) | slot;
    }

    /// Takes a slot out that is there. Later entries move up, so that no marks of what was there slow searches down.
    pub(super) fn remove(&mut self, hash: u64, slot: u32, hash_of: impl Fn(u32) -> u64) {
        let mut hole = self.home(hash);
        while self.entries[hole] != tag(hash) | slot {
            assert_ne!(self.entries[hole], EMPTY, "the slot is in the table");
            hole = self.after(hole);
        }
        let mut at = self.after(hole);
        while self.entries[at] != EMPTY {
            let home = self.home(hash_of(self.entries[at] & SLOT_MASK));
            // An entry may move up to the hole unless that is before its home, around the end or not.
            let stays = if hole < at {
                hole < home && home <= at
            } else {
                hole < home || home <= at
            };
            if !stays {
                self.entries[hole] = self.entries[at];
                hole = at;
            }
            at = self.after(at);
        }
        self.entries[hole] = EMPTY;
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.entries.len() as u128) >> 64) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.entries.len() { 0 } else { at + 1 }
    }
}

/// The lowest bits, as those above decide on the entry. Never all ones together with a slot: slots end before that.
fn tag(hash: u64) -> u32 {
    (hash as u32) << SLOT_BITS
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        // Few hashes, most of them at the ends, so that entries collide and wrap around.
        #[test]
        fn it_is_a_map(acts in proptest::collection::vec((any::<bool>(), 0u32..24), 1..400)) {
            let hash_of = |slot: u32| match slot % 4 { 0 => u64::MAX - u64::from(slot), 1 => u64::from(slot), _ => u64::MAX / 30 * u64::from(slot) };
            let mut table = Table::new(24);
            let mut model = HashMap::new();
            for (insert, slot) in acts {
                match (insert, model.contains_key(&slot)) {
                    (true, false) => { table.insert(hash_of(slot), slot); model.insert(slot, ()); }
                    (false, true) => { table.remove(hash_of(slot), slot, hash_of); model.remove(&slot); }
                    _ => {}
                }
                for slot in 0..24 {
                    prop_assert_eq!(table.find(hash_of(slot), |found| found == slot).is_some(), model.contains_key(&slot));
                }
            }
        }
    }
}
