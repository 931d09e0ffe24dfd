//! A store among others: finds out who has what is not here, reads it from there, and lends what others read here.
//!
//! What decides is [`directory`](weft_protocol::block::directory), turned with the agent's core; what is here has the bytes, and keeps up the sessions.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;
use std::thread::JoinHandle;
use std::time::Duration;

use weft_plan::Time;
use weft_protocol::block::BlockId;
use weft_protocol::block::directory::{
    Counts as DirectoryCounts, Directory, Event, FetchId, Lent, LoanId, MemberStat, Members, Piece, QuestionId,
    Settings, Token, Wanted as Sought,
};
use weft_protocol::block::shelf::{Read, ReadId, Trouble, Verdict};
use weft_protocol::transfer::PeerId;

use super::calls::{Answer, GetOutcome};
use super::turn::{Bell, CallId, Cargo, Shared, State, span, sum_of};
use super::{Store, StoreError, tier};
use crate::agent::{Agent, parse_addresses};
use crate::driver::PeerState;
use crate::ending::Ending;
use crate::error::Error;
use crate::memory::Memory;
use crate::rendezvous::{Entry, Rendezvous, RendezvousError};

/// Names of stores at a rendezvous, beside those of agents.
const PREFIX: &str = "store/";
/// How long one attempt to reach a store takes, and how long after it the next is made.
const CONNECT_WITHIN: Duration = Duration::from_secs(3);
const AGAIN_AFTER: Duration = Duration::from_millis(500);
/// How long a place is asked for changes at a time, so that the end of the store is noticed.
const ASK_FOR: Duration = Duration::from_millis(500);

/// Which other stores to work with. Blocks of the same parts are found at, and read from, whoever has them.
#[derive(Clone, Debug)]
pub struct Peers {
    addresses: Vec<String>,
    place: Option<Arc<Rendezvous>>,
    window_blocks: u32,
    answer_within: Duration,
    read_within: Duration,
}

impl Peers {
    /// Those that come to this one.
    pub fn whoever_comes() -> Peers {
        let of = Settings::default();
        Peers {
            addresses: Vec::new(),
            place: None,
            window_blocks: 64,
            answer_within: of.answer_within.into(),
            read_within: of.read_within.into(),
        }
    }
    /// Those at these addresses, and those that come. Who is lost is sought again.
    pub fn at(addresses: impl IntoIterator<Item = impl Into<String>>) -> Peers {
        Peers {
            addresses: addresses.into_iter().map(Into::into).collect(),
            ..Peers::whoever_comes()
        }
    }
    /// Those that meet at this place: a directory, etcd, or another. It is told of this store once, and nothing of blocks.
    pub fn met_at(place: Rendezvous) -> Peers {
        Peers {
            place: Some(Arc::new(place)),
            ..Peers::whoever_comes()
        }
    }
    /// Those that meet where agents of these settings do (`rendezvous`); none, where they do not.
    pub fn met_by_settings(agent: &Agent) -> Result<Option<Peers>, Error> {
        Ok(Rendezvous::from_settings(agent.settings())?.map(Peers::met_at))
    }
    /// How many blocks of files others may be reading at a time, which takes as much memory.
    pub fn window_blocks(self, window_blocks: u32) -> Peers {
        Peers { window_blocks, ..self }
    }
    /// How long another store is waited for before the next one is asked.
    pub fn answer_within(self, answer_within: Duration) -> Peers {
        Peers { answer_within, ..self }
    }
    /// How long one read from another store may take before the next one is tried.
    pub fn read_within(self, read_within: Duration) -> Peers {
        Peers { read_within, ..self }
    }
}

/// Where a block is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Whereabouts {
    /// In which tiers here, as bits.
    pub here: u8,
    /// Which parts of it there are, here or elsewhere, as bits.
    pub parts: u8,
    /// The other stores that have it, by the names of their agents, with their tiers.
    pub elsewhere: Vec<(String, u8)>,
}

