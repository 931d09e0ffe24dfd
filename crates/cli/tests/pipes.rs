//! Whoever reads what the command prints may leave early: no verb panics, and none complains.

mod support;

use std::process::{Command, Stdio};

use support::{LONG, Scratch, Server, text, weft};

/// Runs a command whose standard output nobody reads.
fn unread(mut command: Command) -> (Option<i32>, String) {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
    let begun = std::time::Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < 3 * LONG, "{command:?} does not end");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let said = child.wait_with_output().unwrap();
    (said.status.code(), text(&said.stderr))
}

#[test]
fn no_verb_minds_that_nobody_reads() {
    let scratch = Scratch::new("pipes");
    let served = scratch.path("served");
    std::fs::create_dir_all(&served).unwrap();
    std::fs::write(served.join("file"), vec![7; 1 << 20]).unwrap();
    let server = Server::start(&served, &[], Stdio::null());
    let (file, directory) = (server.url("file"), server.url(""));
    let place = served.display();
    for line in [
        "explain all-reduce",
        "explain all-reduce --json",
        "explain all-reduce --ranks 64 --render text",
        "list",
        "list models",
        "list systems --json",
        "show scenario ring",
        "sim run ring",
        "sim run ring --json",
        "sim run ring --csv",
        "sim serving --json",
        "plan-training llama-3.1-8b --system dgx-h100 --gpus 8",
        "plan-serving llama-3.1-8b",
        "validate",
        "completions bash",
        "man",
        "doctor",
        "doctor --json",
        "demo",
        "bench transfer --block 4KiB --batch 1 --seconds 0",
        "bench transfer --block 4KiB --batch 1 --seconds 0 --json",
        "bench transfer --mode write_bw --sizes 2 --iterations 30",
        "bench transfer --notify",
        "bench store --count 20 --capacity 10",
        "bench store --count 20 --capacity 10 --json",
        &format!("bench file --directory {place} --size 1MiB --block 4KiB --depth 1 --seconds 0"),
        &format!("bench file --directory {place} --size 1MiB --block 4KiB --depth 1 --seconds 0 --json"),
        &format!("doctor --directory {place} --json"),
        "doctor --stacks",
        "bench collective --sizes 1KiB --secs 0 --repeats 1",
        "bench collective --sizes 1KiB --secs 0 --repeats 1 --json",
        &format!("copy {file} -"),
        &format!("list {directory}"),
    ] {
        let mut command = weft();
        command.args(line.split(' '));
        let (code, told) = unread(command);
        assert_eq!(code, Some(141), "weft {line}: {told}");
        assert!(told.is_empty(), "weft {line}: {told}");
    }
    // clap prints these by itself.
    for line in ["--help", "--version", "copy --help"] {
        let mut command = weft();
        command.args(line.split(' '));
        let (code, told) = unread(command);
        assert!(code == Some(0) && told.is_empty(), "weft {line}: {code:?} {told}");
    }
}

#[test]
fn a_complaint_that_nobody_reads_is_no_panic() {
    let mut child = weft().args(["copy", "a", "b"]).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(2));
}

#[test]
fn what_cannot_be_written_is_told() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let said = weft()
        .arg("list")
        .stdout(full)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
        .wait_with_output()
        .unwrap();
    assert_eq!(said.status.code(), Some(1));
    assert!(
        text(&said.stderr).contains("could not be written"),
        "{}",
        text(&said.stderr)
    );
}
