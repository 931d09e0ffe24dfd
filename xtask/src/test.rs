//! `cargo xtask test`: the whole suite, from a fresh Debian with Rust and Python.

use std::process::ExitCode;
use std::time::Instant;

use crate::command::{self, Error, Needed, cargo, install_missing, root, works};
use crate::python::Environment;
use crate::rdma_test;
use crate::screenshot::CHROMIUM;

#[derive(clap::Args)]
pub struct Arguments {
    /// Leave the Python package out.
    #[arg(long)]
    no_python: bool,
    /// Run the RDMA tests in virtual machines too: about nine minutes more.
    #[arg(long)]
    rdma: bool,
    /// Test with torch too: 3 GB to download, because the wheel does not load without CUDA's libraries.
    #[arg(long, conflicts_with = "no_python")]
    torch: bool,
}

/// What the suite needs beside Rust and Python.
const NEEDED: &[Needed] = &[
    (&["etcd", "--version"], "etcd-server"),
    (&["protoc", "--version"], "protobuf-compiler"),
    (&["ip", "-V"], "iproute2"),
    (&["python3", "-c", "import ensurepip, venv"], "python3-venv"),
    (&["cc", "--version"], "gcc"),
    CHROMIUM,
];

/// What is built and tested. Whoever builds the same finds it built.
pub const FEATURES: &[&str] = &["--workspace", "--features", "weft/etcd"];

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let mut suite = Suite::default();
    suite.step("packages", || install_missing(NEEDED));
    suite.step("format", || command::run(cargo().args(["fmt", "--all", "--check"])));
    suite.step("lints", || {
        command::run(
            cargo()
                .arg("clippy")
                .args(FEATURES)
                .args(["--all-targets", "--", "--deny", "warnings"]),
        )
    });
    suite.step("documentation", || {
        command::run(
            cargo()
                .args(["doc", "--no-deps"])
                .args(FEATURES)
                .env("RUSTDOCFLAGS", "--deny warnings"),
        )
    });
    let nextest = works("cargo", &["nextest", "--version"]);
    if nextest {
        suite.step("Rust tests", || {
            command::run(cargo().args(["nextest", "run", "--no-fail-fast"]).args(FEATURES))
        });
        suite.step("Rust examples in documentation", || {
            command::run(cargo().args(["test", "--doc"]).args(FEATURES))
        });
    } else {
        suite.step("Rust tests", || {
            command::run(cargo().args(["test", "--no-fail-fast"]).args(FEATURES))
        });
    }
    if arguments.rdma {
        suite.step("RDMA tests in virtual machines", rdma_test::run_tests);
    }
    if !arguments.no_python {
        let installed = suite.step("Python package", || {
            let environment = Environment::make(".venv")?;
            environment.pip_install(&["pytest", "numpy"])?;
            if arguments.torch {
                environment.pip_install(&["torch"])?;
            }
            environment.pip_install(&["."])
        });
        if installed {
            suite.step("Python tests", || {
                let environment = Environment::make(".venv")?;
                command::run(
                    environment
                        .python()
                        .args(["-m", "pytest", "-q", "crates/python/tests"])
                        .current_dir(root()),
                )
            });
        }
    }
    Ok(suite.report())
}

/// The steps so far. One that fails does not keep the others from running: a report of everything is worth more.
#[derive(Default)]
struct Suite {
    steps: Vec<Step>,
}

struct Step {
    name: &'static str,
    seconds: f64,
    outcome: Result<(), Box<dyn std::error::Error>>,
}

impl Suite {
    fn step<E: std::error::Error + 'static>(
        &mut self,
        name: &'static str,
        work: impl FnOnce() -> Result<(), E>,
    ) -> bool {
        eprintln!("== {name}");
        let start = Instant::now();
        let outcome = work();
        let done = outcome.is_ok();
        self.steps.push(Step {
            name,
            seconds: start.elapsed().as_secs_f64(),
            outcome: outcome.map_err(Into::into),
        });
        done
    }

    fn report(&self) -> ExitCode {
        println!();
        for Step { name, seconds, outcome } in &self.steps {
            match outcome {
                Ok(()) => println!("ok      {name}  ({seconds:.1} s)"),
                Err(error) => println!("FAILED  {name}  ({seconds:.1} s): {error}"),
            }
        }
        let total: f64 = self.steps.iter().map(|step| step.seconds).sum();
        let failed = self.steps.iter().filter(|step| step.outcome.is_err()).count();
        println!(
            "{} of {} steps passed in {:.0} s",
            self.steps.len() - failed,
            self.steps.len(),
            total
        );
        if failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}
