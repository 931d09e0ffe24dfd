//! Rows of measurements: from the columns that tables use to a deployment, a load, and what was seen.
//!
//! The tables were filled from several sources that write one thing in several ways; what is known of that is here, and nowhere in the
//! model. Columns are those of `aic_e2e_serving.csv`.

use thiserror::Error;

use super::{
    Deployment, Engine, Lengths, Limit, Pool, Quantisation, ServingError, ServingEstimate, ServingLoad, Worker,
};
use crate::system::System;
use crate::workload::model::{Model, ModelError};
use weft_plan::units::Picos;

/// A row of end-to-end measurements.
#[derive(Clone, Debug)]
pub struct EndToEnd {
    pub model: Model,
    pub deployment: Deployment,
    pub load: ServingLoad,
    pub first_token: Picos,
    pub per_token: Picos,
    /// The row does not say how many workers there were; see [`DECODE_GPUS`].
    pub workers_assumed: bool,
}

/// A row that says too little, or what is not known.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RowError {
    #[error("column `{column}` has no usable value: `{value}`")]
    Column { column: &'static str, value: String },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Serving(#[from] ServingError),
}

/// Decoding GPUs that are assumed where a row says how large a worker is, but not how many there were: what rows of the same
/// benchmark that do say it have in the middle. The workers that read prompts are then as many as the load needs.
pub const DECODE_GPUS: u32 = 40;
const READERS_MAX: u32 = 1 << 12;

/// A column's text; `None` where the table has no such column.
pub type Column<'a> = &'a dyn Fn(&str) -> Option<&'a str>;

impl EndToEnd {
    /// Reads a row of measurements on a system.
    pub fn read(system: &System, column: Column<'_>) -> Result<EndToEnd, RowError> {
        let model = Model::named(text(column, "model_path")?)?;
        let engine: Engine = text(column, "backend")?.parse()?;
        let named = |name| column(name).unwrap_or("");
        let quantisation = Quantisation::named(&model, named("gemm_quant_mode"), named("moe_quant_mode"))?;
        let together = text(column, "mode")? == "agg";
        let [decode_names, prefill_names] = if together {
            [AGGREGATED, AGGREGATED]
        } else {
            [DECODE, PREFILL]
        };
        let worker = Division::read(column, decode_names)?.worker(&model);
        let stated = |name| number(column, name).ok().flatten().filter(|&value| value > 0.0);
        let ranks = f64::from(worker.data);

        let mut workers_assumed = false;
        let (decode, prefill, concurrency);
        if together {
            let batch = stated("batch_size");
            let asked = stated("concurrency").or(batch.map(|batch| batch * ranks));
            concurrency = asked.ok_or_else(|| missing("concurrency"))?;
            // A concurrency that several workers shared, where the batch of each is stated too.
            let shared = batch.map_or(1.0, |batch| concurrency / (batch * ranks));
            let count = if shared >= 3.0 { shared.round() as u32 } else { 1 };
            (decode, prefill) = (Pool { worker, count }, None);
        } else {
            let reader = Division::read(column, prefill_names)?.worker(&model);
            let counts = (stated("decode_num_workers"), stated("prefill_num_workers"));
            workers_assumed = counts.0.is_none() || counts.1.is_none();
            let gpus = worker.gpus().max(1);
            let assumed = if gpus > 8 { 1 } else { (DECODE_GPUS / gpus).clamp(1, 8) };
            let count = counts.0.map_or(assumed, |count| count as u32);
            let batch = stated("decode_batch_size");
            let asked = stated("concurrency").or(batch.map(|batch| batch * f64::from(count) * ranks));
            concurrency = asked.ok_or_else(|| missing("concurrency"))?;
            decode = Pool { worker, count };
            // Zero stands for as many as are needed, until the load is known.
            let readers = counts.1.map_or(0, |count| count as u32);
            prefill = Some(Pool {
                worker: reader,
                count: readers,
            });
        }

        let (input, output) = (count(column, "isl")?, count(column, "osl")?);
        // One of the sources varies lengths, and always says how attention is divided.
        let varied = !together || stated("attention_dp_size").is_some();
        let load = ServingLoad {
            concurrency,
            lengths: if varied {
                Lengths::Varied { rounds: 10.0 }
            } else {
                Lengths::Equal
            },
            ..ServingLoad::benchmark(1, input, output)
        };
        let mut deployment = Deployment {
            engine,
            quantisation,
            prefill,
            decode,
        };
        if let Some(Pool { worker, count: 0 }) = deployment.prefill {
            deployment.prefill = Some(needed(system, &model, &deployment, worker, &load)?);
        }
        Ok(EndToEnd {
            first_token: milliseconds(column, "silicon_ttft_ms")?,
            per_token: milliseconds(column, "silicon_tpot_ms")?,
            model,
            deployment,
            load,
            workers_assumed,
        })
    }

    pub fn estimate(&self, system: &System) -> Result<ServingEstimate, ServingError> {
        self.deployment.estimate(system, &self.model, &self.load)
    }
}

