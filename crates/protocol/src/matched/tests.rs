//! The two ends of a channel against a model of it, by seeds; and channels of two agents over loopback.

mod agents;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::incoming::Incoming;
use super::*;
use crate::error::Loss;
use crate::seeded::Seeded;

const EAGER: u64 = 1024;
const LONGEST: u64 = 8192;

/// Two ends, and all that is between them.
struct Pair {
    chance: Seeded,
    out: Outgoing,
    inc: Incoming,
    /// Words under way, in order; an eager one with who it is.
    to_receiver: VecDeque<(Message, u64, u64)>,
    to_sender: VecDeque<Message>,
    writes: Vec<(u64, Receive, bool)>,
    arrivals: Vec<u32>,
    /// What was sent and received, by tag and in order.
    sends: BTreeMap<i32, Vec<(u64, u64)>>,
    posted: BTreeMap<i32, Vec<(u64, usize)>>,
    lens: BTreeMap<u64, u64>,
    done: BTreeSet<u64>,
    /// What lies in the memory of each receive.
    memory: BTreeMap<(u64, usize), u64>,
    complete: BTreeMap<u64, Box<[u64]>>,
    numbers: u32,
    awaited: BTreeSet<u32>,
    lost: usize,
}

impl Pair {
    fn new(seed: u64) -> Pair {
        let mut chance = Seeded::new(seed);
        let tells = match chance.chance(0.5) {
            true => Tells::ByArrival,
            false => Tells::Afterwards,
        };
        Pair {
            chance,
            out: Outgoing::new(EAGER, tells),
            inc: Incoming::default(),
            to_receiver: VecDeque::new(),
            to_sender: VecDeque::new(),
            writes: Vec::new(),
            arrivals: Vec::new(),
            sends: BTreeMap::new(),
            posted: BTreeMap::new(),
            lens: BTreeMap::new(),
            done: BTreeSet::new(),
            memory: BTreeMap::new(),
            complete: BTreeMap::new(),
            numbers: 0,
            awaited: BTreeSet::new(),
            lost: 0,
        }
    }

    fn tag(&mut self) -> i32 {
        [-1, 0, 7][self.chance.below(3) as usize]
    }

    fn send(&mut self) {
        let (id, tag) = (self.lens.len() as u64, self.tag());
        // So long that it can say who it is.
        let len = match self.chance.chance(0.5) {
            true => 8 + self.chance.below(EAGER - 7),
            false => 8 + self.chance.below(LONGEST - 7),
        };
        self.lens.insert(id, len);
        self.sends.entry(tag).or_default().push((id, len));
        self.out.send(id, tag, len).expect("a send");
        self.drain();
    }

    fn receive(&mut self) {
        let group = self.posted.values().map(Vec::len).sum::<usize>() as u64 + 1_000_000;
        let count = 1 + self.chance.below(4) as usize;
        let mut landings = Vec::new();
        for nth in 0..count {
            let tag = self.tag();
            self.posted.entry(tag).or_default().push((group, nth));
            landings.push(Landing {
                tag,
                len: LONGEST,
                region: (group - 1_000_000) as u32,
                offset: nth as u64,
            });
        }
        let numbers = &mut self.numbers;
        let posted = self.inc.receive(group, &landings, || {
            *numbers += 1;
            *numbers
        });
        let posted = posted.expect("receives");
        self.awaited
            .extend(posted.receives.iter().map(|receive| receive.number));
        for (nth, bytes) in posted.here {
            let id = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            self.memory.insert((group, nth), id);
        }
        self.to_sender.push_back(Message::Posted(posted.receives));
        self.settle();
    }

    fn drain(&mut self) {
        while let Some(wanted) = self.out.next_wanted() {
            match wanted {
                Wanted::Eager { id, tag, nth } => {
                    let len = self.lens[&id];
                    self.to_receiver.push_back((Message::Eager { tag, nth }, id, len));
                    assert!(self.done.insert(id));
                }
                Wanted::Say(message) => self.to_receiver.push_back((message, 0, 0)),
                Wanted::Write { id, to, arrives } => self.writes.push((id, to, arrives)),
                Wanted::Done { id, len } => {
                    assert_eq!(len, self.lens[&id]);
                    assert!(self.done.insert(id), "a send is over once");
                }
            }
        }
    }

    fn settle(&mut self) {
        while let Some(number) = self.inc.next_over() {
            assert!(self.awaited.remove(&number));
        }
        while let Some(complete) = self.inc.next_complete() {
            assert!(self.complete.insert(complete.group, complete.lens).is_none());
        }
    }

