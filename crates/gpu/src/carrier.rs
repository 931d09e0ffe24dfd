//! Collectives on any memory of a device, also among processes.
//!
//! Kernels of other processes reach a rank's heap and nothing else of it. So what a call has elsewhere goes through the heap: it is copied there, and back, on the caller's stream, in
//! pieces. The memory of the caller is touched by its own device in the order of its own stream alone, so it may be freed, and given out again, as soon as the stream allows it; nobody
//! remembers where it was.
//!
//! How a call is cut depends on nothing but its size, so all ranks cut it alike. What is copied is each rank's own affair: a buffer that lies in the heap is used where it lies, unless the
//! call is cut across it.

mod norm;

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use crate::choice::{Way, choose};
use crate::collective::{Buffers, Collective, CollectiveError, Collectives, DeviceSlice, reached_by_others};
use crate::device::{GpuError, check};
use crate::event::Mark;
use crate::team::Team;

/// One rank of a team, for calls on memory anywhere on its device.
#[derive(Debug)]
pub struct Carrier {
    calls: Collectives,
    plan: Stages,
    order: Mutex<Order>,
}

/// Where in the application's part of a heap the pieces of calls lie.
#[derive(Clone, Copy, Debug)]
struct Stages {
    input: u64,
    output: u64,
    bytes: u64,
    /// What barriers tell each other: nothing, in so many bytes.
    words: u64,
}

/// Bytes of a call that go through the heap at once. Larger pieces are hardly quicker, and every team of a process has memory for two.
pub const PIECE_BYTES: u64 = 32 << 20;
/// Pieces are cut at multiples of this, so that what lies well lies well in every piece.
const CUT: u64 = 128;
const WORD: u64 = 8;
/// For the words of barriers: one of this rank's, one of every rank's.
const WORDS_BYTES: u64 = 256;

impl Carrier {
    /// Bytes of a heap that carry pieces of so many bytes: what [`TeamSettings::data_bytes`](crate::TeamSettings) has to be, at least.
    pub fn heap_bytes(piece_bytes: u64) -> u64 {
        2 * piece_bytes + WORDS_BYTES
    }

    /// `piece_bytes` must be the same on all ranks, a multiple of 1024, and have room in the heap ([`heap_bytes`](Carrier::heap_bytes)).
    pub fn new(team: &Arc<Team>, rank: usize, piece_bytes: u64) -> Result<Carrier, CollectiveError> {
        let (needed, found) = (Carrier::heap_bytes(piece_bytes), team.data_bytes());
        if piece_bytes == 0 || !piece_bytes.is_multiple_of(CUT * crate::RANKS_MAX as u64) {
            return Err(CollectiveError::BadSettings);
        }
        if needed > found {
            return Err(CollectiveError::BufferTooSmall { needed, found });
        }
        let data = team.data(rank)?;
        Ok(Carrier {
            calls: Collectives::new(team, rank)?,
            plan: Stages {
                input: data,
                output: data + piece_bytes,
                bytes: piece_bytes,
                words: data + 2 * piece_bytes,
            },
            order: Mutex::new(Order {
                mark: Mark::new(team.device())?,
                last: None,
            }),
        })
    }

    pub fn team(&self) -> &Arc<Team> {
        self.calls.team()
    }
    pub fn rank(&self) -> usize {
        self.calls.rank()
    }

    /// Puts this rank's part of a collective on a stream, after the call before it on whatever stream that was. That it has gone well is known from [`Team::check`] when the stream has
    /// come past it.
    ///
    /// # Safety
    /// Both buffers must be memory of this device, and stay until the stream has come past the call; those in the heap, until the streams of all ranks have. The stream must be one of this device's.
    pub unsafe fn call(&self, stream: u64, collective: Collective, buffers: Buffers) -> Result<(), CollectiveError> {
        let (rank, ranks) = (self.rank(), self.team().ranks());
        self.team().check(rank)?;
        collective.check(rank, ranks, &buffers)?;
        // SAFETY: the caller's promise.
        unsafe { self.in_order(stream, || self.put(stream, collective, buffers)) }
    }

