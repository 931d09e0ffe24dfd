//! What a kernel's put through the proxy takes, between two processes: latency of a put with a signal until the other end has seen it, and bandwidth.
//!
//! `cargo run --release -p weft --example kernel_put` starts the second process itself. Kernels are those of `crates/gpu/tests/kernels/api.cu`; `--threads` has threads of the CPU ask in their place, by the
//! same ring, on a machine without a GPU too. Two processes share a card only with MPS; without it they take turns of two milliseconds.

use std::ffi::c_void;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft::proxy::{ProxyOptions, ProxyTeam};
use weft::{Agent, Device, DeviceMemory, Error, Launch, Module, Peer, Stream};

const KERNELS: &str = include_str!("../../gpu/tests/kernels/api.ptx");
const DATA: u64 = 16 << 20;
const STRIDE: u32 = 2 << 20;
const LATENCIES: [u32; 5] = [8, 192, 1024, 4096, 65_536];
const FLOODS: [u32; 4] = [64, 4096, 65_536, 1 << 20];

/// As `Case` in `api.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Case {
    rounds: u32,
    bytes: u32,
    to_shift: u32,
    from_shift: u32,
    stride: u32,
    groups: u32,
    report: u64,
    apart: u64,
}

/// Who asks: kernels on a device, or threads.
enum Hand {
    Kernels {
        module: Module,
        stream: Stream,
        report: DeviceMemory,
        times: DeviceMemory,
    },
    Threads,
}

impl Hand {
    fn new(device: Option<&Arc<Device>>) -> Result<Hand, Error> {
        let Some(device) = device else { return Ok(Hand::Threads) };
        Ok(Hand::Kernels {
            module: Module::load(device, KERNELS)?,
            stream: Stream::new(device)?,
            report: DeviceMemory::allocate(device, 64)?,
            times: DeviceMemory::allocate(device, 8 << 20)?,
        })
    }

    /// Runs a kernel of one block for the rank that is here, and tells its report: cycles and nanoseconds.
    fn run(&self, team: &ProxyTeam, kernel: &str, mut case: Case) -> Result<(u64, u64), Error> {
        let Hand::Kernels {
            module,
            stream,
            report,
            times,
        } = self
        else {
            return Ok((0, 0));
        };
        let rank = team.here().start;
        report.write(0, &[0; 64])?;
        (case.report, case.stride) = (report.address(), STRIDE);
        if case.apart != 0 {
            case.apart = times.address();
        }
        let how = Launch {
            grid: (1, 1),
            threads: if kernel.ends_with("thread") { 1 } else { 256 },
            stream: stream.handle(),
        };
        let mut view = team.view(rank)?;
        let mut parameters: [*mut c_void; 2] = [(&raw mut view).cast(), (&raw mut case).cast()];
        // SAFETY: a team and a case, as the kernels have them; all memory lives until the stream has been waited for.
        unsafe { module.launch(kernel, how, &mut parameters) }?;
        stream.synchronize()?;
        team.check()?;
        let mut words = [0; 16];
        report.read(rank as u64 * 32 + 16, &mut words)?;
        let word = |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().expect("eight"));
        Ok((word(0), word(8)))
    }

    /// Nanoseconds of each round trip.
    fn ping_pong(&self, team: &ProxyTeam, bytes: u32, rounds: u32) -> Result<Vec<f64>, Error> {
        let rank = team.here().start;
        if let Hand::Kernels { times, .. } = self {
            // A thread for what is carried in the request, a block for more.
            let kernel = if bytes <= 8 {
                "ping_pong_thread"
            } else {
                "ping_pong_block"
            };
            let (cycles, ns) = self.run(team, kernel, case(bytes, rounds, 1))?;
            let mut took = vec![0; rounds as usize * 4];
            times.read(0, &mut took)?;
            let a_cycle = ns as f64 / cycles.max(1) as f64;
            let of = |took: &[u8]| f64::from(u32::from_le_bytes(took.try_into().expect("four"))) * a_cycle;
            return Ok(took.chunks(4).map(of).collect());
        }
        let (mut caller, word) = (team.caller(rank)?, team.signal_at(0).expect("a word"));
        let (data, from) = (team.data_at(), vec![7; bytes as usize]);
        let mut took = Vec::new();
        for round in 1..=u64::from(rounds) {
            let began = Instant::now();
            if rank == 0 {
                caller.put_signal(1, data, &from, word, round)?;
            }
            caller.wait(word, round, 1 - rank)?;
            if rank == 1 {
                caller.put_signal(0, data, &from, word, round)?;
            }
            took.push(began.elapsed().as_nanos() as f64);
        }
        caller.quiet()?;
        Ok(took)
    }

    /// Nanoseconds until all of so many puts are there, with the bytes in the heap or in the device's memory.
    fn flood(&self, team: &ProxyTeam, bytes: u32, rounds: u32, apart: bool) -> Result<f64, Error> {
        let rank = team.here().start;
        if let Hand::Kernels { .. } = self {
            let case = case(bytes, rounds, u64::from(apart));
            return Ok(self.run(team, "flood_block", case)?.1 as f64);
        }
        let mut caller = team.caller(rank)?;
        let began = Instant::now();
        if rank == 0 {
            let from = vec![7; bytes as usize];
            for _ in 0..rounds {
                match apart {
                    true => caller.put(1, team.data_at(), &from)?,
                    false => {
                        caller.put_from_heap(1, team.data_at(), team.data_at() + u64::from(STRIDE), bytes.into())?
                    }
                }
            }
            caller.quiet()?;
        }
        Ok(began.elapsed().as_nanos() as f64)
    }
}

