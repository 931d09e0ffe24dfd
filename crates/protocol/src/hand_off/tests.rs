mod bounds;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use weft_plan::pages::Pages;

use super::*;
use crate::agent::ConnectError;
use crate::seeded::Seeded;

const LASTS: Time = Time::from_secs(60);
const HEADS: u64 = 4;

/// One rank of an engine with two layers: it holds its share of the heads.
fn cache(rank: u32, ranks: u32, block_tokens: u64) -> Cache {
    let heads = HEADS / u64::from(ranks);
    let heads = u64::from(rank) * heads..(u64::from(rank) + 1) * heads;
    let layer = |nth: u32| Layer {
        name: format!("layer.{nth}"),
        region: nth,
        granule: 1,
        pages: Pages::heads_first(32, block_tokens, heads.clone(), 16).unwrap(),
    };
    let meaning = vec![("model".to_owned(), "tiny".to_owned())];
    Cache::new(meaning, rank, ranks, vec![layer(0), layer(1)]).unwrap()
}

/// Machines that hear each other, with moves that end when the test says so.
struct Net {
    machines: Vec<HandOffs>,
    now: Time,
    /// Words on their way, by who says them to whom.
    said: VecDeque<(usize, usize, Vec<u8>)>,
    /// Sessions: both ends know each other by the other's place.
    sessions: BTreeSet<(usize, usize)>,
    moves: Vec<(usize, Move)>,
    cancelled: BTreeSet<(usize, MoveId)>,
    words: BTreeMap<(usize, u32), u64>,
    events: Vec<(usize, Event)>,
    /// Whoever is there cannot be reached.
    unreachable: BTreeSet<usize>,
}

impl Net {
    fn new(machines: Vec<HandOffs>) -> Net {
        Net {
            machines,
            now: Time::from_secs(1),
            said: VecDeque::new(),
            sessions: BTreeSet::new(),
            moves: Vec::new(),
            cancelled: BTreeSet::new(),
            words: BTreeMap::new(),
            events: Vec::new(),
            unreachable: BTreeSet::new(),
        }
    }

    /// Carries out what the machines want, moves and words excepted.
    fn act(&mut self) {
        for at in 0..self.machines.len() {
            while let Some(act) = self.machines[at].next_act() {
                self.carry_out(at, act);
            }
            while let Some(event) = self.machines[at].next_event() {
                self.events.push((at, event));
            }
        }
    }

    fn carry_out(&mut self, at: usize, act: Act) {
        let now = self.now;
        match act {
            Act::Connect { address, .. } => {
                let to: usize = address.parse().unwrap();
                if self.unreachable.contains(&to) {
                    self.machines[at].on_connecting(&address, Err(ConnectError::NoAddress), now);
                    return;
                }
                self.machines[at].on_connecting(&address, Ok(PeerId(to as u32)), now);
                self.connect(at, to);
            }
            Act::Say { peer, message } => {
                let to = peer.0 as usize;
                if self.sessions.contains(&(at, to)) {
                    self.said.push_back((at, to, message.encode()));
                }
            }
            Act::Move(wanted) => self.moves.push((at, wanted)),
            Act::Cancel { id } => drop(self.cancelled.insert((at, id))),
            Act::Land { landing, .. } => self.machines[at].on_made(landing, true, now),
            Act::Release { landing } => self.machines[at].on_released(landing),
            Act::Word { slot, value } => drop(self.words.insert((at, slot), value)),
        }
    }

    fn connect(&mut self, at: usize, to: usize) {
        self.sessions.insert((at, to));
        self.sessions.insert((to, at));
        self.machines[at].on_connected(PeerId(to as u32), &format!("m{to}"), self.now);
        self.machines[to].on_connected(PeerId(at as u32), &format!("m{at}"), self.now);
    }

    fn cut(&mut self, at: usize, to: usize) {
        if !self.sessions.remove(&(at, to)) {
            return;
        }
        self.sessions.remove(&(to, at));
        self.said
            .retain(|(from, into, _)| (*from, *into) != (at, to) && (*from, *into) != (to, at));
        self.machines[at].on_lost(PeerId(to as u32), self.now);
        self.machines[to].on_lost(PeerId(at as u32), self.now);
        self.act();
    }

