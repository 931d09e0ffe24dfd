//! Transfers that no transport carries at once: through host memory on the way, piece by piece.
//!
//! Which way to go is `weft_plan::route`'s answer to what the transports say they carry. A staged transfer becomes requests to the
//! engine: each piece of it goes into a piece of the ring by the first hop, and from there to its place by the next. While one piece goes out another
//! comes in. A piece of the ring belongs to one piece of a transfer until its last hop has ended, and a hop that has ended touches nothing any more: the
//! engine promises that. Deadline, cancel and errors are those of a transfer of one hop.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use weft_plan::route::{Carrier, Distance, Journey, Kinds, NoRoute, Reach, Route, route};
use weft_plan::{Bytes, Place, PlaceKind, Spans, Time};

use super::connect::has;
use super::ring::Ring;
use super::{Core, Event, PeerError};
use crate::error::{Failure, Loss, Refusal};
use crate::leg::{Direction, Leg};
use crate::region::{Region, RegionKey, RemoteRegion};
use crate::transfer::held::Held;
use crate::transfer::{Carried, LegRange, PeerId, Request, SubmitError, Summary, TransferError, TransferId};
use crate::transport::Transport;

/// Staged transfers have this bit in their number; the engine counts up from zero.
const STAGED_BIT: u64 = 1 << 63;
/// Pieces of one transfer that may be under way, those included that go past the ring.
const PIECES_MAX: usize = 64;

/// What is under way through the ring.
#[derive(Debug, Default)]
pub(super) struct Stages {
    ring: Option<Ring>,
    transfers: BTreeMap<TransferId, Staged>,
    /// Which piece of which transfer a request of the engine carries.
    hops: BTreeMap<TransferId, (TransferId, u64)>,
    /// Transfers that have something left to begin, or to end, each in its turn.
    turn: VecDeque<TransferId>,
    /// Pieces in the ring whose next hop the engine had no room for.
    parked: VecDeque<(TransferId, u64)>,
    /// Transfers whose time has not come. They have nothing in the ring.
    held: Held,
    deadlines: BTreeSet<(Time, TransferId)>,
    next: u64,
}

#[derive(Debug)]
struct Staged {
    request: Request,
    /// How each leg goes.
    ways: Vec<Way>,
    started: Time,
    bytes_total: u64,
    bytes_done: u64,
    /// Where the next piece begins.
    leg: usize,
    at: u64,
    next_piece: u64,
    under_way: BTreeMap<u64, Piece>,
    done: Vec<LegRange>,
    failure: Option<(Failure, &'static str)>,
    setback: Option<Failure>,
    parts: u32,
    retries: u32,
    carried: Carried,
    /// It stands among those in turn.
    in_turn: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// One transport does it.
    Direct,
    /// Through the ring, which is this agent's.
    ThroughHere,
}

/// Bytes of a leg that travel together.
#[derive(Debug)]
struct Piece {
    leg: usize,
    range: Range<u64>,
    /// Where in the ring they are, and whether they have got there.
    stop: Option<Stop>,
    /// The engine's request; none while it has no room for one.
    carried_by: Option<TransferId>,
}

#[derive(Clone, Copy, Debug)]
struct Stop {
    slot: u32,
    reached: bool,
}

impl Stages {
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        deadline.into_iter().chain(self.held.next_timeout()).min()
    }

    /// Pieces of the ring that are in use.
    pub(super) fn pieces(&self) -> usize {
        self.ring.as_ref().map_or(0, Ring::in_use)
    }

    fn take_turn(&mut self, id: TransferId) {
        if let Some(staged) = self.transfers.get_mut(&id)
            && !std::mem::replace(&mut staged.in_turn, true)
        {
            self.turn.push_back(id);
        }
    }

    fn free(&mut self, slot: Option<u32>) {
        if let (Some(ring), Some(slot)) = (&mut self.ring, slot) {
            ring.give_back(slot);
        }
    }
}

impl Staged {
    fn has_more(&self) -> bool {
        self.failure.is_none() && self.leg < self.request.legs.len()
    }

    /// What it comes after has not come about.
    fn is_early(&self) -> bool {
        self.failure.is_none() && self.request.after.as_ref().is_some_and(|after| !after.is_ready())
    }

