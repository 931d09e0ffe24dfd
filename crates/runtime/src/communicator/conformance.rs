//! The exchange of communicators against the suite that every exchange must pass.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use weft_fabric::{Clock, HostMemory};
use weft_plan::{Rank, Time};
use weft_protocol::group::conformance::Harness;
use weft_protocol::group::{Exchange, View};

use super::bootstrap::Formation;
use super::{Held, JoinOptions, Part};
use crate::agent::Agent;
use crate::rendezvous::Registration;

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Tcp,
    SharedMemory,
    Arena,
    /// The first two ranks are in an arena, and the others are not.
    ArenaAndTcp,
}

struct OverAgents {
    clock: Clock,
    way: Way,
    /// Whether memory is Weft's own, which peers can read where it lies.
    allocated: bool,
    agents: Vec<Agent>,
    /// What the ends of the present case need besides.
    kept: Vec<(Formation, Registration)>,
}

impl OverAgents {
    fn new(way: Way, allocated: bool) -> OverAgents {
        OverAgents {
            clock: Clock::start(),
            way,
            allocated,
            agents: Vec::new(),
            kept: Vec::new(),
        }
    }
}

impl Harness for OverAgents {
    fn ends(&mut self, ranks: u32) -> Vec<Box<dyn Exchange>> {
        static JOBS: AtomicU32 = AtomicU32::new(0);
        let job = format!(
            "exchange-{}-{}",
            std::process::id(),
            JOBS.fetch_add(1, Ordering::Relaxed)
        );
        let (job, way) = (&job, self.way);
        let transports = match way {
            Way::Tcp => "tcp",
            _ => "shared_memory,tcp",
        };
        let join = |rank: u32| {
            let agent = Agent::builder(&format!("{job}-{rank}"))
                .secret("conformance")
                .listen("127.0.0.1:0")
                .set("rendezvous", "process")
                .set("rendezvous_job", job)
                .set("transports", transports)
                .start()
                .expect("an agent");
            let options = JoinOptions {
                arena: way == Way::Arena || way == Way::ArenaAndTcp && rank < 2,
                channels: 2,
                ..JoinOptions::new("all", Rank(rank), ranks)
            };
            let formed = Formation::only_exchange(&agent, options).expect("a group");
            (agent, formed)
        };
        let formed: Vec<_> = std::thread::scope(|scope| {
            let joining: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || join(rank))).collect();
            joining.into_iter().map(|rank| rank.join().expect("no panic")).collect()
        });
        self.kept.clear();
        self.agents.clear();
        let mut ends = Vec::new();
        for (agent, (formation, registration, exchange)) in formed {
            self.agents.push(agent);
            self.kept.push((formation, registration));
            ends.push(Box::new(exchange) as Box<dyn Exchange>);
        }
        ends
    }

    fn memory(&mut self, rank: Rank, len: u64) -> View {
        let agent = &self.agents[rank.0 as usize];
        let mut part = match self.allocated {
            true => agent.allocate(len as usize).expect("memory").part(0..len),
            false => Part {
                held: Held::Foreign(Arc::new(HostMemory::from_vec(vec![0; len as usize]))),
                offset: 0,
                len,
            },
        };
        part.lend(agent, self.way != Way::Arena)
            .expect("memory that can be lent");
        part.into_view()
    }

    fn now(&mut self) -> Time {
        self.clock.now()
    }

    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(100));
    }
}

mod over_tcp {
    weft_protocol::exchange_conformance_tests!(super::OverAgents::new(super::Way::Tcp, true));
}

mod over_tcp_from_foreign_memory {
    weft_protocol::exchange_conformance_tests!(super::OverAgents::new(super::Way::Tcp, false));
}

mod over_shared_memory {
    weft_protocol::exchange_conformance_tests!(super::OverAgents::new(super::Way::SharedMemory, true));
}

mod in_an_arena {
    weft_protocol::exchange_conformance_tests!(super::OverAgents::new(super::Way::Arena, true));
}

mod in_an_arena_and_over_tcp {
    weft_protocol::exchange_conformance_tests!(super::OverAgents::new(super::Way::ArenaAndTcp, true));
}
