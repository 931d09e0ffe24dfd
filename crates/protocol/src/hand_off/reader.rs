//! The side that wants the blocks: what is waited for, what is fetched, and what lands.
//!
//! What lands is in `landing.rs`.

mod landing;

use std::collections::BTreeSet;
use std::sync::Arc;

use landing::Landing;
use weft_plan::{Spans, Time};

use super::cache::{Cache, Sequence, overlaps};
use super::machine::{Due, HandOffs, Purpose, WANTS_MAX, check_name};
use super::{
    ADDRESSES_MAX, Act, BLOCKS_MAX, CallError, Event, Far, HandedOff, LASTS_MIN, Message, Mismatch, MoveError, MoveId,
    MoveLeg, Moved, Near, Origin, Reason, TOKENS_MAX, Wanted,
};
use crate::agent::ConnectError;
use crate::leg::Direction;
use crate::transfer::PeerId;

/// A prompt that is wanted here.
#[derive(Debug)]
pub(super) struct Want {
    /// Where it is to be fetched; nothing where it is pushed.
    origin: Option<Origin>,
    addresses: Vec<String>,
    /// Workers of this engine that read it.
    readers: u32,
    began: Time,
    /// How long the holder waits for a word, and when the next is due.
    lasts: Time,
    renew_at: Time,
    stage: Stage,
    /// Not before it is known where it is wanted.
    wanted: Wanted,
    expires: Time,
    /// By address, once all are there, with their names.
    peers: Vec<(PeerId, String)>,
    /// Reads under way.
    open: BTreeSet<MoveId>,
    bytes: u64,
    ways: BTreeSet<String>,
    landing: Option<Landing>,
    failure: Option<Reason>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// For the engine here to make room.
    Waiting,
    /// For sessions with all workers, and for what they hold.
    Gathering,
    Reading,
    /// At the word after the last byte.
    Looking,
    /// For other landings to give room back.
    Queueing,
    Landing,
    /// Something has failed, and what is under way has to end.
    Ending,
}

impl Want {
    pub(super) fn waits_at(&self, address: &str) -> bool {
        matches!(self.stage, Stage::Waiting | Stage::Gathering) && self.addresses.iter().any(|known| known == address)
    }
    fn name_of(&self, peer: PeerId) -> String {
        let found = self.peers.iter().find(|(known, _)| *known == peer);
        found.map_or_else(String::new, |(_, name)| name.clone())
    }
    fn is_busy(&self) -> bool {
        !self.open.is_empty()
            || self
                .landing
                .as_ref()
                .is_some_and(|landing| !landing.settling.is_empty())
    }
}

impl HandOffs {
    /// Somebody here waits for a prompt that is to be fetched: its lease is renewed until [`fetch`](HandOffs::fetch) or [`leave`](HandOffs::leave).
    /// `readers`: how many workers of this engine read it, each for itself.
    pub fn want(&mut self, origin: Origin, readers: u32, now: Time) -> Result<(), CallError> {
        let (name, addresses, lasts) = (origin.hand_off.clone(), origin.addresses.clone(), origin.lease.lasts);
        self.begin(&name, addresses, Some(origin), readers, lasts, now)
    }

    /// The same of a prompt that is to be pushed by whoever listens at these addresses.
    pub fn want_pushed(
        &mut self,
        name: &str,
        addresses: Vec<String>,
        readers: u32,
        now: Time,
    ) -> Result<(), CallError> {
        let lasts = self.settings.lease;
        self.begin(name, addresses, None, readers, lasts, now)
    }

    fn begin(
        &mut self,
        name: &str,
        addresses: Vec<String>,
        origin: Option<Origin>,
        readers: u32,
        lasts: Time,
        now: Time,
    ) -> Result<(), CallError> {
        check_name(name)?;
        let sensible = (1..=ADDRESSES_MAX).contains(&addresses.len()) && (1..=ADDRESSES_MAX as u32).contains(&readers);
        if !sensible || lasts < LASTS_MIN {
            return Err(CallError::Invalid);
        }
        if self.wants.len() >= WANTS_MAX {
            return Err(CallError::TooMany);
        }
        if self.wants.contains_key(name) {
            return Err(CallError::Used);
        }
        self.used.take(name, lasts, now)?;
        let want = Want {
            origin,
            addresses,
            readers,
            began: now,
            lasts,
            renew_at: now,
            stage: Stage::Waiting,
            wanted: Wanted {
                blocks: Vec::new(),
                tokens: 0..0,
                prompt_tokens: 0,
                digest: [0; 32],
            },
            expires: Time::MAX,
            peers: Vec::new(),
            open: BTreeSet::new(),
            bytes: 0,
            ways: BTreeSet::new(),
            landing: None,
            failure: None,
        };
        self.wants.insert(name.to_owned(), want);
        self.on_want_due(name, now);
        Ok(())
    }

