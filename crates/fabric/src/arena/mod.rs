//! The arena: how ranks on one host exchange messages, at the speed of their caches.
//!
//! Every rank has a segment of shared memory that it alone writes and its neighbours map read-only. In it are, for every neighbour and
//! channel, a ring of slots with messages to that neighbour, and a count of the slots that it has consumed of the neighbour's ring. Sending is
//! writing a slot, receiving is looking at one: no system call, no lock, no third party.
//!
//! A short message is copied into its slot. A longer one in memory that Weft has allocated stays where it is: the slot says where,
//! and the receiver reads, or reduces, straight from there. A longer one in foreign memory passes through the slots in pieces, written
//! through the cache or past it, whichever the two cores are better served by.
//!
//! Whoever has waited in vain for some time can [`rest`](Arena::rest): a neighbour with news wakes it.

mod board;
mod lane;
#[cfg(all(test, loom))]
mod model;
mod rest;
mod segment;
mod sink;
mod stores;
#[cfg(all(test, not(loom)))]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use weft_plan::{Rank, Time};
use weft_protocol::group::{
    CallRecord, EAGER_BYTES_MAX, Exchange, Lane, Lent, MessageHead, OfferId, Offered, Piece, Sink, Taken, Trouble, View,
};
use weft_protocol::{Progress, Refusal, RegionKey};

use crate::memory::{HostMemory, MemoryError};
use crate::reduce::Reducer;
use crate::sync::{self, AtomicU32, Ordering, fence};
use board::Sticky;
use lane::{Incoming, Outgoing, Pushing, Ticket};
use segment::{Body, Layout, Segment, Slot};
use stores::Stores;

pub use crate::memory::Seen;
pub use rest::Ear;

/// A message that is left in its sender's memory is taken in pieces of this size, so that whoever takes it looks up now and then.
const PART_BYTES: u64 = 1 << 20;
/// So many buffers of a neighbour are kept mapped.
const MAPPINGS_MAX: usize = 64;
/// So many buffers that neighbours have read are remembered.
const READ_MAX: usize = 8;

/// How an arena gets at the buffers of its neighbours.
pub trait Neighbourhood: fmt::Debug + Send {
    /// A neighbour's memory where it lies. `None` until the neighbour has answered: asked again.
    fn map(&mut self, rank: Rank, key: &RegionKey) -> Result<Option<Arc<dyn Seen>>, Trouble>;
}

/// The dimensions of an arena. They must be the same for all its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaOptions {
    /// Between any two ranks. The last is for messages beside a call, and the others are for calls.
    pub channels: u16,
    /// Slots of a lane; a power of two.
    pub slots: u32,
    pub slot_bytes: u32,
    /// Messages up to this size are copied even where the receiver could read them in place, because the sender is done sooner.
    pub eager_bytes_max: u32,
}

/// The slots of a lane together are larger than the cache of a core. What is in them has left the reader's cache when they are written
/// again, and need not be taken back from there.
const LANE_SLOTS: u32 = 64;
/// Slots to and from all ranks together are limited, because every one of them takes memory once it has been used.
const RANK_SLOTS: u32 = 512;

impl ArenaOptions {
    /// For an arena of so many ranks.
    pub fn new(ranks: usize) -> ArenaOptions {
        let ranks = u32::try_from(ranks.max(1)).unwrap_or(u32::MAX);
        let fair = (RANK_SLOTS / ranks).max(1);
        ArenaOptions {
            channels: 2,
            slots: (1 << fair.ilog2()).clamp(8, LANE_SLOTS),
            slot_bytes: 32 << 10,
            eager_bytes_max: EAGER_BYTES_MAX as u32,
        }
    }
}

