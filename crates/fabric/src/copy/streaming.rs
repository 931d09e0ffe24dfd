//! The copy loops. Streaming stores where the CPU has them, the compiler's copy everywhere else.

use std::ptr;

use super::copy_cached;

/// Below this a copy is left in the cache: it fits there with its source, and whoever asked for it is likely to look at it next.
pub const STREAM_MIN_BYTES: usize = 8 << 20;

/// Copies `len` bytes, past the cache where they are many.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of `len` bytes. Others may change the bytes meanwhile: then it is
/// unspecified which of their values are copied. Overlap is tolerated in the same sense.
pub unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise, handed on.
    unsafe {
        if len >= STREAM_MIN_BYTES {
            copy_streaming(to, from, len);
        } else {
            copy_cached(to, from, len);
        }
    }
}

/// Copies past the cache, whatever the size: for pieces of something large.
///
/// # Safety
/// As for [`copy`].
pub unsafe fn copy_streaming(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= 512 {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was just detected; the rest is the caller's promise.
            return unsafe { x86::stream_avx512(to, from, len) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { x86::stream_avx2(to, from, len) };
        }
    }
    // SAFETY: the caller's promise, handed on.
    unsafe { ptr::copy(from, to, len) }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::*;
    use std::ptr;

    /// How far ahead the source is asked for.
    const AHEAD: usize = 1024;

    /// # Safety
    /// As for [`super::copy`], and the CPU has AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(in crate::copy) unsafe fn stream_avx512(mut to: *mut u8, mut from: *const u8, mut len: usize) {
        let head = to.align_offset(64).min(len);
        // SAFETY: every access stays within `len` bytes of either pointer, which the caller vouches for; streaming stores go to
        // addresses that the head copy has aligned; prefetching never faults.
        unsafe {
            ptr::copy(from, to, head);
            (to, from, len) = (to.add(head), from.add(head), len - head);
            while len >= 256 {
                _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(AHEAD).cast());
                _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(AHEAD + 64).cast());
                _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(AHEAD + 128).cast());
                _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(AHEAD + 192).cast());
                let a = _mm512_loadu_si512(from.cast());
                let b = _mm512_loadu_si512(from.add(64).cast());
                let c = _mm512_loadu_si512(from.add(128).cast());
                let d = _mm512_loadu_si512(from.add(192).cast());
                _mm512_stream_si512(to.cast(), a);
                _mm512_stream_si512(to.add(64).cast(), b);
                _mm512_stream_si512(to.add(128).cast(), c);
                _mm512_stream_si512(to.add(192).cast(), d);
                (to, from, len) = (to.add(256), from.add(256), len - 256);
            }
            ptr::copy(from, to, len);
            // Streaming stores are weakly ordered: without this, a peer could be told of bytes that are still on their way.
            _mm_sfence();
        }
    }

    /// # Safety
    /// As for [`super::copy`], and the CPU has AVX2.
    #[target_feature(enable = "avx2")]
    pub(in crate::copy) unsafe fn stream_avx2(mut to: *mut u8, mut from: *const u8, mut len: usize) {
        let head = to.align_offset(32).min(len);
        // SAFETY: as in `stream_avx512`.
        unsafe {
            ptr::copy(from, to, head);
            (to, from, len) = (to.add(head), from.add(head), len - head);
            while len >= 128 {
                _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(AHEAD).cast());
                _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(AHEAD + 64).cast());
                let a = _mm256_loadu_si256(from.cast());
                let b = _mm256_loadu_si256(from.add(32).cast());
                let c = _mm256_loadu_si256(from.add(64).cast());
                let d = _mm256_loadu_si256(from.add(96).cast());
                _mm256_stream_si256(to.cast(), a);
                _mm256_stream_si256(to.add(32).cast(), b);
                _mm256_stream_si256(to.add(64).cast(), c);
                _mm256_stream_si256(to.add(96).cast(), d);
                (to, from, len) = (to.add(128), from.add(128), len - 128);
            }
            ptr::copy(from, to, len);
            _mm_sfence();
        }
    }
}
