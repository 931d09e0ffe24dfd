//! Queues by how often blocks were used, and a head start for some queues over others.
//!
//! A block's rank is when it was touched last plus the head start of its queue, and the lowest rank leaves first. With no head starts that is
//! LRU. The head starts are counted in capacities of the store, so that they mean the same in a store of any size. A parent is used at least
//! as often as its child and touched after it, so its rank is higher: ranking alone keeps prefixes whole.

use super::super::links::{Links, Queues};
use super::super::{BlockId, Slot};
use super::{Look, Policy, Touch};

/// How many times a block was used: once, twice, up to 4, up to 8, more.
const STEPS: usize = 5;
/// Blocks that were the last of their request.
const LAST: usize = STEPS * STEPS;
/// Blocks of sessions that are over.
const OVER: usize = LAST + 1;
pub(super) const QUEUES: usize = OVER + 1;

/// The last block of a request falls behind by this many capacities.
const LAST_BEHIND: f64 = 1.0;

fn step(uses: u8) -> usize {
    match uses {
        0 | 1 => 0,
        2 => 1,
        3 | 4 => 2,
        5..=8 => 3,
        _ => 4,
    }
}

/// Which head start a block gets, in capacities of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct HeadStarts {
    /// If it was used again while it was there.
    pub again_here: f64,
    /// If it was used before, even if it has left in between.
    pub again_ever: f64,
    /// For each doubling of how often it was used, ever.
    pub each_doubling: f64,
}

impl HeadStarts {
    pub(super) fn offsets(&self, capacity: usize) -> [i64; QUEUES] {
        let of = |capacities: f64| (capacities * capacity as f64) as i64;
        let mut offsets = [0; QUEUES];
        for here in 0..STEPS {
            for ever in 0..STEPS {
                let again = |step: usize, start: f64| if step > 0 { start } else { 0.0 };
                let start = again(here, self.again_here) + again(ever, self.again_ever);
                offsets[here * STEPS + ever] = of(start + self.each_doubling * ever as f64);
            }
        }
        offsets[LAST] = of(-LAST_BEHIND);
        offsets[OVER] = i64::MIN / 2;
        offsets
    }
}

/// The queue that a block stands in, by its uses while it was there, its uses ever, and what else is known of it.
pub(super) fn queue_of(touch: &Touch, here: u8, ever: u8) -> usize {
    if touch.valued {
        STEPS * STEPS - 1
    } else if touch.over {
        OVER
    } else if touch.last {
        LAST
    } else {
        step(here) * STEPS + step(ever.max(here))
    }
}

/// The queue whose first block has the lowest rank.
pub(super) fn lowest(queues: &Queues<QUEUES>, offsets: &[i64; QUEUES]) -> Option<usize> {
    let mut best = (i64::MAX, None);
    for (queue, (stamp, offset)) in queues.stamps().iter().zip(offsets).enumerate() {
        if *stamp == u64::MAX {
            continue;
        }
        let rank = (*stamp as i64).saturating_add(*offset);
        if rank < best.0 {
            best = (rank, Some(queue));
        }
    }
    best.1
}

/// How often blocks were used, those that have left included: two bytes each, in sets of four of which the one used longest ago is forgotten.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    /// A count in the lower four bits, and bits of the id above; the one used last first.
    sets: Vec<[u16; WAYS]>,
}

const WAYS: usize = 4;
/// Small stores remember many times what they hold: it costs half a megabyte at most, and nothing until it is used.
const REMEMBERED_LEAST: usize = 1 << 18;
const COUNT_BITS: u32 = 4;
const COUNT_MAX: u16 = (1 << COUNT_BITS) - 1;

impl Memory {
    pub(super) fn new(blocks: usize) -> Memory {
        Memory {
            sets: vec![[0; WAYS]; REMEMBERED_LEAST.max(2 * blocks) / WAYS],
        }
    }

