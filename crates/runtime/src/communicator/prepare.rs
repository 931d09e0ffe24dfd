//! A call made ready: its program compiled for this rank and these sizes, and the words that the others are told.

use std::sync::Arc;

use weft_plan::Rank;
use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::{
    Buffer, Collective, Counts, Layout, Partition, PartitionError, Problem, ProblemError, Sizes,
};
use weft_plan::schedule::Fault;
use weft_plan::{Datatype, Reduction};
use weft_protocol::group::{CallRecord, Combiner, CompileError, Compiled, Function, Scope, Source};
use weft_protocol::memory::Digest;

use super::choice::{Reach, Verified, choose};

/// What makes one call different from another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spec {
    pub(super) problem: Problem,
    pub(super) counts: Counts,
    /// The sizes that this rank gives are what all give; otherwise each knows only its own.
    pub(super) counts_agree: bool,
    pub(super) datatype: Datatype,
    pub(super) operator: Operator,
    pub(super) algorithm: Option<Algorithm>,
}

/// How contributions are combined.
#[derive(Clone, Debug)]
pub enum Operator {
    Builtin(Reduction),
    /// The caller's own, on elements of the call's datatype.
    Custom(Arc<dyn Function>),
}

impl PartialEq for Operator {
    fn eq(&self, other: &Operator) -> bool {
        match (self, other) {
            (Operator::Builtin(a), Operator::Builtin(b)) => a == b,
            (Operator::Custom(a), Operator::Custom(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl From<Reduction> for Operator {
    fn from(reduction: Reduction) -> Operator {
        Operator::Builtin(reduction)
    }
}

impl From<Arc<dyn Function>> for Operator {
    fn from(function: Arc<dyn Function>) -> Operator {
        Operator::Custom(function)
    }
}

/// A call that makes no sense as it is: fix it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error(transparent)]
    Sizes(#[from] PartitionError),
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error("{collective} needs {needed} bytes of {buffer}, not {given}")]
    WrongBytes {
        collective: Collective,
        buffer: Buffer,
        needed: u64,
        given: u64,
    },
    #[error("{bytes} bytes are not whole elements of {datatype}, or not as many for every rank")]
    Uneven { bytes: u64, datatype: Datatype },
    #[error("{algorithm} is not for this call")]
    NotForThis { algorithm: Algorithm },
    #[error("{algorithm} does not do what the call asks: {fault}")]
    Faulty { algorithm: Algorithm, fault: Fault },
    #[error("nothing does this call with {channels} channels")]
    NoAlgorithm { channels: u16 },
    #[error("{collective} with buffers that overlap, and not as it would be in place")]
    Overlap { collective: Collective },
    #[error("messages between two ranks and collectives of all cannot be grouped")]
    MixedGroup,
    #[error("there is no rank {} in a group of {ranks}", rank.0)]
    NoSuchRank { rank: Rank, ranks: u32 },
    #[error("a group of no calls")]
    Nothing,
}

#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) specs: Vec<Spec>,
    pub(super) compiled: Arc<Compiled>,
    pub(super) combiners: Arc<[Combiner]>,
    /// With the number of no call yet.
    pub(super) record: CallRecord,
    /// By part: bytes of input, output and scratch.
    pub(super) bytes: Vec<[u64; 3]>,
}

impl Prepared {
    pub(super) fn new(
        specs: &[Spec],
        rank: Rank,
        grid: Grid,
        reach: Reach,
        verified: &mut Verified,
    ) -> Result<Prepared, CallError> {
        if specs.is_empty() {
            return Err(CallError::Nothing);
        }
        let pairwise = |spec: &Spec| matches!(spec.problem.collective, Collective::SendReceive { .. });
        let all_pairwise = specs.iter().all(pairwise);
        if !all_pairwise && specs.iter().any(pairwise) {
            return Err(CallError::MixedGroup);
        }
        let mut chosen = Vec::new();
        for spec in specs {
            let way = Chosen::new(spec, grid, reach)?;
            verified.check(&spec.problem, way.algorithm, &*way.program)?;
            chosen.push(way);
        }
        let sources: Vec<Source<'_>> = chosen
            .iter()
            .zip(specs)
            .map(|(chosen, spec)| Source {
                program: &*chosen.program,
                partition: &chosen.partition,
                size: spec.datatype.size(),
                average: spec.problem.collective.reduces() && spec.operator == Operator::Builtin(Reduction::Avg),
                scope: match (all_pairwise, spec.counts_agree) {
                    (true, _) => Scope::Pairwise {
                        signature: spec.message_signature(),
                    },
                    (false, true) => Scope::Known,
                    (false, false) => Scope::Own,
                },
            })
            .collect();
        let compiled = Compiled::group(&sources, rank, reach.channels)?;
        let bytes = sources.iter().enumerate().map(|(part, source)| {
            let layout = Layout::new(source.partition, source.program, rank);
            let of = |buffer| layout.elements(buffer) * source.size as u64;
            [of(Buffer::Input), of(Buffer::Output), compiled.scratch(part)]
        });
        let bytes = bytes.collect();
        let (signature, words) = match all_pairwise {
            // The two ends group as they like, so that only what a single message is counts.
            true => (1, words(&specs[0], None, specs.len(), rank)),
            false => (
                signature(specs, &chosen),
                words(&specs[0], Some(chosen[0].algorithm), specs.len(), rank),
            ),
        };
        let number = if all_pairwise { CallRecord::PAIRWISE } else { 0 };
        Ok(Prepared {
            specs: specs.to_vec(),
            compiled: Arc::new(compiled),
            combiners: specs.iter().map(Spec::combiner).collect(),
            record: CallRecord::new(number, signature, &words),
            bytes,
        })
    }

    /// Whether the others do not count this call.
    pub(super) fn is_pairwise(&self) -> bool {
        self.record.number == CallRecord::PAIRWISE
    }
}

impl Spec {
    fn combiner(&self) -> Combiner {
        match &self.operator {
            Operator::Builtin(reduction) => Combiner::Builtin {
                datatype: self.datatype,
                reduction: *reduction,
            },
            Operator::Custom(function) => Combiner::Custom {
                size: self.datatype.size(),
                function: function.clone(),
            },
        }
    }

    /// What it runs by.
    pub(super) fn algorithm(&self, grid: Grid, reach: Reach) -> Result<Algorithm, CallError> {
        Ok(Chosen::new(self, grid, reach)?.algorithm)
    }

    /// What the two ends of a message between two ranks must agree on, besides its length.
    fn message_signature(&self) -> u64 {
        let mut digest = Digest::default();
        digest.update(format!("{}", self.datatype).as_bytes());
        digest.finish().max(2)
    }

    /// The elements of its largest block.
    fn elements(&self) -> u64 {
        match &self.counts {
            Counts::Equal(count) => *count,
            Counts::PerRank(list) | Counts::PerPair(list) => list.iter().copied().max().unwrap_or(0),
        }
    }
}

/// An algorithm for a spec.
struct Chosen {
    algorithm: Algorithm,
    program: Box<dyn weft_plan::schedule::Program>,
    partition: Partition,
}

impl Chosen {
    fn new(spec: &Spec, grid: Grid, reach: Reach) -> Result<Chosen, CallError> {
        let Reach { channels, .. } = reach;
        spec.problem.check()?;
        let size = spec.datatype.size() as u64;
        let bytes = spec.elements().saturating_mul(size);
        // Only what goes straight from its owner to its reader can do without knowing the sizes of others.
        let blind = !spec.counts_agree && spec.problem.ranks > 1;
        let (algorithm, program) = match spec.algorithm.or(blind.then_some(Algorithm::Direct)) {
            Some(algorithm) => {
                let program = algorithm.program(&spec.problem, grid);
                let program = program.filter(|program| program.shape().channels <= channels);
                let program = program.filter(|_| !blind || algorithm == Algorithm::Direct);
                (algorithm, program.ok_or(CallError::NotForThis { algorithm })?)
            }
            None => choose(&spec.problem, bytes, grid, reach).ok_or(CallError::NoAlgorithm { channels })?,
        };
        let partition = Partition::new(&spec.problem, spec.counts.clone(), program.shape().pieces)?;
        // Pieces of something large begin on cache lines.
        let partition = match bytes >= 64 << 10 {
            true => partition.with_grain(64 / size.min(64)),
            false => partition,
        };
        Ok(Chosen {
            algorithm,
            program,
            partition,
        })
    }
}

/// A digest of everything that must be alike on all ranks.
fn signature(specs: &[Spec], chosen: &[Chosen]) -> u64 {
    let mut digest = Digest::default();
    for (spec, chosen) in specs.iter().zip(chosen) {
        let Spec {
            problem,
            counts,
            counts_agree,
            datatype,
            operator,
            ..
        } = spec;
        let operator = match operator {
            Operator::Builtin(reduction) if problem.collective.reduces() => reduction.name(),
            Operator::Builtin(_) => "",
            Operator::Custom(_) => "custom",
        };
        // Whether a rank works in place is its own affair: steps and scratch may differ, messages do not.
        let Problem { collective, ranks, .. } = problem;
        let (algorithm, pieces) = (chosen.algorithm, chosen.program.shape().pieces);
        digest.update(format!("{collective:?} {ranks} {datatype} {operator} {algorithm:?} {pieces};").as_bytes());
        if *counts_agree {
            digest.update(format!("{counts:?};").as_bytes());
        }
    }
    // Zero and one stand for no call and for messages between two ranks.
    digest.finish().max(2)
}

/// What a person is told that a rank has called.
fn words(spec: &Spec, algorithm: Option<Algorithm>, parts: usize, rank: Rank) -> String {
    let Spec {
        problem,
        counts,
        datatype,
        operator,
        ..
    } = spec;
    let collective = match problem.collective {
        Collective::SendReceive { from, to } if from == rank => format!("send to rank {}", to.0),
        Collective::SendReceive { from, .. } => format!("receive from rank {}", from.0),
        Collective::Broadcast { root } | Collective::Reduce { root } => {
            format!("{} at root {}", problem.collective, root.0)
        }
        Collective::Gather { root, .. } | Collective::Scatter { root, .. } => {
            format!("{} at root {}", problem.collective, root.0)
        }
        _ => problem.collective.to_string(),
    };
    if problem.collective == Collective::Barrier {
        return collective;
    }
    let operator = match operator {
        Operator::Builtin(reduction) if problem.collective.reduces() => format!(" {reduction}"),
        Operator::Custom(_) if problem.collective.reduces() => " by a function".to_owned(),
        _ => String::new(),
    };
    let place = if problem.in_place { " in place" } else { "" };
    let count = match counts {
        Counts::Equal(count) => format!(" of {count} {datatype}"),
        Counts::PerRank(_) | Counts::PerPair(_) => format!(" of {datatype}"),
    };
    let by = algorithm.map_or_else(String::new, |algorithm| format!(" by {}", algorithm.name()));
    let more = if parts > 1 {
        format!(" and {} more", parts - 1)
    } else {
        String::new()
    };
    format!("{collective}{operator}{place}{count}{by}{more}")
}

/// Whether a collective has blocks of different sizes.
pub(super) fn sizes(counts: &Counts) -> Sizes {
    match counts {
        Counts::Equal(_) => Sizes::Equal,
        Counts::PerRank(_) | Counts::PerPair(_) => Sizes::Varying,
    }
}
