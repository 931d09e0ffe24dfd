//! What goes wrong with a place that is no memory: a device that moves less than it was asked for, is full, fails, is stuck, or has lost what it held.
//!
//! A harness that can bring such a trouble about says so ([`Harness::trouble`]); for all others the cases are without effect.

use weft_plan::{Spans, Time};

use super::bench::{Bench, How, leg};
use super::endings::stamp;
use super::{Harness, Side};
use crate::error::{Failure, Refusal};
use crate::leg::Direction;
use crate::transport::Body;

const LEN: u64 = 3 << 20;

/// What may be wrong with a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Every request moves some of its bytes, and rarely all of them.
    Short,
    /// There is room for the first half of what it should hold.
    Full,
    /// What it held has lost its second half.
    Shrunk,
    ReadOnly,
    /// Every request fails, as with a disk that was pulled.
    Failing,
    /// No request ends until the trouble does, whoever wants it to.
    Stuck,
}

/// What was moved in part is gone on with, until all of it is there.
pub fn short_moves_are_completed(harness: &mut dyn Harness) {
    for direction in [Direction::Read, Direction::Write] {
        let mut bench = Bench::new(harness);
        if !bench.harness.trouble(Some(Trouble::Short)) {
            return;
        }
        let near = bench.local(LEN);
        let (far, remote) = bench.region_untouched(Side::Target, LEN);
        let all = Spans::contiguous(0, LEN);
        let leg = leg(&near, all.clone(), &remote, all);
        bench.carry_leg(direction, &leg);
        bench.harness.trouble(None);
        assert!(
            bench.contents(&*leg.local().memory) == bench.contents(&*far.memory),
            "{direction:?}: bytes are missing"
        );
        bench.assert_usable();
    }
}

/// It is told as what it is, and what fits has been written.
pub fn full_place_is_told(harness: &mut dyn Harness) {
    told(harness, Trouble::Full, Direction::Write, Refusal::NoRoom);
}

pub fn vanished_bytes_are_told(harness: &mut dyn Harness) {
    told(harness, Trouble::Shrunk, Direction::Read, Refusal::NoMemory);
}

pub fn read_only_place_is_told(harness: &mut dyn Harness) {
    told(harness, Trouble::ReadOnly, Direction::Write, Refusal::ReadOnly);
}

pub fn failing_device_is_told(harness: &mut dyn Harness) {
    told(harness, Trouble::Failing, Direction::Read, Refusal::DeviceFailed);
    told(harness, Trouble::Failing, Direction::Write, Refusal::DeviceFailed);
}

/// While a device is stuck, others move; polling does not wait for it. An operation on it that ends has ended for good, whenever the device goes on.
pub fn stuck_device_delays_nobody_else(harness: &mut dyn Harness) {
    for direction in [Direction::Read, Direction::Write] {
        stuck(harness, direction, false);
    }
}

/// An operation that the kernel, or the hardware, is in the middle of: a cancel of it is a fence all the same.
pub fn cancel_of_what_is_stuck_is_a_fence(harness: &mut dyn Harness) {
    for direction in [Direction::Read, Direction::Write] {
        stuck(harness, direction, true);
    }
}

fn told(harness: &mut dyn Harness, trouble: Trouble, direction: Direction, refusal: Refusal) {
    let mut bench = Bench::new(harness);
    // What has no trouble goes on beside what has.
    let (good, good_far) = bench.whole_leg(LEN);
    if !bench.harness.trouble(Some(trouble)) {
        return;
    }
    let near = bench.local(LEN);
    let (far, remote) = bench.region_untouched(Side::Target, LEN);
    let all = Spans::contiguous(0, LEN);
    let bad = leg(&near, all.clone(), &remote, all);
    let path = bench.near;
    let mut ops = bench.parts(Side::Initiator, direction, &bad, How::default());
    let others = ops.len();
    ops.extend(bench.parts(Side::Initiator, direction, &good, How::default()));
    let outcomes = bench.carry_out(Side::Initiator, path, &ops);
    let refused = outcomes[..others].iter().filter(|outcome| outcome.is_err());
    let refused = refused.inspect(|outcome| {
        assert_eq!(**outcome, Err(Failure::Refused(refusal)), "{trouble:?}, {direction:?}");
    });
    assert!(refused.count() > 0, "{trouble:?}: {direction:?} succeeded");
    for outcome in &outcomes[others..] {
        outcome.expect("what has no trouble succeeds");
    }
    bench.harness.trouble(None);
    assert!(bench.contents(&*good.local().memory) == bench.contents(&*good_far.memory));
    bench.assert_usable();
    bench.fill_random(&*far.memory);
    bench.carry_leg(direction, &bad);
    assert!(
        bench.contents(&*near.memory) == bench.contents(&*far.memory),
        "after {trouble:?} it is not as before"
    );
}

