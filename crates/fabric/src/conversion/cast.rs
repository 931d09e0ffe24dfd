//! Elements that become others, run by run.

use std::ptr;

use weft_plan::Datatype;
use weft_plan::conversion::{Nest, NestKind, Scale};
use weft_plan::datatype::quantized::encode_block;
use weft_plan::datatype::{E4m3, Element, bf16, f16};

use super::HostEnds;
use crate::reduce::InstructionSet;

/// Elements that are floats at a time, where a run needs no scale of its own.
const AT_ONCE: usize = 64;
/// The longest run whose floats are kept while its scale is chosen; a longer one is read twice.
const KEPT: usize = 1024;

/// # Safety
/// The runs of the nest must lie within what the pointers are valid for, and the processor must have the instructions.
pub(super) unsafe fn cast_runs(instructions: InstructionSet, nest: &Nest, ends: HostEnds) {
    let NestKind::Cast { from, to, .. } = nest.kind else {
        return;
    };
    // SAFETY: the caller's promise, handed on; what is there of pairs is all that `plan` casts.
    unsafe {
        match from {
            Datatype::F16 => cast_from::<f16>(instructions, to, nest, ends),
            Datatype::Bf16 => cast_from::<bf16>(instructions, to, nest, ends),
            Datatype::Fp8E4m3 => cast_from::<E4m3>(instructions, to, nest, ends),
            _ => cast_from::<f32>(instructions, to, nest, ends),
        }
    }
}

/// # Safety
/// As for [`cast_runs`].
unsafe fn cast_from<F: Wide>(instructions: InstructionSet, to: Datatype, nest: &Nest, ends: HostEnds) {
    // SAFETY: the caller's promise.
    unsafe {
        match to {
            Datatype::F16 => cast_to::<F, f16>(instructions, nest, ends),
            Datatype::Bf16 => cast_to::<F, bf16>(instructions, nest, ends),
            Datatype::Fp8E4m3 => cast_to::<F, E4m3>(instructions, nest, ends),
            _ => cast_to::<F, f32>(instructions, nest, ends),
        }
    }
}

/// # Safety
/// As for [`cast_runs`].
unsafe fn cast_to<F: Wide, T: Wide>(instructions: InstructionSet, nest: &Nest, ends: HostEnds) {
    // SAFETY: the caller's promise: the instructions are there.
    unsafe {
        match instructions {
            InstructionSet::Portable => all_runs::<F, T>(nest, ends),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => avx2::<F, T>(nest, ends),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => avx512::<F, T>(nest, ends),
        }
    }
}

/// # Safety
/// As for [`cast_runs`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<F: Wide, T: Wide>(nest: &Nest, ends: HostEnds) {
    // SAFETY: the caller's promise.
    unsafe { all_runs::<F, T>(nest, ends) }
}

/// # Safety
/// As for [`cast_runs`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
unsafe fn avx512<F: Wide, T: Wide>(nest: &Nest, ends: HostEnds) {
    // SAFETY: the caller's promise.
    unsafe { all_runs::<F, T>(nest, ends) }
}

/// # Safety
/// As for [`cast_runs`].
#[inline(always)]
unsafe fn all_runs<F: Wide, T: Wide>(nest: &Nest, ends: HostEnds) {
    let NestKind::Cast {
        from_scale, to_scale, ..
    } = nest.kind
    else {
        return;
    };
    let run = nest.run as usize;
    nest.each_run(
        #[inline(always)]
        |at| {
            // SAFETY: the caller's promise: a run lies within the ends.
            unsafe {
                let (from, to) = (ends.from.add(at.from as usize), ends.to.add(at.to as usize));
                let factor = match from_scale {
                    Scale::One => None,
                    Scale::Fixed(factor) => Some(factor.value()),
                    Scale::Beside => Some(ptr::read_unaligned(ends.from_scales.add(at.from_scale as usize).cast())),
                };
                let inverse = match to_scale {
                    Scale::One => None,
                    Scale::Fixed(factor) => Some(1.0 / factor.value()),
                    Scale::Beside => {
                        let scale = ends.to_scales.add(at.to_scale as usize);
                        return quantise::<F>(from, to, scale, run, factor);
                    }
                };
                let mut floats = [0f32; AT_ONCE];
                let mut first = 0;
                while run - first >= AT_ONCE {
                    piece::<F, T>(from, to, first, &mut floats, factor, inverse);
                    first += AT_ONCE;
                }
                piece::<F, T>(from, to, first, &mut floats[..run - first], factor, inverse);
            }
        },
    );
}

/// # Safety
/// There must be as many elements from the `first` on, at both ends, as there is room for floats.
#[inline(always)]
unsafe fn piece<F: Wide, T: Wide>(
    from: *const u8,
    to: *mut u8,
    first: usize,
    floats: &mut [f32],
    factor: Option<f32>,
    inverse: Option<f32>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        F::widen_all(from.add(first * size_of::<F>()), floats);
        for times in [factor, inverse].into_iter().flatten() {
            floats.iter_mut().for_each(|number| *number *= times);
        }
        T::narrow_all(floats, to.add(first * size_of::<T>()));
    }
}

