//! A program written out: what a file holds, and what a test takes apart.

use super::{Op, Ops, Program, Shape};
use crate::collective::Extent;
use crate::units::Rank;

/// The ops of every rank and step as lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    shape: Shape,
    /// By rank and step. A rank may have fewer steps than the shape says.
    ranks: Vec<Vec<Vec<Op>>>,
    /// The extents of a rank's scratch. A rank without has scratch of the common size.
    scratch: Vec<Vec<Extent>>,
}

impl Listed {
    /// With scratch of the common size. The shape's ranks and steps are those of the lists.
    pub fn new(shape: Shape, ranks: Vec<Vec<Vec<Op>>>) -> Listed {
        let shape = Shape {
            ranks: ranks.len() as u32,
            steps: ranks.iter().map(Vec::len).max().unwrap_or(0) as u32,
            ..shape
        };
        Listed {
            shape,
            ranks,
            scratch: Vec::new(),
        }
    }

    /// With the extents of each rank's scratch.
    pub fn with_scratch(self, scratch: Vec<Vec<Extent>>) -> Listed {
        Listed { scratch, ..self }
    }

    /// Any program, written out.
    pub fn of(program: &dyn Program) -> Listed {
        let shape = program.shape();
        let mut ops = Ops::new();
        let ranks = (0..shape.ranks).map(|rank| {
            let steps = (0..shape.steps).map(|step| ops.fill(program, Rank(rank), step).to_vec());
            steps.collect()
        });
        let ranks = ranks.collect();
        let scratch = (0..shape.ranks).map(|rank| {
            let extents = (0..shape.scratch).map(|chunk| program.scratch(Rank(rank), chunk));
            extents.collect()
        });
        Listed {
            shape,
            ranks,
            scratch: scratch.collect(),
        }
    }

    pub fn ranks(&self) -> &[Vec<Vec<Op>>] {
        &self.ranks
    }
    /// Empty where all of it has the common size.
    pub fn scratch_extents(&self) -> &[Vec<Extent>] {
        &self.scratch
    }
    /// For tests, which break programs by hand.
    #[cfg(test)]
    pub(super) fn step_mut(&mut self, rank: Rank, step: u32) -> &mut Vec<Op> {
        &mut self.ranks[rank.0 as usize][step as usize]
    }
}

impl Program for Listed {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let steps = self.ranks.get(rank.0 as usize);
        let ops = steps.and_then(|steps| steps.get(step as usize));
        ops.into_iter().flatten().for_each(|op| out.push(*op));
    }

    fn scratch(&self, rank: Rank, chunk: u32) -> Extent {
        let given = self
            .scratch
            .get(rank.0 as usize)
            .and_then(|list| list.get(chunk as usize));
        given.copied().unwrap_or(Extent::common(chunk % self.shape.pieces))
    }
}
