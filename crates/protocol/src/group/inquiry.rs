//! What the others have called, asked for when a call has failed.

use weft_plan::{Rank, Time};

use super::exchange::{Board, Trouble};
use super::record::{CallRecord, Status};

/// How long answers are waited for.
const ANSWERS: Time = Time::from_ms(100);

/// A rank that asks the others. Those that are behind are given a moment to come as far as it is; where nothing is known but that it is late, they are
/// given as long to show that they are alive.
#[derive(Debug)]
pub struct Inquiry {
    rank: Rank,
    /// That of the call that has failed.
    number: u64,
    /// Nothing is wrong but that it takes too long.
    late: bool,
    lost: Option<Rank>,
    until: Time,
    /// By rank: its pulse when it was first asked.
    before: Vec<u64>,
}

/// What has come of it, by rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answers {
    /// What they have published last, as far as that is known.
    pub others: Vec<Option<Status>>,
    /// Those that gave no sign of life while they were asked.
    pub still: Vec<bool>,
}

impl Inquiry {
    pub fn new<B: Board + ?Sized>(
        board: &mut B,
        rank: Rank,
        ranks: u32,
        number: u64,
        trouble: Option<&Trouble>,
        now: Time,
    ) -> Inquiry {
        board.forget_answers();
        Inquiry {
            rank,
            number,
            late: trouble.is_none(),
            lost: match trouble {
                Some(Trouble::Lost { rank, .. }) => Some(*rank),
                _ => None,
            },
            until: now.saturating_add(ANSWERS),
            before: (0..ranks).map(|rank| board.pulse(Rank(rank))).collect(),
        }
    }

    /// What is known by now.
    pub fn so_far<B: Board + ?Sized>(&self, board: &mut B) -> Answers {
        let mut answers = Answers::seen(board, self.before.len() as u32);
        for (rank, before) in self.before.iter().enumerate() {
            let moved = board.pulse(Rank(rank as u32)) != *before;
            answers.still[rank] = self.late && rank != self.rank.0 as usize && !moved;
        }
        answers
    }

    /// Looks again. `Some`: all is known that is going to be.
    pub fn poll<B: Board + ?Sized>(&self, board: &mut B, now: Time) -> Option<Answers> {
        let answers = self.so_far(board);
        let is_known = |rank: usize| {
            let status = answers.others[rank].as_ref();
            let is_here = |status: &Status| self.number == CallRecord::PAIRWISE || status.call.number >= self.number;
            status.is_some_and(is_here) && !answers.still[rank]
        };
        let mut others = (0..self.before.len()).filter(|rank| *rank != self.rank.0 as usize);
        let heard = others.all(|rank| is_known(rank) || self.lost == Some(Rank(rank as u32)));
        (heard || now >= self.until).then_some(answers)
    }
}

impl Answers {
    /// What is to be seen without waiting for anybody.
    pub fn seen<B: Board + ?Sized>(board: &mut B, ranks: u32) -> Answers {
        Answers {
            others: (0..ranks).map(|rank| board.status(Rank(rank))).collect(),
            still: vec![false; ranks as usize],
        }
    }
}
