//! Kernels for processors with AVX2 and F16C. A line of memory takes two registers.

// What makes every instruction here safe is one and the same: a kernel's entry is called on processors that have them only, and pointers are
// valid by its caller's promise. Streaming stores go to the beginning of a line, and prefetching never faults.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use super::arithmetic::{Arithmetic, Divisor, lanes};
use super::kernel::{Kernels, Kind, Op, entries, fold};
use super::level::Level;

/// AVX2 and F16C.
pub(super) struct Avx2;

#[derive(Clone, Copy)]
pub(super) struct F32x8(__m256);

#[derive(Clone, Copy)]
pub(super) struct F64x4(__m256d);

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

impl F32x8 {
    /// Any NaN where the mask says so replaced by the one that results have.
    #[inline(always)]
    unsafe fn with_nan(self, at: __m256) -> F32x8 {
        F32x8(_mm256_blendv_ps(
            self.0,
            _mm256_set1_ps(f32::from_bits(0x7fc0_0000)),
            at,
        ))
    }
    // Of two zeros the instruction takes its second operand; either order together has the sign if one of them has.
    #[inline(always)]
    unsafe fn least(self, other: F32x8) -> __m256 {
        _mm256_or_ps(_mm256_min_ps(self.0, other.0), _mm256_min_ps(other.0, self.0))
    }
    #[inline(always)]
    unsafe fn greatest(self, other: F32x8) -> __m256 {
        _mm256_and_ps(_mm256_max_ps(self.0, other.0), _mm256_max_ps(other.0, self.0))
    }
}
lanes!(F32x8, f32: _mm256_set1_ps, _mm256_add_ps, _mm256_mul_ps, _mm256_div_ps, _mm256_cmp_ps);

impl F64x4 {
    /// Any NaN where the mask says so replaced by the one that results have.
    #[inline(always)]
    unsafe fn with_nan(self, at: __m256d) -> F64x4 {
        F64x4(_mm256_blendv_pd(
            self.0,
            _mm256_set1_pd(f64::from_bits(0x7ff8 << 48)),
            at,
        ))
    }
    // Of two zeros the instruction takes its second operand; either order together has the sign if one of them has.
    #[inline(always)]
    unsafe fn least(self, other: F64x4) -> __m256d {
        _mm256_or_pd(_mm256_min_pd(self.0, other.0), _mm256_min_pd(other.0, self.0))
    }
    #[inline(always)]
    unsafe fn greatest(self, other: F64x4) -> __m256d {
        _mm256_and_pd(_mm256_max_pd(self.0, other.0), _mm256_max_pd(other.0, self.0))
    }
}
lanes!(F64x4, f64: _mm256_set1_pd, _mm256_add_pd, _mm256_mul_pd, _mm256_div_pd, _mm256_cmp_pd);

/// As in [`super::avx512`].
#[inline(always)]
unsafe fn round<const MANTISSA: u32, const BIAS: i32>(value: __m256) -> __m256i {
    let magnitude = _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(i32::MAX));
    let dropped = _mm_cvtsi32_si128(23 - MANTISSA as i32);
    let even = _mm256_and_si256(_mm256_srl_epi32(magnitude, dropped), _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(even, _mm256_set1_epi32((1 << (22 - MANTISSA)) - 1));
    let cut = _mm256_srl_epi32(_mm256_add_epi32(magnitude, half), dropped);
    let normal = _mm256_sub_epi32(cut, _mm256_set1_epi32((127 - BIAS) << MANTISSA));
    let shifter = _mm256_set1_epi32((127 + 24 - BIAS - MANTISSA as i32) << 23);
    let shifted = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(shifter));
    let subnormal = _mm256_sub_epi32(_mm256_castps_si256(shifted), shifter);
    let small = _mm256_cmpgt_epi32(_mm256_set1_epi32((128 - BIAS) << 23), magnitude);
    _mm256_blendv_epi8(normal, subnormal, small)
}

/// The low byte of every lane, in order.
#[inline(always)]
unsafe fn pack_bytes(lanes: [__m256i; 4]) -> __m256i {
    let low = _mm256_packus_epi32(lanes[0], lanes[1]);
    let high = _mm256_packus_epi32(lanes[2], lanes[3]);
    // Packing works within each half of a register; the halves are sorted afterwards.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order)
}

