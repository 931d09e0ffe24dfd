//! `cargo xtask door-test NAME`: Weft inside of somebody else's stack, as it is installed from PyPI, end to end. One file a stack.
//!
//! These installs are large, so none of it runs in the suite; each makes an environment of its own under `target/door`.

mod nixl;

use std::process::ExitCode;

use crate::command::Error;

#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    door: Door,
}

#[derive(clap::Subcommand)]
enum Door {
    /// Weft as a back end of NIXL: the interface, NIXL's own tests, faults beside UCX, speed beside UCX.
    Nixl(nixl::Arguments),
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    match &arguments.door {
        Door::Nixl(arguments) => nixl::run(arguments),
    }
}
