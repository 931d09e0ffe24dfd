//! Two agents that know each other: who the other one is, that it is alive, and what it has to say.
//!
//! A [`Session`] turns messages that paths may lose, repeat, delay and reorder into facts that arrive once and in order:
//! publications, notifications after their data, fences, leases. It opens no path and reads no clock. Its owner carries
//! [`next_message`](Session::next_message) to the path it names and what comes in to [`on_message`](Session::on_message), calls
//! [`on_timeout`](Session::on_timeout) when [`next_timeout`](Session::next_timeout) is over, and takes
//! [`next_event`](Session::next_event). After a pause, messages that wait should be handed in before `on_timeout` is called, so
//! that the peer is not blamed for this end's own silence.
//!
//! Notifications without data are handed on in the order they were sent. One that waits for its data lets others pass.
//!
//! ```
//! use weft_plan::Time;
//! use weft_protocol::Epoch;
//! use weft_protocol::session::{Config, Secret, Session, SessionEvent, Via};
//!
//! let secret = Secret::new(b"known to both");
//! let config = |name, epoch| Config::new(name, Epoch(epoch), secret.clone());
//! let (via, now) = (Via(0), Time::ZERO);
//! let mut prefill = Session::initiate(config("prefill", 1), [1; 32], via, now);
//! let mut decode = Session::accept(config("decode", 2), [2; 32], via, now);
//! prefill.notify(b"hello", None, now)?;
//!
//! let mut heard = Vec::new();
//! loop {
//!     let (forth, back) = (prefill.next_message(), decode.next_message());
//!     if forth.is_none() && back.is_none() {
//!         break;
//!     }
//!     forth.inspect(|(via, bytes)| decode.on_message(*via, bytes, now));
//!     back.inspect(|(via, bytes)| prefill.on_message(*via, bytes, now));
//!     heard.extend(std::iter::from_fn(|| decode.next_event()));
//! }
//! assert!(matches!(&heard[0], SessionEvent::Established { identity, .. } if identity.name == "prefill"));
//! assert_eq!(heard[1], SessionEvent::Notified { payload: b"hello".to_vec() });
//! # Ok::<(), weft_protocol::session::SessionError>(())
//! ```

mod arrivals;
mod config;
mod event;
mod handshake;
pub(crate) mod harness;
mod keys;
mod leases;
mod paths;
mod seal;
mod stream;
#[cfg(test)]
mod tests;
mod traffic;
mod wire;

use std::collections::{BTreeMap, VecDeque};

use weft_plan::Time;

pub use arrivals::TOLD_BIT;
pub use config::{
    Config, ConfigError, MAX_ADDRESS_BYTES, MAX_ADDRESSES, MAX_EVENTS, MAX_GRANT_BYTES, MAX_GRANTS, MAX_HELD,
    MAX_LEASES, MAX_MESSAGE_BYTES, MAX_NAME_BYTES, MAX_PATHS, MAX_PAYLOAD_BYTES, MAX_REGIONS, Secret, Versions,
};
pub use event::{
    CloseReason, Identity, LeaseId, Misbehaviour, NotificationId, SessionError, SessionEvent, SessionId, SessionLoss,
    Via,
};
pub use keys::{PROOF_BYTES, Proof, Role, Transcript, same_proof};
pub use seal::{MAX_SEALED_BYTES, Seal, SealError};
pub use wire::{Peek, peek};

use crate::error::Refusal;
use crate::region::{RegionKey, RemoteRegion};
use crate::transport::{Arrival, Grant};
use crate::wire::{DecodeError, Reader, Writer};
use arrivals::Arrivals;
use handshake::Handshake;
use keys::Keys;
use leases::Leases;
use paths::{Paths, Standing};
use stream::{Inbox, Outbox, Replay};
use wire::{After, Control};

/// How long an orderly close waits for the peer to take note.
const CLOSE_PATIENCE: Time = Time::from_secs(1);

