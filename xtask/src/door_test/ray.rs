//! `cargo xtask door-test ray`: actors of Ray's that hand tensors to each other over Weft. What is shown is written in Python (`crates/python/door/ray_tensors.py`).

use std::process::ExitCode;

use crate::command::{Error, root};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// The release of Ray.
    #[arg(long, default_value = "2.60.0")]
    ray: String,
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let environment = Environment::make("target/door/ray")?;
    eprintln!("installing Ray and torch, which is several gigabytes the first time");
    environment.pip_install(&[&format!("ray=={}", arguments.ray), "torch", "numpy"])?;
    environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
    let mut script = environment.python();
    script.arg(root().join("crates/python/door/ray_tensors.py"));
    for case in &arguments.only {
        script.args(["--only", case]);
    }
    super::told(&mut script)
}
