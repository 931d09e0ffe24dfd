//! The end of a session, and leases, which may outlast it.

use super::*;

#[test]
fn what_was_said_before_a_close_still_arrives() {
    for seed in 0..20 {
        let weather = Weather {
            loss: 0.2,
            repeat: 0.2,
            delay: Time::from_us(50),
            jitter: Time::from_us(200),
        };
        let mut world = World::new(seed, weather);
        world.run_for(Time::from_ms(800));
        if world.ends.iter().any(|end| end.id().is_none()) {
            continue;
        }
        for i in 0..50u8 {
            world.ends[INITIATOR].notify(&[i], None, world.now).unwrap();
        }
        world.ends[INITIATOR].close_because(CloseReason::Replaced, world.now);
        assert_eq!(
            world.ends[INITIATOR].notify(b"late", None, world.now),
            Err(SessionError::Ended)
        );
        world.run_for(Time::from_ms(1100));
        assert_eq!(world.loss(INITIATOR), Some(&SessionLoss::Closed));
        if let Some(SessionLoss::ClosedByPeer { reason }) = world.loss(ACCEPTOR) {
            assert_eq!(*reason, CloseReason::Replaced);
            assert_eq!(world.notified(ACCEPTOR).len(), 50);
        }
    }
}

#[test]
fn a_close_ends_though_the_peer_is_gone() {
    let mut world = World::open(1);
    world.weather.clear();
    world.ends[ACCEPTOR].close(world.now);
    world.run_for(Time::from_secs(2));
    assert_eq!(world.loss(ACCEPTOR), Some(&SessionLoss::Closed));
    assert_eq!(world.loss(INITIATOR), None);
    world.run_for(Time::from_secs(5));
    assert_eq!(world.loss(INITIATOR), Some(&SessionLoss::Silent));
}

#[test]
fn a_lease_ends_for_its_user_before_it_ends_for_its_owner() {
    let mut world = World::open(1);
    let asked = world.now;
    let duration = Time::from_ms(500);
    let id = world.ends[ACCEPTOR]
        .ask_lease(region(1, 3).key, duration, asked)
        .unwrap();
    world.run_for(Time::from_ms(100));
    let region = region(1, 3).key;
    let renewal = false;
    assert!(world.events[INITIATOR].contains(&SessionEvent::LeaseAsked {
        id,
        region,
        duration,
        renewal
    }));
    world.ends[INITIATOR].answer_lease(id, Ok(duration), world.now);
    let lent_until = world.ends[INITIATOR].lent_until().unwrap();
    world.run_for(Time::from_ms(10));
    let until = asked.saturating_add(duration);
    assert!(world.events[ACCEPTOR].contains(&SessionEvent::LeaseGranted { id, until }));
    assert!(until < lent_until);
    world.take_events(INITIATOR);
    world.run_until(Time::from_ns(lent_until.as_ns() - 1));
    assert!(world.events[ACCEPTOR].contains(&SessionEvent::LeaseExpired { id }));
    assert!(!world.events[INITIATOR].contains(&SessionEvent::LeaseExpired { id }));
    world.run_until(lent_until);
    assert!(world.events[INITIATOR].contains(&SessionEvent::LeaseExpired { id }));
    assert_eq!(world.ends[INITIATOR].lent_until(), None);
}

#[test]
fn a_lease_is_renewed_returned_refused_and_outlives_its_session() {
    let mut world = World::open(1);
    let duration = Time::from_ms(500);
    let key = region(2, 3).key;
    let [borrower, _] = &mut world.ends;
    let renewed = borrower.ask_lease(key, duration, world.now).unwrap();
    let returned = borrower.ask_lease(key, duration, world.now).unwrap();
    let refused = borrower.ask_lease(key, duration, world.now).unwrap();
    let stale = borrower.ask_lease(region(1, 3).key, duration, world.now).unwrap();
    world.run_for(Time::from_ms(10));
    let owner = &mut world.ends[ACCEPTOR];
    owner.answer_lease(renewed, Ok(duration), world.now);
    owner.answer_lease(returned, Ok(duration), world.now);
    owner.answer_lease(refused, Err(Refusal::Released), world.now);
    world.run_for(Time::from_ms(10));
    let events = world.take_events(INITIATOR);
    let refusal = Refusal::Released;
    assert!(events.contains(&SessionEvent::LeaseRefused { id: refused, refusal }));
    let refusal = Refusal::StaleEpoch;
    assert!(events.contains(&SessionEvent::LeaseRefused { id: stale, refusal }));
    world.ends[INITIATOR].return_lease(returned, world.now);
    world.ends[INITIATOR].renew_lease(renewed, duration, world.now).unwrap();
    let again = world.now.saturating_add(duration);
    world.run_for(Time::from_ms(10));
    let events = world.take_events(ACCEPTOR);
    assert!(events.contains(&SessionEvent::LeaseReturned { id: returned }));
    let renewal = SessionEvent::LeaseAsked {
        id: renewed,
        region: key,
        duration,
        renewal: true,
    };
    assert!(events.contains(&renewal));
    world.ends[ACCEPTOR].answer_lease(renewed, Ok(duration), world.now);
    world.run_for(Time::from_ms(10));
    let granted = SessionEvent::LeaseGranted {
        id: renewed,
        until: again,
    };
    assert!(world.events[INITIATOR].contains(&granted));
    world.ends[ACCEPTOR].close(world.now);
    world.run_for(Time::from_ms(100));
    assert!(world.ends.iter().all(Session::is_ended));
    assert!(world.ends[ACCEPTOR].lent_until() >= Some(again));
    world.run_for(Time::from_secs(1));
    for end in 0..2 {
        let expired = SessionEvent::LeaseExpired { id: renewed };
        assert!(world.events[end].contains(&expired));
        assert_eq!(world.ends[end].next_timeout(), None);
    }
}
