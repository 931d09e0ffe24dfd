//! How a store is to be, and its opening.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weft_fabric::fork::OfProcess;
use weft_protocol::block::Shape;
use weft_protocol::block::policy::Kind;
use weft_protocol::block::shelf::format::TenantKey;
use weft_protocol::block::shelf::{Medium, ShelfOptions};

use super::events::Queue;
use super::members::{Link, Peers};
use super::tier::{self, Tier};
use super::turn::{Bell, Shared, State};
use super::{FileTier, Inner, Store, StoreError, WriteTo};
use crate::agent::Agent;
use crate::error::Error;

/// A transfer of a put or a read ends within this, unless the store is told otherwise.
const DEADLINE: Duration = Duration::from_secs(30);

/// Shares of tenants, as parts of a whole.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares(BTreeMap<TenantKey, f64>);

impl Shares {
    pub(super) fn of(&self, slots: usize) -> BTreeMap<TenantKey, usize> {
        let share = |(tenant, part): (&TenantKey, &f64)| (*tenant, (slots as f64 * part.clamp(0.0, 1.0)) as usize);
        self.0.iter().map(share).collect()
    }
}

/// A store being described.
#[derive(Clone, Debug)]
#[must_use = "a described store does nothing until it is opened"]
pub struct StoreBuilder {
    agent: Agent,
    shape: Shape,
    memory: Option<u64>,
    files: Vec<FileTier>,
    policy: Kind,
    deadline: Duration,
    promote: bool,
    shares: Shares,
    events: usize,
    peers: Option<Peers>,
}

impl StoreBuilder {
    pub(super) fn new(agent: &Agent, shape: &Shape) -> StoreBuilder {
        StoreBuilder {
            agent: agent.clone(),
            shape: shape.clone(),
            memory: None,
            files: Vec::new(),
            policy: Kind::default(),
            deadline: DEADLINE,
            promote: true,
            shares: Shares::default(),
            events: 0,
            peers: None,
        }
    }

    /// A first tier of memory that Weft allocates.
    pub fn memory(self, bytes: u64) -> StoreBuilder {
        let memory = Some(bytes);
        StoreBuilder { memory, ..self }
    }
    /// Another tier of files, after those that there are.
    pub fn files(mut self, tier: FileTier) -> StoreBuilder {
        self.files.push(tier);
        self
    }
    /// Who leaves first.
    pub fn policy(self, policy: Kind) -> StoreBuilder {
        StoreBuilder { policy, ..self }
    }
    /// By when a transfer of a put or a read ends.
    pub fn deadline(self, deadline: Duration) -> StoreBuilder {
        StoreBuilder { deadline, ..self }
    }
    /// Whether what is read from files is kept in memory as well.
    pub fn promote(self, promote: bool) -> StoreBuilder {
        StoreBuilder { promote, ..self }
    }
    /// Works with other stores: what is not here is read from whoever has it. One store an agent does.
    pub fn with_peers(self, peers: Peers) -> StoreBuilder {
        let peers = Some(peers);
        StoreBuilder { peers, ..self }
    }
    /// The part of every tier, from 0 to 1, that others cannot push this tenant below.
    pub fn share(mut self, tenant: &str, part: f64) -> StoreBuilder {
        self.shares.0.insert(TenantKey::of(tenant), part);
        self
    }

    /// How many events wait to be [taken](Store::take_events) at most; none are kept unless this is asked for.
    pub fn events(self, events: usize) -> StoreBuilder {
        StoreBuilder { events, ..self }
    }

    /// Opens it: makes what is not there, and finds what is. It waits for the disk.
    pub fn open(self) -> Result<Store, Error> {
        let mut tiers = Vec::new();
        if let Some(bytes) = self.memory {
            let geometry_slots = bytes / u64::from(tier::block_bytes(&self.shape)?).max(1);
            let options = ShelfOptions {
                policy: self.policy,
                queue_bytes: u64::MAX,
                hand_down: self.files.first().is_some_and(|below| below.write == WriteTo::Back),
                shares: self.shares.of(usize::try_from(geometry_slots).unwrap_or(0)),
                ..ShelfOptions::new(Medium::Memory)
            };
            tiers.push(Tier::in_memory(&self.agent, &self.shape, bytes, options)?);
        }
        for files in &self.files {
            tiers.push(Tier::in_files(
                &self.agent,
                &self.shape,
                files,
                self.policy,
                &self.shares,
            )?);
        }
        if tiers.is_empty() || tiers.len() > 8 {
            return Err(StoreError::NoTier.into());
        }
        let shared = Arc::new(Shared {
            block_bytes: tier::block_bytes(&self.shape)?,
            agent: self.agent,
            shape: self.shape,
            deadline: self.deadline,
            promote: self.promote,
            state: Mutex::new(State::of(tiers, Queue::new(self.events))),
            bell: Arc::new(Bell::default()),
            stopped: AtomicBool::new(false),
        });
        let thread = {
            let shared = shared.clone();
            let spawned = std::thread::Builder::new()
                .name("weft-store".to_owned())
                .spawn(move || shared.run());
            spawned.map_err(Error::system("starting the store's thread"))?
        };
        let _ = shared.bell.thread.set(thread.thread().clone());
        shared.bell.ring();
        let store = Store {
            inner: Arc::new(Inner {
                shared: OfProcess::new(shared.clone()),
                thread: OfProcess::new(Mutex::new(Some(thread))),
            }),
        };
        if let Some(peers) = self.peers {
            Link::open(&shared, peers)?;
        }
        Ok(store)
    }
}
