//! A store's place among others on its agent: carries out what the machine wants, by parcels, transfers and regions of a [`Core`].
//!
//! The runtime and the simulator turn the same. Whoever turns the core hands it the core's events and then a [turn](Members::turn); whoever has the blocks looks at
//! what the machine tells of, lends and sums.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use thiserror::Error;
use weft_plan::{Span, Spans, Time};

use super::{Act, Directory, FetchId, Lent, LoanId, Message, Wanted};
use crate::agent::{Core, Event, Parcel, RegionError};
use crate::hand_off::talk::{Heard, Life, Talk, Word};
use crate::leg::{Direction, Leg};
use crate::region::{Access, Region, RegionKey};
use crate::transfer::{PeerId, Request, TransferId};
use crate::transport::{Progress, Transport};

/// Which parcels are about where blocks are.
pub const PARCELS: u64 = u64::from_le_bytes(*b"blocksat");

/// Parcels that are looked at in one turn, and entries of what they publish.
const PARCELS_PER_TURN: usize = 256;
const ENTRIES_PER_TURN: u64 = 1 << 14;
/// Messages of entries that one member is sent in one turn.
const PUBLISHED_PER_TURN: usize = 8;
/// How often what a peer could not be told is tried again.
const AGAIN_AFTER: Time = Time::from_ms(1);

/// Why there is no store among others.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MembersError {
    #[error("a store lends from between 1 and 255 regions, not {given}")]
    Regions { given: usize },
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Carries out what a [`Directory`] decides, over an agent's core.
pub struct Members {
    pub machine: Directory,
    life: Life,
    /// What others read from, by its number.
    lends: Vec<Region>,
    talks: BTreeMap<PeerId, Talk>,
    /// Those of which something could not be said yet.
    behind: BTreeSet<PeerId>,
    come: VecDeque<Parcel>,
    more_parcels: bool,
    again_at: Time,
    /// Where fetches land.
    near: BTreeMap<FetchId, Near>,
    moves: BTreeMap<TransferId, LoanId>,
    of_fetch: BTreeMap<LoanId, FetchId>,
}

struct Near {
    region: Region,
    /// Moves that are under way.
    moves: usize,
}

impl Members {
    /// Publishes what others may read from, and begins to listen. `peers`: those that are connected already.
    pub fn open<T: ?Sized + Transport>(
        core: &mut Core<T>,
        machine: Directory,
        lends: Vec<Region>,
        peers: impl IntoIterator<Item = PeerId>,
        now: Time,
    ) -> Result<Members, MembersError> {
        let given = lends.len();
        let Some(first) = lends.first().filter(|_| given < 256) else {
            return Err(MembersError::Regions { given });
        };
        let life = Life::of(first.key.secret);
        for (nth, region) in lends.iter().enumerate() {
            if let Err(error) = core.publish(&name_of(life.station(), nth as u8), &region.key, Access::READ, now) {
                for before in 0..nth {
                    let _ = core.withdraw(&name_of(life.station(), before as u8), now);
                }
                return Err(error.into());
            }
        }
        core.open_parcels(PARCELS);
        let mut members = Members {
            machine,
            life,
            lends,
            talks: BTreeMap::new(),
            behind: BTreeSet::new(),
            come: VecDeque::new(),
            more_parcels: false,
            again_at: Time::ZERO,
            near: BTreeMap::new(),
            moves: BTreeMap::new(),
            of_fetch: BTreeMap::new(),
        };
        for peer in peers {
            members.meet(core, peer, now);
        }
        Ok(members)
    }

