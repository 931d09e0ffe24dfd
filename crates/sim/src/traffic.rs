//! What networks of flows and of packets have in common for whoever runs something on them: traffic, faults, and what is told.

use weft_model::fabric::LinkId;
use weft_plan::{Bytes, Picos, Rank};

pub use crate::execution::{Eager, MessageSpan, StepSpan};

/// A link that has only a part of its bandwidth for a while; none where it is down.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkFault {
    pub link: LinkId,
    pub from: Picos,
    pub until: Picos,
    /// From zero to one.
    pub left: f64,
}

/// Bytes from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    pub from: Rank,
    pub to: Rank,
    pub bytes: Bytes,
    pub start: Picos,
}

impl Transfer {
    pub(crate) fn ends(&self) -> [Rank; 2] {
        [self.from, self.to]
    }
}

/// A link, or a bundle of parallel links, and how busy it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Hot {
    pub name: String,
    /// The first of its links.
    pub link: LinkId,
    /// Of its capacity over the whole time, from zero to one.
    pub utilisation: f64,
    pub carried: Bytes,
    /// How many links, each for all that are like it, were this busy.
    pub width: u32,
    pub flows_max: u32,
}

/// Every rank sends to another one, and each takes from one: by chance, but the same for the same seed.
pub fn permutation(ranks: u32, seed: u64) -> Vec<(Rank, Rank)> {
    // Sattolo's shuffle is one long cycle, so that nobody sends to itself.
    let mut chance = weft_protocol::seeded::Seeded::new(seed);
    let mut to: Vec<u32> = (0..ranks).collect();
    for last in (1..ranks as usize).rev() {
        to.swap(last, chance.below(last as u64) as usize);
    }
    (0..ranks).zip(to).map(|(from, to)| (Rank(from), Rank(to))).collect()
}
