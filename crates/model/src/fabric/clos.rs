//! Folded Clos networks of one to three tiers: a switch, leaves and spines, pods of these below a top.
//!
//! A leaf has as many links up as its pod has spines, one to each; a spine likewise to the switches at the top, where the n-th spines of all
//! pods meet. The nth way uses, of a bundle of `w` links among `n` ways, link `way · w / n`.

use super::error::{moves, multiple, numbered, within};
use super::network::{Bundle, Link, LinkId, Vertex};
use super::{FabricError, Wire};
use weft_plan::units::Bandwidth;

#[derive(Clone, Copy, Debug)]
pub(super) struct Clos {
    ports: u32,
    tiers: u32,
    /// Ports of a node, each on a leaf of its own; one where neighbouring ports share a leaf.
    rails: u32,
    per_leaf: u32,
    leaves: u32,
    leaf_up: u32,
    leaves_per_pod: u32,
    pods: u32,
    spine_up: u32,
    wire: Wire,
}

const NO_BOUND: u64 = u32::MAX as u64;

impl Clos {
    pub(super) fn single(ports: u32, wire: Wire) -> Result<Clos, FabricError> {
        within("ports", ports, 1, NO_BOUND)?;
        moves("wire", wire)?;
        numbered("ports", 2 * u64::from(ports))?;
        Ok(Clos {
            ports,
            tiers: 1,
            rails: 1,
            per_leaf: ports,
            leaves: 1,
            leaf_up: 0,
            leaves_per_pod: 1,
            pods: 1,
            spine_up: 0,
            wire,
        })
    }

    pub(super) fn fat_tree(hosts: u32, shape: (u32, u32, u32), wire: Wire) -> Result<Clos, FabricError> {
        Clos::folded("hosts", hosts, 1, shape, wire)
    }

    pub(super) fn rails(nodes: u32, rails: u32, shape: (u32, u32, u32), wire: Wire) -> Result<Clos, FabricError> {
        within("rails", rails, 1, 1024)?;
        Clos::folded("nodes", nodes, rails, shape, wire)
    }

    fn folded(
        field: &str,
        nodes: u32,
        rails: u32,
        (tiers, radix, oversubscription): (u32, u32, u32),
        wire: Wire,
    ) -> Result<Clos, FabricError> {
        within("tiers", tiers, 2, 3)?;
        within("radix", radix, 2, 1 << 16)?;
        within("oversubscription", oversubscription, 1, u64::from(radix) - 1)?;
        multiple("radix", radix, oversubscription + 1)?;
        moves("wire", wire)?;
        let leaf_up = radix / (oversubscription + 1);
        let per_leaf = radix - leaf_up;
        if tiers == 3 {
            multiple("radix", radix, 2)?;
        }
        let (leaves_per_pod, pods_most) = match tiers {
            2 => (radix, 1),
            _ => (radix / 2, u64::from(radix)),
        };
        let units_most = pods_most * u64::from(leaves_per_pod) / u64::from(rails);
        within("rails", rails, 1, pods_most * u64::from(leaves_per_pod))?;
        within(field, nodes, 1, units_most * u64::from(per_leaf))?;
        let units = nodes.div_ceil(per_leaf);
        let leaves = units * rails;
        let pods = leaves.div_ceil(leaves_per_pod);
        let clos = Clos {
            ports: nodes * rails,
            tiers,
            rails,
            per_leaf,
            leaves,
            leaf_up,
            leaves_per_pod,
            pods,
            spine_up: if tiers == 3 { radix / 2 } else { 0 },
            wire,
        };
        let up = u64::from(leaves) * u64::from(leaf_up);
        let top = u64::from(pods) * u64::from(clos.pod_up());
        numbered(field, 2 * (u64::from(clos.ports) + up + top))?;
        Ok(clos)
    }

    fn leaf(&self, port: u32) -> u32 {
        let (node, rail) = (port / self.rails, port % self.rails);
        node / self.per_leaf * self.rails + rail
    }
    fn pod(&self, leaf: u32) -> u32 {
        leaf / self.leaves_per_pod
    }
    /// Links from a pod to the top.
    fn pod_up(&self) -> u32 {
        self.leaf_up * self.spine_up
    }
    /// Where the links of each level begin: up and down.
    fn first(&self, level: u32) -> (u32, u32) {
        let leaves = 2 * self.ports;
        let pods = leaves + 2 * self.leaves * self.leaf_up;
        match level {
            1 => (0, self.ports),
            2 => (leaves, leaves + self.leaves * self.leaf_up),
            _ => (pods, pods + self.pods * self.pod_up()),
        }
    }
    /// What a level counts: ports, leaves, pods; and how many parallel links each has.
    fn of_level(&self, level: u32) -> (u32, u32) {
        match level {
            1 => (self.ports, 1),
            2 => (self.leaves, self.leaf_up),
            _ => (self.pods, self.pod_up()),
        }
    }
    fn position(&self, port: u32, level: u32) -> u32 {
        match level {
            1 => port,
            2 => self.leaf(port),
            _ => self.pod(self.leaf(port)),
        }
    }

