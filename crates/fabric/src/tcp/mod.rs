//! The TCP transport: registered memory between hosts that have nothing but a network in common.
//!
//! Payloads go straight between the socket and registered memory on both sides, thousands of spans to a system call. [`Tcp`]
//! never blocks and has no thread: whoever posts and polls drives it, and an epoll descriptor says when there is something
//! to do. A path is a few connections that live and die together; the first one carries messages and small moves, so that
//! nothing large is in their way. With [`TlsOptions`] everything is encrypted, at the price of a bounded buffer on each side.
//!
//! ```
//! use weft_fabric::Clock;
//! use weft_fabric::tcp::{Tcp, TcpOptions};
//! use weft_protocol::{Epoch, Transport};
//! let tcp = Tcp::start(TcpOptions::default(), Epoch(1), Clock::start())?;
//! assert!(tcp.capabilities().address.0.starts_with("tcp:127.0.0.1:"));
//! # Ok::<(), weft_fabric::tcp::TcpError>(())
//! ```

mod connection;
mod door;
pub mod frame;
mod gather;
mod inbound;
mod ops;
mod options;
mod outbound;
mod path;
mod socket;
mod stream;
mod tls;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use weft_plan::Time;
use weft_protocol::{
    Capabilities, Carriage, Epoch, Grant, Loss, Op, OpId, PathId, PeerAddress, Progress, Refusal, Region, RegionKey,
    RegionTable, Signal, Transport,
};

use crate::{Clock, Live};
use connection::{Connection, Gone, Join};
use door::{Door, Knock, Stranger};
use frame::Frame;
use path::{Path, World};
use socket::{Epoll, Socket, Vectors};
use stream::Stream;
use tls::TlsConfig;

pub use options::{TcpError, TcpOptions};
pub use tls::TlsOptions;

/// Moves and messages that a path holds at a time.
const INFLIGHT_OPS_MAX: usize = 256;
/// Strangers that are listened to in a turn.
const STRANGERS_PER_TURN: usize = 16;
/// System calls that a connection may send with before others get their turn.
const SENDS_PER_TURN: u32 = 4;
/// Polls of one who spins that look only at the connection which was busy last, for each one that looks at all of them.
const HOT_POLLS: u32 = 16;
/// Who polls again within this time is spinning; who comes back later was woken, by any of the connections.
const SPIN_MAX: Time = Time::from_us(5);

const LISTENER: u64 = u64::MAX;
const STRANGER: u64 = 1 << 63;

/// A TCP endpoint: one listener, and the paths from and to it.
#[derive(Debug)]
pub struct Tcp {
    options: TcpOptions,
    capabilities: Capabilities,
    clock: Clock,
    tls: Option<TlsConfig>,
    regions: RegionTable,
    epoll: Epoll,
    door: Door,
    paths: BTreeMap<PathId, Path>,
    /// What happened outside of [`Transport::poll`].
    ready: Vec<Signal>,
    /// No deadline is earlier than this.
    earliest: Time,
    hot: Option<(PathId, usize)>,
    /// A post has left bytes for whoever polls.
    posted: bool,
    polls: u32,
    polled: Time,
    numbered_paths: u32,
    vectors: Vectors,
    happened: Vec<u64>,
    /// Connections that have been heard in part, and make no socket readable.
    unheard: Vec<(PathId, usize)>,
}

impl Tcp {
    pub fn start(options: TcpOptions, epoch: Epoch, clock: Clock) -> Result<Tcp, TcpError> {
        if !(1..=frame::CONNECTIONS_MAX).contains(&options.connections) {
            return Err(TcpError::Connections(options.connections));
        }
        let system = |what| move |source| TcpError::System { what, source };
        let tls = options.tls.as_ref().map(TlsConfig::new).transpose()?;
        let (listener, bound) = socket::listen(options.listen).map_err(|source| TcpError::Listen {
            address: options.listen,
            source,
        })?;
        let epoll = Epoll::new().map_err(system("an epoll descriptor"))?;
        epoll
            .add(listener.as_fd(), LISTENER, false)
            .map_err(system("watching the listener"))?;
        let host = options.advertise.unwrap_or_else(|| reachable(bound.ip()));
        let address = PeerAddress(format!("tcp:{}", SocketAddr::new(host, bound.port())));
        let mut capabilities = Capabilities::new("tcp", address, vec![Carriage::host(options.cost, 1 << 20)]);
        capabilities.max_op_runs = 4096;
        capabilities.max_inflight_ops = INFLIGHT_OPS_MAX;
        capabilities.max_message_bytes = frame::MESSAGE_BYTES_MAX;
        capabilities.reliable_messages = true;
        capabilities.awaits_vouching = true;
        capabilities.atomics = true;
        Ok(Tcp {
            door: Door::new(listener, tls.is_some()),
            options,
            capabilities,
            clock,
            tls,
            regions: RegionTable::new(epoch),
            epoll,
            paths: BTreeMap::new(),
            ready: Vec::new(),
            earliest: Time::MAX,
            hot: None,
            posted: false,
            polls: 0,
            polled: Time::ZERO,
            numbered_paths: 0,
            vectors: Vectors::default(),
            happened: Vec::new(),
            unheard: Vec::new(),
        })
    }

