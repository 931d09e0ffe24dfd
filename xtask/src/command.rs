//! Running other programs, and saying clearly when that did not work.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use thiserror::Error;

pub use weft_testing::works;

#[derive(Debug, Error)]
pub enum Error {
    #[error("{program} could not be started: {source}")]
    NotStarted { program: String, source: std::io::Error },
    #[error("`{line}` failed{}", code.map_or(String::new(), |code| format!(" with exit code {code}")))]
    Failed { line: String, code: Option<i32> },
    #[error("{program} said something that we do not understand: {said:?}")]
    NotUnderstood { program: String, said: String },
    #[error("these packages are missing, and only root can install them: apt-get install {}", packages.join(" "))]
    NotRoot { packages: Vec<&'static str> },
    #[error("cannot use {}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
}

/// The root of the repository.
pub fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    if std::env::var_os("CI").is_some() {
        // Nothing is built a second time there, and what that would save takes gigabytes.
        command.env("CARGO_INCREMENTAL", "0");
    }
    command
}

pub fn run(command: &mut Command) -> Result<(), Error> {
    let status = command.status().map_err(|source| not_started(command, source))?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::Failed {
            line: line(command),
            code: status.code(),
        })
    }
}

/// What a program prints; what it complains about goes to our own standard error.
pub fn output(command: &mut Command) -> Result<String, Error> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|source| not_started(command, source))?;
    if !output.status.success() {
        return Err(Error::Failed {
            line: line(command),
            code: output.status.code(),
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What a program prints, and whether it also ended well.
pub fn output_so_far(command: &mut Command) -> Result<(String, bool), Error> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|source| not_started(command, source))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok((said, output.status.success()))
}

/// A program to try, with its arguments, and the Debian package to install where it does not work.
pub type Needed = (&'static [&'static str], &'static str);

/// Installs what does not work yet.
pub fn install_missing(needed: &[Needed]) -> Result<(), Error> {
    let missing = needed.iter().filter(|(probe, _)| !works(probe[0], &probe[1..]));
    install(&missing.map(|(_, package)| *package).collect::<Vec<_>>())
}

/// Installs Debian packages. Without root nothing can be installed, but it can be said what to install.
pub fn install(packages: &[&'static str]) -> Result<(), Error> {
    if packages.is_empty() {
        return Ok(());
    }
    if output(Command::new("id").arg("-u"))?.trim() != "0" {
        return Err(Error::NotRoot {
            packages: packages.to_vec(),
        });
    }
    run(Command::new("apt-get").args(["update", "-qq"]))?;
    run(Command::new("apt-get")
        .args(["install", "-qq", "-y", "--no-install-recommends"])
        .args(packages))
}

fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn not_started(command: &Command, source: std::io::Error) -> Error {
    Error::NotStarted {
        program: command.get_program().to_string_lossy().into_owned(),
        source,
    }
}
