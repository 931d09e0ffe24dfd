//! `weft doctor`: what this machine has, which transports work, what bounds them, and what to do about it.

mod files;
pub mod gpu;
mod objects;
mod ranks;
mod rdma;
mod stacks;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use console::style;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use weft::Direction;
use weft_fabric::calibrate::{CalibrateOptions, Calibration, calibrate};
use weft_fabric::discover::{self, Absent, Bound, Discovery, Limits, PtraceScope, TransparentHugePages};
use weft_fabric::verbs::checkup::checkup;
use weft_plan::{Bytes, LinkCost, Machine, Platform, Spans};

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{self, Overrides};
use crate::pair::{Cast, Pair, Plan, Way, differs, once};
use crate::pattern::Pattern;
use crate::predict::{PROBE_BYTES, Spread, probe};
use crate::table::{Align, Table};
use files::FilesReport;
use objects::ObjectsReport;
use rdma::RdmaReport;

/// How long each probe of a transport goes on, when there is time and when there is not.
const PROBE_BUDGET: Duration = Duration::from_millis(60);
const PROBE_BUDGET_QUICK: Duration = Duration::from_millis(10);
/// When this long has passed, transports are still tried, and not measured any more.
const QUICK: Duration = Duration::from_secs(4);
const WAYS: [Way; 3] = [Way::SharedMemory, Way::SharedMemoryForeign, Way::Tcp];
const SEED: u64 = 0xd0c;

/// Say what this machine has, which transports work, and what to fix and how
///
/// Every transport is really tried: a second process is started, bytes go both ways and are compared. The exit code is 1 where a
/// transport does not work. It takes five seconds at most on a machine that has nothing else to do.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Measure longer, and also what collectives between ranks of this machine cost: up to half a minute
    #[arg(long)]
    thorough: bool,
    /// Write what was found and measured to this platform file; measures as --thorough does
    #[arg(long, value_name = "FILE")]
    platform: Option<PathBuf>,
    /// Where files would be kept: what that directory offers is said, too
    #[arg(long, value_name = "DIRECTORY", default_value = ".")]
    directory: PathBuf,
    /// Where objects would be kept, as in s3://BUCKET: whether it is there, and lets this process in
    #[arg(long, value_name = "URL")]
    bucket: Option<String>,
    /// Say instead which programs with a door for Weft are installed, and whether Weft was run with those versions
    #[arg(long, conflicts_with_all = ["thorough", "platform"])]
    stacks: bool,
    /// With --stacks: the Python that they are installed for; by default the one that runs this command, else python3
    #[arg(long, value_name = "PROGRAM", requires = "stacks")]
    python: Option<PathBuf>,
    /// Say instead what the GPUs of this machine can do, and measure what kernels take there: a few seconds each. With --platform the constants go into that file, beside what is there already
    #[arg(long, conflicts_with_all = ["thorough", "stacks"])]
    gpu: bool,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
}

/// What came of trying a transport.
struct Trial {
    way: Way,
    /// What it costs, where there was time to measure.
    outcome: Result<Option<LinkCost>, Complaint>,
}

/// What is being done, for whoever watches.
struct Steps {
    bar: ProgressBar,
    began: Instant,
    thorough: bool,
}

impl Steps {
    fn new(thorough: bool) -> Steps {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Steps {
            bar,
            began: Instant::now(),
            thorough,
        }
    }

