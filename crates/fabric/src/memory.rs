//! Host memory that transports can move: allocated so that peers can map it, or borrowed from whoever owns it.
//!
//! [`HostMemory`] is the type behind [`Memory`] that vouches for an address. No reference to its bytes is ever formed, because
//! a peer, a helper thread or the application may change them at any moment; all access is by raw copies.
//!
//! ```
//! use weft_fabric::memory::{AllocateOptions, HostMemory};
//! use weft_protocol::HostBytes;
//! let memory = HostMemory::allocate(8192, AllocateOptions::default())?;
//! memory.write(4096, b"paged");
//! let mut back = [0; 5];
//! memory.read(4096, &mut back);
//! assert_eq!(&back, b"paged");
//! # Ok::<(), weft_fabric::memory::MemoryError>(())
//! ```

mod dma_buf;
mod mapping;
mod seen;
mod vanishing;

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;
use weft_protocol::atomic::WORD_BYTES;
use weft_protocol::memory::Digest;
use weft_protocol::{AtomicAct, HostBytes, Memory, Refusal};

use crate::copy::{self, copy_cached};
use crate::fork::NotInherited;

pub use dma_buf::DmaBufMemory;
#[cfg(test)]
pub(crate) use dma_buf::udmabuf;
pub(crate) use mapping::{
    Mapping, Protection, file_bytes, is_shared_memory, memory_file, page_bytes, seal, sealed_bytes,
};
pub use seen::Seen;
pub(crate) use vanishing::{copy_checked, own_number};

/// Host memory with a stable address for as long as the value lives.
pub struct HostMemory {
    ptr: NonNull<u8>,
    len: usize,
    numa: Option<u32>,
    backing: Backing,
    /// Once it has been looked up.
    of_file: OnceLock<bool>,
}

enum Backing {
    /// A sealed memfd and our mapping of it. The mapping goes before the descriptor.
    Shared {
        _mapping: Mapping,
        file: NotInherited<OwnedFd>,
    },
    /// Reserved huge pages. Nobody else has them: one who did could take them away from whoever touches them.
    Reserved { _mapping: Mapping },
    /// Somebody else's memory, alive as long as its owner is.
    Foreign { _owner: Box<dyn Any + Send + Sync> },
}

// SAFETY: the memory has no thread affinity, its owner is Send, and all access is by raw copies without references.
unsafe impl Send for HostMemory {}
// SAFETY: as above; concurrent copies may tear bytes, which the protocol expects of memory that peers write, but form no reference.
unsafe impl Sync for HostMemory {}

/// How to allocate. The default is ordinary pages, touched when first used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocateOptions {
    pub huge_pages: HugePages,
    /// Touch every page now, so that the first transfer pays for none.
    pub prefault: bool,
    /// Prefer the memory of this node.
    pub numa: Option<u32>,
    /// Forked children have no copy of the mapping, and find nothing at its address. Otherwise they share its pages.
    pub not_inherited: bool,
}

/// Whether to ask for large pages. Asking never fails: where there are none, ordinary pages are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    #[default]
    Never,
    /// Transparent ones, if the kernel gives them.
    Transparent,
    /// Reserved ones if there are enough, else transparent ones. Peers cannot map reserved pages, and reach such memory like foreign memory.
    Reserved,
}

/// Why there is no memory: fix the call, or free some.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    #[error("{len} bytes are more than an address space holds")]
    TooLarge { len: u64 },
    #[error("{step} of {len} bytes failed: {source}")]
    System {
        step: &'static str,
        len: usize,
        source: io::Error,
    },
}

const HUGE_PAGE_BYTES: usize = 2 << 20;

