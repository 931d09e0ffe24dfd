//! A program for one rank and given sizes, as a flat list of ops with byte ranges and what each of them waits for.
//!
//! Compiling asks the program once; running the same call again only walks the list. What an op waits for follows from the memory that it
//! touches, in the order in which the program lists its ops, so that a rank runs ahead of its steps wherever that is right.

mod flow;
mod fuse;

use std::ops::Range;

use weft_plan::Rank;
use weft_plan::collective::{Buffer, Layout, Partition};
use weft_plan::schedule::{Op, Ops, Program, Slice};

use super::exchange::{Lane, Piece};
use flow::Flow;

/// What one rank does in a call.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    pub(super) ops: Vec<Flat>,
    /// How many ops or beginnings of ops each op waits for.
    pub(super) waits: Vec<u32>,
    /// The ops that wait for nothing.
    pub(super) first: Vec<u32>,
    /// Whom an op releases, as ranges of this list.
    pub(super) released: Vec<u32>,
    /// The lanes that messages are sent on.
    pub(super) outgoing: Vec<Lane>,
    /// Bytes of scratch that all parts of the call need together.
    pub(super) scratch: u64,
    pub(super) channels: u16,
}

/// An op with its bytes.
#[derive(Clone, Debug)]
pub(super) struct Flat {
    pub(super) step: u32,
    /// Which op of its step, in the order of the program. Of two that became one, the message.
    pub(super) place: u32,
    /// Which combiner of the call.
    pub(super) part: u32,
    /// Which message of its lane, for a message.
    pub(super) index: u32,
    pub(super) act: Act,
    /// Released when this has begun, for a send, or ended.
    pub(super) on_begin: Range<u32>,
    pub(super) on_end: Range<u32>,
}

/// What an op does, and with which bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Send {
        lane: Lane,
        queue: u32,
        from: Piece,
    },
    Receive {
        lane: Lane,
        into: Piece,
    },
    ReceiveReduce {
        lane: Lane,
        with: Piece,
        into: Piece,
    },
    Copy {
        from: Piece,
        to: Piece,
    },
    Reduce {
        from: Piece,
        with: Piece,
        into: Piece,
    },
    /// By the number of ranks.
    Divide {
        at: Piece,
    },
}

/// What to compile: a program, sizes, and what an element is.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub program: &'a dyn Program,
    pub partition: &'a Partition,
    /// Bytes of an element.
    pub size: usize,
    /// Divide the output by the number of ranks at the end.
    pub average: bool,
    /// Who knows of its messages.
    pub scope: Scope,
}

/// What two ranks know of each other's sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All ranks know all sizes, so that messages of nothing are left out on both sides.
    Known,
    /// A rank knows only its own sizes: every message is sent, so that two ranks that do not agree find out.
    Own,
}

/// The buffers of each part of a call, in the order in which an exchange is told of them: input and output. Scratch, of all parts together,
/// comes after those of the last.
const PART_BUFFERS: u32 = 2;
/// Scratch of a part begins on a cache line.
const SCRATCH_GRAIN: u64 = 64;

/// A call that cannot be compiled: fix the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    #[error("a buffer of more bytes than there are addresses")]
    TooLarge,
    #[error("the program is for {program} ranks, the sizes for {sizes}")]
    WrongRanks { program: u32, sizes: u32 },
    #[error("the program cuts a block into {program} pieces, the sizes into {sizes}")]
    WrongPieces { program: u32, sizes: u32 },
    #[error("more channels in one call than there are")]
    TooManyChannels,
}

impl Compiled {
    /// One collective. The program must have been verified: a slice out of bounds is a panic.
    pub fn new(source: &Source<'_>, rank: Rank) -> Result<Compiled, CompileError> {
        Compiled::group(std::slice::from_ref(source), rank, u16::MAX)
    }

