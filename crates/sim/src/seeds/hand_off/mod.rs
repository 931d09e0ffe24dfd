//! Hand-offs in a seed's world: an engine that computes prompts, one that goes on with them, and everything that can go wrong between them.
//!
//! Both engines are as real ones are: ranks with a share of the heads each, blocks that are given to the next prompt as soon as they are free, orders
//! that reach a frozen rank late, ranks that close their cache and open another while their sessions go on. The moment blocks are free their bytes become
//! others, so that whoever still reads them reads wrong ones. In some worlds there is somebody who knows the secret and talks nonsense.
//!
//! What is checked, for every seed:
//! - a prompt that was handed off has exactly its bytes, in every layer and head of every rank;
//! - no block is free, or computed anew, while a write from it is under way;
//! - after the end of a hand-off nobody writes to its blocks;
//! - every prompt that was wanted ends once at every rank, handed off or with a reason;
//! - when nothing goes wrong any more, what all readers are done with is free long before its lease ends; nothing is held after its lease; and prompts are
//!   handed off, also those that have waited for longer than a lease.

mod acts;
mod engine;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use thiserror::Error;
use weft_plan::{Place, Time};
use weft_protocol::agent::{Event as AgentEvent, Target};
use weft_protocol::hand_off::{
    CallError, Event, HandOffs, Lease, Over, Prompt as Computed, Reason, Room, Settings, Station, Wanted,
};
use weft_protocol::seeded::Seeded;
use weft_protocol::transfer::PeerId;
use weft_protocol::transport::Progress;
use weft_protocol::{Epoch, Memory, RegionKey, VecMemory};

use super::plan::Plan;
use crate::agent::SimAgent;
use crate::world::{NodeId, World};
use engine::{Engine, Prompt, Shape};

const STEPS_MAX: u64 = 2_000_000;
const ACTIONS: u64 = 120;
/// How long after the last fault what nobody reads any more may be held: sessions are missed, made again, and used.
const RECOVERY: Time = Time::from_secs(8);

/// A promise that was not kept.
#[derive(Debug, Error)]
pub(super) enum Broken {
    #[error("rank {rank}: prompt {prompt} was handed off with wrong bytes in layer {layer}, first at {at}")]
    WrongBytes {
        rank: usize,
        prompt: usize,
        layer: usize,
        at: u64,
    },
    #[error("rank {rank}: prompt {prompt} is {what} while a write from its blocks is under way")]
    UnderWrite {
        rank: usize,
        prompt: usize,
        what: &'static str,
    },
    #[error("rank {rank}: block {block} was written to after its hand-off had ended")]
    WrittenLate { rank: usize, block: u64 },
    #[error("rank {rank}: prompt {prompt} ended twice")]
    EndedTwice { rank: usize, prompt: usize },
    #[error("rank {rank}: {wanted} prompts have neither come nor been given a reason")]
    NeverEnded { rank: usize, wanted: usize },
    #[error("rank {rank}: prompt {prompt} is held although nobody reads it any more")]
    StillHeld { rank: usize, prompt: usize },
    #[error("rank {rank}: {held} prompts are held after their leases")]
    HeldAfterLease { rank: usize, held: usize },
    #[error("rank {rank}: landing places of {bytes} bytes are kept for nothing")]
    StillLanding { rank: usize, bytes: u64 },
    #[error("in calm, prompt {prompt} was not handed off to rank {rank}: {reason}")]
    CalmFailure { rank: usize, prompt: usize, reason: Reason },
    #[error("in calm, prompt {prompt} ended at its holder because {why}")]
    CalmOver { prompt: usize, why: Over },
    #[error("rank {rank}: prompt {prompt} was refused: {error}")]
    Call {
        rank: usize,
        prompt: usize,
        error: CallError,
    },
    #[error("the world of hand-offs never comes to rest")]
    Restless,
}

