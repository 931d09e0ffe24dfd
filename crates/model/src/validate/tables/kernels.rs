//! Kernels of inference engines: all-reduce, exchange of tokens, dispatch and combine of experts.

use super::super::{Compared, Systems, TruthRow, TruthTable, Unpredicted};
use crate::device::{DeviceModel, DeviceModelError, ExpertLoad, ReduceKernel, TokenDirection, TokenExchange};
use crate::system::System;
use weft_plan::units::{Bytes, Picos};

/// All-reduce kernels of vLLM, SGLang and TensorRT-LLM.
#[derive(Debug)]
pub(super) struct AllReduce;

/// Exchange of tokens within an NVLink domain.
#[derive(Debug)]
pub(super) struct TokenExchanges;

/// DeepEP for few tokens.
#[derive(Debug)]
pub(super) struct ExpertsFew;

/// DeepEP for many tokens.
#[derive(Debug)]
pub(super) struct ExpertsMany;

/// What DeepEP publishes of itself.
#[derive(Debug)]
pub(super) struct ExpertsPublished;

impl TruthTable for AllReduce {
    fn name(&self) -> &'static str {
        "aic_custom_allreduce"
    }

    fn columns(&self) -> &'static [&'static str] {
        &["system", "framework", "num_gpus", "bytes", "time_us"]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let label = row.need_text("system")?;
        let system = systems.named(label)?;
        let eager = row.text("variant").is_some_and(|variant| variant.ends_with("eager"));
        let kernel = row
            .text("kernel_source")
            .unwrap_or(row.need_text("framework")?)
            .to_ascii_lowercase();
        let kernel = match kernel.split('_').next().unwrap_or("") {
            "vllm" => ReduceKernel::Vllm,
            "sglang" => ReduceKernel::Sglang,
            "trtllm" => ReduceKernel::TensorRt,
            other => return Err(unsupported(label, format!("no kernel is called `{other}`"))),
        };
        let bytes = Bytes(row.need("bytes")?.max(0.0) as u64);
        let time = DeviceModel::of(&system, row.need_count("num_gpus")?)
            .and_then(|device| device.all_reduce_kernel(kernel, bytes, eager));
        compared(row, label, "time", time, "time_us")
    }
}

impl TruthTable for TokenExchanges {
    fn name(&self) -> &'static str {
        "aic_nvl72_alltoall"
    }

    fn columns(&self) -> &'static [&'static str] {
        &[
            "system",
            "op_name",
            "kernel_source",
            "moe_dtype",
            "num_tokens",
            "hidden_size",
            "topk",
            "num_experts",
            "moe_ep_size",
            "time_us",
        ]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let label = row.need_text("system")?;
        let system = systems.named(label)?;
        let load = ExpertLoad {
            tokens: row.need("num_tokens")?,
            hidden: row.need("hidden_size")?,
            top_k: row.need("topk")?,
            experts: row.need("num_experts")?,
        };
        let one_sided = row.need_text("kernel_source")?.contains("OneSided");
        let whole = load.hidden * 2.0;
        // With a scale for every so many elements.
        let sent = match row.need_text("moe_dtype")? {
            "fp8" => load.hidden * (1.0 + 4.0 / 128.0),
            "nvfp4" => load.hidden * (0.5 + 1.0 / 16.0),
            _ => whole,
        };
        let (quantity, step, token) = match row.need_text("op_name")? {
            "alltoall_prepare" => ("prepare", TokenExchange::Prepare, 0.0),
            "alltoall_dispatch" if one_sided => ("dispatch", TokenExchange::Put, sent),
            "alltoall_dispatch" => ("dispatch", TokenExchange::Dispatch, sent),
            "alltoall_combine" if one_sided => ("combine", TokenExchange::Get, whole),
            "alltoall_combine" => ("combine", TokenExchange::Combine, whole),
            "alltoall_combine_low_precision" => ("combine", TokenExchange::CombineQuantized, sent),
            other => return Err(unsupported(label, format!("no step is called `{other}`"))),
        };
        let time = DeviceModel::of(&system, row.need_count("moe_ep_size")?)
            .and_then(|device| device.exchange_tokens(&load, step, token));
        compared(row, label, quantity, time, "time_us")
    }
}

impl TruthTable for ExpertsFew {
    fn name(&self) -> &'static str {
        "aic_deepep_ll"
    }

    fn columns(&self) -> &'static [&'static str] {
        &[
            "system",
            "node_num",
            "hidden_size",
            "num_token",
            "num_topk",
            "num_experts",
            "combine_avg_t_us",
            "dispatch_avg_t_us",
        ]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let (label, system, load) = experts(row, systems)?;
        let device = nodes(row, &system);
        let mut all = Vec::new();
        for (quantity, direction, column) in [
            ("dispatch", TokenDirection::Dispatch, "dispatch_avg_t_us"),
            ("combine", TokenDirection::Combine, "combine_avg_t_us"),
        ] {
            let time = device.clone().and_then(|device| device.experts_few(&load, direction));
            all.extend(compared(row, label, quantity, time, column)?);
        }
        Ok(all)
    }
}

