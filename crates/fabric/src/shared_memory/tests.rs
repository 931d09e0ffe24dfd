//! What only the inside can provoke: a copy that lasts, garbage on the socket, a peer that does not listen.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use weft_plan::{Place, Spans, Time};
use weft_protocol::{
    Access, Body, Direction, Epoch, Failure, Leg, Loss, Move, Op, OpId, PathId, PeerAddress, Progress, Refusal, Region,
    RegionKey, RemoteRegion, Signal, Transport,
};

use super::frame::{Answer, Frame};
use super::ledger::{Entering, LedgerView};
use super::ring::Ring;
use super::socket::Socket;
use super::{SharedMemory, SharedMemoryOptions, address};
use crate::memory::{memory_file, page_bytes, seal};
use crate::{Clock, HostMemory};

struct Ends {
    near: SharedMemory,
    far: SharedMemory,
    near_path: PathId,
    far_path: PathId,
}

fn end(epoch: u64) -> SharedMemory {
    SharedMemory::start(SharedMemoryOptions::default(), Epoch(epoch), Clock::start()).unwrap()
}

fn turn(end: &mut SharedMemory, now: Time) -> Vec<Signal> {
    let mut signals = Vec::new();
    while end.poll(now, &mut signals) == Progress::Busy {}
    signals
}

fn connected() -> Ends {
    let (mut near, mut far) = (end(1), end(2));
    let near_path = near.open(&far.capabilities().address.clone(), Time::ZERO).unwrap();
    let accepted = turn(&mut far, Time::ZERO);
    let [Signal::Accepted { path: far_path }] = accepted[..] else {
        panic!("{accepted:?}");
    };
    assert!(matches!(turn(&mut near, Time::ZERO)[..], [Signal::Opened { .. }]));
    Ends {
        near,
        far,
        near_path,
        far_path,
    }
}

fn region(epoch: u64, slot: u32) -> Region {
    Region {
        key: RegionKey {
            epoch: Epoch(epoch),
            slot,
            secret: 99,
        },
        memory: Arc::new(HostMemory::from_vec(vec![0; 100])),
        place: Place::DRAM,
        access: Access::READ_WRITE,
    }
}

#[test]
fn release_waits_for_a_peer_inside_also_after_the_path_was_closed_here() {
    let Ends {
        mut near,
        mut far,
        near_path,
        far_path,
    } = connected();
    let region = region(2, 0);
    far.register(&region).unwrap();
    fetch(&mut near, &mut far, near_path, &region.key);
    let entry = far.entries[&region.key].entry;
    let ledger = near.paths[0].ledger().unwrap().clone();
    let inside = near.worker.hazard().enter(near_path.0, &ledger, entry).unwrap();
    assert_eq!(far.release(&region.key), Ok(Progress::Busy));
    far.close(far_path);
    turn(&mut far, Time::ZERO);
    assert_eq!(far.release(&region.key), Ok(Progress::Busy));
    drop(inside);
    assert_eq!(far.release(&region.key), Ok(Progress::Idle));
    assert_eq!(far.release(&region.key), Err(Refusal::Released));
    assert!(far.lingering.is_empty(), "the peer has nothing left to be inside of");
}

#[test]
fn a_peer_that_was_given_nothing_holds_up_no_release_and_does_not_linger() {
    let Ends {
        mut near,
        mut far,
        near_path,
        far_path,
    } = connected();
    let region = region(2, 0);
    far.register(&region).unwrap();
    let wrong = RegionKey {
        secret: 98,
        ..region.key
    };
    fetch(&mut near, &mut far, near_path, &wrong);
    let entry = far.entries[&region.key].entry;
    let ledger = near.paths[0].ledger().unwrap().clone();
    let _inside = near.worker.hazard().enter(near_path.0, &ledger, entry).unwrap();
    assert_eq!(far.release(&region.key), Ok(Progress::Idle));
    far.close(far_path);
    assert!(far.lingering.is_empty());
}

