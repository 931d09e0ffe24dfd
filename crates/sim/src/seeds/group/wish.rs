//! What ranks call, and what has to come of it.

use std::sync::Arc;

use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::{Buffer, Collective, Counts, Layout, Partition, Problem, Sizes};
use weft_plan::schedule::Program;
use weft_plan::{Datatype, Rank, Reduction};
use weft_protocol::Seeded;
use weft_protocol::group::{CallRecord, Combiner, Compiled, Scope, Source, Task};
use weft_protocol::memory::Digest;

/// A call, in the terms of this play.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::seeds) struct Wish {
    collective: Collective,
    count: u64,
    reduction: Reduction,
    algorithm: Algorithm,
}

/// One rank that calls something else than the others, once.
#[derive(Clone, Copy, Debug)]
pub(in crate::seeds) struct Odd {
    pub(super) rank: usize,
    /// The number of the call.
    pub(super) at: usize,
    pub(super) wish: Wish,
}

impl Wish {
    pub(super) fn new(chance: &mut Seeded, collective: Collective, ranks: u32, count: u64) -> Wish {
        let mut wish = Wish {
            collective,
            count,
            reduction: Reduction::Sum,
            algorithm: Algorithm::ALL[0],
        };
        let suited = |algorithm: &&Algorithm| {
            let problem = Problem::new(collective, ranks);
            algorithm.program(&problem, Grid::flat(ranks)).is_some()
        };
        let suited: Vec<Algorithm> = Algorithm::ALL.iter().filter(suited).copied().collect();
        wish.algorithm = suited[chance.below(suited.len() as u64) as usize];
        wish
    }

    pub(super) fn random(chance: &mut Seeded, ranks: u32) -> Wish {
        let root = Rank(chance.below(ranks.into()) as u32);
        let sizes = Sizes::Equal;
        let all = [
            Collective::AllReduce,
            Collective::Barrier,
            Collective::AllGather { sizes },
            Collective::Broadcast { root },
            Collective::Reduce { root },
            Collective::Gather { root, sizes },
        ];
        let collective = all[chance.below(all.len() as u64) as usize];
        let count = match collective {
            Collective::Barrier => 0,
            _ => 1 + chance.below(40),
        };
        Wish::new(chance, collective, ranks, count)
    }

    /// Another call where this one is due: of another root, another size, by another operator, or something else altogether.
    pub(super) fn differently(&self, chance: &mut Seeded, ranks: u32) -> Wish {
        let other = |root: Rank| Rank((root.0 + 1) % ranks);
        let sizes = Sizes::Equal;
        let collective = match self.collective {
            Collective::Broadcast { root } => Collective::Broadcast { root: other(root) },
            Collective::Reduce { root } => Collective::Reduce { root: other(root) },
            Collective::Gather { root, .. } => Collective::Gather {
                root: other(root),
                sizes,
            },
            same => same,
        };
        match (self.collective, chance.below(3)) {
            (Collective::Barrier, _) | (_, 0) => Wish::new(chance, Collective::AllReduce, ranks, self.count + 1),
            (Collective::AllReduce, 1) => Wish {
                reduction: Reduction::Max,
                ..*self
            },
            (Collective::AllReduce | Collective::AllGather { .. }, _) => Wish {
                count: self.count + 1,
                ..*self
            },
            _ => Wish { collective, ..*self },
        }
    }

    /// The call as one rank makes it: what to run, and its input, output and scratch.
    pub(super) fn made(&self, rank: Rank, number: usize, ranks: u32) -> Result<(Arc<Task>, [Vec<u8>; 3]), String> {
        let problem = Problem::new(self.collective, ranks);
        let program = self.program(ranks);
        let partition = Partition::new(&problem, Counts::Equal(self.count), program.shape().pieces)
            .map_err(|error| error.to_string())?;
        let source = Source {
            program: &*program,
            partition: &partition,
            size: Datatype::U64.size(),
            average: false,
            scope: Scope::Known,
        };
        let compiled = Compiled::new(&source, rank).map_err(|error| error.to_string())?;
        let layout = Layout::new(&partition, &*program, rank);
        let bytes = |buffer| layout.elements(buffer) as usize * source.size;
        let mut input = self.input(rank.0 as usize, number);
        input.truncate(bytes(Buffer::Input));
        let buffers = [
            input,
            vec![0; bytes(Buffer::Output)],
            vec![0; compiled.scratch() as usize],
        ];
        let task = Task {
            compiled,
            combiners: vec![Combiner::Builtin {
                datatype: Datatype::U64,
                reduction: self.reduction,
            }],
            ranks,
            record: CallRecord::new(0, self.signature(), &format!("{self:?}")),
        };
        Ok((Arc::new(task), buffers))
    }

    fn program(&self, ranks: u32) -> Box<dyn Program> {
        let problem = Problem::new(self.collective, ranks);
        let program = self.algorithm.program(&problem, Grid::flat(ranks));
        program.expect("an algorithm that was found to suit")
    }

    fn signature(&self) -> u64 {
        let mut digest = Digest::default();
        digest.update(format!("{self:?}").as_bytes());
        digest.finish()
    }

    /// What a rank has before call `number`.
    fn input(&self, rank: usize, number: usize) -> Vec<u8> {
        let values = (0..self.count).map(|at| at + 1000 * rank as u64 + 7 * number as u64);
        values.flat_map(u64::to_le_bytes).collect()
    }

    /// What it has after it.
    pub(super) fn result(&self, rank: usize, number: usize, ranks: u32) -> Vec<u8> {
        let inputs = || (0..ranks as usize).map(|of| self.input(of, number));
        let sum = || {
            let element = |at: u64| {
                let of = |rank: u64| at + 1000 * rank + 7 * number as u64;
                (0..u64::from(ranks)).map(of).sum::<u64>()
            };
            (0..self.count).flat_map(|at| element(at).to_le_bytes()).collect()
        };
        match self.collective {
            Collective::AllReduce => sum(),
            Collective::Reduce { root } if root.0 as usize == rank => sum(),
            Collective::AllGather { .. } => inputs().flatten().collect(),
            Collective::Gather { root, .. } if root.0 as usize == rank => inputs().flatten().collect(),
            Collective::Broadcast { root } => self.input(root.0 as usize, number),
            _ => Vec::new(),
        }
    }
}
