//! Tokens to the ranks of their experts, and what the experts made of them back.
//!
//! [`Moe::dispatch`] writes the rows of a rank's tokens into the memory of the ranks that have their experts, and keeps in a [`MoeHandle`] where each has gone. The experts are run by whoever calls. [`Moe::combine`]
//! reads what they gave from there, and sums it for every token, in f32 and always in the same order. How received rows lie is chosen by [`Received`]. Nothing waits for the host, so all of it can be captured in a graph; a
//! rank that would receive more rows than it has room for makes the call void on every rank, and [`Moe::check`] tells it afterwards.
//!
//! As with [`Collectives`](crate::Collectives), every rank makes the same calls in the same order, with tokens or without.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::collective::{CollectiveError, DeviceSlice};
use crate::device::GpuError;
use crate::kernels::THREADS;
use crate::layout::RANKS_MAX;
use crate::memory::DeviceMemory;
use crate::module::{Launch, Module, Text};
use crate::moe_shape::{DispatchBytes, MoeError, MoeSettings, MoeShape, Received, Sent, check_buffers};
use crate::pinned::Pinned;
use crate::team::Team;

static DISPATCH: Text = Text {
    ptx: include_str!("../kernels/moe.ptx"),
    kernels: &["weft_moe_slots", "weft_moe_compact", "weft_moe_combine"],
};
const SLOTS: usize = 0;
const COMPACT: usize = 1;
const COMBINE: usize = 2;
const WORD: u64 = 4;

/// What one rank brings to a dispatch. Every address is a multiple of sixteen. Those that others write are `rows`, `scales`, `row_experts` and `row_weights`; how long each has to be is told by [`MoeShape::bytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchBuffers {
    /// Of this rank, in this call: at most `tokens_max`.
    pub tokens: u32,
    /// `tokens` rows of bf16.
    pub input: DeviceSlice,
    /// `i32`: `top_k` experts of each token.
    pub experts: DeviceSlice,
    /// `f32`, beside the experts. Looked at where rows are compact.
    pub weights: DeviceSlice,
    pub rows: DeviceSlice,
    /// Where rows are sent as fp8.
    pub scales: DeviceSlice,
    pub counts: DeviceSlice,
    /// Where rows are compact.
    pub row_experts: DeviceSlice,
    pub row_weights: DeviceSlice,
}

/// What one rank brings to a combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CombineBuffers {
    /// What this rank's experts gave, in bf16, at the places of the rows that it received. Others read it.
    pub input: DeviceSlice,
    /// `f32`: the gate's weights of this rank's own tokens. Looked at where rows are in slots.
    pub weights: DeviceSlice,
    /// A row of bf16 for each of this rank's own tokens.
    pub output: DeviceSlice,
}

/// Where the tokens of a dispatch have gone. One that is used again forgets the dispatch before.
#[derive(Debug)]
pub struct MoeHandle {
    places: DeviceMemory,
    shape: MoeShape,
    tokens: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct DispatchLocal {
    input: u64,
    experts: u64,
    weights: u64,
    places: u64,
    rows: u64,
    scales: u64,
    counts: u64,
    row_experts: u64,
    row_weights: u64,
    rows_reference: u64,
    scales_reference: u64,
    row_experts_reference: u64,
    row_weights_reference: u64,
    overflow: u64,
    tokens: u64,
}

/// What kernels are told of a dispatch. The same fields as `Dispatch` in `moe.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct DispatchView {
    locals: [DispatchLocal; RANKS_MAX],
    owner_factor: u64,
    hidden: u32,
    experts: u32,
    experts_a_rank: u32,
    top_k: u32,
    tokens_max: u32,
    capacity: u32,
    narrow: u32,
    unused: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct CombineLocal {
    input: u64,
    input_reference: u64,
    places: u64,
    weights: u64,
    output: u64,
    tokens: u64,
}

/// The same fields as `Combine` in `moe.cu`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct CombineView {
    locals: [CombineLocal; RANKS_MAX],
    hidden: u32,
    width: u32,
}

const _: () = assert!(size_of::<DispatchView>() == 8 * 120 + 40 && size_of::<CombineView>() == 8 * 48 + 8);

