//! A serving scenario as a file: everything that a report depends on, the seed included.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_model::fabric::{Cluster, FabricError, Routing, Topology};
use weft_model::system::{System, SystemError};
use weft_model::workload::model::{Model, ModelError};
use weft_model::workload::serving::{Deployment, Engine, Pool, Quantisation, ServingError, Worker};
use weft_plan::spot::Spot;
use weft_plan::{Bytes, Picos, Rank};

use super::{Arrivals, Report, Request, ServingNetwork, ServingOptions, SimulationError, run};
use crate::flow::FlowOptions;
use crate::scenario::{ScenarioPlace, line_of};
use crate::traffic::Transfer;

/// Who serves what to whom.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServingScenario {
    pub name: String,
    #[serde(default)]
    pub summary: String,
    #[serde(default = "one")]
    pub seed: u64,
    /// The GPUs, by the name of a shipped system.
    pub system: String,
    pub model: String,
    pub engine: String,
    /// How weights are stored: `bf16`, `fp8` or `nvfp4`.
    pub quantisation: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Workers>,
    pub decode: Workers,
    pub arrivals: ArrivalsChoice,
    /// Tokens of shared prefixes that each worker keeps.
    #[serde(default)]
    pub prefix_tokens: u64,
    /// The links between the GPUs, those of prefill first; without it hand-offs do not meet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkChoice>,
}

/// Workers that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workers {
    pub count: u32,
    #[serde(default = "single")]
    pub tensor: u32,
    #[serde(default = "single")]
    pub data: u32,
    /// Experts by number; the rest of the GPUs divide their width.
    #[serde(default = "single")]
    pub expert: u32,
    #[serde(default = "single")]
    pub pipeline: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArrivalsChoice {
    pub count: u32,
    /// Requests a second.
    pub rate: f64,
    pub input: u32,
    pub output: u32,
    #[serde(default = "whole")]
    pub shortest: f64,
    #[serde(default)]
    pub families: u32,
    #[serde(default)]
    pub shared: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkChoice {
    pub cluster: Cluster,
    #[serde(default)]
    pub routing: Routing,
    /// What else is on the links.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Other>,
}

/// Bytes that have nothing to do with serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Other {
    pub from: u32,
    pub to: u32,
    pub bytes: Bytes,
    #[serde(default)]
    pub start: Picos,
}

/// What is wrong with a file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServingScenarioError {
    #[error("a file of {bytes} bytes; {max} is the most")]
    TooLong { bytes: usize, max: usize },
    /// Not TOML, or not the fields of such a scenario.
    #[error("{0}")]
    Unreadable(Spot),
    #[error("{place}: {source}")]
    System { place: ScenarioPlace, source: SystemError },
    #[error("{place}: {source}")]
    Model { place: ScenarioPlace, source: ModelError },
    #[error("{place}: {}", source.fault)]
    Fabric { place: ScenarioPlace, source: FabricError },
    #[error("{place}: {source}")]
    Serving { place: ScenarioPlace, source: ServingError },
    #[error("{place}: {source}")]
    Simulation {
        place: ScenarioPlace,
        source: SimulationError,
    },
}

const MAX_FILE_BYTES: usize = 16 << 20;

fn one() -> u64 {
    1
}
fn single() -> u32 {
    1
}
fn whole() -> f64 {
    1.0
}

impl ServingScenario {
    pub fn from_toml(text: &str) -> Result<ServingScenario, ServingScenarioError> {
        if text.len() > MAX_FILE_BYTES {
            return Err(ServingScenarioError::TooLong {
                bytes: text.len(),
                max: MAX_FILE_BYTES,
            });
        }
        let scenario: ServingScenario = toml::from_str(text).map_err(|error| {
            let mut spot = Spot::of(text, &error);
            if spot.field == "platform" {
                spot.message = "a system of GPUs is chosen by `system`".to_owned();
            }
            ServingScenarioError::Unreadable(spot)
        })?;
        scenario.prepare().map_err(|error| error.in_text(text))?;
        Ok(scenario)
    }

