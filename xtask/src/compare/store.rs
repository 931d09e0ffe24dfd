//! `cargo xtask compare store`: blocks put into tiers and got from them, beside LMCache, vLLM's own tier of files, and the limits of the machine.
//!
//! All sides take turns, row by row, in one run; what counts are ratios. Limits are not competitors: a plain copy for memory, fio for files. Checksums are on for Weft; the
//! others have none. Rows for which a peer cannot be installed are left out, and said.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use serde_json::Value;

use super::{figures, file};
use crate::command::{self, Error, Needed, install_missing, root};
use crate::python::Environment;
use crate::vllm_test::Vllm;

const NEEDED: &[Needed] = &[(&["fio", "--version"], "fio")];
const LMCACHE: &str = "lmcache==0.5.6";

#[derive(clap::Args)]
pub struct Arguments {
    /// How often the whole is measured.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// How long each measurement lasts.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Where files are made; on the device that is asked about.
    #[arg(long, default_value = "target/compare-store")]
    directory: PathBuf,
    /// Leave out a side, and the rows that need it.
    #[arg(long, value_delimiter = ',')]
    without: Vec<Side>,
    /// Python with a side installed, as SIDE=PATH, instead of an environment that is made.
    #[arg(long, value_parser = parse_python)]
    python: Vec<(Side, PathBuf)>,
    /// Put the rows into docs/figures/store.md.
    #[arg(long)]
    write: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
enum Side {
    Weft,
    Lmcache,
    Vllm,
    Fio,
}

fn parse_python(text: &str) -> Result<(Side, PathBuf), String> {
    let (side, path) = text.split_once('=').ok_or("SIDE=PATH")?;
    Ok((clap::ValueEnum::from_str(side, true)?, path.into()))
}

/// Who takes turns in Python: whose environment, what it is called here, and what the script is told.
const TURNS: &[(Side, &str, &[&str])] = &[
    (Side::Weft, "memmove", &[]),
    (Side::Weft, "weft", &[]),
    (Side::Lmcache, "lmcache", &[]),
    (Side::Weft, "weft-disk", &["--disk"]),
    (Side::Lmcache, "lmcache-disk", &["--disk"]),
];

/// What is measured, by its name: of whom, what, and in which unit.
type Measured = BTreeMap<String, Vec<f64>>;

/// What a row asks for.
enum Bound {
    /// So many times the peer's rate, or a peer's time by so much.
    Times(f64),
    /// At most so many microseconds.
    AtMost(f64),
    Shown,
}

struct Row {
    name: &'static str,
    ours: &'static str,
    theirs: &'static str,
    /// Whether less is better.
    times: bool,
    bound: Bound,
}

const fn row(name: &'static str, ours: &'static str, theirs: &'static str, times: bool, bound: Bound) -> Row {
    Row {
        name,
        ours,
        theirs,
        times,
        bound,
    }
}

const ROWS: &[Row] = &[
    row(
        "memory put 4 KiB × 1, beside LMCache CPU",
        "weft put 4096 × 1 us",
        "lmcache put 4096 × 1 us",
        true,
        Bound::Times(5.0),
    ),
    row(
        "memory get 4 KiB × 1, beside LMCache CPU",
        "weft get 4096 × 1 us",
        "lmcache get 4096 × 1 us",
        true,
        Bound::Times(5.0),
    ),
    row(
        "memory put 64 KiB × 64, beside LMCache CPU",
        "weft put 65536 × 64",
        "lmcache put 65536 × 64",
        false,
        Bound::Times(2.0),
    ),
    row(
        "memory get 64 KiB × 64, beside LMCache CPU",
        "weft get 65536 × 64",
        "lmcache get 65536 × 64",
        false,
        Bound::Times(2.0),
    ),
    row(
        "memory put 64 KiB × 64, beside a plain copy",
        "weft put 65536 × 64",
        "memmove copy 65536 × 64",
        false,
        Bound::Shown,
    ),
    row(
        "memory get 64 KiB × 64, beside a plain copy",
        "weft get 65536 × 64",
        "memmove copy 65536 × 64",
        false,
        Bound::Shown,
    ),
    row(
        "files put 64 KiB × 64, beside fio's random write",
        "weft-disk put 65536 × 64",
        "fio write random 64KiB",
        false,
        Bound::Times(0.85),
    ),
    row(
        "files put 1 MiB × 64, beside fio's random write",
        "weft-disk put 1048576 × 64",
        "fio write random 1MiB",
        false,
        Bound::Times(0.85),
    ),
    row(
        "files get 64 KiB × 64 in a chain, beside fio's read of 1 MiB",
        "weft-disk get 65536 × 64",
        "fio read sequential 1MiB",
        false,
        Bound::Times(0.85),
    ),
    row(
        "files get 64 KiB × 64 scattered, beside fio's random read",
        "weft-disk get scattered 65536 × 64",
        "fio read random 64KiB",
        false,
        Bound::Times(0.80),
    ),
    row(
        "files put 64 KiB × 64, beside LMCache disk",
        "weft-disk put 65536 × 64",
        "lmcache-disk put 65536 × 64",
        false,
        Bound::Times(8.0),
    ),
    row(
        "files get 64 KiB × 64 in a chain, beside LMCache disk with O_DIRECT",
        "weft-disk get 65536 × 64",
        "lmcache-disk get 65536 × 64",
        false,
        Bound::Times(2.0),
    ),
    row(
        "vLLM's tier calls: put 64 KiB × 64, beside fs",
        "weft-tier put",
        "fs-tier put",
        false,
        Bound::Times(5.0),
    ),
    row(
        "vLLM's tier calls: get in chains, beside fs",
        "weft-tier get in chains",
        "fs-tier get in chains",
        false,
        Bound::Times(2.5),
    ),
    row(
        "vLLM's tier calls: get scattered, beside fs",
        "weft-tier get scattered",
        "fs-tier get scattered",
        false,
        Bound::Times(1.5),
    ),
    row(
        "vLLM's tier calls: look-up of 1,000 keys, beside fs",
        "weft-tier look-up of 1,000 keys us",
        "fs-tier look-up of 1,000 keys us",
        true,
        Bound::Times(20.0),
    ),
    row(
        "scheduler's thread a call: submit_store",
        "weft-tier scheduler's thread in submit_store us",
        "fs-tier scheduler's thread in submit_store us",
        true,
        Bound::AtMost(50.0),
    ),
    row(
        "scheduler's thread a call: submit_load",
        "weft-tier scheduler's thread in submit_load us",
        "fs-tier scheduler's thread in submit_load us",
        true,
        Bound::AtMost(50.0),
    ),
    row(
        "scheduler's thread a call: get_finished_jobs",
        "weft-tier scheduler's thread in get_finished_jobs us",
        "fs-tier scheduler's thread in get_finished_jobs us",
        true,
        Bound::AtMost(50.0),
    ),
];

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let wanted = |side: Side| !arguments.without.contains(&side);
    if wanted(Side::Fio) {
        install_missing(NEEDED)?;
    }
    let pythons = pythons(arguments)?;
    let directory = root().join(&arguments.directory);
    std::fs::create_dir_all(&directory).map_err(|source| Error::File {
        path: directory.clone(),
        source,
    })?;
    let mut measured = Measured::new();
    for repeat in 0..arguments.repeats {
        eprintln!("repeat {} of {}", repeat + 1, arguments.repeats);
        for (side, name, more) in TURNS {
            let Some(python) = pythons.get(side) else { continue };
            let mut command = Command::new(python);
            command
                .arg(root().join("xtask/compare/store_peer.py"))
                .arg(name.trim_end_matches("-disk"))
                .args(*more);
            take(&mut measured, name, command, arguments, &directory);
        }
        if wanted(Side::Fio) {
            for (op, order, block, depth) in [
                ("write", "random", "64KiB", 64),
                ("write", "random", "1MiB", 64),
                ("read", "sequential", "1MiB", 8),
                ("read", "random", "64KiB", 64),
            ] {
                let rate = file::fio_rate(&directory, 1024, arguments.seconds, (op, order, block, depth))?;
                measured
                    .entry(format!("fio {op} {order} {block}"))
                    .or_default()
                    .push(rate);
            }
            let _ = std::fs::remove_file(directory.join("fio"));
        }
        if let Some(python) = pythons.get(&Side::Vllm) {
            for which in ["weft", "fs"] {
                let mut command = Command::new(python);
                command
                    .arg(root().join("crates/python/vllm_tests/tiers.py"))
                    .arg(which)
                    .env("OMP_NUM_THREADS", "1");
                take(
                    &mut measured,
                    &format!("{which}-tier"),
                    command,
                    arguments,
                    &directory.join(which),
                );
            }
        }
    }
    let _ = std::fs::remove_dir_all(&directory);
    report(arguments, &measured)
}

