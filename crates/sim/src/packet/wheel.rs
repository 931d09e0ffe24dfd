//! What happens next: a wheel of buckets for the near future, and a heap for the rest.
//!
//! Nearly everything in a network happens within a cable's latency, so that a bucket is found by its time and sorted when its turn comes. Equal
//! times happen in the order in which they were scheduled.
//!
//! Half a million things wait at once in a large network, and the memory that they wait in decides how fast it is. An entry of a bucket is
//! eight bytes: its time within the bucket, and what happens. Buckets are chains of small chunks, and the chunks of a bucket whose turn has come are the
//! first to be used again, while they are still in the cache.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

const BUCKETS: usize = 1 << 13;
/// Entries of a chunk: four cache lines.
const CHUNK: usize = 32;
const NONE: u32 = u32::MAX;
/// The time within a bucket has 32 bits of an entry.
const SHIFT_MOST: u32 = 31;

/// Something that will happen, at a time that no bucket says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    at: u64,
    seq: u64,
    what: u32,
}

/// A chain of chunks, all full but the last.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    first: u32,
    last: u32,
    /// Entries in the last chunk.
    filled: u32,
}

const EMPTY: Bucket = Bucket {
    first: NONE,
    last: NONE,
    filled: 0,
};

/// Times and what happens then, in their order.
#[derive(Debug)]
pub(super) struct Wheel {
    buckets: Vec<Bucket>,
    /// Entries of chunks: the time since the bucket began, and below it what happens.
    chunks: Vec<[u64; CHUNK]>,
    /// The next chunk of a chain, or of those that are free.
    chains: Vec<u32>,
    free: u32,
    /// A bucket is so many picoseconds, as a power of two.
    shift: u32,
    /// The number of the bucket whose turn it is, counted from the beginning of time.
    turn: u64,
    /// The open bucket, in order.
    current: Vec<u64>,
    next: usize,
    /// Buckets with something in them.
    near: usize,
    far: BinaryHeap<Reverse<Entry>>,
    /// Before the open bucket: whoever peeks opens it early.
    before: BinaryHeap<Reverse<Entry>>,
    seq: u64,
}

impl Wheel {
    /// Fit for delays that mostly are no longer than `usual` picoseconds.
    pub(super) fn new(usual: u64) -> Wheel {
        let width = (usual / (BUCKETS as u64 / 2))
            .clamp(1, 1 << SHIFT_MOST)
            .next_power_of_two();
        Wheel {
            buckets: vec![EMPTY; BUCKETS],
            chunks: Vec::new(),
            chains: Vec::new(),
            free: NONE,
            shift: width.ilog2(),
            turn: 0,
            current: Vec::new(),
            next: 0,
            near: 0,
            far: BinaryHeap::new(),
            before: BinaryHeap::new(),
            seq: 0,
        }
    }

    pub(super) fn push(&mut self, at: u64, what: u32) {
        let bucket = at >> self.shift;
        let within = at - (bucket << self.shift);
        let packed = (within << 32) | u64::from(what);
        if bucket > self.turn && bucket - self.turn < BUCKETS as u64 {
            self.put(bucket as usize % BUCKETS, packed);
        } else if bucket == self.turn {
            // So soon that its bucket is open already.
            let place = self.current[self.next..].partition_point(|other| other >> 32 <= within);
            self.current.insert(self.next + place, packed);
        } else {
            let entry = Reverse(Entry {
                at,
                seq: self.seq,
                what,
            });
            self.seq += 1;
            let heap = if bucket < self.turn {
                &mut self.before
            } else {
                &mut self.far
            };
            heap.push(entry);
        }
    }

    /// When the next thing happens.
    pub(super) fn peek(&mut self) -> Option<u64> {
        if let Some(Reverse(entry)) = self.before.peek() {
            return Some(entry.at);
        }
        self.open().map(|packed| self.time(packed))
    }

    pub(super) fn pop(&mut self) -> Option<(u64, u32)> {
        if let Some(Reverse(entry)) = self.before.pop() {
            return Some((entry.at, entry.what));
        }
        let packed = self.open()?;
        self.next += 1;
        Some((self.time(packed), packed as u32))
    }

