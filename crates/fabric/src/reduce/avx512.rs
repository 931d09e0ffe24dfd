//! Kernels for processors with AVX-512.

// What makes every instruction here safe is one and the same: a kernel's entry is called on processors that have them only, and pointers are
// valid by its caller's promise. Streaming stores go to the beginning of a line, and prefetching never faults.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use super::arithmetic::{Arithmetic, Divisor, lanes};
use super::kernel::{Kernels, Kind, Op, entries, fold};
use super::level::Level;

/// AVX-512 with F, BW, DQ and VL.
pub(super) struct Avx512;

#[derive(Clone, Copy)]
pub(super) struct F32x16(__m512);

#[derive(Clone, Copy)]
pub(super) struct F64x8(__m512d);

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
/// Of the range instructions: compare as numbers, zeros by their sign.
const LESSER: i32 = 0b0100;
const GREATER: i32 = 0b0101;

impl F32x16 {
    /// Any NaN where the mask says so replaced by the one that results have.
    #[inline(always)]
    unsafe fn with_nan(self, at: __mmask16) -> F32x16 {
        F32x16(_mm512_mask_mov_ps(
            self.0,
            at,
            _mm512_set1_ps(f32::from_bits(0x7fc0_0000)),
        ))
    }
    #[inline(always)]
    unsafe fn least(self, other: F32x16) -> __m512 {
        _mm512_range_ps::<LESSER>(self.0, other.0)
    }
    #[inline(always)]
    unsafe fn greatest(self, other: F32x16) -> __m512 {
        _mm512_range_ps::<GREATER>(self.0, other.0)
    }
}
lanes!(F32x16, f32: _mm512_set1_ps, _mm512_add_ps, _mm512_mul_ps, _mm512_div_ps, _mm512_cmp_ps_mask);

impl F64x8 {
    /// Any NaN where the mask says so replaced by the one that results have.
    #[inline(always)]
    unsafe fn with_nan(self, at: __mmask8) -> F64x8 {
        F64x8(_mm512_mask_mov_pd(
            self.0,
            at,
            _mm512_set1_pd(f64::from_bits(0x7ff8 << 48)),
        ))
    }
    #[inline(always)]
    unsafe fn least(self, other: F64x8) -> __m512d {
        _mm512_range_pd::<LESSER>(self.0, other.0)
    }
    #[inline(always)]
    unsafe fn greatest(self, other: F64x8) -> __m512d {
        _mm512_range_pd::<GREATER>(self.0, other.0)
    }
}
lanes!(F64x8, f64: _mm512_set1_pd, _mm512_add_pd, _mm512_mul_pd, _mm512_div_pd, _mm512_cmp_pd_mask);

/// The code of a float in an eight-bit format of so many bits of mantissa and such a bias, as if its exponent had no end, without
/// its sign: as in [`weft_plan::datatype::E4m3`].
#[inline(always)]
unsafe fn round<const MANTISSA: u32, const BIAS: i32>(value: __m512) -> __m512i {
    let magnitude = _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(i32::MAX));
    let dropped = _mm_cvtsi32_si128(23 - MANTISSA as i32);
    let even = _mm512_and_si512(_mm512_srl_epi32(magnitude, dropped), _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(even, _mm512_set1_epi32((1 << (22 - MANTISSA)) - 1));
    let cut = _mm512_srl_epi32(_mm512_add_epi32(magnitude, half), dropped);
    let normal = _mm512_sub_epi32(cut, _mm512_set1_epi32((127 - BIAS) << MANTISSA));
    let shifter = _mm512_set1_epi32((127 + 24 - BIAS - MANTISSA as i32) << 23);
    let shifted = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(shifter));
    let subnormal = _mm512_sub_epi32(_mm512_castps_si512(shifted), shifter);
    let small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32((128 - BIAS) << 23));
    _mm512_mask_mov_epi32(normal, small, subnormal)
}