    /// Several at once, each on an input and an output of its own, which are its buffers 2 *i* and 2 *i* + 1. Each has channels of its own
    /// as far as there are so many; then they are shared, in the order of the parts, which is the same on all ranks.
    pub fn group(sources: &[Source<'_>], rank: Rank, channels_max: u16) -> Result<Compiled, CompileError> {
        let mut compiled = Compiled::default();
        let mut flow = Flow::new();
        let mut next = 0;
        for (part, source) in sources.iter().enumerate() {
            let layout = layout(source, rank)?;
            let needed = source.program.shape().channels;
            if needed > channels_max {
                return Err(CompileError::TooManyChannels);
            }
            let channels = Channels {
                first: next,
                max: channels_max.max(1),
            };
            let after = compiled
                .scratch
                .checked_add(layout.elements(Buffer::Scratch) * source.size as u64);
            let after = after.and_then(|after| after.checked_next_multiple_of(SCRATCH_GRAIN));
            let scratch = Place {
                buffer: sources.len() as u32 * PART_BUFFERS,
                offset: std::mem::replace(&mut compiled.scratch, after.ok_or(CompileError::TooLarge)?),
            };
            let ops = list(source, &layout, rank, part as u32, channels, scratch);
            next = channels.of(needed);
            let used = u32::from(channels.first) + u32::from(needed);
            compiled.channels = compiled.channels.max(used.min(channels_max.into()) as u16);
            flow.add(part as u32, fuse::fuse(ops));
        }
        flow.finish(&mut compiled);
        Ok(compiled)
    }

    /// Bytes of scratch that it needs.
    pub fn scratch(&self) -> u64 {
        self.scratch
    }
    /// How many channels it uses between two ranks.
    pub fn channels(&self) -> u16 {
        self.channels
    }
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }
    /// How many ops there are. They have numbers from zero on.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// What an op does.
    pub fn act(&self, op: u32) -> &Act {
        &self.ops[op as usize].act
    }
    /// Where the program lists an op: its step, and which op of that step. Numbers of ops ascend with it.
    pub fn listed(&self, op: u32) -> (u32, u32) {
        let op = &self.ops[op as usize];
        (op.step, op.place)
    }
    /// Which message of its lane an op is, if it is one.
    pub fn index(&self, op: u32) -> u32 {
        self.ops[op as usize].index
    }
    /// The ops that wait for nothing.
    pub fn first(&self) -> &[u32] {
        &self.first
    }
    /// How many releases an op waits for.
    pub fn waits(&self, op: u32) -> u32 {
        self.waits[op as usize]
    }
    /// Whom the beginning of an op releases. Only sends have such.
    pub fn on_begin(&self, op: u32) -> &[u32] {
        self.released(&self.ops[op as usize].on_begin)
    }
    /// Whom the end of an op releases.
    pub fn on_end(&self, op: u32) -> &[u32] {
        self.released(&self.ops[op as usize].on_end)
    }
    fn released(&self, range: &Range<u32>) -> &[u32] {
        &self.released[range.start as usize..range.end as usize]
    }
}

/// An op as it was listed, with its bytes.
#[derive(Clone, Copy, Debug)]
struct Listed {
    step: u32,
    place: u32,
    act: Act,
    /// A message of nothing: it stands for everything before it.
    fence: bool,
}

impl Act {
    fn reads(&self) -> [Option<Piece>; 2] {
        match *self {
            Act::Send { from, .. } => [Some(from), None],
            Act::Receive { .. } => [None, None],
            Act::ReceiveReduce { with, .. } => [Some(with), None],
            Act::Copy { from, .. } => [Some(from), None],
            Act::Reduce { from, with, .. } => [Some(from), Some(with)],
            Act::Divide { at } => [Some(at), None],
        }
    }
    fn writes(&self) -> Option<Piece> {
        match *self {
            Act::Send { .. } => None,
            Act::Receive { into, .. } | Act::ReceiveReduce { into, .. } | Act::Reduce { into, .. } => Some(into),
            Act::Copy { to, .. } => Some(to),
            Act::Divide { at } => Some(at),
        }
    }
    /// Bytes that it is about.
    pub fn bytes(&self) -> u64 {
        self.writes().or(self.reads()[0]).map_or(0, |piece| piece.len)
    }
}

