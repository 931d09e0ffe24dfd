//! Kernels for block-scaled quantisation; layout, meaning and error are those of [`weft_plan::datatype::quantized`].
//!
//! The code of a block is written once, in `plan`, in a form that compilers turn into vector instructions; here it is compiled for each
//! instruction set and set upon raw memory.

use std::fmt;

use weft_plan::datatype::E4m3;
use weft_plan::datatype::quantized::{Block, ByteCode, Code, Int8, Quantization, SCALE_BYTES, encode_block};

use super::InstructionSet;

/// Encodes and decodes f32 in one way, with the instructions that were found when it was made.
#[derive(Clone, Copy)]
pub struct Quantizer {
    quantization: Quantization,
    instructions: InstructionSet,
    kernels: Kernels,
}

#[derive(Clone, Copy)]
struct Kernels {
    encode: unsafe fn(*mut u8, *const u8, usize),
    decode: unsafe fn(*mut u8, *const u8, usize),
    accumulate: unsafe fn(*mut u8, *const u8, usize),
}

impl Quantizer {
    /// With the best instructions that this processor has.
    pub fn new(quantization: Quantization) -> Quantizer {
        Quantizer::with(InstructionSet::best(), quantization)
    }

    /// With these instructions: for tests and measurements.
    ///
    /// # Panics
    /// Where the processor does not have them.
    pub fn with(instructions: InstructionSet, quantization: Quantization) -> Quantizer {
        assert!(instructions.is_available(), "this processor has no {instructions:?}");
        let kernels = match quantization.code {
            Code::Int8 => for_block::<Int8>(instructions, quantization.block),
            Code::Fp8E4m3 => for_block::<E4m3>(instructions, quantization.block),
        };
        Quantizer {
            quantization,
            instructions,
            kernels,
        }
    }

    pub fn quantization(&self) -> Quantization {
        self.quantization
    }

    /// Encodes `count` floats.
    ///
    /// # Safety
    /// `from` must be valid for reads of `count` floats and `to` for writes of [`Quantization::encoded_bytes`], at any alignment, without
    /// overlap. Others may change what is read meanwhile: then it is unspecified which of their values are encoded.
    pub unsafe fn encode(&self, to: *mut u8, from: *const u8, count: usize) {
        // SAFETY: the caller's promise, handed on; the instructions are there.
        unsafe { (self.kernels.encode)(to, from, count) }
    }

    /// Decodes `count` floats.
    ///
    /// # Safety
    /// As for [`Quantizer::encode`], the other way round.
    pub unsafe fn decode(&self, to: *mut u8, from: *const u8, count: usize) {
        // SAFETY: the caller's promise, handed on; the instructions are there.
        unsafe { (self.kernels.decode)(to, from, count) }
    }

    /// Adds `count` decoded floats to what is there. A NaN is one, but which is unspecified.
    ///
    /// # Safety
    /// As for [`Quantizer::decode`], and `to` must be valid for reads.
    pub unsafe fn accumulate(&self, to: *mut u8, from: *const u8, count: usize) {
        // SAFETY: the caller's promise, handed on; the instructions are there.
        unsafe { (self.kernels.accumulate)(to, from, count) }
    }
}

impl fmt::Debug for Quantizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quantizer({:?} by {:?})", self.quantization, self.instructions)
    }
}

fn for_block<C: ByteCode>(instructions: InstructionSet, block: Block) -> Kernels {
    match block {
        Block::Of32 => for_instructions::<C, 32>(instructions),
        Block::Of64 => for_instructions::<C, 64>(instructions),
        Block::Of128 => for_instructions::<C, 128>(instructions),
    }
}

fn for_instructions<C: ByteCode, const N: usize>(instructions: InstructionSet) -> Kernels {
    match instructions {
        InstructionSet::Portable => Kernels {
            encode: encode::<C, N>,
            decode: decode::<C, N, false>,
            accumulate: decode::<C, N, true>,
        },
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => Kernels {
            encode: x86::encode_avx2::<C, N>,
            decode: x86::decode_avx2::<C, N, false>,
            accumulate: x86::decode_avx2::<C, N, true>,
        },
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => Kernels {
            encode: x86::encode_avx512::<C, N>,
            decode: x86::decode_avx512::<C, N, false>,
            accumulate: x86::decode_avx512::<C, N, true>,
        },
    }
}

/// # Safety
/// As for [`Quantizer::encode`].
#[inline(always)]
unsafe fn encode<C: ByteCode, const N: usize>(mut to: *mut u8, mut from: *const u8, mut count: usize) {
    // The block is copied first, because its scale and its codes must come from the same values.
    let mut values = [0f32; N];
    let mut codes = [0u8; N];
    // SAFETY: whole blocks and then the rest, each within what the caller vouches for.
    unsafe {
        while count >= N {
            values = from.cast::<[f32; N]>().read_unaligned();
            let scale = encode_block::<C>(&values, &mut codes);
            to.cast::<f32>().write_unaligned(scale);
            to.add(SCALE_BYTES).cast::<[u8; N]>().write_unaligned(codes);
            (to, from, count) = (to.add(SCALE_BYTES + N), from.add(4 * N), count - N);
        }
        if count > 0 {
            values.as_mut_ptr().cast::<u8>().copy_from(from, 4 * count);
            let scale = encode_block::<C>(&values[..count], &mut codes[..count]);
            to.cast::<f32>().write_unaligned(scale);
            to.add(SCALE_BYTES).copy_from(codes.as_ptr(), count);
        }
    }
}

