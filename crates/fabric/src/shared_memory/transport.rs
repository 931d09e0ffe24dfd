//! The waist of this transport: what it does when it is called.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{
    Access, Body, Capabilities, Failure, Grant, Loss, Op, OpId, PathId, PeerAddress, Progress, Refusal, Region,
    RegionKey, Signal, Transport,
};

use super::bouncer::mono_now_ns;
use super::frame::{Answer, Frame, OfDevice};
use super::ledger::{HazardView, LedgerView};
use super::path::{Handshake, Path, loss_of};
use super::poller::{Event, Watch, reserve_descriptor};
use super::process::Process;
use super::ring::Ring;
use super::socket::{Files, Received, Socket};
use super::target::{Target, Unusable};
use super::{Admitted, Lingering, SharedMemory, address};
use crate::Live;
use crate::cuda::CudaMemory;
use crate::memory::{HostMemory, Seen};

/// Completions are handed out this many times without a look at the sockets, which costs more than a small copy.
const QUICK_POLLS: u32 = 8;
/// Datagrams taken from one path before the others have their turn.
const DATAGRAMS_A_TURN: usize = 64;
/// Copies made for peers through the ring before the other paths have their turn.
const BOUNCES_A_TURN: usize = 8;
/// A move gets at least this much of a turn.
const MIN_CHUNK_BYTES: u64 = 1 << 20;
/// Callers let in before the paths have their turn.
const CALLERS_A_TURN: usize = 64;
/// Callers that have not introduced themselves. One more, and the one that has had the longest time for it goes.
const MAX_STRANGERS: usize = 64;
/// Regions of one peer that are kept mapped.
const MAX_TARGETS: usize = 4096;

