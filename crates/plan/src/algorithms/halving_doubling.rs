//! Recursive halving and doubling: partial sums are exchanged with partners ever nearer, each time for half as many blocks; results with
//! partners ever farther, each time twice as many. As few bytes as a ring and only logarithmically many steps.
//!
//! Where the number of ranks is no power of two, each rank in excess has another one act for it: that one is told the data before and tells
//! the result after, and holds the blocks of both in between.

use std::ops::Range;

use super::power_below;
use crate::collective::{BlockSize, Collective, Extent, Problem, Sizes};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct HalvingDoubling {
    problem: Problem,
}

impl HalvingDoubling {
    pub fn new(problem: Problem) -> Option<HalvingDoubling> {
        let suits = matches!(
            problem.collective,
            Collective::AllReduce | Collective::AllGather { .. } | Collective::ReduceScatter { .. }
        );
        (suits && problem.ranks >= 2).then_some(HalvingDoubling { problem })
    }

    fn core(&self) -> (u32, u32) {
        let core = power_below(self.problem.ranks);
        (core, core.trailing_zeros())
    }

    /// The blocks that belong to core ranks `owners`: their own, and those of the ranks they act for.
    fn blocks(&self, owners: Range<u32>) -> impl Iterator<Item = (u32, u32)> + use<> {
        let (core, _) = self.core();
        let end = match self.problem.collective {
            Collective::AllReduce => core,
            _ => self.problem.ranks,
        };
        [owners.start..owners.end, owners.start + core..owners.end + core]
            .into_iter()
            .map(move |range| (range.start, range.end.min(end).saturating_sub(range.start)))
            .filter(|&(_, count)| count > 0)
    }

    /// Where partial sums lie.
    fn sum(&self, first: u32, count: u32) -> Slice {
        match self.problem.collective {
            Collective::AllReduce => Slice::output(first, count),
            _ => Slice::scratch(first, count),
        }
    }

    fn halve(&self, rank: Rank, level: u32, acts: bool, out: &mut Ops) {
        let (core, levels) = self.core();
        let size = core >> (level + 1);
        let partner = Rank(rank.0 ^ size);
        let range = |rank: u32| (rank & !(size - 1))..(rank & !(size - 1)) + size;
        let untouched = level == 0 && !acts;
        for (first, count) in self.blocks(range(partner.0)) {
            let held = if untouched {
                Slice::input(first, count)
            } else {
                self.sum(first, count)
            };
            out.send(partner, held);
        }
        for (first, count) in self.blocks(range(rank.0)) {
            let with = if untouched {
                Slice::input(first, count)
            } else {
                self.sum(first, count)
            };
            let home = level + 1 == levels && first == rank.0;
            let into = match self.problem.collective {
                Collective::ReduceScatter { .. } if home => Slice::output(0, 1),
                _ => self.sum(first, count),
            };
            out.receive_reduce(partner, with, into);
        }
    }

    fn double(&self, rank: Rank, level: u32, out: &mut Ops) {
        let size = 1 << level;
        let partner = Rank(rank.0 ^ size);
        let range = |rank: u32| (rank & !(size - 1))..(rank & !(size - 1)) + size;
        for (first, count) in self.blocks(range(rank.0)) {
            out.send(partner, Slice::output(first, count));
        }
        for (first, count) in self.blocks(range(partner.0)) {
            out.receive(partner, Slice::output(first, count));
        }
    }

    /// Before: the ranks in excess hand over what they have.
    fn fold(&self, rank: Rank, acts_for: Option<Rank>, out: &mut Ops) {
        let (core, _) = self.core();
        let gathers = matches!(self.problem.collective, Collective::AllGather { .. });
        let all = match self.problem.collective {
            Collective::AllReduce => core,
            Collective::AllGather { .. } => 1,
            _ => self.problem.ranks,
        };
        if gathers {
            out.copy(Slice::input(0, 1), Slice::output(rank.0, 1));
        }
        if rank.0 >= core {
            out.send(Rank(rank.0 - core), Slice::input(0, all));
        } else if let Some(other) = acts_for {
            match gathers {
                true => out.receive(other, Slice::output(other.0, 1)),
                false => out.receive_reduce(other, Slice::input(0, all), self.sum(0, all)),
            }
        }
    }

    /// After: they are told the result.
    fn unfold(&self, rank: Rank, acts_for: Option<Rank>, out: &mut Ops) {
        let (core, _) = self.core();
        let result = |other: Rank, held: bool| match self.problem.collective {
            Collective::AllReduce => Slice::output(0, core),
            Collective::AllGather { .. } => Slice::output(0, self.problem.ranks),
            _ if held => Slice::scratch(other.0, 1),
            _ => Slice::output(0, 1),
        };
        if rank.0 >= core {
            out.receive(Rank(rank.0 - core), result(rank, false));
        } else if let Some(other) = acts_for {
            out.send(other, result(other, true));
        }
    }
}

impl Program for HalvingDoubling {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        let (core, levels) = self.core();
        let (pieces, scratch, rounds, first) = match self.problem.collective {
            Collective::AllReduce => (core, 0, 2 * levels, 0),
            Collective::ReduceScatter { .. } => (1, n, levels, 0),
            // The own block is copied in a step of its own.
            _ => (1, 0, levels, 1),
        };
        let folds = if core < n { 2 } else { first };
        Shape {
            ranks: n,
            steps: rounds + folds,
            pieces,
            scratch,
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (core, levels) = self.core();
        let gathers = matches!(self.problem.collective, Collective::AllGather { .. });
        let acts_for = (rank.0 < core && rank.0 + core < n).then_some(Rank(rank.0 + core));
        let before = u32::from(core < n || gathers);
        if step < before {
            return self.fold(rank, acts_for, out);
        }
        let round = step - before;
        let halvings = if gathers { 0 } else { levels };
        let doublings = if matches!(self.problem.collective, Collective::ReduceScatter { .. }) {
            0
        } else {
            levels
        };
        if round == halvings + doublings {
            self.unfold(rank, acts_for, out);
        } else if rank.0 >= core {
            // Somebody else acts.
        } else if round < halvings {
            self.halve(rank, round, acts_for.is_some(), out);
        } else {
            self.double(rank, round - halvings, out);
        }
    }

    fn scratch(&self, _: Rank, chunk: u32) -> Extent {
        match self.problem.collective.sizes() {
            Sizes::Varying => Extent {
                block: BlockSize::Of(Rank(chunk)),
                piece: 0,
            },
            Sizes::Equal => Extent::common(0),
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(
            &self.shape(),
            &[Rank(0), Rank(self.problem.ranks - 1)],
        ))
    }
}
