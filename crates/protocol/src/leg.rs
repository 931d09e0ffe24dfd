//! One leg of a transfer: spans of a local region paired with spans of a remote one.

use std::ops::Range;

use thiserror::Error;
use weft_plan::Spans;
use weft_plan::spans::paired;

use crate::region::{Region, RemoteRegion};

/// Which way the bytes go, seen from the side that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the remote region into the local one.
    Read,
    /// From the local region into the remote one.
    Write,
}

/// Spans of a local region paired, byte by byte in order, with spans of a remote one.
#[derive(Clone, Debug)]
pub struct Leg {
    local: Region,
    local_spans: Spans,
    remote: RemoteRegion,
    remote_spans: Spans,
    align: u64,
}

/// A leg that cannot be: fix the call.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LegError {
    #[error("the local spans hold {local} bytes, the remote ones {remote}")]
    Unequal { local: u64, remote: u64 },
    #[error("the local memory has {local} bytes and the remote region {remote}: spans say which of them are meant")]
    UnequalSizes { local: u64, remote: u64 },
    #[error("the {side} spans end at byte {end} of a region of {len} bytes")]
    OutOfBounds { side: &'static str, end: u64, len: u64 },
}

impl Leg {
    pub fn new(local: Region, local_spans: Spans, remote: RemoteRegion, remote_spans: Spans) -> Result<Leg, LegError> {
        if local_spans.bytes() != remote_spans.bytes() {
            return Err(LegError::Unequal {
                local: local_spans.bytes(),
                remote: remote_spans.bytes(),
            });
        }
        for (side, end, len) in [
            ("local", local_spans.end(), local.memory.len()),
            ("remote", remote_spans.end(), remote.len),
        ] {
            if end > len {
                return Err(LegError::OutOfBounds { side, end, len });
            }
        }
        let align = alignment(&local_spans).min(alignment(&remote_spans));
        Ok(Leg {
            local,
            local_spans,
            remote,
            remote_spans,
            align,
        })
    }

    pub fn bytes(&self) -> u64 {
        self.local_spans.bytes()
    }
    pub fn local(&self) -> &Region {
        &self.local
    }
    pub fn local_spans(&self) -> &Spans {
        &self.local_spans
    }
    pub fn remote(&self) -> &RemoteRegion {
        &self.remote
    }
    pub fn remote_spans(&self) -> &Spans {
        &self.remote_spans
    }

    /// The largest power of two that every span of both sides begins at a multiple of, and is a multiple of long.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// Where the leg begins on each side, if it is one piece on both.
    pub fn single(&self) -> Option<(u64, u64)> {
        Some((self.local_spans.single()?.offset, self.remote_spans.single()?.offset))
    }

    /// The bytes `range` of the leg as `(local offset, remote offset, len)`, each contiguous on both sides.
    pub fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        paired(&self.local_spans, &self.remote_spans, range)
    }
}

/// The largest power of two that divides where spans begin and how long they are.
fn alignment(spans: &Spans) -> u64 {
    let bits = spans.runs().iter().fold(0, |bits, run| {
        bits | run.offset | run.len | if run.count > 1 { run.stride } else { 0 }
    });
    1 << bits.trailing_zeros().min(63)
}
