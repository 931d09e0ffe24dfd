//! What a rank does to its own memory in a collective, at the speed of that memory.

use weft_plan::datatype::quantized::Quantization;
use weft_plan::{Datatype, Reduction};
use weft_protocol::Memory;
use weft_protocol::group::{At, Combiner, Kernels, Reference};

use crate::copy;
use crate::memory::HostMemory;
use crate::reduce::quantized::Quantizer;
use crate::reduce::{Cache, Reducer};

/// Kernels for host memory. Other memory is left to the reference.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostKernels;

impl Kernels for HostKernels {
    fn copy(&self, from: At<'_>, to: At<'_>, len: u64) {
        let (Some(source), Some(target)) = (address(from, len), address(to, len)) else {
            return Reference.copy(from, to, len);
        };
        // SAFETY: both are within their memories, as `address` has checked; pieces of one call that are not the same do not overlap.
        unsafe { copy::copy(target, source, len as usize) }
    }

    fn combine(&self, how: &Combiner, with: At<'_>, from: At<'_>, into: At<'_>, len: u64) {
        let places = (address(with, len), address(from, len), address(into, len));
        match (how, places) {
            (Combiner::Builtin { datatype, reduction }, (Some(with), Some(from), Some(into))) => {
                let count = len as usize / datatype.size();
                let reducer = Reducer::new(*datatype, *reduction);
                // SAFETY: all are within their memories, as `address` has checked; the target is one of the sources or apart from them.
                unsafe { reducer.combine(into, with, from, count, Cache::BySize) }
            }
            _ => Reference.combine(how, with, from, into, len),
        }
    }

    fn divide(&self, datatype: Datatype, at: At<'_>, len: u64, by: u64) {
        let (Some(sum), Some(by)) = (address(at, len), std::num::NonZeroU64::new(by)) else {
            return Reference.divide(datatype, at, len, by);
        };
        let reducer = Reducer::new(datatype, Reduction::Avg).finishing(by);
        // SAFETY: within its memory, as `address` has checked; the target is the source.
        unsafe { reducer.combine_many(sum, &[sum], len as usize / datatype.size(), Cache::BySize) }
    }
}

/// Floats in host memory.
#[derive(Clone, Copy, Debug)]
pub struct Floats<'a> {
    pub memory: &'a HostMemory,
    pub offset: u64,
    pub count: usize,
}

/// Encodes and decodes floats where they lie. Codes are told by where they begin; there are as many as there are floats.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedKernels(Quantizer);

impl QuantizedKernels {
    pub fn new(quantization: Quantization) -> QuantizedKernels {
        QuantizedKernels(Quantizer::new(quantization))
    }

    /// # Panics
    /// Where floats or codes are not all within their memories, or overlap; so for the others.
    pub fn encode(&self, from: Floats<'_>, to: (&HostMemory, u64)) {
        let (floats, codes) = self.places(from, to);
        // SAFETY: both are within their memories and apart, as `places` has checked.
        unsafe { self.0.encode(codes, floats, from.count) }
    }

    pub fn decode(&self, from: (&HostMemory, u64), to: Floats<'_>) {
        let (floats, codes) = self.places(to, from);
        // SAFETY: as above.
        unsafe { self.0.decode(floats, codes, to.count) }
    }

    /// Adds what is decoded to what is there.
    pub fn accumulate(&self, from: (&HostMemory, u64), to: Floats<'_>) {
        let (floats, codes) = self.places(to, from);
        // SAFETY: as above.
        unsafe { self.0.accumulate(floats, codes, to.count) }
    }

    pub fn divide(&self, floats: Floats<'_>, by: u64) {
        let at = At {
            memory: floats.memory,
            offset: floats.offset,
        };
        HostKernels.divide(Datatype::F32, at, 4 * floats.count as u64, by);
    }

