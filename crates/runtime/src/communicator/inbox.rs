//! Where calls are left that are to go on by themselves: whoever leaves one waits for nobody.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use weft_plan::Time;

use super::call::Described;
use crate::ending::Ending;

/// Calls that have been started and not been taken in.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// Whoever runs a call looks at this in every turn.
    any: AtomicBool,
    /// The group takes on nothing more.
    closed: AtomicBool,
    left: Mutex<Left>,
    stirred: Condvar,
}

#[derive(Debug, Default)]
struct Left {
    calls: Vec<Queued>,
    /// How often there was something for somebody to do.
    stirs: u64,
}

/// A call that waits for those before it.
#[derive(Debug)]
pub(super) struct Queued {
    pub(super) call: Described,
    pub(super) outcome: Arc<Ending<()>>,
    /// Counted from when it was started.
    pub(super) deadline: Time,
}

impl Inbox {
    pub(super) fn push(&self, queued: Queued) {
        let mut left = self.lock();
        left.calls.push(queued);
        self.any.store(true, Ordering::Release);
        drop(left);
        self.stir();
    }

    /// Has whoever takes calls further end them all.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.stir();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Wakes whoever [rests](Inbox::rest), because there may be something to do.
    pub(super) fn stir(&self) {
        self.lock().stirs += 1;
        self.stirred.notify_all();
    }

    /// What to tell [`rest`](Inbox::rest). To be asked before looking whether there is something to do.
    pub(super) fn stirs(&self) -> u64 {
        self.lock().stirs
    }

    /// Sleeps until there may be something to do that was not there before, at most so long.
    pub(super) fn rest(&self, stirs: u64, max: Duration) {
        let wait = self
            .stirred
            .wait_timeout_while(self.lock(), max, |left| left.stirs == stirs);
        drop(wait.unwrap_or_else(|poisoned| poisoned.into_inner()));
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// All of them, in the order in which they were started.
    pub(super) fn take(&self) -> Vec<Queued> {
        let mut left = self.lock();
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut left.calls)
    }

    fn lock(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
