//! What the tests of the command share: the command itself, directories of their own, and servers.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longer than anything here takes, and shorter than a command that never ends.
pub const LONG: Duration = Duration::from_secs(60);

pub const SECRET: &str = "a secret for tests";

pub fn weft() -> Command {
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

pub fn output(arguments: &[&str]) -> Output {
    weft().args(arguments).output().expect("the command runs")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the command speaks UTF-8")
}

/// A directory of its own for a test, gone afterwards.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("weft-command-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a scratch directory");
        Scratch(path)
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server on a port of its own, ended with the test.
pub struct Server {
    pub process: Child,
    pub port: u16,
    /// What it says on standard error.
    pub said: Receiver<String>,
}

impl Server {
    pub fn start(path: &Path, flags: &[&str], stdin: Stdio) -> Server {
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
        let (lines, heard) = channel();
        std::thread::spawn(move || {
            for line in said.lines().map_while(Result::ok) {
                // Whether or not the test wants to know.
                let _ = lines.send(line);
            }
        });
        Server {
            process,
            port,
            said: heard,
        }
    }

    pub fn url(&self, name: &str) -> String {
        format!("weft://127.0.0.1:{}/{name}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its number").port()
}

pub fn bytes(len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

pub fn json_lines(said: &Output) -> Vec<serde_json::Value> {
    assert!(said.status.success(), "{}", text(&said.stderr));
    let shown = text(&said.stdout);
    shown
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

/// The next line of a server that holds some words.
pub fn line_with(server: &Server, words: &str) -> String {
    let begun = Instant::now();
    loop {
        let left = LONG.saturating_sub(begun.elapsed());
        let line = server
            .said
            .recv_timeout(left)
            .unwrap_or_else(|_| panic!("the server never said {words:?}"));
        if line.contains(words) {
            return line;
        }
    }
}

/// Runs a command that must end by itself.
pub fn ends(mut command: Command) -> Output {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let begun = Instant::now();
    // What it prints fits into the pipes, or it is read by nobody and ends all the same.
    while child.try_wait().expect("its state").is_none() {
        if begun.elapsed() > LONG {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the command does not end: {command:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output")
}
