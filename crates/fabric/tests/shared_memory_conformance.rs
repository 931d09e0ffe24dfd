//! The public suite, over every way in which this transport reaches memory.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::memory::AllocateOptions;
use weft_fabric::shared_memory::Foreign;
use weft_fabric::{Clock, HostMemory, SharedMemory, SharedMemoryOptions};
use weft_plan::Time;
use weft_protocol::conformance::{Ends, Harness, Side};
use weft_protocol::{Epoch, Memory};

struct OverSharedMemory {
    clock: Clock,
    options: SharedMemoryOptions,
    allocated: bool,
}

impl OverSharedMemory {
    fn new(allocated: bool, foreign: Foreign) -> OverSharedMemory {
        OverSharedMemory {
            clock: Clock::start(),
            options: SharedMemoryOptions {
                foreign,
                ..SharedMemoryOptions::default()
            },
            allocated,
        }
    }
    fn without_helper(mut self) -> OverSharedMemory {
        self.options.helper = false;
        self.options.inline_bytes_max = 0;
        self
    }
    fn end(&self, epoch: Epoch) -> Box<SharedMemory> {
        Box::new(SharedMemory::start(self.options.clone(), epoch, self.clock).expect("the transport starts"))
    }
}

impl Harness for OverSharedMemory {
    fn ends(&mut self) -> Ends {
        Ends {
            initiator: self.end(Epoch(7)),
            initiator_epoch: Epoch(7),
            target: self.end(Epoch(9)),
            target_epoch: Epoch(9),
        }
    }
    fn memory(&mut self, _: Side, len: u64) -> Arc<dyn Memory> {
        let len = len as usize;
        Arc::new(if self.allocated {
            HostMemory::allocate(len, AllocateOptions::default()).expect("there is memory")
        } else {
            HostMemory::from_vec(vec![0; len])
        })
    }
    fn now(&mut self) -> Time {
        self.clock.now()
    }
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

mod bounced_after_213_days {
    use super::*;
    /// Past what 64 bits of picoseconds hold.
    fn aged() -> OverSharedMemory {
        let mut over = OverSharedMemory::new(false, Foreign::Bounce);
        over.clock = Clock::reading(Time::from_secs(213 * 86_400 + 18_000));
        over
    }
    weft_protocol::conformance_tests!(aged());
}

mod mapped {
    use super::*;
    weft_protocol::conformance_tests!(OverSharedMemory::new(true, Foreign::Auto));
}

mod foreign {
    use super::*;
    weft_protocol::conformance_tests!(OverSharedMemory::new(false, Foreign::ProcessVm));
}

mod bounced {
    use super::*;
    weft_protocol::conformance_tests!(OverSharedMemory::new(false, Foreign::Bounce));
}

mod mapped_in_poll_alone {
    use super::*;
    weft_protocol::conformance_tests!(OverSharedMemory::new(true, Foreign::Auto).without_helper());
}

mod foreign_in_poll_alone {
    use super::*;
    weft_protocol::conformance_tests!(OverSharedMemory::new(false, Foreign::Auto).without_helper());
}
