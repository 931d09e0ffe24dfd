//! `cargo xtask vllm-test`: vLLM's prefill, decode and the router as real processes, from a fresh Debian with Rust and Python.
//!
//! vLLM for CPUs goes into an environment of its own. What is shown is written in Python, beside the connector; here it is only brought about.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::command::{self, Error, Needed, cargo, install_missing, root};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
    /// Where the logs of the instances go; nowhere without.
    #[arg(long)]
    logs: Option<PathBuf>,
}

/// What the tests need beside Rust and Python.
const NEEDED: &[Needed] = &[
    (&["etcd", "--version"], "etcd-server"),
    (&["python3", "-c", "import ensurepip, venv"], "python3-venv"),
    (&["cc", "--version"], "gcc"),
    (
        &["python3", "-c", "import ctypes; ctypes.CDLL('libnuma.so.1')"],
        "libnuma1",
    ),
];

/// Every package, at the version that this was written for.
pub const PINNED: &str = "crates/python/vllm_tests/requirements.txt";

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let vllm = Vllm::install()?;
    let mut command = vllm.script("run.py", arguments.logs.as_deref());
    for case in &arguments.only {
        command.args(["--only", case]);
    }
    command::run(&mut command)?;
    Ok(ExitCode::SUCCESS)
}

/// An environment with vLLM and Weft, and the `weft` command.
pub struct Vllm {
    environment: Environment,
}

impl Vllm {
    pub fn install() -> Result<Vllm, Error> {
        let vllm = Vllm::install_without_router()?;
        command::run(cargo().args(["build", "--release", "--quiet", "--package", "weft-cli"]))?;
        Ok(vllm)
    }

    /// For scripts that route by themselves.
    pub fn install_without_router() -> Result<Vllm, Error> {
        install_missing(NEEDED)?;
        let environment = Environment::make("target/vllm")?;
        eprintln!("installing vLLM, which is several gigabytes the first time");
        // The list is complete, and what vLLM asks of torch cannot be had from PyPI: nothing is to be resolved.
        environment.pip_install(&["--no-deps", "--requirement", PINNED])?;
        environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
        Ok(Vllm { environment })
    }

    /// Installs more than the tests need.
    pub fn add(&self, packages: &[&str]) -> Result<(), Error> {
        self.environment.pip_install(&[&["--no-deps"], packages].concat())
    }

    /// A program that a package has brought.
    pub fn installed(&self, name: &str) -> Command {
        self.environment.installed(name)
    }

    /// One of the scripts beside the connector.
    pub fn plain_script(&self, name: &str) -> Command {
        let mut command = self.environment.python();
        command.arg(root().join("crates/python/vllm_tests").join(name));
        command
    }

    /// The same with the command, whose router it starts.
    pub fn script(&self, name: &str, logs: Option<&Path>) -> Command {
        let mut command = self.plain_script(name);
        command.arg("--weft").arg(root().join("target/release/weft"));
        if let Some(logs) = logs {
            command.arg("--logs").arg(logs);
        }
        command
    }
}
