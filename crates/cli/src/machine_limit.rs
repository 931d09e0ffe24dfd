//! The machine's own limit, measured in the same run as everything that is compared with it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use weft_plan::Bandwidth;

/// Larger than any cache here, so that the copy is from memory to memory, as a transfer is.
const COPY_BYTES: usize = 64 << 20;

/// How fast one thread copies memory: the median of copies made over about `budget`.
pub fn memcpy_bandwidth(budget: Duration) -> Bandwidth {
    let source = vec![1u8; COPY_BYTES];
    let mut target = vec![2u8; COPY_BYTES];
    let start = Instant::now();
    let mut seconds = Vec::new();
    while seconds.len() < 3 || start.elapsed() < budget {
        let one = Instant::now();
        black_box(&mut target[..]).copy_from_slice(black_box(&source));
        seconds.push(one.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    Bandwidth::from_bytes_per_sec((COPY_BYTES as f64 / median) as u64)
}