    /// There is room for a prompt: brings it. [`Event::Ended`] follows, by the deadline.
    pub fn fetch(&mut self, name: &str, wanted: Wanted, now: Time) -> Result<(), CallError> {
        let Some(want) = self.wants.get_mut(name) else {
            return Err(CallError::Unknown);
        };
        if want.stage != Stage::Waiting {
            return Err(CallError::Repeated);
        }
        let there = want
            .origin
            .as_ref()
            .map_or(wanted.prompt_tokens, |origin| origin.tokens);
        let sensible = wanted.tokens.start < wanted.tokens.end && wanted.tokens.end <= there && there <= TOKENS_MAX;
        if !sensible || wanted.tokens.end > wanted.prompt_tokens || wanted.blocks.len() as u64 > BLOCKS_MAX {
            return Err(CallError::Invalid);
        }
        (want.wanted, want.began, want.stage) = (wanted, now, Stage::Gathering);
        let expires = now.saturating_add(self.settings.deadline);
        want.expires = expires;
        self.arm(expires, Due::Want(name.to_owned()));
        self.gather(name, now);
        Ok(())
    }

    /// Nobody here wants a prompt any more. [`Event::Ended`] follows when nothing touches its blocks any more.
    pub fn leave(&mut self, name: &str, now: Time) {
        self.fail(name, Reason::Aborted, now);
    }

    // Getting there.

    pub(super) fn on_want_due(&mut self, name: &str, now: Time) {
        let Some(want) = self.wants.get_mut(name) else { return };
        if want.renew_at <= now && want.stage != Stage::Ending {
            // Four words a lease: three of them may be lost, or late.
            want.renew_at = now.saturating_add(Time::from_ns(want.lasts.as_ns() / 4));
            let addresses = want.addresses.clone();
            for address in addresses {
                if let Some(peer) = self.reach(&address, now) {
                    self.say(
                        peer,
                        Message::Renew {
                            hand_off: name.to_owned(),
                        },
                    );
                }
            }
        }
        let Some(want) = self.wants.get(name) else { return };
        if want.expires <= now && want.stage != Stage::Ending {
            let reason = if want.stage == Stage::Queueing {
                Reason::NoRoom
            } else {
                Reason::Late
            };
            return self.fail(name, reason, now);
        }
        if want.stage != Stage::Ending {
            self.arm(want.renew_at.min(want.expires), Due::Want(name.to_owned()));
        }
    }

    /// A session with a partner has come about.
    pub(super) fn on_partner_up(&mut self, address: &str, peer: PeerId, now: Time) {
        let waiting = self.wants.iter().filter(|(_, want)| want.waits_at(address));
        let names: Vec<(String, Stage)> = waiting.map(|(name, want)| (name.clone(), want.stage)).collect();
        for (name, stage) in names {
            // Nobody there may have heard of it for a while.
            self.say(peer, Message::Renew { hand_off: name.clone() });
            if stage == Stage::Gathering {
                self.gather(&name, now);
            }
        }
    }

    /// Somebody has said what it holds.
    pub(super) fn reader_described(&mut self, now: Time) {
        let gathering = self.wants.iter().filter(|(_, want)| want.stage == Stage::Gathering);
        let names: Vec<String> = gathering.map(|(name, _)| name.clone()).collect();
        names.iter().for_each(|name| self.gather(name, now));
    }

    pub(super) fn reader_unreachable(&mut self, address: &str, error: &ConnectError, now: Time) {
        let gathering = |want: &Want| want.stage == Stage::Gathering && want.waits_at(address);
        let names: Vec<String> = self
            .wants
            .iter()
            .filter(|(_, want)| gathering(want))
            .map(|(name, _)| name.clone())
            .collect();
        for name in names {
            let reason = Reason::Unreachable {
                address: address.to_owned(),
                error: error.clone(),
            };
            self.fail(&name, reason, now);
        }
    }

