//! Transfers: lists of spans, cut into parts and carried over lanes until every byte is where it belongs.
//!
//! The [`Engine`] decides which part goes over which lane and when, and what to do when a lane fails; it moves nothing itself.
//! Whoever turns it hands its posts to transports and their completions back, so a pinned thread and the simulator turn the same code.
//!
//! What it promises, given transports that keep their promises:
//! - a transfer ends once, by success or by a [`TransferError`], and by its deadline;
//! - when it has ended, none of its operations is open anywhere: its memory is the caller's again;
//! - a write that may still land unseen is neither repeated nor ended before its deadline, or before the far end has confirmed
//!   that the path is closed;
//! - a write of which the peer's application may have been notified is not repeated before it is known that it has not been;
//! - a peer that does not answer holds up nobody else.
//!
//! The turn of an engine, in full:
//! ```
//! use std::sync::Arc;
//! use weft_plan::{Place, Spans, Time};
//! use weft_protocol::transfer::{Engine, Lane, LaneId, Limits, PeerId, Request, TransferEvent};
//! use weft_protocol::{Access, Direction, Epoch, Leg, Loopback, Memory, Region, RegionKey, RemoteRegion, Signal, Transport, VecMemory};
//!
//! let network = Loopback::new();
//! let (mut here, mut there) = (network.endpoint("here", Epoch(1)), network.endpoint("there", Epoch(2)));
//! let region = |epoch, byte| Region {
//!     key: RegionKey { epoch, slot: 0, secret: 42 },
//!     memory: Arc::new(VecMemory::new(vec![byte; 4096])),
//!     place: Place::DRAM,
//!     access: Access::READ,
//! };
//! let (near, far) = (region(Epoch(1), 0), region(Epoch(2), 7));
//! here.register(&near).unwrap();
//! let grant = there.register(&far).unwrap();
//! let grants = Arc::from([("loopback".to_string(), grant)]);
//! let far = RemoteRegion { key: far.key, len: 4096, place: far.place, access: far.access, grants };
//! let leg = Leg::new(near.clone(), Spans::contiguous(0, 4096), far, Spans::contiguous(0, 4096)).unwrap();
//!
//! let path = here.open(&there.capabilities().address, Time::ZERO).unwrap();
//! let mut signals = Vec::new();
//! there.poll(Time::ZERO, &mut signals);
//! let Some(Signal::Accepted { path: accepted }) = signals.pop() else { panic!("nobody came") };
//! // What a session does once each has proved to the other that it knows the secret.
//! here.vouch(path);
//! there.vouch(accepted);
//!
//! let mut engine = Engine::new(Limits::default());
//! engine.add_lane(Lane::of(here.capabilities(), LaneId(0), PeerId(0)));
//! let legs = Arc::from([Arc::new(leg)]);
//! let request = Request::new(PeerId(0), Direction::Read, legs, Time::from_secs(1)).checksum(true);
//! let id = engine.submit(request, Time::ZERO).unwrap();
//! while let Some(post) = engine.next_post() {
//!     assert_eq!(here.post(path, &[post.op], Time::ZERO), Ok(1));
//! }
//! here.poll(Time::ZERO, &mut signals);
//! for signal in signals {
//!     if let Signal::Completed { op, outcome, .. } = signal {
//!         engine.on_completion(LaneId(0), op, outcome, Time::ZERO);
//!     }
//! }
//! assert!(matches!(engine.next_event(), Some(TransferEvent::Ended { id: ended, outcome: Ok(_) }) if ended == id));
//! let mut byte = [0];
//! near.memory.bytes().read(4095, &mut byte);
//! assert_eq!(byte, [7]);
//! ```

mod cut;
mod engine;
mod error;
pub(crate) mod held;
mod lane;
mod slab;
mod state;

use std::ops::Deref;
use std::sync::Arc;

use weft_plan::Time;

use crate::leg::{Direction, Leg};
use crate::transport::{Op, Ready};

pub use cut::{PartLimits, cut};
pub use engine::Engine;
pub use error::{LegRange, SubmitError, TransferError};
pub use lane::Lane;

/// A peer, numbered by whoever turns the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u32);

impl PeerId {
    /// No peer: both ends of the transfer are this agent's own places.
    pub const HERE: PeerId = PeerId(u32::MAX);
}

/// A path to a peer, numbered by whoever turns the engine, best in ascending order, and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(pub u32);

/// A transfer, numbered by the engine and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// Bounds on what the engine holds.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Transfers to all peers together.
    pub max_transfers: usize,
    /// Transfers to one peer: a peer that does not answer must leave room for the others.
    pub max_transfers_per_peer: usize,
    /// How often one part is tried.
    pub max_attempts: u8,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_transfers: 1 << 18,
            max_transfers_per_peer: 1 << 16,
            max_attempts: 5,
        }
    }
}

/// The legs of a transfer, shared. Most transfers have one, which needs no list.
#[derive(Clone, Debug)]
pub enum Legs {
    One(Arc<Leg>),
    Several(Arc<[Arc<Leg>]>),
}

