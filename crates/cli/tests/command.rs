//! The command as a person and a script see it: words, exit codes, and whole verbs between real processes.

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Output, Stdio};

use support::{SECRET, Scratch, free_port, json_lines, output, text, weft};

// ---- words

#[test]
fn help_says_what_the_snapshot_says() {
    let mut pages = String::new();
    for verb in [
        &["--help"][..],
        &["demo", "--help"],
        &["doctor", "--help"],
        &["bench", "transfer", "--help"],
        &["bench", "collective", "--help"],
        &["explain", "--help"],
        &["explain", "fetch", "--help"],
        &["bench", "store", "--help"],
        &["validate", "--help"],
        &["sim", "run", "--help"],
        &["sim", "serving", "--help"],
        &["sim", "sweep", "--help"],
        &["sim", "replay", "--help"],
        &["plan-training", "--help"],
        &["plan-serving", "--help"],
    ]
    .into_iter()
    .chain([
        &["serve", "--help"][..],
        &["copy", "--help"],
        &["list", "--help"],
        &["show", "--help"],
        &["store", "--help"],
        &["store", "stat", "--help"],
        &["store", "ls", "--help"],
        &["store", "verify", "--help"],
        &["store", "inspect", "--help"],
        &["store", "purge", "--help"],
        &["nixl", "--help"],
        &["completions", "--help"],
        &["man", "--help"],
    ]) {
        let said = output(verb);
        assert!(said.status.success());
        pages.push_str(&format!("$ weft {}\n{}\n", verb.join(" "), text(&said.stdout)));
    }
    is_as_in("help.txt", &pages);
}

/// Compares with a snapshot in this directory.
fn is_as_in(name: &str, pages: &str) {
    let snapshot = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&snapshot, pages).expect("the snapshot is written");
    }
    let expected = std::fs::read_to_string(&snapshot).expect("the snapshot is there");
    assert!(
        pages == expected,
        "{name} has changed; UPDATE_SNAPSHOTS=1 accepts this:\n{pages}"
    );
}

#[test]
fn explanations_say_what_the_snapshot_says() {
    let mut pages = String::new();
    for question in [
        "explain all-reduce --ranks 16 --bytes 1MiB",
        "explain all-reduce --ranks 16 --nodes 4 --bytes 64KiB --in-place",
        "explain all-to-allv --ranks 8 --bytes 1MiB --algorithm pairwise",
        "explain barrier --ranks 6 --bytes 0",
        "explain all-reduce --ranks 131072 --nodes 16384 --bytes 1GiB",
        "explain reduce-scatter --ranks 3 --algorithm ring --render text",
        "explain broadcast --ranks 3 --algorithm direct --render json",
        "explain all-gather --ranks 2 --algorithm ring --render svg",
        "explain fetch --model llama-3.1-8b --tokens 8192 --tier nvme",
        "explain fetch --model llama-3.1-8b --tokens 8192 --tier object",
        "explain fetch --model llama-3.1-70b --gpus 8 --tokens 32768 --there 30000 --tier nvme --bandwidth 12GB/s",
        "explain fetch --model llama-3.1-8b --tokens 100 --tier object --latency 10s --json",
    ] {
        let said = output(&question.split(' ').collect::<Vec<_>>());
        assert!(said.status.success(), "{question}: {}", text(&said.stderr));
        pages.push_str(&format!("$ weft {question}\n{}\n", text(&said.stdout)));
    }
    is_as_in("explain.txt", &pages);
}

