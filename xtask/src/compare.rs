//! `cargo xtask compare`: Weft and its peers in turn, on the same workload, in the same run.
//!
//! The box is noisy, so an absolute time says little. Each row is measured for every side one right after the other, the
//! whole is repeated, and what counts is the ratio of the medians.

mod collective;
mod figures;
mod file;
mod gpu;
mod setup;
mod simulator;
mod store;
mod table;
mod vllm;

use std::collections::BTreeMap;
use std::process::{Command, ExitCode};

use serde_json::{Value, json};

use crate::command::{self, Error, root};
use setup::Peers;
use table::{Bound, Requirement, Side};

#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Transfers, notifications, start, idling and installing, beside NIXL and Mooncake.
    Transfer(TransferArguments),
    /// Collectives, beside Open MPI, MPICH, Intel MPI and Gloo.
    Collective(collective::Arguments),
    /// Blocks between memory and a file, beside fio.
    File(file::Arguments),
    /// Blocks put into a store's tiers and got from them, beside LMCache, vLLM's tier of files, fio and a plain copy.
    Store(store::Arguments),
    /// What a GPU has to show, beside NCCL, torch and what its memory could move: a bundle for a machine with one.
    Gpu(gpu::Arguments),
    /// The simulated networks, beside what others' simulators took on the same machine.
    Simulator(simulator::Arguments),
    /// KV hand-offs between instances of vLLM, beside its NixlConnector.
    Vllm(vllm::Arguments),
}

#[derive(clap::Args)]
struct TransferArguments {
    /// How often the whole is measured.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// How long each measurement lasts.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Only rows whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Only these sides, which leaves out every ratio with another.
    #[arg(long, value_delimiter = ',')]
    sides: Vec<Side>,
    /// Put the rows into docs/figures/transfer.md, and six of them into the README.
    #[arg(long, conflicts_with_all = ["only", "sides"])]
    write: bool,
}

/// One thing to measure: which side, and the arguments of its driver.
type Run = (Side, Vec<String>);

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    match &arguments.what {
        What::Transfer(arguments) => transfers(arguments),
        What::Collective(arguments) => collective::run(arguments),
        What::File(arguments) => file::run(arguments),
        What::Store(arguments) => store::run(arguments),
        What::Gpu(arguments) => gpu::run(arguments),
        What::Simulator(arguments) => simulator::run(arguments),
        What::Vllm(arguments) => vllm::run(arguments),
    }
}

fn transfers(arguments: &TransferArguments) -> Result<ExitCode, Error> {
    let wanted = |run: &Run| arguments.sides.is_empty() || arguments.sides.contains(&run.0);
    let requirements: Vec<_> = table::requirements()
        .into_iter()
        .filter(|requirement| requirement.name.contains(&arguments.only))
        .collect();
    let mut runs: Vec<&Run> = Vec::new();
    for run in requirements
        .iter()
        .flat_map(|requirement| requirement.theirs.iter().chain([&requirement.ours]))
    {
        if wanted(run) && !runs.contains(&run) {
            runs.push(run);
        }
    }
    let peers = Peers::install(&runs.iter().map(|run| run.0).collect::<Vec<_>>())?;
    let mut figures = Figures::default();
    for repeat in 0..arguments.repeats {
        for run in &runs {
            eprintln!(
                "repeat {} of {}: {} {}",
                repeat + 1,
                arguments.repeats,
                run.0,
                run.1.join(" ")
            );
            match measure(&peers, run, arguments.seconds) {
                Ok(figure) => figures.add(run, figure),
                // One side that fails must not end the comparison of the others; its ratio will be missing.
                Err(error) => eprintln!("  {error}"),
            }
        }
    }
    let (rows, code) = report(&requirements, &figures);
    if arguments.write {
        let command = format!("cargo xtask compare transfer --repeats {} --write", arguments.repeats);
        figures::write("transfer", &command, &rows)?;
        figures::write_shown(&rows)?;
    }
    Ok(code)
}

/// What was measured, by run.
#[derive(Default)]
struct Figures {
    all: BTreeMap<Run, Vec<f64>>,
}

