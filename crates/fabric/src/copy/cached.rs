//! Copying through the cache, by vector instructions.
//!
//! The C library leaves what is longer than a few KiB to `rep movsb`, which some processors do at less than half the speed of their own vector
//! instructions (AMD's, with glibc before 2.40). Short copies it does well.

use std::ptr;

#[cfg(target_arch = "x86_64")]
use super::vectors;

/// Shorter copies are left to the C library.
const VECTOR_MIN_BYTES: usize = 1024;

/// Copies `len` bytes, all of which are in the cache afterwards, as far as it is large enough.
///
/// # Safety
/// As for [`super::copy`].
pub unsafe fn copy_cached(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= VECTOR_MIN_BYTES && !overlap(to, from, len) {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was just detected; the rest is the caller's promise.
            return unsafe { vectors::copy_avx512::<false>(to, from, len) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { vectors::copy_avx2::<false>(to, from, len) };
        }
    }
    // SAFETY: the caller's promise, handed on.
    unsafe { ptr::copy(from, to, len) }
}

/// Whether writing from the front could change what is yet to be read.
fn overlap(to: *mut u8, from: *const u8, len: usize) -> bool {
    (to as usize).wrapping_sub(from as usize) < len
}
