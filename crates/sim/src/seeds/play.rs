//! The turning of a seed's world: who is turned when, who dies, who comes back, and the end of the run.

use std::collections::BTreeMap;

use weft_plan::{Place, Spans, Time};
use weft_protocol::agent::{AtomicId, Event, Target, UnderWay};
use weft_protocol::seeded::Seeded;
use weft_protocol::session::LeaseId;
use weft_protocol::transfer::{PeerId, TransferId};
use weft_protocol::{Access, Epoch, Progress, Region, RegionKey, RemoteRegion};

use super::counters::{Counter, Increment};
use super::ledger::Watched;
use super::plan::Plan;
use super::stranger::{Stranger, noticed_within};
use super::verdicts::Violation;
use crate::agent::{Birth, SimAgent};
use crate::world::{NodeId, World};

/// Steps after which a world must have come to rest: many times what any has taken. One that goes in circles fails soon.
const STEPS_MAX: u64 = 1_000_000;
/// What agents know and strangers do not.
/// Local buffers of an agent: as many transfers as it may have under way.
const BUFFERS: usize = 12;
/// How long after its deadline a transfer is looked for.
pub(super) const SLACK: Time = Time::from_ms(1);
/// How long a region may take to become free.
const RELEASE_SECS_MAX: u64 = 30;
/// Old keys that are tried now and then.
const STALE_MAX: usize = 64;

pub(super) struct Play {
    pub(super) plan: Plan,
    pub(super) world: World,
    pub(super) chance: Seeded,
    pub(super) nodes: Vec<Node>,
    pub(super) regions: Vec<Shared>,
    pub(super) works: BTreeMap<u64, Work>,
    pub(super) open: BTreeMap<(usize, TransferId), u64>,
    pub(super) notes: BTreeMap<u64, Note>,
    pub(super) leases: BTreeMap<(usize, PeerId, LeaseId), Lease>,
    /// Regions that are gone, by the node that had them.
    pub(super) stale: Vec<(usize, RemoteRegion)>,
    pub(super) counters: Vec<Counter>,
    pub(super) increments: BTreeMap<u64, Increment>,
    /// Those that have not ended.
    pub(super) counting: BTreeMap<(usize, AtomicId), u64>,
    pub(super) next_increment: u64,
    pub(super) next_work: u64,
    pub(super) next_note: u64,
    pub(super) ends: BTreeMap<String, u64>,
    pub(super) notifications: u64,
    pub(super) calm: bool,
    /// The stranger's agent, which nobody may talk to.
    pub(super) stranger: Option<Stranger>,
    /// Everyone has been told to connect again, and nothing stands in the way.
    pub(super) reconnected: bool,
    next_epoch: u64,
    /// When the last of those that have died is back.
    back_by: Time,
    actions_left: u64,
    steps: u64,
    over: bool,
}

pub(super) struct Node {
    pub(super) id: NodeId,
    name: String,
    host: String,
    pub(super) agent: Option<SimAgent>,
    pub(super) frozen_until: Option<Time>,
    /// The earliest turn that is arranged.
    wake: Option<Time>,
    pub(super) buffers: Vec<Buffer>,
    pub(super) links: BTreeMap<PeerId, Link>,
    /// What it lets others read, and what it lets others write.
    pub(super) source: usize,
    pub(super) sink: usize,
    /// That of its present life, and that of the one before.
    pub(super) epoch: Epoch,
    last_epoch: Option<Epoch>,
    /// Memory of earlier lives, which nobody may write any more.
    graves: Vec<Watched>,
}

pub(super) struct Buffer {
    pub(super) region: Region,
    pub(super) watched: Watched,
}

/// A session, or the attempt at one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) to: usize,
    pub(super) up: bool,
    /// It was asked for with a life of the peer in mind that is over, so it must not come about.
    pub(super) stale: bool,
}

/// Memory that peers may reach.
pub(super) struct Shared {
    pub(super) node: usize,
    pub(super) name: &'static str,
    access: Access,
    pub(super) watched: Watched,
    registered: Region,
    /// The key it is published under; none while it is withdrawn.
    pub(super) key: Option<RegionKey>,
    leaving: Option<(RegionKey, Time)>,
    /// Counts how often all that was known of its contents has ended.
    pub(super) generation: u64,
    pub(super) dead: bool,
}

