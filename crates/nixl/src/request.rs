//! A transfer as NIXL has it: prepared once, posted as often as one likes, asked for its end, released.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weft::{Direction, Memory, Peer, Prepared, Remote, Span, Spans, Transfer};

use crate::engine::{Engine, Metadata, Own, Their};
use crate::trouble::Trouble;

/// Bytes here and bytes there.
#[derive(Clone, Debug)]
pub struct Pairing<'a> {
    pub here: (&'a Metadata, usize),
    pub there: (&'a Metadata, usize),
    pub len: usize,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub direction: Direction,
    pub agent: &'a str,
    pub notification: Option<&'a [u8]>,
}

#[derive(Debug)]
pub struct Request {
    work: Work,
    under_way: Mutex<UnderWay>,
}

#[derive(Debug)]
enum Work {
    There(Box<There>),
    Here(Here),
}

/// With another agent.
#[derive(Debug)]
struct There {
    peer: Peer,
    direction: Direction,
    legs: Vec<Leg>,
    /// For the notification that comes with it.
    prepared: Mutex<(Option<Vec<u8>>, Prepared)>,
}

/// Within this one.
#[derive(Debug)]
struct Here {
    moves: Vec<Move>,
    /// Where one side is a device's.
    copies: Vec<Prepared>,
}

/// Spans of two registrations.
#[derive(Debug)]
struct Leg {
    local: Memory,
    remote: Remote,
    here: Spans,
    there: Spans,
}

/// A copy within host memory.
#[derive(Debug)]
struct Move {
    from: Arc<Own>,
    from_offset: u64,
    to: Arc<Own>,
    to_offset: u64,
    len: usize,
}

#[derive(Debug, Default)]
struct UnderWay {
    transfers: Vec<Transfer>,
    /// How long the longest of them took, when all have ended.
    took: Option<Duration>,
    /// What this agent is to be told by itself at the end.
    tell_self: Option<Vec<u8>>,
    posted: bool,
}

/// What a call says of a request that has not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    UnderWay,
    Done,
}

impl Request {
    pub fn prepare<'a>(
        engine: &Engine,
        wanted: &Wanted<'_>,
        pairings: impl Iterator<Item = Result<Pairing<'a>, Trouble>>,
    ) -> Result<Request, Trouble> {
        let work = match engine.is_self(wanted.agent) {
            true => here(engine, wanted, pairings)?,
            false => there(engine, wanted, pairings)?,
        };
        Ok(Request {
            work,
            under_way: Mutex::default(),
        })
    }

    pub fn post(&self, engine: &Engine, notification: Option<&[u8]>) -> Result<Stage, Trouble> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if under_way.transfers.iter().any(|transfer| !transfer.is_ended()) {
            return Err(Trouble::UnderWay);
        }
        *under_way = UnderWay::default();
        match &self.work {
            Work::There(there) => under_way.transfers.push(there.post(notification)?),
            Work::Here(here) => {
                for one in &here.moves {
                    one.make()?;
                }
                for copy in &here.copies {
                    under_way.transfers.push(copy.post()?);
                }
                under_way.tell_self = notification.map(<[u8]>::to_vec);
            }
        }
        under_way.posted = true;
        under_way.look(engine)
    }

    pub fn check(&self, engine: &Engine) -> Result<Stage, Trouble> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        match under_way.posted {
            true => under_way.look(engine),
            false => Err(Trouble::NotPosted),
        }
    }

    /// From the post to the end, of the last post that has ended well.
    pub fn took(&self) -> Option<Duration> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner).took
    }

    /// Calls off what is under way, and waits until nobody touches its memory any more. That comes by its deadline at the latest.
    pub fn end(&self) -> Result<(), Trouble> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        under_way.tell_self = None;
        for transfer in &under_way.transfers {
            if !transfer.is_ended() {
                transfer.cancel();
            }
        }
        for transfer in &under_way.transfers {
            // Whether anything is still under way is not known then. However else it ends, it ends.
            if let Err(error @ (weft::Error::Stopped | weft::Error::Forked(_))) = transfer.wait() {
                return Err(error.into());
            }
        }
        Ok(())
    }
}

impl There {
    fn post(&self, notification: Option<&[u8]>) -> Result<Transfer, Trouble> {
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        if prepared.0.as_deref() != notification {
            let described = describe(&self.peer, self.direction, &self.legs, notification)?;
            *prepared = (notification.map(<[u8]>::to_vec), described);
        }
        Ok(prepared.1.post()?)
    }
}

impl UnderWay {
    fn look(&mut self, engine: &Engine) -> Result<Stage, Trouble> {
        let mut failed = None;
        let mut took = Duration::ZERO;
        for transfer in &self.transfers {
            match transfer.poll() {
                None => return Ok(Stage::UnderWay),
                Some(Err(error)) => failed = Some(error),
                Some(Ok(summary)) => took = took.max(Duration::from_nanos(summary.duration().as_ns())),
            }
        }
        // Only when all have ended is the memory free for other use.
        if let Some(error) = failed {
            return Err(error.into());
        }
        self.took = Some(took);
        if let Some(message) = self.tell_self.take() {
            engine.tell_self(message)?;
        }
        Ok(Stage::Done)
    }
}

