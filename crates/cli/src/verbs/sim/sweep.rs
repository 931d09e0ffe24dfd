//! `weft sim sweep`: a scenario for every point of a grid, on all cores; what is there already is not run again.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use toml::{Table, Value};
use weft_sim::scenario::Scenario;

use super::{forms, plot, read};
use crate::complaint::{Complain, Complaint, Exit};

/// More points than anybody waits for.
const POINTS_MAX: usize = 1 << 20;

/// Vary fields of a scenario over a grid, and write a row a point
///
/// Rows that the output has already are kept and not run again, so that a sweep that was broken off goes on where it was. Give the same scenario and the
/// same fields again.
#[derive(Debug, Args)]
pub struct Sweep {
    /// A file, or the name of a shipped scenario
    scenario: String,
    /// A field and its values, as in `workload.collective.bytes=1MiB,16MiB`. Again for each further dimension
    #[arg(long = "vary", value_name = "FIELD=A,B,…", required = true)]
    vary: Vec<String>,
    /// Where the rows go
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Draw the time over the first field, a line for each combination of the others
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// How many points are run at once; as many as there are cores where nothing is said
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

/// A field and what it is to be.
#[derive(Debug)]
struct Dimension {
    field: String,
    values: Vec<String>,
}

impl Sweep {
    pub fn run(self) -> Result<(), Complaint> {
        let (text, _) = read(&self.scenario)?;
        let table: Table =
            toml::from_str(&text).or_complain(Exit::Usage, || "The scenario is not TOML.".to_string())?;
        let dimensions = self
            .vary
            .iter()
            .map(|text| dimension(text))
            .collect::<Result<Vec<_>, _>>()?;
        let count = dimensions
            .iter()
            .try_fold(1usize, |count, dimension| count.checked_mul(dimension.values.len()));
        let Some(count) = count.filter(|&count| count <= POINTS_MAX) else {
            let sentence = format!("The grid has more than {POINTS_MAX} points.");
            return Err(Complaint::new(Exit::Usage, sentence));
        };
        let headings = headings(&dimensions);
        let done = self.rows_already_there(&headings)?;
        let points: Vec<Vec<&str>> = (0..count).map(|nth| point(&dimensions, nth)).collect();
        // Mistakes are found before anything is run for an hour.
        for point in &points {
            scenario(&table, &dimensions, point)?;
        }
        let key = |point: &[&str]| point.iter().map(|value| quoted(value)).collect::<Vec<_>>().join(",");
        let left: Vec<&Vec<&str>> = points
            .iter()
            .filter(|point| !done.iter().any(|row| row.starts_with(&format!("{},", key(point)))))
            .collect();
        let bar = ProgressBar::new(count as u64);
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos} of {len} points, {eta} left") {
            bar.set_style(style);
        }
        bar.set_position((count - left.len()) as u64);
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.out)
            .or_complain(Exit::Failed, || format!("{} cannot be written.", self.out.display()))?;
        if done.is_empty() && file.metadata().is_ok_and(|metadata| metadata.len() == 0) {
            write_line(&mut file, &headings).or_complain(Exit::Failed, || "A row could not be written.".to_string())?;
        }
        let (next, file, failure) = (AtomicUsize::new(0), Mutex::new(file), Mutex::new(None));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..self.jobs.unwrap_or(cores).clamp(1, 256) {
                scope.spawn(|| {
                    while let Some(point) = left.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let outcome = scenario(&table, &dimensions, point).and_then(|scenario| {
                            let answers = scenario.run();
                            answers.or_complain(Exit::Failed, || format!("The point {} failed.", key(point)))
                        });
                        let written = outcome.and_then(|answers| {
                            let mut file = file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                            let rows = answers
                                .iter()
                                .map(|answer| format!("{},{}", key(point), forms::row(answer)));
                            // One write a point, so that a point is there whole or not at all.
                            let rows = rows.collect::<Vec<_>>().join("\n");
                            write_line(&mut file, &rows)
                                .or_complain(Exit::Failed, || "A row could not be written.".to_string())
                        });
                        if let Err(complaint) = written {
                            let mut failure = failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                            failure.get_or_insert(complaint);
                            return;
                        }
                        bar.inc(1);
                    }
                });
            }
        });
        bar.finish_and_clear();
        if let Some(complaint) = failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
            return Err(complaint);
        }
        let rows = self.rows_already_there(&headings)?;
        if let Some(path) = &self.svg {
            let drawing = plot::times(&dimensions.iter().map(|d| d.field.as_str()).collect::<Vec<_>>(), &rows);
            std::fs::write(path, drawing)
                .or_complain(Exit::Failed, || format!("{} could not be written.", path.display()))?;
        }
        outln!("{count} points, {} of them new, in {}", left.len(), self.out.display());
        Ok(())
    }

    /// The rows of the output, if it is of the same sweep.
    fn rows_already_there(&self, headings: &str) -> Result<Vec<String>, Complaint> {
        let text = match std::fs::read_to_string(&self.out) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.or_complain(Exit::Failed, || format!("{} cannot be read.", self.out.display()))?,
        };
        let mut lines = text.lines();
        match lines.next() {
            None => Ok(Vec::new()),
            Some(first) if first == headings => Ok(lines.map(str::to_owned).collect()),
            Some(_) => {
                let sentence = format!("{} is of another sweep.", self.out.display());
                Err(Complaint::new(Exit::Usage, sentence).try_this("another file for --out"))
            }
        }
    }
}

fn write_line(file: &mut std::fs::File, text: &str) -> std::io::Result<()> {
    file.write_all(format!("{text}\n").as_bytes())
}

