//! Lanes of one class share a transfer by their bandwidth, and the next class is used when the best one is gone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use weft_plan::{Bandwidth, Bytes, LinkCost, Place, Spans, Time};
use weft_protocol::transfer::{Engine, Lane, LaneId, Limits, PeerId, Request, TransferEvent};
use weft_protocol::{
    Access, Body, Direction, Done, Epoch, Leg, Loss, OpId, Region, RegionKey, RemoteRegion, VecMemory,
};

const LEN: u64 = 64 << 20;

fn lane(id: u32, transport: &'static str, gigabytes_per_sec: f64) -> Lane {
    Lane {
        id: LaneId(id),
        peer: PeerId(0),
        transport,
        cost: LinkCost {
            latency: Time::from_us(10),
            per_span: Time::ZERO,
            bandwidth: Bandwidth::from_gigabytes_per_sec(gigabytes_per_sec),
        },
        numa: None,
        max_op_bytes: 1 << 20,
        max_op_runs: 1024,
        max_inflight_ops: 16,
        max_inflight_bytes: 8 << 20,
    }
}

fn request() -> Request {
    let key = RegionKey {
        epoch: Epoch(1),
        slot: 0,
        secret: 0,
    };
    let local = Region {
        key,
        memory: Arc::new(VecMemory::zeroed(LEN as usize)),
        place: Place::DRAM,
        access: Access::NONE,
    };
    let remote = RemoteRegion {
        key,
        len: LEN,
        place: Place::DRAM,
        access: Access::READ,
        grants: Arc::from([]),
    };
    let leg = Leg::new(local, Spans::contiguous(0, LEN), remote, Spans::contiguous(0, LEN)).expect("a leg");
    Request {
        peer: PeerId(0),
        direction: Direction::Read,
        legs: Arc::from([Arc::new(leg)]),
        deadline: Time::MAX,
        checksum: false,
        tag: None,
    }
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
            *busy = (*busy).max(now).saturating_add(self.speeds[&id].time_for(Bytes(bytes)));
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