impl DispatchView {
    fn new(shape: &MoeShape) -> DispatchView {
        let settings = shape.settings();
        DispatchView {
            owner_factor: shape.owner_factor(),
            hidden: settings.hidden,
            experts: settings.experts,
            experts_a_rank: shape.experts_a_rank(),
            top_k: settings.top_k,
            tokens_max: settings.tokens_max,
            capacity: shape.rows() as u32,
            narrow: u32::from(settings.sent == Sent::Fp8),
            ..DispatchView::default()
        }
    }
}

/// Dispatch and combine of a team, for one kind of layer.
#[derive(Debug)]
pub struct Moe {
    team: Arc<Team>,
    module: Arc<Module>,
    shape: MoeShape,
    blocks: u32,
    /// A word for each rank of this process, which kernels write when a call was void.
    overflows: Pinned,
}

impl Moe {
    /// The driver compiles the kernels when they are first asked for.
    pub fn new(team: &Arc<Team>, settings: MoeSettings) -> Result<Moe, MoeError> {
        let shape = MoeShape::new(settings, team.ranks())?;
        // All zero for all of them: the view of a combine is the shorter one.
        let module = Module::shared(team.device(), &DISPATCH, DispatchView::default())?;
        let each = (0..DISPATCH.kernels.len()).map(|kernel| module.blocks_max(team, kernel, THREADS, 0));
        let most = each.collect::<Result<Vec<u32>, GpuError>>()?.into_iter().min();
        Ok(Moe {
            blocks: shape.blocks(most.unwrap_or(1)),
            overflows: Pinned::allocate(team.device(), team.here().len() * size_of::<u64>())?,
            team: team.clone(),
            module,
            shape,
        })
    }

    pub fn shape(&self) -> &MoeShape {
        &self.shape
    }
    pub fn team(&self) -> &Arc<Team> {
        &self.team
    }

    /// For the dispatches of one rank, one at a time: until the combine of one has been put on the stream, another needs another.
    pub fn handle(&self) -> Result<MoeHandle, MoeError> {
        Ok(MoeHandle {
            places: DeviceMemory::allocate(self.team.device(), self.shape.handle_bytes())?,
            shape: self.shape,
            tokens: 0,
        })
    }

    /// Sends one rank's tokens. That it has gone well is known from [`check`](Moe::check) when the stream has come past it.
    ///
    /// # Safety
    /// All buffers and the handle must be memory that this device reaches, and stay until the kernels of all ranks have ended; the stream must be one of this device's.
    pub unsafe fn dispatch(
        &self,
        stream: u64,
        rank: usize,
        buffers: &DispatchBuffers,
        handle: &mut MoeHandle,
    ) -> Result<(), MoeError> {
        // SAFETY: the caller's promise.
        unsafe { self.put_dispatch(stream, rank, &[*buffers], std::slice::from_mut(handle)) }
    }

    /// All ranks of this process at once, in one launch: buffers and handles in the order of their ranks.
    ///
    /// # Safety
    /// As for [`dispatch`](Moe::dispatch).
    pub unsafe fn dispatch_all(
        &self,
        stream: u64,
        buffers: &[DispatchBuffers],
        handles: &mut [MoeHandle],
    ) -> Result<(), MoeError> {
        self.check_count(buffers.len())?;
        self.check_count(handles.len())?;
        // SAFETY: the caller's promise.
        unsafe { self.put_dispatch(stream, self.team.here().start, buffers, handles) }
    }

    /// Sums what the experts gave for one rank's tokens: those of the handle's last dispatch.
    ///
    /// # Safety
    /// As for [`dispatch`](Moe::dispatch).
    pub unsafe fn combine(
        &self,
        stream: u64,
        rank: usize,
        buffers: &CombineBuffers,
        handle: &MoeHandle,
    ) -> Result<(), MoeError> {
        // SAFETY: the caller's promise.
        unsafe { self.put_combine(stream, rank, &[*buffers], std::slice::from_ref(handle)) }
    }