/// One end of a session with one peer.
#[derive(Debug)]
pub struct Session {
    config: Config,
    state: State,
    /// The latest time this end was told.
    now: Time,
    paths: Paths,
    /// Messages that are made and wait to be taken.
    made: VecDeque<(Via, Vec<u8>)>,
    events: VecDeque<SessionEvent>,
    handshake: Handshake,
    open: Option<Open>,
    outbox: Outbox,
    inbox: Inbox,
    /// Controls wait in the inbox because too many events wait to be taken.
    stalled: bool,
    acks: Acks,
    published: BTreeMap<String, RemoteRegion>,
    regions: BTreeMap<String, RemoteRegion>,
    arrivals: Arrivals,
    /// Parts of writes that the owner counts, with the path that they came over.
    told: VecDeque<(Via, Arrival)>,
    next_notification: u64,
    /// Notifications that wait for their data at the peer, with their tags.
    awaited: BTreeMap<NotificationId, u64>,
    leases: Leases,
    heard: Time,
    sent: Time,
    /// When the last path went away, if something had been heard since the time before.
    stranded: Time,
    /// The peer has said goodbye.
    parted: bool,
    refused_messages: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not yet known to each other.
    Greeting,
    Open,
    /// Waits until the goodbye with this sequence is acknowledged.
    Closing {
        goodbye: u64,
        until: Time,
    },
    Ended,
}

/// What is known once the peer has proved itself.
#[derive(Debug)]
struct Open {
    session: SessionId,
    keys: Keys,
    replay: Replay,
    /// The number of the next message sealed here.
    number: u64,
    identity: Identity,
    /// Short enough for the peer's patience, too.
    heartbeat: Time,
}

/// When to tell the peer what has been received.
#[derive(Debug, Default)]
struct Acks {
    at_once: bool,
    due: Option<Time>,
    pending: u32,
    via: Option<Via>,
}

/// A region as a peer is told of it, for whoever tells of regions in words of its own.
pub fn region_to_bytes(region: &RemoteRegion) -> Vec<u8> {
    let mut w = Writer::new();
    wire::write_region(&mut w, region);
    w.buf
}

/// What [`region_to_bytes`] has written.
pub fn region_from_bytes(bytes: &[u8]) -> Result<RemoteRegion, DecodeError> {
    let mut r = Reader::new(bytes);
    let region = wire::read_region(&mut r)?;
    r.end()?;
    Ok(region)
}

impl Session {
    /// Begins a session with whoever is at the far end of `via`. `random` must be new for every session.
    pub fn initiate(config: Config, random: [u8; 32], via: Via, now: Time) -> Session {
        let mut session = Session::new(config, Role::Initiator, random, via, now);
        session.begin(now);
        session
    }

    /// Answers on a path whose first message [`peek`] has found to be a hello; that message comes in next.
    pub fn accept(config: Config, random: [u8; 32], via: Via, now: Time) -> Session {
        let mut session = Session::new(config, Role::Acceptor, random, via, now);
        session.begin(now);
        session
    }

    fn new(config: Config, role: Role, random: [u8; 32], via: Via, now: Time) -> Session {
        Session {
            state: State::Greeting,
            now,
            paths: Paths::new(role, via),
            made: VecDeque::new(),
            events: VecDeque::new(),
            handshake: Handshake::new(&config, role, random, via, now),
            open: None,
            outbox: Outbox::new(config.max_queued_messages, config.max_queued_bytes),
            inbox: Inbox::new(),
            stalled: false,
            acks: Acks::default(),
            published: BTreeMap::new(),
            regions: BTreeMap::new(),
            arrivals: Arrivals::default(),
            told: VecDeque::new(),
            next_notification: 0,
            awaited: BTreeMap::new(),
            leases: Leases::new(role),
            heard: now,
            sent: now,
            stranded: now,
            parted: false,
            refused_messages: 0,
            config,
        }
    }

