//! What NIXL's own agent does for its users, with Weft alone behind it: registrations are found by address, agents learn of each other by blobs, and
//! transfers are asked for by descriptors.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weft::Direction;

pub use crate::blobs::Segment;
use crate::blobs::{Introduction, Registration};
use crate::engine::{Described, Engine, Given, Metadata};
use crate::request::{Pairing, Request, Stage, Wanted};
use crate::trouble::Trouble;

/// An agent of NIXL's kind. All its calls may come from several threads at a time.
#[derive(Debug)]
pub struct StandIn {
    name: String,
    engine: Engine,
    own: Mutex<Shelf>,
    others: Mutex<HashMap<String, Shelf>>,
}

/// Bytes, as NIXL's descriptors say where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    pub segment: Segment,
    pub address: usize,
    pub len: usize,
}

/// Descriptors of one side of transfers, each with the registration that it lies in.
#[derive(Debug)]
pub struct Side {
    /// None is the agent that asks.
    agent: Option<String>,
    registrations: Vec<Metadata>,
    rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    /// Which of the registrations.
    registration: u32,
    address: usize,
    len: usize,
}

/// A transfer that was asked for.
#[derive(Debug)]
pub struct Asked {
    request: Request,
    /// For posts that bring none of their own.
    notification: Option<Vec<u8>>,
    pub descriptors: usize,
    pub bytes: u64,
}

/// The registrations of one agent, by where they begin.
#[derive(Debug, Default)]
struct Shelf {
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    segment: Segment,
    registration: Registration,
    metadata: Metadata,
}

/// What an agent may say of another one, and how long a list may be: more than any engine has, and not so much that whoever sends it takes the memory.
const REGISTRATIONS_MAX: usize = 1 << 16;
const ROWS_MAX: usize = 1 << 24;

impl Shelf {
    fn place(&self, segment: Segment, address: u64) -> usize {
        self.entries
            .partition_point(|entry| (entry.segment, entry.registration.base) <= (segment, address))
    }

    fn put(&mut self, segment: Segment, registration: Registration, metadata: Metadata) {
        let at = self.place(segment, registration.base);
        let entry = Entry {
            segment,
            registration,
            metadata,
        };
        self.entries.insert(at, entry);
    }

    /// The registration that bytes are in. What was said to be a device's may be an owner's that has none: see [`as_it_is_here`].
    fn covering(&self, bytes: &Bytes) -> Option<&Entry> {
        let of_host = || {
            let segment = Segment::Host;
            (bytes.segment != segment).then(|| self.covering_in(&Bytes { segment, ..*bytes }))?
        };
        self.covering_in(bytes).or_else(of_host)
    }

    /// Of several, the one that begins last.
    fn covering_in(&self, bytes: &Bytes) -> Option<&Entry> {
        let end = (bytes.address as u64).checked_add(bytes.len as u64)?;
        let before = &self.entries[..self.place(bytes.segment, bytes.address as u64)];
        let same = before.iter().rev().take_while(|entry| entry.segment == bytes.segment);
        same.into_iter()
            // No sum of the two overflows: that was looked at when they came.
            .find(|entry| end <= entry.registration.base + entry.registration.len)
    }

    /// Takes out the registration of exactly these bytes.
    fn take(&mut self, bytes: &Bytes) -> Option<Entry> {
        let at = self.find(bytes)?;
        Some(self.entries.remove(at))
    }

