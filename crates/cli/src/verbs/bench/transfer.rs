//! `weft bench transfer`: a matrix of transport × direction × block size × batch, between this process and one it starts.

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use weft::Direction;
use weft_plan::{Bandwidth, Bytes, LinkCost, Time};

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{self, Overrides, PATIENCE};
use crate::pair::{Cast, Pair, Plan, Samples, Way, differs};
use crate::partner::Blocks;
use crate::pattern::Pattern;
use crate::predict::{self, Spread, memcpy_limit, probe};
use crate::table::{Align, Table};

const MEMCPY_BUDGET: Duration = Duration::from_millis(500);
const PROBE_BUDGET: Duration = Duration::from_millis(50);
const NOTIFICATION_BYTES: usize = 32;
/// The seeds of the partner's bytes and of ours.
const FAR_SEED: u64 = 0xfa;
const NEAR_SEED: u64 = 0xea;

/// Measure transfers between two processes of this machine
///
/// Blocks stand in random order at both ends, so that nothing merges, as in a paged KV cache. Every cell of the matrix is
/// verified byte by byte at the receiving end before it is measured. Times are from post to done.
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

/// One measured cell of the matrix.
#[derive(Debug, Serialize)]
struct Cell {
    transport: String,
    op: OpChoice,
    block_bytes: u64,
    batch: u64,
    checksum: bool,
    iterations: usize,
    p50_us: f64,
    p99_us: f64,
    gigabytes_per_sec: f64,
    memcpy_gigabytes_per_sec: f64,
    memcpy_share: f64,
    predicted_us: f64,
    measured_over_predicted: f64,
    verified: bool,
}

