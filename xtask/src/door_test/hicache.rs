//! `cargo xtask door-test hicache`: SGLang's HiCache storage on a store: its own classes, without an engine (`crates/python/tests/test_sglang_storage.py`).

use std::process::ExitCode;

use crate::command::{self, Error, root};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// The release of SGLang.
    #[arg(long, default_value = "0.5.23")]
    sglang: String,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let environment = Environment::make("target/door/sglang")?;
    eprintln!("installing SGLang and all that it asks for, which is several gigabytes the first time");
    environment.pip_install(&[&format!("sglang=={}", arguments.sglang), "pytest"])?;
    environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
    let mut tests = environment.python();
    tests
        .args(["-m", "pytest", "--quiet"])
        .arg(root().join("crates/python/tests/test_sglang_storage.py"))
        .env("WEFT_REQUIRE", "sglang");
    match command::run(&mut tests) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(Error::Failed { .. }) => Ok(ExitCode::FAILURE),
        Err(other) => Err(other),
    }
}
