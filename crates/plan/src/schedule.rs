//! A collective as a program: what every rank does in every step, as data that can be verified, run, simulated and drawn.
//!
//! A [`Program`] is a function of rank and step, so that a hundred thousand ranks cost nothing until somebody asks. It knows five
//! ops and no sizes: a buffer is blocks, a block is cut into pieces, and a piece of a block is a *chunk*
//! ([`Partition`](crate::collective::Partition) says how many elements it has, which may be none).
//!
//! # What a program means
//!
//! 1. A rank runs its steps in order. The ops of one step run at once, in any order.
//! 2. A [`Send`](Op::Send) and the [`Receive`](Op::Receive) or [`ReceiveReduce`](Op::ReceiveReduce) that takes it end together: when
//!    the receiver has taken the data out of the sender's slice. (That is, sends are never buffered.) The nth message from one rank to
//!    another on a channel is taken by the nth receive from it on that channel. A message of an empty slice carries nothing and still
//!    has to come.
//! 3. A step ends when all its ops have ended.
//! 4. No two ops of a step may touch the same chunk if one of them writes it. One exception: after an op that writes a slice may come
//!    reductions on top of the very same slice (`with` and `into` both are that slice). They are applied in the order in which they
//!    are listed, so that rounding does not depend on timing.
//!
//! This is the strictest world in which a program can run, and [`verify`](verify::verify) shows that it ends there and gives the right
//! result. From (2) and (4) follows what one-sided executors need: while a send has not ended its slice does not change, so that the
//! receiver may read it in place; and while a receive has not begun nobody looks at its slice, so that from then on the sender may
//! write into it.
//!
//! # What an executor may do
//!
//! Anything that only waits for less: begin an op as soon as the earlier ops *of its own rank* that it conflicts with have ended
//! (conflict: common chunks, at least one of the two writes them), as long as the messages of a channel stay in order; end a send
//! early by copying its slice; leave out messages whose slice is not empty but has no elements, at both ends. Every wait that remains
//! is a wait of the strict world, so that a program that ends there ends here.

pub mod encode;
mod listed;
pub mod lower;
pub mod reference;
pub mod render;
pub mod verify;

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::collective::{Buffer, Extent};
use crate::units::Rank;

pub use listed::Listed;
pub use verify::{Fault, Summary, verify};

/// What every rank does in every step.
pub trait Program: fmt::Debug + Send + Sync {
    fn shape(&self) -> Shape;

    /// Appends what `rank` does in `step`. Both are below the counts in the shape; a rank may have nothing to do.
    fn ops(&self, rank: Rank, step: u32, out: &mut Ops);

    /// How many elements a chunk of a rank's scratch has. Scratch usually is blocks of the common size, cut like all others.
    fn scratch(&self, rank: Rank, chunk: u32) -> Extent {
        let _ = rank;
        Extent::common(chunk % self.shape().pieces)
    }

    /// The same program told by a few of its ranks and steps, where it is regular enough for that; see [`Phase`].
    fn phases(&self) -> Option<Vec<Phase>> {
        None
    }
}

/// How large a program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    pub ranks: u32,
    /// Steps of the rank that has most.
    pub steps: u32,
    /// How many chunks every block is cut into; at least one.
    pub pieces: u32,
    /// Chunks of scratch on every rank.
    pub scratch: u32,
    /// Messages on different channels do not wait for each other.
    pub channels: u16,
}

/// A run of steps that are alike: with blocks of one size, each of them takes about as long as the first, and in that one no node is
/// busier than the nodes of `ranks`.
///
/// This is what lets the cost of a program for a million ranks be computed at once. Which ranks share a node is not the program's
/// business; whoever asks looks at all that share one with those named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    pub steps: Range<u32>,
    pub ranks: Vec<Rank>,
}

impl Phase {
    /// Every step for itself, and the same ranks in all of them.
    pub fn each_step(shape: &Shape, ranks: &[Rank]) -> Vec<Phase> {
        let cuts: Vec<u32> = (0..=shape.steps).collect();
        Phase::runs(&cuts, ranks)
    }

