//! How fast this machine's time stamp counter runs.
//!
//! An emulated guest reads the host's counter. Left to calibrate it against emulated timers on a busy machine, it can be off by a factor
//! of ten, and its clock with it; so the rate is measured here and handed over.

use std::time::{Duration, Instant};

/// How long the counter is watched. The error of a reading is well below a microsecond, so this gives five digits.
const WATCHED: Duration = Duration::from_millis(120);
/// Readings for each end, of which the tightest counts: one that was interrupted tells nothing.
const READINGS: usize = 50;

pub fn counter_khz() -> u64 {
    let (begin, first) = reading();
    std::thread::sleep(WATCHED);
    let (end, last) = reading();
    let nanoseconds = end.duration_since(begin).as_nanos() as u64;
    (last - first) * 1_000_000 / nanoseconds
}

/// A point in time, and the counter at it.
fn reading() -> (Instant, u64) {
    let read = || {
        let before = Instant::now();
        let counter = counter();
        let took = before.elapsed();
        (took, before + took / 2, counter)
    };
    let tightest = (0..READINGS).map(|_| read()).min_by_key(|(took, ..)| *took);
    let (_, instant, counter) = tightest.expect("at least one reading");
    (instant, counter)
}

#[cfg(target_arch = "x86_64")]
fn counter() -> u64 {
    // SAFETY: the instruction is part of every x86-64 processor and touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn counter() -> u64 {
    unreachable!("the host was found to be x86-64 before anything is booted")
}
