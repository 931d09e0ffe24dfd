//! Memory that may vanish while it is registered: mapped from a file that somebody makes shorter.
//!
//! Who touches a page that its file does not have any more is killed by a signal. The kernel, asked to copy on somebody's behalf, says
//! instead that there is no memory at the address. So memory that was mapped from such a file is copied by the kernel, within
//! this process; and which memory that is, is looked up when it is registered.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use super::page_bytes;
use crate::copy::copy_cached;
use crate::fork::{NotInherited, PerProcess};

/// How much of a range is looked at in one step.
const STEP_BYTES: usize = 1 << 20;

/// Copies bytes that may not be there on either side. `false`: some of them are not, and some may have been copied.
///
/// # Safety
/// As for [`copy_cached`], but that the pages on either side may have vanished.
pub(crate) unsafe fn copy_checked(to: *mut u8, from: *const u8, len: usize) -> bool {
    let mut done = 0;
    while done < len && KERNEL_COPIES.load(Ordering::Relaxed) {
        let near = iovec(to.wrapping_add(done), len - done);
        let far = iovec(from.wrapping_add(done).cast_mut(), len - done);
        // SAFETY: the kernel checks both sides, which are the caller's.
        match unsafe { libc::process_vm_readv(own_number(), &near, 1, &far, 1, 0) } {
            copied @ 1.. => done += copied as usize,
            0 => return false,
            _ => match last_errno() {
                libc::EINTR => {}
                libc::EPERM | libc::ENOSYS => KERNEL_COPIES.store(false, Ordering::Relaxed),
                _ => return false,
            },
        }
    }
    // SAFETY: the caller's promise. That nothing has vanished cannot be known where the kernel may not be asked.
    unsafe { copy_cached(to.wrapping_add(done), from.wrapping_add(done), len - done) };
    true
}

/// Whether all pages of a range are there now.
pub(crate) fn are_there(range: Range<usize>) -> bool {
    let page = page_bytes();
    let mut at = range.start;
    while at < range.end && KERNEL_COPIES.load(Ordering::Relaxed) {
        // One byte a page, of many pages in one call.
        let end = range.end.min(at.saturating_add(STEP_BYTES) & !(page - 1)).max(at + 1);
        let starts = std::iter::once(at).chain((at & !(page - 1)..end).step_by(page).skip(1));
        let far: Vec<libc::iovec> = starts.map(|start| iovec(start as *mut u8, 1)).collect();
        let mut bytes = vec![0u8; far.len()];
        let near = iovec(bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the buffer has a byte for each page; the kernel checks the pages.
        let read = unsafe { libc::process_vm_readv(own_number(), &near, 1, far.as_ptr(), far.len() as u64, 0) };
        match usize::try_from(read) {
            Ok(read) if read == far.len() => at = end,
            Ok(_) => return false,
            Err(_) => match last_errno() {
                libc::EINTR => {}
                libc::EPERM | libc::ENOSYS => KERNEL_COPIES.store(false, Ordering::Relaxed),
                _ => return false,
            },
        }
    }
    true
}

/// Whether the kernel copies within this process, which only a filter of system calls forbids.
static KERNEL_COPIES: AtomicBool = AtomicBool::new(true);

/// Whether some of the range was mapped from a file that may become shorter.
pub(super) fn is_of_file(range: Range<usize>) -> bool {
    if range.is_empty() || all_anonymous(&range) {
        return false;
    }
    // That costs as much as the process has mappings, which may be thousands.
    let Ok(maps) = File::open("/proc/self/maps") else {
        return false;
    };
    let mut lines = BufReader::new(maps).lines().map_while(Result::ok);
    lines.any(|line| maps_file(&line).is_some_and(|of_file| of_file.start < range.end && range.start < of_file.end))
}

/// Whether the kernel says of the first and the last page that they belong to no file: the quick answer for almost all memory.
///
/// A private mapping of a file of which just these two have been written to is taken for memory of no file.
fn all_anonymous(range: &Range<usize>) -> bool {
    // Opened once: it is asked whenever memory is registered.
    static PAGES: PerProcess<Option<NotInherited<File>>> = PerProcess::new();
    let opened = || NotInherited::open(|| File::open("/proc/self/pagemap")).ok();
    let Some(pages) = PAGES.get_or_make(opened) else {
        return false;
    };
    let (first, last) = (range.start, range.end - 1);
    is_anonymous(pages, first) && (first / page_bytes() == last / page_bytes() || is_anonymous(pages, last))
}

fn is_anonymous(pages: &File, address: usize) -> bool {
    const PRESENT: u64 = 1 << 63;
    const OF_FILE: u64 = 1 << 61;
    let entry = || {
        let mut entry = [0; 8];
        let at = (address / page_bytes()) as u64 * 8;
        let found = pages.read_exact_at(&mut entry, at);
        found.map_or(0, |()| u64::from_ne_bytes(entry))
    };
    let mut found = entry();
    if found & PRESENT == 0 {
        // A page that has not been touched is in no table.
        are_there(address..address + 1);
        found = entry();
    }
    found & PRESENT != 0 && found & OF_FILE == 0
}

/// The addresses of a line of the kernel's list, if they are mapped from a file that may become shorter.
fn maps_file(line: &str) -> Option<Range<usize>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let inode = fields.nth(3)?;
    let path = fields.next().unwrap_or_default();
    // Memory that several processes share without a file has a name too, and devices have no size to lose. Weft's own files are sealed.
    let device = path.starts_with("/dev/") && !path.starts_with("/dev/shm/") && !path.starts_with("/dev/hugepages/");
    let own = path == "/memfd:weft";
    let shared = path.starts_with("/SYSV");
    if inode == "0" || !path.starts_with('/') || device || own || shared {
        return None;
    }
    let address = |text| usize::from_str_radix(text, 16).ok();
    Some(address(start)?..address(end)?)
}

