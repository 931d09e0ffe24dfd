//! Channels of messages that meet: sends at one end, receives with the same tags at the other.
//!
//! What libraries of collectives want of a network, NCCL above all: [listen](Channels::listen) and tell somebody the address and the token,
//! [connect](Channels::connect) with them, [send](Sender::send) and [receive](Receiver::receive), and look at each until it is over. Nothing here blocks
//! but closing. The protocol is `weft_protocol::matched`; here are its handles.
//!
//! A channel is as alive as its session. A peer that is killed, or silent for longer than the setting `silence_max`, ends all that is under way on its
//! channels with an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use weft_fabric::fork::OfProcess;
use weft_plan::Time;
use weft_protocol::matched::{self as protocol, ChannelId, Place, Ticket};

use crate::agent::{Agent, leads_elsewhere, parse_addresses};
use crate::driver::{Shared, World};
use crate::memory::{Memory, after};
use crate::settings::long_enough;

pub use weft_protocol::matched::{ChannelError, EAGER_MAX, GROUP_MAX};

/// How long closing waits for what was cancelled: a write ends by its deadline, and usually at once.
const CLOSE_MAX: Duration = Duration::from_secs(60);

/// How channels carry messages.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The longest message that goes without waiting for its receive; at most [`EAGER_MAX`].
    pub eager_max: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options { eager_max: 16 << 10 }
    }
}

/// Requests that are looked at one after the other share a turn of the agent, which asks the kernel what has come.
const LOOK_EVERY: Time = Time::from_us(2);

/// The channels of an agent. Clones are the same.
#[derive(Clone, Debug)]
pub struct Channels {
    agent: Agent,
    shared: OfProcess<Arc<Shared>>,
    /// When the agent was last turned by whoever looks at a request, on its clock.
    looked: Arc<AtomicU64>,
}

/// Waits for one channel to be opened.
#[derive(Debug)]
pub struct Listener {
    channels: Channels,
    token: u128,
}

/// A channel that is being opened.
#[derive(Debug)]
pub struct Connecting {
    /// None when it is open.
    channel: Option<Channel>,
}

/// The end of a channel that sends.
#[derive(Debug)]
pub struct Sender {
    channel: Channel,
}

/// The end of a channel that receives.
#[derive(Debug)]
pub struct Receiver {
    channel: Channel,
}

/// One end. It is closed when it goes.
#[derive(Debug)]
struct Channel {
    channels: Channels,
    id: ChannelId,
}

/// One receive of a group: bytes of a memory, and the tag of the message that belongs there.
#[derive(Clone, Copy, Debug)]
pub struct Landing<'a> {
    pub memory: &'a Memory,
    pub offset: u64,
    pub len: u64,
    pub tag: i32,
}

/// A send, or a group of receives, that is under way. Its memory stays registered as long as this is there.
#[derive(Debug)]
pub struct Request {
    shared: OfProcess<Arc<Shared>>,
    looked: Arc<AtomicU64>,
    ticket: Arc<Ticket>,
    _memory: Vec<Memory>,
}

impl Channels {
    /// Has an agent carry channels; it keeps those that it has, and how they are.
    pub fn open(agent: &Agent, options: Options) -> Result<Channels, ChannelError> {
        let settings = protocol::Settings {
            eager_max: options.eager_max.min(EAGER_MAX),
            deadline: agent.settings().deadline.into(),
            checksum: agent.settings().checksum,
        };
        let shared = agent.shared().map_err(not_taken)?;
        shared.act(|world, _| {
            world.check_running().map_err(not_taken)?;
            world.channels.get_or_insert_with(|| protocol::Channels::new(settings));
            Ok(())
        })?;
        Ok(Channels {
            agent: agent.clone(),
            shared: OfProcess::new(shared.clone()),
            looked: Arc::default(),
        })
    }

    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Lets one channel be opened to here, by whoever is told the listener's token and this agent's address, and knows the secret.
    pub fn listen(&self) -> Result<Listener, ChannelError> {
        let mut token = [0; 16];
        getrandom::fill(&mut token).map_err(not_taken)?;
        let token = u128::from_le_bytes(token);
        self.act(|channels, _, _| {
            channels.listen(token);
            Ok(())
        })?;
        Ok(Listener {
            channels: self.clone(),
            token,
        })
    }

    /// Begins to open a channel to a listener, at an agent of this address.
    pub fn connect(&self, address: &str, token: u128) -> Result<Connecting, ChannelError> {
        let addresses = parse_addresses(address).map_err(not_taken)?;
        if let Some(far) = addresses.iter().find(|address| leads_elsewhere(address)) {
            // Whoever answers there is given a proof, before it has to show that it knows the secret itself.
            let secret = self.agent.settings().shared_secret().map_err(not_taken)?;
            long_enough(&secret, || format!("{far}")).map_err(not_taken)?;
        }
        let id = self.act(|channels, core, now| channels.connect(core, addresses, token, now))?;
        Ok(Connecting {
            channel: Some(Channel {
                channels: self.clone(),
                id,
            }),
        })
    }

    fn act<T>(
        &self,
        call: impl FnOnce(&mut protocol::Channels, &mut Core, Time) -> Result<T, ChannelError>,
    ) -> Result<T, ChannelError> {
        self.shared.get().map_err(not_taken)?.act(|world, now| {
            world.check_running().map_err(not_taken)?;
            let World { channels, core, .. } = world;
            call(channels.as_mut().ok_or(ChannelError::Unknown)?, core, now)
        })
    }

