//! That no two ops of a step touch a chunk that one of them writes.

use std::ops::Range;

use super::{At, Fault, Memory};
use crate::schedule::{Op, Slice};
use crate::units::Rank;

/// A piece of memory that an op touches.
#[derive(Clone, Debug)]
struct Access {
    range: Range<usize>,
    writes: bool,
    op: usize,
}

pub(super) fn none(memory: &Memory, rank: Rank, step: u32, ops: &[Op]) -> Result<(), Fault> {
    let range = |slice: Slice| {
        let start = memory.locate(rank, slice.buffer, slice.first);
        start..start + slice.count as usize
    };
    let mut accesses: Vec<Access> = Vec::with_capacity(2 * ops.len());
    // What was written so far, so that a reduction on top of it is known: it adds no access of its own to what it goes into.
    let mut written: Vec<Range<usize>> = Vec::new();
    for (op, what) in ops.iter().enumerate() {
        let mut add = |slice: Slice, writes: bool| {
            if !slice.is_empty() {
                accesses.push(Access {
                    range: range(slice),
                    writes,
                    op,
                });
            }
        };
        match *what {
            Op::Send { slice, .. } => add(slice, false),
            Op::Receive { slice, .. } => {
                add(slice, true);
                written.push(range(slice));
            }
            Op::Copy { from, to } => {
                // Onto itself, as in place: nothing happens.
                if from.is_empty() || range(from) != range(to) {
                    add(from, false);
                    add(to, true);
                    written.push(range(to));
                }
            }
            Op::ReceiveReduce { with, into, .. } | Op::Reduce { with, into, .. } => {
                if let Op::Reduce { from, .. } = *what {
                    add(from, false);
                }
                if into.is_empty() {
                    continue;
                }
                let onto_itself = range(with) == range(into);
                if onto_itself && written.contains(&range(into)) {
                    continue;
                }
                written.push(range(into));
                add(into, true);
                if !onto_itself {
                    add(with, false);
                }
            }
        }
    }
    accesses.sort_by_key(|access| (access.range.start, !access.writes, access.op));
    let mut last_write: Option<&Access> = None;
    let mut last_any: Option<&Access> = None;
    for access in &accesses {
        let before = if access.writes { last_any } else { last_write };
        if let Some(before) = before
            && before.range.end > access.range.start
        {
            return Err(Fault::Race {
                at: At {
                    rank,
                    step,
                    op: before.op.max(access.op),
                },
                other: before.op.min(access.op),
                ops: Box::new([ops[before.op.min(access.op)], ops[before.op.max(access.op)]]),
            });
        }
        let further = |last: Option<&Access>| last.is_none_or(|last| last.range.end < access.range.end);
        if access.writes && further(last_write) {
            last_write = Some(access);
        }
        if further(last_any) {
            last_any = Some(access);
        }
    }
    Ok(())
}
