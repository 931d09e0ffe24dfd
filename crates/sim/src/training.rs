//! A step of training over time: the closed form of `model`, laid out stage by stage as the schedule of its pipeline has it.
//!
//! How long everything takes is what [`TrainingJob::step`] says; nothing is added here but when each stage does what. Stages are alike, and each is as slow
//! as the slowest. The layout of the pipeline is stretched onto the closed form, which treats the filling of the pipeline more simply.

mod pipeline;

use serde::{Deserialize, Serialize};
use weft_model::roofline::Recipe;
use weft_model::system::System;
use weft_model::workload::model::{Model, ModelError};
use weft_model::workload::training::search::search;
use weft_model::workload::training::{
    Parallel, Recomputation, StepPart, TrainingBatch, TrainingError, TrainingJob, TrainingStep,
};
use weft_plan::Picos;

/// What is trained, as `weft plan-training` is told it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingChoice {
    /// A name that the catalogue knows.
    pub model: String,
    /// All that the system has where nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u32>,
    #[serde(default = "bf16")]
    pub precision: Recipe,
    /// The fastest that fits where nothing is said; then the size of microbatches is chosen too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel: Option<Parallel>,
    pub batch: TrainingBatch,
    #[serde(default)]
    pub recompute: Recomputation,
}

fn bf16() -> Recipe {
    Recipe::Bf16
}

/// A step, how the model was divided, and who did what when.
#[derive(Clone, Debug, PartialEq)]
pub struct Trained {
    pub step: TrainingStep,
    pub parallel: Parallel,
    pub batch: TrainingBatch,
    /// Of each stage in the order of time; none where they would be too many.
    pub spans: Vec<StageSpan>,
}

/// What the GPUs of a stage do for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageSpan {
    pub stage: u32,
    pub doing: Doing,
    /// Which, where it is about one.
    pub microbatch: Option<u32>,
    pub chunk: u32,
    pub begin: Picos,
    pub end: Picos,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Doing {
    Forward,
    /// Recomputation included.
    Backward,
    /// Exchanges within a layer that compute does not hide: tensor, context and expert parallelism.
    Exchange,
    /// Activations or their gradients on their way to the next stage.
    Handover,
    /// Gradients and parameters between replicas, as far as compute does not hide it.
    Replicas,
    Optimizer,
    /// What a step takes however small it is, and jitter.
    Fixed,
}

/// Why a step cannot be told.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TrainingRefused {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Training(#[from] TrainingError),
    #[error("no division of the model fits onto {gpus} GPUs")]
    NothingFits { gpus: u32 },
}

impl TrainingChoice {
    /// The job, divided; `room` GPUs are there.
    pub fn job(&self, system: &System, room: u32) -> Result<TrainingJob, TrainingRefused> {
        let gpus = self.gpus.unwrap_or(room);
        let mut job = TrainingJob {
            batch: self.batch,
            recompute: self.recompute,
            ..TrainingJob::new(Model::named(&self.model)?, gpus, self.precision)
        };
        match self.parallel {
            Some(parallel) => job.parallel = parallel,
            None => {
                let found = search(&job, system, 1)?;
                let plan = found.plans.first().ok_or(TrainingRefused::NothingFits { gpus })?;
                (job.parallel, job.batch) = (plan.parallel, plan.batch);
            }
        }
        Ok(job)
    }
}

/// Tells a step, and lays it out.
pub fn train(job: &TrainingJob, system: &System) -> Result<Trained, TrainingRefused> {
    let step = job.step(system)?;
    Ok(Trained {
        spans: spans(job, &step),
        step,
        parallel: job.parallel,
        batch: job.batch,
    })
}

/// Everything that happens, a stage after the other.
fn spans(job: &TrainingJob, step: &TrainingStep) -> Vec<StageSpan> {
    let part = |part: StepPart| step.part(part);
    let (bubble, handover) = (part(StepPart::Bubble), part(StepPart::Handover));
    let after = [
        (Doing::Replicas, part(StepPart::Replicas)),
        (Doing::Optimizer, part(StepPart::Optimizer)),
        (Doing::Fixed, part(StepPart::Fixed)),
    ];
    let busy = step.seconds - bubble - handover - after.iter().map(|(_, time)| time).sum::<f64>();
    let exchange = part(StepPart::Tensor) + part(StepPart::Context) + part(StepPart::Dispatch);
    let again = part(StepPart::Recomputing);
    // A backward pass is two forward ones, and what is computed again is computed in it.
    let forward = (busy - again) / 3.0;
    let shape = pipeline::Shape {
        stages: job.parallel.pipeline,
        chunks: job.parallel.chunks,
        microbatches: job.microbatches().round().clamp(1.0, f64::from(u32::MAX)) as u32,
    };
    let Some(units) = shape.units() else {
        return Vec::new();
    };
    let each = |seconds: f64| seconds / units;
    let hands_over = each(handover / 2.0);
    let lengths = pipeline::Lengths {
        forward: each(forward) + hands_over,
        backward: each(busy - forward) + hands_over,
    };
    let turns = shape.turns(lengths);
    let laid_out = turns.iter().map(|turn| turn.end).fold(0.0, f64::max);
    let whole = busy + bubble + handover;
    let stretch = if laid_out > 0.0 { whole / laid_out } else { 0.0 };
    let time = |seconds: f64| Picos::from_ps((seconds * 1e12).round() as u64);
    let exchanged = if busy > 0.0 { exchange / busy } else { 0.0 };
    let mut spans = Vec::with_capacity(turns.len() * 3);
    for turn in turns {
        let length = turn.end - turn.begin;
        let passed = length - hands_over;
        let parts = [
            (turn.doing, passed * (1.0 - exchanged)),
            (Doing::Exchange, passed * exchanged),
            (Doing::Handover, hands_over),
        ];
        let mut begin = turn.begin;
        for (doing, seconds) in parts {
            let end = begin + seconds;
            push(&mut spans, (begin * stretch, end * stretch), |begin, end| StageSpan {
                stage: turn.stage,
                doing,
                microbatch: Some(turn.microbatch),
                chunk: turn.chunk,
                begin: time(begin),
                end: time(end),
            });
            begin = end;
        }
    }
    for stage in 0..shape.stages {
        let mut begin = whole;
        for (doing, seconds) in after {
            push(&mut spans, (begin, begin + seconds), |begin, end| StageSpan {
                stage,
                doing,
                microbatch: None,
                chunk: 0,
                begin: time(begin),
                end: time(end),
            });
            begin += seconds;
        }
    }
    spans.sort_by_key(|span| (span.stage, span.begin));
    spans
}

/// Leaves out what takes no time.
fn push(spans: &mut Vec<StageSpan>, (begin, end): (f64, f64), span: impl FnOnce(f64, f64) -> StageSpan) {
    if end > begin {
        spans.push(span(begin, end));
    }
}

impl Doing {
    pub const ALL: [Doing; 7] = [
        Doing::Forward,
        Doing::Backward,
        Doing::Exchange,
        Doing::Handover,
        Doing::Replicas,
        Doing::Optimizer,
        Doing::Fixed,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Doing::Forward => "forward",
            Doing::Backward => "backward",
            Doing::Exchange => "exchange in layers",
            Doing::Handover => "hand-over",
            Doing::Replicas => "replicas",
            Doing::Optimizer => "optimizer",
            Doing::Fixed => "fixed",
        }
    }
}

#[cfg(test)]
mod tests;