#[test]
fn a_write_that_the_target_is_inside_of_outlives_its_near_side_without_touching_it() {
    let mut ends = connected();
    ends.near.paths[0].bounces = true;
    let (here, there) = (region(1, 0), region(2, 0));
    ends.near.register(&here).unwrap();
    ends.far.register(&there).unwrap();
    fetch(&mut ends.near, &mut ends.far, ends.near_path, &there.key);
    let write = |id| {
        Op::new(
            OpId(id),
            Time::from_secs(9),
            Body::Move(Move::new(Direction::Write, Arc::new(leg(&here, &there)), 0..100).checksum(true)),
        )
    };
    assert_eq!(ends.near.post(ends.near_path, &[write(1), write(2)], Time::ZERO), Ok(2));
    // The target is stopped in the middle of the first.
    ends.near.paths[0].bouncer.claim_oldest();
    assert_eq!(ends.near.release(&here.key), Ok(Progress::Idle));
    let released = |signals: &[Signal], id| matches!(signals, [Signal::Completed { op, outcome: Err(Failure::Refused(Refusal::Released)), .. }] if *op == OpId(id));
    assert!(released(&turn(&mut ends.near, Time::ZERO), 2));
    // It answers both at last, in whatever way.
    turn(&mut ends.far, Time::ZERO);
    assert!(released(&turn(&mut ends.near, Time::ZERO), 1));
    assert_eq!(ends.near.post(ends.near_path, &[write(3)], Time::ZERO), Ok(1));
    assert!(released(&turn(&mut ends.near, Time::ZERO), 3));
    echo(&mut ends);
}

#[test]
fn a_peer_that_died_inside_is_not_waited_for() {
    let Ends {
        mut near,
        mut far,
        near_path,
        ..
    } = connected();
    let region = region(2, 0);
    far.register(&region).unwrap();
    fetch(&mut near, &mut far, near_path, &region.key);
    let entry = far.entries[&region.key].entry;
    let ledger = near.paths[0].ledger().unwrap().clone();
    // As a killed process would leave it.
    std::mem::forget(near.worker.hazard().enter(near_path.0, &ledger, entry));
    assert_eq!(far.release(&region.key), Ok(Progress::Busy));
    drop(near);
    assert!(matches!(
        turn(&mut far, Time::ZERO)[..],
        [Signal::Lost {
            loss: Loss::ClosedByPeer,
            fenced: true,
            ..
        }]
    ));
    assert_eq!(far.release(&region.key), Ok(Progress::Idle));
}

/// Where the peer of the test below finds the owner, and its region's key.
const OWNER: &str = "WEFT_TEST_DEVICE_OWNER";

/// Not a test but the other process of the one below; alone it does nothing. Its device is inside of a region, its socket closes, and it lives on, as a killed process does
/// until the driver has stopped its kernels.
#[test]
fn peer_whose_socket_closes_before_its_device_has_ended() {
    let Ok(owner) = std::env::var(OWNER) else {
        return;
    };
    let mut near = end(1);
    let path = near.open(&PeerAddress(owner), Time::ZERO).unwrap();
    let opened = |near: &mut SharedMemory| turn(near, Time::ZERO).contains(&Signal::Opened { path });
    while !opened(&mut near) {
        std::thread::yield_now();
    }
    let key = region(2, 0).key;
    near.request_map(path, key).unwrap();
    while !near.paths[0].targets.contains_key(&key) {
        turn(&mut near, Time::ZERO);
        std::thread::yield_now();
    }
    let (ledger, entry) = (
        near.paths[0].ledger().unwrap().clone(),
        near.paths[0].targets[&key].entry,
    );
    let entered = near.worker.hazard().enter_for_device(path.0, &ledger, entry);
    assert_eq!(entered, Entering::Inside(1));
    drop(near.paths.remove(0));
    std::thread::sleep(std::time::Duration::from_secs(60));
}

