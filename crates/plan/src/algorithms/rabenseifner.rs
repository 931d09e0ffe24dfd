//! Rabenseifner's algorithm: reduce-scatter by halving with near partners first, then gather the parts again, at everybody or at the root.
//!
//! Most bytes go to the nearest partner, which is likely on the same node. Where the number of ranks is no power of two, the first ranks
//! pair up and one of each pair stands back: the two reduce one half of the data each, so that this costs half as much as handing
//! all of it over.

use std::ops::Range;

use super::power_below;
use crate::collective::{Collective, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct Rabenseifner {
    problem: Problem,
}

impl Rabenseifner {
    pub fn new(problem: Problem) -> Option<Rabenseifner> {
        let suits = matches!(problem.collective, Collective::AllReduce | Collective::Reduce { .. });
        (suits && problem.ranks >= 2).then_some(Rabenseifner { problem })
    }

    fn core(&self) -> (u32, u32) {
        let core = power_below(self.problem.ranks);
        (core, core.trailing_zeros())
    }

    /// Ranks that pair up, at the beginning: the even one of each goes on.
    fn paired(&self) -> u32 {
        2 * (self.problem.ranks - self.core().0)
    }

    /// The place of a rank among those that go on.
    fn place(&self, rank: Rank) -> Option<u32> {
        match rank.0 < self.paired() {
            true if rank.0 % 2 == 1 => None,
            true => Some(rank.0 / 2),
            false => Some(rank.0 - self.paired() / 2),
        }
    }
    fn rank(&self, place: u32) -> Rank {
        match place < self.paired() / 2 {
            true => Rank(2 * place),
            false => Rank(place + self.paired() / 2),
        }
    }

    /// The chunks that a place is left with after `level` halvings: bit by bit of its number, from the lowest.
    fn range(&self, place: u32, level: u32) -> Range<u32> {
        let (core, _) = self.core();
        let first = (0..level).map(|bit| (place >> bit & 1) * (core >> (bit + 1))).sum();
        first..first + (core >> level)
    }

    fn sum(&self, rank: Rank, range: Range<u32>) -> Slice {
        let count = range.end - range.start;
        match self.problem.collective {
            Collective::Reduce { root } if rank != root => Slice::scratch(range.start, count),
            _ => Slice::output(range.start, count),
        }
    }

    /// The pairs reduce a half each, and put the halves together.
    fn pair_up(&self, rank: Rank, step: u32, out: &mut Ops) {
        if rank.0 >= self.paired() {
            return;
        }
        let (core, _) = self.core();
        let even = rank.0.is_multiple_of(2);
        let partner = Rank(rank.0 ^ 1);
        let (low, high) = (0..core / 2, core / 2..core);
        let input = |range: Range<u32>| Slice::input(range.start, range.end - range.start);
        match (step, even) {
            (0, true) => {
                out.send(partner, input(high));
                out.receive_reduce(partner, input(low.clone()), self.sum(rank, low));
            }
            (0, false) => {
                out.send(partner, input(low));
                out.receive_reduce(partner, input(high.clone()), self.sum(rank, high));
            }
            (_, true) => out.receive(partner, self.sum(rank, high)),
            (_, false) => out.send(partner, self.sum(rank, high)),
        }
    }

    fn halve(&self, rank: Rank, place: u32, level: u32, out: &mut Ops) {
        let other = place ^ (1 << level);
        let (keep, give) = (self.range(place, level + 1), self.range(other, level + 1));
        let held = |range: Range<u32>| match level == 0 && rank.0 >= self.paired() {
            true => Slice::input(range.start, range.end - range.start),
            false => self.sum(rank, range),
        };
        out.send(self.rank(other), held(give));
        out.receive_reduce(self.rank(other), held(keep.clone()), self.sum(rank, keep));
    }

    fn double(&self, rank: Rank, place: u32, level: u32, out: &mut Ops) {
        let other = place ^ (1 << level);
        let (mine, theirs) = (self.range(place, level + 1), self.range(other, level + 1));
        if let Collective::Reduce { root } = self.problem.collective {
            // Only those still matter that agree with the root in all higher bits; of two partners, the one that agrees in this bit too
            // goes on.
            let goal = self.place(root).unwrap_or(root.0 / 2);
            match (place ^ goal) >> level {
                0 => out.receive(self.rank(other), self.sum(rank, theirs)),
                1 => out.send(self.rank(other), self.sum(rank, mine)),
                _ => {}
            }
            return;
        }
        out.send(self.rank(other), self.sum(rank, mine));
        out.receive(self.rank(other), self.sum(rank, theirs));
    }

    /// Those that stood back are told the result, where they need it.
    fn tell(&self, rank: Rank, out: &mut Ops) {
        let (core, _) = self.core();
        let wants = match self.problem.collective {
            Collective::Reduce { root } => root.0 | 1 == rank.0 | 1 && self.place(root).is_none(),
            _ => rank.0 < self.paired(),
        };
        if wants && rank.0.is_multiple_of(2) {
            out.send(Rank(rank.0 + 1), self.sum(rank, 0..core));
        } else if wants {
            out.receive(Rank(rank.0 - 1), self.sum(rank, 0..core));
        }
    }

    /// One of a pair, the last that is in none, and the root.
    fn typical(&self) -> Vec<Rank> {
        let mut ranks = vec![Rank(0), Rank(1), Rank(self.problem.ranks - 1)];
        if let Collective::Reduce { root } = self.problem.collective {
            // Whoever is root, or acts for it, is busy to the end.
            ranks.extend([root, Rank(root.0 & !1)]);
        }
        ranks
    }
}

impl Program for Rabenseifner {
    fn shape(&self) -> Shape {
        let (core, levels) = self.core();
        let (before, after) = if self.paired() > 0 { (2, 1) } else { (0, 0) };
        Shape {
            ranks: self.problem.ranks,
            steps: before + 2 * levels + after,
            pieces: core,
            scratch: if self.problem.collective == Collective::AllReduce {
                0
            } else {
                core
            },
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let (_, levels) = self.core();
        let before = if self.paired() > 0 { 2 } else { 0 };
        if step < before {
            return self.pair_up(rank, step, out);
        }
        let round = step - before;
        match self.place(rank) {
            _ if round == 2 * levels => self.tell(rank, out),
            Some(place) if round < levels => self.halve(rank, place, round, out),
            Some(place) => self.double(rank, place, 2 * levels - 1 - round, out),
            None => {}
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(&self.shape(), &self.typical()))
    }
}