    /// Runs of steps between `cuts`, in whatever order these are, and the same ranks in all of them.
    pub fn runs(cuts: &[u32], ranks: &[Rank]) -> Vec<Phase> {
        let mut cuts = cuts.to_vec();
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2)
            .map(|pair| pair[0]..pair[1])
            .map(|steps| Phase {
                steps,
                ranks: ranks.to_vec(),
            })
            .collect()
    }
}

/// Consecutive chunks of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slice {
    pub buffer: Buffer,
    pub first: u32,
    pub count: u32,
}

/// A connection between two ranks, numbered from zero. Messages on one come in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Channel(pub u16);

/// One thing that a rank does.
///
/// A program never names the input as a target: in place, it is written by the name of the output. What an executor does in one pass
/// (receive, reduce and send on) is two ops here, in successive steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Op {
    Send {
        to: Rank,
        slice: Slice,
        #[serde(default)]
        channel: Channel,
    },
    Receive {
        from: Rank,
        slice: Slice,
        #[serde(default)]
        channel: Channel,
    },
    /// `into` becomes `with` reduced with what comes; the two may be one slice.
    ReceiveReduce {
        from: Rank,
        with: Slice,
        into: Slice,
        #[serde(default)]
        channel: Channel,
    },
    /// Nothing at all where both are the same memory, as happens in place.
    Copy { from: Slice, to: Slice },
    /// `into` becomes `with` reduced with `from`; `with` and `into` may be one slice.
    Reduce { from: Slice, with: Slice, into: Slice },
}

/// The ops of a step, as a program writes them down. Cleared and filled again, it allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct Ops {
    list: Vec<Op>,
    channel: Channel,
}

impl Ops {
    pub fn new() -> Ops {
        Ops::default()
    }

    /// Empties the list and lets `program` fill it.
    pub fn fill(&mut self, program: &dyn Program, rank: Rank, step: u32) -> &[Op] {
        self.list.clear();
        self.channel = Channel(0);
        program.ops(rank, step, self);
        &self.list
    }

    pub fn as_slice(&self) -> &[Op] {
        &self.list
    }
    pub fn push(&mut self, op: Op) {
        self.list.push(op);
    }
    /// The channel of the messages that follow.
    pub fn on(&mut self, channel: u16) -> &mut Ops {
        self.channel = Channel(channel);
        self
    }
    pub fn send(&mut self, to: Rank, slice: Slice) {
        let channel = self.channel;
        self.list.push(Op::Send { to, slice, channel });
    }
    pub fn receive(&mut self, from: Rank, slice: Slice) {
        let channel = self.channel;
        self.list.push(Op::Receive { from, slice, channel });
    }
    pub fn receive_reduce(&mut self, from: Rank, with: Slice, into: Slice) {
        let channel = self.channel;
        self.list.push(Op::ReceiveReduce {
            from,
            with,
            into,
            channel,
        });
    }
    pub fn copy(&mut self, from: Slice, to: Slice) {
        self.list.push(Op::Copy { from, to });
    }
    pub fn reduce(&mut self, from: Slice, with: Slice, into: Slice) {
        self.list.push(Op::Reduce { from, with, into });
    }
}

impl Slice {
    /// What a message carries that carries nothing.
    pub const NOTHING: Slice = Slice {
        buffer: Buffer::Scratch,
        first: 0,
        count: 0,
    };

    pub const fn input(first: u32, count: u32) -> Slice {
        Slice {
            buffer: Buffer::Input,
            first,
            count,
        }
    }
    pub const fn output(first: u32, count: u32) -> Slice {
        Slice {
            buffer: Buffer::Output,
            first,
            count,
        }
    }
    pub const fn scratch(first: u32, count: u32) -> Slice {
        Slice {
            buffer: Buffer::Scratch,
            first,
            count,
        }
    }
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }
    /// The positions of its chunks; a slice from outside may end past 2^32.
    pub fn chunks(&self) -> Range<u64> {
        u64::from(self.first)..u64::from(self.first) + u64::from(self.count)
    }
}