impl Whereabouts {
    pub fn is_there(&self) -> bool {
        self.here != 0 || !self.elsewhere.is_empty()
    }
}

/// The other stores in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MembersStat {
    pub members: Vec<MemberStat>,
    pub counts: DirectoryCounts,
    /// Blocks that others are told of, and blocks of others that are kept track of here.
    pub blocks: usize,
    pub entries: usize,
    /// Loans that others have now.
    pub lent: usize,
    /// Why new stores cannot be met now; those that are known go on.
    pub trouble: Option<String>,
}

/// What a store knows of its place among others.
#[derive(Debug)]
pub(super) struct Link {
    touched: Vec<BlockId>,
    fetches: HashMap<FetchId, FetchCall>,
    finds: HashMap<QuestionId, FindCall>,
    tokens: BTreeMap<Token, Kept>,
    lendings: BTreeMap<u64, LendCall>,
    landed: VecDeque<(LoanId, Memory, Vec<Piece>)>,
    window: Option<Memory>,
    free: Vec<u32>,
    given: u64,
    bell: Arc<MembersBell>,
    trouble: Option<String>,
    seeker: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

/// What keeps a block where another reads it.
#[derive(Debug)]
enum Kept {
    Slab(ReadId),
    Window(u32),
}

#[derive(Debug)]
struct LendCall {
    peer: PeerId,
    loan: u64,
    blocks: Vec<Option<(Lent, Token)>>,
    left: usize,
}

/// Blocks of a call that are sought elsewhere, and how many of them have not ended.
#[derive(Debug)]
struct FetchCall {
    call: CallId,
    nths: Vec<usize>,
    memory: Memory,
    left: usize,
}

#[derive(Debug)]
struct FindCall {
    here: Vec<(u8, u8)>,
    ending: Arc<Ending<Vec<Whereabouts>>>,
}

/// Rung by whoever turns the agent, when there is something for the store.
#[derive(Debug)]
struct MembersBell {
    bell: Arc<Bell>,
    rung: AtomicBool,
}

impl Wake for MembersBell {
    fn wake(self: Arc<MembersBell>) {
        self.rung.store(true, Ordering::Release);
        // Whoever waits turns the store, and soon.
        self.bell.clone().wake();
    }
}

impl Link {
    /// Takes its place among others, and begins to look for them.
    pub(super) fn open(shared: &Arc<Shared>, peers: Peers) -> Result<(), Error> {
        let agent = &shared.agent;
        let (slab, stride) = {
            let state = shared.lock();
            let stride = state.tiers[0].shelf.geometry().stride();
            (state.tiers[0].slab().cloned(), stride)
        };
        let has_files = shared.lock().tiers.iter().any(|tier| tier.slab().is_none());
        let slots = if has_files {
            peers.window_blocks.clamp(1, 1 << 16)
        } else {
            0
        };
        let window = match slots {
            0 => None,
            slots => Some(agent.allocate(slots as usize * stride as usize)?),
        };
        // Region 0 is the slab, region 1 the window; of a store without one of them the other is there twice.
        let first = slab.as_ref().or(window.as_ref()).ok_or(StoreError::NoTier)?;
        let second = window.as_ref().unwrap_or(first);
        let lends = match std::ptr::eq(first, second) {
            true => vec![first.inner.region.clone()],
            false => vec![first.inner.region.clone(), second.inner.region.clone()],
        };
        let settings = Settings {
            answer_within: peers.answer_within.into(),
            read_within: peers.read_within.into(),
            ..Settings::default()
        };
        let mut salt = [0; 8];
        getrandom::fill(&mut salt).expect("the operating system gives randomness");
        let machine = Directory::new(
            agent.name(),
            agent.epoch(),
            &shared.shape,
            settings,
            u64::from_le_bytes(salt),
        );
        let bell = Arc::new(MembersBell {
            bell: shared.bell.clone(),
            rung: AtomicBool::new(true),
        });
        let mut link = Link {
            touched: shared.lock().all_blocks(),
            fetches: HashMap::new(),
            finds: HashMap::new(),
            tokens: BTreeMap::new(),
            lendings: BTreeMap::new(),
            landed: VecDeque::new(),
            window,
            free: (0..slots).rev().collect(),
            given: 0,
            bell: bell.clone(),
            trouble: None,
            seeker: None,
        };
        agent.shared()?.act(|world, now| {
            world.check_running()?;
            if world.members.is_some() {
                return Err(Error::from(StoreError::AmongOthersAlready));
            }
            let connected = world.peers.iter();
            let connected = connected.filter(|(_, state)| matches!(state, PeerState::Connected { .. }));
            let peers: Vec<PeerId> = connected.map(|(peer, _)| *peer).collect();
            let members = Members::open(&mut world.core, machine, lends, peers, now).map_err(StoreError::from)?;
            world.members = Some((members, bell.into()));
            Ok(())
        })?;
        if !peers.addresses.is_empty() || peers.place.is_some() {
            let stop = Arc::new(AtomicBool::new(false));
            let seeker = Seeker {
                agent: agent.clone(),
                shared: Arc::downgrade(shared),
                stop: stop.clone(),
                peers,
            };
            let spawned = std::thread::Builder::new()
                .name("weft-members".to_owned())
                .spawn(move || seeker.run());
            link.seeker = Some((
                stop,
                spawned.map_err(Error::system("starting the thread that looks for stores"))?,
            ));
        }
        shared.lock().link = Some(link);
        shared.bell.ring();
        Ok(())
    }
}

impl Link {
    pub(super) fn is_fetching(&self) -> bool {
        !self.fetches.is_empty()
    }
    pub(super) fn has_landed(&self) -> bool {
        !self.landed.is_empty()
    }
}

impl State {
    /// Others may have to be told of a block.
    pub(super) fn touch(&mut self, id: BlockId) {
        if let Some(link) = &mut self.link {
            link.touched.push(id);
        }
    }