    fn step(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// How long a probe may take, if any.
    fn budget(&self) -> Option<Duration> {
        match self.thorough {
            true => Some(PROBE_BUDGET),
            false => (self.began.elapsed() < QUICK).then_some(PROBE_BUDGET_QUICK),
        }
    }
}

impl Doctor {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        if self.stacks {
            return stacks::run(self.python.as_deref(), self.json);
        }
        if self.gpu {
            return gpu::run(self.platform.as_deref(), self.json);
        }
        let settings = overrides.settings()?;
        let quiet = overrides.without_log()?;
        let thorough = self.thorough || self.platform.is_some();
        let steps = Steps::new(thorough);
        steps.step("looking at the machine");
        let mut found = discover::machine();
        let opened = checkup(&found.rdma);
        let rdma = RdmaReport::new(&found, &opened);
        found.absent.extend(opened.absent);
        steps.step("files");
        let files = FilesReport::probe(&self.directory);
        let objects = self.bucket.as_deref().map(|url| {
            steps.step("objects");
            ObjectsReport::probe(url, &settings)
        });
        steps.step("copying memory");
        let speed = calibrate(&CalibrateOptions::default());
        found.machine.memcpy = Some(speed.memcpy);
        let mut between_ranks = ranks::Measured::default();
        if thorough {
            steps.step("collectives between ranks of this machine");
            between_ranks = ranks::measure(&quiet, &speed);
        }
        found.machine.reduction = between_ranks.reduction;
        found.machine.arena = between_ranks.arena;
        let trials = WAYS.map(|way| {
            steps.step(format!("{way}, with a second process"));
            let outcome = attempt(way, &quiet, steps.budget());
            Trial { way, outcome }
        });
        steps.bar.finish_and_clear();
        if self.json {
            print_json(&found, rdma, (files, objects), speed, &trials, &settings)?;
        } else {
            print_machine(&found.machine, speed)?;
            heading("RDMA")?;
            out!("{}", rdma.text());
            heading("Files")?;
            out!("{}", files.text());
            if let Some(objects) = &objects {
                heading("Objects")?;
                out!("{}", objects.text());
            }
            print_limits(&found.limits)?;
            print_trials(&trials)?;
            print_absent(&found.absent)?;
            if !thorough {
                heading("What was not measured")?;
                outln!("  What collectives between ranks of this machine cost, and everything longer than a moment:");
                outln!(
                    "  `weft doctor --thorough` does, and `--platform FILE` writes it down for `explain` and `bench`."
                );
            }
            heading("Settings")?;
            out!("{}", indented(&weft::settings::table(&settings)));
        }
        if let Some(path) = &self.platform {
            let text = platform(&found.machine, &trials, between_ranks.tcp).to_toml();
            std::fs::write(path, text).or_complain(Exit::Failed, || {
                format!("The platform file {} was not written.", path.display())
            })?;
            if !self.json {
                outln!();
                outln!("  The machine and the measured costs are in {}.", path.display());
            }
        }
        match trials.iter().filter(|trial| trial.outcome.is_err()).count() {
            0 => Ok(()),
            broken => Err(Complaint::new(
                Exit::Failed,
                format!("{broken} of {} ways do not work here.", trials.len()),
            )),
        }
    }
}

/// Starts a second process, moves bytes both ways, compares them, and measures what it cost, if there is time.
fn attempt(way: Way, overrides: &Overrides, budget: Option<Duration>) -> Result<Option<LinkCost>, Complaint> {
    let cast = Cast {
        here: "doctor",
        there: "partner",
        region_bytes: PROBE_BYTES,
        echo: false,
        at: None,
    };
    let mut pair = Pair::start(way, cast, overrides)?;
    pair.partner.fill(SEED)?;
    let all = Spans::contiguous(0, PROBE_BYTES);
    for direction in [Direction::Read, Direction::Write, Direction::Read] {
        once(&pair.prepare(Plan::new(direction, all.clone(), all.clone()).checksum(true))?)?;
    }
    if let Some(offset) = ends::first_difference(&pair.local, &all, Pattern(SEED), &all) {
        return Err(differs(&format!("what came back over {way}"), offset));
    }
    budget
        .map(|budget| probe(&pair, Direction::Read, Spread::Wide, budget))
        .transpose()
}

