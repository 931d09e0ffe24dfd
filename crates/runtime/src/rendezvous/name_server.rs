//! Agents that were started together: rank 0 keeps the names and the others ask it.
//!
//! A registration is a connection that stays open, so the kernel itself reports a holder's death; a heartbeat on it finds
//! hosts that vanished without a word. Both sides prove that they know the secret before anything else is said: each sends a
//! challenge and answers the other's.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use weft_fabric::fork::NotInherited;

use super::entry::{ENTRIES_MAX, ENTRY_BYTES_MAX, Entry};
use super::{Held, RendezvousError, RendezvousOptions, World};

const MAGIC: &[u8; 8] = b"weftname";
const CHALLENGE_BYTES: usize = 32;
/// The job and the longest name, or an entry, with room to spare.
const FRAME_BYTES_MAX: usize = ENTRY_BYTES_MAX + 1024;
const CONNECTIONS_MAX: usize = 1 << 15;
/// A stranger may keep a thread this long.
const GREETING_TIME_MAX: Duration = Duration::from_secs(5);
/// How long members wait for rank 0 to start.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(60);
const CONNECT_PAUSE: Duration = Duration::from_millis(50);
/// Threads that only move small frames need little stack.
const STACK_BYTES: usize = 128 * 1024;

const REGISTER: u8 = 1;
const LOOKUP: u8 = 2;
const LIST: u8 = 3;
const BEAT: u8 = 4;
const YES: u8 = 5;
const TAKEN: u8 = 6;
const ABSENT: u8 = 7;

/// The names of one job, kept by its rank 0.
#[derive(Debug)]
pub(super) struct Names {
    address: String,
    secret: Vec<u8>,
    options: RendezvousOptions,
    /// Only at rank 0.
    _server: Option<Server>,
}

#[derive(Debug)]
pub(super) struct NameHold {
    stream: NotInherited<TcpStream>,
    stop: Option<Sender<()>>,
    heart: Option<JoinHandle<()>>,
}

impl Held for NameHold {}

impl Names {
    pub(super) fn join(
        world: &World,
        port_offset: u16,
        secret: &[u8],
        options: RendezvousOptions,
    ) -> Result<Names, RendezvousError> {
        let port = world
            .master_port
            .checked_add(port_offset)
            .ok_or_else(|| RendezvousError::BadVariable {
                name: "MASTER_PORT",
                value: world.master_port.to_string(),
            })?;
        let address = match world.master.parse::<Ipv6Addr>() {
            Ok(master) => format!("[{master}]:{port}"),
            Err(_) => format!("{}:{port}", world.master),
        };
        let server = match world.rank {
            0 => Server::start(&address, secret, options.lease)?,
            _ => None,
        };
        Ok(Names {
            address,
            secret: secret.to_owned(),
            options,
            _server: server,
        })
    }

    pub(super) fn register(&self, entry: &Entry) -> Result<NameHold, RendezvousError> {
        let mut stream = self.connect(CONNECT_TIME_MAX)?;
        let mut body = self.scope();
        body.extend_from_slice(&entry.to_bytes());
        match self.ask(&mut stream, REGISTER, &body, GREETING_TIME_MAX)? {
            (YES, _) => {}
            (TAKEN, holder) => {
                let holder = Entry::from_bytes(&holder).ok_or_else(|| self.stranger())?;
                return Err(RendezvousError::NameTaken {
                    name: entry.name.clone(),
                    holder: holder.address,
                });
            }
            _ => return Err(self.stranger()),
        }
        let (stop, stopped) = channel::<()>();
        let interval = self.options.lease / 3;
        let stream = NotInherited::new(stream);
        let beating = NotInherited::open(|| stream.try_clone()).map_err(self.unreachable())?;
        let beat = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(interval) {
                if write_frame(&mut &*beating, BEAT, &[]).is_err() {
                    return;
                }
            }
        };
        let heart = std::thread::Builder::new()
            .name("weft-entry".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(beat);
        Ok(NameHold {
            stream,
            stop: Some(stop),
            heart: Some(heart.map_err(RendezvousError::Thread)?),
        })
    }

