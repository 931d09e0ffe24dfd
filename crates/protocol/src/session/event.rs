//! What a session says to its owner.

use std::fmt;

use thiserror::Error;
use weft_plan::Time;

use super::config::{ConfigError, MAX_HELD, MAX_LEASES, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES, MAX_REGIONS, Versions};
use crate::error::Refusal;
use crate::region::{Epoch, RegionKey, RemoteRegion};
use crate::transport::PeerAddress;
use crate::wire::DecodeError;

/// A path as the owner of the session numbers it, over all transports. Never reused within a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Via(pub u32);

/// A session as both ends name it. Knowing it gives no right to anything.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u128);

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({:032x})", self.0)
    }
}

/// A notification, numbered by its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NotificationId(pub u64);

/// A lease, numbered by the end that asked for it; the two ends' numbers never meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// Who the peer has proved to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub name: String,
    pub epoch: Epoch,
    pub host: String,
    pub addresses: Vec<PeerAddress>,
    /// The protocol version that both ends use.
    pub version: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEvent {
    /// The peer has proved that it knows the secret. Comes first, and once.
    Established {
        session: SessionId,
        identity: Identity,
    },
    /// A further path is in use, opened by either end.
    PathJoined {
        via: Via,
    },
    /// The last path is gone; without another one the session is lost when its patience ends.
    PathWanted,
    /// The peer has published a region, or changed what it had published under this name.
    Published {
        name: String,
        region: RemoteRegion,
    },
    Withdrawn {
        name: String,
    },
    /// A notification, after the data it announces.
    Notified {
        payload: Vec<u8>,
    },
    /// The peer's session has handed this notification on.
    NotificationDelivered {
        id: NotificationId,
    },
    /// The peer has given up on a path. Close this end of it, where there is one, then call `fence_done`.
    FenceAsked {
        label: u64,
        via: Option<Via>,
    },
    /// The peer's end of a lost path is closed: nothing sent on it takes effect any more.
    Fenced {
        via: Via,
    },
    /// The peer asks to use a region for a while, or longer (`renewal`). Call `answer_lease`.
    LeaseAsked {
        id: LeaseId,
        region: RegionKey,
        duration: Time,
        renewal: bool,
    },
    /// The region may be used until this instant of this end's clock.
    LeaseGranted {
        id: LeaseId,
        until: Time,
    },
    /// Not granted; after a renewal that was refused, the lease runs to its old end.
    LeaseRefused {
        id: LeaseId,
        refusal: Refusal,
    },
    /// The peer has given a lease back.
    LeaseReturned {
        id: LeaseId,
    },
    /// A lease has run out, granted to either end.
    LeaseExpired {
        id: LeaseId,
    },
    /// The session is over. Comes once; only `LeaseExpired` may follow.
    Lost {
        cause: SessionLoss,
    },
}

/// Why a session is over, grouped by what the caller can do next.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SessionLoss {
    /// Fix the call.
    #[error("unfit configuration: {0}")]
    Unfit(#[from] ConfigError),
    /// Upgrade one of the two.
    #[error("the peer speaks protocol version {theirs}, this agent {ours}")]
    OtherVersion { ours: Versions, theirs: Versions },
    /// Give both the same secret.
    #[error("the two agents do not share a secret")]
    WrongSecret,
    /// Connect to another address.
    #[error("an agent cannot connect to itself")]
    OneSelf,
    /// Rename one of the two.
    #[error("two agents have the name {name:?}")]
    NameTaken { name: String },
    /// Look the peer up again.
    #[error("expected agent {expected:?}, found {found:?}")]
    OtherName { expected: String, found: String },
    #[error("expected life {expected:x} of the peer, found {found:x}", expected = .expected.0, found = .found.0)]
    StaleEpoch { expected: Epoch, found: Epoch },
    #[error("the peer expected another agent, or another life of this one")]
    Unwanted,
    /// Connect again.
    #[error("the peer has been silent for too long")]
    Silent,
    #[error("the path was lost before the peer was known")]
    PathLost,
    #[error("no path to the peer is left")]
    NoPath,
    /// Wait for another life of the peer.
    #[error("nobody is there any more where the peer was")]
    Gone,
    #[error("closed by this side")]
    Closed,
    #[error("closed by the peer: {reason}")]
    ClosedByPeer { reason: CloseReason },
    #[error("the peer broke the protocol: {0}")]
    Misbehaved(#[from] Misbehaviour),
}

impl SessionLoss {
    /// Whether the peer is known to be dead, or to have left for good, and is not merely out of reach.
    pub fn is_death(&self) -> bool {
        let left = SessionLoss::ClosedByPeer {
            reason: CloseReason::Leaving,
        };
        *self == SessionLoss::Gone || *self == left
    }
    /// Whether one of the two ends wanted it so, and nothing was wrong.
    pub fn is_orderly(&self) -> bool {
        let SessionLoss::ClosedByPeer { reason } = self else {
            return *self == SessionLoss::Closed;
        };
        matches!(reason, CloseReason::Done | CloseReason::Leaving)
    }
}

/// What an authenticated peer did that the protocol does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Misbehaviour {
    #[error("a message is malformed: {0}")]
    Malformed(#[from] DecodeError),
    #[error("a published region belongs to another life of the peer")]
    StaleRegion,
    #[error("more is outstanding than a peer may have")]
    Flood,
    #[error("it acknowledged what was never sent")]
    FalseAck,
}

/// Why an end closes a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// It has no more use for this session, and lives on.
    #[error("it is done")]
    Done,
    /// Its agent is being closed: this life of it is over.
    #[error("its agent was closed")]
    Leaving,
    #[error("another agent has the same name")]
    NameTaken,
    #[error("a newer session replaces this one")]
    Replaced,
    #[error("this end broke the protocol")]
    Misbehaved,
}

/// Why a call was not accepted. Nothing has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// Back-pressure: try again when the peer has caught up.
    #[error("the queue to the peer is full")]
    QueueFull,
    #[error("{MAX_HELD} notifications already wait for their data")]
    TooManyHeld,
    #[error("{MAX_LEASES} leases are already out")]
    TooManyLeases,
    #[error("{MAX_REGIONS} regions are already published")]
    TooManyRegions,
    /// Fix the call.
    #[error("a payload of {len} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")]
    PayloadTooLong { len: usize },
    #[error("a region's name has 1 to {MAX_NAME_BYTES} bytes")]
    RegionName,
    #[error("a region's grants are too many or too large")]
    Grants,
    #[error("the region belongs to another life of this agent")]
    StaleRegion,
    #[error("nothing is known of this lease")]
    UnknownLease,
    #[error("nothing is known of this path")]
    UnknownPath,
    /// Connect again.
    #[error("the session is closing or over")]
    Ended,
}
