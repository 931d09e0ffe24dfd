//! The copying itself: one part of a move at a time, by this process alone.

use std::ops::Range;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use weft_protocol::memory::Digest;
use weft_protocol::{Direction, Leg, Memory};

use super::foreign::{self, MAX_PIECES, Piece};
use super::ledger::{Hazard, LedgerView};
use super::process::Process;
use super::target::{Reach, Target};
use crate::copy::{self, Helper, STREAM_MIN_BYTES, copy_cached, copy_streaming};
use crate::memory::{HostMemory, copy_checked, own_number};

/// Copies from here on are shared with the helper; below it, waking it costs more than it saves.
const SHARE_MIN_BYTES: u64 = 1 << 20;
/// What one thread takes of a shared copy at a time: short enough that the other one hardly waits at the end.
const UNIT_BYTES: usize = 128 << 10;
/// The same where each unit is a system call, whose own cost wants to be spread over more.
const FOREIGN_UNIT_BYTES: usize = 256 << 10;
/// How many pieces are laid out at a time, which bounds the memory that a move of tiny pieces takes.
const MAX_LAID_OUT: usize = 8 * MAX_PIECES;
/// Pieces below this are summed together.
const SMALL_BYTES: usize = 1024;
/// What they share at a time where each thread has its own.
const SMALL_BUFFER_BYTES: usize = 8 << 10;
/// What pieces that are summed together share at a time.
const BUFFER_BYTES: usize = 32 << 10;

/// What this transport copies with. Everything is used again, so that a move allocates nothing.
#[derive(Debug)]
pub(super) struct Worker {
    hazard: Hazard,
    helper: Option<Helper>,
    pieces: Vec<Piece>,
    /// Where each unit of work starts in the pieces.
    units: Vec<usize>,
    /// What each unit has come to, of the bytes as they were read and as they have landed.
    states: Vec<[AtomicU64; 2]>,
    buffer: Box<[u8]>,
    /// The kernel copies within this process, as far as is known.
    asks_kernel: bool,
}

/// A part of a move.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub direction: Direction,
    pub leg: &'a Leg,
    pub range: Range<u64>,
    pub near: &'a HostMemory,
    pub target: &'a Target,
    pub peer: &'a Peer<'a>,
    /// Take up the bytes of both ends, in order.
    pub sums: Option<&'a mut Sums>,
}

/// The checksums of a move, as far as it has come: states, because a digest is many times as large, and moves are passed on by value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    far: u64,
    /// None where the near side is summed once the move has ended, because that is not done on the way.
    near: Option<u64>,
}

impl Sums {
    pub(super) fn begin() -> Sums {
        let state = Digest::default().state();
        Sums {
            far: state,
            near: Some(state),
        }
    }

    /// The near side is summed once the move has ended.
    pub(super) fn leave_near(&mut self) {
        self.near = None;
    }

    /// Takes up bytes of the far side.
    pub(super) fn take_up_far(&mut self, take_up: impl FnOnce(&mut Digest)) {
        let mut far = Digest::at_state(self.far);
        take_up(&mut far);
        self.far = far.state();
    }

    /// Of the far side, and of the near side where that has been summed.
    pub(super) fn finish(self) -> (u64, Option<u64>) {
        let finish = |state| Digest::at_state(state).finish();
        (finish(self.far), self.near.map(finish))
    }
}

/// Whose memory the target is.
#[derive(Debug)]
pub(super) struct Peer<'a> {
    pub process: Option<&'a Process>,
    pub ledger: &'a LedgerView,
    pub hazard_tag: u32,
}

/// Why a part was not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The owner has taken the region back.
    Released,
    OutOfBounds,
    /// The kernel does not let us into the owner's process.
    Forbidden,
    /// The owner's process is gone.
    Gone,
    /// There is no memory at the address that the owner gave.
    NoMemory,
    /// There is none any more on the near side.
    Vanished,
    System(i32),
}