    /// Counts one more use, and says how many there were.
    pub(super) fn used(&mut self, id: &BlockId) -> u8 {
        let hash = id.other_hash();
        let at = ((u128::from(hash) * self.sets.len() as u128) >> 64) as usize;
        let tag = (hash as u16) << COUNT_BITS;
        let set = &mut self.sets[at];
        let same = |entry: &u16| *entry != 0 && *entry & !COUNT_MAX == tag;
        let (way, count) = match set.iter().position(same) {
            Some(way) => (way, (set[way] & COUNT_MAX).min(COUNT_MAX - 1) + 1),
            None => (WAYS - 1, 1),
        };
        set.copy_within(..way, 1);
        set[0] = tag | count;
        count as u8
    }
}

/// The core of ranking policies: queues, and what is remembered.
#[derive(Clone, Debug)]
pub(super) struct Ranked {
    queues: Queues<QUEUES>,
    /// Blocks touched so far.
    clock: u64,
}

impl Ranked {
    pub(super) fn new() -> Ranked {
        Ranked {
            queues: Queues::new(),
            clock: 0,
        }
    }

    pub(super) fn touch(&mut self, links: &mut Links, touch: &Touch, ever: u8) -> u64 {
        self.clock += 1;
        let here = match self.queues.remove_counted(links, touch.slot) {
            Some(uses) => uses.saturating_add(1),
            None => 1,
        };
        let queue = queue_of(touch, here, ever);
        self.queues.push(links, queue, touch.slot, self.clock, here);
        self.clock
    }

    pub(super) fn victim(&mut self, links: &mut Links, look: &dyn Look, offsets: &[i64; QUEUES]) -> Option<Slot> {
        let mut aside = Vec::new();
        let mut found = None;
        while let Some(queue) = lowest(&self.queues, offsets) {
            let slot = self.queues.first(queue)?;
            let uses = self.queues.remove_counted(links, slot)?;
            if look.may_leave(slot) {
                found = Some(slot);
                break;
            }
            aside.push((queue, slot, uses));
        }
        // What comes after these, or whoever holds them, wants them still.
        for (queue, slot, uses) in aside {
            let queue = if queue >= LAST { 0 } else { queue };
            self.queues.push(links, queue, slot, self.clock, uses);
        }
        found
    }

    pub(super) fn forget(&mut self, links: &mut Links, slot: Slot) {
        self.queues.remove(links, slot);
    }
}

/// The block that was used longest ago leaves first.
#[derive(Clone, Debug)]
pub struct Lru {
    ranked: Ranked,
}

impl Lru {
    #[allow(clippy::new_without_default)]
    pub fn new() -> Lru {
        Lru { ranked: Ranked::new() }
    }
}

impl Policy for Lru {
    fn request(&mut self, links: &mut Links, touches: &[Touch]) {
        for touch in touches {
            let plain = Touch { last: false, ..*touch };
            self.ranked.touch(links, &plain, 1);
        }
    }

    fn victim(&mut self, links: &mut Links, look: &dyn Look) -> Option<Slot> {
        let mut offsets = [0; QUEUES];
        offsets[OVER] = i64::MIN / 2;
        self.ranked.victim(links, look, &offsets)
    }

    fn forget(&mut self, links: &mut Links, slot: Slot) {
        self.ranked.forget(links, slot);
    }
}

/// Blocks that were used less often leave first, unless the others have not been used for very long.
#[derive(Clone, Debug)]
pub struct Frequency {
    ranked: Ranked,
    memory: Memory,
    offsets: [i64; QUEUES],
}

/// Capacities by which each doubling of its uses puts a block forward.
pub(super) const FREQUENCY_FIRST: f64 = 8.0;

impl Frequency {
    pub fn new(blocks: usize) -> Frequency {
        let starts = HeadStarts {
            each_doubling: FREQUENCY_FIRST,
            ..HeadStarts::default()
        };
        Frequency {
            ranked: Ranked::new(),
            memory: Memory::new(blocks),
            offsets: starts.offsets(blocks),
        }
    }
}

impl Policy for Frequency {
    fn request(&mut self, links: &mut Links, touches: &[Touch]) {
        for touch in touches {
            let ever = self.memory.used(&touch.id);
            self.ranked.touch(links, touch, ever);
        }
    }

    fn victim(&mut self, links: &mut Links, look: &dyn Look) -> Option<Slot> {
        self.ranked.victim(links, look, &self.offsets)
    }

    fn forget(&mut self, links: &mut Links, slot: Slot) {
        self.ranked.forget(links, slot);
    }
}
