//! The command as a person and a script see it: words, exit codes, and whole verbs between real processes.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

const SECRET: &str = "a secret for tests";

fn weft() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("WEFT_") {
            command.env_remove(name);
        }
    }
    // On a crowded machine a process may not run for seconds, which is not what these tests are about.
    command.env("WEFT_SILENCE_MAX", "60s").env("WEFT_DEADLINE", "120s");
    command
        .env_remove("COLUMNS")
        .env("WEFT_SECRET", SECRET)
        .env("NO_COLOR", "1")
        .stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Output {
    weft().args(arguments).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the command speaks UTF-8")
}

/// A directory of its own for a test, gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("weft-command-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a scratch directory");
        Scratch(path)
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

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
        &["validate", "--help"],
        &["sim", "run", "--help"],
        &["sim", "serving", "--help"],
        &["sim", "sweep", "--help"],
    ]
    .into_iter()
    .chain([
        &["serve", "--help"][..],
        &["copy", "--help"],
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
fn nobody_there_exits_3() {
    let port = free_port();
    let url = format!("weft://127.0.0.1:{port}/x");
    let said = output(&["--set", "deadline=2s", "copy", &url, "-"]);
    assert_eq!(said.status.code(), Some(3), "{}", text(&said.stderr));
    assert!(text(&said.stderr).contains("could not be reached"));
}

#[test]
fn two_paths_are_none_of_our_business_and_exit_2() {
    assert_eq!(output(&["copy", "a", "b"]).status.code(), Some(2));
    assert_eq!(output(&["copy", "weft://host:1", "b"]).status.code(), Some(2));
}

// ---- serve and copy

/// A server on a port of its own, ended with the test.
struct Server {
    process: Child,
    port: u16,
}

impl Server {
    fn start(path: &Path, flags: &[&str], stdin: Stdio) -> Server {
        let port = free_port();
        let mut process = weft()
            .args(["serve", "--listen", &format!("127.0.0.1:{port}")])
            .args(flags)
            .arg(path)
            .stdin(stdin)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut said = BufReader::new(process.stderr.take().expect("a pipe"));
        let mut line = String::new();
        while !line.contains("weft copy") {
            line.clear();
            assert_ne!(
                said.read_line(&mut line).expect("the server speaks"),
                0,
                "the server has left"
            );
        }
        // What it says later must go somewhere, or it would wait for room.
        std::thread::spawn(move || said.lines().for_each(drop));
        Server { process, port }
    }

    fn url(&self, name: &str) -> String {
        format!("weft://127.0.0.1:{}/{name}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its number").port()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

#[test]
fn files_are_copied_from_a_directory_and_nothing_else_is() {
    let scratch = Scratch::new("directory");
    let served = scratch.path("served");
    std::fs::create_dir_all(served.join("deep")).unwrap();
    // More than a window, and not a multiple of a slot; and nothing at all.
    let large = bytes(41_000_001);
    std::fs::write(served.join("deep/large.bin"), &large).unwrap();
    std::fs::write(served.join("empty"), b"").unwrap();
    std::fs::write(scratch.path("private"), b"private").unwrap();
    let server = Server::start(&served, &[], Stdio::null());

    let copy = scratch.path("copy.bin");
    let said = output(&["copy", &server.url("deep/large.bin"), copy.to_str().unwrap()]);
    assert!(said.status.success(), "{}", text(&said.stderr));
    assert!(std::fs::read(&copy).unwrap() == large, "the copy differs");

    let said = output(&["copy", &server.url("empty"), "-"]);
    assert!(
        said.status.success() && said.stdout.is_empty(),
        "{}",
        text(&said.stderr)
    );

    for name in ["../private", "deep/../../private", "absent", "deep"] {
        let said = output(&["copy", &server.url(name), "-"]);
        assert_eq!(said.status.code(), Some(4), "{name}: {}", text(&said.stderr));
        assert!(said.stdout.is_empty());
    }
    let said = weft().args(["copy", "-", &server.url("new")]).output().unwrap();
    assert_eq!(said.status.code(), Some(4), "{}", text(&said.stderr));
    assert!(text(&said.stderr).contains("--writable"));

    let said = weft()
        .env("WEFT_SECRET", "another")
        .args(["copy", &server.url("empty"), "-"])
        .output()
        .unwrap();
    assert_eq!(said.status.code(), Some(4), "{}", text(&said.stderr));
}

#[test]
fn a_stream_is_pushed_into_a_writable_directory_once() {
    let scratch = Scratch::new("writable");
    let server = Server::start(&scratch.0, &["--writable"], Stdio::null());
    let stream = bytes(10_000_003);
    let push = |name: &str| {
        let mut copy = weft()
            .args(["copy", "--quiet", "-", &server.url(name)])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A copy that is refused stops reading; that is what the test wants to see.
        let _ = copy.stdin.take().unwrap().write_all(&stream);
        copy.wait_with_output().unwrap()
    };
    let said = push("stream.bin");
    assert!(said.status.success(), "{}", text(&said.stderr));
    assert!(
        std::fs::read(scratch.path("stream.bin")).unwrap() == stream,
        "the file differs"
    );
    for taken in ["stream.bin", "../out.bin", "absent/x"] {
        assert_eq!(push(taken).status.code(), Some(4), "{taken}");
    }
    let names: Vec<_> = std::fs::read_dir(&scratch.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["stream.bin"], "nothing half done is left behind");
}

#[test]
fn standard_input_is_served_to_the_first_who_asks() {
    let mut server = Server::start(Path::new("-"), &[], Stdio::piped());
    let stream = bytes(9_000_000);
    let mut stdin = server.process.stdin.take().unwrap();
    let sent = stream.clone();
    let feeder = std::thread::spawn(move || stdin.write_all(&sent));
    let said = output(&["copy", &server.url("stdin"), "-"]);
    assert!(said.status.success(), "{}", text(&said.stderr));
    assert!(said.stdout == stream, "the stream differs");
    feeder.join().unwrap().unwrap();
    assert!(server.process.wait().unwrap().success(), "the server ends by itself");
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

fn json_lines(said: &Output) -> Vec<serde_json::Value> {
    assert!(said.status.success(), "{}", text(&said.stderr));
    let shown = text(&said.stdout);
    shown
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
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

/// A schedule as a file has it.
fn ring_of_three() -> Output {
    let question = "explain all-reduce --ranks 3 --algorithm ring --render json";
    output(&question.split(' ').collect::<Vec<_>>())
}
