//! The handle of a call under way: poll it, wait for it, or await it.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::Inner;
use crate::error::Error;
use crate::transfer::remember;

/// A call under way. It goes on by itself, and dropping the handle does not end it.
#[derive(Clone, Debug)]
#[must_use = "a call that nobody looks at may fail without anybody knowing"]
pub struct Pending {
    pub(super) group: Arc<Inner>,
    pub(super) outcome: Outcome,
}

/// Where the outcome of a call arrives.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome(Arc<Cell>);

#[derive(Debug, Default)]
struct Cell {
    ended: AtomicBool,
    slot: Mutex<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    result: Option<Result<(), Error>>,
    wakers: Vec<Waker>,
}

impl Outcome {
    pub(super) fn end(&self, result: Result<(), Error>) {
        let mut slot = self.lock();
        slot.result.get_or_insert(result);
        self.0.ended.store(true, Ordering::Release);
        let wakers = std::mem::take(&mut slot.wakers);
        drop(slot);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(super) fn is_ended(&self) -> bool {
        self.0.ended.load(Ordering::Acquire)
    }

    fn result(&self) -> Option<Result<(), Error>> {
        self.lock().result.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.0.slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Pending {
    /// Has it ended? Makes progress while asking, so that polling in a loop is a way to wait.
    pub fn poll(&self) -> Option<Result<(), Error>> {
        if !self.outcome.is_ended() {
            self.group.advance_if_free();
        }
        self.outcome.result().filter(|_| self.outcome.is_ended())
    }

    pub fn is_ended(&self) -> bool {
        self.outcome.is_ended()
    }

    /// Waits for the end, which comes at the deadline of the call at the latest, whatever the other ranks do.
    pub fn wait(&self) -> Result<(), Error> {
        self.group.drive_until(|| self.outcome.is_ended());
        self.outcome.result().unwrap_or(Err(Error::Stopped))
    }

    /// Waits for the end, but no longer than this.
    pub fn wait_for(&self, timeout: Duration) -> Option<Result<(), Error>> {
        let until = Instant::now().checked_add(timeout);
        let late = || until.is_some_and(|until| Instant::now() >= until);
        self.group.drive_until(|| self.outcome.is_ended() || late());
        self.poll()
    }
}

impl Future for Pending {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut slot = self.outcome.lock();
        match &slot.result {
            Some(result) => Poll::Ready(result.clone()),
            None => {
                remember(&mut slot.wakers, context.waker());
                Poll::Pending
            }
        }
    }
}
