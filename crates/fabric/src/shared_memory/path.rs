//! A path: its socket, what waits to be sent, and the operations that are under way.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{Done, Failure, Loss, Move, OpId, PathId, Refusal, RegionKey, Signal};

use super::Foreign;
use super::atomics::Atomics;
use super::bouncer::Bouncer;
use super::devices::ForDevice;
use super::frame::{Frame, MESSAGE};
use super::ledger::{Entry, HazardView, LedgerView};
use super::poller::Watch;
use super::process::Process;
use super::ring::Ring;
use super::socket::Socket;
use super::target::Target;
use super::worker::Sums;

/// Answers that wait for a peer to take them. A peer has fewer questions open than this, so more are a flood.
const MAX_REPLIES: usize = 256;
/// Questions after regions that one path has open at a time.
const MAX_ASKS: usize = 64;

#[derive(Debug)]
pub(super) struct Path {
    pub id: PathId,
    /// Before what it watches.
    pub watch: Watch,
    pub socket: Socket,
    pub process: Option<Process>,
    /// When this path has its turn, and when it was last known in one that the peer lives.
    pub now: Time,
    pub seen_alive: Time,
    pub peer: Handshake,
    /// Foreign memory goes through the ring, because the kernel refuses the direct way or the options forbid it.
    pub bounces: bool,
    /// Whether the ring may be used when the kernel refuses.
    pub may_bounce: bool,
    /// Operations whose completion has not been delivered.
    pub inflight: usize,
    pub queue: VecDeque<Running>,
    /// Moves that wait for a device to copy them.
    pub for_devices: VecDeque<ForDevice>,
    /// Moves whose target is not known yet.
    pub waiting: VecDeque<Running>,
    pub bouncer: Bouncer,
    pub atomics: Atomics,
    /// The peer's ring, through which we copy for it.
    pub peer_ring: Option<Ring>,
    /// Regions of ours that the peer was given and so may be inside.
    pub given: HashSet<Entry>,
    /// In order, as the regions of a table are, and for the same reason.
    pub targets: BTreeMap<RegionKey, Arc<Target>>,
    pub asks: HashMap<u32, RegionKey>,
    next_ask: u32,
    /// What [`SharedMemory::request_map`](super::SharedMemory::request_map) has asked for, and the refusals it got.
    pub wanted: HashMap<RegionKey, Option<Failure>>,
    pub outbox: VecDeque<Outgoing>,
    replies: usize,
    /// Whether the poller watches for room in the socket.
    pub watches_room: bool,
    /// Set when the path cannot go on; it is taken away at the next turn, or when what devices copy on it has ended.
    pub broken: Option<Loss>,
    /// Whether the far end certainly acts on none of what has been ended.
    pub fenced: bool,
}

/// What the peer has said of itself.
#[derive(Debug)]
pub(super) enum Handshake {
    Awaited {
        until: Time,
        opener: bool,
    },
    Complete {
        ledger: Arc<LedgerView>,
        hazard: HazardView,
    },
}

/// A move under way.
#[derive(Debug)]
pub(super) struct Running {
    pub id: OpId,
    pub deadline: Time,
    pub part: Move,
    /// The next byte of the leg to be copied.
    pub at: u64,
    pub sums: Option<Sums>,
}

/// A datagram that waits for room in the socket.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// Completes when the datagram is on its way.
    pub op: Option<(OpId, Time, Done)>,
    head: Vec<u8>,
    body: Option<Arc<[u8]>>,
    files: Vec<OwnedFd>,
    reply: bool,
}

impl Path {
    pub(super) fn new(
        id: PathId,
        watch: Watch,
        socket: Socket,
        process: Option<Process>,
        foreign: Foreign,
        peer: Handshake,
    ) -> Path {
        Path {
            id,
            watch,
            socket,
            process,
            now: Time::ZERO,
            seen_alive: Time::ZERO,
            peer,
            bounces: foreign == Foreign::Bounce,
            may_bounce: foreign != Foreign::ProcessVm,
            inflight: 0,
            queue: VecDeque::new(),
            for_devices: VecDeque::new(),
            waiting: VecDeque::new(),
            bouncer: Bouncer::default(),
            atomics: Atomics::default(),
            peer_ring: None,
            given: HashSet::new(),
            targets: BTreeMap::new(),
            asks: HashMap::new(),
            next_ask: 0,
            wanted: HashMap::new(),
            outbox: VecDeque::new(),
            replies: 0,
            watches_room: false,
            broken: None,
            fenced: true,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.peer, Handshake::Complete { .. })
    }

    pub(super) fn ledger(&self) -> Option<&Arc<LedgerView>> {
        match &self.peer {
            Handshake::Complete { ledger, .. } => Some(ledger),
            Handshake::Awaited { .. } => None,
        }
    }

