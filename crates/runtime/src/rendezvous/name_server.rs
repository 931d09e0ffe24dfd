//! Agents that were started together: rank 0 keeps the names and the others ask it.
//!
//! A registration is a connection that stays open, so the kernel itself reports a holder's death; a heartbeat on it finds
//! hosts that vanished without a word. Both sides prove that they know the secret before anything else is said, the member first, as in the
//! handshake of a session: whoever only connects gets nothing to try guesses against.

mod frame;

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weft_fabric::fork::NotInherited;
use weft_protocol::session::{PROOF_BYTES, Role, Secret, Transcript, same_proof};

use super::entry::{ENTRIES_MAX, Entry};
use super::{Held, RendezvousError, RendezvousOptions, World};
use crate::interrupt;
use crate::settings::long_enough;

pub(crate) use frame::check as check_frames;

use frame::{ABSENT, BEAT, Request, TAKEN, Wish, YES, read_frame, write_frame};

const MAGIC: &[u8; 8] = b"weftname";
const CHALLENGE_BYTES: usize = 32;
const CONNECTIONS_MAX: usize = 1 << 15;
/// A stranger may keep a thread this long, however slowly it talks.
const GREETING_TIME_MAX: Duration = Duration::from_secs(5);
/// Strangers that may be greeted at a time. One more, and the one that has had the longest time for it goes.
const GREETINGS_MAX: usize = 64;
/// How long members wait for rank 0 to start.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(60);
const CONNECT_PAUSE: Duration = Duration::from_millis(50);
/// How often a member lets itself be hung up on before it believes that its secret is wrong.
const ATTEMPTS_MAX: u32 = 4;
/// Threads that only move small frames need little stack.
const STACK_BYTES: usize = 128 * 1024;