impl Transfer {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        if !(0.0..=3600.0).contains(&self.seconds) {
            return Err(Complaint::new(Exit::Usage, "--seconds takes a number from 0 to 3600."));
        }
        let overrides = &overrides.without_log()?;
        if self.notify {
            return self.notifications(overrides);
        }
        if self.idle {
            return self.idle(overrides);
        }
        self.matrix(overrides)
    }

    fn matrix(&self, overrides: &Overrides) -> Result<(), Complaint> {
        let (cells, left_out) = self.cells()?;
        let region_bytes = cells
            .iter()
            .map(Blocks::total)
            .max()
            .unwrap_or(0)
            .max(predict::PROBE_BYTES);
        let memcpy = memcpy_limit(MEMCPY_BUDGET);
        let bar = ProgressBar::new((cells.len() * self.op.len() * self.transport.len()) as u64)
            .with_style(bar_style("{bar:30} {pos}/{len}  {msg}"));
        let mut measured = Vec::new();
        for &way in &self.transport {
            let cast = Cast {
                here: "bench",
                there: "partner",
                region_bytes,
                echo: false,
            };
            let mut pair = Pair::start(way, cast, overrides)?;
            for &op in &self.op {
                bar.set_message(format!("{way} {} calibrating", op.name()));
                pair.partner.fill(FAR_SEED)?;
                ends::fill(&pair.local, Pattern(NEAR_SEED));
                let cost = probe(&pair, op.direction(), Spread::Compact, PROBE_BUDGET)?;
                for &blocks in &cells {
                    bar.set_message(format!(
                        "{way} {} {} × {}",
                        op.name(),
                        Bytes(blocks.bytes),
                        blocks.count
                    ));
                    let cell = self.measure(&mut pair, way, op, blocks, cost, memcpy)?;
                    if self.json {
                        print_json(&cell)?;
                    }
                    measured.push(cell);
                    bar.inc(1);
                }
            }
        }
        bar.finish_and_clear();
        if !self.json {
            print!("{}", table(&measured).render());
            println!();
            println!(
                "  Every cell was verified byte by byte. One thread's memcpy in this run: {memcpy:.1}, from memory to"
            );
            println!("  memory; what fits a cache can pass it, and is predicted too slow.");
            if left_out > 0 {
                println!(
                    "  Left out: {left_out} of the sizes, being above --max-bytes {}.",
                    self.max_bytes
                );
            }
        }
        Ok(())
    }

    /// The sizes to measure, and how many were too large.
    fn cells(&self) -> Result<(Vec<Blocks>, usize), Complaint> {
        let mut cells = Vec::new();
        let mut left_out = 0;
        for &Bytes(bytes) in &self.block {
            for &count in &self.batch {
                if bytes == 0 || count == 0 || bytes % 8 != 0 {
                    return Err(Complaint::new(
                        Exit::Usage,
                        "Blocks are a positive multiple of 8 bytes, and a batch has at least one.",
                    ));
                }
                match bytes.checked_mul(count) {
                    Some(total) if total <= self.max_bytes.0 => cells.push(Blocks {
                        bytes,
                        count,
                        slots: count,
                        seed: bytes ^ count,
                    }),
                    _ => left_out += 1,
                }
            }
        }
        if cells.is_empty() {
            return Err(Complaint::new(Exit::Usage, "Every size is above --max-bytes.")
                .try_this(format!("a larger --max-bytes than {}", self.max_bytes)));
        }
        Ok((cells, left_out))
    }

    fn measure(
        &self,
        pair: &mut Pair,
        way: Way,
        op: OpChoice,
        blocks: Blocks,
        cost: LinkCost,
        memcpy: Bandwidth,
    ) -> Result<Cell, Complaint> {
        let plan = Plan::new(op.direction(), blocks.near(), blocks.far()).checksum(self.checksum);
        let prepared = pair.prepare(plan)?;
        crate::pair::once(&prepared)?;
        let difference = match op {
            OpChoice::Read => ends::first_difference(&pair.local, &blocks.near(), Pattern(FAR_SEED), &blocks.far()),
            OpChoice::Write => pair.partner.check(NEAR_SEED, blocks)?,
        };
        if let Some(offset) = difference {
            return Err(differs(
                &format!("a {} of {} × {} over {way}", op.name(), blocks.bytes, blocks.count),
                offset,
            ));
        }
        if op == OpChoice::Write {
            // The next cell must not pass on what this one has left behind.
            pair.partner.fill(FAR_SEED)?;
        }
        let samples = Samples::take(&prepared, Duration::from_secs_f64(self.seconds))?;
        let predicted = cost.time(Bytes(blocks.total()), blocks.count).as_secs_f64();
        let median = samples.median().as_secs_f64();
        let rate = blocks.total() as f64 / median;
        let limit = memcpy.bytes_per_sec() as f64;
        Ok(Cell {
            transport: way.to_string(),
            op,
            block_bytes: blocks.bytes,
            batch: blocks.count,
            checksum: self.checksum,
            iterations: samples.count(),
            p50_us: median * 1e6,
            p99_us: samples.quantile(0.99).as_secs_f64() * 1e6,
            gigabytes_per_sec: rate / 1e9,
            memcpy_gigabytes_per_sec: limit / 1e9,
            memcpy_share: rate / limit,
            predicted_us: predicted * 1e6,
            measured_over_predicted: median / predicted,
            verified: true,
        })
    }

    fn notifications(&self, overrides: &Overrides) -> Result<(), Complaint> {
        let mut table = Table::new(&[
            ("transport", Align::Left),
            ("round trip p50", Align::Right),
            ("p99", Align::Right),
            ("samples", Align::Right),
        ]);
        let mut seen = Vec::new();
        for way in &self.transport {
            // Notifications know no kind of memory.
            if seen.contains(&way.transport()) {
                continue;
            }
            seen.push(way.transport());
            let cast = Cast {
                here: "bench",
                there: "partner",
                region_bytes: 4096,
                echo: true,
            };
            let pair = Pair::start(*way, cast, overrides)?;
            let samples = round_trips(&pair, Duration::from_secs_f64(self.seconds))?;
            let (p50, p99) = (samples.median(), samples.quantile(0.99));
            if self.json {
                print_json(&serde_json::json!({
                    "transport": way.transport(),
                    "notification_bytes": NOTIFICATION_BYTES,
                    "p50_us": p50.as_secs_f64() * 1e6,
                    "p99_us": p99.as_secs_f64() * 1e6,
                    "iterations": samples.count(),
                }))?;
            }
            table.row(vec![
                way.transport().to_string(),
                format!("{:.1}", Time::from(p50)),
                format!("{:.1}", Time::from(p99)),
                samples.count().to_string(),
            ]);
        }
        if !self.json {
            print!("{}", table.render());
        }
        Ok(())
    }

    fn idle(&self, overrides: &Overrides) -> Result<(), Complaint> {
        const WATCH: Duration = Duration::from_secs(10);
        let cast = Cast {
            here: "bench",
            there: "partner",
            region_bytes: 4096,
            echo: false,
        };
        let mut pair = Pair::start(self.transport[0], cast, overrides)?;
        let before = (super::super::cpu_time_ns(), pair.partner.cpu_time_ns()?);
        std::thread::sleep(WATCH);
        let after = (super::super::cpu_time_ns(), pair.partner.cpu_time_ns()?);
        let (here, there) = (Time::from_ns(after.0 - before.0), Time::from_ns(after.1 - before.1));
        if self.json {
            return print_json(&serde_json::json!({
                "idle_seconds": WATCH.as_secs(),
                "connecting_agent_cpu_ms": here.as_secs_f64() * 1e3,
                "accepting_agent_cpu_ms": there.as_secs_f64() * 1e3,
            }));
        }
        println!(
            "  Two connected agents, idle for {} s, used this much CPU time:",
            WATCH.as_secs()
        );
        println!("  {here:.2} where the connection was made, {there:.2} where it was accepted");
        Ok(())
    }
}

