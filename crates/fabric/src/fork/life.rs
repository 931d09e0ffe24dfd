//! Which process this is, at the price of a load.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use super::{Forked, descriptors};
use crate::memory::page_bytes;

/// Nobody has asked yet in this process.
const UNASKED: u64 = 0;
/// A thread is about to give the process its number.
const BEING_NUMBERED: u64 = u64::MAX;

/// The number of this process, on a page that is empty in every forked child, however it was forked.
static NUMBER: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// Where there is no such page. Then it is the handler of forks alone that empties it.
static WITHOUT_A_PAGE: AtomicU64 = AtomicU64::new(UNASKED);
/// The last number that this process or one of its forebears has had. A child's is greater, so that none is met twice.
static LAST: AtomicU64 = AtomicU64::new(0);
/// This is a child that has let go of its parent's descriptors, and has no number yet.
static LEFT: AtomicBool = AtomicBool::new(false);

/// The process that made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(u64);

impl Origin {
    pub fn here() -> Origin {
        match number().load(Ordering::Acquire) {
            UNASKED | BEING_NUMBERED => Origin(number_this_process()),
            number => Origin(number),
        }
    }

    /// Whether this is still that process, and not a child of it.
    pub fn is_here(self) -> bool {
        number().load(Ordering::Relaxed) == self.0
    }

    pub fn check(self) -> Result<(), Forked> {
        if self.is_here() { Ok(()) } else { Err(Forked) }
    }
}

fn number() -> &'static AtomicU64 {
    // SAFETY: null, or a page that is never unmapped.
    unsafe { NUMBER.load(Ordering::Acquire).as_ref() }.unwrap_or_else(make_page)
}

#[cold]
fn make_page() -> &'static AtomicU64 {
    watch_forks();
    let bytes = page_bytes();
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing that exists, and its pages are empty words.
    let page = unsafe {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let page = libc::mmap(
            ptr::null_mut(),
            bytes,
            prot,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if page != libc::MAP_FAILED {
            libc::madvise(page, bytes, libc::MADV_WIPEONFORK);
        }
        page
    };
    let new: *mut AtomicU64 = match page {
        libc::MAP_FAILED => ptr::from_ref(&WITHOUT_A_PAGE).cast_mut(),
        page => page.cast(),
    };
    match NUMBER.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: a static, or a page that is never unmapped from here on.
        Ok(_) => unsafe { &*new },
        Err(first) => {
            if page != libc::MAP_FAILED {
                // SAFETY: nobody else has seen this page.
                unsafe { libc::munmap(page, bytes) };
            }
            // SAFETY: what another thread has made stays.
            unsafe { &*first }
        }
    }
}

/// Gives this process a number that no forebear has had, or waits for the thread that does.
#[cold]
fn number_this_process() -> u64 {
    let number = number();
    loop {
        let found = number.compare_exchange(UNASKED, BEING_NUMBERED, Ordering::AcqRel, Ordering::Acquire);
        match found {
            Ok(_) => {
                let last = LAST.fetch_add(1, Ordering::Relaxed);
                // A child whose making ran no handler has its parent's descriptors until now.
                if !LEFT.swap(false, Ordering::AcqRel) && last > 0 {
                    descriptors::leave();
                }
                let own = last + 1;
                number.store(own, Ordering::Release);
                return own;
            }
            Err(BEING_NUMBERED) => std::thread::yield_now(),
            Err(own) => return own,
        }
    }
}

/// Has the C library call us around every fork. Twice does no harm, and so no lock is needed.
fn watch_forks() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" {
        fn pthread_atfork(
            prepare: Option<unsafe extern "C" fn()>,
            parent: Option<unsafe extern "C" fn()>,
            child: Option<unsafe extern "C" fn()>,
        ) -> libc::c_int;
    }
    if !WATCHED.load(Ordering::Acquire) {
        // SAFETY: the handlers live as long as the program, and do only what is allowed between a fork and the next exec. Without
        // memory for them the page alone has to do.
        unsafe { pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
        WATCHED.store(true, Ordering::Release);
    }
}

unsafe extern "C" fn before_fork() {
    descriptors::stand_still();
}

unsafe extern "C" fn after_fork_in_parent() {
    descriptors::go_on();
}

/// Other threads may have held any lock when they ceased to be: here is nothing but system calls and atomic words.
unsafe extern "C" fn after_fork_in_child() {
    // SAFETY: null, or a page that is never unmapped.
    if let Some(number) = unsafe { NUMBER.load(Ordering::Acquire).as_ref() } {
        number.store(UNASKED, Ordering::Release);
    }
    descriptors::leave();
    LEFT.store(true, Ordering::Release);
}
