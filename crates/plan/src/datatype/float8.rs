//! The two eight-bit floats, as conversions from and to f32 without a branch, so that a compiler can do many at once.

/// Four bits of exponent (bias 7), three of mantissa. The greatest value is 448; 0x7f and 0xff are NaN; there is no infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// Five bits of exponent (bias 15), two of mantissa, infinities and NaNs as IEEE has them. The greatest value is 57344.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E5m2(pub u8);

impl E4m3 {
    pub const MAX: f32 = 448.0;

    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        let magnitude = (self.0 & 0x7f) as u32;
        // The bits as the top of an f32 with a wrong bias, also where they are subnormal; a multiplication puts it right exactly.
        let value = f32::from_bits(magnitude << 20) * power_of_two(127 - 7);
        let bits = if magnitude == 0x7f { NAN_BITS } else { value.to_bits() };
        f32::from_bits(bits | (self.0 as u32 & 0x80) << 24)
    }

    /// To nearest, ties to even. What is more than [`E4m3::MAX`], also infinity, becomes that.
    #[inline(always)]
    pub const fn from_f32(value: f32) -> E4m3 {
        let code = round::<3, 7>(value);
        E4m3(with_sign(if code > 0x7e { 0x7e } else { code }, value))
    }
}

impl E5m2 {
    pub const MAX: f32 = 57344.0;

    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        let magnitude = (self.0 & 0x7f) as u32;
        let value = f32::from_bits(magnitude << 21) * power_of_two(127 - 15);
        // The highest exponent is kept for infinity and NaN here, and so it is in f32.
        let bits = if magnitude >= 0x7c {
            0x7f80_0000 | magnitude << 21
        } else {
            value.to_bits()
        };
        f32::from_bits(bits | (self.0 as u32 & 0x80) << 24)
    }

    /// To nearest, ties to even. What would round to more than [`E5m2::MAX`] is infinite.
    #[inline(always)]
    pub const fn from_f32(value: f32) -> E5m2 {
        let code = round::<2, 15>(value);
        E5m2(with_sign(if code > 0x7c { 0x7c } else { code }, value))
    }
}

const NAN_BITS: u32 = 0x7fc0_0000;

const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// The code of the magnitude in a format of so many bits of mantissa and such a bias, as if its exponent had no end.
#[inline(always)]
const fn round<const MANTISSA: u32, const BIAS: u32>(value: f32) -> u32 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let dropped = 23 - MANTISSA;
    // Half of the last place kept, less one if that place is even: carries into the exponent as it should.
    let half = (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
    let normal = ((magnitude + half) >> dropped).wrapping_sub((127 - BIAS) << MANTISSA);
    // Below the smallest normal value the last place is fixed. Adding a number whose last place that is lets the processor round.
    let shifter = (127 + 24 - BIAS - MANTISSA) << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(shifter))
        .to_bits()
        .wrapping_sub(shifter);
    if magnitude < (128 - BIAS) << 23 {
        subnormal
    } else {
        normal
    }
}

/// The code with the sign of the value; of NaN, the one code that results have.
#[inline(always)]
const fn with_sign(code: u32, value: f32) -> u8 {
    let bits = value.to_bits();
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        0x7f
    } else {
        code as u8 | (bits >> 24) as u8 & 0x80
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The value of a code by the definition of the format.
    fn value(code: u8, mantissa: i32, bias: i32) -> f64 {
        let exponent = (code & 0x7f) as i32 >> mantissa;
        let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
        let magnitude = match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    /// The code nearest to a magnitude by looking at all; of two equally near ones the even one. `end` is the last.
    fn nearest(magnitude: f64, mantissa: i32, bias: i32, end: u8) -> u8 {
        let distance = |code: u8| (value(code, mantissa, bias) - magnitude).abs();
        (0..=end)
            .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
            .unwrap()
    }

    fn check(x: f32) {
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        let (e4m3, e5m2) = (E4m3::from_f32(x).0, E5m2::from_f32(x).0);
        if x.is_nan() {
            assert_eq!((e4m3, e5m2), (0x7f, 0x7f));
            return;
        }
        let magnitude = f64::from(x.abs()).min(1e6);
        assert_eq!(e4m3, nearest(magnitude, 3, 7, 0x7e) | sign, "{x}");
        assert_eq!(e5m2, nearest(magnitude, 2, 15, 0x7c) | sign, "{x}");
    }

    #[test]
    fn every_code_has_the_value_that_the_format_defines_and_comes_back() {
        for code in 0..=255u8 {
            let (e4m3, e5m2) = (E4m3(code).to_f32(), E5m2(code).to_f32());
            if code & 0x7f == 0x7f {
                assert!(e4m3.is_nan());
            } else {
                assert_eq!(f64::from(e4m3).to_bits(), value(code, 3, 7).to_bits());
                assert_eq!(E4m3::from_f32(e4m3), E4m3(code));
            }
            match code & 0x7f {
                0x7d.. => assert!(e5m2.is_nan()),
                0x7c => assert!(e5m2.is_infinite() && e5m2.is_sign_negative() == (code & 0x80 != 0)),
                _ => assert_eq!(f64::from(e5m2).to_bits(), value(code, 2, 15).to_bits()),
            }
            if !e5m2.is_nan() {
                assert_eq!(E5m2::from_f32(e5m2), E5m2(code));
            }
        }
    }

    #[test]
    fn every_code_and_every_middle_between_two_rounds_right_on_both_sides() {
        for (mantissa, bias) in [(3, 7), (2, 15)] {
            for code in 0..=0x7f {
                let low = value(code, mantissa, bias) as f32;
                let middle = (low + value(code.saturating_add(1).min(0x7f), mantissa, bias) as f32) / 2.0;
                for x in [low, middle] {
                    for x in [x.next_down(), x, x.next_up()] {
                        check(x);
                        check(-x);
                    }
                }
            }
        }
        for x in [f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), f32::INFINITY, f32::NAN] {
            check(x);
            check(-x);
        }
    }

    proptest! {
        #[test]
        fn any_float_rounds_to_the_nearest(bits: u32) {
            check(f32::from_bits(bits));
        }

        #[test]
        fn any_float_of_a_middling_size_rounds_to_the_nearest(bits in 100u32 << 23..150 << 23, negative: bool) {
            check(f32::from_bits(bits | u32::from(negative) << 31));
        }
    }
}
