//! The books of a store: what was put, what is there, what is held, and what has to leave.
//!
//! [`Books`] is the machine that a store and the simulator turn. It has no bytes and no clock: puts, requests, holds and hints go in with the time,
//! and [`Event`]s come out that say what to do with bytes. For each tenant, puts = stored + already there + refused + failed + under way, always.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use thiserror::Error;
use weft_plan::Time;

use super::index::{HELD, PINNED};
use super::policy::{Kind, Policy, Touch};
use super::replay::touches;
use super::{BlockId, Entry, Index, Links, Open, Sealed, Shape, Slot};

/// How much a store holds, and when it begins and ends to make room.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Blocks, of all tenants together, those under way included.
    pub blocks: usize,
    /// Blocks leave once so many are there, until no more than `low` are.
    pub high: usize,
    pub low: usize,
    pub policy: Kind,
}

/// Limits that contradict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "room is made from {high} blocks down to {low} in a store of {blocks}; it must be low ≤ high ≤ blocks, and high at least 1"
)]
pub struct Room {
    pub low: usize,
    pub high: usize,
    pub blocks: usize,
}

/// Whose blocks they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(u16);

/// What keeps blocks from leaving. It ends when it is released, or with its owner, and survives no crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hold(u64);

/// How much a request's blocks matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    Low,
    #[default]
    Normal,
    High,
}

/// What an application knows of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// The session will not come back: blocks that are its own go first.
    pub over: bool,
    pub priority: Priority,
    /// From then on the blocks go first.
    pub until: Option<Time>,
}

/// Why a put was refused. Nothing has changed, but that it was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PutError {
    #[error("all {blocks} blocks are held, pinned, under way, or the share of others")]
    Full { blocks: usize },
    #[error("the block {id} is being put already")]
    UnderWay { id: BlockId },
    #[error("no such tenant")]
    NoTenant,
}

/// What became of a put, or what must be done with bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The block can be found now.
    Stored { id: BlockId, tenant: Tenant, tier: u8 },
    /// The block has left: its bytes may go to a slower tier, and its place is free.
    Removed {
        id: BlockId,
        tenant: Tenant,
        tier: u8,
        bytes: u32,
    },
}

/// What was put, and what came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub puts: u64,
    pub stored: u64,
    pub already_there: u64,
    pub refused: u64,
    pub failed: u64,
    /// Opened, and neither sealed nor given up yet.
    pub under_way: u64,
    pub removed: u64,
}

impl Tally {
    pub fn balances(&self) -> bool {
        self.puts == self.stored + self.already_there + self.refused + self.failed + self.under_way
    }
}

#[derive(Debug)]
struct Account {
    policy: Box<dyn Policy>,
    /// Blocks that others may not push it below.
    share: usize,
    /// Blocks that are there and under way.
    blocks: usize,
    tally: Tally,
}

/// The answer to a put.
#[derive(Debug)]
pub enum Put {
    /// Fill it, then [`Books::seal`] it or [give it up](Books::give_up).
    Open(Open),
    AlreadyThere,
}

#[derive(Debug)]
pub struct Books {
    limits: Limits,
    index: Index,
    links: Links,
    accounts: Vec<Account>,
    /// Whose puts are under way, and after which block.
    opened: HashMap<BlockId, (Tenant, Option<BlockId>)>,
    holds: BTreeMap<Hold, Vec<Slot>>,
    /// How many holds are on a slot.
    held: HashMap<Slot, u32>,
    holds_given: u64,
    /// When blocks begin to go first, by time and by block.
    ends: BTreeSet<(Time, Slot)>,
    end_of: HashMap<Slot, Time>,
    events: VecDeque<Event>,
    touches: Vec<Touch>,
}

impl Books {
    pub fn new(limits: Limits) -> Result<Books, Room> {
        let Limits { blocks, high, low, .. } = limits;
        if low > high || high > blocks || high == 0 {
            return Err(Room { low, high, blocks });
        }
        Ok(Books {
            limits,
            index: Index::new(blocks),
            links: Links::new(blocks),
            accounts: Vec::new(),
            opened: HashMap::new(),
            holds: BTreeMap::new(),
            held: HashMap::new(),
            holds_given: 0,
            ends: BTreeSet::new(),
            end_of: HashMap::new(),
            events: VecDeque::new(),
            touches: Vec::new(),
        })
    }

