//! A trace, driven through an index and a policy: what a store of some capacity would have hit.
//!
//! A request's hits are its leading blocks that are there; then all its blocks are touched once, from the last to the first, and those that
//! were missing are inserted. Capacity is counted in blocks.
//!
//! ```
//! use weft_protocol::block::{policy::Kind, replay, trace};
//! let requests = trace::parse("timestamp_ms,input_tokens,output_tokens,block_ids\n0,32,4,0-1\n9,48,4,0-2\n")?;
//! let outcome = replay::replay(&requests, 8, Kind::Adaptive, None);
//! assert_eq!((outcome.reads, outcome.hits, outcome.written), (5, 2, 3));
//! # Ok::<(), trace::TraceError>(())
//! ```

use std::collections::{BinaryHeap, HashMap, HashSet};

use super::policy::{Kind, Policy, Touch};
use super::trace::{Request, id};
use super::{BlockId, Entry, Index, Links, Sealed, Slot};

/// What came of a replay, in blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub reads: u64,
    pub hits: u64,
    /// Blocks that were put into the store.
    pub written: u64,
    /// Of each request, how many leading blocks were there.
    pub hits_each: Vec<u32>,
}

impl Outcome {
    /// Hits among the blocks that were read, from 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.reads.max(1) as f64
    }

    fn count(&mut self, request: &Request, hits: usize) {
        self.reads += request.blocks.len() as u64;
        self.hits += hits as u64;
        self.hits_each.push(hits as u32);
    }
}

/// How many different blocks there are.
pub fn distinct(requests: &[Request]) -> usize {
    let all: HashSet<u64> = requests
        .iter()
        .flat_map(|request| request.blocks.iter().copied())
        .collect();
    all.len()
}

/// Replays a trace. With `comes_back`, the policy is told of each request whether its session will return.
pub fn replay(requests: &[Request], capacity: usize, kind: Kind, comes_back: Option<&[bool]>) -> Outcome {
    let longest = requests.iter().map(|request| request.blocks.len()).max().unwrap_or(0);
    let mut cache = Cache {
        index: Index::new(capacity + longest),
        links: Links::new(capacity + longest),
        policy: kind.policy(capacity),
        capacity,
        slots: Vec::new(),
        touches: Vec::new(),
    };
    let mut outcome = Outcome::default();
    for (nth, request) in requests.iter().enumerate() {
        let chain: Vec<BlockId> = request.blocks.iter().map(|block| id(*block)).collect();
        outcome.count(request, cache.index.prefix(&chain));
        let over = comes_back.is_some_and(|bits| !bits[nth]);
        outcome.written += cache.request(&chain, over);
    }
    outcome
}

struct Cache {
    index: Index,
    links: Links,
    policy: Box<dyn Policy>,
    capacity: usize,
    slots: Vec<Slot>,
    touches: Vec<Touch>,
}

impl Cache {
    fn request(&mut self, chain: &[BlockId], over: bool) -> u64 {
        let before = self.index.len();
        self.slots.clear();
        let mut parent = None;
        for id in chain {
            let sealed = Sealed::name_only(*id, 0);
            let inserted = self.index.insert(&sealed, parent, Entry::default());
            let slot = inserted.expect("there is room for the longest request").0.slot;
            self.slots.push(slot);
            parent = Some(slot);
        }
        let written = self.index.len() - before;
        touches(&self.index, &self.slots, over, &mut self.touches);
        self.policy.request(&mut self.links, &self.touches);
        while self.index.len() > self.capacity {
            let slot = self.policy.victim(&mut self.links, &self.index);
            let slot = slot.expect("where nothing is held some leaf may leave");
            self.index.remove(slot).expect("policies name leaves");
        }
        written as u64
    }
}

/// What a policy is told of a request, tail first. Of a session that is over, only blocks that no other chain goes through are over too.
pub(super) fn touches(index: &Index, slots: &[Slot], over: bool, touches: &mut Vec<Touch>) {
    touches.clear();
    let mut only_here = over;
    for (behind, slot) in slots.iter().rev().enumerate() {
        let children = index.entry(*slot).children;
        only_here &= children as usize <= usize::from(behind > 0);
        touches.push(Touch {
            id: index.id(*slot),
            slot: *slot,
            last: behind == 0 && children == 0,
            over: only_here,
            valued: false,
        });
    }
}

