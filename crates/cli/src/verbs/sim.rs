//! `weft sim`: scenarios on simulated networks.

mod forms;
mod plot;
mod replay;
mod report;
pub mod serving;
mod sweep;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use console::style;
use weft_sim::scenario::{Answer, Scenario};
use weft_sim::training::Trained;

use crate::complaint::{Complain, Complaint, Exit};
use crate::out::print_whole;
use crate::report::comparison::{self, Measured};
use crate::table::{Align, Table};

/// Simulate clusters that nobody here owns
#[derive(Debug, Subcommand)]
pub enum Sim {
    Run(Run),
    Serving(serving::Serving),
    Replay(replay::Replay),
    Sweep(sweep::Sweep),
}

/// Run a scenario, and show what each fidelity says side by side
///
/// A scenario is a TOML file: a cluster, a workload, faults, a seed, and which fidelities are to answer (docs/simulator.md). The same file gives
/// the same output again.
#[derive(Debug, Args)]
pub struct Run {
    /// A file, or the name of a shipped scenario (`weft list scenarios`)
    scenario: String,
    /// Print JSON instead of tables
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print comma-separated values instead of tables
    #[arg(long)]
    csv: bool,
    /// Write when each rank was in which step, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write a page for a browser, everything in one file: links coloured by how busy they were, a timeline of ranks, all figures
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Put these measurements beside predictions in the report: what `weft bench collective --json` prints, or a CSV table with the columns op,
    /// bytes, ranks and time_us
    #[arg(long, value_name = "FILE", requires = "report")]
    measured: Option<PathBuf>,
}

impl Sim {
    pub fn run(self) -> Result<(), Complaint> {
        match self {
            Sim::Run(run) => run.run(),
            Sim::Serving(serving) => serving.run(),
            Sim::Replay(replay) => replay.run(),
            Sim::Sweep(sweep) => sweep.run(),
        }
    }
}

impl Run {
    fn run(self) -> Result<(), Complaint> {
        let (_, scenario) = read(&self.scenario)?;
        let measured = self.measured.as_deref().map(measurements).transpose()?;
        let answers = match self.report {
            Some(_) => scenario.run_by_link(),
            None => scenario.run(),
        };
        let answers = answers.or_complain(Exit::Failed, || {
            format!("The scenario {} cannot be run.", scenario.name)
        })?;
        if let Some(path) = &self.report {
            write(
                path,
                &report::scenario(&scenario, &answers, measured.as_deref())?.html(),
            )?;
        }
        if let Some(path) = &self.trace {
            write(path, &forms::trace(&answers))?;
        }
        let text = match (self.json, self.csv) {
            (true, _) => forms::json(&scenario, &answers),
            (_, true) => forms::csv(&answers),
            _ => tables(&scenario, &answers),
        };
        print_whole(text.as_bytes())
    }
}

fn write(path: &Path, text: &str) -> Result<(), Complaint> {
    std::fs::write(path, text).or_complain(Exit::Failed, || format!("{} could not be written.", path.display()))
}

fn measurements(path: &Path) -> Result<Vec<Measured>, Complaint> {
    let text =
        std::fs::read_to_string(path).or_complain(Exit::Usage, || format!("{} cannot be read.", path.display()))?;
    comparison::read(&text).or_complain(Exit::Usage, || {
        format!("{} does not hold measurements of collectives.", path.display())
    })
}

/// A scenario by its file or its name, and its text.
fn read(name: &str) -> Result<(String, Scenario), Complaint> {
    let text = match Scenario::shipped(name) {
        Some(text) => text.to_owned(),
        None => std::fs::read_to_string(name).or_complain(Exit::Usage, || {
            let known: Vec<&str> = Scenario::names().collect();
            format!(
                "{name} is neither a file that can be read nor one of {}.",
                known.join(", ")
            )
        })?,
    };
    let scenario =
        Scenario::from_toml(&text).or_complain(Exit::Usage, || format!("{name} is not a scenario that can be run."))?;
    Ok((text, scenario))
}

fn tables(scenario: &Scenario, answers: &[Answer]) -> String {
    let mut text = format!("{}\n", style(&scenario.name).bold());
    if !scenario.summary.is_empty() {
        text.push_str(&format!("{}\n", scenario.summary));
    }
    let columns = [
        ("fidelity", Align::Left),
        ("what", Align::Left),
        ("ranks", Align::Right),
        ("bytes", Align::Right),
        ("time", Align::Right),
        ("messages", Align::Right),
        ("followed", Align::Right),
        ("events", Align::Right),
        ("packets", Align::Right),
        ("trimmed", Align::Right),
        ("dropped", Align::Right),
    ];
    let mut table = Table::new(&columns);
    let count = |count: u64| {
        if count == 0 {
            "–".to_string()
        } else {
            count.to_string()
        }
    };
    for answer in answers {
        table.row(vec![
            answer.fidelity.to_string(),
            answer.what.clone(),
            answer.ranks.to_string(),
            format!("{:.1}", answer.bytes),
            format!("{:.2}", answer.time),
            count(answer.messages),
            count(answer.classes.into()),
            count(answer.events),
            count(answer.packets),
            count(answer.trimmed),
            count(answer.dropped),
        ]);
    }
    text.push_str(&table.render());
    for trained in answers.iter().filter_map(|answer| answer.trained.as_ref()) {
        text.push_str(&training(trained));
    }
    for answer in answers.iter().filter(|answer| !answer.hot.is_empty()) {
        text.push_str(&format!(
            "\n{}\n",
            style(format!("Busiest links, {}", answer.fidelity)).bold()
        ));
        let columns = [
            ("link", Align::Left),
            ("parallel", Align::Right),
            ("busy", Align::Right),
            ("carried", Align::Right),
        ];
        let mut table = Table::new(&columns);
        for hot in answer.hot.iter().take(5) {
            table.row(vec![
                hot.name.clone(),
                hot.width.to_string(),
                format!("{:.1} %", hot.utilisation * 100.0),
                format!("{:.1}", hot.carried),
            ]);
        }
        text.push_str(&table.render());
    }
    text
}

/// Where the time of a step goes, and whether it fits.
fn training(trained: &Trained) -> String {
    let step = &trained.step;
    let mut table = Table::new(&[
        ("part", Align::Left),
        ("seconds", Align::Right),
        ("share", Align::Right),
    ]);
    for (part, seconds) in &step.parts {
        let share = seconds / step.seconds * 100.0;
        table.row(vec![part.to_string(), format!("{seconds:.4}"), format!("{share:.1} %")]);
    }
    let memory = &step.memory;
    format!(
        "\n{}\n{}\n  {:.0} TFLOP/s a GPU, {:.1} % of the peak; {:.0} of {:.0} GB of memory{}; {:.0} % of the layers are computed again\n",
        style("Where the time goes").bold(),
        table.render(),
        step.tflops_per_gpu,
        step.utilization * 100.0,
        memory.total() / 1e9,
        memory.capacity / 1e9,
        if memory.fits() { "" } else { ", which is too much" },
        step.recomputed * 100.0,
    )
}
