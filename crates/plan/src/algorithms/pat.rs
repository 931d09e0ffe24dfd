//! Parallel aggregated trees: for every block a binomial tree of its own, all of them alike and run together, far edges first.
//!
//! The long ways carry few blocks and the short ones many, which suits networks that are slower the farther one goes; in that it is the
//! opposite of Bruck's algorithm, with as few steps. At most `aggregate` blocks go in a step, so that what is under way stays bounded:
//! with one it is as patient as a ring, with half of the ranks it takes logarithmically many steps. Reduce-scatter is the same run backwards.

use super::{after, before, levels};
use crate::collective::{BlockSize, Collective, Extent, Problem, Sizes};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct Pat {
    problem: Problem,
    aggregate: u32,
}

impl Pat {
    pub fn new(problem: Problem) -> Option<Pat> {
        Pat::with_aggregate(problem, u32::MAX)
    }

    /// At most `aggregate` blocks a step.
    pub fn with_aggregate(problem: Problem, aggregate: u32) -> Option<Pat> {
        let suits = matches!(
            problem.collective,
            Collective::AllGather { .. } | Collective::ReduceScatter { .. }
        );
        (suits && problem.ranks >= 2 && aggregate > 0).then_some(Pat { problem, aggregate })
    }

    /// How many blocks a rank hands over distance `1 << level`: one for each of its ways from a block's owner that have no bit below,
    /// and whose end is still below the number of ranks.
    fn blocks(&self, level: u32) -> u32 {
        (self.problem.ranks - 1 - (1 << level)) / (2 << level) + 1
    }

    fn steps_of(&self, level: u32) -> u32 {
        self.blocks(level).div_ceil(self.aggregate)
    }

    /// The level of a step of the all-gather, and which ways (by number) go in it.
    fn portion(&self, step: u32) -> (u32, std::ops::Range<u32>) {
        let mut left = step;
        for level in (0..levels(self.problem.ranks)).rev() {
            let steps = self.steps_of(level);
            if left < steps {
                let first = left * self.aggregate.min(self.blocks(level));
                return (
                    level,
                    first..(first.saturating_add(self.aggregate)).min(self.blocks(level)),
                );
            }
            left -= steps;
        }
        (0, 0..0)
    }

    fn gather(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (level, portion) = self.portion(step);
        let (to, from) = (after(rank, 1 << level, n), before(rank, 1 << level, n));
        for way in portion.map(|nth| nth * (2 << level)) {
            let held = match way {
                0 => Slice::input(0, 1),
                _ => Slice::output(before(rank, way, n).0, 1),
            };
            out.send(to, held);
            out.receive(from, Slice::output(before(from, way, n).0, 1));
        }
    }

    fn scatter(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (level, portion) = self.portion(self.shape().steps - 1 - step);
        let (to, from) = (before(rank, 1 << level, n), after(rank, 1 << level, n));
        for way in portion.map(|nth| nth * (2 << level)) {
            // What goes one way in the all-gather comes back the same way here.
            let gone = way + (1 << level);
            let sent = match gone % 2 == 1 || gone == n - 1 {
                true => Slice::input(before(rank, gone, n).0, 1),
                false => self.partial(gone),
            };
            out.send(to, sent);
            let own = Slice::input(before(rank, way, n).0, 1);
            let sum = self.partial(way);
            // Whoever gets anything for a block gets it over distance one first.
            out.receive_reduce(from, if level == 0 { own } else { sum }, sum);
        }
    }

    /// Where the partial sum of the block lies that is `way` from its owner. Only even ways receive.
    fn partial(&self, way: u32) -> Slice {
        match way {
            0 => Slice::output(0, 1),
            _ => Slice::scratch(way / 2, 1),
        }
    }
}

impl Program for Pat {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        let scatters = matches!(self.problem.collective, Collective::ReduceScatter { .. });
        Shape {
            ranks: n,
            steps: (0..levels(n)).map(|level| self.steps_of(level)).sum(),
            pieces: 1,
            scratch: if scatters { n.div_ceil(2) } else { 0 },
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        match self.problem.collective {
            Collective::ReduceScatter { .. } => self.scatter(rank, step, out),
            _ => {
                if step == 0 {
                    out.copy(Slice::input(0, 1), Slice::output(rank.0, 1));
                }
                self.gather(rank, step, out);
            }
        }
    }

    fn scratch(&self, rank: Rank, chunk: u32) -> Extent {
        match self.problem.collective.sizes() {
            Sizes::Varying => Extent {
                block: BlockSize::Of(before(rank, 2 * chunk, self.problem.ranks)),
                piece: 0,
            },
            Sizes::Equal => Extent::common(0),
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(&self.shape(), &[Rank(0)]))
    }
}
