//! The back end itself, over an agent of Weft: registrations, peers, notifications. Nothing of C++ comes this far.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use weft::{Access, Agent, Device, DeviceMemory, Error, HostMemory, Memory, Peer, Place, Remote};

use crate::blobs::{Connection, Registration};
use crate::parameters;
use crate::trouble::Trouble;

/// How an engine is to be.
#[derive(Debug)]
pub struct Described<'a> {
    /// The NIXL agent's name, which is the Weft agent's, too.
    pub agent: &'a str,
    /// The name of the back end.
    pub kind: &'a str,
    pub parameters: Vec<(String, String)>,
}

#[derive(Debug)]
pub struct Engine {
    agent: Agent,
    known: Mutex<HashMap<String, Arc<Known>>>,
    told_here: Mutex<ToldHere>,
    regions: AtomicU64,
    /// How long a peer may keep a call waiting.
    patience: Duration,
}

/// What this agent has told itself, and nobody has taken yet.
#[derive(Debug, Default)]
struct ToldHere {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
}

/// So much of it is kept. A peer is held back when nobody takes what it says; an agent that tells itself is refused.
const TOLD_MAX: usize = 1 << 16;
const TOLD_BYTES_MAX: usize = 64 << 20;
/// Notifications of peers that one call takes at most: they may tell more while they are taken, and the call has to end.
const TAKEN_AT_ONCE: usize = 1 << 14;

impl ToldHere {
    fn add(&mut self, message: Vec<u8>) -> Result<(), Trouble> {
        let messages = self.messages.len();
        if messages >= TOLD_MAX || self.bytes + message.len() > TOLD_BYTES_MAX {
            return Err(Trouble::Untaken { messages });
        }
        self.bytes += message.len();
        self.messages.push_back(message);
        Ok(())
    }

    fn take(&mut self) -> VecDeque<Vec<u8>> {
        self.bytes = 0;
        std::mem::take(&mut self.messages)
    }
}

/// An agent whose metadata were loaded.
#[derive(Debug)]
struct Known {
    connection: Connection,
    /// Made when it is first needed, and made anew when it is over.
    session: Mutex<Option<Peer>>,
}

/// Which memory a descriptor is in.
#[derive(Clone, Debug)]
pub enum Metadata {
    /// This agent's own.
    Own(Arc<Own>),
    /// Another agent's.
    Their(Arc<Their>),
}

/// Memory of this agent's.
#[derive(Debug)]
pub struct Own {
    pub memory: Memory,
    registration: Registration,
    released: AtomicBool,
}

/// Memory of another agent's.
#[derive(Debug)]
pub struct Their {
    agent: String,
    /// Which life of it; the regions of a later one are others, though they have the same names.
    epoch: Option<u64>,
    registration: Registration,
    /// The region, as one session with its owner knows it.
    found: Mutex<Option<(Peer, Remote)>>,
}

impl Own {
    pub fn registration(&self) -> &Registration {
        &self.registration
    }

    /// That nobody has given it back.
    pub fn check(&self) -> Result<(), Trouble> {
        match self.released.load(Ordering::Acquire) {
            true => Err(Trouble::Deregistered),
            false => Ok(()),
        }
    }
}

impl Metadata {
    /// Where in the registration a descriptor is, which must lie inside.
    pub fn offset(&self, address: usize, len: usize) -> Result<u64, Trouble> {
        let Registration { base, len: all, .. } = match self {
            Metadata::Own(own) => &own.registration,
            Metadata::Their(their) => &their.registration,
        };
        let inside = || {
            let offset = (address as u64).checked_sub(*base)?;
            (offset.checked_add(len as u64)? <= *all).then_some(offset)
        };
        inside().ok_or_else(|| {
            Trouble::Invalid(format!(
                "{len} bytes at {address:#x} are not within the {all} registered at {base:#x}"
            ))
        })
    }
}

/// Memory as it is handed in.
#[derive(Clone, Copy, Debug)]
pub struct Given {
    pub address: usize,
    pub len: usize,
    /// The device's number; none for host memory.
    pub device: Option<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    pub fn start(described: &Described<'_>) -> Result<Engine, Trouble> {
        let builder = parameters::describe(described.agent, described.kind, &described.parameters)?;
        let agent = builder.start()?;
        let patience = agent.settings().silence_max.min(agent.settings().deadline);
        Ok(Engine {
            agent,
            known: Mutex::default(),
            told_here: Mutex::default(),
            regions: AtomicU64::new(0),
            patience,
        })
    }

    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Whether memory of devices can be registered here.
    pub fn has_devices() -> bool {
        // Not opened: that would make a context on a card which this process may not use.
        static FOUND: OnceLock<bool> = OnceLock::new();
        *FOUND.get_or_init(|| weft::gpu::device_count().is_ok_and(|count| count > 0))
    }

