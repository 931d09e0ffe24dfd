//! Long messages: they stay in their sender's memory, and the receiver reads them from there.
//!
//! What is copied is read straight into its place. What is combined is read piece by piece into a bounce buffer, the next piece
//! while the one before is being combined.

use std::collections::VecDeque;
use std::sync::Arc;

use weft_fabric::fork::OfProcess;
use weft_fabric::kernels::HostKernels;
use weft_plan::{Spans, Time};
use weft_protocol::group::{At, Kernels, Piece, Sink, Taken};
use weft_protocol::region::{Region, RemoteRegion};
use weft_protocol::transfer::{PeerId, Request};
use weft_protocol::{Direction, Leg};

use super::Buffers;
use crate::agent::Agent;
use crate::driver::Shared;
use crate::error::Error;
use crate::memory::Memory;
use crate::transfer::{Cell, Transfer};

/// Bytes of a bounce buffer, and how many there are.
const BOUNCE_BYTES: u64 = 512 << 10;
const BOUNCES: usize = 4;
/// Bytes that are read at a time straight into their place.
const DIRECT_BYTES: u64 = 8 << 20;
/// Pieces of one message that are being read at a time.
const DEPTH: usize = 3;
/// A call that ends earlier cancels what it reads.
const READ_MAX: Time = Time::from_secs(24 * 3600);

/// Where pieces land that are to be combined.
#[derive(Debug)]
pub(super) struct Bounces {
    agent: Agent,
    memory: Option<Memory>,
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
    transfer: Transfer,
    at: u64,
    len: u64,
    /// Where in the bounce memory it lands, unless it lands in its place.
    bounce: Option<u64>,
}

impl Bounces {
    pub(super) fn new(agent: Agent) -> Bounces {
        Bounces {
            agent,
            memory: None,
            free: Vec::new(),
        }
    }

    fn take(&mut self) -> Result<Option<(Memory, u64)>, Error> {
        let memory = match &self.memory {
            Some(memory) => memory.clone(),
            None => {
                let memory = self.agent.allocate(BOUNCES * BOUNCE_BYTES as usize)?;
                self.free = (0..BOUNCES as u64).map(|at| at * BOUNCE_BYTES).collect();
                self.memory.insert(memory).clone()
            }
        };
        Ok(self.free.pop().map(|at| (memory, at)))
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
    pub(super) fn has_news(&self) -> bool {
        self.flights.front().is_some_and(|flight| flight.transfer.is_ended())
    }

    /// Goes on as far as possible now.
    pub(super) fn advance(
        &mut self,
        shared: &Arc<Shared>,
        bounces: &mut Bounces,
        buffers: &Buffers,
        sink: &Sink<'_>,
    ) -> Result<Taken, Error> {
        let mut any = false;
        loop {
            any |= self.ask(shared, bounces, buffers, sink)?;
            let Some(flight) = self.flights.pop_front_if(|flight| flight.transfer.is_ended()) else {
                break;
            };
            any = true;
            let landed = flight.transfer.wait();
            if let Some(bounce) = flight.bounce {
                if landed.is_ok()
                    && let Some(memory) = &bounces.memory
                {
                    land(buffers, sink, memory, bounce, flight.at, flight.len);
                }
                bounces.free.push(bounce);
            }
            landed?;
            self.done += flight.len;
            if self.done == self.len {
                return Ok(Taken::All);
            }
        }
        Ok(if any { Taken::Part } else { Taken::Nothing })
    }

    /// Asks for the next pieces.
    fn ask(
        &mut self,
        shared: &Arc<Shared>,
        bounces: &mut Bounces,
        buffers: &Buffers,
        sink: &Sink<'_>,
    ) -> Result<bool, Error> {
        let mut any = false;
        while self.asked < self.len && self.flights.len() < DEPTH {
            let left = self.len - self.asked;
            let direct = match sink {
                Sink::Copy(into) => target(shared, buffers, *into),
                Sink::Combine { .. } => None,
            };
            let (region, at, len, bounce) = match direct {
                Some((region, start)) => (region, start + self.asked, left.min(DIRECT_BYTES), None),
                None => {
                    let Some((memory, at)) = bounces.take()? else { break };
                    let element = match sink {
                        Sink::Combine { how, .. } => how.size() as u64,
                        Sink::Copy(_) => 1,
                    };
                    let len = left.min(BOUNCE_BYTES / element * element);
                    (memory.inner.region.clone(), at, len, Some(at))
                }
            };
            let from = Spans::contiguous(self.start + self.asked, len);
            let leg = Leg::new(region, Spans::contiguous(at, len), self.remote.clone(), from)?;
            let transfer = read(shared, self.peer, leg)?;
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
    pub(super) fn give_up(&mut self, bounces: &mut Bounces) -> bool {
        self.asked = self.len;
        for flight in &self.flights {
            flight.transfer.cancel();
        }
        while let Some(flight) = self.flights.pop_front_if(|flight| flight.transfer.is_ended()) {
            bounces.free.extend(flight.bounce);
        }
        self.flights.is_empty()
    }
}

/// The registered memory behind a piece, and where in it the piece begins.
fn target(shared: &Arc<Shared>, buffers: &Buffers, piece: Piece) -> Option<(Region, u64)> {
    let view = buffers.of(piece);
    let (region, _) = shared.lock().core.registered(&view.key?)?;
    Some((region, view.offset + piece.offset))
}

fn read(shared: &Arc<Shared>, peer: PeerId, leg: Leg) -> Result<Transfer, Error> {
    let legs: Arc<[Arc<Leg>]> = Arc::from([Arc::new(leg)]);
    shared.act(|world, now| {
        let deadline = now.saturating_add(READ_MAX);
        let request = Request {
            peer,
            direction: Direction::Read,
            legs,
            deadline,
            checksum: false,
            tag: None,
        };
        let id = world.core.submit(request, None, now)?;
        // The call holds its buffers, and the group its bounce memory.
        let cell = Arc::new(Cell::new("".into(), Direction::Read, now, Arc::from([])));
        world.transfers.insert(id, cell.clone());
        Ok(Transfer {
            shared: OfProcess::new(shared.clone()),
            id,
            cell,
            deadline,
        })
    })
}

/// Puts a piece that has landed in a bounce buffer where the sink wants it.
fn land(buffers: &Buffers, sink: &Sink<'_>, bounce: &Memory, from: u64, at: u64, len: u64) {
    let place = |piece: Piece| {
        let view = buffers.of(piece);
        At {
            memory: &*view.memory,
            offset: view.offset + piece.offset + at,
        }
    };
    let from = At {
        memory: &*bounce.inner.host,
        offset: from,
    };
    match sink {
        Sink::Copy(into) => HostKernels.copy(from, place(*into), len),
        Sink::Combine { with, into, how } => HostKernels.combine(how, place(*with), from, place(*into), len),
    }
}
