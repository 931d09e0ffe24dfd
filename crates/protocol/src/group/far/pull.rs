//! Long messages: they stay in their sender's memory, and the receiver reads them from there.
//!
//! What is copied is read straight into its place. What is combined is read piece by piece into a bounce buffer, the next piece
//! while the one before is being combined.

use std::collections::VecDeque;
use std::sync::Arc;

use weft_plan::{Spans, Time};

use super::Buffers;
use crate::group::{At, Kernels, Notes, Piece, Seat, Sink, Taken};
use crate::leg::{Direction, Leg};
use crate::region::{Region, RemoteRegion};
use crate::transfer::{PeerId, Request, TransferId};

/// Bytes of a bounce buffer, and how many there are.
const BOUNCE_BYTES: u64 = 512 << 10;
const BOUNCES: usize = 4;
/// Bytes that are read at a time straight into their place.
const DIRECT_BYTES: u64 = 8 << 20;
/// Pieces of one message that are being read at a time.
const DEPTH: usize = 3;
/// A call that ends earlier cancels what it reads.
const READ_MAX: Time = Time::from_secs(24 * 3600);

/// A message, or its sender, is gone.
#[derive(Debug)]
pub(super) struct Unreadable;

/// Where pieces land that are to be combined.
#[derive(Debug)]
pub(super) struct Bounces<H> {
    memory: Option<H>,
    free: Vec<u64>,
}

/// A message that is being read.
#[derive(Debug)]
pub(super) struct Pull {
    peer: PeerId,
    remote: RemoteRegion,
    /// Where in the remote region it begins.
    start: u64,
    len: u64,
    asked: u64,
    done: u64,
    flights: VecDeque<Flight>,
    /// The number of the buffer that it ends up in.
    pub(super) into: u32,
}

#[derive(Debug)]
struct Flight {
    transfer: TransferId,
    at: u64,
    len: u64,
    /// Where in the bounce memory it lands, unless it lands in its place.
    bounce: Option<u64>,
}

impl<H> Bounces<H> {
    pub(super) fn new() -> Bounces<H> {
        Bounces {
            memory: None,
            free: Vec::new(),
        }
    }

    fn take<S: Seat<Held = H>>(&mut self, seat: &S) -> Result<Option<(Region, u64)>, Unreadable> {
        if self.memory.is_none() {
            let memory = seat.allocate(BOUNCES * BOUNCE_BYTES as usize);
            self.memory = Some(memory.ok_or(Unreadable)?);
            self.free = (0..BOUNCES as u64).map(|at| at * BOUNCE_BYTES).collect();
        }
        let region = self.memory.as_ref().map(S::region);
        Ok(region.and_then(|region| Some((region.clone(), self.free.pop()?))))
    }
}

impl Pull {
    /// `None` where the message does not lie in the region.
    pub(super) fn new(peer: PeerId, remote: RemoteRegion, start: u64, len: u64, into: u32) -> Option<Pull> {
        let end = start.checked_add(len)?;
        (end <= remote.len).then_some(Pull {
            peer,
            remote,
            start,
            len,
            asked: 0,
            done: 0,
            flights: VecDeque::new(),
            into,
        })
    }

    /// Whether the oldest piece that is being read has come.
    pub(super) fn has_news(&self, notes: &Notes) -> bool {
        self.flights
            .front()
            .is_some_and(|flight| notes.has_ended(flight.transfer))
    }

    /// Goes on as far as possible now.
    pub(super) fn advance<S: Seat>(
        &mut self,
        seat: &S,
        bounces: &mut Bounces<S::Held>,
        buffers: &Buffers,
        sink: &Sink<'_>,
    ) -> Result<Taken, Unreadable> {
        let mut any = false;
        loop {
            any |= self.ask(seat, bounces, buffers, sink)?;
            let Some((flight, landed)) = self.next_ended(seat) else {
                break;
            };
            any = true;
            if let Some(bounce) = flight.bounce {
                if let (true, Some(memory)) = (landed, &bounces.memory) {
                    let from = At {
                        memory: &*S::region(memory).memory,
                        offset: bounce,
                    };
                    land(seat.kernels(), buffers, sink, from, flight.at, flight.len);
                }
                bounces.free.push(bounce);
            }
            if !landed {
                return Err(Unreadable);
            }
            self.done += flight.len;
            if self.done == self.len {
                return Ok(Taken::All);
            }
        }
        Ok(if any { Taken::Part } else { Taken::Nothing })
    }

