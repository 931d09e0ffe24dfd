//! `weft validate`: how far the model is from measurements.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use console::style;
use serde::Serialize;
use weft_model::validate::{self, Accuracy, Compared, Systems, TruthRow, Unpredicted, check, shipped, tables};

use crate::complaint::{Complain, Complaint, Exit};
use crate::report::comparison::{Comparison, Pair};
use crate::report::{self, Figures, short};
use crate::table::{Align, Table};

/// How many reasons are given for rows that were not predicted.
const REASONS: usize = 4;
/// How many lines of errors are put on a page.
const LINES_MAX: usize = 2_000;

/// Predict every row of tables of measurements, and say how far off the predictions are
///
/// A table is a CSV file whose name and columns are those of a file under `ground_truth/`; its rows may be your own. Errors are
/// |predicted − measured| / measured.
#[derive(Debug, Args)]
pub struct Validate {
    /// Where the tables are; those that come with the program where nothing is said
    dir: Option<PathBuf>,
    /// Only this table
    #[arg(long, value_name = "NAME")]
    table: Option<String>,
    /// Write a page for a browser, everything in one file: every row predicted and measured
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print one JSON object a line instead of tables
    #[arg(long)]
    json: bool,
}

impl Validate {
    pub fn run(self) -> Result<(), Complaint> {
        let mut texts = match &self.dir {
            Some(dir) => read(dir)?,
            None => shipped()
                .map(|(name, text)| (name.to_owned(), text.to_owned()))
                .collect(),
        };
        if let Some(wanted) = &self.table {
            texts.retain(|name, _| name == wanted);
        }
        if texts.is_empty() {
            return Err(Complaint::new(Exit::Usage, "There is no table to look at."));
        }
        let known = tables();
        let mut systems = Systems::default();
        let mut out = String::new();
        let mut reports = Vec::new();
        let pairs = RefCell::new(Vec::new());
        // In the order of the models, and then what has none.
        for table in &known {
            let Some(text) = texts.remove(table.name()) else {
                continue;
            };
            let noted = Noted {
                table: &**table,
                pairs: &pairs,
            };
            let report = check(&noted, &text, &mut systems).or_complain(Exit::Usage, || {
                format!("{}.csv is not a table of measurements.", table.name())
            })?;
            match self.json {
                true => report_json(&report, &mut out),
                false => report_table(&report, &mut out),
            }
            reports.push(report);
        }
        if let Some(path) = &self.report {
            let page = page(&reports, pairs.into_inner()).html();
            fs::write(path, page).or_complain(Exit::Failed, || format!("{} could not be written.", path.display()))?;
        }
        for (name, text) in texts {
            let rows = text.lines().skip(1).filter(|line| !line.trim().is_empty()).count();
            match self.json {
                true => json_line(&JsonLine::unknown(&name, rows), &mut out),
                false => out.push_str(&format!(
                    "{}\n  no model predicts it: {rows} rows unsupported\n\n",
                    style(&name).bold()
                )),
            }
        }
        crate::out::print_whole(out.as_bytes())
    }
}

/// A table that keeps what its rows come to.
#[derive(Debug)]
struct Noted<'a> {
    table: &'a dyn validate::TruthTable,
    pairs: &'a RefCell<Vec<Pair>>,
}

impl validate::TruthTable for Noted<'_> {
    fn name(&self) -> &'static str {
        self.table.name()
    }
    fn columns(&self) -> &'static [&'static str] {
        self.table.columns()
    }
    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted> {
        let compared = self.table.predict(row, systems)?;
        self.pairs.borrow_mut().extend(compared.iter().map(|one| Pair {
            group: short(&format!("{}, {}, {}", self.table.name(), one.quantity, one.system)),
            bytes: None,
            measured: one.measured,
            predicted: vec![Some(one.predicted)],
        }));
        Ok(compared)
    }
}

