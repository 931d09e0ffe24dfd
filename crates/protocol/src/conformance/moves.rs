//! Bytes go where they belong, and nowhere else.

use std::sync::Arc;

use weft_plan::{Run, Span, Spans};

use super::bench::{Bench, How, leg, scattered};
use super::{Harness, Side};
use crate::leg::{Direction, Leg};
use crate::memory::Memory;
use crate::region::{Access, Region, RemoteRegion};
use crate::transport::Body;

pub fn read_contiguous(harness: &mut dyn Harness) {
    contiguous(harness, Direction::Read);
}

pub fn write_contiguous(harness: &mut dyn Harness) {
    contiguous(harness, Direction::Write);
}

pub fn read_strided(harness: &mut dyn Harness) {
    strided(harness, Direction::Read);
}

pub fn write_strided(harness: &mut dyn Harness) {
    strided(harness, Direction::Write);
}

pub fn read_paged(harness: &mut dyn Harness) {
    paged(harness, Direction::Read);
}

pub fn write_paged(harness: &mut dyn Harness) {
    paged(harness, Direction::Write);
}

/// The two sides of a move may be cut differently, as two paged caches of different block size are.
pub fn mismatched_spans(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let mut regions = Regions::new(&mut bench, 64 << 10);
    for direction in [Direction::Read, Direction::Write] {
        let near = Spans::paged(0, 96, bench.random.shuffled(300));
        let mut far = Spans::new();
        let mut offset = 5;
        while far.bytes() < near.bytes() {
            let len = (1 + bench.random.below(250)).min(near.bytes() - far.bytes());
            far.push(Span { offset, len });
            offset += len + bench.random.below(90);
        }
        regions.carry(&mut bench, direction, near, far);
    }
}

/// A move of nothing is still a move: it completes, and its arrival counts.
pub fn empty_moves(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let mut regions = Regions::new(&mut bench, 4096);
    for direction in [Direction::Read, Direction::Write] {
        regions.carry(&mut bench, direction, Spans::new(), Spans::new());
    }
    let leg = regions.leg(Spans::new(), Spans::new());
    let tag = How {
        tag: Some(3),
        checksum: true,
    };
    let ops = bench.parts(Side::Initiator, Direction::Write, &leg, tag);
    let path = bench.near;
    bench.carry_out(Side::Initiator, path, &ops)[0].expect("an empty write succeeds");
    bench.until("the arrival of an empty write", |b| {
        !b.end(Side::Target).arrivals.is_empty()
    });
}

pub fn single_bytes(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let mut regions = Regions::new(&mut bench, 4096);
    for direction in [Direction::Read, Direction::Write] {
        for (near, far) in [(0, 0), (4095, 1), (17, 4095)] {
            regions.carry(
                &mut bench,
                direction,
                Spans::contiguous(near, 1),
                Spans::contiguous(far, 1),
            );
        }
    }
}

pub fn many_spans(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let mut regions = Regions::new(&mut bench, 10_000 * 64);
    for direction in [Direction::Read, Direction::Write] {
        let near = Spans::paged(0, 64, bench.random.shuffled(10_000));
        let far = Spans::paged(0, 64, bench.random.shuffled(10_000));
        regions.carry(&mut bench, direction, near, far);
    }
}

pub fn large_moves(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let len = 16 << 20;
    let mut regions = Regions::new(&mut bench, len);
    for direction in [Direction::Read, Direction::Write] {
        regions.carry(
            &mut bench,
            direction,
            Spans::contiguous(0, len),
            Spans::contiguous(0, len),
        );
    }
}

pub fn several_regions(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let legs: Vec<(Arc<Leg>, Region)> = (0..5).map(|_| bench.whole_leg(20_000)).collect();
    let path = bench.near;
    let mut ops = Vec::new();
    for (leg, _) in &legs {
        ops.extend(bench.parts(Side::Initiator, Direction::Read, leg, How::default()));
    }
    for outcome in bench.carry_out(Side::Initiator, path, &ops) {
        outcome.expect("a rightful move succeeds");
    }
    for (leg, far) in &legs {
        assert!(
            bench.contents(&*leg.local().memory) == bench.contents(&*far.memory),
            "bytes of another region"
        );
    }
}

