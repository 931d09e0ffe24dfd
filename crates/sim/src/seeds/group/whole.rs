//! Whole groups in a seed's world: agents that connect, ranks that meet and make calls over their links, and one trouble or none: a rank that dies, freezes, comes late
//! or calls something else, a network that is torn in two, or both a death and that. Whoever has seen a call fail finds out who is left, and goes on with those.
//!
//! What is checked, for every seed:
//! - a call that ends well has exactly the right values, and buffers that are their caller's again are never taken for a message;
//! - every call ends by its deadline, with a result or an error, and whatever else ranks do ends by its time;
//! - where the links are good, calls fail because of that one trouble, and the rank that did it is the one that is blamed;
//! - all members of what is left agree on who they are, and on how many calls have ended well on all of them;
//! - there are never two groups without a common member of what is left;
//! - those that are left and enough go on, where the links are good;
//! - when nothing goes wrong any more, all that are alive form a group, and its calls end well.

mod checks;
mod trouble;

use std::collections::BTreeMap;

use thiserror::Error;
use weft_plan::collective::Collective;
use weft_plan::{Rank, Time};
use weft_protocol::Epoch;
use weft_protocol::agent::{Event, Target};
use weft_protocol::group::{Abort, Decision, Next, Quorum, Seat as _, ShrinkError, Shrinking, group_id};
use weft_protocol::seeded::Seeded;
use weft_protocol::transfer::PeerId;

use super::super::plan::Plan;
use super::member::{Member, Told};
use super::wish::Wish;
use crate::agent::SimAgent;
use crate::faults::Faults;
use crate::seat::SharedAgent;
use crate::world::{NodeId, World};
use trouble::{Trouble, calm_wish};

const STEPS_MAX: u64 = 3_000_000;
/// How long ranks take to meet at most.
const MEETING: Time = Time::from_secs(5);
/// The deadline of a call.
const CALL: Time = Time::from_ms(400);
/// How late a call may be told to have ended: answers are waited for, and withdrawals.
const SLACK: Time = Time::from_ms(250);
const SHRINKING: Time = Time::from_secs(4);
/// How often a rank that waits looks again.
const LOOK: Time = Time::from_ms(1);
/// By when all have come to an end, whatever happens.
const ALL_OVER: Time = Time::from_secs(40);
/// How long after the last fault everything must work again.
const RECOVERY: Time = Time::from_secs(8);
/// Elements of a call whose messages stay in their senders' memory.
const LONG: u64 = 17_000;

/// A promise that was not kept.
#[derive(Debug, Error)]
pub(in crate::seeds) enum Broken {
    #[error("rank {rank}: call {number} ended well with wrong values")]
    WrongValues { rank: usize, number: usize },
    #[error("rank {rank}: call {number} ended {late:?} after its deadline")]
    Overdue { rank: usize, number: usize, late: Time },
    #[error("rank {rank} comes to no end: {state}")]
    Endless { rank: usize, state: String },
    #[error("rank {rank} was told: {abort}; what happened was {trouble:?}")]
    WrongBlame {
        rank: usize,
        abort: Box<Abort>,
        trouble: Box<Trouble>,
    },
    #[error("rank {rank} was told: {abort}; and nothing was wrong")]
    Groundless { rank: usize, abort: Box<Abort> },
    #[error("no group came about, and nothing was wrong: {why}")]
    NotMet { why: String },
    #[error("rank {rank} goes on with {members:?}, of which {ended} calls have ended; rank {other} otherwise")]
    Disagree {
        rank: usize,
        other: usize,
        members: Vec<Rank>,
        ended: u64,
    },
    #[error("both {one:?} and {other:?} go on")]
    Torn { one: Vec<Rank>, other: Vec<Rank> },
    #[error("rank {rank} of those that are left does not go on: {state}")]
    NotOn { rank: usize, state: String },
    #[error("in calm, rank {rank} fails: {why}")]
    Calm { rank: usize, why: String },
    #[error("rank {rank} keeps memory that nobody reads any more")]
    Kept { rank: usize },
    #[error("a call cannot be made: {0}")]
    Call(String),
    #[error("the world of groups never comes to rest")]
    Restless,
}

