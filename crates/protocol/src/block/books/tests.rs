use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::Seeded;
use crate::block::{HitRule, Part, trace};

fn shape() -> Shape {
    Shape::new(vec![Part::new("kv", 8, HitRule::AllBlocks)]).unwrap()
}

fn books(blocks: usize, high: usize, low: usize) -> Books {
    let policy = Kind::Adaptive;
    Books::new(Limits {
        blocks,
        high,
        low,
        policy,
    })
    .unwrap()
}

fn whole(mut open: Open) -> Sealed {
    open.fill(0, 0, 8, 1).unwrap();
    open.seal().unwrap()
}

fn store(books: &mut Books, tenant: Tenant, number: u64, parent: Option<u64>) -> bool {
    match books.put(tenant, trace::id(number), parent.map(trace::id), &shape()) {
        Ok(Put::Open(open)) => books.seal(&whole(open), 0),
        _ => false,
    }
}

#[test]
fn limits_that_contradict_each_other_are_refused() {
    for (blocks, high, low) in [(4, 5, 1), (4, 2, 3), (4, 0, 0)] {
        let limits = Limits {
            blocks,
            high,
            low,
            policy: Kind::Lru,
        };
        assert_eq!(Books::new(limits).unwrap_err(), Room { low, high, blocks });
    }
}

#[test]
fn a_block_is_found_once_it_is_sealed_and_not_before() {
    let mut books = books(4, 4, 2);
    let tenant = books.add_tenant(0);
    let Ok(Put::Open(open)) = books.put(tenant, trace::id(1), None, &shape()) else {
        panic!()
    };
    assert_eq!(books.request(&[trace::id(1)], Hint::default()), 0);
    let again = books.put(tenant, trace::id(1), None, &shape()).unwrap_err();
    assert_eq!(again, PutError::UnderWay { id: trace::id(1) });
    assert!(books.seal(&whole(open.clone()), 0) && !books.seal(&whole(open), 0));
    assert_eq!(books.request(&[trace::id(1)], Hint::default()), 1);
    assert!(matches!(
        books.put(tenant, trace::id(1), None, &shape()),
        Ok(Put::AlreadyThere)
    ));
    let tally = books.tally(tenant).unwrap();
    assert_eq!(
        (tally.puts, tally.stored, tally.refused, tally.already_there),
        (3, 1, 1, 1)
    );
    assert!(tally.balances());
}

#[test]
fn what_is_held_stays_whatever_is_put() {
    let mut books = books(4, 4, 2);
    let tenant = books.add_tenant(0);
    assert!(store(&mut books, tenant, 1, None) && store(&mut books, tenant, 2, Some(1)));
    let (hold, held) = books.hold(&[1, 2, 3].map(trace::id));
    assert_eq!(held, 2);
    for number in 10..30 {
        store(&mut books, tenant, number, None);
    }
    assert_eq!(books.request(&[1, 2].map(trace::id), Hint::default()), 2);
    assert_eq!(books.purge(tenant), 2);
    books.release(hold);
    books.release(hold);
    assert_eq!(books.purge(tenant), 0);
    assert!(books.index().is_empty() && books.tally(tenant).unwrap().balances());
}

#[test]
fn a_purge_takes_nothing_of_others() {
    let mut books = books(8, 8, 7);
    let (theirs, mine) = (books.add_tenant(0), books.add_tenant(0));
    assert!(store(&mut books, theirs, 1, None) && store(&mut books, mine, 2, Some(1)));
    assert_eq!(books.purge(mine), 0);
    assert_eq!((books.blocks(theirs), books.blocks(mine)), (1, 0));
    assert_eq!(books.request(&[trace::id(1)], Hint::default()), 1);
    // What others have put after it keeps a block from leaving, and is theirs.
    assert!(store(&mut books, mine, 3, Some(1)));
    assert_eq!((books.purge(theirs), books.blocks(theirs)), (1, 1));
    assert!(books.tally(theirs).unwrap().balances() && books.tally(mine).unwrap().balances());
}

