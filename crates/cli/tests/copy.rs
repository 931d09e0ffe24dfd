//! `weft serve` and `weft copy` between real processes: files, directories and streams; what is refused, what is resumed, and what is left
//! behind.

mod support;

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{LONG, SECRET, Scratch, Server, bytes, ends, free_port, json_lines, line_with, output, text, weft};
use weft::{Access, Agent, Memory, Peer};

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

    for (name, code) in [("../private", 2), ("deep/../../private", 2), ("absent", 4), ("deep", 4)] {
        let said = output(&["copy", &server.url(name), "-"]);
        assert_eq!(said.status.code(), Some(code), "{name}: {}", text(&said.stderr));
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
    for (taken, code) in [
        ("stream.bin", 4),
        ("../out.bin", 2),
        ("absent/x", 4),
        ("x.weft-part", 4),
    ] {
        assert_eq!(push(taken).status.code(), Some(code), "{taken}");
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

#[test]
fn nobody_who_listens_is_told_at_once() {
    let url = format!("weft://127.0.0.1:{}/x", free_port());
    let begun = Instant::now();
    for command in [
        &["copy", &url, "-"][..],
        &["copy", "/etc/hostname", &url],
        &["list", &url],
    ] {
        let said = output(command);
        assert_eq!(said.status.code(), Some(3), "{}", text(&said.stderr));
        let told = text(&said.stderr);
        assert!(
            told.contains("Nobody listens at 127.0.0.1:") && told.contains("weft serve"),
            "{told}"
        );
    }
    // The deadline that these tests have set is twice as long.
    assert!(begun.elapsed() < LONG);
}

#[test]
fn two_paths_are_none_of_our_business_and_exit_2() {
    assert_eq!(output(&["copy", "a", "b"]).status.code(), Some(2));
    assert_eq!(output(&["copy", "weft://host/name", "b"]).status.code(), Some(2));
    assert_eq!(output(&["copy", "weft://host:1/../x", "b"]).status.code(), Some(2));
}

#[test]
fn pipes_devices_and_links_that_lead_out_are_refused_and_nobody_waits() {
    let scratch = Scratch::new("special");
    let served = scratch.path("served");
    fs::create_dir_all(&served).unwrap();
    fs::write(scratch.path("private"), b"private").unwrap();
    fs::write(served.join("file"), b"file").unwrap();
    make_pipe(&served.join("pipe"));
    let _socket = std::os::unix::net::UnixListener::bind(served.join("socket")).unwrap();
    symlink("/dev/zero", served.join("device")).unwrap();
    symlink("../private", served.join("out")).unwrap();
    symlink("file", served.join("in")).unwrap();
    let server = Server::start(&served, &[], Stdio::null());
    // More than there are streams for one client, had one of them to wait.
    for (name, words) in [
        ("pipe", "a pipe"),
        ("socket", "a socket"),
        ("device", "leads out"),
        ("out", "leads out"),
    ] {
        for _ in 0..3 {
            let mut copy = weft();
            copy.args(["copy", &server.url(name), "-"]);
            let said = ends(copy);
            assert_eq!(said.status.code(), Some(4), "{name}: {}", text(&said.stderr));
            assert!(text(&said.stderr).contains(words), "{name}: {}", text(&said.stderr));
        }
    }
    assert_eq!(output(&["copy", &server.url("in"), "-"]).stdout, b"file");
    let pipe = output(&["serve", served.join("pipe").to_str().unwrap()]);
    assert_eq!(pipe.status.code(), Some(2), "{}", text(&pipe.stderr));
    assert!(text(&pipe.stderr).contains("weft serve - <"), "{}", text(&pipe.stderr));
}

fn make_pipe(path: &Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status();
    assert!(made.is_ok_and(|status| status.success()), "mkfifo");
}

/// A tree with everything in it that a tree can have.
fn make_tree(root: &Path) {
    fs::create_dir_all(root.join("deep/deeper")).unwrap();
    fs::create_dir_all(root.join("empty")).unwrap();
    fs::write(root.join("top.bin"), bytes(9_000_001)).unwrap();
    fs::write(root.join("deep/nothing"), b"").unwrap();
    fs::write(root.join("deep/deeper/é ü.txt"), b"words").unwrap();
}

/// All files and directories below a directory, with their bytes.
fn contents(root: &Path) -> Vec<(String, Option<Vec<u8>>)> {
    let mut found = Vec::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                waiting.push(path);
                found.push((name, None));
            } else {
                found.push((name, Some(fs::read(path).unwrap())));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn directories_are_copied_both_ways_and_listed() {
    let scratch = Scratch::new("trees");
    let (here, there) = (scratch.path("here"), scratch.path("there"));
    make_tree(&here.join("tree"));
    fs::create_dir_all(&there).unwrap();
    let expected = contents(&here.join("tree"));
    let server = Server::start(&there, &["--writable"], Stdio::null());
    let tree = here.join("tree");

    // There, under its own name and under another.
    for to in ["", "other/name"] {
        let said = output(&["copy", "--quiet", tree.to_str().unwrap(), &server.url(to)]);
        assert!(said.status.success(), "{}", text(&said.stderr));
    }
    assert_eq!(contents(&there.join("tree")), expected);
    assert_eq!(contents(&there.join("other/name")), expected);
    // Files are never replaced, so that a second time is refused; directories may be there.
    let again = output(&["copy", tree.to_str().unwrap(), &server.url("")]);
    assert_eq!(again.status.code(), Some(4), "{}", text(&again.stderr));
    // Unless the same is there already.
    let again = output(&["copy", "--resume", tree.to_str().unwrap(), &server.url("")]);
    assert!(again.status.success(), "{}", text(&again.stderr));

    // And back: into a directory, and as one.
    make_pipe(&there.join("tree/pipe"));
    symlink("/etc", there.join("tree/away")).unwrap();
    let into = scratch.path("into");
    fs::create_dir_all(&into).unwrap();
    for to in [&into, &scratch.path("as")] {
        let said = output(&["copy", &server.url("tree/"), to.to_str().unwrap()]);
        assert!(said.status.success(), "{}", text(&said.stderr));
        assert!(text(&said.stderr).contains("2 things"), "{}", text(&said.stderr));
    }
    assert_eq!(contents(&into.join("tree")), expected);
    assert_eq!(contents(&scratch.path("as")), expected);
    let all = scratch.path("all");
    assert!(
        output(&["copy", &server.url(""), all.to_str().unwrap()])
            .status
            .success()
    );
    assert_eq!(contents(&all.join("other/name")), expected);

    // What there is.
    let listed = text(&output(&["list", &server.url("tree")]).stdout);
    assert!(
        listed.contains("deep/") && listed.contains("8.6 MiB  top.bin"),
        "{listed}"
    );
    assert!(!listed.contains("nothing"), "{listed}");
    let rows = json_lines(&output(&["list", "--deep", "--json", &server.url("tree")]));
    assert_eq!(rows.len(), expected.len());
    assert!(
        rows.contains(&json!({"name": "deep/deeper/é ü.txt", "bytes": 5})),
        "{rows:?}"
    );
    let said = output(&["list", &server.url("tree/top.bin")]);
    assert_eq!(said.status.code(), Some(4), "{}", text(&said.stderr));
}

#[test]
fn links_that_are_here_do_not_lead_what_comes_to_another_place() {
    let scratch = Scratch::new("astray");
    let (served, to, elsewhere) = (scratch.path("served"), scratch.path("to"), scratch.path("elsewhere"));
    fs::create_dir_all(served.join("link")).unwrap();
    fs::write(served.join("link/file"), b"theirs").unwrap();
    fs::create_dir_all(to.join("served")).unwrap();
    fs::create_dir_all(&elsewhere).unwrap();
    symlink(&elsewhere, to.join("link")).unwrap();
    let server = Server::start(&served, &[], Stdio::null());
    let said = output(&["copy", &server.url(""), to.to_str().unwrap()]);
    assert_ne!(said.status.code(), Some(0), "{}", text(&said.stderr));
    assert_eq!(contents(&elsewhere), []);
}

/// An agent that talks to a server, or is one, word by word.
struct Rogue {
    agent: Agent,
}

impl Rogue {
    fn new(name: &str) -> Rogue {
        let agent = Agent::builder(name).secret(SECRET).listen("127.0.0.1:0").start();
        Rogue { agent: agent.unwrap() }
    }

    fn dial(&self, server: &Server) -> Peer {
        self.agent.connect(&format!("127.0.0.1:{}", server.port)).unwrap()
    }

    fn hear(&self) -> (Peer, Value) {
        let heard = self.agent.next_notification(LONG).expect("a word");
        (heard.from, serde_json::from_slice(&heard.payload).unwrap())
    }

    fn hears(&self, word: &str) -> Value {
        let (_, said) = self.hear();
        assert_eq!(said["word"], word, "{said}");
        said
    }

    /// A word of one stream. Words are in no order, and those of other streams are nobody's business any more.
    fn hears_of(&self, stream: u64, word: &str, early: &mut Vec<Value>) -> Value {
        let is_meant = |said: &Value| said["stream"] == stream && said["word"] == word;
        if let Some(at) = early.iter().position(is_meant) {
            return early.remove(at);
        }
        loop {
            let (_, said) = self.hear();
            if is_meant(&said) {
                return said;
            }
            early.push(said);
        }
    }
}

fn say(peer: &Peer, word: &Value) {
    peer.notify(word.to_string().as_bytes()).unwrap();
}

/// Publishes what a client publishes.
fn window(agent: &Agent, access: Access) -> Memory {
    let memory = agent.allocate(32 << 20).unwrap();
    agent.publish("window", &memory, access).unwrap();
    memory
}

#[test]
fn a_stream_belongs_to_the_peer_that_opened_it() {
    let scratch = Scratch::new("owners");
    let server = Server::start(&scratch.0, &["--writable"], Stdio::null());
    let (victim, rogue) = (Rogue::new("victim"), Rogue::new("rogue"));
    let (here, there) = (victim.dial(&server), rogue.dial(&server));
    let memory = window(&victim.agent, Access::READ);
    window(&rogue.agent, Access::READ);
    say(
        &here,
        &json!({"word": "put", "stream": 7, "name": "upload", "resume": false}),
    );
    assert_eq!(victim.hears("take")["stream"], 7);
    say(&here, &json!({"word": "begin", "stream": 7, "bytes": 4, "from": 0}));

    // Nobody else ends it, adds to it or replaces it, nor finds where its bytes are.
    for word in [
        json!({"word": "refuse", "stream": 7, "why": {"kind": "busy"}}),
        json!({"word": "chunk", "stream": 7, "index": 0, "slot": 0, "bytes": 4}),
        json!({"word": "end", "stream": 7, "chunks": 1}),
        json!({"word": "done", "stream": 7}),
    ] {
        say(&there, &word);
    }
    say(
        &there,
        &json!({"word": "put", "stream": 7, "name": "other", "resume": false}),
    );
    assert_eq!(rogue.hears("take")["stream"], 7, "the same number is another stream");
    assert_eq!(there.region_names(), Vec::<String>::new(), "a server publishes nothing");

    memory.write(0, b"mine");
    say(
        &here,
        &json!({"word": "chunk", "stream": 7, "index": 0, "slot": 0, "bytes": 4}),
    );
    assert_eq!(victim.hears("free")["slot"], 0);
    say(&here, &json!({"word": "end", "stream": 7, "chunks": 1}));
    victim.hears("done");
    assert_eq!(fs::read(scratch.path("upload")).unwrap(), b"mine");
}

#[test]
fn one_client_does_not_take_all_streams() {
    let scratch = Scratch::new("crowd");
    fs::write(scratch.path("file"), b"file").unwrap();
    let server = Server::start(&scratch.0, &["--writable"], Stdio::null());
    let rogue = Rogue::new("crowd");
    let peer = rogue.dial(&server);
    window(&rogue.agent, Access::READ);
    let mut refused = 0;
    for stream in 0..100 {
        say(
            &peer,
            &json!({"word": "put", "stream": stream, "name": format!("upload-{stream}"), "resume": false}),
        );
        refused += u32::from(rogue.hear().1["word"] == "refuse");
    }
    assert!(refused > 80, "{refused}");
    assert_eq!(output(&["copy", &server.url("file"), "-"]).stdout, b"file");
}

#[test]
fn names_of_a_hostile_server_lead_nowhere() {
    for name in ["../evil", "/tmp/evil", "a/../../evil", "", "a\u{0}b"] {
        let scratch = Scratch::new("hostile");
        let to = scratch.path("to");
        let rogue = Rogue::new("hostile");
        let address = rogue.agent.address();
        let port = address.rsplit(':').next().unwrap().to_owned();
        let copy = weft()
            .args(["copy", &format!("weft://127.0.0.1:{port}/"), to.to_str().unwrap()])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (peer, said) = rogue.hear();
        assert_eq!(said["word"], "list");
        let entries = json!([{"path": name, "bytes": 4}]);
        say(
            &peer,
            &json!({"word": "entries", "stream": said["stream"], "entries": entries, "more": false, "left_out": 0}),
        );
        let said = copy.wait_with_output().unwrap();
        assert_eq!(said.status.code(), Some(1), "{name:?}: {}", text(&said.stderr));
        assert!(text(&said.stderr).contains("leads out"), "{}", text(&said.stderr));
        assert!(!to.exists() && !scratch.path("evil").exists());
    }
}

#[test]
fn a_copy_is_resumed_and_its_bytes_are_never_wrong() {
    let scratch = Scratch::new("resume");
    let (served, here) = (scratch.path("served"), scratch.path("here"));
    fs::create_dir_all(&served).unwrap();
    fs::create_dir_all(&here).unwrap();
    let whole = bytes(30_000_000);
    fs::write(served.join("model"), &whole).unwrap();
    let server = Server::start(&served, &["--writable"], Stdio::null());
    let part = here.join("model.weft-part");
    let pull = |flags: &[&str]| {
        let said = output(&[&["copy", &server.url("model"), here.to_str().unwrap()][..], flags].concat());
        assert!(said.status.success(), "{}", text(&said.stderr));
        assert!(fs::read(here.join("model")).unwrap() == whole, "the copy differs");
        assert!(!part.exists(), "nothing is left");
        line_with(&server, "sent \"model\",")
    };
    // Its beginning is here: the rest comes.
    fs::write(&part, &whole[..20_000_000]).unwrap();
    assert!(pull(&["--resume"]).contains("10 MB"), "only what was missing");
    // It is here: nothing comes.
    let again = output(&["copy", "--resume", &server.url("model"), here.to_str().unwrap()]);
    assert!(again.status.success(), "{}", text(&again.stderr));
    line_with(&server, "compared \"model\",");
    // What is here is something else, or longer, or shorter, or a file that only begins like it: all of it comes.
    let mut spoiled = whole[..20_000_000].to_vec();
    spoiled[12_345_678] ^= 1;
    for (name, there) in [
        ("model.weft-part", spoiled),
        ("model.weft-part", [&whole[..], b"more"].concat()),
        ("model", bytes(17)),
        ("model", whole[..1000].to_vec()),
    ] {
        let _ = fs::remove_file(here.join("model"));
        fs::write(here.join(name), there).unwrap();
        assert!(pull(&["--resume"]).contains("30 MB"), "{name}");
    }
    // The same the other way.
    fs::write(served.join("up.weft-part"), &whole[..20_000_000]).unwrap();
    let file = here.join("model");
    let push = |name: &str| output(&["copy", "--resume", file.to_str().unwrap(), &server.url(name)]);
    assert!(push("up").status.success());
    assert!(line_with(&server, "took \"up\",").contains("10 MB"));
    assert!(fs::read(served.join("up")).unwrap() == whole, "the upload differs");
    assert!(push("up").status.success(), "it is there already, and the same");
    fs::write(served.join("other"), b"other").unwrap();
    assert_eq!(push("other").status.code(), Some(4), "files are never replaced");
    assert_eq!(fs::read(served.join("other")).unwrap(), b"other");
    fs::write(served.join("bad.weft-part"), bytes(999)).unwrap();
    fs::write(served.join("bad.weft-part"), [b"x", &whole[1..999]].concat()).unwrap();
    assert!(push("bad").status.success());
    assert!(fs::read(served.join("bad")).unwrap() == whole, "the upload differs");
}

#[test]
fn a_copy_that_is_killed_leaves_nothing_or_what_the_next_one_goes_on_with() {
    let scratch = Scratch::new("killed");
    let (served, here) = (scratch.path("served"), scratch.path("here"));
    fs::create_dir_all(&served).unwrap();
    fs::create_dir_all(&here).unwrap();
    let whole = bytes(64 << 20);
    fs::write(served.join("model"), &whole).unwrap();
    // The server stands still in the middle, so that there is a middle.
    let server = Server::start(&served, &[], Stdio::null());
    let to = here.join("model");
    let killed = |flags: &[&str]| {
        let mut copy = weft()
            .args(["copy", "--quiet", &server.url("model"), to.to_str().unwrap()])
            .args(flags)
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(30));
        copy.kill().unwrap();
        copy.wait().unwrap();
    };
    let names = || -> Vec<String> {
        let listed = fs::read_dir(&here).unwrap();
        listed
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    };
    for _ in 0..10 {
        killed(&[]);
        // A file system that has no files without names keeps their names when they are killed.
        assert!(names().iter().all(|name| name == "model"), "{:?}", names());
        let _ = fs::remove_file(&to);
    }
    for _ in 0..10 {
        killed(&["--resume"]);
        assert!(
            names()
                .iter()
                .all(|name| ["model", "model.weft-part"].contains(&name.as_str())),
            "{:?}",
            names()
        );
    }
    let said = output(&["copy", "--resume", &server.url("model"), to.to_str().unwrap()]);
    assert!(said.status.success(), "{}", text(&said.stderr));
    assert!(fs::read(&to).unwrap() == whole, "the copy differs");
    assert_eq!(names(), ["model"]);
}

#[test]
fn what_changes_while_it_is_read_is_not_copied() {
    let scratch = Scratch::new("changed");
    let (served, to) = (scratch.path("served"), scratch.path("to"));
    fs::create_dir_all(&served).unwrap();
    fs::write(served.join("log"), bytes(100)).unwrap();
    let server = Server::start(&served, &[], Stdio::null());
    let rogue = Rogue::new("slow");
    let peer = rogue.dial(&server);
    let _window = window(&rogue.agent, Access::WRITE);
    say(&peer, &json!({"word": "get", "stream": 1, "name": "log", "have": null}));
    let early = &mut Vec::new();
    assert_eq!(rogue.hears_of(1, "begin", early)["bytes"], 100);
    let chunk = rogue.hears_of(1, "chunk", early);
    fs::write(served.join("log"), bytes(101)).unwrap();
    say(&peer, &json!({"word": "free", "stream": 1, "slot": chunk["slot"]}));
    assert_eq!(rogue.hears("refuse")["why"]["kind"], "changed");
    assert!(!to.exists());
}

#[test]
fn a_stream_that_is_given_up_writes_nothing_any_more() {
    let scratch = Scratch::new("given-up");
    fs::write(scratch.path("file"), vec![1; 32 << 20]).unwrap();
    let server = Server::start(&scratch.0, &[], Stdio::null());
    // Over TCP it takes a while, so that there is something to give up.
    let agent = Agent::builder("fickle").secret(SECRET).set("transports", "tcp").start();
    let rogue = Rogue { agent: agent.unwrap() };
    let peer = rogue.dial(&server);
    let memory = window(&rogue.agent, Access::WRITE);
    let (ours, early) = (vec![9; 32 << 20], &mut Vec::new());
    for stream in 0..8 {
        say(
            &peer,
            &json!({"word": "get", "stream": stream, "name": "file", "have": null}),
        );
        say(
            &peer,
            &json!({"word": "refuse", "stream": stream, "why": {"kind": "differs"}}),
        );
        // When the server says that it is over, the window belongs to whatever comes next.
        rogue.hears_of(stream, "refuse", early);
        memory.write(0, &ours);
        std::thread::sleep(Duration::from_millis(100));
        assert!(memory.to_vec() == ours, "stream {stream}");
    }
}
