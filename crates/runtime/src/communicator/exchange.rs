//! A rank's exchange: the arena for ranks on this host, parcels for all others.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::arena::{Arena, Ear};
use weft_plan::{Rank, Time};
use weft_protocol::Progress;
use weft_protocol::group::{
    Abort, Board, CallRecord, Exchange, Lane, MessageHead, OfferId, Offered, Piece, Sink, Status, Taken, Trouble, View,
    Waiting,
};

use super::board::{ask, tell_abort};
use super::far::Far;

#[derive(Debug)]
pub(super) struct GroupExchange {
    rank: Rank,
    /// By rank: whether the arena reaches it.
    near: Vec<bool>,
    arena: Option<Arena>,
    far: Far,
    channels: u16,
    /// By which whoever rests in the arena hears of what comes from far.
    ear: Arc<Ear>,
}

impl GroupExchange {
    pub(super) fn new(rank: Rank, near: Vec<bool>, arena: Option<Arena>, far: Far, channels: u16) -> GroupExchange {
        GroupExchange {
            rank,
            near,
            arena,
            far,
            channels,
            ear: Arc::default(),
        }
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    /// Whether looking at a lane takes more than looking at memory.
    pub(super) fn is_far(&self) -> bool {
        self.far.is_used()
    }

    /// Whether a rank is known to be gone, of those that are waited for. The others may go when they are done.
    pub(super) fn check_lost(&self, awaited: impl Fn(Rank) -> bool) -> Result<(), Trouble> {
        self.far.check_lost(awaited)
    }

    /// Whether a rank has told everybody that a call has failed.
    pub(super) fn check_told(&mut self) -> Result<(), Trouble> {
        if self.far.is_used()
            && let Some(abort) = self.far.board.abort()
        {
            return Err(Trouble::Aborted(Box::new(abort)));
        }
        self.arena.as_mut().map_or(Ok(()), Arena::check_told)
    }

    /// Sleeps until something may have come, at most so long.
    pub(super) fn rest(&mut self, now: Time, max: Duration) {
        match (&mut self.arena, self.far.is_used()) {
            (Some(arena), false) => arena.rest(max),
            (Some(arena), true) => {
                if let Some(heard) = self.far.listen(&self.ear) {
                    arena.rest_hearing(&self.ear, heard, max);
                }
            }
            (None, _) => self.far.rest(now.saturating_add(max.into())),
        }
    }

    /// Forgets what ranks have answered before: it may be old.
    pub(super) fn forget_answers(&self) {
        self.far.board.forget_answers();
    }

    /// Asks all ranks what they have called, where that is not to be seen.
    pub(super) fn ask_all(&self) {
        self.far.say(None, &ask());
    }

    fn arena_of(&mut self, rank: Rank) -> Option<&mut Arena> {
        let near = self.near.get(rank.0 as usize).copied().unwrap_or(false);
        self.arena.as_mut().filter(|_| near)
    }
}

impl Board for GroupExchange {
    fn publish(&mut self, waiting: Waiting) {
        self.far.board.set_waiting(waiting);
        if let Some(arena) = &mut self.arena {
            arena.publish(waiting);
        }
    }

    fn status(&mut self, of: Rank) -> Option<Status> {
        let near = self.arena_of(of).and_then(|arena| arena.status(of));
        near.or_else(|| self.far.board.status(of))
    }

    fn pulse(&mut self, of: Rank) -> u64 {
        match self.arena_of(of) {
            Some(arena) => arena.pulse(of),
            None => self.far.board.pulse(of),
        }
    }

    fn abort(&mut self, abort: &Abort) {
        self.far.board.set_abort(abort);
        self.far.say(None, &tell_abort(abort));
        if let Some(arena) = &mut self.arena {
            arena.abort(abort);
        }
    }
}

impl Exchange for GroupExchange {
    fn channels(&self) -> u16 {
        self.channels
    }

    fn begin(&mut self, call: &CallRecord, buffers: &mut Vec<View>) -> Result<(), Trouble> {
        // Where all see each other's segments, nobody asks.
        if self.far.is_used() {
            self.far.begin_status(call);
        }
        match &mut self.arena {
            Some(arena) => {
                if self.far.is_used() {
                    self.far.begin(buffers.iter().cloned());
                }
                let begun = arena.begin(call, buffers);
                if begun.is_err() {
                    self.far.begin(std::iter::empty());
                }
                begun
            }
            None => {
                self.far.begin(buffers.drain(..));
                Ok(())
            }
        }
    }

    fn buffer(&self, place: u32) -> &View {
        match &self.arena {
            Some(arena) => arena.buffer(place),
            None => self.far.buffer(place),
        }
    }

    fn offer(&mut self, lane: Lane, head: &MessageHead, from: Piece) -> Result<Offered, Trouble> {
        match self.arena_of(lane.peer) {
            Some(arena) => arena.offer(lane, head, from),
            None => self.far.offer(lane, head, from),
        }
    }

    fn settled(&mut self, lane: Lane, offer: OfferId) -> bool {
        match self.arena_of(lane.peer) {
            Some(arena) => arena.settled(lane, offer),
            None => self.far.settled(lane, offer),
        }
    }

    fn take(&mut self, lane: Lane, head: &MessageHead, sink: &Sink<'_>) -> Result<Taken, Trouble> {
        match self.arena_of(lane.peer) {
            Some(arena) => arena.take(lane, head, sink),
            None => self.far.take(lane, head, sink),
        }
    }

    fn poll(&mut self, now: Time) -> Result<Progress, Trouble> {
        if let Some(abort) = self.far.board.abort() {
            return Err(Trouble::Aborted(Box::new(abort)));
        }
        let near = match &mut self.arena {
            Some(arena) => arena.poll(now)?,
            None => Progress::Idle,
        };
        if !self.far.is_used() {
            return Ok(near);
        }
        match (near, self.far.poll()?) {
            (Progress::Idle, Progress::Idle) => Ok(Progress::Idle),
            _ => Ok(Progress::Busy),
        }
    }

    fn end(&mut self) -> Progress {
        if self.far.is_used() {
            self.far.board.set_ended();
        }
        if self.far.end() == Progress::Busy {
            return Progress::Busy;
        }
        match &mut self.arena {
            Some(arena) => arena.end(),
            None => Progress::Idle,
        }
    }

    fn lend(&mut self, peer: Rank, view: &View) -> Result<u32, Trouble> {
        match self.arena_of(peer) {
            Some(arena) => arena.lend(peer, view),
            None => Ok(self.far.lend(view)),
        }
    }

    fn take_back(&mut self, peer: Rank, buffer: u32) -> Progress {
        match self.arena_of(peer) {
            Some(arena) => arena.take_back(peer, buffer),
            None => self.far.take_back(buffer),
        }
    }
}