/// The best that any policy could do that knew the future: keeps the blocks with the nearest next use, lets deeper ones leave first at equal
/// distance, and does not store what will not be used again.
pub fn optimum(requests: &[Request], capacity: usize) -> Outcome {
    const NEVER: usize = usize::MAX;
    let mut next_use = HashMap::new();
    let mut next: Vec<Vec<usize>> = Vec::with_capacity(requests.len());
    for (at, request) in requests.iter().enumerate().rev() {
        next.push(
            request
                .blocks
                .iter()
                .map(|block| next_use.insert(*block, at).unwrap_or(NEVER))
                .collect(),
        );
    }
    next.reverse();
    let mut there: HashMap<u64, (usize, usize)> = HashMap::new();
    let mut farthest = BinaryHeap::new();
    let mut outcome = Outcome::default();
    for (request, next) in requests.iter().zip(next) {
        let hits = request
            .blocks
            .iter()
            .take_while(|block| there.contains_key(block))
            .count();
        outcome.count(request, hits);
        let mut fresh: HashSet<u64> = HashSet::new();
        for (depth, (block, next)) in request.blocks.iter().zip(next).enumerate() {
            if next == NEVER {
                there.remove(block);
            } else {
                if there.insert(*block, (next, depth)).is_none() {
                    fresh.insert(*block);
                }
                farthest.push((next, depth, *block));
            }
        }
        while there.len() > capacity {
            let (next, depth, block) = farthest.pop().expect("every block that is there is in the heap");
            if there.get(&block) == Some(&(next, depth)) {
                there.remove(&block);
                fresh.remove(&block);
            }
        }
        outcome.written += fresh.len() as u64;
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::Seeded;

    /// Sessions of random length over a common beginning, taking turns.
    pub(crate) fn sessions(seed: u64, count: usize) -> Vec<Request> {
        let mut seeded = Seeded::new(seed);
        let mut open: Vec<Vec<u64>> = Vec::new();
        let mut unused = 4;
        let mut requests = Vec::new();
        for at in 0..count {
            if open.len() < 3 || seeded.chance(0.2) {
                open.push((0..4).collect());
            }
            let nth = seeded.below(open.len() as u64) as usize;
            // The last block was not full, and is another one now.
            open[nth].pop();
            for _ in 0..1 + seeded.below(6) {
                open[nth].push(unused);
                unused += 1;
            }
            let blocks = open[nth].clone();
            requests.push(Request {
                at_ms: at as u64,
                blocks,
                ..Request::default()
            });
            if seeded.chance(0.25) {
                open.swap_remove(nth);
            }
        }
        requests
    }

    /// LRU as it is written on a napkin, touched from the last block to the first.
    fn napkin_lru(requests: &[Request], capacity: usize) -> u64 {
        let mut stamps: BTreeMap<u64, u64> = BTreeMap::new();
        let (mut clock, mut hits) = (0, 0);
        for request in requests {
            hits += request
                .blocks
                .iter()
                .take_while(|block| stamps.contains_key(block))
                .count() as u64;
            for block in request.blocks.iter().rev() {
                clock += 1;
                stamps.insert(*block, clock);
            }
            while stamps.len() > capacity {
                let oldest = *stamps.iter().min_by_key(|(_, stamp)| **stamp).unwrap().0;
                stamps.remove(&oldest);
            }
        }
        hits
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn lru_is_lru_and_nothing_beats_the_optimum(seed in any::<u64>(), capacity in 1usize..60) {
            let requests = sessions(seed, 120);
            let best = optimum(&requests, capacity);
            prop_assert!(best.written <= distinct(&requests) as u64 * 120);
            let lru = replay(&requests, capacity, Kind::Lru, None);
            prop_assert_eq!(lru.hits, napkin_lru(&requests, capacity));
            let bits = super::super::trace::comes_back(&requests);
            for kind in Kind::ALL {
                for hints in [None, Some(&bits[..])] {
                    let outcome = replay(&requests, capacity, kind, hints);
                    prop_assert!(outcome.hits <= best.hits, "{} hit {} of {}", kind, outcome.hits, best.hits);
                    prop_assert_eq!(outcome.reads, best.reads);
                    prop_assert_eq!(outcome.hits_each.iter().map(|hits| u64::from(*hits)).sum::<u64>(), outcome.hits);
                    prop_assert_eq!(&replay(&requests, capacity, kind, hints), &outcome, "replays repeat");
                }
            }
        }
    }

    #[test]
    fn a_store_that_holds_everything_hits_what_was_there_before() {
        let requests = sessions(7, 200);
        let all = distinct(&requests);
        let hits: Vec<u64> = Kind::ALL.map(|kind| replay(&requests, all, kind, None).hits).to_vec();
        let most = optimum(&requests, all).hits;
        assert_eq!(hits, [most; 4]);
        assert_eq!(replay(&requests, all, Kind::Lru, None).written, all as u64);
    }
}
