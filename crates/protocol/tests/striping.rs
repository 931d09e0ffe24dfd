//! Lanes of one class share a transfer by their bandwidth, and the next class is used when the best one is gone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use weft_plan::{Bandwidth, Bytes, LinkCost, Picos, Place, Spans, Time};
use weft_protocol::transfer::{Engine, Lane, LaneId, Limits, PeerId, Request, TransferEvent};
use weft_protocol::{
    Access, Body, Carriage, Direction, Done, Epoch, Leg, Loss, OpId, Region, RegionKey, RemoteRegion, VecMemory,
};

const LEN: u64 = 64 << 20;

fn lane(id: u32, transport: &'static str, gigabytes_per_sec: f64) -> Lane {
    Lane {
        id: LaneId(id),
        peer: PeerId(0),
        transport,
        carries: vec![Carriage::host(
            LinkCost {
                latency: Picos::from_us(10),
                per_span: Picos::ZERO,
                bandwidth: Bandwidth::from_gigabytes_per_sec(gigabytes_per_sec),
            },
            1 << 20,
        )],
        preference: 0,
        awaits_ready: false,
        numa: None,
        max_op_runs: 1024,
        max_inflight_ops: 16,
        max_inflight_bytes: 8 << 20,
    }
}

fn request() -> Request {
    request_of(LEN, None)
}

/// A read of so many bytes into memory of a NUMA node.
fn request_of(len: u64, numa: Option<u16>) -> Request {
    let key = RegionKey {
        epoch: Epoch(1),
        slot: 0,
        secret: 0,
    };
    let local = Region {
        key,
        memory: Arc::new(VecMemory::zeroed(len as usize)),
        place: Place::Dram { numa },
        access: Access::NONE,
    };
    let remote = RemoteRegion {
        key,
        len,
        place: Place::DRAM,
        access: Access::READ,
        grants: Arc::from([]),
    };
    let leg = Leg::new(local, Spans::contiguous(0, len), remote, Spans::contiguous(0, len)).expect("a leg");
    Request::new(PeerId(0), Direction::Read, Arc::from([Arc::new(leg)]), Time::MAX)
}

/// Lanes that carry one part after another, each at its own true speed, whatever the engine was told.
#[derive(Default)]
struct Wires {
    speeds: BTreeMap<u32, Bandwidth>,
    queues: BTreeMap<u32, VecDeque<(Time, OpId)>>,
    busy_until: BTreeMap<u32, Time>,
    carried: BTreeMap<u32, u64>,
}

impl Wires {
    fn take(&mut self, engine: &mut Engine, now: Time) {
        while let Some(post) = engine.next_post() {
            let Body::Move(part) = &post.op.body else { continue };
            let (id, bytes) = (post.lane.0, part.range.end - part.range.start);
            let busy = self.busy_until.entry(id).or_default();
            *busy = (*busy)
                .max(now)
                .saturating_add(self.speeds[&id].time_for(Bytes(bytes)).into());
            self.queues.entry(id).or_default().push_back((*busy, post.op.id));
            *self.carried.entry(id).or_default() += bytes;
        }
    }

    /// Turns until the transfer has ended, and tells when that was.
    fn carry(&mut self, engine: &mut Engine) -> Time {
        let mut now = Time::ZERO;
        loop {
            self.take(engine, now);
            if let Some(TransferEvent::Ended { outcome, .. }) = engine.next_event() {
                outcome.expect("the transfer succeeds");
                return now;
            }
            let due = self
                .queues
                .iter()
                .filter_map(|(lane, queue)| queue.front().map(|(at, op)| (*at, *lane, *op)));
            let (at, lane, op) = due.min().expect("something is under way");
            now = at;
            self.queues.entry(lane).or_default().pop_front();
            engine.on_completion(LaneId(lane), op, Ok(Done::default()), now);
        }
    }
}

fn carried(told: [f64; 2], truly: [f64; 2]) -> (f64, Time) {
    let mut engine = Engine::new(Limits::default());
    let mut wires = Wires::default();
    for id in 0..2 {
        engine.add_lane(lane(id, "tcp", told[id as usize]));
        wires
            .speeds
            .insert(id, Bandwidth::from_gigabytes_per_sec(truly[id as usize]));
    }
    engine.submit(request(), Time::ZERO).expect("there is room");
    let end = wires.carry(&mut engine);
    (wires.carried[&0] as f64 / LEN as f64, end)
}

#[test]
fn shares_follow_the_bandwidth() {
    let ideal = Bandwidth::from_gigabytes_per_sec(4.0).time_for(Bytes(LEN));
    for (told, truly, share) in [
        ([2.0, 2.0], [2.0, 2.0], 0.5),
        ([3.0, 1.0], [3.0, 1.0], 0.75),
        ([1.0, 3.0], [1.0, 3.0], 0.25),
        ([3.6, 0.4], [3.6, 0.4], 0.9),
        // What the engine was told is wrong; completions set it right.
        ([2.0, 2.0], [3.0, 1.0], 0.75),
    ] {
        let (found, end) = carried(told, truly);
        assert!((found - share).abs() < 0.12, "{told:?} {truly:?}: a share of {found}");
        let ratio = end.as_secs_f64() / ideal.as_secs_f64();
        assert!(ratio < 1.35, "{told:?} {truly:?}: {ratio} times the ideal time");
    }
}

