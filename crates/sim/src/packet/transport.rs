//! Flows: what senders send when, and what receivers answer.

use std::collections::VecDeque;

use weft_model::fabric::{LinkId, Routing, Topology};
use weft_plan::Rank;

use super::dcqcn::Pacer;
use super::network::{Event, Kind, NONE, Network, Turn};
use super::{Dcqcn, PacketOptions, Recovery, Transport};
use crate::flow::mixed;

/// How many ways an adaptive sender compares.
const COMPARED: u32 = 2;

/// Bytes on their way from one rank to another.
#[derive(Debug)]
pub(super) struct Flow {
    from: Rank,
    to: Rank,
    bytes: u64,
    packets: u32,
    ways: u32,
    salt: u64,
    /// The link that its sender puts packets on first.
    link: u32,
    // The sender's.
    next_new: u32,
    again: VecDeque<u32>,
    /// Packets that may be sent before the receiver asks for more; of a flow by rate, before something is acknowledged.
    credit: u32,
    window: u32,
    acked: Bits,
    acked_count: u32,
    /// All before have been acknowledged.
    acked_up_to: u32,
    in_ring: bool,
    pacer: Pacer,
    next_time: u64,
    seen_progress: u32,
    sent: u32,
    // The receiver's.
    got: Bits,
    got_count: u32,
    expected: u32,
    complained_up_to: u32,
    granted: u32,
    wanted: u32,
    noticed: Option<u64>,
    pub(super) done: bool,
}

/// A set of packet numbers.
#[derive(Debug, Default)]
struct Bits(Vec<u64>);

impl Bits {
    fn room(count: u32) -> Bits {
        Bits(vec![0; count.div_ceil(64) as usize])
    }
    fn has(&self, nth: u32) -> bool {
        self.0
            .get(nth as usize / 64)
            .is_none_or(|word| word >> (nth % 64) & 1 == 1)
    }
    /// Whether it was not there before.
    fn insert(&mut self, nth: u32) -> bool {
        let Some(word) = self.0.get_mut(nth as usize / 64) else {
            return false;
        };
        let bit = 1 << (nth % 64);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }
}

enum Next {
    Packet(u32),
    Later(u64),
    Nothing,
}

/// All flows, and the network below.
#[derive(Debug)]
pub(super) struct Flows<'a> {
    topology: &'a Topology,
    options: &'a PacketOptions,
    pub(super) network: Network,
    pub(super) flows: Vec<Flow>,
    /// By link: its ring, where hosts put what they send on it first.
    injectors: Vec<u32>,
    /// Flows that have something to send, in turn.
    rings: Vec<VecDeque<u32>>,
    /// When each rank may ask for the next packet.
    asks: Vec<u64>,
    /// Flows whose last byte has come.
    pub(super) ended: Vec<u32>,
    route: Vec<LinkId>,
    other: Vec<LinkId>,
}

