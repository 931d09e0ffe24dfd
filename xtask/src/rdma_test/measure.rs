//! The table beside perftest, made inside a virtual machine: both sides in turn, in one boot, several times, and the ratio of the medians.
//!
//! In emulation an absolute figure means little. What carries over to real cards is how often a batch of blocks bothers the kernel, the
//! card and the completion queue; that stands above the table.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::perftest::Perftest;
use super::system_calls;
use crate::command::{Error, output};

#[derive(clap::Args)]
pub struct Arguments {
    /// The command to measure.
    #[arg(long)]
    weft: PathBuf,
    /// How often the whole is measured, if there is time.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// After how many seconds no further round is begun that would probably end later.
    #[arg(long, default_value_t = 180)]
    budget: u64,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// How long perftest measures, and for how long we do.
const PERFTEST_SECONDS: u32 = 1;
const WEFT_SECONDS: f64 = 1.0;
/// Blocks of the batch whose cost is counted.
const BATCH: u64 = 1024;
/// Transfers whose system calls are counted, in two runs.
const COUNTED_FEW: u64 = 20;
const COUNTED_MANY: u64 = 60;
/// System calls that are rarer than this for a transfer are left to the sum.
const RARE: f64 = 0.5;

/// What `weft bench transfer` is asked to measure.
#[derive(Clone, Copy, Debug)]
struct Workload {
    mode: &'static str,
    /// Of a message, or of each of its blocks.
    bytes: u64,
    /// Whether a message consists of blocks at random places.
    scattered: bool,
    rails: u32,
}

impl Workload {
    fn plain(mode: &'static str, bytes: u64) -> Workload {
        Workload {
            mode,
            bytes,
            scattered: false,
            rails: 1,
        }
    }

    /// As large a batch as a paged KV cache moves at a time.
    fn scattered_blocks() -> Workload {
        Workload {
            scattered: true,
            ..Workload::plain("write_bw", 4 * KIB)
        }
    }
}

/// What a row compares: more is better for all but the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    MibPerSecond,
    BlocksPerSecond,
    Microseconds,
}

impl Unit {
    fn show(self, figure: f64) -> String {
        match self {
            Unit::MibPerSecond => format!("{figure:.1} MiB/s"),
            Unit::BlocksPerSecond => format!("{figure:.0} /s"),
            Unit::Microseconds => format!("{figure:.1} µs"),
        }
    }
}

/// How our figure has to stand to the other one.
#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
    Shown,
}

impl Bound {
    fn holds(self, ratio: f64) -> bool {
        match self {
            Bound::AtLeast(least) => ratio >= least,
            Bound::AtMost(most) => ratio <= most,
            Bound::Shown => true,
        }
    }

    fn show(self) -> String {
        match self {
            Bound::AtLeast(least) => format!("≥ {least:.2}"),
            Bound::AtMost(most) => format!("≤ {most:.2}"),
            Bound::Shown => String::new(),
        }
    }
}

/// What our figure is compared with.
#[derive(Clone, Debug)]
enum Other {
    Perftest(Perftest),
    Weft(Workload),
}

