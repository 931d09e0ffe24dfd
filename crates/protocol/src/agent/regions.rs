//! What this agent has registered and published, and who may still be looking at it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use thiserror::Error;
use weft_plan::{Place, PlaceKind, Time};

use super::Core;
use crate::error::Refusal;
use crate::memory::Memory;
use crate::region::{Access, Epoch, Region, RegionKey, ReleasedKeys, RemoteRegion};
use crate::session::{LeaseId, MAX_REGIONS, SessionError, check_publication};
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
    /// No peer could be told of it.
    #[error("{name:?} cannot be published: {error}")]
    Unpublishable { name: String, error: SessionError },
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
    released: ReleasedKeys,
}

#[derive(Debug)]
struct Registered {
    region: Region,
    grants: Arc<[(String, Grant)]>,
    /// The slot of the memory that this one publishes; its own where it was registered for local use.
    source: u32,
    /// The slots that publish this one.
    publications: BTreeSet<u32>,
    /// What it is published as.
    name: Option<String>,
    /// It was lent, to whoever is told the key.
    lent: bool,
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
            released: ReleasedKeys::default(),
        }
    }

    fn registered(&self, key: &RegionKey) -> Result<&Registered, Refusal> {
        if key.epoch != self.epoch {
            return Err(Refusal::StaleEpoch);
        }
        match self.by_slot.get(&key.slot) {
            Some(r) if r.region.key == *key => Ok(r),
            Some(_) => Err(Refusal::UnknownKey),
            None => Err(self.released.refusal(key)),
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
        let margin = Time::from_ns(duration.as_ns() / 1000).saturating_add(Time::from_ms(1));
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
        if self.regions.by_name.len() >= MAX_REGIONS {
            let (name, error) = (name.to_owned(), SessionError::TooManyRegions);
            return Err(RegionError::Unpublishable { name, error });
        }
        let key = self.enter(memory, place, access, Some(source.slot))?.key;
        self.regions.by_name.insert(name.to_owned(), key.slot);
        if let Some(registered) = self.regions.by_slot.get_mut(&key.slot) {
            registered.name = Some(name.to_owned());
            if let Err(error) = check_publication(name, &registered.remote()) {
                let name = name.to_owned();
                // No peer has heard of it, so none is inside.
                self.release(&key, now)?;
                return Err(RegionError::Unpublishable { name, error });
            }
        }
        self.say_to_all(name, now);
        Ok(key)
    }

    /// Lets peers reach registered memory without a name: whoever is told the key. It ends with the memory's registration.
    ///
    /// Lent again with the same rights it is the same key: however many peers are inside, transports know the memory once.
    pub fn lend(&mut self, source: &RegionKey, access: Access) -> Result<RegionKey, Refusal> {
        let registered = self.regions.registered(source)?;
        if registered.revoked {
            return Err(Refusal::Released);
        }
        let lent = registered
            .publications
            .iter()
            .filter_map(|slot| self.regions.by_slot.get(slot));
        let same = |r: &&Registered| r.name.is_none() && !r.revoked && r.region.access == access;
        if let Some(lent) = lent.filter(|r| r.lent).find(same) {
            return Ok(lent.region.key);
        }
        let (memory, place) = (registered.region.memory.clone(), registered.region.place);
        let key = self.enter(memory, place, access, Some(source.slot))?.key;
        if let Some(registered) = self.regions.by_slot.get_mut(&key.slot) {
            registered.lent = true;
        }
        Ok(key)
    }

    /// Memory that was registered or lent under a key, as this side uses it and as a peer is told of it.
    pub fn registered(&self, key: &RegionKey) -> Option<(Region, RemoteRegion)> {
        let registered = self.regions.registered(key).ok()?;
        Some((registered.region.clone(), registered.remote()))
    }

    /// Takes a published name back: peers are told, and refused from now on. [`Progress::Busy`]: one of them is still inside, or
    /// has a lease; call [`Core::release`] with the key until it is out.
    pub fn withdraw(&mut self, name: &str, now: Time) -> Result<(RegionKey, Progress), RegionError> {
        let slot = self.regions.by_name.get(name);
        let slot = slot.ok_or_else(|| RegionError::NotPublished { name: name.to_owned() })?;
        let key = self.regions.by_slot[slot].region.key;
        Ok((key, self.release(&key, now)?))
    }

    /// Revokes a region, and everything published from it. [`Progress::Busy`]: peers are refused from now on, but one is still
    /// inside or has a lease; call again. After [`Progress::Idle`] nobody touches the memory.
    pub fn release(&mut self, key: &RegionKey, now: Time) -> Result<Progress, Refusal> {
        let published = self.regions.registered(key)?.publications.clone();
        let mut progress = Progress::Idle;
        // Itself comes last, so that the key is good for the next call as long as anything published from it is in use.
        for slot in published.into_iter().chain([key.slot]) {
            let registered = self.regions.by_slot.get_mut(&slot);
            if let Some(name) = registered.and_then(|r| r.name.take()) {
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
                    // Peers find a grant by the name of the transport, so transports of one name must have the same.
                    let name = transport.transport.capabilities().name;
                    if !grants.iter().any(|(known, _)| known == name) {
                        grants.push((name.to_owned(), grant));
                    }
                }
                Err(r) => refusal = r,
            }
        }
        if grants.is_empty() {
            return Err(refusal);
        }
        if place.kind() != PlaceKind::Dram {
            for (index, slot) in self.slots.iter().enumerate().filter(|(index, _)| held[*index]) {
                self.here.lay(index, slot);
            }
        }
        self.regions.next_slot += 1;
        let registered = Registered {
            region: region.clone(),
            grants: grants.into(),
            source: source.unwrap_or(slot),
            publications: BTreeSet::new(),
            name: None,
            lent: false,
            held,
            revoked: false,
        };
        self.regions.by_slot.insert(slot, registered);
        if let Some(source) = source.and_then(|source| self.regions.by_slot.get_mut(&source)) {
            source.publications.insert(slot);
        }
        Ok(region)
    }

    fn leave(&mut self, slot: u32, now: Time) -> Progress {
        let leased = self.regions.leased(slot, now);
        let Some(registered) = self.regions.by_slot.get_mut(&slot) else {
            return Progress::Idle;
        };
        registered.revoked = true;
        let transports = self.slots.iter_mut().zip(&mut registered.held).zip(&mut self.posted);
        for ((transport, held), posted) in transports.filter(|((_, held), _)| **held) {
            // A transport that no longer knows the key is out of the region as surely as one that says so.
            *held = matches!(transport.transport.release(&registered.region.key), Ok(Progress::Busy));
            // Operations on the region end with it.
            *posted = true;
        }
        if leased || registered.held.contains(&true) {
            return Progress::Busy;
        }
        let source = registered.source;
        self.regions.released.remember(&registered.region.key);
        self.regions.by_slot.remove(&slot);
        if let Some(source) = self.regions.by_slot.get_mut(&source) {
            source.publications.remove(&slot);
        }
        Progress::Idle
    }
}
