//! A call made ready: its program compiled for this rank and these sizes, and the words that the others are told.

use std::sync::Arc;

use weft_plan::Rank;
use weft_plan::algorithms::Algorithm;
use weft_plan::collective::{
    Buffer, Collective, Counts, Layout, Partition, PartitionError, Problem, ProblemError, Sizes,
};
use weft_plan::cost::Candidate;
use weft_plan::datatype::quantized::Quantization;
use weft_plan::schedule::{Fault, Program, verify};
use weft_plan::{Bytes, Datatype, Reduction};
use weft_protocol::group::{CallRecord, Combiner, CompileError, Compiled, Function, Scope, Source, Task};
use weft_protocol::memory::Digest;

use super::call::{Described, One};
use super::choice::{Choice, Manner};
use super::schedule::{Schedule, Way};

/// What makes one call different from another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spec {
    pub(super) problem: Problem,
    pub(super) counts: Counts,
    /// The sizes that this rank gives are what all give; otherwise each knows only its own.
    pub(super) counts_agree: bool,
    pub(super) datatype: Datatype,
    pub(super) operator: Operator,
    /// What it is to run by, where the caller says so.
    pub(super) way: Option<Way>,
    pub(super) deterministic: bool,
    /// What its bytes are codes of, in a quantised call.
    pub(super) quantized: Option<Quantization>,
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
    NotForThis { algorithm: Candidate },
    #[error("{by} does not do what the call asks: {fault}")]
    Faulty { by: String, fault: Fault },
    #[error("the schedule {schedule:?} is for {scheduled}, the call is {called}")]
    WrongSchedule {
        schedule: String,
        scheduled: String,
        called: String,
    },
    #[error("{reduction} is not done with quantised floats, only sum and avg are")]
    NotQuantized { reduction: Reduction },
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
    specs: Vec<Spec>,
    pub(super) task: Arc<Task>,
    /// By part: bytes of input and output.
    bytes: Vec<[u64; 2]>,
    /// Bytes of scratch to have for it, and for calls that need somewhat more.
    pub(super) scratch: usize,
}

impl Prepared {
    pub(super) fn new(specs: Vec<Spec>, rank: Rank, choice: &mut Choice) -> Result<Prepared, CallError> {
        if specs.is_empty() {
            return Err(CallError::Nothing);
        }
        if specs.iter().any(Spec::is_message) {
            return Err(CallError::MixedGroup);
        }
        let mut chosen = Vec::new();
        for spec in &specs {
            chosen.push(Chosen::new(spec, choice)?);
        }
        let sources: Vec<Source<'_>> = chosen
            .iter()
            .zip(&specs)
            .map(|(chosen, spec)| Source {
                program: chosen.program.as_dyn(),
                partition: &chosen.partition,
                size: spec.datatype.size(),
                average: spec.problem.collective.reduces() && spec.operator == Operator::Builtin(Reduction::Avg),
                scope: match spec.counts_agree {
                    true => Scope::Known,
                    false => Scope::Own,
                },
            })
            .collect();
        let compiled = Compiled::group(&sources, rank, choice.channels())?;
        let bytes = sources.iter().map(|source| {
            let layout = Layout::new(source.partition, source.program, rank);
            [Buffer::Input, Buffer::Output].map(|buffer| layout.elements(buffer) * source.size as u64)
        });
        let bytes = bytes.collect();
        let scratch = match compiled.scratch() {
            0 => Some(0),
            needed => usize::try_from(needed).ok().and_then(usize::checked_next_power_of_two),
        };
        let words = words(&specs[0], Some(&chosen[0].way), specs.len(), rank);
        let task = Arc::new(Task {
            compiled,
            combiners: specs.iter().map(Spec::combiner).collect(),
            ranks: specs[0].problem.ranks,
            record: CallRecord::new(0, signature(&specs, &chosen), &words),
        });
        Ok(Prepared {
            specs,
            task,
            bytes,
            scratch: scratch.ok_or(CompileError::TooLarge)?,
        })
    }

    /// Whether it was prepared for calls like this one.
    pub(super) fn is_for(&self, call: &Described) -> bool {
        self.specs[0] == call.first.spec && self.specs[1..].iter().eq(call.more.iter().map(|one| &one.spec))
    }