    /// All ranks of this process at once, in one launch.
    ///
    /// # Safety
    /// As for [`dispatch`](Moe::dispatch).
    pub unsafe fn combine_all(
        &self,
        stream: u64,
        buffers: &[CombineBuffers],
        handles: &[MoeHandle],
    ) -> Result<(), MoeError> {
        self.check_count(buffers.len())?;
        self.check_count(handles.len())?;
        // SAFETY: the caller's promise.
        unsafe { self.put_combine(stream, self.team.here().start, buffers, handles) }
    }

    /// Why calls of a rank of this process have failed, if they have. That a call was void for want of room is told once; the calls after it are not harmed.
    pub fn check(&self, rank: usize) -> Result<(), MoeError> {
        self.team.check(rank)?;
        let word = self.overflow(self.team.local(rank)?).swap(0, Ordering::AcqRel);
        match overflowed(word, self.shape.rows()) {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }

    fn overflow(&self, nth: usize) -> &AtomicU64 {
        // SAFETY: within the memory, aligned, and only ever used as a word that kernels write too.
        unsafe { &*self.overflows.as_ptr().cast::<AtomicU64>().add(nth) }
    }

    fn check_count(&self, found: usize) -> Result<(), MoeError> {
        let needed = self.team.here().len();
        match found == needed {
            true => Ok(()),
            false => Err(CollectiveError::WrongBuffers { needed, found }.into()),
        }
    }

    /// How others find a buffer of which so much is used.
    fn reference(&self, slice: DeviceSlice, bytes: u64) -> Result<u64, CollectiveError> {
        if bytes == 0 {
            return Ok(0);
        }
        let found = self.team.reference(slice.address, bytes);
        found.ok_or(CollectiveError::NotReachable { address: slice.address })
    }

    /// # Safety
    /// As for [`dispatch`](Moe::dispatch).
    unsafe fn put_dispatch(
        &self,
        stream: u64,
        first: usize,
        buffers: &[DispatchBuffers],
        handles: &mut [MoeHandle],
    ) -> Result<(), MoeError> {
        let (settings, bytes) = (self.shape.settings(), self.shape.bytes());
        let mut view = DispatchView::new(&self.shape);
        for (nth, (of, handle)) in buffers.iter().zip(handles.iter()).enumerate() {
            self.team.check(first + nth)?;
            self.shape.check_tokens(of.tokens)?;
            if handle.shape != self.shape {
                return Err(MoeError::OtherHandle);
            }
            check_dispatch(settings, &bytes, of)?;
            view.locals[nth] = DispatchLocal {
                input: of.input.address,
                experts: of.experts.address,
                weights: of.weights.address,
                places: handle.places.address(),
                rows: of.rows.address,
                scales: of.scales.address,
                counts: of.counts.address,
                row_experts: of.row_experts.address,
                row_weights: of.row_weights.address,
                rows_reference: self.reference(of.rows, bytes.rows)?,
                scales_reference: self.reference(of.scales, bytes.scales)?,
                row_experts_reference: self.reference(of.row_experts, bytes.row_experts)?,
                row_weights_reference: self.reference(of.row_weights, bytes.row_weights)?,
                overflow: self.overflows.address() + (self.team.local(first + nth)? * size_of::<u64>()) as u64,
                tokens: of.tokens.into(),
            };
        }
        let kernel = match settings.received {
            Received::Slots => SLOTS,
            Received::Compact { .. } => COMPACT,
        };
        // SAFETY: the view is what these two kernels take; the rest is the caller's promise.
        unsafe { self.launch(kernel, stream, first, buffers.len(), view) }?;
        for (handle, of) in handles.iter_mut().zip(buffers) {
            handle.tokens = of.tokens;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`dispatch`](Moe::dispatch).
    unsafe fn put_combine(
        &self,
        stream: u64,
        first: usize,
        buffers: &[CombineBuffers],
        handles: &[MoeHandle],
    ) -> Result<(), MoeError> {
        let (settings, bytes) = (self.shape.settings(), self.shape.bytes());
        let weighted = settings.received == Received::Slots;
        let mut view = CombineView {
            hidden: settings.hidden,
            width: self.shape.width(),
            ..CombineView::default()
        };
        for (nth, (of, handle)) in buffers.iter().zip(handles).enumerate() {
            self.team.check(first + nth)?;
            if handle.shape != self.shape {
                return Err(MoeError::OtherHandle);
            }
            let tokens = u64::from(handle.tokens);
            let weights = if weighted {
                tokens * u64::from(settings.top_k) * WORD
            } else {
                0
            };
            let output = tokens * u64::from(settings.hidden) * 2;
            check_buffers(
                &[(of.input, bytes.results), (of.weights, weights)],
                &[(of.output, output)],
            )?;
            view.locals[nth] = CombineLocal {
                input: of.input.address,
                input_reference: self.reference(of.input, bytes.results)?,
                places: handle.places.address(),
                weights: if weighted { of.weights.address } else { 0 },
                output: of.output.address,
                tokens,
            };
        }
        // SAFETY: the view is what this kernel takes; the rest is the caller's promise.
        unsafe { self.launch(COMBINE, stream, first, buffers.len(), view) }
    }

    /// # Safety
    /// As for [`Module::launch`].
    unsafe fn launch<View: Copy>(
        &self,
        kernel: usize,
        stream: u64,
        first: usize,
        count: usize,
        view: View,
    ) -> Result<(), MoeError> {
        let launch = Launch {
            kernel,
            blocks: self.blocks,
            ranks: count as u32,
            threads: THREADS,
            shared_bytes: 0,
        };
        // SAFETY: the caller's promise.
        Ok(unsafe { self.module.launch(launch, stream, self.team.view(first)?, view) }?)
    }
}

impl Drop for Moe {
    fn drop(&mut self) {
        let Ok(_entered) = self.team.device().enter() else {
            return;
        };
        // SAFETY: kernels that may still write a word of ours end by the team's deadline.
        unsafe { cudarc::driver::sys::cuCtxSynchronize() };
    }
}

fn check_dispatch(settings: &MoeSettings, bytes: &DispatchBytes, of: &DispatchBuffers) -> Result<(), CollectiveError> {
    let tokens = u64::from(of.tokens);
    let routed = tokens * u64::from(settings.top_k) * WORD;
    let weights = match settings.received {
        Received::Slots => 0,
        Received::Compact { .. } => routed,
    };
    check_buffers(
        &[
            (of.input, tokens * u64::from(settings.hidden) * 2),
            (of.experts, routed),
            (of.weights, weights),
        ],
        &[
            (of.rows, bytes.rows),
            (of.scales, bytes.scales),
            (of.counts, bytes.counts),
            (of.row_experts, bytes.row_experts),
            (of.row_weights, bytes.row_weights),
        ],
    )
}

/// What a kernel has written: the rank, counted from one, and the rows above it.
fn overflowed(word: u64, capacity: u64) -> Option<MoeError> {
    (word != 0).then(|| MoeError::OverCapacity {
        rank: (word as u8).saturating_sub(1).into(),
        needed: word >> 8,
        capacity,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe_shape::{EXPERTS_MAX, ROW_BITS, SCALED_ELEMENTS, SLOT_TOKENS_MAX, TOP_K_MAX};

    #[test]
    fn kernels_are_in_the_text_and_have_the_same_numbers() {
        for name in DISPATCH.kernels {
            assert!(DISPATCH.ptx.contains(&format!(".entry {name}(")), "{name}");
        }
        assert_eq!(DISPATCH.ptx.matches(".entry ").count(), DISPATCH.kernels.len());
        let source = include_str!("../kernels/moe.cu");
        for line in [
            format!("TOP_K_MAX = {TOP_K_MAX};"),
            format!("EXPERTS_MAX = {EXPERTS_MAX};"),
            format!("SLOT_TOKENS_MAX = {SLOT_TOKENS_MAX};"),
            format!("ROW_BITS = {ROW_BITS};"),
            format!("SCALED_VECTORS = {};", SCALED_ELEMENTS / 8),
        ] {
            assert!(source.contains(&line), "{line}");
        }
    }

    #[test]
    fn an_overflow_names_the_rank_and_what_was_needed() {
        assert_eq!(overflowed(0, 10), None);
        assert_eq!(
            overflowed(70_000 << 8 | 4, 10),
            Some(MoeError::OverCapacity {
                rank: 3,
                needed: 70_000,
                capacity: 10
            })
        );
    }
}
