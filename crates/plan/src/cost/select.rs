//! Which algorithm is the fastest for a size, and from which size on another one is.
//!
//! ```
//! use weft_plan::algorithms::Grid;
//! use weft_plan::cost::{Placement, Selector};
//! use weft_plan::{Bytes, Collective, Platform, Problem};
//! let placement = Placement::on(&Platform::laptop(), Grid::flat(4))?;
//! let selector = Selector::new(Problem::new(Collective::AllReduce, 4), placement);
//! let small = selector.choose(Bytes(64)).unwrap();
//! let large = selector.choose(Bytes(64 << 20)).unwrap();
//! assert_ne!(small.algorithm, large.algorithm);
//! # Ok::<(), weft_plan::cost::PlacementError>(())
//! ```

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::{Placement, Prediction, Profile};
use crate::algorithms::{Algorithm, Grid, UnknownAlgorithm};
use crate::collective::{Collective, Problem};
use crate::schedule::{Program, lower::Portioned};
use crate::units::Bytes;

/// No collective is larger than this.
const MAX_BYTES: u64 = 1 << 44;
/// Into how many portions a pipeline may cut the data.
const PORTIONS: [u32; 4] = [1, 4, 16, 64];
/// More portions than anybody wants.
const PORTIONS_MAX: u32 = 1024;
/// A program with so many ops on one rank that even one of them is too much to look at, and to run.
const MAX_STEPS_LOOKED_AT: u64 = 1 << 22;

/// An algorithm, and in how many portions the data goes through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Candidate {
    pub algorithm: Algorithm,
    pub portions: u32,
}

/// The candidates for a problem on a placement, and which of them is the fastest for which size. Made once, and asked for every call.
///
/// Whether a rank works in place is its own affair, and all must choose alike: costs are those of separate buffers.
#[derive(Clone, Debug)]
pub struct Selector {
    problem: Problem,
    candidates: Vec<(Candidate, Profile)>,
    /// Ascending; each from its size up to that of the next.
    envelope: Vec<Segment>,
}

/// The fastest from a size on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub from: Bytes,
    pub candidate: Candidate,
}

impl From<Algorithm> for Candidate {
    /// In one portion.
    fn from(algorithm: Algorithm) -> Candidate {
        Candidate { algorithm, portions: 1 }
    }
}

impl Candidate {
    pub fn program(&self, problem: &Problem, grid: Grid) -> Option<Box<dyn Program>> {
        let program = self.algorithm.program(problem, grid)?;
        Some(match self.portions {
            1 => program,
            portions => Box::new(Portioned::staggered(program, portions)),
        })
    }

    /// Every way to do a problem that is worth to be looked at.
    pub fn all(problem: &Problem) -> impl Iterator<Item = Candidate> + use<> {
        let problem = *problem;
        Algorithm::ALL.iter().flat_map(move |&algorithm| {
            let portions = if pipelines(algorithm, &problem) {
                &PORTIONS[..]
            } else {
                &PORTIONS[..1]
            };
            portions.iter().map(move |&portions| Candidate { algorithm, portions })
        })
    }
}

/// Whether portions that follow each other keep ranks busy that would otherwise wait.
fn pipelines(algorithm: Algorithm, problem: &Problem) -> bool {
    let rooted = matches!(
        problem.collective,
        Collective::Broadcast { .. } | Collective::Reduce { .. }
    );
    match algorithm {
        Algorithm::Ring => rooted,
        Algorithm::BinomialTree => rooted || problem.collective == Collective::AllReduce,
        Algorithm::DoubleBinaryTree => true,
        _ => false,
    }
}

impl Selector {
    /// Looks at all candidates that the channels are enough for. Of programs without phases, only those that can be looked at step by step
    /// are among them.
    pub fn new(problem: Problem, placement: Placement) -> Selector {
        Selector::among(Candidate::all(&problem), problem, placement)
    }

    /// Looks at these candidates only.
    pub fn among(candidates: impl IntoIterator<Item = Candidate>, problem: Problem, placement: Placement) -> Selector {
        let problem = Problem {
            in_place: false,
            ..problem
        };
        let candidates = candidates.into_iter().filter_map(|candidate| {
            let program = candidate.program(&problem, placement.grid)?;
            let shape = program.shape();
            let size = u64::from(shape.ranks) * u64::from(shape.steps);
            let affordable = size <= MAX_STEPS_LOOKED_AT || program.phases().is_some();
            let affordable = affordable && shape.channels <= placement.channels;
            affordable.then(|| (candidate, Profile::of(&problem, &*program, &placement)))
        });
        let mut selector = Selector {
            problem,
            candidates: candidates.collect(),
            envelope: Vec::new(),
        };
        selector.envelope = selector.trace();
        selector
    }

