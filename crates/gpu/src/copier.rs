//! Copies of lists of pieces, between memories that the device reaches.
//!
//! A copy is begun and then looked after: nothing here waits for the device unless [`Copier::wait`] is called. How the device goes about it is told in
//! `kernels/copy.cu`, and how it comes by its orders in `worker.rs`.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUdeviceptr, CUresult, CUstream};

use crate::device::{Device, GpuError, check};
use crate::pinned::Pinned;
use crate::worker::{FEW, OVER_THE_BUS, Order, SUMMED, WARPS_A_BLOCK, Worker};

/// Copies under way at a time.
pub const SLOTS: usize = 7;
/// Pieces of one copy.
pub const PIECES_MAX: usize = 8192;
/// Blocks of a copy from or to host memory: the bus is busy with so few, and whoever computes meanwhile keeps the others.
const BLOCKS_OVER_THE_BUS: u32 = 32;
/// What a warp takes at a time.
const CHUNK_MIN: u64 = 4 << 10;
const CHUNK_MAX: u64 = 16 << 10;
/// So little is quicker done by one block than told to others.
const UNITS_OF_ONE_BLOCK: u64 = 16;
/// Beyond that a block is worth being told of so many.
const UNITS_A_BLOCK: u64 = 4;
const UNITS_MAX: u64 = 1 << 31;

/// Bytes to be copied, by addresses that the device reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Piece {
    pub to: u64,
    pub from: u64,
    pub len: u64,
}

/// A copy under way.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a copy is looked after until it has ended"]
pub struct Ticket {
    slot: usize,
    number: u32,
}

/// How a copy ended. Both sums are zero where none were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Of the bytes as they were read, and of the same as they were found where they had been written.
    pub read_sum: u64,
    pub written_sum: u64,
}

/// A list of pieces that is written where the device reads it.
#[derive(Debug)]
pub struct PieceList<'a> {
    pieces: &'a mut [Piece],
    shape: Shape,
}

/// What has to be known of a list.
#[derive(Clone, Copy, Debug, Default)]
struct Shape {
    count: usize,
    longest: u64,
    bytes: u64,
}

/// A list that the device keeps, for copies that are made again and again.
pub struct KeptList {
    /// Nowhere where there are so few pieces that they go with the order.
    memory: Option<Arc<KeptMemory>>,
    few: [Piece; FEW],
    shape: Shape,
}

impl fmt::Debug for KeptList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeptList({:?})", self.shape)
    }
}

/// Where it is kept. Goes before the copier whose stream it is.
struct KeptMemory {
    device: Arc<Device>,
    stream: CUstream,
    at: CUdeviceptr,
}

// SAFETY: an address on a device has no thread affinity.
unsafe impl Send for KeptMemory {}
// SAFETY: as above, and nothing of it changes.
unsafe impl Sync for KeptMemory {}

impl Drop for KeptMemory {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: whoever reads it has a share in it until it is done, or was launched on this stream before.
            unsafe { sys::cuMemFreeAsync(self.at, self.stream) };
        }
    }
}

impl PieceList<'_> {
    /// `false` where there is no room.
    #[inline]
    pub fn push(&mut self, piece: Piece) -> bool {
        let shape = &mut self.shape;
        let Some(place) = self.pieces.get_mut(shape.count) else {
            return false;
        };
        *place = piece;
        shape.count += 1;
        shape.longest = shape.longest.max(piece.len);
        shape.bytes += piece.len;
        true
    }
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.shape.bytes
    }
    /// What is on it.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.shape.count]
    }
    #[inline]
    pub fn is_full(&self) -> bool {
        self.shape.count == self.pieces.len()
    }
}

/// What is known of a copy under way.
#[derive(Clone, Debug)]
struct Given {
    order: Order,
    number: u32,
    /// It could not be launched after all.
    failed: Option<GpuError>,
    /// Its list stays until it has ended.
    _list: Option<Arc<KeptMemory>>,
}

impl fmt::Debug for KeptMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeptMemory({:#x})", self.at)
    }
}

/// Copies by a device, on a stream of its own.
pub struct Copier {
    given: [Option<Given>; SLOTS],
    worker: Worker,
    /// What is kept is brought to the device on this stream, past a worker that stays on the other.
    side: CUstream,
    lists: Pinned,
}

// SAFETY: the driver's handles have no thread affinity, and every call enters the device first.
unsafe impl Send for Copier {}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copier({:?}, {} under way)", self.worker, self.under_way())
    }
}

