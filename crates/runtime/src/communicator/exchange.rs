//! A rank's exchange: the arena for ranks on this host, parcels for all others.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use weft_fabric::arena::{Arena, Ear};
use weft_plan::{Rank, Time};
use weft_protocol::Progress;
use weft_protocol::group::{
    Abort, Board, CallRecord, Exchange, Far, Lane, MessageHead, OfferId, Offered, Piece, Sink, Status, Taken, Trouble,
    View, Waiting,
};

use super::seat::AgentSeat;
use crate::ending::remember;

#[derive(Debug)]
pub(super) struct GroupExchange {
    rank: Rank,
    /// By rank: whether the arena reaches it.
    near: Vec<bool>,
    arena: Option<Arena>,
    far: Far<AgentSeat>,
    channels: u16,
    /// By which whoever rests in the arena hears of what comes from far.
    ear: Arc<Ear>,
}

impl GroupExchange {
    pub(super) fn new(
        rank: Rank,
        near: Vec<bool>,
        arena: Option<Arena>,
        far: Far<AgentSeat>,
        channels: u16,
    ) -> GroupExchange {
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
            && let Some(abort) = self.far.told()
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
                let (heard, far) = (self.ear.heard(), &self.far);
                let mut world = far.seat().shared.lock();
                if !far.has_news(&world.core) {
                    remember(&mut world.wakers, &Waker::from(self.ear.clone()));
                    drop(world);
                    arena.rest_hearing(&self.ear, heard, max);
                }
            }
            (None, _) => {
                let (far, until) = (&self.far, now.saturating_add(max.into()));
                let shared = &far.seat().shared;
                shared.wait_until(until, |world| far.has_news(&world.core).then_some(()));
            }
        }
    }

    fn arena_of(&mut self, rank: Rank) -> Option<&mut Arena> {
        let near = self.near.get(rank.0 as usize).copied().unwrap_or(false);
        self.arena.as_mut().filter(|_| near)
    }
}

impl Board for GroupExchange {
    fn publish(&mut self, waiting: Waiting) {
        if self.far.is_used() {
            self.far.publish(waiting);
        }
        if let Some(arena) = &mut self.arena {
            arena.publish(waiting);
        }
    }

    fn status(&mut self, of: Rank) -> Option<Status> {
        let near = self.arena_of(of).and_then(|arena| arena.status(of));
        near.or_else(|| self.far.status(of))
    }

    fn pulse(&mut self, of: Rank) -> u64 {
        match self.arena_of(of) {
            Some(arena) => arena.pulse(of),
            None => self.far.pulse(of),
        }
    }

    fn forget_answers(&mut self) {
        self.far.forget_answers();
    }

    fn abort(&mut self, abort: &Abort) {
        // Of two, the first is believed, whichever way it came: what was heard in the arena goes to those who are far.
        let heard = match self.check_told() {
            Err(Trouble::Aborted(heard)) => Some(heard),
            _ => None,
        };
        let abort = heard.as_deref().unwrap_or(abort);
        self.far.abort(abort);
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
        let Some(arena) = &mut self.arena else {
            return self.far.begin(call, buffers);
        };
        // Where all see each other's segments, nobody asks.
        if self.far.is_used() {
            self.far.begin_with(call, buffers.iter().cloned());
        }
        let begun = arena.begin(call, buffers);
        if begun.is_err() {
            self.far.forget_buffers();
        }
        begun
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
        // Where nobody is far, nobody is heard from there, and a look would take the lock of what is told.
        if self.far.is_used()
            && let Some(abort) = self.far.told()
        {
            return Err(Trouble::Aborted(Box::new(abort)));
        }
        let near = match &mut self.arena {
            Some(arena) => arena.poll(now)?,
            None => Progress::Idle,
        };
        if !self.far.is_used() {
            return Ok(near);
        }
        match (near, self.far.poll(now)?) {
            (Progress::Idle, Progress::Idle) => Ok(Progress::Idle),
            _ => Ok(Progress::Busy),
        }
    }

    fn end(&mut self) -> Progress {
        if self.far.is_used() && self.far.end() == Progress::Busy {
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
            None => self.far.lend(peer, view),
        }
    }

    fn take_back(&mut self, peer: Rank, buffer: u32) -> Progress {
        match self.arena_of(peer) {
            Some(arena) => arena.take_back(peer, buffer),
            None => self.far.take_back(peer, buffer),
        }
    }
}
