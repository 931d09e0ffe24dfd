//! Checksums of bytes that others may change, taken while they are copied.
//!
//! The checksum wants a slice, and of such bytes none may be formed. So they go through a buffer; or, where the CPU can fold them in its
//! registers, they are read once, folded and passed on. Folding turns many bytes into 256 that have the same checksum, because
//! both leave the same remainder when divided by the checksum's polynomial.

use std::mem::MaybeUninit;

use weft_protocol::memory::Digest;

use super::{copy_cached, copy_streaming};

/// What goes through the buffer at a time, so that it is still in the nearest cache for the next step.
const BUFFER_BYTES: usize = 8 << 10;

/// Takes up bytes into a checksum.
///
/// # Safety
/// `from` must be valid for reads of `len` bytes. Others may change them meanwhile: then it is unspecified which of their values count.
pub unsafe fn sum(from: *const u8, len: usize, digest: &mut Digest) {
    // SAFETY: the caller's promise, handed on.
    unsafe { pass(None, from, len, false, digest) }
}

/// Copies bytes, past the cache or through it, and takes up exactly those that it has copied into a checksum.
///
/// # Safety
/// As for [`super::copy`].
pub unsafe fn copy_summed(to: *mut u8, from: *const u8, len: usize, past_cache: bool, digest: &mut Digest) {
    // SAFETY: the caller's promise, handed on.
    unsafe { pass(Some(to), from, len, past_cache, digest) }
}

/// Copies bytes through the cache, takes up those that it has copied into `sent`, and into `landed` what then lies where they went, read once more
/// a moment later, while the cache still has it.
///
/// # Safety
/// As for [`super::copy`], and `to` must be valid for reads too.
pub unsafe fn copy_summed_twice(to: *mut u8, from: *const u8, len: usize, sent: &mut Digest, landed: &mut Digest) {
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    if len >= x86::MIN_BYTES && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq") {
        done = len - len % x86::BLOCK;
        // SAFETY: the features were just detected; the rest is the caller's promise, for as many bytes.
        let folded = unsafe { x86::fold_twice(to, from, done, [sent.state(), landed.state()]) };
        for (digest, folded) in [&mut *sent, &mut *landed].into_iter().zip(&folded) {
            *digest = Digest::at_state(0);
            digest.update(folded);
        }
    }
    let mut buffer = [const { MaybeUninit::<u8>::uninit() }; BUFFER_BYTES];
    let buffer = buffer.as_mut_ptr().cast::<u8>();
    while done < len {
        let n = (len - done).min(BUFFER_BYTES);
        // SAFETY: within `len` bytes of either pointer; the buffer is ours, and as much of it is looked at as was filled.
        unsafe {
            copy_cached(buffer, from.add(done), n);
            sent.update(std::slice::from_raw_parts(buffer, n));
            copy_cached(to.add(done), buffer, n);
            copy_cached(buffer, to.add(done), n);
            landed.update(std::slice::from_raw_parts(buffer, n));
        }
        done += n;
    }
}

