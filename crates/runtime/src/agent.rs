//! The agent: one per process is usual, several are fine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use weft_fabric::cuda::{CudaMemory, Device, DeviceMemory};
use weft_fabric::file::{FileMemory, FileOptions};
use weft_fabric::fork::{Forked, OfProcess};
use weft_fabric::memory::{AllocateOptions, HostMemory, HugePages};
use weft_fabric::{Clock, Live};
use weft_plan::{Place, Platform, Time};
use weft_protocol::agent::{Core, Slot, Target};
use weft_protocol::region::{Access, Epoch};
use weft_protocol::session::{Config, Secret};
use weft_protocol::transfer::PeerId;
use weft_protocol::transport::{PeerAddress, Progress};

use crate::communicator::Member;
use crate::communicator::board::Board;
use crate::driver::{PeerState, Shared, Turns, World};
use crate::ending::remember;
use crate::error::Error;
use crate::memory::{Held, Memory, Registered, after};
use crate::observe::{Event, Observer, ObserverOptions};
use crate::peer::{CopyBuilder, Defaults, Peer};
use crate::rendezvous::{Registration, Rendezvous, World as Launched};
use crate::settings::{Origin, Settings, Sources, TransportChoice, When, long_enough};
use crate::transports;

/// Host memory that transfers of device memory go through where no transport carries it: enough pieces that one comes in while others go out.
const STAGE_BYTES: usize = 64 << 20;
const STAGE_PIECE_BYTES: u64 = 4 << 20;

/// Registers memory, publishes it, connects to other agents and moves bytes. Clones are the same agent; the last one to go
/// [closes](Agent::close) it.
///
/// It belongs to the process that started it. In a forked child every call that can fail fails with [`Error::Forked`], the others find
/// nothing, and dropping it, or anything that came from it, does nothing.
#[derive(Clone, Debug)]
pub struct Agent {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: Arc<str>,
    epoch: Epoch,
    address: String,
    settings: Settings,
    /// What the ways between machines cost: what collectives are chosen by.
    platform: Platform,
    shared: OfProcess<Arc<Shared>>,
    /// What goes through host memory goes through this, from the first memory of a device on.
    stage: Mutex<Option<Memory>>,
    #[cfg(feature = "s3")]
    buckets: crate::objects::Buckets,
    /// Until the agent is closed.
    running: OfProcess<Mutex<Running>>,
}

/// What an agent has only while it runs.
#[derive(Debug, Default)]
struct Running {
    rendezvous: Option<Arc<Rendezvous>>,
    registration: Option<Registration>,
    thread: Option<JoinHandle<()>>,
}

/// What one rail of a transport has done since its agent started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailCounters {
    pub transport: &'static str,
    /// Where peers reach the rail.
    pub address: String,
    /// How often what has happened, by name.
    pub counts: Vec<(&'static str, u64)>,
}

/// How an agent is to be: the process's settings, and what the call says on top.
#[derive(Clone, Debug)]
#[must_use = "a described agent does nothing until it is started"]
pub struct AgentBuilder {
    calls: Vec<(String, String)>,
    /// What holds where nobody else says anything.
    defaults: Vec<(String, String)>,
}

/// What a peer has told this agent.
#[derive(Clone, Debug)]
pub struct Notification {
    pub from: Peer,
    pub payload: Vec<u8>,
}

/// A write of a peer that is in place, and that the peer wanted [told](crate::TransferBuilder::arrives).
#[derive(Clone, Debug)]
pub struct Arrival {
    pub from: Peer,
    pub number: u32,
}

impl AgentBuilder {
    /// Sets any setting by its key. An unknown key is an error when the agent starts.
    pub fn set(mut self, key: &str, value: impl ToString) -> AgentBuilder {
        self.calls.push((key.to_owned(), value.to_string()));
        self
    }
    /// Sets a setting that neither a call, nor the environment, nor a file says anything about.
    pub fn unless_set(mut self, key: &str, value: impl ToString) -> AgentBuilder {
        self.defaults.push((key.to_owned(), value.to_string()));
        self
    }
    /// The address to accept TCP peers on.
    pub fn listen(self, address: &str) -> AgentBuilder {
        self.set("listen", address)
    }
    /// The secret that the agents of one deployment share.
    pub fn secret(self, secret: &str) -> AgentBuilder {
        self.set("secret", secret)
    }