    /// Puts other calls of this rank's on a stream, in one order with its collectives: kernels of a team count their calls, so two must not be there at once.
    ///
    /// # Safety
    /// The stream must be one of this device's.
    pub unsafe fn in_order<E: From<GpuError>>(
        &self,
        stream: u64,
        put: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise.
        unsafe { order.begin(stream)? };
        put()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { order.end(stream) }?)
    }

    /// What comes on the stream from now on comes after what is on the streams of all other ranks when they put their barrier there.
    ///
    /// # Safety
    /// The stream must be one of this device's.
    pub unsafe fn barrier(&self, stream: u64) -> Result<(), CollectiveError> {
        let ranks = self.team().ranks() as u64;
        let words = |at: u64, count: u64| DeviceSlice {
            address: self.plan.words + at,
            bytes: count * WORD,
        };
        let buffers = Buffers {
            input: words(0, 1),
            output: words(WORDS_BYTES / 2, ranks),
        };
        // SAFETY: the words are the heap's; the rest is the caller's promise.
        unsafe { self.call(stream, Collective::AllGather { bytes: WORD }, buffers) }
    }

    /// # Safety
    /// As for [`call`](Carrier::call).
    unsafe fn put(&self, stream: u64, collective: Collective, buffers: Buffers) -> Result<(), CollectiveError> {
        let (rank, team) = (self.rank(), self.team());
        let ranks = team.ranks();
        let far = ranks > 1 && team.is_far();
        if !far || choose(&collective, ranks, None, team.blocks_max(), team.costs())?.way != Way::Bulk {
            // SAFETY: the caller's promise. Packets touch the caller's memory by this rank's kernel alone.
            return unsafe { self.calls.call(stream, collective, buffers) };
        }
        for piece in pieces(&collective, rank, ranks, self.plan.bytes) {
            // SAFETY: the caller's promise.
            unsafe { self.put_piece(stream, &piece, &buffers)? };
        }
        Ok(())
    }

    /// # Safety
    /// As for [`call`](Carrier::call).
    unsafe fn put_piece(&self, stream: u64, piece: &Piece, buffers: &Buffers) -> Result<(), CollectiveError> {
        let team = self.team();
        let fits = |slice: DeviceSlice, part: &Part, reached: bool| {
            let (address, bytes) = (slice.address + part.at, part.bytes());
            let whole = part.rows == 1 || part.stride == part.row;
            let here = whole && (!reached || team.reference(address, bytes).is_some());
            here.then_some(DeviceSlice { address, bytes })
        };
        let staged = |address: u64, part: &Part| DeviceSlice {
            address,
            bytes: part.bytes(),
        };
        let (reads, writes) = (piece.input_is_reached, piece.output_is_reached);
        let output = fits(buffers.output, &piece.output, writes);
        let input = match piece.input_is_read {
            true => fits(buffers.input, &piece.input, reads),
            // Nobody looks at it, but there has to be one.
            false => Some(output.unwrap_or(staged(self.plan.input, &piece.output))),
        };
        let from = input.unwrap_or(staged(self.plan.input, &piece.input));
        // What ends where it began is done in one place.
        let in_place = piece.is_in_place && (input.is_none() || !piece.input_is_read);
        let to = output.unwrap_or(staged(
            if in_place { self.plan.input } else { self.plan.output },
            &piece.output,
        ));
        // SAFETY: the caller's promise; what is staged lies in the heap, which lives as long as the team.
        unsafe {
            if input.is_none() {
                self.copy_in(stream, from.address, buffers.input.address, &piece.input)?;
            }
            let both = Buffers {
                input: from,
                output: to,
            };
            self.calls.call(stream, piece.collective, both)?;
            // A root that sends from where it would receive has it there already.
            let has_it = piece.keeps_input && buffers.input.address == buffers.output.address;
            if output.is_none() && !has_it {
                self.copy_out(stream, buffers.output.address, to.address, &piece.output)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// Both sides must be as long as is said, and stay until the stream has come past the copies.
    unsafe fn copy_in(&self, stream: u64, stage: u64, from: u64, part: &Part) -> Result<(), GpuError> {
        part.runs().try_for_each(|run| {
            // SAFETY: the caller's promise.
            unsafe { self.copy(stream, stage + run.packed, from + run.at, run.bytes) }
        })
    }

    /// # Safety
    /// As for [`copy_in`](Carrier::copy_in).
    unsafe fn copy_out(&self, stream: u64, to: u64, stage: u64, part: &Part) -> Result<(), GpuError> {
        part.runs().try_for_each(|run| {
            // SAFETY: the caller's promise.
            unsafe { self.copy(stream, to + run.at, stage + run.packed, run.bytes) }
        })
    }

    /// # Safety
    /// As for [`copy_in`](Carrier::copy_in).
    unsafe fn copy(&self, stream: u64, to: u64, from: u64, bytes: u64) -> Result<(), GpuError> {
        let _entered = self.team().device().enter()?;
        // SAFETY: the caller's promise.
        let copied = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream as sys::CUstream) };
        check("cuMemcpyDtoDAsync", copied)
    }
}