/// The low byte of every lane, in order.
#[inline(always)]
unsafe fn pack_bytes(lanes: [__m512i; 4]) -> __m512i {
    let low = _mm512_packus_epi32(lanes[0], lanes[1]);
    let high = _mm512_packus_epi32(lanes[2], lanes[3]);
    // Packing works within each quarter of a register; the quarters are sorted afterwards.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high))
}

/// Each quarter of a block with its bytes widened to 32 bits.
#[inline(always)]
unsafe fn unpack_bytes(block: __m512i) -> [__m512i; 4] {
    [
        _mm512_cvtepu8_epi32(_mm512_castsi512_si128(block)),
        _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<1>(block)),
        _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<2>(block)),
        _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<3>(block)),
    ]
}

#[inline(always)]
unsafe fn e4m3_to_f32(code: __m512i) -> F32x16 {
    let magnitude = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
    let top = _mm512_castsi512_ps(_mm512_slli_epi32::<20>(magnitude));
    let value = _mm512_mul_ps(top, _mm512_set1_ps(f32::from_bits((127 + 120) << 23)));
    let sign = _mm512_slli_epi32::<24>(_mm512_and_si512(code, _mm512_set1_epi32(0x80)));
    let signed = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign));
    F32x16(signed).with_nan(_mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f)))
}

/// Codes of an eight-bit format; `MOST` is the one that an overflow becomes.
#[inline(always)]
unsafe fn f32_to_code<const MANTISSA: u32, const BIAS: i32, const MOST: i32>(wide: F32x16) -> __m512i {
    let code = _mm512_min_epi32(round::<MANTISSA, BIAS>(wide.0), _mm512_set1_epi32(MOST));
    let bits = _mm512_castps_si512(wide.0);
    let sign = _mm512_and_si512(_mm512_srli_epi32::<24>(bits), _mm512_set1_epi32(0x80));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(wide.0, wide.0);
    _mm512_mask_mov_epi32(_mm512_or_si512(code, sign), nan, _mm512_set1_epi32(0x7f))
}

#[inline(always)]
unsafe fn f32_to_e4m3(wide: F32x16) -> __m512i {
    f32_to_code::<3, 7, 0x7e>(wide)
}

#[inline(always)]
unsafe fn f32_to_e5m2(wide: F32x16) -> __m512i {
    f32_to_code::<2, 15, 0x7c>(wide)
}

#[inline(always)]
unsafe fn bf16_to_f32(half: __m256i) -> F32x16 {
    F32x16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(
        half,
    ))))
}

/// The upper half of each lane rounded; the lower is left over.
#[inline(always)]
unsafe fn round_to_bf16(wide: F32x16) -> __m512i {
    let bits = _mm512_castps_si512(wide.0);
    let even = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    _mm512_add_epi32(_mm512_add_epi32(bits, even), _mm512_set1_epi32(0x7fff))
}

impl Level for Avx512 {
    type Block = __m512i;
    type F32 = F32x16;
    type F64 = F64x8;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m512i {
        _mm512_loadu_si512(from.cast())
    }
    #[inline(always)]
    unsafe fn store(block: __m512i, to: *mut u8) {
        _mm512_storeu_si512(to.cast(), block)
    }
    #[inline(always)]
    unsafe fn stream(block: __m512i, to: *mut u8) {
        _mm512_stream_si512(to.cast(), block)
    }
    #[inline(always)]
    unsafe fn fence() {
        _mm_sfence();
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_NTA>(at.cast())
    }
    #[inline(always)]
    unsafe fn load_part(from: *const u8, bytes: usize) -> __m512i {
        // SAFETY: as said above; bytes that the mask leaves out are not touched.
        unsafe { _mm512_maskz_loadu_epi8(first(bytes), from.cast()) }
    }
    #[inline(always)]
    unsafe fn store_part(block: __m512i, to: *mut u8, bytes: usize) {
        _mm512_mask_storeu_epi8(to.cast(), first(bytes), block)
    }