fn case(bytes: u32, rounds: u32, apart: u64) -> Case {
    Case {
        rounds,
        bytes,
        to_shift: 0,
        from_shift: 0,
        stride: 0,
        groups: 1,
        report: 0,
        apart,
    }
}

/// A fresh team for each measurement: words begin at zero.
fn team(agent: &Agent, name: &str, rank: usize, peer: &Peer, device: Option<&Arc<Device>>) -> Result<ProxyTeam, Error> {
    let mut peers = vec![Some(peer.clone()), Some(peer.clone())];
    peers[rank] = None;
    let options = ProxyOptions {
        data_bytes: DATA,
        device: device.cloned(),
        deadline: Duration::from_secs(20),
        busy: Duration::from_millis(20),
        ..ProxyOptions::new(name, peers)
    };
    ProxyTeam::join(agent, options)
}

/// Both processes do the same, each for its rank; the first tells.
fn measure(agent: &Agent, rank: usize, peer: &Peer, device: Option<&Arc<Device>>, over: &str) -> Result<(), Error> {
    let hand = Hand::new(device)?;
    let rounds = if over == "tcp" { 2000 } else { 10_000 };
    for bytes in LATENCIES {
        let team = team(agent, &format!("latency-{over}-{bytes}"), rank, peer, device)?;
        let mut took = hand.ping_pong(&team, bytes, rounds)?;
        took.sort_by(f64::total_cmp);
        let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize] / 2e3;
        if rank == 0 {
            println!(
                "{over}: put_signal -> wait, {bytes} bytes: p50 {:.2} us, p99 {:.2} us, p99.9 {:.2} us one way",
                at(0.5),
                at(0.99),
                at(0.999)
            );
        }
        meet(agent, peer)?;
    }
    for apart in [false, true] {
        for bytes in FLOODS {
            let team = team(agent, &format!("flood-{over}-{bytes}-{apart}"), rank, peer, device)?;
            let rounds = (256u32 << 20 >> if over == "tcp" { 3 } else { 0 }) / bytes.max(16 << 10);
            let took = hand.flood(&team, bytes, rounds, apart)?;
            if rank == 0 {
                println!(
                    "{over}: puts of {bytes} bytes from {}: {:.2} GB/s, {:.2} us each",
                    if apart { "elsewhere" } else { "the heap" },
                    f64::from(bytes) * f64::from(rounds) / took,
                    took / f64::from(rounds) / 1e3
                );
            }
            meet(agent, peer)?;
        }
    }
    Ok(())
}

/// Neither drops its team before the other is done with it.
fn meet(agent: &Agent, peer: &Peer) -> Result<(), Error> {
    peer.notify(b"done")?;
    match agent.next_notification(Duration::from_secs(60)) {
        Some(_) => Ok(()),
        None => Err(Error::TimedOut {
            what: "the other process".to_owned(),
        }),
    }
}

fn agent(over: &str, rank: usize) -> Result<Agent, Error> {
    let name = format!("kernel-put-{rank}-{}-{over}", std::process::id());
    let agent = Agent::builder(&name).secret("of an example that is on one machine");
    agent.set("transports", over).listen("127.0.0.1:0").start()
}

/// Whoever comes first.
fn first_peer(agent: &Agent) -> Result<Peer, Error> {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(20) {
        if let Some(peer) = agent.peers().pop() {
            return Ok(peer);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(Error::TimedOut {
        what: "the first process".to_owned(),
    })
}

/// What the first process does, with the second.
fn first(over: &str, second: &mut Child, device: Option<&Arc<Device>>) -> Result<(), Error> {
    let mut address = String::new();
    let stdout = second.stdout.take().expect("its output");
    BufReader::new(stdout).read_line(&mut address).expect("its address");
    let agent = agent(over, 0)?;
    let peer = agent.connect(address.trim())?;
    measure(&agent, 0, &peer, device, over)
}

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let threads = arguments.iter().any(|argument| argument == "--threads");
    let device = if threads { None } else { Some(Device::open(0)?) };
    if let Some(at) = arguments.iter().position(|argument| argument == "--second") {
        let over = arguments.get(at + 1).map_or("", String::as_str);
        let agent = agent(over, 1)?;
        println!("{}", agent.address());
        let peer = first_peer(&agent)?;
        return measure(&agent, 1, &peer, device.as_ref(), over);
    }
    for over in ["shared_memory", "tcp"] {
        let mut second = Command::new(std::env::current_exe().map_err(|_| Error::Stopped)?)
            .args(arguments.iter().map(String::as_str).chain(["--second", over]))
            .stdout(Stdio::piped())
            .spawn()
            .expect("the second process starts");
        let measured = first(over, &mut second, device.as_ref());
        if measured.is_err() {
            let _ = second.kill();
        }
        let _ = second.wait();
        measured?;
    }
    Ok(())
}