#[test]
fn the_device_of_a_peer_that_is_killed_is_waited_for_until_its_process_has_ended() {
    let mut far = end(2);
    let region = region(2, 0);
    far.register(&region).unwrap();
    let peer = "shared_memory::tests::peer_whose_socket_closes_before_its_device_has_ended";
    let mut peer = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", peer, "--nocapture"])
        .env(OWNER, &far.capabilities().address.0)
        .spawn()
        .unwrap();
    let lost = |far: &mut SharedMemory| {
        let signals = turn(far, Time::ZERO);
        signals.iter().any(|signal| matches!(signal, Signal::Lost { .. }))
    };
    while !lost(&mut far) {
        assert!(peer.try_wait().unwrap().is_none(), "the peer has ended");
        std::thread::yield_now();
    }
    assert!(far.paths.is_empty());
    for _ in 0..10 {
        turn(&mut far, Time::ZERO);
        assert_eq!(far.release(&region.key), Ok(Progress::Busy));
    }
    assert_eq!(far.poller.events().count(), 0, "a closed socket is told of once");
    peer.kill().unwrap();
    peer.wait().unwrap();
    turn(&mut far, Time::ZERO);
    assert!(far.lingering.is_empty());
    assert_eq!(far.release(&region.key), Ok(Progress::Idle));
}

#[test]
fn a_device_that_a_living_peer_had_inside_is_waited_for_until_it_says_so() {
    let Ends {
        mut near,
        mut far,
        near_path,
        ..
    } = connected();
    let region = region(2, 0);
    far.register(&region).unwrap();
    fetch(&mut near, &mut far, near_path, &region.key);
    let entry = far.entries[&region.key].entry;
    let ledger = near.paths[0].ledger().unwrap().clone();
    let entered = near.worker.hazard().enter_for_device(near_path.0, &ledger, entry);
    // A thread that a killed process had inside is not.
    std::mem::forget(near.worker.hazard().enter(near_path.0, &ledger, entry));
    drop(near.paths.remove(0));
    turn(&mut far, Time::ZERO);
    assert_eq!((far.paths.len(), far.lingering.len()), (0, 1));
    assert_eq!(far.release(&region.key), Ok(Progress::Busy));
    let Entering::Inside(word) = entered else {
        panic!("{entered:?}");
    };
    near.worker.hazard().leave(word);
    turn(&mut far, Time::ZERO);
    assert!(far.lingering.is_empty());
    assert_eq!(far.release(&region.key), Ok(Progress::Idle));
}

/// A move that a device of the near end is in the middle of, as the test says.
fn flying(ends: &mut Ends, here: &Region, there: &Region) -> Arc<AtomicBool> {
    ends.near.register(here).unwrap();
    ends.far.register(there).unwrap();
    fetch(&mut ends.near, &mut ends.far, ends.near_path, &there.key);
    let target = ends.near.paths[0].targets[&there.key].clone();
    let part = Move::new(Direction::Write, Arc::new(leg(here, there)), 0..100);
    let op = Op::new(OpId(7), Time::from_secs(9), Body::Move(part));
    ends.near.pretend(ends.near_path, &op, &target)
}

#[test]
fn a_path_that_ends_under_a_device_waits_for_nothing_and_is_told_of_when_the_device_has_ended() {
    for loss in [Loss::Closed, Loss::ClosedByPeer] {
        let mut ends = connected();
        let (here, there) = (region(1, 0), region(2, 0));
        let ended = flying(&mut ends, &here, &there);
        let message = Op::new(OpId(8), Time::from_secs(9), Body::Message(Arc::from(&b"late"[..])));
        match loss {
            Loss::Closed => ends.near.close(ends.near_path),
            _ => ends.far.close(ends.far_path),
        }
        let mut signals = Vec::new();
        for _ in 0..10 {
            assert_eq!(ends.near.poll(Time::ZERO, &mut signals), Progress::Busy);
        }
        assert!(signals.is_empty(), "{signals:?}");
        assert_eq!(ends.near.post(ends.near_path, &[message], Time::ZERO), Err(loss));
        assert_eq!(ends.near.request_map(ends.near_path, there.key), Err(loss));
        assert_eq!(ends.near.release(&here.key), Ok(Progress::Busy));
        assert_eq!(ends.far.release(&there.key), Ok(Progress::Busy));
        ended.store(true, Ordering::Relaxed);
        let signals = turn(&mut ends.near, Time::ZERO);
        let lost = Failure::PathLost { loss, fenced: true };
        let wanted = [
            Signal::Completed {
                path: ends.near_path,
                op: OpId(7),
                outcome: Err(lost),
            },
            Signal::Lost {
                path: ends.near_path,
                loss,
                fenced: true,
            },
        ];
        assert_eq!(signals, wanted);
        assert_eq!(ends.near.release(&here.key), Ok(Progress::Idle));
        turn(&mut ends.far, Time::ZERO);
        assert_eq!(ends.far.release(&there.key), Ok(Progress::Idle));
        assert!(ends.far.lingering.is_empty() && ends.far.paths.is_empty());
    }
}

