//! A rank of a group at a simulated agent.

use std::sync::{Arc, Mutex, MutexGuard};

use weft_plan::{Place, Time};
use weft_protocol::agent::{Core, Event};
use weft_protocol::group::{Notes, Reference, Seat, View};
use weft_protocol::region::{Access, Region};
use weft_protocol::{Memory as _, Progress, RegionKey, Transport, VecMemory};

use crate::agent::SimAgent;

/// An agent whose ranks share it. Clones are the same agent.
#[derive(Clone, Debug)]
pub struct SharedAgent(Arc<Mutex<Inside>>);

#[derive(Debug)]
struct Inside {
    agent: SimAgent,
    boards: Vec<Arc<Mutex<Notes>>>,
    /// Memory that somebody was inside of when it was given back.
    releasing: Vec<RegionKey>,
    events: Vec<Event>,
}

/// One rank of one group at an agent.
#[derive(Clone, Debug)]
pub struct SimSeat {
    agent: SharedAgent,
    notes: Arc<Mutex<Notes>>,
}

impl SharedAgent {
    pub fn new(agent: SimAgent) -> SharedAgent {
        SharedAgent(Arc::new(Mutex::new(Inside {
            agent,
            boards: Vec::new(),
            releasing: Vec::new(),
            events: Vec::new(),
        })))
    }

    /// Takes a seat in a group, whose notes are heard from now on.
    pub fn sit(&self, notes: Notes) -> SimSeat {
        let group = notes.group();
        let notes = Arc::new(Mutex::new(notes));
        let mut inside = self.lock();
        inside.boards.push(notes.clone());
        let core = &mut inside.agent.core;
        core.open_parcels(group);
        core.open_parcels(group + 1);
        inside.settle(true);
        drop(inside);
        SimSeat {
            agent: self.clone(),
            notes,
        }
    }

    pub fn act<R>(&self, change: impl FnOnce(&mut Core<dyn Transport>, Time) -> R) -> R {
        let mut inside = self.lock();
        let now = inside.agent.now();
        let done = change(&mut inside.agent.core, now);
        inside.agent.core.push(now);
        inside.settle(false);
        done
    }

    /// Turns the agent until it has nothing to do, and says what has happened besides.
    pub fn turn(&self) -> Vec<Event> {
        let mut inside = self.lock();
        inside.turn();
        std::mem::take(&mut inside.events)
    }

    /// When it wants to be turned again, on the world's clock.
    pub fn next_timeout(&self) -> Option<Time> {
        self.lock().agent.next_timeout()
    }
    pub fn now(&self) -> Time {
        self.lock().agent.now()
    }

    /// Memory that others may read.
    pub fn lend(&self, memory: &Arc<VecMemory>) -> View {
        let mut inside = self.lock();
        let core = &mut inside.agent.core;
        let region = core.register(memory.clone(), Place::DRAM);
        let region = region.expect("the simulated fabrics take any memory");
        let key = core.lend(&region.key, Access::READ).expect("what was just registered");
        View {
            memory: memory.clone(),
            offset: 0,
            len: memory.len(),
            key: Some(key),
        }
    }

    /// Nobody reads it any more.
    pub fn take_back(&self, view: &View) {
        let mut inside = self.lock();
        inside.releasing.extend(view.key);
        inside.release();
    }

    /// What the agent keeps of what it has lent and taken back.
    pub fn is_releasing(&self) -> bool {
        !self.lock().releasing.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        // A panic elsewhere is a failed check, and its report still wants to look.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Inside {
    fn turn(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        self.agent.turn(&mut events);
        self.events = events;
        self.settle(false);
        self.release();
    }

    /// Lets the notes of all groups hear what has come.
    fn settle(&mut self, anew: bool) {
        let now = self.agent.now();
        self.events.extend(std::iter::from_fn(|| self.agent.core.next_event()));
        let boards = &self.boards;
        self.events.retain(|event| match event {
            Event::Ended { id, outcome } => !boards.iter().any(|notes| lock(notes).on_ended(*id, outcome.is_ok())),
            _ => true,
        });
        if self.agent.core.have_parcels_come() || anew {
            let core = &mut self.agent.core;
            boards.iter().for_each(|notes| lock(notes).hear(core, now));
        }
    }

    fn release(&mut self) {
        let now = self.agent.now();
        let core = &mut self.agent.core;
        self.releasing
            .retain(|key| core.release(key, now) == Ok(Progress::Busy));
    }
}

impl SimSeat {
    /// Leaves the group: nothing of it is heard any more.
    pub fn leave(&self) {
        let group = lock(&self.notes).group();
        let mut inside = self.agent.lock();
        inside.boards.retain(|notes| !Arc::ptr_eq(notes, &self.notes));
        inside.agent.core.drop_parcels(group);
        inside.agent.core.drop_parcels(group + 1);
    }
}

impl Seat for SimSeat {
    type Transport = dyn Transport;
    type Kernels = Reference;
    type Held = Region;
    type Came = VecMemory;

