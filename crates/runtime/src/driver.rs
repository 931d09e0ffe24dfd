//! Who turns the core, and who sleeps.
//!
//! One mutex guards the [`World`]; whoever holds it can turn it. A thread that waits for something turns it itself, so that a
//! reply is handled by the thread that wants it, without a hand-over. The progress thread turns it when nobody waits: it
//! looks for work for a short while (`spin`), then sleeps on the transports' descriptors and uses no CPU at all.
//!
//! While threads wait and turn, the progress thread only looks in now and then, because being woken by every packet would cost
//! the waiting threads the mutex. A thread that never stops turning can take over altogether ([`Turns`]): then there is one thread, as
//! in a program that polls its network card itself.

/// Asks whether the calling thread is wanted elsewhere; the wait looks at the answer in its next turn. Never with the world locked: the answer
/// may wait for an interpreter, or come from a handler that uses this very agent.
fn ask(watched: bool) {
    if watched {
        interrupt::is_due();
    }
}

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, TryLockError, Weak};
use std::task::Waker;
use std::thread::Thread;
use std::time::Duration;

use weft_fabric::bell::Bell;
use weft_fabric::fork::Origin;
use weft_fabric::{Clock, Live, cpu};
use weft_plan::Time;
use weft_protocol::agent::{AtomicId, Core, Event};
use weft_protocol::block::directory::Members;
use weft_protocol::hand_off::Station;
use weft_protocol::matched::Channels;
use weft_protocol::region::RegionKey;
use weft_protocol::session::LeaseId;
use weft_protocol::transfer::{PeerId, TransferId};
use weft_protocol::transport::Progress;

use crate::agent::RailCounters;
use crate::atomic::AtomicCell;
use crate::communicator::Inner as Group;
use crate::communicator::board::Board;
use crate::error::{AtomicFailed, Error, TransferFailed};
use crate::interrupt;
use crate::memory::{Registered, Registrations};
use crate::observe::Observer;
use crate::report::report;
use crate::transfer::Cell;

/// How often the progress thread looks in while others turn the core.
const LOOK_IN: Duration = Duration::from_micros(250);
/// For this long after the last waiting thread has left, the progress thread assumes that another comes.
const GRACE: Time = Time::from_us(200);
/// How long a caller that has posted something large takes to come back and wait for it, if it does.
const CALLER_RETURNS: Time = Time::from_us(10);
/// So many peers that are gone are remembered with the reason.
const GRAVES_MAX: usize = 1024;
/// How long an agent that goes waits for its last words to be heard.
const FAREWELL_MAX: Time = Time::from_ms(200);
/// How long a closing agent waits for what has been cancelled. A device that has not come to an end by then never will.
const TRANSFERS_END_MAX: Time = Time::from_secs(30);
/// Rounds of what has happened, and of what hand-offs make of it, before others get the mutex.
const SETTLE_ROUNDS_MAX: usize = 8;
/// How often a region that a peer was inside of is tried again.
const RELEASE_RETRY: Time = Time::from_ms(1);

/// All that an agent's threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) clock: Clock,
    pub(crate) spin: Time,
    pub(crate) observer: Observer,
    world: Mutex<World>,
    /// Signalled after events, while anybody sleeps on it.
    changed: Condvar,
    /// Threads that are turning the core because they wait for something.
    drivers: AtomicU32,
    /// Those that have taken over until further notice: the progress thread does not even look in.
    taken_over: AtomicU32,
    /// When the last of those that wait left.
    driven_until: AtomicU64,
    /// Until when the progress thread sleeps, on the agent's clock; 0 while it is awake.
    asleep_until: AtomicU64,
    bell: Bell,
    /// The progress thread, once it runs.
    progress: OnceLock<Thread>,
    stopping: AtomicBool,
}

