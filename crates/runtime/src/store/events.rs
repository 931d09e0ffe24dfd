//! What has come and gone, as values: a bounded queue, with a count of what did not fit.

use std::collections::VecDeque;

use weft_protocol::block::BlockId;
use weft_protocol::block::shelf::ShelfEvent;

use super::tier::{Bytes, Tier};

/// What a tier is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TierKind {
    /// Memory of this process.
    Memory,
    /// Files of a directory.
    Files,
}

impl TierKind {
    pub(super) fn of(tier: &Tier) -> TierKind {
        match tier.bytes {
            Bytes::Slab(_) => TierKind::Memory,
            Bytes::Files(_) => TierKind::Files,
        }
    }

    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            TierKind::Memory => "memory",
            TierKind::Files => "files",
        }
    }
}

/// A block has come to a tier, or has left it: because it was evicted, purged, or found to be not what was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockEvent {
    /// Which one.
    pub id: BlockId,
    /// Whether it can be read from there now.
    pub stored: bool,
    /// The tier's number; the first is 0.
    pub tier: usize,
    /// What that is made of.
    pub kind: TierKind,
}

/// Events that were taken, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakenEvents {
    /// What has happened.
    pub events: Vec<BlockEvent>,
    /// How many were lost before the first of these, since the last time: nobody took events, and the queue was full. What is there then has to be asked for.
    pub lost: u64,
}

/// Events that nobody has taken yet. Where no room was asked for, there are none.
#[derive(Debug, Default)]
pub(super) struct Queue {
    most: usize,
    events: VecDeque<BlockEvent>,
    lost: u64,
}

impl Queue {
    pub(super) fn new(most: usize) -> Queue {
        Queue {
            most,
            ..Queue::default()
        }
    }

    pub(super) fn push(&mut self, tier: usize, kind: TierKind, event: &ShelfEvent) {
        let (id, stored) = match event {
            ShelfEvent::PutDone { id, ended: Ok(()), .. } => (*id, true),
            ShelfEvent::Removed { id, .. } => (*id, false),
            _ => return,
        };
        if self.most == 0 {
            return;
        }
        // The oldest go: who is late is told so, and the latest news are what counts.
        if self.events.len() == self.most {
            self.events.pop_front();
            self.lost += 1;
        }
        self.events.push_back(BlockEvent { id, stored, tier, kind });
    }

    pub(super) fn take(&mut self, most: usize) -> TakenEvents {
        let most = most.min(self.events.len());
        TakenEvents {
            events: self.events.drain(..most).collect(),
            lost: std::mem::take(&mut self.lost),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_keeps_the_latest_and_counts_what_it_lost() {
        let removed = |number: u8| ShelfEvent::Removed {
            id: BlockId::from_bytes([number; 16]),
            parent: None,
            tenant: super::super::TenantKey::of("a"),
            parts: 1,
            read: None,
        };
        let mut queue = Queue::new(2);
        for number in 1..=5 {
            queue.push(1, TierKind::Files, &removed(number));
        }
        let first = queue.take(1);
        assert_eq!((first.lost, first.events[0].id), (3, BlockId::from_bytes([4; 16])));
        assert!(!first.events[0].stored && first.events[0].tier == 1);
        assert_eq!((queue.take(9).events.len(), queue.take(9)), (1, TakenEvents::default()));
        let mut none = Queue::new(0);
        none.push(0, TierKind::Memory, &removed(1));
        assert_eq!(none.take(9), TakenEvents::default());
    }
}
