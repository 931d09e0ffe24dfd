//! Sets of ranks, each kept once and named by a number, so that contents are small and compare at once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::{Content, Holding};
use crate::units::Rank;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SetId(u32);

#[derive(Debug)]
pub(super) struct Sets {
    ranks: u32,
    table: Vec<Box<[u64]>>,
    index: HashMap<Box<[u64]>, SetId>,
    /// Programs meet the same pairs again and again.
    unions: HashMap<(SetId, SetId), SetId>,
}

impl Sets {
    /// The set of one rank is numbered as the rank, and the set of all comes after those.
    pub(super) fn new(ranks: u32) -> Sets {
        let mut sets = Sets {
            ranks,
            table: Vec::new(),
            index: HashMap::new(),
            unions: HashMap::new(),
        };
        let empty = vec![0; (ranks as usize).div_ceil(64)];
        let mut all = empty.clone();
        for rank in 0..ranks as usize {
            let mut one = empty.clone();
            one[rank / 64] |= 1 << (rank % 64);
            all[rank / 64] |= 1 << (rank % 64);
            sets.keep(one.into());
        }
        sets.keep(all.into());
        sets
    }

    pub(super) fn one(&self, rank: Rank) -> SetId {
        SetId(rank.0)
    }

    pub(super) fn all(&self) -> SetId {
        // Of one rank, both are the same set.
        SetId(if self.ranks == 1 { 0 } else { self.ranks })
    }

    pub(super) fn union(&mut self, a: SetId, b: SetId) -> SetId {
        let key = (a.min(b), a.max(b));
        if let Some(&known) = self.unions.get(&key) {
            return known;
        }
        let (a, b) = (&self.table[a.0 as usize], &self.table[b.0 as usize]);
        let union: Box<[u64]> = a.iter().zip(b).map(|(a, b)| a | b).collect();
        let union = self.keep(union);
        self.unions.insert(key, union);
        union
    }

    /// The union of two sets with no common rank, or else the first rank that they have in common.
    pub(super) fn disjoint_union(&mut self, a: SetId, b: SetId) -> Result<SetId, Rank> {
        if !self.unions.contains_key(&(a.min(b), a.max(b))) {
            let words = self.table[a.0 as usize].iter().zip(&self.table[b.0 as usize]);
            let common = words.enumerate().find(|(_, (a, b))| *a & *b != 0);
            if let Some((word, (a, b))) = common {
                return Err(Rank((word * 64) as u32 + (a & b).trailing_zeros()));
            }
        }
        Ok(self.union(a, b))
    }

    pub(super) fn missing(&self, set: SetId) -> Vec<Rank> {
        let held = self.members(set);
        (0..self.ranks).map(Rank).filter(|rank| !held.contains(rank)).collect()
    }

    pub(super) fn describe(&self, content: Content) -> Holding {
        Holding {
            datum: content.datum,
            from: self.members(content.from),
        }
    }

    fn members(&self, set: SetId) -> Vec<Rank> {
        let words = &self.table[set.0 as usize];
        let holds = |rank: u32| words[rank as usize / 64] >> (rank % 64) & 1 == 1;
        (0..self.ranks).filter(|&rank| holds(rank)).map(Rank).collect()
    }

    fn keep(&mut self, set: Box<[u64]>) -> SetId {
        match self.index.entry(set) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(vacant) => {
                let id = SetId(self.table.len() as u32);
                self.table.push(vacant.key().clone());
                *vacant.insert(id)
            }
        }
    }
}

impl SetId {
    fn min(self, other: SetId) -> SetId {
        SetId(self.0.min(other.0))
    }
    fn max(self, other: SetId) -> SetId {
        SetId(self.0.max(other.0))
    }
}
