//! Steps of training, as papers and NVIDIA's Megatron-Bridge publish them.

use super::super::{Compared, Systems, TruthRow, TruthTable, Unpredicted};
use crate::system::System;
use crate::workload::training::published::{Published, PublishedError};

/// Rows of papers and benchmark guides.
#[derive(Debug)]
pub(super) struct TrainingSteps;

/// NVIDIA's table of Megatron-Bridge.
#[derive(Debug)]
pub(super) struct MegatronBridge;

impl TruthTable for TrainingSteps {
    fn name(&self) -> &'static str {
        "training_steps"
    }

    fn columns(&self) -> &'static [&'static str] {
        &["source_id", "model", "gpu", "ngpus", "precision", "GBS", "seq"]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let name = row.need_text("gpu")?;
        let system = systems.named(name)?;
        compared(
            name,
            Published::training_step(&|column| row.text(column), &system),
            &system,
        )
    }
}

impl TruthTable for MegatronBridge {
    fn name(&self) -> &'static str {
        "megatron_bridge_perf"
    }

    fn columns(&self) -> &'static [&'static str] {
        &[
            "container",
            "model",
            "system",
            "ngpus",
            "GBS",
            "seq",
            "tokens_per_s_per_gpu",
        ]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let name = row.need_text("system")?;
        let system = systems.named(name)?;
        compared(name, Published::megatron_bridge(&|column| row.text(column)), &system)
    }
}

/// The time of a step, measured and predicted.
fn compared(
    name: &str,
    published: Result<Published, PublishedError>,
    system: &System,
) -> Result<Vec<Compared>, Unpredicted> {
    let unsupported = |reason: String| Unpredicted::Unsupported {
        system: name.to_owned(),
        reason,
    };
    let published = published.map_err(|error| unsupported(error.to_string()))?;
    let step = published
        .job
        .step(system)
        .map_err(|error| unsupported(error.to_string()))?;
    Ok(vec![Compared {
        system: name.to_owned(),
        quantity: "step time",
        predicted: step.seconds,
        measured: published.seconds,
    }])
}
