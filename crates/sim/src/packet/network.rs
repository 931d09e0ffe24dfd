//! Links, their queues, and packets in them.
//!
//! What an event touches is far apart in memory, and in a large network rarely in the cache. A packet with its way is one cache line therefore, and a
//! link another; and before events happen, those of the next few are looked at together, so that the memory fetches them side by side.

use weft_model::fabric::{LinkId, Topology};
use weft_protocol::seeded::Seeded;

use super::wheel::Wheel;
use super::{Dcqcn, Overflow, PacketError, PacketOptions};

pub(super) const NONE: u32 = u32::MAX;
/// An event is what it is about, and above it what it is.
pub(super) const NUMBER_BITS: u32 = 28;
const NUMBER: u32 = (1 << NUMBER_BITS) - 1;
/// Links of a way that a packet has with it; longer ways are stored apart.
const WAY: usize = 9;
/// Events whose packets and links are fetched together.
const TOGETHER: u32 = 16;
/// Control may wait for a link up to so many bytes.
const CONTROL_QUEUE: u32 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A packet is at the end of its link.
    Arrive(u32),
    /// A link is free, and something may wait for it.
    Wake(u32),
    /// A flow begins.
    Begin(u32),
    /// A host sends a packet of control that it has held back.
    Emit(u32),
    /// A sender looks whether anything has come of what it has sent.
    Timer(u32),
    /// The other end of a link says stop, or go on.
    Pause(u32),
    Resume(u32),
    /// A rank comes to its next step.
    Actor(u32),
    /// A fault begins or ends.
    Fault(u32),
}

impl Event {
    fn pack(self) -> u32 {
        let (kind, number) = match self {
            Event::Arrive(number) => (0, number),
            Event::Wake(number) => (1, number),
            Event::Begin(number) => (2, number),
            Event::Emit(number) => (3, number),
            Event::Timer(number) => (4, number),
            Event::Pause(number) => (5, number),
            Event::Resume(number) => (6, number),
            Event::Actor(number) => (7, number),
            Event::Fault(number) => (8, number),
        };
        debug_assert!(number <= NUMBER);
        (kind << NUMBER_BITS) | number
    }
    fn unpack(what: u32) -> Event {
        let number = what & NUMBER;
        match what >> NUMBER_BITS {
            0 => Event::Arrive(number),
            1 => Event::Wake(number),
            2 => Event::Begin(number),
            3 => Event::Emit(number),
            4 => Event::Timer(number),
            5 => Event::Pause(number),
            6 => Event::Resume(number),
            7 => Event::Actor(number),
            _ => Event::Fault(number),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Data,
    /// Data that has lost its payload on the way.
    Header,
    /// A packet has come; with `seq` of go-back-N, all before.
    Ack,
    /// A packet has not come.
    Nack,
    /// Marks have been seen.
    Notice,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Packet {
    pub(super) flow: u32,
    pub(super) seq: u32,
    /// The next in its queue.
    next: u32,
    pub(super) bytes: u32,
    hop: u16,
    hops: u16,
    pub(super) kind: Kind,
    pub(super) marked: bool,
    /// Of an ack: the receiver asks for one more packet.
    pub(super) pulls: bool,
    way: [u32; WAY],
}

const _: () = assert!(size_of::<Packet>() == 64 && size_of::<Link>() == 64);

#[derive(Clone, Copy, Debug)]
struct Fifo {
    head: u32,
    tail: u32,
    bytes: u32,
}

const EMPTY: Fifo = Fifo {
    head: NONE,
    tail: NONE,
    bytes: 0,
};

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Link {
    /// Picoseconds a byte, in 2^-16; none where the link is down.
    byte: u64,
    latency: u64,
    free_at: u64,
    data: Fifo,
    control: Fifo,
    /// Bytes that have come over this link and still wait at its end.
    held: u32,
    waking: bool,
    paused: bool,
    pausing: bool,
    /// Hosts put what they send on it first.
    pub(super) injects: bool,
    pub(super) carried: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) events: u64,
    pub(super) packets: u64,
    pub(super) again: u64,
    pub(super) trimmed: u64,
    pub(super) dropped: u64,
    pub(super) marked: u64,
    pub(super) pauses: u64,
    pub(super) queue_max: u32,
}

/// All that is below transports.
#[derive(Debug)]
pub(super) struct Network {
    wheel: Wheel,
    pub(super) now: u64,
    pub(super) links: Vec<Link>,
    packets: Vec<Packet>,
    /// The links of each packet's way, `stride` apart, where ways are longer than packets have room for.
    routes: Vec<u32>,
    stride: usize,
    /// Events until more have to be fetched.
    fetched: u32,
    free: Vec<u32>,
    queue: u32,
    overflow: Overflow,
    header: u32,
    marking: Option<Dcqcn>,
    loss: f64,
    chance: Seeded,
    pub(super) tally: Tally,
    /// What lost packets belonged to, where somebody wants to know.
    pub(super) lost: Vec<u32>,
    tells_losses: bool,
}

/// What a link can send next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Sent,
    /// Nothing waits; the host that injects may.
    Idle,
}

impl Network {
    pub(super) fn new(
        topology: &Topology,
        options: &PacketOptions,
        marking: Option<Dcqcn>,
    ) -> Result<Network, PacketError> {
        let most = u64::from(NUMBER);
        if u64::from(topology.links()) > most {
            return Err(PacketError::TooLarge { most });
        }
        let mut usual = 0;
        let links = (0..topology.links()).map(|link| {
            let wire = topology.wire(LinkId(link));
            let link = Link {
                byte: per_byte(wire.bandwidth.bytes_per_sec() as f64),
                latency: wire.latency.as_ps(),
                free_at: 0,
                data: EMPTY,
                control: EMPTY,
                held: 0,
                waking: false,
                paused: false,
                pausing: false,
                injects: false,
                carried: 0,
            };
            usual = usual.max(link.latency + link.takes(options.payload + options.header));
            link
        });
        let links = links.collect();
        Ok(Network {
            wheel: Wheel::new(usual),
            now: 0,
            links,
            packets: Vec::new(),
            routes: Vec::new(),
            stride: match topology.route_links_max() as usize {
                links if links > WAY => links,
                _ => 0,
            },
            fetched: 0,
            free: Vec::new(),
            queue: options.queue,
            overflow: options.overflow,
            header: options.header,
            marking,
            loss: options.loss,
            chance: Seeded::new(options.seed),
            tally: Tally::default(),
            lost: Vec::new(),
            tells_losses: false,
        })
    }

