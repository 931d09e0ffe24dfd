//! Copies of lists of pieces by one kernel each, between memories that the device reaches.
//!
//! A copy is begun and then looked after: nothing here waits for the device unless [`Copier::wait`] is called. How the kernel goes about it is told in
//! `kernels/copy.cu`.

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUdeviceptr, CUfunction, CUmodule, CUresult, CUstream};

use crate::device::{Device, GpuError, check};
use crate::pinned::Pinned;

const KERNELS: &str = include_str!("../kernels/copy.ptx");
/// Copies under way at a time.
pub const SLOTS: usize = 7;
/// Pieces of one copy.
pub const PIECES_MAX: usize = 8192;
const WARPS_A_BLOCK: u32 = 8;
const LANES: u32 = 32;
const BLOCKS_A_MULTIPROCESSOR: u32 = 6;
/// Blocks of a copy from or to host memory: the bus is busy with so few, and whoever computes meanwhile keeps the others.
const BLOCKS_OVER_THE_BUS: u32 = 64;
/// What a warp takes at a time.
const CHUNK_MIN: u64 = 4 << 10;
const CHUNK_MAX: u64 = 16 << 10;
/// So many pieces go with the launch itself.
const FEW: usize = 8;
const TALLY_BYTES: usize = 24;
/// A look at the stream costs more than one at a word, and tells only that the device has failed.
const LOOKS_A_QUERY: u32 = 4096;

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
    summed: bool,
}

/// How a copy ended. Both sums are zero where none were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Of the bytes as they were read, and of the same as they were found where they had been written.
    pub read_sum: u64,
    pub written_sum: u64,
}

/// Where the kernel tells that it has ended.
#[derive(Debug)]
#[repr(C)]
struct Report {
    read: u64,
    written: u64,
    done: AtomicU32,
    unused: u32,
}

/// A list of pieces that is written where the device reads it.
#[derive(Debug)]
pub struct PieceList<'a> {
    pieces: &'a mut [Piece],
    count: usize,
    longest: u64,
    bytes: u64,
}

/// A list that the device keeps, for copies that are made again and again. It goes before the copier that made it.
pub struct KeptList {
    device: Arc<Device>,
    stream: CUstream,
    at: CUdeviceptr,
    shape: Shape,
}

/// What a launch has to know of a list.
#[derive(Clone, Copy, Debug)]
struct Shape {
    count: u32,
    longest: u64,
    bytes: u64,
}

impl fmt::Debug for KeptList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeptList({:?})", self.shape)
    }
}

// SAFETY: an address on a device has no thread affinity.
unsafe impl Send for KeptList {}

impl Drop for KeptList {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: allocated on this stream, which its owner keeps until all its lists have gone; whatever uses the list comes before on the same stream.
            unsafe { sys::cuMemFreeAsync(self.at, self.stream) };
        }
    }
}

impl PieceList<'_> {
    /// `false` where there is no room.
    #[inline]
    pub fn push(&mut self, piece: Piece) -> bool {
        let Some(place) = self.pieces.get_mut(self.count) else {
            return false;
        };
        *place = piece;
        self.count += 1;
        self.longest = self.longest.max(piece.len);
        self.bytes += piece.len;
        true
    }
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// What is on it.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }
    #[inline]
    pub fn is_full(&self) -> bool {
        self.count == self.pieces.len()
    }
}

/// Copies by a device, on a stream of its own.
pub struct Copier {
    device: Arc<Device>,
    stream: CUstream,
    module: CUmodule,
    plain: CUfunction,
    summed: CUfunction,
    tally: CUdeviceptr,
    reports: Pinned,
    lists: Pinned,
    used: [bool; SLOTS],
    number: u32,
    looks: u32,
}

// SAFETY: the driver's handles have no thread affinity, and every call enters the device first.
unsafe impl Send for Copier {}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Copier({:?}, {} under way)", self.device, self.under_way())
    }
}