/// Why there is no arena.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ArenaError {
    #[error("an arena needs at least one channel, a power of two of slots, and slots of a multiple of 64 bytes")]
    Dimensions,
    #[error("the segment of rank {} is not one of an arena of these dimensions", rank.0)]
    NotASegment { rank: Rank },
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// One rank's end of an arena.
pub struct Arena {
    options: ArenaOptions,
    layout: Layout,
    /// The ranks in the arena, in the order of their places.
    ranks: Vec<Rank>,
    /// The place of a rank, by its number; `NOWHERE` for those on other hosts.
    places: Vec<u32>,
    own_place: usize,
    own: Segment,
    neighbours: Vec<Option<Neighbour>>,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    neighbourhood: Box<dyn Neighbourhood>,
    /// The buffers of the present call, and where they are.
    views: Vec<View>,
    bases: Vec<Base>,
    /// Those of messages beside it.
    lent: Lent<Beside>,
    call: CallRecord,
    /// Lanes with a message that has not found room yet.
    pushing: usize,
    /// The kernel of the last reduction, which is nearly always that of the next.
    reducer: Option<Reducer>,
    /// Buffers that neighbours have read where they lie, the latest last.
    read: Vec<RegionKey>,
    /// How results are written into those.
    results: Stores,
    trouble: Sticky,
}

const NOWHERE: u32 = u32::MAX;

#[derive(Debug)]
struct Neighbour {
    segment: Segment,
    /// What its news were when we last polled.
    news: u32,
    mappings: Vec<(RegionKey, Arc<dyn Seen>)>,
}

/// The first byte of a view. It goes when the view goes.
#[derive(Clone, Copy, Debug)]
struct Base(*mut u8);

// SAFETY: a pointer into memory that the view keeps alive, and which has no thread affinity.
unsafe impl Send for Base {}

/// The buffer of a message beside the present call.
#[derive(Debug)]
struct Beside {
    view: View,
    base: Base,
    /// For a message that stays here until it is read: its place among the lanes, and one more than its slot.
    left_there: Option<(usize, u64)>,
}

impl Arena {
    /// Memory for the segment of one rank of `ranks`, for the others to map.
    pub fn segment(ranks: usize, options: ArenaOptions) -> Result<Arc<HostMemory>, ArenaError> {
        Ok(Segment::allocate(layout(ranks, options)?)?)
    }

    /// The end of the rank that `segment` was made for. `neighbours` are all ranks of the arena in an order that is the same
    /// everywhere, with the segments of all but this one.
    pub fn new(
        options: ArenaOptions,
        segment: Arc<HostMemory>,
        neighbours: Vec<(Rank, Option<Arc<dyn Seen>>)>,
        neighbourhood: Box<dyn Neighbourhood>,
    ) -> Result<Arena, ArenaError> {
        let layout = layout(neighbours.len(), options)?;
        sync::take_part_in_order();
        let ranks: Vec<Rank> = neighbours.iter().map(|(rank, _)| *rank).collect();
        let own_place = neighbours.iter().position(|(_, seen)| seen.is_none());
        let own_place = own_place.ok_or(ArenaError::Dimensions)?;
        let own_rank = ranks[own_place];
        let own = Segment::own(layout, segment).ok_or(ArenaError::NotASegment { rank: own_rank })?;
        let mut places = vec![NOWHERE; ranks.iter().map(|r| r.0 as usize + 1).max().unwrap_or(0)];
        for (place, rank) in ranks.iter().enumerate() {
            places[rank.0 as usize] = place as u32;
        }
        let seen = |(rank, seen): (Rank, Option<Arc<dyn Seen>>)| match seen {
            None if rank == own_rank => Ok(None),
            None => Err(ArenaError::Dimensions),
            Some(seen) => match Segment::seen(layout, seen) {
                Some(segment) => Ok(Some(Neighbour {
                    segment,
                    news: 0,
                    mappings: Vec::new(),
                })),
                None => Err(ArenaError::NotASegment { rank }),
            },
        };
        let lanes = layout.ranks * layout.channels;
        Ok(Arena {
            options,
            layout,
            ranks,
            places,
            own_place,
            own,
            neighbours: neighbours.into_iter().map(seen).collect::<Result<_, _>>()?,
            outgoing: (0..lanes).map(|_| Outgoing::default()).collect(),
            incoming: (0..lanes).map(|_| Incoming::default()).collect(),
            neighbourhood,
            views: Vec::new(),
            bases: Vec::new(),
            lent: Lent::default(),
            call: CallRecord::NONE,
            pushing: 0,
            reducer: None,
            read: Vec::with_capacity(READ_MAX),
            results: Stores::default(),
            trouble: Sticky::default(),
        })
    }

