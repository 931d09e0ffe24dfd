//! What is shared, as this machine has it.

use std::io;
use std::mem::zeroed;
use std::sync::atomic::compiler_fence;
use std::time::Duration;

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
pub(crate) use std::thread;

/// The kernel waits for so many words at once.
const WORDS_MAX: usize = 128;
/// How long to sleep where the kernel cannot wait for several words.
const BLIND: Duration = Duration::from_millis(1);

/// Words in memory that several processes map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedWords(*mut u8);

// SAFETY: mapped memory belongs to the process, not to a thread.
unsafe impl Send for SharedWords {}
// SAFETY: words are atomic, and bytes are given out as raw pointers only.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Words from this address on, which is a multiple of eight.
    pub(crate) fn new(base: *mut u8) -> SharedWords {
        SharedWords(base)
    }

    /// The word that begins so many bytes after the first.
    ///
    /// # Safety
    /// It must be mapped for as long as the answer is used, `at` must be a multiple of eight, and nobody accesses these bytes as anything but this word. Where
    /// the mapping is read-only, the word is only loaded, and relaxed.
    #[inline(always)]
    pub(crate) unsafe fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the caller's promise.
        unsafe { AtomicU64::from_ptr(self.0.add(at).cast()) }
    }

    /// The same for a word of four bytes.
    ///
    /// # Safety
    /// As for [`word`](SharedWords::word), with a multiple of four.
    #[inline(always)]
    pub(crate) unsafe fn half(&self, at: usize) -> &AtomicU32 {
        // SAFETY: the caller's promise.
        unsafe { AtomicU32::from_ptr(self.0.add(at).cast()) }
    }

    /// Bytes beside the words that are about to be read. Whoever writes them has done so before it changed the word that says they are there.
    ///
    /// # Safety
    /// The place must be mapped.
    #[inline(always)]
    pub(crate) unsafe fn reading(&self, at: usize) -> Reading {
        // SAFETY: the caller's promise.
        Reading(unsafe { self.0.add(at) })
    }

    /// Bytes beside the words that are about to be written.
    ///
    /// # Safety
    /// The place must be mapped.
    #[inline(always)]
    pub(crate) unsafe fn writing(&self, at: usize) -> Writing {
        // SAFETY: the caller's promise.
        Writing(unsafe { self.0.add(at) })
    }
}

/// What a word holds that this thread alone writes, as it left it.
#[inline(always)]
pub(crate) fn own_value(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

/// The same for a word of four bytes.
#[inline(always)]
pub(crate) fn own_half(word: &AtomicU32) -> u32 {
    word.load(Ordering::Relaxed)
}

/// Bytes that nobody writes until it is dropped.
#[derive(Debug)]
pub(crate) struct Reading(*const u8);

impl Reading {
    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.0
    }
}

/// Bytes that nobody else reads or writes until it is dropped.
#[derive(Debug)]
pub(crate) struct Writing(*mut u8);

impl Writing {
    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.0
    }
}

/// The cell of the standard library with the access of loom's.
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// Makes this process one of those that [`order_others`] reaches.
pub(crate) fn take_part_in_order() {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED);
}

/// Between what this thread has stored and what it looks at next, every thread of the processes that take part gets what it has stored seen. The counterpart
/// of [`order_own`], and all of the price of both.
///
/// A kernel that cannot do it costs a rest that lasts to its end when it could have been shorter, once in a great while.
pub(crate) fn order_others() {
    fence(Ordering::SeqCst);
    membarrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED);
}

/// Keeps what this thread stores before it looks at something in that order, for whoever calls [`order_others`]. It costs nothing: only the compiler must
/// not exchange the two.
#[inline(always)]
pub(crate) fn order_own() {
    compiler_fence(Ordering::SeqCst);
}

fn membarrier(command: libc::c_int) {
    // SAFETY: a plain call that touches no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
}

/// Sleeps until one of the words is not what it was, or somebody wakes it, or the time is over; at times also for no reason.
pub(crate) fn wait<'a>(words: impl Iterator<Item = (&'a AtomicU32, u32)>, max: Duration) {
    // SAFETY: all-zero entries are valid, and those beyond `count` are never looked at.
    let mut waiters: [libc::futex_waitv; WORDS_MAX] = unsafe { zeroed() };
    let mut count = 0;
    for (word, value) in words {
        let Some(waiter) = waiters.get_mut(count) else {
            return std::thread::sleep(max.min(BLIND));
        };
        waiter.val = u64::from(value);
        waiter.uaddr = word.as_ptr() as u64;
        waiter.flags = libc::FUTEX2_SIZE_U32 as u32;
        count += 1;
    }
    let Some(until) = after(max) else { return };
    // SAFETY: the words outlive the call, and the list and the time are read only during it.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_futex_waitv,
            waiters.as_ptr(),
            count,
            0,
            &raw const until,
            libc::CLOCK_MONOTONIC,
        )
    };
    if rc < 0
        && matches!(
            io::Error::last_os_error().raw_os_error(),
            Some(libc::ENOSYS | libc::EINVAL | libc::EPERM)
        )
    {
        std::thread::sleep(max.min(BLIND));
    }
}

/// Wakes whoever waits for the word.
pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: a plain call; the address is that of a live word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
}

fn after(max: Duration) -> Option<libc::timespec> {
    let now = super::now()?;
    let nanos = now.tv_nsec + i64::from(max.subsec_nanos());
    Some(libc::timespec {
        tv_sec: now
            .tv_sec
            .checked_add(i64::try_from(max.as_secs()).ok()? + nanos / 1_000_000_000)?,
        tv_nsec: nanos % 1_000_000_000,
    })
}