fn round_trips(pair: &Pair, budget: Duration) -> Result<Samples, Complaint> {
    let start = Instant::now();
    let mut times = Vec::new();
    let payload = [0x5a; NOTIFICATION_BYTES];
    while times.len() < 100 || start.elapsed() < budget {
        let one = Instant::now();
        pair.peer
            .notify(&payload)
            .map_err(|error| ends::explain(&error, "A notification could not be sent."))?;
        let back = pair.agent.next_notification(PATIENCE);
        times.push(one.elapsed());
        if back.is_none_or(|back| back.payload != payload) {
            return Err(Complaint::new(
                Exit::Differs,
                "A notification did not come back as it was sent.",
            ));
        }
    }
    Ok(Samples::of(times))
}

fn table(cells: &[Cell]) -> Table {
    let mut table = Table::new(&[
        ("transport", Align::Left),
        ("op", Align::Left),
        ("block", Align::Right),
        ("batch", Align::Right),
        ("p50", Align::Right),
        ("p99", Align::Right),
        ("GB/s", Align::Right),
        ("of memcpy", Align::Right),
        ("predicted", Align::Right),
        ("measured ÷ predicted", Align::Right),
    ]);
    let micros = |us: f64| format!("{:.1}", Time::from_ps((us * 1e6) as u64));
    for cell in cells {
        table.row(vec![
            cell.transport.clone(),
            cell.op.name().to_string(),
            Bytes(cell.block_bytes).to_string(),
            cell.batch.to_string(),
            micros(cell.p50_us),
            micros(cell.p99_us),
            format!("{:.2}", cell.gigabytes_per_sec),
            format!("{:.0} %", cell.memcpy_share * 100.0),
            micros(cell.predicted_us),
            format!("{:.2}", cell.measured_over_predicted),
        ]);
    }
    table
}

fn bar_style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

fn print_json(value: &impl Serialize) -> Result<(), Complaint> {
    let line = serde_json::to_string(value).or_complain(Exit::Failed, || "A result has no JSON.".to_string())?;
    println!("{line}");
    Ok(())
}
