//! Messages to ranks on other hosts, or wherever no arena reaches: as parcels, over whatever paths the agent has.
//!
//! A short message is cut into parcels. The receiver says, with whatever it sends next or when it is due, how much it has consumed; a
//! sender is at most a window ahead of that, so that an unwilling receiver costs bounded memory. Of a long one a parcel says where it
//! lies, and the receiver reads it from there.

mod pull;

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;

use weft_fabric::arena::Ear;
use weft_fabric::fork::Forked;
use weft_fabric::kernels::HostKernels;
use weft_fabric::memory::HostMemory;
use weft_plan::{Rank, Time};
use weft_protocol::agent::{MAX_PARCEL_BYTES, Parcel, PeerError};
use weft_protocol::group::{
    At, CallRecord, Kernels, Lane, Lent, MessageHead, OfferId, Offered, Piece, Sink, Taken, Trouble, View,
};
use weft_protocol::session::{SessionLoss, region_from_bytes, region_to_bytes};
use weft_protocol::transfer::PeerId;
use weft_protocol::{Loss, Progress};

use super::board::Board;
use crate::agent::Agent;
use crate::driver::{PeerState, Shared, World};
use crate::ending::remember;
use crate::error::Error;
use pull::{Bounces, Pull};

/// What precedes the bytes: kind, channel, consumed, and of a part of a message its head and where in it the bytes belong.
const HEAD_BYTES: usize = 1 + 2 + 8 + 8 + 8 + 4 + 8 + 8;
const KIND_PART: u8 = 0;
const KIND_CONSUMED: u8 = 1;
const KIND_THERE: u8 = 2;
/// From this size on a message is read from where it lies.
pub(super) const LONG_BYTES: u64 = 128 << 10;
/// A part ends with one of these, unless it is the last: a multiple of every built-in element.
const PART_GRAIN: u64 = 4096;
/// The most bytes of one part.
const PART_BYTES: u64 = (MAX_PARCEL_BYTES - HEAD_BYTES) as u64 / PART_GRAIN * PART_GRAIN;
/// How far a sender may be ahead of its receiver on one lane.
const WINDOW_BYTES: u64 = 2 << 20;
/// The receiver says what it has consumed when it is so much.
const TELL_AFTER: u64 = WINDOW_BYTES / 4;

/// The far part of a rank's exchange.
#[derive(Debug)]
pub(super) struct Far {
    shared: Arc<Shared>,
    pub(super) board: Arc<Board>,
    peers: Vec<Option<PeerId>>,
    /// Whether any rank is reached this way.
    is_used: bool,
    channels: u16,
    incoming: Vec<Incoming>,
    outgoing: Vec<Outgoing>,
    /// Lanes with something left to push.
    pushing: usize,
    buffers: Buffers,
    parcels: Vec<Parcel>,
    head: Vec<u8>,
    bounces: Bounces,
    /// Messages that are being read.
    pulling: usize,
    /// A sender has not been told yet what it waits for.
    owing: bool,
}

/// The memory of the present call, and of messages beside it.
#[derive(Debug, Default)]
struct Buffers {
    call: Vec<View>,
    lent: Lent<View>,
}

impl Buffers {
    fn of(&self, piece: Piece) -> &View {
        match piece.is_lent() {
            true => self.lent.of(piece.buffer).expect("a buffer that is lent"),
            false => &self.call[piece.buffer as usize],
        }
    }
}

#[derive(Debug, Default)]
struct Incoming {
    parts: VecDeque<Parcel>,
    /// How much of the present message has been taken.
    taken: u64,
    /// Bytes consumed ever, and what the sender knows of that.
    consumed: u64,
    told: u64,
    /// Elements that straddle parts are put together first.
    gathered: Vec<u8>,
    pull: Option<Pull>,
}

