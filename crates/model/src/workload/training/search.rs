//! Which division of a model among GPUs is the fastest, and why not another.

use super::{Parallel, Recomputation, Sharding, TrainingBatch, TrainingJob, TrainingStep};
use crate::roofline::Roofline;
use crate::system::System;
use crate::workload::model::{Feed, Mixer};

use super::TrainingError;

/// A division, and what a step takes with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub parallel: Parallel,
    pub batch: TrainingBatch,
    pub step: TrainingStep,
}

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingSearch {
    /// The fastest that fit, fastest first.
    pub plans: Vec<Plan>,
    /// How many divisions were looked at, and how many of them fit.
    pub looked_at: usize,
    pub fitting: usize,
    /// Where none fits: the one that is over by the least.
    pub nearest: Option<Plan>,
}

/// What the fastest plan would be with one thing changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    pub change: String,
    pub step: TrainingStep,
}

/// Larger tensor-parallel groups, or microbatches, than anybody uses.
const MAX_TENSOR: u32 = 64;
const MAX_CONTEXT: u32 = 16;
const MAX_MICRO: u32 = 8;

/// Looks at every division of `job` by powers of two, and by divisors of its layers; what `job.parallel` and `job.batch.micro` say is ignored.
pub fn search(job: &TrainingJob, system: &System, best: usize) -> Result<TrainingSearch, TrainingError> {
    Roofline::of(&system.gpu, job.recipe)?;
    let mut found = TrainingSearch {
        plans: Vec::new(),
        looked_at: 0,
        fitting: 0,
        nearest: None,
    };
    let mut trial = job.clone();
    trial.recompute = Recomputation::AsNeeded;
    for parallel in divisions(job, system) {
        for micro in powers(MAX_MICRO) {
            trial.parallel = parallel;
            trial.batch.micro = micro;
            let each = u64::from(trial.replicas()) * u64::from(micro);
            if each == 0 || !u64::from(job.batch.sequences).is_multiple_of(each) {
                continue;
            }
            // A division that cannot be is no plan; the enumeration is coarser than what can be.
            let Ok(step) = trial.step(system) else { continue };
            found.looked_at += 1;
            let plan = Plan {
                parallel,
                batch: trial.batch,
                step,
            };
            found.take(plan, best);
        }
    }
    Ok(found)
}

/// What each single change to a plan would bring.
pub fn alternatives(job: &TrainingJob, system: &System, plan: &Plan) -> Vec<Alternative> {
    let mut out = Vec::new();
    let mut consider = |change: String, parallel: Parallel, micro: u32| {
        let mut trial = job.clone();
        trial.parallel = parallel;
        trial.batch.micro = micro;
        trial.recompute = Recomputation::AsNeeded;
        let each = u64::from(trial.replicas()) * u64::from(micro);
        if each == 0 || !u64::from(job.batch.sequences).is_multiple_of(each) {
            return;
        }
        if let Ok(step) = trial.step(system) {
            out.push(Alternative { change, step });
        }
    };
    let (parallel, micro) = (plan.parallel, plan.batch.micro);
    type Field = fn(&mut Parallel) -> &mut u32;
    let fields: [(&str, Field); 5] = [
        ("TP", |parallel| &mut parallel.tensor),
        ("PP", |parallel| &mut parallel.pipeline),
        ("chunks", |parallel| &mut parallel.chunks),
        ("CP", |parallel| &mut parallel.context),
        ("EP", |parallel| &mut parallel.expert),
    ];
    let routed = job
        .model
        .stacks
        .iter()
        .any(|stack| matches!(stack.feed, Some(Feed::Experts(_))));
    for (name, field) in fields {
        if name == "EP" && !routed {
            continue;
        }
        let mut changed = parallel;
        let now = *field(&mut changed);
        for other in [now / 2, now.saturating_mul(2)] {
            if other > 0 && other != now {
                *field(&mut changed) = other;
                consider(format!("{name} {other} instead of {now}"), changed, micro);
            }
        }
    }
    for other in [micro / 2, micro * 2] {
        if other > 0 {
            consider(format!("microbatches of {other} instead of {micro}"), parallel, other);
        }
    }
    let (sharding, change) = match parallel.sharding {
        Sharding::Parameters => (Sharding::Optimizer, "parameters not sharded"),
        _ => (Sharding::Parameters, "parameters sharded (FSDP)"),
    };
    consider(change.to_owned(), Parallel { sharding, ..parallel }, micro);
    out
}

impl TrainingSearch {
    fn take(&mut self, plan: Plan, best: usize) {
        if !plan.step.memory.fits() {
            let over = |plan: &Plan| plan.step.memory.total() - plan.step.memory.capacity;
            if self.nearest.as_ref().is_none_or(|nearest| over(&plan) < over(nearest)) {
                self.nearest = Some(plan);
            }
            return;
        }
        self.fitting += 1;
        let at = self
            .plans
            .partition_point(|other| other.step.seconds <= plan.step.seconds);
        if at < best {
            self.plans.insert(at, plan);
            self.plans.truncate(best);
        }
    }
}

/// Every division worth a look.
fn divisions(job: &TrainingJob, system: &System) -> Vec<Parallel> {
    let layers = job.model.layers() + job.model.predictors;
    let heads = job.model.stacks.iter().filter_map(|stack| match stack.mixer {
        Some(Mixer::Attention { heads, .. } | Mixer::Latent { heads, .. }) => Some(heads),
        _ => None,
    });
    let heads = heads.min().unwrap_or(MAX_TENSOR);
    let experts = job.model.stacks.iter().filter_map(|stack| match stack.feed {
        Some(Feed::Experts(experts)) => Some(experts.experts),
        _ => None,
    });
    let experts = experts.min().unwrap_or(1);
    let mut out = Vec::new();
    let tensor_most = MAX_TENSOR.min(system.scale_up.domain).min(heads);
    for tensor in powers(tensor_most) {
        for context in powers(MAX_CONTEXT) {
            for pipeline in 1..=layers.min(job.gpus) {
                let even = layers.is_multiple_of(pipeline) || pipeline.is_power_of_two();
                let each = u64::from(tensor) * u64::from(context) * u64::from(pipeline);
                if !even || !u64::from(job.gpus).is_multiple_of(each) {
                    continue;
                }
                for expert in powers(experts.min(job.gpus / pipeline)) {
                    for chunks in chunks_of(layers, pipeline) {
                        for sharding in [Sharding::Optimizer, Sharding::Parameters] {
                            // Sharded parameters are gathered for every microbatch, which a pipeline multiplies.
                            if sharding == Sharding::Parameters && pipeline > 1 {
                                continue;
                            }
                            out.push(Parallel {
                                tensor,
                                pipeline,
                                chunks,
                                context,
                                expert,
                                expert_tensor: 1,
                                sharding,
                            });
                        }
                    }
                }
            }
        }
    }
    out
}

/// Into how many chunks a stage can be cut, coarsely.
fn chunks_of(layers: u32, pipeline: u32) -> impl Iterator<Item = u32> {
    let each = layers.div_ceil(pipeline);
    (1..=each.min(16)).filter(move |chunks| pipeline > 1 && (each.is_multiple_of(*chunks)) || *chunks == 1)
}

fn powers(most: u32) -> impl Iterator<Item = u32> {
    (0..32).map(|n| 1u32 << n).take_while(move |n| *n <= most)
}
