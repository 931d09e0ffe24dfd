//! Striped: one message as several, each on a channel of its own, so that no single connection or core limits it.

use crate::collective::{Collective, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

/// As many connections as one host usually profits from.
const STRIPES: u16 = 4;

#[derive(Clone, Copy, Debug)]
pub struct Striped {
    problem: Problem,
}

impl Striped {
    pub fn new(problem: Problem) -> Option<Striped> {
        matches!(problem.collective, Collective::SendReceive { .. }).then_some(Striped { problem })
    }
}

impl Striped {
    fn ends(&self) -> Vec<Rank> {
        match self.problem.collective {
            Collective::SendReceive { from, to } => vec![from, to],
            _ => Vec::new(),
        }
    }
}

impl Program for Striped {
    fn shape(&self) -> Shape {
        Shape {
            ranks: self.problem.ranks,
            steps: 1,
            pieces: STRIPES.into(),
            scratch: 0,
            channels: STRIPES,
        }
    }

    fn ops(&self, rank: Rank, _: u32, out: &mut Ops) {
        let Collective::SendReceive { from, to } = self.problem.collective else {
            return;
        };
        for stripe in 0..STRIPES {
            if rank == from {
                out.on(stripe).send(to, Slice::input(stripe.into(), 1));
            } else if rank == to {
                out.on(stripe).receive(from, Slice::output(stripe.into(), 1));
            }
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(&self.shape(), &self.ends()))
    }
}
