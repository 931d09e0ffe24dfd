//! The project's own tasks: `cargo xtask <task>`. One file per task.

mod command;
mod compare;
mod python;
mod seeds;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own tasks")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs the whole suite, Python included, and installs what it needs.
    Test(test::Arguments),
    /// Runs simulated worlds, each made from a seed, under every fault there is, and checks what they promise.
    Seeds(seeds::Arguments),
    /// Runs Weft and its peers in turn on the same workload and compares them.
    Compare(compare::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().task {
        Task::Test(arguments) => test::run(&arguments),
        Task::Seeds(arguments) => Ok(seeds::run(&arguments)),
        Task::Compare(arguments) => compare::run(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
