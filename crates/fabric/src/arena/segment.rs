//! A segment: what one rank writes and its neighbours read.
//!
//! Each word has one writer, the owner of the segment; neighbours map it read-only. So no neighbour, however broken, can change what
//! a rank has written, and what it reads of others it checks.

use std::fmt;
use std::sync::Arc;

use weft_protocol::Memory;
use weft_protocol::group::{Abort, CallRecord, MessageHead, Recent};
use weft_protocol::region::{Epoch, RegionKey};

use super::Seen;
use crate::memory::{AllocateOptions, HostMemory, MemoryError};
use crate::sync::{AtomicU32, AtomicU64, Ordering, Reading, SharedWords, Writing, fence, own_half, own_value};

/// What a core fetches at a time.
const LINE: usize = 64;
const PAGE: usize = 4096;
/// Two lines: the second is read only for messages that lie in their sender's memory.
const HEAD_BYTES: usize = 2 * LINE;

/// Between the payloads of two slots, so that short messages, which are at the beginning of theirs, do not all compete for the same
/// few places of a cache.
const STAGGER_BYTES: usize = 17 * LINE;

/// Where everything is in a segment. All ranks of an arena have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    /// Ranks in the arena, the owner included.
    pub ranks: usize,
    pub channels: usize,
    pub slots: usize,
    pub slot_bytes: usize,
}

/// Words of the first page, each in a line of its own where others look at it often.
mod header {
    use super::LINE;

    pub const LAYOUT: usize = 0;
    pub const NEWS: usize = LINE;
    pub const RESTING: usize = 2 * LINE;
    pub const WITHDRAWN: usize = 3 * LINE;
    pub const STATUS: usize = 4 * LINE;
    pub const RECENT: usize = 8 * LINE;
    pub const ABORT: usize = 16 * LINE;
}

impl Layout {
    pub(super) fn lane(&self, position: usize, channel: usize) -> usize {
        position * self.channels + channel
    }
    fn lanes(&self) -> usize {
        self.ranks * self.channels
    }
    fn consumed(&self, lane: usize) -> usize {
        PAGE + lane * LINE
    }
    fn heads(&self) -> usize {
        (PAGE + self.lanes() * LINE).next_multiple_of(PAGE)
    }
    fn head(&self, lane: usize, number: u64) -> usize {
        self.heads() + (lane * self.slots + self.slot(number)) * HEAD_BYTES
    }
    fn payload(&self, lane: usize, number: u64) -> usize {
        let first = (self.heads() + self.lanes() * self.slots * HEAD_BYTES).next_multiple_of(PAGE);
        first + (lane * self.slots + self.slot(number)) * (self.slot_bytes + STAGGER_BYTES)
    }
    fn slot(&self, number: u64) -> usize {
        number as usize & (self.slots - 1)
    }
    pub(super) fn bytes(&self) -> usize {
        self.payload(self.lanes(), 0)
    }
    /// Never zero, and different where the layout is.
    fn digest(&self) -> u64 {
        let parts = [self.ranks, self.channels, self.slots, self.slot_bytes];
        let mix = |digest: u64, part: usize| (digest ^ part as u64).wrapping_mul(0x100_0000_01b3);
        parts.into_iter().fold(0xcbf2_9ce4_8422_2325, mix) | 1
    }
}

/// A segment, one's own or a neighbour's.
#[derive(Clone)]
pub(super) struct Segment {
    words: SharedWords,
    layout: Layout,
    _kept: Kept,
}

/// What keeps the bytes of a segment where they are.
#[derive(Clone)]
enum Kept {
    Own { _memory: Arc<HostMemory> },
    Seen { _mapping: Arc<dyn Seen> },
}

/// A message's description in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub head: MessageHead,
    pub body: Body,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// So many bytes of the message are in the slot's payload. Those of a longer message follow in the next slots.
    Here(u64),
    /// The message lies in its sender's memory.
    There { key: RegionKey, offset: u64 },
}

impl Segment {
    /// Memory for a segment, ready to be mapped by the neighbours.
    pub(super) fn allocate(layout: Layout) -> Result<Arc<HostMemory>, MemoryError> {
        // A child must neither tell the neighbours anything nor take part in what its parent does.
        let options = AllocateOptions {
            not_inherited: true,
            ..AllocateOptions::default()
        };
        let memory = Arc::new(HostMemory::allocate(layout.bytes(), options)?);
        let own = Segment::own(layout, Arc::clone(&memory)).expect("memory of the layout's size");
        own.word(header::LAYOUT).store(layout.digest(), Ordering::Release);
        Ok(memory)
    }

    /// `None` where the memory is of another size.
    pub(super) fn own(layout: Layout, memory: Arc<HostMemory>) -> Option<Segment> {
        (memory.len() >= layout.bytes() as u64).then(|| Segment {
            words: SharedWords::new(memory.as_ptr()),
            layout,
            _kept: Kept::Own { _memory: memory },
        })
    }

