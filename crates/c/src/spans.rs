//! Which bytes, as C writes it: lists of spans, in legs.

use weft::{Memory, Remote, Span, Spans};

use crate::arguments::{Plain, at, list, structure};
use crate::boundary::other;
use crate::failure::Failed;
use crate::memory::MemoryHandle;
use crate::peer::RegionHandle;

/// `weft_span`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SpanOfBytes {
    pub offset: u64,
    pub length: u64,
}

/// `weft_leg`.
#[derive(Debug)]
#[repr(C)]
pub struct LegOfTransfer {
    pub size: usize,
    pub local: *mut MemoryHandle,
    pub remote: *mut RegionHandle,
    pub local_spans: *const SpanOfBytes,
    pub local_count: usize,
    pub remote_spans: *const SpanOfBytes,
    pub remote_count: usize,
}

// SAFETY: numbers and raw pointers, for all of which zero is a value.
unsafe impl Plain for LegOfTransfer {
    const FIRST_SIZE: usize = 56;
}

/// A leg that has been looked at.
#[derive(Debug)]
pub struct Leg<'a> {
    pub local: &'a Memory,
    pub remote: &'a Remote,
    /// Here and there; all of both where nothing was said.
    pub spans: Option<(Spans, Spans)>,
}

/// The legs of a transfer. The first says how far they are apart, because the caller's may be longer than this library's.
///
/// # Safety
/// If it is not null and aligned it points to `count` legs of the size that each of them names, whose handles nobody gives back meanwhile.
pub unsafe fn legs<'a>(first: *const LegOfTransfer, count: usize) -> Result<Vec<Leg<'a>>, Failed> {
    if count == 0 {
        return Err(Failed::invalid("a transfer has at least one leg"));
    }
    let first = at(first.cast_mut(), "legs")?;
    // SAFETY: as the caller says, a leg begins with its size.
    let stride = unsafe { first.cast::<usize>().read() };
    if !stride.is_multiple_of(align_of::<LegOfTransfer>())
        || stride
            .checked_mul(count)
            .is_none_or(|bytes| bytes > isize::MAX as usize)
    {
        return Err(Failed::invalid(format!("{count} legs of {stride} bytes")));
    }
    let mut taken = Vec::new();
    for index in 0..count {
        // SAFETY: as the caller says, so many of this size are there.
        let leg = unsafe { structure(first.as_ptr().byte_add(index * stride), "a leg") }?;
        if leg.size != stride {
            return Err(Failed::invalid(format!(
                "leg {index} has a size of {}, the first one {stride}",
                leg.size
            )));
        }
        // SAFETY: likewise.
        taken.push(unsafe { Leg::of(&leg) }?);
    }
    Ok(taken)
}

impl<'a> Leg<'a> {
    /// # Safety
    /// Its handles are some, or null, and its lists are as long as it says.
    unsafe fn of(leg: &LegOfTransfer) -> Result<Leg<'a>, Failed> {
        // SAFETY: as the caller says.
        let (local, remote, here, there) = unsafe {
            (
                other(leg.local)?,
                other(leg.remote)?,
                list(leg.local_spans, leg.local_count, "local_spans")?,
                list(leg.remote_spans, leg.remote_count, "remote_spans")?,
            )
        };
        let all = leg.local_spans.is_null() && leg.remote_spans.is_null();
        Ok(Leg {
            local: &local.memory,
            remote: &remote.remote,
            spans: match all {
                true => None,
                false => Some((spans(here)?, spans(there)?)),
            },
        })
    }
}

fn spans(list: &[SpanOfBytes]) -> Result<Spans, Failed> {
    let mut spans = Spans::new();
    for (index, SpanOfBytes { offset, length }) in list.iter().enumerate() {
        // What the list would refuse by a panic.
        if offset.checked_add(*length).is_none() || spans.bytes().checked_add(*length).is_none() {
            return Err(Failed::invalid(format!("span {index} ends past 2^64")));
        }
        spans.push(Span {
            offset: *offset,
            len: *length,
        });
    }
    Ok(spans)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_that_no_memory_has_are_refused() {
        let span = |offset, length| SpanOfBytes { offset, length };
        assert_eq!(spans(&[span(0, 8), span(16, 8), span(4, 0)]).unwrap().bytes(), 16);
        assert!(spans(&[span(u64::MAX, 1)]).is_err());
        assert!(spans(&[span(0, u64::MAX), span(0, u64::MAX)]).is_err());
    }
}
