//! Hierarchical: the ranks of a node agree first, one of them speaks for all, and then tells the others. The network is crossed as seldom as
//! possible, by few and small messages.

use super::{BinomialTree, Dissemination, Grid, RecursiveDoubling, embed, reduce_all};
use crate::collective::{Buffer, Collective, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Debug)]
pub struct Hierarchical {
    problem: Problem,
    grid: Grid,
    across: Box<dyn Program>,
}

impl Hierarchical {
    pub fn new(problem: Problem, grid: Grid) -> Option<Hierarchical> {
        if !grid.is_deep() || grid.ranks() != problem.ranks {
            return None;
        }
        let on = |collective| Problem::new(collective, grid.nodes);
        let across = match problem.collective {
            // The sums of the nodes lie where their sum shall lie.
            Collective::AllReduce => super::boxed(RecursiveDoubling::new(on(problem.collective).in_place())),
            Collective::Broadcast { root } => {
                let root = Rank(grid.node(root));
                super::boxed(BinomialTree::new(on(Collective::Broadcast { root })))
            }
            Collective::Reduce { root } => {
                let root = Rank(grid.node(root));
                super::boxed(BinomialTree::new(on(Collective::Reduce { root }).in_place()))
            }
            Collective::Barrier => super::boxed(Dissemination::new(on(Collective::Barrier))),
            _ => None,
        }?;
        Some(Hierarchical { problem, grid, across })
    }

    /// The position of the ranks that speak for their nodes.
    fn speaker(&self) -> u32 {
        match self.problem.collective {
            Collective::Broadcast { root } | Collective::Reduce { root } => self.grid.index(root),
            _ => 0,
        }
    }

    /// Input and sum of a node's reduction.
    fn data(&self, rank: Rank) -> (Slice, Slice) {
        match self.problem.collective {
            Collective::Barrier => (Slice::NOTHING, Slice::NOTHING),
            Collective::Reduce { root } if rank != root => (Slice::input(0, 1), Slice::scratch(0, 1)),
            _ => (Slice::input(0, 1), Slice::output(0, 1)),
        }
    }

    fn collect(&self, rank: Rank, out: &mut Ops) {
        let (node, index) = (self.grid.node(rank), self.grid.index(rank));
        let (input, sum) = self.data(rank);
        if index != self.speaker() {
            return out.send(self.grid.rank(node, self.speaker()), input);
        }
        let mut local = Ops::new();
        reduce_all(Rank(index), self.grid.local, input, sum, &mut local);
        for op in local.as_slice() {
            out.push(op.with_peer(|other| self.grid.rank(node, other.0)));
        }
    }

    fn tell(&self, rank: Rank, out: &mut Ops) {
        let (node, index) = (self.grid.node(rank), self.grid.index(rank));
        let result = match self.problem.collective {
            Collective::Barrier => Slice::NOTHING,
            _ => Slice::output(0, 1),
        };
        if index != self.speaker() {
            return out.receive(self.grid.rank(node, self.speaker()), result);
        }
        for other in (0..self.grid.local).filter(|&other| other != index) {
            out.send(self.grid.rank(node, other), result);
        }
    }

    fn speak(&self, rank: Rank, step: u32, out: &mut Ops) {
        if self.grid.index(rank) != self.speaker() {
            return;
        }
        let (_, sum) = self.data(rank);
        let slices = |slice: Slice| match (slice.buffer, self.problem.collective) {
            _ if slice.is_empty() => slice,
            // Below the scratch of the tree lies the sum of the node.
            (Buffer::Scratch, Collective::Reduce { .. }) => Slice::scratch(slice.first + 1, slice.count),
            (Buffer::Input, Collective::AllReduce | Collective::Reduce { .. }) => sum,
            _ => slice,
        };
        let ranks = |node: Rank| self.grid.rank(node.0, self.speaker());
        embed(&*self.across, (Rank(self.grid.node(rank)), step), ranks, slices, out);
    }

    fn collects(&self) -> bool {
        !matches!(self.problem.collective, Collective::Broadcast { .. })
    }
    fn tells(&self) -> bool {
        !matches!(self.problem.collective, Collective::Reduce { .. })
    }
}

impl Program for Hierarchical {
    fn shape(&self) -> Shape {
        let across = self.across.shape();
        let sum = u32::from(matches!(self.problem.collective, Collective::Reduce { .. }));
        Shape {
            ranks: self.problem.ranks,
            steps: across.steps + u32::from(self.collects()) + u32::from(self.tells()),
            pieces: 1,
            scratch: across.scratch + sum,
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let before = u32::from(self.collects());
        if step < before {
            self.collect(rank, out);
        } else if step < before + self.across.shape().steps {
            self.speak(rank, step - before, out);
        } else {
            self.tell(rank, out);
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        let before = u32::from(self.collects());
        let steps = self.shape().steps;
        let ranks = |nodes: &[Rank]| {
            nodes
                .iter()
                .map(|node| self.grid.rank(node.0, self.speaker()))
                .collect()
        };
        let mut phases = self.across.phases()?;
        for phase in &mut phases {
            phase.steps = phase.steps.start + before..phase.steps.end + before;
            phase.ranks = ranks(&phase.ranks);
        }
        let local = |steps| Phase {
            steps,
            ranks: ranks(&[Rank(0)]),
        };
        phases.insert(0, local(0..before));
        phases.push(local(steps - u32::from(self.tells())..steps));
        phases.retain(|phase| !phase.steps.is_empty());
        Some(phases)
    }
}