/// The side that accepted a path moves bytes over it just as the side that opened it.
pub fn both_directions_at_once(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let len = 1 << 20;
    let (out, out_far) = bench.whole_leg(len);
    let near = bench.region(Side::Target, len, Access::NONE).0;
    let (back_far, remote) = bench.region(Side::Initiator, len, Access::READ_WRITE);
    let back = leg(&near, Spans::contiguous(0, len), &remote, Spans::contiguous(0, len));
    for direction in [Direction::Read, Direction::Write] {
        for memory in [&out.local().memory, &out_far.memory, &near.memory, &back_far.memory] {
            bench.fill_random(&**memory);
        }
        let there = bench.parts(Side::Initiator, direction, &out, How::default());
        let here = bench.parts(Side::Target, direction, &back, How::default());
        let (near_path, far_path) = (bench.near, bench.far);
        let first = bench.post(Side::Target, far_path, &here);
        for outcome in bench.carry_out(Side::Initiator, near_path, &there) {
            outcome.expect("a rightful move succeeds");
        }
        bench.carry_out(Side::Target, far_path, &here[first..]);
        for op in &here {
            bench.target.outcome(op.id).expect("a rightful move succeeds");
        }
        assert!(bench.contents(&*out.local().memory) == bench.contents(&*out_far.memory));
        assert!(bench.contents(&*near.memory) == bench.contents(&*back_far.memory));
    }
}

pub fn two_paths_at_once(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let first = bench.near;
    let (second, _) = bench.connect();
    assert_ne!(first, second, "two open paths with one number");
    let (leg, far) = bench.whole_leg(4 << 20);
    let ops = bench.parts(Side::Initiator, Direction::Read, &leg, How::default());
    let (mut queues, mut turn) = ([Vec::new(), Vec::new()], 0);
    for op in ops {
        queues[turn].push(op);
        turn = 1 - turn;
    }
    let posted = bench.post(Side::Initiator, first, &queues[0]);
    bench.carry_out(Side::Initiator, second, &queues[1]);
    bench.carry_out(Side::Initiator, first, &queues[0][posted..]);
    for op in queues.iter().flatten() {
        bench.initiator.outcome(op.id).expect("a rightful move succeeds");
    }
    assert!(bench.contents(&*leg.local().memory) == bench.contents(&*far.memory));
}

pub fn checksums_are_those_of_the_far_bytes(harness: &mut dyn Harness) {
    let mut bench = Bench::new(harness);
    let mut regions = Regions::new(&mut bench, 3 << 20);
    let shapes = [
        (Spans::contiguous(0, 3 << 20), Spans::contiguous(0, 3 << 20)),
        (
            Spans::paged(0, 100, bench.random.shuffled(500)),
            Spans::contiguous(77, 50_000),
        ),
        (
            Spans::contiguous(3, 50_000),
            Spans::paged(9, 125, bench.random.shuffled(400)),
        ),
    ];
    let path = bench.near;
    let mut seen = std::collections::BTreeSet::new();
    for direction in [Direction::Read, Direction::Write] {
        for (near, far) in &shapes {
            let how = How {
                checksum: true,
                tag: None,
            };
            let leg = regions.leg(near.clone(), far.clone());
            let ops = bench.parts(Side::Initiator, direction, &leg, how);
            let outcomes = bench.carry_out(Side::Initiator, path, &ops);
            for (op, outcome) in ops.iter().zip(outcomes) {
                let Body::Move(part) = &op.body else { continue };
                let done = outcome.expect("a rightful move succeeds");
                if bench.harness.has_own_sum() {
                    assert!(
                        done.far_sum.is_some() && done.near_sum == done.far_sum,
                        "{direction:?}: both ends are summed"
                    );
                    assert!(seen.insert(done.far_sum), "{direction:?}: other bytes have another sum");
                    continue;
                }
                assert_eq!(
                    done.far_sum,
                    Some(bench.sum_of(&*regions.far.memory, far, part.range.clone())),
                    "{direction:?}: the checksum is not that of the far bytes"
                );
                assert_eq!(done.near_sum, done.far_sum, "{direction:?}: both ends are summed");
                assert_eq!(
                    done.far_sum,
                    Some(bench.sum_of(&*regions.near.memory, near, part.range.clone()))
                );
            }
        }
        regions.refresh(&mut bench);
    }
}

