//! `cargo xtask door-test llm-d`: vLLM with Weft's connector under NIXL's name, behind the protocol of llm-d's routing sidecar. What is shown is written in Python
//! (`crates/python/door/llm_d.py`).

use std::path::PathBuf;
use std::process::ExitCode;

use crate::command::Error;
use crate::vllm_test::Vllm;

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
    /// Where the logs of the engines go; nowhere without.
    #[arg(long)]
    logs: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let vllm = Vllm::install_without_router()?;
    let mut script = vllm.plain_script("../door/llm_d.py");
    for case in &arguments.only {
        script.args(["--only", case]);
    }
    if let Some(logs) = &arguments.logs {
        script.arg("--logs").arg(logs);
    }
    super::told(&mut script)
}
