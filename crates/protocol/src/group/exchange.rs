//! The waist of a group: ordered messages between its ranks, whose bytes are consumed where they lie.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;
use weft_plan::{Rank, Time};

use super::combine::Combiner;
use super::record::{Abort, CallRecord, Status, Waiting};
use crate::error::{Loss, Refusal};
use crate::memory::Memory;
use crate::region::RegionKey;
use crate::transport::Progress;

/// Carries the messages of one rank of a group. Never blocks, never calls back.
///
/// Calls of a group are serial: between [`begin`](Exchange::begin) and [`end`](Exchange::end) there is one, and its pieces are pieces of
/// its buffers. Beside it go messages between two ranks, on a channel and in buffers of their own ([`lend`](Exchange::lend)). Whether a message is copied on its way (eager), or waits in its sender's memory until the receiver fetches it, is the
/// exchange's own business, and so is the size from which on it does the latter. What it promises:
///
/// - the messages of a lane are taken in the order in which they were offered, and messages of different lanes do not wait for each
///   other;
/// - a message is taken once, whole, and only if its head is the one that the receiver expects: any other is reported as
///   [`Trouble::WrongMessage`], and nothing of it is used. One of no bytes is a message like any other;
/// - a rank may be a call ahead of another: what it sends for that waits behind what is left of the call before;
/// - what is combined is combined in whole elements, of built-in types as well as of a caller's own;
/// - an offer that found a lane [full](Offered::Full) has changed nothing, and there is room again once something has been taken;
/// - nothing reads an offered piece after its offer has settled, and nothing writes a buffer of the call except a `take` while it
///   is being called;
/// - after [`end`](Exchange::end) has answered [`Progress::Idle`] nothing touches the buffers of the call at all, and after
///   [`take_back`](Exchange::take_back) has, nothing that one buffer. What was offered and given up then is not taken for the message that it was.
///
/// [`conformance`](super::conformance) holds every exchange to this.
pub trait Exchange: Board + fmt::Debug + Send {
    /// How many channels there are for calls between any two ranks. The next one is for [messages](super::Messages) between the two, and
    /// lanes of others do not exist.
    fn channels(&self) -> u16;

    /// Takes a call's buffers out of the list and publishes what is being called. Pieces name a buffer by its place in the list. An
    /// exchange that cannot keeps none of them.
    fn begin(&mut self, call: &CallRecord, buffers: &mut Vec<View>) -> Result<(), Trouble>;

    /// A buffer of the call.
    fn buffer(&self, place: u32) -> &View;

    /// Makes `from` the next message to a peer. Unless it answers [`Offered::Settled`], the bytes must not change until
    /// [`settled`](Exchange::settled) says so.
    fn offer(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble>;

    /// Whether the receiver needs the bytes of an offer no longer. The offers of a lane settle in order, so that it is enough to ask
    /// for the oldest.
    fn settled(&mut self, lane: Lane, offer: OfferId) -> bool;

    /// Consumes the next message from a peer, if it is there. After [`Taken::Part`] it is called again with the same arguments, and
    /// until [`Taken::All`] the target of the sink holds nothing of use.
    fn take(&mut self, lane: Lane, head: &MessageHead, sink: &Sink<'_>) -> Result<Taken, Trouble>;

    /// Looks after the outside world: what takes more than the calls above to move on, and what others have lost or given up.
    /// Whoever waits calls it now and then, not before every look at a lane.
    fn poll(&mut self, now: Time) -> Result<Progress, Trouble>;

    /// Lets go of the call's buffers. After a call that went well this is immediate; after a failure it may take several calls until
    /// nothing touches the buffers any more.
    fn end(&mut self) -> Progress;

    /// Makes the memory of one message to or from a peer known, beside the buffers of the call under way. Pieces of it name it by
    /// the answer.
    fn lend(&mut self, peer: Rank, view: &View) -> Result<u32, Trouble>;

    /// Lets go of the memory of one message. After a message that has settled or was taken this is nearly always immediate; one that has not
    /// is given up, and with it the group.
    fn take_back(&mut self, peer: Rank, buffer: u32) -> Progress;
}

/// What the ranks of a group let each other know beside the messages, so that a failure can be explained.
pub trait Board {
    /// Publishes what this rank is waiting for. Called when a wait has lasted for some time, not for every wait.
    fn publish(&mut self, waiting: Waiting);
    /// What a rank has last published, as far as it is known here by now. Where it is not to be seen the rank is asked meanwhile: whoever keeps calling
    /// gets to know it.
    fn status(&mut self, of: Rank) -> Option<Status>;
    /// Forgets what ranks have answered before, because it may be old. What is to be seen without asking never is.
    fn forget_answers(&mut self) {}
    /// A number that changes whenever a rank publishes or answers something: one that is in a call and alive has a pulse.
    fn pulse(&mut self, of: Rank) -> u64;
    /// Tells all ranks that the call has failed. The first to say so is the one that is believed: [`Exchange::poll`] reports that one
    /// everywhere, here too.
    fn abort(&mut self, abort: &Abort);
}

/// A connection from or to a peer. Each direction is a lane of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lane {
    pub peer: Rank,
    pub channel: u16,
}

/// What both ends of a message must agree on before a byte of it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MessageHead {
    /// Which call of the group, counted from zero on every rank.
    pub call: u64,
    /// A digest of what was called; see [`CallRecord::signature`].
    pub signature: u64,
    /// Which message of its lane in this call, counted from zero.
    pub index: u32,
    pub len: u64,
}

