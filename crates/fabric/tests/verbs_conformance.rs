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
    initiator: Rail,
    target: Rail,
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
        let rail = all_rails().remove(0);
        OverVerbs {
            clock: Clock::start(),
            initiator: rail.clone(),
            target: rail,
            kind,
        }
    }

    /// The ends on two devices, where there are two.
    fn on_two_rails() -> OverVerbs {
        let mut rails = all_rails();
        let target = rails.pop().expect("a rail");
        OverVerbs {
            clock: Clock::start(),
            initiator: rails.into_iter().next().unwrap_or_else(|| target.clone()),
            target,
            kind: Kind::Mapped,
        }
    }
}

fn all_rails() -> Vec<Rail> {
    rails(&RailOptions::default()).expect("an RDMA device")
}

impl Harness for OverVerbs {
    fn ends(&mut self) -> Ends {
        let start = |rail: &Rail, epoch| {
            let verbs = Verbs::start(VerbsOptions::default(), rail.clone(), epoch, self.clock);
            Box::new(verbs.expect("the rail starts"))
        };
        Ends {
            initiator: start(&self.initiator, Epoch(7)),
            initiator_epoch: Epoch(7),
            target: start(&self.target, Epoch(9)),
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

mod two_rails {
    weft_protocol::conformance_tests!(
        #[ignore = "needs an RDMA device"]
        super::OverVerbs::on_two_rails()
    );
}
