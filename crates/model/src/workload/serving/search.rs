//! Trying ways to divide the GPUs against targets.

use super::{Deployment, Engine, Pool, Quantisation, ServingError, ServingEstimate, ServingLoad, Worker};
use crate::system::System;
use crate::workload::model::Model;
use weft_plan::units::Picos;

/// What clients are promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Targets {
    pub first_token: Picos,
    pub per_token: Picos,
}

/// What is searched.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServingSearch {
    pub gpus: u32,
    pub engine: Engine,
    pub quantisation: Quantisation,
    pub input: u32,
    pub output: u32,
    /// Tokens of a prompt that are found in a cache.
    pub cached: u32,
    pub targets: Targets,
    /// How many answers to keep.
    pub keep: usize,
}

/// A deployment, how many requests at a time it takes within the targets, and what they see.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServingCandidate {
    pub deployment: Deployment,
    pub concurrency: u32,
    pub estimate: ServingEstimate,
    /// Tokens of answers a second and GPU.
    pub output_per_gpu: f64,
}

/// More requests at a time than are looked at.
const MAX_CONCURRENCY: u32 = 1 << 16;

/// The deployments that answer the most within the targets, the best first. Empty where none keeps them; an error where none fits.
pub fn search(system: &System, model: &Model, wanted: &ServingSearch) -> Result<Vec<ServingCandidate>, ServingError> {
    let mut found: Vec<ServingCandidate> = Vec::new();
    let mut misfit = None;
    let mut fitting = false;
    for deployment in deployments(system, model, wanted) {
        match most(system, model, &deployment, wanted) {
            Ok(candidate) => {
                fitting = true;
                found.extend(candidate);
            }
            Err(error) => misfit = misfit.or(Some(error)),
        }
    }
    if let (false, Some(error)) = (fitting, misfit) {
        return Err(error);
    }
    found.sort_by(|a, b| {
        b.output_per_gpu
            .total_cmp(&a.output_per_gpu)
            .then(a.deployment.gpus().cmp(&b.deployment.gpus()))
    });
    found.truncate(wanted.keep);
    Ok(found)
}

fn deployments(system: &System, model: &Model, wanted: &ServingSearch) -> Vec<Deployment> {
    let sizes = || {
        (0..12)
            .map(|power| 1u32 << power)
            .take_while(|&size| size <= wanted.gpus)
    };
    let workers: Vec<Worker> = sizes().flat_map(|size| Worker::ways(model, system, size)).collect();
    let whole = |worker: Worker| {
        let count = wanted.gpus / worker.gpus();
        Deployment::aggregated(wanted.engine, wanted.quantisation, worker, count)
    };
    let mut all: Vec<Deployment> = workers.iter().copied().map(whole).collect();
    for &reader in &workers {
        for &writer in &workers {
            all.extend(shares(reader, writer, wanted));
        }
    }
    all
}

/// Some divisions of the GPUs between workers that read prompts and workers that decode.
fn shares(reader: Worker, writer: Worker, wanted: &ServingSearch) -> impl Iterator<Item = Deployment> + use<> {
    let (gpus, engine, quantisation) = (wanted.gpus, wanted.engine, wanted.quantisation);
    let most = gpus.saturating_sub(writer.gpus()) / reader.gpus();
    let counts = (0..12)
        .map(|power| 1u32 << power)
        .take_while(move |&count| count < most);
    counts.chain((most > 0).then_some(most)).map(move |count| Deployment {
        engine,
        quantisation,
        prefill: Some(Pool { worker: reader, count }),
        decode: Pool {
            worker: writer,
            count: (gpus - count * reader.gpus()) / writer.gpus(),
        },
    })
}

/// The most requests at a time that keep the targets; both times grow with their number.
fn most(
    system: &System,
    model: &Model,
    deployment: &Deployment,
    wanted: &ServingSearch,
) -> Result<Option<ServingCandidate>, ServingError> {
    let at = |concurrency: u32| {
        let load = ServingLoad {
            cached: f64::from(wanted.cached),
            ..ServingLoad::closed(concurrency, wanted.input, wanted.output)
        };
        deployment.estimate(system, model, &load)
    };
    let keeps = |estimate: &ServingEstimate| {
        estimate.first_token <= wanted.targets.first_token && estimate.per_token <= wanted.targets.per_token
    };
    let (mut low, mut high) = (1, MAX_CONCURRENCY);
    let mut best = at(low)?;
    if !keeps(&best) {
        return Ok(None);
    }
    while low + 1 < high {
        let middle = low + (high - low) / 2;
        let estimate = at(middle)?;
        if keeps(&estimate) {
            (low, best) = (middle, estimate);
        } else {
            high = middle;
        }
    }
    Ok(Some(ServingCandidate {
        deployment: *deployment,
        concurrency: low,
        output_per_gpu: best.output_per_second / f64::from(deployment.gpus().max(1)),
        estimate: best,
    }))
}
