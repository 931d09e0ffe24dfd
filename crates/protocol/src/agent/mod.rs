//! The wiring of one agent: transports, transfer engine and sessions, turned by whoever has a clock.
//!
//! [`Core`] is all of an agent except its threads and handles. The runtime turns it on a thread, the simulator on a virtual
//! clock, and both therefore run the same wiring: which signal goes to which session, when a new path becomes a lane, what is
//! fenced, what is announced and when, who may still be inside a region that is being released.
//!
//! A [`PeerId`] is one session with one life of a peer. When the session is lost the number is dead, and connecting again gives
//! another one, so that no handle of an earlier life can reach a later one by accident.
//!
//! A turn is [`Core::pump`]: timeouts, posts, polls, and what follows from them. [`Core::push`] is the short turn after a
//! submit: it posts, and polls only the transports that took something, so that a small read over shared memory completes
//! inside one call. Neither blocks; [`Core::next_timeout`] says when to turn again if no transport wakes its owner earlier.

mod announce;
mod arrived;
mod atomics;
mod connect;
pub(crate) mod harness;
mod here;
mod parcels;
mod paths;
mod rails;
mod regions;
mod ring;
mod staged;
#[cfg(test)]
mod tests;
mod turn;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use thiserror::Error;
use weft_plan::Time;

use crate::error::{Loss, Refusal};
use crate::leg::Direction;
use crate::numbered::Numbered;
use crate::region::{Epoch, RegionKey, RemoteRegion};
use crate::session::{
    Config, Identity, LeaseId, MAX_PAYLOAD_BYTES, NotificationId, Session, SessionError, SessionLoss,
};
use crate::transfer::{Engine, Limits, PeerId, Request, SubmitError, Summary, TransferError, TransferId};
use crate::transport::{Op, PeerAddress, Signal, Transport};

use announce::Announcement;
use arrived::{COMMIT_BIT, tag_of};
use atomics::Atomics;
use connect::Peer;
use here::Here;
use parcels::{Inbox, Spare};
use paths::Path;
use regions::Regions;
use staged::Stages;

pub use atomics::{AtomicError, AtomicId};
pub use parcels::{MAX_PARCEL_BYTES, Parcel};
pub use regions::RegionError;
pub use weft_plan::route::{NoRoute, Reach};

/// Of so many peers an agent remembers why their sessions are over.
pub const ENDINGS_MAX: usize = 1024;

/// An agent without its threads. See the [module](self).
pub struct Core<T: ?Sized + Transport> {
    settings: Settings,
    slots: Vec<Slot<T>>,
    random: Random,
    engine: Engine,
    regions: Regions,
    peers: Numbered<Peer>,
    here: Here,
    /// By the number that the engine knows as a lane and the session as a via.
    paths: Numbered<Path>,
    /// The number of each path by its transport's own.
    by_path: Vec<Numbered<u32>>,
    /// Transports that have been given something since they were last polled.
    posted: Vec<bool>,
    /// When something of a peer falls due.
    timers: BTreeSet<(Time, PeerId)>,
    /// Peers whose session has been touched and not yet looked at.
    touched: Vec<PeerId>,
    /// Accepted paths that have not said who they are, oldest first, with the time by which they must.
    unclaimed: VecDeque<(Time, u32)>,
    announcements: BTreeMap<TransferId, Announcement>,
    atomics: Atomics,
    stages: Stages,
    /// Peers whose session has more to say than there is room for among the events.
    stalled: Vec<PeerId>,
    events: VecDeque<Event>,
    /// Parcels that nobody has taken, by group.
    inboxes: Vec<Inbox>,
    parcels_came: bool,
    closed_groups: VecDeque<u64>,
    spare: Spare,
    /// Why sessions are over, by peer: the latest of them.
    endings: BTreeMap<PeerId, SessionLoss>,
    /// The same peers in the order in which they ended, which is not that of their numbers.
    ended: VecDeque<PeerId>,
    /// Notifications that have left the events, but that the application has not looked at.
    untaken: usize,
    next_peer: u32,
    next_path: u32,
    next_message: u64,
    next_tag: u64,
    /// Kept between turns so that a turn allocates nothing.
    signals: Vec<Signal>,
    batch: Vec<Op>,
}

/// Who this agent is and what it allows.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What this agent brings into every session. The addresses are filled in from the transports.
    ///
    /// Lives of one name are told apart by the epoch, and a later life must have a greater one: the time of the start will do.
    pub session: Config,
    /// By when an accepted path must have said who it is, and for how long one that is over is still answered.
    pub handshake_max: Time,
    /// The wait before a lost path is opened again; it doubles up to the maximum.
    pub backoff_min: Time,
    pub backoff_max: Time,
    /// How long a peer that has closed its last path may take to come back.
    pub rejoin_max: Time,
    /// The longest lease that is granted.
    pub lease_max: Time,
    pub peers_max: usize,
    /// Accepted paths that may be waiting to say who they are.
    pub unclaimed_paths_max: usize,
    /// Events that may wait before peers are held back. One whose writes are told by their arrival cannot be held back, and loses its paths in the end.
    pub events_max: usize,
    pub limits: Limits,
}