    pub(super) fn hazard(&self) -> Option<&HazardView> {
        match &self.peer {
            Handshake::Complete { hazard, .. } => Some(hazard),
            Handshake::Awaited { .. } => None,
        }
    }

    /// Whether the peer has closed its end, or died.
    pub(super) fn is_hung_up(&self) -> bool {
        // The poller watches both.
        !self.watch.is_quiet() && (self.socket.is_hung_up() || self.process.as_ref().is_some_and(Process::has_ended))
    }

    pub(super) fn complete(&self, op: OpId, outcome: Result<Done, Failure>, signals: &mut Vec<Signal>) {
        signals.push(Signal::Completed {
            path: self.id,
            op,
            outcome,
        });
    }

    /// Sends the first frame. A new socket has room for it.
    pub(super) fn introduce(&mut self, hello: &Frame<'_>, files: &[BorrowedFd<'_>]) -> Result<(), Loss> {
        if self.send_now(&hello.encode(), &[], files) {
            return Ok(());
        }
        Err(self.broken.unwrap_or(Loss::System(libc::ENOBUFS)))
    }

    /// Sends a session's message, at once or when there is room.
    pub(super) fn send_message(&mut self, op: OpId, deadline: Time, payload: &Arc<[u8]>, signals: &mut Vec<Signal>) {
        if self.send_now(&[MESSAGE], payload, &[]) {
            self.complete(op, Ok(Done::default()), signals);
        } else {
            self.outbox.push_back(Outgoing {
                op: Some((op, deadline, Done::default())),
                head: vec![MESSAGE],
                body: Some(Arc::clone(payload)),
                files: Vec::new(),
                reply: false,
            });
        }
    }

    /// Sends a frame that belongs to an operation, which completes when the frame is on its way.
    pub(super) fn send_for(
        &mut self,
        op: OpId,
        deadline: Time,
        done: Done,
        frame: &Frame<'_>,
        signals: &mut Vec<Signal>,
    ) {
        let head = frame.encode();
        if self.send_now(&head, &[], &[]) {
            self.complete(op, Ok(done), signals);
        } else {
            self.outbox.push_back(Outgoing {
                op: Some((op, deadline, done)),
                head,
                body: None,
                files: Vec::new(),
                reply: false,
            });
        }
    }

    /// Sends a frame of our own.
    pub(super) fn send(&mut self, frame: &Frame<'_>, files: Vec<OwnedFd>) {
        self.send_frame(frame, files, false);
    }

    /// Sends an answer. A peer that asks and does not listen is cut off.
    pub(super) fn reply(&mut self, frame: &Frame<'_>, files: Vec<OwnedFd>) {
        if self.replies >= MAX_REPLIES {
            self.broken = Some(Loss::Garbage);
            return;
        }
        self.send_frame(frame, files, true);
    }

    /// Sends what may as well be lost.
    pub(super) fn hint(&mut self, frame: &Frame<'_>) {
        if self.replies < MAX_REPLIES {
            self.send_frame(frame, Vec::new(), true);
        }
    }

    fn send_frame(&mut self, frame: &Frame<'_>, files: Vec<OwnedFd>, reply: bool) {
        let head = frame.encode();
        let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        if !self.send_now(&head, &[], &borrowed) {
            self.replies += usize::from(reply);
            self.outbox.push_back(Outgoing {
                op: None,
                head,
                body: None,
                files,
                reply,
            });
        }
    }

    /// `false` where it has to wait its turn.
    fn send_now(&mut self, head: &[u8], body: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        if !self.outbox.is_empty() {
            return false;
        }
        match self.socket.send(head, body, files) {
            Ok(sent) => sent,
            Err(error) => {
                self.broken.get_or_insert(loss_of(&error));
                false
            }
        }
    }

    /// Sends what there is room for.
    pub(super) fn flush(&mut self, signals: &mut Vec<Signal>) {
        while let Some(next) = self.outbox.front() {
            let files: Vec<BorrowedFd<'_>> = next.files.iter().map(AsFd::as_fd).collect();
            match self
                .socket
                .send(&next.head, next.body.as_deref().unwrap_or(&[]), &files)
            {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    self.broken.get_or_insert(loss_of(&error));
                    return;
                }
            }
            drop(files);
            if let Some(sent) = self.outbox.pop_front() {
                self.replies -= usize::from(sent.reply);
                if let Some((op, _, done)) = sent.op {
                    self.complete(op, Ok(done), signals);
                }
            }
        }
    }

    /// Asks for a region, unless that has been done or too much is open already.
    pub(super) fn ask(&mut self, key: RegionKey) {
        if self.asks.len() >= MAX_ASKS || self.asks.values().any(|&asked| asked == key) {
            return;
        }
        let ask = self.next_ask;
        self.next_ask = self.next_ask.wrapping_add(1);
        self.asks.insert(ask, key);
        self.send(&Frame::Ask { ask, key }, Vec::new());
    }

    /// Takes away what has expired. Operations in the ring look after themselves.
    pub(super) fn expire(&mut self, now: Time, signals: &mut Vec<Signal>) {
        let path = self.id;
        let mut expired = |op| {
            signals.push(Signal::Completed {
                path,
                op,
                outcome: Err(Failure::Expired),
            });
        };
        for list in [&mut self.queue, &mut self.waiting] {
            list.retain(|running| {
                let late = now >= running.deadline;
                if late {
                    expired(running.id);
                }
                !late
            });
        }
        self.for_devices.retain(|waiting| {
            let late = now >= waiting.running.deadline;
            if late {
                expired(waiting.running.id);
            }
            !late
        });
        self.outbox.retain(|outgoing| match outgoing.op {
            Some((op, deadline, _)) if now >= deadline => {
                expired(op);
                false
            }
            _ => true,
        });
        self.atomics.expire(path, now, signals);
    }

    pub(super) fn cancel(&mut self, op: OpId, signals: &mut Vec<Signal>) {
        let lists = [&mut self.queue, &mut self.waiting];
        let begun = lists.into_iter().any(|list| {
            let at = list.iter().position(|running| running.id == op);
            at.is_some_and(|at| list.remove(at).is_some())
        });
        // One that a device is copying ends by itself, in a moment.
        let waits = self.for_devices.iter().position(|waiting| waiting.running.id == op);
        if begun || waits.is_some_and(|at| self.for_devices.remove(at).is_some()) {
            return self.complete(op, Err(Failure::Cancelled), signals);
        }
        // A message that has not left is not sent. An announcement of bytes that are in place is: the move is done.
        let unsent = |o: &Outgoing| o.body.is_some() && o.op.is_some_and(|(id, ..)| id == op);
        if let Some(at) = self.outbox.iter().position(unsent) {
            self.outbox.remove(at);
            self.complete(op, Err(Failure::Cancelled), signals);
            return;
        }
        self.bouncer.cancel(self.id, op, signals);
        self.atomics.cancel(self.id, op, signals);
    }

    /// Ends the moves whose near side is a region that is being released. None of them touches it any more.
    pub(super) fn release(&mut self, near: &RegionKey, signals: &mut Vec<Signal>) {
        let path = self.id;
        for list in [&mut self.queue, &mut self.waiting] {
            list.retain(|running| {
                let uses = running.part.leg.local().key == *near;
                if uses {
                    signals.push(Signal::Completed {
                        path,
                        op: running.id,
                        outcome: Err(Refusal::Released.into()),
                    });
                }
                !uses
            });
        }
        self.for_devices.retain(|waiting| {
            let uses = waiting.running.part.leg.local().key == *near;
            if uses {
                signals.push(Signal::Completed {
                    path,
                    op: waiting.running.id,
                    outcome: Err(Refusal::Released.into()),
                });
            }
            !uses
        });
        self.bouncer.release(path, near, signals);
    }

    /// Ends everything that is under way, but for what devices are copying.
    pub(super) fn end(&mut self, loss: Loss, signals: &mut Vec<Signal>) {
        let lost = Failure::PathLost { loss, fenced: true };
        let for_devices = self.for_devices.drain(..).map(|waiting| waiting.running);
        for running in self.queue.drain(..).chain(self.waiting.drain(..)).chain(for_devices) {
            signals.push(Signal::Completed {
                path: self.id,
                op: running.id,
                outcome: Err(lost),
            });
        }
        for outgoing in self.outbox.drain(..) {
            if let Some((op, ..)) = outgoing.op {
                signals.push(Signal::Completed {
                    path: self.id,
                    op,
                    outcome: Err(lost),
                });
            }
        }
        self.fenced &= self.bouncer.end(self.id, loss, signals);
        self.fenced &= self.atomics.end(self.id, loss, signals);
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        let handshake = match self.peer {
            Handshake::Awaited { until, .. } => Some(until),
            Handshake::Complete { .. } => None,
        };
        let moves = self.queue.iter().chain(&self.waiting).map(|running| running.deadline);
        let sends = self.outbox.iter().filter_map(|o| o.op.map(|(_, deadline, _)| deadline));
        handshake
            .into_iter()
            .chain(moves)
            .chain(sends)
            .chain(self.bouncer.deadlines())
            .chain(self.atomics.deadlines())
            .min()
    }
}

pub(super) fn loss_of(error: &io::Error) -> Loss {
    match error.raw_os_error() {
        Some(libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN) => Loss::ClosedByPeer,
        Some(libc::ECONNREFUSED | libc::ENOENT) => Loss::Refused,
        Some(libc::EMSGSIZE) => Loss::Garbage,
        Some(errno) => Loss::System(errno),
        None => Loss::System(libc::EIO),
    }
}
