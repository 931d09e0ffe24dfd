//! `cargo xtask compare collective`: Weft, MPIs and Gloo in turn, on the same collectives, in the same run.
//!
//! Every side prints the same JSON lines. For each collective all sides run one right after the other, the whole is repeated, and
//! of each side the best counts: other work on the machine only ever adds. A figure is the median of single calls, which hiccups of the
//! scheduler leave alone.

mod sides;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::figures;
use crate::command::{self, Error, root};
use sides::{Side, Sides, Work};
use table::{OPS, Point, Row};

/// From this size on a point is measured in the first repeat only.
const LARGE_BYTES: u64 = 128 << 20;

#[derive(clap::Args)]
pub struct Arguments {
    /// How many ranks take part.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<u32>,
    /// How often the whole is measured, but for what takes longest.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// How much data, in bytes.
    #[arg(long, value_delimiter = ',', default_values_t = [1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20])]
    sizes: Vec<u64>,
    /// Which collectives.
    #[arg(long, value_delimiter = ',', default_values_t = OPS.map(str::to_owned))]
    ops: Vec<String>,
    /// How long each point is measured.
    #[arg(long, default_value_t = 0.15)]
    seconds: f64,
    /// With which priority all sides run, as `nice` understands it: on a busy machine below zero, which takes the right to.
    #[arg(long, allow_hyphen_values = true)]
    nice: Option<i32>,
    /// Only these sides, which leaves out every ratio with another.
    #[arg(long, value_delimiter = ',')]
    sides: Vec<Side>,
    /// Where the JSON lines go: every point of every side, then the rows of the table.
    #[arg(long, default_value = "target/compare-collective.json")]
    json: PathBuf,
    /// Put the rows into docs/figures/collective.md.
    #[arg(long, conflicts_with = "sides")]
    write: bool,
}

/// The best figure of each side at each point, in microseconds.
pub type Best = BTreeMap<(Side, Point), f64>;

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let wanted: Vec<Side> = Side::ALL
        .into_iter()
        .filter(|side| arguments.sides.is_empty() || arguments.sides.contains(side))
        .collect();
    let sides = Sides::install(&wanted)?;
    let mut lines: Vec<Value> = Vec::new();
    let mut best = Best::new();
    // What has failed, or taken too long, is not tried again: three times nothing is nothing.
    let mut failed = BTreeSet::new();
    for repeat in 0..arguments.repeats {
        // The largest take as long as all others together, and vary least.
        let again = |bytes: &u64| repeat == 0 || *bytes < LARGE_BYTES;
        let sizes: Vec<u64> = arguments.sizes.iter().copied().filter(again).collect();
        for &ranks in &arguments.ranks {
            for op in &arguments.ops {
                for side in sides.all().filter(|side| table::takes_part(*side, ranks, op)) {
                    if failed.contains(&(side, ranks, op)) {
                        continue;
                    }
                    eprintln!(
                        "repeat {} of {}: {op} among {ranks} ranks, {side}",
                        repeat + 1,
                        arguments.repeats
                    );
                    let work = Work {
                        ranks,
                        op,
                        sizes: &sizes,
                        seconds: arguments.seconds,
                        nice: arguments.nice,
                    };
                    let (said, ended) = command::output_so_far(&mut sides.command(side, &work))?;
                    for line in said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
                        note(&mut best, side, &line);
                        lines.push(line);
                    }
                    // One side that fails must not end the comparison of the others; ratios will be missing.
                    if !ended {
                        eprintln!("  {side} failed, or took too long");
                        failed.insert((side, ranks, op));
                    }
                }
            }
        }
    }
    let rows = table::rows(&best);
    table::print(&best, &rows);
    let path = root().join(&arguments.json);
    lines.extend(rows.iter().map(Row::to_json));
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&path, text).map_err(|source| Error::File {
        path: path.clone(),
        source,
    })?;
    if arguments.write {
        let command = format!(
            "cargo xtask compare collective --repeats {} --seconds {} --write",
            arguments.repeats, arguments.seconds
        );
        let rows: Vec<figures::Row> = rows.iter().map(Row::to_figures).collect();
        figures::write("collective", &command, &rows)?;
    }
    let missed = rows.iter().filter(|row| !row.is_reached()).count();
    println!(
        "\n{} of {} required ratios reached; all points are in {}",
        rows.iter().filter(|row| row.is_required() && row.is_reached()).count(),
        rows.iter().filter(|row| row.is_required()).count(),
        path.display()
    );
    Ok(if missed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Keeps a point's figure, if it is the best so far and the result was right.
fn note(best: &mut Best, side: Side, line: &Value) {
    let figure = (|| {
        let point = Point {
            ranks: line["ranks"].as_u64()? as u32,
            op: line["op"].as_str()?.to_owned(),
            bytes: line["bytes"].as_u64()?,
        };
        Some((point, line["p50_us"].as_f64()?))
    })();
    let Some((point, us)) = figure else { return };
    if line["ok"] != json!(true) {
        eprintln!("  {side}: {} of {} bytes came out wrong", point.op, point.bytes);
        return;
    }
    let known = best.entry((side, point)).or_insert(us);
    *known = known.min(us);
}