/// Some worlds of agents are followed by one of hand-offs.
pub(super) fn is_played(seed: u64) -> bool {
    seed % 4 == 2
}

pub(super) struct HandOffPlay {
    plan: Plan,
    shape: Shape,
    world: World,
    chance: Seeded,
    nodes: Vec<Node>,
    holders: Engine,
    readers: Engine,
    prompts: Vec<Prompt>,
    calm: bool,
    actions_left: u64,
    next_epoch: u64,
    steps: u64,
    ends: BTreeMap<String, u64>,
    over: bool,
}

/// A rank of one of the engines, or the one that talks nonsense.
struct Node {
    id: NodeId,
    name: String,
    agent: Option<SimAgent>,
    station: Option<Station>,
    /// One a layer, and what it must hold where nothing is on loan.
    memory: Vec<Arc<VecMemory>>,
    image: Vec<Vec<u8>>,
    frozen_until: Option<Time>,
    /// Published by stations that are closed, with somebody inside.
    releasing: Vec<RegionKey>,
    wake: Option<Time>,
    /// Whom it is connected with.
    peers: Vec<PeerId>,
    /// What its engine wants of it, and it has not heard.
    orders: VecDeque<Order>,
}

/// What an engine tells its ranks.
#[derive(Clone, Debug)]
enum Order {
    Offer(usize, Lease),
    Compute(usize),
    Computed(usize, Option<usize>, u64),
    Preempt(usize),
    Stop(usize),
    Want(usize),
    Fetch(usize),
    Leave(usize),
}

#[derive(Clone, Copy)]
enum Tick {
    Wake,
    Act,
    Thaw,
    Restart,
    Reopen,
    Close,
    /// The next thing of a prompt's life.
    Life,
    Calm,
    Recovered,
    Probe,
    End,
}

const TICKS: [Tick; 11] = [
    Tick::Wake,
    Tick::Act,
    Tick::Thaw,
    Tick::Restart,
    Tick::Reopen,
    Tick::Close,
    Tick::Life,
    Tick::Calm,
    Tick::Recovered,
    Tick::Probe,
    Tick::End,
];

/// Memory to land in.
struct Heap;

impl Room for Heap {
    fn make(&mut self, bytes: u64) -> Option<(Arc<dyn Memory>, Place)> {
        Some((Arc::new(VecMemory::zeroed(bytes as usize)), Place::DRAM))
    }
}

impl HandOffPlay {
    pub(super) fn new(seed: u64, world: World) -> HandOffPlay {
        let plan = Plan::of(seed);
        let shape = Shape::of(seed);
        HandOffPlay {
            holders: Engine::new(&shape, true),
            readers: Engine::new(&shape, false),
            plan,
            shape,
            world,
            chance: Seeded::new(seed ^ 0x6861_6e64),
            nodes: Vec::new(),
            prompts: Vec::new(),
            calm: false,
            actions_left: ACTIONS,
            next_epoch: 1,
            steps: 0,
            ends: BTreeMap::new(),
            over: false,
        }
    }

    pub(super) fn totals(&self) -> (BTreeMap<String, u64>, u64) {
        (self.ends.clone(), self.steps)
    }

    pub(super) fn run(&mut self) -> Result<(), Broken> {
        let ranks = self.shape.holders + self.shape.readers + usize::from(self.shape.gossip);
        for index in 0..ranks {
            let name = format!("rank{index}");
            let host = format!("host{}", index / self.plan.nodes_per_host);
            let id = self.world.add_node(&name, &host);
            self.nodes.push(Node {
                id,
                name,
                agent: None,
                station: None,
                memory: Vec::new(),
                image: Vec::new(),
                frozen_until: None,
                releasing: Vec::new(),
                wake: None,
                peers: Vec::new(),
                orders: VecDeque::new(),
            });
            self.begin_life(index)?;
        }
        self.arrange(Time::from_us(200), Tick::Act, 0);
        while !self.over {
            self.steps += 1;
            if self.steps > STEPS_MAX {
                return Err(Broken::Restless);
            }
            let Some(step) = self.world.step() else {
                return Err(Broken::Restless);
            };
            if let Some(token) = step.tick {
                self.on_tick(TICKS[(token >> 56) as usize], (token & 0x00ff_ffff_ffff_ffff) as usize)?;
            }
            for node in step.ready {
                self.turn(node.0 as usize)?;
            }
        }
        Ok(())
    }

