//! What a run says.

use weft_model::fabric::{BundleId, Level, Topology};
use weft_plan::{Bytes, Picos, Rank};

use super::solver::Solver;
use super::ways::Ways;
use crate::execution::classes::Classes;
use crate::traffic::{Hot, MessageSpan, StepSpan};

/// How many hot spots are told.
const HOT_MAX: usize = 16;

/// How long it took, and what the network had to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    pub time: Picos,
    /// Messages of all ranks.
    pub messages: u64,
    /// Flows that were simulated for them.
    pub flows: u64,
    pub events: u64,
    /// How often a flow was given a rate.
    pub solved: u64,
    /// Ranks that were followed, each for all that are like it.
    pub classes: u32,
    /// Whether a rank stood for others that do the same in every step, but wait for it in other orders.
    pub rough: bool,
    pub ranks: u32,
    /// The busiest links first.
    pub hot: Vec<Hot>,
    pub spans: Vec<StepSpan>,
    pub message_spans: Vec<MessageSpan>,
    /// Bytes over each link, by its number; none where nobody asked for them.
    pub carried: Vec<f64>,
}

/// The busiest resources of a run.
pub(super) fn hot_spots(topology: &Topology, ways: &Ways<'_>, solver: &Solver, time: Picos) -> Vec<Hot> {
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
        let (link, width) = ways.links_of(topology, resource);
        Hot {
            name: topology.link_name(link),
            link,
            utilisation,
            carried: Bytes(solver.carried(resource) as u64),
            width,
            flows_max: solver.most(resource),
        }
    };
    used.into_iter().map(tell).collect()
}

/// What went over each link: of ranks that are alike, the same. The links of a bundle are filled alike.
pub(super) fn carried_by_link(
    topology: &Topology,
    ways: &Ways<'_>,
    solver: &Solver,
    classes: &Classes,
    ranks: u32,
) -> Vec<f64> {
    let Ways::Bundles(ladder) = ways else {
        return (0..solver.resources()).map(|link| solver.carried(link)).collect();
    };
    let mut carried = vec![0.0; topology.links() as usize];
    let mut fill = |bundle: BundleId, resource: u32| {
        let bundle = topology.bundle(bundle);
        let each = solver.carried(resource) / f64::from(bundle.width.max(1));
        let first = bundle.first.0 as usize;
        // Many ranks are below one bundle.
        if carried[first] != each {
            carried[first..first + bundle.width as usize].fill(each);
        }
    };
    for rank in (0..ranks).map(Rank) {
        let class = classes.class(rank);
        for level in (0..ladder.levels()).map(Level) {
            let rung = ladder.rung(class, level.0);
            fill(topology.up(rank, level), rung.up);
            fill(topology.down(rank, level), rung.down);
        }
    }
    carried
}