fn iovec(start: *mut u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: start.cast(),
        iov_len: len,
    }
}

pub(crate) fn own_number() -> libc::pid_t {
    // SAFETY: no preconditions; it cannot fail.
    unsafe { libc::getpid() }
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::{Mapping, Protection, memory_file};
    use super::*;

    fn range(start: *const u8, len: usize) -> Range<usize> {
        start as usize..start as usize + len
    }

    #[test]
    fn memory_of_files_is_told_from_all_other() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 10).unwrap();
        let mapped = Mapping::new(file.as_fd(), 64 << 10, Protection::ReadWrite).unwrap();
        assert!(is_of_file(range(mapped.as_ptr(), 64 << 10)));
        assert!(is_of_file(range(mapped.as_ptr().wrapping_add(5000), 10)));
        let heap = vec![7u8; 1 << 20];
        assert!(!is_of_file(range(heap.as_ptr(), heap.len())));
        let untouched: Vec<u8> = vec![0; 64 << 20];
        assert!(!is_of_file(range(untouched.as_ptr(), untouched.len())));
        assert!(!is_of_file(range(heap.as_ptr(), 0)));
        // A file in memory that nobody has sealed may become shorter like any other, and Weft's own may not.
        let unsealed = memory_file(c"somebodys", 4096, page_bytes(), 0).unwrap();
        let mapped = Mapping::new(unsealed.as_fd(), 4096, Protection::ReadWrite).unwrap();
        assert!(is_of_file(range(mapped.as_ptr(), 4096)));
        let own = super::super::HostMemory::allocate(4096, Default::default()).unwrap();
        assert!(!is_of_file(range(own.as_ptr(), 4096)));
    }

    #[test]
    fn lines_of_the_kernels_list_are_understood() {
        let of = |rest: &str| maps_file(&format!("7f00-8f00 rw-p 00000000 fe:00 {rest}"));
        assert_eq!(of("1234 /data/model file (deleted)"), Some(0x7f00..0x8f00));
        assert_eq!(of("12 /dev/shm/psm_1"), Some(0x7f00..0x8f00));
        assert_eq!(of("12 /memfd:other (deleted)"), Some(0x7f00..0x8f00));
        for none in [
            "0",
            "0 [heap]",
            "12 /memfd:weft (deleted)",
            "12 /dev/zero (deleted)",
            "99 /dev/nvidia0",
            "3 /SYSV00000000 (deleted)",
            "3 anon_inode:[io_uring]",
        ] {
            assert_eq!(of(none), None, "{none}");
        }
        assert_eq!(maps_file(""), None);
        assert_eq!(maps_file("garbage 1 2 3 4 /x"), None);
    }

    #[test]
    fn what_has_vanished_is_neither_copied_nor_touched() {
        let page = page_bytes();
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * page as u64).unwrap();
        let mapped = Mapping::new(file.as_fd(), 4 * page, Protection::ReadWrite).unwrap();
        let start = mapped.as_ptr();
        let mut bytes = vec![9u8; 4 * page];
        // SAFETY: four pages on either side.
        assert!(unsafe { copy_checked(start, bytes.as_ptr(), 4 * page) });
        assert!(are_there(range(start, 4 * page)));
        file.set_len(page as u64 + 10).unwrap();
        // The page in which the file ends is there to its end.
        assert!(are_there(range(start, 2 * page)) && !are_there(range(start, 2 * page + 1)));
        assert!(!are_there(range(start.wrapping_add(3 * page), 1)));
        for first in [0, page, 2 * page] {
            let len = 4 * page - first;
            // SAFETY: within both, as far as they are there.
            unsafe {
                assert!(!copy_checked(bytes.as_mut_ptr(), start.add(first), len));
                assert!(!copy_checked(start.add(first), bytes.as_ptr(), len));
            }
        }
        // SAFETY: as above.
        assert!(unsafe { copy_checked(bytes.as_mut_ptr(), start, 2 * page) });
        assert_eq!((bytes[page + 9], bytes[page + 10]), (9, 0));
    }
}
