//! What a rank does in a step, as far as time is concerned: messages that are alike together, and work.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use weft_plan::Rank;
use weft_plan::collective::Problem;
use weft_plan::platform::fabric::{Level, Topology};
use weft_plan::schedule::{Op, Ops, Program, Slice};

use super::classes::Classes;

/// Up to so many different messages are looked for one by one.
const FEW: usize = 12;

/// Messages of a rank in a step that nothing tells apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Messages {
    pub(crate) like: Like,
    pub(crate) count: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Like {
    pub(crate) kind: Kind,
    /// The class at the other end.
    pub(crate) peer: u32,
    pub(crate) level: Level,
    pub(crate) channel: u16,
    /// A message of nothing that still has to come.
    pub(crate) signal: bool,
    /// The bits of its size in bytes.
    size: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    Send,
    Receive,
    ReceiveReduce,
}

impl Like {
    pub(crate) fn bytes(&self) -> f64 {
        f64::from_bits(self.size)
    }
}

/// Bytes that a rank reduces and copies in a step, beyond what comes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    pub(crate) reduced: f64,
    pub(crate) copied: f64,
}

/// Looks at what ranks do.
pub(crate) struct Look<'a> {
    topology: &'a Topology,
    problem: &'a Problem,
    program: &'a dyn Program,
    pieces: u32,
    /// Bytes of a chunk.
    chunk: f64,
    ops: Ops,
    index: HashMap<Like, u32, BuildHasherDefault<Quick>>,
    /// Ops looked at, ever.
    pub(crate) looked_at: u64,
}

impl<'a> Look<'a> {
    pub(crate) fn new(topology: &'a Topology, problem: &'a Problem, program: &'a dyn Program, bytes: u64) -> Look<'a> {
        let pieces = program.shape().pieces;
        Look {
            topology,
            problem,
            program,
            pieces,
            chunk: bytes as f64 / (f64::from(pieces) * f64::from(problem.blocks_in_size())),
            ops: Ops::new(),
            index: HashMap::default(),
            looked_at: 0,
        }
    }

    /// Whether messages like these, of a rank, leave its node.
    pub(crate) fn leaves_node(&self, rank: Rank, like: &Like, classes: &Classes) -> bool {
        match classes.levels() {
            true => like.level > Level(0),
            false => self.topology.node(rank) != self.topology.node(classes.rank(like.peer)),
        }
    }

    /// Fills `out` with the messages of a rank in a step, and tells its work.
    pub(crate) fn at(&mut self, rank: Rank, step: u32, classes: &Classes, out: &mut Vec<Messages>) -> Work {
        out.clear();
        self.index.clear();
        let mut work = Work::default();
        let ops = self.ops.fill(self.program, rank, step);
        self.looked_at += ops.len() as u64 + 1;
        let few = ops.len() <= FEW;
        for op in ops {
            let slice = op.writes().or_else(|| op.reads().next()).unwrap_or(Slice::NOTHING);
            let bytes = f64::from(slice.count) * self.chunk;
            let kind = match op {
                Op::Send { .. } => Kind::Send,
                Op::Receive { .. } => Kind::Receive,
                Op::ReceiveReduce { .. } => Kind::ReceiveReduce,
                Op::Reduce { .. } => {
                    work.reduced += bytes;
                    continue;
                }
                Op::Copy { from, to } => {
                    // In place, many a copy is onto itself.
                    let shared = |slice: &Slice| {
                        let shared = self.problem.shared(rank, slice.buffer, slice.first, self.pieces);
                        shared.unwrap_or((slice.buffer, slice.first))
                    };
                    if shared(from) != shared(to) {
                        work.copied += bytes;
                    }
                    continue;
                }
            };
            let (Some(peer), Some(channel)) = (op.peer(), op.channel()) else {
                continue;
            };
            let like = Like {
                kind,
                peer: classes.class(peer),
                level: match classes.levels() {
                    true => self.topology.level(rank, peer),
                    false => Level(0),
                },
                channel: channel.0,
                signal: slice.is_empty(),
                size: bytes.to_bits(),
            };
            let known = match few || out.len() <= FEW {
                true => out.iter().position(|other| other.like == like),
                false => {
                    if self.index.is_empty() {
                        self.index
                            .extend(out.iter().enumerate().map(|(nth, other)| (other.like, nth as u32)));
                    }
                    self.index.get(&like).map(|&nth| nth as usize)
                }
            };
            match known {
                Some(nth) => out[nth].count += 1,
                None => {
                    if !self.index.is_empty() {
                        self.index.insert(like, out.len() as u32);
                    }
                    out.push(Messages { like, count: 1 });
                }
            }
        }
        work
    }
}

/// A hash that is quick, for keys that nobody chooses with ill intent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Quick(u64);

impl Hasher for Quick {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }
    fn write_u8(&mut self, number: u8) {
        self.write_u64(number.into());
    }
    fn write_u16(&mut self, number: u16) {
        self.write_u64(number.into());
    }
    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }
    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
    fn write_isize(&mut self, number: isize) {
        self.write_u64(number as u64);
    }
}
