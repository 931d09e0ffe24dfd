//! `cargo xtask compare vllm`: KV hand-offs by vLLM's NixlConnector and by ours, between instances that are alike, in turn.

use std::path::PathBuf;
use std::process::ExitCode;

use super::setup::NIXL;
use crate::command::{self, Error};
use crate::vllm_test::Vllm;

#[derive(clap::Args)]
pub struct Arguments {
    /// How many prompts a round.
    #[arg(long, default_value_t = 20)]
    prompts: u32,
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Where the logs of the instances go; nowhere without.
    #[arg(long)]
    logs: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let vllm = Vllm::install()?;
    vllm.add(&[NIXL, &NIXL.replace("nixl", "nixl-cu13")])?;
    let mut command = vllm.script("compare.py", arguments.logs.as_deref());
    command.args(["--prompts", &arguments.prompts.to_string()]);
    command.args(["--rounds", &arguments.rounds.to_string()]);
    command::run(&mut command)?;
    Ok(ExitCode::SUCCESS)
}
