//! Launches, and what follows one without another launch: orders by mail to a worker that has stayed on the device.
//!
//! The device's side, and why none of it can wait for ever, is told in `kernels/worker.cuh`. This side has three words to look at: the report of an order, and the word by which
//! a worker tells that it leaves. Whoever leaves says which order was the last that it took; those after it are launched.

use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdeviceptr, CUfunction, CUmodule, CUresult, CUstream};

use crate::copier::{Piece, SLOTS};
use crate::device::{Device, GpuError, check};
use crate::kernels::function;
use crate::pinned::Pinned;

/// How long a worker stays on the device after a copy, where nobody says otherwise.
pub const STAY: Duration = Duration::from_micros(20);
const COPY: &str = include_str!("../kernels/copy.ptx");
const LANES: u32 = 32;
pub(crate) const WARPS_A_BLOCK: u32 = 16;
/// Pieces that come with an order; a longer list is read from where it lies.
pub(crate) const FEW: usize = 4;
/// Words of an order, one a lane.
const WORDS: usize = 32;
const MAILS: usize = 8;
const BOARD_BYTES: usize = 512;
/// Of these the first so many carry numbers of orders.
const BOARD_NUMBERS_BYTES: usize = (WORDS + 1) * size_of::<u64>();
/// Numbers are told apart while they are not further from each other than this.
const NUMBERS_APART_MAX: u32 = 1 << 30;
const LINE: usize = 64;
const MAIL_BYTES: usize = MAILS * WORDS * size_of::<u64>();
/// So many posts, each soon after the end of the one before, and another is expected.
const SOON_IN_A_ROW: u32 = 4;
/// However many orders come, a worker leaves after this long, so that others find room on the device.
const LIFE: Duration = Duration::from_millis(1);
/// A look at the stream costs more than one at a word, and tells only that the device has failed.
const LOOKS_A_QUERY: u32 = 4096;

pub(crate) const SUMMED: u32 = 1;
pub(crate) const OVER_THE_BUS: u32 = 2;
const LEAVE: u32 = 4;

/// What a copy is. The device reads it as it lies here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Order {
    /// Where the list is, or 0 where the few pieces are all.
    pub(crate) list: u64,
    pub(crate) count: u32,
    pub(crate) chunks_a_piece: u32,
    pub(crate) chunk: u32,
    pub(crate) slot: u32,
    pub(crate) flags: u32,
    pub(crate) blocks: u32,
    pub(crate) few: [Piece; FEW],
}

const _: () = assert!(size_of::<Order>() == WORDS * size_of::<u32>());

impl Order {
    fn words(&self) -> [u32; WORDS] {
        // SAFETY: as long, without padding, and of numbers alone.
        unsafe { std::mem::transmute_copy(self) }
    }
}

/// What a launch is told beside its first order.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Terms {
    board: u64,
    mail: u64,
    reports: u64,
    left: u64,
    number: u32,
    launch: u32,
    stay_ns: u64,
    life_ns: u64,
}

/// Where the device tells that an order has ended.
#[derive(Debug)]
#[repr(C, align(64))]
struct Report {
    read: u64,
    written: u64,
    done: AtomicU32,
}

pub(crate) struct Worker {
    device: Arc<Device>,
    stream: CUstream,
    module: CUmodule,
    copy: CUfunction,
    board: CUdeviceptr,
    /// Mail, the word of who leaves, and reports.
    post: Pinned,
    stay: Duration,
    /// Of the order that was given last.
    number: u32,
    /// Neither the mail nor the board has an older one.
    oldest: u32,
    /// Of the last launch: so many there have been.
    launch: u32,
    /// The launch that may still be on the device, and take orders.
    staying: Option<u32>,
    /// When the last order was seen to end, and how many have followed soon.
    ended: Option<Instant>,
    soon: u32,
    looks: u32,
}

// SAFETY: the driver's handles have no thread affinity, and every call enters the device first.
unsafe impl Send for Worker {}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Worker({:?}, {:?}, {:?})", self.device, self.stay, self.staying)
    }
}

