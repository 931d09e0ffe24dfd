//! The side that has the blocks: leases, who is done with them, and what is pushed while it is computed.
//!
//! Readers say where there is room, at any time; the engine says which layers of which tokens are computed. Whichever comes later starts a write,
//! and a write that has landed is told to its reader. No byte of a block is read after [`Event::Free`], or after [`Event::Fenced`].

mod known;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

pub(super) use known::{Ring, Spoken};
use weft_plan::Time;

use super::cache::{Cache, Sequence, overlaps};
use super::machine::{Due, HandOffs, Purpose, check_name};
use super::{
    Act, BLOCKS_MAX, CallError, Event, Far, LASTS_MIN, Lease, Message, MoveError, MoveId, MoveLeg, Moved, Near, Over,
    Prompt, Reserve, SLOTS,
};
use crate::leg::Direction;
use crate::transfer::PeerId;

/// Hand-offs that are known at a time, those included that only readers have spoken of; and how long these are remembered.
const HELD_MAX: usize = 1 << 16;
const SPOKEN_OF_LASTS: Time = Time::from_secs(600);
/// A reader that is not described by then gets nothing.
const DESCRIBED_WITHIN: Time = Time::from_secs(10);

/// A hand-off as its holder knows it.
#[derive(Debug)]
pub(super) struct Held {
    since: Time,
    /// Who has spoken of it, as long as nobody here knows it.
    spoken_by: Option<String>,
    prompt: Option<Prompt>,
    /// Up to which token each layer may be read, by its place in the cache; once there is a prompt.
    ready: Vec<u64>,
    lease: Option<Term>,
    /// Readers that want no more of it, and of how many each is one.
    served: BTreeMap<String, u32>,
    targets: BTreeMap<PeerId, Target>,
    /// It loses its blocks, and what is under way from them has to end first.
    fencing: bool,
    stopping: Option<Over>,
}

/// What a hand-off has from the moment it can be fetched on.
#[derive(Debug)]
struct Term {
    lease: Lease,
    expires: Time,
    /// Whether the slot was given out here.
    own: bool,
}

/// Room that one worker of the reading side has made.
#[derive(Debug)]
struct Target {
    reader: String,
    reserve: Reserve,
    /// Whether it is known what the reader holds, and that this fits; it has to be by then.
    fits: bool,
    described_by: Time,
    /// For each of the reader's layers: the one here, and which heads of it this worker writes. Nothing before there is a prompt: a reader can
    /// speak of many.
    shares: BTreeMap<u32, (u32, Range<u64>)>,
    posted: BTreeMap<u32, u64>,
    landed: BTreeMap<u32, u64>,
    flights: VecDeque<Flight>,
    bytes: u64,
    way: &'static str,
    /// Nothing more is written to it; what is under way still has to end.
    over: bool,
}

/// A write under way: these layers, up to this token.
#[derive(Debug)]
struct Flight {
    id: MoveId,
    layers: Vec<u32>,
    upto: u64,
    /// How it ended, if it has.
    landed: Option<bool>,
}

impl Held {
    fn new(since: Time) -> Held {
        Held {
            since,
            spoken_by: None,
            prompt: None,
            ready: Vec::new(),
            lease: None,
            served: BTreeMap::new(),
            targets: BTreeMap::new(),
            fencing: false,
            stopping: None,
        }
    }

    pub(super) fn is_ours(&self) -> bool {
        self.prompt.is_some() || self.lease.is_some()
    }
    fn is_flying(&self) -> bool {
        let mut flights = self.targets.values().flat_map(|target| &target.flights);
        flights.any(|flight| flight.landed.is_none())
    }
    fn is_served(&self) -> bool {
        let have = self.served.len();
        self.served.values().any(|readers| have >= *readers as usize)
    }
}

impl HandOffs {
    /// Lets others fetch the blocks of a prompt that is computed whole, for as long as the lease lasts. The word of the lease is set by the next acts,
    /// before which nobody should be told of it. `lease`: the one that all workers of the engine were given, or nothing, and one is made.
    ///
    /// A given lease that is refused is over: whoever was told of it reads blocks that nobody holds, and has to find out.
    pub fn offer(&mut self, name: &str, lease: Option<Lease>, lasts: Time, now: Time) -> Result<Lease, CallError> {
        let offered = self.try_offer(name, lease, lasts, now);
        if let (Err(_), Some(Lease { slot, stamp, .. })) = (&offered, lease)
            && slot < SLOTS
        {
            self.act(Act::Word {
                slot,
                value: stamp.saturating_add(1),
            });
        }
        offered
    }

