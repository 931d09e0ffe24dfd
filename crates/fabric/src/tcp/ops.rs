//! The moves that this side has asked for on a path, from post until the peer has said its last word on each.

use weft_plan::Time;
use weft_protocol::{Direction, Failure, Move, OpId};

/// A move that the peer may still speak of.
#[derive(Debug)]
pub(super) struct LocalOp {
    /// Its number on the wire.
    pub(super) wire: u64,
    pub(super) id: OpId,
    pub(super) deadline: Time,
    pub(super) part: Move,
    /// How many runs the request names.
    pub(super) runs: usize,
    pub(super) connection: usize,
    /// The job that sends a write.
    pub(super) job: Option<u64>,
    /// Bytes of a read that are in place.
    pub(super) received: u64,
    pub(super) stage: Stage,
}

/// How far a move has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Open,
    /// A write that lets go as soon as the peer says that it has.
    Ending(Failure),
    /// Completed; the peer's last word is still to come and means nothing any more.
    Ended,
}

impl LocalOp {
    pub(super) fn bytes(&self) -> u64 {
        self.part.range.end - self.part.range.start
    }
    pub(super) fn is_read(&self) -> bool {
        self.part.direction == Direction::Read
    }
}

/// Moves by their number on the wire: the slot in the low bits, a count above, so that a number is never used twice.
#[derive(Debug, Default)]
pub(super) struct Ops {
    slots: Vec<Option<LocalOp>>,
    free: Vec<usize>,
    numbered: u64,
}

const SLOT_BITS: u32 = 16;

impl Ops {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The number that [`Ops::insert`] will give to the next move.
    pub(super) fn next_wire(&self) -> u64 {
        let slot = self.free.last().copied().unwrap_or(self.slots.len());
        self.numbered << SLOT_BITS | slot as u64
    }

    pub(super) fn insert(&mut self, op: LocalOp) {
        debug_assert_eq!(op.wire, self.next_wire());
        self.numbered += 1;
        match self.free.pop() {
            Some(slot) => self.slots[slot] = Some(op),
            None => self.slots.push(Some(op)),
        }
    }

    pub(super) fn find(&mut self, wire: u64) -> Option<&mut LocalOp> {
        let slot = (wire & ((1 << SLOT_BITS) - 1)) as usize;
        self.slots.get_mut(slot)?.as_mut().filter(|op| op.wire == wire)
    }

    pub(super) fn remove(&mut self, wire: u64) -> Option<LocalOp> {
        self.find(wire)?;
        let slot = (wire & ((1 << SLOT_BITS) - 1)) as usize;
        self.free.push(slot);
        self.slots[slot].take()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &LocalOp> {
        self.slots.iter().flatten()
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = LocalOp> {
        self.free.clear();
        std::mem::take(&mut self.slots).into_iter().flatten()
    }
}
