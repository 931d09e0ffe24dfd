//! Rail-aware: ranks in the same position on their nodes talk to each other across, each over its own rail, and the rest is done on the node.
//! Every network card is busy, and no byte crosses from rail to rail.

use super::{Grid, HalvingDoubling, Pat, Ring, boxed, embed};
use crate::collective::{BlockSize, Buffer, Collective, Extent, Problem, Sizes};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

/// How the ranks of a rail do their part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Across {
    Ring,
    /// In logarithmically many steps.
    Doubling,
}

#[derive(Debug)]
pub struct Rail {
    problem: Problem,
    grid: Grid,
    /// What the ranks of a rail do; all-to-all is direct.
    across: Option<Box<dyn Program>>,
}

impl Rail {
    pub fn new(problem: Problem, grid: Grid, across: Across) -> Option<Rail> {
        if !grid.is_deep() || grid.ranks() != problem.ranks {
            return None;
        }
        let on = Problem::new(problem.collective, grid.nodes);
        let across = match (problem.collective, across) {
            (Collective::AllReduce, Across::Ring) => Some(boxed(Ring::new(on.in_place()))?),
            (Collective::AllReduce, Across::Doubling) => Some(boxed(HalvingDoubling::new(on.in_place()))?),
            (Collective::AllGather { .. } | Collective::ReduceScatter { .. }, Across::Ring) => {
                Some(boxed(Ring::new(on))?)
            }
            (Collective::AllGather { .. } | Collective::ReduceScatter { .. }, Across::Doubling) => {
                Some(boxed(Pat::new(on))?)
            }
            (Collective::AllToAll { .. }, Across::Ring) => None,
            _ => return None,
        };
        Some(Rail { problem, grid, across })
    }

    /// The others on the node, with their positions.
    fn neighbours(&self, rank: Rank) -> impl Iterator<Item = (u32, Rank)> + use<> {
        let (grid, node, index) = (self.grid, self.grid.node(rank), self.grid.index(rank));
        (1..grid.local).map(move |by| {
            let other = (index + by) % grid.local;
            (other, grid.rank(node, other))
        })
    }

    /// Into how many pieces the part of a rail is cut.
    fn cut(&self) -> u32 {
        self.across.as_ref().map_or(1, |across| across.shape().pieces)
    }

    /// On the node: what belongs to a rail goes to the rank of that rail, reduced where the collective reduces.
    fn scatter_to_rails(&self, rank: Rank, out: &mut Ops) {
        let (grid, index) = (self.grid, self.grid.index(rank));
        match self.problem.collective {
            Collective::AllReduce => {
                let part = |index: u32| (index * self.cut(), self.cut());
                let (first, count) = part(index);
                let (own, sum) = (Slice::input(first, count), Slice::output(first, count));
                for (other, peer) in self.neighbours(rank) {
                    let (first, count) = part(other);
                    out.send(peer, Slice::input(first, count));
                }
                for (nth, (_, peer)) in self.neighbours(rank).enumerate() {
                    out.receive_reduce(peer, if nth == 0 { own } else { sum }, sum);
                }
            }
            Collective::ReduceScatter { .. } => {
                for (other, peer) in self.neighbours(rank) {
                    for node in 0..grid.nodes {
                        out.send(peer, Slice::input(grid.rank(node, other).0, 1));
                    }
                }
                for (nth, (_, peer)) in self.neighbours(rank).enumerate() {
                    for node in 0..grid.nodes {
                        let (own, sum) = (Slice::input(grid.rank(node, index).0, 1), Slice::scratch(node, 1));
                        out.receive_reduce(peer, if nth == 0 { own } else { sum }, sum);
                    }
                }
            }
            _ => {
                // All-to-all: in scratch lies, for each node, what the ranks of this node have for the rank of this rail there.
                for node in 0..grid.nodes {
                    let place = Slice::scratch(grid.rank(node, index).0, 1);
                    out.copy(Slice::input(grid.rank(node, index).0, 1), place);
                    for (other, peer) in self.neighbours(rank) {
                        out.send(peer, Slice::input(grid.rank(node, other).0, 1));
                        out.receive(peer, Slice::scratch(grid.rank(node, other).0, 1));
                    }
                }
            }
        }
    }

