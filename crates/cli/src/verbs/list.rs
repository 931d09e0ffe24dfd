//! `weft list`: what is shipped with the command, and what a server has.

use clap::Args;
use serde_json::{Value, json};
use weft_model::system::System;
use weft_model::workload::model::Model;
use weft_plan::Bytes;
use weft_sim::scenario::Scenario;

use crate::client::{Client, Url, complain};
use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::Overrides;
use crate::out::print_whole;
use crate::table::{Align, Table};
use crate::verbs::sim::serving;

/// List scenarios, systems of GPUs and models that are shipped, or the files of a machine that runs `weft serve`
///
/// `weft show` prints what is listed here as the file that describes it.
#[derive(Debug, Args)]
pub struct List {
    /// scenarios, systems, models, or weft://host:port/directory; without it, what can be listed
    what: Option<String>,
    /// Of a server: everything below the directory too
    #[arg(long, short)]
    deep: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// What can be listed, and how it is used.
const KINDS: [(&str, &str); 3] = [
    ("scenarios", "weft sim run NAME, weft sim serving"),
    (
        "systems",
        "weft plan-training --system NAME, weft plan-serving --system NAME, scenarios",
    ),
    ("models", "weft plan-training NAME, weft plan-serving NAME, scenarios"),
];

/// A table, and its rows for programs.
struct Listing {
    table: Table,
    rows: Vec<Value>,
}

impl List {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        let what = self.what.as_deref();
        let listing = match what {
            None => kinds(),
            Some("scenarios") => scenarios()?,
            Some("systems") => systems()?,
            Some("models") => models(),
            Some(text) => match Url::parse(text) {
                Some(url) => self.files(&url?, overrides)?,
                None => {
                    let known: Vec<&str> = KINDS.iter().map(|(kind, _)| *kind).collect();
                    return Err(Complaint::new(Exit::Usage, format!("{text} cannot be listed."))
                        .try_this(format!("one of {}, or weft://host:port/directory", known.join(", "))));
                }
            },
        };
        let text = match self.json {
            true => listing.rows.iter().map(|row| format!("{row}\n")).collect(),
            false => listing.table.render(),
        };
        print_whole(text.as_bytes())
    }

    /// What a server has.
    fn files(&self, url: &Url, overrides: &Overrides) -> Result<Listing, Complaint> {
        let client = Client::dial(url, None, overrides)?;
        let listed = client.list(&url.name, self.deep);
        let (entries, left_out) = listed.map_err(|error| complain(&error, url))?;
        let mut table = Table::new(&[("size", Align::Right), ("name", Align::Left)]);
        let mut rows = Vec::new();
        for entry in entries {
            // Names come from elsewhere, and nothing of them may move a terminal's cursor.
            let name = entry.path.replace(char::is_control, "?");
            table.row(match entry.bytes {
                Some(bytes) => vec![format!("{:.1}", Bytes(bytes)), name],
                None => vec![String::new(), format!("{name}/")],
            });
            rows.push(json!({"name": entry.path, "bytes": entry.bytes}));
        }
        if left_out > 0 {
            note!("{left_out} things that are neither files nor directories, or cannot be had, are not shown");
        }
        Ok(Listing { table, rows })
    }
}

fn kinds() -> Listing {
    let mut table = Table::new(&[
        ("weft list", Align::Left),
        ("how many", Align::Right),
        ("what for", Align::Left),
    ]);
    let mut rows = Vec::new();
    let counts = [
        Scenario::names().count() + 1,
        System::names().count(),
        Model::catalogue().len(),
    ];
    for ((kind, used), count) in KINDS.into_iter().zip(counts) {
        table.row(vec![kind.to_owned(), count.to_string(), used.to_owned()]);
        rows.push(json!({"kind": kind, "count": count, "used_by": used}));
    }
    Listing { table, rows }
}

fn scenarios() -> Result<Listing, Complaint> {
    let mut table = Table::new(&[
        ("scenario", Align::Left),
        ("run by", Align::Left),
        ("what it is", Align::Left),
    ]);
    let mut rows = Vec::new();
    let mut add = |name: &str, run: String, summary: &str| {
        table.row(vec![name.to_owned(), run.clone(), summary.to_owned()]);
        rows.push(json!({"name": name, "run": run, "summary": summary}));
    };
    for name in Scenario::names() {
        let text = Scenario::shipped(name).unwrap_or_default();
        let scenario = Scenario::from_toml(text)
            .or_complain(Exit::Failed, || format!("{name} is not a scenario that can be run."))?;
        add(name, format!("weft sim run {name}"), &scenario.summary);
    }
    add(serving::NAME, "weft sim serving".to_owned(), serving::SUMMARY);
    Ok(Listing { table, rows })
}

fn systems() -> Result<Listing, Complaint> {
    let mut table = Table::new(&[
        ("system", Align::Left),
        ("also", Align::Left),
        ("GPUs", Align::Right),
        ("what it is", Align::Left),
    ]);
    let mut rows = Vec::new();
    for name in System::names() {
        let system = System::named(name).or_complain(Exit::Failed, || format!("{name} is not a system."))?;
        table.row(vec![
            system.name.clone(),
            system.aliases.join(", "),
            system.node.gpus.to_string(),
            system.summary.clone(),
        ]);
        rows.push(json!({
            "name": system.name, "aliases": system.aliases, "gpus_per_node": system.node.gpus, "summary": system.summary,
        }));
    }
    Ok(Listing { table, rows })
}

fn models() -> Listing {
    let mut table = Table::new(&[
        ("model", Align::Left),
        ("parameters", Align::Right),
        ("of which a token meets", Align::Right),
        ("layers", Align::Right),
        ("also", Align::Left),
    ]);
    let mut rows = Vec::new();
    for model in Model::catalogue() {
        let (all, active) = (model.parameters(), model.active_parameters());
        table.row(vec![
            model.name.clone(),
            format!("{:.1} B", all / 1e9),
            format!("{:.1} B", active / 1e9),
            model.layers().to_string(),
            model.aliases.join(", "),
        ]);
        rows.push(json!({
            "name": model.name, "aliases": model.aliases, "layers": model.layers(), "parameters": all, "active_parameters": active,
        }));
    }
    Listing { table, rows }
}