    fn all_blocks(&self) -> Vec<BlockId> {
        let ids = self.tiers.iter().flat_map(|tier| tier.shelf.ids());
        ids.collect()
    }

    /// In which tiers a block is and with which parts, as bits.
    fn whereabouts(&self, id: &BlockId) -> (u8, u8) {
        let mut found = (0, 0);
        for (nth, tier) in self.tiers.iter().enumerate() {
            let parts = tier.shelf.parts_of(id);
            if parts != 0 {
                found = (found.0 | 1 << nth, if found.1 == 0 { parts } else { found.1 });
            }
        }
        found
    }
}

impl Shared {
    /// Changes something at the store's place among others; nothing, where it has none.
    fn with_members<T>(&self, change: impl FnOnce(&mut Members, Time) -> T) -> Option<T> {
        let shared = self.agent.shared().ok()?;
        shared.act(|world, now| world.members.as_mut().map(|(members, _)| change(members, now)))
    }

    /// Looks for blocks of a call that are not here at the other stores. `false`: there are none.
    pub(super) fn look_elsewhere(&self, state: &mut State, call: CallId, nths: &[usize]) -> bool {
        let Some(link) = &mut state.link else { return false };
        let Some(get) = state.gets.get(&call) else { return false };
        let sought: Vec<Sought> = nths
            .iter()
            .map(|nth| Sought {
                id: get.wanted[*nth].id,
                offset: get.wanted[*nth].offset,
                room: self.block_bytes,
            })
            .collect();
        let near = get.memory.inner.region.clone();
        let deadline = Time::from(self.deadline);
        let fetch = self.with_members(|members, now| {
            let any = members.machine.members().next().is_some();
            any.then(|| members.fetch(near, &sought, now.saturating_add(deadline), now))
        });
        let Some(Some(fetch)) = fetch else { return false };
        let sought = FetchCall {
            call,
            nths: nths.to_vec(),
            memory: get.memory.clone(),
            left: nths.len(),
        };
        link.fetches.insert(fetch, sought);
        true
    }

