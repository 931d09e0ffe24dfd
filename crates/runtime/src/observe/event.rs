//! The vocabulary: everything that an agent reports.

use std::fmt;
use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::session::SessionLoss;
use weft_protocol::{Direction, Failure, Loss};

/// Something that happened to an agent. Peers are named as they named themselves.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    AgentStarted {
        address: String,
    },
    AgentStopped,
    SessionEstablished {
        peer: Arc<str>,
    },
    /// One of the two ends has closed it.
    SessionClosed {
        peer: Arc<str>,
        cause: SessionLoss,
    },
    SessionLost {
        peer: Arc<str>,
        cause: SessionLoss,
    },
    PathOpened {
        peer: Arc<str>,
        transport: &'static str,
    },
    /// It has gone with its session, which was closed.
    PathClosed {
        peer: Arc<str>,
        transport: &'static str,
    },
    PathLost {
        peer: Arc<str>,
        transport: &'static str,
        loss: Loss,
    },
    TransferSubmitted {
        id: u64,
        peer: Arc<str>,
        direction: Direction,
        bytes: u64,
    },
    TransferEnded {
        id: u64,
        peer: Arc<str>,
        /// The transport that carried most of it, or that failed.
        transport: &'static str,
        direction: Direction,
        /// How many bytes moved, which is all of them only where the outcome says so.
        bytes: u64,
        started: Time,
        ended: Time,
        outcome: Outcome,
    },
    NotificationSent {
        peer: Arc<str>,
        bytes: u64,
    },
    NotificationReceived {
        peer: Arc<str>,
        bytes: u64,
    },
    /// A collective of another library that is being watched, as this rank has seen it.
    CollectiveEnded {
        /// What it is called there, from a fixed set.
        function: &'static str,
        /// By what it ran, as in `ring/simple`.
        way: Arc<str>,
        bytes: u64,
        /// What crossed the slowest link, by which algorithms and sizes are compared.
        bus_bytes: u64,
        started: Time,
        ended: Time,
    },
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Failed(Failure),
}

impl Outcome {
    /// One word, from a fixed set, for metrics.
    pub fn word(self) -> &'static str {
        match self {
            Outcome::Done => "done",
            Outcome::Failed(Failure::Cancelled) => "cancelled",
            Outcome::Failed(Failure::Expired) => "expired",
            Outcome::Failed(Failure::Refused(_)) => "refused",
            Outcome::Failed(Failure::PathLost { .. }) => "path_lost",
            Outcome::Failed(Failure::ChecksumMismatch) => "checksum_mismatch",
            Outcome::Failed(_) => "failed",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done => f.write_str("done"),
            Outcome::Failed(failure) => failure.fmt(f),
        }
    }
}

pub(super) fn word(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}
