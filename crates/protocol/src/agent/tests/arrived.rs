//! Arrivals as events of the application, commits, and one registration for many peers.

use weft_plan::PlaceKind;

use super::super::announce::ANNOUNCEMENTS_MAX;
use super::super::arrived::TOLD_PARTS_MAX;
use super::super::paths::Stage;
use super::*;
use crate::agent::PeerError;
use crate::loopback::PlacedMemory;
use crate::memory::{HostBytes, Memory};
use crate::session::{TOLD_BIT, Via};
use crate::transfer::{Legs, SubmitError};
use crate::transport::{Arrival, Carriage, PathId};

fn arrivals(events: &[Event]) -> Vec<(PeerId, u32)> {
    let number = |event: &Event| match event {
        Event::Arrived { peer, number, .. } => Some((*peer, *number)),
        _ => None,
    };
    events.iter().filter_map(number).collect()
}

fn write(pair: &Pair, peer: PeerId, near: &Region, bytes: u64, number: u32) -> Request {
    let remote = pair.near.region(peer, "kv").expect("published").clone();
    let spans = Spans::contiguous(0, bytes);
    let leg = Leg::new(near.clone(), spans.clone(), remote, spans).expect("a leg");
    let deadline = pair.now.saturating_add(Time::from_secs(1));
    Request::new(peer, Direction::Write, Arc::from([Arc::new(leg)]), deadline).arrives(Some(number))
}

#[test]
fn the_far_application_is_told_of_a_write_once_all_of_it_is_there() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    let far = pair.publish(vec![0; 5 << 20], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let near = Arc::new(VecMemory::new(vec![3; 5 << 20]));
    let near = pair.near.register(near, Place::DRAM).expect("memory");
    for (number, bytes) in [(7, 5 << 20), (8, 1), (7, 100)] {
        let before = arrivals(&pair.heard_far).len();
        far.memory.bytes().write(0, &vec![0; 5 << 20]);
        let request = write(&pair, peer, &near, bytes, number);
        let id = pair.near.submit(request, None, pair.now).expect("submitted");
        pair.until("the arrival", |p| arrivals(&p.heard_far).len() > before);
        let mut found = vec![0; bytes as usize];
        far.memory.bytes().read(0, &mut found);
        assert!(found.iter().all(|byte| *byte == 3), "told before it was there");
        assert_eq!(arrivals(&pair.heard_far)[before].1, number);
        assert_eq!(pair.outcome(id), Ok(bytes));
    }
    for _ in 0..20 {
        pair.turn();
    }
    assert_eq!(arrivals(&pair.heard_far).len(), 3, "each is told once");
    let twice = write(&pair, peer, &near, 1, 1);
    let refused = pair.near.submit(twice, Some(b"and so"), pair.now);
    assert_eq!(refused, Err(PeerError::ToldTwice));
}

#[test]
fn what_came_of_a_write_that_failed_is_not_taken_for_a_later_one() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    pair.publish(vec![0; 5 << 20], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let near = Arc::new(VecMemory::new(vec![3; 5 << 20]));
    let near = pair.near.register(near, Place::DRAM).expect("memory");
    let request = write(&pair, peer, &near, 5 << 20, 7);
    let id = pair.near.submit(request, None, pair.now).expect("submitted");
    for _ in 0..8 {
        pair.turn();
    }
    pair.near.cancel(id, pair.now);
    assert_eq!(pair.outcome(id), Err(Failure::Cancelled));
    assert!(arrivals(&pair.heard_far).is_empty());
    let request = write(&pair, peer, &near, 5 << 20, 7);
    let id = pair.near.submit(request, None, pair.now).expect("submitted");
    for _ in 0..8 {
        pair.turn();
    }
    assert!(arrivals(&pair.heard_far).is_empty(), "half of one and half of another");
    assert_eq!(pair.outcome(id), Ok(5 << 20));
    pair.until("the arrival", |p| arrivals(&p.heard_far).len() == 1);
}

