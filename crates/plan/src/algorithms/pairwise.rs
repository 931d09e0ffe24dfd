//! Pairwise exchange: in every step each rank talks to one other, so that each receives from one only. As many bytes as direct, and no
//! crowd at anybody's door.

use super::{after, before};
use crate::collective::{Collective, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct Pairwise {
    problem: Problem,
}

impl Pairwise {
    pub fn new(problem: Problem) -> Option<Pairwise> {
        let suits = matches!(
            problem.collective,
            Collective::AllToAll { .. } | Collective::ReduceScatter { .. }
        );
        (suits && problem.ranks >= 2).then_some(Pairwise { problem })
    }

    fn loads(&self) -> bool {
        self.problem.in_place && matches!(self.problem.collective, Collective::AllToAll { .. })
    }
}

impl Program for Pairwise {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        Shape {
            ranks: n,
            steps: n - 1 + u32::from(self.loads()),
            pieces: 1,
            scratch: if self.loads() { n } else { 0 },
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let outgoing = |to: Rank| {
            if self.loads() {
                Slice::scratch(to.0, 1)
            } else {
                Slice::input(to.0, 1)
            }
        };
        // In place, what comes would overwrite what has not gone yet.
        if self.loads() && step == 0 {
            return out.copy(Slice::input(0, n), Slice::scratch(0, n));
        }
        let by = step + 1 - u32::from(self.loads());
        let (to, from) = (after(rank, by, n), before(rank, by, n));
        out.send(to, outgoing(to));
        match self.problem.collective {
            Collective::ReduceScatter { .. } => {
                let sum = Slice::output(0, 1);
                let with = if by == 1 { Slice::input(rank.0, 1) } else { sum };
                out.receive_reduce(from, with, sum);
            }
            _ => {
                if by == 1 {
                    out.copy(outgoing(rank), Slice::output(rank.0, 1));
                }
                out.receive(from, Slice::output(from.0, 1));
            }
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        // The farther the partner, the more likely on another node.
        let Shape { steps, .. } = self.shape();
        let first = u32::from(self.loads());
        let mut cuts = vec![0, first];
        cuts.extend((0..32).map(|bit| first + (1 << bit) - 1).filter(|cut| *cut < steps));
        cuts.push(steps);
        Some(Phase::runs(&cuts, &[Rank(0)]))
    }
}
