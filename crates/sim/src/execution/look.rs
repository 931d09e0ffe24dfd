//! What ranks do by a program, as far as time is concerned: messages that are alike together, and work.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use weft_model::fabric::{Level, Topology};
use weft_plan::Rank;
use weft_plan::collective::{Counts, Partition, Problem};
use weft_plan::schedule::{Op, Ops, Program, Slice};
use weft_protocol::group::{Compiled, Scope, Source};

use super::classes::Classes;
use crate::checks::RunError;

/// Up to so many different messages are looked for one by one.
const FEW: usize = 12;

/// What a message is taken to be: which way it goes, and of how many chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Is {
    pub(crate) sends: bool,
    pub(crate) chunks: u64,
}

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

/// Where a message goes, or comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Aim {
    /// The class at the other end.
    pub(crate) peer: u32,
    pub(crate) level: Level,
    /// Whether it leaves the node.
    pub(crate) across: bool,
    /// How many ranks lie between sender and receiver, going up.
    pub(crate) ahead: u32,
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
    /// Blocks whose chunks have one element each, so that bytes of what is compiled are chunks; of none where there are no bytes.
    partition: Partition,
    /// Bytes of a chunk.
    pub(crate) chunk: f64,
    ops: Ops,
    /// Whose ops and of which step are in `ops`.
    filled: Option<(Rank, u32)>,
    index: HashMap<Like, u32, BuildHasherDefault<Quick>>,
    /// Ops looked at, ever.
    pub(crate) looked_at: u64,
}

impl<'a> Look<'a> {
    pub(crate) fn new(
        topology: &'a Topology,
        problem: &'a Problem,
        program: &'a dyn Program,
        bytes: u64,
    ) -> Result<Look<'a>, RunError> {
        let pieces = program.shape().pieces;
        let elements = if bytes > 0 { u64::from(pieces) } else { 0 };
        Ok(Look {
            topology,
            problem,
            program,
            partition: Partition::new(problem, Counts::Equal(elements), pieces)?,
            pieces,
            chunk: bytes as f64 / (f64::from(pieces) * f64::from(problem.blocks_in_size())),
            ops: Ops::new(),
            filled: None,
            index: HashMap::default(),
            looked_at: 0,
        })
    }

    pub(crate) fn program(&self) -> &'a dyn Program {
        self.program
    }

    /// At which level two ranks meet, where the network has such.
    pub(super) fn level(&self, one: Rank, other: Rank) -> Level {
        match self.topology.top() {
            Some(_) => self.topology.level(one, other),
            None => Level(0),
        }
    }

    /// What a rank executes, in chunks.
    pub(crate) fn compile(&self, rank: Rank) -> Result<Compiled, RunError> {
        let source = Source {
            program: self.program,
            partition: &self.partition,
            size: 1,
            average: false,
            scope: Scope::Known,
        };
        Ok(Compiled::new(&source, rank)?)
    }

    /// The ops of a rank in a step.
    pub(crate) fn ops(&mut self, rank: Rank, step: u32) -> &[Op] {
        if self.filled != Some((rank, step)) {
            self.filled = Some((rank, step));
            self.looked_at += self.ops.fill(self.program, rank, step).len() as u64 + 1;
        }
        self.ops.as_slice()
    }

    /// Where the message goes or comes from that is one of a rank's ops in a step; `None` where that op is no such message.
    pub(crate) fn aim(&mut self, rank: Rank, (step, place): (u32, u32), is: &Is, classes: &Classes) -> Option<Aim> {
        let op = *self.ops(rank, step).get(place as usize)?;
        let slice = op.writes().or_else(|| op.reads().next())?;
        if matches!(op, Op::Send { .. }) != is.sends || u64::from(slice.count) != is.chunks {
            return None;
        }
        let peer = op.peer()?;
        let (level, across) = match classes.levels() {
            true => {
                let level = self.topology.level(rank, peer);
                (level, level > Level(0))
            }
            false => (Level(0), self.topology.node(rank) != self.topology.node(peer)),
        };
        Some(Aim {
            peer: classes.class(peer),
            level,
            across,
            ahead: {
                let (from, to) = if is.sends { (rank, peer) } else { (peer, rank) };
                (to.0 + self.problem.ranks - from.0) % self.problem.ranks
            },
        })
    }

    /// Fills `out` with the messages of a rank in a step, and tells its work.
    pub(crate) fn at(&mut self, rank: Rank, step: u32, classes: &Classes, out: &mut Vec<Messages>) -> Work {
        out.clear();
        self.index.clear();
        let mut work = Work::default();
        self.filled = None;
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