    fn arrange(&self, wait: Time, tick: Tick, about: u64) {
        let at = self.world.now().saturating_add(wait);
        self.world.at(at, (tick as u64) << 56 | about);
    }

    fn on_tick(&mut self, tick: Tick, about: usize) -> Result<(), Broken> {
        match tick {
            Tick::Wake => {
                self.nodes[about].wake = None;
                self.turn(about)
            }
            Tick::Thaw => {
                let now = self.world.now();
                if self.nodes[about].frozen_until.is_some_and(|until| until <= now) {
                    self.nodes[about].frozen_until = None;
                    self.turn(about)?;
                }
                Ok(())
            }
            Tick::Restart => {
                self.world.restart(self.nodes[about].id);
                self.begin_life(about)
            }
            Tick::Reopen => self.reopen(about),
            // In another life there is another station.
            Tick::Close if !self.nodes[about].station.as_ref().is_some_and(Station::is_ending) => Ok(()),
            Tick::Close => self.close(about),
            Tick::Act => self.on_act(),
            Tick::Life => self.on_life(about),
            Tick::Calm => self.on_calm(),
            Tick::Recovered => self.on_recovered(),
            Tick::Probe => self.on_probe(),
            Tick::End => self.on_end(),
        }
    }

    fn begin_life(&mut self, index: usize) -> Result<(), Broken> {
        let epoch = Epoch(self.next_epoch);
        self.next_epoch += 1;
        let node = &self.nodes[index];
        let host = format!("host{}", index / self.plan.nodes_per_host);
        let birth = self.plan.birth(index, node.id, &node.name, &host, epoch);
        let agent = SimAgent::start(&self.world, &birth);
        let node = &mut self.nodes[index];
        (node.agent, node.wake) = (Some(agent), None);
        node.releasing.clear();
        self.open(index)
    }

    /// Opens a cache of a rank, in memory of its own.
    fn open(&mut self, index: usize) -> Result<(), Broken> {
        let stamp = self.stamp();
        let node = &mut self.nodes[index];
        let Some(agent) = &mut node.agent else {
            return Ok(());
        };
        let engine = if index < self.shape.holders {
            &self.holders
        } else {
            &self.readers
        };
        let rank = index.checked_sub(self.shape.holders).unwrap_or(index) % engine.ranks;
        let cache = engine.cache(rank);
        let (mut memory, mut image, mut regions) = (Vec::new(), Vec::new(), Vec::new());
        for layer in cache.layers() {
            let mut bytes = vec![0; layer.pages.end() as usize];
            self.chance.fill(&mut bytes);
            let held = Arc::new(VecMemory::new(bytes.clone()));
            let region = agent.core.register(held.clone(), Place::DRAM);
            regions.push(region.expect("the simulated fabrics take any memory"));
            memory.push(held);
            image.push(bytes);
        }
        let settings = Settings {
            deadline: self.shape.deadline,
            lease: self.shape.lease,
            landing_bytes: self.shape.landing_bytes,
            checksum: true,
        };
        let machine = HandOffs::new(cache, settings, stamp);
        let now = agent.now();
        let names = |peer: &PeerId| Some((*peer, agent.core.identity(*peer)?.name.clone()));
        let peers: Vec<_> = node.peers.iter().filter_map(names).collect();
        let station = Station::open(&mut agent.core, machine, regions, Box::new(Heap), peers, now);
        node.station = Some(station.expect("the regions are those of the cache"));
        (node.memory, node.image) = (memory, image);
        self.turn(index)
    }

