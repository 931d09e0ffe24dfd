//! How a shelf is to be.

use std::collections::BTreeMap;

use super::super::policy::Kind;
use super::format::TenantKey;

/// What an acknowledgement outlives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// The process, however it ends.
    #[default]
    Process,
    /// The machine's power: payloads and records are made to last before a put is acknowledged.
    Power,
}

/// What a shelf is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Memory of this process: what is put is there when its payload is.
    Memory,
    Files(Durability),
}

/// How a shelf is to be.
#[derive(Clone, Debug)]
pub struct ShelfOptions {
    pub medium: Medium,
    pub policy: Kind,
    /// Bytes of puts under way at most; what does not fit is refused.
    pub queue_bytes: u64,
    /// Tenants at most. Blocks of others are refused, and those that are found are left out.
    pub tenants: usize,
    /// Whether blocks that leave are handed to somebody who has a use for their bytes first.
    pub hand_down: bool,
    /// How fast what was found at the start is verified; 0 for not at all.
    pub scrub_bytes_per_second: u64,
    /// Shares of tenants that others cannot push them below, in slots.
    pub shares: BTreeMap<TenantKey, usize>,
}

impl ShelfOptions {
    pub fn new(medium: Medium) -> ShelfOptions {
        ShelfOptions {
            medium,
            policy: Kind::default(),
            queue_bytes: 256 << 20,
            tenants: 64,
            hand_down: false,
            scrub_bytes_per_second: 64 << 20,
            shares: BTreeMap::new(),
        }
    }
}