    /// The oldest piece, once it has been read or cannot be.
    fn next_ended<S: Seat>(&mut self, seat: &S) -> Option<(Flight, bool)> {
        let transfer = self.flights.front()?.transfer;
        let landed = seat.notes(|notes| notes.take_ended(transfer))?;
        Some((self.flights.pop_front()?, landed))
    }

    /// Asks for the next pieces.
    fn ask<S: Seat>(
        &mut self,
        seat: &S,
        bounces: &mut Bounces<S::Held>,
        buffers: &Buffers,
        sink: &Sink<'_>,
    ) -> Result<bool, Unreadable> {
        let mut any = false;
        while self.asked < self.len && self.flights.len() < DEPTH {
            let left = self.len - self.asked;
            let direct = match sink {
                Sink::Copy(into) => target(seat, buffers, *into),
                Sink::Combine { .. } => None,
            };
            let (region, at, len, bounce) = match direct {
                Some((region, start)) => (region, start + self.asked, left.min(DIRECT_BYTES), None),
                None => {
                    let Some((region, at)) = bounces.take(seat)? else {
                        break;
                    };
                    let element = match sink {
                        Sink::Combine { how, .. } => how.size() as u64,
                        Sink::Copy(_) => 1,
                    };
                    let len = left.min(BOUNCE_BYTES / element * element);
                    (region, at, len, Some(at))
                }
            };
            let from = Spans::contiguous(self.start + self.asked, len);
            let leg = Leg::new(region, Spans::contiguous(at, len), self.remote.clone(), from);
            let read = leg.ok().and_then(|leg| read(seat, self.peer, leg));
            let Some(transfer) = read else {
                bounces.free.extend(bounce);
                return Err(Unreadable);
            };
            self.flights.push_back(Flight {
                transfer,
                at: self.asked,
                len,
                bounce,
            });
            self.asked += len;
            any = true;
        }
        Ok(any)
    }

    /// Gives up. Whether nothing is under way any more.
    pub(super) fn give_up<S: Seat>(&mut self, seat: &S, bounces: &mut Bounces<S::Held>) -> bool {
        if self.flights.is_empty() {
            return true;
        }
        self.asked = self.len;
        seat.act(|core, now| {
            let under_way = self.flights.iter().map(|flight| flight.transfer);
            under_way.for_each(|transfer| core.cancel(transfer, now));
        });
        while let Some((flight, _)) = self.next_ended(seat) {
            bounces.free.extend(flight.bounce);
        }
        self.flights.is_empty()
    }
}

/// The registered memory behind a piece, and where in it the piece begins.
fn target<S: Seat>(seat: &S, buffers: &Buffers, piece: Piece) -> Option<(Region, u64)> {
    let view = buffers.of(piece);
    let key = view.key?;
    let (region, _) = seat.look(|core| core.registered(&key))?;
    Some((region, view.offset + piece.offset))
}

fn read<S: Seat>(seat: &S, peer: PeerId, leg: Leg) -> Option<TransferId> {
    let legs: Arc<[Arc<Leg>]> = Arc::from([Arc::new(leg)]);
    seat.act(|core, now| {
        let request = Request::new(peer, Direction::Read, legs, now.saturating_add(READ_MAX));
        let id = core.submit(request, None, now).ok()?;
        seat.notes(|notes| notes.expect(id));
        Some(id)
    })
}

/// Puts a piece that has landed in a bounce buffer where the sink wants it.
fn land<K: Kernels>(kernels: &K, buffers: &Buffers, sink: &Sink<'_>, from: At<'_>, at: u64, len: u64) {
    let place = |piece: Piece| {
        let view = buffers.of(piece);
        At {
            memory: &*view.memory,
            offset: view.offset + piece.offset + at,
        }
    };
    match sink {
        Sink::Copy(into) => kernels.copy(from, place(*into), len),
        Sink::Combine { with, into, how } => kernels.combine(how, place(*with), from, place(*into), len),
    }
}
