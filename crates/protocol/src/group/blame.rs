//! Who is to blame, from what the ranks have published.

use weft_plan::Rank;

use super::exchange::Trouble;
use super::record::{Abort, CallRecord, Cause, Status, Waiting};

/// What the rank that gives up knows.
#[derive(Debug)]
pub struct Witness<'a> {
    pub rank: Rank,
    pub call: CallRecord,
    pub waiting: Waiting,
    /// What each rank has last published, by rank, as far as it is known. The own entry is not looked at.
    pub others: &'a [Option<Status>],
    /// By rank: those that have shown no sign of life while this rank asked what they had called.
    pub still: &'a [bool],
}

impl Witness<'_> {
    /// What to tell everybody after the exchange has reported a trouble.
    pub fn after(&self, trouble: &Trouble) -> Abort {
        match trouble {
            Trouble::Aborted(abort) => **abort,
            Trouble::Lost { rank, .. } => self.abort(*rank, Cause::Lost),
            Trouble::WrongMessage { peer, .. } => self.wrong_call(*peer),
            Trouble::Withdrew { rank } => self.abort(*rank, Cause::Withdrew),
            Trouble::Garbage { rank } => self.abort(*rank, Cause::Broken),
            Trouble::Unusable { .. } | Trouble::Panicked => self.abort(self.rank, Cause::Broken),
        }
    }

    /// What to tell everybody when the deadline has passed: whoever this rank waits for may itself wait for another, and so on, up
    /// to one that waits for nobody. What a rank without a pulse has last published may be old: it waits for nobody either.
    pub fn after_deadline(&self) -> Abort {
        let Some(mut blamed) = self.waiting.peer else {
            return self.abort(self.rank, Cause::Late);
        };
        let mut seen = vec![self.rank];
        loop {
            let Some(status) = self.status(blamed) else {
                return self.abort(blamed, Cause::Late);
            };
            if self.differs(status) {
                return self.wrong_call(blamed);
            }
            seen.push(blamed);
            let here = status.call.number == self.call.number && !status.ended && !self.is_still(blamed);
            match status.waiting.peer.filter(|_| here) {
                Some(next) if !seen.contains(&next) => blamed = next,
                // They wait for each other, or say so: one that stands still is not one of them.
                Some(_) => return self.abort(self.first_still().unwrap_or(blamed), Cause::Late),
                None => return self.abort(blamed, Cause::Late),
            }
        }
    }

    fn is_still(&self, rank: Rank) -> bool {
        self.still.get(rank.0 as usize).copied().unwrap_or(false)
    }

    fn first_still(&self) -> Option<Rank> {
        let mut ranks = (0..self.still.len() as u32).map(Rank);
        ranks.find(|rank| *rank != self.rank && self.is_still(*rank))
    }

    /// Of those who called something else at this point, the one that most others disagree with; of equals, the peer that it was
    /// noticed with.
    fn wrong_call(&self, peer: Rank) -> Abort {
        let called = |rank: Rank| match rank == self.rank {
            true => Some(self.call.signature),
            false => self
                .status(rank)
                .filter(|status| status.call.number == self.call.number)
                .map(|status| status.call.signature),
        };
        let ranks = || (0..self.others.len() as u32).map(Rank);
        let likes = |rank: Rank| ranks().filter(|&other| called(other) == called(rank)).count();
        let blamed = match (called(peer), likes(peer) > likes(self.rank)) {
            (Some(_), true) => self.rank,
            _ => peer,
        };
        self.abort(blamed, Cause::WrongCall)
    }

    fn differs(&self, status: &Status) -> bool {
        status.call.number == self.call.number && status.call.signature != self.call.signature
    }

    fn status(&self, rank: Rank) -> Option<&Status> {
        self.others.get(rank.0 as usize)?.as_ref()
    }

    fn abort(&self, blamed: Rank, cause: Cause) -> Abort {
        // Where this rank is the odd one out, what counts is what the peer had called.
        let instead = match blamed == self.rank {
            true => self.waiting.peer.and_then(|peer| self.status(peer)),
            false => self.status(blamed),
        };
        Abort {
            by: self.rank,
            blamed,
            cause,
            step: self.waiting.step,
            called: self.call,
            instead: instead.map(|status| status.call),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Loss;
    use crate::group::MessageHead;

    fn status(number: u64, signature: u64, waits_for: Option<u32>, ended: bool) -> Option<Status> {
        Some(Status {
            call: CallRecord::new(number, signature, "call"),
            ended,
            waiting: Waiting {
                step: 1,
                peer: waits_for.map(Rank),
            },
        })
    }

    fn witness(others: &[Option<Status>]) -> Witness<'_> {
        Witness {
            rank: Rank(0),
            call: CallRecord::new(5, 1, "call"),
            waiting: Waiting {
                step: 2,
                peer: Some(Rank(1)),
            },
            others,
            still: &[],
        }
    }

    #[test]
    fn the_end_of_the_chain_is_late() {
        let others = [
            None,
            status(5, 1, Some(2), false),
            status(5, 1, Some(3), false),
            status(4, 9, None, true),
        ];
        let abort = witness(&others).after_deadline();
        assert_eq!((abort.blamed, abort.cause), (Rank(3), Cause::Late));
        assert_eq!(abort.instead.map(|call| call.number), Some(4));
    }

    #[test]
    fn a_chain_that_closes_blames_the_last_before_it_closes() {
        let others = [None, status(5, 1, Some(2), false), status(5, 1, Some(1), false)];
        assert_eq!(witness(&others).after_deadline().blamed, Rank(2));
    }

    #[test]
    fn a_rank_that_stands_still_is_late_whatever_it_last_said() {
        let round = |from: u32| status(5, 1, Some(from), false);
        // Rank 2 was waiting for rank 0 for a moment, when it was stopped.
        let others = [None, round(2), round(0), round(1)];
        let witness = Witness {
            still: &[false, false, true, false],
            ..witness(&others)
        };
        assert_eq!(witness.after_deadline().blamed, Rank(2));
        // It is not in the circle of those who seem to wait for each other.
        let others = [None, round(0), round(3), round(2)];
        let witness = Witness {
            others: &others,
            ..witness
        };
        assert_eq!(witness.after_deadline().blamed, Rank(2));
    }

    #[test]
    fn a_rank_of_which_nothing_is_known_is_late() {
        assert_eq!(witness(&[None, None]).after_deadline().blamed, Rank(1));
    }

    #[test]
    fn the_odd_one_out_is_blamed_also_by_itself() {
        let head = |signature| MessageHead {
            call: 5,
            signature,
            index: 0,
            len: 8,
        };
        let trouble = Trouble::WrongMessage {
            peer: Rank(1),
            expected: head(1),
            found: head(2),
        };
        let mine_is_odd = [None, status(5, 2, None, false), status(5, 2, None, false)];
        assert_eq!(witness(&mine_is_odd).after(&trouble).blamed, Rank(0));
        let theirs_is_odd = [None, status(5, 2, None, false), status(5, 1, None, false)];
        let abort = witness(&theirs_is_odd).after(&trouble);
        assert_eq!((abort.blamed, abort.cause), (Rank(1), Cause::WrongCall));
        // Of two, each blames the other.
        let two = [None, status(5, 2, None, false)];
        assert_eq!(witness(&two).after(&trouble).blamed, Rank(1));
        let hung = [None, status(5, 2, Some(0), false)];
        assert_eq!(witness(&hung).after_deadline().cause, Cause::WrongCall);
    }

    #[test]
    fn a_loss_is_told_as_it_is() {
        let trouble = Trouble::Lost {
            rank: Rank(1),
            loss: Loss::ClosedByPeer,
        };
        let abort = witness(&[None, status(5, 1, None, false)]).after(&trouble);
        assert_eq!((abort.blamed, abort.cause, abort.step), (Rank(1), Cause::Lost, 2));
    }
}
