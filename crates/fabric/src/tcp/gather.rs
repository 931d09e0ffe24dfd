//! From span lists to the addresses that a system call wants, no more of them than one call takes.

use std::ops::Range;

use weft_plan::Spans;
use weft_protocol::{Refusal, Region};

use super::socket::Vectors;
use crate::memory::HostMemory;

/// The host memory behind a region; this transport moves no other.
pub(super) fn host(region: &Region) -> Result<&HostMemory, Refusal> {
    region
        .memory
        .as_any()
        .downcast_ref::<HostMemory>()
        .ok_or(Refusal::Unsupported)
}

/// Collects the addresses of bytes `range` of a span list, as many as there is room for, and returns how many bytes they are.
///
/// The cost is that of finding the first span, and then of the spans collected; never of the list.
pub(super) fn gather(region: &Region, spans: &Spans, range: Range<u64>, vectors: &mut Vectors) -> u64 {
    let Ok(memory) = host(region) else { return 0 };
    if memory.may_vanish() {
        vectors.beware();
    }
    let mut bytes = 0;
    for piece in spans.pieces(range).take(vectors.room()) {
        let end = piece.offset.checked_add(piece.len);
        assert!(
            end.is_some_and(|end| end <= weft_protocol::Memory::len(memory)),
            "a span outside its region got past the check"
        );
        // The bounds were checked, so the address is within the memory and the numbers fit.
        vectors.push(memory.as_ptr().wrapping_add(piece.offset as usize), piece.len as usize);
        bytes += piece.len;
    }
    bytes
}