    pub fn connection(&self) -> Connection {
        Connection {
            name: self.agent.name().to_owned(),
            address: self.agent.address(),
            epoch: self.agent.epoch().0,
        }
    }

    /// Registers memory, and lets every peer read and write it, as NIXL does.
    ///
    /// # Safety
    /// The bytes stay where they are until they are deregistered.
    pub unsafe fn register(&self, given: Given) -> Result<Own, Trouble> {
        let Given { address, len, device } = given;
        if address == 0 || isize::try_from(len).is_err() || address.checked_add(len).is_none() {
            return Err(Trouble::Invalid(format!("{len} bytes at {address:#x} cannot be")));
        }
        let memory = match device {
            // Each a registration of its own: one that is given back must not end another one of the same bytes.
            None => {
                // SAFETY: as the caller says; they are NIXL's user's to keep, so there is no owner.
                let host = unsafe { HostMemory::from_raw(address as *mut u8, len, Box::new(())) };
                self.agent.register_at(Arc::new(host), Place::Dram { numa: None })?
            }
            Some(number) => {
                let ordinal =
                    u16::try_from(number).map_err(|_| Trouble::Invalid(format!("there is no device {number}")))?;
                let device = Device::open(ordinal).map_err(Error::from)?;
                // SAFETY: likewise.
                let foreign = unsafe { DeviceMemory::foreign(&device, address as u64, len as u64, Box::new(())) };
                self.agent.register_device(foreign.map_err(Error::from)?)?
            }
        };
        let region = format!("nixl/{}", self.regions.fetch_add(1, Ordering::Relaxed));
        self.agent.publish(&region, &memory, Access::READ_WRITE)?;
        Ok(Own {
            memory,
            registration: Registration {
                region,
                base: address as u64,
                len: len as u64,
            },
            released: AtomicBool::new(false),
        })
    }

    /// Afterwards nobody touches the memory any more. A peer that is frozen inside of it holds it, and that is an error.
    pub fn deregister(&self, own: &Own) -> Result<(), Trouble> {
        own.released.store(true, Ordering::Release);
        own.memory.release(self.patience)?;
        Ok(())
    }

    pub fn public_data(own: &Own) -> Vec<u8> {
        own.registration.encode()
    }

    /// Learns where another agent is. What is known of an earlier life of it is forgotten.
    pub fn load_connection(&self, agent: &str, bytes: &[u8]) -> Result<(), Trouble> {
        let connection = Connection::decode(bytes)?;
        if connection.name != agent {
            return Err(Trouble::Invalid(format!(
                "this is the connection of {:?}, not of {agent:?}",
                connection.name
            )));
        }
        let mut known = lock(&self.known);
        if known.get(agent).is_some_and(|known| known.connection == connection) {
            return Ok(());
        }
        let session = Mutex::new(None);
        known.insert(agent.to_owned(), Arc::new(Known { connection, session }));
        Ok(())
    }

    /// Another agent's registration, of which the descriptor says what NIXL knows.
    pub fn load_remote(&self, agent: &str, given: Given, bytes: &[u8]) -> Result<Their, Trouble> {
        let their = Their {
            agent: agent.to_owned(),
            epoch: self.known(agent).ok().map(|known| known.connection.epoch),
            registration: Registration::decode(bytes)?,
            found: Mutex::new(None),
        };
        if (their.registration.base, their.registration.len) != (given.address as u64, given.len as u64) {
            return Err(Trouble::Invalid(format!(
                "{} bytes at {:#x} are registered, and {} at {:#x} said to be",
                their.registration.len, their.registration.base, given.len, given.address
            )));
        }
        Ok(their)
    }

    /// Whether this is where an agent is by what has been loaded of it.
    pub fn knows(&self, connection: &Connection) -> bool {
        self.known(&connection.name)
            .is_ok_and(|known| known.connection == *connection)
    }

    fn known(&self, agent: &str) -> Result<Arc<Known>, Trouble> {
        let known = lock(&self.known).get(agent).cloned();
        known.ok_or_else(|| Trouble::UnknownAgent(agent.to_owned()))
    }

