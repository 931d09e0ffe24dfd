//! Virtual environments in the repository, made when they are not there.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{Error, root, run, works};

/// A virtual environment of ours.
pub struct Environment {
    path: PathBuf,
}

impl Environment {
    pub fn make(name: &str) -> Result<Environment, Error> {
        Environment::make_for(name, Path::new("python3"))
    }

    /// Of a certain Python. One that is there stays what it is.
    pub fn make_for(name: &str, python: &Path) -> Result<Environment, Error> {
        let path = root().join(name);
        let environment = Environment { path };
        if !works(
            &environment.program("python").to_string_lossy(),
            &["-m", "pip", "--version"],
        ) {
            run(Command::new(python)
                .args(["-m", "venv", "--clear"])
                .arg(&environment.path))?;
        }
        Ok(environment)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn python(&self) -> Command {
        Command::new(self.program("python"))
    }

    /// Its programs, and those of everybody else.
    pub fn search_path(&self) -> OsString {
        let mut path = self.path.join("bin").into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        path
    }

    /// A program that a package has brought.
    pub fn installed(&self, name: &str) -> Command {
        Command::new(self.program(name))
    }

    pub fn pip_install(&self, what: &[&str]) -> Result<(), Error> {
        let arguments = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        run(self.python().args(arguments).args(what).current_dir(root()))
    }

    fn program(&self, name: &str) -> PathBuf {
        self.path.join("bin").join(name)
    }
}
