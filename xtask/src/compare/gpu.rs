//! `cargo xtask compare gpu`: collectives, transfers, signals, fused norms and experts on a GPU, beside their floors and beside NCCL and torch in the same run.
//!
//! A machine that builds has seldom a GPU, so it is a bundle, as that of `gpu-test`: it is carried to a machine with one, and prints its table there; where there is one here, it runs here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use weft_testing::Need;

use crate::command::{Error, cargo, root, run as run_command};
use crate::gpu_test::{built, copy, pack, take};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// Where the bundle goes.
    #[arg(long, value_name = "DIR", default_value = "target/gpu-compare")]
    out: PathBuf,
    /// Fetch NCCL from PyPI, and take along what of it is for devices of this kind, as 90 for Hopper: some 20 MB, packed.
    #[arg(long, value_name = "ARCHITECTURE")]
    nccl: Option<u32>,
    /// Only these parts, where it runs here: collectives, transfers, signals, fused, moe.
    #[arg(long, value_name = "LIST")]
    only: Option<String>,
}

/// The first that takes several ranks on one device is 2.30.
const NCCL: &str = "nvidia-nccl-cu13==2.30.4";
const EXAMPLES: [(&str, &str); 4] = [
    ("weft-gpu", "collectives"),
    ("weft-gpu", "fused"),
    ("weft-gpu", "moe"),
    ("weft", "kernel_put"),
];

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let out = root().join(&arguments.out);
    let _ = fs::remove_dir_all(&out);
    fs::create_dir_all(&out).map_err(|source| Error::File {
        path: out.clone(),
        source,
    })?;
    for (package, example) in EXAMPLES {
        let program = built(cargo().args(["build", "--release", "-p", package, "--example", example]))?;
        take(&program, &out.join(example))?;
    }
    let tests = [
        "test",
        "--release",
        "--no-run",
        "-p",
        "weft-gpu",
        "--test",
        "device_api",
    ];
    take(&built(cargo().args(tests))?, &out.join("device_api"))?;
    take(
        &built(cargo().args(["build", "--release", "-p", "weft-cli"]))?,
        &out.join("weft"),
    )?;
    for script in ["xtask/compare/gpu.py", "crates/gpu/examples/beside.py"] {
        let name = Path::new(script).file_name().unwrap_or_default();
        copy(&root().join(script), &out.join(name))?;
    }
    if let Some(architecture) = arguments.nccl {
        fetch_nccl(architecture, &out)?;
    }
    let packed = pack(&out)?;
    println!(
        "{}: carry it to a machine with a GPU, unpack it there, and: python3 gpu.py",
        packed.display()
    );
    match Need::Gpu.missing() {
        None => {
            let mut compare = Command::new("python3");
            compare.arg(out.join("gpu.py"));
            if let Some(only) = &arguments.only {
                compare.args(["--only", only]);
            }
            run_command(&mut compare).map(|()| ExitCode::SUCCESS)
        }
        Some(why) => {
            println!("nothing was run here: {why}");
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The library, with code for one kind of device.
fn fetch_nccl(architecture: u32, out: &Path) -> Result<(), Error> {
    let peers = Environment::make("target/gpu-compare-nccl")?;
    peers.pip_install(&[NCCL])?;
    let library = find(peers.path(), "libnccl.so.2").ok_or(Error::Failed {
        line: format!("{NCCL} has no library"),
        code: None,
    })?;
    let cut = root().join("xtask/compare/cut_fatbin.py");
    let to = out.join("libnccl.so.2");
    let mut python = peers.python();
    run_command(python.arg(cut).arg(library).arg(to).arg(architecture.to_string()))
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).ok()?.flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(path),
                _ if path.file_name().is_some_and(|found| found == name) => return Some(path),
                _ => {}
            }
        }
    }
    None
}
