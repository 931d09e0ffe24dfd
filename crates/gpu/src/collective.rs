//! Collectives between ranks that reach each other's memory, on streams of the caller's.
//!
//! A call puts one kernel on the caller's stream and returns. Nothing of a call comes from the host but addresses and lengths, so calls can be captured in a graph. Every rank makes the same calls
//! in the same order, on one stream at a time, or on several that wait for each other. Ranks of one process may be driven by a thread each, or by one thread in one launch for all of them
//! ([`Team::call_all`]).
//!
//! What a reduction means, to the last bit, is said in `plan`'s [`Datatype`]: ranks are folded in their order, so the result is the same every time and on every rank.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use thiserror::Error;
use weft_plan::{Datatype, Reduction};

use crate::choice::{Choice, Way, choose};
use crate::device::{GpuError, check};
use crate::kernels::{Kernel, THREADS};
use crate::layout::RANKS_MAX;
use crate::team::Team;

/// Why a collective was refused, or has failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CollectiveError {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error("there is no rank {rank} here, among {ranks}")]
    RankOutOfRange { rank: usize, ranks: usize },
    #[error("a team has 1 to {RANKS_MAX} ranks, not {ranks}")]
    TooManyRanks { ranks: usize },
    #[error("a deadline of nothing or of more than an hour, or no blocks")]
    BadSettings,
    #[error("{found} buffers where {needed} are needed")]
    WrongBuffers { needed: usize, found: usize },
    #[error("a buffer of {found} bytes where {needed} are needed")]
    BufferTooSmall { needed: u64, found: u64 },
    #[error("{bytes} bytes are too many")]
    TooLong { bytes: u64 },
    #[error("{address:#x} is not where an element of {bytes} bytes can lie")]
    Misaligned { address: u64, bytes: u64 },
    #[error("input and output overlap other than in place")]
    Overlap,
    #[error("rows of {hidden} elements: a multiple of {multiple} is needed, and at most {most}")]
    BadRow { hidden: u64, multiple: u64, most: u64 },
    #[error("a scale or an epsilon that is no number, or not above nothing")]
    BadNumber,
    #[error("no kernel reduces {datatype}")]
    NotReduced { datatype: Datatype },
    #[error("this way does not take so many bytes, or not this collective")]
    NotThisWay,
    #[error("memory at {address:#x} is not registered with the ranks of other processes")]
    NotReachable { address: u64 },
    #[error("no room for more registered memories")]
    TooManyWindows,
    #[error("rank {rank} did not come within the deadline")]
    PeerTimedOut { rank: usize },
    #[error("rank {rank} has given up")]
    PeerGaveUp { rank: usize },
    #[error("the team was aborted")]
    Aborted,
}

/// What all ranks do together. Counts are of elements, or of bytes where nothing is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    AllReduce {
        count: u64,
        datatype: Datatype,
        reduction: Reduction,
    },
    /// Every rank gets `count` elements; its input has that for each rank.
    ReduceScatter {
        count: u64,
        datatype: Datatype,
        reduction: Reduction,
    },
    /// Every rank brings `bytes`; its output has that for each rank.
    AllGather { bytes: u64 },
    /// Every rank has `bytes` for each rank.
    AllToAll { bytes: u64 },
    /// The root's input becomes everybody's output. The inputs of others are not looked at.
    Broadcast { bytes: u64, root: usize },
}

/// Memory of the device, by its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    pub address: u64,
    pub bytes: u64,
}

/// What one rank brings to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    pub input: DeviceSlice,
    pub output: DeviceSlice,
}

