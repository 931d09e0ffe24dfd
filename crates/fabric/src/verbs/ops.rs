//! What a path has been asked to do, from post until it has completed.

use weft_plan::Time;
use weft_protocol::{Atomic, Direction, Failure, Move, OpId};

use super::regions::Near;

/// An operation that has not completed.
#[derive(Debug)]
pub(super) struct OpenOp {
    pub id: OpId,
    pub deadline: Time,
    pub work: Work,
    /// Segments of it that the device has.
    pub posted: u32,
    /// The device has given one of them back unfinished.
    pub flushed: bool,
    /// The device of the peer has refused it: no byte of it lands any more.
    pub refused: bool,
    /// It ends with this as soon as the device has none of it, and since when.
    pub ending: Option<(Failure, Time)>,
}

#[derive(Debug)]
pub(super) enum Work {
    Message {
        /// Its last packet has been handed to the device.
        packed: bool,
    },
    Move(Moving),
    Atomic(Asking),
}

/// An atomic operation, by a question to the peer or by the device.
#[derive(Debug)]
pub(super) struct Asking {
    pub atomic: Atomic,
    /// The far region, among those that the path knows; where the peer is asked, none.
    pub target: u32,
    pub stage: AskingStage,
}

/// How far an atomic operation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskingStage {
    /// The peer has not said yet where the word is.
    AwaitsTarget,
    /// The question to the peer waits for its turn.
    Queued,
    /// The question has been handed to the device: the peer may have acted on it.
    Asked,
    /// It is to be handed to the device.
    Waiting,
    /// The device has it.
    Posted,
    /// The device is done with it, and this is what the word held.
    Found(u64),
}

impl Asking {
    /// May it have been carried out?
    pub(super) fn is_sent(&self) -> bool {
        matches!(
            self.stage,
            AskingStage::Asked | AskingStage::Posted | AskingStage::Found(_)
        )
    }
}

#[derive(Debug)]
pub(super) struct Moving {
    pub part: Move,
    pub near: Near,
    /// The far region, among those that the path knows.
    pub target: u32,
    /// The next byte of the leg to hand to the device.
    pub at: u64,
    pub stage: Stage,
}

/// In the place of a far region that the path has forgotten.
pub(super) const NO_TARGET: u32 = u32::MAX;

/// How far a move has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The peer has not said yet where the memory is.
    AwaitsTarget,
    /// Its bytes are being handed to the device.
    Waiting,
    /// The device has all of its bytes, but not the frame that tells of their arrival.
    Telling,
    /// The device has, or has had, all of it.
    HandedOver,
    /// The bytes are in place; the peer is computing their checksum.
    AwaitsSum,
}

impl Work {
    /// Does it change anything at the peer's side, which may still happen when the device here has given it up?
    pub(super) fn acts_there(&self) -> bool {
        match self {
            Work::Message { .. } => false,
            Work::Move(moving) => moving.is_write(),
            Work::Atomic(_) => true,
        }
    }

    /// The far region that it names to the device, among those that the path knows.
    pub(super) fn target(&self) -> Option<u32> {
        match self {
            Work::Message { .. } => None,
            Work::Move(moving) => Some(moving.target),
            Work::Atomic(asking) => Some(asking.target),
        }
        .filter(|target| *target != NO_TARGET)
    }

    /// The path has forgotten the far region.
    pub(super) fn forget_target(&mut self) {
        match self {
            Work::Message { .. } => {}
            Work::Move(moving) => moving.target = NO_TARGET,
            Work::Atomic(asking) => asking.target = NO_TARGET,
        }
    }

    /// Has the device, or has it had, all of it?
    pub(super) fn is_handed_over(&self) -> bool {
        match self {
            Work::Message { packed } => *packed,
            Work::Move(moving) => moving.stage == Stage::HandedOver,
            Work::Atomic(asking) => asking.is_sent(),
        }
    }
}

impl Moving {
    pub(super) fn is_write(&self) -> bool {
        self.part.direction == Direction::Write
    }
}

/// Operations by a number: the slot in the low bits, a count above, so that a number is never used twice.
#[derive(Debug, Default)]
pub(super) struct Ops {
    slots: Vec<Option<(u64, OpenOp)>>,
    free: Vec<u32>,
    counted: u64,
}

const SLOT_BITS: u32 = 16;

/// An operation's number on its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Serial(pub u64);

impl Serial {
    fn slot(self) -> usize {
        (self.0 & ((1 << SLOT_BITS) - 1)) as usize
    }
}

impl Ops {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn insert(&mut self, op: OpenOp) -> Serial {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        let serial = self.counted << SLOT_BITS | u64::from(slot);
        self.counted += 1;
        self.slots[slot as usize] = Some((serial, op));
        Serial(serial)
    }

    pub(super) fn find(&mut self, serial: Serial) -> Option<&mut OpenOp> {
        let (known, op) = self.slots.get_mut(serial.slot())?.as_mut()?;
        (*known == serial.0).then_some(op)
    }

    pub(super) fn remove(&mut self, serial: Serial) -> Option<OpenOp> {
        self.find(serial)?;
        self.free.push(serial.slot() as u32);
        self.slots[serial.slot()].take().map(|(_, op)| op)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Serial, &OpenOp)> {
        self.slots.iter().flatten().map(|(serial, op)| (Serial(*serial), op))
    }

    /// The numbers of those that `wanted` picks, so that they can be changed one by one.
    pub(super) fn pick(&self, wanted: impl Fn(&OpenOp) -> bool) -> Vec<Serial> {
        let picked = self.iter().filter(|(_, op)| wanted(op));
        picked.map(|(serial, _)| serial).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(id: u64) -> OpenOp {
        OpenOp {
            id: OpId(id),
            deadline: Time::MAX,
            work: Work::Message { packed: false },
            posted: 0,
            flushed: false,
            refused: false,
            ending: None,
        }
    }

    #[test]
    fn a_number_is_never_used_twice() {
        let mut ops = Ops::default();
        let (first, second) = (ops.insert(op(1)), ops.insert(op(2)));
        assert_eq!(ops.remove(first).map(|op| op.id), Some(OpId(1)));
        assert!(ops.remove(first).is_none());
        let third = ops.insert(op(3));
        assert_eq!(third.slot(), first.slot());
        assert!(ops.find(first).is_none());
        assert_eq!(ops.find(third).map(|op| op.id), Some(OpId(3)));
        assert_eq!(ops.len(), 2);
        assert_eq!(ops.pick(|op| op.id == OpId(2)), [second]);
    }
}
