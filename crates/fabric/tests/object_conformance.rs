//! The public suite over objects, on real servers in processes of their own; and with every trouble that a server, or the way to it, can have.
#![cfg(feature = "s3")]

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::object::{Bucket, BucketOptions, ObjectHere, ObjectHereOptions, ObjectMemory, ObjectOptions};
use weft_fabric::{Clock, HostMemory};
use weft_plan::{Place, Spans, Time};
use weft_protocol::conformance::{CASES_ALONE, Ends, Harness, Side, Trouble};
use weft_protocol::{
    Access, Body, Commit, Direction, Done, Epoch, Failure, HostBytes, Leg, Memory, Move, Op, OpId, PathId, Refusal,
    Region, RegionKey, RemoteRegion, Signal, Transport,
};
use weft_testing_s3::{BUCKET, Gate, Harm, KEY, KEY_NAME, Kind, REGION, Server};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
#[ignore = "a part of others: their server"]
fn s3_server() {
    weft_testing_s3::serve();
}

fn options(endpoint: String) -> BucketOptions {
    BucketOptions::default()
        .endpoint(endpoint)
        .region(REGION)
        .credentials(KEY_NAME, KEY)
        .retries(3)
}

fn bucket(endpoint: String) -> Bucket {
    Bucket::connect(&format!("s3://{BUCKET}/under/here"), &options(endpoint)).expect("a bucket")
}

struct OverObjects {
    clock: Clock,
    server: Server,
    gate: Gate,
    straight: Bucket,
    through_gate: Bucket,
    object_is_near: bool,
    /// What objects suffer from that are made now.
    trouble: Option<Trouble>,
    can_do_harm: bool,
    made: u32,
}

impl OverObjects {
    fn new(kind: Kind) -> OverObjects {
        let server = Server::start(kind);
        let gate = Gate::before(server.port());
        OverObjects {
            clock: Clock::start(),
            straight: bucket(server.endpoint()),
            through_gate: bucket(gate.endpoint()),
            server,
            gate,
            object_is_near: false,
            trouble: None,
            can_do_harm: false,
            made: 0,
        }
    }

    fn is_object(&self, side: Side) -> bool {
        (side == Side::Initiator) == self.object_is_near
    }
}

impl Harness for OverObjects {
    fn ends(&mut self) -> Ends {
        unreachable!("it has no peers")
    }
    fn has_no_peers(&self) -> bool {
        true
    }
    fn memory(&mut self, side: Side, len: u64) -> Arc<dyn Memory> {
        if !self.is_object(side) {
            return Arc::new(HostMemory::allocate(len as usize, Default::default()).expect("memory"));
        }
        self.made += 1;
        let name = format!("object-{}", self.made);
        let there = if self.trouble == Some(Trouble::Shrunk) {
            len / 2
        } else {
            len
        };
        let put = self
            .straight
            .put(&name, vec![0; there as usize], None)
            .expect("this process");
        put.wait(PATIENCE).expect("the object is put");
        let bucket = match self.trouble {
            Some(_) => &self.through_gate,
            None => &self.straight,
        };
        Arc::new(ObjectMemory::open(bucket, &name, ObjectOptions::sized(len)).expect("an object"))
    }
    fn place(&self, side: Side) -> Place {
        if self.is_object(side) {
            Place::Object
        } else {
            Place::DRAM
        }
    }
    fn look<'m>(&self, memory: &'m dyn Memory) -> &'m dyn HostBytes {
        match memory.as_any().downcast_ref::<ObjectMemory>() {
            Some(object) => object,
            None => memory.bytes(),
        }
    }
    fn lasting(&self, memory: &dyn Memory) -> Option<Vec<u8>> {
        let object: &ObjectMemory = memory.as_any().downcast_ref()?;
        let asked = self
            .straight
            .read(object.name(), 0..object.len(), None)
            .expect("this process");
        asked.wait(PATIENCE).ok()
    }
    fn alone(&mut self) -> Option<(Box<dyn Transport>, Epoch)> {
        let here = ObjectHere::start(Epoch(5), self.clock, ObjectHereOptions::default()).expect("a transport");
        Some((Box::new(here), Epoch(5)))
    }
    /// What is written of an object goes to the server when it is committed, so what a server refuses is told then: those troubles
    /// (`Full`, `ReadOnly`, `Failing`) have tests of their own below, with commits.
    fn trouble(&mut self, trouble: Option<Trouble>) -> bool {
        if !self.can_do_harm {
            return false;
        }
        let harm = match trouble {
            None | Some(Trouble::Shrunk) => Harm::None,
            Some(Trouble::Short) => Harm::Cut(700_000),
            Some(Trouble::Stuck) => Harm::Held,
            Some(Trouble::Full | Trouble::ReadOnly | Trouble::Failing) => return false,
        };
        self.gate.harm(harm);
        self.trouble = trouble;
        true
    }
    fn now(&mut self) -> Time {
        self.clock.now()
    }
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Every case with one server: starting it takes longer than most of them.
fn all(mut harness: OverObjects) {
    for (name, case) in CASES_ALONE {
        println!("{name}, by {:?}", harness.server.kind());
        case(&mut harness);
    }
}

