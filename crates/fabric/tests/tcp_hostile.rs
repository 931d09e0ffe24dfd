//! The TCP transport against peers that are not what they should be: written by hand, frame by frame, on a raw socket.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use weft_fabric::tcp::frame::{self, AtomicRequest, Ended, Frame, ReadRequest, WriteRequest};
use weft_fabric::tcp::{Tcp, TcpOptions};
use weft_fabric::{Clock, HostMemory};
use weft_plan::{Place, Spans, Time};
use weft_protocol::{
    Access, Arrival, Atomic, AtomicAct, Body, Direction, Done, Epoch, Failure, Leg, Loss, Move, Op, OpId, PathId,
    PeerAddress, Refusal, Region, RegionKey, RemoteRegion, Signal, Transport,
};

const EPOCH: Epoch = Epoch(5);
const PATIENCE: Time = Time::from_secs(20);

/// The transport under test, and what it has said.
struct Honest {
    tcp: Tcp,
    clock: Clock,
    signals: Vec<Signal>,
    slots: u32,
    ops: u64,
}

impl Honest {
    fn start() -> Honest {
        let clock = Clock::start();
        let options = TcpOptions {
            connections: 1,
            ..TcpOptions::default()
        };
        Honest {
            tcp: Tcp::start(options, EPOCH, clock).unwrap(),
            clock,
            signals: Vec::new(),
            slots: 0,
            ops: 0,
        }
    }

    fn region(&mut self, len: usize, byte: u8, access: Access) -> Region {
        let key = RegionKey {
            epoch: EPOCH,
            slot: self.slots,
            secret: 77,
        };
        self.slots += 1;
        let region = Region {
            key,
            memory: Arc::new(HostMemory::from_vec(vec![byte; len])),
            place: Place::DRAM,
            access,
        };
        self.tcp.register(&region).unwrap();
        region
    }

    fn poll(&mut self) {
        self.tcp.poll(self.clock.now(), &mut self.signals);
    }