    fn is_over(&self) -> bool {
        self.under_way.is_empty() && (self.failure.is_some() || self.bytes_done == self.bytes_total)
    }

    /// The next bytes to begin with, at most so many of a leg that goes through the ring.
    fn next_range(&mut self, piece_bytes: u64) -> (usize, Range<u64>) {
        let (leg, start) = (self.leg, self.at);
        let bytes = self.request.legs[leg].bytes();
        let end = match self.ways[leg] {
            Way::Direct => bytes,
            Way::ThroughHere => bytes.min(start + piece_bytes),
        };
        (self.leg, self.at) = if end == bytes { (leg + 1, 0) } else { (leg, end) };
        self.skip_empty();
        (leg, start..end)
    }

    fn skip_empty(&mut self) {
        while self.request.legs.get(self.leg).is_some_and(|leg| leg.bytes() == 0) {
            self.leg += 1;
        }
    }

    fn outcome(mut self, now: Time) -> Result<Summary, TransferError> {
        let Some((cause, transport)) = self.failure.filter(|_| self.bytes_done < self.bytes_total) else {
            return Ok(Summary {
                bytes: self.bytes_total,
                parts: self.parts,
                retries: self.retries,
                started: self.started,
                ended: now,
                carried: self.carried,
            });
        };
        self.done.sort_by_key(|(leg, range)| (*leg, range.start));
        let mut done: Vec<LegRange> = Vec::new();
        for (leg, range) in self.done {
            match done.last_mut() {
                Some((last, before)) if *last == leg && before.end == range.start => before.end = range.end,
                _ => done.push((leg, range)),
            }
        }
        let mut undone = Vec::new();
        for (index, leg) in self.request.legs.iter().enumerate() {
            let mut at = 0;
            for (_, range) in done.iter().filter(|(of, _)| *of == index) {
                if at < range.start {
                    undone.push((index, at..range.start));
                }
                at = range.end;
            }
            if at < leg.bytes() {
                undone.push((index, at..leg.bytes()));
            }
        }
        Err(TransferError {
            peer: self.request.peer,
            cause,
            setback: self.setback.filter(|setback| *setback != cause),
            transport,
            bytes_done: self.bytes_done,
            bytes_total: self.bytes_total,
            done,
            undone,
        })
    }
}

impl<T: ?Sized + Transport> Core<T> {
    /// Lets transfers that no transport carries at once go through this memory, in pieces of `piece_bytes`, which is a power of two. It is host
    /// memory that was registered for nothing else; best such as devices reach quickly. Transfers under way keep what they have.
    pub fn stage_through(&mut self, key: &RegionKey, piece_bytes: u64) -> Result<(), Refusal> {
        let (region, remote) = self.registered(key).ok_or(Refusal::UnknownKey)?;
        let pieces = remote.len.checked_div(piece_bytes).unwrap_or(0);
        let fits = piece_bytes.is_power_of_two() && pieces > 0;
        if !fits || region.place.kind() != PlaceKind::Dram || !self.stages.transfers.is_empty() {
            return Err(Refusal::Malformed);
        }
        let pieces = u32::try_from(pieces).unwrap_or(u32::MAX);
        self.stages.ring = Some(Ring::new(region, remote, piece_bytes, pieces));
        Ok(())
    }

    /// How the legs of a request go; none where one transport carries each of them at once.
    pub(super) fn ways(&self, request: &Request) -> Result<Option<Ways>, PeerError> {
        // Host memory to that of a peer: nothing on the way could help, and every path carries it. Here there may be nothing that does.
        let is_host = |place: Place| place.kind() == PlaceKind::Dram;
        let plain =
            |leg: &Arc<Leg>| request.peer != PeerId::HERE && is_host(leg.local().place) && is_host(leg.remote().place);
        if request.legs.iter().all(plain) {
            return Ok(None);
        }
        let mut ways = Vec::with_capacity(request.legs.len());
        for leg in request.legs.iter() {
            ways.push(match plain(leg) {
                true => Way::Direct,
                false => self.way(request, leg)?,
            });
        }
        match ways.contains(&Way::ThroughHere) {
            false => Ok(None),
            true if self.stages.ring.is_none() => Err(PeerError::NoStage),
            true => Ok(Some(Ways(ways))),
        }
    }