#[test]
fn what_cannot_be_explained_exits_2_and_a_wrong_schedule_exits_1() {
    for (question, sentence) in [
        ("explain all-reduce --ranks 6 --nodes 4", "cannot be spread evenly"),
        ("explain broadcast --ranks 4 --root 4", "rank 4 of 4"),
        (
            "explain barrier --algorithm ring",
            "try:   one of direct, dissemination, binomial-tree",
        ),
        (
            "explain all-reduce --platform /nonexistent/platform.toml",
            "cannot be read",
        ),
        (
            "explain fetch --model lama --tokens 10 --tier dram",
            "lama is no model that is known",
        ),
        (
            "explain fetch --model llama-3.1-8b --tokens 0 --tier dram",
            "0 is not in 1..=10000000",
        ),
        (
            "explain fetch --model llama-3.1-8b --tokens 10 --tier tape",
            "invalid value 'tape'",
        ),
        (
            "explain fetch --model llama-3.1-8b --tokens 10 --tier dram --platform dgx-h100",
            "a system of GPUs is chosen by `--system dgx-h100`",
        ),
        (
            "explain fetch --model llama-3.1-8b --tokens 10 --tier dram --system dgx-z100",
            "try:   one of arc-pro-b60",
        ),
    ] {
        let said = output(&question.split(' ').collect::<Vec<_>>());
        assert_eq!(said.status.code(), Some(2), "{question}");
        assert!(
            text(&said.stderr).contains(sentence),
            "{question}: {}",
            text(&said.stderr)
        );
    }
    let scratch = Scratch::new("schedule");
    let file = scratch.path("ring.json");
    let said = ring_of_three();
    std::fs::write(&file, &said.stdout).unwrap();
    let check = || output(&["explain", "--schedule", file.to_str().unwrap()]);
    let said = check();
    assert!(said.status.success(), "{}", text(&said.stderr));
    assert!(
        text(&said.stdout).contains("ring: all-reduce among 3 ranks"),
        "{}",
        text(&said.stdout)
    );
    let right = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, right.replacen("\"first\":2", "\"first\":1", 1)).unwrap();
    let said = check();
    assert_eq!(said.status.code(), Some(1));
    assert!(
        text(&said.stderr).contains("rank 0, step 0, op"),
        "{}",
        text(&said.stderr)
    );
}

#[test]
fn an_explanation_is_also_json() {
    let said = output(&["explain", "all-gather", "--ranks", "4", "--bytes", "64KiB", "--json"]);
    let explanation: serde_json::Value = serde_json::from_slice(&said.stdout).expect("JSON");
    assert_eq!(explanation["verified"], true);
    assert_eq!(explanation["envelope"][0]["from_bytes"], 0);
    let fastest = &explanation["predicted"][0];
    assert_eq!(fastest["algorithm"], explanation["chosen"]["algorithm"]);
}

#[test]
fn completions_and_manual_are_made() {
    for shell in ["bash", "zsh", "fish"] {
        let said = output(&["completions", shell]);
        assert!(
            said.status.success() && text(&said.stdout).contains("doctor"),
            "{shell}"
        );
    }
    let page = text(&output(&["man"]).stdout);
    assert!(page.starts_with(".ie") && page.contains("Exit codes"), "{page}");
}

#[test]
fn an_unknown_setting_names_the_nearest_and_exits_2() {
    let said = output(&["--set", "tcp.conections=2", "doctor"]);
    assert_eq!(said.status.code(), Some(2));
    let complaint = text(&said.stderr);
    assert!(complaint.contains("did you mean tcp.connections?"), "{complaint}");
    assert!(
        complaint.contains("cause:") && complaint.contains("try:"),
        "{complaint}"
    );
}

#[test]
fn what_is_shipped_is_listed_and_printed() {
    let all = text(&output(&["list"]).stdout);
    for kind in ["scenarios", "systems", "models"] {
        assert!(all.contains(kind), "{all}");
        let listed = text(&output(&["list", kind]).stdout);
        let rows = json_lines(&output(&["list", kind, "--json"]));
        assert_eq!(listed.lines().count(), rows.len() + 1, "a heading and a line for each");
        for row in &rows {
            let name = row["name"].as_str().expect("a name");
            let shown = output(&["show", kind.trim_end_matches('s'), name]);
            assert!(shown.status.success(), "{name}: {}", text(&shown.stderr));
            let file: toml::Table = text(&shown.stdout).parse().expect("TOML");
            // Serving scenarios have no name.
            assert!(name == "serving" || file["name"].as_str() == Some(name), "{name}");
        }
    }
    let whole = text(&output(&["show", "system", "h200_sxm", "--whole"]).stdout);
    assert!(
        weft_model::system::System::from_toml(&whole).is_ok_and(|system| system.name == "dgx-h200"),
        "{whole}"
    );
    // What is printed can be given back.
    let scratch = Scratch::new("shown");
    let file = scratch.path("mine.toml");
    std::fs::write(&file, output(&["show", "scenario", "ring"]).stdout).unwrap();
    let ran = output(&["sim", "run", file.to_str().unwrap(), "--json"]);
    assert_eq!(ran.stdout, output(&["sim", "run", "ring", "--json"]).stdout);
    for (wrong, words) in [
        (&["list", "sandwiches"][..], "scenarios, systems, models"),
        (&["show", "scenario", "none"], "one of ring"),
        (&["show", "system", "none"], "dgx-h100"),
        (&["show", "model", "llama-3.1-404b"], "weft list models"),
    ] {
        let said = output(wrong);
        assert_eq!(said.status.code(), Some(2), "{wrong:?}");
        assert!(text(&said.stderr).contains(words), "{wrong:?}: {}", text(&said.stderr));
    }
}