    fn places(&self, floats: Floats<'_>, codes: (&HostMemory, u64)) -> (*mut u8, *mut u8) {
        let place = |memory: &HostMemory, offset: u64, len: usize| {
            let end = offset.checked_add(len as u64);
            assert!(end.is_some_and(|end| end <= memory.len()), "bytes outside of a memory");
            // SAFETY: within the memory, as just checked.
            unsafe { memory.as_ptr().add(offset as usize) }
        };
        let (bytes, encoded) = (
            floats.count.checked_mul(4),
            self.0.quantization().encoded_bytes(floats.count),
        );
        let (Some(bytes), Some(encoded)) = (bytes, encoded) else {
            panic!("more floats than there are addresses");
        };
        let (floats, codes) = (
            place(floats.memory, floats.offset, bytes),
            place(codes.0, codes.1, encoded),
        );
        let (a, b) = (floats as usize, codes as usize);
        assert!(a + bytes <= b || b + encoded <= a, "floats and their codes overlap");
        (floats, codes)
    }
}

/// Where in this process the bytes are, if they are host memory.
///
/// # Panics
/// Where they are not all within the memory.
fn address(at: At<'_>, len: u64) -> Option<*mut u8> {
    let memory = at.memory.as_any().downcast_ref::<HostMemory>()?;
    let end = at.offset.checked_add(len);
    assert!(end.is_some_and(|end| end <= memory.len()), "bytes outside of a memory");
    // SAFETY: within the memory, as just checked.
    Some(unsafe { memory.as_ptr().add(at.offset as usize) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use weft_plan::datatype::quantized::{Block, Code};
    use weft_protocol::VecMemory;

    use super::*;

    #[test]
    fn codes_where_they_lie_are_those_of_the_plan() {
        let quantization = Quantization {
            code: Code::Int8,
            block: Block::Of32,
        };
        let numbers: Vec<f32> = (0..100).map(|at| (at as f32 - 40.0) * 0.37).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        let encoded = quantization.encoded_bytes(numbers.len()).unwrap();
        let memory = HostMemory::from_vec([bytes, vec![0; encoded]].concat());
        let floats = Floats {
            memory: &memory,
            offset: 0,
            count: numbers.len(),
        };
        let kernels = QuantizedKernels::new(quantization);
        kernels.encode(floats, (&memory, 400));
        let mut expected = vec![0; encoded];
        quantization.encode(&numbers, &mut expected);
        assert_eq!(memory.snapshot()[400..], expected[..]);
        kernels.decode((&memory, 400), floats);
        kernels.accumulate((&memory, 400), floats);
        kernels.divide(floats, 2);
        let mut decoded = vec![0.0; numbers.len()];
        quantization.decode(&expected, &mut decoded);
        let found = memory.snapshot();
        let found = found[..400]
            .chunks_exact(4)
            .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        assert!(found.eq(decoded));
    }

    proptest! {
        #[test]
        fn they_do_what_the_reference_does(
            bytes in prop::collection::vec(any::<u8>(), 512),
            datatype in 0usize..14,
            reduction in 0usize..5,
            elements in 0u64..20,
            offset in 0u64..100,
            by in 1u64..9,
        ) {
            let (datatype, reduction) = (Datatype::ALL[datatype], Reduction::ALL[reduction]);
            let how = Combiner::Builtin { datatype, reduction };
            let len = elements * datatype.size() as u64;
            let (host, plain) = (HostMemory::from_vec(bytes.clone()), VecMemory::new(bytes));
            let run = |kernels: &dyn Kernels, memory: &dyn Memory| {
                let at = |offset| At { memory, offset };
                kernels.combine(&how, at(offset), at(200), at(offset), len);
                kernels.combine(&how, at(0), at(200), at(360), len.min(128));
                kernels.copy(at(360), at(200), len.min(128));
                kernels.divide(datatype, at(200), len.min(128), by);
            };
            run(&HostKernels, &host);
            run(&Reference, &plain);
            prop_assert_eq!(host.snapshot(), plain.snapshot());
        }
    }
}
