//! Published steps as jobs: what a row of a table says about a run, and what it leaves to be assumed.
//!
//! Two tables are known: `training_steps`, rows of papers and benchmark guides, and `megatron_bridge_perf`, NVIDIA's own table of Megatron-Bridge. What a row does
//! not say is assumed alike for all rows: microbatches of one sequence in pipelines and of up to four without, chunks of two layers, and
//! recomputation as memory demands.

use thiserror::Error;

use super::{Parallel, Recomputation, Sharding, Software, TrainingBatch, TrainingJob, Tuned};
use crate::roofline::{Recipe, RooflineError};
use crate::system::{Generation, System};
use crate::workload::model::{Feed, Model, ModelError};

/// A run that somebody published.
#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    pub job: TrainingJob,
    /// Of a step, as measured, or as follows from the rate that is given.
    pub seconds: f64,
}

/// The cells of a row by the names of their columns; `None` where there is nothing.
pub type Cells<'a> = dyn Fn(&str) -> Option<&'a str> + 'a;

/// Why a row is not a run.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PublishedError {
    #[error("nothing in column `{column}`")]
    Nothing { column: &'static str },
    #[error("the row has neither a time nor a rate")]
    NoMeasurement,
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Recipe(#[from] RooflineError),
}

impl Published {
    /// A row of `training_steps`.
    pub fn training_step(cells: &Cells<'_>, system: &System) -> Result<Published, PublishedError> {
        let name = text(cells, "model")?;
        let notes = cells("recompute_or_notes").unwrap_or_default();
        let source = text(cells, "source_id")?;
        let mut job = TrainingJob::new(
            Model::named(name)?,
            count(cells, "ngpus")?,
            text(cells, "precision")?.parse()?,
        );
        if let Some(vocabulary) = cells("source").and_then(vocabulary) {
            job.model.vocabulary = vocabulary;
        }
        job.software = software_of(source, notes, system);
        job.batch = TrainingBatch {
            sequences: count(cells, "GBS")?,
            micro: 0,
            tokens: count(cells, "seq")?,
        };
        divide(cells, &mut job);
        if name.contains("FSDP") {
            job.parallel.sharding = Sharding::Parameters;
        }
        let Parallel { tensor, expert, .. } = job.parallel;
        let stage = job.gpus / job.parallel.pipeline.max(1);
        if expert > 1 && u64::from(stage).is_multiple_of(u64::from(tensor) * u64::from(expert)) {
            // Experts are divided as other matrices are, where there are GPUs enough.
            job.parallel.expert_tensor = tensor;
        }
        job.recompute = match () {
            () if notes.contains("full recompute") => Recomputation::Full,
            () if notes.contains("selective") || job.software.gradient_bytes > 2.0 => Recomputation::Selective,
            () => Recomputation::AsNeeded,
        };
        let seconds = measured_seconds(cells, &job, notes, system)?;
        Ok(Published { job, seconds })
    }

    /// A row of `megatron_bridge_perf`. Where a cell holds two values, one in brackets, the first is meant, with the first precision.
    pub fn megatron_bridge(cells: &Cells<'_>) -> Result<Published, PublishedError> {
        let name = text(cells, "model")?;
        let mut model = Model::named(name)?;
        if name.contains("w/o MTP") {
            model.predictors = 0;
        }
        let experts = model
            .stacks
            .iter()
            .any(|stack| matches!(stack.feed, Some(Feed::Experts(_))));
        let recipe = match cells("precision").and_then(|cell| cell.split_whitespace().next()) {
            Some(recipe) => recipe.parse()?,
            // The oldest table names no precision: its dense models were in FP8, the others in BF16.
            None if experts => Recipe::Bf16,
            None => Recipe::Fp8,
        };
        let mut job = TrainingJob::new(model, count(cells, "ngpus")?, recipe);
        let container = cells("container").unwrap_or_default();
        job.software = match container {
            container if container >= "26.06" => Software::MEGATRON_26_06,
            container if container >= "26.04" => Software::MEGATRON_26_04,
            _ => Software::NEMO_2025,
        };
        job.batch = TrainingBatch {
            sequences: count(cells, "GBS")?,
            micro: 0,
            tokens: count(cells, "seq")?,
        };
        divide(cells, &mut job);
        if cells("VP").and_then(leading).is_none() {
            job.parallel.chunks = 1;
        }
        if cells("FSDP").and_then(leading).is_some_and(|ranks| ranks > 0.0) {
            job.parallel.sharding = Sharding::Parameters;
        }
        if cells("section").is_some_and(|section| section.contains("LoRA")) {
            job.tuned = Tuned::Adapters;
        }
        let tokens = f64::from(job.batch.sequences) * f64::from(job.batch.tokens);
        let rate = cells("tokens_per_s_per_gpu")
            .and_then(leading)
            .filter(|rate| *rate > 0.0);
        let rate = rate.ok_or(PublishedError::NoMeasurement)?;
        let seconds = tokens / (f64::from(job.gpus) * rate);
        Ok(Published { job, seconds })
    }
}

/// What ran, by who published it.
fn software_of(source: &str, notes: &str, system: &System) -> Software {
    let is = |names: &[&str]| names.iter().any(|name| source.contains(name));
    let mut software = match () {
        () if is(&["sc21", "mt_nlg", "mtnlg", "mt-nlg"]) => Software::MEGATRON_2021,
        () if is(&["seqsel"]) => Software::MEGATRON_2022,
        () if is(&["megascale", "mcore", "llama3", "llama_3"]) => Software::MEGATRON_2024,
        () => Software::NEMO_2025,
    };
    if notes == "Megatron-LM" {
        software.reached = Software::UNTUNED;
    }
    if software == Software::NEMO_2025 && system.gpu.generation == Generation::Blackwell {
        software.reached = Software::EARLY;
    }
    if notes.contains("no SP") {
        software.sequence_parallel = false;
    }
    software
}

/// Reads how the job is divided, and assumes what is not said.
fn divide(cells: &Cells<'_>, job: &mut TrainingJob) {
    let number = |column: &str| cells(column).and_then(leading).filter(|n| *n >= 1.0).map(|n| n as u32);
    job.parallel = Parallel {
        tensor: number("TP").unwrap_or(1),
        pipeline: number("PP").unwrap_or(1),
        context: number("CP").unwrap_or(1),
        expert: number("EP").unwrap_or(1),
        ..Parallel::default()
    };
    let layers = job.model.layers();
    let pipeline = job.parallel.pipeline;
    job.parallel.chunks = match (pipeline, number("VP")) {
        (1, _) => 1,
        (_, Some(chunks)) => chunks,
        (_, None) if !layers.is_multiple_of(pipeline) => 1,
        (_, None) => match layers / pipeline {
            each if each.is_multiple_of(2) => (each / 2).max(1),
            each => each.max(1),
        },
    };
    let each = (job.batch.sequences / job.replicas().max(1)).max(1);
    job.batch.micro = number("MBS").unwrap_or(if pipeline == 1 { each.min(4) } else { 1 });
}

/// The time of a step that the row gives, or that follows from its rate by the convention of who published it.
fn measured_seconds(cells: &Cells<'_>, job: &TrainingJob, notes: &str, system: &System) -> Result<f64, PublishedError> {
    let number = |column: &str| cells(column).and_then(leading).filter(|n| *n > 0.0);
    if let Some(seconds) = number("step_time_s") {
        return Ok(seconds);
    }
    let tokens = f64::from(job.batch.sequences) * f64::from(job.batch.tokens);
    let forward = job.model.forward_operations(job.batch.tokens, false);
    let output = 2.0 * job.model.embedding_parameters();
    // Megatron counts attention as if it were not causal; its papers up to 2021 count what is computed again, but not the output.
    let passes = if notes.contains("counts recompute") { 4.0 } else { 3.0 };
    let operations = tokens * (passes * (forward - output) + 3.0 * output);
    let rate = match (number("tflops_per_gpu"), number("mfu_pct")) {
        (Some(tflops), _) => tflops * 1e12,
        (None, Some(percent)) => {
            let peak = system.gpu.flops(job.recipe.precision());
            percent / 100.0 * peak.ok_or(RooflineError::NoUnits(job.recipe))?
        }
        (None, None) => return Err(PublishedError::NoMeasurement),
    };
    Ok(operations / (rate * f64::from(job.gpus)))
}

fn text<'a>(cells: &Cells<'a>, column: &'static str) -> Result<&'a str, PublishedError> {
    cells(column).ok_or(PublishedError::Nothing { column })
}

fn count(cells: &Cells<'_>, column: &'static str) -> Result<u32, PublishedError> {
    let number = cells(column).and_then(leading).filter(|n| (1.0..=1e9).contains(n));
    number.map(|n| n as u32).ok_or(PublishedError::Nothing { column })
}

/// The number that a cell begins with: `64 (0)` is 64, `8;16` is 8, `n/a` is none.
fn leading(cell: &str) -> Option<f64> {
    let end = cell
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(cell.len());
    cell[..end].parse().ok()
}

/// `… vocab 131072)`: what the source says of the vocabulary.
fn vocabulary(source: &str) -> Option<u32> {
    let (_, rest) = source.split_once("vocab ")?;
    leading(rest).filter(|n| (1.0..=1e7).contains(n)).map(|n| n as u32)
}
