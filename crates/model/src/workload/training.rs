//! A step of training: how long it takes, what it needs of memory, and what limits it.
//!
//! A [`TrainingJob`] says which model is trained on how many GPUs, how it is divided among them and by which software; [`TrainingJob::step`] gives a [`TrainingStep`] in
//! closed form. GPUs are alike, so one GPU of each kind is looked at and a hundred thousand cost no more than eight. Compute comes from
//! [`roofline`](crate::roofline), communication from [`exchange`], and what software loses beyond both are the constants of [`software`], few and
//! calibrated over all rows of two tables of published steps. `docs/training-model.md` says how well, and what is not modelled.
//!
//! ```
//! use weft_model::roofline::Recipe;
//! use weft_model::system::System;
//! use weft_model::workload::model::Model;
//! use weft_model::workload::training::{TrainingBatch, TrainingJob, Parallel};
//! let job = TrainingJob {
//!     parallel: Parallel { tensor: 8, pipeline: 8, chunks: 8, context: 2, ..Parallel::default() },
//!     batch: TrainingBatch { sequences: 256, micro: 1, tokens: 8192 },
//!     ..TrainingJob::new(Model::named("llama-3.1-405b")?, 512, Recipe::Bf16)
//! };
//! let step = job.step(&System::named("dgx-h100")?)?;
//! // 19.8 s were measured.
//! assert!((18.0..22.0).contains(&step.seconds));
//! assert!(step.memory.fits());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod exchange;
mod layer;
mod memory;
pub mod published;
pub mod search;
pub mod software;

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::roofline::{Recipe, Roofline, RooflineError};
use crate::system::System;
use crate::workload::model::{Feed, Model};

pub use memory::StepMemory;
pub use software::Software;

/// What is trained, on what, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingJob {
    pub model: Model,
    pub gpus: u32,
    pub recipe: Recipe,
    pub parallel: Parallel,
    pub batch: TrainingBatch,
    pub recompute: Recomputation,
    pub tuned: Tuned,
    pub software: Software,
}

/// How a model is divided. What these leave of the GPUs are replicas of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parallel {
    /// GPUs that divide every matrix, and sequences between matrices.
    pub tensor: u32,
    /// Stages of layers.
    pub pipeline: u32,
    /// Parts of a stage that take turns; one is the plain 1F1B schedule.
    pub chunks: u32,
    /// GPUs that divide every sequence.
    pub context: u32,
    /// GPUs that divide the experts of a layer.
    pub expert: u32,
    /// GPUs that divide every expert.
    pub expert_tensor: u32,
    pub sharding: Sharding,
}

/// What replicas divide among themselves instead of all having it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    Nothing,
    /// ZeRO-1: the state of the optimizer.
    #[default]
    Optimizer,
    /// ZeRO-2: gradients too.
    Gradients,
    /// ZeRO-3, FSDP: parameters too; they are gathered for each use.
    Parameters,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingBatch {
    /// Sequences of a step, over all replicas.
    pub sequences: u32,
    /// Sequences that go through a stage together.
    pub micro: u32,
    /// Tokens of a sequence.
    pub tokens: u32,
}

/// Which activations are computed again in the backward pass instead of being kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recomputation {
    /// None that takes a matrix product; norms, activations and the softmax are, which takes next to no time.
    Selective,
    /// Every layer.
    Full,
    /// As many layers as must be for the rest to fit.
    #[default]
    AsNeeded,
}

/// Which parameters are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tuned {
    #[default]
    All,
    /// Small matrices beside the frozen ones (LoRA).
    Adapters,
}

/// What a step takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainingStep {
    pub seconds: f64,
    /// Where the time goes, in seconds of one GPU; their sum is `seconds`.
    pub parts: Vec<(StepPart, f64)>,
    pub memory: StepMemory,
    /// The share of the layers that is computed again.
    pub recomputed: f64,
    pub tokens_per_second_per_gpu: f64,
    /// Operations that the model needs, recomputation not counted and attention counted where it is causal, a second and GPU.
    pub tflops_per_gpu: f64,
    /// `tflops_per_gpu` over the peak of the recipe.
    pub utilization: f64,
}