/// Some worlds of agents are followed by one of groups.
pub(in crate::seeds) fn is_played(seed: u64) -> bool {
    seed % 4 == 3
}

pub(in crate::seeds) struct GroupPlay {
    plan: Plan,
    /// Nothing is wrong with the links.
    good: bool,
    world: World,
    wishes: Vec<Wish>,
    trouble: Trouble,
    players: Vec<Player>,
    struck: bool,
    ends: BTreeMap<String, u64>,
    steps: u64,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    First,
    Recovering,
    /// All that are alive form a group.
    Calm,
    Over,
}

/// A rank and all that it goes through.
struct Player {
    id: NodeId,
    name: String,
    host: String,
    agent: Option<SharedAgent>,
    frozen_until: Option<Time>,
    was_frozen: bool,
    wake: Option<Time>,
    /// By player: the session that leads there.
    sessions: BTreeMap<usize, PeerId>,
    seeking: BTreeMap<usize, PeerId>,
    member: Option<Member>,
    /// What is left of the group, in the making.
    rest: Option<Member>,
    stage: Stage,
    /// By when what it does has to end.
    by: Time,
    late_until: Option<Time>,
    told: Option<Box<Abort>>,
    answer: Option<(Vec<Rank>, u64)>,
}

#[derive(Debug)]
enum Stage {
    Meeting,
    Calling,
    /// All calls have been made. It may yet hear that one has failed elsewhere.
    Done,
    Shrinking(Shrinking),
    Regrouping(Shrinking),
    NoQuorum,
    LeftOut,
    TimedOut,
    Shrunk,
    NotMet(String),
}

#[derive(Clone, Copy)]
enum Tick {
    Wake,
    Strike,
    Thaw,
    Recovered,
    AllOver,
}

const TICKS: [Tick; 5] = [Tick::Wake, Tick::Strike, Tick::Thaw, Tick::Recovered, Tick::AllOver];

impl GroupPlay {
    /// The faults of a seed's links here.
    pub(in crate::seeds) fn faults(seed: u64) -> Faults {
        match Seeded::new(seed ^ 0x6c69_6e6b).chance(0.5) {
            true => Faults::NONE,
            false => Plan::of(seed).faults,
        }
    }

    pub(in crate::seeds) fn new(seed: u64, world: World) -> GroupPlay {
        let plan = Plan::of(seed);
        let mut chance = Seeded::new(seed ^ 0x7768_6f6c);
        let ranks = 2 + chance.below(4) as u32;
        let calls = 2 + chance.below(6) as usize;
        // Whoever has ended the first knows that all have met.
        let mut wishes = vec![Wish::new(&mut chance, Collective::Barrier, ranks, 0)];
        wishes.extend((0..calls).map(|_| Wish::random(&mut chance, ranks)));
        if chance.chance(0.4) {
            let at = 1 + chance.below(calls as u64) as usize;
            let root = Rank(chance.below(ranks.into()) as u32);
            wishes[at] = Wish::new(&mut chance, Collective::Broadcast { root }, ranks, LONG);
        }
        let mut trouble = Trouble::random(&mut chance, ranks, &wishes);
        trouble.part(&mut Seeded::new(seed ^ 0x7061_7274), ranks);
        wishes.push(Wish::new(&mut chance, Collective::Barrier, ranks, 0));
        let together = match trouble {
            // Memory that two ranks share is not torn by a network.
            Trouble::Strikes { what, .. } if what.torn != 0 => 1,
            _ => plan.nodes_per_host,
        };
        let player = |index: usize| {
            let name = format!("rank{index}");
            let host = format!("host{}", index / together);
            Player::new(world.add_node(&name, &host), name, host)
        };
        GroupPlay {
            good: Seeded::new(seed ^ 0x6c69_6e6b).chance(0.5),
            players: (0..ranks as usize).map(player).collect(),
            plan,
            world,
            wishes,
            trouble,
            struck: false,
            ends: BTreeMap::new(),
            steps: 0,
            phase: Phase::First,
        }
    }

