//! What an engine holds, and how long a lane rests.

use std::sync::Arc;

use weft_plan::{Bandwidth, LinkCost, Picos, Place, Spans, Time};

use super::*;
use crate::leg::Leg;
use crate::memory::VecMemory;
use crate::region::{Access, Epoch, Region, RegionKey, RemoteRegion};

fn lane(id: u32, peer: u32) -> Lane {
    Lane {
        id: LaneId(id),
        peer: PeerId(peer),
        transport: "tcp",
        cost: LinkCost {
            latency: Picos::from_us(1),
            per_span: Picos::ZERO,
            bandwidth: Bandwidth::from_bytes_per_sec(1_000_000_000),
        },
        preference: 0,
        numa: None,
        max_op_bytes: 1 << 20,
        max_op_runs: 16,
        max_inflight_ops: 4,
        max_inflight_bytes: 4 << 20,
    }
}

fn write(peer: u32, tag: Option<u64>) -> Request {
    let key = RegionKey {
        epoch: Epoch(1),
        slot: 0,
        secret: 0,
    };
    let local = Region {
        key,
        memory: Arc::new(VecMemory::zeroed(64)),
        place: Place::DRAM,
        access: Access::NONE,
    };
    let remote = RemoteRegion {
        key,
        len: 64,
        place: Place::DRAM,
        access: Access::READ_WRITE,
        grants: Arc::from([]),
    };
    let all = Spans::contiguous(0, 64);
    Request {
        peer: PeerId(peer),
        direction: Direction::Write,
        legs: Arc::from([Arc::new(Leg::new(local, all.clone(), remote, all).expect("a leg"))]),
        deadline: Time::from_secs(1),
        checksum: false,
        tag,
    }
}

const LOST: Failure = Failure::PathLost {
    loss: Loss::ClosedByPeer,
    fenced: true,
};

#[test]
fn a_lane_that_stays_full_is_asked_ever_more_seldom() {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(lane(0, 0));
    engine.submit(write(0, None), Time::ZERO).expect("room");
    let mut now = Time::ZERO;
    let mut rests = Vec::new();
    for _ in 0..12 {
        let post = engine.next_post().expect("a part to post");
        engine.unaccepted(post);
        assert!(engine.next_post().is_none(), "a lane that rests is not asked");
        let wake = engine.next_timeout().expect("a rest ends");
        rests.push(wake.saturating_sub(now));
        now = wake;
        engine.on_timeout(now);
    }
    assert_eq!(rests[..3], [Time::from_us(50), Time::from_us(100), Time::from_us(200)]);
    assert_eq!(rests.last(), Some(&Time::from_ms(10)));
    // A message that has gone out makes room at once.
    let post = engine.next_post().expect("a part to post");
    engine.unaccepted(post);
    engine.on_room(LaneId(0));
    let post = engine.next_post().expect("there is room");
    engine.on_completion(LaneId(0), post.op.id, Ok(Done::default()), now);
    engine.submit(write(0, None), now).expect("room");
    let post = engine.next_post().expect("a part to post");
    engine.unaccepted(post);
    let LaneState { rest, .. } = &**engine.lanes.at(0).expect("live");
    assert_eq!(*rest, Rest::UntilRoom(now.saturating_add(Time::from_us(50))));
}

#[test]
fn what_is_gone_takes_no_room() {
    let mut engine = Engine::new(Limits::default());
    for number in 0..100 {
        engine.add_lane(lane(number, number));
        engine.submit(write(number, None), Time::ZERO).expect("room");
        let post = engine.next_post().expect("a part to post");
        engine.on_peer_gone(PeerId(number), Loss::Closed, Time::ZERO);
        engine.forget_peer(PeerId(number));
        assert_eq!(engine.peers.len(), 1, "something of it is open");
        engine.on_completion(post.lane, post.op.id, Err(Failure::Cancelled), Time::ZERO);
        engine.on_lane_lost(LaneId(number), Loss::Closed, true, Time::ZERO);
        while engine.next_post().is_some() {}
        assert_eq!((engine.lanes.len(), engine.peers.len()), (0, 0));
    }
}

/// An announced write of one part, whose lane is lost for certain, with another lane to go on.
fn lost_after_announcement() -> (Engine, TransferId) {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(lane(0, 0));
    let id = engine.submit(write(0, Some(7)), Time::ZERO).expect("room");
    let post = engine.next_post().expect("a part to post");
    assert!(matches!(engine.next_event(), Some(TransferEvent::Cut { parts: 1, .. })));
    engine.add_lane(lane(1, 0));
    engine.on_completion(LaneId(0), post.op.id, Err(LOST), Time::ZERO);
    engine.on_lane_lost(LaneId(0), Loss::ClosedByPeer, true, Time::ZERO);
    assert!(engine.next_post().is_none(), "the peer may have been notified");
    assert!(matches!(
        engine.next_event(),
        Some(TransferEvent::Recall { tag: 7, .. })
    ));
    assert!(matches!(
        engine.next_event(),
        Some(TransferEvent::FenceWanted { lane: LaneId(0), .. })
    ));
    (engine, id)
}