/// What the mutex guards.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) core: Core<dyn Live>,
    pub(crate) peers: BTreeMap<PeerId, PeerState>,
    pub(crate) transfers: BTreeMap<TransferId, Arc<Cell>>,
    pub(crate) atomics: BTreeMap<AtomicId, Arc<AtomicCell>>,
    pub(crate) leases: BTreeMap<(PeerId, LeaseId), LeaseState>,
    notifications: VecDeque<(PeerId, String, Vec<u8>)>,
    arrivals: VecDeque<(PeerId, String, u32)>,
    /// Peers that are gone, oldest first.
    graves: VecDeque<PeerId>,
    /// Futures that wait for anything but the end of a transfer.
    pub(crate) wakers: Vec<Waker>,
    pub(crate) registrations: Registrations,
    /// What is published, by its name: it stays registered until it is withdrawn or the agent is closed.
    pub(crate) published: BTreeMap<String, Arc<Registered>>,
    /// The communicators of this agent, which end with it.
    pub(crate) groups: Vec<Weak<Group>>,
    /// One a group that this agent is in.
    pub(crate) boards: Vec<Arc<Board>>,
    /// What this agent hands off, if it does.
    pub(crate) station: Option<Station>,
    /// Its store's place among others, if it has one, and whoever is told that there is something for the store.
    pub(crate) members: Option<(Members, Waker)>,
    /// Its channels of messages that meet, if it has some.
    pub(crate) channels: Option<Channels>,
    /// What it wanted done is not all done.
    left_busy: bool,
    /// Regions to release that a peer was still inside of.
    pub(crate) releasing: Vec<RegionKey>,
    release_retry: Time,
    sleepers: u32,
    stopped: bool,
}

/// What this agent knows of a peer beyond what the core keeps.
#[derive(Clone, Debug)]
pub(crate) enum PeerState {
    Connecting,
    Connected { name: String },
    Gone(Error),
}

/// What must wait until the mutex is free.
#[derive(Debug, Default)]
struct Later {
    wake: Vec<Waker>,
    /// Ended transfers. With the last handle of one its memory may go, and releasing memory takes the mutex.
    spent: Vec<Arc<Cell>>,
    /// Whether sleeping threads have to be woken.
    sleepers: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseState {
    Asked,
    Held { until: Time },
    Refused(weft_protocol::Refusal),
    Ended,
}

impl World {
    pub(crate) fn new(core: Core<dyn Live>) -> World {
        World {
            core,
            peers: BTreeMap::new(),
            transfers: BTreeMap::new(),
            atomics: BTreeMap::new(),
            leases: BTreeMap::new(),
            notifications: VecDeque::new(),
            arrivals: VecDeque::new(),
            graves: VecDeque::new(),
            wakers: Vec::new(),
            registrations: Registrations::default(),
            published: BTreeMap::new(),
            groups: Vec::new(),
            boards: Vec::new(),
            station: None,
            members: None,
            channels: None,
            left_busy: false,
            releasing: Vec::new(),
            release_retry: Time::ZERO,
            sleepers: 0,
            stopped: false,
        }
    }

    /// One whole turn, whoever makes it. Returns what the core says of its progress, and whether anything has happened.
    fn turn(&mut self, shared: &Shared, now: Time, later: &mut Later) -> (Progress, bool) {
        let progress = self.core.pump(now);
        let any = self.settle(shared, now, later);
        self.retry_releases(now);
        let busy = std::mem::take(&mut self.left_busy);
        (if busy { Progress::Busy } else { progress }, any)
    }

    /// Enters what has happened, and notes what to do once the mutex is free. Returns whether anything has happened.
    fn settle(&mut self, shared: &Shared, now: Time, later: &mut Later) -> bool {
        let mut any = false;
        for round in 0.. {
            while let Some(event) = self.core.next_event() {
                any = true;
                self.on_event(event, shared, now, later);
            }
            // What hand-offs and channels want done goes out at once, and what comes of that is entered too.
            let core = &mut self.core;
            let handed_off = self.station.as_mut().is_some_and(|station| station.turn(core, now));
            let met = self.channels.as_mut().is_some_and(|channels| channels.turn(core, now));
            let stored = self.members.as_mut().is_some_and(|(members, bell)| {
                let any = members.turn(core, now);
                if members.machine.has_events() {
                    later.wake.push(bell.clone());
                }
                any
            });
            if !handed_off && !met && !stored {
                break;
            }
            any = true;
            self.left_busy |= self.core.push(now) == Progress::Busy;
            // Others want the mutex too: what is left is left to the next turn, which follows at once.
            if round >= SETTLE_ROUNDS_MAX {
                self.left_busy = true;
                break;
            }
        }
        if self.core.have_parcels_come() {
            any = true;
            let core = &mut self.core;
            self.boards.iter().for_each(|board| board.lock().hear(core, now));
        }
        if any {
            self.core.set_untaken(self.untaken());
            later.sleepers = self.sleepers > 0;
            later.wake.append(&mut self.wakers);
        }
        any
    }

