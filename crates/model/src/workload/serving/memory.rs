//! Whether a model fits, and for how many requests.

use super::{Quantisation, ServingError, Worker};
use crate::system::System;
use crate::workload::model::{Feed, Mixer, Model};
use weft_plan::units::Bytes;

/// What one GPU's memory is used for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheRoom {
    pub weights: Bytes,
    /// What is left for the cache.
    pub cache: Bytes,
    /// Bytes of cache on each GPU for each token of a sequence, in layers that see all of it.
    pub token_bytes: f64,
    /// Bytes on each GPU for each sequence, whatever its length: windows and states.
    pub sequence_bytes: f64,
}

/// The share of memory that engines take by default; the rest is left to the driver, graphs and activations.
const USABLE: f64 = 0.9;
/// Where weights leave less than this, engines are told to take more, and the cache has it all the same.
const CACHE_LEAST: f64 = 0.01;

/// What a worker's GPUs have room for. An error where not even the weights fit.
pub fn room(
    system: &System,
    model: &Model,
    worker: Worker,
    quantisation: Quantisation,
) -> Result<CacheRoom, ServingError> {
    worker.validate(model)?;
    let hidden = f64::from(model.hidden);
    let tensor = f64::from(worker.tensor);
    let ranks = f64::from(worker.expert_tensor) * f64::from(worker.expert);
    let (mut weights, mut token_bytes, mut sequence_bytes) = (0.0, 0.0, 0.0);
    let element = quantisation.cache.bytes();
    for stack in &model.stacks {
        let layers = f64::from(stack.layers) / f64::from(worker.pipeline);
        if let Some(mixer) = &stack.mixer {
            let repeated = match *mixer {
                Mixer::Latent {
                    query_rank,
                    kv_rank,
                    rope,
                    ..
                } => hidden * f64::from(query_rank + kv_rank + rope),
                _ => 0.0,
            };
            let parameters = (mixer.parameters(hidden) - repeated) / tensor + repeated;
            weights += layers * parameters * Quantisation::weight_bytes(quantisation.attention);
            let kept = mixer.cached_elements().unwrap_or(0.0) * element * layers;
            match *mixer {
                Mixer::Attention {
                    kv_heads,
                    window: Some(window),
                    ..
                } => sequence_bytes += kept * f64::from(window) / tensor.min(kv_heads.into()),
                Mixer::Attention { kv_heads, .. } => token_bytes += kept / tensor.min(kv_heads.into()),
                Mixer::Latent { .. } => token_bytes += kept,
                Mixer::StateSpace { .. } | Mixer::Delta { .. } => {
                    sequence_bytes += 2.0 * super::pass::state_elements(mixer) * layers / tensor;
                }
            }
        }
        match &stack.feed {
            Some(Feed::Experts(experts)) => {
                let routed = experts.routed_parameters(hidden) / ranks;
                weights += layers * routed * Quantisation::weight_bytes(quantisation.experts);
                let common = experts.common_parameters(hidden) / tensor;
                weights += layers * common * Quantisation::weight_bytes(quantisation.dense);
            }
            Some(feed) => {
                let parameters = feed.parameters(hidden) / tensor;
                weights += layers * parameters * Quantisation::weight_bytes(quantisation.dense);
            }
            None => {}
        }
    }
    weights += 2.0 * (model.embedding_parameters() + model.output_parameters()) / tensor;
    let memory = system.gpu.memory.0 as f64;
    if weights > memory {
        return Err(ServingError::DoesNotFit {
            needed_gb: weights / 1e9,
            available_gb: memory / 1e9,
        });
    }
    let cache = (memory * USABLE - weights).max(memory * CACHE_LEAST);
    Ok(CacheRoom {
        weights: Bytes(weights as u64),
        cache: Bytes(cache as u64),
        token_bytes,
        sequence_bytes,
    })
}

impl CacheRoom {
    /// How many sequences of this many tokens an attention rank holds.
    pub fn sequences(&self, tokens: f64) -> f64 {
        let each = self.token_bytes * tokens + self.sequence_bytes;
        if each > 0.0 {
            self.cache.0 as f64 / each
        } else {
            f64::INFINITY
        }
    }
}
