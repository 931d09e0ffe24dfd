//! A shelf: the slots of one tier, what is written of them, and when what was put may be found.
//!
//! [`Shelf`] is the machine of a tier, in memory or in files. It has no bytes of blocks and no clock: puts go in and come out as writes that somebody
//! carries out; how those ended goes in, and what is to be written of them comes out; a put is [done](ShelfEvent::PutDone), and its block can be
//! found, when its payload and then its record are written, and, under [`Durability::Power`], last. Nothing that was not acknowledged can be found, and
//! what is read is [believed](Shelf::end_read) only by its checksum, which is bound to the block's id, to this life of the slot and to the length. So
//! no order of writes has to be kept for a read to be right, only for an acknowledgement to be kept.
//!
//! A tier whose disk is full, fails or is read-only is set [aside](Condition::Aside): what is put is refused at once, with the reason, until a probe goes through.

mod events;
pub mod format;
mod options;
mod purging;
mod reading;
mod recovery;
mod slots;

use std::collections::{BTreeMap, VecDeque};

use weft_plan::Time;

use super::books::{Event, Hint, Hold, Limits, Put, Tally, Tenant};
use super::{BlockId, Books, Open, Sealed, Shape};
use format::{Found, Geometry, Header, PAGE_BYTES, RECORD_BYTES, RECORDS_A_PAGE, Record, TenantKey, first_half};
use reading::Reading;
use slots::Slots;

pub use events::{Counts, Pages, PurgeId, PutFailed, PutId, PutRefused, ShelfEvent, ShelfPut, Trouble, Write};
pub use options::{Durability, Medium, ShelfOptions};
pub use reading::{Read, ReadId, Verdict, Wrong};

/// Probes of a tier that is set aside come this soon at first, and this seldom at last.
const PROBE_FIRST: Time = Time::from_ms(100);
const PROBE_LAST: Time = Time::from_secs(30);
/// The lower bits of a sequence count within one opening of the tier, the upper ones are its epoch.
const EPOCH_SHIFT: u32 = 40;
/// Pages that are written at a time.
pub const PAGES_MAX: usize = 64;
const NOWHERE: u32 = u32::MAX;

/// Whether a tier is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    #[default]
    Serving,
    /// Puts are refused until a probe goes through, and reads too where it was a read that failed.
    Aside {
        trouble: Trouble,
        since: Time,
        probe_at: Time,
        wait: Time,
        reads_too: bool,
    },
}

/// A put under way.
#[derive(Clone, Copy, Debug)]
struct Pending {
    id: BlockId,
    parent: u64,
    tenant: TenantKey,
    slot: u32,
    length: u32,
    /// Its tenant was purged: it comes to nothing.
    doomed: bool,
}

/// What waits for a page of records.
#[derive(Clone, Debug)]
enum Waiter {
    Put(PutId, Box<Sealed>),
    Purge(PurgeId),
}

#[derive(Debug, Default)]
struct Extent {
    dirty: BTreeMap<u32, Vec<Waiter>>,
    /// Pages of which a write is under way.
    flying: Option<BTreeMap<u32, Vec<Waiter>>>,
    /// Another's: none of its slots is used.
    strange: bool,
}

/// The machine of one tier.
#[derive(Debug)]
pub struct Shelf {
    options: ShelfOptions,
    shape: Shape,
    geometry: Geometry,
    header: Option<Header>,
    books: Books,
    tenants: BTreeMap<TenantKey, Tenant>,
    slots: Slots,
    /// What the records are, or are to be, one a slot and whole pages an extent.
    image: Vec<u8>,
    /// By slot of the index: where the payload is.
    places: Vec<u32>,
    puts: BTreeMap<PutId, Pending>,
    reads: BTreeMap<ReadId, Reading>,
    extents: Vec<Extent>,
    purges: BTreeMap<PurgeId, purging::Purging>,
    events: VecDeque<ShelfEvent>,
    condition: Condition,
    counts: Counts,
    wrongs: VecDeque<Wrong>,
    recovered: Vec<recovery::Recovered>,
    scrub: recovery::Scrub,
    sequence: u64,
    given: u64,
    queued: u64,
}