    fn way(&self, request: &Request, leg: &Leg) -> Result<Way, NoRoute> {
        let identity = self.identity(request.peer);
        let distance = identity.map_or(Distance::Here, |identity| self.distance(identity));
        let mut carriers = Vec::new();
        for slot in &self.slots {
            let capabilities = slot.transport.capabilities();
            // What the peer does not have leads to no path, however near it is.
            if slot.reach != Reach::Here && identity.is_some_and(|identity| !has(identity, capabilities.name)) {
                continue;
            }
            // The route is looked for from where the bytes are. Where that is the peer's, this agent's own places are those over there.
            let reach = match (slot.reach, request.direction) {
                (Reach::Here, Direction::Read) if distance != Distance::Here => Reach::There,
                (reach, _) => reach,
            };
            for carriage in capabilities.carries.iter().filter(|c| c.align <= leg.align()) {
                let carrier = |from, to| Carrier {
                    transport: capabilities.name,
                    reach,
                    from: Kinds::of(&[from]),
                    to: Kinds::of(&[to]),
                    cost: carriage.cost,
                };
                let out = carrier(carriage.near, carriage.far);
                let back = carrier(carriage.far, carriage.near);
                match (slot.reach, request.direction) {
                    (Reach::Here, _) => carriers.extend([out, back]),
                    (_, Direction::Write) => carriers.push(out),
                    (_, Direction::Read) => carriers.push(back),
                }
            }
        }
        let (near, far) = (leg.local().place, leg.remote().place);
        let (from, to) = match request.direction {
            Direction::Write => (near, far),
            Direction::Read => (far, near),
        };
        let spans = leg.local_spans().count().max(leg.remote_spans().count());
        let bytes = Bytes(leg.bytes());
        let journey = Journey {
            from,
            to,
            distance,
            bytes,
            spans,
        };
        match route(&journey, &carriers)? {
            Route::Direct { .. } => Ok(Way::Direct),
            // The peer's own transports are not known here, so the stop is always this agent's.
            Route::Staged { .. } => Ok(Way::ThroughHere),
        }
    }

    pub(super) fn submit_staged(&mut self, request: Request, ways: Ways, now: Time) -> Result<TransferId, SubmitError> {
        if self.stages.transfers.len() >= self.settings.limits.max_transfers_per_peer {
            return Err(SubmitError::TooManyTransfers);
        }
        let mut bytes_total = 0u64;
        for leg in request.legs.iter() {
            bytes_total = bytes_total.checked_add(leg.bytes()).ok_or(SubmitError::TooLarge)?;
        }
        let id = TransferId(STAGED_BIT | self.stages.next);
        self.stages.next += 1;
        let mut staged = Staged {
            ways: ways.0,
            started: now,
            bytes_total,
            bytes_done: 0,
            leg: 0,
            at: 0,
            next_piece: 0,
            under_way: BTreeMap::new(),
            done: Vec::new(),
            failure: (request.deadline <= now).then_some((Failure::Expired, "none")),
            setback: None,
            parts: 0,
            retries: 0,
            carried: Carried::default(),
            in_turn: false,
            request,
        };
        staged.skip_empty();
        if staged.request.deadline != Time::MAX {
            self.stages.deadlines.insert((staged.request.deadline, id));
        }
        self.stages.transfers.insert(id, staged);
        self.stages.take_turn(id);
        Ok(id)
    }

    /// Ends a staged transfer early; tells whether it is one.
    pub(super) fn cancel_staged(&mut self, id: TransferId, now: Time) -> bool {
        if id.0 & STAGED_BIT == 0 {
            return false;
        }
        self.fail_staged(id, Failure::Cancelled, "none", now);
        true
    }

    pub(super) fn on_stages_due(&mut self, now: Time) {
        while let Some(&(at, id)) = self.stages.deadlines.first() {
            if at > now {
                return;
            }
            self.stages.deadlines.pop_first();
            self.fail_staged(id, Failure::Expired, "none", now);
        }
    }

