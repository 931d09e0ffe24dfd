//! What the verbs transport says when things go wrong at the device: memory that is gone, peers that are frozen or dead, rails that
//! go down. `cargo xtask rdma-test` runs it where there are devices.

mod verbs_peer;

use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use verbs_peer::{End, LEN, Peer, all_rails, connect, remote, until, whole_leg};
use weft_fabric::verbs::{AtomicsBy, Rail, VerbsOptions};
use weft_fabric::{Clock, Live};
use weft_plan::Time;
use weft_protocol::{
    Access, Arrival, AtomicAct, Body, Direction, Done, Failure, Leg, Loss, Memory, Op, PathId, PeerAddress, Progress,
    Refusal, Signal, Transport,
};

/// Not a test: the other process, when this binary is started as one.
#[test]
fn peer_process() {
    verbs_peer::be_a_peer();
}

#[test]
fn tests_that_need_a_device() {
    weft_testing::has(weft_testing::Need::Rdma);
}

fn pair(far: VerbsOptions) -> (End, End) {
    let rail = all_rails().remove(0);
    let clock = Clock::start();
    (
        End::start(&rail, VerbsOptions::default(), 7, clock),
        End::start(&rail, far, 9, clock),
    )
}

/// An owner that does not wait for its peers at all.
fn impatient() -> VerbsOptions {
    VerbsOptions {
        release_max: Time::ZERO,
        ..VerbsOptions::default()
    }
}

fn contents(memory: &dyn Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len() as usize];
    memory.bytes().read(0, &mut bytes);
    bytes
}

/// Moves a leg whole and expects it to succeed.
fn carry(near: &mut End, far: &mut End, path: PathId, direction: Direction, leg: &Arc<Leg>) {
    let op = near.op(direction, leg, 0..leg.bytes());
    near.post(path, std::slice::from_ref(&op));
    until(near, far, "a rightful move", |near, _| near.outcome(op.id).is_some());
    near.outcome(op.id)
        .expect("completed")
        .expect("a rightful move succeeds");
}

fn parts(near: &mut End, direction: Direction, leg: &Arc<Leg>, size: u64) -> Vec<Op> {
    let starts = (0..leg.bytes()).step_by(size as usize);
    starts.map(|at| near.op(direction, leg, at..at + size)).collect()
}

