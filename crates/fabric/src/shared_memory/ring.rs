//! The bounce ring: shared memory through which a target copies for an initiator that the kernel keeps out of its process.
//!
//! The initiator makes the ring and hands out its slots. A word a slot says whether the target may touch its own memory on behalf
//! of that request: the target claims it before and gives it up after, and the initiator can withdraw what has not been claimed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use weft_protocol::{Access, Direction, Memory, Refusal, RegionTable};

use super::frame::Bounce;
use crate::memory::{HostMemory, Mapping, MemoryError, Protection, memory_file, page_bytes, seal, sealed_bytes};

pub(super) const SLOTS: u32 = 8;
pub(super) const SLOT_BYTES: usize = 256 << 10;
/// The words come first, on a page of their own.
const DATA_AT: usize = 64 << 10;
const RING_BYTES: usize = DATA_AT + SLOTS as usize * SLOT_BYTES;

const ASKED: u32 = 1;
const CLAIMED: u32 = 2;
const FINISHED: u32 = 3;
const WITHDRAWN: u32 = 0;

/// One end's view of a ring.
#[derive(Debug)]
pub(super) struct Ring {
    mapping: Mapping,
}

impl Ring {
    /// A new ring, and the file to hand to the peer.
    pub(super) fn create() -> Result<(Ring, OwnedFd), MemoryError> {
        let file = memory_file(c"weft-bounce", RING_BYTES, page_bytes(), 0)?;
        seal(&file, 0)?;
        let mapping = Mapping::not_inherited(file.as_fd(), RING_BYTES, Protection::ReadWrite)?;
        Ok((Ring { mapping }, file))
    }

    /// The ring that a peer made; `None` where the file is not one.
    pub(super) fn attach(file: BorrowedFd<'_>) -> Option<Ring> {
        sealed_bytes(file).filter(|&bytes| bytes == RING_BYTES)?;
        let mapping = Mapping::not_inherited(file, RING_BYTES, Protection::ReadWrite).ok()?;
        Some(Ring { mapping })
    }

    /// The first byte of a slot.
    pub(super) fn slot(&self, slot: u32) -> *mut u8 {
        assert!(slot < SLOTS, "a slot of the ring");
        // SAFETY: within the mapping, as just checked.
        unsafe { self.mapping.as_ptr().add(DATA_AT + slot as usize * SLOT_BYTES) }
    }

    /// The initiator lets the target claim the slot.
    pub(super) fn offer(&self, slot: u32, generation: u32) {
        self.word(slot).store(state(generation, ASKED), Ordering::SeqCst);
    }

    /// The initiator wants the target to stay out. `false`: it is inside, or has been.
    pub(super) fn withdraw(&self, slot: u32, generation: u32) -> bool {
        self.change(slot, generation, ASKED, WITHDRAWN)
    }

    /// Whether the target is inside now.
    pub(super) fn is_claimed(&self, slot: u32, generation: u32) -> bool {
        self.word(slot).load(Ordering::SeqCst) == state(generation, CLAIMED)
    }

    /// The target's side of one request: checks it as any target does, then copies.
    pub(super) fn serve(&self, bounce: &Bounce, table: &RegionTable, now_mono_ns: u64) -> Result<(), Refusal> {
        if bounce.slot >= SLOTS || bounce.spans.bytes() > SLOT_BYTES as u64 {
            return Err(Refusal::Malformed);
        }
        let wanted = match (bounce.direction, bounce.verify) {
            (Direction::Read, false) => Access::READ,
            _ => Access::WRITE,
        };
        let region = table.check(&bounce.key, wanted, &bounce.spans)?;
        let memory: &HostMemory = region.memory.as_any().downcast_ref().ok_or(Refusal::Unsupported)?;
        if now_mono_ns >= bounce.deadline_mono_ns || !self.claim(bounce.slot, bounce.generation) {
            return Err(Refusal::Late);
        }
        let copied = self.copy(bounce, memory);
        self.change(bounce.slot, bounce.generation, CLAIMED, FINISHED);
        copied
    }

    /// Copies what was asked for between a slot and a region, both checked.
    fn copy(&self, bounce: &Bounce, memory: &HostMemory) -> Result<(), Refusal> {
        let mut at = self.slot(bounce.slot);
        for span in bounce.spans.pieces(0..bounce.spans.bytes()) {
            let end = span
                .offset
                .checked_add(span.len)
                .expect("the spans were decoded with checks");
            assert!(end <= memory.len(), "the table checked the bounds");
            let len = span.len as usize;
            // SAFETY: the region's side was just checked, and the spans together fit into the slot.
            unsafe {
                match bounce.direction {
                    Direction::Read => memory.take(span.offset, at, len),
                    Direction::Write => memory.put(span.offset, at, len),
                }?;
                at = at.add(len);
            }
        }
        Ok(())
    }

    /// The target goes inside, unless the initiator has withdrawn.
    pub(super) fn claim(&self, slot: u32, generation: u32) -> bool {
        self.change(slot, generation, ASKED, CLAIMED)
    }

    fn change(&self, slot: u32, generation: u32, from: u32, to: u32) -> bool {
        self.word(slot)
            .compare_exchange(
                state(generation, from),
                state(generation, to),
                Ordering::SeqCst,
                Ordering::SeqCst,
            )
            .is_ok()
    }

    fn word(&self, slot: u32) -> &AtomicU32 {
        assert!(slot < SLOTS, "a slot of the ring");
        // SAFETY: the words lie on the first page of the mapping, aligned; both processes access them only as atomics.
        unsafe { &*self.mapping.as_ptr().cast::<AtomicU32>().add(slot as usize) }
    }
}

fn state(generation: u32, state: u32) -> u32 {
    generation << 2 | state
}
