//! What kernels ask of a network, through a proxy on the host.
//!
//! A kernel cannot post to a transport. It writes requests into a ring, and a thread of the host takes them out, in the order of their tickets, and posts them to peers on its behalf.
//! Which request may go out when, what has ended, and why nothing goes on any more is decided here, without a ring, a thread or a clock.
//!
//! **Order.** Kernels that reach their peers by loads and stores rely on fences; behind the proxy the same calls mean the same:
//!
//! - a write waits for an earlier one to the same bytes of the same peer, and for nothing else;
//! - the word of a put with a signal waits for its own bytes, and for all that was asked of the same peer before;
//! - a signal of its own, and an addition, wait for all that was written to any peer before, and for all that was asked of the same peer;
//! - a read waits for all that was written to the same peer before.
//!
//! "Before" is by tickets, so it is wider than what one thread knows: the ring does not tell which thread has asked. Signals to different peers have no order among them.
//!
//! **Failure.** A ring is memory that a kernel writes, so whatever it holds is looked at before anything is done with it. The first request that is wrong, the first that fails or is late, and the
//! first peer that is lost end the whole team: nothing is begun afterwards, and the failure is told as one word, which kernels look at while they wait.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use thiserror::Error;
use weft_plan::Time;

const WORD_BYTES: u64 = 8;

/// What the requests of a team are measured by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Ranks of the team, and those of them that are here.
    pub ranks: u32,
    pub here: Range<u32>,
    /// Of every rank.
    pub heap_bytes: u64,
    /// What a request carries with it, and what one can have of the memory that lies beside the ring.
    pub inline_bytes: u64,
    pub stage_bytes: u64,
    /// Requests under way at most.
    pub slots: u64,
    /// From when a request is taken until it has ended.
    pub deadline: Time,
}

/// A request as a kernel has written it: any numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    pub act: u32,
    /// Who asks.
    pub rank: u32,
    pub peer: u32,
    /// Where the bytes are on this side.
    pub local: u32,
    pub to: u64,
    pub from: u64,
    pub bytes: u64,
    pub word: u64,
    pub value: u64,
}

impl Request {
    pub const PUT: u32 = 1;
    pub const PUT_SIGNAL: u32 = 2;
    pub const GET: u32 = 3;
    pub const SIGNAL: u32 = 4;
    pub const FETCH_ADD: u32 = 5;

    pub const INLINE: u32 = 0;
    pub const HEAP: u32 = 1;
    pub const STAGE: u32 = 2;
}

/// Why a request is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BadRequest {
    #[error("{act} is nothing that can be asked for")]
    UnknownAct { act: u32 },
    #[error("rank {rank} is not here")]
    NotHere { rank: u32 },
    #[error("there is no rank {peer}")]
    UnknownPeer { peer: u32 },
    #[error("{local} is no place on this side")]
    UnknownPlace { local: u32 },
    #[error("{bytes} bytes do not fit where they are said to be")]
    TooLong { bytes: u64 },
    #[error("{bytes} bytes at {at} are not in a heap of {heap_bytes}")]
    OutOfBounds { at: u64, bytes: u64, heap_bytes: u64 },
    #[error("the word at {at} is not at a multiple of eight")]
    Misaligned { at: u64 },
    #[error("ticket {found} came where {expected} was to come")]
    OutOfTurn { expected: u64, found: u64 },
    #[error("more requests than the ring has slots")]
    TooMany,
}

/// Why a team is over. The first reason stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Failure {
    #[error("rank {peer} did not answer in time")]
    TimedOut { peer: u32 },
    #[error("the host has ended it")]
    Aborted,
    #[error("rank {peer} has given up")]
    GaveUp { peer: u32 },
    #[error("rank {peer} is lost")]
    Lost { peer: u32 },
    #[error("a kernel has asked for something impossible: {0}")]
    Refused(BadRequest),
    #[error("something asked of rank {peer} could not be done")]
    Broken { peer: u32 },
}

impl Failure {
    const TIMED_OUT: u64 = 1;
    const ABORTED: u64 = 2;
    const GAVE_UP: u64 = 3;
    const LOST: u64 = 4;
    const REFUSED: u64 = 5;
    const BROKEN: u64 = 6;

    /// As kernels read it: the kind, the rank that it is about, and the rank that saw it, a byte each.
    pub fn word(self, seen_by: u32) -> u64 {
        let (kind, peer) = match self {
            Failure::TimedOut { peer } => (Failure::TIMED_OUT, peer),
            Failure::Aborted => (Failure::ABORTED, seen_by),
            Failure::GaveUp { peer } => (Failure::GAVE_UP, peer),
            Failure::Lost { peer } => (Failure::LOST, peer),
            Failure::Refused(_) => (Failure::REFUSED, seen_by),
            Failure::Broken { peer } => (Failure::BROKEN, peer),
        };
        kind | u64::from(peer & 0xff) << 8 | u64::from(seen_by & 0xff) << 16
    }

