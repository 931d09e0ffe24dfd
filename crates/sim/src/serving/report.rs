//! What clients saw.

use serde::Serialize;
use weft_plan::Picos;

use crate::traffic::Hot;

/// A run in figures.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    pub requests: u32,
    /// From the first arrival to the last token.
    pub time: Picos,
    /// From a request to its first token, from each token to the next, and from a request to its last token.
    pub first_token: Percentiles,
    pub per_token: Percentiles,
    pub whole: Percentiles,
    /// From a prompt's having been read to its cache's being where it is decoded.
    pub hand_off: Percentiles,
    pub output_per_second: f64,
    /// What of all prompts' tokens was found in a cache.
    pub found: f64,
    /// The most sequences that one worker decoded at once.
    pub batch_max: u32,
    pub events: u64,
    pub flows: u64,
    /// The busiest links, where there was a network.
    pub hot: Vec<Hot>,
    /// Bytes over each link, by its number, where there was a network.
    pub carried: Vec<f64>,
}

/// In milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Percentiles {
    /// The mean first, then the percentiles from the least to the most.
    pub fn figures(&self) -> [f64; 5] {
        [self.mean, self.p50, self.p90, self.p99, self.max]
    }

    /// Of times in picoseconds.
    pub(super) fn of(mut values: Vec<u64>) -> Percentiles {
        if values.is_empty() {
            return Percentiles::default();
        }
        values.sort_unstable();
        let ms = |ps: u64| ps as f64 * 1e-9;
        let at = |part: f64| ms(values[((values.len() - 1) as f64 * part).round() as usize]);
        Percentiles {
            mean: values.iter().map(|&ps| ms(ps)).sum::<f64>() / values.len() as f64,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: at(1.0),
        }
    }
}