    /// Tells the others what has changed, and does what they want.
    pub(super) fn turn_members(&self, state: &mut State) {
        let Some(link) = &mut state.link else { return };
        let rung = link.bell.rung.swap(false, Ordering::AcqRel);
        if !rung && link.touched.is_empty() {
            return;
        }
        let touched = std::mem::take(&mut link.touched);
        let told: Vec<(BlockId, (u8, u8))> = touched.iter().map(|id| (*id, state.whereabouts(id))).collect();
        let events = self.with_members(|members, _| {
            for (id, (tiers, parts)) in told {
                members.machine.set(id, tiers, parts);
            }
            std::iter::from_fn(|| members.machine.next_event()).collect::<Vec<_>>()
        });
        for event in events.into_iter().flatten() {
            self.on_member_event(state, event);
        }
    }

    fn on_member_event(&self, state: &mut State, event: Event) {
        let Some(link) = &mut state.link else { return };
        match event {
            Event::Asked { peer, loan, ids } => self.lend(state, peer, loan, &ids),
            Event::Free { token } => self.free(state, token),
            Event::Landed { loan, fetch, blocks } => {
                if let Some(sought) = link.fetches.get(&fetch) {
                    link.landed.push_back((loan, sought.memory.clone(), blocks));
                }
            }
            Event::Fetched { fetch, nth, ended } => {
                let Some(sought) = link.fetches.get_mut(&fetch) else {
                    return;
                };
                let (call, nth) = (sought.call, sought.nths[nth]);
                sought.left -= 1;
                if sought.left == 0 {
                    link.fetches.remove(&fetch);
                }
                let outcome = match ended {
                    Ok(fetched) => GetOutcome::Elsewhere {
                        peer: fetched.from,
                        tier: fetched.tier.into(),
                        parts: fetched.parts,
                        bytes: fetched.length,
                    },
                    Err(_) => {
                        state.misses += 1;
                        GetOutcome::Miss
                    }
                };
                self.settle_get(state, call, nth, outcome);
            }
            Event::Found { question, found } => {
                let Some(find) = link.finds.remove(&question) else {
                    return;
                };
                let name = |peer: &PeerId| {
                    let world = self.agent.shared().ok()?.lock();
                    world.core.identity(*peer).map(|identity| identity.name.clone())
                };
                let whereabouts = find
                    .here
                    .iter()
                    .zip(&found)
                    .map(|((here, parts), holders)| Whereabouts {
                        here: *here,
                        parts: match (*parts, holders.first()) {
                            (0, Some(holder)) => holder.parts,
                            (parts, _) => parts,
                        },
                        elsewhere: holders
                            .iter()
                            .filter_map(|holder| Some((name(&holder.peer)?, holder.tiers)))
                            .collect(),
                    });
                find.ending.end_and_wake(Ok(whereabouts.collect()));
            }
            Event::Doubted { ids } => {
                let now = self.now();
                for id in ids {
                    // What is lent from a file was summed here before.
                    let Some(slab) = state.tiers[0].slab().cloned() else {
                        return;
                    };
                    if let Some(read) = state.tiers[0].shelf.read(&id, now) {
                        let sum = sum_of(&slab, read.offset, read.length);
                        let _ = state.tiers[0].shelf.end_read(read.read, sum, now);
                        state.touch(id);
                    }
                }
            }
            Event::Joined { peer, name } => tracing::info!(name, peer = peer.0, "a store has come"),
            Event::Left { peer, name } => tracing::info!(name, peer = peer.0, "a store has gone"),
            _ => {}
        }
    }