    fn until<T>(&mut self, mut met: impl FnMut(&mut Honest) -> Option<T>) -> T {
        let give_up = self.clock.now().saturating_add(PATIENCE);
        loop {
            self.poll();
            if let Some(value) = met(self) {
                return value;
            }
            assert!(self.clock.now() < give_up, "waited in vain; heard {:?}", self.signals);
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn until_lost(&mut self) -> Loss {
        self.until(|h| {
            h.signals.iter().find_map(|s| match s {
                Signal::Lost { loss, .. } => Some(*loss),
                _ => None,
            })
        })
    }

    fn outcome(&self, id: OpId) -> Option<Result<Done, Failure>> {
        self.signals.iter().find_map(|s| match s {
            Signal::Completed { op, outcome, .. } if *op == id => Some(*outcome),
            _ => None,
        })
    }

    /// Posts a move of the whole of `local` against a region of the raw peer.
    fn post(&mut self, path: PathId, direction: Direction, local: &Region, deadline: Time) -> OpId {
        let len = local.memory.len();
        let remote = RemoteRegion {
            key: RegionKey {
                epoch: Epoch(1),
                slot: 0,
                secret: 0,
            },
            len,
            place: Place::DRAM,
            access: Access::READ_WRITE,
            grants: Arc::from([]),
        };
        let spans = Spans::contiguous(0, len);
        let leg = Arc::new(Leg::new(local.clone(), spans.clone(), remote, spans).unwrap());
        self.ops += 1;
        let op = Op::new(OpId(self.ops), deadline, Body::Move(Move::new(direction, leg, 0..len)));
        assert_eq!(self.tcp.post(path, &[op], self.clock.now()), Ok(1));
        OpId(self.ops)
    }

    /// Posts an increment of a word of the raw peer.
    fn post_increment(&mut self, path: PathId, deadline: Time) -> OpId {
        let key = RegionKey {
            epoch: Epoch(1),
            slot: 0,
            secret: 0,
        };
        let region = RemoteRegion {
            key,
            len: 64,
            place: Place::DRAM,
            access: Access::READ_WRITE,
            grants: Arc::from([]),
        };
        self.ops += 1;
        let op = Op::new(
            OpId(self.ops),
            deadline,
            Body::Atomic(Atomic {
                region: Arc::new(region),
                offset: 8,
                act: AtomicAct::FetchAdd(1),
            }),
        );
        assert_eq!(self.tcp.post(path, &[op], self.clock.now()), Ok(1));
        OpId(self.ops)
    }

    fn soon(&self) -> Time {
        self.clock.now().saturating_add(PATIENCE)
    }
}

/// The other end, which says whatever a test wants.
struct Raw {
    socket: TcpStream,
    received: Vec<u8>,
}

impl Raw {
    fn new(socket: TcpStream) -> Raw {
        socket.set_nonblocking(true).unwrap();
        Raw {
            socket,
            received: Vec::new(),
        }
    }

    /// Connects to the transport and joins a path as an opener would.
    fn opener(honest: &mut Honest) -> Raw {
        let mut raw = Raw::stranger(honest);
        raw.say(&hello(frame::VERSION));
        let Frame::Welcome { sent, .. } = raw.hear(honest) else {
            panic!("no welcome");
        };
        // This peer's clock is the transport's own.
        let read = honest.clock.now();
        raw.say(&Frame::Pong { echo: sent, read });
        assert_eq!(raw.hear(honest), Frame::Ready);
        raw
    }

    /// The same, and the transport's owner has come to know it.
    fn peer(honest: &mut Honest) -> Raw {
        let raw = Raw::opener(honest);
        let accepted = honest.signals.iter().rev().find_map(|signal| match signal {
            Signal::Accepted { path } => Some(*path),
            _ => None,
        });
        honest.tcp.vouch(accepted.expect("the path is there"));
        raw
    }

    fn stranger(honest: &Honest) -> Raw {
        Raw::new(TcpStream::connect(honest.tcp.capabilities().address.rest()).unwrap())
    }

    /// Lets the transport open a path to this end.
    fn acceptor(honest: &mut Honest) -> (Raw, PathId) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = PeerAddress(format!("tcp:{}", listener.local_addr().unwrap()));
        let path = honest.tcp.open(&address, honest.clock.now()).unwrap();
        let mut raw = Raw::new(listener.accept().unwrap().0);
        let Frame::Hello { sent, .. } = raw.hear(honest) else {
            panic!("no hello");
        };
        raw.say(&Frame::Welcome {
            version: frame::VERSION,
            echo: sent,
            sent: honest.clock.now(),
        });
        assert!(matches!(raw.hear(honest), Frame::Pong { .. }));
        raw.say(&Frame::Ready);
        honest.until(|h| {
            h.signals
                .iter()
                .any(|s| matches!(s, Signal::Opened { .. }))
                .then_some(())
        });
        honest.tcp.vouch(path);
        (raw, path)
    }

    fn say(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame::encode(frame, &mut bytes);
        self.say_bytes(&bytes);
    }

    fn say_bytes(&mut self, bytes: &[u8]) {
        self.socket.set_nonblocking(false).unwrap();
        self.socket.write_all(bytes).unwrap();
        self.socket.set_nonblocking(true).unwrap();
    }

    fn hear(&mut self, honest: &mut Honest) -> Frame {
        honest.until(|_| {
            if let Some((frame, used)) = frame::decode(&self.received).unwrap() {
                self.received.drain(..used);
                return Some(frame);
            }
            assert!(self.receive(), "the transport closed the connection");
            None
        })
    }

    fn skip(&mut self, honest: &mut Honest, len: usize) -> Vec<u8> {
        honest.until(|_| {
            if self.received.len() >= len {
                return Some(self.received.drain(..len).collect());
            }
            assert!(self.receive(), "the transport closed the connection");
            None
        })
    }

    /// Whether the connection is still open.
    fn receive(&mut self) -> bool {
        let mut bytes = [0; 65536];
        match self.socket.read(&mut bytes) {
            Ok(0) => false,
            Ok(n) => {
                self.received.extend_from_slice(&bytes[..n]);
                true
            }
            Err(e) => e.kind() == ErrorKind::WouldBlock,
        }
    }

    fn until_closed(&mut self, honest: &mut Honest) {
        honest.until(|_| (!self.receive()).then_some(()));
    }
}

fn hello(version: u32) -> Frame {
    Frame::Hello {
        version,
        path: 12345,
        index: 0,
        connections: 1,
        sent: Time::ZERO,
    }
}

fn write_request(region: &Region, op: u64, deadline: Time) -> Frame {
    Frame::WriteRequest(WriteRequest {
        op,
        deadline,
        key: region.key,
        spans: Spans::contiguous(0, region.memory.len()),
        checksum: false,
        arrival: Some(Arrival { tag: 1, index: 0 }),
    })
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.memory.len() as usize];
    region.memory.bytes().read(0, &mut bytes);
    bytes
}

