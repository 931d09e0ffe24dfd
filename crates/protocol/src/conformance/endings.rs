//! An operation ends once, on time, and for good.

use std::sync::Arc;

use weft_plan::{Spans, Time};

use super::bench::{Bench, How};
use super::{Harness, Side};
use crate::error::{Failure, Loss, Refusal};
use crate::leg::{Direction, Leg};
use crate::memory::Memory;
use crate::region::Region;
use crate::transport::{Body, Op, PeerAddress};

pub fn past_deadline_touches_nothing(harness: &mut dyn Harness) {
    for direction in [Direction::Read, Direction::Write] {
        let mut bench = Bench::new(harness);
        let (leg, far) = bench.whole_leg(10_000);
        bench.harness.idle();
        let (near_before, far_before) = (bench.contents(&*leg.local().memory), bench.contents(&*far.memory));
        let mut ops = bench.parts(Side::Initiator, direction, &leg, How::default());
        for op in &mut ops {
            op.deadline = bench.harness.now();
        }
        let path = bench.near;
        for outcome in bench.carry_out(Side::Initiator, path, &ops) {
            assert!(
                matches!(outcome, Err(Failure::Expired | Failure::Refused(Refusal::Late))),
                "{outcome:?} after the deadline"
            );
        }
        bench.settle();
        assert!(
            bench.contents(&*leg.local().memory) == near_before,
            "local memory was touched after the deadline"
        );
        assert!(
            bench.contents(&*far.memory) == far_before,
            "far memory was touched after the deadline"
        );
        bench.assert_usable();
    }
}

pub fn frozen_target_cannot_delay_a_read(harness: &mut dyn Harness) {
    frozen(harness, Direction::Read);
}

pub fn frozen_target_cannot_delay_a_write(harness: &mut dyn Harness) {
    frozen(harness, Direction::Write);
}

pub fn cancelled_reads_are_fenced(harness: &mut dyn Harness) {
    cancelled(harness, Direction::Read);
}

pub fn cancelled_writes_are_fenced(harness: &mut dyn Harness) {
    cancelled(harness, Direction::Write);
}

/// More than fits is accepted in part, and what was accepted is all carried out.
pub fn full_queue_accepts_a_prefix(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let (leg, far) = bench.whole_leg(64 << 10);
    let room = bench.initiator.transport().capabilities().max_inflight_ops;
    let mut ops = Vec::new();
    for i in 0..3 * room + 1 {
        let range = part_of(i, leg.bytes());
        ops.push(read_of(&mut bench, &leg, range));
    }
    let path = bench.near;
    let accepted = bench.post(Side::Initiator, path, &ops);
    assert!(accepted >= 1, "an idle path accepts at least one operation");
    assert!(
        accepted <= room,
        "{accepted} operations accepted, more than the {room} that a path holds"
    );
    for outcome in bench.carry_out(Side::Initiator, path, &ops[accepted..]) {
        outcome.expect("a rightful move succeeds");
    }
    bench.settle();
    for op in &ops {
        assert!(
            bench.initiator.is_completed(op.id),
            "{:?} was accepted and forgotten",
            op.id
        );
        let Body::Move(part) = &op.body else { continue };
        let spans = Spans::contiguous(part.range.start, part.range.end - part.range.start);
        assert!(bench.gather(&*leg.local().memory, &spans) == bench.gather(&*far.memory, &spans));
    }
}

pub fn close_completes_what_is_open(harness: &mut dyn Harness) {
    ended_path(harness, End::Near);
}

pub fn close_by_the_peer_completes_what_is_open(harness: &mut dyn Harness) {
    ended_path(harness, End::Far);
}

pub fn death_of_the_peer_completes_what_is_open(harness: &mut dyn Harness) {
    ended_path(harness, End::Death);
}

/// A path to a peer that is gone ends, at once or after a while.
pub fn unreachable_peer_is_lost(harness: &mut dyn Harness) {
    let mut bench = Bench::unconnected(harness);
    let address: PeerAddress = bench.target.transport().capabilities().address.clone();
    bench.target.transport = None;
    let now = bench.harness.now();
    if let Ok(path) = bench.initiator.transport().open(&address, now) {
        bench.until("the loss of a path to nobody", |b| b.initiator.lost.contains_key(&path));
        assert!(!bench.initiator.opened.contains(&path), "a path to nobody was opened");
    }
}

/// While the target is frozen every operation ends by its deadline; what ended has ended for the thawed target too.
fn frozen(harness: &mut dyn Harness, direction: Direction) {
    let mut bench = Bench::new(harness);
    let (leg, far) = bench.whole_leg(8 << 20);
    bench.frozen = true;
    let deadline = bench.harness.now().saturating_add(Time::from_ms(50));
    let mut ops = bench.parts(Side::Initiator, direction, &leg, How::default());
    for op in &mut ops {
        op.deadline = deadline;
    }
    let path = bench.near;
    let posted = bench.post(Side::Initiator, path, &ops);
    bench.until_all_completed(Side::Initiator);
    let fences = stamp(&mut bench, &ops[..posted], direction, &leg, &far, |failure| {
        matches!(failure, Failure::Expired | Failure::Refused(Refusal::Late))
    });
    bench.frozen = false;
    bench.settle();
    fences.hold(&bench);
    bench.assert_usable();
}

