//! How fast the TCP transport is on this machine, beside a bare socket: two processes, both spinning.
//!
//! `cargo run --release -p weft-fabric --example tcp_bench [connections [shape]]`, the shape being a part of a row's name.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use weft_fabric::tcp::{Tcp, TcpOptions};
use weft_fabric::{Clock, HostMemory};
use weft_plan::{Place, Span, Spans, Time};
use weft_protocol::{
    Access, Body, Direction, Epoch, Leg, Move, Op, OpId, PathId, PeerAddress, Region, RegionKey, RemoteRegion, Signal,
    Transport,
};

const REGION_BYTES: usize = 256 << 20;

const KEY: RegionKey = RegionKey {
    epoch: Epoch(2),
    slot: 0,
    secret: 4711,
};

type Failed = Box<dyn std::error::Error>;

fn main() -> Result<(), Failed> {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("serve") => serve(arguments.next().and_then(|n| n.parse().ok()).unwrap_or(2)),
        Some(n) => measure(n.parse()?, &arguments.next().unwrap_or_default()),
        None => measure(TcpOptions::default().connections, ""),
    }
}

fn options(connections: u32) -> TcpOptions {
    TcpOptions {
        connections,
        ..TcpOptions::default()
    }
}

fn region(key: RegionKey, access: Access) -> Region {
    let memory = HostMemory::from_vec(vec![1; REGION_BYTES]);
    Region {
        key,
        memory: Arc::new(memory),
        place: Place::DRAM,
        access,
    }
}

/// The target: says where it is, then spins until its parent closes its input.
fn serve(connections: u32) -> Result<(), Failed> {
    let clock = Clock::start();
    let mut tcp = Tcp::start(options(connections), Epoch(2), clock)?;
    tcp.register(&region(KEY, Access::READ_WRITE))?;
    let bare = TcpListener::bind("127.0.0.1:0")?;
    println!("{} {}", tcp.capabilities().address, bare.local_addr()?);
    std::thread::spawn(move || {
        let mut byte = [0];
        let _ = std::io::stdin().read(&mut byte);
        std::process::exit(0);
    });
    bare_serve(&bare)?;
    let mut signals = Vec::new();
    loop {
        tcp.poll(clock.now(), &mut signals);
        for signal in signals.drain(..) {
            if let Signal::Accepted { path } = signal {
                tcp.vouch(path);
            }
        }
    }
}

fn measure(connections: u32, shape: &str) -> Result<(), Failed> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["serve", &connections.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let (address, bare) = line.trim().split_once(' ').ok_or("no addresses")?;

    let mut bare = TcpStream::connect(bare)?;
    bare.set_nodelay(true)?;
    bare.set_nonblocking(true)?;
    println!("{:28} {:>10} {:>10} {:>8}", "", "p50 µs", "best µs", "GB/s");
    let shapes = || SHAPES.iter().filter(|(name, ..)| name.contains(shape));
    for (name, size, repeats) in shapes().map(|&(name, size, count, repeats)| (name, size * count, repeats)) {
        let times = (0..repeats)
            .map(|_| bare_round(&mut bare, size))
            .collect::<Result<_, _>>()?;
        report(&format!("bare socket {name}"), size, times);
    }
    bare.shutdown(std::net::Shutdown::Both)?;

    let clock = Clock::start();
    let mut tcp = Tcp::start(options(connections), Epoch(1), clock)?;
    let local = region(
        RegionKey {
            epoch: Epoch(1),
            slot: 0,
            secret: 1,
        },
        Access::NONE,
    );
    tcp.register(&local)?;
    let path = tcp.open(&PeerAddress(address.to_string()), clock.now())?;
    let mut signals = Vec::new();
    while signals.is_empty() {
        tcp.poll(clock.now(), &mut signals);
    }
    assert!(matches!(signals[0], Signal::Opened { .. }), "{signals:?}");
    tcp.vouch(path);
    let mut bench = Bench {
        tcp,
        clock,
        path,
        local,
        next: 0,
    };
    for direction in [Direction::Read, Direction::Write] {
        for &(name, size, count, repeats) in shapes() {
            let leg = bench.leg(size as u64, count as u64)?;
            let mut times: Vec<f64> = (0..repeats + 2)
                .map(|_| bench.round(direction, &leg))
                .collect::<Result<_, _>>()?;
            times.drain(..2);
            report(&format!("{direction:?} {name}"), size * count, times);
        }
    }
    drop(child.stdin.take());
    child.wait()?;
    Ok(())
}

