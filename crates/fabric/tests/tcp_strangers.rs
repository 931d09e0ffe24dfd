//! The TCP transport and those whom nobody knows: crowds at the door, and strangers who ask for what is not theirs. Each test counts the
//! descriptors or the memory of its process, so they are meant to run in processes of their own, or at least one after the other.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use weft_fabric::tcp::frame::{self, Frame, ReadRequest};
use weft_fabric::tcp::{Tcp, TcpOptions};
use weft_fabric::{Clock, HostMemory};
use weft_plan::{Place, Spans, Time};
use weft_protocol::{Access, Epoch, Region, RegionKey, Signal, Transport};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Host {
    tcp: Tcp,
    clock: Clock,
    signals: Vec<Signal>,
}

impl Host {
    fn start() -> Host {
        let clock = Clock::start();
        Host {
            tcp: Tcp::start(TcpOptions::default(), Epoch(5), clock).unwrap(),
            clock,
            signals: Vec::new(),
        }
    }

    fn poll(&mut self) {
        self.tcp.poll(self.clock.now(), &mut self.signals);
    }

    fn settle(&mut self, rounds: usize) {
        for _ in 0..rounds {
            self.poll();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn address(&self) -> SocketAddr {
        self.tcp.capabilities().address.rest().parse().unwrap()
    }

    /// A connection from an address of this host.
    fn call_from(&self, from: Ipv4Addr) -> TcpStream {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::new(IpAddr::V4(from), 0).into()).unwrap();
        socket.connect(&self.address().into()).unwrap();
        socket.into()
    }

    /// Joins a path of one connection as a peer's transport would, without anybody vouching for it.
    fn guest(&mut self) -> TcpStream {
        let mut stream = self.call_from(Ipv4Addr::LOCALHOST);
        let label = u128::from(stream.local_addr().unwrap().port());
        say(
            &mut stream,
            &Frame::Hello {
                version: frame::VERSION,
                path: label,
                index: 0,
                connections: 1,
                sent: Time::ZERO,
            },
        );
        let Frame::Welcome { sent, .. } = self.hear(&mut stream) else {
            panic!("no welcome");
        };
        let read = self.clock.now();
        say(&mut stream, &Frame::Pong { echo: sent, read });
        assert_eq!(self.hear(&mut stream), Frame::Ready);
        stream
    }

    fn hear(&mut self, stream: &mut TcpStream) -> Frame {
        stream.set_nonblocking(true).unwrap();
        let mut received = Vec::new();
        for _ in 0..100_000 {
            self.poll();
            let mut byte = [0];
            match stream.read(&mut byte) {
                Ok(0) => panic!("the transport closed the connection"),
                Ok(_) => received.push(byte[0]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_micros(100)),
                Err(e) => panic!("{e}"),
            }
            if let Some((frame, used)) = frame::decode(&received).unwrap() {
                assert_eq!(used, received.len());
                stream.set_nonblocking(false).unwrap();
                return frame;
            }
        }
        panic!("nothing was said");
    }
}

fn say(stream: &mut TcpStream, frame: &Frame) {
    let mut bytes = Vec::new();
    frame::encode(frame, &mut bytes);
    stream.write_all(&bytes).unwrap();
}

fn is_open(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let looked = stream.read(&mut [0; 64]);
    stream.set_nonblocking(false).unwrap();
    matches!(looked, Err(e) if e.kind() == ErrorKind::WouldBlock)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn a_turn_lets_few_in_however_many_call() {
    let _alone = alone();
    let mut host = Host::start();
    let callers: Vec<_> = (0..300).map(|_| host.call_from(Ipv4Addr::LOCALHOST)).collect();
    let before = descriptors();
    host.poll();
    let taken = descriptors() - before;
    assert!((1..=16).contains(&taken), "{taken} of {} in one turn", callers.len());
}

#[test]
fn a_crowd_from_one_address_pushes_out_itself() {
    let _alone = alone();
    let mut host = Host::start();
    let mut quiet = host.call_from(Ipv4Addr::new(127, 0, 0, 2));
    host.settle(5);
    let before = descriptors();
    let mut crowd: Vec<_> = (0..400).map(|_| host.call_from(Ipv4Addr::LOCALHOST)).collect();
    host.settle(200);
    let inside = descriptors() - before - crowd.len();
    assert!(inside <= 256, "{inside} connections are kept that nobody knows");
    assert!(!is_open(&mut crowd[0]), "the crowd stays");
    assert!(is_open(&mut quiet), "somebody else had to go for the crowd");
    // It still gets a path.
    let hello = Frame::Hello {
        version: frame::VERSION,
        path: 9,
        index: 0,
        connections: 1,
        sent: Time::ZERO,
    };
    say(&mut quiet, &hello);
    assert!(matches!(host.hear(&mut quiet), Frame::Welcome { .. }));
}

#[test]
fn guests_that_were_never_vouched_for_are_bounded_too_and_told_as_lost() {
    let _alone = alone();
    let mut host = Host::start();
    let before = descriptors();
    let guests: Vec<_> = (0..300).map(|_| host.guest()).collect();
    host.settle(5);
    let inside = descriptors() - before - guests.len();
    assert!(inside <= 256, "{inside} connections are kept that nobody knows");
    let count = |signals: &[Signal], is: fn(&Signal) -> bool| signals.iter().filter(|s| is(s)).count();
    let accepted = count(&host.signals, |s| matches!(s, Signal::Accepted { .. }));
    let lost = count(&host.signals, |s| matches!(s, Signal::Lost { .. }));
    assert_eq!(accepted, 300);
    assert!(lost >= 300 - 256, "{lost} of those that had to go were told");
}

#[test]
fn strangers_cannot_have_long_heads_kept_for_them() {
    let _alone = alone();
    let mut host = Host::start();
    let memory = Arc::new(HostMemory::from_vec(vec![7; 4096]));
    let region = Region {
        key: RegionKey {
            epoch: Epoch(5),
            slot: 0,
            secret: 77,
        },
        memory,
        place: Place::DRAM,
        access: Access::READ_WRITE,
    };
    host.tcp.register(&region).unwrap();
    let mut guests: Vec<_> = (0..100).map(|_| host.guest()).collect();
    let before = resident_bytes();
    // The right key, and as many runs as a request may have, but for the last byte.
    let request = Frame::ReadRequest(ReadRequest {
        op: 1,
        deadline: Time::MAX,
        key: region.key,
        spans: Spans::paged(0, 16, (0..16_000).map(|i| i * 7 % 256)),
        checksum: false,
    });
    let mut bytes = Vec::new();
    frame::encode(&request, &mut bytes);
    bytes.resize(bytes.len() - 1, 0);
    for guest in &mut guests {
        guest.set_nonblocking(true).unwrap();
    }
    let mut sent = vec![0; guests.len()];
    for _ in 0..200 {
        for (guest, sent) in guests.iter_mut().zip(&mut sent) {
            *sent += guest.write(&bytes[*sent..]).unwrap_or(0);
        }
        host.poll();
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 8 << 20, "{} MiB for 100 unfinished requests", grown >> 20);
    assert!(guests.iter_mut().all(is_open), "they may wait");
}
