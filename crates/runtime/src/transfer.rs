//! The handle of a transfer: poll it, wait for it, or await it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use weft_fabric::fork::OfProcess;
use weft_plan::Time;
use weft_protocol::Direction;
use weft_protocol::transfer::{Summary, TransferId};

use crate::driver::Shared;
use crate::ending::Ending;
use crate::error::Error;
use crate::memory::Kept;

/// A transfer under way. It goes on by itself; dropping the handle does not end it.
#[derive(Clone, Debug)]
#[must_use = "a transfer that nobody looks at may fail without anybody knowing"]
pub struct Transfer {
    pub(crate) shared: OfProcess<Arc<Shared>>,
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
    _memory: Kept,
    pub(crate) outcome: Ending<Summary>,
}

impl Cell {
    pub(crate) fn new(peer: Arc<str>, direction: Direction, started: Time, memory: Kept) -> Cell {
        Cell {
            peer,
            direction,
            started,
            _memory: memory,
            outcome: Ending::default(),
        }
    }
}

impl Transfer {
    /// Has it ended? Makes progress while asking, so that polling in a loop is a way to wait.
    pub fn poll(&self) -> Option<Result<Summary, Error>> {
        self.cell.outcome.ask(&self.shared)
    }

    /// True also in a forked child, for which nothing comes any more.
    pub fn is_ended(&self) -> bool {
        self.cell.outcome.is_ended() || self.shared.get().is_err()
    }

    /// Waits for the end, which comes at the deadline at the latest, whatever the peer does.
    pub fn wait(&self) -> Result<Summary, Error> {
        self.cell.outcome.wait(&self.shared, self.deadline)
    }

    /// Waits for the end, but no longer than `timeout`; `None` means that the transfer is still under way.
    pub fn wait_for(&self, timeout: Duration) -> Option<Result<Summary, Error>> {
        self.cell.outcome.wait_for(&self.shared, timeout)
    }

    /// Ends the transfer early. It has ended, and its memory is free for other use, once [`wait`](Transfer::wait) returns.
    pub fn cancel(&self) {
        // What the parent has under way is not a forked child's to cancel.
        if let Ok(shared) = self.shared.get() {
            shared.act(|world, now| world.core.cancel(self.id, now));
        }
    }
}

impl Future for Transfer {
    type Output = Result<Summary, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.cell.outcome.poll_of(&self.shared, context)
    }
}
