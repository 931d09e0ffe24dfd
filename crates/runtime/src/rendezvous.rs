//! Where agents find each other by name.
//!
//! An agent registers its name, its address and its epoch, and holds the [`Registration`] while it lives; others look the
//! name up. Every place keeps the same promises: a name has one holder at a time, and the entry of a holder that died
//! disappears, whether or not it had time to say so. What is read from any of them is treated as hostile: the worst that a
//! forged entry can do is to name an address where nobody knows the secret.
//!
//! ```
//! use std::time::Duration;
//! use weft::rendezvous::Rendezvous;
//! use weft_protocol::Epoch;
//!
//! let agents = Rendezvous::in_process("job");
//! let held = agents.register("decode", "127.0.0.1:4000", Epoch(1))?;
//! assert_eq!(agents.lookup("decode", Duration::ZERO)?.address, "127.0.0.1:4000");
//! drop(held);
//! assert!(agents.lookup("decode", Duration::ZERO).is_err());
//! # Ok::<(), weft::rendezvous::RendezvousError>(())
//! ```

mod directory;
mod entry;
mod etcd;
mod name_server;
mod process;
mod world;

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use thiserror::Error;
use weft_fabric::fork::{Forked, OfProcess};
use weft_protocol::Epoch;

use crate::interrupt;
use crate::settings::{RendezvousChoice, SecretError, Settings};

pub(crate) use name_server::check_frames;

pub use entry::Entry;
pub use etcd::EtcdError;
pub use world::World;

use directory::Directory;
use etcd::Etcd;
use name_server::Names;
use process::InProcess;

/// How often a place that tells nobody of a change is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// A place where agents find each other by name. Calls block, up to the time they are given.
#[derive(Debug)]
pub struct Rendezvous {
    place: OfProcess<Place>,
}

#[derive(Debug)]
enum Place {
    Process(InProcess),
    Directory(Directory),
    Names(Names),
    Etcd(Box<Etcd>),
}

/// What the places need to know.
#[derive(Clone, Debug)]
pub struct RendezvousOptions {
    /// Names of different jobs do not meet.
    pub job: String,
    /// How long the entry of a dead holder may stay.
    pub lease: Duration,
}

impl Default for RendezvousOptions {
    fn default() -> RendezvousOptions {
        RendezvousOptions {
            job: "default".to_owned(),
            lease: Duration::from_secs(5),
        }
    }
}

/// The right to a name. Dropping it gives the name back, except in a forked child: it is the parent's.
#[must_use = "the name is given back when this is dropped"]
#[derive(Debug)]
pub struct Registration {
    entry: Entry,
    _held: OfProcess<Box<dyn Held>>,
}

impl Registration {
    pub fn entry(&self) -> &Entry {
        &self.entry
    }
}

/// Whatever keeps an entry in place, and takes it away when dropped.
trait Held: Debug + Send + Sync {}

impl Rendezvous {
    /// The place that the settings name, if they name one.
    pub fn from_settings(settings: &Settings) -> Result<Option<Rendezvous>, RendezvousError> {
        let options = RendezvousOptions {
            job: settings.rendezvous_job.clone(),
            lease: settings.rendezvous_lease,
        };
        match &settings.rendezvous {
            RendezvousChoice::None => Ok(None),
            RendezvousChoice::Process => Ok(Some(Rendezvous::in_process(&options.job))),
            RendezvousChoice::Directory(path) => Rendezvous::by_directory(path, options).map(Some),
            RendezvousChoice::Etcd(endpoints) => Rendezvous::by_etcd(endpoints, options).map(Some),
            RendezvousChoice::Environment => {
                let world = World::of_process()?;
                let secret = settings.shared_secret()?;
                let options = match &world.job {
                    // Another job may have come to the same port.
                    Some(job) => RendezvousOptions {
                        job: format!("{}/{job}", options.job),
                        ..options
                    },
                    None => options,
                };
                Rendezvous::by_world(&world, settings.rendezvous_port_offset, &secret, options).map(Some)
            }
        }
    }

    /// Agents of this process.
    pub fn in_process(job: &str) -> Rendezvous {
        Place::Process(InProcess::new(job)).into()
    }

    /// Agents that share a directory, on one host or by a network file system.
    pub fn by_directory(path: &Path, options: RendezvousOptions) -> Result<Rendezvous, RendezvousError> {
        Directory::open(path, options).map(|place| Place::Directory(place).into())
    }

    /// Agents that were started together: rank 0 keeps the names, at the master's address and its port plus `port_offset`.
    pub fn by_world(
        world: &World,
        port_offset: u16,
        secret: &[u8],
        options: RendezvousOptions,
    ) -> Result<Rendezvous, RendezvousError> {
        Names::join(world, port_offset, secret, options).map(|place| Place::Names(place).into())
    }

    /// Agents that share an etcd cluster, given as URLs with semicolons between them.
    pub fn by_etcd(endpoints: &str, options: RendezvousOptions) -> Result<Rendezvous, RendezvousError> {
        Etcd::connect(endpoints, options).map(|place| Place::Etcd(Box::new(place)).into())
    }

