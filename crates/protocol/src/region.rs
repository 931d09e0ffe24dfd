//! Registered memory: keys that cannot be guessed, and the check that every target makes before it touches a byte.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use weft_plan::{Place, Spans};

use crate::atomic::{AtomicAct, check_word};
use crate::error::Refusal;
use crate::memory::Memory;

/// One life of an agent. A restarted agent has another, so what it handed out in its earlier life is recognised as stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub u64);

/// What a peer may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    pub read: bool,
    pub write: bool,
}

impl Access {
    /// Registered for local use only: no peer may touch it.
    pub const NONE: Access = Access {
        read: false,
        write: false,
    };
    pub const READ: Access = Access {
        read: true,
        write: false,
    };
    pub const WRITE: Access = Access {
        read: false,
        write: true,
    };
    pub const READ_WRITE: Access = Access {
        read: true,
        write: true,
    };
}

/// The right to touch a region. Whoever presents it must have been told it: the secret is 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionKey {
    pub epoch: Epoch,
    pub slot: u32,
    pub secret: u128,
}

impl fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret stays out of logs.
        write!(f, "RegionKey({}@{:x})", self.slot, self.epoch.0)
    }
}

/// Memory that this agent has registered.
#[derive(Clone, Debug)]
pub struct Region {
    pub key: RegionKey,
    pub memory: Arc<dyn Memory>,
    pub place: Place,
    pub access: Access,
}

/// A peer's region as this agent was told of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    pub key: RegionKey,
    pub len: u64,
    pub place: Place,
    pub access: Access,
    /// What the peer's transports want presented with the key, by transport name.
    pub grants: Arc<[(String, crate::transport::Grant)]>,
}

/// The regions that a target serves. One check for every transport, so that none can forget a part of it.
#[derive(Debug)]
pub struct RegionTable {
    epoch: Epoch,
    regions: HashMap<u32, Region>,
    /// Slots are never used twice in one life, so a slot below this that is absent has been released.
    next_slot: u32,
}

impl RegionTable {
    pub fn new(epoch: Epoch) -> RegionTable {
        RegionTable {
            epoch,
            regions: HashMap::new(),
            next_slot: 0,
        }
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub fn insert(&mut self, region: Region) {
        self.next_slot = self.next_slot.max(region.key.slot + 1);
        self.regions.insert(region.key.slot, region);
    }

    pub fn remove(&mut self, key: &RegionKey) -> Option<Region> {
        self.lookup(key).ok()?;
        self.regions.remove(&key.slot)
    }

    /// The region behind a key, whatever it permits.
    pub fn lookup(&self, key: &RegionKey) -> Result<&Region, Refusal> {
        if key.epoch != self.epoch {
            return Err(Refusal::StaleEpoch);
        }
        match self.regions.get(&key.slot) {
            Some(region) if same_secret(region.key.secret, key.secret) => Ok(region),
            // A wrong secret and a slot that never was look alike: neither tells a guesser anything.
            Some(_) => Err(Refusal::UnknownKey),
            None if key.slot < self.next_slot => Err(Refusal::Released),
            None => Err(Refusal::UnknownKey),
        }
    }

    /// May a peer that presents `key` touch `spans`? The answer names the reason when not.
    pub fn check(&self, key: &RegionKey, wanted: Access, spans: &Spans) -> Result<&Region, Refusal> {
        let region = self.lookup(key)?;
        if wanted.read && !region.access.read {
            return Err(Refusal::NotReadable);
        }
        if wanted.write && !region.access.write {
            return Err(Refusal::NotWritable);
        }
        if spans.end() > region.memory.len() {
            return Err(Refusal::OutOfBounds);
        }
        Ok(region)
    }

    /// Checks and carries out an atomic operation that a peer asks for, and returns what the word held.
    pub fn atomic(&self, key: &RegionKey, offset: u64, act: AtomicAct) -> Result<u64, Refusal> {
        let region = self.lookup(key)?;
        check_word(region.access, region.memory.len(), offset)?;
        region.memory.atomic(offset, act)
    }
}

/// Compares without an early exit, so that the time taken tells nothing about how much of a guess was right.
fn same_secret(a: u128, b: u128) -> bool {
    std::hint::black_box(a ^ b) == 0
}