    fn now(&self) -> Time {
        self.agent.now()
    }
    fn act<R>(&self, change: impl FnOnce(&mut Core<dyn Transport>, Time) -> R) -> R {
        self.agent.act(change)
    }
    fn turn<R>(&self, look: impl FnOnce(&mut Core<dyn Transport>) -> R) -> R {
        let mut inside = self.agent.lock();
        inside.turn();
        look(&mut inside.agent.core)
    }
    fn look<R>(&self, look: impl FnOnce(&Core<dyn Transport>) -> R) -> R {
        look(&self.agent.lock().agent.core)
    }
    fn notes<R>(&self, change: impl FnOnce(&mut Notes) -> R) -> R {
        change(&mut lock(&self.notes))
    }
    fn kernels(&self) -> &Reference {
        &Reference
    }
    fn came(&self, bytes: Vec<u8>) -> VecMemory {
        VecMemory::new(bytes)
    }
    fn allocate(&self, bytes: usize) -> Option<Region> {
        let memory = Arc::new(VecMemory::zeroed(bytes));
        self.agent.lock().agent.core.register(memory, Place::DRAM).ok()
    }
    fn region(held: &Region) -> &Region {
        held
    }
}

fn lock(notes: &Mutex<Notes>) -> MutexGuard<'_, Notes> {
    notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use weft_plan::Rank;
    use weft_protocol::Epoch;
    use weft_protocol::agent::Target;
    use weft_protocol::group::conformance::Harness;
    use weft_protocol::group::{Exchange, Far};
    use weft_protocol::session::Secret;

    use super::*;
    use crate::agent::Birth;
    use crate::faults::Faults;
    use crate::transport::Fabric;
    use crate::world::World;

    /// Ranks on simulated links, each on a host of its own.
    struct OverLinks {
        faults: Faults,
        world: World,
        agents: Vec<SharedAgent>,
    }

    impl OverLinks {
        fn new(faults: Faults) -> OverLinks {
            OverLinks {
                faults,
                world: World::new(0, faults),
                agents: Vec::new(),
            }
        }

        fn pass(&self, time: Time) {
            self.world.run_until(self.world.now().saturating_add(time));
            self.agents.iter().for_each(|agent| drop(agent.turn()));
        }
    }

    impl Harness for OverLinks {
        fn ends(&mut self, ranks: u32) -> Vec<Box<dyn Exchange>> {
            self.agents.clear();
            self.world = World::new(7, self.faults);
            for rank in 0..ranks {
                let name = format!("rank{rank}");
                let birth = Birth {
                    node: self.world.add_node(&name, &name),
                    host: name.clone(),
                    name,
                    secret: Secret::new(b"simulated"),
                    epoch: Epoch(u64::from(rank) + 1),
                    rails: vec![Fabric::NETWORK],
                    paths: 2,
                    heartbeat: Time::from_ms(100),
                    silence_max: Time::from_secs(2),
                    clock: Time::ZERO,
                    device: false,
                };
                self.agents.push(SharedAgent::new(SimAgent::start(&self.world, &birth)));
            }
            let mut seats: Vec<SimSeat> = self
                .agents
                .iter()
                .map(|agent| agent.sit(Notes::new(8, ranks)))
                .collect();
            for (upper, lower) in (0..ranks).flat_map(|upper| (0..upper).map(move |lower| (upper, lower))) {
                let (near, far) = (&self.agents[upper as usize], &self.agents[lower as usize]);
                let address = far.act(|core, _| core.addresses()[0].clone());
                let to = near
                    .act(|core, now| core.connect(Target::at(address, now.saturating_add(Time::from_secs(5))), now));
                let to = to.expect("an address of this world");
                seats[upper as usize].notes(|notes| notes.knows(Rank(lower), to));
                let came = loop {
                    self.world.run_until(self.world.now().saturating_add(Time::from_us(50)));
                    near.turn();
                    let mut events = far.turn().into_iter();
                    let came = events.find_map(|event| match event {
                        Event::Connected { peer, .. } => Some(peer),
                        _ => None,
                    });
                    if let Some(came) = came {
                        break came;
                    }
                };
                seats[lower as usize].notes(|notes| notes.knows(Rank(upper), came));
                while !near.act(|core, _| core.is_connected(to)) {
                    self.pass(Time::from_us(50));
                }
            }
            seats
                .drain(..)
                .zip(0..)
                .map(|(seat, own)| {
                    let used: Vec<bool> = (0..ranks).map(|rank| rank != own).collect();
                    Box::new(Far::new(seat, &used, 2)) as Box<dyn Exchange>
                })
                .collect()
        }

        fn memory(&mut self, rank: Rank, len: u64) -> View {
            self.agents[rank.0 as usize].lend(&Arc::new(VecMemory::zeroed(len as usize)))
        }

        fn now(&mut self) -> Time {
            self.world.now()
        }

        fn idle(&mut self) {
            self.pass(Time::from_us(100));
        }
    }

    mod on_good_links {
        weft_protocol::exchange_conformance_tests!(super::OverLinks::new(super::Faults::NONE));
    }

    mod on_bad_links {
        weft_protocol::exchange_conformance_tests!(super::OverLinks::new(super::Faults {
            loss: 0.02,
            duplication: 0.02,
            delay: 0.02,
            ..super::Faults::NONE
        }));
    }
}