    fn try_offer(&mut self, name: &str, lease: Option<Lease>, lasts: Time, now: Time) -> Result<Lease, CallError> {
        check_name(name)?;
        if self.over.why(name).is_some() {
            return Err(CallError::Used);
        }
        if lease.is_some_and(|lease| !lease.is_sensible()) || lasts < LASTS_MIN {
            return Err(CallError::Invalid);
        }
        let known = self.held.get(name);
        if known.is_some_and(|held| held.lease.is_some() || held.stopping.is_some()) {
            return Err(CallError::Repeated);
        }
        if known.is_none() && self.held.len() >= HELD_MAX {
            return Err(CallError::TooMany);
        }
        let own = lease.is_none();
        let lease = lease.or_else(|| self.slots.take(lasts, 0)).ok_or(CallError::TooMany)?;
        self.act(Act::Word {
            slot: lease.slot,
            value: lease.stamp,
        });
        let expires = now.saturating_add(lease.lasts);
        let held = self.held.entry(name.to_owned()).or_insert_with(|| Held::new(now));
        self.spoken.remove(held.spoken_by.take());
        held.lease = Some(Term { lease, expires, own });
        self.arm(expires, Due::Held(name.to_owned()));
        // They may all have got it while it was computed.
        self.look_served(name);
        Ok(lease)
    }

    /// A step of the engine computes a prompt that is to be pushed; again with every step, since it may have more blocks by then. What the engine has
    /// of it in a prefix cache may be computed in this very step by another request, so nothing of a layer is there before
    /// [`computed`](HandOffs::computed) has said so.
    pub fn compute(&mut self, name: &str, prompt: Prompt, now: Time) -> Result<(), CallError> {
        check_name(name)?;
        if self.over.why(name).is_some() {
            return Err(CallError::Used);
        }
        if self.held.get(name).is_some_and(|held| held.stopping.is_some()) {
            return Err(CallError::Repeated);
        }
        if !self.held.contains_key(name) && self.held.len() >= HELD_MAX {
            return Err(CallError::TooMany);
        }
        let held = self.held.entry(name.to_owned()).or_insert_with(|| Held::new(now));
        self.spoken.remove(held.spoken_by.take());
        held.ready.resize(self.cache.layers().len(), 0);
        let same = |target: &&mut Target| {
            (target.reserve.prompt_tokens, target.reserve.digest) == (prompt.tokens, prompt.digest)
        };
        let mut wrong = Vec::new();
        for (peer, target) in &mut held.targets {
            if !same(&target) && !target.over {
                wrong.push(*peer);
            }
        }
        held.prompt = Some(prompt);
        wrong
            .into_iter()
            .for_each(|peer| self.fail_target(name, peer, Over::OtherPrompt));
        self.lay_out(name);
        Ok(())
    }

    /// A layer, or all of them, is there up to a token.
    pub fn computed(&mut self, name: &str, layer: Option<usize>, upto: u64, now: Time) {
        let Some(held) = self.held.get_mut(name) else { return };
        if held.prompt.is_none() || held.fencing || held.stopping.is_some() {
            return;
        }
        match layer {
            Some(layer) => held
                .ready
                .iter_mut()
                .skip(layer)
                .take(1)
                .for_each(|ready| *ready = upto),
            None => held.ready.fill(upto),
        }
        self.advance(name, now);
    }

    /// A prompt loses its blocks and will be computed again. They may be overwritten after [`Event::Fenced`].
    pub fn preempt(&mut self, name: &str) {
        let Some(held) = self.held.get_mut(name) else {
            let hand_off = name.to_owned();
            self.events.push_back(Event::Fenced { hand_off });
            return;
        };
        held.fencing = true;
        held.ready.fill(0);
        let open = open_flights(held);
        open.into_iter().for_each(|id| self.act(Act::Cancel { id }));
        self.look_fenced(name);
    }

