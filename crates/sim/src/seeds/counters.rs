//! Increments in a seed's world, each of which happens once, or not at all, or is said to be unknown.
//!
//! Every agent of a world that counts publishes a list of words. The first of them is shared: what increments find there is
//! distinct, and its sum lies between those that were answered and those that may have happened. Every other word is
//! incremented by one operation only, so that none can hide behind another; and once the deadline of that has passed, it changes
//! no more.

use std::collections::BTreeSet;
use std::sync::Arc;

use weft_plan::{Place, Time};
use weft_protocol::agent::{AtomicError, AtomicId};
use weft_protocol::transfer::PeerId;
use weft_protocol::{Access, Atomic, AtomicAct, HostBytes, RegionKey, VecMemory};

use super::play::{Play, SLACK, Tick};
use super::verdicts::Violation;
use crate::agent::SimAgent;

const WORDS: u64 = 128;
const NAME: &str = "counter";

/// The words of one life of an agent.
pub(super) struct Counter {
    node: usize,
    memory: Arc<VecMemory>,
    key: RegionKey,
    /// The next word that nobody has incremented.
    unused: u64,
    fates: Vec<Fate>,
    /// What increments of the shared word have found.
    tickets: BTreeSet<u64>,
    shared_unknown: u64,
}

/// What is known of the one increment of a word.
#[derive(Clone, Copy, Debug, Default)]
struct Fate {
    told: Option<Told>,
    /// What the word held once the deadline had passed.
    settled: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    Done,
    Undone,
    Unknown,
}

/// An increment under way, or one whose deadline has not passed.
pub(super) struct Increment {
    node: usize,
    id: AtomicId,
    counter: usize,
    word: u64,
    /// Asked for at an address that is not a word's.
    astray: bool,
    in_calm: bool,
}

impl Play {
    /// What the agent of a new life lets others increment.
    pub(super) fn open_counter(&mut self, index: usize, agent: &mut SimAgent) {
        if !self.plan.counts {
            return;
        }
        let memory = Arc::new(VecMemory::zeroed((WORDS * 8) as usize));
        let region = agent.core.register(memory.clone(), Place::DRAM);
        let region = region.expect("the simulated fabrics take any memory");
        let now = agent.now();
        let key = agent.core.publish(NAME, &region.key, Access::READ_WRITE, now);
        self.counters.push(Counter {
            node: index,
            memory,
            key: key.expect("the name is free and the memory registered"),
            unused: 1,
            fates: vec![Fate::default(); WORDS as usize],
            tickets: BTreeSet::new(),
            shared_unknown: 0,
        });
    }

    pub(super) fn count(&mut self, index: usize) -> Result<(), Violation> {
        let Some(peer) = self.any_peer(index) else {
            return Ok(());
        };
        let patience = self.patience();
        self.increment(index, peer, patience, false)
    }

    pub(super) fn increment(
        &mut self,
        index: usize,
        peer: PeerId,
        patience: Time,
        in_calm: bool,
    ) -> Result<(), Violation> {
        let Some(agent) = &mut self.nodes[index].agent else {
            return Ok(());
        };
        let Some(remote) = agent.core.region(peer, NAME).cloned() else {
            return Ok(());
        };
        let Some(number) = self.counters.iter().position(|counter| counter.key == remote.key) else {
            return Ok(());
        };
        let counter = &mut self.counters[number];
        let word = if counter.unused < WORDS && self.chance.chance(0.5) {
            counter.unused += 1;
            counter.unused - 1
        } else {
            0
        };
        let astray = !in_calm && word > 0 && self.chance.chance(0.1);
        let atomic = Atomic {
            region: Arc::new(remote),
            offset: word * 8 + if astray { 4 } else { 0 },
            act: AtomicAct::FetchAdd(1),
        };
        let now = agent.now();
        let deadline = now.saturating_add(patience);
        let Ok(id) = agent.core.atomic(peer, atomic, deadline, now) else {
            // The session may have ended a moment ago.
            counter.fates[word as usize].told = Some(Told::Undone);
            return Ok(());
        };
        let on_world_clock = agent.on_world_clock(deadline);
        let increment = Increment {
            node: index,
            id,
            counter: number,
            word,
            astray,
            in_calm,
        };
        let label = self.next_increment;
        self.next_increment += 1;
        self.world.note(&[30, index as u64, id.0], || {
            format!("node {index} asks for {id:?} on word {word}, astray {astray}, by {on_world_clock:?}")
        });
        self.increments.insert(label, increment);
        self.counting.insert((index, id), label);
        self.arrange(on_world_clock.saturating_add(SLACK), Tick::Counted, label);
        self.snip();
        if !in_calm
            && self.chance.chance(0.05)
            && let Some(agent) = &mut self.nodes[index].agent
        {
            agent.core.cancel_atomic(id, now);
        }
        self.turn(index)
    }

