//! Parts that arrive over paths that are not yet, not at all, or no longer the peer's.

use super::*;

const PART: Arrival = Arrival { tag: 9, index: 0 };

/// The acceptor's label of a path that it was asked to close.
fn asked(world: &World) -> u64 {
    let label = world.events[ACCEPTOR].iter().find_map(|event| match event {
        SessionEvent::FenceAsked { label, .. } => Some(*label),
        _ => None,
    });
    label.expect("a fence is asked")
}

fn two_paths() -> World {
    let mut world = World::open(1);
    world.add_path(INITIATOR, Via(1), Weather::FINE);
    world.run_for(Time::from_ms(10));
    world
}

#[test]
fn a_part_that_is_earlier_than_the_proof_counts_once_the_proof_is_there() {
    let mut world = World::new(1, Weather::FINE);
    world.ends[INITIATOR].notify(b"x", Some((9, 1)), world.now).unwrap();
    world.ends[ACCEPTOR].on_arrival(Via(0), PART, world.now);
    world.run_for(Time::from_ms(10));
    assert_eq!(world.notified(ACCEPTOR), [b"x"]);
}

#[test]
fn a_part_over_a_path_that_nobody_vouches_for_does_not_count() {
    let mut world = World::open(1);
    world.ends[INITIATOR].notify(b"x", Some((9, 1)), world.now).unwrap();
    world.ends[ACCEPTOR].on_arrival(Via(7), PART, world.now);
    world.run_for(Time::from_ms(10));
    assert!(world.notified(ACCEPTOR).is_empty());
    world.ends[ACCEPTOR].on_arrival(Via(0), PART, world.now);
    world.run_for(Time::from_ms(10));
    assert_eq!(world.notified(ACCEPTOR), [b"x"]);
}

#[test]
fn a_path_counts_until_its_fence_is_confirmed_and_no_longer() {
    for late in [false, true] {
        let mut world = two_paths();
        world.ends[INITIATOR].notify(b"x", Some((9, 1)), world.now).unwrap();
        world.ends[INITIATOR].ask_fence(Via(1), world.now).unwrap();
        world.run_for(Time::from_ms(10));
        let label = asked(&world);
        if late {
            world.ends[ACCEPTOR].fence_done(label, world.now);
        }
        world.ends[ACCEPTOR].on_arrival(Via(1), PART, world.now);
        world.run_for(Time::from_ms(10));
        assert_eq!(world.notified(ACCEPTOR).is_empty(), late);
    }
}

#[test]
fn a_recall_that_is_too_late_is_told_before_the_fence() {
    for late in [false, true] {
        let mut world = two_paths();
        let id = world.ends[INITIATOR].notify(b"x", Some((9, 1)), world.now).unwrap();
        world.run_for(Time::from_ms(10));
        if late {
            world.ends[ACCEPTOR].on_arrival(Via(1), PART, world.now);
        }
        world.ends[INITIATOR].recall(9, world.now);
        world.ends[INITIATOR].ask_fence(Via(1), world.now).unwrap();
        world.run_for(Time::from_ms(10));
        // After the recall it does not help that the part is there.
        world.ends[ACCEPTOR].on_arrival(Via(1), PART, world.now);
        let label = asked(&world);
        world.ends[ACCEPTOR].fence_done(label, world.now);
        world.run_for(Time::from_ms(10));
        let told: Vec<&SessionEvent> = world.events[INITIATOR]
            .iter()
            .filter(|event| {
                matches!(
                    event,
                    SessionEvent::NotificationDelivered { .. } | SessionEvent::Fenced { .. }
                )
            })
            .collect();
        let (delivered, fenced) = (
            SessionEvent::NotificationDelivered { id },
            SessionEvent::Fenced { via: Via(1) },
        );
        let expected = if late { vec![&delivered, &fenced] } else { vec![&fenced] };
        assert_eq!(told, expected);
        assert_eq!(world.notified(ACCEPTOR).is_empty(), !late);
    }
}

#[test]
fn what_came_early_counts_though_its_path_is_lost_before_anything_was_heard_on_it() {
    let told = Arrival {
        tag: TOLD_BIT | 9,
        index: 0,
    };
    let mut world = World::open(1);
    world.add_path(INITIATOR, Via(1), Weather::FINE);
    while !world.events[ACCEPTOR].contains(&SessionEvent::PathJoined { via: Via(1) }) {
        assert!(world.step(Time::MAX));
        world.drain();
    }
    // The acceptor may write at once; its answer to the join is still on its way, and gets lost with the path.
    world.ends[ACCEPTOR].notify(b"x", Some((9, 1)), world.now).unwrap();
    world.ends[INITIATOR].on_arrival(Via(1), PART, world.now);
    world.ends[INITIATOR].on_arrival(Via(1), told, world.now);
    assert_eq!(world.ends[INITIATOR].next_told(), None, "by the word of a stranger");
    world.lose_path(Via(1));
    world.run_for(Time::from_ms(10));
    assert_eq!(world.notified(INITIATOR), [b"x"]);
    assert_eq!(world.ends[INITIATOR].next_told(), Some((Via(1), told)));
    assert_eq!(world.ends[INITIATOR].next_told(), None);
}
