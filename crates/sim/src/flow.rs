//! The network as flows: every message is a fluid that shares links fairly with all others, and ends when its last byte has passed.
//!
//! What runs is a [`Program`] of `plan`, compiled and executed as communicators execute it. Or a list of [`Transfer`]s. Rates are max-min fair, and solved again only where
//! something has changed. Large programs are folded first: ranks that do the same in the same place are one *class*, simulated
//! once, and the rates of their flows are the same because nothing tells them apart. Whether ranks are alike is looked at, not
//! assumed; where they are not, every rank stands for itself.
//!
//! ```
//! use weft_plan::algorithms::Ring;
//! use weft_model::fabric::{Cluster, Fabric, Wire};
//! use weft_plan::{Bytes, Collective, Problem, Picos};
//! use weft_sim::flow::{self, FlowOptions};
//! let wire = Wire { bandwidth: "100 GB/s".parse()?, latency: "1 µs".parse()? };
//! let fabric = Fabric::SingleSwitch { ports: 4, wire };
//! let topology = Cluster { node_ranks: 1, node_ports: 1, scale_up: None, fabric }.build()?;
//! let problem = Problem::new(Collective::AllReduce, 4);
//! let ring = Ring::new(problem).unwrap();
//! let report = flow::run_program(&topology, &problem, &ring, Bytes(4_000_000), &FlowOptions::default())?;
//! // Six steps of a megabyte: 10 µs each, and twice the latency of a link.
//! assert_eq!(report.time, Picos::from_us(72));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod list;
pub(crate) mod live;
mod program;
mod report;
mod solver;
mod ways;

use thiserror::Error;
use weft_model::fabric::{Routing, Topology};
use weft_plan::collective::Problem;
use weft_plan::schedule::Program;
use weft_plan::{Bandwidth, Bytes, Picos};

use crate::checks::RunError;
use crate::execution::Eager;
use crate::traffic::{LinkFault, Transfer};

pub use report::Report;
pub(crate) use ways::mixed;

/// How the network is used.
#[derive(Clone, Debug)]
pub struct FlowOptions {
    pub routing: Routing,
    /// Of the hash that chooses among ways.
    pub seed: u64,
    /// What a message costs its ends beyond the links, once.
    pub message_overhead: Picos,
    /// Which messages go before their receiver has come to them.
    pub eager: Eager,
    /// How fast a rank reduces what has come, and copies.
    pub reduction: Bandwidth,
    pub copy: Bandwidth,
    pub faults: Vec<LinkFault>,
    /// Keep when which rank was in which step, and its messages, of so many ranks spread evenly.
    pub traced_ranks: u32,
    /// Tell what every link carried.
    pub by_link: bool,
    pub folding: Folding,
}

/// Which ranks stand for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Folding {
    /// None.
    Never,
    /// Those that nothing tells apart. Where these are too many, as in [`Folding::Rough`].
    #[default]
    Alike,
    /// Also those that do the same in every step, but wait for it in other orders.
    Rough,
}

impl Default for FlowOptions {
    fn default() -> FlowOptions {
        FlowOptions {
            routing: Routing::Spray,
            seed: 0,
            message_overhead: Picos::ZERO,
            eager: Eager::default(),
            reduction: Bandwidth::MAX,
            copy: Bandwidth::MAX,
            faults: Vec::new(),
            traced_ranks: 0,
            by_link: false,
            folding: Folding::Alike,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FlowError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(
        "{ranks} ranks in {steps} steps are too many to be followed one by one, and they are not alike enough to be folded"
    )]
    TooLarge { ranks: u32, steps: u32 },
}

/// Runs a program on the first ranks of a topology, for `bytes` in the larger of a rank's buffers. Blocks and pieces are of equal size. The
/// program must have been verified: a slice out of bounds is a panic.
pub fn run_program(
    topology: &Topology,
    problem: &Problem,
    program: &dyn Program,
    bytes: Bytes,
    options: &FlowOptions,
) -> Result<Report, FlowError> {
    program::run(topology, problem, program, bytes, options)
}

/// Runs transfers that do not wait for each other, and tells when each has ended.
pub fn run_transfers(
    topology: &Topology,
    transfers: &[Transfer],
    options: &FlowOptions,
) -> Result<(Report, Vec<Picos>), FlowError> {
    list::run(topology, transfers, options)
}

#[cfg(test)]
mod tests;