    pub(super) fn ports(&self) -> u32 {
        self.ports
    }
    pub(super) fn tiers(&self) -> u32 {
        self.tiers
    }
    pub(super) fn links(&self) -> u32 {
        let (up, down) = self.first(3);
        down + (down - up)
    }

    pub(super) fn link(&self, link: u32) -> Link {
        let level = (1..=3).rev().find(|&level| self.first(level).0 <= link).unwrap_or(1);
        let (up, down) = self.first(level);
        let rises = link < down;
        let nth = if rises { link - up } else { link - down };
        let spines = self.ports + self.leaves;
        let tops = spines + self.pods * self.leaf_up;
        let (below, above) = match level {
            1 => (nth, self.ports + self.leaf(nth)),
            2 => {
                let (leaf, spine) = (nth / self.leaf_up, nth % self.leaf_up);
                (self.ports + leaf, spines + self.pod(leaf) * self.leaf_up + spine)
            }
            _ => {
                let (pod, way) = (nth / self.pod_up(), nth % self.pod_up());
                (spines + pod * self.leaf_up + way / self.spine_up, tops + way)
            }
        };
        let (from, to) = if rises { (below, above) } else { (above, below) };
        Link {
            from: Vertex(from),
            to: Vertex(to),
            bandwidth: self.wire.bandwidth,
            latency: self.wire.latency,
        }
    }

    pub(super) fn switch_name(&self, nth: u32) -> String {
        let spines = self.pods * self.leaf_up;
        match nth.checked_sub(self.leaves) {
            None if self.tiers == 1 => "switch".to_owned(),
            None => format!("leaf {nth}"),
            Some(spine) if spine >= spines => format!("top {}", spine - spines),
            Some(spine) if self.tiers == 2 => format!("spine {spine}"),
            Some(spine) => format!("spine {}.{}", spine / self.leaf_up, spine % self.leaf_up),
        }
    }

    pub(super) fn meet(&self, from: u32, to: u32) -> u32 {
        let (a, b) = (self.leaf(from), self.leaf(to));
        match a == b {
            true => 1,
            false if self.tiers == 2 || self.pod(a) == self.pod(b) => 2,
            false => 3,
        }
    }

    pub(super) fn ways(&self, from: u32, to: u32) -> u32 {
        self.of_level(self.meet(from, to)).1
    }

    pub(super) fn route(&self, from: u32, to: u32, way: u32, out: &mut Vec<LinkId>) {
        let meet = self.meet(from, to);
        let ways = self.of_level(meet).1;
        let way = way % ways;
        for level in 1..=meet {
            let (_, width) = self.of_level(level);
            let (up, _) = self.first(level);
            out.push(LinkId(up + self.position(from, level) * width + way / (ways / width)));
        }
        for level in (1..=meet).rev() {
            let (_, width) = self.of_level(level);
            let (_, down) = self.first(level);
            out.push(LinkId(down + self.position(to, level) * width + way / (ways / width)));
        }
    }

    pub(super) fn route_links_max(&self) -> u32 {
        2 * self.tiers
    }

    pub(super) fn bisection(&self) -> Bandwidth {
        // Whichever tier is narrowest, counted over all of it; half of what can leave its switches can go to the other half.
        let narrowest = match (self.leaves, self.pods) {
            (1, _) => u64::from(self.ports),
            (_, 1) => u64::from(self.leaves * self.leaf_up).min(self.ports.into()),
            _ => (u64::from(self.pods) * u64::from(self.pod_up()))
                .min(u64::from(self.leaves * self.leaf_up))
                .min(self.ports.into()),
        };
        Bandwidth::from_bytes_per_sec(self.wire.bandwidth.bytes_per_sec().saturating_mul(narrowest) / 2)
    }

    pub(super) fn bundles(&self) -> u32 {
        2 * (self.ports + self.leaves + self.pods)
    }

    fn bundle_at(&self, level: u32, position: u32, rises: bool) -> u32 {
        let first = match level {
            1 => 0,
            2 => 2 * self.ports,
            _ => 2 * (self.ports + self.leaves),
        };
        first + 2 * position + u32::from(!rises)
    }

    pub(super) fn up(&self, port: u32, level: u32) -> u32 {
        assert!((1..=self.tiers).contains(&level), "level {level} of {}", self.tiers);
        self.bundle_at(level, self.position(port, level), true)
    }

    pub(super) fn down(&self, port: u32, level: u32) -> u32 {
        assert!((1..=self.tiers).contains(&level), "level {level} of {}", self.tiers);
        self.bundle_at(level, self.position(port, level), false)
    }

    pub(super) fn bundle(&self, bundle: u32) -> Bundle {
        assert!(bundle < self.bundles(), "bundle {bundle} of {}", self.bundles());
        let mut nth = bundle / 2;
        let mut level = 1;
        while level < 3 && nth >= self.of_level(level).0 {
            nth -= self.of_level(level).0;
            level += 1;
        }
        let (up, down) = self.first(level);
        let (_, width) = self.of_level(level);
        let first = if bundle.is_multiple_of(2) { up } else { down };
        Bundle {
            first: LinkId(first + nth * width),
            width,
            bandwidth: self.wire.bandwidth,
            latency: self.wire.latency,
        }
    }
}
