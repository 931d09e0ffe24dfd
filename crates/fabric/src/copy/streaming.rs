//! Copying past the cache. Streaming stores where the CPU has them, the compiler's copy everywhere else.

use std::ptr;

use super::copy_cached;
#[cfg(target_arch = "x86_64")]
use super::vectors;

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
            return unsafe { vectors::copy_avx512::<true>(to, from, len) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { vectors::copy_avx2::<true>(to, from, len) };
        }
    }
    // SAFETY: the caller's promise, handed on.
    unsafe { ptr::copy(from, to, len) }
}
