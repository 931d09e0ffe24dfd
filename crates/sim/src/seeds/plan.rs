//! What kind of world a seed makes.

use weft_plan::{Bandwidth, LinkCost, Picos, Time};
use weft_protocol::Epoch;
use weft_protocol::seeded::Seeded;
use weft_protocol::session::Secret;

use crate::agent::Birth;
use crate::faults::Faults;
use crate::transport::Fabric;
use crate::world::NodeId;

/// What all know who are no strangers.
const SECRET: &[u8] = b"simulated";

/// The shape of a world: drawn from the seed before anything happens in it.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) nodes: usize,
    /// Nodes on one host share memory.
    pub(super) nodes_per_host: usize,
    /// One network, or two of unequal speed.
    pub(super) rails: Vec<Fabric>,
    pub(super) paths: usize,
    pub(super) faults: Faults,
    /// Chances, out of a thousand actions, of the faults that befall whole nodes and paths.
    pub(super) crash: u64,
    pub(super) cut: u64,
    pub(super) freeze: u64,
    pub(super) reset: u64,
    /// The same of a path just after a transfer was submitted.
    pub(super) snip: u64,
    /// The same of a cable, where there is another one.
    pub(super) pull: u64,
    pub(super) actions: u64,
    /// The time between two actions, at most.
    pub(super) pace_max: Time,
    /// Little happens, so that sessions live by their signs of life alone.
    pub(super) quiet: bool,
    pub(super) silence_max: Time,
    pub(super) region_bytes: usize,
    pub(super) cells: usize,
    /// Agents increment each other's words. Only in some worlds, so that the others, those known to have failed among them, keep
    /// their histories.
    pub(super) counts: bool,
    /// Most buffers of agents are in a device, so that transfers go through host memory on the way. Only in some worlds likewise.
    pub(super) devices: bool,
    /// Somebody is there who does not know the secret, and tries all the same.
    pub(super) stranger: bool,
    /// What the clocks of agents read when they start, node by node and then from the beginning.
    pub(super) clocks: Vec<Time>,
}

impl Plan {
    /// How the agent of a node begins a life in such a world.
    pub(super) fn birth(&self, index: usize, node: NodeId, name: &str, host: &str, epoch: Epoch) -> Birth {
        Birth {
            node,
            name: name.to_owned(),
            host: host.to_owned(),
            secret: Secret::new(SECRET),
            epoch,
            rails: self.rails.clone(),
            paths: self.paths,
            heartbeat: Time::from_ns(self.silence_max.as_ns() / 6),
            silence_max: self.silence_max,
            clock: self.clocks[index % self.clocks.len()],
            device: false,
        }
    }

    pub(super) fn of(seed: u64) -> Plan {
        let mut chance = Seeded::new(seed ^ 0x706c_616e);
        // Every kind of fault is absent from some worlds, so that the others are seen alone too.
        let mut sometimes = |most: f64| match chance.below(3) {
            0 => 0.0,
            1 => most / 10.0,
            _ => most,
        };
        let faults = Faults {
            replay: replay_of(seed),
            loss: sometimes(0.1),
            duplication: sometimes(0.05),
            delay: sometimes(0.05),
            unacknowledged: sometimes(0.05),
            mute: sometimes(0.8),
            flip: sometimes(0.01),
            busy_release: sometimes(0.5),
            short_post: sometimes(0.3),
            clock_error_max: Time::from_us((sometimes(100.0)) as u64),
        };
        let mut of_thousand = |most: f64| sometimes(most) as u64;
        let (crash, cut, freeze, reset, snip) = (
            of_thousand(20.0),
            of_thousand(30.0),
            of_thousand(20.0),
            of_thousand(30.0),
            of_thousand(200.0),
        );
        let network = Fabric {
            packet_bytes: 1 << (8 + chance.below(5)),
            max_op_bytes: 4096 << chance.below(3),
            max_op_runs: 8 << chance.below(4),
            max_inflight_ops: 4 << chance.below(3),
            retries_max: 2 + chance.below(5) as u32,
            cost: LinkCost {
                latency: Picos::from_us(1 + chance.below(20)),
                per_span: Picos::from_ns(20),
                bandwidth: Bandwidth::from_bytes_per_sec(1_000_000_000 << chance.below(5)),
            },
            ..Fabric::NETWORK
        };
        let rails = rails_of(seed, network);
        let quiet = seed % 5 == 4;
        Plan {
            nodes: 2 + chance.below(3) as usize,
            nodes_per_host: 1 + chance.below(3) as usize,
            rails,
            paths: 1 + chance.below(3) as usize,
            faults,
            crash,
            cut,
            freeze,
            reset,
            snip,
            pull: 100,
            actions: if quiet { 60 } else { 250 },
            pace_max: Time::from_us(200 << chance.below(6)),
            quiet,
            silence_max: Time::from_ms(300 + chance.below(700)),
            region_bytes: 32 << 10,
            cells: 4,
            counts: seed % 4 == 1,
            clocks: clocks_of(seed),
            stranger: seed % 3 == 2,
            devices: seed % 6 == 3,
        }
    }
}

/// In a third of the worlds messages are recorded and played again.
fn replay_of(seed: u64) -> f64 {
    match Seeded::new(seed ^ 0x7265_706c).below(3) {
        0 => 0.2,
        _ => 0.0,
    }
}

/// Most agents are young. Some are as old as 64 bits of picoseconds can tell, which once was the end of time, and some are about to
/// run out of nanoseconds, which takes 584 years.
fn clocks_of(seed: u64) -> Vec<Time> {
    const DAY: u64 = 86_400;
    let mut chance = Seeded::new(seed ^ 0x6167_6573);
    let mut clock = |_| match chance.below(6) {
        0 => Time::from_ns(u64::MAX / 1_000).saturating_sub(Time::from_ms(200)),
        1 => Time::from_secs(213 * DAY),
        2 => Time::MAX.saturating_sub(Time::from_secs(3_600)),
        _ => Time::ZERO,
    };
    (0..4).map(&mut clock).collect()
}

/// A third of the worlds have a second network. Its draws are its own, so that the others stay as they were.
fn rails_of(seed: u64, network: Fabric) -> Vec<Fabric> {
    let mut chance = Seeded::new(seed ^ 0x7261_696c);
    let mut rails = vec![network];
    if chance.below(3) == 0 {
        let mut second = Fabric { rail: 1, ..network };
        let bandwidth = network.cost.bandwidth.bytes_per_sec() >> chance.below(4);
        second.cost.bandwidth = Bandwidth::from_bytes_per_sec(bandwidth);
        second.max_op_bytes >>= chance.below(2);
        rails.push(second);
    }
    rails
}