    /// One of the writes under way ends, well or not, and the receiver may have it either way.
    fn write(&mut self) {
        if self.writes.is_empty() {
            return;
        }
        let at = self.chance.below(self.writes.len() as u64) as usize;
        let (id, to, arrives) = self.writes.swap_remove(at);
        let place = (u64::from(to.region) + 1_000_000, to.offset as usize);
        assert!(
            !self.complete.contains_key(&place.0),
            "memory that is its owner's again was written to"
        );
        let lost = Err(Failure::PathLost {
            loss: Loss::Silent,
            fenced: true,
        });
        // A write that is not told by its arrival changes paths by itself.
        let (arrived, outcome) = match self.chance.below(if arrives { 4 } else { 1 }) {
            0 | 1 => (true, Ok(())),
            2 => (true, lost),
            _ => (false, lost),
        };
        self.lost += usize::from(outcome.is_err());
        self.memory.insert(place, if arrived { id } else { u64::MAX });
        if arrives && arrived {
            self.arrivals.push(to.number);
        }
        self.out.on_written(id, outcome).expect("it goes on");
        self.drain();
    }

    fn arrive(&mut self) {
        if !self.arrivals.is_empty() {
            let at = self.chance.below(self.arrivals.len() as u64) as usize;
            let number = self.arrivals.swap_remove(at);
            self.inc.on_arrived(number);
            self.settle();
        }
    }

    fn hear_there(&mut self) {
        let Some((message, id, len)) = self.to_receiver.pop_front() else {
            return;
        };
        match message {
            Message::Eager { tag, nth } => match self.inc.on_eager(tag, nth, len).expect("it fits") {
                Meets::Now { group, nth: at } => {
                    self.memory.insert((group, at), id);
                    self.inc.on_copied(tag, nth, len);
                }
                Meets::Later => {
                    let mut bytes = vec![0; len as usize];
                    bytes[..8].copy_from_slice(&id.to_le_bytes());
                    self.inc.keep(tag, nth, bytes);
                }
            },
            Message::Coming { number, len } => self.inc.on_coming(number, len).expect("it is awaited"),
            Message::Landed { number, len } => self.inc.on_landed(number, len).expect("it is awaited"),
            Message::Lost { number } => {
                let (numbers, awaited) = (&mut self.numbers, &mut self.awaited);
                let answer = self.inc.on_lost(number, || {
                    *numbers += 1;
                    awaited.insert(*numbers);
                    *numbers
                });
                self.to_sender.push_back(answer);
            }
            other => panic!("a sender says {other:?}"),
        }
        self.settle();
    }

    fn hear_here(&mut self) {
        match self.to_sender.pop_front() {
            Some(Message::Posted(receives)) => self.out.on_told(&receives).expect("receives"),
            Some(Message::Answer { number, anew }) => self.out.on_answer(number, anew).expect("an answer"),
            Some(other) => panic!("a receiver says {other:?}"),
            None => {}
        }
        self.drain();
    }

    fn is_quiet(&self) -> bool {
        self.to_receiver.is_empty() && self.to_sender.is_empty() && self.writes.is_empty() && self.arrivals.is_empty()
    }
}

#[test]
fn the_nth_send_of_a_tag_meets_the_nth_receive_of_it_whatever_is_lost_on_the_way() {
    let (mut met, mut lost) = (0, 0);
    for seed in 0..400 {
        let mut pair = Pair::new(seed);
        for _ in 0..600 {
            match pair.chance.below(8) {
                0 => pair.send(),
                1 if pair.chance.chance(0.4) => pair.receive(),
                2 | 3 => pair.hear_there(),
                4 | 5 => pair.hear_here(),
                6 => pair.write(),
                _ => pair.arrive(),
            }
        }
        while !pair.is_quiet() {
            pair.hear_there();
            pair.hear_here();
            pair.write();
            pair.arrive();
        }
        let mut open = BTreeSet::new();
        for (tag, receives) in &pair.posted {
            let sends = pair.sends.get(tag).cloned().unwrap_or_default();
            for (nth, place) in receives.iter().enumerate() {
                let Some((id, len)) = sends.get(nth) else {
                    open.insert(place.0);
                    continue;
                };
                met += 1;
                assert!(
                    pair.done.contains(id),
                    "seed {seed}: a send that has met its receive is over"
                );
                let found = pair.memory.get(place);
                assert!(found == Some(id), "seed {seed}: {found:?} in place of {id}");
                if let Some(lens) = pair.complete.get(&place.0) {
                    assert_eq!(lens[place.1], *len, "seed {seed}");
                }
            }
        }
        let groups: BTreeSet<u64> = pair.posted.values().flatten().map(|place| place.0).collect();
        let complete: BTreeSet<u64> = pair.complete.keys().copied().collect();
        assert_eq!(
            complete,
            &groups - &open,
            "seed {seed}: a group is over when all of it has come"
        );
        lost += pair.lost;
    }
    assert!(met > 10_000 && lost > 500, "{met} met, {lost} lost");
}

fn landing(tag: i32, len: u64) -> Landing {
    Landing {
        tag,
        len,
        region: 0,
        offset: 0,
    }
}

