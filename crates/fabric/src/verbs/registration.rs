//! Memory that a device may touch.
//!
//! A [`Registration`] is a user's share in a registered memory; the memory lives as long as any share does. One that peers may use
//! is made for one user alone and ends with it, so that the key that a peer was told dies when the region does; two regions of one
//! memory have two. One that only this process uses is shared by all who register the same memory, and is kept for a while after
//! the last of them.

mod cache;

use std::ffi::c_uint;
use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use thiserror::Error;
use weft_plan::{Bytes, Time};
use weft_protocol::{Access, Memory};
use weft_sys::verbs as sys;

use super::device::ProtectionDomain;
use crate::HostMemory;
use crate::memory::DmaBufMemory;
use cache::Cache;
pub use cache::KeepOptions;

/// How to register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistrationOptions {
    pub odp: OnDemandPaging,
    /// Let the device's writes to memory overtake one another on the bus, where it can. A completion still comes after all of its
    /// bytes, and nothing here looks at bytes before their completion.
    pub relaxed_ordering: bool,
    pub keep: KeepOptions,
}

impl Default for RegistrationOptions {
    fn default() -> RegistrationOptions {
        RegistrationOptions {
            odp: OnDemandPaging::Auto,
            relaxed_ordering: true,
            keep: KeepOptions::default(),
        }
    }
}

/// Whether the device may look pages up as it needs them, in the place of having them pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnDemandPaging {
    /// Where pinning fails and the device can.
    #[default]
    Auto,
    Never,
    Always,
}

/// What a peer may do with a registered memory. The device itself may always read and write it for us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteAccess {
    pub read: bool,
    pub write: bool,
    pub atomic: bool,
}

/// Why memory cannot be registered: raise a limit, register less, or use another transport.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegistrationError {
    #[error(
        "{bytes} more of pinned memory would pass the limit of {limit} on locked memory, of which {pinned} are in use; \
         raise it with `ulimit -l unlimited`, or LimitMEMLOCK=infinity for a service"
    )]
    LockedMemoryLimit { bytes: Bytes, pinned: Bytes, limit: Bytes },
    #[error("`{device}` registers at most {max} at once, not {bytes}")]
    TooLarge { device: String, bytes: Bytes, max: Bytes },
    #[error("`{device}` or the kernel has no room for one more registration; the device allows {max}")]
    NoRoom { device: String, max: u32 },
    #[error("no bytes can be registered where there are none")]
    Empty,
    #[error("not all of the memory is mapped, or not all of it can be written")]
    NotWritable,
    #[error("this kind of memory cannot be registered with an RDMA device")]
    UnknownMemory,
    #[error("the libibverbs of this machine does not know dma-buf; it is older than 1.12")]
    LibraryWithoutDmaBuf,
    #[error("`{device}` or its driver does not take dma-buf memory")]
    DeviceWithoutDmaBuf { device: String },
    #[error("`{device}` cannot page on demand")]
    NoOnDemandPaging { device: String },
    #[error("`{device}` refused to register {bytes}")]
    Refused {
        device: String,
        bytes: Bytes,
        #[source]
        source: io::Error,
    },
}

/// The registrations in one protection domain.
#[derive(Debug)]
pub struct Registrations {
    domain: Arc<ProtectionDomain>,
    options: RegistrationOptions,
    cache: Cache<MemoryRegion>,
    counts: RegistrationCounts,
}

/// How often what was done, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegistrationCounts {
    /// Registrations made with the device.
    pub made: u64,
    /// Requests that a registration already there answered.
    pub reused: u64,
    /// Of those made: without pinning.
    pub on_demand: u64,
}

/// A share in a registered memory. It keeps the memory alive, and is handed back by [`Registrations::release`].
#[derive(Clone, Debug)]
pub struct Registration {
    region: Arc<MemoryRegion>,
    memory: Arc<dyn Memory>,
}

impl Registrations {
    pub fn new(domain: &Arc<ProtectionDomain>, options: RegistrationOptions) -> Registrations {
        Registrations {
            domain: Arc::clone(domain),
            options,
            cache: Cache::new(options.keep),
            counts: RegistrationCounts::default(),
        }
    }

    /// Registers all of a memory. May take long: the kernel pins every page.
    pub fn register(
        &mut self,
        memory: &Arc<dyn Memory>,
        access: RemoteAccess,
    ) -> Result<Registration, RegistrationError> {
        if access.is_none()
            && let Some(region) = self.cache.reuse(memory)
        {
            self.counts.reused += 1;
            return Ok(Registration {
                region,
                memory: Arc::clone(memory),
            });
        }
        let region = Arc::new(self.make(memory.as_ref(), access)?);
        self.counts.made += 1;
        self.counts.on_demand += u64::from(region.on_demand);
        if access.is_none() {
            self.cache.insert(memory, &region);
        }
        Ok(Registration {
            region,
            memory: Arc::clone(memory),
        })
    }