    fn hear(&mut self) -> bool {
        let Some((from, to, words)) = self.said.pop_front() else {
            return false;
        };
        self.machines[to].on_message(PeerId(from as u32), &words, self.now);
        self.act();
        true
    }

    fn hear_all(&mut self) {
        self.act();
        while self.hear() {}
    }

    fn end_move(&mut self, nth: usize, well: bool) {
        let (at, wanted) = self.moves.remove(nth);
        let to = wanted.peer.0 as usize;
        let word = match (&wanted.legs[0].near, &wanted.legs[0].far) {
            (Near::Word(_), Far::Leases) => {
                let offset = wanted.legs[0].far_spans.runs()[0].offset;
                Some(self.words.get(&(to, (offset / 8) as u32)).copied().unwrap_or(0))
            }
            _ => None,
        };
        let bytes = wanted.legs.iter().map(|leg| leg.near_spans.bytes()).sum();
        let outcome = match well && !self.cancelled.contains(&(at, wanted.id)) {
            true => Ok(Moved {
                bytes,
                way: "test",
                word,
            }),
            false => Err(crate::error::Failure::Cancelled.into()),
        };
        self.machines[at].on_moved(wanted.id, outcome, self.now);
        self.act();
    }

    fn end_moves(&mut self) {
        self.hear_all();
        while !self.moves.is_empty() {
            self.end_move(0, true);
            self.hear_all();
        }
    }

    fn wait(&mut self, time: Time) {
        let until = self.now.saturating_add(time);
        loop {
            let next = self.machines.iter().filter_map(HandOffs::next_timeout).min();
            let Some(next) = next.filter(|next| *next <= until) else {
                break;
            };
            self.now = self.now.max(next);
            let now = self.now;
            self.machines.iter_mut().for_each(|machine| machine.on_time(now));
            self.hear_all();
        }
        self.now = until;
    }

    fn take_events(&mut self) -> Vec<(usize, Event)> {
        std::mem::take(&mut self.events)
    }

    fn settle(&mut self) {
        for (at, event) in self.take_events() {
            match event {
                Event::Settle { landing, layers, .. } => self.machines[at].settled(landing, &layers, self.now),
                other => self.events.push((at, other)),
            }
        }
        self.hear_all();
    }

    fn offer(&mut self, at: &[usize], name: &str) -> Origin {
        let mut slots = Slots::new(7);
        let lease = slots.take(LASTS, 0).unwrap();
        for at in at {
            self.machines[*at].offer(name, Some(lease), LASTS, self.now).unwrap();
        }
        self.hear_all();
        Origin {
            hand_off: name.to_owned(),
            addresses: at.iter().map(usize::to_string).collect(),
            blocks: vec![3, 9, 4],
            tokens: 40,
            lease,
        }
    }
}

fn machine(rank: u32, ranks: u32) -> HandOffs {
    HandOffs::new(cache(rank, ranks, 16), Settings::default(), 100)
}

fn wanted() -> Wanted {
    Wanted {
        blocks: vec![1, 2, 5],
        tokens: 0..40,
        prompt_tokens: 40,
        digest: [7; 32],
    }
}

fn prompt() -> Prompt {
    Prompt {
        blocks: vec![3, 9, 4],
        tokens: 40,
        digest: [7; 32],
    }
}

fn ended(events: &[(usize, Event)], at: usize) -> Option<Result<HandedOff, Reason>> {
    events.iter().find_map(|(who, event)| match event {
        Event::Ended { outcome, .. } if *who == at => Some(outcome.clone()),
        _ => None,
    })
}

fn free(events: &[(usize, Event)], at: usize) -> Option<Over> {
    events.iter().find_map(|(who, event)| match event {
        Event::Free { why, .. } if *who == at => Some(*why),
        _ => None,
    })
}

#[test]
fn what_is_offered_is_fetched_and_given_back() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    let origin = net.offer(&[0], "one");
    net.machines[1].want(origin, 1, net.now).unwrap();
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.end_moves();
    let events = net.take_events();
    let bytes = 2 * 2 * 40 * 4 * 16;
    assert_eq!(ended(&events, 1).unwrap().unwrap().bytes, bytes);
    assert_eq!(free(&events, 0), Some(Over::Served));
    assert_eq!((net.machines[0].held(), net.machines[1].wanted()), (0, 0));
}

