//! Paths that come and go.

use super::*;

#[test]
fn a_lost_path_costs_nothing_that_was_said() {
    let mut world = World::open(1);
    world.add_path(INITIATOR, Via(1), Weather::FINE);
    world.run_for(Time::from_ms(10));
    for end in 0..2 {
        assert!(world.events[end].contains(&SessionEvent::PathJoined { via: Via(1) }));
    }
    for i in 0..100u8 {
        world.ends[usize::from(i % 2)].notify(&[i], None, world.now).unwrap();
    }
    // Taken by the paths, but not arrived.
    world.step(world.now);
    world.lose_path(Via(0));
    world.run_for(Time::from_ms(10));
    for end in 0..2u8 {
        let expected: Vec<Vec<u8>> = (0..100).filter(|i| i % 2 != end).map(|i| vec![i]).collect();
        assert_eq!(world.notified(end.into()), expected);
        assert!(!world.events[usize::from(end)].contains(&SessionEvent::PathWanted));
    }
}

#[test]
fn a_path_that_swallows_everything_is_avoided() {
    let mut world = World::open(1);
    world.add_path(
        INITIATOR,
        Via(1),
        Weather {
            delay: Time::from_us(100),
            ..Weather::FINE
        },
    );
    world.run_for(Time::from_ms(10));
    world.weather.remove(&Via(0));
    world.ends[INITIATOR].notify(b"x", None, world.now).unwrap();
    world.ends[ACCEPTOR].notify(b"y", None, world.now).unwrap();
    world.run_for(Time::from_ms(500));
    assert_eq!(
        (world.notified(ACCEPTOR), world.notified(INITIATOR)),
        (vec![&b"x"[..]], vec![&b"y"[..]])
    );
    world.run_for(Time::from_secs(60));
    assert_eq!((world.loss(INITIATOR), world.loss(ACCEPTOR)), (None, None));
}

#[test]
fn the_quicker_path_is_used() {
    let mut world = World::between(
        config("prefill", 1),
        config("decode", 2),
        1,
        Weather {
            delay: Time::from_us(300),
            ..Weather::FINE
        },
    );
    world.run_for(Time::from_ms(10));
    world.add_path(INITIATOR, Via(1), Weather::FINE);
    world.run_for(Time::from_ms(10));
    world.sent.iter_mut().for_each(Vec::clear);
    for _ in 0..10 {
        for end in 0..2 {
            world.ends[end].notify(b"x", None, world.now).unwrap();
            world.run_for(Time::from_us(20));
        }
    }
    for end in 0..2 {
        assert!(world.sent[end].iter().all(|(via, _)| *via == Via(1)));
        assert_eq!(world.notified(end).len(), 10);
    }
}

#[test]
fn without_a_path_the_session_waits_and_then_goes_on() {
    let mut world = World::open(1);
    world.lose_path(Via(0));
    world.ends[INITIATOR].notify(b"x", None, world.now).unwrap();
    world.run_for(Time::from_secs(4));
    for end in 0..2 {
        assert!(world.events[end].contains(&SessionEvent::PathWanted));
    }
    // The acceptor may open paths, too.
    world.add_path(ACCEPTOR, Via(7), Weather::FINE);
    world.run_for(Time::from_ms(10));
    assert_eq!(world.notified(ACCEPTOR), [b"x"]);
    world.lose_path(Via(7));
    world.run_for(Time::from_secs(6));
    for end in 0..2 {
        assert_eq!(world.loss(end), Some(&SessionLoss::NoPath));
        assert_eq!(world.ends[end].next_timeout(), None);
    }
}

#[test]
fn paths_that_lead_nowhere_do_not_keep_a_dead_peer_alive() {
    let mut world = World::open(1);
    world.lose_path(Via(0));
    for n in 1..20 {
        world.ends[INITIATOR].add_path(Via(n), world.now);
        world.run_for(Time::from_ms(500));
        world.ends[INITIATOR].on_path_lost(Via(n), world.now);
    }
    assert_eq!(world.loss(INITIATOR), Some(&SessionLoss::NoPath));
}

#[test]
fn the_first_path_is_needed_until_both_are_known() {
    let mut end = Session::accept(config("decode", 2), [2; 32], Via(0), Time::ZERO);
    end.on_path_lost(Via(0), Time::ZERO);
    let cause = SessionLoss::PathLost;
    assert_eq!(end.next_event(), Some(SessionEvent::Lost { cause }));
}

#[test]
fn a_fence_is_asked_and_confirmed_over_another_path() {
    let mut world = World::open(1);
    world.add_path(INITIATOR, Via(1), Weather::FINE);
    world.run_for(Time::from_ms(10));
    // This end alone has given up; the other still believes in the path.
    world.ends[INITIATOR].on_path_lost(Via(0), world.now);
    world.ends[INITIATOR].ask_fence(Via(0), world.now).unwrap();
    world.run_for(Time::from_ms(10));
    let (label, via) = (0, Some(Via(0)));
    assert!(world.events[ACCEPTOR].contains(&SessionEvent::FenceAsked { label, via }));
    assert!(!world.events[INITIATOR].contains(&SessionEvent::Fenced { via: Via(0) }));
    world.ends[ACCEPTOR].fence_done(label, world.now);
    world.run_for(Time::from_ms(10));
    assert!(world.events[INITIATOR].contains(&SessionEvent::Fenced { via: Via(0) }));
    assert_eq!(
        world.ends[INITIATOR].ask_fence(Via(99), world.now),
        Err(SessionError::UnknownPath)
    );
}

#[test]
fn a_path_that_was_fenced_before_it_joined_never_joins() {
    let mut world = World::open(1);
    // The announcement is on its way for a long time.
    world.add_path(
        INITIATOR,
        Via(1),
        Weather {
            delay: Time::from_ms(50),
            ..Weather::FINE
        },
    );
    world.run_for(Time::from_ms(1));
    world.ends[INITIATOR].ask_fence(Via(1), world.now).unwrap();
    world.run_for(Time::from_ms(20));
    assert!(world.events[INITIATOR].contains(&SessionEvent::Fenced { via: Via(1) }));
    world.run_for(Time::from_ms(200));
    assert!(!world.events[ACCEPTOR].contains(&SessionEvent::PathJoined { via: Via(1) }));
}
