//! `cargo xtask test`: the whole suite, from a fresh Debian with Rust and Python.
//!
//! A newcomer's run leaves out what takes long for what it tells: torch, which is gigabytes, and the steps that are for whoever changes
//! something. Where `CI` is set nothing is left out that can be had. What was left out is printed at the end.

use std::process::{Command, ExitCode};
use std::thread::JoinHandle;

use weft_testing::{Need, REQUIRE};

use crate::command::{self, Error, Needed, cargo, install_missing, root, works};
use crate::left_out::LeftOut;
use crate::python::Environment;
use crate::screenshot::CHROMIUM;
use crate::suite::Suite;
use crate::{deny, fuzz, kernels, loom, rdma_test};

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
    /// Run every step, as where the variable CI is set: torch, the models of loom, the kernels, every fuzz target for a while, cargo deny.
    #[arg(long, conflicts_with = "no_python")]
    all: bool,
}

/// What the suite needs beside Rust and Python.
const NEEDED: &[Needed] = &[
    (&["etcd", "--version"], "etcd-server"),
    (&["ip", "-V"], "iproute2"),
    (&["python3", "-c", "import ensurepip, venv"], "python3-venv"),
    (&["cc", "--version"], "gcc"),
    (&["c++", "--version"], "g++"),
    (&["valgrind", "--version"], "valgrind"),
    (&["pkg-config", "--version"], "pkg-config"),
    (&["cmake", "--version"], "cmake"),
    (&["make", "--version"], "make"),
    CHROMIUM,
];

/// What the Python tests may ask for beside what those in Rust do.
const NEEDS_OF_PYTHON: [&str; 3] = ["torch", "jax", "vllm"];
/// How long each fuzz target runs. All together they take half of that a target, because two run at a time.
const FUZZ_SECONDS: u64 = 30;
const RDMA_STEP: &str = "RDMA tests in virtual machines";

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let all = arguments.all || is_set("CI");
    let mut plan = Plan::new(arguments, all, &std::env::var(REQUIRE).unwrap_or_default())?;
    let mut left_out = LeftOut::new()?;
    let mut suite = Suite::default();
    suite.step("packages", || install_missing(NEEDED));
    plan.require_what_is_there(all);
    // It takes as long as all that is built until then, and needs the network where that needs the processor.
    let torch = plan.torch.then(fetch_torch);
    suite.step("format", || command::run(cargo().args(["fmt", "--all", "--check"])));
    suite.step("lints", || {
        let strictly = ["--all-targets", "--", "--deny", "warnings"];
        command::run(cargo().args(["clippy", "--workspace"]).args(strictly))
    });
    suite.step("documentation", || {
        let mut doc = cargo();
        doc.args(["doc", "--no-deps", "--workspace"]);
        command::run(doc.env("RUSTDOCFLAGS", "--deny warnings"))
    });
    rust_tests(&mut suite, &left_out, &plan);
    if plan.rdma {
        suite.step(RDMA_STEP, rdma_test::run_tests);
    }
    if all {
        suite.step("loom models", loom::run_models);
        suite.step("kernels", kernels::compare);
        suite.step("cargo deny", deny::check);
        suite.step("fuzz targets", || fuzz::run_all(FUZZ_SECONDS));
    } else {
        let why = "where CI is set, or with --all";
        left_out.add("loom", "cargo xtask loom", why);
        left_out.add("kernels", "cargo xtask kernels", why);
        left_out.add("deny", "cargo xtask deny", why);
        left_out.add("fuzz", "cargo xtask fuzz", why);
    }
    if arguments.no_python {
        left_out.add("python", "crates/python", "--no-python");
    } else {
        python_tests(&mut suite, &left_out, &plan, torch);
    }
    let code = suite.report();
    let done: &[&str] = if suite.passed(RDMA_STEP) { &["rdma"] } else { &[] };
    println!("\n{}", left_out.table(done));
    Ok(code)
}

/// Which tests are to run, and what they may not do without.
struct Plan {
    rdma: bool,
    torch: bool,
    required: Vec<String>,
}

