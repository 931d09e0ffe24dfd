//! Which resources a flow uses: links by a route, or bundles where all ways are used alike.

use weft_model::fabric::{BundleId, Level, LinkId, Routing, Topology};
use weft_plan::{Bandwidth, Picos, Rank};

use super::solver::{Rate, Solver, Use};
use super::{FlowError, FlowOptions};
use crate::checks::knows_link;
use crate::execution::classes::{Classes, QuickMap};

/// How many of the ways an adaptive flow looks at.
const LOOKED_AT: u32 = 8;
/// More ways than this are not sprayed over one by one.
const SPRAYED_MAX: u32 = 64;

/// The resources of a run.
#[derive(Clone, Debug)]
pub(super) enum Ways<'a> {
    Bundles(Ladder),
    Links {
        topology: &'a Topology,
        routing: Routing,
        seed: u64,
        route: Vec<LinkId>,
    },
}

/// The bundles above each class of ranks, level by level.
#[derive(Clone, Debug)]
pub(super) struct Ladder {
    bundles: Vec<BundleId>,
    rungs: Vec<Rung>,
    levels: u32,
    latencies: Vec<Picos>,
}

/// What a rank's traffic of one level uses, up and down.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rung {
    pub(super) up: u32,
    pub(super) down: u32,
    /// How many ranks of the class use that bundle.
    pub(super) up_weight: f64,
    pub(super) down_weight: f64,
}

impl Ladder {
    /// The bundles above each class; `None` where the network does not look the same from all its ranks.
    pub(super) fn of(classes: &Classes, topology: &Topology, ranks: u32) -> Option<Ladder> {
        let levels = topology.top()?.0 + 1;
        let mut numbers: QuickMap<BundleId, u32> = QuickMap::default();
        let mut bundles = Vec::new();
        let mut number = |bundle: BundleId| {
            *numbers.entry(bundle).or_insert_with(|| {
                bundles.push(bundle);
                bundles.len() as u32 - 1
            })
        };
        let counts = match classes.count() == ranks {
            true => None,
            false => Some(classes.counts(topology, ranks, levels)?),
        };
        let mut rungs = Vec::with_capacity((classes.count() * levels) as usize);
        for class in 0..classes.count() {
            for level in (0..levels).map(Level) {
                let rank = classes.rank(class);
                let up = topology.up(rank, level);
                let weight = match &counts {
                    Some(counts) => f64::from(counts.get(&(up, class)).copied().unwrap_or(1)),
                    None => 1.0,
                };
                rungs.push(Rung {
                    up: number(up),
                    down: number(topology.down(rank, level)),
                    up_weight: weight,
                    down_weight: weight,
                });
            }
        }
        Some(Ladder::new(bundles, rungs, topology))
    }

    fn new(bundles: Vec<BundleId>, rungs: Vec<Rung>, topology: &Topology) -> Ladder {
        let levels = topology.top().map_or(1, |top| top.0 + 1);
        let latency = |level: u32| match level {
            0 => twice(topology.scale_up().latency),
            level => {
                let each = (1..=level).map(|level| topology.bundle(topology.up(Rank(0), Level(level))).latency);
                twice(each.fold(Picos::ZERO, Picos::saturating_add))
            }
        };
        Ladder {
            bundles,
            rungs,
            levels,
            latencies: (0..levels).map(latency).collect(),
        }
    }

    pub(super) fn levels(&self) -> u32 {
        self.levels
    }

    pub(super) fn rung(&self, class: u32, level: u32) -> &Rung {
        &self.rungs[(class * self.levels + level) as usize]
    }
}