impl Deref for Legs {
    type Target = [Arc<Leg>];
    fn deref(&self) -> &[Arc<Leg>] {
        match self {
            Legs::One(leg) => std::slice::from_ref(leg),
            Legs::Several(legs) => legs,
        }
    }
}

/// What to transfer. The legs are shared, so that a prepared transfer is submitted again and again without copying its spans.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    pub peer: PeerId,
    pub direction: Direction,
    pub legs: Legs,
    pub deadline: Time,
    /// Compare the checksums of both ends, part by part.
    pub checksum: bool,
    /// Let the far end count the parts of a write under this tag.
    pub tag: Option<u64>,
    /// Begin only when this has come about. The deadline counts all the same.
    pub after: Option<Arc<dyn Ready>>,
    /// Have what was written made to last before the transfer counts as done: see [`Commit`](crate::Commit). Needs a tag.
    pub commit: bool,
    /// Tell the far application of a write, under this number, once all of it is in place. Such a write is never carried twice: who has been
    /// told uses the memory, so a part that was lost fails it. Needs a tag. Not with a checksum, which is compared too late for that.
    pub arrives: Option<u32>,
}

impl Request {
    /// Neither summed nor counted.
    pub fn new(peer: PeerId, direction: Direction, legs: Arc<[Arc<Leg>]>, deadline: Time) -> Request {
        Request::of(peer, direction, Legs::Several(legs), deadline)
    }

    /// The same of legs that are kept already as a request keeps them.
    pub fn of(peer: PeerId, direction: Direction, legs: Legs, deadline: Time) -> Request {
        Request {
            peer,
            direction,
            legs,
            deadline,
            checksum: false,
            tag: None,
            after: None,
            commit: false,
            arrives: None,
        }
    }

    pub fn checksum(self, checksum: bool) -> Request {
        Request { checksum, ..self }
    }

    pub fn tag(self, tag: Option<u64>) -> Request {
        Request { tag, ..self }
    }

    pub fn after(self, after: Option<Arc<dyn Ready>>) -> Request {
        Request { after, ..self }
    }

    pub fn commit(self, commit: bool) -> Request {
        Request { commit, ..self }
    }

    pub fn arrives(self, arrives: Option<u32>) -> Request {
        Request { arrives, ..self }
    }
}

/// An operation for a lane.
#[derive(Clone, Debug)]
pub struct Post {
    pub lane: LaneId,
    pub op: Op,
}

/// What the engine has to say.
#[derive(Clone, Debug)]
pub enum TransferEvent {
    /// A tagged write has all its parts under way, `parts` of them: its notification may be sent, to wait for them at the far end.
    ///
    /// With a checksum it comes only when every part has been found whole, since a part that arrives spoiled counts as arrived too;
    /// and where a part was lost before, only when nothing is under way any more.
    Cut { id: TransferId, tag: u64, parts: u32 },
    /// A transfer is over, and nothing of it is open anywhere.
    Ended {
        id: TransferId,
        outcome: Result<Summary, TransferError>,
    },
    /// A part of a write was lost after its [`TransferEvent::Cut`], and must be carried again: take the notification back, before
    /// any fence that is asked for later. It may be too late for that, so say [`Engine::on_all_arrived`] whenever a notification
    /// turns out to have been delivered. If the transfer succeeds otherwise, the notification may be sent then, to wait for nothing.
    Recall { id: TransferId, tag: u64 },
    /// Writes hang on a lost lane: ask the peer, over another path, to close its end, then call [`Engine::on_lane_fenced`].
    FenceWanted { peer: PeerId, lane: LaneId },
}

/// A transfer that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    pub bytes: u64,
    pub parts: u32,
    pub retries: u32,
    pub started: Time,
    pub ended: Time,
    pub carried: Carried,
}

impl Summary {
    /// From the submission to the end.
    pub fn duration(&self) -> Time {
        self.ended.saturating_sub(self.started)
    }

    /// The transport that carried most of it.
    pub fn transport(&self) -> &'static str {
        self.carried
            .iter()
            .max_by_key(|(_, bytes)| *bytes)
            .map_or("none", |(name, _)| name)
    }
}

/// How many bytes each transport carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// In place, because a list on the heap would be the only allocation of a small transfer.
    entries: [Option<(&'static str, u64)>; 4],
}

impl Carried {
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.entries.iter().flatten().copied()
    }

    /// A fifth transport, which no machine has, would be counted with the fourth.
    pub(crate) fn add(&mut self, transport: &'static str, bytes: u64) {
        let last = self.entries.len() - 1;
        for (i, entry) in self.entries.iter_mut().enumerate() {
            match entry {
                Some((name, sum)) if i == last || std::ptr::eq(*name, transport) || *name == transport => {
                    *sum += bytes;
                    return;
                }
                Some(_) => {}
                None => {
                    *entry = Some((transport, bytes));
                    return;
                }
            }
        }
    }
}