    fn on_event(&mut self, event: Event, shared: &Shared, now: Time, later: &mut Later) {
        report(&shared.observer, self, &event, now);
        if let Some(station) = &mut self.station {
            station.on_event(&mut self.core, &event, now);
        }
        if let Some((members, _)) = &mut self.members {
            members.on_event(&mut self.core, &event, now);
        }
        if let Some(channels) = &mut self.channels
            && channels.on_event(&mut self.core, &event, now)
        {
            return;
        }
        match event {
            Event::Ended { id, outcome } => {
                if let Some(cell) = self.transfers.remove(&id) {
                    later.wake.extend(
                        cell.outcome
                            .end(outcome.map_err(|error| TransferFailed::new(&cell.peer, error).into())),
                    );
                    later.spent.push(cell);
                } else {
                    // One that a group reads a message by.
                    let mut boards = self.boards.iter();
                    boards.any(|board| board.lock().on_ended(id, outcome.is_ok()));
                }
            }
            Event::AtomicEnded { id, outcome } => {
                if let Some(cell) = self.atomics.remove(&id) {
                    let outcome = outcome.map_err(|error| AtomicFailed::new(&cell.peer, error).into());
                    later.wake.extend(cell.outcome.end(outcome));
                }
            }
            Event::Notified { peer, payload } => {
                let name = self.name_of(peer);
                self.notifications.push_back((peer, name, payload));
            }
            Event::Arrived { peer, number, .. } => {
                let name = self.name_of(peer);
                self.arrivals.push_back((peer, name, number));
            }
            Event::Connected { peer, identity, .. } => {
                self.peers.insert(peer, PeerState::Connected { name: identity.name });
            }
            Event::ConnectFailed { peer, error } => {
                self.bury(peer, error.into());
            }
            Event::PeerLost { peer, name, cause } => {
                for (_, state) in self.leases.iter_mut().filter(|((p, _), _)| *p == peer) {
                    *state = LeaseState::Ended;
                }
                self.bury(peer, Error::PeerLost { peer: name, cause });
            }
            Event::Leased { peer, lease, until } => self.lease(peer, lease, LeaseState::Held { until }),
            Event::LeaseRefused { peer, lease, refusal } => self.lease(peer, lease, LeaseState::Refused(refusal)),
            Event::LeaseEnded { peer, lease } => self.lease(peer, lease, LeaseState::Ended),
            // Read from the core when somebody asks.
            _ => {}
        }
    }

    fn lease(&mut self, peer: PeerId, lease: LeaseId, state: LeaseState) {
        // A lease whose asker has gone is given back at once.
        match self.leases.get_mut(&(peer, lease)) {
            Some(known) => *known = state,
            None if matches!(state, LeaseState::Held { .. }) => self.core.give_back(peer, lease, Time::ZERO),
            None => {}
        }
    }

    /// What asks something of an agent that has been closed is told so.
    pub(crate) fn check_running(&self) -> Result<(), Error> {
        if self.stopped { Err(Error::Stopped) } else { Ok(()) }
    }

    /// Forgets all names that memory is published by. What is given back may be the last that held the memory, and must go without the
    /// mutex: releasing memory takes it.
    #[must_use = "to be dropped when the mutex is free"]
    pub(crate) fn unpublish(&mut self, memory: &Arc<Registered>) -> Vec<Arc<Registered>> {
        let of_it = self
            .published
            .extract_if(.., |_, published| Arc::ptr_eq(published, memory));
        of_it.map(|(_, published)| published).collect()
    }