    /// Whether a rank is reached through this arena.
    pub fn holds(&self, rank: Rank) -> bool {
        self.places.get(rank.0 as usize).is_some_and(|&place| place != NOWHERE)
    }

    /// Sleeps until a neighbour has done something since the last [`poll`](Exchange::poll), at most so long. To be called after
    /// having polled and then looked at everything in vain.
    pub fn rest(&mut self, max: Duration) {
        self.rest_besides(None, max);
    }

    /// The same, or until the ear is woken once more than it has been heard to be.
    pub fn rest_hearing(&mut self, ear: &Ear, heard: u32, max: Duration) {
        self.rest_besides(Some((ear.word(), heard)), max);
    }

    fn rest_besides(&mut self, ear: Option<(&AtomicU32, u32)>, max: Duration) {
        self.own.set_resting(true);
        sync::order_others();
        let neighbours = self.neighbours.iter().flatten();
        sync::wait(neighbours.map(|n| (n.segment.news(), n.news)).chain(ear), max);
        self.own.set_resting(false);
    }

    /// The place of a lane's other end, and the lane's number in a segment of ours.
    fn place(&self, lane: Lane) -> (usize, usize) {
        let place = self.places[lane.peer.0 as usize] as usize;
        assert!(lane.channel < self.options.channels, "a channel that was not asked for");
        (place, self.layout.lane(place, usize::from(lane.channel)))
    }

    /// Lets a neighbour know that there is something new, in case that it sleeps.
    fn nudge(own: &Segment, neighbour: &Neighbour) {
        own.tell_news();
        // Either we see that it rests, or it sees the news before it sleeps: it has its own way to order what we do here.
        sync::order_own();
        if neighbour.segment.is_resting() {
            sync::wake(own.news());
        }
    }

    /// The buffer of a piece, and where the piece begins.
    fn held(&self, piece: Piece) -> (&View, *mut u8) {
        let (view, base) = match piece.is_lent() {
            true => {
                let beside = self.lent.of(piece.buffer).expect("a buffer that is lent");
                (&beside.view, beside.base)
            }
            false => (&self.views[piece.buffer as usize], self.bases[piece.buffer as usize]),
        };
        let end = piece.offset.checked_add(piece.len);
        assert!(end.is_some_and(|end| end <= view.len), "a piece outside of its buffer");
        // SAFETY: within the buffer, as just checked.
        (view, unsafe { base.0.add(piece.offset as usize) })
    }

    fn at(&self, piece: Piece) -> *mut u8 {
        self.held(piece).1
    }

    /// Whether neighbours read the buffer of a piece where it lies, in this call or before, and may have it in their caches.
    fn was_read(&self, piece: Piece) -> bool {
        let key = self.held(piece).0.key;
        !piece.is_lent() && key.is_some_and(|key| self.read.contains(&key))
    }

    /// Lets go of the buffers of the present call.
    fn let_go(&mut self) {
        self.bases.clear();
        self.views.clear();
    }

    /// Whether there is a slot to write on a lane.
    fn has_room(&mut self, place: usize, channel: u16, index: usize) -> bool {
        let out = &mut self.outgoing[index];
        let full = |out: &Outgoing| out.next - out.consumed >= self.layout.slots as u64;
        if full(out) {
            Arena::look(&self.neighbours[place], self.own_place, channel, out);
        }
        !full(out)
    }

    /// Sees how much the receiver has consumed. A count that cannot be is no progress.
    fn look(neighbour: &Option<Neighbour>, own_place: usize, channel: u16, out: &mut Outgoing) {
        let Some(neighbour) = neighbour else { return };
        let consumed = neighbour.segment.consumed(own_place, usize::from(channel));
        if consumed > out.consumed && consumed <= out.next {
            out.consumed = consumed;
        }
    }

    fn publish_slot(&mut self, place: usize, index: usize, slot: &Slot) -> u64 {
        let number = self.outgoing[index].next;
        self.own.set_slot(index, number, slot);
        self.outgoing[index].next += 1;
        if let Some(neighbour) = &self.neighbours[place] {
            Arena::nudge(&self.own, neighbour);
        }
        number
    }