    /// Whether the buffers of a call are what it needs.
    pub(super) fn check(&self, call: &Described) -> Result<(), CallError> {
        let check = |one: &One, needed: &[u64; 2]| {
            let Some(given) = &one.parts else { return Ok(()) };
            let given = given.each_ref().map(|part| part.len);
            let wrong = |buffer: Buffer, at: usize| CallError::WrongBytes {
                collective: one.spec.problem.collective,
                buffer,
                needed: needed[at],
                given: given[at],
            };
            match (given[0] == needed[0], given[1] == needed[1]) {
                (true, true) => Ok(()),
                (false, _) => Err(wrong(Buffer::Input, 0)),
                (true, false) => Err(wrong(Buffer::Output, 1)),
            }
        };
        check(&call.first, &self.bytes[0])?;
        let mut more = call.more.iter().zip(&self.bytes[1..]);
        more.try_for_each(|(one, needed)| check(one, needed))
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
    pub(super) fn runs_by(&self, choice: &mut Choice) -> Result<Way, CallError> {
        Ok(Chosen::new(self, choice)?.way)
    }

    /// Whether it is a message between two ranks, of which the others know nothing.
    pub(super) fn is_message(&self) -> bool {
        matches!(self.problem.collective, Collective::SendReceive { .. })
    }

    /// Whether a message makes sense.
    pub(super) fn check_message(&self) -> Result<(), CallError> {
        self.problem.check()?;
        match &self.way {
            Some(Way::Algorithm(candidate)) if candidate.algorithm != Algorithm::Direct => {
                Err(CallError::NotForThis { algorithm: *candidate })
            }
            // A schedule of two ranks that is one for messages does what a message does.
            _ => Ok(()),
        }
    }

    /// What the two ends of a message between two ranks must agree on, besides its length.
    pub(super) fn message_signature(&self) -> u64 {
        let mut digest = Digest::default();
        digest.update(format!("{}", self.datatype).as_bytes());
        digest.finish().max(2)
    }

    /// Its size, as [`Problem::blocks_in_size`] means it.
    fn bytes(&self) -> Bytes {
        let elements = match &self.counts {
            Counts::Equal(count) => count.saturating_mul(self.problem.blocks_in_size().into()),
            Counts::PerRank(list) | Counts::PerPair(list) => {
                list.iter().fold(0, |sum: u64, count| sum.saturating_add(*count))
            }
        };
        Bytes(elements.saturating_mul(self.datatype.size() as u64))
    }

    /// The elements of its largest block.
    fn elements(&self) -> u64 {
        match &self.counts {
            Counts::Equal(count) => *count,
            Counts::PerRank(list) | Counts::PerPair(list) => list.iter().copied().max().unwrap_or(0),
        }
    }
}

/// A way to do a spec.
struct Chosen {
    way: Way,
    program: Made,
    partition: Partition,
}

/// A program, made for this call or brought by the caller.
enum Made {
    Here(Box<dyn Program>),
    Brought(Schedule),
}

impl Made {
    fn as_dyn(&self) -> &dyn Program {
        match self {
            Made::Here(program) => &**program,
            Made::Brought(schedule) => schedule.program(),
        }
    }
}

impl Chosen {
    fn new(spec: &Spec, choice: &mut Choice) -> Result<Chosen, CallError> {
        spec.problem.check()?;
        // Only what goes straight from its owner to its reader can do without knowing the sizes of others.
        let blind = !spec.counts_agree && spec.problem.ranks > 1;
        let (way, program) = match &spec.way {
            Some(Way::Schedule(schedule)) => {
                suits(schedule, spec, choice.channels())?;
                (Way::Schedule(schedule.clone()), Made::Brought(schedule.clone()))
            }
            Some(Way::Algorithm(candidate)) if blind && candidate.algorithm != Algorithm::Direct => {
                return Err(CallError::NotForThis { algorithm: *candidate });
            }
            Some(Way::Algorithm(candidate)) => by_algorithm(spec, *candidate, choice)?,
            None if blind => by_algorithm(spec, Algorithm::Direct.into(), choice)?,
            None => {
                let manner = match spec.deterministic {
                    true => Manner::Deterministic,
                    false => Manner::Fastest,
                };
                let channels = choice.channels();
                let chosen = choice.choose(&spec.problem, spec.bytes(), manner);
                by_algorithm(spec, chosen.ok_or(CallError::NoAlgorithm { channels })?, choice)?
            }
        };
        let pieces = program.as_dyn().shape().pieces;
        let partition = Partition::new(&spec.problem, spec.counts.clone(), pieces)?;
        let size = spec.datatype.size() as u64;
        // Pieces of something large begin on cache lines.
        let partition = match spec.elements().saturating_mul(size) >= 64 << 10 {
            true => partition.with_grain(64 / size.min(64)),
            false => partition,
        };
        Ok(Chosen {
            way,
            program,
            partition,
        })
    }
}

fn by_algorithm(spec: &Spec, candidate: Candidate, choice: &mut Choice) -> Result<(Way, Made), CallError> {
    let program = choice.program(&spec.problem, candidate);
    let program = program.ok_or(CallError::NotForThis { algorithm: candidate })?;
    choice.check(&spec.problem, candidate, &*program)?;
    Ok((Way::Algorithm(candidate), Made::Here(program)))
}

/// Whether a schedule is one for this call.
fn suits(schedule: &Schedule, spec: &Spec, channels: u16) -> Result<(), CallError> {
    let (scheduled, called) = (schedule.problem(), &spec.problem);
    let told = |problem: &Problem| format!("{:?} among {}", problem.collective, problem.ranks);
    let wrong = |called: String| CallError::WrongSchedule {
        schedule: schedule.name().to_owned(),
        scheduled: told(scheduled),
        called,
    };
    if (scheduled.collective, scheduled.ranks) != (called.collective, called.ranks) {
        return Err(wrong(told(called)));
    }
    if !spec.counts_agree && called.ranks > 1 {
        return Err(wrong(format!("{} of sizes that not all ranks know", called.collective)));
    }
    if schedule.program().shape().channels > channels {
        return Err(CallError::NoAlgorithm { channels });
    }
    // It has been verified as it is; where the call is in place and it is not, or the other way round, that says nothing.
    if scheduled.in_place != called.in_place {
        let faulty = |fault| CallError::Faulty {
            by: schedule.name().to_owned(),
            fault,
        };
        verify(called, schedule.program()).map_err(faulty)?;
    }
    Ok(())
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
            quantized,
            ..
        } = spec;
        let operator = match operator {
            Operator::Builtin(reduction) if problem.collective.reduces() => reduction.name(),
            Operator::Builtin(_) => "",
            Operator::Custom(_) => "custom",
        };
        // Whether a rank works in place is its own affair: steps and scratch may differ, messages do not.
        let Problem { collective, ranks, .. } = problem;
        let (way, pieces) = (&chosen.way, chosen.program.as_dyn().shape().pieces);
        digest.update(format!("{collective:?} {ranks} {datatype} {operator} {way} {pieces} {quantized:?};").as_bytes());
        if *counts_agree {
            digest.update(format!("{counts:?};").as_bytes());
        }
    }
    // Zero and one stand for no call and for messages between two ranks.
    digest.finish().max(2)
}

/// What a person is told that a rank has called.
pub(super) fn words(spec: &Spec, way: Option<&Way>, parts: usize, rank: Rank) -> String {
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
    let codes = match &spec.quantized {
        Some(Quantization { code, block }) => format!(" of a quantised all-reduce ({code:?} {block:?})"),
        None => String::new(),
    };
    let by = way.map_or_else(String::new, |way| format!(" by {way}"));
    let more = if parts > 1 {
        format!(" and {} more", parts - 1)
    } else {
        String::new()
    };
    format!("{collective}{operator}{place}{count}{codes}{by}{more}")
}

/// Whether a collective has blocks of different sizes.
pub(super) fn sizes(counts: &Counts) -> Sizes {
    match counts {
        Counts::Equal(_) => Sizes::Equal,
        Counts::PerRank(_) | Counts::PerPair(_) => Sizes::Varying,
    }
}