    /// For a process that a launcher has started with others: they find each other through rank 0, and reach this one from where rank 0 is,
    /// unless the settings say otherwise.
    pub fn for_world(self, world: &Launched) -> AgentBuilder {
        let told = self.unless_set("rendezvous", "env");
        match way_to(&world.master, world.master_port) {
            Some(own) => told.unless_set("listen", SocketAddr::new(own, 0)),
            None => told,
        }
    }

    pub fn start(self) -> Result<Agent, Error> {
        let mut sources = Sources::of_process()?;
        for (key, value) in &self.calls {
            sources = sources.set(key, value);
        }
        let settings = Settings::from_sources(&sources)?;
        let unset = |key: &str| {
            let mut rows = settings.rows().into_iter();
            rows.any(|(row, _, origin)| row.key == key && *origin == Origin::Default)
        };
        let missing: Vec<_> = self.defaults.iter().filter(|(key, _)| unset(key)).collect();
        for (key, value) in &missing {
            sources = sources.set(key, value);
        }
        Agent::start(match missing.is_empty() {
            true => settings,
            false => Settings::from_sources(&sources)?,
        })
    }
}

impl Agent {
    pub fn builder(name: &str) -> AgentBuilder {
        let (calls, defaults) = (Vec::new(), Vec::new());
        AgentBuilder { calls, defaults }.set("name", name)
    }

    pub fn start(settings: Settings) -> Result<Agent, Error> {
        let clock = Clock::start();
        let name: Arc<str> = settings.name.clone().unwrap_or_else(default_name).into();
        let epoch = new_epoch();
        let secret = settings.shared_secret()?;
        let slots: Vec<Slot<dyn Live>> = transports::start(&settings, &secret, epoch, clock)?;
        let platform = platform(&settings)?;
        let session = Config {
            host: transports::host_identity(),
            heartbeat: settings.heartbeat.into(),
            silence_max: settings.silence_max.into(),
            ..Config::new(&*name, epoch, Secret::new(&secret))
        };
        let core_settings = weft_protocol::agent::Settings {
            lease_max: Time::from_secs(3600),
            peers_max: 65_536,
            unclaimed_paths_max: 1024,
            ..weft_protocol::agent::Settings::new(session)
        };
        let core = Core::new(core_settings, slots, Box::new(random));
        let observer = Observer::start(ObserverOptions {
            agent: name.to_string(),
            metrics: settings.metrics_listen.is_some(),
            metrics_listen: settings.metrics_listen,
            trace_file: settings.trace_file.clone(),
        })?;
        let shared = Shared::new(World::new(core), clock, settings.spin.into(), observer)?;
        let counted = Arc::downgrade(&shared);
        shared.observer.count_with(move || match counted.upgrade() {
            Some(shared) => shared.lock().counters(),
            None => Vec::new(),
        });
        let thread = {
            let shared = shared.clone();
            let core = settings.progress_core;
            std::thread::Builder::new()
                .name("weft-progress".to_owned())
                .spawn(move || {
                    pin(core);
                    shared.run();
                })
                .map_err(Error::system("starting the progress thread"))?
        };
        let running = Running {
            thread: Some(thread),
            ..Running::default()
        };
        let addresses = shared.lock().core.addresses();
        let address = addresses.iter().map(|a| a.0.as_str()).collect::<Vec<_>>().join(",");
        let inner = Inner {
            name,
            epoch,
            address,
            settings,
            platform,
            shared: OfProcess::new(shared),
            stage: Mutex::default(),
            #[cfg(feature = "s3")]
            buckets: Mutex::default(),
            running: OfProcess::new(Mutex::new(running)),
        };
        // Where it fails, the agent is closed.
        inner.join_rendezvous()?;
        let address = inner.address.clone();
        let observer = &inner.shared.get()?.observer;
        observer.report(clock.now(), || Event::AgentStarted { address });
        Ok(Agent { inner: Arc::new(inner) })
    }

