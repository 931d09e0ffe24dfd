//! Messages to ranks on other hosts, or wherever no arena reaches: as parcels, over whatever paths the agent has.
//!
//! A short message is cut into parcels. The receiver says, with whatever it sends next or when it is due, how much it has consumed; a
//! sender is at most a window ahead of that, so that an unwilling receiver costs bounded memory. Of a long one a parcel says where it
//! lies, and the receiver reads it from there. A sender that gives up what it has offered in this way says so, and waits a moment until that is heard:
//! whoever has read a message that was taken back has not got it.

mod parts;
mod pull;

use std::collections::VecDeque;

use weft_plan::{Rank, Time};

use super::LONG_BYTES;
use super::combine::{At, Kernels};
use super::exchange::{Board, Exchange, Lane, Lent, MessageHead, OfferId, Offered, Piece, Sink, Taken, Trouble, View};
use super::notes::Note;
use super::record::{Abort, CallRecord, Status, Waiting};
use super::seat::Seat;
use crate::agent::{Core, MAX_PARCEL_BYTES, Parcel, PeerError};
use crate::error::Loss;
use crate::session::{SessionLoss, region_from_bytes, region_to_bytes};
use crate::transfer::PeerId;
use crate::transport::{Progress, Transport};
use parts::{part_len, read_part, write_head};
use pull::{Bounces, Pull};

/// What precedes the bytes: kind, channel, consumed, and of a part of a message its head and where in it the bytes belong.
const HEAD_BYTES: usize = 1 + 2 + 8 + 8 + 8 + 4 + 8 + 8;
const KIND_PART: u8 = 0;
const KIND_CONSUMED: u8 = 1;
const KIND_THERE: u8 = 2;
/// A part ends with one of these, unless it is the last: a multiple of every built-in element.
const PART_GRAIN: u64 = 4096;
/// The most bytes of one part.
const PART_BYTES: u64 = (MAX_PARCEL_BYTES - HEAD_BYTES) as u64 / PART_GRAIN * PART_GRAIN;
/// How far a sender may be ahead of its receiver on one lane.
const WINDOW_BYTES: u64 = 2 << 20;
/// The receiver says what it has consumed when it is so much.
const TELL_AFTER: u64 = WINDOW_BYTES / 4;
/// How often a rank is asked what it has called, by whoever keeps looking.
const ASK_AGAIN: Time = Time::from_ms(10);
/// How long a sender that takes back what it has offered waits for the receiver to hear of it. One that is frozen hears of it before it goes on.
const WITHDRAWAL_MAX: Time = Time::from_ms(100);

/// The exchange of one rank with those that it reaches over its agent.
#[derive(Debug)]
pub struct Far<S: Seat> {
    seat: S,
    group: u64,
    peers: Vec<Option<PeerId>>,
    /// Whether any rank is reached this way.
    is_used: bool,
    /// One of them is for messages between two ranks.
    channels: u16,
    incoming: Vec<Incoming>,
    outgoing: Vec<Outgoing>,
    /// Lanes with something left to push.
    pushing: usize,
    buffers: Buffers,
    parcels: Vec<Parcel>,
    head: Vec<u8>,
    bounces: Bounces<S::Held>,
    /// Messages that are being read.
    pulling: usize,
    /// A sender has not been told yet what it waits for.
    owing: bool,
    /// Offers that others read where they lie, and that have not settled.
    open_there: usize,
    /// By rank: when it was last asked what it has called.
    asked: Vec<Option<Time>>,
    /// Until when it is waited for that others hear of what was taken back.
    withdrawing: Option<Time>,
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
    /// Messages that the receiver reads where they lie, oldest first.
    there: VecDeque<There>,
}

#[derive(Clone, Copy, Debug)]
struct There {
    offer: u64,
    /// What is consumed when it is done.
    end: u64,
    buffer: u32,
}

#[derive(Clone, Copy, Debug)]
struct Pushing {
    head: MessageHead,
    from: Piece,
    pushed: u64,
}