    /// A rank hands off no more, and its engine gives up what it had to do with; a moment later it opens another cache. Its sessions go on. It has its cache back when nothing
    /// moves any more, as whoever closes a hand-off waits for.
    fn close(&mut self, index: usize) -> Result<(), Broken> {
        let node = &mut self.nodes[index];
        let frozen = node.frozen_until.is_some();
        let (Some(agent), Some(station)) = (&mut node.agent, &mut node.station) else {
            return Ok(());
        };
        if frozen {
            if station.is_ending() {
                self.arrange(Time::from_ms(5), Tick::Close, index as u64);
            }
            return Ok(());
        }
        let now = agent.now();
        if !station.end_moves(&mut agent.core, now) {
            self.arrange(Time::from_us(100), Tick::Close, index as u64);
            return self.turn(index);
        }
        let Some(mut station) = node.station.take() else {
            return Ok(());
        };
        node.releasing.extend(station.close(&mut agent.core, now));
        node.orders.clear();
        let wait = Time::from_us(1 + self.chance.below(20_000));
        self.arrange(wait, Tick::Reopen, index as u64);
        self.turn(index)?;
        self.on_death(index)
    }

    fn reopen(&mut self, index: usize) -> Result<(), Broken> {
        let node = &self.nodes[index];
        if node.agent.is_none() || node.station.is_some() {
            return Ok(());
        }
        if node.frozen_until.is_some() {
            self.arrange(Time::from_ms(5), Tick::Reopen, index as u64);
            return Ok(());
        }
        self.open(index)
    }

    /// What both engines read off the wall.
    fn stamp(&self) -> u64 {
        self.world.now().as_ns()
    }

    /// Turns a rank, unless it is frozen or dead: it hears its engine, its agent and its station.
    fn turn(&mut self, index: usize) -> Result<(), Broken> {
        if self.nodes[index].frozen_until.is_some() || self.nodes[index].agent.is_none() {
            return Ok(());
        }
        while let Some(order) = self.nodes[index].orders.pop_front() {
            self.obey(index, order)?;
        }
        let mut told = Vec::new();
        let node = &mut self.nodes[index];
        let Some(agent) = &mut node.agent else {
            return Ok(());
        };
        loop {
            let mut events: Vec<AgentEvent> = Vec::new();
            agent.turn(&mut events);
            let now = agent.now();
            for event in &events {
                match event {
                    AgentEvent::Connected { peer, .. } => node.peers.push(*peer),
                    AgentEvent::PeerLost { peer, .. } => node.peers.retain(|known| known != peer),
                    _ => {}
                }
                if let Some(station) = &mut node.station {
                    station.on_event(&mut agent.core, event, now);
                }
            }
            let mut any = !events.is_empty();
            if let Some(station) = &mut node.station {
                any |= station.turn(&mut agent.core, now);
                told.extend(std::iter::from_fn(|| station.machine.next_event()));
            }
            if !any {
                break;
            }
        }
        let now = agent.now();
        let core = &mut agent.core;
        node.releasing
            .retain(|key| core.release(key, now) == Ok(Progress::Busy));
        let again = (!node.releasing.is_empty()).then(|| now.saturating_add(Time::from_ms(1)));
        let due = node.station.as_ref().and_then(Station::next_timeout);
        let due = due.into_iter().chain(again).min();
        let due = due.map(|at| agent.on_world_clock(at.max(now)));
        let next = due.into_iter().chain(agent.next_timeout()).min();
        for event in told {
            self.on_event(index, event)?;
        }
        if let Some(next) = next.map(|next| next.max(self.world.now().saturating_add(Time::from_ns(1))))
            && self.nodes[index].wake.is_none_or(|at| next < at)
        {
            self.nodes[index].wake = Some(next);
            self.world.at(next, (Tick::Wake as u64) << 56 | index as u64);
        }
        Ok(())
    }

