//! What happens between two ends of a path: packets, retries, landings, and the end of a path.
//!
//! A path over a network is lossy below and reliable above, as a NIC makes it: a packet is sent again until it arrives or the retries
//! are used up, and then the side that sent it gives the path up, while what it sent before may still be under way. A path
//! within a host is executed by its initiator alone, as shared memory is.

mod atomics;
mod ending;
mod landing;
mod packets;
mod posting;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{Access, Direction, Done, Move, OpId, PathId, Refusal, RegionTable, Signal};

use crate::transport::Fabric;
use crate::world::NodeId;
use atomics::AtomicJob;

/// One end of a fabric: what a [`SimTransport`](crate::SimTransport) stands on.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) node: NodeId,
    pub(crate) alive: bool,
    pub(crate) fabric: Fabric,
    pub(crate) clock: AgentClock,
    pub(crate) table: RegionTable,
    pub(crate) paths: BTreeMap<PathId, (u32, Side)>,
    pub(crate) inbox: Vec<Signal>,
    /// Slots that have been released while a peer was inside.
    pub(crate) leaving: BTreeSet<u32>,
    pub(crate) next_path: u32,
}

/// What an agent's clock reads, and when: no two agents need have started together, nor recently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AgentClock {
    /// On the world's clock.
    start: Time,
    /// On the agent's, at that moment.
    reading: Time,
}

impl AgentClock {
    pub(crate) fn new(start: Time, reading: Time) -> AgentClock {
        AgentClock { start, reading }
    }
    /// What the agent's clock reads when the world's reads `now`.
    pub(crate) fn read(self, now: Time) -> Time {
        self.reading.saturating_add(now.saturating_sub(self.start))
    }
    /// A time of the agent's clock on the world's.
    pub(crate) fn on_world_clock(self, time: Time) -> Time {
        self.start.saturating_add(time.saturating_sub(self.reading))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Opener,
    Acceptor,
}

impl Side {
    pub(crate) fn other(self) -> Side {
        match self {
            Side::Opener => Side::Acceptor,
            Side::Acceptor => Side::Opener,
        }
    }
}

/// A path between two ends.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) fabric: Fabric,
    pub(crate) opener: Half,
    pub(crate) acceptor: Half,
}

/// One side of a path.
#[derive(Debug)]
pub(crate) struct Half {
    pub(crate) node: NodeId,
    /// The end and the number that it has given the path; unknown at the acceptor until the path is opened.
    pub(crate) seat: Option<(usize, PathId)>,
    pub(crate) stage: Stage,
    pub(crate) ops: BTreeMap<OpId, Outgoing>,
    pub(crate) atomics: BTreeMap<OpId, Arc<AtomicJob>>,
    /// What the far side has asked for and what became of it. An entry outlives the operation, so that nothing repeats it.
    inbound: BTreeMap<OpId, Inbound>,
    /// The owner knows who is at the far side; and what came before it did.
    vouched: bool,
    held: Vec<Packet>,
    /// Closed, but what it has queued still goes out, as it does from a socket whose owner has given up.
    draining: bool,
    /// When what this side sends next can depart.
    free_at: Time,
    /// Before this nothing may arrive here where order is kept.
    last_arrival: Time,
    /// How much earlier than its poster this side believes a deadline to be over.
    clock_error: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Opening,
    Open,
    Closed,
}

/// A move that this side has posted.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) job: Arc<Job>,
    landed: BTreeSet<u32>,
    cancelling: bool,
}

/// A move as it travels.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) op: OpId,
    pub(crate) part: Move,
    /// On the world's clock.
    pub(crate) deadline: Time,
    /// What a write carries, in the order of the part.
    bytes: Vec<u8>,
    packet_bytes: u64,
}