impl Transport for SharedMemory {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        let memory = region.memory.as_any();
        let host = memory.downcast_ref::<HostMemory>();
        if host.is_none() && !memory.is::<CudaMemory>() {
            return Err(Refusal::Unsupported);
        }
        if region.key.epoch != self.epoch {
            return Err(Refusal::StaleEpoch);
        }
        if self.entries.contains_key(&region.key) {
            return Ok(Grant::default());
        }
        let entry = self.ledger.admit().ok_or(Refusal::Unsupported)?;
        if let Some(host) = host {
            host.look_up_file();
        }
        let admitted = Admitted {
            entry,
            revoked: false,
            memory: region.memory.clone(),
        };
        self.entries.insert(region.key, admitted);
        self.table.insert(region.clone());
        Ok(Grant::default())
    }

    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        let Some(admitted) = self.entries.get_mut(key) else {
            return Err(self.table.lookup(key).err().unwrap_or(Refusal::UnknownKey));
        };
        let entry = admitted.entry;
        if !admitted.revoked {
            admitted.revoked = true;
            self.ledger.revoke(entry);
            self.table.remove(key);
            for path in &mut self.paths {
                path.release(key, &mut self.ready);
                if path.given.contains(&entry) {
                    path.hint(&Frame::Forget(entry));
                }
            }
        }
        // Only those that were given the region are asked: anybody can say of itself that it is inside.
        let given = self.paths.iter().filter(|path| path.given.contains(&entry));
        let mut open = given.filter_map(Path::hazard);
        let mut gone = self.lingering.iter();
        if open.any(|hazard| hazard.is_inside(entry))
            || gone.any(|lingering| lingering.given.contains(&entry) && lingering.is_inside(entry))
            || self.is_flying(key)
        {
            return Ok(Progress::Busy);
        }
        if let Some(admitted) = self.entries.remove(key) {
            self.devices.forget(&*admitted.memory);
        }
        for path in &mut self.paths {
            path.given.remove(&entry);
        }
        self.lingering.retain_mut(|lingering| {
            lingering.given.remove(&entry);
            !lingering.given.is_empty()
        });
        self.ledger.reclaim(entry);
        Ok(Progress::Idle)
    }

    fn open(&mut self, peer: &PeerAddress, now: Time) -> Result<PathId, Loss> {
        let name = address::name_here(peer).ok_or(Loss::Unreachable)?;
        if self.paths.len() + self.lingering.len() >= self.options.paths_max {
            return Err(Loss::System(libc::EUSERS));
        }
        let socket = Socket::connect(name).map_err(|error| loss_of(&error))?;
        self.add_path(socket, true, now)
    }

    /// Only processes of this user get here, and those may read this one's memory by other means as well.
    fn vouch(&mut self, _path: PathId) {}

    fn close(&mut self, path: PathId) {
        if let Some(at) = self.path_index(path) {
            self.lose(at, Loss::Closed);
        }
    }

    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        let at = self.path_index(path).ok_or(Loss::Closed)?;
        let path = &mut self.paths[at];
        if let Some(loss) = path.broken {
            return Err(loss);
        }
        if !path.is_open() {
            return Ok(0);
        }
        path.now = now;
        let room = self.capabilities.max_inflight_ops.saturating_sub(path.inflight);
        let mut accepted = 0;
        for op in ops.iter().take(room) {
            if matches!(op.body, Body::Atomic(_)) && path.atomics.is_crowded() {
                break;
            }
            accepted += 1;
            path.inflight += 1;
            match &op.body {
                Body::Move(part) => match self.table.lookup(&part.leg.local().key) {
                    Ok(_) => {
                        path.begin(op, part, &mut self.inline_bytes, &mut self.worker, now, &mut self.ready);
                        self.posted |= !path.queue.is_empty();
                    }
                    Err(refusal) => path.complete(op.id, Err(refusal.into()), &mut self.ready),
                },
                Body::Message(_) | Body::Atomic(_) if now >= op.deadline => {
                    path.complete(op.id, Err(Failure::Expired), &mut self.ready);
                }
                Body::Atomic(atomic) => {
                    path.begin_atomic(op, atomic, self.worker.hazard(), &self.clock, &mut self.ready);
                }
                Body::Message(payload) if payload.len() > self.capabilities.max_message_bytes => {
                    path.complete(op.id, Err(Refusal::Malformed.into()), &mut self.ready);
                }
                Body::Message(payload) => path.send_message(op.id, op.deadline, payload, &mut self.ready),
                // Memory has nothing to be committed.
                Body::Commit(_) => path.complete(op.id, Ok(weft_protocol::Done::default()), &mut self.ready),
            }
        }
        path.pump_bounces(&self.clock, &mut self.ready);
        self.watch_room(at);
        self.pump_devices(now);
        Ok(accepted)
    }

    fn cancel(&mut self, path: PathId, op: OpId, _now: Time) {
        if let Some(at) = self.path_index(path) {
            self.paths[at].cancel(op, &mut self.ready);
            self.cancel_flight(path, op);
        }
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        self.inline_bytes = self.options.inline_bytes_max;
        self.land(now);
        // Straight after a post this only tells what came of it, so that the poster is not made to do the copying.
        if std::mem::take(&mut self.posted) {
            self.deliver(signals);
            return Progress::Busy;
        }
        // Nor is a device's word waited for by way of the sockets.
        if (!self.ready.is_empty() || self.is_only_flying()) && self.quick_polls < QUICK_POLLS {
            self.quick_polls += 1;
            self.deliver(signals);
            return Progress::Busy;
        }
        self.quick_polls = 0;
        let mut busy = self.take_events(now);
        self.expire(now);
        self.copy_a_turn(now);
        for at in 0..self.paths.len() {
            self.paths[at].pump_bounces(&self.clock, &mut self.ready);
            self.watch_room(at);
        }
        self.bury_broken();
        self.deliver(signals);
        busy |= self.paths.iter().any(|path| !path.queue.is_empty()) || self.is_any_flying();
        if busy { Progress::Busy } else { Progress::Idle }
    }
}

