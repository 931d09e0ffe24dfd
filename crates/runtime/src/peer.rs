//! The handle of a peer: its regions, transfers with it, notifications to it.

use std::sync::Arc;
use std::time::Duration;

use weft_fabric::fork::OfProcess;
use weft_plan::{Spans, Time};
use weft_protocol::region::RemoteRegion;
use weft_protocol::transfer::{Legs, PeerId, Request};
use weft_protocol::{AtomicAct, Direction, Leg, LegError, Ready};

use crate::atomic::AtomicBuilder;
use crate::driver::{PeerState, Shared};
use crate::error::Error;
use crate::memory::{Kept, Memory, after};
use crate::observe::Event;
use crate::transfer::{Cell, Transfer};

/// Every transfer ends some day.
pub(crate) const DEADLINE_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// A connected agent. The handle is one session with one life of the peer: when that ends, connect again.
#[derive(Clone, Debug)]
pub struct Peer {
    pub(crate) shared: OfProcess<Arc<Shared>>,
    pub(crate) id: PeerId,
    pub(crate) name: Arc<str>,
    pub(crate) defaults: Defaults,
}

/// Handles of one session are equal, and those of two sessions are not, whatever name their peers go by.
impl PartialEq for Peer {
    fn eq(&self, other: &Peer) -> bool {
        self.id == other.id && self.shared.is_same(&other.shared)
    }
}

impl Eq for Peer {}

/// What a transfer takes from the settings where the call is silent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub(crate) deadline: Duration,
    pub(crate) checksum: bool,
}

/// A region that a peer has published.
#[derive(Clone, Debug)]
pub struct Remote {
    pub(crate) name: Arc<str>,
    pub(crate) region: RemoteRegion,
}

impl Remote {
    pub fn name(&self) -> &str {
        &self.name
    }
    pub fn len(&self) -> u64 {
        self.region.len
    }
    pub fn is_empty(&self) -> bool {
        self.region.len == 0
    }
    pub fn region(&self) -> &RemoteRegion {
        &self.region
    }
}

impl Peer {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether this is the process that has the session, and not a forked child of it.
    pub fn check_process(&self) -> Result<(), Error> {
        self.shared.get()?;
        Ok(())
    }

    /// Whether the session still lives.
    pub fn is_connected(&self) -> bool {
        let shared = self.shared.get();
        shared.is_ok_and(|shared| shared.lock().core.identity(self.id).is_some())
    }