impl Copier {
    /// `stay`: how long a worker stays on the device after a copy, for the next one, once several have followed each other as soon. Zero: never.
    pub fn new(device: &Arc<Device>, stay: Duration) -> Result<Copier, GpuError> {
        let _entered = device.enter()?;
        let lists = Pinned::allocate(device, SLOTS * PIECES_MAX * size_of::<Piece>())?;
        let mut copier = Copier {
            given: [const { None }; SLOTS],
            worker: Worker::new(device, stay)?,
            side: std::ptr::null_mut(),
            lists,
        };
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the result goes to a field of the same type.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut copier.side, flags)
        })?;
        Ok(copier)
    }

    pub fn device(&self) -> &Arc<Device> {
        self.worker.device()
    }

    pub fn under_way(&self) -> usize {
        self.given.iter().flatten().count()
    }

    /// How often the device was launched. Copies that follow each other need fewer launches than there are copies.
    pub fn launches(&self) -> u32 {
        self.worker.launches()
    }

    pub fn has_room(&self) -> bool {
        self.given.iter().any(Option::is_none)
    }

    /// Begins a copy of a few pieces.
    ///
    /// # Safety
    /// As for [`begin_with`](Copier::begin_with).
    ///
    /// # Panics
    /// Where there are too many pieces, or too much is under way.
    pub unsafe fn begin(&mut self, pieces: &[Piece], sum: bool) -> Result<Ticket, GpuError> {
        let fill = |list: &mut PieceList<'_>| assert!(pieces.iter().all(|piece| list.push(*piece)), "too many pieces");
        // SAFETY: the caller's promise.
        unsafe { self.begin_with(sum, false, false, fill) }.map(|(ticket, _)| ticket)
    }

    /// Begins a copy of what `fill` puts on the list. `over_the_bus`: one side is host memory. `keep`: the device is to keep the list, if it can.
    ///
    /// # Safety
    /// Every piece must lie in memory that the device reaches, and that stays until the copy has ended.
    ///
    /// # Panics
    /// Where there is no [room](Copier::has_room).
    pub unsafe fn begin_with(
        &mut self,
        sum: bool,
        over_the_bus: bool,
        keep: bool,
        fill: impl FnOnce(&mut PieceList<'_>),
    ) -> Result<(Ticket, Option<KeptList>), GpuError> {
        let slot = self.free_slot();
        let first = self.lists.as_ptr().cast::<Piece>();
        // SAFETY: the slot's part of the lists, which are as long as all slots; nobody reads it, since the slot is free.
        let pieces = unsafe { std::slice::from_raw_parts_mut(first.add(slot * PIECES_MAX), PIECES_MAX) };
        let mut list = PieceList {
            pieces,
            shape: Shape::default(),
        };
        fill(&mut list);
        let shape = list.shape;
        let place = self.lists.address() + (slot * PIECES_MAX * size_of::<Piece>()) as u64;
        let mut order = self.order(slot, shape, sum, over_the_bus);
        match list.pieces() {
            few if few.len() <= FEW => order.few[..few.len()].copy_from_slice(few),
            _ => order.list = place,
        }
        // SAFETY: the caller's promise; the slot's part of the lists is not written before the slot is free again.
        let ticket = unsafe { self.give(order, None) }?;
        // Only now, while the device copies.
        let kept = if keep { self.keep(place, order.few, shape) } else { None };
        Ok((ticket, kept))
    }

    /// Has the device keep a list that lies in pinned memory.
    fn keep(&self, place: u64, few: [Piece; FEW], shape: Shape) -> Option<KeptList> {
        if shape.count <= FEW {
            let memory = None;
            return Some(KeptList { memory, few, shape });
        }
        let bytes = shape.count * size_of::<Piece>();
        let _entered = self.device().enter().ok()?;
        let mut at = 0;
        // SAFETY: the streams live as long as the copier; the list is so long, and stays until its slot is used again, which is not before this has ended.
        unsafe {
            if sys::cuMemAllocAsync(&mut at, bytes, self.side) != CUresult::CUDA_SUCCESS {
                return None;
            }
            let memory = Arc::new(KeptMemory {
                device: self.device().clone(),
                stream: self.worker.stream(),
                at,
            });
            let copied = sys::cuMemcpyHtoDAsync_v2(at, place as *const c_void, bytes, self.side);
            let there = sys::cuStreamSynchronize(self.side);
            let kept = copied == CUresult::CUDA_SUCCESS && there == CUresult::CUDA_SUCCESS;
            kept.then_some(KeptList {
                memory: Some(memory),
                few,
                shape,
            })
        }
    }

    /// Begins a copy of what is on a list that the device keeps.
    ///
    /// # Safety
    /// As for [`begin_with`](Copier::begin_with); and the list must be of this copier.
    ///
    /// # Panics
    /// Where there is no [room](Copier::has_room).
    pub unsafe fn begin_kept(&mut self, sum: bool, over_the_bus: bool, list: &KeptList) -> Result<Ticket, GpuError> {
        let slot = self.free_slot();
        let mut order = self.order(slot, list.shape, sum, over_the_bus);
        order.list = list.memory.as_ref().map_or(0, |memory| memory.at);
        order.few = list.few;
        // SAFETY: the caller's promise.
        unsafe { self.give(order, list.memory.clone()) }
    }

    fn free_slot(&self) -> usize {
        self.given.iter().position(Option::is_none).expect("room for a copy")
    }

    /// What the device is to do, without the pieces.
    fn order(&self, slot: usize, shape: Shape, sum: bool, over_the_bus: bool) -> Order {
        let most = match over_the_bus {
            true => BLOCKS_OVER_THE_BUS.min(self.worker.blocks_max()),
            false => self.worker.blocks_max(),
        };
        let warps = u64::from(most * WARPS_A_BLOCK);
        let count = shape.count as u64;
        // What is to be found again where it was written is looked at before it has left the device's cache.
        let chunk_max = if sum { CHUNK_MIN } else { CHUNK_MAX };
        let mut chunk = (shape.bytes / (2 * warps))
            .clamp(CHUNK_MIN, chunk_max)
            .next_multiple_of(CHUNK_MIN);
        while count * shape.longest.div_ceil(chunk) >= UNITS_MAX {
            chunk *= 2;
        }
        let chunks_a_piece = shape.longest.div_ceil(chunk).max(1);
        let units = count * chunks_a_piece;
        let blocks = match units <= UNITS_OF_ONE_BLOCK {
            true => 1,
            false => units.div_ceil(UNITS_A_BLOCK).min(u64::from(most)) as u32,
        };
        Order {
            list: 0,
            count: shape.count as u32,
            chunks_a_piece: chunks_a_piece as u32,
            chunk: chunk as u32,
            slot: slot as u32,
            flags: if sum { SUMMED } else { 0 } | if over_the_bus { OVER_THE_BUS } else { 0 },
            blocks,
            few: [Piece { to: 0, from: 0, len: 0 }; FEW],
        }
    }

    /// # Safety
    /// As for [`begin_with`](Copier::begin_with), of the pieces of the order.
    unsafe fn give(&mut self, order: Order, list: Option<Arc<KeptMemory>>) -> Result<Ticket, GpuError> {
        let slot = order.slot as usize;
        self.on_departure();
        let idle = self.under_way() == 0;
        // SAFETY: the caller's promise.
        let number = unsafe { self.worker.give(&order, idle) }?;
        self.given[slot] = Some(Given {
            order,
            number,
            failed: None,
            _list: list,
        });
        Ok(Ticket { slot, number })
    }

    /// Launches what a worker has not taken that has left.
    fn on_departure(&mut self) {
        let Some(last) = self.worker.take_departure() else {
            return;
        };
        let behind = |given: &Given| given.number.wrapping_sub(last) as i32;
        let mut untaken: Vec<&mut Given> = self
            .given
            .iter_mut()
            .flatten()
            .filter(|given| behind(given) > 0)
            .collect();
        untaken.sort_by_key(|given| behind(given));
        let count = untaken.len();
        for (nth, given) in untaken.into_iter().enumerate() {
            // SAFETY: what it copies, and its list, stay until it has ended, by the promise of whoever began it.
            let launched = unsafe { self.worker.launch(&given.order, given.number, nth + 1 == count) };
            given.failed = launched.err();
        }
    }

    /// Whether a copy has ended, and if so how; its ticket is not used again. An error is the device's, and all of its copies have ended by it.
    pub fn look(&mut self, ticket: &Ticket) -> Option<Result<Copied, GpuError>> {
        let Some(given) = &self.given[ticket.slot] else {
            let (call, name) = ("a look at a copy", "its end has been told already".to_owned());
            return Some(Err(GpuError::Call { call, name }));
        };
        let summed = given.order.flags & SUMMED != 0;
        if let Some((read_sum, written_sum)) = self.worker.ended(ticket.slot, ticket.number) {
            self.given[ticket.slot] = None;
            return Some(Ok(match summed {
                true => Copied { read_sum, written_sum },
                false => Copied::default(),
            }));
        }
        let failed = given.failed.clone();
        self.on_departure();
        let failed = failed.or_else(|| self.worker.failure())?;
        self.given[ticket.slot] = None;
        Some(Err(failed))
    }

    /// Waits for a copy to end.
    pub fn wait(&mut self, ticket: Ticket) -> Result<Copied, GpuError> {
        loop {
            if let Some(ended) = self.look(&ticket) {
                return ended;
            }
            std::hint::spin_loop();
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        let Ok(_entered) = self.device().enter() else { return };
        if !self.side.is_null() {
            // SAFETY: made by `new`; whatever was put on it was waited for.
            unsafe { sys::cuStreamDestroy_v2(self.side) };
        }
    }
}
