//! What a GPU must hold: does the job fit?

use serde::Serialize;

use super::{Sharding, TrainingJob, Tuned};
use crate::system::System;
use crate::workload::model::{Feed, Mixer, Stack};

/// Bytes of the GPU that holds the most.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepMemory {
    pub capacity: f64,
    pub weights: f64,
    pub gradients: f64,
    pub optimizer: f64,
    /// What is kept for the backward pass.
    pub activations: f64,
    /// The scores of the vocabulary, and their gradients.
    pub scores: f64,
    /// What would be left of the activations if every layer were computed again.
    least_activations: f64,
}

/// What is left of activations when norms, activation functions and sorted tokens are computed again, which takes no matrix product.
const KEPT: f64 = 0.55;
/// Adam's two moments and the weights, in 32 bits.
const OPTIMIZER_STATE: f64 = 12.0;

impl StepMemory {
    pub fn total(&self) -> f64 {
        self.weights + self.gradients + self.optimizer + self.activations + self.scores
    }

    pub fn fits(&self) -> bool {
        self.total() <= self.capacity
    }

    /// The share of layers that must be computed again for the rest to fit.
    pub(super) fn must_recompute(&self) -> f64 {
        let over = self.total() - self.capacity;
        let gained = (self.activations - self.least_activations).max(1.0);
        (over / gained).clamp(0.0, 1.0)
    }

    /// The same with a share of the layers computed again.
    pub(super) fn recomputing(self, share: f64) -> StepMemory {
        let gained = (self.activations - self.least_activations).max(0.0);
        StepMemory {
            activations: self.activations - share * gained,
            ..self
        }
    }
}

impl TrainingJob {
    /// What the job needs when no layer is computed again.
    pub fn memory(&self, system: &System) -> StepMemory {
        let (common, experts) = self.owned();
        let owned = common + experts;
        let (own_common, own_experts) = self.shards();
        let replicas = f64::from(self.replicas() * self.parallel.context);
        let spread = |bytes: f64| common * bytes / replicas + experts * bytes / f64::from(self.expert_replicas());
        let layers = f64::from(self.model.layers());
        let (weights, gradients) = match (self.tuned, self.parallel.sharding) {
            (Tuned::Adapters, _) => (owned * 2.0, 0.0),
            (_, Sharding::Nothing | Sharding::Optimizer) => (owned * 2.0, owned * 4.0),
            (_, Sharding::Gradients) => (owned * 2.0, spread(4.0)),
            // Two layers are gathered at a time.
            (_, Sharding::Parameters) => (spread(2.0) + 2.0 * owned / layers * 4.0, spread(4.0)),
        };
        let optimizer = match self.tuned {
            Tuned::All => (own_common + own_experts) * OPTIMIZER_STATE,
            Tuned::Adapters => 0.0,
        };
        let flight = self.in_flight();
        let tokens = self.micro_tokens();
        let tensor = f64::from(self.parallel.tensor);
        let kept: f64 = self
            .model
            .stacks
            .iter()
            .map(|stack| f64::from(stack.layers) * self.kept_by(stack))
            .sum();
        let inputs = 2.0 * f64::from(self.model.hidden) * layers;
        let last = if self.parallel.pipeline == 1 { 6.0 } else { 3.0 };
        StepMemory {
            capacity: system.gpu.memory.0 as f64,
            weights,
            gradients,
            optimizer,
            activations: kept * KEPT * tokens / tensor * flight,
            scores: tokens * f64::from(self.model.vocabulary) / tensor * last,
            least_activations: inputs * tokens / tensor * flight,
        }
    }

    /// Microbatches whose activations a GPU of the first stage holds, as a share of all layers.
    fn in_flight(&self) -> f64 {
        let (pipeline, chunks) = (f64::from(self.parallel.pipeline), f64::from(self.parallel.chunks));
        if self.parallel.pipeline == 1 {
            return 1.0;
        }
        self.microbatches().min(pipeline) * (1.0 + (pipeline - 1.0) / (pipeline * chunks)) / pipeline
    }

    /// Bytes that one token leaves in one layer, on all GPUs of a tensor-parallel group together.
    fn kept_by(&self, stack: &Stack) -> f64 {
        let operand = if self.recipe.rounds() { 1.25 } else { 2.0 };
        let hidden = f64::from(self.model.hidden);
        let mut bytes = 0.0;
        if let Some(mixer) = &stack.mixer {
            let wide = mixer.width();
            let heads = match *mixer {
                Mixer::Attention { kv_heads, head, .. } => {
                    2.0 * (wide + 2.0 * f64::from(kv_heads) * f64::from(head)) + 2.0 * wide
                }
                _ => 6.0 * wide,
            };
            bytes += (2.0 + operand) * hidden + operand * wide + heads;
        }
        match &stack.feed {
            Some(Feed::Dense { inner, gated }) => {
                bytes += (2.0 + operand) * hidden + inner_kept(*inner, *gated, operand)
            }
            Some(Feed::Experts(experts)) => {
                let each = (2.0 + operand) * experts.width(hidden) + inner_kept(experts.inner, experts.gated, operand);
                bytes += 2.0 * hidden + f64::from(experts.chosen) * each;
                bytes += operand * hidden + inner_kept(experts.shared, experts.gated, operand);
            }
            None => {}
        }
        bytes
    }
}

fn inner_kept(inner: u32, gated: bool, operand: f64) -> f64 {
    f64::from(inner) * (operand + if gated { 4.0 } else { 2.0 })
}