#[test]
fn whoever_does_not_keep_to_the_protocol_is_found_out() {
    let misbehaves = |outcome: Result<(), ChannelError>| matches!(outcome, Err(ChannelError::Misbehaved(_)));
    let mut inc = Incoming::default();
    inc.receive(1, &[landing(5, 100)], || 9).expect("a receive");
    assert!(misbehaves(inc.on_landed(8, 1)), "nobody waits under this number");
    assert!(misbehaves(inc.on_landed(9, 101)), "there is no room");
    assert!(misbehaves(inc.on_coming(9, 101)));
    let long = inc.on_eager(5, 0, 101);
    assert_eq!(long, Err(ChannelError::TooLong { sent: 101, room: 100 }));
    assert_eq!(inc.on_eager(5, 0, 100), Ok(Meets::Now { group: 1, nth: 0 }));
    inc.on_copied(5, 0, 100);
    assert!(misbehaves(inc.on_eager(5, 0, 1).map(|_| ())), "it has come before");
    assert!(misbehaves(inc.on_landed(9, 1)), "it is over");
    for nth in 0..EARLY_MAX as u64 {
        assert_eq!(inc.on_eager(6, nth, 1), Ok(Meets::Later));
        inc.keep(6, nth, vec![0]);
    }
    assert!(
        misbehaves(inc.on_eager(6, EARLY_MAX as u64, 1).map(|_| ())),
        "too much ahead"
    );
    let mut out = Outgoing::new(EAGER, Tells::Afterwards);
    assert!(misbehaves(out.on_answer(3, None)), "nobody asked");
    let receive = Receive {
        tag: 1,
        len: 10,
        region: 0,
        offset: 0,
        number: 0,
    };
    let many = vec![receive; GROUP_MAX];
    let told = (0..=RECEIVES_MAX / GROUP_MAX).map(|_| out.on_told(&many));
    assert!(told.into_iter().any(misbehaves), "it posts without end");
}

#[test]
fn a_sender_keeps_what_it_may_not_send_ahead() {
    let mut out = Outgoing::new(EAGER, Tells::ByArrival);
    for id in 0..EARLY_MAX as u64 + 3 {
        out.send(id, 0, 16).expect("a send");
    }
    let gone = std::iter::from_fn(|| out.next_wanted()).count();
    assert_eq!((gone, out.under_way()), (EARLY_MAX, 3));
    let receive = |number| Receive {
        tag: 0,
        len: 64,
        region: 0,
        offset: 0,
        number,
    };
    let told: Vec<Receive> = (0..EARLY_MAX as u32 + 1).map(receive).collect();
    out.on_told(&told).expect("receives");
    let next: Vec<Wanted> = std::iter::from_fn(|| out.next_wanted()).collect();
    let (id, nth) = (EARLY_MAX as u64, EARLY_MAX as u64);
    assert_eq!(
        next,
        [Wanted::Eager { id, tag: 0, nth }],
        "the first that waits meets the receive that is new"
    );
}

#[test]
fn tags_are_bounded() {
    let mut tags = Tags::default();
    for tag in 0..TAGS_MAX as i32 {
        assert_eq!(tags.next(tag), Ok(0));
    }
    assert_eq!(tags.next(0), Ok(1));
    assert!(matches!(tags.next(-1), Err(ChannelError::TooMany { .. })));
}

#[test]
fn words_are_read_as_they_were_said_and_others_are_refused() {
    let receive = Receive {
        tag: -7,
        len: 1 << 40,
        region: u32::MAX,
        offset: 12,
        number: 3,
    };
    let said = [
        Message::Open { token: 77, from: 9 },
        Message::Opened { from: 1 << 50 },
        Message::Refused,
        Message::Region {
            number: 4,
            region: vec![1, 2, 3],
        },
        Message::Forget { number: 4 },
        Message::Posted(vec![receive; 3]),
        Message::Eager { tag: i32::MIN, nth: 8 },
        Message::Coming { number: 1, len: 2 },
        Message::Landed { number: 1, len: 2 },
        Message::Lost { number: 1 },
        Message::Answer { number: 1, anew: None },
        Message::Answer {
            number: 1,
            anew: Some(u32::MAX),
        },
        Message::Closed,
    ];
    for message in said {
        let bytes = message.encode(42);
        assert_eq!(Message::decode(&bytes), Ok((42, message.clone(), &[][..])));
        for cut in 0..bytes.len() {
            assert!(Message::decode(&bytes[..cut]).is_err(), "{message:?} cut at {cut}");
        }
    }
    let mut chance = Seeded::new(1);
    for _ in 0..20_000 {
        let mut bytes = vec![0; chance.below(40) as usize];
        chance.fill(&mut bytes);
        if let Some(kind) = bytes.first_mut() {
            *kind %= 16;
        }
        // Whatever it is, it is read or refused.
        let _ = Message::decode(&bytes);
    }
}