fn headings(dimensions: &[Dimension]) -> String {
    let fields: Vec<&str> = dimensions.iter().map(|dimension| dimension.field.as_str()).collect();
    format!("{},{}", fields.join(","), forms::HEADINGS)
}

fn dimension(text: &str) -> Result<Dimension, Complaint> {
    let parts = text.split_once('=').map(|(field, values)| {
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        (field.trim().to_owned(), values)
    });
    match parts {
        Some((field, values)) if !field.is_empty() && !field.contains(',') && values.iter().all(|v| !v.is_empty()) => {
            Ok(Dimension { field, values })
        }
        _ => Err(Complaint::new(Exit::Usage, format!("`{text}` is not FIELD=A,B,…"))),
    }
}

/// The values of the nth point; the last field changes fastest.
fn point(dimensions: &[Dimension], mut nth: usize) -> Vec<&str> {
    let mut values: Vec<&str> = dimensions
        .iter()
        .rev()
        .map(|dimension| {
            let value = dimension.values[nth % dimension.values.len()].as_str();
            nth /= dimension.values.len();
            value
        })
        .collect();
    values.reverse();
    values
}

/// The scenario with the values of a point in it.
fn scenario(table: &Table, dimensions: &[Dimension], point: &[&str]) -> Result<Scenario, Complaint> {
    let mut table = table.clone();
    for (dimension, value) in dimensions.iter().zip(point) {
        set(&mut table, &dimension.field, meant(value)).ok_or_else(|| {
            let sentence = format!("`{}` is not a field of the scenario.", dimension.field);
            Complaint::new(Exit::Usage, sentence)
        })?;
    }
    let text = toml::to_string(&table).or_complain(Exit::Usage, || "The point is not TOML.".to_string())?;
    Scenario::from_toml(&text).or_complain(Exit::Usage, || format!("The point {} cannot be run.", point.join(", ")))
}

/// A number, a truth, a list, or else a word.
fn meant(text: &str) -> Value {
    let read = toml::from_str::<Table>(&format!("value = {text}"));
    match read.ok().and_then(|mut table| table.remove("value")) {
        Some(value) => value,
        None => Value::String(text.to_owned()),
    }
}

/// Sets a field by its path, `faults[0].left` or `workload.collective.bytes`; tables on the way must be there.
fn set(table: &mut Table, path: &str, value: Value) -> Option<()> {
    let (key, rest) = match path.split_once('.') {
        Some((key, rest)) => (key, Some(rest)),
        None => (path, None),
    };
    let (name, index) = match key.split_once('[') {
        Some((name, index)) => (name, Some(index.strip_suffix(']')?.parse::<usize>().ok()?)),
        None => (key, None),
    };
    match (index, rest) {
        (None, None) => {
            table.insert(name.to_owned(), value);
            Some(())
        }
        (None, Some(rest)) => set(table.get_mut(name)?.as_table_mut()?, rest, value),
        (Some(index), None) => {
            *table.get_mut(name)?.as_array_mut()?.get_mut(index)? = value;
            Some(())
        }
        (Some(index), Some(rest)) => {
            let entry = table.get_mut(name)?.as_array_mut()?.get_mut(index)?;
            set(entry.as_table_mut()?, rest, value)
        }
    }
}

/// A value as a cell: no comma, no line.
fn quoted(value: &str) -> String {
    value.replace([',', '\n', '\r'], " ")
}

/// What an answer's row is called in a drawing; kept beside [`forms::row`], whose columns it counts on.
pub(super) fn series(fields: usize, row: &str) -> Option<(String, String, f64)> {
    let cells: Vec<&str> = row.split(',').collect();
    let time = cells.get(fields + 4)?.parse().ok()?;
    let mut name: Vec<&str> = cells.get(1..fields)?.to_vec();
    name.push(cells.get(fields)?);
    Some((cells.first()?.to_string(), name.join(", "), time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_set_wherever_it_is() {
        let text = Scenario::shipped("degraded-nic").unwrap();
        let table: Table = toml::from_str(text).unwrap();
        let dimensions = [
            dimension("workload.collective.bytes=1MiB,2 MiB").unwrap(),
            dimension("faults[0].left=0.25,1").unwrap(),
            dimension("system.nodes=2,4").unwrap(),
        ];
        assert_eq!(point(&dimensions, 0), ["1MiB", "0.25", "2"]);
        assert_eq!(point(&dimensions, 7), ["2 MiB", "1", "4"]);
        let scenario = scenario(&table, &dimensions, &["2 MiB", "0.25", "2"]).unwrap();
        assert_eq!(scenario.faults[0].left, 0.25);
        assert_eq!(scenario.system.unwrap().nodes, 2);
        assert!(super::scenario(&table, &[dimension("work.place.colour=1").unwrap()], &["1"]).is_err());
        assert!(super::scenario(&table, &[dimension("colour=1").unwrap()], &["1"]).is_err());
    }

    #[test]
    fn a_row_has_the_time_where_drawings_look_for_it() {
        let scenario = Scenario::from_toml(Scenario::shipped("incast").unwrap()).unwrap();
        let answers: Vec<weft_sim::scenario::Answer> = scenario.run().unwrap();
        let row = format!("x,y,{}", forms::row(&answers[0]));
        let (x, name, time) = series(2, &row).unwrap();
        assert_eq!((x.as_str(), name.as_str()), ("x", "y, flow"));
        assert!((time - answers[0].time.as_ps() as f64 * 1e-6).abs() < 1e-3);
    }
}