    /// Runs `act` on a path with what it needs of the rest, and forgets the path if that was its end.
    fn with_path<T>(&mut self, id: PathId, act: impl FnOnce(&mut Path, &mut World<'_>) -> T) -> Option<T> {
        let path = self.paths.get_mut(&id)?;
        let mut world = World {
            regions: &self.regions,
            signals: &mut self.ready,
            vectors: &mut self.vectors,
            epoll: &self.epoll,
            clock: self.clock,
            sends: SENDS_PER_TURN,
        };
        let result = act(path, &mut world);
        if path.is_over() {
            self.paths.remove(&id);
            self.door.forget(id);
        } else if let Some(timeout) = path.own_timeout() {
            self.earliest = self.earliest.min(timeout);
        }
        Some(result)
    }

    fn new_path(&mut self, label: u128, opened_here: bool, connections: u32, now: Time) -> PathId {
        let id = PathId(self.numbered_paths);
        self.numbered_paths += 1;
        let until = now.saturating_add(self.options.open_max);
        self.earliest = self.earliest.min(until);
        self.paths
            .insert(id, Path::new(id, label, opened_here, connections, until));
        id
    }

    fn connect(&mut self, peer: SocketAddr, id: PathId, index: u32) -> io::Result<()> {
        let socket = socket::connect(peer, &self.options)?;
        let token = path_token(id, index as usize);
        self.epoll.add(socket.as_fd(), token, true)?;
        let stream = match &self.tls {
            None => Stream::Plain(socket),
            Some(tls) => Stream::Tls(Box::new(tls.initiate(socket)?)),
        };
        self.with_path(id, |path, _| {
            path.add(index as usize, Connection::new(stream, token, Join::Connecting));
        });
        Ok(())
    }

    /// Lets callers in, as many as may come in one turn.
    fn accept(&mut self, now: Time) -> Progress {
        let mut taken = 0;
        loop {
            match self.door.knock(taken, now) {
                Knock::Caller(socket, from) => self.admit(socket, from, now),
                Knock::Enough => return Progress::Busy,
                Knock::Nobody => break,
            }
            taken += 1;
        }
        if let Some(again) = self.door.rests_until()
            && self.epoll.remove(self.door.fd()).is_ok()
        {
            self.earliest = self.earliest.min(again);
        }
        Progress::Idle
    }

    fn admit(&mut self, socket: Socket, from: IpAddr, now: Time) {
        let serial = self.door.number();
        let token = STRANGER | serial;
        let stream = match &self.tls {
            None => Stream::Plain(socket),
            Some(tls) => match tls.accept(socket) {
                Ok(stream) => Stream::Tls(Box::new(stream)),
                Err(_) => return,
            },
        };
        if self.epoll.add(stream.fd(), token, false).is_err() {
            return;
        }
        let until = now.saturating_add(self.options.open_max);
        self.earliest = self.earliest.min(until);
        let connection = Connection::new(stream, token, Join::AwaitsHello);
        self.door.let_in(serial, connection, from, until);
        if let Some(crowded_out) = self.door.thin_out() {
            self.with_path(crowded_out, |path, world| path.close(world));
            self.door.forget(crowded_out);
        }
    }

    /// Hears what a stranger has to say, and lets it into its path. Who says anything else is sent away.
    fn listen_to(&mut self, serial: u64, now: Time) {
        let Some(mut stranger) = self.door.call_up(serial) else {
            return;
        };
        match stranger.connection.receive_first(&mut self.vectors) {
            Ok(None) => return self.door.put_back(stranger),
            Ok(Some(Frame::Hello {
                version: frame::VERSION,
                path,
                index,
                connections,
                sent,
            })) => {
                // A failure here concerns this connection only: its path notices when the opener gives up.
                if let Ok(path) = self.join(stranger, path, index, connections, sent, now) {
                    self.door.on_path(serial, path);
                    return;
                }
            }
            Ok(Some(Frame::Hello { sent, .. })) => {
                // Another version is told ours, so that it can say why it is not talked to.
                let Connection { outbound, stream, .. } = &mut stranger.connection;
                outbound.stage(&Frame::Welcome {
                    version: frame::VERSION,
                    echo: sent,
                    sent: now,
                });
                let _ = outbound.flush(
                    stream,
                    &crate::far_clock::FarClock::default(),
                    self.clock,
                    &mut self.vectors,
                    u32::MAX,
                );
            }
            Ok(Some(_)) | Err(_) => {}
        }
        self.door.send_away(serial);
    }

    fn join(
        &mut self,
        stranger: Stranger,
        label: u128,
        index: u32,
        connections: u32,
        sent: Time,
        now: Time,
    ) -> Result<PathId, Gone> {
        let mut connection = stranger.connection;
        socket::prepare(connection.stream.socket(), &self.options)?;
        // Only a path that is being opened can be joined, and those are few.
        let being_opened = || self.paths.values().rev().filter(|path| path.is_being_accepted());
        let known = being_opened().find(|path| path.label == label).map(|path| path.id);
        let id = known.unwrap_or_else(|| self.new_path(label, false, connections, now));
        let index = index as usize;
        connection.token = path_token(id, index);
        self.epoll
            .change(connection.stream.fd(), connection.token, connection.awaits_room)?;
        self.with_path(id, |path, world| {
            if path.width() != connections as usize {
                return Err(Gone::GARBAGE);
            }
            path.join(index, connection, sent, world)
        })
        .unwrap_or(Ok(()))?;
        Ok(id)
    }

    /// Does what has come due.
    fn on_timeout(&mut self, now: Time) {
        if self.door.wakes(now) && self.epoll.add(self.door.fd(), LISTENER, false).is_err() {
            self.door.rest_on(now);
        }
        self.door.expire(now);
        let ids: Vec<PathId> = self.paths.keys().copied().collect();
        for id in ids {
            self.with_path(id, |path, world| path.expire(now, world));
        }
        self.earliest = self.deadlines().min().unwrap_or(Time::MAX);
    }

    fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        let paths = self.paths.values().filter_map(Path::next_timeout);
        paths.chain(self.door.deadlines())
    }

