//! Any bytes at all, said to workers that have something of everything under way.

use weft_plan::Time;
use weft_plan::pages::Pages;

use super::{Act, Cache, HandOffs, Layer, Lease, Message, MoveError, Moved, Origin, Prompt, Settings, Wanted};
use crate::transfer::PeerId;

const LASTS: Time = Time::from_secs(60);
const PEER: PeerId = PeerId(0);
/// Somebody whom nothing was asked of, and who hears nothing.
const STRANGER: PeerId = PeerId(1);

/// One of each kind.
#[cfg(test)]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    use super::{AskedShare, Over, Reserve};
    let hand_off = || "pushed".to_owned();
    let shares = vec![AskedShare {
        heads: 0..2,
        layers: vec![0, 1],
    }];
    let reserve = Reserve {
        hand_off: "computed".to_owned(),
        landing: 0,
        tokens: 0..20,
        prompt_tokens: 20,
        digest: [7; 32],
        blocks: 2,
        readers: 1,
        lasts: LASTS,
        shares,
    };
    let landed = Message::Landed {
        landing: 0,
        layers: vec![0, 1],
        upto: 20,
        bytes: 100,
        way: "tcp".to_owned(),
    };
    let messages = [
        Message::Describe,
        Message::Cache(cache()),
        Message::Renew { hand_off: hand_off() },
        Message::Done {
            hand_off: hand_off(),
            readers: 1,
        },
        Message::Heard { hand_off: hand_off() },
        Message::Reserve(reserve),
        landed,
        Message::Failed {
            landing: 0,
            why: Over::Stopped,
        },
    ];
    let mut samples: Vec<Vec<u8>> = messages.iter().map(Message::encode).collect();
    samples.push(origin().encode());
    samples
}

/// What is said means the same when it is written again, and a worker that hears it, and then goes on, ends everything that it had begun.
pub(crate) fn messages(bytes: &[u8]) {
    if let Ok(message) = Message::decode(bytes) {
        assert_eq!(Message::decode(&message.encode()), Ok(message));
    }
    if let Ok(origin) = Origin::decode(bytes) {
        assert_eq!(Origin::decode(&origin.encode()), Ok(origin));
    }
    let mut now = Time::from_secs(1);
    let mut machine = HandOffs::new(cache(), Settings::default(), 0);
    machine.on_connected(PEER, "peer", now);
    machine.on_connected(STRANGER, "stranger", now);
    let wanted = || Wanted {
        blocks: vec![1, 2],
        tokens: 0..20,
        prompt_tokens: 20,
        digest: [7; 32],
    };
    // One prompt is computed, one is offered, one is fetched and one is being pushed here.
    let computed = Prompt {
        blocks: vec![0, 3],
        tokens: 20,
        digest: [7; 32],
    };
    machine.compute("computed", computed, now).expect("a new name");
    machine.computed("computed", None, 20, now);
    machine.offer("offered", None, LASTS, now).expect("a new name");
    machine.want(origin(), 1, now).expect("a new name");
    machine
        .want_pushed("pushed", vec!["address".to_owned()], 1, now)
        .expect("a new name");
    turn(&mut machine, now);
    for name in ["fetched", "pushed"] {
        machine.fetch(name, wanted(), now).expect("it is waited for");
    }
    turn(&mut machine, now);
    machine.on_message(PEER, &Message::Cache(cache()).encode(), now);
    machine.on_message(PEER, bytes, now);
    turn(&mut machine, now);
    machine.on_message(STRANGER, bytes, now);
    machine.on_message(PEER, bytes, now);
    turn(&mut machine, now);
    machine.on_begun_anew(STRANGER, now);
    machine.on_message(STRANGER, bytes, now);
    machine.stop("computed", now).unwrap_or(());
    for _ in 0..4 {
        now = now.saturating_add(Time::from_secs(700));
        machine.on_time(now);
        turn(&mut machine, now);
    }
    assert_eq!((machine.held(), machine.wanted(), machine.landing_bytes()), (0, 0, 0));
}

/// Does what the machine wants, every other move in vain.
fn turn(machine: &mut HandOffs, now: Time) {
    while let Some(act) = machine.next_act() {
        match act {
            Act::Connect { address, .. } => {
                machine.on_connecting(&address, Ok(PEER), now);
                machine.on_connected(PEER, "peer", now);
            }
            Act::Move(wanted) if wanted.id.0 % 2 == 1 => machine.on_moved(wanted.id, Err(MoveError::NoRegion), now),
            Act::Move(wanted) => machine.on_moved(
                wanted.id,
                Ok(Moved {
                    bytes: 1,
                    way: "test",
                    word: Some(0),
                }),
                now,
            ),
            Act::Land { landing, .. } => machine.on_made(landing, true, now),
            Act::Release { landing } => machine.on_released(landing),
            Act::Say { message, .. } => drop(message.encode()),
            Act::Cancel { .. } | Act::Word { .. } => {}
        }
        while let Some(event) = machine.next_event() {
            if let super::Event::Settle { landing, layers, .. } = event {
                machine.settled(landing, &layers, now);
            }
        }
    }
}

fn cache() -> Cache {
    let layer = |nth: u32| Layer {
        name: format!("layer.{nth}"),
        region: nth,
        granule: 1,
        pages: Pages::heads_first(8, 16, 0..2, 16).expect("a layer"),
    };
    Cache::new(Vec::new(), 0, 1, vec![layer(0), layer(1)]).expect("a cache")
}

fn origin() -> Origin {
    Origin {
        hand_off: "fetched".to_owned(),
        addresses: vec!["address".to_owned()],
        blocks: vec![4, 5],
        tokens: 20,
        lease: Lease {
            slot: 1,
            stamp: 2,
            lasts: LASTS,
        },
    }
}
