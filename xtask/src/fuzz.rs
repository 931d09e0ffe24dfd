//! `cargo xtask fuzz`: the targets under `fuzz/`, each by libFuzzer for a while.
//!
//! On the stable compiler. What a fuzzer needs of one is that it counts where the program has been and shows what it compares; that is a pass
//! of LLVM, which stable compilers have and can be told to run. Address sanitisers cannot be had this way; the decoders are safe Rust, and
//! overflow and debug assertions are checked.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::thread;

use serde_json::Value;
use thiserror::Error;

use crate::command::{self, Needed, cargo, install_missing, output, root};

#[derive(clap::Args)]
pub struct Arguments {
    /// The targets; all of them without.
    targets: Vec<String>,
    /// How long each runs.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

#[derive(Debug, Error)]
pub enum Error {
    #[error(transparent)]
    Command(#[from] command::Error),
    #[error("there is no target {name:?}; there are {}", known.join(", "))]
    NoTarget { name: String, known: Vec<String> },
    #[error("{} found something; run it again by `cargo xtask fuzz TARGET`, and on the file that it wrote", .0.join(", "))]
    Found(Vec<String>),
}

/// libFuzzer itself is C++.
const NEEDED: &[Needed] = &[(&["c++", "--version"], "g++")];

/// Counters at every edge, a table of their places, and calls at comparisons.
const FLAGS: &str = "--cfg fuzzing -C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=4 \
                     -C llvm-args=-sanitizer-coverage-inline-8bit-counters -C llvm-args=-sanitizer-coverage-pc-table \
                     -C llvm-args=-sanitizer-coverage-trace-compares";

/// An input that takes longer than this is a fault.
const INPUT_SECONDS_MAX: u64 = 20;
const MEMORY_MIB_MAX: u64 = 2048;
const INPUT_BYTES_MAX: u64 = 16 << 10;

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let known = targets()?;
    if let Some(name) = arguments.targets.iter().find(|name| !known.contains(name)) {
        return Err(Error::NoTarget {
            name: name.clone(),
            known,
        });
    }
    let chosen = match arguments.targets.is_empty() {
        true => known,
        false => arguments.targets.clone(),
    };
    fuzz(&chosen, arguments.seconds)?;
    Ok(ExitCode::SUCCESS)
}

/// Builds and runs every target, each for so many seconds.
pub fn run_all(seconds: u64) -> Result<(), Error> {
    fuzz(&targets()?, seconds)
}

/// The names of all targets.
fn targets() -> Result<Vec<String>, Error> {
    let said = output(cargo().args([
        "metadata",
        "--no-deps",
        "--format-version=1",
        "--manifest-path",
        MANIFEST,
    ]))?;
    let whole: Value = serde_json::from_str(&said).unwrap_or_default();
    let targets = whole["packages"][0]["targets"].as_array().cloned().unwrap_or_default();
    let names = targets.iter().filter_map(|target| target["name"].as_str());
    Ok(names.map(str::to_owned).collect())
}

const MANIFEST: &str = "fuzz/Cargo.toml";

fn fuzz(targets: &[String], seconds: u64) -> Result<(), Error> {
    install_missing(NEEDED)?;
    let built = build(targets)?;
    println!("{} targets, {seconds} s each", targets.len());
    println!(
        "{:<22} {:>12} {:>7} {:>15}  outcome",
        "target", "inputs", "edges", "of them reached"
    );
    let (left, found) = (Mutex::new(targets.iter()), Mutex::new(Vec::new()));
    let next = || left.lock().expect("nobody panics with the list").next();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(target) = next() {
                    let outcome = fuzz_one(&built, target, seconds);
                    println!("{target:<22} {outcome}");
                    if !outcome.fine() {
                        found.lock().expect("nobody panics with the list").push(target.clone());
                    }
                }
            });
        }
    });
    let found = found.into_inner().expect("nobody panics with the list");
    if found.is_empty() {
        Ok(())
    } else {
        Err(Error::Found(found))
    }
}

/// The directory with the programs. The host is named so that the flags do not reach what runs while building.
fn build(targets: &[String]) -> Result<PathBuf, Error> {
    let rustc = output(Command::new("rustc").arg("-vV").current_dir(root()))?;
    let host = rustc.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.ok_or_else(|| command::Error::NotUnderstood {
        program: "rustc".to_owned(),
        said: rustc.clone(),
    })?;
    let place = root().join("target/fuzz");
    let mut command = cargo();
    command
        .args(["build", "--release", "--manifest-path", MANIFEST, "--target", host])
        .args(targets.iter().flat_map(|target| ["--bin", target]))
        .env("CARGO_TARGET_DIR", &place)
        .env("RUSTFLAGS", FLAGS);
    command::run(&mut command)?;
    Ok(place.join(host).join("release"))
}

/// What a target's run came to.
struct Outcome {
    inputs: u64,
    /// Edges of the program that are counted, and how many of them were reached: by the first inputs, and in the end.
    edges: u64,
    reached: (u64, u64),
    fault: Option<String>,
}

