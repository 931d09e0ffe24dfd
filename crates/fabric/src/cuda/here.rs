//! Moves among this agent's own places where one of them is a device: host to device and back, and from device memory to device memory.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use weft_plan::{Bandwidth, LinkCost, Picos, PlaceKind, Time};
use weft_protocol::{
    Body, Capabilities, Carriage, Done, Epoch, Failure, Grant, Loss, Memory, Move, Op, OpId, PathId, PeerAddress,
    Progress, Refusal, Region, RegionKey, RegionTable, Signal, Transport,
};

use super::{Begun, CudaMemory, Devices, Flight, Job, Sums, device_of};
use crate::Live;
use crate::fork::NotInherited;
use crate::here::{HerePaths, LOST};
use crate::memory::HostMemory;

const NAME: &str = "cuda";
/// A launch and its end take so long, whatever is copied.
const LAUNCH: Picos = Picos::from_us(10);
const INFLIGHT_MAX: usize = 256;

/// What moving device memory is taken to cost where nobody has measured it: within a device, and over the bus.
pub(crate) fn carriages() -> Vec<Carriage> {
    let cost = |gigabytes: u64| LinkCost {
        latency: LAUNCH,
        per_span: Picos::from_ns(2),
        bandwidth: Bandwidth::from_bytes_per_sec(gigabytes * 1_000_000_000),
    };
    let (within, bus) = (cost(1500), cost(50));
    vec![
        Carriage::new(PlaceKind::Gpu, PlaceKind::Gpu, within, 256 << 20),
        Carriage::new(PlaceKind::Gpu, PlaceKind::Dram, bus, 16 << 20),
        Carriage::new(PlaceKind::Dram, PlaceKind::Gpu, bus, 16 << 20),
    ]
}

/// The transport of an agent's own devices. It has no peers.
#[derive(Debug)]
pub struct CudaHere {
    /// First, so that it waits for what is under way before anything goes that it touches.
    devices: Devices,
    capabilities: Capabilities,
    epoch: Epoch,
    table: RegionTable,
    /// What its owner wants back, and a device is in the middle of.
    releasing: Vec<(RegionKey, Arc<dyn Memory>)>,
    paths: HerePaths,
    waiting: VecDeque<Running>,
    flying: Vec<(Flight, u64, Running)>,
    ready: Vec<Signal>,
    /// Never readable: what is under way is looked after, not waited for.
    silent: NotInherited<OwnedFd>,
}

#[derive(Debug)]
struct Running {
    path: PathId,
    id: OpId,
    deadline: Time,
    part: Move,
    at: u64,
    sums: Sums,
    /// What is left of it is not wanted any more.
    cancelled: bool,
    /// Its path has gone meanwhile.
    lost: bool,
}

impl Running {
    fn uses(&self, key: &RegionKey) -> bool {
        self.part.leg.local().key == *key || self.part.leg.remote().key == *key
    }
}

impl CudaHere {
    /// Whether there may be devices, without loading anything.
    pub fn is_likely() -> bool {
        weft_gpu::is_likely()
    }

    /// Loads nothing: whoever registers memory of a device has done so. `stay`: how long a device's worker stays for the next copy, once several have followed each
    /// other as soon.
    pub fn start(epoch: Epoch, stay: Duration) -> io::Result<CudaHere> {
        let silent = crate::bell::silent()?;
        let mut capabilities = Capabilities::new(NAME, PeerAddress(format!("{NAME}:here")), carriages());
        capabilities.max_op_runs = 16_384;
        capabilities.max_inflight_ops = INFLIGHT_MAX;
        Ok(CudaHere {
            capabilities,
            epoch,
            table: RegionTable::new(epoch),
            releasing: Vec::new(),
            devices: Devices::new(stay),
            paths: HerePaths::default(),
            waiting: VecDeque::new(),
            flying: Vec::new(),
            ready: Vec::new(),
            silent,
        })
    }

    fn complete(&mut self, path: PathId, op: OpId, outcome: Result<Done, Failure>) {
        self.ready.push(Signal::Completed { path, op, outcome });
    }