impl Move {
    fn make(&self) -> Result<(), Trouble> {
        self.from.check()?;
        self.to.check()?;
        let (from, to) = (self.from.memory.as_ptr(), self.to.memory.as_ptr());
        // SAFETY: both are registered, so the bytes are there, and the offsets were found to lie inside. They may overlap.
        unsafe {
            let (from, to) = (from.add(self.from_offset as usize), to.add(self.to_offset as usize));
            std::ptr::copy(from, to, self.len);
        }
        Ok(())
    }
}

fn there<'a>(
    engine: &Engine,
    wanted: &Wanted<'_>,
    pairings: impl Iterator<Item = Result<Pairing<'a>, Trouble>>,
) -> Result<Work, Trouble> {
    let peer = engine.session(wanted.agent)?;
    let mut legs: Vec<Leg> = Vec::new();
    let mut by_pair: HashMap<(*const Own, *const Their), usize> = HashMap::new();
    for pairing in pairings {
        let Pairing { here, there, len } = pairing?;
        let (Metadata::Own(own), Metadata::Their(their)) = (here.0, there.0) else {
            return Err(Trouble::Invalid(
                "a descriptor is not of the agent that it is given for".to_owned(),
            ));
        };
        own.check()?;
        if !Engine::is_of(their, wanted.agent) {
            return Err(Trouble::Invalid(format!("a descriptor is not of {:?}", wanted.agent)));
        }
        let here = here.0.offset(here.1, len)?;
        let there = there.0.offset(there.1, len)?;
        let pair = (Arc::as_ptr(own), Arc::as_ptr(their));
        let index = match by_pair.get(&pair) {
            Some(index) => *index,
            None => {
                let remote = engine.region(their, &peer)?;
                legs.push(Leg {
                    local: own.memory.clone(),
                    remote,
                    here: Spans::new(),
                    there: Spans::new(),
                });
                by_pair.insert(pair, legs.len() - 1);
                legs.len() - 1
            }
        };
        push(&mut legs[index].here, here, len)?;
        push(&mut legs[index].there, there, len)?;
    }
    let notification = wanted.notification.map(<[u8]>::to_vec);
    let prepared = describe(&peer, wanted.direction, &legs, wanted.notification)?;
    Ok(Work::There(Box::new(There {
        peer,
        direction: wanted.direction,
        legs,
        prepared: Mutex::new((notification, prepared)),
    })))
}

/// Adds a span, unless the list would hold more bytes than can be counted.
fn push(spans: &mut Spans, offset: u64, len: usize) -> Result<(), Trouble> {
    let len = len as u64;
    if spans.bytes().checked_add(len).is_none() {
        return Err(Trouble::Invalid("the descriptors hold more than 2^64 bytes".to_owned()));
    }
    spans.push(Span { offset, len });
    Ok(())
}

fn describe(peer: &Peer, direction: Direction, legs: &[Leg], notification: Option<&[u8]>) -> Result<Prepared, Trouble> {
    let mut transfer = peer.transfer(direction);
    for leg in legs {
        transfer = transfer.leg(&leg.local, leg.here.clone(), &leg.remote, leg.there.clone());
    }
    if let Some(message) = notification {
        transfer = transfer.notify(message);
    }
    Ok(transfer.prepare()?)
}

fn here<'a>(
    engine: &Engine,
    wanted: &Wanted<'_>,
    pairings: impl Iterator<Item = Result<Pairing<'a>, Trouble>>,
) -> Result<Work, Trouble> {
    let mut moves = Vec::new();
    let mut copies: Vec<(Arc<Own>, Spans, Arc<Own>, Spans)> = Vec::new();
    for pairing in pairings {
        let Pairing { here, there, len } = pairing?;
        let (from, to) = match wanted.direction {
            Direction::Read => (there, here),
            Direction::Write => (here, there),
        };
        let (from_offset, to_offset) = (from.0.offset(from.1, len)?, to.0.offset(to.1, len)?);
        let (Metadata::Own(from), Metadata::Own(to)) = (from.0, to.0) else {
            return Err(Trouble::Invalid("a descriptor is another agent's".to_owned()));
        };
        from.check()?;
        to.check()?;
        let is_host = |own: &Own| !own.memory.as_ptr().is_null();
        if is_host(from) && is_host(to) {
            moves.push(Move {
                from: from.clone(),
                from_offset,
                to: to.clone(),
                to_offset,
                len,
            });
            continue;
        }
        let same =
            |known: &&mut (Arc<Own>, Spans, Arc<Own>, Spans)| Arc::ptr_eq(&known.0, from) && Arc::ptr_eq(&known.2, to);
        let known = match copies.iter_mut().rev().find(same) {
            Some(known) => known,
            None => {
                copies.push((from.clone(), Spans::new(), to.clone(), Spans::new()));
                copies.last_mut().expect("one was added")
            }
        };
        push(&mut known.1, from_offset, len)?;
        push(&mut known.3, to_offset, len)?;
    }
    let prepared = copies.into_iter().map(|(from, from_spans, to, to_spans)| {
        let copy = engine.agent().copy(&from.memory, &to.memory)?;
        Ok(copy.spans(from_spans, to_spans).prepare()?)
    });
    let copies = prepared.collect::<Result<Vec<_>, Trouble>>()?;
    Ok(Work::Here(Here { moves, copies }))
}