#[inline(always)]
unsafe fn e4m3_to_f32(code: __m256i) -> F32x8 {
    let magnitude = _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
    let top = _mm256_castsi256_ps(_mm256_slli_epi32::<20>(magnitude));
    let value = _mm256_mul_ps(top, _mm256_set1_ps(f32::from_bits((127 + 120) << 23)));
    let sign = _mm256_slli_epi32::<24>(_mm256_and_si256(code, _mm256_set1_epi32(0x80)));
    let signed = _mm256_castsi256_ps(_mm256_or_si256(_mm256_castps_si256(value), sign));
    let nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    F32x8(signed).with_nan(_mm256_castsi256_ps(nan))
}

/// Codes of an eight-bit format; `MOST` is the one that an overflow becomes.
#[inline(always)]
unsafe fn f32_to_code<const MANTISSA: u32, const BIAS: i32, const MOST: i32>(wide: F32x8) -> __m256i {
    let code = _mm256_min_epi32(round::<MANTISSA, BIAS>(wide.0), _mm256_set1_epi32(MOST));
    let bits = _mm256_castps_si256(wide.0);
    let sign = _mm256_and_si256(_mm256_srli_epi32::<24>(bits), _mm256_set1_epi32(0x80));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(wide.0, wide.0));
    _mm256_blendv_epi8(_mm256_or_si256(code, sign), _mm256_set1_epi32(0x7f), nan)
}

#[inline(always)]
unsafe fn f32_to_e4m3(wide: F32x8) -> __m256i {
    f32_to_code::<3, 7, 0x7e>(wide)
}

#[inline(always)]
unsafe fn f32_to_e5m2(wide: F32x8) -> __m256i {
    f32_to_code::<2, 15, 0x7c>(wide)
}

/// Sixteen floats from the f16 in one register.
#[inline(always)]
unsafe fn f16_to_f32(half: __m256i) -> [F32x8; 2] {
    [
        F32x8(_mm256_cvtph_ps(_mm256_castsi256_si128(half))),
        F32x8(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half))),
    ]
}

/// Sixteen floats from the codes in half a register.
#[inline(always)]
unsafe fn e4m3s_to_f32(codes: __m128i) -> [F32x8; 2] {
    [
        e4m3_to_f32(_mm256_cvtepu8_epi32(codes)),
        e4m3_to_f32(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(codes))),
    ]
}

/// As above. They are the upper halves of f16.
#[inline(always)]
unsafe fn e5m2s_to_f32(codes: __m128i) -> [F32x8; 2] {
    f16_to_f32(_mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(codes)))
}

#[inline(always)]
unsafe fn f32_to_f16([low, high]: [F32x8; 2]) -> __m256i {
    _mm256_set_m128i(_mm256_cvtps_ph::<NEAREST>(high.0), _mm256_cvtps_ph::<NEAREST>(low.0))
}

#[inline(always)]
unsafe fn bf16_to_f32(block: __m256i) -> [F32x8; 2] {
    let low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(block));
    let high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256::<1>(block));
    [
        F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low))),
        F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))),
    ]
}

#[inline(always)]
unsafe fn round_to_bf16(wide: F32x8) -> __m256i {
    let bits = _mm256_castps_si256(wide.0);
    let even = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, even), _mm256_set1_epi32(0x7fff));
    _mm256_srli_epi32::<16>(rounded)
}

#[inline(always)]
unsafe fn f32_to_bf16([low, high]: [F32x8; 2]) -> __m256i {
    // Packing works within each half of a register; the quarters are sorted afterwards.
    let packed = _mm256_packus_epi32(round_to_bf16(low), round_to_bf16(high));
    _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
}

impl Level for Avx2 {
    type Block = [__m256i; 2];
    type F32 = [F32x8; 2];
    type F64 = [F64x4; 2];

