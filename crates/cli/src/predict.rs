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

/// Block size and batch of each probe. The first is all latency. The others are more bytes than a cache holds, because that is what
/// a cache of keys and values is, and differ in how many spans they take; what does fit a cache is faster than predicted.
const PROBES: [(u64, u64); 4] = [(4 << 10, 1), (4 << 10, 16384), (64 << 10, 1024), (64 << 20, 1)];

/// The region that the probes need.
pub const PROBE_BYTES: u64 = 64 << 20;

/// Where the blocks of a probe lie, which should be where those lie that are to be predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Side by side, in random order.
    Compact,
    /// At random places of the whole region.
    Wide,
}

/// Measures what the way between two ends costs, with probes of about `budget` each.
pub fn probe(pair: &Pair, direction: Direction, spread: Spread, budget: Duration) -> Result<LinkCost, Complaint> {
    let mut measured = Vec::new();
    for (bytes, count) in PROBES {
        let slots = match spread {
            Spread::Compact => count,
            Spread::Wide => pair.local.len() / bytes,
        };
        let blocks = Blocks {
            bytes,
            count,
            slots,
            seed: 1,
        };
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
