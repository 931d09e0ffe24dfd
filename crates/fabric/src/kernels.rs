//! What a rank does to its own memory in a collective, at the speed of that memory.

use weft_plan::{Datatype, Reduction};
use weft_protocol::Memory;
use weft_protocol::group::{At, Combiner, Kernels, Reference};

use crate::copy;
use crate::memory::HostMemory;
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
    use weft_protocol::VecMemory;

    use super::*;

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
