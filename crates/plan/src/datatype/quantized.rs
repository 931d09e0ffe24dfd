//! Floats as eight-bit codes with a scale for each block: a quarter of the bytes, at the price of a known error.
//!
//! **Layout.** Blocks follow each other without gaps. A block is its scale, an f32, and then one byte for each of its elements. The last
//! block may have fewer elements than the others, and then has fewer bytes. Any run of whole blocks can be decoded alone.
//!
//! **Meaning.** An element is its code times the scale. The scale is the greatest magnitude of the block divided by the greatest code (127, or
//! 448 in fp8), a little less, so that decoding never overflows, and not less than 2⁻¹²⁶. Codes are rounded to nearest, ties to even.
//!
//! **Error.** With m the greatest magnitude of the block, |decoded − original| ≤ [`Code::error_max`] · m + 2⁻¹²³. A block with an infinity or
//! a NaN in it decodes to NaN throughout: an overflow is never hidden.

use std::str::FromStr;

use thiserror::Error;

use super::E4m3;

/// What the elements of a block are encoded as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// Integers from −127 to 127.
    Int8,
    /// [`E4m3`] floats: a smaller error for elements that are small beside the greatest of their block, a larger one for the others.
    Fp8E4m3,
}

/// How floats are quantised: which code, and how many elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    pub code: Code,
    pub block: Block,
}

/// How many elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Block {
    Of32,
    Of64,
    Of128,
}

/// Bytes of a block's scale.
pub const SCALE_BYTES: usize = 4;

impl Code {
    /// The error bound in parts of the greatest magnitude of a block; see the [module](self).
    pub const fn error_max(self) -> f32 {
        match self {
            // Half a step of 127, and the rounding of the scale.
            Code::Int8 => 0.5 / 127.0 * 1.0001,
            // Half the distance of codes between 256 and 448, and the rounding of the scale.
            Code::Fp8E4m3 => 16.0 / 448.0 * 1.0001,
        }
    }
}

impl FromStr for Code {
    type Err = UnknownCode;
    /// `int8` or `fp8_e4m3`.
    fn from_str(text: &str) -> Result<Code, UnknownCode> {
        match text {
            "int8" => Ok(Code::Int8),
            "fp8_e4m3" => Ok(Code::Fp8E4m3),
            _ => Err(UnknownCode {
                name: text.chars().take(64).collect(),
            }),
        }
    }
}

/// A name that no code has.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{name}` is no code of quantised floats; known are int8 and fp8_e4m3")]
pub struct UnknownCode {
    pub name: String,
}

impl Block {
    /// The block of so many elements, where there is one.
    pub const fn of(elements: u32) -> Option<Block> {
        match elements {
            32 => Some(Block::Of32),
            64 => Some(Block::Of64),
            128 => Some(Block::Of128),
            _ => None,
        }
    }
    pub const fn elements(self) -> usize {
        match self {
            Block::Of32 => 32,
            Block::Of64 => 64,
            Block::Of128 => 128,
        }
    }
}

impl Quantization {
    /// The error bound of a sum over `ranks`, each of whose contributions was encoded, and which was encoded itself. `magnitudes` is the sum
    /// over all ranks of the greatest magnitude of the block.
    ///
    /// Contributions are off by e · m each. They are added as f32, at 2⁻²⁴ of at most (1 + e) · m for each addition; and the sum, no greater
    /// than that, is off by e of it once more.
    pub fn reduced_error_max(self, ranks: u32, magnitudes: f32) -> f32 {
        let e = f64::from(self.code.error_max());
        let ranks = f64::from(ranks);
        let rounding = ranks * 2f64.powi(-24) * (1.0 + e) * (1.0 + e);
        let bound = (e * (2.0 + e) + rounding) * f64::from(magnitudes) + (ranks + 1.0) * 2f64.powi(-123);
        // To f32, upwards.
        (bound * (1.0 + 2f64.powi(-22))) as f32
    }

    /// Bytes that so many elements are encoded into, where that fits.
    pub const fn encoded_bytes(self, count: usize) -> Option<usize> {
        match count.div_ceil(self.block.elements()).checked_mul(SCALE_BYTES) {
            Some(scales) => scales.checked_add(count),
            None => None,
        }
    }

    /// Encodes all elements.
    ///
    /// # Panics
    /// Where the encoded bytes are not as many as [`Quantization::encoded_bytes`] says.
    pub fn encode(self, from: &[f32], into: &mut [u8]) {
        assert_eq!(Some(into.len()), self.encoded_bytes(from.len()), "room for the codes");
        let elements = self.block.elements();
        for (from, into) in from.chunks(elements).zip(into.chunks_mut(SCALE_BYTES + elements)) {
            let (scale, codes) = into.split_at_mut(SCALE_BYTES);
            let chosen = match self.code {
                Code::Int8 => encode_block::<Int8>(from, codes),
                Code::Fp8E4m3 => encode_block::<E4m3>(from, codes),
            };
            scale.copy_from_slice(&chosen.to_ne_bytes());
        }
    }

    /// Decodes all elements.
    ///
    /// # Panics
    /// As [`Quantization::encode`].
    pub fn decode(self, from: &[u8], into: &mut [f32]) {
        assert_eq!(
            Some(from.len()),
            self.encoded_bytes(into.len()),
            "codes for all elements"
        );
        let elements = self.block.elements();
        for (from, into) in from.chunks(SCALE_BYTES + elements).zip(into.chunks_mut(elements)) {
            let (scale, codes) = from.split_at(SCALE_BYTES);
            let scale = f32::from_ne_bytes(scale.try_into().expect("bytes of a scale"));
            for (code, into) in codes.iter().zip(into) {
                *into = match self.code {
                    Code::Int8 => Int8::decode(*code) * scale,
                    Code::Fp8E4m3 => E4m3::decode(*code) * scale,
                };
            }
        }
    }
}

