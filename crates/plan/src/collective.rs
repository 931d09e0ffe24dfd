//! What a collective is to do: which data every rank has before, and which it must have after.
//!
//! This is all that the verifier, the executors and the simulator know of a collective; how it is done is a
//! [`Program`](crate::schedule::Program). Data is symbolic here. The *datum* is the position of a chunk in its owner's input, and a
//! *content* is a datum together with the ranks whose contributions were reduced into it, each exactly once.
//!
//! ```
//! use weft_plan::collective::{Buffer, Collective, Contributors, Problem, Sizes};
//! use weft_plan::Rank;
//! // Four ranks gather; every block is cut in two pieces. Chunk 5 of the output is piece 1 of what rank 2 had.
//! let problem = Problem::new(Collective::AllGather { sizes: Sizes::Equal }, 4);
//! assert_eq!(problem.chunks(Rank(0), Buffer::Output, 2), 8);
//! let wanted = problem.required(Rank(0), 5, 2);
//! assert_eq!((wanted.datum, wanted.from), (1, Contributors::One(Rank(2))));
//! ```

mod partition;

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::units::Rank;

pub use partition::{Counts, Layout, Partition, PartitionError};

/// The kinds of collectives. Sizes in elements are no part of it: a program must be right for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Collective {
    /// Every rank ends with the reduction of all inputs.
    AllReduce,
    /// Every rank ends with all inputs, one block a rank.
    AllGather { sizes: Sizes },
    /// Rank *r* ends with the reduction of everyone's block *r*.
    ReduceScatter { sizes: Sizes },
    /// Every rank ends with the root's input.
    Broadcast { root: Rank },
    /// The root ends with the reduction of all inputs.
    Reduce { root: Rank },
    /// The root ends with all inputs, one block a rank.
    Gather { root: Rank, sizes: Sizes },
    /// Rank *r* ends with the root's block *r*.
    Scatter { root: Rank, sizes: Sizes },
    /// Block *r* of rank *s* becomes block *s* of rank *r*.
    AllToAll { sizes: Sizes },
    /// One rank's input becomes another's output.
    SendReceive { from: Rank, to: Rank },
    /// Nobody ends before everybody has begun.
    Barrier,
}

/// Whether all blocks of a collective have the same size, or each its own (the collectives that MPI ends in `v`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sizes {
    #[default]
    Equal,
    Varying,
}

/// The memory of a rank that a program names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Buffer {
    Input,
    Output,
    /// Belongs to the program, and holds nothing at its start.
    Scratch,
}

/// A collective among so many ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Problem {
    pub collective: Collective,
    pub ranks: u32,
    /// Input and output share memory, where both are the same data: the whole of an all-reduce, a rank's own block of an
    /// all-gather or a reduce-scatter, the root's own block of a gather or a scatter.
    #[serde(default)]
    pub in_place: bool,
}

/// What a chunk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// The position of the data in its owner's input.
    pub datum: u32,
    pub from: Contributors,
}

/// Whose contributions a chunk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contributors {
    All,
    One(Rank),
}

/// How many elements a chunk has, as far as that is known before sizes are given: two chunks of one extent have equally many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    pub block: BlockSize,
    /// Which of the pieces that its block is cut into.
    pub piece: u32,
}

/// Which of the given sizes a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum BlockSize {
    Common,
    Of(Rank),
    Between { from: Rank, to: Rank },
}

/// A problem that cannot be: fix the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProblemError {
    #[error("a collective of no ranks")]
    NoRanks,
    #[error("rank {rank} of {ranks}")]
    NoSuchRank { rank: Rank, ranks: u32 },
    #[error("rank {rank} sends to itself")]
    ToItself { rank: Rank },
    #[error("{collective} has no data that input and output could share")]
    NotInPlace { collective: Collective },
}

impl Problem {
    /// With input and output apart.
    pub const fn new(collective: Collective, ranks: u32) -> Problem {
        Problem {
            collective,
            ranks,
            in_place: false,
        }
    }