    /// Whoever looks at `lost` must also empty it.
    pub(super) fn tells_losses(&mut self) {
        self.tells_losses = true;
    }

    pub(super) fn at(&mut self, time: u64, event: Event) {
        self.wheel.push(time.max(self.now), event.pack());
    }

    pub(super) fn next_time(&mut self) -> Option<u64> {
        self.wheel.peek()
    }

    pub(super) fn next(&mut self) -> Option<Event> {
        let (at, what) = self.wheel.pop()?;
        self.now = at;
        self.tally.events += 1;
        match self.fetched {
            0 => self.fetch(),
            _ => self.fetched -= 1,
        }
        Some(Event::unpack(what))
    }

    /// Reads what the next events will need, which changes nothing and has it in the cache by then: loads that do not wait for each other go on
    /// at the same time, those of an event do not.
    fn fetch(&mut self) {
        let mut read = 0;
        for what in self.wheel.upcoming(TOGETHER as usize) {
            read ^= match Event::unpack(what) {
                Event::Arrive(packet) | Event::Emit(packet) => self.packets[packet as usize].next,
                Event::Wake(link) => self.links[link as usize].data.head,
                _ => 0,
            };
        }
        for what in self.wheel.upcoming(TOGETHER as usize) {
            read ^= match Event::unpack(what) {
                Event::Arrive(packet) => self.link_ahead(packet).map_or(0, |link| link.data.tail),
                Event::Wake(link) => {
                    let Link { control, data, .. } = self.links[link as usize];
                    let first = if control.head == NONE { data.head } else { control.head };
                    self.packets.get(first as usize).map_or(0, |packet| packet.next)
                }
                _ => 0,
            };
        }
        for what in self.wheel.upcoming(TOGETHER as usize) {
            if let Event::Arrive(packet) = Event::unpack(what)
                && let Some(link) = self.link_ahead(packet)
            {
                let data = self.packets[packet as usize].kind == Kind::Data;
                let last = if data { link.data.tail } else { link.control.tail };
                read ^= self.packets.get(last as usize).map_or(0, |packet| packet.next);
            }
        }
        std::hint::black_box(read);
        self.fetched = TOGETHER;
    }

    /// The link that a packet goes on to when it has arrived.
    fn link_ahead(&self, id: u32) -> Option<&Link> {
        let packet = &self.packets[id as usize];
        let hop = packet.hop + 1;
        (hop < packet.hops).then(|| &self.links[self.link_of(id, hop) as usize])
    }