/// An eight-bit code for numbers between −[`ByteCode::MAX`] and [`ByteCode::MAX`].
pub trait ByteCode {
    const MAX: f32;
    /// To nearest, ties to even.
    fn encode(value: f32) -> u8;
    fn decode(code: u8) -> f32;
}

/// A two's complement byte.
#[derive(Clone, Copy, Debug)]
pub enum Int8 {}

impl ByteCode for Int8 {
    const MAX: f32 = 127.0;
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        // Beside this number the last place of an f32 is 1, so that adding rounds; the code is left in the low bits.
        const SHIFTER: f32 = 12_582_912.0;
        (value + SHIFTER).to_bits() as u8
    }
    #[inline(always)]
    fn decode(code: u8) -> f32 {
        f32::from(code as i8)
    }
}

impl ByteCode for E4m3 {
    const MAX: f32 = E4m3::MAX;
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        E4m3::from_f32(value).0
    }
    #[inline(always)]
    fn decode(code: u8) -> f32 {
        E4m3(code).to_f32()
    }
}

/// Encodes one block and returns its scale.
#[inline(always)]
pub fn encode_block<C: ByteCode>(from: &[f32], codes: &mut [u8]) -> f32 {
    // Magnitudes of floats are ordered like their bits, NaN above infinity above all else.
    let magnitude = |value: &f32| value.to_bits() & 0x7fff_ffff;
    let greatest = f32::from_bits(from.iter().map(magnitude).fold(0, u32::max));
    let scale = scale_for::<C>(greatest);
    let inverse = 1.0 / scale;
    for (code, value) in codes.iter_mut().zip(from) {
        // The inverse is rounded, so that the greatest may come out a little above the greatest code.
        let scaled = value * inverse;
        let scaled = if scaled > C::MAX { C::MAX } else { scaled };
        let scaled = if scaled < -C::MAX { -C::MAX } else { scaled };
        *code = C::encode(scaled);
    }
    scale
}

#[inline(always)]
fn scale_for<C: ByteCode>(greatest: f32) -> f32 {
    if !greatest.is_finite() {
        return f32::NAN;
    }
    // Three roundings may each add one part in 2²⁴ to the greatest when it is decoded; so much is taken off here.
    let scale = greatest * (1.0 / C::MAX * (1.0 - 4.0 * f32::EPSILON / 2.0));
    scale.max(f32::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all() -> impl Iterator<Item = Quantization> {
        let blocks = [Block::Of32, Block::Of64, Block::Of128];
        let codes = [Code::Int8, Code::Fp8E4m3];
        codes
            .into_iter()
            .flat_map(move |code| blocks.map(|block| Quantization { code, block }))
    }

    fn check(values: &[f32]) {
        for quantization in all() {
            let mut bytes = vec![0; quantization.encoded_bytes(values.len()).unwrap()];
            quantization.encode(values, &mut bytes);
            let mut back = vec![0.0; values.len()];
            quantization.decode(&bytes, &mut back);
            let elements = quantization.block.elements();
            for (block, back) in values.chunks(elements).zip(back.chunks(elements)) {
                if block.iter().any(|x| !x.is_finite()) {
                    assert!(back.iter().all(|x| x.is_nan()));
                    continue;
                }
                let greatest = block.iter().fold(0f32, |m, x| m.max(x.abs()));
                let bound = f64::from(quantization.code.error_max()) * f64::from(greatest) + 2f64.powi(-123);
                for (x, y) in block.iter().zip(back) {
                    let error = (f64::from(*x) - f64::from(*y)).abs();
                    assert!(error <= bound, "{x} became {y} beside {greatest}: {quantization:?}");
                }
            }
        }
    }

    #[test]
    fn the_ends_of_the_range_and_nothing() {
        check(&[]);
        check(&[0.0, -0.0]);
        check(&[f32::MAX, f32::MIN, 1.0, -1.0]);
        check(&[f32::MIN_POSITIVE, f32::from_bits(1), -f32::from_bits(3)]);
        check(&[1.0, f32::NAN]);
        check(&[f32::NEG_INFINITY; 200]);
    }

    #[test]
    fn whole_numbers_up_to_the_greatest_code_come_back_nearly() {
        let values: Vec<f32> = (-127..=127).map(|x| x as f32).collect();
        check(&values);
        let mut bytes = [0; SCALE_BYTES + 32];
        let one = Quantization {
            code: Code::Int8,
            block: Block::Of32,
        };
        one.encode(&[-1.0; 32], &mut bytes);
        assert_eq!(bytes[SCALE_BYTES..], [-127i8 as u8; 32]);
    }

    proptest! {
        #[test]
        fn the_error_is_within_its_bound(
            values in proptest::collection::vec(prop_oneof![
                4 => -1.0f32..1.0,
                1 => -1e-3f32..1e-3,
            ], 0..300),
            exponent in -149i32..127,
        ) {
            let values: Vec<f32> = values.iter().map(|x| (f64::from(*x) * 2f64.powi(exponent)) as f32).collect();
            check(&values);
        }

        #[test]
        fn so_it_is_for_any_bits(values in proptest::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..300)) {
            check(&values);
        }
    }
}