impl Settings {
    pub fn new(session: Config) -> Settings {
        Settings {
            session,
            handshake_max: Time::from_secs(5),
            backoff_min: Time::from_ms(10),
            backoff_max: Time::from_secs(2),
            rejoin_max: Time::from_secs(1),
            lease_max: Time::from_secs(60),
            peers_max: 1024,
            unclaimed_paths_max: 256,
            events_max: 4096,
            limits: Limits::default(),
        }
    }
}

/// Whom to connect to.
#[derive(Clone, Debug)]
pub struct Target {
    /// Tried in order, again and again until the deadline.
    pub addresses: Vec<PeerAddress>,
    pub deadline: Time,
    /// Refuse a peer of another name.
    pub name: Option<String>,
    /// Refuse another life of the peer.
    pub epoch: Option<Epoch>,
}

impl Target {
    pub fn at(address: PeerAddress, deadline: Time) -> Target {
        Target {
            addresses: vec![address],
            deadline,
            name: None,
            epoch: None,
        }
    }
}

/// A transport and the part it plays.
#[derive(Debug)]
pub struct Slot<T: ?Sized> {
    /// Which peers it can reach. Those on the same host are the ones whose host identity equals ours. [`Reach::Here`]: none, but places
    /// of this agent.
    pub reach: Reach,
    /// Which transport comes first where several reach a peer: that of the smallest number, and among equals the cheapest.
    pub preference: u8,
    /// How many paths to open to each peer.
    pub paths: usize,
    pub transport: Box<T>,
}

/// What an agent keeps for what is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnderWay {
    /// Announcements of its own transfers, and those that are told by their arrival.
    pub announcements: usize,
    /// Notifications of peers that wait for their data.
    pub held: usize,
    /// Pieces of the ring that staged transfers go through.
    pub pieces: usize,
}

/// Where the agent's randomness comes from: the operating system, or a seed.
pub type Random = Box<dyn FnMut() -> [u8; 32] + Send>;

/// What happened, for the application.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A session is up. `accepted`: the peer came to us.
    Connected {
        peer: PeerId,
        identity: Identity,
        accepted: bool,
    },
    /// [`Core::connect`] did not succeed by its deadline.
    ConnectFailed {
        peer: PeerId,
        error: ConnectError,
    },
    /// The session is over and the number is dead.
    PeerLost {
        peer: PeerId,
        name: String,
        cause: SessionLoss,
    },
    /// A path carries transfers.
    PathUp {
        peer: PeerId,
        transport: &'static str,
    },
    PathDown {
        peer: PeerId,
        transport: &'static str,
        loss: Loss,
    },
    /// The peer has published a region, or changed it.
    Published {
        peer: PeerId,
        name: String,
    },
    Withdrawn {
        peer: PeerId,
        name: String,
    },
    Notified {
        peer: PeerId,
        payload: Vec<u8>,
    },
    /// A write of the peer is in place, all `parts` of it, which it wanted told under this number.
    Arrived {
        peer: PeerId,
        number: u32,
        parts: u32,
    },
    /// The peer's application has been given our notification.
    Delivered {
        peer: PeerId,
        id: NotificationId,
    },
    Ended {
        id: TransferId,
        outcome: Result<Summary, TransferError>,
    },
    /// What the word held before, or why that is not known.
    AtomicEnded {
        id: AtomicId,
        outcome: Result<u64, AtomicError>,
    },
    /// We may look at a peer's region until then, on our clock.
    Leased {
        peer: PeerId,
        lease: LeaseId,
        until: Time,
    },
    LeaseRefused {
        peer: PeerId,
        lease: LeaseId,
        refusal: Refusal,
    },
    /// A lease of ours is over: the peer may change or unmap the memory.
    LeaseEnded {
        peer: PeerId,
        lease: LeaseId,
    },
}

/// Why there is no session with a peer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConnectError {
    #[error("no transport of this agent understands {address}")]
    NoTransport { address: PeerAddress },
    #[error("no path to {address}: {loss}")]
    NoPath { address: PeerAddress, loss: Loss },
    #[error("{address} answered, but no session came about: {cause}")]
    NoSession { address: PeerAddress, cause: SessionLoss },
    #[error("{address} did not answer by the deadline")]
    Expired { address: PeerAddress },
    #[error("no address was given")]
    NoAddress,
    #[error("this agent has as many peers as it allows ({max})")]
    TooManyPeers { max: usize },
}