struct Row {
    name: String,
    unit: Unit,
    other: Other,
    ours: Workload,
    bound: Bound,
    figures: Vec<(f64, f64)>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let mut rows = rows();
    let mut scaling = Vec::new();
    let (started, budget) = (Instant::now(), Duration::from_secs(arguments.budget));
    // First, so that a slow machine shows at least what does not depend on its speed.
    println!("{}", Costs::count(arguments)?);
    for round in 1..=arguments.repeats {
        let begun = Instant::now();
        for row in &mut rows {
            row.measure(arguments, round)?;
        }
        let [one, two] = [1, 2].map(|rails| writes(64 * KIB, rails).bandwidth());
        scaling.push(two?.0 / one?.0);
        if started.elapsed() + begun.elapsed() > budget {
            break;
        }
    }
    println!("\nmedians of {} rounds\n{}", scaling.len(), table(&rows));
    println!(
        "Two ib_write_bw of 64 KiB at once, one on each rail, together reach {:.2} × one: what the processors of this machine allow.",
        median(scaling.iter().copied())
    );
    let missed = rows.iter().filter(|row| !row.bound.holds(row.ratio())).count();
    println!("verdict: {} of {} rows reached", rows.len() - missed, rows.len());
    Ok(if missed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row = |name: String, unit, other, ours, bound| {
        rows.push(Row {
            name,
            unit,
            other,
            ours,
            bound,
            figures: Vec::new(),
        });
    };
    for (mode, program) in [("write_bw", "ib_write_bw"), ("read_bw", "ib_read_bw")] {
        for (bytes, size) in [(64 * KIB, "64 KiB"), (MIB, "1 MiB")] {
            row(
                format!("{mode} {size} beside {program}"),
                Unit::MibPerSecond,
                Other::Perftest(perftest(program, bytes)),
                Workload::plain(mode, bytes),
                Bound::AtLeast(0.9),
            );
        }
    }
    row(
        format!("write_bw {BATCH} scattered × 4 KiB beside ib_write_bw 4 KiB"),
        Unit::BlocksPerSecond,
        Other::Perftest(perftest("ib_write_bw", 4 * KIB)),
        Workload::scattered_blocks(),
        Bound::AtLeast(1.0),
    );
    row(
        "write_lat 8 bytes beside ib_write_lat".to_owned(),
        Unit::Microseconds,
        Other::Perftest(perftest("ib_write_lat", 8)),
        Workload::plain("write_lat", 8),
        Bound::AtMost(1.3),
    );
    row(
        "read_lat 8 bytes beside ib_read_lat".to_owned(),
        Unit::Microseconds,
        Other::Perftest(perftest("ib_read_lat", 8)),
        Workload::plain("read_lat", 8),
        Bound::Shown,
    );
    let one_rail = Workload::plain("write_bw", MIB);
    row(
        "write_bw 1 MiB, two rails beside one".to_owned(),
        Unit::MibPerSecond,
        Other::Weft(one_rail),
        Workload { rails: 2, ..one_rail },
        Bound::Shown,
    );
    rows
}

fn perftest(program: &'static str, bytes: u64) -> Perftest {
    Perftest {
        program,
        bytes,
        seconds: PERFTEST_SECONDS,
        depth: None,
        rails: 1,
    }
}

fn writes(bytes: u64, rails: u32) -> Perftest {
    Perftest {
        rails,
        ..perftest("ib_write_bw", bytes)
    }
}

impl Row {
    fn measure(&mut self, arguments: &Arguments, round: usize) -> Result<(), Error> {
        let other = match &self.other {
            Other::Perftest(test) => figure_of_perftest(test, self.unit)?,
            Other::Weft(workload) => figure_of_weft(arguments, *workload, self.unit)?,
        };
        let ours = figure_of_weft(arguments, self.ours, self.unit)?;
        let (other_text, ours_text) = (self.unit.show(other), self.unit.show(ours));
        println!("round {round}: {}: {other_text} : {ours_text}", self.name);
        self.figures.push((other, ours));
        Ok(())
    }

    /// Ours by the other's, of the medians.
    fn ratio(&self) -> f64 {
        self.ours_median() / self.other_median()
    }

    fn ours_median(&self) -> f64 {
        median(self.figures.iter().map(|(_, ours)| *ours))
    }

    fn other_median(&self) -> f64 {
        median(self.figures.iter().map(|(other, _)| *other))
    }
}

fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = figures.collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let mut text = format!(
        "{:width$}  {:>14}  {:>14}  {:>7}  {:>8}\n",
        "workload", "other", "Weft", "ratio", "required"
    );
    for row in rows {
        let missed = if row.bound.holds(row.ratio()) { "" } else { "  MISSED" };
        text += &format!(
            "{:width$}  {:>14}  {:>14}  {:>5.2} ×  {:>8}{missed}\n",
            row.name,
            row.unit.show(row.other_median()),
            row.unit.show(row.ours_median()),
            row.ratio(),
            row.bound.show(),
        );
    }
    text
}

fn figure_of_perftest(test: &Perftest, unit: Unit) -> Result<f64, Error> {
    match unit {
        Unit::Microseconds => test.latency(),
        Unit::MibPerSecond => Ok(test.bandwidth()?.0),
        Unit::BlocksPerSecond => Ok(test.bandwidth()?.1),
    }
}

fn figure_of_weft(arguments: &Arguments, workload: Workload, unit: Unit) -> Result<f64, Error> {
    let seconds = ["--seconds".to_owned(), WEFT_SECONDS.to_string()];
    let line = bench(Command::new(&arguments.weft), workload, &seconds)?;
    number(
        &line,
        match unit {
            Unit::Microseconds => "t_typical_us",
            Unit::MibPerSecond => "bw_average_mib_per_sec",
            Unit::BlocksPerSecond => "blocks_per_sec",
        },
    )
}

