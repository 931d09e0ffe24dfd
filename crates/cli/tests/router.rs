//! `weft serve router` as a process, and clients that want all of it for themselves.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

/// An instance that answers everything at once, as an engine does that has nothing else to do.
fn instance() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || while answer(&stream).is_some() {});
        }
    });
    address
}

/// Answers one request of a connection; `None` when there are no more.
fn answer(mut stream: &TcpStream) -> Option<()> {
    let mut reader = BufReader::with_capacity(1 << 16, stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        if line == "\r\n" {
            break;
        }
    }
    std::io::copy(&mut reader.take(length), &mut std::io::sink()).ok()?;
    let answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
    stream.write_all(answer).ok()
}

struct Router {
    child: Child,
    address: SocketAddr,
    admin: SocketAddr,
    token: Option<String>,
}

impl Router {
    /// A router in front of one instance. With `descriptors` it has no more of them.
    fn start(descriptors: Option<u32>, arguments: &[&str], variables: &[(&str, &str)]) -> Router {
        let limit = descriptors.map_or(String::new(), |number| format!("ulimit -n {number}; "));
        let mut command = Command::new("sh");
        let script = format!("{limit}exec \"$@\"");
        command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_weft"), "serve", "router"]);
        let plain = format!("http://{}", instance());
        command.args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--plain", &plain]);
        command
            .args(arguments)
            .env_remove("WEFT_ADMIN_TOKEN")
            .envs(variables.iter().copied());
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the router starts");
        let mut said = BufReader::new(child.stderr.take().expect("it was asked for"));
        let mut line = || {
            let mut line = String::new();
            said.read_line(&mut line).expect("the router speaks");
            line
        };
        let address = |text: &str| text.parse().unwrap_or_else(|_| panic!("{text:?} is no address"));
        let clients = line();
        let clients = address(clients.trim().strip_prefix("Routing at http://").expect(&clients));
        let admin = line();
        let admin = admin
            .trim()
            .strip_prefix("Administration at http://")
            .expect(&admin)
            .to_owned();
        let (admin, token) = match admin.split_once(", token ") {
            Some((admin, token)) => (address(admin), Some(token.to_owned())),
            None => (address(&admin), None),
        };
        // What it says later must not stop it.
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        let router = Router {
            child,
            address: clients,
            admin,
            token,
        };
        let began = Instant::now();
        while router.complete().is_none() {
            assert!(began.elapsed() < PATIENCE, "the router does not answer");
        }
        router
    }

    /// How long one completion of a new client took; `None` where it was not answered.
    fn complete(&self) -> Option<Duration> {
        let began = Instant::now();
        let answer = ask(self.address, "POST", "/v1/completions", "", r#"{"prompt":"hello"}"#).ok()?;
        answer.starts_with("HTTP/1.1 200").then(|| began.elapsed())
    }

    fn administer(&self, token: &str) -> String {
        let bearer = format!("Authorization: Bearer {token}\r\n");
        ask(self.admin, "GET", "/weft/instances", &bearer, "").expect("an answer")
    }

    fn rss(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .expect("a size");
        1024 * line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number")
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(to: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Clients that hold what they have: some have said half a head, and some most of a body.
struct Flood {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    _slow: Vec<TcpStream>,
}

impl Flood {
    fn start(to: SocketAddr, slow: usize, bodies: usize, body_bytes: usize) -> Flood {
        raise_descriptors();
        let connect = || {
            let mut stream = TcpStream::connect(to).expect("the router listens");
            let _ = stream.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ");
            stream
        };
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..bodies).map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let _ = hold_body(to, body_bytes, &stop);
                    // Who was turned away comes again.
                    std::thread::sleep(Duration::from_millis(500));
                }
            })
        });
        Flood {
            threads: threads.collect(),
            stop,
            _slow: (0..slow).map(|_| connect()).collect(),
        }
    }

    fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().expect("it ends");
        }
    }
}

/// Sends all of a body but its end, and waits until the router or the test has enough of it.
fn hold_body(to: SocketAddr, bytes: usize, stop: &AtomicBool) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(to)?;
    stream.set_read_timeout(Some(Duration::from_millis(100)))?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
        bytes + 1
    )?;
    let chunk = vec![b' '; 1 << 16];
    let mut left = bytes;
    while left > 0 && !stop.load(Ordering::Relaxed) {
        let now = left.min(chunk.len());
        stream.write_all(&chunk[..now])?;
        left -= now;
    }
    while !stop.load(Ordering::Relaxed) {
        match stream.read(&mut [0; 512]) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// As many as the system gives for the asking.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let _ = setrlimit(Resource::Nofile, raised);
}