impl Shared {
    /// What a peer is told of it, while it is published.
    pub(super) fn remote(&self, len: u64) -> Option<RemoteRegion> {
        Some(RemoteRegion {
            key: self.key?,
            len,
            place: Place::DRAM,
            access: self.access,
            grants: [].into(),
        })
    }
}

/// A transfer as the ledger sees it.
pub(super) struct Work {
    pub(super) node: usize,
    pub(super) id: TransferId,
    pub(super) kind: Kind,
    pub(super) buffer: usize,
    pub(super) local_spans: Spans,
    pub(super) expected: Vec<u8>,
    /// On the world's clock.
    pub(super) deadline: Time,
    pub(super) note: Option<u64>,
    pub(super) in_calm: bool,
    pub(super) ended: Option<bool>,
    /// The target has been told, and has used the memory for something else since.
    pub(super) consumed: bool,
}

pub(super) enum Kind {
    Read,
    Write {
        region: usize,
        generation: u64,
        cell: usize,
        spans: Spans,
    },
    /// Must not succeed.
    Forbidden(&'static str),
}

/// A notification that was sent, or will be.
pub(super) struct Note {
    pub(super) from: usize,
    pub(super) peer: PeerId,
    pub(super) work: Option<u64>,
    /// It has surely been sent, so it must come as long as the session lives.
    pub(super) due: bool,
    pub(super) received: bool,
}

pub(super) struct Lease {
    pub(super) region: usize,
    /// On the world's clock; none until it is granted.
    pub(super) until: Option<Time>,
}

#[derive(Clone, Copy)]
pub(super) enum Tick {
    Wake,
    Act,
    Thaw,
    Restart,
    Overdue,
    Counted,
    Reclaim,
    Release,
    Snip,
    Pull,
    Calm,
    Reconnect,
    Probe,
    End,
    Noticed,
    Stranger,
}

const TICKS: [Tick; 16] = [
    Tick::Wake,
    Tick::Act,
    Tick::Thaw,
    Tick::Restart,
    Tick::Overdue,
    Tick::Counted,
    Tick::Reclaim,
    Tick::Release,
    Tick::Snip,
    Tick::Pull,
    Tick::Calm,
    Tick::Reconnect,
    Tick::Probe,
    Tick::End,
    Tick::Noticed,
    Tick::Stranger,
];

impl Play {
    pub(super) fn new(seed: u64, plan: Plan, world: World) -> Play {
        let actions_left = plan.actions;
        Play {
            plan,
            world,
            chance: Seeded::new(seed ^ 0x776f_726b),
            nodes: Vec::new(),
            regions: Vec::new(),
            works: BTreeMap::new(),
            open: BTreeMap::new(),
            notes: BTreeMap::new(),
            leases: BTreeMap::new(),
            stale: Vec::new(),
            counters: Vec::new(),
            increments: BTreeMap::new(),
            counting: BTreeMap::new(),
            next_increment: 0,
            next_work: 0,
            next_note: 0,
            ends: BTreeMap::new(),
            notifications: 0,
            calm: false,
            reconnected: false,
            stranger: None,
            next_epoch: 1,
            back_by: Time::ZERO,
            actions_left,
            steps: 0,
            over: false,
        }
    }

    pub(super) fn totals(&self) -> (BTreeMap<String, u64>, u64, u64) {
        (self.ends.clone(), self.notifications, self.steps)
    }

    pub(super) fn run(&mut self) -> Result<(), Violation> {
        for index in 0..self.plan.nodes {
            let (name, host) = (
                format!("node{index}"),
                format!("host{}", index / self.plan.nodes_per_host),
            );
            let id = self.world.add_node(&name, &host);
            self.nodes.push(Node {
                id,
                name,
                host,
                agent: None,
                frozen_until: None,
                wake: None,
                buffers: Vec::new(),
                links: BTreeMap::new(),
                source: 0,
                sink: 0,
                epoch: Epoch(0),
                last_epoch: None,
                graves: Vec::new(),
            });
            self.begin_life(index)?;
        }
        for from in 0..self.nodes.len() {
            for to in 0..from {
                self.connect(from, to, Time::from_secs(1))?;
            }
        }
        self.invite_stranger();
        self.arrange(Time::from_us(200), Tick::Act, 0);
        while !self.over {
            self.steps += 1;
            if self.steps > STEPS_MAX {
                return Err(Violation::Restless);
            }
            let Some(step) = self.world.step() else {
                return Err(Violation::Restless);
            };
            if let Some(token) = step.tick {
                self.on_tick(TICKS[(token >> 56) as usize], token & 0x00ff_ffff_ffff_ffff)?;
            }
            for node in step.ready {
                match self.stranger.as_ref().is_some_and(|stranger| stranger.node == node) {
                    true => self.turn_stranger()?,
                    false => self.turn(node.0 as usize)?,
                }
            }
        }
        Ok(())
    }

