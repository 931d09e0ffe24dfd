//! Which algorithm runs, where the caller does not say.

use weft_plan::algorithms::{Algorithm, Grid};
use weft_plan::collective::{Collective, Problem};
use weft_plan::schedule::Program;

/// Up to this many bytes a message costs its latency.
const SHORT_BYTES: u64 = 8 << 10;

/// The first of the algorithms that come into question that is for this problem and needs no more channels than there are.
pub(super) fn choose(
    problem: &Problem,
    bytes: u64,
    grid: Grid,
    channels: u16,
) -> Option<(Algorithm, Box<dyn Program>)> {
    let suited = preferred(problem, bytes).iter().chain(Algorithm::ALL);
    suited
        .filter_map(|algorithm| Some((*algorithm, algorithm.program(problem, grid)?)))
        .find(|(_, program)| program.shape().channels <= channels)
}

fn preferred(problem: &Problem, bytes: u64) -> &'static [Algorithm] {
    let (short, few) = (bytes <= SHORT_BYTES, problem.ranks <= 8);
    match problem.collective {
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