impl Collective {
    /// What input and output have to hold.
    pub fn bytes(&self, ranks: usize) -> Result<(u64, u64), CollectiveError> {
        let ranks = ranks as u64;
        let sized = |count: u64, size: u64, input: u64, output: u64| {
            let bytes = count
                .checked_mul(size)
                .filter(|bytes| bytes.checked_mul(ranks).is_some_and(|all| all <= BYTES_MAX));
            let bytes = bytes.ok_or(CollectiveError::TooLong { bytes: count })?;
            Ok((bytes * input, bytes * output))
        };
        match *self {
            Collective::AllReduce { count, datatype, .. } => sized(count, datatype.size() as u64, 1, 1),
            Collective::ReduceScatter { count, datatype, .. } => sized(count, datatype.size() as u64, ranks, 1),
            Collective::AllGather { bytes } => sized(bytes, 1, 1, ranks),
            Collective::AllToAll { bytes } => sized(bytes, 1, ranks, ranks),
            Collective::Broadcast { bytes, .. } => sized(bytes, 1, 1, 1),
        }
    }

    fn reduced(&self) -> Option<(Datatype, Reduction)> {
        match *self {
            Collective::AllReduce {
                datatype, reduction, ..
            }
            | Collective::ReduceScatter {
                datatype, reduction, ..
            } => Some((datatype, reduction)),
            _ => None,
        }
    }

    /// What is wrong with a rank's buffers, if anything is.
    pub(crate) fn check(&self, rank: usize, ranks: usize, buffers: &Buffers) -> Result<(), CollectiveError> {
        let (input, output) = self.bytes(ranks)?;
        let mut input_counts = true;
        match *self {
            Collective::Broadcast { root, .. } if root >= ranks => {
                return Err(CollectiveError::RankOutOfRange { rank: root, ranks });
            }
            Collective::Broadcast { root, .. } => input_counts = root == rank,
            _ => {}
        }
        let size = match self.reduced() {
            Some((datatype, _)) if element_number(datatype).is_none() => {
                return Err(CollectiveError::NotReduced { datatype });
            }
            Some((datatype, _)) => datatype.size() as u64,
            None => 1,
        };
        let both = [(buffers.output, output), (buffers.input, input)];
        for &(slice, needed) in &both[..1 + usize::from(input_counts)] {
            if slice.bytes < needed {
                return Err(CollectiveError::BufferTooSmall {
                    needed,
                    found: slice.bytes,
                });
            }
            if slice.address % size != 0 || slice.address.checked_add(slice.bytes).is_none() {
                return Err(CollectiveError::Misaligned {
                    address: slice.address,
                    bytes: size,
                });
            }
        }
        if input_counts {
            let (from, to) = (buffers.input.address, buffers.output.address);
            let in_place = match *self {
                Collective::AllReduce { .. } | Collective::Broadcast { .. } => from == to,
                Collective::ReduceScatter { .. } => to == from + rank as u64 * output,
                Collective::AllGather { .. } => from == to + rank as u64 * input,
                Collective::AllToAll { .. } => false,
            };
            let apart = from + input <= to || to + output <= from;
            if !in_place && !apart {
                return Err(CollectiveError::Overlap);
            }
        }
        Ok(())
    }
}

const BYTES_MAX: u64 = 1 << 44;

const ALL_REDUCE: u32 = 0;
const REDUCE_SCATTER: u32 = 1;
const ALL_GATHER: u32 = 2;
const ALL_TO_ALL: u32 = 3;
const BROADCAST: u32 = 4;

/// As kernels number elements; nothing for those that none reduces.
pub(crate) fn element_number(datatype: Datatype) -> Option<u32> {
    match datatype {
        Datatype::F32 => Some(0),
        Datatype::F16 => Some(1),
        Datatype::Bf16 => Some(2),
        Datatype::I32 => Some(3),
        _ => None,
    }
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct LocalView {
    input: u64,
    output: u64,
    input_reference: u64,
    output_reference: u64,
}

/// What kernels are told of a call. The same fields as `Call` in `meeting.cuh`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CallView {
    locals: [LocalView; RANKS_MAX],
    count: u64,
    kind: u32,
    root: u32,
    element: u32,
    fold: u32,
    divisor: u32,
    scale: f32,
}

const _: () = assert!(size_of::<CallView>() == 288 && size_of::<LocalView>() == 32);

impl CallView {
    /// A call that moves nothing.
    pub fn nothing() -> CallView {
        CallView::new(&Collective::AllGather { bytes: 0 }, 1)
    }

