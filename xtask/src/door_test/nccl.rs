//! `cargo xtask door-test nccl`. Whether every NCCL that Weft says it serves still asks for the tables that it has; then those tables themselves, in two processes.
//! What needs a GPU is `crates/nccl/door/on_gpu.sh`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::command::{self, Error, cargo};
use crate::python::Environment;

/// What the library exports: of each kind an NCCL must know one at least.
const KINDS: [(&str, &[&str]); 3] = [
    ("net", &["ncclNetPlugin_v11", "ncclNetPlugin_v12"]),
    ("profiler", &["ncclProfiler_v5"]),
    ("tuner", &["ncclTunerPlugin_v5"]),
];

#[derive(clap::Args)]
pub struct Arguments {
    /// Releases of NCCL, as pip has them.
    #[arg(long, value_delimiter = ',', default_value = "2.28.9,2.30.7,2.32.3")]
    nccl: Vec<String>,
    /// The package that they are in.
    #[arg(long, default_value = "nvidia-nccl-cu13")]
    package: String,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let environment = Environment::make("target/door/nccl/venv")?;
    let mut failed = false;
    for version in &arguments.nccl {
        environment.pip_install(&["--no-deps", &format!("{}=={version}", arguments.package)])?;
        let library = find(&command::root().join("target/door/nccl/venv"))?;
        let bytes = read(&library)?;
        for (kind, tables) in KINDS {
            let known: Vec<&&str> = tables.iter().filter(|table| mentions(&bytes, table)).collect();
            failed |= known.is_empty();
            println!(
                "NCCL {version}, {kind}: {}",
                if known.is_empty() {
                    "NONE OF OUR TABLES"
                } else {
                    known[known.len() - 1]
                }
            );
        }
    }
    command::run(cargo().args(["nextest", "run", "-p", "weft-nccl"]))?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// NCCL's library in an environment of Python.
fn find(environment: &Path) -> Result<PathBuf, Error> {
    let mut directories = vec![environment.to_owned()];
    while let Some(directory) = directories.pop() {
        let entries = std::fs::read_dir(&directory).map_err(|source| file(&directory, source))?;
        for entry in entries.flatten() {
            let path = entry.path();
            if path.ends_with("libnccl.so.2") {
                return Ok(path);
            }
            if path.is_dir() && !path.is_symlink() {
                directories.push(path);
            }
        }
    }
    Err(file(
        environment,
        std::io::Error::other("there is no libnccl.so.2 in it"),
    ))
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|source| file(path, source))
}

fn file(path: &Path, source: std::io::Error) -> Error {
    let path = path.to_owned();
    Error::File { path, source }
}

fn mentions(bytes: &[u8], symbol: &str) -> bool {
    bytes.windows(symbol.len()).any(|window| window == symbol.as_bytes())
}
