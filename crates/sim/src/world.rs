//! The world: one clock, one queue, one seed, and the nodes that live in it.
//!
//! ```
//! use weft_plan::Time;
//! use weft_sim::{Faults, World};
//! let world = World::new(7, Faults::NONE);
//! world.at(Time::from_us(3), 42);
//! assert_eq!(world.step().unwrap().tick, Some(42));
//! assert_eq!(world.now(), Time::from_us(3));
//! ```

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::{Arc, Mutex, MutexGuard};

use weft_model::fabric::Topology;
use weft_plan::{Picos, Time};
use weft_protocol::seeded::Seeded;

use crate::faults::{Faults, Tally};
use crate::packet::datagrams::{Datagrams, Fate};
use crate::packet::{PacketError, PacketOptions};
use crate::trace::Trace;
use crate::wire::{Cargo, End, Packet, Side, Wire};

/// A machine. It has one name in the network whatever runs on it, and may be down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// A simulated world. Clones are the same world.
#[derive(Clone, Debug)]
pub struct World(Arc<Mutex<State>>);

/// What a step of the world touched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The token of an appointment that has come.
    pub tick: Option<u64>,
    /// Nodes whose transports have something to say.
    pub ready: Vec<NodeId>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) now: Time,
    queue: BinaryHeap<Reverse<Scheduled>>,
    next_seq: u64,
    pub(crate) chance: Seeded,
    pub(crate) faults: Faults,
    pub(crate) nodes: Vec<Node>,
    pub(crate) ends: Vec<End>,
    pub(crate) wires: BTreeMap<u32, Wire>,
    pub(crate) next_wire: u32,
    /// Directions between nodes that let nothing through, until when.
    cuts: BTreeMap<(NodeId, NodeId), Time>,
    /// Cables that are out, by node and rail, until when.
    pulled: BTreeMap<(NodeId, u32), Time>,
    pub(crate) ready: BTreeSet<NodeId>,
    pub(crate) tally: Tally,
    pub(crate) trace: Trace,
    /// What takes packets between hosts, where that is more than a latency and a bandwidth.
    pub(crate) carrier: Option<Datagrams<Cargo>>,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// Equal at nodes that share memory.
    pub(crate) host: String,
    pub(crate) up: bool,
}

/// Something that will happen.
#[derive(Debug)]
pub(crate) enum Happening {
    /// One attempt to get a packet across, from this side.
    Attempt {
        wire: u32,
        from: Side,
        packet: Packet,
        attempt: u32,
    },
    Delivery {
        wire: u32,
        to: Side,
        packet: Packet,
    },
    /// The next piece of an operation that its initiator executes itself.
    Copy {
        wire: u32,
        from: Side,
        op: u64,
    },
    /// An atomic operation that its initiator executes itself.
    Atomic {
        wire: u32,
        from: Side,
        op: u64,
    },
    Tick(u64),
}

#[derive(Debug)]
struct Scheduled {
    at: Time,
    /// Ties are settled by the order of scheduling, so that equal times make no difference between runs.
    seq: u64,
    what: Happening,
}

impl World {
    pub fn new(seed: u64, faults: Faults) -> World {
        World::make(seed, faults, false)
    }

    /// A world that keeps lines about what happens.
    pub fn verbose(seed: u64, faults: Faults) -> World {
        World::make(seed, faults, true)
    }

    fn make(seed: u64, faults: Faults, verbose: bool) -> World {
        World(Arc::new(Mutex::new(State {
            now: Time::ZERO,
            queue: BinaryHeap::new(),
            next_seq: 0,
            chance: Seeded::new(seed),
            faults,
            nodes: Vec::new(),
            ends: Vec::new(),
            wires: BTreeMap::new(),
            next_wire: 0,
            cuts: BTreeMap::new(),
            pulled: BTreeMap::new(),
            ready: BTreeSet::new(),
            tally: Tally::default(),
            trace: Trace::new(verbose),
            carrier: None,
        })))
    }