const SHAPES: &[(&str, usize, usize, usize)] = &[
    ("4 KiB x 1", 4 << 10, 1, 20_000),
    ("4 KiB x 64", 4 << 10, 64, 2_000),
    ("4 KiB x 1024", 4 << 10, 1024, 200),
    ("64 KiB x 64", 64 << 10, 64, 200),
    ("1 MiB x 64", 1 << 20, 64, 15),
    ("64 MiB x 1", 64 << 20, 1, 15),
];

fn report(name: &str, bytes: usize, mut times: Vec<f64>) {
    times.sort_by(f64::total_cmp);
    let p50 = times[times.len() / 2];
    println!(
        "{name:28} {:10.1} {:10.1} {:8.2}",
        p50 * 1e6,
        times[0] * 1e6,
        bytes as f64 / p50 / 1e9
    );
}

struct Bench {
    tcp: Tcp,
    clock: Clock,
    path: PathId,
    local: Region,
    next: u64,
}

impl Bench {
    /// Blocks in an order in which no two are adjacent.
    fn leg(&self, size: u64, count: u64) -> Result<Arc<Leg>, Failed> {
        let shuffled = |step: u64| -> Spans {
            let mut spans = Spans::new();
            for i in 0..count {
                let slot = (i * step) % count.next_power_of_two();
                spans.push(Span {
                    offset: slot * size,
                    len: size,
                });
            }
            spans
        };
        let remote = RemoteRegion {
            key: KEY,
            len: REGION_BYTES as u64,
            place: Place::DRAM,
            access: Access::READ_WRITE,
            grants: Arc::from([]),
        };
        Ok(Arc::new(Leg::new(
            self.local.clone(),
            shuffled(29),
            remote,
            shuffled(37),
        )?))
    }

    /// One transfer, from post to done, cut as the engine would.
    fn round(&mut self, direction: Direction, leg: &Arc<Leg>) -> Result<f64, Failed> {
        let part = std::env::var("PART")
            .ok()
            .and_then(|p| p.parse().ok())
            .unwrap_or(self.tcp.capabilities().carries[0].max_op_bytes);
        let start = Instant::now();
        let deadline = self.clock.now().saturating_add(Time::from_secs(10));
        let (mut at, mut open) = (0, 0);
        let mut signals = Vec::new();
        while at < leg.bytes() || open > 0 {
            while at < leg.bytes() {
                self.next += 1;
                let end = (at + part).min(leg.bytes());
                let op = Op::new(
                    OpId(self.next),
                    deadline,
                    Body::Move(Move::new(direction, leg.clone(), at..end)),
                );
                if self.tcp.post(self.path, &[op], self.clock.now())? == 0 {
                    break;
                }
                at = end;
                open += 1;
            }
            self.tcp.poll(self.clock.now(), &mut signals);
            for signal in signals.drain(..) {
                match signal {
                    Signal::Completed { outcome: Ok(_), .. } => open -= 1,
                    other => return Err(format!("{other:?}").into()),
                }
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Answers eight bytes, which say how much is wanted, with so many bytes.
fn bare_serve(listener: &TcpListener) -> Result<(), Failed> {
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let bytes = vec![1u8; 64 << 20];
    let mut request = [0u8; 8];
    while spin(&mut request.len(), |done| stream.read(&mut request[8 - done..]))? {
        let size = u64::from_le_bytes(request) as usize;
        spin(&mut { size }, |left| stream.write(&bytes[..left]))?;
    }
    Ok(())
}

fn bare_round(stream: &mut TcpStream, size: usize) -> Result<f64, Failed> {
    thread_local!(static BUFFER: std::cell::RefCell<Vec<u8>> = std::cell::RefCell::new(vec![1; 64 << 20]));
    BUFFER.with_borrow_mut(|buffer| {
        let start = Instant::now();
        stream.write_all(&(size as u64).to_le_bytes())?;
        spin(&mut { size }, |left| stream.read(&mut buffer[size - left..size]))?;
        Ok(start.elapsed().as_secs_f64())
    })
}

/// Repeats a nonblocking call until `left` bytes are through; `false` where the peer has closed.
fn spin(left: &mut usize, mut call: impl FnMut(usize) -> std::io::Result<usize>) -> std::io::Result<bool> {
    while *left > 0 {
        match call(*left) {
            Ok(0) => return Ok(false),
            Ok(n) => *left -= n,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}
