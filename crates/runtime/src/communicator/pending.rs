//! The handle of a call under way: poll it, wait for it, or await it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::Inner;
use crate::ending::Ending;
use crate::error::Error;
use crate::interrupt;

/// A call under way. It goes on by itself, and dropping the handle does not end it while there is another, or a
/// [`Communicator`](super::Communicator).
#[derive(Clone, Debug)]
#[must_use = "a call that nobody looks at may fail without anybody knowing"]
pub struct Pending {
    pub(super) group: Arc<Inner>,
    pub(super) outcome: Arc<Ending<()>>,
}

impl Pending {
    /// Has it ended? Makes progress while asking, so that polling in a loop is a way to wait.
    pub fn poll(&self) -> Option<Result<(), Error>> {
        let member = match self.group.member() {
            Ok(member) => member,
            Err(forked) => return Some(Err(forked.into())),
        };
        if !self.outcome.is_ended() {
            member.advance_if_free();
        }
        self.outcome.result()
    }

    /// True also in a forked child, for which nothing comes any more.
    pub fn is_ended(&self) -> bool {
        self.outcome.is_ended() || self.group.member().is_err()
    }

    /// Waits for the end, which comes at the deadline of the call at the latest, whatever the other ranks do.
    pub fn wait(&self) -> Result<(), Error> {
        self.group.member()?.drive_until(&self.outcome, interrupt::is_due);
        let in_vain = match interrupt::has_happened() {
            true => Error::Interrupted,
            false => Error::Stopped,
        };
        self.outcome.result().unwrap_or(Err(in_vain))
    }

    /// Waits for the end, but no longer than this.
    pub fn wait_for(&self, timeout: Duration) -> Option<Result<(), Error>> {
        let until = Instant::now().checked_add(timeout);
        let late = || until.is_some_and(|until| Instant::now() >= until);
        if let Ok(member) = self.group.member() {
            member.drive_until(&self.outcome, late);
        }
        self.poll()
    }
}

impl Future for Pending {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.group.member() {
            Ok(_) => self.outcome.poll(context),
            Err(forked) => Poll::Ready(Err(forked.into())),
        }
    }
}