    /// Sums what has landed, without the lock.
    pub(super) fn sum_landed(&self) -> bool {
        let Some((loan, memory, blocks)) = self.lock().link.as_mut().and_then(|link| link.landed.pop_front()) else {
            return false;
        };
        let sum = |piece: &Piece| sum_of(&memory, piece.offset, piece.length).ok();
        let sums: Vec<Option<u64>> = blocks.iter().map(sum).collect();
        self.with_members(|members, now| members.machine.summed(loan, &sums, now));
        if let Some(link) = &self.lock().link {
            link.bell.rung.store(true, Ordering::Release);
        }
        true
    }

    /// Whether something is under way that other stores have to do with.
    pub(super) fn awaits_members(&self) -> bool {
        let state = self.lock();
        let waits = |link: &Link| !link.fetches.is_empty() || !link.finds.is_empty();
        state.link.as_ref().is_some_and(waits)
    }

    /// Turns the agent until there is something for the store to do.
    pub(super) fn wait_for_members(&self, timeout: Duration) {
        if let Ok(shared) = self.agent.shared() {
            let until = shared.clock.now().saturating_add(timeout.into());
            let told = shared.wait_until(until, |world| {
                let (members, _) = world.members.as_ref()?;
                members.machine.has_events().then_some(())
            });
            if told.is_some()
                && let Some(link) = &self.lock().link
            {
                link.bell.rung.store(true, Ordering::Release);
            }
        }
    }

    fn lend(&self, state: &mut State, peer: PeerId, loan: u64, ids: &[BlockId]) {
        let now = self.now();
        let Some(mut link) = state.link.take() else { return };
        link.given += 1;
        let call = link.given;
        let mut lending = LendCall {
            peer,
            loan,
            blocks: vec![None; ids.len()],
            left: 0,
        };
        for (nth, id) in ids.iter().enumerate() {
            for tier in 0..state.tiers.len() {
                let is_slab = state.tiers[tier].slab().is_some();
                if !is_slab && link.free.is_empty() {
                    continue;
                }
                let Some(read) = state.tiers[tier].shelf.read(id, now) else {
                    continue;
                };
                let lent = lent(&state.tiers[tier], tier, &read);
                if is_slab {
                    link.given += 1;
                    let token = Token(link.given);
                    link.tokens.insert(token, Kept::Slab(read.read));
                    lending.blocks[nth] = Some((lent, token));
                    break;
                }
                let slot = link.free.pop().expect("a slot that is free");
                let window = link.window.clone().expect("slots are of a window");
                let stride = state.tiers[0].shelf.geometry().stride();
                let at = u64::from(slot) * stride;
                let region = u8::from(state.tiers[0].slab().is_some());
                let lent = Lent {
                    region,
                    offset: at,
                    ..lent
                };
                let data = state.tiers[tier].data(read.extent).clone();
                let (near, far) = (span(read.offset, read.length), span(at, read.length));
                match self.post(&data, near, &window, far, false) {
                    Ok(transfer) => {
                        lending.left += 1;
                        let cargo = Cargo::Lend {
                            tier,
                            read,
                            lend: Lend { call, nth, slot, lent },
                        };
                        self.fly(state, transfer, cargo);
                        break;
                    }
                    Err(trouble) => {
                        let _ = state.tiers[tier].shelf.end_read(read.read, Err(trouble), now);
                        link.free.push(slot);
                    }
                }
            }
        }
        link.lendings.insert(call, lending);
        state.link = Some(link);
        self.finish_lending(state, call);
    }

    fn finish_lending(&self, state: &mut State, call: u64) {
        let Some(link) = &mut state.link else { return };
        if link.lendings.get(&call).is_some_and(|lending| lending.left == 0)
            && let Some(LendCall { peer, loan, blocks, .. }) = link.lendings.remove(&call)
        {
            self.with_members(|members, now| members.machine.lend(peer, loan, blocks, now));
            link.bell.rung.store(true, Ordering::Release);
        }
    }

