//! The handle of registered memory.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use weft_fabric::cuda::{CudaMemory, bytes_of};
use weft_fabric::fork::OfProcess;
use weft_fabric::memory::HostMemory;
use weft_plan::{Place, Time};
use weft_protocol::atomic::check_word;
use weft_protocol::region::{Access, Region, RegionKey};
use weft_protocol::transport::Progress;
use weft_protocol::{AtomicAct, HostBytes, Memory as _, Refusal};

use crate::driver::{Shared, World};
use crate::error::Error;
use crate::interrupt;

/// Memory that this agent has registered. It is released with its last clone, once it is [published](crate::Agent::publish) no more.
///
/// Peers and transfers may change the bytes at any moment, so they are copied in and out and never borrowed.
///
/// A forked child can still read and write the bytes: those of memory that Weft allocated are the parent's and its peers' own, those of any
/// other memory a copy. Everything else is [`Error::Forked`] there.
#[derive(Clone, Debug)]
pub struct Memory {
    pub(crate) inner: Arc<Registered>,
}

#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) shared: OfProcess<Arc<Shared>>,
    pub(crate) region: Region,
    pub(crate) memory: Held,
    /// Under which key the other ranks of a group read it, once it has been used in a collective.
    pub(crate) lent: OnceLock<RegionKey>,
}

/// Memory that stays registered while a transfer may need it. Most transfers need one, and no list of them.
#[derive(Clone, Debug)]
pub(crate) enum Kept {
    One(Arc<Registered>),
    Several(Arc<[Arc<Registered>]>),
}

impl Kept {
    pub(crate) fn and(self, more: Arc<Registered>) -> Kept {
        Kept::Several(match self {
            Kept::One(one) => Arc::from([one, more]),
            Kept::Several(several) => several.iter().cloned().chain([more]).collect(),
        })
    }
}

/// The memory itself. Host memory is told apart, because every collective asks, and asking a trait object costs more than a small call should.
#[derive(Clone, Debug)]
pub(crate) enum Held {
    Host(Arc<HostMemory>),
    Other(Arc<dyn weft_protocol::Memory>),
}

impl Held {
    pub(crate) fn any(&self) -> Arc<dyn weft_protocol::Memory> {
        match self {
            Held::Host(host) => host.clone(),
            Held::Other(memory) => memory.clone(),
        }
    }
    fn get(&self) -> &dyn weft_protocol::Memory {
        match self {
            Held::Host(host) => &**host,
            Held::Other(memory) => &**memory,
        }
    }
}

/// What is registered stays so while something holds its bytes.
impl weft_protocol::Memory for Registered {
    fn len(&self) -> u64 {
        match &self.memory {
            Held::Host(host) => host.len(),
            Held::Other(memory) => memory.len(),
        }
    }
    fn host(&self) -> Option<&dyn HostBytes> {
        self.memory.get().host()
    }
    fn as_any(&self) -> &dyn Any {
        self.memory.get().as_any()
    }
}

impl Registered {
    /// The host memory that it is, if it is some.
    pub(crate) fn host_memory(&self) -> Option<&HostMemory> {
        match &self.memory {
            Held::Host(host) => Some(host),
            Held::Other(memory) => memory.as_any().downcast_ref(),
        }
    }
}

