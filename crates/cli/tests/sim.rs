//! `weft sim` as a person and a script see it.

use std::path::PathBuf;
use std::process::{Command, Output};

fn weft(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
    command.env("NO_COLOR", "1").args(arguments);
    command.output().expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the command speaks UTF-8")
}

/// A directory of its own for a test, gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("weft-sim-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a scratch directory");
        Scratch(path)
    }
    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const SMALL: &str = "name = 'small'\nfidelities = ['analytical', 'flow', 'packet']\nseed = 5\n\
[cluster.fabric.fat-tree]\nhosts = 16\ntiers = 2\nradix = 8\nwire = { bandwidth = '100 Gb/s', latency = '1 µs' }\n\
[workload.collective]\ncollective = 'all-to-all'\nalgorithm = 'direct'\nbytes = '1 MiB'\n\
[packet]\nloss = 0.001\n";

#[test]
fn the_same_scenario_gives_the_same_bytes() {
    let scratch = Scratch::new("same");
    let file = scratch.file("small.toml");
    std::fs::write(&file, SMALL).unwrap();
    for form in [&["--json"][..], &["--csv"], &[]] {
        let run = |trace: &str| {
            let path = scratch.file(trace);
            let mut arguments = vec!["sim", "run", &file, "--trace", &path];
            arguments.extend(form);
            let output = weft(&arguments);
            assert!(output.status.success(), "{}", text(&output.stderr));
            (output.stdout, std::fs::read(&path).unwrap())
        };
        let (first, second) = (run("first.json"), run("second.json"));
        assert!(first == second);
        assert!(text(&first.1).starts_with("{\"displayTimeUnit\""));
    }
}

#[test]
fn mistakes_are_told_with_line_and_field() {
    let scratch = Scratch::new("mistakes");
    let file = scratch.file("bad.toml");
    for (old, new, complaint) in [
        (
            "radix = 8",
            "radix = 7",
            "line 7, at `cluster.fabric.radix`: 7 is not a multiple of 2",
        ),
        ("tiers = 2", "teirs = 2", "line 6, column 1, at `teirs`"),
        ("'1 MiB'", "'1 MiX'", "line 12, column 9, at `bytes`"),
        (
            "'direct'",
            "'dirext'",
            "line 11, at `workload.algorithm`: `dirext` is no algorithm",
        ),
    ] {
        std::fs::write(&file, SMALL.replacen(old, new, 1)).unwrap();
        let output = weft(&["sim", "run", &file]);
        assert_eq!(output.status.code(), Some(2));
        let said = text(&output.stderr);
        assert!(said.contains(complaint), "{said}");
    }
}

#[test]
fn a_sweep_goes_on_where_it_was() {
    let scratch = Scratch::new("sweep");
    let file = scratch.file("small.toml");
    std::fs::write(&file, SMALL.replace(", 'packet'", "")).unwrap();
    let (rows, drawing) = (scratch.file("rows.csv"), scratch.file("times.svg"));
    let arguments = [
        "sim",
        "sweep",
        &file,
        "--vary",
        "workload.collective.bytes=1MiB,4MiB",
        "--vary",
        "workload.collective.algorithm=direct,pairwise,bruck",
        "--out",
        &rows,
        "--svg",
        &drawing,
    ];
    let first = weft(&arguments);
    assert!(first.status.success(), "{}", text(&first.stderr));
    assert!(text(&first.stdout).starts_with("6 points, 6 of them new"));
    let whole = std::fs::read_to_string(&rows).unwrap();
    assert_eq!(whole.lines().count(), 1 + 6 * 2);
    let drawn = std::fs::read_to_string(&drawing).unwrap();
    assert_eq!(drawn.matches("<circle").count(), 6 * 2, "a point a row");
    // Half of it is lost: only that is run again.
    let kept: Vec<&str> = whole.lines().take(1 + 3 * 2).collect();
    std::fs::write(&rows, format!("{}\n", kept.join("\n"))).unwrap();
    let second = weft(&arguments);
    assert!(text(&second.stdout).starts_with("6 points, 3 of them new"));
    let mut again: Vec<String> = std::fs::read_to_string(&rows)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect();
    let mut before: Vec<String> = whole.lines().map(str::to_owned).collect();
    again.sort();
    before.sort();
    assert_eq!(again, before);
    let other = weft(&["sim", "sweep", &file, "--vary", "seed=1,2", "--out", &rows]);
    assert_eq!(other.status.code(), Some(2));
}

#[test]
fn a_trace_is_replayed_and_a_wrong_one_is_refused_with_the_reason() {
    let scratch = Scratch::new("replay");
    let file = scratch.file("step.json");
    let node = |id: u32, of: &str| format!("{{\"id\": \"{id}\", \"name\": \"n{id}\", {of}}}\n");
    let text_of = |ids: [u32; 2]| {
        [
            "{\"version\": \"0.0.4\"}\n".to_owned(),
            node(ids[0], "\"type\": \"COMP_NODE\", \"durationMicros\": \"1000\""),
            node(
                ids[1],
                "\"type\": \"COMM_COLL_NODE\", \"dataDeps\": [\"1\"], \"attr\": [{\"name\": \"comm_type\", \"int64Val\": \"0\"}, {\"name\": \"comm_size\", \"int64Val\": \"1048576\"}]",
            ),
        ]
        .concat()
    };
    std::fs::write(&file, text_of([1, 2])).unwrap();
    let said = weft(&["sim", "replay", &file, "--gpus", "8", "--system", "dgx-h100", "--json"]);
    assert!(said.status.success(), "{}", text(&said.stderr));
    let replay: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    let seconds = |part: &str| replay["replay"][part].as_f64().unwrap();
    assert_eq!(seconds("compute"), 1e-3);
    assert!(seconds("communication") > 0.0);
    assert!(
        (seconds("seconds") - seconds("compute") - seconds("communication")).abs() < 1e-12,
        "one after the other"
    );
    let said = weft(&["sim", "replay", &file, "--gpus", "8"]);
    assert!(
        text(&said.stdout).contains("compute        1.000"),
        "{}",
        text(&said.stdout)
    );
    std::fs::write(&file, text_of([1, 1])).unwrap();
    let said = weft(&["sim", "replay", &file, "--gpus", "8"]);
    assert_eq!(said.status.code(), Some(2));
    assert!(
        text(&said.stderr).contains("two nodes are called 1"),
        "{}",
        text(&said.stderr)
    );
}
