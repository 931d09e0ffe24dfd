//! The project's own tasks: `cargo xtask <task>`. One file per task.

mod command;
mod compare;
mod docs;
mod python;
mod rdma_test;
mod screenshot;
mod seeds;
mod test;
mod vllm_test;
mod vm;

use std::error::Error;
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
    /// Runs the tests that need an RDMA device, in virtual machines that have one, and installs what it needs.
    RdmaTest(rdma_test::Arguments),
    /// Takes a picture of a scenario's report, and installs Chromium where it is missing.
    Screenshot(screenshot::Arguments),
    /// Runs vLLM's prefill and decode apart, over Weft, against a single instance, and installs what it needs.
    VllmTest(vllm_test::Arguments),
    /// Builds the pages of the repository as a site, with the API, and checks their links; installs mdbook where it is missing.
    Docs(docs::Arguments),
    /// Makes the table beside perftest; inside one of those machines.
    #[command(hide = true)]
    RdmaMeasure(rdma_test::MeasureArguments),
}

fn main() -> ExitCode {
    match run(&Arguments::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: &Task) -> Result<ExitCode, Box<dyn Error>> {
    Ok(match task {
        Task::Test(arguments) => test::run(arguments)?,
        Task::Seeds(arguments) => seeds::run(arguments),
        Task::Compare(arguments) => compare::run(arguments)?,
        Task::RdmaTest(arguments) => rdma_test::run(arguments)?,
        Task::VllmTest(arguments) => vllm_test::run(arguments)?,
        Task::Screenshot(arguments) => screenshot::take(arguments)?,
        Task::Docs(arguments) => docs::build(arguments)?,
        Task::RdmaMeasure(arguments) => rdma_test::measure(arguments)?,
    })
}
