//! What every chunk of every rank holds, with input and output laid over each other where the call is in place.

use super::{Content, Fault, Sets, Shape};
use crate::collective::{Buffer, Problem};
use crate::units::Rank;

/// More chunks than any program has that somebody wants to be verified; each takes some 24 bytes.
const MAX_CHUNKS: u64 = 1 << 27;

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
    /// All inputs there, and nothing else.
    pub(super) fn new(problem: &Problem, shape: Shape, sets: &mut Sets) -> Result<Memory, Fault> {
        let counts = |rank| {
            let of = |buffer| u64::from(problem.blocks(rank, buffer)) * u64::from(shape.pieces);
            (of(Buffer::Input), of(Buffer::Output))
        };
        let total: u64 = (0..problem.ranks)
            .map(|rank| {
                let (input, output) = counts(Rank(rank));
                input + output + u64::from(shape.scratch)
            })
            .fold(0, u64::saturating_add);
        if total > MAX_CHUNKS {
            return Err(Fault::TooLarge {
                chunks: total,
                max: MAX_CHUNKS,
            });
        }
        let ranks = (0..problem.ranks)
            .map(|rank| {
                let (input, output) = counts(Rank(rank));
                let scratch = (input + output) as usize;
                Chunks {
                    output: input as usize,
                    scratch,
                    contents: vec![None; scratch + shape.scratch as usize],
                }
            })
            .collect();
        let mut memory = Memory {
            problem: *problem,
            shape,
            ranks,
        };
        for rank in (0..problem.ranks).map(Rank) {
            for datum in 0..problem.chunks(rank, Buffer::Input, shape.pieces) {
                let from = sets.one(rank);
                let order = u64::from(rank.0) + 1;
                memory.set(rank, Buffer::Input, datum, Content { datum, from, order });
            }
        }
        Ok(memory)
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
