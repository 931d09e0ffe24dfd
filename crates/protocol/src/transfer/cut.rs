//! Where a leg is cut into parts that a lane can carry.

use crate::leg::Leg;

/// What one part may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartLimits {
    pub max_bytes: u64,
    /// Runs of both sides together. A part can always hold one run of each side, so fewer than eight are taken as eight.
    pub max_runs: usize,
    /// A part ends at a multiple of this, counted from where the leg begins, or where the leg ends.
    pub align: u64,
}

impl PartLimits {
    /// What fits into one and into the other.
    pub(crate) fn tightest(self, other: PartLimits) -> PartLimits {
        PartLimits {
            max_bytes: self.max_bytes.min(other.max_bytes),
            max_runs: self.max_runs.min(other.max_runs),
            align: self.align.max(other.align),
        }
    }
}

/// A run that is cut at its start and at its end becomes up to three; each side can have one such at each end of a part.
const CUT_RUNS: usize = 4;

/// The end of the part of `leg` that starts at byte `start`. Looks only at the runs within the part.
///
/// # Panics
/// Where `start` lies past the end of the leg.
pub fn cut(leg: &Leg, start: u64, limits: PartLimits) -> u64 {
    assert!(start <= leg.bytes(), "a part that starts past its leg");
    // The leg's runs are multiples of the alignment, or the lane would not have been chosen; so only the length has to be rounded.
    let align = limits.align.max(1);
    let max_bytes = (limits.max_bytes - limits.max_bytes % align).max(align);
    let end = leg.bytes().min(start.saturating_add(max_bytes));
    let (near, far) = (leg.local_spans(), leg.remote_spans());
    let room = limits.max_runs.max(2 * CUT_RUNS) - CUT_RUNS;
    if near.runs().len() + far.runs().len() <= room {
        return end;
    }
    let (mut near_run, mut far_run) = (near.run_at(start), far.run_at(start));
    let mut runs = 2;
    loop {
        let (near_end, far_end) = (near.run_end(near_run), far.run_end(far_run));
        let boundary = near_end.min(far_end);
        if boundary >= end {
            return end;
        }
        if near_end == boundary {
            near_run += 1;
            runs += 1;
        }
        if far_end == boundary {
            far_run += 1;
            runs += 1;
        }
        if runs > room {
            return boundary;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use weft_plan::{Place, Run, Spans};

    use super::*;
    use crate::memory::VecMemory;
    use crate::region::{Access, Epoch, Region, RegionKey, RemoteRegion};

    const KEY: RegionKey = RegionKey {
        epoch: Epoch(1),
        slot: 0,
        secret: 0,
    };

    fn leg(near: Spans, far: Spans) -> Leg {
        let local = Region {
            key: KEY,
            memory: Arc::new(VecMemory::zeroed(1 << 20)),
            place: Place::Dram { numa: None },
            access: Access::NONE,
        };
        let remote = RemoteRegion {
            key: KEY,
            len: 1 << 20,
            place: Place::Dram { numa: None },
            access: Access::READ_WRITE,
            grants: Arc::from([]),
        };
        Leg::new(local, near, remote, far).expect("a leg within its regions")
    }

    fn list(runs: &[(u64, u64, u64)], bytes: u64) -> Spans {
        let mut spans = Spans::new();
        for &(offset, len, count) in runs {
            spans.push_run(Run {
                offset,
                len,
                stride: len + 3,
                count,
            });
        }
        if spans.bytes() < bytes {
            spans.push_run(Run {
                offset: 7,
                len: bytes - spans.bytes(),
                stride: bytes,
                count: 1,
            });
        }
        spans.slice(0..bytes)
    }

    proptest! {
        #[test]
        fn parts_cover_the_leg_and_keep_the_limits(
            near in prop::collection::vec((0u64..5000, 1u64..40, 1u64..20), 0..40),
            far in prop::collection::vec((0u64..5000, 1u64..40, 1u64..20), 0..40),
            bytes in 1u64..9000,
            max_bytes in 1u64..3000,
            max_runs in 8usize..40,
        ) {
            let leg = leg(list(&near, bytes), list(&far, bytes));
            let mut at = 0;
            while at < leg.bytes() {
                let end = cut(&leg, at, PartLimits { max_bytes, max_runs, align: 1 });
                prop_assert!(end > at && end - at <= max_bytes);
                let runs = leg.local_spans().slice(at..end).runs().len() + leg.remote_spans().slice(at..end).runs().len();
                prop_assert!(runs <= max_runs, "{} runs", runs);
                at = end;
            }
            prop_assert_eq!(at, bytes);
        }
    }
}