    /// The next notification that the application has not looked at.
    pub(crate) fn take_notification(&mut self) -> Option<(PeerId, String, Vec<u8>)> {
        let taken = self.notifications.pop_front();
        self.core.set_untaken(self.untaken());
        taken
    }

    /// The next arrival that the application has not looked at.
    pub(crate) fn take_arrival(&mut self) -> Option<(PeerId, String, u32)> {
        let taken = self.arrivals.pop_front();
        self.core.set_untaken(self.untaken());
        taken
    }

    /// The name of a peer that an event is about. The session may have ended in the turn that the event came of, but as long as events are taken in
    /// their order, its end has not been taken yet.
    fn name_of(&self, peer: PeerId) -> String {
        match self.peers.get(&peer) {
            Some(PeerState::Connected { name }) => name.clone(),
            _ => self
                .core
                .identity(peer)
                .map_or_else(String::new, |known| known.name.clone()),
        }
    }

    fn untaken(&self) -> usize {
        self.notifications.len() + self.arrivals.len()
    }

    /// Remembers why a peer is gone for as long as somebody may hold a handle of it and ask.
    fn bury(&mut self, peer: PeerId, reason: Error) {
        self.peers.insert(peer, PeerState::Gone(reason));
        self.graves.push_back(peer);
        if self.graves.len() > GRAVES_MAX
            && let Some(oldest) = self.graves.pop_front()
        {
            self.peers.remove(&oldest);
        }
    }

    /// Tries again to release what peers were still inside of.
    fn retry_releases(&mut self, now: Time) {
        if self.releasing.is_empty() || now < self.release_retry {
            return;
        }
        self.release_retry = now.saturating_add(RELEASE_RETRY);
        let core = &mut self.core;
        self.releasing
            .retain(|key| core.release(key, now) == Ok(Progress::Busy));
    }

    /// What the transports count.
    pub(crate) fn counters(&self) -> Vec<RailCounters> {
        let counted = self.core.slots().iter().map(|slot| {
            let capabilities = slot.transport.capabilities();
            RailCounters {
                transport: capabilities.name,
                address: capabilities.address.0.clone(),
                counts: slot.transport.counters(),
            }
        });
        counted.filter(|rail| !rail.counts.is_empty()).collect()
    }

    /// Tells every transport that the progress thread is about to sleep.
    fn arm(&mut self) -> Progress {
        let mut progress = Progress::Idle;
        for slot in self.core.slots_mut() {
            if slot.transport.arm() == Progress::Busy {
                progress = Progress::Busy;
            }
        }
        progress
    }

    fn next_timeout(&self) -> Option<Time> {
        let live = self
            .core
            .slots()
            .iter()
            .filter_map(|slot| slot.transport.next_timeout());
        live.chain(self.own_timeout()).min()
    }

