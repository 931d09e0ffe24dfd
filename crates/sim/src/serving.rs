//! Serving, event by event: requests arrive, prompts are read, caches are handed over, tokens come, all on a virtual clock.
//!
//! How long a pass takes is asked of `model` ([`Pass`](weft_model::workload::serving::Pass)), as the closed form does; what this adds is everything that
//! happens at once: queues, batches that grow and shrink, prefixes that are found in a cache, and hand-offs that share the links with each
//! other and with whatever else is on them ([`flow`](crate::flow)).
//!
//! ```
//! use weft_model::system::System;
//! use weft_model::workload::model::Model;
//! use weft_model::workload::serving::{Deployment, Engine, Quantisation, Worker};
//! use weft_sim::serving::{Arrivals, ServingOptions, run};
//! let (system, model) = (System::named("dgx-h200")?, Model::named("llama-3.1-8b")?);
//! let deployment = Deployment::aggregated(Engine::Vllm, Quantisation::fp8(&model), Worker::tensor(1), 2);
//! let requests = Arrivals { count: 100, rate: 10.0, input: 1000, output: 50, ..Arrivals::default() }.requests(7)?;
//! let report = run(&system, &model, &deployment, &requests, &ServingOptions::default())?;
//! assert_eq!(report.requests, 100);
//! assert!(report.first_token.p50 < report.first_token.p99);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod play;
mod report;
mod requests;
mod scenario;
mod worker;

use thiserror::Error;
use weft_model::fabric::Topology;
use weft_model::system::System;
use weft_model::workload::model::Model;
use weft_model::workload::serving::{Deployment, ServingError};

use crate::flow::{FlowError, FlowOptions};
use crate::traffic::Transfer;

pub use report::{Percentiles, Report};
pub use requests::{Arrivals, Prefix, Request};
pub use scenario::{ServingScenario, ServingScenarioError};

/// What besides the deployment decides.
#[derive(Debug, Default)]
pub struct ServingOptions<'a> {
    /// The links between the GPUs. Without them, a hand-off has the NICs of its GPUs for itself.
    pub network: Option<ServingNetwork<'a>>,
    /// Tokens of shared prefixes that each worker keeps besides the requests that it serves.
    pub prefix_tokens: u64,
}

/// A network, and what else is on it.
#[derive(Debug)]
pub struct ServingNetwork<'a> {
    pub topology: &'a Topology,
    pub options: FlowOptions,
    pub others: Vec<Transfer>,
}

#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SimulationError {
    #[error(transparent)]
    Serving(#[from] ServingError),
    #[error(transparent)]
    Flow(#[from] FlowError),
    #[error("{what} must be between {least} and {most}, not {value}")]
    OutOfRange {
        what: &'static str,
        value: f64,
        least: f64,
        most: f64,
    },
    #[error("request {request} needs room for {tokens} tokens, and no worker has more than {room}")]
    TooLong { request: u32, tokens: u64, room: u64 },
    #[error("the deployment takes {gpus} GPUs, and the network has {ranks}")]
    NetworkTooSmall { gpus: u32, ranks: u32 },
}

/// Serves the requests, and says what their clients saw. The same arguments give the same report.
pub fn run(
    system: &System,
    model: &Model,
    deployment: &Deployment,
    requests: &[Request],
    options: &ServingOptions<'_>,
) -> Result<Report, SimulationError> {
    play::Play::new(system, model, deployment, requests, options)?.run()
}

#[cfg(test)]
mod tests;