impl Worker {
    pub(super) fn new(hazard: Hazard, helper: bool) -> Worker {
        Worker {
            hazard,
            helper: (helper && several_cores()).then(Helper::new),
            pieces: Vec::with_capacity(MAX_PIECES),
            units: Vec::with_capacity(MAX_PIECES),
            states: Vec::new(),
            buffer: vec![0; BUFFER_BYTES].into_boxed_slice(),
            asks_kernel: true,
        }
    }

    pub(super) fn hazard(&self) -> &Hazard {
        &self.hazard
    }

    /// Copies the part, or as much of it as can be laid out at a time, and says how many bytes that was. The owner cannot take
    /// its region back meanwhile.
    pub(super) fn copy(&mut self, part: Part<'_>) -> Result<u64, Fault> {
        let bytes = part.range.end - part.range.start;
        let shared = self.helper.is_some() && bytes >= SHARE_MIN_BYTES;
        let unit_bytes = match part.target.reach {
            _ if !shared => usize::MAX,
            Reach::Mapped(_) => UNIT_BYTES,
            Reach::Foreign(_) | Reach::Device { .. } => FOREIGN_UNIT_BYTES,
        };
        let bytes = self.lay_out(&part, unit_bytes)?;
        let way = match (&part.target.reach, part.peer.process) {
            // What may vanish is copied by the kernel, which says so.
            (Reach::Mapped(_), _) if part.near.may_vanish() && self.asks_kernel => Way::Kernel(own_number()),
            (Reach::Mapped(_), _) => Way::Mapped {
                streaming: part.leg.bytes() >= STREAM_MIN_BYTES as u64,
            },
            (Reach::Foreign(_), Some(process)) => Way::Kernel(process.number()),
            (Reach::Foreign(_), None) => return Err(Fault::Forbidden),
            // Devices do their copying themselves: see `devices.rs`.
            (Reach::Device { .. }, _) => return Err(Fault::OutOfBounds),
        };
        let inside = self
            .hazard
            .enter(part.peer.hazard_tag, part.peer.ledger, part.target.entry)
            .ok_or(Fault::Released)?;
        // What follows touches memory: `lay_out` has checked every piece against both memories, which the part borrows; the ledger
        // says that the far one lives, and the guard keeps it so.
        let may_vanish = part.near.may_vanish();
        let copied = match (part.sums, part.direction) {
            (Some(Sums { far, near: Some(near) }), direction) if way.is_mapped() && !may_vanish => {
                let sent_and_landed = match direction {
                    Direction::Read => [far, near],
                    Direction::Write => [near, far],
                };
                let units = (&self.pieces[..], &self.units[..]);
                run_units_summed(&mut self.helper, units, &mut self.states, direction, sent_and_landed);
                Ok(())
            }
            (Some(sums), direction) => {
                sums.leave_near();
                let deliver = (direction == Direction::Read).then_some(may_vanish);
                let written = match direction {
                    Direction::Read => Ok(()),
                    Direction::Write => run_units(&mut self.helper, &self.pieces, &self.units, way, direction),
                };
                written.and_then(|()| {
                    let mut far = Digest::at_state(sums.far);
                    let summed = sum(&self.pieces, &mut self.buffer, way, deliver, &mut far);
                    sums.far = far.state();
                    summed
                })
            }
            (None, direction) => run_units(&mut self.helper, &self.pieces, &self.units, way, direction),
        };
        drop(inside);
        match (copied, &part.target.reach) {
            (Ok(()), _) => Ok(bytes),
            // A filter of system calls. Then such memory is copied like any other; nothing has been, so far.
            (Err(Fault::Forbidden), Reach::Mapped(_)) => {
                self.asks_kernel = false;
                Ok(0)
            }
            (Err(Fault::NoMemory), Reach::Mapped(_)) => Err(Fault::Vanished),
            (Err(Fault::NoMemory), _) if part.near.may_vanish() && !self.is_near_there(part.near) => {
                Err(Fault::Vanished)
            }
            (Err(fault), _) => Err(fault),
        }
    }

