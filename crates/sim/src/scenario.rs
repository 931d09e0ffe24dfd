//! Scenarios: a cluster, something to do on it, and what goes wrong, as a file; and the answers of the three fidelities side by side.
//!
//! A file says everything that an answer depends on, the seed included, so that the same file gives the same bytes again.
//!
//! ```
//! use weft_sim::scenario::{Fidelity, Scenario};
//! let scenario = Scenario::from_toml(
//!     r#"
//! name = "sixteen in a ring"
//! fidelities = ["analytical", "flow"]
//! [cluster.fabric.single-switch]
//! ports = 16
//! wire = { bandwidth = "400 Gb/s", latency = "1 µs" }
//! [workload.collective]
//! collective = "all-reduce"
//! algorithm = "ring"
//! bytes = "256 MiB"
//! "#,
//! )?;
//! let answers = scenario.run()?;
//! assert_eq!(answers[0].fidelity, Fidelity::Analytical);
//! let apart = answers[0].time.as_secs_f64() / answers[1].time.as_secs_f64();
//! assert!((apart - 1.0).abs() < 0.001);
//! # Ok::<(), weft_sim::scenario::ScenarioError>(())
//! ```

mod error;
mod run;
mod shipped;

use serde::{Deserialize, Serialize};
use weft_model::fabric::{Cluster, Fabric, FabricError, Routing, Topology, Wire};
use weft_model::system::{System, SystemError};
use weft_plan::{Bandwidth, Bytes, Picos, Rank};

use crate::training::TrainingChoice;

pub(crate) use error::line_of;
pub use error::{ScenarioError, ScenarioPlace};
pub use run::Answer;

/// More text than any honest scenario has.
const MAX_FILE_BYTES: usize = 16 << 20;

/// What is to be simulated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    pub name: String,
    #[serde(default)]
    pub summary: String,
    #[serde(default = "one")]
    pub seed: u64,
    /// Which answers are wanted.
    pub fidelities: Vec<Fidelity>,
    /// The machines, by the name of a shipped system; or `cluster`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<SystemChoice>,
    /// The machines, said outright.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Cluster>,
    #[serde(default = "sprayed")]
    pub routing: Routing,
    pub workload: Workload,
    #[serde(default)]
    pub work: Work,
    #[serde(default)]
    pub packet: PacketChoice,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<ScenarioFault>,
}

fn one() -> u64 {
    1
}
fn sprayed() -> Routing {
    Routing::Spray
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Fidelity {
    /// A closed form over steps.
    Analytical,
    Flow,
    Packet,
}

/// So many nodes of a shipped system, on a rail-optimised Clos of its network cards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SystemChoice {
    pub name: String,
    pub nodes: u32,
    #[serde(default = "two")]
    pub tiers: u32,
    #[serde(default = "sixty_four")]
    pub radix: u32,
    #[serde(default = "unshared")]
    pub oversubscription: u32,
    /// Of a cable and the switch behind it.
    #[serde(default = "link_latency")]
    pub link_latency: Picos,
    /// Between a GPU and the switch of its node.
    #[serde(default = "scale_up_latency")]
    pub scale_up_latency: Picos,
}

fn two() -> u32 {
    2
}
fn sixty_four() -> u32 {
    64
}
fn unshared() -> u32 {
    1
}
fn link_latency() -> Picos {
    Picos::from_ns(500)
}
fn scale_up_latency() -> Picos {
    Picos::from_ns(250)
}

/// What is done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Workload {
    Collective {
        /// As `weft explain` names it.
        collective: String,
        /// As communicators name it: `ring`, or `ring/16` for one in 16 portions. The fastest by the analytical model where nothing is said,
        /// which is what a communicator would choose.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        algorithm: Option<String>,
        /// In the larger of a rank's buffers.
        bytes: Bytes,
        /// All where nothing is said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ranks: Option<u32>,
        #[serde(default)]
        root: u32,
    },
    /// Every rank sends to another, by chance, and takes from another.
    Permutation {
        bytes: Bytes,
    },
    /// Ranks from one on send to rank zero.
    Incast {
        senders: u32,
        bytes: Bytes,
    },
    Transfers {
        list: Vec<Listed>,
    },
    /// A step of training on a `system`; there is a closed form of it alone.
    Training(TrainingChoice),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    pub from: Rank,
    pub to: Rank,
    pub bytes: Bytes,
    #[serde(default)]
    pub start: Picos,
}

