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
        /// Where in the index it was.
        slot: Slot,
        parent: Option<BlockId>,
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
        let (visible, new) = inserted.expect("its room was kept since it was opened");
        if !new {
            // It was lost, and is counted already.
            self.accounts[usize::from(tenant.0)].blocks -= 1;
        }
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

    /// There is no place for the bytes of a block that was opened: the put is refused after all. `false` where it was not under way.
    pub fn refuse(&mut self, id: BlockId) -> bool {
        let given_up = self.opened.get(&id).map(|(tenant, _)| usize::from(tenant.0));
        let Some(tenant) = given_up.filter(|_| self.give_up(id)) else {
            return false;
        };
        let tally = &mut self.accounts[tenant].tally;
        tally.failed -= 1;
        tally.refused += 1;
        true
    }

    /// Counts a put that was refused before it came to a block.
    pub fn count_refused(&mut self, tenant: Tenant) {
        if let Some(account) = self.accounts.get_mut(usize::from(tenant.0)) {
            account.tally.puts += 1;
            account.tally.refused += 1;
        }
    }

    /// A block that was there before these books began can be found again. `false` where there is no room, or no such tenant, or it
    /// is there. Room is made down to the marks when something is put.
    pub fn restore(&mut self, tenant: Tenant, block: &Sealed, parent: Option<BlockId>, tier: u8) -> bool {
        let known = usize::from(tenant.0) < self.accounts.len();
        if !known || self.total() >= self.limits.blocks || self.index.find(&block.id()).is_some() {
            return false;
        }
        let account = &mut self.accounts[usize::from(tenant.0)];
        account.blocks += 1;
        account.tally.under_way += 1;
        self.opened.insert(block.id(), (tenant, parent));
        let sealed = self.seal(block, tier);
        let account = &mut self.accounts[usize::from(tenant.0)];
        // Nobody has put it in this life.
        account.tally.stored -= 1;
        self.events.pop_back();
        sealed
    }

    /// The bytes of a block turned out not to be there any more: it is not found from now on, though blocks that follow it, or a hold, may keep its
    /// place in the index.
    pub fn lose(&mut self, id: BlockId) -> bool {
        let Some(slot) = self.index.find(&id) else {
            return false;
        };
        match self.index.may_leave(slot) {
            true => return self.evict(id),
            false => self.index.lose(slot),
        }
        true
    }

    /// Removes a block now, unless it is held, pinned, or followed by others.
    pub fn evict(&mut self, id: BlockId) -> bool {
        let leaving = self.index.find(&id).filter(|slot| self.index.may_leave(*slot));
        let Some(slot) = leaving else { return false };
        let tenant = usize::from(self.index.entry(slot).tenant);
        self.accounts[tenant].policy.forget(&mut self.links, slot);
        self.remove(slot);
        true
    }

    /// A request goes through this chain: says how many of its blocks are there, and touches those, once, from the last to the first.
    pub fn request(&mut self, chain: &[BlockId], hint: Hint) -> usize {
        let slots: Vec<Slot> = chain.iter().map_while(|id| self.index.find(id)).collect();
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
        // A chain is one tenant's, as a rule; where somebody asks for blocks of several, each policy hears of its own.
        let tenant = |touch: &Touch| usize::from(self.index.entry(touch.slot).tenant);
        for own in told.chunk_by(|one, other| tenant(one) == tenant(other)) {
            self.accounts[tenant(&own[0])].policy.request(&mut self.links, own);
        }
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
        let parent = self.index.parent(slot).map(|parent| self.index.id(parent));
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
            slot,
            parent,
        });
    }
}

#[cfg(test)]
mod tests;
