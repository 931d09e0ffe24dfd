//! Figures of the verbs transport in the terms of perftest, to be laid beside it in the same machine: bandwidth of one size after
//! the other with a full queue, latency of an 8-byte write there and back, and a batch of scattered blocks with what it costs in
//! doorbells and completions. It asserts nothing about time. `cargo xtask rdma-test` prints both.

mod verbs_peer;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use verbs_peer::{End, LEN, all_rails, connect, remote, whole_leg};
use weft_fabric::Clock;
use weft_fabric::verbs::VerbsOptions;
use weft_plan::Spans;
use weft_protocol::{Access, Body, Direction, Leg, Memory, Op, OpId, PathId, Region, Signal, Transport};

/// How long each figure is measured.
const SPELL: Duration = Duration::from_secs(2);

struct Bench {
    near: End,
    path: PathId,
    // Alive, but never looked at: one-sided moves do not need it.
    _far: End,
    local: Region,
    theirs: Region,
}

impl Bench {
    fn new() -> Bench {
        let rail = all_rails().remove(0);
        let clock = Clock::start();
        let mut near = End::start(&rail, VerbsOptions::default(), 7, clock);
        let mut far = End::start(&rail, VerbsOptions::default(), 9, clock);
        let (path, _) = connect(&mut near, &mut far);
        let (local, theirs) = (near.region(3, Access::NONE), far.region(5, Access::READ_WRITE));
        let leg = whole_leg(&local, &remote(&theirs));
        let warm = near.op(Direction::Write, &leg, 0..4096);
        near.post(path, std::slice::from_ref(&warm));
        near.until("the first move", |near| {
            far.poll();
            near.outcome(warm.id).is_some()
        });
        near.said.clear();
        Bench {
            near,
            path,
            _far: far,
            local,
            theirs,
        }
    }