/// Where the channels of a part are among those that there are.
#[derive(Clone, Copy, Debug)]
struct Channels {
    first: u16,
    max: u16,
}

impl Channels {
    /// The one that the part's program calls `channel`.
    fn of(self, channel: u16) -> u16 {
        ((u32::from(self.first) + u32::from(channel)) % u32::from(self.max)) as u16
    }
}

/// Where everything is in the buffers of a rank, if program and sizes are for each other and the bytes of every buffer can be counted.
fn layout(source: &Source<'_>, rank: Rank) -> Result<Layout, CompileError> {
    let shape = source.program.shape();
    let (ranks, pieces) = (source.partition.problem().ranks, source.partition.pieces());
    if shape.ranks != ranks {
        return Err(CompileError::WrongRanks {
            program: shape.ranks,
            sizes: ranks,
        });
    }
    if shape.pieces != pieces {
        return Err(CompileError::WrongPieces {
            program: shape.pieces,
            sizes: pieces,
        });
    }
    let layout = Layout::new(source.partition, source.program, rank);
    let buffers = [Buffer::Input, Buffer::Output, Buffer::Scratch];
    let countable = |buffer: &Buffer| layout.elements(*buffer).checked_mul(source.size as u64).is_some();
    match buffers.iter().all(countable) {
        true => Ok(layout),
        false => Err(CompileError::TooLarge),
    }
}

/// Where the scratch of a part begins.
#[derive(Clone, Copy, Debug)]
struct Place {
    buffer: u32,
    offset: u64,
}

/// What the program lists for this rank, without what has no bytes.
fn list(
    source: &Source<'_>,
    layout: &Layout,
    rank: Rank,
    part: u32,
    channels: Channels,
    scratch: Place,
) -> Vec<Listed> {
    let (program, partition) = (source.program, source.partition);
    let shape = program.shape();
    let size = source.size as u64;
    let piece = |slice: Slice| {
        let (buffer, elements) = layout.locate(slice);
        let (offset, len) = (elements.start * size, (elements.end - elements.start) * size);
        let own = part * PART_BUFFERS;
        match buffer {
            // A call need not have the buffer of a piece of nothing.
            _ if len == 0 => Piece {
                buffer: own,
                offset: 0,
                len,
            },
            Buffer::Input | Buffer::Output => Piece {
                buffer: own + buffer as u32,
                offset,
                len,
            },
            Buffer::Scratch => Piece {
                buffer: scratch.buffer,
                offset: scratch.offset + offset,
                len,
            },
        }
    };
    let lane = |peer: Rank, channel: weft_plan::schedule::Channel| Lane {
        peer,
        channel: channels.of(channel.0),
    };
    let (mut listed, mut ops) = (Vec::new(), Ops::new());
    for step in 0..shape.steps {
        for (place, op) in (0..).zip(ops.fill(program, rank, step)) {
            let act = match *op {
                Op::Send { to, slice, channel } => Act::Send {
                    lane: lane(to, channel),
                    queue: 0,
                    from: piece(slice),
                },
                Op::Receive { from, slice, channel } => Act::Receive {
                    lane: lane(from, channel),
                    into: piece(slice),
                },
                Op::ReceiveReduce {
                    from,
                    with,
                    into,
                    channel,
                } => Act::ReceiveReduce {
                    lane: lane(from, channel),
                    with: piece(with),
                    into: piece(into),
                },
                Op::Copy { from, to } => Act::Copy {
                    from: piece(from),
                    to: piece(to),
                },
                Op::Reduce { from, with, into } => Act::Reduce {
                    from: piece(from),
                    with: piece(with),
                    into: piece(into),
                },
            };
            let fence = op.peer().is_some() && op.reads().chain(op.writes()).all(|slice| slice.is_empty());
            let itself = matches!(act, Act::Copy { from, to } if from == to);
            let kept = act.bytes() > 0 || fence || op.peer().is_some() && source.scope != Scope::Known;
            if kept && !itself {
                listed.push(Listed {
                    step,
                    place,
                    act,
                    fence,
                });
            }
        }
    }
    if source.average {
        let chunks = partition.problem().chunks(rank, Buffer::Output, partition.pieces());
        let at = piece(Slice::output(0, chunks));
        if at.len > 0 {
            listed.push(Listed {
                step: shape.steps,
                place: 0,
                act: Act::Divide { at },
                fence: false,
            });
        }
    }
    listed
}