    /// Takes a share back. One that peers could use ends here, with the last clone of it; another one may be kept for a while.
    pub fn release(&mut self, registration: Registration, now: Time) {
        let Registration { region, memory } = registration;
        if region.access.is_none() {
            self.cache.release(memory, region, now);
        }
    }

    /// Ends what has been kept for long enough.
    pub fn sweep(&mut self, now: Time) {
        self.cache.sweep(now);
    }

    /// When [`Registrations::sweep`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        self.cache.next_timeout()
    }

    pub fn counts(&self) -> RegistrationCounts {
        self.counts
    }

    fn make(&self, memory: &dyn Memory, access: RemoteAccess) -> Result<MemoryRegion, RegistrationError> {
        let source = Source::of(memory)?;
        let max = Bytes(self.domain.device().attributes().max_mr_size);
        if source.len as u64 > max.0 {
            return Err(RegistrationError::TooLarge {
                device: self.domain.device().name().to_owned(),
                bytes: Bytes(source.len as u64),
                max,
            });
        }
        let can = self.domain.device().has_on_demand_paging() && source.dma_buf.is_none();
        let on_demand = |registrations: &Registrations| registrations.ask(&source, access, true);
        match self.options.odp {
            OnDemandPaging::Always if !can => Err(RegistrationError::NoOnDemandPaging {
                device: self.domain.device().name().to_owned(),
            }),
            OnDemandPaging::Always => on_demand(self),
            OnDemandPaging::Never => self.ask(&source, access, false),
            OnDemandPaging::Auto => match self.ask(&source, access, false) {
                Err(RegistrationError::LockedMemoryLimit { .. } | RegistrationError::NoRoom { .. }) if can => {
                    on_demand(self)
                }
                answer => answer,
            },
        }
    }

    /// One attempt, in one way.
    fn ask(
        &self,
        source: &Source<'_>,
        access: RemoteAccess,
        on_demand: bool,
    ) -> Result<MemoryRegion, RegistrationError> {
        let library = self.domain.device().library().raw();
        let mut flags = access.flags();
        if on_demand {
            flags |= sys::IBV_ACCESS_ON_DEMAND;
        }
        let address = source.address.as_ptr();
        let iova = address as u64;
        let region = match (source.dma_buf, library.ibv_reg_mr_iova2) {
            (Some((descriptor, offset)), _) => {
                let register = library
                    .ibv_reg_dmabuf_mr
                    .ok_or(RegistrationError::LibraryWithoutDmaBuf)?;
                // SAFETY: the domain is live and the descriptor is open; the device reaches the pages behind it, which it holds.
                unsafe { register(self.domain.raw(), offset, source.len, iova, descriptor, flags as i32) }
            }
            (None, Some(register)) => {
                if self.options.relaxed_ordering && !access.atomic {
                    flags |= sys::IBV_ACCESS_RELAXED_ORDERING;
                }
                // SAFETY: the domain is live, and the memory vouches for its address for as long as a share in the registration
                // keeps it alive. After that the pages stay pinned and nobody names them.
                unsafe { register(self.domain.raw(), address.cast(), source.len, iova, flags) }
            }
            (None, None) => {
                // SAFETY: the domain is live; the source keeps its memory for as long as a share in the registration lives.
                unsafe { (library.ibv_reg_mr)(self.domain.raw(), address.cast(), source.len, flags as i32) }
            }
        };
        match NonNull::new(region) {
            Some(region) => Ok(MemoryRegion {
                region,
                domain: Arc::clone(&self.domain),
                iova,
                len: source.len as u64,
                access,
                on_demand,
            }),
            None => Err(self.explain(source, io::Error::last_os_error())),
        }
    }

    fn explain(&self, source: &Source<'_>, error: io::Error) -> RegistrationError {
        let device = self.domain.device();
        let bytes = Bytes(source.len as u64);
        let name = || device.name().to_owned();
        match error.raw_os_error() {
            Some(libc::ENOMEM | libc::EAGAIN) if source.dma_buf.is_none() => {
                let pinned = pinned_bytes();
                match locked_memory_limit() {
                    Some(limit) if pinned.0.saturating_add(bytes.0) > limit.0 => {
                        RegistrationError::LockedMemoryLimit { bytes, pinned, limit }
                    }
                    _ => RegistrationError::NoRoom {
                        device: name(),
                        max: u32::try_from(device.attributes().max_mr).unwrap_or(0),
                    },
                }
            }
            Some(libc::EFAULT) if source.dma_buf.is_none() => RegistrationError::NotWritable,
            Some(libc::EOPNOTSUPP | libc::ENOSYS) if source.dma_buf.is_some() => {
                RegistrationError::DeviceWithoutDmaBuf { device: name() }
            }
            _ => RegistrationError::Refused {
                device: name(),
                bytes,
                source: error,
            },
        }
    }
}

