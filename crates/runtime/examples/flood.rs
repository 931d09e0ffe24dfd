//! What strangers at the door cost those who are inside: reads of 4 KiB between two processes over TCP, alone, and while others connect.
//!
//! `cargo run --release -p weft --example flood [seconds]`
//!
//! The owner of the memory may have 1,024 descriptors. Strangers are processes of their own, three at a time: they connect and go, as fast
//! as 3,600 times a second together; they stay and say nothing; they say a byte now and then; they say who they are not; or they vanish
//! without a word, so that the owner's end stays open (needs root).
//!
//! Strangers, and whoever turns them away, need the processor too. So each crowd comes twice: to a bystander, an agent that has nothing to do
//! with the reads but runs on the same cores, and then to the owner. The last ratio, owner over bystander, is what the crowd costs at the door itself.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use weft::{Access, Agent, Peer};

type Failed = Box<dyn std::error::Error>;

const SECRET: &str = "known to the two of them alone";
const STRANGERS: u32 = 3;
const CONNECTS_PER_SECOND: u32 = 3600 / STRANGERS;
const BLOCK: usize = 4096;

const KINDS: &[(&str, &str)] = &[
    ("none", "alone"),
    ("connect", "3,600 connections a second"),
    ("stay", "10,000 that stay and say nothing"),
    ("slow", "10,000 that say a byte now and then"),
    ("guess", "connections with a wrong secret"),
    ("vanish", "10,000 that vanish without a word"),
    ("none", "alone again"),
];

fn main() -> Result<(), Failed> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("own") => own(),
        Some("stranger") => be_a_stranger(&arguments[1], arguments[2].parse()?),
        seconds => compare(seconds.map_or(Ok(4), str::parse)?),
    }
}

fn agent(name: &str) -> Result<Agent, weft::Error> {
    Agent::builder(name).secret(SECRET).set("transports", "tcp").start()
}