#[derive(Debug, Default)]
struct Outgoing {
    sent: u64,
    consumed: u64,
    pushing: Option<Pushing>,
    /// Offers on this lane, ever.
    offers: u64,
    /// Messages that the receiver reads where they lie, oldest first: the offer, and what is consumed when it is done.
    there: VecDeque<(u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Pushing {
    head: MessageHead,
    from: Piece,
    pushed: u64,
}

/// A part of a message as its parcel tells it.
struct Part<'a> {
    channel: u16,
    consumed: u64,
    head: Option<(MessageHead, u64)>,
    /// The bytes follow, and not where they are.
    here: bool,
    bytes: &'a [u8],
}

impl Far {
    pub(super) fn new(agent: &Agent, board: Arc<Board>, used: Vec<bool>, channels: u16) -> Result<Far, Forked> {
        let lanes = used.len() * usize::from(channels);
        Ok(Far {
            peers: board.peers(),
            shared: agent.shared()?.clone(),
            bounces: Bounces::new(agent.clone()),
            pulling: 0,
            owing: false,
            board,
            is_used: used.contains(&true),
            channels,
            incoming: (0..lanes).map(|_| Incoming::default()).collect(),
            outgoing: (0..lanes).map(|_| Outgoing::default()).collect(),
            pushing: 0,
            buffers: Buffers::default(),
            parcels: Vec::new(),
            head: Vec::with_capacity(HEAD_BYTES),
        })
    }

    /// Whether messages to any rank go this way.
    pub(super) fn is_used(&self) -> bool {
        self.is_used
    }

    fn group(&self) -> u64 {
        self.board.group + 1
    }

    fn lane(&self, lane: Lane) -> usize {
        lane.peer.0 as usize * usize::from(self.channels) + usize::from(lane.channel)
    }

    pub(super) fn begin(&mut self, buffers: impl Iterator<Item = View>) {
        self.buffers.call.clear();
        self.buffers.call.extend(buffers);
    }

    /// A buffer of the call.
    pub(super) fn buffer(&self, place: u32) -> &View {
        &self.buffers.call[place as usize]
    }