    /// Hears and publishes nothing more. Says which regions somebody is still inside of: they are to be [released](Core::release) again.
    pub fn close<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) -> Vec<RegionKey> {
        for transfer in self.moves.keys() {
            core.cancel(*transfer, now);
        }
        core.drop_parcels(PARCELS);
        let mut busy = Vec::new();
        for nth in 0..self.lends.len() {
            if let Ok((key, Progress::Busy)) = core.withdraw(&name_of(self.life.station(), nth as u8), now) {
                busy.push(key);
            }
        }
        busy
    }

    /// Whether nothing of a fetch is being written, so that whoever closes this may have the memory back.
    pub fn is_still(&self) -> bool {
        self.moves.is_empty()
    }

    /// Fetches blocks into this region, which stays as it is until each of them has [ended](super::Event::Fetched).
    pub fn fetch(&mut self, near: Region, wanted: &[Wanted], deadline: Time, now: Time) -> FetchId {
        let fetch = self.machine.fetch(wanted, deadline, now);
        let near = Near { region: near, moves: 0 };
        self.near.insert(fetch, near);
        fetch
    }

    /// Hears what has happened at the agent.
    pub fn on_event<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, event: &Event, now: Time) {
        match event {
            Event::Connected { peer, .. } => self.meet(core, *peer, now),
            Event::PeerLost { peer, .. } => {
                self.talks.remove(peer);
                self.behind.remove(peer);
                self.machine.on_lost(*peer, now);
            }
            Event::PathUp { peer, .. } | Event::PathDown { peer, .. } => {
                self.machine.set_distance(*peer, distance(core, *peer));
            }
            Event::Ended { id, outcome } => {
                if let Some(loan) = self.moves.remove(id) {
                    let late = outcome
                        .as_ref()
                        .err()
                        .map(|error| error.cause == crate::error::Failure::Expired);
                    self.on_moved(loan, late.map_or(Ok(()), Err), now);
                }
            }
            _ => {}
        }
    }

    fn on_moved(&mut self, loan: LoanId, ended: Result<(), bool>, now: Time) {
        if let Some(near) = self.of_fetch.remove(&loan).and_then(|fetch| self.near.get_mut(&fetch)) {
            near.moves -= 1;
        }
        self.machine.on_moved(loan, ended, now);
    }

    /// Takes what has come, does what is due and what the machine wants. `true`: something has happened.
    pub fn turn<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) -> bool {
        let mut any = false;
        let heard = self.machine.counts().heard;
        for _ in 0..PARCELS_PER_TURN {
            if self.machine.counts().heard - heard >= ENTRIES_PER_TURN {
                break;
            }
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
            let behind = std::mem::take(&mut self.behind);
            if !behind.is_empty() {
                self.again_at = now.saturating_add(AGAIN_AFTER);
            }
            behind.into_iter().for_each(|peer| self.say_unsaid(core, peer, now));
        }
        any |= self.carry_out_all(core, now);
        let owed: Vec<PeerId> = self.machine.owed().collect();
        for peer in owed {
            any |= self.publish(core, peer, now);
        }
        self.forget_fetches();
        any
    }

    /// When a turn is due.
    pub fn next_timeout(&self) -> Option<Time> {
        let again = (!self.behind.is_empty()).then_some(self.again_at);
        let parcels = self.more_parcels.then_some(Time::ZERO);
        // Who can be told now is told in the next turn.
        let owed = self.machine.owed().any(|peer| self.can_be_told(peer));
        let owed = owed.then_some(Time::ZERO);
        [again, parcels, owed, self.machine.next_timeout()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Greets a peer that it does not know yet.
    fn meet<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, now: Time) {
        let Some(identity) = core.identity(peer) else { return };
        if !self.talks.contains_key(&peer) {
            self.talks.insert(peer, Talk::new(&identity.name, self.life));
            self.say_unsaid(core, peer, now);
        }
    }

    fn hear<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, parcel: &Parcel, now: Time) {
        let peer = parcel.from;
        self.meet(core, peer, now);
        let Some(word) = Word::open(parcel.payload()) else {
            return self.begin_anew(core, peer, now);
        };
        let Some(identity) = core.identity(peer) else { return };
        let (name, epoch) = (identity.name.clone(), identity.epoch);
        if self.talks.get(&peer).is_some_and(|talk| talk.their != Some(word.from)) {
            // What was said to whoever was there before is not said to this one.
            self.carry_out_all(core, now);
            let Some(talk) = self.talks.get_mut(&peer) else { return };
            talk.meet(&word);
            let distance = distance(core, peer);
            self.machine.on_met(peer, &name, epoch, distance, now);
            self.say_unsaid(core, peer, now);
        }
        match self.talks.get_mut(&peer).map(|talk| talk.hear(&word)) {
            Some(Heard::Words(words)) => self.machine.on_message(peer, words, now),
            Some(Heard::Missing) => self.begin_anew(core, peer, now),
            Some(Heard::Nothing) | None => {}
        }
    }

    /// What was changed, or is missing, cannot be had again: what was arranged with a peer is over, and it is met anew.
    fn begin_anew<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, now: Time) {
        self.carry_out_all(core, now);
        let Some(talk) = self.talks.get_mut(&peer) else { return };
        if talk.begin_anew() {
            self.machine.on_lost(peer, now);
            self.say_unsaid(core, peer, now);
        }
    }

    fn carry_out_all<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, now: Time) -> bool {
        let mut any = false;
        while let Some(act) = self.machine.next_act() {
            any = true;
            match act {
                Act::Say { peer, message } => {
                    self.say(core, peer, &message, now);
                }
                Act::Move {
                    loan,
                    fetch,
                    peer,
                    blocks,
                    deadline,
                } => match self.start(core, fetch, peer, &blocks, deadline, now) {
                    Some(transfer) => {
                        self.moves.insert(transfer, loan);
                        self.of_fetch.insert(loan, fetch);
                    }
                    None => self.machine.on_moved(loan, Err(false), now),
                },
            }
        }
        any
    }

    fn start<T: ?Sized + Transport>(
        &mut self,
        core: &mut Core<T>,
        fetch: FetchId,
        peer: PeerId,
        blocks: &[(u64, Lent)],
        deadline: Time,
        now: Time,
    ) -> Option<TransferId> {
        let their = self.talks.get(&peer)?.their?.station();
        let near = self.near.get_mut(&fetch)?;
        let mut by_region: BTreeMap<u8, (Spans, Spans)> = BTreeMap::new();
        for (offset, lent) in blocks {
            let (here, there) = by_region.entry(lent.region).or_default();
            let len = u64::from(lent.length);
            // What a peer has said is not to be added up to anything but the truth.
            lent.offset.checked_add(len)?;
            here.push(Span { offset: *offset, len });
            there.push(Span {
                offset: lent.offset,
                len,
            });
        }
        let mut legs = Vec::with_capacity(by_region.len());
        for (region, (here, there)) in by_region {
            let far = core.region(peer, &name_of(their, region))?.clone();
            legs.push(Arc::new(Leg::new(near.region.clone(), here, far, there).ok()?));
        }
        let request = Request::new(peer, Direction::Read, legs.into(), deadline);
        let transfer = core.submit(request, None, now).ok()?;
        near.moves += 1;
        Some(transfer)
    }

    /// Says something to a peer, in its turn.
    pub fn say<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, message: &Message, now: Time) {
        self.say_words(core, peer, &message.encode(), now);
    }

    /// Says any words to a peer, in their turn.
    pub fn say_words<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, words: &[u8], now: Time) {
        // Who is gone, or has not greeted, is told nothing.
        let Some(talk) = self.talks.get_mut(&peer).filter(|_| core.identity(peer).is_some()) else {
            return;
        };
        if !talk.say(words) && talk.begin_anew() {
            // It confirms nothing, so there is nothing to be arranged with it.
            self.machine.on_lost(peer, now);
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
                    if self.again_at <= now {
                        self.again_at = now.saturating_add(AGAIN_AFTER);
                    }
                    return;
                }
                // The machine hears of it.
                Err(_) => talk.forget_unsaid(),
            }
        }
    }

    fn can_be_told(&self, peer: PeerId) -> bool {
        !self.behind.contains(&peer) && self.talks.get(&peer).is_some_and(|talk| talk.next_unsaid().is_none())
    }

    /// Tells a peer of blocks, as far as it takes them now: what waits is a list of ids, not of words.
    fn publish<T: ?Sized + Transport>(&mut self, core: &mut Core<T>, peer: PeerId, now: Time) -> bool {
        for nth in 0..PUBLISHED_PER_TURN {
            if !self.can_be_told(peer) {
                return nth > 0;
            }
            let Some(message) = self.machine.next_published(peer, now) else {
                return nth > 0;
            };
            self.say(core, peer, &message, now);
        }
        true
    }

    /// Lets go of memory that no fetch wants any more.
    fn forget_fetches(&mut self) {
        let machine = &self.machine;
        self.near
            .retain(|fetch, near| near.moves > 0 || machine.is_fetching(*fetch));
    }
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Members")
            .field("machine", &self.machine)
            .finish_non_exhaustive()
    }
}

/// How far it is to a peer, by the nearest way.
fn distance<T: ?Sized + Transport>(core: &Core<T>, peer: PeerId) -> u8 {
    let far = |name: &&str| match *name {
        "cuda" | "shared_memory" => 0,
        "verbs" => 1,
        _ => 2,
    };
    core.transports(peer).iter().map(far).min().unwrap_or(u8::MAX)
}

/// Names are of one station alone: what another has said is not looked for here.
fn name_of(station: u64, region: u8) -> String {
    format!("store/{station:x}/{region}")
}
