//! Predictions beside measurements, and the files that measurements come from.
//!
//! A file is what `weft bench collective --json` prints, an object a line; or a CSV table with a heading, as those under `ground_truth/`. Other fields
//! and columns than those that are needed do no harm.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

/// Longer than any sweep that somebody puts on a page.
const MAX_FILE_BYTES: usize = 64 << 20;
const MAX_ROWS: usize = 200_000;
/// So many pairs are shown at most.
pub const PAIRS_MAX: usize = 2_000;

/// Times in microseconds, or whatever the rows are counted in.
#[derive(Debug, Serialize)]
pub struct Comparison {
    note: String,
    timed: bool,
    /// What predicted.
    series: Vec<String>,
    rows: Vec<Pair>,
    errors: Vec<Errors>,
}

/// One measurement, and what each series says of it.
#[derive(Clone, Debug, Serialize)]
pub struct Pair {
    /// What belongs together: a line over sizes.
    pub group: String,
    /// `None` where size is not what the rows differ in.
    pub bytes: Option<u64>,
    pub measured: f64,
    pub predicted: Vec<Option<f64>>,
}

/// |predicted − measured| / measured, over all pairs.
#[derive(Debug, Serialize)]
struct Errors {
    name: String,
    pairs: usize,
    median: f64,
    p90: f64,
}

/// One row of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    pub line: usize,
    /// As the file spells it.
    pub operation: String,
    pub bytes: u64,
    pub ranks: u32,
    pub micros: f64,
    /// The machine, or the implementation.
    pub label: String,
    /// The system, where the file names one.
    pub system: Option<String>,
    pub algorithm: Option<String>,
    /// What a GPU library was told.
    pub settings: Option<String>,
    /// What was predicted when it was measured.
    pub predicted: Option<f64>,
}

/// What is wrong with a file of measurements, and where.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MeasuredError {
    #[error("a file of {bytes} bytes; {max} is the most")]
    TooLong { bytes: usize, max: usize },
    #[error("line {line}: more than {max} rows")]
    TooMany { line: usize, max: usize },
    #[error("there are no measurements in it")]
    Empty,
    #[error("line {line}, column {column}: not an object in JSON: {message}")]
    NotJson {
        line: usize,
        column: usize,
        message: String,
    },
    #[error("line {line}, at `{field}`: there is none")]
    Missing { line: usize, field: &'static str },
    #[error("line {line}, at `{field}`: {text} is not {wanted}")]
    NotThat {
        line: usize,
        field: &'static str,
        text: String,
        wanted: &'static str,
    },
    #[error("line {line}: {cells} cells under {columns} headings")]
    Ragged { line: usize, cells: usize, columns: usize },
    #[error("line {line}: a quotation that does not end")]
    OpenQuotation { line: usize },
}

impl Comparison {
    /// Pairs in the order given; `series` names what their predictions are.
    pub fn new(series: Vec<String>, mut rows: Vec<Pair>, mut note: String) -> Comparison {
        let errors = (0..series.len())
            .map(|nth| Errors::of(&series[nth], nth, &rows))
            .collect();
        if rows.len() > PAIRS_MAX {
            note.push_str(&format!(
                " {PAIRS_MAX} of {} pairs are shown, spread evenly; errors are over all of them.",
                rows.len()
            ));
            let stride = rows.len().div_ceil(PAIRS_MAX);
            rows = rows.into_iter().step_by(stride).collect();
        }
        Comparison {
            note,
            timed: true,
            series,
            rows,
            errors,
        }
    }

    /// Of quantities that are no times.
    pub fn untimed(self) -> Comparison {
        Comparison { timed: false, ..self }
    }
}

impl Errors {
    fn of(name: &str, nth: usize, rows: &[Pair]) -> Errors {
        let error = |row: &Pair| {
            let predicted = row.predicted.get(nth).copied().flatten()?;
            (row.measured > 0.0).then(|| (predicted - row.measured).abs() / row.measured)
        };
        let mut errors: Vec<f64> = rows.iter().filter_map(error).collect();
        errors.sort_by(f64::total_cmp);
        let at = |share: f64| match errors.len() {
            0 => 0.0,
            count => errors[((count - 1) as f64 * share).round() as usize],
        };
        Errors {
            name: name.to_owned(),
            pairs: errors.len(),
            median: super::rounded(at(0.5)),
            p90: super::rounded(at(0.9)),
        }
    }
}