impl Figures {
    fn add(&mut self, run: &Run, figure: f64) {
        self.all.entry(run.clone()).or_default().push(figure);
    }

    fn median(&self, run: &Run) -> Option<f64> {
        let mut sorted = self.all.get(run)?.clone();
        sorted.sort_by(f64::total_cmp);
        Some(sorted[sorted.len() / 2])
    }
}

fn measure(peers: &Peers, (side, arguments): &Run, seconds: f64) -> Result<f64, Error> {
    if let Some(figure) = peers.installed(*side, arguments) {
        return figure;
    }
    let driver = root().join("xtask/compare").join(side.driver());
    // A peer that hangs, which some do, must not hang the comparison.
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", "180"])
        .arg(peers.python())
        .arg(driver)
        .args(arguments);
    command.args(["--seconds", &seconds.to_string()]);
    let said = command::output(&mut command)?;
    let not_understood = || Error::NotUnderstood {
        program: side.driver().to_owned(),
        said: said.clone(),
    };
    let line: Value = said
        .lines()
        .last()
        .and_then(|line| serde_json::from_str(line).ok())
        .ok_or_else(not_understood)?;
    if line["verified"] == json!(false) {
        return Err(Error::NotUnderstood {
            program: side.driver().to_owned(),
            said: "data that does not verify".into(),
        });
    }
    let figure = if line["cores"].is_null() {
        &line["us"]
    } else {
        &line["cores"]
    };
    figure.as_f64().ok_or_else(not_understood)
}

fn report(requirements: &[Requirement], figures: &Figures) -> (Vec<figures::Row>, ExitCode) {
    let mut rows: Vec<figures::Row> = Vec::new();
    let mut lines = Vec::new();
    let width = requirements
        .iter()
        .map(|requirement| requirement.name.len())
        .max()
        .unwrap_or(0);
    println!(
        "{:width$}  {:>12}  {:>12}  {:>8}  {:>9}",
        "workload", "peer", "Weft", "ratio", "required"
    );
    for requirement in requirements {
        let ours = figures.median(&requirement.ours);
        let theirs = requirement.theirs.as_ref().and_then(|run| figures.median(run));
        let ratio = theirs.zip(ours).map(|(theirs, ours)| theirs / ours);
        let reached = match requirement.bound {
            Bound::TimesFaster(times) => ratio.is_some_and(|ratio| ratio >= times),
            Bound::AtMost(most) => ours.is_some_and(|ours| ours <= most),
            Bound::Shown => true,
        };
        let unit = requirement.unit;
        let shown = |figure: Option<f64>| figure.map_or("–".to_owned(), |figure| unit.show(figure));
        let required = match requirement.bound {
            Bound::TimesFaster(times) => format!("{times:.2} ×"),
            Bound::AtMost(most) => format!("≤ {}", unit.show(most)),
            Bound::Shown => String::new(),
        };
        let row = figures::Row {
            workload: requirement.name.clone(),
            peer: shown(theirs),
            weft: shown(ours),
            ratio: ratio.map_or(String::new(), |ratio| format!("{ratio:.2} ×")),
            required,
            reached,
        };
        println!(
            "{:width$}  {:>12}  {:>12}  {:>8}  {:>9}  {}",
            row.workload,
            row.peer,
            row.weft,
            row.ratio,
            row.required,
            if reached { "" } else { "MISSED" },
        );
        rows.push(row);
        lines.push(json!({
            "workload": requirement.name,
            "peer": requirement.theirs.as_ref().map(|run| run.0.to_string()),
            "unit": unit.name(),
            "peer_median": theirs,
            "weft_median": ours,
            "ratio": ratio,
            "peer_all": requirement.theirs.as_ref().and_then(|run| figures.all.get(run)),
            "weft_all": figures.all.get(&requirement.ours),
            "reached": reached,
        }));
    }
    println!();
    for line in lines {
        println!("{line}");
    }
    let reached = rows.iter().filter(|row| row.reached).count();
    println!("\n{reached} of {} rows reached", rows.len());
    let code = if reached == rows.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    };
    (rows, code)
}
