//! New weights on their way from trainers to those who generate: what reinforcement learning does between two steps.
//!
//! Every generating replica needs all weights, each of its GPUs a part. Trainers hold each weight once in all. Either they send every part to every replica
//! themselves, or replicas pass on what they have got while the rest still comes, so that a part leaves the trainers once.

use serde::{Deserialize, Serialize};

use crate::roofline::Recipe;
use crate::system::System;
use crate::workload::model::Model;

/// Who has the weights, and who needs them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Broadcast {
    /// GPUs that train; each sends an equal part.
    pub trainers: u32,
    /// Replicas that generate, and the GPUs of each.
    pub replicas: u32,
    pub replica_gpus: u32,
    /// What weights are sent in.
    pub recipe: Recipe,
    pub passing_on: bool,
}

/// How long, in seconds, and which side is the limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sent {
    pub seconds: f64,
    pub bytes: f64,
    pub leaving: f64,
    pub arriving: f64,
}

/// Weights are passed on in pieces of this size, so that the last replica in line starts soon.
const PIECE_BYTES: f64 = 64e6;

impl Broadcast {
    /// How long it takes over the scale-out network, which nothing else uses meanwhile.
    pub fn time(&self, model: &Model, system: &System) -> Sent {
        let bytes = model.parameters() * self.recipe.operand_bytes();
        let nic = system.nic_share().bytes_per_sec() as f64 * system.scale_out.efficiency;
        let each = bytes / f64::from(self.replica_gpus.max(1));
        let copies = if self.passing_on {
            1.0
        } else {
            f64::from(self.replicas.max(1))
        };
        let leaving = bytes * copies / (f64::from(self.trainers.max(1)) * nic);
        let line = if self.passing_on {
            f64::from(self.replicas.saturating_sub(1))
        } else {
            0.0
        };
        let arriving = (each + line * PIECE_BYTES.min(each)) / nic;
        Sent {
            seconds: leaving.max(arriving),
            bytes,
            leaving,
            arriving,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passing_on_frees_the_trainers() {
        let model = Model::named("kimi-k2").unwrap();
        let system = System::named("dgx-h100").unwrap();
        let direct = Broadcast {
            trainers: 256,
            replicas: 64,
            replica_gpus: 16,
            recipe: Recipe::Bf16,
            passing_on: false,
        };
        let (sent, passed) = (
            direct.time(&model, &system),
            Broadcast {
                passing_on: true,
                ..direct
            }
            .time(&model, &system),
        );
        assert!(passed.seconds < sent.seconds);
        assert!(sent.seconds >= sent.leaving && sent.seconds >= sent.arriving);
        // A replica cannot get its weights faster than its NICs carry them.
        assert!(passed.seconds >= sent.bytes / (16.0 * 50e9));
    }
}