impl<'a> Ways<'a> {
    /// Single links, for flows that take one way each or a network without levels.
    pub(super) fn links(topology: &'a Topology, options: &FlowOptions) -> Ways<'a> {
        Ways::Links {
            topology,
            routing: options.routing,
            seed: options.seed,
            route: Vec::new(),
        }
    }

    pub(super) fn solver(&self, topology: &Topology) -> Solver {
        match self {
            Ways::Bundles(ladder) => Solver::new(ladder.bundles.iter().map(|&bundle| {
                let bundle = topology.bundle(bundle);
                rate(bundle.bandwidth) * f64::from(bundle.width)
            })),
            Ways::Links { .. } => {
                Solver::new((0..topology.links()).map(|link| rate(topology.wire(LinkId(link)).bandwidth)))
            }
        }
    }

    /// What so many flows from a rank of one class to ranks of another use, all of them at that level; and how late their bytes are.
    pub(super) fn class_uses(&self, from: u32, to: u32, level: Level, count: f64, out: &mut Vec<Use>) -> Picos {
        let Ways::Bundles(ladder) = self else {
            return Picos::ZERO;
        };
        out.clear();
        let levels = if level.0 == 0 { 0..=0 } else { 1..=level.0 };
        for level in levels {
            let (sender, taker) = (ladder.rung(from, level), ladder.rung(to, level));
            out.push(Use {
                resource: sender.up,
                weight: count * sender.up_weight,
            });
            out.push(Use {
                resource: taker.down,
                weight: count * taker.down_weight,
            });
        }
        ladder.latencies[level.0 as usize]
    }

    /// What the nth flow from one rank to another uses.
    pub(super) fn rank_uses(
        &mut self,
        (from, to): (Rank, Rank),
        nth: u64,
        solver: &Solver,
        out: &mut Vec<Use>,
    ) -> Picos {
        let Ways::Links {
            topology,
            routing,
            seed,
            route,
        } = self
        else {
            return Picos::ZERO;
        };
        out.clear();
        let ways = topology.ways(from, to);
        let hash = mixed(*seed ^ mixed((u64::from(from.0) << 32) | u64::from(to.0)).wrapping_add(nth));
        match routing {
            Routing::Spray if ways > 1 => {
                let used = ways.min(SPRAYED_MAX);
                let weight = 1.0 / f64::from(used);
                let mut latency = Picos::ZERO;
                for nth in 0..used {
                    route.clear();
                    topology.route(
                        from,
                        to,
                        (u64::from(nth) * u64::from(ways) / u64::from(used)) as u32,
                        route,
                    );
                    latency = latency.max(topology.latency(route));
                    for link in route.iter() {
                        match out.iter_mut().find(|other| other.resource == link.0) {
                            Some(other) => other.weight += weight,
                            None => out.push(Use {
                                resource: link.0,
                                weight,
                            }),
                        }
                    }
                }
                return latency;
            }
            Routing::Adaptive => {
                let all = ways + topology.detours(from, to);
                let mut best: Option<(f64, usize, u32)> = None;
                for look in 0..all.min(LOOKED_AT) {
                    let way = ((hash.wrapping_add(u64::from(look) * 0x9e37_79b9)) % u64::from(all)) as u32;
                    route.clear();
                    topology.route(from, to, way, route);
                    let worst = route.iter().map(|link| solver.pressure(link.0)).fold(0.0, f64::max);
                    let found = (worst, route.len(), way);
                    if best.is_none_or(|best| found < best) {
                        best = Some(found);
                    }
                }
                route.clear();
                topology.route(from, to, best.map_or(0, |best| best.2), route);
            }
            _ => {
                route.clear();
                topology.route(from, to, (hash % u64::from(ways)) as u32, route);
            }
        }
        out.extend(route.iter().map(|link| Use {
            resource: link.0,
            weight: 1.0,
        }));
        topology.latency(route)
    }

    /// The first link of a resource, and how many parallel ones it is.
    pub(super) fn links_of(&self, topology: &Topology, resource: u32) -> (LinkId, u32) {
        match self {
            Ways::Links { .. } => (LinkId(resource), 1),
            Ways::Bundles(ladder) => {
                let bundle = topology.bundle(ladder.bundles[resource as usize]);
                (bundle.first, bundle.width)
            }
        }
    }

    /// The resource that a link is part of, and its share of it.
    pub(super) fn resource_of(&self, topology: &Topology, link: LinkId) -> Result<Option<(u32, f64)>, FlowError> {
        knows_link(topology, link)?;
        Ok(match self {
            Ways::Links { .. } => Some((link.0, 1.0)),
            Ways::Bundles(ladder) => ladder
                .bundles
                .iter()
                .position(|&id| {
                    let bundle = topology.bundle(id);
                    (bundle.first.0..bundle.first.0 + bundle.width).contains(&link.0)
                })
                .map(|nth| (nth as u32, 1.0 / f64::from(topology.bundle(ladder.bundles[nth]).width))),
        })
    }
}

/// The bundles of classes, where the network is a tree of bundles and is sprayed over.
pub(super) fn bundled<'a>(topology: &Topology, ranks: u32, classes: &Classes) -> Option<Ways<'a>> {
    Ladder::of(classes, topology, ranks).map(Ways::Bundles)
}

pub(super) fn rate(bandwidth: Bandwidth) -> Rate {
    bandwidth.bytes_per_sec() as f64 * 1e-12
}

fn twice(time: Picos) -> Picos {
    time.saturating_add(time)
}

/// A number that looks like chance and is not.
pub(crate) fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
