//! Which sends can be done in the same pass as the receive before them.
//!
//! What comes in one step is often sent on in the next: a ring does little else. An executor that knows so writes what it receives or
//! reduces to its own memory and to the next rank's at once, or passes it on while it still comes.

use std::collections::HashMap;
use std::ops::Range;

use crate::schedule::{Channel, Op, Ops, Program};
use crate::units::Rank;

/// An op, and to whom its result is sent on. The meaning is that of the op in its step and of the sends in the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pass {
    pub op: Op,
    pub forward: Vec<Forward>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Forward {
    pub to: Rank,
    pub channel: Channel,
    /// The position of the send among the ops of the next step.
    pub op: u32,
}

/// The steps of a rank as passes.
///
/// The sends of a step are to be posted before what it forwards, and that in the order of the passes; then the messages of every
/// channel stay in order.
pub fn fuse(program: &dyn Program, rank: Rank) -> Vec<Vec<Pass>> {
    let mut ops = Ops::new();
    let mut fused: Vec<Vec<Pass>> = Vec::new();
    for step in 0..program.shape().steps {
        let all = ops.fill(program, rank, step);
        let mut done = vec![false; all.len()];
        if let Some(before) = fused.last_mut() {
            forward(before, all, &mut done);
        }
        let left = all.iter().zip(done).filter(|(_, done)| !done);
        let passes = left.map(|(&op, _)| Pass {
            op,
            forward: Vec::new(),
        });
        fused.push(passes.collect());
    }
    fused
}

/// Moves sends of the step `after` to the passes of the step before it, and notes which are done by that.
fn forward(before: &mut [Pass], after: &[Op], done: &mut [bool]) {
    // On every channel, the last pass that forwards, and whether a send had to stay: then all that follow must stay too.
    let mut channels: HashMap<(Rank, Channel), (usize, bool)> = HashMap::new();
    for (position, op) in after.iter().enumerate() {
        let Op::Send { to, slice, channel } = *op else {
            continue;
        };
        let (last, stays) = channels.entry((to, channel)).or_insert((0, false));
        // The last op that writes the slice is the one whose result it is; one that writes only part of it spoils it.
        let source = before.iter().rposition(|pass| {
            let written = pass.op.writes();
            written.is_some_and(|written| written.buffer == slice.buffer && overlap(written.chunks(), slice.chunks()))
        });
        match source {
            Some(source)
                if !*stays
                    && source >= *last
                    && before[source].op.writes() == Some(slice)
                    && before[source].op.peer().is_some() =>
            {
                *last = source;
                done[position] = true;
                before[source].forward.push(Forward {
                    to,
                    channel,
                    op: position as u32,
                });
            }
            _ => *stays = true,
        }
    }
}

fn overlap(a: Range<u64>, b: Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The ops that passes mean, step by step: what [`fuse`] was given.
pub fn unfuse(passes: &[Vec<Pass>]) -> Vec<Vec<Op>> {
    let mut steps: Vec<Vec<Op>> = Vec::new();
    let mut sends: Vec<(u32, Op)> = Vec::new();
    for step in passes {
        let mut left = step.iter().map(|pass| pass.op);
        let total = (step.len() + sends.len()) as u32;
        let mut due = std::mem::take(&mut sends).into_iter().peekable();
        let ops = (0..total).filter_map(|position| match due.next_if(|(at, _)| *at == position) {
            Some((_, send)) => Some(send),
            None => left.next(),
        });
        steps.push(ops.collect());
        for pass in step {
            let sent = pass.forward.iter().filter_map(|forward| {
                let send = Op::Send {
                    to: forward.to,
                    slice: pass.op.writes()?,
                    channel: forward.channel,
                };
                Some((forward.op, send))
            });
            sends.extend(sent);
        }
        sends.sort_by_key(|(position, _)| *position);
    }
    steps
}