    pub(super) fn on_incremented(
        &mut self,
        index: usize,
        id: AtomicId,
        outcome: Result<u64, AtomicError>,
    ) -> Result<(), Violation> {
        let node = index;
        let Some(label) = self.counting.remove(&(index, id)) else {
            return Err(Violation::CountedTwice { node, id });
        };
        let words = outcome
            .as_ref()
            .map_or_else(|e| e.to_string(), |_| "counted".to_owned());
        *self.ends.entry(words).or_default() += 1;
        let increment = &self.increments[&label];
        if let (Err(error), true) = (&outcome, increment.in_calm) {
            let cause = error.cause;
            return Err(Violation::CalmMiscount { node, id, cause });
        }
        let told = match &outcome {
            Ok(_) if increment.astray => {
                return Err(Violation::Miscounted {
                    node,
                    id,
                    told: Told::Done,
                    found: 0,
                });
            }
            Ok(before) => {
                let counter = &mut self.counters[increment.counter];
                if increment.word == 0 && !counter.tickets.insert(*before) {
                    return Err(Violation::SameTicket {
                        node,
                        id,
                        ticket: *before,
                    });
                }
                if increment.word > 0 && *before != 0 {
                    return Err(Violation::Miscounted {
                        node,
                        id,
                        told: Told::Done,
                        found: *before,
                    });
                }
                Told::Done
            }
            Err(error) if error.may_have_happened => Told::Unknown,
            Err(_) => Told::Undone,
        };
        self.tell(label, told)
    }

    /// Nobody will hear of what an agent had asked for that has died.
    pub(super) fn forget_increments(&mut self, index: usize) -> Result<(), Violation> {
        let all = (index, AtomicId(0))..=(index, AtomicId(u64::MAX));
        let open: Vec<_> = self.counting.range(all).map(|(key, label)| (*key, *label)).collect();
        for (key, label) in open {
            self.counting.remove(&key);
            self.tell(label, Told::Unknown)?;
        }
        Ok(())
    }

    fn tell(&mut self, label: u64, told: Told) -> Result<(), Violation> {
        let increment = &self.increments[&label];
        let counter = &mut self.counters[increment.counter];
        if increment.word == 0 {
            counter.shared_unknown += u64::from(told == Told::Unknown);
            return Ok(());
        }
        counter.fates[increment.word as usize].told = Some(told);
        counter.check(increment.word, increment.id)
    }

    /// The deadline of an increment has passed: it has ended, and its word is what it will always be.
    pub(super) fn on_counted(&mut self, label: u64) -> Result<(), Violation> {
        let Some(increment) = self.increments.get(&label) else {
            return Ok(());
        };
        let (node, id) = (increment.node, increment.id);
        if self.counting.get(&(node, id)) == Some(&label) {
            return match self.nodes[node].frozen_until {
                // A frozen agent says nothing; it does as soon as it thaws.
                Some(until) => {
                    self.arrange(until.saturating_add(SLACK), Tick::Counted, label);
                    Ok(())
                }
                None => Err(Violation::CountOverdue { node, id }),
            };
        }
        if increment.word > 0 {
            let counter = &mut self.counters[increment.counter];
            let found = counter.get(increment.word);
            counter.fates[increment.word as usize].settled = Some(found);
        }
        self.increments.remove(&label);
        Ok(())
    }

    pub(super) fn check_counters(&self) -> Result<(), Violation> {
        if let Some((node, id)) = self.counting.keys().next().copied() {
            return Err(Violation::CountOverdue { node, id });
        }
        for counter in &self.counters {
            for word in 1..WORDS {
                counter.check(word, AtomicId(u64::MAX))?;
            }
            let (certain, sum) = (counter.tickets.len() as u64, counter.get(0));
            let possible = certain..=certain + counter.shared_unknown;
            if !possible.contains(&sum) {
                return Err(Violation::WrongSum {
                    node: counter.node,
                    certain,
                    unknown: counter.shared_unknown,
                    sum,
                });
            }
        }
        Ok(())
    }
}

impl Counter {
    fn get(&self, word: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read(word * 8, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Holds a word against what was told of its increment.
    fn check(&self, word: u64, id: AtomicId) -> Result<(), Violation> {
        let Fate { told, settled } = self.fates[word as usize];
        let found = self.get(word);
        let told = match (told, found) {
            _ if settled.is_some_and(|settled| settled != found) => told.unwrap_or(Told::Undone),
            (Some(Told::Done), 1) | (Some(Told::Undone) | None, 0) | (Some(Told::Unknown), 0 | 1) => return Ok(()),
            (told, _) => told.unwrap_or(Told::Undone),
        };
        let node = self.node;
        Err(Violation::Miscounted { node, id, told, found })
    }
}
