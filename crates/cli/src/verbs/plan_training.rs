//! `weft plan-training`: how to divide a model among GPUs, what a step would take, and why not otherwise.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use console::style;
use serde::Serialize;
use weft_model::roofline::Recipe;
use weft_model::system::System;
use weft_model::workload::goodput::{FailureRates, Goodput};
use weft_model::workload::model::Model;
use weft_model::workload::training::search::{Alternative, Plan, TrainingSearch, alternatives, search};
use weft_model::workload::training::{Parallel, TrainingBatch, TrainingJob, TrainingStep};

use crate::complaint::{Complain, Complaint, Exit};
use crate::system::SystemChoice;
use crate::table::{Align, Table};

/// A step in which a GPU sees fewer tokens is not what anybody trains with.
const TOKENS_PER_GPU: u64 = 16_384;

/// Search the parallelism for a model on a system of GPUs, and print the best few with reasons
///
/// Looks at tensor, pipeline (with interleaving), context, expert and fully sharded data parallelism and at the size of microbatches; what does not fit
/// into memory is computed again in the backward pass as far as must be, or left out.
#[derive(Debug, Args)]
pub struct PlanTraining {
    /// The model: a name (`weft list models`, or `GPT h12288 L96`) or the file of one
    model: String,
    #[command(flatten)]
    system: SystemChoice,
    /// How many GPUs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    gpus: u32,
    /// What operands of products are rounded to: bf16, fp16, fp8, mxfp8 or nvfp4
    #[arg(long, value_name = "RECIPE", default_value = "bf16")]
    precision: Recipe,
    /// Tokens of a sequence
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    tokens: u32,
    /// Sequences of a step; where nothing is said, about 16 Ki tokens a GPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    batch: Option<u32>,
    /// How many plans to print
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    best: u32,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
}

impl PlanTraining {
    pub fn run(self) -> Result<(), Complaint> {
        let system = self.system.read()?;
        let model = self.model()?;
        let mut job = TrainingJob::new(model, self.gpus, self.precision);
        job.batch = TrainingBatch {
            sequences: self.batch.unwrap_or_else(|| sequences(self.gpus, self.tokens)),
            micro: 1,
            tokens: self.tokens,
        };
        let found = search(&job, &system, self.best as usize)
            .or_complain(Exit::Usage, || format!("{} cannot be trained so.", job.model.name))?;
        let Some(first) = found.plans.first() else {
            return Err(nothing_fits(&job, &found));
        };
        let others = alternatives(&job, &system, first);
        let faults = FailureRates {
            gpus: self.gpus,
            machine: system.node.gpus,
            ..FailureRates::default()
        };
        let out = match self.json {
            true => json(&job, &system, &found, &others, &faults.goodput())?,
            false => tables(&job, &system, &found, &others, &faults.goodput()),
        };
        crate::out::print_whole(out.as_bytes())
    }

    fn model(&self) -> Result<Model, Complaint> {
        match file_of(&self.model) {
            Some(path) => Model::from_toml(&read(&path)?)
                .or_complain(Exit::Usage, || format!("{} does not describe a model.", path.display())),
            None => {
                Model::named(&self.model).or_complain(Exit::Usage, || format!("There is no model `{}`.", self.model))
            }
        }
    }
}

fn file_of(name: &str) -> Option<PathBuf> {
    let path = Path::new(name);
    path.is_file().then(|| path.to_owned())
}

fn read(path: &Path) -> Result<String, Complaint> {
    fs::read_to_string(path).or_complain(Exit::Usage, || format!("{} could not be read.", path.display()))
}

/// A power of two of sequences a GPU, or less than one.
fn sequences(gpus: u32, tokens: u32) -> u32 {
    let wanted = (u64::from(gpus) * TOKENS_PER_GPU / u64::from(tokens)).max(1);
    let each = (wanted / u64::from(gpus)).max(1).next_power_of_two();
    u32::try_from(u64::from(gpus) * each).unwrap_or(u32::MAX)
}

fn nothing_fits(job: &TrainingJob, found: &TrainingSearch) -> Complaint {
    let name = &job.model.name;
    let complaint = Complaint::new(Exit::Failed, format!("{name} does not fit onto {} GPUs.", job.gpus));
    match &found.nearest {
        Some(plan) => complaint.try_this(format!(
            "more GPUs, or a smaller batch: {} needs {} of {} on a GPU",
            plan.parallel,
            gigabytes(plan.step.memory.total()),
            gigabytes(plan.step.memory.capacity),
        )),
        None => complaint.try_this("another number of GPUs or sequences: no division is even"),
    }
}

