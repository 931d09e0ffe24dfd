//! `cargo xtask door-test nixl`. What is shown is written in Python, beside the back end (`crates/nixl/door`) and beside the comparison
//! (`xtask/compare`); here it is brought about, with NIXL as pip has it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::ValueEnum;
use serde_json::Value;

use crate::command::{self, Error, output, root};
use crate::python::Environment;

#[derive(clap::Args)]
pub struct Arguments {
    /// The release of NIXL; several one after the other.
    #[arg(long, value_delimiter = ',', default_value = "1.5.1")]
    nixl: Vec<String>,
    /// Only these parts; all of them without.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// A checkout of NIXL's repository, whose own tests of its Python API are run, too.
    #[arg(long, value_name = "DIR")]
    checkout: Option<PathBuf>,
    /// The package of Weft that is in the environment already, instead of building it.
    #[arg(long)]
    as_installed: bool,
    /// How often each speed is measured.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// How long each measurement lasts.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The order of NIXL's functions, read and run.
    Contract,
    /// NIXL's own tests.
    Theirs,
    /// What happens when the other end is late, frozen or dead.
    Faults,
    /// The module that stands in NIXL's place where there is no NIXL: its API beside NIXL's, every function, NIXL's own tests, the faults.
    StandIn,
    /// Ratios to UCX, through NIXL.
    Speed,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let environment = Environment::make("target/door/nixl/venv")?;
    let wanted = |part: Part| arguments.only.is_empty() || arguments.only.contains(&part);
    let mut failed = Vec::new();
    for version in &arguments.nixl {
        eprintln!("installing nixl {version}, which is several gigabytes the first time");
        environment.pip_install(&[&format!("nixl=={version}"), "numpy", "pytest", "pytest-timeout"])?;
        if !arguments.as_installed {
            environment.pip_install(&["--no-deps", "--force-reinstall", "."])?;
        }
        let door = Door {
            environment: &environment,
            beside: plugin_directory(&environment, &[])?,
            in_place_of_ucx: plugin_directory(&environment, &["--as", "ucx"])?,
        };
        println!("NIXL {version}: `weft nixl` finds the interface as it should be");
        for part in Part::value_variants() {
            let as_it_should_be = match part {
                _ if !wanted(*part) => continue,
                Part::Contract => door.contract()?,
                Part::Theirs => door.theirs(arguments)?,
                Part::Faults => door.faults()?,
                Part::StandIn => door.stand_in(arguments)?,
                Part::Speed => door.speed(arguments)?,
            };
            if !as_it_should_be {
                failed.push(format!("{part:?} with NIXL {version}"));
            }
        }
    }
    Ok(match failed.is_empty() {
        true => ExitCode::SUCCESS,
        false => {
            eprintln!("not as it should be: {}", failed.join(", "));
            ExitCode::FAILURE
        }
    })
}

/// NIXL with Weft as one of its back ends.
struct Door<'a> {
    environment: &'a Environment,
    /// `NIXL_PLUGIN_DIR`.
    beside: String,
    in_place_of_ucx: String,
}

/// What `weft nixl` prints of the variable; it refuses a NIXL whose interface is another.
fn plugin_directory(environment: &Environment, arguments: &[&str]) -> Result<String, Error> {
    let mut weft = environment.installed("weft");
    weft.arg("nixl").args(arguments);
    plugin_directory_by(&mut weft)
}

/// The same by a command that is described already.
pub fn plugin_directory_by(weft: &mut Command) -> Result<String, Error> {
    weft.env("XDG_CACHE_HOME", root().join("target/door/cache"));
    let said = output(weft)?;
    let line = said
        .lines()
        .find_map(|line| line.strip_prefix("export NIXL_PLUGIN_DIR='"));
    let directory = line.and_then(|line| line.strip_suffix('\''));
    directory.map(str::to_owned).ok_or_else(|| Error::NotUnderstood {
        program: "weft nixl".to_owned(),
        said: said.clone(),
    })
}