    /// What the sum of a block in the window is.
    pub(super) fn sum_lent(&self, lend: &Lend, read: &Read) -> Result<u64, Trouble> {
        let window = self.lock().link.as_ref().and_then(|link| link.window.clone());
        sum_of(&window.ok_or(Trouble::Refused)?, lend.lent.offset, read.length)
    }

    /// A block of a file is in the window, or is not.
    pub(super) fn on_lent(&self, state: &mut State, tier: usize, read: &Read, lend: Lend, sum: Result<u64, Trouble>) {
        let verdict = state.tiers[tier].shelf.end_read(read.read, sum, self.now());
        if verdict != Verdict::Right {
            state.touch(read.id);
        }
        let Some(link) = &mut state.link else { return };
        let Some(lending) = link.lendings.get_mut(&lend.call) else {
            return;
        };
        lending.left -= 1;
        match verdict {
            Verdict::Right => {
                link.given += 1;
                let token = Token(link.given);
                link.tokens.insert(token, Kept::Window(lend.slot));
                lending.blocks[lend.nth] = Some((lend.lent, token));
            }
            _ => link.free.push(lend.slot),
        }
        self.finish_lending(state, lend.call);
    }

    fn free(&self, state: &mut State, token: Token) {
        let Some(link) = &mut state.link else { return };
        match link.tokens.remove(&token) {
            Some(Kept::Slab(read)) => state.tiers[0].shelf.drop_read(read),
            Some(Kept::Window(slot)) => link.free.push(slot),
            None => {}
        }
    }

    /// Leaves the other stores. What is being read from them is waited for, for a while.
    pub(super) fn leave_members(&self) {
        let Some(mut link) = self.lock().link.take() else {
            return;
        };
        if let Some((stop, seeker)) = link.seeker.take() {
            stop.store(true, Ordering::Release);
            seeker.thread().unpark();
            if seeker.thread().id() != std::thread::current().id() {
                let _ = seeker.join();
            }
        }
        if let Ok(shared) = self.agent.shared() {
            let members = shared.act(|world, now| {
                let (mut members, _) = world.members.take()?;
                let busy = members.close(&mut world.core, now);
                world.releasing.extend(busy);
                Some(members)
            });
            drop(members);
        }
        let finds = link.finds.into_values();
        finds.for_each(|find| find.ending.end_and_wake(Err(Error::Stopped)));
    }
}

/// What is read from a file for another store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lend {
    call: u64,
    nth: usize,
    slot: u32,
    lent: Lent,
}

fn lent(tier: &tier::Tier, nth: usize, read: &Read) -> Lent {
    let (sequence, sum) = tier.shelf.sum_of(read.read).expect("it is being read");
    Lent {
        region: 0,
        tier: nth as u8,
        parts: read.parts,
        length: read.length,
        offset: read.offset,
        sequence,
        sum,
    }
}

impl Store {
    /// Where blocks are, here and at the other stores: asked of those that know, at once for all of them. Nobody is said to have a block longer than the session with it
    /// takes to notice that it is dead.
    pub fn find(&self, chain: &[BlockId]) -> Result<Answer<Vec<Whereabouts>>, Error> {
        let shared = self.shared()?;
        let ending = Arc::new(Ending::default());
        let answer = Answer {
            shared: self.inner.shared.clone(),
            ending: ending.clone(),
        };
        let mut state = shared.lock();
        let here: Vec<(u8, u8)> = chain.iter().map(|id| state.whereabouts(id)).collect();
        let asked = match &state.link {
            Some(_) => shared.with_members(|members, now| members.machine.find(chain, now)),
            None => None,
        };
        let call = FindCall { here, ending };
        match (asked, &mut state.link) {
            (Some(question), Some(link)) => {
                link.finds.insert(question, call);
                link.bell.rung.store(true, Ordering::Release);
            }
            _ => {
                let alone = call.here.iter().map(|(here, parts)| Whereabouts {
                    here: *here,
                    parts: *parts,
                    elsewhere: Vec::new(),
                });
                call.ending.end_and_wake(Ok(alone.collect()));
            }
        }
        shared.turn_members(&mut state);
        drop(state);
        Ok(answer)
    }