impl Outcome {
    fn fine(&self) -> bool {
        self.fault.is_none() && self.is_guided()
    }

    /// A program that is not counted, or that no input ever takes anywhere, is not fuzzed at all.
    fn is_guided(&self) -> bool {
        self.edges > 0 && self.reached.1 > self.reached.0
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reached = format!("{} → {}", self.reached.0, self.reached.1);
        write!(out, "{:>12} {:>7} {reached:>15}  ", self.inputs, self.edges)?;
        match &self.fault {
            Some(fault) => write!(out, "FAILED: {fault}"),
            None if !self.is_guided() => write!(out, "FAILED: its inputs led nowhere, so nothing was searched"),
            None => write!(out, "ok"),
        }
    }
}

fn fuzz_one(built: &Path, target: &str, seconds: u64) -> Outcome {
    let place = root().join("target/fuzz");
    let (corpus, artifacts) = (place.join("corpus").join(target), place.join("artifacts").join(target));
    let attempt = || -> io::Result<(String, bool)> {
        fs::create_dir_all(&corpus)?;
        fs::create_dir_all(&artifacts)?;
        let mut child = Command::new(built.join(target))
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
            .arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"))
            .arg(format!("-max_len={INPUT_BYTES_MAX}"))
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .args(["-print_final_stats=1", "-verbosity=1"])
            .arg(&corpus)
            .args(seeds(target).map(|seeds| root().join(seeds)))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut said = Vec::new();
        if let Some(mut stderr) = child.stderr.take() {
            stderr.read_to_end(&mut said)?;
        }
        let ended = child.wait()?;
        Ok((String::from_utf8_lossy(&said).into_owned(), ended.success()))
    };
    match attempt() {
        Ok((said, well)) => {
            let outcome = read(&said, well);
            if outcome.fault.is_some() {
                eprintln!("{target}:\n{said}");
            }
            outcome
        }
        Err(error) => Outcome {
            inputs: 0,
            edges: 0,
            reached: (0, 0),
            fault: Some(error.to_string()),
        },
    }
}

/// Files of ours to begin with, where noise would take long to become one.
fn seeds(target: &str) -> Option<&'static str> {
    match target {
        "scenarios" => Some("scenarios"),
        _ => None,
    }
}

/// What libFuzzer said of a run.
fn read(said: &str, well: bool) -> Outcome {
    let number = |text: &str| {
        let digits: String = text.trim_start().chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u64>().ok()
    };
    let after = |line: &str, words: &str| line.split_once(words).and_then(|(_, rest)| number(rest));
    let covered = || said.lines().filter_map(|line| after(line, " cov: "));
    let fault = said
        .lines()
        .find(|line| line.contains("panicked at") || line.contains("ERROR: libFuzzer"));
    Outcome {
        inputs: said
            .lines()
            .find_map(|line| after(line, "stat::number_of_executed_units:"))
            .unwrap_or(0),
        edges: said.lines().find_map(|line| after(line, " modules   (")).unwrap_or(0),
        reached: (first_reach(said).unwrap_or(0), covered().max().unwrap_or(0)),
        fault: match (well, fault) {
            (true, _) => None,
            (false, Some(line)) => Some(line.to_owned()),
            (false, None) => Some("it ended badly".to_owned()),
        },
    }
}

/// What the first inputs reach. What was found by earlier runs is no sign of being led in this one, and does not count against it.
fn first_reach(said: &str) -> Option<u64> {
    let from_nothing = said.lines().any(|line| line.contains(" 0 files found in "));
    let inited = said.lines().find(|line| line.contains("INITED"))?;
    let reached = inited.split_once(" cov: ")?.1.split_whitespace().next()?;
    from_nothing.then(|| reached.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "INFO: Loaded 1 modules   (476 inline 8-bit counters): 476 [0x1, 0x2), \n\
        INFO:        0 files found in corpus\n\
        #2\tINITED cov: 20 ft: 21 corp: 1/1b exec/s: 0 rss: 34Mb\n\
        #8\tNEW    cov: 31 ft: 32 corp: 2/2b lim: 4 exec/s: 0 rss: 34Mb\n\
        #9\tDONE   cov: 44 ft: 60 corp: 3/9b lim: 4 exec/s: 0 rss: 34Mb\n\
        stat::number_of_executed_units: 1260929\n";

    #[test]
    fn what_libfuzzer_says_is_understood() {
        let outcome = read(SAID, true);
        assert_eq!(
            (outcome.inputs, outcome.edges, outcome.reached),
            (1_260_929, 476, (20, 44))
        );
        assert!(outcome.fine());
    }

    #[test]
    fn a_search_that_leads_nowhere_is_a_failure() {
        let blind = SAID.replace("31", "20").replace("44", "20");
        assert!(!read(&blind, true).fine());
        assert!(!read(&SAID.replace("476 inline", "0 inline"), true).fine());
        assert!(!read(SAID, false).fine());
    }
}
