//! Moves that a device copies: begun here, looked after, and ended when the device says so.
//!
//! They run in the initiator alone, as all moves of this transport do: memory of another process's device is mapped here, and the same words keep its owner from taking it
//! back. But the device takes its time while this thread goes on, so that each has a word of the hazard to itself, and what the device is in the middle of
//! is waited for, never given up: after the end of a move nothing is touched.

use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{Direction, Failure, Loss, OpId, PathId, Refusal, RegionKey};

use super::SharedMemory;
use super::foreign::{self, MAX_PIECES, Piece};
use super::ledger::Entering;
use super::path::{Path, Running};
use super::process::Process;
use super::target::{Reach, Target};
use crate::cuda::{Begun, Bounced, Devices, Flight, Job, Sums, device_of};
use crate::memory::own_number;

/// A move that waits for a device.
#[derive(Debug)]
pub(super) struct ForDevice {
    pub running: Running,
    target: Arc<Target>,
    sums: Sums,
    /// What is left of it is not wanted any more.
    cancelled: bool,
}

impl ForDevice {
    pub(super) fn new(running: Running, target: Arc<Target>) -> ForDevice {
        ForDevice {
            running,
            target,
            sums: Sums::default(),
            cancelled: false,
        }
    }
}

/// One that a device is copying.
#[derive(Debug)]
pub(super) struct InFlight {
    /// What it pins goes before what is pinned.
    flight: Copying,
    /// Up to here.
    end: u64,
    path: PathId,
    word: u32,
    of: ForDevice,
}

#[derive(Debug)]
enum Copying {
    Really(Flight),
    /// By a device that a test plays, until it says that it has ended.
    #[cfg(test)]
    Pretended(Arc<std::sync::atomic::AtomicBool>),
}

impl Copying {
    fn look(&self, devices: &mut Devices) -> Option<Result<Sums, Refusal>> {
        match self {
            Copying::Really(flight) => devices.look(flight),
            #[cfg(test)]
            Copying::Pretended(ended) => ended
                .load(std::sync::atomic::Ordering::Relaxed)
                .then(|| Ok(Sums::default())),
        }
    }
}

impl Path {
    /// Whether the peer is an agent of this very process.
    pub(super) fn is_within_this_process(&self) -> bool {
        self.process
            .as_ref()
            .is_some_and(|process| process.number() == own_number())
    }
}

impl SharedMemory {
    pub(super) fn is_any_flying(&self) -> bool {
        !self.flights.is_empty() || self.paths.iter().any(|path| !path.for_devices.is_empty())
    }

    /// Whether devices copy, and nothing else is to be done that this side knows of.
    pub(super) fn is_only_flying(&self) -> bool {
        !self.flights.is_empty() && self.paths.iter().all(|path| path.queue.is_empty())
    }

    /// Whether a device is copying on a path.
    pub(super) fn is_flying_on(&self, path: PathId) -> bool {
        self.flights.iter().any(|flight| flight.path == path)
    }

    /// Whether a device is in the middle of a region of ours.
    pub(super) fn is_flying(&self, near: &RegionKey) -> bool {
        let mut flights = self.flights.iter();
        flights.any(|flight| flight.of.running.part.leg.local().key == *near)
    }

    /// What is left of a move that a device is copying is not begun.
    pub(super) fn cancel_flight(&mut self, path: PathId, op: OpId) {
        let mut flights = self.flights.iter_mut();
        if let Some(flight) = flights.find(|flight| (flight.path, flight.of.running.id) == (path, op)) {
            flight.of.cancelled = true;
        }
    }

    /// Has devices begin what there is room for.
    pub(super) fn pump_devices(&mut self, now: Time) {
        // Each path is the first in its turn, so that none waits for ever behind another.
        let paths = self.paths.len();
        self.device_turn = self.device_turn.wrapping_add(1);
        for nth in 0..paths {
            let at = (self.device_turn + nth) % paths;
            self.paths[at].now = now;
            while let Some(waiting) = self.paths[at].for_devices.pop_front() {
                if now >= waiting.running.deadline {
                    self.paths[at].complete(waiting.running.id, Err(Failure::Expired), &mut self.ready);
                } else if !self.begin_by_device(at, waiting) {
                    return;
                }
            }
        }
    }