impl HostMemory {
    /// Zeroed memory that peers on this host can map, unless it is of reserved huge pages.
    ///
    /// The file behind it is sealed against growing and shrinking, so that a mapping of it raises SIGBUS only where the system is out of
    /// memory.
    pub fn allocate(len: usize, options: AllocateOptions) -> Result<HostMemory, MemoryError> {
        let huge = options.huge_pages != HugePages::Never && len >= HUGE_PAGE_BYTES;
        let reserved = (huge && options.huge_pages == HugePages::Reserved).then(|| reserve_huge(len).ok());
        let (file, mapping) = match reserved.flatten() {
            Some(mapping) => (None, mapping),
            None => {
                let file = memory_file(c"weft", len, page_bytes(), 0)?;
                seal(&file, 0)?;
                let mapping = Mapping::new(file.as_fd(), file_bytes(len, page_bytes())?, Protection::ReadWrite)?;
                if huge {
                    mapping.advise(libc::MADV_HUGEPAGE);
                }
                (Some(file), mapping)
            }
        };
        if options.not_inherited {
            mapping.keep_from_children();
        }
        if let Some(node) = options.numa {
            mapping.prefer_node(node)?;
        }
        if options.prefault && !mapping.advise(libc::MADV_POPULATE_WRITE) {
            mapping.touch();
        }
        Ok(HostMemory {
            ptr: mapping.non_null(),
            len,
            numa: options.numa,
            backing: match file {
                Some(file) => Backing::Shared {
                    _mapping: mapping,
                    file: NotInherited::new(file),
                },
                None => Backing::Reserved { _mapping: mapping },
            },
            of_file: OnceLock::from(false),
        })
    }

