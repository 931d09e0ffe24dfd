//! `cargo xtask door-test lmcache-peers`: blocks from one LMCache process to another. What is shown is written in Python (`crates/python/door/lmcache_peers.py`).

use std::process::ExitCode;

use crate::command::{Error, root};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// The release of LMCache.
    #[arg(long, default_value = "0.5.6")]
    lmcache: String,
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
}

/// What its channels import. LMCache asks for much more, some of which fits no processor alone.
const NEEDED: &[&str] = &[
    "aiohttp",
    "cachetools",
    "msgspec",
    "numpy<=2.2.6",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq",
    "requests",
    "sortedcontainers",
    "torch",
];

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let environment = Environment::make("target/door/lmcache-peers")?;
    eprintln!("installing LMCache and torch, which is several gigabytes the first time");
    environment.pip_install(NEEDED)?;
    environment.pip_install(&["--no-deps", &format!("lmcache=={}", arguments.lmcache)])?;
    environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
    let mut script = environment.python();
    script.arg(root().join("crates/python/door/lmcache_peers.py"));
    for case in &arguments.only {
        script.args(["--only", case]);
    }
    super::told(&mut script)
}