impl<S: Seat> Far<S> {
    /// With `used` ranks, whose sessions are known, and so many channels for calls.
    pub fn new(seat: S, used: &[bool], channels: u16) -> Far<S> {
        let channels = channels + 1;
        let lanes = used.len() * usize::from(channels);
        let (group, peers) = seat.notes(|notes| (notes.group() + 1, notes.peers().to_vec()));
        Far {
            seat,
            group,
            peers,
            is_used: used.contains(&true),
            channels,
            incoming: (0..lanes).map(|_| Incoming::default()).collect(),
            outgoing: (0..lanes).map(|_| Outgoing::default()).collect(),
            pushing: 0,
            buffers: Buffers::default(),
            parcels: Vec::new(),
            head: Vec::with_capacity(HEAD_BYTES),
            bounces: Bounces::new(),
            pulling: 0,
            owing: false,
            open_there: 0,
            asked: vec![None; used.len()],
            withdrawing: None,
        }
    }

    /// Whether messages to any rank go this way.
    pub fn is_used(&self) -> bool {
        self.is_used
    }

    pub fn seat(&self) -> &S {
        &self.seat
    }

    fn lane(&self, lane: Lane) -> usize {
        lane.peer.0 as usize * usize::from(self.channels) + usize::from(lane.channel)
    }

    /// Begins a call with these buffers, which others may have too.
    pub fn begin_with(&mut self, call: &CallRecord, buffers: impl Iterator<Item = View>) {
        if self.is_used {
            self.seat.notes(|notes| notes.begin(call));
        }
        self.buffers.call.clear();
        self.buffers.call.extend(buffers);
    }

    /// Lets go of the buffers of a call of which nothing has been offered or taken.
    pub fn forget_buffers(&mut self) {
        self.buffers.call.clear();
    }

    /// What a rank has told everybody.
    pub fn told(&self) -> Option<Abort> {
        self.seat.notes(|notes| notes.abort())
    }