    /// A prompt will not be whole, or nobody is to have it any more. [`Event::Free`] follows, unless it is over already.
    pub fn stop(&mut self, name: &str, now: Time) -> Result<(), CallError> {
        if self.over.why(name).is_some() {
            return Err(CallError::Used);
        }
        // Whoever asks for it later is told so.
        self.held.entry(name.to_owned()).or_insert_with(|| Held::new(now));
        self.finish(name, Over::Stopped);
        Ok(())
    }

    // What readers say.

    pub(super) fn on_renew(&mut self, name: &str, now: Time) {
        if let Some(held) = self.held.get_mut(name).filter(|held| held.stopping.is_none())
            && let Some(lease) = &mut held.lease
        {
            lease.expires = now.saturating_add(lease.lease.lasts);
        }
    }

    pub(super) fn on_done(&mut self, name: &str, peer: PeerId, readers: u32, now: Time) {
        let reader = self.name_of(peer);
        if self.spoken_of(name, &reader, now).is_err() {
            return;
        }
        let Some(held) = self.held.get_mut(name) else { return };
        held.served.insert(reader, readers);
        let mut open = Vec::new();
        if let Some(target) = held.targets.get_mut(&peer) {
            target.over = true;
            open.extend(
                target
                    .flights
                    .iter()
                    .filter(|flight| flight.landed.is_none())
                    .map(|flight| flight.id),
            );
        }
        open.into_iter().for_each(|id| self.act(Act::Cancel { id }));
        self.look_served(name);
    }

    pub(super) fn on_reserve(&mut self, reserve: Reserve, peer: PeerId, now: Time) {
        let (name, landing, reader) = (reserve.hand_off.clone(), reserve.landing, self.name_of(peer));
        if let Err(why) = self.spoken_of(&name, &reader, now) {
            return self.say(peer, Message::Failed { landing, why });
        }
        let Some(held) = self.held.get_mut(&name) else { return };
        let why = match &held.prompt {
            _ if held.stopping.is_some() => held.stopping,
            _ if held.targets.contains_key(&peer) || held.served.contains_key(&reader) => Some(Over::AskedBefore),
            Some(prompt) if (prompt.tokens, prompt.digest) != (reserve.prompt_tokens, reserve.digest) => {
                Some(Over::OtherPrompt)
            }
            _ => None,
        };
        if let Some(why) = why {
            return self.say(peer, Message::Failed { landing, why });
        }
        let by = now.saturating_add(DESCRIBED_WITHIN.min(reserve.lasts));
        let target = Target {
            reader,
            reserve,
            fits: false,
            described_by: by,
            shares: BTreeMap::new(),
            posted: BTreeMap::new(),
            landed: BTreeMap::new(),
            flights: VecDeque::new(),
            bytes: 0,
            way: "none",
            over: false,
        };
        held.targets.insert(peer, target);
        if let Some(session) = self.sessions.get_mut(&peer) {
            session.made_room.insert(name.clone());
        }
        self.arm(by, Due::Held(name.clone()));
        self.prepare(&name, peer, now);
    }

    /// One that a reader speaks of, perhaps before its prompt is known. Refused where it is over, or too many are spoken of.
    fn spoken_of(&mut self, name: &str, reader: &str, now: Time) -> Result<(), Over> {
        if let Some(why) = self.over.why(name) {
            return Err(why);
        }
        if !self.held.contains_key(name) {
            self.spoken.add(reader)?;
            let mut held = Held::new(now);
            held.spoken_by = Some(reader.to_owned());
            self.held.insert(name.to_owned(), held);
            self.arm(now.saturating_add(SPOKEN_OF_LASTS), Due::Held(name.to_owned()));
        }
        Ok(())
    }

    // What is pushed.

    /// The cache of a reader is known by now.
    pub(super) fn holder_described(&mut self, peer: PeerId, now: Time) {
        let Some(session) = self.sessions.get(&peer) else {
            return;
        };
        let names: Vec<String> = session.made_room.iter().cloned().collect();
        names.iter().for_each(|name| self.prepare(name, peer, now));
    }

    /// Looks whether a reader's room fits, once it is known what the reader holds.
    fn prepare(&mut self, name: &str, peer: PeerId, now: Time) {
        let Some(theirs) = self.cache_of(peer) else { return };
        let Some(session) = self.sessions.get(&peer) else {
            return;
        };
        let Some(target) = self.held.get_mut(name).and_then(|held| held.targets.get_mut(&peer)) else {
            return;
        };
        target.fits = fits(&self.cache, &theirs, &session.same, &target.reserve);
        if !target.fits {
            return self.fail_target(name, peer, Over::Mismatch);
        }
        self.lay_out(name);
        self.advance(name, now);
    }

