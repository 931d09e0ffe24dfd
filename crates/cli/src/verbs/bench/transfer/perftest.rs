//! What the programs of perftest measure, in their terms, over any transport: `ib_write_bw`, `ib_read_bw`, `ib_write_lat`,
//! `ib_read_lat`, and `ib_send_lat` for notifications.

mod bandwidth;
mod counters;
mod figures;
mod read_latency;
mod send_latency;
mod write_latency;

use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde::Serialize;
use weft_plan::Bytes;

use super::{OpChoice, Transfer, print_json};
use crate::complaint::{Complaint, Exit};
use crate::ends::Overrides;
use crate::pair::Way;

use figures::Figures;

/// The sizes of `--sizes all`: powers of two, as `perftest -a` takes them.
const ALL_SIZES: [u32; 2] = [1, 23];
const BANDWIDTH_BYTES: u64 = 64 << 10;
const LATENCY_BYTES: u64 = 8;
/// Iterations before the measured ones, and at least so many of those where the time decides.
const WARM_UPS: u64 = 10;
const ITERATIONS_MIN: u64 = 20;
const ITERATIONS_MAX: u64 = 1_000_000;

/// In the terms of perftest
#[derive(Debug, Args)]
#[command(next_help_heading = "In the terms of perftest")]
pub struct Flags {
    /// What to measure, over each of --transport
    #[arg(long, value_name = "MODE")]
    mode: Option<Mode>,
    /// Message sizes, or `all`: powers of two from 2 B to 8 MiB. By default 64 KiB for bandwidth and 8 B for latency
    #[arg(long, value_name = "LIST|all")]
    sizes: Option<Sizes>,
    /// Messages of each size; by default as many as --seconds has room for
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..=ITERATIONS_MAX))]
    iterations: Option<u64>,
    /// Messages under way at a time, for bandwidth
    #[arg(long, value_name = "NUMBER", default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=16384))]
    depth: u64,
    /// Blocks of --block bytes in each message instead of one piece, with --scattered
    #[arg(long, value_name = "NUMBER", requires = "scattered", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    blocks: Option<u64>,
    /// Let the blocks of a message lie at random places, at both ends
    #[arg(long, requires = "blocks")]
    scattered: bool,
}

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Writes, as many as go: ib_write_bw
    #[value(name = "write_bw")]
    WriteBw,
    /// Reads, as many as go: ib_read_bw
    #[value(name = "read_bw")]
    ReadBw,
    /// Half the round trip of two writes, each seen in memory by the other end: ib_write_lat
    #[value(name = "write_lat")]
    WriteLat,
    /// One read after another: ib_read_lat
    #[value(name = "read_lat")]
    ReadLat,
    /// Half the round trip of a notification: ib_send_lat
    #[value(name = "send_lat")]
    SendLat,
}

/// Message sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sizes(Vec<u64>);

impl FromStr for Sizes {
    type Err = String;
    fn from_str(text: &str) -> Result<Sizes, String> {
        if text == "all" {
            let [first, last] = ALL_SIZES;
            return Ok(Sizes((first..=last).map(|power| 1 << power).collect()));
        }
        let sizes = text.split(',').map(|size| {
            let Bytes(bytes) = size.trim().parse().map_err(|_| format!("`{size}` is no size"))?;
            if bytes == 0 {
                return Err("an empty message is none".to_string());
            }
            Ok(bytes)
        });
        Ok(Sizes(sizes.collect::<Result<_, _>>()?))
    }
}

impl Flags {
    pub fn mode(&self) -> Option<Mode> {
        self.mode.or(self.scattered.then_some(Mode::WriteBw))
    }
}

/// When to stop.
#[derive(Clone, Copy, Debug)]
struct Effort {
    iterations: Option<u64>,
    budget: Duration,
    start: Instant,
}

impl Effort {
    /// Whether another iteration follows after so many.
    fn goes_on(&self, done: u64) -> bool {
        match self.iterations {
            Some(iterations) => done < iterations,
            None => done < ITERATIONS_MIN || (done < ITERATIONS_MAX && self.start.elapsed() < self.budget),
        }
    }
}

impl Transfer {
    pub(super) fn perftest(&self, mode: Mode, overrides: &Overrides) -> Result<(), Complaint> {
        for &way in &self.transport {
            match mode {
                Mode::WriteBw => self.bandwidth(mode, OpChoice::Write, way, overrides)?,
                Mode::ReadBw => self.bandwidth(mode, OpChoice::Read, way, overrides)?,
                Mode::WriteLat => self.write_latency(way, overrides)?,
                Mode::ReadLat => self.read_latency(way, overrides)?,
                Mode::SendLat => self.send_latency(way, overrides)?,
            }
        }
        Ok(())
    }

    fn sizes(&self, default: u64, least: u64) -> Result<Vec<u64>, Complaint> {
        let sizes = match &self.perftest.sizes {
            // Of all, those that the mode can do; of those that were named, every one.
            Some(Sizes(sizes)) if sizes.len() == all_count() => sizes.iter().copied().filter(|s| *s >= least).collect(),
            Some(Sizes(sizes)) => sizes.clone(),
            None => vec![default],
        };
        match sizes.iter().find(|size| **size < least) {
            Some(size) => {
                let sentence = format!("{size} bytes are too few: this mode takes messages from {least} bytes on.");
                Err(Complaint::new(Exit::Usage, sentence))
            }
            None => Ok(sizes),
        }
    }

    /// Counted from now.
    fn effort(&self) -> Effort {
        Effort {
            iterations: self.perftest.iterations,
            budget: Duration::from_secs_f64(self.seconds),
            start: Instant::now(),
        }
    }

    /// Prints the figures as they come: a line a size.
    fn report(&self, figures: &impl Figures) -> Result<(), Complaint> {
        if self.json {
            return print_json(figures);
        }
        outln!("{}", figures.line());
        Ok(())
    }

    fn headline<F: Figures>(&self, mode: Mode, way: Way, paths: usize, about: &str) -> Result<(), Complaint> {
        if !self.json {
            let name = mode.to_possible_value().map(|value| value.get_name().to_string());
            let name = name.unwrap_or_default();
            outln!(
                "  {name} over {way}, {paths} {}{about}",
                if paths == 1 { "path" } else { "paths" }
            );
            outln!("{}", F::heading());
        }
        Ok(())
    }
}

fn all_count() -> usize {
    (ALL_SIZES[1] - ALL_SIZES[0] + 1) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_a_list_or_all() {
        assert_eq!("8,64KiB, 1MiB".parse(), Ok(Sizes(vec![8, 65536, 1 << 20])));
        let Ok(Sizes(all)) = "all".parse() else {
            panic!("all is a list")
        };
        assert_eq!((all.len(), all[0], all[22]), (all_count(), 2, 8 << 20));
        for text in ["", "0", "8,,9", "many"] {
            assert!(text.parse::<Sizes>().is_err(), "{text}");
        }
    }
}