#[test]
fn a_transport_that_goes_leaves_what_its_devices_were_inside_of() {
    let mut ends = connected();
    let (here, there) = (region(1, 0), region(2, 0));
    let _never = flying(&mut ends, &here, &there);
    assert_eq!(ends.far.release(&there.key), Ok(Progress::Busy));
    drop(ends.near);
    turn(&mut ends.far, Time::ZERO);
    assert_eq!(ends.far.release(&there.key), Ok(Progress::Idle));
}

#[test]
fn garbage_costs_only_the_path_that_it_came_on() {
    let mut ends = connected();
    let name = address::name_here(&ends.far.capabilities().address).unwrap().to_owned();
    let hello = Frame::Hello {
        epoch: Epoch(5),
        hazard_tag: 0,
    };
    let null = || std::fs::File::open("/dev/null").unwrap();
    let (a, b) = (null(), null());
    let files = [std::os::fd::AsFd::as_fd(&a), std::os::fd::AsFd::as_fd(&b)];
    for (datagram, files) in [
        (b"garbage".to_vec(), &files[..0]),
        (vec![0xff; 65_000], &files[..0]),
        (vec![1; 65_700], &files[..0]),
        (hello.encode(), &files[..0]),
        // Files that are no memory files.
        (hello.encode(), &files[..]),
        // A message before the introduction.
        (Frame::Message(b"too early").encode(), &files[..0]),
    ] {
        let socket = Socket::connect(&name).unwrap();
        turn(&mut ends.far, Time::ZERO);
        assert!(socket.send(&datagram, &[], files).unwrap());
        assert!(turn(&mut ends.far, Time::ZERO).is_empty(), "nobody was announced");
        assert!(socket.is_hung_up());
    }
    echo(&mut ends);
}

#[test]
fn garbage_of_a_known_peer_loses_its_path() {
    for datagram in [
        b"garbage".to_vec(),
        Frame::Bounced {
            slot: 3,
            result: Ok(()),
        }
        .encode(),
    ] {
        let mut ends = connected();
        assert!(ends.near.paths[0].socket.send(&datagram, &[], &[]).unwrap());
        let signals = turn(&mut ends.far, Time::ZERO);
        assert!(
            matches!(
                signals[..],
                [Signal::Lost {
                    loss: Loss::Garbage,
                    fenced: true,
                    ..
                }]
            ),
            "{signals:?}"
        );
        let signals = turn(&mut ends.near, Time::ZERO);
        assert!(matches!(
            signals[..],
            [Signal::Lost {
                loss: Loss::ClosedByPeer,
                ..
            }]
        ));
    }
}

#[test]
fn a_caller_that_says_nothing_is_hung_up_on() {
    let mut ends = connected();
    let name = address::name_here(&ends.far.capabilities().address).unwrap().to_owned();
    let silent = Socket::connect(&name).unwrap();
    turn(&mut ends.far, Time::ZERO);
    assert!(crate::Live::next_timeout(&ends.far).is_some());
    assert!(turn(&mut ends.far, Time::from_secs(60)).is_empty());
    assert!(silent.is_hung_up());
    echo(&mut ends);
}