/// The owner: has memory, says where, and waits until its parent goes.
fn own() -> Result<(), Failed> {
    let limit = libc::rlimit {
        rlim_cur: 1024,
        rlim_max: 1024,
    };
    // SAFETY: the structure is ours.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    let agent = agent("owner")?;
    let memory = agent.allocate(1 << 20)?;
    agent.publish("memory", &memory, Access::READ)?;
    println!("{}", agent.address());
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

fn compare(seconds: u64) -> Result<(), Failed> {
    println!(
        "{:48} {:>9} {:>9} {:>9} {:>7}   p50, p99 ÷ alone   p50, p99 ÷ bystander",
        "reads of 4 KiB", "p50 µs", "p99 µs", "worst ms", "reads"
    );
    let mut alone = None;
    for (kind, words) in KINDS {
        if *kind == "none" {
            let seen = measure(kind, Target::Owner, seconds)?;
            seen.print(words, *alone.get_or_insert((seen.p50, seen.p99)), None);
            continue;
        }
        let alone = alone.ok_or("nobody was alone first")?;
        let bystander = measure(kind, Target::Bystander, seconds)?;
        bystander.print(&format!("{words}: elsewhere"), alone, None);
        let seen = measure(kind, Target::Owner, seconds)?;
        seen.print(&format!("{words}: here"), alone, Some((bystander.p50, bystander.p99)));
    }
    Ok(())
}

/// Whom the strangers call.
#[derive(Clone, Copy, PartialEq)]
enum Target {
    Owner,
    Bystander,
}

/// What the reader saw, in microseconds.
struct Seen {
    p50: f64,
    p99: f64,
    worst: f64,
    reads: usize,
    failed: usize,
}

impl Seen {
    fn print(&self, words: &str, alone: (f64, f64), bystander: Option<(f64, f64)>) {
        let ratios = |to: (f64, f64)| format!("{:.2} × {:.2} ×", self.p50 / to.0, self.p99 / to.1);
        println!(
            "{words:48} {:9.1} {:9.1} {:9.2} {:7}   {}   {}{}",
            self.p50,
            self.p99,
            self.worst / 1e3,
            self.reads,
            ratios(alone),
            bystander.map_or(String::new(), ratios),
            match self.failed {
                0 => String::new(),
                failed => format!("   {failed} reads FAILED"),
            }
        );
    }
}

fn measure(kind: &str, target: Target, seconds: u64) -> Result<Seen, Failed> {
    let (owner, address) = owner()?;
    let (bystander, elsewhere) = self::owner()?;
    let reader = agent("reader")?;
    let peer = reader.connect(&address)?;
    let called = if target == Target::Owner { &address } else { &elsewhere };
    let strangers = strangers(kind, called)?;
    // They need a moment to become a crowd.
    std::thread::sleep(Duration::from_millis(500));
    let (times, failed) = read_for(&reader, &peer, Duration::from_secs(seconds))?;
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    let seen = Seen {
        p50: at(0.5),
        p99: at(0.99),
        worst: at(1.0),
        reads: times.len(),
        failed,
    };
    for mut child in strangers.into_iter().chain([owner, bystander]) {
        child.kill()?;
        child.wait()?;
    }
    Ok(seen)
}

/// A process that owns memory, and where it listens.
fn owner() -> Result<(Child, String), Failed> {
    let mut owner = start(&["own"])?;
    let mut address = String::new();
    BufReader::new(owner.stdout.take().ok_or("no output")?).read_line(&mut address)?;
    Ok((owner, address.trim().to_owned()))
}

/// How long each read takes, in microseconds and in their order, and how many failed.
fn read_for(reader: &Agent, peer: &Peer, time: Duration) -> Result<(Vec<f64>, usize), Failed> {
    let mine = reader.allocate(BLOCK)?;
    let theirs = peer.region("memory", Duration::from_secs(5))?;
    let (mut times, mut failed) = (Vec::new(), 0);
    let end = Instant::now() + time;
    let mut at = 0;
    while Instant::now() < end {
        at = (at + BLOCK as u64) % (1 << 20);
        let begun = Instant::now();
        let spans = (
            weft::Spans::contiguous(0, BLOCK as u64),
            weft::Spans::contiguous(at, BLOCK as u64),
        );
        match peer
            .read(&mine, &theirs)
            .spans(spans.0, spans.1)
            .post()
            .and_then(|t| t.wait())
        {
            Ok(_) => times.push(begun.elapsed().as_secs_f64() * 1e6),
            Err(_) => failed += 1,
        }
    }
    times.sort_by(f64::total_cmp);
    if times.is_empty() {
        times.push(f64::INFINITY);
    }
    Ok((times, failed))
}

fn start(arguments: &[&str]) -> Result<Child, Failed> {
    Ok(Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?)
}

fn strangers(kind: &str, address: &str) -> Result<Vec<Child>, Failed> {
    let place = address.strip_prefix("tcp:").ok_or("not over TCP")?;
    let count = if kind == "none" { 0 } else { STRANGERS };
    (0..count).map(|_| start(&["stranger", kind, place])).collect()
}

/// Does one thing to the address again and again, until it is killed; a minute at the most.
fn be_a_stranger(kind: &str, address: SocketAddr) -> Result<(), Failed> {
    let end = Instant::now() + Duration::from_secs(60);
    let pause = Duration::from_secs(1) / CONNECTS_PER_SECOND;
    if kind == "guess" {
        let agent = Agent::builder("stranger")
            .secret("a guess of sixteen bytes")
            .set("transports", "tcp");
        let agent = agent.start()?;
        while Instant::now() < end {
            assert!(
                agent
                    .connect_within(&format!("tcp:{address}"), Duration::from_secs(1))
                    .is_err()
            );
        }
        return Ok(());
    }
    let mut held: std::collections::VecDeque<TcpStream> = std::collections::VecDeque::new();
    while Instant::now() < end {
        let begun = Instant::now();
        if let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) {
            match kind {
                "connect" => drop(stream),
                "vanish" => vanish(stream),
                _ => {
                    if kind == "slow" {
                        let _ = stream.write_all(b"\x01");
                    }
                    held.push_back(stream);
                    // So many of each that they are 10,000 together, or as many as a process may have.
                    if held.len() >= 3_333 {
                        held.pop_front();
                    }
                    if kind == "slow"
                        && let Some(mut oldest) = held.pop_front()
                    {
                        let _ = oldest.write_all(b"\0");
                        held.push_back(oldest);
                    }
                }
            }
        } else if held.len() > 100 {
            held.drain(..50);
        }
        std::thread::sleep(pause.saturating_sub(begun.elapsed()));
    }
    Ok(())
}

/// Closes a connection without telling the other end. Without the right to do that it is an ordinary close.
fn vanish(stream: TcpStream) {
    const TCP_REPAIR: libc::c_int = 19;
    let on: libc::c_int = 1;
    // SAFETY: the option takes an integer, which is there.
    unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            TCP_REPAIR,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        );
    }
    drop(stream);
}