    pub(super) fn reader_lost(&mut self, peer: PeerId, reason: &Reason, now: Time) {
        // Reads say by themselves how they end, and why.
        let hangs = |want: &Want| {
            want.peers.iter().any(|(known, _)| *known == peer) && matches!(want.stage, Stage::Landing | Stage::Queueing)
        };
        let names: Vec<String> = self
            .wants
            .iter()
            .filter(|(_, want)| hangs(want))
            .map(|(name, _)| name.clone())
            .collect();
        for name in names {
            self.fail(&name, reason.clone(), now);
        }
    }

    /// Goes on when there is a session with every worker, and every worker has said what it holds.
    fn gather(&mut self, name: &str, now: Time) {
        let Some(want) = self.wants.get(name).filter(|want| want.stage == Stage::Gathering) else {
            return;
        };
        let (addresses, pushed) = (want.addresses.clone(), want.origin.is_none());
        let mut peers = Vec::with_capacity(addresses.len());
        for address in &addresses {
            peers.extend(self.reach(address, now));
        }
        if peers.len() < addresses.len() {
            return;
        }
        let caches: Vec<_> = peers.iter().filter_map(|peer| self.cache_of(*peer)).collect();
        if caches.len() < peers.len() {
            return;
        }
        let own = self.cache.clone();
        for (peer, cache) in peers.iter().zip(&caches) {
            if let Err(mismatch) = own.check(cache) {
                let peer = self.name_of(*peer);
                return self.fail(name, Reason::Mismatch { peer, mismatch }, now);
            }
        }
        let named: Vec<_> = peers.iter().map(|peer| (*peer, self.name_of(*peer))).collect();
        if let Some(want) = self.wants.get_mut(name) {
            want.peers = named;
        }
        let begun = match pushed {
            false => self.read(name, &peers, &caches),
            true => self.ask_room(name, &peers, &caches, now),
        };
        if let Err((peer, mismatch)) = begun {
            let peer = self.name_of(peer);
            self.fail(name, Reason::Mismatch { peer, mismatch }, now);
        }
    }

    // Fetching.

    fn read(&mut self, name: &str, peers: &[PeerId], caches: &[Arc<Cache>]) -> Result<(), (PeerId, Mismatch)> {
        let own = self.cache.clone();
        let others: Vec<&Cache> = caches.iter().map(|cache| &**cache).collect();
        let shares = own.shares(&others).map_err(|mismatch| (peers[0], mismatch))?;
        let Some(want) = self.wants.get(name) else {
            return Ok(());
        };
        let Some(origin) = &want.origin else { return Ok(()) };
        let (deadline, tokens) = (want.expires, want.wanted.tokens.clone());
        let mut reads = Vec::new();
        for (worker, peer) in peers.iter().enumerate() {
            let here = shares.iter().filter(|share| share.worker == worker);
            let wanted = here.map(|share| (own.layers()[share.layer].name.as_str(), share.heads.clone()));
            let near = Sequence {
                cache: &own,
                blocks: &want.wanted.blocks,
            };
            let far = Sequence {
                cache: others[worker],
                blocks: &origin.blocks,
            };
            let legs = overlaps(near, far, wanted, tokens.clone()).map_err(|mismatch| (*peer, mismatch))?;
            let legs: Vec<MoveLeg> = legs
                .into_iter()
                .map(|leg| MoveLeg {
                    near: Near::Cache(leg.near_region),
                    near_spans: leg.near,
                    far: Far::Cache(leg.far_region),
                    far_spans: leg.far,
                })
                .collect();
            if !legs.is_empty() {
                reads.push((*peer, legs));
            }
        }
        let purpose = |peer| Purpose::Fetch {
            hand_off: name.to_owned(),
            peer,
        };
        let open: BTreeSet<MoveId> = reads
            .into_iter()
            .map(|(peer, legs)| self.start_move(purpose(peer), Direction::Read, legs, deadline))
            .collect();
        if let Some(want) = self.wants.get_mut(name) {
            (want.open, want.stage) = (open, Stage::Reading);
        }
        Ok(())
    }

