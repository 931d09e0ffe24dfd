//! Messages that meet: a send at one end, a receive of the same tag at the other.
//!
//! Libraries of collectives move bytes by channels of one direction: one end posts sends, the other receives, each with a tag, several receives
//! as one group. **The nth send of a tag meets the nth receive of that tag.** Both ends count, so neither has to ask whom a message is for, and a message may
//! go before its receive is known.
//!
//! - **Eager**: a short message goes out at once, as a parcel, and waits at the receiver where it is early. How many may be early is bounded.
//! - **Rendezvous**: the receiver tells where each receive wants its bytes; the sender writes a long message there, one-sidedly, and the receiver hears how long it
//!   is and that it is in place: by the arrival of the write itself, or by a word after it (settled by [`Tells`]).
//! - **A write that was lost** under its arrival is not written again before the receiver has said that it has not got it, because who has it may use its
//!   memory for something else by then. It then goes under another number, and by the engine's own means to change paths.
//!
//! [`Outgoing`] and [`Incoming`] are the two ends of one channel, without I/O. [`Channels`] carries out what they want over the [`Core`](crate::agent::Core) of
//! an agent, and opens channels: whoever connects shows the token of a listener, which is good once. The runtime's handles are `weft::matched`.

mod channels;
mod incoming;
mod outgoing;
#[cfg(test)]
mod tests;
pub(crate) mod wire;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use thiserror::Error;

use crate::agent::ConnectError;
use crate::error::Failure;
use crate::session::SessionLoss;

pub use channels::{ChannelId, Channels, Place, Settings};
pub use incoming::{Incoming, Landing, Meets};
pub use outgoing::{Outgoing, Wanted};
pub use wire::{Message, Receive};

/// The longest message that can go eagerly: it has to fit into a parcel.
pub const EAGER_MAX: u64 = 56 << 10;
/// Eager messages of one channel whose receives the sender has not been told of.
pub const EARLY_MAX: usize = 64;
pub const EARLY_BYTES_MAX: u64 = 1 << 20;
/// Receives of one channel that wait for their sends.
pub const RECEIVES_MAX: usize = 4096;
/// Receives that are posted as one.
pub const GROUP_MAX: usize = 256;
/// Tags of one channel, ever: both ends count by tag.
pub const TAGS_MAX: usize = 1 << 16;

/// How a receiver hears that a long message is in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tells {
    /// By the write's own arrival: no round trip, over a network.
    ByArrival,
    /// By a word after the write has ended: the quickest where the initiator copies by itself, and the way with a checksum.
    Afterwards,
}

/// Why a channel carries nothing more.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ChannelError {
    #[error("the peer is lost: {0}")]
    PeerLost(SessionLoss),
    #[error("no session with the peer: {0}")]
    NoSession(ConnectError),
    #[error("nobody listens with this token any more, or another has come with it before")]
    Refused,
    #[error("the peer has closed the channel")]
    Closed,
    #[error("this channel was closed here")]
    ClosedHere,
    #[error("a message of {sent} bytes met a receive of {room}")]
    TooLong { sent: u64, room: u64 },
    #[error("a message was not carried: {0}")]
    NotCarried(Failure),
    #[error("the agent did not take a message: {0}")]
    NotTaken(String),
    #[error("the peer does not keep to the protocol: {0}")]
    Misbehaved(&'static str),
    #[error("more than {max} {what} on one channel")]
    TooMany { what: &'static str, max: usize },
    #[error("bytes {offset} to {end} lie outside of a memory of {len}")]
    OutOfBounds { offset: u64, end: u64, len: u64 },
    #[error("there is no such channel here")]
    Unknown,
}

impl ChannelError {
    /// Whether this side asked for something that cannot be, and the peer is not to blame.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            ChannelError::ClosedHere
                | ChannelError::TooLong { .. }
                | ChannelError::TooMany { .. }
                | ChannelError::OutOfBounds { .. }
                | ChannelError::Unknown
        )
    }
}

/// What has come of a send, or of a group of receives: how long each message was.
#[derive(Debug, Default)]
pub struct Ticket(OnceLock<Result<Box<[u64]>, ChannelError>>);

impl Ticket {
    /// What has come of it, once it is over.
    pub fn outcome(&self) -> Option<Result<&[u64], &ChannelError>> {
        self.0.get().map(|outcome| outcome.as_deref())
    }

    fn end(&self, outcome: Result<Box<[u64]>, ChannelError>) {
        // It ends once.
        let _ = self.0.set(outcome);
    }
}

/// How many of each tag there were.
#[derive(Debug, Default)]
struct Tags(BTreeMap<i32, u64>);

impl Tags {
    /// The number of the next one of a tag.
    fn next(&mut self, tag: i32) -> Result<u64, ChannelError> {
        if self.0.len() >= TAGS_MAX && !self.0.contains_key(&tag) {
            return Err(ChannelError::TooMany {
                what: "tags",
                max: TAGS_MAX,
            });
        }
        let count = self.0.entry(tag).or_default();
        *count += 1;
        Ok(*count - 1)
    }

    fn count(&self, tag: i32) -> u64 {
        self.0.get(&tag).copied().unwrap_or_default()
    }
}
