//! Binomial tree: who has the data passes it on, so that those who have it double in every step. The fewest steps for whatever has a root.
//!
//! Ranks are counted from the root. The subtree of the rank at place *v* is the places that follow it, as many as the lowest bit of
//! *v* says: a contiguous range, so that gather and scatter move one slice (two, where it wraps round behind the last rank).

use super::{after, before, levels};
use crate::collective::{BlockSize, Collective, Extent, Problem, Sizes};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct BinomialTree {
    problem: Problem,
}

impl BinomialTree {
    pub fn new(problem: Problem) -> Option<BinomialTree> {
        let suits = matches!(
            problem.collective,
            Collective::AllReduce
                | Collective::Broadcast { .. }
                | Collective::Reduce { .. }
                | Collective::Gather { .. }
                | Collective::Scatter { .. }
                | Collective::Barrier
        );
        (suits && problem.ranks >= 2).then_some(BinomialTree { problem })
    }

    fn root(&self) -> Rank {
        match self.problem.collective {
            Collective::Broadcast { root }
            | Collective::Reduce { root }
            | Collective::Gather { root, .. }
            | Collective::Scatter { root, .. } => root,
            _ => Rank(0),
        }
    }

    /// What happens between `rank` and another over the edges of length `1 << level`: whether it is the child, and who the other is.
    fn edge(&self, rank: Rank, level: u32) -> Option<(bool, Rank)> {
        let n = self.problem.ranks;
        let place = before(rank, self.root().0, n).0;
        let length = 1 << level;
        match place % (2 * length) {
            0 if length < n - place => Some((false, after(rank, length, n))),
            rest if rest == length => Some((true, before(rank, length, n))),
            _ => None,
        }
    }

    /// How many places the subtree of `rank` has, over edges up to `1 << level`.
    fn subtree(&self, rank: Rank, level: u32) -> u32 {
        let n = self.problem.ranks;
        (1 << level).min(n - before(rank, self.root().0, n).0)
    }

    fn reduce(&self, rank: Rank, level: u32, out: &mut Ops) {
        let (input, sum) = match self.problem.collective {
            Collective::Barrier => (Slice::NOTHING, Slice::NOTHING),
            Collective::Reduce { root } if rank != root => (Slice::input(0, 1), Slice::scratch(0, 1)),
            _ => (Slice::input(0, 1), Slice::output(0, 1)),
        };
        match self.edge(rank, level) {
            Some((true, parent)) => out.send(parent, if self.subtree(rank, level) == 1 { input } else { sum }),
            // Whoever has children has one at distance one.
            Some((false, child)) => out.receive_reduce(child, if level == 0 { input } else { sum }, sum),
            None => {}
        }
    }

    fn broadcast(&self, rank: Rank, level: u32, out: &mut Ops) {
        let data = match self.problem.collective {
            Collective::Barrier => Slice::NOTHING,
            _ => Slice::output(0, 1),
        };
        let at_root = matches!(self.problem.collective, Collective::Broadcast { root } if root == rank);
        match self.edge(rank, level) {
            Some((true, parent)) => out.receive(parent, data),
            Some((false, child)) => out.send(child, if at_root { Slice::input(0, 1) } else { data }),
            None => {}
        }
    }

    fn gather(&self, rank: Rank, level: u32, out: &mut Ops) {
        let root = self.root();
        if level == 0
            && let Some((false, _)) = self.edge(rank, 0)
        {
            let own = if rank == root {
                Slice::output(rank.0, 1)
            } else {
                Slice::scratch(0, 1)
            };
            out.copy(Slice::input(0, 1), own);
        }
        match self.edge(rank, level) {
            Some((true, parent)) => {
                let count = self.subtree(rank, level);
                let held = |first| {
                    if count == 1 {
                        Slice::input(0, 1)
                    } else {
                        Slice::scratch(first, count)
                    }
                };
                match parent == root {
                    true => self.unwrapped(rank, count, |first, _, count| {
                        out.send(parent, Slice { count, ..held(first) });
                    }),
                    false => out.send(parent, held(0)),
                }
            }
            Some((false, child)) => {
                let count = self.subtree(child, level);
                match rank == root {
                    true => self.unwrapped(child, count, |_, block, count| {
                        out.receive(child, Slice::output(block, count));
                    }),
                    false => out.receive(child, Slice::scratch(1 << level, count)),
                }
            }
            None => {}
        }
    }

