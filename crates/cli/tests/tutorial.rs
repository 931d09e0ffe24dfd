//! The commands of docs/tutorial.md, as they stand there, between two network namespaces.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use support::{Scratch, text};

/// Longer than all of it takes.
const LONG: Duration = Duration::from_secs(300);

#[test]
fn every_command_of_the_tutorial_works() {
    let works = |program: &str, arguments: &[&str]| {
        let tried = Command::new(program)
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        tried.is_ok_and(|status| status.success())
    };
    // Namespaces of this test's own, so that others on this machine may have theirs.
    let mine = std::process::id();
    let probe = format!("weft-probe-{mine}");
    if !works("ip", &["netns", "add", &probe]) {
        eprintln!("left out: the tutorial needs root and `ip`");
        return;
    }
    works("ip", &["netns", "delete", &probe]);
    let page = std::fs::read_to_string(repository().join("docs/tutorial.md")).unwrap();
    let python = python();
    if python.is_none() {
        eprintln!("left out: the Python sections of the tutorial, because no Python here has the package");
    }
    let blocks = blocks(&page);
    assert!(blocks.iter().any(|(kind, _)| kind == "sh") && blocks.iter().any(|(kind, _)| kind == "sh,python"));
    let wanted = blocks
        .iter()
        .filter(|(kind, _)| kind == "sh" || kind == "sh,python" && python.is_some());
    let script: String = wanted.map(|(_, text)| format!("{text}\n")).collect();
    let script = script
        .replace("weft-a", &format!("wa{mine}"))
        .replace("weft-b", &format!("wb{mine}"));
    let scratch = Scratch::new("tutorial");
    let file = scratch.path("tutorial.sh");
    std::fs::write(&file, format!("set -euxo pipefail\n{script}\necho all of it\n")).unwrap();
    let command = Path::new(env!("CARGO_BIN_EXE_weft")).parent().unwrap().to_owned();
    let mut path = std::ffi::OsString::from(command);
    if let Some(python) = &python {
        path.push(":");
        path.push(python.parent().unwrap());
    }
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let out = std::fs::File::create(scratch.path("said")).unwrap();
    let mut bash = Command::new("bash");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("WEFT_") {
            bash.env_remove(name);
        }
    }
    let mut shell = bash
        .arg(&file)
        .current_dir(&scratch.0)
        .env("PATH", path)
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stdout(out.try_clone().unwrap())
        .stderr(out)
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let status = loop {
        match shell.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if begun.elapsed() > LONG => {
                shell.kill().unwrap();
                shell.wait().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    // Whatever went wrong, nothing of it stays.
    for host in ["wa", "wb"] {
        for process in text(
            &Command::new("ip")
                .args(["netns", "pids", &format!("{host}{mine}")])
                .output()
                .unwrap()
                .stdout,
        )
        .lines()
        {
            works("kill", &["-9", process]);
        }
        works("ip", &["netns", "delete", &format!("{host}{mine}")]);
    }
    let said = text(&std::fs::read(scratch.path("said")).unwrap());
    assert!(status.is_some_and(|status| status.success()), "{said}");
    assert!(said.trim_end().ends_with("all of it"), "{said}");
    assert_eq!(said.matches("\nthe same\n").count(), 2, "{said}");
    if python.is_some() {
        for words in [
            "8000000 bytes over tcp; the last is 999999",
            "rank 0 of 2: 3",
            "rank 1 of 2: 3",
        ] {
            assert!(said.contains(words), "no {words:?} in {said}");
        }
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A Python that has the package: one that was named, or that of the suite.
fn python() -> Option<PathBuf> {
    let named = std::env::var_os("TUTORIAL_PYTHON").map(PathBuf::from);
    let candidates = named.into_iter().chain([repository().join(".venv/bin/python3")]);
    candidates.into_iter().find(|python| {
        let tried = Command::new(python)
            .args(["-c", "import weft, numpy"])
            .stderr(Stdio::null())
            .status();
        tried.is_ok_and(|status| status.success())
    })
}

/// The fenced blocks of a page: what they are, and what is in them.
fn blocks(page: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut open: Option<(String, String)> = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => found.extend(open.take()),
            (Some(kind), None) => open = Some((kind.to_owned(), String::new())),
            (None, Some((_, text))) => {
                text.push_str(line);
                text.push('\n');
            }
            (None, None) => {}
        }
    }
    found
}
