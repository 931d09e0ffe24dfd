//! Ring: every rank only ever sends to the next one, and all links are busy all the time. The best there is in bytes, with as many
//! steps as there are ranks.
//!
//! All-gather hands blocks on; reduce-scatter hands partial sums on; all-reduce is the second and then the first. Broadcast and reduce
//! are an open chain from or to the root, which pipelining keeps busy.

use super::{after, before};
use crate::collective::{BlockSize, Collective, Extent, Problem, Sizes};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct Ring {
    problem: Problem,
}

impl Ring {
    pub fn new(problem: Problem) -> Option<Ring> {
        let suits = matches!(
            problem.collective,
            Collective::AllReduce
                | Collective::AllGather { .. }
                | Collective::ReduceScatter { .. }
                | Collective::Broadcast { .. }
                | Collective::Reduce { .. }
        );
        (suits && problem.ranks >= 2).then_some(Ring { problem })
    }

    fn all_reduce(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (next, previous) = (after(rank, 1, n), before(rank, 1, n));
        let sent = before(rank, step, n).0;
        let taken = before(rank, step + 1, n).0;
        if step < n - 1 {
            let from = if step == 0 {
                Slice::input(sent, 1)
            } else {
                Slice::output(sent, 1)
            };
            out.send(next, from);
            out.receive_reduce(previous, Slice::input(taken, 1), Slice::output(taken, 1));
        } else {
            // The reduction of chunk `rank + 1` was finished here, and counting on names it as the first to be handed round.
            out.send(next, Slice::output(sent, 1));
            out.receive(previous, Slice::output(taken, 1));
        }
    }

    fn all_gather(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (sent, taken) = (before(rank, step, n), before(rank, step + 1, n));
        if step == 0 {
            out.copy(Slice::input(0, 1), Slice::output(rank.0, 1));
            out.send(after(rank, 1, n), Slice::input(0, 1));
        } else {
            out.send(after(rank, 1, n), Slice::output(sent.0, 1));
        }
        out.receive(before(rank, 1, n), Slice::output(taken.0, 1));
    }

    fn reduce_scatter(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (sent, taken) = (before(rank, step + 1, n), before(rank, step + 2, n));
        let from = match step {
            0 => Slice::input(sent.0, 1),
            _ => self.partial(sent, step - 1),
        };
        let into = if step + 2 == n {
            Slice::output(0, 1)
        } else {
            self.partial(taken, step)
        };
        out.send(after(rank, 1, n), from);
        out.receive_reduce(before(rank, 1, n), Slice::input(taken.0, 1), into);
    }

    /// Where the partial sum of a block lies that came in `step`. Blocks of one size take turns in two places.
    fn partial(&self, block: Rank, step: u32) -> Slice {
        match self.problem.collective.sizes() {
            Sizes::Equal => Slice::scratch(step % 2, 1),
            Sizes::Varying => Slice::scratch(block.0, 1),
        }
    }

    fn broadcast(&self, root: Rank, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let place = before(rank, root.0, n).0;
        if place == 0 && step == 0 {
            out.copy(Slice::input(0, 1), Slice::output(0, 1));
        }
        if place == step && place + 1 < n {
            let from = if place == 0 {
                Slice::input(0, 1)
            } else {
                Slice::output(0, 1)
            };
            out.send(after(rank, 1, n), from);
        }
        if place == step + 1 {
            out.receive(before(rank, 1, n), Slice::output(0, 1));
        }
    }

    fn reduce(&self, root: Rank, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        // How far the rank is from the far end of the chain; the root is farthest.
        let place = n - 1 - before(rank, root.0, n).0;
        let sum = if rank == root {
            Slice::output(0, 1)
        } else {
            Slice::scratch(0, 1)
        };
        if place == step && rank != root {
            let from = if place == 0 { Slice::input(0, 1) } else { sum };
            out.send(before(rank, 1, n), from);
        }
        if place == step + 1 {
            out.receive_reduce(after(rank, 1, n), Slice::input(0, 1), sum);
        }
    }
}

impl Program for Ring {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        let (steps, pieces, scratch) = match self.problem.collective {
            Collective::AllReduce => (2 * (n - 1), n, 0),
            Collective::ReduceScatter { sizes: Sizes::Equal } => (n - 1, 1, 2),
            Collective::ReduceScatter { sizes: Sizes::Varying } => (n - 1, 1, n),
            Collective::Reduce { .. } => (n - 1, 1, 1),
            _ => (n - 1, 1, 0),
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
        match self.problem.collective {
            Collective::AllReduce => self.all_reduce(rank, step, out),
            Collective::AllGather { .. } => self.all_gather(rank, step, out),
            Collective::ReduceScatter { .. } => self.reduce_scatter(rank, step, out),
            Collective::Broadcast { root } => self.broadcast(root, rank, step, out),
            Collective::Reduce { root } => self.reduce(root, rank, step, out),
            _ => {}
        }
    }

    fn scratch(&self, _: Rank, chunk: u32) -> Extent {
        match self.problem.collective {
            Collective::ReduceScatter { sizes: Sizes::Varying } => Extent {
                block: BlockSize::Of(Rank(chunk)),
                piece: 0,
            },
            _ => Extent::common(0),
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        let Shape { steps, ranks, .. } = self.shape();
        match self.problem.collective {
            Collective::Broadcast { .. } | Collective::Reduce { .. } => None,
            Collective::AllReduce => Some(Phase::runs(&[0, ranks - 1, steps], &[Rank(0)])),
            // The own block is copied in the first step.
            _ => Some(Phase::runs(&[0, 1, steps], &[Rank(0)])),
        }
    }
}
