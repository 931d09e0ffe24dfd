//! Every way of copying, on the same bytes.

use super::*;
use proptest::prelude::*;

type Copier = unsafe fn(*mut u8, *const u8, usize);

fn copiers() -> Vec<(&'static str, Copier)> {
    let mut all: Vec<(&'static str, Copier)> =
        vec![("copy", copy), ("cached", copy_cached), ("streaming", copy_streaming)];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            all.push(("avx512", |to, from, len| {
                // SAFETY: listed only where the CPU has it.
                unsafe { vectors::copy_avx512::<true>(to, from, len) }
            }));
            all.push(("cached avx512", |to, from, len| {
                // SAFETY: as above.
                unsafe { vectors::copy_avx512::<false>(to, from, len) }
            }));
        }
        if is_x86_feature_detected!("avx2") {
            all.push(("avx2", |to, from, len| {
                // SAFETY: listed only where the CPU has it.
                unsafe { vectors::copy_avx2::<true>(to, from, len) }
            }));
            all.push(("cached avx2", |to, from, len| {
                // SAFETY: as above.
                unsafe { vectors::copy_avx2::<false>(to, from, len) }
            }));
        }
    }
    all
}

fn check(len: usize, from_skip: usize, to_skip: usize) {
    let source: Vec<u8> = (0..len + from_skip).map(|i| (i * 7 + i / 251) as u8).collect();
    for (name, copier) in copiers() {
        let mut to = vec![0xa5u8; to_skip + len + 64];
        // SAFETY: both vectors hold `len` bytes after what is skipped.
        unsafe { copier(to.as_mut_ptr().add(to_skip), source.as_ptr().add(from_skip), len) };
        assert!(
            to[..to_skip].iter().all(|&b| b == 0xa5),
            "{name} wrote before its target"
        );
        assert!(to[to_skip..to_skip + len] == source[from_skip..], "{name}, {len} bytes");
        assert!(
            to[to_skip + len..].iter().all(|&b| b == 0xa5),
            "{name} wrote past its target"
        );
    }
}

proptest! {
    #[test]
    fn any_size_at_any_alignment(len in 0usize..5000, from_skip in 0usize..130, to_skip in 0usize..130) {
        check(len, from_skip, to_skip);
    }
}

#[test]
fn what_overlaps_is_moved() {
    for (from, to) in [(0, 100), (100, 0), (0, 4000), (64, 0)] {
        let mut bytes: Vec<u8> = (0..10_000).map(|i| (i * 7 + i / 251) as u8).collect();
        let expected = bytes[from..from + 5000].to_vec();
        // SAFETY: both lie within the vector.
        unsafe { copy_cached(bytes.as_mut_ptr().add(to), bytes.as_ptr().add(from), 5000) };
        assert!(bytes[to..to + 5000] == expected, "from {from} to {to}");
    }
}

#[test]
fn large_copies() {
    for len in [
        STREAM_MIN_BYTES - 1,
        STREAM_MIN_BYTES,
        STREAM_MIN_BYTES + 1,
        STREAM_MIN_BYTES + 77,
    ] {
        check(len, 3, 61);
    }
}
