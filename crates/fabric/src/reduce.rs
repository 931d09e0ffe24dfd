//! Reducing at the speed of the memory.
//!
//! A [`Reducer`] is one datatype with one reduction, bound to the best instruction set of this processor when it is made; from then on a
//! call is one jump through a pointer. All work is on raw memory at any alignment, because the sources may be a peer's mapped
//! buffers, read where they lie: [`Reducer::combine`] receives and reduces in one pass. What the results are, to the last bit, is
//! defined by [`weft_plan::datatype`], and does not depend on the instruction set.
//!
//! ```
//! use weft_fabric::reduce::Reducer;
//! use weft_plan::{Datatype, Reduction};
//! let (mut ours, theirs) = ([1.5f32, 2.5], [10.0f32, 20.0]);
//! let sum = Reducer::new(Datatype::F32, Reduction::Sum);
//! // SAFETY: both arrays hold two elements.
//! unsafe { sum.reduce_into(ours.as_mut_ptr().cast(), theirs.as_ptr().cast(), 2) };
//! assert_eq!(ours, [11.5, 22.5]);
//! ```

mod arithmetic;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod kernel;
mod level;
pub mod quantized;
#[cfg(test)]
mod tests;

use std::fmt;
use std::num::NonZeroU64;

use weft_plan::{Datatype, Reduction};

use crate::copy::{STREAM_MIN_BYTES, copy, copy_streaming};
use arithmetic::Divisor;
use kernel::{Kernels, Operation};
pub use level::InstructionSet;

/// Reduces elements of one datatype in one way. See the [module](self).
#[derive(Clone, Copy)]
pub struct Reducer {
    datatype: Datatype,
    reduction: Reduction,
    instructions: InstructionSet,
    /// What a finished average is divided by.
    divisor: Option<Divisor>,
    kernels: Kernels,
}

/// Whether results are left in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Few are left there, and many are written past it, where that spares reading the destination first.
    #[default]
    BySize,
    /// For results that are read next, and for pieces that stay in the cache until they are.
    Keep,
    /// For pieces of something large that nobody reads soon.
    Bypass,
}

impl Reducer {
    /// With the best instructions that this processor has. An average sums until [`Reducer::finishing`] says that it is complete.
    pub fn new(datatype: Datatype, reduction: Reduction) -> Reducer {
        Reducer::with(InstructionSet::best(), datatype, reduction)
    }

    /// With these instructions: for tests and measurements.
    ///
    /// # Panics
    /// Where the processor does not have them.
    pub fn with(instructions: InstructionSet, datatype: Datatype, reduction: Reduction) -> Reducer {
        assert!(instructions.is_available(), "this processor has no {instructions:?}");
        let operation = match reduction {
            Reduction::Sum | Reduction::Avg => Operation::Sum,
            Reduction::Prod => Operation::Product,
            Reduction::Min => Operation::Lesser,
            Reduction::Max => Operation::Greater,
        };
        Reducer {
            datatype,
            reduction,
            instructions,
            divisor: None,
            kernels: Kernels::find(instructions, datatype, operation),
        }
    }

    /// For the last step of a reduction of so many contributions: an average divides what it has summed in the same pass.
    /// Everything else stays as it is.
    pub fn finishing(self, contributions: NonZeroU64) -> Reducer {
        if self.reduction != Reduction::Avg {
            return self;
        }
        Reducer {
            divisor: Some(Divisor::new(contributions)),
            kernels: Kernels::find(self.instructions, self.datatype, Operation::Average),
            ..self
        }
    }

    pub fn datatype(&self) -> Datatype {
        self.datatype
    }

    pub fn reduction(&self) -> Reduction {
        self.reduction
    }

    /// `to[i] = to[i] ⊕ from[i]` for `count` elements.
    ///
    /// # Safety
    /// `to` must be valid for reads and writes and `from` for reads of `count` elements, at any alignment. They are equal or do not
    /// overlap. Others may change the sources meanwhile: then it is unspecified which of their values are reduced.
    pub unsafe fn reduce_into(&self, to: *mut u8, from: *const u8, count: usize) {
        // SAFETY: the caller's promise, handed on.
        unsafe { self.combine(to, to, from, count, Cache::Keep) }
    }

