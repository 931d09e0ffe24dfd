//! `weft bench transfer`: how fast memory moves between this process and one that it starts, or one on another host.

mod idle;
mod listen;
mod matrix;
mod notifications;
mod perftest;

use std::net::SocketAddr;

use clap::{Args, ValueEnum};
use serde::Serialize;
use weft::Direction;
use weft_plan::Bytes;

use super::print_json;
use crate::complaint::{Complaint, Exit};
use crate::ends::Overrides;
use crate::pair::Way;

/// The seeds of the partner's bytes and of ours.
const FAR_SEED: u64 = 0xfa;
const NEAR_SEED: u64 = 0xea;

/// Measure transfers between two processes of this machine, or two machines
///
/// Blocks stand in random order at both ends, so that nothing merges, as in a paged KV cache. Every cell of the matrix is
/// verified byte by byte at the receiving end before it is measured. Times are from post to done.
///
/// With --mode it measures what the programs of perftest measure, in their terms: a table a size.
#[derive(Debug, Args)]
pub struct Transfer {
    /// Which ways to measure
    #[arg(long, value_name = "LIST", value_delimiter = ',',
          default_values = ["shared_memory", "shared_memory.foreign", "tcp"])]
    transport: Vec<Way>,
    /// Which directions: a read pulls from the other process, a write pushes to it
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["read", "write"])]
    op: Vec<OpChoice>,
    /// Block sizes
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["4KiB", "64KiB", "1MiB", "64MiB"])]
    block: Vec<Bytes>,
    /// Blocks in one transfer
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["1", "64", "1024"])]
    batch: Vec<u64>,
    /// Leave out transfers that are larger than this
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    max_bytes: Bytes,
    /// How long to measure each cell
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3)]
    seconds: f64,
    /// Compare checksums of the bytes at both ends, as part of every transfer
    #[arg(long)]
    checksum: bool,
    /// Measure the round trip of a notification instead
    #[arg(long, conflicts_with = "idle")]
    notify: bool,
    /// Measure the CPU time of two connected agents that do nothing for ten seconds instead
    #[arg(long)]
    idle: bool,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    perftest: perftest::Flags,
    #[command(flatten)]
    hosts: Hosts,
}

/// Two hosts instead of two processes. Both need the same secret (WEFT_SECRET).
#[derive(Debug, Args)]
struct Hosts {
    /// Be the other end for whoever connects, until interrupted
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        conflicts_with = "connect",
        help_heading = "Between two hosts"
    )]
    listen: Option<SocketAddr>,
    /// Measure between this host and one where `weft bench transfer --listen` runs
    #[arg(long, value_name = "HOST:PORT", help_heading = "Between two hosts")]
    connect: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum OpChoice {
    Read,
    Write,
}

impl OpChoice {
    fn direction(self) -> Direction {
        match self {
            OpChoice::Read => Direction::Read,
            OpChoice::Write => Direction::Write,
        }
    }
    fn name(self) -> &'static str {
        match self {
            OpChoice::Read => "read",
            OpChoice::Write => "write",
        }
    }
}

impl Transfer {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        if !(0.0..=3600.0).contains(&self.seconds) {
            return Err(Complaint::new(Exit::Usage, "--seconds takes a number from 0 to 3600."));
        }
        let overrides = &overrides.without_log()?;
        if let Some(address) = self.hosts.listen {
            return listen::serve(address, overrides);
        }
        if self.notify {
            return self.notifications(overrides);
        }
        if self.idle {
            return self.idle(overrides);
        }
        match self.perftest.mode() {
            Some(mode) => self.perftest(mode, overrides),
            None => self.matrix(overrides),
        }
    }

    /// Where the other end listens, if it is not started here.
    fn connect(&self) -> Option<&str> {
        self.hosts.connect.as_deref()
    }
}
