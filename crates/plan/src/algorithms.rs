//! Ways to do a collective, one file each. Every one is a function of rank and step, for any number of ranks from two up.
//!
//! A constructor answers `None` to a problem that its algorithm is not for. All are proven by the verifier in this crate's tests, for every
//! number of ranks up to 64; what a new one must bring is told in `docs/schedules.md`.

mod alone;
mod direct;
mod ring;

use crate::units::Rank;

pub use alone::Alone;
pub use direct::Direct;
pub use ring::Ring;

/// The rank that comes `by` after `rank`, round and round.
fn after(rank: Rank, by: u32, ranks: u32) -> Rank {
    Rank(((u64::from(rank.0) + u64::from(by)) % u64::from(ranks)) as u32)
}

/// The rank that comes `by` before `rank`, round and round.
fn before(rank: Rank, by: u32, ranks: u32) -> Rank {
    after(rank, ranks - by % ranks, ranks)
}

#[cfg(test)]
mod tests;
