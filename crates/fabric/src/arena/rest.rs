//! Sleeping until a neighbour has news.
//!
//! Nobody sleeps through news. Whoever sends writes the message, then its news, and then looks whether the receiver rests; the
//! receiver says that it rests, has [every other thread pass a barrier](order_others), and then has the kernel compare the news with what
//! they were when it last looked. A sender that looked before its barrier has its news seen by the comparison; one that looks after it
//! sees that the receiver rests, and wakes it. The compiler keeps the sender's two steps in order, and nothing else needs to.

use std::io;
use std::mem::zeroed;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Wake;
use std::time::Duration;

/// The kernel waits for so many words at once.
const WORDS_MAX: usize = 128;
/// How long to sleep where the kernel cannot wait for several words.
const BLIND: Duration = Duration::from_millis(1);

/// What wakes whoever rests besides its neighbours: anything that has a waker of it.
#[derive(Debug, Default)]
pub struct Ear(AtomicU32);

impl Ear {
    /// How often it has been woken. To be asked before looking for what it would be woken for.
    pub fn heard(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn word(&self) -> &AtomicU32 {
        &self.0
    }
}

impl Wake for Ear {
    fn wake(self: Arc<Ear>) {
        self.0.fetch_add(1, Ordering::Release);
        wake(&self.0);
    }
}

/// Makes this process one of those that [`order_others`] reaches.
pub(super) fn take_part() {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED);
}

/// Between what this thread has stored and what it looks at next, every other thread of the ranks gets what it has stored seen.
///
/// It is for whoever is about to sleep, so that those who send need no fence, which would be most of the price of a short message. A
/// kernel that cannot do it costs a rest that lasts to its end when it could have been shorter, once in a great while.
pub(super) fn order_others() {
    membarrier(libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED);
}

fn membarrier(command: libc::c_int) {
    // SAFETY: a plain call that touches no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
}

/// Sleeps until one of the words is not what it was, or somebody wakes it, or the time is over; at times also for no reason.
pub(super) fn wait<'a>(words: impl Iterator<Item = (&'a AtomicU32, u32)>, max: Duration) {
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
pub(super) fn wake(word: &AtomicU32) {
    // SAFETY: a plain call; the address is that of a live word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
}

/// A time that all processes of this host share, and that nobody sets.
pub(super) fn host_time_ns() -> u64 {
    now().map_or(1, |now| now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

fn now() -> Option<libc::timespec> {
    // SAFETY: all-zero is a valid time, and the call writes nothing else.
    unsafe {
        let mut now: libc::timespec = zeroed();
        (libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) == 0).then_some(now)
    }
}

fn after(max: Duration) -> Option<libc::timespec> {
    let now = now()?;
    let nanos = now.tv_nsec + i64::from(max.subsec_nanos());
    Some(libc::timespec {
        tv_sec: now
            .tv_sec
            .checked_add(i64::try_from(max.as_secs()).ok()? + nanos / 1_000_000_000)?,
        tv_nsec: nanos % 1_000_000_000,
    })
}
