//! Handing the cache of a request from the worker that has read its prompt to the one that goes on.

use crate::platform::System;
use crate::units::{Bandwidth, Bytes, Time};
use crate::workload::model::Model;

/// The network between two workers, as one hand-off sees it when it is alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    pub nics: u32,
    /// Of one NIC, each direction.
    pub rate: Bandwidth,
}

/// What is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandOff {
    /// Pages of a cache, layer by layer: small pieces, and the engines agree on them first.
    Pages { bytes: Bytes },
    /// Large blocks from a benchmark of the transfer engine, many in flight.
    Blocks { bytes: Bytes, block: Bytes },
}

/// From the last token of the prompt to the first byte, and from the last byte to its being used. Calibrated on `kv_transfer.csv`.
const AGREEMENT_US: f64 = 400.0;
/// What of the NICs' rate pieces of some KiB reach, and what large blocks do.
const PAGED: f64 = 0.72;
const STREAMED: f64 = 0.92;
/// A NIC's share of the posting threads issues one block in this time.
const POST_US: f64 = 10.5;

impl Link {
    /// The NICs of one GPU of a system, times the GPUs that take part.
    pub fn of(system: &System, gpus: u32) -> Link {
        let nics = u64::from(system.scale_out.nics) * u64::from(gpus) / u64::from(system.node.gpus.max(1));
        Link {
            nics: u32::try_from(nics).unwrap_or(u32::MAX).max(1),
            rate: system.scale_out.rate,
        }
    }

    pub fn total(&self) -> Bandwidth {
        Bandwidth::from_bytes_per_sec(self.rate.bytes_per_sec().saturating_mul(self.nics.into()))
    }

    /// What a hand-off of pages gets of the link when it is alone.
    pub fn paged(&self) -> Bandwidth {
        Bandwidth::from_bytes_per_sec((self.total().bytes_per_sec() as f64 * PAGED) as u64)
    }
}

impl HandOff {
    /// The fixed part of a hand-off of pages, during which no link is used.
    pub fn agreement() -> Time {
        Time::from_ns((AGREEMENT_US * 1e3) as u64)
    }

    /// How long it takes on an idle link.
    pub fn time(&self, link: &Link) -> Time {
        match *self {
            HandOff::Pages { bytes } => HandOff::agreement().saturating_add(link.paged().time_for(bytes)),
            HandOff::Blocks { bytes, block } => {
                let total = link.total().bytes_per_sec() as f64;
                let posted = block.0.max(1) as f64 * f64::from(link.nics) / (POST_US * 1e-6);
                Bandwidth::from_bytes_per_sec((total * STREAMED).min(posted) as u64).time_for(bytes)
            }
        }
    }
}

/// What a request's cache takes for each of its tokens, all GPUs together, by the model and the bytes of an element.
pub fn token_bytes(model: &Model, element: f64) -> f64 {
    model
        .stacks
        .iter()
        .filter_map(|stack| Some(f64::from(stack.layers) * stack.mixer?.cached_elements()?))
        .sum::<f64>()
        * element
}