/// Everything on one page.
fn page(reports: &[Accuracy], pairs: Vec<Pair>) -> report::Report {
    let row = |(table, line): (&str, &validate::Line)| {
        let figure = |value: f64| match line.rows {
            0 => "–".to_owned(),
            _ => format!("{:.1} %", value * 100.0),
        };
        vec![
            table.to_owned(),
            line.quantity.to_owned(),
            line.system.as_deref().map_or("all".to_owned(), short),
            line.rows.to_string(),
            figure(line.median),
            figure(line.p90),
            line.unsupported.to_string(),
        ]
    };
    let lines = reports
        .iter()
        .flat_map(|report| report.lines.iter().map(|line| (report.table, line)));
    let note = "Every row in the unit of its table, beside what the model says. On the dashed line both are the same.";
    report::Report {
        kind: "measured by others".to_owned(),
        title: "Predictions beside measurements".to_owned(),
        comparison: Some(Comparison::new(vec!["model".to_owned()], pairs, note.to_owned()).untimed()),
        tables: vec![Figures {
            title: "Errors by table and system".to_owned(),
            columns: ["table", "quantity", "system", "rows", "median", "90 %", "unsupported"]
                .map(str::to_owned)
                .to_vec(),
            rows: lines.take(LINES_MAX).map(row).collect(),
        }],
        foot: format!("Weft {}.", env!("CARGO_PKG_VERSION")),
        ..report::Report::default()
    }
}

/// Every CSV file in a directory, by its name.
fn read(dir: &Path) -> Result<BTreeMap<String, String>, Complaint> {
    let mut texts = BTreeMap::new();
    let entries = fs::read_dir(dir).or_complain(Exit::Usage, || format!("{} cannot be looked into.", dir.display()))?;
    for entry in entries {
        let path = entry
            .or_complain(Exit::Usage, || format!("{} cannot be looked into.", dir.display()))?
            .path();
        if path.extension().is_some_and(|ending| ending == "csv")
            && let Some(name) = path.file_stem().and_then(|name| name.to_str())
        {
            let text =
                fs::read_to_string(&path).or_complain(Exit::Usage, || format!("{} cannot be read.", path.display()))?;
            texts.insert(name.to_owned(), text);
        }
    }
    Ok(texts)
}

fn report_table(report: &Accuracy, out: &mut String) {
    let mut table = Table::new(&[
        ("quantity", Align::Left),
        ("system", Align::Left),
        ("rows", Align::Right),
        ("median", Align::Right),
        ("90 %", Align::Right),
        ("unsupported", Align::Right),
    ]);
    for line in &report.lines {
        let figure = |value: f64| match line.rows {
            0 => "–".to_owned(),
            _ => format!("{:.1} %", value * 100.0),
        };
        table.row(vec![
            line.quantity.to_owned(),
            line.system.clone().unwrap_or_else(|| "all".to_owned()),
            line.rows.to_string(),
            figure(line.median),
            figure(line.p90),
            line.unsupported.to_string(),
        ]);
    }
    out.push_str(&format!("{}\n{}", style(report.table).bold(), table.render()));
    for (reason, count) in report.reasons.iter().take(REASONS) {
        out.push_str(&format!("  {count} unsupported: {reason}\n"));
    }
    out.push('\n');
}

fn report_json(report: &Accuracy, out: &mut String) {
    for line in &report.lines {
        let figure = |value: f64| (line.rows > 0).then_some(value);
        let line = JsonLine {
            table: report.table,
            quantity: Some(line.quantity),
            system: line.system.as_deref(),
            rows: line.rows,
            median: figure(line.median),
            p90: figure(line.p90),
            unsupported: line.unsupported,
        };
        json_line(&line, out);
    }
}

fn json_line(line: &JsonLine<'_>, out: &mut String) {
    out.push_str(&serde_json::to_string(line).expect("plain fields have a form in JSON"));
    out.push('\n');
}

/// Errors are shares, not per cent. No system: all of them together.
#[derive(Serialize)]
struct JsonLine<'a> {
    table: &'a str,
    quantity: Option<&'a str>,
    system: Option<&'a str>,
    rows: usize,
    median: Option<f64>,
    p90: Option<f64>,
    unsupported: usize,
}

impl JsonLine<'_> {
    fn unknown(table: &str, rows: usize) -> JsonLine<'_> {
        JsonLine {
            table,
            quantity: None,
            system: None,
            rows: 0,
            median: None,
            p90: None,
            unsupported: rows,
        }
    }
}