    fn is_near_there(&self, near: &HostMemory) -> bool {
        let base = near.as_ptr() as usize;
        let mut pieces = self.pieces.iter();
        pieces.all(|piece| near.is_there((piece.near - base) as u64, piece.len as u64))
    }

    /// Turns the part into pieces, each checked, and the pieces into units of at most `unit_bytes`.
    fn lay_out(&mut self, part: &Part<'_>, unit_bytes: usize) -> Result<u64, Fault> {
        self.pieces.clear();
        self.units.clear();
        let near_base = part.near.as_ptr() as usize;
        let (near_len, far_len) = (part.near.len(), part.target.len);
        let (mut room, mut bytes) = (0, 0);
        for (near, far, len) in part.leg.pieces(part.range.clone()) {
            let inside = |offset: u64, of: u64| offset.checked_add(len).is_some_and(|end| end <= of);
            if !inside(near, near_len) || !inside(far, far_len) {
                return Err(Fault::OutOfBounds);
            }
            if self.pieces.len() >= MAX_LAID_OUT {
                break;
            }
            bytes += len;
            let mut near = near_base + near as usize;
            let mut far = part.target.address(far);
            let mut left = len as usize;
            while left > 0 {
                let started = self.units.last().copied();
                if room == 0 || started.is_some_and(|first| self.pieces.len() - first == MAX_PIECES) {
                    self.units.push(self.pieces.len());
                    room = unit_bytes;
                }
                let len = left.min(room);
                self.pieces.push(Piece { near, far, len });
                (near, far, left, room) = (near + len, far + len, left - len, room - len);
            }
        }
        Ok(bytes)
    }
}

/// How the bytes get from one side to the other.
#[derive(Clone, Copy, Debug)]
enum Way {
    Mapped {
        streaming: bool,
    },
    /// By the kernel, to or from the process of this number, which may be this one.
    Kernel(libc::pid_t),
}

impl Way {
    fn is_mapped(self) -> bool {
        matches!(self, Way::Mapped { .. })
    }

    /// # Safety
    /// The near side of every piece, and the far side where it is mapped, must be valid for the access that `direction` means.
    unsafe fn run(self, direction: Direction, pieces: &[Piece]) -> Result<(), i32> {
        match self {
            Way::Mapped { streaming } => {
                for piece in pieces {
                    let (to, from) = match direction {
                        Direction::Read => (piece.near, piece.far),
                        Direction::Write => (piece.far, piece.near),
                    };
                    let (to, from) = (to as *mut u8, from as *const u8);
                    // SAFETY: the caller's promise.
                    unsafe {
                        if streaming {
                            copy_streaming(to, from, piece.len);
                        } else {
                            copy_cached(to, from, piece.len);
                        }
                    }
                }
                Ok(())
            }
            // SAFETY: the caller's promise.
            Way::Kernel(pid) => unsafe { foreign::move_pieces(pid, direction, pieces) },
        }
    }
}

/// Carries out all units, sharing them with the helper where there are several.
fn run_units(
    helper: &mut Option<Helper>,
    pieces: &[Piece],
    units: &[usize],
    way: Way,
    direction: Direction,
) -> Result<(), Fault> {
    let run = |unit: usize| {
        let end = units.get(unit + 1).copied().unwrap_or(pieces.len());
        // SAFETY: `Worker::copy` has laid the pieces out with checks and holds the guard.
        unsafe { way.run(direction, &pieces[units[unit]..end]) }
    };
    match helper {
        Some(helper) if units.len() > 1 => {
            let failed = AtomicI32::new(0);
            helper.share(units.len() as u32, &|unit| {
                if failed.load(Ordering::Relaxed) == 0
                    && let Err(errno) = run(unit as usize)
                {
                    failed.store(errno, Ordering::Relaxed);
                }
            });
            match failed.into_inner() {
                0 => Ok(()),
                errno => Err(fault(errno)),
            }
        }
        _ => (0..units.len()).try_for_each(run).map_err(fault),
    }
}