/// The Python of each side that is wanted.
fn pythons(arguments: &Arguments) -> Result<BTreeMap<Side, PathBuf>, Error> {
    let mut pythons: BTreeMap<Side, PathBuf> = arguments.python.iter().cloned().collect();
    let missing =
        |pythons: &BTreeMap<Side, PathBuf>, side| !arguments.without.contains(&side) && !pythons.contains_key(&side);
    if missing(&pythons, Side::Weft) {
        let peers = super::setup::Peers::install(&[super::table::Side::Weft])?;
        pythons.insert(Side::Weft, peers.python());
    }
    if missing(&pythons, Side::Lmcache) {
        let environment = Environment::make("target/door/lmcache")?;
        environment.pip_install(&[LMCACHE])?;
        pythons.insert(Side::Lmcache, environment.path().join("bin/python"));
    }
    if missing(&pythons, Side::Vllm) {
        let vllm = Vllm::install_without_router()?;
        pythons.insert(Side::Vllm, PathBuf::from(vllm.installed("python").get_program()));
    }
    pythons.retain(|side, _| !arguments.without.contains(side));
    Ok(pythons)
}

/// Runs one side, and takes its rows. One that fails does not end the others; its rows are missing.
fn take(measured: &mut Measured, name: &str, mut command: Command, arguments: &Arguments, directory: &Path) {
    command
        .arg("--directory")
        .arg(directory)
        .args(["--seconds", &arguments.seconds.to_string()]);
    let said = match command::output(&mut command) {
        Ok(said) => said,
        Err(error) => return eprintln!("  {name}: {error}"),
    };
    for line in said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let row = match line["row"].as_str() {
            Some(row) => row.to_owned(),
            None => format!(
                "{} {} × {}",
                line["op"].as_str().unwrap_or_default(),
                line["block"],
                line["batch"]
            ),
        };
        for (unit, suffix) in [("gigabytes_per_sec", ""), ("us", " us"), ("p99_us", " p99 us")] {
            if let Some(value) = line[unit].as_f64() {
                measured.entry(format!("{name} {row}{suffix}")).or_default().push(value);
            }
        }
    }
}