    fn check(&self, memory: &Memory) -> Result<(), ChannelError> {
        let shared = self.shared.get().map_err(not_taken)?;
        memory.check_owner(shared).map_err(not_taken)?;
        match memory.as_ptr().is_null() && !memory.is_empty() {
            true => Err(ChannelError::NotTaken("messages are of host memory".to_owned())),
            false => Ok(()),
        }
    }
}

type Core = weft_protocol::agent::Core<dyn weft_fabric::Live>;

impl Listener {
    /// What whoever connects has to show. It is good once.
    pub fn token(&self) -> u128 {
        self.token
    }

    /// The channel that somebody has opened, if somebody has.
    pub fn accept(&self) -> Result<Option<Receiver>, ChannelError> {
        self.channels.shared.get().map_err(not_taken)?.turn();
        let accepted = self.channels.act(|channels, _, _| Ok(channels.accept(self.token)))?;
        Ok(accepted.map(|id| Receiver {
            channel: Channel {
                channels: self.channels.clone(),
                id,
            },
        }))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let token = self.token;
        let _ = self.channels.act(|channels, core, now| {
            channels.unlisten(core, token, now);
            Ok(())
        });
    }
}

impl Connecting {
    /// The channel, once it is open; an error where it never will be.
    pub fn poll(&mut self) -> Result<Option<Sender>, ChannelError> {
        let channel = self.channel.as_ref().ok_or(ChannelError::Unknown)?;
        channel.channels.shared.get().map_err(not_taken)?.turn();
        let id = channel.id;
        let open = channel.channels.act(|channels, _, now| channels.is_open(id, now))?;
        let channel = if open { self.channel.take() } else { None };
        Ok(channel.map(|channel| Sender { channel }))
    }
}

impl Sender {
    /// Sends bytes of a memory, which must not change until the request is over.
    pub fn send(&self, memory: &Memory, offset: u64, len: u64, tag: i32) -> Result<Request, ChannelError> {
        let Channel { channels, id } = &self.channel;
        channels.check(memory)?;
        let place = Place {
            region: memory.inner.region.clone(),
            offset,
            len,
            tag,
        };
        let ticket = channels.act(|channels, core, now| channels.send(core, *id, place, now))?;
        Ok(self.channel.request(ticket, vec![memory.clone()]))
    }

    /// Closes the channel: what is under way ends with an error. After it nothing of it touches memory.
    pub fn close(self) {
        drop(self);
    }
}

impl Receiver {
    /// Receives messages as one group: the request is over when all have come.
    pub fn receive(&self, landings: &[Landing<'_>]) -> Result<Request, ChannelError> {
        let Channel { channels, id } = &self.channel;
        let mut places = Vec::with_capacity(landings.len());
        let mut memory = Vec::with_capacity(landings.len());
        for landing in landings {
            channels.check(landing.memory)?;
            places.push(Place {
                region: landing.memory.inner.region.clone(),
                offset: landing.offset,
                len: landing.len,
                tag: landing.tag,
            });
            memory.push(landing.memory.clone());
        }
        let ticket = channels.act(|channels, core, now| channels.receive(core, *id, places, now))?;
        Ok(self.channel.request(ticket, memory))
    }

    /// Closes the channel. A peer may still be writing to what it was told to write to: [`Memory::release`] tells when it is not.
    pub fn close(self) {
        drop(self);
    }
}

impl Channel {
    fn request(&self, ticket: Arc<Ticket>, memory: Vec<Memory>) -> Request {
        Request {
            shared: self.channels.shared.clone(),
            looked: self.channels.looked.clone(),
            ticket,
            _memory: memory,
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let id = self.id;
        // A forked child closes nothing, and of an agent that is closed there is nothing left to close.
        let Ok(false) = self
            .channels
            .act(|channels, core, now| Ok(channels.close(core, id, now)))
        else {
            return;
        };
        let Ok(shared) = self.channels.shared.get() else { return };
        shared.wait_until(after(shared, CLOSE_MAX), |world| match &mut world.channels {
            Some(channels) => channels.is_out(id).then_some(()),
            None => Some(()),
        });
    }
}

impl Request {
    /// How long each message was, once all have come or gone.
    pub fn poll(&self) -> Option<Result<&[u64], ChannelError>> {
        if self.ticket.outcome().is_none() {
            match self.shared.get() {
                Ok(shared) if shared.is_stopped() => return Some(Err(ChannelError::ClosedHere)),
                Ok(shared) => self.look(shared),
                Err(forked) => return Some(Err(not_taken(forked))),
            }
        }
        let outcome = self.ticket.outcome()?;
        Some(outcome.map_err(Clone::clone))
    }

    fn look(&self, shared: &Shared) {
        let looked = Time::from_ns(self.looked.load(Ordering::Relaxed));
        if shared.clock.now() >= looked.saturating_add(LOOK_EVERY) {
            shared.turn();
            self.looked.store(shared.clock.now().as_ns(), Ordering::Relaxed);
        }
    }

    /// The same, waiting for it.
    pub fn wait(&self, timeout: Duration) -> Option<Result<&[u64], ChannelError>> {
        if let Ok(shared) = self.shared.get() {
            shared.wait_until(after(shared, timeout), |_| self.ticket.outcome().map(|_| ()));
        }
        self.poll()
    }
}

fn not_taken(error: impl ToString) -> ChannelError {
    ChannelError::NotTaken(error.to_string())
}
