//! The notes of a group on one rank, as its threads share them.

use std::sync::{Arc, Mutex, MutexGuard};

use weft_protocol::group::Notes;

/// The agent's mutex may be held when this one is taken, and never the other way round.
#[derive(Debug)]
pub(crate) struct Board {
    /// The group of its parcels. Those of messages are the next number.
    pub(crate) group: u64,
    notes: Mutex<Notes>,
}

impl Board {
    pub(crate) fn new(group: u64, ranks: u32) -> Arc<Board> {
        Arc::new(Board {
            group,
            notes: Mutex::new(Notes::new(group, ranks)),
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