fn platform(machine: &Machine, trials: &[Trial], message: Option<LinkCost>) -> Platform {
    let measured = trials
        .iter()
        .filter_map(|trial| Some((trial.way.to_string(), (*trial.outcome.as_ref().ok()?)?)));
    Platform {
        name: machine.name.clone(),
        transports: measured.collect(),
        messages: message.into_iter().map(|cost| ("tcp".to_string(), cost)).collect(),
        machines: vec![machine.clone()],
        links: Vec::new(),
    }
}

fn print_machine(machine: &Machine, speed: Calibration) -> Result<(), Complaint> {
    heading(&format!("Machine {}", machine.name))?;
    let memory = machine
        .memory
        .map_or("unknown".to_string(), |bytes| format!("{bytes:.1}"));
    outln!(
        "  {} cores, {} NUMA nodes, {memory} of memory",
        machine.core_count(),
        machine.numa.len()
    );
    outln!(
        "  memcpy of one core: {:.1} from memory to memory, {:.1} in its cache; a system call takes {:.0}",
        speed.memcpy.streaming,
        speed.memcpy.cached,
        speed.system_call
    );
    if let Some(arena) = machine.arena {
        outln!(
            "  two ranks through {:.0} of cache: a word takes {:.0}, each copies {:.1} and reduces {:.1}; through memory, {:.1} and {:.1}",
            arena.cache,
            arena.latency,
            arena.copy.cached,
            arena.reduce.cached,
            arena.copy.streaming,
            arena.reduce.streaming
        );
    }
    for gpu in &machine.gpus {
        let memory = gpu.memory.map_or(String::new(), |bytes| format!(", {bytes:.1}"));
        outln!("  GPU {}: {}{memory}", gpu.ordinal, gpu.name);
    }
    for nic in &machine.nics {
        let addresses: Vec<String> = nic.addresses.iter().map(ToString::to_string).collect();
        let mut facts = vec![if nic.up { "up".to_string() } else { "down".to_string() }];
        facts.extend(nic.bandwidth.map(|bandwidth| bandwidth.to_string()));
        facts.extend(nic.rdma.clone());
        facts.extend(addresses);
        outln!("  NIC {}: {}", nic.name, facts.join(", "));
    }
    Ok(())
}

fn print_limits(limits: &Limits) -> Result<(), Complaint> {
    heading("Limits")?;
    let mut table = Table::new(&[("limit", Align::Left), ("value", Align::Left)]);
    for (name, value) in limit_rows(limits) {
        table.row(vec![name.to_string(), value]);
    }
    out!("{}", table.render());
    Ok(())
}

fn limit_rows(limits: &Limits) -> Vec<(&'static str, String)> {
    let unknown = || "unknown".to_string();
    let mut rows = vec![
        (
            "locked memory",
            bound(limits.locked_memory, |bytes| Bytes(bytes).to_string()),
        ),
        ("open files", bound(limits.open_files, |count| count.to_string())),
        (
            "ptrace_scope",
            match limits.ptrace_scope {
                None => "no Yama: processes of one user may read each other's memory",
                Some(PtraceScope::Classic) => "0: processes of one user may read each other's memory",
                Some(PtraceScope::Restricted) => "1: only ancestors, and processes that were named",
                Some(PtraceScope::AdminOnly) => "2: only with CAP_SYS_PTRACE",
                Some(PtraceScope::Nobody) => "3: nobody",
            }
            .to_string(),
        ),
        (
            "transparent huge pages",
            match limits.transparent_huge_pages {
                None => unknown(),
                Some(TransparentHugePages::Always) => "always".to_string(),
                Some(TransparentHugePages::Madvise) => "where asked for".to_string(),
                Some(TransparentHugePages::Never) => "never".to_string(),
            },
        ),
    ];
    for pool in &limits.huge_pages {
        rows.push((
            "huge pages",
            format!("{} of {} free, {} each", pool.free, pool.total, pool.size),
        ));
    }
    rows
}

fn bound(bound: Option<Bound>, show: impl Fn(u64) -> String) -> String {
    match bound {
        None => "unknown".to_string(),
        Some(Bound::Unlimited) => "unlimited".to_string(),
        Some(Bound::At(value)) => show(value),
    }
}