// ---- bench and demo

#[test]
fn the_bench_prints_one_json_object_a_cell() {
    let said = output(&[
        "bench",
        "transfer",
        "--block",
        "4KiB",
        "--batch",
        "1,16",
        "--seconds",
        "0",
        "--json",
    ]);
    assert!(said.status.success(), "{}", text(&said.stderr));
    let cells: Vec<serde_json::Value> = text(&said.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(cells.len(), 3 * 2 * 2);
    assert!(
        cells
            .iter()
            .all(|cell| cell["verified"] == true && cell["p50_us"].as_f64().unwrap() > 0.0)
    );
}

#[test]
fn what_is_benched_is_what_was_explained() {
    let json = |line: &str| json_lines(&output(&line.split(' ').collect::<Vec<_>>()));
    for (bench, explain) in [
        ("--transport shared_memory", "--nodes 1"),
        ("--transport tcp", "--nodes 3 --transport tcp"),
        ("--transport tcp --deterministic", "--deterministic"),
    ] {
        for size in ["120", "192KiB"] {
            let ran = json(&format!(
                "bench collective --json --ranks 3 --op all-reduce --sizes {size} --secs 0 --repeats 1 {bench}"
            ));
            let said = json(&format!("explain all-reduce --json --ranks 3 --bytes {size} {explain}"));
            let chosen = &said[0]["chosen"];
            let name = chosen["algorithm"].as_str().expect("a name");
            let name = match chosen["portions"].as_u64() {
                Some(1) => name.to_string(),
                portions => format!("{name}/{}", portions.expect("a number")),
            };
            assert_eq!(ran[0]["algorithm"], *name, "{bench} {size}");
        }
    }
}

#[test]
fn a_schedule_is_benched_and_a_wrong_one_is_not() {
    let scratch = Scratch::new("schedules");
    let path = scratch.path("mine.json");
    let said = ring_of_three();
    std::fs::write(&path, &said.stdout).expect("the schedule is written");
    let file = path.display().to_string();
    let bench = [
        "bench",
        "collective",
        "--json",
        "--sizes",
        "1KiB",
        "--secs",
        "0",
        "--repeats",
        "1",
        "--schedule",
        &file,
    ];
    let figure = &json_lines(&output(&bench))[0];
    assert_eq!((&figure["ranks"], &figure["ok"]), (&3.into(), &true.into()), "{figure}");
    assert!(figure["predicted_us"].as_f64().is_some_and(|us| us > 0.0), "{figure}");
    let wrong = std::fs::read_to_string(&path)
        .expect("it is there")
        .replace("\"receive-reduce\"", "\"receive\"");
    std::fs::write(&path, wrong).expect("it is written");
    assert!(!output(&bench).status.success());
}

#[test]
fn a_quantised_sum_is_benched_within_its_error() {
    for code in ["int8", "fp8_e4m3"] {
        let line = format!(
            "bench collective --json --ranks 3 --op all-reduce --sizes 100,64KiB --secs 0 --repeats 1 --transport shared_memory,tcp --quantized {code}"
        );
        let points = json_lines(&output(&line.split(' ').collect::<Vec<_>>()));
        assert!(
            points.len() == 4 && points.iter().all(|point| point["ok"] == true),
            "{points:?}"
        );
    }
    let said = output(&["bench", "collective", "--op", "broadcast", "--quantized", "int8"]);
    assert_eq!(said.status.code(), Some(2), "{}", text(&said.stderr));
}

#[test]
fn every_collective_is_benched_and_checked() {
    let scratch = Scratch::new("collectives");
    let plot = scratch.path("plot.svg");
    let all = "all-reduce,all-gather,reduce-scatter,all-to-all,broadcast,reduce,gather,scatter,barrier";
    let line = format!("bench collective --json --ranks 3 --op {all} --sizes 100,64KiB --secs 0 --repeats 2 --plot");
    let mut words: Vec<&str> = line.split(' ').collect();
    words.push(plot.to_str().unwrap());
    let points = json_lines(&output(&words));
    assert_eq!(points.len(), 8 * 2 + 1);
    for point in &points {
        assert_eq!(point["ok"], true, "{point}");
        assert_eq!(
            (&point["bench"], &point["ranks"]),
            (&"coll".into(), &3.into()),
            "{point}"
        );
        assert_eq!(point["us_runs"].as_array().map(Vec::len), Some(2), "{point}");
        assert!(point["p99_us"].as_f64() >= point["p50_us"].as_f64(), "{point}");
        assert!(point["predicted_us"].as_f64().is_some_and(|us| us > 0.0), "{point}");
    }
    assert!(std::fs::read_to_string(plot).unwrap().contains("<svg"));
}

#[test]
fn collectives_are_benched_by_any_way_in_any_memory_of_any_type() {
    for (flags, impls) in [
        (
            "--transport shared_memory,tcp --buffers mapped,foreign --datatype f32,bf16,fp8_e4m3",
            4,
        ),
        ("--in-place --op all-reduce,all-gather,reduce-scatter --datatype i64", 1),
        ("--op all-reduce --algorithm ring,two-shot --no-pin", 1),
    ] {
        let line = format!("bench collective --json --sizes 4KiB --secs 0 --repeats 1 {flags}");
        let points = json_lines(&output(&line.split(' ').collect::<Vec<_>>()));
        assert!(points.iter().all(|point| point["ok"] == true), "{points:?}");
        let mut names: Vec<&str> = points.iter().filter_map(|point| point["impl"].as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), impls, "{names:?}");
    }
    let said = output(&["bench", "collective", "--op", "barrier", "--algorithm", "ring"]);
    assert_eq!(said.status.code(), Some(1));
    assert!(
        text(&said.stderr).contains("ring is not for this call"),
        "{}",
        text(&said.stderr)
    );
}

