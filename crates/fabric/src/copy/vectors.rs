//! The copy loops, by vector instructions: past the cache or through it.

use std::arch::x86_64::*;
use std::ptr;

/// How far ahead the source of a copy past the cache is asked for.
const AHEAD: usize = 1024;

/// # Safety
/// As for [`super::copy`], and the CPU has AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn copy_avx512<const PAST_CACHE: bool>(mut to: *mut u8, mut from: *const u8, mut len: usize) {
    // Streaming stores want it, and others that lie across two lines take twice as long.
    let head = to.align_offset(64).min(len);
    // SAFETY: every access stays within `len` bytes of either pointer, which the caller vouches for; streaming stores go to
    // addresses that the head copy has aligned; prefetching never faults.
    unsafe {
        ptr::copy(from, to, head);
        (to, from, len) = (to.add(head), from.add(head), len - head);
        while len >= 256 {
            if PAST_CACHE {
                for line in 0..4 {
                    _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(AHEAD + 64 * line).cast());
                }
            }
            let a = _mm512_loadu_si512(from.cast());
            let b = _mm512_loadu_si512(from.add(64).cast());
            let c = _mm512_loadu_si512(from.add(128).cast());
            let d = _mm512_loadu_si512(from.add(192).cast());
            if PAST_CACHE {
                _mm512_stream_si512(to.cast(), a);
                _mm512_stream_si512(to.add(64).cast(), b);
                _mm512_stream_si512(to.add(128).cast(), c);
                _mm512_stream_si512(to.add(192).cast(), d);
            } else {
                _mm512_store_si512(to.cast(), a);
                _mm512_store_si512(to.add(64).cast(), b);
                _mm512_store_si512(to.add(128).cast(), c);
                _mm512_store_si512(to.add(192).cast(), d);
            }
            (to, from, len) = (to.add(256), from.add(256), len - 256);
        }
        ptr::copy(from, to, len);
        if PAST_CACHE {
            // Streaming stores are weakly ordered: without this, a peer could be told of bytes that are still on their way.
            _mm_sfence();
        }
    }
}

/// # Safety
/// As for [`super::copy`], and the CPU has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy_avx2<const PAST_CACHE: bool>(mut to: *mut u8, mut from: *const u8, mut len: usize) {
    let head = to.align_offset(32).min(len);
    // SAFETY: as in `copy_avx512`.
    unsafe {
        ptr::copy(from, to, head);
        (to, from, len) = (to.add(head), from.add(head), len - head);
        while len >= 128 {
            if PAST_CACHE {
                _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(AHEAD).cast());
                _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(AHEAD + 64).cast());
            }
            let a = _mm256_loadu_si256(from.cast());
            let b = _mm256_loadu_si256(from.add(32).cast());
            let c = _mm256_loadu_si256(from.add(64).cast());
            let d = _mm256_loadu_si256(from.add(96).cast());
            if PAST_CACHE {
                _mm256_stream_si256(to.cast(), a);
                _mm256_stream_si256(to.add(32).cast(), b);
                _mm256_stream_si256(to.add(64).cast(), c);
                _mm256_stream_si256(to.add(96).cast(), d);
            } else {
                _mm256_store_si256(to.cast(), a);
                _mm256_store_si256(to.add(32).cast(), b);
                _mm256_store_si256(to.add(64).cast(), c);
                _mm256_store_si256(to.add(96).cast(), d);
            }
            (to, from, len) = (to.add(128), from.add(128), len - 128);
        }
        ptr::copy(from, to, len);
        if PAST_CACHE {
            _mm_sfence();
        }
    }
}
