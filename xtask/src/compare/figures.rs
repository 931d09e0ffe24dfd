//! What a comparison leaves behind: a page in `docs/figures`, dated, written by the command that measured, and by nobody else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{self, Error, root};

/// A row of such a page, as it is shown.
pub struct Row {
    pub workload: String,
    pub peer: String,
    pub weft: String,
    pub ratio: String,
    pub required: String,
    pub reached: bool,
}

/// The README shows these, and leads to the page with all of them.
const SHOWN: [&str; 6] = [
    "shared_memory READ 4 KiB × 64, foreign memory",
    "shared_memory READ 64 KiB × 1024, mapped memory",
    "shared_memory READ 64 MiB × 1, foreign memory",
    "tcp READ 64 KiB × 64",
    "CPU of an idle agent",
    "installed size",
];
const SHOWN_BEGIN: &str = "<!-- peers: begin -->";
const SHOWN_END: &str = "<!-- peers: end -->";

/// Writes the page `docs/figures/NAME.md`.
pub fn write(name: &str, command: &str, rows: &[Row]) -> Result<(), Error> {
    let path = root().join(format!("docs/figures/{name}.md"));
    let date = command::output(Command::new("date").args(["--utc", "+%F"]))?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    put(&path, &page(name, command, date.trim(), cores, rows))
}

/// Puts six of the rows into the README, where all of them were measured.
pub fn write_shown(rows: &[Row]) -> Result<(), Error> {
    let path = root().join("README.md");
    let readme = fs::read_to_string(&path).map_err(|source| unusable(&path, source))?;
    match shown(&readme, rows) {
        Some(readme) => put(&path, &readme),
        None => Ok(()),
    }
}

fn page(name: &str, command: &str, date: &str, cores: usize, rows: &[Row]) -> String {
    let reached = rows.iter().filter(|row| row.reached).count();
    format!(
        "# Figures: {name}\n\nWritten by `{command}` on {date}, on {cores} cores. {reached} of {} rows reached what is required.\n\n{}",
        rows.len(),
        table(rows.iter())
    )
}

/// The README with other rows, if there is one for each place.
fn shown(readme: &str, rows: &[Row]) -> Option<String> {
    let (before, rest) = readme.split_once(SHOWN_BEGIN)?;
    let (_, after) = rest.split_once(SHOWN_END)?;
    let wanted = SHOWN.map(|name| rows.iter().find(|row| row.workload == name));
    let wanted: Vec<&Row> = wanted.into_iter().collect::<Option<_>>()?;
    Some(format!(
        "{before}{SHOWN_BEGIN}\n{}{SHOWN_END}{after}",
        table(wanted.into_iter())
    ))
}

fn table<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    let mut table = String::from("| workload | peer | Weft | ratio | required |\n|---|---|---|---|---|\n");
    for row in rows {
        let missed = if row.reached { "" } else { " **missed**" };
        let required = if row.required.is_empty() { "–" } else { &row.required };
        let Row {
            workload,
            peer,
            weft,
            ratio,
            ..
        } = row;
        table += &format!("| {workload} | {peer} | {weft} | {ratio}{missed} | {required} |\n");
    }
    table
}

fn put(path: &Path, text: &str) -> Result<(), Error> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(path, text));
    written.map_err(|source| unusable(path, source))
}

fn unusable(path: &Path, source: std::io::Error) -> Error {
    Error::File {
        path: PathBuf::from(path),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(workload: &str, reached: bool) -> Row {
        Row {
            workload: workload.to_owned(),
            peer: "2.0 µs".to_owned(),
            weft: "1.0 µs".to_owned(),
            ratio: "2.00 ×".to_owned(),
            required: String::new(),
            reached,
        }
    }

    #[test]
    fn a_page_says_when_where_and_by_what_it_was_measured() {
        let page = page(
            "transfer",
            "cargo xtask compare transfer",
            "2026-01-02",
            2,
            &[row("a", true), row("b", false)],
        );
        assert!(page.contains("Written by `cargo xtask compare transfer` on 2026-01-02, on 2 cores. 1 of 2 rows"));
        assert!(page.contains("| b | 2.0 µs | 1.0 µs | 2.00 × **missed** | – |"));
    }

    #[test]
    fn the_readme_shows_six_rows_and_stays_as_it_is_where_one_was_not_measured() {
        let readme = fs::read_to_string(root().join("README.md")).unwrap();
        let rows = SHOWN.map(|name| row(name, true));
        let new = shown(&readme, &rows).unwrap();
        assert_eq!(new.matches("| 2.0 µs | 1.0 µs | 2.00 × | – |").count(), SHOWN.len());
        assert_eq!(shown(&new, &rows).unwrap(), new);
        assert!(shown(&readme, &rows[1..]).is_none());
        // What is there now are those six.
        let (_, there) = readme.split_once(SHOWN_BEGIN).unwrap();
        let there = there.split_once(SHOWN_END).unwrap().0;
        assert_eq!(
            there.lines().filter(|line| line.starts_with("| ")).count(),
            SHOWN.len() + 1
        );
        assert!(SHOWN.iter().all(|name| there.contains(name)));
    }
}