    /// Lets those begin whose time has come.
    pub(super) fn ask_held_stages(&mut self, now: Time) {
        let Stages { held, transfers, .. } = &mut self.stages;
        let due = held.ask(now, |id| transfers.get(&id).is_some_and(Staged::is_early));
        due.into_iter().for_each(|id| self.stages.take_turn(id));
    }

    /// What is in the ring for a peer that is gone ends by itself; what has not begun ends here.
    pub(super) fn on_stages_peer_gone(&mut self, peer: PeerId, loss: Loss, now: Time) {
        let of_peer = self
            .stages
            .transfers
            .iter()
            .filter(|(_, staged)| staged.request.peer == peer);
        let ids: Vec<TransferId> = of_peer.map(|(id, _)| *id).collect();
        for id in ids {
            self.fail_staged(id, Failure::PathLost { loss, fenced: true }, "none", now);
        }
    }

    /// Goes on with what waits for room, and begins with pieces as far as the ring has some; tells whether anything was begun.
    pub(super) fn feed_stages(&mut self, now: Time) -> bool {
        if self.stages.turn.is_empty() && self.stages.parked.is_empty() {
            return false;
        }
        let mut any = false;
        for _ in 0..self.stages.parked.len() {
            if let Some((id, number)) = self.stages.parked.pop_front() {
                any |= self.go_on(id, number, now);
            }
        }
        let mut waiting = VecDeque::new();
        while let Some(id) = self.stages.turn.pop_front() {
            let Some(staged) = self.stages.transfers.get_mut(&id) else {
                continue;
            };
            staged.in_turn = false;
            if !staged.has_more() {
                self.end_if_over(id, now);
                continue;
            }
            if staged.is_early() {
                // Until then others have the ring to themselves.
                self.stages.held.add(id, now);
                continue;
            }
            staged.request.after = None;
            if staged.under_way.len() >= PIECES_MAX {
                // It takes its turn again when a piece of its own has ended.
                continue;
            }
            match self.begin_piece(id, now) {
                true => {
                    any = true;
                    self.stages.take_turn(id);
                }
                false => waiting.push_back(id),
            }
        }
        for id in waiting {
            self.stages.take_turn(id);
        }
        any
    }

    /// Begins with the next piece of a transfer; false where there is no room for it.
    fn begin_piece(&mut self, id: TransferId, now: Time) -> bool {
        let (Some(staged), Some(ring)) = (self.stages.transfers.get_mut(&id), &mut self.stages.ring) else {
            return true;
        };
        let through = staged.ways[staged.leg] == Way::ThroughHere;
        let slot = match through {
            false => None,
            true => match ring.take(staged.request.peer) {
                None => return false,
                slot => slot,
            },
        };
        let (leg_before, at_before) = (staged.leg, staged.at);
        let (leg, range) = staged.next_range(ring.piece_bytes);
        let stop = slot.map(|slot| Stop { slot, reached: false });
        match self.post_hop(id, leg, &range, stop, now) {
            Ok(carried_by) => {
                let Some(staged) = self.stages.transfers.get_mut(&id) else {
                    return true;
                };
                let number = staged.next_piece;
                staged.next_piece += 1;
                staged.parts += 1;
                let piece = Piece {
                    leg,
                    range,
                    stop,
                    carried_by: Some(carried_by),
                };
                staged.under_way.insert(number, piece);
                self.stages.hops.insert(carried_by, (id, number));
                true
            }
            Err(error) => {
                self.stages.free(slot);
                if let Some(staged) = self.stages.transfers.get_mut(&id) {
                    (staged.leg, staged.at) = (leg_before, at_before);
                }
                self.on_not_taken(id, error, now)
            }
        }
    }

