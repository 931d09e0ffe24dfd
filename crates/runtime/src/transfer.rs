//! The handle of a transfer: poll it, wait for it, or await it.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use weft_plan::Time;
use weft_protocol::Direction;
use weft_protocol::transfer::{Summary, TransferId};

use crate::driver::Shared;
use crate::error::Error;
use crate::memory::Registered;

/// A transfer under way. It goes on by itself; dropping the handle does not end it.
#[derive(Clone, Debug)]
#[must_use = "a transfer that nobody looks at may fail without anybody knowing"]
pub struct Transfer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) id: TransferId,
    pub(crate) cell: Arc<Cell>,
    pub(crate) deadline: Time,
}

/// Where the outcome arrives.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) peer: Arc<str>,
    pub(crate) direction: Direction,
    pub(crate) started: Time,
    /// Registered until the transfer has ended and nobody asks about it any more.
    _memory: Arc<[Arc<Registered>]>,
    ended: AtomicBool,
    slot: Mutex<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    outcome: Option<Result<Summary, Error>>,
    /// Every clone of the handle may be awaited.
    wakers: Vec<Waker>,
}

impl Cell {
    pub(crate) fn new(peer: Arc<str>, direction: Direction, started: Time, memory: Arc<[Arc<Registered>]>) -> Cell {
        Cell {
            peer,
            direction,
            started,
            _memory: memory,
            ended: AtomicBool::new(false),
            slot: Mutex::default(),
        }
    }

    pub(crate) fn end(&self, outcome: Result<Summary, Error>) -> Vec<Waker> {
        let mut slot = self.lock();
        slot.outcome = Some(outcome);
        self.ended.store(true, Ordering::Release);
        std::mem::take(&mut slot.wakers)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Transfer {
    /// Has it ended? Makes progress while asking, so that polling in a loop is a way to wait.
    pub fn poll(&self) -> Option<Result<Summary, Error>> {
        if !self.is_ended() {
            self.shared.turn();
        }
        self.outcome()
    }

    pub fn is_ended(&self) -> bool {
        self.cell.ended.load(Ordering::Acquire)
    }

    /// Waits for the end, which comes at the deadline at the latest, whatever the peer does.
    pub fn wait(&self) -> Result<Summary, Error> {
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            // The deadline is the engine's to enforce; the margin only keeps this loop from spinning on it.
            let until = self
                .deadline
                .saturating_add(Time::from_ms(100))
                .max(self.shared.clock.now().saturating_add(Time::from_ms(100)));
            self.shared.wait_until(until, |_| self.is_ended().then_some(()));
            if self.shared.is_stopped() && !self.is_ended() {
                return Err(Error::Stopped);
            }
        }
    }

    /// Waits for the end, but no longer than `timeout`; `None` means that the transfer is still under way.
    pub fn wait_for(&self, timeout: Duration) -> Option<Result<Summary, Error>> {
        if !self.is_ended() {
            let until = self.shared.clock.now().saturating_add(timeout.into());
            self.shared.wait_until(until, |_| self.is_ended().then_some(()));
        }
        self.outcome()
    }

    /// Ends the transfer early. It has ended, and its memory is free for other use, once [`wait`](Transfer::wait) returns.
    pub fn cancel(&self) {
        self.shared.act(|world, now| world.core.cancel(self.id, now));
    }

    fn outcome(&self) -> Option<Result<Summary, Error>> {
        if !self.is_ended() {
            return None;
        }
        self.cell.lock().outcome.clone()
    }
}

impl Future for Transfer {
    type Output = Result<Summary, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.is_ended() {
            let mut slot = self.cell.lock();
            if slot.outcome.is_none() {
                remember(&mut slot.wakers, context.waker());
                return Poll::Pending;
            }
        }
        self.outcome().map_or(Poll::Pending, Poll::Ready)
    }
}

/// Remembers whom to wake, once each.
pub(crate) fn remember(wakers: &mut Vec<Waker>, waker: &Waker) {
    if !wakers.iter().any(|known| known.will_wake(waker)) {
        wakers.push(waker.clone());
    }
}