    /// Memory that was allocated elsewhere: by malloc, NumPy, torch. Peers reach it by copying system calls, not by mapping.
    ///
    /// # Safety
    /// `ptr` must be valid for reads and writes of `len` bytes until `owner` is dropped, and nobody may hold a Rust reference
    /// to those bytes while a transfer that uses them is under way.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, owner: Box<dyn Any + Send + Sync>) -> HostMemory {
        assert!(len == 0 || !ptr.is_null(), "a null pointer holds no bytes");
        assert!(
            isize::try_from(len).is_ok() && (ptr as usize).checked_add(len).is_some(),
            "memory that wraps around"
        );
        HostMemory {
            ptr: NonNull::new(ptr).unwrap_or(NonNull::dangling()),
            len,
            numa: None,
            backing: Backing::Foreign { _owner: owner },
            of_file: OnceLock::new(),
        }
    }

    /// A vector's bytes as foreign memory.
    pub fn from_vec(bytes: Vec<u8>) -> HostMemory {
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        let (ptr, len, capacity) = (bytes.as_mut_ptr(), bytes.len(), bytes.capacity());
        // SAFETY: the vector gave its buffer away; VecBuffer frees it when the memory is dropped, and nobody else knows it.
        unsafe { HostMemory::from_raw(ptr, len, Box::new(VecBuffer { ptr, capacity })) }
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The node that the memory was asked for on.
    pub fn numa(&self) -> Option<u32> {
        self.numa
    }

    /// The file that peers can map, where Weft allocated the memory.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.backing {
            Backing::Shared { file, .. } => Some(file.as_fd()),
            Backing::Reserved { .. } | Backing::Foreign { .. } => None,
        }
    }

    /// Looks up whether the memory was mapped from a file that may become shorter, and is from then on handled with care. For memory that
    /// is registered; what is not known to be of a file is touched like any other.
    pub(crate) fn look_up_file(&self) {
        let start = self.as_ptr() as usize;
        self.of_file
            .get_or_init(|| vanishing::is_of_file(start..start + self.len));
    }

    /// Whether pages of it may vanish.
    pub(crate) fn may_vanish(&self) -> bool {
        self.of_file.get().copied().unwrap_or(false)
    }

    /// Whether bytes of it, which lie within it, are there now.
    pub(crate) fn is_there(&self, offset: u64, len: u64) -> bool {
        let start = self.at(offset, len as usize) as usize;
        vanishing::are_there(start..start + len as usize)
    }

    /// Copies bytes out, unless they turn out to have vanished.
    ///
    /// # Safety
    /// `into` must be valid for writes of `len` bytes.
    pub(crate) unsafe fn take(&self, offset: u64, into: *mut u8, len: usize) -> Result<(), Refusal> {
        // SAFETY: `at` checked the bounds here; there they are the caller's.
        unsafe { self.copy(into, self.at(offset, len), len) }
    }

    /// Copies bytes in, unless their place turns out to have vanished.
    ///
    /// # Safety
    /// `from` must be valid for reads of `len` bytes.
    pub(crate) unsafe fn put(&self, offset: u64, from: *const u8, len: usize) -> Result<(), Refusal> {
        // SAFETY: `at` checked the bounds here; there they are the caller's.
        unsafe { self.copy(self.at(offset, len), from, len) }
    }

    /// # Safety
    /// As for `copy_cached`, but that those of the two which lie in this memory may have vanished where it is known that they may.
    unsafe fn copy(&self, to: *mut u8, from: *const u8, len: usize) -> Result<(), Refusal> {
        if !self.may_vanish() {
            // SAFETY: the caller's promise.
            unsafe { copy_cached(to, from, len) };
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let there = unsafe { copy_checked(to, from, len) };
        there.then_some(()).ok_or(Refusal::NoMemory)
    }

    /// A descriptor to hand to a peer: one that cannot be written through, unless `writable`. `None` for foreign memory, and
    /// where no descriptor is left.
    pub(crate) fn file_for(&self, writable: bool) -> Option<OwnedFd> {
        let file = self.file()?;
        if writable {
            return file.try_clone_to_owned().ok();
        }
        let opened = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        opened.ok().map(OwnedFd::from)
    }

    /// What the little-endian word at `offset` holds, read in one piece. It writes nothing, so read-only memory will do.
    ///
    /// # Panics
    /// Where the word lies outside the memory.
    pub fn read_word(&self, offset: u64) -> Result<u64, Refusal> {
        // SAFETY: `at` checked the bounds, and the memory lives as long as `self`.
        let word = unsafe { word_at(self.at(offset, WORD_BYTES as usize)) }?;
        Ok(u64::from_le(word.load(Ordering::SeqCst)))
    }

    /// Stores a little-endian word in one piece, after everything that this thread has written before.
    ///
    /// # Panics
    /// Where the word lies outside the memory.
    pub fn write_word(&self, offset: u64, value: u64) -> Result<(), Refusal> {
        // SAFETY: `at` checked the bounds, and the memory lives as long as `self`.
        let word = unsafe { word_at(self.at(offset, WORD_BYTES as usize)) }?;
        word.store(value.to_le(), Ordering::Release);
        Ok(())
    }

    /// Copies bytes of another memory into this one, and takes up those that it has copied into a checksum. Refused where they, or their place, turn out to
    /// have vanished.
    ///
    /// # Panics
    /// Where the bytes lie outside either memory.
    pub fn copy_in(
        &self,
        offset: u64,
        from: &HostMemory,
        at: u64,
        len: usize,
        digest: &mut Digest,
    ) -> Result<(), Refusal> {
        let (to, source) = (self.at(offset, len), from.at(at, len));
        if !self.may_vanish() && !from.may_vanish() {
            let past_cache = len >= copy::STREAM_MIN_BYTES;
            // SAFETY: `at` checked the bounds of both, and both live as long as this call.
            unsafe { copy::copy_summed(to, source, len, past_cache, digest) };
            return Ok(());
        }
        let mut part = [0u8; 16 << 10];
        for start in (0..len).step_by(part.len()) {
            let bytes = (len - start).min(part.len());
            // SAFETY: the buffer is no shorter.
            unsafe { from.take(at + start as u64, part.as_mut_ptr(), bytes) }?;
            digest.update(&part[..bytes]);
            // SAFETY: as much of the buffer as was filled.
            unsafe { self.put(offset + start as u64, part.as_ptr(), bytes) }?;
        }
        Ok(())
    }

    /// All bytes, copied. For tests and tools; transfers never need it.
    pub fn snapshot(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.read(0, &mut bytes);
        bytes
    }

    fn at(&self, offset: u64, len: usize) -> *mut u8 {
        let end = offset.checked_add(len as u64).expect("an offset that wraps around");
        assert!(
            end <= self.len as u64,
            "bytes {offset}..{end} of a memory of {}",
            self.len
        );
        // SAFETY: the offset is within the memory, as just checked.
        unsafe { self.as_ptr().add(offset as usize) }
    }
}

