//! The default: ranks blocks by the head starts that would have hit most lately.
//!
//! No fixed order is right for chats, documents and agents alike. Where the sessions under way are more than fit, those that are used again
//! while they are there should stay, and newcomers should pass through; where most blocks are used once, those that come back even after
//! they have left should stay; elsewhere LRU is hard to beat. A few [shadows](Shadow) try these out on names alone, and the store ranks by
//! the one with the most hits in the last few capacities. Changing from one to another moves no block: the queues are the same, and only
//! their head starts differ.

use super::super::{Links, Slot};
use super::ranked::{FREQUENCY_FIRST, HeadStarts, Memory, Ranked};
use super::shadow::Shadow;
use super::{Look, Policy, Touch};

/// What is tried: from none to so many that newcomers never stay, for blocks that came back while they were there and for those that came
/// back at all. The first is what a store begins with.
const TRIED: [HeadStarts; 6] = [
    HeadStarts {
        again_here: 2.0,
        again_ever: 0.0,
        each_doubling: 0.0,
    },
    HeadStarts {
        again_here: 0.0,
        again_ever: 0.0,
        each_doubling: 0.0,
    },
    HeadStarts {
        again_here: 8.0,
        again_ever: 0.0,
        each_doubling: 0.0,
    },
    HeadStarts {
        again_here: 0.0,
        again_ever: 0.0,
        each_doubling: 1.0,
    },
    HeadStarts {
        again_here: 0.0,
        again_ever: 4.0,
        each_doubling: 0.0,
    },
    HeadStarts {
        again_here: 0.0,
        again_ever: 0.0,
        each_doubling: FREQUENCY_FIRST,
    },
];

/// Hits count half after the store has been touched this many times its capacity.
const HALF_LIFE: f64 = 4.0;
/// A change must promise this many times the hits.
const WORTH_CHANGING: f64 = 1.02;
/// A shadow follows about so many blocks at most. More would cost memory and time, and say the same.
const SAMPLE: usize = 1 << 16;

/// Ranks blocks by the head starts that would have hit most lately.
#[derive(Clone, Debug)]
pub struct Adaptive {
    ranked: Ranked,
    memory: Memory,
    shadows: Vec<Shadow>,
    scores: [f64; TRIED.len()],
    chosen: usize,
    capacity: usize,
    /// Only blocks whose hashes have these bits clear are in the shadows.
    sampled: u64,
}

impl Adaptive {
    pub fn new(blocks: usize) -> Adaptive {
        let blocks = blocks.max(1);
        let shift = (0..)
            .find(|shift| blocks >> shift <= SAMPLE)
            .expect("some shift is enough");
        Adaptive {
            ranked: Ranked::new(),
            memory: Memory::new(blocks),
            shadows: TRIED
                .into_iter()
                .map(|starts| Shadow::new(starts, blocks, blocks >> shift))
                .collect(),
            scores: [0.0; TRIED.len()],
            chosen: 0,
            capacity: blocks,
            sampled: (1 << shift) - 1,
        }
    }

    fn choose(&mut self, touched: usize) {
        let fading = 0.5f64.powf(touched as f64 / (HALF_LIFE * self.capacity as f64));
        for (score, shadow) in self.scores.iter_mut().zip(&mut self.shadows) {
            *score = *score * fading + std::mem::take(&mut shadow.hits) as f64;
        }
        let mut best = 0;
        for (nth, score) in self.scores.iter().enumerate() {
            if *score > self.scores[best] {
                best = nth;
            }
        }
        if self.scores[best] > WORTH_CHANGING * self.scores[self.chosen] {
            self.chosen = best;
        }
    }
}

impl Policy for Adaptive {
    fn request(&mut self, links: &mut Links, touches: &[Touch]) {
        for touch in touches {
            let ever = self.memory.used(&touch.id);
            let stamp = self.ranked.touch(links, touch, ever);
            // These bits have no part in where a shadow keeps a name.
            if touch.id.other_hash() >> 32 & self.sampled == 0 {
                for shadow in &mut self.shadows {
                    shadow.touch(touch, ever, stamp);
                }
            }
        }
        for shadow in &mut self.shadows {
            shadow.settle();
        }
        self.choose(touches.len());
    }

    fn victim(&mut self, links: &mut Links, look: &dyn Look) -> Option<Slot> {
        let offsets = self.shadows[self.chosen].offsets;
        self.ranked.victim(links, look, &offsets)
    }

    fn forget(&mut self, links: &mut Links, slot: Slot) {
        self.ranked.forget(links, slot);
    }
}