/// The peer's key is right, what it knows of the memory is not any more: its device is refused, and nothing is touched.
#[test]
#[ignore = "needs an RDMA device"]
fn a_key_that_the_device_no_longer_knows_is_refused_and_costs_the_path() {
    for direction in [Direction::Write, Direction::Read] {
        let (mut near, mut far) = pair(impatient());
        let (path, far_path) = connect(&mut near, &mut far);
        let (local, theirs) = (near.region(3, Access::NONE), far.region(5, Access::READ_WRITE));
        let leg = whole_leg(&local, &remote(&theirs));
        carry(&mut near, &mut far, path, Direction::Read, &leg);
        assert_eq!(far.verbs.release(&theirs.key), Ok(Progress::Idle));
        theirs.memory.bytes().write(0, &vec![0xa5; LEN]);
        local.memory.bytes().write(0, &vec![0x5a; LEN]);
        // Not polled in between, so it does not know.
        let op = near.op(direction, &leg, 0..4096);
        let behind = near.op(direction, &leg, 4096..8192);
        near.post(path, &[op.clone(), behind.clone()]);
        until(&mut near, &mut far, "both ends to lose the path", |near, far| {
            near.lost(path).is_some() && far.lost(far_path).is_some()
        });
        assert_eq!(
            near.outcome(op.id),
            Some(Err(Failure::Refused(Refusal::Released))),
            "{direction:?}"
        );
        assert!(
            matches!(
                near.outcome(behind.id),
                Some(Err(Failure::PathLost { .. } | Failure::Refused(Refusal::Released)))
            ),
            "{direction:?}: {:?}",
            near.outcome(behind.id)
        );
        assert_eq!(near.lost(path).map(|(loss, _)| loss), Some(Loss::ClosedByPeer));
        assert!(
            contents(&*theirs.memory) == vec![0xa5; LEN],
            "written after its release"
        );
        assert!(
            contents(&*local.memory) == vec![0x5a; LEN],
            "a refused read changed local memory"
        );
        // The next path is as good as the first was.
        let (path, _) = connect(&mut near, &mut far);
        let again = far.region(6, Access::READ_WRITE);
        let leg = whole_leg(&local, &remote(&again));
        carry(&mut near, &mut far, path, Direction::Read, &leg);
        assert!(contents(&*local.memory) == vec![6; LEN]);
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn memory_that_goes_away_under_traffic_is_left_alone() {
    for direction in [Direction::Write, Direction::Read] {
        let (mut near, mut far) = pair(impatient());
        let (path, _) = connect(&mut near, &mut far);
        let (local, theirs) = (near.region(3, Access::NONE), far.region(5, Access::READ_WRITE));
        let leg = whole_leg(&local, &remote(&theirs));
        carry(&mut near, &mut far, path, Direction::Read, &leg);
        let ops = parts(&mut near, direction, &leg, 64 << 10);
        near.post(path, &ops);
        near.poll();
        assert_eq!(far.verbs.release(&theirs.key), Ok(Progress::Idle));
        theirs.memory.bytes().write(0, &vec![0xa5; LEN]);
        until(&mut near, &mut far, "every move to end", |near, _| {
            ops.iter().all(|op| near.outcome(op.id).is_some())
        });
        for op in &ops {
            match near.outcome(op.id).expect("completed") {
                Ok(_) | Err(Failure::Refused(Refusal::Released)) => {}
                Err(Failure::PathLost {
                    loss: Loss::ClosedByPeer,
                    fenced,
                }) => assert!(fenced || direction == Direction::Write),
                other => panic!("{direction:?}: {other:?}"),
            }
        }
        assert!(
            contents(&*theirs.memory) == vec![0xa5; LEN],
            "written after its release"
        );
        let stamp = vec![0x5a; LEN];
        local.memory.bytes().write(0, &stamp);
        for _ in 0..50 {
            near.poll();
            far.poll();
        }
        assert!(
            contents(&*local.memory) == stamp,
            "local memory was touched after the completions"
        );
        let (path, _) = connect(&mut near, &mut far);
        let again = far.region(6, Access::READ_WRITE);
        carry(
            &mut near,
            &mut far,
            path,
            direction,
            &whole_leg(&local, &remote(&again)),
        );
    }
}

/// Whoever has closed a path can promise at once that nothing more lands through it.
#[test]
#[ignore = "needs an RDMA device"]
fn a_closed_path_is_a_fence() {
    for round in 0..5 {
        let (mut near, mut far) = pair(VerbsOptions::default());
        let (path, far_path) = connect(&mut near, &mut far);
        let (local, theirs) = (near.region(3, Access::NONE), far.region(5, Access::READ_WRITE));
        let leg = whole_leg(&local, &remote(&theirs));
        carry(&mut near, &mut far, path, Direction::Read, &leg);
        let ops = parts(&mut near, Direction::Write, &leg, 64 << 10);
        near.post(path, &ops);
        for _ in 0..round {
            near.poll();
        }
        far.verbs.close(far_path);
        // An emulated device may be in the middle of a packet.
        std::thread::sleep(std::time::Duration::from_millis(5));
        theirs.memory.bytes().write(0, &vec![0xa5; LEN]);
        until(&mut near, &mut far, "both ends to lose the path", |near, far| {
            near.lost(path).is_some() && far.lost(far_path).is_some()
        });
        assert!(contents(&*theirs.memory) == vec![0xa5; LEN], "written after the close");
        assert_eq!(far.lost(far_path).map(|(loss, _)| loss), Some(Loss::Closed));
        for op in &ops {
            let outcome = near.outcome(op.id).expect("completed before the path was lost");
            assert!(matches!(outcome, Ok(_) | Err(Failure::PathLost { .. })), "{outcome:?}");
        }
    }
}

/// What a peer holds for done has arrived, even if nobody has looked before the path is closed.
#[test]
#[ignore = "needs an RDMA device"]
fn arrivals_and_messages_before_a_close_are_told() {
    const WRITES: u32 = 20;
    let (mut near, mut far) = pair(VerbsOptions::default());
    let (path, far_path) = connect(&mut near, &mut far);
    let (local, theirs) = (near.region(3, Access::NONE), far.region(5, Access::READ_WRITE));
    let leg = whole_leg(&local, &remote(&theirs));
    carry(&mut near, &mut far, path, Direction::Read, &leg);
    let mut ops = vec![near.message(b"last words")];
    for index in 0..WRITES {
        let mut op = near.op(Direction::Write, &leg, 0..4096);
        if let Body::Move(part) = &mut op.body {
            part.arrival = Some(Arrival { tag: 7, index });
        }
        ops.push(op);
    }
    near.post(path, &ops);
    near.until("the writes", |near| ops.iter().all(|op| near.outcome(op.id).is_some()));
    assert!(ops.iter().all(|op| near.outcome(op.id).is_some_and(|o| o.is_ok())));
    far.verbs.close(far_path);
    far.until("the loss", |far| far.lost(far_path).is_some());
    let arrived = far
        .said
        .iter()
        .filter(|signal| matches!(signal, Signal::Arrived { .. }));
    assert_eq!(arrived.count(), WRITES as usize);
    let messages = far
        .said
        .iter()
        .filter(|signal| matches!(signal, Signal::Message { .. }));
    assert_eq!(messages.count(), 1);
    assert!(
        matches!(far.said.last(), Some(Signal::Lost { .. })),
        "told after the loss"
    );
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_killed_peer_is_found_silent() {
    for direction in [Direction::Write, Direction::Read] {
        let rail = all_rails().remove(0);
        let mut peer = Peer::start(&rail);
        let mut near = End::start(&rail, VerbsOptions::default(), 7, Clock::start());
        let path = near.verbs.open(&peer.address, near.clock.now()).expect("open starts");
        near.until("a path to open", |near| near.opened(path));
        let local = near.region(3, Access::NONE);
        let leg = whole_leg(&local, &peer.region(0));
        let warm = near.op(Direction::Read, &leg, 0..4096);
        near.post(path, std::slice::from_ref(&warm));
        near.until("a rightful move", |near| near.outcome(warm.id).is_some());
        let ops = parts(&mut near, direction, &leg, 256 << 10);
        near.post(path, &ops);
        peer.kill();
        // The device may have been quicker than the signal; nobody misses a peer of which nothing is wanted.
        let after = near.op(direction, &leg, 0..4096);
        let _ = near.verbs.post(path, std::slice::from_ref(&after), near.clock.now());
        near.until("the loss of the path", |near| near.lost(path).is_some());
        assert_eq!(near.lost(path).map(|(loss, _)| loss), Some(Loss::Silent));
        let stamp = vec![0x5a; LEN];
        local.memory.bytes().write(0, &stamp);
        for op in &ops {
            match near.outcome(op.id).expect("completed before the path was lost") {
                Ok(_) => {}
                Err(Failure::PathLost {
                    loss: Loss::Silent,
                    fenced,
                }) => assert!(fenced || direction == Direction::Write),
                other => panic!("{direction:?}: {other:?}"),
            }
        }
        assert!(contents(&*local.memory) == stamp);
        // A successor on the same rail is another peer, and is reached.
        let peer = Peer::start(&rail);
        let path = near.verbs.open(&peer.address, near.clock.now()).expect("open starts");
        near.until("a path to its successor", |near| near.opened(path));
    }
}

/// Nothing of ours is with the device, but an answer is awaited: that nobody is left to give it is found out all the same.
#[test]
#[ignore = "needs an RDMA device"]
fn a_peer_that_dies_before_it_answers_is_found_silent() {
    let rail = all_rails().remove(0);
    let mut peer = Peer::start(&rail);
    let mut near = End::start(&rail, VerbsOptions::default(), 7, Clock::start());
    let path = near.verbs.open(&peer.address, near.clock.now()).expect("open starts");
    near.until("a path to open", |near| near.opened(path));
    let local = near.region(3, Access::NONE);
    let leg = whole_leg(&local, &peer.region(0));
    peer.freeze();
    let op = near.op(Direction::Read, &leg, 0..4096);
    near.post(path, std::slice::from_ref(&op));
    // The question itself is acknowledged by the device of a peer that does not run.
    for _ in 0..50 {
        near.poll();
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(near.outcome(op.id), None);
    peer.kill();
    near.until("the loss of the path", |near| near.lost(path).is_some());
    assert_eq!(near.lost(path), Some((Loss::Silent, true)));
    let failure = Failure::PathLost {
        loss: Loss::Silent,
        fenced: true,
    };
    assert_eq!(near.outcome(op.id), Some(Err(failure)));
}

/// The device of a frozen process serves its memory; only what needs the process itself must wait.
#[test]
#[ignore = "needs an RDMA device"]
fn a_frozen_peer_delays_only_what_needs_it() {
    let rail = all_rails().remove(0);
    let mut peer = Peer::start(&rail);
    let mut near = End::start(&rail, VerbsOptions::default(), 7, Clock::start());
    let path = near.verbs.open(&peer.address, near.clock.now()).expect("open starts");
    near.until("a path to open", |near| near.opened(path));
    let local = near.region(3, Access::NONE);
    let known = whole_leg(&local, &peer.region(0));
    let warm = near.op(Direction::Read, &known, 0..4096);
    near.post(path, std::slice::from_ref(&warm));
    near.until("a rightful move", |near| near.outcome(warm.id).is_some());
    peer.freeze();
    let mut write = near.op(Direction::Write, &known, 4096..8192);
    if let Body::Move(part) = &mut write.body {
        part.arrival = Some(Arrival { tag: 77, index: 3 });
    }
    local.memory.bytes().write(0, &[9; 8192]);
    let mut ops = vec![near.op(Direction::Write, &known, 0..4096), write];
    ops.push(near.op(Direction::Read, &known, 8192..65536));
    near.post(path, &ops);
    near.until("moves to memory of a frozen peer", |near| {
        ops.iter().all(|op| near.outcome(op.id).is_some())
    });
    for op in &ops {
        near.outcome(op.id)
            .expect("completed")
            .expect("a frozen process is not needed");
    }
    let unknown = whole_leg(&local, &peer.region(1));
    let mut waits = near.op(Direction::Read, &unknown, 0..4096);
    waits.deadline = near.clock.now().saturating_add(Time::from_ms(50));
    near.post(path, std::slice::from_ref(&waits));
    near.until("a move that needs the peer to expire", |near| {
        near.outcome(waits.id).is_some()
    });
    assert_eq!(near.outcome(waits.id), Some(Err(Failure::Expired)));
    peer.thaw();
    assert_eq!(peer.ask("bytes"), "arrived 77 3");
    let op = near.op(Direction::Read, &unknown, 0..4096);
    near.post(path, std::slice::from_ref(&op));
    near.until("a move after the thaw", |near| near.outcome(op.id).is_some());
    near.outcome(op.id).expect("completed").expect("the peer is back");
    assert_eq!(near.lost(path), None);
}

/// Does the kernel have to look for a peer on this rail? On an interface without a wire it does not.
fn has_neighbours(rail: &Rail) -> bool {
    let interface = rail.gid.interface.as_deref().unwrap_or_default();
    let flags = std::fs::read_to_string(format!("/sys/class/net/{interface}/flags")).unwrap_or_default();
    let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).unwrap_or(0);
    flags & libc::IFF_NOARP as u32 == 0
}

/// The kernel looks for a neighbour that is not there for longer than a second. Nobody else waits for that.
#[test]
#[ignore = "needs an RDMA device"]
fn an_absent_peer_blocks_nobody() {
    const RESOLVING: Duration = Duration::from_secs(1);
    if !has_neighbours(&all_rails()[0]) {
        return weft_testing::leave_out(
            weft_testing::Need::Rdma,
            "the rail has no neighbours, so none can be absent",
        );
    }
    let (mut near, mut far) = pair(VerbsOptions::default());
    // The neighbour of this rail with the host number 77.
    let own = near.address().0;
    let absent = PeerAddress(format!("{}4d{}", &own[..36], &own[38..]));
    let mut longest = Duration::ZERO;
    let mut timed = |act: &mut dyn FnMut()| {
        let begun = Instant::now();
        act();
        longest = longest.max(begun.elapsed());
    };
    let mut opening = Vec::new();
    timed(&mut || {
        for _ in 0..3 {
            opening.push(near.verbs.open(&absent, near.clock.now()).expect("open starts"));
        }
    });
    let healthy = near.verbs.open(&far.address(), near.clock.now()).expect("open starts");
    while !near.opened(healthy) {
        timed(&mut || near.poll());
        far.poll();
    }
    assert!(opening.iter().all(|path| near.lost(*path).is_none()), "{:?}", near.said);
    timed(&mut || near.verbs.close(opening[0]));
    let give_up = near.clock.now().saturating_add(Time::from_secs(60));
    while !opening.iter().all(|path| near.lost(*path).is_some()) {
        timed(&mut || near.poll());
        far.poll();
        assert!(near.clock.now() < give_up, "{:?}", near.said);
    }
    assert_eq!(near.lost(opening[0]).map(|(loss, _)| loss), Some(Loss::Closed));
    assert_eq!(near.lost(opening[1]).map(|(loss, _)| loss), Some(Loss::Unreachable));
    assert!(near.lost(healthy).is_none());
    near.verbs.open(&absent, near.clock.now()).expect("open starts");
    near.poll();
    timed(&mut || {
        drop(std::mem::replace(
            &mut near,
            End::start(&all_rails()[0], VerbsOptions::default(), 8, Clock::start()),
        ))
    });
    assert!(longest < RESOLVING, "somebody waited for {longest:?}");
}

/// Takes the last rail's interface down in mid-transfer, and up again.
#[test]
#[ignore = "needs an RDMA device, and root"]
fn a_rail_that_goes_down_fails_fast_and_comes_back() {
    let rail = all_rails().pop().expect("a rail");
    let interface = rail.gid.interface.clone().expect("an Ethernet port");
    let set = |state: &str| {
        let done = Command::new("ip").args(["link", "set", &interface, state]).status();
        assert!(
            done.is_ok_and(|status| status.success()),
            "ip link set {interface} {state}"
        );
    };
    let clock = Clock::start();
    let mut near = End::start(&rail, VerbsOptions::default(), 7, clock);
    let mut far = End::start(&rail, VerbsOptions::default(), 9, clock);
    let (path, far_path) = connect(&mut near, &mut far);
    let (local, theirs) = (near.region(3, Access::NONE), far.region(5, Access::READ_WRITE));
    let leg = whole_leg(&local, &remote(&theirs));
    carry(&mut near, &mut far, path, Direction::Read, &leg);
    let ops = parts(&mut near, Direction::Write, &leg, 64 << 10);
    near.post(path, &ops);
    near.poll();
    set("down");
    until(&mut near, &mut far, "both ends to lose the path", |near, far| {
        near.lost(path).is_some() && far.lost(far_path).is_some()
    });
    let down = Loss::System(libc::ENETDOWN);
    assert_eq!(near.lost(path).map(|(loss, _)| loss), Some(down));
    for op in &ops {
        match near.outcome(op.id).expect("completed before the path was lost") {
            Ok(_) => {}
            Err(Failure::PathLost { loss, .. }) => assert_eq!(loss, down),
            other => panic!("{other:?}"),
        }
    }
    let stamp = vec![0x5a; LEN];
    local.memory.bytes().write(0, &stamp);
    let address = far.address();
    assert_eq!(near.verbs.open(&address, clock.now()), Err(down));
    set("up");
    let mut path = None;
    until(&mut near, &mut far, "the rail to come back", |near, _| {
        match path {
            None => path = near.verbs.open(&address, near.clock.now()).ok(),
            Some(id) if near.lost(id).is_some() => path = None,
            Some(_) => {}
        }
        path.is_some_and(|id| near.opened(id))
    });
    assert!(
        contents(&*local.memory) == stamp,
        "local memory was touched after the completions"
    );
    carry(&mut near, &mut far, path.expect("opened"), Direction::Read, &leg);
}

/// The device carries atomic operations out where both ends say so; else the peer does.
#[test]
#[ignore = "needs an RDMA device"]
fn atomics_are_carried_out_by_whom_both_ends_choose() {
    let rail = all_rails().remove(0);
    let clock = Clock::start();
    for (near_by, far_by, by_device) in [
        (AtomicsBy::Device, AtomicsBy::Device, 2),
        (AtomicsBy::Device, AtomicsBy::Host, 0),
        (AtomicsBy::Host, AtomicsBy::Device, 0),
    ] {
        let options = |atomics| VerbsOptions {
            atomics,
            ..VerbsOptions::default()
        };
        let mut near = End::start(&rail, options(near_by), 7, clock);
        let mut far = End::start(&rail, options(far_by), 9, clock);
        let (path, _) = connect(&mut near, &mut far);
        let theirs = far.region(0, Access::READ_WRITE);
        for (act, before) in [
            (AtomicAct::FetchAdd(5), 0),
            (AtomicAct::CompareSwap { expected: 5, new: 9 }, 5),
        ] {
            let op = near.atomic(&remote(&theirs), 8, act);
            near.post(path, std::slice::from_ref(&op));
            until(&mut near, &mut far, "an atomic operation", |near, _| {
                near.outcome(op.id).is_some()
            });
            assert_eq!(near.outcome(op.id), Some(Ok(Done::found(before))));
        }
        let mut word = [0; 8];
        theirs.memory.bytes().read(8, &mut word);
        assert_eq!(u64::from_le_bytes(word), 9);
        assert_eq!(
            near.verbs.counters().device_atomics,
            by_device,
            "{near_by:?} {far_by:?}"
        );
    }
}

/// Whoever sleeps is woken by what comes, and by nothing else.
#[test]
#[ignore = "needs an RDMA device"]
fn a_sleeper_is_woken_by_completions_and_messages() {
    let (mut near, mut far) = pair(VerbsOptions::default());
    let (path, _) = connect(&mut near, &mut far);
    let readable = |end: &End, wait_ms: i32| {
        let mut wait = libc::pollfd {
            fd: end.verbs.wake_fd().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry.
        unsafe { libc::poll(&mut wait, 1, wait_ms) == 1 }
    };
    let fall_asleep = |end: &mut End| {
        end.until("everything to be quiet", |end| end.verbs.arm() == Progress::Idle);
        assert!(!readable(end, 20), "woken by nothing");
    };
    for round in 0..3 {
        fall_asleep(&mut far);
        fall_asleep(&mut near);
        let op = near.message(b"good morning");
        near.post(path, std::slice::from_ref(&op));
        assert!(readable(&far, 5_000), "round {round}: not woken by a message");
        far.until("the message", |far| !far.said.is_empty());
        far.said.clear();
        assert!(readable(&near, 5_000), "round {round}: not woken by a completion");
        near.until("the completion", |near| near.outcome(op.id).is_some());
    }
    let counters = near.verbs.counters();
    assert!(counters.wakeups >= 2 && counters.arms >= 3, "{counters:?}");
}
