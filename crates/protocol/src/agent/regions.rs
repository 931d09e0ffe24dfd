//! What this agent has registered and published, and who may still be looking at it.

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;
use weft_plan::{Place, Time};

use super::Core;
use crate::error::Refusal;
use crate::memory::Memory;
use crate::region::{Access, Epoch, Region, RegionKey, RemoteRegion};
use crate::session::LeaseId;
use crate::transfer::PeerId;
use crate::transport::{Grant, Progress, Transport};

/// Why a region was not published, withdrawn or released.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegionError {
    #[error("nothing is published as {name:?}")]
    NotPublished { name: String },
    #[error("{name:?} is already published")]
    NameTaken { name: String },
    #[error("this region is not registered here: {0}")]
    NotRegistered(#[from] Refusal),
}

#[derive(Debug)]
pub(super) struct Regions {
    epoch: Epoch,
    transports: usize,
    by_slot: BTreeMap<u32, Registered>,
    by_name: BTreeMap<String, u32>,
    leases: Vec<Lease>,
    next_slot: u32,
}

#[derive(Debug)]
struct Registered {
    region: Region,
    grants: Arc<[(String, Grant)]>,
    /// The slot of the memory that this one publishes; its own where it was registered for local use.
    source: u32,
    /// Transports, by index, that may still be inside.
    held: Vec<bool>,
    revoked: bool,
}

/// A peer looks at a region until then, on our clock. It counts from before it asked, so it is done earlier than we think.
#[derive(Debug)]
struct Lease {
    peer: PeerId,
    id: LeaseId,
    slot: u32,
    until: Time,
}

impl Regions {
    pub(super) fn new(epoch: Epoch, transports: usize) -> Regions {
        Regions {
            epoch,
            transports,
            by_slot: BTreeMap::new(),
            by_name: BTreeMap::new(),
            leases: Vec::new(),
            next_slot: 0,
        }
    }

    fn registered(&self, key: &RegionKey) -> Result<&Registered, Refusal> {
        if key.epoch != self.epoch {
            return Err(Refusal::StaleEpoch);
        }
        match self.by_slot.get(&key.slot) {
            Some(r) if r.region.key == *key => Ok(r),
            None if key.slot < self.next_slot => Err(Refusal::Released),
            _ => Err(Refusal::UnknownKey),
        }
    }

    /// The names of everything published.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// What is published under a name, as peers are told of it.
    pub(super) fn published(&self, name: &str) -> Option<RemoteRegion> {
        self.by_name.get(name).map(|slot| self.by_slot[slot].remote())
    }

    /// Grants a lease on a published region, or says why not.
    pub(super) fn lease(
        &mut self,
        peer: PeerId,
        id: LeaseId,
        key: &RegionKey,
        duration: Time,
        now: Time,
    ) -> Result<(), Refusal> {
        let registered = self.registered(key)?;
        if registered.revoked {
            return Err(Refusal::Released);
        }
        if !registered.region.access.read {
            return Err(Refusal::NotReadable);
        }
        // Longer than the peer believes by what two clocks may drift apart.
        let margin = Time::from_ps(duration.as_ps() / 1000).saturating_add(Time::from_ms(1));
        let until = now.saturating_add(duration).saturating_add(margin);
        let slot = key.slot;
        match self.leases.iter_mut().find(|l| (l.peer, l.id) == (peer, id)) {
            Some(lease) => lease.until = lease.until.max(until),
            None => self.leases.push(Lease { peer, id, slot, until }),
        }
        Ok(())
    }

    /// Tells whether there was such a lease.
    pub(super) fn end_lease(&mut self, peer: PeerId, id: LeaseId) -> bool {
        let before = self.leases.len();
        self.leases.retain(|l| (l.peer, l.id) != (peer, id));
        self.leases.len() < before
    }

    fn leased(&mut self, slot: u32, now: Time) -> bool {
        self.leases.retain(|l| l.until > now);
        self.leases.iter().any(|l| l.slot == slot)
    }
}

impl Registered {
    fn remote(&self) -> RemoteRegion {
        RemoteRegion {
            key: self.region.key,
            len: self.region.memory.len(),
            place: self.region.place,
            access: self.region.access,
            grants: self.grants.clone(),
        }
    }
}

impl<T: ?Sized + Transport> Core<T> {
    /// Makes memory usable as the near side of transfers. No peer can reach it.
    pub fn register(&mut self, memory: Arc<dyn Memory>, place: Place) -> Result<Region, Refusal> {
        self.enter(memory, place, Access::NONE, None)
    }

