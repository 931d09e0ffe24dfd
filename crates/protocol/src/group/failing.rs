//! What a rank does when a call has failed: it asks the others, finds out who is to blame, and tells everybody.

use weft_plan::{Rank, Time};

use super::blame::Witness;
use super::exchange::{Board, Exchange, Trouble};
use super::history::History;
use super::inquiry::{Answers, Inquiry};
use super::record::{Abort, CallRecord, Status, Waiting};

/// What has failed: a call, or a message beside it.
#[derive(Debug)]
pub struct Stuck {
    pub record: CallRecord,
    pub waiting: Waiting,
    /// `None`: nothing but that it took too long.
    pub trouble: Option<Trouble>,
}

/// A rank whose call has failed, until it knows why and all have been told.
#[derive(Debug)]
pub struct Failing {
    rank: Rank,
    ranks: u32,
    stuck: Stuck,
    /// Whoever has been told has nothing to find out.
    inquiry: Option<Inquiry>,
}

/// What has come of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What everybody is told.
    pub abort: Abort,
    /// By rank: what it had published last, as far as that is known.
    pub others: Vec<Option<Status>>,
}

impl Failing {
    pub fn new<E: Exchange + Board + ?Sized>(
        exchange: &mut E,
        rank: Rank,
        ranks: u32,
        stuck: Stuck,
        now: Time,
    ) -> Failing {
        exchange.publish(stuck.waiting);
        let inquiry = match &stuck.trouble {
            Some(Trouble::Aborted(_)) => None,
            trouble => {
                let (number, trouble) = (stuck.record.number, trouble.as_ref());
                Some(Inquiry::new(exchange, rank, ranks, number, trouble, now))
            }
        };
        Failing {
            rank,
            ranks,
            stuck,
            inquiry,
        }
    }

    /// Looks again. `Some`: it is known why, and everybody has been told. `history` is that of this rank's calls.
    pub fn poll<E: Exchange + Board + ?Sized>(
        &self,
        exchange: &mut E,
        history: &History,
        now: Time,
    ) -> Option<Failure> {
        // Somebody may have been first, before this rank has said anything.
        let heard = told(exchange, now);
        let answers = match &self.inquiry {
            None => Answers::seen(exchange, self.ranks),
            Some(inquiry) => match inquiry.poll(exchange, now) {
                Some(answers) => answers,
                None if heard.is_some() => inquiry.so_far(exchange),
                None => return None,
            },
        };
        let witness = Witness {
            rank: self.rank,
            call: self.stuck.record,
            history,
            waiting: self.stuck.waiting,
            others: &answers.others,
            still: &answers.still,
        };
        let abort = heard.unwrap_or_else(|| match &self.stuck.trouble {
            Some(trouble) => witness.after(trouble),
            None => witness.after_deadline(),
        });
        if self.inquiry.is_some() {
            exchange.abort(&abort);
        }
        Some(Failure {
            // Or while it did.
            abort: told(exchange, now).unwrap_or(abort),
            others: answers.others,
        })
    }
}

/// What another rank has told everybody, if one has.
fn told<E: Exchange + ?Sized>(exchange: &mut E, now: Time) -> Option<Abort> {
    match exchange.poll(now) {
        Err(Trouble::Aborted(abort)) => Some(*abort),
        _ => None,
    }
}