    /// A world whose nodes are the ranks of a topology, in the order in which they are added, and whose packets queue at its links. What the packets'
    /// own transport would be is left out: agents bring theirs. Nodes beyond the ranks are on plain links.
    pub fn on_network(
        seed: u64,
        faults: Faults,
        topology: Topology,
        options: &PacketOptions,
    ) -> Result<World, PacketError> {
        let world = World::new(seed, faults);
        world.lock().carrier = Some(Datagrams::new(topology, options)?);
        Ok(world)
    }

    pub fn now(&self) -> Time {
        self.lock().now
    }

    /// Adds a machine. Nodes of one host share memory.
    pub fn add_node(&self, name: &str, host: &str) -> NodeId {
        let mut state = self.lock();
        let id = NodeId(state.nodes.len() as u32);
        state.nodes.push(Node {
            name: name.to_owned(),
            host: host.to_owned(),
            up: true,
        });
        id
    }

    /// Asks for a step with this token at that time.
    pub fn at(&self, time: Time, token: u64) {
        let mut state = self.lock();
        let at = time.max(state.now);
        state.schedule(at, Happening::Tick(token));
    }

    /// Lets the next thing happen. `None`: nothing will ever happen again by itself.
    pub fn step(&self) -> Option<Step> {
        let mut state = self.lock();
        let tick = state.step()?;
        Some(Step {
            tick,
            ready: state.take_ready(),
        })
    }

    /// Lets everything happen that happens until then, appointments dropped, and moves the clock there.
    pub fn run_until(&self, time: Time) {
        let mut state = self.lock();
        while state.next_time().is_some_and(|next| next <= time) {
            state.step();
        }
        state.now = state.now.max(time);
    }

    /// Lets nothing through from one node to another for a while. Both directions need two calls.
    pub fn cut(&self, from: NodeId, to: NodeId, duration: Time) {
        let mut state = self.lock();
        let until = state.now.saturating_add(duration);
        let entry = state.cuts.entry((from, to)).or_insert(until);
        *entry = (*entry).max(until);
        state.tally.partitions += 1;
        state.note(&[1, u64::from(from.0), u64::from(to.0)], || {
            format!("nothing passes from node {} to node {} for {duration:?}", from.0, to.0)
        });
    }

    /// Pulls the cable of a node's rail for a while: nothing passes on that rail, to the node or from it.
    pub fn pull(&self, node: NodeId, rail: u32, duration: Time) {
        let mut state = self.lock();
        let until = state.now.saturating_add(duration);
        let entry = state.pulled.entry((node, rail)).or_insert(until);
        *entry = (*entry).max(until);
        state.tally.pulled_cables += 1;
        state.note(&[5, u64::from(node.0), u64::from(rail)], || {
            format!("the cable of rail {rail} at node {} is out for {duration:?}", node.0)
        });
    }

    /// Ends the life of everything on a node. `told`: its kernel survives and resets the connections; otherwise there is silence.
    pub fn crash(&self, node: NodeId, told: bool) {
        let mut state = self.lock();
        state.tally.crashes += 1;
        state.note(&[2, u64::from(node.0), u64::from(told)], || {
            format!(
                "node {} crashes, {}",
                node.0,
                if told { "and its peers are told" } else { "silently" }
            )
        });
        state.crash(node, told);
    }

    /// Lets a node that crashed silently answer again; whoever lives on it has to be started anew.
    pub fn restart(&self, node: NodeId) {
        let mut state = self.lock();
        state.tally.restarts += 1;
        state.nodes[node.0 as usize].up = true;
        state.note(&[3, u64::from(node.0)], || format!("node {} is up again", node.0));
    }

    /// Cuts one open path between two nodes as a reset connection would; tells whether there was one.
    pub fn reset_path(&self, pick: u64) -> bool {
        self.lock().reset_path(pick)
    }

    /// Counts a fault that the driver of the world has injected itself.
    pub fn count(&self, act: impl FnOnce(&mut Tally)) {
        act(&mut self.lock().tally);
    }

    /// Folds what the driver has seen into the trace.
    pub fn note(&self, numbers: &[u64], line: impl FnOnce() -> String) {
        self.lock().note(numbers, line);
    }

    /// From now on nothing goes wrong any more.
    pub fn calm(&self) {
        let mut state = self.lock();
        state.faults = Faults::NONE;
        state.cuts.clear();
        state.pulled.clear();
    }