    /// The link of a packet's way that is so many hops from its sender.
    fn link_of(&self, id: u32, hop: u16) -> u32 {
        match self.stride {
            0 => self.packets[id as usize].way[hop as usize],
            stride => self.routes[id as usize * stride + hop as usize],
        }
    }

    pub(super) fn packet(&self, id: u32) -> &Packet {
        &self.packets[id as usize]
    }

    /// A new packet with its way.
    pub(super) fn make(&mut self, packet: (u32, u32, u32, Kind), route: &[LinkId]) -> u32 {
        let (flow, seq, bytes, kind) = packet;
        let id = self.free.pop().unwrap_or_else(|| {
            self.packets.push(Packet {
                flow: 0,
                seq: 0,
                next: NONE,
                bytes: 0,
                hop: 0,
                hops: 0,
                kind: Kind::Data,
                marked: false,
                pulls: false,
                way: [0; WAY],
            });
            self.routes.resize(self.packets.len() * self.stride, 0);
            (self.packets.len() - 1) as u32
        });
        assert!(id <= NUMBER, "fewer packets than events can name");
        let packet = &mut self.packets[id as usize];
        *packet = Packet {
            flow,
            seq,
            next: NONE,
            bytes,
            hop: 0,
            hops: route.len() as u16,
            kind,
            marked: false,
            pulls: false,
            way: packet.way,
        };
        let way = match self.stride {
            0 => &mut packet.way[..],
            stride => &mut self.routes[id as usize * stride..],
        };
        for (slot, link) in way.iter_mut().zip(route) {
            *slot = link.0;
        }
        id
    }

    pub(super) fn ask_for_more(&mut self, id: u32) {
        self.packets[id as usize].pulls = true;
    }

    pub(super) fn drop_packet(&mut self, id: u32) {
        self.free.push(id);
    }

    fn lose(&mut self, id: u32) {
        self.tally.dropped += 1;
        if self.tells_losses {
            self.lost.push(self.packets[id as usize].flow);
        }
        self.drop_packet(id);
    }

    /// A packet is at the end of its link; whether that is where it wants to go.
    pub(super) fn arrive(&mut self, id: u32) -> bool {
        let packet = &mut self.packets[id as usize];
        packet.hop += 1;
        if packet.hop == packet.hops {
            return true;
        }
        self.forward(id);
        false
    }

    /// Puts a packet on the next link of its way, or in its queue.
    pub(super) fn forward(&mut self, id: u32) {
        let Packet { hop, kind, bytes, .. } = self.packets[id as usize];
        let link_id = self.link_of(id, hop);
        let now = self.now;
        if kind != Kind::Data {
            let link = &mut self.links[link_id as usize];
            if link.control.head == NONE && link.free_at <= now && !link.waking && link.byte > 0 {
                return self.transmit(link_id, id);
            }
            if link.control.bytes + bytes > CONTROL_QUEUE {
                return self.lose(id);
            }
            append(&mut self.packets, &mut link.control, id);
            return self.wake_at_free(link_id);
        }
        if self.loss > 0.0 && self.chance.chance(self.loss) {
            return self.lose(id);
        }
        let link = &mut self.links[link_id as usize];
        if link.data.head == NONE
            && link.control.head == NONE
            && link.free_at <= now
            && !link.waking
            && !link.paused
            && link.byte > 0
        {
            return self.transmit(link_id, id);
        }
        let waiting = link.data.bytes + bytes;
        // A host holds back what it has, however much that is.
        if waiting > self.queue && hop > 0 {
            return self.overflow(id);
        }
        self.tally.queue_max = self.tally.queue_max.max(waiting);
        append(&mut self.packets, &mut link.data, id);
        if let Some(marking) = &self.marking
            && waiting > marking.mark_from
        {
            let part = f64::from(waiting - marking.mark_from) / f64::from(marking.mark_all - marking.mark_from);
            if part >= 1.0 || self.chance.chance(part * marking.mark_likely) {
                self.packets[id as usize].marked = true;
                self.tally.marked += 1;
            }
        }
        if let Overflow::Pause { above } = self.overflow
            && hop > 0
        {
            let before = self.link_of(id, hop - 1);
            let link = &mut self.links[before as usize];
            link.held += bytes;
            if link.held > above && !link.pausing {
                link.pausing = true;
                self.tally.pauses += 1;
                let at = now + link.latency;
                self.at(at, Event::Pause(before));
            }
        }
        self.wake_at_free(link_id);
    }

