//! Ranks on a network: the scale-up switch inside each node, and the fabric between nodes.

use serde::{Deserialize, Serialize};

use super::error::{fault, moves, numbered, within};
use super::network::{Bundle, BundleId, LinkId, Network, Port};
use super::{Fabric, FabricError, FabricFault, Wire};
use weft_plan::algorithms::Grid;
use weft_plan::units::{Picos, Rank};

/// What a node is, as far as a network cares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Accelerators on a scale-up switch, one a rank.
    #[serde(default = "one")]
    pub node_ranks: u32,
    /// Ports of the fabric that a node has. The ranks of a node share them evenly.
    #[serde(default = "one")]
    pub node_ports: u32,
    /// Between a rank and the switch of its node. Needed where a node has several ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_up: Option<Wire>,
    pub fabric: Fabric,
}

fn one() -> u32 {
    1
}

/// How far up what goes from one rank to another climbs: zero on the node, then by the tiers of the fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Level(pub u32);

/// Ranks, and the links between them. Those of scale-up come first, then those of the fabric.
#[derive(Clone, Debug)]
pub struct Topology {
    node_ranks: u32,
    node_ports: u32,
    nodes: u32,
    scale_up: Wire,
    network: Network,
}

impl Cluster {
    /// Checks everything, and gives the links between ranks.
    pub fn build(&self) -> Result<Topology, FabricError> {
        let network = self.fabric.build().map_err(|error| FabricError {
            field: format!("fabric.{}", error.field),
            ..error
        })?;
        within("node_ranks", self.node_ranks, 1, 1 << 16)?;
        within(
            "node_ports",
            self.node_ports,
            1,
            u64::from(self.node_ranks.min(network.ports())),
        )?;
        let scale_up = match (self.scale_up, self.node_ranks) {
            (Some(wire), _) => wire,
            (None, 1) => self.fabric.wire(),
            (None, ranks) => {
                let value = u64::from(ranks);
                return Err(fault("scale_up", FabricFault::Missing { ranks: value }));
            }
        };
        moves("scale_up", scale_up)?;
        let nodes = network.ports() / self.node_ports;
        let ranks = u64::from(nodes) * u64::from(self.node_ranks);
        numbered("node_ranks", 2 * ranks + u64::from(network.links()))?;
        Ok(Topology {
            node_ranks: self.node_ranks,
            node_ports: self.node_ports,
            nodes,
            scale_up,
            network,
        })
    }
}

impl Topology {
    pub fn ranks(&self) -> u32 {
        self.nodes * self.node_ranks
    }
    pub fn network(&self) -> &Network {
        &self.network
    }
    pub fn scale_up(&self) -> Wire {
        self.scale_up
    }
    /// Where so many ranks are, counted node by node; `None` where they do not fill nodes or are more than there are.
    pub fn grid(&self, ranks: u32) -> Option<Grid> {
        let local = self.node_ranks.min(ranks);
        let fits = ranks > 0 && ranks <= self.ranks() && ranks.is_multiple_of(local);
        fits.then(|| Grid {
            nodes: ranks / local,
            local,
        })
    }
    pub fn node_ranks(&self) -> u32 {
        self.node_ranks
    }
    pub fn node_ports(&self) -> u32 {
        self.node_ports
    }
    pub fn node(&self, rank: Rank) -> u32 {
        rank.0 / self.node_ranks
    }
    /// The port through which a rank reaches other nodes.
    pub fn port(&self, rank: Rank) -> Port {
        let (node, index) = (rank.0 / self.node_ranks, rank.0 % self.node_ranks);
        Port(node * self.node_ports + index * self.node_ports / self.node_ranks)
    }

    pub fn links(&self) -> u32 {
        2 * self.ranks() + self.network.links()
    }
    /// The cable of a link.
    ///
    /// # Panics
    /// Where there is no such link.
    pub fn wire(&self, link: LinkId) -> Wire {
        match link.0.checked_sub(2 * self.ranks()) {
            None => self.scale_up,
            Some(nth) => {
                let link = self.network.link(LinkId(nth));
                Wire {
                    bandwidth: link.bandwidth,
                    latency: link.latency,
                }
            }
        }
    }

    /// What people call a link.
    pub fn link_name(&self, link: LinkId) -> String {
        let ranks = self.ranks();
        match link.0 {
            nth if nth < ranks => format!("rank {nth} → scale-up"),
            nth if nth < 2 * ranks => format!("scale-up → rank {}", nth - ranks),
            nth => {
                let link = self.network.link(LinkId(nth - 2 * ranks));
                let name = |vertex| self.network.vertex_name(vertex);
                format!("{} → {}", name(link.from), name(link.to))
            }
        }
    }

    pub fn ways(&self, from: Rank, to: Rank) -> u32 {
        match self.node(from) == self.node(to) {
            true => 1,
            false => self.network.ways(self.port(from), self.port(to)),
        }
    }
    pub fn detours(&self, from: Rank, to: Rank) -> u32 {
        match self.node(from) == self.node(to) {
            true => 0,
            false => self.network.detours(self.port(from), self.port(to)),
        }
    }
    /// Appends the links of a way.
    pub fn route(&self, from: Rank, to: Rank, way: u32, out: &mut Vec<LinkId>) {
        let ranks = self.ranks();
        if from == to {
            return;
        }
        if self.node(from) == self.node(to) {
            out.extend([LinkId(from.0), LinkId(ranks + to.0)]);
            return;
        }
        let first = out.len();
        self.network.route(self.port(from), self.port(to), way, out);
        for link in &mut out[first..] {
            link.0 += 2 * ranks;
        }
    }
    pub fn route_links_max(&self) -> u32 {
        self.network.route_links_max().max(2)
    }

    /// How far up the network goes, where it is a tree of bundles.
    pub fn top(&self) -> Option<Level> {
        self.network.levels().map(Level)
    }
    pub fn level(&self, from: Rank, to: Rank) -> Level {
        match self.node(from) == self.node(to) {
            true => Level(0),
            false => Level(self.network.meet(self.port(from), self.port(to))),
        }
    }
    pub fn bundles(&self) -> u32 {
        2 * self.ranks() + self.network.bundles()
    }
    /// The bundle by which what a rank sends leaves a level.
    pub fn up(&self, rank: Rank, level: Level) -> BundleId {
        match level.0 {
            0 => BundleId(rank.0),
            level => BundleId(2 * self.ranks() + self.network.up(self.port(rank), level).0),
        }
    }
    /// The bundle by which what is for a rank comes down to a level.
    pub fn down(&self, rank: Rank, level: Level) -> BundleId {
        match level.0 {
            0 => BundleId(self.ranks() + rank.0),
            level => BundleId(2 * self.ranks() + self.network.down(self.port(rank), level).0),
        }
    }
    /// # Panics
    /// Where there is no such bundle.
    pub fn bundle(&self, bundle: BundleId) -> Bundle {
        match bundle.0.checked_sub(2 * self.ranks()) {
            None => Bundle {
                first: LinkId(bundle.0),
                width: 1,
                bandwidth: self.scale_up.bandwidth,
                latency: self.scale_up.latency,
            },
            Some(nth) => {
                let bundle = self.network.bundle(BundleId(nth));
                Bundle {
                    first: LinkId(bundle.first.0 + 2 * self.ranks()),
                    ..bundle
                }
            }
        }
    }

    /// How long the first byte is under way by a route.
    pub fn latency(&self, route: &[LinkId]) -> Picos {
        let latencies = route.iter().map(|&link| self.wire(link).latency);
        latencies.fold(Picos::ZERO, Picos::saturating_add)
    }
}
