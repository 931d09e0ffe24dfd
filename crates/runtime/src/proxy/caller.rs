//! The calls of `weft/device.cuh` for a thread of the host: the same ring, the same words, no device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use weft_fabric::cpu;
use weft_fabric::cuda::ring::{Descriptor, INLINE_BYTES, RingLayout, SLOTS, STAGE_BYTES};
use weft_fabric::cuda::{Layout, RANKS_MAX};
use weft_protocol::proxy::{BadRequest, Failure, Request};

use super::State;
use crate::error::Error;

/// Where a rank's round of a barrier is, after what the others have come to.
const ROUNDS_AT: u64 = RANKS_MAX as u64 * 8;
const BARRIER_BYTES: u64 = 128;
const BARRIERS: u64 = 64;

/// What kernels have in their device's memory: `Claims` in `device.cuh`.
#[derive(Debug)]
pub(super) struct Claims {
    head: AtomicU64,
    held: [AtomicU64; SLOTS as usize],
}

impl Default for Claims {
    fn default() -> Claims {
        Claims {
            head: AtomicU64::new(0),
            held: [const { AtomicU64::new(0) }; SLOTS as usize],
        }
    }
}

/// One rank, as one thread sees it. Places are counted from the beginning of a heap: [`data_at`](super::ProxyTeam::data_at), [`signal_at`](super::ProxyTeam::signal_at).
///
/// Every call ends by the team's deadline. After the first that fails all others fail: the team is over.
#[derive(Debug)]
pub struct Caller {
    state: Arc<State>,
    claims: Arc<Claims>,
    nth: usize,
    rank: u32,
    /// The ticket after the last that this thread has had.
    asked: u64,
}

impl Caller {
    pub(super) fn new(state: Arc<State>, claims: Arc<Claims>, nth: usize) -> Caller {
        let rank = (state.here.start + nth) as u32;
        Caller {
            state,
            claims,
            nth,
            rank,
            asked: 0,
        }
    }

    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Puts bytes of this process's own to a place in a peer's heap. They have been taken when it returns, and are there after [`quiet`](Caller::quiet).
    pub fn put(&mut self, peer: usize, to: u64, from: &[u8]) -> Result<(), Error> {
        self.put_parts(peer, to, from, None)
    }

    /// Puts, and then sets a word of the peer's: whoever has waited for the word finds the bytes.
    pub fn put_signal(&mut self, peer: usize, to: u64, from: &[u8], word: u64, value: u64) -> Result<(), Error> {
        self.put_parts(peer, to, from, Some((word, value)))
    }

    /// Puts bytes of this rank's heap, which may be read until [`quiet`](Caller::quiet).
    pub fn put_from_heap(&mut self, peer: usize, to: u64, from: u64, bytes: u64) -> Result<(), Error> {
        let asked = Descriptor {
            act: Request::PUT,
            local: Request::HEAP,
            to,
            from,
            bytes,
            ..self.descriptor(peer)
        };
        let ticket = self.claim(peer, false)?;
        self.publish(ticket, asked);
        Ok(())
    }

    fn put_parts(&mut self, peer: usize, to: u64, from: &[u8], told: Option<(u64, u64)>) -> Result<(), Error> {
        let mut at = to;
        let mut rest = from;
        loop {
            let (part, after) = rest.split_at(rest.len().min(STAGE_BYTES as usize));
            let last = after.is_empty();
            let ticket = self.claim(peer, false)?;
            let inline = part.len() as u64 <= INLINE_BYTES;
            let place = if inline {
                RingLayout::inline(ticket)
            } else {
                RingLayout::stage(ticket)
            };
            self.state.ring.write(place, part);
            let (word, value) = told.filter(|_| last).unwrap_or_default();
            let asked = Descriptor {
                act: match last && told.is_some() {
                    true => Request::PUT_SIGNAL,
                    false => Request::PUT,
                },
                local: if inline { Request::INLINE } else { Request::STAGE },
                to: at,
                bytes: part.len() as u64,
                word,
                value,
                ..self.descriptor(peer)
            };
            self.publish(ticket, asked);
            if last {
                return Ok(());
            }
            at = at.wrapping_add(part.len() as u64);
            rest = after;
        }
    }

    /// Reads from a place in a peer's heap.
    pub fn get(&mut self, peer: usize, from: u64, into: &mut [u8]) -> Result<(), Error> {
        let mut at = from;
        for part in into.chunks_mut(STAGE_BYTES as usize) {
            let ticket = self.claim(peer, true)?;
            let asked = Descriptor {
                act: Request::GET,
                local: Request::STAGE,
                from: at,
                bytes: part.len() as u64,
                ..self.descriptor(peer)
            };
            self.publish(ticket, asked);
            self.wait_ended(ticket, peer)?;
            self.state.ring.read(RingLayout::stage(ticket), part);
            self.let_go(ticket);
            at = at.wrapping_add(part.len() as u64);
        }
        Ok(())
    }

    /// Sets a word of a peer's, after everything that was put before.
    pub fn signal(&mut self, peer: usize, word: u64, value: u64) -> Result<(), Error> {
        let ticket = self.claim(peer, false)?;
        let asked = Descriptor {
            act: Request::SIGNAL,
            word,
            value,
            ..self.descriptor(peer)
        };
        self.publish(ticket, asked);
        Ok(())
    }

