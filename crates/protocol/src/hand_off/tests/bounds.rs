//! What peers, tickets and callers say is bounded before anything is computed from it.

use super::*;

/// A renewal that is due at once, again and again, would never let go of the clock.
#[test]
fn a_lease_that_cannot_be_renewed_is_refused() {
    let short = Time::from_ns(3);
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    let mut origin = net.offer(&[0], "one");
    origin.lease.lasts = short;
    assert_eq!(Origin::decode(&origin.encode()), Err(crate::wire::DecodeError::Invalid));
    assert_eq!(net.machines[1].want(origin, 1, net.now), Err(CallError::Invalid));
    let offered = net.machines[0].offer("two", None, short, net.now);
    assert_eq!(offered, Err(CallError::Invalid));
    let lease = Slots::new(1000).take(short, 0);
    let offered = net.machines[0].offer("three", lease, LASTS, net.now);
    assert_eq!(offered, Err(CallError::Invalid));
    let settings = Settings {
        lease: short,
        ..Settings::default()
    };
    let mut reader = HandOffs::new(cache(0, 1, 16), settings, 100);
    let pushed = reader.want_pushed("four", vec!["0".to_owned()], 1, net.now);
    assert_eq!(pushed, Err(CallError::Invalid));

    let mut origin = net.offer(&[0], "five");
    origin.lease.lasts = LASTS_MIN;
    let origin = Origin::decode(&origin.encode()).unwrap();
    net.machines[1].want(origin, 1, net.now).unwrap();
    net.wait(Time::from_ms(20));
    assert_eq!(net.machines[1].wanted(), 1);
}

/// Past the last stamp there is no word.
#[test]
fn a_stamp_that_no_word_can_move_past_is_refused() {
    let mut net = Net::new(vec![machine(0, 1)]);
    let mut origin = net.offer(&[0], "one");
    origin.lease.stamp = u64::MAX;
    let read = Origin::decode(&origin.encode());
    assert_eq!(read, Err(crate::wire::DecodeError::Invalid));
    let offered = net.machines[0].offer("two", Some(origin.lease), LASTS, net.now);
    assert_eq!(offered, Err(CallError::Invalid));
}

#[test]
fn bytes_that_peers_claim_to_have_written_are_at_most_what_there_was_room_for() {
    let mut net = Net::new(vec![machine(0, 2), machine(1, 2), machine(0, 1)]);
    let addresses = vec!["0".to_owned(), "1".to_owned()];
    net.machines[2].want_pushed("one", addresses, 1, net.now).unwrap();
    net.machines[2].fetch("one", wanted(), net.now).unwrap();
    net.hear_all();
    let room = net.machines[2].landing_bytes();
    for from in [0, 1] {
        let landed = Message::Landed {
            landing: 0,
            layers: vec![0, 1],
            upto: 40,
            bytes: u64::MAX,
            way: "test".to_owned(),
        };
        net.machines[2].on_message(PeerId(from), &landed.encode(), net.now);
    }
    net.act();
    net.settle();
    assert_eq!(ended(&net.take_events(), 2).unwrap().unwrap().bytes, room);
}

fn reserve(hand_off: &str, shares: Vec<AskedShare>) -> Message {
    Message::Reserve(Reserve {
        hand_off: hand_off.to_owned(),
        landing: 0,
        tokens: 0..40,
        prompt_tokens: 40,
        digest: [7; 32],
        blocks: 3,
        readers: 1,
        lasts: LASTS,
        shares,
    })
}

/// Six kilobytes would name a million layers otherwise.
#[test]
fn a_layer_is_asked_for_once() {
    let share = |heads: Range<u64>, layers: Range<u32>| AskedShare {
        heads,
        layers: layers.collect(),
    };
    let all = LAYERS_MAX as u32;
    let sound = reserve("one", vec![share(0..2, 0..all / 2), share(1..3, all / 2..all)]);
    assert_eq!(Message::decode(&sound.encode()), Ok(sound));
    for twice in [
        vec![share(0..2, 0..all), share(0..2, 0..all)],
        vec![share(0..2, 0..3), share(2..4, 2..4)],
        (0..1024).map(|nth| share(nth..nth + 1, 0..all)).collect(),
    ] {
        let words = reserve("one", twice).encode();
        assert!(words.len() < 10_000);
        assert_eq!(Message::decode(&words), Err(crate::wire::DecodeError::Invalid));
    }
}

fn failed(net: &mut Net, at: usize) -> usize {
    let mut count = 0;
    while let Some(act) = net.machines[at].next_act() {
        count += usize::from(matches!(
            act,
            Act::Say {
                message: Message::Failed { why: Over::TooMany, .. },
                ..
            }
        ));
    }
    count
}

#[test]
fn one_reader_does_not_speak_for_all() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1), machine(0, 1)]);
    net.connect(0, 1);
    net.connect(0, 2);
    let shares = vec![AskedShare {
        heads: 0..4,
        layers: vec![0, 1],
    }];
    let mut refused = 0;
    for nth in 0..3000 {
        let words = reserve(&format!("of nobody {nth}"), shares.clone()).encode();
        net.machines[0].on_message(PeerId(1), &words, net.now);
        refused += failed(&mut net, 0);
    }
    assert_eq!((refused, net.machines[0].held.len()), (3000 - 1024, 1024));
    // Others are heard all the same, and what this engine knows of is not counted.
    let words = reserve("one", shares.clone()).encode();
    net.machines[0].on_message(PeerId(2), &words, net.now);
    assert_eq!(failed(&mut net, 0), 0);
    net.machines[0].stop("of nobody 0", net.now).unwrap();
    net.machines[0].compute("of nobody 1", prompt(), net.now).unwrap();
    for (name, times) in [("two", 0), ("three", 0), ("four", 1)] {
        let words = reserve(name, shares.clone()).encode();
        net.machines[0].on_message(PeerId(1), &words, net.now);
        assert_eq!(failed(&mut net, 0), times, "{name}");
    }
    // With time they are forgotten.
    net.wait(Time::from_secs(700));
    assert_eq!(net.machines[0].held.len(), 1);
    let words = reserve("four and one", shares).encode();
    net.machines[0].on_message(PeerId(1), &words, net.now);
    assert_eq!(failed(&mut net, 0), 0);
}

#[test]
fn whoever_asks_again_and_again_is_described_to_once() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    net.connect(0, 1);
    for _ in 0..100 {
        net.machines[0].on_message(PeerId(1), &Message::Describe.encode(), net.now);
    }
    net.act();
    assert_eq!(net.said.len(), 1);
}
