//! A path: the connections between two agents that belong together, and the moves that this side has open on them.
//!
//! The connections live and die together. When one is lost the others are shut down, and a write is only called fenced once
//! the peer's end of the connection that carried it is known to be closed.

mod atomics;
mod closing;
mod missing;

use std::io;

use weft_plan::Time;
use weft_protocol::{
    Access, Body, Direction, Done, Failure, Loss, Move, Op, OpId, PathId, Progress, Refusal, RegionKey, RegionTable,
    Signal,
};

use super::connection::{Connection, Gone, Join};
use super::frame::{self, Ended, Frame, Heard, ReadRequest, WriteRequest};
use super::gather::host;
use super::inbound::{IncomingWrite, Payload, Placing, Received, Sink};
use super::ops::{LocalOp, Ops, Stage};
use super::outbound::Flushed;
use super::socket::{Epoll, Vectors};
use crate::Clock;
use crate::far_clock::FarClock;
use atomics::Atomics;

/// Moves of at most this size go on the first connection, where nothing large is in their way.
const SMALL_BYTES: u64 = 64 << 10;
/// System calls to receive with, before another connection has its turn.
const RECEIVES_PER_TURN: usize = 16;
/// How often a send is tried whose memory was missing and is there again.
const SENDS_TRIED_MAX: u32 = 3;

#[derive(Debug)]
pub(super) struct Path {
    pub(super) id: PathId,
    /// What the connections of this path know each other by.
    pub(super) label: u128,
    opened_here: bool,
    connections: Vec<Option<Connection>>,
    ops: Ops,
    atomics: Atomics,
    far_clock: FarClock,
    pinged: Time,
    /// The owner knows who is at the far end.
    vouched: bool,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Opening {
        until: Time,
    },
    Live,
    /// One connection is gone; the others are only watched until they are, too.
    Closing {
        loss: Loss,
        until: Time,
        fenced: bool,
    },
    Over,
}

/// What a path needs of the transport that it is part of.
#[derive(Debug)]
pub(super) struct World<'a> {
    pub(super) regions: &'a RegionTable,
    pub(super) signals: &'a mut Vec<Signal>,
    pub(super) vectors: &'a mut Vectors,
    pub(super) epoll: &'a Epoll,
    pub(super) clock: Clock,
    /// System calls that one flush of a connection may make.
    pub(super) sends: u32,
}

impl Path {
    pub(super) fn new(id: PathId, label: u128, opened_here: bool, connections: u32, until: Time) -> Path {
        Path {
            id,
            label,
            opened_here,
            connections: (0..connections).map(|_| None).collect(),
            ops: Ops::default(),
            atomics: Atomics::default(),
            far_clock: FarClock::default(),
            pinged: Time::ZERO,
            vouched: false,
            phase: Phase::Opening { until },
        }
    }

