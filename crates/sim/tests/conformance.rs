//! The simulated fabrics keep every promise of a transport while nothing goes wrong.

use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::conformance::{Ends, Harness, Side};
use weft_protocol::{Epoch, Memory, VecMemory};
use weft_sim::{Fabric, Faults, SimTransport, World};

struct Simulated {
    fabric: Fabric,
    world: World,
}

impl Simulated {
    fn over(fabric: Fabric) -> Simulated {
        Simulated {
            fabric,
            world: World::new(1, Faults::NONE),
        }
    }
}

impl Harness for Simulated {
    fn ends(&mut self) -> Ends {
        self.world = World::new(1, Faults::NONE);
        let here = self.world.add_node("here", "host");
        let there = self.world.add_node("there", "host");
        Ends {
            initiator: Box::new(SimTransport::start(&self.world, here, self.fabric, Epoch(7))),
            initiator_epoch: Epoch(7),
            target: Box::new(SimTransport::start(&self.world, there, self.fabric, Epoch(9))),
            target_epoch: Epoch(9),
        }
    }
    fn memory(&mut self, _: Side, len: u64) -> Arc<dyn Memory> {
        Arc::new(VecMemory::zeroed(len as usize))
    }
    fn now(&mut self) -> Time {
        self.world.now()
    }
    fn idle(&mut self) {
        let until = self.world.now().saturating_add(Time::from_us(50));
        self.world.run_until(until);
    }
}

mod network {
    use super::*;
    weft_protocol::conformance_tests!(Simulated::over(Fabric::NETWORK));
}

mod host {
    use super::*;
    weft_protocol::conformance_tests!(Simulated::over(Fabric::HOST));
}
