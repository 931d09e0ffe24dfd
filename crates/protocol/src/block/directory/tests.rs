//! Members without I/O: words go from one to another by hand.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::block::shelf::format::bound_sum;
use crate::block::{HitRule, Part, checksum};

/// Members that hear each other at once, but for those that are deaf.
struct Company {
    members: Vec<Directory>,
    deaf: Vec<usize>,
    said: BTreeMap<usize, usize>,
    events: Vec<(usize, Event)>,
    now: Time,
}

fn id(number: u32) -> BlockId {
    let digest = blake3::hash(&number.to_le_bytes());
    BlockId::from_bytes(digest.as_bytes()[..16].try_into().unwrap())
}

fn peer(of: usize) -> PeerId {
    PeerId(of as u32)
}

impl Company {
    fn of(count: usize) -> Company {
        let shape = Shape::new(vec![Part::new("kv", 8, HitRule::AllBlocks)]).unwrap();
        let member = |nth: usize| Directory::new(&format!("m{nth}"), Epoch(1), &shape, Settings::default(), 7);
        let mut company = Company {
            members: (0..count).map(member).collect(),
            deaf: Vec::new(),
            said: BTreeMap::new(),
            events: Vec::new(),
            now: Time::from_secs(1),
        };
        for here in 0..count {
            for there in (0..count).filter(|there| *there != here) {
                let (name, now) = (format!("m{there}"), company.now);
                company.members[here].on_met(peer(there), &name, Epoch(1), 0, now);
            }
        }
        company.talk();
        company
    }

    fn talk(&mut self) {
        loop {
            let mut any = false;
            for here in 0..self.members.len() {
                self.members[here].on_time(self.now);
                let mut words: Vec<(PeerId, Message)> = Vec::new();
                while let Some(act) = self.members[here].next_act() {
                    if let Act::Say { peer, message } = act {
                        words.push((peer, message));
                    } else if let Act::Move { loan, .. } = act {
                        self.members[here].on_moved(loan, Ok(()), self.now);
                    }
                }
                let owed: Vec<PeerId> = self.members[here].owed().collect();
                for to in owed {
                    words.extend(
                        self.members[here]
                            .next_published(to, self.now)
                            .map(|message| (to, message)),
                    );
                }
                any |= !words.is_empty();
                for (to, message) in words {
                    if self.deaf.contains(&(to.0 as usize)) || self.deaf.contains(&here) {
                        continue;
                    }
                    *self.said.entry(to.0 as usize).or_default() += 1;
                    self.members[to.0 as usize].on_message(peer(here), &message.encode(), self.now);
                }
                while let Some(event) = self.members[here].next_event() {
                    any = true;
                    self.events.push((here, event));
                }
            }
            if !any {
                return;
            }
        }
    }

    fn pass(&mut self, time: Time) {
        self.now = self.now.saturating_add(time);
        self.talk();
    }

    fn find(&mut self, here: usize, ids: &[BlockId]) -> Vec<Found> {
        self.events.clear();
        self.members[here].find(ids, self.now);
        self.talk();
        self.found(here)
    }

    fn found(&mut self, here: usize) -> Vec<Found> {
        let found = self.events.iter().find_map(|(at, event)| match event {
            Event::Found { found, .. } if *at == here => Some(found.clone()),
            _ => None,
        });
        found.unwrap_or_default()
    }
}

#[test]
fn what_one_has_the_others_find_and_what_is_gone_they_do_not() {
    let mut company = Company::of(3);
    (0..200).for_each(|number| company.members[0].set(id(number), 1, 1));
    company.talk();
    let ids: Vec<BlockId> = (0..200).map(id).collect();
    let found = company.find(1, &ids);
    assert!(
        found
            .iter()
            .all(|holders| holders.len() == 1 && holders[0].peer == peer(0))
    );
    (0..100).for_each(|number| company.members[0].set(id(number), 0, 0));
    company.talk();
    company.pass(Settings::default().fresh.saturating_add(Time::from_ms(1)));
    let found = company.find(1, &ids);
    assert!(found[..100].iter().all(Vec::is_empty) && found[100..].iter().all(|holders| holders.len() == 1));
}

#[test]
fn a_prefix_is_answered_by_few_words_at_once_and_again_by_none() {
    let mut company = Company::of(3);
    (0..128).for_each(|number| company.members[0].set(id(number), 1, 1));
    company.talk();
    let ids: Vec<BlockId> = (0..128).map(id).collect();
    company.said.clear();
    company.find(2, &ids);
    let asked: usize = company.said.values().sum();
    // One question to each other member at most, and its answer.
    assert!(asked <= 4, "{asked} words");
    company.said.clear();
    assert!(company.find(2, &ids).iter().all(|holders| holders.len() == 1));
    assert_eq!(company.said.values().sum::<usize>(), 0);
}

