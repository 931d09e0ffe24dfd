//! Direct: every rank talks to every other at once. One step, and as many messages as there are pairs; what is small, or is all-to-all
//! anyway, is done fastest this way. For all-reduce this is called one-shot.

use super::{others, reduce_all, sources};
use crate::collective::{Collective, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct Direct {
    problem: Problem,
}

impl Direct {
    pub fn new(problem: Problem) -> Option<Direct> {
        (problem.ranks >= 2).then_some(Direct { problem })
    }

    /// Every rank adds everything up, in the order of ranks, so that all get the same to the last bit.
    fn all_reduce(&self, rank: Rank, out: &mut Ops) {
        let n = self.problem.ranks;
        let (input, output) = (Slice::input(0, 1), Slice::output(0, 1));
        for to in others(rank, n) {
            out.send(to, input);
        }
        for from in (0..n).map(Rank) {
            match (from == rank, from.0) {
                (true, 0) => out.copy(input, output),
                (true, _) => out.reduce(input, output, output),
                (false, 0) => out.receive(from, output),
                (false, _) => out.receive_reduce(from, output, output),
            }
        }
    }

    /// In place, the output would overwrite what others still read, so that what comes waits in scratch. The order of the sum is the
    /// same: first what comes before the own contribution, then that, then the rest.
    fn all_reduce_in_place(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (input, output) = (Slice::input(0, 1), Slice::output(0, 1));
        let of = |from: u32| Slice::scratch(from, 1);
        match step {
            0 => {
                others(rank, n).for_each(|to| out.send(to, input));
                sources(rank, n).for_each(|from| out.receive(from, of(from.0)));
            }
            1 => (1..rank.0).for_each(|from| out.reduce(of(from), of(0), of(0))),
            _ => {
                // Of two terms the order does not matter, hence ranks 0 and 1 begin with each other's.
                let first = if rank.0 == 0 { 1 } else { 0 };
                out.reduce(of(first), input, output);
                (rank.0.max(1) + 1..n).for_each(|from| out.reduce(of(from), output, output));
            }
        }
    }

    fn gather(&self, root: Option<Rank>, rank: Rank, out: &mut Ops) {
        let n = self.problem.ranks;
        for to in others(rank, n).filter(|&to| root.is_none_or(|root| root == to)) {
            out.send(to, Slice::input(0, 1));
        }
        if root.is_none_or(|root| root == rank) {
            out.copy(Slice::input(0, 1), Slice::output(rank.0, 1));
            for from in sources(rank, n) {
                out.receive(from, Slice::output(from.0, 1));
            }
        }
    }

    fn all_to_all(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let outgoing = |to: u32| {
            if self.problem.in_place {
                Slice::scratch(to, 1)
            } else {
                Slice::input(to, 1)
            }
        };
        if self.problem.in_place && step == 0 {
            out.copy(Slice::input(0, n), Slice::scratch(0, n));
            return;
        }
        out.copy(outgoing(rank.0), Slice::output(rank.0, 1));
        others(rank, n).for_each(|to| out.send(to, outgoing(to.0)));
        sources(rank, n).for_each(|from| out.receive(from, Slice::output(from.0, 1)));
    }

    /// The root, where there is one, and somebody else.
    fn typical(&self) -> Vec<Rank> {
        let n = self.problem.ranks;
        match self.problem.collective {
            Collective::Broadcast { root }
            | Collective::Reduce { root }
            | Collective::Gather { root, .. }
            | Collective::Scatter { root, .. } => vec![root, super::after(root, n / 2, n)],
            Collective::SendReceive { from, to } => vec![from, to],
            // In place, how much is left to add up depends on the rank.
            Collective::AllReduce => vec![Rank(0), Rank(n - 1)],
            _ => vec![Rank(0)],
        }
    }
}

impl Program for Direct {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        let (steps, scratch) = match (self.problem.collective, self.problem.in_place) {
            (Collective::AllReduce, true) => (3, n),
            (Collective::AllToAll { .. }, true) => (2, n),
            _ => (1, 0),
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
        let n = self.problem.ranks;
        let (input, output) = (Slice::input(0, 1), Slice::output(0, 1));
        match self.problem.collective {
            Collective::AllReduce if self.problem.in_place => self.all_reduce_in_place(rank, step, out),
            Collective::AllReduce => self.all_reduce(rank, out),
            Collective::AllGather { .. } => self.gather(None, rank, out),
            Collective::Gather { root, .. } => self.gather(Some(root), rank, out),
            Collective::ReduceScatter { .. } => {
                others(rank, n).for_each(|to| out.send(to, Slice::input(to.0, 1)));
                reduce_all(rank, n, Slice::input(rank.0, 1), output, out);
            }
            Collective::Reduce { root } if rank == root => reduce_all(rank, n, input, output, out),
            Collective::Reduce { root } => out.send(root, input),
            Collective::Broadcast { root } if rank == root => {
                out.copy(input, output);
                others(rank, n).for_each(|to| out.send(to, input));
            }
            Collective::Scatter { root, .. } if rank == root => {
                out.copy(Slice::input(rank.0, 1), output);
                others(rank, n).for_each(|to| out.send(to, Slice::input(to.0, 1)));
            }
            Collective::Broadcast { root } | Collective::Scatter { root, .. } => out.receive(root, output),
            Collective::AllToAll { .. } => self.all_to_all(rank, step, out),
            Collective::SendReceive { from, to } if rank == from => out.send(to, input),
            Collective::SendReceive { from, to } if rank == to => out.receive(from, output),
            Collective::SendReceive { .. } => {}
            Collective::Barrier => {
                others(rank, n).for_each(|to| out.send(to, Slice::NOTHING));
                sources(rank, n).for_each(|from| out.receive(from, Slice::NOTHING));
            }
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(&self.shape(), &self.typical()))
    }
}
