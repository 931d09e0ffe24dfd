//! The matrix: transport × direction × block size × batch, each cell verified, measured and beside its prediction.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use weft_plan::{Bandwidth, Bytes, LinkCost, Picos};

use super::{FAR_SEED, NEAR_SEED, OpChoice, Transfer, print_json};
use crate::complaint::{Complaint, Exit};
use crate::ends::{self, Overrides};
use crate::pair::{Cast, Pair, Plan, Samples, Way, differs};
use crate::partner::Blocks;
use crate::pattern::Pattern;
use crate::predict::{self, Spread, memcpy_limit, probe};
use crate::table::{Align, Table};

const MEMCPY_BUDGET: Duration = Duration::from_millis(500);
const PROBE_BUDGET: Duration = Duration::from_millis(50);

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
    pub(super) fn matrix(&self, overrides: &Overrides) -> Result<(), Complaint> {
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
                at: self.connect(),
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
            out!("{}", table(&measured).render());
            outln!();
            outln!(
                "  Every cell was verified byte by byte. One thread's memcpy in this run: {memcpy:.1}, from memory to"
            );
            outln!("  memory; what fits a cache can pass it, and is predicted too slow.");
            if left_out > 0 {
                outln!(
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
    let micros = |us: f64| format!("{:.1}", Picos::from_ps((us * 1e6) as u64));
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
