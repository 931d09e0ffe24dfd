//! `cargo xtask door-test vllm-offload`: Weft as a tier of vLLM's OffloadingConnector. What is shown is written in Python (`crates/python/vllm_tests/offload.py`).

use std::path::PathBuf;
use std::process::ExitCode;

use crate::command::{self, Error};
use crate::vllm_test::Vllm;

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
    /// Where the logs of the instances go; nowhere without.
    #[arg(long)]
    logs: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let vllm = Vllm::install_without_router()?;
    let mut script = vllm.plain_script("offload.py");
    for case in &arguments.only {
        script.args(["--only", case]);
    }
    if let Some(logs) = &arguments.logs {
        script.arg("--logs").arg(logs);
    }
    match command::run(&mut script) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(Error::Failed { .. }) => Ok(ExitCode::FAILURE),
        Err(other) => Err(other),
    }
}
