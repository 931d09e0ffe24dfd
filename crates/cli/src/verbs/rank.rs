//! `weft rank`: one of the processes that `weft bench collective` starts. Not for people.

use std::time::Instant;

use clap::Args;
use weft::{Communicator, JoinOptions};
use weft_plan::Rank as Number;

use crate::complaint::{Complaint, Exit};
use crate::ends::{self, Overrides};
use crate::exercise::Ready;
use crate::ranks::{Answer, Exercise, Measured, Order, Tried};
use crate::verbs::cpu_time_ns;
use crate::worker;

/// Calls whose time is looked at to find out how many to make.
const TRIALS: u32 = 5;

#[derive(Debug, Args)]
pub struct Rank {
    #[arg(long)]
    rank: u32,
    #[arg(long)]
    ranks: u32,
    #[arg(long)]
    no_arena: bool,
    #[arg(long)]
    core: Option<usize>,
}

impl Rank {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        if let Some(core) = self.core {
            // Before the agent starts, so that its threads stay there too. Where it is not allowed, ranks move.
            let _ = weft_fabric::cpu::pin(core);
        }
        let agent = overrides.start(&format!("rank-{}", self.rank))?;
        let options = JoinOptions {
            arena: !self.no_arena,
            ..JoinOptions::new("bench", Number(self.rank), self.ranks)
        };
        let group = Communicator::join(&agent, options)
            .map_err(|error| ends::explain(&error, &format!("Rank {} could not join the group.", self.rank)))?;
        worker::say(&Answer::Ready)?;
        let mut ready = None;
        worker::serve(|order| {
            let answer = match order {
                Order::Try(exercise) => attempt(&group, &exercise, &mut ready).map(Answer::Tried),
                Order::Measure { iterations, repeats } => match &ready {
                    Some(ready) => measure(&group, ready, iterations, repeats).map(Answer::Measured),
                    None => Err(Complaint::new(Exit::Usage, "There is nothing to measure.")),
                },
            };
            Ok(answer.unwrap_or_else(|complaint| Answer::Failed {
                reason: complaint.text(),
            }))
        })
    }
}

fn attempt(group: &Communicator, exercise: &Exercise, ready: &mut Option<Ready>) -> Result<Tried, Complaint> {
    // The old buffers go before the new ones come.
    *ready = None;
    let made = Ready::new(group, exercise)?;
    let algorithm = made.algorithm()?;
    run(&made)?;
    let correct = made.is_correct();
    let mut ns = u64::MAX;
    for _ in 0..TRIALS {
        barrier(group)?;
        let start = Instant::now();
        run(&made)?;
        ns = ns.min(start.elapsed().as_nanos() as u64);
    }
    *ready = Some(made);
    Ok(Tried { correct, algorithm, ns })
}

fn measure(group: &Communicator, ready: &Ready, iterations: u64, repeats: u64) -> Result<Measured, Complaint> {
    let mut times = Vec::with_capacity((iterations * repeats) as usize);
    let mut mean_ns = Vec::new();
    let (cpu, begin) = (cpu_time_ns(), Instant::now());
    for _ in 0..repeats {
        barrier(group)?;
        let start = Instant::now();
        let mut last = start;
        for _ in 0..iterations {
            run(ready)?;
            let now = Instant::now();
            times.push(now.duration_since(last).as_nanos() as u64);
            last = now;
        }
        mean_ns.push(last.duration_since(start).as_nanos() as f64 / iterations.max(1) as f64);
    }
    times.sort_unstable();
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(0);
    Ok(Measured {
        mean_ns,
        p50_ns: at(0.5),
        p99_ns: at(0.99),
        wall_ns: begin.elapsed().as_nanos() as u64,
        cpu_ns: cpu_time_ns() - cpu,
    })
}

fn run(ready: &Ready) -> Result<(), Complaint> {
    let done = ready.run();
    done.map_err(|error| ends::explain(&error, "The collective failed."))
}

fn barrier(group: &Communicator) -> Result<(), Complaint> {
    let done = group.barrier().run();
    done.map_err(|error| ends::explain(&error, "The barrier failed."))
}