#[test]
fn of_many_silent_callers_the_oldest_goes_and_those_that_speak_stay() {
    let mut ends = connected();
    let name = address::name_here(&ends.far.capabilities().address).unwrap().to_owned();
    // All of these have introduced themselves before the first is looked at.
    let mut talkers: Vec<SharedMemory> = (0..70).map(|i| end(10 + i)).collect();
    for talker in &mut talkers {
        let address = ends.far.capabilities().address.clone();
        talker.open(&address, Time::ZERO).unwrap();
    }
    assert_eq!(turn(&mut ends.far, Time::ZERO).len(), talkers.len());
    let silent: Vec<Socket> = (0..70).map(|_| Socket::connect(&name).unwrap()).collect();
    assert!(turn(&mut ends.far, Time::ZERO).is_empty());
    let gone: Vec<bool> = silent.iter().map(Socket::is_hung_up).collect();
    assert_eq!(gone.iter().filter(|&&gone| gone).count(), 6);
    assert!(gone[..6].iter().all(|&gone| gone));
    for talker in &mut talkers {
        assert!(matches!(turn(talker, Time::ZERO)[..], [Signal::Opened { .. }]));
    }
    echo(&mut ends);
}

#[test]
fn a_caller_of_another_user_is_hung_up_on() {
    if !weft_testing::has(weft_testing::Need::Root) {
        return;
    }
    let mut ends = connected();
    let name = address::name_here(&ends.far.capabilities().address).unwrap().to_owned();
    let socket = std::thread::spawn(move || {
        let keep = -1;
        // SAFETY: the plain system call changes the user of this thread alone.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, keep, 65_534, keep) }, 0);
        Socket::connect(&name).unwrap()
    });
    let socket = socket.join().unwrap();
    assert!(turn(&mut ends.far, Time::ZERO).is_empty());
    assert!(socket.is_hung_up());
    echo(&mut ends);
}

#[test]
fn a_peer_that_does_not_listen_is_back_pressure_and_nothing_is_lost() {
    let mut ends = connected();
    let message = |id: u64| {
        Op::new(
            OpId(id),
            Time::from_secs(9),
            Body::Message(vec![id as u8; 60_000].into()),
        )
    };
    let ops: Vec<Op> = (0..1000).map(message).collect();
    let accepted = ends.near.post(ends.near_path, &ops, Time::ZERO).unwrap();
    assert_eq!(accepted, ends.near.capabilities().max_inflight_ops);
    assert_eq!(ends.near.post(ends.near_path, &ops[accepted..], Time::ZERO), Ok(0));
    let (mut received, mut completed) = (Vec::new(), 0);
    while received.len() < accepted || completed < accepted {
        for signal in turn(&mut ends.near, Time::ZERO) {
            assert!(matches!(signal, Signal::Completed { outcome: Ok(_), .. }), "{signal:?}");
            completed += 1;
        }
        for signal in turn(&mut ends.far, Time::ZERO) {
            let Signal::Message { payload, .. } = signal else {
                panic!("{signal:?}");
            };
            received.push(payload[0]);
        }
    }
    assert!(received.iter().enumerate().all(|(i, &byte)| byte == i as u8));
    // What waits too long expires, and what is too long is refused.
    let accepted = ends.near.post(ends.near_path, &ops, Time::ZERO).unwrap();
    let ended = turn(&mut ends.near, Time::from_secs(9));
    let expired = |s: &&Signal| {
        matches!(
            s,
            Signal::Completed {
                outcome: Err(Failure::Expired),
                ..
            }
        )
    };
    assert!(ended.len() == accepted && ended.iter().filter(expired).count() > 0);
    turn(&mut ends.far, Time::ZERO);
    let mut long = message(5000);
    long.body = Body::Message(vec![0; (64 << 10) + 1].into());
    ends.near.post(ends.near_path, &[long], Time::ZERO).unwrap();
    assert!(matches!(
        turn(&mut ends.near, Time::ZERO)[..],
        [Signal::Completed {
            outcome: Err(Failure::Refused(Refusal::Malformed)),
            ..
        }]
    ));
    echo(&mut ends);
}

