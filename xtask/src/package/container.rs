//! The container file is held against what it builds: no engine that could build it is needed for that.

use std::collections::BTreeSet;
use std::fs;

use clap::Parser;

use crate::command::root;

/// An instruction: its name in capitals, and the rest of its line with the lines that continue it.
fn instructions(text: &str) -> Vec<(String, String)> {
    let mut all: Vec<(String, String)> = Vec::new();
    let mut continued = false;
    for line in text.lines() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (words, more) = line
            .strip_suffix('\\')
            .map_or((line, false), |words| (words.trim_end(), true));
        if continued {
            let (_, rest) = all.last_mut().expect("a continued line comes after another one");
            rest.push(' ');
            rest.push_str(words);
        } else {
            let (name, rest) = words.split_once(' ').unwrap_or((words, ""));
            all.push((name.to_owned(), rest.trim().to_owned()));
        }
        continued = more;
    }
    assert!(!continued, "the last line is continued by nothing");
    all
}

const KNOWN: &[&str] = &[
    "FROM",
    "ARG",
    "ENV",
    "WORKDIR",
    "COPY",
    "RUN",
    "USER",
    "EXPOSE",
    "LABEL",
    "ENTRYPOINT",
    "CMD",
];

#[test]
fn it_builds_what_is_there() {
    let text = fs::read_to_string(root().join("Containerfile")).unwrap();
    let all = instructions(&text);
    assert_eq!(all.first().map(|(name, _)| name.as_str()), Some("FROM"));
    let mut stages = BTreeSet::new();
    let mut tasks = 0;
    for (name, rest) in &all {
        assert!(
            KNOWN.contains(&name.as_str()),
            "{name} is no instruction that is used here"
        );
        let words: Vec<&str> = rest.split_whitespace().collect();
        match name.as_str() {
            "FROM" => {
                let image = words[0];
                assert!(
                    image.contains(':') && !image.ends_with(":latest"),
                    "{image} says no version"
                );
                if let [_, "AS", stage] = words[..] {
                    stages.insert(stage.to_owned());
                }
            }
            "COPY" => match words[0].strip_prefix("--from=") {
                Some(stage) => assert!(stages.contains(stage), "no stage is called {stage}"),
                None => assert!(root().join(words[0]).exists(), "{} is not there", words[0]),
            },
            "RUN" => {
                for line in rest.split("&&") {
                    let Some(arguments) = line.trim().strip_prefix("cargo xtask") else {
                        continue;
                    };
                    let words = std::iter::once("xtask").chain(arguments.split_whitespace());
                    crate::Arguments::try_parse_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
                    tasks += 1;
                }
            }
            "ENTRYPOINT" | "CMD" => {
                serde_json::from_str::<Vec<String>>(rest).unwrap_or_else(|error| panic!("{name} {rest}: {error}"));
            }
            _ => {}
        }
    }
    assert!(tasks > 0, "nothing is built");
    // The compiler is the one that the suite is held to.
    let toolchain: toml::Table = fs::read_to_string(root().join("rust-toolchain.toml"))
        .unwrap()
        .parse()
        .unwrap();
    let channel = toolchain["toolchain"]["channel"].as_str().unwrap();
    assert!(
        all[0].1.contains(&format!("rust:{channel}-")),
        "{} is not Rust {channel}",
        all[0].1
    );
}

#[test]
fn continued_lines_are_one() {
    let all = instructions("# first\nFROM a:1 AS b\nRUN one && \\\n    # between\n    two\n\nCMD [\"x\"]\n");
    let want = [("FROM", "a:1 AS b"), ("RUN", "one && two"), ("CMD", "[\"x\"]")];
    assert_eq!(all, want.map(|(name, rest)| (name.to_owned(), rest.to_owned())));
}
