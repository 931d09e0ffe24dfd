//! The programs that run in the machines: test binaries as the suite builds them, and the command as people use it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Part;
use crate::command::{Error, cargo, output};

/// Executables by name of their target.
#[derive(Debug)]
pub struct Built {
    tests: HashMap<String, PathBuf>,
    programs: HashMap<String, PathBuf>,
}

impl Built {
    /// Builds what `parts` need.
    pub fn make(parts: &[Part]) -> Result<Built, Error> {
        let mut tests = HashMap::new();
        let mut names: Vec<&str> = parts.iter().flat_map(|part| part.tests()).copied().collect();
        names.sort_unstable();
        names.dedup();
        if !names.is_empty() {
            let mut command = cargo();
            command.args(["test", "--no-run", "--quiet", "--workspace", MESSAGES]);
            names.iter().for_each(|name| {
                command.args(["--test", name]);
            });
            tests = executables(&output(&mut command)?);
        }
        let mut programs = HashMap::new();
        if parts.iter().any(|part| part.needs_weft()) {
            let build = ["build", "--release", "--quiet", "--package", "weft-cli", MESSAGES];
            programs = executables(&output(cargo().args(build))?);
        }
        Ok(Built { tests, programs })
    }

    pub fn test(&self, name: &str) -> Result<&Path, Error> {
        find(&self.tests, name)
    }

    /// The command, with all optimisations.
    pub fn weft(&self) -> Result<&Path, Error> {
        find(&self.programs, "weft")
    }
}

/// Errors and warnings go to people, everything else comes as JSON.
const MESSAGES: &str = "--message-format=json-render-diagnostics";

fn find<'a>(executables: &'a HashMap<String, PathBuf>, name: &str) -> Result<&'a Path, Error> {
    executables
        .get(name)
        .map(PathBuf::as_path)
        .ok_or_else(|| Error::NotUnderstood {
            program: "cargo".to_owned(),
            said: format!("nothing of an executable {name}"),
        })
}

/// The executables among what cargo says it has made.
fn executables(said: &str) -> HashMap<String, PathBuf> {
    let messages = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages
        .filter_map(|message| {
            let name = message["target"]["name"].as_str()?;
            let path = message["executable"].as_str()?;
            Some((name.to_owned(), PathBuf::from(path)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_found_among_other_messages() {
        let said = r#"{"reason":"compiler-artifact","target":{"name":"weft_fabric"},"executable":null}
not JSON
{"reason":"compiler-artifact","target":{"name":"verbs"},"executable":"/target/verbs-1"}
{"reason":"build-finished","success":true}"#;
        let found = executables(said);
        assert_eq!(found.len(), 1);
        assert_eq!(found["verbs"], Path::new("/target/verbs-1"));
    }
}