/// What time is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StepPart {
    /// Products with weights that every token meets.
    Products,
    /// Rounding to fewer bits.
    Rounding,
    /// Attention, or the state that stands in its place.
    Mixing,
    /// Norms, residuals, activations: what streams through memory.
    Streaming,
    /// The products of routed experts, and sorting tokens by expert.
    Experts,
    /// Launching the kernels of experts.
    Launches,
    /// Tokens on their way to experts and back.
    Dispatch,
    /// Gathering and scattering within tensor-parallel groups.
    Tensor,
    /// Keys and values within context-parallel groups.
    Context,
    Recomputing,
    /// The output projection and the loss.
    Output,
    /// Stages that wait for the first microbatch or the last.
    Bubble,
    /// Stages that have less to do than the slowest.
    Imbalance,
    /// Activations on their way between stages.
    Handover,
    /// Gradients and parameters between replicas, as far as compute does not hide it.
    Replicas,
    Optimizer,
    /// What a step takes however small it is.
    Fixed,
}

/// Why a job cannot be.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum TrainingError {
    #[error("{what} is zero")]
    Zero { what: &'static str },
    #[error("{gpus} GPUs are not a multiple of {each}: tensor × pipeline × context")]
    Gpus { gpus: u32, each: u64 },
    #[error("{what}: {whole} is not a multiple of {part}")]
    Indivisible { what: &'static str, whole: u64, part: u64 },
    #[error("{pipeline} stages of {chunks} chunks for {layers} layers")]
    TooManyStages { pipeline: u32, chunks: u32, layers: u32 },
    #[error(transparent)]
    Roofline(#[from] RooflineError),
}

impl TrainingJob {
    /// A job that is not divided, of one sequence a GPU.
    pub fn new(model: Model, gpus: u32, recipe: Recipe) -> TrainingJob {
        TrainingJob {
            model,
            gpus,
            recipe,
            parallel: Parallel::default(),
            batch: TrainingBatch {
                sequences: gpus,
                micro: 1,
                tokens: 4096,
            },
            recompute: Recomputation::default(),
            tuned: Tuned::default(),
            software: Software::default(),
        }
    }

    /// Predicts one step on a system.
    pub fn step(&self, system: &System) -> Result<TrainingStep, TrainingError> {
        self.validate()?;
        let roofline = Roofline::of(&system.gpu, self.recipe)?.scaled(self.software.reached);
        let memory = self.memory(system);
        let recomputed = match self.recompute {
            Recomputation::Selective => 0.0,
            Recomputation::Full => 1.0,
            Recomputation::AsNeeded => memory.must_recompute(),
        };
        let memory = memory.recomputing(recomputed);
        let micro = layer::Microbatch::of(self, system, &roofline, recomputed);
        let mut parts = micro.parts();
        let (pipeline, chunks) = (f64::from(self.parallel.pipeline), f64::from(self.parallel.chunks));
        let count = self.microbatches();

        let slowest = self.slowest_stage(&micro);
        for (_, time) in &mut parts {
            *time *= count / pipeline;
        }
        let mean = (micro.layers() + micro.output()) / pipeline;
        parts.push((StepPart::Imbalance, count * (slowest - mean)));
        parts.push((StepPart::Bubble, (pipeline - 1.0) / chunks * slowest));
        if pipeline > 1.0 {
            parts.push((StepPart::Handover, count * chunks * exchange::handover(self, system)));
        }
        if self.tuned == Tuned::All {
            parts.push((StepPart::Replicas, exchange::replicas(self, system, slowest)));
            let (common, experts) = self.shards();
            let state = (common + experts) * software::OPTIMIZER_BYTES;
            parts.push((StepPart::Optimizer, roofline.stream(state)));
        }
        let busy: f64 = parts.iter().map(|(_, time)| time).sum();
        parts.push((StepPart::Fixed, software::FIXED + busy * software::JITTER));
        let seconds: f64 = parts.iter().map(|(_, time)| time).sum();
        parts.retain(|(_, time)| *time > 0.0);

        let tokens = f64::from(self.batch.sequences) * f64::from(self.batch.tokens);
        let operations = self.operations();
        let flops = operations / seconds / f64::from(self.gpus);
        let peak = system.gpu.flops(self.recipe.precision()).unwrap_or(f64::INFINITY);
        Ok(TrainingStep {
            seconds,
            parts,
            memory,
            recomputed,
            tokens_per_second_per_gpu: tokens / seconds / f64::from(self.gpus),
            tflops_per_gpu: flops / 1e12,
            utilization: flops / peak,
        })
    }

    /// Operations of a step that the model asks for: a backward pass is two forward ones.
    pub fn operations(&self) -> f64 {
        let tokens = f64::from(self.batch.sequences) * f64::from(self.batch.tokens);
        let passes = match self.tuned {
            Tuned::All => 3.0,
            Tuned::Adapters => 2.0,
        };
        passes * tokens * self.model.forward_operations(self.batch.tokens, true)
    }

    /// Replicas of the data.
    pub fn replicas(&self) -> u32 {
        self.gpus / (self.parallel.tensor * self.parallel.pipeline * self.parallel.context).max(1)
    }

    /// Replicas of the routed experts.
    pub fn expert_replicas(&self) -> u32 {
        let Parallel {
            pipeline,
            expert,
            expert_tensor,
            ..
        } = self.parallel;
        if expert > 1 {
            (self.gpus / (pipeline * expert * expert_tensor).max(1)).max(1)
        } else {
            self.replicas() * self.parallel.context
        }
    }

    /// Microbatches of a replica in a step.
    pub fn microbatches(&self) -> f64 {
        let each = f64::from(self.replicas()) * f64::from(self.batch.micro);
        (f64::from(self.batch.sequences) / each).max(1.0)
    }

    /// Tokens of a microbatch that one context-parallel rank has.
    pub(crate) fn micro_tokens(&self) -> f64 {
        f64::from(self.batch.micro) * f64::from(self.batch.tokens) / f64::from(self.parallel.context)
    }

    /// Parameters that one GPU has: those that every token meets, and those of routed experts.
    pub(crate) fn owned(&self) -> (f64, f64) {
        let hidden = f64::from(self.model.hidden);
        let routed: f64 = self
            .model
            .stacks
            .iter()
            .map(|stack| f64::from(stack.layers) * stack.expert_parameters(hidden))
            .sum();
        let Parallel {
            tensor,
            pipeline,
            expert,
            expert_tensor,
            ..
        } = self.parallel;
        let common = (self.model.parameters() - routed) / f64::from(tensor * pipeline);
        let divided = if expert > 1 { expert * expert_tensor } else { tensor };
        (common, routed / (f64::from(pipeline) * f64::from(divided)))
    }

    /// Parameters whose optimizer state one GPU has.
    pub(crate) fn shards(&self) -> (f64, f64) {
        let (common, experts) = self.owned();
        if self.parallel.sharding == Sharding::Nothing || !self.software.sharded_optimizer {
            return (common, experts);
        }
        let replicas = f64::from(self.replicas() * self.parallel.context);
        (common / replicas, experts / f64::from(self.expert_replicas()))
    }

    /// The time of a microbatch in the stage that has most to do. Layers and the output projection are spread as evenly as whole layers
    /// allow.
    fn slowest_stage(&self, micro: &layer::Microbatch) -> f64 {
        let (layers, output) = (micro.layers(), micro.output());
        let Parallel { pipeline, chunks, .. } = self.parallel;
        if pipeline == 1 {
            return layers + output;
        }
        let count = self.model.layers() + self.model.predictors;
        let most = f64::from(count.div_ceil(pipeline * chunks) * chunks);
        let stages = f64::from(pipeline);
        let last = if count.is_multiple_of(pipeline) {
            output * software::OUTPUT_ON_TOP
        } else {
            0.0
        };
        ((layers + output) / stages)
            .max(most * layers / f64::from(count))
            .max(layers / stages + last)
    }

    fn validate(&self) -> Result<(), TrainingError> {
        let parallel = &self.parallel;
        for (what, value) in [
            ("the number of GPUs", self.gpus),
            ("tensor", parallel.tensor),
            ("pipeline", parallel.pipeline),
            ("chunks", parallel.chunks),
            ("context", parallel.context),
            ("expert", parallel.expert),
            ("expert_tensor", parallel.expert_tensor),
            ("sequences", self.batch.sequences),
            ("micro", self.batch.micro),
            ("tokens", self.batch.tokens),
        ] {
            if value == 0 {
                return Err(TrainingError::Zero { what });
            }
        }
        let each = u64::from(parallel.tensor) * u64::from(parallel.pipeline) * u64::from(parallel.context);
        if !u64::from(self.gpus).is_multiple_of(each) {
            return Err(TrainingError::Gpus { gpus: self.gpus, each });
        }
        let (pipeline, chunks, layers) = (parallel.pipeline, parallel.chunks, self.model.layers());
        if u64::from(pipeline) * u64::from(chunks) > u64::from(layers) + 2 {
            return Err(TrainingError::TooManyStages {
                pipeline,
                chunks,
                layers,
            });
        }
        let divisible = |what, whole: u64, part: u64| {
            if whole.is_multiple_of(part) {
                return Ok(());
            }
            Err(TrainingError::Indivisible { what, whole, part })
        };
        let stage = u64::from(self.gpus / pipeline);
        let experts = u64::from(parallel.expert) * u64::from(parallel.expert_tensor);
        divisible("GPUs of a stage and those of an expert group", stage, experts)?;
        for stack in &self.model.stacks {
            if let Some(Feed::Experts(experts)) = stack.feed {
                divisible("experts", u64::from(experts.experts), u64::from(parallel.expert))?;
            }
        }
        Ok(())
    }
}

impl TrainingStep {
    /// What takes the most time beside the products that the model asks for.
    pub fn bottleneck(&self) -> Option<StepPart> {
        let useful = [
            StepPart::Products,
            StepPart::Mixing,
            StepPart::Output,
            StepPart::Experts,
        ];
        let rest = self.parts.iter().filter(|(part, _)| !useful.contains(part));
        rest.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(part, _)| *part)
    }

    /// The time of one part.
    pub fn part(&self, wanted: StepPart) -> f64 {
        self.parts
            .iter()
            .filter(|(part, _)| *part == wanted)
            .map(|(_, time)| time)
            .sum()
    }
}

impl Default for Parallel {
    fn default() -> Parallel {
        Parallel {
            tensor: 1,
            pipeline: 1,
            chunks: 1,
            context: 1,
            expert: 1,
            expert_tensor: 1,
            sharding: Sharding::default(),
        }
    }
}

impl fmt::Display for Parallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TP{} PP{}", self.tensor, self.pipeline)?;
        if self.chunks > 1 {
            write!(f, "×{}", self.chunks)?;
        }
        write!(f, " CP{}", self.context)?;
        if self.expert > 1 {
            write!(f, " EP{}", self.expert)?;
        }
        if self.sharding == Sharding::Parameters {
            write!(f, " FSDP")?;
        }
        Ok(())
    }
}

impl StepPart {
    pub fn name(self) -> &'static str {
        match self {
            StepPart::Products => "products",
            StepPart::Rounding => "rounding",
            StepPart::Mixing => "mixing",
            StepPart::Streaming => "streaming",
            StepPart::Experts => "experts",
            StepPart::Launches => "launches",
            StepPart::Dispatch => "dispatch",
            StepPart::Tensor => "tensor",
            StepPart::Context => "context",
            StepPart::Recomputing => "recomputing",
            StepPart::Output => "output",
            StepPart::Bubble => "bubble",
            StepPart::Imbalance => "imbalance",
            StepPart::Handover => "handover",
            StepPart::Replicas => "replicas",
            StepPart::Optimizer => "optimizer",
            StepPart::Fixed => "fixed",
        }
    }
}

impl fmt::Display for StepPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
