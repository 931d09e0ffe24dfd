//! The rail as a transport: who is called for which completion, and what the rest of the house sees.

mod endings;
mod meeting;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{
    Access, Capabilities, Carriage, Epoch, Grant, Loss, Op, OpId, PathId, PeerAddress, Progress, Refusal, Region,
    RegionKey, Signal, Transport,
};
use weft_sys::verbs as sys;

use super::address::{Doorstep, NAME};
use super::batch::{Batch, Limits};
use super::buffers::{BUFFERS_PER_PATH, Pool};
use super::counters::VerbsCounters;
use super::datagrams::{self, Datagrams};
use super::device::{Device, ProtectionDomain};
use super::message::{MESSAGE_BYTES_MAX, PACKET_BYTES};
use super::number::{self, Completed};
use super::options::{VerbsError, VerbsOptions};
use super::path::{Path, World};
use super::queue::{CompletionQueue, QueuePair, QueueSize, ReceiveQueue};
use super::rail::Rail;
use super::regions::Regions;
use super::registration::{Registrations, RemoteAccess};
use super::setup::Setup;
use super::{INFLIGHT_OPS_MAX, live};
use crate::Clock;
use crate::fork::NotInherited;

/// Completions that are taken at a time.
const COMPLETIONS: usize = 64;
/// How many times, before others get their turn.
const ROUNDS_MAX: usize = 8;
/// Introductions that are looked at in one turn. Whoever is not heard repeats his.
const INTRODUCTIONS_PER_TURN: usize = 4;
/// How often somebody who never sleeps looks whether the device has anything to say.
const EVENTS_EVERY: Time = Time::from_ms(5);
/// What is asked of a device; a part of it will do.
const PIECES_MAX: u32 = 16;
const INLINE_BYTES_MAX: u32 = 256;
/// The largest request. Larger moves are cut, so that a cancel need not wait for all of one.
const REQUEST_BYTES_MAX: u64 = 1 << 20;

/// One rail: a device, one of its ports, one of that port's addresses, and the paths over it.
///
/// Fields are dropped in their order: queue pairs go before the queues and the memory that they use.
#[derive(Debug)]
pub struct Verbs {
    /// In the order of their numbers, which only grow.
    pub(super) paths: Vec<Path>,
    pub(super) datagrams: Datagrams,
    pub(super) setup: Setup,
    receives: Arc<ReceiveQueue>,
    pool: Pool,
    pub(super) completions: Arc<CompletionQueue>,
    regions: Regions,
    registrations: Registrations,
    domain: Arc<ProtectionDomain>,
    pub(super) rail: Rail,
    pub(super) options: VerbsOptions,
    capabilities: Capabilities,
    pub(super) clock: Clock,
    doorstep: Doorstep,
    paths_max: usize,
    queue_size: QueueSize,
    device_atomics: bool,
    batch: Batch,
    pub(super) counters: VerbsCounters,
    /// Which path a queue pair belongs to.
    by_number: HashMap<u32, PathId>,
    last_number: Option<(u32, PathId)>,
    /// What happened outside of [`Transport::poll`].
    pub(super) ready: Vec<Signal>,
    /// No timeout is earlier than this.
    pub(super) earliest: Time,
    pub(super) slept_until: Time,
    next_path: u32,
    taken: Box<[sys::ibv_wc]>,
    /// The last look at the completions that found no more of them.
    dry: u64,
    /// Paths for which something has completed in this round.
    stirred: Vec<PathId>,
    pub(super) wake: NotInherited<OwnedFd>,
    /// The device has been asked to wake a sleeper, and it is not known to have.
    pub(super) armed: bool,
    events_at: Time,
    /// A failed datagram queue pair is not started again before this.
    revive_at: Time,
    /// Introductions that are looked at before the others get their turn.
    introductions_left: usize,
    /// The device has been taken away, and says nothing more.
    pub(super) gone: bool,
    /// Why no path can be opened now.
    down: Option<Loss>,
}

