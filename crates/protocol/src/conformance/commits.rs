//! What has been committed lasts; and an end without a peer moves bytes among its own places.

use std::sync::Arc;

use weft_plan::{Spans, Time};

use super::bench::{Bench, How, leg};
use super::refusals::release;
use super::{Harness, Side};
use crate::error::{Failure, Refusal};
use crate::leg::Direction;
use crate::region::{Access, Region, RegionKey, RemoteRegion};
use crate::transport::{Body, Commit, Done, Op, OpId, Signal};

const LEN: u64 = 3 << 20;
const TAG: u64 = 77;

/// A write in several parts, committed once they have completed: what is found after a crash is what was written. Asking again is harmless,
/// and memory, which has nothing to do, answers as well.
pub fn commits_make_writes_last(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let (near, path) = (bench.local(LEN), bench.near);
    let (far, remote) = bench.region(Side::Target, LEN, Access::READ_WRITE);
    let whole = leg(&near, Spans::contiguous(0, LEN), &remote, Spans::contiguous(0, LEN));
    let how = How {
        checksum: false,
        tag: Some(TAG),
    };
    let parts = bench.parts(Side::Initiator, Direction::Write, &whole, how);
    let before = bench.harness.lasting(&*far.memory);
    for outcome in bench.carry_out(Side::Initiator, path, &parts) {
        outcome.expect("a rightful move succeeds");
    }
    assert_eq!(
        bench.harness.lasting(&*far.memory).is_none(),
        before.is_none(),
        "it does or does not make a difference"
    );
    let commit = Commit::new(Arc::new(remote), TAG, parts.len() as u32);
    for _ in 0..2 {
        let op = bench.op(Body::Commit(commit.clone()));
        let outcome = bench.carry_out(Side::Initiator, path, &[op])[0];
        assert_eq!(outcome, Ok(Done::default()));
        if let Some(lasting) = bench.harness.lasting(&*far.memory) {
            assert!(
                lasting == bench.contents(&*near.memory),
                "what was committed does not last"
            );
        }
    }
    let late = Time::from_ns(bench.harness.now().as_ns() / 2);
    let op = bench.op_by(Body::Commit(commit), late);
    let outcome = bench.carry_out(Side::Initiator, path, &[op])[0];
    assert!(
        matches!(outcome, Ok(_) | Err(Failure::Expired)),
        "{outcome:?} of a commit past its deadline"
    );
    bench.assert_usable();
}

/// Memory has nothing to commit, and may answer whoever asks; where it makes a difference, the rights count.
pub fn commits_without_the_right_are_refused(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let path = bench.near;
    let (read_only, told) = bench.region(Side::Target, LEN, Access::READ);
    let matters = bench.harness.lasting(&*read_only.memory).is_some();
    let (gone, gone_told) = bench.region(Side::Target, LEN, Access::READ_WRITE);
    release(&mut bench, Side::Target, &gone);
    for (remote, refusal) in [(told, Refusal::NotWritable), (gone_told, Refusal::Released)] {
        let op = bench.op(Body::Commit(Commit::new(Arc::new(remote), TAG, 0)));
        let outcome = bench.carry_out(Side::Initiator, path, &[op])[0];
        match outcome {
            Err(Failure::Refused(found)) => assert_eq!(found, refusal),
            Ok(_) => assert!(!matters, "a commit without the right"),
            Err(other) => panic!("{other:?} of a commit"),
        }
    }
    bench.assert_usable();
}

/// A path to oneself opens at once and is accepted by nobody. On it the owner may do with its regions what no peer may.
pub fn own_places_are_moved_between(harness: &mut dyn Harness) {
    let Some((mut transport, epoch)) = harness.alone() else {
        return;
    };
    let mut region = |slot: u32, side: Side| {
        let memory = harness.memory(side, LEN);
        let key = RegionKey { epoch, slot, secret: 5 };
        let (place, access) = (harness.place(side), Access::NONE);
        let region = Region {
            key,
            memory,
            place,
            access,
        };
        transport.register(&region).expect("its own memory");
        region
    };
    let (near, far) = (region(0, Side::Initiator), region(1, Side::Target));
    let pattern: Vec<u8> = (0..LEN).map(|i| ((i * 13) >> 3) as u8).collect();
    harness.look(&*near.memory).write(0, &pattern);
    let remote = RemoteRegion {
        key: far.key,
        len: LEN,
        place: far.place,
        access: far.access,
        grants: Arc::from([]),
    };
    let all = Spans::contiguous(0, LEN);
    let whole = leg(&near, all.clone(), &remote, all);
    let address = transport.capabilities().address.clone();
    let path = transport.open(&address, harness.now()).expect("a path to itself");
    transport.vouch(path);
    let mut signals = Vec::new();
    let give_up = harness.now().saturating_add(harness.patience());
    let carriage = *transport
        .capabilities()
        .carriage(near.place.kind(), far.place.kind())
        .expect("it carries what its harness gives");
    let parts = LEN.div_ceil(carriage.max_op_bytes);
    let mut moved = Vec::new();
    for direction in [Direction::Write, Direction::Read] {
        for part in 0..parts {
            let range = part * carriage.max_op_bytes..((part + 1) * carriage.max_op_bytes).min(LEN);
            let part = crate::transport::Move::new(direction, Arc::clone(&whole), range).checksum(true);
            let id = OpId(moved.len() as u64);
            moved.push(id);
            let op = Op::new(id, give_up, Body::Move(part));
            while transport.post(path, std::slice::from_ref(&op), harness.now()) != Ok(1) {
                transport.poll(harness.now(), &mut signals);
                assert!(harness.now() < give_up, "waited in vain for room");
                harness.idle();
            }
        }
        let ended = |signals: &[Signal]| signals.iter().filter(|s| matches!(s, Signal::Completed { .. })).count();
        while ended(&signals) < moved.len() {
            transport.poll(harness.now(), &mut signals);
            assert!(harness.now() < give_up, "waited in vain for completions");
            harness.idle();
        }
        let mut found = vec![0; LEN as usize];
        harness.look(&*far.memory).read(0, &mut found);
        assert!(found == pattern, "{direction:?} among own places");
        harness.look(&*near.memory).write(0, &vec![0; LEN as usize]);
    }
    for signal in signals {
        match signal {
            Signal::Opened { path: opened } => assert_eq!(opened, path),
            Signal::Completed { outcome: Ok(done), .. } => {
                assert!(done.far_sum.is_some() && done.far_sum == done.near_sum, "{done:?}");
            }
            other => panic!("{other:?} on a path to oneself"),
        }
    }
}