#[test]
fn a_write_that_was_notified_is_not_repeated() {
    let (mut engine, id) = lost_after_announcement();
    engine.on_all_arrived(id, Time::ZERO);
    engine.on_lane_fenced(LaneId(0), Time::ZERO);
    assert!(engine.next_post().is_none());
    assert!(matches!(
        engine.next_event(),
        Some(TransferEvent::Ended { outcome: Ok(_), .. })
    ));
}

#[test]
fn a_write_that_was_recalled_in_time_is_repeated_uncounted() {
    let (mut engine, _) = lost_after_announcement();
    engine.on_lane_fenced(LaneId(0), Time::ZERO);
    let post = engine.next_post().expect("the part goes over the other lane");
    assert!(matches!(&post.op.body, Body::Move(part) if part.arrival.is_none()));
    engine.on_completion(LaneId(1), post.op.id, Ok(Done::default()), Time::ZERO);
    assert!(matches!(
        engine.next_event(),
        Some(TransferEvent::Ended { outcome: Ok(_), .. })
    ));
}

#[test]
fn a_write_that_waits_for_word_fails_at_once_when_the_peer_is_gone() {
    let (mut engine, _) = lost_after_announcement();
    engine.on_peer_gone(PeerId(0), Loss::Silent, Time::ZERO);
    assert!(matches!(
        engine.next_event(),
        Some(TransferEvent::Ended { outcome: Err(_), .. })
    ));
}

#[test]
fn a_lane_lost_long_ago_is_not_why_a_peer_is_gone() {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(lane(0, 0));
    engine.add_lane(lane(1, 0));
    engine.on_lane_lost(LaneId(0), Loss::System(100), true, Time::ZERO);
    engine.submit(write(0, None), Time::ZERO).expect("room");
    engine.on_peer_gone(PeerId(0), Loss::Silent, Time::ZERO);
    let Some(TransferEvent::Ended {
        outcome: Err(error), ..
    }) = engine.next_event()
    else {
        panic!("it fails at once");
    };
    let silent = Failure::PathLost {
        loss: Loss::Silent,
        fenced: true,
    };
    assert_eq!(error.cause, silent);
}

#[test]
fn a_write_that_no_rail_is_left_for_waits_for_its_fence_and_goes_another_way() {
    let mut engine = Engine::new(Limits::default());
    let rail = |id| Lane {
        transport: "verbs",
        ..lane(id, 0)
    };
    engine.add_lane(rail(0));
    engine.add_lane(rail(1));
    engine.add_lane(Lane {
        preference: 1,
        ..lane(2, 0)
    });
    engine.submit(write(0, None), Time::ZERO).expect("room");
    let post = engine.next_post().expect("a part to post");
    let (lost, other) = (post.lane, LaneId(1 - post.lane.0));
    let loss = Loss::System(5);
    let unfenced = Failure::PathLost { loss, fenced: false };
    engine.on_completion(lost, post.op.id, Err(unfenced), Time::ZERO);
    engine.on_lane_lost(lost, loss, false, Time::ZERO);
    engine.on_lane_lost(other, loss, true, Time::ZERO);
    assert!(engine.next_post().is_none(), "it may still land");
    assert!(matches!(engine.next_event(), Some(TransferEvent::FenceWanted { lane, .. }) if lane == lost));
    assert!(engine.next_event().is_none());
    engine.on_lane_fenced(lost, Time::ZERO);
    let again = engine.next_post().expect("the part goes another way");
    assert_eq!(again.lane, LaneId(2));
    engine.on_completion(again.lane, again.op.id, Ok(Done::default()), Time::ZERO);
    assert!(matches!(
        engine.next_event(),
        Some(TransferEvent::Ended { outcome: Ok(_), .. })
    ));
}

#[test]
fn a_part_repeated_before_the_announcement_delays_it_to_the_end() {
    let mut engine = Engine::new(Limits::default());
    let small = |id| Lane {
        max_op_bytes: 32,
        max_inflight_ops: 1,
        ..lane(id, 0)
    };
    engine.add_lane(small(0));
    engine.submit(write(0, Some(7)), Time::ZERO).expect("room");
    let first = engine.next_post().expect("the first of two parts");
    engine.on_completion(LaneId(0), first.op.id, Err(LOST), Time::ZERO);
    engine.on_lane_lost(LaneId(0), Loss::ClosedByPeer, true, Time::ZERO);
    engine.add_lane(small(1));
    engine.add_lane(small(2));
    let posts: Vec<Post> = std::iter::from_fn(|| engine.next_post()).collect();
    assert_eq!(posts.len(), 2);
    assert!(
        engine.next_event().is_none(),
        "the repeat could land after the notification"
    );
    for post in posts {
        engine.on_completion(post.lane, post.op.id, Ok(Done::default()), Time::ZERO);
    }
    assert!(matches!(engine.next_event(), Some(TransferEvent::Cut { parts: 2, .. })));
}
