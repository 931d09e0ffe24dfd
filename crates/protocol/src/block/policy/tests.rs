use super::*;
use crate::Seeded;
use crate::block::replay::{distinct, replay};
use crate::block::trace::{self, Request};
use crate::block::{Entry, Index, Sealed};

/// Sessions that take turns in a circle, each a turn longer every time: more of them than fit.
fn circle(sessions: u64, turns: u64, blocks: u64) -> Vec<Request> {
    let mut requests = Vec::new();
    for turn in 1..=turns {
        for session in 0..sessions {
            let first = session * turns * blocks;
            let blocks = (first..first + turn * blocks).collect();
            requests.push(Request {
                blocks,
                ..Request::default()
            });
        }
    }
    requests
}

/// A few blocks that are used now and then, in a stream of others that are used once.
fn stream(seed: u64, requests: u64) -> Vec<Request> {
    let mut seeded = Seeded::new(seed);
    (0..requests)
        .map(|nth| {
            let often = seeded.below(40);
            let once = 1_000_000 + nth * 8;
            let mut blocks = vec![often];
            blocks.extend(once..once + 8);
            Request {
                blocks,
                ..Request::default()
            }
        })
        .collect()
}

#[test]
fn names_are_read_back_and_others_refused() {
    for kind in Kind::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    let error = "lfu".parse::<Kind>().unwrap_err();
    assert_eq!(
        error.to_string(),
        "no policy is called `lfu`; known are lru, arc, frequency and adaptive"
    );
}

#[test]
fn more_sessions_than_fit_do_not_push_each_other_out() {
    let requests = circle(6, 30, 4);
    let capacity = distinct(&requests) / 4;
    let [lru, adaptive] = [Kind::Lru, Kind::Adaptive].map(|kind| replay(&requests, capacity, kind, None).hits);
    assert!(adaptive > lru + lru / 4, "{adaptive} beside {lru}");
}

#[test]
fn a_stream_of_blocks_that_are_used_once_passes_through() {
    let requests = stream(3, 4000);
    let [lru, adaptive] = [Kind::Lru, Kind::Adaptive].map(|kind| replay(&requests, 60, kind, None).hits);
    assert!(adaptive > 3 * lru, "{adaptive} beside {lru}");
}

#[test]
fn it_follows_when_the_load_changes() {
    let mut requests = circle(6, 30, 4);
    requests.extend(stream(5, 4000));
    let capacity = 60;
    let best = [Kind::Lru, Kind::Arc, Kind::Frequency].map(|kind| replay(&requests, capacity, kind, None).hits);
    let adaptive = replay(&requests, capacity, Kind::Adaptive, None).hits;
    assert!(
        adaptive as f64 > 0.95 * *best.iter().max().unwrap() as f64,
        "{adaptive} beside {best:?}"
    );
}

#[test]
fn one_bit_about_sessions_is_worth_hits_to_every_policy() {
    let requests = crate::block::policy::tests::mixed(11);
    let bits = trace::comes_back(&requests);
    let capacity = distinct(&requests) / 20;
    for kind in Kind::ALL {
        let [without, with] = [None, Some(&bits[..])].map(|bits| replay(&requests, capacity, kind, bits).hits);
        assert!(with > without, "{kind}: {with} with the bit, {without} without");
    }
}

/// Sessions of which half end after one request.
fn mixed(seed: u64) -> Vec<Request> {
    let mut seeded = Seeded::new(seed);
    let (mut open, mut unused): (Vec<Vec<u64>>, u64) = (Vec::new(), 0);
    let mut requests = Vec::new();
    for _ in 0..1500 {
        if open.is_empty() || seeded.chance(0.5) {
            let blocks: Vec<u64> = (unused..unused + 10).collect();
            unused += 10;
            if seeded.chance(0.5) {
                open.push(blocks.clone());
            }
            requests.push(Request {
                blocks,
                ..Request::default()
            });
        } else {
            let nth = seeded.below(open.len() as u64) as usize;
            open[nth].extend(unused..unused + 3);
            unused += 3;
            let blocks = open[nth].clone();
            requests.push(Request {
                blocks,
                ..Request::default()
            });
            if seeded.chance(0.2) {
                open.swap_remove(nth);
            }
        }
    }
    requests
}

#[test]
fn what_may_not_leave_stays_and_where_nothing_may_nobody_is_named() {
    for kind in Kind::ALL {
        let mut index = Index::new(8);
        let mut links = crate::block::Links::new(8);
        let mut policy = kind.policy(4);
        let slots: Vec<Slot> = (0..8)
            .map(|number| {
                let sealed = Sealed::name_only(trace::id(number), 1);
                index.insert(&sealed, None, Entry::default()).unwrap().0.slot
            })
            .collect();
        for slot in &slots {
            let touch = Touch {
                id: index.id(*slot),
                slot: *slot,
                last: false,
                over: false,
                valued: false,
            };
            policy.request(&mut links, &[touch]);
            index.set_flag(*slot, crate::block::index::PINNED, true);
        }
        assert_eq!(policy.victim(&mut links, &index), None, "{kind}");
        index.set_flag(slots[5], crate::block::index::PINNED, false);
        assert_eq!(policy.victim(&mut links, &index), Some(slots[5]), "{kind}");
        assert_eq!(policy.victim(&mut links, &index), None, "{kind}: each is named once");
        policy.forget(&mut links, slots[0]);
        index.set_flag(slots[0], crate::block::index::PINNED, false);
        assert_eq!(
            policy.victim(&mut links, &index),
            None,
            "{kind}: what was forgotten is not named"
        );
    }
}
