//! `cargo xtask door-test jax`: arrays of JAX's in transfers, and an all-reduce in its compiled programs, on processors. What is shown is written in Python
//! (`crates/python/door/jax_arrays.py`).

use std::process::ExitCode;

use crate::command::{self, Error, cargo, root};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// The release of JAX.
    #[arg(long, default_value = "0.10.2")]
    jax: String,
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    command::run(cargo().args(["build", "--package", "weft-c"]))?;
    let environment = Environment::make("target/door/jax")?;
    environment.pip_install(&[&format!("jax=={}", arguments.jax), "numpy"])?;
    environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
    let mut script = environment.python();
    script
        .arg(root().join("crates/python/door/jax_arrays.py"))
        .arg(root().join("target/debug"));
    for case in &arguments.only {
        script.args(["--only", case]);
    }
    match command::run(&mut script) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(Error::Failed { .. }) => Ok(ExitCode::FAILURE),
        Err(other) => Err(other),
    }
}
