//! `cargo xtask compare simulator`: how fast the simulator is, beside what others' simulators took on this machine.
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

/// One thing to measure, and what it must reach.
#[derive(Default)]
struct Row {
    name: &'static str,
    /// Of the example `speed`.
    arguments: &'static [&'static str],
    /// CPU seconds and bytes that it may take at most.
    seconds: f64,
    bytes: Option<f64>,
    /// Events that it must do in a second of the CPU.
    events: Option<f64>,
    /// Microseconds of simulated time that theory and others give; a tenth more or less is the same.
    simulated: Option<f64>,
    others: &'static str,
}

const EIGHT_GIB: Option<f64> = Some(8.0 * 1024.0 * 1024.0 * 1024.0);
/// How far off the simulated time may be from what others give.
const SIMULATED_OFF: f64 = 0.1;
/// A row that does not end must not keep the others from being seen.
const SECONDS_MOST: &str = "300";

fn rows() -> Vec<Row> {
    vec![
        Row {
            name: "analytical: every collective, 1,048,576 GPUs",
            arguments: &["closed-forms", "1048576"],
            seconds: 0.1,
            others: "–",
            ..Row::default()
        },
        Row {
            name: "analytical: every collective, 999,999 GPUs",
            arguments: &["closed-forms", "999999"],
            seconds: 0.1,
            others: "–",
            ..Row::default()
        },
        Row {
            name: "analytical: the fastest schedule of all, all-reduce, 1,048,576 GPUs",
            arguments: &["schedule", "1048576", "all-reduce"],
            seconds: 0.1,
            others: "–",
            ..Row::default()
        },
        Row {
            name: "analytical: training step, DeepSeek-V3, 9,216 GPUs",
            arguments: &["training", "9216"],
            seconds: 1.0,
            others: "SimAI analytical 11.9 s",
            ..Row::default()
        },
        Row {
            name: "analytical: training step, Kimi K2 (1 T), 131,072 GPUs",
            arguments: &["training", "131072"],
            seconds: 1.0,
            others: "–",
            ..Row::default()
        },
        Row {
            name: "flow: ring all-reduce, 1 GiB, 1,024",
            arguments: &["ring", "1024"],
            seconds: 1.0,
            others: "ASTRA-sim analytical 14.3 s, 356 MB; congestion-aware 18.9 s; LogGOPSim 15.9 s, 576 MB",
            ..Row::default()
        },
        Row {
            name: "flow: ring all-reduce, 1 GiB, 8,192",
            arguments: &["ring", "8192"],
            seconds: 10.0,
            bytes: Some(500e6),
            others: "ASTRA-sim analytical aborts at 11.6 GB (2,048: 19.5 s, 1.4 GB)",
            ..Row::default()
        },
        Row {
            name: "flow: ring all-reduce, 1 GiB, 8,192, three tiers",
            arguments: &["ring", "8192", "3"],
            seconds: 10.0,
            bytes: Some(500e6),
            others: "–",
            ..Row::default()
        },
        Row {
            name: "flow: hierarchical all-reduce, 1 GiB, 131,072",
            arguments: &["hierarchical", "131072"],
            seconds: 60.0,
            bytes: EIGHT_GIB,
            others: "ASTRA-sim exits (8×32×32: 11.9 s; 8×32×64: 40 s, 1.1 GB)",
            ..Row::default()
        },
        Row {
            name: "flow: all-to-all by rails, 1 GiB, 131,072",
            arguments: &["all-to-all", "131072"],
            seconds: 60.0,
            bytes: EIGHT_GIB,
            others: "–",
            ..Row::default()
        },
        Row {
            name: "flow: all-to-all direct, 1 GiB, 131,072",
            arguments: &["direct", "131072"],
            seconds: 60.0,
            bytes: EIGHT_GIB,
            others: "–",
            ..Row::default()
        },
        Row {
            name: "packet: permutation, 2 MB, 1,024 hosts",
            arguments: &["permutation", "1024"],
            seconds: 3.0,
            events: Some(5e6),
            simulated: Some(206.0),
            others: "htsim UEC 12.0 s, EQDS 18.0 s, NDP (9 kB) 4.6 s; 1–1.4 M events/s; tail about 206 µs",
            ..Row::default()
        },
        Row {
            name: "packet: permutation, 2 MB, 8,192 hosts",
            arguments: &["permutation", "8192"],
            seconds: 30.0,
            events: Some(5e6),
            simulated: Some(206.0),
            others: "htsim UEC 204 s, 2.4 GB; tail about 206 µs",
            ..Row::default()
        },
        Row {
            name: "serving: 20,000 requests, links for themselves",
            arguments: &["serving", "apart"],
            seconds: 1.4,
            others: "aisimulate-core 1.4 s",
            ..Row::default()
        },
        Row {
            name: "serving: 20,000 requests, every link shared",
            arguments: &["serving", "shared"],
            seconds: 10.0,
            others: "none knows this",
            ..Row::default()
        },
    ]
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    command::run(command::cargo().args(["build", "--release", "--package", "weft-sim", "--example", "speed"]))?;
    let wanted: Vec<Row> = rows()
        .into_iter()
        .filter(|row| row.name.contains(&arguments.only))
        .collect();
    if !arguments.json {
        println!("| | | CPU time | peak memory | what was done | events/s | simulated | others, on the same machine |");
        println!("|---|---|---|---|---|---|---|---|");
    }
    let mut missed = 0;
    for row in &wanted {
        let figures = match measure(row) {
            Ok(figures) => figures,
            // One row that fails must not end the comparison of the others.
            Err(error) => {
                eprintln!("{}: {error}", row.name);
                Value::Null
            }
        };
        let reached = row.reached(&figures);
        missed += usize::from(!reached);
        match arguments.json {
            true => println!("{}", row.json(&figures, reached)),
            false => println!("{}", row.line(&figures, reached)),
        }
    }
    eprintln!("{} of {} rows reached", wanted.len() - missed, wanted.len());
    Ok(if missed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn measure(row: &Row) -> Result<Value, Error> {
    let program = root().join("target/release/examples/speed");
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", SECONDS_MOST])
        .arg(&program)
        .args(row.arguments);
    let said = command::output(&mut command)?;
    serde_json::from_str(said.trim()).map_err(|_| Error::NotUnderstood {
        program: program.display().to_string(),
        said,
    })
}

fn figure(figures: &Value, name: &str) -> Option<f64> {
    figures[name].as_f64()
}

impl Row {
    fn reached(&self, figures: &Value) -> bool {
        let no_more = |name: &str, most: f64| figure(figures, name).is_some_and(|figure| figure <= most);
        let near = |figure: f64, wanted: f64| (figure / wanted - 1.0).abs() <= SIMULATED_OFF;
        no_more("cpu_seconds", self.seconds)
            && self.bytes.is_none_or(|most| no_more("peak_bytes", most))
            && self
                .events
                .is_none_or(|least| speed(figures).is_some_and(|speed| speed >= least))
            && self
                .simulated
                .is_none_or(|wanted| figure(figures, "simulated_us").is_some_and(|time| near(time, wanted)))
    }

    fn json(&self, figures: &Value, reached: bool) -> Value {
        json!({
            "row": self.name,
            "reached": reached,
            "seconds_most": self.seconds,
            "bytes_most": self.bytes,
            "events_per_second_least": self.events,
            "simulated_us_about": self.simulated,
            "others": self.others,
            "weft": figures,
        })
    }

    /// A row of a Markdown table.
    fn line(&self, figures: &Value, reached: bool) -> String {
        let bound = |most: Option<String>| most.map_or(String::new(), |most| format!(" ({most})"));
        let shown = |figure: Option<f64>, show: fn(f64) -> String| figure.map_or("–".to_owned(), show);
        format!(
            "| {} | {} | {} (≤ {} s) | {}{} | {} | {}{} | {}{} | {} |",
            self.name,
            if reached { "reached" } else { "MISSED" },
            shown(figure(figures, "cpu_seconds"), seconds),
            self.seconds,
            shown(figure(figures, "peak_bytes"), |bytes| format!("{:.0} MB", bytes / 1e6)),
            bound(self.bytes.map(|most| format!("≤ {:.0} MB", most / 1e6))),
            work(figures),
            shown(speed(figures), |speed| format!("{:.1} M", speed / 1e6)),
            bound(self.events.map(|least| format!("≥ {:.0} M", least / 1e6))),
            shown(figure(figures, "simulated_us"), simulated),
            bound(self.simulated.map(|about| format!("about {about:.0} µs"))),
            self.others
        )
    }
}

/// Events in a second of the CPU, where there were enough to say.
fn speed(figures: &Value) -> Option<f64> {
    let (events, seconds) = (figure(figures, "events")?, figure(figures, "cpu_seconds")?);
    (events >= 1e4 && seconds > 0.0).then(|| events / seconds)
}

/// How much was asked for, in whatever it is counted in.
fn work(figures: &Value) -> String {
    let counted = ["messages", "packets", "flows", "classes", "requests", "collectives"];
    let counts = counted
        .iter()
        .filter_map(|name| figures[name].as_u64().map(|count| format!("{} {name}", grouped(count))));
    let counts: Vec<String> = counts.collect();
    match counts.is_empty() {
        true => "–".to_owned(),
        false => counts.join(", "),
    }
}

/// With commas between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn seconds(seconds: f64) -> String {
    match seconds {
        few if few < 0.01 => "< 0.01 s".to_owned(),
        some => format!("{some:.2} s"),
    }
}

fn simulated(microseconds: f64) -> String {
    match microseconds {
        short if short < 1e4 => format!("{short:.1} µs"),
        longer if longer < 1e6 => format!("{:.1} ms", longer * 1e-3),
        long => format!("{:.1} s", long * 1e-6),
    }
}