    /// The name of this session, once it is established.
    pub fn id(&self) -> Option<SessionId> {
        self.open.as_ref().map(|open| open.session)
    }
    /// Who the peer is, once it is known.
    pub fn identity(&self) -> Option<&Identity> {
        self.open.as_ref().map(|open| &open.identity)
    }
    pub fn is_ended(&self) -> bool {
        self.state == State::Ended
    }
    /// A region that the peer has published.
    pub fn region(&self, name: &str) -> Option<&RemoteRegion> {
        self.regions.get(name)
    }
    /// All that the peer has published.
    pub fn regions(&self) -> impl Iterator<Item = (&str, &RemoteRegion)> {
        self.regions.iter().map(|(name, region)| (name.as_str(), region))
    }
    /// Messages that were not what they should be, or not from the peer, and were dropped.
    pub fn refused_messages(&self) -> u64 {
        self.refused_messages
    }
    /// Notifications that wait here for the data of the peer's transfers.
    pub fn held_notifications(&self) -> usize {
        self.arrivals.held()
    }
    /// Until when the peer may still be using something it has a lease on, whether or not the session lives.
    pub fn lent_until(&self) -> Option<Time> {
        self.leases.lent_until()
    }

    /// Takes a path that this end has opened into use. [`SessionEvent::PathJoined`] follows when the peer has taken note.
    pub fn add_path(&mut self, via: Via, now: Time) {
        self.advance(now);
        if self.state != State::Ended && self.paths.open(via, now) {
            self.announce_paths(now);
        }
    }

    /// A path is gone. What was on its way is sent over another one.
    pub fn on_path_lost(&mut self, via: Via, now: Time) {
        self.advance(now);
        self.made.retain(|(on, _)| *on != via);
        if self.state == State::Ended {
            return;
        }
        if self.handshake.depends_on(via) {
            self.end(SessionLoss::PathLost);
            return;
        }
        self.drop_path(via, now);
    }

    /// A message has come in. Whatever it is, it does no harm.
    pub fn on_message(&mut self, via: Via, bytes: &[u8], now: Time) {
        self.advance(now);
        if self.receive(via, bytes, now).is_none() {
            self.refused_messages += 1;
        }
    }

    /// A part of a write is in place here, and came over this path. It counts once the peer has proved itself there.
    pub fn on_arrival(&mut self, via: Via, arrival: Arrival, now: Time) {
        self.advance(now);
        if self.state == State::Ended {
            return;
        }
        match self.paths.on_arrival(via, arrival, self.open.is_some()) {
            Standing::Counts => self.count(via, arrival),
            Standing::Early => {}
            Standing::Strange => self.refused_messages += 1,
        }
    }

    /// The next part of a write that [the owner counts](TOLD_BIT), and the path that it came over, which may be gone.
    pub fn next_told(&mut self) -> Option<(Via, Arrival)> {
        self.told.pop_front()
    }

    /// Lets the peer know of a region, or of a change to it. Calling again with the same costs nothing.
    pub fn publish(&mut self, name: &str, region: &RemoteRegion, now: Time) -> Result<(), SessionError> {
        self.advance(now);
        self.check_alive()?;
        check_publication(name, region)?;
        if region.key.epoch != self.config.epoch {
            return Err(SessionError::StaleRegion);
        }
        match self.published.get(name) {
            Some(before) if before == region => return Ok(()),
            None if self.published.len() >= MAX_REGIONS => return Err(SessionError::TooManyRegions),
            _ => {}
        }
        let body = Control::Publish {
            name,
            region: region.clone(),
        }
        .encode();
        self.outbox.room_for(body.len())?;
        self.outbox.push(body, None);
        self.published.insert(name.to_owned(), region.clone());
        Ok(())
    }

    /// Takes a publication back. Its key stays valid until the region is released.
    pub fn withdraw(&mut self, name: &str, now: Time) -> Result<(), SessionError> {
        self.advance(now);
        self.check_alive()?;
        if self.published.contains_key(name) {
            let body = Control::Withdraw { name }.encode();
            self.outbox.room_for(body.len())?;
            self.outbox.push(body, None);
            self.published.remove(name);
        }
        Ok(())
    }

