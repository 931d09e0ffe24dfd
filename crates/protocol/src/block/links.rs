//! Queues threaded through slots: what policies order blocks by, without an allocation a block.

use super::Slot;

/// What a policy remembers of a block: its place in a queue, when it was touched, and how often. Sixteen bytes.
#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
    /// Touched as the n-th of all (48 bits), in which queue (8), used how often while it was there (8).
    packed: u64,
}

const NONE: u32 = u32::MAX;
const NO_QUEUE: u8 = u8::MAX;
const UNLINKED: Link = Link {
    before: NONE,
    after: NONE,
    packed: NO_QUEUE as u64,
};

/// One link for each slot of an index. Policies of several tenants share them, as a slot is in one queue at a time.
#[derive(Clone, Debug, Default)]
pub struct Links {
    links: Vec<Link>,
}

impl Links {
    pub fn new(slots: usize) -> Links {
        Links {
            links: vec![UNLINKED; slots],
        }
    }

    /// Memory that each block takes here.
    pub const BYTES_EACH: usize = size_of::<Link>();

    fn queue(&self, slot: Slot) -> Option<usize> {
        let queue = self.links[slot.at()].packed as u8;
        (queue != NO_QUEUE).then_some(usize::from(queue))
    }

    fn uses(&self, slot: Slot) -> u8 {
        (self.links[slot.at()].packed >> 8) as u8
    }

    fn stamp(&self, slot: u32) -> u64 {
        self.links[slot as usize].packed >> 16
    }
}

/// So many queues, each in the order of touches, with the stamps of their first ones at hand.
#[derive(Clone, Debug)]
pub(super) struct Queues<const N: usize> {
    first: [u32; N],
    last: [u32; N],
    /// Of the first ones; the maximum where a queue is empty.
    stamps: [u64; N],
    lengths: [usize; N],
}

impl<const N: usize> Queues<N> {
    pub(super) fn new() -> Queues<N> {
        const { assert!(N < NO_QUEUE as usize) };
        Queues {
            first: [NONE; N],
            last: [NONE; N],
            stamps: [u64::MAX; N],
            lengths: [0; N],
        }
    }

    pub(super) fn stamps(&self) -> &[u64; N] {
        &self.stamps
    }

    pub(super) fn length(&self, queue: usize) -> usize {
        self.lengths[queue]
    }

    pub(super) fn total(&self) -> usize {
        self.lengths.iter().sum()
    }

    pub(super) fn first(&self, queue: usize) -> Option<Slot> {
        (self.first[queue] != NONE).then(|| Slot::new(self.first[queue]))
    }

    /// Puts a slot that is in no queue at the end of one. Stamps only grow.
    pub(super) fn push(&mut self, links: &mut Links, queue: usize, slot: Slot, stamp: u64, uses: u8) {
        let before = self.last[queue];
        links.links[slot.at()] = Link {
            before,
            after: NONE,
            packed: stamp << 16 | u64::from(uses) << 8 | queue as u64,
        };
        match before {
            NONE => {
                self.first[queue] = slot.number();
                self.stamps[queue] = stamp;
            }
            before => links.links[before as usize].after = slot.number(),
        }
        self.last[queue] = slot.number();
        self.lengths[queue] += 1;
    }

    /// Takes a slot out, and says how often it was used while it was there.
    pub(super) fn remove_counted(&mut self, links: &mut Links, slot: Slot) -> Option<u8> {
        let uses = links.uses(slot);
        self.remove(links, slot).map(|_| uses)
    }

    /// Takes a slot out of whichever queue it is in.
    pub(super) fn remove(&mut self, links: &mut Links, slot: Slot) -> Option<usize> {
        let queue = links.queue(slot)?;
        let Link { before, after, .. } = links.links[slot.at()];
        match before {
            NONE => {
                self.first[queue] = after;
                self.stamps[queue] = if after == NONE { u64::MAX } else { links.stamp(after) };
            }
            before => links.links[before as usize].after = after,
        }
        match after {
            NONE => self.last[queue] = before,
            after => links.links[after as usize].before = before,
        }
        links.links[slot.at()] = UNLINKED;
        self.lengths[queue] -= 1;
        Some(queue)
    }
}