#[test]
fn hints_say_who_goes_first_and_who_stays() {
    let mut books = books(8, 8, 7);
    let tenant = books.add_tenant(0);
    (0..8).for_each(|number| assert!(store(&mut books, tenant, number, None)));
    let mut hint = |number: u64, hint: Hint| assert_eq!(books.request(&[trace::id(number)], hint), 1);
    hint(
        6,
        Hint {
            over: true,
            ..Hint::default()
        },
    );
    hint(
        5,
        Hint {
            until: Some(Time::from_ms(5)),
            ..Hint::default()
        },
    );
    hint(
        4,
        Hint {
            priority: Priority::Low,
            ..Hint::default()
        },
    );
    hint(
        0,
        Hint {
            priority: Priority::High,
            ..Hint::default()
        },
    );
    assert!(books.pin(trace::id(1), true) && !books.pin(trace::id(99), true));
    assert_eq!(books.next_timeout(), Some(Time::from_ms(5)));
    books.on_timeout(Time::from_ms(5));
    assert_eq!(books.next_timeout(), None);
    let mut left = Vec::new();
    for number in 100..107 {
        store(&mut books, tenant, number, None);
        while let Some(event) = books.next_event() {
            if let Event::Removed { id, .. } = event {
                left.push((0..200).find(|number| trace::id(*number) == id).unwrap());
            }
        }
    }
    let first: BTreeSet<u64> = left[..3].iter().copied().collect();
    assert_eq!(first, BTreeSet::from([4, 5, 6]), "{left:?}");
    assert!(!left.contains(&0) && !left.contains(&1), "{left:?}");
}

#[test]
fn a_tenant_that_floods_leaves_the_others_their_shares() {
    let mut books = books(100, 100, 90);
    let (quiet, loud) = (books.add_tenant(40), books.add_tenant(0));
    (0..80).for_each(|number| assert!(store(&mut books, quiet, number, None)));
    for number in 1000..3000 {
        store(&mut books, loud, number, None);
        assert!(books.blocks(quiet) >= 40);
    }
    assert!(books.blocks(quiet) < 80, "what is beyond a share may be taken");
    // Whoever is farther above its share gives first, so that the one that floods pushes itself out.
    let before = books.blocks(quiet);
    for number in 3000..5000 {
        store(&mut books, loud, number, None);
    }
    assert_eq!(books.blocks(quiet), before);
}

#[test]
fn a_store_of_which_all_is_held_refuses_and_counts() {
    let mut books = books(3, 3, 1);
    let tenant = books.add_tenant(0);
    (0..3).for_each(|number| assert!(store(&mut books, tenant, number, None)));
    (0..3).for_each(|number| assert_eq!(books.hold(&[trace::id(number)]).1, 1));
    let full = books.put(tenant, trace::id(9), None, &shape()).unwrap_err();
    assert_eq!(full, PutError::Full { blocks: 3 });
    assert_eq!(
        books.put(Tenant(7), trace::id(9), None, &shape()).unwrap_err(),
        PutError::NoTenant
    );
    assert_eq!(books.tally(tenant).unwrap().refused, 1);
}