    fn new(collective: &Collective, ranks: usize) -> CallView {
        let (kind, count, root) = match *collective {
            Collective::AllReduce { count, .. } => (ALL_REDUCE, count, 0),
            Collective::ReduceScatter { count, .. } => (REDUCE_SCATTER, count, 0),
            Collective::AllGather { bytes } => (ALL_GATHER, bytes, 0),
            Collective::AllToAll { bytes } => (ALL_TO_ALL, bytes, 0),
            Collective::Broadcast { bytes, root } => (BROADCAST, bytes, root as u32),
        };
        let (datatype, reduction) = collective.reduced().unwrap_or((Datatype::F32, Reduction::Sum));
        let folding = Folding::new(datatype, reduction, ranks);
        CallView {
            locals: [LocalView::default(); RANKS_MAX],
            count,
            kind,
            root,
            element: element_number(datatype).unwrap_or(0),
            fold: folding.fold,
            divisor: folding.divisor,
            scale: folding.scale,
        }
    }
}

/// How a call folds, as kernels have it: the average of two, four or eight floats is a product, which is the same as the quotient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Folding {
    pub fold: u32,
    pub divisor: u32,
    pub scale: f32,
}

impl Folding {
    pub fn new(datatype: Datatype, reduction: Reduction, ranks: usize) -> Folding {
        let fold = match reduction {
            Reduction::Sum | Reduction::Avg => 0,
            Reduction::Prod => 1,
            Reduction::Min => 2,
            Reduction::Max => 3,
        };
        let exact = datatype.is_float() && ranks.is_power_of_two();
        let (divisor, scale) = match reduction {
            Reduction::Avg if exact => (0, 1.0 / ranks as f32),
            Reduction::Avg => (ranks as u32, 1.0),
            _ => (0, 1.0),
        };
        Folding { fold, divisor, scale }
    }

    /// Whether it is a sum that kernels made for sums take.
    pub fn is_plain_sum(&self) -> bool {
        self.fold == 0 && self.divisor == 0
    }
}

/// One rank of a team, as whoever calls collectives holds it.
#[derive(Clone, Debug)]
pub struct Collectives {
    team: Arc<Team>,
    rank: usize,
    way: Option<Way>,
}

impl Collectives {
    pub fn new(team: &Arc<Team>, rank: usize) -> Result<Collectives, CollectiveError> {
        team.local(rank)?;
        Ok(Collectives {
            team: team.clone(),
            rank,
            way: None,
        })
    }

    /// The same with a way of the caller's choice; every rank has to make the same one.
    pub fn by(&self, way: Way) -> Collectives {
        Collectives {
            way: Some(way),
            ..self.clone()
        }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }
    pub fn team(&self) -> &Arc<Team> {
        &self.team
    }

    /// Puts this rank's part of a collective on a stream. That it has gone well is known from [`Team::check`] when the stream has come past it.
    ///
    /// # Safety
    /// Both buffers must be memory that this device reaches, and stay until the kernels of all ranks have ended; the stream must be one of this device's.
    pub unsafe fn call(&self, stream: u64, collective: Collective, buffers: Buffers) -> Result<(), CollectiveError> {
        // SAFETY: the caller's promise.
        unsafe { self.team.put(stream, &collective, self.rank, &[buffers], self.way) }
    }

    /// # Safety
    /// As for [`call`](Collectives::call).
    pub unsafe fn all_reduce(
        &self,
        stream: u64,
        buffers: Buffers,
        count: u64,
        datatype: Datatype,
        reduction: Reduction,
    ) -> Result<(), CollectiveError> {
        let collective = Collective::AllReduce {
            count,
            datatype,
            reduction,
        };
        // SAFETY: the caller's promise.
        unsafe { self.call(stream, collective, buffers) }
    }

    /// # Safety
    /// As for [`call`](Collectives::call).
    pub unsafe fn reduce_scatter(
        &self,
        stream: u64,
        buffers: Buffers,
        count: u64,
        datatype: Datatype,
        reduction: Reduction,
    ) -> Result<(), CollectiveError> {
        let collective = Collective::ReduceScatter {
            count,
            datatype,
            reduction,
        };
        // SAFETY: the caller's promise.
        unsafe { self.call(stream, collective, buffers) }
    }