/// The calls of a team come one after the other, whatever streams they are on.
#[derive(Debug)]
struct Order {
    mark: Mark,
    /// The stream of the last call, and the capture that it belonged to.
    last: Option<(u64, u64)>,
}

impl Order {
    /// # Safety
    /// The stream must be one of this device's.
    unsafe fn begin(&mut self, stream: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        let capture = unsafe { self.mark.capture_of(stream)? };
        match self.last {
            // Work that is captured cannot wait for work that is not, nor the other way: there the caller's own order, of graphs and streams, is all that there is.
            Some((other, its)) if other != stream && its == capture => {
                // SAFETY: the caller's promise.
                unsafe { self.mark.comes_before(stream)? };
            }
            _ => {}
        }
        self.last = Some((stream, capture));
        Ok(())
    }

    /// # Safety
    /// The stream must be one of this device's.
    unsafe fn end(&mut self, stream: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.mark.set(stream) }
    }
}

/// What of a buffer a piece of a call is about: rows of equal length, one for each rank or one alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    at: u64,
    rows: u64,
    row: u64,
    stride: u64,
}

struct Copied {
    /// Where it lies in the caller's buffer, and where the rows are one after the other.
    at: u64,
    packed: u64,
    bytes: u64,
}

impl Part {
    fn bytes(&self) -> u64 {
        self.rows * self.row
    }

    fn runs(&self) -> impl Iterator<Item = Copied> {
        let Part { at, rows, row, stride } = *self;
        let (rows, row) = if stride == row { (1, rows * row) } else { (rows, row) };
        (0..rows).map(move |nth| Copied {
            at: at + nth * stride,
            packed: nth * row,
            bytes: row,
        })
    }
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    collective: Collective,
    input: Part,
    output: Part,
    input_is_read: bool,
    /// Whether kernels of other ranks read the input, and write the output.
    input_is_reached: bool,
    output_is_reached: bool,
    is_in_place: bool,
    /// Whether the output of this rank is its input.
    keeps_input: bool,
}

/// A call in pieces of which no side has more than `most` bytes; as it is, where it fits.
fn pieces(collective: &Collective, rank: usize, ranks: usize, most: u64) -> impl Iterator<Item = Piece> + use<> {
    let collective = *collective;
    let all = ranks as u64;
    let (share, rows_in, rows_out) = match collective {
        Collective::AllReduce { count, datatype, .. } => (count * datatype.size() as u64, 1, 1),
        Collective::ReduceScatter { count, datatype, .. } => (count * datatype.size() as u64, all, 1),
        Collective::AllGather { bytes } => (bytes, 1, all),
        Collective::AllToAll { bytes } => (bytes, all, all),
        Collective::Broadcast { bytes, .. } => (bytes, 1, 1),
    };
    let most = (most / rows_in.max(rows_out) / CUT * CUT).max(CUT);
    let (input_is_reached, output_is_reached) = reached_by_others(&collective, rank);
    (0..share.div_ceil(most)).map(move |nth| {
        let at = nth * most;
        let row = most.min(share - at);
        let part = |rows| Part {
            at,
            rows,
            row,
            stride: share,
        };
        Piece {
            collective: with_share(collective, row),
            input: part(rows_in),
            output: part(rows_out),
            input_is_read: !matches!(collective, Collective::Broadcast { root, .. } if root != rank),
            input_is_reached,
            output_is_reached,
            is_in_place: matches!(collective, Collective::AllReduce { .. } | Collective::Broadcast { .. }),
            keeps_input: matches!(collective, Collective::Broadcast { root, .. } if root == rank),
        }
    })
}

