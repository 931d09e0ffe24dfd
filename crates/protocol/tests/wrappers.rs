//! The wrappers are transports themselves: configured to do no harm, they keep every promise.

use std::sync::Arc;

use weft_plan::{Bandwidth, Bytes, Time};
use weft_protocol::conformance::{Ends, Harness, Side};
use weft_protocol::{Epoch, Faults, Faulty, Loopback, LoopbackEndpoint, Memory, Rate, Throttled, Transport, VecMemory};

struct Wrapped {
    now: Time,
    wrap: fn(LoopbackEndpoint) -> Box<dyn Transport>,
}

impl Wrapped {
    fn by(wrap: fn(LoopbackEndpoint) -> Box<dyn Transport>) -> Wrapped {
        Wrapped { now: Time::ZERO, wrap }
    }
}

impl Harness for Wrapped {
    fn ends(&mut self) -> Ends {
        let network = Loopback::new();
        Ends {
            initiator: (self.wrap)(network.endpoint("initiator", Epoch(7))),
            initiator_epoch: Epoch(7),
            target: (self.wrap)(network.endpoint("target", Epoch(9))),
            target_epoch: Epoch(9),
        }
    }
    fn memory(&mut self, _: Side, len: u64) -> Arc<dyn Memory> {
        Arc::new(VecMemory::zeroed(len as usize))
    }
    fn now(&mut self) -> Time {
        self.now
    }
    fn idle(&mut self) {
        self.now = self.now.saturating_add(Time::from_us(200));
    }
}

mod harmless {
    use super::*;
    weft_protocol::conformance_tests!(Wrapped::by(|end| Box::new(Faulty::new(end, Faults::default()))));
}

/// Telling late is no broken promise.
mod delayed {
    use super::*;
    fn faults() -> Faults {
        Faults {
            seed: 3,
            delay: 0.5,
            delay_max: Time::from_ms(1),
            ..Faults::default()
        }
    }
    weft_protocol::conformance_tests!(Wrapped::by(|end| Box::new(Faulty::new(end, faults()))));
}

mod throttled {
    use super::*;
    fn rate() -> Rate {
        Rate {
            bandwidth: Bandwidth::from_bytes_per_sec(2 << 30),
            burst: Bytes(4 << 20),
        }
    }
    weft_protocol::conformance_tests!(Wrapped::by(|end| Box::new(Throttled::new(end, rate()))));
}
