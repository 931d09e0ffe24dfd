//! The order in which blocks leave, for somebody who keeps the blocks himself.
//!
//! A [`BlockLine`] has names and a [policy](Kind), and no bytes: an engine that has memory of its own tells it what came, what was used and what must stay, and asks
//! who goes. Nothing follows anything here; that tails go before heads comes from the order in which a request touches them.

use super::index::PINNED;
use super::policy::{Kind, Policy, Touch};
use super::{BlockId, Entry, Full, Index, Links, Sealed, Slot};

/// Names of blocks in the order in which they leave.
#[derive(Debug)]
pub struct BlockLine {
    index: Index,
    links: Links,
    policy: Box<dyn Policy>,
    /// Blocks that may leave.
    idle: usize,
}

impl BlockLine {
    /// For so many blocks, and never more.
    pub fn new(kind: Kind, blocks: usize) -> BlockLine {
        BlockLine {
            index: Index::new(blocks),
            links: Links::new(blocks),
            policy: kind.policy(blocks),
            idle: 0,
        }
    }

    /// How many blocks there are.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Blocks that may leave.
    pub fn idle(&self) -> usize {
        self.idle
    }

    /// A block has come, and may leave. One that is there stays as it is.
    pub fn insert(&mut self, id: BlockId) -> Result<(), Full> {
        let (visible, new) = self.index.insert(&Sealed::name_only(id, 1), None, Entry::default())?;
        if new {
            self.idle += 1;
            self.policy
                .request(&mut self.links, &[touch(&self.index, visible.slot, false)]);
        }
        Ok(())
    }

    /// It must stay, or may leave again. `false` where it is not there, or was so already.
    pub fn pin(&mut self, id: &BlockId, pinned: bool) -> bool {
        let Some(slot) = self.index.find(id).filter(|slot| self.index.may_leave(*slot) == pinned) else {
            return false;
        };
        self.index.set_flag(slot, PINNED, pinned);
        match pinned {
            true => self.idle -= 1,
            false => self.idle += 1,
        }
        true
    }

    /// It is gone for a reason of its own, whatever kept it. `false` where it was not there.
    pub fn remove(&mut self, id: &BlockId) -> bool {
        let Some(slot) = self.index.find(id) else { return false };
        if self.index.may_leave(slot) {
            self.idle -= 1;
        }
        self.index.set_flag(slot, PINNED, false);
        self.policy.forget(&mut self.links, slot);
        self.index.remove(slot).expect("nothing follows anything in a line");
        true
    }

    /// A request goes through these blocks, named from its head to its tail. Those that are not here are passed over.
    pub fn request(&mut self, chain: &[BlockId], over: bool) {
        let slots = chain.iter().rev().filter_map(|id| self.index.find(id));
        let mut touches: Vec<Touch> = slots.map(|slot| touch(&self.index, slot, over)).collect();
        if let Some(last) = touches.first_mut() {
            last.last = true;
        }
        if !touches.is_empty() {
            self.policy.request(&mut self.links, &touches);
        }
    }

    /// So many blocks leave, and none of the `kept`; none at all where there are not as many.
    pub fn leave(&mut self, count: usize, kept: &[BlockId]) -> Option<Vec<BlockId>> {
        let kept: Vec<BlockId> = kept.iter().filter(|id| self.pin(id, true)).copied().collect();
        let gone = (self.idle >= count).then(|| self.victims(count));
        for id in kept {
            self.pin(&id, false);
        }
        gone
    }

    fn victims(&mut self, count: usize) -> Vec<BlockId> {
        let mut gone = Vec::with_capacity(count);
        while gone.len() < count
            && let Some(slot) = self.policy.victim(&mut self.links, &self.index)
        {
            gone.push(self.index.id(slot));
            self.index.remove(slot).expect("nothing follows anything in a line");
            self.idle -= 1;
        }
        gone
    }
}

fn touch(index: &Index, slot: Slot, over: bool) -> Touch {
    Touch {
        id: index.id(slot),
        slot,
        last: false,
        over,
        valued: false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn id(number: u64) -> BlockId {
        let mut seeded = crate::Seeded::new(number);
        let mut bytes = [0; 16];
        seeded.fill(&mut bytes);
        BlockId::from_bytes(bytes)
    }

    fn ids(numbers: &[u64]) -> Vec<BlockId> {
        numbers.iter().map(|number| id(*number)).collect()
    }

    #[test]
    fn tails_leave_before_heads_and_what_is_pinned_or_kept_stays() {
        let mut line = BlockLine::new(Kind::Lru, 8);
        for number in 0..6 {
            line.insert(id(number)).unwrap();
        }
        line.request(&ids(&[0, 1, 2, 3, 4, 5]), false);
        assert!(line.pin(&id(5), true) && !line.pin(&id(5), true));
        assert_eq!(line.leave(2, &ids(&[4])), Some(ids(&[3, 2])));
        assert_eq!(line.leave(3, &ids(&[4])), None, "only 0 and 1 may leave");
        assert_eq!((line.len(), line.idle()), (4, 3));
        assert!(line.remove(&id(5)) && !line.remove(&id(5)));
        assert_eq!(line.leave(3, &[]).map(|gone| gone.len()), Some(3));
        assert!(line.is_empty());
    }

    proptest! {
        #[test]
        fn every_policy_gives_as_many_as_are_asked_for_or_none(
            kind in 0usize..4,
            acts in proptest::collection::vec((0u8..6, 0u64..24, 0usize..6), 1..200),
        ) {
            let mut line = BlockLine::new(Kind::ALL[kind], 16);
            // By number: whether it is pinned.
            let mut model: BTreeMap<u64, bool> = BTreeMap::new();
            for (act, number, count) in acts {
                match act {
                    0 | 1 => match line.insert(id(number)) {
                        Ok(()) => { model.entry(number).or_insert(false); }
                        Err(_) => prop_assert_eq!(model.len(), 16),
                    },
                    2 => prop_assert_eq!(line.remove(&id(number)), model.remove(&number).is_some()),
                    3 => {
                        let changes = model.get(&number) == Some(&false);
                        prop_assert_eq!(line.pin(&id(number), true), changes);
                        if let Some(pinned) = model.get_mut(&number) { *pinned = true; }
                    }
                    4 => {
                        let changes = model.get(&number) == Some(&true);
                        prop_assert_eq!(line.pin(&id(number), false), changes);
                        if let Some(pinned) = model.get_mut(&number) { *pinned = false; }
                        line.request(&ids(&[number, number + 1, number + 2]), false);
                    }
                    _ => {
                        let may: Vec<u64> = model.iter().filter(|(n, pinned)| !**pinned && **n != number).map(|(n, _)| *n).collect();
                        match line.leave(count, &[id(number)]) {
                            Some(gone) => {
                                prop_assert_eq!(gone.len(), count);
                                for one in gone {
                                    let number = may.iter().find(|n| id(**n) == one);
                                    prop_assert!(number.is_some(), "it was not to leave");
                                    model.remove(number.unwrap());
                                }
                            }
                            None => prop_assert!(may.len() < count),
                        }
                    }
                }
                prop_assert_eq!(line.len(), model.len());
                prop_assert_eq!(line.idle(), model.values().filter(|pinned| !**pinned).count());
            }
        }
    }
}