/// Why something was not asked of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PeerError {
    #[error("the session with this peer is over, or not yet established")]
    NotConnected,
    #[error("nobody is there to be notified: both ends of the transfer are this agent's own")]
    NobodyThere,
    #[error(transparent)]
    NoRoute(#[from] NoRoute),
    #[error("it would have to go through host memory, and this agent has been given none for that")]
    NoStage,
    #[error(
        "what goes through host memory on the way can neither be committed nor told to the peer's application part by part"
    )]
    NotThroughTheRing,
    #[error("a write is told to the peer's application by its arrival or by a notification, not by both")]
    ToldTwice,
    #[error(
        "a write that is told by its arrival cannot have a checksum: the peer is told when the bytes are there, before \
         they can be compared; use a notification"
    )]
    ToldUnverified,
    #[error("a write that is told by its arrival would be cut into more than {max} parts")]
    TooManyParts { max: usize },
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Submit(#[from] SubmitError),
}

impl<T: ?Sized + Transport> Core<T> {
    pub fn new(settings: Settings, slots: Vec<Slot<T>>, random: Random) -> Core<T> {
        Core {
            engine: Engine::new(settings.limits),
            regions: Regions::new(settings.session.epoch, slots.len()),
            peers: Numbered::new(),
            here: Here::new(&slots, settings.backoff_min),
            paths: Numbered::new(),
            by_path: slots.iter().map(|_| Numbered::new()).collect(),
            posted: vec![false; slots.len()],
            timers: BTreeSet::new(),
            touched: Vec::new(),
            unclaimed: VecDeque::new(),
            announcements: BTreeMap::new(),
            atomics: Atomics::default(),
            stages: Stages::default(),
            stalled: Vec::new(),
            events: VecDeque::new(),
            inboxes: Vec::new(),
            parcels_came: false,
            closed_groups: VecDeque::new(),
            spare: Spare::default(),
            endings: BTreeMap::new(),
            ended: VecDeque::new(),
            untaken: 0,
            next_peer: 0,
            next_path: 0,
            next_message: 0,
            next_tag: 0,
            signals: Vec::new(),
            batch: Vec::new(),
            settings,
            slots,
            random,
        }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }
    /// The transports, for whoever must wait on them.
    pub fn slots(&self) -> &[Slot<T>] {
        &self.slots
    }
    /// The same, for whoever must tell them that it is going to wait.
    pub fn slots_mut(&mut self) -> &mut [Slot<T>] {
        &mut self.slots
    }
    /// Where peers reach this agent, one address a transport.
    pub fn addresses(&self) -> Vec<PeerAddress> {
        let reachable = self.slots.iter().filter(|s| s.reach != Reach::Here);
        reachable.map(|s| s.transport.capabilities().address.clone()).collect()
    }

    /// Who a connected peer is.
    pub fn identity(&self, peer: PeerId) -> Option<&Identity> {
        self.peers.at(peer.0)?.identity.as_ref()
    }
    /// Whether there is a session with a peer, and it is not over.
    pub fn is_connected(&self, peer: PeerId) -> bool {
        let peer = self.peers.at(peer.0);
        peer.is_some_and(|peer| peer.identity.is_some() && peer.over.is_none())
    }
    /// Why the session with a peer is over. The latest [`ENDINGS_MAX`] peers are remembered.
    pub fn ending(&self, peer: PeerId) -> Option<&SessionLoss> {
        self.endings.get(&peer)
    }
    /// A region that the peer has published.
    pub fn region(&self, peer: PeerId, name: &str) -> Option<&RemoteRegion> {
        self.peers.at(peer.0)?.session.as_ref()?.region(name)
    }
    /// All that the peer has published.
    pub fn regions(&self, peer: PeerId) -> impl Iterator<Item = (&str, &RemoteRegion)> {
        let session = self.peers.at(peer.0).and_then(|p| p.session.as_ref());
        session.into_iter().flat_map(|s| s.regions())
    }