    pub(super) fn arrange(&self, at: Time, tick: Tick, about: u64) {
        self.world.at(at, (tick as u64) << 56 | about);
    }

    fn later(&self, wait: Time) -> Time {
        self.world.now().saturating_add(wait)
    }

    fn on_tick(&mut self, tick: Tick, about: u64) -> Result<(), Violation> {
        let index = about as usize;
        match tick {
            Tick::Wake => {
                self.nodes[index].wake = None;
                self.turn(index)
            }
            Tick::Thaw => {
                let now = self.world.now();
                if self.nodes[index].frozen_until.is_some_and(|until| until <= now) {
                    self.nodes[index].frozen_until = None;
                    self.turn(index)?;
                }
                Ok(())
            }
            Tick::Restart => {
                self.world.restart(self.nodes[index].id);
                self.begin_life(index)
            }
            Tick::Act => self.on_act(),
            Tick::Overdue => self.on_overdue(about),
            Tick::Counted => self.on_counted(about),
            Tick::Reclaim => self.reclaim(about),
            Tick::Release => self.on_release(index),
            Tick::Snip => {
                if !self.calm {
                    self.world.reset_path(about);
                }
                Ok(())
            }
            Tick::Pull => {
                if !self.calm {
                    self.pull_cable();
                }
                Ok(())
            }
            Tick::Calm => self.on_calm(),
            Tick::Reconnect => self.on_reconnect(),
            Tick::Probe => self.on_probe(),
            Tick::End => self.on_end(),
            Tick::Noticed => self.on_noticed(about),
            Tick::Stranger => self.turn_stranger(),
        }
    }

    /// Turns an agent, unless it is frozen or dead, and hears what it has to say.
    pub(super) fn turn(&mut self, index: usize) -> Result<(), Violation> {
        if self.nodes[index].frozen_until.is_some() {
            return Ok(());
        }
        let mut events: Vec<Event> = Vec::new();
        let Some(agent) = &mut self.nodes[index].agent else {
            return Ok(());
        };
        agent.turn(&mut events);
        for event in events {
            self.on_event(index, event)?;
        }
        let node = &self.nodes[index];
        let Some(next) = node.agent.as_ref().and_then(SimAgent::next_timeout) else {
            return Ok(());
        };
        let next = next.max(self.world.now().saturating_add(Time::from_ns(1)));
        if node.wake.is_none_or(|at| next < at) {
            self.nodes[index].wake = Some(next);
            self.arrange(next, Tick::Wake, index as u64);
        }
        Ok(())
    }

    pub(super) fn is_active(&self, index: usize) -> bool {
        self.nodes[index].agent.is_some() && self.nodes[index].frozen_until.is_none()
    }

    fn begin_life(&mut self, index: usize) -> Result<(), Violation> {
        let epoch = Epoch(self.next_epoch);
        self.next_epoch += 1;
        let node = &self.nodes[index];
        let mut rails = self.plan.rails.clone();
        // No two hosts need name their cards in one order.
        if index % 2 == 1 {
            rails.reverse();
        }
        let birth = Birth {
            rails,
            device: self.plan.devices,
            ..self.plan.birth(index, node.id, &node.name, &node.host, epoch)
        };
        let mut agent = SimAgent::start(&self.world, &birth);
        let mut buffers = Vec::new();
        for number in 0..BUFFERS {
            let watched = Watched::new(self.plan.region_bytes / self.plan.cells, 1, &mut self.chance);
            let place = match self.plan.devices && number % 3 > 0 {
                true => Place::Gpu { ordinal: 0 },
                false => Place::DRAM,
            };
            let region = agent.core.register(watched.memory.clone(), place);
            let region = region.expect("the simulated fabrics take any memory");
            buffers.push(Buffer { region, watched });
        }
        let mut share = |name, access, cells| {
            let watched = Watched::new(self.plan.region_bytes, cells, &mut self.chance);
            let registered = agent.core.register(watched.memory.clone(), Place::DRAM);
            let registered = registered.expect("the simulated fabrics take any memory");
            self.regions.push(Shared {
                node: index,
                name,
                access,
                watched,
                registered,
                key: None,
                leaving: None,
                generation: 0,
                dead: false,
            });
            self.regions.len() - 1
        };
        let (source, sink) = (
            share("source", Access::READ, 1),
            share("sink", Access::WRITE, self.plan.cells),
        );
        self.open_counter(index, &mut agent);
        let node = &mut self.nodes[index];
        node.agent = Some(agent);
        node.last_epoch = Some(node.epoch).filter(|epoch| *epoch != Epoch(0));
        node.epoch = epoch;
        (node.buffers, node.source, node.sink) = (buffers, source, sink);
        node.wake = None;
        self.publish(source);
        self.publish(sink);
        self.turn(index)
    }

