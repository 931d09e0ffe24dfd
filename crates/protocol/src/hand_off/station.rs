//! A worker's hand-offs on its agent: carries out what the machine wants, by parcels, transfers and regions of a [`Core`].
//!
//! The runtime and the simulator turn the same station. Whoever turns the core hands it the core's events and then a [turn](Station::turn).

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use thiserror::Error;
use weft_plan::{Place, Time};

use super::machine::WORDS;
use super::talk::{Heard, Life, Talk, Word};
use super::{Act, Far, HandOffs, Move, MoveError, MoveId, Moved, Near, SLOTS};
use crate::agent::{ConnectError, Core, Event, Parcel, PeerError, RegionError, Target};
use crate::atomic::AtomicAct;
use crate::error::Refusal;
use crate::leg::Leg;
use crate::memory::Memory;
use crate::region::{Access, Region, RegionKey, RemoteRegion};
use crate::transfer::{PeerId, Request, SubmitError, Summary, TransferError, TransferId};
use crate::transport::{PeerAddress, Progress, Transport};

/// Which parcels are about hand-offs.
pub const PARCELS: u64 = u64::from_le_bytes(*b"hand-off");

/// A region was published before it was spoken of, so one that is not known by then does not come.
const REGION_WITHIN: Time = Time::from_secs(5);
/// How often a landing place that somebody is inside of is tried again, and what a peer could not be told.
const AGAIN_AFTER: Time = Time::from_ms(1);
/// Parcels that are looked at in one turn.
const PARCELS_PER_TURN: usize = 256;

/// Where memory to land in comes from.
pub trait Room: Send {
    /// Memory of at least so many bytes, all of them zero.
    fn make(&mut self, bytes: u64) -> Option<(Arc<dyn Memory>, Place)>;
}

/// Why there is no station.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StationError {
    #[error("there is no memory for the table of leases")]
    NoMemory,
    #[error("the cache speaks of {wanted} regions, and {given} were given")]
    Regions { wanted: usize, given: usize },
    #[error("layer {layer} ends at byte {end} of a region of {len} bytes")]
    OutOfBounds { layer: String, end: u64, len: u64 },
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Carries out what a [`HandOffs`] decides, over an agent's core.
pub struct Station {
    pub machine: HandOffs,
    cache: Vec<Region>,
    table: Region,
    words: Region,
    life: Life,
    room: Box<dyn Room>,
    transfers: BTreeMap<TransferId, MoveId>,
    /// It is about to be closed, and begins no more moves.
    ending: bool,
    by_move: BTreeMap<MoveId, (TransferId, Option<u32>)>,
    /// Moves whose far region is not known yet, the station that is to publish it, and until when it is waited for.
    waiting: Vec<(Move, u64, Time)>,
    /// Parcels that were taken and not looked at.
    come: VecDeque<Parcel>,
    talks: BTreeMap<PeerId, Talk>,
    /// Those of which something could not be said yet.
    behind: BTreeSet<PeerId>,
    landings: BTreeMap<u64, Region>,
    leaving: Vec<(u64, Region)>,
    again_at: Time,
    more_parcels: bool,
}

