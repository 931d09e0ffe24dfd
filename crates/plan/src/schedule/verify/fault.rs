//! What is wrong with a program, and where.

use std::fmt;

use thiserror::Error;

use crate::collective::{Buffer, Contributors, ProblemError, Wanted};
use crate::schedule::{Channel, Op, Slice};
use crate::units::Rank;

/// One op of a program: the nth of a rank's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct At {
    pub rank: Rank,
    pub step: u32,
    pub op: usize,
}

/// What a chunk holds, spelled out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub datum: u32,
    pub from: Vec<Rank>,
}

/// Why a program is not a way to do its collective.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Fault {
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error("a program for {program} ranks, and a collective of {problem}")]
    WrongRanks { program: u32, problem: u32 },
    #[error("blocks cut into no pieces")]
    NoPieces,
    #[error("{chunks} chunks, all ranks together; {max} is the most")]
    TooLarge { chunks: u64, max: u64 },
    #[error("rank {rank}: scratch[{chunk}] is as long as a piece that no block has")]
    BadExtent { rank: Rank, chunk: u32 },
    #[error("{ranks} ranks; {max} is the most that can be verified")]
    TooManyRanks { ranks: u32, max: u32 },
    #[error("{at}: there is no rank {peer} for it to talk to")]
    BadPeer { at: At, peer: Rank },
    #[error("{at}: there is no channel {}", channel.0)]
    BadChannel { at: At, channel: Channel },
    #[error("{at}: {slice} ends past the {chunks} chunks of the buffer")]
    OutOfBounds { at: At, slice: Slice, chunks: u32 },
    #[error("{at}: {slice} is written, and an input never is")]
    WritesInput { at: At, slice: Slice },
    #[error("{at}: {taken} has not as many elements as {sent} at {from}")]
    SizeMismatch {
        at: At,
        from: At,
        sent: Slice,
        taken: Slice,
    },
    #[error("{at}: `{}` and `{}` (op {other}) touch the same memory at once", ops[1], ops[0])]
    Race { at: At, other: usize, ops: Box<[Op; 2]> },
    #[error("{at}: {buffer}[{chunk}] is read before anything was written to it")]
    Unwritten { at: At, buffer: Buffer, chunk: u32 },
    #[error("{at}: chunk {chunk} would be a reduction of datum {first} with datum {second}")]
    DifferentData {
        at: At,
        chunk: u32,
        first: u32,
        second: u32,
    },
    #[error("{at}: the contribution of rank {twice} would be counted twice in chunk {chunk}")]
    CountedTwice { at: At, chunk: u32, twice: Rank },
    #[error(
        "{at}: `{op}` waits for ever; rank {peer} {}",
        match peer_step { Some(step) => format!("is stuck in step {step}"), None => "has ended".into() }
    )]
    Deadlock {
        at: At,
        op: Op,
        peer: Rank,
        /// `None`: it has come to the end of its program.
        peer_step: Option<u32>,
    },
    #[error("rank {rank}: output[{chunk}] must hold {} and holds {}", Asked(wanted), Held(holds.as_ref()))]
    WrongResult {
        rank: Rank,
        chunk: u32,
        wanted: Wanted,
        holds: Option<Holding>,
    },
    #[error("rank {rank} may end before {} begun", have_ranks(unheard))]
    EndsTooEarly { rank: Rank, unheard: Vec<Rank> },
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, step {}, op {}", self.rank, self.step, self.op)
    }
}

struct Asked<'a>(&'a Wanted);

impl fmt::Display for Asked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.from {
            Contributors::All => write!(f, "datum {} from all ranks", self.0.datum),
            Contributors::One(rank) => write!(f, "datum {} from rank {rank}", self.0.datum),
        }
    }
}

struct Held<'a>(Option<&'a Holding>);

impl fmt::Display for Held<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => write!(f, "nothing"),
            Some(holding) => write!(f, "datum {} from {}", holding.datum, ranks(&holding.from)),
        }
    }
}

/// At most eight of them by number.
fn ranks(list: &[Rank]) -> String {
    let shown: Vec<String> = list.iter().take(8).map(Rank::to_string).collect();
    let more = list.len() - shown.len();
    let noun = if list.len() == 1 { "rank" } else { "ranks" };
    match more {
        0 => format!("{noun} {}", shown.join(", ")),
        _ => format!("{noun} {} and {more} more", shown.join(", ")),
    }
}

fn have_ranks(list: &[Rank]) -> String {
    let verb = if list.len() == 1 { "has" } else { "have" };
    format!("{} {verb}", ranks(list))
}