impl Live for SharedMemory {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }

    fn next_timeout(&self) -> Option<Time> {
        if !self.ready.is_empty()
            || self
                .paths
                .iter()
                .any(|path| !path.queue.is_empty() || path.broken.is_some())
            || self.is_any_flying()
        {
            return Some(Time::ZERO);
        }
        self.paths.iter().filter_map(Path::next_timeout).min()
    }

    fn borrow(&mut self, path: PathId, key: &RegionKey) -> Result<Option<Arc<dyn Seen>>, Failure> {
        let closed = |loss| Failure::PathLost { loss, fenced: true };
        self.request_map(path, *key).map_err(closed)?;
        self.mapping(path, key)
    }
}

impl SharedMemory {
    fn deliver(&mut self, signals: &mut Vec<Signal>) {
        for signal in self.ready.drain(..) {
            if let Signal::Completed { path, .. } = &signal
                && let Ok(at) = self.paths.binary_search_by_key(path, |p| p.id)
            {
                self.paths[at].inflight -= 1;
            }
            signals.push(signal);
        }
    }

    fn add_path(&mut self, socket: Socket, opener: bool, now: Time) -> Result<PathId, Loss> {
        let id = PathId(self.next_path);
        let mut watch = Watch::new(&self.poller, id, &socket).map_err(|error| loss_of(&error))?;
        let until = now.saturating_add(self.options.handshake_max);
        let peer = Handshake::Awaited { until, opener };
        // A process that cannot be watched is not copied to or from: its number alone says too little.
        let process = Process::at_end_of(&socket).filter(|process| watch.process(process).is_ok());
        let mut path = Path::new(id, watch, socket, process, self.options.foreign, peer);
        let hello = Frame::Hello {
            epoch: self.epoch,
            hazard_tag: id.0,
        };
        path.introduce(&hello, &[self.ledger.file(), self.worker.hazard().file()])?;
        self.next_path = self
            .next_path
            .checked_add(1)
            .expect("fewer than 2^32 paths in one life");
        self.paths.push(path);
        self.watch_room(self.paths.len() - 1);
        Ok(id)
    }

    /// `true` where something may be left to take.
    fn take_events(&mut self, now: Time) -> bool {
        let mut more = false;
        for event in self.poller.events() {
            match event {
                Event::Caller => {
                    self.accept(now);
                    // Callers introduce themselves at once.
                    more = true;
                }
                Event::Path(id) => match self.path_index(id) {
                    Some(at) => more |= self.receive(at),
                    None => self
                        .lingering
                        .retain_mut(|lingering| lingering.id != id || lingering.close()),
                },
                Event::Ended(id) => match self.path_index(id) {
                    // What it said before comes first.
                    Some(at) if self.receive(at) => more = true,
                    Some(at) => {
                        self.paths[at].broken.get_or_insert(Loss::ClosedByPeer);
                    }
                    None => self.lingering.retain(|lingering| lingering.id != id),
                },
            }
        }
        self.lingering.retain(Lingering::may_be_inside);
        more
    }