    /// Ends the life of a node's agent: what it was doing ends without a word.
    pub(super) fn end_life(&mut self, index: usize, told: bool) -> Result<(), Violation> {
        self.world.crash(self.nodes[index].id, told);
        self.expect_notice(index);
        let node = &mut self.nodes[index];
        node.agent = None;
        node.frozen_until = None;
        node.links.clear();
        for mut buffer in std::mem::take(&mut node.buffers) {
            buffer.watched.freeze();
            node.graves.push(buffer.watched);
        }
        for region in [node.source, node.sink] {
            self.bury(region);
            self.regions[region].watched.freeze();
            self.regions[region].dead = true;
        }
        self.forget_increments(index)?;
        let of_node = self.open.range((index, TransferId(0))..=(index, TransferId(u64::MAX)));
        let of_node: Vec<_> = of_node.map(|(key, work)| (*key, *work)).collect();
        for (key, work) in of_node {
            self.open.remove(&key);
            // The peer does not know that nobody waits any more; but it knows the deadline.
            let deadline = self.works[&work].deadline;
            self.arrange(deadline, Tick::Reclaim, work);
        }
        self.notes
            .values_mut()
            .filter(|n| n.from == index)
            .for_each(|n| n.due = false);
        let regions = &self.regions;
        self.leases
            .retain(|(borrower, ..), lease| *borrower != index && !regions[lease.region].dead);
        // Mostly it is back before anybody has missed it. Sometimes it is missed for long.
        let wait = match self.chance.below(4) {
            0 => noticed_within(self.plan.silence_max).saturating_add(Time::from_secs(1)),
            _ => Time::from_us(self.chance.below(400_000)),
        };
        self.back_by = self.back_by.max(self.later(wait));
        self.arrange(self.later(wait), Tick::Restart, index as u64);
        Ok(())
    }

    pub(super) fn freeze(&mut self, index: usize, duration: Time) {
        let until = self.later(duration);
        self.nodes[index].frozen_until = Some(until);
        self.world.count(|tally| tally.freezes += 1);
        self.arrange(until, Tick::Thaw, index as u64);
    }

    pub(super) fn publish(&mut self, region: usize) {
        let shared = &mut self.regions[region];
        let Some(agent) = &mut self.nodes[shared.node].agent else {
            return;
        };
        if shared.key.is_none() && shared.leaving.is_none() {
            let now = agent.now();
            let key = agent
                .core
                .publish(shared.name, &shared.registered.key, shared.access, now);
            shared.key = Some(key.expect("the name is free and the memory registered"));
        }
    }

    pub(super) fn withdraw(&mut self, region: usize) -> Result<(), Violation> {
        let shared = &self.regions[region];
        let (index, name) = (shared.node, shared.name);
        let Some(agent) = &mut self.nodes[index].agent else {
            return Ok(());
        };
        if shared.key.is_none() {
            return Ok(());
        }
        let now = agent.now();
        let (key, _) = agent.core.withdraw(name, now).expect("it is published");
        self.bury(region);
        self.regions[region].leaving = Some((key, self.world.now()));
        self.on_release(region)
    }

    /// From now on a region's key opens nothing.
    fn bury(&mut self, region: usize) {
        let shared = &mut self.regions[region];
        let Some(remote) = shared.remote(self.plan.region_bytes as u64) else {
            return;
        };
        shared.key = None;
        if self.stale.len() == STALE_MAX {
            self.stale.remove(0);
        }
        self.stale.push((shared.node, remote));
    }

