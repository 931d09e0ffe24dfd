//! Which algorithm runs, where the caller does not say, and whether its program does what it should.

use std::collections::HashSet;

use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::{Collective, Problem};
use weft_plan::schedule::{Program, verify};

use super::prepare::CallError;

/// Up to this many bytes a message costs its latency.
const SHORT_BYTES: u64 = 8 << 10;
/// Up to this many bytes two ranks on one host rather send everything at once than in halves: the same bytes move, with one wait less, and nobody
/// writes again what the other has just read.
const PAIR_BYTES: u64 = 4 << 20;
/// A program of more ranks, or of more ranks × steps, is not run through op by op while a call waits: it is right for the same reason as
/// the smaller ones.
const VERIFIED_RANKS: u32 = 64;
const VERIFIED_STEPS: u64 = 1 << 14;
/// So many programs are remembered.
const VERIFIED_MAX: usize = 4096;

/// The programs that are known to do what their collectives ask.
#[derive(Debug, Default)]
pub(super) struct Verified(HashSet<(Problem, Algorithm)>);

impl Verified {
    /// Makes sure, once for every problem, that a program does what is asked of it. Sizes have no part in that.
    pub(super) fn check(
        &mut self,
        problem: &Problem,
        algorithm: Algorithm,
        program: &dyn Program,
    ) -> Result<(), CallError> {
        let shape = program.shape();
        let steps = u64::from(shape.ranks) * u64::from(shape.steps);
        let small = shape.ranks <= VERIFIED_RANKS && steps <= VERIFIED_STEPS;
        if !small || self.0.contains(&(*problem, algorithm)) {
            return Ok(());
        }
        verify(problem, program).map_err(|fault| CallError::Faulty { algorithm, fault })?;
        if self.0.len() >= VERIFIED_MAX {
            self.0.clear();
        }
        self.0.insert((*problem, algorithm));
        Ok(())
    }
}

/// What there is between the ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    pub(super) channels: u16,
    /// Not all of them are in one arena.
    pub(super) far: bool,
}

/// The first of the algorithms that come into question that is for this problem and needs no more channels than there are.
pub(super) fn choose(problem: &Problem, bytes: u64, grid: Grid, reach: Reach) -> Option<(Algorithm, Box<dyn Program>)> {
    let Reach { channels, far } = reach;
    let suited = preferred(problem, bytes, far).iter().chain(Algorithm::ALL);
    suited
        .filter_map(|algorithm| Some((*algorithm, algorithm.program(problem, grid)?)))
        .find(|(_, program)| program.shape().channels <= channels)
}

fn preferred(problem: &Problem, bytes: u64, far: bool) -> &'static [Algorithm] {
    let (short, few) = (bytes <= SHORT_BYTES, problem.ranks <= 8);
    match problem.collective {
        Collective::AllReduce if problem.ranks == 2 && bytes <= PAIR_BYTES && !far => &[Algorithm::Direct],
        Collective::AllReduce => match (short, few) {
            (true, true) => &[Algorithm::Direct],
            (true, false) => &[Algorithm::RecursiveDoubling, Algorithm::Rabenseifner],
            (false, true) => &[Algorithm::TwoShot, Algorithm::Ring],
            (false, false) => &[Algorithm::Ring],
        },
        Collective::AllGather { .. } | Collective::ReduceScatter { .. } => match (short, few) {
            (_, true) => &[Algorithm::Direct],
            (true, false) => &[Algorithm::Bruck, Algorithm::HalvingDoubling],
            (false, false) => &[Algorithm::Ring],
        },
        Collective::Broadcast { .. } | Collective::Reduce { .. } => match few {
            true => &[Algorithm::Direct, Algorithm::BinomialTree],
            false => &[Algorithm::BinomialTree],
        },
        Collective::Barrier => match few {
            true => &[Algorithm::Direct],
            false => &[Algorithm::Dissemination],
        },
        Collective::Gather { .. }
        | Collective::Scatter { .. }
        | Collective::AllToAll { .. }
        | Collective::SendReceive { .. } => &[Algorithm::Direct],
    }
}

#[cfg(test)]
mod tests {
    use weft_plan::Rank;

    use super::*;

    #[test]
    fn a_program_that_does_something_else_is_refused() {
        let from = |root| Problem::new(Collective::Broadcast { root: Rank(root) }, 3);
        let program = Algorithm::Direct.program(&from(1), Grid::flat(3)).unwrap();
        let mut verified = Verified::default();
        for _ in 0..2 {
            verified.check(&from(1), Algorithm::Direct, &*program).unwrap();
            let refused = verified.check(&from(0), Algorithm::Direct, &*program);
            assert!(matches!(refused, Err(CallError::Faulty { .. })), "{refused:?}");
        }
    }
}