    /// Keeps posting what `next` makes for a spell, and returns bytes and operations a second.
    fn pour(&mut self, mut next: impl FnMut(&mut End) -> Op) -> (f64, f64) {
        let (mut bytes, mut ops, mut open) = (0u64, 0u64, 0usize);
        let start = Instant::now();
        let mut waiting: Option<Op> = None;
        let mut spent = Duration::ZERO;
        while spent < SPELL || open > 0 {
            spent = start.elapsed();
            while start.elapsed() < SPELL {
                let op = waiting.take().unwrap_or_else(|| next(&mut self.near));
                let now = self.near.clock.now();
                let taken = self.near.verbs.post(self.path, std::slice::from_ref(&op), now);
                if taken.expect("the path lives") == 0 {
                    waiting = Some(op);
                    break;
                }
                let Body::Move(part) = &op.body else { continue };
                bytes += part.range.end - part.range.start;
                ops += 1;
                open += 1;
            }
            self.near.poll();
            for signal in self.near.said.drain(..) {
                if let Signal::Completed { outcome, .. } = signal {
                    outcome.expect("a rightful move succeeds");
                    open -= 1;
                }
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        (bytes as f64 / seconds, ops as f64 / seconds)
    }
}

fn bandwidth(name: &str, direction: Direction, size: u64) {
    let mut bench = Bench::new();
    let leg = whole_leg(&bench.local, &remote(&bench.theirs));
    let mut at = 0;
    let before = bench.near.verbs.counters();
    let (bytes, ops) = bench.pour(|near| {
        at = (at + size) % LEN as u64;
        near.op(direction, &leg, at..at + size)
    });
    let after = bench.near.verbs.counters();
    println!(
        "weft {name}_bw {size} bytes: {:.1} MB/s, {ops:.0} operations/s, {} requests, {} doorbells",
        bytes / 1e6,
        after.work_requests - before.work_requests,
        after.doorbells - before.doorbells
    );
}

macro_rules! bandwidths {
    ($($test:ident: $name:literal, $direction:ident, $size:expr;)+) => {$(
        #[test]
        #[ignore = "measures, and needs an RDMA device"]
        fn $test() {
            bandwidth($name, Direction::$direction, $size);
        }
    )+};
}

bandwidths! {
    write_4k: "write", Write, 4 << 10;
    write_64k: "write", Write, 64 << 10;
    write_1m: "write", Write, 1 << 20;
    read_4k: "read", Read, 4 << 10;
    read_64k: "read", Read, 64 << 10;
    read_1m: "read", Read, 1 << 20;
}

#[test]
#[ignore = "measures, and needs an RDMA device"]
fn scattered_blocks() {
    const BLOCKS: u64 = 1024;
    for (name, direction) in [("write", Direction::Write), ("read", Direction::Read)] {
        let mut bench = Bench::new();
        // Every block once, in an order that no two neighbours keep, another one at each end.
        let order = |step: u64| (0..BLOCKS).map(move |i| (i * step + i / 8) % BLOCKS);
        let spans = |step| Spans::paged(0, 4096, order(step));
        let leg = Leg::new(bench.local.clone(), spans(387), remote(&bench.theirs), spans(129)).expect("a leg");
        let leg = Arc::new(leg);
        let part = bench.near.verbs.capabilities().carries[0].max_op_bytes;
        let mut at = 0;
        let before = bench.near.verbs.counters();
        let (bytes, _) = bench.pour(|near| {
            let start = at % leg.bytes();
            at = start + part;
            near.op(direction, &leg, start..at)
        });
        let after = bench.near.verbs.counters();
        let requests = (after.work_requests - before.work_requests) as f64;
        let each = |count: u64| count as f64 * BLOCKS as f64 / requests;
        println!(
            "weft scattered {name} of 4096-byte blocks: {:.0} blocks/s; per 1024 requests {:.1} doorbells, {:.1} completions, \
             {:.1} arms",
            bytes / 4096.0,
            each(after.doorbells - before.doorbells),
            each(after.completions - before.completions),
            each(after.arms - before.arms),
        );
    }
}

/// A write there, seen by whoever looks at the memory, and a write back: half of it is what perftest calls latency.
#[test]
#[ignore = "measures, and needs an RDMA device"]
fn latency() {
    const ROUNDS: u64 = 2000;
    let rail = all_rails().remove(0);
    let clock = Clock::start();
    let mut near = End::start(&rail, VerbsOptions::default(), 7, clock);
    let mut far = End::start(&rail, VerbsOptions::default(), 9, clock);
    let (path, far_path) = connect(&mut near, &mut far);
    let here = [near.region(0, Access::NONE), near.region(0, Access::READ_WRITE)];
    let there = [far.region(0, Access::NONE), far.region(0, Access::READ_WRITE)];
    let out = whole_leg(&here[0], &remote(&there[1]));
    let back = whole_leg(&there[0], &remote(&here[1]));
    for (end, path, leg) in [(0, path, &out), (1, far_path, &back)] {
        let (a, b) = if end == 0 {
            (&mut near, &mut far)
        } else {
            (&mut far, &mut near)
        };
        let warm = a.op(Direction::Write, leg, 0..8);
        a.post(path, std::slice::from_ref(&warm));
        verbs_peer::until(a, b, "the first move", |a, _| a.outcome(warm.id).is_some());
        a.said.clear();
    }
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let (echo_from, echo_seen) = (there[0].clone(), there[1].clone());
    let echo = std::thread::spawn(move || {
        let mut round = 1;
        while round <= ROUNDS {
            if seen(&*echo_seen.memory) == round {
                write(&mut far, far_path, &echo_from, &back, round);
                round += 1;
            }
            far.poll();
            far.said.clear();
            if stopped.load(Ordering::Relaxed) {
                return;
            }
        }
        // The last completion.
        for _ in 0..1000 {
            far.poll();
            std::thread::sleep(Duration::from_micros(100));
        }
    });
    let mut times = Vec::new();
    for round in 1..=ROUNDS {
        let start = Instant::now();
        write(&mut near, path, &here[0], &out, round);
        while seen(&*here[1].memory) != round {
            near.poll();
            near.said.clear();
            assert!(start.elapsed() < Duration::from_secs(20), "no echo of round {round}");
        }
        times.push(start.elapsed().as_secs_f64() / 2.0);
    }
    stop.store(true, Ordering::Relaxed);
    echo.join().expect("the echo");
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times[(times.len() as f64 * part) as usize] * 1e6;
    println!(
        "weft write_lat 8 bytes: typical {:.1} us, 99% {:.1} us",
        at(0.5),
        at(0.99)
    );
}

fn seen(memory: &dyn Memory) -> u64 {
    let mut word = [0; 8];
    memory.bytes().read(0, &mut word);
    u64::from_le_bytes(word)
}

fn write(end: &mut End, path: PathId, from: &Region, leg: &Arc<Leg>, round: u64) {
    from.memory.bytes().write(0, &round.to_le_bytes());
    let mut op = end.op(Direction::Write, leg, 0..8);
    op.id = OpId(1 << 40 | round);
    while end
        .verbs
        .post(path, std::slice::from_ref(&op), end.clock.now())
        .expect("the path lives")
        == 0
    {
        end.poll();
    }
}