    pub(super) fn lookup(&self, name: &str, timeout: Duration) -> Result<Option<Entry>, RendezvousError> {
        let end = Instant::now().checked_add(timeout);
        let mut stream = match self.connect(timeout.min(CONNECT_TIME_MAX)) {
            // Nobody keeps names yet, so nobody has this one.
            Err(RendezvousError::NameServer { .. }) if !timeout.is_zero() => return Ok(None),
            connected => connected?,
        };
        let left = end.map_or(timeout, |end| end.saturating_duration_since(Instant::now()));
        let mut body = self.scope();
        body.extend_from_slice(&u64::try_from(left.as_millis()).unwrap_or(u64::MAX).to_le_bytes());
        body.extend_from_slice(name.as_bytes());
        match self.ask(&mut stream, LOOKUP, &body, left.saturating_add(GREETING_TIME_MAX))? {
            (YES, entry) => {
                let entry = Entry::from_bytes(&entry).filter(|entry| entry.name == name);
                entry.map(Some).ok_or_else(|| self.stranger())
            }
            (ABSENT, _) => Ok(None),
            _ => Err(self.stranger()),
        }
    }

    pub(super) fn list(&self) -> Result<Vec<Entry>, RendezvousError> {
        let mut stream = self.connect(GREETING_TIME_MAX)?;
        let mut answer = self.ask(&mut stream, LIST, &self.scope(), GREETING_TIME_MAX)?;
        let mut entries = Vec::new();
        while answer.0 == YES && entries.len() <= ENTRIES_MAX {
            entries.push(Entry::from_bytes(&answer.1).ok_or_else(|| self.stranger())?);
            answer = read_frame(&mut stream).map_err(self.unreachable())?;
        }
        Ok(entries)
    }

    /// The job, length first, at the beginning of every request.
    fn scope(&self) -> Vec<u8> {
        let job = self.options.job.as_bytes();
        let job = &job[..job.len().min(u8::MAX.into())];
        let mut scope = vec![job.len() as u8];
        scope.extend_from_slice(job);
        scope
    }

    fn connect(&self, patience: Duration) -> Result<TcpStream, RendezvousError> {
        let end = Instant::now() + patience;
        loop {
            match self.try_connect() {
                Ok(stream) => return self.greet(stream),
                Err(error) if Instant::now() >= end => return Err(self.unreachable()(error)),
                // Rank 0 may not have started yet.
                Err(_) => std::thread::sleep(CONNECT_PAUSE),
            }
        }
    }

    fn try_connect(&self) -> io::Result<TcpStream> {
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in self.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, GREETING_TIME_MAX) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn greet(&self, mut stream: TcpStream) -> Result<TcpStream, RendezvousError> {
        match prove(&mut stream, &self.secret, Side::Member) {
            Ok(true) => Ok(stream),
            Ok(false) => Err(RendezvousError::WrongSecret {
                address: self.address.clone(),
            }),
            // The other side hangs up on whoever fails its challenge.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(RendezvousError::WrongSecret {
                address: self.address.clone(),
            }),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(self.stranger()),
            Err(error) => Err(self.unreachable()(error)),
        }
    }

    fn ask(
        &self,
        stream: &mut TcpStream,
        kind: u8,
        body: &[u8],
        patience: Duration,
    ) -> Result<(u8, Vec<u8>), RendezvousError> {
        stream.set_read_timeout(Some(patience)).map_err(self.unreachable())?;
        write_frame(stream, kind, body)
            .and_then(|()| read_frame(stream))
            .map_err(self.unreachable())
    }

    fn stranger(&self) -> RendezvousError {
        RendezvousError::NotNameServer {
            address: self.address.clone(),
        }
    }

    fn unreachable(&self) -> impl Fn(io::Error) -> RendezvousError + '_ {
        |source| RendezvousError::NameServer {
            address: self.address.clone(),
            source,
        }
    }
}