    /// Sends a notification; with `after`, the peer hands it on when that many parts (second) of a tag (first) are in place.
    pub fn notify(
        &mut self,
        payload: &[u8],
        after: Option<(u64, u32)>,
        now: Time,
    ) -> Result<NotificationId, SessionError> {
        self.advance(now);
        self.check_alive()?;
        if payload.len() > MAX_PAYLOAD_BYTES {
            return Err(SessionError::PayloadTooLong { len: payload.len() });
        }
        self.outbox.room_for(payload.len())?;
        let id = NotificationId(self.next_notification);
        match after {
            Some((tag, parts)) if parts > 0 => {
                if self.awaited.len() >= MAX_HELD {
                    return Err(SessionError::TooManyHeld);
                }
                let after = Some(After { id, tag, parts });
                self.outbox.push(Control::Notify { payload, after }.encode(), None);
                self.awaited.insert(id, tag);
            }
            _ => {
                let body = Control::Notify { payload, after: None }.encode();
                self.outbox.push(body, Some(id));
            }
        }
        self.next_notification += 1;
        Ok(id)
    }

    /// The transfer behind `tag` has failed: the peer forgets its parts, and its notification unless all its data was in place.
    pub fn revoke(&mut self, tag: u64, now: Time) {
        self.advance(now);
        if self.check_alive().is_ok() {
            self.awaited.retain(|_, waits_for| *waits_for != tag);
            self.say(Control::Revoke { tag });
        }
    }

    /// Takes the notification behind `tag` back, if it is not too late. If it is, [`SessionEvent::NotificationDelivered`] comes
    /// before [`SessionEvent::Fenced`] of any fence that is asked for after this.
    pub fn recall(&mut self, tag: u64, now: Time) {
        self.advance(now);
        if self.check_alive().is_ok() {
            self.say(Control::Revoke { tag });
        }
    }

    /// Asks the peer to close its end of a path that this end has given up. [`SessionEvent::Fenced`] follows.
    pub fn ask_fence(&mut self, lost: Via, now: Time) -> Result<(), SessionError> {
        self.advance(now);
        self.check_alive()?;
        let label = self.paths.label(lost).ok_or(SessionError::UnknownPath)?;
        self.drop_path(lost, now);
        self.say(Control::Fence { label });
        Ok(())
    }

    /// This end of the path that [`SessionEvent::FenceAsked`] named is closed, and nothing sent on it takes effect any more.
    pub fn fence_done(&mut self, label: u64, now: Time) {
        self.advance(now);
        if self.check_alive().is_ok() {
            self.paths.on_fence_done(label);
            self.say(Control::FenceDone { label });
        }
    }

    /// Asks to use one of the peer's regions for a while.
    pub fn ask_lease(&mut self, region: RegionKey, duration: Time, now: Time) -> Result<LeaseId, SessionError> {
        self.advance(now);
        self.check_alive()?;
        self.outbox.room_for(64)?;
        let id = self.leases.ask(now)?;
        self.say(Control::LeaseAsk { id, region, duration });
        Ok(id)
    }

    /// Asks for more time on a lease, counted from now.
    pub fn renew_lease(&mut self, id: LeaseId, duration: Time, now: Time) -> Result<(), SessionError> {
        self.advance(now);
        self.check_alive()?;
        self.outbox.room_for(64)?;
        self.leases.renew(id, now)?;
        self.say(Control::LeaseRenew { id, duration });
        Ok(())
    }

    /// Answers [`SessionEvent::LeaseAsked`], with the duration that is granted.
    pub fn answer_lease(&mut self, id: LeaseId, granted: Result<Time, Refusal>, now: Time) {
        self.advance(now);
        if self.check_alive().is_ok() && self.leases.answer(id, granted, now) {
            self.say(Control::LeaseAnswer { id, granted });
        }
    }

    /// Gives a lease back before it runs out.
    pub fn return_lease(&mut self, id: LeaseId, now: Time) {
        self.advance(now);
        if self.leases.give_back(id) && self.check_alive().is_ok() {
            self.say(Control::LeaseReturn { id });
        }
    }

    /// Ends the session in order, of which this end has no more use: what was said before still arrives. [`SessionEvent::Lost`] follows within a second.
    pub fn close(&mut self, now: Time) {
        self.close_because(CloseReason::Done, now);
    }

    /// Ends the session in order, and tells the peer why.
    pub fn close_because(&mut self, reason: CloseReason, now: Time) {
        self.advance(now);
        match self.state {
            State::Greeting => self.end(SessionLoss::Closed),
            State::Open => {
                let goodbye = self.outbox.push(Control::Goodbye { reason }.encode(), None);
                let until = now.saturating_add(CLOSE_PATIENCE.min(self.config.silence_max));
                self.state = State::Closing { goodbye, until };
            }
            State::Closing { .. } | State::Ended => {}
        }
    }

