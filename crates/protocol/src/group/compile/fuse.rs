//! Two ops that are one pass over memory: a copy or a receive, and the reduction that follows it into the same place.

use super::{Act, Listed};
use crate::group::exchange::Piece;

/// How many ops may lie between the two.
const REACH: usize = 64;

/// Joins what can be joined. Reductions commute, so that it does not matter which operand comes from where.
pub(super) fn fuse(mut ops: Vec<Listed>) -> Vec<Listed> {
    let mut gone = vec![false; ops.len()];
    for first in 0..ops.len() {
        if gone[first] || ops[first].fence {
            continue;
        }
        let Some(place) = placed(&ops[first].act) else { continue };
        let second =
            (first + 1..ops.len().min(first + 1 + REACH)).find(|&at| !gone[at] && touches(&ops[at].act, place));
        let Some(second) = second else { continue };
        let between = first + 1..second;
        match (ops[first].act, ops[second].act) {
            // A copy, and then something is received into the copy: reduce with the original instead.
            (Act::Copy { from, to }, Act::ReceiveReduce { lane, with, into })
                if with == to && into == to && !written(&ops, &gone, between.clone(), from) =>
            {
                ops[second].act = Act::ReceiveReduce { lane, with: from, into };
                gone[first] = true;
            }
            // The same where both are here.
            (
                Act::Copy { from, to },
                Act::Reduce {
                    from: other,
                    with,
                    into,
                },
            ) if with == to && into == to && !overlap(from, into) && !written(&ops, &gone, between.clone(), from) => {
                ops[second].act = Act::Reduce {
                    from: other,
                    with: from,
                    into,
                };
                gone[first] = true;
            }
            // Something is received, and then what is here is reduced into it.
            (Act::Receive { lane, into }, Act::Reduce { from, with, into: sum })
                if with == into && sum == into && !overlap(from, into) && !written(&ops, &gone, between, from) =>
            {
                ops[first].act = Act::ReceiveReduce { lane, with: from, into };
                gone[second] = true;
            }
            _ => {}
        }
    }
    let mut at = 0;
    ops.retain(|_| {
        at += 1;
        !gone[at - 1]
    });
    ops
}

/// Where the first of a pair puts its bytes.
fn placed(act: &Act) -> Option<Piece> {
    match *act {
        Act::Copy { to, .. } => Some(to),
        Act::Receive { into, .. } => Some(into),
        _ => None,
    }
}

fn touches(act: &Act, place: Piece) -> bool {
    let [a, b] = act.reads();
    [a, b, act.writes()]
        .into_iter()
        .flatten()
        .any(|piece| overlap(piece, place))
}

fn written(ops: &[Listed], gone: &[bool], between: std::ops::Range<usize>, place: Piece) -> bool {
    between
        .filter(|&at| !gone[at])
        .any(|at| ops[at].act.writes().is_some_and(|piece| overlap(piece, place)))
}

fn overlap(a: Piece, b: Piece) -> bool {
    a.buffer == b.buffer && a.offset < b.offset + b.len && b.offset < a.offset + a.len
}