    /// # Safety
    /// As for [`call`](Collectives::call).
    pub unsafe fn all_gather(&self, stream: u64, buffers: Buffers, bytes: u64) -> Result<(), CollectiveError> {
        // SAFETY: the caller's promise.
        unsafe { self.call(stream, Collective::AllGather { bytes }, buffers) }
    }

    /// # Safety
    /// As for [`call`](Collectives::call).
    pub unsafe fn all_to_all(&self, stream: u64, buffers: Buffers, bytes: u64) -> Result<(), CollectiveError> {
        // SAFETY: the caller's promise.
        unsafe { self.call(stream, Collective::AllToAll { bytes }, buffers) }
    }

    /// # Safety
    /// As for [`call`](Collectives::call).
    pub unsafe fn broadcast(
        &self,
        stream: u64,
        buffers: Buffers,
        bytes: u64,
        root: usize,
    ) -> Result<(), CollectiveError> {
        // SAFETY: the caller's promise.
        unsafe { self.call(stream, Collective::Broadcast { bytes, root }, buffers) }
    }
}

impl Team {
    /// All ranks of this process at once, in one launch: `buffers` in the order of their ranks.
    ///
    /// # Safety
    /// As for [`Collectives::call`].
    pub unsafe fn call_all(
        &self,
        stream: u64,
        collective: Collective,
        buffers: &[Buffers],
        way: Option<Way>,
    ) -> Result<(), CollectiveError> {
        if buffers.len() != self.here().len() {
            return Err(CollectiveError::WrongBuffers {
                needed: self.here().len(),
                found: buffers.len(),
            });
        }
        // SAFETY: the caller's promise.
        unsafe { self.put(stream, &collective, self.here().start, buffers, way) }
    }

    /// The buffers are those of `first` and of the ranks after it.
    ///
    /// # Safety
    /// As for [`Collectives::call`].
    unsafe fn put(
        &self,
        stream: u64,
        collective: &Collective,
        first: usize,
        buffers: &[Buffers],
        way: Option<Way>,
    ) -> Result<(), CollectiveError> {
        let ranks = self.ranks();
        for (rank, buffers) in (first..).zip(buffers) {
            self.check(rank)?;
            collective.check(rank, ranks, buffers)?;
        }
        let (input, output) = collective.bytes(ranks)?;
        if output == 0 {
            return Ok(());
        }
        if ranks == 1 {
            // SAFETY: the caller's promise.
            return unsafe { self.copy(stream, &buffers[0], output) };
        }
        let choice = choose(collective, ranks, way, self.blocks_max(), self.costs())?;
        let mut call = CallView::new(collective, ranks);
        for (local, (rank, buffers)) in call.locals.iter_mut().zip((first..).zip(buffers)) {
            *local = LocalView {
                input: buffers.input.address,
                output: buffers.output.address,
                input_reference: 0,
                output_reference: 0,
            };
            if choice.way != Way::Bulk {
                continue;
            }
            let (reads, writes) = reached_by_others(collective, rank);
            let reach = |slice: DeviceSlice, bytes: u64, reached: bool| match self.reference(slice.address, bytes) {
                Some(reference) => Ok(reference),
                None if !reached => Ok(0),
                None => Err(CollectiveError::NotReachable { address: slice.address }),
            };
            local.input_reference = reach(buffers.input, input, reads)?;
            local.output_reference = reach(buffers.output, output, writes)?;
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch(stream, first, buffers.len(), &choice, call) }
    }

    /// # Safety
    /// As for [`Collectives::call`].
    unsafe fn launch(
        &self,
        stream: u64,
        first: usize,
        count: usize,
        choice: &Choice,
        mut call: CallView,
    ) -> Result<(), CollectiveError> {
        let mut view = self.view(first)?;
        let mut parameters: [*mut c_void; 2] = [(&raw mut view).cast(), (&raw mut call).cast()];
        // SAFETY: both parameters are those of every kernel that is chosen here; the rest is the caller's promise.
        unsafe {
            let grid = (choice.blocks, count as u32);
            self.kernels()
                .launch(choice.kernel, grid, THREADS, stream, &mut parameters)?;
        }
        Ok(())
    }

