//! Which slots are free: given out in runs, and taken back once nobody reads them.

use std::collections::{HashMap, HashSet};

/// The slots of a tier, one bit each.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    taken: Vec<u64>,
    total: u32,
    free: u32,
    /// Where the next free one is looked for: what is put together lies together.
    cursor: u32,
    readers: HashMap<u32, u32>,
    /// Free once their readers are done.
    leaving: HashSet<u32>,
}

impl Slots {
    pub(super) fn new(total: u32) -> Slots {
        Slots {
            taken: vec![0; (total as usize).div_ceil(64)],
            total,
            free: total,
            cursor: 0,
            readers: HashMap::new(),
            leaving: HashSet::new(),
        }
    }

    pub(super) fn free(&self) -> u32 {
        self.free
    }

    pub(super) fn take(&mut self) -> Option<u32> {
        if self.free == 0 {
            return None;
        }
        let words = self.taken.len();
        let first = self.cursor as usize / 64;
        for nth in 0..=words {
            let at = (first + nth) % words;
            let mut open = !self.taken[at];
            if nth == 0 {
                open &= u64::MAX << (self.cursor % 64);
            }
            let slot = at as u32 * 64 + open.trailing_zeros();
            if open != 0 && slot < self.total {
                self.claim(slot);
                self.cursor = if slot + 1 == self.total { 0 } else { slot + 1 };
                return Some(slot);
            }
        }
        None
    }

    /// Takes a slot that is known to be in use, or is never to be given out.
    pub(super) fn claim(&mut self, slot: u32) {
        let bit = 1 << (slot % 64);
        let word = &mut self.taken[slot as usize / 64];
        if *word & bit == 0 {
            *word |= bit;
            self.free -= 1;
        }
    }

    /// The slot is nobody's any more, once whoever reads it is done.
    pub(super) fn release(&mut self, slot: u32) {
        if self.readers.contains_key(&slot) {
            self.leaving.insert(slot);
        } else {
            self.put_back(slot);
        }
    }

    pub(super) fn begin_reading(&mut self, slot: u32) {
        *self.readers.entry(slot).or_default() += 1;
    }

    pub(super) fn end_reading(&mut self, slot: u32) {
        let Some(count) = self.readers.get_mut(&slot) else {
            return;
        };
        *count -= 1;
        if *count == 0 {
            self.readers.remove(&slot);
            if self.leaving.remove(&slot) {
                self.put_back(slot);
            }
        }
    }

    fn put_back(&mut self, slot: u32) {
        let bit = 1 << (slot % 64);
        let word = &mut self.taken[slot as usize / 64];
        debug_assert!(*word & bit != 0, "slot {slot} is given back once");
        if *word & bit != 0 {
            *word &= !bit;
            self.free += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_taken_together_lies_together() {
        let mut slots = Slots::new(100);
        let run: Vec<u32> = (0..70).filter_map(|_| slots.take()).collect();
        assert_eq!(run, (0..70).collect::<Vec<u32>>());
        (0..10).for_each(|slot| slots.release(slot));
        assert_eq!(slots.take(), Some(70), "on from there, as long as there is room");
        let rest: Vec<u32> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!(rest, (71..100).chain(0..10).collect::<Vec<u32>>());
        assert_eq!(slots.free(), 0);
    }

    proptest! {
        #[test]
        fn no_slot_is_given_twice_nor_while_it_is_read(total in 1u32..200, acts in proptest::collection::vec((0u8..4, any::<u32>()), 1..400)) {
            let mut slots = Slots::new(total);
            let mut mine: Vec<u32> = Vec::new();
            let mut read: Vec<u32> = Vec::new();
            for (act, which) in acts {
                match act {
                    0 => if let Some(slot) = slots.take() {
                        prop_assert!(slot < total && !mine.contains(&slot) && !read.contains(&slot));
                        mine.push(slot);
                    } else {
                        prop_assert!((0..total).all(|slot| mine.contains(&slot) || read.contains(&slot)));
                    },
                    1 if !mine.is_empty() => slots.release(mine.swap_remove(which as usize % mine.len())),
                    2 if !mine.is_empty() => {
                        let slot = mine[which as usize % mine.len()];
                        slots.begin_reading(slot);
                        read.push(slot);
                    }
                    3 if !read.is_empty() => slots.end_reading(read.swap_remove(which as usize % read.len())),
                    _ => {}
                }
                let kept = read.iter().copied().filter(|slot| !mine.contains(slot)).collect::<HashSet<u32>>();
                prop_assert_eq!(slots.free() as usize, total as usize - mine.len() - kept.len());
            }
        }
    }
}
