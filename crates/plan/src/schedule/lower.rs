//! From a program as an algorithm writes it to one as an executor wants it: data in portions that follow each other. What each op waits for, and
//! which are done in one pass, is decided where bytes are known, when a program is compiled for a rank.
//!
//! A lowered program is a program, and is verified like any other.

use super::{Op, Ops, Phase, Program, Shape, Slice};
use crate::collective::{Buffer, Extent};
use crate::units::Rank;

/// A program that treats the data as so many portions, each of which goes through the program on its own.
///
/// Staggered, a portion is one step behind the one before it, so that several steps of the inner program are under way at a time: the
/// pipeline that keeps a chain or a tree busy. Not staggered, messages only become smaller.
///
/// ```
/// use weft_plan::algorithms::Ring;
/// use weft_plan::collective::{Collective, Problem};
/// use weft_plan::schedule::{Program, lower::Portioned, verify};
/// use weft_plan::Rank;
/// // A chain of eight ranks: 7 steps for all the data, or 7 + 15 for a sixteenth each.
/// let problem = Problem::new(Collective::Broadcast { root: Rank(0) }, 8);
/// let chain = Box::new(Ring::new(problem).unwrap());
/// let pipeline = Portioned::staggered(chain, 16);
/// assert_eq!(pipeline.shape().steps, 7 + 15);
/// verify(&problem, &pipeline)?;
/// # Ok::<(), weft_plan::schedule::Fault>(())
/// ```
#[derive(Debug)]
pub struct Portioned {
    inner: Box<dyn Program>,
    inner_shape: Shape,
    portions: u32,
    stagger: u32,
}

impl Portioned {
    /// Each portion one step behind the one before it.
    pub fn staggered(inner: Box<dyn Program>, portions: u32) -> Portioned {
        Portioned::new(inner, portions, 1)
    }

    /// All portions in the same step.
    pub fn together(inner: Box<dyn Program>, portions: u32) -> Portioned {
        Portioned::new(inner, portions, 0)
    }

    fn new(inner: Box<dyn Program>, portions: u32, stagger: u32) -> Portioned {
        let inner_shape = inner.shape();
        Portioned {
            inner,
            inner_shape,
            portions: portions.max(1),
            stagger,
        }
    }

    /// The piece of its block that a chunk of the inner program is.
    fn piece(&self, rank: Rank, buffer: Buffer, chunk: u32) -> u32 {
        match buffer {
            Buffer::Scratch => self.inner.scratch(rank, chunk).piece,
            Buffer::Input | Buffer::Output => chunk % self.inner_shape.pieces,
        }
    }

    /// A portion of a slice is contiguous as long as the slice stays within a block; this is how many chunks do so from `first` on.
    /// Both ends of a message cut alike, because the chunks of both are the same pieces.
    fn run(&self, rank: Rank, slice: Slice, first: u32) -> u32 {
        let start = self.piece(rank, slice.buffer, slice.first + first);
        let follows = |&i: &u32| self.piece(rank, slice.buffer, slice.first + first + i) == start + i;
        1 + (1..slice.count - first).take_while(follows).count() as u32
    }

    /// Portion `portion` of chunks `first..first + count` of a slice.
    fn portion(&self, slice: Slice, first: u32, count: u32, portion: u32) -> Slice {
        let Shape { pieces, scratch, .. } = self.inner_shape;
        let chunk = slice.first + first;
        let first = match slice.buffer {
            Buffer::Scratch => portion * scratch + chunk,
            Buffer::Input | Buffer::Output => {
                chunk / pieces * pieces * self.portions + portion * pieces + chunk % pieces
            }
        };
        Slice { first, count, ..slice }
    }

    fn push(&self, rank: Rank, op: &Op, portion: u32, out: &mut Ops) {
        let whole = match *op {
            Op::Send { slice, .. } => slice,
            _ => op.writes().unwrap_or(Slice::NOTHING),
        };
        if whole.is_empty() {
            // A message of nothing is needed once.
            if portion == 0 {
                out.push(*op);
            }
            return;
        }
        let mut first = 0;
        while first < whole.count {
            let count = self.run(rank, whole, first);
            let cut = |slice: Slice| self.portion(slice, first, count, portion);
            out.push(op.with_slices(cut));
            first += count;
        }
    }
}

impl Program for Portioned {
    fn shape(&self) -> Shape {
        let inner = self.inner_shape;
        Shape {
            steps: inner.steps + self.stagger * (self.portions - 1),
            pieces: inner.pieces.saturating_mul(self.portions),
            scratch: inner.scratch.saturating_mul(self.portions),
            ..inner
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let mut ops = Ops::new();
        for portion in 0..self.portions {
            if let Some(inner_step) = step.checked_sub(self.stagger * portion)
                && inner_step < self.inner_shape.steps
            {
                for op in ops.fill(&*self.inner, rank, inner_step) {
                    self.push(rank, op, portion, out);
                }
            }
        }
    }

    fn scratch(&self, rank: Rank, chunk: u32) -> Extent {
        let Shape { pieces, scratch, .. } = self.inner_shape;
        let inner = self.inner.scratch(rank, chunk % scratch);
        Extent {
            piece: chunk / scratch * pieces + inner.piece,
            ..inner
        }
    }

    /// Between two steps in which some portion enters another phase, all steps are alike.
    fn phases(&self) -> Option<Vec<Phase>> {
        let inner = self.inner.phases()?;
        let mut cuts: Vec<u32> = vec![0];
        for portion in 0..self.portions {
            cuts.extend(inner.iter().map(|phase| phase.steps.start + self.stagger * portion));
            cuts.push(self.inner_shape.steps + self.stagger * portion);
        }
        let mut ranks: Vec<Rank> = inner.into_iter().flat_map(|phase| phase.ranks).collect();
        ranks.sort_unstable();
        ranks.dedup();
        Some(Phase::runs(&cuts, &ranks))
    }
}
