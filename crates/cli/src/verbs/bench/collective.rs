//! `weft bench collective`: how long collectives take between ranks that it starts on this host, and how long they should.

mod figure;
mod forecast;
mod plot;

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValuesParser;
use indicatif::{ProgressBar, ProgressStyle};
use weft_plan::cost::Candidate;
use weft_plan::schedule::encode::from_json;
use weft_plan::{Bytes, Datatype, Rank};

use super::print_json;
use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{Allocation, Overrides};
use crate::exercise::{Kind, ROOT};
use crate::ranks::{Exercise, Formation, Ranks};
use crate::report::comparison::{Comparison, Pair};
use crate::report::{Figures, Report};
use crate::table::{Align, Table};
use figure::Figure;
use forecast::Forecast;

/// Fewer calls than these say nothing.
const ITERATIONS_MIN: u64 = 3;
/// So many ranks are started at most.
const RANKS_MAX: u32 = 64;
/// What a rank keeps of every call takes memory.
const ITERATIONS_MAX: u64 = 1 << 20;

/// Measure collectives between ranks, each a process of its own on this host
///
/// Sizes and bandwidths are those of nccl-tests: the size is that of the larger of a rank's buffers; the algorithm bandwidth is the size
/// over the time; and the bus bandwidth is what each rank's link carries: 2(n−1)/n of that for all-reduce, (n−1)/n for all-gather,
/// reduce-scatter, all-to-all, gather and scatter, and all of it for the others. Every result is checked before it is measured.
///
/// Times are means of a repeat, of the slowest rank: the median and the least of the repeats. The 99th percentile is that of single
/// calls on rank 0. Predictions are those of `weft explain` for the algorithm that ran, on the platform of --platform or of the setting
/// `platform`; without one they are of a built-in laptop and not of this machine, and the output says so.
#[derive(Debug, Args)]
pub struct Collective {
    /// How many ranks take part
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [2],
          value_parser = clap::value_parser!(u32).range(1..=i64::from(RANKS_MAX)))]
    ranks: Vec<u32>,
    /// Which collectives
    #[arg(long, value_name = "LIST", value_delimiter = ',',
          default_values = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"],
          value_parser = PossibleValuesParser::new(Kind::NAMES))]
    op: Vec<String>,
    /// How much data
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["1KiB", "64KiB", "1MiB", "16MiB"])]
    sizes: Vec<Bytes>,
    /// By which algorithms, `ring/16` being a ring in 16 portions; without this, the one that the communicator chooses
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    algorithm: Vec<Candidate>,
    /// By the schedule in this JSON file, which `weft explain --render json` writes and `weft explain --schedule` verifies; its collective
    /// and its number of ranks are what is measured
    #[arg(long, value_name = "FILE", conflicts_with_all = ["algorithm", "op", "ranks", "in_place"])]
    schedule: Option<PathBuf>,
    /// By the algorithm of deterministic calls, which depends on collective, size and number of ranks alone
    #[arg(long)]
    deterministic: bool,
    /// Send f32 as block-scaled codes of eight bits, in all-reduce alone: int8 or fp8_e4m3, in blocks of 128
    #[arg(long, value_name = "CODE", value_parser = PossibleValuesParser::new(["int8", "fp8_e4m3"]),
          conflicts_with_all = ["algorithm", "schedule", "deterministic"])]
    quantized: Option<String>,
    /// Of which elements
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["f32"],
          value_parser = PossibleValuesParser::new(Datatype::ALL.map(|d| d.name())))]
    datatype: Vec<String>,
    /// How the ranks reach each other
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["shared_memory"])]
    transport: Vec<Way>,
    /// Who allocated the buffers: Weft, which lets ranks read each other's, or somebody else
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values = ["mapped"])]
    buffers: Vec<Allocation>,
    /// Use one buffer for input and output, where the collective can
    #[arg(long)]
    in_place: bool,
    /// Write the input before every call, as programs do, and count that in; by default it stays as it is, as in other benchmarks
    #[arg(long)]
    fresh: bool,
    /// Let ranks move from core to core; by default each stays on one of its own where there are enough, as under MPI launchers
    #[arg(long)]
    no_pin: bool,
    /// How long to measure each point, all repeats together
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5)]
    secs: f64,
    /// How often to measure each point
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    repeats: u64,
    /// Choose by and predict from this platform file, which `weft doctor --platform FILE` writes, instead of the built-in laptop
    #[arg(long, value_name = "FILE")]
    platform: Option<PathBuf>,
    /// Draw times over sizes, measured and predicted, into this SVG file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Write a page for a browser, everything in one file: measured and predicted over sizes, and all figures
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print one JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Way {
    /// Through an arena in shared memory
    SharedMemory,
    /// Through sockets
    Tcp,
    /// By RDMA network cards
    Verbs,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::SharedMemory => "shared_memory",
            Way::Tcp => "tcp",
            Way::Verbs => "verbs",
        }
    }
}