    pub(super) fn is_opening(&self) -> bool {
        matches!(self.phase, Phase::Opening { .. })
    }
    pub(super) fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }
    pub(super) fn is_being_accepted(&self) -> bool {
        !self.opened_here && matches!(self.phase, Phase::Opening { .. })
    }
    pub(super) fn is_blocked(&self, index: usize) -> bool {
        let connection = self.connections.get(index).and_then(Option::as_ref);
        connection.is_none_or(|c| c.awaits_room)
    }
    pub(super) fn width(&self) -> usize {
        self.connections.len()
    }

    /// When something must be done even if nothing comes in.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let ops = self
            .ops
            .iter()
            .filter(|op| op.stage != Stage::Ended)
            .map(|op| op.deadline);
        ops.chain(self.atomics.deadlines()).chain(self.own_timeout()).min()
    }

    /// When opening or closing must have come to an end.
    pub(super) fn own_timeout(&self) -> Option<Time> {
        match self.phase {
            Phase::Opening { until } | Phase::Closing { until, .. } => Some(until),
            Phase::Live | Phase::Over => None,
        }
    }

    /// Adds a connection that is connecting.
    pub(super) fn add(&mut self, index: usize, connection: Connection) {
        self.connections[index] = Some(connection);
    }

    /// Adds a connection that a peer has opened, and welcomes it.
    pub(super) fn join(
        &mut self,
        index: usize,
        mut connection: Connection,
        echo: Time,
        world: &mut World<'_>,
    ) -> Result<(), Gone> {
        if !self.is_opening() || self.connections.get(index).is_none_or(Option::is_some) {
            return Err(Gone::GARBAGE);
        }
        connection.join = Join::AwaitsPong;
        connection.outbound.stage(&Frame::Welcome {
            version: frame::VERSION,
            echo,
            sent: world.clock.now(),
        });
        connection.flush(&self.far_clock, world.clock, world.vectors, world.epoll, world.sends)?;
        self.connections[index] = Some(connection);
        Ok(())
    }

    /// The owner knows who is at the far end: serves it, and first what it has asked for so far.
    pub(super) fn vouch(&mut self, world: &mut World<'_>) {
        if std::mem::replace(&mut self.vouched, true) {
            return;
        }
        for index in 0..self.connections.len() {
            let resumed = self.resume(index, world);
            if let Err(gone) = resumed {
                let now = world.clock.now();
                self.lose(index, gone, now, world);
                return;
            }
        }
    }

    fn resume(&mut self, index: usize, world: &mut World<'_>) -> Result<(), Gone> {
        let Some(connection) = &mut self.connections[index] else {
            return Ok(());
        };
        connection.welcome(world.epoll)?;
        // A path that is being opened has said nothing yet that could have had to wait.
        if self.phase != Phase::Live {
            return Ok(());
        }
        self.decode(index, world)?;
        self.flush(index, world)
    }

    /// Receives and sends what one connection can.
    pub(super) fn turn(&mut self, index: usize, world: &mut World<'_>) -> Progress {
        let outcome = match self.phase {
            Phase::Over => return Progress::Idle,
            Phase::Closing { .. } => self.drain(index),
            _ => self.exchange(index, world),
        };
        outcome.unwrap_or_else(|gone| {
            let now = world.clock.now();
            self.lose(index, gone, now, world);
            Progress::Busy
        })
    }

    fn exchange(&mut self, index: usize, world: &mut World<'_>) -> Result<Progress, Gone> {
        let Some(connection) = &mut self.connections[index] else {
            return Ok(Progress::Idle);
        };
        if connection.join == Join::Connecting && !self.greet(index, world)? {
            return Ok(Progress::Idle);
        }
        if self.connections[index].as_ref().is_some_and(|c| c.held) {
            return self.look_at_held(index, world);
        }
        // What a stranger has said after its last message was left for this turn.
        if self.is_unheard(index) {
            self.decode(index, world)?;
            if self.is_unheard(index) {
                self.flush(index, world)?;
                return Ok(Progress::Busy);
            }
        }
        let mut calls = 0;
        // Where bytes came, more are likely to come soon: whoever turns this should look again before going to sleep.
        let mut progress = Progress::Idle;
        loop {
            let received = self.receive(index, world)?;
            if received != Received::Nothing {
                self.decode(index, world)?;
                progress = Progress::Busy;
            }
            if received != Received::Some || !self.vouched {
                break;
            }
            calls += 1;
            // Bytes that have been decrypted make no socket readable, so they are not left behind.
            if calls >= RECEIVES_PER_TURN && !self.holds_plaintext(index) {
                break;
            }
        }
        self.flush(index, world)?;
        Ok(progress)
    }

    /// A connection that has to wait is heard of when there is room for what it is sent, or when it has failed.
    fn look_at_held(&mut self, index: usize, world: &mut World<'_>) -> Result<Progress, Gone> {
        let connection = self.connections[index].as_ref();
        if let Some(error) = connection.and_then(|c| c.stream.socket().take_error().transpose()) {
            return Err(error?.into());
        }
        self.flush(index, world)?;
        Ok(Progress::Idle)
    }

    fn holds_plaintext(&self, index: usize) -> bool {
        let connection = self.connections.get(index).and_then(Option::as_ref);
        connection.is_some_and(|c| c.stream.holds_plaintext())
    }

    /// Sends the first frame once the socket is connected.
    fn greet(&mut self, index: usize, world: &mut World<'_>) -> Result<bool, Gone> {
        let connections = self.connections.len() as u32;
        let Some(connection) = &mut self.connections[index] else {
            return Ok(false);
        };
        if let Some(error) = connection.stream.socket().take_error()? {
            return Err(error.into());
        }
        if connection.stream.socket().peer_addr().is_err() {
            return Ok(false);
        }
        connection.join = Join::AwaitsWelcome;
        connection.outbound.stage(&Frame::Hello {
            version: frame::VERSION,
            path: self.label,
            index: index as u32,
            connections,
            sent: world.clock.now(),
        });
        Ok(true)
    }

    fn receive(&mut self, index: usize, world: &mut World<'_>) -> Result<Received, Gone> {
        let Some(connection) = &mut self.connections[index] else {
            return Ok(Received::Nothing);
        };
        let mut placing = Placing {
            ops: &mut self.ops,
            outbound: &mut connection.outbound,
            far_clock: &self.far_clock,
            clock: world.clock,
            vectors: world.vectors,
        };
        let received = connection.inbound.receive(&mut connection.stream, &mut placing);
        self.refuse_missed(index, world);
        match received {
            Ok(received) => Ok(received),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Received::Nothing),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Received::Some),
            Err(e) => Err(e.into()),
        }
    }

    /// Works through what has been received.
    fn decode(&mut self, index: usize, world: &mut World<'_>) -> Result<(), Gone> {
        if let Some(connection) = &mut self.connections[index] {
            connection.unheard = false;
        }
        loop {
            let Some(connection) = &mut self.connections[index] else {
                return Ok(());
            };
            let mut placing = Placing {
                ops: &mut self.ops,
                outbound: &mut connection.outbound,
                far_clock: &self.far_clock,
                clock: world.clock,
                vectors: world.vectors,
            };
            connection.inbound.place_buffered(&mut placing);
            self.refuse_missed(index, world);
            // Refusing says something, by which the connection may turn out to be gone.
            let Some(connection) = &mut self.connections[index] else {
                return Ok(());
            };
            if connection.inbound.payload.is_some() {
                return Ok(());
            }
            let buffered = connection.inbound.buffered();
            let (frame, used) = match self.vouched {
                true => match frame::decode(buffered)? {
                    Some(whole) => whole,
                    None => return Ok(()),
                },
                false => match frame::decode_from_stranger(buffered)? {
                    Heard::Frame(frame, used) => (frame, used),
                    Heard::Part => return Ok(()),
                    Heard::NotForStrangers => return Ok(connection.hold(world.epoll)?),
                },
            };
            connection.inbound.consume_head(used);
            // A stranger is heard one message a turn, so that its peer can come to know it before it hears the next one.
            let message = matches!(frame, Frame::Message(_));
            match self.phase {
                Phase::Live => self.on_frame(index, frame, world)?,
                _ => self.on_opening_frame(index, frame, world)?,
            }
            if message && !self.vouched {
                if let Some(connection) = &mut self.connections[index] {
                    connection.unheard = true;
                }
                return Ok(());
            }
        }
    }

    /// Whether a stranger may have said more than it has been heard to say.
    /// Whether something has come that no event will tell of: it is to be turned again.
    pub(super) fn is_left(&self, index: usize) -> bool {
        let held = self
            .connections
            .get(index)
            .and_then(Option::as_ref)
            .is_some_and(|c| c.held);
        !held && (self.is_unheard(index) || self.holds_plaintext(index))
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.len()
    }

    pub(super) fn is_vouched(&self) -> bool {
        self.vouched
    }

    pub(super) fn is_unheard(&self, index: usize) -> bool {
        let connection = self.connections.get(index).and_then(Option::as_ref);
        connection.is_some_and(|c| c.unheard)
    }

    fn on_opening_frame(&mut self, index: usize, frame: Frame, world: &mut World<'_>) -> Result<(), Gone> {
        let now = world.clock.now();
        let Some(connection) = &mut self.connections[index] else {
            return Ok(());
        };
        match (connection.join, frame) {
            (Join::AwaitsWelcome, Frame::Welcome { version, echo, sent }) => {
                if version != frame::VERSION || echo > now {
                    return Err(Gone::GARBAGE);
                }
                self.far_clock.learn(echo, sent, now);
                connection.outbound.stage(&Frame::Pong { echo: sent, read: now });
                connection.join = Join::Joined;
            }
            (Join::AwaitsPong, Frame::Pong { echo, read }) => {
                if echo > now {
                    return Err(Gone::GARBAGE);
                }
                self.far_clock.learn(echo, read, now);
                connection.join = Join::Joined;
                if self.all_joined() {
                    // The opener hears of it on the first connection, and sends nothing before.
                    if let Some(first) = &mut self.connections[0] {
                        first.outbound.stage(&Frame::Ready);
                    }
                    self.phase = Phase::Live;
                    world.signals.push(Signal::Accepted { path: self.id });
                    self.flush(0, world)?;
                }
            }
            (Join::Joined, Frame::Ready) if self.opened_here && index == 0 && self.all_joined() => {
                self.phase = Phase::Live;
                world.signals.push(Signal::Opened { path: self.id });
            }
            _ => return Err(Gone::GARBAGE),
        }
        Ok(())
    }

    fn all_joined(&self) -> bool {
        self.connections
            .iter()
            .all(|c| c.as_ref().is_some_and(|c| c.join == Join::Joined))
    }

    fn on_frame(&mut self, index: usize, frame: Frame, world: &mut World<'_>) -> Result<(), Gone> {
        let Some(connection) = &mut self.connections[index] else {
            return Ok(());
        };
        match frame {
            Frame::ReadData { op, len } => {
                let known = self.ops.find(op).filter(|o| o.is_read() && o.connection == index);
                if known.is_none_or(|o| len > o.bytes() - o.received) {
                    return Err(Gone::GARBAGE);
                }
                connection.inbound.payload = Some(Payload {
                    sink: Sink::Read { op },
                    left: len,
                });
            }
            Frame::ReadEnd { op, outcome } => self.on_read_end(index, op, outcome, world)?,
            Frame::WriteAck { op, outcome } => self.on_write_ack(index, op, outcome, world)?,
            Frame::ReadRequest(request) => {
                let now = world.clock.now();
                self.on_read_request(index, request, now, world)?;
                self.compare_clocks(index, now);
            }
            Frame::WriteRequest(request) => {
                if connection.inbound.write.is_some() {
                    return Err(Gone::GARBAGE);
                }
                let now = world.clock.now();
                let late = self.far_clock.may_have_reached(request.deadline, now);
                let write = IncomingWrite::begin(request, world.regions, late, &mut connection.outbound);
                connection.inbound.write = Some(write);
                self.compare_clocks(index, now);
            }
            Frame::WriteData { op, len } => {
                let current = connection.inbound.write.as_ref().filter(|w| w.op == op);
                if current.is_none_or(|w| len > w.total - w.received) {
                    return Err(Gone::GARBAGE);
                }
                connection.inbound.payload = Some(Payload {
                    sink: Sink::Write,
                    left: len,
                });
            }
            Frame::WriteEnd { op, complete } => {
                let write = connection.inbound.write.take().filter(|w| w.op == op);
                let write = write.ok_or(Gone::GARBAGE)?;
                if complete && write.received != write.total {
                    return Err(Gone::GARBAGE);
                }
                if let Some(arrival) = write.finish(complete, &mut connection.outbound) {
                    world.signals.push(Signal::Arrived { path: self.id, arrival });
                }
            }
            Frame::Cancel { op } => connection.outbound.end_response(op, Ended::Aborted),
            Frame::Ping { sent } => connection.outbound.stage(&Frame::Pong {
                echo: sent,
                read: world.clock.now(),
            }),
            Frame::Pong { echo, read } => {
                let now = world.clock.now();
                if echo > now {
                    return Err(Gone::GARBAGE);
                }
                self.far_clock.learn(echo, read, now);
            }
            Frame::Message(payload) => world.signals.push(Signal::Message { path: self.id, payload }),
            Frame::AtomicRequest(request) => self.on_atomic_request(index, request, world),
            Frame::AtomicReply { op, outcome } => self.on_atomic_reply(index, op, outcome, world)?,
            Frame::Hello { .. } | Frame::Welcome { .. } | Frame::Ready => return Err(Gone::GARBAGE),
        }
        Ok(())
    }

    fn on_read_request(
        &mut self,
        index: usize,
        request: ReadRequest,
        now: Time,
        world: &mut World<'_>,
    ) -> Result<(), Gone> {
        let Some(connection) = &mut self.connections[index] else {
            return Ok(());
        };
        if !connection.outbound.admits(request.spans.runs().len()) {
            return Err(Gone::GARBAGE);
        }
        let verdict = if self.far_clock.may_have_reached(request.deadline, now) {
            Err(Refusal::Late)
        } else {
            world.regions.check(&request.key, Access::READ, &request.spans)
        };
        match verdict {
            Ok(region) => connection.outbound.respond(region.clone(), request),
            Err(refusal) => connection.outbound.stage(&Frame::ReadEnd {
                op: request.op,
                outcome: Err(Ended::Refused(refusal)),
            }),
        }
        Ok(())
    }

    fn on_read_end(
        &mut self,
        index: usize,
        wire: u64,
        outcome: Result<Option<u64>, Ended>,
        world: &mut World<'_>,
    ) -> Result<(), Gone> {
        let known = self.ops.find(wire).filter(|o| o.is_read() && o.connection == index);
        let op = known.ok_or(Gone::GARBAGE)?;
        if op.stage == Stage::Open {
            let outcome = match outcome {
                Ok(far_sum) if op.received == op.bytes() && far_sum.is_some() == op.part.checksum => {
                    Done::moved_to_host(&op.part, far_sum).map_err(Failure::Refused)
                }
                Err(Ended::Refused(refusal)) => Err(Failure::Refused(refusal)),
                // An end without all the bytes, or without the checksum, or that nobody asked for.
                Ok(_) | Err(Ended::Aborted) => return Err(Gone::GARBAGE),
            };
            world.signals.push(completed(self.id, op.id, outcome));
        }
        self.forget(wire);
        Ok(())
    }

    fn on_write_ack(
        &mut self,
        index: usize,
        wire: u64,
        outcome: Result<Option<u64>, Ended>,
        world: &mut World<'_>,
    ) -> Result<(), Gone> {
        let known = self.ops.find(wire).filter(|o| !o.is_read() && o.connection == index);
        let op = known.ok_or(Gone::GARBAGE)?;
        let (Some(connection), Some(job)) = (&mut self.connections[index], op.job) else {
            return Err(Gone::GARBAGE);
        };
        let outcome = match (outcome, op.stage) {
            (Ok(far_sum), _) => {
                if !connection.outbound.is_sent(job) || far_sum.is_some() != op.part.checksum {
                    return Err(Gone::GARBAGE);
                }
                Done::moved_to_host(&op.part, far_sum).map_err(Failure::Refused)
            }
            (Err(Ended::Refused(refusal)), _) => {
                connection.outbound.end(job, Ended::Aborted);
                Err(Failure::Refused(refusal))
            }
            (Err(Ended::Aborted), Stage::Ending(cause)) => Err(cause),
            (Err(Ended::Aborted), Stage::Ended) => Err(Failure::Expired),
            (Err(Ended::Aborted), Stage::Open) => return Err(Gone::GARBAGE),
        };
        if op.stage != Stage::Ended {
            world.signals.push(completed(self.id, op.id, outcome));
        }
        self.forget(wire);
        Ok(())
    }

    /// Asks the peer for its time where what is known of it has grown old.
    fn compare_clocks(&mut self, index: usize, now: Time) {
        if self.far_clock.is_stale(now)
            && now.saturating_sub(self.pinged) > Time::from_ms(100)
            && let Some(connection) = &mut self.connections[index]
        {
            self.pinged = now;
            connection.outbound.stage(&Frame::Ping { sent: now });
        }
    }

    /// Accepts an operation and names the connection that it goes on; `None` is back-pressure.
    pub(super) fn post(&mut self, op: &Op, max_inflight: usize, now: Time, world: &mut World<'_>) -> Option<usize> {
        if self.phase != Phase::Live || self.ops.len() + self.atomics.len() >= max_inflight {
            return None;
        }
        if op.deadline <= now {
            world.signals.push(completed(self.id, op.id, Err(Failure::Expired)));
            return Some(0);
        }
        match &op.body {
            Body::Message(payload) => {
                let connection = self.connections[0].as_mut()?;
                if connection.outbound.is_crowded() {
                    return None;
                }
                let outcome = if payload.len() > frame::MESSAGE_BYTES_MAX {
                    Err(Failure::Refused(Refusal::Malformed))
                } else {
                    connection.outbound.message(payload);
                    Ok(Done::default())
                };
                world.signals.push(completed(self.id, op.id, outcome));
                Some(0)
            }
            Body::Move(part) => self.post_move(op, part, world),
            Body::Atomic(atomic) => self.post_atomic(op, atomic),
            // Host memory has nothing to be committed.
            Body::Commit(_) => {
                world.signals.push(completed(self.id, op.id, Ok(Done::default())));
                Some(0)
            }
        }
    }

    fn post_move(&mut self, op: &Op, part: &Move, world: &mut World<'_>) -> Option<usize> {
        let local = part.leg.local();
        let usable = world.regions.lookup(&local.key).and_then(host);
        let bytes = part.range.end.saturating_sub(part.range.start);
        let possible = part.range.end <= part.leg.bytes() && bytes <= frame::MOVE_BYTES_MAX;
        let spans = match usable {
            Ok(_) if possible => part.leg.remote_spans().slice(part.range.clone()),
            Ok(_) => return self.refuse(op.id, Refusal::Malformed, world),
            Err(refusal) => return self.refuse(op.id, refusal, world),
        };
        let runs = spans.runs().len();
        if runs > frame::RUNS_MAX {
            return self.refuse(op.id, Refusal::Malformed, world);
        }
        let index = self.choose(bytes);
        let connection = self.connections[index].as_mut()?;
        if connection.outbound.is_crowded() || connection.open_runs + runs > frame::REQUESTED_RUNS_MAX {
            return None;
        }
        let wire = self.ops.next_wire();
        let (deadline, key, checksum) = (op.deadline, part.leg.remote().key, part.checksum);
        let mut job = None;
        match part.direction {
            Direction::Read => connection.outbound.stage(&Frame::ReadRequest(ReadRequest {
                op: wire,
                deadline,
                key,
                spans,
                checksum,
            })),
            Direction::Write => {
                let request = WriteRequest {
                    op: wire,
                    deadline,
                    key,
                    spans,
                    checksum,
                    arrival: part.arrival,
                };
                job = Some(connection.outbound.write(part.clone(), request));
            }
        }
        connection.open_runs += runs;
        connection.open_bytes += bytes;
        self.ops.insert(LocalOp {
            wire,
            id: op.id,
            deadline: op.deadline,
            part: part.clone(),
            runs,
            connection: index,
            job,
            received: 0,
            stage: Stage::Open,
        });
        Some(index)
    }

    /// Completes an operation that cannot be; it counts as accepted.
    fn refuse(&mut self, id: OpId, refusal: Refusal, world: &mut World<'_>) -> Option<usize> {
        world
            .signals
            .push(completed(self.id, id, Err(Failure::Refused(refusal))));
        Some(0)
    }

    /// Small moves share the first connection with messages; large ones go where the least is under way.
    fn choose(&self, bytes: u64) -> usize {
        if bytes <= SMALL_BYTES {
            return 0;
        }
        let load = |index: &usize| self.connections[*index].as_ref().map_or(u64::MAX, |c| c.open_bytes);
        (0..self.connections.len()).min_by_key(load).unwrap_or(0)
    }

    pub(super) fn flush_or_lose(&mut self, index: usize, world: &mut World<'_>) {
        if let Err(gone) = self.flush(index, world) {
            let now = world.clock.now();
            self.lose(index, gone, now, world);
        }
    }

    fn flush(&mut self, index: usize, world: &mut World<'_>) -> Result<(), Gone> {
        let mut tries = 0;
        // A path that is closing has shut its sockets for sending; the error of trying would look like the peer's doing.
        while matches!(self.phase, Phase::Opening { .. } | Phase::Live)
            && let Some(connection) = self.connections.get_mut(index).and_then(Option::as_mut)
        {
            let flushed = connection.flush(&self.far_clock, world.clock, world.vectors, world.epoll, world.sends)?;
            if flushed != Flushed::Missing {
                break;
            }
            // A file that was cut short may have its length back by now: then it is tried again.
            if !self.end_missing(index, world) {
                tries += 1;
                if tries > SENDS_TRIED_MAX {
                    return Err(io::Error::from_raw_os_error(libc::EFAULT).into());
                }
            }
        }
        Ok(())
    }

    pub(super) fn cancel(&mut self, id: OpId, world: &mut World<'_>) {
        let found = self.ops.iter().find(|op| op.id == id).map(|op| op.wire);
        if let Some(wire) = found {
            self.end(wire, Failure::Cancelled, world);
        }
        self.cancel_atomic(id, world);
    }

    /// Ends what is past its deadline.
    pub(super) fn expire(&mut self, now: Time, world: &mut World<'_>) {
        let over = |op: &&LocalOp| op.deadline <= now && op.stage != Stage::Ended;
        let expired: Vec<u64> = self.ops.iter().filter(over).map(|op| op.wire).collect();
        for wire in expired {
            self.end(wire, Failure::Expired, world);
        }
        self.expire_atomics(now, world);
        match self.phase {
            Phase::Opening { until } if now >= until => {
                let gone = Gone {
                    loss: Loss::Silent,
                    fenced: true,
                };
                self.lose(0, gone, now, world);
            }
            Phase::Closing { until, .. } if now >= until => self.finish(false, world),
            _ => {}
        }
    }

    /// Lets go of a region that is being released.
    pub(super) fn release(&mut self, key: &RegionKey, world: &mut World<'_>) {
        let slot = key.slot;
        for connection in self.connections.iter_mut().flatten() {
            connection.outbound.release(slot);
            connection.inbound.release(slot, &mut connection.outbound);
        }
        let local = |op: &&LocalOp| op.part.leg.local().key == *key;
        let open: Vec<u64> = self.ops.iter().filter(local).map(|op| op.wire).collect();
        for wire in open {
            self.end(wire, Failure::Refused(Refusal::Released), world);
        }
        for index in 0..self.connections.len() {
            self.flush_or_lose(index, world);
        }
    }

    /// Ends a move before its time. From here on it touches no local byte; when it completes depends on the far ones.
    fn end(&mut self, wire: u64, cause: Failure, world: &mut World<'_>) {
        let Some(op) = self.ops.find(wire) else { return };
        let (index, id) = (op.connection, op.id);
        let closing = matches!(self.phase, Phase::Closing { .. });
        let outcome = match op.stage {
            Stage::Ended => return,
            // The deadline is a fence of its own: the target has stopped, too.
            Stage::Ending(first) if cause == Failure::Expired => first,
            Stage::Ending(_) => return,
            Stage::Open if closing && cause != Failure::Expired => return,
            Stage::Open => cause,
        };
        let Some(connection) = &mut self.connections[index] else {
            return;
        };
        if op.is_read() {
            op.stage = Stage::Ended;
            world.signals.push(completed(self.id, id, Err(outcome)));
            connection.outbound.stage(&Frame::Cancel { op: wire });
            self.flush_or_lose(index, world);
            return;
        }
        let job = op.job.unwrap_or(u64::MAX);
        let announced = connection.outbound.is_announced(job);
        connection.outbound.end(job, Ended::Aborted);
        if announced && cause != Failure::Expired {
            op.stage = Stage::Ending(cause);
        } else {
            op.stage = Stage::Ended;
            world.signals.push(completed(self.id, id, Err(outcome)));
        }
        if !announced || closing {
            self.forget(wire);
        }
        if !closing {
            self.flush_or_lose(index, world);
        }
    }

    fn forget(&mut self, wire: u64) {
        if let Some(op) = self.ops.remove(wire)
            && let Some(connection) = &mut self.connections[op.connection]
        {
            connection.open_bytes -= op.bytes();
            connection.open_runs -= op.runs;
        }
    }
}

fn completed(path: PathId, op: OpId, outcome: Result<Done, Failure>) -> Signal {
    Signal::Completed { path, op, outcome }
}