    /// The transports that carry transfers to this peer now.
    pub fn transports(&self) -> Vec<&'static str> {
        let shared = self.shared.get();
        shared.map_or_else(|_| Vec::new(), |shared| shared.lock().core.transports(self.id))
    }

    /// How many paths carry transfers to this peer over `transport` now: one for each rail, where it has several.
    pub fn paths(&self, transport: &str) -> usize {
        let shared = self.shared.get();
        shared.map_or(0, |shared| shared.lock().core.path_count(self.id, transport))
    }

    /// Waits until transfers can go over `transport`.
    pub fn wait_for_transport(&self, transport: &str, timeout: Duration) -> Result<(), Error> {
        self.wait(
            timeout,
            || format!("{transport} to {:?}", self.name),
            |core, id| core.transports(id).contains(&transport).then_some(()),
        )
    }

    /// A region by the name that the peer publishes it under, waiting for that if need be.
    pub fn region(&self, name: &str, timeout: Duration) -> Result<Remote, Error> {
        self.wait(
            timeout,
            || format!("region {name:?} of {:?}", self.name),
            |core, id| {
                core.region(id, name).cloned().map(|region| Remote {
                    name: name.into(),
                    region,
                })
            },
        )
    }

    /// The names of the regions that the peer has published so far.
    pub fn region_names(&self) -> Vec<String> {
        let Ok(shared) = self.shared.get() else {
            return Vec::new();
        };
        let world = shared.lock();
        let regions = world.core.regions(self.id);
        regions.map(|(name, _)| name.to_owned()).collect()
    }

    /// From the remote region into local memory. Without [spans](TransferBuilder::spans) all of it, and the two must be of one size.
    pub fn read<'a>(&'a self, local: &'a Memory, remote: &'a Remote) -> TransferBuilder<'a> {
        TransferBuilder::new(self, Direction::Read).whole_leg(local, remote)
    }

    /// From local memory into the remote region. Without [spans](TransferBuilder::spans) all of it, and the two must be of one size.
    pub fn write<'a>(&'a self, local: &'a Memory, remote: &'a Remote) -> TransferBuilder<'a> {
        TransferBuilder::new(self, Direction::Write).whole_leg(local, remote)
    }

    /// A transfer of several legs, each a pair of regions: one region a layer, say.
    pub fn transfer(&self, direction: Direction) -> TransferBuilder<'_> {
        TransferBuilder::new(self, direction)
    }

    /// Adds to the word at `offset` of the remote region, which the peer must have published for reading and writing, and tells
    /// what it held. A word is eight bytes, little-endian, and its offset a multiple of eight.
    ///
    /// It is atomic with respect to all such operations on the word, whoever makes them and whatever way they come, and to those
    /// of its owner ([`Memory::fetch_add`], [`Memory::compare_swap`], or an `AtomicU64` at the same place); not to transfers.
    pub fn fetch_add<'a>(&'a self, remote: &Remote, offset: u64, value: u64) -> AtomicBuilder<'a> {
        AtomicBuilder::new(self, remote, offset, AtomicAct::FetchAdd(value))
    }

    /// Stores `new` in the word at `offset` of the remote region if it is `expected`, and tells what it held: `expected` means
    /// that it was stored. Otherwise as [`fetch_add`](Peer::fetch_add).
    pub fn compare_swap<'a>(&'a self, remote: &Remote, offset: u64, expected: u64, new: u64) -> AtomicBuilder<'a> {
        AtomicBuilder::new(self, remote, offset, AtomicAct::CompareSwap { expected, new })
    }

    /// Sends a notification, which arrives once.
    pub fn notify(&self, payload: &[u8]) -> Result<(), Error> {
        let shared = self.shared.get()?;
        let told = shared.act(|world, now| {
            world.check_running()?;
            world.core.notify(self.id, payload, now).map_err(Error::from)
        });
        told.map_err(|error| self.explain(shared, error))?;
        self.told(shared, payload);
        Ok(())
    }

    /// Ends the session. Transfers under way end with an error.
    pub fn disconnect(&self) {
        // A session of the parent's is not its child's to end.
        if let Ok(shared) = self.shared.get() {
            shared.act(|world, now| world.core.disconnect(self.id, now));
        }
    }

    /// Starts a transfer that has been checked, and keeps its memory registered until it has ended.
    fn start(
        &self,
        request: impl FnOnce(Time) -> Request,
        notify: Option<&[u8]>,
        memory: Kept,
    ) -> Result<Transfer, Error> {
        let shared = self.shared.get()?;
        let posted = shared.act(|world, now| {
            world.check_running()?;
            let request = request(now);
            let (direction, deadline) = (request.direction, request.deadline);
            let bytes = request
                .legs
                .iter()
                .fold(0u64, |bytes, leg| bytes.saturating_add(leg.bytes()));
            let id = world.core.submit(request, notify, now).map_err(Error::from)?;
            let cell = Arc::new(Cell::new(self.name.clone(), direction, now, memory));
            world.transfers.insert(id, cell.clone());
            Ok((id, cell, deadline, bytes))
        });
        let (id, cell, deadline, bytes) = posted.map_err(|error: Error| self.explain(shared, error))?;
        shared.observer.trace(cell.started, || Event::TransferSubmitted {
            id: id.0,
            peer: self.name.clone(),
            direction: cell.direction,
            bytes,
        });
        if let Some(payload) = notify {
            self.told(shared, payload);
        }
        Ok(Transfer {
            shared: self.shared.clone(),
            id,
            cell,
            deadline,
        })
    }

    /// Waits for something of this peer, or for its end.
    fn wait<T>(
        &self,
        timeout: Duration,
        what: impl Fn() -> String,
        find: impl Fn(&weft_protocol::agent::Core<dyn weft_fabric::Live>, PeerId) -> Option<T>,
    ) -> Result<T, Error> {
        let shared = self.shared.get()?;
        let found = shared.wait_until(after(shared, timeout), |world| match world.peers.get(&self.id) {
            Some(PeerState::Gone(error)) => Some(Err(error.clone())),
            _ => find(&world.core, self.id).map(Ok),
        });
        found.unwrap_or_else(|| Err(shared.in_vain(what)))
    }

    /// Reports that the peer is told something.
    fn told(&self, shared: &Shared, payload: &[u8]) {
        let bytes = payload.len() as u64;
        let now = shared.clock.now();
        shared.observer.trace(now, || Event::NotificationSent {
            peer: self.name.clone(),
            bytes,
        });
    }

    /// "Not connected" hides the reason, which is known.
    pub(crate) fn explain(&self, shared: &Shared, error: Error) -> Error {
        match (error, shared.lock().peers.get(&self.id)) {
            (Error::Peer(_), Some(PeerState::Gone(reason))) => reason.clone(),
            (error, _) => error,
        }
    }
}