#[cfg(test)]
mod tests {
    use weft_plan::algorithms::Ring;
    use weft_plan::collective::{Collective, Counts, Problem, Sizes};

    use super::*;

    #[test]
    fn parts_have_scratch_of_their_own() {
        const PARTS: u32 = 3;
        let problem = Problem::new(Collective::ReduceScatter { sizes: Sizes::Equal }, 3);
        let program = Ring::new(problem).unwrap();
        let partition = Partition::new(&problem, Counts::Equal(9), program.shape().pieces).unwrap();
        let source = Source {
            program: &program,
            partition: &partition,
            size: 4,
            average: false,
            scope: Scope::Known,
        };
        let compiled = Compiled::group(&[source; PARTS as usize], Rank(0), 2).unwrap();
        let mut end = 0;
        for part in 0..PARTS {
            let ops = compiled.ops.iter().filter(|op| op.part == part);
            let pieces = ops.flat_map(|op| op.act.reads().into_iter().flatten().chain(op.act.writes()));
            let scratch: Vec<Piece> = pieces.filter(|piece| piece.buffer == PARTS * PART_BUFFERS).collect();
            assert!(!scratch.is_empty(), "a ring that reduces and scatters needs scratch");
            assert!(
                scratch.iter().all(|piece| piece.offset >= end),
                "part {part} has that of another"
            );
            end = scratch
                .iter()
                .map(|piece| piece.offset + piece.len)
                .max()
                .unwrap_or(end);
        }
        assert!(end <= compiled.scratch());
    }

    #[test]
    fn a_slice_that_was_sent_is_overwritten_only_after_that() {
        // In place, rank 0 sends chunk 0 first and gets its reduction last.
        let problem = Problem::new(Collective::AllReduce, 3).in_place();
        let program = Ring::new(problem).unwrap();
        let partition = Partition::new(&problem, Counts::Equal(9), program.shape().pieces).unwrap();
        let source = Source {
            program: &program,
            partition: &partition,
            size: 4,
            average: false,
            scope: Scope::Known,
        };
        let compiled = Compiled::new(&source, Rank(0)).unwrap();
        let listed = |step, place| (0..compiled.len() as u32).find(|&op| compiled.listed(op) == (step, place));
        let (sent, overwritten) = (listed(0, 0).unwrap(), listed(2, 1).unwrap());
        assert!(matches!(compiled.act(sent), Act::Send { .. }));
        assert!(compiled.on_end(sent).contains(&overwritten), "{compiled:?}");
        assert!(!compiled.on_begin(sent).contains(&overwritten), "{compiled:?}");
    }

    #[test]
    fn every_release_is_waited_for() {
        let problem = Problem::new(Collective::AllReduce, 6);
        let program = weft_plan::algorithms::Algorithm::ALL
            .iter()
            .filter_map(|algorithm| algorithm.program(&problem, weft_plan::algorithms::Grid::flat(6)));
        for program in program {
            let partition = Partition::new(&problem, Counts::Equal(50), program.shape().pieces).unwrap();
            let source = Source {
                program: &*program,
                partition: &partition,
                size: 2,
                average: true,
                scope: Scope::Known,
            };
            for rank in (0..6).map(Rank) {
                let compiled = Compiled::new(&source, rank).unwrap();
                let ops = 0..compiled.len() as u32;
                let mut released = vec![0; compiled.len()];
                for op in ops.clone() {
                    for &after in compiled.on_begin(op).iter().chain(compiled.on_end(op)) {
                        assert!(after > op, "what comes later waits");
                        released[after as usize] += 1;
                    }
                }
                for op in ops {
                    assert_eq!(compiled.waits(op), released[op as usize], "{program:?}");
                    assert_eq!(compiled.first().contains(&op), compiled.waits(op) == 0);
                }
            }
        }
    }
}
