//! Exchanges between the GPUs of a worker, by the collectives model, asked once for a range of sizes.

use super::{Engine, ServingError, Worker};
use crate::device::{
    DeviceModel, DeviceModelError, DeviceOptions, ExpertLoad, ReduceKernel, TokenDirection, TokenExchange,
};
use crate::system::System;
use crate::workload::model::{Experts, Feed, Model};
use weft_plan::collective::{Collective, Sizes};
use weft_plan::units::{Bytes, Picos};

/// How long the exchanges of a pass take.
#[derive(Clone, Debug)]
pub(super) struct Exchange {
    all_reduce: Curve,
    dispatch: Curve,
    combine: Curve,
    hop: Curve,
}

/// SMs that engines give to the exchange of many tokens.
const EXCHANGE_SMS: f64 = 24.0;

impl Exchange {
    pub(super) fn new(
        system: &System,
        model: &Model,
        worker: Worker,
        engine: Engine,
    ) -> Result<Exchange, ServingError> {
        let kernel = match engine {
            Engine::Vllm => ReduceKernel::Vllm,
            Engine::Sglang => ReduceKernel::Sglang,
            Engine::TensorRtLlm => ReduceKernel::TensorRt,
        };
        let all_reduce = match worker.tensor {
            0 | 1 => Curve::nothing(),
            ranks => {
                let device = DeviceModel::of(system, ranks)?;
                Curve::new(|bytes| device.all_reduce_kernel(kernel, Bytes(bytes), false))?
            }
        };
        let experts = model.stacks.iter().find_map(|stack| match stack.feed {
            Some(Feed::Experts(experts)) => Some(experts),
            _ => None,
        });
        let (dispatch, combine) = match experts {
            Some(experts) if worker.data > 1 => {
                let device = DeviceModel::of(system, worker.data.saturating_mul(worker.tensor))?;
                let width = experts.width(f64::from(model.hidden));
                let at = |direction| Curve::new(|tokens| tokens_time(&device, &experts, width, tokens, direction));
                (at(TokenDirection::Dispatch)?, at(TokenDirection::Combine)?)
            }
            _ => (Curve::nothing(), Curve::nothing()),
        };
        let hop = match worker.pipeline {
            0 | 1 => Curve::nothing(),
            stages => {
                let device = DeviceModel::of(system, stages.saturating_mul(system.scale_up.domain))?;
                let options = DeviceOptions::default();
                // A stage hands its tokens on as one rank of an all-to-all does: a message and its bytes.
                Curve::new(|bytes| {
                    Ok(device
                        .predict(Collective::AllToAll { sizes: Sizes::Equal }, Bytes(bytes), &options)?
                        .time)
                })?
            }
        };
        Ok(Exchange {
            all_reduce,
            dispatch,
            combine,
            hop,
        })
    }

    pub(super) fn all_reduce(&self, bytes: f64) -> f64 {
        self.all_reduce.at(bytes)
    }

    /// Tokens of each rank to the experts that they chose, and what those made of them back.
    pub(super) fn dispatch_and_combine(&self, tokens: f64) -> f64 {
        self.dispatch.at(tokens) + self.combine.at(tokens)
    }

    pub(super) fn hop(&self, bytes: f64) -> f64 {
        self.hop.at(bytes)
    }
}

/// The fastest of the ways that the system has.
fn tokens_time(
    device: &DeviceModel<'_>,
    experts: &Experts,
    width: f64,
    tokens: u64,
    direction: TokenDirection,
) -> Result<Picos, DeviceModelError> {
    let load = ExpertLoad {
        tokens: tokens as f64,
        hidden: width,
        top_k: f64::from(experts.chosen),
        experts: f64::from(experts.experts),
    };
    let (step, token) = match direction {
        TokenDirection::Dispatch => (TokenExchange::Dispatch, width),
        TokenDirection::Combine => (TokenExchange::Combine, 2.0 * width),
    };
    let ways = [
        device.exchange_tokens(&load, step, token),
        device.experts_few(&load, direction),
        device.experts_many(&load, direction, EXCHANGE_SMS),
    ];
    if let Some(fastest) = ways.into_iter().flatten().min() {
        return Ok(fastest);
    }
    let bytes = Bytes((token * load.tokens * load.top_k.min(f64::from(device.grid().ranks()))) as u64);
    Ok(device
        .predict(
            Collective::AllToAll { sizes: Sizes::Equal },
            bytes,
            &DeviceOptions::default(),
        )?
        .time)
}

/// Seconds by powers of two, straight lines in between.
#[derive(Clone, Debug)]
struct Curve(Vec<f64>);

const LARGEST_POWER: u32 = 34;

impl Curve {
    fn nothing() -> Curve {
        Curve(Vec::new())
    }

    fn new(time: impl Fn(u64) -> Result<Picos, DeviceModelError>) -> Result<Curve, ServingError> {
        let mut points = Vec::new();
        for power in 0..=LARGEST_POWER {
            points.push(time(1 << power)?.as_secs_f64());
        }
        Ok(Curve(points))
    }

    fn at(&self, size: f64) -> f64 {
        let Some((&first, _)) = self.0.split_first() else {
            return 0.0;
        };
        if size <= 1.0 {
            return first;
        }
        let last = self.0.len() - 2;
        let power = (size.log2() as usize).min(last);
        let (low, high) = (self.0[power], self.0[power + 1]);
        let start = (1u64 << power) as f64;
        low + (high - low) * (size - start) / start
    }
}
