//! What a session costs: messages while idle, messages per notification, and what happens when nobody keeps up.

use super::*;

#[test]
fn an_idle_session_says_one_small_thing_a_second() {
    let mut world = World::open(1);
    world.sent.iter_mut().for_each(Vec::clear);
    world.run_for(Time::from_secs(100));
    for end in 0..2 {
        assert!(
            (99..=101).contains(&world.sent[end].len()),
            "{} messages",
            world.sent[end].len()
        );
        assert!(world.sent[end].iter().all(|(_, bytes)| bytes.len() < 32));
        assert_eq!(world.loss(end), None);
    }
}

#[test]
fn a_peer_with_less_patience_hears_more() {
    let mut hasty = config("decode", 2);
    hasty.heartbeat = Time::from_ms(20);
    hasty.silence_max = Time::from_ms(100);
    let mut world = World::between(config("prefill", 1), hasty, 1, Weather::FINE);
    world.run_for(Time::from_secs(10));
    assert_eq!((world.loss(INITIATOR), world.loss(ACCEPTOR)), (None, None));
}

#[test]
fn a_ping_and_its_pong_are_one_message_each() {
    let mut world = World::open(1);
    world.run_for(Time::from_ms(100));
    world.sent.iter_mut().for_each(Vec::clear);
    for _ in 0..100 {
        for end in 0..2 {
            world.ends[end].notify(&[7; 32], None, world.now).unwrap();
            world.run_for(Time::from_us(20));
        }
    }
    assert_eq!((world.sent[INITIATOR].len(), world.sent[ACCEPTOR].len()), (100, 100));
    assert_eq!(
        (world.notified(INITIATOR).len(), world.notified(ACCEPTOR).len()),
        (100, 100)
    );
    assert!(world.sent[INITIATOR].iter().all(|(_, bytes)| bytes.len() < 32 + 40));
    world.run_for(Time::from_ms(10));
    assert_eq!((world.sent[INITIATOR].len(), world.sent[ACCEPTOR].len()), (101, 100));
}

#[test]
fn a_full_queue_accepts_no_more_and_empties() {
    let mut world = World::open(1);
    let limit = world.ends[INITIATOR].config.max_queued_messages;
    for _ in 0..limit {
        world.ends[INITIATOR].notify(b"x", None, world.now).unwrap();
    }
    assert_eq!(
        world.ends[INITIATOR].notify(b"x", None, world.now),
        Err(SessionError::QueueFull)
    );
    assert_eq!(
        world.ends[INITIATOR].publish("kv", &region(1, 0), world.now),
        Err(SessionError::QueueFull)
    );
    world.run_for(Time::from_ms(50));
    assert_eq!(world.notified(ACCEPTOR).len(), limit);
    world.ends[INITIATOR].notify(b"x", None, world.now).unwrap();
    let large = vec![0; MAX_PAYLOAD_BYTES];
    let accepted = (0..)
        .take_while(|_| world.ends[INITIATOR].notify(&large, None, world.now).is_ok())
        .count();
    assert!(accepted > 100 && accepted * MAX_PAYLOAD_BYTES <= world.ends[INITIATOR].config.max_queued_bytes);
    world.run_for(Time::from_ms(50));
    assert_eq!(world.notified(ACCEPTOR).len(), limit + 1 + accepted);
    let delivered = |event: &&SessionEvent| matches!(event, SessionEvent::NotificationDelivered { .. });
    assert_eq!(
        world.events[INITIATOR].iter().filter(delivered).count(),
        limit + 1 + accepted
    );
}

#[test]
fn what_is_too_large_or_stale_is_not_accepted() {
    let mut world = World::open(1);
    let end = &mut world.ends[INITIATOR];
    let len = MAX_PAYLOAD_BYTES + 1;
    assert_eq!(
        end.notify(&vec![0; len], None, world.now),
        Err(SessionError::PayloadTooLong { len })
    );
    assert_eq!(end.publish("", &region(1, 0), world.now), Err(SessionError::RegionName));
    let long = "x".repeat(MAX_NAME_BYTES + 1);
    assert_eq!(
        end.publish(&long, &region(1, 0), world.now),
        Err(SessionError::RegionName)
    );
    assert_eq!(
        end.publish("kv", &region(9, 0), world.now),
        Err(SessionError::StaleRegion)
    );
    let mut heavy = region(1, 0);
    heavy.grants = Arc::from([("tcp".to_owned(), Grant(vec![0; MAX_GRANT_BYTES + 1]))]);
    assert_eq!(end.publish("kv", &heavy, world.now), Err(SessionError::Grants));
    for slot in 0..MAX_REGIONS as u32 {
        end.publish(&slot.to_string(), &region(1, slot), world.now).unwrap();
    }
    assert_eq!(
        end.publish("kv", &region(1, 0), world.now),
        Err(SessionError::TooManyRegions)
    );
}

#[test]
fn notifications_that_wait_are_bounded() {
    let mut world = World::open(1);
    for tag in 0..MAX_HELD as u64 {
        world.ends[INITIATOR].notify(b"x", Some((tag, 1)), world.now).unwrap();
    }
    let more = |world: &mut World| world.ends[INITIATOR].notify(b"x", Some((1, 1)), world.now);
    assert_eq!(more(&mut world), Err(SessionError::TooManyHeld));
    world.run_for(Time::from_ms(50));
    assert_eq!(more(&mut world), Err(SessionError::TooManyHeld));
    world.ends[ACCEPTOR].on_arrival(Via(0), Arrival { tag: 0, index: 0 }, world.now);
    world.run_for(Time::from_ms(50));
    assert_eq!(world.notified(ACCEPTOR), [b"x"]);
    more(&mut world).unwrap();
    // What is revoked makes room, too, and never arrives.
    world.ends[INITIATOR].revoke(1, world.now);
    more(&mut world).unwrap();
    world.run_for(Time::from_ms(50));
    assert_eq!((world.loss(INITIATOR), world.loss(ACCEPTOR)), (None, None));
    assert_eq!(world.notified(ACCEPTOR).len(), 1);
}

#[test]
fn an_owner_that_takes_no_events_slows_the_peer_down() {
    let mut world = World::open(1);
    let mut waiting = 0;
    // Only messages are carried here; the acceptor's events stay where they are.
    for round in 0..40u64 {
        let now = world.now.saturating_add(Time::from_ms(round * 100));
        let [a, b] = &mut world.ends;
        while waiting < 3 * MAX_EVENTS && a.notify(b"x", None, now).is_ok() {
            waiting += 1;
        }
        a.on_timeout(now);
        b.on_timeout(now);
        while let Some((via, bytes)) = a.next_message() {
            b.on_message(via, &bytes, now);
            while let Some((via, bytes)) = b.next_message() {
                a.on_message(via, &bytes, now);
            }
        }
    }
    let end = &mut world.ends[ACCEPTOR];
    assert!(end.events.len() <= MAX_EVENTS, "{} events", end.events.len());
    world.now = world.now.saturating_add(Time::from_secs(4));
    world.run_for(Time::from_secs(10));
    assert_eq!(world.notified(ACCEPTOR).len(), waiting);
    assert_eq!((world.loss(INITIATOR), world.loss(ACCEPTOR)), (None, None));
}
