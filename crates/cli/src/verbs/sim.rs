//! `weft sim`: scenarios on simulated networks.

mod forms;
mod plot;
mod serving;
mod sweep;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use console::style;
use weft_sim::scenario::{Answer, Scenario};

use crate::complaint::{Complain, Complaint, Exit};
use crate::table::{Align, Table};
use crate::verbs::print_whole;

/// Simulate clusters that nobody here owns
#[derive(Debug, Subcommand)]
pub enum Sim {
    Run(Run),
    Serving(serving::Serving),
    Sweep(sweep::Sweep),
    /// Name the scenarios that are shipped
    List,
}

/// Run a scenario, and show what each fidelity says side by side
///
/// A scenario is a TOML file: a cluster, a workload, faults, a seed, and which fidelities are to answer (docs/simulator.md). The same file gives
/// the same output again.
#[derive(Debug, Args)]
pub struct Run {
    /// A file, or the name of a shipped scenario (`weft sim list`)
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
}

impl Sim {
    pub fn run(self) -> Result<(), Complaint> {
        match self {
            Sim::Run(run) => run.run(),
            Sim::Serving(serving) => serving.run(),
            Sim::Sweep(sweep) => sweep.run(),
            Sim::List => {
                let mut table = Table::new(&[("scenario", Align::Left), ("what it is", Align::Left)]);
                for name in Scenario::names() {
                    let scenario = read(name)?.1;
                    table.row(vec![name.to_string(), scenario.summary]);
                }
                print_whole(table.render().as_bytes())
            }
        }
    }
}

impl Run {
    fn run(self) -> Result<(), Complaint> {
        let (_, scenario) = read(&self.scenario)?;
        let answers = scenario.run().or_complain(Exit::Failed, || {
            format!("The scenario {} cannot be run.", scenario.name)
        })?;
        if let Some(path) = &self.trace {
            let text = forms::trace(&answers);
            std::fs::write(path, text)
                .or_complain(Exit::Failed, || format!("{} could not be written.", path.display()))?;
        }
        let text = match (self.json, self.csv) {
            (true, _) => forms::json(&scenario, &answers),
            (_, true) => forms::csv(&answers),
            _ => tables(&scenario, &answers),
        };
        print_whole(text.as_bytes())
    }
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