impl Station {
    /// Publishes the cache, whose regions have been registered and are given in the order in which layers speak of them, and begins to listen. `peers`: those that
    /// are connected already.
    pub fn open<T: ?Sized + Transport>(
        core: &mut Core<T>,
        machine: HandOffs,
        cache: Vec<Region>,
        mut room: Box<dyn Room>,
        peers: impl IntoIterator<Item = (PeerId, String)>,
        now: Time,
    ) -> Result<Station, StationError> {
        for layer in machine.cache().layers() {
            let given = cache.len();
            let region = cache.get(layer.region as usize);
            let region = region.ok_or(StationError::Regions {
                wanted: layer.region as usize + 1,
                given,
            })?;
            let (end, len) = (layer.pages.end(), region.memory.len());
            if end > len {
                let layer = layer.name.clone();
                return Err(StationError::OutOfBounds { layer, end, len });
            }
        }
        let table = register(core, &mut *room, 8 * u64::from(SLOTS))?;
        let words = match register(core, &mut *room, 8 * u64::from(WORDS)) {
            Ok(words) => words,
            Err(error) => {
                let _ = core.release(&table.key, now);
                return Err(error);
            }
        };
        // Past every stamp of an earlier life, so that nobody takes this one's bytes for those of a prompt that was held then.
        let first: Vec<u8> = machine.first_word.to_le_bytes().repeat(SLOTS as usize);
        table.memory.bytes().write(0, &first);
        let life = Life::of(table.key.secret);
        if let Err(error) = publish_all(core, life, &table, &cache, now) {
            // Whatever of it was published no peer has heard of, so none is inside.
            for nth in 0..cache.len() as u32 {
                let _ = core.withdraw(&far_name(life.station(), Far::Cache(nth)), now);
            }
            for own in [&table, &words] {
                let _ = core.release(&own.key, now);
            }
            return Err(error.into());
        }
        core.open_parcels(PARCELS);
        let mut station = Station {
            machine,
            cache,
            table,
            words,
            life,
            room,
            transfers: BTreeMap::new(),
            ending: false,
            by_move: BTreeMap::new(),
            waiting: Vec::new(),
            come: VecDeque::new(),
            talks: BTreeMap::new(),
            behind: BTreeSet::new(),
            landings: BTreeMap::new(),
            leaving: Vec::new(),
            again_at: Time::ZERO,
            more_parcels: false,
        };
        for (peer, name) in peers {
            station.meet(core, peer, &name, now);
        }
        Ok(station)
    }

