//! How long a collective between GPUs takes, in closed form.
//!
//! Ranks are alike, so a collective is described by what one of them does: how many hops are on the way of its last byte, and how many
//! bytes its busiest link carries. That makes a million ranks as cheap as two. The structure is that of the schedules in
//! [`algorithms`](weft_plan::algorithms), against which [`DeviceWork`] is tested; what a hop and a byte cost depends on the protocol, and is a
//! constant of the [`System`]. Which algorithm and protocol run is decided as NCCL decides it (`tuner`), from NCCL's own figures: its choice is
//! not always the fastest, and a prediction must follow it.
//!
//! ```
//! use weft_model::device::{DeviceModel, DeviceOptions};
//! use weft_model::system::System;
//! use weft_plan::{Bytes, Collective};
//! let system = System::named("dgx-h100")?;
//! let estimate = DeviceModel::of(&system, 8)?.predict(Collective::AllReduce, Bytes(256 << 20), &DeviceOptions::default())?;
//! assert_eq!(estimate.algorithm.name(), "NVLS");
//! // A million GPUs are no more work.
//! let ring = DeviceOptions::parse("NCCL_ALGO=Ring NCCL_PROTO=Simple");
//! let estimate = DeviceModel::of(&system, 1 << 20)?.predict(Collective::AllReduce, Bytes(1 << 30), &ring)?;
//! assert_eq!(estimate.hops, 2 * ((1 << 20) - 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod experts;
mod options;
mod price;
mod reduce_kernel;
mod tuner;
mod work;

use std::fmt;

use thiserror::Error;

use crate::system::System;
use weft_plan::algorithms::Grid;
use weft_plan::collective::Collective;
use weft_plan::units::{Bytes, Picos};

pub use experts::{ExpertLoad, TokenDirection, TokenExchange};
pub use options::DeviceOptions;
pub use reduce_kernel::ReduceKernel;
pub use work::DeviceWork;

/// No group is larger.
const MAX_RANKS: u32 = 1 << 24;

/// Ranks of one group on a system, one a GPU.
#[derive(Clone, Copy, Debug)]
pub struct DeviceModel<'a> {
    system: &'a System,
    /// Scale-up domains, and how many of the ranks are in each.
    grid: Grid,
}

/// What a collective is done by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DeviceAlgorithm {
    Ring,
    /// A chain within a domain, two complementary binary trees between them.
    Tree,
    /// Reduction and multicast in the switches of one domain.
    Nvls,
    /// The same, and trees between the domains.
    NvlsTree,
    /// Parallel aggregated trees, between ranks that are each alone in their domain.
    Pat,
    /// Reduce-scatter within a domain, all-reduce along each rail, all-gather within.
    Rail,
    /// Every rank sends to every other one.
    Exchange,
}

/// How bytes are known to have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    Ll,
    Ll128,
    Simple,
}

/// How long, by what, and what makes it so long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceEstimate {
    pub time: Picos,
    pub algorithm: DeviceAlgorithm,
    pub protocol: Protocol,
    /// On the way of the last byte.
    pub hops: u32,
    /// Launch, hops and filling.
    pub latency: Picos,
    /// Bytes on the busiest link, and copies.
    pub transfer: Picos,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DeviceModelError {
    #[error("a group of {ranks} ranks; there are 1 to {MAX_RANKS}")]
    Ranks { ranks: u32 },
    #[error("{local} ranks are not within a domain of {domain} GPUs")]
    Domain { local: u32, domain: u32 },
    #[error("{collective} among {ranks} ranks is done by none of the algorithms that are allowed")]
    NoWay { collective: &'static str, ranks: u32 },
    #[error("nothing is known of such a kernel on {system}")]
    NoKernel { system: String },
}

impl<'a> DeviceModel<'a> {
    /// Ranks that fill one domain after the other, equally many in each.
    pub fn of(system: &'a System, ranks: u32) -> Result<DeviceModel<'a>, DeviceModelError> {
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(DeviceModelError::Ranks { ranks });
        }
        let domain = system.scale_up.domain.max(1);
        let nodes = (ranks.div_ceil(domain)..=ranks)
            .find(|nodes| ranks.is_multiple_of(*nodes))
            .unwrap_or(ranks);
        let local = ranks / nodes;
        Ok(DeviceModel {
            system,
            grid: Grid { nodes, local },
        })
    }

    /// Ranks of which `grid.local` are in each of `grid.nodes` domains.
    pub fn placed(system: &'a System, grid: Grid) -> Result<DeviceModel<'a>, DeviceModelError> {
        let ranks = grid.ranks();
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(DeviceModelError::Ranks { ranks });
        }
        let (local, domain) = (grid.local, system.scale_up.domain);
        match local > domain {
            true => Err(DeviceModelError::Domain { local, domain }),
            false => Ok(DeviceModel { system, grid }),
        }
    }

    pub fn grid(&self) -> Grid {
        self.grid
    }

    pub fn system(&self) -> &'a System {
        self.system
    }

    /// How long the collective takes for `bytes`: those of the larger of a rank's buffers, as is usual when collectives are measured.
    pub fn predict(
        &self,
        collective: Collective,
        bytes: Bytes,
        options: &DeviceOptions,
    ) -> Result<DeviceEstimate, DeviceModelError> {
        let bytes = match collective {
            Collective::Barrier => 4.0,
            _ => bytes.0 as f64,
        };
        let ways = DeviceAlgorithm::ALL.iter().flat_map(|a| Protocol::ALL.map(|p| (*a, p)));
        let chosen = ways
            .filter(|(algorithm, protocol)| options.allow(*algorithm, *protocol))
            .filter_map(|(algorithm, protocol)| {
                let expected = tuner::expected(self, collective, bytes, (algorithm, protocol), options)?;
                Some((algorithm, protocol, expected))
            })
            .min_by(|a, b| a.2.total_cmp(&b.2));
        let Some((algorithm, protocol, _)) = chosen else {
            return Err(DeviceModelError::NoWay {
                collective: collective.name(),
                ranks: self.grid.ranks(),
            });
        };
        Ok(price::price(self, collective, bytes, algorithm, protocol))
    }
}

impl DeviceAlgorithm {
    pub const ALL: [DeviceAlgorithm; 7] = [
        DeviceAlgorithm::Ring,
        DeviceAlgorithm::Tree,
        DeviceAlgorithm::Nvls,
        DeviceAlgorithm::NvlsTree,
        DeviceAlgorithm::Pat,
        DeviceAlgorithm::Rail,
        DeviceAlgorithm::Exchange,
    ];

    /// As NCCL calls it, where it has it.
    pub fn name(self) -> &'static str {
        match self {
            DeviceAlgorithm::Ring => "Ring",
            DeviceAlgorithm::Tree => "Tree",
            DeviceAlgorithm::Nvls => "NVLS",
            DeviceAlgorithm::NvlsTree => "NVLSTree",
            DeviceAlgorithm::Pat => "PAT",
            DeviceAlgorithm::Rail => "Rail",
            DeviceAlgorithm::Exchange => "Exchange",
        }
    }
}

impl Protocol {
    pub const ALL: [Protocol; 3] = [Protocol::Ll, Protocol::Ll128, Protocol::Simple];

    pub fn name(self) -> &'static str {
        match self {
            Protocol::Ll => "LL",
            Protocol::Ll128 => "LL128",
            Protocol::Simple => "Simple",
        }
    }
}

impl fmt::Display for DeviceAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