impl Shelf {
    /// A shelf in memory, of so many slots.
    pub fn in_memory(geometry: Geometry, shape: &Shape, options: ShelfOptions) -> Shelf {
        Shelf::new(geometry, None, shape, options)
    }

    /// A shelf in files. Each extent is to be [recovered](Shelf::recover) before anything is put.
    pub fn in_files(header: Header, shape: &Shape, options: ShelfOptions) -> Shelf {
        Shelf::new(header.geometry, Some(header), shape, options)
    }

    fn new(geometry: Geometry, header: Option<Header>, shape: &Shape, options: ShelfOptions) -> Shelf {
        let slots = geometry.slots_total();
        // Room is made before the last slot is taken, because what leaves may be read or written a while longer.
        let high = slots - slots / 16;
        let low = high - (high / 32).max(1);
        let limits = Limits {
            blocks: slots,
            high,
            low,
            policy: options.policy,
        };
        let epoch = header.map_or(0, |header| header.epoch);
        Shelf {
            books: Books::new(limits).expect("marks in order"),
            tenants: BTreeMap::new(),
            slots: Slots::new(slots as u32),
            image: vec![0; geometry.extents as usize * geometry.pages() as usize * PAGE_BYTES],
            places: vec![NOWHERE; slots],
            puts: BTreeMap::new(),
            reads: BTreeMap::new(),
            extents: (0..geometry.extents).map(|_| Extent::default()).collect(),
            purges: BTreeMap::new(),
            events: VecDeque::new(),
            condition: Condition::default(),
            counts: Counts::default(),
            wrongs: VecDeque::new(),
            recovered: Vec::new(),
            scrub: recovery::Scrub::default(),
            sequence: u64::from(epoch) << EPOCH_SHIFT,
            given: 0,
            queued: 0,
            shape: shape.clone(),
            geometry,
            header,
            options,
        }
    }

    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }
    pub fn shape(&self) -> &Shape {
        &self.shape
    }
    pub fn condition(&self) -> Condition {
        self.condition
    }
    pub fn counts(&self) -> Counts {
        self.counts
    }
    /// The last blocks whose bytes were not what was written.
    pub fn wrongs(&self) -> impl Iterator<Item = &Wrong> {
        self.wrongs.iter()
    }
    /// Blocks that can be found, or are under way.
    pub fn blocks(&self) -> usize {
        self.tenants.values().map(|tenant| self.books.blocks(*tenant)).sum()
    }
    pub fn tenants(&self) -> impl Iterator<Item = (TenantKey, Tally, usize)> + '_ {
        let told = |(key, tenant): (&TenantKey, &Tenant)| {
            let tally = self.books.tally(*tenant).unwrap_or_default();
            (*key, tally, self.books.blocks(*tenant))
        };
        self.tenants.iter().map(told)
    }
    /// What was put, of all tenants.
    pub fn tally(&self) -> Tally {
        self.tenants().fold(Tally::default(), |all, (_, one, _)| Tally {
            puts: all.puts + one.puts,
            stored: all.stored + one.stored,
            already_there: all.already_there + one.already_there,
            refused: all.refused + one.refused,
            failed: all.failed + one.failed,
            under_way: all.under_way + one.under_way,
            removed: all.removed + one.removed,
        })
    }
    /// Slots that nothing is in, and that nobody reads or writes.
    pub fn free_slots(&self) -> u32 {
        self.slots.free()
    }
    /// Bytes of puts under way.
    pub fn queued(&self) -> u64 {
        self.queued
    }
    pub fn next_event(&mut self) -> Option<ShelfEvent> {
        self.events.pop_front()
    }

    /// Which parts of a block are there, as bits; 0 where it is not.
    pub fn parts_of(&self, id: &BlockId) -> u8 {
        let index = self.books.index();
        index.find(id).map_or(0, |slot| index.entry(slot).parts)
    }

    /// All blocks that can be found.
    pub fn ids(&self) -> impl Iterator<Item = BlockId> + '_ {
        let index = self.books.index();
        index.slots().map(|slot| index.id(slot))
    }

    /// A request goes through these blocks, all of which are here: touched from the last to the first.
    pub fn request(&mut self, chain: &[BlockId], hint: Hint) -> usize {
        self.books.request(chain, hint)
    }
    pub fn hold(&mut self, chain: &[BlockId]) -> (Hold, usize) {
        self.books.hold(chain)
    }
    pub fn release(&mut self, hold: Hold) {
        self.books.release(hold);
    }
    /// Removes a block, unless it is held or others follow it.
    pub fn evict(&mut self, id: BlockId) -> bool {
        let removed = self.books.evict(id);
        self.settle();
        removed
    }

    /// Asks for a place for a block of these parts.
    pub fn put(
        &mut self,
        tenant: TenantKey,
        id: BlockId,
        parent: Option<BlockId>,
        parts: u8,
        now: Time,
    ) -> Result<ShelfPut, PutRefused> {
        let account = self.account(tenant)?;
        let there = self.shape.parts().iter().enumerate();
        let there = there.filter(|(nth, _)| parts >> nth & 1 == 1);
        let length: u32 = there.map(|(_, part)| part.bytes).sum();
        if self.books.index().find(&id).is_none()
            && let Err(refused) = self.admit(length, now)
        {
            self.books.count_refused(account);
            return Err(refused);
        }
        let put = self.books.put(account, id, parent, &self.shape);
        self.settle();
        if let Put::AlreadyThere = put? {
            return Ok(ShelfPut::AlreadyThere);
        }
        let Some(slot) = self.slots.take() else {
            self.books.refuse(id);
            return Err(PutRefused::NoSlot);
        };
        self.given += 1;
        let put = PutId(self.given);
        let pending = Pending {
            id,
            parent: parent.as_ref().map_or(0, first_half),
            tenant,
            slot,
            length,
            doomed: false,
        };
        self.puts.insert(put, pending);
        self.queued += u64::from(length);
        let (extent, offset) = self.locate(slot);
        Ok(ShelfPut::Write(Write {
            put,
            extent,
            offset,
            length,
            open: Open::with_parts(id, &self.shape, parts),
            commit: self.options.medium == Medium::Files(Durability::Power),
        }))
    }

    /// Whether a put of so many bytes may begin.
    fn admit(&mut self, length: u32, now: Time) -> Result<(), PutRefused> {
        if length == 0 {
            return Err(PutRefused::NoParts);
        }
        let (queued, limit) = (self.queued, self.options.queue_bytes);
        if queued + u64::from(length) > limit {
            return Err(PutRefused::QueueFull { queued, limit });
        }
        match self.may_try(now) {
            Ok(()) => Ok(()),
            Err(trouble) => Err(PutRefused::Aside { trouble }),
        }
    }

    /// Whether the medium may be tried: it serves, or a probe is due, which this one is then.
    fn may_try(&mut self, now: Time) -> Result<(), Trouble> {
        match &mut self.condition {
            Condition::Serving => Ok(()),
            Condition::Aside { probe_at, wait, .. } if *probe_at <= now => {
                *wait = wait.saturating_add(*wait).min(PROBE_LAST);
                *probe_at = now.saturating_add(*wait);
                Ok(())
            }
            Condition::Aside { trouble, .. } => Err(*trouble),
        }
    }

    fn account(&mut self, key: TenantKey) -> Result<Tenant, PutRefused> {
        if let Some(tenant) = self.tenants.get(&key) {
            return Ok(*tenant);
        }
        let limit = self.options.tenants;
        if self.tenants.len() >= limit {
            return Err(PutRefused::Tenants { limit });
        }
        let share = self.options.shares.get(&key).copied().unwrap_or(0);
        let tenant = self.books.add_tenant(share);
        self.tenants.insert(key, tenant);
        Ok(tenant)
    }

    /// The payload is written, and lasts where that was asked, and the block is sealed; or it is not.
    pub fn on_written(&mut self, put: PutId, ended: Result<Sealed, Trouble>, now: Time) {
        let Some(pending) = self.puts.get(&put).copied() else {
            return;
        };
        match ended {
            Err(trouble) => {
                // What was refused never came to the medium.
                if trouble != Trouble::Refused {
                    self.on_trouble(trouble, false, now);
                }
                self.fail(put, trouble.into());
            }
            Ok(_) if pending.doomed => self.fail(put, PutFailed::Purged),
            Ok(sealed) => {
                self.on_success(false);
                self.sequence += 1;
                let record = Record {
                    id: pending.id,
                    parent: pending.parent,
                    sequence: self.sequence,
                    sum: format::bound_sum(
                        &pending.id,
                        self.sequence,
                        pending.length,
                        sealed.payload_sum(&self.shape),
                    ),
                    length: pending.length,
                    parts: sealed.parts(),
                    tenant: pending.tenant,
                };
                self.write_record(pending.slot, record.encode());
                match self.options.medium {
                    Medium::Memory => self.acknowledge(put, &sealed),
                    Medium::Files(_) => self.await_page(pending.slot, Waiter::Put(put, Box::new(sealed))),
                }
            }
        }
    }

    /// Nothing will be written for this put after all, which says nothing of the medium.
    pub fn abandon(&mut self, put: PutId) {
        self.fail(put, PutFailed::Medium(Trouble::Refused));
    }

    /// Records that are to be written now. Ask again when something has ended.
    pub fn next_pages(&mut self, now: Time) -> Option<Pages> {
        let ready = |extent: &Extent| extent.flying.is_none() && !extent.dirty.is_empty();
        let at = self.extents.iter().position(ready)?;
        // What failed once is not tried in a loop.
        self.may_try(now).ok()?;
        let extent = &mut self.extents[at];
        let mut dirty = std::mem::take(&mut extent.dirty);
        if let Some(first_left) = dirty.keys().nth(PAGES_MAX).copied() {
            extent.dirty = dirty.split_off(&first_left);
        }
        let pages: Vec<u32> = dirty.keys().copied().collect();
        let first = at * self.geometry.pages() as usize;
        let mut bytes = Vec::with_capacity(pages.len() * PAGE_BYTES);
        for page in &pages {
            let from = (first + *page as usize) * PAGE_BYTES;
            bytes.extend_from_slice(&self.image[from..from + PAGE_BYTES]);
        }
        extent.flying = Some(dirty);
        Some(Pages {
            extent: at as u32,
            pages,
            bytes,
            commit: self.options.medium == Medium::Files(Durability::Power),
        })
    }

    /// The pages of an extent that were under way are written, and last where that was asked; or they do not.
    pub fn on_pages(&mut self, extent: u32, ended: Result<(), Trouble>, now: Time) {
        let flying = self
            .extents
            .get_mut(extent as usize)
            .and_then(|extent| extent.flying.take())
            .unwrap_or_default();
        match ended {
            Ok(()) => self.on_success(false),
            Err(trouble) => {
                // Nobody knows what is on the medium now. These pages say which records are erased, and a later purge has to find them waiting.
                let dirty = &mut self.extents[extent as usize].dirty;
                for page in flying.keys() {
                    dirty.entry(*page).or_default();
                }
                self.on_trouble(trouble, false, now);
            }
        }
        for waiter in flying.into_values().flatten() {
            match (waiter, ended) {
                (Waiter::Put(put, sealed), Ok(())) => match self.puts.get(&put) {
                    Some(pending) if pending.doomed => self.fail(put, PutFailed::Purged),
                    Some(_) => self.acknowledge(put, &sealed),
                    None => {}
                },
                (Waiter::Put(put, _), Err(trouble)) => self.fail(put, trouble.into()),
                (Waiter::Purge(purge), ended) => self.on_purged_page(purge, ended),
            }
        }
    }

    /// When there is something to be done without anybody asking.
    pub fn next_timeout(&self) -> Option<Time> {
        let dirty = self
            .extents
            .iter()
            .any(|extent| extent.flying.is_none() && !extent.dirty.is_empty());
        let probe = match self.condition {
            Condition::Aside { probe_at, .. } if dirty => Some(probe_at),
            _ => None,
        };
        let scrub = self.next_scrub();
        [probe, scrub, self.books.next_timeout()].into_iter().flatten().min()
    }

    pub fn on_timeout(&mut self, now: Time) {
        self.books.on_timeout(now);
    }

    fn acknowledge(&mut self, put: PutId, sealed: &Sealed) {
        let Some(Pending { id, slot, length, .. }) = self.puts.remove(&put) else {
            return;
        };
        self.queued -= u64::from(length);
        self.books.seal(sealed, 0);
        if let Some(there) = self.books.index().find(&id) {
            self.places[there.at()] = slot;
        }
        self.settle();
        let ended = Ok(());
        self.events.push_back(ShelfEvent::PutDone { put, id, ended });
    }

    fn fail(&mut self, put: PutId, why: PutFailed) {
        let Some(Pending { id, slot, length, .. }) = self.puts.remove(&put) else {
            return;
        };
        self.queued -= u64::from(length);
        self.books.give_up(id);
        // Whatever block was recorded here has lost its payload.
        self.erase(slot);
        self.slots.release(slot);
        let ended = Err(why);
        self.events.push_back(ShelfEvent::PutDone { put, id, ended });
    }

    /// Carries out what the books have decided.
    fn settle(&mut self) {
        while let Some(event) = self.books.next_event() {
            let Event::Removed { id, slot, parent, .. } = event else {
                continue;
            };
            let place = std::mem::replace(&mut self.places[slot.at()], NOWHERE);
            if place == NOWHERE {
                continue;
            }
            let Found::Block(record) = self.record(place) else {
                self.slots.release(place);
                continue;
            };
            let read = self.options.hand_down.then(|| self.begin_read(place, record));
            self.slots.release(place);
            self.events.push_back(ShelfEvent::Removed {
                id,
                parent,
                tenant: record.tenant,
                parts: record.parts,
                read,
            });
        }
    }

    fn on_success(&mut self, read: bool) {
        if let Condition::Aside { reads_too, .. } = self.condition
            && (!read || reads_too)
        {
            self.condition = Condition::Serving;
            self.counts.returned += 1;
        }
    }

    fn on_trouble(&mut self, trouble: Trouble, reads_too: bool, now: Time) {
        match &mut self.condition {
            Condition::Aside {
                trouble: last,
                reads_too: reads,
                ..
            } => {
                *last = trouble;
                *reads |= reads_too;
            }
            Condition::Serving => {
                self.counts.set_aside += 1;
                self.condition = Condition::Aside {
                    trouble,
                    since: now,
                    probe_at: now.saturating_add(PROBE_FIRST),
                    wait: PROBE_FIRST,
                    reads_too,
                };
            }
        }
    }

    fn locate(&self, slot: u32) -> (u32, u64) {
        let (extent, nth) = (slot / self.geometry.slots, slot % self.geometry.slots);
        (extent, u64::from(nth) * self.geometry.stride())
    }

    fn record_at(&self, slot: u32) -> usize {
        let (extent, nth) = (slot / self.geometry.slots, slot % self.geometry.slots);
        extent as usize * self.geometry.pages() as usize * PAGE_BYTES + nth as usize * RECORD_BYTES
    }

    fn record(&self, slot: u32) -> Found {
        let at = self.record_at(slot);
        let bytes = self.image[at..at + RECORD_BYTES].try_into().expect("a record");
        Record::decode(bytes, &self.geometry)
    }

    fn write_record(&mut self, slot: u32, bytes: [u8; RECORD_BYTES]) {
        let at = self.record_at(slot);
        self.image[at..at + RECORD_BYTES].copy_from_slice(&bytes);
    }

    /// The page of this slot's record is to be written.
    fn dirty(&mut self, slot: u32) -> &mut Vec<Waiter> {
        let (extent, nth) = (slot / self.geometry.slots, slot % self.geometry.slots);
        let extent = &mut self.extents[extent as usize];
        extent.dirty.entry(nth / RECORDS_A_PAGE).or_default()
    }

    fn await_page(&mut self, slot: u32, waiter: Waiter) {
        self.dirty(slot).push(waiter);
    }

    /// What was recorded of this slot is not to be found again; nobody waits for that to be written.
    fn erase(&mut self, slot: u32) -> bool {
        let was = matches!(self.record(slot), Found::Block(_));
        if was {
            self.write_record(slot, Record::erased());
            self.counts.erased += 1;
            if self.options.medium != Medium::Memory {
                self.dirty(slot);
            }
        }
        was
    }
}

#[cfg(test)]
mod tests;
