//! What happens next: a wheel of buckets for the near future, and a heap for the rest.
//!
//! Nearly everything in a network happens within a cable's latency, so that a bucket is found by its time and sorted when its turn comes. Equal
//! times happen in the order in which they were scheduled.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

const BUCKETS: usize = 1 << 13;

/// Something that will happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    at: u64,
    seq: u32,
    what: u32,
}

/// Times and what happens then, in their order.
#[derive(Debug)]
pub(super) struct Wheel {
    buckets: Vec<Vec<Entry>>,
    /// A bucket is so many picoseconds, as a power of two.
    shift: u32,
    /// The number of the bucket whose turn it is, counted from the beginning of time.
    turn: u64,
    current: Vec<Entry>,
    next: usize,
    /// Entries in buckets.
    near: usize,
    far: BinaryHeap<Reverse<Entry>>,
    seq: u32,
}

impl Wheel {
    /// Fit for delays that mostly are no longer than `usual` picoseconds.
    pub(super) fn new(usual: u64) -> Wheel {
        let width = (usual / (BUCKETS as u64 / 2)).max(1).next_power_of_two();
        Wheel {
            buckets: vec![Vec::new(); BUCKETS],
            shift: width.ilog2(),
            turn: 0,
            current: Vec::new(),
            next: 0,
            near: 0,
            far: BinaryHeap::new(),
            seq: 0,
        }
    }

    pub(super) fn push(&mut self, at: u64, what: u32) {
        let entry = Entry {
            at,
            seq: self.seq,
            what,
        };
        self.seq = self.seq.wrapping_add(1);
        let bucket = at >> self.shift;
        if bucket <= self.turn {
            // Now, or so soon that its bucket is open already.
            let place = self.current[self.next..].partition_point(|other| other.at <= at);
            self.current.insert(self.next + place, entry);
        } else if bucket - self.turn < BUCKETS as u64 {
            self.buckets[bucket as usize % BUCKETS].push(entry);
            self.near += 1;
        } else {
            self.far.push(Reverse(entry));
        }
    }

    /// When the next thing happens.
    pub(super) fn peek(&mut self) -> Option<u64> {
        self.open().map(|entry| entry.at)
    }

    pub(super) fn pop(&mut self) -> Option<(u64, u32)> {
        let entry = self.open()?;
        self.next += 1;
        Some((entry.at, entry.what))
    }

    /// Opens buckets until there is something in one.
    fn open(&mut self) -> Option<Entry> {
        loop {
            if let Some(entry) = self.current.get(self.next) {
                return Some(*entry);
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
            let bucket = &mut self.buckets[self.turn as usize % BUCKETS];
            self.near -= bucket.len();
            std::mem::swap(&mut self.current, bucket);
            while let Some(Reverse(entry)) = self.far.peek()
                && entry.at >> self.shift <= self.turn
            {
                self.current.push(*entry);
                self.far.pop();
            }
            self.current.sort_unstable();
        }
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
                    assert_eq!(wheel.pop(), Some(next));
                    now = next.0;
                }
            }
            while let Some(Reverse(next)) = expected.pop() {
                assert_eq!(wheel.pop(), Some(next));
            }
            assert_eq!(wheel.pop(), None);
        }
    }
}