/// A transfer being described. Nothing happens before [`post`](TransferBuilder::post).
#[derive(Debug)]
#[must_use = "a described transfer does nothing until it is posted"]
pub struct TransferBuilder<'a> {
    peer: &'a Peer,
    direction: Direction,
    /// In place, because most transfers have one leg.
    leg: Option<Described<'a>>,
    /// Those before it.
    legs: Vec<Described<'a>>,
    deadline: Duration,
    checksum: bool,
    notify: Option<Vec<u8>>,
    more: More,
}

/// What else is asked of a transfer.
#[derive(Clone, Debug, Default)]
struct More {
    arrives: Option<u32>,
    commit: bool,
    after: Option<Arc<dyn Ready>>,
}

/// A leg being described.
#[derive(Debug)]
struct Described<'a> {
    local: &'a Memory,
    remote: &'a Remote,
    /// Here and there; all of both where nothing is said.
    spans: Option<(Spans, Spans)>,
}

impl<'a> TransferBuilder<'a> {
    fn new(peer: &'a Peer, direction: Direction) -> TransferBuilder<'a> {
        let Defaults { deadline, checksum } = peer.defaults;
        TransferBuilder {
            peer,
            direction,
            leg: None,
            legs: Vec::new(),
            deadline,
            checksum,
            notify: None,
            more: More::default(),
        }
    }

    /// Which bytes, in order, of the last leg's two sides.
    ///
    /// # Panics
    /// Where no leg has been described yet.
    pub fn spans(mut self, local: Spans, remote: Spans) -> TransferBuilder<'a> {
        let leg = self.leg.as_mut().expect("spans belong to a leg");
        leg.spans = Some((local, remote));
        self
    }

