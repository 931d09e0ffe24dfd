//! Where the outcome of something that goes on by itself arrives, and how its handles wait for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use weft_fabric::fork::OfProcess;
use weft_plan::Time;

use crate::driver::Shared;
use crate::error::Error;
use crate::interrupt;

/// How far past its deadline something is waited for at a time. The deadline is the core's to enforce; the margin only keeps the wait
/// from spinning on it.
const MARGIN: Time = Time::from_ms(100);

/// The outcome of something under way, once it has ended.
#[derive(Debug)]
pub(crate) struct Ending<T> {
    ended: AtomicBool,
    slot: Mutex<Slot<T>>,
}

#[derive(Debug)]
struct Slot<T> {
    result: Option<Result<T, Error>>,
    /// Every clone of a handle may be awaited.
    wakers: Vec<Waker>,
}

impl<T> Default for Ending<T> {
    fn default() -> Ending<T> {
        Ending {
            ended: AtomicBool::new(false),
            slot: Mutex::new(Slot {
                result: None,
                wakers: Vec::new(),
            }),
        }
    }
}

impl<T: Clone> Ending<T> {
    /// It has ended. The first word stands. Returns whom to wake.
    #[must_use = "those who wait have to be woken"]
    pub(crate) fn end(&self, result: Result<T, Error>) -> Vec<Waker> {
        let mut slot = self.lock();
        slot.result.get_or_insert(result);
        self.ended.store(true, Ordering::Release);
        std::mem::take(&mut slot.wakers)
    }

    pub(crate) fn end_and_wake(&self, result: Result<T, Error>) {
        self.end(result).into_iter().for_each(Waker::wake);
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn result(&self) -> Option<Result<T, Error>> {
        if !self.is_ended() {
            return None;
        }
        self.lock().result.clone()
    }

    /// Its outcome, if there is one by now. Turns the core once where there is none, so that asking in a loop is a way to wait.
    pub(crate) fn ask(&self, shared: &OfProcess<Arc<Shared>>) -> Option<Result<T, Error>> {
        let shared = match shared.get() {
            Ok(shared) => shared,
            Err(forked) => return Some(Err(forked.into())),
        };
        if !self.is_ended() {
            shared.turn();
        }
        self.result()
    }

    /// Waits while turning the core, for something that ends at this deadline at the latest.
    pub(crate) fn wait(&self, shared: &OfProcess<Arc<Shared>>, deadline: Time) -> Result<T, Error> {
        let shared = shared.get()?;
        loop {
            if let Some(result) = self.result() {
                return result;
            }
            let until = deadline.max(shared.clock.now()).saturating_add(MARGIN);
            shared.wait_until(until, |_| self.is_ended().then_some(()));
            if shared.is_stopped() && !self.is_ended() {
                return Err(Error::Stopped);
            }
            if interrupt::has_happened() && !self.is_ended() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// The same, but no longer than `timeout`.
    pub(crate) fn wait_for(&self, shared: &OfProcess<Arc<Shared>>, timeout: Duration) -> Option<Result<T, Error>> {
        let shared = match shared.get() {
            Ok(shared) => shared,
            Err(forked) => return Some(Err(forked.into())),
        };
        if !self.is_ended() {
            let until = shared.clock.now().saturating_add(timeout.into());
            shared.wait_until(until, |_| self.is_ended().then_some(()));
        }
        self.result()
    }

    /// Sleeps until it has ended, at most so long, and at times for no reason. Somebody else brings it about.
    pub(crate) fn sleep(&self, max: Duration) {
        thread_local! {
            static WAKER: Waker = Waker::from(Arc::new(Sleeper(thread::current())));
        }
        let ended = WAKER.with(|waker| self.poll(&Context::from_waker(waker)).is_ready());
        if !ended {
            thread::park_timeout(max);
        }
    }

    /// For a future of an agent's: the outcome, or a waker that is remembered.
    pub(crate) fn poll_of(&self, shared: &OfProcess<Arc<Shared>>, context: &Context<'_>) -> Poll<Result<T, Error>> {
        match shared.get() {
            Ok(_) => self.poll(context),
            Err(forked) => Poll::Ready(Err(forked.into())),
        }
    }

    /// For a future: the outcome, or a waker that is remembered.
    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<Result<T, Error>> {
        let mut slot = self.lock();
        match &slot.result {
            Some(result) => Poll::Ready(result.clone()),
            None => {
                remember(&mut slot.wakers, context.waker());
                Poll::Pending
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Slot<T>> {
        self.slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A thread that sleeps.
struct Sleeper(Thread);

impl Wake for Sleeper {
    fn wake(self: Arc<Sleeper>) {
        self.0.unpark();
    }
}

/// Remembers whom to wake, once each.
pub(crate) fn remember(wakers: &mut Vec<Waker>, waker: &Waker) {
    if !wakers.iter().any(|known| known.will_wake(waker)) {
        wakers.push(waker.clone());
    }
}