#[test]
fn the_word_after_the_last_byte_is_believed() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    let origin = net.offer(&[0], "one");
    net.machines[1].want(origin, 1, net.now).unwrap();
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.hear_all();
    // While it reads, the blocks are given to somebody else.
    net.machines[0].stop("one", net.now).unwrap();
    net.act();
    assert_eq!(free(&net.take_events(), 0), Some(Over::Stopped));
    net.end_moves();
    assert_eq!(ended(&net.take_events(), 1), Some(Err(Reason::GivenUp)));
}

#[test]
fn a_reader_that_waits_keeps_the_lease_and_one_that_is_silent_does_not() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    let origin = net.offer(&[0], "one");
    net.machines[1].want(origin, 1, net.now).unwrap();
    net.hear_all();
    net.wait(Time::from_secs(600));
    assert_eq!(free(&net.take_events(), 0), None);
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.end_moves();
    assert!(ended(&net.take_events(), 1).unwrap().is_ok());

    net.offer(&[0], "two");
    net.wait(Time::from_secs(61));
    assert_eq!(free(&net.take_events(), 0), Some(Over::Expired));
}

#[test]
fn that_a_reader_is_done_is_said_again_over_the_next_session() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 2), machine(1, 2)]);
    let origin = net.offer(&[0], "one");
    for at in [1, 2] {
        net.machines[at].want(origin.clone(), 2, net.now).unwrap();
        net.machines[at].fetch("one", wanted(), net.now).unwrap();
    }
    net.hear_all();
    while !net.moves.is_empty() {
        net.end_move(0, true);
    }
    // Both have it, and the words of one of them are lost with its session.
    assert!(ended(&net.events, 1).unwrap().is_ok() && ended(&net.events, 2).unwrap().is_ok());
    net.cut(2, 0);
    net.hear_all();
    net.wait(Time::from_secs(1));
    assert_eq!(free(&net.take_events(), 0), Some(Over::Served));
}

#[test]
fn heads_come_from_the_ranks_that_have_them() {
    for (there, here) in [(1u32, 2u32), (2, 1), (4, 2), (2, 4)] {
        let holders = (0..there).map(|rank| machine(rank, there));
        let readers = (0..here).map(|rank| machine(rank, here));
        let mut net = Net::new(holders.chain(readers).collect());
        let origin = net.offer(&(0..there as usize).collect::<Vec<_>>(), "one");
        for at in there as usize..(there + here) as usize {
            net.machines[at].want(origin.clone(), here, net.now).unwrap();
            net.machines[at].fetch("one", wanted(), net.now).unwrap();
        }
        net.end_moves();
        let events = net.take_events();
        let outcomes = (there as usize..(there + here) as usize).map(|at| ended(&events, at).unwrap().unwrap().bytes);
        assert_eq!(outcomes.sum::<u64>(), 2 * 2 * 40 * 4 * 16, "{there} to {here}");
        for at in 0..there as usize {
            assert_eq!(free(&events, at), Some(Over::Served), "{there} to {here}");
        }
    }
}

#[test]
fn layers_are_pushed_as_they_are_computed() {
    let mut net = Net::new(vec![machine(0, 2), machine(1, 2), machine(0, 1)]);
    let addresses = vec!["0".to_owned(), "1".to_owned()];
    net.machines[2].want_pushed("one", addresses, 1, net.now).unwrap();
    net.machines[2].fetch("one", wanted(), net.now).unwrap();
    net.hear_all();
    assert!(net.moves.is_empty());
    for at in [0, 1] {
        net.machines[at].compute("one", prompt(), net.now).unwrap();
        net.machines[at].computed("one", Some(0), 16, net.now);
    }
    net.act();
    assert_eq!(net.moves.len(), 2);
    for at in [0, 1] {
        net.machines[at].computed("one", None, 40, net.now);
        net.machines[at].offer("one", None, LASTS, net.now).unwrap();
    }
    net.end_moves();
    net.settle();
    let events = net.take_events();
    assert_eq!(ended(&events, 2).unwrap().unwrap().bytes, 2 * 2 * 40 * 4 * 16);
    assert_eq!(
        (free(&events, 0), free(&events, 1)),
        (Some(Over::Served), Some(Over::Served))
    );
}

