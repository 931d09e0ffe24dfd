//! `cargo xtask bare-test`: what the README promises, on a machine that has nothing but Rust, a C compiler and Python.
//!
//! A minimal Debian is made in a directory once, and copied for every run. Commands run in it by root, in namespaces of their own, with this
//! machine's Rust toolchain mounted read-only. All mounts are in those namespaces, so they are gone with the last process, however it ends.
//! The project is a clean clone of what is committed. The network is this machine's, and so is what it takes to use it: name servers,
//! certificates, proxies, and where cargo, pip and apt look for packages.

mod inside;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use thiserror::Error;

use crate::command::{self, Needed, install_missing, output, root};
use crate::suite::Suite;
use inside::Inside;

#[derive(clap::Args)]
pub struct Arguments {
    /// Only these parts.
    #[arg(long, value_delimiter = ',', value_name = "PARTS")]
    only: Vec<Part>,
    /// Make the minimal Debian anew.
    #[arg(long)]
    fresh: bool,
    /// Keep the directory in which the commands ran: target/bare/run.
    #[arg(long)]
    keep: bool,
}

#[derive(Debug, Error)]
pub enum Error {
    #[error(transparent)]
    Command(#[from] command::Error),
    #[error("only root can make another root directory and enter it")]
    NotRoot,
    #[error("another run is under way, in {}", .0.display())]
    UnderWay(PathBuf),
    #[error("the README has no {0} any more")]
    NotInReadme(&'static str),
    #[error("cannot use {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
}

/// What can be run by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The README's first command.
    Demo,
    /// The README's second command: the whole suite.
    Test,
    /// The Python package, installed from source, and the command that it brings.
    Pip,
    /// The README's Python example, with torch.
    Example,
}

impl Part {
    const ALL: [Part; 4] = [Part::Demo, Part::Test, Part::Pip, Part::Example];
}

/// The release that is tried, and what it has beside the least that a Debian has: what the README takes for granted.
const SUITE: &str = "bookworm";
const INCLUDED: &str = "ca-certificates,gcc,libc6-dev,git,python3,python3-venv,python3-pip";

const NEEDED: &[Needed] = &[
    (&["mmdebstrap", "--version"], "mmdebstrap"),
    (&["unshare", "--version"], "util-linux"),
];

pub fn run(arguments: &Arguments) -> Result<ExitCode, Error> {
    let bare = Bare::make("run", arguments.fresh)?;
    let parts = match arguments.only.as_slice() {
        [] => &Part::ALL,
        some => some,
    };
    let readme = fs::read_to_string(root().join("README.md")).unwrap_or_default();
    let commands = commands(parts, &readme)?;
    let inside = &bare.inside;
    clone(inside)?;
    let mut suite = Suite::default();
    for line in commands {
        suite.step(line.clone(), || command::run(&mut inside.command(&line)));
    }
    if !arguments.keep {
        bare.remove()?;
    }
    Ok(suite.report())
}

/// A minimal Debian for one run, and the right to be the only one that runs.
pub struct Bare {
    path: PathBuf,
    pub inside: Inside,
    _lock: File,
}

impl Bare {
    /// Copies the base to `target/bare/NAME`, and puts there what commands need. With `fresh` the base is made anew.
    pub fn make(name: &str, fresh: bool) -> Result<Bare, Error> {
        if weft_testing::user() != Some(0) {
            return Err(Error::NotRoot);
        }
        install_missing(NEEDED)?;
        let place = root().join("target/bare");
        make_directory(&place)?;
        let _lock = lock(&place)?;
        let base = base(&place, fresh)?;
        let path = place.join(name);
        remove(&path)?;
        println!("copying the base");
        command::run(
            Command::new("cp")
                .args(["--archive", "--reflink=auto"])
                .arg(&base)
                .arg(&path),
        )?;
        let inside = Inside::furnish(&path)?;
        make_directory(&inside.project())?;
        Ok(Bare { path, inside, _lock })
    }

    pub fn remove(self) -> Result<(), Error> {
        remove(&self.path)
    }
}

/// The command lines of some parts, in order.
fn commands(parts: &[Part], readme: &str) -> Result<Vec<String>, Error> {
    let mut lines = Vec::new();
    // The example is one of the package.
    let mut install = false;
    for part in parts {
        match part {
            Part::Demo => lines.push(said_by(readme, "cargo run --release -p weft-cli -- demo")?),
            Part::Test => lines.push(said_by(readme, "cargo xtask test")?),
            Part::Pip | Part::Example if !install => {
                install = true;
                lines.push("python3 -m venv /root/venv".to_owned());
                lines.push(format!("/root/venv/bin/{}", said_by(readme, "pip install .")?));
                lines.push("/root/venv/bin/weft --version".to_owned());
                // Where the clone is, its sources would be taken for the package.
                lines.push(
                    "cd / && /root/venv/bin/python -c 'import weft; print(weft.Agent(\"bare\").address)'".to_owned(),
                );
            }
            Part::Pip | Part::Example => {}
        }
        if *part == Part::Example {
            said_by(readme, "examples/10_torch_tensor.py")?;
            lines.push("/root/venv/bin/pip install --quiet torch numpy".to_owned());
            lines.push("/root/venv/bin/python examples/10_torch_tensor.py".to_owned());
        }
    }
    Ok(lines)
}

/// A command, which the README must name: whoever changes it there has to change it here.
fn said_by(readme: &str, command: &'static str) -> Result<String, Error> {
    match readme.contains(command) {
        true => Ok(command.to_owned()),
        false => Err(Error::NotInReadme(command)),
    }
}

/// Only one run at a time, because all have the same directory. The lock goes with the file.
fn lock(place: &Path) -> Result<File, Error> {
    let path = place.join("lock");
    let file = File::create(&path).map_err(|source| Error::File {
        path: path.clone(),
        source,
    })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(_) => Err(Error::UnderWay(place.to_owned())),
    }
}

