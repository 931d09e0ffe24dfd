//! Single packets from rank to rank, without a transport of the network's own: what carries the wires of a [`World`](crate::World), whose ends
//! bring their own protocol.

use weft_model::fabric::{LinkId, Routing, Topology};
use weft_plan::Rank;

use super::network::{Event, Kind, Network, Turn};
use super::{PacketError, PacketOptions};
use crate::flow::mixed;

/// What happened next.
#[derive(Debug)]
pub(crate) enum Fate<T> {
    Arrived(T),
    /// Lost, or trimmed, which its sender is told.
    Lost(T),
    /// Something that nobody outside notices.
    Nothing,
}

/// Packets under way, and what each stands for.
#[derive(Debug)]
pub(crate) struct Datagrams<T> {
    topology: Topology,
    routing: Routing,
    header: u32,
    network: Network,
    cargo: Vec<Option<T>>,
    free: Vec<u32>,
    sent: u64,
    route: Vec<LinkId>,
}

impl<T> Datagrams<T> {
    pub(crate) fn new(topology: Topology, options: &PacketOptions) -> Result<Datagrams<T>, PacketError> {
        let mut network = Network::new(&topology, options, None)?;
        network.tells_losses();
        Ok(Datagrams {
            topology,
            routing: options.routing,
            header: options.header,
            network,
            cargo: Vec::new(),
            free: Vec::new(),
            sent: 0,
            route: Vec::new(),
        })
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.topology.ranks()
    }

    /// Sends a packet now; what it stands for comes back with its fate.
    pub(crate) fn send(&mut self, from: Rank, to: Rank, bytes: u32, now: u64, cargo: T) {
        let id = self.free.pop().unwrap_or_else(|| {
            self.cargo.push(None);
            (self.cargo.len() - 1) as u32
        });
        self.cargo[id as usize] = Some(cargo);
        self.sent += 1;
        let ways = u64::from(self.topology.ways(from, to));
        let pair = (u64::from(from.0) << 32) | u64::from(to.0);
        let way = match self.routing {
            Routing::Ecmp => mixed(pair) % ways,
            _ => mixed(pair ^ mixed(self.sent)) % ways,
        };
        self.route.clear();
        self.topology.route(from, to, way as u32, &mut self.route);
        self.network.now = self.network.now.max(now);
        let packet = (id, 0, bytes.saturating_add(self.header), Kind::Data);
        let packet = self.network.make(packet, &self.route);
        self.network.forward(packet);
    }

    /// When the next thing happens here.
    pub(crate) fn next_time(&mut self) -> Option<u64> {
        match self.network.lost.is_empty() {
            true => self.network.next_time(),
            false => Some(self.network.now),
        }
    }

    /// Lets the next thing happen.
    pub(crate) fn step(&mut self) -> Fate<T> {
        if let Some(id) = self.network.lost.pop() {
            return self.end(id, false);
        }
        match self.network.next() {
            Some(Event::Arrive(packet)) => {
                if !self.network.arrive(packet) {
                    return Fate::Nothing;
                }
                let (id, kind) = (self.network.packet(packet).flow, self.network.packet(packet).kind);
                self.network.drop_packet(packet);
                return self.end(id, kind == Kind::Data);
            }
            Some(Event::Wake(link)) => {
                let turn = self.network.turn(link);
                debug_assert!(turn == Turn::Sent || turn == Turn::Idle);
            }
            Some(Event::Pause(link)) => self.network.pause(link, true),
            Some(Event::Resume(link)) => self.network.pause(link, false),
            _ => {}
        }
        Fate::Nothing
    }

    fn end(&mut self, id: u32, arrived: bool) -> Fate<T> {
        let cargo = self.cargo.get_mut(id as usize).and_then(Option::take);
        match cargo {
            None => Fate::Nothing,
            Some(cargo) => {
                self.free.push(id);
                if arrived {
                    Fate::Arrived(cargo)
                } else {
                    Fate::Lost(cargo)
                }
            }
        }
    }
}
