//! The far end of the fault cases: in this process, where the case decides who looks when; or a process of its own, to be frozen
//! and killed.
// Each of the test files that share this uses a part of it.
#![allow(dead_code)]

#[path = "../second_process/mod.rs"]
mod second_process;

use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use weft_fabric::verbs::{Rail, RailOptions, Verbs, VerbsOptions, rails};
use weft_fabric::{Clock, HostMemory};
use weft_plan::{Place, Spans, Time};
use weft_protocol::{
    Access, Atomic, AtomicAct, Body, Direction, Done, Epoch, Failure, Leg, Loss, Move, Op, OpId, PathId, PeerAddress,
    Region, RegionKey, RemoteRegion, Signal, Transport,
};

use second_process::SecondProcess;

const ROLE: &str = "WEFT_TEST_VERBS_PEER_RAIL";
pub const LEN: usize = 4 << 20;

pub fn all_rails() -> Vec<Rail> {
    rails(&RailOptions::default()).expect("an RDMA device")
}

fn key(epoch: Epoch, slot: u32) -> RegionKey {
    RegionKey {
        epoch,
        slot,
        secret: 0x1234_5678_9abc_def0 + u128::from(slot),
    }
}

/// What a peer was told of a region.
pub fn remote(region: &Region) -> RemoteRegion {
    RemoteRegion {
        key: region.key,
        len: region.memory.len(),
        place: Place::DRAM,
        access: region.access,
        grants: Arc::from([]),
    }
}

pub fn whole_leg(near: &Region, far: &RemoteRegion) -> Arc<Leg> {
    let all = || Spans::contiguous(0, far.len);
    Arc::new(Leg::new(near.clone(), all(), far.clone(), all()).expect("a leg within its regions"))
}

/// One end in this process, with all that it has said.
pub struct End {
    pub verbs: Verbs,
    pub clock: Clock,
    epoch: Epoch,
    pub said: Vec<Signal>,
    next_slot: u32,
    next_op: u64,
}

impl End {
    pub fn start(rail: &Rail, options: VerbsOptions, epoch: u64, clock: Clock) -> End {
        let epoch = Epoch(epoch);
        End {
            verbs: Verbs::start(options, rail.clone(), epoch, clock).expect("the rail starts"),
            clock,
            epoch,
            said: Vec::new(),
            next_slot: 0,
            next_op: 0,
        }
    }

    pub fn address(&self) -> PeerAddress {
        self.verbs.capabilities().address.clone()
    }

    pub fn region(&mut self, fill: u8, access: Access) -> Region {
        let region = Region {
            key: key(self.epoch, self.next_slot),
            memory: Arc::new(HostMemory::from_vec(vec![fill; LEN])),
            place: Place::DRAM,
            access,
        };
        self.next_slot += 1;
        self.verbs.register(&region).expect("host memory can be registered");
        region
    }

    pub fn poll(&mut self) {
        self.verbs.poll(self.clock.now(), &mut self.said);
    }

    pub fn op(&mut self, direction: Direction, leg: &Arc<Leg>, range: std::ops::Range<u64>) -> Op {
        self.next_op += 1;
        Op::new(
            OpId(self.next_op),
            self.clock.now().saturating_add(Time::from_secs(30)),
            Body::Move(Move::new(direction, leg.clone(), range)),
        )
    }

    pub fn atomic(&mut self, region: &RemoteRegion, offset: u64, act: AtomicAct) -> Op {
        self.next_op += 1;
        Op::new(
            OpId(self.next_op),
            self.clock.now().saturating_add(Time::from_secs(30)),
            Body::Atomic(Atomic {
                region: Arc::new(region.clone()),
                offset,
                act,
            }),
        )
    }

    pub fn message(&mut self, payload: &[u8]) -> Op {
        self.next_op += 1;
        Op::new(
            OpId(self.next_op),
            self.clock.now().saturating_add(Time::from_secs(30)),
            Body::Message(payload.into()),
        )
    }

