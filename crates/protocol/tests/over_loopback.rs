//! The transfer engine over the reference transport, plain and wrapped.

mod world;

use std::collections::BTreeSet;
use std::sync::Arc;

use weft_plan::{Bandwidth, Bytes, Time};
use weft_protocol::transfer::{Legs, PeerId, Request, SubmitError, Summary, TransferError, TransferEvent, TransferId};
use weft_protocol::{Direction, Failure, Faults, Faulty, Leg, Loss, Rate, Refusal, Region, Throttled, Transport};
use world::{World, same};

fn request(leg: &Arc<Leg>, direction: Direction) -> Request {
    Request::new(PeerId(0), direction, Arc::from([Arc::clone(leg)]), Time::from_secs(30)).checksum(true)
}

fn ended(events: &[TransferEvent], wanted: TransferId) -> &Result<Summary, TransferError> {
    let mut outcomes = events.iter().filter_map(|event| match event {
        TransferEvent::Ended { id, outcome } if *id == wanted => Some(outcome),
        _ => None,
    });
    let outcome = outcomes.next().expect("the transfer has ended");
    assert!(outcomes.next().is_none(), "ended twice");
    outcome
}

fn carry<T: Transport>(world: &mut World<T>, leg: &Arc<Leg>, far: &Region, direction: Direction) -> Summary {
    let id = world
        .engine
        .submit(request(leg, direction), world.now)
        .expect("there is room");
    let events = world.until_ended(1);
    let summary = ended(&events, id).clone().expect("the transfer succeeds");
    assert!(same(leg.local(), far), "the bytes differ");
    summary
}

#[test]
fn both_directions_over_several_lanes() {
    for lanes in [1, 3] {
        let mut world = World::new(lanes, |endpoint| endpoint);
        for direction in [Direction::Read, Direction::Write] {
            let (leg, far) = world.leg(2000);
            let summary = carry(&mut world, &leg, &far, direction);
            assert_eq!(summary.bytes, 2000 * 4096);
            assert_eq!(summary.carried.iter().collect::<Vec<_>>(), [("loopback", 2000 * 4096)]);
        }
    }
}

#[test]
fn a_prepared_transfer_is_submitted_again_and_again() {
    let mut world = World::new(2, |endpoint| endpoint);
    let (leg, far) = world.leg(10);
    let legs: Arc<[Arc<Leg>]> = Arc::from([leg]);
    for _ in 0..20 {
        let mut request = request(&legs[0], Direction::Write);
        request.legs = Legs::Several(Arc::clone(&legs));
        let id = world.engine.submit(request, world.now).expect("there is room");
        let events = world.until_ended(1);
        assert!(ended(&events, id).is_ok());
    }
    assert!(same(legs[0].local(), &far));
}

#[test]
fn counted_parts_all_arrive() {
    for checksum in [false, true] {
        let mut world = World::new(2, |endpoint| endpoint);
        let (leg, _far) = world.leg(1000);
        let tagged = request(&leg, Direction::Write).tag(Some(9)).checksum(checksum);
        let id = world.engine.submit(tagged, world.now).expect("there is room");
        let events = world.until_ended(1);
        assert!(ended(&events, id).is_ok());
        let cut: Vec<u32> = events
            .iter()
            .filter_map(|event| match event {
                TransferEvent::Cut { tag: 9, parts, .. } => Some(*parts),
                _ => None,
            })
            .collect();
        let distinct: BTreeSet<u32> = world.arrivals.iter().map(|a| a.index).collect();
        assert_eq!(cut, [distinct.len() as u32]);
    }
}

#[test]
fn setbacks_are_overcome() {
    for seed in 0..20 {
        let faults = Faults {
            seed,
            delay: 0.3,
            delay_max: Time::from_ms(2),
            spoil_read: 0.004,
            lose_move: 0.2,
            refuse_post: 0.2,
            ..Faults::default()
        };
        let mut world = World::new(3, |endpoint| Faulty::new(endpoint, faults));
        for direction in [Direction::Read, Direction::Write] {
            let (leg, far) = world.leg(300);
            carry(&mut world, &leg, &far, direction);
        }
    }
}

