//! One forward pass of a worker: bytes from memory, operations, exchanges between its GPUs, and what the engine adds.

use super::exchange::Exchange;
use super::{Engine, Quantisation, ServingError, Worker};
use crate::system::{Accelerator, Generation, Precision, System};
use crate::workload::model::{Experts, Feed, Mixer, Model, Stack};

/// What one pass works on, by attention rank: prompts and single further tokens may share it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassBatch {
    /// Tokens of prompts.
    pub prompt_tokens: f64,
    /// How many prompts they belong to.
    pub prompts: f64,
    /// How long those prompts are, the part that earlier passes or a cache have seen included.
    pub prompt_context: f64,
    /// Sequences that get one token each.
    pub sequences: f64,
    /// How many tokens each of them has before it, on average.
    pub context: f64,
}

impl PassBatch {
    pub fn prompts(count: f64, tokens: f64) -> PassBatch {
        PassBatch {
            prompt_tokens: count * tokens,
            prompts: count,
            prompt_context: tokens,
            ..PassBatch::default()
        }
    }

    pub fn sequences(count: f64, context: f64) -> PassBatch {
        PassBatch {
            sequences: count,
            context,
            ..PassBatch::default()
        }
    }
}

/// A worker on a system with a model: all that does not change from pass to pass.
#[derive(Clone, Debug)]
pub struct Pass {
    stacks: Vec<Stack>,
    hidden: f64,
    output: f64,
    worker: Worker,
    quantisation: Quantisation,
    /// Bytes a second that streaming reaches, for weights and for the scattered blocks of a cache.
    weights_rate: f64,
    cache_rate: f64,
    /// Operations a second that products reach, by role.
    attention_rate: f64,
    projection_rate: f64,
    dense_rate: f64,
    expert_rate: f64,
    output_rate: f64,
    exchange: Exchange,
    /// Seconds of each plain layer that are neither bytes nor operations.
    layer: f64,
    step: f64,
    sequence: f64,
    /// What starting a prompt's kernels costs.
    first: f64,
}

// What of the published peaks is reached. Calibrated against `aic_e2e_serving.csv`, one value for all GPUs, engines and models.
const STREAMED: f64 = 0.92;
const CACHE_READ: f64 = 0.69;
const MULTIPLIED: f64 = 0.64;
/// Experts get few rows each, which fill tiles badly.
const GROUPED: f64 = 0.17;
const ATTENDED: f64 = 0.36;
/// Kernels of a layer, relative to one of grouped attention and a dense feed-forward.
const EXPERTS_KERNELS: f64 = 0.50;
const LATENT_KERNELS: f64 = 0.39;
const STATE_KERNELS: f64 = 0.74;
/// How much shorter the fixed part of kernels is on Blackwell than on Hopper.
const BLACKWELL_KERNELS: f64 = 0.82;
/// The fullest of the GPUs that share experts by number, against the average.
const IMBALANCE: f64 = 1.18;

impl Pass {
    pub fn new(
        system: &System,
        model: &Model,
        worker: Worker,
        quantisation: Quantisation,
        engine: Engine,
    ) -> Result<Pass, ServingError> {
        worker.validate(model)?;
        let gpu = &system.gpu;
        let habits = engine.habits();
        let kernels = match gpu.generation {
            Generation::Blackwell | Generation::BlackwellPcie => BLACKWELL_KERNELS,
            _ => 1.0,
        };
        let bandwidth = gpu.memory_bandwidth.bytes_per_sec() as f64;
        Ok(Pass {
            stacks: model.stacks.clone(),
            hidden: f64::from(model.hidden),
            output: f64::from(model.vocabulary) * f64::from(model.hidden),
            worker,
            quantisation,
            weights_rate: STREAMED * bandwidth,
            cache_rate: CACHE_READ * bandwidth,
            attention_rate: ATTENDED * rate(gpu, Precision::Bf16)?,
            projection_rate: MULTIPLIED * rate(gpu, quantisation.attention)?,
            dense_rate: MULTIPLIED * rate(gpu, quantisation.dense)?,
            expert_rate: GROUPED * rate(gpu, quantisation.experts)?,
            output_rate: MULTIPLIED * rate(gpu, Precision::Bf16)?,
            exchange: Exchange::new(system, model, worker, engine)?,
            layer: 1e-6 * habits.layer_us * kernels,
            step: 1e-3 * habits.step_ms,
            sequence: 1e-6 * habits.sequence_us,
            first: 1e-3 * habits.prompt_layer_ms * super::latency::starts(model),
        })
    }

