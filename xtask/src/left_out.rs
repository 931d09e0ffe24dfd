//! What a run of the suite left out, and why: written down by the tests themselves, printed as a table at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use weft_testing::{LEFT_OUT, REQUIRE};

use crate::command::{Error, root};

/// Places that are named of those that left something out for the same reason.
const PLACES_SHOWN: usize = 3;

/// The file that tests write to.
pub struct LeftOut {
    path: PathBuf,
    /// What the tests did not write down themselves.
    more: Vec<[String; 3]>,
}

impl LeftOut {
    /// An empty one.
    pub fn new() -> Result<LeftOut, Error> {
        let path = root().join("target/left-out");
        let failed = |source| Error::File {
            path: path.clone(),
            source,
        };
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
        fs::write(&path, "").map_err(failed)?;
        let more = Vec::new();
        Ok(LeftOut { path, more })
    }

    /// Tells the tests of a command where to write, and what must not be left out.
    pub fn tell<'a>(&self, command: &'a mut Command, required: &[String]) -> &'a mut Command {
        command.env(LEFT_OUT, &self.path).env(REQUIRE, required.join(","))
    }

    /// Writes down a whole step.
    pub fn add(&mut self, need: &str, place: &str, why: &str) {
        self.more.push([need, place, why].map(str::to_owned));
    }

    /// All of it but what was done in another way after all.
    pub fn table(&self, done: &[&str]) -> Table {
        let written = fs::read_to_string(&self.path).unwrap_or_default();
        let mut table = Table::read(&written);
        for [need, place, why] in &self.more {
            table.add(need, place, why);
        }
        table.rows.retain(|(need, _), _| !done.contains(&need.as_str()));
        table
    }
}

/// By what was missing and why: the places, and how often.
#[derive(Default)]
pub struct Table {
    rows: BTreeMap<(String, String), (BTreeSet<String>, usize)>,
}

impl Table {
    fn read(text: &str) -> Table {
        let mut table = Table::default();
        for line in text.lines() {
            let mut words = line.splitn(3, '\t');
            if let (Some(need), Some(place), Some(why)) = (words.next(), words.next(), words.next()) {
                table.add(need, place, why);
            }
        }
        table
    }

    fn add(&mut self, need: &str, place: &str, why: &str) {
        let (places, count) = self.rows.entry((need.to_owned(), why.to_owned())).or_default();
        places.insert(place.to_owned());
        *count += 1;
    }
}

impl fmt::Display for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rows.is_empty() {
            return writeln!(out, "left out: nothing");
        }
        writeln!(out, "left out")?;
        for ((need, why), (places, count)) in &self.rows {
            let shown: Vec<&str> = places.iter().take(PLACES_SHOWN).map(String::as_str).collect();
            let more = match places.len().saturating_sub(PLACES_SHOWN) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            writeln!(out, "  {need:<9} {count:>3} × {}{more}: {why}", shown.join(", "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_rows() {
        let written = "etcd\ta.rs\tno etcd\nrdma\tb.rs\tno card\netcd\ta.rs\tno etcd\netcd\tc.rs\tno etcd\nnonsense\n";
        assert_eq!(
            Table::read(written).to_string(),
            "left out\n  etcd        3 × a.rs, c.rs: no etcd\n  rdma        1 × b.rs: no card\n"
        );
        assert_eq!(Table::read("").to_string(), "left out: nothing\n");
    }
}
