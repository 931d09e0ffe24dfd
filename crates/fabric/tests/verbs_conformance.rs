//! The verbs transport against the suite that every transport must pass. `cargo xtask rdma-test` runs it where there are devices.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::memory::AllocateOptions;
use weft_fabric::verbs::{AtomicsBy, Rail, RailOptions, Verbs, VerbsOptions, rails};
use weft_fabric::{Clock, HostMemory};
use weft_plan::Time;
use weft_protocol::conformance::{Ends, Harness, Side};
use weft_protocol::{Epoch, Memory, Signal};

struct OverVerbs {
    clock: Clock,
    initiator: Rail,
    target: Rail,
    kind: Kind,
    atomics: AtomicsBy,
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
            atomics: AtomicsBy::Host,
        }
    }

    /// The ends on the first and the last rail, if there are two and packets find their way from one to the other.
    fn on_two_rails() -> Option<OverVerbs> {
        let mut rails = all_rails();
        let target = rails.pop()?;
        let mut over = OverVerbs {
            clock: Clock::start(),
            initiator: rails.into_iter().next()?,
            target,
            kind: Kind::Mapped,
            atomics: AtomicsBy::Host,
        };
        let Ends {
            mut initiator,
            mut target,
            ..
        } = over.ends();
        let address = target.capabilities().address.clone();
        initiator.open(&address, over.clock.now()).expect("open starts");
        let mut signals = Vec::new();
        while signals.is_empty() {
            initiator.poll(over.clock.now(), &mut signals);
            target.poll(over.clock.now(), &mut Vec::new());
            over.idle();
        }
        matches!(signals[..], [Signal::Opened { .. }]).then_some(over)
    }
}

fn all_rails() -> Vec<Rail> {
    rails(&RailOptions::default()).expect("an RDMA device")
}

impl Harness for OverVerbs {
    fn ends(&mut self) -> Ends {
        let start = |rail: &Rail, epoch| {
            let options = VerbsOptions {
                atomics: self.atomics,
                ..VerbsOptions::default()
            };
            let verbs = Verbs::start(options, rail.clone(), epoch, self.clock);
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

#[test]
fn tests_that_need_a_device() {
    weft_testing::has(weft_testing::Need::Rdma);
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

/// What of the cases for atomic operations holds where the device carries them out. The owner must then leave the words alone, and the
/// device looks at no clock.
#[test]
#[ignore = "needs an RDMA device"]
fn atomics_by_the_device() {
    use weft_protocol::conformance as suite;
    let mut over = OverVerbs {
        atomics: AtomicsBy::Device,
        ..OverVerbs::on_one_rail(Kind::Mapped)
    };
    suite::atomics_return_what_was_there(&mut over);
    suite::atomics_follow_a_model(&mut over);
    suite::atomics_without_the_right_are_refused(&mut over);
    suite::misaligned_atomics_are_refused(&mut over);
    suite::atomics_past_their_deadline_touch_nothing(&mut over);
    suite::cancelled_atomics_are_told_honestly(&mut over);
    suite::atomics_on_a_closed_path_are_told_honestly(&mut over);
    suite::atomics_of_a_dead_peer_are_told_honestly(&mut over);
}

/// The whole suite between two devices. Where a host's packets to its own addresses never reach a wire, it is left out.
#[test]
#[ignore = "needs two RDMA devices with a way between them"]
fn two_rails() {
    match OverVerbs::on_two_rails() {
        Some(mut over) => weft_protocol::conformance::run(&mut over),
        None => weft_testing::leave_out(
            weft_testing::Need::Rdma,
            "there are no two rails with a way between them",
        ),
    }
}