#[test]
fn a_flood_of_arrivals_costs_the_path_and_not_the_memory() {
    let mut pair = Pair::new();
    pair.connect();
    let via = pair.near.paths.iter().map(|(via, _)| via).next().expect("a path");
    for index in 0..100_000 {
        let arrival = Arrival { tag: 1 << 63, index };
        pair.near.on_arrival(via, arrival, pair.now);
    }
    pair.until("the path to be closed", |p| {
        p.heard.iter().any(|event| matches!(event, Event::PathDown { .. }))
    });
}

#[test]
fn what_is_left_of_writes_that_failed_costs_no_path() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    let via = pair.near.paths.iter().map(|(via, _)| via).next().expect("a path");
    let mut part = |number: u64, index: u32| {
        let tag = 1 << 63 | number << 32 | number;
        pair.near.on_arrival(via, Arrival { tag, index }, pair.now);
    };
    // The first is slow and alive all the time; all others stop before their last part.
    for number in 1..300 {
        part(0, number as u32);
        (0..1000).for_each(|index| part(number, index));
    }
    part(0, 0);
    part(0, 300 | Arrival::LAST);
    for _ in 0..20 {
        pair.turn();
    }
    assert_eq!(arrivals(&pair.heard), [(peer, 0)], "the one that is whole");
    let down = |event: &Event| matches!(event, Event::PathDown { .. });
    assert!(!pair.heard.iter().any(down), "no path is lost for it");
    let Some(state) = pair.near.peers.at(peer.0) else {
        panic!("the peer is still there")
    };
    assert!(state.arrived.parts() <= 2 * TOLD_PARTS_MAX, "and no memory");
}

#[test]
fn what_arrives_on_a_path_counts_when_the_session_vouches_for_it() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    let arrival = Arrival {
        tag: TOLD_BIT | 4,
        index: Arrival::LAST,
    };
    // Somebody has opened a path and said that it is the peer's.
    let theirs = pair.near.new_path(0, PathId(98), Some(peer), Stage::Open);
    pair.near.on_arrival(theirs, arrival, pair.now);
    // This end has opened one, and whoever is behind it has not proved anything yet.
    let own = pair.near.new_path(0, PathId(99), Some(peer), Stage::Open);
    let session = pair.near.peers.at_mut(peer.0).and_then(|state| state.session.as_mut());
    session.expect("a session").add_path(Via(own), pair.now);
    pair.near.on_arrival(own, arrival, pair.now);
    pair.turn();
    assert!(arrivals(&pair.heard).is_empty(), "by the word of a stranger");
    let known = pair.near.paths.iter().map(|(via, _)| via).next().expect("a path");
    pair.near.on_arrival(known, arrival, pair.now);
    pair.turn();
    assert_eq!(arrivals(&pair.heard), [(peer, 4)]);
}

#[test]
fn what_is_told_before_it_could_be_compared_has_no_checksum() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    pair.publish(vec![0; 64], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let near = Arc::new(VecMemory::new(vec![3; 64]));
    let near = pair.near.register(near, Place::DRAM).expect("memory");
    let summed = write(&pair, peer, &near, 64, 7).checksum(true);
    let refused = pair.near.submit(summed.clone(), None, pair.now);
    assert_eq!(refused, Err(PeerError::ToldUnverified));
    // A notification waits until every part has been found whole.
    let id = pair.near.submit(summed.arrives(None), Some(b"whole"), pair.now);
    assert_eq!(pair.outcome(id.expect("submitted")), Ok(64));
}

/// More host memory than there is, which nobody touches.
#[derive(Debug)]
struct Vast;

