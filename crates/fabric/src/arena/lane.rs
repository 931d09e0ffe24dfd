//! The two ends of a lane: what was offered and what was taken.

use weft_protocol::group::{MessageHead, OfferId};

use super::stores::Stores;

/// The sending end.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    /// The number of the next slot.
    pub next: u64,
    /// Slots that the receiver had consumed when we last looked.
    pub consumed: u64,
    /// A message that is on its way through the slots, piece by piece.
    pub pushing: Option<Pushing>,
    /// One more than the slot of the last message of a call that was left in our memory.
    pub left_there: u64,
    pub stores: Stores,
}

/// A message of which some has not found room yet.
#[derive(Debug)]
pub(super) struct Pushing {
    /// The number of the memory, where it is that of a message beside the call.
    pub lent: Option<u32>,
    pub from: *const u8,
    pub head: MessageHead,
    pub pushed: u64,
    /// The slot that it began with.
    pub first: u64,
}

// SAFETY: the pointer is into a buffer that is held until its call or message ends, and is read only by whoever has the arena.
unsafe impl Send for Pushing {}

/// The receiving end.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// The number of the next slot.
    pub next: u64,
    /// How much of the present message has been taken.
    pub taken: u64,
    /// The message so far, where its pieces do not end with whole elements.
    pub gathered: Vec<u8>,
}

/// How an offer is recognised again: by its first slot, and by whether it is left in our memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ticket {
    LeftThere(u64),
    Pushed(u64),
}

impl Ticket {
    pub(super) fn id(self) -> OfferId {
        match self {
            Ticket::LeftThere(slot) => OfferId(slot << 1 | 1),
            Ticket::Pushed(slot) => OfferId(slot << 1),
        }
    }
    pub(super) fn of(id: OfferId) -> Ticket {
        match id.0 & 1 {
            1 => Ticket::LeftThere(id.0 >> 1),
            _ => Ticket::Pushed(id.0 >> 1),
        }
    }
}
