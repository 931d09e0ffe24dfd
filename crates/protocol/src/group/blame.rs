//! Who is to blame, from what the ranks have published.

use weft_plan::Rank;

use super::exchange::Trouble;
use super::history::{History, Recent};
use super::record::{Abort, CallRecord, Cause, Status, Waiting};

/// What the rank that gives up knows.
#[derive(Debug)]
pub struct Witness<'a> {
    pub rank: Rank,
    pub call: CallRecord,
    /// The calls of this rank, that one included.
    pub history: &'a History,
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
    /// to one that waits for nobody. What a rank without a pulse has last published may be old: it waits for nobody either. Where ranks
    /// have made different calls, all else comes of that.
    pub fn after_deadline(&self) -> Abort {
        let Some(mut blamed) = self.waiting.peer else {
            return self.abort(self.rank, Cause::Late);
        };
        if self.parted().is_some() {
            return self.wrong_call(blamed);
        }
        let mut seen = vec![self.rank];
        loop {
            let Some(status) = self.status(blamed) else {
                return self.abort(blamed, Cause::Late);
            };
            seen.push(blamed);
            // One that is behind waits in its turn. Messages are in no order with calls.
            let is_message = |call: &CallRecord| call.number == CallRecord::PAIRWISE;
            let comparable = is_message(&status.call) == is_message(&self.call);
            let before = comparable && status.call.number <= self.call.number;
            let here = before && !status.ended && !self.is_still(blamed);
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

    /// The ranks have parted: blames one that most others disagree with. Of several the peer that it was noticed with, then this rank, then
    /// the lowest; and where there are as many on each side, the peer.
    fn wrong_call(&self, peer: Rank) -> Abort {
        let Some(number) = self.parted() else {
            return self.abort(peer, Cause::WrongCall);
        };
        let called = |rank: Rank| self.recent(rank)?.signature(number);
        let likes = |rank: Rank| {
            let same = |other: &Rank| called(rank).is_some() && called(*other) == called(rank);
            self.ranks().filter(same).count()
        };
        let most = self.ranks().map(likes).max().unwrap_or(0);
        let is_odd = |rank: &Rank| (1..most).contains(&likes(*rank));
        let differs = |rank: &Rank| called(*rank).is_some() && called(*rank) != called(self.rank);
        let first = |holds: &dyn Fn(&Rank) -> bool| [peer, self.rank].into_iter().chain(self.ranks()).find(holds);
        let blamed = first(&is_odd).or_else(|| first(&differs)).unwrap_or(peer);
        let other = match blamed == self.rank {
            true => first(&differs).unwrap_or(peer),
            false => blamed,
        };
        let instead = self.status(other).map(|status| status.call);
        match self.history.call(number) {
            // They did so before, and nobody noticed then.
            Some(called) if number != self.call.number => Abort {
                step: 0,
                called,
                instead: instead.filter(|call| call.number == number),
                ..self.abort(blamed, Cause::WrongCall)
            },
            _ => Abort {
                instead,
                ..self.abort(blamed, Cause::WrongCall)
            },
        }
    }

    /// The first call that was not the same on all ranks, as far as anybody knows.
    fn parted(&self) -> Option<u64> {
        // Messages between two ranks are no calls of all.
        let end = self.history.recent().begun;
        let numbers = end.saturating_sub(Recent::CALLS as u64)..end;
        numbers.into_iter().find(|number| {
            let mut called = self.ranks().filter_map(|rank| self.recent(rank)?.signature(*number));
            let first = called.next();
            called.any(|signature| Some(signature) != first)
        })
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.others.len() as u32).map(Rank)
    }

    fn recent(&self, rank: Rank) -> Option<&Recent> {
        match rank == self.rank {
            true => Some(self.history.recent()),
            false => self.status(rank).map(|status| &status.recent),
        }
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

    /// A rank that has called the same as this one before.
    fn status(number: u64, signature: u64, waits_for: Option<u32>, ended: bool) -> Option<Status> {
        let mut history = History::default();
        let mut call = CallRecord::new(number, signature, "call");
        for before in 0..number {
            history.begin(before, &CallRecord::new(before, before + 100, "before"), true);
        }
        call.signature = history.begin(number, &call, true);
        Some(Status {
            call,
            recent: *history.recent(),
            ended,
            waiting: Waiting {
                step: 1,
                peer: waits_for.map(Rank),
            },
        })
    }

    /// This rank, in a call 5 of signature 1.
    fn history() -> History {
        let mut history = History::default();
        for before in 0..5 {
            history.begin(before, &CallRecord::new(before, before + 100, "before"), true);
        }
        history.begin(5, &CallRecord::new(5, 1, "call"), true);
        history
    }

    fn witness<'a>(history: &'a History, others: &'a [Option<Status>]) -> Witness<'a> {
        Witness {
            rank: Rank(0),
            call: history.call(5).unwrap(),
            history,
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
            status(4, 104, None, true),
        ];
        let abort = witness(&history(), &others).after_deadline();
        assert_eq!((abort.blamed, abort.cause), (Rank(3), Cause::Late));
        assert_eq!(abort.instead.map(|call| call.number), Some(4));
    }

    #[test]
    fn a_rank_that_is_behind_because_of_another_is_not_to_blame() {
        // Rank 1 is in the call before, and waits for rank 2, which has not come to it.
        let others = [None, status(4, 104, Some(2), false), status(3, 103, None, true)];
        let abort = witness(&history(), &others).after_deadline();
        assert_eq!((abort.blamed, abort.cause), (Rank(2), Cause::Late));
        // One that is behind and busy with itself is.
        let others = [None, status(4, 104, None, false), status(5, 1, Some(1), false)];
        assert_eq!(witness(&history(), &others).after_deadline().blamed, Rank(1));
    }

    #[test]
    fn a_chain_that_closes_blames_the_last_before_it_closes() {
        let others = [None, status(5, 1, Some(2), false), status(5, 1, Some(1), false)];
        assert_eq!(witness(&history(), &others).after_deadline().blamed, Rank(2));
    }

    #[test]
    fn a_rank_that_stands_still_is_late_whatever_it_last_said() {
        let round = |from: u32| status(5, 1, Some(from), false);
        // Rank 2 was waiting for rank 0 for a moment, when it was stopped.
        let others = [None, round(2), round(0), round(1)];
        let history = history();
        let witness = Witness {
            still: &[false, false, true, false],
            ..witness(&history, &others)
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
        assert_eq!(witness(&history(), &[None, None]).after_deadline().blamed, Rank(1));
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
        assert_eq!(witness(&history(), &mine_is_odd).after(&trouble).blamed, Rank(0));
        let theirs_is_odd = [None, status(5, 2, None, false), status(5, 1, None, false)];
        let abort = witness(&history(), &theirs_is_odd).after(&trouble);
        assert_eq!((abort.blamed, abort.cause), (Rank(1), Cause::WrongCall));
        // Of two, each blames the other.
        let two = [None, status(5, 2, None, false)];
        assert_eq!(witness(&history(), &two).after(&trouble).blamed, Rank(1));
        let hung = [None, status(5, 2, Some(0), false)];
        assert_eq!(witness(&history(), &hung).after_deadline().cause, Cause::WrongCall);
    }

    /// Calls in a row: what was called, and by which words.
    fn calls(calls: &[(u64, &str)]) -> (History, Status) {
        let mut history = History::default();
        let mut last = CallRecord::NONE;
        for (number, (signature, words)) in calls.iter().enumerate() {
            last = CallRecord::new(number as u64, *signature, words);
            last.signature = history.begin(number as u64, &last, true);
        }
        let recent = *history.recent();
        let status = Status {
            call: last,
            ended: false,
            waiting: Waiting { step: 1, peer: None },
            recent,
        };
        (history, status)
    }

    #[test]
    fn what_nobody_noticed_at_once_is_blamed_on_who_did_it_and_told_by_its_number() {
        let right = [(3, "broadcast from rank 0"), (4, "barrier"), (4, "barrier")];
        let odd = [(9, "broadcast from rank 2"), (4, "barrier")];
        let ((history, own), (odd_history, odd)) = (calls(&right), calls(&odd));
        // One has gone on, one is behind, and rank 2 is the one that did it.
        let behind = calls(&right[..1]).1;
        let others = [None, Some(behind), Some(odd), Some(own)];
        let witness = Witness {
            rank: Rank(0),
            call: own.call,
            history: &history,
            waiting: Waiting {
                step: 1,
                peer: Some(Rank(1)),
            },
            others: &others,
            still: &[],
        };
        let abort = witness.after_deadline();
        assert_eq!((abort.blamed, abort.cause), (Rank(2), Cause::WrongCall));
        assert_eq!(
            abort.to_string(),
            "rank 2 called something else; rank 0 was in step 0 of broadcast from rank 0 (call 0)"
        );
        // It says the same of itself.
        let others = [Some(own), Some(behind), None, Some(own)];
        let witness = Witness {
            rank: Rank(2),
            call: odd.call,
            history: &odd_history,
            others: &others,
            ..witness
        };
        let abort = witness.after_deadline();
        assert_eq!(abort.blamed, Rank(2));
        assert_eq!(
            abort.to_string(),
            "rank 2 called something else than the others: it was in step 0 of broadcast from rank 2 (call 0), \
             they in broadcast from rank 0 (call 0)"
        );
    }

    #[test]
    fn a_loss_is_told_as_it_is() {
        let trouble = Trouble::Lost {
            rank: Rank(1),
            loss: Loss::ClosedByPeer,
        };
        let abort = witness(&history(), &[None, status(5, 1, None, false)]).after(&trouble);
        assert_eq!((abort.blamed, abort.cause, abort.step), (Rank(1), Cause::Lost, 2));
    }
}
