//! The project's own tasks: `cargo xtask <task>`. One file per task.

mod bare_test;
mod command;
mod compare;
mod deny;
mod docs;
mod door_test;
mod fuzz;
mod gpu_test;
mod kernels;
mod left_out;
mod loom;
mod mutants;
mod package;
mod python;
mod rdma_test;
mod s3_server;
mod screenshot;
mod seeds;
mod suite;
mod test;
mod tidy;
mod vllm_test;
mod vm;
mod wheel;

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
    /// Looks at what the house has agreed on: names, lengths, reasons of unsafe code, what is told and what is used.
    Tidy(tidy::Arguments),
    /// Runs the README's commands on a bare Debian that is made for it: from a clean clone, with nothing but Rust, a compiler and Python.
    BareTest(bare_test::Arguments),
    /// Runs the models of code that threads share, in every order of their steps.
    Loom(loom::Arguments),
    /// Fuzzes decoders, each for a while.
    Fuzz(fuzz::Arguments),
    /// Checks the licences and sources of all dependencies.
    Deny(deny::Arguments),
    /// Builds the Python wheel for many Linux systems, and looks at it from a fresh environment.
    Wheel(wheel::Arguments),
    /// Builds the Debian package, and installs, uses and removes it on a bare Debian.
    Package(package::Arguments),
    /// Runs simulated worlds, each made from a seed, under every fault there is, and checks what they promise.
    Seeds(seeds::Arguments),
    /// Makes mistakes on purpose, one at a time in a copy of the tree, and sees that something notices each.
    Mutants(mutants::Arguments),
    /// Runs Weft and its peers in turn on the same workload and compares them.
    Compare(compare::Arguments),
    /// Runs the tests that need an RDMA device, in virtual machines that have one, and installs what it needs.
    RdmaTest(rdma_test::Arguments),
    /// Builds Garage, a server of S3, keeps it where the tests of objects look for it, and runs it.
    S3Server(s3_server::Arguments),
    /// Makes a bundle of the tests and benchmarks that need a GPU, and runs it where there is one.
    GpuTest(gpu_test::Arguments),
    /// Looks whether the kernels that are shipped are what their sources compile to, or compiles them; installs the compiler.
    Kernels(kernels::Arguments),
    /// Takes a picture of a scenario's report, and installs Chromium where it is missing.
    Screenshot(screenshot::Arguments),
    /// Runs vLLM's prefill and decode apart, over Weft, against a single instance, and installs what it needs.
    VllmTest(vllm_test::Arguments),
    /// Runs Weft inside of somebody else's stack, end to end, and installs what it needs.
    DoorTest(door_test::Arguments),
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
        Task::Tidy(arguments) => tidy::run(arguments)?,
        Task::BareTest(arguments) => bare_test::run(arguments)?,
        Task::Loom(arguments) => loom::run(arguments)?,
        Task::Fuzz(arguments) => fuzz::run(arguments)?,
        Task::Deny(arguments) => deny::run(arguments)?,
        Task::Wheel(arguments) => wheel::run(arguments)?,
        Task::Package(arguments) => package::run(arguments)?,
        Task::Seeds(arguments) => seeds::run(arguments),
        Task::Mutants(arguments) => mutants::run(arguments)?,
        Task::Compare(arguments) => compare::run(arguments)?,
        Task::RdmaTest(arguments) => rdma_test::run(arguments)?,
        Task::S3Server(arguments) => s3_server::run(arguments)?,
        Task::VllmTest(arguments) => vllm_test::run(arguments)?,
        Task::GpuTest(arguments) => gpu_test::run(arguments)?,
        Task::Kernels(arguments) => kernels::run(arguments)?,
        Task::Screenshot(arguments) => screenshot::take(arguments)?,
        Task::DoorTest(arguments) => door_test::run(arguments)?,
        Task::Docs(arguments) => docs::build(arguments)?,
        Task::RdmaMeasure(arguments) => rdma_test::measure(arguments)?,
    })
}