    pub fn post(&mut self, path: PathId, ops: &[Op]) {
        let accepted = self.verbs.post(path, ops, self.clock.now()).expect("the path lives");
        assert_eq!(accepted, ops.len(), "there is room");
    }

    pub fn outcome(&self, id: OpId) -> Option<Result<Done, Failure>> {
        self.said.iter().find_map(|signal| match signal {
            Signal::Completed { op, outcome, .. } if *op == id => Some(*outcome),
            _ => None,
        })
    }

    pub fn lost(&self, id: PathId) -> Option<(Loss, bool)> {
        self.said.iter().find_map(|signal| match signal {
            Signal::Lost { path, loss, fenced } if *path == id => Some((*loss, *fenced)),
            _ => None,
        })
    }

    pub fn opened(&self, id: PathId) -> bool {
        self.said.contains(&Signal::Opened { path: id })
    }

    /// Polls until `met`, and fails when that takes far too long.
    pub fn until(&mut self, what: &str, mut met: impl FnMut(&mut End) -> bool) {
        let give_up = self.clock.now().saturating_add(Time::from_secs(60));
        while !met(self) {
            self.poll();
            std::thread::sleep(Duration::from_micros(100));
            assert!(self.clock.now() < give_up, "waited in vain for {what}; {:?}", self.said);
        }
    }
}

/// Polls both ends until `met`.
pub fn until(a: &mut End, b: &mut End, what: &str, mut met: impl FnMut(&mut End, &mut End) -> bool) {
    a.until(what, |a| {
        b.poll();
        met(a, b)
    });
}

/// Opens a path, and returns it as both ends number it.
pub fn connect(a: &mut End, b: &mut End) -> (PathId, PathId) {
    let before = b.said.len();
    let near = a.verbs.open(&b.address(), a.clock.now()).expect("open starts");
    let mut far = None;
    until(a, b, "a path to open", |a, b| {
        far = b.said[before..].iter().find_map(|signal| match signal {
            Signal::Accepted { path } => Some(*path),
            _ => None,
        });
        a.opened(near) && far.is_some()
    });
    (near, far.expect("accepted"))
}

/// The body of the test that is only run as a peer's process: two regions, and it does as it is told.
pub fn be_a_peer() {
    let Ok(rail) = std::env::var(ROLE) else { return };
    let rail = all_rails().into_iter().find(|r| r.name() == rail).expect("the rail");
    let mut end = End::start(&rail, VerbsOptions::default(), 42, Clock::start());
    let regions = [1, 2].map(|fill| end.region(fill, Access::READ_WRITE));
    say(&end.address().0);
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
    loop {
        end.poll();
        for signal in std::mem::take(&mut end.said) {
            match signal {
                Signal::Arrived { arrival, .. } => say(&format!("arrived {} {}", arrival.tag, arrival.index)),
                Signal::Lost { loss, .. } => say(&format!("lost {loss:?}")),
                _ => {}
            }
        }
        while let Ok(command) = inbox.try_recv() {
            match command.as_str() {
                "bytes" => {
                    let mut bytes = [0; 4];
                    regions[0].memory.bytes().read(0, &mut bytes);
                    say(&format!("{bytes:?}"));
                }
                other => panic!("an unknown command {other}"),
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn say(line: &str) {
    println!("PEER {line}");
    std::io::stdout().flush().expect("the test listens");
}

/// A peer's process, killed when dropped.
pub struct Peer {
    process: SecondProcess,
    pub address: PeerAddress,
}

impl Peer {
    pub fn start(rail: &Rail) -> Peer {
        let mut process = SecondProcess::start(ROLE, &rail.name());
        let address = PeerAddress(process.reply());
        Peer { process, address }
    }

    /// One of its two regions.
    pub fn region(&self, slot: u32) -> RemoteRegion {
        RemoteRegion {
            key: key(Epoch(42), slot),
            len: LEN as u64,
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