    /// When it must be turned again if the transports have nothing to do before.
    fn own_timeout(&self) -> Option<Time> {
        let releases = (!self.releasing.is_empty()).then_some(self.release_retry);
        let hand_offs = self.station.as_ref().and_then(Station::next_timeout);
        let channels = self.channels.as_ref().and_then(Channels::next_timeout);
        let stores = self.members.as_ref().and_then(|(members, _)| members.next_timeout());
        let due = [releases, hand_offs, stores, channels, self.core.next_timeout()];
        due.into_iter().flatten().min()
    }
}

impl Shared {
    pub(crate) fn new(world: World, clock: Clock, spin: Time, observer: Observer) -> Result<Arc<Shared>, Error> {
        let watched = world.core.slots().iter().map(|slot| slot.transport.wake_fd());
        let bell = Bell::new(watched).map_err(Error::system("watching the transports"))?;
        Ok(Arc::new(Shared {
            clock,
            spin,
            observer,
            world: Mutex::new(world),
            changed: Condvar::new(),
            drivers: AtomicU32::new(0),
            taken_over: AtomicU32::new(0),
            driven_until: AtomicU64::new(0),
            asleep_until: AtomicU64::new(0),
            bell,
            progress: OnceLock::new(),
            stopping: AtomicBool::new(false),
        }))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, World> {
        // The core keeps its invariants between calls; a panic of one caller is not a reason to stop all others.
        self.world.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Changes the world and turns it just enough to get the change under way.
    pub(crate) fn act<T>(&self, change: impl FnOnce(&mut World, Time) -> T) -> T {
        let now = self.clock.now();
        let mut later = Later::default();
        let mut world = self.lock();
        let result = change(&mut world, now);
        let progress = world.core.push(now);
        world.settle(self, now, &mut later);
        // What a transport has taken on it shows by being busy, or, where others of its completions came in between, by its next timeout.
        let busy = std::mem::take(&mut world.left_busy) || progress == Progress::Busy;
        let ring = self.is_asleep() && busy || self.oversleeps(&world, true);
        drop(world);
        self.finish(&mut later);
        if ring {
            self.bell.ring();
        }
        result
    }

    /// Turns the world until `check` finds what the caller wants, the deadline passes, or the caller is wanted elsewhere.
    pub(crate) fn wait_until<T>(&self, deadline: Time, mut check: impl FnMut(&mut World) -> Option<T>) -> Option<T> {
        let mut driving = Driving::start(self);
        let mut spin_until = self.clock.now().saturating_add(self.spin);
        let mut later = Later::default();
        // Whether anything was done since the progress thread last heard when it is due.
        let mut stirred = false;
        let watched = interrupt::is_watched();
        loop {
            let mut world = self.lock();
            let now = self.clock.now();
            let (progress, any) = world.turn(self, now, &mut later);
            let found = check(&mut world);
            let active = progress == Progress::Busy || any;
            stirred |= active;
            if found.is_some() || now >= deadline || world.stopped || watched && interrupt::has_happened() {
                let ring = self.oversleeps(&world, stirred);
                drop(world);
                self.finish(&mut later);
                if ring {
                    self.bell.ring();
                }
                return found;
            }
            if active {
                spin_until = now.saturating_add(self.spin);
            }
            if any || now < spin_until || self.is_taken_over() {
                drop(world);
                self.finish(&mut later);
                cpu::look_again();
                ask(watched);
                continue;
            }
            // Nothing has happened for a while: leave the turning to the progress thread and sleep.
            world.sleepers += 1;
            driving.stop();
            if self.oversleeps(&world, std::mem::take(&mut stirred)) {
                self.bell.ring();
            }
            let mut left = Duration::from(deadline.saturating_sub(now));
            if watched {
                left = left.min(interrupt::ASK_EVERY);
            }
            let mut found = None;
            let sleeps_on = |world: &mut World| {
                found = check(world);
                found.is_none() && !world.stopped
            };
            let (mut world, _) = match self.changed.wait_timeout_while(world, left, sleeps_on) {
                Ok(woken) => woken,
                Err(poisoned) => poisoned.into_inner(),
            };
            world.sleepers -= 1;
            drop(world);
            if found.is_some() {
                return found;
            }
            ask(watched);
            driving = Driving::start(self);
            spin_until = self.clock.now();
        }
    }

    /// As [`wait_until`](Shared::wait_until), for what can come about without an event that would wake a sleeper: looks again
    /// every millisecond.
    pub(crate) fn wait_looking<T>(&self, deadline: Time, mut check: impl FnMut(&mut World) -> Option<T>) -> Option<T> {
        loop {
            let now = self.clock.now();
            let until = deadline.min(now.saturating_add(Time::from_ms(1)));
            let found = self.wait_until(until, &mut check);
            if found.is_some() || until == deadline || self.is_stopped() || interrupt::has_happened() {
                return found;
            }
        }
    }

    /// Why a wait for something has ended without it.
    pub(crate) fn in_vain(&self, what: impl FnOnce() -> String) -> Error {
        if self.is_stopped() {
            Error::Stopped
        } else if interrupt::has_happened() {
            Error::Interrupted
        } else {
            Error::TimedOut { what: what() }
        }
    }

    /// Has those who sleep look again, after a change that no event tells of.
    pub(crate) fn wake_sleepers(&self) {
        self.changed.notify_all();
    }

    /// One turn, for callers that poll.
    pub(crate) fn turn(&self) {
        let world = match self.world.try_lock() {
            Ok(world) => world,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Somebody else is turning it right now.
            Err(TryLockError::WouldBlock) => return,
        };
        let _driving = Driving::start(self);
        self.turn_once(world, |_| ());
    }

    /// One turn, and a look at what it has brought.
    pub(crate) fn turn_with<T>(&self, look: impl FnOnce(&mut World) -> T) -> T {
        let _driving = Driving::start(self);
        self.turn_once(self.lock(), look)
    }

    fn turn_once<T>(&self, mut world: MutexGuard<'_, World>, look: impl FnOnce(&mut World) -> T) -> T {
        let mut later = Later::default();
        let (progress, any) = world.turn(self, self.clock.now(), &mut later);
        let seen = look(&mut world);
        let ring = self.oversleeps(&world, progress == Progress::Busy || any);
        drop(world);
        self.finish(&mut later);
        if ring {
            self.bell.ring();
        }
        seen
    }

    /// Whether the progress thread would sleep past something that has come up since it fell asleep. Asked under the mutex, because
    /// it falls asleep under it.
    ///
    /// What a turn leaves undone, a transport shows by its descriptor, which wakes the sleeper without anybody's help, or by its next
    /// timeout. Those of all transports take longer to ask for, and move only when something is `stirred`.
    fn oversleeps(&self, world: &World, stirred: bool) -> bool {
        let asleep_until = self.asleep_until.load(Ordering::Relaxed);
        if asleep_until == 0 {
            return false;
        }
        let due = if stirred {
            world.next_timeout()
        } else {
            world.own_timeout()
        };
        due.is_some_and(|due| due.as_ns() < asleep_until)
    }

    fn is_asleep(&self) -> bool {
        self.asleep_until.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Tells every peer that this agent goes, and gives what was said before a moment to arrive.
    pub(crate) fn farewell(&self) {
        let open = |world: &World| -> Vec<PeerId> {
            let gone = |state: &PeerState| matches!(state, PeerState::Gone(_));
            world
                .peers
                .iter()
                .filter(|(_, state)| !gone(state))
                .map(|(peer, _)| *peer)
                .collect()
        };
        self.act(|world, now| open(world).into_iter().for_each(|peer| world.core.depart(peer, now)));
        let until = self.clock.now().saturating_add(FAREWELL_MAX);
        self.wait_until(until, |world| open(world).is_empty().then_some(()));
    }

    /// Cancels what is under way, and waits until nothing touches its memory: a device that is in the middle of a copy goes on with it, whoever has left.
    pub(crate) fn end_transfers(&self) {
        let until = self.clock.now().saturating_add(TRANSFERS_END_MAX);
        self.wait_until(until, |world| {
            let now = self.clock.now();
            for id in world.transfers.keys() {
                world.core.cancel(*id, now);
            }
            world.transfers.is_empty().then_some(())
        });
    }

    /// Ends the progress thread, every wait, every transfer and every atomic operation.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        let mut later = Later {
            sleepers: true,
            ..Later::default()
        };
        let mut world = self.lock();
        world.stopped = true;
        for cell in std::mem::take(&mut world.transfers).into_values() {
            later.wake.extend(cell.outcome.end(Err(Error::Stopped)));
            later.spent.push(cell);
        }
        for cell in std::mem::take(&mut world.atomics).into_values() {
            later.wake.extend(cell.outcome.end(Err(Error::Stopped)));
        }
        later.wake.append(&mut world.wakers);
        drop(world);
        self.finish(&mut later);
        self.bell.ring();
        self.unpark();
    }

    /// The body of the progress thread.
    pub(crate) fn run(&self) {
        let _ = self.progress.set(std::thread::current());
        let mut spin_until = self.clock.now();
        let mut later = Later::default();
        while !self.stopping.load(Ordering::Acquire) {
            if self.is_taken_over() {
                std::thread::park();
                continue;
            }
            if self.others_turn() {
                std::thread::park_timeout(LOOK_IN);
                continue;
            }
            let mut world = self.lock();
            let now = self.clock.now();
            let (progress, any) = world.turn(self, now, &mut later);
            if progress == Progress::Busy || any {
                spin_until = now.saturating_add(self.spin);
            }
            if now < spin_until {
                drop(world);
                self.finish(&mut later);
                cpu::look_again();
                continue;
            }
            // Transports that must ask to be woken do so now, and may find that it is too late to sleep.
            if world.arm() == Progress::Busy {
                drop(world);
                self.finish(&mut later);
                continue;
            }
            // Set under the mutex: whoever changes the world after this sees it and rings.
            let due = world.next_timeout().unwrap_or(Time::MAX);
            self.asleep_until.store(due.as_ns().max(1), Ordering::Relaxed);
            drop(world);
            self.finish(&mut later);
            let rung = self
                .bell
                .sleep((due != Time::MAX).then(|| due.saturating_sub(now).into()));
            self.asleep_until.store(0, Ordering::Relaxed);
            if rung {
                self.yield_to_caller();
            }
        }
    }

    /// Whoever has rung will often wait for what it posted, and then does the work itself without a hand-over: it gets the
    /// time to come back.
    fn yield_to_caller(&self) {
        let until = self.clock.now().saturating_add(CALLER_RETURNS);
        while self.drivers.load(Ordering::Relaxed) == 0 && self.clock.now() < until {
            cpu::look_again();
        }
    }

    fn is_taken_over(&self) -> bool {
        self.taken_over.load(Ordering::Acquire) > 0
    }

    fn unpark(&self) {
        if let Some(progress) = self.progress.get() {
            progress.unpark();
        }
    }

    fn others_turn(&self) -> bool {
        if self.drivers.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let until = self.driven_until.load(Ordering::Relaxed);
        until != 0 && self.clock.now() < Time::from_ns(until).saturating_add(GRACE)
    }

    /// Does what had to wait for the mutex to be free.
    fn finish(&self, later: &mut Later) {
        if std::mem::take(&mut later.sleepers) {
            self.changed.notify_all();
        }
        later.wake.drain(..).for_each(Waker::wake);
        later.spent.clear();
    }
}

/// Marks the calling thread as one that turns the core.
struct Driving<'a> {
    shared: &'a Shared,
    active: bool,
}

impl<'a> Driving<'a> {
    fn start(shared: &'a Shared) -> Driving<'a> {
        shared.drivers.fetch_add(1, Ordering::Relaxed);
        Driving { shared, active: true }
    }
    fn stop(&mut self) {
        if std::mem::take(&mut self.active) {
            self.shared.drivers.fetch_sub(1, Ordering::Relaxed);
            // Nobody follows: the progress thread takes over without waiting for the grace period, or for its next look.
            self.shared.driven_until.store(0, Ordering::Relaxed);
            self.shared.unpark();
        }
    }
}

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        if self.active {
            self.shared
                .driven_until
                .store(self.shared.clock.now().as_ns(), Ordering::Relaxed);
            self.shared.drivers.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The turning of an agent, taken over from its own thread: [`Agent::take_turns`](crate::Agent::take_turns).
#[derive(Debug)]
#[must_use = "the agent's own thread turns it again when this is dropped"]
pub struct Turns<'a> {
    /// Nobody's in a forked child.
    shared: Option<&'a Shared>,
    origin: Origin,
}

impl<'a> Turns<'a> {
    pub(crate) fn take(shared: Option<&'a Shared>) -> Turns<'a> {
        if let Some(shared) = shared {
            shared.taken_over.fetch_add(1, Ordering::AcqRel);
        }
        Turns {
            shared,
            origin: Origin::here(),
        }
    }

    /// One turn: what has come in is handled, what is waiting goes out, what is due is done. Nothing, in a forked child.
    pub fn turn(&self) {
        if let Some(shared) = self.shared() {
            shared.turn();
        }
    }

    fn shared(&self) -> Option<&'a Shared> {
        self.shared.filter(|_| self.origin.is_here())
    }
}

impl Drop for Turns<'_> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared() {
            shared.taken_over.fetch_sub(1, Ordering::AcqRel);
            shared.unpark();
        }
    }
}