    fn find(&self, bytes: &Bytes) -> Option<usize> {
        let before = &self.entries[..self.place(bytes.segment, bytes.address as u64)];
        let begins_there =
            |entry: &&Entry| (entry.segment, entry.registration.base) == (bytes.segment, bytes.address as u64);
        let same = before.iter().rev().take_while(begins_there).count();
        let range = before.len() - same..before.len();
        range.rev().find(|at| before[*at].registration.len == bytes.len as u64)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StandIn {
    /// An agent with its one back end. `kind` is what the back end is called: under another name than Weft's own, parameters of that one are passed over.
    pub fn start(name: &str, kind: &str, parameters: Vec<(String, String)>) -> Result<StandIn, Trouble> {
        let engine = Engine::start(&Described {
            agent: name,
            kind,
            parameters,
        })?;
        Ok(StandIn {
            name: name.to_owned(),
            engine,
            own: Mutex::default(),
            others: Mutex::default(),
        })
    }

    /// Registers memory, all of it or none.
    ///
    /// # Safety
    /// The bytes stay where they are until they are deregistered, or the agent is closed.
    pub unsafe fn register(&self, list: &[Bytes]) -> Result<(), Trouble> {
        let mut registered = Vec::new();
        for bytes in list.iter().map(as_it_is_here) {
            // SAFETY: as the caller says.
            match unsafe { self.engine.register(given(&bytes)) } {
                Ok(own) => registered.push((bytes.segment, Arc::new(own))),
                Err(trouble) => {
                    for (_, own) in &registered {
                        // Nobody has been told of it, so nobody is inside.
                        let _ = self.engine.deregister(own);
                    }
                    return Err(trouble);
                }
            }
        }
        let mut shelf = lock(&self.own);
        for (segment, own) in registered {
            shelf.put(segment, own.registration().clone(), Metadata::Own(own));
        }
        Ok(())
    }

    /// Takes memory back. Afterwards nobody touches it; a peer that is frozen inside of it holds it, which is an error.
    pub fn deregister(&self, list: &[Bytes]) -> Result<(), Trouble> {
        let mut taken = Vec::new();
        {
            let mut shelf = lock(&self.own);
            for bytes in list {
                let Some(entry) = shelf.take(&as_it_is_here(bytes)) else {
                    for entry in taken {
                        let Entry {
                            segment,
                            registration,
                            metadata,
                        } = entry;
                        shelf.put(segment, registration, metadata);
                    }
                    return Err(unregistered(bytes, "this agent"));
                };
                taken.push(entry);
            }
        }
        let mut held = Ok(());
        for entry in taken {
            if let Metadata::Own(own) = &entry.metadata {
                // One that is held must not keep the others.
                held = self.engine.deregister(own).and(held);
            }
        }
        held
    }

    /// What another agent has to know of this one to reach its memory.
    pub fn introduction(&self) -> Vec<u8> {
        let shelf = lock(&self.own);
        let all = shelf.entries.iter();
        self.introduce(
            true,
            true,
            all.map(|entry| (entry.segment, entry.registration.clone())).collect(),
        )
    }

    /// The same of some registrations only, with or without where the agent is.
    pub fn part_of_introduction(&self, list: &[Bytes], with_connection: bool) -> Result<Vec<u8>, Trouble> {
        let shelf = lock(&self.own);
        let mut registrations = Vec::new();
        for bytes in list {
            let at = shelf.find(&as_it_is_here(bytes));
            let entry = &shelf.entries[at.ok_or_else(|| unregistered(bytes, "this agent"))?];
            registrations.push((entry.segment, entry.registration.clone()));
        }
        Ok(self.introduce(false, with_connection, registrations))
    }

    fn introduce(&self, is_whole: bool, with_connection: bool, registrations: Vec<(Segment, Registration)>) -> Vec<u8> {
        let introduction = Introduction {
            name: self.name.clone(),
            connection: with_connection.then(|| self.engine.connection()),
            is_whole,
            registrations,
        };
        introduction.encode()
    }

    /// Learns of another agent what it has said, and tells its name. What was known of an earlier life of it is forgotten, and, where it has said all
    /// that it has, whatever else was known.
    pub fn meet(&self, introduction: &[u8]) -> Result<String, Trouble> {
        let Introduction {
            name,
            connection,
            is_whole,
            registrations,
        } = Introduction::decode(introduction)?;
        if name == self.name {
            return Err(Trouble::Invalid("these are the metadata of this very agent".to_owned()));
        }
        let mut others = lock(&self.others);
        let begins_anew = match &connection {
            Some(connection) => !self.engine.knows(connection),
            None if others.contains_key(&name) => false,
            None => return Err(Trouble::UnknownAgent(name)),
        };
        let known = others.get(&name).filter(|_| !begins_anew && !is_whole);
        if known.map_or(0, |shelf| shelf.entries.len()) + registrations.len() > REGISTRATIONS_MAX {
            return Err(Trouble::Invalid(format!(
                "more than {REGISTRATIONS_MAX} registrations of agent {name:?}"
            )));
        }
        if let Some(connection) = connection {
            self.engine.load_connection(&name, &connection.encode())?;
        }
        let shelf = others.entry(name.clone()).or_default();
        if begins_anew {
            shelf.entries.clear();
        } else if is_whole {
            let said: HashSet<&(Segment, Registration)> = registrations.iter().collect();
            shelf
                .entries
                .retain(|entry| said.contains(&(entry.segment, entry.registration.clone())));
        }
        for (segment, registration) in registrations {
            let bytes = Bytes {
                segment,
                address: registration.base as usize,
                len: registration.len as usize,
            };
            if let Some(at) = shelf.find(&bytes) {
                if shelf.entries[at].registration == registration {
                    continue;
                }
                // The same bytes, registered again since.
                shelf.entries.remove(at);
            }
            let their = self.engine.load_remote(&name, given(&bytes), &registration.encode())?;
            shelf.put(segment, registration, Metadata::Their(Arc::new(their)));
        }
        Ok(name)
    }

    /// Forgets another agent. Transfers with it that are under way end with an error.
    pub fn forget(&self, agent: &str) -> Result<(), Trouble> {
        if lock(&self.others).remove(agent).is_none() {
            return Err(Trouble::UnknownAgent(agent.to_owned()));
        }
        self.engine.disconnect(agent)
    }

    /// Whether another agent is known, and all these bytes of it.
    pub fn knows(&self, agent: &str, list: &[Bytes]) -> bool {
        let others = lock(&self.others);
        others
            .get(agent)
            .is_some_and(|shelf| list.iter().all(|bytes| shelf.covering(bytes).is_some()))
    }

    pub fn connect(&self, agent: &str) -> Result<(), Trouble> {
        self.engine.connect(agent)
    }

    /// Looks up where descriptors lie: those of this agent, `None`, or of the one that is named.
    pub fn side(&self, agent: Option<&str>, list: impl Iterator<Item = Bytes>) -> Result<Side, Trouble> {
        let others;
        let own;
        let shelf: &Shelf = match agent.filter(|agent| *agent != self.name) {
            None => {
                own = lock(&self.own);
                &own
            }
            Some(agent) => {
                others = lock(&self.others);
                others
                    .get(agent)
                    .ok_or_else(|| Trouble::UnknownAgent(agent.to_owned()))?
            }
        };
        let mut side = Side {
            agent: agent.map(str::to_owned),
            registrations: Vec::new(),
            rows: Vec::new(),
        };
        let mut numbers: HashMap<*const Entry, u32> = HashMap::new();
        for bytes in list {
            if side.rows.len() == ROWS_MAX {
                return Err(Trouble::Invalid(format!("more than {ROWS_MAX} descriptors")));
            }
            let entry = shelf
                .covering(&bytes)
                .ok_or_else(|| unregistered(&bytes, agent.unwrap_or("this agent")))?;
            let registration = *numbers.entry(entry).or_insert_with(|| {
                side.registrations.push(entry.metadata.clone());
                side.registrations.len() as u32 - 1
            });
            side.rows.push(Row {
                registration,
                address: bytes.address,
                len: bytes.len,
            });
        }
        Ok(side)
    }

    /// Prepares a transfer between some descriptors here and as many there.
    pub fn ask(
        &self,
        direction: Direction,
        (here, here_rows): (&Side, &[u64]),
        (there, there_rows): (&Side, &[u64]),
        notification: Option<Vec<u8>>,
    ) -> Result<Asked, Trouble> {
        if here.agent.is_some() {
            return Err(Trouble::Invalid("the local descriptors are another agent's".to_owned()));
        }
        let agent = there.agent.as_deref();
        let agent = agent.ok_or_else(|| Trouble::Invalid("the remote descriptors are of no agent".to_owned()))?;
        if here_rows.len() != there_rows.len() || here_rows.is_empty() {
            return Err(Trouble::Invalid(format!(
                "{} descriptors here and {} there",
                here_rows.len(),
                there_rows.len()
            )));
        }
        let mut bytes = 0_u64;
        let pairings = here_rows.iter().zip(there_rows).map(|(here_row, there_row)| {
            let (own, here) = here.row(*here_row)?;
            let (their, there) = there.row(*there_row)?;
            if here.len != there.len {
                return Err(Trouble::Invalid(format!(
                    "a descriptor of {} bytes here and of {} there",
                    here.len, there.len
                )));
            }
            bytes = bytes.saturating_add(here.len as u64);
            Ok(Pairing {
                here: (own, here.address),
                there: (their, there.address),
                len: here.len,
            })
        });
        let wanted = Wanted {
            direction,
            agent,
            notification: notification.as_deref(),
        };
        let request = Request::prepare(&self.engine, &wanted, pairings)?;
        Ok(Asked {
            request,
            notification,
            descriptors: here_rows.len(),
            bytes,
        })
    }

    /// Starts a transfer, or starts it again. What is to be told at its end, if anything, holds for later posts too.
    pub fn post(&self, asked: &mut Asked, notification: Option<Vec<u8>>) -> Result<Stage, Trouble> {
        if notification.is_some() {
            asked.notification = notification;
        }
        asked.request.post(&self.engine, asked.notification.as_deref())
    }

    pub fn check(&self, asked: &Asked) -> Result<Stage, Trouble> {
        asked.request.check(&self.engine)
    }

    pub fn notify(&self, agent: &str, message: &[u8]) -> Result<(), Trouble> {
        self.engine.notify(agent, message)
    }

    pub fn notifications(&self) -> Vec<(String, Vec<u8>)> {
        self.engine.notifications()
    }

    pub fn has_devices() -> bool {
        Engine::has_devices()
    }

    /// Ends everything of the agent's.
    pub fn close(&self) {
        self.engine.close();
    }
}

impl Side {
    fn row(&self, index: u64) -> Result<(&Metadata, Row), Trouble> {
        let row = usize::try_from(index).ok().and_then(|index| self.rows.get(index));
        let row =
            row.ok_or_else(|| Trouble::Invalid(format!("there is no descriptor {index} among {}", self.rows.len())))?;
        Ok((&self.registrations[row.registration as usize], *row))
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl Asked {
    /// Calls off what is under way. Afterwards nobody touches its memory any more.
    pub fn end(&self) -> Result<(), Trouble> {
        self.request.end()
    }

    /// How long the last post took from its beginning to its end, once that has come.
    pub fn took(&self) -> Option<Duration> {
        self.request.took()
    }
}

/// Where there is no device, memory that is said to be of one is the host's: engines that run on processors say so too.
fn as_it_is_here(bytes: &Bytes) -> Bytes {
    match bytes.segment {
        Segment::Device(_) if !Engine::has_devices() => Bytes {
            segment: Segment::Host,
            ..*bytes
        },
        _ => *bytes,
    }
}

fn given(bytes: &Bytes) -> Given {
    Given {
        address: bytes.address,
        len: bytes.len,
        device: match bytes.segment {
            Segment::Host => None,
            Segment::Device(number) => Some(number),
        },
    }
}

fn unregistered(bytes: &Bytes, agent: &str) -> Trouble {
    Trouble::Unregistered {
        address: bytes.address,
        len: bytes.len,
        agent: agent.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use proptest::prelude::*;

    use super::*;

    /// An entry that is told from others by its name.
    fn entry(number: usize, base: u64, len: u64) -> Registration {
        Registration {
            region: format!("nixl/{number}"),
            base,
            len,
        }
    }

    proptest! {
        /// Whatever overlaps, bytes are found exactly where a registration has all of them.
        #[test]
        fn bytes_are_found_where_they_are(
            registered in proptest::collection::vec((0..3_u64, 0..40_u64, 0..20_u64), 0..12),
            asked in proptest::collection::vec((0..3_u64, 0..50_usize, 0..20_usize), 1..20),
            taken in 0..12_usize,
        ) {
            // One for all cases: what is looked at is the shelf.
            static AGENT: OnceLock<StandIn> = OnceLock::new();
            let agent = AGENT.get_or_init(|| StandIn::start("shelf", "WEFT", Vec::new()).unwrap());
            let segment = |number| if number == 0 { Segment::Host } else { Segment::Device(number) };
            let mut shelf = Shelf::default();
            let mut all: Vec<(Segment, Registration)> = Vec::new();
            for (number, (kind, base, len)) in registered.into_iter().enumerate() {
                let (segment, registration) = (segment(kind), entry(number, base, len));
                let bytes = Bytes { segment, address: base as usize, len: len as usize };
                let their = agent.engine.load_remote("other", given(&bytes), &registration.encode()).unwrap();
                shelf.put(segment, registration.clone(), Metadata::Their(Arc::new(their)));
                all.push((segment, registration));
            }
            if taken < all.len() {
                let (segment, registration) = &all[taken];
                let bytes = Bytes { segment: *segment, address: registration.base as usize, len: registration.len as usize };
                // One of those that are alike.
                let gone = shelf.take(&bytes).unwrap();
                prop_assert_eq!((gone.registration.base, gone.registration.len), (registration.base, registration.len));
                all.retain(|one| one.1 != gone.registration);
            }
            for (kind, address, len) in asked {
                let bytes = Bytes { segment: segment(kind), address, len };
                let has = |(segment, one): &&(Segment, Registration)| {
                    *segment == bytes.segment && one.base <= address as u64 && (address + len) as u64 <= one.base + one.len
                };
                let found = shelf.covering_in(&bytes).map(|entry| entry.registration.clone());
                prop_assert_eq!(found.is_some(), all.iter().any(|one| has(&one)));
                if let Some(found) = found {
                    prop_assert!(all.iter().filter(|one| has(one)).any(|one| one.1 == found));
                }
            }
        }
    }

    #[test]
    fn an_agent_learns_no_more_than_there_can_be() {
        let (here, there) = (StandIn::start("here", "WEFT", Vec::new()).unwrap(), "there".to_owned());
        let connection = crate::blobs::Connection {
            name: there.clone(),
            address: "tcp:127.0.0.1:1".to_owned(),
            epoch: 1,
        };
        let many = |count: usize, connection| Introduction {
            name: "there".to_owned(),
            connection,
            is_whole: false,
            registrations: (0..count)
                .map(|number| (Segment::Host, entry(number, number as u64, 1)))
                .collect(),
        };
        assert_eq!(here.meet(&many(10, Some(connection.clone())).encode()).unwrap(), there);
        let more = here.meet(&many(REGISTRATIONS_MAX, None).encode());
        assert!(matches!(more, Err(Trouble::Invalid(_))), "{more:?}");
        // What was known stays so.
        let byte = |address| Bytes {
            segment: Segment::Host,
            address,
            len: 1,
        };
        assert!(here.knows("there", &[byte(9)]) && !here.knows("there", &[byte(10)]));
        // What it says of all that it has takes the place of that.
        let all = Introduction {
            is_whole: true,
            ..many(3, None)
        };
        here.meet(&all.encode()).unwrap();
        assert!(here.knows("there", &[byte(2)]) && !here.knows("there", &[byte(9)]));
        // Another life of it has nothing of what the one before had.
        let anew = crate::blobs::Connection { epoch: 2, ..connection };
        here.meet(&many(1, Some(anew)).encode()).unwrap();
        assert!(here.knows("there", &[byte(0)]) && !here.knows("there", &[byte(2)]));
    }
}
