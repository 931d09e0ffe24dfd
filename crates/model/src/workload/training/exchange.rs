//! What a training step sends, and how long that takes: the one place of this model that prices communication.

use super::{Parallel, Sharding, TrainingJob, software};
use crate::device::{DeviceModel, DeviceOptions};
use crate::system::System;
use crate::workload::model::Mixer;
use weft_plan::algorithms::Grid;
use weft_plan::collective::{Collective, Sizes};
use weft_plan::units::Bytes;

/// Bytes a second of one GPU within its scale-up domain.
fn scale_up(system: &System) -> f64 {
    system.scale_up.bandwidth.bytes_per_sec() as f64 * system.collectives.exchange.efficiency
}

/// Bytes a second of one GPU's share of the NICs.
fn scale_out(system: &System) -> f64 {
    system.nic_share().bytes_per_sec() as f64 * system.scale_out.efficiency
}

/// An all-gather of `bytes` in total, or a reduce-scatter of as many, among `ranks` GPUs that are `stride` apart.
pub fn gather(system: &System, bytes: f64, ranks: u32, stride: u32) -> f64 {
    if ranks <= 1 {
        return 0.0;
    }
    let fit = (system.scale_up.domain / stride.max(1)).clamp(1, ranks);
    let local = (1..=fit).rev().find(|local| ranks.is_multiple_of(*local)).unwrap_or(1);
    let nodes = ranks / local;
    let all_gather = Collective::AllGather { sizes: Sizes::Equal };
    let estimate = DeviceModel::placed(system, Grid { nodes, local })
        .and_then(|device| device.predict(all_gather, Bytes(bytes as u64), &DeviceOptions::default()));
    match estimate {
        Ok(estimate) => estimate.time.as_secs_f64(),
        // More ranks than the model of collectives knows of: what their links carry.
        Err(_) => bytes / (scale_out(system) * f64::from(local)).min(scale_up(system)),
    }
}

/// Each of `ranks` GPUs sends `tokens` vectors of `bytes` to the GPUs of `chosen` experts each, one copy to a GPU, and one to a domain.
pub fn dispatch(system: &System, tokens: f64, bytes: f64, chosen: u32, ranks: u32) -> f64 {
    if ranks <= 1 {
        return 0.0;
    }
    let reached = |places: f64| places * (1.0 - (1.0 - 1.0 / places).powi(chosen as i32));
    let sent = tokens * bytes;
    let (ranks, domain) = (f64::from(ranks), f64::from(system.scale_up.domain));
    if ranks <= domain {
        return sent * reached(ranks) * (ranks - 1.0) / ranks / scale_up(system);
    }
    let domains = ranks / domain;
    let outward = sent * reached(domains) * (domains - 1.0) / domains / scale_out(system);
    let within = sent * reached(ranks) * (domain - 1.0) / domain / scale_up(system);
    outward.max(within)
}

/// What of tensor parallelism is not hidden in one layer, forward and backward: a gather and a scatter around each of its halves.
pub(super) fn tensor(job: &TrainingJob, system: &System, halves: f64) -> f64 {
    let bytes = job.micro_tokens() * f64::from(job.model.hidden) * 2.0;
    4.0 * halves * gather(system, bytes, job.parallel.tensor, 1) * software::TENSOR_EXPOSED
}

/// What of context parallelism is not hidden in one layer: keys and values of the whole sequence come by once forward, and they and their gradients backward.
/// A state that runs along the sequence is handed on, which is nothing beside it.
pub(super) fn context(job: &TrainingJob, system: &System, mixer: &Mixer) -> f64 {
    let Parallel { tensor, context, .. } = job.parallel;
    let Some(elements) = mixer.cached_elements() else {
        return 0.0;
    };
    let bytes = job.micro_tokens() * f64::from(context) * elements * 2.0 / f64::from(tensor);
    3.0 * gather(system, bytes, context, tensor) * software::TENSOR_EXPOSED
}

/// What of a microbatch's way between two stages is not hidden, forward and backward.
pub(super) fn handover(job: &TrainingJob, system: &System) -> f64 {
    let bytes = job.micro_tokens() * f64::from(job.model.hidden) * 2.0 / f64::from(job.parallel.tensor);
    let rate = if job.gpus > system.scale_up.domain {
        scale_out(system)
    } else {
        scale_up(system)
    };
    2.0 * bytes / rate * software::HANDOVER_EXPOSED
}

/// What of the exchange between replicas is not hidden, in a step whose microbatches take `stage` seconds in a stage.
pub(super) fn replicas(job: &TrainingJob, system: &System, stage: f64) -> f64 {
    let (common, experts) = job.owned();
    let parallel = &job.parallel;
    let group = job.replicas() * parallel.context;
    let apart = if parallel.expert > 1 {
        parallel.expert * parallel.expert_tensor
    } else {
        parallel.tensor
    };
    let all = |bytes: f64| {
        gather(system, common * bytes, group, parallel.tensor)
            + gather(system, experts * bytes, job.expert_replicas(), apart)
    };
    let scatter = all(job.software.gradient_bytes);
    let collect = all(if job.recipe.rounds() { 1.0 } else { 2.0 });
    if parallel.sharding == Sharding::Parameters {
        let each = 2.0 * collect + scatter;
        return job.microbatches() * (each - software::GATHER_HIDDEN * stage).max(0.0)
            + software::REPLICAS_EXPOSED * each;
    }
    software::REPLICAS_EXPOSED * (scatter + collect)
        + (scatter - stage * 2.0 / 3.0).max(0.0)
        + (collect - stage / 3.0).max(0.0)
}
