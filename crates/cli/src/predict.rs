//! What to compare a measurement with: the machine's own limit, measured in the same run, and what the model says before, from
//! link costs that a few probes give and `plan` fits and applies.

use std::time::Duration;

use weft::Direction;
use weft_fabric::calibrate::{CalibrateOptions, calibrate};
use weft_plan::cost::{Measurement, fit};
use weft_plan::{Bandwidth, Bytes, LinkCost};

use crate::complaint::{Complain, Complaint, Exit};
use crate::pair::{Pair, Plan, Samples};
use crate::partner::Blocks;

/// Block size and batch of each probe: three unknowns, so three sizes, of which the first is mostly latency, the second mostly
/// spans, and the third nothing but bytes, more of them than caches hold.
const PROBES: [(u64, u64); 3] = [(4 << 10, 1), (4 << 10, 2048), (64 << 20, 1)];

/// The region that the probes need.
pub const PROBE_BYTES: u64 = 64 << 20;

/// Measures what the way between two ends costs, with probes of about `budget` each.
pub fn probe(pair: &Pair, direction: Direction, budget: Duration) -> Result<LinkCost, Complaint> {
    let mut measured = Vec::new();
    for (bytes, count) in PROBES {
        let blocks = Blocks { bytes, count, seed: 1 };
        let prepared = pair.prepare(Plan::new(direction, blocks.near(), blocks.far()))?;
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
