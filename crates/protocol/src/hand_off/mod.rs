//! Hand-off: blocks of a paged cache, from the worker that computed them to one that goes on with them.
//!
//! The **holder** keeps the blocks of a prompt under a lease and says where they are (an [`Origin`]). A **reader** fetches them one-sidedly; or, where
//! that was arranged beforehand, it makes room first, and the holder writes every layer there while it computes the next. [`HandOffs`] is both
//! sides of one worker, without I/O: calls, messages, ends of moves and `now` go in; [`Act`]s, [`Event`]s and the next timeout come out. [`Station`]
//! puts it on an agent's [`Core`](crate::agent::Core), the same for the real and the simulated world.
//!
//! What it promises:
//! - **The word after the last byte.** A reader cannot be stopped from afar, but it can find out that it was too late. Every lease has a word in a table
//!   that all peers may read; before blocks are given to anybody else, the word moves past the lease's stamp. A reader looks at the word after its
//!   last byte: if it has moved, the bytes are thrown away. So an expired lease or a slow reader costs a recomputation, and never a wrong byte. In a new life
//!   of the holder every word is past the stamps of the life before.
//! - **Blocks that are pushed are free after a fence**: no [`Event::Free`] before the last write from them has ended.
//! - **Nobody else writes to a reader's blocks.** What is pushed lands in memory of its own, published for that hand-off alone, and is copied to the
//!   blocks by whoever owns them ([`Event::Settle`]).
//! - **Every hand-off that was wanted ends once**, handed off or with a [`Reason`], by its deadline.
//! - **Nothing is held after its lease**: a word that was not heard, a reader that died and a session that broke cost that much time and no more. That a
//!   reader is done is said until the holder has heard it, over however many sessions that takes.

mod cache;
pub(crate) mod harness;
mod holder;
mod machine;
mod reader;
mod station;
pub(crate) mod talk;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use thiserror::Error;
use weft_plan::{Spans, Time};

use crate::agent::ConnectError;
use crate::error::{Failure, Refusal};
use crate::leg::Direction;
use crate::transfer::PeerId;

pub use cache::{Cache, CacheError, Difference, LAYERS_MAX, Layer, Mismatch, Overlap, Sequence, Share, overlaps};
pub use machine::HandOffs;
pub use station::{PARCELS, Room, Station, StationError};
pub use wire::{
    ADDRESSES_MAX, AskedShare, BLOCKS_MAX, LASTS_MAX, LASTS_MIN, Message, NAME_BYTES_MAX, Reserve, TOKENS_MAX,
    decode_addresses, encode_addresses,
};

/// So many prompts can be held for others at a time.
pub const SLOTS: u32 = 1 << 16;

/// The right to read a prompt's blocks: as long as the word in the slot is not past the stamp, the bytes are the prompt's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    pub slot: u32,
    pub stamp: u64,
    /// How long blocks are held for a reader that says nothing.
    pub lasts: Time,
}

impl Lease {
    /// Whether it can be kept: in a slot that there is, for a time that can be renewed, and with a stamp that a word can move past.
    pub(crate) fn is_sensible(&self) -> bool {
        self.slot < SLOTS && (LASTS_MIN..=LASTS_MAX).contains(&self.lasts) && self.stamp < u64::MAX
    }
}

/// Where the blocks of a prompt are to be had. Whoever hands it on seals it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The name of this hand-off alone.
    pub hand_off: String,
    /// One a worker of the holding side.
    pub addresses: Vec<String>,
    pub blocks: Vec<u64>,
    pub tokens: u64,
    pub lease: Lease,
}

/// Leases for the prompts of one engine. Whoever decides for all workers of an engine has one of its own, and tells every worker the same lease.
#[derive(Debug)]
pub struct Slots {
    free: Vec<u32>,
    out: BTreeSet<u32>,
    stamp: u64,
}

impl Slots {
    /// Stamps begin above `stamp`. They must only grow, also over restarts, so that no word of an earlier prompt looks like that of a later one:
    /// the time of the start will do.
    pub fn new(stamp: u64) -> Slots {
        Slots {
            free: (0..SLOTS).rev().collect(),
            out: BTreeSet::new(),
            stamp: stamp & !1,
        }
    }

    /// A lease, unless all slots are in use. Its stamp is no less than `at_least`: the time now, where the workers that hold the blocks may have started
    /// later than whoever gives the leases out.
    pub fn take(&mut self, lasts: Time, at_least: u64) -> Option<Lease> {
        let slot = self.free.pop()?;
        self.out.insert(slot);
        // Past the stamp is the next odd number, which differs from the stamp in one byte: a word is never seen half moved.
        self.stamp = (self.stamp + 2).max(at_least & !1);
        Some(Lease {
            slot,
            stamp: self.stamp,
            lasts: lasts.min(LASTS_MAX),
        })
    }

