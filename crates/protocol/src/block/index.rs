//! Where blocks are: the longest prefix of a chain that is there, with tier, holder and size; and which blocks nothing follows.
//!
//! Records of fixed size in one arena, linked by 32-bit numbers, found through a [`Table`]. Nothing is allocated for a block, and the arena
//! is made once, so that a store that is full stays as large as it was.

use thiserror::Error;

use super::table::{SLOTS_MAX, Table};
use super::{BlockId, Sealed, Shape, Visible};

/// The place of a block's record. It is another block's once this one has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(u32);

impl Slot {
    pub(super) fn new(number: u32) -> Slot {
        Slot(number)
    }

    pub(super) fn number(self) -> u32 {
        self.0
    }

    pub(super) fn at(self) -> usize {
        self.0 as usize
    }
}

/// What an index says of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    pub bytes: u32,
    /// Which of the store's tenants it belongs to.
    pub tenant: u16,
    /// Which agent has it, by the directory's number.
    pub holder: u16,
    /// The fastest tier that has it.
    pub tier: u8,
    /// Which parts there are, as bits.
    pub parts: u8,
    /// How many blocks that are there come right after it. A leaf has none.
    pub children: u32,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    id: [u8; 16],
    parent: u32,
    children: u32,
    bytes: u32,
    tenant: u16,
    holder: u16,
    tier: u8,
    parts: u8,
    flags: u8,
}

const NONE: u32 = u32::MAX;
pub(super) const PINNED: u8 = 1;
pub(super) const HELD: u8 = 2;
/// Its bytes are gone, but something keeps it in the index: it is not found.
const LOST: u8 = 4;
const FREE: u8 = 0x80;

/// The index is as full as it was made to be: evict first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the index has room for {blocks} blocks, and has them")]
pub struct Full {
    pub blocks: usize,
}

/// Blocks that are there come after this one, so it stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the block {id} is followed by {children} blocks, which could not be found without it")]
pub struct NotALeaf {
    pub id: BlockId,
    pub children: u32,
}

#[derive(Clone, Debug)]
pub struct Index {
    records: Vec<Record>,
    table: Table,
    /// Records of blocks that have left, by their `parent`.
    free: u32,
    length: usize,
    most: usize,
}

