//! The narrow waist: what every transport does, and all that the engine knows of one.

use std::any::Any;
use std::fmt;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use weft_plan::{LinkCost, Picos, PlaceKind, Time};

use crate::atomic::Atomic;
use crate::error::{Failure, Loss, Refusal};
use crate::leg::{Direction, Leg};
use crate::region::{Region, RegionKey, RemoteRegion};

/// Moves bytes between registered spans. Never blocks, never calls back.
///
/// What a transport promises:
/// - every accepted operation has exactly one [`Signal::Completed`];
/// - after that completion, whatever its outcome, the operation reads and writes no byte of local memory; and none of the
///   far memory either, except after [`Failure::PathLost`] with `fenced: false`, where the target itself stops at the deadline;
/// - a target touches memory only after [`RegionTable::check`](crate::RegionTable::check) and before the operation's deadline;
/// - where [`Capabilities::awaits_vouching`] says so, it serves moves and atomic operations only on paths that its owner
///   [vouches](Transport::vouch) for; what comes before waits, at the sender's expense and until its deadline;
/// - an [`Atomic`] is carried out once or not at all, and one that may have been and was not answered ends with a failure that
///   [says so](Failure::may_have_happened); on one word, those of all transports and of the owner are atomic together;
/// - messages arrive whole; whether in order, once, or at all is told by [`Capabilities::reliable_messages`], and the session
///   relies on none of it;
/// - an [`Arrival`] is signalled at the target after the bytes of its write are in place.
pub trait Transport: Debug + Send {
    fn capabilities(&self) -> &Capabilities;
    /// Makes a region reachable by peers (as its `access` says) and usable as the local side of a move.
    fn register(&mut self, region: &Region) -> Result<Grant, Refusal>;
    /// Makes a region unreachable. [`Progress::Busy`]: revoked, but a peer is still inside it; call again.
    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal>;
    /// Starts opening a path. [`Signal::Opened`] or [`Signal::Lost`] follows.
    fn open(&mut self, peer: &PeerAddress, now: Time) -> Result<PathId, Loss>;
    /// The owner has proof of who is at the far end of a path, and lets it reach the regions.
    fn vouch(&mut self, path: PathId);
    /// Closes a path; its open operations complete with [`Failure::PathLost`].
    fn close(&mut self, path: PathId);
    /// Hands operations over and returns how many were accepted; fewer than given means back-pressure, not an error.
    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss>;
    /// Ends an operation early. Its completion still comes: done if it was too late, [`Failure::Cancelled`] otherwise.
    fn cancel(&mut self, path: PathId, op: OpId, now: Time);
    /// Makes progress and appends what happened. Expires operations whose deadline is over.
    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress;
}

/// Whether to call again at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing to do until the outside world moves.
    Idle,
    /// There is more to do right now, or something was done and more is likely to follow soon.
    Busy,
}

/// What a transport can do, as data, with its cost.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Capabilities {
    /// `tcp`, `shared_memory`, `loopback`, …
    pub name: &'static str,
    /// Where peers reach this end.
    pub address: PeerAddress,
    /// Between which kinds of places it moves bytes, and at what cost. What is not here it is never asked for.
    pub carries: Vec<Carriage>,
    /// The most runs that the two sides of one move should have together.
    pub max_op_runs: usize,
    /// Moves and messages that one path holds at a time.
    pub max_inflight_ops: usize,
    pub max_message_bytes: usize,
    /// Messages arrive once and in order while the path lives.
    pub reliable_messages: bool,
    /// It serves nothing on a path before [`Transport::vouch`]. Not so where whoever can open a path has a right to the memory already: a process
    /// of the same user, or the holder of a device's own key.
    pub awaits_vouching: bool,
    /// It carries out [`Body::Atomic`]. Otherwise such operations are refused as [`Refusal::Unsupported`].
    pub atomics: bool,
    /// It waits itself for what an operation comes [after](Op::after). Otherwise it is given the operation when that has come about.
    pub awaits_ready: bool,
    /// The NUMA node that its hardware is attached to; none where it has none, or nobody knows. Bytes of other nodes cross the
    /// machine on their way, so of several rails the engine prefers those that are near.
    pub numa: Option<u16>,
}

