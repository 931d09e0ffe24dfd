//! `weft explain`: which algorithm a collective would run, why, and what it would do step by step; and whether a fetch pays.

mod fetch;

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand, ValueEnum};
use console::style;
use serde::Serialize;
use weft_plan::algorithms::Grid;
use weft_plan::cost::{Candidate, Placement, Prediction, Selector};
use weft_plan::schedule::encode::{Schedule, from_json, to_json};
use weft_plan::schedule::{Program, Summary, render, verify};
use weft_plan::{Bytes, Collective, Platform, Problem, Rank};

use crate::complaint::{Complain, Complaint, Exit};
use crate::table::{Align, Table};

/// A program of more ranks, or of more ranks × steps, is not run through op by op while somebody waits.
const VERIFIED_RANKS: u32 = 512;
const VERIFIED_STEPS: u64 = 1 << 20;
/// How many of the slower algorithms are shown.
const RUNNERS_UP: usize = 8;

/// Say which algorithm a collective would run, why, and from which size on another one
///
/// Times are predicted from a platform file (`weft doctor --platform FILE` writes one of this machine), or from the built-in laptop.
/// What would run is verified before it is shown. Sizes are those of the larger of a rank's buffers. Communicators choose by the same
/// function, from the platform file that the setting `platform` names. Whether ranks work in place has no part in the choice, because
/// each decides that for itself: times are those of separate buffers. `ring/16` is a ring in 16 portions that follow each other.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Explain {
    #[command(subcommand)]
    other: Option<Other>,
    /// Which collective
    #[arg(value_parser = PossibleValuesParser::new(Collective::NAMES), required_unless_present = "schedule")]
    collective: Option<String>,
    /// How many ranks take part
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    ranks: u32,
    /// How many nodes they are on, with equally many on each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    nodes: u32,
    /// How much data
    #[arg(long, value_name = "SIZE", default_value = "1MiB")]
    bytes: Bytes,
    /// The root of broadcast, reduce, gather and scatter; send-receive goes from it to the next rank
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    root: u32,
    /// Input and output are the same memory
    #[arg(long)]
    in_place: bool,
    /// Costs and machines are those of this platform file
    #[arg(long, value_name = "FILE")]
    platform: Option<PathBuf>,
    /// Nodes reach each other over this transport; by default by RDMA, or else TCP
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(["verbs", "tcp"]))]
    transport: Option<String>,
    /// Choose as calls do that are deterministic: by collective, size and number of ranks alone
    #[arg(long)]
    deterministic: bool,
    /// Explain this algorithm instead of the fastest; `ring/16` is a ring in 16 portions
    #[arg(long, value_name = "NAME")]
    algorithm: Option<Candidate>,
    /// Print the whole schedule and nothing else
    #[arg(long, value_name = "FORM", conflicts_with = "json")]
    render: Option<Form>,
    /// Read a schedule from this JSON file, verify it, and explain it instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["collective", "algorithm", "platform", "nodes", "transport", "deterministic", "json"])]
    schedule: Option<PathBuf>,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
}

/// What is explained besides collectives.
#[derive(Debug, Subcommand)]
enum Other {
    Fetch(fetch::Fetch),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// One line a rank and step
    Text,
    /// A space-time diagram
    Svg,
    /// A file that `--schedule` reads
    Json,
}

/// What is explained.
struct Subject {
    platform: Platform,
    problem: Problem,
    placement: Placement,
    selector: Selector,
    chosen: Candidate,
    program: Box<dyn Program>,
}