fn cancelled(harness: &mut dyn Harness, direction: Direction) {
    for polls_before in [0, 1, 3] {
        let mut bench = Bench::new(harness);
        let (leg, far) = bench.whole_leg(8 << 20);
        let ops = bench.parts(Side::Initiator, direction, &leg, How::default());
        let path = bench.near;
        let posted = bench.post(Side::Initiator, path, &ops);
        for _ in 0..polls_before {
            bench.step();
        }
        let now = bench.harness.now();
        for op in &ops[..posted] {
            bench.initiator.transport().cancel(path, op.id, now);
        }
        // A cancel of what nobody posted, and a second one of the same operation, are without effect.
        bench
            .initiator
            .transport()
            .cancel(path, crate::transport::OpId(u64::MAX), now);
        bench.initiator.transport().cancel(path, ops[0].id, now);
        bench.until_all_completed(Side::Initiator);
        let fences = stamp(&mut bench, &ops[..posted], direction, &leg, &far, |failure| {
            matches!(failure, Failure::Cancelled)
        });
        bench.settle();
        fences.hold(&bench);
        bench.assert_usable();
        bench.carry_leg(direction, &leg);
        assert!(
            bench.contents(&*leg.local().memory) == bench.contents(&*far.memory),
            "the next transfer is wrong"
        );
    }
}

/// Who ends the path.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Near,
    Far,
    Death,
}

fn ended_path(harness: &mut dyn Harness, ender: End) {
    for direction in [Direction::Read, Direction::Write] {
        let mut bench = Bench::new(harness);
        let (leg, far) = bench.whole_leg(8 << 20);
        let (near_path, far_path) = (bench.near, bench.far);
        let ops = bench.parts(Side::Initiator, direction, &leg, How::default());
        let posted = bench.post(Side::Initiator, near_path, &ops);
        bench.step();
        match ender {
            End::Near => bench.initiator.transport().close(near_path),
            End::Far => bench.target.transport().close(far_path),
            End::Death => bench.target.transport = None,
        }
        let one_end = ender == End::Death || bench.is_alone();
        bench.until("both ends to learn of the loss", |b| {
            b.initiator.lost.contains_key(&near_path) && (one_end || b.target.lost.contains_key(&far_path))
        });
        let (near_loss, far_loss) = match ender {
            End::Near if one_end => (Loss::Closed, None),
            End::Near => (Loss::Closed, Some(Loss::ClosedByPeer)),
            End::Far => (Loss::ClosedByPeer, Some(Loss::Closed)),
            End::Death => (Loss::ClosedByPeer, None),
        };
        assert_eq!(bench.initiator.lost[&near_path].0, near_loss);
        if let Some(loss) = far_loss {
            assert_eq!(bench.target.lost[&far_path].0, loss);
        }
        let fences = stamp(
            &mut bench,
            &ops[..posted],
            direction,
            &leg,
            &far,
            |failure| match failure {
                Failure::PathLost { fenced, .. } => fenced || direction == Direction::Write,
                _ => false,
            },
        );
        bench.settle();
        fences.hold(&bench);
        let now = bench.harness.now();
        assert!(
            bench.initiator.transport().post(near_path, &ops[..1], now).is_err(),
            "a lost path accepted an operation"
        );
        if ender != End::Death {
            (bench.near, bench.far) = bench.connect();
            bench.assert_usable();
            bench.carry_leg(direction, &leg);
            assert!(
                bench.contents(&*leg.local().memory) == bench.contents(&*far.memory),
                "the next transfer is wrong"
            );
        }
    }
}

/// Memory that has been written over by its owner, who must find it as it is.
pub(super) struct Fences {
    stamped: Vec<(Arc<dyn Memory>, Vec<u8>)>,
}

impl Fences {
    pub(super) fn hold(&self, bench: &Bench<'_>) {
        for (memory, wanted) in &self.stamped {
            assert!(
                bench.contents(&**memory) == *wanted,
                "memory was touched after the completion"
            );
        }
    }
}

/// Checks the bytes of the operations that succeeded, then writes over both sides, as an owner may after a completion.
pub(super) fn stamp(
    bench: &mut Bench<'_>,
    ops: &[Op],
    direction: Direction,
    leg: &Leg,
    far: &Region,
    allowed: impl Fn(Failure) -> bool,
) -> Fences {
    for op in ops {
        let Body::Move(part) = &op.body else { continue };
        match bench.initiator.outcome(op.id) {
            Ok(_) => {
                let spans = Spans::contiguous(part.range.start, part.range.end - part.range.start);
                assert!(
                    bench.gather(&*leg.local().memory, &spans) == bench.gather(&*far.memory, &spans),
                    "{direction:?} completed before its bytes were in place"
                );
            }
            Err(failure) => assert!(allowed(failure), "{direction:?} ended with {failure:?}"),
        }
    }
    // After an unfenced loss the far memory is the target's until the deadline, and not looked at.
    let unfenced = |op: &Op| {
        matches!(
            bench.initiator.outcome(op.id),
            Err(Failure::PathLost { fenced: false, .. })
        )
    };
    let far_is_free = !ops.iter().any(unfenced);
    let mut stamped = Vec::new();
    for (memory, byte, free) in [(&leg.local().memory, 0x3c, true), (&far.memory, 0xc3, far_is_free)] {
        if free {
            let wanted = vec![byte; memory.len() as usize];
            bench.look(&**memory).write(0, &wanted);
            stamped.push((Arc::clone(memory), wanted));
        }
    }
    Fences { stamped }
}

fn part_of(i: usize, len: u64) -> std::ops::Range<u64> {
    let start = (i as u64 * 100) % (len - 100);
    start..start + 100
}

fn read_of(bench: &mut Bench<'_>, leg: &Arc<Leg>, range: std::ops::Range<u64>) -> Op {
    bench.op(Body::Move(crate::transport::Move {
        direction: Direction::Read,
        leg: Arc::clone(leg),
        range,
        checksum: false,
        arrival: None,
    }))
}
