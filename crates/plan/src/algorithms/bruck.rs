//! Bruck's algorithm: blocks travel by the powers of two whose sum is their way, those of all ranks together. The fewest steps for any
//! number of ranks, and for all-gather also the fewest bytes.
//!
//! Reduce-scatter is the same run backwards, and all-reduce is the two after each other. In all-to-all every block travels up to
//! logarithmically many times, which pays for small ones.

use super::{after, before, levels};
use crate::collective::{BlockSize, Collective, Extent, Problem, Sizes};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct Bruck {
    problem: Problem,
}

impl Bruck {
    /// All-to-all only with blocks of one size: they change places on the way.
    pub fn new(problem: Problem) -> Option<Bruck> {
        let suits = matches!(
            problem.collective,
            Collective::AllReduce
                | Collective::AllGather { .. }
                | Collective::ReduceScatter { .. }
                | Collective::AllToAll { sizes: Sizes::Equal }
        );
        (suits && problem.ranks >= 2).then_some(Bruck { problem })
    }

    /// How many blocks move over distance `1 << level`.
    fn blocks(&self, level: u32) -> u32 {
        (1 << level).min(self.problem.ranks - (1 << level))
    }

    /// Every rank hands the blocks it has, beginning with its own, to the one `1 << level` before it.
    fn gather(&self, rank: Rank, level: u32, own: Slice, out: &mut Ops) {
        let n = self.problem.ranks;
        let (to, from) = (before(rank, 1 << level, n), after(rank, 1 << level, n));
        match level {
            0 => out.send(to, own),
            _ => unwrapped(rank, self.blocks(level), n, |_, first, count| {
                out.send(to, Slice::output(first, count));
            }),
        }
        unwrapped(from, self.blocks(level), n, |_, first, count| {
            out.receive(from, Slice::output(first, count));
        });
    }

    /// The partial sums of all blocks, beginning with the own one, as they lie in scratch.
    fn load(&self, rank: Rank, out: &mut Ops) {
        let n = self.problem.ranks;
        unwrapped(rank, n, n, |place, first, count| {
            out.copy(Slice::input(first, count), Slice::scratch(place, count));
        });
    }

    fn scatter(&self, rank: Rank, level: u32, home: Slice, out: &mut Ops) {
        let n = self.problem.ranks;
        let count = self.blocks(level);
        out.send(after(rank, 1 << level, n), Slice::scratch(1 << level, count));
        let held = Slice::scratch(0, count);
        out.receive_reduce(before(rank, 1 << level, n), held, if level == 0 { home } else { held });
    }

    /// Block `way` has still to travel the bits of `way` from `level` on; it lies where its last hop has brought it.
    fn travelling(&self, rank: Rank, way: u32, level: u32) -> Slice {
        let done = way & ((1 << level) - 1);
        match done.checked_ilog2() {
            Some(last) => self.station(way, last),
            None => Slice::input(after(rank, way, self.problem.ranks).0, 1),
        }
    }

    /// Where a block comes to lie that has travelled over `1 << level`.
    fn station(&self, way: u32, level: u32) -> Slice {
        let nth = (way >> (level + 1) << level) | (way & ((1 << level) - 1));
        Slice::scratch(level * self.problem.ranks.div_ceil(2) + nth, 1)
    }

    fn exchange(&self, rank: Rank, level: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (to, from) = (after(rank, 1 << level, n), before(rank, 1 << level, n));
        for way in (1..n).filter(|way| way >> level & 1 == 1) {
            out.send(to, self.travelling(rank, way, level));
            out.receive(from, self.station(way, level));
        }
    }

    fn unload(&self, rank: Rank, out: &mut Ops) {
        let n = self.problem.ranks;
        out.copy(Slice::input(rank.0, 1), Slice::output(rank.0, 1));
        for way in 1..n {
            let from = self.travelling(rank, way, levels(n));
            out.copy(from, Slice::output(before(rank, way, n).0, 1));
        }
    }
}

/// The `count` blocks from `from` on as ranges that do not wrap: which of them, which block, how many.
fn unwrapped(from: Rank, count: u32, ranks: u32, mut each: impl FnMut(u32, u32, u32)) {
    let before_end = count.min(ranks - from.0);
    each(0, from.0, before_end);
    if before_end < count {
        each(before_end, 0, count - before_end);
    }
}

impl Program for Bruck {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        let levels = levels(n);
        let (steps, pieces, scratch) = match self.problem.collective {
            Collective::AllReduce => (1 + 2 * levels, n, n),
            Collective::AllGather { .. } => (levels, 1, 0),
            Collective::ReduceScatter { .. } => (1 + levels, 1, n),
            _ => (levels + 1, 1, levels * n.div_ceil(2)),
        };
        Shape {
            ranks: n,
            steps,
            pieces,
            scratch,
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let levels = levels(self.problem.ranks);
        match self.problem.collective {
            Collective::AllGather { .. } => {
                let own = Slice::input(0, 1);
                if step == 0 {
                    out.copy(own, Slice::output(rank.0, 1));
                }
                self.gather(rank, step, own, out);
            }
            Collective::AllToAll { .. } if step < levels => self.exchange(rank, step, out),
            Collective::AllToAll { .. } => self.unload(rank, out),
            _ if step == 0 => self.load(rank, out),
            Collective::AllReduce if step > levels => {
                self.gather(rank, step - levels - 1, Slice::output(rank.0, 1), out);
            }
            Collective::AllReduce => self.scatter(rank, levels - step, Slice::output(rank.0, 1), out),
            _ => self.scatter(rank, levels - step, Slice::output(0, 1), out),
        }
    }

    /// Block `chunk` counted from the rank's own; in all-to-all, anything.
    fn scratch(&self, rank: Rank, chunk: u32) -> Extent {
        let block = after(rank, chunk, self.problem.ranks);
        match self.problem.collective {
            Collective::AllReduce => Extent::common(block.0),
            Collective::ReduceScatter { sizes: Sizes::Varying } => Extent {
                block: BlockSize::Of(block),
                piece: 0,
            },
            _ => Extent::common(0),
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(&self.shape(), &[Rank(0)]))
    }
}