    /// Starts a transfer, which posts at the next turn. With `announce`, the peer is notified once the bytes are in place.
    pub fn submit(
        &mut self,
        mut request: Request,
        announce: Option<&[u8]>,
        now: Time,
    ) -> Result<TransferId, PeerError> {
        let peer = request.peer;
        if peer == PeerId::HERE {
            if announce.is_some() {
                return Err(PeerError::NobodyThere);
            }
        } else if self.identity(peer).is_none() {
            return Err(PeerError::NotConnected);
        }
        // Parts are counted where something is announced, and nowhere else.
        request.tag = None;
        let told = self.tag_unannounced(&mut request, announce.is_some())?;
        let ways = self.ways(&request)?;
        if ways.is_some() && request.tag.is_some() {
            return Err(PeerError::NotThroughTheRing);
        }
        let Some(payload) = announce else {
            let id = match ways {
                None => self.engine.submit(request, now)?,
                Some(ways) => self.submit_staged(request, ways, now)?,
            };
            if let Some(parts) = told {
                self.add_told(id, peer, parts);
            }
            return Ok(id);
        };
        if payload.len() > MAX_PAYLOAD_BYTES {
            return Err(SessionError::PayloadTooLong { len: payload.len() }.into());
        }
        self.may_announce(peer)?;
        if let Some(ways) = ways {
            // Nobody counts what goes through the ring: the peer is told when the transfer has ended.
            let id = self.submit_staged(request, ways, now)?;
            self.add_announcement(id, peer, payload, None);
            return Ok(id);
        }
        // What is to be committed is announced when it has been.
        let tag = (request.direction == Direction::Write && request.tag.is_none()).then_some(self.next_tag);
        self.next_tag += 1;
        request.tag = request.tag.or(tag);
        let id = self.engine.submit(request, now)?;
        self.add_announcement(id, peer, payload, tag);
        Ok(id)
    }

    /// The tag of a write whose parts are counted though nothing is announced. Says how many they may be, where the peer's application is told of them.
    fn tag_unannounced(&mut self, request: &mut Request, announces: bool) -> Result<Option<usize>, PeerError> {
        if request.direction == Direction::Read {
            (request.arrives, request.commit) = (None, false);
        }
        let Some(number) = request.arrives else {
            if request.commit {
                request.tag = Some(COMMIT_BIT | self.next_tag);
                self.next_tag += 1;
            }
            return Ok(None);
        };
        if request.peer == PeerId::HERE {
            return Err(PeerError::NobodyThere);
        }
        if announces {
            return Err(PeerError::ToldTwice);
        }
        // The peer's application is told by what lands there, and whether it is whole is known only here and later.
        if request.checksum {
            return Err(PeerError::ToldUnverified);
        }
        let parts = self.may_tell(request)?;
        request.tag = Some(tag_of(number, self.next_tag));
        self.next_tag += 1;
        Ok(Some(parts))
    }

    /// Ends a transfer early. Its [`Event::Ended`] still comes, once nothing of it can touch memory any more.
    pub fn cancel(&mut self, id: TransferId, now: Time) {
        if !self.cancel_staged(id, now) {
            self.engine.cancel(id, now);
        }
    }

    /// Sends a notification: once, in no particular order with transfers.
    pub fn notify(&mut self, peer: PeerId, payload: &[u8], now: Time) -> Result<NotificationId, PeerError> {
        let session = self.established(peer)?;
        let id = session.notify(payload, None, now)?;
        self.touch(peer);
        Ok(id)
    }

    /// Asks to look at a peer's region without copying it; [`Event::Leased`] or [`Event::LeaseRefused`] follows.
    pub fn borrow(&mut self, peer: PeerId, region: RegionKey, duration: Time, now: Time) -> Result<LeaseId, PeerError> {
        let lease = self.established(peer)?.ask_lease(region, duration, now)?;
        self.touch(peer);
        Ok(lease)
    }

    /// Asks for more time on a lease, counted from now; the same events follow.
    pub fn renew(&mut self, peer: PeerId, lease: LeaseId, duration: Time, now: Time) -> Result<(), PeerError> {
        self.established(peer)?.renew_lease(lease, duration, now)?;
        self.touch(peer);
        Ok(())
    }

    /// Gives a lease back before its end.
    pub fn give_back(&mut self, peer: PeerId, lease: LeaseId, now: Time) {
        if let Ok(session) = self.established(peer) {
            session.return_lease(lease, now);
            self.touch(peer);
        }
    }

    /// Says how many notifications the application has been given and not looked at. They count as events, so that peers
    /// are held back when nobody looks.
    pub fn set_untaken(&mut self, notifications: usize) {
        self.untaken = notifications;
    }

    /// What is kept for transfers and notifications that are under way. When none is, nothing is left of them.
    pub fn under_way(&self) -> UnderWay {
        let sessions = self.peers.iter().filter_map(|(_, peer)| peer.session.as_ref());
        UnderWay {
            announcements: self.announcements.len(),
            held: sessions.map(Session::held_notifications).sum(),
            pieces: self.stages.pieces(),
        }
    }

    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}

impl<T: ?Sized + Transport> fmt::Debug for Core<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("name", &self.settings.session.name)
            .field("epoch", &self.settings.session.epoch)
            .field("peers", &self.peers.len())
            .field("paths", &self.paths.len())
            .finish_non_exhaustive()
    }
}