    /// Adds to a word of a peer's, or of its own, after everything that was put before, and tells what it was.
    pub fn fetch_add(&mut self, peer: usize, word: u64, value: u64) -> Result<u64, Error> {
        let ticket = self.claim(peer, true)?;
        let asked = Descriptor {
            act: Request::FETCH_ADD,
            word,
            value,
            ..self.descriptor(peer)
        };
        self.publish(ticket, asked);
        self.wait_ended(ticket, peer)?;
        let before = self.state.ring.load(RingLayout::ended(ticket) + 8);
        self.let_go(ticket);
        Ok(before)
    }

    /// Waits until a word of this rank's own heap holds at least `value`; `peer` is who is expected to set it. To wait for what is no word of it ends the team, as any other call that cannot be.
    pub fn wait(&mut self, word: u64, value: u64, peer: usize) -> Result<(), Error> {
        self.state.check()?;
        let heap_bytes = self.state.layout.bytes;
        let bad = match word.checked_add(8).is_some_and(|end| end <= heap_bytes) {
            false => Some(BadRequest::OutOfBounds {
                at: word,
                bytes: 8,
                heap_bytes,
            }),
            true => (!word.is_multiple_of(8)).then_some(BadRequest::Misaligned { at: word }),
        };
        if let Some(bad) = bad {
            let failure = Failure::Refused(bad);
            self.give_up(failure);
            return Err(Error::Team(Box::new(self.state.failed(failure, None))));
        }
        let heap = self.state.heaps[self.nth].clone();
        self.look_until(peer, || heap.load(word) >= value)
    }

    /// What this thread has put is there, for everybody who hears of it later.
    pub fn quiet(&mut self) -> Result<(), Error> {
        self.state.check()?;
        self.wait_completed(self.asked, self.rank())?;
        self.state.check()
    }

    /// All ranks meet, at one of 64 barriers: what each did before is seen by all afterwards.
    pub fn barrier(&mut self, which: u64) -> Result<(), Error> {
        self.state.check()?;
        if which >= BARRIERS {
            return Err(Error::Formation(format!(
                "there is no barrier {which}, only {BARRIERS}"
            )));
        }
        let words = self.state.layout.barriers_at + which * BARRIER_BYTES;
        let heap = self.state.heaps[self.nth].clone();
        let round = heap.load(words + ROUNDS_AT) + 1;
        heap.store(words + ROUNDS_AT, round);
        for peer in 0..self.state.ranks {
            self.signal(peer, words + u64::from(self.rank) * 8, round)?;
        }
        for peer in 0..self.state.ranks {
            self.look_until(peer, || heap.load(words + peer as u64 * 8) >= round)?;
        }
        Ok(())
    }

    fn descriptor(&self, peer: usize) -> Descriptor {
        Descriptor {
            rank: self.rank,
            peer: u32::try_from(peer).unwrap_or(u32::MAX),
            ..Descriptor::default()
        }
    }

    /// A ticket, and with it a slot, which is waited for while the ring is full.
    fn claim(&mut self, peer: usize, brings: bool) -> Result<u64, Error> {
        self.state.check()?;
        let ticket = self.claims.head.fetch_add(1, Ordering::Relaxed);
        if ticket >= SLOTS {
            self.wait_completed(ticket - SLOTS + 1, peer)?;
            let claims = self.claims.clone();
            let held = &claims.held[(ticket % SLOTS) as usize];
            self.look_until(peer, || held.load(Ordering::Acquire) == 0)?;
        }
        if brings {
            self.claims.held[(ticket % SLOTS) as usize].store(1, Ordering::Relaxed);
        }
        Ok(ticket)
    }

    fn publish(&mut self, ticket: u64, asked: Descriptor) {
        let at = RingLayout::descriptor(ticket);
        self.state.ring.write(at + 8, &asked.to_bytes());
        self.state.ring.store(at, ticket + 1);
        self.asked = ticket + 1;
    }

    fn let_go(&self, ticket: u64) {
        self.claims.held[(ticket % SLOTS) as usize].store(0, Ordering::Release);
    }

    fn wait_ended(&self, ticket: u64, peer: usize) -> Result<(), Error> {
        let ring = &self.state.ring;
        self.look_until(peer, || ring.load(RingLayout::ended(ticket)) == ticket + 1)
    }

    fn wait_completed(&self, number: u64, peer: usize) -> Result<(), Error> {
        let ring = &self.state.ring;
        self.look_until(peer, || ring.load(RingLayout::COMPLETED_AT) >= number)
    }

    /// Looks until there is what it waits for, the team is over, or its own deadline: then `peer` is to blame.
    fn look_until(&self, peer: usize, look: impl Fn() -> bool) -> Result<(), Error> {
        let began = Instant::now();
        while !look() {
            self.state.check()?;
            if began.elapsed() >= self.state.deadline {
                self.give_up(Failure::TimedOut { peer: peer as u32 });
                return self.state.check();
            }
            cpu::look_again();
        }
        Ok(())
    }

    /// Writes a failure where the proxy finds it, and tells the others. The first stays.
    fn give_up(&self, failure: Failure) {
        let heap = &self.state.heaps[self.nth];
        let _ = heap.memory.compare_swap(Layout::FAILED_AT, 0, failure.word(self.rank));
    }
}