/// Runs the workload and returns its line of JSON.
fn bench(mut command: Command, workload: Workload, effort: &[String]) -> Result<Value, Error> {
    let devices: Vec<String> = (0..workload.rails).map(|rail| format!("rxe{rail}")).collect();
    command
        .args(["bench", "transfer", "--json", "--transport", "verbs"])
        .args(["--set", &format!("verbs.devices={}", devices.join(","))])
        .args(["--mode", workload.mode])
        .args(effort);
    if workload.scattered {
        command.args(["--scattered", "--blocks", &BATCH.to_string()]);
        command.args(["--block", &workload.bytes.to_string()]);
    } else {
        command.args(["--sizes", &workload.bytes.to_string()]);
    }
    let said = output(&mut command)?;
    let line: Option<Value> = said.lines().last().and_then(|line| serde_json::from_str(line).ok());
    match line {
        // Latencies are of bytes that the other end has seen; only streams are verified apart.
        Some(line) if line["verified"] != false => Ok(line),
        _ => Err(not_understood(&said)),
    }
}

fn number(cell: &Value, name: &str) -> Result<f64, Error> {
    cell[name].as_f64().ok_or_else(|| not_understood(&cell.to_string()))
}

fn not_understood(said: &str) -> Error {
    Error::NotUnderstood {
        program: "weft bench transfer".to_owned(),
        said: said.to_owned(),
    }
}

/// What a write of 1,024 scattered blocks costs.
struct Costs {
    /// Of both ends together, by name.
    system_calls: BTreeMap<String, f64>,
    /// What the transports of the two ends counted, by name.
    initiator: BTreeMap<String, f64>,
    target: BTreeMap<String, f64>,
}

impl Costs {
    fn count(arguments: &Arguments) -> Result<Costs, Error> {
        let calls = |transfers: u64| {
            system_calls::count(|| {
                let weft = Command::new(&arguments.weft);
                bench(weft, Workload::scattered_blocks(), &iterations(transfers)).map(drop)
            })
        };
        // Starting, connecting and ending are in both, so that the difference is what the further transfers took.
        let (few, many) = (calls(COUNTED_FEW)?, calls(COUNTED_MANY)?);
        let system_calls = many.into_iter().map(|(name, count)| {
            let further = count.saturating_sub(few.get(&name).copied().unwrap_or(0));
            (name, further as f64 / (COUNTED_MANY - COUNTED_FEW) as f64)
        });
        let system_calls = system_calls.collect();
        let line = bench(
            Command::new(&arguments.weft),
            Workload::scattered_blocks(),
            &iterations(COUNTED_MANY),
        )?;
        let counted = |end: &str| -> Result<BTreeMap<String, f64>, Error> {
            let counts = line["per_1024_blocks"][end].as_object();
            let counts = counts.ok_or_else(|| not_understood(&line.to_string()))?;
            let counts = counts.iter().map(|(name, count)| Some((name.clone(), count.as_f64()?)));
            counts
                .collect::<Option<_>>()
                .ok_or_else(|| not_understood(&line.to_string()))
        };
        Ok(Costs {
            system_calls,
            initiator: counted("initiator")?,
            target: counted("target")?,
        })
    }
}

fn iterations(count: u64) -> [String; 2] {
    ["--iterations".to_owned(), count.to_string()]
}

impl std::fmt::Display for Costs {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(out, "What a write of {BATCH} scattered blocks of 4 KiB takes:")?;
        writeln!(out, "  {:>10}  {:>10}", "initiator", "target")?;
        for (name, initiator) in &self.initiator {
            let target = self.target.get(name).copied().unwrap_or(0.0);
            writeln!(out, "  {initiator:>10.1}  {target:>10.1}  {name}")?;
        }
        let all: f64 = self.system_calls.values().sum();
        writeln!(out, "  {all:>22.1}  system calls of both ends together; of these:")?;
        let mut frequent: Vec<_> = self.system_calls.iter().filter(|(_, count)| **count >= RARE).collect();
        frequent.sort_by(|one, other| other.1.total_cmp(one.1));
        frequent
            .into_iter()
            .try_for_each(|(name, count)| writeln!(out, "  {count:>22.1}  {name}"))?;
        writeln!(
            out,
            "  Soft-RoCE takes a doorbell by a write; cards take it without the kernel."
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_that_of_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
    }
}
