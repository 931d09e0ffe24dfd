//! What to compare a measurement with: the machine's own limit, measured in the same run, and what the model says before, from
//! link costs that a few probes give and `plan` fits and applies.

use std::time::Duration;

use weft::Direction;
use weft_fabric::calibrate::{CalibrateOptions, calibrate};
use weft_plan::cost::{Measurement, fit};
use weft_plan::{Bandwidth, Bytes, LinkCost};

use crate::complaint::{Complain, Complaint, Exit};
use crate::pair::{Pair, Samples};
use crate::partner::Blocks;

/// Block size and batch of each probe: few enough to be quick, different enough to tell latency, spans and bytes apart.
const PROBES: [(u64, u64); 5] = [
    (4 << 10, 1),
    (4 << 10, 32),
    (4 << 10, 2048),
    (1 << 20, 1),
    (32 << 20, 1),
];

/// The region that the probes need.
pub const PROBE_BYTES: u64 = 32 << 20;

/// Measures what the way between two ends costs, with probes of about `budget` each.
pub fn probe(pair: &Pair, direction: Direction, budget: Duration) -> Result<LinkCost, Complaint> {
    let mut measured = Vec::new();
    for (bytes, count) in PROBES {
        let blocks = Blocks { bytes, count, seed: 1 };
        let prepared = pair.prepare(direction, blocks.near(), blocks.far(), false)?;
        measured.push(Measurement {
            bytes: Bytes(blocks.total()),
            spans: count,
            time: Samples::take(&prepared, budget)?.median().into(),
        });
    }
    let fit = fit(&measured).or_complain(Exit::Failed, || "The probes determine no cost.".to_string())?;
    Ok(fit.cost)
}

/// How fast one thread of this machine copies memory that no cache holds.
pub fn memcpy_limit(budget: Duration) -> Bandwidth {
    let options = CalibrateOptions {
        budget: budget.into(),
        ..CalibrateOptions::default()
    };
    calibrate(&options).memcpy.streaming
}
