//! `cargo xtask compare file`: blocks between memory and a file, beside what fio gets from the same device by the same means.
//!
//! fio asks the kernel for a block at a time and touches none of its bytes, so it is the limit and not a competitor. Both keep as many bytes under way: Weft
//! in two transfers, each of half of them.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use serde_json::Value;

use super::figures;
use crate::command::{self, Error, Needed, install_missing, root};

const NEEDED: &[Needed] = &[(&["fio", "--version"], "fio")];

#[derive(clap::Args)]
pub struct Arguments {
    /// How often the whole is measured.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// How long each measurement lasts.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Where the files are made; on the device that is asked about.
    #[arg(long, default_value = "target/compare-file")]
    directory: PathBuf,
    /// How many MiB the file has.
    #[arg(long, default_value_t = 1024)]
    mebibytes: u64,
    /// Put the rows into docs/figures/file.md.
    #[arg(long)]
    write: bool,
}

/// What is measured on both sides, and the share of fio's rate that Weft has to reach.
struct Row {
    op: &'static str,
    order: &'static str,
    block: &'static str,
    depth: u64,
    checksum: bool,
    required: f64,
}

impl Row {
    const fn new(op: &'static str, order: &'static str, block: &'static str, depth: u64, required: f64) -> Row {
        Row {
            op,
            order,
            block,
            depth,
            checksum: true,
            required,
        }
    }

    fn name(&self) -> String {
        let block = self.block.replace("KiB", " KiB").replace("MiB", " MiB");
        let sums = if self.checksum { ", with checksum" } else { "" };
        format!("{} {} {block} × {}{sums}", self.op, self.order, self.depth)
    }
}

fn rows() -> Vec<Row> {
    vec![
        Row::new("write", "random", "64KiB", 8, 0.85),
        Row::new("write", "random", "64KiB", 32, 0.85),
        Row::new("write", "random", "1MiB", 8, 0.85),
        Row::new("write", "sequential", "1MiB", 8, 0.85),
        Row::new("read", "random", "64KiB", 8, 0.80),
        Row::new("read", "random", "64KiB", 32, 0.90),
        Row::new("read", "random", "1MiB", 8, 0.85),
        Row::new("read", "sequential", "1MiB", 8, 0.85),
        Row {
            checksum: false,
            ..Row::new("read", "random", "64KiB", 32, 0.90)
        },
    ]
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    install_missing(NEEDED)?;
    command::run(command::cargo().args(["build", "--release", "--package", "weft-cli"]))?;
    let directory = root().join(&arguments.directory);
    std::fs::create_dir_all(&directory).map_err(|source| Error::File {
        path: directory.clone(),
        source,
    })?;
    let rows = rows();
    let mut measured: Vec<[Vec<f64>; 2]> = rows.iter().map(|_| [Vec::new(), Vec::new()]).collect();
    for repeat in 0..arguments.repeats {
        for (row, [theirs, ours]) in rows.iter().zip(&mut measured) {
            eprintln!("repeat {} of {}: {}", repeat + 1, arguments.repeats, row.name());
            theirs.push(fio(arguments, &directory, row)?);
            ours.push(weft(arguments, &directory, row)?);
        }
    }
    // A file of this size is not left behind.
    let _ = std::fs::remove_dir_all(&directory);
    let median = |values: &[f64]| {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    };
    let shown: Vec<figures::Row> = rows
        .iter()
        .zip(&measured)
        .map(|(row, [theirs, ours])| {
            let (theirs, ours) = (median(theirs), median(ours));
            let share = ours / theirs;
            figures::Row {
                workload: row.name(),
                peer: format!("{theirs:.2} GB/s"),
                weft: format!("{ours:.2} GB/s"),
                ratio: format!("{share:.2} ×"),
                required: format!("{:.2} ×", row.required),
                reached: share >= row.required,
            }
        })
        .collect();
    println!(
        "{:44}  {:>10}  {:>10}  {:>7}  {:>8}",
        "workload", "fio", "Weft", "ratio", "required"
    );
    for row in &shown {
        let missed = if row.reached { "" } else { "MISSED" };
        println!(
            "{:44}  {:>10}  {:>10}  {:>7}  {:>8}  {missed}",
            row.workload, row.peer, row.weft, row.ratio, row.required
        );
    }
    let reached = shown.iter().filter(|row| row.reached).count();
    println!("\n{reached} of {} rows reached", shown.len());
    if arguments.write {
        let command = format!("cargo xtask compare file --repeats {} --write", arguments.repeats);
        figures::write("file", &command, &shown)?;
    }
    Ok(if reached == shown.len() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn fio(arguments: &Arguments, directory: &std::path::Path, row: &Row) -> Result<f64, Error> {
    let what = (row.op, row.order, row.block, row.depth);
    fio_rate(directory, arguments.mebibytes, arguments.seconds, what)
}

/// Gigabytes a second, of a file that is there already: op, order, block and depth.
pub(super) fn fio_rate(
    directory: &std::path::Path,
    mebibytes: u64,
    seconds: f64,
    (op, order, block, depth): (&str, &str, &str, u64),
) -> Result<f64, Error> {
    let mode = if order == "random" {
        format!("rand{op}")
    } else {
        op.to_owned()
    };
    let block = block.trim_end_matches("iB").to_lowercase();
    let mut command = Command::new("fio");
    command
        .args([
            "--name=row",
            "--ioengine=io_uring",
            "--direct=1",
            "--time_based",
            "--output-format=json",
        ])
        .arg(format!("--filename={}", directory.join("fio").display()))
        .arg(format!("--size={mebibytes}m"))
        .arg(format!("--bs={block}"))
        .arg(format!("--rw={mode}"))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--runtime={seconds}"));
    // It lays the file out by itself where it reads; a write to room that was never written is something else than one over old bytes.
    let path = directory.join("fio");
    if !path.exists() {
        let mut lay_out = Command::new("fio");
        lay_out
            .args([
                "--name=lay-out",
                "--ioengine=io_uring",
                "--direct=1",
                "--bs=1m",
                "--rw=write",
                "--iodepth=8",
            ])
            .arg(format!("--filename={}", path.display()))
            .arg(format!("--size={mebibytes}m"));
        command::output(&mut lay_out)?;
    }
    let said = command::output(&mut command)?;
    let rate = said
        .find('{')
        .and_then(|at| serde_json::from_str::<Value>(&said[at..]).ok())
        .and_then(|report| report["jobs"][0][op]["bw_bytes"].as_f64());
    rate.map(|rate| rate / 1e9).ok_or(Error::NotUnderstood {
        program: "fio".to_owned(),
        said,
    })
}

fn weft(arguments: &Arguments, directory: &std::path::Path, row: &Row) -> Result<f64, Error> {
    let mut command = Command::new(root().join("target/release/weft"));
    command
        .args(["bench", "file", "--json", "--transfers", "2"])
        .arg("--directory")
        .arg(directory)
        .args(["--size", &format!("{}MiB", arguments.mebibytes)])
        .args(["--op", row.op, "--order", row.order, "--block", row.block])
        .args(["--depth", &(row.depth / 2).to_string()])
        .args(["--seconds", &arguments.seconds.to_string()]);
    if row.checksum {
        command.arg("--checksum");
    }
    let said = command::output(&mut command)?;
    let rate = serde_json::from_str::<Value>(said.trim())
        .ok()
        .and_then(|line| line["gigabytes_per_sec"].as_f64());
    rate.ok_or(Error::NotUnderstood {
        program: "weft bench file".to_owned(),
        said,
    })
}