    pub(super) fn offer(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble> {
        let index = self.lane(lane);
        if self.outgoing[index].pushing.is_some() {
            return Ok(Offered::Full);
        }
        if from.len >= LONG_BYTES && self.buffers.of(from).key.is_some() {
            return self.offer_there(lane, head, from);
        }
        let out = &mut self.outgoing[index];
        out.offers += 1;
        out.pushing = Some(Pushing {
            head: *head,
            from,
            pushed: 0,
        });
        let offer = OfferId(out.offers);
        self.pushing += 1;
        self.push(lane)?;
        Ok(match self.outgoing[index].pushing {
            None => Offered::Settled,
            Some(_) => Offered::Open(offer),
        })
    }

    /// Says where a long message lies.
    fn offer_there(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble> {
        let index = self.lane(lane);
        let group = self.group();
        let view = self.buffers.of(from);
        let (Some(peer), Some(key)) = (self.peers[lane.peer.0 as usize], view.key) else {
            return Err(Trouble::Garbage { rank: lane.peer });
        };
        let consumed = self.incoming[index].consumed;
        write_head(
            &mut self.head,
            lane.channel,
            consumed,
            Some((head, view.offset + from.offset)),
        );
        self.head[0] = KIND_THERE;
        let buffer = &self.head;
        let sent = self.shared.act(|world, now| {
            let (_, remote) = world.core.registered(&key).ok_or(PeerError::NotConnected)?;
            let region = region_to_bytes(&remote);
            world.core.send_parcel(peer, group, &[buffer, &region], now)
        });
        match sent {
            Ok(true) => {}
            Ok(false) => return Ok(Offered::Full),
            Err(error) => return Err(self.lost(lane.peer, &error)),
        }
        self.incoming[index].told = consumed;
        let out = &mut self.outgoing[index];
        out.offers += 1;
        out.sent += head.len;
        out.there.push_back((out.offers, out.sent));
        Ok(Offered::Open(OfferId(out.offers)))
    }

    pub(super) fn settled(&mut self, lane: Lane, offer: OfferId) -> bool {
        let index = self.lane(lane);
        let out = &mut self.outgoing[index];
        if let Some((_, end)) = out.there.front().filter(|(id, _)| *id == offer.0) {
            let settled = out.consumed >= *end;
            if settled {
                out.there.pop_front();
            }
            return settled;
        }
        offer.0 < out.offers || out.pushing.is_none()
    }

    /// Sends as many parts as the window allows.
    fn push(&mut self, lane: Lane) -> Result<(), Trouble> {
        let index = self.lane(lane);
        let peer = self.peers[lane.peer.0 as usize];
        let Some(peer) = peer else {
            return Err(Trouble::Garbage { rank: lane.peer });
        };
        let (group, now) = (self.group(), self.shared.clock.now());
        let Far {
            shared,
            incoming,
            outgoing,
            buffers,
            head: buffer,
            pushing,
            ..
        } = self;
        let (incoming, out) = (&mut incoming[index], &mut outgoing[index]);
        let mut outcome = Ok(());
        shared.act(|world, _| {
            while let Some(job) = &mut out.pushing {
                let len = part_len(job.head.len).min(job.head.len - job.pushed);
                if out.sent - out.consumed + len > WINDOW_BYTES {
                    return;
                }
                let view = buffers.of(job.from);
                write_head(buffer, lane.channel, incoming.consumed, Some((&job.head, job.pushed)));
                let fill = |payload: &mut [u8]| {
                    let (head, part) = payload.split_at_mut(HEAD_BYTES);
                    head.copy_from_slice(buffer);
                    if !part.is_empty() {
                        view.memory.read(view.offset + job.from.offset + job.pushed, part);
                    }
                };
                let bytes = HEAD_BYTES + len as usize;
                match world.core.send_parcel_with(peer, group, bytes, now, fill) {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(error) => return outcome = Err(error),
                }
                incoming.told = incoming.consumed;
                out.sent += len;
                job.pushed += len;
                if job.pushed == job.head.len {
                    out.pushing = None;
                    *pushing -= 1;
                }
            }
        });
        outcome.map_err(|error| self.lost(lane.peer, &error))
    }

    pub(super) fn take(&mut self, lane: Lane, head: &MessageHead, sink: &Sink<'_>) -> Result<Taken, Trouble> {
        let index = self.lane(lane);
        let rank = lane.peer;
        let mut any = false;
        while let Some(parcel) = self.incoming[index].parts.front() {
            let part = read_part(parcel.payload());
            let Some((here, (found, offset))) = part.and_then(|part| Some((part.here, part.head?))) else {
                return Err(Trouble::Garbage { rank });
            };
            if found != *head {
                return Err(Trouble::WrongMessage {
                    peer: rank,
                    expected: *head,
                    found,
                });
            }
            if !here {
                return self.take_there(lane, head, offset, sink);
            }
            let incoming = &mut self.incoming[index];
            let Some(parcel) = incoming.parts.pop_front() else {
                break;
            };
            let bytes = parcel.into_bytes();
            let len = (bytes.len() - Parcel::PAYLOAD_AT - HEAD_BYTES) as u64;
            if offset != incoming.taken || len > head.len - offset || (len == 0 && head.len > 0) {
                return Err(Trouble::Garbage { rank });
            }
            any = true;
            apply(&self.buffers, sink, offset, bytes, head.len, &mut incoming.gathered);
            incoming.taken += len;
            incoming.consumed += len;
            if incoming.taken == head.len {
                incoming.taken = 0;
                self.tell_if_due(lane)?;
                return Ok(Taken::All);
            }
        }
        self.tell_if_due(lane)?;
        Ok(if any { Taken::Part } else { Taken::Nothing })
    }

    /// Reads a long message from where it lies.
    fn take_there(&mut self, lane: Lane, head: &MessageHead, offset: u64, sink: &Sink<'_>) -> Result<Taken, Trouble> {
        let index = self.lane(lane);
        let rank = lane.peer;
        let Far {
            shared,
            incoming,
            buffers,
            bounces,
            pulling,
            peers,
            ..
        } = self;
        let incoming = &mut incoming[index];
        if incoming.pull.is_none() {
            let told = incoming.parts.front().and_then(|parcel| {
                let remote = region_from_bytes(read_part(parcel.payload())?.bytes).ok()?;
                let buffer = sink.target().buffer;
                Pull::new(peers[rank.0 as usize]?, remote, offset, head.len, buffer)
            });
            incoming.pull = Some(told.ok_or(Trouble::Garbage { rank })?);
            *pulling += 1;
        }
        let Some(pull) = &mut incoming.pull else {
            return Ok(Taken::Nothing);
        };
        let taken = match pull.advance(shared, bounces, buffers, sink) {
            Ok(taken) => taken,
            Err(error) => {
                return Err(Trouble::Lost {
                    rank,
                    loss: loss(&error),
                });
            }
        };
        if taken == Taken::All {
            incoming.pull = None;
            incoming.parts.pop_front();
            incoming.consumed += head.len;
            *pulling -= 1;
            // The sender waits for this.
            self.tell_consumed(lane)?;
        }
        Ok(taken)
    }

    fn tell_if_due(&mut self, lane: Lane) -> Result<(), Trouble> {
        let incoming = &self.incoming[self.lane(lane)];
        match incoming.consumed - incoming.told >= TELL_AFTER {
            true => self.tell_consumed(lane),
            false => Ok(()),
        }
    }

    fn tell_consumed(&mut self, lane: Lane) -> Result<(), Trouble> {
        let index = self.lane(lane);
        let Some(peer) = self.peers[lane.peer.0 as usize] else {
            return Ok(());
        };
        write_head(&mut self.head, lane.channel, self.incoming[index].consumed, None);
        let group = self.group();
        let head = &self.head;
        let told = self
            .shared
            .act(|world, now| world.core.send_parcel(peer, group, &[head], now));
        match told {
            Ok(true) => self.incoming[index].told = self.incoming[index].consumed,
            Ok(false) => self.owing = true,
            Err(error) => return Err(self.lost(lane.peer, &error)),
        }
        Ok(())
    }

    /// Tells senders what they wait for, where there was too much under way to tell them at once. Whoever is gone waits for nothing.
    fn tell_owed(&mut self) {
        if std::mem::take(&mut self.owing) {
            for index in 0..self.incoming.len() {
                if self.incoming[index].told < self.incoming[index].consumed {
                    self.tell_consumed(self.lane_at(index)).ok();
                }
            }
        }
    }

    fn lane_at(&self, index: usize) -> Lane {
        let channels = usize::from(self.channels);
        Lane {
            peer: Rank((index / channels) as u32),
            channel: (index % channels) as u16,
        }
    }

    /// Lets the agent make progress, and takes in what has come.
    pub(super) fn poll(&mut self) -> Result<Progress, Trouble> {
        let group = self.group();
        let mut parcels = std::mem::take(&mut self.parcels);
        self.shared.turn_with(|world| {
            while let Some(parcel) = world.core.next_parcel(group) {
                parcels.push(parcel);
            }
        });
        let any = !parcels.is_empty();
        for parcel in parcels.drain(..) {
            self.on_parcel(parcel)?;
        }
        self.parcels = parcels;
        self.tell_owed();
        if self.pushing > 0 {
            for index in 0..self.outgoing.len() {
                if self.outgoing[index].pushing.is_some() {
                    self.push(self.lane_at(index))?;
                }
            }
        }
        Ok(if any { Progress::Busy } else { Progress::Idle })
    }

    /// Sleeps until something may have come, at most so long.
    pub(super) fn rest(&self, until: Time) {
        let group = self.group();
        let has_news = || {
            self.incoming
                .iter()
                .any(|it| it.pull.as_ref().is_some_and(Pull::has_news))
        };
        self.shared.wait_until(until, |world| {
            (world.core.has_parcels(group) || self.pulling > 0 && has_news()).then_some(())
        });
    }

    /// Has an ear woken when something may have come. `None`: something has.
    pub(super) fn listen(&self, ear: &Arc<Ear>) -> Option<u32> {
        let heard = ear.heard();
        let mut world = self.shared.lock();
        let pulls = self.incoming.iter().filter_map(|incoming| incoming.pull.as_ref());
        if world.core.has_parcels(self.group()) || self.pulling > 0 && pulls.into_iter().any(Pull::has_news) {
            return None;
        }
        remember(&mut world.wakers, &Waker::from(ear.clone()));
        Some(heard)
    }

    fn on_parcel(&mut self, parcel: Parcel) -> Result<(), Trouble> {
        let from = self.peers.iter().position(|peer| *peer == Some(parcel.from));
        // Somebody who is not of the group has no say in it.
        let Some(rank) = from.map(|rank| Rank(rank as u32)) else {
            return Ok(());
        };
        let garbage = Trouble::Garbage { rank };
        let Some(part) = read_part(parcel.payload()).filter(|part| part.channel < self.channels) else {
            return Err(garbage);
        };
        let index = self.lane(Lane {
            peer: rank,
            channel: part.channel,
        });
        let out = &mut self.outgoing[index];
        if part.consumed < out.consumed || part.consumed > out.sent {
            return Err(garbage);
        }
        out.consumed = part.consumed;
        if part.head.is_some() {
            self.incoming[index].parts.push_back(parcel);
        }
        Ok(())
    }

    /// A rank whose session is over, among those that are asked for.
    fn lost_rank(&self, world: &World, asked: impl Fn(Rank) -> bool) -> Option<(Rank, Loss)> {
        let gone = |peer: &Option<PeerId>| match world.peers.get(&(*peer)?) {
            Some(PeerState::Gone(error)) => Some(loss(error)),
            Some(_) => None,
            None => Some(Loss::ClosedByPeer),
        };
        let peers = self.peers.iter().enumerate();
        let mut asked = peers.filter(|(rank, _)| asked(Rank(*rank as u32)));
        asked.find_map(|(rank, peer)| Some((Rank(rank as u32), gone(peer)?)))
    }

    pub(super) fn check_lost(&self, asked: impl Fn(Rank) -> bool) -> Result<(), Trouble> {
        match self.lost_rank(&self.shared.lock(), asked) {
            Some((rank, loss)) => Err(Trouble::Lost { rank, loss }),
            None => Ok(()),
        }
    }

    fn lost(&self, rank: Rank, _: &PeerError) -> Trouble {
        let loss = self
            .lost_rank(&self.shared.lock(), |it| it == rank)
            .map(|(_, loss)| loss);
        Trouble::Lost {
            rank,
            loss: loss.unwrap_or(Loss::ClosedByPeer),
        }
    }

    /// Says something to every rank, or to one.
    pub(super) fn say(&self, to: Option<Rank>, words: &[u8]) {
        let group = self.board.group;
        self.shared.act(|world, now| {
            for (rank, peer) in self.peers.iter().enumerate() {
                if let Some(peer) = peer.filter(|_| to.is_none_or(|to| to.0 as usize == rank)) {
                    // Whoever is gone needs not be told.
                    let _ = world.core.send_parcel(peer, group, &[words], now);
                }
            }
        });
    }

    /// Lets go of the buffers of the call, once nothing is read into them any more.
    pub(super) fn end(&mut self) -> Progress {
        let of_call = |buffer: u32| buffer & Lent::FIRST == 0;
        if self.give_up(of_call) == Progress::Busy || self.pay_owed() == Progress::Busy {
            return Progress::Busy;
        }
        self.buffers.call.clear();
        Progress::Idle
    }

    /// Remembers the memory of a message.
    pub(super) fn lend(&mut self, view: &View) -> u32 {
        self.buffers.lent.insert(view.clone())
    }

    /// Lets go of the memory of a message, once nothing is read into it any more.
    pub(super) fn take_back(&mut self, buffer: u32) -> Progress {
        if self.give_up(|it| it == buffer) == Progress::Busy || self.pay_owed() == Progress::Busy {
            return Progress::Busy;
        }
        self.buffers.lent.remove(buffer);
        Progress::Idle
    }

    /// Stops whatever reads from some buffers or writes to them.
    fn give_up(&mut self, given_up: impl Fn(u32) -> bool) -> Progress {
        if self.pushing > 0 {
            for out in &mut self.outgoing {
                if out.pushing.take_if(|job| given_up(job.from.buffer)).is_some() {
                    self.pushing -= 1;
                }
            }
        }
        if self.pulling > 0 {
            let mut under_way = false;
            for incoming in &mut self.incoming {
                let pull = incoming.pull.as_mut().filter(|pull| given_up(pull.into));
                match pull.map(|pull| pull.give_up(&mut self.bounces)) {
                    Some(true) => {
                        incoming.pull = None;
                        self.pulling -= 1;
                    }
                    Some(false) => under_way = true,
                    None => {}
                }
            }
            if under_way {
                self.shared.turn_with(|_| {});
                return Progress::Busy;
            }
        }
        Progress::Idle
    }

    fn pay_owed(&mut self) -> Progress {
        // A sender that is not told would wait for the next call. After a failure nobody waits.
        if self.owing && self.board.abort().is_none() {
            self.shared.turn_with(|_| {});
            self.tell_owed();
            if self.owing {
                return Progress::Busy;
            }
        }
        self.owing = false;
        Progress::Idle
    }

    pub(super) fn begin_status(&self, call: &CallRecord) {
        self.board.begin(call);
    }
}

/// Puts a part of a message, as its parcel came, where the sink wants it.
fn apply(buffers: &Buffers, sink: &Sink<'_>, offset: u64, parcel: Vec<u8>, whole: u64, gathered: &mut Vec<u8>) {
    const BYTES_AT: usize = Parcel::PAYLOAD_AT + HEAD_BYTES;
    let at = |piece: Piece, offset: u64| {
        let view = buffers.of(piece);
        assert!(piece.offset + piece.len <= view.len, "a piece outside of its buffer");
        At {
            memory: &*view.memory,
            offset: view.offset + piece.offset + offset,
        }
    };
    let len = (parcel.len() - BYTES_AT) as u64;
    if len == 0 {
        return;
    }
    match sink {
        Sink::Copy(into) => {
            let to = at(*into, offset);
            to.memory.write(to.offset, &parcel[BYTES_AT..]);
        }
        Sink::Combine { with, into, how } => {
            let combine = |offset: u64, bytes: Vec<u8>, from: usize| {
                let len = (bytes.len() - from) as u64;
                let came = HostMemory::from_vec(bytes);
                let from = At {
                    memory: &came,
                    offset: from as u64,
                };
                HostKernels.combine(how, at(*with, offset), from, at(*into, offset), len);
            };
            if PART_GRAIN.is_multiple_of(how.size() as u64) || len == whole {
                return combine(offset, parcel, BYTES_AT);
            }
            // Elements that do not end with a part are put together first.
            gathered.extend_from_slice(&parcel[BYTES_AT..]);
            if gathered.len() as u64 == whole {
                combine(0, std::mem::take(gathered), 0);
            }
        }
    }
}

/// How long the parts of a message are: as few as there can be, and all about as long, so that of two the first is on its way while the second is
/// made.
fn part_len(message: u64) -> u64 {
    message
        .div_ceil(message.div_ceil(PART_BYTES).max(1))
        .next_multiple_of(PART_GRAIN)
}

fn write_head(buffer: &mut Vec<u8>, channel: u16, consumed: u64, part: Option<(&MessageHead, u64)>) {
    buffer.clear();
    buffer.push(if part.is_some() { KIND_PART } else { KIND_CONSUMED });
    buffer.extend_from_slice(&channel.to_le_bytes());
    buffer.extend_from_slice(&consumed.to_le_bytes());
    if let Some((head, offset)) = part {
        buffer.extend_from_slice(&head.call.to_le_bytes());
        buffer.extend_from_slice(&head.signature.to_le_bytes());
        buffer.extend_from_slice(&head.index.to_le_bytes());
        buffer.extend_from_slice(&head.len.to_le_bytes());
        buffer.extend_from_slice(&offset.to_le_bytes());
    }
}

fn read_part(payload: &[u8]) -> Option<Part<'_>> {
    fn number<const N: usize>(payload: &[u8], at: usize) -> Option<[u8; N]> {
        payload.get(at..at + N)?.try_into().ok()
    }
    let word = |at: usize| Some(u64::from_le_bytes(number(payload, at)?));
    let channel = u16::from_le_bytes(number(payload, 1)?);
    let consumed = word(3)?;
    let kind = *payload.first()?;
    let (head, bytes) = match kind {
        KIND_PART | KIND_THERE => {
            let head = MessageHead {
                call: word(11)?,
                signature: word(19)?,
                index: u32::from_le_bytes(number(payload, 27)?),
                len: word(31)?,
            };
            (Some((head, word(39)?)), payload.get(HEAD_BYTES..)?)
        }
        KIND_CONSUMED => (None, &[][..]),
        _ => return None,
    };
    Some(Part {
        channel,
        consumed,
        head,
        here: kind == KIND_PART,
        bytes,
    })
}

/// Why a session is over, as far as a group needs to know.
fn loss(error: &Error) -> Loss {
    match error {
        Error::PeerLost {
            cause: SessionLoss::Silent,
            ..
        } => Loss::Silent,
        _ => Loss::ClosedByPeer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_as_few_as_can_be_and_end_with_a_grain() {
        let sizes = [
            0,
            1,
            PART_GRAIN,
            PART_BYTES,
            2 * PART_BYTES,
            LONG_BYTES,
            10 * LONG_BYTES,
        ];
        for len in sizes
            .into_iter()
            .flat_map(|size| [size.saturating_sub(1), size, size + 1])
        {
            let part = part_len(len);
            assert!(part <= PART_BYTES, "{len}");
            assert!(part.is_multiple_of(PART_GRAIN), "{len}");
            let parts = if len == 0 { 0 } else { len.div_ceil(part) };
            assert_eq!(parts, len.div_ceil(PART_BYTES), "{len}");
        }
    }
}
