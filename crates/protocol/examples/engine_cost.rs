//! What the transfer engine itself costs: submit, post, completion and event, with a lane that does nothing.
//!
//! `cargo run --release -p weft-protocol --example engine_cost`
#![expect(clippy::disallowed_methods, reason = "it measures, and nothing here is simulated")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use weft_plan::{Bandwidth, LinkCost, Picos, Place, Spans, Time};
use weft_protocol::transfer::{Engine, Lane, LaneId, Limits, PeerId, Request};
use weft_protocol::{Access, Carriage, Direction, Done, Epoch, Leg, Region, RegionKey, RemoteRegion, VecMemory};

const PART: u64 = 64 << 10;

fn main() {
    println!("parts  lanes  ns/transfer  ns/part");
    for (parts, lanes) in [(1, 1), (1, 4), (16, 1), (64, 4), (1024, 4)] {
        let ns = cost_ns(parts, lanes);
        println!("{parts:5}  {lanes:5}  {ns:11.0}  {:7.0}", ns / parts as f64);
    }
}

/// The cost of one transfer in `parts` parts, as the best of several rounds, since the machine has other things to do.
fn cost_ns(parts: u64, lanes: u32) -> f64 {
    let legs: Arc<[Arc<Leg>]> = Arc::from([Arc::new(leg(parts * PART))]);
    let mut engine = Engine::new(Limits::default());
    for id in 0..lanes {
        engine.add_lane(lane(LaneId(id)));
    }
    let rounds = 20;
    let transfers = 400_000 / parts / rounds;
    let mut best = f64::MAX;
    let mut now = Time::ZERO;
    for _ in 0..rounds {
        let start = Instant::now();
        for _ in 0..transfers {
            now = now.saturating_add(Time::from_us(1));
            let request = Request::new(
                PeerId(0),
                Direction::Read,
                Arc::clone(&legs),
                now.saturating_add(Time::from_secs(30)),
            );
            engine.submit(request, now).expect("there is room");
            loop {
                while let Some(post) = engine.next_post() {
                    engine.on_completion(post.lane, black_box(&post.op).id, Ok(Done::default()), now);
                }
                if let Some(event) = engine.next_event() {
                    black_box(event);
                    break;
                }
            }
        }
        best = best.min(start.elapsed().as_nanos() as f64 / transfers as f64);
    }
    best
}

fn lane(id: LaneId) -> Lane {
    Lane {
        id,
        peer: PeerId(0),
        transport: "nothing",
        carries: vec![Carriage::host(
            LinkCost {
                latency: Picos::from_us(1),
                per_span: Picos::ZERO,
                bandwidth: Bandwidth::from_bytes_per_sec(10_000_000_000),
            },
            PART,
        )],
        preference: 0,
        awaits_ready: false,
        numa: None,
        max_op_runs: 1024,
        max_inflight_ops: 64,
        max_inflight_bytes: 64 * PART,
    }
}

fn leg(len: u64) -> Leg {
    let key = RegionKey {
        epoch: Epoch(1),
        slot: 0,
        secret: 0,
    };
    let local = Region {
        key,
        memory: Arc::new(VecMemory::zeroed(len as usize)),
        place: Place::DRAM,
        access: Access::NONE,
    };
    let remote = RemoteRegion {
        key,
        len,
        place: Place::DRAM,
        access: Access::READ,
        grants: Arc::from([]),
    };
    Leg::new(local, Spans::contiguous(0, len), remote, Spans::contiguous(0, len)).expect("a leg within its regions")
}
