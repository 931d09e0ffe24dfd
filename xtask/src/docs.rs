//! `cargo xtask docs`: the pages of the repository as a site, with the API of Rust and Python, and every link checked.
//!
//! Pages keep their places, so that the links between them hold on the site as they do in the repository. Links to anything else that is in the
//! repository lead to it there; links to what is nowhere are errors.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};

use thiserror::Error;

use crate::command::{self, cargo, root, run, works};

#[derive(clap::Args)]
pub struct Arguments {
    /// Only check that every link of every page leads somewhere, and that every page is in docs/SUMMARY.md.
    #[arg(long)]
    check: bool,
}

#[derive(Debug, Error)]
pub enum Error {
    #[error("{} cannot be used: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("{}", .0.join("\n"))]
    Wrong(Vec<String>),
    #[error(transparent)]
    Command(#[from] command::Error),
}

/// What the site is built by, and where it is put where it is not installed.
const MDBOOK: &str = "0.5.4";
const REPOSITORY: &str = "https://github.com/weft-ai/weft/blob/main";
/// Pages beside those under docs/.
const OTHERS: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/README.md",
];
const SUMMARY: &str = "docs/SUMMARY.md";
/// The API, as a part of the summary.
const API: &str = "
# The API

- [Rust](api/rust.md)
- [Python](api/python.md)
";
const CRATES: &[(&str, &str)] = &[
    ("weft", "agents, memory, transfers, communicators: what people call"),
    ("weft_plan", "spans, schedules, platforms, costs; pure"),
    (
        "weft_model",
        "systems of GPUs, training, serving, generated networks; pure",
    ),
    ("weft_protocol", "the state machines and the `Transport` trait; pure"),
    ("weft_fabric", "the transports and the memory they touch"),
    ("weft_sim", "the simulated world, scenarios"),
];

pub fn build(arguments: &Arguments) -> Result<ExitCode, Error> {
    let pages = Pages::read(&root())?;
    pages.check()?;
    if arguments.check {
        println!("{} pages, every link of which leads somewhere", pages.pages.len());
        return Ok(ExitCode::SUCCESS);
    }
    let place = root().join("target/docs");
    let (source, site) = (place.join("src"), place.join("site"));
    remove(&place)?;
    pages.stage(&source)?;
    copy(&root().join("book.toml"), &place.join("book.toml"))?;
    run(mdbook()?.arg("build").arg(&place).arg("--dest-dir").arg(&site))?;
    run(cargo().args([
        "doc",
        "--no-deps",
        "-p",
        "weft",
        "-p",
        "weft-plan",
        "-p",
        "weft-protocol",
        "-p",
        "weft-fabric",
        "-p",
        "weft-sim",
    ]))?;
    copy_all(&root().join("target/doc"), &site.join("api/rust"))?;
    println!("the site is in target/docs/site/index.html");
    Ok(ExitCode::SUCCESS)
}

/// `mdbook`, installed by cargo where it is not there.
fn mdbook() -> Result<Command, Error> {
    if works("mdbook", &["--version"]) {
        return Ok(Command::new("mdbook"));
    }
    let tools = root().join("target/tools");
    let own = tools.join("bin/mdbook");
    if !works(&own.to_string_lossy(), &["--version"]) {
        run(cargo()
            .args(["install", "mdbook", "--version", MDBOOK, "--locked", "--root"])
            .arg(&tools))?;
    }
    Ok(Command::new(own))
}

/// The pages of the repository, by their paths in it.
struct Pages {
    root: PathBuf,
    pages: Vec<(PathBuf, String)>,
}

impl Pages {
    fn read(root: &Path) -> Result<Pages, Error> {
        let mut paths: Vec<PathBuf> = OTHERS.iter().map(PathBuf::from).collect();
        let mut waiting = vec![PathBuf::from("docs")];
        while let Some(directory) = waiting.pop() {
            for path in children(&root.join(&directory))? {
                let within = directory.join(path.file_name().unwrap_or_default());
                if path.is_dir() {
                    waiting.push(within);
                } else if path.extension().is_some_and(|kind| kind == "md") {
                    paths.push(within);
                }
            }
        }
        paths.sort();
        let read = |path: PathBuf| {
            let text = fs::read_to_string(root.join(&path)).map_err(unusable(&path))?;
            Ok((path, text))
        };
        Ok(Pages {
            root: root.to_owned(),
            pages: paths.into_iter().map(read).collect::<Result<_, Error>>()?,
        })
    }