    /// What a word says that a kernel, or a peer, has written; anything but zero is a failure.
    pub fn of_word(word: u64) -> Option<Failure> {
        let peer = (word >> 8 & 0xff) as u32;
        match word & 0xff {
            _ if word == 0 => None,
            Failure::TIMED_OUT => Some(Failure::TimedOut { peer }),
            Failure::ABORTED => Some(Failure::Aborted),
            Failure::LOST => Some(Failure::Lost { peer }),
            Failure::BROKEN => Some(Failure::Broken { peer }),
            // What was refused, and why, only its own proxy knows.
            _ => Some(Failure::GaveUp { peer }),
        }
    }
}

/// Bytes on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Local {
    /// In the slot of the request itself.
    Inline,
    /// In the memory beside the ring that goes with the slot.
    Stage,
    /// In the heap of a rank that is here.
    Heap { rank: u32, at: u64 },
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Write { from: Local, to: u64, bytes: u64 },
    Read { into: Local, from: u64, bytes: u64 },
    Set { word: u64, value: u64 },
    Add { word: u64, value: u64 },
}

/// Something to be done for a request. It is begun once, and ends once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    pub ticket: u64,
    pub peer: u32,
    pub work: Work,
    pub deadline: Time,
}

/// What a request still has before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The bytes, and what comes after them.
    Bytes,
    Last,
}

#[derive(Clone, Copy, Debug)]
struct Taken {
    ticket: u64,
    peer: u32,
    bytes: Option<Work>,
    last: Option<Work>,
    /// Whether the last waits for what was written to others.
    wide: bool,
    stage: Stage,
    begun: bool,
    deadline: Time,
}

/// The requests of a team that are under way.
#[derive(Debug)]
pub struct Proxy {
    shape: Shape,
    /// In the order of their tickets.
    under_way: VecDeque<Taken>,
    /// The ticket that comes next.
    next: u64,
    finished: VecDeque<(u64, u64)>,
    failure: Option<Failure>,
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} under way, {} ended, {:?}",
            self.under_way.len(),
            self.completed(),
            self.failure
        )
    }
}

impl Proxy {
    pub fn new(shape: Shape) -> Proxy {
        Proxy {
            shape,
            under_way: VecDeque::new(),
            next: 0,
            finished: VecDeque::new(),
            failure: None,
        }
    }

    pub fn failure(&self) -> Option<Failure> {
        self.failure
    }
    /// The ticket of the next request.
    pub fn next_ticket(&self) -> u64 {
        self.next
    }
    /// All requests with smaller tickets have ended.
    pub fn completed(&self) -> u64 {
        self.under_way.front().map_or(self.next, |first| first.ticket)
    }
    /// When [`expire`](Proxy::expire) has something to do, if nothing happens before.
    pub fn wake_at(&self) -> Option<Time> {
        self.under_way.iter().map(|taken| taken.deadline).min()
    }