    /// `false` where that is enough for now.
    fn begin_by_device(&mut self, at: usize, mut waiting: ForDevice) -> bool {
        let path = &mut self.paths[at];
        let (id, tag) = (waiting.running.id, path.id.0);
        let entered = path
            .ledger()
            .map(|ledger| self.worker.hazard().enter_for_device(tag, ledger, waiting.target.entry));
        let word = match entered {
            Some(Entering::Inside(word)) => word,
            Some(Entering::Full) => {
                path.for_devices.push_front(waiting);
                return false;
            }
            Some(Entering::Released) | None => {
                path.targets.remove(&waiting.running.part.leg.remote().key);
                path.complete(id, Err(Refusal::Released.into()), &mut self.ready);
                return true;
            }
        };
        // Whether a number is still the owner's is looked at before anything is written by it.
        if matches!(waiting.target.reach, Reach::Foreign(_)) {
            let failure = if path.is_hung_up() {
                Some(Failure::PathLost {
                    loss: Loss::ClosedByPeer,
                    fenced: true,
                })
            } else {
                path.bounces.then(|| Refusal::Unsupported.into())
            };
            if let Some(failure) = failure {
                self.worker.hazard().leave(word);
                path.complete(id, Err(failure), &mut self.ready);
                return true;
            }
        }
        let leg = waiting.running.part.leg.clone();
        let near = &*leg.local().memory;
        let device = match (&waiting.target.reach, device_of(near)) {
            (_, Some(device)) | (Reach::Device { device, .. }, None) => device.clone(),
            _ => {
                self.worker.hazard().leave(word);
                path.complete(id, Err(Refusal::Unsupported.into()), &mut self.ready);
                return true;
            }
        };
        let begun = match self.devices.end_of(near, &device) {
            None => Err(Refusal::Unsupported),
            Some(near) => {
                let job = Job {
                    direction: waiting.running.part.direction,
                    leg: &leg,
                    range: waiting.running.at..waiting.running.part.range.end,
                    near,
                    far: waiting.target.end(&device),
                    checksum: waiting.running.part.checksum,
                };
                let mut elsewhere = |direction, bounced: &[Bounced]| {
                    copy_elsewhere(path.process.as_ref(), &waiting.target, direction, bounced)
                };
                // SAFETY: the near region is registered, and is not released while it is in flight; the far one is entered, and left when the part has
                // ended. Both keep their memory.
                unsafe { self.devices.begin(&job, &mut elsewhere) }
            }
        };
        match begun {
            Ok(Begun::UnderWay { flight, end }) => {
                let path = path.id;
                self.flights.push(InFlight {
                    flight: Copying::Really(flight),
                    end,
                    path,
                    word,
                    of: waiting,
                });
                return true;
            }
            Ok(Begun::NoRoom) => {
                self.worker.hazard().leave(word);
                path.for_devices.push_front(waiting);
                return false;
            }
            Ok(Begun::Ended { sums, end }) => {
                self.worker.hazard().leave(word);
                waiting.sums = waiting.sums.add(sums);
                self.go_on(at, waiting, end);
                // It was waited for: others have their turn first.
                return false;
            }
            Err(refusal) => {
                self.worker.hazard().leave(word);
                path.complete(id, Err(refusal.into()), &mut self.ready);
            }
        }
        true
    }

    /// A part of a move has been copied: it is done, or goes on.
    fn go_on(&mut self, at: usize, mut of: ForDevice, end: u64) {
        let path = &mut self.paths[at];
        if end < of.running.part.range.end {
            // What is left is begun only if it is still wanted, and its memory still there.
            let lent = self.table.lookup(&of.running.part.leg.local().key);
            match (of.cancelled, lent) {
                (true, _) => path.complete(of.running.id, Err(Failure::Cancelled), &mut self.ready),
                (false, Err(refusal)) => path.complete(of.running.id, Err(refusal.into()), &mut self.ready),
                (false, Ok(_)) => {
                    of.running.at = end;
                    path.for_devices.push_back(of);
                }
            }
        } else {
            path.finish_device(of.running, of.sums, &of.target, &mut self.ready);
        }
    }