    /// That every link leads somewhere, and every page can be found.
    fn check(&self) -> Result<(), Error> {
        let mut wrong = Vec::new();
        let mut listed = BTreeSet::new();
        for (page, text) in &self.pages {
            for link in links(text) {
                let Some(target) = within(page, link) else { continue };
                if !self.root.join(&target).exists() {
                    wrong.push(format!("{}: {link} leads nowhere", page.display()));
                }
                if page == Path::new(SUMMARY) {
                    listed.insert(target);
                }
            }
        }
        let unlisted = self
            .pages
            .iter()
            .map(|(page, _)| page)
            .filter(|page| !listed.contains(*page));
        let unlisted = unlisted.filter(|page| *page != Path::new(SUMMARY));
        wrong.extend(unlisted.map(|page| format!("{} is not in {SUMMARY}", page.display())));
        if wrong.is_empty() {
            Ok(())
        } else {
            Err(Error::Wrong(wrong))
        }
    }

    /// Writes the pages as the site takes them.
    fn stage(&self, to: &Path) -> Result<(), Error> {
        let is_page = |target: &Path| self.pages.iter().any(|(page, _)| page == target);
        for (page, text) in &self.pages {
            let text = relinked(text, |link| {
                let target = within(page, link)?;
                let fragment = link.find('#').map_or("", |at| &link[at..]);
                match (is_page(&target), target.starts_with("docs/images")) {
                    // The summary lies where the site begins.
                    (true, _) if page == Path::new(SUMMARY) => Some(format!("{}{fragment}", target.display())),
                    (true, _) | (_, true) => None,
                    _ => Some(format!("{REPOSITORY}/{}{fragment}", target.display())),
                }
            });
            match page == Path::new(SUMMARY) {
                true => write(&to.join("SUMMARY.md"), &format!("{text}{API}"))?,
                false => write(&to.join(page), &text)?,
            }
        }
        copy_all(&self.root.join("docs/images"), &to.join("docs/images"))?;
        let crates = CRATES
            .iter()
            .map(|(name, what)| format!("- [`{name}`](rust/{name}/index.html): {what}\n"));
        write(
            &to.join("api/rust.md"),
            &format!("# The API of Rust\n\n{}", crates.collect::<String>()),
        )?;
        let path = self.root.join("crates/python/python/weft/_weft.pyi");
        let stub = fs::read_to_string(&path).map_err(unusable(&path))?;
        write(&to.join("api/python.md"), &python_page(&stub))
    }
}

/// A page a class of the stub, all in one.
fn python_page(stub: &str) -> String {
    let mut page = String::from(
        "# The API of Python\n\nEverything here is in the package `weft`; `help` shows the same. Exceptions are described in `weft/_errors.py`.\n",
    );
    let mut body = String::new();
    let mut class: Option<&str> = None;
    let mut finish = |class: &mut Option<&str>, body: &mut String| {
        if let Some(name) = class.take() {
            page.push_str(&format!("\n## weft.{name}\n\n```python\n{}\n```\n", body.trim_end()));
        }
        body.clear();
    };
    for line in stub.lines() {
        if let Some(rest) = line.strip_prefix("class ") {
            finish(&mut class, &mut body);
            let name = rest.split([':', '(']).next().unwrap_or_default();
            // Those with an underscore are for type checkers alone.
            class = Some(name).filter(|name| !name.starts_with('_'));
        } else if !line.is_empty() && !line.starts_with([' ', ')']) {
            finish(&mut class, &mut body);
        }
        if class.is_some() {
            body.push_str(line);
            body.push('\n');
        }
    }
    finish(&mut class, &mut body);
    page
}

/// What a link of a page leads to within the repository; none, if it leads elsewhere.
fn within(page: &Path, link: &str) -> Option<PathBuf> {
    let path = link.split('#').next().unwrap_or_default();
    if path.is_empty() || path.contains("://") || path.starts_with("mailto:") {
        return None;
    }
    let mut target = page.parent().unwrap_or(Path::new("")).to_owned();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => {
                target.pop();
            }
            Component::Normal(name) => target.push(name),
            _ => {}
        }
    }
    Some(target)
}

