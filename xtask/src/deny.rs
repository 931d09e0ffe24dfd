//! `cargo xtask deny`: the licences and sources of all dependencies, by `cargo deny`.
//!
//! Its database of known faults is on a server of its own, which not every machine reaches; so advisories are checked only where asked for.

use std::process::{Command, ExitCode};

use crate::command::{self, Error, cargo, root, works};

#[derive(clap::Args)]
pub struct Arguments {
    /// Look for known faults of the dependencies too: fetches the database of advisories.
    #[arg(long)]
    advisories: bool,
}

/// The version that deny.toml is written for.
const VERSION: &str = "~0.20";

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    check()?;
    if arguments.advisories {
        check_these(&["advisories"])?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Everything that needs no network but the registry's.
pub fn check() -> Result<(), Error> {
    check_these(&["bans", "licenses", "sources"])
}

fn check_these(what: &[&str]) -> Result<(), Error> {
    let tools = root().join("target/tools");
    let own = tools.join("bin/cargo-deny");
    let program = match (own.exists(), works("cargo-deny", &["--version"])) {
        (true, _) => own,
        (false, true) => "cargo-deny".into(),
        (false, false) => {
            // Without optimisation it is there in a third of the time, and has little to do.
            let install = [
                "install",
                "--locked",
                "--debug",
                "--quiet",
                "cargo-deny",
                "--version",
                VERSION,
                "--root",
            ];
            let built = root().join("target/tools/build");
            command::run(
                cargo()
                    .args(install)
                    .arg(&tools)
                    .env("CARGO_TARGET_DIR", built)
                    .env("CARGO_PROFILE_DEV_DEBUG", "0"),
            )?;
            own
        }
    };
    command::run(
        Command::new(program)
            .args(["--locked", "check"])
            .args(what)
            .current_dir(root()),
    )
}
