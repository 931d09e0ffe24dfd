//! How memory that neighbours have read is written again: through the cache, or past it.
//!
//! The lines of a slot may still be in the cache of whoever read the message before, and each has to be taken back before it can be written.
//! So it is with results that others have read where they lie.
//! Between cores that share a cache this costs little, and the reader then finds the message there. Between others it is some ten
//! times slower than writing past the cache. Which of the two it is can change at any time, because threads move, and so do the
//! virtual cores of a machine that is one itself. So it is measured, now and then.

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use crate::copy;

/// Shorter messages are in too few lines for it to matter.
const SHORT: usize = 512;
/// So much of a message is enough to see how fast its lines are written. Whole elements of any built-in datatype.
const TRIAL: usize = 4096;
/// Messages from one trial to the next, while they go through the cache, and while they go past it, where a trial is what is slow.
const NEAR_MESSAGES: u32 = 16;
const FAR_MESSAGES: u32 = 64;
const LINE: usize = 64;

/// How some memory is written at present: the slots of a lane, or results.
#[derive(Debug, Default)]
pub(super) struct Stores {
    past_cache: bool,
    /// Messages until the next trial.
    left: u32,
}

impl Stores {
    /// Writes a message into a slot.
    ///
    /// # Safety
    /// `from` must be valid for reads and `to` for writes of `len` bytes, and they do not overlap.
    pub(super) unsafe fn fill(&mut self, to: *mut u8, from: *const u8, len: usize) {
        self.write(len, |bytes, past_cache| {
            // SAFETY: the caller's promise, handed on for a part of the bytes.
            unsafe {
                let (to, from) = (to.add(bytes.start), from.add(bytes.start));
                match past_cache {
                    true => copy::copy_streaming(to, from, bytes.len()),
                    false => to.copy_from_nonoverlapping(from, bytes.len()),
                }
            }
        });
    }

    /// Has `len` bytes written, in one go or in two. `write` is told which of them, and whether to write them past the cache.
    pub(super) fn write(&mut self, len: usize, mut write: impl FnMut(Range<usize>, bool)) {
        if len < SHORT {
            return write(0..len, false);
        }
        let mut done = 0;
        if self.left == 0 {
            done = len.min(TRIAL);
            let start = Instant::now();
            write(0..done, false);
            // The processor has accepted the stores; now they have been done.
            fence(Ordering::SeqCst);
            self.past_cache = is_slow(done, start.elapsed());
            self.left = if self.past_cache { FAR_MESSAGES } else { NEAR_MESSAGES };
        }
        self.left -= 1;
        if done < len {
            write(done..len, self.past_cache);
        }
    }
}

/// Whether lines came from further away than a cache that two cores share: a line takes some 3 to 7 ns from there, and 25 ns from the
/// other side of a processor.
fn is_slow(len: usize, took: Duration) -> bool {
    let (overhead_ns, line_ns) = (80, 14);
    took.as_nanos() > overhead_ns + line_ns * (len / LINE) as u128
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_byte_arrives_either_way(
            lengths in prop::collection::vec(0usize..20_000, 1..40),
            past_cache in any::<bool>(),
            seed in any::<u8>(),
        ) {
            let from: Vec<u8> = (0..20_000).map(|at| (at % 251) as u8 ^ seed).collect();
            let mut stores = Stores { past_cache, left: 3 };
            for len in lengths {
                let mut to = vec![0; len + 1];
                // SAFETY: both are at least that long.
                unsafe { stores.fill(to.as_mut_ptr(), from.as_ptr(), len) };
                prop_assert_eq!(&to[..len], &from[..len]);
                prop_assert_eq!(to[len], 0);
                stores.past_cache ^= past_cache;
            }
        }
    }

    #[test]
    fn slow_is_what_a_far_cache_takes() {
        assert!(!is_slow(1024, Duration::from_nanos(150)));
        assert!(is_slow(1024, Duration::from_nanos(450)));
        assert!(!is_slow(4096, Duration::from_nanos(500)));
        assert!(is_slow(4096, Duration::from_nanos(1600)));
    }
}
