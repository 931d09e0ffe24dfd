//! A target touches nothing without the right key, and nobody anything after its owner has taken it back.

use std::sync::Arc;

use weft_plan::Spans;

use super::bench::{Bench, How, leg};
use super::{Harness, Side};
use crate::error::{Failure, Refusal};
use crate::leg::Direction;
use crate::region::{Access, Epoch, Region, RemoteRegion};
use crate::transport::{Op, Progress};

const LEN: u64 = 40_000;
/// What an owner fills its memory with once it has it back.
const STAMP: u8 = 0xa5;

/// Messages pass, so that the ends can come to know each other. Nothing else does until the target knows who asks, not even with the right key;
/// then what has waited is served.
pub fn strangers_wait_to_be_vouched_for(harness: &mut dyn Harness) {
    let mut bench = Bench::unconnected(harness);
    if !bench.target.transport().capabilities().awaits_vouching {
        return;
    }
    (bench.near, bench.far) = bench.meet();
    let (path, far_path) = (bench.near, bench.far);
    bench.initiator.transport().vouch(path);
    bench.assert_usable();
    let (read, read_far) = bench.whole_leg(LEN);
    let (write, write_far) = bench.whole_leg(LEN);
    let (near_before, far_before) = (
        bench.contents(&*read.local().memory),
        bench.contents(&*write_far.memory),
    );
    let mut ops = bench.parts(Side::Initiator, Direction::Read, &read, How::default());
    let tagged = How {
        tag: Some(3),
        ..How::default()
    };
    ops.extend(bench.parts(Side::Initiator, Direction::Write, &write, tagged));
    let mut posted = bench.post(Side::Initiator, path, &ops);
    bench.settle();
    let none_ended = ops.iter().all(|op| !bench.initiator.is_completed(op.id));
    assert!(none_ended, "a stranger was answered");
    assert!(bench.target.arrivals.is_empty());
    assert!(
        bench.contents(&*read.local().memory) == near_before,
        "a stranger has read"
    );
    assert!(
        bench.contents(&*write_far.memory) == far_before,
        "a stranger has written"
    );
    bench.target.transport().vouch(far_path);
    bench.until("what waited to be served", |b| {
        posted += b.post(Side::Initiator, path, &ops[posted..]);
        posted == ops.len() && ops.iter().all(|op| b.initiator.is_completed(op.id))
    });
    for op in &ops {
        bench.initiator.outcome(op.id).expect("a peer is served");
    }
    assert!(bench.contents(&*read.local().memory) == bench.contents(&*read_far.memory));
    assert!(bench.contents(&*write_far.memory) == bench.contents(&*write.local().memory));
    bench.assert_usable();
}

pub fn unknown_key_is_refused(harness: &mut dyn Harness) {
    both_ways(harness, Refusal::UnknownKey, |_, _, remote| remote.key.slot += 1_000);
}

pub fn wrong_secret_is_refused(harness: &mut dyn Harness) {
    both_ways(harness, Refusal::UnknownKey, |_, _, remote| {
        remote.key.secret ^= 1 << 77
    });
}

pub fn stale_epoch_is_refused(harness: &mut dyn Harness) {
    both_ways(harness, Refusal::StaleEpoch, |_, _, remote| {
        remote.key.epoch = Epoch(remote.key.epoch.0 ^ 1);
    });
}

/// Also where the region was used before its release, so that nothing a transport has remembered of it lets it in.
pub fn released_region_is_refused(harness: &mut dyn Harness) {
    both_ways(harness, Refusal::Released, |bench, far, remote| {
        let near = bench.local(LEN);
        let warm = leg(&near, Spans::contiguous(0, LEN), remote, Spans::contiguous(0, LEN));
        bench.carry_leg(Direction::Read, &warm);
        release(bench, Side::Target, far);
    });
}

