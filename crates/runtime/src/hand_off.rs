//! Hand-offs between engines: blocks of a paged cache, from the worker that computed them to one that goes on with them.
//!
//! A worker opens its cache once. As holder it [offers](HandOff::offer) the blocks of a prompt and gets a ticket, which anybody may carry; or it
//! [pushes](HandOff::compute) layers while they are computed. As reader it [wants](HandOff::want) what a ticket names, and [fetches](HandOff::fetch) it when
//! it has blocks for it. What comes of it is told by [events](HandOff::next_event): every prompt that was wanted ends handed off or with a
//! [`Reason`], and blocks that were held are free some day. The protocol is `weft_protocol::hand_off`; here are its thread and its handles.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use thiserror::Error as ThisError;
use weft_fabric::cuda::{bytes_of, read_bytes, write_bytes};
use weft_fabric::fork::OfProcess;
use weft_fabric::memory::{AllocateOptions, HostMemory};
use weft_plan::spans::paired;
use weft_plan::{Place, Time};
use weft_protocol::Refusal;
use weft_protocol::hand_off::{self as protocol, HandOffs, Names, Room, Slots, Station};
use weft_protocol::session::{self, SealError, Secret};
use weft_protocol::wire::DecodeError;

use crate::agent::{Agent, leads_elsewhere, parse_addresses};
use crate::driver::{PeerState, Shared, World};
use crate::error::Error;
use crate::memory::{Memory, after};
use crate::settings::{Settings, long_enough};

pub use weft_protocol::hand_off::{
    Cache, CacheError, CallError, HandedOff, Layer, Lease, Mismatch, MoveError, Origin, Over, Prompt, Reason,
    StationError, Wanted,
};

const LABEL: &str = "hand-off: where blocks are";
const OFFERS: &str = "hand-off: who pushes";
/// Bytes that are copied at a time from where they landed to where they belong.
const COPY_BYTES: u64 = 1 << 20;

/// How a worker hands off.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a fetch may take; of a push, how long nothing may come.
    pub deadline: Duration,
    /// How long blocks are held for a reader that says nothing.
    pub lease: Duration,
    /// How many bytes of pushed prompts may be on their way here at a time.
    pub landing_bytes: u64,
    /// Whether bytes are compared at both ends.
    pub checksum: bool,
}

impl Default for Options {
    fn default() -> Options {
        let of = protocol::Settings::default();
        Options {
            deadline: of.deadline.into(),
            lease: of.lease.into(),
            landing_bytes: of.landing_bytes,
            checksum: of.checksum,
        }
    }
}

