//! How many elements a chunk has, once sizes are given, and where in its buffer they lie.

use std::ops::Range;

use thiserror::Error;

use super::{BlockSize, Buffer, Collective, Extent, Problem, Sizes};
use crate::schedule::{Program, Slice};
use crate::units::Rank;

/// How many elements the blocks of a collective have.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Counts {
    /// Every block.
    Equal(u64),
    /// The block of each rank.
    PerRank(Vec<u64>),
    /// What each rank has for each other: row by row, one row a sender.
    PerPair(Vec<u64>),
}

/// Sizes, and how blocks of these sizes are cut into pieces: as equally as whole grains allow, the larger pieces first.
///
/// ```
/// use weft_plan::collective::{Collective, Counts, Extent, Partition, Problem};
/// let problem = Problem::new(Collective::AllReduce, 4);
/// let partition = Partition::new(&problem, Counts::Equal(10), 4)?;
/// let pieces: Vec<_> = (0..4).map(|piece| partition.elements(Extent::common(piece))).collect();
/// assert_eq!(pieces, [3, 3, 2, 2]);
/// // Cut at multiples of four, so that every piece begins on a cache line, say.
/// let coarse = partition.with_grain(4);
/// assert_eq!((0..4).map(|piece| coarse.elements(Extent::common(piece))).collect::<Vec<_>>(), [4, 4, 2, 0]);
/// # Ok::<(), weft_plan::collective::PartitionError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    problem: Problem,
    counts: Counts,
    pieces: u32,
    grain: u64,
}

/// Sizes that do not fit the collective: fix the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PartitionError {
    #[error("blocks of {collective} need {needed} sizes, not {given}")]
    WrongCount {
        collective: Collective,
        needed: u64,
        given: u64,
    },
    #[error("a block cut into no pieces")]
    NoPieces,
    #[error("a buffer of more than 2^63 elements")]
    TooLarge,
}

impl Partition {
    pub fn new(problem: &Problem, counts: Counts, pieces: u32) -> Result<Partition, PartitionError> {
        let ranks = u64::from(problem.ranks);
        let varying = problem.collective.sizes() == Sizes::Varying;
        let per_pair = matches!(problem.collective, Collective::AllToAll { .. });
        // Equal sizes are a case of varying ones, not the other way round.
        let (needed, given, total) = match &counts {
            Counts::Equal(count) => (1, 1, count.checked_mul(ranks)),
            Counts::PerRank(list) | Counts::PerPair(list) => {
                let total = list.iter().try_fold(0u64, |sum, &count| sum.checked_add(count));
                let needed = match (varying, per_pair) {
                    (false, _) => 1,
                    (true, false) => ranks,
                    (true, true) => ranks * ranks,
                };
                (needed, list.len() as u64, total)
            }
        };
        let right_kind = match counts {
            Counts::Equal(_) => true,
            Counts::PerRank(_) => varying && !per_pair,
            Counts::PerPair(_) => varying && per_pair,
        };
        if given != needed || !right_kind {
            return Err(PartitionError::WrongCount {
                collective: problem.collective,
                needed,
                given,
            });
        }
        if pieces == 0 {
            return Err(PartitionError::NoPieces);
        }
        if total.is_none_or(|total| total > 1 << 63) {
            return Err(PartitionError::TooLarge);
        }
        Ok(Partition {
            problem: *problem,
            counts,
            pieces,
            grain: 1,
        })
    }

    /// Cuts only at multiples of `grain` elements. All ranks must use the same.
    pub fn with_grain(self, grain: u64) -> Partition {
        Partition {
            grain: grain.max(1),
            ..self
        }
    }

    pub fn problem(&self) -> &Problem {
        &self.problem
    }
    pub fn pieces(&self) -> u32 {
        self.pieces
    }

    /// How many elements a chunk of this extent has.
    pub fn elements(&self, extent: Extent) -> u64 {
        let count = self.block(extent.block);
        self.cut(count, extent.piece + 1) - self.cut(count, extent.piece)
    }

    /// How many elements a block has. A rank that does not exist has none.
    pub fn block(&self, size: BlockSize) -> u64 {
        let at = |list: &[u64], index: u64| usize::try_from(index).ok().and_then(|i| list.get(i).copied());
        match (&self.counts, size) {
            (Counts::Equal(count), _) => *count,
            (Counts::PerRank(list), BlockSize::Of(rank)) => at(list, rank.0.into()).unwrap_or(0),
            (Counts::PerPair(list), BlockSize::Between { from, to }) => at(
                list,
                u64::from(from.0) * u64::from(self.problem.ranks) + u64::from(to.0),
            )
            .unwrap_or(0),
            // No problem has such a block; as scratch it is room for the largest.
            (Counts::PerRank(list) | Counts::PerPair(list), _) => list.iter().copied().max().unwrap_or(0),
        }
    }

    /// How many elements a slice has, on the rank that names it.
    pub fn slice(&self, program: &dyn Program, rank: Rank, slice: Slice) -> u64 {
        if let (Counts::Equal(count), Buffer::Input | Buffer::Output) = (&self.counts, slice.buffer) {
            return self.offset_of_even(*count, slice.first + slice.count) - self.offset_of_even(*count, slice.first);
        }
        (slice.first..slice.first + slice.count)
            .map(|chunk| self.elements(self.extent(program, rank, slice.buffer, chunk)))
            .sum()
    }

