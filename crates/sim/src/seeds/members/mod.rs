//! Stores that work together in a seed's world: each has a few slots, which are used again the moment they are free, and knows of the others by the directory alone.
//!
//! What is checked, for every seed:
//! - what was fetched has exactly the bytes that were put under its id, also where slots were used again, a copy was damaged, or somebody who knows the secret
//!   says whatever comes to its mind;
//! - nobody is said to have a block longer after its death than a session takes to notice;
//! - every block of a fetch ends once, soon after its deadline at the latest, and nobody writes to its memory after that;
//! - whatever keeps a block for a reader is given back once, and nothing is kept for ever;
//! - the books of every store balance;
//! - when nothing goes wrong any more, everybody finds what anybody has, and gets it.

mod acts;
mod node;

use std::collections::BTreeMap;

use thiserror::Error;
use weft_plan::Time;
use weft_protocol::Epoch;
use weft_protocol::agent::Target;
use weft_protocol::block::directory::{QuestionId, Settings};
use weft_protocol::block::{HitRule, Part, Shape};
use weft_protocol::seeded::Seeded;

use super::plan::Plan;
use crate::agent::SimAgent;
use crate::world::World;
use node::Node;

const STEPS_MAX: u64 = 2_000_000;
const ACTIONS: u64 = 150;
/// Sessions are missed, made again, and what is where is told anew.
const RECOVERY: Time = Time::from_secs(8);
/// Blocks that there can be, and what each of them has.
const BLOCKS: u64 = 60;
const BLOCK_BYTES: u32 = 1500;
const DEADLINE: Time = Time::from_ms(400);
/// Beyond the deadline: a transfer that has to be fenced, or an agent that is frozen.
const SLACK: Time = Time::from_secs(4);
/// Clocks, and how long it takes an agent to hear of a session's end.
const NOTICE: Time = Time::from_ms(300);

/// A promise that was not kept.
#[derive(Debug, Error)]
pub(super) enum Broken {
    #[error("store {store}: block {block} came from another with wrong bytes, first at {at}")]
    WrongBytes { store: usize, block: u64, at: usize },
    #[error("store {store}: store {holder} is said to have a block {since} after its death")]
    SaidOfTheDead { store: usize, holder: usize, since: Time },
    #[error("store {store}: a block of a fetch ended twice")]
    EndedTwice { store: usize },
    #[error("store {store}: a fetch has not ended {over} after its deadline")]
    NeverEnded { store: usize, over: Time },
    #[error("store {store}: memory of a fetch was written to after its end")]
    WrittenLate { store: usize },
    #[error("store {store}: what keeps a block for a reader was given back twice")]
    FreedTwice { store: usize },
    #[error("store {store}: {kept} blocks are kept for readers that are gone")]
    KeptForEver { store: usize, kept: usize },
    #[error("store {store}: {under_way} questions and fetches have not ended")]
    UnderWay { store: usize, under_way: usize },
    #[error("store {store}: its books do not balance: {tally}")]
    Books { store: usize, tally: String },
    #[error("in calm, store {store} did not get block {block} that store {holder} has: {why}")]
    CalmMiss {
        store: usize,
        holder: usize,
        block: u64,
        why: String,
    },
    #[error("in calm, store {store} knows of {members} other stores and not of {others}")]
    CalmMembers {
        store: usize,
        members: usize,
        others: usize,
    },
    #[error("the world of stores never comes to rest")]
    Restless,
}

/// Some worlds of agents are followed by one of stores.
pub(super) fn is_played(seed: u64) -> bool {
    seed % 4 == 1
}

pub(super) struct MembersPlay {
    plan: Plan,
    world: World,
    chance: Seeded,
    shape: Shape,
    settings: Settings,
    slots: u64,
    /// The last store is one that says anything.
    liar: bool,
    nodes: Vec<Node>,
    calm: bool,
    /// In calm: what everybody is to get.
    probing: bool,
    actions_left: u64,
    next_epoch: u64,
    steps: u64,
    ends: BTreeMap<String, u64>,
    over: bool,
}

#[derive(Clone, Copy)]
enum Tick {
    Wake,
    Act,
    Thaw,
    Restart,
    /// Every store comes back to those that it has lost.
    Connect,
    /// A store has looked for what somebody wants to read.
    Lend,
    Calm,
    Recovered,
    End,
}

const TICKS: [Tick; 9] = [
    Tick::Wake,
    Tick::Act,
    Tick::Thaw,
    Tick::Restart,
    Tick::Connect,
    Tick::Lend,
    Tick::Calm,
    Tick::Recovered,
    Tick::End,
];