impl Index {
    /// For so many blocks, and never more.
    ///
    /// # Panics
    /// For more than 134 million blocks, whose slots 27 bits could not number.
    pub fn new(blocks: usize) -> Index {
        assert!(blocks <= SLOTS_MAX, "an index has at most {SLOTS_MAX} blocks");
        Index {
            records: Vec::with_capacity(blocks),
            table: Table::new(blocks),
            free: NONE,
            length: 0,
            most: blocks,
        }
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// How many blocks it was made for.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Memory that it takes, however full.
    pub fn memory_bytes(&self) -> usize {
        self.records.capacity() * size_of::<Record>() + self.table.bytes()
    }

    #[inline]
    pub fn find(&self, id: &BlockId) -> Option<Slot> {
        let there = |slot: &Slot| self.records[slot.at()].flags & LOST == 0;
        self.find_any(id).filter(there)
    }

    /// Also one whose bytes are lost.
    #[inline]
    fn find_any(&self, id: &BlockId) -> Option<Slot> {
        let same = |slot: u32| self.records[slot as usize].id == *id.as_bytes();
        self.table.find(id.hash(), same).map(Slot)
    }

    pub fn id(&self, slot: Slot) -> BlockId {
        BlockId::from_bytes(self.records[slot.at()].id)
    }

    pub fn entry(&self, slot: Slot) -> Entry {
        let record = &self.records[slot.at()];
        Entry {
            bytes: record.bytes,
            tenant: record.tenant,
            holder: record.holder,
            tier: record.tier,
            parts: record.parts,
            children: record.children,
        }
    }

    pub fn parent(&self, slot: Slot) -> Option<Slot> {
        let parent = self.records[slot.at()].parent;
        (parent != NONE).then_some(Slot(parent))
    }

    /// How many of these blocks, from the first on, are there, whatever parts they have.
    pub fn prefix(&self, chain: &[BlockId]) -> usize {
        chain.iter().take_while(|id| self.find(id).is_some()).count()
    }

    /// How many of these blocks, from the first on, are a hit: every part of the shape is there where its rule wants it.
    pub fn hit(&self, chain: &[BlockId], shape: &Shape) -> usize {
        let parts = |id| self.find(id).map_or(0, |slot| self.records[slot.at()].parts);
        shape.hit(chain.iter().map(parts))
    }

    /// Makes a sealed block visible, after `parent` where that is there. One that is there already gets the parts that it had not, and the
    /// answer says so.
    pub fn insert(&mut self, block: &Sealed, parent: Option<Slot>, entry: Entry) -> Result<(Visible, bool), Full> {
        let id = block.id();
        if let Some(slot) = self.find_any(&id) {
            let record = &mut self.records[slot.at()];
            if record.flags & LOST != 0 {
                record.flags &= !LOST;
                (record.parts, record.bytes, record.tier) = (block.parts(), block.bytes(), entry.tier);
            } else if block.parts() & !record.parts != 0 {
                record.parts |= block.parts();
                record.bytes = record.bytes.max(block.bytes());
            }
            return Ok((Visible { id, slot }, false));
        }
        if self.length == self.most {
            return Err(Full { blocks: self.most });
        }
        let record = Record {
            id: *id.as_bytes(),
            parent: parent.map_or(NONE, Slot::number),
            children: 0,
            bytes: block.bytes(),
            tenant: entry.tenant,
            holder: entry.holder,
            tier: entry.tier,
            parts: block.parts(),
            flags: 0,
        };
        let slot = match self.free {
            NONE => {
                self.records.push(record);
                self.records.len() as u32 - 1
            }
            slot => {
                self.free = self.records[slot as usize].parent;
                self.records[slot as usize] = record;
                slot
            }
        };
        if let Some(parent) = parent {
            self.records[parent.at()].children += 1;
        }
        self.table.insert(id.hash(), slot);
        self.length += 1;
        Ok((Visible { id, slot: Slot(slot) }, true))
    }

    /// Takes a leaf out. Its parent may be one afterwards.
    pub fn remove(&mut self, slot: Slot) -> Result<Entry, NotALeaf> {
        let (id, entry) = (self.id(slot), self.entry(slot));
        assert_eq!(self.records[slot.at()].flags & FREE, 0, "nothing is in the slot");
        if entry.children > 0 {
            let children = entry.children;
            return Err(NotALeaf { id, children });
        }
        let records = &self.records;
        let hash_of = |slot: u32| BlockId::from_bytes(records[slot as usize].id).hash();
        self.table.remove(id.hash(), slot.0, hash_of);
        let parent = self.records[slot.at()].parent;
        if parent != NONE {
            self.records[parent as usize].children -= 1;
        }
        let record = &mut self.records[slot.at()];
        record.flags = FREE;
        record.parent = std::mem::replace(&mut self.free, slot.0);
        self.length -= 1;
        Ok(entry)
    }

    /// The block's bytes are gone: it is not found from now on, until it is inserted again. Its record stays until nothing keeps it.
    pub(super) fn lose(&mut self, slot: Slot) {
        self.set_flag(slot, LOST, true);
    }

    /// The block is in another tier now.
    pub fn set_tier(&mut self, slot: Slot, tier: u8) {
        self.records[slot.at()].tier = tier;
    }

    pub(super) fn set_flag(&mut self, slot: Slot, flag: u8, on: bool) {
        let flags = &mut self.records[slot.at()].flags;
        *flags = if on { *flags | flag } else { *flags & !flag };
    }

    /// Whether nothing keeps the block from leaving.
    pub fn may_leave(&self, slot: Slot) -> bool {
        let record = &self.records[slot.at()];
        record.children == 0 && record.flags & (PINNED | HELD) == 0
    }

    /// The slots of all blocks, in no order that means anything.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        let taken = |(_, record): &(usize, &Record)| record.flags & FREE == 0;
        self.records
            .iter()
            .enumerate()
            .filter(taken)
            .map(|(at, _)| Slot(at as u32))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::block::{HitRule, Open, Part};

    fn id(number: u64) -> BlockId {
        let mut seeded = crate::Seeded::new(number);
        let mut bytes = [0; 16];
        seeded.fill(&mut bytes);
        BlockId::from_bytes(bytes)
    }

    #[test]
    fn records_are_small() {
        assert_eq!(size_of::<Record>(), 36);
        let index = Index::new(1_000_000);
        assert!(index.memory_bytes() + 1_000_000 * crate::block::Links::BYTES_EACH <= 64_000_000);
    }

    #[test]
    fn parts_that_come_later_join_the_block() {
        let shape = Shape::new(vec![
            Part::new("attention", 1, HitRule::AllBlocks),
            Part::new("state", 1, HitRule::TrailingBlocks(1)),
        ])
        .unwrap();
        let seal = |parts| {
            let mut open = Open::with_parts(id(1), &shape, parts);
            for part in 0..2 {
                let _ = open.fill(part, 0, 1, 0);
            }
            open.seal().unwrap()
        };
        let mut index = Index::new(1);
        assert!(index.insert(&seal(0b01), None, Entry::default()).unwrap().1);
        assert_eq!((index.prefix(&[id(1)]), index.hit(&[id(1)], &shape)), (1, 0));
        assert!(!index.insert(&seal(0b10), None, Entry::default()).unwrap().1);
        assert_eq!(index.hit(&[id(1)], &shape), 1);
        let full = index.insert(&Sealed::name_only(id(2), 1), None, Entry::default());
        assert_eq!(full.unwrap_err(), Full { blocks: 1 });
    }

    proptest! {
        #[test]
        fn it_agrees_with_a_map_and_counts_children(acts in proptest::collection::vec((0u8..3, 0u64..40), 1..300)) {
            // Block n comes after block n / 2, as in a heap.
            let mut index = Index::new(24);
            let mut model: BTreeMap<u64, Slot> = BTreeMap::new();
            for (act, number) in acts {
                let children = |model: &BTreeMap<u64, Slot>, parent: u64| model.keys().filter(|n| **n > 1 && **n / 2 == parent).count();
                match (act, model.get(&number).copied()) {
                    (0, Some(slot)) => match index.remove(slot) {
                        Ok(_) => { prop_assert_eq!(children(&model, number), 0); model.remove(&number); }
                        Err(refused) => prop_assert_eq!(refused.children as usize, children(&model, number)),
                    },
                    (_, there) => {
                        let parent = if number > 1 { model.get(&(number / 2)).copied() } else { None };
                        if number > 1 && parent.is_none() { continue }
                        match index.insert(&Sealed::name_only(id(number), 7), parent, Entry::default()) {
                            Ok((visible, new)) => { prop_assert_eq!(new, there.is_none()); model.insert(number, visible.slot); }
                            Err(_) => prop_assert_eq!(model.len(), 24),
                        }
                    }
                }
                prop_assert_eq!(index.len(), model.len());
                for number in 0..40 {
                    prop_assert_eq!(index.find(&id(number)), model.get(&number).copied());
                }
                for (number, slot) in &model {
                    let count = model.keys().filter(|n| **n > 1 && **n / 2 == *number).count();
                    prop_assert_eq!(index.entry(*slot).children as usize, count);
                }
                let mut slots: Vec<Slot> = model.values().copied().collect();
                slots.sort();
                prop_assert_eq!(index.slots().collect::<Vec<_>>(), slots);
            }
        }
    }
}
