//! `weft sim serving`: requests, workers and hand-offs, event by event.

use std::path::PathBuf;

use clap::Args;
use console::style;
use serde_json::json;
use weft_sim::serving::{Percentiles, Report, ServingScenario};

use crate::complaint::{Complain, Complaint, Exit};
use crate::out::print_whole;
use crate::table::{Align, Table};

/// The scenario that comes with the program: what it is called among others, what it is, and its file.
pub const NAME: &str = "serving";
pub const SUMMARY: &str = "Requests, workers and hand-offs of caches, event by event";
pub const SHIPPED: &str = include_str!("../../../../../scenarios/serving.toml");

/// Simulate serving a model, with hand-offs of caches that share the links
///
/// A scenario is a TOML file as scenarios/serving.toml: a system of GPUs, a model, workers, arrivals, and the network between them. The same file gives the
/// same output again.
#[derive(Debug, Args)]
pub struct Serving {
    /// A file; the scenario that comes with the program where nothing is said (`weft show scenario serving`)
    scenario: Option<String>,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Write a page for a browser, everything in one file: links coloured by how busy they were, all figures
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

impl Serving {
    pub fn run(self) -> Result<(), Complaint> {
        let text = match self.scenario.as_deref() {
            None => SHIPPED.to_owned(),
            Some(NAME) if !std::path::Path::new(NAME).exists() => SHIPPED.to_owned(),
            Some(path) => {
                std::fs::read_to_string(path).or_complain(Exit::Usage, || format!("{path} cannot be read."))?
            }
        };
        let name = self.scenario.as_deref().unwrap_or("the shipped scenario");
        let scenario = ServingScenario::from_toml(&text)
            .or_complain(Exit::Usage, || format!("{name} is not a serving scenario."))?;
        let report = scenario
            .run()
            .map_err(|error| error.in_text(&text))
            .or_complain(Exit::Failed, || format!("{name} cannot be run."))?;
        if let Some(path) = &self.report {
            super::write(path, &super::report::serving(&scenario, &report, &rows(&report)).html())?;
        }
        let text = match self.json {
            true => as_json(&report),
            false => as_table(&scenario, &report),
        };
        print_whole(text.as_bytes())
    }
}

fn rows(report: &Report) -> [(&'static str, &Percentiles); 4] {
    [
        ("first token", &report.first_token),
        ("per token", &report.per_token),
        ("hand-off", &report.hand_off),
        ("whole request", &report.whole),
    ]
}

fn as_table(scenario: &ServingScenario, report: &Report) -> String {
    let mut table = Table::new(&[
        ("ms", Align::Left),
        ("mean", Align::Right),
        ("50 %", Align::Right),
        ("90 %", Align::Right),
        ("99 %", Align::Right),
        ("most", Align::Right),
    ]);
    for (name, values) in rows(report) {
        let cells = values.figures().map(|value| format!("{value:.2}"));
        table.row(std::iter::once(name.to_owned()).chain(cells).collect());
    }
    let mut text = format!(
        "{}\n{}\n{}",
        style(&scenario.name).bold(),
        scenario.summary,
        table.render()
    );
    text.push_str(&format!(
        "\n  {} requests in {:.1}: {:.0} tokens/s, at most {} sequences a worker, {:.0} % of prompts found in caches; {} events, {} flows\n",
        report.requests,
        report.time,
        report.output_per_second,
        report.batch_max,
        report.found * 100.0,
        report.events,
        report.flows,
    ));
    for hot in report.hot.iter().take(4) {
        text.push_str(&format!(
            "  {}: {:.0} % busy, {} flows at once\n",
            hot.name,
            hot.utilisation * 100.0,
            hot.flows_max
        ));
    }
    text
}

fn as_json(report: &Report) -> String {
    let figures = |values: &Percentiles| json!(values);
    let mut whole = json!({
        "requests": report.requests,
        "seconds": report.time.as_secs_f64(),
        "output_per_second": report.output_per_second,
        "found": report.found,
        "batch_max": report.batch_max,
        "events": report.events,
        "flows": report.flows,
    });
    for (name, values) in rows(report) {
        whole[format!("{}_ms", name.replace([' ', '-'], "_"))] = figures(values);
    }
    let links = report
        .hot
        .iter()
        .map(|hot| json!({ "link": hot.name, "utilisation": hot.utilisation }));
    whole["links"] = links.collect();
    format!("{whole}\n")
}