#[test]
fn the_next_class_waits_until_the_best_is_gone() {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(lane(0, "tcp", 2.0));
    engine.add_lane(lane(1, "shared_memory", 10.0));
    engine.submit(request(), Time::ZERO).expect("there is room");
    let mut posts = Vec::new();
    while let Some(post) = engine.next_post() {
        assert_eq!(post.lane, LaneId(1));
        posts.push(post);
    }
    assert!(!posts.is_empty());
    engine.on_lane_lost(LaneId(1), Loss::ClosedByPeer, true, Time::ZERO);
    let post = engine.next_post().expect("the other class takes over");
    assert_eq!(post.lane, LaneId(0));
}

#[test]
fn a_preference_comes_before_the_cost() {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(Lane {
        preference: 1,
        ..lane(0, "tcp", 3.0)
    });
    engine.add_lane(lane(1, "verbs", 1.0));
    engine.submit(request(), Time::ZERO).expect("there is room");
    assert_eq!(engine.next_post().map(|post| post.lane), Some(LaneId(1)));
}

#[test]
fn many_small_transfers_are_spread_whole() {
    let mut engine = Engine::new(Limits::default());
    (0..2).for_each(|id| engine.add_lane(lane(id, "verbs", 2.0)));
    let mut posts = Vec::new();
    for _ in 0..8 {
        engine.submit(request_of(512 << 10, None), Time::ZERO).expect("room");
        posts.extend(std::iter::from_fn(|| engine.next_post()));
    }
    // Only the first found the lanes idle, and was shared between them.
    let bytes = |post: &weft_protocol::transfer::Post| match &post.op.body {
        Body::Move(part) => part.range.end - part.range.start,
        _ => 0,
    };
    assert_eq!(posts.iter().filter(|post| bytes(post) == 512 << 10).count(), 7);
    let on_first = posts
        .iter()
        .filter(|post| post.lane == LaneId(0))
        .map(bytes)
        .sum::<u64>();
    assert!(
        (3 << 19..=5 << 19).contains(&on_first),
        "{on_first} bytes on the first lane"
    );
}

/// Two lanes of equal speed, near the NUMA nodes 0 and 1.
fn two_sockets() -> Engine {
    let mut engine = Engine::new(Limits::default());
    for id in 0..2 {
        let numa = Some(id as u16);
        engine.add_lane(Lane {
            numa,
            ..lane(id, "verbs", 2.0)
        });
    }
    engine
}

#[test]
fn small_transfers_stay_on_near_lanes() {
    for node in 0..2 {
        let mut engine = two_sockets();
        for _ in 0..100 {
            engine
                .submit(request_of(4096, Some(node)), Time::ZERO)
                .expect("there is room");
            let post = engine.next_post().expect("an idle lane");
            assert_eq!(post.lane, LaneId(node.into()));
            engine.on_completion(post.lane, post.op.id, Ok(Done::default()), Time::ZERO);
        }
    }
}

#[test]
fn a_near_lane_that_is_busy_or_gone_is_no_reason_to_wait() {
    let mut engine = two_sockets();
    engine.submit(request_of(1 << 20, Some(1)), Time::ZERO).expect("room");
    let mut lanes: Vec<u32> = std::iter::from_fn(|| engine.next_post())
        .map(|post| post.lane.0)
        .collect();
    lanes.sort_unstable();
    lanes.dedup();
    assert_eq!(lanes, [0, 1], "a large one uses both");

    let mut engine = two_sockets();
    engine.on_lane_lost(LaneId(1), Loss::ClosedByPeer, true, Time::ZERO);
    engine.submit(request_of(4096, Some(1)), Time::ZERO).expect("room");
    assert_eq!(engine.next_post().map(|post| post.lane), Some(LaneId(0)));
}

#[test]
fn large_transfers_give_far_lanes_a_smaller_share() {
    let mut engine = two_sockets();
    let mut wires = Wires::default();
    for (id, speed) in [(0, 1.5), (1, 2.0)] {
        wires.speeds.insert(id, Bandwidth::from_gigabytes_per_sec(speed));
    }
    engine.submit(request_of(LEN, Some(1)), Time::ZERO).expect("room");
    let end = wires.carry(&mut engine);
    let far = wires.carried[&0] as f64 / LEN as f64;
    assert!((0.35..0.5).contains(&far), "a far share of {far}");
    let ideal = Bandwidth::from_gigabytes_per_sec(3.5).time_for(Bytes(LEN));
    assert!(end.as_secs_f64() < 1.2 * ideal.as_secs_f64());
}
