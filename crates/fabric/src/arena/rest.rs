//! Sleeping until a neighbour has news.
//!
//! Nobody sleeps through news. Whoever sends writes the message, then its news, and then looks whether the receiver rests; the
//! receiver says that it rests, has [every other thread pass a barrier](crate::sync::order_others), and then has the kernel compare the news with what
//! they were when it last looked. A sender that looked before its barrier has its news seen by the comparison; one that looks after it
//! sees that the receiver rests, and wakes it. The compiler keeps the sender's two steps in order, and nothing else needs to.

use std::sync::Arc;
use std::task::Wake;

use crate::sync::{AtomicU32, Ordering, wake};

/// What wakes whoever rests besides its neighbours: anything that has a waker of it.
#[derive(Debug, Default)]
pub struct Ear(AtomicU32);

impl Ear {
    /// How often it has been woken. To be asked before looking for what it would be woken for.
    pub fn heard(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn word(&self) -> &AtomicU32 {
        &self.0
    }
}

impl Wake for Ear {
    fn wake(self: Arc<Ear>) {
        self.0.fetch_add(1, Ordering::Release);
        wake(&self.0);
    }
}