impl Verbs {
    /// Starts a rail. Absence of anything that it needs is told by [`rails`](super::rails) before.
    pub fn start(options: VerbsOptions, rail: Rail, epoch: Epoch, clock: Clock) -> Result<Verbs, VerbsError> {
        options.check()?;
        let failed = |step| move |source| VerbsError::System { step, source };
        // A context of its own: events of the device are told to one listener of each.
        let device = Device::open(rail.device.library(), rail.device.name())?;
        let rail = Rail { device, ..rail };
        let domain = ProtectionDomain::new(&rail.device)?;
        let limits = rail.device.attributes();
        let device_atomics = options
            .atomics
            .by_device(limits.atomic_cap)
            .ok_or(VerbsError::NoAtomics)?;
        let at_most = |limit: i32| u32::try_from(limit).unwrap_or(0);
        let sends = options
            .send_depth
            .clamp(4, at_most(limits.max_qp_wr).saturating_sub(1).max(4));
        // One more than are used, for the request that ends the queue.
        let per_path = sends + 1 + u32::from(BUFFERS_PER_PATH);
        let datagrams = (datagrams::RECEIVES + datagrams::SENDS) as u32;
        let by_completions = at_most(limits.max_cqe).saturating_sub(datagrams) / per_path;
        let by_receives = at_most(limits.max_srq_wr) / u32::from(BUFFERS_PER_PATH);
        let paths_max = (options.paths_max as u64)
            .min(by_completions.into())
            .min(by_receives.into())
            .min(at_most(limits.max_qp).saturating_sub(2).into()) as u32;
        if paths_max == 0 {
            return Err(VerbsError::Device {
                what: "completion queue entries",
                offered: at_most(limits.max_cqe).into(),
                needed: (per_path + datagrams).into(),
            });
        }
        let completions = CompletionQueue::new(&rail.device, datagrams + per_path * paths_max)
            .map_err(failed("making a completion queue"))?;
        let completions = Arc::new(completions);
        let receives = ReceiveQueue::new(&domain, u32::from(BUFFERS_PER_PATH) * paths_max)
            .map_err(failed("making a shared receive queue"))?;
        let receives = Arc::new(receives);
        let mut registrations = Registrations::new(&domain, options.registration);
        let qkey = random().map_err(failed("finding a random number"))? as u32 & 0x7fff_ffff;
        let datagrams = Datagrams::start(&rail, &domain, &completions, &mut registrations, qkey)?;
        let mut queue_size = QueueSize {
            sends: sends + 1,
            receives: 0,
            pieces: at_most(limits.max_sge).clamp(1, PIECES_MAX),
            inline_bytes: INLINE_BYTES_MAX,
        };
        let sample = QueuePair::new(&domain, &completions, Some(&receives), queue_size)
            .map_err(failed("making a queue pair"))?;
        queue_size.inline_bytes = sample.inline_bytes().min(INLINE_BYTES_MAX);
        drop(sample);
        let read_pieces = match at_most(limits.max_sge_rd) {
            0 => queue_size.pieces,
            most => most.min(queue_size.pieces),
        };
        let batch = Batch::new(Limits {
            write_pieces: queue_size.pieces as usize,
            read_pieces: read_pieces as usize,
            request_bytes: u64::from(rail.message_bytes_max.max(PACKET_BYTES as u32)).min(REQUEST_BYTES_MAX),
            inline_bytes: queue_size.inline_bytes,
        });
        let mut cost = options.cost.unwrap_or_else(|| crate::cost_unmeasured(NAME));
        if let (None, Some(bandwidth)) = (options.cost, rail.bandwidth) {
            cost.bandwidth = bandwidth;
        }
        let doorstep = datagrams.doorstep(&rail);
        let setup = Setup::start(&domain, &rail).map_err(failed("starting a thread"))?;
        let watched = [completions.channel(), rail.device.as_fd(), setup.bell()];
        let wake = live::watch(watched).map_err(failed("an epoll descriptor"))?;
        let mut capabilities = Capabilities::new(
            NAME,
            doorstep.address(&rail.name()),
            vec![Carriage::host(cost, 1 << 20)],
        );
        capabilities.max_op_runs = 4096;
        capabilities.max_inflight_ops = INFLIGHT_OPS_MAX;
        capabilities.max_message_bytes = MESSAGE_BYTES_MAX;
        capabilities.reliable_messages = true;
        capabilities.atomics = true;
        capabilities.numa = rail.numa;
        Ok(Verbs {
            paths: Vec::new(),
            datagrams,
            setup,
            receives,
            pool: Pool::default(),
            completions,
            regions: Regions::new(epoch),
            registrations,
            domain,
            capabilities,
            rail,
            options: VerbsOptions {
                send_depth: sends,
                ..options
            },
            clock,
            doorstep,
            paths_max: paths_max as usize,
            queue_size,
            device_atomics,
            batch,
            counters: VerbsCounters::default(),
            by_number: HashMap::new(),
            last_number: None,
            ready: Vec::new(),
            earliest: Time::MAX,
            slept_until: Time::ZERO,
            next_path: 0,
            taken: vec![sys::ibv_wc::default(); COMPLETIONS].into(),
            dry: 0,
            stirred: Vec::new(),
            wake,
            armed: false,
            events_at: Time::ZERO,
            revive_at: Time::ZERO,
            introductions_left: 0,
            gone: false,
            down: None,
        })
    }

