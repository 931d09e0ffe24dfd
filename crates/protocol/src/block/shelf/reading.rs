//! Reads: a slot stays what it is while somebody reads it, and what was read is believed by its checksum only.

use weft_plan::Time;

use super::super::BlockId;
use super::format::{Found, Record, TenantKey};
use super::{Condition, NOWHERE, Shelf, ShelfEvent, Trouble};

/// How many blocks with wrong bytes are remembered by name.
const WRONGS_MAX: usize = 16;

/// Names a read under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReadId(u64);

/// Where a block's payload is. It stays there until the read is [ended](Shelf::end_read).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    pub read: ReadId,
    pub id: BlockId,
    pub extent: u32,
    pub offset: u64,
    pub length: u32,
    pub parts: u8,
    pub tenant: TenantKey,
    /// The block that it follows, where that is here.
    pub parent: Option<BlockId>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    slot: u32,
    record: Record,
}

/// What came of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "bytes of a read that is not right must not be used"]
pub enum Verdict {
    Right,
    /// The bytes are not what was written: a miss. The block is not found here any more.
    Wrong,
    Failed(Trouble),
}

/// A block whose bytes were not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong {
    pub id: BlockId,
    pub extent: u32,
    pub offset: u64,
    pub at: Time,
}

impl Shelf {
    /// Where a block is, if it is here and the medium is in use.
    pub fn read(&mut self, id: &BlockId, now: Time) -> Option<Read> {
        let slot = self.books.index().find(id)?;
        let place = self.places[slot.at()];
        let Found::Block(record) = (place != NOWHERE).then(|| self.record(place))? else {
            return None;
        };
        if matches!(self.condition, Condition::Aside { reads_too: true, .. }) {
            self.may_try(now).ok()?;
        }
        Some(self.begin_read(place, record))
    }

    pub(super) fn begin_read(&mut self, slot: u32, record: Record) -> Read {
        self.given += 1;
        let read = ReadId(self.given);
        self.slots.begin_reading(slot);
        self.reads.insert(read, Reading { slot, record });
        let (extent, offset) = self.locate(slot);
        let index = self.books.index();
        let parent = index.find(&record.id).and_then(|there| index.parent(there));
        Read {
            read,
            id: record.id,
            extent,
            offset,
            length: record.length,
            parts: record.parts,
            tenant: record.tenant,
            parent: parent.map(|parent| index.id(parent)),
        }
    }

    /// What the bytes of a read sum up to, for whoever reads them elsewhere: the sequence and the sum of its record.
    pub fn sum_of(&self, read: ReadId) -> Option<(u64, u64)> {
        self.reads
            .get(&read)
            .map(|reading| (reading.record.sequence, reading.record.sum))
    }

    /// The read has ended: with this checksum of its payload, or not well. Only what is [`Verdict::Right`] may be used.
    pub fn end_read(&mut self, read: ReadId, ended: Result<u64, Trouble>, now: Time) -> Verdict {
        let Some(Reading { slot, record }) = self.reads.remove(&read) else {
            return Verdict::Failed(Trouble::Refused);
        };
        let verdict = match ended {
            Ok(sum) if record.is_of(sum) => {
                self.on_success(true);
                Verdict::Right
            }
            Ok(_) => {
                self.counts.wrong += 1;
                let (extent, offset) = self.locate(slot);
                if self.wrongs.len() == WRONGS_MAX {
                    self.wrongs.pop_front();
                }
                let (id, at) = (record.id, now);
                self.wrongs.push_back(Wrong { id, extent, offset, at });
                self.lose(slot, &record);
                Verdict::Wrong
            }
            Err(trouble) => {
                self.counts.unread += 1;
                match trouble {
                    // A file that was cut has lost these bytes, and may have all others.
                    Trouble::BytesGone => self.lose(slot, &record),
                    // Nobody has asked the medium.
                    Trouble::Refused => {}
                    _ => self.on_trouble(trouble, true, now),
                }
                Verdict::Failed(trouble)
            }
        };
        self.slots.end_reading(slot);
        verdict
    }

    /// A read that came to nothing for a reason that says nothing of the medium.
    pub fn drop_read(&mut self, read: ReadId) {
        if let Some(Reading { slot, .. }) = self.reads.remove(&read) {
            self.slots.end_reading(slot);
        }
    }

    fn lose(&mut self, slot: u32, record: &Record) {
        let found = self.books.index().find(&record.id);
        // It may have left since, or been put again somewhere else.
        if let Some(there) = found.filter(|there| self.places[there.at()] == slot) {
            let index = self.books.index();
            let parent = index.parent(there).map(|parent| index.id(parent));
            self.places[there.at()] = NOWHERE;
            self.books.lose(record.id);
            self.erase(slot);
            self.slots.release(slot);
            self.settle();
            self.events.push_back(ShelfEvent::Removed {
                id: record.id,
                parent,
                tenant: record.tenant,
                parts: record.parts,
                read: None,
            });
        } else if self.record(slot) == Found::Block(*record) {
            self.erase(slot);
        }
    }
}