    pub fn name(&self) -> &str {
        &self.inner.name
    }
    pub fn epoch(&self) -> Epoch {
        self.inner.epoch
    }
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }
    #[cfg(feature = "s3")]
    pub(crate) fn buckets(&self) -> &crate::objects::Buckets {
        &self.inner.buckets
    }

    /// Where other agents reach this one, as one string for [`connect`](Agent::connect).
    pub fn address(&self) -> String {
        self.inner.address.clone()
    }

    /// Memory that Weft allocates: zeroed, registered, and mapped by peers on this host instead of copied through the kernel.
    pub fn allocate(&self, bytes: usize) -> Result<Memory, Error> {
        self.allocate_on(bytes, None)
    }

    /// Allocates memory preferably of this NUMA node, and registers it as such: of several rails, transfers prefer those that are near to it.
    pub fn allocate_on(&self, bytes: usize, numa: Option<u32>) -> Result<Memory, Error> {
        self.shared()?;
        let huge_pages = match self.inner.settings.huge_pages {
            When::Off => HugePages::Never,
            When::Auto => HugePages::Transparent,
            When::On => HugePages::Reserved,
        };
        let host = HostMemory::allocate(
            bytes,
            AllocateOptions {
                huge_pages,
                numa,
                ..AllocateOptions::default()
            },
        )?;
        self.register(host)
    }

    /// Memory of a device, which peers on this machine map; what it holds at first is anything. See [docs/gpu.md].
    ///
    /// [docs/gpu.md]: https://github.com/weft-ai/weft/blob/main/docs/gpu.md
    pub fn allocate_device(&self, ordinal: u16, bytes: u64) -> Result<Memory, Error> {
        self.shared()?;
        let device = Device::open(ordinal)?;
        self.register_device(DeviceMemory::allocate(&device, bytes)?)
    }

    /// Registers memory of a device; [`DeviceMemory::foreign`] is the way to memory that was allocated elsewhere: by a framework, by `cudaMalloc`.
    pub fn register_device(&self, memory: DeviceMemory) -> Result<Memory, Error> {
        self.give_stage()?;
        let place = Place::Gpu {
            ordinal: memory.device().ordinal(),
        };
        self.register_at(Arc::new(CudaMemory::new(Arc::new(memory))), place)
    }

    /// Opens a file or a block device and registers it: [`copy`](Agent::copy) moves bytes between it and memory, of the host or, through the host's, of a
    /// device, another file, or a peer. See [docs/files.md]. The call waits for the file system; nobody else does.
    ///
    /// [docs/files.md]: https://github.com/weft-ai/weft/blob/main/docs/files.md
    pub fn open_file(&self, path: impl AsRef<Path>, options: FileOptions) -> Result<Memory, Error> {
        self.shared()?;
        self.register_file(FileMemory::open(path, options)?)
    }

    /// Registers a file that has been opened.
    pub fn register_file(&self, file: FileMemory) -> Result<Memory, Error> {
        self.give_stage()?;
        self.register_at(Arc::new(file), Place::File)
    }

    /// Host memory for transfers that no transport carries at once.
    pub(crate) fn give_stage(&self) -> Result<(), Error> {
        let mut stage = self.inner.stage.lock().unwrap_or_else(PoisonError::into_inner);
        if stage.is_some() {
            return Ok(());
        }
        let memory = self.allocate(STAGE_BYTES)?;
        let key = memory.inner.region.key;
        let given = self
            .shared()?
            .act(|world, _| world.core.stage_through(&key, STAGE_PIECE_BYTES));
        given.map_err(|refusal| Error::Refused {
            what: "host memory for what goes through it".to_owned(),
            refusal,
        })?;
        *stage = Some(memory);
        Ok(())
    }

    /// Copies between two memories of this agent, of which one is a device's, a file or an object: an ordinary transfer, with a deadline and a checksum. What no transport
    /// of this agent carries, as from host memory to host memory, is [`PeerError::NoRoute`](crate::PeerError::NoRoute) when it is posted.
    pub fn copy<'a>(&self, from: &'a Memory, to: &'a Memory) -> Result<CopyBuilder<'a>, Error> {
        let settings = &self.inner.settings;
        let here = Peer {
            shared: self.inner.shared.clone(),
            id: PeerId::HERE,
            name: "here".into(),
            defaults: Defaults {
                deadline: settings.deadline,
                checksum: settings.checksum,
            },
        };
        self.shared()?;
        Ok(CopyBuilder::new(here, from, to))
    }

    /// Registers a vector's bytes.
    pub fn register_vec(&self, bytes: Vec<u8>) -> Result<Memory, Error> {
        self.register(HostMemory::from_vec(bytes))
    }

    /// Registers host memory of any kind; [`HostMemory::from_raw`] is the way to memory that was allocated elsewhere: by malloc,
    /// NumPy, torch. The same foreign memory registered again, while a handle of it lives, is the same registration and costs
    /// a look-up.
    pub fn register(&self, host: HostMemory) -> Result<Memory, Error> {
        let shared = self.shared()?;
        let foreign = host.file().is_none();
        if foreign && let Some(inner) = shared.lock().registrations.find(&host) {
            return Ok(Memory { inner });
        }
        let memory = self.register_shared(Arc::new(host))?;
        if foreign {
            shared.lock().registrations.remember(&memory.inner);
        }
        Ok(memory)
    }

    /// Registers host memory that others here hold, too.
    pub(crate) fn register_shared(&self, host: Arc<HostMemory>) -> Result<Memory, Error> {
        let place = Place::Dram {
            numa: host.numa().and_then(|node| u16::try_from(node).ok()),
        };
        self.register_held(Held::Host(host), place)
    }

    /// Registers memory of any kind, with where it is: a dma-buf that a device's driver exported
    /// ([`DmaBufMemory`](weft_fabric::memory::DmaBufMemory)), or what a transport of your own knows. Transports that cannot move it leave it to
    /// others; where none can, it is refused.
    pub fn register_at(&self, memory: Arc<dyn weft_protocol::Memory>, place: Place) -> Result<Memory, Error> {
        self.register_held(Held::Other(memory), place)
    }

    fn register_held(&self, memory: Held, place: Place) -> Result<Memory, Error> {
        let region = self.shared()?.act(|world, _| {
            world.check_running()?;
            let registered = world.core.register(memory.any(), place);
            registered.map_err(|refusal| Error::Refused {
                what: "registering memory".to_owned(),
                refusal,
            })
        })?;
        let inner = Arc::new(Registered {
            shared: self.inner.shared.clone(),
            region,
            memory,
            lent: OnceLock::new(),
        });
        Ok(Memory { inner })
    }

    /// Lets peers reach memory under a name. What is published stays registered, whoever drops its handle, until it is
    /// [withdrawn](Agent::withdraw) or [released](Memory::release), or the agent is closed.
    pub fn publish(&self, name: &str, memory: &Memory, access: Access) -> Result<(), Error> {
        let shared = self.shared()?;
        memory.check_owner(shared)?;
        let replaced = shared.act(|world, now| {
            world.check_running()?;
            world.core.publish(name, &memory.inner.region.key, access, now)?;
            Ok::<_, Error>(world.published.insert(name.to_owned(), memory.inner.clone()))
        })?;
        drop(replaced);
        Ok(())
    }

    /// Takes a published name back. Peers are refused from now on; [`Memory::release`] tells when the last of them is out.
    pub fn withdraw(&self, name: &str) -> Result<(), Error> {
        let withdrawn = self.shared()?.act(|world, now| {
            let (key, progress) = world.core.withdraw(name, now)?;
            if progress == Progress::Busy {
                world.releasing.push(key);
            }
            Ok::<_, Error>(world.published.remove(name))
        })?;
        drop(withdrawn);
        Ok(())
    }

    /// Connects to an agent by its [`address`](Agent::address), or by `host:port`, within the default deadline.
    pub fn connect(&self, address: &str) -> Result<Peer, Error> {
        self.connect_within(address, self.inner.settings.deadline)
    }

    pub fn connect_within(&self, address: &str, timeout: Duration) -> Result<Peer, Error> {
        let deadline = after(self.shared()?, timeout);
        self.connect_to(Target {
            addresses: parse_addresses(address)?,
            deadline,
            name: None,
            epoch: None,
        })
    }

    fn connect_to(&self, target: Target) -> Result<Peer, Error> {
        let id = self.connect_peer(target)?;
        let name = match self.shared()?.lock().peers.get(&id) {
            Some(PeerState::Connected { name }) => name.clone(),
            Some(PeerState::Gone(error)) => return Err(error.clone()),
            _ => return Err(Error::Stopped),
        };
        Ok(self.peer(id, &name))
    }

    pub(crate) fn connect_peer(&self, target: Target) -> Result<PeerId, Error> {
        let shared = self.shared()?;
        let deadline = target.deadline;
        let what = || format!("a session with {}", target.addresses.first().map_or("", |a| &a.0));
        if let Some(far) = target.addresses.iter().find(|address| leads_elsewhere(address)) {
            // Whoever answers there is given a proof, before it has to show that it knows the secret itself.
            let secret = shared.lock().core.settings().session.secret.clone();
            long_enough(secret.bytes(), || format!("{far}"))?;
        }
        let id = shared.act(|world, now| {
            world.check_running()?;
            let id = world.core.connect(target.clone(), now)?;
            world.peers.insert(id, PeerState::Connecting);
            Ok::<PeerId, Error>(id)
        })?;
        let margin = Time::from_ms(200);
        let connected = shared.wait_until(deadline.saturating_add(margin), |world| match world.peers.get(&id) {
            Some(PeerState::Connected { .. }) => Some(Ok(id)),
            Some(PeerState::Gone(error)) => Some(Err(error.clone())),
            _ => None,
        });
        connected.unwrap_or_else(|| {
            // Nobody waits for it any more, so it is not to come about any more.
            shared.act(|world, now| world.core.disconnect(id, now));
            Err(shared.in_vain(what))
        })
    }

    /// Connects to an agent by its name, looked up through the rendezvous.
    pub fn connect_named(&self, name: &str, timeout: Duration) -> Result<Peer, Error> {
        let rendezvous = self.rendezvous_for(name)?;
        let deadline = after(self.shared()?, timeout);
        let entry = rendezvous.lookup(name, timeout)?;
        self.connect_to(Target {
            addresses: parse_addresses(&entry.address)?,
            deadline,
            name: Some(entry.name),
            epoch: Some(entry.epoch),
        })
    }

    /// Connects to one life of an agent, as that has told it by other means: its [`name`](Agent::name), [`address`](Agent::address) and
    /// [`epoch`](Agent::epoch). Whoever has come in its place is not taken for it.
    pub fn connect_life(&self, name: &str, member: &Member, timeout: Duration) -> Result<Peer, Error> {
        let deadline = after(self.shared()?, timeout);
        self.connect_to(Target {
            addresses: parse_addresses(&member.address)?,
            deadline,
            name: Some(name.to_owned()),
            epoch: Some(member.epoch),
        })
    }

    /// The peers that are connected now, whoever came to whom.
    pub fn peers(&self) -> Vec<Peer> {
        let Ok(shared) = self.shared() else {
            return Vec::new();
        };
        let world = shared.lock();
        let connected = world.peers.iter().filter_map(|(id, state)| match state {
            PeerState::Connected { name } => Some(self.peer(*id, name)),
            _ => None,
        });
        connected.collect()
    }

    /// The next notification, from whichever peer; `None` where none comes in time.
    pub fn next_notification(&self, timeout: Duration) -> Option<Notification> {
        let shared = self.shared().ok()?;
        let told = shared.wait_until(after(shared, timeout), |world| world.take_notification());
        told.map(|(id, name, payload)| Notification {
            from: self.peer(id, &name),
            payload,
        })
    }

    /// The next write of a peer that is in place and was to be told; `None` if none comes in time. They count with notifications as what is to be
    /// taken: where nobody takes them, notifications are held back at their senders. There is nobody to hold an arrival back, so a peer that goes on sending
    /// them loses its path when thousands wait.
    pub fn arrival(&self, timeout: Duration) -> Option<Arrival> {
        let shared = self.shared().ok()?;
        let told = shared.wait_until(after(shared, timeout), |world| world.take_arrival());
        told.map(|(id, name, number)| Arrival {
            from: self.peer(id, &name),
            number,
        })
    }

    /// The same, without waiting.
    pub fn try_arrival(&self) -> Option<Arrival> {
        let shared = self.shared().ok()?;
        shared.turn();
        let told = shared.lock().take_arrival();
        told.map(|(id, name, number)| Arrival {
            from: self.peer(id, &name),
            number,
        })
    }

    /// The next notification, without waiting.
    pub fn try_notification(&self) -> Option<Notification> {
        let shared = self.shared().ok()?;
        shared.turn();
        let told = shared.lock().take_notification();
        told.map(|(id, name, payload)| Notification {
            from: self.peer(id, &name),
            payload,
        })
    }

    /// Takes the turning of this agent over from its own thread, which sleeps until the answer is dropped.
    ///
    /// For a loop that looks at memory, or at anything else, without ever stopping, and cannot afford a second thread beside it. Whoever
    /// takes over must [turn](Turns::turn) the agent, at least every few milliseconds: transfers that have been posted go on, peers are
    /// answered and deadlines are kept only by that, or by threads that wait for something.
    pub fn take_turns(&self) -> Turns<'_> {
        Turns::take(self.shared().ok().map(|shared| &**shared))
    }

    /// The next notification, as a future, which never ends in a forked child.
    pub fn notified(&self) -> impl Future<Output = Notification> + Send + '_ {
        std::future::poll_fn(|context| {
            let Ok(shared) = self.shared() else {
                return std::task::Poll::Pending;
            };
            let mut world = shared.lock();
            match world.take_notification() {
                Some((id, name, payload)) => std::task::Poll::Ready(Notification {
                    from: self.peer(id, &name),
                    payload,
                }),
                None => {
                    remember(&mut world.wakers, context.waker());
                    std::task::Poll::Pending
                }
            }
        })
    }

    /// The metrics of this agent as Prometheus reads them; empty unless `metrics_listen` is set.
    pub fn metrics(&self) -> String {
        self.shared()
            .map_or_else(|_| String::new(), |shared| shared.observer.metrics())
    }

    /// What the transports of this agent count, one entry a rail. Those that count nothing are left out.
    pub fn counters(&self) -> Vec<RailCounters> {
        self.shared()
            .map_or_else(|_| Vec::new(), |shared| shared.lock().counters())
    }

    /// How many rails this agent has of a transport.
    pub fn rails(&self, transport: &str) -> usize {
        let Ok(shared) = self.shared() else { return 0 };
        let world = shared.lock();
        let slots = world.core.slots().iter();
        slots
            .filter(|slot| slot.transport.capabilities().name == transport)
            .count()
    }

    /// Stops the agent, whatever clones and handles of it are left.
    ///
    /// Its communicators give up what is under way, and the other ranks are told at once; its sessions are closed; what it has published
    /// is withdrawn and released. Whatever waits ends with [`Error::Stopped`], and so does what is asked of it later.
    pub fn close(&self) {
        self.inner.close();
    }

    pub(crate) fn shared(&self) -> Result<&Arc<Shared>, Forked> {
        self.inner.shared.get()
    }
    /// Where names are looked up.
    pub(crate) fn rendezvous_for(&self, name: &str) -> Result<Arc<Rendezvous>, Error> {
        self.shared()?.lock().check_running()?;
        let rendezvous = hold(self.inner.running.get()?).rendezvous.clone();
        rendezvous.ok_or_else(|| Error::NoRendezvous { name: name.to_owned() })
    }
    /// What tells hosts apart.
    pub(crate) fn host(&self) -> Result<String, Forked> {
        Ok(self.shared()?.lock().core.settings().session.host.clone())
    }
    pub(crate) fn platform(&self) -> &Platform {
        &self.inner.platform
    }
    /// The names of the transports that it has, best first.
    pub(crate) fn transport_names(&self) -> Result<Vec<&'static str>, Forked> {
        let world = self.shared()?.lock();
        let slots = world.core.slots().iter();
        let mut names: Vec<&'static str> = slots.map(|slot| slot.transport.capabilities().name).collect();
        names.dedup();
        Ok(names)
    }
    /// Hears nothing more of a group.
    pub(crate) fn forget_board(&self, board: &Arc<Board>) {
        let Ok(shared) = self.shared() else { return };
        let mut world = shared.lock();
        world.boards.retain(|known| !Arc::ptr_eq(known, board));
        world.core.drop_parcels(board.group);
        world.core.drop_parcels(board.group + 1);
    }

    fn peer(&self, id: PeerId, name: &str) -> Peer {
        let Settings { deadline, checksum, .. } = self.inner.settings;
        Peer {
            shared: self.inner.shared.clone(),
            id,
            name: name.into(),
            defaults: Defaults { deadline, checksum },
        }
    }
}

