//! After a start: what the index files say is there, and whether it is.

use std::collections::HashMap;

use weft_plan::Time;

use super::super::Sealed;
use super::format::{self, ExtentKind, Found, PAGE_BYTES, RECORD_BYTES, Record, TierId};
use super::{EPOCH_SHIFT, NOWHERE, Read, Shelf, Trouble, Verdict};

/// A record that was found, and where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recovered {
    slot: u32,
    record: Record,
}

/// What was found at the start is verified at leisure, once.
#[derive(Debug, Default)]
pub(super) struct Scrub {
    left: Vec<u32>,
    next_at: Time,
    under_way: bool,
}

impl Shelf {
    /// Takes up what an extent's index file says; no payload is read. One that is to be made [anew](ExtentKind::Fresh) has nothing, and one that is
    /// [another's](ExtentKind::Strange) is not used. Call it for each extent, then [`Shelf::start`].
    ///
    /// Where what is acknowledged is to outlive the power, what is read here must have been made to last first: a write of the life before may be
    /// seen and not be on the disk, and an older record would come back that no purge of this life knows of.
    pub fn recover(&mut self, extent: u32, index: &[u8]) -> ExtentKind {
        let tier: TierId = self.header.map_or([0; 16], |header| header.tier);
        let kind = format::extent_kind(index, &tier, extent, &self.geometry);
        let first = extent * self.geometry.slots;
        match kind {
            ExtentKind::Strange => {
                self.counts.strange += 1;
                self.extents[extent as usize].strange = true;
                (first..first + self.geometry.slots).for_each(|slot| self.slots.claim(slot));
            }
            ExtentKind::Own => {
                let records = index[PAGE_BYTES..].as_chunks::<RECORD_BYTES>().0;
                let to_come = self.sequence;
                for (bytes, slot) in records.iter().zip(first..first + self.geometry.slots) {
                    match Record::decode(bytes, &self.geometry) {
                        Found::Nothing | Found::Erased => {}
                        Found::Torn => self.counts.torn += 1,
                        Found::Block(record) if record.sequence > to_come => self.counts.left_out += 1,
                        Found::Block(record) => {
                            self.write_record(slot, *bytes);
                            self.recovered.push(Recovered { slot, record });
                        }
                    }
                }
            }
            ExtentKind::Fresh => {}
        }
        kind
    }

    /// Everything is recovered: blocks can be found from now on.
    pub fn start(&mut self) {
        let mut found = std::mem::take(&mut self.recovered);
        found.sort_unstable_by_key(|found| (std::cmp::Reverse(found.record.sequence), found.slot));
        let mut newest = HashMap::with_capacity(found.len());
        let before = found.len();
        found.retain(|found| newest.insert(found.record.id, ()).is_none());
        drop(newest);
        self.counts.older = (before - found.len()) as u64;
        // Oldest first, as they were put, but none before the one that it follows.
        found.reverse();
        let by_half: HashMap<u64, usize> = found
            .iter()
            .enumerate()
            .map(|(at, found)| (format::first_half(&found.record.id), at))
            .collect();
        let mut begun = vec![false; found.len()];
        let mut chain = Vec::new();
        for start in 0..found.len() {
            let mut next = Some(start);
            while let Some(at) = next.filter(|at| !begun[*at]) {
                begun[at] = true;
                chain.push(at);
                next = by_half.get(&found[at].record.parent).copied();
            }
            while let Some(at) = chain.pop() {
                let Recovered { slot, record } = found[at];
                let parent = by_half.get(&record.parent).map(|parent| found[*parent].record);
                let parent = parent.filter(|parent| parent.tenant == record.tenant);
                self.restore(slot, &record, parent.map(|parent| parent.id));
            }
        }
        if self.options.scrub_bytes_per_second > 0 {
            self.scrub.left = found.iter().map(|found| found.slot).collect();
        }
    }

    fn restore(&mut self, slot: u32, record: &Record, parent: Option<super::BlockId>) {
        let sealed = Sealed::recorded(record.id, record.parts, record.length);
        let account = self.account(record.tenant);
        match account.is_ok_and(|account| self.books.restore(account, &sealed, parent, 0)) {
            true => {
                let there = self.books.index().find(&record.id).expect("it was just restored");
                self.places[there.at()] = slot;
                self.slots.claim(slot);
                self.counts.recovered += 1;
            }
            false => self.counts.left_out += 1,
        }
    }

    /// The next block to verify, if it is time: read it, and [end](Shelf::end_scrub) it.
    pub fn scrub(&mut self, now: Time) -> Option<Read> {
        if self.scrub.under_way || self.scrub.next_at > now {
            return None;
        }
        while let Some(slot) = self.scrub.left.pop() {
            let Found::Block(record) = self.record(slot) else {
                continue;
            };
            let of_before = record.sequence <= self.epoch_begin();
            let found = self
                .books
                .index()
                .find(&record.id)
                .filter(|there| self.places[there.at()] == slot);
            if found.is_none() || !of_before || slot == NOWHERE {
                continue;
            }
            let wait = u64::from(record.length) * 1_000_000_000 / self.options.scrub_bytes_per_second.max(1);
            self.scrub.next_at = now.saturating_add(Time::from_ns(wait));
            self.scrub.under_way = true;
            return Some(self.begin_read(slot, record));
        }
        None
    }

    pub fn end_scrub(&mut self, read: &Read, ended: Result<u64, Trouble>, now: Time) -> Verdict {
        self.scrub.under_way = false;
        self.counts.scrubbed += 1;
        self.end_read(read.read, ended, now)
    }

    pub(super) fn next_scrub(&self) -> Option<Time> {
        (!self.scrub.under_way && !self.scrub.left.is_empty()).then_some(self.scrub.next_at)
    }

    fn epoch_begin(&self) -> u64 {
        self.header.map_or(0, |header| u64::from(header.epoch)) << EPOCH_SHIFT
    }
}
