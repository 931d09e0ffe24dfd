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
    ops: Vec<(u32, Listed)>,
    /// By op: which message of its lane it is.
    indices: Vec<u32>,
    /// By op: whom its beginning and its end release.
    on_begin: Vec<Vec<u32>>,
    on_end: Vec<Vec<u32>>,
    waits: Vec<u32>,
    /// By buffer and first byte: runs of bytes with one history. They do not overlap.
    runs: BTreeMap<(u32, u64), Run>,
    last_sent: HashMap<Lane, u32>,
    last_taken: HashMap<Lane, u32>,
}

#[derive(Clone, Debug, Default)]
struct Run {
    end: u64,
    writer: Option<u32>,
    readers: Vec<u32>,
}

impl Flow {
    pub(super) fn new() -> Flow {
        Flow {
            ops: Vec::new(),
            indices: Vec::new(),
            on_begin: Vec::new(),
            on_end: Vec::new(),
            waits: Vec::new(),
            runs: BTreeMap::new(),
            last_sent: HashMap::new(),
            last_taken: HashMap::new(),
        }
    }

    /// Adds the ops of one part. They have nothing to do with those of other parts.
    pub(super) fn add(&mut self, part: u32, listed: Vec<Listed>) {
        // The messages of nothing of the last step that had any, and everything of this part since.
        let (mut fence, mut since) = (Vec::new(), Vec::<u32>::new());
        let steps = listed.chunk_by(|a, b| a.step == b.step);
        for step in steps {
            let begin = self.ops.len() as u32;
            for &op in step {
                let id = self.push(part, op);
                let befores = if op.fence { &since } else { &fence };
                for &before in befores {
                    self.after_end(before, id);
                }
            }
            let this: std::ops::Range<u32> = begin..self.ops.len() as u32;
            let fences = || this.clone().filter(|&id| self.ops[id as usize].1.fence);
            if fences().next().is_some() {
                fence = fences().collect();
                since.clear();
            }
            since.extend(this);
        }
    }

    pub(super) fn finish(self, compiled: &mut Compiled) {
        let mut queues: HashMap<Lane, u32> = HashMap::new();
        for (id, (part, listed)) in self.ops.into_iter().enumerate() {
            let mut note = |list: &[u32]| {
                let start = compiled.released.len() as u32;
                compiled.released.extend_from_slice(list);
                start..compiled.released.len() as u32
            };
            let (on_begin, on_end) = (note(&self.on_begin[id]), note(&self.on_end[id]));
            let mut act = listed.act;
            if let Act::Send { lane, queue, .. } = &mut act {
                *queue = *queues.entry(*lane).or_insert_with(|| {
                    compiled.outgoing.push(*lane);
                    compiled.outgoing.len() as u32 - 1
                });
            }
            compiled.ops.push(Flat {
                step: listed.step,
                part,
                index: self.indices[id],
                act,
                on_begin,
                on_end,
            });
        }
        let free = self.waits.iter().enumerate().filter(|(_, waits)| **waits == 0);
        compiled.first = free.map(|(id, _)| id as u32).collect();
        compiled.waits = self.waits;
    }

    fn push(&mut self, part: u32, op: Listed) -> u32 {
        let id = self.ops.len() as u32;
        self.ops.push((part, op));
        self.on_begin.push(Vec::new());
        self.on_end.push(Vec::new());
        self.waits.push(0);
        let before = match op.act {
            Act::Send { lane, .. } => {
                let before = self.last_sent.insert(lane, id);
                if let Some(before) = before {
                    self.on_begin[before as usize].push(id);
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
        self.indices
            .push(before.map_or(0, |before| self.indices[before as usize] + 1));
        let mut befores = Vec::new();
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
        for before in befores {
            if before != id {
                self.after_end(before, id);
            }
        }
        id
    }

    fn after_end(&mut self, before: u32, id: u32) {
        let released = &mut self.on_end[before as usize];
        if released.last() != Some(&id) {
            released.push(id);
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
        let mut gaps = Vec::new();
        let mut at = start;
        for (&(_, first), run) in self.runs.range_mut((buffer, start)..(buffer, end)) {
            if at < first {
                gaps.push((at, first));
            }
            at = run.end;
            each(run);
        }
        if at < end {
            gaps.push((at, end));
        }
        for (first, end) in gaps {
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