    pub fn give_back(&mut self, slot: u32) {
        if self.out.remove(&slot) {
            self.free.push(slot);
        }
    }
}

/// So many names are remembered, that none is used twice.
const NAMES_MAX: usize = 1 << 16;

/// Names of hand-offs that were used, for as long as somebody may come with them again.
#[derive(Debug, Default)]
pub struct Names {
    until: BTreeMap<String, Time>,
    order: VecDeque<String>,
}

impl Names {
    /// Uses a name, which nobody else can for so long.
    pub fn take(&mut self, name: &str, lasts: Time, now: Time) -> Result<(), CallError> {
        let old = |until: Option<&Time>| until.is_none_or(|until| *until <= now);
        while let Some(first) = self.order.front()
            && (self.order.len() >= NAMES_MAX || old(self.until.get(first)))
            && let Some(first) = self.order.pop_front()
        {
            self.until.remove(&first);
        }
        if self.until.contains_key(name) {
            return Err(CallError::Used);
        }
        self.until.insert(name.to_owned(), now.saturating_add(lasts));
        self.order.push_back(name.to_owned());
        Ok(())
    }
}

/// How one worker hands off.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How long a fetch may take; of a push, how long nothing may come.
    pub deadline: Time,
    /// How long a reader that was promised a push takes between two words that it still waits.
    pub lease: Time,
    /// How many bytes of pushed prompts may be on their way here at a time. A prompt that is larger has all of it alone.
    pub landing_bytes: u64,
    /// Whether bytes are compared at both ends.
    pub checksum: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            deadline: Time::from_secs(30),
            lease: Time::from_secs(60),
            landing_bytes: 4 << 30,
            checksum: true,
        }
    }
}

/// A prompt that is computed here and pushed elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// All blocks that it has so far, in the order of its tokens.
    pub blocks: Vec<u64>,
    pub tokens: u64,
    /// What its cache depends on: equal at both ends, or nothing is pushed.
    pub digest: [u8; 32],
}

/// Where a reader wants a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// All blocks of the prompt here, in the order of its tokens.
    pub blocks: Vec<u64>,
    /// The tokens that are missing here.
    pub tokens: Range<u64>,
    /// How many the prompt has, and what its cache depends on; compared where it is pushed.
    pub prompt_tokens: u64,
    pub digest: [u8; 32],
}

/// A hand-off that went well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedOff {
    pub bytes: u64,
    pub took: Time,
    /// The transports that carried it.
    pub ways: Vec<String>,
}

/// What happened, for the application.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A prompt that was wanted here has come, or has not. Nobody touches its blocks for this hand-off any more. Once a hand-off.
    Ended {
        hand_off: String,
        outcome: Result<HandedOff, Reason>,
    },
    /// These layers of a pushed prompt have landed: copy them to their blocks, then say [`HandOffs::settled`].
    Settle {
        hand_off: String,
        landing: u64,
        layers: Vec<u32>,
        copies: Vec<Overlap>,
    },
    /// Nobody reads a held prompt's blocks any more, or whoever still does will find out. Once a hand-off.
    Free { hand_off: String, why: Over },
    /// No write from a preempted prompt's blocks is under way any more.
    Fenced { hand_off: String },
}

/// Why a prompt was not handed off, as its reader knows it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Reason {
    #[error("no session with {address}: {error}")]
    Unreachable { address: String, error: ConnectError },
    #[error("the session with {peer} was lost")]
    Lost { peer: String },
    #[error("{peer} has begun anew, and knows nothing of what was arranged before")]
    BegunAnew { peer: String },
    #[error("{peer} does not fit: {mismatch}")]
    Mismatch { peer: String, mismatch: Mismatch },
    #[error("moving bytes of {peer} failed: {failure}")]
    Move { peer: String, failure: MoveError },
    #[error("the blocks were given up before all of them were read")]
    GivenUp,
    #[error("{peer} gave it up: {why}")]
    Refused { peer: String, why: Over },
    #[error("nothing has come for as long as it may take")]
    Late,
    #[error("there was no room to land in")]
    NoRoom,
    #[error("the memory to land in could not be had")]
    NoMemory,
    #[error("what has landed could not be copied to its blocks: {0}")]
    Unsettled(Refusal),
    #[error("too many hand-offs are under way here")]
    TooMany,
    #[error("nobody here wants it any more")]
    Aborted,
}

