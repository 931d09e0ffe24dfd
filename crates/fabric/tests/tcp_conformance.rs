//! The TCP transport against the suite that every transport must pass.

mod certificates;

use std::sync::Arc;
use std::time::Duration;

use certificates::certificates;
use weft_fabric::tcp::{Tcp, TcpOptions};
use weft_fabric::{Clock, HostMemory};
use weft_plan::Time;
use weft_protocol::conformance::{Ends, Harness, Side};
use weft_protocol::{Epoch, Memory};

struct OverTcp {
    clock: Clock,
    options: TcpOptions,
}

impl OverTcp {
    fn new(connections: u32) -> OverTcp {
        OverTcp {
            clock: Clock::start(),
            options: TcpOptions {
                connections,
                ..TcpOptions::default()
            },
        }
    }

    /// One authority, and one certificate under it that both ends use.
    fn encrypted() -> OverTcp {
        let mut over = OverTcp::new(2);
        over.options.tls = Some(certificates("weft.test"));
        over
    }
}

impl Harness for OverTcp {
    fn ends(&mut self) -> Ends {
        let start = |epoch| Box::new(Tcp::start(self.options.clone(), epoch, self.clock).expect("loopback is there"));
        Ends {
            initiator: start(Epoch(7)),
            initiator_epoch: Epoch(7),
            target: start(Epoch(9)),
            target_epoch: Epoch(9),
        }
    }
    fn memory(&mut self, _: Side, len: u64) -> Arc<dyn Memory> {
        Arc::new(HostMemory::from_vec(vec![0; len as usize]))
    }
    fn now(&mut self) -> Time {
        self.clock.now()
    }
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// 64 bits of picoseconds last 213 days, and that was the end of time once; those of nanoseconds last 584 years.
fn aged(clock: Time) -> OverTcp {
    let mut over = OverTcp::new(1);
    over.clock = Clock::reading(clock);
    over
}

mod after_213_days {
    weft_protocol::conformance_tests!(super::aged(super::Time::from_secs(213 * 86_400 + 18_000)));
}

mod an_hour_before_the_end_of_time {
    weft_protocol::conformance_tests!(super::aged(
        super::Time::MAX.saturating_sub(super::Time::from_secs(3_600))
    ));
}

mod one_connection {
    weft_protocol::conformance_tests!(super::OverTcp::new(1));
}

mod several_connections {
    weft_protocol::conformance_tests!(super::OverTcp::new(3));
}

mod encrypted {
    weft_protocol::conformance_tests!(super::OverTcp::encrypted());
}

/// A leg of far more runs than a path admits at a time goes over part by part.
#[test]
fn a_leg_of_hundreds_of_thousands_of_spans() {
    use weft_plan::{Place, Span, Spans};
    use weft_protocol::{
        Access, Body, Direction, Leg, Move, Op, OpId, Region, RegionKey, RemoteRegion, Signal, Transport,
    };
    const SPANS: u64 = 300_000;
    let clock = Clock::start();
    let mut ends: Vec<Tcp> = [Epoch(1), Epoch(2)]
        .into_iter()
        .map(|epoch| Tcp::start(TcpOptions::default(), epoch, clock).expect("loopback is there"))
        .collect();
    let bytes: Vec<u8> = (0..SPANS * 32).map(|i| (i * 31 % 251) as u8).collect();
    let region = |epoch, memory| Region {
        key: RegionKey {
            epoch,
            slot: 0,
            secret: 3,
        },
        memory: Arc::new(HostMemory::from_vec(memory)),
        place: Place::DRAM,
        access: Access::READ,
    };
    let near = region(Epoch(1), vec![0; bytes.len()]);
    let far = region(Epoch(2), bytes.clone());
    ends[0].register(&near).expect("host memory");
    ends[1].register(&far).expect("host memory");
    // No two are adjacent, and no stride repeats.
    let spans: Spans = (0..SPANS)
        .map(|i| Span {
            offset: i * 32 + i * i % 13,
            len: 16,
        })
        .collect();
    let remote = RemoteRegion {
        key: far.key,
        len: far.memory.len(),
        place: Place::DRAM,
        access: Access::READ,
        grants: Arc::from([]),
    };
    let leg = Arc::new(Leg::new(near.clone(), spans.clone(), remote, spans.clone()).expect("a leg"));
    let address = ends[1].capabilities().address.clone();
    let path = ends[0].open(&address, clock.now()).expect("open starts");
    ends[0].vouch(path);
    let part = ends[0].capabilities().max_op_runs as u64 / 2 * 16;
    let give_up = clock.now().saturating_add(Time::from_secs(60));
    let (mut at, mut done, mut posted) = (0, 0, 0);
    let mut signals = Vec::new();
    while at < leg.bytes() || done < posted {
        while at < leg.bytes() {
            let end = (at + part).min(leg.bytes());
            let op = Op::new(
                OpId(at),
                give_up,
                Body::Move(Move::new(Direction::Read, leg.clone(), at..end)),
            );
            if ends[0].post(path, &[op], clock.now()).expect("the path lives") == 0 {
                break;
            }
            at = end;
            posted += 1;
        }
        ends[0].poll(clock.now(), &mut signals);
        let mut there = Vec::new();
        ends[1].poll(clock.now(), &mut there);
        if let Some(Signal::Accepted { path }) = there.first() {
            ends[1].vouch(*path);
        }
        for signal in signals.drain(..) {
            if let Signal::Completed { outcome, .. } = signal {
                outcome.expect("a rightful move succeeds");
                done += 1;
            }
        }
        assert!(
            clock.now() < give_up,
            "{done} of {posted} parts done, {at} bytes posted"
        );
    }
    let mut got = vec![0; bytes.len()];
    near.memory.bytes().read(0, &mut got);
    for span in spans.pieces(0..spans.bytes()) {
        let range = span.offset as usize..(span.offset + span.len) as usize;
        assert_eq!(got[range.clone()], bytes[range]);
    }
}

/// Whoever has no certificate of the right authority gets no path, and neither end is the worse for it.
#[test]
fn certificates_of_another_authority_open_no_path() {
    use weft_protocol::{Loss, Signal, Transport};
    let clock = Clock::start();
    let start = |tls| {
        let options = TcpOptions {
            tls,
            ..TcpOptions::default()
        };
        Tcp::start(options, Epoch(1), clock).expect("loopback is there")
    };
    let mut target = start(Some(certificates("weft.test")));
    for tls in [Some(certificates("weft.test")), None] {
        let mut opener = start(tls);
        let address = target.capabilities().address.clone();
        opener.open(&address, clock.now()).expect("open starts");
        let (mut heard, mut heard_there) = (Vec::new(), Vec::new());
        let give_up = clock.now().saturating_add(Time::from_secs(20));
        while heard.is_empty() {
            opener.poll(clock.now(), &mut heard);
            target.poll(clock.now(), &mut heard_there);
            assert!(clock.now() < give_up, "the path neither opened nor failed");
        }
        assert!(
            matches!(
                heard[..],
                [Signal::Lost {
                    loss: Loss::Garbage | Loss::ClosedByPeer,
                    ..
                }]
            ),
            "{heard:?}"
        );
        assert!(heard_there.is_empty(), "{heard_there:?}");
    }
}
