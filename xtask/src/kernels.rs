//! `cargo xtask kernels`: the device's kernels, compiled to what is shipped, or a look whether what is shipped is what they compile to.
//!
//! The compiler comes from PyPI, so that it is the same everywhere; nobody who uses Weft needs one. PTX is text, is for every device from sm_80 on, and is kept
//! in the repository.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use crate::command::{Error, root, run as run_command};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// Write what the kernels compile to, instead of comparing.
    #[arg(long)]
    write: bool,
}

const COMPILER: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
];
/// Where sources are: the kernels of the house, and those of tests and examples, which are a user's.
const PLACES: [&str; 2] = ["crates/gpu/kernels", "crates/gpu/tests/kernels"];
/// The oldest devices that kernels are for.
const TARGET: &str = "compute_80";
/// Those that they are also assembled for, to see that it can be done.
const ASSEMBLED: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let stale = look(arguments.write)?;
    if stale.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("{}", told(&stale));
    Ok(ExitCode::FAILURE)
}

/// Fails where what is shipped is not what the kernels compile to.
pub fn compare() -> Result<(), Error> {
    match look(false)? {
        stale if stale.is_empty() => Ok(()),
        stale => Err(Error::Failed {
            line: told(&stale),
            code: None,
        }),
    }
}

fn told(stale: &[String]) -> String {
    let stale = stale.join(", ");
    format!("{stale} is not what its source compiles to: cargo xtask kernels --write")
}

/// Compiles all of them, and names those whose text is another than what is shipped; or writes it.
fn look(write: bool) -> Result<Vec<String>, Error> {
    let nvcc = compiler()?;
    let mut stale = Vec::new();
    for source in sources()? {
        let (shipped, fresh) = (source.with_extension("ptx"), root().join("target/kernels/fresh.ptx"));
        compile(&nvcc, &source, &["-ptx", "-arch", TARGET], &fresh)?;
        for device in ASSEMBLED {
            compile(
                &nvcc,
                &source,
                &["-cubin", "-arch", device],
                &root().join("target/kernels/assembled"),
            )?;
        }
        let text = anywhere(&read(&fresh)?);
        if write {
            fs::write(&shipped, text).map_err(|source| Error::File { path: shipped, source })?;
        } else if read(&shipped).ok() != Some(text) {
            stale.push(shipped.file_name().unwrap_or_default().to_string_lossy().into_owned());
        }
    }
    Ok(stale)
}

/// The text without what the compiler makes of where the source lies and of the headers around it: twice eight digits, in the names of functions that are
/// internal to it.
fn anywhere(text: &str) -> String {
    let marks = ["_INTERNAL_", "_collective_cu_", "_fused_cu_", "_moe_cu_", "_api_cu_"];
    marks
        .iter()
        .fold(text.to_owned(), |text, mark| without_digits_after(&text, mark))
}

fn without_digits_after(text: &str, mark: &str) -> String {
    let mut parts = text.split(mark);
    let mut same = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        same.extend([mark, "00000000", part.get(8..).unwrap_or_default()]);
    }
    same
}

/// The compiler, installed where it is missing.
fn compiler() -> Result<PathBuf, Error> {
    let tools = Environment::make("target/kernels/compiler")?;
    let find = || {
        let all = fs::read_dir(tools.path().join("lib")).ok()?.flatten();
        let mut there = all.map(|python| python.path().join("site-packages/nvidia/cu13/bin/nvcc"));
        there.find(|nvcc| nvcc.exists())
    };
    if find().is_none() {
        tools.pip_install(&COMPILER)?;
    }
    find().ok_or(Error::Failed {
        line: "nvcc from PyPI".to_owned(),
        code: None,
    })
}

fn sources() -> Result<Vec<PathBuf>, Error> {
    let mut sources = Vec::new();
    for place in PLACES {
        let path = root().join(place);
        let listed = fs::read_dir(&path).map_err(|source| Error::File { path, source })?;
        let files = listed.flatten().map(|entry| entry.path());
        sources.extend(files.filter(|path| path.extension().is_some_and(|extension| extension == "cu")));
    }
    sources.sort();
    Ok(sources)
}

fn compile(nvcc: &PathBuf, source: &PathBuf, how: &[&str], to: &PathBuf) -> Result<(), Error> {
    run_command(
        Command::new(nvcc)
            .args(how)
            .args(["-O3", "-Werror", "all-warnings", "-o"])
            .arg(to)
            .arg(source),
    )
}

fn read(path: &PathBuf) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|source| Error::File {
        path: path.clone(),
        source,
    })
}