    /// Hands a hop to the engine: into the ring, or out of it; or past it.
    fn post_hop(
        &mut self,
        id: TransferId,
        leg: usize,
        range: &Range<u64>,
        stop: Option<Stop>,
        now: Time,
    ) -> Result<TransferId, HopError> {
        let staged = self.stages.transfers.get(&id).ok_or(HopError::Gone)?;
        let request = &staged.request;
        let leg = &request.legs[leg];
        let (hop, direction, peer) = match stop {
            None => (Arc::clone(leg), request.direction, request.peer),
            Some(stop) => {
                let ring = self.stages.ring.as_ref().ok_or(HopError::Gone)?;
                let len = range.end - range.start;
                let at = Spans::contiguous(u64::from(stop.slot) * ring.piece_bytes, len);
                // The first hop of a write and the second of a read are between the near side and the ring.
                let near_side = (request.direction == Direction::Write) != stop.reached;
                if near_side {
                    let spans = leg.local_spans().slice(range.clone());
                    let into_ring = !stop.reached;
                    let (hop, direction) = self.own_hop(&leg.local().key, spans, at, into_ring)?;
                    (hop, direction, PeerId::HERE)
                } else if request.peer == PeerId::HERE {
                    let spans = leg.remote_spans().slice(range.clone());
                    let into_ring = !stop.reached;
                    let (hop, direction) = self.own_hop(&leg.remote().key, spans, at, into_ring)?;
                    (hop, direction, PeerId::HERE)
                } else {
                    let spans = leg.remote_spans().slice(range.clone());
                    let hop = Leg::new(ring.region.clone(), at, leg.remote().clone(), spans);
                    (
                        Arc::new(hop.map_err(|_| HopError::Gone)?),
                        request.direction,
                        request.peer,
                    )
                }
            }
        };
        let hop = Request::new(peer, direction, Arc::from([hop]), request.deadline).checksum(request.checksum);
        Ok(self.engine.submit(hop, now)?)
    }

    /// A hop between memory of this agent and the ring, from whichever side a transport carries it, rather the cheaper one.
    fn own_hop(
        &self,
        key: &RegionKey,
        spans: Spans,
        at: Spans,
        into_ring: bool,
    ) -> Result<(Arc<Leg>, Direction), HopError> {
        let ring = self.stages.ring.as_ref().ok_or(HopError::Gone)?;
        let (region, remote) = self.regions_of(key)?;
        let kind = region.place.kind();
        let near_ring = Leg::new(ring.region.clone(), at.clone(), remote, spans.clone()).map_err(|_| HopError::Gone)?;
        let align = near_ring.align();
        let own = self.slots.iter().filter(|slot| slot.reach == Reach::Here);
        let carriages = own.flat_map(|slot| &slot.transport.capabilities().carries);
        let time = |near: PlaceKind, far: PlaceKind| {
            let fitting = carriages
                .clone()
                .filter(|c| (c.near, c.far) == (near, far) && c.align <= align);
            fitting.map(|c| c.cost.time(Bytes(ring.piece_bytes), 1)).min()
        };
        let (from_ring, from_there) = (time(PlaceKind::Dram, kind), time(kind, PlaceKind::Dram));
        let ring_is_near = match (from_ring, from_there) {
            (Some(a), Some(b)) => a <= b,
            (a, _) => a.is_some(),
        };
        let leg = match ring_is_near {
            true => near_ring,
            false => Leg::new(region, spans, ring.remote.clone(), at).map_err(|_| HopError::Gone)?,
        };
        let direction = match into_ring == ring_is_near {
            true => Direction::Read,
            false => Direction::Write,
        };
        Ok((Arc::new(leg), direction))
    }

    fn regions_of(&self, key: &RegionKey) -> Result<(Region, RemoteRegion), HopError> {
        self.registered(key).ok_or(HopError::Refused(Refusal::Released))
    }

    /// The engine has not taken a hop. True where the transfer is done for; false where it may try again.
    fn on_not_taken(&mut self, id: TransferId, error: HopError, now: Time) -> bool {
        let failure = match error {
            HopError::Submit(SubmitError::PeerGone(loss)) => Failure::PathLost { loss, fenced: true },
            HopError::Submit(_) => return false,
            HopError::Refused(refusal) => refusal.into(),
            HopError::Gone => Refusal::Released.into(),
        };
        self.fail_staged(id, failure, "none", now);
        true
    }

