//! A store in numbers.

use weft_protocol::block::Tally;
use weft_protocol::block::shelf::format::TenantKey;
use weft_protocol::block::shelf::{Condition, Counts, Wrong};

use super::tier::Tier;

/// A store in numbers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StoreStat {
    pub tiers: Vec<TierStat>,
    /// Blocks that were asked for and were nowhere, or not what was put.
    pub misses: u64,
}

/// A tier in numbers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TierStat {
    /// `memory`, or the directory.
    pub name: String,
    pub slots: usize,
    pub blocks: usize,
    pub block_bytes: u32,
    /// Blocks that were read from it and were right.
    pub hits: u64,
    /// Bytes of puts under way.
    pub queued: u64,
    pub tally: Tally,
    pub counts: Counts,
    pub condition: Condition,
    /// The last blocks whose bytes were not what was put.
    pub wrongs: Vec<Wrong>,
    /// Blocks of each tenant.
    pub tenants: Vec<(TenantKey, usize)>,
}

impl TierStat {
    pub(super) fn of(tier: &Tier, hits: u64) -> TierStat {
        let shelf = &tier.shelf;
        TierStat {
            name: tier.name.clone(),
            slots: shelf.geometry().slots_total(),
            blocks: shelf.blocks(),
            block_bytes: shelf.geometry().block_bytes,
            hits,
            queued: shelf.queued(),
            tally: shelf.tally(),
            counts: shelf.counts(),
            condition: shelf.condition(),
            wrongs: shelf.wrongs().copied().collect(),
            tenants: shelf.tenants().map(|(tenant, _, blocks)| (tenant, blocks)).collect(),
        }
    }
}
