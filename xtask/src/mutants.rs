//! `cargo xtask mutants`: mistakes made on purpose, one at a time, to see that something notices.
//!
//! Each is a small change to one file, told in `xtask/mutants.toml`, with what should catch it: worlds of seeds, tests, or models. It is made in a copy of
//! the tree, so that nothing here changes, and what was built for one is used for the next. A mutant that nothing notices is a test that cannot
//! fail.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use serde::Deserialize;
use thiserror::Error;

use crate::command::{self, output, root};

/// So many worlds each mutant has to be found in.
const WORLDS: &str = "400";
const TABLE_BEGINS: &str = "<!-- mutants: begin -->";
const TABLE_ENDS: &str = "<!-- mutants: end -->";

#[derive(clap::Args)]
pub struct Arguments {
    /// Only those whose name contains one of these.
    names: Vec<String>,
    /// Only those that have no row in the table of docs/testing.md.
    #[arg(long)]
    missing: bool,
    /// Put what was found into that table. Rows of mutants that were not tried stay as they are.
    #[arg(long)]
    write: bool,
}

#[derive(Debug, Error)]
pub enum Error {
    #[error(transparent)]
    Command(#[from] command::Error),
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("xtask/mutants.toml: {0}")]
    List(#[from] toml::de::Error),
    #[error("{name:?}: what it changes is in {} {found} times, where it must be once", file.display())]
    NotThere { name: String, file: PathBuf, found: usize },
    #[error("{name:?} does not compile: {said}")]
    NotCompiled { name: String, said: String },
    #[error("without any mutant, {check} fails: {said}")]
    AlreadyFailing { check: String, said: String },
}

#[derive(Deserialize)]
struct List {
    mutant: Vec<Mutant>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    /// What is wrong with it, in words.
    name: String,
    file: PathBuf,
    from: String,
    to: String,
    /// The package whose tests notice, and an expression of nextest that names them. Where there is none, seeds do.
    package: Option<String>,
    tests: Option<String>,
    /// Or the models of `cargo xtask loom` that do, by a part of their name.
    models: Option<String>,
}

/// What became of a mutant.
struct Verdict {
    name: String,
    file: PathBuf,
    /// Who noticed; none where nobody did.
    caught: Option<String>,
    seconds: f64,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let list = root().join("xtask/mutants.toml");
    let text = fs::read_to_string(&list).map_err(|source| Error::File { path: list, source })?;
    let all = toml::from_str::<List>(&text)?.mutant;
    let rows = Table::read()?.rows();
    let mut mutants = all.clone();
    mutants.retain(|mutant| {
        let named = |name: &String| mutant.name.contains(name.as_str());
        let wanted = arguments.names.is_empty() || arguments.names.iter().any(named);
        wanted && !(arguments.missing && rows.contains_key(&mutant.name))
    });
    let tree = Tree::new()?;
    for mutant in &mutants {
        tree.changed(mutant)?;
    }
    tree.check_as_it_is(&mutants)?;
    let mut verdicts = Vec::new();
    for mutant in &mutants {
        let verdict = tree.try_out(mutant)?;
        println!("{}", verdict.line());
        verdicts.push(verdict);
    }
    let missed = verdicts.iter().filter(|verdict| verdict.caught.is_none()).count();
    println!("{} of {} mutants caught", verdicts.len() - missed, verdicts.len());
    if arguments.write {
        Table::read()?.write(&all, &verdicts)?;
    }
    Ok(match missed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// A copy of what git knows of the tree, and what is built of it.
struct Tree {
    path: PathBuf,
    built: PathBuf,
}

impl Tree {
    fn new() -> Result<Tree, Error> {
        let place = root().join("target/mutants");
        let tree = Tree {
            path: place.join("tree"),
            built: place.join("built"),
        };
        let files = output(Command::new("git").args(["ls-files", "-z"]).current_dir(root()))?;
        let files: Vec<&str> = files.split('\0').filter(|file| !file.is_empty()).collect();
        sweep(&tree.path, &files.iter().map(|file| tree.path.join(file)).collect());
        for file in files {
            let (from, to) = (root().join(file), tree.path.join(file));
            // A file that git still lists may have been removed meanwhile.
            if let Ok(content) = fs::read(&from) {
                tree.put(&to, &content)?;
            }
        }
        Ok(tree)
    }

    /// Writes a file unless it is there already: what is not written anew is not built anew.
    fn put(&self, path: &Path, content: &[u8]) -> Result<(), Error> {
        if fs::read(path).is_ok_and(|there| there == content) {
            return Ok(());
        }
        let failed = |source| Error::File {
            path: path.to_owned(),
            source,
        };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        fs::write(path, content).map_err(failed)
    }

    /// The file as the mutant has it, and as it is in the copy: whoever works on the tree meanwhile changes nothing here.
    fn changed(&self, mutant: &Mutant) -> Result<(String, String), Error> {
        let path = self.path.join(&mutant.file);
        let text = fs::read_to_string(&path).map_err(|source| Error::File { path, source })?;
        match text.matches(&mutant.from).count() {
            1 => Ok((text.replacen(&mutant.from, &mutant.to, 1), text)),
            found => Err(Error::NotThere {
                name: mutant.name.clone(),
                file: mutant.file.clone(),
                found,
            }),
        }
    }

    /// A test that fails anyway notices nothing.
    fn check_as_it_is(&self, mutants: &[Mutant]) -> Result<(), Error> {
        let mut checks: Vec<&Mutant> = Vec::new();
        for mutant in mutants {
            let same = |other: &&Mutant| other.check() == mutant.check();
            if !checks.iter().any(same) {
                checks.push(mutant);
            }
        }
        for mutant in checks {
            if let Some(said) = self.caught(mutant)? {
                return Err(Error::AlreadyFailing {
                    check: mutant.check().to_owned(),
                    said,
                });
            }
        }
        Ok(())
    }

    fn try_out(&self, mutant: &Mutant) -> Result<Verdict, Error> {
        let (wrong, right) = self.changed(mutant)?;
        let path = self.path.join(&mutant.file);
        let begun = Instant::now();
        self.put(&path, wrong.as_bytes())?;
        let caught = self.caught(mutant);
        self.put(&path, right.as_bytes())?;
        Ok(Verdict {
            name: mutant.name.clone(),
            file: mutant.file.clone(),
            caught: caught?,
            seconds: begun.elapsed().as_secs_f64(),
        })
    }

    /// Who notices that something is wrong.
    fn caught(&self, mutant: &Mutant) -> Result<Option<String>, Error> {
        let mut cargo = Command::new("cargo");
        cargo.current_dir(&self.path).env("CARGO_TARGET_DIR", &self.built);
        // A mutant is a line: what was built for the one before serves for most of it.
        cargo.env("CARGO_INCREMENTAL", "1").env("CARGO_PROFILE_DEV_DEBUG", "0");
        cargo.env("RUSTC_WRAPPER", "").env("CARGO_TERM_COLOR", "never");
        match mutant {
            Mutant {
                models: Some(models), ..
            } => {
                cargo.args(["run", "--quiet", "-p", "xtask", "--", "loom", models]);
            }
            Mutant {
                package: Some(package),
                tests: Some(tests),
                ..
            } => {
                cargo.args(["nextest", "run", "--no-fail-fast", "-p", package, "-E", tests]);
                cargo.args(["--status-level", "fail", "--final-status-level", "fail"]);
            }
            _ => {
                cargo.args(["run", "--quiet", "-p", "xtask", "--", "seeds", WORLDS, "--fail-fast"]);
            }
        }
        let done = cargo.output().map_err(|source| command::Error::NotStarted {
            program: "cargo".to_owned(),
            source,
        })?;
        if done.status.success() {
            return Ok(None);
        }
        let said = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        // What is not even built has been noticed by nobody.
        if said.iter().any(|text| text.contains("could not compile")) {
            return Err(Error::NotCompiled {
                name: mutant.name.clone(),
                said: first_complaint(&said),
            });
        }
        Ok(Some(first_complaint(&said)))
    }
}

/// The seed or the test that was the first to notice.
fn first_complaint(said: &[String]) -> String {
    let lines = || said.iter().flat_map(|text| text.lines()).map(str::trim);
    let seed = lines().find(|line| line.starts_with("seed "));
    let test =
        lines().find(|line| line.starts_with("FAIL") || line.starts_with("SIGABRT") || line.starts_with("TIMEOUT"));
    let test = test.map(|line| line.rsplit(' ').next().unwrap_or(line));
    let model = lines().find_map(|line| {
        line.strip_prefix("thread '")?
            .split_once("' ")?
            .0
            .split_once("::model::")
    });
    let model = model.map(|(_, name)| name);
    let error = lines().find(|line| line.starts_with("error"));
    let text = seed.or(test).or(model).or(error).unwrap_or("failed without a word");
    text.chars().take(160).collect()
}

impl Mutant {
    /// What should notice.
    fn check(&self) -> &str {
        let told = self.models.as_ref().or(self.tests.as_ref());
        told.map_or("seeds", String::as_str)
    }
}

impl Verdict {
    fn line(&self) -> String {
        match &self.caught {
            Some(by) => format!("caught  {} ({:.0} s): {by}", self.name, self.seconds),
            None => format!("MISSED  {} ({:.0} s)", self.name, self.seconds),
        }
    }

    fn row(&self) -> String {
        let caught = self.caught.as_deref().unwrap_or("**nobody**").replace('|', "\\|");
        format!("| {} | `{}` | {caught} |", self.name, self.file.display())
    }
}

/// Removes what an earlier copy has left and git knows no more: a module that has moved would be there twice.
fn sweep(folder: &Path, known: &HashSet<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sweep(&path, known);
        } else if !known.contains(&path) {
            // What cannot be removed is told by whatever trips over it.
            let _ = fs::remove_file(&path);
        }
    }
}

/// The page with the table of what was caught, and by whom.
struct Table {
    path: PathBuf,
    page: String,
    /// What is between the two marks.
    rows: std::ops::Range<usize>,
}

impl Table {
    fn read() -> Result<Table, Error> {
        let path = root().join("docs/testing.md");
        let failed = |source| Error::File {
            path: path.clone(),
            source,
        };
        let page = fs::read_to_string(&path).map_err(failed)?;
        let (Some(begin), Some(end)) = (page.find(TABLE_BEGINS), page.find(TABLE_ENDS)) else {
            return Err(failed(std::io::ErrorKind::InvalidData.into()));
        };
        let rows = begin + TABLE_BEGINS.len()..end;
        Ok(Table { path, page, rows })
    }

    /// The rows by their mutant's name.
    fn rows(&self) -> BTreeMap<String, String> {
        let rows = self.page[self.rows.clone()].lines();
        rows.filter_map(|row| Some((row.strip_prefix("| ")?.split_once(" |")?.0.to_owned(), row.to_owned())))
            .collect()
    }

    /// Writes what was found, in the order of the list. What is no mutant any more has no row any more.
    fn write(&self, all: &[Mutant], verdicts: &[Verdict]) -> Result<(), Error> {
        let mut rows = self.rows();
        rows.extend(verdicts.iter().map(|verdict| (verdict.name.clone(), verdict.row())));
        let mut table = String::from("\n| mutant | in | caught by |\n|---|---|---|\n");
        for row in all.iter().filter_map(|mutant| rows.get(&mutant.name)) {
            table += row;
            table.push('\n');
        }
        let (before, after) = (&self.page[..self.rows.start], &self.page[self.rows.end..]);
        fs::write(&self.path, format!("{before}{table}{after}")).map_err(|source| Error::File {
            path: self.path.clone(),
            source,
        })
    }
}