fn tables(
    job: &TrainingJob,
    system: &System,
    found: &TrainingSearch,
    others: &[Alternative],
    goodput: &Goodput,
) -> String {
    let model = &job.model;
    let mut out = format!(
        "{} on {} × {}, {}: {:.0} B parameters ({:.0} B active), {} sequences of {} tokens\n\n",
        style(&model.name).bold(),
        job.gpus,
        system.gpu.name,
        job.recipe,
        model.parameters() / 1e9,
        model.active_parameters() / 1e9,
        job.batch.sequences,
        job.batch.tokens,
    );
    let mut table = Table::new(&[
        ("division", Align::Left),
        ("micro", Align::Right),
        ("step", Align::Right),
        ("tokens/s/GPU", Align::Right),
        ("TFLOP/s/GPU", Align::Right),
        ("MFU", Align::Right),
        ("memory", Align::Right),
        ("again", Align::Right),
        ("most lost to", Align::Left),
    ]);
    for plan in &found.plans {
        let step = &plan.step;
        table.row(vec![
            plan.parallel.to_string(),
            plan.batch.micro.to_string(),
            format!("{:.3} s", step.seconds),
            format!("{:.0}", step.tokens_per_second_per_gpu),
            format!("{:.0}", step.tflops_per_gpu),
            format!("{:.1} %", step.utilization * 100.0),
            gigabytes(step.memory.total()),
            format!("{:.0} %", step.recomputed * 100.0),
            lost(step),
        ]);
    }
    out.push_str(&table.render());
    let (looked_at, fitting) = (found.looked_at, found.fitting);
    out.push_str(&format!(
        "\n{looked_at} divisions were looked at, of which {fitting} fit. The first, with one thing changed:\n\n"
    ));
    let mut table = Table::new(&[("change", Align::Left), ("effect", Align::Left)]);
    for other in others {
        table.row(vec![other.change.clone(), effect(&found.plans[0], other)]);
    }
    out.push_str(&table.render());
    out.push_str(&format!(
        "\nA failure every {:.1} h; with a checkpoint every {:.0} min, {:.1} % of the time is progress.\n",
        goodput.mtbf / 3600.0,
        goodput.interval / 60.0,
        goodput.share * 100.0,
    ));
    out
}

fn lost(step: &TrainingStep) -> String {
    match step.bottleneck() {
        Some(part) => format!("{part}, {:.0} %", step.part(part) / step.seconds * 100.0),
        None => String::new(),
    }
}

fn effect(first: &Plan, other: &Alternative) -> String {
    let memory = &other.step.memory;
    if !memory.fits() {
        return format!(
            "does not fit: {} of {}",
            gigabytes(memory.total()),
            gigabytes(memory.capacity)
        );
    }
    let longer = (other.step.seconds / first.step.seconds - 1.0) * 100.0;
    let most = other
        .step
        .parts
        .iter()
        .map(|(part, time)| (*part, time - first.step.part(*part)));
    match most.max_by(|a, b| a.1.total_cmp(&b.1)) {
        Some((part, more)) if more > 0.0 => format!("{longer:+.1} %, mostly {part}"),
        _ => format!("{longer:+.1} %"),
    }
}

fn gigabytes(bytes: f64) -> String {
    format!("{:.0} GB", bytes / 1e9)
}

fn json(
    job: &TrainingJob,
    system: &System,
    found: &TrainingSearch,
    others: &[Alternative],
    goodput: &Goodput,
) -> Result<String, Complaint> {
    #[derive(Serialize)]
    struct Document<'a> {
        model: &'a str,
        system: &'a str,
        gpus: u32,
        precision: Recipe,
        looked_at: usize,
        fitting: usize,
        plans: Vec<Entry<'a>>,
        changed: Vec<Changed<'a>>,
        goodput: &'a Goodput,
    }
    #[derive(Serialize)]
    struct Entry<'a> {
        parallel: Parallel,
        batch: TrainingBatch,
        step: &'a TrainingStep,
    }
    #[derive(Serialize)]
    struct Changed<'a> {
        change: &'a str,
        fits: bool,
        seconds: f64,
    }
    let document = Document {
        model: &job.model.name,
        system: &system.name,
        gpus: job.gpus,
        precision: job.recipe,
        looked_at: found.looked_at,
        fitting: found.fitting,
        plans: found
            .plans
            .iter()
            .map(|plan| Entry {
                parallel: plan.parallel,
                batch: plan.batch,
                step: &plan.step,
            })
            .collect(),
        changed: others
            .iter()
            .map(|other| Changed {
                change: &other.change,
                fits: other.step.memory.fits(),
                seconds: other.step.seconds,
            })
            .collect(),
        goodput,
    };
    let mut text = serde_json::to_string_pretty(&document)
        .or_complain(Exit::Failed, || "The result could not be written as JSON.".to_owned())?;
    text.push('\n');
    Ok(text)
}