impl Reason {
    /// The same in a word, which never changes: for those who count.
    pub fn cause(&self) -> &'static str {
        match self {
            Reason::Unreachable { .. } => "Unreachable",
            Reason::Lost { .. } => "Lost",
            Reason::BegunAnew { .. } => "BegunAnew",
            Reason::Mismatch { .. } => "Mismatch",
            Reason::Move { .. } => "Move",
            Reason::GivenUp => "GivenUp",
            Reason::Refused { .. } => "Refused",
            Reason::Late => "Late",
            Reason::NoRoom => "NoRoom",
            Reason::NoMemory => "NoMemory",
            Reason::Unsettled(_) => "Unsettled",
            Reason::TooMany => "TooMany",
            Reason::Aborted => "Aborted",
        }
    }
}

/// Why a hand-off is over at its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum Over {
    #[error("everybody has it")]
    Served,
    #[error("nobody came for it in time")]
    Expired,
    #[error("the request was given up there")]
    Stopped,
    #[error("the prompt was never computed there")]
    NotComputed,
    #[error("the prompt there is another one")]
    OtherPrompt,
    #[error("it has been asked for before")]
    AskedBefore,
    #[error("too many hand-offs wait for their prompts there")]
    TooMany,
    #[error("the two caches do not fit")]
    Mismatch,
    #[error("a write failed")]
    WriteFailed,
    #[error("a reason that this version does not know")]
    Unknown,
}

impl Over {
    const ALL: [Over; 10] = [
        Over::Served,
        Over::Expired,
        Over::Stopped,
        Over::NotComputed,
        Over::OtherPrompt,
        Over::AskedBefore,
        Over::TooMany,
        Over::Mismatch,
        Over::WriteFailed,
        Over::Unknown,
    ];

    /// The same in a word, which never changes: for those who count.
    pub fn cause(self) -> &'static str {
        match self {
            Over::Served => "Served",
            Over::Expired => "Expired",
            Over::Stopped => "Stopped",
            Over::NotComputed => "NotComputed",
            Over::OtherPrompt => "OtherPrompt",
            Over::AskedBefore => "AskedBefore",
            Over::TooMany => "TooMany",
            Over::Mismatch => "Mismatch",
            Over::WriteFailed => "WriteFailed",
            Over::Unknown => "Unknown",
        }
    }
    pub const fn code(self) -> u8 {
        self as u8
    }
    pub fn from_code(code: u8) -> Over {
        Over::ALL.get(usize::from(code)).copied().unwrap_or(Over::Unknown)
    }
}

/// Why bytes were not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MoveError {
    #[error(transparent)]
    Failed(#[from] Failure),
    #[error("the peer has not published the memory")]
    NoRegion,
    #[error("the bytes lie outside the peer's memory")]
    OutOfBounds,
    #[error("it was given up before it began")]
    NotBegun,
    #[error("the session is over")]
    NotConnected,
    #[error("there is no memory to go through on the way")]
    NoStage,
    #[error("no transport goes between the two memories")]
    NoRoute,
    #[error("as many transfers as the limits allow are under way")]
    TooManyTransfers,
    #[error("the agent did not take it")]
    NotAccepted,
}

/// Why a call was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CallError {
    #[error("this hand-off has been used before")]
    Used,
    #[error("there is no such hand-off")]
    Unknown,
    #[error("this was said of the hand-off before")]
    Repeated,
    #[error("as many hand-offs as are allowed are under way")]
    TooMany,
    #[error("the name, the tokens, the blocks or the lease make no sense")]
    Invalid,
}

/// A move of bytes, numbered by the machine and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MoveId(pub u64);

/// What the machine wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Answer with [`HandOffs::on_connecting`].
    Connect {
        address: String,
        deadline: Time,
    },
    Say {
        peer: PeerId,
        message: Message,
    },
    /// Answer with [`HandOffs::on_moved`], once, when nothing of it is under way any more.
    Move(Move),
    Cancel {
        id: MoveId,
    },
    /// Make memory for a landing and publish it; answer with [`HandOffs::on_made`].
    Land {
        landing: u64,
        bytes: u64,
    },
    /// Void its key and give it back when nobody is inside; then [`HandOffs::on_released`].
    Release {
        landing: u64,
    },
    /// Set a word of the table of leases.
    Word {
        slot: u32,
        value: u64,
    },
}

/// One transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    pub id: MoveId,
    pub peer: PeerId,
    pub direction: Direction,
    pub legs: Vec<MoveLeg>,
    pub deadline: Time,
    pub checksum: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveLeg {
    pub near: Near,
    pub near_spans: Spans,
    pub far: Far,
    pub far_spans: Spans,
}

/// Memory here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Near {
    Cache(u32),
    /// Room for one word.
    Word(u32),
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Far {
    Cache(u32),
    Leases,
    Landing(u64),
}

/// How a move ended well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    pub bytes: u64,
    pub way: &'static str,
    /// What was read, where it was a word.
    pub word: Option<u64>,
}
