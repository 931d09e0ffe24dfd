//! Recursive doubling: in every step all ranks exchange all they have with a partner twice as far away. The fewest steps for an
//! all-reduce, each with all the data: for what is small.
//!
//! Where the number of ranks is no power of two, those in excess hand their data to another rank before and get the result after.

use super::power_below;
use crate::collective::{Collective, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct RecursiveDoubling {
    problem: Problem,
}

impl RecursiveDoubling {
    pub fn new(problem: Problem) -> Option<RecursiveDoubling> {
        let suits = problem.collective == Collective::AllReduce && problem.ranks >= 2;
        suits.then_some(RecursiveDoubling { problem })
    }

    /// How many ranks exchange, and in how many steps.
    fn core(&self) -> (u32, u32) {
        let core = power_below(self.problem.ranks);
        (core, core.trailing_zeros())
    }

    /// Where the sum lies after `nth` of `total` reductions. What is being sent must not be what is being written, hence two places take
    /// turns; the last is the output, unless the input lies there and is being sent.
    fn sum(&self, nth: u32, total: u32) -> Slice {
        match nth {
            0 => Slice::input(0, 1),
            _ if nth == total && !self.detour(total) => Slice::output(0, 1),
            _ => Slice::scratch(nth % 2, 1),
        }
    }

    fn detour(&self, total: u32) -> bool {
        self.problem.in_place && total == 1
    }
}

impl Program for RecursiveDoubling {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        let (core, levels) = self.core();
        let folds = u32::from(core < n);
        let last = u32::from(core < n || self.detour(levels));
        Shape {
            ranks: n,
            steps: folds + levels + last,
            pieces: 1,
            scratch: 2,
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (core, levels) = self.core();
        let folds = u32::from(core < n);
        if rank.0 >= core {
            let stand_in = Rank(rank.0 - core);
            if step == 0 {
                out.send(stand_in, Slice::input(0, 1));
            } else if step == folds + levels {
                out.receive(stand_in, Slice::output(0, 1));
            }
            return;
        }
        let ward = (rank.0 + core < n).then_some(Rank(rank.0 + core));
        let taken_in = u32::from(ward.is_some());
        let total = levels + taken_in;
        if step < folds {
            if let Some(ward) = ward {
                out.receive_reduce(ward, self.sum(0, total), self.sum(1, total));
            }
        } else if step < folds + levels {
            let level = step - folds;
            let partner = Rank(rank.0 ^ (1 << level));
            let have = self.sum(taken_in + level, total);
            out.send(partner, have);
            out.receive_reduce(partner, have, self.sum(taken_in + level + 1, total));
        } else {
            if self.detour(total) {
                out.copy(self.sum(1, total), Slice::output(0, 1));
            }
            if let Some(ward) = ward {
                out.send(ward, Slice::output(0, 1));
            }
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(
            &self.shape(),
            &[Rank(0), Rank(self.problem.ranks - 1)],
        ))
    }
}