/// Once `release` has returned [`Progress::Idle`], operations under way touch the region no more.
pub fn release_under_traffic_is_a_fence(harness: &mut dyn Harness) {
    for direction in [Direction::Read, Direction::Write] {
        let mut bench = Bench::new(harness);
        let (leg, far) = bench.whole_leg(8 << 20);
        let ops = bench.parts(Side::Initiator, direction, &leg, How::default());
        let path = bench.near;
        let posted = bench.post(Side::Initiator, path, &ops);
        for _ in 0..3 {
            bench.step();
        }
        release(&mut bench, Side::Target, &far);
        let stamp = vec![STAMP; far.memory.len() as usize];
        bench.look(&*far.memory).write(0, &stamp);
        bench.until_all_completed(Side::Initiator);
        bench.settle();
        assert!(bench.contents(&*far.memory) == stamp, "written after its release");
        for op in &ops[..posted] {
            match bench.initiator.outcome(op.id) {
                Ok(_) | Err(Failure::Refused(Refusal::Released)) => {}
                other => panic!("{other:?} from a released region"),
            }
        }
        bench.assert_usable();
    }
}

/// The near side is registered memory too: once `release` has returned [`Progress::Idle`] it is neither read nor written, by
/// operations under way as little as by those posted later.
pub fn released_near_side_is_refused(harness: &mut dyn Harness) {
    for (direction, polls_before) in [Direction::Read, Direction::Write]
        .into_iter()
        .flat_map(|direction| [0, 1, 3].map(|polls| (direction, polls)))
    {
        let mut bench = Bench::new(harness);
        let (leg, far) = bench.whole_leg(8 << 20);
        let near = leg.local();
        let (near_before, far_before) = (bench.contents(&*near.memory), bench.contents(&*far.memory));
        let ops = bench.parts(Side::Initiator, direction, &leg, How::default());
        let path = bench.near;
        let posted = bench.post(Side::Initiator, path, &ops);
        for _ in 0..polls_before {
            bench.step();
        }
        release(&mut bench, Side::Initiator, near);
        let stamp = vec![STAMP; near.memory.len() as usize];
        bench.look(&*near.memory).write(0, &stamp);
        bench.until_all_completed(Side::Initiator);
        for op in &ops[..posted] {
            match bench.initiator.outcome(op.id) {
                Ok(_) | Err(Failure::Refused(Refusal::Released)) => {}
                other => panic!("{other:?} with a released near side"),
            }
        }
        bench.settle();
        let far_between = bench.contents(&*far.memory);
        let later = bench.parts(Side::Initiator, direction, &leg, How::default());
        for outcome in bench.carry_out(Side::Initiator, path, &later) {
            assert_eq!(outcome, Err(Failure::Refused(Refusal::Released)), "{direction:?}");
        }
        bench.settle();
        assert!(
            bench.contents(&*near.memory) == stamp,
            "the near side was written after its release"
        );
        assert!(
            bench.contents(&*far.memory) == far_between,
            "a refused {direction:?} changed far memory"
        );
        // A write that ended half done may have left anything of its own over there, but nothing that is younger than the release.
        let older = near_before
            .iter()
            .zip(&far_before)
            .map(|(near, far)| *near == STAMP || *far == STAMP);
        let leaked = far_between
            .iter()
            .zip(older)
            .any(|(far, older)| *far == STAMP && !older);
        assert!(!leaked, "the near side was read after its release");
        bench.assert_usable();
    }
}

pub fn out_of_bounds_is_refused(harness: &mut dyn Harness) {
    // The initiator believes, or pretends, that the region is larger than it is.
    both_ways(harness, Refusal::OutOfBounds, |_, _, remote| remote.len += 1);
}

pub fn unreadable_region_is_refused(harness: &mut dyn Harness) {
    forbidden(harness, Direction::Read, Access::WRITE, Refusal::NotReadable);
    forbidden(harness, Direction::Read, Access::NONE, Refusal::NotReadable);
}

pub fn unwritable_region_is_refused(harness: &mut dyn Harness) {
    forbidden(harness, Direction::Write, Access::READ, Refusal::NotWritable);
    forbidden(harness, Direction::Write, Access::NONE, Refusal::NotWritable);
}

