//! A collective of one rank: its output is its input.

use crate::collective::{Buffer, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct Alone {
    problem: Problem,
}

impl Alone {
    pub fn new(problem: Problem) -> Option<Alone> {
        (problem.ranks == 1).then_some(Alone { problem })
    }
}

impl Program for Alone {
    fn shape(&self) -> Shape {
        Shape {
            ranks: 1,
            steps: 1,
            pieces: 1,
            scratch: 0,
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, _: u32, out: &mut Ops) {
        if self.problem.blocks(rank, Buffer::Output) > 0 {
            out.copy(Slice::input(0, 1), Slice::output(0, 1));
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(&self.shape(), &[Rank(0)]))
    }
}