    /// Seconds that the GPUs take for the batch. With a pipeline the batch is cut into as many parts as there are stages, and this is
    /// how long one part takes through all of them.
    pub fn gpu_seconds(&self, batch: &PassBatch) -> f64 {
        let stages = f64::from(self.worker.pipeline);
        let batch = PassBatch {
            prompt_tokens: batch.prompt_tokens / stages,
            prompts: batch.prompts / stages,
            sequences: batch.sequences / stages,
            ..*batch
        };
        let tokens = batch.prompt_tokens + batch.sequences;
        let layers: f64 = self
            .stacks
            .iter()
            .map(|stack| f64::from(stack.layers) * self.layer_seconds(stack, &batch, tokens))
            .sum();
        let tensor = f64::from(self.worker.tensor);
        let output = product(
            self.output / tensor,
            2.0,
            batch.prompts + batch.sequences,
            self.weights_rate,
            self.output_rate,
        );
        let hops = (stages - 1.0) * self.exchange.hop(tokens * self.hidden * 2.0 / tensor);
        layers + output + hops
    }

    /// Seconds of a step of decoding, the host's part included.
    pub fn step_seconds(&self, batch: &PassBatch) -> f64 {
        self.gpu_seconds(batch) + self.step + self.sequence * batch.sequences
    }

    /// Seconds that a prompt takes besides [`Pass::gpu_seconds`]: its kernels are started one by one, and not replayed from a graph.
    pub fn first_token_seconds(&self) -> f64 {
        self.first
    }

    fn layer_seconds(&self, stack: &Stack, batch: &PassBatch, tokens: f64) -> f64 {
        let mut seconds = 0.0;
        let mut kernels = 0.0;
        if let Some(mixer) = &stack.mixer {
            seconds += self.mixer_seconds(mixer, batch, tokens);
            kernels += 0.5;
            kernels += match mixer {
                Mixer::Attention { .. } => 0.0,
                Mixer::Latent { .. } => LATENT_KERNELS,
                Mixer::StateSpace { .. } | Mixer::Delta { .. } => STATE_KERNELS,
            };
            seconds += self.exchange.all_reduce(tokens * self.hidden * 2.0);
        }
        match &stack.feed {
            Some(feed @ Feed::Dense { .. }) => {
                let tensor = f64::from(self.worker.tensor);
                let weight = Quantisation::weight_bytes(self.quantisation.dense);
                let parameters = feed.parameters(self.hidden) / tensor;
                seconds += product(parameters, weight, tokens, self.weights_rate, self.dense_rate);
                seconds += self.exchange.all_reduce(tokens * self.hidden * 2.0);
                kernels += 0.5;
            }
            Some(Feed::Experts(experts)) => {
                seconds += self.experts_seconds(experts, tokens);
                kernels += 0.5 + EXPERTS_KERNELS;
            }
            None => {}
        }
        seconds + kernels * self.layer
    }