impl<'a> Flows<'a> {
    pub(super) fn new(topology: &'a Topology, options: &'a PacketOptions, network: Network) -> Flows<'a> {
        Flows {
            topology,
            options,
            network,
            flows: Vec::new(),
            injectors: vec![NONE; topology.links() as usize],
            rings: Vec::new(),
            asks: vec![0; topology.ranks() as usize],
            ended: Vec::new(),
            route: Vec::new(),
            other: Vec::new(),
        }
    }

    /// A flow that will begin when [`Flows::begin`] says so.
    pub(super) fn add(&mut self, from: Rank, to: Rank, bytes: u64) -> u32 {
        let packets = u32::try_from(bytes.div_ceil(u64::from(self.options.payload)).max(1)).unwrap_or(u32::MAX);
        let id = self.flows.len() as u32;
        self.flows.push(Flow {
            from,
            to,
            bytes,
            packets,
            ways: self.topology.ways(from, to),
            salt: mixed(self.options.seed ^ (u64::from(from.0) << 40) ^ (u64::from(to.0) << 8) ^ u64::from(id)),
            link: NONE,
            next_new: 0,
            again: VecDeque::new(),
            credit: 0,
            window: 0,
            acked: Bits::default(),
            acked_count: 0,
            acked_up_to: 0,
            in_ring: false,
            pacer: Pacer::new(0),
            next_time: 0,
            seen_progress: 0,
            sent: 0,
            got: Bits::default(),
            got_count: 0,
            expected: 0,
            complained_up_to: 0,
            granted: 0,
            wanted: packets,
            noticed: None,
            done: false,
        });
        id
    }

    pub(super) fn begin(&mut self, id: u32) {
        let flow = &self.flows[id as usize];
        self.route.clear();
        self.topology.route(flow.from, flow.to, 0, &mut self.route);
        let Some(&first) = self.route.first() else {
            // To itself: nothing has to go anywhere.
            self.flows[id as usize].done = true;
            self.ended.push(id);
            return;
        };
        let whole = self.options.payload + self.options.header;
        let links = self.route.iter().map(|link| &self.network.links[link.0 as usize]);
        let slowest = links.clone().map(|link| link.takes(whole)).max().unwrap_or(1).max(1);
        let there: u64 = links.map(|link| link.takes(whole + self.options.header)).sum();
        let back_and_forth = 2 * self.topology.latency(&self.route).as_ps() + there;
        let fits = back_and_forth.div_ceil(slowest) + 1;
        let now = self.network.now;
        let flow = &mut self.flows[id as usize];
        flow.link = first.0;
        flow.window = match &self.options.transport {
            // A quarter more than fills the way, because packets also wait.
            Transport::Pull { window } => window.map_or(fits + fits / 4, u64::from).min(u32::MAX.into()) as u32,
            // Room for queues on the way; more in flight only lets them grow.
            Transport::Rate { .. } => (4 * fits).min(u32::MAX.into()) as u32,
        };
        flow.window = flow.window.max(1);
        (flow.credit, flow.granted) = (flow.window, flow.window);
        flow.acked = Bits::room(flow.packets);
        flow.got = Bits::room(flow.packets);
        flow.pacer = Pacer::new(now);
        let injects = &mut self.network.links[first.0 as usize].injects;
        if !std::mem::replace(injects, true) {
            self.injectors[first.0 as usize] = self.rings.len() as u32;
            self.rings.push(VecDeque::new());
        }
        self.ready(id);
        let at = now.saturating_add(self.options.timeout.as_ps());
        self.network.at(at, Event::Timer(id));
    }

    /// Lets something happen that is the network's or a flow's.
    pub(super) fn happen(&mut self, event: Event) {
        match event {
            Event::Arrive(packet) => {
                if self.network.arrive(packet) {
                    self.receive(packet);
                }
            }
            Event::Wake(link) => {
                if self.network.turn(link) == Turn::Idle {
                    self.inject(link);
                }
            }
            Event::Begin(flow) => self.begin(flow),
            Event::Emit(packet) => self.network.forward(packet),
            Event::Timer(flow) => self.look_after(flow),
            Event::Pause(link) => self.network.pause(link, true),
            Event::Resume(link) => self.network.pause(link, false),
            Event::Actor(_) | Event::Fault(_) => {}
        }
    }

    /// A flow has something to send.
    fn ready(&mut self, id: u32) {
        let flow = &mut self.flows[id as usize];
        if std::mem::replace(&mut flow.in_ring, true) {
            return;
        }
        let link = flow.link;
        let ring = self.injectors[link as usize];
        self.rings[ring as usize].push_back(id);
        self.network.wake_at_free(link);
    }

    /// A host puts the next packet on its link, which is free.
    fn inject(&mut self, link: u32) {
        let ring = self.injectors[link as usize];
        if ring == NONE || self.network.is_paused(link) {
            return;
        }
        let mut later = u64::MAX;
        for _ in 0..self.rings[ring as usize].len() {
            let Some(id) = self.rings[ring as usize].pop_front() else {
                break;
            };
            match self.next(id) {
                Next::Packet(seq) => {
                    self.send(id, seq);
                    self.rings[ring as usize].push_back(id);
                    return self.network.wake_at_free(link);
                }
                Next::Later(time) => {
                    later = later.min(time);
                    self.rings[ring as usize].push_back(id);
                }
                Next::Nothing => self.flows[id as usize].in_ring = false,
            }
        }
        if later < u64::MAX {
            self.network.wake_at(link, later);
        }
    }

    fn next(&mut self, id: u32) -> Next {
        let now = self.network.now;
        let flow = &mut self.flows[id as usize];
        let by_rate = matches!(self.options.transport, Transport::Rate { .. });
        if by_rate && now < flow.next_time {
            return Next::Later(flow.next_time);
        }
        if !by_rate && flow.credit == 0 {
            return Next::Nothing;
        }
        while let Some(seq) = flow.again.pop_front() {
            if !flow.acked.has(seq) {
                flow.credit = flow.credit.saturating_sub(1);
                return Next::Packet(seq);
            }
        }
        let in_flight = flow.next_new.saturating_sub(flow.acked_up_to.max(flow.acked_count));
        if flow.next_new == flow.packets || (by_rate && in_flight >= flow.window) {
            return Next::Nothing;
        }
        flow.next_new += 1;
        flow.credit = flow.credit.saturating_sub(1);
        Next::Packet(flow.next_new - 1)
    }

    fn send(&mut self, id: u32, seq: u32) {
        self.choose_way(id, false);
        let now = self.network.now;
        let flow = &mut self.flows[id as usize];
        let before = u64::from(seq) * u64::from(self.options.payload);
        let payload = flow.bytes.saturating_sub(before).min(self.options.payload.into()) as u32;
        let bytes = payload + self.options.header;
        flow.sent += 1;
        self.network.tally.packets += 1;
        if let Transport::Rate { dcqcn: Some(dcqcn), .. } = &self.options.transport {
            let takes = self.network.links[flow.link as usize].takes(bytes);
            flow.next_time = now + (takes as f64 / flow.pacer.rate(dcqcn, now)) as u64;
        }
        let (link, packet) = (flow.link, self.network.make((id, seq, bytes, Kind::Data), &self.route));
        self.network.transmit(link, packet);
    }

    /// Fills `route` with the way of the next packet of a flow, or of its answer.
    fn choose_way(&mut self, id: u32, back: bool) {
        let flow = &self.flows[id as usize];
        let (from, to) = if back {
            (flow.to, flow.from)
        } else {
            (flow.from, flow.to)
        };
        let ways = u64::from(flow.ways);
        self.route.clear();
        let nth = u64::from(if back { flow.got_count } else { flow.sent });
        let way = match self.options.routing {
            _ if ways == 1 => 0,
            Routing::Spray => {
                // Once over all ways, in an order of chance, and again in another one.
                let round = mixed(flow.salt ^ (nth / ways) ^ (u64::from(back) << 63));
                shuffled(nth % ways, ways, round)
            }
            Routing::Adaptive => {
                let mut best: Option<(u32, u64)> = None;
                for look in 0..u64::from(COMPARED) {
                    let way = mixed(flow.salt ^ (nth << 8) ^ look) % ways;
                    self.other.clear();
                    self.topology.route(from, to, way as u32, &mut self.other);
                    let queued = self.other.get(1).map_or(0, |link| self.network.queued(*link));
                    if best.is_none_or(|(least, _)| queued < least) {
                        best = Some((queued, way));
                    }
                }
                best.map_or(0, |(_, way)| way)
            }
            _ => flow.salt % ways,
        };
        self.topology.route(from, to, way as u32, &mut self.route);
    }

    /// A packet has come to its end.
    fn receive(&mut self, packet_id: u32) {
        let packet = *self.network.packet(packet_id);
        self.network.drop_packet(packet_id);
        match packet.kind {
            Kind::Data => self.on_data(packet.flow, packet.seq, packet.marked),
            Kind::Header => self.on_header(packet.flow, packet.seq),
            Kind::Ack => self.on_ack(packet.flow, packet.seq, packet.pulls),
            Kind::Nack => self.on_nack(packet.flow, packet.seq, packet.pulls),
            Kind::Notice => {
                if let Some(dcqcn) = self.dcqcn().cloned() {
                    let now = self.network.now;
                    self.flows[packet.flow as usize].pacer.notice(&dcqcn, now);
                }
            }
        }
    }

    fn dcqcn(&self) -> Option<&'a Dcqcn> {
        match &self.options.transport {
            Transport::Rate { dcqcn, .. } => dcqcn.as_ref(),
            Transport::Pull { .. } => None,
        }
    }

    fn recovery(&self) -> Option<Recovery> {
        match &self.options.transport {
            Transport::Rate { recovery, .. } => Some(*recovery),
            Transport::Pull { .. } => None,
        }
    }

    fn on_data(&mut self, id: u32, seq: u32, marked: bool) {
        let now = self.network.now;
        if let Some(dcqcn) = self.dcqcn().filter(|_| marked) {
            let every = dcqcn.notice_every.as_ps();
            let flow = &mut self.flows[id as usize];
            if flow.noticed.is_none_or(|last| now - last >= every) {
                flow.noticed = Some(now);
                self.answer(id, seq, Kind::Notice, false);
            }
        }
        let recovery = self.recovery();
        let flow = &mut self.flows[id as usize];
        let in_order = seq == flow.expected;
        let new = match recovery {
            Some(Recovery::GoBackN) => in_order,
            _ => flow.got.insert(seq),
        };
        if new {
            flow.got_count += 1;
            if flow.got_count == flow.packets {
                flow.done = true;
                self.ended.push(id);
            }
        }
        let flow = &mut self.flows[id as usize];
        match recovery {
            None => {
                let pulls = flow.granted < flow.wanted;
                flow.granted += u32::from(pulls);
                self.answer(id, seq, Kind::Ack, pulls);
            }
            Some(Recovery::GoBackN) if in_order => {
                flow.expected += 1;
                let expected = flow.expected;
                self.answer(id, expected, Kind::Ack, false);
            }
            Some(Recovery::GoBackN) => {
                // One complaint for each gap.
                let expected = flow.expected;
                if seq > expected && flow.complained_up_to <= expected {
                    flow.complained_up_to = expected + 1;
                    self.answer(id, expected, Kind::Nack, false);
                } else if seq < expected {
                    self.answer(id, expected, Kind::Ack, false);
                }
            }
            Some(Recovery::SelectiveRepeat) => {
                while flow.expected < flow.packets && flow.got.has(flow.expected) {
                    flow.expected += 1;
                }
                // On one way packets stay in order, so that whatever is missing before this one is lost.
                let one_way = self.options.routing == Routing::Ecmp;
                let missing: Vec<u32> = match one_way {
                    true => (flow.expected.max(flow.complained_up_to)..seq)
                        .filter(|&lost| !flow.got.has(lost))
                        .collect(),
                    false => Vec::new(),
                };
                flow.complained_up_to = flow.complained_up_to.max(seq + 1);
                for lost in missing {
                    self.answer(id, lost, Kind::Nack, false);
                }
                self.answer(id, seq, Kind::Ack, false);
            }
        }
    }

    fn on_header(&mut self, id: u32, seq: u32) {
        let flow = &mut self.flows[id as usize];
        if flow.got.has(seq) {
            return;
        }
        flow.wanted += 1;
        let pulls = flow.granted < flow.wanted;
        flow.granted += u32::from(pulls);
        self.answer(id, seq, Kind::Nack, pulls);
    }

    /// Sends control back; what asks for a packet waits for its turn.
    fn answer(&mut self, id: u32, seq: u32, kind: Kind, pulls: bool) {
        self.choose_way(id, true);
        let packet = self.network.make((id, seq, self.options.header, kind), &self.route);
        if !pulls {
            return self.network.forward(packet);
        }
        self.network.ask_for_more(packet);
        let receiver = self.flows[id as usize].to.0 as usize;
        let now = self.network.now;
        let at = self.asks[receiver].max(now);
        let first = self.route.first().map_or(0, |link| link.0);
        let whole = self.options.payload + self.options.header;
        self.asks[receiver] = at + self.network.links[first as usize].takes(whole);
        match at > now {
            true => self.network.at(at, Event::Emit(packet)),
            false => self.network.forward(packet),
        }
    }

    fn on_ack(&mut self, id: u32, seq: u32, pulls: bool) {
        let recovery = self.recovery();
        let flow = &mut self.flows[id as usize];
        match recovery {
            Some(Recovery::GoBackN) => flow.acked_up_to = flow.acked_up_to.max(seq),
            _ => flow.acked_count += u32::from(flow.acked.insert(seq)),
        }
        flow.credit += u32::from(pulls);
        let more = flow.next_new < flow.packets || !flow.again.is_empty();
        if more && (recovery.is_some() || flow.credit > 0) {
            self.ready(id);
        }
    }

    fn on_nack(&mut self, id: u32, seq: u32, pulls: bool) {
        let recovery = self.recovery();
        let flow = &mut self.flows[id as usize];
        flow.credit += u32::from(pulls);
        match recovery {
            Some(Recovery::GoBackN) => {
                flow.acked_up_to = flow.acked_up_to.max(seq);
                self.network.tally.again += u64::from(flow.next_new.saturating_sub(seq));
                flow.next_new = flow.next_new.min(seq);
            }
            _ => {
                flow.again.push_back(seq);
                self.network.tally.again += 1;
            }
        }
        self.ready(id);
    }

    /// Sends again what nothing has been heard of, where nothing at all has been heard since the last look.
    fn look_after(&mut self, id: u32) {
        let recovery = self.recovery();
        let flow = &mut self.flows[id as usize];
        if flow.done {
            (flow.acked, flow.got, flow.again) = (Bits::default(), Bits::default(), VecDeque::new());
            return;
        }
        let progress = flow.acked_count + flow.acked_up_to;
        if progress == flow.seen_progress {
            match recovery {
                Some(Recovery::GoBackN) => {
                    self.network.tally.again += u64::from(flow.next_new - flow.acked_up_to.min(flow.next_new));
                    flow.next_new = flow.next_new.min(flow.acked_up_to);
                }
                _ => {
                    let lost: Vec<u32> = (0..flow.next_new).filter(|&seq| !flow.acked.has(seq)).collect();
                    let lost = &lost[..lost.len().min(flow.window as usize)];
                    self.network.tally.again += lost.len() as u64;
                    flow.again.clear();
                    flow.again.extend(lost);
                    flow.credit = flow.credit.max(lost.len() as u32);
                }
            }
            flow.next_time = 0;
            self.ready(id);
        }
        self.flows[id as usize].seen_progress = progress;
        let at = self.network.now.saturating_add(self.options.timeout.as_ps());
        self.network.at(at, Event::Timer(id));
    }
}

/// Where the nth of `count` comes in an order of chance, in which each comes once.
pub(super) fn shuffled(nth: u64, count: u64, order: u64) -> u64 {
    let bits = u64::BITS - (count - 1).leading_zeros();
    let mask = (1 << bits) - 1;
    let mut place = nth;
    loop {
        // Each line can be undone, so that no two numbers of so many bits become one.
        for key in [order, order >> 21, order >> 42] {
            place = place.wrapping_add(key >> 7).wrapping_mul(key | 1) & mask;
            place ^= place >> bits.div_ceil(2);
        }
        // What has left the numbers below `count` goes on until it is among them again.
        if place < count {
            return place;
        }
    }
}
