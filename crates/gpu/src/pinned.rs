//! Host memory that the device reaches.

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

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

/// Whether somebody else has pinned these bytes already, all of them, as frameworks do with memory that they call pinned. What this process has pinned in part or in whole
/// by a [`PinnedRange`] does not count: that may go at any moment, and whoever needs it shares it.
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
    let all = known && bytes > 0 && begin <= address as u64 && end.is_some_and(|end| end <= begin + bytes);
    all && pages(address, usize::try_from(len).unwrap_or(usize::MAX))
        .is_some_and(|pages| !lock().iter().any(|entry| entry.overlaps(&pages)))
}

/// Host memory of somebody else's, pinned where it lies for as long as the value lives.
#[derive(Debug)]
pub struct PinnedRange {
    device: Arc<Device>,
    pages: Range<usize>,
}

/// What is pinned in this process. Memory is pinned once, however many ask for it, and stays so until the last of them lets go.
static PINNED: Mutex<Vec<Entry<PinnedRange>>> = Mutex::new(Vec::new());

fn lock() -> MutexGuard<'static, Vec<Entry<PinnedRange>>> {
    PINNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pages that are pinned. While they are being pinned, or not any more but the driver does not know yet, there is nothing to share.
#[derive(Debug)]
struct Entry<T> {
    pages: Range<usize>,
    writable: bool,
    pin: Weak<T>,
}

/// What a request finds.
#[derive(Debug)]
enum Found<T> {
    /// All of it is pinned.
    Shared(Arc<T>),
    /// Some of it is about to be pinned, or to be pinned no longer.
    Changing,
    /// Some of it is pinned, and the driver pins nothing twice.
    Overlaps,
    Nothing,
}

impl<T> Entry<T> {
    fn overlaps(&self, pages: &Range<usize>) -> bool {
        self.pages.start < pages.end && pages.start < self.pages.end
    }

    fn find(entries: &[Entry<T>], pages: &Range<usize>, writable: bool) -> Found<T> {
        let mut found = Found::Nothing;
        for entry in entries.iter().filter(|entry| entry.overlaps(pages)) {
            let covers = entry.pages.start <= pages.start && pages.end <= entry.pages.end;
            // None is dropped while the list is locked: whoever drops the last one locks it.
            if covers && entry.writable >= writable {
                return entry.pin.upgrade().map_or(Found::Changing, Found::Shared);
            }
            match entry.pin.strong_count() {
                0 => found = Found::Changing,
                _ => return Found::Overlaps,
            }
        }
        found
    }
}

/// Pinning is by pages.
fn pages(address: usize, len: usize) -> Option<Range<usize>> {
    // SAFETY: sysconf has no preconditions.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let end = address.checked_add(len.max(1))?.checked_next_multiple_of(page)?;
    Some(address / page * page..end)
}

impl PinnedRange {
    /// Pins the pages that hold these bytes, or shares the pin that somebody has of them. `writable`: whether this process may write them.
    ///
    /// # Safety
    /// The memory must stay mapped until the last of those who share the pin has dropped it.
    pub unsafe fn shared(
        device: &Arc<Device>,
        address: usize,
        len: usize,
        writable: bool,
    ) -> Result<Arc<PinnedRange>, GpuError> {
        let pages = pages(address, len).ok_or(GpuError::OutOfMemory { bytes: len as u64 })?;
        // Before the lock, which a forked child might find taken for ever.
        let _entered = device.enter()?;
        loop {
            let mut pinned = lock();
            match Entry::find(&pinned, &pages, writable) {
                Found::Shared(known) => return Ok(known),
                Found::Changing => {
                    drop(pinned);
                    std::thread::sleep(CHANGING);
                }
                Found::Overlaps => {
                    let name = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED".to_owned();
                    let call = "cuMemHostRegister";
                    return Err(GpuError::Call { call, name });
                }
                Found::Nothing => {
                    let (pages, pin) = (pages.clone(), Weak::new());
                    pinned.push(Entry { pages, writable, pin });
                    break;
                }
            }
        }
        // Not with the list locked: it takes as long as there are pages.
        // SAFETY: the caller's promise.
        let made = unsafe { PinnedRange::new(device, pages.clone(), writable) }.map(Arc::new);
        let mut pinned = lock();
        match &made {
            Ok(made) => {
                let mut entries = pinned.iter_mut();
                if let Some(entry) = entries.find(|entry| entry.pages == pages) {
                    entry.pin = Arc::downgrade(made);
                }
            }
            Err(_) => pinned.retain(|entry| entry.pages != pages),
        }
        made
    }

