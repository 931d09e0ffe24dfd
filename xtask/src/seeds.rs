//! `cargo xtask seeds`: whole simulated worlds by number, over all cores, and a summary of what they went through.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use weft_sim::Tally;
use weft_sim::seeds::{self, Detail, Outcome};

/// Lines of the trace that are shown before a violation, unless all are asked for.
const LINES_SHOWN: usize = 60;
/// Seeds that are named of those that failed.
const FAILURES_SHOWN: usize = 20;

#[derive(clap::Args)]
pub struct Arguments {
    /// How many seeds to run.
    #[arg(default_value_t = 1000)]
    count: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Print everything that happened in the first seed that fails, or in the only one.
    #[arg(long)]
    trace: bool,
    /// Begin no further seed once one has failed. Seeds begin in order, so the first that fails is the same as without.
    #[arg(long)]
    fail_fast: bool,
}

pub fn run(arguments: &Arguments) -> ExitCode {
    let started = Instant::now();
    let mut totals = Totals::default();
    // A panic in a world is a violation of that seed, and is reported with it.
    std::panic::set_hook(Box::new(|_| {}));
    for outcome in play(arguments) {
        totals.add(outcome);
    }
    println!("{}", totals.table(started.elapsed().as_secs_f64()));
    totals.failures.sort_by_key(|(seed, _)| *seed);
    for (seed, violation) in totals.failures.iter().take(FAILURES_SHOWN) {
        println!("seed {seed}: {violation}\n    replay: cargo xtask seeds 1 --from {seed} --trace");
    }
    if totals.failures.len() > FAILURES_SHOWN {
        println!("… and {} more", totals.failures.len() - FAILURES_SHOWN);
    }
    let first = totals.failures.first().map(|(seed, _)| *seed);
    if let Some(seed) = first.or((arguments.trace && arguments.count == 1).then_some(arguments.from)) {
        let replay = seeds::run(seed, Detail::Lines);
        let lines: Vec<&str> = replay.trace.lines().collect();
        let skipped = if arguments.trace {
            0
        } else {
            lines.len().saturating_sub(LINES_SHOWN)
        };
        println!("\nThe history of seed {seed} (hash {:016x}):", replay.trace_hash);
        if skipped > 0 {
            println!("… {skipped} lines before; --trace shows them");
        }
        lines[skipped..].iter().for_each(|line| println!("{line}"));
        if let Some(violation) = replay.violation {
            println!("violated: {violation}");
        }
    }
    if totals.failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Plays the seeds over all cores. Each world is one thread's own, so the order makes no difference to any of them.
fn play(arguments: &Arguments) -> Vec<Outcome> {
    let bar = ProgressBar::new(arguments.count).with_style(
        ProgressStyle::with_template("{wide_bar} {pos}/{len} seeds, {msg}, {eta} left").expect("a valid template"),
    );
    bar.set_message("no violation");
    let end = arguments.from.saturating_add(arguments.count);
    let next = AtomicU64::new(arguments.from);
    let (outcomes, failed) = (Mutex::new(Vec::new()), AtomicU64::new(0));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || arguments.fail_fast && failed.load(Ordering::Relaxed) > 0 {
                        return;
                    }
                    let outcome = seeds::run(seed, Detail::HashOnly);
                    if outcome.violation.is_some() {
                        let failed = failed.fetch_add(1, Ordering::Relaxed) + 1;
                        bar.set_message(format!("{failed} VIOLATED"));
                    }
                    outcomes
                        .lock()
                        .expect("no thread panics while it holds the list")
                        .push(outcome);
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    outcomes.into_inner().expect("no thread panics while it holds the list")
}

/// What all worlds went through together.
#[derive(Default)]
struct Totals {
    seeds: u64,
    steps: u64,
    steps_max: u64,
    notifications: u64,
    tally: Tally,
    ends: BTreeMap<String, u64>,
    failures: Vec<(u64, String)>,
}

impl Totals {
    fn add(&mut self, outcome: Outcome) {
        self.seeds += 1;
        self.steps += outcome.steps;
        self.steps_max = self.steps_max.max(outcome.steps);
        self.notifications += outcome.notifications;
        self.tally.add(&outcome.tally);
        for (end, count) in outcome.ends {
            *self.ends.entry(end).or_default() += count;
        }
        self.failures.extend(outcome.violation.map(|v| (outcome.seed, v)));
    }

    fn table(&self, seconds: f64) -> String {
        let mut lines = vec![format!(
            "{} seeds in {seconds:.1} s: {} events, at most {} in one world, {} notifications, {} violated",
            self.seeds,
            self.steps,
            self.steps_max,
            self.notifications,
            self.failures.len()
        )];
        lines.push("\nfaults injected".to_owned());
        lines.extend(self.tally.rows().map(|(name, count)| format!("{count:>10}  {name}")));
        lines.push("\ntransfers ended".to_owned());
        lines.extend(self.ends.iter().map(|(end, count)| format!("{count:>10}  {end}")));
        lines.join("\n") + "\n"
    }
}