    /// Begins what there is room for.
    fn pump(&mut self, now: Time) {
        while let Some(mut running) = self.waiting.pop_front() {
            if now >= running.deadline {
                self.complete(running.path, running.id, Err(Failure::Expired));
                continue;
            }
            match self.begin(&running) {
                Ok(Begun::NoRoom) => {
                    self.waiting.push_front(running);
                    return;
                }
                Ok(Begun::UnderWay { flight, end }) => self.flying.push((flight, end, running)),
                Ok(Begun::Ended { sums, end }) => {
                    running.sums = running.sums.add(sums);
                    self.go_on(running, end);
                    // It was waited for: others have their turn first.
                    return;
                }
                Err(refusal) => self.complete(running.path, running.id, Err(refusal.into())),
            }
        }
    }

    fn begin(&mut self, running: &Running) -> Result<Begun, Refusal> {
        let leg = &running.part.leg;
        let near = self.table.check_own(&leg.local().key, leg.local_spans())?;
        let far = self.table.check_own(&leg.remote().key, leg.remote_spans())?;
        let unsupported = Refusal::Unsupported;
        let device = device_of(&*near.memory).or_else(|| device_of(&*far.memory));
        let device = device.ok_or(unsupported)?;
        let job = Job {
            direction: running.part.direction,
            leg,
            range: running.at..running.part.range.end,
            near: self.devices.end_of(&*near.memory, device).ok_or(unsupported)?,
            far: self.devices.end_of(&*far.memory, device).ok_or(unsupported)?,
            checksum: running.part.checksum,
        };
        // SAFETY: both regions are registered, and are not let go of while a move uses them.
        unsafe { self.devices.begin(&job, &mut |_, _| Err(unsupported)) }
    }

    /// A part of a move has been copied: it is done, or has to go on.
    fn go_on(&mut self, mut running: Running, end: u64) {
        if end < running.part.range.end {
            running.at = end;
            // What is left is begun only if it is still wanted; whether its memory is still there is looked at then.
            return match running.cancelled {
                true => self.complete(running.path, running.id, Err(Failure::Cancelled)),
                false => self.waiting.push_back(running),
            };
        }
        let sums = running.part.checksum.then_some(running.sums);
        let done = Done::moved(sums.map(|sums| sums.far), sums.map(|sums| sums.near));
        self.complete(running.path, running.id, Ok(done));
        if let Some(arrival) = running.part.arrival {
            let path = running.path;
            self.ready.push(Signal::Arrived { path, arrival });
        }
    }

    fn land(&mut self) {
        let mut at = 0;
        while at < self.flying.len() {
            let Some(ended) = self.devices.look(&self.flying[at].0) else {
                at += 1;
                continue;
            };
            let (flight, end, mut running) = self.flying.swap_remove(at);
            // Pages stay pinned for as long as it is held; what they are pages of only for as long as what is ended below.
            drop(flight);
            match ended {
                _ if running.lost => {
                    self.complete(running.path, running.id, Err(LOST));
                    self.tell_lost(running.path);
                }
                Ok(sums) => {
                    running.sums = running.sums.add(sums);
                    self.go_on(running, end);
                }
                Err(refusal) => self.complete(running.path, running.id, Err(refusal.into())),
            }
        }
    }

    /// Says that a path has gone, once nothing is copied on it any more.
    fn tell_lost(&mut self, path: PathId) {
        let under_way = self.flying.iter().any(|(_, _, running)| running.path == path);
        self.paths.end(path, under_way, &mut self.ready);
    }
}

impl Transport for CudaHere {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn register(&mut self, region: &Region) -> Result<Grant, Refusal> {
        if region.key.epoch != self.epoch {
            return Err(Refusal::StaleEpoch);
        }
        let memory = region.memory.as_any();
        if !memory.is::<CudaMemory>() && !memory.is::<HostMemory>() {
            return Err(Refusal::Unsupported);
        }
        if self.table.lookup(&region.key).is_err() {
            self.table.insert(region.clone());
        }
        Ok(Grant::default())
    }