    /// Begins no more moves, and cancels those that are under way. Whether none is any more, so that nothing touches the cache: whoever wants it back turns the agent
    /// until then, and closes the station.
    pub fn end_moves<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) -> bool {
        self.ending = true;
        for transfer in self.transfers.keys() {
            core.cancel(*transfer, now);
        }
        self.transfers.is_empty()
    }

    /// Whether it [begins no more moves](Station::end_moves).
    pub fn is_ending(&self) -> bool {
        self.ending
    }

    /// Hears and publishes nothing more. Says which regions somebody is still inside of: they are to be [released](Core::release) again.
    pub fn close<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) -> Vec<RegionKey> {
        self.end_moves(core, now);
        core.drop_parcels(PARCELS);
        let mut busy = Vec::new();
        for nth in 0..self.cache.len() {
            let name = far_name(self.life.station(), Far::Cache(nth as u32));
            if let Ok((key, Progress::Busy)) = core.withdraw(&name, now) {
                busy.push(key);
            }
        }
        let landings = self
            .landings
            .values()
            .chain(self.leaving.iter().map(|(_, region)| region));
        let own = landings.chain([&self.table, &self.words]).map(|region| region.key);
        busy.extend(own.filter(|key| core.release(key, now) == Ok(Progress::Busy)));
        busy
    }

    /// The memory that a prompt has landed in, to copy it from.
    pub fn landing(&self, number: u64) -> Option<&Region> {
        self.landings.get(&number)
    }
    /// A region of the cache.
    pub fn region(&self, number: u32) -> Option<&Region> {
        self.cache.get(number as usize)
    }

    /// Hears what has happened at the agent.
    pub fn on_event<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, event: &Event, now: Time) {
        match event {
            Event::Connected { peer, identity, .. } => self.meet(core, *peer, &identity.name, now),
            Event::ConnectFailed { peer, error } => self.machine.on_connect_failed(*peer, error.clone(), now),
            Event::PeerLost { peer, .. } => {
                // Its last words have come before its end.
                self.come.extend(std::iter::from_fn(|| core.next_parcel(PARCELS)));
                let (last, others) = std::mem::take(&mut self.come)
                    .into_iter()
                    .partition(|parcel| parcel.from == *peer);
                self.come = others;
                let last: VecDeque<Parcel> = last;
                last.iter().for_each(|parcel| self.hear(core, parcel, now));
                self.talks.remove(peer);
                self.behind.remove(peer);
                self.machine.on_lost(*peer, now);
            }
            Event::Ended { id, outcome } => {
                if let Some(moved) = self.transfers.remove(id) {
                    self.on_ended(moved, outcome, now);
                }
            }
            _ => {}
        }
    }

    /// Takes what has come, does what is due and what the machine wants. `true`: something has happened.
    pub fn turn<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) -> bool {
        let mut any = false;
        for _ in 0..PARCELS_PER_TURN {
            let Some(parcel) = self.come.pop_front().or_else(|| core.next_parcel(PARCELS)) else {
                break;
            };
            self.hear(core, &parcel, now);
            any = true;
        }
        self.more_parcels = !self.come.is_empty() || core.has_parcels(PARCELS);
        if self.machine.next_timeout().is_some_and(|due| due <= now) {
            self.machine.on_time(now);
            any = true;
        }
        if self.again_at <= now {
            self.again_at = now.saturating_add(AGAIN_AFTER);
            self.leave_landings(core, now);
            let behind = std::mem::take(&mut self.behind);
            behind.into_iter().for_each(|peer| self.say_unsaid(core, peer, now));
        }
        for (waiting, station, until) in std::mem::take(&mut self.waiting) {
            self.start(core, waiting, station, until, now);
        }
        self.carry_out_all(core, now) || any
    }

    fn carry_out_all<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) -> bool {
        let mut any = false;
        while let Some(act) = self.machine.next_act() {
            any = true;
            self.carry_out(core, act, now);
        }
        any
    }

    /// Greets a peer that it does not know yet.
    fn meet<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, name: &str, now: Time) {
        if !self.talks.contains_key(&peer) {
            self.talks.insert(peer, Talk::new(name, self.life));
            self.say_unsaid(core, peer, now);
        }
    }

    fn hear<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, parcel: &Parcel, now: Time) {
        let peer = parcel.from;
        if let Some(name) = core.identity(peer).map(|identity| identity.name.clone()) {
            self.meet(core, peer, &name, now);
        }
        let Some(word) = Word::open(parcel.payload()) else {
            return self.begin_anew(core, peer, now);
        };
        if self.talks.get(&peer).is_some_and(|talk| talk.their != Some(word.from)) {
            // What was wanted of whoever was there before is not wanted of this one.
            self.carry_out_all(core, now);
            let here = word.from.station();
            let mine = |(wanted, station, _): &mut (Move, u64, Time)| wanted.peer == peer && *station != here;
            for (gone, ..) in self.waiting.extract_if(.., mine).collect::<Vec<_>>() {
                self.machine.on_moved(gone.id, Err(MoveError::NoRegion), now);
            }
            let Some(talk) = self.talks.get_mut(&peer) else { return };
            talk.meet(&word);
            match self.machine.knows(peer) {
                true => self.machine.on_begun_anew(peer, now),
                false => self.machine.on_connected(peer, &talk.name, now),
            }
            self.say_unsaid(core, peer, now);
        }
        match self.talks.get_mut(&peer).map(|talk| talk.hear(&word)) {
            Some(Heard::Words(words)) => self.machine.on_message(peer, words, now),
            Some(Heard::Missing) => self.begin_anew(core, peer, now),
            Some(Heard::Nothing) | None => {}
        }
    }

    /// What was changed, or is missing, cannot be had again: what was arranged with a peer is over. All else that its session is for goes on.
    fn begin_anew<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, now: Time) {
        self.carry_out_all(core, now);
        let Some(talk) = self.talks.get_mut(&peer) else { return };
        if talk.begin_anew() {
            self.machine.on_begun_anew(peer, now);
            self.say_unsaid(core, peer, now);
        }
    }

    /// When a turn is due.
    pub fn next_timeout(&self) -> Option<Time> {
        let again = (!self.leaving.is_empty() || !self.behind.is_empty()).then_some(self.again_at);
        let waits = |(waiting, _, until): &(Move, u64, Time)| waiting.deadline.min(*until);
        let regions = self.waiting.iter().map(waits).min();
        let parcels = self.more_parcels.then_some(Time::ZERO);
        let machine = self.machine.next_timeout();
        [again, regions, parcels, machine].into_iter().flatten().min()
    }

    fn carry_out<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, act: Act, now: Time) {
        match act {
            Act::Connect { address, deadline } => {
                let begun = connect(core, &address, deadline, now);
                self.machine.on_connecting(&address, begun, now);
            }
            Act::Say { peer, message } => self.say(core, peer, &message.encode(), now),
            Act::Move(wanted) => match self.talks.get(&wanted.peer).and_then(|talk| talk.their) {
                Some(their) => {
                    let until = now.saturating_add(REGION_WITHIN);
                    self.start(core, wanted, their.station(), until, now);
                }
                None => self.machine.on_moved(wanted.id, Err(MoveError::NotConnected), now),
            },
            Act::Cancel { id } => match self.by_move.get(&id) {
                Some((transfer, _)) => core.cancel(*transfer, now),
                None => {
                    // It has not begun, so nothing of it is under way.
                    let before = self.waiting.len();
                    self.waiting.retain(|(waiting, ..)| waiting.id != id);
                    if self.waiting.len() < before {
                        self.machine.on_moved(id, Err(MoveError::NotBegun), now);
                    }
                }
            },
            Act::Land { landing, bytes } => {
                let made = self.land(core, landing, bytes, now);
                self.machine.on_made(landing, made.is_some(), now);
            }
            Act::Release { landing } => match self.landings.remove(&landing) {
                Some(region) => {
                    self.leaving.push((landing, region));
                    self.leave_landings(core, now);
                }
                None => self.machine.on_released(landing),
            },
            Act::Word { slot, value } => {
                // Nobody else writes to the table. A word that has moved past a stamp never comes back to it, whatever lease is given out later.
                let (memory, offset) = (self.table.memory.bytes(), 8 * u64::from(slot));
                let before = memory.atomic(offset, AtomicAct::FetchAdd(0)).unwrap_or(0);
                let _ = memory.atomic(offset, AtomicAct::FetchAdd(value.saturating_sub(before)));
            }
        }
    }

    /// Says any words to a peer, in their turn.
    pub fn say<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, words: &[u8], now: Time) {
        // Who is gone, or has not greeted, is told nothing.
        let Some(talk) = self.talks.get_mut(&peer).filter(|_| core.identity(peer).is_some()) else {
            return;
        };
        if !talk.say(words) && talk.begin_anew() {
            // It confirms nothing, so there is nothing to be arranged with it.
            self.machine.on_begun_anew(peer, now);
        }
        self.say_unsaid(core, peer, now);
    }

    fn say_unsaid<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, now: Time) {
        self.behind.remove(&peer);
        let Some(talk) = self.talks.get_mut(&peer) else { return };
        while let Some(words) = talk.next_unsaid() {
            match core.send_parcel(peer, PARCELS, &[words], now) {
                Ok(true) => talk.on_said(),
                Ok(false) => {
                    self.behind.insert(peer);
                    return;
                }
                // The machine hears of it.
                Err(_) => talk.forget_unsaid(),
            }
        }
    }

    /// `station`: the one whose memory is meant.
    fn start<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, wanted: Move, station: u64, until: Time, now: Time) {
        let far = |far: &Far| core.region(wanted.peer, &far_name(station, *far)).cloned();
        let known: Option<Vec<RemoteRegion>> = wanted.legs.iter().map(|leg| far(&leg.far)).collect();
        let Some(known) = known else {
            if now >= until || now >= wanted.deadline || core.identity(wanted.peer).is_none() {
                return self.machine.on_moved(wanted.id, Err(MoveError::NoRegion), now);
            }
            return self.waiting.push((wanted, station, until));
        };
        let id = wanted.id;
        match self.submit(core, wanted, known, now) {
            Ok((transfer, word)) => {
                self.transfers.insert(transfer, id);
                self.by_move.insert(id, (transfer, word));
            }
            Err(error) => self.machine.on_moved(id, Err(error), now),
        }
    }

    fn submit<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        wanted: Move,
        far: Vec<RemoteRegion>,
        now: Time,
    ) -> Result<(TransferId, Option<u32>), MoveError> {
        if self.ending {
            return Err(MoveError::NotBegun);
        }
        let mut legs = Vec::with_capacity(wanted.legs.len());
        let mut word = None;
        for (leg, far) in wanted.legs.into_iter().zip(far) {
            let near = match leg.near {
                Near::Cache(region) => self.cache.get(region as usize),
                Near::Word(number) => {
                    word = Some(number);
                    Some(&self.words)
                }
            };
            let near = near.ok_or(MoveError::OutOfBounds)?.clone();
            let leg = Leg::new(near, leg.near_spans, far, leg.far_spans).map_err(|_| MoveError::OutOfBounds)?;
            legs.push(Arc::new(leg));
        }
        let request =
            Request::new(wanted.peer, wanted.direction, legs.into(), wanted.deadline).checksum(wanted.checksum);
        let transfer = core.submit(request, None, now);
        let transfer = transfer.map_err(|error| not_accepted(&error))?;
        Ok((transfer, word))
    }

    fn on_ended(&mut self, id: MoveId, outcome: &Result<Summary, TransferError>, now: Time) {
        let word = self.by_move.remove(&id).and_then(|(_, word)| word);
        let outcome = match outcome {
            Ok(summary) => Ok(Moved {
                bytes: summary.bytes,
                way: summary.transport(),
                word: word.map(|word| {
                    let mut bytes = [0; 8];
                    self.words.memory.bytes().read(8 * u64::from(word), &mut bytes);
                    u64::from_le_bytes(bytes)
                }),
            }),
            Err(error) => Err(error.cause.into()),
        };
        self.machine.on_moved(id, outcome, now);
    }

    fn land<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, landing: u64, bytes: u64, now: Time) -> Option<()> {
        let (memory, place) = self.room.make(bytes)?;
        let region = core.register(memory, place).ok()?;
        // The far end reads it too, to compare checksums.
        let name = far_name(self.life.station(), Far::Landing(landing));
        let published = core.publish(&name, &region.key, Access::READ_WRITE, now);
        if published.is_err() {
            let _ = core.release(&region.key, now);
            return None;
        }
        self.landings.insert(landing, region);
        Some(())
    }

    /// Gives landing places back that nobody is inside of. Who is frozen in mid-copy holds one until it goes on or dies.
    fn leave_landings<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) {
        for (landing, region) in std::mem::take(&mut self.leaving) {
            match core.release(&region.key, now) {
                Ok(Progress::Busy) => self.leaving.push((landing, region)),
                Ok(Progress::Idle) | Err(_) => self.machine.on_released(landing),
            }
        }
    }
}