/// Where the targets of links are in a page. Code is not looked at.
fn link_ranges(text: &str) -> Vec<std::ops::Range<usize>> {
    let mut found = Vec::new();
    let (mut at, mut fenced) = (0, false);
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            let mut code = false;
            let bytes = line.as_bytes();
            for (place, byte) in bytes.iter().enumerate() {
                match byte {
                    b'`' => code = !code,
                    b'(' if !code && place > 0 && bytes[place - 1] == b']' => {
                        if let Some(end) = line[place..].find(')') {
                            found.push(at + place + 1..at + place + end);
                        }
                    }
                    _ => {}
                }
            }
        }
        at += line.len();
    }
    found
}

fn links(text: &str) -> impl Iterator<Item = &str> {
    link_ranges(text).into_iter().map(|range| &text[range])
}

/// The page with some of its links changed.
fn relinked(text: &str, change: impl Fn(&str) -> Option<String>) -> String {
    let mut changed = String::new();
    let mut from = 0;
    for range in link_ranges(text) {
        if let Some(link) = change(&text[range.clone()]) {
            changed.push_str(&text[from..range.start]);
            changed.push_str(&link);
            from = range.end;
        }
    }
    changed.push_str(&text[from..]);
    changed
}

fn children(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let listed = fs::read_dir(directory).map_err(unusable(directory))?;
    let path = |entry: std::io::Result<fs::DirEntry>| entry.map(|entry| entry.path()).map_err(unusable(directory));
    listed.map(path).collect()
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    make_parent(path)?;
    fs::write(path, text).map_err(unusable(path))
}

fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    make_parent(to)?;
    fs::copy(from, to).map(drop).map_err(unusable(from))
}

fn copy_all(from: &Path, to: &Path) -> Result<(), Error> {
    for path in children(from)? {
        let to = to.join(path.file_name().unwrap_or_default());
        match path.is_dir() {
            true => copy_all(&path, &to)?,
            false => copy(&path, &to)?,
        }
    }
    Ok(())
}

fn make_parent(path: &Path) -> Result<(), Error> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(unusable(parent))
}

fn remove(place: &Path) -> Result<(), Error> {
    match place.exists() {
        true => fs::remove_dir_all(place).map_err(unusable(place)),
        false => Ok(()),
    }
}

fn unusable(path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_link_of_every_page_leads_somewhere() {
        let pages = Pages::read(&root()).unwrap();
        assert!(pages.pages.len() > 20);
        pages.check().unwrap_or_else(|error| panic!("{error}"));
    }

    #[test]
    fn links_are_found_and_code_is_left_alone() {
        let text = "[a](b.md#c) `[no](code.md)` ![i](images/x.png)\n```\n[no](fenced.md)\n```\n[e](https://x.y/z)\n";
        assert_eq!(
            links(text).collect::<Vec<_>>(),
            ["b.md#c", "images/x.png", "https://x.y/z"]
        );
        let page = Path::new("docs/decisions/0001.md");
        assert_eq!(within(page, "../../ARCHITECTURE.md#x"), Some("ARCHITECTURE.md".into()));
        assert_eq!(within(page, "0002.md"), Some("docs/decisions/0002.md".into()));
        assert_eq!(within(page, "#here"), None);
        assert_eq!(within(page, "https://x.y/z"), None);
        let changed = relinked(text, |link| (link == "b.md#c").then(|| "elsewhere".to_owned()));
        assert!(changed.starts_with("[a](elsewhere) `[no](code.md)`") && changed.ends_with("(https://x.y/z)\n"));
    }

    #[test]
    fn the_stub_becomes_a_page() {
        let stub = "import x\n\nclass _Hidden(Protocol):\n    def a(self) -> int: ...\n\nclass Agent:\n    \"\"\"Moves.\"\"\"\n\n    def b(self) -> int: ...\n\n_X = 1\n\nclass Peer:\n    c: int\n";
        let page = python_page(stub);
        assert!(
            page.contains("## weft.Agent\n\n```python\nclass Agent:\n    \"\"\"Moves.\"\"\""),
            "{page}"
        );
        assert!(
            page.contains("## weft.Peer") && !page.contains("_Hidden") && !page.contains("_X"),
            "{page}"
        );
    }
}