#[test]
fn a_stranger_that_talks_nonsense_is_dropped_and_nobody_else_notices() {
    let mut honest = Honest::start();
    let mut friend = Raw::peer(&mut honest);
    let requests: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0xff; 64],
        &[1, 0, 0, 0],
        &[14, 4, 0, 0, 1, 2, 3, 4],
    ];
    for nonsense in requests {
        let mut stranger = Raw::stranger(&honest);
        stranger.say_bytes(nonsense);
        stranger.until_closed(&mut honest);
    }
    friend.say(&Frame::Message(b"hello".to_vec()));
    honest.until(|h| {
        h.signals
            .iter()
            .any(|s| matches!(s, Signal::Message { .. }))
            .then_some(())
    });
    assert!(!honest.signals.iter().any(|s| matches!(s, Signal::Lost { .. })));
}

#[test]
fn another_version_is_told_ours_and_dropped() {
    let mut honest = Honest::start();
    let mut raw = Raw::stranger(&honest);
    raw.say(&hello(frame::VERSION + 1));
    let Frame::Welcome { version, .. } = raw.hear(&mut honest) else {
        panic!("no welcome");
    };
    assert_eq!(version, frame::VERSION);
    raw.until_closed(&mut honest);
}

#[test]
fn frames_out_of_place_end_the_path_as_garbage() {
    let nonsense: Vec<fn(&Region) -> Vec<Frame>> = vec![
        |_| vec![Frame::Ready],
        |_| vec![hello(frame::VERSION)],
        |_| vec![Frame::ReadData { op: 0, len: 10 }],
        |_| {
            vec![Frame::ReadEnd {
                op: 0,
                outcome: Ok(None),
            }]
        },
        |_| {
            vec![Frame::WriteAck {
                op: 0,
                outcome: Ok(None),
            }]
        },
        |_| vec![Frame::AtomicReply { op: 0, outcome: Ok(1) }],
        |_| vec![Frame::WriteData { op: 3, len: 1 }],
        |_| vec![Frame::WriteEnd { op: 3, complete: true }],
        // The same request twice, as a replay would be.
        |r| vec![write_request(r, 3, Time::MAX), write_request(r, 3, Time::MAX)],
        // More than was announced, less than was announced, and for another write.
        |r| vec![write_request(r, 3, Time::MAX), Frame::WriteData { op: 3, len: 4097 }],
        |r| {
            vec![
                write_request(r, 3, Time::MAX),
                Frame::WriteEnd { op: 3, complete: true },
            ]
        },
        |r| vec![write_request(r, 3, Time::MAX), Frame::WriteData { op: 4, len: 1 }],
        // An answer to a question from the future.
        |_| {
            vec![Frame::Pong {
                echo: Time::MAX,
                read: Time::ZERO,
            }]
        },
    ];
    for frames in nonsense {
        let mut honest = Honest::start();
        let region = honest.region(4096, 9, Access::READ_WRITE);
        let mut raw = Raw::peer(&mut honest);
        for frame in frames(&region) {
            raw.say(&frame);
        }
        assert_eq!(honest.until_lost(), Loss::Garbage);
        raw.until_closed(&mut honest);
        assert_eq!(bytes_of(&region), vec![9; 4096]);
    }
}