    /// The links between its GPUs, where it tells them.
    pub fn topology(&self) -> Result<Option<Topology>, ServingScenarioError> {
        let Some(network) = &self.network else {
            return Ok(None);
        };
        let built = network.cluster.build().map_err(|source| ServingScenarioError::Fabric {
            place: ScenarioPlace::field(format!("network.cluster.{}", source.field)),
            source,
        })?;
        Ok(Some(built))
    }

    /// Serves the requests.
    pub fn run(&self) -> Result<Report, ServingScenarioError> {
        let Prepared {
            system,
            model,
            deployment,
            requests,
            topology,
        } = self.prepare()?;
        let network = self
            .network
            .as_ref()
            .zip(topology.as_ref())
            .map(|(choice, topology)| ServingNetwork {
                topology,
                options: FlowOptions {
                    routing: choice.routing,
                    seed: self.seed,
                    ..FlowOptions::default()
                },
                others: choice.others.iter().map(Other::transfer).collect(),
            });
        let options = ServingOptions {
            network,
            prefix_tokens: self.prefix_tokens,
        };
        run(&system, &model, &deployment, &requests, &options).map_err(|source| {
            let field = match &source {
                SimulationError::NetworkTooSmall { .. } | SimulationError::Flow(_) => "network.cluster",
                SimulationError::Serving(_) => "decode",
                SimulationError::TooLong { .. } | SimulationError::OutOfRange { .. } => "arrivals",
            };
            ServingScenarioError::Simulation {
                place: ScenarioPlace::field(field),
                source,
            }
        })
    }

    /// Everything that the file names, looked up and checked.
    fn prepare(&self) -> Result<Prepared, ServingScenarioError> {
        let serving = |field: &str| {
            let place = ScenarioPlace::field(field);
            |source| ServingScenarioError::Serving { place, source }
        };
        let system = System::named(&self.system).map_err(|source| ServingScenarioError::System {
            place: ScenarioPlace::field("system"),
            source,
        })?;
        let model = Model::named(&self.model).map_err(|source| ServingScenarioError::Model {
            place: ScenarioPlace::field("model"),
            source,
        })?;
        let engine: Engine = self.engine.parse().map_err(serving("engine"))?;
        let deployment = Deployment {
            engine,
            quantisation: Quantisation::named(&model, &self.quantisation, &self.quantisation)
                .map_err(serving("quantisation"))?,
            prefill: self.prefill.map(|workers| workers.pool()),
            decode: self.decode.pool(),
        };
        let ArrivalsChoice {
            count,
            rate,
            input,
            output,
            shortest,
            families,
            shared,
        } = self.arrivals;
        let arrivals = Arrivals {
            count,
            rate,
            input,
            output,
            shortest,
            families,
            shared,
        };
        let requests = arrivals
            .requests(self.seed)
            .map_err(|source| ServingScenarioError::Simulation {
                place: ScenarioPlace::field("arrivals"),
                source,
            })?;
        Ok(Prepared {
            system,
            model,
            deployment,
            requests,
            topology: self.topology()?,
        })
    }
}

/// What a scenario asks for, ready to run.
struct Prepared {
    system: System,
    model: Model,
    deployment: Deployment,
    requests: Vec<Request>,
    topology: Option<Topology>,
}

impl ServingScenarioError {
    /// With the line that the text has for its field.
    pub fn in_text(mut self, text: &str) -> ServingScenarioError {
        if let ServingScenarioError::System { place, .. }
        | ServingScenarioError::Model { place, .. }
        | ServingScenarioError::Fabric { place, .. }
        | ServingScenarioError::Serving { place, .. }
        | ServingScenarioError::Simulation { place, .. } = &mut self
        {
            place.line = line_of(text, &place.field);
        }
        self
    }
}

impl Workers {
    fn pool(&self) -> Pool {
        let ranks = self.tensor.saturating_mul(self.data);
        let worker = Worker {
            tensor: self.tensor,
            data: self.data,
            expert: self.expert,
            expert_tensor: ranks / self.expert.max(1),
            pipeline: self.pipeline,
        };
        Pool {
            worker,
            count: self.count,
        }
    }
}

impl Other {
    fn transfer(&self) -> Transfer {
        Transfer {
            from: Rank(self.from),
            to: Rank(self.to),
            bytes: self.bytes,
            start: self.start,
        }
    }
}
