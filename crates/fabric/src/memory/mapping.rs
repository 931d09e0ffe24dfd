//! Mappings, and the sealed files under them.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use super::MemoryError;
use crate::fork::Origin;

/// What a mapping permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    ReadOnly,
    ReadWrite,
}

/// A shared mapping of a file, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    /// The one process that has it, where its children do not.
    only: OnceLock<Origin>,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: it gives out only a raw pointer.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(file: BorrowedFd<'_>, len: usize, protection: Protection) -> Result<Mapping, MemoryError> {
        Mapping::part(file, 0, len, protection)
    }

    /// From `offset` on, which is a multiple of the page size.
    pub(crate) fn part(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        protection: Protection,
    ) -> Result<Mapping, MemoryError> {
        let start = libc::off_t::try_from(offset).map_err(|_| MemoryError::TooLarge { len: offset })?;
        let prot = match protection {
            Protection::ReadOnly => libc::PROT_READ,
            Protection::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing that exists.
        let ptr = unsafe { libc::mmap(ptr::null_mut(), len, prot, libc::MAP_SHARED, file.as_raw_fd(), start) };
        if ptr == libc::MAP_FAILED {
            return Err(last_error("mapping", len));
        }
        let ptr = NonNull::new(ptr.cast()).expect("mmap never returns null without MAP_FIXED");
        Ok(Mapping {
            ptr,
            len,
            only: OnceLock::new(),
        })
    }

    /// The same, of which a forked child has no copy. What it holds is between this process and its peers.
    pub(crate) fn not_inherited(
        file: BorrowedFd<'_>,
        len: usize,
        protection: Protection,
    ) -> Result<Mapping, MemoryError> {
        let mapping = Mapping::new(file, len, protection)?;
        mapping.keep_from_children();
        Ok(mapping)
    }

    /// Forked children find nothing at its address.
    pub(crate) fn keep_from_children(&self) {
        if self.advise(libc::MADV_DONTFORK) {
            self.only.get_or_init(Origin::here);
        }
    }

    pub(crate) fn non_null(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    pub(crate) fn advise(&self, advice: libc::c_int) -> bool {
        // SAFETY: the advice values used here change how pages are provided, never what they hold.
        unsafe { libc::madvise(self.ptr.as_ptr().cast(), self.len, advice) == 0 }
    }

    pub(crate) fn touch(&self) {
        for offset in (0..self.len).step_by(page_bytes()) {
            // SAFETY: within the mapping, which nobody else knows yet.
            unsafe { self.ptr.as_ptr().add(offset).write_volatile(0) };
        }
    }

    /// Enters the pages that the mapped file has by now into the page table, a few at a time while `go_on` says so: whoever touches them first
    /// need not wait for the kernel. Only the first `len` bytes are looked at, and pages that the file does not have yet stay unmade.
    pub(crate) fn enter(&self, file: BorrowedFd<'_>, len: usize, go_on: impl Fn() -> bool) {
        // The kernel lets nobody change the mappings of this process during a step.
        const STEP: usize = 256 << 10;
        // Of other files, as those with huge pages, it cannot be told which pages they have.
        if !is_shared_memory(file) {
            return;
        }
        let len = len.min(self.len);
        let seek = |from: usize, whence: libc::c_int| {
            // SAFETY: a plain call on an open descriptor. Nobody reads or writes this file by its position.
            let found = unsafe { libc::lseek(file.as_raw_fd(), from as libc::off_t, whence) };
            usize::try_from(found).ok()
        };
        let mut at = 0;
        while let Some(present) = seek(at, libc::SEEK_DATA).filter(|&present| present < len) {
            let Some(end) = seek(present, libc::SEEK_HOLE).map(|end| end.min(len)) else {
                return;
            };
            for start in (present..end).step_by(STEP) {
                // SAFETY: within the mapping; the call changes nothing that the pages hold.
                let entered = go_on()
                    && unsafe {
                        let from = self.ptr.as_ptr().add(start).cast();
                        libc::madvise(from, STEP.min(end - start), libc::MADV_POPULATE_READ) == 0
                    };
                if !entered {
                    return;
                }
                std::thread::yield_now();
            }
            at = end;
        }
    }

    pub(crate) fn prefer_node(&self, node: u32) -> Result<(), MemoryError> {
        const MPOL_PREFERRED: libc::c_ulong = 1;
        let mut mask = [0u64; 16];
        let word = mask.get_mut(node as usize / 64).ok_or(MemoryError::System {
            step: "binding to a node",
            len: self.len,
            source: io::Error::from_raw_os_error(libc::EINVAL),
        })?;
        *word = 1 << (node % 64);
        // SAFETY: the mask outlives the call, and one bit more than its bits is what the kernel expects as its size.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.ptr.as_ptr(),
                self.len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                mask.len() * 64 + 1,
                0,
            )
        };
        // A kernel without NUMA or a sandbox that forbids the call gives memory all the same; a wrong node is the caller's mistake.
        if rc != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) {
            return Err(last_error("binding to a node", self.len));
        }
        Ok(())
    }
}