    #[inline(always)]
    unsafe fn widen_f64(block: __m512i) -> F64x8 {
        F64x8(_mm512_castsi512_pd(block))
    }
    #[inline(always)]
    unsafe fn narrow_f64(wide: F64x8) -> __m512i {
        _mm512_castpd_si512(wide.0)
    }
    #[inline(always)]
    unsafe fn widen_f32(block: __m512i) -> F32x16 {
        F32x16(_mm512_castsi512_ps(block))
    }
    #[inline(always)]
    unsafe fn narrow_f32(wide: F32x16) -> __m512i {
        _mm512_castps_si512(wide.0)
    }
    #[inline(always)]
    unsafe fn widen_f16(block: __m512i) -> [F32x16; 2] {
        [
            F32x16(_mm512_cvtph_ps(_mm512_castsi512_si256(block))),
            F32x16(_mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(block))),
        ]
    }
    #[inline(always)]
    unsafe fn narrow_f16(wide: [F32x16; 2]) -> __m512i {
        let low = _mm512_cvtps_ph::<NEAREST>(wide[0].0);
        let high = _mm512_cvtps_ph::<NEAREST>(wide[1].0);
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }
    #[inline(always)]
    unsafe fn widen_bf16(block: __m512i) -> [F32x16; 2] {
        [
            bf16_to_f32(_mm512_castsi512_si256(block)),
            bf16_to_f32(_mm512_extracti64x4_epi64::<1>(block)),
        ]
    }
    #[inline(always)]
    unsafe fn narrow_bf16(wide: [F32x16; 2]) -> __m512i {
        // The upper halves of the lanes of both: the odd ones of sixty-four.
        const UPPER: [u16; 32] = {
            let mut odd = [0; 32];
            let mut i = 0;
            while i < 32 {
                odd[i] = 2 * i as u16 + 1;
                i += 1;
            }
            odd
        };
        let odd = _mm512_loadu_si512(UPPER.as_ptr().cast());
        _mm512_permutex2var_epi16(round_to_bf16(wide[0]), odd, round_to_bf16(wide[1]))
    }
    #[inline(always)]
    unsafe fn widen_e4m3(block: __m512i) -> [F32x16; 4] {
        let [a, b, c, d] = unpack_bytes(block);
        [e4m3_to_f32(a), e4m3_to_f32(b), e4m3_to_f32(c), e4m3_to_f32(d)]
    }
    #[inline(always)]
    unsafe fn narrow_e4m3([a, b, c, d]: [F32x16; 4]) -> __m512i {
        pack_bytes([f32_to_e4m3(a), f32_to_e4m3(b), f32_to_e4m3(c), f32_to_e4m3(d)])
    }
    #[inline(always)]
    unsafe fn widen_e5m2(block: __m512i) -> [F32x16; 4] {
        // It is the upper half of an f16.
        let [low, high] = [
            _mm512_cvtepu8_epi16(_mm512_castsi512_si256(block)),
            _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64::<1>(block)),
        ];
        let [a, b] = Avx512::widen_f16(_mm512_slli_epi16::<8>(low));
        let [c, d] = Avx512::widen_f16(_mm512_slli_epi16::<8>(high));
        [a, b, c, d]
    }
    #[inline(always)]
    unsafe fn narrow_e5m2([a, b, c, d]: [F32x16; 4]) -> __m512i {
        pack_bytes([f32_to_e5m2(a), f32_to_e5m2(b), f32_to_e5m2(c), f32_to_e5m2(d)])
    }

    fn kernels<K: Kind<Avx512>, O: Op>() -> Kernels {
        Kernels {
            pair: pair::<K, O>,
            pair_both: pair_both::<K, O>,
            many: many::<K, O>,
        }
    }
}

/// A mask of the first so many bytes of a line.
#[inline(always)]
fn first(bytes: usize) -> __mmask64 {
    u64::MAX >> (64 - bytes)
}

entries!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl");