    pub(in crate::seeds) fn totals(&self) -> (BTreeMap<String, u64>, u64) {
        (self.ends.clone(), self.steps)
    }

    pub(in crate::seeds) fn run(&mut self) -> Result<(), Broken> {
        let trouble = self.trouble;
        self.world.note(&[50], || {
            format!("a group of {} ranks, {trouble:?}", self.players.len())
        });
        for index in 0..self.players.len() {
            self.begin_life(index);
        }
        self.meet_all(group_id(&[b"all"]));
        self.arrange(ALL_OVER, Tick::AllOver, 0);
        while self.phase != Phase::Over {
            self.steps += 1;
            if self.steps > STEPS_MAX {
                return Err(Broken::Restless);
            }
            let Some(step) = self.world.step() else {
                return Err(Broken::Restless);
            };
            if let Some(token) = step.tick {
                self.on_tick(TICKS[(token >> 56) as usize], (token & 0xffff) as usize)?;
            }
            for node in step.ready {
                self.turn(node.0 as usize)?;
            }
        }
        Ok(())
    }

    fn arrange(&self, wait: Time, tick: Tick, about: usize) {
        let at = self.world.now().saturating_add(wait);
        self.world.at(at, (tick as u64) << 56 | about as u64);
    }

    fn begin_life(&mut self, index: usize) {
        let player = &mut self.players[index];
        let epoch = Epoch(index as u64 + 1);
        let birth = self.plan.birth(index, player.id, &player.name, &player.host, epoch);
        player.agent = Some(SharedAgent::new(SimAgent::start(&self.world, &birth)));
    }

    /// All that are alive begin to meet in a group.
    fn meet_all(&mut self, group: u64) {
        let alive: Vec<usize> = (0..self.players.len())
            .filter(|index| self.players[*index].agent.is_some())
            .collect();
        for (rank, index) in alive.iter().enumerate() {
            let player = &mut self.players[*index];
            let Some(agent) = &player.agent else { continue };
            // Whoever is below is looked for, whoever is above comes.
            let known: Vec<Option<PeerId>> = alive
                .iter()
                .map(|other| player.sessions.get(other).copied().filter(|_| other < index))
                .collect();
            player.by = agent.now().saturating_add(MEETING);
            player.member = Some(Member::meet(agent, group, Rank(rank as u32), &known, player.by));
            player.rest = None;
            player.stage = Stage::Meeting;
            player.was_frozen = false;
            self.arrange(Time::from_ns(1), Tick::Wake, *index);
        }
    }

    fn on_tick(&mut self, tick: Tick, about: usize) -> Result<(), Broken> {
        match tick {
            Tick::Wake => {
                self.players[about].wake = None;
                self.turn(about)
            }
            Tick::Thaw => {
                self.players[about].frozen_until = None;
                self.turn(about)
            }
            Tick::Strike => {
                self.strike();
                Ok(())
            }
            Tick::Recovered => {
                self.phase = Phase::Calm;
                self.meet_all(group_id(&[b"calm"]));
                self.arrange(ALL_OVER, Tick::AllOver, 1);
                Ok(())
            }
            Tick::AllOver => {
                let of_this = (about == 0) == (self.phase == Phase::First);
                let late = self.players.iter().position(|player| !player.is_over());
                match late.filter(|_| of_this && self.phase != Phase::Recovering) {
                    Some(rank) => Err(Broken::Endless {
                        rank,
                        state: format!("{:?}", self.players[rank].stage),
                    }),
                    None => Ok(()),
                }
            }
        }
    }