    /// A tenant that others cannot push below `share` blocks. Shares beyond what is left of the store are cut to it.
    pub fn add_tenant(&mut self, share: usize) -> Tenant {
        let promised: usize = self.accounts.iter().map(|account| account.share).sum();
        let number = u16::try_from(self.accounts.len()).expect("fewer than 65,536 tenants");
        self.accounts.push(Account {
            policy: self.limits.policy.policy(self.limits.high),
            share: share.min(self.limits.low.saturating_sub(promised)),
            blocks: 0,
            tally: Tally::default(),
        });
        Tenant(number)
    }

    pub fn index(&self) -> &Index {
        &self.index
    }

    pub fn tally(&self, tenant: Tenant) -> Option<Tally> {
        self.accounts.get(usize::from(tenant.0)).map(|account| account.tally)
    }

    /// Blocks that a tenant has, those under way included.
    pub fn blocks(&self, tenant: Tenant) -> usize {
        self.accounts
            .get(usize::from(tenant.0))
            .map_or(0, |account| account.blocks)
    }

    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Opens a block, unless it is there. Room is made for it first.
    pub fn put(
        &mut self,
        tenant: Tenant,
        id: BlockId,
        parent: Option<BlockId>,
        shape: &Shape,
    ) -> Result<Put, PutError> {
        let account = self.accounts.get_mut(usize::from(tenant.0)).ok_or(PutError::NoTenant)?;
        account.tally.puts += 1;
        if self.index.find(&id).is_some() {
            account.tally.already_there += 1;
            return Ok(Put::AlreadyThere);
        }
        if self.opened.contains_key(&id) {
            account.tally.refused += 1;
            return Err(PutError::UnderWay { id });
        }
        if self.total() >= self.limits.high {
            self.make_room(tenant);
        }
        let full = self.total() >= self.limits.blocks;
        let account = &mut self.accounts[usize::from(tenant.0)];
        if full {
            account.tally.refused += 1;
            let blocks = self.limits.blocks;
            return Err(PutError::Full { blocks });
        }
        account.tally.under_way += 1;
        account.blocks += 1;
        self.opened.insert(id, (tenant, parent));
        Ok(Put::Open(Open::new(id, shape)))
    }

    /// The block is whole, and can be found from now on. One that was not opened here, or was given up since, changes nothing: `false`.
    pub fn seal(&mut self, block: &Sealed, tier: u8) -> bool {
        let Some((tenant, parent)) = self.opened.remove(&block.id()) else {
            return false;
        };
        let parent = parent.and_then(|parent| self.index.find(&parent));
        let entry = Entry {
            tenant: tenant.0,
            tier,
            ..Entry::default()
        };
        let inserted = self.index.insert(block, parent, entry);
        let (visible, _) = inserted.expect("its room was kept since it was opened");
        let touch = Touch {
            id: visible.id,
            slot: visible.slot,
            last: false,
            over: false,
            valued: false,
        };
        let account = &mut self.accounts[usize::from(tenant.0)];
        account.policy.request(&mut self.links, &[touch]);
        account.tally.under_way -= 1;
        account.tally.stored += 1;
        let id = visible.id;
        self.events.push_back(Event::Stored { id, tenant, tier });
        true
    }

    /// The block will not become whole. `false` where it was not under way.
    pub fn give_up(&mut self, id: BlockId) -> bool {
        let Some((tenant, _)) = self.opened.remove(&id) else {
            return false;
        };
        let account = &mut self.accounts[usize::from(tenant.0)];
        account.blocks -= 1;
        account.tally.under_way -= 1;
        account.tally.failed += 1;
        true
    }

    /// A request goes through this chain: says how many of its blocks are there, and touches those, once, from the last to the first.
    pub fn request(&mut self, chain: &[BlockId], hint: Hint) -> usize {
        let slots: Vec<Slot> = chain.iter().map_while(|id| self.index.find(id)).collect();
        let Some(first) = slots.first() else { return 0 };
        let tenant = self.index.entry(*first).tenant;
        let mut told = std::mem::take(&mut self.touches);
        let goes_first = hint.over || hint.priority == Priority::Low;
        touches(&self.index, &slots, goes_first, &mut told);
        for touch in &mut told {
            touch.valued = hint.priority == Priority::High;
            if let Some(until) = hint.until {
                if let Some(before) = self.end_of.insert(touch.slot, until) {
                    self.ends.remove(&(before, touch.slot));
                }
                self.ends.insert((until, touch.slot));
            }
        }
        self.accounts[usize::from(tenant)]
            .policy
            .request(&mut self.links, &told);
        self.touches = told;
        slots.len()
    }

