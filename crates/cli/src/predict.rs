//! What the model says before the measurement: link costs from three probes, then `plan`'s own formula.

use std::time::Duration;

use weft::Direction;
use weft_plan::{Bandwidth, Bytes, LinkCost, Spans, Time};

use crate::complaint::Complaint;
use crate::pair::{Pair, Samples};
use crate::partner::Blocks;

const SMALL_BYTES: u64 = 4096;
const SMALL_COUNT: u64 = 1024;
const LARGE_BYTES: u64 = 16 << 20;

/// The region that the probes need.
pub const PROBE_BYTES: u64 = LARGE_BYTES;

/// Measures latency, cost per span and bandwidth of the way between two ends, with three probes of about `budget` each.
pub fn probe(pair: &Pair, direction: Direction, budget: Duration) -> Result<LinkCost, Complaint> {
    let time = |near: Spans, far: Spans| -> Result<Time, Complaint> {
        let prepared = pair.prepare(direction, near, far, false)?;
        Ok(Samples::take(&prepared, budget)?.median().into())
    };
    let whole = |bytes| (Spans::contiguous(0, bytes), Spans::contiguous(0, bytes));
    let blocks = Blocks {
        bytes: SMALL_BYTES,
        count: SMALL_COUNT,
        seed: 1,
    };
    let (near, far) = whole(SMALL_BYTES);
    let one_small = time(near, far)?;
    let many_small = time(blocks.near(), blocks.far())?;
    let (near, far) = whole(LARGE_BYTES);
    let one_large = time(near, far)?;
    Ok(solve(one_small, many_small, one_large))
}

/// Three equations `latency + per_span · spans + bytes / bandwidth`, three unknowns. Noise may make a cost negative; it is zero then.
fn solve(one_small: Time, many_small: Time, one_large: Time) -> LinkCost {
    let per_byte_ps = one_large.saturating_sub(one_small).as_ps() as f64 / (LARGE_BYTES - SMALL_BYTES) as f64;
    let bandwidth = Bandwidth::from_bytes_per_sec((1e12 / per_byte_ps.max(1.0)) as u64);
    let more = SMALL_COUNT - 1;
    let per_span = many_small
        .saturating_sub(one_small)
        .saturating_sub(bandwidth.time_for(Bytes(more * SMALL_BYTES)));
    let per_span = Time::from_ps(per_span.as_ps() / more);
    let latency = one_small.saturating_sub(per_span).saturating_sub(bandwidth.time_for(Bytes(SMALL_BYTES)));
    LinkCost {
        latency,
        per_span,
        bandwidth,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_of_an_exact_link_give_its_cost_back() {
        let cost = LinkCost {
            latency: Time::from_us(9),
            per_span: Time::from_ns(120),
            bandwidth: Bandwidth::from_bytes_per_sec(4_000_000_000),
        };
        let found = solve(
            cost.time(Bytes(SMALL_BYTES), 1),
            cost.time(Bytes(SMALL_BYTES * SMALL_COUNT), SMALL_COUNT),
            cost.time(Bytes(LARGE_BYTES), 1),
        );
        let close = |a: u64, b: u64| a.abs_diff(b) * 1000 <= b;
        assert!(close(found.latency.as_ps(), cost.latency.as_ps()), "{found:?}");
        assert!(close(found.per_span.as_ps(), cost.per_span.as_ps()), "{found:?}");
        assert!(close(found.bandwidth.bytes_per_sec(), cost.bandwidth.bytes_per_sec()), "{found:?}");
    }
}