/// Refusals among rightful operations hurt nobody else.
pub fn refusal_leaves_the_path_usable(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let (good, far) = bench.whole_leg(LEN);
    let near = bench.local(LEN);
    let (_, mut remote) = bench.region(Side::Target, LEN, Access::READ_WRITE);
    remote.key.secret ^= 1;
    let bad = leg(&near, Spans::contiguous(0, LEN), &remote, Spans::contiguous(0, LEN));
    let path = bench.near;
    for direction in [Direction::Write, Direction::Read] {
        let mut ops: Vec<Op> = Vec::new();
        for _ in 0..5 {
            ops.extend(
                bench
                    .parts(Side::Initiator, direction, &bad, How::default())
                    .into_iter()
                    .take(1),
            );
            ops.extend(
                bench
                    .parts(Side::Initiator, direction, &good, How::default())
                    .into_iter()
                    .take(1),
            );
        }
        for (i, outcome) in bench.carry_out(Side::Initiator, path, &ops).into_iter().enumerate() {
            match (i % 2, outcome) {
                (0, Err(Failure::Refused(Refusal::UnknownKey))) | (1, Ok(_)) => {}
                other => panic!("{other:?} in a mix of wrongful and rightful operations"),
            }
        }
    }
    bench.carry_leg(Direction::Read, &good);
    assert!(bench.contents(&*good.local().memory) == bench.contents(&*far.memory));
    bench.assert_usable();
}

/// Calls `release` until nobody is inside the region any more.
pub(super) fn release(bench: &mut Bench<'_>, side: Side, region: &Region) {
    let key = region.key;
    bench.until("a region to be released", |b| {
        let released = b.end(side).transport().release(&key);
        released.expect("the region is registered") == Progress::Idle
    });
}

fn forbidden(harness: &mut dyn Harness, direction: Direction, access: Access, refusal: Refusal) {
    let mut bench = Bench::new(harness);
    let near = bench.local(LEN);
    let (far, mut remote) = bench.region(Side::Target, LEN, access);
    // The initiator was told something else than the owner decided.
    remote.access = Access::READ_WRITE;
    expect_refusal(&mut bench, direction, &near, &far, &remote, refusal);
}

/// Spoils a rightful region by `spoil`, then expects both directions to be refused.
fn both_ways(harness: &mut dyn Harness, refusal: Refusal, spoil: impl Fn(&mut Bench<'_>, &Region, &mut RemoteRegion)) {
    for direction in [Direction::Read, Direction::Write] {
        let mut bench = Bench::new(harness);
        let near = bench.local(LEN);
        let (far, mut remote) = bench.region(Side::Target, LEN, Access::READ_WRITE);
        spoil(&mut bench, &far, &mut remote);
        expect_refusal(&mut bench, direction, &near, &far, &remote, refusal);
    }
}

fn expect_refusal(
    bench: &mut Bench<'_>,
    direction: Direction,
    near: &Region,
    far: &Region,
    remote: &RemoteRegion,
    refusal: Refusal,
) {
    // The last byte of the region as the initiator knows it is among those asked for.
    let offset = remote.len - 1_000;
    let leg = leg(
        near,
        Spans::contiguous(0, 1_000),
        remote,
        Spans::contiguous(offset, 1_000),
    );
    let (near_before, far_before) = (bench.contents(&*near.memory), bench.contents(&*far.memory));
    let how = How {
        checksum: false,
        tag: Some(1),
    };
    let ops = bench.parts(Side::Initiator, direction, &Arc::clone(&leg), how);
    let path = bench.near;
    for outcome in bench.carry_out(Side::Initiator, path, &ops) {
        assert_eq!(outcome, Err(Failure::Refused(refusal)), "{direction:?}");
    }
    bench.settle();
    assert!(
        bench.contents(&*near.memory) == near_before,
        "a refused {direction:?} changed local memory"
    );
    assert!(
        bench.contents(&*far.memory) == far_before,
        "a refused {direction:?} changed far memory"
    );
    assert!(bench.end(Side::Target).arrivals.is_empty(), "a refused move arrived");
    bench.assert_usable();
}
