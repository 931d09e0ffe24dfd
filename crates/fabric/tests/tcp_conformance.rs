//! The TCP transport against the suite that every transport must pass.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::tcp::{Tcp, TcpOptions};
use weft_fabric::{Clock, HostMemory};
use weft_plan::Time;
use weft_protocol::conformance::{Ends, Harness, Side};
use weft_protocol::{Epoch, Memory};

struct OverTcp {
    clock: Clock,
    options: TcpOptions,
}

impl OverTcp {
    fn new(connections: u32) -> OverTcp {
        OverTcp {
            clock: Clock::start(),
            options: TcpOptions {
                connections,
                ..TcpOptions::default()
            },
        }
    }
}

impl Harness for OverTcp {
    fn ends(&mut self) -> Ends {
        let start = |epoch| Box::new(Tcp::start(self.options.clone(), epoch, self.clock).expect("loopback is there"));
        Ends {
            initiator: start(Epoch(7)),
            initiator_epoch: Epoch(7),
            target: start(Epoch(9)),
            target_epoch: Epoch(9),
        }
    }
    fn memory(&mut self, _: Side, len: u64) -> Arc<dyn Memory> {
        Arc::new(HostMemory::from_vec(vec![0; len as usize]))
    }
    fn now(&mut self) -> Time {
        self.clock.now()
    }
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }
}

mod one_connection {
    weft_protocol::conformance_tests!(super::OverTcp::new(1));
}

mod several_connections {
    weft_protocol::conformance_tests!(super::OverTcp::new(3));
}
