//! What every chunk of every rank holds, with input and output laid over each other where the call is in place.

use super::{Content, Fault, Sets, Shape};
use crate::collective::{Buffer, Problem};
use crate::units::Rank;

/// More chunks than any program has that somebody wants to be verified; each takes some 24 bytes.
const MAX_CHUNKS: u64 = 1 << 27;
/// Sets of ranks are bits, and there are more sets than ranks.
const MAX_RANKS: u32 = 1 << 14;

#[derive(Debug)]
pub(super) struct Memory {
    problem: Problem,
    shape: Shape,
    ranks: Vec<Chunks>,
}

#[derive(Debug)]
struct Chunks {
    /// Where output and scratch begin in the list below, after the input.
    output: usize,
    scratch: usize,
    contents: Vec<Option<Content>>,
}

impl Memory {
    /// Whether a program is small enough to be looked at op by op.
    pub(super) fn fits(problem: &Problem, shape: Shape) -> Result<(), Fault> {
        if problem.ranks > MAX_RANKS {
            return Err(Fault::TooManyRanks {
                ranks: problem.ranks,
                max: MAX_RANKS,
            });
        }
        let of_rank = |rank| {
            let blocks =
                u64::from(problem.blocks(rank, Buffer::Input)) + u64::from(problem.blocks(rank, Buffer::Output));
            blocks * u64::from(shape.pieces) + u64::from(shape.scratch)
        };
        let chunks = (0..problem.ranks).map(|rank| of_rank(Rank(rank))).sum();
        match chunks <= MAX_CHUNKS {
            true => Ok(()),
            false => Err(Fault::TooLarge {
                chunks,
                max: MAX_CHUNKS,
            }),
        }
    }

    /// All inputs there, and nothing else.
    pub(super) fn new(problem: &Problem, shape: Shape, sets: &Sets) -> Memory {
        let ranks = (0..problem.ranks).map(|rank| {
            let chunks = |buffer| problem.chunks(Rank(rank), buffer, shape.pieces) as usize;
            let scratch = chunks(Buffer::Input) + chunks(Buffer::Output);
            Chunks {
                output: chunks(Buffer::Input),
                scratch,
                contents: vec![None; scratch + shape.scratch as usize],
            }
        });
        let mut memory = Memory {
            problem: *problem,
            shape,
            ranks: ranks.collect(),
        };
        for rank in (0..problem.ranks).map(Rank) {
            for datum in 0..problem.chunks(rank, Buffer::Input, shape.pieces) {
                let (from, order) = (sets.one(rank), u64::from(rank.0) + 1);
                memory.set(rank, Buffer::Input, datum, Content { datum, from, order });
            }
        }
        memory
    }

    /// How many chunks a buffer has.
    pub(super) fn chunks(&self, rank: Rank, buffer: Buffer) -> u32 {
        match buffer {
            Buffer::Scratch => self.shape.scratch,
            Buffer::Input | Buffer::Output => self.problem.chunks(rank, buffer, self.shape.pieces),
        }
    }

    /// One number for each chunk of memory that a rank has: two names of the same memory have the same.
    pub(super) fn locate(&self, rank: Rank, buffer: Buffer, chunk: u32) -> usize {
        let shared = self.problem.shared(rank, buffer, chunk, self.shape.pieces);
        let (buffer, chunk) = shared.unwrap_or((buffer, chunk));
        let chunks = &self.ranks[rank.0 as usize];
        chunk as usize
            + match buffer {
                Buffer::Input => 0,
                Buffer::Output => chunks.output,
                Buffer::Scratch => chunks.scratch,
            }
    }

    pub(super) fn content(&self, rank: Rank, buffer: Buffer, chunk: u32) -> Option<Content> {
        self.ranks[rank.0 as usize].contents[self.locate(rank, buffer, chunk)]
    }

    pub(super) fn set(&mut self, rank: Rank, buffer: Buffer, chunk: u32, content: Content) {
        let at = self.locate(rank, buffer, chunk);
        self.ranks[rank.0 as usize].contents[at] = Some(content);
    }
}