#[test]
fn blocks_are_free_after_the_last_write_from_them() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    net.machines[1]
        .want_pushed("one", vec!["0".to_owned()], 1, net.now)
        .unwrap();
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.machines[0].compute("one", prompt(), net.now).unwrap();
    net.hear_all();
    net.machines[0].computed("one", None, 40, net.now);
    net.act();
    assert_eq!(net.moves.len(), 1);
    net.machines[0].stop("one", net.now).unwrap();
    net.hear_all();
    assert_eq!(free(&net.events, 0), None);
    assert!(net.cancelled.contains(&(0, net.moves[0].1.id)));
    net.end_move(0, false);
    let events = net.take_events();
    assert_eq!(free(&events, 0), Some(Over::Stopped));
    assert_eq!(
        ended(&events, 1),
        Some(Err(Reason::Refused {
            peer: "m0".to_owned(),
            why: Over::Stopped
        }))
    );
}

#[test]
fn a_preempted_prompt_is_fenced_and_sent_again() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    net.machines[1]
        .want_pushed("one", vec!["0".to_owned()], 1, net.now)
        .unwrap();
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.machines[0].compute("one", prompt(), net.now).unwrap();
    net.hear_all();
    net.machines[0].computed("one", None, 16, net.now);
    net.act();
    net.machines[0].preempt("one");
    net.act();
    assert!(net.take_events().is_empty());
    net.end_move(0, false);
    assert_eq!(
        net.take_events(),
        [(
            0,
            Event::Fenced {
                hand_off: "one".to_owned()
            }
        )]
    );
    net.machines[0].compute("one", prompt(), net.now).unwrap();
    net.machines[0].computed("one", None, 40, net.now);
    net.end_moves();
    net.settle();
    assert!(ended(&net.take_events(), 1).unwrap().is_ok());
}

#[test]
fn what_cannot_be_copied_to_its_blocks_fails_the_hand_off_and_gives_its_place_back() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    net.machines[1]
        .want_pushed("one", vec!["0".to_owned()], 1, net.now)
        .unwrap();
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.hear_all();
    net.machines[0].compute("one", prompt(), net.now).unwrap();
    net.machines[0].computed("one", None, 40, net.now);
    net.end_moves();
    let mut told = Vec::new();
    for (at, event) in net.take_events() {
        match event {
            Event::Settle { landing, layers, .. } => {
                net.machines[at].unsettled(landing, &layers, Refusal::NoMemory, net.now);
            }
            other => told.push((at, other)),
        }
    }
    net.hear_all();
    told.extend(net.take_events());
    assert_eq!(ended(&told, 1), Some(Err(Reason::Unsettled(Refusal::NoMemory))));
    assert_eq!((net.machines[1].wanted(), net.machines[1].landing_bytes()), (0, 0));
}

#[test]
fn whoever_asks_for_another_prompt_or_too_late_is_told_why() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    net.machines[0]
        .compute(
            "one",
            Prompt {
                digest: [8; 32],
                ..prompt()
            },
            net.now,
        )
        .unwrap();
    net.machines[1]
        .want_pushed("one", vec!["0".to_owned()], 1, net.now)
        .unwrap();
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.hear_all();
    let refused = |why| {
        Some(Err(Reason::Refused {
            peer: "m0".to_owned(),
            why,
        }))
    };
    assert_eq!(ended(&net.take_events(), 1), refused(Over::OtherPrompt));
    net.machines[0].stop("two", net.now).unwrap();
    net.machines[1]
        .want_pushed("two", vec!["0".to_owned()], 1, net.now)
        .unwrap();
    net.machines[1].fetch("two", wanted(), net.now).unwrap();
    net.hear_all();
    assert_eq!(ended(&net.take_events(), 1), refused(Over::Stopped));
}

