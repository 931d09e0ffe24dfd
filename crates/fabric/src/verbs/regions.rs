//! This agent's own regions: what the device calls them, and what it takes to get one back.

use std::collections::HashMap;

use weft_plan::Time;
use weft_protocol::atomic::WORD_BYTES;
use weft_protocol::{Epoch, Refusal, Region, RegionKey, RegionTable};

use super::message::Location;
use super::registration::Registration;
use crate::HostMemory;

/// The local side of a move, as the device calls it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Near {
    pub slot: u32,
    pub local: u64,
    pub lkey: u32,
    /// As this process sees it, where it does.
    pub visible: Option<*const u8>,
    len: u64,
}

// SAFETY: an address that is only handed on; the memory behind it has no thread affinity.
unsafe impl Send for Near {}

/// The regions of this agent.
#[derive(Debug)]
pub(super) struct Regions {
    pub table: RegionTable,
    registered: HashMap<u32, Registered>,
    /// Regions that are being taken back.
    releasing: HashMap<RegionKey, Releasing>,
    /// The one that was found last, which is usually the one that is wanted next.
    last: Option<(RegionKey, Near)>,
}

#[derive(Debug)]
struct Registered {
    near: Near,
    /// None for a region without bytes.
    registration: Option<Registration>,
}

#[derive(Debug)]
struct Releasing {
    registration: Option<Registration>,
    /// Who has not let go by then is refused by the device.
    until: Time,
}

impl Regions {
    pub(super) fn new(epoch: Epoch) -> Regions {
        Regions {
            table: RegionTable::new(epoch),
            registered: HashMap::new(),
            releasing: HashMap::new(),
            last: None,
        }
    }

    pub(super) fn insert(&mut self, region: &Region, registration: Option<Registration>) {
        let host = region.memory.as_any().downcast_ref::<HostMemory>();
        host.inspect(|host| host.look_up_file());
        // What the library would copy into a work request must be there when it does.
        let host = host.filter(|host| !host.may_vanish());
        let near = Near {
            slot: region.key.slot,
            local: registration.as_ref().map_or(0, Registration::iova),
            lkey: registration.as_ref().map_or(0, Registration::lkey),
            visible: host.map(|host| host.as_ptr().cast_const()),
            len: region.memory.len(),
        };
        self.table.insert(region.clone());
        self.registered
            .insert(region.key.slot, Registered { near, registration });
        self.last = None;
    }

    /// The local side of a move, if it is registered and as large as the move believes.
    pub(super) fn near(&mut self, region: &Region) -> Result<Near, Refusal> {
        let near = match self.last {
            Some((key, near)) if key == region.key => near,
            _ => {
                self.table.lookup(&region.key)?;
                let registered = self.registered.get(&region.key.slot).ok_or(Refusal::UnknownKey)?;
                self.last = Some((region.key, registered.near));
                registered.near
            }
        };
        if region.memory.len() > near.len {
            return Err(Refusal::OutOfBounds);
        }
        Ok(near)
    }

    /// Where a region is, for a peer that has shown its key.
    pub(super) fn locate(&self, key: &RegionKey) -> Result<Location, Refusal> {
        let region = self.table.lookup(key)?;
        let registered = self.registered.get(&key.slot).ok_or(Refusal::UnknownKey)?;
        let registration = registered.registration.as_ref();
        Ok(Location {
            iova: registration.map_or(0, Registration::iova),
            len: region.memory.len(),
            rkey: registration.map_or(0, Registration::rkey),
            access: region.access,
            atomics: registration.is_some_and(|r| r.access().atomic && r.iova().is_multiple_of(WORD_BYTES)),
        })
    }

    /// Begins to take a region back: nobody finds it any more. `None` if that has begun already.
    pub(super) fn revoke(&mut self, key: &RegionKey, until: Time) -> Result<bool, Refusal> {
        if self.releasing.contains_key(key) {
            return Ok(false);
        }
        self.table.lookup(key)?;
        self.table.remove(key);
        self.last = None;
        let registered = self.registered.remove(&key.slot);
        let registration = registered.and_then(|registered| registered.registration);
        self.releasing.insert(*key, Releasing { registration, until });
        Ok(true)
    }

    pub(super) fn is_overdue(&self, key: &RegionKey, now: Time) -> bool {
        self.releasing.get(key).is_none_or(|releasing| releasing.until <= now)
    }

    /// Everybody has let go, or time is up.
    pub(super) fn finish_release(&mut self, key: &RegionKey) -> Option<Registration> {
        self.releasing.remove(key).and_then(|releasing| releasing.registration)
    }
}