impl Plan {
    /// `asked` is what the environment requires.
    fn new(arguments: &Arguments, all: bool, asked: &str) -> Result<Plan, Error> {
        let asked = asked.split(',').map(str::trim).filter(|name| !name.is_empty());
        let mut required: Vec<String> = asked.map(str::to_owned).collect();
        let known = |name: &str| Need::ALL.iter().any(|need| need.name() == name) || NEEDS_OF_PYTHON.contains(&name);
        if let Some(unknown) = required.iter().find(|name| !known(name)) {
            return Err(Error::NotUnderstood {
                program: REQUIRE.to_owned(),
                said: unknown.clone(),
            });
        }
        let asked_for = |name: &str| required.iter().any(|known| known == name);
        let rdma = arguments.rdma || asked_for("rdma");
        let torch = !arguments.no_python && (arguments.torch || all || asked_for("torch") || has_torch());
        // A step of its own takes care of that, and is there or fails.
        required.retain(|name| name != "rdma");
        Ok(Plan { rdma, torch, required })
    }

    /// What was installed, or was there, must be used; and whoever runs everything has to be root.
    fn require_what_is_there(&mut self, all: bool) {
        let mut required: Vec<&str> = vec!["etcd", "chromium", "c++", "valgrind", "pkg-config", "cmake"];
        if all || Need::Root.missing().is_none() {
            required.push("root");
        }
        if self.torch {
            required.push("torch");
        }
        for name in required {
            if !self.required.iter().any(|known| known == name) {
                self.required.push(name.to_owned());
            }
        }
    }
}

fn rust_tests(suite: &mut Suite, left_out: &LeftOut, plan: &Plan) {
    // Libraries for C too, which tests alone would not bring: built apart, they would be built with other features, and half of the dependencies again.
    let built = suite.step("Rust build", || {
        command::run(cargo().args(["build", "--workspace", "--all-targets"]))
    });
    let tests = |arguments: &[&str]| {
        let mut command = cargo();
        command.args(arguments).arg("--workspace");
        if built {
            // Not called after Weft, whose settings begin like that, and are refused where they are unknown.
            command.env("C_LIBRARY_IS_BUILT", "1");
        }
        command::run(left_out.tell(&mut command, &plan.required))
    };
    if works("cargo", &["nextest", "--version"]) {
        suite.step("Rust tests", || tests(&["nextest", "run", "--no-fail-fast"]));
        suite.step("Rust examples in documentation", || tests(&["test", "--doc"]));
    } else {
        suite.step("Rust tests", || tests(&["test", "--no-fail-fast"]));
    }
}

fn python_tests(suite: &mut Suite, left_out: &LeftOut, plan: &Plan, torch: Option<JoinHandle<Result<(), Error>>>) {
    let installed = suite.step("Python package", || {
        if let Some(torch) = torch {
            torch.join().unwrap_or(Err(Error::Failed {
                line: "pip install torch".to_owned(),
                code: None,
            }))?;
        }
        let environment = Environment::make(ENVIRONMENT)?;
        environment.pip_install(&["pytest", "numpy", "pyyaml"])?;
        environment.pip_install(&["."])
    });
    if installed {
        suite.step("Python tests", || {
            let mut pytest: Command = Environment::make(ENVIRONMENT)?.python();
            pytest
                .args(["-m", "pytest", "-q", "crates/python/tests"])
                .current_dir(root());
            command::run(left_out.tell(&mut pytest, &plan.required))
        });
    }
}

/// Where the Python tests run.
const ENVIRONMENT: &str = ".venv";

fn has_torch() -> bool {
    let python = root().join(ENVIRONMENT).join("bin/python");
    let found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
    works(&python.to_string_lossy(), &["-c", found])
}

/// Installs torch, while other things are done.
fn fetch_torch() -> JoinHandle<Result<(), Error>> {
    std::thread::spawn(|| {
        if has_torch() {
            return Ok(());
        }
        eprintln!("installing torch meanwhile, which is several gigabytes");
        Environment::make(ENVIRONMENT)?.pip_install(&["torch"])
    })
}

fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| !["", "0", "false"].contains(&&*value))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Arguments = Arguments {
        no_python: false,
        rdma: false,
        torch: false,
        all: false,
    };

    #[test]
    fn what_is_required_is_run_and_what_is_unknown_is_refused() {
        let plan = Plan::new(&PLAIN, false, "torch, rdma,etcd").unwrap();
        assert!(plan.torch && plan.rdma);
        assert_eq!(plan.required, ["torch", "etcd"]);
        assert!(Plan::new(&PLAIN, true, "").unwrap().torch);
        assert!(Plan::new(&PLAIN, false, "chromum").is_err());
        let mut plan = Plan::new(&PLAIN, true, "").unwrap();
        plan.require_what_is_there(true);
        let there = [
            "etcd",
            "chromium",
            "c++",
            "valgrind",
            "pkg-config",
            "cmake",
            "root",
            "torch",
        ];
        assert_eq!(plan.required, there);
    }
}
