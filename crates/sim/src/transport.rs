//! The `Transport` of the simulated world.

use std::sync::Arc;

use weft_plan::{Bandwidth, LinkCost, Picos, Time};
use weft_protocol::{
    Capabilities, Carriage, Epoch, Grant, Loss, Op, OpId, PathId, PeerAddress, Progress, Refusal, Region, RegionKey,
    RegionTable, Signal, Transport,
};

use crate::wire::{AgentClock, End, Half, Packet, Side, Wire};
use crate::world::{NodeId, World};

/// A kind of link, and what its ends can do.
#[derive(Clone, Copy, Debug)]
pub struct Fabric {
    pub name: &'static str,
    /// Which of the networks that the nodes are on: each has a card and a cable of its own, and no rail reaches another.
    pub rail: u32,
    /// Reaches only nodes of the same host, is executed by the initiator alone, and loses nothing.
    pub local: bool,
    pub cost: LinkCost,
    /// The most bytes that land together.
    pub packet_bytes: u64,
    pub max_op_bytes: u64,
    pub max_op_runs: usize,
    pub max_inflight_ops: usize,
    pub max_message_bytes: usize,
    /// How often a packet is sent again before its path is given up, and how long after the first time; then twice as long.
    pub retries_max: u32,
    pub retry_after: Time,
}

impl Fabric {
    /// A datacentre network: 5 us, 25 GB/s, packets in any order.
    pub const NETWORK: Fabric = Fabric {
        name: "simulated_network",
        rail: 0,
        local: false,
        cost: LinkCost {
            latency: Picos::from_us(5),
            per_span: Picos::from_ns(20),
            bandwidth: Bandwidth::from_bytes_per_sec(25_000_000_000),
        },
        packet_bytes: 4096,
        max_op_bytes: 64 << 10,
        max_op_runs: 256,
        max_inflight_ops: 16,
        max_message_bytes: 64 << 10,
        retries_max: 6,
        retry_after: Time::from_us(50),
    };

    /// Memory that two processes of a host share.
    pub const HOST: Fabric = Fabric {
        name: "simulated_memory",
        local: true,
        cost: LinkCost {
            latency: Picos::from_ns(300),
            per_span: Picos::from_ns(5),
            bandwidth: Bandwidth::from_bytes_per_sec(10_000_000_000),
        },
        ..Fabric::NETWORK
    };
}

/// One end of a simulated fabric, for one life of an agent. Dropping it is the end of that life.
#[derive(Debug)]
pub struct SimTransport {
    world: World,
    end: usize,
    capabilities: Capabilities,
}

impl SimTransport {
    /// Starts an end on a node. Its owner's clock reads `reading` now.
    pub fn start(world: &World, node: NodeId, fabric: Fabric, epoch: Epoch, reading: Time) -> SimTransport {
        let mut state = world.lock();
        let end = state.ends.len();
        let clock = AgentClock::new(state.now, reading);
        state.ends.push(End {
            node,
            alive: true,
            fabric,
            clock,
            table: RegionTable::new(epoch),
            paths: Default::default(),
            inbox: Vec::new(),
            leaving: Default::default(),
            next_path: 0,
        });
        let name = &state.nodes[node.0 as usize].name;
        let address = PeerAddress(format!("{}:{}/{name}", fabric.name, fabric.rail));
        drop(state);
        let mut capabilities = Capabilities::new(
            fabric.name,
            address,
            vec![Carriage::host(fabric.cost, fabric.max_op_bytes)],
        );
        capabilities.max_op_runs = fabric.max_op_runs;
        capabilities.max_inflight_ops = fabric.max_inflight_ops;
        capabilities.max_message_bytes = fabric.max_message_bytes;
        capabilities.reliable_messages = fabric.local;
        capabilities.awaits_vouching = !fabric.local;
        capabilities.atomics = true;
        SimTransport {
            world: world.clone(),
            end,
            capabilities,
        }
    }
}

impl Transport for SimTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        let mut state = self.world.lock();
        let table = &mut state.ends[self.end].table;
        if region.key.epoch != table.epoch() {
            return Err(Refusal::StaleEpoch);
        }
        table.insert(region.clone());
        Ok(Grant::default())
    }

    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        let mut state = self.world.lock();
        let state = &mut *state;
        let end = &mut state.ends[self.end];
        if end.leaving.remove(&key.slot) {
            return Ok(Progress::Idle);
        }
        end.table.lookup(key)?;
        end.table.remove(key);
        state.release_near(self.end, key);
        let end = &mut state.ends[self.end];
        if state.chance.chance(state.faults.busy_release) {
            state.tally.busy_releases += 1;
            end.leaving.insert(key.slot);
            return Ok(Progress::Busy);
        }
        Ok(Progress::Idle)
    }

    fn open(&mut self, peer: &PeerAddress, _now: Time) -> Result<PathId, Loss> {
        if peer.transport() != self.capabilities.name {
            return Err(Loss::Unreachable);
        }
        let mut state = self.world.lock();
        let state = &mut *state;
        let Some((rail, name)) = peer.rest().split_once('/') else {
            return Err(Loss::Unreachable);
        };
        let Some(far) = state.nodes.iter().position(|n| n.name == name) else {
            return Err(Loss::Unreachable);
        };
        let (near, fabric) = (state.ends[self.end].node, state.ends[self.end].fabric);
        let far = NodeId(far as u32);
        if rail.parse() != Ok(fabric.rail) {
            return Err(Loss::Unreachable);
        }
        if fabric.local && state.nodes[near.0 as usize].host != state.nodes[far.0 as usize].host {
            return Err(Loss::Unreachable);
        }
        let wire = state.next_wire;
        state.next_wire += 1;
        let path = state.ends[self.end].new_path(wire, Side::Opener);
        let mut clock_error = || match state.faults.clock_error_max.as_ns() {
            0 => Time::ZERO,
            max => Time::from_ns(state.chance.below(max)),
        };
        let opener = Half::new(near, Some((self.end, path)), clock_error());
        let acceptor = Half::new(far, None, clock_error());
        state.wires.insert(
            wire,
            Wire {
                fabric,
                opener,
                acceptor,
            },
        );
        let address: Arc<str> = name.into();
        state.send(wire, Side::Opener, Packet::Syn { address }, 64);
        Ok(path)
    }

    fn vouch(&mut self, path: PathId) {
        let mut state = self.world.lock();
        if let Some(&(wire, side)) = state.ends[self.end].paths.get(&path) {
            state.vouch(wire, side);
        }
    }

    fn close(&mut self, path: PathId) {
        let mut state = self.world.lock();
        if let Some(&(wire, side)) = state.ends[self.end].paths.get(&path) {
            state.close(wire, side);
        }
    }

    fn post(&mut self, path: PathId, ops: &[Op], _now: Time) -> Result<usize, Loss> {
        let mut state = self.world.lock();
        let &(wire, side) = state.ends[self.end].paths.get(&path).ok_or(Loss::Closed)?;
        state.post(wire, side, ops)
    }

    fn cancel(&mut self, path: PathId, op: OpId, _now: Time) {
        let mut state = self.world.lock();
        if let Some(&(wire, side)) = state.ends[self.end].paths.get(&path) {
            state.cancel(wire, side, op);
        }
    }

    fn poll(&mut self, _now: Time, signals: &mut Vec<Signal>) -> Progress {
        let mut state = self.world.lock();
        state.expire(self.end);
        signals.append(&mut state.ends[self.end].inbox);
        Progress::Idle
    }
}

impl Drop for SimTransport {
    fn drop(&mut self) {
        self.world.lock().end_life(self.end, true);
    }
}