    fn offer_message(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble> {
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
        let group = self.group;
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
        let sent = self.seat.act(|core, now| {
            let (_, remote) = core.registered(&key).ok_or(PeerError::NotConnected)?;
            let region = region_to_bytes(&remote);
            core.send_parcel(peer, group, &[buffer, &region], now)
        });
        match sent {
            Ok(true) => {}
            Ok(false) => return Ok(Offered::Full),
            Err(_) => return Err(self.lost(lane.peer)),
        }
        self.incoming[index].told = consumed;
        let out = &mut self.outgoing[index];
        out.offers += 1;
        out.sent += head.len;
        self.open_there += 1;
        out.there.push_back(There {
            offer: out.offers,
            end: out.sent,
            buffer: from.buffer,
        });
        Ok(Offered::Open(OfferId(out.offers)))
    }

    fn has_settled(&mut self, lane: Lane, offer: OfferId) -> bool {
        let index = self.lane(lane);
        let out = &mut self.outgoing[index];
        if let Some(there) = out.there.front().filter(|there| there.offer == offer.0) {
            let settled = out.consumed >= there.end;
            if settled {
                out.there.pop_front();
                self.open_there -= 1;
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
        let group = self.group;
        let Far {
            seat,
            incoming,
            outgoing,
            buffers,
            head: buffer,
            pushing,
            ..
        } = self;
        let (incoming, out) = (&mut incoming[index], &mut outgoing[index]);
        let mut outcome = Ok(());
        seat.act(|core, now| {
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
                        view.memory
                            .bytes()
                            .read(view.offset + job.from.offset + job.pushed, part);
                    }
                };
                let bytes = HEAD_BYTES + len as usize;
                match core.send_parcel_with(peer, group, bytes, now, fill) {
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
        outcome.map_err(|_: PeerError| self.lost(lane.peer))
    }

    fn take_message(&mut self, lane: Lane, head: &MessageHead, sink: &Sink<'_>) -> Result<Taken, Trouble> {
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
            apply(
                &self.seat,
                &self.buffers,
                sink,
                offset,
                bytes,
                head.len,
                &mut incoming.gathered,
            );
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
            seat,
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
        let advanced = pull.advance(seat, bounces, buffers, sink);
        // What was taken back may have become something else before it was read.
        if seat.notes(|notes| notes.has_withdrawn(rank)) {
            return Err(Trouble::Withdrew { rank });
        }
        let Ok(taken) = advanced else {
            return Err(self.lost(rank));
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
        let (group, head) = (self.group, &self.head);
        let told = self.seat.act(|core, now| core.send_parcel(peer, group, &[head], now));
        match told {
            Ok(true) => self.incoming[index].told = self.incoming[index].consumed,
            Ok(false) => self.owing = true,
            Err(_) => return Err(self.lost(lane.peer)),
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
    fn take_in(&mut self) -> Result<Progress, Trouble> {
        let group = self.group;
        let mut parcels = std::mem::take(&mut self.parcels);
        self.seat
            .turn(|core| parcels.extend(std::iter::from_fn(|| core.next_parcel(group))));
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

    /// Whether there is something to see that was not seen yet.
    pub fn has_news(&self, core: &Core<S::Transport>) -> bool {
        let pulls = self.incoming.iter().filter_map(|incoming| incoming.pull.as_ref());
        core.has_parcels(self.group)
            || self.pulling > 0
                && self
                    .seat
                    .notes(|notes| pulls.into_iter().any(|pull| pull.has_news(notes)))
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

    /// Whether a rank is known to be gone, of those that are asked for.
    pub fn check_lost(&self, asked: impl Fn(Rank) -> bool) -> Result<(), Trouble> {
        let peers = self.peers.iter().zip((0..).map(Rank));
        let mut asked = peers
            .filter_map(|(peer, rank)| Some((rank, (*peer)?)))
            .filter(|(rank, _)| asked(*rank));
        let lost = self
            .seat
            .look(|core| asked.find_map(|(rank, peer)| Some((rank, gone(core, peer)?))));
        match lost {
            Some((rank, loss)) => Err(Trouble::Lost { rank, loss }),
            None => Ok(()),
        }
    }

    fn lost(&self, rank: Rank) -> Trouble {
        let otherwise = Trouble::Lost {
            rank,
            loss: Loss::ClosedByPeer,
        };
        self.check_lost(|it| it == rank).err().unwrap_or(otherwise)
    }

    fn say(&self, note: &Note) {
        self.seat
            .act(|core, now| self.seat.notes(|notes| notes.say(core, note, now)));
    }

    /// Stops whatever reads from some buffers or writes to them.
    fn give_up(&mut self, given_up: impl Fn(u32) -> bool + Copy) -> Progress {
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
                match pull.map(|pull| pull.give_up(&self.seat, &mut self.bounces)) {
                    Some(true) => {
                        incoming.pull = None;
                        self.pulling -= 1;
                    }
                    Some(false) => under_way = true,
                    None => {}
                }
            }
            if under_way {
                self.seat.turn(|_| ());
                return Progress::Busy;
            }
        }
        self.withdraw(given_up)
    }

    /// Makes sure that nobody takes what it reads from some buffers for what was offered.
    fn withdraw(&mut self, given_up: impl Fn(u32) -> bool) -> Progress {
        if self.open_there == 0 {
            return Progress::Idle;
        }
        let mut ranks = Vec::new();
        for (index, out) in self.outgoing.iter_mut().enumerate() {
            let consumed = out.consumed;
            let before = out.there.len();
            out.there.retain(|there| there.end > consumed);
            self.open_there -= before - out.there.len();
            if out.there.iter().any(|there| given_up(there.buffer)) {
                ranks.push(Rank((index / usize::from(self.channels)) as u32));
            }
        }
        if ranks.is_empty() {
            self.withdrawing = None;
            return Progress::Idle;
        }
        let now = self.seat.now();
        if self.withdrawing.is_none() {
            self.say(&Note::Withdraw);
        }
        let until = *self.withdrawing.get_or_insert(now.saturating_add(WITHDRAWAL_MAX));
        let heard =
            |rank: &Rank| self.seat.notes(|notes| notes.is_heard(*rank)) || self.check_lost(|it| it == *rank).is_err();
        if now < until && !ranks.iter().all(heard) {
            self.seat.turn(|_| ());
            return Progress::Busy;
        }
        for out in &mut self.outgoing {
            let before = out.there.len();
            out.there.retain(|there| !given_up(there.buffer));
            self.open_there -= before - out.there.len();
        }
        self.withdrawing = None;
        Progress::Idle
    }

    fn pay_owed(&mut self) -> Progress {
        // A sender that is not told would wait for the next call. After a failure nobody waits.
        if self.owing && self.told().is_none() {
            self.seat.turn(|_| ());
            self.tell_owed();
            if self.owing {
                return Progress::Busy;
            }
        }
        self.owing = false;
        Progress::Idle
    }
}

impl<S: Seat> Board for Far<S> {
    fn publish(&mut self, waiting: Waiting) {
        self.seat.notes(|notes| notes.set_waiting(waiting));
    }

    fn status(&mut self, of: Rank) -> Option<Status> {
        let now = self.seat.now();
        let asked = self.asked.get_mut(of.0 as usize)?;
        if asked.is_none_or(|asked| now >= asked.saturating_add(ASK_AGAIN)) {
            *asked = Some(now);
            if let Some(peer) = self.peers[of.0 as usize] {
                let group = self.group - 1;
                // Whoever is gone needs not be asked, and who keeps looking asks again.
                let _ = self
                    .seat
                    .act(|core, now| core.send_parcel(peer, group, &[&Note::Ask.to_bytes()], now));
            }
        }
        self.seat.notes(|notes| notes.status(of))
    }

    fn pulse(&mut self, of: Rank) -> u64 {
        self.seat.notes(|notes| notes.pulse(of))
    }

    fn forget_answers(&mut self) {
        self.asked.fill(None);
        self.seat.notes(|notes| notes.forget_answers());
    }

    fn abort(&mut self, abort: &Abort) {
        self.seat.notes(|notes| notes.set_abort(abort));
        self.say(&Note::Abort(Box::new(*abort)));
    }
}

impl<S: Seat> Exchange for Far<S> {
    fn channels(&self) -> u16 {
        self.channels - 1
    }

    fn begin(&mut self, call: &CallRecord, buffers: &mut Vec<View>) -> Result<(), Trouble> {
        self.begin_with(call, buffers.drain(..));
        Ok(())
    }

    fn buffer(&self, place: u32) -> &View {
        &self.buffers.call[place as usize]
    }

    fn offer(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble> {
        self.offer_message(lane, head, from)
    }

    fn settled(&mut self, lane: Lane, offer: OfferId) -> bool {
        self.has_settled(lane, offer)
    }

    fn take(&mut self, lane: Lane, head: &MessageHead, sink: &Sink<'_>) -> Result<Taken, Trouble> {
        self.take_message(lane, head, sink)
    }

    fn poll(&mut self, _: Time) -> Result<Progress, Trouble> {
        if let Some(abort) = self.told() {
            return Err(Trouble::Aborted(Box::new(abort)));
        }
        self.take_in()
    }

    fn end(&mut self) -> Progress {
        self.seat.notes(|notes| notes.set_ended());
        let of_call = |buffer: u32| buffer & Lent::FIRST == 0;
        if self.give_up(of_call) == Progress::Busy || self.pay_owed() == Progress::Busy {
            return Progress::Busy;
        }
        self.buffers.call.clear();
        Progress::Idle
    }

    fn lend(&mut self, _: Rank, view: &View) -> Result<u32, Trouble> {
        Ok(self.buffers.lent.insert(view.clone()))
    }

    fn take_back(&mut self, _: Rank, buffer: u32) -> Progress {
        if self.give_up(|it| it == buffer) == Progress::Busy || self.pay_owed() == Progress::Busy {
            return Progress::Busy;
        }
        self.buffers.lent.remove(buffer);
        Progress::Idle
    }
}

/// Why the session with a rank is over, if it is, as far as a group needs to know.
fn gone<T: ?Sized + Transport>(core: &Core<T>, peer: PeerId) -> Option<Loss> {
    match (core.is_connected(peer), core.ending(peer)) {
        (true, _) => None,
        (false, Some(SessionLoss::Silent)) => Some(Loss::Silent),
        (false, _) => Some(Loss::ClosedByPeer),
    }
}

/// Puts a part of a message, as its parcel came, where the sink wants it.
fn apply<S: Seat>(
    seat: &S,
    buffers: &Buffers,
    sink: &Sink<'_>,
    offset: u64,
    parcel: Vec<u8>,
    whole: u64,
    gathered: &mut Vec<u8>,
) {
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
            to.memory.bytes().write(to.offset, &parcel[BYTES_AT..]);
        }
        Sink::Combine { with, into, how } => {
            let combine = |offset: u64, bytes: Vec<u8>, from: usize| {
                let len = (bytes.len() - from) as u64;
                let came = seat.came(bytes);
                let from = At {
                    memory: &came,
                    offset: from as u64,
                };
                seat.kernels()
                    .combine(how, at(*with, offset), from, at(*into, offset), len);
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