    /// Takes the request that comes next. One that is wrong ends the team.
    pub fn offer(&mut self, ticket: u64, request: &Request, now: Time) -> Result<(), Failure> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let taken = self
            .look_at(ticket, request, now)
            .map_err(|bad| self.fail(Failure::Refused(bad)))?;
        self.under_way.push_back(taken);
        self.next += 1;
        Ok(())
    }

    fn look_at(&self, ticket: u64, request: &Request, now: Time) -> Result<Taken, BadRequest> {
        if ticket != self.next {
            let (expected, found) = (self.next, ticket);
            return Err(BadRequest::OutOfTurn { expected, found });
        }
        if ticket - self.completed() >= self.shape.slots {
            return Err(BadRequest::TooMany);
        }
        let Request {
            act,
            rank,
            peer,
            to,
            from,
            bytes,
            word,
            value,
            ..
        } = *request;
        if !self.shape.here.contains(&rank) {
            return Err(BadRequest::NotHere { rank });
        }
        if peer >= self.shape.ranks {
            return Err(BadRequest::UnknownPeer { peer });
        }
        let put = || {
            let from = self.local(request, from)?;
            self.bounds(to, bytes)?;
            Ok(Some(Work::Write { from, to, bytes }))
        };
        let set = || self.word(word).map(|()| Some(Work::Set { word, value }));
        let (bytes, last, wide) = match act {
            Request::PUT => (put()?, None, false),
            Request::PUT_SIGNAL => (put()?, set()?, false),
            Request::GET => {
                if request.local == Request::INLINE {
                    return Err(BadRequest::UnknownPlace { local: request.local });
                }
                let into = self.local(request, to)?;
                self.bounds(from, bytes)?;
                (None, Some(Work::Read { into, from, bytes }), false)
            }
            Request::SIGNAL => (None, set()?, true),
            Request::FETCH_ADD => {
                self.word(word)?;
                (None, Some(Work::Add { word, value }), true)
            }
            act => return Err(BadRequest::UnknownAct { act }),
        };
        Ok(Taken {
            ticket,
            peer,
            bytes,
            last,
            wide,
            stage: if bytes.is_some() { Stage::Bytes } else { Stage::Last },
            begun: false,
            deadline: now.saturating_add(self.shape.deadline),
        })
    }

    fn bounds(&self, at: u64, bytes: u64) -> Result<(), BadRequest> {
        let heap_bytes = self.shape.heap_bytes;
        match at.checked_add(bytes).is_some_and(|end| end <= heap_bytes) {
            true => Ok(()),
            false => Err(BadRequest::OutOfBounds { at, bytes, heap_bytes }),
        }
    }

    fn word(&self, at: u64) -> Result<(), BadRequest> {
        if !at.is_multiple_of(WORD_BYTES) {
            return Err(BadRequest::Misaligned { at });
        }
        self.bounds(at, WORD_BYTES)
    }

    fn local(&self, request: &Request, at: u64) -> Result<Local, BadRequest> {
        let Request { bytes, rank, local, .. } = *request;
        let fits = |room: u64, place| match bytes <= room {
            true => Ok(place),
            false => Err(BadRequest::TooLong { bytes }),
        };
        match local {
            Request::INLINE => fits(self.shape.inline_bytes, Local::Inline),
            Request::STAGE => fits(self.shape.stage_bytes, Local::Stage),
            Request::HEAP => self.bounds(at, bytes).map(|()| Local::Heap { rank, at }),
            local => Err(BadRequest::UnknownPlace { local }),
        }
    }

    /// Something that may begin now, and counts as begun.
    pub fn begin(&mut self) -> Option<Job> {
        if self.failure.is_some() {
            return None;
        }
        let ready = |nth: &usize| {
            let taken = &self.under_way[*nth];
            !taken.begun && !self.under_way.range(..*nth).any(|earlier| taken.waits_for(earlier))
        };
        let nth = (0..self.under_way.len()).find(ready)?;
        let taken = &mut self.under_way[nth];
        taken.begun = true;
        let work = taken.work()?;
        Some(Job {
            ticket: taken.ticket,
            peer: taken.peer,
            work,
            deadline: taken.deadline,
        })
    }

    /// A job has ended: with what the word held before, where it was an addition.
    pub fn ended(&mut self, ticket: u64, outcome: Result<u64, Failure>) {
        let Some(nth) = self
            .under_way
            .iter()
            .position(|taken| taken.ticket == ticket && taken.begun)
        else {
            return;
        };
        let value = match outcome {
            Ok(value) => value,
            Err(failure) => {
                self.fail(failure);
                return;
            }
        };
        let taken = &mut self.under_way[nth];
        if taken.stage == Stage::Bytes && taken.last.is_some() {
            taken.stage = Stage::Last;
            taken.begun = false;
            return;
        }
        self.under_way.remove(nth);
        self.finished.push_back((ticket, value));
    }

    /// A request that has ended, and what it brought: each is told once.
    pub fn take_finished(&mut self) -> Option<(u64, u64)> {
        self.finished.pop_front()
    }

    /// Looks for requests that are late.
    pub fn expire(&mut self, now: Time) {
        let late = self.under_way.iter().find(|taken| taken.deadline <= now);
        if let Some(peer) = late.map(|taken| taken.peer) {
            self.fail(Failure::TimedOut { peer });
        }
    }

    /// Ends the team, unless it is over already; tells why it is.
    pub fn fail(&mut self, failure: Failure) -> Failure {
        *self.failure.get_or_insert(failure)
    }
}

impl Taken {
    fn work(&self) -> Option<Work> {
        match self.stage {
            Stage::Bytes => self.bytes,
            Stage::Last => self.last,
        }
    }

    /// What it may still change over there.
    fn changes(&self) -> impl Iterator<Item = Range<u64>> {
        let of = |work: Option<Work>| match work? {
            Work::Write { to, bytes, .. } => Some(to..to + bytes),
            Work::Set { word, .. } | Work::Add { word, .. } => Some(word..word + WORD_BYTES),
            Work::Read { .. } => None,
        };
        let bytes = if self.stage == Stage::Bytes {
            of(self.bytes)
        } else {
            None
        };
        bytes.into_iter().chain(of(self.last))
    }

    /// Whether what comes next of this request has to come after all of an earlier one.
    fn waits_for(&self, earlier: &Taken) -> bool {
        let same = self.peer == earlier.peer;
        match self.work() {
            None => false,
            Some(Work::Write { to, bytes, .. }) => {
                let overlaps = |range: Range<u64>| range.start < to + bytes && to < range.end;
                same && earlier.changes().any(overlaps)
            }
            Some(Work::Read { .. }) => same && earlier.changes().next().is_some(),
            Some(Work::Set { .. } | Work::Add { .. }) => {
                // Words of other peers have no order among them, or a barrier would take as many round trips as there are ranks.
                let bytes = earlier.stage == Stage::Bytes;
                same && earlier.changes().next().is_some() || self.wide && bytes
            }
        }
    }
}