    /// Lets peers reach registered memory under a name, under a key of its own that ends with the publication.
    pub fn publish(
        &mut self,
        name: &str,
        source: &RegionKey,
        access: Access,
        now: Time,
    ) -> Result<RegionKey, RegionError> {
        if self.regions.by_name.contains_key(name) {
            return Err(RegionError::NameTaken { name: name.to_owned() });
        }
        let registered = self.regions.registered(source)?;
        if registered.revoked {
            return Err(Refusal::Released.into());
        }
        let (memory, place) = (registered.region.memory.clone(), registered.region.place);
        let region = self.enter(memory, place, access, Some(source.slot))?;
        self.regions.by_name.insert(name.to_owned(), region.key.slot);
        self.say_to_all(name, now);
        Ok(region.key)
    }

    /// Takes a published name back: peers are told, and refused from now on. [`Core::release`] of the key tells when the last
    /// of them is out.
    pub fn withdraw(&mut self, name: &str, now: Time) -> Result<RegionKey, RegionError> {
        let slot = self
            .regions
            .by_name
            .remove(name)
            .ok_or_else(|| RegionError::NotPublished { name: name.to_owned() })?;
        self.say_to_all(name, now);
        let key = self.regions.by_slot[&slot].region.key;
        self.release(&key, now)?;
        Ok(key)
    }

    /// Revokes a region, and everything published from it. [`Progress::Busy`]: peers are refused from now on, but one is still
    /// inside or has a lease; call again. After [`Progress::Idle`] nobody touches the memory.
    pub fn release(&mut self, key: &RegionKey, now: Time) -> Result<Progress, Refusal> {
        self.regions.registered(key)?;
        let published = self
            .regions
            .by_slot
            .iter()
            .filter(|(slot, r)| r.source == key.slot && **slot != key.slot);
        let published: Vec<u32> = published.map(|(slot, _)| *slot).collect();
        let mut progress = Progress::Idle;
        // Itself comes last, so that the key is good for the next call as long as anything published from it is in use.
        for slot in published.into_iter().chain([key.slot]) {
            let named = self.regions.by_name.iter().find(|(_, s)| **s == slot);
            if let Some(name) = named.map(|(name, _)| name.clone()) {
                self.regions.by_name.remove(&name);
                self.say_to_all(&name, now);
            }
            if progress == Progress::Busy && slot == key.slot {
                break;
            }
            if self.leave(slot, now) == Progress::Busy {
                progress = Progress::Busy;
            }
        }
        Ok(progress)
    }

    fn enter(
        &mut self,
        memory: Arc<dyn Memory>,
        place: Place,
        access: Access,
        source: Option<u32>,
    ) -> Result<Region, Refusal> {
        let slot = self.regions.next_slot;
        let random = (self.random)();
        let secret = u128::from_le_bytes(random[..16].try_into().expect("sixteen of thirty-two bytes"));
        let key = RegionKey {
            epoch: self.regions.epoch,
            slot,
            secret,
        };
        let region = Region {
            key,
            memory,
            place,
            access,
        };
        let mut grants = Vec::new();
        let mut held = vec![false; self.regions.transports];
        let mut refusal = Refusal::Unsupported;
        for (index, transport) in self.slots.iter_mut().enumerate() {
            match transport.transport.register(&region) {
                Ok(grant) => {
                    held[index] = true;
                    grants.push((transport.transport.capabilities().name.to_owned(), grant));
                }
                Err(r) => refusal = r,
            }
        }
        if grants.is_empty() {
            return Err(refusal);
        }
        self.regions.next_slot += 1;
        let registered = Registered {
            region: region.clone(),
            grants: grants.into(),
            source: source.unwrap_or(slot),
            held,
            revoked: false,
        };
        self.regions.by_slot.insert(slot, registered);
        Ok(region)
    }

    fn leave(&mut self, slot: u32, now: Time) -> Progress {
        let leased = self.regions.leased(slot, now);
        let Some(registered) = self.regions.by_slot.get_mut(&slot) else {
            return Progress::Idle;
        };
        registered.revoked = true;
        for (transport, held) in self.slots.iter_mut().zip(&mut registered.held) {
            // A transport that no longer knows the key is out of the region as surely as one that says so.
            *held = *held && matches!(transport.transport.release(&registered.region.key), Ok(Progress::Busy));
        }
        if leased || registered.held.contains(&true) {
            return Progress::Busy;
        }
        self.regions.by_slot.remove(&slot);
        Progress::Idle
    }
}