#[test]
fn an_oversized_or_truncated_frame_ends_the_path() {
    let mut honest = Honest::start();
    let mut raw = Raw::peer(&mut honest);
    raw.say_bytes(&[6, 0xff, 0xff, 0xff]);
    assert_eq!(honest.until_lost(), Loss::Garbage);

    let mut honest = Honest::start();
    let mut raw = Raw::peer(&mut honest);
    raw.say_bytes(&[14, 100, 0, 0, 1, 2, 3]);
    raw.socket.shutdown(Shutdown::Both).unwrap();
    assert_eq!(honest.until_lost(), Loss::ClosedByPeer);
    assert!(!honest.signals.iter().any(|s| matches!(s, Signal::Message { .. })));
}

#[test]
fn a_peer_that_asks_and_never_reads_is_dropped() {
    let mut honest = Honest::start();
    let region = honest.region(1 << 20, 9, Access::READ);
    let mut raw = Raw::peer(&mut honest);
    let deadline = honest.soon();
    let mut bytes = Vec::new();
    for op in 0..=frame::REQUESTS_MAX as u64 + 100 {
        frame::encode(
            &Frame::ReadRequest(ReadRequest {
                op,
                deadline,
                key: region.key,
                spans: Spans::contiguous(0, 1 << 20),
                checksum: false,
            }),
            &mut bytes,
        );
    }
    raw.say_bytes(&bytes);
    assert_eq!(honest.until_lost(), Loss::Garbage);
}

#[test]
fn messages_to_a_peer_that_never_reads_are_refused_before_long() {
    let mut honest = Honest::start();
    let (_raw, path) = Raw::acceptor(&mut honest);
    let payload: Arc<[u8]> = vec![1; frame::MESSAGE_BYTES_MAX].into();
    // What sockets hold is a few megabytes.
    let refused = (0..1024).position(|nth| {
        let op = Op::new(OpId(nth), honest.soon(), Body::Message(payload.clone()));
        honest.tcp.post(path, &[op], honest.clock.now()) == Ok(0)
    });
    assert!(refused.is_some(), "256 MiB were taken for somebody who reads nothing");
}

#[test]
fn a_target_refuses_what_is_late_and_stops_in_the_middle() {
    let mut honest = Honest::start();
    let region = honest.region(8192, 9, Access::READ_WRITE);
    let mut raw = Raw::peer(&mut honest);
    raw.say(&write_request(&region, 1, Time::from_ns(1)));
    assert_eq!(
        raw.hear(&mut honest),
        Frame::WriteAck {
            op: 1,
            outcome: Err(Ended::Refused(Refusal::Late))
        }
    );
    raw.say(&Frame::WriteData { op: 1, len: 8192 });
    raw.say_bytes(&[1; 8192]);
    raw.say(&Frame::WriteEnd { op: 1, complete: true });

    let deadline = honest.clock.now().saturating_add(Time::from_ms(100));
    raw.say(&write_request(&region, 2, deadline));
    raw.say(&Frame::WriteData { op: 2, len: 8192 });
    raw.say_bytes(&[2; 4096]);
    honest.until(|h| (h.clock.now() > deadline).then_some(()));
    raw.say_bytes(&[3; 4096]);
    raw.say(&Frame::WriteEnd { op: 2, complete: true });
    assert_eq!(
        raw.hear(&mut honest),
        Frame::WriteAck {
            op: 2,
            outcome: Err(Ended::Refused(Refusal::Late))
        }
    );
    raw.say(&Frame::Ping { sent: Time::ZERO });
    assert!(matches!(raw.hear(&mut honest), Frame::Pong { .. }));
    let bytes = bytes_of(&region);
    assert!(!bytes.contains(&1) && !bytes.contains(&3), "late bytes landed");
    assert!(!honest.signals.iter().any(|s| matches!(s, Signal::Arrived { .. })));
}

