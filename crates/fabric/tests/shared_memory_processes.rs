//! Two real processes: one is killed, or frozen, or takes its memory back, and the other must know what to say.

mod peer;

use std::sync::Arc;

use peer::{Kind, Near, Peer, pattern, whole_leg};
use weft_fabric::memory::AllocateOptions;
use weft_fabric::shared_memory::{Foreign, host_identity};
use weft_fabric::{Clock, HostMemory, SharedMemory, SharedMemoryOptions};
use weft_plan::Time;
use weft_protocol::{
    Arrival, Body, Direction, Epoch, Failure, Loss, PeerAddress, Progress, Refusal, Signal, Transport,
};

const LEN: usize = 24 << 20;

/// Not a test: the other process, when this binary is started as one.
#[test]
fn peer_process() {
    peer::be_a_peer();
}

fn ways() -> [(Kind, Foreign); 3] {
    [
        (Kind::Mapped, Foreign::Auto),
        (Kind::Foreign, Foreign::ProcessVm),
        (Kind::Foreign, Foreign::Bounce),
    ]
}

fn near(foreign: Foreign, peer: &Peer) -> Near {
    let options = SharedMemoryOptions {
        foreign,
        ..SharedMemoryOptions::default()
    };
    Near::connected(options, peer)
}

fn memory() -> HostMemory {
    HostMemory::allocate(LEN, AllocateOptions::default()).unwrap()
}

#[test]
fn bytes_go_both_ways_between_processes() {
    for (kind, foreign) in ways() {
        let peer = Peer::start(LEN);
        let mut near = near(foreign, &peer);
        let local = near.local(memory());
        let leg = whole_leg(&local, &peer.region(kind));
        let deadline = near.soon();
        let read = near.op(Direction::Read, &leg, 0..LEN as u64, deadline);
        near.carry_out(read).unwrap();
        let mut bytes = vec![0; LEN];
        local.memory.bytes().read(0, &mut bytes);
        assert!(
            bytes.iter().enumerate().all(|(i, &b)| b == pattern(i)),
            "{kind:?} {foreign:?}"
        );
        local.memory.bytes().write(0, &vec![0xee; LEN]);
        let mut write = near.op(Direction::Write, &leg, 0..LEN as u64, deadline);
        if let Body::Move(part) = &mut write.body {
            part.arrival = Some(Arrival { tag: 77, index: 3 });
            part.checksum = true;
        }
        let done = near.carry_out(write).unwrap();
        let mut digest = weft_protocol::memory::Digest::default();
        local.memory.bytes().digest(0, LEN as u64, &mut digest).unwrap();
        assert_eq!(done.far_sum, Some(digest.finish()));
        let mut peer = peer;
        assert_eq!(peer.reply(), "arrived 77 3");
    }
}

#[test]
fn a_killed_peer_ends_what_is_under_way() {
    for (kind, foreign) in ways() {
        for direction in [Direction::Read, Direction::Write] {
            let mut peer = Peer::start(LEN);
            let mut near = near(foreign, &peer);
            let local = near.local(memory());
            let leg = whole_leg(&local, &peer.region(kind));
            let deadline = near.soon();
            let warm = near.op(direction, &leg, 0..1, deadline);
            near.carry_out(warm).unwrap();
            let op = near.op(direction, &leg, 0..LEN as u64, deadline);
            let id = op.id;
            near.transport.post(near.path, &[op], near.clock.now()).unwrap();
            // In the middle of the copy.
            near.transport.poll(near.clock.now(), &mut near.signals);
            peer.kill();
            let lost = Failure::PathLost {
                loss: Loss::ClosedByPeer,
                fenced: true,
            };
            assert_eq!(near.completion(id), Err(lost), "{kind:?} {foreign:?} {direction:?}");
            assert_eq!(near.loss(), (Loss::ClosedByPeer, true));
            let again = near.op(direction, &leg, 0..1, deadline);
            assert_eq!(
                near.transport.post(near.path, &[again], near.clock.now()),
                Err(Loss::Closed)
            );
        }
    }
}

