//! A serving scenario as a file: everything that a report depends on, the seed included.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use weft_plan::platform::fabric::{Cluster, FabricError, Routing};
use weft_plan::platform::{PlatformError, System};
use weft_plan::workload::model::{Model, ModelError};
use weft_plan::workload::serving::{Deployment, Engine, Pool, Quantisation, ServingError, Worker};
use weft_plan::{Bytes, Rank, Time};

use super::{Arrivals, Network, Report, ServingOptions, SimulationError, run};
use crate::flow::{FlowOptions, Transfer};

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
    pub platform: String,
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
    pub start: Time,
}

/// What is wrong with a file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServingScenarioError {
    #[error("a file of {bytes} bytes; {max} is the most")]
    TooLong { bytes: usize, max: usize },
    /// With its line, its column and the field.
    #[error(transparent)]
    Toml(#[from] toml::de::Error),
    #[error("platform: {0}")]
    Platform(#[from] PlatformError),
    #[error("model: {0}")]
    Model(#[from] ModelError),
    #[error("network.cluster: {0}")]
    Fabric(#[from] FabricError),
    #[error(transparent)]
    Serving(#[from] ServingError),
    #[error(transparent)]
    Simulation(#[from] SimulationError),
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
        Ok(toml::from_str(text)?)
    }

    /// Serves the requests.
    pub fn run(&self) -> Result<Report, ServingScenarioError> {
        let system = System::named(&self.platform)?;
        let model = Model::named(&self.model)?;
        let engine: Engine = self.engine.parse()?;
        let deployment = Deployment {
            engine,
            quantisation: Quantisation::named(&model, &self.quantisation, &self.quantisation)?,
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
        let requests = arrivals.requests(self.seed)?;
        let topology = match &self.network {
            Some(network) => Some(network.cluster.build()?),
            None => None,
        };
        let network = self
            .network
            .as_ref()
            .zip(topology.as_ref())
            .map(|(choice, topology)| Network {
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
        Ok(run(&system, &model, &deployment, &requests, &options)?)
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