impl Capabilities {
    /// The least that a transport can promise: small moves, a few at a time, and nothing beyond them. Its fields say what more it can do.
    pub fn new(name: &'static str, address: PeerAddress, carries: Vec<Carriage>) -> Capabilities {
        Capabilities {
            name,
            address,
            carries,
            max_op_runs: 64,
            max_inflight_ops: 16,
            max_message_bytes: crate::session::MAX_MESSAGE_BYTES,
            reliable_messages: false,
            awaits_vouching: false,
            atomics: false,
            awaits_ready: false,
            numa: None,
        }
    }

    /// What it says of moves between these two kinds of places.
    pub fn carriage(&self, near: PlaceKind, far: PlaceKind) -> Option<&Carriage> {
        self.carries.iter().find(|c| (c.near, c.far) == (near, far))
    }

    /// What a message takes, to compare transports by.
    pub fn latency(&self) -> Picos {
        let latencies = self.carries.iter().map(|c| c.cost.latency);
        latencies.min().unwrap_or(Picos::MAX)
    }
}

/// Bytes that a transport moves, in both directions, between a place of this agent and one at the far end of its paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Carriage {
    /// The kind of this side's memory.
    pub near: PlaceKind,
    /// The kind of the far side's memory.
    pub far: PlaceKind,
    pub cost: LinkCost,
    /// The most bytes one move should carry: enough to amortise its cost, few enough to stay responsive.
    pub max_op_bytes: u64,
    /// Every piece of a move begins at a multiple of this, on both sides, and is a multiple of it long. One where it does not matter.
    pub align: u64,
}

impl Carriage {
    pub fn new(near: PlaceKind, far: PlaceKind, cost: LinkCost, max_op_bytes: u64) -> Carriage {
        Carriage {
            near,
            far,
            cost,
            max_op_bytes,
            align: 1,
        }
    }

    /// Between host memory and host memory.
    pub fn host(cost: LinkCost, max_op_bytes: u64) -> Carriage {
        Carriage::new(PlaceKind::Dram, PlaceKind::Dram, cost, max_op_bytes)
    }

    pub fn align(self, align: u64) -> Carriage {
        Carriage { align, ..self }
    }
}

/// Where a transport can be reached: its name, a colon, and what only it understands.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerAddress(pub String);

impl PeerAddress {
    pub fn transport(&self) -> &str {
        self.0.split_once(':').map_or("", |(name, _)| name)
    }
    pub fn rest(&self) -> &str {
        self.0.split_once(':').map_or(self.0.as_str(), |(_, rest)| rest)
    }
}

impl Debug for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a peer must present, beside the key, to reach a region through this transport. Opaque to everyone else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant(pub Vec<u8>);

/// A path between two agents, numbered by the transport of this side and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(pub u32);

/// An operation, numbered by the poster and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// One thing for a transport to do.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Op {
    pub id: OpId,
    /// On the poster's clock. Both ends enforce it.
    pub deadline: Time,
    pub body: Body,
    /// Begin only when this has come about. Only given to a transport that [says](Capabilities::awaits_ready) it understands it.
    pub after: Option<Arc<dyn Ready>>,
}

impl Op {
    pub fn new(id: OpId, deadline: Time, body: Body) -> Op {
        Op {
            id,
            deadline,
            body,
            after: None,
        }
    }

    pub fn after(self, after: Option<Arc<dyn Ready>>) -> Op {
        Op { after, ..self }
    }
}

/// Something that the caller is doing, and that a transfer must come after: a kernel on a stream, an event of a device, a thread's word.
///
/// A transport that knows what is behind it can have the device itself wait; everyone else asks.
pub trait Ready: Debug + Send + Sync {
    /// Whether it has come about. Once it has, it stays so.
    fn is_ready(&self) -> bool;
    fn as_any(&self) -> &dyn Any;
}

/// A thread's word, by [`Flag::raise`].
#[derive(Debug, Default)]
pub struct Flag(AtomicBool);