impl Inner {
    fn join_rendezvous(&self) -> Result<(), Error> {
        if let Some(rendezvous) = Rendezvous::from_settings(&self.settings)? {
            let registration = rendezvous.register(&self.name, &self.address, self.epoch)?;
            let mut running = hold(self.running.get()?);
            running.rendezvous = Some(Arc::new(rendezvous));
            running.registration = Some(registration);
        }
        Ok(())
    }

    /// In a forked child there is nothing to close.
    fn close(&self) {
        let (Ok(shared), Ok(running)) = (self.shared.get(), self.running.get()) else {
            return;
        };
        let Running {
            rendezvous,
            registration,
            thread,
        } = std::mem::take(&mut *hold(running));
        // Whoever comes second, or closes it at the same time, has nothing to do.
        let Some(thread) = thread else { return };
        // First of all, so that nobody finds an agent that is going away.
        drop(registration);
        let groups = std::mem::take(&mut shared.lock().groups);
        groups.iter().filter_map(Weak::upgrade).for_each(|group| group.stop());
        drop(rendezvous);
        // A scrape holds the agent for a moment, and must not be the one that takes it apart.
        shared.observer.count_with(Vec::new);
        shared.observer.report(shared.clock.now(), || Event::AgentStopped);
        shared.farewell();
        shared.end_transfers();
        shared.stop();
        // The last handle may go inside a waker, on the progress thread itself.
        if thread.thread().id() != std::thread::current().id() {
            // A panic of the progress thread has been printed; there is nobody left to tell.
            let _ = thread.join();
        }
        let published = std::mem::take(&mut shared.lock().published);
        drop(published);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

fn hold(running: &Mutex<Running>) -> MutexGuard<'_, Running> {
    running.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// What the setting names, or the built-in one.
fn platform(settings: &Settings) -> Result<Platform, Error> {
    let Some(path) = &settings.platform else {
        return Ok(Platform::laptop());
    };
    let text = std::fs::read_to_string(path).map_err(Error::system("reading the platform file"))?;
    Platform::from_toml(&text).map_err(|error| Error::Platform {
        path: path.clone(),
        source: Arc::new(error),
    })
}

/// Keeps the calling thread on one core, where one was asked for.
fn pin(core: Option<usize>) {
    if let Some(core) = core
        && let Err(error) = weft_fabric::cpu::pin(core)
    {
        tracing::warn!(core, %error, "the progress thread is not pinned");
    }
}

/// `host:port` is short for `tcp:host:port`; several addresses are separated by commas, best first. Names are looked up.
pub(crate) fn parse_addresses(text: &str) -> Result<Vec<PeerAddress>, Error> {
    let known = |part: &str| {
        let of = |choice: &TransportChoice| PeerAddress(part.to_owned()).transport() == choice.name();
        TransportChoice::ALL.iter().any(of)
    };
    let mut addresses = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        if known(part) && !part.starts_with("tcp:") {
            addresses.push(PeerAddress(part.to_owned()));
            continue;
        }
        let place = part.strip_prefix("tcp:").unwrap_or(part);
        let found = place.to_socket_addrs().map_err(|source| Error::NoSuchHost {
            address: place.to_owned(),
            source: Arc::new(source),
        })?;
        addresses.extend(found.map(|found| PeerAddress(format!("tcp:{found}"))));
    }
    Ok(addresses)
}

/// Whether an address may be another host's.
pub(crate) fn leads_elsewhere(address: &PeerAddress) -> bool {
    match address.transport() {
        "tcp" => !address
            .rest()
            .parse::<SocketAddr>()
            .is_ok_and(|address| address.ip().to_canonical().is_loopback()),
        "shared_memory" => false,
        _ => true,
    }
}

/// This host's address on the way to another, from where others come too.
fn way_to(host: &str, port: u16) -> Option<IpAddr> {
    let there = (host, port).to_socket_addrs().ok()?.next()?;
    let any: SocketAddr = match there {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let probe = UdpSocket::bind(any).ok()?;
    // Connecting it sends nothing; it only chooses the way.
    probe.connect(there).ok()?;
    Some(probe.local_addr().ok()?.ip())
}

fn default_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "host".to_owned());
    format!("{}-{}", host.trim(), std::process::id())
}

/// Later lives have later epochs, so that the newer of two agents of one name is known.
fn new_epoch() -> Epoch {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    Epoch(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).expect("the operating system gives randomness");
    bytes
}