#[test]
fn blocks_are_spread_evenly_and_few_move_when_a_member_comes() {
    let seats: Vec<Seat> = (0..8)
        .map(|nth| Seat {
            digest: digest(&format!("m{nth}"), Epoch(9)),
            member: nth,
        })
        .collect();
    let (mut counts, mut moved) = ([0; 8], 0);
    for number in 0..8000 {
        let all = shard::placed(&seats, &id(number));
        all.iter().flatten().for_each(|seat| counts[seat.member as usize] += 1);
        let before = shard::placed(&seats[..7], &id(number));
        moved += all
            .iter()
            .flatten()
            .filter(|seat| !before.iter().flatten().any(|one| one == *seat))
            .count();
    }
    assert!(counts.iter().all(|count| (1700..2300).contains(count)), "{counts:?}");
    // Only what is placed with the new one.
    assert_eq!(moved, counts[7]);
}

#[test]
fn nobody_speaks_for_another_nor_of_the_dead() {
    let mut company = Company::of(3);
    company.members[0].set(id(1), 1, 1);
    company.talk();
    let now = company.now;
    assert_eq!(company.find(1, &[id(1)])[0].len(), 1);
    // Its session has ended here; whatever the third says of it does not count.
    company.members[1].on_lost(peer(0), now);
    assert!(company.find(1, &[id(1)])[0].is_empty());
    // An answer that nobody asked for is not heard.
    let answer = Message::Answer {
        ask: 77,
        holders: vec![digest("m2", Epoch(1))],
        found: vec![vec![Named {
            holder: 0,
            tiers: 1,
            parts: 1,
        }]],
    };
    company.members[1].on_message(peer(2), &answer.encode(), now);
    assert!(company.find(1, &[id(1)])[0].is_empty());
}

#[test]
fn entries_of_the_dead_are_swept_out_and_counted_out() {
    let mut company = Company::of(3);
    (0..5000).for_each(|number| company.members[0].set(id(number), 1, 1));
    company.talk();
    let kept = company.members[1].entries();
    assert!(kept > 2000, "{kept}");
    let now = company.now;
    company.members[1].on_lost(peer(0), now);
    company.talk();
    assert_eq!(company.members[1].entries(), 0);
    assert_eq!(company.members[1].entries.len(), 0);
}

#[test]
fn when_a_member_dies_the_others_are_told_what_it_knew() {
    let mut company = Company::of(4);
    (0..500).for_each(|number| company.members[0].set(id(number), 1, 1));
    company.talk();
    let now = company.now;
    for here in [0, 1, 2] {
        company.members[here].on_lost(peer(3), now);
    }
    company.deaf = vec![3];
    company.talk();
    let ids: Vec<BlockId> = (0..500).map(id).collect();
    for here in [1, 2] {
        assert!(company.find(here, &ids).iter().all(|holders| holders.len() == 1));
    }
}

#[test]
fn a_silent_member_is_asked_once_and_the_other_one_answers() {
    let mut company = Company::of(4);
    (0..300).for_each(|number| company.members[0].set(id(number), 1, 1));
    company.talk();
    company.deaf = vec![3];
    let ids: Vec<BlockId> = (0..300).map(id).collect();
    company.find(1, &ids);
    assert!(company.found(1).is_empty(), "somebody is waited for");
    company.pass(Settings::default().answer_within);
    assert!(company.found(1).iter().all(|holders| holders.len() == 1));
    // From now on nobody waits for it.
    let others: Vec<BlockId> = (1000..1300).map(id).collect();
    assert_eq!(company.find(1, &others).len(), 300);
    assert_eq!(company.members[1].counts().silent, 1);
}

#[test]
fn entries_are_bounded_and_what_is_taken_back_makes_room() {
    let mut company = Company::of(2);
    company.members[1].settings.entries = 100;
    (0..1000).for_each(|number| company.members[0].set(id(number), 1, 1));
    company.talk();
    assert_eq!(company.members[1].entries(), 100);
    assert_eq!(company.members[1].counts().left_out, 900);
    (0..1000).for_each(|number| company.members[0].set(id(number), 0, 0));
    company.talk();
    assert_eq!(company.members[1].entries(), 0);
}

/// Fetches one block from whoever has it; the bytes that land are these.
fn fetch(company: &mut Company, here: usize, block: u32, lends: &[(usize, &[u8])]) -> Result<Fetched, Missed> {
    company.events.clear();
    let wanted = Wanted {
        id: id(block),
        offset: 0,
        room: 8,
    };
    let (now, deadline) = (company.now, company.now.saturating_add(Time::from_secs(9)));
    let fetch = company.members[here].fetch(&[wanted], deadline, now);
    for _ in 0..40 {
        company.talk();
        for (at, event) in std::mem::take(&mut company.events) {
            match event {
                Event::Asked { peer, loan, ids } => {
                    let lent = |_: &BlockId| {
                        let (_, bytes) = lends.iter().find(|(holder, _)| *holder == at)?;
                        let lent = Lent {
                            region: 0,
                            tier: 0,
                            parts: 1,
                            length: 8,
                            offset: 0,
                            sequence: 5,
                            sum: bound_sum(&id(block), 5, 8, checksum(bytes)),
                        };
                        Some((lent, Token(at as u64)))
                    };
                    let blocks = ids.iter().map(lent).collect();
                    company.members[at].lend(peer, loan, blocks, company.now);
                }
                Event::Landed { loan, .. } => {
                    company.members[here].summed(loan, &[Some(checksum(b"the same"))], company.now);
                }
                Event::Fetched {
                    fetch: ended,
                    ended: outcome,
                    ..
                } if ended == fetch => return outcome,
                _ => {}
            }
        }
        company.now = company.now.saturating_add(Time::from_ms(50));
    }
    panic!("the fetch does not end");
}