    /// `None` where it is no segment of this layout.
    pub(super) fn seen(layout: Layout, mapping: Arc<dyn Seen>) -> Option<Segment> {
        let fits = mapping.bytes() >= layout.bytes() as u64;
        let segment = Segment {
            words: SharedWords::new(mapping.as_ptr().cast_mut()),
            layout,
            _kept: Kept::Seen { _mapping: mapping },
        };
        (fits && segment.word(header::LAYOUT).load(Ordering::Relaxed) == layout.digest()).then_some(segment)
    }

    /// Makes everything that stands in for this memory in a model, which must be while there is one thread.
    #[cfg(loom)]
    pub(super) fn stand_in(&self) {
        let layout = self.layout;
        let words = |at: usize, count: usize| (0..count).map(move |index| at + index * 8);
        let slots = (0..layout.lanes()).flat_map(|lane| (0..layout.slots as u64).map(move |number| (lane, number)));
        let places = [header::RESTING, header::WITHDRAWN].into_iter();
        let places = places.chain(words(header::STATUS, 4 + CallRecord::WORDS / 8));
        let places = places.chain(words(header::RECENT, 1 + Recent::CALLS));
        let places = places.chain(words(header::ABORT, 1 + Abort::BYTES / 8));
        let places = places.chain((0..layout.lanes()).map(|lane| layout.consumed(lane)));
        let places = places.chain(
            slots
                .clone()
                .flat_map(|(lane, number)| words(layout.head(lane, number), 10)),
        );
        for at in places {
            self.word(at);
        }
        slots.for_each(|(lane, number)| drop(self.payload(lane, number)));
        self.news();
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8) && at + 8 <= self.layout.bytes());
        // SAFETY: within the segment, as every place in the layout is; aligned, because segments are pages and places multiples of 8;
        // and no access to this word is anything but atomic. A neighbour's word is only loaded, and relaxed, which read-only pages permit.
        unsafe { self.words.word(at) }
    }

    /// A neighbour's word with everything that was written before it.
    fn read(&self, at: usize) -> u64 {
        let value = self.word(at).load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        value
    }

    /// The word that changes with every message and every acknowledgement of this rank.
    pub(super) fn news(&self) -> &AtomicU32 {
        // SAFETY: as in `word`; nobody accesses these four bytes in any other size.
        unsafe { self.words.half(header::NEWS) }
    }

    /// The only writer says that there is something new. The caller wakes those who rest.
    pub(super) fn tell_news(&self) {
        let news = own_half(self.news());
        self.news().store(news.wrapping_add(1), Ordering::Release);
    }

    pub(super) fn is_resting(&self) -> bool {
        self.word(header::RESTING).load(Ordering::Relaxed) != 0
    }

    pub(super) fn set_resting(&self, resting: bool) {
        // The barrier between this and the last look at the news is the caller's.
        self.word(header::RESTING).store(u64::from(resting), Ordering::Relaxed);
    }

    /// How many slots the owner has consumed of the lane that the rank at `position` writes.
    pub(super) fn consumed(&self, position: usize, channel: usize) -> u64 {
        self.read(self.layout.consumed(self.layout.lane(position, channel)))
    }

    pub(super) fn set_consumed(&self, position: usize, channel: usize, consumed: u64) {
        let at = self.layout.consumed(self.layout.lane(position, channel));
        self.word(at).store(consumed, Ordering::Release);
    }

    /// The slot of this number on a lane, once its message is there.
    pub(super) fn slot(&self, lane: usize, number: u64) -> Option<Slot> {
        let at = self.layout.head(lane, number);
        if self.read(at) != number + 1 {
            return None;
        }
        let word = |index: usize| self.word(at + index * 8).load(Ordering::Relaxed);
        let (index, there) = (word(3) as u32, word(3) >> 32 != 0);
        let head = MessageHead {
            call: word(1),
            signature: word(2),
            index,
            len: word(4),
        };
        let body = if there {
            let secret = u128::from(word(9)) << 64 | u128::from(word(8));
            let key = RegionKey {
                epoch: Epoch(word(6)),
                slot: word(7) as u32,
                secret,
            };
            Body::There { key, offset: word(5) }
        } else {
            Body::Here(word(5))
        };
        Some(Slot { head, body })
    }

    /// Publishes a message. Its payload, if it has one, is in place.
    pub(super) fn set_slot(&self, lane: usize, number: u64, slot: &Slot) {
        let at = self.layout.head(lane, number);
        let set = |index: usize, value: u64| self.word(at + index * 8).store(value, Ordering::Relaxed);
        set(1, slot.head.call);
        set(2, slot.head.signature);
        set(4, slot.head.len);
        match slot.body {
            Body::Here(len) => {
                set(3, u64::from(slot.head.index));
                set(5, len);
            }
            Body::There { key, offset } => {
                set(3, u64::from(slot.head.index) | 1 << 32);
                set(5, offset);
                set(6, key.epoch.0);
                set(7, u64::from(key.slot));
                set(8, key.secret as u64);
                set(9, (key.secret >> 64) as u64);
            }
        }
        self.word(at).store(number + 1, Ordering::Release);
    }

    /// The bytes of a slot whose message is there: `slot_bytes` of them.
    pub(super) fn payload(&self, lane: usize, number: u64) -> Reading {
        // SAFETY: within the segment, as every place in the layout is.
        unsafe { self.words.reading(self.layout.payload(lane, number)) }
    }

    /// The bytes of a slot that is free, for its next message.
    pub(super) fn payload_to_fill(&self, lane: usize, number: u64) -> Writing {
        // SAFETY: as above.
        unsafe { self.words.writing(self.layout.payload(lane, number)) }
    }

    /// Whether the owner has left a call while messages of it still lay in its memory. Nothing that was read from there before this
    /// was asked may be used then.
    pub(super) fn is_withdrawn(&self) -> bool {
        fence(Ordering::Acquire);
        self.read(header::WITHDRAWN) != 0
    }

    /// Says so for good: a call that is left is a failure, after which the arena is of no further use.
    pub(super) fn withdraw(&self) {
        self.word(header::WITHDRAWN).store(1, Ordering::Relaxed);
        // Whoever reads what the owner writes to the memory from now on finds the word after it.
        fence(Ordering::SeqCst);
    }

    /// Writes a status. `words` only where they have changed. Whoever begins a call also says so among its recent ones.
    pub(super) fn set_status(&self, call: &CallRecord, detail: u64, words: bool) {
        let set = |index: usize, value: u64| self.word(header::STATUS + index * 8).store(value, Ordering::Relaxed);
        let version = own_value(self.word(header::STATUS));
        set(0, version | 1);
        fence(Ordering::Release);
        set(1, call.number);
        set(2, call.signature);
        set(3, detail);
        if call.number != CallRecord::PAIRWISE {
            let place = header::RECENT + 8 * (1 + Recent::place(call.number));
            self.word(header::RECENT)
                .store(call.number.wrapping_add(1), Ordering::Relaxed);
            self.word(place).store(call.signature, Ordering::Relaxed);
        }
        if words {
            for (index, bytes) in call.words.chunks_exact(8).enumerate() {
                set(4 + index, u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
            }
        }
        self.word(header::STATUS).store((version | 1) + 1, Ordering::Release);
    }

    /// A number that changes whenever the owner writes a status.
    pub(super) fn pulse(&self) -> u64 {
        self.read(header::STATUS)
    }

    /// A status with its detail and the calls before; `None` while it is being written, or where there is none yet.
    pub(super) fn status(&self) -> Option<(CallRecord, u64, Recent)> {
        let before = self.read(header::STATUS);
        let word = |index: usize| self.word(header::STATUS + index * 8).load(Ordering::Relaxed);
        let mut words = [0; CallRecord::WORDS];
        for (index, bytes) in words.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word(4 + index).to_le_bytes());
        }
        let (number, signature, detail) = (word(1), word(2), word(3));
        let mut recent = Recent {
            begun: self.word(header::RECENT).load(Ordering::Relaxed),
            ..Recent::NONE
        };
        for (index, signature) in recent.signatures.iter_mut().enumerate() {
            *signature = self.word(header::RECENT + 8 * (1 + index)).load(Ordering::Relaxed);
        }
        fence(Ordering::Acquire);
        let whole = before != 0 && before & 1 == 0 && self.word(header::STATUS).load(Ordering::Relaxed) == before;
        let call = CallRecord {
            number,
            signature,
            words,
        };
        whole.then_some((call, detail, recent))
    }

    /// Writes the one abort that an owner ever has to tell, with the time at which it noticed.
    pub(super) fn set_abort(&self, abort: &Abort, at_ns: u64) {
        for (index, bytes) in abort.to_bytes().chunks_exact(8).enumerate() {
            let value = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            self.word(header::ABORT + 8 + index * 8).store(value, Ordering::Relaxed);
        }
        self.word(header::ABORT).store(at_ns.max(1), Ordering::SeqCst);
    }

    /// Whether this rank, whose segment it is, has told one.
    pub(super) fn has_told(&self) -> bool {
        own_value(self.word(header::ABORT)) != 0
    }

    pub(super) fn has_abort(&self) -> bool {
        self.word(header::ABORT).load(Ordering::Relaxed) != 0
    }

    /// The abort and its time. `None` where there is none, or where it makes no sense.
    pub(super) fn abort(&self) -> Option<(u64, Abort)> {
        let at_ns = self.read(header::ABORT);
        let mut bytes = [0; Abort::BYTES];
        for (index, bytes) in bytes.chunks_exact_mut(8).enumerate() {
            let value = self.word(header::ABORT + 8 + index * 8).load(Ordering::Relaxed);
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        let abort = Abort::from_bytes(&bytes).ok()?;
        (at_ns != 0).then_some((at_ns, abort))
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Segment({:?})", self.words)
    }
}

const _: () = assert!(CallRecord::WORDS.is_multiple_of(8) && Abort::BYTES.is_multiple_of(8));
const _: () = assert!(header::STATUS + 4 * 8 + CallRecord::WORDS <= header::RECENT);
const _: () = assert!(header::RECENT + 8 * (1 + Recent::CALLS) <= header::ABORT);
const _: () = assert!(header::ABORT + 8 + Abort::BYTES <= PAGE);
const _: () = assert!(10 * 8 <= HEAD_BYTES);