    pub(super) fn on_fetched(
        &mut self,
        name: &str,
        peer: PeerId,
        id: MoveId,
        outcome: Result<Moved, MoveError>,
        now: Time,
    ) {
        let Some(want) = self.wants.get_mut(name) else { return };
        want.open.remove(&id);
        match outcome {
            Ok(moved) => {
                want.bytes = want.bytes.saturating_add(moved.bytes);
                want.ways.insert(moved.way.to_owned());
            }
            Err(failure) => {
                let peer = want.name_of(peer);
                return self.fail(name, Reason::Move { peer, failure }, now);
            }
        }
        let Some(want) = self.wants.get(name) else { return };
        match (want.stage, want.open.is_empty()) {
            (Stage::Reading, true) => self.look(name, now),
            _ => self.look_ended(name, now),
        }
    }

    /// Reads, after the last byte, the word of every worker: has it moved past the stamp, the blocks may have been somebody else's while they were read.
    fn look(&mut self, name: &str, now: Time) {
        let Some(want) = self.wants.get(name) else { return };
        let Some(origin) = &want.origin else { return };
        let (slot, deadline, peers) = (u64::from(origin.lease.slot), want.expires, want.peers.clone());
        if self.free_words.len() < peers.len() {
            return self.fail(name, Reason::TooMany, now);
        }
        let mut open = BTreeSet::new();
        for (peer, _) in peers {
            let Some(word) = self.free_words.pop() else { break };
            let legs = vec![MoveLeg {
                near: Near::Word(word),
                near_spans: Spans::contiguous(8 * u64::from(word), 8),
                far: Far::Leases,
                far_spans: Spans::contiguous(8 * slot, 8),
            }];
            let purpose = Purpose::Look {
                hand_off: name.to_owned(),
                peer,
                word,
            };
            open.insert(self.start_move(purpose, Direction::Read, legs, deadline));
        }
        if let Some(want) = self.wants.get_mut(name) {
            (want.open, want.stage) = (open, Stage::Looking);
        }
    }

    pub(super) fn on_looked(
        &mut self,
        name: &str,
        peer: PeerId,
        id: MoveId,
        outcome: Result<Moved, MoveError>,
        now: Time,
    ) {
        let Some(want) = self.wants.get_mut(name) else { return };
        want.open.remove(&id);
        let stamp = want.origin.as_ref().map_or(0, |origin| origin.lease.stamp);
        match outcome {
            Ok(Moved { word: Some(word), .. }) if word <= stamp => self.look_ended(name, now),
            Ok(_) => self.fail(name, Reason::GivenUp, now),
            Err(failure) => {
                let peer = want.name_of(peer);
                self.fail(name, Reason::Move { peer, failure }, now);
            }
        }
    }

    // How it ends.

    fn fail(&mut self, name: &str, reason: Reason, now: Time) {
        let Some(want) = self.wants.get_mut(name) else { return };
        if want.failure.is_none() {
            want.failure = Some(reason);
            want.stage = Stage::Ending;
            let open: Vec<MoveId> = want.open.iter().copied().collect();
            open.into_iter().for_each(|id| self.act(Act::Cancel { id }));
        }
        self.look_ended(name, now);
    }

    /// Ends a hand-off when nothing of it is under way any more.
    fn look_ended(&mut self, name: &str, now: Time) {
        let Some(want) = self.wants.get(name).filter(|want| !want.is_busy()) else {
            return;
        };
        let whole = match want.stage {
            Stage::Looking => true,
            Stage::Landing => want
                .landing
                .as_ref()
                .is_some_and(|room| room.settled.len() == room.upto.len()),
            _ => false,
        };
        if !whole && want.failure.is_none() {
            return;
        }
        let Some(want) = self.wants.remove(name) else { return };
        if let Some(room) = &want.landing
            && self.landings.remove(&room.number).is_some()
        {
            // Whatever comes from now on is refused.
            self.releasing.insert(room.number, room.bytes);
            self.act(Act::Release { landing: room.number });
        }
        let pushed = want.landing.as_ref().map_or(0, Landing::came);
        let outcome = match want.failure {
            None => Ok(HandedOff {
                bytes: want.bytes.saturating_add(pushed),
                took: now.saturating_sub(want.began),
                ways: want.ways.into_iter().collect(),
            }),
            Some(reason) => Err(reason),
        };
        // Who pushed all of it knows that it is done.
        let knows = want.origin.is_none() && outcome.is_ok();
        let hand_off = name.to_owned();
        self.events.push_back(Event::Ended { hand_off, outcome });
        if !knows {
            let until = now.saturating_add(want.lasts);
            want.addresses
                .iter()
                .for_each(|address| self.owe(address, name, want.readers, until, now));
        }
        self.give_room();
    }
}
