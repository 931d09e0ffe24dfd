//! One element, and the arithmetic that it is reduced in.

use half::{bf16, f16};

use super::{Datatype, E4m3, E5m2};

/// An element as it lies in memory.
pub trait Element: Copy {
    /// What it is widened to before it is reduced: itself, or f32 where it is narrower than that.
    type Wide: Number;
    const DATATYPE: Datatype;

    fn widen(self) -> Self::Wide;
    /// Rounds to nearest, ties to even.
    fn narrow(wide: Self::Wide) -> Self;
    /// Reads one element from the front.
    ///
    /// # Panics
    /// Where there are too few bytes.
    fn read(bytes: &[u8]) -> Self;
    /// Writes one element to the front.
    ///
    /// # Panics
    /// Where there are too few bytes.
    fn write(self, bytes: &mut [u8]);
}

/// The arithmetic of reductions. What each means is said in the [module](super)'s documentation.
pub trait Number: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn lesser(self, other: Self) -> Self;
    fn greater(self, other: Self) -> Self;
    /// The quotient: of floats to nearest, of integers towards zero.
    ///
    /// # Panics
    /// Integers, where the divisor is 0.
    fn divided(self, by: u64) -> Self;
}

// The same lines for both widths of floats, which share no trait in the standard library.
macro_rules! float {
    ($float:ident, $nan:literal) => {
        impl Number for $float {
            #[inline(always)]
            fn sum(self, other: $float) -> $float {
                one_nan!($float, $nan, self + other)
            }
            #[inline(always)]
            fn product(self, other: $float) -> $float {
                one_nan!($float, $nan, self * other)
            }
            #[inline(always)]
            fn lesser(self, other: $float) -> $float {
                // Either way round gives the same number, except of zeros: of these the one with a sign is the lesser.
                let one = if self < other { self } else { other };
                let other_way = if other < self { other } else { self };
                let bits = one.to_bits() | other_way.to_bits();
                $float::from_bits(if self.is_nan() | other.is_nan() {
                    $nan
                } else {
                    bits
                })
            }
            #[inline(always)]
            fn greater(self, other: $float) -> $float {
                let one = if self > other { self } else { other };
                let other_way = if other > self { other } else { self };
                let bits = one.to_bits() & other_way.to_bits();
                $float::from_bits(if self.is_nan() | other.is_nan() {
                    $nan
                } else {
                    bits
                })
            }
            #[inline(always)]
            fn divided(self, by: u64) -> $float {
                one_nan!($float, $nan, self / by as $float)
            }
        }
    };
}

/// Replaces any NaN by the one that results have. Done on bits, because a compiler may take one NaN for another.
macro_rules! one_nan {
    ($float:ident, $nan:literal, $value:expr) => {{
        let value = $value;
        $float::from_bits(if value.is_nan() { $nan } else { value.to_bits() })
    }};
}

float!(f64, 0x7ff8_0000_0000_0000);
float!(f32, 0x7fc0_0000);