#[test]
fn a_frozen_peer_does_not_delay_what_needs_no_help_of_it() {
    for kind in [Kind::Mapped, Kind::Foreign] {
        let mut peer = Peer::start(LEN);
        let mut near = near(Foreign::ProcessVm, &peer);
        let local = near.local(memory());
        let leg = whole_leg(&local, &peer.region(kind));
        let deadline = near.soon();
        let warm = near.op(Direction::Read, &leg, 0..1, deadline);
        near.carry_out(warm).unwrap();
        peer.freeze();
        for direction in [Direction::Read, Direction::Write] {
            let op = near.op(direction, &leg, 0..LEN as u64, deadline);
            near.carry_out(op).unwrap();
        }
        peer.thaw();
        peer.command("stamp");
        peer.command("intact");
        assert_eq!(peer.reply(), "true");
    }
}

#[test]
fn a_frozen_peer_that_must_help_costs_no_more_than_the_deadline_and_writes_nothing_afterwards() {
    for direction in [Direction::Read, Direction::Write] {
        let mut peer = Peer::start(LEN);
        let mut near = near(Foreign::Bounce, &peer);
        let local = near.local(memory());
        let leg = whole_leg(&local, &peer.region(Kind::Foreign));
        let deadline = near.soon();
        let warm = near.op(Direction::Read, &leg, 0..1, deadline);
        near.carry_out(warm).unwrap();
        peer.command("stamp");
        peer.command("intact");
        assert_eq!(peer.reply(), "true");
        peer.freeze();
        let deadline = near.clock.now().saturating_add(Time::from_ms(50));
        let op = near.op(direction, &leg, 0..LEN as u64, deadline);
        assert_eq!(near.carry_out(op), Err(Failure::Expired));
        local.memory.bytes().write(0, &vec![0x11; LEN]);
        peer.thaw();
        // The thawed peer answers in order, so after this everything from before has been dealt with.
        let deadline = near.soon();
        let mut message = near.op(Direction::Read, &leg, 0..1, deadline);
        message.body = Body::Message(Arc::from(&b"echo"[..]));
        near.carry_out(message).unwrap();
        near.until(|s| matches!(s, Signal::Message { .. }));
        peer.command("intact");
        assert_eq!(peer.reply(), "true", "{direction:?}");
        let mut bytes = vec![0; LEN];
        local.memory.bytes().read(0, &mut bytes);
        assert!(bytes.iter().all(|&b| b == 0x11));
    }
}

#[test]
fn a_region_is_refused_once_its_owner_has_taken_it_back() {
    let mut peer = Peer::start(LEN);
    let mut near = near(Foreign::Auto, &peer);
    let local = near.local(memory());
    let leg = whole_leg(&local, &peer.region(Kind::Mapped));
    let deadline = near.soon();
    let op = near.op(Direction::Read, &leg, 0..LEN as u64, deadline);
    let id = op.id;
    near.carry_out(op).unwrap();
    // Inside the region for a long while: one part in each poll, and the owner asks between them.
    let op = near.op(Direction::Write, &leg, 0..LEN as u64, deadline);
    let writing = op.id;
    near.transport.post(near.path, &[op], near.clock.now()).unwrap();
    near.transport.poll(near.clock.now(), &mut near.signals);
    peer.command("release");
    assert_eq!(peer.reply(), "Ok(Idle)");
    peer.command("stamp");
    peer.command("intact");
    assert_eq!(peer.reply(), "true");
    assert_eq!(near.completion(writing), Err(Refusal::Released.into()));
    let op = near.op(Direction::Read, &leg, 0..LEN as u64, deadline);
    assert!(op.id > id);
    assert_eq!(near.carry_out(op), Err(Refusal::Released.into()));
    peer.command("intact");
    assert_eq!(peer.reply(), "true");
    peer.command("release");
    assert_eq!(peer.reply(), "Err(Released)");
}

