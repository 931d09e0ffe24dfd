//! One point: what was measured, in the terms in which collectives are compared.

use std::fmt;

use serde::Serialize;
use weft_plan::{Bytes, Picos};

use super::Way;
use crate::ends::Allocation;
use crate::exercise::Kind;
use crate::ranks::{Exercise, Measured, Tried};

/// A point as `--json` prints it. The first fields are named as other benchmarks of collectives name them, so that tables can be merged.
#[derive(Debug, Serialize)]
pub(super) struct Figure {
    bench: &'static str,
    #[serde(rename = "impl")]
    implementation: String,
    pub(super) op: &'static str,
    pub(super) dtype: String,
    pub(super) bytes: u64,
    pub(super) ranks: usize,
    iters: u64,
    pub(super) us_med: f64,
    us_min: f64,
    us_runs: Vec<f64>,
    p50_us: f64,
    p99_us: f64,
    #[serde(rename = "algbw_GBps")]
    algorithm_bandwidth: f64,
    #[serde(rename = "busbw_GBps")]
    bus_bandwidth: f64,
    #[serde(rename = "busbw_best_GBps")]
    bus_bandwidth_best: f64,
    pub(super) ok: bool,
    cpu_cores: f64,
    load1: f64,
    pub(super) transport: &'static str,
    pub(super) buffers: Allocation,
    in_place: bool,
    pub(super) algorithm: String,
    /// By the communicator, which takes another one for another size.
    #[serde(skip)]
    is_chosen: bool,
    pub(super) predicted_us: Option<f64>,
    /// The name of the platform that the prediction is of.
    pub(super) predicted_for: String,
    measured_over_predicted: Option<f64>,
}

impl Figure {
    pub(super) fn new(
        way: Way,
        exercise: &Exercise,
        tried: &[Tried],
        iterations: u64,
        measured: &[Measured],
        predicted: Option<Picos>,
    ) -> Figure {
        let ranks = measured.len();
        let repeats = measured.iter().map(|rank| rank.mean_ns.len()).min().unwrap_or(0);
        // A repeat takes as long as its slowest rank.
        let slowest = |repeat: usize| measured.iter().map(|rank| rank.mean_ns[repeat]).fold(0.0, f64::max);
        let us_runs: Vec<f64> = (0..repeats).map(|repeat| round(slowest(repeat) / 1e3)).collect();
        let mut sorted = us_runs.clone();
        sorted.sort_by(f64::total_cmp);
        let us_med = sorted.get(repeats / 2).copied().unwrap_or(0.0);
        let us_min = sorted.first().copied().unwrap_or(0.0);
        let rate = |us: f64| {
            if us > 0.0 {
                round(exercise.bytes as f64 / us / 1e3)
            } else {
                0.0
            }
        };
        let share = bus_share(&exercise.collective, ranks as f64);
        let predicted_us = predicted.map(|time| round(time.as_secs_f64() * 1e6));
        let cpu: u64 = measured.iter().map(|rank| rank.cpu_ns).sum();
        let wall = measured.iter().map(|rank| rank.wall_ns).max().unwrap_or(0).max(1);
        let ns = |of: fn(&Measured) -> u64| measured.first().map_or(0.0, |rank| of(rank) as f64 / 1e3);
        Figure {
            bench: "coll",
            implementation: implementation(way, exercise.allocation),
            op: op(&exercise.collective),
            dtype: exercise.datatype.clone(),
            bytes: exercise.bytes,
            ranks,
            iters: iterations,
            us_med,
            us_min,
            us_runs,
            p50_us: ns(|rank| rank.p50_ns),
            p99_us: ns(|rank| rank.p99_ns),
            algorithm_bandwidth: rate(us_med),
            bus_bandwidth: round(rate(us_med) * share),
            bus_bandwidth_best: round(rate(us_min) * share),
            ok: tried.iter().all(|tried| tried.correct),
            cpu_cores: round(cpu as f64 / wall as f64),
            load1: load(),
            transport: way.name(),
            buffers: exercise.allocation,
            in_place: exercise.in_place && Kind::named(&exercise.collective).is_some_and(Kind::has_in_place),
            algorithm: tried.first().map_or(String::new(), |tried| tried.algorithm.clone()),
            is_chosen: exercise.algorithm.is_none(),
            predicted_us,
            predicted_for: String::new(),
            measured_over_predicted: predicted_us.filter(|us| *us > 0.0).map(|us| round(us_med / us)),
        }
    }