impl Worker {
    pub(crate) fn new(device: &Arc<Device>, stay: Duration) -> Result<Worker, GpuError> {
        let _entered = device.enter()?;
        let mut worker = Worker {
            device: device.clone(),
            stream: std::ptr::null_mut(),
            module: std::ptr::null_mut(),
            copy: std::ptr::null_mut(),
            board: 0,
            post: Pinned::allocate(device, MAIL_BYTES + LINE + SLOTS * size_of::<Report>())?,
            stay,
            number: 0,
            oldest: 0,
            launch: 0,
            staying: None,
            ended: None,
            soon: 0,
            looks: 0,
        };
        let (mut least, mut greatest) = (0, 0);
        let text = CString::new(COPY).expect("the kernels are text");
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: results go to fields of the same types; the text of the module ends with a zero; what was made so far is undone by dropping the value.
        unsafe {
            check(
                "cuCtxGetStreamPriorityRange",
                sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest),
            )?;
            check(
                "cuStreamCreateWithPriority",
                sys::cuStreamCreateWithPriority(&mut worker.stream, flags, greatest),
            )?;
            check("cuMemAlloc", sys::cuMemAlloc_v2(&mut worker.board, BOARD_BYTES))?;
            check(
                "cuMemsetD8Async",
                sys::cuMemsetD8Async(worker.board, 0, BOARD_BYTES, worker.stream),
            )?;
            check(
                "cuModuleLoadData",
                sys::cuModuleLoadData(&mut worker.module, text.as_ptr().cast()),
            )?;
            worker.copy = function(worker.module, c"weft_copy")?;
        }
        Ok(worker)
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }
    /// Whatever uses the device's memory on behalf of an order comes before what is put on it later.
    pub(crate) fn stream(&self) -> CUstream {
        self.stream
    }

    pub(crate) fn launches(&self) -> u32 {
        self.launch
    }

    /// Of an order: one a multiprocessor, all of which run at once where others have left half of it.
    pub(crate) fn blocks_max(&self) -> u32 {
        self.device.multiprocessors()
    }

    /// Gives an order, by mail where somebody is there to take it and by a launch where nobody is. Tells its number. `idle`: no other is under way.
    ///
    /// # Safety
    /// What the order tells to copy must lie in memory that the device reaches, and that stays until the order has ended, as must its list.
    pub(crate) unsafe fn give(&mut self, order: &Order, idle: bool) -> Result<u32, GpuError> {
        let is_soon = !idle || self.ended.is_some_and(|ended| ended.elapsed() < self.stay);
        self.soon = if is_soon { self.soon.saturating_add(1) } else { 0 };
        if self.staying.is_some() {
            // If it leaves without having taken this one, that will be seen by whoever looks for its end.
            self.device.check_process()?;
            self.number = self.number.wrapping_add(1);
            self.mail(order, self.number);
            return Ok(self.number);
        }
        let number = self.number.wrapping_add(1);
        // SAFETY: the caller's promise.
        unsafe { self.launch(order, number, true) }?;
        self.number = number;
        Ok(number)
    }

    /// Launches an order that has a number already: the next after all that the device has taken. `last`: no other follows it at once.
    ///
    /// # Safety
    /// As for [`give`](Worker::give).
    pub(crate) unsafe fn launch(&mut self, order: &Order, number: u32, last: bool) -> Result<(), GpuError> {
        let _entered = self.device.enter()?;
        // Over the bus it takes few blocks, and all blocks of a launch have a share of its first order.
        let expected = self.soon >= SOON_IN_A_ROW && !self.stay.is_zero();
        let stays = expected && last && order.flags & OVER_THE_BUS == 0;
        let mut order = *order;
        if stays {
            order.blocks = self.blocks_max();
            self.forget_old_numbers(number)?;
        }
        let launch = self.launch.wrapping_add(1);
        let mut terms = Terms {
            board: self.board,
            mail: self.post.address(),
            reports: self.post.address() + (MAIL_BYTES + LINE) as u64,
            left: self.post.address() + MAIL_BYTES as u64,
            number,
            launch,
            stay_ns: if stays { self.stay.as_nanos() as u64 } else { 0 },
            life_ns: LIFE.as_nanos() as u64,
        };
        let mut parameters: [*mut c_void; 2] = [(&raw mut order).cast(), (&raw mut terms).cast()];
        // SAFETY: the parameters are those of the kernel, in its order and of its types; what it touches is the caller's promise.
        let launched = unsafe {
            sys::cuLaunchKernel(
                self.copy,
                order.blocks,
                1,
                1,
                WARPS_A_BLOCK * LANES,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check("cuLaunchKernel", launched)?;
        self.launch = launch;
        self.staying = stays.then_some(launch);
        Ok(())
    }

    /// Numbers begin again some day, and must not meet those of orders that are long over. Nobody stays, and the device is entered.
    fn forget_old_numbers(&mut self, number: u32) -> Result<(), GpuError> {
        if number.wrapping_sub(self.oldest) < NUMBERS_APART_MAX {
            return Ok(());
        }
        let before = number.wrapping_sub(1);
        for mail in 0..MAILS {
            self.mail_word(mail * WORDS, before, 0);
        }
        // SAFETY: within the board, which nobody reads before what is launched after this on the same stream.
        check("cuMemsetD32Async", unsafe {
            sys::cuMemsetD32Async(self.board, before, BOARD_NUMBERS_BYTES / size_of::<u32>(), self.stream)
        })?;
        self.oldest = before;
        Ok(())
    }

    /// Tells whoever stays to leave, and waits until it does, or the device has failed.
    fn dismiss(&mut self) {
        if self.staying.is_none() {
            return;
        }
        self.number = self.number.wrapping_add(1);
        let leave = Order {
            list: 0,
            count: 0,
            chunks_a_piece: 1,
            chunk: 1,
            slot: 0,
            flags: LEAVE,
            blocks: 1,
            few: [Piece { to: 0, from: 0, len: 0 }; FEW],
        };
        self.mail(&leave, self.number);
        while self.departure().is_none() && self.failure().is_none() {
            std::hint::spin_loop();
        }
        self.staying = None;
    }

    /// Each word with the number of its order, so that none has to come before another; but all of them after the list that they speak of.
    fn mail(&self, order: &Order, number: u32) {
        std::sync::atomic::fence(Ordering::Release);
        let first = number as usize % MAILS * WORDS;
        for (nth, word) in order.words().into_iter().enumerate() {
            self.mail_word(first + nth, number, word);
        }
    }

    fn mail_word(&self, nth: usize, number: u32, word: u32) {
        assert!(nth < MAILS * WORDS, "a word of the mail");
        // SAFETY: within the mail, which is aligned; the device only reads it.
        let place = unsafe { &*self.post.as_ptr().cast::<AtomicU64>().add(nth) };
        place.store(u64::from(number) << 32 | u64::from(word), Ordering::Relaxed);
    }

    /// The last order that was taken by whoever stayed, if it has left.
    fn departure(&self) -> Option<u32> {
        let launch = self.staying?;
        // SAFETY: behind the mail, and aligned; the device writes it at once.
        let word = unsafe { &*self.post.as_ptr().add(MAIL_BYTES).cast::<AtomicU64>() }.load(Ordering::Acquire);
        ((word >> 32) as u32 == launch).then_some(word as u32)
    }

    /// The same, once: orders after it are to be launched.
    pub(crate) fn take_departure(&mut self) -> Option<u32> {
        let last = self.departure()?;
        self.staying = None;
        Some(last)
    }

    /// The sums of an order, if it has ended.
    pub(crate) fn ended(&mut self, slot: usize, number: u32) -> Option<(u64, u64)> {
        // SAFETY: as many reports as slots were allocated, and aligned.
        let report = unsafe { self.post.as_ptr().add(MAIL_BYTES + LINE).cast::<Report>().add(slot) };
        // SAFETY: the device writes the sums before it releases the number, and not again before the slot is used again.
        let sums = unsafe {
            if (*report).done.load(Ordering::Acquire) != number {
                return None;
            }
            (
                (&raw const (*report).read).read_volatile(),
                (&raw const (*report).written).read_volatile(),
            )
        };
        self.ended = Some(Instant::now());
        Some(sums)
    }

    /// Why the device does nothing any more, if that is so; asked now and then only.
    pub(crate) fn failure(&mut self) -> Option<GpuError> {
        self.looks = self.looks.wrapping_add(1);
        if !self.looks.is_multiple_of(LOOKS_A_QUERY) {
            return None;
        }
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
}

impl Drop for Worker {
    fn drop(&mut self) {
        // In a forked child the mail is not its own either.
        if self.device.check_process().is_err() {
            return;
        }
        self.dismiss();
        let Ok(_entered) = self.device.enter() else { return };
        // SAFETY: each was made by `new`, or is null, and the device is done with all of it.
        unsafe {
            if !self.stream.is_null() {
                sys::cuStreamSynchronize(self.stream);
                sys::cuStreamDestroy_v2(self.stream);
            }
            if self.board != 0 {
                sys::cuMemFree_v2(self.board);
            }
            if !self.module.is_null() {
                sys::cuModuleUnload(self.module);
            }
        }
    }
}
