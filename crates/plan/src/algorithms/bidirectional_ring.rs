//! Bidirectional ring: as the ring, but both ways round at once. Half the steps, where links carry both directions at full rate.
//!
//! A block comes to a rank by the shorter way. With an even number of ranks the one opposite is reached clockwise.

use super::{after, before};
use crate::collective::{BlockSize, Collective, Extent, Problem, Sizes};
use crate::schedule::{Ops, Phase, Program, Shape, Slice};
use crate::units::Rank;

#[derive(Clone, Copy, Debug)]
pub struct BidirectionalRing {
    problem: Problem,
}

const CLOCKWISE: u16 = 0;
const BACK: u16 = 1;

impl BidirectionalRing {
    /// Below three ranks there is only one way.
    pub fn new(problem: Problem) -> Option<BidirectionalRing> {
        let suits = matches!(
            problem.collective,
            Collective::AllReduce | Collective::AllGather { .. } | Collective::ReduceScatter { .. }
        );
        (suits && problem.ranks >= 3).then_some(BidirectionalRing { problem })
    }

    /// How many ranks a block goes to clockwise, and how many the other way.
    fn reach(&self) -> (u32, u32) {
        let far = self.problem.ranks - 1;
        (far.div_ceil(2), far / 2)
    }

    /// Step `step` of handing round blocks that all ranks have one of.
    fn gather(&self, rank: Rank, step: u32, own: Slice, out: &mut Ops) {
        let n = self.problem.ranks;
        let held = |block: Rank| if block == rank { own } else { Slice::output(block.0, 1) };
        let (clockwise, back) = self.reach();
        if step < clockwise {
            out.on(CLOCKWISE).send(after(rank, 1, n), held(before(rank, step, n)));
            out.receive(before(rank, 1, n), held(before(rank, step + 1, n)));
        }
        if step < back {
            out.on(BACK).send(before(rank, 1, n), held(after(rank, step, n)));
            out.receive(after(rank, 1, n), held(after(rank, step + 1, n)));
        }
    }

    /// Step `step` of bringing partial sums home: each block's begin at both ends of its way and meet at its rank.
    fn scatter(&self, rank: Rank, step: u32, out: &mut Ops) {
        let n = self.problem.ranks;
        let (clockwise, back) = self.reach();
        let home = match self.problem.collective {
            Collective::AllReduce => Slice::output(rank.0, 1),
            _ => Slice::output(0, 1),
        };
        // Both come home in the last step, hence the shorter way begins later.
        for (channel, length) in [(CLOCKWISE, clockwise), (BACK, back)] {
            let Some(done) = (step + length).checked_sub(clockwise) else {
                continue;
            };
            let left = length - done;
            let (next, previous, sent, taken) = match channel {
                CLOCKWISE => (
                    after(rank, 1, n),
                    before(rank, 1, n),
                    after(rank, left, n),
                    after(rank, left - 1, n),
                ),
                _ => (
                    before(rank, 1, n),
                    after(rank, 1, n),
                    before(rank, left, n),
                    before(rank, left - 1, n),
                ),
            };
            let from = if done == 0 {
                Slice::input(sent.0, 1)
            } else {
                self.partial(channel, sent, step - 1)
            };
            out.on(channel).send(next, from);
            let with = Slice::input(taken.0, 1);
            match taken == rank {
                true if channel == BACK => out.receive_reduce(previous, home, home),
                true => out.receive_reduce(previous, with, home),
                false => out.receive_reduce(previous, with, self.partial(channel, taken, step)),
            }
        }
    }

    /// Where a partial sum waits that came in `step`.
    fn partial(&self, channel: u16, block: Rank, step: u32) -> Slice {
        match self.problem.collective {
            Collective::AllReduce => Slice::output(block.0, 1),
            Collective::ReduceScatter { sizes: Sizes::Varying } => Slice::scratch(block.0, 1),
            _ => Slice::scratch(2 * u32::from(channel) + step % 2, 1),
        }
    }
}

impl Program for BidirectionalRing {
    fn shape(&self) -> Shape {
        let n = self.problem.ranks;
        let (way, _) = self.reach();
        let (steps, pieces, scratch) = match self.problem.collective {
            Collective::AllReduce => (2 * way, n, 0),
            Collective::ReduceScatter { sizes: Sizes::Varying } => (way, 1, n),
            Collective::ReduceScatter { .. } => (way, 1, 4),
            _ => (way, 1, 0),
        };
        Shape {
            ranks: n,
            steps,
            pieces,
            scratch,
            channels: 2,
        }
    }

    fn ops(&self, rank: Rank, step: u32, out: &mut Ops) {
        let (way, _) = self.reach();
        match self.problem.collective {
            Collective::AllReduce if step >= way => self.gather(rank, step - way, Slice::output(rank.0, 1), out),
            Collective::AllGather { .. } => {
                let own = Slice::input(0, 1);
                if step == 0 {
                    out.copy(own, Slice::output(rank.0, 1));
                }
                self.gather(rank, step, own, out);
            }
            _ => self.scatter(rank, step, out),
        }
    }

    fn scratch(&self, _: Rank, chunk: u32) -> Extent {
        match self.problem.collective.sizes() {
            Sizes::Varying => Extent {
                block: BlockSize::Of(Rank(chunk)),
                piece: 0,
            },
            Sizes::Equal => Extent::common(0),
        }
    }

    fn phases(&self) -> Option<Vec<Phase>> {
        let Shape { steps, .. } = self.shape();
        let (way, _) = self.reach();
        // Where the two ways differ in length, the first step of a reduction and the last of a gathering go one way only.
        let mut cuts = vec![0, 1, way - 1, way, way + 1, steps - 1, steps];
        cuts.retain(|cut| *cut <= steps);
        Some(Phase::runs(&cuts, &[Rank(0)]))
    }
}
