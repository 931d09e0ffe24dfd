//! What a machine offers to whoever spills to files, for `weft doctor`.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::kernel::NoRing;
use super::place::{Alignment, Direct, FileError, FileMemory, FileOptions, NoDirect};
use super::ring::Ring;
use std::os::fd::AsFd;

/// What the kernel offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Support {
    /// Why files are reached by a thread, where they are.
    pub no_ring: Option<NoRing>,
    /// What may be locked, which limits what can be registered with the ring; none where there is no limit.
    pub lock_limit: Option<u64>,
}

/// What a directory offers.
#[derive(Debug)]
#[non_exhaustive]
pub struct DirectorySupport {
    /// What goes past the page cache must be aligned to, or why nothing does.
    pub direct: Result<Alignment, NoDirect>,
    /// Room for this user.
    pub free_bytes: u64,
    pub total_bytes: u64,
    /// Why nothing can be written there, where nothing can.
    pub unwritable: Option<FileError>,
}

impl Support {
    /// Makes a ring, tries it out, and throws it away.
    pub fn probe() -> Support {
        let event = crate::bell::silent();
        let ring = event
            .map_err(|_| NoRing::Descriptors)
            .and_then(|event| Ring::start(8, event.as_fd()));
        Support {
            no_ring: ring.err(),
            lock_limit: lock_limit(),
        }
    }
}

impl DirectorySupport {
    /// Writes a little file there, and removes it.
    pub fn probe(directory: &Path) -> io::Result<DirectorySupport> {
        let name = CString::new(directory.as_os_str().as_bytes())?;
        // SAFETY: a structure of plain numbers, for which zero is a value.
        let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: a name that ends in zero, and a structure that is valid for writes.
        if unsafe { libc::statvfs(name.as_ptr(), &mut found) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
        let total_bytes = found.f_blocks.saturating_mul(found.f_frsize);
        // It never takes its name, and goes with its handle.
        let options = FileOptions::sized(1 << 16).replace(true).direct(Direct::Auto);
        let (direct, unwritable) = match FileMemory::open(directory.join("weft-doctor"), options) {
            Ok(file) => (
                file.alignment().ok_or(file.no_direct().unwrap_or(NoDirect::FileSystem)),
                None,
            ),
            Err(error) => (Err(NoDirect::FileSystem), Some(error)),
        };
        Ok(DirectorySupport {
            direct,
            free_bytes,
            total_bytes,
            unwritable,
        })
    }
}

fn lock_limit() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a structure that is valid for writes.
    let told = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    (told == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