impl Memory {
    pub fn len(&self) -> u64 {
        self.inner.len()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Where its bytes are.
    pub fn place(&self) -> Place {
        self.inner.region.place
    }
    /// The first byte. It stays where it is while any clone of this handle lives. Null where the bytes are not in host memory.
    pub fn as_ptr(&self) -> *mut u8 {
        self.inner
            .host_memory()
            .map_or(std::ptr::null_mut(), HostMemory::as_ptr)
    }
    /// The first byte on its device; none where it is no device's.
    pub fn device_address(&self) -> Option<u64> {
        let memory: &CudaMemory = self.inner.memory.get().as_any().downcast_ref()?;
        Some(memory.device_memory().address())
    }
    /// Whether Weft allocated it, so that peers on this host can map it.
    pub fn is_mappable(&self) -> bool {
        self.inner.host_memory().is_some_and(|host| host.file().is_some())
    }
    /// Copies bytes out. Those of a device are waited for.
    ///
    /// # Panics
    /// Where the bytes lie outside the memory, or are neither the host's nor a device's; and where the device has failed.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        self.bytes().read(offset, into);
    }
    /// Copies bytes in.
    ///
    /// # Panics
    /// As [`read`](Memory::read).
    pub fn write(&self, offset: u64, from: &[u8]) {
        self.bytes().write(offset, from);
    }
    fn bytes(&self) -> &dyn HostBytes {
        bytes_of(self.inner.memory.get()).expect("bytes of the host or of a device")
    }
    /// What the word at `offset` holds: eight bytes, little-endian, at a multiple of eight.
    pub fn read_word(&self, offset: u64) -> Result<u64, Error> {
        self.inner.shared.get()?;
        let host = || self.inner.host_memory().ok_or(Refusal::Unsupported);
        let found = self.check_word(offset).and_then(|()| host()?.read_word(offset));
        found.map_err(|refusal| refused(offset, refusal))
    }
    /// Adds to the word at `offset` and tells what it held. Atomic with respect to the atomic operations of all peers.
    pub fn fetch_add(&self, offset: u64, value: u64) -> Result<u64, Error> {
        self.atomic(offset, AtomicAct::FetchAdd(value))
    }
    /// Stores `new` in the word at `offset` if it is `expected`, and tells what it held. Atomic likewise.
    pub fn compare_swap(&self, offset: u64, expected: u64, new: u64) -> Result<u64, Error> {
        self.atomic(offset, AtomicAct::CompareSwap { expected, new })
    }
    fn atomic(&self, offset: u64, act: AtomicAct) -> Result<u64, Error> {
        self.inner.shared.get()?;
        let found = self
            .check_word(offset)
            .and_then(|()| self.inner.memory.get().host_bytes()?.atomic(offset, act));
        found.map_err(|refusal| refused(offset, refusal))
    }
    fn check_word(&self, offset: u64) -> Result<(), Refusal> {
        check_word(Access::READ_WRITE, self.len(), offset)
    }
    /// All bytes, copied.
    ///
    /// # Panics
    /// Where they are not in host memory.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len() as usize];
        self.read(0, &mut bytes);
        bytes
    }

    pub(crate) fn is_lent(&self) -> bool {
        self.inner.lent.get().is_some()
    }

    /// Under which key the other ranks of a group may read it.
    pub(crate) fn lent(&self) -> Result<RegionKey, Error> {
        if let Some(key) = self.inner.lent.get() {
            return Ok(*key);
        }
        let key = &self.inner.region.key;
        let lent = self
            .inner
            .shared
            .get()?
            .act(|world, _| world.core.lend(key, Access::READ));
        let key = lent.map_err(|refusal| Error::Refused {
            what: "lending memory".to_owned(),
            refusal,
        })?;
        Ok(*self.inner.lent.get_or_init(|| key))
    }

    /// Withdraws and releases the region now. After `Ok` nobody touches the memory any more.
    ///
    /// Peers are refused from the start of this call. A peer that is frozen in the middle of a copy holds the memory until it
    /// goes on or dies; if that lasts longer than `timeout`, the error says so.
    pub fn release(&self, timeout: Duration) -> Result<(), Error> {
        let Registered { shared, region, .. } = &*self.inner;
        let shared = shared.get()?;
        if let Some(host) = self.inner.host_memory() {
            shared.lock().registrations.forget(host);
        }
        shared.act(|world, now| {
            let World { core, channels, .. } = world;
            if let Some(channels) = channels {
                channels.forget(core, &region.key, now);
            }
        });
        let deadline = after(shared, timeout);
        let try_release = |world: &mut World| {
            match world.core.release(&region.key, shared.clock.now()) {
                Ok(Progress::Busy) => None,
                // Released before, which is what the caller wants.
                Ok(Progress::Idle) | Err(_) => Some(()),
            }
        };
        let released = shared.wait_looking(deadline, try_release);
        // Whoever is refused needs no name to be refused by.
        let unpublished = shared.lock().unpublish(&self.inner);
        drop(unpublished);
        match released {
            Some(()) => Ok(()),
            None if interrupt::has_happened() => Err(Error::Interrupted),
            None => Err(Error::StillInUse { waited: timeout }),
        }
    }

    /// Memory can be used by the agent that registered it, and by no other.
    pub(crate) fn check_owner(&self, user: &Arc<Shared>) -> Result<(), Error> {
        let owner = self.inner.shared.get()?;
        if Arc::ptr_eq(owner, user) {
            return Ok(());
        }
        let name = |shared: &Shared| shared.lock().core.settings().session.name.clone();
        Err(Error::OtherAgent {
            registered_with: name(owner),
            used_with: name(user),
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let key = self.region.key;
        // A forked child has only a copy of the handle: what its parent has registered stays so.
        let Ok(shared) = self.shared.get() else { return };
        shared.act(|world, now| {
            if world.core.release(&key, now) == Ok(Progress::Busy) {
                world.releasing.push(key);
            }
        });
    }
}

/// Foreign memory that is registered now, by where it lies, so that registering it again is a look-up.
///
/// It keeps nothing registered: a handle does, and with it the owner of the memory, so an address found here cannot have been
/// freed and given to something else.
#[derive(Debug, Default)]
pub(crate) struct Registrations {
    by_place: HashMap<(usize, u64), Weak<Registered>>,
    /// Entries whose handles are gone are swept when there are this many.
    sweep_at: usize,
}

impl Registrations {
    pub(crate) fn find(&self, host: &HostMemory) -> Option<Arc<Registered>> {
        self.by_place.get(&place(host))?.upgrade()
    }

    /// What is being released is not given to anybody else.
    pub(crate) fn forget(&mut self, host: &HostMemory) {
        self.by_place.remove(&place(host));
    }

    pub(crate) fn remember(&mut self, registered: &Arc<Registered>) {
        if self.by_place.len() >= self.sweep_at {
            self.by_place.retain(|_, known| known.strong_count() > 0);
            self.sweep_at = 2 * self.by_place.len() + 64;
        }
        if let Some(host) = registered.host_memory() {
            self.by_place.insert(place(host), Arc::downgrade(registered));
        }
    }
}

fn place(host: &HostMemory) -> (usize, u64) {
    (host.as_ptr() as usize, host.len())
}

fn refused(offset: u64, refusal: Refusal) -> Error {
    let what = format!("an atomic operation on the word at {offset}");
    Error::Refused { what, refusal }
}

/// The deadline of a wait that starts now.
pub(crate) fn after(shared: &Shared, timeout: Duration) -> Time {
    shared.clock.now().saturating_add(timeout.into())
}