    pub const fn in_place(self) -> Problem {
        Problem { in_place: true, ..self }
    }

    /// Checks that the ranks named exist and that what is to be in place can be.
    pub fn check(&self) -> Result<(), ProblemError> {
        let exists = |rank: Rank| match rank.0 < self.ranks {
            true => Ok(()),
            false => Err(ProblemError::NoSuchRank {
                rank,
                ranks: self.ranks,
            }),
        };
        if self.ranks == 0 {
            return Err(ProblemError::NoRanks);
        }
        match self.collective {
            Collective::Broadcast { root }
            | Collective::Reduce { root }
            | Collective::Gather { root, .. }
            | Collective::Scatter { root, .. } => exists(root)?,
            Collective::SendReceive { from, to } => {
                exists(from)?;
                exists(to)?;
                if from == to {
                    return Err(ProblemError::ToItself { rank: from });
                }
            }
            Collective::AllReduce
            | Collective::AllGather { .. }
            | Collective::ReduceScatter { .. }
            | Collective::AllToAll { .. }
            | Collective::Barrier => {}
        }
        let nothing_shared = matches!(
            self.collective,
            Collective::SendReceive { .. } | Collective::Barrier | Collective::AllToAll { sizes: Sizes::Varying }
        );
        match self.in_place && nothing_shared {
            true => Err(ProblemError::NotInPlace {
                collective: self.collective,
            }),
            false => Ok(()),
        }
    }

    /// How many blocks a rank's input or output has. Scratch is the program's own.
    pub fn blocks(&self, rank: Rank, buffer: Buffer) -> u32 {
        let at = |holder: Rank, blocks: u32| if rank == holder { blocks } else { 0 };
        match (self.collective, buffer) {
            (_, Buffer::Scratch) | (Collective::Barrier, _) => 0,
            (Collective::AllReduce, _) => 1,
            (Collective::AllGather { .. }, Buffer::Input) => 1,
            (Collective::AllGather { .. }, Buffer::Output) => self.ranks,
            (Collective::ReduceScatter { .. }, Buffer::Input) => self.ranks,
            (Collective::ReduceScatter { .. }, Buffer::Output) => 1,
            (Collective::Broadcast { root }, Buffer::Input) => at(root, 1),
            (Collective::Broadcast { .. }, Buffer::Output) => 1,
            (Collective::Reduce { .. }, Buffer::Input) => 1,
            (Collective::Reduce { root }, Buffer::Output) => at(root, 1),
            (Collective::Gather { .. }, Buffer::Input) => 1,
            (Collective::Gather { root, .. }, Buffer::Output) => at(root, self.ranks),
            (Collective::Scatter { root, .. }, Buffer::Input) => at(root, self.ranks),
            (Collective::Scatter { .. }, Buffer::Output) => 1,
            (Collective::AllToAll { .. }, _) => self.ranks,
            (Collective::SendReceive { from, .. }, Buffer::Input) => at(from, 1),
            (Collective::SendReceive { to, .. }, Buffer::Output) => at(to, 1),
        }
    }

    /// How many blocks the size of the collective is that of. It is the size of the larger of a rank's buffers, as is usual when collectives are
    /// measured.
    pub fn blocks_in_size(&self) -> u32 {
        match self.collective {
            Collective::AllGather { .. }
            | Collective::ReduceScatter { .. }
            | Collective::Gather { .. }
            | Collective::Scatter { .. }
            | Collective::AllToAll { .. } => self.ranks,
            Collective::AllReduce
            | Collective::Broadcast { .. }
            | Collective::Reduce { .. }
            | Collective::SendReceive { .. }
            | Collective::Barrier => 1,
        }
    }

    /// How many chunks a rank's input or output has when every block is cut into `pieces`.
    pub fn chunks(&self, rank: Rank, buffer: Buffer, pieces: u32) -> u32 {
        self.blocks(rank, buffer).saturating_mul(pieces)
    }