    /// `to[i] = a[i] ⊕ b[i]` for `count` elements.
    ///
    /// # Safety
    /// `to` must be valid for writes, `a` and `b` for reads of `count` elements, at any alignment. `to` is equal to a source or does
    /// not overlap it. Others may change the sources meanwhile: then it is unspecified which of their values are reduced.
    pub unsafe fn combine(&self, to: *mut u8, a: *const u8, b: *const u8, count: usize, cache: Cache) {
        let bytes = self.bytes(count);
        let stream = self.streams(cache, bytes, &[to], &[a, b]);
        // SAFETY: the caller's promise, handed on; the instructions are there.
        unsafe { (self.kernels.pair)([to], [a, b], bytes, &self.divisor(), stream) }
    }

    /// `to[0][i] = to[1][i] = a[i] ⊕ b[i]` for `count` elements: all that two ranks need, done by one of them.
    ///
    /// # Safety
    /// As for [`Reducer::combine`], with two destinations that do not overlap each other.
    pub unsafe fn combine_both(&self, to: [*mut u8; 2], a: *const u8, b: *const u8, count: usize, cache: Cache) {
        let bytes = self.bytes(count);
        let stream = self.streams(cache, bytes, &to, &[a, b]);
        // SAFETY: the caller's promise, handed on; the instructions are there.
        unsafe { (self.kernels.pair_both)(to, [a, b], bytes, &self.divisor(), stream) }
    }

    /// `to[i] = from[0][i] ⊕ from[1][i] ⊕ …` for `count` elements, from left to right, rounding once. From a single source this is a copy,
    /// or, in the last step of an average, a division.
    ///
    /// # Safety
    /// As for [`Reducer::combine`], for all sources.
    ///
    /// # Panics
    /// Where there is no source.
    pub unsafe fn combine_many(&self, to: *mut u8, from: &[*const u8], count: usize, cache: Cache) {
        let bytes = self.bytes(count);
        let stream = self.streams(cache, bytes, &[to], from);
        // SAFETY: the caller's promise, handed on; the instructions are there.
        unsafe {
            match *from {
                [] => panic!("a reduction of nothing"),
                [only] if self.divisor.is_none() => match cache {
                    Cache::BySize => copy(to, only, bytes),
                    Cache::Keep => to.copy_from(only, bytes),
                    Cache::Bypass => copy_streaming(to, only, bytes),
                },
                [a, b] => (self.kernels.pair)([to], [a, b], bytes, &self.divisor(), stream),
                _ => (self.kernels.many)([to], from, bytes, &self.divisor(), stream),
            }
        }
    }

    fn bytes(&self, count: usize) -> usize {
        count
            .checked_mul(self.datatype.size())
            .expect("elements that fit into memory")
    }

    fn divisor(&self) -> Divisor {
        self.divisor.unwrap_or(Divisor::ONE)
    }

    /// Streaming stores write whole lines, so elements must not straddle them, and two destinations must lie alike. A source's line is in
    /// the cache already.
    fn streams(&self, cache: Cache, bytes: usize, to: &[*mut u8], from: &[*const u8]) -> bool {
        let many = match cache {
            Cache::BySize => bytes >= STREAM_MIN_BYTES,
            Cache::Keep => false,
            Cache::Bypass => true,
        };
        let offset = to[0] as usize % level::LINE;
        many && offset.is_multiple_of(self.datatype.size())
            && to.iter().all(|&to| to as usize % level::LINE == offset)
            && !to.iter().any(|&to| from.contains(&to.cast_const()))
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reducer {
            datatype,
            reduction,
            instructions,
            ..
        } = self;
        write!(f, "Reducer({reduction} of {datatype} by {instructions:?})")
    }
}
