//! Memory behind a dma-buf descriptor: what a device's driver exports, so that another device can reach it without the processor.
//!
//! Memory of a GPU that cannot be mapped is not this; what is here can be mapped, so that a transport without RDMA, and a checksum,
//! can go over its bytes as well.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use weft_protocol::memory::Digest;
use weft_protocol::{HostBytes, Memory, Refusal};

use super::{Mapping, MemoryError, Protection, page_bytes};
use crate::copy;

/// A mapped dma-buf, or a part of one.
pub struct DmaBufMemory {
    mapping: Mapping,
    len: usize,
    offset: u64,
    descriptor: OwnedFd,
}

impl DmaBufMemory {
    /// Maps `len` bytes of a dma-buf from `offset` on, which is a multiple of the page size.
    pub fn map(descriptor: OwnedFd, offset: u64, len: usize) -> Result<DmaBufMemory, MemoryError> {
        let refused = |step, source| MemoryError::System { step, len, source };
        // Also tells a dma-buf from any other file.
        sync(descriptor.as_fd(), CpuAccess::Begin).map_err(|source| refused("looking at a dma-buf", source))?;
        sync(descriptor.as_fd(), CpuAccess::End).map_err(|source| refused("looking at a dma-buf", source))?;
        // SAFETY: a plain call on an open descriptor; a dma-buf's end is its size, which never changes.
        let size = unsafe { libc::lseek(descriptor.as_raw_fd(), 0, libc::SEEK_END) };
        let size = u64::try_from(size).map_err(|_| refused("sizing a dma-buf", io::Error::last_os_error()))?;
        let end = offset.checked_add(len as u64).filter(|end| *end <= size);
        if len == 0 || end.is_none() || !offset.is_multiple_of(page_bytes() as u64) {
            return Err(refused(
                "mapping a part of a dma-buf",
                io::ErrorKind::InvalidInput.into(),
            ));
        }
        let mapping = Mapping::part(descriptor.as_fd(), offset, len, Protection::ReadWrite)?;
        Ok(DmaBufMemory {
            mapping,
            len,
            offset,
            descriptor,
        })
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// What a device's driver takes to reach the same bytes.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Where in the dma-buf the memory begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The processor's access, between the words to the exporter that it may need to keep caches and device in step.
    fn touch(&self, offset: u64, len: usize, act: impl FnOnce(*mut u8)) {
        let end = offset.checked_add(len as u64).expect("an offset that wraps around");
        assert!(
            end <= self.len as u64,
            "bytes {offset}..{end} of a memory of {}",
            self.len
        );
        // `map` saw that the exporter takes these words, and a memory has no means to report that it stopped doing so.
        let _ = sync(self.descriptor(), CpuAccess::Begin);
        // SAFETY: the offset is within the mapping, as just checked.
        act(unsafe { self.as_ptr().add(offset as usize) });
        let _ = sync(self.descriptor(), CpuAccess::End);
    }
}

impl Memory for DmaBufMemory {
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

impl HostBytes for DmaBufMemory {
    fn read(&self, offset: u64, into: &mut [u8]) {
        self.touch(offset, into.len(), |from| {
            // SAFETY: `touch` checked the bounds; `into` is a unique borrow of memory that is not ours.
            unsafe { ptr::copy(from, into.as_mut_ptr(), into.len()) }
        });
    }
    fn write(&self, offset: u64, from: &[u8]) {
        self.touch(offset, from.len(), |into| {
            // SAFETY: `touch` checked the bounds. `copy` tolerates overlap.
            unsafe { ptr::copy(from.as_ptr(), into, from.len()) }
        });
    }
    fn digest(&self, offset: u64, len: u64, digest: &mut Digest) -> Result<(), Refusal> {
        self.touch(offset, len as usize, |from| {
            // SAFETY: `touch` checked the bounds.
            unsafe { copy::sum(from, len as usize, digest) }
        });
        Ok(())
    }
}

impl fmt::Debug for DmaBufMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DmaBufMemory({} bytes at {:p})", self.len, self.as_ptr())
    }
}

#[derive(Clone, Copy)]
enum CpuAccess {
    Begin,
    End,
}

/// Tells the exporter that the processor begins or ends to touch the bytes.
fn sync(descriptor: BorrowedFd<'_>, access: CpuAccess) -> io::Result<()> {
    /// `_IOW('b', 0, struct dma_buf_sync)`
    const DMA_BUF_IOCTL_SYNC: libc::c_ulong = 0x4008_6200;
    const READ_WRITE: u64 = 3;
    const END: u64 = 1 << 2;
    let flags = match access {
        CpuAccess::Begin => READ_WRITE,
        CpuAccess::End => READ_WRITE | END,
    };
    loop {
        // SAFETY: the structure is one word of flags, and outlives the call.
        if unsafe { libc::ioctl(descriptor.as_raw_fd(), DMA_BUF_IOCTL_SYNC, &flags) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A dma-buf of ordinary pages, made by the kernel's udmabuf driver: for tests of what takes one.
#[cfg(test)]
pub(crate) fn udmabuf(len: usize) -> io::Result<DmaBufMemory> {
    use std::os::fd::FromRawFd;
    #[repr(C)]
    struct Create {
        memfd: u32,
        flags: u32,
        offset: u64,
        size: u64,
    }
    /// `_IOW('u', 0x42, struct udmabuf_create)`
    const UDMABUF_CREATE: libc::c_ulong = 0x4018_7542;
    let device = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/udmabuf")?;
    let file = super::memory_file(c"udmabuf", len, page_bytes(), 0).map_err(io::Error::other)?;
    super::seal(&file, 0).map_err(io::Error::other)?;
    let create = Create {
        memfd: file.as_raw_fd() as u32,
        flags: 1,
        offset: 0,
        size: len.next_multiple_of(page_bytes()) as u64,
    };
    // SAFETY: the structure outlives the call, and the answer is a descriptor or an error.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), UDMABUF_CREATE, &create) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
    DmaBufMemory::map(descriptor, 0, len).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_dma_buf_is_refused() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let error = DmaBufMemory::map(file.into(), 0, 4096).unwrap_err();
        assert!(
            matches!(
                error,
                MemoryError::System {
                    step: "looking at a dma-buf",
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    #[ignore = "needs /dev/udmabuf"]
    fn bytes_go_in_and_out_of_a_dma_buf_and_its_bounds_hold() {
        let memory = udmabuf(1 << 16).unwrap();
        memory.write(65_530, b"paged!");
        let mut back = [0; 6];
        memory.read(65_530, &mut back);
        assert_eq!(&back, b"paged!");
        let (mut near, mut far) = (Digest::default(), Digest::default());
        memory.digest(65_530, 6, &mut near).unwrap();
        far.update(b"paged!");
        assert_eq!(near.finish(), far.finish());
        for (offset, len) in [
            (0, 1 << 17),
            (100, 4096),
            (1 << 16, 4096),
            (0, 0),
            (u64::MAX - 4095, 4096),
        ] {
            let descriptor = memory.descriptor().try_clone_to_owned().unwrap();
            DmaBufMemory::map(descriptor, offset, len).unwrap_err();
        }
        let descriptor = memory.descriptor().try_clone_to_owned().unwrap();
        let part = DmaBufMemory::map(descriptor, 61_440, 4096).unwrap();
        part.read(4090, &mut back);
        assert_eq!(&back, b"paged!");
    }
}
