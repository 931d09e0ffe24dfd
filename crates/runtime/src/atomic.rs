//! The handle of an atomic operation on a peer's word: describe it, post it, then poll it, wait for it, or await it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use weft_fabric::fork::OfProcess;
use weft_plan::Time;
use weft_protocol::agent::AtomicId;
use weft_protocol::{Atomic, AtomicAct};

use crate::driver::Shared;
use crate::ending::Ending;
use crate::error::Error;
use crate::peer::{DEADLINE_MAX, Peer, Remote};

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
    shared: OfProcess<Arc<Shared>>,
    id: AtomicId,
    cell: Arc<AtomicCell>,
    deadline: Time,
}

/// Where the outcome arrives.
#[derive(Debug)]
pub(crate) struct AtomicCell {
    pub(crate) peer: Arc<str>,
    pub(crate) outcome: Ending<u64>,
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
        let shared = peer.shared.get()?;
        let posted = shared.act(|world, now| {
            world.check_running()?;
            let deadline = now.saturating_add(deadline.into());
            let id = world.core.atomic(peer.id, atomic, deadline, now).map_err(Error::from)?;
            let cell = Arc::new(AtomicCell {
                peer: peer.name.clone(),
                outcome: Ending::default(),
            });
            world.atomics.insert(id, cell.clone());
            Ok((id, cell, deadline))
        });
        let (id, cell, deadline) = posted.map_err(|error: Error| peer.explain(shared, error))?;
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

impl AtomicOperation {
    /// Has it ended? Makes progress while asking, so that polling in a loop is a way to wait.
    pub fn poll(&self) -> Option<Result<u64, Error>> {
        self.cell.outcome.ask(&self.shared)
    }

    /// True also in a forked child, for which nothing comes any more.
    pub fn is_ended(&self) -> bool {
        self.cell.outcome.is_ended() || self.shared.get().is_err()
    }

    /// Waits for the end, which comes at the deadline at the latest, whatever the peer does.
    pub fn wait(&self) -> Result<u64, Error> {
        self.cell.outcome.wait(&self.shared, self.deadline)
    }

    /// Waits for the end, but no longer than `timeout`; `None` means that the operation is still under way.
    pub fn wait_for(&self, timeout: Duration) -> Option<Result<u64, Error>> {
        self.cell.outcome.wait_for(&self.shared, timeout)
    }

    /// Waits no longer for the peer. The end says what is known of the operation; one that has been sent is not taken back.
    pub fn cancel(&self) {
        // What the parent has under way is not a forked child's to cancel.
        if let Ok(shared) = self.shared.get() {
            shared.act(|world, now| world.core.cancel_atomic(self.id, now));
        }
    }
}

impl Future for AtomicOperation {
    type Output = Result<u64, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.cell.outcome.poll_of(&self.shared, context)
    }
}