    /// The size of a block of a rank's input or output.
    pub fn block_size(&self, rank: Rank, buffer: Buffer, block: u32) -> BlockSize {
        if self.collective.sizes() == Sizes::Equal {
            return BlockSize::Common;
        }
        let (near, far) = (rank, Rank(block));
        match (self.collective, buffer) {
            (Collective::AllToAll { .. }, Buffer::Input) => BlockSize::Between { from: near, to: far },
            (Collective::AllToAll { .. }, _) => BlockSize::Between { from: far, to: near },
            // One side of these has a block for every rank, the other only its own.
            (Collective::AllGather { .. } | Collective::Gather { .. }, Buffer::Input)
            | (Collective::ReduceScatter { .. } | Collective::Scatter { .. }, Buffer::Output) => BlockSize::Of(near),
            _ => BlockSize::Of(far),
        }
    }

    /// The extent of a chunk of a rank's input or output.
    pub fn extent(&self, rank: Rank, buffer: Buffer, chunk: u32, pieces: u32) -> Extent {
        Extent {
            block: self.block_size(rank, buffer, chunk / pieces),
            piece: chunk % pieces,
        }
    }

    /// The post-condition: what a chunk of a rank's output must hold at the end. (The pre-condition is that chunk *c* of a rank's
    /// input holds datum *c* with that rank's contribution alone.)
    pub fn required(&self, rank: Rank, chunk: u32, pieces: u32) -> Wanted {
        let (block, piece) = (chunk / pieces, chunk % pieces);
        let own = rank.0 * pieces + piece;
        let (datum, from) = match self.collective {
            Collective::AllReduce | Collective::Reduce { .. } | Collective::Barrier => (piece, Contributors::All),
            Collective::AllGather { .. } | Collective::Gather { .. } => (piece, Contributors::One(Rank(block))),
            Collective::ReduceScatter { .. } => (own, Contributors::All),
            Collective::Broadcast { root } => (piece, Contributors::One(root)),
            Collective::Scatter { root, .. } => (own, Contributors::One(root)),
            Collective::AllToAll { .. } => (own, Contributors::One(Rank(block))),
            Collective::SendReceive { from, .. } => (piece, Contributors::One(from)),
        };
        Wanted { datum, from }
    }

    /// The chunk of the other buffer that shares its memory with this one, where the call is in place. The memory that is then
    /// there once is that of the output, except in reduce-scatter and scatter, where the input is the larger.
    pub fn shared(&self, rank: Rank, buffer: Buffer, chunk: u32, pieces: u32) -> Option<(Buffer, u32)> {
        if !self.in_place {
            return None;
        }
        let own = rank.0 * pieces + chunk;
        match (self.collective, buffer) {
            (Collective::AllReduce | Collective::AllToAll { .. }, Buffer::Input) => Some((Buffer::Output, chunk)),
            (Collective::AllGather { .. }, Buffer::Input) => Some((Buffer::Output, own)),
            (Collective::ReduceScatter { .. }, Buffer::Output) => Some((Buffer::Input, own)),
            (Collective::Broadcast { root } | Collective::Reduce { root }, Buffer::Input) if rank == root => {
                Some((Buffer::Output, chunk))
            }
            (Collective::Gather { root, .. }, Buffer::Input) if rank == root => Some((Buffer::Output, own)),
            (Collective::Scatter { root, .. }, Buffer::Output) if rank == root => Some((Buffer::Input, own)),
            _ => None,
        }
    }
}