impl fmt::Debug for Station {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Station")
            .field("machine", &self.machine)
            .finish_non_exhaustive()
    }
}

/// An address is one or several, best first.
fn connect<T: ?Sized + Transport>(
    core: &mut Core<T>,
    address: &str,
    deadline: Time,
    now: Time,
) -> Result<PeerId, ConnectError> {
    let addresses = address.split(',').map(str::trim).filter(|part| !part.is_empty());
    let target = Target {
        addresses: addresses.map(|part| PeerAddress(part.to_owned())).collect(),
        deadline,
        name: None,
        epoch: None,
    };
    core.connect(target, now)
}

fn register<T: ?Sized + Transport>(
    core: &mut Core<T>,
    room: &mut dyn Room,
    bytes: u64,
) -> Result<Region, StationError> {
    let (memory, place) = room.make(bytes).ok_or(StationError::NoMemory)?;
    Ok(core.register(memory, place)?)
}

fn publish_all<T: ?Sized + Transport>(
    core: &mut Core<T>,
    life: Life,
    table: &Region,
    cache: &[Region],
    now: Time,
) -> Result<(), RegionError> {
    let regions = (0..).map(Far::Cache).zip(cache).chain([(Far::Leases, table)]);
    for (far, region) in regions {
        core.publish(&far_name(life.station(), far), &region.key, Access::READ, now)?;
    }
    Ok(())
}

/// Names are of one station alone: what was described by another is not looked for here.
fn far_name(station: u64, far: Far) -> String {
    match far {
        Far::Cache(number) => format!("hand_off/{station:x}/cache/{number}"),
        Far::Leases => format!("hand_off/{station:x}/leases"),
        Far::Landing(number) => format!("hand_off/{station:x}/landing/{number}"),
    }
}

/// Why the agent did not take a transfer.
fn not_accepted(error: &PeerError) -> MoveError {
    match error {
        PeerError::NotConnected | PeerError::Submit(SubmitError::PeerGone(_)) => MoveError::NotConnected,
        PeerError::NoRoute(_) => MoveError::NoRoute,
        PeerError::NoStage => MoveError::NoStage,
        PeerError::Submit(SubmitError::TooManyTransfers) => MoveError::TooManyTransfers,
        _ => MoveError::NotAccepted,
    }
}
