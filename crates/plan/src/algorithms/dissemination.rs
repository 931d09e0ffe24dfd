//! Dissemination: who has heard of some ranks tells another twice as far away, until everybody has heard of all. The fewest steps for a
//! barrier, for any number of ranks.

use super::{after, before, levels};
use crate::collective::{Collective, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct Dissemination {
    problem: Problem,
}

impl Dissemination {
    pub fn new(problem: Problem) -> Option<Dissemination> {
        (problem.collective == Collective::Barrier && problem.ranks >= 2).then_some(Dissemination { problem })
    }
}

impl Program for Dissemination {
    fn shape(&self) -> Shape {
        Shape {
            ranks: self.problem.ranks,
            steps: levels(self.problem.ranks),
            pieces: 1,
            scratch: 0,
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        out.send(after(rank, 1 << step, n), Slice::NOTHING);
        out.receive(before(rank, 1 << step, n), Slice::NOTHING);
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(&self.shape(), &[Rank(0)]))
    }
}
