//! The Python that programs of others are installed for: which one it is, and what it tells.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::de::DeserializeOwned;

use crate::complaint::{Complain, Complaint, Exit};
use crate::program;

/// Before what is told: modules print as they like when they are loaded.
const MARK: &str = "WEFT ";
/// The directory where the user happens to be is nothing to import from.
const NOT_FROM_HERE: &str = "import sys\nif sys.path[:1] == ['']: del sys.path[0]\n";

/// The Python that was named; else the one that runs this command, where one does; else the usual one.
pub fn interpreter(named: Option<&Path>) -> PathBuf {
    let again = program::again().get_program().to_owned();
    let is_python = Path::new(&again)
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("python"));
    match named {
        Some(python) => python.to_owned(),
        None if is_python => again.into(),
        None => "python3".into(),
    }
}

/// What a script prints as JSON after [`MARK`], on the last line that begins with it; or the script's complaint, where it tells nothing.
pub fn ask<T: DeserializeOwned>(python: &Path, script: &str) -> Result<Result<T, String>, Complaint> {
    let shown = python.display();
    let output = Command::new(python)
        .args(["-c", &format!("{NOT_FROM_HERE}{script}")])
        .output();
    let output = output.or_complain(Exit::Usage, || format!("{shown} cannot be started."))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let told = said.lines().rev().find_map(|line| line.strip_prefix(MARK));
    let told = told.and_then(|told| serde_json::from_str(told).ok());
    Ok(told.ok_or_else(|| String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}