impl Memory for Vast {
    fn len(&self) -> u64 {
        1 << 40
    }
    fn host(&self) -> Option<&dyn HostBytes> {
        None
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[test]
fn no_more_is_told_than_the_peer_can_count() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    pair.publish(vec![0; 64], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let near = Arc::new(VecMemory::new(vec![3; 64]));
    let near = pair.near.register(near, Place::DRAM).expect("memory");
    let vast = Region {
        memory: Arc::new(Vast),
        ..near.clone()
    };
    let remote = crate::RemoteRegion {
        len: 1 << 40,
        ..pair.near.region(peer, "kv").expect("published").clone()
    };
    let all = Spans::contiguous(0, 1 << 40);
    let leg = Leg::new(vast, all.clone(), remote, all).expect("a leg");
    let far_too_long = Request {
        legs: Legs::One(Arc::new(leg)),
        ..write(&pair, peer, &near, 64, 1)
    };
    let refused = pair.near.submit(far_too_long, None, pair.now);
    assert_eq!(refused, Err(PeerError::TooManyParts { max: TOLD_PARTS_MAX }));
    for number in 0..ANNOUNCEMENTS_MAX as u32 {
        let request = write(&pair, peer, &near, 1, number);
        pair.near.submit(request, None, pair.now).expect("submitted");
    }
    let one_more = write(&pair, peer, &near, 1, 0);
    let refused = pair.near.submit(one_more, None, pair.now);
    assert_eq!(refused, Err(SubmitError::TooManyAnnounced.into()));
    pair.until("all of them", |p| arrivals(&p.heard_far).len() == ANNOUNCEMENTS_MAX);
    pair.until("their ends", |p| p.near.under_way().announcements == 0);
}

#[test]
fn many_peers_are_inside_a_region_that_transports_know_once() {
    let mut pair = Pair::new();
    let memory = Arc::new(VecMemory::zeroed(4096));
    let region = pair.far.register(memory, Place::DRAM).expect("memory");
    let first = pair.far.lend(&region.key, Access::WRITE).expect("lent");
    assert_eq!(pair.far.lend(&region.key, Access::WRITE), Ok(first), "the same rights");
    let other = pair.far.lend(&region.key, Access::READ).expect("lent");
    assert_ne!(other, first, "other rights");
    pair.far
        .publish("kv", &region.key, Access::WRITE, pair.now)
        .expect("free");
    assert_eq!(pair.far.lend(&region.key, Access::WRITE), Ok(first), "a name is apart");
    assert_eq!(pair.far.release(&region.key, pair.now), Ok(Progress::Idle));
    assert!(pair.far.registered(&first).is_none());
}

#[test]
fn a_commit_is_of_all_regions_that_were_written_each_by_its_own_parts() {
    let carriage = Carriage::host(
        Loopback::new().endpoint("any", Epoch(0)).capabilities().carries[0].cost,
        1 << 20,
    );
    let to_objects = Carriage {
        far: PlaceKind::Object,
        ..carriage
    };
    let network = Loopback::new();
    let agent = |name: &str, epoch| {
        let transport = network.endpoint_carrying(name, Epoch(epoch), vec![carriage, to_objects]);
        let slot = Slot {
            reach: Reach::Anywhere,
            preference: 0,
            paths: 2,
            transport: Box::new(transport),
        };
        agent_over(vec![slot], name, epoch, b"secret")
    };
    let mut pair = Pair::of(agent("near", 1), agent("far", 2));
    let peer = pair.connect();
    let near = Arc::new(VecMemory::new(vec![9; 3 << 20]));
    let near = pair.near.register(near, Place::DRAM).expect("memory");
    // Objects of two parts and of three, by legs that take turns; told and not.
    for told in [None, Some(5)] {
        let objects = [2 << 20, 3 << 20].map(|len| Arc::new(PlacedMemory::zeroed(Place::Object, len)));
        let mut legs = Vec::new();
        for (name, object) in ["short", "long"].into_iter().zip(&objects) {
            let region = pair.far.register(object.clone(), Place::Object).expect("memory");
            let name = format!("{name} {told:?}");
            pair.far
                .publish(&name, &region.key, Access::WRITE, pair.now)
                .expect("free");
            pair.until("the name", |p| p.near.region(peer, &name).is_some());
            let remote = pair.near.region(peer, &name).expect("published").clone();
            let halves = [0..1 << 20, 1 << 20..remote.len];
            legs.extend(halves.map(|half| {
                let spans = Spans::contiguous(half.start, half.end - half.start);
                Arc::new(Leg::new(near.clone(), spans.clone(), remote.clone(), spans).expect("a leg"))
            }));
        }
        legs.swap(1, 2);
        let deadline = pair.now.saturating_add(Time::from_secs(1));
        let request = Request::new(peer, Direction::Write, Arc::from(legs), deadline).commit(true);
        let id = pair.near.submit(request.arrives(told), None, pair.now);
        assert_eq!(pair.outcome(id.expect("submitted")), Ok(5 << 20), "{told:?}");
        for object in &objects {
            assert!(object.lasting().iter().all(|byte| *byte == 9), "{told:?}");
        }
    }
    pair.until("the one that was told", |p| arrivals(&p.heard_far).len() == 1);
}

#[test]
fn what_is_spilled_with_a_commit_lasts_when_the_transfer_has_ended() {
    let network = Loopback::new();
    let cost = network.endpoint("costs as much", Epoch(0)).capabilities().carries[0].cost;
    for place in [Place::File, Place::Object] {
        let carriage = Carriage::new(PlaceKind::Dram, place.kind(), cost, 1 << 20);
        let slot = Slot {
            reach: Reach::Here,
            preference: 0,
            paths: 2,
            transport: Box::new(Loopback::new().endpoint_carrying("own", Epoch(1), vec![carriage])),
        };
        let near = agent_over(vec![slot], "near", 1, b"secret");
        let mut pair = Pair::of(near, agent(&network, "far", "far", 2, b"secret"));
        let from = pair
            .near
            .register(Arc::new(VecMemory::new(vec![9; 5 << 20])), Place::DRAM);
        let from = from.expect("memory");
        let stored = Arc::new(PlacedMemory::zeroed(place, 5 << 20));
        let region = pair.near.register(stored.clone(), place).expect("memory");
        let own = pair.near.own_region(&region.key).expect("registered");
        for commit in [false, true] {
            let spans = Spans::contiguous(0, 5 << 20);
            let leg = Leg::new(from.clone(), spans.clone(), own.clone(), spans).expect("a leg");
            let deadline = pair.now.saturating_add(Time::from_secs(1));
            let legs = Arc::from([Arc::new(leg)]);
            let request = Request::new(PeerId::HERE, Direction::Write, legs, deadline).commit(commit);
            let id = pair.near.submit(request, None, pair.now).expect("submitted");
            assert_eq!(pair.outcome(id), Ok(5 << 20));
            let lasts = stored.lasting().iter().all(|byte| *byte == 9);
            assert_eq!(lasts, commit, "{place}");
        }
    }
}

#[test]
fn what_is_under_way_counts_for_what_is_told_later() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    pair.publish(vec![0; 64], Access::READ_WRITE);
    pair.until("the name", |p| p.near.region(peer, "kv").is_some());
    let near = pair.near.register(Arc::new(VecMemory::new(vec![3; 64])), Place::DRAM);
    let near = near.expect("memory");
    let of = |pair: &Pair, len: u64| {
        let (memory, all) = (Arc::new(Vast), Spans::contiguous(0, len));
        let vast = Region { memory, ..near.clone() };
        let remote = pair.near.region(peer, "kv").expect("published").clone();
        let leg = Leg::new(vast, all.clone(), crate::RemoteRegion { len, ..remote }, all);
        Request {
            legs: Legs::One(Arc::new(leg.expect("a leg"))),
            ..write(pair, peer, &near, 64, 1)
        }
    };
    // The longest that is taken has more than half of the parts that are counted.
    let mut len = 1 << 40;
    let taken = loop {
        let request = of(&pair, len);
        match pair.near.submit(request, None, pair.now) {
            Ok(id) => break id,
            Err(refused) => assert_eq!(refused, PeerError::TooManyParts { max: TOLD_PARTS_MAX }),
        }
        len /= 2;
    };
    let again = of(&pair, len);
    let refused = pair.near.submit(again.clone(), None, pair.now);
    assert_eq!(refused, Err(SubmitError::TooManyAnnounced.into()));
    let now = pair.now;
    pair.near.cancel(taken, now);
    pair.until("its end", |p| p.near.may_tell(&again).is_ok());
}
