//! An agent of the simulated world: the real agent core, turned by the world's clock.

use std::sync::Arc;

use weft_plan::{Bandwidth, Bytes, LinkCost, Picos, Place, PlaceKind, Time};
use weft_protocol::agent::{Core, Event, Reach, Settings, Slot};
use weft_protocol::seeded::Seeded;
use weft_protocol::session::{Config, Secret};
use weft_protocol::{Carriage, Epoch, Loopback, Progress, Rate, Throttled, Transport, VecMemory};

use crate::transport::{Fabric, SimTransport};
use crate::wire::AgentClock;
use crate::world::{NodeId, World};

/// Turns after which an agent that still has something to do must be going in circles.
const TURNS_MAX: usize = 1000;

/// How an agent starts.
#[derive(Clone, Debug)]
pub struct Birth {
    pub node: NodeId,
    pub name: String,
    pub host: String,
    pub secret: Secret,
    /// Greater in every later life.
    pub epoch: Epoch,
    /// The networks it is on, in the order in which it names them.
    pub rails: Vec<Fabric>,
    /// Paths to each peer over each of them.
    pub paths: usize,
    pub heartbeat: Time,
    pub silence_max: Time,
    /// What its clock reads at the start: agents are allowed to be old.
    pub clock: Time,
    /// It has a device, whose memory no network reaches, and host memory that transfers from and to it go through.
    pub device: bool,
}

/// What transfers of a device go through: less than most of them have, so that pieces are used again and again.
const RING_PIECES: u64 = 3;
const RING_PIECE_BYTES: u64 = 1024;
/// What a device's own transport carries: slower than most networks, so that pieces wait in the ring.
const DEVICE_BYTES_PER_SEC: u64 = 50_000_000;

/// One life of an agent. Dropping it ends the life, as the death of its process would.
#[derive(Debug)]
pub struct SimAgent {
    pub core: Core<dyn Transport>,
    world: World,
    clock: AgentClock,
}

impl SimAgent {
    /// Starts an agent over its networks and over the memory of its host.
    pub fn start(world: &World, birth: &Birth) -> SimAgent {
        let mut config = Config::new(&birth.name, birth.epoch, birth.secret.clone());
        config.host = birth.host.clone();
        config.heartbeat = birth.heartbeat;
        config.silence_max = birth.silence_max;
        let slot = |fabric, reach, paths| {
            let transport = SimTransport::start(world, birth.node, fabric, birth.epoch, birth.clock);
            Slot {
                reach,
                preference: 0,
                paths,
                transport: Box::new(transport) as Box<dyn Transport>,
            }
        };
        let host = Fabric {
            packet_bytes: birth.rails.first().map_or(4096, |network| network.packet_bytes),
            ..Fabric::HOST
        };
        let networks = birth.rails.iter();
        let mut slots: Vec<_> = networks
            .map(|network| slot(*network, Reach::Anywhere, birth.paths))
            .collect();
        slots.push(slot(host, Reach::SameHost, 1));
        slots.extend(birth.device.then(|| device_slot(birth.epoch)));
        let mut chance = Seeded::new(birth.epoch.0);
        let random = Box::new(move || {
            let mut bytes = [0; 32];
            chance.fill(&mut bytes);
            bytes
        });
        let settings = Settings {
            handshake_max: birth.silence_max,
            backoff_min: Time::from_ms(1),
            backoff_max: Time::from_ms(100),
            ..Settings::new(config)
        };
        let mut core = Core::new(settings, slots, random);
        if birth.device {
            let ring = Arc::new(VecMemory::zeroed((RING_PIECES * RING_PIECE_BYTES) as usize));
            let ring = core
                .register(ring, Place::DRAM)
                .expect("the simulated fabrics take any memory");
            core.stage_through(&ring.key, RING_PIECE_BYTES)
                .expect("a ring of host memory");
        }
        SimAgent {
            core,
            world: world.clone(),
            clock: AgentClock::new(world.now(), birth.clock),
        }
    }

    /// The time on this agent's own clock.
    pub fn now(&self) -> Time {
        self.clock.read(self.world.now())
    }

    /// A time of this agent's clock on the world's.
    pub fn on_world_clock(&self, time: Time) -> Time {
        self.clock.on_world_clock(time)
    }

    /// Turns the agent until it has nothing to do, and collects what happened.
    pub fn turn(&mut self, events: &mut Vec<Event>) {
        let now = self.now();
        let mut turns = 0;
        while self.core.pump(now) == Progress::Busy {
            turns += 1;
            assert!(turns < TURNS_MAX, "an agent goes in circles");
        }
        events.extend(std::iter::from_fn(|| self.core.next_event()));
    }

    /// When the agent wants to be turned again, on the world's clock.
    pub fn next_timeout(&self) -> Option<Time> {
        self.core.next_timeout().map(|at| self.on_world_clock(at))
    }
}

/// The transport between host memory and the memory of the agent's own device.
fn device_slot(epoch: Epoch) -> Slot<dyn Transport> {
    let bandwidth = Bandwidth::from_bytes_per_sec(DEVICE_BYTES_PER_SEC);
    let cost = LinkCost {
        latency: Picos::from_us(5),
        per_span: Picos::ZERO,
        bandwidth,
    };
    let carriage = Carriage::new(PlaceKind::Dram, PlaceKind::Gpu, cost, 512);
    let end = Loopback::new().endpoint_carrying("device", epoch, vec![carriage]);
    let rate = Rate {
        bandwidth,
        burst: Bytes(1024),
    };
    Slot {
        reach: Reach::Here,
        preference: 0,
        paths: 1,
        transport: Box::new(Throttled::new(end, rate)),
    }
}
