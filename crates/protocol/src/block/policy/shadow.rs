//! A cache of names alone: what a store of the same capacity would have hit, had it ranked blocks by other head starts.

use super::super::links::{Links, Queues};
use super::super::table::Table;
use super::super::{BlockId, Slot};
use super::Touch;
use super::ranked::{HeadStarts, QUEUES, lowest, queue_of};

/// Blocks of a long request that are kept until it is over even in the smallest store, so that none leaves before it was looked at.
const SLACK: usize = 1024;

/// Follows a sample of the blocks. Ranking keeps prefixes whole, so that a block that is there is a hit whatever came before it, and a sample
/// of blocks hits as often as all of them.
#[derive(Clone, Debug)]
pub(super) struct Shadow {
    pub(super) offsets: [i64; QUEUES],
    pub(super) hits: u64,
    blocks: usize,
    /// Between the ends of two requests it may hold so many.
    most: usize,
    names: Vec<u64>,
    free: Vec<u32>,
    table: Table,
    links: Links,
    queues: Queues<QUEUES>,
}

impl Shadow {
    /// Of a store of `capacity` blocks, of which `blocks` are in the sample.
    pub(super) fn new(starts: HeadStarts, capacity: usize, blocks: usize) -> Shadow {
        let most = 2 * blocks + SLACK;
        Shadow {
            offsets: starts.offsets(capacity),
            hits: 0,
            blocks,
            most,
            names: Vec::new(),
            free: Vec::new(),
            table: Table::new(most),
            links: Links::new(most),
            queues: Queues::new(),
        }
    }

    /// Touches a block at the time `stamp` of the store.
    pub(super) fn touch(&mut self, touch: &Touch, ever: u8, stamp: u64) {
        let hash = touch.id.hash();
        let there = self.find(&touch.id);
        let (slot, here) = match there {
            Some(slot) => {
                self.hits += 1;
                let uses = self.queues.remove_counted(&mut self.links, slot).unwrap_or(0);
                (slot, uses.saturating_add(1))
            }
            None => {
                if self.queues.total() == self.most {
                    self.shrink(self.most - 1);
                }
                let slot = match self.free.pop() {
                    Some(slot) => {
                        self.names[slot as usize] = hash;
                        slot
                    }
                    None => {
                        self.names.push(hash);
                        self.names.len() as u32 - 1
                    }
                };
                self.table.insert(hash, slot);
                (Slot::new(slot), 1)
            }
        };
        let queue = queue_of(touch, here, ever);
        self.queues.push(&mut self.links, queue, slot, stamp, here);
    }

    /// The request is over: what does not fit leaves.
    pub(super) fn settle(&mut self) {
        self.shrink(self.blocks);
    }

    fn find(&self, id: &BlockId) -> Option<Slot> {
        // 64 bits are enough to guess by.
        let same = |slot: u32| self.names[slot as usize] == id.hash();
        self.table.find(id.hash(), same).map(Slot::new)
    }

    fn shrink(&mut self, blocks: usize) {
        while self.queues.total() > blocks {
            let Some(slot) = lowest(&self.queues, &self.offsets).and_then(|queue| self.queues.first(queue)) else {
                return;
            };
            self.queues.remove(&mut self.links, slot);
            let names = &self.names;
            self.table
                .remove(names[slot.at()], slot.number(), |slot| names[slot as usize]);
            self.free.push(slot.number());
        }
    }
}