impl Collective {
    pub fn run(mut self, overrides: &Overrides) -> Result<(), Complaint> {
        if !(0.0..=3600.0).contains(&self.secs) {
            return Err(Complaint::new(Exit::Usage, "--secs takes a number from 0 to 3600."));
        }
        if self.quantized.is_some() && (self.op != ["all-reduce"] || self.datatype != ["f32"]) {
            return Err(Complaint::new(Exit::Usage, "Only an all-reduce of f32 is quantised.")
                .try_this("--op all-reduce --datatype f32".to_string()));
        }
        let overrides = &overrides.without_log()?;
        let overrides = &match &self.platform {
            Some(path) => overrides.with("platform", path.display().to_string()),
            None => overrides.clone(),
        };
        let file = overrides.settings()?.platform;
        let is_measured = file.is_some();
        let platform = forecast::platform(file.as_deref())?;
        let schedule = self.read_schedule()?;
        let exercises = self.exercises(schedule);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let rows = self.ranks.len() * self.transport.len() * exercises.len();
        let bar = ProgressBar::new(rows as u64);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}") {
            bar.set_style(style);
        }
        let mut figures: Vec<Figure> = Vec::new();
        for &ranks in &self.ranks {
            for &way in &self.transport {
                let overrides = overrides.with("transports", way.name());
                let formation = Formation {
                    count: ranks,
                    arena: way == Way::SharedMemory,
                    pin: !self.no_pin && ranks as usize <= cores,
                };
                let mut group = Ranks::spawn(formation, &overrides)?;
                let forecast = Forecast::new(&platform, way, ranks);
                for exercise in &exercises {
                    bar.set_message(format!("{} of {}", exercise.collective, Bytes(exercise.bytes)));
                    let mut figure = self.measure(&mut group, way, exercise, &forecast)?;
                    figure.predicted_for = platform.name.clone();
                    bar.inc(1);
                    if self.json {
                        bar.suspend(|| print_json(&figure))?;
                    }
                    figures.push(figure);
                }
            }
        }
        bar.finish_and_clear();
        if !self.json {
            out!("{}", table(&figures));
            if !is_measured {
                outln!();
                outln!(
                    "  Predictions are of the built-in platform `{}`, not of this machine, and algorithms were chosen by it.",
                    platform.name
                );
                outln!("  `weft doctor --platform here.toml` measures this one; then `--platform here.toml` here.");
            }
        }
        if let Some(path) = &self.plot {
            std::fs::write(path, plot::svg(&figures)).or_complain(Exit::Failed, || {
                format!("The plot could not be written to {}.", path.display())
            })?;
        }
        if let Some(path) = &self.report {
            std::fs::write(path, report(&figures, &platform.name, is_measured).html())
                .or_complain(Exit::Failed, || {
                    format!("The report could not be written to {}.", path.display())
                })?;
        }
        match figures.iter().find(|figure| !figure.ok) {
            Some(wrong) => Err(Complaint::new(
                Exit::Differs,
                format!("The result of {wrong} is wrong."),
            )),
            None => Ok(()),
        }
    }

    /// The schedule to run by, where there is one; then what it is for is what is measured.
    fn read_schedule(&mut self) -> Result<Option<String>, Complaint> {
        let Some(path) = &self.schedule else {
            return Ok(None);
        };
        let text = std::fs::read_to_string(path).or_complain(Exit::Usage, || {
            format!("The schedule {} cannot be read.", path.display())
        })?;
        let refused = || format!("{} is not to be run.", path.display());
        let problem = from_json(&text).or_complain(Exit::Failed, refused)?.problem;
        let kind = Kind::named(problem.collective.name());
        let name = problem.collective.name();
        let rooted = weft_plan::Collective::named(name, ROOT, Rank(1)) == Some(problem.collective);
        let in_place = problem.in_place || kind == Some(Kind::Broadcast);
        if kind.is_none() || !rooted || problem.ranks > RANKS_MAX {
            let sentence = format!(
                "A schedule for {:?} among {} is not measured here.",
                problem.collective, problem.ranks
            );
            return Err(Complaint::new(Exit::Usage, sentence));
        }
        self.op = vec![problem.collective.name().to_string()];
        self.ranks = vec![problem.ranks];
        self.in_place = in_place;
        Ok(Some(text))
    }

    /// Everything that one group of ranks is to do.
    fn exercises(&self, schedule: Option<String>) -> Vec<Exercise> {
        let mut all = Vec::new();
        let algorithms: Vec<Option<String>> = match self.algorithm.is_empty() {
            true => vec![None],
            false => self.algorithm.iter().map(|asked| Some(asked.to_string())).collect(),
        };
        for collective in &self.op {
            let nothing = [Bytes(0)];
            let sizes = if collective == "barrier" {
                &nothing
            } else {
                self.sizes.as_slice()
            };
            for datatype in &self.datatype {
                for &allocation in &self.buffers {
                    for algorithm in &algorithms {
                        all.extend(sizes.iter().map(|bytes| Exercise {
                            collective: collective.clone(),
                            bytes: bytes.0,
                            datatype: datatype.clone(),
                            algorithm: algorithm.clone(),
                            schedule: schedule.clone(),
                            deterministic: self.deterministic,
                            quantized: self.quantized.clone(),
                            allocation,
                            in_place: self.in_place,
                            fresh: self.fresh,
                        }));
                    }
                }
            }
        }
        all
    }

    fn measure(
        &self,
        group: &mut Ranks,
        way: Way,
        exercise: &Exercise,
        forecast: &Forecast,
    ) -> Result<Figure, Complaint> {
        let tried = group.attempt(exercise)?;
        let each = self.secs / self.repeats as f64;
        let slowest = tried.iter().map(|tried| tried.ns).max().unwrap_or(0).max(1);
        let iterations = (each * 1e9 / slowest as f64) as u64;
        let iterations = iterations.clamp(ITERATIONS_MIN, ITERATIONS_MAX / self.repeats);
        let measured = group.measure(iterations, self.repeats)?;
        let predicted = forecast.of(exercise, &tried[0].algorithm);
        Ok(Figure::new(way, exercise, &tried, iterations, &measured, predicted))
    }
}