/// Has a move of the near end answered with a file of the test's choice, as an owner who means ill would.
fn answered_with(ends: &mut Ends, op: &Op, file: &OwnedFd, there: &Region) -> Vec<Signal> {
    assert_eq!(
        ends.near.post(ends.near_path, std::slice::from_ref(op), Time::ZERO),
        Ok(1)
    );
    if let Some(ask) = ends.near.paths[0].asks.keys().next().copied() {
        let answer = Answer {
            len: 100,
            access: there.access,
            entry: ends.far.entries[&there.key].entry,
            foreign: None,
            device: None,
        };
        let frame = Frame::Answer {
            ask,
            answer: Ok(answer),
        };
        let socket = &ends.far.paths[0].socket;
        assert!(socket.send(&frame.encode(), &[], &[file.as_fd()]).unwrap());
    }
    turn(&mut ends.near, Time::ZERO)
}

#[test]
fn a_peers_file_is_mapped_only_where_nobody_can_make_a_trap_of_it() {
    let mut ends = connected();
    let (here, there) = (region(1, 0), region(2, 0));
    ends.near.register(&here).unwrap();
    ends.far.register(&there).unwrap();
    let read = |id| {
        Op::new(
            OpId(id),
            Time::from_secs(9),
            Body::Move(Move::new(Direction::Read, Arc::new(leg(&here, &there)), 0..100)),
        )
    };
    // Pages of the usual size: a hole in the file reads as zeros.
    let file = memory_file(c"holes", 4096, page_bytes(), 0).unwrap();
    seal(&file, 0).unwrap();
    let write = std::fs::File::from(file.try_clone().unwrap());
    std::os::unix::fs::FileExt::write_all_at(&write, &[7; 4096], 0).unwrap();
    let snapshot = || here.memory.as_any().downcast_ref::<HostMemory>().unwrap().snapshot();
    for (id, byte) in [(1, 7), (2, 0)] {
        let signals = answered_with(&mut ends, &read(id), &file, &there);
        assert!(
            matches!(signals[..], [Signal::Completed { outcome: Ok(_), .. }]),
            "{signals:?}"
        );
        assert_eq!(snapshot(), [byte; 100]);
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a plain call on an open descriptor.
        assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), punch, 0, 4096) }, 0);
    }
    // Huge pages: whoever touches a hole is killed where none is left.
    ends.near.paths[0].targets.clear();
    let Ok(file) = memory_file(c"trap", 2 << 20, 2 << 20, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB) else {
        return eprintln!("left out: this kernel has no huge pages");
    };
    seal(&file, 0).unwrap();
    let signals = answered_with(&mut ends, &read(3), &file, &there);
    let unsupported = Failure::Refused(Refusal::Unsupported);
    assert!(
        matches!(signals[..], [Signal::Completed { outcome: Err(failure), .. }] if failure == unsupported),
        "{signals:?}"
    );
    assert!(LedgerView::new(file.as_fd()).is_none() && Ring::attach(file.as_fd()).is_none());
    echo(&mut ends);
}

/// Asks for a region, and lets the owner answer.
fn fetch(near: &mut SharedMemory, far: &mut SharedMemory, path: PathId, key: &RegionKey) {
    near.request_map(path, *key).unwrap();
    turn(far, Time::ZERO);
    turn(near, Time::ZERO);
}

/// A leg from the whole of one region to the whole of the other.
fn leg(here: &Region, there: &Region) -> Leg {
    let remote = RemoteRegion {
        key: there.key,
        len: 100,
        place: Place::DRAM,
        access: there.access,
        grants: Arc::from([]),
    };
    let whole = Spans::contiguous(0, 100);
    Leg::new(here.clone(), whole.clone(), remote, whole).unwrap()
}

fn echo(ends: &mut Ends) {
    let op = Op::new(
        OpId(1 << 40),
        Time::from_secs(90),
        Body::Message(Arc::from(&b"hello"[..])),
    );
    assert_eq!(ends.near.post(ends.near_path, &[op], Time::ZERO), Ok(1));
    turn(&mut ends.near, Time::ZERO);
    let signals = turn(&mut ends.far, Time::ZERO);
    assert!(
        matches!(&signals[..], [Signal::Message { path, payload }] if *path == ends.far_path && payload == b"hello"),
        "{signals:?}"
    );
}