/// Reads a file of measurements, whichever form it has.
pub fn read(text: &str) -> Result<Vec<Measured>, MeasuredError> {
    if text.len() > MAX_FILE_BYTES {
        return Err(MeasuredError::TooLong {
            bytes: text.len(),
            max: MAX_FILE_BYTES,
        });
    }
    let text = text.trim_start_matches('\u{feff}');
    let rows = match text.trim_start().starts_with('{') {
        true => objects(text)?,
        false => table(text)?,
    };
    match rows.is_empty() {
        true => Err(MeasuredError::Empty),
        false => Ok(rows),
    }
}

/// Takes a field by the first of its names that is there.
struct Fields<'a> {
    line: usize,
    value: &'a dyn Fn(&str) -> Option<String>,
}

impl Fields<'_> {
    fn text(&self, names: &[&'static str]) -> Option<String> {
        let found = names.iter().find_map(|name| (self.value)(name))?;
        let found = found.trim();
        (!found.is_empty()).then(|| super::short(found))
    }
    fn need_text(&self, names: &[&'static str]) -> Result<String, MeasuredError> {
        self.text(names).ok_or(MeasuredError::Missing {
            line: self.line,
            field: names[0],
        })
    }
    fn number(&self, names: &[&'static str]) -> Result<Option<f64>, MeasuredError> {
        let Some(text) = self.text(names) else {
            return Ok(None);
        };
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() && number >= 0.0 => Ok(Some(number)),
            _ => Err(self.not_that(names, &text, "a number from zero on")),
        }
    }
    fn need(&self, names: &[&'static str]) -> Result<f64, MeasuredError> {
        self.number(names)?.ok_or(MeasuredError::Missing {
            line: self.line,
            field: names[0],
        })
    }
    fn not_that(&self, names: &[&'static str], text: &str, wanted: &'static str) -> MeasuredError {
        let there = names.iter().find(|name| (self.value)(name).is_some());
        MeasuredError::NotThat {
            line: self.line,
            field: there.unwrap_or(&names[0]),
            text: format!("`{}`", text.chars().take(40).collect::<String>()),
            wanted,
        }
    }

    fn measured(&self) -> Result<Measured, MeasuredError> {
        let ranks = ["ranks", "num_gpus", "ngpus"];
        let count = self.need(&ranks)?;
        if !(1.0..=f64::from(u32::MAX)).contains(&count) || count.fract() != 0.0 {
            return Err(self.not_that(&ranks, &count.to_string(), "a number of ranks"));
        }
        let times = ["us_med", "time_us"];
        let micros = self.need(&times)?;
        if micros <= 0.0 {
            return Err(self.not_that(&times, &micros.to_string(), "a time above zero"));
        }
        let system = self.text(&["system", "gpu"]);
        let label = self.text(&["impl", "case", "system", "gpu"]).unwrap_or_default();
        Ok(Measured {
            line: self.line,
            operation: self.need_text(&["op", "op_name", "collective"])?,
            bytes: self.need(&["bytes"])? as u64,
            ranks: count as u32,
            micros,
            label,
            system,
            algorithm: self.text(&["algorithm"]),
            settings: self.text(&["settings"]),
            predicted: self.number(&["predicted_us"])?.filter(|us| *us > 0.0),
        })
    }
}

fn objects(text: &str) -> Result<Vec<Measured>, MeasuredError> {
    let mut rows = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        if text.trim().is_empty() {
            continue;
        }
        let not_json = |column, message: String| MeasuredError::NotJson { line, column, message };
        let object: BTreeMap<String, Value> =
            serde_json::from_str(text).map_err(|error| not_json(error.column(), error.to_string()))?;
        let value = |name: &str| match object.get(name)? {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        };
        rows.push(Fields { line, value: &value }.measured()?);
        bounded(line, &rows)?;
    }
    Ok(rows)
}

fn table(text: &str) -> Result<Vec<Measured>, MeasuredError> {
    let mut rows = Vec::new();
    let mut headings: Vec<String> = Vec::new();
    for (line, text) in (1..).zip(text.lines()) {
        if text.trim().is_empty() {
            continue;
        }
        let cells = cells(text).ok_or(MeasuredError::OpenQuotation { line })?;
        if headings.is_empty() {
            headings = cells.iter().map(|cell| cell.trim().to_owned()).collect();
            continue;
        }
        if cells.len() != headings.len() {
            return Err(MeasuredError::Ragged {
                line,
                cells: cells.len(),
                columns: headings.len(),
            });
        }
        let value = |name: &str| {
            let nth = headings.iter().position(|heading| heading == name)?;
            Some(cells[nth].clone())
        };
        rows.push(Fields { line, value: &value }.measured()?);
        bounded(line, &rows)?;
    }
    Ok(rows)
}

fn bounded(line: usize, rows: &[Measured]) -> Result<(), MeasuredError> {
    match rows.len() > MAX_ROWS {
        true => Err(MeasuredError::TooMany { line, max: MAX_ROWS }),
        false => Ok(()),
    }
}

/// The cells of a line; `None` where a quotation does not end.
fn cells(line: &str) -> Option<Vec<String>> {
    let mut cells = vec![String::new()];
    let mut quoted = false;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                cells.last_mut()?.push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(String::new()),
            c => cells.last_mut()?.push(c),
        }
    }
    (!quoted).then_some(cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_say_the_same() {
        let json = "{\"op\":\"allreduce\",\"bytes\":1024,\"ranks\":2,\"us_med\":3.5,\"impl\":\"a\"}\n";
        let csv = "impl,op,bytes,ranks,us_med\n\"a\",allreduce,1024,2,3.5\n";
        let (from_json, from_csv) = (read(json).unwrap(), read(csv).unwrap());
        assert_eq!(
            Measured {
                line: 2,
                ..from_json[0].clone()
            },
            from_csv[0]
        );
        assert_eq!((from_csv[0].micros, from_csv[0].bytes), (3.5, 1024));
    }

    #[test]
    fn ground_truth_is_read() {
        for (name, text) in weft_model::validate::shipped() {
            if name.contains("nccl") {
                assert!(read(text).unwrap().len() > 50, "{name}");
            }
        }
    }

    #[test]
    fn mistakes_are_told_with_line_and_field() {
        let head = "op,bytes,ranks,time_us\n";
        for (text, message) in [
            ("allreduce,8,2\n", "line 2: 3 cells under 4 headings"),
            (
                "allreduce,8,two,1\n",
                "line 2, at `ranks`: `two` is not a number from zero on",
            ),
            (
                "allreduce,8,2,-1\n",
                "line 2, at `time_us`: `-1` is not a number from zero on",
            ),
            (
                "allreduce,8,2.5,1\n",
                "line 2, at `ranks`: `2.5` is not a number of ranks",
            ),
            ("allreduce,,2,1\n", "line 2, at `bytes`: there is none"),
            ("\"allreduce,8,2,1\n", "line 2: a quotation that does not end"),
            ("", "there are no measurements in it"),
        ] {
            assert_eq!(read(&format!("{head}{text}")).unwrap_err().to_string(), message);
        }
        let said = read("{\"op\":\"allreduce\",\n").unwrap_err().to_string();
        assert!(said.starts_with("line 1, column "), "{said}");
        let said = read("{\"op\":\"a\",\"bytes\":1,\"ranks\":2}").unwrap_err().to_string();
        assert_eq!(said, "line 1, at `us_med`: there is none");
    }

    #[test]
    fn errors_are_over_all_pairs() {
        let pair = |nth: usize| Pair {
            group: "a".into(),
            bytes: Some(nth as u64),
            measured: 100.0,
            predicted: vec![Some(100.0 + (nth % 101) as f64), None],
        };
        let pairs = (0..101 * 101).map(pair).collect();
        let comparison = Comparison::new(vec!["one".into(), "two".into()], pairs, String::new());
        assert!(comparison.rows.len() <= PAIRS_MAX);
        assert_eq!((comparison.errors[0].pairs, comparison.errors[0].median), (10_201, 0.5));
        assert_eq!(comparison.errors[1].pairs, 0);
    }
}