    /// Moves a message on through its lane, as far as there is room. Whether all of it has gone.
    fn push(&mut self, place: usize, channel: u16, index: usize) -> bool {
        while let Some(pushing) = &self.outgoing[index].pushing {
            let (from, head, pushed) = (pushing.from, pushing.head, pushing.pushed);
            if !self.has_room(place, channel, index) {
                return false;
            }
            let len = (head.len - pushed).min(self.layout.slot_bytes as u64);
            {
                let to = self.own.payload_to_fill(index, self.outgoing[index].next);
                // SAFETY: the message lies in a buffer of the call, which is held; the slot is free and of that size.
                unsafe {
                    self.outgoing[index]
                        .stores
                        .fill(to.as_ptr(), from.add(pushed as usize), len as usize)
                };
            }
            let body = Body::Here(len);
            self.publish_slot(place, index, &Slot { head, body });
            let out = &mut self.outgoing[index];
            match &mut out.pushing {
                Some(pushing) if pushed + len < head.len => pushing.pushed += len,
                _ => {
                    out.pushing = None;
                    self.pushing -= 1;
                }
            }
        }
        true
    }

    /// What lies in a neighbour's memory, once it is visible here.
    fn seen(&mut self, place: usize, key: &RegionKey, offset: u64, len: u64) -> Result<Option<*const u8>, Trouble> {
        let rank = self.ranks[place];
        let Some(neighbour) = &mut self.neighbours[place] else {
            return Err(Trouble::Garbage { rank });
        };
        let known = neighbour.mappings.iter().position(|(known, _)| known == key);
        let at = match known {
            Some(at) => at,
            None => {
                let Some(mapping) = self.neighbourhood.map(rank, key)? else {
                    return Ok(None);
                };
                neighbour.mappings.retain(|(_, mapping)| mapping.is_live());
                if neighbour.mappings.len() >= MAPPINGS_MAX {
                    neighbour.mappings.remove(0);
                }
                neighbour.mappings.push((*key, mapping));
                neighbour.mappings.len() - 1
            }
        };
        let mapping = &neighbour.mappings[at].1;
        if offset.checked_add(len).is_none_or(|end| end > mapping.bytes()) {
            return Err(Trouble::Garbage { rank });
        }
        // SAFETY: within the mapping, as just checked.
        Ok(Some(unsafe { mapping.as_ptr().add(offset as usize) }))
    }
}

impl Exchange for Arena {
    fn channels(&self) -> u16 {
        self.options.channels.saturating_sub(1)
    }

    fn begin(&mut self, call: &CallRecord, buffers: &mut Vec<View>) -> Result<(), Trouble> {
        self.let_go();
        std::mem::swap(&mut self.views, buffers);
        for (index, view) in self.views.iter_mut().enumerate() {
            match base_of(view) {
                Ok(base) => self.bases.push(base),
                Err(refusal) => {
                    self.let_go();
                    let buffer = index as u32;
                    return Err(Trouble::Unusable { buffer, refusal });
                }
            }
        }
        let renamed = call.words != self.call.words;
        if renamed {
            self.call.words = call.words;
        }
        (self.call.number, self.call.signature) = (call.number, call.signature);
        self.own.set_status(call, board::UNDER_WAY, renamed);
        Ok(())
    }

    fn buffer(&self, place: u32) -> &View {
        &self.views[place as usize]
    }