impl Memory for HostMemory {
    fn len(&self) -> u64 {
        self.len as u64
    }
    fn host(&self) -> Option<&dyn HostBytes> {
        Some(self)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl HostBytes for HostMemory {
    fn read(&self, offset: u64, into: &mut [u8]) {
        // SAFETY: `at` checked the bounds; `into` is a unique borrow of memory that is not ours, so they do not overlap.
        unsafe { copy_cached(into.as_mut_ptr(), self.at(offset, into.len()), into.len()) }
    }
    fn write(&self, offset: u64, from: &[u8]) {
        // SAFETY: `at` checked the bounds. `copy_cached` tolerates overlap.
        unsafe { copy_cached(self.at(offset, from.len()), from.as_ptr(), from.len()) }
    }
    fn digest(&self, offset: u64, len: u64, digest: &mut Digest) -> Result<(), Refusal> {
        if !self.may_vanish() {
            // SAFETY: `at` checked the bounds, and the memory lives as long as `self`.
            unsafe { copy::sum(self.at(offset, len as usize), len as usize, digest) };
            return Ok(());
        }
        let mut part = [0u8; 16 << 10];
        for start in (offset..offset + len).step_by(part.len()) {
            let bytes = (offset + len - start).min(part.len() as u64) as usize;
            // SAFETY: the buffer is no shorter.
            unsafe { self.take(start, part.as_mut_ptr(), bytes) }?;
            digest.update(&part[..bytes]);
        }
        Ok(())
    }
    fn atomic(&self, offset: u64, act: AtomicAct) -> Result<u64, Refusal> {
        let word = self.at(offset, WORD_BYTES as usize);
        // As well as can be: no instruction asks first.
        if self.may_vanish() && !self.is_there(offset, WORD_BYTES) {
            return Err(Refusal::NoMemory);
        }
        // SAFETY: `at` checked the bounds, and the memory lives as long as `self`.
        unsafe { word_atomic(word, act) }
    }
}

/// Carries out an atomic operation on a little-endian word, by one instruction of this CPU.
///
/// # Safety
/// `word` must be valid for reads and writes of eight bytes. Others may change them at the same time: atomically, or by the raw
/// copies of a transfer, which tear against it as they do against each other.
pub(crate) unsafe fn word_atomic(word: *mut u8, act: AtomicAct) -> Result<u64, Refusal> {
    // SAFETY: valid, as the caller vouches.
    let word = unsafe { word_at(word) }?;
    let before = match act {
        AtomicAct::FetchAdd(value) if cfg!(target_endian = "little") => word.fetch_add(value, Ordering::SeqCst),
        act => {
            let update = |before| act.after(u64::from_le(before)).map(u64::to_le);
            match word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, update) {
                Ok(before) | Err(before) => before,
            }
        }
    };
    Ok(u64::from_le(before))
}

/// A word of memory that others may change, where its address allows.
///
/// # Safety
/// `word` must be valid for reads of eight bytes while the result lives, and for writes where it is written through.
unsafe fn word_at<'a>(word: *mut u8) -> Result<&'a AtomicU64, Refusal> {
    if !word.addr().is_multiple_of(WORD_BYTES as usize) {
        return Err(Refusal::Misaligned);
    }
    // SAFETY: aligned, as just checked, and valid, as the caller vouches; nobody holds a reference to memory that peers touch.
    Ok(unsafe { AtomicU64::from_ptr(word.cast()) })
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.backing {
            Backing::Shared { .. } => "shared",
            Backing::Reserved { .. } => "huge",
            Backing::Foreign { .. } => "foreign",
        };
        write!(f, "HostMemory({kind}, {} bytes at {:p})", self.len, self.ptr)
    }
}

/// The buffer of a vector that was taken apart.
struct VecBuffer {
    ptr: *mut u8,
    capacity: usize,
}

// SAFETY: a unique owner of plain bytes.
unsafe impl Send for VecBuffer {}
// SAFETY: it offers no access at all.
unsafe impl Sync for VecBuffer {}

impl Drop for VecBuffer {
    fn drop(&mut self) {
        // SAFETY: pointer and capacity come from a Vec<u8> that was forgotten; a length of 0 is always valid.
        drop(unsafe { Vec::from_raw_parts(self.ptr, 0, self.capacity) });
    }
}

