//! Copying through the cache, by vector instructions.
//!
//! The C library leaves what is longer than a few KiB to `rep movsb`, which some processors do at less than half the speed of their own vector
//! instructions (AMD's, with glibc before 2.40). Short copies it does well.

use std::ptr;

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
            return unsafe { x86::copy_avx512(to, from, len) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { x86::copy_avx2(to, from, len) };
        }
    }
    // SAFETY: the caller's promise, handed on.
    unsafe { ptr::copy(from, to, len) }
}

/// Whether writing from the front could change what is yet to be read.
fn overlap(to: *mut u8, from: *const u8, len: usize) -> bool {
    (to as usize).wrapping_sub(from as usize) < len
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::*;
    use std::ptr;

    /// # Safety
    /// As for [`super::copy_cached`], and the CPU has AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(in crate::copy) unsafe fn copy_avx512(mut to: *mut u8, mut from: *const u8, mut len: usize) {
        // SAFETY: every access stays within `len` bytes of either pointer, which the caller vouches for.
        unsafe {
            // Stores that lie across two lines take twice as long.
            let head = to.align_offset(64).min(len);
            ptr::copy(from, to, head);
            (to, from, len) = (to.add(head), from.add(head), len - head);
            while len >= 256 {
                let a = _mm512_loadu_si512(from.cast());
                let b = _mm512_loadu_si512(from.add(64).cast());
                let c = _mm512_loadu_si512(from.add(128).cast());
                let d = _mm512_loadu_si512(from.add(192).cast());
                _mm512_storeu_si512(to.cast(), a);
                _mm512_storeu_si512(to.add(64).cast(), b);
                _mm512_storeu_si512(to.add(128).cast(), c);
                _mm512_storeu_si512(to.add(192).cast(), d);
                (to, from, len) = (to.add(256), from.add(256), len - 256);
            }
            ptr::copy(from, to, len);
        }
    }

    /// # Safety
    /// As for [`super::copy_cached`], and the CPU has AVX2.
    #[target_feature(enable = "avx2")]
    pub(in crate::copy) unsafe fn copy_avx2(mut to: *mut u8, mut from: *const u8, mut len: usize) {
        // SAFETY: as in `copy_avx512`.
        unsafe {
            let head = to.align_offset(32).min(len);
            ptr::copy(from, to, head);
            (to, from, len) = (to.add(head), from.add(head), len - head);
            while len >= 128 {
                let a = _mm256_loadu_si256(from.cast());
                let b = _mm256_loadu_si256(from.add(32).cast());
                let c = _mm256_loadu_si256(from.add(64).cast());
                let d = _mm256_loadu_si256(from.add(96).cast());
                _mm256_storeu_si256(to.cast(), a);
                _mm256_storeu_si256(to.add(32).cast(), b);
                _mm256_storeu_si256(to.add(64).cast(), c);
                _mm256_storeu_si256(to.add(96).cast(), d);
                (to, from, len) = (to.add(128), from.add(128), len - 128);
            }
            ptr::copy(from, to, len);
        }
    }
}
