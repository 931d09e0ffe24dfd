//! The `weft` command: one file per verb. As a library, so that one wheel holds it and the Python package, and the code they share once.
#![forbid(unsafe_code)]
// They panic where nobody reads: `out.rs` has what verbs use.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

#[macro_use]
mod out;

mod client;
mod complaint;
mod courier;
mod desk;
mod ends;
mod exercise;
pub mod harness;
mod pair;
mod partner;
mod pattern;
mod ping_pong;
mod plot;
mod predict;
mod program;
mod python;
mod ranks;
mod report;
mod resume;
mod router;
mod system;
mod table;
mod tree;
mod verbs;
mod worker;

use std::ffi::OsString;

use clap::{Parser, Subcommand};

use complaint::{Complaint, EXIT_CODES, Exit};

/// Moves memory between processes and machines, and shows how fast.
#[derive(Debug, Parser)]
#[command(name = "weft", version, after_help = EXIT_CODES, arg_required_else_help = true, max_term_width = 120)]
struct Command {
    /// Set a setting for this run, as in `--set tcp.connections=2`. `weft doctor` lists them all
    #[arg(long = "set", value_name = "KEY=VALUE", global = true)]
    settings: Vec<String>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Demo(verbs::demo::Demo),
    Doctor(verbs::doctor::Doctor),
    #[command(subcommand)]
    Bench(verbs::bench::Bench),
    Explain(verbs::explain::Explain),
    #[command(subcommand)]
    Sim(verbs::sim::Sim),
    PlanServing(verbs::plan_serving::PlanServing),
    Validate(verbs::validate::Validate),
    PlanTraining(verbs::plan_training::PlanTraining),
    Serve(verbs::serve::Serve),
    Copy(verbs::copy::Copy),
    List(verbs::list::List),
    Show(verbs::show::Show),
    #[command(subcommand)]
    Store(verbs::store::Store),
    Nixl(verbs::nixl::Nixl),
    Completions(verbs::completions::Completions),
    Man(verbs::man::Man),
    #[command(hide = true)]
    Partner(verbs::partner::Partner),
    #[command(hide = true)]
    Rank(verbs::rank::Rank),
}

/// Does what a command line asks for, the name of the program first, and returns the exit code. `again` are the words that start the
/// command once more: some verbs need several processes.
pub fn run(arguments: impl IntoIterator<Item = OsString>, again: Vec<OsString>) -> u8 {
    program::is_started_by(again);
    let command = match Command::try_parse_from(arguments) {
        Ok(command) => command,
        // A mistake, or a wish for help or the version. Where it cannot be told, nobody reads it.
        Err(told) => {
            let _ = told.print();
            return u8::try_from(told.exit_code()).unwrap_or(Exit::Usage as u8);
        }
    };
    match obey(command).and_then(|()| out::flush()) {
        Ok(()) => 0,
        Err(complaint) => {
            if !complaint.is_quiet() {
                note!("{complaint}");
            }
            complaint.exit() as u8
        }
    }
}

fn obey(command: Command) -> Result<(), Complaint> {
    let settings = ends::Overrides::parse(&command.settings)?;
    match command.verb {
        Verb::Demo(verb) => verb.run(&settings),
        Verb::Doctor(verb) => verb.run(&settings),
        Verb::Bench(verb) => verb.run(&settings),
        Verb::Explain(verb) => verb.run(),
        Verb::Sim(verb) => verb.run(),
        Verb::PlanServing(verb) => verb.run(),
        Verb::Validate(verb) => verb.run(),
        Verb::PlanTraining(verb) => verb.run(),
        Verb::Serve(verb) => verb.run(&settings),
        Verb::Copy(verb) => verb.run(&settings),
        Verb::List(verb) => verb.run(&settings),
        Verb::Show(verb) => verb.run(),
        Verb::Store(verb) => verb.run(),
        Verb::Nixl(verb) => verb.run(),
        Verb::Completions(verb) => verb.run(),
        Verb::Man(verb) => verb.run(),
        Verb::Partner(verb) => verb.run(&settings),
        Verb::Rank(verb) => verb.run(&settings),
    }
}