/// Carries out all units of mapped memory, and takes up the bytes at both ends: each unit by itself, and then all of them in their order.
fn run_units_summed(
    helper: &mut Option<Helper>,
    (pieces, units): (&[Piece], &[usize]),
    states: &mut Vec<[AtomicU64; 2]>,
    direction: Direction,
    ends: [&mut u64; 2],
) {
    let [mut sent, mut landed] = [*ends[0], *ends[1]].map(Digest::at_state);
    let of_unit = |unit: usize| {
        let end = units.get(unit + 1).copied().unwrap_or(pieces.len());
        &pieces[units[unit]..end]
    };
    match helper {
        Some(helper) if units.len() > 1 => {
            states.resize_with(units.len().max(states.len()), Default::default);
            let states = &states[..units.len()];
            helper.share(units.len() as u32, &|unit| {
                let [mut sent, mut landed] = [(); 2].map(|()| Digest::at_state(0));
                // SAFETY: `Worker::copy` has laid the pieces out with checks and holds the guard.
                unsafe { copy_summed(of_unit(unit as usize), direction, &mut sent, &mut landed) };
                for (state, digest) in states[unit as usize].iter().zip([sent, landed]) {
                    state.store(digest.state(), Ordering::Relaxed);
                }
            });
            for (unit, states) in states.iter().enumerate() {
                let bytes = of_unit(unit).iter().map(|piece| piece.len as u64).sum();
                for (digest, state) in [&mut sent, &mut landed].into_iter().zip(states) {
                    digest.append(state.load(Ordering::Relaxed), bytes);
                }
            }
        }
        _ => {
            for unit in 0..units.len() {
                // SAFETY: `Worker::copy` holds the guard here too, over pieces that it has checked.
                unsafe { copy_summed(of_unit(unit), direction, &mut sent, &mut landed) };
            }
        }
    }
    for (end, digest) in ends.into_iter().zip([sent, landed]) {
        *end = digest.state();
    }
}

/// Copies pieces of mapped memory and takes them up twice: as they were read, and as they have landed.
///
/// # Safety
/// Both sides of every piece must be valid for reads, and the one that `direction` writes for writes.
unsafe fn copy_summed(pieces: &[Piece], direction: Direction, sent: &mut Digest, landed: &mut Digest) {
    let ends = |piece: &Piece| match direction {
        Direction::Read => (piece.near as *mut u8, piece.far as *const u8),
        Direction::Write => (piece.far as *mut u8, piece.near as *const u8),
    };
    for run in pieces.chunk_by(|a, b| a.len.max(b.len) < SMALL_BYTES) {
        if let [piece] = run {
            let (to, from) = ends(piece);
            // SAFETY: the caller's promise.
            unsafe { copy::copy_summed_twice(to, from, piece.len, sent, landed) };
            continue;
        }
        // Each is smaller than the buffer, which many of them share, because to begin with a checksum costs something.
        let mut buffer = [0u8; SMALL_BUFFER_BYTES];
        let mut rest = run;
        while !rest.is_empty() {
            let mut filled = 0;
            let fits = rest.iter().take_while(|piece| {
                filled += piece.len;
                filled <= buffer.len()
            });
            let (batch, after) = rest.split_at(fits.count());
            rest = after;
            let at = buffer.as_mut_ptr();
            // SAFETY: the caller's promise of both sides; the pieces of a batch fit into the buffer together.
            let gathered = |landed: bool| unsafe {
                let mut filled = 0;
                for piece in batch {
                    let (to, from) = ends(piece);
                    copy_cached(at.add(filled), if landed { to } else { from }, piece.len);
                    filled += piece.len;
                }
                std::slice::from_raw_parts(at, filled)
            };
            let bytes = gathered(false);
            sent.update(bytes);
            let mut bytes = bytes.as_ptr();
            for piece in batch {
                // SAFETY: the caller's promise of where the piece goes; the buffer holds it, after those before it.
                unsafe {
                    copy_cached(ends(piece).0, bytes, piece.len);
                    bytes = bytes.add(piece.len);
                }
            }
            landed.update(gathered(true));
        }
    }
}

