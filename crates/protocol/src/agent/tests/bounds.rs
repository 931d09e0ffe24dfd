//! What an agent refuses, forgets and shares out, so that it neither grows nor stalls.

use super::super::announce::ANNOUNCEMENTS_MAX;
use super::super::{ENDINGS_MAX, RegionError};
use super::*;
use crate::session::SessionError;
use crate::transfer::SubmitError;
use crate::transport::PeerAddress;

/// An agent with several transports of one name, as one with several rails has.
fn railed(network: &Loopback, name: &str, epoch: u64, rails: usize) -> Core<LoopbackEndpoint> {
    let core = agent(network, name, name, epoch, b"secret");
    let Core {
        settings,
        mut slots,
        random,
        ..
    } = core;
    slots.extend((1..rails).map(|rail| Slot {
        reach: Reach::Anywhere,
        preference: 0,
        paths: 1,
        transport: Box::new(network.endpoint(&format!("{name} {rail}"), Epoch(epoch))),
    }));
    Core::new(settings, slots, random)
}

#[test]
fn no_more_is_announced_than_the_peer_can_count() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    pair.publish(vec![7; 64], Access::READ_WRITE);
    pair.until("the publication", |p| p.near.region(peer, "kv").is_some());
    let near = pair
        .near
        .register(Arc::new(VecMemory::zeroed(64)), Place::DRAM)
        .expect("memory");
    let mut last = None;
    for _ in 0..ANNOUNCEMENTS_MAX {
        last = Some(pair.transfer(peer, Direction::Write, &near, Some(b"written")));
    }
    let remote = pair.near.region(peer, "kv").expect("published").clone();
    let all = Spans::contiguous(0, 64);
    let request = Request::new(
        peer,
        Direction::Write,
        Arc::from([Arc::new(Leg::new(near, all.clone(), remote, all).expect("a leg"))]),
        pair.now.saturating_add(Time::from_secs(1)),
    );
    let refused = pair.near.submit(request.clone(), Some(b"one more"), pair.now);
    assert_eq!(refused, Err(SubmitError::TooManyAnnounced.into()));
    pair.near
        .submit(request, None, pair.now)
        .expect("nobody counts this one");
    pair.outcome(last.expect("submitted")).expect("written");
    let notified = |e: &&Event| matches!(e, Event::Notified { .. });
    pair.until("all notifications", |p| {
        p.heard_far.iter().filter(notified).count() == ANNOUNCEMENTS_MAX
    });
    pair.until("room", |p| p.near.announcements.is_empty());
    assert_eq!(
        pair.near.peers.at(peer.0).map(|p| (p.announced, p.awaited.len())),
        Some((0, 0))
    );
}

#[test]
fn each_rail_goes_to_the_rail_of_the_same_ordinal() {
    let network = Loopback::new();
    let core = railed(&network, "near", 1, 2);
    let address = |text: &str| PeerAddress(text.to_owned());
    let addresses = ["loopback:a", "tcp:x", "loopback:b", "loopback:c"].map(address);
    let slots: Vec<usize> = core.candidates(&addresses).iter().map(|(slot, _)| *slot).collect();
    assert_eq!(
        slots,
        [0, 1, 0],
        "and an address that nobody here understands is left out"
    );
}

#[test]
fn many_rails_are_published_with_one_grant() {
    let network = Loopback::new();
    let far = railed(&network, "far", 2, 12);
    let mut pair = Pair::of(agent(&network, "near", "near", 1, b"secret"), far);
    let peer = pair.connect();
    pair.publish(vec![7; 64], Access::READ);
    pair.until("the publication", |p| p.near.region(peer, "kv").is_some());
    assert_eq!(pair.near.region(peer, "kv").map(|r| r.grants.len()), Some(1));
}

#[test]
fn what_no_peer_could_be_told_of_is_not_published() {
    let mut pair = Pair::new();
    let region = pair.publish(vec![7; 64], Access::READ);
    let name = "n".repeat(1000);
    let error = pair
        .far
        .publish(&name, &region.key, Access::READ, pair.now)
        .unwrap_err();
    let expected = SessionError::RegionName;
    assert!(matches!(error, RegionError::Unpublishable { error, .. } if error == expected));
    let gone = RegionError::NotPublished { name: name.clone() };
    assert_eq!(pair.far.withdraw(&name, pair.now), Err(gone));
}

#[test]
fn a_stranger_is_forgotten_with_its_last_path() {
    let network = Loopback::new();
    let near = agent(&network, "near", "near", 1, b"secret");
    let mut pair = Pair::of(near, agent(&network, "far", "far", 2, b"another"));
    let target = Target::at(pair.far.addresses()[0].clone(), Time::from_secs(5));
    pair.near.connect(target, Time::ZERO).expect("understood");
    pair.until("a refusal", |p| !p.heard.is_empty());
    pair.near = agent(&network, "near", "near", 3, b"secret");
    for _ in 0..20 {
        pair.turn();
    }
    assert_eq!((pair.far.peers.len(), pair.far.paths.len()), (0, 0));
    assert!(pair.now < pair.far.settings.handshake_max);
}

#[test]
fn a_withdrawal_says_whether_somebody_is_still_inside() {
    let mut pair = Pair::new();
    let peer = pair.connect();
    let source = pair.publish(vec![7; 1000], Access::READ);
    pair.until("the publication", |p| p.near.region(peer, "kv").is_some());
    let key = pair.near.region(peer, "kv").expect("published").key;
    pair.near
        .borrow(peer, key, Time::from_ms(200), pair.now)
        .expect("asked");
    pair.until("the lease", |p| {
        p.heard.iter().any(|e| matches!(e, Event::Leased { .. }))
    });
    pair.far.posted.fill(false);
    assert_eq!(pair.far.withdraw("kv", pair.now), Ok((key, Progress::Busy)));
    assert!(
        pair.far.posted[0],
        "what the release has ended is polled in the same turn"
    );
    pair.now = pair.now.saturating_add(Time::from_secs(1));
    assert_eq!(pair.far.release(&key, pair.now), Ok(Progress::Idle));
    assert_eq!(pair.far.release(&source.key, pair.now), Ok(Progress::Idle));
}

#[test]
fn of_more_endings_than_are_remembered_the_oldest_is_forgotten() {
    let mut pair = Pair::new();
    let longest = pair.connect();
    let identity = pair.near.identity(longest).cloned();
    // Peers that come later and go earlier than the first.
    let short: Vec<PeerId> = (0..ENDINGS_MAX)
        .map(|_| {
            let peer = pair.near.new_peer(None);
            pair.near.peers.at_mut(peer.0).expect("new").identity = identity.clone();
            pair.near.part(peer, SessionLoss::Silent, pair.now);
            peer
        })
        .collect();
    pair.near.part(longest, SessionLoss::Gone, pair.now);
    assert_eq!(pair.near.ending(longest), Some(&SessionLoss::Gone), "the latest");
    assert_eq!(pair.near.ending(short[0]), None, "the oldest");
    assert_eq!(pair.near.ending(short[1]), Some(&SessionLoss::Silent));
}