    /// A team of one.
    ///
    /// # Safety
    /// As for [`Collectives::call`].
    unsafe fn copy(&self, stream: u64, buffers: &Buffers, bytes: u64) -> Result<(), CollectiveError> {
        let (from, to) = (buffers.input.address, buffers.output.address);
        if from == to {
            return Ok(());
        }
        let _entered = self.device().enter()?;
        // SAFETY: both are as long as is said; the rest is the caller's promise.
        let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream as sys::CUstream) };
        Ok(check("cuMemcpyDtoDAsync", copied)?)
    }

    /// Has the first two ranks, both of this process, hand a word to and fro, and writes how many nanoseconds that took, but for the first of the rounds, to `took_ns`. `bare`: the word alone;
    /// else as a signal that orders memory.
    ///
    /// # Safety
    /// `took_ns` must be eight bytes that the device reaches, and stay until the kernel has ended; the stream must be one of this device's.
    pub unsafe fn round_trip(&self, stream: u64, rounds: u32, bare: bool, took_ns: u64) -> Result<(), CollectiveError> {
        self.check(0)?;
        self.check(1)?;
        let (mut view, mut rounds, mut bare, mut took_ns) = (self.view(0)?, rounds, u32::from(bare), took_ns);
        let mut parameters: [*mut c_void; 4] = [
            (&raw mut view).cast(),
            (&raw mut rounds).cast(),
            (&raw mut bare).cast(),
            (&raw mut took_ns).cast(),
        ];
        // SAFETY: the parameters are those of the kernel; the rest is the caller's promise.
        Ok(unsafe {
            self.kernels()
                .launch(Kernel::RoundTrip, (1, 2), 1, stream, &mut parameters)
        }?)
    }
}