impl Explain {
    pub fn run(self) -> Result<(), Complaint> {
        if let Some(Other::Fetch(fetch)) = self.other {
            return fetch.run();
        }
        if let Some(path) = &self.schedule {
            return self.explain_file(path);
        }
        let subject = self.subject()?;
        let shape = subject.program.shape();
        let steps = u64::from(shape.ranks) * u64::from(shape.steps);
        let small = shape.ranks <= VERIFIED_RANKS && steps <= VERIFIED_STEPS;
        let summary = match small {
            true => Some(verified(&subject.problem, &*subject.program)?),
            false => None,
        };
        if let Some(form) = self.render {
            let name = subject.chosen.to_string();
            return print_schedule(form, &name, &subject.problem, &*subject.program);
        }
        match self.json {
            true => self.print_json(&subject, summary),
            false => self.print_tables(&subject, summary),
        }
    }

    fn subject(&self) -> Result<Subject, Complaint> {
        let name = self.collective.as_deref().unwrap_or_default();
        let root = Rank(self.root);
        let to = Rank(self.root.wrapping_add(1) % self.ranks);
        let Some(collective) = Collective::named(name, root, to) else {
            return Err(Complaint::new(Exit::Usage, format!("There is no collective `{name}`.")));
        };
        let problem = Problem {
            in_place: self.in_place,
            ..Problem::new(collective, self.ranks)
        };
        problem
            .check()
            .or_complain(Exit::Usage, || "There is no such collective.".to_string())?;
        if !self.ranks.is_multiple_of(self.nodes) {
            let sentence = format!(
                "{} ranks cannot be spread evenly over {} nodes.",
                self.ranks, self.nodes
            );
            return Err(Complaint::new(Exit::Usage, sentence));
        }
        let grid = Grid {
            nodes: self.nodes,
            local: self.ranks / self.nodes,
        };
        let platform = self.platform()?;
        let placed = match (self.deterministic, &self.transport) {
            (true, _) => Placement::reference(self.ranks),
            (false, Some(transport)) => Placement::over(&platform, grid, &[transport]),
            (false, None) => Placement::on(&platform, grid),
        };
        let placement = placed.or_complain(Exit::Usage, || {
            "The platform does not say what these ranks need.".to_string()
        })?;
        let selector = Selector::new(problem, placement);
        let ranked = selector.ranked(self.bytes);
        let same = |candidate: &Candidate| Some(*candidate) == self.algorithm;
        // Without a number of portions, the best one.
        let alike = |candidate: &Candidate| match self.algorithm {
            Some(asked) => asked.portions == 1 && asked.algorithm == candidate.algorithm,
            None => false,
        };
        let mut candidates = ranked.iter().map(|(candidate, _)| *candidate);
        let chosen = match self.algorithm {
            Some(asked) if asked.portions > 1 => candidates.find(same).or(self.algorithm),
            Some(_) => candidates.find(alike),
            None => selector.choose(self.bytes),
        };
        let built = chosen.and_then(|chosen| Some((chosen, chosen.program(&problem, grid)?)));
        let Some((chosen, program)) = built else {
            let who = self
                .algorithm
                .map_or("No algorithm".to_string(), |asked| format!("The algorithm {asked}"));
            let known = ranked.iter().filter(|(candidate, _)| candidate.portions == 1);
            let known: Vec<String> = known.map(|(candidate, _)| candidate.to_string()).collect();
            return Err(
                Complaint::new(Exit::Usage, format!("{who} is not for this collective."))
                    .try_this(format!("one of {}", known.join(", "))),
            );
        };
        Ok(Subject {
            platform,
            problem,
            placement,
            selector,
            chosen,
            program,
        })
    }

    fn platform(&self) -> Result<Platform, Complaint> {
        let Some(path) = &self.platform else {
            return Ok(Platform::laptop());
        };
        let text = std::fs::read_to_string(path).or_complain(Exit::Usage, || {
            format!("The platform file {} cannot be read.", path.display())
        })?;
        Platform::from_toml(&text).or_complain(Exit::Usage, || format!("{} is not a platform file.", path.display()))
    }