fn reserve_huge(len: usize) -> Result<Mapping, MemoryError> {
    let file = memory_file(
        c"weft-huge",
        len,
        HUGE_PAGE_BYTES,
        libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
    )?;
    seal(&file, 0)?;
    Mapping::new(file.as_fd(), file_bytes(len, HUGE_PAGE_BYTES)?, Protection::ReadWrite)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocated_memory_is_zeroed_sealed_and_keeps_what_is_written() {
        for options in [
            AllocateOptions::default(),
            AllocateOptions {
                huge_pages: HugePages::Transparent,
                prefault: true,
                ..AllocateOptions::default()
            },
        ] {
            let memory = HostMemory::allocate(3 << 20, options).unwrap();
            assert_eq!(memory.len(), 3 << 20);
            memory.write((3 << 20) - 4, b"tail");
            let bytes = memory.snapshot();
            assert!(bytes[..bytes.len() - 4].iter().all(|&b| b == 0));
            assert_eq!(&bytes[bytes.len() - 4..], b"tail");
            let file = memory.file().unwrap();
            // SAFETY: a plain call on an open descriptor.
            assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 0) }, -1);
        }
    }

    #[test]
    fn nothing_can_be_allocated_and_too_much_cannot() {
        assert!(
            HostMemory::allocate(0, AllocateOptions::default())
                .unwrap()
                .snapshot()
                .is_empty()
        );
        assert!(matches!(
            HostMemory::allocate(usize::MAX, AllocateOptions::default()),
            Err(MemoryError::TooLarge { .. })
        ));
        assert!(matches!(
            HostMemory::allocate(1 << 62, AllocateOptions::default()),
            Err(MemoryError::System { .. })
        ));
    }

    #[test]
    fn a_vector_is_foreign_memory_and_its_digest_is_that_of_its_bytes() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 31) as u8).collect();
        let memory = HostMemory::from_vec(bytes.clone());
        assert!(memory.file().is_none());
        assert_eq!(memory.snapshot(), bytes);
        let (mut near, mut far) = (Digest::default(), Digest::default());
        memory.digest(17, 90_000, &mut near).unwrap();
        far.update(&bytes[17..90_017]);
        assert_eq!(near.finish(), far.finish());
    }

    #[test]
    fn words_are_little_endian_and_where_the_address_allows() {
        let memory = HostMemory::allocate(64, AllocateOptions::default()).unwrap();
        memory.write(8, &0x0102_0304_0506_0708u64.to_le_bytes());
        assert_eq!(memory.read_word(8), Ok(0x0102_0304_0506_0708));
        assert_eq!(
            memory.atomic(8, AtomicAct::FetchAdd(u64::MAX)),
            Ok(0x0102_0304_0506_0708)
        );
        let swap = AtomicAct::CompareSwap { expected: 7, new: 1 };
        assert_eq!(memory.atomic(8, swap), Ok(0x0102_0304_0506_0707));
        assert_eq!(memory.snapshot()[8], 7);
        for offset in [1, 4, 7] {
            assert_eq!(memory.atomic(offset, AtomicAct::FetchAdd(1)), Err(Refusal::Misaligned));
            assert_eq!(memory.read_word(offset), Err(Refusal::Misaligned));
        }
        // It is the address that counts: foreign memory may begin anywhere.
        // SAFETY: bytes of a memory that its owner keeps alive, and that nobody holds a reference to.
        let shifted = unsafe { HostMemory::from_raw(memory.as_ptr().add(4), 32, Box::new(())) };
        assert_eq!(shifted.atomic(8, AtomicAct::FetchAdd(1)), Err(Refusal::Misaligned));
        assert_eq!(shifted.atomic(4, AtomicAct::FetchAdd(1)), Ok(0x0102_0304_0506_0707));
    }

    #[test]
    fn a_word_of_read_only_memory_can_be_read() {
        let writable = HostMemory::allocate(4096, AllocateOptions::default()).unwrap();
        writable.write(16, &77u64.to_le_bytes());
        let file = writable.file_for(false).unwrap();
        let mapping = Mapping::new(file.as_fd(), 4096, Protection::ReadOnly).unwrap();
        let start = mapping.as_ptr();
        // SAFETY: the mapping is the owner. It is only read, which is all that this memory is valid for.
        let memory = unsafe { HostMemory::from_raw(start, 4096, Box::new(mapping)) };
        assert_eq!(memory.read_word(16), Ok(77));
    }

    #[test]
    #[should_panic(expected = "of a memory of 10")]
    fn out_of_bounds_is_never_touched() {
        HostMemory::from_vec(vec![0; 10]).read(8, &mut [0; 3]);
    }
}