    /// Adds a leg.
    pub fn leg(
        mut self,
        local: &'a Memory,
        local_spans: Spans,
        remote: &'a Remote,
        remote_spans: Spans,
    ) -> TransferBuilder<'a> {
        self.add(local, remote, Some((local_spans, remote_spans)));
        self
    }

    /// Adds a leg of all bytes of both sides, which must be of one size.
    pub fn whole_leg(mut self, local: &'a Memory, remote: &'a Remote) -> TransferBuilder<'a> {
        self.add(local, remote, None);
        self
    }

    fn add(&mut self, local: &'a Memory, remote: &'a Remote, spans: Option<(Spans, Spans)>) {
        let before = self.leg.replace(Described { local, remote, spans });
        self.legs.extend(before);
    }

    /// By when the transfer ends, counted from each post; a month is the longest.
    pub fn deadline(mut self, after: Duration) -> TransferBuilder<'a> {
        self.deadline = after.min(DEADLINE_MAX);
        self
    }

    /// Whether to compare the bytes at both ends.
    pub fn checksum(mut self, on: bool) -> TransferBuilder<'a> {
        self.checksum = on;
        self
    }

    /// What to tell the peer once the bytes are in place.
    pub fn notify(mut self, payload: &[u8]) -> TransferBuilder<'a> {
        self.notify = Some(payload.to_vec());
        self
    }

    /// Tells the peer's application of a write, under this number, once all of it is in place: it [hears](crate::Agent::arrival) of it without a message.
    /// Such a write is never carried twice; where a path is lost under it, it fails.
    ///
    /// The peer is told when the bytes are there, before anybody could compare them. So posting it with a
    /// [checksum](TransferBuilder::checksum), also where the settings ask for one, is an error ([`PeerError::ToldUnverified`](crate::PeerError::ToldUnverified)); a
    /// [notification](TransferBuilder::notify) comes after the comparison. A write of more than 32,768 parts (of which a transport takes one at a time, usually
    /// of a megabyte) cannot be told this way either, and no more than 4,096 to one peer at a time.
    ///
    /// Numbers from 2³¹ on are those of [channels](crate::matched): an agent that has any takes them for its channels'.
    pub fn arrives(mut self, number: u32) -> TransferBuilder<'a> {
        self.more.arrives = Some(number);
        self
    }

    /// Has what is written made to last before the transfer counts as done. Memory has nothing to be done for that.
    pub fn commit(mut self) -> TransferBuilder<'a> {
        self.more.commit = true;
        self
    }

    /// Begins only when this has come about: a kernel on a stream, a thread's word. The deadline counts from the post all the same.
    pub fn after(mut self, ready: Arc<dyn Ready>) -> TransferBuilder<'a> {
        self.more.after = Some(ready);
        self
    }

    /// Checks the description once, so that it can be posted many times.
    pub fn prepare(mut self) -> Result<Prepared, Error> {
        let (legs, memory) = self.checked()?;
        Ok(Prepared {
            peer: self.peer.clone(),
            direction: self.direction,
            legs,
            memory,
            deadline: self.deadline.into(),
            checksum: self.checksum,
            notify: self.notify,
            more: self.more,
        })
    }

    /// Starts the transfer.
    pub fn post(mut self) -> Result<Transfer, Error> {
        let (legs, memory) = self.checked()?;
        let deadline: Time = self.deadline.into();
        let request = |now: Time| {
            Request::of(self.peer.id, self.direction, legs, now.saturating_add(deadline))
                .checksum(self.checksum)
                .arrives(self.more.arrives)
                .commit(self.more.commit)
                .after(self.more.after)
        };
        self.peer.start(request, self.notify.as_deref(), memory)
    }

    /// The legs, each found to be possible, and the memory that has to stay registered for them.
    fn checked(&mut self) -> Result<(Legs, Kept), Error> {
        let shared = self.peer.shared.get()?;
        let kept = |leg: &Described<'_>| leg.local.inner.clone();
        if self.legs.is_empty()
            && let Some(only) = self.leg.take()
        {
            let memory = Kept::One(kept(&only));
            return Ok((Legs::One(only.checked(shared)?), memory));
        }
        let mut all = std::mem::take(&mut self.legs);
        all.extend(self.leg.take());
        let memory = Kept::Several(all.iter().map(kept).collect());
        let legs: Result<Arc<[_]>, Error> = all.into_iter().map(|leg| leg.checked(shared)).collect();
        Ok((Legs::Several(legs?), memory))
    }
}

impl Described<'_> {
    /// The leg, if it is possible.
    fn checked(self, shared: &Arc<Shared>) -> Result<Arc<Leg>, Error> {
        let Described { local, remote, spans } = self;
        local.check_owner(shared)?;
        let (here, there) = match spans {
            Some(spans) => spans,
            None if local.len() == remote.len() => {
                let all = Spans::contiguous(0, local.len());
                (all.clone(), all)
            }
            None => {
                let (local, remote) = (local.len(), remote.len());
                return Err(LegError::UnequalSizes { local, remote }.into());
            }
        };
        Ok(Arc::new(Leg::new(
            local.inner.region.clone(),
            here,
            remote.region.clone(),
            there,
        )?))
    }
}