    pub fn on_timeout(&mut self, now: Time) {
        self.advance(now);
        while let Some(event) = self.leases.expire(now) {
            self.events.push_back(event);
        }
        match self.state {
            State::Greeting => self.on_handshake_timeout(now),
            State::Open => self.on_open_timeout(now),
            State::Closing { until, .. } if until <= now => self.end(SessionLoss::Closed),
            State::Closing { .. } => self.on_open_timeout(now),
            State::Ended => {}
        }
    }

    /// When `on_timeout` has something to do, if nothing else happens before.
    pub fn next_timeout(&self) -> Option<Time> {
        let own = match self.state {
            State::Greeting => self.handshake.next_timeout(),
            State::Open => self.next_open_timeout(),
            State::Closing { until, .. } => self.next_open_timeout().map(|due| due.min(until)).or(Some(until)),
            State::Ended => None,
        };
        [own, self.leases.next_timeout()].into_iter().flatten().min()
    }

    /// A message to be sent, and the path to send it on.
    pub fn next_message(&mut self) -> Option<(Via, Vec<u8>)> {
        self.made.pop_front().or_else(|| self.make_traffic())
    }

    pub fn next_event(&mut self) -> Option<SessionEvent> {
        let event = self.events.pop_front();
        if self.stalled && self.events.len() <= MAX_EVENTS / 2 {
            self.resume();
        }
        event
    }

    fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    fn check_alive(&self) -> Result<(), SessionError> {
        match self.state {
            State::Greeting | State::Open => Ok(()),
            State::Closing { .. } | State::Ended => Err(SessionError::Ended),
        }
    }

    /// Queues a control that is not refused for lack of room, because what it answers was bounded already.
    fn say(&mut self, control: Control<'_>) {
        self.outbox.push(control.encode(), None);
    }

    fn drop_path(&mut self, via: Via, now: Time) {
        let Some(path) = self.paths.remove(via) else {
            return;
        };
        self.outbox.on_path_lost(via);
        if path.joined && self.open.is_some() && self.paths.is_theirs(path.label) {
            // The peer has opened it, and may have heard nothing on it: then it does not know who sent what arrived there.
            self.say(Control::Joined { label: path.label });
        }
        if path.joined && !self.paths.any_joined() && self.open.is_some() {
            // Patience begins anew only if the path had been good for something, else a path that comes and goes without
            // a word would keep a dead peer alive for ever.
            if self.heard > self.stranded {
                self.stranded = now;
            }
            self.events.push_back(SessionEvent::PathWanted);
        }
    }

    fn count(&mut self, via: Via, arrival: Arrival) {
        if arrival.tag & TOLD_BIT != 0 {
            self.told.push_back((via, arrival));
            return;
        }
        match self.arrivals.arrive(arrival.tag, arrival.index) {
            Ok(ready) => self.deliver(ready),
            Err(misbehaviour) => self.on_misbehaviour(misbehaviour),
        }
    }

    /// Counts what arrived before its path was known to be the peer's.
    fn count_early(&mut self) {
        for (via, arrival) in self.paths.take_early() {
            if self.state != State::Ended {
                self.count(via, arrival);
            }
        }
    }

    fn end(&mut self, cause: SessionLoss) {
        if self.state != State::Ended {
            self.state = State::Ended;
            self.events.push_back(SessionEvent::Lost { cause });
        }
    }
}

/// Whether any peer at all could be told of this region under this name.
pub(crate) fn check_publication(name: &str, region: &RemoteRegion) -> Result<(), SessionError> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(SessionError::RegionName);
    }
    let fits =
        |(transport, grant): &(String, Grant)| transport.len() <= MAX_NAME_BYTES && grant.0.len() <= MAX_GRANT_BYTES;
    if region.grants.len() > MAX_GRANTS || !region.grants.iter().all(fits) {
        return Err(SessionError::Grants);
    }
    Ok(())
}