    /// The pin that somebody has of all of these bytes, if there is one.
    pub fn covering(address: usize, len: usize) -> Option<Arc<PinnedRange>> {
        match Entry::find(&lock(), &pages(address, len)?, true) {
            Found::Shared(known) => Some(known),
            _ => None,
        }
    }

    /// # Safety
    /// The memory must stay mapped until the value is dropped.
    unsafe fn new(device: &Arc<Device>, pages: Range<usize>, writable: bool) -> Result<PinnedRange, GpuError> {
        let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        if !writable {
            flags |= sys::CU_MEMHOSTREGISTER_READ_ONLY;
        }
        let (base, len) = (pages.start as *mut std::ffi::c_void, pages.len());
        // SAFETY: the caller's promise; where the range is not mapped whole, the driver refuses it.
        let pinned = unsafe { sys::cuMemHostRegister_v2(base, len, flags) };
        check("cuMemHostRegister", pinned)?;
        Ok(PinnedRange {
            device: device.clone(),
            pages,
        })
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        // In a forked child nothing is pinned, and the lock may be taken for ever.
        let Ok(_entered) = self.device.enter() else { return };
        // SAFETY: registered in `new`.
        unsafe { sys::cuMemHostUnregister(self.pages.start as *mut std::ffi::c_void) };
        // Until now nobody has pinned these pages anew, nor taken them for somebody else's pin.
        lock().retain(|entry| entry.pages != self.pages);
    }
}

/// How long to wait before looking again whether pages have been pinned, or let go of.
const CHANGING: Duration = Duration::from_micros(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_shared_by_whoever_is_within_it_and_by_nobody_else() {
        let (held, gone) = (Arc::new(7), Weak::new());
        let entry = |pages: Range<usize>, writable, pin: &Weak<i32>| Entry {
            pages,
            writable,
            pin: pin.clone(),
        };
        let live = Arc::downgrade(&held);
        let entries = [
            entry(10..20, true, &live),
            entry(30..40, false, &live),
            entry(50..60, true, &gone),
        ];
        let find = |pages: Range<usize>, writable| Entry::find(&entries, &pages, writable);
        for within in [10..20, 12..13, 19..20] {
            assert!(matches!(find(within, true), Found::Shared(found) if *found == 7));
        }
        assert!(matches!(find(20..30, true), Found::Nothing));
        assert!(matches!(find(9..20, true), Found::Overlaps));
        assert!(matches!(find(19..30, false), Found::Overlaps));
        // A device may not write through what was pinned to be read.
        assert!(matches!(find(31..32, false), Found::Shared(_)));
        assert!(matches!(find(31..32, true), Found::Overlaps));
        // The driver does not know yet.
        assert!(matches!(find(50..55, true), Found::Changing));
        assert!(matches!(find(45..55, true), Found::Changing));
        assert!(matches!(find(35..55, true), Found::Overlaps));
    }

    #[test]
    fn pages_hold_all_of_the_bytes_and_do_not_wrap() {
        let page = pages(0, 1).unwrap().end;
        assert_eq!(pages(page - 1, 2), Some(0..2 * page));
        assert_eq!(pages(page, page), Some(page..2 * page));
        assert_eq!(pages(page, 0), Some(page..2 * page));
        assert_eq!(pages(usize::MAX - 1, 2), None);
        assert_eq!(pages(usize::MAX - 5, 1), None);
    }
}
