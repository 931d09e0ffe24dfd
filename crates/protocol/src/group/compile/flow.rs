//! What each op waits for.
//!
//! Every byte has one op that wrote it last and the ops that have read it since. A reader waits for the former, a writer for both.
//! Messages of a lane keep their order besides: a send waits for the one before it to have begun, a receive for the one before it to
//! have ended.

use std::collections::{BTreeMap, HashMap};

use super::{Act, Compiled, Flat, Listed};
use crate::group::exchange::{Lane, Piece};

/// Ops with their edges, while the list grows.
pub(super) struct Flow {
    ops: Vec<Flat>,
    waits: Vec<u32>,
    /// Who releases whom by its beginning, and by its end. The latter ascend in whom.
    on_begin: Vec<Edge>,
    on_end: Vec<Edge>,
    /// By op: the last that its end releases.
    last_released: Vec<u32>,
    /// By buffer and first byte: runs of bytes with one history. They do not overlap.
    runs: BTreeMap<(u32, u64), Run>,
    last_sent: HashMap<Lane, u32>,
    last_taken: HashMap<Lane, u32>,
    /// Kept between ops, so that they need not be allocated for each.
    befores: Vec<u32>,
    gaps: Vec<(u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Edge {
    before: u32,
    after: u32,
}

#[derive(Clone, Debug, Default)]
struct Run {
    end: u64,
    writer: Option<u32>,
    readers: Vec<u32>,
}

/// No op has this number.
const NOBODY: u32 = u32::MAX;

impl Flow {
    pub(super) fn new() -> Flow {
        Flow {
            ops: Vec::new(),
            waits: Vec::new(),
            on_begin: Vec::new(),
            on_end: Vec::new(),
            last_released: Vec::new(),
            runs: BTreeMap::new(),
            last_sent: HashMap::new(),
            last_taken: HashMap::new(),
            befores: Vec::new(),
            gaps: Vec::new(),
        }
    }

    /// Adds the ops of one part. They have nothing to do with those of other parts.
    pub(super) fn add(&mut self, part: u32, listed: Vec<Listed>) {
        self.ops.reserve(listed.len());
        // The messages of nothing of the last step that had any, and everything of this part since.
        let (mut fence, mut since) = (Vec::new(), Vec::<u32>::new());
        let fenced = listed.iter().any(|op| op.fence);
        let steps = listed.chunk_by(|a, b| a.step == b.step);
        for step in steps {
            let begin = self.ops.len() as u32;
            for op in step {
                let id = self.push(part, op);
                let befores = if op.fence { &since } else { &fence };
                for &before in befores {
                    self.after_end(before, id);
                }
            }
            if !fenced {
                continue;
            }
            let this: std::ops::Range<u32> = begin..self.ops.len() as u32;
            if step.iter().any(|op| op.fence) {
                let fences = this.clone().zip(step).filter(|(_, op)| op.fence);
                fence = fences.map(|(id, _)| id).collect();
                since.clear();
            }
            since.extend(this);
        }
    }

    pub(super) fn finish(mut self, compiled: &mut Compiled) {
        let mut queues: HashMap<Lane, u32> = HashMap::new();
        for op in &mut self.ops {
            if let Act::Send { lane, queue, .. } = &mut op.act {
                *queue = *queues.entry(*lane).or_insert_with(|| {
                    compiled.outgoing.push(*lane);
                    compiled.outgoing.len() as u32 - 1
                });
            }
        }
        // By who releases, and of one by whom: each list keeps the order in which it was made.
        for (edges, which) in [(self.on_begin, 0), (self.on_end, 1)] {
            let start = compiled.released.len() as u32;
            let mut ends = vec![0u32; self.ops.len()];
            edges.iter().for_each(|edge| ends[edge.before as usize] += 1);
            let mut end = start;
            for (op, count) in self.ops.iter_mut().zip(&mut ends) {
                let range = end..end + *count;
                (end, *count) = (range.end, range.start);
                *[&mut op.on_begin, &mut op.on_end][which] = range;
            }
            compiled.released.resize(end as usize, 0);
            for Edge { before, after } in edges {
                let next = &mut ends[before as usize];
                compiled.released[*next as usize] = after;
                *next += 1;
            }
        }
        let free = self.waits.iter().enumerate().filter(|(_, waits)| **waits == 0);
        compiled.first = free.map(|(id, _)| id as u32).collect();
        compiled.waits = self.waits;
        compiled.ops = self.ops;
    }

    fn push(&mut self, part: u32, op: &Listed) -> u32 {
        let id = self.ops.len() as u32;
        self.waits.push(0);
        self.last_released.push(NOBODY);
        let before = match op.act {
            Act::Send { lane, .. } => {
                let before = self.last_sent.insert(lane, id);
                if let Some(before) = before {
                    self.on_begin.push(Edge { before, after: id });
                    self.waits[id as usize] += 1;
                }
                before
            }
            Act::Receive { lane, .. } | Act::ReceiveReduce { lane, .. } => {
                let before = self.last_taken.insert(lane, id);
                if let Some(before) = before {
                    self.after_end(before, id);
                }
                before
            }
            Act::Copy { .. } | Act::Reduce { .. } | Act::Divide { .. } => None,
        };
        self.ops.push(Flat {
            step: op.step,
            place: op.place,
            part,
            index: before.map_or(0, |before| self.ops[before as usize].index + 1),
            act: op.act,
            on_begin: 0..0,
            on_end: 0..0,
        });
        let mut befores = std::mem::take(&mut self.befores);
        for piece in op.act.reads().into_iter().flatten() {
            self.each_run(piece, |run| {
                befores.extend(run.writer);
                run.readers.push(id);
            });
        }
        if let Some(piece) = op.act.writes() {
            self.each_run(piece, |run| {
                befores.extend(run.writer.replace(id));
                befores.append(&mut run.readers);
            });
        }
        befores.sort_unstable();
        befores.dedup();
        for before in befores.drain(..) {
            if before != id {
                self.after_end(before, id);
            }
        }
        self.befores = befores;
        id
    }

    fn after_end(&mut self, before: u32, id: u32) {
        let last = &mut self.last_released[before as usize];
        if *last != id {
            *last = id;
            self.on_end.push(Edge { before, after: id });
            self.waits[id as usize] += 1;
        }
    }

    /// Calls `each` for the runs that make up a piece, cut at its ends, without gaps.
    fn each_run(&mut self, piece: Piece, mut each: impl FnMut(&mut Run)) {
        if piece.len == 0 {
            return;
        }
        let (buffer, start, end) = (piece.buffer, piece.offset, piece.offset + piece.len);
        self.cut(buffer, start);
        self.cut(buffer, end);
        let mut at = start;
        for (&(_, first), run) in self.runs.range_mut((buffer, start)..(buffer, end)) {
            if at < first {
                self.gaps.push((at, first));
            }
            at = run.end;
            each(run);
        }
        if at < end {
            self.gaps.push((at, end));
        }
        for (first, end) in self.gaps.drain(..) {
            let mut run = Run { end, ..Run::default() };
            each(&mut run);
            self.runs.insert((buffer, first), run);
        }
    }

    /// Makes a run end and another begin at `at`, if one lies across it.
    fn cut(&mut self, buffer: u32, at: u64) {
        let Some((_, run)) = self.runs.range_mut((buffer, 0)..(buffer, at)).next_back() else {
            return;
        };
        if run.end > at {
            let rest = run.clone();
            run.end = at;
            self.runs.insert((buffer, at), rest);
        }
    }
}