    /// How many blocks of a chain, from the first on, are a hit with what was found.
    pub fn hit(&self, found: &[Whereabouts]) -> Result<usize, Error> {
        let shared = self.shared()?;
        let parts = |there: &Whereabouts| if there.is_there() { there.parts } else { 0 };
        Ok(shared.shape.hit(found.iter().map(parts)))
    }

    /// The other stores; none, where this one works alone.
    pub fn members(&self) -> Result<Option<MembersStat>, Error> {
        let shared = self.shared()?;
        let trouble = match &shared.lock().link {
            Some(link) => link.trouble.clone(),
            None => return Ok(None),
        };
        Ok(shared.with_members(|members, _| MembersStat {
            members: members.machine.members().collect(),
            counts: members.machine.counts(),
            blocks: members.machine.blocks(),
            entries: members.machine.entries(),
            lent: members.machine.lent(),
            trouble,
        }))
    }
}

/// Looks for other stores, and keeps up the sessions with them.
struct Seeker {
    agent: Agent,
    shared: std::sync::Weak<Shared>,
    stop: Arc<AtomicBool>,
    peers: Peers,
}

impl Seeker {
    fn run(self) {
        let name = format!("{PREFIX}{}", self.agent.name());
        let (mut held, mut known): (_, Vec<Entry>) = (None, Vec::new());
        while !self.stop.load(Ordering::Acquire) {
            let mut trouble = None;
            if let Some(place) = &self.peers.place {
                if held.is_none() {
                    match place.register(&name, &self.agent.address(), self.agent.epoch()) {
                        Ok(registration) => held = Some(registration),
                        Err(error) => trouble = Some(error.to_string()),
                    }
                }
                match self.ask(place, &known) {
                    Ok(entries) => known = entries,
                    Err(error) => trouble = Some(error.to_string()),
                }
            }
            let own = self.agent.address();
            let mut missing = Vec::new();
            for entry in &known {
                let other = entry.name.strip_prefix(PREFIX);
                // Of two that know of each other the first goes to the second.
                if other.is_some_and(|other| other > self.agent.name() && !self.is_connected(&entry.address)) {
                    missing.push(entry.address.clone());
                }
            }
            let addresses = self.peers.addresses.iter();
            missing.extend(
                addresses
                    .filter(|address| **address != own && !self.is_connected(address))
                    .cloned(),
            );
            for address in missing {
                if self.stop.load(Ordering::Acquire) {
                    return;
                }
                if let Err(error) = self.agent.connect_within(&address, CONNECT_WITHIN) {
                    trouble.get_or_insert_with(|| error.to_string());
                }
            }
            let Some(shared) = self.shared.upgrade() else { return };
            if let Some(link) = &mut shared.lock().link {
                link.trouble = trouble;
            }
            drop(shared);
            if self.peers.place.is_none() {
                std::thread::park_timeout(AGAIN_AFTER);
            }
        }
    }

    fn ask(&self, place: &Rendezvous, known: &[Entry]) -> Result<Vec<Entry>, RendezvousError> {
        let asked = place.list_changed(known, ASK_FOR);
        if asked.is_err() {
            std::thread::park_timeout(AGAIN_AFTER);
        }
        asked
    }

    /// Whether an agent that says it is at this address has a session with this one.
    fn is_connected(&self, address: &str) -> bool {
        let (Ok(shared), Ok(wanted)) = (self.agent.shared(), parse_addresses(address)) else {
            return false;
        };
        let world = shared.lock();
        world.peers.iter().any(|(peer, state)| {
            let identity = matches!(state, PeerState::Connected { .. }).then(|| world.core.identity(*peer));
            let addresses = identity
                .flatten()
                .map(|identity| &identity.addresses[..])
                .unwrap_or_default();
            addresses.iter().any(|known| wanted.contains(known))
        })
    }
}