impl MembersPlay {
    pub(super) fn new(seed: u64, world: World) -> MembersPlay {
        let mut chance = Seeded::new(seed ^ 0x6d65_6d62_6572);
        let shape = Shape::new(vec![Part::new("kv", BLOCK_BYTES, HitRule::AllBlocks)]).expect("a shape");
        let settings = Settings {
            answer_within: Time::from_us(2_000 << chance.below(6)),
            read_within: Time::from_ms(5 << chance.below(6)),
            fresh: Time::from_ms([0, 5, 200][chance.below(3) as usize]),
            entries: [16, 1 << 20][chance.below(2) as usize],
            answers: [8, 1 << 10][chance.below(2) as usize],
        };
        MembersPlay {
            plan: Plan::of(seed),
            world,
            slots: 18 + chance.below(20),
            liar: chance.chance(0.4),
            shape,
            settings,
            chance,
            nodes: Vec::new(),
            calm: false,
            probing: false,
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
        let stores = 3 + self.chance.below(3) as usize;
        for index in 0..stores {
            let name = format!("store{index}");
            let host = format!("host{}", index / self.plan.nodes_per_host);
            let id = self.world.add_node(&name, &host);
            self.nodes.push(Node::new(id, name));
            self.begin_life(index)?;
        }
        self.arrange(Time::from_us(10), Tick::Connect, 0);
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
            Tick::Connect => self.connect_all(),
            Tick::Lend => self.lend(about),
            Tick::Act => self.on_act(),
            Tick::Calm => {
                self.world.calm();
                self.calm = true;
                self.arrange(RECOVERY, Tick::Recovered, 0);
                Ok(())
            }
            Tick::Recovered => self.on_recovered(),
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
        let salt = self.chance.next_u64();
        self.nodes[index].begin(agent, epoch, &self.shape, self.settings, self.slots, salt);
        self.turn(index)
    }

    /// Of two stores the first goes to the second, as often as it takes.
    fn connect_all(&mut self) -> Result<(), Broken> {
        self.arrange(Time::from_ms(40), Tick::Connect, 0);
        for from in 0..self.nodes.len() {
            for to in from + 1..self.nodes.len() {
                let known = self.nodes[from].peers.values().any(|peer| *peer == to);
                if known || self.nodes[from].frozen_until.is_some() || self.nodes[from].connecting.contains_key(&to) {
                    continue;
                }
                let address = match &self.nodes[to].agent {
                    Some(agent) => agent.core.addresses()[0].clone(),
                    None => continue,
                };
                let node = &mut self.nodes[from];
                if let Some(agent) = &mut node.agent {
                    let now = agent.now();
                    let target = Target::at(address, now.saturating_add(Time::from_secs(1)));
                    if let Ok(peer) = agent.core.connect(target, now) {
                        node.connecting.insert(to, peer);
                    }
                }
            }
            self.turn(from)?;
        }
        Ok(())
    }

    fn kill(&mut self, index: usize) {
        let told = self.chance.chance(0.5);
        self.world.crash(self.nodes[index].id, told);
        self.nodes[index].die(self.world.now());
        let wait = Time::from_us(self.chance.below(400_000));
        self.arrange(wait, Tick::Restart, index as u64);
    }

    /// Everybody is there, and has had the time to be told of everything.
    fn on_recovered(&mut self) -> Result<(), Broken> {
        let others = self.nodes.len() - 1;
        for store in 0..self.nodes.len() {
            let members = self.nodes[store].members();
            if members != others {
                return Err(Broken::CalmMembers { store, members, others });
            }
        }
        self.probing = true;
        for store in 0..self.nodes.len() {
            self.nodes[store].look_at_all();
        }
        // Where entries are few, some are left out.
        let surely = self.settings.entries > BLOCKS as usize;
        for reader in 0..self.nodes.len() {
            for block in (0..BLOCKS).filter(|_| surely) {
                let holder = (0..self.nodes.len()).find(|holder| self.nodes[*holder].has(block));
                if holder.is_some() && !self.nodes[reader].has(block) {
                    self.fetch(reader, &[block], holder)?;
                }
            }
            self.turn(reader)?;
        }
        let wait = Time::from_secs(10);
        self.arrange(wait, Tick::End, 0);
        Ok(())
    }

    fn on_end(&mut self) -> Result<(), Broken> {
        for store in 0..self.nodes.len() {
            self.check_rest(store)?;
        }
        self.over = true;
        Ok(())
    }

    fn count(&mut self, what: impl Into<String>) {
        *self.ends.entry(what.into()).or_default() += 1;
    }

    fn on_found(
        &mut self,
        store: usize,
        question: QuestionId,
        found: &[Vec<weft_protocol::block::directory::Holder>],
    ) -> Result<(), Broken> {
        let _ = question;
        for holder in found.iter().flatten() {
            self.count("found");
            let Some(index) = self.nodes[store].peers.get(&holder.peer).copied() else {
                // A session that nobody here has heard the end of yet.
                continue;
            };
            let epoch = self.nodes[store].epoch_of(holder.peer);
            if let Some(died) = epoch.and_then(|epoch| self.nodes[index].deaths.get(&epoch)) {
                let since = self.world.now().saturating_sub(*died);
                let notice = self.plan.silence_max.saturating_mul(2).saturating_add(NOTICE);
                if since > notice {
                    let holder = index;
                    return Err(Broken::SaidOfTheDead { store, holder, since });
                }
            }
        }
        Ok(())
    }
}