/// The minimal Debian, as it was unpacked.
fn base(place: &Path, fresh: bool) -> Result<PathBuf, Error> {
    let (base, making) = (place.join("base"), place.join("base.new"));
    if fresh {
        remove(&base)?;
    }
    if base.exists() {
        return Ok(base);
    }
    remove(&making)?;
    println!("making a minimal Debian in {}", base.display());
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap
        .args(["--quiet", "--variant=minbase", "--mode=root"])
        .arg(format!("--include={INCLUDED}"));
    let options = place.join("apt.conf");
    write(&options, &apt_options()?)?;
    mmdebstrap.arg(format!("--aptopt={}", options.display()));
    mmdebstrap.arg(SUITE).arg(&making);
    mmdebstrap.args(apt_sources());
    command::run(&mut mmdebstrap)?;
    fs::rename(&making, &base).map_err(|source| Error::File {
        path: base.clone(),
        source,
    })?;
    Ok(base)
}

/// How this machine's apt reaches its mirrors: proxies, certificates, patience.
fn apt_options() -> Result<String, Error> {
    let all = output(Command::new("apt-config").arg("dump"))?;
    let wanted = |line: &&str| {
        [
            "Acquire::http",
            "Acquire::https",
            "Acquire::Check-",
            "Acquire::Retries",
            "Acquire::ForceIP",
        ]
        .iter()
        .any(|beginning| line.starts_with(beginning))
    };
    Ok(all.lines().filter(wanted).map(|line| format!("{line}\n")).collect())
}

/// The mirrors of this release that this machine uses; none where it is another system, and the usual one is taken.
fn apt_sources() -> Vec<String> {
    let said = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(ORIGIN) $(CODENAME) $(REPO_URI)",
        "Created-By: Packages",
    ]));
    let mut sources: Vec<String> = Vec::new();
    for line in said.unwrap_or_default().lines() {
        if let [origin, codename, uri] = line.split(' ').collect::<Vec<_>>()[..]
            && origin == "Debian"
            && codename.split('-').next() == Some(SUITE)
        {
            let source = format!("deb {uri} {codename} main");
            if !sources.contains(&source) {
                sources.push(source);
            }
        }
    }
    sources
}

/// What is committed, and nothing else.
fn clone(inside: &Inside) -> Result<(), Error> {
    let changed = output(Command::new("git").args(["status", "--porcelain"]).current_dir(root()))?;
    if !changed.trim().is_empty() {
        println!("what is not committed is not tried");
    }
    let head = output(Command::new("git").args(["rev-parse", "HEAD"]).current_dir(root()))?;
    println!("cloning {}", head.trim());
    let to = inside.project();
    let git = |arguments: &[&str]| command::run(Command::new("git").arg("-C").arg(&to).args(arguments));
    make_directory(&to)?;
    git(&["init", "--quiet"])?;
    git(&["fetch", "--quiet", &root().to_string_lossy(), "HEAD"])?;
    Ok(git(&["checkout", "--quiet", "--detach", "FETCH_HEAD"])?)
}

fn make_directory(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).map_err(|source| Error::File {
        path: path.to_owned(),
        source,
    })
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(|source| Error::File {
        path: path.to_owned(),
        source,
    })
}

/// Removes a root directory. Nothing is mounted there as far as this process can see; that is looked at all the same, because what was
/// mounted would be removed too.
fn remove(path: &Path) -> Result<(), Error> {
    let failed = |source| Error::File {
        path: path.to_owned(),
        source,
    };
    if !path.exists() {
        return Ok(());
    }
    let own = path.canonicalize().map_err(failed)?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(failed)?;
    let below = |line: &str| line.split(' ').nth(4).is_some_and(|at| Path::new(at).starts_with(&own));
    if mounts.lines().any(below) {
        return Err(failed(io::ErrorKind::ResourceBusy.into()));
    }
    fs::remove_dir_all(path).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_says_what_is_run() {
        let readme = fs::read_to_string(root().join("README.md")).unwrap();
        let all = commands(&Part::ALL, &readme).unwrap();
        assert_eq!(
            all[..2],
            ["cargo run --release -p weft-cli -- demo", "cargo xtask test"]
        );
        assert!(commands(&Part::ALL, "something else").is_err());
        // The package is installed once, and always before the example.
        let example = commands(&[Part::Example], &readme).unwrap();
        assert_eq!(example.iter().filter(|line| line.contains("pip install .")).count(), 1);
        assert_eq!(all[2..], example[..]);
    }
}