fn stuck(harness: &mut dyn Harness, direction: Direction, cancel: bool) {
    let mut bench = Bench::new(harness);
    let (good, good_far) = bench.whole_leg(LEN);
    if !bench.harness.trouble(Some(Trouble::Stuck)) {
        return;
    }
    let near = bench.local(LEN);
    let (far, remote) = bench.region_untouched(Side::Target, LEN);
    let all = Spans::contiguous(0, LEN);
    let bad = leg(&near, all.clone(), &remote, all);
    let path = bench.near;
    let mut ops = bench.parts(Side::Initiator, direction, &bad, How::default());
    let deadline = bench.harness.now().saturating_add(Time::from_ms(50));
    for op in ops.iter_mut().filter(|_| !cancel) {
        op.deadline = deadline;
    }
    let posted = bench.post(Side::Initiator, path, &ops);
    assert!(posted > 0, "an idle path accepts at least one operation");
    for _ in 0..3 {
        bench.step();
        bench.harness.idle();
    }
    let beside = bench.parts(Side::Initiator, direction, &good, How::default());
    let mut sent = bench.post(Side::Initiator, path, &beside);
    bench.until("what is not stuck", |b| {
        sent += b.post(Side::Initiator, path, &beside[sent..]);
        sent == beside.len() && beside.iter().all(|op| b.initiator.is_completed(op.id))
    });
    for op in &beside {
        bench.initiator.outcome(op.id).expect("what is not stuck succeeds");
    }
    assert!(bench.contents(&*good.local().memory) == bench.contents(&*good_far.memory));
    let now = bench.harness.now();
    for op in ops[..posted].iter().filter(|_| cancel) {
        bench.initiator.transport().cancel(path, op.id, now);
    }
    bench.until("the deadline", |b| cancel || b.harness.now() > deadline);
    bench.settle();
    // What has ended by now may not touch its memory when the device goes on; the rest ends with that.
    let ended: Vec<_> = ops[..posted]
        .iter()
        .filter(|op| bench.initiator.is_completed(op.id))
        .cloned()
        .collect();
    // What has succeeded was not stuck, and its bytes are compared below.
    let failed = |op: &crate::Op| bench.initiator.outcome(op.id).is_err();
    let early = (ended.len() == posted && ended.iter().all(failed)).then(|| {
        let held = vec![0x77; LEN as usize];
        bench.look(&*near.memory).write(0, &held);
        held
    });
    bench.harness.trouble(None);
    bench.until_all_completed(Side::Initiator);
    if let Some(held) = early {
        bench.settle();
        assert!(
            bench.contents(&*near.memory) == held,
            "memory was touched after the end"
        );
    }
    let fences = stamp(&mut bench, &ops[..posted], direction, &bad, &far, |failure| {
        matches!(failure, Failure::Cancelled | Failure::Expired)
    });
    bench.settle();
    fences.hold(&bench);
    for op in &ops[..posted] {
        let Body::Move(_) = &op.body else { continue };
        let outcome = bench.initiator.outcome(op.id);
        assert!(
            !matches!(outcome, Err(Failure::Expired)) || !cancel,
            "{outcome:?} of what was cancelled"
        );
    }
    bench.assert_usable();
    bench.carry_leg(direction, &bad);
    assert!(bench.contents(&*near.memory) == bench.contents(&*far.memory));
}
