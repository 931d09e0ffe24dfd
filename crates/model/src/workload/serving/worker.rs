//! How the GPUs of one worker divide a model.

use super::ServingError;
use crate::system::System;
use crate::workload::model::{Feed, Model};

/// One copy of the model and the GPUs that hold it. Attention is divided by heads (`tensor`) and by requests (`data`); experts by width
/// (`expert_tensor`) and by number (`expert`), over the same GPUs; layers by `pipeline`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Worker {
    pub tensor: u32,
    pub data: u32,
    pub expert_tensor: u32,
    pub expert: u32,
    pub pipeline: u32,
}

/// More GPUs than one copy of a model will have soon.
const MAX_WAYS: u32 = 1 << 12;

impl Worker {
    /// Everything divided by width.
    pub fn tensor(ways: u32) -> Worker {
        Worker {
            tensor: ways,
            data: 1,
            expert_tensor: ways,
            expert: 1,
            pipeline: 1,
        }
    }

    /// Attention by width, experts by number.
    pub fn tensor_and_experts(ways: u32) -> Worker {
        Worker {
            expert_tensor: 1,
            expert: ways,
            ..Worker::tensor(ways)
        }
    }

    /// Attention by requests, experts by number.
    pub fn wide(ways: u32) -> Worker {
        Worker {
            tensor: 1,
            data: ways,
            expert_tensor: 1,
            expert: ways,
            pipeline: 1,
        }
    }

    pub fn gpus(&self) -> u32 {
        self.tensor.saturating_mul(self.data).saturating_mul(self.pipeline)
    }

    /// Ways of dividing a model over this many GPUs of a system that engines offer.
    pub fn ways(model: &Model, system: &System, gpus: u32) -> Vec<Worker> {
        let mut ways = vec![Worker::tensor(gpus)];
        if gpus > 1 && routed(model) {
            ways.push(Worker::tensor_and_experts(gpus));
            ways.push(Worker::wide(gpus));
        }
        if gpus > system.node.gpus && gpus.is_multiple_of(system.node.gpus) {
            ways.push(Worker {
                pipeline: gpus / system.node.gpus,
                ..Worker::tensor(system.node.gpus)
            });
        }
        // An attention that is divided across more than a node waits for its slowest link in every layer.
        ways.retain(|way| way.tensor <= system.node.gpus.max(system.scale_up.domain.min(16)));
        ways
    }

    pub(super) fn validate(&self, model: &Model) -> Result<(), ServingError> {
        for (what, value) in [
            ("the ways of a tensor", self.tensor),
            ("the ways of requests", self.data),
            ("the ways of an expert's width", self.expert_tensor),
            ("the ways of experts", self.expert),
            ("the stages of a pipeline", self.pipeline),
        ] {
            if !(1..=MAX_WAYS).contains(&value) {
                let (value, most) = (value.into(), MAX_WAYS.into());
                return Err(ServingError::OutOfRange { what, value, most });
            }
        }
        let attention = self.tensor.saturating_mul(self.data);
        let experts = self.expert_tensor.saturating_mul(self.expert);
        if routed(model) && attention != experts {
            return Err(ServingError::Uneven { attention, experts });
        }
        Ok(())
    }
}

fn routed(model: &Model) -> bool {
    model
        .stacks
        .iter()
        .any(|stack| matches!(stack.feed, Some(Feed::Experts(_))))
}
