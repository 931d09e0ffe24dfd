//! What collectives by kernels take between ranks that reach each other's memory, and which way is the fastest.
//!
//! A kernel goes one of three ways: by packets, in one hop or in two, or in bulk between two meetings. Each has a cost of its own that does not depend on the bytes, one for each other rank, and a rate at which
//! its bytes move: those that packets and their readers move through the device's cache, those that are read and written in bulk. Which is the fastest follows from these constants and from nothing else, so
//! ranks that have the same constants choose alike.
//!
//! ```
//! use weft_plan::cost::kernels::{DeviceCosts, KernelCall, Way};
//! let all_reduce = |bytes: u64| KernelCall { one_hop: bytes, two_hops: Some(bytes / 8), read: 8 * bytes, written: 8 * bytes };
//! let costs = DeviceCosts::default();
//! assert_eq!(costs.fastest(&all_reduce(1 << 10), 8, |_| true), Way::OneShot);
//! assert_eq!(costs.fastest(&all_reduce(1 << 28), 8, |_| true), Way::Bulk);
//! ```

use serde::{Deserialize, Serialize};

use super::LinkCost;
use crate::units::{Bandwidth, Bytes, Picos};

/// How the bytes of a call go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// By packets, in one hop: everything to everybody who needs it.
    OneShot,
    /// By packets, in two hops: all-reduce alone. Every rank reduces a part, and sends that to all.
    TwoShot,
    /// Every rank reads and writes the buffers of the others, between two meetings.
    Bulk,
}

impl Way {
    /// From the lightest to the heaviest.
    pub const ALL: [Way; 3] = [Way::OneShot, Way::TwoShot, Way::Bulk];
}

/// What kernels take on a GPU, as `weft doctor --gpu` measures it with ranks that share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceCosts {
    /// From a launch until the host has seen the first word that the kernel wrote.
    pub launch: Picos,
    /// A bare word from one rank to another and back.
    pub flag: Picos,
    /// The same with fences, so that what was written before is seen.
    pub signal: Picos,
    /// What a copy within the device moves, each byte counted once.
    pub copy: Bandwidth,
    /// What the device's memory moves, reads and writes together.
    pub memory: Bandwidth,
    /// Up to so many bytes are still in the device's cache when they are read again.
    pub cache: Bytes,
    /// Of each way: a call of nothing, what each other rank adds to it, and the rate of its bytes while they fit in the cache.
    pub one_shot: LinkCost,
    pub two_shot: LinkCost,
    pub bulk: LinkCost,
}

impl Default for DeviceCosts {
    /// As an H200 had them.
    fn default() -> DeviceCosts {
        let cost = |latency, each, gigabytes: u64| LinkCost {
            latency: Picos::from_ns(latency),
            per_span: Picos::from_ns(each),
            bandwidth: Bandwidth::from_bytes_per_sec(gigabytes * 1_000_000_000),
        };
        DeviceCosts {
            launch: Picos::from_ns(9_500),
            flag: Picos::from_ns(660),
            signal: Picos::from_ns(1_740),
            copy: Bandwidth::from_bytes_per_sec(2_134_000_000_000),
            memory: Bandwidth::from_bytes_per_sec(4_300_000_000_000),
            cache: Bytes(32 << 20),
            one_shot: cost(2_450, 70, 3_700),
            two_shot: cost(4_650, 80, 4_600),
            bulk: cost(4_300, 330, 8_000),
        }
    }
}

/// What all ranks do together, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelCall {
    /// What one rank sends another by packets, if that is done in one hop.
    pub one_hop: u64,
    /// The same for each of two hops, where there is such a way.
    pub two_hops: Option<u64>,
    /// What all ranks together read and write in bulk: each input once, each output once.
    pub read: u64,
    pub written: u64,
}

/// A packet is twice as long as what it carries, and is written once and read once.
const PACKET: u64 = 4;

impl DeviceCosts {
    pub fn of(&self, way: Way) -> &LinkCost {
        match way {
            Way::OneShot => &self.one_shot,
            Way::TwoShot => &self.two_shot,
            Way::Bulk => &self.bulk,
        }
    }