impl Copier {
    pub fn new(device: &Arc<Device>) -> Result<Copier, GpuError> {
        let _entered = device.enter()?;
        let reports = Pinned::allocate(device, SLOTS * size_of::<Report>())?;
        let lists = Pinned::allocate(device, SLOTS * PIECES_MAX * size_of::<Piece>())?;
        let mut copier = Copier {
            device: device.clone(),
            stream: std::ptr::null_mut(),
            module: std::ptr::null_mut(),
            plain: std::ptr::null_mut(),
            summed: std::ptr::null_mut(),
            tally: 0,
            reports,
            lists,
            used: [false; SLOTS],
            number: 0,
            looks: 0,
        };
        let text = CString::new(KERNELS).expect("the kernels are text");
        let (mut least, mut greatest) = (0, 0);
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: results go to fields of the same types; the text of the module ends with a zero; what was made so far is undone by dropping the value.
        unsafe {
            check(
                "cuCtxGetStreamPriorityRange",
                sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest),
            )?;
            check(
                "cuStreamCreateWithPriority",
                sys::cuStreamCreateWithPriority(&mut copier.stream, flags, greatest),
            )?;
            check(
                "cuModuleLoadData",
                sys::cuModuleLoadData(&mut copier.module, text.as_ptr().cast()),
            )?;
            copier.plain = function(copier.module, c"weft_copy")?;
            copier.summed = function(copier.module, c"weft_copy_summed")?;
            check("cuMemAlloc", sys::cuMemAlloc_v2(&mut copier.tally, TALLY_BYTES))?;
            check(
                "cuMemsetD8Async",
                sys::cuMemsetD8Async(copier.tally, 0, TALLY_BYTES, copier.stream),
            )?;
        }
        Ok(copier)
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn under_way(&self) -> usize {
        self.used.iter().filter(|used| **used).count()
    }

    pub fn has_room(&self) -> bool {
        self.under_way() < SLOTS
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
        let _entered = self.device.enter()?;
        let slot = self.used.iter().position(|used| !used).expect("room for a copy");
        let first = self.lists.as_ptr().cast::<Piece>();
        // SAFETY: the slot's part of the lists, which are as long as all slots; nobody reads it, since the slot is free.
        let pieces = unsafe { std::slice::from_raw_parts_mut(first.add(slot * PIECES_MAX), PIECES_MAX) };
        let mut list = PieceList {
            pieces,
            count: 0,
            longest: 0,
            bytes: 0,
        };
        fill(&mut list);
        let shape = Shape {
            count: list.count as u32,
            longest: list.longest,
            bytes: list.bytes,
        };
        let mut few = [Piece { to: 0, from: 0, len: 0 }; FEW];
        let place = self.lists.address() + (slot * PIECES_MAX * size_of::<Piece>()) as u64;
        let at = match list.pieces.get(..list.count) {
            Some(pieces) if pieces.len() <= FEW => {
                few[..pieces.len()].copy_from_slice(pieces);
                0
            }
            _ => place,
        };
        let kept = if keep { self.keep(place, shape) } else { None };
        // SAFETY: the caller's promise.
        let ticket = unsafe { self.launch(slot, few, at, shape, sum, over_the_bus) }?;
        Ok((ticket, kept))
    }

    /// Has the device keep a list that lies in pinned memory. It comes before the launch on the same stream, so that the list is there until it is copied.
    fn keep(&self, place: u64, shape: Shape) -> Option<KeptList> {
        let bytes = shape.count as usize * size_of::<Piece>();
        let mut at = 0;
        // SAFETY: the stream lives as long as the copier; the list is so long, and stays until its slot is used again.
        unsafe {
            if sys::cuMemAllocAsync(&mut at, bytes.max(1), self.stream) != CUresult::CUDA_SUCCESS {
                return None;
            }
            let kept = KeptList {
                device: self.device.clone(),
                stream: self.stream,
                at,
                shape,
            };
            let copied = sys::cuMemcpyHtoDAsync_v2(at, place as *const c_void, bytes, self.stream);
            (copied == CUresult::CUDA_SUCCESS).then_some(kept)
        }
    }

    /// Begins a copy of what is on a list that the device keeps.
    ///
    /// # Safety
    /// As for [`begin_with`](Copier::begin_with); and the list must stay until the copy has ended.
    ///
    /// # Panics
    /// Where there is no [room](Copier::has_room).
    pub unsafe fn begin_kept(&mut self, sum: bool, over_the_bus: bool, list: &KeptList) -> Result<Ticket, GpuError> {
        let _entered = self.device.enter()?;
        let slot = self.used.iter().position(|used| !used).expect("room for a copy");
        let few = [Piece { to: 0, from: 0, len: 0 }; FEW];
        // SAFETY: the caller's promise.
        unsafe { self.launch(slot, few, list.at, list.shape, sum, over_the_bus) }
    }