/// The names of one job, kept by its rank 0.
#[derive(Debug)]
pub(super) struct Names {
    address: String,
    secret: Secret,
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
        let near = address.starts_with("localhost:")
            || world
                .master
                .parse::<IpAddr>()
                .is_ok_and(|master| master.to_canonical().is_loopback());
        if !near {
            long_enough(secret, || format!("the name server at {address}"))?;
        }
        let server = match world.rank {
            0 => Server::start(&address, secret, options.lease)?,
            _ => None,
        };
        Ok(Names {
            address,
            secret: Secret::new(secret),
            options,
            _server: server,
        })
    }

    pub(super) fn register(&self, entry: &Entry) -> Result<NameHold, RendezvousError> {
        let mut stream = self.connect(CONNECT_TIME_MAX)?;
        match self.ask(&mut stream, Wish::Register(entry.clone()), GREETING_TIME_MAX)? {
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
        let wait = end.map_or(timeout, |end| end.saturating_duration_since(Instant::now()));
        let wish = Wish::Lookup { name, wait };
        match self.ask(&mut stream, wish, wait.saturating_add(GREETING_TIME_MAX))? {
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
        let mut answer = self.ask(&mut stream, Wish::List, GREETING_TIME_MAX)?;
        let mut entries = Vec::new();
        while answer.0 == YES && entries.len() <= ENTRIES_MAX {
            entries.push(Entry::from_bytes(&answer.1).ok_or_else(|| self.stranger())?);
            answer = read_frame(&mut stream).map_err(self.unreachable())?;
        }
        Ok(entries)
    }

    fn connect(&self, patience: Duration) -> Result<TcpStream, RendezvousError> {
        let end = Instant::now() + patience;
        let mut attempts = 1;
        loop {
            match self.try_connect() {
                Ok(stream) => match self.greet(stream) {
                    // It hangs up on who fails its challenge, and also on one of too many strangers: the next attempt tells which.
                    Err(RendezvousError::WrongSecret { .. }) if attempts < ATTEMPTS_MAX && Instant::now() < end => {
                        attempts += 1;
                        std::thread::sleep(CONNECT_PAUSE);
                    }
                    greeted => return greeted,
                },
                Err(error) if Instant::now() >= end => return Err(self.unreachable()(error)),
                Err(_) if interrupt::is_due() => return Err(RendezvousError::Interrupted),
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
        match come(&mut stream, &self.secret) {
            Ok(true) => Ok(stream),
            Ok(false) => Err(RendezvousError::WrongSecret {
                address: self.address.clone(),
            }),
            // The other side hangs up on whoever fails its challenge.
            Err(error) if is_hung_up(&error) => Err(RendezvousError::WrongSecret {
                address: self.address.clone(),
            }),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(self.stranger()),
            Err(error) => Err(self.unreachable()(error)),
        }
    }

    fn ask(
        &self,
        stream: &mut TcpStream,
        wish: Wish<'_>,
        patience: Duration,
    ) -> Result<(u8, Vec<u8>), RendezvousError> {
        let (kind, body) = Request::new(&self.options.job, wish).encode();
        write_frame(stream, kind, &body).map_err(self.unreachable())?;
        let end = Instant::now().checked_add(patience);
        if interrupt::is_watched() {
            wait_for_bytes(stream, end).map_err(self.unreachable())?;
            if interrupt::has_happened() {
                return Err(RendezvousError::Interrupted);
            }
        }
        let left = end.map_or(patience, |end| end.saturating_duration_since(Instant::now()));
        stream
            .set_read_timeout(Some(left.max(Duration::from_millis(1))))
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

/// Waits until something has come, or it is too late, or the caller is wanted elsewhere. Takes nothing.
fn wait_for_bytes(stream: &TcpStream, end: Option<Instant>) -> io::Result<()> {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    stream.set_read_timeout(Some(interrupt::ASK_EVERY))?;
    loop {
        match stream.peek(&mut [0]) {
            Err(error) if matches!(error.kind(), WouldBlock | TimedOut | Interrupted) => {}
            come => return come.map(drop),
        }
        if interrupt::is_due() || end.is_some_and(|end| Instant::now() >= end) {
            return Ok(());
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
    secret: Secret,
    lease: Duration,
    stopping: AtomicBool,
    connections: AtomicUsize,
    /// Those that have not proved themselves, oldest first.
    strangers: Mutex<VecDeque<Arc<Stream>>>,
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
            secret: Secret::new(secret),
            lease,
            stopping: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            strangers: Mutex::new(VecDeque::new()),
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
        loop {
            let stream = NotInherited::open(|| listener.accept().map(|(stream, _)| stream));
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
            let stream = Arc::new(stream);
            self.let_in(&stream);
            let serving = Arc::clone(self);
            let serve = move || {
                // A member that fails has only itself to blame.
                let _ = serving.serve(&stream);
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

    /// One more that has to prove itself. The oldest of too many is cut off, and its thread ends.
    fn let_in(&self, stream: &Arc<Stream>) {
        let mut strangers = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        strangers.push_back(Arc::clone(stream));
        if strangers.len() <= GREETINGS_MAX {
            return;
        }
        // A crowd from one address pushes out itself.
        let nowhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let address = |stream: &Arc<Stream>| stream.peer_addr().map_or(nowhere, |peer| peer.ip());
        let oldest = weft_fabric::crowd::who_goes(strangers.iter().map(address));
        if let Some(oldest) = oldest.and_then(|at| strangers.remove(at)) {
            let _ = oldest.shutdown(Shutdown::Both);
        }
    }

    fn serve(&self, stream: &Arc<Stream>) -> io::Result<()> {
        let known = receive(stream, &self.secret);
        let mut strangers = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        strangers.retain(|stranger| !Arc::ptr_eq(stranger, stream));
        drop(strangers);
        if !known? {
            return Ok(());
        }
        let mut stream: &TcpStream = stream;
        stream.set_read_timeout(Some(GREETING_TIME_MAX))?;
        let (kind, body) = read_frame(&mut stream)?;
        let Request { job, wish } = Request::decode(kind, &body).ok_or(io::ErrorKind::InvalidData)?;
        match wish {
            Wish::Register(entry) => self.serve_holder(stream, job, entry),
            Wish::Lookup { name, wait } => match self.wait_for(&(job.to_vec(), name.to_owned()), wait) {
                Some(entry) => write_frame(&mut stream, YES, &entry.to_bytes()),
                None => write_frame(&mut stream, ABSENT, &[]),
            },
            Wish::List => {
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
        }
    }

    /// Keeps an entry for as long as its holder's connection lives and beats.
    fn serve_holder(&self, mut stream: &TcpStream, job: &[u8], entry: Entry) -> io::Result<()> {
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

/// A connection that a forked child of the server does not keep open.
type Stream = NotInherited<TcpStream>;

/// Whether the other end has ended a conversation without a word.
fn is_hung_up(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

/// The member's side of the proof: it proves itself, and then sees whether the server does.
fn come(stream: &mut TcpStream, secret: &Secret) -> io::Result<bool> {
    let mut greeting = Greeting::on(stream)?;
    let hello = opening()?;
    greeting.stream.write_all(&hello)?;
    let challenge = greeting.opening()?;
    let transcript = Transcript::new(secret, &hello, &challenge);
    greeting.stream.write_all(&transcript.proof())?;
    let answer = greeting.read::<PROOF_BYTES>()?;
    greeting.stream.set_read_timeout(Some(GREETING_TIME_MAX))?;
    Ok(same_proof(&answer, &transcript.code(Role::Acceptor, &[])))
}

/// The server's side: it says nothing that depends on the secret before the member has proved itself.
fn receive(stream: &TcpStream, secret: &Secret) -> io::Result<bool> {
    let mut greeting = Greeting::on(stream)?;
    let hello = greeting.opening()?;
    let challenge = opening()?;
    greeting.stream.write_all(&challenge)?;
    let transcript = Transcript::new(secret, &hello, &challenge);
    let proof = greeting.read::<PROOF_BYTES>()?;
    let known = same_proof(&proof, &transcript.proof());
    if known {
        greeting.stream.write_all(&transcript.code(Role::Acceptor, &[]))?;
    }
    Ok(known)
}

const OPENING_BYTES: usize = MAGIC.len() + CHALLENGE_BYTES;

/// What both sides begin with: a number that nobody has used before.
fn opening() -> io::Result<[u8; OPENING_BYTES]> {
    let mut opening = [0; OPENING_BYTES];
    opening[..MAGIC.len()].copy_from_slice(MAGIC);
    getrandom::fill(&mut opening[MAGIC.len()..]).map_err(io::Error::other)?;
    Ok(opening)
}

/// A connection with somebody who is not known yet, and the time that is left for it.
struct Greeting<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl<'a> Greeting<'a> {
    fn on(stream: &'a TcpStream) -> io::Result<Greeting<'a>> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(GREETING_TIME_MAX))?;
        Ok(Greeting {
            stream,
            until: Instant::now() + GREETING_TIME_MAX,
        })
    }

    /// Exactly so many bytes, in the time that is left for all of them.
    fn read<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        let mut got = 0;
        while got < N {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut bytes[got..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => got += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(bytes)
    }

    fn opening(&mut self) -> io::Result<[u8; OPENING_BYTES]> {
        let opening = self.read::<OPENING_BYTES>()?;
        if opening[..MAGIC.len()] != *MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(opening)
    }
}
