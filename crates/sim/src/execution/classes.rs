//! Ranks that nothing tells apart.
//!
//! Ranks are folded in two ways: the ranks of a node onto one (`merged`), and equal units of the network onto the first (`unit`: a
//! node, the nodes on one leaf, a pod). A folding holds if the network looks the same from every rank of a class, and if all of them do the same
//! in every step towards the same classes at the same level. The first is checked for every rank; the second for every
//! rank and step where these are not too many, and else for those where something would be different first, at the edges of units, and
//! for others spread evenly.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use weft_model::fabric::{BundleId, Level, Topology};
use weft_plan::Rank;
use weft_plan::schedule::Program;

use super::look::{Look, Messages, Quick};

/// So many ops are looked at to find out whether ranks are alike.
const LOOKED_AT_MAX: u64 = 12_000_000;
/// Of a program with more steps, so many are looked at.
const STEPS_MAX: u32 = 48;

pub(crate) type QuickMap<K, V> = HashMap<K, V, BuildHasherDefault<Quick>>;

/// A way to fold ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Classes {
    unit: u32,
    merged: u32,
    levels: bool,
}

impl Classes {
    /// Every rank for itself, by links.
    pub(crate) fn by_links(ranks: u32) -> Classes {
        Classes {
            unit: ranks,
            merged: 1,
            levels: false,
        }
    }

    /// Every rank for itself, by bundles.
    pub(crate) fn each(ranks: u32) -> Classes {
        Classes {
            levels: true,
            ..Classes::by_links(ranks)
        }
    }

    /// Foldings that might hold, the coarsest first.
    pub(crate) fn candidates(topology: &Topology, ranks: u32) -> Vec<Classes> {
        let local = topology.node_ranks().min(ranks);
        let mut units = vec![local];
        units.extend(edges(topology, ranks));
        units.push(ranks);
        units.dedup();
        let mut all = Vec::new();
        for unit in units.into_iter().filter(|&unit| ranks.is_multiple_of(unit)) {
            for merged in [local, 1] {
                let classes = Classes {
                    unit,
                    merged,
                    levels: true,
                };
                if unit.is_multiple_of(merged) && !all.contains(&classes) {
                    all.push(classes);
                }
            }
        }
        all.sort_by_key(|classes| classes.count());
        all
    }

    pub(crate) fn count(&self) -> u32 {
        self.unit / self.merged
    }
    pub(crate) fn class(&self, rank: Rank) -> u32 {
        rank.0 % self.unit / self.merged
    }
    /// The rank that stands for a class.
    pub(crate) fn rank(&self, class: u32) -> Rank {
        Rank(class * self.merged)
    }
    /// Whether levels matter: flows use bundles.
    pub(crate) fn levels(&self) -> bool {
        self.levels
    }

    /// How many ranks of each class are below each bundle; `None` where that differs between bundles that should be alike.
    pub(crate) fn counts(
        &self,
        topology: &Topology,
        ranks: u32,
        levels: u32,
    ) -> Option<QuickMap<(BundleId, u32), u32>> {
        let mut counts: QuickMap<(BundleId, u32), u32> = QuickMap::default();
        let mut stands_for: QuickMap<BundleId, BundleId> = QuickMap::default();
        let mut members: QuickMap<BundleId, u32> = QuickMap::default();
        for rank in (0..ranks).map(Rank) {
            let class = self.class(rank);
            for level in (0..levels).map(Level) {
                let (here, first) = (topology.up(rank, level), topology.up(self.rank(class), level));
                if *stands_for.entry(here).or_insert(first) != first {
                    return None;
                }
                *counts.entry((here, class)).or_insert(0) += 1;
                *members.entry(here).or_insert(0) += 1;
            }
        }
        let alike = counts
            .iter()
            .all(|((here, class), count)| counts.get(&(stands_for[here], *class)) == Some(count));
        let as_many = members
            .iter()
            .all(|(here, count)| members.get(&stands_for[here]) == Some(count));
        (alike && as_many).then_some(counts)
    }

    /// Whether all ranks of a class do the same, as far as was looked.
    pub(crate) fn hold(&self, look: &mut Look<'_>, topology: &Topology, program: &dyn Program) -> bool {
        let shape = program.shape();
        if self.count() == shape.ranks {
            return true;
        }
        let steps = looked_at_steps(program);
        // The edges first, then all others in an order that jumps about.
        let jump = coprime(shape.ranks);
        let mut ranks = vec![shape.ranks - 1];
        for unit in [topology.node_ranks()].into_iter().chain(edges(topology, shape.ranks)) {
            for nth in 1..=8.min(shape.ranks.saturating_sub(1) / unit) {
                ranks.extend([nth * unit - 1, nth * unit]);
            }
        }
        let anywhere = |nth: u32| (u64::from(nth) * u64::from(jump) % u64::from(shape.ranks)) as u32;
        let mut own = Vec::new();
        let mut other = Vec::new();
        let each = LOOKED_AT_MAX / steps.len().max(1) as u64;
        for &step in &steps {
            let budget = look.looked_at + each;
            let mut known = None;
            for rank in ranks.iter().copied().chain((1..shape.ranks).map(anywhere)).map(Rank) {
                let first = self.rank(self.class(rank));
                if first == rank {
                    continue;
                }
                if look.looked_at > budget {
                    break;
                }
                let work = match known {
                    Some((class, work)) if class == first => work,
                    _ => look.at(first, step, self, &mut own),
                };
                known = Some((first, work));
                if look.at(rank, step, self, &mut other) != work || !same(&mut own, &mut other) {
                    return false;
                }
            }
        }
        true
    }
}

fn same(one: &mut [Messages], two: &mut [Messages]) -> bool {
    if one == two {
        return true;
    }
    one.sort_unstable_by_key(|messages| messages.like);
    two.sort_unstable_by_key(|messages| messages.like);
    one == two
}

/// How many ranks come before the first whose way to rank 0 leads over a higher level: the sizes of units of the network.
pub(super) fn edges(topology: &Topology, ranks: u32) -> Vec<u32> {
    let local = topology.node_ranks();
    let mut edges = Vec::new();
    let mut highest = Level(1);
    for first in (local..ranks).step_by(local as usize) {
        let level = topology.level(Rank(0), Rank(first));
        if level > highest {
            highest = level;
            edges.push(first);
        }
    }
    edges
}

/// All steps, or the first and last of each run of like ones and some between.
pub(super) fn looked_at_steps(program: &dyn Program) -> Vec<u32> {
    let steps = program.shape().steps;
    if steps <= STEPS_MAX {
        return (0..steps).collect();
    }
    let mut looked_at = vec![0, 1, steps - 1];
    for phase in program.phases().unwrap_or_default().iter().take(STEPS_MAX as usize / 2) {
        looked_at.extend([phase.steps.start, phase.steps.end.saturating_sub(1)]);
    }
    let left = (STEPS_MAX as usize).saturating_sub(looked_at.len()).max(8) as u64;
    looked_at.extend((1..=left).map(|nth| (u64::from(steps) * nth / (left + 1)) as u32));
    looked_at.sort_unstable();
    looked_at.dedup();
    looked_at.retain(|&step| step < steps);
    looked_at
}

/// A stride that visits every rank once.
fn coprime(ranks: u32) -> u32 {
    let gcd = |mut a: u32, mut b: u32| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let start = (f64::from(ranks) * 0.618) as u32 | 1;
    (start..).find(|&stride| gcd(stride, ranks) == 1).unwrap_or(1)
}
