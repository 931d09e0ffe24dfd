//! `cargo xtask loom`: the models of code that threads share, in every order of their steps.
//!
//! A model is a test in a module called `model`, compiled only under `--cfg loom`. Every room whose manifest knows loom is asked for its models.

use std::fs;
use std::process::ExitCode;

use crate::command::{Error, cargo, output_so_far, root};

#[derive(clap::Args)]
pub struct Arguments {
    /// Only those whose name contains one of these.
    names: Vec<String>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    run_some(&arguments.names)?;
    Ok(ExitCode::SUCCESS)
}

pub fn run_models() -> Result<(), Error> {
    run_some(&[])
}

fn run_some(names: &[String]) -> Result<(), Error> {
    let rooms = root().join("crates");
    let failed = |source| Error::File {
        path: rooms.clone(),
        source,
    };
    let mut found = Vec::new();
    for room in fs::read_dir(&rooms).map_err(failed)? {
        let room = room.map_err(failed)?;
        let manifest = fs::read_to_string(room.path().join("Cargo.toml")).unwrap_or_default();
        if manifest.contains("cfg(loom)") {
            found.push(format!("weft-{}", room.file_name().to_string_lossy()));
        }
    }
    found.sort_unstable();
    // What the runtime is called, it being what people use.
    let packages = found
        .iter()
        .map(|name| if name == "weft-runtime" { "weft" } else { name });
    let mut command = cargo();
    command
        // Clients of objects are asynchronous, and what they stand on does not compile for models.
        .args(["test", "--lib", "--no-default-features"])
        .args(packages.flat_map(|name| ["--package", name]))
        // How many orders there were is what a model prints.
        .args(["--", "--show-output"])
        // Models are small; most of the time goes into building what is around them.
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        // Its flags would make everything else be built again.
        .env("CARGO_TARGET_DIR", root().join("target/loom"))
        .env("RUSTFLAGS", "--cfg loom");
    match names {
        [] => command.arg(ALL),
        names => command.args(names),
    };
    let (said, well) = output_so_far(&mut command)?;
    print!("{said}");
    if !well {
        return Err(Error::Failed {
            line: "cargo test of the models".to_owned(),
            code: None,
        });
    }
    if models_passed(&said) == 0 {
        return Err(Error::NotUnderstood {
            program: "cargo test".to_owned(),
            said: "there is no model".to_owned(),
        });
    }
    Ok(())
}

/// What is in the name of every model, and of no other test.
const ALL: &str = "model::";

/// How many there were. A filter that nothing matches is no failure to cargo.
fn models_passed(said: &str) -> u32 {
    let counts = said.lines().filter_map(|line| {
        let count = line.strip_prefix("test result: ok. ")?.split(' ').next()?;
        count.parse::<u32>().ok()
    });
    counts.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_counted() {
        let said = "running 1 test\ntest a::model::b ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored\n\
                    test result: ok. 2 passed; 0 failed\n";
        assert_eq!(models_passed(said), 3);
        assert_eq!(models_passed("test result: ok. 0 passed; 0 failed"), 0);
    }
}
