//! Descriptors that a forked child does not keep.
//!
//! Linux closes descriptors on exec, but not on fork, so there is a list of them, and the child goes through it. It does not close
//! them but puts something inert in their place: a number that was free could be given to a file of the child's, and whoever still
//! remembered it would read, write or close that file.

use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Origin;

/// Descriptors have small numbers: the lowest that is free. Greater ones than these are not listed, and stay with the child.
const LISTED_MAX: usize = 1 << 20;
/// One bit a descriptor.
static LISTED: [AtomicU64; LISTED_MAX / 64] = [const { AtomicU64::new(0) }; LISTED_MAX / 64];
/// So many words of the list have ever been used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// What takes the place of a descriptor in a child: an event that never comes.
static INERT: AtomicI32 = AtomicI32::new(-1);

/// Threads that are opening or closing what is listed, and above them the forks under way. Neither goes on while the other does, so
/// that a child never has a descriptor that is not listed yet, or one that is listed and has become somebody else's.
static GATE: AtomicU64 = AtomicU64::new(0);
const FORK: u64 = 1 << 32;
/// How long a fork waits for threads that are opening or closing something, which takes microseconds. A handler of signals that forks may
/// have interrupted such a thread, and would wait for itself.
const STILL_MAX: Duration = Duration::from_secs(1);

/// A descriptor, or whatever has one, that no forked child keeps.
pub struct NotInherited<T: AsRawFd> {
    origin: Origin,
    held: ManuallyDrop<T>,
}

impl<T: AsRawFd> NotInherited<T> {
    /// Opens it such that no fork comes in between. `open` must not block, and must not open another one like this.
    pub fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<NotInherited<T>> {
        let origin = Origin::here();
        let _inside = Inside::enter();
        Ok(NotInherited::listed(origin, open()?))
    }

    /// For what could not be opened like that. A child of a fork that came before this has it.
    pub fn new(held: T) -> NotInherited<T> {
        let origin = Origin::here();
        let _inside = Inside::enter();
        NotInherited::listed(origin, held)
    }

    fn listed(origin: Origin, held: T) -> NotInherited<T> {
        list(held.as_raw_fd());
        NotInherited {
            origin,
            held: ManuallyDrop::new(held),
        }
    }
}

impl<T: AsRawFd> Drop for NotInherited<T> {
    fn drop(&mut self) {
        // In a child the number is not this one's any more.
        if self.origin.is_here() {
            let _inside = Inside::enter();
            unlist(self.held.as_raw_fd());
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.held) }
        }
    }
}

impl<T: AsRawFd> Deref for NotInherited<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.held
    }
}

impl<T: AsRawFd + AsFd> AsFd for NotInherited<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.held.as_fd()
    }
}

impl<T: AsRawFd> AsRawFd for NotInherited<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.held.as_raw_fd()
    }
}

impl<T: AsRawFd + fmt::Debug> fmt::Debug for NotInherited<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.held.fmt(f)
    }
}

/// A thread that opens or closes what is listed. No fork happens meanwhile.
struct Inside;

impl Inside {
    fn enter() -> Inside {
        loop {
            let gate = GATE.load(Ordering::Relaxed);
            let free = gate < FORK;
            if free
                && GATE
                    .compare_exchange_weak(gate, gate + 1, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return Inside;
            }
            if !free {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        GATE.fetch_sub(1, Ordering::Release);
    }
}

/// Before a fork: waits until nobody opens or closes anything, and keeps all from beginning to.
pub(super) fn stand_still() {
    GATE.fetch_add(FORK, Ordering::AcqRel);
    let began = Instant::now();
    while GATE.load(Ordering::Acquire) & (FORK - 1) != 0 && began.elapsed() < STILL_MAX {
        std::thread::yield_now();
    }
}

/// After it, in the parent.
pub(super) fn go_on() {
    GATE.fetch_sub(FORK, Ordering::Release);
}

/// After it, in the child: lets go of everything that is listed.
pub(super) fn leave() {
    let inert = INERT.load(Ordering::Acquire);
    for (index, word) in LISTED.iter().enumerate().take(USED.load(Ordering::Acquire)) {
        let mut bits = word.swap(0, Ordering::AcqRel);
        while bits != 0 {
            let fd = (index * 64) as i32 + bits.trailing_zeros() as i32;
            bits &= bits - 1;
            // SAFETY: plain calls on the number of a descriptor that is the parent's: nobody in this process uses it, because its owner
            // knows that it belongs to another one.
            unsafe {
                if inert < 0 || libc::dup3(inert, fd, libc::O_CLOEXEC) < 0 {
                    libc::close(fd);
                }
            }
        }
    }
    GATE.store(0, Ordering::Release);
}

fn list(fd: RawFd) {
    let Some((word, bit)) = place(fd) else { return };
    if INERT.load(Ordering::Acquire) < 0 {
        make_inert();
    }
    USED.fetch_max(word + 1, Ordering::AcqRel);
    LISTED[word].fetch_or(bit, Ordering::AcqRel);
}

fn unlist(fd: RawFd) {
    if let Some((word, bit)) = place(fd) {
        LISTED[word].fetch_and(!bit, Ordering::AcqRel);
    }
}

fn place(fd: RawFd) -> Option<(usize, u64)> {
    let fd = usize::try_from(fd).ok().filter(|&fd| fd < LISTED_MAX)?;
    Some((fd / 64, 1 << (fd % 64)))
}

fn make_inert() {
    // SAFETY: a plain call; where no descriptor is left, children close what is listed instead.
    let new = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if new >= 0
        && INERT
            .compare_exchange(-1, new, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
    {
        // SAFETY: fresh, and nobody else has seen it.
        unsafe { libc::close(new) };
    }
}