    fn scatter(&self, rank: Rank, level: u32, out: &mut Ops) {
        let root = self.root();
        match self.edge(rank, level) {
            Some((true, parent)) => {
                let count = self.subtree(rank, level);
                let place = |first| {
                    if count == 1 {
                        Slice::output(0, 1)
                    } else {
                        Slice::scratch(first, count)
                    }
                };
                match parent == root {
                    true => self.unwrapped(rank, count, |first, _, count| {
                        out.receive(parent, Slice { count, ..place(first) });
                    }),
                    false => out.receive(parent, place(0)),
                }
            }
            Some((false, child)) => {
                let count = self.subtree(child, level);
                match rank == root {
                    true => self.unwrapped(child, count, |_, block, count| {
                        out.send(child, Slice::input(block, count));
                    }),
                    false => out.send(child, Slice::scratch(1 << level, count)),
                }
            }
            None => {}
        }
        // Whoever passes on something last passes on to distance one, and then has its own block before it.
        if level == 0 {
            match self.edge(rank, 0) {
                _ if rank == root => out.copy(Slice::input(rank.0, 1), Slice::output(0, 1)),
                Some((false, _)) => out.copy(Slice::scratch(0, 1), Slice::output(0, 1)),
                _ => {}
            }
        }
    }

    /// The blocks of the `count` places from `from` on, as ranges that do not wrap: which of the places, which block, how many.
    fn unwrapped(&self, from: Rank, count: u32, mut each: impl FnMut(u32, u32, u32)) {
        let before_end = count.min(self.problem.ranks - from.0);
        each(0, from.0, before_end);
        if before_end < count {
            each(before_end, 0, count - before_end);
        }
    }
}

impl Program for BinomialTree {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        let levels = levels(n);
        let (steps, scratch) = match self.problem.collective {
            Collective::AllReduce | Collective::Barrier => (2 * levels, 0),
            Collective::Reduce { .. } => (levels, 1),
            // The largest subtree below the root.
            Collective::Gather { .. } | Collective::Scatter { .. } => (levels, 1 << (levels - 1)),
            _ => (levels, 0),
        };
        Shape {
            ranks: n,
            steps,
            pieces: 1,
            scratch,
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let levels = levels(self.problem.ranks);
        let down = |step: u32| levels - 1 - step;
        match self.problem.collective {
            Collective::AllReduce | Collective::Barrier if step >= levels => {
                self.broadcast(rank, down(step - levels), out);
            }
            Collective::AllReduce | Collective::Barrier | Collective::Reduce { .. } => self.reduce(rank, step, out),
            Collective::Broadcast { root } => {
                if rank == root && step == 0 {
                    out.copy(Slice::input(0, 1), Slice::output(0, 1));
                }
                self.broadcast(rank, down(step), out);
            }
            Collective::Gather { .. } => self.gather(rank, step, out),
            _ => self.scatter(rank, down(step), out),
        }
    }

    /// In gather and scatter, the blocks of the rank's subtree.
    fn scratch(&self, rank: Rank, chunk: u32) -> Extent {
        match self.problem.collective.sizes() {
            Sizes::Varying => Extent {
                block: BlockSize::Of(after(rank, chunk, self.problem.ranks)),
                piece: 0,
            },
            Sizes::Equal => Extent::common(0),
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        // The root and its children: the busiest, with whoever shares their nodes.
        let root = self.root();
        let children = (0..levels(self.problem.ranks)).map(|level| after(root, 1 << level, self.problem.ranks));
        let ranks: Vec<Rank> = children.chain([root]).collect();
        Some(Phase::each_step(&self.shape(), &ranks))
    }
}