#[test]
fn whoever_cannot_be_reached_or_does_not_fit_is_named() {
    let word = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let other = Cache::new(
        vec![word("model", "large"), word("packing", "tight")],
        0,
        1,
        cache(0, 1, 16).layers().to_vec(),
    )
    .unwrap();
    let mut net = Net::new(vec![machine(0, 1), HandOffs::new(other, Settings::default(), 0)]);
    let origin = net.offer(&[0], "one");
    net.machines[1].want(origin.clone(), 1, net.now).unwrap();
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.hear_all();
    let reason = ended(&net.take_events(), 1).unwrap().unwrap_err();
    assert_eq!(
        reason.to_string(),
        "m0 does not fit: model is \"large\" here and \"tiny\" there; packing is \"tight\" here and \"\" there"
    );

    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    net.unreachable.insert(0);
    net.machines[1].want(origin, 1, net.now).unwrap();
    net.hear_all();
    net.wait(Time::from_secs(1));
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.wait(Time::from_secs(1));
    assert!(matches!(
        ended(&net.take_events(), 1),
        Some(Err(Reason::Unreachable { .. }))
    ));
}

#[test]
fn a_name_is_used_once() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    let origin = net.offer(&[0], "one");
    net.machines[1].want(origin.clone(), 1, net.now).unwrap();
    assert_eq!(net.machines[1].want(origin.clone(), 1, net.now), Err(CallError::Used));
    net.machines[1].leave("one", net.now);
    net.hear_all();
    assert_eq!(ended(&net.take_events(), 1), Some(Err(Reason::Aborted)));
    assert_eq!(net.machines[1].want(origin, 1, net.now), Err(CallError::Used));
    assert_eq!(net.machines[0].offer("one", None, LASTS, net.now), Err(CallError::Used));
}

#[test]
fn names_are_forgotten_with_time_and_bounded() {
    let mut names = Names::default();
    names.take("one", LASTS, Time::ZERO).unwrap();
    let just_before = LASTS.saturating_sub(Time::from_ns(1));
    assert_eq!(names.take("one", LASTS, just_before), Err(CallError::Used));
    names.take("one", LASTS, LASTS).unwrap();
    for nth in 0..2 * NAMES_MAX {
        names.take(&format!("{nth}"), LASTS, LASTS).unwrap();
    }
    assert_eq!((names.until.len(), names.order.len()), (NAMES_MAX, NAMES_MAX));
}

/// Whoever decides for all workers has told readers of the lease by then.
#[test]
fn a_lease_that_a_worker_refuses_is_over_for_its_readers() {
    let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
    net.machines[0].stop("one", net.now).unwrap();
    let mut slots = Slots::new(1000);
    let lease = slots.take(LASTS, 0).unwrap();
    assert_eq!(
        net.machines[0].offer("one", Some(lease), LASTS, net.now),
        Err(CallError::Used)
    );
    let origin = Origin {
        hand_off: "one".to_owned(),
        addresses: vec!["0".to_owned()],
        blocks: vec![3, 9, 4],
        tokens: 40,
        lease,
    };
    net.machines[1].want(origin, 1, net.now).unwrap();
    net.machines[1].fetch("one", wanted(), net.now).unwrap();
    net.end_moves();
    assert_eq!(ended(&net.take_events(), 1), Some(Err(Reason::GivenUp)));
}

#[test]
fn landings_wait_for_their_turn() {
    let small = Settings {
        landing_bytes: 1,
        ..Settings::default()
    };
    let mut net = Net::new(vec![machine(0, 1), HandOffs::new(cache(0, 1, 16), small, 0)]);
    for name in ["one", "two"] {
        net.machines[1]
            .want_pushed(name, vec!["0".to_owned()], 1, net.now)
            .unwrap();
        net.machines[1].fetch(name, wanted(), net.now).unwrap();
        net.machines[0].compute(name, prompt(), net.now).unwrap();
        net.machines[0].computed(name, None, 40, net.now);
    }
    net.hear_all();
    assert_eq!(net.moves.len(), 1);
    net.end_moves();
    net.settle();
    net.end_moves();
    net.settle();
    assert_eq!(
        net.events
            .iter()
            .filter(|(_, event)| matches!(event, Event::Ended { outcome: Ok(_), .. }))
            .count(),
        2
    );
    assert_eq!(net.machines[1].landing_bytes(), 0);
}