    /// What is chosen for, with separate buffers.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }
    /// Whether it chooses for this problem, be it done in place or not.
    pub fn is_for(&self, problem: &Problem) -> bool {
        (self.problem.collective, self.problem.ranks) == (problem.collective, problem.ranks)
    }

    /// The fastest for this size; `None` where no algorithm is for the problem.
    pub fn choose(&self, bytes: Bytes) -> Option<Candidate> {
        let after = self.envelope.partition_point(|segment| segment.from <= bytes);
        after.checked_sub(1).map(|nth| self.envelope[nth].candidate)
    }

    /// All candidates for this size, the fastest first. Of equals, the one that stands first in [`Algorithm::ALL`].
    pub fn ranked(&self, bytes: Bytes) -> Vec<(Candidate, Prediction)> {
        let predict = |(candidate, profile): &(Candidate, Profile)| (*candidate, profile.predict(bytes));
        let mut all: Vec<_> = self.candidates.iter().map(predict).collect();
        all.sort_by_key(|(candidate, prediction)| (prediction.time, *candidate));
        all
    }

    pub fn predict(&self, candidate: Candidate, bytes: Bytes) -> Option<Prediction> {
        let found = self.candidates.iter().find(|(other, _)| *other == candidate)?;
        Some(found.1.predict(bytes))
    }

    /// From which size on which candidate is the fastest.
    pub fn envelope(&self) -> &[Segment] {
        &self.envelope
    }

    fn fastest(&self, bytes: u64) -> Option<Candidate> {
        let times = self
            .candidates
            .iter()
            .map(|(candidate, profile)| (profile.predict(Bytes(bytes)).time, *candidate));
        times.min().map(|(_, candidate)| candidate)
    }

    /// Asks at every power of two, and between two that differ for the size at which the change comes.
    fn trace(&self) -> Vec<Segment> {
        let mut envelope: Vec<Segment> = Vec::new();
        let mut low = 0;
        let Some(mut candidate) = self.fastest(low) else {
            return envelope;
        };
        envelope.push(Segment {
            from: Bytes(low),
            candidate,
        });
        let mut high = 1;
        while high <= MAX_BYTES {
            while let Some(next) = self.fastest(high)
                && next != candidate
            {
                // Costs are straight lines here and there, so that within an octave few change places: find the next who takes over.
                let (mut still, mut no_longer) = (low, high);
                while no_longer - still > 1 {
                    let middle = still + (no_longer - still) / 2;
                    if self.fastest(middle) == Some(candidate) {
                        still = middle;
                    } else {
                        no_longer = middle;
                    }
                }
                let Some(winner) = self.fastest(no_longer) else { break };
                candidate = winner;
                low = no_longer;
                envelope.push(Segment {
                    from: Bytes(low),
                    candidate,
                });
            }
            low = high;
            high *= 2;
        }
        envelope
    }
}

/// A name that is neither an algorithm nor one in portions.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum UnknownCandidate {
    #[error(transparent)]
    Algorithm(#[from] UnknownAlgorithm),
    #[error("`{text}` is no number of portions from 1 to {PORTIONS_MAX}")]
    Portions { text: String },
}

impl FromStr for Candidate {
    type Err = UnknownCandidate;
    /// `ring`, or `ring/16` for one in portions.
    fn from_str(text: &str) -> Result<Candidate, UnknownCandidate> {
        let (name, portions) = text.split_once('/').unwrap_or((text, "1"));
        let algorithm = name.trim().parse()?;
        let number = portions.trim().parse().ok();
        let portions = number.filter(|number| (1..=PORTIONS_MAX).contains(number));
        let portions = portions.ok_or_else(|| UnknownCandidate::Portions {
            text: text.chars().take(64).collect(),
        })?;
        Ok(Candidate { algorithm, portions })
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.portions {
            1 => write!(f, "{}", self.algorithm),
            portions => write!(f, "{}/{portions}", self.algorithm),
        }
    }
}
