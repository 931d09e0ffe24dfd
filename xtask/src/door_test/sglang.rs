//! `cargo xtask door-test sglang`: SGLang's prefill and decode apart over Weft, on processors, by its back end for NIXL and by Weft's own name. What is shown is written in
//! Python (`crates/python/door/sglang_pd.py`).

use std::path::PathBuf;
use std::process::ExitCode;

use crate::command::{self, Error, root};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// The release of SGLang.
    #[arg(long, default_value = "0.5.23")]
    sglang: String,
    /// Only this way, `nixl` or `weft`; both without.
    #[arg(long)]
    by: Option<String>,
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
    /// Where the logs of the servers go; nowhere without.
    #[arg(long)]
    logs: Option<PathBuf>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let environment = Environment::make("target/door/sglang")?;
    eprintln!("installing SGLang and all that it asks for, which is several gigabytes the first time");
    environment.pip_install(&[&format!("sglang=={}", arguments.sglang)])?;
    // Its kernels are for CUDA, and do not load without it; beside the script there is something that stands where they are imported from.
    let mut kernels = environment.python();
    kernels.args([
        "-m",
        "pip",
        "uninstall",
        "--quiet",
        "--yes",
        "sgl-kernel",
        "sglang-kernel",
    ]);
    command::run(&mut kernels)?;
    environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
    let mut script = environment.python();
    script.arg(root().join("crates/python/door/sglang_pd.py"));
    if let Some(by) = &arguments.by {
        script.args(["--by", by]);
    }
    for case in &arguments.only {
        script.args(["--only", case]);
    }
    if let Some(logs) = &arguments.logs {
        script.arg("--logs").arg(logs);
    }
    super::told(&mut script)
}