fn report(arguments: &Arguments, measured: &Measured) -> Result<ExitCode, Error> {
    let median = |name: &str| {
        let mut sorted = measured.get(name)?.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    };
    let mut shown = Vec::new();
    for row in ROWS {
        let (Some(ours), theirs) = (median(row.ours), median(row.theirs)) else {
            println!("left out: {}", row.name);
            continue;
        };
        let ratio = theirs.map(|theirs| if row.times { theirs / ours } else { ours / theirs });
        let unit = |value: f64| match row.times {
            true => format!("{value:.1} µs"),
            false => format!("{value:.2} GB/s"),
        };
        let (required, reached) = match row.bound {
            Bound::Times(times) => (format!("{times:.2} ×"), ratio.is_some_and(|ratio| ratio >= times)),
            Bound::AtMost(most) => (format!("≤ {most} µs"), ours <= most),
            Bound::Shown => (String::new(), true),
        };
        if theirs.is_none() && matches!(row.bound, Bound::Times(_)) {
            println!("left out, for want of the peer: {}", row.name);
            continue;
        }
        shown.push(figures::Row {
            workload: row.name.to_owned(),
            peer: theirs.map_or("–".to_owned(), unit),
            weft: unit(ours),
            ratio: ratio.map_or(String::new(), |ratio| format!("{ratio:.2} ×")),
            required,
            reached,
        });
    }
    println!(
        "{:70}  {:>11}  {:>11}  {:>8}  {:>8}",
        "workload", "peer, limit", "Weft", "ratio", "required"
    );
    for row in &shown {
        let missed = if row.reached { "" } else { "MISSED" };
        println!(
            "{:70}  {:>11}  {:>11}  {:>8}  {:>8}  {missed}",
            row.workload, row.peer, row.weft, row.ratio, row.required
        );
    }
    let reached = shown.iter().filter(|row| row.reached).count();
    println!("\n{reached} of {} rows reached", shown.len());
    println!(
        "Not measured: through another process on the host (beside Mooncake Store), the S3 tier, and the directory of several agents."
    );
    if arguments.write {
        let command = format!("cargo xtask compare store --repeats {} --write", arguments.repeats);
        figures::write("store", &command, &shown)?;
    }
    Ok(if reached == shown.len() && !shown.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