    fn turn(&mut self, id: PathId, index: usize) -> Progress {
        let turned = self.with_path(id, |path, world| {
            let progress = path.turn(index, world);
            (progress, path.is_left(index))
        });
        let Some((progress, left)) = turned else {
            return Progress::Idle;
        };
        if left {
            self.turn_again(id, index);
        }
        progress
    }

    fn turn_again(&mut self, id: PathId, index: usize) {
        if !self.unheard.contains(&(id, index)) {
            self.unheard.push((id, index));
        }
    }

    fn is_vouched(&self, id: PathId) -> bool {
        self.paths.get(&id).is_none_or(Path::is_vouched)
    }

    /// Turns what has something to say that no event tells of: all peers, and a few strangers.
    fn hear_the_unheard(&mut self) -> Progress {
        let waiting = std::mem::take(&mut self.unheard);
        let (peers, mut strangers): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|(id, _)| self.is_vouched(*id));
        let later = strangers.split_off(strangers.len().min(STRANGERS_PER_TURN));
        let busy = !peers.is_empty() || !strangers.is_empty();
        for (id, index) in peers.into_iter().chain(strangers) {
            self.turn(id, index);
        }
        for (id, index) in later {
            self.turn_again(id, index);
        }
        if busy { Progress::Busy } else { Progress::Idle }
    }

    /// Looks at all descriptors.
    fn look_around(&mut self, now: Time) -> Progress {
        let mut progress = Progress::Idle;
        let mut happened = std::mem::take(&mut self.happened);
        self.epoll.look(&mut happened);
        if happened.len() == Epoll::BATCH {
            progress = Progress::Busy;
        }
        // As long as nobody else has anything to say, the connection that was busy last is the one to look at first.
        if !happened.is_empty() {
            self.hot = None;
        }
        // Peers first, whoever else talks or knocks.
        for &token in happened.iter().filter(|token| **token & STRANGER == 0) {
            let (id, index) = from_path_token(token);
            if !self.is_vouched(id) {
                self.turn_again(id, index);
                continue;
            }
            if self.turn(id, index) == Progress::Busy {
                progress = Progress::Busy;
            }
            if happened.len() == 1 {
                self.hot = Some((id, index));
            }
        }
        if self.hear_the_unheard() == Progress::Busy {
            progress = Progress::Busy;
        }
        let others = happened.iter().filter(|token| **token & STRANGER != 0);
        let strangers = others.clone().filter(|token| **token != LISTENER);
        for &token in strangers.take(STRANGERS_PER_TURN) {
            self.listen_to(token & !STRANGER, now);
        }
        if others.clone().any(|token| *token == LISTENER) && self.accept(now) == Progress::Busy {
            progress = Progress::Busy;
        }
        self.happened = happened;
        progress
    }
}

