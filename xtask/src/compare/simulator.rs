//! `cargo xtask compare simulator`: how fast the simulated networks are, beside what others' simulators took on this machine.
//!
//! The others' figures are not measured again: their builds take longer than all of this. Each was taken once, with the command that its
//! project documents, in CPU seconds and peak memory.

use std::process::{Command, ExitCode};

use serde_json::{Value, json};

use crate::command::{self, Error, root};

#[derive(clap::Args)]
pub struct Arguments {
    /// Only rows whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Print JSON lines instead of a table.
    #[arg(long)]
    json: bool,
}

struct Row {
    name: &'static str,
    arguments: [&'static str; 2],
    /// CPU seconds and bytes that it may take at most.
    seconds: f64,
    bytes: Option<f64>,
    /// Events that it must do in a second.
    events: Option<f64>,
    others: &'static str,
}

const ROWS: &[Row] = &[
    Row {
        name: "flow: ring all-reduce, 1 GiB, 1,024",
        arguments: ["ring", "1024"],
        seconds: 1.0,
        bytes: None,
        events: None,
        others: "ASTRA-sim analytical 14.3 s, 356 MB; congestion-aware 18.9 s; LogGOPSim 15.9 s, 576 MB",
    },
    Row {
        name: "flow: ring all-reduce, 1 GiB, 8,192",
        arguments: ["ring", "8192"],
        seconds: 10.0,
        bytes: Some(500e6),
        events: None,
        others: "ASTRA-sim analytical aborts at 11.6 GB (2,048: 19.5 s, 1.4 GB)",
    },
    Row {
        name: "flow: hierarchical all-reduce, 1 GiB, 131,072",
        arguments: ["hierarchical", "131072"],
        seconds: 60.0,
        bytes: Some(8.0 * 1024.0 * 1024.0 * 1024.0),
        events: None,
        others: "ASTRA-sim exits (8×32×64: 40 s, 1.1 GB)",
    },
    Row {
        name: "flow: all-to-all by rails, 1 GiB, 131,072",
        arguments: ["all-to-all", "131072"],
        seconds: 60.0,
        bytes: Some(8.0 * 1024.0 * 1024.0 * 1024.0),
        events: None,
        others: "–",
    },
    Row {
        name: "flow: all-to-all direct, 1 GiB, 131,072",
        arguments: ["direct", "131072"],
        seconds: 60.0,
        bytes: Some(8.0 * 1024.0 * 1024.0 * 1024.0),
        events: None,
        others: "–",
    },
    Row {
        name: "packet: permutation, 2 MB, 1,024 hosts",
        arguments: ["permutation", "1024"],
        seconds: 3.0,
        bytes: None,
        events: Some(5e6),
        others: "htsim UEC 12.0 s, EQDS 18.0 s, NDP (9 kB) 4.6 s; 1–1.4 M events/s; tail about 206 µs",
    },
    Row {
        name: "packet: permutation, 2 MB, 8,192 hosts",
        arguments: ["permutation", "8192"],
        seconds: 30.0,
        bytes: None,
        events: Some(5e6),
        others: "htsim UEC 204 s, 2.4 GB",
    },
];

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    command::run(command::cargo().args(["build", "--release", "--package", "weft-sim", "--example", "network"]))?;
    let program = root().join("target/release/examples/network");
    let mut missed = false;
    for row in ROWS.iter().filter(|row| row.name.contains(&arguments.only)) {
        let said = command::output(Command::new(&program).args(row.arguments))?;
        let figures: Value = serde_json::from_str(said.trim()).map_err(|_| Error::NotUnderstood {
            program: program.display().to_string(),
            said: said.clone(),
        })?;
        let figure = |name: &str| figures[name].as_f64().unwrap_or(f64::NAN);
        let (seconds, bytes) = (figure("cpu_seconds"), figure("peak_bytes"));
        let speed = figure("events") / seconds.max(0.01);
        let reached = seconds <= row.seconds
            && row.bytes.is_none_or(|most| bytes <= most)
            && row.events.is_none_or(|least| speed >= least);
        missed |= !reached;
        if arguments.json {
            println!(
                "{}",
                json!({
                    "row": row.name,
                    "reached": reached,
                    "seconds_most": row.seconds,
                    "bytes_most": row.bytes,
                    "events_per_second_least": row.events,
                    "others": row.others,
                    "weft": figures,
                })
            );
        } else {
            println!(
                "{} {}: {seconds:.2} s of CPU (at most {}), {:.0} MB{}, {:.2} M events/s{}, simulated {:.1} µs",
                if reached { "ok    " } else { "MISSED" },
                row.name,
                row.seconds,
                bytes / 1e6,
                row.bytes
                    .map_or(String::new(), |most| format!(" (at most {:.0})", most / 1e6)),
                speed / 1e6,
                row.events
                    .map_or(String::new(), |least| format!(" (at least {:.0})", least / 1e6)),
                figure("time_us")
            );
            println!("         others: {}", row.others);
        }
    }
    Ok(if missed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
