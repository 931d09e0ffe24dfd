//! Serving a model: how long the first token takes, how long each further one, how many requests fit, and which way to divide the
//! GPUs is best.
//!
//! [`Pass`] is the time of one forward pass of a [`Worker`], from the bytes and operations of the [`Model`](super::model::Model), the
//! GPU, the collectives between its GPUs and a few habits of the [`Engine`]. [`Deployment::estimate`] puts passes together for a
//! closed loop of requests, prefill and decode on the same workers or on different ones; [`search`] tries deployments against
//! targets. The event-driven simulator asks the same passes.
//!
//! ```
//! use weft_model::system::System;
//! use weft_model::workload::model::Model;
//! use weft_model::workload::serving::{Deployment, Engine, ServingLoad, Quantisation, Worker};
//! let (system, model) = (System::named("dgx-h200")?, Model::named("llama-3.1-70b")?);
//! let deployment = Deployment::aggregated(Engine::Vllm, Quantisation::fp8(&model), Worker::tensor(8), 1);
//! let few = deployment.estimate(&system, &model, &ServingLoad::closed(4, 1024, 1024))?;
//! let many = deployment.estimate(&system, &model, &ServingLoad::closed(64, 1024, 1024))?;
//! assert!(few.per_token < many.per_token && few.output_per_second < many.output_per_second);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod engine;
mod error;
mod exchange;
mod fetch;
mod hand_off;
mod latency;
pub mod measured;
mod memory;
mod pass;
mod quantisation;
mod search;
mod worker;

pub use engine::Engine;
pub use error::ServingError;
pub use fetch::Recompute;
pub use hand_off::{nics, token_bytes};
pub use latency::{Deployment, Lengths, Limit, Pool, ServingEstimate, ServingLoad};
pub use memory::{CacheRoom, room};
pub use pass::{Pass, PassBatch};
pub use quantisation::Quantisation;
pub use search::{ServingCandidate, ServingSearch, Targets, search};
pub use worker::Worker;

#[cfg(test)]
mod tests;