macro_rules! integer {
    ($integer:ident, $datatype:ident, $quotient:expr) => {
        impl Number for $integer {
            #[inline(always)]
            fn sum(self, other: $integer) -> $integer {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn product(self, other: $integer) -> $integer {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn lesser(self, other: $integer) -> $integer {
                self.min(other)
            }
            #[inline(always)]
            fn greater(self, other: $integer) -> $integer {
                self.max(other)
            }
            #[inline(always)]
            fn divided(self, by: u64) -> $integer {
                let quotient: fn($integer, u64) -> $integer = $quotient;
                quotient(self, by)
            }
        }
        element!($integer, $integer, $datatype, |x| x, |x| x);
    };
}

macro_rules! element {
    ($element:ident, $wide:ident, $datatype:ident, $widen:expr, $narrow:expr) => {
        impl Element for $element {
            type Wide = $wide;
            const DATATYPE: Datatype = Datatype::$datatype;
            #[inline(always)]
            fn widen(self) -> $wide {
                let widen: fn($element) -> $wide = $widen;
                widen(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> $element {
                let narrow: fn($wide) -> $element = $narrow;
                narrow(wide)
            }
            #[inline]
            fn read(bytes: &[u8]) -> $element {
                $element::from_ne_bytes(*bytes.first_chunk().expect("bytes of an element"))
            }
            #[inline]
            fn write(self, bytes: &mut [u8]) {
                *bytes.first_chunk_mut().expect("bytes of an element") = self.to_ne_bytes();
            }
        }
    };
}

element!(f64, f64, F64, |x| x, |x| x);
element!(f32, f32, F32, |x| x, |x| x);
element!(f16, f32, F16, f16::to_f32, f16::from_f32);
element!(bf16, f32, Bf16, bf16_to_f32, bf16_from_f32);
element!(E4m3, f32, Fp8E4m3, E4m3::to_f32, E4m3::from_f32);
element!(E5m2, f32, Fp8E5m2, E5m2::to_f32, E5m2::from_f32);

// The quotient of integers up to 32 bits is taken in a float wide enough that its whole part is exact, because processors divide
// many floats at once and integers one by one.
integer!(i8, I8, |x, by| (f32::from(x) / by as f32) as i8);
integer!(u8, U8, |x, by| (f32::from(x) / by as f32) as u8);
integer!(i16, I16, |x, by| (f32::from(x) / by as f32) as i16);
integer!(u16, U16, |x, by| (f32::from(x) / by as f32) as u16);
integer!(i32, I32, |x, by| (f64::from(x) / by as f64) as i32);
integer!(u32, U32, |x, by| (f64::from(x) / by as f64) as u32);
integer!(i64, I64, |x, by| i64::try_from(by)
    .map_or(-i64::from(x == i64::MIN && by == 1 << 63), |by| x / by));
integer!(u64, U64, |x, by| x / by);

/// As the crate `half` has it, without a branch for NaN, which the shift keeps.
#[inline(always)]
fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// As the crate `half` has it, without a branch, and with one NaN.
#[inline(always)]
fn bf16_from_f32(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    bf16::from_bits(if value.is_nan() { 0x7fc0 } else { (rounded >> 16) as u16 })
}

impl E4m3 {
    const fn from_ne_bytes(bytes: [u8; 1]) -> E4m3 {
        E4m3(bytes[0])
    }
    const fn to_ne_bytes(self) -> [u8; 1] {
        [self.0]
    }
}

impl E5m2 {
    const fn from_ne_bytes(bytes: [u8; 1]) -> E5m2 {
        E5m2(bytes[0])
    }
    const fn to_ne_bytes(self) -> [u8; 1] {
        [self.0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_integers_divide_exactly() {
        for by in (1..=70_000).chain([1 << 24, (1 << 24) + 1, u64::MAX]) {
            for x in [
                0,
                1,
                2,
                3,
                7,
                100,
                by / 2,
                by - 1,
                by,
                2 * (by / 2),
                32767,
                65534,
                65535u64,
            ] {
                let x = x.min(65535) as u16;
                assert_eq!(u64::from(x.divided(by)), u64::from(x) / by, "{x} / {by}");
                let x = x as i16;
                assert_eq!(i128::from(x.divided(by)), i128::from(x) / i128::from(by), "{x} / {by}");
            }
        }
        for by in 1..=300 {
            for x in 0..=255u8 {
                assert_eq!(u64::from(x.divided(by)), u64::from(x) / by);
                assert_eq!(i64::from((x as i8).divided(by)), i64::from(x as i8) / by as i64);
            }
        }
    }

    #[test]
    fn bf16_is_that_of_half() {
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits);
            let wide = bf16_to_f32(value);
            if value.is_nan() {
                assert!(wide.is_nan());
                assert_eq!(bf16_from_f32(wide).to_bits(), 0x7fc0);
                continue;
            }
            assert_eq!(wide.to_bits(), value.to_f32().to_bits());
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let between = f32::from_bits(wide.to_bits() | low);
                if !between.is_nan() {
                    assert_eq!(bf16_from_f32(between), bf16::from_f32(between), "{between}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn integers_divide_exactly(x: u64, by in 1u64.., small in 1u64..100_000) {
            for by in [by, small] {
                prop_assert_eq!(u64::from((x as u32).divided(by)), u64::from(x as u32) / by);
                prop_assert_eq!(i128::from((x as i32).divided(by)), i128::from(x as i32) / i128::from(by));
                prop_assert_eq!(x.divided(by), x / by);
                prop_assert_eq!(i128::from((x as i64).divided(by)), i128::from(x as i64) / i128::from(by));
            }
        }
    }

    #[test]
    fn the_least_integer_divides_by_its_magnitude() {
        assert_eq!(i64::MIN.divided(1 << 63), -1);
        assert_eq!(i64::MIN.divided((1 << 63) + 1), 0);
        assert_eq!(i32::MIN.divided(1 << 31), -1);
        assert_eq!(i8::MIN.divided(128), -1);
    }
}
