//! `cargo xtask rdma-test`: the tests that need an RDMA device, in virtual machines that have one.
//!
//! Each part boots machines of its own, so that what one part does to its kernel cannot touch the next. The programs are those of this
//! machine: built here, seen there.

mod build;
mod measure;
mod perftest;
mod system_calls;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::command::{self, Needed, install_missing};
use crate::vm::{self, Ended, Host, Machine};
use build::Built;
pub use measure::Arguments as MeasureArguments;
pub use measure::run as measure;

#[derive(Debug, Error)]
pub enum Error {
    #[error(transparent)]
    Machine(#[from] vm::Error),
    #[error(transparent)]
    Command(#[from] command::Error),
    #[error("{} failed", .0.join(", "))]
    Parts(Vec<&'static str>),
}

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these parts.
    #[arg(long, value_delimiter = ',', value_name = "PARTS")]
    only: Vec<Part>,
    /// Runs a command of bash in a machine instead of the tests. The exit code is the command's.
    #[arg(long, value_name = "COMMAND", conflicts_with = "only")]
    shell: Option<String>,
    /// How many machines run that command: two are joined by one cable for each rail.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2), requires = "shell")]
    nodes: u8,
    /// RDMA devices of each machine that runs it.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=8), requires = "shell")]
    rails: u32,
    /// Further kernel modules of each machine that runs it.
    #[arg(long, value_delimiter = ',', requires = "shell")]
    modules: Vec<String>,
    /// Memory of each machine, in MiB.
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// Processors of each machine.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// After how many seconds a machine is turned off; by default what the part needs on a slow machine.
    #[arg(long)]
    timeout: Option<u64>,
    /// Keep the kernels' messages under target/vm, as console or console.PART; those of a second machine with .1 added.
    #[arg(long)]
    keep_console: bool,
    /// Use the processor's own virtualisation instead of emulation, where that works.
    #[arg(long)]
    kvm: bool,
}

/// What can be run by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The conformance suite over one rail.
    Conformance,
    /// Faults that only a device can have, and the typed errors they end in.
    Faults,
    /// Two agents of one machine over two rails, one of which is taken away in mid-transfer.
    Agents,
    /// The same between two machines, whose cables are pulled.
    Link,
    /// The figures beside those of perftest in the same boot.
    Perftest,
    /// What is said of an iWARP device, where the kernel has one.
    Siw,
}

impl Part {
    const ALL: [Part; 6] = [
        Part::Conformance,
        Part::Faults,
        Part::Agents,
        Part::Link,
        Part::Perftest,
        Part::Siw,
    ];

    fn name(self) -> &'static str {
        match self {
            Part::Conformance => "conformance",
            Part::Faults => "faults",
            Part::Agents => "agents",
            Part::Link => "link",
            Part::Perftest => "perftest",
            Part::Siw => "siw",
        }
    }

    /// The test binaries that it runs.
    fn tests(self) -> &'static [&'static str] {
        match self {
            Part::Conformance => &["verbs_conformance"],
            Part::Faults => &["verbs_faults"],
            Part::Agents => &["verbs"],
            Part::Link => &["verbs", "verbs_faults"],
            Part::Perftest | Part::Siw => &[],
        }
    }

    /// For a part that goes well this is plenty, boot included.
    fn time_limit(self) -> Duration {
        let seconds = match self {
            Part::Perftest => 360,
            Part::Link => 240,
            _ => 180,
        };
        Duration::from_secs(seconds)
    }

    /// Whether it runs the command.
    fn needs_weft(self) -> bool {
        matches!(self, Part::Perftest | Part::Siw)
    }
}

/// What the tests need beside a virtual machine.
const NEEDED: &[Needed] = &[
    (&["cc", "--version"], "gcc"),
    (&["ib_write_bw", "--version"], "perftest"),
];

