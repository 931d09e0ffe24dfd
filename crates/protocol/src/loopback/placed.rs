//! Memory that is not host memory, as the reference transport knows it.
//!
//! It stands for a device's memory, a file or an object: nobody but the transport can get at the bytes, and what was written to a file or an
//! object lasts only once it has been committed.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

use weft_plan::{Place, PlaceKind};

use crate::error::Refusal;
use crate::memory::{HostBytes, Memory, VecMemory};
use crate::transport::{Arrival, Commit};

/// Uploads that an object holds at a time. Beyond them the oldest is given up, as a store gives up what nobody completes.
const UPLOADS_MAX: usize = 64;

/// Memory of a place that is not host memory.
#[derive(Debug)]
pub struct PlacedMemory {
    place: Place,
    bytes: VecMemory,
    lasting: Mutex<Lasting>,
}

/// What would be found after a crash.
#[derive(Debug)]
struct Lasting {
    bytes: Vec<u8>,
    /// Which parts of each upload of an object are there, by tag.
    uploads: BTreeMap<u64, BTreeSet<u32>>,
}

impl PlacedMemory {
    pub fn new(place: Place, bytes: Vec<u8>) -> PlacedMemory {
        PlacedMemory {
            place,
            lasting: Mutex::new(Lasting {
                bytes: bytes.clone(),
                uploads: BTreeMap::new(),
            }),
            bytes: VecMemory::new(bytes),
        }
    }

    pub fn zeroed(place: Place, len: usize) -> PlacedMemory {
        PlacedMemory::new(place, vec![0; len])
    }

    pub fn place(&self) -> Place {
        self.place
    }

    /// The bytes as whoever made the memory sees them: a test, which looks behind the transport's back.
    pub fn look(&self) -> &VecMemory {
        &self.bytes
    }

    /// What would be found after a crash: of a file or an object what has been committed, of a device all there is.
    pub fn lasting(&self) -> Vec<u8> {
        match self.place.kind() {
            PlaceKind::File | PlaceKind::Object => self.lock().bytes.clone(),
            PlaceKind::Dram | PlaceKind::Gpu => self.bytes.snapshot(),
        }
    }

    /// A part of a write is in place.
    pub(super) fn on_part(&self, arrival: Arrival) {
        if self.place.kind() == PlaceKind::Object {
            let mut lasting = self.lock();
            let index = arrival.index & !Arrival::LAST;
            lasting.uploads.entry(arrival.tag).or_default().insert(index);
            if lasting.uploads.len() > UPLOADS_MAX {
                lasting.uploads.pop_first();
            }
        }
    }

    /// Makes what has been written last. An object must have all parts of the upload; committing once more what was committed is harmless.
    pub(super) fn commit(&self, commit: &Commit) -> Result<(), Refusal> {
        let mut lasting = self.lock();
        let bytes = match self.place.kind() {
            PlaceKind::Object => {
                let whole = |parts: &BTreeSet<u32>| parts.len() == commit.parts as usize;
                match lasting.uploads.get(&commit.tag) {
                    Some(parts) if whole(parts) => self.bytes.snapshot(),
                    Some(_) => return Err(Refusal::Malformed),
                    None if commit.parts == 0 => self.bytes.snapshot(),
                    None => return Err(Refusal::Malformed),
                }
            }
            _ => self.bytes.snapshot(),
        };
        lasting.bytes = bytes;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Lasting> {
        self.lasting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Memory for PlacedMemory {
    fn len(&self) -> u64 {
        self.bytes.len()
    }
    fn host(&self) -> Option<&dyn HostBytes> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The bytes of memory of any kind that the reference transport knows.
pub(super) fn bytes_of(memory: &dyn Memory) -> Result<&dyn HostBytes, Refusal> {
    match memory.as_any().downcast_ref::<PlacedMemory>() {
        Some(placed) => Ok(&placed.bytes),
        None => memory.host_bytes(),
    }
}