    /// Sees whether a withdrawn region is free. From then on nobody may touch it, and all of it is watched.
    fn on_release(&mut self, region: usize) -> Result<(), Violation> {
        let shared = &mut self.regions[region];
        let (Some((key, since)), false) = (shared.leaving, shared.dead) else {
            return Ok(());
        };
        let node = shared.node;
        let again = self.world.now().saturating_add(Time::from_ms(1));
        if self.nodes[node].frozen_until.is_some() {
            self.arrange(again, Tick::Release, region as u64);
            return Ok(());
        }
        let Some(agent) = &mut self.nodes[node].agent else {
            return Ok(());
        };
        let now = agent.now();
        // A key that is no longer known has become free when it was withdrawn.
        if agent.core.release(&key, now) == Ok(Progress::Busy) {
            if self.world.now().saturating_sub(since) > Time::from_secs(RELEASE_SECS_MAX) {
                let seconds = RELEASE_SECS_MAX;
                return Err(Violation::NeverFree { node, seconds });
            }
            self.arrange(again, Tick::Release, region as u64);
            return Ok(());
        }
        let world_now = self.world.now();
        let in_use = |lease: &Lease| lease.region == region && lease.until.is_some_and(|until| until > world_now);
        if self.leases.values().any(in_use) {
            return Err(Violation::FreeUnderLease { node });
        }
        shared.leaving = None;
        shared.generation += 1;
        shared.watched.seal_all(&mut self.chance);
        if self.calm {
            self.publish(region);
        }
        self.turn(node)
    }

    fn on_act(&mut self) -> Result<(), Violation> {
        if self.actions_left == 0 {
            self.arrange(self.world.now(), Tick::Calm, 0);
            return Ok(());
        }
        self.actions_left -= 1;
        self.check_load()?;
        self.act()?;
        // In bursts, so that transfers meet each other, and pauses, so that silence is noticed.
        let pace = match self.chance.below(3) {
            _ if self.plan.quiet => self.plan.silence_max,
            0 => self.plan.pace_max,
            _ => Time::from_us(20),
        };
        let pace = Time::from_ns(self.chance.below(pace.as_ns()));
        self.arrange(self.later(pace), Tick::Act, 0);
        Ok(())
    }

    fn check_load(&self) -> Result<(), Violation> {
        let load = self.world.load();
        if load.queued > 200_000 || load.wires > 2_000 || load.signals > 50_000 {
            return Err(Violation::Unbounded {
                queued: load.queued,
                wires: load.wires,
                signals: load.signals,
            });
        }
        Ok(())
    }

    /// Arranges to look for a transfer after its deadline, and perhaps to cut its path or to pull a cable before.
    pub(super) fn watch(&mut self, work: u64, deadline: Time) {
        self.arrange(deadline.saturating_add(SLACK), Tick::Overdue, work);
        self.snip();
    }

    /// Perhaps cuts a path in a moment.
    pub(super) fn snip(&mut self) {
        if !self.calm && self.chance.below(1000) < self.plan.snip {
            let soon = Time::from_ns(self.chance.below(60_000));
            let pick = self.chance.below(1 << 32);
            self.arrange(self.later(soon), Tick::Snip, pick);
        }
        if !self.calm && self.plan.rails.len() > 1 && self.chance.below(1000) < self.plan.pull {
            let soon = Time::from_ns(self.chance.below(60_000));
            self.arrange(self.later(soon), Tick::Pull, 0);
        }
    }

    fn on_overdue(&mut self, number: u64) -> Result<(), Violation> {
        let Some(work) = self.works.get(&number) else {
            return Ok(());
        };
        let (node, id) = (work.node, work.id);
        if self.open.get(&(node, id)) != Some(&number) {
            return Ok(());
        }
        match self.nodes[node].frozen_until {
            // A frozen agent says nothing; it does as soon as it thaws.
            Some(until) => {
                self.arrange(until.saturating_add(SLACK), Tick::Overdue, number);
                Ok(())
            }
            None => Err(Violation::Overdue { node, id }),
        }
    }

    /// From now on nothing goes wrong; what has is put right, as far as that is not the agents' own business.
    fn on_calm(&mut self) -> Result<(), Violation> {
        self.world.calm();
        self.calm = true;
        for region in 0..self.regions.len() {
            if !self.regions[region].dead {
                self.publish(region);
                self.turn(self.regions[region].node)?;
            }
        }
        // Thaws come within half a second, and what is dead is found out after the longest silence.
        let wait = self
            .plan
            .silence_max
            .saturating_mul(2)
            .saturating_add(Time::from_secs(2));
        self.arrange(self.later(wait).max(self.back_by), Tick::Reconnect, 0);
        Ok(())
    }

