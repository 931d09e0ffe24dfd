//! Two-shot: every rank reduces its own part of the data for all, then all exchange the parts. Two steps in which everybody talks to
//! everybody, and no byte more than a ring moves.

use super::{others, reduce_all, sources};
use crate::collective::{Collective, Extent, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct TwoShot {
    problem: Problem,
}

impl TwoShot {
    pub fn new(problem: Problem) -> Option<TwoShot> {
        let suits = matches!(
            problem.collective,
            Collective::AllReduce | Collective::Reduce { .. } | Collective::Broadcast { .. }
        );
        (suits && problem.ranks >= 2).then_some(TwoShot { problem })
    }

    /// Where the own part of a reduction lies. Only the root of a reduce has an output.
    fn own(&self, rank: Rank) -> Slice {
        match self.problem.collective {
            Collective::Reduce { root } if rank != root => Slice::scratch(0, 1),
            _ => Slice::output(rank.0, 1),
        }
    }

    /// The root, where there is one, and somebody else.
    fn typical(&self) -> Vec<Rank> {
        let n = self.problem.ranks;
        match self.problem.collective {
            Collective::Broadcast { root } | Collective::Reduce { root } => vec![root, super::after(root, n / 2, n)],
            _ => vec![Rank(0)],
        }
    }
}

impl Program for TwoShot {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        Shape {
            ranks: n,
            steps: 2,
            pieces: n,
            scratch: u32::from(matches!(self.problem.collective, Collective::Reduce { .. })),
            channels: 1,
        }
    }

    /// The part of a rank that waits in scratch has the size of that part.
    fn scratch(&self, rank: Rank, _: u32) -> Extent {
        Extent::common(rank.0)
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        match (self.problem.collective, step) {
            (Collective::Broadcast { root }, 0) if rank == root => {
                out.copy(Slice::input(0, n), Slice::output(0, n));
                others(rank, n).for_each(|to| out.send(to, Slice::input(to.0, 1)));
            }
            (Collective::Broadcast { root }, 0) => out.receive(root, Slice::output(rank.0, 1)),
            (Collective::Broadcast { root }, _) => {
                let wants = |to: &Rank| *to != root;
                others(rank, n)
                    .filter(wants)
                    .for_each(|to| out.send(to, Slice::output(rank.0, 1)));
                if rank != root {
                    sources(rank, n).for_each(|from| out.receive(from, Slice::output(from.0, 1)));
                }
            }
            (_, 0) => {
                others(rank, n).for_each(|to| out.send(to, Slice::input(to.0, 1)));
                reduce_all(rank, n, Slice::input(rank.0, 1), self.own(rank), out);
            }
            (Collective::Reduce { root }, _) if rank != root => out.send(root, self.own(rank)),
            (Collective::Reduce { .. }, _) => {
                sources(rank, n).for_each(|from| out.receive(from, Slice::output(from.0, 1)));
            }
            _ => {
                others(rank, n).for_each(|to| out.send(to, self.own(rank)));
                sources(rank, n).for_each(|from| out.receive(from, Slice::output(from.0, 1)));
            }
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(&self.shape(), &self.typical()))
    }
}