/// Why something was not done. See also [`Reason`], why a prompt was not handed off.
#[derive(Clone, Debug, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum HandOffError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    Station(#[from] StationError),
    #[error("the ticket is not to be believed: {0}")]
    Ticket(#[from] SealError),
    #[error("the ticket was sealed, but it cannot be read: {0}")]
    Unreadable(#[from] DecodeError),
    #[error("somebody has come with it before")]
    ComeBefore,
    #[error("this agent hands off another cache already")]
    Taken,
    #[error("what this agent hands off has been closed")]
    Closed,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A prompt that was wanted here has come, or has not, and why. Nobody touches its blocks for this hand-off any more. Once a hand-off.
    Ended {
        name: String,
        outcome: Result<HandedOff, Reason>,
    },
    /// The blocks of a prompt that was held here are the engine's again. Once a hand-off.
    Free { name: String, why: Over },
}

/// The seal under which strangers carry where blocks are.
#[derive(Clone, Debug)]
struct Tickets {
    seal: session::Seal,
}

impl Tickets {
    fn new(secret: &Secret) -> Tickets {
        Tickets {
            seal: session::Seal::new(secret, LABEL),
        }
    }

    fn write(&self, origin: &Origin, about: &[u8]) -> Result<Vec<u8>, HandOffError> {
        let expires = wall().saturating_add(origin.lease.lasts);
        Ok(self.seal.close(&origin.encode(), about, expires)?)
    }

    fn open(&self, ticket: &[u8], about: &[u8]) -> Result<Origin, HandOffError> {
        let now = wall();
        let origin = Origin::decode(self.seal.open(ticket, about, now)?)?;
        // A stamp is the time at which blocks were held. One of a later time would outlive every lease.
        match origin.lease.stamp > now.saturating_add(origin.lease.lasts).as_ns() {
            true => Err(HandOffError::Unreadable(DecodeError::Invalid)),
            false => Ok(origin),
        }
    }
}

/// Whoever decides for all workers of an engine: gives leases out, writes tickets, and takes those of others, each once. It needs no agent, only the
/// secret that agents of these settings share.
///
/// A ticket says where the blocks of a prompt are. Where a prompt is to be pushed nobody knows that yet, and the two engines are told the name of the hand-off
/// by whoever arranges it; then an **offer** says where the workers are that compute it.
#[derive(Debug)]
pub struct Desk {
    tickets: Tickets,
    offers: session::Seal,
    slots: Mutex<Slots>,
    used: Mutex<Names>,
}

impl Desk {
    pub fn new(settings: &Settings) -> Result<Desk, Error> {
        let secret = Secret::new(&settings.shared_secret()?);
        Ok(Desk {
            tickets: Tickets::new(&secret),
            offers: session::Seal::new(&secret, OFFERS),
            slots: Mutex::new(Slots::new(wall().as_ns())),
            used: Mutex::default(),
        })
    }

    /// A lease for a prompt, which every worker is to be told ([`HandOff::offer_leased`]); none where all are in use.
    pub fn lease(&self, lasts: Duration) -> Option<Lease> {
        hold(&self.slots).take(lasts.into(), wall().as_ns())
    }

    /// Takes a lease back that is over at every worker.
    pub fn give_back(&self, lease: Lease) {
        hold(&self.slots).give_back(lease.slot);
    }

    /// A ticket for what is `about` the same: the tokens of a prompt, say, so that it is of no use for another. It is good for as long as the lease.
    pub fn write(&self, origin: &Origin, about: &[u8]) -> Result<Vec<u8>, Error> {
        Ok(self.tickets.write(origin, about)?)
    }

    /// What a ticket says, where it is to be believed and nobody has come with it before.
    pub fn open(&self, ticket: &[u8], about: &[u8]) -> Result<Origin, Error> {
        let origin = self.tickets.open(ticket, about)?;
        self.take(&origin.hand_off, origin.lease.lasts)?;
        Ok(origin)
    }

    /// An offer to push, good for a while: where the workers are.
    pub fn offer(&self, addresses: &[String], lasts: Duration) -> Result<Vec<u8>, Error> {
        let words = protocol::encode_addresses(addresses);
        let expires = wall().saturating_add(lasts.into());
        Ok(self.offers.close(&words, b"", expires).map_err(HandOffError::from)?)
    }

    /// Where those are who offer to push, for a hand-off whose name nobody else can come with for so long.
    pub fn open_offer(&self, offer: &[u8], name: &str, lasts: Duration) -> Result<Vec<String>, Error> {
        let words = self.offers.open(offer, b"", wall()).map_err(HandOffError::from)?;
        let addresses = protocol::decode_addresses(words).map_err(HandOffError::from)?;
        self.take(name, lasts.into())?;
        Ok(addresses)
    }

    fn take(&self, name: &str, lasts: Time) -> Result<(), HandOffError> {
        let taken = hold(&self.used).take(name, lasts, wall());
        taken.map_err(|_| HandOffError::ComeBefore)
    }
}

/// A worker that hands off. Clones are the same worker; the last one to go closes it, and with it what it holds for others.
#[derive(Clone, Debug)]
pub struct HandOff {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    agent: Agent,
    shared: OfProcess<Arc<Shared>>,
    tickets: Tickets,
    lease: Time,
    /// Registered for as long as this is open.
    _cache: Vec<Memory>,
    closed: Arc<AtomicBool>,
    /// Copies what has landed to its blocks, from the first prompt on that is pushed here.
    copier: Mutex<Option<JoinHandle<()>>>,
}

impl HandOff {
    /// Lets peers read a cache, whose layers lie in these memories, and begins to listen. One a time for each agent.
    pub fn open(agent: &Agent, cache: Cache, memories: &[Memory], options: Options) -> Result<HandOff, Error> {
        let shared = agent.shared()?;
        for memory in memories {
            memory.check_owner(shared)?;
            if bytes_of(&*memory.inner).is_none() {
                return Err(Error::Refused {
                    what: format!("a cache in {}", memory.place()),
                    refusal: Refusal::Unsupported,
                });
            }
        }
        let settings = protocol::Settings {
            deadline: options.deadline.into(),
            lease: options.lease.into(),
            landing_bytes: options.landing_bytes,
            checksum: options.checksum,
        };
        // Whatever can fail without the agent does so before it listens.
        let secret = Secret::new(&agent.settings().shared_secret()?);
        let machine = HandOffs::new(cache, settings, wall().as_ns());
        let regions = memories.iter().map(|memory| memory.inner.region.clone()).collect();
        shared.act(|world, now| {
            world.check_running()?;
            if world.station.is_some() {
                return Err(Error::from(HandOffError::Taken));
            }
            let connected = world.peers.iter().filter_map(|(peer, state)| match state {
                PeerState::Connected { name } => Some((*peer, name.clone())),
                _ => None,
            });
            let peers: Vec<_> = connected.collect();
            let station = Station::open(&mut world.core, machine, regions, Box::new(Heap), peers, now);
            world.station = Some(station.map_err(HandOffError::from)?);
            Ok(())
        })?;
        let inner = Inner {
            tickets: Tickets::new(&secret),
            agent: agent.clone(),
            shared: OfProcess::new(shared.clone()),
            lease: options.lease.into(),
            _cache: memories.to_vec(),
            closed: Arc::default(),
            copier: Mutex::new(None),
        };
        Ok(HandOff { inner: Arc::new(inner) })
    }

    // As holder.

    /// Holds the blocks of a prompt that is computed whole for whoever comes with the ticket. [`Event::Free`] tells when they may be used again: when one
    /// reader has them, or as many as there are; when nobody came for as long as the lease; or after [`stop`](HandOff::stop).
    pub fn offer(&self, name: &str, blocks: &[u64], tokens: u64, about: &[u8]) -> Result<Vec<u8>, Error> {
        let lease = self.act(|station, now| station.machine.offer(name, None, self.inner.lease, now))?;
        let origin = Origin {
            hand_off: name.to_owned(),
            addresses: vec![self.inner.agent.address()],
            blocks: blocks.to_vec(),
            tokens,
            lease,
        };
        let ticket = self.inner.tickets.write(&origin, about);
        if ticket.is_err() {
            self.stop(name)?;
        }
        Ok(ticket?)
    }

    /// The same for one rank of several: whoever decides for all of them gives the lease out and writes the ticket ([`Desk`]). A rank that refuses it
    /// has nobody believe the ticket.
    pub fn offer_leased(&self, name: &str, lease: Lease) -> Result<(), Error> {
        self.act(|station, now| station.machine.offer(name, Some(lease), lease.lasts, now))?;
        Ok(())
    }

    /// A step of the engine computes a prompt that readers may have made room for. To be said again with every step, and followed by
    /// [`computed`](HandOff::computed), layer by layer; at last by [`offer`](HandOff::offer), or by [`stop`](HandOff::stop).
    pub fn compute(&self, name: &str, prompt: Prompt) -> Result<(), Error> {
        self.act(|station, now| station.machine.compute(name, prompt, now))
    }

    /// A layer, or all of them, is there up to a token. Readers get it from now on, while the next one is computed. Of a cache on a device, whoever says so has waited for
    /// the device before: what is still on a stream is not waited for here, nor by [`offer`](HandOff::offer).
    pub fn computed(&self, name: &str, layer: Option<usize>, upto: u64) -> Result<(), Error> {
        self.act(|station, now| {
            station.machine.computed(name, layer, upto, now);
            Ok(())
        })
    }

    /// Waits until nothing is read from a prompt's blocks any more; it will be computed again. They may be overwritten after this.
    pub fn preempt(&self, name: &str, timeout: Duration) -> Result<(), Error> {
        let shared = self.inner.shared.get()?;
        self.act(|station, _| {
            station.machine.preempt(name);
            Ok(())
        })?;
        let fenced = |world: &mut World| match &world.station {
            Some(station) => (station.machine.writes_of(name) == 0).then_some(()),
            None => Some(()),
        };
        let waited = shared.wait_until(after(shared, timeout), fenced);
        waited.ok_or_else(|| shared.in_vain(|| format!("the writes of hand-off {name:?}")))
    }

    /// A prompt will not be whole, or nobody is to have it any more. [`Event::Free`] follows, unless it is over already.
    pub fn stop(&self, name: &str) -> Result<(), Error> {
        self.act(|station, now| station.machine.stop(name, now))
    }

    // As reader.

    /// Somebody here waits for what a ticket names: its lease is renewed until it is [fetched](HandOff::fetch) or [left](HandOff::leave). Of so many workers of this
    /// engine, each wants it for itself. Says the name of the hand-off. A ticket is taken once.
    pub fn want(&self, ticket: &[u8], about: &[u8], readers: u32) -> Result<String, Error> {
        let origin = self.inner.tickets.open(ticket, about)?;
        self.want_from(origin, readers)
    }

    /// The same where somebody else has opened the ticket, who decides for all workers of the engine.
    pub fn want_from(&self, origin: Origin, readers: u32) -> Result<String, Error> {
        let addresses = self.resolve(&origin.addresses)?;
        let name = origin.hand_off.clone();
        self.act(|station, now| station.machine.want(Origin { addresses, ..origin }, readers, now))?;
        Ok(name)
    }

    /// The same of a prompt that whoever listens at these addresses computes and pushes, under a name that both sides were told.
    pub fn want_pushed(&self, name: &str, addresses: &[String], readers: u32) -> Result<(), Error> {
        let addresses = self.resolve(addresses)?;
        self.inner.start_copier()?;
        self.act(|station, now| station.machine.want_pushed(name, addresses, readers, now))
    }

    /// There are blocks for a prompt: brings it. [`Event::Ended`] follows.
    pub fn fetch(&self, name: &str, wanted: Wanted) -> Result<(), Error> {
        self.act(|station, now| station.machine.fetch(name, wanted, now))
    }

    /// Nobody here wants a prompt any more. [`Event::Ended`] follows, when nothing touches its blocks any more.
    pub fn leave(&self, name: &str) -> Result<(), Error> {
        self.act(|station, now| {
            station.machine.leave(name, now);
            Ok(())
        })
    }

    // Both.

    /// The next event; nothing where none comes in time.
    pub fn next_event(&self, timeout: Duration) -> Result<Option<Event>, Error> {
        let shared = self.inner.shared.get()?;
        let found = shared.wait_until(after(shared, timeout), |world| {
            let Some(station) = &mut world.station else {
                return Some(Err(HandOffError::Closed));
            };
            let mut events = std::iter::from_fn(|| station.machine.next_event_of(|event| !is_settle(event)));
            events.find_map(told).map(Ok)
        });
        match found {
            Some(event) => Ok(Some(event?)),
            None if shared.is_stopped() => Err(Error::Stopped),
            None => Ok(None),
        }
    }

    /// How many prompts are held for others, how many are wanted, and how many bytes of landing places are taken.
    pub fn under_way(&self) -> Result<(usize, usize, u64), Error> {
        self.act(|station, _| {
            let machine = &station.machine;
            Ok((machine.held(), machine.wanted(), machine.landing_bytes()))
        })
    }

    pub fn agent(&self) -> &Agent {
        &self.inner.agent
    }

    fn act<T>(&self, call: impl FnOnce(&mut Station, Time) -> Result<T, CallError>) -> Result<T, Error> {
        self.inner.shared.get()?.act(|world, now| {
            world.check_running()?;
            let station = world.station.as_mut().ok_or(HandOffError::Closed)?;
            let said = call(station, now).map_err(HandOffError::from)?;
            Ok(said)
        })
    }

    /// Looks names of hosts up, and refuses to prove a short secret to another host.
    fn resolve(&self, addresses: &[String]) -> Result<Vec<String>, Error> {
        let mut found = Vec::with_capacity(addresses.len());
        for address in addresses {
            let parts = parse_addresses(address)?;
            if let Some(far) = parts.iter().find(|part| leads_elsewhere(part)) {
                let secret = self.inner.agent.settings().shared_secret()?;
                long_enough(&secret, || format!("{far}"))?;
            }
            let parts: Vec<&str> = parts.iter().map(|part| part.0.as_str()).collect();
            found.push(parts.join(","));
        }
        Ok(found)
    }
}

impl Inner {
    fn start_copier(&self) -> Result<(), Error> {
        let mut copier = hold(&self.copier);
        if copier.is_none() {
            let (shared, closed) = (self.shared.get()?.clone(), self.closed.clone());
            let started = std::thread::Builder::new()
                .name("weft-landing".to_owned())
                .spawn(move || copy_landed(&shared, &closed));
            *copier = Some(started.map_err(Error::system("starting the thread that copies what has landed"))?);
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // What the parent hands off is not a forked child's to close.
        let Ok(shared) = self.shared.get() else { return };
        self.closed.store(true, Ordering::Release);
        // The cache is its owner's again after this, and what has been cancelled may still be under way. Transfers end by their deadlines.
        shared.wait_until(Time::MAX, |world| {
            let Some(station) = &mut world.station else {
                return Some(());
            };
            station.end_moves(&mut world.core, shared.clock.now()).then_some(())
        });
        let station = shared.act(|world, now| {
            let mut station = world.station.take()?;
            let busy = station.close(&mut world.core, now);
            world.releasing.extend(busy);
            Some(station)
        });
        drop(station);
        shared.wake_sleepers();
        if let Some(copier) = hold(&self.copier).take() {
            // It writes to the cache, which is not ours any more after this.
            let _ = copier.join();
        }
    }
}

/// Copies layers from where they landed to their blocks, without the mutex, until there is nothing more to be handed off.
fn copy_landed(shared: &Shared, closed: &AtomicBool) {
    let mut buffer = Vec::new();
    loop {
        let landed = shared.wait_until(Time::MAX, |world| match &mut world.station {
            Some(station) if !closed.load(Ordering::Acquire) => station.machine.next_event_of(is_settle).map(Some),
            _ => Some(None),
        });
        let Some(Some(protocol::Event::Settle {
            landing,
            layers,
            copies,
            ..
        })) = landed
        else {
            return;
        };
        let memories = shared.act(|world, _| {
            let station = world.station.as_ref()?;
            let landed = station.landing(landing)?.memory.clone();
            let near = copies
                .iter()
                .map(|copy| Some(station.region(copy.near_region)?.memory.clone()));
            Some((landed, near.collect::<Option<Vec<_>>>()?))
        });
        let copied = memories.map_or(Ok(()), |(landed, near)| copy_all(&copies, &*landed, &near, &mut buffer));
        shared.act(|world, now| {
            if let Some(station) = world.station.as_mut().filter(|_| !closed.load(Ordering::Acquire)) {
                match copied {
                    Ok(()) => station.machine.settled(landing, &layers, now),
                    Err(refusal) => station.machine.unsettled(landing, &layers, refusal, now),
                }
            }
        });
    }
}

/// Refused where a device has failed, whose blocks they are. What is neither the host's nor a device's was refused when the cache was opened.
fn copy_all(
    copies: &[protocol::Overlap],
    landed: &dyn weft_protocol::Memory,
    near: &[Arc<dyn weft_protocol::Memory>],
    buffer: &mut Vec<u8>,
) -> Result<(), Refusal> {
    for (copy, memory) in copies.iter().zip(near) {
        for (to, from, len) in paired(&copy.near, &copy.far, 0..copy.near.bytes()) {
            for begin in (0..len).step_by(COPY_BYTES as usize) {
                buffer.resize(COPY_BYTES.min(len - begin) as usize, 0);
                read_bytes(landed, from + begin, buffer)?;
                write_bytes(&**memory, to + begin, buffer)?;
            }
        }
    }
    Ok(())
}

fn is_settle(event: &protocol::Event) -> bool {
    matches!(event, protocol::Event::Settle { .. })
}

/// What the application is told.
fn told(event: protocol::Event) -> Option<Event> {
    match event {
        protocol::Event::Ended {
            hand_off: name,
            outcome,
        } => Some(Event::Ended { name, outcome }),
        protocol::Event::Free { hand_off: name, why } => Some(Event::Free { name, why }),
        // Whoever preempts waits for its fence.
        _ => None,
    }
}

/// Memory to land in that peers on this host can map.
struct Heap;

impl Room for Heap {
    fn make(&mut self, bytes: u64) -> Option<(Arc<dyn weft_protocol::Memory>, Place)> {
        let host = HostMemory::allocate(usize::try_from(bytes).ok()?, AllocateOptions::default()).ok()?;
        let numa = host.numa().and_then(|node| u16::try_from(node).ok());
        Some((Arc::new(host), Place::Dram { numa }))
    }
}

fn hold<T>(held: &Mutex<T>) -> MutexGuard<'_, T> {
    held.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn wall() -> Time {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Time::from(since.unwrap_or_default())
}
