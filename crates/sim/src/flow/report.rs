//! What a run says.

use weft_plan::platform::fabric::Topology;
use weft_plan::{Bytes, Rank, Time};

use super::solver::Solver;
use super::ways::Ways;

/// How many hot spots are told.
const HOT_MAX: usize = 16;

/// How long it took, and what the network had to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    pub time: Time,
    /// Messages of all ranks.
    pub messages: u64,
    /// Flows that were simulated for them.
    pub flows: u64,
    pub events: u64,
    /// How often a flow was given a rate.
    pub solved: u64,
    /// Ranks that were followed, each for all that are like it.
    pub classes: u32,
    pub ranks: u32,
    /// The busiest links first.
    pub hot: Vec<Hot>,
    pub spans: Vec<StepSpan>,
}

/// A link, or a bundle of parallel links, and how busy it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Hot {
    pub name: String,
    /// Of its capacity over the whole time, from zero to one.
    pub utilisation: f64,
    pub carried: Bytes,
    /// How many links, each for all that are like it, were this busy.
    pub width: u32,
    pub flows_max: u32,
}

/// A step of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSpan {
    pub rank: Rank,
    pub step: u32,
    pub begin: Time,
    pub end: Time,
}

/// The busiest resources of a run.
pub(super) fn hot_spots(topology: &Topology, ways: &Ways<'_>, solver: &Solver, time: Time) -> Vec<Hot> {
    let busy = |&resource: &u32| {
        let all = solver.capacity(resource) * time.as_ps() as f64;
        if all > 0.0 { solver.carried(resource) / all } else { 0.0 }
    };
    let mut used: Vec<(f64, u32)> = (0..solver.resources())
        .filter(|&resource| solver.carried(resource) > 0.0)
        .map(|resource| (busy(&resource), resource))
        .collect();
    used.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    used.truncate(HOT_MAX);
    let tell = |(utilisation, resource): (f64, u32)| {
        let (name, width) = ways.name(topology, resource);
        Hot {
            name,
            utilisation,
            carried: Bytes(solver.carried(resource) as u64),
            width,
            flows_max: solver.most(resource),
        }
    };
    used.into_iter().map(tell).collect()
}