    /// What so many ranks on one device move for a call; nothing where it cannot go this way.
    pub fn moved(way: Way, call: &KernelCall, ranks: u64) -> Option<Bytes> {
        let pairs = ranks.saturating_mul(ranks.saturating_sub(1));
        let packets = |each: u64| each.saturating_mul(PACKET).saturating_mul(pairs);
        Some(Bytes(match way {
            Way::OneShot => packets(call.one_hop),
            Way::TwoShot => packets(call.two_hops?).saturating_mul(2),
            Way::Bulk => call.read.saturating_add(call.written),
        }))
    }

    /// How long a call takes on the device, in a graph.
    pub fn time(&self, way: Way, call: &KernelCall, ranks: u64) -> Option<Picos> {
        let moved = DeviceCosts::moved(way, call, ranks)?;
        let cached = moved.0.min(self.cache.0);
        let streamed = self.memory.time_for(Bytes(moved.0 - cached));
        let others = ranks.saturating_sub(1);
        Some(self.of(way).time(Bytes(cached), others).saturating_add(streamed))
    }

    /// The fastest of the ways for which there is room; the heaviest, if that is none.
    pub fn fastest(&self, call: &KernelCall, ranks: u64, has_room: impl Fn(Way) -> bool) -> Way {
        let ways = Way::ALL.into_iter().filter(|way| has_room(*way));
        let timed = ways.filter_map(|way| Some((self.time(way, call, ranks)?, way)));
        // The lighter of two that take as long.
        timed.min_by_key(|(time, _)| *time).map_or(Way::Bulk, |(_, way)| way)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_reduce(bytes: u64, ranks: u64) -> KernelCall {
        KernelCall {
            one_hop: bytes,
            two_hops: Some(bytes.div_ceil(ranks)),
            read: bytes * ranks,
            written: bytes * ranks,
        }
    }

    #[test]
    fn bytes_are_those_of_packets_and_buffers() {
        let call = all_reduce(1 << 20, 8);
        let moved = |way| DeviceCosts::moved(way, &call, 8).unwrap().0;
        assert_eq!(moved(Way::OneShot), (1 << 20) * 4 * 56);
        assert_eq!(moved(Way::TwoShot), (1 << 17) * 8 * 56);
        assert_eq!(moved(Way::Bulk), 16 << 20);
        let gather = KernelCall { two_hops: None, ..call };
        assert_eq!(DeviceCosts::moved(Way::TwoShot, &gather, 8), None);
    }

    #[test]
    fn what_does_not_fit_in_the_cache_goes_at_the_rate_of_memory() {
        let costs = DeviceCosts::default();
        let time = |bytes| costs.time(Way::Bulk, &all_reduce(bytes, 8), 8).unwrap();
        let more = time(512 << 20).saturating_sub(time(256 << 20));
        assert_eq!(more, costs.memory.time_for(Bytes((256 * 16) << 20)));
        // Never faster for more.
        let all: Vec<Picos> = (0..40).map(|shift| time(1 << shift)).collect();
        assert!(all.is_sorted());
    }

    #[test]
    fn a_way_without_room_is_not_taken() {
        let costs = DeviceCosts::default();
        let call = all_reduce(64, 4);
        assert_eq!(costs.fastest(&call, 4, |_| true), Way::OneShot);
        assert_ne!(costs.fastest(&call, 4, |way| way != Way::OneShot), Way::OneShot);
        assert_eq!(costs.fastest(&call, 4, |_| false), Way::Bulk);
    }

    #[test]
    fn other_constants_choose_otherwise() {
        let mut costs = DeviceCosts::default();
        let call = all_reduce(256 << 10, 4);
        let before = costs.fastest(&call, 4, |_| true);
        costs.of_mut(before).latency = Picos::from_ms(1);
        assert_ne!(costs.fastest(&call, 4, |_| true), before);
    }

    impl DeviceCosts {
        fn of_mut(&mut self, way: Way) -> &mut LinkCost {
            match way {
                Way::OneShot => &mut self.one_shot,
                Way::TwoShot => &mut self.two_shot,
                Way::Bulk => &mut self.bulk,
            }
        }
    }
}