#[test]
fn every_case_with_every_server() {
    Kind::all().into_iter().for_each(|kind| all(OverObjects::new(kind)));
}

#[test]
fn with_the_object_as_the_near_side() {
    all(OverObjects {
        object_is_near: true,
        ..OverObjects::new(Kind::Files)
    });
}

#[test]
fn with_every_trouble_on_the_way() {
    for kind in Kind::all() {
        all(OverObjects {
            can_do_harm: true,
            ..OverObjects::new(kind)
        });
    }
}

/// One object and memory beside it, in a transport of their own.
struct Beside {
    clock: Clock,
    here: ObjectHere,
    path: PathId,
    host: Arc<HostMemory>,
    leg: Arc<Leg>,
    remote: Arc<RemoteRegion>,
    asked: u64,
}

impl Beside {
    fn of(object: ObjectMemory, options: ObjectHereOptions) -> Beside {
        let clock = Clock::start();
        let mut here = ObjectHere::start(Epoch(5), clock, options).expect("a transport");
        let len = object.len();
        let host = Arc::new(HostMemory::allocate(len as usize, Default::default()).expect("memory"));
        let key = |slot| RegionKey {
            epoch: Epoch(5),
            slot,
            secret: 5,
        };
        let access = Access::NONE;
        let near = Region {
            key: key(1),
            memory: host.clone(),
            place: Place::DRAM,
            access,
        };
        let far = Region {
            key: key(2),
            memory: Arc::new(object),
            place: Place::Object,
            access,
        };
        here.register(&near).expect("registered");
        here.register(&far).expect("registered");
        let remote = RemoteRegion {
            key: far.key,
            len,
            place: far.place,
            access,
            grants: Arc::new([]),
        };
        let all = Spans::contiguous(0, len);
        let leg = Leg::new(near, all.clone(), remote.clone(), all).expect("a leg");
        let address = here.capabilities().address.clone();
        let path = here.open(&address, clock.now()).expect("its own address");
        Beside {
            clock,
            here,
            path,
            host,
            leg: Arc::new(leg),
            remote: Arc::new(remote),
            asked: 0,
        }
    }

