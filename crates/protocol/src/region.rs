//! Registered memory: keys that cannot be guessed, and the check that every target makes before it touches a byte.

use std::collections::{BTreeMap, HashMap, VecDeque};
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
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// In order, because every operation looks one up, and hashing takes longer than finding one among thousands.
    regions: BTreeMap<u32, Region>,
    released: ReleasedKeys,
}

/// Keys that were released, as many as are remembered.
///
/// Whoever presents one of them was told it once, and learns that it is good no more. Whoever makes a key up learns nothing: neither
/// that its slot was used, nor, by asking on, how many were.
#[derive(Debug, Default)]
pub(crate) struct ReleasedKeys {
    secrets: HashMap<u32, u128>,
    /// By slot, oldest release first. Slots are never used twice in one life.
    order: VecDeque<u32>,
}

impl ReleasedKeys {
    /// Older ones are as unknown as any that never was. What is in flight when a region goes is among the latest.
    const MAX: usize = 1 << 14;

    pub(crate) fn remember(&mut self, key: &RegionKey) {
        if self.secrets.insert(key.slot, key.secret).is_none() {
            self.order.push_back(key.slot);
        }
        if self.order.len() > ReleasedKeys::MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.secrets.remove(&oldest);
        }
    }

    /// Why a key that belongs to no region is refused.
    pub(crate) fn refusal(&self, key: &RegionKey) -> Refusal {
        match self.secrets.get(&key.slot) {
            Some(secret) if same_secret(*secret, key.secret) => Refusal::Released,
            _ => Refusal::UnknownKey,
        }
    }
}

impl RegionTable {
    pub fn new(epoch: Epoch) -> RegionTable {
        RegionTable {
            epoch,
            regions: BTreeMap::new(),
            released: ReleasedKeys::default(),
        }
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub fn insert(&mut self, region: Region) {
        self.regions.insert(region.key.slot, region);
    }

    pub fn remove(&mut self, key: &RegionKey) -> Option<Region> {
        self.lookup(key).ok()?;
        self.released.remember(key);
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
            None => Err(self.released.refusal(key)),
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

    /// May this agent itself touch `spans` of its region? Whatever peers may do with it, it may, as long as the region is registered.
    pub fn check_own(&self, key: &RegionKey, spans: &Spans) -> Result<&Region, Refusal> {
        let region = self.lookup(key)?;
        match spans.end() <= region.memory.len() {
            true => Ok(region),
            false => Err(Refusal::OutOfBounds),
        }
    }

    /// Checks and carries out an atomic operation that a peer asks for, and returns what the word held.
    pub fn atomic(&self, key: &RegionKey, offset: u64, act: AtomicAct) -> Result<u64, Refusal> {
        let region = self.lookup(key)?;
        check_word(region.access, region.memory.len(), offset)?;
        region.memory.host_bytes()?.atomic(offset, act)
    }
}

/// Compares without an early exit, so that the time taken tells nothing about how much of a guess was right.
fn same_secret(a: u128, b: u128) -> bool {
    std::hint::black_box(a ^ b) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::VecMemory;

    fn region(slot: u32) -> Region {
        Region {
            key: RegionKey {
                epoch: Epoch(1),
                slot,
                secret: 1000 + u128::from(slot),
            },
            memory: Arc::new(VecMemory::zeroed(8)),
            place: Place::Dram { numa: None },
            access: Access::READ,
        }
    }

    #[test]
    fn only_who_was_told_a_key_learns_that_it_was_released() {
        let mut table = RegionTable::new(Epoch(1));
        for slot in 0..3 {
            table.insert(region(slot));
        }
        let told = region(1).key;
        assert!(table.remove(&told).is_some());
        assert_eq!(table.lookup(&told).unwrap_err(), Refusal::Released);
        // A guesser is told the same of slots in use, of released ones and of such as never were.
        for slot in 0..6 {
            let guess = RegionKey {
                secret: 7,
                ..region(slot).key
            };
            assert_eq!(table.lookup(&guess).unwrap_err(), Refusal::UnknownKey, "slot {slot}");
        }
    }

    #[test]
    fn what_is_remembered_of_released_keys_is_bounded() {
        let mut released = ReleasedKeys::default();
        let many = ReleasedKeys::MAX as u32 + 10;
        (0..many).for_each(|slot| released.remember(&region(slot).key));
        assert_eq!(
            (released.secrets.len(), released.order.len()),
            (ReleasedKeys::MAX, ReleasedKeys::MAX)
        );
        assert_eq!(released.refusal(&region(0).key), Refusal::UnknownKey);
        assert_eq!(released.refusal(&region(many - 1).key), Refusal::Released);
    }
}
