//! Sweeps of NCCL: within one node, and as `nccl-tests` prints them.

use super::super::{Compared, Systems, TruthRow, TruthTable, Unpredicted};
use crate::device::{DeviceModel, DeviceOptions};
use crate::system::System;
use weft_plan::collective::{Collective, Sizes};
use weft_plan::units::Bytes;

/// 2 to 8 GPUs of one node.
#[derive(Debug)]
pub(super) struct OneNode;

/// Any number of GPUs, with the fabric and the settings in words.
#[derive(Debug)]
pub(super) struct NcclTests;

impl TruthTable for OneNode {
    fn name(&self) -> &'static str {
        "aic_nccl"
    }

    fn columns(&self) -> &'static [&'static str] {
        &["system", "op_name", "num_gpus", "bytes", "time_us"]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let name = row.need_text("system")?;
        let system = systems.named(name)?;
        let call = Call {
            label: name,
            operation: row.need_text("op_name")?,
            options: DeviceOptions::default(),
        };
        call.predict(row, &system, row.need_count("num_gpus")?)
    }
}

impl TruthTable for NcclTests {
    fn name(&self) -> &'static str {
        "nccl_tests_public"
    }

    fn columns(&self) -> &'static [&'static str] {
        &["gpu", "ngpus", "op", "bytes", "time_us"]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let gpu = row.need_text("gpu")?;
        let system = systems.named(on_fabric(gpu, row.text("fabric").unwrap_or("")))?;
        let call = Call {
            label: row.text("case").unwrap_or(gpu),
            operation: row.need_text("op")?,
            options: DeviceOptions::parse(row.text("settings").unwrap_or("")),
        };
        call.predict(row, &system, row.need_count("ngpus")?)
    }
}

/// The shipped system with these GPUs on a fabric described in words.
pub(super) fn on_fabric<'a>(gpu: &'a str, fabric: &str) -> &'a str {
    let fabric = fabric.to_ascii_lowercase();
    let efa = fabric.contains("efa");
    let ethernet = ["roce", "bluefield", "spectrum", "bf3"]
        .iter()
        .any(|word| fabric.contains(word));
    match gpu.to_ascii_lowercase() {
        gpu if gpu.starts_with("h100") && efa => "p5",
        gpu if gpu.starts_with("h200") && efa => "p5en",
        gpu if gpu.starts_with("b200") && efa => "p6-b200",
        gpu if gpu.starts_with("b300") && efa => "p6-b300",
        gpu if gpu.starts_with("h200") && ethernet => "h200-roce",
        _ => gpu,
    }
}

struct Call<'a> {
    label: &'a str,
    operation: &'a str,
    options: DeviceOptions,
}

impl Call<'_> {
    fn predict(&self, row: &TruthRow<'_>, system: &System, ranks: u32) -> Result<Vec<Compared>, Unpredicted> {
        let unsupported = |reason: String| Unpredicted::Unsupported {
            system: self.label.to_owned(),
            reason,
        };
        let collective = match self.operation.replace(['-', ' '], "_").to_ascii_lowercase().as_str() {
            "all_reduce" | "allreduce" => Collective::AllReduce,
            "all_gather" | "allgather" => Collective::AllGather { sizes: Sizes::Equal },
            "reduce_scatter" | "reducescatter" => Collective::ReduceScatter { sizes: Sizes::Equal },
            "alltoall" | "all_to_all" => Collective::AllToAll { sizes: Sizes::Equal },
            "broadcast" => Collective::Broadcast {
                root: weft_plan::Rank(0),
            },
            "reduce" => Collective::Reduce {
                root: weft_plan::Rank(0),
            },
            "sendrecv" | "send_recv" => Collective::SendReceive {
                from: weft_plan::Rank(0),
                to: weft_plan::Rank(1),
            },
            other => return Err(unsupported(format!("no collective is called `{other}`"))),
        };
        let measured = row.need("time_us")?;
        if measured <= 0.0 {
            return Err(unsupported("a collective that took no time".to_owned()));
        }
        let bytes = Bytes(row.need("bytes")?.max(0.0) as u64);
        let estimate = DeviceModel::of(system, ranks)
            .and_then(|device| device.predict(collective, bytes, &self.options))
            .map_err(|error| unsupported(error.to_string()))?;
        Ok(vec![Compared {
            system: self.label.to_owned(),
            quantity: "time",
            predicted: estimate.time.as_secs_f64() * 1e6,
            measured,
        }])
    }
}
