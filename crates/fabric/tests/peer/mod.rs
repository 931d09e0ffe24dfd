//! A real second process: the test binary itself, started again, that owns memory and obeys commands.
// Each of the test files that share this uses a part of it.
#![allow(dead_code)]

#[path = "../second_process/mod.rs"]
pub mod second_process;

use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use weft_fabric::memory::AllocateOptions;
use weft_fabric::{Clock, HostMemory, Live, SharedMemory, SharedMemoryOptions};
use weft_plan::{Place, Spans, Time};
use weft_protocol::{
    Access, Body, Direction, Done, Epoch, Failure, HostBytes, Leg, Loss, Move, Op, OpId, PathId, PeerAddress, Progress,
    Region, RegionKey, RemoteRegion, Signal, Transport,
};

use second_process::SecondProcess;

const ROLE: &str = "WEFT_TEST_PEER_BYTES";

/// What the byte at `offset` of a peer's region is at first.
pub fn pattern(offset: usize) -> u8 {
    (offset * 31 + offset / 4099) as u8
}

/// The regions of a peer, in the order of their slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mapped = 0,
    Foreign = 1,
}

fn key(kind: Kind) -> RegionKey {
    RegionKey {
        epoch: Epoch(42),
        slot: kind as u32,
        secret: 0x1234_5678_9abc_def0 + kind as u128,
    }
}

/// The body of the test that is only run as a peer's process.
pub fn be_a_peer() {
    let Ok(bytes) = std::env::var(ROLE) else { return };
    let len: usize = bytes.parse().expect("a number of bytes");
    let clock = Clock::start();
    let mut transport =
        SharedMemory::start(SharedMemoryOptions::default(), Epoch(42), clock).expect("the transport starts");
    let content: Vec<u8> = (0..len).map(pattern).collect();
    let mapped = HostMemory::allocate(len, AllocateOptions::default()).expect("there is memory");
    mapped.write(0, &content);
    let regions = [
        (Kind::Mapped, Arc::new(mapped)),
        (Kind::Foreign, Arc::new(HostMemory::from_vec(content))),
    ];
    for (kind, memory) in &regions {
        transport
            .register(&Region {
                key: key(*kind),
                memory: memory.clone(),
                place: Place::DRAM,
                access: Access::READ_WRITE,
            })
            .expect("host memory can be registered");
    }
    say(&transport.capabilities().address.0);
    let (commands, inbox) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if commands.send(line).is_err() {
                return;
            }
        }
        // The test is over, or dead.
        std::process::exit(0);
    });
    let mut signals = Vec::new();
    loop {
        while transport.poll(clock.now(), &mut signals) == Progress::Busy {}
        for signal in signals.drain(..) {
            match signal {
                Signal::Arrived { arrival, .. } => say(&format!("arrived {} {}", arrival.tag, arrival.index)),
                Signal::Lost { loss, fenced, .. } => say(&format!("lost {loss:?} {fenced}")),
                Signal::Message { path, payload } => {
                    let op = Op::new(OpId(0), Time::MAX, Body::Message(payload.into()));
                    transport.post(path, &[op], clock.now()).expect("the path lives");
                }
                _ => {}
            }
        }
        while let Ok(command) = inbox.try_recv() {
            match command.as_str() {
                "release" => say(&format!("{:?}", transport.release(&key(Kind::Mapped)))),
                "stamp" => regions.iter().for_each(|(_, m)| m.write(0, &vec![0xee; len])),
                "intact" => say(&regions.iter().all(|(_, m)| m.snapshot() == vec![0xee; len]).to_string()),
                "use up descriptors" => {
                    use_up_descriptors();
                    say("none left");
                }
                other => panic!("an unknown command {other}"),
            }
        }
        let mut wait = libc::pollfd {
            fd: transport.wake_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry.
        unsafe { libc::poll(&mut wait, 1, 1) };
    }
}

/// Lowers the limit, then takes every descriptor below it.
fn use_up_descriptors() {
    let limit = libc::rlimit {
        rlim_cur: 64,
        rlim_max: 64,
    };
    // SAFETY: a plain call with a valid limit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    // SAFETY: duplicates that live as long as this process.
    while unsafe { libc::dup(0) } >= 0 {}
}

fn say(line: &str) {
    println!("PEER {line}");
    std::io::stdout().flush().expect("the test listens");
}