    pub fn is_self(&self, agent: &str) -> bool {
        agent == self.agent.name()
    }

    /// The session with an agent, made if there is none.
    pub fn session(&self, agent: &str) -> Result<Peer, Trouble> {
        let known = self.known(agent)?;
        // Whoever else wants this peer waits for the same session.
        let mut session = lock(&known.session);
        if let Some(peer) = session.as_ref().filter(|peer| peer.is_connected()) {
            return Ok(peer.clone());
        }
        let Connection { name, .. } = &known.connection;
        let peer = self
            .agent
            .connect_life(name, &known.connection.member(), self.patience)?;
        *session = Some(peer.clone());
        Ok(peer)
    }

    /// Connects to an agent before it is needed.
    pub fn connect(&self, agent: &str) -> Result<(), Trouble> {
        match self.is_self(agent) {
            true => Ok(()),
            false => self.session(agent).map(drop),
        }
    }

    /// Forgets an agent. Transfers with it that are under way end with an error.
    pub fn disconnect(&self, agent: &str) -> Result<(), Trouble> {
        let Some(known) = lock(&self.known).remove(agent) else {
            return match self.is_self(agent) {
                true => Ok(()),
                false => Err(Trouble::UnknownAgent(agent.to_owned())),
            };
        };
        if let Some(peer) = lock(&known.session).take() {
            peer.disconnect();
        }
        Ok(())
    }

    /// The region behind another agent's registration, in a session with it.
    pub fn region(&self, their: &Their, peer: &Peer) -> Result<Remote, Trouble> {
        let mut found = lock(&their.found);
        if let Some((of, remote)) = found.as_ref()
            && of == peer
        {
            return Ok(remote.clone());
        }
        if their.epoch.is_some() && self.known(&their.agent).ok().map(|known| known.connection.epoch) != their.epoch {
            return Err(stale(their));
        }
        let remote = match peer.region(&their.registration.region, self.patience) {
            // It was published before its metadata were made, so it has been taken back since.
            Err(Error::TimedOut { .. }) => return Err(stale(their)),
            other => other?,
        };
        if remote.len() != their.registration.len {
            return Err(Trouble::Foreign("registration"));
        }
        *found = Some((peer.clone(), remote.clone()));
        Ok(remote)
    }

    pub fn is_of(their: &Their, agent: &str) -> bool {
        their.agent == agent
    }

    pub fn notify(&self, agent: &str, message: &[u8]) -> Result<(), Trouble> {
        if self.is_self(agent) {
            return self.tell_self(message.to_vec());
        }
        Ok(self.session(agent)?.notify(message)?)
    }

    pub fn tell_self(&self, message: Vec<u8>) -> Result<(), Trouble> {
        lock(&self.told_here).add(message)
    }

    /// What has been told since, with who told it; where peers have told very much, the rest of it by the next call.
    pub fn notifications(&self) -> Vec<(String, Vec<u8>)> {
        let own = lock(&self.told_here).take();
        let name = self.agent.name();
        let own = own.into_iter().map(|message| (name.to_owned(), message));
        let theirs = std::iter::from_fn(|| self.agent.try_notification());
        let theirs = theirs.map(|told| (told.from.name().to_owned(), told.payload));
        own.chain(theirs.take(TAKEN_AT_ONCE)).collect()
    }

    pub fn close(&self) {
        self.agent.close();
    }
}

fn stale(their: &Their) -> Trouble {
    Trouble::Stale {
        agent: their.agent.clone(),
        region: their.registration.region.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_never_listens_to_itself_is_refused_and_not_kept_words_for() {
        let mut told = ToldHere::default();
        let long = TOLD_BYTES_MAX / 4;
        (0..4).for_each(|_| told.add(vec![0; long]).expect("room"));
        assert!(matches!(told.add(vec![0]), Err(Trouble::Untaken { messages: 4 })));
        assert_eq!(told.take().len(), 4);
        // Empty ones cost as well.
        (0..TOLD_MAX).for_each(|_| told.add(Vec::new()).expect("room"));
        assert!(matches!(
            told.add(Vec::new()),
            Err(Trouble::Untaken { messages: TOLD_MAX })
        ));
        assert_eq!(told.take().len(), TOLD_MAX);
        told.add(vec![1]).expect("there is room again");
        assert_eq!(told.take(), [vec![1]]);
    }
}