impl Mapping {
    /// A second mapping of the same pages that can only be read.
    pub(crate) fn read_only_twin(&self) -> Result<Mapping, MemoryError> {
        // SAFETY: an old size of 0 makes mremap duplicate a shared mapping at a new address and leave the old one alone.
        let ptr = unsafe { libc::mremap(self.ptr.as_ptr().cast(), 0, self.len, libc::MREMAP_MAYMOVE) };
        if ptr == libc::MAP_FAILED {
            return Err(last_error("mapping a second time", self.len));
        }
        let twin = Mapping {
            ptr: NonNull::new(ptr.cast()).expect("mremap returned an address"),
            len: self.len,
            only: OnceLock::new(),
        };
        // A twin takes after its original, which children may not have.
        twin.advise(libc::MADV_DOFORK);
        // SAFETY: the twin is new, so nobody relies on writing through it.
        if unsafe { libc::mprotect(ptr, self.len, libc::PROT_READ) } != 0 {
            return Err(last_error("protecting a mapping", self.len));
        }
        Ok(twin)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a child there is nothing at this address, or something that is not ours.
        if self.only.get().is_some_and(|only| !only.is_here()) {
            return;
        }
        // SAFETY: exactly the range that mmap returned; whoever could use it borrowed or shared this value.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

/// An unsealed memfd of whole pages of `round` bytes.
pub(crate) fn memory_file(name: &CStr, len: usize, round: usize, flags: libc::c_uint) -> Result<OwnedFd, MemoryError> {
    let bytes = file_bytes(len, round)?;
    // SAFETY: the name is a C string, and a descriptor is returned or nothing is done.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags) };
    if fd < 0 {
        return Err(last_error("creating a memory file", len));
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    let size = libc::off_t::try_from(bytes).map_err(|_| MemoryError::TooLarge { len: len as u64 })?;
    // SAFETY: a plain call on a descriptor we own.
    if unsafe { libc::ftruncate(file.as_raw_fd(), size) } != 0 {
        return Err(last_error("sizing a memory file", len));
    }
    // Whoever is handed a read-only descriptor and is another user cannot open it again for writing.
    // SAFETY: a plain call on a descriptor we own; where it is refused, the mode stays what it was.
    unsafe { libc::fchmod(file.as_raw_fd(), 0o600) };
    Ok(file)
}

/// Fixes the size of a file for ever, and what else `more` forbids.
pub(crate) fn seal(file: &OwnedFd, more: libc::c_int) -> Result<(), MemoryError> {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL | more;
    // SAFETY: a plain call on a descriptor we own.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(last_error("sealing a memory file", 0));
    }
    Ok(())
}

/// Whether a file is memory in pages of the usual size.
pub(crate) fn is_shared_memory(file: BorrowedFd<'_>) -> bool {
    // SAFETY: an all-zero statfs is a valid one to be overwritten.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and the result has a place.
    let known = unsafe { libc::fstatfs(file.as_raw_fd(), &mut stat) == 0 };
    known && stat.f_type == libc::TMPFS_MAGIC
}

/// The size of a file that somebody else made, if a mapping of it is safe from SIGBUS: it can never shrink, and it is memory in pages of the
/// usual size, which the kernel makes anew, and empty, where somebody has punched a hole. Huge pages it may not have.
pub(crate) fn sealed_bytes(file: BorrowedFd<'_>) -> Option<usize> {
    if !is_shared_memory(file) {
        return None;
    }
    // SAFETY: a plain call on an open descriptor; it fails on what is not a memory file.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return None;
    }
    // SAFETY: an all-zero stat is a valid one to be overwritten.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and the result has a place.
    if unsafe { libc::fstat(file.as_raw_fd(), &mut stat) } != 0 {
        return None;
    }
    usize::try_from(stat.st_size).ok()
}

/// The size of a file that holds `len` bytes in whole pages; one page at least, because nothing cannot be mapped.
pub(crate) fn file_bytes(len: usize, round: usize) -> Result<usize, MemoryError> {
    len.max(1)
        .checked_next_multiple_of(round)
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or(MemoryError::TooLarge { len: len as u64 })
}

pub(crate) fn page_bytes() -> usize {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

fn last_error(step: &'static str, len: usize) -> MemoryError {
    MemoryError::System {
        step,
        len,
        source: io::Error::last_os_error(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn faults() -> i64 {
        // SAFETY: an all-zero rusage is a valid one to be overwritten.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the result has a place.
        unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
        usage.ru_minflt
    }

    fn blocks(file: &OwnedFd) -> i64 {
        // SAFETY: an all-zero stat is a valid one to be overwritten.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open and the result has a place.
        unsafe { libc::fstat(file.as_raw_fd(), &mut stat) };
        stat.st_blocks
    }

    #[test]
    fn pages_that_are_there_are_entered_and_others_stay_unmade() {
        const LEN: usize = 16 << 20;
        let file = memory_file(c"test", LEN, page_bytes(), 0).unwrap();
        let owner = Mapping::new(file.as_fd(), LEN, Protection::ReadWrite).unwrap();
        let made = (4 << 20)..(12 << 20);
        for offset in made.clone().step_by(page_bytes()) {
            // SAFETY: within the mapping, which is ours.
            unsafe { owner.as_ptr().add(offset).write_volatile(1) };
        }
        let (reader, before) = (
            Mapping::new(file.as_fd(), LEN, Protection::ReadOnly).unwrap(),
            blocks(&file),
        );
        // What lies beyond the region is left alone.
        let region = 10 << 20;
        reader.enter(file.as_fd(), region, || true);
        assert_eq!(blocks(&file), before);
        let touch = |range: std::ops::Range<usize>| {
            let before = faults();
            for offset in range.step_by(page_bytes()) {
                // SAFETY: within the mapping.
                unsafe { reader.as_ptr().add(offset).read_volatile() };
            }
            faults() - before
        };
        assert!(touch(made.start..region) < 8, "entered pages were entered again");
        assert!(touch(region..made.end) >= 8, "what lies beyond was entered");
    }
}
