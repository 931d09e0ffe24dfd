//! Double binary tree: half of the data goes through one binary tree, half through another in which the leaves of the first are inside.
//! As few steps as a tree has, and, cut into pieces that follow each other, nearly the bandwidth of a ring.
//!
//! The first tree stands over the places in order: a place is as high as its lowest bit, its children lie half that far to both sides, and
//! place 0 is above all. The second is its mirror image, or, with an odd number of ranks, moved on by one.

use super::{after, before, levels};
use crate::collective::{Collective, Problem};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct DoubleBinaryTree {
    problem: Problem,
}

impl DoubleBinaryTree {
    pub fn new(problem: Problem) -> Option<DoubleBinaryTree> {
        let suits = matches!(
            problem.collective,
            Collective::AllReduce | Collective::Broadcast { .. } | Collective::Reduce { .. }
        );
        (suits && problem.ranks >= 2).then_some(DoubleBinaryTree { problem })
    }

    fn root(&self) -> Rank {
        match self.problem.collective {
            Collective::Broadcast { root } | Collective::Reduce { root } => root,
            _ => Rank(0),
        }
    }

    /// The place of a rank in a tree, and back.
    fn place(&self, tree: u32, rank: Rank) -> u32 {
        let n = self.problem.ranks;
        let place = before(rank, self.root().0, n).0;
        match (tree, n % 2) {
            (0, _) => place,
            (_, 0) => n - 1 - place,
            _ => (place + n - 1) % n,
        }
    }
    fn rank(&self, tree: u32, place: u32) -> Rank {
        let n = self.problem.ranks;
        let place = match (tree, n % 2) {
            (0, _) => place,
            (_, 0) => n - 1 - place,
            _ => (place + 1) % n,
        };
        after(self.root(), place, n)
    }

    fn parent(&self, place: u32) -> Option<u32> {
        if place == 0 {
            return None;
        }
        let height = place & place.wrapping_neg();
        let above = (place ^ height) | (2 * height);
        Some(if above < self.problem.ranks {
            above
        } else {
            place ^ height
        })
    }

    fn children(&self, place: u32) -> impl Iterator<Item = u32> + use<> {
        let n = self.problem.ranks;
        let (left, mut reach) = match place {
            0 => (None, 1 << (levels(n) - 1)),
            _ => {
                let half = (place & place.wrapping_neg()) / 2;
                ((half > 0).then(|| place - half), half)
            }
        };
        // To the right the tree may end early; then a lower place stands in for the missing one.
        while reach > 0 && reach >= n - place {
            reach /= 2;
        }
        left.into_iter().chain((reach > 0).then(|| place + reach))
    }

    fn depth(&self, mut place: u32) -> u32 {
        let mut depth = 0;
        while let Some(above) = self.parent(place) {
            place = above;
            depth += 1;
        }
        depth
    }

    /// Partial sums on their way up; `step` counts from the deepest places.
    fn up(&self, tree: u32, rank: Rank, step: u32, out: &mut Ops) {
        let place = self.place(tree, rank);
        let sum = match self.problem.collective {
            Collective::Reduce { root } if rank != root => Slice::scratch(tree, 1),
            _ => Slice::output(tree, 1),
        };
        let (height, depth) = (levels(self.problem.ranks), self.depth(place));
        let mut children = self.children(place).peekable();
        if step + depth == height
            && let Some(parent) = self.parent(place)
        {
            let leaf = children.peek().is_none();
            out.send(self.rank(tree, parent), if leaf { Slice::input(tree, 1) } else { sum });
        }
        if step + depth + 1 == height {
            for (nth, child) in children.enumerate() {
                let with = if nth == 0 { Slice::input(tree, 1) } else { sum };
                out.receive_reduce(self.rank(tree, child), with, sum);
            }
        }
    }

    /// Results on their way down; `step` counts from the top.
    fn down(&self, tree: u32, rank: Rank, step: u32, out: &mut Ops) {
        // The root of a broadcast has the data already, wherever it stands in the second tree.
        let source = match self.problem.collective {
            Collective::Broadcast { root } => Some(root),
            _ => None,
        };
        let place = self.place(tree, rank);
        let depth = self.depth(place);
        if step == depth {
            let held = if source == Some(rank) {
                Slice::input(tree, 1)
            } else {
                Slice::output(tree, 1)
            };
            for child in self.children(place).map(|child| self.rank(tree, child)) {
                if source != Some(child) {
                    out.send(child, held);
                }
            }
        }
        if step + 1 == depth
            && source != Some(rank)
            && let Some(parent) = self.parent(place)
        {
            out.receive(self.rank(tree, parent), Slice::output(tree, 1));
        }
    }

    /// Some of every height, in both trees: those that are first of their height, and their neighbours.
    fn typical(&self) -> Vec<Rank> {
        let heights = (0..levels(self.problem.ranks)).flat_map(|bit| [1 << bit, 3 << bit]);
        let places = heights.chain([0]).filter(|&place| place < self.problem.ranks);
        places
            .flat_map(|place| [self.rank(0, place), self.rank(1, place)])
            .collect()
    }
}

impl Program for DoubleBinaryTree {
    fn shape(&self) -> Shape {
        let height = levels(self.problem.ranks);
        let (steps, scratch) = match self.problem.collective {
            Collective::AllReduce => (2 * height, 0),
            // One step more, between the root and the top of the second tree.
            Collective::Reduce { .. } => (height + 1, 2),
            _ => (height + 1, 0),
        };
        Shape {
            ranks: self.problem.ranks,
            steps,
            pieces: 2,
            scratch,
            channels: 2,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let height = levels(self.problem.ranks);
        let top = self.rank(1, 0);
        if step == 0 && self.problem.collective == (Collective::Broadcast { root: rank }) {
            out.copy(Slice::input(0, 2), Slice::output(0, 2));
        }
        for tree in 0..2 {
            out.on(tree as u16);
            match self.problem.collective {
                Collective::AllReduce if step < height => self.up(tree, rank, step, out),
                Collective::AllReduce => self.down(tree, rank, step - height, out),
                Collective::Reduce { .. } if step < height => self.up(tree, rank, step, out),
                Collective::Reduce { root } if tree == 1 => {
                    if rank == top {
                        out.send(root, Slice::scratch(1, 1));
                    } else if rank == root {
                        out.receive(top, Slice::output(1, 1));
                    }
                }
                Collective::Broadcast { root } if tree == 1 && step == 0 => {
                    if rank == root {
                        out.send(top, Slice::input(1, 1));
                    } else if rank == top {
                        out.receive(root, Slice::output(1, 1));
                    }
                }
                Collective::Broadcast { .. } if tree == 0 => self.down(0, rank, step, out),
                Collective::Broadcast { .. } if step > 0 => self.down(1, rank, step - 1, out),
                _ => {}
            }
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        Some(Phase::each_step(&self.shape(), &self.typical()))
    }
}