/// A run whose scale is chosen for it.
///
/// # Safety
/// As for [`piece`], of a run of so many elements; the scale must be valid for writes of an f32.
#[inline(always)]
unsafe fn quantise<F: Wide>(from: *const u8, to: *mut u8, scale: *mut u8, run: usize, factor: Option<f32>) {
    let mut kept = [0f32; KEPT];
    let mut large;
    let floats = match run <= KEPT {
        true => &mut kept[..run],
        false => {
            large = vec![0f32; run];
            &mut large[..]
        }
    };
    // SAFETY: the caller's promise; codes are bytes, and nobody else has these.
    unsafe {
        F::widen_all(from, floats);
        if let Some(factor) = factor {
            floats.iter_mut().for_each(|number| *number *= factor);
        }
        let codes = std::slice::from_raw_parts_mut(to, run);
        let chosen = encode_block::<E4m3>(floats, codes);
        ptr::write_unaligned(scale.cast(), chosen);
    }
}

/// Elements that are widened to f32, many at once.
trait Wide: Element<Wide = f32> {
    /// # Safety
    /// There must be as many elements, at any alignment, as there is room for floats.
    #[inline(always)]
    unsafe fn widen_all(from: *const u8, floats: &mut [f32]) {
        for (nth, float) in floats.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *float = unsafe { ptr::read_unaligned(from.cast::<Self>().add(nth)) }.widen();
        }
    }

    /// Of NaN there is one in results.
    ///
    /// # Safety
    /// There must be room for as many elements, at any alignment.
    #[inline(always)]
    unsafe fn narrow_all(floats: &[f32], to: *mut u8) {
        for (nth, float) in floats.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { ptr::write_unaligned(to.cast::<Self>().add(nth), Self::narrow(*float)) };
        }
    }
}

impl Wide for E4m3 {}
impl Wide for bf16 {}

impl Wide for f32 {
    #[inline(always)]
    unsafe fn narrow_all(floats: &[f32], to: *mut u8) {
        for (nth, float) in floats.iter().enumerate() {
            let bits = if float.is_nan() { 0x7fc0_0000 } else { float.to_bits() };
            // SAFETY: the caller's promise.
            unsafe { ptr::write_unaligned(to.cast::<u32>().add(nth), bits) };
        }
    }
}

/// By integers, so that many go at once whatever the instructions are.
impl Wide for f16 {
    #[inline(always)]
    unsafe fn widen_all(from: *const u8, floats: &mut [f32]) {
        for (nth, float) in floats.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let bits = u32::from(unsafe { ptr::read_unaligned(from.cast::<u16>().add(nth)) });
            *float = widen_f16(bits);
        }
    }

    #[inline(always)]
    unsafe fn narrow_all(floats: &[f32], to: *mut u8) {
        for (nth, float) in floats.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { ptr::write_unaligned(to.cast::<u16>().add(nth), narrow_f16(*float)) };
        }
    }
}

/// The bits as the top of an f32 with a wrong bias, also where they are subnormal; a multiplication puts it right exactly. The highest exponent stays the highest.
#[inline(always)]
fn widen_f16(bits: u32) -> f32 {
    let magnitude = (bits & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let value = if magnitude >= 0x7c00 << 13 {
        magnitude | 0x7f80_0000
    } else {
        finite
    };
    f32::from_bits(value | (bits & 0x8000) << 16)
}

#[inline(always)]
fn narrow_f16(value: f32) -> u16 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    // Half of the last place kept, less one if that place is even: carries into the exponent as it should.
    let normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13).wrapping_sub(112 << 10);
    // Below the smallest normal value the last place is fixed, at 2⁻²⁴: one half has such steps as f32.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0.5f32.to_bits());
    let code = if magnitude < 113 << 23 {
        subnormal
    } else {
        normal.min(0x7c00)
    };
    if magnitude > 0x7f80_0000 {
        0x7e00
    } else {
        code as u16 | sign
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_is_that_of_half() {
        for bits in 0..=u16::MAX {
            let (expected, found) = (f16::from_bits(bits).to_f32(), widen_f16(bits.into()));
            assert!(
                expected.to_bits() == found.to_bits() || expected.is_nan() && found.is_nan(),
                "{bits:x}"
            );
            for low in [0u32, 1, 0xfff, 0x1000, 0x1001, 0x1fff] {
                let between = f32::from_bits(expected.to_bits() | low);
                let code = if between.is_nan() {
                    0x7e00
                } else {
                    f16::from_f32(between).to_bits()
                };
                assert_eq!(narrow_f16(between), code, "{between}");
            }
        }
        for value in [
            f32::MAX,
            65519.99,
            65520.0,
            f32::MIN_POSITIVE,
            2f32.powi(-25),
            2f32.powi(-25).next_up(),
            1e-45,
        ] {
            assert_eq!(narrow_f16(-value), f16::from_f32(-value).to_bits());
        }
    }
}