    pub fn tally(&self) -> Tally {
        self.lock().tally
    }
    pub fn trace_hash(&self) -> u64 {
        self.lock().trace.hash()
    }
    /// The lines that a verbose world has kept.
    pub fn trace_text(&self) -> String {
        self.lock().trace.to_string()
    }
    /// What is queued and held for nodes: none of it may grow without bound.
    pub fn load(&self) -> Load {
        let state = self.lock();
        Load {
            queued: state.queue.len(),
            wires: state.wires.len(),
            signals: state.ends.iter().map(|e| e.inbox.len()).max().unwrap_or(0),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere is a failed check, and its report still wants to read the trace.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// How much a world holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub queued: usize,
    pub wires: usize,
    /// Signals that wait at one transport end.
    pub signals: usize,
}

impl State {
    pub(crate) fn schedule(&mut self, at: Time, what: Happening) {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.queue.push(Reverse(Scheduled { at, seq, what }));
    }

    fn next_time(&mut self) -> Option<Time> {
        let queued = self.queue.peek().map(|Reverse(next)| next.at);
        let carried = self
            .carrier
            .as_mut()
            .and_then(|carrier| carrier.next_time())
            .map(|ps| Picos::from_ps(ps).into());
        queued.into_iter().chain(carried).min()
    }

    /// Lets the network that carries packets do the next thing, where that comes first.
    fn step_carrier(&mut self) -> bool {
        let Some(carrier) = &mut self.carrier else {
            return false;
        };
        let Some(at) = carrier.next_time().map(|ps| Time::from(Picos::from_ps(ps))) else {
            return false;
        };
        if self.queue.peek().is_some_and(|Reverse(next)| next.at < at) {
            return false;
        }
        self.now = self.now.max(at);
        match carrier.step() {
            Fate::Arrived(cargo) => {
                self.trace.fold(&[at.as_ns(), u64::from(cargo.wire)]);
                self.deliver(cargo.wire, cargo.from.other(), cargo.packet);
            }
            Fate::Lost(cargo) => {
                self.tally.losses += 1;
                self.try_again(cargo.wire, cargo.from, cargo.packet, cargo.attempt);
            }
            Fate::Nothing => {}
        }
        true
    }

    fn step(&mut self) -> Option<Option<u64>> {
        if self.step_carrier() {
            return Some(None);
        }
        let Reverse(Scheduled { at, seq, what }) = self.queue.pop()?;
        self.now = self.now.max(at);
        self.trace.fold(&[at.as_ns(), seq]);
        match what {
            Happening::Tick(token) => return Some(Some(token)),
            Happening::Attempt {
                wire,
                from,
                packet,
                attempt,
            } => self.attempt(wire, from, packet, attempt),
            Happening::Delivery { wire, to, packet } => self.deliver(wire, to, packet),
            Happening::Copy { wire, from, op } => self.copy(wire, from, op),
            Happening::Atomic { wire, from, op } => self.atomic_here(wire, from, op),
        }
        Some(None)
    }

    fn take_ready(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.ready).into_iter().collect()
    }

    /// Whether what is sent now from one node to another passes.
    pub(crate) fn passes(&mut self, from: NodeId, to: NodeId, rail: u32) -> bool {
        if !self.nodes[to.0 as usize].up || !self.nodes[from.0 as usize].up {
            return false;
        }
        let out = |node| self.pulled.get(&(node, rail)).is_some_and(|until| *until > self.now);
        if out(from) || out(to) {
            return false;
        }
        match self.cuts.get(&(from, to)) {
            Some(&until) if until > self.now => false,
            Some(_) => {
                self.cuts.remove(&(from, to));
                true
            }
            None => true,
        }
    }

    pub(crate) fn note(&mut self, numbers: &[u64], line: impl FnOnce() -> String) {
        self.trace.fold(numbers);
        let now = self.now;
        self.trace.line(now, line);
    }
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Scheduled) -> bool {
        self.seq == other.seq
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Scheduled) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Scheduled) -> std::cmp::Ordering {
        (self.at, self.seq).cmp(&(other.at, other.seq))
    }
}