    fn offer(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble> {
        let (place, index) = self.place(lane);
        if !self.push(place, lane.channel, index) || !self.has_room(place, lane.channel, index) {
            return Ok(Offered::Full);
        }
        let head = *head;
        let (view, at) = self.held(from);
        let (offset, key) = (view.offset + from.offset, view.key);
        let eager = match key {
            Some(_) => self.options.eager_bytes_max.min(self.options.slot_bytes),
            None => self.options.slot_bytes,
        };
        if from.len <= u64::from(eager) {
            {
                let to = self.own.payload_to_fill(index, self.outgoing[index].next);
                // SAFETY: `held` has checked the piece; the slot is free, and no smaller.
                unsafe { self.outgoing[index].stores.fill(to.as_ptr(), at, from.len as usize) };
            }
            let body = Body::Here(from.len);
            self.publish_slot(place, index, &Slot { head, body });
            return Ok(Offered::Settled);
        }
        if let Some(key) = key {
            if !self.read.contains(&key) {
                if self.read.len() == READ_MAX {
                    self.read.remove(0);
                }
                self.read.push(key);
            }
            let body = Body::There { key, offset };
            let number = self.publish_slot(place, index, &Slot { head, body });
            match self.lent.of_mut(from.buffer).filter(|_| from.is_lent()) {
                Some(beside) => beside.left_there = Some((index, number + 1)),
                None => self.outgoing[index].left_there = number + 1,
            }
            return Ok(Offered::Open(Ticket::LeftThere(number).id()));
        }
        let out = &mut self.outgoing[index];
        let first = out.next;
        out.pushing = Some(Pushing {
            lent: from.is_lent().then_some(from.buffer),
            from: at,
            head,
            pushed: 0,
            first,
        });
        self.pushing += 1;
        Ok(match self.push(place, lane.channel, index) {
            true => Offered::Settled,
            false => Offered::Open(Ticket::Pushed(first).id()),
        })
    }

    fn settled(&mut self, lane: Lane, offer: OfferId) -> bool {
        let (place, index) = self.place(lane);
        match Ticket::of(offer) {
            Ticket::LeftThere(number) => {
                let out = &mut self.outgoing[index];
                if out.consumed <= number {
                    Arena::look(&self.neighbours[place], self.own_place, lane.channel, out);
                }
                out.consumed > number
            }
            Ticket::Pushed(first) => {
                let is_it = |pushing: &Pushing| pushing.first == first;
                !self.outgoing[index].pushing.as_ref().is_some_and(is_it) || self.push(place, lane.channel, index)
            }
        }
    }

    fn take(&mut self, lane: Lane, head: &MessageHead, sink: &Sink<'_>) -> Result<Taken, Trouble> {
        let (place, index) = self.place(lane);
        let Some(neighbour) = &self.neighbours[place] else {
            return Err(Trouble::Garbage { rank: lane.peer });
        };
        let Incoming { next, taken, .. } = self.incoming[index];
        let theirs = self.layout.lane(self.own_place, usize::from(lane.channel));
        let Some(slot) = neighbour.segment.slot(theirs, next) else {
            return Ok(Taken::Nothing);
        };
        if slot.head != *head {
            return Err(Trouble::WrongMessage {
                peer: lane.peer,
                expected: *head,
                found: slot.head,
            });
        }
        let (got, consumed) = match slot.body {
            Body::Here(len) => (self.take_here(place, index, len, head, sink)?, true),
            Body::There { key, offset } => {
                let Some(from) = self.seen(place, &key, offset, head.len)? else {
                    return Ok(Taken::Nothing);
                };
                // Whole elements, however large a caller's own are.
                let unit = match sink {
                    Sink::Combine { how, .. } => how.size().max(1) as u64,
                    Sink::Copy(_) => 1,
                };
                let len = (head.len - taken).min((PART_BYTES / unit).max(1) * unit);
                // SAFETY: `seen` has checked the whole message.
                self.apply(sink, taken, unsafe { from.add(taken as usize) }, len, head.len);
                let left = |n: &Neighbour| n.segment.is_withdrawn() || n.segment.has_abort();
                if self.neighbours[place].as_ref().is_none_or(left) {
                    // Whoever was first says why.
                    self.check_told()?;
                    return Err(Trouble::Withdrew { rank: lane.peer });
                }
                (len, taken + len == head.len)
            }
        };
        let incoming = &mut self.incoming[index];
        incoming.taken += got;
        let all = incoming.taken == head.len;
        if all {
            incoming.taken = 0;
        }
        if consumed {
            incoming.next += 1;
            self.own.set_consumed(place, usize::from(lane.channel), next + 1);
            if let Some(neighbour) = &self.neighbours[place] {
                Arena::nudge(&self.own, neighbour);
            }
        }
        Ok(if all { Taken::All } else { Taken::Part })
    }

    fn poll(&mut self, _now: Time) -> Result<Progress, Trouble> {
        for neighbour in self.neighbours.iter_mut().flatten() {
            neighbour.news = neighbour.segment.news().load(Ordering::Relaxed);
        }
        fence(Ordering::Acquire);
        self.check_told()?;
        let mut progress = Progress::Idle;
        if self.pushing > 0 {
            for index in 0..self.outgoing.len() {
                let before = self.outgoing[index].next;
                let channel = (index % self.layout.channels) as u16;
                self.push(index / self.layout.channels, channel, index);
                if self.outgoing[index].next != before {
                    progress = Progress::Busy;
                }
            }
        }
        Ok(progress)
    }

    fn end(&mut self) -> Progress {
        let unread = |out: &Outgoing| out.left_there > out.consumed;
        let mut withdrawn = false;
        for (index, out) in self.outgoing.iter_mut().enumerate() {
            if out.pushing.take_if(|pushing| pushing.lent.is_none()).is_some() {
                self.pushing -= 1;
                withdrawn = true;
            }
            if unread(out) {
                let channel = (index % self.layout.channels) as u16;
                Arena::look(
                    &self.neighbours[index / self.layout.channels],
                    self.own_place,
                    channel,
                    out,
                );
                withdrawn |= unread(out);
            }
        }
        if withdrawn {
            // Whoever reads them now finds this afterwards, and uses nothing of what it read.
            self.own.withdraw();
        }
        self.own.set_status(&self.call, board::ENDED, false);
        self.let_go();
        Progress::Idle
    }

    fn lend(&mut self, _: Rank, view: &View) -> Result<u32, Trouble> {
        let unusable = |refusal| Trouble::Unusable { buffer: 0, refusal };
        let mut view = view.clone();
        let base = base_of(&mut view).map_err(unusable)?;
        Ok(self.lent.insert(Beside {
            view,
            base,
            left_there: None,
        }))
    }

    fn take_back(&mut self, _: Rank, buffer: u32) -> Progress {
        let mut withdrawn = false;
        if self.pushing > 0 {
            for out in &mut self.outgoing {
                if out.pushing.take_if(|pushing| pushing.lent == Some(buffer)).is_some() {
                    self.pushing -= 1;
                    withdrawn = true;
                }
            }
        }
        if let Some((index, end)) = self.lent.remove(buffer).and_then(|beside| beside.left_there) {
            let (place, channel) = (index / self.layout.channels, index % self.layout.channels);
            let out = &mut self.outgoing[index];
            if out.consumed < end {
                Arena::look(&self.neighbours[place], self.own_place, channel as u16, out);
            }
            withdrawn |= out.consumed < end;
        }
        if withdrawn {
            self.own.withdraw();
        }
        Progress::Idle
    }
}

/// Where a view begins. It keeps its key only where neighbours can map the memory.
fn base_of(view: &mut View) -> Result<Base, Refusal> {
    let host = view.memory.as_any().downcast_ref::<HostMemory>();
    let host = host.ok_or(Refusal::Unsupported)?;
    let end = view.offset.checked_add(view.len);
    if end.is_none_or(|end| end > weft_protocol::Memory::len(host)) {
        return Err(Refusal::OutOfBounds);
    }
    if host.file().is_none() {
        view.key = None;
    }
    // SAFETY: within the memory, as just checked.
    Ok(Base(unsafe { host.as_ptr().add(view.offset as usize) }))
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Arena(rank {} of {} here, in {:?})",
            self.ranks[self.own_place].0,
            self.ranks.len(),
            self.call
        )
    }
}

fn layout(ranks: usize, options: ArenaOptions) -> Result<Layout, ArenaError> {
    let ArenaOptions {
        channels,
        slots,
        slot_bytes,
        ..
    } = options;
    if channels == 0 || !slots.is_power_of_two() || slot_bytes == 0 || !slot_bytes.is_multiple_of(64) || ranks == 0 {
        return Err(ArenaError::Dimensions);
    }
    Ok(Layout {
        ranks,
        channels: usize::from(channels),
        slots: slots as usize,
        slot_bytes: slot_bytes as usize,
    })
}