impl Flag {
    pub fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Ready for Flag {
    fn is_ready(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// All that a transport may be asked to do. Every transport answers every kind, so a new one is a new arm everywhere.
#[derive(Clone, Debug)]
pub enum Body {
    Move(Move),
    /// Bytes for the far end's session.
    Message(Arc<[u8]>),
    Atomic(Atomic),
    Commit(Commit),
}

/// "Make what I have written last": a file is synchronised and gets its name, the parts of an object become the object. Where there is nothing
/// to be done, as for memory, it completes at once.
///
/// It is asked for after the completion of every part that it is about. Asking once more is harmless. Until it has completed, what
/// others find at the far end is either what was there before or something of both.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Commit {
    pub region: Arc<RemoteRegion>,
    /// The tag of the parts.
    pub tag: u64,
    /// How many of them this region was written by. Their indices differ; a transfer to several regions numbers its parts through, so they need not be
    /// consecutive.
    pub parts: u32,
}

impl Commit {
    pub fn new(region: Arc<RemoteRegion>, tag: u64, parts: u32) -> Commit {
        Commit { region, tag, parts }
    }
}

/// A part of a leg. It refers to the prepared leg, so that posting copies no span list.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Move {
    pub direction: Direction,
    pub leg: Arc<Leg>,
    /// Which bytes of the leg.
    pub range: Range<u64>,
    /// Report the checksums of both ends' bytes in [`Done`].
    pub checksum: bool,
    /// Tell the far end when these bytes are in place (writes only).
    pub arrival: Option<Arrival>,
}

impl Move {
    /// Neither summed nor announced.
    pub fn new(direction: Direction, leg: Arc<Leg>, range: Range<u64>) -> Move {
        Move {
            direction,
            leg,
            range,
            checksum: false,
            arrival: None,
        }
    }

    pub fn checksum(self, checksum: bool) -> Move {
        Move { checksum, ..self }
    }

    pub fn arrival(self, arrival: Option<Arrival>) -> Move {
        Move { arrival, ..self }
    }

    /// The checksum of the near side, if one is asked for. The near side must be host memory.
    pub fn near_sum(&self) -> Result<Option<u64>, Refusal> {
        if !self.checksum {
            return Ok(None);
        }
        let spans = self.leg.local_spans().pieces(self.range.clone());
        self.leg.local().memory.sum(spans).map(Some)
    }
}

impl Arrival {
    /// In `index`: this is the part of the greatest index, so whoever has it knows how many there are. Only in writes that the far application
    /// [is told of](crate::transfer::Request::arrives), which are never carried twice.
    pub const LAST: u32 = 1 << 31;
}

/// "Part `index` of transfer `tag` is in place." Parts are counted, each once, so no order is needed and a repeat is harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arrival {
    pub tag: u64,
    pub index: u32,
}

/// What a transport reports of an operation that succeeded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Done {
    /// The checksum of the far end's bytes, as they were read there or as they landed there.
    pub far_sum: Option<u64>,
    /// The same of this end's bytes. Who moves bytes can sum them, wherever they are; nobody else may be able to.
    pub near_sum: Option<u64>,
    /// What the word held before an atomic operation; always there after one.
    pub before: Option<u64>,
}

impl Done {
    /// An atomic operation found this in its word.
    pub fn found(before: u64) -> Done {
        Done {
            before: Some(before),
            ..Done::default()
        }
    }

    /// A move ended, with the checksums of both ends where they were asked for.
    pub fn moved(far_sum: Option<u64>, near_sum: Option<u64>) -> Done {
        Done {
            far_sum,
            near_sum,
            before: None,
        }
    }

    /// A move ended whose near side is host memory, which is summed here and now if that was asked for.
    pub fn moved_to_host(part: &Move, far_sum: Option<u64>) -> Result<Done, Refusal> {
        Ok(Done::moved(far_sum, part.near_sum()?))
    }
}

/// What a transport has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signal {
    /// A path that this side opened is ready.
    Opened {
        path: PathId,
    },
    /// A peer has opened a path to this side.
    Accepted {
        path: PathId,
    },
    /// A path is gone. Its operations have completed before this.
    Lost {
        path: PathId,
        loss: Loss,
        fenced: bool,
    },
    Completed {
        path: PathId,
        op: OpId,
        outcome: Result<Done, Failure>,
    },
    Message {
        path: PathId,
        payload: Vec<u8>,
    },
    Arrived {
        path: PathId,
        arrival: Arrival,
    },
}

impl Signal {
    pub fn path(&self) -> PathId {
        match self {
            Signal::Opened { path }
            | Signal::Accepted { path }
            | Signal::Lost { path, .. }
            | Signal::Completed { path, .. }
            | Signal::Message { path, .. }
            | Signal::Arrived { path, .. } => *path,
        }
    }
}