    fn mixer_seconds(&self, mixer: &Mixer, batch: &PassBatch, tokens: f64) -> f64 {
        let tensor = f64::from(self.worker.tensor);
        let whole = mixer.parameters(self.hidden);
        let (repeated, cached, divided, score, decode_score) = match *mixer {
            Mixer::Attention {
                heads, kv_heads, head, ..
            } => {
                let score = 4.0 * f64::from(heads) * f64::from(head);
                (
                    0.0,
                    2.0 * f64::from(kv_heads * head),
                    tensor.min(kv_heads.into()),
                    score,
                    score,
                )
            }
            Mixer::Latent {
                heads,
                query_rank,
                kv_rank,
                nope,
                rope,
                value,
            } => {
                // The projections into the narrow spaces, and what is cached, are on every GPU.
                let repeated = self.hidden * f64::from(query_rank + kv_rank + rope);
                let score = 2.0 * f64::from(heads) * f64::from(nope + rope + value);
                // Decoding multiplies in the narrow space itself.
                let decode = 2.0 * f64::from(heads) * f64::from(2 * kv_rank + rope);
                (repeated, f64::from(kv_rank + rope), 1.0, score, decode)
            }
            Mixer::StateSpace { .. } | Mixer::Delta { .. } => (0.0, 0.0, 1.0, 0.0, 0.0),
        };
        let window = match *mixer {
            Mixer::Attention {
                window: Some(window), ..
            } => f64::from(window),
            _ => f64::INFINITY,
        };
        let weight = Quantisation::weight_bytes(self.quantisation.attention);
        let parameters = (whole - repeated) / tensor + repeated;
        let mut seconds = product(parameters, weight, tokens, self.weights_rate, self.projection_rate);
        // A token of a prompt sees half of it on average; one of a later part sees what came before too.
        let part = if batch.prompts > 0.0 {
            batch.prompt_tokens / batch.prompts
        } else {
            0.0
        };
        let seen = (batch.prompt_context - part / 2.0).max(0.0).min(window);
        seconds += score / tensor * batch.prompt_tokens * seen / self.attention_rate;
        let context = batch.context.min(window);
        let bytes = batch.sequences * context * cached * self.quantisation.cache.bytes() / divided;
        let operations = decode_score / tensor * batch.sequences * context;
        seconds += (bytes / self.cache_rate).max(operations / self.attention_rate);
        // A state is read and written once for each sequence.
        let state = 2.0 * 2.0 * state_elements(mixer) / tensor * batch.sequences;
        seconds + state / self.weights_rate
    }

    fn experts_seconds(&self, experts: &Experts, tokens: f64) -> f64 {
        let worker = &self.worker;
        let (tensor, data) = (f64::from(worker.tensor), f64::from(worker.data));
        let ranks = f64::from(worker.expert_tensor) * f64::from(worker.expert);
        let everyone = tokens * data;
        let (number, chosen) = (f64::from(experts.experts), f64::from(experts.chosen));
        let routed = experts.routed_parameters(self.hidden);
        // An expert that no token chose is not read.
        let touched = 1.0 - (1.0 - chosen / number).max(0.0).powf(everyone);
        let bytes = routed / ranks * touched * Quantisation::weight_bytes(self.quantisation.experts);
        let fullest = if worker.expert > 1 { IMBALANCE } else { 1.0 };
        let operations = 2.0 * routed / number * chosen * everyone / ranks * fullest;
        let mut seconds = (bytes / self.weights_rate).max(operations / self.expert_rate);
        let common = experts.common_parameters(self.hidden) / tensor;
        let weight = Quantisation::weight_bytes(self.quantisation.dense);
        seconds += product(common, weight, tokens, self.weights_rate, self.dense_rate);
        seconds += self.exchange.dispatch_and_combine(tokens);
        seconds + self.exchange.all_reduce(tokens * self.hidden * 2.0)
    }
}

/// Elements that a mixer keeps for a sequence whatever its length.
pub(super) fn state_elements(mixer: &Mixer) -> f64 {
    match *mixer {
        Mixer::Attention { .. } | Mixer::Latent { .. } => 0.0,
        Mixer::StateSpace { heads, head, state, .. } => f64::from(heads) * f64::from(head) * f64::from(state),
        Mixer::Delta {
            value_heads,
            key,
            value,
            ..
        } => f64::from(value_heads) * f64::from(key) * f64::from(value),
    }
}

/// A matrix product of `rows` rows: as long as its weights take from memory, or its operations.
fn product(parameters: f64, weight: f64, rows: f64, bytes_rate: f64, operations_rate: f64) -> f64 {
    (parameters * weight / bytes_rate).max(2.0 * parameters * rows / operations_rate)
}

/// Dense peak rate; operands that the GPU has no units for are widened.
fn rate(gpu: &Accelerator, wanted: Precision) -> Result<f64, ServingError> {
    [wanted, Precision::Bf16, Precision::Fp16]
        .into_iter()
        .find_map(|precision| gpu.flops(precision))
        .ok_or_else(|| ServingError::NoUnits {
            gpu: gpu.name.clone(),
            wanted,
        })
}
