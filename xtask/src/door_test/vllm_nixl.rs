//! `cargo xtask door-test vllm-nixl`: vLLM's own NixlConnector over Weft, by `weft.nixl` where there is no NIXL, and through NIXL with Weft as its back end. What is
//! shown is written in Python, beside the connector (`crates/python/vllm_tests/through_nixl.py`).

use std::path::PathBuf;
use std::process::ExitCode;

use super::nixl::plugin_directory_by;
use crate::command::{self, Error, root};
use crate::vllm_test::Vllm;

#[derive(clap::Args)]
pub struct Arguments {
    /// Only this way; both without.
    #[arg(long, value_enum)]
    by: Option<By>,
    /// Only these cases; all of them without.
    #[arg(long)]
    only: Vec<String>,
    /// Where the logs of the instances go; nowhere without.
    #[arg(long)]
    logs: Option<PathBuf>,
    /// The release of NIXL.
    #[arg(long, default_value = "1.5.1")]
    nixl: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum By {
    /// Weft's module in NIXL's place.
    #[value(name = "weft.nixl")]
    StandIn,
    /// NIXL, with Weft as its back end.
    Nixl,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let vllm = Vllm::install_without_router()?;
    let mut all_well = true;
    for (by, name) in [(By::StandIn, "weft.nixl"), (By::Nixl, "nixl")] {
        if arguments.by.is_some_and(|only| only != by) {
            continue;
        }
        println!("vLLM's NixlConnector by {name}:");
        let mut script = vllm.plain_script("through_nixl.py");
        script.args(["--by", name]);
        if by == By::Nixl {
            // Apart from vLLM's environment, so that the other way has none. What it asks for is there: NumPy, and torch, which is of CUDA 13.
            let apart = root().join("target/door/vllm-nixl");
            let (nixl, library) = (
                format!("nixl=={}", arguments.nixl),
                format!("nixl-cu13=={}", arguments.nixl),
            );
            let apart_name = apart.to_string_lossy();
            vllm.add(&["--upgrade", "--target", &apart_name, &nixl, &library])?;
            let mut weft = vllm.installed("weft");
            let directory = plugin_directory_by(weft.arg("nixl").env("PYTHONPATH", &apart))?;
            script.env("PYTHONPATH", &apart).env("NIXL_PLUGIN_DIR", directory);
        }
        for case in &arguments.only {
            script.args(["--only", case]);
        }
        if let Some(logs) = &arguments.logs {
            script.arg("--logs").arg(logs);
        }
        match command::run(&mut script) {
            Ok(()) => {}
            Err(Error::Failed { .. }) => all_well = false,
            Err(other) => return Err(other),
        }
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
