//! Registrations kept for buffers that come again.
//!
//! Making memory reachable costs system calls and a round trip; an application that moves the same few buffers over and over should
//! pay once. [`RegistrationCache`] remembers what was registered by address and length.
//!
//! The hazard of every such cache is memory that is freed and whose address is given to something else: a peer would then be let
//! into the newcomer. So an entry holds its region, whose memory holds its owner: as long as the entry lives the memory cannot be
//! freed by that owner, and whoever frees it some other way must call [`RegistrationCache::forget`] first.
//!
//! ```
//! use std::sync::Arc;
//! use weft_fabric::{HostMemory, RegistrationCache};
//! use weft_plan::Place;
//! use weft_protocol::{Access, Epoch, Region, RegionKey};
//! let memory = Arc::new(HostMemory::from_vec(vec![0; 4096]));
//! let (address, len) = (memory.as_ptr() as usize, 4096);
//! let key = RegionKey { epoch: Epoch(1), slot: 0, secret: 7 };
//! let mut cache = RegistrationCache::new(16);
//! assert!(cache.insert(Region { key, memory, place: Place::DRAM, access: Access::READ }).is_empty());
//! assert_eq!(cache.find(address, len, Access::READ).map(|region| region.key), Some(key));
//! assert!(cache.find(address, len, Access::WRITE).is_none());
//! ```

use std::collections::HashMap;

use weft_protocol::{Access, Region};

use crate::memory::HostMemory;

/// Regions by the address and length of their memory, the least recently used leaving first.
#[derive(Debug)]
pub struct RegistrationCache {
    entries: HashMap<(usize, usize), Entry>,
    capacity: usize,
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    region: Region,
    last_use: u64,
}

impl RegistrationCache {
    /// Holds at most `capacity` regions.
    pub fn new(capacity: usize) -> RegistrationCache {
        RegistrationCache {
            entries: HashMap::new(),
            capacity: capacity.max(1),
            uses: 0,
        }
    }

    /// The region that was registered for exactly this memory and permits at least what is wanted.
    pub fn find(&mut self, address: usize, len: usize, wanted: Access) -> Option<&Region> {
        self.uses += 1;
        let entry = self.entries.get_mut(&(address, len))?;
        let access = entry.region.access;
        if (wanted.read && !access.read) || (wanted.write && !access.write) {
            return None;
        }
        entry.last_use = self.uses;
        Some(&entry.region)
    }

    /// Remembers a region, and returns those that have to be released: the one it replaces, the one that was used least
    /// recently where there is no more room, or the given one itself where its memory has no address.
    #[must_use = "regions that leave the cache have to be released"]
    pub fn insert(&mut self, region: Region) -> Vec<Region> {
        let Some(place) = place(&region) else {
            return vec![region];
        };
        self.uses += 1;
        let entry = Entry {
            region,
            last_use: self.uses,
        };
        let mut leaving: Vec<Region> = self
            .entries
            .insert(place, entry)
            .map(|old| old.region)
            .into_iter()
            .collect();
        if self.entries.len() > self.capacity {
            // Looking at all of them is cheap beside the release that follows.
            let oldest = self
                .entries
                .iter()
                .min_by_key(|(_, entry)| entry.last_use)
                .map(|(place, _)| *place);
            leaving.extend(
                oldest
                    .and_then(|place| self.entries.remove(&place))
                    .map(|entry| entry.region),
            );
        }
        leaving
    }

    /// Takes out every region that overlaps this memory, because it is about to be freed. They have to be released before it is.
    #[must_use = "regions that leave the cache have to be released"]
    pub fn forget(&mut self, address: usize, len: usize) -> Vec<Region> {
        let overlaps =
            |(at, of): &(usize, usize)| *at < address.saturating_add(len) && address < at.saturating_add(*of);
        self.take(|place, _| overlaps(place))
    }

    /// Takes everything out.
    #[must_use = "regions that leave the cache have to be released"]
    pub fn clear(&mut self) -> Vec<Region> {
        self.take(|_, _| true)
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn take(&mut self, which: impl Fn(&(usize, usize), &Entry) -> bool) -> Vec<Region> {
        self.entries
            .extract_if(|place, entry| which(place, entry))
            .map(|(_, entry)| entry.region)
            .collect()
    }
}

fn place(region: &Region) -> Option<(usize, usize)> {
    let memory: &HostMemory = region.memory.as_any().downcast_ref()?;
    Some((memory.as_ptr() as usize, usize::try_from(region.memory.len()).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use weft_plan::Place;
    use weft_protocol::{Epoch, RegionKey, VecMemory};

    fn region(slot: u32) -> Region {
        Region {
            key: RegionKey {
                epoch: Epoch(1),
                slot,
                secret: 1,
            },
            memory: Arc::new(HostMemory::from_vec(vec![0; 100])),
            place: Place::DRAM,
            access: Access::READ_WRITE,
        }
    }

    fn found(cache: &mut RegistrationCache, region: &Region) -> bool {
        let (address, len) = place(region).unwrap();
        cache
            .find(address, len, Access::READ)
            .is_some_and(|r| r.key == region.key)
    }

    #[test]
    fn the_least_recently_used_leaves_first() {
        let mut cache = RegistrationCache::new(2);
        let [a, b, c] = [region(0), region(1), region(2)];
        assert!(cache.insert(a.clone()).is_empty() && cache.insert(b.clone()).is_empty());
        assert!(found(&mut cache, &a));
        let left = cache.insert(c.clone());
        assert_eq!(left.iter().map(|r| r.key).collect::<Vec<_>>(), [b.key]);
        assert!(found(&mut cache, &a) && found(&mut cache, &c) && !found(&mut cache, &b));
    }

    #[test]
    fn freed_memory_takes_everything_that_overlaps_with_it() {
        let mut cache = RegistrationCache::new(8);
        let [a, b] = [region(0), region(1)];
        assert!(cache.insert(a.clone()).is_empty() && cache.insert(b.clone()).is_empty());
        let (address, len) = place(&a).unwrap();
        assert!(cache.forget(address + len, 0).is_empty());
        assert_eq!(cache.forget(address + len - 1, 1).len(), 1);
        assert!(!found(&mut cache, &a) && found(&mut cache, &b));
        assert_eq!(cache.clear().len(), 1);
        assert!(cache.is_empty());
    }

    #[test]
    fn an_entry_keeps_its_memory_alive() {
        struct Owner(Arc<()>);
        let alive = Arc::new(());
        let mut bytes = vec![0u8; 10];
        let owner = Owner(alive.clone());
        assert_eq!(Arc::strong_count(&owner.0), 2);
        // SAFETY: the vector outlives the memory, which is dropped with the cache below.
        let memory = unsafe { HostMemory::from_raw(bytes.as_mut_ptr(), 10, Box::new(owner)) };
        let mut cache = RegistrationCache::new(1);
        let left = cache.insert(Region {
            memory: Arc::new(memory),
            ..region(0)
        });
        assert!(left.is_empty());
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(cache);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn memory_without_an_address_is_not_kept() {
        let mut cache = RegistrationCache::new(1);
        let odd = Region {
            memory: Arc::new(VecMemory::zeroed(5)),
            ..region(0)
        };
        assert_eq!(cache.insert(odd).len(), 1);
        assert!(cache.is_empty());
    }
}