#[test]
fn a_target_that_releases_in_the_middle_drops_the_rest() {
    let mut honest = Honest::start();
    let region = honest.region(8192, 9, Access::READ_WRITE);
    let mut raw = Raw::peer(&mut honest);
    let deadline = honest.soon();
    raw.say(&write_request(&region, 1, deadline));
    raw.say(&Frame::WriteData { op: 1, len: 8192 });
    raw.say_bytes(&[2; 4096]);
    honest.until(|_| (bytes_of(&region)[4095] == 2).then_some(()));
    honest.tcp.release(&region.key).unwrap();
    raw.say_bytes(&[3; 4096]);
    raw.say(&Frame::WriteEnd { op: 1, complete: true });
    assert_eq!(
        raw.hear(&mut honest),
        Frame::WriteAck {
            op: 1,
            outcome: Err(Ended::Refused(Refusal::Released))
        }
    );
    raw.say(&Frame::Ping { sent: Time::ZERO });
    assert!(matches!(raw.hear(&mut honest), Frame::Pong { .. }));
    assert!(!bytes_of(&region).contains(&3));
}

#[test]
fn an_answer_that_is_released_in_the_middle_ends_with_zeros_and_a_refusal() {
    let mut honest = Honest::start();
    let len = 32 << 20;
    let region = honest.region(len, 9, Access::READ);
    let mut raw = Raw::peer(&mut honest);
    raw.say(&Frame::ReadRequest(ReadRequest {
        op: 1,
        deadline: honest.soon(),
        key: region.key,
        spans: Spans::contiguous(0, len as u64),
        checksum: true,
    }));
    let mut heard = 0;
    loop {
        match raw.hear(&mut honest) {
            Frame::ReadData { op: 1, len } => {
                raw.skip(&mut honest, len as usize);
                if heard == 0 {
                    honest.tcp.release(&region.key).unwrap();
                    region.memory.bytes().write(0, &vec![0xee; len as usize]);
                }
                heard += len;
            }
            Frame::ReadEnd { op: 1, outcome } => {
                assert_eq!(outcome, Err(Ended::Refused(Refusal::Released)));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(heard < len as u64);
}

#[test]
fn a_peer_that_never_reads_cannot_hold_a_write_past_its_deadline() {
    let mut honest = Honest::start();
    let (_raw, path) = Raw::acceptor(&mut honest);
    let local = honest.region(64 << 20, 1, Access::NONE);
    let deadline = honest.clock.now().saturating_add(Time::from_ms(150));
    let ops: Vec<OpId> = (0..4)
        .map(|_| honest.post(path, Direction::Write, &local, deadline))
        .collect();
    for op in ops {
        let outcome = honest.until(|h| h.outcome(op));
        assert_eq!(outcome, Err(Failure::Expired));
    }
}

#[test]
fn death_in_the_middle_of_a_frame_fails_the_move_fenced() {
    for direction in [Direction::Read, Direction::Write] {
        let mut honest = Honest::start();
        let (mut raw, path) = Raw::acceptor(&mut honest);
        let local = honest.region(8 << 20, 1, Access::NONE);
        let deadline = honest.soon();
        let op = honest.post(path, direction, &local, deadline);
        match raw.hear(&mut honest) {
            Frame::ReadRequest(request) => {
                raw.say(&Frame::ReadData {
                    op: request.op,
                    len: 10_000,
                });
                raw.say_bytes(&[7; 5000]);
            }
            Frame::WriteRequest(_) => {
                let Frame::WriteData { .. } = raw.hear(&mut honest) else {
                    panic!("no data");
                };
                raw.skip(&mut honest, 5000);
            }
            other => panic!("{other:?}"),
        }
        drop(raw);
        let outcome = honest.until(|h| h.outcome(op));
        let expected = Failure::PathLost {
            loss: Loss::ClosedByPeer,
            fenced: true,
        };
        assert_eq!(outcome, Err(expected));
        assert_eq!(honest.until_lost(), Loss::ClosedByPeer);
    }
}

#[test]
fn a_cancelled_read_never_touches_its_buffer_again() {
    let mut honest = Honest::start();
    let (mut raw, path) = Raw::acceptor(&mut honest);
    let local = honest.region(100_000, 1, Access::NONE);
    let deadline = honest.soon();
    let op = honest.post(path, Direction::Read, &local, deadline);
    let Frame::ReadRequest(request) = raw.hear(&mut honest) else {
        panic!("no request");
    };
    let wire = request.op;
    raw.say(&Frame::ReadData { op: wire, len: 100_000 });
    raw.say_bytes(&[7; 30_000]);
    honest.until(|_| (bytes_of(&local)[29_999] == 7).then_some(()));
    honest.tcp.cancel(path, op, honest.clock.now());
    assert_eq!(honest.until(|h| h.outcome(op)), Err(Failure::Cancelled));
    local.memory.bytes().write(0, &[0xaa; 100_000]);
    raw.say_bytes(&[7; 70_000]);
    raw.say(&Frame::ReadEnd {
        op: wire,
        outcome: Ok(None),
    });
    raw.say(&Frame::Message(b"still here".to_vec()));
    honest.until(|h| {
        h.signals
            .iter()
            .any(|s| matches!(s, Signal::Message { .. }))
            .then_some(())
    });
    assert!(
        bytes_of(&local).iter().all(|b| *b == 0xaa),
        "the buffer was touched after the cancel"
    );
    assert_eq!(raw.hear(&mut honest), Frame::Cancel { op: wire });
}

#[test]
fn a_cancelled_write_sends_zeros_and_waits_for_the_last_word() {
    let mut honest = Honest::start();
    let (mut raw, path) = Raw::acceptor(&mut honest);
    let local = honest.region(16 << 20, 1, Access::NONE);
    let deadline = honest.soon();
    let op = honest.post(path, Direction::Write, &local, deadline);
    let Frame::WriteRequest(request) = raw.hear(&mut honest) else {
        panic!("no request");
    };
    honest.tcp.cancel(path, op, honest.clock.now());
    // Were any of these read after the cancel, it would be seen at the other end.
    local.memory.bytes().write(0, &vec![0xaa; 16 << 20]);
    let mut received = 0;
    loop {
        match raw.hear(&mut honest) {
            Frame::WriteData { len, .. } => {
                let bytes = raw.skip(&mut honest, len as usize);
                assert!(bytes.iter().all(|b| *b == 1 || *b == 0));
                received += len;
            }
            Frame::WriteEnd { complete, .. } => {
                assert!(!complete);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(received < 16 << 20);
    assert_eq!(honest.outcome(op), None, "completed before the peer had let go");
    raw.say(&Frame::WriteAck {
        op: request.op,
        outcome: Err(Ended::Aborted),
    });
    assert_eq!(honest.until(|h| h.outcome(op)), Err(Failure::Cancelled));
}

#[test]
fn an_end_without_its_bytes_is_not_believed() {
    for (received, outcome) in [
        (0, Ok(None)),
        (500, Ok(None)),
        (1000, Ok(Some(3))),
        (10, Err(Ended::Aborted)),
    ] {
        let mut honest = Honest::start();
        let (mut raw, path) = Raw::acceptor(&mut honest);
        let local = honest.region(1000, 1, Access::NONE);
        let deadline = honest.soon();
        let op = honest.post(path, Direction::Read, &local, deadline);
        let Frame::ReadRequest(request) = raw.hear(&mut honest) else {
            panic!("no request");
        };
        if received > 0 {
            raw.say(&Frame::ReadData {
                op: request.op,
                len: received,
            });
            raw.say_bytes(&vec![7; received as usize]);
        }
        raw.say(&Frame::ReadEnd {
            op: request.op,
            outcome,
        });
        let expected = Failure::PathLost {
            loss: Loss::Garbage,
            fenced: true,
        };
        assert_eq!(honest.until(|h| h.outcome(op)), Err(expected));
    }
}

#[test]
fn an_atomic_request_that_is_late_or_wrong_changes_nothing() {
    let mut honest = Honest::start();
    let region = honest.region(64, 0, Access::READ_WRITE);
    let mut raw = Raw::peer(&mut honest);
    let rightful = AtomicRequest {
        op: 1,
        deadline: Time::MAX,
        key: region.key,
        offset: 8,
        act: AtomicAct::FetchAdd(1),
    };
    let mut wrong = region.key;
    wrong.secret ^= 1;
    for (request, outcome) in [
        (rightful, Ok(0)),
        (
            AtomicRequest {
                deadline: Time::from_ns(1),
                ..rightful
            },
            Err(Refusal::Late),
        ),
        (AtomicRequest { key: wrong, ..rightful }, Err(Refusal::UnknownKey)),
        (AtomicRequest { offset: 12, ..rightful }, Err(Refusal::Misaligned)),
        (
            AtomicRequest {
                offset: u64::MAX,
                ..rightful
            },
            Err(Refusal::OutOfBounds),
        ),
        (rightful, Ok(1)),
    ] {
        raw.say(&Frame::AtomicRequest(request));
        assert_eq!(raw.hear(&mut honest), Frame::AtomicReply { op: 1, outcome });
    }
    let mut expected = vec![0; 64];
    expected[8] = 2;
    assert_eq!(bytes_of(&region), expected);
}

#[test]
fn an_answer_that_comes_too_late_is_not_told_and_a_second_one_not_believed() {
    let mut honest = Honest::start();
    let (mut raw, path) = Raw::acceptor(&mut honest);
    let deadline = honest.soon();
    let op = honest.post_increment(path, deadline);
    let Frame::AtomicRequest(request) = raw.hear(&mut honest) else {
        panic!("no request");
    };
    honest.tcp.cancel(path, op, honest.clock.now());
    assert_eq!(honest.until(|h| h.outcome(op)), Err(Failure::Unanswered));
    let answer = Frame::AtomicReply {
        op: request.op,
        outcome: Ok(41),
    };
    raw.say(&answer);
    let next = honest.post_increment(path, deadline);
    let Frame::AtomicRequest(request) = raw.hear(&mut honest) else {
        panic!("no request, or the first one again");
    };
    raw.say(&Frame::AtomicReply {
        op: request.op,
        outcome: Ok(42),
    });
    assert_eq!(honest.until(|h| h.outcome(next)), Ok(Done::found(42)));
    let told = |s: &&Signal| matches!(s, Signal::Completed { op: ended, .. } if *ended == op);
    assert_eq!(honest.signals.iter().filter(told).count(), 1);
    raw.say(&answer);
    assert_eq!(honest.until_lost(), Loss::Garbage);
}

#[test]
fn a_peer_that_dies_before_it_answers_leaves_the_outcome_open() {
    let mut honest = Honest::start();
    let (mut raw, path) = Raw::acceptor(&mut honest);
    let deadline = honest.soon();
    let op = honest.post_increment(path, deadline);
    assert!(matches!(raw.hear(&mut honest), Frame::AtomicRequest(_)));
    drop(raw);
    let failure = honest.until(|h| h.outcome(op)).expect_err("nobody has answered");
    assert!(
        matches!(failure, Failure::PathLost { .. }) && failure.may_have_happened(),
        "{failure:?}"
    );
}