    fn obey(&mut self, index: usize, order: Order) -> Result<(), Broken> {
        self.world
            .note(&[40, index as u64], || format!("rank {index}: {order:?}"));
        if let Order::Computed(prompt, layer, upto) = order {
            let layers = layer.map_or(0..self.shape.layers, |layer| layer..layer + 1);
            for layer in layers {
                self.fill(index, prompt, layer, upto);
            }
        }
        let addresses = self.addresses();
        let node = &mut self.nodes[index];
        let (Some(agent), Some(station)) = (&node.agent, &mut node.station) else {
            return Ok(());
        };
        let (now, machine) = (agent.now(), &mut station.machine);
        let number = match order {
            Order::Offer(prompt, _)
            | Order::Compute(prompt)
            | Order::Computed(prompt, ..)
            | Order::Preempt(prompt)
            | Order::Stop(prompt)
            | Order::Want(prompt)
            | Order::Fetch(prompt)
            | Order::Leave(prompt) => prompt,
        };
        let prompt = &self.prompts[number];
        let name = prompt.name();
        let said = match order {
            Order::Offer(_, lease) => machine.offer(&name, Some(lease), lease.lasts, now).map(|_| ()),
            Order::Compute(_) => {
                let (blocks, tokens, digest) = (prompt.there.clone(), prompt.tokens, prompt.digest());
                machine.compute(&name, Computed { blocks, tokens, digest }, now)
            }
            Order::Computed(_, layer, upto) => {
                machine.computed(&name, layer, upto, now);
                Ok(())
            }
            Order::Preempt(_) => {
                machine.preempt(&name);
                Ok(())
            }
            Order::Stop(_) => machine.stop(&name, now),
            Order::Want(_) if prompt.pushed => machine.want_pushed(&name, addresses, self.shape.readers as u32, now),
            Order::Want(_) => {
                let origin = prompt.origin(addresses).expect("it was offered before it is wanted");
                machine.want(origin, self.shape.readers as u32, now)
            }
            Order::Fetch(_) => {
                let wanted = Wanted {
                    blocks: prompt.here.clone(),
                    tokens: prompt.first..prompt.tokens,
                    prompt_tokens: prompt.tokens,
                    digest: prompt.digest(),
                };
                machine.fetch(&name, wanted, now)
            }
            Order::Leave(_) => {
                machine.leave(&name, now);
                Ok(())
            }
        };
        let (rank, prompt) = (index, number);
        match said {
            // A rank that was away may hear of what is over.
            Err(CallError::Used | CallError::Unknown | CallError::Repeated) | Ok(()) => Ok(()),
            Err(error) => Err(Broken::Call { rank, prompt, error }),
        }
    }

    fn order(&mut self, ranks: std::ops::Range<usize>, order: &Order) -> Result<(), Broken> {
        for index in ranks {
            // Nobody tells the dead anything.
            if self.nodes[index].station.is_none() {
                continue;
            }
            self.nodes[index].orders.push_back(order.clone());
            self.turn(index)?;
        }
        Ok(())
    }

    /// Where the ranks of the engine that computes are.
    fn addresses(&self) -> Vec<String> {
        let ranks = self.nodes[..self.shape.holders].iter();
        ranks.map(|node| self.shape.address(&node.name)).collect()
    }

    fn on_event(&mut self, rank: usize, event: Event) -> Result<(), Broken> {
        self.world
            .note(&[41, rank as u64], || format!("rank {rank}: {event:?}"));
        match event {
            Event::Free { hand_off, why } => self.on_free(rank, number(&hand_off), why),
            Event::Fenced { hand_off } => self.on_fenced(rank, number(&hand_off)),
            Event::Ended { hand_off, outcome } => {
                let words = outcome
                    .as_ref()
                    .map_or_else(ToString::to_string, |_| "handed off".to_owned());
                *self.ends.entry(words).or_default() += 1;
                self.on_ended(rank, number(&hand_off), outcome)
            }
            Event::Settle {
                landing,
                layers,
                copies,
                ..
            } => self.settle(rank, landing, &layers, &copies),
            _ => Ok(()),
        }
    }

