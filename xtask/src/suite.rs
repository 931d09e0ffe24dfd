//! Steps, one after the other, and what became of each.

use std::process::ExitCode;
use std::time::Instant;

/// The steps so far. One that fails does not keep the others from running: a report of everything is worth more.
#[derive(Default)]
pub struct Suite {
    steps: Vec<Step>,
}

struct Step {
    name: String,
    seconds: f64,
    outcome: Result<(), Box<dyn std::error::Error>>,
}

impl Suite {
    /// Does a step, and says whether it went well.
    pub fn step<E: std::error::Error + 'static>(
        &mut self,
        name: impl Into<String>,
        work: impl FnOnce() -> Result<(), E>,
    ) -> bool {
        let name = name.into();
        eprintln!("== {name}");
        let start = Instant::now();
        let outcome = work();
        let done = outcome.is_ok();
        self.steps.push(Step {
            name,
            seconds: start.elapsed().as_secs_f64(),
            outcome: outcome.map_err(Into::into),
        });
        done
    }

    /// Whether a step of this name was done and went well.
    pub fn passed(&self, name: &str) -> bool {
        self.steps.iter().any(|step| step.name == name && step.outcome.is_ok())
    }

    /// Prints what became of each step.
    pub fn report(&self) -> ExitCode {
        println!();
        for Step { name, seconds, outcome } in &self.steps {
            match outcome {
                Ok(()) => println!("ok      {name}  ({seconds:.1} s)"),
                Err(error) => println!("FAILED  {name}  ({seconds:.1} s): {error}"),
            }
        }
        let total: f64 = self.steps.iter().map(|step| step.seconds).sum();
        let failed = self.steps.iter().filter(|step| step.outcome.is_err()).count();
        println!(
            "{} of {} steps passed in {:.0} s",
            self.steps.len() - failed,
            self.steps.len(),
            total
        );
        if failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}