/// A world by seed: tenants put, fail, ask, hold, pin and purge in any order, and the books balance after each step.
fn world(seed: u64) {
    let mut seeded = Seeded::new(seed);
    let blocks = 2 + seeded.below(40) as usize;
    let high = 1 + seeded.below(blocks as u64) as usize;
    let low = seeded.below(high as u64 + 1) as usize;
    let policy = Kind::ALL[seeded.below(4) as usize];
    let mut books = Books::new(Limits {
        blocks,
        high,
        low,
        policy,
    })
    .unwrap();
    let tenants: Vec<Tenant> = (0..1 + seeded.below(3))
        .map(|_| books.add_tenant(seeded.below(12) as usize))
        .collect();
    let mut opened: Vec<Open> = Vec::new();
    let mut holds: BTreeMap<Hold, Vec<BlockId>> = BTreeMap::new();
    let mut pinned: BTreeSet<BlockId> = BTreeSet::new();
    let mut visible: BTreeMap<BlockId, Tenant> = BTreeMap::new();
    for step in 0..400u64 {
        let number = seeded.below(60);
        // Chains are heaps: block n comes after block n / 2 of the same tenant.
        let nth = seeded.below(tenants.len() as u64);
        let name = |number: u64| trace::id(nth * 1000 + number);
        let (tenant, id) = (tenants[nth as usize], name(number));
        let chain: Vec<BlockId> = {
            let mut path: Vec<u64> = std::iter::successors(Some(number), |n| (*n > 1).then_some(n / 2)).collect();
            path.reverse();
            path.into_iter().map(name).collect()
        };
        let before: Vec<usize> = tenants.iter().map(|tenant| books.blocks(*tenant)).collect();
        match seeded.below(10) {
            0..=4 => {
                let parent = (number > 1).then(|| name(number / 2));
                if let Ok(Put::Open(open)) = books.put(tenant, id, parent, &shape()) {
                    opened.push(open);
                }
                for (other, before) in tenants.iter().zip(before) {
                    let share = books.accounts[usize::from(other.0)].share;
                    let kept = books.blocks(*other) >= before.min(share) || *other == tenant;
                    assert!(kept, "seed {seed}, step {step}: a tenant was pushed below its share");
                }
            }
            5 if !opened.is_empty() => {
                let open = opened.swap_remove(seeded.below(opened.len() as u64) as usize);
                let id = open.clone().seal().unwrap_err().block;
                assert!(books.give_up(whole(id).id()));
            }
            6 if !opened.is_empty() => {
                let open = opened.swap_remove(seeded.below(opened.len() as u64) as usize);
                assert!(books.seal(&whole(open), 0));
            }
            7 => {
                let there = chain.iter().take_while(|id| visible.contains_key(*id)).count();
                let until = seeded.chance(0.2).then(|| Time::from_ms(seeded.below(400)));
                let hint = Hint {
                    over: seeded.chance(0.3),
                    until,
                    ..Hint::default()
                };
                assert_eq!(books.request(&chain, hint), there, "seed {seed}, step {step}");
                books.on_timeout(Time::from_ms(step));
            }
            8 => match seeded.chance(0.5) || holds.is_empty() {
                true => {
                    let (hold, held) = books.hold(&chain);
                    holds.insert(hold, chain[..held].to_vec());
                }
                false => {
                    let (hold, _) = holds.pop_first().unwrap();
                    books.release(hold);
                }
            },
            9 if seeded.chance(0.1) => {
                books.purge(tenant);
            }
            _ => {
                let pin = seeded.chance(0.3);
                if books.pin(id, pin) && pin {
                    pinned.insert(id)
                } else {
                    pinned.remove(&id)
                };
            }
        }
        while let Some(event) = books.next_event() {
            match event {
                Event::Stored { id, tenant, .. } => assert_eq!(visible.insert(id, tenant), None),
                Event::Removed { id, tenant, bytes, .. } => {
                    assert_eq!((visible.remove(&id), bytes), (Some(tenant), 8));
                    assert!(
                        !pinned.contains(&id),
                        "seed {seed}, step {step}: a pinned block has left"
                    );
                    assert!(
                        !holds.values().flatten().any(|held| *held == id),
                        "seed {seed}, step {step}: a held block has left"
                    );
                }
            }
        }
        assert_eq!(books.index().len(), visible.len(), "seed {seed}, step {step}");
        assert!(books.total() <= blocks);
        let mut total = 0;
        for tenant in &tenants {
            let tally = books.tally(*tenant).unwrap();
            assert!(tally.balances(), "seed {seed}, step {step}: {tally:?}");
            assert_eq!(
                tally.stored - tally.removed + tally.under_way,
                books.blocks(*tenant) as u64
            );
            total += books.blocks(*tenant);
        }
        assert_eq!(total, books.total());
    }
}

#[test]
fn the_books_balance_in_every_world() {
    (0..300).for_each(world);
}