/// The same for so many bytes of each rank's share.
fn with_share(collective: Collective, share: u64) -> Collective {
    match collective {
        Collective::AllReduce {
            datatype, reduction, ..
        } => Collective::AllReduce {
            count: share / datatype.size() as u64,
            datatype,
            reduction,
        },
        Collective::ReduceScatter {
            datatype, reduction, ..
        } => Collective::ReduceScatter {
            count: share / datatype.size() as u64,
            datatype,
            reduction,
        },
        Collective::AllGather { .. } => Collective::AllGather { bytes: share },
        Collective::AllToAll { .. } => Collective::AllToAll { bytes: share },
        Collective::Broadcast { root, .. } => Collective::Broadcast { bytes: share, root },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_plan::{Datatype, Reduction};

    const MOST: u64 = 1 << 20;

    fn all(share: u64) -> [Collective; 5] {
        let (count, datatype, reduction) = (share / 2, Datatype::Bf16, Reduction::Sum);
        [
            Collective::AllReduce {
                count,
                datatype,
                reduction,
            },
            Collective::ReduceScatter {
                count,
                datatype,
                reduction,
            },
            Collective::AllGather { bytes: share },
            Collective::AllToAll { bytes: share },
            Collective::Broadcast { bytes: share, root: 1 },
        ]
    }

    #[test]
    fn pieces_cover_every_byte_once_and_fit_the_stage() {
        for ranks in 2..=8usize {
            for share in [2, 126, 128, 130, MOST - 2, MOST, MOST + 2, 5 * MOST + 34] {
                for collective in all(share) {
                    let (input, output) = collective.bytes(ranks).unwrap();
                    for rank in [0, 1] {
                        let mut seen = [vec![], vec![]];
                        for piece in pieces(&collective, rank, ranks, MOST) {
                            let (a, b) = piece.collective.bytes(ranks).unwrap();
                            assert_eq!((piece.input.bytes(), piece.output.bytes()), (a, b));
                            assert!(a <= MOST && b <= MOST, "{collective:?} {ranks}");
                            for (seen, part) in seen.iter_mut().zip([piece.input, piece.output]) {
                                let mut packed = 0;
                                for run in part.runs() {
                                    assert_eq!(run.packed, packed);
                                    packed += run.bytes;
                                    seen.push((run.at, run.bytes));
                                }
                                assert_eq!(packed, part.bytes());
                            }
                        }
                        for (mut seen, bytes) in seen.into_iter().zip([input, output]) {
                            seen.sort_unstable();
                            let end = seen.iter().fold(0, |end, (at, bytes)| {
                                assert_eq!(end, *at, "{collective:?}");
                                at + bytes
                            });
                            assert_eq!(end, bytes, "{collective:?} of {ranks}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_fits_is_one_piece_that_lies_as_it_did() {
        for collective in all(4096) {
            let only: Vec<Piece> = pieces(&collective, 0, 4, MOST).collect();
            assert_eq!(only.len(), 1);
            assert_eq!(only[0].collective, collective);
            assert_eq!((only[0].input.runs().count(), only[0].output.runs().count()), (1, 1));
        }
    }

    #[test]
    fn only_a_root_keeps_what_it_sends() {
        let piece = |rank| pieces(&all(256)[4], rank, 4, MOST).next().unwrap();
        assert!(piece(1).keeps_input && piece(1).input_is_read);
        assert!(!piece(0).keeps_input && !piece(0).input_is_read);
    }
}