impl Transport for Tcp {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        let host = gather::host(region)?;
        if region.key.epoch != self.regions.epoch() {
            return Err(Refusal::StaleEpoch);
        }
        host.look_up_file();
        self.regions.insert(region.clone());
        Ok(Grant::default())
    }

    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        self.regions.lookup(key)?;
        self.regions.remove(key);
        let ids: Vec<PathId> = self.paths.keys().copied().collect();
        for id in ids {
            self.with_path(id, |path, world| path.release(key, world));
        }
        // All copies are made by system calls under the caller's lock, so nobody is inside the region now.
        Ok(Progress::Idle)
    }

    fn open(&mut self, peer: &PeerAddress, now: Time) -> Result<PathId, Loss> {
        // Names are resolved by whoever may block.
        let address: SocketAddr = match (peer.transport(), peer.rest().parse()) {
            ("tcp", Ok(address)) => address,
            _ => return Err(Loss::Unreachable),
        };
        let label = socket::random().map_err(|e| Gone::from(e).loss)?;
        let connections = self.options.connections;
        let id = self.new_path(label, true, connections, now);
        for index in 0..connections {
            if let Err(error) = self.connect(address, id, index) {
                self.paths.remove(&id);
                return Err(Gone::from(error).loss);
            }
        }
        Ok(id)
    }

    fn vouch(&mut self, path: PathId) {
        self.door.forget(path);
        let left = self.with_path(path, |path, world| {
            path.vouch(world);
            (0..path.connections())
                .filter(|index| path.is_left(*index))
                .collect::<Vec<usize>>()
        });
        for index in left.into_iter().flatten() {
            self.turn_again(path, index);
        }
    }

    fn close(&mut self, path: PathId) {
        self.with_path(path, |path, world| path.close(world));
    }

    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        let mut earliest = self.earliest;
        let mut left_over = false;
        let accepted = self.with_path(path, |path, world| {
            // The caller's thread hands over one system call's worth a connection; whoever polls does the rest.
            world.sends = 1;
            let mut touched = 0u64;
            let mut accepted = 0;
            for op in ops {
                let Some(index) = path.post(op, INFLIGHT_OPS_MAX, now, world) else {
                    break;
                };
                touched |= 1 << index;
                earliest = earliest.min(op.deadline);
                accepted += 1;
            }
            while touched != 0 {
                let index = touched.trailing_zeros() as usize;
                path.flush_or_lose(index, world);
                left_over |= path.is_blocked(index);
                touched &= touched - 1;
            }
            accepted
        });
        self.earliest = self.earliest.min(earliest);
        self.posted |= left_over;
        accepted.ok_or(Loss::Closed)
    }

    fn cancel(&mut self, path: PathId, op: OpId, _now: Time) {
        self.with_path(path, |path, world| path.cancel(op, world));
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        // Straight after a post this only tells what came of it, so that the poster is not made to do the work.
        if std::mem::take(&mut self.posted) {
            signals.append(&mut self.ready);
            return Progress::Busy;
        }
        if now >= self.earliest {
            self.on_timeout(now);
        }
        self.polls = self.polls.wrapping_add(1);
        let spinning = now.saturating_sub(self.polled) < SPIN_MAX && !self.polls.is_multiple_of(HOT_POLLS);
        self.polled = now;
        let hot = self
            .hot
            .filter(|_| spinning)
            .filter(|(id, index)| self.paths.get(id).is_some_and(|path| !path.is_blocked(*index)));
        let progress = match hot {
            // Whoever spins finds the answer with one system call instead of two.
            Some((id, index)) => self.turn(id, index),
            None => self.look_around(now),
        };
        signals.append(&mut self.ready);
        progress
    }
}

impl Live for Tcp {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn next_timeout(&self) -> Option<Time> {
        if !self.ready.is_empty() || !self.unheard.is_empty() {
            return Some(Time::ZERO);
        }
        self.deadlines().min()
    }
}

fn path_token(id: PathId, index: usize) -> u64 {
    u64::from(id.0) << 16 | index as u64
}

fn from_path_token(token: u64) -> (PathId, usize) {
    (PathId((token >> 16) as u32), (token & 0xffff) as usize)
}

/// An address under which others can reach a listener: its own, or that of the interface which leads out of this host.
fn reachable(bound: IpAddr) -> IpAddr {
    if !bound.is_unspecified() {
        return bound;
    }
    // Connecting a datagram socket sends nothing; it only asks the routing table.
    let outward = || {
        let probe = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        probe.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        probe.local_addr()
    };
    match outward() {
        Ok(address) if !address.ip().is_unspecified() => address.ip(),
        _ => IpAddr::V4(Ipv4Addr::LOCALHOST),
    }
}