impl Registration {
    /// What local pieces of work requests name.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is registered as long as this share lives.
        unsafe { self.region.region.as_ref() }.lkey
    }

    /// What a peer names.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region is registered as long as this share lives.
        unsafe { self.region.region.as_ref() }.rkey
    }

    /// The address of the first byte, as work requests of either side name it.
    pub fn iova(&self) -> u64 {
        self.region.iova
    }

    pub fn len(&self) -> u64 {
        self.region.len
    }

    pub fn is_empty(&self) -> bool {
        self.region.len == 0
    }

    pub fn access(&self) -> RemoteAccess {
        self.region.access
    }

    pub fn is_on_demand(&self) -> bool {
        self.region.on_demand
    }

    pub fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }
}

impl RemoteAccess {
    /// For this process's own use.
    pub const NONE: RemoteAccess = RemoteAccess {
        read: false,
        write: false,
        atomic: false,
    };

    fn is_none(self) -> bool {
        self == RemoteAccess::NONE
    }

    fn flags(self) -> c_uint {
        let mut flags = sys::IBV_ACCESS_LOCAL_WRITE;
        for (granted, flag) in [
            (self.read, sys::IBV_ACCESS_REMOTE_READ),
            (self.write, sys::IBV_ACCESS_REMOTE_WRITE),
            (self.atomic, sys::IBV_ACCESS_REMOTE_ATOMIC),
        ] {
            if granted {
                flags |= flag;
            }
        }
        flags
    }
}

impl From<Access> for RemoteAccess {
    /// Without atomics, which a region does not have by being readable and writable.
    fn from(access: Access) -> RemoteAccess {
        RemoteAccess {
            read: access.read,
            write: access.write,
            atomic: false,
        }
    }
}

/// A registration with the device, deregistered when dropped.
struct MemoryRegion {
    region: NonNull<sys::ibv_mr>,
    domain: Arc<ProtectionDomain>,
    iova: u64,
    len: u64,
    access: RemoteAccess,
    on_demand: bool,
}

// SAFETY: the library guards a registration with locks of its own, and its keys never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: those locks order the calls of several threads on one registration.
unsafe impl Sync for MemoryRegion {}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered once and deregistered once. A refusal would leave the pages pinned, which harms nobody else.
        unsafe { (self.domain.device().library().raw().ibv_dereg_mr)(self.region.as_ptr()) };
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion({} bytes on {})", self.len, self.domain.device().name())
    }
}

/// Where the bytes of a memory are, in the terms of a registration.
struct Source<'a> {
    address: NonNull<u8>,
    len: usize,
    /// The descriptor, and where in it the memory begins.
    dma_buf: Option<(libc::c_int, u64)>,
    _memory: &'a dyn Memory,
}

impl Source<'_> {
    fn of(memory: &dyn Memory) -> Result<Source<'_>, RegistrationError> {
        let (address, dma_buf) = if let Some(host) = memory.as_any().downcast_ref::<HostMemory>() {
            (host.as_ptr(), None)
        } else if let Some(buffer) = memory.as_any().downcast_ref::<DmaBufMemory>() {
            let descriptor = buffer.descriptor().as_raw_fd();
            (buffer.as_ptr(), Some((descriptor, buffer.offset())))
        } else {
            return Err(RegistrationError::UnknownMemory);
        };
        let len = usize::try_from(memory.len()).unwrap_or(usize::MAX);
        if len == 0 {
            return Err(RegistrationError::Empty);
        }
        Ok(Source {
            address: NonNull::new(address).ok_or(RegistrationError::Empty)?,
            len,
            dma_buf,
            _memory: memory,
        })
    }
}

/// How much may be pinned; `None` where there is no limit.
fn locked_memory_limit() -> Option<Bytes> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the answer has a place.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    (rc == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(Bytes(limit.rlim_cur))
}

/// How much this process has pinned, as far as the kernel tells.
fn pinned_bytes() -> Bytes {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    parse_pinned(&status).unwrap_or_default()
}

/// From `VmPin:      132 kB`.
fn parse_pinned(status: &str) -> Option<Bytes> {
    let rest = status.lines().find_map(|line| line.strip_prefix("VmPin:"))?;
    let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib.checked_mul(1024)?))
}

#[cfg(test)]
mod tests;
