//! What is left of a long run when parts of the machine fail, and how often to write a checkpoint.
//!
//! Failures come at random, at a rate that grows with the number of GPUs. Each costs the work since the last checkpoint and a restart;
//! checkpoints cost time too, and the best interval between them is where both are in balance (Young 1974, Daly 2006).
//!
//! ```
//! use weft_model::workload::goodput::FailureRates;
//! let faults = FailureRates { gpus: 16_384, ..FailureRates::default() };
//! let goodput = faults.goodput();
//! assert!(goodput.share > 0.9 && goodput.share < 1.0);
//! ```

use serde::{Deserialize, Serialize};

/// What goes wrong, and what it costs. Times are in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FailureRates {
    pub gpus: u32,
    /// The mean time between two failures of one GPU, its share of host and network included.
    pub gpu_mtbf: f64,
    /// How long training stands still for a checkpoint.
    pub checkpoint: f64,
    /// From a failure to the first step after it.
    pub restart: f64,
    /// From one checkpoint to the next; the best one where none is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<f64>,
    /// The share of machines that are slow at any time, and by how much; all others wait for the slowest.
    pub slow_share: f64,
    pub slow_by: f64,
    /// GPUs of a machine.
    pub machine: u32,
    /// How long a slow machine stays before it is found and replaced, as a share of the run.
    pub slow_found: f64,
}

/// What is left.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// Of the wall-clock time, the share that moves training forward.
    pub share: f64,
    /// Between two failures of the whole job.
    pub mtbf: f64,
    /// Between two checkpoints.
    pub interval: f64,
    /// Shares lost to checkpoints, to work that is done again, to restarts, and to slow machines.
    pub checkpoints: f64,
    pub repeated: f64,
    pub restarts: f64,
    pub slow: f64,
}

impl Default for FailureRates {
    fn default() -> FailureRates {
        FailureRates {
            gpus: 8,
            // 419 unexpected interruptions in 54 days on 16,384 GPUs (the Llama 3 report): one in 5.8 years of a GPU.
            gpu_mtbf: 54.0 * 86_400.0 * 16_384.0 / 419.0,
            checkpoint: 5.0,
            restart: 600.0,
            interval: None,
            // MegaScale found half a percent of machines slow, by about a tenth.
            slow_share: 0.005,
            slow_by: 0.10,
            machine: 8,
            slow_found: 0.02,
        }
    }
}

impl FailureRates {
    /// The share of time that is not lost.
    pub fn goodput(&self) -> Goodput {
        let mtbf = self.gpu_mtbf.max(1.0) / f64::from(self.gpus.max(1));
        let interval = self
            .interval
            .unwrap_or_else(|| best_interval(self.checkpoint, mtbf))
            .max(1e-3);
        // Work and its checkpoint, until one is through; failures are a Poisson process, so the expected time for a stretch that must not be
        // interrupted is (e^(stretch / mtbf) − 1) · (mtbf + restart).
        let stretch = interval + self.checkpoint;
        let expected = (stretch / mtbf).min(500.0).exp_m1() * (mtbf + self.restart);
        let failures = (stretch / mtbf).min(500.0).exp_m1();
        let share = interval / expected;
        let machines = f64::from(self.gpus) / f64::from(self.machine.max(1));
        let some_slow = 1.0 - (1.0 - self.slow_share.clamp(0.0, 1.0)).powf(machines);
        let slow = 1.0 - 1.0 / (1.0 + self.slow_by * some_slow * self.slow_found);
        let restarts = failures * self.restart / expected;
        let checkpoints = self.checkpoint / expected;
        Goodput {
            share: share * (1.0 - slow),
            mtbf,
            interval,
            checkpoints,
            repeated: (1.0 - share - restarts - checkpoints).max(0.0),
            restarts,
            slow,
        }
    }
}

/// Daly's interval: Young's √(2 C M) with the next terms, and M where checkpoints take longer than half of it.
pub fn best_interval(checkpoint: f64, mtbf: f64) -> f64 {
    if checkpoint <= 0.0 {
        return mtbf / 100.0;
    }
    if checkpoint >= 2.0 * mtbf {
        return mtbf;
    }
    let ratio = (checkpoint / (2.0 * mtbf)).sqrt();
    (2.0 * checkpoint * mtbf).sqrt() * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - checkpoint
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_interval_is_youngs_where_checkpoints_are_short() {
        let interval = best_interval(1.0, 100_000.0);
        assert!((interval / (2.0f64 * 100_000.0).sqrt() - 1.0).abs() < 0.01);
    }

    #[test]
    fn without_failures_only_checkpoints_cost() {
        let faults = FailureRates {
            gpu_mtbf: 1e18,
            interval: Some(1000.0),
            slow_share: 0.0,
            ..FailureRates::default()
        };
        let goodput = faults.goodput();
        assert!((goodput.share - 1000.0 / 1005.0).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn no_interval_is_much_better_than_the_best(gpus in 1u32..1_000_000, checkpoint in 1.0f64..120.0, factor in 0.1f64..10.0) {
            let faults = FailureRates { gpus, checkpoint, ..FailureRates::default() };
            let best = faults.goodput();
            let other = FailureRates { interval: Some(best.interval * factor), ..faults }.goodput();
            prop_assert!(other.share <= best.share * 1.002);
        }

        #[test]
        fn shares_are_shares(gpus in 1u32..10_000_000, checkpoint in 0.0f64..1e4, restart in 0.0f64..1e5) {
            let goodput = FailureRates { gpus, checkpoint, restart, ..FailureRates::default() }.goodput();
            for share in [goodput.share, goodput.checkpoints, goodput.repeated, goodput.restarts, goodput.slow] {
                prop_assert!((0.0..=1.0).contains(&share), "{goodput:?}");
            }
        }
    }
}