impl Door<'_> {
    fn python(&self, plugins: &str) -> Command {
        let mut python = self.environment.python();
        python
            .env("NIXL_PLUGIN_DIR", plugins)
            .env("PYTHONDONTWRITEBYTECODE", "1");
        python
    }

    /// Runs a script that prints for itself, and tells whether it ended well.
    fn script(&self, plugins: &str, name: &str, arguments: &[&str]) -> Result<bool, Error> {
        let mut python = self.python(plugins);
        python.arg(root().join("crates/nixl/door").join(name)).args(arguments);
        ended_well(&mut python)
    }

    fn contract(&self) -> Result<bool, Error> {
        println!("\nevery function that NIXL calls, as WEFT:");
        self.script(&self.beside, "contract.py", &["WEFT"])
    }

    /// NIXL's tests are not ours to keep: they come from a checkout, or not at all. They name UCX in some places, so they run with Weft there.
    fn theirs(&self, arguments: &Arguments) -> Result<bool, Error> {
        let Some(checkout) = &arguments.checkout else {
            println!("\nNIXL's own tests: not run, as there is no --checkout of its repository");
            return Ok(true);
        };
        let tests = checkout.join("test/python");
        let mut well = true;
        for (plugins, backend, files) in [
            (&self.beside, "WEFT", &["test_nixl_api.py"][..]),
            (
                &self.in_place_of_ucx,
                "UCX",
                &["test_nixl_api.py", "test_nixl_bindings.py"][..],
            ),
        ] {
            println!(
                "\nNIXL's own {}, back end {backend}, which is Weft:",
                files.join(" and ")
            );
            let mut pytest = self.python(plugins);
            pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120"]);
            pytest.args(files).args(["--backend", backend]).current_dir(&tests);
            well &= ended_well(&mut pytest)?;
        }
        Ok(well)
    }

    /// `weft.nixl` needs nothing of NIXL; that it is installed here is for what is compared with it.
    fn stand_in(&self, arguments: &Arguments) -> Result<bool, Error> {
        let here = root().join("crates/nixl/door");
        println!("\nNIXL's API, and that of weft.nixl:");
        let mut well = self.script("", "api.py", &[])?;
        for (name, more) in [("contract.py", &[][..]), ("faults.py", &["--backends", "WEFT"][..])] {
            println!("\n{name} by weft.nixl:");
            let mut python = self.python("");
            python.env("WEFT_NIXL", "1").arg(here.join(name)).args(more);
            well &= ended_well(&mut python)?;
        }
        let Some(checkout) = &arguments.checkout else {
            println!("\nNIXL's own tests on weft.nixl: not run, as there is no --checkout of its repository");
            return Ok(well);
        };
        println!("\nNIXL's own tests on weft.nixl:");
        let mut pytest = self.python("");
        pytest.args([
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "in_place",
            "--timeout",
            "120",
        ]);
        pytest.args(["test_nixl_api.py", "test_nixl_bindings.py", "--backend", "UCX"]);
        pytest.env("PYTHONPATH", here).current_dir(checkout.join("test/python"));
        Ok(ended_well(&mut pytest)? && well)
    }

    fn faults(&self) -> Result<bool, Error> {
        println!("\nfaults:");
        self.script(&self.beside, "faults.py", &[])
    }

    /// Every row is measured for all sides one right after the other, the whole is repeated, and what counts is the ratio of the medians.
    fn speed(&self, arguments: &Arguments) -> Result<bool, Error> {
        let mut figures: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
        for repeat in 0..arguments.repeats {
            for (row, case) in ROWS.iter().enumerate() {
                for (side, (name, driver, backend)) in SIDES.iter().enumerate() {
                    eprintln!("repeat {} of {}: {case} by {name}", repeat + 1, arguments.repeats);
                    let mut python = self.python(&self.beside);
                    python.arg(root().join("xtask/compare").join(driver)).arg("transfer");
                    python
                        .args(case.split(' '))
                        .args(["--seconds", &arguments.seconds.to_string()]);
                    python.env("NIXL_BACKEND", backend);
                    match output(&mut python).and_then(|said| microseconds(&said)) {
                        Ok(figure) => figures.entry((row, side)).or_default().push(figure),
                        // One side that fails must not end the comparison of the others; its ratio will be missing.
                        Err(error) => eprintln!("  {error}"),
                    }
                }
            }
        }
        println!(
            "\nmicroseconds from the post to the end, medians of {}; both sides' memory is not Weft's",
            arguments.repeats
        );
        println!("| transfer | NIXL, UCX | NIXL, WEFT | UCX / WEFT | Weft itself | NIXL, WEFT / Weft itself |");
        println!("|---|---:|---:|---:|---:|---:|");
        for (row, case) in ROWS.iter().enumerate() {
            let median = |side: usize| {
                let mut all = figures.get(&(row, side))?.clone();
                all.sort_by(f64::total_cmp);
                all.get(all.len() / 2).copied()
            };
            let (ucx, weft, itself) = (median(0), median(1), median(2));
            let shown = |figure: Option<f64>| figure.map_or("-".to_owned(), |figure| format!("{figure:.1}"));
            let ratio = |over: Option<f64>, under: Option<f64>| match (over, under) {
                (Some(over), Some(under)) => format!("{:.2}", over / under),
                _ => "-".to_owned(),
            };
            let name = case
                .replace("--transport ", "")
                .replace("--op ", "")
                .replace(" --block ", ", ")
                .replace(" --batch ", " B × ");
            println!(
                "| {name} | {} | {} | {} | {} | {} |",
                shown(ucx),
                shown(weft),
                ratio(ucx, weft),
                shown(itself),
                ratio(weft, itself)
            );
        }
        Ok(ROWS.len() * SIDES.len() == figures.len())
    }
}