/// Bytes of one of the call's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Place in the list that the call began with.
    pub buffer: u32,
    /// From the start of that buffer.
    pub offset: u64,
    pub len: u64,
}

impl Piece {
    /// Whether it lies in the memory of a message, and not in a buffer of the call.
    pub fn is_lent(&self) -> bool {
        self.buffer & Lent::FIRST != 0
    }
}

/// What is lent beside the buffers of a call, by number.
#[derive(Debug)]
pub struct Lent<T> {
    places: Vec<Option<T>>,
}

impl<T> Default for Lent<T> {
    fn default() -> Lent<T> {
        Lent { places: Vec::new() }
    }
}

impl Lent<()> {
    /// The numbers of what is lent have this bit, and those of a call's buffers have it not.
    pub const FIRST: u32 = 1 << 31;
}

impl<T> Lent<T> {
    /// Keeps something until it is [taken back](Lent::remove), and says under which number.
    pub fn insert(&mut self, held: T) -> u32 {
        let free = self.places.iter().position(Option::is_none);
        let place = free.unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.places[place] = Some(held);
        Lent::FIRST | place as u32
    }

    pub fn remove(&mut self, buffer: u32) -> Option<T> {
        self.places.get_mut(place(buffer))?.take()
    }

    pub fn of(&self, buffer: u32) -> Option<&T> {
        self.places.get(place(buffer))?.as_ref()
    }

    pub fn of_mut(&mut self, buffer: u32) -> Option<&mut T> {
        self.places.get_mut(place(buffer))?.as_mut()
    }
}

fn place(buffer: u32) -> usize {
    (buffer & !Lent::FIRST) as usize
}

/// Memory that a call uses: a part of something that is registered, or all of it.
#[derive(Clone, Debug)]
pub struct View {
    pub memory: Arc<dyn Memory>,
    pub offset: u64,
    pub len: u64,
    /// Under which key ranks on this host may map the memory, where they may.
    pub key: Option<RegionKey>,
}

impl View {
    pub fn whole(memory: Arc<dyn Memory>) -> View {
        let len = memory.len();
        View {
            memory,
            offset: 0,
            len,
            key: None,
        }
    }
}

/// Where the bytes of a message go.
#[derive(Clone, Copy, Debug)]
pub enum Sink<'a> {
    Copy(Piece),
    /// `into` becomes `with` combined with what comes. The two are the same piece or have nothing in common.
    Combine {
        with: Piece,
        into: Piece,
        how: &'a Combiner,
    },
}

impl Sink<'_> {
    /// The piece that is written.
    pub fn target(&self) -> Piece {
        match *self {
            Sink::Copy(piece) => piece,
            Sink::Combine { into, .. } => into,
        }
    }
}

/// A message that waits in its sender's memory. Numbers mean something to the exchange alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferId(pub u64);

/// What became of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Offered {
    /// No room now. Nothing happened; offer again later.
    Full,
    /// The bytes have been copied: the piece is free already.
    Settled,
    /// The bytes are still needed.
    Open(OfferId),
}

/// How much of a message was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Taken {
    /// It is not there, or no more of it is.
    Nothing,
    /// Some of it.
    Part,
    /// The rest of it, or all at once.
    All,
}

/// Why a call cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Trouble {
    /// The next message on a lane is of another call: the two ranks do not do the same.
    #[error(
        "rank {} sent {} bytes as message {} of call {}, where {} bytes as message {} of call {} were due",
        peer.0, found.len, found.index, found.call, expected.len, expected.index, expected.call
    )]
    WrongMessage {
        peer: Rank,
        expected: MessageHead,
        found: MessageHead,
    },
    /// A rank is gone.
    #[error("rank {} is lost: {loss}", rank.0)]
    Lost { rank: Rank, loss: Loss },
    /// A rank has told everybody that the call failed.
    #[error("{0}")]
    Aborted(Box<Abort>),
    /// A rank took back what it had offered, and has not said why yet.
    #[error("rank {} has given up its call", rank.0)]
    Withdrew { rank: Rank },
    /// A buffer cannot be used by this exchange.
    #[error("buffer {buffer} cannot be used: {refusal}")]
    Unusable { buffer: u32, refusal: Refusal },
    /// A function of the caller's own panicked on this rank.
    #[error("this rank panicked in the call")]
    Panicked,
    /// Another rank has written something that is not the protocol.
    #[error("rank {} has written what no rank would", rank.0)]
    Garbage { rank: Rank },
}
