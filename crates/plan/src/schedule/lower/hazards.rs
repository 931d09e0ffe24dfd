//! What an op of a rank must wait for on its own rank, for executors that begin ops early.

use std::collections::BTreeSet;

use crate::collective::{Buffer, Problem};
use crate::schedule::{Ops, Program, Slice};
use crate::units::Rank;

/// The nth op of a step must not begin before another op of the rank has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hazard {
    /// Step and position of the op that waits.
    pub op: (u32, u32),
    /// Step and position of the op that it waits for.
    pub after: (u32, u32),
}

/// Who touched a chunk last.
#[derive(Clone, Debug, Default)]
struct Touched {
    writer: Option<(u32, u32)>,
    readers: Vec<(u32, u32)>,
}

/// All that the ops of `rank` in a verified program must wait for besides their messages, in the order of the ops: reads after the last
/// write, and writes after the last write and all reads since. Where `after` is a send, this is when its slice may be overwritten.
pub fn hazards(problem: &Problem, program: &dyn Program, rank: Rank) -> Vec<Hazard> {
    let shape = program.shape();
    let chunks = |buffer| problem.chunks(rank, buffer, shape.pieces) as usize;
    let (input, output) = (chunks(Buffer::Input), chunks(Buffer::Output));
    let mut memory = vec![Touched::default(); input + output + shape.scratch as usize];
    let place = |slice: Slice| {
        let shared = problem.shared(rank, slice.buffer, slice.first, shape.pieces);
        let (buffer, first) = shared.unwrap_or((slice.buffer, slice.first));
        let start = first as usize
            + match buffer {
                Buffer::Input => 0,
                Buffer::Output => input,
                Buffer::Scratch => input + output,
            };
        start..start + slice.count as usize
    };
    let mut found = Vec::new();
    let mut ops = Ops::new();
    for step in 0..shape.steps {
        for (nth, op) in ops.fill(program, rank, step).iter().enumerate() {
            let here = (step, nth as u32);
            let mut waits = BTreeSet::new();
            for slice in op.reads().filter(|slice| !slice.is_empty()) {
                for touched in &mut memory[place(slice)] {
                    waits.extend(touched.writer);
                    touched.readers.push(here);
                }
            }
            if let Some(slice) = op.writes().filter(|slice| !slice.is_empty()) {
                for touched in &mut memory[place(slice)] {
                    waits.extend(touched.writer);
                    waits.extend(touched.readers.drain(..));
                    touched.writer = Some(here);
                }
            }
            waits.remove(&here);
            found.extend(waits.into_iter().map(|after| Hazard { op: here, after }));
        }
    }
    found
}