    fn overflow(&mut self, id: u32) {
        if self.overflow == Overflow::Trim {
            self.tally.trimmed += 1;
            let packet = &mut self.packets[id as usize];
            packet.kind = Kind::Header;
            packet.bytes = self.header;
            self.forward(id);
        } else {
            self.lose(id);
        }
    }

    /// Lets a link look at its queues as soon as it is free.
    pub(super) fn wake_at_free(&mut self, link_id: u32) {
        let link = &mut self.links[link_id as usize];
        if !link.waking {
            link.waking = true;
            let at = link.free_at;
            self.at(at, Event::Wake(link_id));
        }
    }

    /// Lets a link look again at that time, where it is not going to look before.
    pub(super) fn wake_at(&mut self, link_id: u32, time: u64) {
        let link = &mut self.links[link_id as usize];
        if !link.waking {
            link.waking = true;
            let at = time.max(link.free_at);
            self.at(at, Event::Wake(link_id));
        }
    }

    /// A link sends what waits first.
    pub(super) fn turn(&mut self, link_id: u32) -> Turn {
        let link = &mut self.links[link_id as usize];
        link.waking = false;
        if link.byte == 0 {
            // Down: a fault that ends wakes it.
            return Turn::Sent;
        }
        let id = if link.control.head != NONE {
            take(&mut self.packets, &mut link.control)
        } else if link.data.head != NONE && !link.paused {
            let id = take(&mut self.packets, &mut link.data);
            self.release(id);
            id
        } else {
            return Turn::Idle;
        };
        self.transmit(link_id, id);
        let link = &self.links[link_id as usize];
        if link.control.head != NONE || (link.data.head != NONE && !link.paused) || link.injects {
            self.wake_at_free(link_id);
        }
        Turn::Sent
    }

    /// A packet leaves its queue: the link before it may go on.
    fn release(&mut self, id: u32) {
        let Overflow::Pause { above } = self.overflow else {
            return;
        };
        let Packet { hop, bytes, .. } = self.packets[id as usize];
        if hop == 0 {
            return;
        }
        let before = self.link_of(id, hop - 1);
        let link = &mut self.links[before as usize];
        link.held -= bytes;
        if link.pausing && link.held < above / 2 {
            link.pausing = false;
            let at = self.now + link.latency;
            self.at(at, Event::Resume(before));
        }
    }

    pub(super) fn pause(&mut self, link_id: u32, paused: bool) {
        self.links[link_id as usize].paused = paused;
        if !paused {
            self.wake_at_free(link_id);
        }
    }

    pub(super) fn is_paused(&self, link_id: u32) -> bool {
        self.links[link_id as usize].paused
    }

    /// Puts a packet on a link that is free.
    pub(super) fn transmit(&mut self, link_id: u32, id: u32) {
        let bytes = self.packets[id as usize].bytes;
        let link = &mut self.links[link_id as usize];
        link.free_at = self.now + link.takes(bytes);
        link.carried += u64::from(bytes);
        let at = link.free_at + link.latency;
        self.at(at, Event::Arrive(id));
    }

    pub(super) fn set_bandwidth(&mut self, link_id: u32, bytes_per_sec: f64) {
        self.links[link_id as usize].byte = per_byte(bytes_per_sec);
        self.wake_at_free(link_id);
    }

    /// Bytes of data that wait for a link.
    pub(super) fn queued(&self, link: LinkId) -> u32 {
        self.links[link.0 as usize].data.bytes
    }
}

impl Link {
    pub(super) fn takes(&self, bytes: u32) -> u64 {
        (u64::from(bytes) * self.byte) >> 16
    }
}

fn per_byte(bytes_per_sec: f64) -> u64 {
    match bytes_per_sec > 0.0 {
        true => (1e12 * 65_536.0 / bytes_per_sec).round().max(1.0) as u64,
        false => 0,
    }
}

fn append(packets: &mut [Packet], fifo: &mut Fifo, id: u32) {
    fifo.bytes += packets[id as usize].bytes;
    packets[id as usize].next = NONE;
    match fifo.tail {
        NONE => fifo.head = id,
        tail => packets[tail as usize].next = id,
    }
    fifo.tail = id;
}

fn take(packets: &mut [Packet], fifo: &mut Fifo) -> u32 {
    let id = fifo.head;
    let packet = &packets[id as usize];
    fifo.bytes -= packet.bytes;
    fifo.head = packet.next;
    if fifo.head == NONE {
        fifo.tail = NONE;
    }
    id
}
