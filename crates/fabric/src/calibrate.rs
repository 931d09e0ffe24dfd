//! How fast this machine itself is: the limits that no transport can pass, measured in a few milliseconds.
//!
//! Other work on the machine only ever slows a measurement down, so that the best of several repeats is the machine's own.

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use weft_plan::platform::Memcpy;
use weft_plan::{Bandwidth, Bytes, Picos, Time};

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calibration {
    pub memcpy: Memcpy,
    /// One system call that does nothing.
    pub system_call: Picos,
    /// The largest cache of the first core, which it shares with others where cores share one.
    pub cache: Bytes,
}

/// How to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CalibrateOptions {
    /// The size of each of the two buffers that are too large for any cache.
    pub streaming_bytes: Bytes,
    /// The size of each of the two buffers that stay in the core's own cache.
    pub cached_bytes: Bytes,
    /// How long each of the measurements goes on, once its buffers are there.
    pub budget: Time,
}

impl Default for CalibrateOptions {
    fn default() -> CalibrateOptions {
        CalibrateOptions {
            streaming_bytes: Bytes(64 << 20),
            cached_bytes: Bytes(64 << 10),
            budget: Time::from_ms(20),
        }
    }
}

/// Where the system does not say how large its caches are.
const CACHE_GUESS: Bytes = Bytes(8 << 20);

/// Measures on the calling thread.
pub fn calibrate(options: &CalibrateOptions) -> Calibration {
    let budget = options.budget.into();
    Calibration {
        memcpy: Memcpy {
            streaming: copy_bandwidth(options.streaming_bytes, budget),
            cached: copy_bandwidth(options.cached_bytes, budget),
        },
        system_call: system_call(budget),
        cache: cache(),
    }
}

/// The best bandwidth of copying one buffer into another.
fn copy_bandwidth(size: Bytes, budget: Duration) -> Bandwidth {
    /// Fewer bytes at a time would measure the clock.
    const BYTES_PER_READING: usize = 1 << 20;
    let len = usize::try_from(size.0).unwrap_or(usize::MAX).max(1);
    // Written by a pattern other than zero, so that every page is there before the clock starts.
    let (from, mut to) = (vec![1u8; len], vec![2u8; len]);
    let copies = BYTES_PER_READING.div_ceil(len);
    let best = best_of(budget, || {
        for _ in 0..copies {
            black_box(&mut to[..]).copy_from_slice(black_box(&from));
        }
    });
    let bytes = Bytes(len as u64 * copies as u64);
    Bandwidth::measured(bytes, best).unwrap_or(Bandwidth::MAX)
}

/// The least time of a system call.
fn system_call(budget: Duration) -> Picos {
    const CALLS: u64 = 100;
    let best = best_of(budget, || {
        for _ in 0..CALLS {
            // SAFETY: the call takes no argument and touches no memory of ours.
            black_box(unsafe { libc::syscall(libc::SYS_getppid) });
        }
    });
    Picos::from_ps(best.as_ps() / CALLS)
}

/// As the kernel tells it of the first core.
fn cache() -> Bytes {
    let largest = (0..8).filter_map(|index| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = fs::read_to_string(path).ok()?;
        let (number, unit) = text.trim().split_at_checked(text.trim().len().checked_sub(1)?)?;
        let unit = match unit {
            "K" => 1 << 10,
            "M" => 1 << 20,
            _ => return None,
        };
        number.parse::<u64>().ok()?.checked_mul(unit).filter(|bytes| *bytes > 0)
    });
    largest.max().map_or(CACHE_GUESS, Bytes)
}

/// The shortest of as many repeats as the budget allows, three at least.
fn best_of(budget: Duration, mut work: impl FnMut()) -> Picos {
    let start = Instant::now();
    let mut best = Duration::MAX;
    let mut repeats = 0;
    while repeats < 3 || start.elapsed() < budget {
        let begin = Instant::now();
        work();
        best = best.min(begin.elapsed());
        repeats += 1;
    }
    // A clock that did not move would be an infinite bandwidth.
    Picos::from(best).max(Picos::from_ns(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_there_even_for_odd_options() {
        for (streaming_bytes, budget) in [(Bytes(1 << 20), Time::from_ms(1)), (Bytes(0), Time::ZERO)] {
            let measured = calibrate(&CalibrateOptions {
                streaming_bytes,
                cached_bytes: Bytes(1),
                budget,
            });
            assert!(measured.memcpy.streaming > Bandwidth::default());
            assert!(measured.memcpy.cached > Bandwidth::default());
            assert!(measured.system_call > Picos::ZERO);
            assert!(measured.cache > Bytes(0));
        }
    }
}
