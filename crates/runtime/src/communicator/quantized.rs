//! An all-reduce whose messages are a quarter as long: floats travel as eight-bit codes with a scale for each block.
//!
//! Every rank encodes its input and sends each rank a share; whoever has a share decodes all contributions to it, adds them as f32 in the
//! order of the ranks, and encodes the sum for all. So a contribution is rounded once and the sum once, however many ranks there are, and
//! the result has the same bits on all ranks and in every run.

use std::sync::PoisonError;
use std::time::Duration;

use weft_fabric::kernels::{Floats, QuantizedKernels};
use weft_plan::datatype::quantized::Quantization;
use weft_plan::{Datatype, Reduction};

use super::prepare::CallError;
use super::{Communicator, Part};
use crate::error::Error;
use crate::memory::{Memory, after};

/// How a quantised all-reduce is done. All ranks must say the same.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedOptions {
    pub quantization: Quantization,
    /// Sum or average.
    pub reduction: Reduction,
    /// By when it ends, counted from its start; by default that of the communicator.
    pub deadline: Option<Duration>,
}

impl QuantizedOptions {
    pub fn new(quantization: Quantization) -> QuantizedOptions {
        QuantizedOptions {
            quantization,
            reduction: Reduction::Sum,
            deadline: None,
        }
    }
}

/// Which rank adds up which elements: whole blocks, the same number for each rank but the last ones.
#[derive(Clone, Copy, Debug)]
struct Shares {
    quantization: Quantization,
    count: u64,
    /// Elements of a whole share, and the bytes that they are encoded into.
    elements: u64,
    encoded: u64,
}

impl Shares {
    fn new(quantization: Quantization, count: u64, ranks: u64) -> Option<Shares> {
        let block = quantization.block.elements() as u64;
        let elements = count.div_ceil(block).div_ceil(ranks).checked_mul(block)?;
        let encoded = quantization.encoded_bytes(usize::try_from(elements).ok()?)? as u64;
        // What is allocated: encoded shares twice, and one as floats.
        let room = encoded.checked_mul(2 * ranks)?.checked_add(elements.checked_mul(4)?)?;
        let count = usize::try_from(room).ok().map(|_| count)?;
        Some(Shares {
            quantization,
            count,
            elements,
            encoded,
        })
    }

    /// The first element of a share, and how many there are.
    fn of(&self, rank: u64) -> (u64, u64) {
        let first = (rank * self.elements).min(self.count);
        (first, (self.count - first).min(self.elements))
    }
}

impl Communicator {
    /// Every rank ends with about the sum or the average of all inputs, which are f32; in place where input and output are the same.
    ///
    /// With m the sum over all ranks of the greatest magnitude in an element's block, the error of a sum is at most
    /// [`Quantization::reduced_error_max`] of m: about 2 · 1/254 · m in eight-bit integers, 2 · 1/28 · m in fp8. A block with an infinity or a
    /// NaN ends as NaN throughout. Runs, and cannot be started: it is two calls, with work between them.
    pub fn all_reduce_quantized(
        &self,
        input: impl Into<Part>,
        output: impl Into<Part>,
        options: QuantizedOptions,
    ) -> Result<(), Error> {
        let (input, output) = (input.into(), output.into());
        if !matches!(options.reduction, Reduction::Sum | Reduction::Avg) {
            return Err(CallError::NotQuantized {
                reduction: options.reduction,
            }
            .into());
        }
        let datatype = Datatype::F32;
        if !input.len.is_multiple_of(4) || input.len != output.len {
            let bytes = output.len;
            return Err(CallError::Uneven { bytes, datatype }.into());
        }
        let (ranks, own) = (u64::from(self.size()), u64::from(self.rank().0));
        let shares = Shares::new(options.quantization, input.len / 4, ranks);
        let shares = shares.ok_or(CallError::Compile(weft_protocol::group::CompileError::TooLarge))?;
        let shared = self.agent().shared()?;
        let until = after(shared, options.deadline.unwrap_or(self.inner.options.deadline));
        let left = || Duration::from(until.saturating_sub(shared.clock.now()));

        let member = self.inner.member()?;
        let mut scratch = member.quantized.lock().unwrap_or_else(PoisonError::into_inner);
        let whole = shares.encoded * ranks;
        let memory = room(&mut scratch, self, 2 * whole + 4 * shares.elements)?;
        let (sent, received) = (memory.part(0..whole), memory.part(whole..2 * whole));
        let sum = memory.part(2 * whole..2 * whole + 4 * shares.elements);
        let block = |part: &Part, rank: u64| part.within(rank * shares.encoded, shares.encoded);
        let kernels = QuantizedKernels::new(options.quantization);
        for rank in 0..ranks {
            let (first, count) = shares.of(rank);
            kernels.encode(floats(&input, first, count), block(&sent, rank).bytes());
        }
        let exchange = self.all_to_all(&sent, &received, Datatype::U8);
        exchange.quantized(shares.quantization).deadline(left()).run()?;
        let (_, count) = shares.of(own);
        for rank in 0..ranks {
            let (from, into) = (block(&received, rank), floats(&sum, 0, count));
            match rank {
                0 => kernels.decode(from.bytes(), into),
                _ => kernels.accumulate(from.bytes(), into),
            }
        }
        if options.reduction == Reduction::Avg {
            kernels.divide(floats(&sum, 0, count), ranks);
        }
        // Everybody has read what was sent, so that there is room for what comes.
        kernels.encode(floats(&sum, 0, count), block(&sent, own).bytes());
        let exchange = self.all_gather(block(&sent, own), &sent, Datatype::U8);
        exchange.quantized(shares.quantization).deadline(left()).run()?;
        for rank in 0..ranks {
            let (first, count) = shares.of(rank);
            kernels.decode(block(&sent, rank).bytes(), floats(&output, first, count));
        }
        Ok(())
    }
}

/// Some floats of a part.
fn floats(part: &Part, first: u64, count: u64) -> Floats<'_> {
    Floats {
        memory: part.host(),
        offset: part.offset + 4 * first,
        count: count as usize,
    }
}

/// Memory for codes, kept from call to call.
fn room<'a>(scratch: &'a mut Option<Memory>, group: &Communicator, bytes: u64) -> Result<&'a Memory, Error> {
    if scratch.as_ref().is_none_or(|memory| memory.len() < bytes) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        *scratch = None;
        *scratch = Some(
            group
                .agent()
                .allocate(bytes.checked_next_power_of_two().unwrap_or(bytes))?,
        );
    }
    match scratch {
        Some(memory) => Ok(memory),
        None => Err(Error::Stopped),
    }
}

#[cfg(test)]
mod tests {
    use weft_plan::datatype::quantized::{Block, Code};

    use super::*;

    #[test]
    fn shares_are_whole_blocks_and_cover_everything_once() {
        for block in [Block::Of32, Block::Of64, Block::Of128] {
            let code = Code::Int8;
            for (count, ranks) in [(0, 1), (1, 4), (31, 2), (32, 2), (1000, 3), (4096, 5), (129, 64)] {
                let shares = Shares::new(Quantization { code, block }, count, ranks).unwrap();
                let mut next = 0;
                for rank in 0..ranks {
                    let (first, elements) = shares.of(rank);
                    assert_eq!(first, next);
                    assert!(elements == shares.elements || first + elements == count);
                    next = first + elements;
                }
                assert_eq!(next, count);
            }
            assert!(Shares::new(Quantization { code, block }, u64::MAX, 2).is_none());
        }
    }
}