/// Runs what prints for itself.
fn ended_well(command: &mut Command) -> Result<bool, Error> {
    match command::run(command) {
        Ok(()) => Ok(true),
        Err(Error::Failed { .. }) => Ok(false),
        Err(other) => Err(other),
    }
}

/// What is measured, as the drivers take it.
const ROWS: &[&str] = &[
    "--transport shared_memory --op READ --block 4096 --batch 1",
    "--transport shared_memory --op WRITE --block 4096 --batch 1",
    "--transport shared_memory --op READ --block 65536 --batch 64",
    "--transport shared_memory --op WRITE --block 65536 --batch 64",
    "--transport shared_memory --op READ --block 65536 --batch 1024",
    "--transport shared_memory --op WRITE --block 65536 --batch 1024",
    "--transport shared_memory --op READ --block 67108864 --batch 1",
    "--transport shared_memory --op WRITE --block 67108864 --batch 1",
    "--transport tcp --op READ --block 4096 --batch 1",
    "--transport tcp --op READ --block 65536 --batch 64",
    "--transport tcp --op WRITE --block 65536 --batch 64",
    "--transport tcp --op READ --block 65536 --batch 1024",
    "--transport tcp --op READ --block 67108864 --batch 1",
];

/// A name, the driver, and the back end where it is NIXL's.
const SIDES: &[(&str, &str, &str)] = &[
    ("NIXL with UCX", "nixl_peer.py", "UCX"),
    ("NIXL with WEFT", "nixl_peer.py", "WEFT"),
    ("Weft itself", "weft_peer.py", ""),
];

/// The figure in a driver's line, which must have moved the right bytes.
fn microseconds(said: &str) -> Result<f64, Error> {
    let line = said
        .lines()
        .rev()
        .find_map(|line| serde_json::from_str::<Value>(line).ok());
    let figure = line
        .as_ref()
        .filter(|line| line["verified"] == true)
        .and_then(|line| line["us"].as_f64());
    figure.ok_or_else(|| Error::NotUnderstood {
        program: "a driver".to_owned(),
        said: said.to_owned(),
    })
}