    /// What it has done so far.
    pub fn counters(&self) -> VerbsCounters {
        self.counters
    }

    pub fn rail(&self) -> &Rail {
        &self.rail
    }

    fn path_index(&self, id: PathId) -> Option<usize> {
        self.paths.binary_search_by_key(&id, |path| path.id).ok()
    }

    /// The paths, what they need of the rest, and what has been received for them.
    fn split(&mut self, now: Time) -> (&mut Vec<Path>, World<'_>, &Pool) {
        let world = World {
            regions: &mut self.regions,
            signals: &mut self.ready,
            batch: &mut self.batch,
            counters: &mut self.counters,
            options: &self.options,
            rail: &self.rail,
            dry: self.dry,
            device_atomics: self.device_atomics,
            now,
            clock: self.clock,
        };
        (&mut self.paths, world, &self.pool)
    }

    /// Runs `act` on a path with what it needs of the rest, sends what it has to say to its peer outside of the path, and has done
    /// what takes long.
    fn with_path<T>(&mut self, id: PathId, now: Time, act: impl FnOnce(&mut Path, &mut World<'_>) -> T) -> Option<T> {
        let index = self.path_index(id)?;
        let (paths, mut world, _) = self.split(now);
        let result = act(&mut paths[index], &mut world);
        let path = &mut self.paths[index];
        self.earliest = self.earliest.min(path.own_timeout());
        if let Some(route) = &path.route {
            for letter in path.letters.drain(..) {
                self.datagrams.send(&letter, &path.peer, route);
            }
        }
        for errand in path.errands.drain(..) {
            self.setup.send(errand);
        }
        Some(result)
    }

    /// Takes completions until there are none, and does what follows from them. True if there were any.
    pub(super) fn turn(&mut self, now: Time) -> bool {
        let mut taken = std::mem::take(&mut self.taken);
        let (mut any, mut empty) = (false, false);
        self.introductions_left = INTRODUCTIONS_PER_TURN;
        for _ in 0..ROUNDS_MAX {
            let count = self.completions.poll(&mut taken);
            self.counters.polls += 1;
            self.counters.completions += count as u64;
            for completion in &taken[..count] {
                self.on_completion(completion, now);
            }
            if count > 0 {
                any = true;
                self.follow_up(now);
            }
            if count < taken.len() {
                empty = true;
                self.dry = self.counters.polls;
                break;
            }
        }
        self.taken = taken;
        any |= self.hear_of_errands(now);
        if self.datagrams.is_broken() && now >= self.revive_at {
            self.revive_datagrams(now);
        }
        if now >= self.earliest {
            self.on_timeout(now);
        }
        let failing = self.paths.iter().any(Path::is_failing);
        if now >= self.events_at || failing {
            self.look_at_events(now);
        }
        // A queue pair's number may be given to the next one, so its last completions are taken before it goes.
        if empty && failing {
            self.reap(now);
        }
        any
    }

    fn on_completion(&mut self, completion: &sys::ibv_wc, now: Time) {
        match number::completed(completion.wr_id) {
            Completed::Request(id) => {
                let stirred = self.with_path(id, now, |path, world| {
                    path.on_sent(completion, world);
                    path.is_stirred()
                });
                if stirred == Some(true) {
                    self.stir(id);
                }
            }
            Completed::Receive(buffer) => {
                if let Some(id) = self.path_of(completion.qp_num) {
                    self.on_received(id, buffer, completion, now);
                    self.stir(id);
                }
                self.pool.spend(buffer);
            }
            Completed::Datagram(place, life) => {
                if let Some((letter, from)) = self.datagrams.received(place, life, completion, &self.rail) {
                    self.on_letter(letter, from, now);
                }
            }
            Completed::DatagramSent(place, life) => self.datagrams.sent(place, life, completion),
        }
    }

    fn on_received(&mut self, id: PathId, buffer: u32, completion: &sys::ibv_wc, now: Time) {
        let Some(index) = self.path_index(id) else { return };
        let (paths, mut world, pool) = self.split(now);
        let path = &mut paths[index];
        if completion.status != sys::IBV_WC_SUCCESS {
            path.lose(Loss::Garbage, &mut world);
        } else if completion.opcode == sys::IBV_WC_RECV_RDMA_WITH_IMM {
            path.on_immediate(u32::from_be(completion.imm_data), &mut world);
        } else {
            match pool.received(buffer, completion.byte_len) {
                Some(bytes) => path.on_packet(bytes, &mut world),
                None => path.lose(Loss::Garbage, &mut world),
            }
        }
    }

    fn path_of(&mut self, number: u32) -> Option<PathId> {
        match self.last_number {
            Some((last, id)) if last == number => Some(id),
            _ => {
                let id = *self.by_number.get(&number)?;
                self.last_number = Some((number, id));
                Some(id)
            }
        }
    }

    fn stir(&mut self, id: PathId) {
        if self.stirred.last() != Some(&id) {
            self.stirred.push(id);
        }
    }

    /// Gives buffers back to the device, and only then lets peers know of them; hands over what has become possible.
    fn follow_up(&mut self, now: Time) {
        // Where it fails the device is gone, of which an event tells.
        let _ = self.pool.offer_spent(&self.receives, number::receive);
        let mut stirred = std::mem::take(&mut self.stirred);
        for id in stirred.drain(..) {
            self.with_path(id, now, |path, world| path.pump_if_stirred(world));
        }
        self.stirred = stirred;
    }

    fn on_timeout(&mut self, now: Time) {
        let (options, doorstep) = (&self.options, self.doorstep.clone());
        let due = self.paths.iter().filter(|path| path.next_timeout(options) <= now);
        let due: Vec<PathId> = due.map(|path| path.id).collect();
        for id in due {
            self.with_path(id, now, |path, world| {
                path.on_timeout(&doorstep, world);
                path.pump_if_stirred(world);
            });
        }
        self.registrations.sweep(now);
        self.earliest = self.next_due();
    }

    /// When something must be done even if nothing comes in.
    pub(super) fn next_due(&self) -> Time {
        let paths = self.paths.iter().map(|path| path.next_timeout(&self.options));
        let kept = self.registrations.next_timeout();
        let revival = self.datagrams.is_broken().then_some(self.revive_at);
        let kept = kept.into_iter().chain(revival);
        paths.chain(kept).min().unwrap_or(Time::MAX)
    }
}

impl Transport for Verbs {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        if region.key.epoch != self.regions.table.epoch() {
            return Err(Refusal::StaleEpoch);
        }
        let registration = if region.memory.is_empty() {
            None
        } else {
            let access = RemoteAccess {
                atomic: self.device_atomics && region.access == Access::READ_WRITE,
                ..region.access.into()
            };
            let registered = self.registrations.register(&region.memory, access);
            Some(registered.map_err(|_| Refusal::Unsupported)?)
        };
        self.regions.insert(region, registration);
        Ok(Grant::default())
    }

    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        let now = self.clock.now();
        if self.regions.revoke(key, now.saturating_add(self.options.release_max))? {
            let ids: Vec<PathId> = self.paths.iter().map(|path| path.id).collect();
            for id in ids {
                self.with_path(id, now, |path, world| path.release(key, world));
            }
        }
        let inside = self.paths.iter().any(|path| path.is_inside(key));
        let granted = self.paths.iter().any(|path| path.is_granted(key));
        if inside || granted && !self.regions.is_overdue(key, now) {
            return Ok(Progress::Busy);
        }
        if let Some(registration) = self.regions.finish_release(key) {
            self.registrations.release(registration, now);
            self.earliest = self
                .earliest
                .min(self.registrations.next_timeout().unwrap_or(Time::MAX));
        }
        Ok(Progress::Idle)
    }

    fn open(&mut self, peer: &PeerAddress, now: Time) -> Result<PathId, Loss> {
        let peer = Doorstep::parse(peer).ok_or(Loss::Unreachable)?;
        if let Some(loss) = self.down {
            return Err(loss);
        }
        let token = random().map_err(|error| system(&error))?;
        let parts = self.parts(token, peer)?;
        let number = (parts.pair.number(), parts.id);
        let doorstep = self.doorstep.clone();
        let (_, world, _) = self.split(now);
        let path = Path::introducing(parts, doorstep, &world);
        self.insert(path, number, now);
        Ok(number.1)
    }

    /// Reads and writes are the device's own, by a key that only a session tells; its queue pair asks nobody.
    fn vouch(&mut self, _path: PathId) {}

    fn close(&mut self, path: PathId) {
        let now = self.clock.now();
        self.with_path(path, now, |path, world| path.close(world));
    }

    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        let mut earliest = self.earliest;
        let accepted = self.with_path(path, now, |path, world| {
            if !path.is_open() {
                return Err(Loss::Closed);
            }
            let mut accepted = 0;
            for op in ops {
                if !path.take(op, world) {
                    break;
                }
                earliest = earliest.min(op.deadline);
                accepted += 1;
            }
            path.pump(world);
            Ok(accepted)
        });
        self.earliest = self.earliest.min(earliest);
        accepted.unwrap_or(Err(Loss::Closed))
    }

    fn cancel(&mut self, path: PathId, op: OpId, now: Time) {
        self.with_path(path, now, |path, world| path.cancel(op, world));
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        let any = self.turn(now);
        let said = !self.ready.is_empty();
        signals.append(&mut self.ready);
        // A sleeper that does not know of a new timeout must be told.
        let hurry = self.earliest < self.slept_until;
        if hurry {
            self.slept_until = Time::ZERO;
        }
        if any || said || hurry {
            Progress::Busy
        } else {
            Progress::Idle
        }
    }
}

fn system(error: &std::io::Error) -> Loss {
    Loss::System(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Random bits that nobody can guess.
fn random() -> std::io::Result<u128> {
    let mut bytes = [0u8; 16];
    // SAFETY: the buffer is ours and its length is given.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if n == bytes.len() as isize {
        Ok(u128::from_le_bytes(bytes))
    } else {
        Err(std::io::Error::last_os_error())
    }
}