#[test]
fn the_token_is_made_up_or_given() {
    let router = Router::start(None, &[], &[]);
    let token = router.token.clone().expect("a token is printed");
    assert!(router.administer(&token).starts_with("HTTP/1.1 200"));
    assert!(router.administer("another").starts_with("HTTP/1.1 401"));
    let router = Router::start(None, &[], &[("WEFT_ADMIN_TOKEN", "given-by-a-variable")]);
    assert_eq!(router.token, None);
    assert!(router.administer("given-by-a-variable").starts_with("HTTP/1.1 200"));
    assert!(router.administer(&token).starts_with("HTTP/1.1 401"));
    let path = std::env::temp_dir().join(format!("weft-router-token-{}", std::process::id()));
    let router = Router::start(None, &["--admin-token-file", path.to_str().expect("UTF-8")], &[]);
    let made = std::fs::read_to_string(&path).expect("the file is made");
    std::fs::remove_file(&path).expect("it was there");
    assert!(router.administer(made.trim()).starts_with("HTTP/1.1 200"));
}

#[test]
fn administration_beyond_this_host_takes_tls() {
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
        command.args(["serve", "router"]).args(arguments);
        let output = command.output().expect("the command runs");
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (code, said) = run(&["--admin", "0.0.0.0:0"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("--tls-cert"), "{said}");
    for wrong in [
        &["--tls-cert", "x"][..],
        &["--tls-cert", "/nonexistent", "--tls-key", "/nonexistent"],
        &["--instance-ca", "/nonexistent"],
        &["--pass", "x"],
        &["--plain", "http://a:1/x"],
        &["--body-max", "8GiB"],
    ] {
        assert_eq!(run(wrong).0, Some(2), "{wrong:?}");
    }
}

/// With 256 descriptors, 300 clients that say half a head and 24 bodies that do not end leave room for others, and memory as it was.
#[test]
fn slow_clients_and_unfinished_bodies_leave_room_for_others() {
    let limits = ["--body-max", "8MiB", "--bodies-max", "32MiB"];
    let router = Router::start(Some(256), &limits, &[]);
    let before = router.rss();
    let flood = Flood::start(router.address, 300, 24, 7 * MIB);
    let mut most = 0;
    let mut answered = 0;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        // One that was pushed out, because others pushed in, comes again.
        answered += usize::from(router.complete().is_some());
        most = most.max(router.rss());
    }
    flood.stop();
    assert!(answered >= 20, "{answered} were answered");
    // All bodies together would be 168 MiB.
    assert!(most < before + 80 * MIB, "{before} bytes before, {most} during");
    let began = Instant::now();
    while router.rss() > before + 40 * MIB {
        assert!(
            began.elapsed() < PATIENCE,
            "{before} bytes before, {} after",
            router.rss()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(router.complete().is_some());
}

/// The figures: `cargo test --release -p weft-cli --test router -- --ignored --nocapture`.
#[test]
#[ignore = "measures, and sends 1.5 GB through loopback"]
fn flood() {
    let router = Router::start(Some(1024), &[], &[]);
    let measure = |what: &str, seconds: u64| {
        let (mut times, mut failed, mut most) = (Vec::new(), 0, 0);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(seconds) {
            match router.complete() {
                Some(time) => times.push(time),
                None => failed += 1,
            }
            most = most.max(router.rss());
        }
        times.sort_unstable();
        let at = |share: f64| 1e3 * times[((times.len() - 1) as f64 * share) as usize].as_secs_f64();
        println!(
            "{what:<44} {:>6} answered, {failed:>3} not; p50 {:>7.2} ms, p99 {:>7.2} ms, longest {:>8.2} ms; RSS up to {:>4} MiB",
            times.len(),
            at(0.5),
            at(0.99),
            at(1.0),
            most / MIB,
        );
    };
    measure("before", 5);
    let flood = Flood::start(router.address, 1100, 0, 0);
    measure("1,100 clients with half a head", 10);
    flood.stop();
    let flood = Flood::start(router.address, 1100, 24, 62 * MIB);
    measure("the same, and 24 bodies of 62 of 63 MiB", 20);
    flood.stop();
    measure("after", 5);
    println!("RSS afterwards {} MiB", router.rss() / MIB);
}
