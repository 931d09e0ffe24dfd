//! What threads and processes share: atomics, words in mapped memory, barriers, and the sleep on a word.
//!
//! Everything here is what the machine has, at no cost on top. Under `--cfg loom` the same names mean things that a model checker follows, so that the code
//! which uses them is checked as it is, in every order of its steps (`cargo xtask loom`).

#[cfg(not(loom))]
mod machine;
#[cfg(loom)]
mod modelled;

use std::mem::zeroed;

#[cfg(not(loom))]
pub(crate) use machine::*;
#[cfg(loom)]
pub(crate) use modelled::*;

/// A time that all processes of this host share, and that nobody sets.
pub(crate) fn host_time_ns() -> u64 {
    now().map_or(1, |now| now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

fn now() -> Option<libc::timespec> {
    // SAFETY: all-zero is a valid time, and the call writes nothing else.
    unsafe {
        let mut now: libc::timespec = zeroed();
        (libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) == 0).then_some(now)
    }
}