/// Where the near end of the two machines waits for the far one, and what it listens on; both on the cable that is never pulled.
const FAR_CONTROL: &str = "10.76.0.1:7700";
const NEAR_LISTEN: &str = "10.76.0.1:0";

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let timeout = arguments.timeout.map(Duration::from_secs);
    let machine = Machine {
        memory_mib: arguments.memory,
        cpus: arguments.cpus,
        rails: arguments.rails,
        modules: arguments.modules.clone(),
        timeout: timeout.unwrap_or(Machine::default().timeout),
        kvm: arguments.kvm,
        console: arguments.keep_console.then(|| vm::cache().join("console")),
    };
    if let Some(command) = &arguments.shell {
        return Ok(shell(&Host::prepare()?, &machine, command, arguments.nodes.into())?);
    }
    let parts = match arguments.only.as_slice() {
        [] => &Part::ALL,
        some => some,
    };
    run_parts(parts, &machine, timeout)?;
    Ok(ExitCode::SUCCESS)
}

/// The parts whose verdict does not depend on how fast and how busy the machine is.
pub fn run_tests() -> Result<(), Error> {
    let tests = Part::ALL.into_iter().filter(|part| *part != Part::Perftest);
    run_parts(&tests.collect::<Vec<_>>(), &Machine::default(), None)
}

fn run_parts(parts: &[Part], machine: &Machine, timeout: Option<Duration>) -> Result<(), Error> {
    let started = Instant::now();
    install_missing(NEEDED)?;
    let host = Host::prepare()?;
    let built = Built::make(parts)?;
    let prepared = started.elapsed().as_secs_f64();
    let reports = parts
        .iter()
        .map(|part| {
            let timeout = timeout.unwrap_or(part.time_limit());
            run_part(
                *part,
                &host,
                &built,
                Machine {
                    timeout,
                    ..machine.clone()
                },
            )
        })
        .collect::<Result<Vec<Report>, Error>>()?;
    println!("\nprepared and built in {prepared:.0} s");
    for report in &reports {
        println!("{report}");
    }
    let failed = reports.iter().filter(|report| !report.passed);
    let failed: Vec<&str> = failed.map(|report| report.part.name()).collect();
    println!(
        "{} of {} parts passed in {:.0} s",
        reports.len() - failed.len(),
        reports.len(),
        started.elapsed().as_secs_f64()
    );
    if failed.is_empty() {
        Ok(())
    } else {
        Err(Error::Parts(failed))
    }
}

fn run_part(part: Part, host: &Host, built: &Built, mut machine: Machine) -> Result<Report, Error> {
    println!("\n== {} (Linux {})", part.name(), host.kernel_version());
    let started = Instant::now();
    if let Some(console) = &mut machine.console {
        console.set_extension(part.name());
    }
    if part == Part::Siw {
        if !host.has_module("siw") {
            let reason = format!("not tested: Debian's kernel {} has no siw", host.kernel_version());
            return Ok(Report::left_out(part, reason));
        }
        machine.modules.push("siw".to_owned());
    }
    let commands = commands(part, built)?;
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    let mut lines = Vec::new();
    let ends = machine.run(host, &commands, |node, line| {
        print_line(commands.len(), node, line);
        if line.starts_with("test result:") || line.starts_with("verdict:") {
            lines.push(line.to_owned());
        }
    })?;
    lines.extend(complaints(&ends, machine.timeout));
    Ok(Report {
        part,
        passed: ends.iter().all(Ended::passed),
        seconds: started.elapsed().as_secs_f64(),
        lines,
    })
}