    fn extent(&self, program: &dyn Program, rank: Rank, buffer: Buffer, chunk: u32) -> Extent {
        match buffer {
            Buffer::Scratch => program.scratch(rank, chunk),
            Buffer::Input | Buffer::Output => self.problem.extent(rank, buffer, chunk, self.pieces),
        }
    }

    /// Where piece `piece` of a block of `count` elements begins.
    fn cut(&self, count: u64, piece: u32) -> u64 {
        let grains = count.div_ceil(self.grain);
        let (each, more) = (grains / u64::from(self.pieces), grains % u64::from(self.pieces));
        let piece = u64::from(piece);
        ((each * piece + more.min(piece)) * self.grain).min(count)
    }

    fn offset_of_even(&self, count: u64, chunk: u32) -> u64 {
        u64::from(chunk / self.pieces) * count + self.cut(count, chunk % self.pieces)
    }
}

/// Where the chunks of one rank's buffers lie, in elements from the start of each buffer.
#[derive(Clone, Debug)]
pub struct Layout {
    problem: Problem,
    rank: Rank,
    pieces: u32,
    /// By buffer: where each chunk begins, and where the last ends.
    starts: [Vec<u64>; 3],
}

impl Layout {
    pub fn new(partition: &Partition, program: &dyn Program, rank: Rank) -> Layout {
        let problem = partition.problem;
        let starts = [Buffer::Input, Buffer::Output, Buffer::Scratch].map(|buffer| {
            let chunks = match buffer {
                Buffer::Scratch => program.shape().scratch,
                Buffer::Input | Buffer::Output => problem.chunks(rank, buffer, partition.pieces),
            };
            let mut end = 0;
            let mut starts = vec![0];
            starts.extend((0..chunks).map(|chunk| {
                end += partition.elements(partition.extent(program, rank, buffer, chunk));
                end
            }));
            starts
        });
        Layout {
            problem,
            rank,
            pieces: partition.pieces,
            starts,
        }
    }

    /// How many elements a buffer has.
    pub fn elements(&self, buffer: Buffer) -> u64 {
        self.starts[buffer as usize].last().copied().unwrap_or(0)
    }

    /// All of an input or output: where its elements lie, as in [`Layout::locate`].
    pub fn whole(&self, buffer: Buffer) -> (Buffer, Range<u64>) {
        let count = (self.starts[buffer as usize].len() - 1) as u32;
        self.locate(Slice {
            buffer,
            first: 0,
            count,
        })
    }

    /// The elements of a slice of a verified program, and the buffer that holds them: in place, input and output share one, and it is
    /// named here.
    ///
    /// # Panics
    /// Where the slice is not in its buffer, which the verifier excludes.
    pub fn locate(&self, slice: Slice) -> (Buffer, Range<u64>) {
        if slice.is_empty() {
            return (slice.buffer, 0..0);
        }
        let (buffer, first) = self
            .problem
            .shared(self.rank, slice.buffer, slice.first, self.pieces)
            .unwrap_or((slice.buffer, slice.first));
        let starts = &self.starts[buffer as usize];
        (
            buffer,
            starts[first as usize]..starts[first as usize + slice.count as usize],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_cover_a_block_once_and_are_nearly_equal(count in 0u64..1000, pieces in 1u32..70, grain in 1u64..20) {
            let problem = Problem::new(Collective::AllReduce, 3);
            let partition = Partition::new(&problem, Counts::Equal(count), pieces).unwrap().with_grain(grain);
            let sizes: Vec<u64> = (0..pieces).map(|piece| partition.elements(Extent::common(piece))).collect();
            prop_assert_eq!(sizes.iter().sum::<u64>(), count);
            prop_assert!(sizes.windows(2).all(|pair| pair[0] >= pair[1]));
            // By one grain, and the last piece may also lack what the block lacks to whole grains.
            prop_assert!(sizes[0] - sizes[pieces as usize - 1] < 2 * grain);
        }
    }

    #[test]
    fn sizes_must_be_as_many_as_the_collective_has() {
        let varying = Sizes::Varying;
        let gather = Problem::new(Collective::AllGather { sizes: varying }, 3);
        assert!(Partition::new(&gather, Counts::PerRank(vec![1, 0, 7]), 1).is_ok());
        assert_eq!(
            Partition::new(&gather, Counts::PerRank(vec![1, 0]), 1),
            Err(PartitionError::WrongCount {
                collective: gather.collective,
                needed: 3,
                given: 2
            })
        );
        let reduce = Problem::new(Collective::AllReduce, 3);
        assert!(Partition::new(&reduce, Counts::PerRank(vec![1, 2, 3]), 1).is_err());
        assert_eq!(
            Partition::new(&reduce, Counts::Equal(u64::MAX / 2), 1),
            Err(PartitionError::TooLarge)
        );
        assert_eq!(
            Partition::new(&reduce, Counts::Equal(1), 0),
            Err(PartitionError::NoPieces)
        );
    }
}
