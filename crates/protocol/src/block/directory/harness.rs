//! Any bytes at all, said to a member that has something of everything under way.

use weft_plan::Time;

use super::super::{BlockId, HitRule, Part, Shape};
use super::{Act, Directory, Event, Lent, Message, Settings, Token, Wanted};
#[cfg(test)]
use super::{Named, Said};
use crate::region::Epoch;
use crate::transfer::PeerId;

const PEER: PeerId = PeerId(0);
const OTHER: PeerId = PeerId(1);

/// One of each kind.
#[cfg(test)]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    let ids = vec![id(1), id(2)];
    let lent = Lent {
        region: 0,
        tier: 0,
        parts: 1,
        length: 8,
        offset: 4096,
        sequence: 3,
        sum: 9,
    };
    let messages = [
        Message::Hello { shape: 7 },
        Message::Publish {
            entries: vec![Said {
                id: id(3),
                tiers: 1,
                parts: 1,
            }],
        },
        Message::Ask {
            ask: 1,
            ids: ids.clone(),
        },
        Message::Answer {
            ask: 3,
            holders: vec![5],
            found: vec![
                vec![Named {
                    holder: 0,
                    tiers: 1,
                    parts: 1,
                }],
                vec![],
            ],
        },
        Message::Read {
            loan: 1,
            lasts: Time::from_ms(3),
            ids: ids.clone(),
        },
        Message::Lent {
            loan: 4,
            blocks: vec![Some(lent), None],
        },
        Message::Done { loan: 1 },
        Message::Doubt { ids },
    ];
    messages.iter().map(Message::encode).collect()
}

/// What is said means the same when it is written again, and a member that hears it, and then goes on, ends everything that it had begun, keeps nothing for
/// anybody, and believes of members only what they may say.
pub(crate) fn messages(bytes: &[u8]) {
    if let Ok(message) = Message::decode(bytes) {
        assert_eq!(Message::decode(&message.encode()), Ok(message));
    }
    let mut now = Time::from_secs(1);
    let shape = Shape::new(vec![Part::new("kv", 8, HitRule::AllBlocks)]).expect("a shape");
    let settings = Settings {
        entries: 8,
        ..Settings::default()
    };
    let mut machine = Directory::new("here", Epoch(1), &shape, settings, 0);
    let mut tokens = std::collections::BTreeSet::new();
    let mut given = 0;
    for (peer, name) in [(PEER, "peer"), (OTHER, "other")] {
        machine.on_met(peer, name, Epoch(2), 0, now);
        let shape = machine.shape;
        machine.on_message(peer, &Message::Hello { shape }.encode(), now);
    }
    (0..6).for_each(|number| machine.set(id(number), 1, 1));
    turn(&mut machine, &mut tokens, &mut given, now);
    let _ = machine.find(&[id(7), id(8)], now);
    let wanted = |number| Wanted {
        id: id(number),
        offset: 8 * u64::from(number),
        room: 8,
    };
    let fetch = machine.fetch(&[wanted(9), wanted(10)], now.saturating_add(Time::from_secs(5)), now);
    for _ in 0..3 {
        machine.on_message(PEER, bytes, now);
        turn(&mut machine, &mut tokens, &mut given, now);
        machine.on_message(OTHER, bytes, now);
    }
    assert!(machine.members().all(|member| member.entries <= 8));
    for _ in 0..8 {
        now = now.saturating_add(Time::from_secs(20));
        turn(&mut machine, &mut tokens, &mut given, now);
    }
    assert!(!machine.is_fetching(fetch));
    assert_eq!((machine.under_way(), machine.lent(), tokens.len()), (0, 0, 0));
    machine.on_lost(PEER, now);
    machine.on_lost(OTHER, now);
    for _ in 0..300 {
        machine.on_time(now);
    }
    assert_eq!(machine.entries(), 0);
}

/// Does what the machine wants, every other move in vain.
fn turn(machine: &mut Directory, tokens: &mut std::collections::BTreeSet<Token>, given: &mut u64, now: Time) {
    loop {
        machine.on_time(now);
        let mut any = false;
        while let Some(act) = machine.next_act() {
            any = true;
            match act {
                Act::Say { message, .. } => {
                    assert_eq!(Message::decode(&message.encode()), Ok(message));
                }
                Act::Move { loan, blocks, .. } => {
                    assert!(blocks.iter().all(|(_, lent)| lent.length <= 8));
                    let ended = if loan.0 % 2 == 1 { Err(false) } else { Ok(()) };
                    machine.on_moved(loan, ended, now);
                }
            }
        }
        for peer in [PEER, OTHER] {
            while machine.next_published(peer, now).is_some() {
                any = true;
            }
        }
        while let Some(event) = machine.next_event() {
            any = true;
            match event {
                Event::Landed { loan, blocks, .. } => machine.summed(loan, &vec![Some(0); blocks.len()], now),
                Event::Asked { peer, loan, ids } => {
                    let lend = |id: &BlockId| {
                        machine.here(id)?;
                        *given += 1;
                        tokens.insert(Token(*given));
                        let lent = Lent {
                            region: 0,
                            tier: 0,
                            parts: 1,
                            length: 8,
                            offset: 0,
                            sequence: 0,
                            sum: 0,
                        };
                        Some((lent, Token(*given)))
                    };
                    let blocks = ids.iter().map(lend).collect();
                    machine.lend(peer, loan, blocks, now);
                }
                Event::Free { token } => assert!(tokens.remove(&token), "given back once"),
                _ => {}
            }
        }
        if !any {
            return;
        }
    }
}

fn id(number: u8) -> BlockId {
    BlockId::from_bytes([number; 16])
}