    /// Takes a name. One that another live agent holds is refused.
    pub fn register(&self, name: &str, address: &str, epoch: Epoch) -> Result<Registration, RendezvousError> {
        let entry = Entry::of_process(name, address, epoch)?;
        let held: Box<dyn Held> = match self.place.get()? {
            Place::Process(place) => Box::new(place.register(&entry)?),
            Place::Directory(place) => Box::new(place.register(&entry)?),
            Place::Names(place) => Box::new(place.register(&entry)?),
            Place::Etcd(place) => Box::new(place.register(&entry)?),
        };
        Ok(Registration {
            entry,
            _held: OfProcess::new(held),
        })
    }

    /// Who holds a name. Waits for somebody to take it, up to `timeout`.
    pub fn lookup(&self, name: &str, timeout: Duration) -> Result<Entry, RendezvousError> {
        entry::check_name(name)?;
        let (place, began) = (self.place.get()?, Instant::now());
        loop {
            let left = timeout.saturating_sub(began.elapsed());
            // Whoever can be interrupted waits a little at a time.
            let wait = match interrupt::is_watched() {
                true => left.min(place.wait_max()),
                false => left,
            };
            let found = match place {
                Place::Process(place) => place.lookup(name, wait),
                Place::Directory(place) => place.lookup(name, wait)?,
                Place::Names(place) => place.lookup(name, wait)?,
                Place::Etcd(place) => place.lookup(name, wait)?,
            };
            match found {
                Some(entry) => return Ok(entry),
                None if interrupt::is_due() => return Err(RendezvousError::Interrupted),
                None if began.elapsed() < timeout => {}
                None => {
                    return Err(RendezvousError::NotFound {
                        name: name.to_owned(),
                        waited: timeout,
                    });
                }
            }
        }
    }

    /// Every name that is held now, in order.
    pub fn list(&self) -> Result<Vec<Entry>, RendezvousError> {
        let mut entries = match self.place.get()? {
            Place::Process(place) => place.list(),
            Place::Directory(place) => place.list()?,
            Place::Names(place) => place.list()?,
            Place::Etcd(place) => place.list()?,
        };
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Every name that is held, as soon as that is something else than `known`, which `list` or this has said before; or after `timeout`.
    pub fn list_changed(&self, known: &[Entry], timeout: Duration) -> Result<Vec<Entry>, RendezvousError> {
        let began = Instant::now();
        loop {
            let entries = match self.place.get()? {
                Place::Etcd(place) => place.list_changed(known, timeout)?,
                _ => self.list()?,
            };
            let left = timeout.saturating_sub(began.elapsed());
            if entries != known || left.is_zero() {
                return Ok(entries);
            }
            std::thread::sleep(LOOK_AGAIN.min(left));
        }
    }
}

impl Place {
    /// How long somebody who can be interrupted waits for a name at a time.
    fn wait_max(&self) -> Duration {
        match self {
            Place::Process(_) | Place::Directory(_) => interrupt::ASK_EVERY,
            // It asks by itself while it waits.
            Place::Names(_) => Duration::MAX,
            // Each wait is a question to the cluster.
            Place::Etcd(_) => Duration::from_millis(250),
        }
    }
}

impl From<Place> for Rendezvous {
    fn from(place: Place) -> Rendezvous {
        let place = OfProcess::new(place);
        Rendezvous { place }
    }
}

#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RendezvousError {
    #[error("the name {name:?} is held by a live agent at {holder}")]
    NameTaken { name: String, holder: String },
    #[error("nobody took the name {name:?} within {waited:?}")]
    NotFound { name: String, waited: Duration },
    #[error("the wait was interrupted")]
    Interrupted,
    #[error(
        "{name:?} cannot be a name: it must have 1 to {} bytes and no control characters",
        entry::NAME_BYTES_MAX
    )]
    BadName { name: String },
    #[error(
        "an address must have 1 to {} bytes and no control characters",
        entry::ADDRESS_BYTES_MAX
    )]
    BadAddress,
    #[error("{place} holds something that is not an entry")]
    BadEntry { place: String },
    #[error("more than {max} entries at {place}")]
    TooMany { place: String, max: usize },
    #[error("cannot use the rendezvous directory {}: {source}", path.display())]
    Directory { path: PathBuf, source: std::io::Error },
    #[error("neither torchrun, MPI nor Slurm has left a rank in the environment (looked for {0})")]
    NoWorld(&'static str),
    #[error("the environment variable {name} is needed")]
    MissingVariable { name: &'static str },
    #[error(
        "the environment names a rank ({rank}) and not where rank 0 is, and the ranks are not known to be on one host: \
         add the host of rank 0 and a port that is free there, as in `{adding}`"
    )]
    NoMaster { rank: &'static str, adding: &'static str },
    #[error("the environment variable {name} = {value:?} makes no sense")]
    BadVariable { name: &'static str, value: String },
    #[error("cannot reach the name server at {address}: {source}")]
    NameServer { address: String, source: std::io::Error },
    #[error("the name server at {address} does not know our secret, or we not its")]
    WrongSecret { address: String },
    #[error("what answers at {address} is not our name server")]
    NotNameServer { address: String },
    #[error("etcd at {endpoints}: {source}")]
    Etcd { endpoints: String, source: EtcdError },
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    #[error(transparent)]
    Forked(#[from] Forked),
    #[error(transparent)]
    Secret(#[from] SecretError),
    #[error("the system gave no random bytes: {0}")]
    NoRandomness(getrandom::Error),
}