    fn explain_file(&self, path: &std::path::Path) -> Result<(), Complaint> {
        let text = std::fs::read_to_string(path).or_complain(Exit::Usage, || {
            format!("The schedule {} cannot be read.", path.display())
        })?;
        let schedule =
            from_json(&text).or_complain(Exit::Failed, || format!("{} is not to be run.", path.display()))?;
        let summary = verified(&schedule.problem, &schedule.program)?;
        if let Some(form) = self.render {
            return print_schedule(form, &schedule.name, &schedule.problem, &schedule.program);
        }
        let problem = &schedule.problem;
        outln!(
            "{}",
            style(format!(
                "{}: {} among {} ranks",
                schedule.name, problem.collective, problem.ranks
            ))
            .bold()
        );
        outln!("  verified  {}", proof(problem, &summary));
        outln!(
            "  runs      as `weft bench collective --schedule {}` and by `Call::schedule`",
            path.display()
        );
        Ok(())
    }

    fn print_tables(&self, subject: &Subject, summary: Option<Summary>) -> Result<(), Complaint> {
        let Subject {
            platform,
            problem,
            chosen,
            ..
        } = subject;
        let ranked = subject.selector.ranked(self.bytes);
        let fastest = ranked
            .first()
            .map(|(_, prediction)| prediction.time.as_secs_f64())
            .unwrap_or(0.0);
        let title = format!(
            "{} of {} among {} ranks{}{}, on the platform {}",
            problem.collective,
            self.bytes,
            problem.ranks,
            match self.nodes {
                1 => String::new(),
                nodes => format!(" on {nodes} nodes"),
            },
            if self.in_place { ", in place" } else { "" },
            platform.name,
        );
        outln!("{}", style(title).bold());
        let prediction = ranked
            .iter()
            .find(|(candidate, _)| candidate == chosen)
            .map(|(_, prediction)| *prediction);
        if let Some(prediction) = prediction {
            let verb = if self.algorithm.is_some() {
                "asked for"
            } else {
                "would run"
            };
            outln!("  {verb}  {chosen}: {:.1}, {}", prediction.time, because(&prediction));
        }
        match &summary {
            Some(summary) => outln!("  verified   {}", proof(problem, summary)),
            None => {
                outln!("  verified   not for so many ranks; the same program is, for every number of them up to 64")
            }
        }
        outln!();
        let mut table = Table::new(&[
            ("algorithm", Align::Left),
            ("predicted", Align::Right),
            ("× fastest", Align::Right),
            ("steps", Align::Right),
            ("latency", Align::Right),
            ("transfer", Align::Right),
            ("copy, reduce", Align::Right),
        ]);
        for (nth, (candidate, prediction)) in ranked.iter().enumerate() {
            if nth <= RUNNERS_UP || candidate == chosen {
                table.row(vec![
                    candidate.to_string(),
                    format!("{:.1}", prediction.time),
                    format!("{:.2}", prediction.time.as_secs_f64() / fastest.max(1e-12)),
                    prediction.steps.to_string(),
                    format!("{:.1}", prediction.latency),
                    format!("{:.1}", prediction.transfer),
                    format!("{:.1}", prediction.work),
                ]);
            }
        }
        out!("{}", table.render());
        if let Some(more) = ranked.len().checked_sub(RUNNERS_UP + 1).filter(|more| *more > 0) {
            outln!("  and {more} more, slower");
        }
        outln!();
        let mut table = Table::new(&[("from size", Align::Right), ("the fastest is", Align::Left)]);
        for segment in subject.selector.envelope() {
            table.row(vec![format!("{:.1}", segment.from), segment.candidate.to_string()]);
        }
        out!("{}", table.render());
        Ok(())
    }

