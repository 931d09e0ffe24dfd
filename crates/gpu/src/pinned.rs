//! Host memory that the device reaches.

use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys::{self, CUpointer_attribute as Attribute, CUresult};

use crate::device::{Device, GpuError, check};

/// Host memory of the driver's, which every device reads and writes.
pub struct Pinned {
    device: Arc<Device>,
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory has no thread affinity.
unsafe impl Send for Pinned {}
// SAFETY: it is given out as a pointer only.
unsafe impl Sync for Pinned {}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({})", self.len)
    }
}

impl Pinned {
    /// Zeroed.
    pub fn allocate(device: &Arc<Device>, len: usize) -> Result<Pinned, GpuError> {
        let _entered = device.enter()?;
        let mut found = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the driver chooses the address.
        match unsafe { sys::cuMemHostAlloc(&mut found, len.max(1), flags) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(GpuError::OutOfMemory { bytes: len as u64 }),
            other => check("cuMemHostAlloc", other)?,
        }
        let ptr = NonNull::new(found.cast::<u8>()).ok_or(GpuError::OutOfMemory { bytes: len as u64 })?;
        // SAFETY: just allocated, and so long.
        unsafe { ptr.as_ptr().write_bytes(0, len) };
        Ok(Pinned {
            device: device.clone(),
            ptr,
            len,
        })
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
    /// The same address is the device's, where addresses are unified, which they are on every 64-bit Linux.
    pub fn address(&self) -> u64 {
        self.ptr.as_ptr() as u64
    }
    pub fn len(&self) -> usize {
        self.len
    }
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: allocated by the driver, once.
            unsafe { sys::cuMemFreeHost(self.ptr.as_ptr().cast()) };
        }
    }
}

/// Whether somebody has pinned these bytes already, all of them, as frameworks do with memory that they call pinned.
pub fn is_pinned(address: usize, len: u64) -> bool {
    let (mut begin, mut bytes) = (0u64, 0u64);
    // SAFETY: the results of both attributes are words; the driver looks the address up.
    let known = unsafe {
        let begin = sys::cuPointerGetAttribute(
            (&raw mut begin).cast(),
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            address as u64,
        );
        let bytes = sys::cuPointerGetAttribute(
            (&raw mut bytes).cast(),
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            address as u64,
        );
        begin == CUresult::CUDA_SUCCESS && bytes == CUresult::CUDA_SUCCESS
    };
    let end = (address as u64).checked_add(len);
    known && bytes > 0 && begin <= address as u64 && end.is_some_and(|end| end <= begin + bytes)
}

/// Host memory of somebody else's, pinned where it lies for as long as the value lives.
#[derive(Debug)]
pub struct PinnedRange {
    device: Arc<Device>,
    base: usize,
}

/// What is pinned in this process. Memory is pinned once, however many ask for it, and stays so until the last of them lets go.
static PINNED: Mutex<BTreeMap<(usize, usize), Weak<PinnedRange>>> = Mutex::new(BTreeMap::new());

/// Pinning is by pages.
const PAGE: usize = 4096;

impl PinnedRange {
    /// Pins the pages that hold these bytes, or shares the pin that somebody has. `writable`: whether this process may write them.
    ///
    /// # Safety
    /// The memory must stay mapped until the last of those who share the pin has dropped it.
    pub unsafe fn shared(
        device: &Arc<Device>,
        address: usize,
        len: usize,
        writable: bool,
    ) -> Result<Arc<PinnedRange>, GpuError> {
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = pinned.get(&(address, len)).and_then(Weak::upgrade) {
            return Ok(known);
        }
        pinned.retain(|_, known| known.strong_count() > 0);
        // SAFETY: the caller's promise.
        let range = Arc::new(unsafe { PinnedRange::new(device, address, len, writable) }?);
        pinned.insert((address, len), Arc::downgrade(&range));
        Ok(range)
    }

    /// # Safety
    /// The memory must stay mapped until the value is dropped.
    unsafe fn new(device: &Arc<Device>, address: usize, len: usize, writable: bool) -> Result<PinnedRange, GpuError> {
        let _entered = device.enter()?;
        let base = address / PAGE * PAGE;
        let end = address
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(PAGE))
            .ok_or(GpuError::OutOfMemory { bytes: len as u64 })?;
        let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        if !writable {
            flags |= sys::CU_MEMHOSTREGISTER_READ_ONLY;
        }
        // SAFETY: the caller's promise; where the range is not mapped whole, the driver refuses it.
        let pinned = unsafe { sys::cuMemHostRegister_v2(base as *mut std::ffi::c_void, end - base, flags) };
        check("cuMemHostRegister", pinned)?;
        Ok(PinnedRange {
            device: device.clone(),
            base,
        })
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: registered in `new`.
            unsafe { sys::cuMemHostUnregister(self.base as *mut std::ffi::c_void) };
        }
    }
}