fn print_trials(trials: &[Trial]) -> Result<(), Complaint> {
    heading("Transports, tried with a second process")?;
    let mut table = Table::new(&[
        ("way", Align::Left),
        ("works", Align::Left),
        ("latency", Align::Right),
        ("per span", Align::Right),
        ("bandwidth", Align::Right),
    ]);
    for trial in trials {
        let works = match &trial.outcome {
            Ok(_) => style("yes").green(),
            Err(_) => style("no").red(),
        };
        let costs = match &trial.outcome {
            Ok(Some(cost)) => [
                format!("{:.2}", cost.latency),
                format!("{:.0}", cost.per_span),
                format!("{:.1}", cost.bandwidth),
            ],
            _ => [String::new(), String::new(), String::new()],
        };
        let cells = [works.to_string()].into_iter().chain(costs);
        table.row([trial.way.to_string()].into_iter().chain(cells).collect());
    }
    out!("{}", table.render());
    for trial in trials {
        if let Err(complaint) = &trial.outcome {
            outln!();
            out!("{}", indented(&format!("{}: {}\n", trial.way, complaint.text())));
        }
    }
    Ok(())
}

fn print_absent(absent: &[Absent]) -> Result<(), Complaint> {
    heading("What is not there, and what to do if you want it")?;
    if absent.is_empty() {
        outln!("  Nothing is missing.");
    }
    for Absent { what, why, fix, .. } in absent {
        outln!("  {}: {why}", style(what).bold());
        outln!("      {fix}");
    }
    Ok(())
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a Machine,
    rdma: RdmaReport,
    files: FilesReport,
    /// Of the bucket that was named, where one was.
    objects: Option<ObjectsReport>,
    system_call_ns: u64,
    limits: Vec<(&'static str, String)>,
    transports: Vec<TransportReport>,
    absent: Vec<AbsentReport>,
    settings: Vec<SettingReport>,
}

#[derive(Serialize)]
struct TransportReport {
    way: String,
    works: bool,
    cost: Option<LinkCost>,
    reason: Option<String>,
}

#[derive(Serialize)]
struct AbsentReport {
    what: String,
    why: String,
    fix: &'static str,
}

#[derive(Serialize)]
struct SettingReport {
    key: &'static str,
    value: String,
    origin: String,
}

fn print_json(
    found: &Discovery,
    rdma: RdmaReport,
    (files, objects): (FilesReport, Option<ObjectsReport>),
    speed: Calibration,
    trials: &[Trial],
    settings: &weft::settings::Settings,
) -> Result<(), Complaint> {
    let report = Report {
        machine: &found.machine,
        rdma,
        files,
        objects,
        system_call_ns: speed.system_call.as_ns(),
        limits: limit_rows(&found.limits),
        transports: trials
            .iter()
            .map(|trial| TransportReport {
                way: trial.way.to_string(),
                works: trial.outcome.is_ok(),
                cost: trial.outcome.as_ref().ok().copied().flatten(),
                reason: trial.outcome.as_ref().err().map(Complaint::text),
            })
            .collect(),
        absent: found
            .absent
            .iter()
            .map(|absent| AbsentReport {
                what: absent.what.to_string(),
                why: absent.why.to_string(),
                fix: absent.fix,
            })
            .collect(),
        settings: settings
            .rows()
            .into_iter()
            .map(|(row, value, origin)| SettingReport {
                key: row.key,
                value,
                origin: origin.to_string(),
            })
            .collect(),
    };
    let text =
        serde_json::to_string_pretty(&report).or_complain(Exit::Failed, || "The findings have no JSON.".to_string())?;
    outln!("{text}");
    Ok(())
}

fn heading(text: &str) -> Result<(), Complaint> {
    outln!();
    outln!("{}", style(text).bold());
    outln!();
    Ok(())
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}
