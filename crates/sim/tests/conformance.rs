//! The simulated fabrics keep every promise of a transport while nothing goes wrong, over plain links and over a network of packets.

use std::sync::Arc;

use weft_model::fabric::{Cluster, Wire};
use weft_plan::{Bandwidth, Picos, Time};
use weft_protocol::conformance::{Ends, Harness, Side};
use weft_protocol::{Epoch, Memory, VecMemory};
use weft_sim::packet::PacketOptions;
use weft_sim::{Fabric, Faults, SimTransport, World};

struct Simulated {
    fabric: Fabric,
    /// Queues and switches between the nodes.
    packets: bool,
    world: World,
}

impl Simulated {
    fn over(fabric: Fabric) -> Simulated {
        Simulated {
            fabric,
            packets: false,
            world: World::new(1, Faults::NONE),
        }
    }

    fn through_switches() -> Simulated {
        Simulated {
            packets: true,
            ..Simulated::over(Fabric::NETWORK)
        }
    }

    /// The two nodes are on different leaves of a small tree with shallow queues.
    fn world(&self) -> World {
        if !self.packets {
            return World::new(1, Faults::NONE);
        }
        let fabric = weft_model::fabric::Fabric::FatTree {
            hosts: 2,
            tiers: 2,
            radix: 2,
            oversubscription: 1,
            wire: Wire {
                bandwidth: Bandwidth::from_bytes_per_sec(12_500_000_000),
                latency: Picos::from_us(1),
            },
        };
        let cluster = Cluster {
            node_ranks: 1,
            node_ports: 1,
            scale_up: None,
            fabric,
        };
        let options = PacketOptions {
            queue: 1 << 20,
            ..PacketOptions::default()
        };
        World::on_network(1, Faults::NONE, cluster.build().unwrap(), &options).unwrap()
    }
}

impl Harness for Simulated {
    fn ends(&mut self) -> Ends {
        self.world = self.world();
        let here = self.world.add_node("here", "host");
        let there = self.world.add_node("there", "host");
        Ends {
            initiator: Box::new(SimTransport::start(
                &self.world,
                here,
                self.fabric,
                Epoch(7),
                Time::ZERO,
            )),
            initiator_epoch: Epoch(7),
            target: Box::new(SimTransport::start(
                &self.world,
                there,
                self.fabric,
                Epoch(9),
                Time::ZERO,
            )),
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

mod switches {
    use super::*;
    weft_protocol::conformance_tests!(Simulated::through_switches());
}

mod host {
    use super::*;
    weft_protocol::conformance_tests!(Simulated::over(Fabric::HOST));
}