/// What each machine of a part runs.
fn commands(part: Part, built: &Built) -> Result<Vec<String>, Error> {
    let test = |name: &str, threads: u32| -> Result<String, Error> {
        let program = quoted(built.test(name)?);
        Ok(format!("{program} --ignored --show-output --test-threads={threads}"))
    };
    Ok(match part {
        Part::Conformance => vec![test("verbs_conformance", 2)?],
        Part::Faults => vec![test("verbs_faults", 1)?],
        // One after the other: they pull the same cables.
        Part::Agents => vec![test("verbs", 1)?],
        Part::Link => {
            let near = test("verbs", 1)?;
            // Only a rail with a cable has neighbours, and so some that are absent.
            let absent = format!("{} --exact an_absent_peer_blocks_nobody", test("verbs_faults", 1)?);
            let far = quoted(built.test("verbs")?);
            vec![
                format!("export FAR_CONTROL={FAR_CONTROL} NEAR_LISTEN={NEAR_LISTEN}\n{absent} || exit\n{near}"),
                // A process for each test, until the near end has no more of them and turns itself off, which must not take minutes to find out.
                format!(
                    "export SECOND_PROCESS_LISTEN=10.76.0.2:0\n\
                     echo 1 >/proc/sys/net/ipv4/tcp_syn_retries\n\
                     connected=0\n\
                     while :; do\n\
                     \x20   if exec 3<>/dev/tcp/{}; then connected=1; else ((connected)) && break; sleep 0.3; continue; fi\n\
                     \x20   read -t 30 -r role <&3 || break\n\
                     \x20   SECOND_PROCESS_ROLE=$role {far} --exact second_process --nocapture --test-threads=1 <&3 >&3\n\
                     done 2>/dev/null\n\
                     true",
                    FAR_CONTROL.replace(':', "/"),
                ),
            ]
        }
        Part::Perftest => {
            let own = std::env::current_exe().map_err(|source| vm::Error::File {
                path: PathBuf::from("xtask"),
                source,
            })?;
            vec![format!(
                "{} rdma-measure --weft {}",
                quoted(&own),
                quoted(built.weft()?)
            )]
        }
        Part::Siw => {
            let weft = quoted(built.weft()?);
            vec![format!(
                "rdma link add siw0 type siw netdev rail0 || exit\n\
                 {weft} doctor\n\
                 ! {weft} bench transfer --transport verbs --set verbs.devices=siw0 --block 64KiB --batch 1"
            )]
        }
    })
}

fn shell(host: &Host, machine: &Machine, command: &str, nodes: usize) -> Result<ExitCode, vm::Error> {
    let ends = machine.run(host, &vec![command; nodes], |node, line| print_line(nodes, node, line))?;
    complaints(&ends, machine.timeout).for_each(|complaint| eprintln!("{complaint}"));
    let codes = ends.iter().map(|end| match end {
        Ended::Exited(code) => *code,
        Ended::TimedOut { .. } => 124,
        Ended::Died { .. } => 125,
    });
    Ok(ExitCode::from(codes.max().unwrap_or(0)))
}

fn print_line(nodes: usize, node: usize, line: &str) {
    match nodes {
        1 => println!("{line}"),
        _ => println!("[{node}] {line}"),
    }
}

/// What is to be said of machines whose command did not come to an end of its own.
fn complaints(ends: &[Ended], timeout: Duration) -> impl Iterator<Item = String> {
    ends.iter().enumerate().filter_map(move |(node, end)| match end {
        Ended::Exited(_) => None,
        Ended::TimedOut { last_words } => Some(format!(
            "machine {node} was turned off after {timeout:?}; its last words:\n{last_words}"
        )),
        Ended::Died { last_words } => Some(format!("machine {node} went away; its last words:\n{last_words}")),
    })
}

/// A path as a word of bash.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

/// How one part ended.
#[derive(Debug)]
struct Report {
    part: Part,
    passed: bool,
    seconds: f64,
    /// Summary lines of the programs themselves, and what went wrong with their machines.
    lines: Vec<String>,
}

impl Report {
    fn left_out(part: Part, reason: String) -> Report {
        Report {
            part,
            passed: true,
            seconds: 0.0,
            lines: vec![reason],
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verdict = if self.passed { "ok    " } else { "FAILED" };
        write!(out, "{verdict}  {}  ({:.1} s)", self.part.name(), self.seconds)?;
        self.lines.iter().try_for_each(|line| write!(out, "\n        {line}"))
    }
}