/// As many prefill workers as keep the others busy.
fn needed(
    system: &System,
    model: &Model,
    deployment: &Deployment,
    worker: Worker,
    load: &ServingLoad,
) -> Result<Pool, RowError> {
    let with = |count| Deployment {
        prefill: Some(Pool { worker, count }),
        ..*deployment
    };
    let (mut too_few, mut count) = (0, 1);
    while with(count).estimate(system, model, load)?.limit == Limit::Prefill && count < READERS_MAX {
        (too_few, count) = (count, count * 2);
    }
    while too_few + 1 < count {
        let middle = too_few + (count - too_few) / 2;
        match with(middle).estimate(system, model, load)?.limit {
            Limit::Prefill => too_few = middle,
            _ => count = middle,
        }
    }
    Ok(Pool { worker, count })
}

type Names = [&'static str; 5];
const AGGREGATED: Names = ["tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "pp_size"];
const PREFILL: Names = [
    "prefill_tp_size",
    "prefill_attention_dp_size",
    "prefill_moe_tp_size",
    "prefill_moe_ep_size",
    "prefill_pp_size",
];
const DECODE: Names = [
    "decode_tp_size",
    "decode_attention_dp_size",
    "decode_moe_tp_size",
    "decode_moe_ep_size",
    "decode_pp_size",
];

/// How a row says that a model was divided. Zero and nothing mean one.
struct Division {
    tensor: u32,
    data: u32,
    data_stated: bool,
    expert_tensor: u32,
    expert: u32,
    pipeline: u32,
}

impl Division {
    fn read(column: Column<'_>, names: Names) -> Result<Division, RowError> {
        let [tensor, data, expert_tensor, expert, pipeline] = names;
        let ways = |name| {
            let value = number(column, name)?.unwrap_or(1.0).max(1.0);
            Ok::<u32, RowError>(value as u32)
        };
        Ok(Division {
            tensor: ways(tensor)?,
            data: ways(data)?,
            data_stated: number(column, data)?.is_some(),
            expert_tensor: ways(expert_tensor)?,
            expert: ways(expert)?,
            pipeline: ways(pipeline)?,
        })
    }

    fn worker(&self, model: &Model) -> Worker {
        let Division {
            tensor,
            data,
            expert_tensor,
            expert,
            pipeline,
            ..
        } = *self;
        let with = |worker: Worker| Worker { pipeline, ..worker };
        let (attention, experts) = (tensor.saturating_mul(data), expert_tensor.saturating_mul(expert));
        // Where the width and the number of experts are both said to be divided by all GPUs, one number of GPUs was written twice,
        // and the product of both stands for it.
        let twice = expert_tensor == expert && expert > 1 && attention == experts && (expert > 2 || self.data_stated);
        if twice {
            return with(if tensor > 1 {
                Worker::tensor_and_experts(expert)
            } else {
                Worker::wide(expert)
            });
        }
        if self.data_stated && tensor == data && tensor > 1 && attention == experts {
            return with(Worker::wide(tensor));
        }
        // Nobody divides heads so far: it is the number of GPUs, and requests are divided.
        if tensor > 16 || (tensor > 8 && expert > 1 && expert < expert_tensor) {
            return with(Worker::wide(attention));
        }
        if attention == 1 && experts == 1 && model.parameters() > 5e11 {
            // A worker of one GPU cannot hold this; nothing was written.
            return with(Worker::tensor(8));
        }
        if experts > attention && experts.is_multiple_of(tensor) {
            // Experts were divided over GPUs that attention divided by requests.
            return Worker {
                tensor,
                data: experts / tensor,
                expert_tensor,
                expert,
                pipeline,
            };
        }
        if attention != experts {
            // Dense models leave the experts' columns at one, or at nothing.
            return with(Worker {
                tensor,
                data,
                expert_tensor: tensor,
                expert: data,
                pipeline,
            });
        }
        Worker {
            tensor,
            data,
            expert_tensor,
            expert,
            pipeline,
        }
    }
}

fn text<'a>(column: Column<'a>, name: &'static str) -> Result<&'a str, RowError> {
    column(name)
        .filter(|value| !value.is_empty())
        .ok_or_else(|| missing(name))
}

fn number(column: Column<'_>, name: &'static str) -> Result<Option<f64>, RowError> {
    match column(name).map(str::trim) {
        None | Some("") => Ok(None),
        Some(value) => match value.parse::<f64>() {
            Ok(number) if number.is_finite() && (0.0..1e18).contains(&number) => Ok(Some(number)),
            _ => Err(unusable(name, value)),
        },
    }
}

fn count(column: Column<'_>, name: &'static str) -> Result<u32, RowError> {
    let value = number(column, name)?.ok_or_else(|| missing(name))?;
    if (1.0..=1e8).contains(&value) {
        Ok(value as u32)
    } else {
        Err(unusable(name, &value.to_string()))
    }
}

fn milliseconds(column: Column<'_>, name: &'static str) -> Result<Picos, RowError> {
    let value = number(column, name)?
        .filter(|&value| value > 0.0)
        .ok_or_else(|| missing(name))?;
    Ok(Picos::from_ps((value * 1e9) as u64))
}

fn missing(column: &'static str) -> RowError {
    unusable(column, "")
}

fn unusable(column: &'static str, value: &str) -> RowError {
    RowError::Column {
        column,
        value: value.chars().take(80).collect(),
    }
}
