//! What an engine holds, and how long a lane rests.

use std::sync::Arc;

use weft_plan::{Bandwidth, LinkCost, Picos, Place, PlaceKind, Spans, Time};

use super::*;
use crate::leg::Leg;
use crate::memory::VecMemory;
use crate::region::{Access, Epoch, Region, RegionKey, RemoteRegion};
use crate::transfer::held::ASK_EVERY_MAX;
use crate::transport::{Carriage, Flag, Ready};

const COST: LinkCost = LinkCost {
    latency: Picos::from_us(1),
    per_span: Picos::ZERO,
    bandwidth: Bandwidth::from_bytes_per_sec(1_000_000_000),
};

fn lane(id: u32, peer: u32) -> Lane {
    Lane {
        id: LaneId(id),
        peer: PeerId(peer),
        transport: "tcp",
        carries: vec![Carriage::host(COST, 1 << 20)],
        preference: 0,
        awaits_ready: false,
        numa: None,
        max_op_runs: 16,
        max_inflight_ops: 4,
        max_inflight_bytes: 4 << 20,
    }
}

fn write(peer: u32, tag: Option<u64>) -> Request {
    write_between(peer, Place::DRAM, Place::DRAM, 0..64).tag(tag)
}

/// A write of these bytes, at the same offsets of both sides, between memory of such places.
fn write_between(peer: u32, near: Place, far: Place, bytes: std::ops::Range<u64>) -> Request {
    let key = RegionKey {
        epoch: Epoch(1),
        slot: 0,
        secret: 0,
    };
    let local = Region {
        key,
        memory: Arc::new(VecMemory::zeroed(64 << 10)),
        place: near,
        access: Access::NONE,
    };
    let remote = RemoteRegion {
        key,
        len: 64 << 10,
        place: far,
        access: Access::READ_WRITE,
        grants: Arc::from([]),
    };
    let all = Spans::contiguous(bytes.start, bytes.end - bytes.start);
    let leg = Leg::new(local, all.clone(), remote, all).expect("a leg");
    let legs = Arc::from([Arc::new(leg)]);
    Request::new(PeerId(peer), Direction::Write, legs, Time::from_secs(1))
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
        carries: vec![Carriage::host(COST, 32)],
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

const GPU: Place = Place::Gpu { ordinal: 0 };

/// A lane of a transport that carries between host memory and files only, in multiples of 4096 bytes.
fn file_lane(id: u32) -> Lane {
    let carriage = Carriage::new(PlaceKind::Dram, PlaceKind::File, COST, 10_000).align(4096);
    Lane {
        transport: "file",
        carries: vec![carriage],
        ..lane(id, 0)
    }
}

#[test]
fn a_lane_is_chosen_by_the_kinds_of_the_two_ends() {
    let mut engine = Engine::new(Limits::default());
    // The dearest of all carries GPU memory, and host memory as well.
    let dear = LinkCost {
        latency: Picos::from_us(1000),
        ..COST
    };
    let both = [
        Carriage::new(PlaceKind::Gpu, PlaceKind::Gpu, dear, 1 << 20),
        Carriage::host(dear, 1 << 20),
    ];
    engine.add_lane(Lane {
        transport: "verbs",
        carries: both.to_vec(),
        ..lane(0, 0)
    });
    engine.add_lane(lane(1, 0));
    engine.add_lane(file_lane(2));
    for (near, far, wanted) in [
        (Place::DRAM, Place::DRAM, 1),
        (GPU, GPU, 0),
        (Place::DRAM, Place::File, 2),
        (Place::Dram { numa: Some(3) }, Place::DRAM, 1),
    ] {
        let request = write_between(0, near, far, 0..4096);
        engine.submit(request, Time::ZERO).expect("room");
        let post = engine.next_post().expect("a lane carries it");
        assert_eq!(post.lane, LaneId(wanted), "from {near} to {far}");
        engine.on_completion(post.lane, post.op.id, Ok(Done::default()), Time::ZERO);
        assert!(matches!(
            engine.next_event(),
            Some(TransferEvent::Ended { outcome: Ok(_), .. })
        ));
    }
}

#[test]
fn what_no_lane_carries_waits_and_holds_up_nobody() {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(lane(0, 0));
    engine.add_lane(file_lane(1));
    let nowhere = write_between(0, GPU, Place::DRAM, 0..4096);
    let stuck = engine.submit(nowhere, Time::ZERO).expect("room");
    let unaligned = write_between(0, Place::DRAM, Place::File, 1..4097);
    engine.submit(unaligned, Time::ZERO).expect("room");
    assert!(engine.next_post().is_none(), "nothing carries either of them");
    engine.submit(write(0, None), Time::ZERO).expect("room");
    assert_eq!(engine.next_post().expect("host memory goes").lane, LaneId(0));
    // Which is not to say that it never will.
    engine.add_lane(Lane {
        transport: "verbs",
        carries: vec![Carriage::new(PlaceKind::Gpu, PlaceKind::Dram, COST, 1 << 20)],
        ..lane(2, 0)
    });
    assert_eq!(engine.next_post().expect("a lane has come").lane, LaneId(2));
    engine.on_timeout(Time::from_secs(1));
    let ended = std::iter::from_fn(|| engine.next_event());
    let expired = ended.filter(|event| matches!(event, TransferEvent::Ended { id, .. } if *id != stuck));
    assert_eq!(expired.count(), 1, "the unaligned one expires; the others are open");
}

#[test]
fn what_no_lane_carries_holds_up_nobody_where_all_lanes_are_alike() {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(lane(0, 0));
    let nowhere = write_between(0, GPU, Place::DRAM, 0..4096);
    engine.submit(nowhere, Time::ZERO).expect("room");
    let plain = engine.submit(write(0, None), Time::ZERO).expect("room");
    let post = engine.next_post().expect("host memory goes");
    engine.on_completion(post.lane, post.op.id, Ok(Done::default()), Time::ZERO);
    let ended = engine.next_event();
    assert!(matches!(ended, Some(TransferEvent::Ended { id, outcome: Ok(_) }) if id == plain));
    assert!(engine.next_post().is_none(), "the other still waits");
}

#[test]
fn parts_of_an_aligned_lane_end_at_its_multiples() {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(file_lane(0));
    let request = write_between(0, Place::DRAM, Place::File, 4096..(4096 + 5 * 4096));
    engine.submit(request, Time::ZERO).expect("room");
    let posts = std::iter::from_fn(|| engine.next_post());
    let ranges: Vec<_> = posts
        .map(|post| match post.op.body {
            Body::Move(part) => part.range,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(ranges, [0..8192, 8192..16384, 16384..20480]);
}

#[test]
fn what_comes_after_something_is_held_back_and_holds_up_nobody() {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(lane(0, 0));
    let flag = Arc::new(Flag::default());
    let id = engine.submit(write(0, None).after(Some(flag.clone())), Time::ZERO);
    assert!(engine.next_post().is_none(), "its time has not come");
    let other = engine.submit(write(0, None), Time::ZERO).expect("room");
    let post = engine.next_post().expect("others need not wait");
    engine.on_completion(post.lane, post.op.id, Ok(Done::default()), Time::ZERO);
    assert!(matches!(engine.next_event(), Some(TransferEvent::Ended { id, .. }) if id == other));
    let mut now = Time::ZERO;
    let mut waits = Vec::new();
    for _ in 0..12 {
        let next = engine.next_timeout().expect("somebody must ask again");
        waits.push(next.saturating_sub(now));
        now = next;
        engine.on_timeout(now);
        assert!(engine.next_post().is_none());
    }
    assert!(waits.is_sorted() && waits.last() <= Some(&ASK_EVERY_MAX), "{waits:?}");
    flag.raise();
    now = engine.next_timeout().expect("somebody must ask again");
    engine.on_timeout(now);
    let post = engine.next_post().expect("its time has come");
    assert!(post.op.after.is_none(), "there is nothing left to wait for");
    engine.on_completion(post.lane, post.op.id, Ok(Done::default()), now);
    let ended = engine.next_event();
    assert!(matches!(ended, Some(TransferEvent::Ended { id: ended, outcome: Ok(_) }) if Ok(ended) == id));
    // One whose time never comes ends by its deadline.
    let never = Some(Arc::new(Flag::default()) as Arc<dyn Ready>);
    engine.submit(write(0, None).after(never), now).expect("room");
    assert!(engine.next_post().is_none());
    engine.on_timeout(Time::from_secs(1));
    assert!(matches!(
        engine.next_event(),
        Some(TransferEvent::Ended { outcome: Err(error), .. }) if error.cause == Failure::Expired
    ));
    engine.on_timeout(Time::from_secs(2));
    assert_eq!(engine.next_timeout(), None, "nothing is left to ask for");
}

#[test]
fn a_lane_that_understands_it_waits_itself() {
    let mut engine = Engine::new(Limits::default());
    engine.add_lane(Lane {
        awaits_ready: true,
        ..lane(0, 0)
    });
    let flag = Arc::new(Flag::default());
    let after = write(0, None).after(Some(flag.clone()));
    engine.submit(after, Time::ZERO).expect("room");
    let post = engine.next_post().expect("the transport waits, not the engine");
    let after = post.op.after.expect("it is told what for");
    assert!(after.as_any().is::<Flag>() && !after.is_ready());
}

#[test]
fn a_commit_follows_the_last_part_and_is_asked_for_again_when_it_was_lost() {
    let mut engine = Engine::new(Limits::default());
    let small = Lane {
        carries: vec![Carriage::host(COST, 32)],
        ..lane(0, 0)
    };
    engine.add_lane(small);
    engine.submit(write(0, Some(5)).commit(true), Time::ZERO).expect("room");
    let parts: Vec<Post> = std::iter::from_fn(|| engine.next_post()).collect();
    assert_eq!(parts.len(), 2, "the commit waits for the parts");
    for post in parts {
        assert!(engine.next_event().is_none());
        engine.on_completion(post.lane, post.op.id, Ok(Done::default()), Time::ZERO);
    }
    let asked = |engine: &mut Engine, outcome| {
        let post = engine.next_post().expect("a commit");
        assert!(engine.next_post().is_none(), "one at a time");
        let Body::Commit(commit) = &post.op.body else {
            panic!("{:?} is no commit", post.op.body);
        };
        assert_eq!((commit.tag, commit.parts), (5, 2));
        engine.on_completion(post.lane, post.op.id, outcome, Time::ZERO);
    };
    asked(&mut engine, Err(LOST));
    engine.on_timeout(SHAKEN);
    asked(&mut engine, Ok(Done::default()));
    let ended = std::iter::from_fn(|| engine.next_event()).collect::<Vec<_>>();
    assert!(
        matches!(ended[..], [TransferEvent::Ended { outcome: Ok(summary), .. }] if summary.bytes == 64),
        "{ended:?}"
    );
    engine.submit(write(0, Some(6)).commit(true), SHAKEN).expect("room");
    for post in std::iter::from_fn(|| engine.next_post()).collect::<Vec<_>>() {
        engine.on_completion(post.lane, post.op.id, Ok(Done::default()), SHAKEN);
    }
    let post = engine.next_post().expect("a commit");
    let refused = Failure::Refused(Refusal::NotWritable);
    engine.on_completion(post.lane, post.op.id, Err(refused), SHAKEN);
    assert!(matches!(
        engine.next_event(),
        Some(TransferEvent::Ended { outcome: Err(error), .. }) if error.cause == refused
    ));
}

#[test]
fn a_write_that_is_told_is_never_carried_twice() {
    for outcome in [LOST, Failure::ChecksumMismatch] {
        let mut engine = Engine::new(Limits::default());
        engine.add_lane(lane(0, 0));
        engine.add_lane(lane(1, 0));
        let told = write(0, Some(5)).arrives(Some(9));
        engine.submit(told, Time::ZERO).expect("room");
        let post = engine.next_post().expect("its only part");
        let Body::Move(part) = &post.op.body else {
            panic!("a move")
        };
        let arrival = part.arrival.expect("it is announced");
        assert_eq!((arrival.tag, arrival.index), (5, Arrival::LAST));
        engine.on_completion(post.lane, post.op.id, Err(outcome), Time::ZERO);
        assert!(engine.next_post().is_none(), "carried again after {outcome:?}");
        let ended = std::iter::from_fn(|| engine.next_event()).last();
        assert!(
            matches!(&ended, Some(TransferEvent::Ended { outcome: Err(error), .. }) if error.cause == outcome),
            "{ended:?}"
        );
    }
}