    fn on_reconnect(&mut self) -> Result<(), Violation> {
        self.reconnected = true;
        for from in 0..self.nodes.len() {
            for to in 0..self.nodes.len() {
                let linked = self.nodes[from].links.values().any(|link| link.to == to);
                if from != to && !linked {
                    self.connect(from, to, Time::from_secs(2))?;
                }
            }
        }
        self.arrange(self.later(Time::from_secs(3)), Tick::Probe, 0);
        Ok(())
    }

    fn on_probe(&mut self) -> Result<(), Violation> {
        for from in 0..self.nodes.len() {
            for to in 0..self.nodes.len() {
                if from == to {
                    continue;
                }
                let link = self.nodes[from].links.iter().find(|(_, link)| link.to == to && link.up);
                let Some((&peer, _)) = link else {
                    return Err(Violation::NoCalmPeer { node: from, to });
                };
                self.transfer_in_calm(from, peer)?;
                self.increment(from, peer, Time::from_secs(2), true)?;
                // Nothing is in the way now but the life that was asked for.
                self.connect_to_the_dead(from, to, Time::from_secs(2))?;
            }
        }
        self.arrange(self.later(Time::from_secs(3)), Tick::End, 0);
        Ok(())
    }

    pub(super) fn connect(&mut self, from: usize, to: usize, patience: Time) -> Result<(), Violation> {
        let address = match &self.nodes[to].agent {
            Some(agent) => agent.core.addresses()[0].clone(),
            None => return Ok(()),
        };
        let Some(agent) = &mut self.nodes[from].agent else {
            return Ok(());
        };
        let now = agent.now();
        let target = Target::at(address, now.saturating_add(patience));
        self.connect_to(from, to, target)
    }

    /// As `connect`, but to a life of the node that is over, where there is one.
    pub(super) fn connect_to_the_dead(&mut self, from: usize, to: usize, patience: Time) -> Result<(), Violation> {
        let (Some(agent), Some(dead)) = (&self.nodes[to].agent, self.nodes[to].last_epoch) else {
            return Ok(());
        };
        let address = agent.core.addresses()[0].clone();
        let Some(own) = &self.nodes[from].agent else {
            return Ok(());
        };
        let target = Target {
            epoch: Some(dead),
            ..Target::at(address, own.now().saturating_add(patience))
        };
        self.connect_to(from, to, target)
    }

    fn connect_to(&mut self, from: usize, to: usize, target: Target) -> Result<(), Violation> {
        let stale = target.epoch.is_some();
        let Some(agent) = &mut self.nodes[from].agent else {
            return Ok(());
        };
        let now = agent.now();
        let peer = agent
            .core
            .connect(target, now)
            .expect("few peers and a known transport");
        let link = Link { to, up: false, stale };
        self.nodes[from].links.insert(peer, link);
        self.turn(from)
    }

    fn on_end(&mut self) -> Result<(), Violation> {
        for shared in &self.regions {
            let life = if shared.dead { " of an earlier life" } else { "" };
            shared.watched.check().map_err(|damage| Violation::Damaged {
                node: shared.node,
                what: format!("the {}{life}", shared.name),
                damage,
            })?;
        }
        for (node, state) in self.nodes.iter().enumerate() {
            let graves = state.graves.iter().map(|grave| (grave, "a buffer of an earlier life"));
            let buffers = state.buffers.iter().map(|buffer| (&buffer.watched, "a buffer"));
            for (watched, what) in graves.chain(buffers) {
                watched.check().map_err(|damage| Violation::Damaged {
                    node,
                    what: what.to_owned(),
                    damage,
                })?;
            }
        }
        self.check_counters()?;
        for (node, state) in self.nodes.iter().enumerate() {
            let kept = state.agent.as_ref().map(|agent| agent.core.under_way());
            if let Some(kept) = kept.filter(|kept| *kept != UnderWay::default()) {
                return Err(Violation::LeftOver { node, kept });
            }
        }
        if let Some(((node, id), _)) = self.open.first_key_value() {
            return Err(Violation::Overdue { node: *node, id: *id });
        }
        for (note, state) in &self.notes {
            let lives = self.nodes[state.from]
                .links
                .get(&state.peer)
                .is_some_and(|link| link.up);
            if state.due && !state.received && lives {
                return Err(Violation::Undelivered {
                    node: state.from,
                    note: *note,
                });
            }
        }
        self.over = true;
        Ok(())
    }
}