impl Op {
    /// The other end of a message.
    pub const fn peer(&self) -> Option<Rank> {
        match *self {
            Op::Send { to, .. } => Some(to),
            Op::Receive { from, .. } | Op::ReceiveReduce { from, .. } => Some(from),
            Op::Copy { .. } | Op::Reduce { .. } => None,
        }
    }
    pub const fn channel(&self) -> Option<Channel> {
        match *self {
            Op::Send { channel, .. } | Op::Receive { channel, .. } | Op::ReceiveReduce { channel, .. } => Some(channel),
            Op::Copy { .. } | Op::Reduce { .. } => None,
        }
    }
    /// The same op on other slices.
    pub fn with_slices(&self, mut change: impl FnMut(Slice) -> Slice) -> Op {
        match *self {
            Op::Send { to, slice, channel } => Op::Send {
                to,
                slice: change(slice),
                channel,
            },
            Op::Receive { from, slice, channel } => Op::Receive {
                from,
                slice: change(slice),
                channel,
            },
            Op::ReceiveReduce {
                from,
                with,
                into,
                channel,
            } => Op::ReceiveReduce {
                from,
                with: change(with),
                into: change(into),
                channel,
            },
            Op::Copy { from, to } => Op::Copy {
                from: change(from),
                to: change(to),
            },
            Op::Reduce { from, with, into } => Op::Reduce {
                from: change(from),
                with: change(with),
                into: change(into),
            },
        }
    }
    /// The same op with another peer, where it has one.
    pub fn with_peer(&self, change: impl Fn(Rank) -> Rank) -> Op {
        let mut op = *self;
        match &mut op {
            Op::Send { to: peer, .. } | Op::Receive { from: peer, .. } | Op::ReceiveReduce { from: peer, .. } => {
                *peer = change(*peer);
            }
            Op::Copy { .. } | Op::Reduce { .. } => {}
        }
        op
    }
    /// The slices that it reads on its own rank.
    pub fn reads(&self) -> impl Iterator<Item = Slice> + use<> {
        let (first, second) = match *self {
            Op::Send { slice, .. } => (Some(slice), None),
            Op::Receive { .. } => (None, None),
            Op::ReceiveReduce { with, .. } => (Some(with), None),
            Op::Copy { from, .. } => (Some(from), None),
            Op::Reduce { from, with, .. } => (Some(from), Some(with)),
        };
        first.into_iter().chain(second)
    }
    /// The slice that it writes on its own rank.
    pub const fn writes(&self) -> Option<Slice> {
        match *self {
            Op::Send { .. } => None,
            Op::Receive { slice, .. } => Some(slice),
            Op::ReceiveReduce { into, .. } | Op::Reduce { into, .. } => Some(into),
            Op::Copy { to, .. } => Some(to),
        }
    }
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Slice { buffer, first, count } = self;
        match count {
            0 => write!(f, "nothing"),
            1 => write!(f, "{buffer}[{first}]"),
            _ => write!(f, "{buffer}[{first}..{}]", u64::from(*first) + u64::from(*count)),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Send { to, slice, .. } => write!(f, "send {slice} to {to}")?,
            Op::Receive { from, slice, .. } => write!(f, "receive {slice} from {from}")?,
            Op::ReceiveReduce { from, with, into, .. } if with == into => write!(f, "reduce {into} with {from}'s")?,
            Op::ReceiveReduce { from, with, into, .. } => write!(f, "reduce {with} with {from}'s into {into}")?,
            Op::Copy { from, to } => write!(f, "copy {from} to {to}")?,
            Op::Reduce { from, with, into } if with == into => write!(f, "reduce {into} with {from}")?,
            Op::Reduce { from, with, into } => write!(f, "reduce {with} with {from} into {into}")?,
        }
        match self.channel() {
            Some(Channel(channel)) if channel > 0 => write!(f, " on channel {channel}"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