    /// Fills in what each reader wants of a prompt, now that there is one.
    fn lay_out(&mut self, name: &str) {
        let Some(held) = self.held.get_mut(name).filter(|held| held.prompt.is_some()) else {
            return;
        };
        for (peer, target) in &mut held.targets {
            let Some(session) = self.sessions.get(peer) else {
                continue;
            };
            if !target.fits || target.over || !target.shares.is_empty() {
                continue;
            }
            let (mut shares, first) = (BTreeMap::new(), target.reserve.tokens.start);
            for share in &target.reserve.shares {
                for layer in &share.layers {
                    if let Some(Some(own)) = session.same.get(*layer as usize) {
                        shares.insert(*layer, (*own, share.heads.clone()));
                    }
                }
            }
            target.posted = shares.keys().map(|layer| (*layer, first)).collect();
            (target.landed, target.shares) = (target.posted.clone(), shares);
        }
    }

    /// Writes what is there, is wanted and has not been written.
    fn advance(&mut self, name: &str, now: Time) {
        let Some(held) = self.held.get(name) else { return };
        if held.stopping.is_some() || held.fencing {
            return;
        }
        let Some(prompt) = &held.prompt else { return };
        let mut posts: Vec<(PeerId, Range<u64>, Vec<u32>)> = Vec::new();
        for (peer, target) in held.targets.iter().filter(|(_, target)| !target.over) {
            let mut together: BTreeMap<(u64, u64), Vec<u32>> = BTreeMap::new();
            for (layer, begin) in &target.posted {
                let Some(own) = target.shares.get(layer).map(|(own, _)| *own as usize) else {
                    continue;
                };
                let mut upto = held.ready[own].min(target.reserve.tokens.end).min(prompt.tokens);
                if upto < target.reserve.tokens.end {
                    // What is packed together goes when all of it is there.
                    upto -= upto % self.cache.layers()[own].granule;
                }
                if upto > *begin {
                    together.entry((*begin, upto)).or_default().push(*layer);
                }
            }
            posts.extend(
                together
                    .into_iter()
                    .map(|((begin, upto), layers)| (*peer, begin..upto, layers)),
            );
        }
        posts
            .into_iter()
            .for_each(|(peer, tokens, layers)| self.post(name, peer, tokens, layers, now));
    }

    fn post(&mut self, name: &str, peer: PeerId, tokens: Range<u64>, layers: Vec<u32>, now: Time) {
        let Some(held) = self.held.get(name) else { return };
        let (Some(prompt), Some(target)) = (&held.prompt, held.targets.get(&peer)) else {
            return;
        };
        let Some(theirs) = self.sessions.get(&peer).and_then(|session| session.cache.as_ref()) else {
            return;
        };
        if target.over {
            return;
        }
        let Ok((place, _)) = theirs.dense_of(target.reserve.blocks, |layer| layers.binary_search(&layer).is_ok())
        else {
            return self.fail_target(name, peer, Over::Mismatch);
        };
        // Blocks before the first token are never looked at.
        let before = target.reserve.tokens.start / place.block_tokens();
        let there: Vec<u64> = std::iter::repeat_n(0, before as usize)
            .chain(0..target.reserve.blocks)
            .collect();
        let shares = layers.iter().filter_map(|layer| target.shares.get(layer));
        let wanted = shares.map(|(own, heads)| (self.cache.layers()[*own as usize].name.as_str(), heads.clone()));
        let near = Sequence {
            cache: &self.cache,
            blocks: &prompt.blocks,
        };
        let far = Sequence {
            cache: &place,
            blocks: &there,
        };
        let (landing, deadline) = (target.reserve.landing, now.saturating_add(target.reserve.lasts));
        let Ok(legs) = overlaps(near, far, wanted, tokens.clone()) else {
            return self.fail_target(name, peer, Over::Mismatch);
        };
        let legs = legs.into_iter().map(|leg| MoveLeg {
            near: Near::Cache(leg.near_region),
            near_spans: leg.near,
            far: Far::Landing(landing),
            far_spans: leg.far,
        });
        let legs = legs.collect();
        let purpose = Purpose::Push {
            hand_off: name.to_owned(),
            peer,
        };
        let id = self.start_move(purpose, Direction::Write, legs, deadline);
        if let Some(target) = self.held.get_mut(name).and_then(|held| held.targets.get_mut(&peer)) {
            target.posted.extend(layers.iter().map(|layer| (*layer, tokens.end)));
            target.flights.push_back(Flight {
                id,
                layers,
                upto: tokens.end,
                landed: None,
            });
        }
    }