/// # Safety
/// As for [`sum`] and, with `to`, for [`copy_summed`].
unsafe fn pass(to: Option<*mut u8>, from: *const u8, len: usize, past_cache: bool, digest: &mut Digest) {
    let mut done = 0;
    #[cfg(target_arch = "x86_64")]
    if len >= x86::MIN_BYTES && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq") {
        done = len - len % x86::BLOCK;
        // SAFETY: the features were just detected; the rest is the caller's promise, for as many bytes.
        let folded = unsafe {
            match to {
                None => x86::fold::<{ x86::NOWHERE }>(std::ptr::null_mut(), from, done, digest.state()),
                Some(to) if past_cache && to.addr().is_multiple_of(64) => {
                    x86::fold::<{ x86::PAST_CACHE }>(to, from, done, digest.state())
                }
                Some(to) => x86::fold::<{ x86::THROUGH_CACHE }>(to, from, done, digest.state()),
            }
        };
        *digest = Digest::at_state(0);
        digest.update(&folded);
    }
    let mut buffer = [const { MaybeUninit::<u8>::uninit() }; BUFFER_BYTES];
    let buffer = buffer.as_mut_ptr().cast::<u8>();
    while done < len {
        let n = (len - done).min(BUFFER_BYTES);
        // SAFETY: within `len` bytes of either pointer; the buffer is ours, and as much of it is looked at as was filled.
        unsafe {
            copy_cached(buffer, from.add(done), n);
            digest.update(std::slice::from_raw_parts(buffer, n));
            match to {
                None => {}
                Some(to) if past_cache => copy_streaming(to.add(done), buffer, n),
                Some(to) => copy_cached(to.add(done), buffer, n),
            }
        }
        done += n;
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// What is folded at a time: four registers.
    pub(super) const BLOCK: usize = 256;
    /// Below this a buffer is as fast.
    pub(super) const MIN_BYTES: usize = 2 * BLOCK;

    // Where the bytes go that have been taken up.
    pub(super) const NOWHERE: u8 = 0;
    pub(super) const THROUGH_CACHE: u8 = 1;
    pub(super) const PAST_CACHE: u8 = 2;

    /// The polynomial of CRC-64/NVME, without its highest term.
    const POLYNOMIAL: u64 = 0xad93_d235_94c9_3659;

    /// What the two halves of 128 bits are multiplied by to be moved on by a block. The checksum has its bits in reverse, which makes a
    /// product one bit too short.
    const FOLD_LOW: u64 = power(8 * BLOCK as u32 + 63);
    const FOLD_HIGH: u64 = power(8 * BLOCK as u32 - 1);

    /// The remainder of x to the power `n`, its bits in reverse.
    const fn power(n: u32) -> u64 {
        let (mut remainder, mut i) = (1u64, 0);
        while i < n {
            let carry = remainder >> 63;
            remainder = (remainder << 1) ^ (carry * POLYNOMIAL);
            i += 1;
        }
        remainder.reverse_bits()
    }

    /// Bytes with the checksum that `len` bytes have after `state`, if they come after state 0.
    ///
    /// # Safety
    /// `len` is a multiple of a block, and not 0. `from` must be valid for reads and, unless they go nowhere, `to` for writes of as many bytes, and
    /// aligned to 64 if they go past the cache. The CPU has AVX-512F and VPCLMULQDQ.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) unsafe fn fold<const WHERE: u8>(to: *mut u8, from: *const u8, len: usize, state: u64) -> [u8; BLOCK] {
        let factors = factors();
        let mut folded = begin(state);
        let mut at = 0;
        while at < len {
            for (nth, lane) in folded.iter_mut().enumerate() {
                let here = at + 64 * nth;
                // SAFETY: within `len` bytes of either pointer, which the caller vouches for, as for the alignment.
                let bytes = unsafe {
                    let bytes = _mm512_loadu_si512(from.add(here).cast());
                    match WHERE {
                        THROUGH_CACHE => _mm512_storeu_si512(to.add(here).cast(), bytes),
                        PAST_CACHE => _mm512_stream_si512(to.add(here).cast(), bytes),
                        _ => {}
                    }
                    bytes
                };
                *lane = take_up(*lane, bytes, at, factors);
            }
            at += BLOCK;
        }
        if WHERE == PAST_CACHE {
            // Streaming stores are weakly ordered.
            _mm_sfence();
        }
        bytes_of(&folded)
    }

    /// How far behind the copying what has landed is read: far enough that the stores are over, near enough that the nearest cache has it, and no
    /// multiple of a page, whose loads the processor takes for those of the stores.
    const BEHIND: usize = 12 * BLOCK;

    /// The same as [`fold`] of the bytes on their way and of those that have landed, after a state each.
    ///
    /// # Safety
    /// As for [`fold`] through the cache; and `to` must be valid for reads too.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub(super) unsafe fn fold_twice(to: *mut u8, from: *const u8, len: usize, states: [u64; 2]) -> [[u8; BLOCK]; 2] {
        let factors = factors();
        let [mut sent, mut landed] = [begin(states[0]), begin(states[1])];
        // What the compiler knows to have been stored it need not read.
        let there = std::hint::black_box(to.cast_const());
        let mut at = 0;
        while at < len + BEHIND {
            if at < len {
                for (nth, lane) in sent.iter_mut().enumerate() {
                    let here = at + 64 * nth;
                    // SAFETY: within `len` bytes of either pointer, which the caller vouches for.
                    let bytes = unsafe {
                        let bytes = _mm512_loadu_si512(from.add(here).cast());
                        _mm512_storeu_si512(to.add(here).cast(), bytes);
                        bytes
                    };
                    *lane = take_up(*lane, bytes, at, factors);
                }
            }
            if at >= BEHIND {
                let at = at - BEHIND;
                for (nth, lane) in landed.iter_mut().enumerate() {
                    // SAFETY: within `len` bytes, which the caller vouches for.
                    let bytes = unsafe { _mm512_loadu_si512(there.add(at + 64 * nth).cast()) };
                    *lane = take_up(*lane, bytes, at, factors);
                }
            }
            at += BLOCK;
        }
        [bytes_of(&sent), bytes_of(&landed)]
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn factors() -> __m512i {
        _mm512_set4_epi64(FOLD_HIGH as i64, FOLD_LOW as i64, FOLD_HIGH as i64, FOLD_LOW as i64)
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn begin(state: u64) -> [__m512i; 4] {
        let mut folded = [_mm512_setzero_si512(); 4];
        folded[0] = _mm512_zextsi128_si512(_mm_cvtsi64_si128(state as i64));
        folded
    }

    /// Folds what there is so that it can take up the bytes a block later.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    #[inline]
    fn take_up(lane: __m512i, bytes: __m512i, at: usize, factors: __m512i) -> __m512i {
        match at {
            // Before the first block there is only the state, and it belongs right there.
            0 => _mm512_xor_si512(lane, bytes),
            _ => _mm512_ternarylogic_epi64::<0x96>(
                _mm512_clmulepi64_epi128::<0x00>(lane, factors),
                _mm512_clmulepi64_epi128::<0x11>(lane, factors),
                bytes,
            ),
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    fn bytes_of(folded: &[__m512i; 4]) -> [u8; BLOCK] {
        let mut out = [0; BLOCK];
        for (nth, lane) in folded.iter().enumerate() {
            // SAFETY: four times 64 bytes are the whole.
            unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(64 * nth).cast(), *lane) };
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plain(parts: &[&[u8]]) -> u64 {
        let mut digest = Digest::default();
        for part in parts {
            digest.update(part);
        }
        digest.finish()
    }

    proptest! {
        #[test]
        fn the_checksum_is_that_of_the_bytes(
            lengths in prop::collection::vec(0usize..9000, 1..5),
            skip in 0usize..70,
            past_cache in any::<bool>(),
            seed in any::<u64>(),
        ) {
            let mut next = seed | 1;
            let bytes: Vec<u8> = (0..9000).map(|_| { next = next.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(99); (next >> 56) as u8 }).collect();
            let parts: Vec<&[u8]> = lengths.iter().map(|&len| &bytes[..len]).collect();
            let [mut read, mut copied, mut sent, mut landed] = [(); 4].map(|()| Digest::default());
            for part in &parts {
                let [mut to, mut twice] = [(); 2].map(|()| vec![0xa5u8; skip + part.len() + 64]);
                // SAFETY: both are at least that long.
                unsafe {
                    sum(part.as_ptr(), part.len(), &mut read);
                    copy_summed(to.as_mut_ptr().add(skip), part.as_ptr(), part.len(), past_cache, &mut copied);
                    copy_summed_twice(twice.as_mut_ptr().add(skip), part.as_ptr(), part.len(), &mut sent, &mut landed);
                }
                for to in [to, twice] {
                    prop_assert_eq!(&to[skip..skip + part.len()], *part);
                    prop_assert!(to[..skip].iter().chain(&to[skip + part.len()..]).all(|&byte| byte == 0xa5));
                }
            }
            for digest in [read, copied, sent, landed] {
                prop_assert_eq!(digest.finish(), plain(&parts));
            }
        }
    }

    #[test]
    fn one_bit_more_is_another_checksum() {
        let mut bytes = vec![7u8; 100_000];
        let before = plain(&[&bytes]);
        for bit in [0, 2047, 2048, 400_000, 799_999] {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let mut digest = Digest::default();
            // SAFETY: the bytes are ours.
            unsafe { sum(bytes.as_ptr(), bytes.len(), &mut digest) };
            let after = digest.finish();
            assert_ne!(after, before);
            assert_eq!(after, plain(&[&bytes]));
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