    fn kill(&mut self, index: usize) -> Result<(), Broken> {
        let told = self.chance.chance(0.5);
        self.world.crash(self.nodes[index].id, told);
        let node = &mut self.nodes[index];
        (node.agent, node.station, node.frozen_until) = (None, None, None);
        node.orders.clear();
        node.peers.clear();
        let wait = Time::from_us(self.chance.below(400_000));
        self.arrange(wait, Tick::Restart, index as u64);
        self.on_death(index)
    }

    fn on_calm(&mut self) -> Result<(), Broken> {
        self.world.calm();
        self.calm = true;
        self.arrange(RECOVERY, Tick::Recovered, 0);
        Ok(())
    }

    /// What nobody reads any more must be free by now, however long its lease is.
    fn on_recovered(&mut self) -> Result<(), Broken> {
        for prompt in 0..self.prompts.len() {
            if !self.prompts[prompt].is_done_with() {
                continue;
            }
            for rank in 0..self.shape.holders {
                if self.prompts[prompt].freed[rank].is_none() {
                    return Err(Broken::StillHeld { rank, prompt });
                }
            }
        }
        self.probe_long_wait()?;
        let wait = self.shape.lease.saturating_mul(3);
        self.arrange(wait, Tick::Probe, 0);
        Ok(())
    }

    fn on_probe(&mut self) -> Result<(), Broken> {
        self.probe_rest()?;
        let wait = self
            .shape
            .deadline
            .saturating_mul(2)
            .saturating_add(self.shape.lease.saturating_mul(2));
        self.arrange(wait, Tick::End, 0);
        Ok(())
    }

    fn on_end(&mut self) -> Result<(), Broken> {
        for rank in 0..self.shape.holders + self.shape.readers {
            let Some(station) = &self.nodes[rank].station else {
                continue;
            };
            let (held, wanted, bytes) = (
                station.machine.held(),
                station.machine.wanted(),
                station.machine.landing_bytes(),
            );
            if wanted > 0 {
                return Err(Broken::NeverEnded { rank, wanted });
            }
            if held > 0 {
                return Err(Broken::HeldAfterLease { rank, held });
            }
            if bytes > 0 {
                return Err(Broken::StillLanding { rank, bytes });
            }
            if rank >= self.shape.holders {
                self.check_images(rank, self.readers.free.clone())?;
            }
        }
        for prompt in 0..self.prompts.len() {
            let state = &self.prompts[prompt];
            if state.in_calm && state.ended.iter().any(Option::is_none) {
                let rank = self.shape.holders;
                return Err(Broken::NeverEnded { rank, wanted: 1 });
            }
            if let Some(why) = state
                .freed
                .iter()
                .flatten()
                .find(|why| state.in_calm && **why != Over::Served)
            {
                return Err(Broken::CalmOver { prompt, why: *why });
            }
        }
        self.over = true;
        Ok(())
    }

    fn connect(&mut self, from: usize, to: usize) {
        let address = match &self.nodes[to].agent {
            Some(agent) => agent.core.addresses()[0].clone(),
            None => return,
        };
        if let Some(agent) = &mut self.nodes[from].agent {
            let now = agent.now();
            // Few peers and a known transport; whatever comes of it is heard of.
            let _ = agent
                .core
                .connect(Target::at(address, now.saturating_add(Time::from_secs(1))), now);
        }
    }
}

/// The number of a prompt by the name of its hand-off; nonsense has none.
fn number(hand_off: &str) -> Option<usize> {
    hand_off.strip_prefix('p')?.parse().ok()
}