    fn carry(&mut self, body: Body, patience: Time) -> Result<Done, Failure> {
        self.asked += 1;
        let now = self.clock.now();
        let op = Op::new(OpId(self.asked), now.saturating_add(patience), body);
        assert_eq!(self.here.post(self.path, &[op], now), Ok(1));
        let mut signals = Vec::new();
        loop {
            self.here.poll(self.clock.now(), &mut signals);
            for signal in signals.drain(..) {
                if let Signal::Completed { op, outcome, .. } = signal {
                    assert_eq!(op, OpId(self.asked));
                    return outcome;
                }
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn moved(&mut self, direction: Direction) -> Result<(), Failure> {
        let bytes = self.leg.bytes();
        for start in (0..bytes).step_by(4 << 20) {
            let part = Move::new(direction, Arc::clone(&self.leg), start..bytes.min(start + (4 << 20)));
            let done = self.carry(Body::Move(part.checksum(true)), Time::from_secs(30))?;
            assert!(done.far_sum.is_some() && done.far_sum == done.near_sum, "{done:?}");
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), Failure> {
        let commit = Commit::new(Arc::clone(&self.remote), 1, 0);
        self.carry(Body::Commit(commit), Time::from_secs(30)).map(drop)
    }

    fn counted(&self, name: &str) -> u64 {
        use weft_fabric::Live as _;
        let counters = self.here.counters();
        counters
            .iter()
            .find(|(known, _)| *known == name)
            .map_or(0, |(_, count)| *count)
    }
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|at| ((at * 31 + seed) >> 3) as u8).collect()
}

/// Parts go as soon as they are whole, so that an object larger than the memory there is can be written; it is there when it is committed, and not before.
#[test]
fn a_large_object_goes_part_by_part_and_is_there_when_it_is_committed() {
    for kind in Kind::all() {
        let server = Server::start(kind);
        let straight = bucket(server.endpoint());
        let len = (23 << 20) + 77;
        let object =
            ObjectMemory::open(&straight, "large", ObjectOptions::sized(len).part_bytes(5 << 20)).expect("a place");
        let mut beside = Beside::of(object, ObjectHereOptions::default().staging_bytes(11 << 20));
        for seed in [1, 2] {
            let bytes = pattern(len, seed);
            beside.host.write(0, &bytes);
            beside.moved(Direction::Write).expect("written");
            assert_eq!(
                straight.size("large", PATIENCE).expect("asked").is_some(),
                seed == 2,
                "{kind:?}"
            );
            beside.commit().expect("committed");
            beside.commit().expect("asking again is harmless");
            assert_eq!(
                (beside.counted("parts_sent"), beside.counted("draft_bytes")),
                (5 * seed, 0)
            );
            beside.host.write(0, &vec![0; len as usize]);
            beside.moved(Direction::Read).expect("read");
            assert!(beside.host.snapshot() == bytes, "{kind:?}: not what was committed");
        }
    }
}

/// An object is made as a whole, or not at all.
#[test]
fn a_draft_with_gaps_is_not_committed() {
    let server = Server::start(Kind::Files);
    let straight = bucket(server.endpoint());
    let object = ObjectMemory::open(&straight, "half", ObjectOptions::sized(1000)).expect("a place");
    let mut beside = Beside::of(object, ObjectHereOptions::default());
    let half = Move::new(Direction::Write, Arc::clone(&beside.leg), 0..500);
    beside.carry(Body::Move(half), Time::from_secs(30)).expect("written");
    assert_eq!(beside.commit(), Err(Refusal::Malformed.into()));
    assert_eq!(straight.size("half", PATIENCE).expect("asked"), None);
    beside.moved(Direction::Write).expect("written");
    beside.commit().expect("it is whole now");
    assert_eq!(straight.size("half", PATIENCE).expect("asked"), Some(1000));
}

/// What a server says, by what the caller does next; and afterwards all is as before.
#[test]
fn what_a_server_says_is_told_as_what_it_is() {
    let server = Server::start(Kind::Files);
    let (gate, straight) = (Gate::before(server.port()), bucket(server.endpoint()));
    let bytes = pattern(1 << 20, 3);
    let answers = [
        (Harm::Answer(503, "SlowDown"), Refusal::Throttled),
        (Harm::Answer(500, "InternalError"), Refusal::DeviceFailed),
        (Harm::Answer(507, "InsufficientStorage"), Refusal::NoRoom),
        (Harm::Answer(403, "AccessDenied"), Refusal::Denied),
        (Harm::Answer(404, "NoSuchBucket"), Refusal::NoContainer),
        (Harm::Answer(405, "MethodNotAllowed"), Refusal::ReadOnly),
        (Harm::Closed, Refusal::NotReached),
    ];
    for (nth, (harm, refusal)) in answers.into_iter().enumerate() {
        let name = format!("object-{nth}");
        straight
            .put(&name, bytes.clone(), None)
            .expect("this process")
            .wait(PATIENCE)
            .expect("put");
        let object =
            ObjectMemory::open(&bucket(gate.endpoint()), &name, ObjectOptions::sized(1 << 20)).expect("a place");
        let mut beside = Beside::of(object, ObjectHereOptions::default());
        gate.harm(harm.clone());
        assert_eq!(beside.moved(Direction::Read), Err(refusal.into()), "{harm:?}");
        beside.moved(Direction::Write).expect("it waits for its commit");
        assert_eq!(beside.commit(), Err(refusal.into()), "{harm:?}");
        gate.harm(Harm::None);
        beside.host.write(0, &bytes);
        beside.moved(Direction::Write).expect("written");
        beside.commit().expect("the same commit, once the server lets it");
        beside.moved(Direction::Read).expect("read");
        assert!(beside.host.snapshot() == bytes);
    }
}

/// Wrong credentials, no such bucket, an object that has gone, a server that is not there.
#[test]
fn what_is_wrong_is_told_when_it_is_asked_for() {
    for kind in Kind::all() {
        let mut server = Server::start(kind);
        let straight = bucket(server.endpoint());
        straight.probe(PATIENCE).expect("it is there");
        assert_eq!(straight.list(PATIENCE).expect("listed"), []);
        let refused = |url: &str, options: BucketOptions| {
            let bucket = Bucket::connect(url, &options).expect("a bucket");
            bucket.probe(PATIENCE).expect_err("it is not").refusal()
        };
        let here = options(server.endpoint());
        let url = format!("s3://{BUCKET}");
        assert_eq!(
            refused(&url, here.clone().credentials(KEY_NAME, "wrong")),
            Some(Refusal::Denied),
            "{kind:?}"
        );
        assert_eq!(
            refused("s3://no-such-bucket", here),
            Some(Refusal::NoContainer),
            "{kind:?}"
        );
        straight
            .put("object", vec![1; 100], None)
            .expect("this process")
            .wait(PATIENCE)
            .expect("put");
        let listed = straight.list(PATIENCE).expect("listed");
        assert_eq!(listed.len(), 1);
        assert_eq!((listed[0].key.as_str(), listed[0].bytes), ("object", 100));
        let object = ObjectMemory::open(&straight, "object", ObjectOptions::default()).expect("a place");
        let mut beside = Beside::of(object, ObjectHereOptions::default());
        beside.moved(Direction::Read).expect("it is there");
        for _ in 0..2 {
            straight
                .remove("object", None)
                .expect("this process")
                .wait(PATIENCE)
                .expect("removed");
        }
        assert_eq!(beside.moved(Direction::Read), Err(Refusal::NoMemory.into()), "{kind:?}");
        if kind == Kind::Files {
            server.remove_bucket();
            // This server makes no difference between the two, and makes a bucket anew for what is put; the gate answers as others do.
            let ended = beside.moved(Direction::Read);
            let gone = |failure| matches!(failure, Failure::Refused(Refusal::NoContainer | Refusal::NoMemory));
            assert!(ended.is_err_and(gone), "{ended:?}");
            server.return_bucket();
        }
        server.kill();
        assert_eq!(
            straight.probe(PATIENCE).expect_err("nobody is there").refusal(),
            Some(Refusal::NotReached)
        );
        assert_eq!(beside.moved(Direction::Read), Err(Refusal::NotReached.into()));
        server.restart();
        beside.moved(Direction::Write).expect("written");
        beside.commit().expect("it is back");
    }
}

/// A frozen server holds a request no longer than its deadline, and what comes late lands nowhere.
#[test]
fn a_frozen_server_does_not_hold_a_request_past_its_deadline() {
    let server = Server::start(Kind::Files);
    let straight = bucket(server.endpoint());
    straight
        .put("object", pattern(8 << 20, 1), None)
        .expect("this process")
        .wait(PATIENCE)
        .expect("put");
    let object = ObjectMemory::open(&straight, "object", ObjectOptions::default()).expect("a place");
    let mut beside = Beside::of(object, ObjectHereOptions::default());
    beside.moved(Direction::Read).expect("read");
    server.freeze();
    let whole = Move::new(Direction::Read, Arc::clone(&beside.leg), 0..4 << 20);
    let ended = beside.carry(Body::Move(whole), Time::from_ms(200));
    assert_eq!(ended, Err(Failure::Expired));
    let held = vec![0x55; 8 << 20];
    beside.host.write(0, &held);
    server.thaw();
    for _ in 0..500 {
        beside.here.poll(beside.clock.now(), &mut Vec::new());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(beside.host.snapshot() == held, "memory was touched after the end");
    beside.moved(Direction::Read).expect("it goes on");
}

#[test]
fn addresses_and_names_are_looked_at() {
    for url in ["", "s3://", "s3:///prefix", "http://bucket", "blocks"] {
        let refused = Bucket::connect(url, &BucketOptions::default());
        assert!(
            refused.is_err_and(|error| error.to_string().contains("s3://BUCKET")),
            "{url}"
        );
    }
    let bucket = bucket("http://127.0.0.1:1".to_owned());
    for name in ["", "/a", "a/", "a//b", &"x".repeat(1020)] {
        assert!(
            ObjectMemory::open(&bucket, name, ObjectOptions::sized(1)).is_err(),
            "{name}"
        );
    }
    assert!(ObjectMemory::open(&bucket, "a", ObjectOptions::sized(0)).is_err());
    assert!(ObjectMemory::open(&bucket, "a", ObjectOptions::sized(6 << 40)).is_err());
    assert!(
        !format!("{:?}", options(String::new())).contains(KEY),
        "keys are not printed"
    );
}