proptest! {
    /// Whatever happens in whatever order: every want ends once; what was read and believed was not given up before; nothing is free under a write;
    /// and when all leases are over, nothing is held.
    #[test]
    fn whatever_happens_every_hand_off_ends(seed: u64) {
        let mut chance = Seeded::new(seed);
        let mut net = Net::new(vec![machine(0, 2), machine(1, 2), machine(0, 1), machine(0, 1)]);
        let (mut slots, mut wants, mut begun) = (Slots::new(0), BTreeMap::<String, usize>::new(), BTreeSet::new());
        // Hand-offs that were read when their blocks might have been somebody else's.
        let mut spoiled: BTreeSet<String> = BTreeSet::new();
        let mut freed: BTreeSet<(usize, String)> = BTreeSet::new();
        let mut ends: BTreeMap<String, Vec<Result<HandedOff, Reason>>> = BTreeMap::new();
        for _ in 0..120 {
            let name = format!("h{}", chance.below(8));
            let now = net.now;
            let who = 2 + chance.below(2) as usize;
            match chance.below(12) {
                0 => {
                    let lease = slots.take(LASTS, 0).unwrap();
                    let offered = [0, 1].map(|at| net.machines[at].offer(&name, Some(lease), LASTS, now).is_ok());
                    if offered == [true, true] && !wants.contains_key(&name) {
                        let addresses = vec!["0".to_owned(), "1".to_owned()];
                        let origin = Origin { hand_off: name.clone(), addresses, blocks: vec![3, 9, 4], tokens: 40, lease };
                        if net.machines[who].want(origin, 1, now).is_ok() {
                            wants.insert(name, who);
                        }
                    }
                }
                1 => {
                    let addresses = vec!["0".to_owned(), "1".to_owned()];
                    if !wants.contains_key(&name) && net.machines[who].want_pushed(&name, addresses, 1, now).is_ok() {
                        wants.insert(name, who);
                    }
                }
                2 | 3 => {
                    if let Some(who) = wants.get(&name).copied() && net.machines[who].fetch(&name, wanted(), now).is_ok() {
                        begun.insert(name);
                    }
                }
                4 => {
                    // Refused where it is over already.
                    let _ = [0, 1].map(|at| net.machines[at].compute(&name, prompt(), now));
                }
                5 => {
                    let upto = [16, 32, 40][chance.below(3) as usize];
                    [0, 1].iter().for_each(|at| net.machines[*at].computed(&name, None, upto, now));
                }
                6 => net.machines[chance.below(2) as usize].preempt(&name),
                7 if chance.chance(0.3) => net.machines[chance.below(2) as usize].stop(&name, now).unwrap_or(()),
                8 if chance.chance(0.3) => net.machines[who].leave(&name, now),
                9 => net.cut(who, chance.below(2) as usize),
                10 => net.wait(Time::from_ms(1 << chance.below(16))),
                _ if !net.moves.is_empty() => {
                    let nth = chance.below(net.moves.len() as u64) as usize;
                    let (at, wanted) = &net.moves[nth];
                    let to = wanted.peer.0 as usize;
                    if let Some(machine::Purpose::Fetch { hand_off, .. }) = net.machines[*at].moves.get(&wanted.id)
                        && freed.contains(&(to, hand_off.clone()))
                    {
                        spoiled.insert(hand_off.clone());
                    }
                    net.end_move(nth, chance.chance(0.8));
                }
                _ => {}
            }
            net.act();
            for _ in 0..chance.below(6) {
                net.hear();
            }
            for (at, event) in net.take_events() {
                match event {
                    Event::Settle { landing, layers, .. } => net.machines[at].settled(landing, &layers, net.now),
                    Event::Free { hand_off, .. } => {
                        let under = |(who, wanted): &(usize, Move)| {
                            *who == at && wanted.direction == Direction::Write && net.machines[at].moves.get(&wanted.id).is_some_and(
                                |purpose| matches!(purpose, machine::Purpose::Push { hand_off: of, .. } if *of == hand_off))
                        };
                        prop_assert!(!net.moves.iter().any(under), "free under a write");
                        prop_assert!(freed.insert((at, hand_off)), "free twice");
                    }
                    Event::Ended { hand_off, outcome } => ends.entry(hand_off).or_default().push(outcome),
                    Event::Fenced { .. } => {}
                }
            }
            for (name, outcomes) in &ends {
                prop_assert_eq!(outcomes.len(), 1);
                prop_assert!(outcomes[0].is_err() || begun.contains(name));
                prop_assert!(outcomes[0].is_err() || !spoiled.contains(name), "bytes of somebody else were believed");
            }
        }
        // Everything that was begun ends, and everything held ends with its lease.
        let names: Vec<_> = wants.iter().map(|(name, who)| (name.clone(), *who)).collect();
        for (name, who) in names {
            let now = net.now;
            if !begun.contains(&name) {
                net.machines[who].leave(&name, now);
            }
        }
        for _ in 0..8 {
            net.wait(Time::from_secs(120));
            while !net.moves.is_empty() {
                net.end_move(0, true);
            }
            for (at, event) in net.take_events() {
                match event {
                    Event::Settle { landing, layers, .. } => net.machines[at].settled(landing, &layers, net.now),
                    Event::Ended { hand_off, outcome } => ends.entry(hand_off).or_default().push(outcome),
                    _ => {}
                }
            }
        }
        for name in wants.keys() {
            prop_assert_eq!(ends.get(name).map(Vec::len), Some(1), "{} of {:?}", name, wants);
        }
        for at in [2, 3] {
            prop_assert_eq!((net.machines[at].wanted(), net.machines[at].landing_bytes()), (0, 0));
        }
        let computing = |held: &holder::Held| held.is_ours();
        for at in [0, 1] {
            // What is computed and neither offered nor stopped belongs to its engine still.
            let now = net.now;
            let names: Vec<String> = net.machines[at].held.iter().filter(|(_, held)| computing(held)).map(|(name, _)| name.clone()).collect();
            names.iter().for_each(|name| net.machines[at].stop(name, now).unwrap_or(()));
            net.act();
            while !net.moves.is_empty() {
                net.end_move(0, false);
            }
            prop_assert_eq!(net.machines[at].held(), 0);
        }
    }

    #[test]
    fn noise_changes_nothing(noise in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..9) {
        let mut net = Net::new(vec![machine(0, 1), machine(0, 1)]);
        net.connect(0, 1);
        let mut words = vec![1, kind];
        words.extend(&noise);
        net.machines[0].on_message(PeerId(1), &words, net.now);
        net.act();
        prop_assert_eq!(net.machines[0].held(), 0);
    }

    #[test]
    fn messages_and_origins_survive_the_wire(
        name in "[a-z]{1,64}", landing: u64, layers in proptest::collection::btree_set(0u32..1024, 0..64), upto: u64, blocks in proptest::collection::vec(any::<u64>(), 0..50),
    ) {
        let layers: Vec<u32> = layers.into_iter().collect();
        let shares = vec![AskedShare { heads: 1..3, layers: vec![0, 1, 7] }];
        for message in [
            Message::Describe,
            Message::Cache(cache(1, 2, 8)),
            Message::Renew { hand_off: name.clone() },
            Message::Done { hand_off: name.clone(), readers: 3 },
            Message::Heard { hand_off: name.clone() },
            Message::Landed { landing, layers, upto, bytes: 9, way: "tcp".to_owned() },
            Message::Failed { landing, why: Over::Expired },
            Message::Reserve(Reserve {
                hand_off: name.clone(), landing, tokens: 3..40, prompt_tokens: 41, digest: [9; 32], blocks: 4, readers: 2, lasts: LASTS, shares,
            }),
        ] {
            prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
        let lease = Lease { slot: 3, stamp: 8, lasts: LASTS };
        let origin = Origin { hand_off: name, addresses: vec!["tcp:1.2.3.4:5".to_owned()], blocks, tokens: 7, lease };
        prop_assert_eq!(Origin::decode(&origin.encode()), Ok(origin));
    }
}
