//! ARC (Megiddo and Modha, 2003): blocks used once and blocks used again, and a border between them that moves with what was missed.

use std::collections::{HashMap, VecDeque};

use super::super::links::{Links, Queues};
use super::super::{BlockId, Slot};
use super::{Look, Policy, Touch};

const ONCE: usize = 0;
const AGAIN: usize = 1;
/// Blocks of sessions that are over; not part of the algorithm.
const OVER: usize = 2;

/// Keeps what was used once and what was used again apart, each by recency.
#[derive(Clone, Debug)]
pub struct Arc {
    queues: Queues<3>,
    clock: u64,
    capacity: usize,
    /// How many blocks that were used once should be there.
    border: usize,
    left: [Ghosts; 2],
}

/// Names of blocks that have left a queue lately, in the order in which they left.
#[derive(Clone, Debug, Default)]
struct Ghosts {
    order: VecDeque<(BlockId, u64)>,
    /// When each left: entries of the order that say otherwise are stale.
    there: HashMap<BlockId, u64>,
}

impl Ghosts {
    fn push(&mut self, id: BlockId, stamp: u64) {
        self.order.push_back((id, stamp));
        self.there.insert(id, stamp);
    }

    fn take(&mut self, id: &BlockId) -> bool {
        self.there.remove(id).is_some()
    }

    fn trim(&mut self, most: usize) {
        while self.there.len() > most || self.order.len() > 2 * most + 64 {
            let Some((id, stamp)) = self.order.pop_front() else {
                return;
            };
            if self.there.get(&id) == Some(&stamp) {
                self.there.remove(&id);
            }
        }
    }

    fn len(&self) -> usize {
        self.there.len()
    }
}

impl Arc {
    pub fn new(blocks: usize) -> Arc {
        Arc {
            queues: Queues::new(),
            clock: 0,
            capacity: blocks.max(1),
            border: 0,
            left: Default::default(),
        }
    }

    fn touch(&mut self, links: &mut Links, touch: &Touch) {
        self.clock += 1;
        let there = self.queues.remove(links, touch.slot).is_some();
        let [once, again] = [self.left[ONCE].len().max(1), self.left[AGAIN].len().max(1)];
        let queue = if there {
            AGAIN
        } else if self.left[ONCE].take(&touch.id) {
            self.border = (self.border + (again / once).max(1)).min(self.capacity);
            AGAIN
        } else if self.left[AGAIN].take(&touch.id) {
            self.border = self.border.saturating_sub((once / again).max(1));
            AGAIN
        } else {
            ONCE
        };
        let queue = match (touch.valued, touch.over) {
            (true, _) => AGAIN,
            (false, true) => OVER,
            _ => queue,
        };
        self.queues.push(links, queue, touch.slot, self.clock, 1);
    }
}

impl Policy for Arc {
    fn request(&mut self, links: &mut Links, touches: &[Touch]) {
        for touch in touches {
            self.touch(links, touch);
        }
    }

    fn victim(&mut self, links: &mut Links, look: &dyn Look) -> Option<Slot> {
        let mut aside = Vec::new();
        let mut found = None;
        while self.queues.total() > 0 {
            let [once, again, over] = [ONCE, AGAIN, OVER].map(|queue| self.queues.length(queue));
            let queue = match () {
                () if over > 0 => OVER,
                () if once > 0 && (once > self.border || again == 0) => ONCE,
                () if again > 0 => AGAIN,
                () => ONCE,
            };
            let slot = self.queues.first(queue)?;
            self.queues.remove(links, slot);
            if look.may_leave(slot) {
                found = Some((queue, slot));
                break;
            }
            aside.push(slot);
        }
        // What comes after these, or whoever holds them, wants them still.
        for slot in aside {
            self.queues.push(links, AGAIN, slot, self.clock, 1);
        }
        let (queue, slot) = found?;
        if let Some(ghosts) = self.left.get_mut(queue) {
            ghosts.push(look.id(slot), self.clock);
        }
        self.left[ONCE].trim(self.capacity.saturating_sub(self.queues.length(ONCE)));
        let rest = (2 * self.capacity).saturating_sub(self.queues.total() + self.left[ONCE].len());
        self.left[AGAIN].trim(rest);
        Some(slot)
    }

    fn forget(&mut self, links: &mut Links, slot: Slot) {
        self.queues.remove(links, slot);
    }
}