    /// Ends what devices have ended.
    pub(super) fn land(&mut self, now: Time) {
        if !self.is_any_flying() {
            return;
        }
        let mut nth = 0;
        while nth < self.flights.len() {
            let Some(ended) = self.flights[nth].flight.look(&mut self.devices) else {
                nth += 1;
                continue;
            };
            let InFlight {
                flight,
                end,
                path,
                word,
                mut of,
            } = self.flights.swap_remove(nth);
            // The pages of a region are pinned for as long as this is held, and the region is there only for as long as what is ended below.
            drop(flight);
            self.worker.hazard().leave(word);
            // A path is there until all that devices copy on it has ended.
            let Some(at) = self.path_index(path) else {
                continue;
            };
            match (self.paths[at].broken, ended) {
                (Some(loss), _) => {
                    let lost = Failure::PathLost { loss, fenced: true };
                    self.paths[at].complete(of.running.id, Err(lost), &mut self.ready);
                }
                (None, Ok(sums)) => {
                    of.sums = of.sums.add(sums);
                    self.paths[at].now = now;
                    self.go_on(at, of, end);
                }
                (None, Err(refusal)) => self.paths[at].complete(of.running.id, Err(refusal.into()), &mut self.ready),
            }
        }
        self.pump_devices(now);
    }

    /// Has a device that the test plays copy a move, until `ended`.
    #[cfg(test)]
    pub(super) fn pretend(
        &mut self,
        path: PathId,
        op: &weft_protocol::Op,
        target: &Arc<Target>,
    ) -> Arc<std::sync::atomic::AtomicBool> {
        let at = self.path_index(path).expect("a path");
        let weft_protocol::Body::Move(part) = &op.body else {
            panic!("{op:?} is no move");
        };
        let ledger = self.paths[at].ledger().expect("a peer").clone();
        let entered = self.worker.hazard().enter_for_device(path.0, &ledger, target.entry);
        let Entering::Inside(word) = entered else {
            panic!("{entered:?}");
        };
        self.paths[at].inflight += 1;
        let ended = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let running = Running {
            id: op.id,
            deadline: op.deadline,
            part: part.clone(),
            at: part.range.start,
            sums: None,
        };
        self.flights.push(InFlight {
            flight: Copying::Pretended(ended.clone()),
            end: part.range.end,
            path,
            word,
            of: ForDevice::new(running, target.clone()),
        });
        ended
    }
}

/// What devices are copying is waited for, and then said to have ended: peers ask the words, and this process may live on.
impl Drop for SharedMemory {
    fn drop(&mut self) {
        // A forked child has none of it.
        if !self.origin.is_here() {
            return;
        }
        self.devices = Devices::new(self.options.gpu_stay);
        for flight in self.flights.drain(..) {
            let InFlight { flight, word, of, .. } = flight;
            drop(flight);
            self.worker.hazard().leave(word);
            drop(of);
        }
    }
}

/// Copies memory of the peer that is not mapped here, from or to the bounce buffer, by the kernel.
fn copy_elsewhere(
    process: Option<&Process>,
    target: &Target,
    direction: Direction,
    bounced: &[Bounced],
) -> Result<(), Refusal> {
    let process = process.ok_or(Refusal::Unsupported)?;
    let pieces: Vec<Piece> = bounced
        .iter()
        .map(|piece| Piece {
            near: piece.buffer as usize,
            far: target.address(piece.offset),
            len: piece.len,
        })
        .collect();
    for pieces in pieces.chunks(MAX_PIECES) {
        // SAFETY: the near side is the bounce buffer's, within its bounds; the far side is the kernel's to check.
        unsafe { foreign::move_pieces(process.number(), direction, pieces) }.map_err(|_| Refusal::Unsupported)?;
    }
    Ok(())
}
