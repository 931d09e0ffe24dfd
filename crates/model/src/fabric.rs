//! Networks that are generated: what connects the ports of a cluster, computed and never stored.
//!
//! A [`Fabric`] is a few numbers, as a platform file has them. [`Fabric::build`] checks them and gives a [`Network`], in which links are numbered
//! densely and the route between two ports is arithmetic, so that half a million ports cost as much as two. Between two ports there may
//! be several equally short *ways*; which of them a flow takes is the [`Routing`]. Where all ways are used alike, the parallel links of a
//! switch act as one: a [`Bundle`].
//!
//! ```
//! use weft_model::fabric::{Fabric, Port, Wire};
//! let wire = Wire { bandwidth: "400 Gb/s".parse()?, latency: "500 ns".parse()? };
//! let fabric = Fabric::RailClos { nodes: 1024, rails: 8, tiers: 3, radix: 64, oversubscription: 1, wire };
//! let network = fabric.build()?;
//! assert_eq!(network.ports(), 8192);
//! let mut route = Vec::new();
//! // The first cards of two neighbours share a leaf; those of far nodes meet at the top.
//! network.route(Port(0), Port(8), 0, &mut route);
//! assert_eq!((route.len(), network.ways(Port(0), Port(8))), (2, 1));
//! assert_eq!(network.ways(Port(0), Port(8000)), 32 * 32);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod clos;
mod dragonfly;
mod error;
mod mesh;
mod network;
mod topology;
mod torus;

use serde::{Deserialize, Serialize};

use clos::Clos;
use dragonfly::Dragonfly;
use mesh::Mesh;
use torus::Torus;
use weft_plan::units::{Bandwidth, Picos};

pub use error::{FabricError, FabricFault};
pub use network::{Bundle, BundleId, Link, LinkId, Network, Port, Vertex};
pub use topology::{Cluster, Level, Topology};

/// A cable and the switch that it ends at, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wire {
    pub bandwidth: Bandwidth,
    pub latency: Picos,
}

/// A network as a generator and its parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Fabric {
    /// All ports on one switch that blocks nothing.
    SingleSwitch { ports: u32, wire: Wire },
    /// A cable from each port to each other.
    Direct { ports: u32, wire: Wire },
    /// A folded Clos in which the n-th cards of neighbouring nodes share a leaf: ports are counted node by node, rail by rail.
    RailClos {
        nodes: u32,
        rails: u32,
        /// Two, or three with pods below the top.
        tiers: u32,
        /// How many ports a switch has.
        radix: u32,
        /// How much more a leaf has below than above.
        #[serde(default = "none")]
        oversubscription: u32,
        wire: Wire,
    },
    /// A folded Clos in which neighbouring ports share a leaf.
    FatTree {
        hosts: u32,
        tiers: u32,
        radix: u32,
        #[serde(default = "none")]
        oversubscription: u32,
        wire: Wire,
    },
    /// A ring, a torus or a three-dimensional torus; every port is a router with two links a dimension.
    Torus { sides: Vec<u32>, wire: Wire },
    /// Groups of routers, all connected with each other, and groups likewise.
    Dragonfly {
        groups: u32,
        /// In a group.
        routers: u32,
        /// At a router.
        hosts: u32,
        /// Links to other groups that a router has.
        global: u32,
        wire: Wire,
        /// Between groups, where these are other cables.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        global_wire: Option<Wire>,
    },
    /// Groups that are two-tier Clos networks; their spines connect the groups.
    DragonflyPlus {
        groups: u32,
        /// In a group.
        leaves: u32,
        /// In a group.
        spines: u32,
        /// At a leaf.
        hosts: u32,
        /// Links to other groups that a spine has.
        global: u32,
        wire: Wire,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        global_wire: Option<Wire>,
    },
}

/// Which of the ways between two ports is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Routing {
    /// One for each flow, by a hash: flows may collide.
    #[default]
    Ecmp,
    /// One for each flow, the least loaded when it begins.
    Adaptive,
    /// All of them, packet by packet.
    Spray,
}

fn none() -> u32 {
    1
}

impl Fabric {
    /// Checks the parameters and makes the network of them.
    pub fn build(&self) -> Result<Network, FabricError> {
        match *self {
            Fabric::SingleSwitch { ports, wire } => Clos::single(ports, wire).map(Network::clos),
            Fabric::Direct { ports, wire } => Mesh::new(ports, wire).map(Network::mesh),
            Fabric::RailClos {
                nodes,
                rails,
                tiers,
                radix,
                oversubscription,
                wire,
            } => Clos::rails(nodes, rails, (tiers, radix, oversubscription), wire).map(Network::clos),
            Fabric::FatTree {
                hosts,
                tiers,
                radix,
                oversubscription,
                wire,
            } => Clos::fat_tree(hosts, (tiers, radix, oversubscription), wire).map(Network::clos),
            Fabric::Torus { ref sides, wire } => Torus::new(sides, wire).map(Network::torus),
            Fabric::Dragonfly {
                groups,
                routers,
                hosts,
                global,
                wire,
                global_wire,
            } => Dragonfly::new((groups, routers, hosts, global), wire, global_wire.unwrap_or(wire))
                .map(Network::dragonfly),
            Fabric::DragonflyPlus {
                groups,
                leaves,
                spines,
                hosts,
                global,
                wire,
                global_wire,
            } => Dragonfly::plus(
                (groups, leaves, spines, hosts, global),
                wire,
                global_wire.unwrap_or(wire),
            )
            .map(Network::dragonfly),
        }
    }

    /// The wire of its ports.
    pub fn wire(&self) -> Wire {
        match *self {
            Fabric::SingleSwitch { wire, .. }
            | Fabric::Direct { wire, .. }
            | Fabric::RailClos { wire, .. }
            | Fabric::FatTree { wire, .. }
            | Fabric::Torus { wire, .. }
            | Fabric::Dragonfly { wire, .. }
            | Fabric::DragonflyPlus { wire, .. } => wire,
        }
    }
}

#[cfg(test)]
mod tests;