const COLUMNS: [(&str, Align); 15] = [
    ("collective", Align::Left),
    ("ranks", Align::Right),
    ("transport", Align::Left),
    ("buffers", Align::Left),
    ("type", Align::Left),
    ("algorithm", Align::Left),
    ("size", Align::Right),
    ("median", Align::Right),
    ("least", Align::Right),
    ("p99", Align::Right),
    ("alg. GB/s", Align::Right),
    ("bus GB/s", Align::Right),
    ("predicted", Align::Right),
    ("× predicted", Align::Right),
    ("correct", Align::Left),
];

fn table(figures: &[Figure]) -> String {
    let mut table = Table::new(&COLUMNS);
    for figure in figures {
        table.row(figure.cells());
    }
    table.render()
}

/// Predictions beside measurements.
fn report(figures: &[Figure], platform: &str, is_measured: bool) -> Report {
    let pairs = figures.iter().filter(|figure| figure.us_med > 0.0).map(|figure| Pair {
        group: figure.series(),
        bytes: (figure.bytes > 0).then_some(figure.bytes),
        measured: figure.us_med,
        predicted: vec![figure.predicted_us],
    });
    let of = match is_measured {
        true => format!("the platform {platform}"),
        false => format!("the built-in platform {platform}, not of this machine"),
    };
    let note = format!(
        "Medians of this machine; predictions are those of `weft explain` for the algorithm that ran, of {of}."
    );
    Report {
        kind: "measured collectives".to_owned(),
        title: "Collectives on this machine".to_owned(),
        comparison: Some(Comparison::new(vec!["predicted".to_owned()], pairs.collect(), note)),
        tables: vec![Figures {
            title: "Figures".to_owned(),
            columns: COLUMNS.iter().map(|(name, _)| (*name).to_owned()).collect(),
            rows: figures.iter().map(Figure::cells).collect(),
        }],
        foot: format!("Weft {}.", env!("CARGO_PKG_VERSION")),
        ..Report::default()
    }
}