    /// # Safety
    /// As for [`begin_with`](Copier::begin_with), of the list at `at`, or of a few pieces where that is 0.
    unsafe fn launch(
        &mut self,
        slot: usize,
        mut few: [Piece; FEW],
        mut at: u64,
        shape: Shape,
        sum: bool,
        over_the_bus: bool,
    ) -> Result<Ticket, GpuError> {
        let Shape { count, longest, bytes } = shape;
        let most = match over_the_bus {
            true => BLOCKS_OVER_THE_BUS,
            false => self.device.multiprocessors() * BLOCKS_A_MULTIPROCESSOR,
        };
        let warps = u64::from(most * WARPS_A_BLOCK);
        let chunk = (bytes / (2 * warps))
            .clamp(CHUNK_MIN, CHUNK_MAX)
            .next_multiple_of(CHUNK_MIN);
        let mut chunks_a_piece = longest.div_ceil(chunk).max(1) as u32;
        let units = u64::from(count) * u64::from(chunks_a_piece);
        let blocks = units.div_ceil(u64::from(WARPS_A_BLOCK)).clamp(1, u64::from(most)) as u32;
        self.number = self.number.wrapping_add(1);
        let (mut number, mut count, mut chunk) = (self.number, count, chunk);
        let mut tally = self.tally;
        let mut report = self.reports.address() + (slot * size_of::<Report>()) as u64;
        let mut parameters: [*mut c_void; 8] = [
            few.as_mut_ptr().cast(),
            (&raw mut at).cast(),
            (&raw mut count).cast(),
            (&raw mut chunks_a_piece).cast(),
            (&raw mut chunk).cast(),
            (&raw mut tally).cast(),
            (&raw mut report).cast(),
            (&raw mut number).cast(),
        ];
        let kernel = if sum { self.summed } else { self.plain };
        // SAFETY: the parameters are those of the kernel, in its order and of its types; what it touches is the caller's promise.
        unsafe {
            let launched = sys::cuLaunchKernel(
                kernel,
                blocks,
                1,
                1,
                WARPS_A_BLOCK * LANES,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            );
            check("cuLaunchKernel", launched)?;
        }
        self.used[slot] = true;
        Ok(Ticket {
            slot,
            number,
            summed: sum,
        })
    }

    fn report(&self, slot: usize) -> &Report {
        // SAFETY: as many reports as slots were allocated, and aligned. The kernel writes the sums before it releases the number.
        unsafe { &*self.reports.as_ptr().cast::<Report>().add(slot) }
    }

    /// Whether a copy has ended, and if so how; its ticket is not used again. An error is the device's, and all of its copies have ended by it.
    pub fn look(&mut self, ticket: &Ticket) -> Option<Result<Copied, GpuError>> {
        if !self.used[ticket.slot] {
            let (call, name) = ("a look at a copy", "its end has been told already".to_owned());
            return Some(Err(GpuError::Call { call, name }));
        }
        let report = self.report(ticket.slot);
        if report.done.load(Ordering::Acquire) == ticket.number {
            let (read, written) = (&raw const report.read, &raw const report.written);
            // SAFETY: written before the number was released, and not again before the slot is used again.
            let (read_sum, written_sum) = unsafe { (read.read_volatile(), written.read_volatile()) };
            self.used[ticket.slot] = false;
            return Some(Ok(match ticket.summed {
                true => Copied { read_sum, written_sum },
                false => Copied::default(),
            }));
        }
        self.looks = self.looks.wrapping_add(1);
        if !self.looks.is_multiple_of(LOOKS_A_QUERY) {
            return None;
        }
        let failed = self.failure()?;
        self.used[ticket.slot] = false;
        Some(Err(failed))
    }

    /// Why the stream has stopped, if it has.
    fn failure(&self) -> Option<GpuError> {
        let _entered = match self.device.enter() {
            Ok(entered) => entered,
            Err(error) => return Some(error),
        };
        // SAFETY: the stream lives as long as the value.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            CUresult::CUDA_SUCCESS
            | CUresult::CUDA_ERROR_NOT_READY
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => None,
            other => check("a copy on the device", other).err(),
        }
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
        let Ok(_entered) = self.device.enter() else { return };
        // SAFETY: each was made by `new`, or is null, and the device is done with all of it.
        unsafe {
            if !self.stream.is_null() {
                sys::cuStreamSynchronize(self.stream);
                sys::cuStreamDestroy_v2(self.stream);
            }
            if self.tally != 0 {
                sys::cuMemFree_v2(self.tally);
            }
            if !self.module.is_null() {
                sys::cuModuleUnload(self.module);
            }
        }
    }
}

/// # Safety
/// The module must be loaded.
pub(crate) unsafe fn function(module: CUmodule, name: &CStr) -> Result<CUfunction, GpuError> {
    let mut found = std::ptr::null_mut();
    // SAFETY: the caller's promise.
    check("cuModuleGetFunction", unsafe {
        sys::cuModuleGetFunction(&mut found, module, name.as_ptr())
    })?;
    Ok(found)
}