#[test]
fn the_bench_speaks_the_terms_of_perftest() {
    let bench = |flags: &[&str]| {
        let common = ["bench", "transfer", "--json", "--iterations", "30"];
        json_lines(&output(&[&common[..], flags].concat()))
    };
    for mode in ["write_bw", "read_bw"] {
        let lines = bench(&[
            "--mode",
            mode,
            "--sizes",
            "2,64KiB",
            "--transport",
            "tcp,shared_memory",
            "--depth",
            "7",
        ]);
        assert_eq!(lines.len(), 4);
        for line in lines {
            assert_eq!(
                (&line["mode"], &line["iterations"], &line["depth"]),
                (&mode.into(), &30.into(), &7.into())
            );
            let figure = |name: &str| line[name].as_f64().expect("a figure");
            assert!(figure("bw_average_mib_per_sec") > 0.0);
            assert!(figure("bw_peak_mib_per_sec") >= figure("bw_average_mib_per_sec"));
            assert!(line["verified"] == true && figure("msg_rate_mpps") > 0.0);
        }
    }
    for mode in ["write_lat", "read_lat", "send_lat"] {
        let lines = bench(&["--mode", mode, "--sizes", "8,4096", "--transport", "shared_memory"]);
        assert_eq!(lines.len(), 2);
        for line in lines {
            let figure = |name: &str| line[name].as_f64().expect("a figure");
            let ordered = ["t_min_us", "t_typical_us", "p99_us", "p999_us", "t_max_us"].map(figure);
            assert!(ordered.is_sorted() && ordered[0] > 0.0, "{mode}: {ordered:?}");
            assert_eq!(line["iterations"], 30);
        }
    }
    let lines = bench(&["--blocks", "64", "--block", "4KiB", "--scattered", "--transport", "tcp"]);
    assert_eq!((&lines[0]["blocks"], &lines[0]["bytes"]), (&64.into(), &262_144.into()));
    let all = output(&[
        "bench",
        "transfer",
        "--mode",
        "write_lat",
        "--sizes",
        "4",
        "--transport",
        "tcp",
    ]);
    assert_eq!(all.status.code(), Some(2), "{}", text(&all.stderr));
}

