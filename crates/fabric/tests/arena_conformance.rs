//! The arena against the suite that every exchange must pass: ranks in one process, each with a segment of its own.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use weft_fabric::arena::{Arena, ArenaOptions, Neighbourhood, Seen};
use weft_fabric::memory::AllocateOptions;
use weft_fabric::{Clock, HostMemory};
use weft_plan::{Rank, Time};
use weft_protocol::group::conformance::Harness;
use weft_protocol::group::{Exchange, Trouble, View};
use weft_protocol::{Epoch, Memory, RegionKey};

struct OverArena {
    clock: Clock,
    options: ArenaOptions,
    /// Whether neighbours can read memory where it lies.
    mapped: bool,
    everybody: Everybody,
}

/// All buffers of all ranks, by the slot of their key.
#[derive(Clone, Debug, Default)]
struct Everybody(Arc<Mutex<Vec<Arc<HostMemory>>>>);

impl Neighbourhood for Everybody {
    fn map(&mut self, rank: Rank, key: &RegionKey) -> Result<Option<Arc<dyn Seen>>, Trouble> {
        let known = self.0.lock().expect("nobody panics with it");
        let memory = known.get(key.slot as usize).ok_or(Trouble::Garbage { rank })?;
        Ok(Some(Arc::new(SeenThere {
            at: memory.as_ptr(),
            bytes: memory.len(),
            _everybody: self.clone(),
        })))
    }
}

/// A neighbour's memory, which is not held on to: in other processes it would be a mapping of its own.
#[derive(Debug)]
struct SeenThere {
    at: *const u8,
    bytes: u64,
    _everybody: Everybody,
}

// SAFETY: a pointer into memory that everybody's list keeps, and which has no thread affinity.
unsafe impl Send for SeenThere {}
// SAFETY: as above.
unsafe impl Sync for SeenThere {}

// SAFETY: nothing is ever taken out of everybody's list.
unsafe impl Seen for SeenThere {
    fn as_ptr(&self) -> *const u8 {
        self.at
    }
    fn bytes(&self) -> u64 {
        self.bytes
    }
    fn is_live(&self) -> bool {
        true
    }
}

impl OverArena {
    fn new(options: ArenaOptions, mapped: bool) -> OverArena {
        OverArena {
            clock: Clock::start(),
            options,
            mapped,
            everybody: Everybody::default(),
        }
    }

    /// Few slots, and small ones.
    fn small(mapped: bool) -> OverArena {
        let options = ArenaOptions {
            channels: 3,
            slots: 4,
            slot_bytes: 256,
            eager_bytes_max: 64,
        };
        OverArena::new(options, mapped)
    }

    /// As communicators have it.
    fn usual(mapped: bool) -> OverArena {
        let options = ArenaOptions {
            channels: 3,
            ..ArenaOptions::new(4)
        };
        OverArena::new(options, mapped)
    }
}

impl Harness for OverArena {
    fn ends(&mut self, ranks: u32) -> Vec<Box<dyn Exchange>> {
        let count = ranks as usize;
        let segments: Vec<_> = (0..count)
            .map(|_| Arena::segment(count, self.options).expect("memory for a segment"))
            .collect();
        let arena = |own: usize| {
            let seen = |place: usize| (place != own).then(|| Arc::clone(&segments[place]) as Arc<dyn Seen>);
            let neighbours = (0..count).map(|place| (Rank(place as u32), seen(place))).collect();
            let neighbourhood = Box::new(self.everybody.clone());
            let arena = Arena::new(self.options, Arc::clone(&segments[own]), neighbours, neighbourhood);
            Box::new(arena.expect("segments of these dimensions")) as Box<dyn Exchange>
        };
        (0..count).map(arena).collect()
    }
    fn memory(&mut self, _: Rank, len: u64) -> View {
        if !self.mapped {
            return View::whole(Arc::new(HostMemory::from_vec(vec![0; len as usize])));
        }
        let memory = HostMemory::allocate(len as usize, AllocateOptions::default()).expect("memory");
        let memory = Arc::new(memory);
        let mut everybody = self.everybody.0.lock().expect("nobody panics with it");
        everybody.push(Arc::clone(&memory));
        let key = RegionKey {
            epoch: Epoch(1),
            slot: everybody.len() as u32 - 1,
            secret: 3,
        };
        // What is allocated may be more than was asked for.
        View {
            key: Some(key),
            len,
            ..View::whole(memory)
        }
    }
    fn now(&mut self) -> Time {
        self.clock.now()
    }
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(50));
    }
}

mod mapped {
    weft_protocol::exchange_conformance_tests!(super::OverArena::usual(true));
}

mod foreign {
    weft_protocol::exchange_conformance_tests!(super::OverArena::usual(false));
}

mod mapped_in_small_slots {
    weft_protocol::exchange_conformance_tests!(super::OverArena::small(true));
}

mod foreign_in_small_slots {
    weft_protocol::exchange_conformance_tests!(super::OverArena::small(false));
}