/// Decodes, or decodes and adds.
///
/// # Safety
/// As for [`Quantizer::decode`] or [`Quantizer::accumulate`].
#[inline(always)]
unsafe fn decode<C: ByteCode, const N: usize, const ADD: bool>(mut to: *mut u8, mut from: *const u8, mut count: usize) {
    // SAFETY: `count` goes down as both pointers go up, so what is touched stays within what the caller vouches for.
    unsafe {
        while count >= N {
            let scale = from.cast::<f32>().read_unaligned();
            let codes = from.add(SCALE_BYTES).cast::<[u8; N]>().read_unaligned();
            let mut values = [0f32; N];
            if ADD {
                values = to.cast::<[f32; N]>().read_unaligned();
            }
            for i in 0..N {
                let value = C::decode(codes[i]) * scale;
                values[i] = if ADD { values[i] + value } else { value };
            }
            to.cast::<[f32; N]>().write_unaligned(values);
            (to, from, count) = (to.add(4 * N), from.add(SCALE_BYTES + N), count - N);
        }
        if count > 0 {
            let scale = from.cast::<f32>().read_unaligned();
            for i in 0..count {
                let value = C::decode(from.add(SCALE_BYTES + i).read()) * scale;
                let to = to.cast::<f32>().add(i);
                to.write_unaligned(if ADD { to.read_unaligned() + value } else { value });
            }
        }
    }
}

/// The same, compiled for more instructions. All are unsafe as what they call is, and need a processor with these instructions.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ByteCode, decode, encode};

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn encode_avx2<C: ByteCode, const N: usize>(to: *mut u8, from: *const u8, count: usize) {
        // SAFETY: the caller's promise, handed on.
        unsafe { encode::<C, N>(to, from, count) }
    }

    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn decode_avx2<C: ByteCode, const N: usize, const ADD: bool>(
        to: *mut u8,
        from: *const u8,
        count: usize,
    ) {
        // SAFETY: the caller's promise, handed on.
        unsafe { decode::<C, N, ADD>(to, from, count) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn encode_avx512<C: ByteCode, const N: usize>(to: *mut u8, from: *const u8, count: usize) {
        // SAFETY: the caller's promise, handed on.
        unsafe { encode::<C, N>(to, from, count) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn decode_avx512<C: ByteCode, const N: usize, const ADD: bool>(
        to: *mut u8,
        from: *const u8,
        count: usize,
    ) {
        // SAFETY: the caller's promise, handed on.
        unsafe { decode::<C, N, ADD>(to, from, count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn kernels_are_the_reference_at_any_alignment(
            values in proptest::collection::vec(prop_oneof![
                6 => -1e3f32..1e3,
                1 => any::<u32>().prop_map(f32::from_bits),
            ], 0..400),
            skip in 0usize..5,
        ) {
            for code in [Code::Int8, Code::Fp8E4m3] {
                for block in [Block::Of32, Block::Of64, Block::Of128] {
                    check(Quantization { code, block }, &values, skip);
                }
            }
        }
    }

    fn check(quantization: Quantization, values: &[f32], skip: usize) {
        let count = values.len();
        let mut encoded = vec![0; quantization.encoded_bytes(count).unwrap()];
        quantization.encode(values, &mut encoded);
        let mut decoded = vec![0f32; count];
        quantization.decode(&encoded, &mut decoded);
        let bytes = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_ne_bytes()).collect() };
        let bits = |bytes: &[u8]| -> Vec<u32> {
            let float = |b: &[u8]| f32::from_ne_bytes(b.try_into().unwrap());
            let one_nan = |x: f32| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() };
            bytes.chunks(4).map(|b| one_nan(float(b))).collect()
        };
        let sums: Vec<f32> = values.iter().zip(&decoded).map(|(a, b)| a + b).collect();
        let sets = InstructionSet::ALL.iter().filter(|set| set.is_available());
        for quantizer in sets.map(|&set| Quantizer::with(set, quantization)) {
            let from = [vec![0; skip], bytes(values)].concat();
            let mut to = vec![0xa5; skip + encoded.len() + 64];
            // SAFETY: the vectors hold what is read and written after what is skipped.
            unsafe { quantizer.encode(to.as_mut_ptr().add(skip), from.as_ptr().add(skip), count) };
            // The scale of a block with a NaN in it is a NaN, whichever.
            if values.iter().all(|x| x.is_finite()) {
                assert!(to[skip..skip + encoded.len()] == encoded, "{quantizer:?}");
            }
            assert!(
                to[skip + encoded.len()..].iter().all(|&b| b == 0xa5),
                "{quantizer:?} wrote too much"
            );
            let mut back = vec![0xa5; skip + 4 * count + 64];
            // SAFETY: what was encoded is so long, and the floats have 64 bytes to spare.
            unsafe { quantizer.decode(back.as_mut_ptr().add(skip), to.as_ptr().add(skip), count) };
            let (whole, after) = back[skip..].split_at(4 * count);
            assert!(bits(whole) == bits(&bytes(&decoded)), "{quantizer:?} decodes");
            assert!(after.iter().all(|&b| b == 0xa5), "{quantizer:?} wrote too much");
            let mut sum = from.clone();
            // SAFETY: the sum has as many floats as were encoded.
            unsafe { quantizer.accumulate(sum.as_mut_ptr().add(skip), to.as_ptr().add(skip), count) };
            assert!(bits(&sum[skip..]) == bits(&bytes(&sums)), "{quantizer:?} accumulates");
        }
    }
}