#[test]
fn the_bench_runs_between_one_that_listens_and_one_that_connects() {
    let address = format!("127.0.0.1:{}", free_port());
    let mut listener = weft()
        .args(["bench", "transfer", "--listen", &address])
        .stderr(Stdio::piped())
        .spawn()
        .expect("the listener starts");
    let mut said = BufReader::new(listener.stderr.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("--connect") {
        line.clear();
        assert_ne!(
            said.read_line(&mut line).expect("it speaks"),
            0,
            "the listener has left"
        );
    }
    for mode in ["write_bw", "read_bw", "write_lat", "send_lat"] {
        let flags = [
            "bench",
            "transfer",
            "--connect",
            &address,
            "--transport",
            "tcp",
            "--iterations",
            "30",
            "--json",
        ];
        let lines = json_lines(&output(&[&flags[..], &["--mode", mode]].concat()));
        assert_eq!((lines.len(), &lines[0]["mode"]), (1, &mode.into()));
    }
    let stranger = weft()
        .env("WEFT_SECRET", "another")
        .args([
            "bench",
            "transfer",
            "--connect",
            &address,
            "--transport",
            "tcp",
            "--mode",
            "write_bw",
        ])
        .output()
        .expect("the command runs");
    assert_eq!(stranger.status.code(), Some(4), "{}", text(&stranger.stderr));
    listener.kill().expect("it can be ended");
    listener.wait().expect("it ends");
}

#[test]
fn the_demo_verifies_kills_and_says_what_happened() {
    let said = output(&["demo"]);
    let shown = text(&said.stdout);
    assert!(said.status.success(), "{shown}\n{}", text(&said.stderr));
    for expected in [
        "verified",
        "measured ÷ predicted",
        "was told",
        "not a byte of it had changed",
        "the deadline passed",
    ] {
        assert!(shown.contains(expected), "no {expected:?} in:\n{shown}");
    }
    assert!(!shown.contains('\u{1b}'), "no colours where there is no terminal");
}

#[test]
fn the_doctor_tries_every_transport_and_writes_a_platform_file() {
    let scratch = Scratch::new("doctor");
    let file = scratch.path("platform.toml");
    let said = output(&["doctor", "--json", "--platform", file.to_str().unwrap()]);
    assert!(said.status.success(), "{}{}", text(&said.stdout), text(&said.stderr));
    let report: serde_json::Value = serde_json::from_slice(&said.stdout).expect("JSON");
    assert_eq!(report["transports"].as_array().unwrap().len(), 3);
    assert!(!text(&said.stdout).contains(SECRET), "the secret is not shown");
    let platform = weft_plan::Platform::from_toml(&std::fs::read_to_string(file).unwrap()).expect("a platform file");
    assert!(platform.transports.contains_key("tcp") && platform.transports.contains_key("shared_memory"));
}

#[test]
fn the_doctor_is_quick_unless_it_is_to_be_thorough() {
    let said = output(&["doctor"]);
    let shown = text(&said.stdout);
    assert!(said.status.success(), "{shown}{}", text(&said.stderr));
    assert!(
        shown.contains("weft doctor --thorough") && !shown.contains("two ranks through"),
        "{shown}"
    );
}

#[test]
fn a_prediction_says_whose_it_is() {
    let line = "bench collective --sizes 1KiB --op all-reduce --secs 0 --repeats 1";
    let words: Vec<&str> = line.split(' ').collect();
    let built_in = "of the built-in platform `laptop`, not of this machine";
    assert!(text(&output(&words).stdout).contains(built_in));
    let figure = &json_lines(&output(&[&words[..], &["--json"]].concat()))[0];
    assert_eq!(figure["predicted_for"], "laptop");
    let scratch = Scratch::new("own");
    let file = scratch.path("here.toml");
    let own = weft_plan::Platform {
        name: "here".into(),
        ..weft_plan::Platform::laptop()
    };
    std::fs::write(&file, own.to_toml()).unwrap();
    let said = output(&[&words[..], &["--platform", file.to_str().unwrap()]].concat());
    assert!(
        said.status.success() && !text(&said.stdout).contains("built-in"),
        "{}",
        text(&said.stderr)
    );
}

/// A schedule as a file has it.
fn ring_of_three() -> Output {
    let question = "explain all-reduce --ranks 3 --algorithm ring --render json";
    output(&question.split(' ').collect::<Vec<_>>())
}