    pub(super) fn on_pushed(&mut self, name: &str, peer: PeerId, id: MoveId, outcome: Result<Moved, MoveError>) {
        let Some(held) = self.held.get_mut(name) else { return };
        let (quiet, Some(target)) = (held.fencing || held.stopping.is_some(), held.targets.get_mut(&peer)) else {
            return;
        };
        if let Some(flight) = target.flights.iter_mut().find(|flight| flight.id == id) {
            flight.landed = Some(outcome.is_ok());
        }
        let mut fresh: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        match outcome {
            Ok(moved) => {
                (target.bytes, target.way) = (target.bytes.saturating_add(moved.bytes), moved.way);
                // Writes of a layer may overtake each other: what is told has no holes.
                while target.flights.front().is_some_and(|flight| flight.landed == Some(true))
                    && let Some(first) = target.flights.pop_front()
                {
                    target
                        .landed
                        .extend(first.layers.iter().map(|layer| (*layer, first.upto)));
                    fresh.entry(first.upto).or_default().extend(first.layers);
                }
            }
            // It stays where it is, so that nothing behind it is told.
            Err(_) if target.over || quiet => {}
            Err(_) => self.fail_target(name, peer, Over::WriteFailed),
        }
        self.tell_landed(name, peer, fresh);
        self.look_fenced(name);
        self.look_free(name);
        self.look_served(name);
    }

    fn tell_landed(&mut self, name: &str, peer: PeerId, fresh: BTreeMap<u64, Vec<u32>>) {
        let Some(held) = self.held.get_mut(name) else { return };
        let Some(target) = held.targets.get_mut(&peer).filter(|target| !target.over) else {
            return;
        };
        let (landing, bytes, way) = (target.reserve.landing, target.bytes, target.way.to_owned());
        if target.landed.values().all(|upto| *upto >= target.reserve.tokens.end) {
            target.over = true;
            held.served.insert(target.reader.clone(), target.reserve.readers);
        }
        for (upto, mut layers) in fresh {
            layers.sort_unstable();
            layers.dedup();
            self.say(
                peer,
                Message::Landed {
                    landing,
                    layers,
                    upto,
                    bytes,
                    way: way.clone(),
                },
            );
        }
    }

    /// Nothing more goes to a reader, who is told why.
    fn fail_target(&mut self, name: &str, peer: PeerId, why: Over) {
        let target = self.held.get(name).and_then(|held| held.targets.get(&peer));
        if let Some(target) = target.filter(|target| !target.over) {
            let landing = target.reserve.landing;
            self.say(peer, Message::Failed { landing, why });
            self.end_target(name, peer);
        }
    }

    fn end_target(&mut self, name: &str, peer: PeerId) {
        let Some(held) = self.held.get_mut(name) else { return };
        let Some(target) = held.targets.get_mut(&peer).filter(|target| !target.over) else {
            return;
        };
        target.over = true;
        let open = target.flights.iter().filter(|flight| flight.landed.is_none());
        let open: Vec<MoveId> = open.map(|flight| flight.id).collect();
        held.served.insert(target.reader.clone(), target.reserve.readers);
        open.into_iter().for_each(|id| self.act(Act::Cancel { id }));
        self.look_served(name);
    }

    /// `made_room`: the hand-offs that it has made room for.
    pub(super) fn holder_lost(&mut self, peer: PeerId, made_room: BTreeSet<String>) {
        for name in made_room {
            // What it has asked for is not wanted any more. Who is gone cannot be told, and who has begun anew would take it for something else.
            self.end_target(&name, peer);
        }
    }

    // How it ends.