    fn release(&mut self, key: &RegionKey) -> Result<Progress, Refusal> {
        if let Some(region) = self.table.remove(key) {
            self.releasing.push((*key, region.memory));
            for at in (0..self.waiting.len()).rev() {
                if self.waiting[at].uses(key)
                    && let Some(running) = self.waiting.remove(at)
                {
                    self.complete(running.path, running.id, Err(Refusal::Released.into()));
                }
            }
        }
        let Some(at) = self.releasing.iter().position(|(known, _)| known == key) else {
            return Err(self.table.lookup(key).err().unwrap_or(Refusal::UnknownKey));
        };
        if self.flying.iter().any(|(_, _, running)| running.uses(key)) {
            return Ok(Progress::Busy);
        }
        let (_, memory) = self.releasing.swap_remove(at);
        self.devices.forget(&*memory);
        Ok(Progress::Idle)
    }

    fn open(&mut self, peer: &PeerAddress, _now: Time) -> Result<PathId, Loss> {
        self.paths.open(peer, &self.capabilities.address, &mut self.ready)
    }

    fn vouch(&mut self, _path: PathId) {}

    fn close(&mut self, path: PathId) {
        if !self.paths.close(path) {
            return;
        }
        while let Some(at) = self.waiting.iter().position(|running| running.path == path)
            && let Some(running) = self.waiting.remove(at)
        {
            self.complete(path, running.id, Err(LOST));
        }
        // The device cannot be stopped, and is not waited for here: each of these ends when the device has ended, and the path after them.
        for (_, _, running) in &mut self.flying {
            running.lost |= running.path == path;
        }
        self.tell_lost(path);
    }

    fn post(&mut self, path: PathId, ops: &[Op], now: Time) -> Result<usize, Loss> {
        if !self.paths.is_open(path) {
            return Err(Loss::Closed);
        }
        let room = INFLIGHT_MAX.saturating_sub(self.waiting.len() + self.flying.len());
        let accepted = ops.len().min(room);
        for op in &ops[..accepted] {
            match &op.body {
                Body::Move(part) if part.range.start > part.range.end || part.range.end > part.leg.bytes() => {
                    self.complete(path, op.id, Err(Refusal::Malformed.into()));
                }
                Body::Move(part) => self.waiting.push_back(Running {
                    path,
                    id: op.id,
                    deadline: op.deadline,
                    at: part.range.start,
                    part: part.clone(),
                    sums: Sums::default(),
                    cancelled: false,
                    lost: false,
                }),
                // Memory has nothing to be committed.
                Body::Commit(_) => self.complete(path, op.id, Ok(Done::default())),
                Body::Message(_) | Body::Atomic(_) => self.complete(path, op.id, Err(Refusal::Unsupported.into())),
            }
        }
        self.pump(now);
        Ok(accepted)
    }

    fn cancel(&mut self, path: PathId, op: OpId, _now: Time) {
        let found = self
            .waiting
            .iter()
            .position(|running| (running.path, running.id) == (path, op));
        if let Some(running) = found.and_then(|at| self.waiting.remove(at)) {
            return self.complete(path, running.id, Err(Failure::Cancelled));
        }
        // What the device is copying ends by itself, in a moment; what is left of it is not begun.
        let mut flying = self.flying.iter_mut().map(|(_, _, running)| running);
        if let Some(running) = flying.find(|running| (running.path, running.id) == (path, op)) {
            running.cancelled = true;
        }
    }

    fn poll(&mut self, now: Time, signals: &mut Vec<Signal>) -> Progress {
        self.land();
        self.pump(now);
        signals.append(&mut self.ready);
        match self.flying.is_empty() && self.waiting.is_empty() {
            true => Progress::Idle,
            false => Progress::Busy,
        }
    }
}

impl Live for CudaHere {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.silent.as_fd()
    }

    fn next_timeout(&self) -> Option<Time> {
        let busy = !self.ready.is_empty() || !self.flying.is_empty() || !self.waiting.is_empty();
        busy.then_some(Time::ZERO)
    }
}