/// What ranks do beside the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Work {
    /// Of each message, at its ends.
    #[serde(default)]
    pub message_overhead: Picos,
    /// No time at all where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduction: Option<Bandwidth>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<Bandwidth>,
}

/// Packets and their transport.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PacketChoice {
    pub transport: TransportChoice,
    pub payload: Bytes,
    pub header: Bytes,
    /// Data that may wait for a link; as the transport needs it where nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<Bytes>,
    pub loss: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum TransportChoice {
    /// The receiver asks, switches trim.
    #[default]
    Pull,
    /// Pause frames, DCQCN, go-back-N.
    Roce,
    /// DCQCN and selective repeat over switches that drop.
    RoceLossy,
}

impl Default for PacketChoice {
    fn default() -> PacketChoice {
        PacketChoice {
            transport: TransportChoice::default(),
            payload: Bytes(4096),
            header: Bytes(54),
            queue: None,
            loss: 0.0,
        }
    }
}

/// Something that is not as it should be for a while.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioFault {
    /// The port of this rank, both directions; or a link by its number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<Rank>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<u32>,
    /// How much of its bandwidth is left: none where it is down.
    pub left: f64,
    #[serde(default)]
    pub from: Picos,
    /// Never again where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Picos>,
}

impl Scenario {
    /// The names of the scenarios that are shipped.
    pub fn names() -> impl Iterator<Item = &'static str> {
        shipped::FILES.iter().map(|(name, _)| *name)
    }

    /// The text of a shipped scenario.
    pub fn shipped(name: &str) -> Option<&'static str> {
        shipped::FILES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, text)| *text)
    }

    /// Reads a scenario, and checks that it holds together.
    pub fn from_toml(text: &str) -> Result<Scenario, ScenarioError> {
        if text.len() > MAX_FILE_BYTES {
            return Err(ScenarioError::TooLong {
                bytes: text.len(),
                max: MAX_FILE_BYTES,
            });
        }
        let scenario: Scenario = toml::from_str(text).map_err(|error| ScenarioError::unreadable(text, &error))?;
        scenario.prepare().map_err(|error| error.in_text(text))?;
        Ok(scenario)
    }

    /// The links of its cluster.
    pub fn topology(&self) -> Result<Topology, ScenarioError> {
        let fabric = |place: &str, error: FabricError| ScenarioError::Fabric {
            place: ScenarioPlace::field(format!("{place}.{}", error.field)),
            source: error,
        };
        match (&self.cluster, &self.system) {
            (Some(cluster), None) => cluster.build().map_err(|error| fabric("cluster", error)),
            (None, Some(choice)) => {
                let cluster = choice.cluster().map_err(|source| ScenarioError::System {
                    place: ScenarioPlace::field("system.name"),
                    source,
                })?;
                cluster.build().map_err(|error| fabric("system", error))
            }
            (Some(_), Some(_)) => Err(ScenarioError::TwoClusters {
                place: ScenarioPlace::field("system"),
            }),
            (None, None) => Err(ScenarioError::NoCluster {
                place: ScenarioPlace::field("cluster"),
            }),
        }
    }
}

impl SystemChoice {
    fn cluster(&self) -> Result<Cluster, SystemError> {
        let system = System::named(&self.name)?;
        // A scale-up domain is what the network takes for a node.
        let nodes = system.scale_up.domain.div_ceil(system.node.gpus.max(1)).max(1);
        let ports = system.scale_out.nics.saturating_mul(nodes);
        let rails = ports.min(system.scale_up.domain).max(1);
        Ok(Cluster {
            node_ranks: system.scale_up.domain,
            node_ports: rails,
            scale_up: Some(Wire {
                bandwidth: system.scale_up.bandwidth,
                latency: self.scale_up_latency,
            }),
            fabric: Fabric::RailClos {
                nodes: self.nodes,
                rails,
                tiers: self.tiers,
                radix: self.radix,
                oversubscription: self.oversubscription,
                wire: Wire {
                    bandwidth: system.scale_out.rate,
                    latency: self.link_latency,
                },
            },
        })
    }
}

#[cfg(test)]
mod tests;
