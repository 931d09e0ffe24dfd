//! How far predictions are from measurements: every row of a table of measurements, predicted.
//!
//! A [`TruthTable`] knows the columns of one file and which model predicts its rows; [`check`] runs it over a file and sums up the errors. The files
//! under `ground_truth/` are carried along ([`shipped`]); files of the same columns with rows of one's own are checked the same way.
//!
//! ```
//! use weft_model::validate::{self, Systems};
//! let own = "system,op_name,num_gpus,bytes,time_us\nh100_sxm,all_reduce,8,536870912,2111\nmine,all_reduce,8,8,1\n";
//! let table = validate::tables().into_iter().find(|table| table.name() == "aic_nccl").unwrap();
//! let report = validate::check(&*table, own, &mut Systems::default())?;
//! let overall = &report.lines[0];
//! assert_eq!((overall.rows, overall.unsupported), (1, 1));
//! assert!(overall.median < 0.1);
//! # Ok::<(), weft_model::validate::ValidateError>(())
//! ```

mod csv;
mod shipped;
mod tables;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::system::System;

pub use csv::TruthRow;
pub use shipped::shipped;
pub use tables::tables;

/// The rows of one file, and what predicts them.
pub trait TruthTable: fmt::Debug {
    /// The name of the file, without `.csv`.
    fn name(&self) -> &'static str;

    /// The columns without which no row can be predicted.
    fn columns(&self) -> &'static [&'static str];

    /// What the row says was measured, beside what the model says. A row may hold several quantities; one that holds none that the model
    /// predicts is [`Unpredicted::Unsupported`].
    fn predict(&self, row: &TruthRow<'_>, systems: &mut Systems) -> Result<Vec<Compared>, Unpredicted>;
}

/// One quantity, measured and predicted, in the same unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// What the figures are summed up by, beside the table: the name of the system as the row has it.
    pub system: String,
    pub quantity: &'static str,
    pub predicted: f64,
    pub measured: f64,
}

/// Why a row was not predicted.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Unpredicted {
    /// The model has nothing to say about it.
    #[error("{reason}")]
    Unsupported { system: String, reason: String },
    #[error("line {line}, column `{column}`: `{text}` is not a number")]
    NotANumber { line: usize, column: String, text: String },
    #[error("line {line}: nothing in column `{column}`")]
    Nothing { line: usize, column: String },
}

/// What is wrong with a file of measurements.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ValidateError {
    #[error("a file of {bytes} bytes; {max} is the most")]
    TooLong { bytes: usize, max: usize },
    #[error("there is no heading")]
    NoHeading,
    #[error("there is no column `{column}`")]
    NoColumn { column: &'static str },
    #[error("line {line}: {cells} cells under {columns} headings")]
    Ragged { line: usize, cells: usize, columns: usize },
    #[error("line {line}: a quotation that does not end")]
    OpenQuotation { line: usize },
    #[error(transparent)]
    TruthRow(Unpredicted),
}

/// What was found out about a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Accuracy {
    pub table: &'static str,
    /// Where there are several quantities, first `all` of them together; then for each first all systems together, then each by its name.
    pub lines: Vec<Line>,
    /// Why rows were not supported, and how many, most frequent first.
    pub reasons: Vec<(String, usize)>,
}

/// Errors of one quantity, of a system or of all.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub quantity: &'static str,
    /// `None`: all.
    pub system: Option<String>,
    /// Rows that were predicted.
    pub rows: usize,
    pub unsupported: usize,
    /// Of |predicted − measured| / measured.
    pub median: f64,
    pub p90: f64,
}

/// Systems by the names that rows have for them, read once.
#[derive(Debug, Default)]
pub struct Systems {
    known: BTreeMap<String, Option<Arc<System>>>,
}

impl Systems {
    /// The system of that name; `Unsupported` where there is none.
    pub fn named(&mut self, name: &str) -> Result<Arc<System>, Unpredicted> {
        let found = self
            .known
            .entry(name.to_owned())
            .or_insert_with(|| System::named(name).ok().map(Arc::new));
        found.clone().ok_or_else(|| Unpredicted::Unsupported {
            system: name.to_owned(),
            reason: format!("no system is called `{name}`"),
        })
    }
}

/// Predicts every row of a file.
pub fn check(table: &dyn TruthTable, text: &str, systems: &mut Systems) -> Result<Accuracy, ValidateError> {
    let mut errors: BTreeMap<(&'static str, String), Vec<f64>> = BTreeMap::new();
    let mut unsupported: BTreeMap<String, usize> = BTreeMap::new();
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    csv::rows(text, table.columns(), |row| {
        match table.predict(row, systems) {
            Ok(compared) => {
                for one in compared {
                    let error = (one.predicted - one.measured).abs() / one.measured;
                    errors.entry((one.quantity, one.system)).or_default().push(error);
                }
            }
            Err(Unpredicted::Unsupported { system, reason }) => {
                *unsupported.entry(system).or_default() += 1;
                *reasons.entry(reason).or_default() += 1;
            }
            Err(other) => return Err(ValidateError::TruthRow(other)),
        }
        Ok(())
    })?;
    let mut quantities: Vec<&'static str> = errors.keys().map(|(quantity, _)| *quantity).collect();
    quantities.dedup();
    if quantities.is_empty() {
        quantities.push("time");
    }
    let mut lines = Vec::new();
    if quantities.len() > 1 {
        let all: Vec<f64> = errors.values().flatten().copied().collect();
        lines.push(Line::new("all", None, all, unsupported.values().sum()));
    }
    for quantity in quantities {
        let of_it = || errors.iter().filter(|((q, _), _)| *q == quantity);
        let all: Vec<f64> = of_it().flat_map(|(_, errors)| errors.iter().copied()).collect();
        lines.push(Line::new(quantity, None, all, unsupported.values().sum()));
        for ((_, system), errors) in of_it() {
            let without = unsupported.get(system).copied().unwrap_or(0);
            lines.push(Line::new(quantity, Some(system.clone()), errors.clone(), without));
        }
        for (system, count) in &unsupported {
            if !errors.contains_key(&(quantity, system.clone())) {
                lines.push(Line::new(quantity, Some(system.clone()), Vec::new(), *count));
            }
        }
    }
    let mut reasons: Vec<(String, usize)> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    Ok(Accuracy {
        table: table.name(),
        lines,
        reasons,
    })
}

impl Line {
    fn new(quantity: &'static str, system: Option<String>, mut errors: Vec<f64>, unsupported: usize) -> Line {
        errors.sort_by(f64::total_cmp);
        Line {
            quantity,
            system,
            rows: errors.len(),
            unsupported,
            median: quantile(&errors, 0.5),
            p90: quantile(&errors, 0.9),
        }
    }
}

/// Of ascending values, between the two that are nearest; 0 of none.
fn quantile(ascending: &[f64], share: f64) -> f64 {
    let Some(last) = ascending.len().checked_sub(1) else {
        return 0.0;
    };
    let at = share * last as f64;
    let (low, high) = (ascending[at.floor() as usize], ascending[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

#[cfg(test)]
mod tests;
