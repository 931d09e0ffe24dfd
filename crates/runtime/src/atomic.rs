//! The handle of an atomic operation on a peer's word: describe it, post it, then poll it, wait for it, or await it.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use weft_plan::Time;
use weft_protocol::agent::{AtomicId, PeerError};
use weft_protocol::{Atomic, AtomicAct};

use crate::driver::Shared;
use crate::error::Error;
use crate::peer::{DEADLINE_MAX, Peer, Remote};
use crate::transfer::remember;

/// An atomic operation being described. Nothing happens before [`post`](AtomicBuilder::post).
#[derive(Debug)]
#[must_use = "a described operation does nothing until it is posted"]
pub struct AtomicBuilder<'a> {
    peer: &'a Peer,
    atomic: Atomic,
    deadline: Duration,
}

/// An atomic operation under way. It goes on by itself; dropping the handle does not end it.
///
/// Its outcome is what the word held before. Where there is none, [`Error::may_have_happened`] tells whether the operation was
/// certainly not carried out, or whether that is not known: it is never repeated to find out.
#[derive(Clone, Debug)]
#[must_use = "an operation that nobody looks at may fail without anybody knowing"]
pub struct AtomicOperation {
    shared: Arc<Shared>,
    id: AtomicId,
    cell: Arc<AtomicCell>,
    deadline: Time,
}

/// Where the outcome arrives.
#[derive(Debug)]
pub(crate) struct AtomicCell {
    pub(crate) peer: Arc<str>,
    ended: AtomicBool,
    slot: Mutex<Slot>,
}

#[derive(Debug, Default)]
struct Slot {
    outcome: Option<Result<u64, Error>>,
    /// Every clone of the handle may be awaited.
    wakers: Vec<Waker>,
}

impl<'a> AtomicBuilder<'a> {
    pub(crate) fn new(peer: &'a Peer, remote: &Remote, offset: u64, act: AtomicAct) -> AtomicBuilder<'a> {
        let atomic = Atomic {
            region: Arc::new(remote.region.clone()),
            offset,
            act,
        };
        AtomicBuilder {
            peer,
            atomic,
            deadline: peer.defaults.deadline,
        }
    }

    /// By when the operation ends, counted from the post; a month is the longest.
    pub fn deadline(mut self, after: Duration) -> AtomicBuilder<'a> {
        self.deadline = after.min(DEADLINE_MAX);
        self
    }

    /// Starts the operation.
    pub fn post(self) -> Result<AtomicOperation, Error> {
        let AtomicBuilder { peer, atomic, deadline } = self;
        let posted = peer.shared.act(|world, now| {
            let deadline = now.saturating_add(deadline.into());
            let id = world.core.atomic(peer.id, atomic, deadline, now)?;
            let cell = Arc::new(AtomicCell::new(peer.name.clone()));
            world.atomics.insert(id, cell.clone());
            Ok((id, cell, deadline))
        });
        let (id, cell, deadline) = posted.map_err(|error: PeerError| peer.explain(error.into()))?;
        Ok(AtomicOperation {
            shared: peer.shared.clone(),
            id,
            cell,
            deadline,
        })
    }

    /// Starts the operation and waits for what the word held before.
    pub fn wait(self) -> Result<u64, Error> {
        self.post()?.wait()
    }
}

impl AtomicCell {
    fn new(peer: Arc<str>) -> AtomicCell {
        AtomicCell {
            peer,
            ended: AtomicBool::new(false),
            slot: Mutex::default(),
        }
    }

    pub(crate) fn end(&self, outcome: Result<u64, Error>) -> Vec<Waker> {
        let mut slot = self.lock();
        slot.outcome = Some(outcome);
        self.ended.store(true, Ordering::Release);
        std::mem::take(&mut slot.wakers)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl AtomicOperation {
    /// Has it ended? Makes progress while asking, so that polling in a loop is a way to wait.
    pub fn poll(&self) -> Option<Result<u64, Error>> {
        if !self.is_ended() {
            self.shared.turn();
        }
        self.outcome()
    }

    pub fn is_ended(&self) -> bool {
        self.cell.ended.load(Ordering::Acquire)
    }

    /// Waits for the end, which comes at the deadline at the latest, whatever the peer does.
    pub fn wait(&self) -> Result<u64, Error> {
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            // The deadline is the core's to enforce; the margin only keeps this loop from spinning on it.
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

    /// Waits for the end, but no longer than `timeout`; `None` means that the operation is still under way.
    pub fn wait_for(&self, timeout: Duration) -> Option<Result<u64, Error>> {
        if !self.is_ended() {
            let until = self.shared.clock.now().saturating_add(timeout.into());
            self.shared.wait_until(until, |_| self.is_ended().then_some(()));
        }
        self.outcome()
    }

    /// Waits no longer for the peer. The end says what is known of the operation; one that has been sent is not taken back.
    pub fn cancel(&self) {
        self.shared.act(|world, now| world.core.cancel_atomic(self.id, now));
    }

    fn outcome(&self) -> Option<Result<u64, Error>> {
        if !self.is_ended() {
            return None;
        }
        self.cell.lock().outcome.clone()
    }
}

impl Future for AtomicOperation {
    type Output = Result<u64, Error>;

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
