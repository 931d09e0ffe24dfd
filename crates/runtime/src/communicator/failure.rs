//! What a rank is told when a collective fails.

use std::fmt;

use weft_plan::Rank;
use weft_protocol::group::{Abort, CallRecord, Cause, Status};

/// A collective that failed: who is to blame, what this rank had called, and where the others were.
#[derive(Clone, Debug)]
pub struct CollectiveFailed {
    /// This rank.
    pub rank: Rank,
    /// What this rank had called.
    pub called: Option<CallRecord>,
    /// What the rank that noticed first told everybody.
    pub abort: Abort,
    /// What the other ranks had called, as far as it was known.
    pub others: Vec<(Rank, Status)>,
}

impl CollectiveFailed {
    /// The rank that is to blame.
    pub fn blamed(&self) -> Rank {
        self.abort.blamed
    }
    pub fn cause(&self) -> Cause {
        self.abort.cause
    }
}

impl fmt::Display for CollectiveFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.called {
            Some(called) => write!(f, "{called} failed on rank {}: {}", self.rank.0, self.abort)?,
            None => write!(f, "the group of rank {} has failed: {}", self.rank.0, self.abort)?,
        }
        for (rank, Status { call, ended, waiting }) in &self.others {
            match (ended, waiting.peer) {
                (true, _) => write!(f, "; rank {} had ended {call}", rank.0)?,
                (false, Some(peer)) => write!(
                    f,
                    "; rank {} waited for rank {} in step {} of {call}",
                    rank.0, peer.0, waiting.step
                )?,
                (false, None) => write!(f, "; rank {} was in step {} of {call}", rank.0, waiting.step)?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for CollectiveFailed {}