    fn print_json(&self, subject: &Subject, summary: Option<Summary>) -> Result<(), Complaint> {
        let ranked = subject.selector.ranked(self.bytes);
        let explanation = Explanation {
            collective: subject.problem.collective.name(),
            ranks: subject.problem.ranks,
            nodes: subject.placement.grid.nodes,
            bytes: self.bytes.0,
            in_place: self.in_place,
            platform: &subject.platform.name,
            chosen: subject.chosen.into(),
            verified: summary.is_some(),
            same_bits: summary.map(|summary| summary.same_bits),
            messages: summary.map(|summary| summary.messages),
            predicted: ranked
                .iter()
                .map(|(candidate, prediction)| Row::new(*candidate, prediction))
                .collect(),
            envelope: subject
                .selector
                .envelope()
                .iter()
                .map(|segment| Turn {
                    from_bytes: segment.from.0,
                    candidate: segment.candidate.into(),
                })
                .collect(),
        };
        outln!(
            "{}",
            serde_json::to_string(&explanation).expect("plain fields have a form in JSON")
        );
        Ok(())
    }
}

fn verified(problem: &Problem, program: &dyn Program) -> Result<Summary, Complaint> {
    verify(problem, program).or_complain(Exit::Failed, || "The schedule is wrong, and must not run.".to_string())
}

fn print_schedule(form: Form, name: &str, problem: &Problem, program: &dyn Program) -> Result<(), Complaint> {
    let limits = render::Limits::default();
    let text = match form {
        Form::Text => render::text(problem, program, &limits),
        Form::Svg => render::svg(problem, program, &limits),
        Form::Json => to_json(&Schedule::of(name, *problem, program)),
    };
    crate::out::print_whole(text.as_bytes())
}

/// What was shown, in a line.
fn proof(problem: &Problem, summary: &Summary) -> String {
    let mut text = format!("{} messages; ends, no race", summary.messages);
    text.push_str(match problem.collective {
        Collective::Barrier => ", nobody ends before all have begun",
        _ => ", every contribution exactly once",
    });
    if problem.collective.reduces() {
        text.push_str(match summary.same_bits {
            true => ", the same bits everywhere",
            false => "; rounding may differ from rank to rank",
        });
    }
    text
}

/// What most of the time goes to.
fn because(prediction: &Prediction) -> String {
    let whole = prediction.time.as_secs_f64().max(1e-12);
    let share = |part: weft_plan::Picos| (part.as_secs_f64() / whole * 100.0).round();
    format!(
        "{} step{} ({} % latency, {} % transfer, {} % copying and reducing)",
        prediction.steps,
        if prediction.steps == 1 { "" } else { "s" },
        share(prediction.latency),
        share(prediction.transfer),
        share(prediction.work)
    )
}

#[derive(Serialize)]
struct Explanation<'a> {
    collective: &'a str,
    ranks: u32,
    nodes: u32,
    bytes: u64,
    in_place: bool,
    platform: &'a str,
    chosen: Choice,
    verified: bool,
    same_bits: Option<bool>,
    messages: Option<u64>,
    predicted: Vec<Row>,
    envelope: Vec<Turn>,
}

#[derive(Serialize)]
struct Choice {
    algorithm: &'static str,
    portions: u32,
}

impl From<Candidate> for Choice {
    fn from(candidate: Candidate) -> Choice {
        Choice {
            algorithm: candidate.algorithm.name(),
            portions: candidate.portions,
        }
    }
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    candidate: Choice,
    predicted_us: f64,
    steps: u32,
    latency_us: f64,
    transfer_us: f64,
    work_us: f64,
}

impl Row {
    fn new(candidate: Candidate, prediction: &Prediction) -> Row {
        let us = |time: weft_plan::Picos| time.as_secs_f64() * 1e6;
        Row {
            candidate: candidate.into(),
            predicted_us: us(prediction.time),
            steps: prediction.steps,
            latency_us: us(prediction.latency),
            transfer_us: us(prediction.transfer),
            work_us: us(prediction.work),
        }
    }
}

#[derive(Serialize)]
struct Turn {
    from_bytes: u64,
    #[serde(flatten)]
    candidate: Choice,
}
