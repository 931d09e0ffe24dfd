//! The files of the house as the checks see them: which lines are code, which are tests, and which are comments.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{Error, output, root};

/// One file.
#[derive(Debug)]
pub struct Source {
    /// From the root of the repository.
    pub path: String,
    pub lines: Vec<Line>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    pub text: String,
    pub kind: LineKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineKind {
    Blank,
    Comment,
    Code,
    /// Code that only the tests have: a file of tests, a module of them, an example.
    Test,
}

impl Source {
    pub fn of(path: &str, text: &str) -> Source {
        let whole_file = ["/tests/", "/tests.rs", "/benches/", "/examples/", "_tests/"]
            .iter()
            .any(|part| path.contains(part));
        let comment = if path.ends_with(".py") { "#" } else { "//" };
        let mut module: Option<usize> = None;
        let mut announced = false;
        let lines = text.lines().map(|text| {
            let trimmed = text.trim();
            let indent = text.len() - text.trim_start().len();
            let within = whole_file || module.is_some();
            if module.is_none() && announced && trimmed.starts_with("mod ") && trimmed.ends_with('{') {
                module = Some(indent);
            } else if module == Some(indent) && trimmed == "}" {
                module = None;
            }
            announced = trimmed == "#[cfg(test)]" || (announced && trimmed.starts_with("#["));
            let kind = match trimmed {
                "" => LineKind::Blank,
                _ if trimmed.starts_with(comment) => LineKind::Comment,
                _ if within => LineKind::Test,
                _ => LineKind::Code,
            };
            let text = text.to_owned();
            Line { text, kind }
        });
        Source {
            path: path.to_owned(),
            lines: lines.collect(),
        }
    }

    pub fn count(&self, wanted: impl Fn(LineKind) -> bool) -> usize {
        self.lines.iter().filter(|line| wanted(line.kind)).count()
    }

    /// The room that it belongs to, or the directory beside the rooms.
    pub fn room(&self) -> &str {
        let below = self.path.strip_prefix("crates/").unwrap_or(&self.path);
        below.split('/').next().unwrap_or("")
    }
}

/// Every tracked or new file whose name ends so, in the order of their paths.
pub fn read(endings: &[&str]) -> Result<Vec<Source>, Error> {
    let mut git = Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    let listed = output(git.current_dir(root()))?;
    let wanted = listed
        .lines()
        .filter(|path| endings.iter().any(|end| path.ends_with(end)));
    let mut paths: Vec<&str> = wanted.filter(|path| root().join(path).is_file()).collect();
    paths.sort_unstable();
    paths.dedup();
    paths
        .into_iter()
        .map(|path| Ok(Source::of(path, &text(path)?)))
        .collect()
}

/// A file, by its path from the root of the repository.
pub fn text(path: impl AsRef<Path>) -> Result<String, Error> {
    let path: PathBuf = root().join(path);
    fs::read_to_string(&path).map_err(|source| Error::File { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_comments_and_code_are_told_apart() {
        let text = "//! A file.\n\nfn a() {}\n#[cfg(test)]\nmod tests {\n    // Why.\n    fn b() {}\n}\nfn c() {}\n";
        let kinds = |path| -> Vec<LineKind> { Source::of(path, text).lines.iter().map(|line| line.kind).collect() };
        use LineKind::{Blank, Code, Comment, Test};
        assert_eq!(
            kinds("crates/plan/src/a.rs"),
            [Comment, Blank, Code, Code, Code, Comment, Test, Test, Code]
        );
        assert_eq!(kinds("crates/plan/tests/a.rs")[2], Test);
        assert_eq!(Source::of("crates/plan/src/a.rs", text).room(), "plan");
        assert_eq!(Source::of("xtask/src/a.rs", text).room(), "xtask");
    }
}
