//! The verbs transport against the suite that every transport must pass. `cargo xtask rdma-test` runs it where there are devices.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::memory::AllocateOptions;
use weft_fabric::verbs::{Rail, RailOptions, Verbs, VerbsOptions, rails};
use weft_fabric::{Clock, HostMemory};
use weft_plan::Time;
use weft_protocol::conformance::{Ends, Harness, Side};
use weft_protocol::{Epoch, Memory};

struct OverVerbs {
    clock: Clock,
    rail: Rail,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    Mapped,
    Foreign,
}

impl OverVerbs {
    /// Both ends on one rail.
    fn on_one_rail(kind: Kind) -> OverVerbs {
        OverVerbs {
            clock: Clock::start(),
            rail: all_rails().remove(0),
            kind,
        }
    }
}

fn all_rails() -> Vec<Rail> {
    rails(&RailOptions::default()).expect("an RDMA device")
}

impl Harness for OverVerbs {
    fn ends(&mut self) -> Ends {
        let start = |epoch| {
            let verbs = Verbs::start(VerbsOptions::default(), self.rail.clone(), epoch, self.clock);
            Box::new(verbs.expect("the rail starts"))
        };
        Ends {
            initiator: start(Epoch(7)),
            initiator_epoch: Epoch(7),
            target: start(Epoch(9)),
            target_epoch: Epoch(9),
        }
    }
    fn memory(&mut self, _: Side, len: u64) -> Arc<dyn Memory> {
        match self.kind {
            Kind::Mapped => Arc::new(HostMemory::allocate(len as usize, AllocateOptions::default()).expect("memory")),
            Kind::Foreign => Arc::new(HostMemory::from_vec(vec![0; len as usize])),
        }
    }
    fn now(&mut self) -> Time {
        self.clock.now()
    }
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }
    fn patience(&self) -> Time {
        // Devices are often tried in an emulated machine.
        Time::from_secs(60)
    }
}

mod one_rail {
    weft_protocol::conformance_tests!(
        #[ignore = "needs an RDMA device"]
        super::OverVerbs::on_one_rail(super::Kind::Mapped)
    );
}

mod foreign_memory {
    weft_protocol::conformance_tests!(
        #[ignore = "needs an RDMA device"]
        super::OverVerbs::on_one_rail(super::Kind::Foreign)
    );
}