    /// What probably happens next, as far as that is known without looking further.
    pub(super) fn upcoming(&self, most: usize) -> impl Iterator<Item = u32> + '_ {
        self.current[self.next..].iter().take(most).map(|packed| *packed as u32)
    }

    fn time(&self, packed: u64) -> u64 {
        (self.turn << self.shift) + (packed >> 32)
    }

    fn put(&mut self, place: usize, packed: u64) {
        let mut bucket = self.buckets[place];
        if bucket.last == NONE || bucket.filled as usize == CHUNK {
            let chunk = self.chunk();
            match bucket.last {
                NONE => {
                    bucket.first = chunk;
                    self.near += 1;
                }
                last => self.chains[last as usize] = chunk,
            }
            (bucket.last, bucket.filled) = (chunk, 0);
        }
        self.chunks[bucket.last as usize][bucket.filled as usize] = packed;
        bucket.filled += 1;
        self.buckets[place] = bucket;
    }

    /// A chunk that nothing uses, at the end of its chain.
    fn chunk(&mut self) -> u32 {
        match self.free {
            NONE => {
                self.chunks.push([0; CHUNK]);
                self.chains.push(NONE);
                (self.chunks.len() - 1) as u32
            }
            chunk => {
                self.free = std::mem::replace(&mut self.chains[chunk as usize], NONE);
                chunk
            }
        }
    }

    /// Opens buckets until there is something in one.
    fn open(&mut self) -> Option<u64> {
        loop {
            if let Some(packed) = self.current.get(self.next) {
                return Some(*packed);
            }
            self.current.clear();
            self.next = 0;
            if self.near == 0 {
                // Nothing for a while: go where the next thing is.
                let Reverse(entry) = self.far.peek()?;
                self.turn = entry.at >> self.shift;
            } else {
                self.turn += 1;
            }
            self.fill();
        }
    }

    /// Moves what the bucket has whose turn it is into the open one.
    fn fill(&mut self) {
        // What was far when it was scheduled was scheduled before whatever found its bucket near.
        while let Some(Reverse(entry)) = self.far.peek()
            && entry.at >> self.shift <= self.turn
        {
            let within = entry.at - (self.turn << self.shift);
            self.current.push((within << 32) | u64::from(entry.what));
            self.far.pop();
        }
        let bucket = std::mem::replace(&mut self.buckets[self.turn as usize % BUCKETS], EMPTY);
        if bucket.first == NONE {
            return;
        }
        self.near -= 1;
        let mut chunk = bucket.first;
        while chunk != NONE {
            let filled = if chunk == bucket.last {
                bucket.filled as usize
            } else {
                CHUNK
            };
            self.current.extend_from_slice(&self.chunks[chunk as usize][..filled]);
            let following = std::mem::replace(&mut self.chains[chunk as usize], self.free);
            self.free = chunk;
            chunk = following;
        }
        self.current.sort_by_key(|packed| packed >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_protocol::seeded::Seeded;

    #[test]
    fn things_happen_in_the_order_of_time_and_then_of_scheduling() {
        for seed in 0..20 {
            let mut chance = Seeded::new(seed);
            let mut wheel = Wheel::new(100_000);
            let mut expected = BinaryHeap::new();
            let (mut now, mut seq) = (0, 0);
            for _ in 0..20_000 {
                if chance.below(2) == 0 || expected.is_empty() {
                    let delay = match chance.below(10) {
                        0 => 0,
                        1 => chance.below(20_000_000),
                        _ => chance.below(120_000),
                    };
                    wheel.push(now + delay, seq);
                    expected.push(Reverse((now + delay, seq)));
                    seq += 1;
                } else {
                    let Reverse(next) = expected.pop().unwrap();
                    // To peek opens buckets early, and must not change what is before them.
                    if chance.below(3) == 0 {
                        assert_eq!(wheel.peek(), Some(next.0));
                    }
                    assert_eq!(wheel.pop(), Some(next));
                    now = next.0;
                    if chance.below(50) == 0 {
                        wheel.peek();
                    }
                }
            }
            while let Some(Reverse(next)) = expected.pop() {
                assert_eq!(wheel.pop(), Some(next));
            }
            assert_eq!(wheel.pop(), None);
        }
    }
}