#[derive(Debug, Default)]
struct Inbound {
    landed: BTreeSet<u32>,
    verdict: Option<Verdict>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Verdict {
    Done(Done),
    Refused(Refusal),
    Cancelled,
}

#[derive(Clone, Debug)]
pub(crate) enum Packet {
    Syn {
        address: Arc<str>,
    },
    SynAck,
    Reset,
    /// Nobody listens.
    Refused,
    Message(Arc<[u8]>),
    Write {
        job: Arc<Job>,
        index: u32,
    },
    Read {
        job: Arc<Job>,
    },
    ReadData {
        job: Arc<Job>,
        index: u32,
        bytes: Arc<Vec<u8>>,
        sum: Option<u64>,
    },
    Atomic {
        job: Arc<AtomicJob>,
    },
    Cancel {
        op: OpId,
    },
    Verdict {
        op: OpId,
        verdict: Verdict,
    },
}

/// A packet on a network that has its own idea of when it arrives.
#[derive(Debug)]
pub(crate) struct Cargo {
    pub(crate) wire: u32,
    pub(crate) from: Side,
    pub(crate) packet: Packet,
    pub(crate) attempt: u32,
}

impl Packet {
    /// The far side wants something of this side's memory.
    fn asks_to_be_served(&self) -> bool {
        matches!(
            self,
            Packet::Write { .. } | Packet::Read { .. } | Packet::Atomic { .. } | Packet::Cancel { .. }
        )
    }

    /// Bytes on the wire, without the network's own header.
    pub(crate) fn size(&self) -> u32 {
        let carried = match self {
            Packet::Message(bytes) => bytes.len(),
            Packet::Write { job, index } => job.within(*index).len(),
            Packet::ReadData { bytes, .. } => bytes.len(),
            _ => 0,
        };
        64 + u32::try_from(carried).unwrap_or(u32::MAX - 64)
    }
}

impl Wire {
    pub(crate) fn half(&self, side: Side) -> &Half {
        match side {
            Side::Opener => &self.opener,
            Side::Acceptor => &self.acceptor,
        }
    }
    pub(crate) fn half_mut(&mut self, side: Side) -> &mut Half {
        match side {
            Side::Opener => &mut self.opener,
            Side::Acceptor => &mut self.acceptor,
        }
    }
}

impl Half {
    pub(crate) fn new(node: NodeId, seat: Option<(usize, PathId)>, clock_error: Time) -> Half {
        Half {
            node,
            seat,
            stage: Stage::Opening,
            ops: BTreeMap::new(),
            atomics: BTreeMap::new(),
            inbound: BTreeMap::new(),
            vouched: false,
            held: Vec::new(),
            draining: false,
            free_at: Time::ZERO,
            last_arrival: Time::ZERO,
            clock_error,
        }
    }

    /// Operations that hold a place.
    pub(crate) fn open(&self) -> usize {
        self.ops.len() + self.atomics.len()
    }
}

impl Job {
    fn total(&self) -> u64 {
        self.part.range.end - self.part.range.start
    }
    /// An empty move is one empty packet: there must be something to answer.
    fn packets(&self) -> u32 {
        self.total().div_ceil(self.packet_bytes).max(1) as u32
    }
    /// Where a packet's bytes are, counted from the start of the part.
    fn within(&self, index: u32) -> Range<usize> {
        let start = u64::from(index) * self.packet_bytes;
        start as usize..(start + self.packet_bytes).min(self.total()) as usize
    }
    fn of_leg(&self, within: &Range<usize>) -> Range<u64> {
        self.part.range.start + within.start as u64..self.part.range.start + within.end as u64
    }
    fn wanted(&self) -> Access {
        match self.part.direction {
            Direction::Read => Access::READ,
            Direction::Write => Access::WRITE,
        }
    }
    /// The far bytes of the whole part, checksummed in their order.
    fn far_sum(&self, memory: &dyn weft_protocol::Memory) -> Option<u64> {
        self.part.checksum.then(|| {
            let spans = self.part.leg.remote_spans().pieces(self.part.range.clone());
            memory.sum(spans).expect("simulated memory is always there")
        })
    }
}

impl End {
    pub(crate) fn new_path(&mut self, wire: u32, side: Side) -> PathId {
        let path = PathId(self.next_path);
        self.next_path += 1;
        self.paths.insert(path, (wire, side));
        path
    }
}
