//! `cargo xtask door-test fsdp|megatron|deepspeed`: stacks that train on many ranks, on processors, over `weft.torch`, beside Gloo. What is shown is written in Python
//! (`crates/python/door/train_*.py`, over `training.py`).

use std::process::ExitCode;

use crate::command::{self, Error, root};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Fsdp {
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
pub struct Megatron {
    /// The release of Megatron-Core.
    #[arg(long, default_value = "0.16.1")]
    megatron: String,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
pub struct Deepspeed {
    /// The release of DeepSpeed.
    #[arg(long, default_value = "0.19.8")]
    deepspeed: String,
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Common {
    /// The release of PyTorch.
    #[arg(long, default_value = "2.15.0")]
    torch: String,
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
}

impl Fsdp {
    pub fn run(&self) -> Result<ExitCode, Error> {
        self.common.run("train_fsdp.py", &[])
    }
}

impl Megatron {
    pub fn run(&self) -> Result<ExitCode, Error> {
        let megatron = format!("megatron-core=={}", self.megatron);
        self.common.run("train_megatron.py", &[&megatron])
    }
}

impl Deepspeed {
    pub fn run(&self) -> Result<ExitCode, Error> {
        let deepspeed = format!("deepspeed=={}", self.deepspeed);
        // It compiles a library of its own for processors, in minutes the first time, and looks for ninja.
        self.common
            .run("train_deepspeed.py", &[&deepspeed, "ninja", "setuptools"])
    }
}

impl Common {
    /// One environment for all of these: most of each is torch.
    fn run(&self, script: &str, packages: &[&str]) -> Result<ExitCode, Error> {
        let environment = Environment::make("target/door/training")?;
        eprintln!("installing torch and what trains with it, which is several gigabytes the first time");
        let torch = format!("torch=={}", self.torch);
        let wanted = [&[torch.as_str(), "numpy"], packages].concat();
        environment.pip_install(&wanted)?;
        environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
        let mut python = environment.python();
        python
            .env("PATH", environment.search_path())
            .arg(root().join("crates/python/door").join(script));
        for case in &self.only {
            python.args(["--only", case]);
        }
        match command::run(&mut python) {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(Error::Failed { .. }) => Ok(ExitCode::FAILURE),
            Err(other) => Err(other),
        }
    }
}