    /// A request of the engine has ended; tells whether it was a hop of ours.
    pub(super) fn on_hop_ended(
        &mut self,
        hop: TransferId,
        outcome: &Result<Summary, TransferError>,
        now: Time,
    ) -> bool {
        let Some((id, number)) = self.stages.hops.remove(&hop) else {
            return false;
        };
        let Some(staged) = self.stages.transfers.get_mut(&id) else {
            return true;
        };
        let Some(mut piece) = staged.under_way.remove(&number) else {
            return true;
        };
        let slot = piece.stop.map(|stop| stop.slot);
        let last = piece.stop.is_none_or(|stop| stop.reached);
        piece.carried_by = None;
        match outcome {
            Ok(summary) => {
                staged.retries += summary.retries;
                let carried = summary.carried.iter();
                carried.for_each(|(name, bytes)| staged.carried.add(name, bytes));
                if !last && staged.failure.is_none() {
                    piece.stop = piece.stop.map(|stop| Stop { reached: true, ..stop });
                    staged.under_way.insert(number, piece);
                    self.go_on(id, number, now);
                    return true;
                }
                if last {
                    staged.bytes_done += piece.range.end - piece.range.start;
                    staged.done.push((piece.leg, piece.range));
                }
            }
            Err(error) => {
                if last {
                    staged.bytes_done += error.bytes_done;
                    let start = piece.range.start;
                    let done = error
                        .done
                        .iter()
                        .map(|(_, r)| (piece.leg, start + r.start..start + r.end));
                    staged.done.extend(done);
                }
                staged.setback = staged.setback.or(error.setback);
                let (cause, transport) = (error.cause, error.transport);
                self.fail_staged(id, cause, transport, now);
            }
        }
        // The hop has ended, so nothing reads or writes the piece of the ring any more.
        self.stages.free(slot);
        self.stages.take_turn(id);
        true
    }

    /// Hands the next hop of a piece in the ring to the engine, or lets it wait for room there; tells whether it was taken.
    fn go_on(&mut self, id: TransferId, number: u64, now: Time) -> bool {
        let Some(piece) = self.stages.transfers.get(&id).and_then(|s| s.under_way.get(&number)) else {
            return false;
        };
        let (leg, range, stop) = (piece.leg, piece.range.clone(), piece.stop);
        match self.post_hop(id, leg, &range, stop, now) {
            Ok(carried_by) => {
                self.stages.hops.insert(carried_by, (id, number));
                let staged = self.stages.transfers.get_mut(&id);
                if let Some(piece) = staged.and_then(|s| s.under_way.get_mut(&number)) {
                    piece.carried_by = Some(carried_by);
                }
                true
            }
            Err(error) => {
                if !self.on_not_taken(id, error, now) {
                    self.stages.parked.push_back((id, number));
                }
                false
            }
        }
    }

    /// Decides that a transfer fails, unless that is decided already, and recalls its hops.
    fn fail_staged(&mut self, id: TransferId, failure: Failure, transport: &'static str, now: Time) {
        let Some(staged) = self.stages.transfers.get_mut(&id).filter(|s| s.failure.is_none()) else {
            return;
        };
        staged.failure = Some((failure, transport));
        let hops: Vec<TransferId> = staged.under_way.values().filter_map(|piece| piece.carried_by).collect();
        // What waits in the ring waits no longer.
        let parked = staged.under_way.extract_if(.., |_, piece| piece.carried_by.is_none());
        let slots: Vec<Option<u32>> = parked.map(|(_, piece)| piece.stop.map(|stop| stop.slot)).collect();
        slots.into_iter().for_each(|slot| self.stages.free(slot));
        for hop in hops {
            self.engine.cancel(hop, now);
        }
        self.stages.take_turn(id);
    }

    fn end_if_over(&mut self, id: TransferId, now: Time) {
        if !self.stages.transfers.get(&id).is_some_and(Staged::is_over) {
            return;
        }
        let Some(staged) = self.stages.transfers.remove(&id) else {
            return;
        };
        self.stages.deadlines.remove(&(staged.request.deadline, id));
        let outcome = staged.outcome(now);
        self.end_announcement(id, outcome.is_ok(), now);
        self.events.push_back(Event::Ended { id, outcome });
    }
}

/// How the legs of a staged transfer go.
#[derive(Debug)]
pub(super) struct Ways(Vec<Way>);

/// Why a hop was not begun.
#[derive(Debug)]
enum HopError {
    Submit(SubmitError),
    Refused(Refusal),
    Gone,
}

impl From<SubmitError> for HopError {
    fn from(error: SubmitError) -> HopError {
        HopError::Submit(error)
    }
}