impl Collective {
    /// The name that commands and files know it by; what varies in size has its own.
    pub const fn name(&self) -> &'static str {
        match self {
            Collective::AllReduce => "all-reduce",
            Collective::AllGather { sizes: Sizes::Equal } => "all-gather",
            Collective::AllGather { sizes: Sizes::Varying } => "all-gatherv",
            Collective::ReduceScatter { sizes: Sizes::Equal } => "reduce-scatter",
            Collective::ReduceScatter { sizes: Sizes::Varying } => "reduce-scatterv",
            Collective::Broadcast { .. } => "broadcast",
            Collective::Reduce { .. } => "reduce",
            Collective::Gather {
                sizes: Sizes::Equal, ..
            } => "gather",
            Collective::Gather {
                sizes: Sizes::Varying, ..
            } => "gatherv",
            Collective::Scatter {
                sizes: Sizes::Equal, ..
            } => "scatter",
            Collective::Scatter {
                sizes: Sizes::Varying, ..
            } => "scatterv",
            Collective::AllToAll { sizes: Sizes::Equal } => "all-to-all",
            Collective::AllToAll { sizes: Sizes::Varying } => "all-to-allv",
            Collective::SendReceive { .. } => "send-receive",
            Collective::Barrier => "barrier",
        }
    }

    /// Every name.
    pub const NAMES: [&str; 15] = [
        "all-reduce",
        "all-gather",
        "all-gatherv",
        "reduce-scatter",
        "reduce-scatterv",
        "broadcast",
        "reduce",
        "gather",
        "gatherv",
        "scatter",
        "scatterv",
        "all-to-all",
        "all-to-allv",
        "send-receive",
        "barrier",
    ];

    /// The collective of that name, with this root where it has one; send-receive goes from the root to `to`.
    pub fn named(name: &str, root: Rank, to: Rank) -> Option<Collective> {
        let sizes = if name.ends_with('v') {
            Sizes::Varying
        } else {
            Sizes::Equal
        };
        let collective = match name {
            "all-reduce" => Collective::AllReduce,
            "all-gather" | "all-gatherv" => Collective::AllGather { sizes },
            "reduce-scatter" | "reduce-scatterv" => Collective::ReduceScatter { sizes },
            "broadcast" => Collective::Broadcast { root },
            "reduce" => Collective::Reduce { root },
            "gather" | "gatherv" => Collective::Gather { root, sizes },
            "scatter" | "scatterv" => Collective::Scatter { root, sizes },
            "all-to-all" | "all-to-allv" => Collective::AllToAll { sizes },
            "send-receive" => Collective::SendReceive { from: root, to },
            "barrier" => Collective::Barrier,
            _ => return None,
        };
        Some(collective)
    }

    /// Whether its blocks differ in size.
    pub const fn sizes(&self) -> Sizes {
        match *self {
            Collective::AllGather { sizes }
            | Collective::ReduceScatter { sizes }
            | Collective::Gather { sizes, .. }
            | Collective::Scatter { sizes, .. }
            | Collective::AllToAll { sizes } => sizes,
            Collective::AllReduce
            | Collective::Broadcast { .. }
            | Collective::Reduce { .. }
            | Collective::SendReceive { .. }
            | Collective::Barrier => Sizes::Equal,
        }
    }

    /// Whether contributions are reduced, not only moved.
    pub const fn reduces(&self) -> bool {
        matches!(
            self,
            Collective::AllReduce | Collective::ReduceScatter { .. } | Collective::Reduce { .. }
        )
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Buffer::Input => "input",
            Buffer::Output => "output",
            Buffer::Scratch => "scratch",
        })
    }
}

impl Extent {
    /// A piece of a block as large as all the others.
    pub const fn common(piece: u32) -> Extent {
        Extent {
            block: BlockSize::Common,
            piece,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_names_the_collective_that_bears_it() {
        for name in Collective::NAMES {
            let collective = Collective::named(name, Rank(1), Rank(2)).unwrap();
            assert_eq!(collective.name(), name);
        }
        assert_eq!(Collective::named("reduc", Rank(0), Rank(1)), None);
    }

    #[test]
    fn what_cannot_be_is_told() {
        let check = |collective, ranks| Problem::new(collective, ranks).check();
        assert_eq!(check(Collective::AllReduce, 0), Err(ProblemError::NoRanks));
        let root = Rank(3);
        assert!(check(Collective::Broadcast { root }, 3).is_err());
        assert!(check(Collective::SendReceive { from: root, to: root }, 4).is_err());
        assert!(Problem::new(Collective::Barrier, 4).in_place().check().is_err());
    }
}