/// Takes the far side of the pieces up into a checksum; `deliver` passes it on to the near side, and says whether that may have vanished.
///
/// The far bytes are read once, so what is summed is what is delivered, even if the owner writes at the same time.
fn sum(pieces: &[Piece], buffer: &mut [u8], way: Way, deliver: Option<bool>, digest: &mut Digest) -> Result<(), Fault> {
    let Way::Mapped { streaming } = way else {
        return sum_together(way, pieces, buffer, deliver, digest);
    };
    for run in pieces.chunk_by(|a, b| a.len.max(b.len) < SMALL_BYTES) {
        let [piece] = run else {
            sum_together(Way::Mapped { streaming: false }, run, buffer, deliver, digest)?;
            continue;
        };
        let (near, far) = (piece.near as *mut u8, piece.far as *const u8);
        // SAFETY: `Worker::copy` has laid the pieces out with checks and holds the guard.
        unsafe {
            match deliver {
                Some(_) => copy::copy_summed(near, far, piece.len, streaming, digest),
                None => copy::sum(far, piece.len, digest),
            }
        }
    }
    Ok(())
}

/// The same through a buffer, which as many pieces share as fit: each time costs something, a system call where the far side is not mapped.
fn sum_together(
    way: Way,
    pieces: &[Piece],
    buffer: &mut [u8],
    deliver: Option<bool>,
    digest: &mut Digest,
) -> Result<(), Fault> {
    // The pieces again, cut into batches that fit the buffer.
    let mut batch: [Piece; 64] = [Piece {
        near: 0,
        far: 0,
        len: 0,
    }; 64];
    let mut pieces = pieces.iter().copied();
    let mut rest: Option<Piece> = None;
    loop {
        let (mut count, mut filled) = (0, 0);
        while count < batch.len() && filled < buffer.len() {
            let Some(piece) = rest.take().or_else(|| pieces.next()) else {
                break;
            };
            let len = piece.len.min(buffer.len() - filled);
            batch[count] = Piece { len, ..piece };
            if len < piece.len {
                rest = Some(Piece {
                    near: piece.near + len,
                    far: piece.far + len,
                    len: piece.len - len,
                });
            }
            (count, filled) = (count + 1, filled + len);
        }
        if count == 0 {
            return Ok(());
        }
        let mut fetch = batch;
        let mut at = buffer.as_mut_ptr() as usize;
        for piece in &mut fetch[..count] {
            piece.near = at;
            at += piece.len;
        }
        // SAFETY: the near side now lies in the buffer, which was filled only up to its length; the far side is the caller's.
        unsafe { way.run(Direction::Read, &fetch[..count]) }.map_err(fault)?;
        digest.update(&buffer[..filled]);
        if let Some(may_vanish) = deliver {
            for (from, to) in fetch[..count].iter().zip(&batch) {
                let (into, from) = (to.near as *mut u8, from.near as *const u8);
                // SAFETY: `lay_out` has checked the near side; the buffer is ours.
                let there = unsafe {
                    match may_vanish {
                        true => copy_checked(into, from, to.len),
                        false => {
                            copy_cached(into, from, to.len);
                            true
                        }
                    }
                };
                if !there {
                    return Err(Fault::Vanished);
                }
            }
        }
    }
}

fn fault(errno: i32) -> Fault {
    match errno {
        libc::EPERM | libc::ENOSYS => Fault::Forbidden,
        libc::ESRCH => Fault::Gone,
        libc::EFAULT => Fault::NoMemory,
        other => Fault::System(other),
    }
}

/// Whether this process may run on more than one core: on one, a helper is only in the way.
fn several_cores() -> bool {
    std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1)
}
