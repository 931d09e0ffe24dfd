//! A target touches nothing without the right key, and nothing after its owner has taken it back.

use std::sync::Arc;

use weft_plan::Spans;

use super::bench::{Bench, How, contents, leg};
use super::{Harness, Side};
use crate::error::{Failure, Refusal};
use crate::leg::Direction;
use crate::region::{Access, Epoch, Region, RemoteRegion};
use crate::transport::{Op, Progress};

const LEN: u64 = 40_000;

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
        release(bench, far);
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
        release(&mut bench, &far);
        let stamp = vec![0xa5; far.memory.len() as usize];
        far.memory.write(0, &stamp);
        bench.until_all_completed(Side::Initiator);
        bench.settle();
        assert!(contents(&*far.memory) == stamp, "written after its release");
        for op in &ops[..posted] {
            match bench.initiator.outcome(op.id) {
                Ok(_) | Err(Failure::Refused(Refusal::Released)) => {}
                other => panic!("{other:?} from a released region"),
            }
        }
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
    assert!(contents(&*good.local().memory) == contents(&*far.memory));
    bench.assert_usable();
}

/// Calls `release` until nobody is inside the region any more.
fn release(bench: &mut Bench<'_>, region: &Region) {
    let key = region.key;
    bench.until("a region to be released", |b| {
        b.target.transport().release(&key).expect("the region is registered") == Progress::Idle
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
    let (near_before, far_before) = (contents(&*near.memory), contents(&*far.memory));
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
        contents(&*near.memory) == near_before,
        "a refused {direction:?} changed local memory"
    );
    assert!(
        contents(&*far.memory) == far_before,
        "a refused {direction:?} changed far memory"
    );
    assert!(bench.target.arrivals.is_empty(), "a refused move arrived");
    bench.assert_usable();
}