fn contiguous(harness: &mut dyn Harness, direction: Direction) {
    let mut bench = Bench::new(harness);
    let mut regions = Regions::new(&mut bench, 256 << 10);
    for (near, far, len) in [(0, 0, 256 << 10), (0, 1, 4096), (4097, 3, 70_001), (100, 200, 8)] {
        regions.carry(
            &mut bench,
            direction,
            Spans::contiguous(near, len),
            Spans::contiguous(far, len),
        );
    }
}

fn strided(harness: &mut dyn Harness, direction: Direction) {
    let mut bench = Bench::new(harness);
    let mut regions = Regions::new(&mut bench, 512 << 10);
    let run = |offset, len, stride, count| {
        Spans::strided(Run {
            offset,
            len,
            stride,
            count,
        })
    };
    for (near, far) in [
        (run(0, 512, 1024, 200), run(100, 512, 2048, 200)),
        (run(1, 1, 3, 5000), run(0, 1, 2, 5000)),
        (run(64, 4096, 8192, 50), Spans::contiguous(11, 50 * 4096)),
        (Spans::contiguous(0, 90_000), run(5, 30, 33, 3000)),
        (run(0, 100, 150, 30), run(7, 30, 37, 100)),
    ] {
        regions.carry(&mut bench, direction, near, far);
    }
}

fn paged(harness: &mut dyn Harness, direction: Direction) {
    let mut bench = Bench::new(harness);
    let mut regions = Regions::new(&mut bench, 1 << 20);
    for block in [4096, 1000, 16 << 10] {
        let blocks = (1 << 20) / block;
        let near = Spans::paged(0, block, bench.random.shuffled(blocks).into_iter().skip(3));
        let far = Spans::paged(0, block, bench.random.shuffled(blocks).into_iter().skip(3));
        regions.carry(&mut bench, direction, near, far);
    }
}

/// One region at each end.
struct Regions {
    near: Region,
    far: Region,
    remote: RemoteRegion,
}

impl Regions {
    fn new(bench: &mut Bench<'_>, len: u64) -> Regions {
        let near = bench.local(len);
        let (far, remote) = bench.region(Side::Target, len, Access::READ_WRITE);
        Regions { near, far, remote }
    }

    fn leg(&self, near: Spans, far: Spans) -> Arc<Leg> {
        leg(&self.near, near, &self.remote, far)
    }

    fn refresh(&mut self, bench: &mut Bench<'_>) {
        bench.fill_random(&*self.near.memory);
        bench.fill_random(&*self.far.memory);
    }

    /// Moves, then compares both memories whole: the spans hold what they should, and everything else what it did.
    fn carry(&mut self, bench: &mut Bench<'_>, direction: Direction, near: Spans, far: Spans) {
        self.refresh(bench);
        let (near_memory, far_memory): (&dyn Memory, &dyn Memory) = (&*self.near.memory, &*self.far.memory);
        let (near_before, far_before) = (bench.contents(near_memory), bench.contents(far_memory));
        let (near_wanted, far_wanted) = match direction {
            Direction::Read => {
                let bytes = bench.gather(far_memory, &far);
                (scattered(near_before, &near, &bytes), far_before)
            }
            Direction::Write => {
                let bytes = bench.gather(near_memory, &near);
                (near_before, scattered(far_before, &far, &bytes))
            }
        };
        bench.carry_leg(direction, &self.leg(near, far));
        assert!(
            bench.contents(near_memory) == near_wanted,
            "{direction:?}: local memory is wrong"
        );
        assert!(
            bench.contents(far_memory) == far_wanted,
            "{direction:?}: far memory is wrong"
        );
    }
}