    pub(super) fn cells(&self) -> Vec<String> {
        let time = |us: f64| format!("{:.1}", Picos::from_ps((us * 1e6) as u64));
        let sized = self.bytes > 0;
        let bandwidth = |rate: f64| if sized { format!("{rate:.2}") } else { String::new() };
        vec![
            self.op.replace('_', "-"),
            self.ranks.to_string(),
            self.transport.to_string(),
            buffers(self.buffers).to_string(),
            self.dtype.clone(),
            self.algorithm.clone(),
            if sized {
                Bytes(self.bytes).to_string()
            } else {
                String::new()
            },
            time(self.us_med),
            time(self.us_min),
            time(self.p99_us),
            bandwidth(self.algorithm_bandwidth),
            bandwidth(self.bus_bandwidth),
            self.predicted_us.map_or(String::new(), time),
            self.measured_over_predicted
                .map_or(String::new(), |ratio| format!("{ratio:.2}")),
            if self.ok { "yes" } else { "NO" }.to_string(),
        ]
    }

    /// What a line in a plot stands for.
    pub(super) fn series(&self) -> String {
        let Figure {
            op,
            ranks,
            transport,
            dtype,
            ..
        } = self;
        let algorithm = if self.is_chosen {
            ""
        } else {
            &format!(", {}", self.algorithm)
        };
        format!(
            "{op}, {ranks} ranks, {transport}, {}, {dtype}{algorithm}",
            buffers(self.buffers)
        )
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} ({})", self.op, Bytes(self.bytes), self.series())
    }
}

fn buffers(allocation: Allocation) -> &'static str {
    match allocation {
        Allocation::Mapped => "mapped",
        Allocation::Foreign => "foreign",
        Allocation::Gpu => "gpu",
    }
}

fn implementation(way: Way, allocation: Allocation) -> String {
    let way = match way {
        Way::SharedMemory => "shm",
        Way::Tcp => "tcp",
        Way::Verbs => "verbs",
    };
    let foreign = match allocation {
        Allocation::Mapped => "",
        Allocation::Foreign => "-foreign",
        Allocation::Gpu => "-gpu",
    };
    format!("weft{}-{way}{foreign}", env!("CARGO_PKG_VERSION"))
}

/// As other benchmarks spell it.
fn op(collective: &str) -> &'static str {
    match collective {
        "all-reduce" => "allreduce",
        "all-gather" => "allgather",
        "reduce-scatter" => "reduce_scatter",
        "all-to-all" => "alltoall",
        "broadcast" => "broadcast",
        "reduce" => "reduce",
        "gather" => "gather",
        "scatter" => "scatter",
        _ => "barrier",
    }
}

/// How much of the size each rank's link carries.
fn bus_share(collective: &str, ranks: f64) -> f64 {
    match collective {
        "all-reduce" => 2.0 * (ranks - 1.0) / ranks,
        "all-gather" | "reduce-scatter" | "all-to-all" | "gather" | "scatter" => (ranks - 1.0) / ranks,
        _ => 1.0,
    }
}

/// The load of the machine in the last minute, without which a time says little.
fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next();
    first.and_then(|word| word.parse().ok()).unwrap_or(0.0)
}

fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeat_is_as_slow_as_its_slowest_rank() {
        let measured = |mean_ns: [f64; 3]| Measured {
            mean_ns: mean_ns.to_vec(),
            p50_ns: 1000,
            p99_ns: 2000,
            wall_ns: 100,
            cpu_ns: 100,
        };
        let tried = Tried {
            correct: true,
            algorithm: "ring".into(),
            ns: 1000,
        };
        let exercise = Exercise {
            collective: "all-reduce".into(),
            bytes: 1_000_000,
            datatype: "f32".into(),
            algorithm: None,
            schedule: None,
            deterministic: false,
            quantized: None,
            allocation: Allocation::Mapped,
            in_place: false,
            fresh: false,
        };
        let ranks = [measured([1e6, 5e6, 2e6]), measured([3e6, 1e6, 2e6])];
        let figure = Figure::new(
            Way::SharedMemory,
            &exercise,
            &[tried.clone(), tried],
            10,
            &ranks,
            Some(Picos::from_ms(2)),
        );
        assert_eq!(figure.us_runs, [3000.0, 5000.0, 2000.0]);
        assert_eq!((figure.us_med, figure.us_min), (3000.0, 2000.0));
        // A megabyte in three milliseconds, and of two ranks each sends as much as it receives.
        assert_eq!((figure.algorithm_bandwidth, figure.bus_bandwidth), (0.3333, 0.3333));
        assert_eq!(figure.measured_over_predicted, Some(1.5));
        assert_eq!(figure.cpu_cores, 2.0);
    }
}