#[test]
fn spoiled_bytes_are_an_error_and_never_data() {
    let faults = Faults {
        spoil_read: 1.0,
        ..Faults::default()
    };
    let mut world = World::new(1, |endpoint| Faulty::new(endpoint, faults));
    let (leg, _far) = world.leg(10);
    let id = world
        .engine
        .submit(request(&leg, Direction::Read), world.now)
        .expect("there is room");
    let events = world.until_ended(1);
    let error = ended(&events, id).clone().expect_err("every read is spoiled");
    assert_eq!((error.cause, error.transport), (Failure::ChecksumMismatch, "loopback"));
    assert_eq!((error.bytes_done, error.done.len()), (0, 0));
    assert_eq!(error.undone, [(0, 0..40_960)]);
}

#[test]
fn a_lost_lane_is_replaced_by_the_others() {
    let mut world = World::new(3, |endpoint| endpoint);
    let (leg, far) = world.leg(3000);
    let id = world
        .engine
        .submit(request(&leg, Direction::Write), world.now)
        .expect("there is room");
    let mut events = Vec::new();
    world.turn(&mut events);
    world.here.close(world.paths[1]);
    events.extend(world.until_ended(1));
    let summary = ended(&events, id).clone().expect("two lanes are left");
    assert!(summary.retries > 0);
    assert!(same(leg.local(), &far));
}

#[test]
fn a_refusal_tells_what_is_done() {
    let mut world = World::new(1, |endpoint| endpoint);
    let (leg, _) = world.leg(100);
    let (gone, gone_far) = world.leg(100);
    assert!(world.there.release(&gone_far.key).is_ok());
    let mut both = request(&leg, Direction::Read);
    both.legs = Legs::Several(Arc::from([leg, gone]));
    let id = world.engine.submit(both, world.now).expect("there is room");
    let events = world.until_ended(1);
    let error = ended(&events, id).clone().expect_err("the second region is released");
    assert_eq!(error.cause, Failure::Refused(Refusal::Released));
    assert_eq!(error.done, [(0, 0..409_600)]);
    assert_eq!(error.undone, [(1, 0..409_600)]);
}

#[test]
fn a_peer_that_does_not_answer_holds_up_nobody() {
    let mut world = World::new(1, |endpoint| endpoint);
    let (stuck, _) = world.leg(10);
    let mut stuck_ids = Vec::new();
    for _ in 0..500 {
        let mut to_nobody = request(&stuck, Direction::Read);
        to_nobody.peer = PeerId(1);
        to_nobody.deadline = Time::from_secs(5);
        stuck_ids.push(world.engine.submit(to_nobody, world.now).expect("there is room"));
    }
    let (leg, far) = world.leg(500);
    carry(&mut world, &leg, &far, Direction::Read);
    assert!(world.now < Time::from_secs(1), "the other peer was waited for");
    world.now = Time::from_secs(5);
    let events = world.until_ended(500);
    for id in stuck_ids {
        assert_eq!(
            ended(&events, id).as_ref().expect_err("nobody answered").cause,
            Failure::Expired
        );
    }
}

#[test]
fn a_peer_that_is_gone_fails_its_transfers() {
    let mut world = World::new(1, |endpoint| endpoint);
    let (leg, _far) = world.leg(5000);
    let id = world
        .engine
        .submit(request(&leg, Direction::Read), world.now)
        .expect("there is room");
    let mut events = Vec::new();
    world.turn(&mut events);
    world.engine.on_peer_gone(PeerId(0), Loss::Silent, world.now);
    events.extend(world.until_ended(1));
    let error = ended(&events, id).clone().expect_err("the peer is gone");
    assert!(matches!(error.cause, Failure::PathLost { loss: Loss::Silent, .. }));
    let again = world.engine.submit(request(&leg, Direction::Read), world.now);
    assert_eq!(again, Err(SubmitError::PeerGone(Loss::Silent)));
}

#[test]
fn a_throttled_lane_is_filled_but_not_overfilled() {
    let rate = Rate {
        bandwidth: Bandwidth::from_bytes_per_sec(100 << 20),
        burst: Bytes(1 << 20),
    };
    let mut world = World::new(1, |endpoint| Throttled::new(endpoint, rate));
    let (leg, far) = world.leg(2560);
    carry(&mut world, &leg, &far, Direction::Read);
    // Ten MiB at 100 MiB/s take 100 ms; a burst and the last part are ahead of the rate.
    assert!(
        world.now >= Time::from_ms(75) && world.now <= Time::from_ms(130),
        "{:?}",
        world.now
    );
}