    /// On the node: everybody gets what the others' rails have brought.
    fn gather_rails(&self, rank: Rank, out: &mut Ops) {
        let (grid, index) = (self.grid, self.grid.index(rank));
        for (other, peer) in self.neighbours(rank) {
            match self.problem.collective {
                Collective::AllReduce => {
                    out.send(peer, Slice::output(index * self.cut(), self.cut()));
                    out.receive(peer, Slice::output(other * self.cut(), self.cut()));
                }
                _ => {
                    for node in 0..grid.nodes {
                        out.send(peer, Slice::output(grid.rank(node, index).0, 1));
                        out.receive(peer, Slice::output(grid.rank(node, other).0, 1));
                    }
                }
            }
        }
    }

    fn along_rail(&self, rank: Rank, step: u32, out: &mut Ops) {
        let (grid, node, index) = (self.grid, self.grid.node(rank), self.grid.index(rank));
        let Some(across) = &self.across else {
            for by in 0..grid.nodes {
                let (to, from) = ((node + by) % grid.nodes, (node + grid.nodes - by) % grid.nodes);
                let leaving = Slice::scratch(to * grid.local, grid.local);
                let coming = Slice::output(from * grid.local, grid.local);
                match by {
                    0 => out.copy(leaving, coming),
                    _ => {
                        out.send(grid.rank(to, index), leaving);
                        out.receive(grid.rank(from, index), coming);
                    }
                }
            }
            return;
        };
        let slices = |slice: Slice| match (self.problem.collective, slice.buffer) {
            (Collective::AllReduce, Buffer::Input | Buffer::Output) => {
                Slice::output(index * self.cut() + slice.first, slice.count)
            }
            (Collective::AllGather { .. }, Buffer::Output) => Slice::output(grid.rank(slice.first, index).0, 1),
            (Collective::ReduceScatter { .. }, Buffer::Input) => Slice::scratch(slice.first, slice.count),
            (Collective::ReduceScatter { .. }, Buffer::Scratch) => {
                Slice::scratch(grid.nodes + slice.first, slice.count)
            }
            _ => slice,
        };
        embed(&**across, (Rank(node), step), |to| grid.rank(to.0, index), slices, out);
    }

    /// Whether there is something to do on the node before the rails are used.
    fn begins_on_node(&self) -> bool {
        !matches!(self.problem.collective, Collective::AllGather { .. })
    }

    fn steps_on_rail(&self) -> u32 {
        self.across.as_ref().map_or(1, |across| across.shape().steps)
    }
}

impl Program for Rail {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        let below = self.across.as_ref().map_or(0, |across| across.shape().scratch);
        let (local_steps, pieces, scratch) = match self.problem.collective {
            Collective::AllReduce => (2, self.grid.local * self.cut(), 0),
            Collective::AllGather { .. } => (1, 1, 0),
            Collective::ReduceScatter { .. } => (1, 1, self.grid.nodes + below),
            _ => (1, 1, n),
        };
        Shape {
            ranks: n,
            steps: local_steps + self.steps_on_rail(),
            pieces,
            scratch,
            channels: 1,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let before = u32::from(self.begins_on_node());
        if step < before {
            self.scatter_to_rails(rank, out);
        } else if step < before + self.steps_on_rail() {
            self.along_rail(rank, step - before, out);
        } else {
            self.gather_rails(rank, out);
        }
    }

    fn scratch(&self, rank: Rank, chunk: u32) -> Extent {
        let (grid, index) = (self.grid, self.grid.index(rank));
        let varying = self.problem.collective.sizes() == Sizes::Varying;
        let block = match (self.problem.collective, &self.across) {
            (Collective::AllToAll { .. }, _) if varying => BlockSize::Between {
                from: grid.rank(grid.node(rank), chunk % grid.local),
                to: grid.rank(chunk / grid.local, index),
            },
            (_, Some(across)) if varying => {
                let node = match chunk.checked_sub(grid.nodes) {
                    None => Rank(chunk),
                    Some(below) => match across.scratch(Rank(grid.node(rank)), below).block {
                        BlockSize::Of(node) => node,
                        other => return Extent { block: other, piece: 0 },
                    },
                };
                BlockSize::Of(grid.rank(node.0, index))
            }
            _ => BlockSize::Common,
        };
        Extent { block, piece: 0 }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        let before = u32::from(self.begins_on_node());
        let steps = self.shape().steps;
        let mut cuts = vec![0, before];
        match &self.across {
            Some(across) => cuts.extend(across.phases()?.iter().map(|phase| phase.steps.end + before)),
            None => cuts.push(before + 1),
        }
        cuts.push(steps);
        // Every node is like the first, as long as the rail's own program treats all alike; those in excess are on the last.
        Some(Phase::runs(&cuts, &[Rank(0), Rank(self.problem.ranks - 1)]))
    }
}
