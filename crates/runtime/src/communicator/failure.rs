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
        let Abort {
            by, blamed, instead, ..
        } = &self.abort;
        // Of these it is said already where they were.
        let is_told = |rank: &Rank| *rank == self.rank || rank == by || rank == blamed && instead.is_some();
        for (rank, status) in self.others.iter().filter(|(rank, _)| !is_told(rank)) {
            let Status {
                call, ended, waiting, ..
            } = status;
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

#[cfg(test)]
mod tests {
    use super::*;
    use weft_protocol::group::{Recent, Waiting};

    #[test]
    fn each_rank_is_told_of_once() {
        let call = |words| CallRecord::new(4, 1, words);
        let status = |words, peer: u32| Status {
            call: call(words),
            ended: false,
            waiting: Waiting {
                step: 1,
                peer: Some(Rank(peer)),
            },
            recent: Recent::NONE,
        };
        let others = [("sum", 2), ("sum", 0), ("max", 1), ("sum", 2)];
        let others = others.iter().enumerate();
        let mut failed = CollectiveFailed {
            rank: Rank(0),
            called: Some(call("sum")),
            abort: Abort {
                by: Rank(2),
                blamed: Rank(2),
                cause: Cause::WrongCall,
                step: 1,
                called: call("max"),
                instead: Some(call("sum")),
            },
            others: others
                .map(|(rank, (words, peer))| (Rank(rank as u32), status(words, *peer)))
                .collect(),
        };
        assert_eq!(
            failed.to_string(),
            "sum (call 4) failed on rank 0: rank 2 called something else than the others: it was in step 1 of max (call 4), they in \
             sum (call 4); rank 1 waited for rank 0 in step 1 of sum (call 4); rank 3 waited for rank 2 in step 1 of sum (call 4)"
        );
        failed.abort.by = Rank(3);
        failed.abort.instead = None;
        assert_eq!(failed.to_string().matches("rank 2 waited for").count(), 1);
        assert_eq!(failed.to_string().matches("rank 3 w").count(), 1);
    }
}