impl Drop for NameHold {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(heart) = self.heart.take() {
            let _ = heart.join();
        }
    }
}

#[derive(Debug)]
struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    names: Mutex<BTreeMap<(Vec<u8>, String), Entry>>,
    taken: Condvar,
    secret: Vec<u8>,
    lease: Duration,
    stopping: AtomicBool,
    connections: AtomicUsize,
}

impl Server {
    /// Nothing, where another agent of this process or of this rank serves already.
    fn start(address: &str, secret: &[u8], lease: Duration) -> Result<Option<Server>, RendezvousError> {
        let failed = |source| RendezvousError::NameServer {
            address: address.to_owned(),
            source,
        };
        let resolved = address.to_socket_addrs().map_err(failed)?.next();
        let resolved = resolved.ok_or_else(|| failed(io::ErrorKind::AddrNotAvailable.into()))?;
        // Hosts often resolve their own name to loopback, where the others could not reach us; only who asked for loopback
        // by number gets it.
        let wanted_loopback =
            address.starts_with("127.") || address.starts_with("[::1]") || address.starts_with("localhost:");
        let bind = match resolved {
            any if wanted_loopback => any,
            SocketAddr::V4(v4) => (Ipv4Addr::UNSPECIFIED, v4.port()).into(),
            SocketAddr::V6(v6) => (Ipv6Addr::UNSPECIFIED, v6.port()).into(),
        };
        let listener = match NotInherited::open(|| TcpListener::bind(bind)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Ok(None),
            bound => bound.map_err(failed)?,
        };
        let shared = Arc::new(Shared {
            names: Mutex::new(BTreeMap::new()),
            taken: Condvar::new(),
            secret: secret.to_owned(),
            lease,
            stopping: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
        });
        let serving = Arc::clone(&shared);
        let accept = move || serving.accept(&listener);
        let thread = std::thread::Builder::new().name("weft-names".to_owned()).spawn(accept);
        Ok(Some(Server {
            address: resolved,
            shared,
            thread: Some(thread.map_err(RendezvousError::Thread)?),
        }))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.taken.notify_all();
        // A connection ends the wait for one.
        if TcpStream::connect_timeout(&self.address, GREETING_TIME_MAX).is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming() {
            if self.stopping.load(Ordering::Acquire) {
                return;
            }
            let Ok(stream) = stream else {
                // Out of descriptors, most likely: wait for some to come free instead of spinning.
                std::thread::sleep(CONNECT_PAUSE);
                continue;
            };
            if self.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
                self.connections.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let serving = Arc::clone(self);
            let serve = move || {
                // A member that fails has only itself to blame.
                let _ = serving.serve(stream);
                serving.connections.fetch_sub(1, Ordering::Relaxed);
            };
            if std::thread::Builder::new()
                .stack_size(STACK_BYTES)
                .spawn(serve)
                .is_err()
            {
                self.connections.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn serve(&self, mut stream: TcpStream) -> io::Result<()> {
        if !prove(&mut stream, &self.secret, Side::Server)? {
            return Ok(());
        }
        let (kind, body) = read_frame(&mut stream)?;
        let (job, rest) = split_scope(&body).ok_or(io::ErrorKind::InvalidData)?;
        match kind {
            REGISTER => self.serve_holder(stream, job, rest),
            LOOKUP => {
                let (wait, name) = rest.split_first_chunk::<8>().ok_or(io::ErrorKind::InvalidData)?;
                let name = std::str::from_utf8(name).map_err(|_| io::ErrorKind::InvalidData)?;
                let wait = Duration::from_millis(u64::from_le_bytes(*wait));
                match self.wait_for(&(job.to_vec(), name.to_owned()), wait) {
                    Some(entry) => write_frame(&mut stream, YES, &entry.to_bytes()),
                    None => write_frame(&mut stream, ABSENT, &[]),
                }
            }
            LIST => {
                let entries: Vec<_> = self
                    .lock()
                    .iter()
                    .filter(|(key, _)| key.0 == job)
                    .map(|(_, entry)| entry.clone())
                    .collect();
                for entry in entries {
                    write_frame(&mut stream, YES, &entry.to_bytes())?;
                }
                write_frame(&mut stream, ABSENT, &[])
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Keeps an entry for as long as its holder's connection lives and beats.
    fn serve_holder(&self, mut stream: TcpStream, job: &[u8], bytes: &[u8]) -> io::Result<()> {
        let entry = Entry::from_bytes(bytes).ok_or(io::ErrorKind::InvalidData)?;
        let key = (job.to_vec(), entry.name.clone());
        let refused = {
            let mut names = self.lock();
            match names.get(&key) {
                Some(holder) => Some(holder.to_bytes()),
                None if names.len() >= ENTRIES_MAX => return Err(io::ErrorKind::OutOfMemory.into()),
                None => {
                    names.insert(key.clone(), entry);
                    None
                }
            }
        };
        if let Some(holder) = refused {
            return write_frame(&mut stream, TAKEN, &holder);
        }
        self.taken.notify_all();
        let outcome = write_frame(&mut stream, YES, &[]).and_then(|()| {
            stream.set_read_timeout(Some(self.lease))?;
            while read_frame(&mut stream)?.0 == BEAT {}
            Ok(())
        });
        self.lock().remove(&key);
        outcome
    }

    fn wait_for(&self, key: &(Vec<u8>, String), timeout: Duration) -> Option<Entry> {
        let start = Instant::now();
        let mut names = self.lock();
        while !self.stopping.load(Ordering::Acquire) {
            if let Some(entry) = names.get(key) {
                return Some(entry.clone());
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return None;
            }
            names = self
                .taken
                .wait_timeout(names, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        None
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(Vec<u8>, String), Entry>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Member,
    Server,
}

/// Proves to the other side that we know the secret and checks that it does.
fn prove(stream: &mut TcpStream, secret: &[u8], side: Side) -> io::Result<bool> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING_TIME_MAX))?;
    stream.set_write_timeout(Some(GREETING_TIME_MAX))?;
    let mut hello = [0; MAGIC.len() + CHALLENGE_BYTES];
    hello[..MAGIC.len()].copy_from_slice(MAGIC);
    getrandom::fill(&mut hello[MAGIC.len()..]).map_err(io::Error::other)?;
    stream.write_all(&hello)?;
    let mut theirs = [0; MAGIC.len() + CHALLENGE_BYTES];
    stream.read_exact(&mut theirs)?;
    if theirs[..MAGIC.len()] != *MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let (member, server) = match side {
        Side::Member => (&hello, &theirs),
        Side::Server => (&theirs, &hello),
    };
    let ours = signature(secret, side, member, server);
    stream.write_all(&ours.finalize().into_bytes())?;
    let mut answer = [0; 32];
    stream.read_exact(&mut answer)?;
    let other = if side == Side::Member {
        Side::Server
    } else {
        Side::Member
    };
    Ok(signature(secret, other, member, server).verify_slice(&answer).is_ok())
}

fn signature(secret: &[u8], side: Side, member: &[u8], server: &[u8]) -> Hmac<Sha256> {
    // The side is part of what is signed, so that a proof cannot be sent back as one's own.
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes every key");
    mac.update(if side == Side::Member { b"member" } else { b"server" });
    mac.update(member);
    mac.update(server);
    mac
}

fn split_scope(body: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = body.split_first()?;
    rest.split_at_checked((*length).into())
}

fn write_frame(stream: &mut impl Write, kind: u8, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut frame = Vec::with_capacity(5 + body.len());
    frame.push(kind);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(body);
    stream.write_all(&frame)
}

fn read_frame(stream: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u32::from_le_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok((kind, body))
}