    /// Keeps the leading blocks of a chain that are there from leaving, and says how many they are.
    pub fn hold(&mut self, chain: &[BlockId]) -> (Hold, usize) {
        let slots: Vec<Slot> = chain.iter().map_while(|id| self.index.find(id)).collect();
        for slot in &slots {
            *self.held.entry(*slot).or_default() += 1;
            self.index.set_flag(*slot, HELD, true);
        }
        let count = slots.len();
        self.holds_given += 1;
        let hold = Hold(self.holds_given);
        self.holds.insert(hold, slots);
        (hold, count)
    }

    /// Ends a hold; a second time it does nothing.
    pub fn release(&mut self, hold: Hold) {
        for slot in self.holds.remove(&hold).unwrap_or_default() {
            let count = self.held.get_mut(&slot).expect("a held slot is counted");
            *count -= 1;
            if *count == 0 {
                self.held.remove(&slot);
                self.index.set_flag(slot, HELD, false);
            }
        }
    }

    /// Keeps a block from leaving until it is unpinned. `false` where it is not there.
    pub fn pin(&mut self, id: BlockId, pinned: bool) -> bool {
        let slot = self.index.find(&id);
        if let Some(slot) = slot {
            self.index.set_flag(slot, PINNED, pinned);
        }
        slot.is_some()
    }

    /// Lets blocks whose time has come go before all others.
    pub fn on_timeout(&mut self, now: Time) {
        while let Some((_, slot)) = self.ends.first().copied().filter(|(until, _)| *until <= now) {
            self.ends.pop_first();
            self.end_of.remove(&slot);
            let id = self.index.id(slot);
            let touch = Touch {
                id,
                slot,
                last: false,
                over: true,
                valued: false,
            };
            let tenant = usize::from(self.index.entry(slot).tenant);
            self.accounts[tenant].policy.request(&mut self.links, &[touch]);
        }
    }

    pub fn next_timeout(&self) -> Option<Time> {
        self.ends.first().map(|(until, _)| *until)
    }

    /// Removes all that a tenant has, but what is held, pinned, or followed by such; says how many are left.
    pub fn purge(&mut self, tenant: Tenant) -> usize {
        let mine = |slot: &Slot| self.index.entry(*slot).tenant == tenant.0;
        let all: Vec<Slot> = self.index.slots().filter(mine).collect();
        let mut leaves: Vec<Slot> = all.iter().copied().filter(|slot| self.index.may_leave(*slot)).collect();
        let (total, mut gone) = (all.len(), 0);
        while let Some(slot) = leaves.pop() {
            let parent = self.index.parent(slot);
            self.accounts[usize::from(tenant.0)]
                .policy
                .forget(&mut self.links, slot);
            self.remove(slot);
            gone += 1;
            // Its parent may be a leaf now; it may also be another tenant's.
            let mine = |slot: &Slot| self.index.entry(*slot).tenant == tenant.0;
            leaves.extend(parent.filter(|parent| mine(parent) && self.index.may_leave(*parent)));
        }
        total - gone
    }

    fn total(&self) -> usize {
        self.index.len() + self.opened.len()
    }

    /// Lets blocks leave until the store is down at its low mark: of who is the farthest above its share, and of the caller itself last of all.
    fn make_room(&mut self, caller: Tenant) {
        while self.total() > self.limits.low {
            let above = |account: &Account| account.blocks.saturating_sub(account.share);
            let mut order: Vec<usize> = (0..self.accounts.len()).collect();
            order.retain(|nth| above(&self.accounts[*nth]) > 0 || *nth == usize::from(caller.0));
            order.sort_by_key(|nth| std::cmp::Reverse(above(&self.accounts[*nth])));
            let victim = order
                .into_iter()
                .find_map(|nth| self.accounts[nth].policy.victim(&mut self.links, &self.index));
            let Some(slot) = victim else { return };
            self.remove(slot);
        }
    }

    fn remove(&mut self, slot: Slot) {
        let id = self.index.id(slot);
        if let Some(until) = self.end_of.remove(&slot) {
            self.ends.remove(&(until, slot));
        }
        let entry = self.index.remove(slot).expect("only leaves are let go");
        let account = &mut self.accounts[usize::from(entry.tenant)];
        account.blocks -= 1;
        account.tally.removed += 1;
        let (tenant, tier, bytes) = (Tenant(entry.tenant), entry.tier, entry.bytes);
        self.events.push_back(Event::Removed {
            id,
            tenant,
            tier,
            bytes,
        });
    }
}

#[cfg(test)]
mod tests {
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
}