/// Whether kernels of other ranks read a rank's input, and write its output, in bulk.
pub(crate) fn reached_by_others(collective: &Collective, rank: usize) -> (bool, bool) {
    match *collective {
        Collective::AllReduce { .. } => (true, true),
        Collective::ReduceScatter { .. } => (true, false),
        Collective::AllGather { .. } | Collective::AllToAll { .. } => (false, true),
        Collective::Broadcast { root, .. } => (rank == root, true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(address: u64, bytes: u64) -> DeviceSlice {
        DeviceSlice { address, bytes }
    }

    fn buffers(input: (u64, u64), output: (u64, u64)) -> Buffers {
        Buffers {
            input: slice(input.0, input.1),
            output: slice(output.0, output.1),
        }
    }

    #[test]
    fn lengths_are_those_of_the_collective() {
        let (count, datatype, reduction) = (10, Datatype::Bf16, Reduction::Sum);
        let all_reduce = Collective::AllReduce {
            count,
            datatype,
            reduction,
        };
        let scatter = Collective::ReduceScatter {
            count,
            datatype,
            reduction,
        };
        assert_eq!(all_reduce.bytes(4), Ok((20, 20)));
        assert_eq!(scatter.bytes(4), Ok((80, 20)));
        assert_eq!(Collective::AllGather { bytes: 7 }.bytes(3), Ok((7, 21)));
        assert_eq!(Collective::AllToAll { bytes: 7 }.bytes(3), Ok((21, 21)));
        assert_eq!(Collective::Broadcast { bytes: 7, root: 2 }.bytes(3), Ok((7, 7)));
        let long = Collective::AllGather { bytes: u64::MAX / 2 };
        assert!(matches!(long.bytes(8), Err(CollectiveError::TooLong { .. })));
    }

    #[test]
    fn wrong_buffers_are_told_apart() {
        let reduce = |datatype| Collective::AllReduce {
            count: 100,
            datatype,
            reduction: Reduction::Sum,
        };
        let f32s = reduce(Datatype::F32);
        let check = |collective: Collective, rank, of: Buffers| collective.check(rank, 4, &of);
        assert_eq!(check(f32s, 0, buffers((0x1000, 400), (0x2000, 400))), Ok(()));
        assert_eq!(check(f32s, 0, buffers((0x1000, 400), (0x1000, 400))), Ok(()));
        assert_eq!(
            check(f32s, 0, buffers((0x1000, 399), (0x2000, 400))),
            Err(CollectiveError::BufferTooSmall {
                needed: 400,
                found: 399
            })
        );
        assert_eq!(
            check(f32s, 0, buffers((0x1002, 400), (0x2000, 400))),
            Err(CollectiveError::Misaligned {
                address: 0x1002,
                bytes: 4
            })
        );
        assert_eq!(
            check(f32s, 0, buffers((0x1000, 400), (0x1010, 400))),
            Err(CollectiveError::Overlap)
        );
        assert_eq!(
            check(reduce(Datatype::Fp8E4m3), 0, buffers((0x1000, 400), (0x2000, 400))),
            Err(CollectiveError::NotReduced {
                datatype: Datatype::Fp8E4m3
            })
        );
        let gather = Collective::AllGather { bytes: 100 };
        assert_eq!(check(gather, 2, buffers((0x1000 + 200, 100), (0x1000, 400))), Ok(()));
        assert_eq!(
            check(gather, 1, buffers((0x1000 + 200, 100), (0x1000, 400))),
            Err(CollectiveError::Overlap)
        );
        let dealt = Collective::AllToAll { bytes: 100 };
        assert_eq!(
            check(dealt, 0, buffers((0x1000, 400), (0x1000, 400))),
            Err(CollectiveError::Overlap)
        );
        // Only the root's input is looked at.
        let broadcast = Collective::Broadcast { bytes: 100, root: 1 };
        assert_eq!(check(broadcast, 0, buffers((0, 0), (0x1000, 100))), Ok(()));
        assert!(matches!(
            check(broadcast, 1, buffers((0, 0), (0x1000, 100))),
            Err(CollectiveError::BufferTooSmall { .. })
        ));
        let nobody = Collective::Broadcast { bytes: 100, root: 4 };
        assert!(matches!(
            check(nobody, 0, buffers((0, 0), (0x1000, 100))),
            Err(CollectiveError::RankOutOfRange { rank: 4, ranks: 4 })
        ));
    }

    #[test]
    fn averages_are_products_where_that_is_the_same() {
        let of = |datatype, ranks| Folding::new(datatype, Reduction::Avg, ranks);
        assert_eq!((of(Datatype::Bf16, 8).scale, of(Datatype::Bf16, 8).divisor), (0.125, 0));
        assert_eq!((of(Datatype::Bf16, 6).scale, of(Datatype::Bf16, 6).divisor), (1.0, 6));
        assert_eq!((of(Datatype::I32, 8).scale, of(Datatype::I32, 8).divisor), (1.0, 8));
        assert!(Folding::new(Datatype::F32, Reduction::Sum, 3).is_plain_sum());
        assert!(!Folding::new(Datatype::F32, Reduction::Max, 2).is_plain_sum());
    }

    #[test]
    fn kernels_number_kinds_and_elements_alike() {
        let meeting = include_str!("../kernels/meeting.cuh");
        let kinds = format!(
            "ALL_REDUCE = {ALL_REDUCE}, REDUCE_SCATTER = {REDUCE_SCATTER}, ALL_GATHER = {ALL_GATHER}, ALL_TO_ALL = {ALL_TO_ALL}, BROADCAST = {BROADCAST} "
        );
        assert!(meeting.contains(&kinds), "{kinds}");
        let elements = include_str!("../kernels/elements.cuh");
        assert!(elements.contains("ELEMENT_F32 = 0, ELEMENT_F16 = 1, ELEMENT_BF16 = 2, ELEMENT_I32 = 3 "));
        assert!(elements.contains("SUM = 0, PRODUCT = 1, LESSER = 2, GREATER = 3 "));
    }
}
