//! `cargo xtask door-test lmcache`: Weft as LMCache's second level. What is shown is written in Python (`crates/python/door/lmcache_tier.py`).

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

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let environment = Environment::make("target/door/lmcache")?;
    eprintln!("installing LMCache and all that it asks for, which is several gigabytes the first time");
    environment.pip_install(&[&format!("lmcache=={}", arguments.lmcache)])?;
    environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
    let mut script = environment.python();
    script.arg(root().join("crates/python/door/lmcache_tier.py"));
    for case in &arguments.only {
        script.args(["--only", case]);
    }
    super::told(&mut script)
}
