//! What a movement costs on a link, and a program on a platform: the one place where time is predicted from size.

mod fit;
pub mod kernels;
mod placement;
mod profile;
mod select;

use serde::{Deserialize, Serialize};

use crate::units::{Bandwidth, Bytes, Picos};

pub use fit::{Fit, FitError, Measurement, fit};
pub use placement::{CHANNELS, Placement, PlacementError};
pub use profile::{Prediction, Profile};
pub use select::{Candidate, Segment, Selector, UnknownCandidate};

/// The cost of moving bytes one way over a link, LogGP-like: `latency + per_span · spans + bytes / bandwidth`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkCost {
    /// From post to completion of an empty operation.
    pub latency: Picos,
    /// Added by each span that is not adjacent to the one before it.
    #[serde(default)]
    pub per_span: Picos,
    pub bandwidth: Bandwidth,
}

impl LinkCost {
    /// Of a way that nobody goes.
    pub const NOTHING: LinkCost = LinkCost {
        latency: Picos::ZERO,
        per_span: Picos::ZERO,
        bandwidth: Bandwidth::MAX,
    };

    /// How long a transfer of `bytes` in `spans` pieces takes on an idle link.
    pub fn time(&self, bytes: Bytes, spans: u64) -> Picos {
        let spans = Picos::from_ps(self.per_span.as_ps().saturating_mul(spans));
        self.latency
            .saturating_add(spans)
            .saturating_add(self.bandwidth.time_for(bytes))
    }
}

#[cfg(test)]
mod tests;