    #[inline(always)]
    unsafe fn load(from: *const u8) -> [__m256i; 2] {
        [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())]
    }
    #[inline(always)]
    unsafe fn store(block: [__m256i; 2], to: *mut u8) {
        _mm256_storeu_si256(to.cast(), block[0]);
        _mm256_storeu_si256(to.add(32).cast(), block[1]);
    }
    #[inline(always)]
    unsafe fn stream(block: [__m256i; 2], to: *mut u8) {
        _mm256_stream_si256(to.cast(), block[0]);
        _mm256_stream_si256(to.add(32).cast(), block[1]);
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
    unsafe fn widen_f64(block: [__m256i; 2]) -> [F64x4; 2] {
        [
            F64x4(_mm256_castsi256_pd(block[0])),
            F64x4(_mm256_castsi256_pd(block[1])),
        ]
    }
    #[inline(always)]
    unsafe fn narrow_f64(wide: [F64x4; 2]) -> [__m256i; 2] {
        [_mm256_castpd_si256(wide[0].0), _mm256_castpd_si256(wide[1].0)]
    }
    #[inline(always)]
    unsafe fn widen_f32(block: [__m256i; 2]) -> [F32x8; 2] {
        [
            F32x8(_mm256_castsi256_ps(block[0])),
            F32x8(_mm256_castsi256_ps(block[1])),
        ]
    }
    #[inline(always)]
    unsafe fn narrow_f32(wide: [F32x8; 2]) -> [__m256i; 2] {
        [_mm256_castps_si256(wide[0].0), _mm256_castps_si256(wide[1].0)]
    }
    #[inline(always)]
    unsafe fn widen_f16(block: [__m256i; 2]) -> [[F32x8; 2]; 2] {
        [f16_to_f32(block[0]), f16_to_f32(block[1])]
    }
    #[inline(always)]
    unsafe fn narrow_f16(wide: [[F32x8; 2]; 2]) -> [__m256i; 2] {
        [f32_to_f16(wide[0]), f32_to_f16(wide[1])]
    }
    #[inline(always)]
    unsafe fn widen_bf16(block: [__m256i; 2]) -> [[F32x8; 2]; 2] {
        [bf16_to_f32(block[0]), bf16_to_f32(block[1])]
    }
    #[inline(always)]
    unsafe fn narrow_bf16(wide: [[F32x8; 2]; 2]) -> [__m256i; 2] {
        [f32_to_bf16(wide[0]), f32_to_bf16(wide[1])]
    }
    #[inline(always)]
    unsafe fn widen_e4m3(block: [__m256i; 2]) -> [[F32x8; 2]; 4] {
        [
            e4m3s_to_f32(_mm256_castsi256_si128(block[0])),
            e4m3s_to_f32(_mm256_extracti128_si256::<1>(block[0])),
            e4m3s_to_f32(_mm256_castsi256_si128(block[1])),
            e4m3s_to_f32(_mm256_extracti128_si256::<1>(block[1])),
        ]
    }
    #[inline(always)]
    unsafe fn narrow_e4m3([[a, b], [c, d], [e, f], [g, h]]: [[F32x8; 2]; 4]) -> [__m256i; 2] {
        [
            pack_bytes([f32_to_e4m3(a), f32_to_e4m3(b), f32_to_e4m3(c), f32_to_e4m3(d)]),
            pack_bytes([f32_to_e4m3(e), f32_to_e4m3(f), f32_to_e4m3(g), f32_to_e4m3(h)]),
        ]
    }
    #[inline(always)]
    unsafe fn widen_e5m2(block: [__m256i; 2]) -> [[F32x8; 2]; 4] {
        [
            e5m2s_to_f32(_mm256_castsi256_si128(block[0])),
            e5m2s_to_f32(_mm256_extracti128_si256::<1>(block[0])),
            e5m2s_to_f32(_mm256_castsi256_si128(block[1])),
            e5m2s_to_f32(_mm256_extracti128_si256::<1>(block[1])),
        ]
    }
    #[inline(always)]
    unsafe fn narrow_e5m2([[a, b], [c, d], [e, f], [g, h]]: [[F32x8; 2]; 4]) -> [__m256i; 2] {
        [
            pack_bytes([f32_to_e5m2(a), f32_to_e5m2(b), f32_to_e5m2(c), f32_to_e5m2(d)]),
            pack_bytes([f32_to_e5m2(e), f32_to_e5m2(f), f32_to_e5m2(g), f32_to_e5m2(h)]),
        ]
    }

    fn kernels<K: Kind<Avx2>, O: Op>() -> Kernels {
        Kernels {
            pair: pair::<K, O>,
            pair_both: pair_both::<K, O>,
            many: many::<K, O>,
        }
    }
}

entries!(Avx2, "avx2,f16c");