    fn strike(&mut self) {
        // It may be too late for it.
        let (Trouble::Strikes { what, .. }, Phase::First) = (self.trouble, self.phase) else {
            return;
        };
        let is_in = |bits: u32, index: usize| bits >> index & 1 != 0;
        let count = self.players.len();
        if what.torn != 0 {
            for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
                let apart = is_in(what.torn, from) && !is_in(what.torn, to);
                if apart || !what.one_way && is_in(what.torn, to) && !is_in(what.torn, from) {
                    self.world.cut(self.players[from].id, self.players[to].id, what.lasts);
                }
            }
        }
        for index in (0..count).filter(|index| is_in(what.dies, *index)) {
            self.world.crash(self.players[index].id, what.told);
            let player = &mut self.players[index];
            (player.member, player.rest, player.agent) = (None, None, None);
        }
        if let Some((index, from)) = what.parts
            && let Some(agent) = &self.players[index].agent
        {
            let sessions = self.players[index].sessions.iter();
            for (_, peer) in sessions.filter(|(other, _)| is_in(from, **other)) {
                agent.act(|core, now| core.disconnect(*peer, now));
            }
            self.arrange(Time::from_ns(1), Tick::Wake, index);
        }
        if let Some(index) = what.freezes {
            let until = self.world.now().saturating_add(what.lasts);
            self.players[index].frozen_until = Some(until);
            self.players[index].was_frozen = true;
            self.arrange(what.lasts, Tick::Thaw, index);
        }
    }

    /// Turns a rank, unless it is frozen or dead.
    fn turn(&mut self, index: usize) -> Result<(), Broken> {
        let player = &mut self.players[index];
        let Some(agent) = player.agent.clone().filter(|_| player.frozen_until.is_none()) else {
            return Ok(());
        };
        loop {
            let events = agent.turn();
            for event in &events {
                self.players[index].on_event(event);
            }
            let moved = self.go_on(index, &agent)?;
            if !moved && events.is_empty() {
                break;
            }
        }
        let player = &mut self.players[index];
        let soon = (!player.is_over() || agent.is_releasing()).then(|| self.world.now().saturating_add(LOOK));
        let next = agent.next_timeout().into_iter().chain(soon).min();
        let next = next.map(|next| next.max(self.world.now().saturating_add(Time::from_ns(1))));
        if let Some(next) = next.filter(|next| player.wake.is_none_or(|at| *next < at)) {
            player.wake = Some(next);
            self.world.at(next, (Tick::Wake as u64) << 56 | index as u64);
        }
        match self.phase {
            Phase::First | Phase::Calm if self.players.iter().all(Player::is_over) => self.all_over(),
            _ => Ok(()),
        }
    }

    /// One step of what a rank does. Whether there may be another at once.
    fn go_on(&mut self, index: usize, agent: &SharedAgent) -> Result<bool, Broken> {
        let now = agent.now();
        if matches!(self.players[index].stage, Stage::Meeting) {
            self.seek(index, agent);
        }
        let player = &mut self.players[index];
        let Some(member) = &mut player.member else {
            return Ok(false);
        };
        match &mut player.stage {
            Stage::Meeting => match member.turn() {
                Some(Told::Met) => player.stage = Stage::Calling,
                Some(Told::NotMet(why)) => {
                    if self.good && !self.struck && self.phase == Phase::First {
                        return Err(Broken::NotMet { why });
                    }
                    player.stage = Stage::NotMet(why);
                }
                _ => return Ok(false),
            },
            Stage::Calling if member.is_idle() => return self.next_call(index, agent),
            Stage::Calling => {
                let told = member.turn();
                return self.on_told(index, told, now);
            }
            Stage::Done => {
                let Some(abort) = member.heard() else {
                    return Ok(false);
                };
                player.told = Some(Box::new(abort));
                player.shrink(now);
            }
            Stage::Shrinking(machine) => {
                let seat = &member.seat;
                let polled = agent.act(|core, now| seat.notes(|notes| machine.poll(core, notes, now)));
                match polled {
                    Ok(None) => return Ok(false),
                    Ok(Some(decision)) => {
                        let next = machine.next(&decision);
                        self.on_decision(index, agent, &decision, next);
                    }
                    Err(ShrinkError::NoQuorum(_)) => player.stage = Stage::NoQuorum,
                    Err(_) => player.stage = Stage::TimedOut,
                }
            }
            Stage::Regrouping(machine) => {
                let Some(rest) = &mut player.rest else {
                    return Ok(false);
                };
                let formed = match rest.turn() {
                    None => return Ok(false),
                    Some(Told::Met) => {
                        let mut chance = Seeded::new(1);
                        let barrier = Wish::new(&mut chance, Collective::Barrier, rest.ranks, 0);
                        rest.begin(&barrier, machine.until()).map_err(Broken::Call)?;
                        return Ok(true);
                    }
                    Some(Told::Ended(_)) => true,
                    Some(Told::NotMet(_) | Told::Failed(_)) => false,
                };
                let seat = &member.seat;
                agent.act(|core, now| seat.notes(|notes| machine.go_on(formed, core, notes, now)));
                if !formed {
                    player.rest = None;
                }
                if let Stage::Regrouping(machine) = std::mem::replace(&mut player.stage, Stage::Done) {
                    player.stage = Stage::Shrinking(machine);
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Looks for those below.
    fn seek(&mut self, index: usize, agent: &SharedAgent) {
        let alive: Vec<usize> = (0..self.players.len())
            .filter(|other| self.phase == Phase::First || self.players[*other].agent.is_some())
            .collect();
        for (rank, other) in alive.into_iter().enumerate().filter(|(_, other)| *other < index) {
            let address = format!("{}:0/{}", self.plan.rails[0].name, self.players[other].name);
            let player = &mut self.players[index];
            let Some(member) = &player.member else { return };
            let by = player.by;
            let known = player.sessions.get(&other).copied();
            let known = known.filter(|peer| agent.act(|core, _| core.is_connected(*peer)));
            match known {
                Some(peer) => member.seat.notes(|notes| {
                    if notes.peers()[rank].is_none() {
                        notes.knows(Rank(rank as u32), peer);
                    }
                }),
                None if !player.seeking.contains_key(&other) => {
                    let target = Target::at(weft_protocol::PeerAddress(address), by);
                    let begun = agent.act(|core, now| core.connect(target, now));
                    player.seeking.extend(begun.ok().map(|peer| (other, peer)));
                }
                None => {}
            }
        }
    }

    fn next_call(&mut self, index: usize, agent: &SharedAgent) -> Result<bool, Broken> {
        let (calm, now) = (self.phase == Phase::Calm, agent.now());
        let player = &mut self.players[index];
        let Some(member) = &mut player.member else {
            return Ok(false);
        };
        let number = member.next;
        let last = if calm { 2 } else { self.wishes.len() };
        if number == last {
            player.stage = Stage::Done;
            return Ok(false);
        }
        if let Trouble::Late { rank, at, wait } = self.trouble
            && (rank, at) == (index, number)
            && !calm
        {
            let until = *player.late_until.get_or_insert(now.saturating_add(wait));
            if now < until {
                return Ok(false);
            }
        }
        if let Trouble::Strikes { at, after, .. } = self.trouble
            && at == number
            && !calm
            && !std::mem::replace(&mut self.struck, true)
        {
            self.world
                .at(self.world.now().saturating_add(after), (Tick::Strike as u64) << 56);
        }
        let wish = match self.trouble {
            _ if calm => calm_wish(number, member.ranks),
            Trouble::Odd(odd) if (odd.rank, odd.at) == (index, number) => odd.wish,
            _ => self.wishes[number],
        };
        player.by = now.saturating_add(CALL);
        player.was_frozen = false;
        member.begin(&wish, player.by).map_err(Broken::Call)?;
        Ok(true)
    }

    fn on_told(&mut self, index: usize, told: Option<Told>, now: Time) -> Result<bool, Broken> {
        let Some(told) = told else { return Ok(false) };
        let calm = self.phase == Phase::Calm;
        let player = &mut self.players[index];
        let Some(member) = &player.member else {
            return Ok(false);
        };
        let (rank, number, ranks) = (member.rank.0 as usize, member.next - 1, member.ranks);
        let late = now.saturating_sub(player.by);
        if late > SLACK && !player.was_frozen {
            return Err(Broken::Overdue { rank, number, late });
        }
        match told {
            Told::Ended(output) => {
                *self.ends.entry("done".to_owned()).or_default() += 1;
                let odd = matches!(self.trouble, Trouble::Odd(odd) if odd.at <= number);
                let wish = if calm {
                    calm_wish(number, ranks)
                } else {
                    self.wishes[number]
                };
                if (calm || !odd) && output != wish.result(rank, number, ranks) {
                    return Err(Broken::WrongValues { rank, number });
                }
            }
            Told::Failed(abort) => {
                *self.ends.entry(format!("{:?}", abort.cause)).or_default() += 1;
                self.world
                    .note(&[51, index as u64], || format!("rank {index} is told: {abort}"));
                if calm {
                    let why = abort.to_string();
                    return Err(Broken::Calm { rank, why });
                }
                player.told = Some(abort);
                player.shrink(now);
            }
            Told::Met | Told::NotMet(_) => {}
        }
        Ok(true)
    }

    fn on_decision(&mut self, index: usize, agent: &SharedAgent, decision: &Decision, next: Next) {
        let player = &mut self.players[index];
        let Some(member) = &player.member else { return };
        self.world
            .note(&[52, index as u64], || format!("rank {index} hears {decision:?}"));
        let (members, own, seed) = match next {
            Next::Form { members, own, seed } => (members, own, seed),
            Next::LeftOut => {
                player.stage = Stage::LeftOut;
                return;
            }
            // It was not one of those that came together.
            Next::Formed { .. } if player.rest.is_none() => {
                player.stage = Stage::TimedOut;
                return;
            }
            Next::Formed { ended } => {
                player.answer = Some((decision.members.clone(), ended));
                player.stage = Stage::Shrunk;
                return;
            }
        };
        let parent = member.seat.notes(|notes| notes.group());
        let peers = member.seat.notes(|notes| notes.peers().to_vec());
        let peers: Vec<Option<PeerId>> = members.iter().map(|rank| peers[rank.0 as usize]).collect();
        let group = group_id(&[&parent.to_le_bytes(), &seed]);
        if let Stage::Shrinking(machine) = std::mem::replace(&mut player.stage, Stage::Done) {
            let until = machine.until();
            // What had been formed before has lost somebody.
            player.rest = None;
            player.rest = Some(Member::meet(agent, group, own, &peers, until));
            player.stage = Stage::Regrouping(machine);
        }
    }
}

impl Player {
    fn new(id: NodeId, name: String, host: String) -> Player {
        Player {
            id,
            name,
            host,
            agent: None,
            frozen_until: None,
            was_frozen: false,
            wake: None,
            sessions: BTreeMap::new(),
            seeking: BTreeMap::new(),
            member: None,
            rest: None,
            stage: Stage::Meeting,
            by: Time::ZERO,
            late_until: None,
            told: None,
            answer: None,
        }
    }

    /// Whether it is dead, or there is nothing more to come of it. Who is frozen hears of something later.
    fn is_over(&self) -> bool {
        let doing = matches!(
            self.stage,
            Stage::Meeting | Stage::Calling | Stage::Shrinking(_) | Stage::Regrouping(_)
        );
        self.agent.is_none() || !doing && self.frozen_until.is_none()
    }

    fn shrink(&mut self, now: Time) {
        if let Some(member) = &self.member {
            let machine = Shrinking::new(member.rank, member.ended_well, Quorum::Majority, SHRINKING, now);
            self.stage = Stage::Shrinking(machine);
        }
    }

    fn on_event(&mut self, event: &Event) {
        match event {
            Event::Connected { peer, identity, .. } => {
                let number = identity.name.strip_prefix("rank").and_then(|text| text.parse().ok());
                self.sessions.extend(number.map(|number: usize| (number, *peer)));
                self.seeking.retain(|_, sought| sought != peer);
            }
            Event::PeerLost { peer, .. } => self.sessions.retain(|_, known| known != peer),
            Event::ConnectFailed { peer, .. } => self.seeking.retain(|_, sought| sought != peer),
            _ => {}
        }
    }

    fn end(&self) -> String {
        match (&self.stage, &self.agent) {
            (_, None) => "died".to_owned(),
            (Stage::NotMet(_), _) => "not met".to_owned(),
            (Stage::Shrunk, _) => "shrunk".to_owned(),
            (Stage::NoQuorum, _) => "no quorum".to_owned(),
            (Stage::LeftOut, _) => "left out".to_owned(),
            (Stage::TimedOut, _) => "timed out".to_owned(),
            _ => "all calls made".to_owned(),
        }
    }
}