impl TruthTable for ExpertsMany {
    fn name(&self) -> &'static str {
        "aic_deepep_normal"
    }

    fn columns(&self) -> &'static [&'static str] {
        &[
            "system",
            "node_num",
            "hidden_size",
            "num_token",
            "num_topk",
            "num_experts",
            "dispatch_sms",
            "dispatch_transmit_us",
            "combine_sms",
            "combine_transmit_us",
        ]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let (label, system, load) = experts(row, systems)?;
        let device = nodes(row, &system);
        let mut all = Vec::new();
        for (quantity, direction, column) in [
            ("dispatch", TokenDirection::Dispatch, "dispatch"),
            ("combine", TokenDirection::Combine, "combine"),
        ] {
            let sms = row.need(&format!("{column}_sms"))?;
            let time = device
                .clone()
                .and_then(|device| device.experts_many(&load, direction, sms));
            let notify = row.number(&format!("{column}_notify_us"))?.unwrap_or(0.0);
            let measured = row.need(&format!("{column}_transmit_us"))? + notify;
            all.extend(against(label, quantity, time, measured)?);
        }
        Ok(all)
    }
}

impl TruthTable for ExpertsPublished {
    fn name(&self) -> &'static str {
        "deepep_readme"
    }

    fn columns(&self) -> &'static [&'static str] {
        &["kernel", "gpu", "EP", "tokens", "hidden", "topk", "op"]
    }

    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let label = row.need_text("gpu")?;
        let system = systems.named(label)?;
        let load = ExpertLoad {
            tokens: row.need("tokens")?,
            hidden: row.need("hidden")?,
            top_k: row.need("topk")?,
            experts: row.number("experts")?.unwrap_or(256.0),
        };
        let ranks = row.need_count("EP")?;
        let (quantity, direction, token) = match row.need_text("op")? {
            "dispatch" => ("dispatch", TokenDirection::Dispatch, load.hidden),
            "combine" => ("combine", TokenDirection::Combine, load.hidden * 2.0),
            other => return Err(unsupported(label, format!("no direction is called `{other}`"))),
        };
        let device = DeviceModel::of(&system, ranks);
        match (row.need_text("kernel")?, row.number("latency_us")?) {
            ("low_latency", Some(measured)) => {
                let time = device.and_then(|device| device.experts_few(&load, direction));
                against(label, quantity, time, measured)
            }
            ("normal", None) => {
                // Bytes that arrived over the slower network, by the time: back to a time.
                let sms = row.number("sms")?.unwrap_or(24.0);
                let nodes = f64::from(ranks) / f64::from(system.scale_up.domain);
                let copies = match row.text("bw_kind") {
                    Some("RDMA") => load.reached(nodes.max(1.0)) * (nodes - 1.0) / nodes,
                    _ => load.reached(f64::from(ranks)),
                };
                let bandwidth = row.need("bandwidth_GBps")?;
                let measured = load.tokens * copies * token / (bandwidth * 1e3);
                let time = device.and_then(|device| device.experts_many(&load, direction, sms));
                against(label, quantity, time, measured)
            }
            (kernel, _) => Err(unsupported(label, format!("nothing is known of the kernel `{kernel}`"))),
        }
    }
}

type Experts<'a> = (&'a str, std::sync::Arc<System>, ExpertLoad);

fn experts<'a>(row: &TruthRow<'a>, systems: &mut Systems) -> Result<Experts<'a>, Unpredicted> {
    let label = row.need_text("system")?;
    let load = ExpertLoad {
        tokens: row.need("num_token")?,
        hidden: row.need("hidden_size")?,
        top_k: row.need("num_topk")?,
        experts: row.need("num_experts")?,
    };
    Ok((label, systems.named(label)?, load))
}

/// All GPUs of so many nodes.
fn nodes<'a>(row: &TruthRow<'_>, system: &'a System) -> Result<DeviceModel<'a>, DeviceModelError> {
    let nodes = row.need_count("node_num").unwrap_or(1);
    DeviceModel::of(system, nodes.saturating_mul(system.node.gpus))
}

fn unsupported(system: &str, reason: String) -> Unpredicted {
    Unpredicted::Unsupported {
        system: system.to_owned(),
        reason,
    }
}

fn compared(
    row: &TruthRow<'_>,
    label: &str,
    quantity: &'static str,
    time: Result<Picos, DeviceModelError>,
    column: &str,
) -> Result<Vec<Compared>, Unpredicted> {
    against(label, quantity, time, row.need(column)?)
}

/// Beside a measured time in microseconds.
fn against(
    label: &str,
    quantity: &'static str,
    time: Result<Picos, DeviceModelError>,
    measured: f64,
) -> Result<Vec<Compared>, Unpredicted> {
    let time = time.map_err(|error| unsupported(label, error.to_string()))?;
    if measured <= 0.0 {
        return Err(unsupported(label, "something that took no time".to_owned()));
    }
    Ok(vec![Compared {
        system: label.to_owned(),
        quantity,
        predicted: time.as_secs_f64() * 1e6,
        measured,
    }])
}