    fn accept(&mut self, now: Time) {
        for _ in 0..CALLERS_A_TURN {
            match Socket::accept(self.listener.as_fd()) {
                // Another user's caller is hung up on, and sees it at once.
                Ok(socket) if !socket.is_of_own_user() => {}
                Ok(socket) => {
                    self.thin_out_strangers();
                    // So is one beyond the limit.
                    if self.paths.len() + self.lingering.len() >= self.options.paths_max {
                        continue;
                    }
                    // A caller that has gone again, or cannot be introduced to, is hung up on as well.
                    let _ = self.add_path(socket, false, now);
                }
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    // The kernel says so before it looks whether anybody calls: so give one up, and look.
                    self.reserve = None;
                    let caller = Socket::accept(self.listener.as_fd());
                    let nobody = caller.is_err();
                    drop(caller);
                    self.reserve = reserve_descriptor().ok();
                    if nobody {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// Makes room for one more caller that has not introduced itself.
    fn thin_out_strangers(&mut self) {
        let is_stranger = |path: &&Path| matches!(path.peer, Handshake::Awaited { opener: false, .. });
        if self.paths.iter().filter(is_stranger).count() < MAX_STRANGERS {
            return;
        }
        let Some(at) = self.paths.iter().position(|path| is_stranger(&path)) else {
            return;
        };
        // Many may have called at once: what the oldest has to say could be there already.
        self.receive(at);
        if is_stranger(&&self.paths[at]) {
            self.lose(at, Loss::Silent);
        }
    }

    /// Takes what a path has received. `true` where something may be left.
    fn receive(&mut self, at: usize) -> bool {
        let mut bounces = 0;
        for _ in 0..DATAGRAMS_A_TURN {
            if self.paths[at].broken.is_some() {
                return false;
            }
            match self.paths[at].socket.receive(&mut self.datagram) {
                Ok(Received::Nothing) => {
                    let path = &mut self.paths[at];
                    path.flush(&mut self.ready);
                    return false;
                }
                Ok(Received::Datagram { len, files, files_lost }) => {
                    bounces += usize::from(self.on_datagram(at, len, files, files_lost));
                    if bounces == BOUNCES_A_TURN {
                        return true;
                    }
                }
                Ok(Received::Closed) => {
                    self.paths[at].broken.get_or_insert(Loss::ClosedByPeer);
                }
                Err(error) => {
                    self.paths[at].broken.get_or_insert(loss_of(&error));
                }
            }
        }
        true
    }

    /// `true` where it made us copy.
    fn on_datagram(&mut self, at: usize, len: usize, files: Files, files_lost: bool) -> bool {
        let path = &mut self.paths[at];
        let Ok(frame) = Frame::decode(&self.datagram[..len]) else {
            path.broken = Some(Loss::Garbage);
            return false;
        };
        let [first, second] = files;
        let awaited = match path.peer {
            Handshake::Awaited { opener, .. } => Some(opener),
            Handshake::Complete { .. } => None,
        };
        match (frame, awaited) {
            (Frame::Hello { hazard_tag, .. }, Some(opener)) => {
                if files_lost {
                    path.broken = Some(Loss::System(libc::EMFILE));
                    return false;
                }
                let ledger = first.and_then(|file| LedgerView::new(file.as_fd()));
                let hazard = second.and_then(|file| HazardView::new(file.as_fd(), hazard_tag));
                let (Some(ledger), Some(hazard)) = (ledger, hazard) else {
                    path.broken = Some(Loss::Garbage);
                    return false;
                };
                path.peer = Handshake::Complete {
                    ledger: Arc::new(ledger),
                    hazard,
                };
                let path = path.id;
                self.ready.push(if opener {
                    Signal::Opened { path }
                } else {
                    Signal::Accepted { path }
                });
            }
            (Frame::Message(payload), None) => self.ready.push(Signal::Message {
                path: path.id,
                payload: payload.to_vec(),
            }),
            (Frame::Arrived(arrival), None) => self.ready.push(Signal::Arrived { path: path.id, arrival }),
            (Frame::Ask { ask, key }, None) => {
                let (answer, files) = answer(&self.table, &self.entries, &key);
                if let Ok(answer) = &answer
                    && answer.access != Access::NONE
                {
                    path.given.insert(answer.entry);
                }
                path.reply(&Frame::Answer { ask, answer }, files);
            }
            (Frame::Answer { ask, answer }, None) => self.on_answer(at, ask, answer, first, files_lost),
            (Frame::Forget(entry), None) => path.targets.retain(|_, target| target.entry != entry),
            (Frame::Ring, None) => match first.and_then(|file| Ring::attach(file.as_fd())) {
                Some(ring) => path.peer_ring = Some(ring),
                None => path.broken = Some(Loss::System(libc::ENOMEM)),
            },
            (Frame::Bounce(bounce), None) => {
                let slot = bounce.slot;
                let result = match &path.peer_ring {
                    Some(ring) => ring.serve(&bounce, &self.table, mono_now_ns()),
                    None => Err(Refusal::Malformed),
                };
                path.reply(&Frame::Bounced { slot, result }, Vec::new());
                return true;
            }
            (Frame::Bounced { slot, result }, None) => {
                if !path.on_bounced(slot, result, &mut self.ready) {
                    path.broken = Some(Loss::Garbage);
                }
            }
            (Frame::Atomic(ask), None) => {
                let found = if mono_now_ns() >= ask.deadline_mono_ns {
                    Err(Refusal::Late)
                } else {
                    self.table.atomic(&ask.key, ask.offset, ask.act)
                };
                path.reply(&Frame::AtomicAnswer { ask: ask.ask, found }, Vec::new());
            }
            (Frame::AtomicAnswer { ask, found }, None) => {
                if !path.on_atomic_answer(ask, found, &mut self.ready) {
                    path.broken = Some(Loss::Garbage);
                }
            }
            // A second introduction, or anything before the first.
            (Frame::Hello { .. }, None) | (_, Some(_)) => path.broken = Some(Loss::Garbage),
        }
        false
    }

    fn on_answer(
        &mut self,
        at: usize,
        ask: u32,
        answer: Result<Answer, Refusal>,
        file: Option<OwnedFd>,
        files_lost: bool,
    ) {
        let path = &mut self.paths[at];
        let Some(key) = path.asks.remove(&ask) else {
            path.broken = Some(Loss::Garbage);
            return;
        };
        let no_room = |errno| {
            Err(Failure::PathLost {
                loss: Loss::System(errno),
                fenced: true,
            })
        };
        let found = match answer {
            Err(refusal) => Err(refusal.into()),
            Ok(_) if files_lost => no_room(libc::EMFILE),
            Ok(answer) => match Target::new(answer, file, path.is_within_this_process()) {
                Ok(target) => Ok(target),
                Err(Unusable::NoRoom) => no_room(libc::ENOMEM),
                // Another way may copy what cannot be mapped.
                Err(Unusable::Unsafe) => Err(Refusal::Unsupported.into()),
                Err(Unusable::Garbage) => {
                    path.broken = Some(Loss::Garbage);
                    return;
                }
            },
        };
        if let Ok(target) = &found {
            if path.targets.len() >= MAX_TARGETS {
                let ledger = path.ledger().cloned();
                path.targets
                    .retain(|_, target| ledger.as_ref().is_some_and(|ledger| ledger.is_live(target.entry)));
                // Still too many: any one goes, and is asked for again when it is needed.
                if path.targets.len() >= MAX_TARGETS
                    && let Some(key) = path.targets.keys().next().copied()
                {
                    path.targets.remove(&key);
                }
            }
            path.targets.insert(key, Arc::clone(target));
        }
        path.resume_atomics(key, &found, self.worker.hazard(), &self.clock, &mut self.ready);
        path.on_target(key, found, &mut self.ready);
    }

    fn expire(&mut self, now: Time) {
        for path in &mut self.paths {
            path.expire(now, &mut self.ready);
            let id = path.id;
            path.bouncer.expire(id, now, &mut self.ready);
            if matches!(path.peer, Handshake::Awaited { until, .. } if now >= until) {
                path.broken.get_or_insert(Loss::Silent);
            }
        }
    }

    /// Copies for the paths in turn, a part of a move at a time, until this call has done its share.
    fn copy_a_turn(&mut self, now: Time) {
        let busy = self.paths.iter().filter(|path| !path.queue.is_empty()).count();
        if busy == 0 {
            return;
        }
        // As large as the paths' turns allow, because only a large part is worth a second core.
        let chunk = (self.options.poll_bytes_max / busy as u64).max(MIN_CHUNK_BYTES);
        let mut left = self.options.poll_bytes_max;
        while left > 0 && self.paths.iter().any(|path| !path.queue.is_empty()) {
            self.turn = (self.turn + 1) % self.paths.len();
            let path = &mut self.paths[self.turn];
            path.now = now;
            let copied = path.turn(&mut self.worker, chunk.min(left), &mut self.ready);
            left = left.saturating_sub(copied);
        }
    }

    fn watch_room(&mut self, at: usize) {
        let path = &mut self.paths[at];
        let wanted = !path.outbox.is_empty();
        if path.watches_room != wanted && path.broken.is_none() {
            match self.poller.watch_room(path.id, &path.socket, wanted) {
                Ok(()) => path.watches_room = wanted,
                Err(error) => path.broken = Some(loss_of(&error)),
            }
        }
    }

    fn bury_broken(&mut self) {
        let mut at = 0;
        while at < self.paths.len() {
            let broken = self.paths[at].broken;
            if !broken.is_some_and(|loss| self.lose(at, loss)) {
                at += 1;
            }
        }
    }

    /// `false` where a device is copying on the path: until that has ended nothing else happens on it, and its peer is not told either, who would take what it was
    /// given for left.
    fn lose(&mut self, at: usize, loss: Loss) -> bool {
        let path = &mut self.paths[at];
        let loss = *path.broken.get_or_insert(loss);
        path.end(loss, &mut self.ready);
        if self.is_flying_on(self.paths[at].id) {
            return false;
        }
        let path = self.paths.remove(at);
        let fenced = path.fenced;
        // A caller that never introduced itself was never announced, so nobody misses it.
        if !matches!(path.peer, Handshake::Awaited { opener: false, .. }) {
            self.ready.push(Signal::Lost {
                path: path.id,
                loss,
                fenced,
            });
        }
        // A peer that lives may be in the middle of a copy from or into what it was given; its hazard counts until its end of the
        // socket is closed too, and that of its devices even longer.
        if !path.given.is_empty()
            && let Some(hazard) = path.hazard().cloned()
        {
            path.socket.finish_sending();
            let watched = loss != Loss::ClosedByPeer && self.poller.watch_end(path.id, &path.socket).is_ok();
            let mut lingering = Lingering {
                id: path.id,
                watch: path.watch,
                _socket: path.socket,
                process: path.process,
                hazard,
                given: path.given,
                closed: false,
            };
            if watched || lingering.close() {
                self.lingering.push(lingering);
            }
        }
        true
    }
}

/// What a peer that presents a key is told, and given.
fn answer(
    table: &weft_protocol::RegionTable,
    entries: &std::collections::HashMap<RegionKey, Admitted>,
    key: &RegionKey,
) -> (Result<Answer, Refusal>, Vec<OwnedFd>) {
    let region = match table.lookup(key) {
        Ok(region) => region,
        Err(refusal) => return (Err(refusal), Vec::new()),
    };
    let Some(admitted) = entries.get(key) else {
        return (Err(Refusal::Unsupported), Vec::new());
    };
    let mut answer = Answer {
        len: region.memory.len(),
        access: region.access,
        entry: admitted.entry,
        // Nobody is told where memory lies that nobody may touch.
        foreign: Some(0),
        device: None,
    };
    if region.access == Access::NONE {
        return (Ok(answer), Vec::new());
    }
    if let Some(memory) = region.memory.as_any().downcast_ref::<CudaMemory>() {
        let memory = memory.device_memory();
        let Ok(exported) = memory.export() else {
            return (Err(Refusal::Unsupported), Vec::new());
        };
        answer.foreign = None;
        answer.device = Some(OfDevice {
            address: memory.address(),
            export: exported.bytes,
        });
        return (Ok(answer), exported.file.into_iter().collect());
    }
    let Some(memory) = region.memory.as_any().downcast_ref::<HostMemory>() else {
        return (Err(Refusal::Unsupported), Vec::new());
    };
    if let Some(file) = memory.file_for(region.access.write) {
        answer.foreign = None;
        return (Ok(answer), vec![file]);
    }
    answer.foreign = Some(memory.as_ptr() as u64);
    (Ok(answer), Vec::new())
}