/// A move between two memories of one agent being described: host to device, device to host, within a device. Nothing happens before
/// [`post`](CopyBuilder::post).
#[derive(Debug)]
#[must_use = "a described copy does nothing until it is posted"]
pub struct CopyBuilder<'a> {
    here: Peer,
    from: &'a Memory,
    to: &'a Memory,
    spans: Option<(Spans, Spans)>,
    deadline: Duration,
    checksum: bool,
    commit: bool,
    after: Option<Arc<dyn Ready>>,
}

impl<'a> CopyBuilder<'a> {
    pub(crate) fn new(here: Peer, from: &'a Memory, to: &'a Memory) -> CopyBuilder<'a> {
        let Defaults { deadline, checksum } = here.defaults;
        CopyBuilder {
            here,
            from,
            to,
            spans: None,
            deadline,
            checksum,
            commit: false,
            after: None,
        }
    }

    /// Which bytes, in order, of both; all of them where nothing is said.
    pub fn spans(mut self, from: Spans, to: Spans) -> CopyBuilder<'a> {
        self.spans = Some((from, to));
        self
    }

    /// See [`TransferBuilder::deadline`].
    pub fn deadline(mut self, after: Duration) -> CopyBuilder<'a> {
        self.deadline = after.min(DEADLINE_MAX);
        self
    }

    /// See [`TransferBuilder::checksum`].
    pub fn checksum(mut self, on: bool) -> CopyBuilder<'a> {
        self.checksum = on;
        self
    }

    /// See [`TransferBuilder::commit`]: a file is synchronised, and gets its name where it is to [replace](crate::FileOptions::replace) another.
    pub fn commit(mut self) -> CopyBuilder<'a> {
        self.commit = true;
        self
    }

    /// See [`TransferBuilder::after`].
    pub fn after(mut self, ready: Arc<dyn Ready>) -> CopyBuilder<'a> {
        self.after = Some(ready);
        self
    }

    /// Checks the description once, so that it can be posted many times.
    pub fn prepare(self) -> Result<Prepared, Error> {
        let shared = self.here.shared.get()?.clone();
        self.from.check_owner(&shared)?;
        self.to.check_owner(&shared)?;
        let key = self.to.inner.region.key;
        let region = shared.lock().core.own_region(&key).ok_or_else(|| Error::Refused {
            what: "copying to memory".to_owned(),
            refusal: weft_protocol::Refusal::Released,
        })?;
        let remote = Remote {
            name: self.here.name.clone(),
            region,
        };
        let mut transfer = TransferBuilder::new(&self.here, Direction::Write)
            .whole_leg(self.from, &remote)
            .deadline(self.deadline)
            .checksum(self.checksum);
        if let Some((from, to)) = self.spans {
            transfer = transfer.spans(from, to);
        }
        transfer.more.after = self.after;
        transfer.more.commit = self.commit;
        let mut prepared = transfer.prepare()?;
        // The memory that it is copied to stays registered, too.
        prepared.memory = prepared.memory.and(self.to.inner.clone());
        Ok(prepared)
    }

    /// Starts the copy.
    pub fn post(self) -> Result<Transfer, Error> {
        self.prepare()?.post()
    }
}

/// A checked transfer that can be posted again and again at the cost of the transfer alone.
#[derive(Clone, Debug)]
pub struct Prepared {
    peer: Peer,
    direction: Direction,
    legs: Legs,
    /// Registered as long as somebody may post.
    memory: Kept,
    deadline: Time,
    checksum: bool,
    notify: Option<Vec<u8>>,
    more: More,
}

impl Prepared {
    pub fn bytes(&self) -> u64 {
        self.legs.iter().map(|leg| leg.bytes()).sum()
    }

    /// Starts the transfer. What is small is done here and now; what is large goes on in the background.
    pub fn post(&self) -> Result<Transfer, Error> {
        let request = |now: Time| {
            let deadline = now.saturating_add(self.deadline);
            Request::of(self.peer.id, self.direction, self.legs.clone(), deadline)
                .checksum(self.checksum)
                .arrives(self.more.arrives)
                .commit(self.more.commit)
                .after(self.more.after.clone())
        };
        self.peer.start(request, self.notify.as_deref(), self.memory.clone())
    }
}