#[test]
fn a_copy_that_does_not_sum_up_is_left_alone_and_the_next_one_is_read() {
    let mut company = Company::of(4);
    for holder in [1, 2] {
        company.members[holder].set(id(1), 1, 1);
    }
    company.talk();
    for (good, bad) in [(1, 2), (2, 1)] {
        let lends: [(usize, &[u8]); 2] = [(good, b"the same"), (bad, b"another!")];
        let fetched = fetch(&mut company, 0, 1, &lends).unwrap();
        assert_eq!(fetched.from, peer(good));
        let fetched = fetch(&mut company, 3, 1, &lends).unwrap();
        assert_eq!(fetched.from, peer(good));
        company.members.iter_mut().for_each(|member| member.bad.clear());
    }
    assert!(company.members[0].counts().wrong + company.members[3].counts().wrong > 0);
}

#[test]
fn a_refusal_and_a_silence_cost_a_try_each_and_what_is_nowhere_is_missed() {
    let mut company = Company::of(4);
    for holder in [1, 2, 3] {
        company.members[holder].set(id(1), 1, 1);
    }
    company.talk();
    company.members[0].settings.fresh = Time::ZERO;
    let fetched = fetch(&mut company, 0, 1, &[(3, b"the same")]).unwrap();
    assert_eq!(fetched.from, peer(3));
    assert_eq!(fetch(&mut company, 0, 1, &[]), Err(Missed::Refused));
    assert_eq!(fetch(&mut company, 0, 99, &[]), Err(Missed::Nowhere));
    assert_eq!(company.members[0].under_way(), 0);
}

#[test]
fn what_is_lent_is_given_back_by_a_word_by_time_and_with_the_session() {
    for way in 0..3 {
        let mut company = Company::of(2);
        company.events.clear();
        let now = company.now;
        let read = Message::Read {
            loan: 1,
            lasts: Time::from_ms(10),
            ids: vec![id(1)],
        };
        company.members[0].on_message(peer(1), &read.encode(), now);
        let lent = Lent {
            region: 0,
            tier: 0,
            parts: 1,
            length: 8,
            offset: 0,
            sequence: 0,
            sum: 0,
        };
        company.members[0].lend(peer(1), 1, vec![Some((lent, Token(4)))], now);
        assert_eq!(company.members[0].lent(), 1);
        match way {
            0 => company.members[0].on_message(peer(1), &Message::Done { loan: 1 }.encode(), now),
            1 => company.members[0].on_time(now.saturating_add(Time::from_ms(10))),
            _ => company.members[0].on_lost(peer(1), now),
        }
        let events: Vec<Event> = std::iter::from_fn(|| company.members[0].next_event()).collect();
        assert!(events.contains(&Event::Free { token: Token(4) }), "{way}: {events:?}");
        assert_eq!(company.members[0].lent(), 0);
    }
}

#[test]
fn one_member_cannot_have_more_than_so_many_loans() {
    let mut company = Company::of(2);
    for loan in 0..100 {
        let read = Message::Read {
            loan,
            lasts: Time::from_ms(10),
            ids: vec![id(1)],
        };
        let now = company.now;
        company.members[0].on_message(peer(1), &read.encode(), now);
    }
    assert_eq!(company.members[0].lent(), 64);
}

#[test]
fn stores_of_other_blocks_are_no_members() {
    let mut company = Company::of(2);
    let shape = Shape::new(vec![Part::new("kv", 16, HitRule::AllBlocks)]).unwrap();
    let mut other = Directory::new("other", Epoch(1), &shape, Settings::default(), 7);
    other.on_met(peer(0), "m0", Epoch(1), 0, company.now);
    let Some(Act::Say { message, .. }) = other.next_act() else {
        panic!("it says hello");
    };
    let now = company.now;
    company.members[0].on_met(PeerId(9), "other", Epoch(1), 0, now);
    company.members[0].on_message(PeerId(9), &message.encode(), now);
    assert_eq!(company.members[0].members().count(), 1);
    assert_eq!(company.members[0].counts().strange, 1);
}

proptest! {
    #[test]
    fn any_words_at_all(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        harness::messages(&bytes);
    }
    #[test]
    fn words_that_were_changed(nth in 0usize..8, at in 0usize..60, to in any::<u8>()) {
        let mut sample = harness::samples().swap_remove(nth);
        harness::messages(&sample);
        if let Some(byte) = sample.get_mut(at) {
            *byte = to;
        }
        harness::messages(&sample);
    }
}