    pub(super) fn on_held_due(&mut self, name: &str, now: Time) {
        let Some(held) = self.held.get(name).filter(|held| held.stopping.is_none()) else {
            return;
        };
        match &held.lease {
            Some(lease) if lease.expires <= now => return self.finish(name, Over::Expired),
            Some(lease) => self.arm(lease.expires, Due::Held(name.to_owned())),
            None if held.prompt.is_none() && held.since.saturating_add(SPOKEN_OF_LASTS) <= now => {
                return self.finish(name, Over::NotComputed);
            }
            None => {}
        }
        let Some(held) = self.held.get(name) else { return };
        let undescribed = held
            .targets
            .iter()
            .filter(|(_, target)| !target.fits && target.described_by <= now);
        let late: Vec<PeerId> = undescribed.map(|(peer, _)| *peer).collect();
        late.into_iter()
            .for_each(|peer| self.fail_target(name, peer, Over::Mismatch));
    }

    fn look_served(&mut self, name: &str) {
        let done = |held: &Held| held.lease.is_some() && held.stopping.is_none() && held.is_served();
        if self.held.get(name).is_some_and(done) {
            self.finish(name, Over::Served);
        }
    }

    /// First the word, then the fence, then the blocks.
    fn finish(&mut self, name: &str, why: Over) {
        let Some(held) = self.held.get_mut(name).filter(|held| held.stopping.is_none()) else {
            return;
        };
        held.stopping = Some(why);
        let word = held
            .lease
            .as_ref()
            .map(|lease| (lease.lease.slot, lease.lease.stamp.saturating_add(1)));
        let open = open_flights(held);
        let mut told = Vec::new();
        for (peer, target) in held.targets.iter_mut().filter(|(_, target)| !target.over) {
            target.over = true;
            told.push((*peer, target.reserve.landing));
        }
        if let Some((slot, value)) = word {
            self.act(Act::Word { slot, value });
        }
        open.into_iter().for_each(|id| self.act(Act::Cancel { id }));
        told.into_iter()
            .for_each(|(peer, landing)| self.say(peer, Message::Failed { landing, why }));
        self.look_fenced(name);
        self.look_free(name);
    }

    fn look_free(&mut self, name: &str) {
        let Some(held) = self.held.get(name) else { return };
        let (Some(why), false) = (held.stopping, held.is_flying()) else {
            return;
        };
        let Some(held) = self.held.remove(name) else { return };
        self.over.remember(name, why);
        self.spoken.remove(held.spoken_by.clone());
        for peer in held.targets.keys() {
            if let Some(session) = self.sessions.get_mut(peer) {
                session.made_room.remove(name);
            }
        }
        if let Some(lease) = held.lease.as_ref().filter(|lease| lease.own) {
            self.slots.give_back(lease.lease.slot);
        }
        // Of what only readers have spoken there is nothing to be given back, unless its owner has just asked for that.
        if held.is_ours() || why == Over::Stopped {
            let hand_off = name.to_owned();
            self.events.push_back(Event::Free { hand_off, why });
        }
    }

    fn look_fenced(&mut self, name: &str) {
        let Some(held) = self.held.get_mut(name).filter(|held| held.fencing) else {
            return;
        };
        if held.is_flying() {
            return;
        }
        held.fencing = false;
        for target in held.targets.values_mut() {
            // What was on the way has to go again.
            target.posted = target.landed.clone();
            target.flights.clear();
        }
        let hand_off = name.to_owned();
        self.events.push_back(Event::Fenced { hand_off });
    }
}

fn open_flights(held: &Held) -> Vec<MoveId> {
    let flights = held.targets.values().flat_map(|target| &target.flights);
    flights
        .filter(|flight| flight.landed.is_none())
        .map(|flight| flight.id)
        .collect()
}

/// Whether a prompt can be pushed to whoever has made this room. `same`: for each of its layers, the one here.
fn fits(own: &Cache, theirs: &Cache, same: &[Option<u32>], reserve: &Reserve) -> bool {
    let before = reserve.tokens.start / theirs.block_tokens();
    let known = |layer: &u32| same.get(*layer as usize).is_some_and(Option::is_some);
    let mut layers = reserve.shares.iter().flat_map(|share| &share.layers);
    own.check(theirs).is_ok()
        && before.saturating_add(reserve.blocks) <= BLOCKS_MAX
        && theirs.dense_of(reserve.blocks, |_| false).is_ok()
        && layers.all(known)
        // Without a share there is nothing to wait for, and whoever asks for nothing should have said that it is done.
        && !reserve.shares.is_empty()
}
