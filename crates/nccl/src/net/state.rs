//! The one agent of a process, and what NCCL has registered with it.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use weft::matched::{self, Channels, Connecting, Sender};
use weft::{Agent, HostMemory, Memory};

use super::handle::Handle;
use crate::abi::NcclResult;
use crate::boundary::Failed;
use crate::options::Options;

/// How long deregistering waits for a peer that is inside the memory.
const RELEASE_MAX: Duration = Duration::from_secs(30);

/// What all communicators of a process share.
#[derive(Debug)]
pub struct State {
    options: Options,
    channels: Channels,
    /// Channels that are being opened, by the attempt that their handle names.
    connecting: Mutex<HashMap<u64, Connecting>>,
    /// Memory by address and length, and how often NCCL has registered it.
    registered: Mutex<HashMap<(usize, usize), (Memory, usize)>>,
    /// For messages without bytes, which come without a registration.
    nothing: Memory,
}

/// One of NCCL's registrations.
#[derive(Debug)]
pub struct Registration {
    state: Arc<State>,
    memory: Memory,
    address: usize,
    len: usize,
}

impl State {
    /// The one of this process, started by the first communicator and closed with the last.
    pub fn shared() -> Result<Arc<State>, Failed> {
        static SHARED: Mutex<Weak<State>> = Mutex::new(Weak::new());
        let mut shared = hold(&SHARED);
        if let Some(state) = shared.upgrade() {
            return Ok(state);
        }
        let state = Arc::new(State::start()?);
        *shared = Arc::downgrade(&state);
        Ok(state)
    }

    fn start() -> Result<State, Failed> {
        static LIVES: AtomicU64 = AtomicU64::new(0);
        let life = LIVES.fetch_add(1, Ordering::Relaxed);
        let options = Options::of_process()?;
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let name = format!("nccl-{}-{}-{life}", host.trim(), std::process::id());
        let mut builder = Agent::builder(&name);
        // Whoever gives a job a secret means it to reach other hosts; without one, all of it stays on this.
        let secret = ["WEFT_SECRET", "WEFT_SECRET_FILE"];
        if secret.iter().any(|variable| std::env::var_os(variable).is_some())
            && let Some(own) = way_out()
        {
            builder = builder.unless_set("listen", SocketAddr::new(own, 0));
        }
        let agent = builder.start()?;
        let eager_max = options.eager_bytes;
        Ok(State {
            options,
            channels: Channels::open(&agent, matched::Options { eager_max })?,
            connecting: Mutex::default(),
            registered: Mutex::default(),
            nothing: agent.allocate(8)?,
        })
    }

    pub fn agent(&self) -> &Agent {
        self.channels.agent()
    }
    pub fn channels(&self) -> &Channels {
        &self.channels
    }
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Goes on with opening the channel to where a handle leads.
    pub fn connect(&self, handle: &mut Handle) -> Result<Option<Sender>, Failed> {
        static ATTEMPTS: AtomicU64 = AtomicU64::new(0);
        let (address, token) = handle.read()?;
        let mut connecting = hold(&self.connecting);
        let mut attempt = match connecting.remove(&handle.attempt) {
            Some(attempt) => attempt,
            None => self.channels.connect(address, token)?,
        };
        if let Some(sender) = attempt.poll()? {
            handle.attempt = 0;
            return Ok(Some(sender));
        }
        if handle.attempt == 0 {
            handle.attempt = ATTEMPTS.fetch_add(1, Ordering::Relaxed) + 1;
        }
        connecting.insert(handle.attempt, attempt);
        Ok(None)
    }

    /// # Safety
    /// The memory is there until its registration has ended.
    pub unsafe fn register(self: &Arc<State>, data: *mut u8, len: usize) -> Result<Registration, Failed> {
        if data.is_null() || (data as usize).checked_add(len).is_none() {
            return Err(Failed::argument(format!("{len} bytes at {data:?} are no memory")));
        }
        let address = data as usize;
        let mut registered = hold(&self.registered);
        let memory = match registered.get_mut(&(address, len)) {
            Some((memory, count)) => {
                *count += 1;
                memory.clone()
            }
            None => {
                // SAFETY: the caller keeps the memory until the last registration has ended, which waits until nobody is inside.
                let host = unsafe { HostMemory::from_raw(data, len, Box::new(())) };
                let memory = self.agent().register(host)?;
                registered.insert((address, len), (memory.clone(), 1));
                memory
            }
        };
        Ok(Registration {
            state: self.clone(),
            memory,
            address,
            len,
        })
    }

    /// Where bytes that NCCL names lie in what it has registered.
    pub fn place(
        &self,
        registration: Option<&Registration>,
        address: usize,
        len: usize,
    ) -> Result<(Memory, u64), Failed> {
        let Some(registration) = registration else {
            return match len {
                0 => Ok((self.nothing.clone(), 0)),
                _ => Err(Failed::argument(format!("{len} bytes without a registration"))),
            };
        };
        let offset = address.checked_sub(registration.address);
        let end = offset.and_then(|offset| offset.checked_add(len));
        match (offset, end) {
            (Some(offset), Some(end)) if end <= registration.len => Ok((registration.memory.clone(), offset as u64)),
            _ if len == 0 => Ok((self.nothing.clone(), 0)),
            _ => Err(Failed::argument(format!(
                "{len} bytes lie outside of their registration"
            ))),
        }
    }
}

impl Registration {
    /// After it nobody touches the memory, unless somebody else has registered it too.
    pub fn end(self) -> Result<(), Failed> {
        let Registration {
            state,
            memory,
            address,
            len,
        } = self;
        let mut registered = hold(&state.registered);
        let last = match registered.get_mut(&(address, len)) {
            Some((_, count)) => {
                *count -= 1;
                *count == 0
            }
            None => false,
        };
        if !last {
            return Ok(());
        }
        registered.remove(&(address, len));
        drop(registered);
        let released = memory.release(RELEASE_MAX);
        released.map_err(|error| Failed::new(NcclResult::REMOTE_ERROR, error.to_string()))
    }
}

/// This host's address on the way to others. Nothing is sent to find it: connecting a datagram socket only chooses the way.
fn way_out() -> Option<IpAddr> {
    let probe = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // An address that is kept for documentation, and is nobody's.
    probe.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    Some(probe.local_addr().ok()?.ip())
}

fn hold<T>(held: &Mutex<T>) -> MutexGuard<'_, T> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}
