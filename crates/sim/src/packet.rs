//! The network as packets: queues at every link, and transports that feel them.
//!
//! A packet is stored and forwarded at every switch; a link has a queue for data and one for what controls it, which goes first. What
//! happens when a data queue is full is the [`Overflow`]: the packet is lost, or trimmed to its header, or (with pause frames) does not happen because
//! the link before was told to stop. Two transports run over it: [`Transport::Pull`], in which the receiver asks for packets at the pace of its
//! own link and every packet may take another way, and [`Transport::Rate`], in which the sender adapts its rate to marks of congestion, as
//! RoCE with DCQCN does.
//!
//! ```
//! use weft_model::fabric::{Cluster, Fabric, Wire};
//! use weft_plan::{Bytes, Rank, Picos};
//! use weft_sim::traffic::Transfer;
//! use weft_sim::packet::{self, PacketOptions};
//! let wire = Wire { bandwidth: "100 Gb/s".parse()?, latency: "1 µs".parse()? };
//! let fabric = Fabric::SingleSwitch { ports: 2, wire };
//! let topology = Cluster { node_ranks: 1, node_ports: 1, scale_up: None, fabric }.build()?;
//! let one = Transfer { from: Rank(0), to: Rank(1), bytes: Bytes(4096), start: Picos::ZERO };
//! let report = packet::run_transfers(&topology, &[one], &PacketOptions::default())?;
//! // Twice onto a wire, and twice along it.
//! assert_eq!(report.ends, [Picos::from_ns(2 * 332 + 2000)]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub(crate) mod datagrams;
mod dcqcn;
mod drive;
mod network;
mod transport;
mod wheel;

use thiserror::Error;
use weft_model::fabric::{Routing, Topology};
use weft_plan::collective::Problem;
use weft_plan::schedule::Program;
use weft_plan::{Bandwidth, Bytes, Picos};

use crate::checks::RunError;
use crate::execution::Eager;
use crate::traffic::{Hot, LinkFault, MessageSpan, StepSpan, Transfer};

pub use dcqcn::Dcqcn;

/// How packets are sent, and what switches do with them.
#[derive(Clone, Debug)]
pub struct PacketOptions {
    pub routing: Routing,
    pub transport: Transport,
    pub overflow: Overflow,
    /// Bytes of a message that a packet carries at most, and what it carries besides.
    pub payload: u32,
    pub header: u32,
    /// Bytes of data that may wait for a link.
    pub queue: u32,
    pub seed: u64,
    /// How likely a data packet is to be lost at each link.
    pub loss: f64,
    /// After how long without news a sender sends again.
    pub timeout: Picos,
    /// What a message costs its ends beyond the links, once.
    pub message_overhead: Picos,
    /// Which messages go before their receiver has come to them.
    pub eager: Eager,
    pub reduction: Bandwidth,
    pub copy: Bandwidth,
    pub faults: Vec<LinkFault>,
    pub traced_ranks: u32,
    /// Tell what every link carried.
    pub by_link: bool,
}

/// Who decides when the next packet goes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Transport {
    /// A first window goes at once; then the receiver asks for each packet, at the pace of its link. For spraying and trimming.
    Pull {
        /// Packets of the first window; a quarter more than fill the way there and back where nothing is said.
        window: Option<u32>,
    },
    /// The sender has a rate, which marks of congestion lower.
    Rate {
        recovery: Recovery,
        /// No adaptation where nothing is said: the rate is that of the link.
        dcqcn: Option<Dcqcn>,
    },
}

/// What is sent again after a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Everything from the lost packet on: the receiver takes packets in order only.
    GoBackN,
    /// The lost packets.
    SelectiveRepeat,
}

/// What happens to data that finds its queue full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    Drop,
    /// The header goes on, with control, and tells the receiver.
    Trim,
    /// Queues do not fill: a switch that holds more than so many bytes of a link tells it to stop, and to go on at half of that.
    Pause {
        above: u32,
    },
}

impl Default for PacketOptions {
    fn default() -> PacketOptions {
        PacketOptions {
            routing: Routing::Spray,
            transport: Transport::Pull { window: None },
            overflow: Overflow::Trim,
            payload: 4096,
            header: 54,
            queue: 12 * 4150,
            seed: 1,
            loss: 0.0,
            timeout: Picos::from_us(500),
            message_overhead: Picos::ZERO,
            eager: Eager::default(),
            reduction: Bandwidth::MAX,
            copy: Bandwidth::MAX,
            faults: Vec::new(),
            traced_ranks: 0,
            by_link: false,
        }
    }
}

impl PacketOptions {
    /// RoCE as it is usually run: pause frames, DCQCN, go-back-N, one way a flow.
    pub fn roce() -> PacketOptions {
        PacketOptions {
            routing: Routing::Ecmp,
            transport: Transport::Rate {
                recovery: Recovery::GoBackN,
                dcqcn: Some(Dcqcn::default()),
            },
            overflow: Overflow::Pause { above: 100_000 },
            queue: 4 << 20,
            ..PacketOptions::default()
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PacketError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("{field}: {value} is not between {least} and {most}")]
    OutOfBounds {
        field: &'static str,
        value: u64,
        least: u64,
        most: u64,
    },
    /// Packets that come out of order would be taken for losses.
    #[error("go-back-N takes packets in order, and sprayed packets come out of order")]
    SprayedGoBackN,
    #[error("more than {most} packets, links or flows at once")]
    TooLarge { most: u64 },
}

/// How long it took, and what happened to packets.
#[derive(Clone, Debug, PartialEq)]
pub struct PacketReport {
    pub time: Picos,
    /// Of each transfer of a list; none of a program.
    pub ends: Vec<Picos>,
    /// Messages of a program, or transfers.
    pub messages: u64,
    pub events: u64,
    /// Data packets sent, those sent again included.
    pub packets: u64,
    pub again: u64,
    pub trimmed: u64,
    pub dropped: u64,
    pub marked: u64,
    pub pauses: u64,
    /// The longest queue of data.
    pub queue_max: Bytes,
    pub hot: Vec<Hot>,
    pub spans: Vec<StepSpan>,
    pub message_spans: Vec<MessageSpan>,
    /// Bytes over each link, headers included, by its number; none where nobody asked for them.
    pub carried: Vec<f64>,
}

/// Runs transfers that do not wait for each other.
pub fn run_transfers(
    topology: &Topology,
    transfers: &[Transfer],
    options: &PacketOptions,
) -> Result<PacketReport, PacketError> {
    drive::transfers(topology, transfers, options)
}

/// Runs a program, every message a flow of packets. It must have been verified: a slice out of bounds is a panic.
pub fn run_program(
    topology: &Topology,
    problem: &Problem,
    program: &dyn Program,
    bytes: Bytes,
    options: &PacketOptions,
) -> Result<PacketReport, PacketError> {
    drive::program(topology, problem, program, bytes, options)
}

#[cfg(test)]
mod tests;