/// A peer's process, killed when dropped.
pub struct Peer {
    process: SecondProcess,
    pub address: PeerAddress,
    len: u64,
}

impl Peer {
    pub fn start(len: usize) -> Peer {
        let mut process = SecondProcess::start(ROLE, &len.to_string());
        let address = PeerAddress(process.reply());
        Peer {
            process,
            address,
            len: len as u64,
        }
    }

    pub fn region(&self, kind: Kind) -> RemoteRegion {
        RemoteRegion {
            key: key(kind),
            len: self.len,
            place: Place::DRAM,
            access: Access::READ_WRITE,
            grants: Arc::from([]),
        }
    }
}

impl Deref for Peer {
    type Target = SecondProcess;
    fn deref(&self) -> &SecondProcess {
        &self.process
    }
}

impl DerefMut for Peer {
    fn deref_mut(&mut self) -> &mut SecondProcess {
        &mut self.process
    }
}

/// This process's end.
pub struct Near {
    pub transport: SharedMemory,
    pub clock: Clock,
    pub path: PathId,
    pub signals: Vec<Signal>,
    next_op: u64,
    next_slot: u32,
}

impl Near {
    pub fn connected(options: SharedMemoryOptions, peer: &Peer) -> Near {
        Near::connected_to(options, &peer.address)
    }

    pub fn connected_to(options: SharedMemoryOptions, peer: &PeerAddress) -> Near {
        let clock = Clock::start();
        let transport = SharedMemory::start(options, Epoch(7), clock).expect("the transport starts");
        let mut near = Near {
            transport,
            clock,
            path: PathId(0),
            signals: Vec::new(),
            next_op: 0,
            next_slot: 0,
        };
        near.path = near.transport.open(peer, clock.now()).expect("the peer listens");
        let path = near.path;
        near.until(|s| matches!(s, Signal::Opened { path: p } if *p == path));
        near
    }

    pub fn local(&mut self, memory: HostMemory) -> Region {
        let slot = self.next_slot;
        self.next_slot += 1;
        let region = Region {
            key: RegionKey {
                epoch: Epoch(7),
                slot,
                secret: 5,
            },
            memory: Arc::new(memory),
            place: Place::DRAM,
            access: Access::NONE,
        };
        self.transport.register(&region).expect("host memory can be registered");
        region
    }

    pub fn op(&mut self, direction: Direction, leg: &Arc<Leg>, range: std::ops::Range<u64>, deadline: Time) -> Op {
        self.next_op += 1;
        Op::new(
            OpId(self.next_op),
            deadline,
            Body::Move(Move::new(direction, leg.clone(), range)),
        )
    }

    pub fn soon(&self) -> Time {
        self.clock.now().saturating_add(Time::from_secs(20))
    }

    /// Posts one operation and waits for its completion.
    pub fn carry_out(&mut self, op: Op) -> Result<Done, Failure> {
        let id = op.id;
        assert_eq!(self.transport.post(self.path, &[op], self.clock.now()), Ok(1));
        self.completion(id)
    }

    pub fn completion(&mut self, id: OpId) -> Result<Done, Failure> {
        match self.until(|s| matches!(s, Signal::Completed { op, .. } if *op == id)) {
            Signal::Completed { outcome, .. } => outcome,
            other => unreachable!("{other:?}"),
        }
    }

    pub fn loss(&mut self) -> (Loss, bool) {
        match self.until(|s| matches!(s, Signal::Lost { .. })) {
            Signal::Lost { loss, fenced, .. } => (loss, fenced),
            other => unreachable!("{other:?}"),
        }
    }

    /// Polls until a signal comes that is wanted, and keeps the others.
    pub fn until(&mut self, wanted: impl Fn(&Signal) -> bool) -> Signal {
        let give_up = self.clock.now().saturating_add(Time::from_secs(30));
        loop {
            if let Some(at) = self.signals.iter().position(&wanted) {
                return self.signals.remove(at);
            }
            assert!(
                self.clock.now() < give_up,
                "waited in vain; there was {:?}",
                self.signals
            );
            if self.transport.poll(self.clock.now(), &mut self.signals) == Progress::Idle && self.signals.is_empty() {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}

pub fn whole_leg(near: &Region, far: &RemoteRegion) -> Arc<Leg> {
    let len = far.len;
    let spans = Spans::contiguous(0, len);
    Arc::new(Leg::new(near.clone(), spans.clone(), far.clone(), spans).expect("regions of one size"))
}