#[test]
fn a_borrowed_region_is_read_where_it_lies() {
    let mut peer = Peer::start(LEN);
    let mut near = near(Foreign::Auto, &peer);
    let (mapped, foreign) = (peer.region(Kind::Mapped).key, peer.region(Kind::Foreign).key);
    for key in [mapped, foreign] {
        near.transport.request_map(near.path, key).unwrap();
    }
    let borrowed = loop {
        near.transport.poll(near.clock.now(), &mut near.signals);
        if let Some(borrowed) = near.transport.mapping(near.path, &mapped).unwrap() {
            break borrowed;
        }
    };
    let mut bytes = [0; 100];
    borrowed.copy_out(5000, &mut bytes);
    assert!(bytes.iter().enumerate().all(|(i, &b)| b == pattern(5000 + i)));
    // What the owner writes is seen without any transfer.
    peer.command("stamp");
    peer.command("intact");
    peer.reply();
    borrowed.copy_out(5000, &mut bytes);
    assert_eq!(bytes, [0xee; 100]);
    let refused = loop {
        near.transport.poll(near.clock.now(), &mut near.signals);
        match near.transport.mapping(near.path, &foreign) {
            Ok(None) => {}
            other => break other,
        }
    };
    assert_eq!(refused.unwrap_err(), Refusal::Unsupported.into());
    let mut wrong = mapped;
    wrong.secret ^= 1;
    near.transport.request_map(near.path, wrong).unwrap();
    let refused = loop {
        near.transport.poll(near.clock.now(), &mut near.signals);
        match near.transport.mapping(near.path, &wrong) {
            Ok(None) => {}
            other => break other,
        }
    };
    assert_eq!(refused.unwrap_err(), Refusal::UnknownKey.into());
    assert!(borrowed.is_live());
    peer.command("release");
    assert_eq!(peer.reply(), "Ok(Idle)");
    assert!(!borrowed.is_live());
    // The pages outlive even their owner's process.
    peer.kill();
    borrowed.copy_out(0, &mut bytes);
    assert_eq!(bytes, [0xee; 100]);
}

#[test]
fn a_peer_without_descriptors_turns_new_paths_away_and_keeps_the_old_ones() {
    let mut peer = Peer::start(LEN);
    let mut near = near(Foreign::Auto, &peer);
    let local = near.local(memory());
    peer.command("use up descriptors");
    assert_eq!(peer.reply(), "none left");
    // The peer hangs up while this end introduces itself, or after that.
    match near.transport.open(&peer.address, near.clock.now()) {
        Err(loss) => assert_eq!(loss, Loss::ClosedByPeer),
        Ok(second) => {
            assert_ne!(second, near.path);
            assert_eq!(near.loss(), (Loss::ClosedByPeer, true));
        }
    }
    // Even memory that the peer cannot hand out a descriptor for is reached.
    for kind in [Kind::Mapped, Kind::Foreign] {
        let leg = whole_leg(&local, &peer.region(kind));
        let deadline = near.soon();
        let op = near.op(Direction::Read, &leg, 0..LEN as u64, deadline);
        near.carry_out(op).unwrap();
    }
}

#[test]
fn another_host_is_recognised_at_once() {
    let mut end = SharedMemory::start(SharedMemoryOptions::default(), Epoch(1), Clock::start()).unwrap();
    let here = end.capabilities().address.0.clone();
    let elsewhere = PeerAddress(here.replace(host_identity(), "11111111-2222-3333-4444-555555555555"));
    assert_eq!(end.open(&elsewhere, Time::ZERO), Err(Loss::Unreachable));
    assert_eq!(
        end.open(&PeerAddress("tcp:127.0.0.1:1".into()), Time::ZERO),
        Err(Loss::Unreachable)
    );
}

#[test]
fn an_idle_end_has_nothing_to_do() {
    let peer = Peer::start(4096);
    let mut near = near(Foreign::Auto, &peer);
    near.signals.clear();
    assert_eq!(near.transport.poll(near.clock.now(), &mut near.signals), Progress::Idle);
    assert_eq!(weft_fabric::Live::next_timeout(&near.transport), None);
}
