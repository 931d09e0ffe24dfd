//! All-reduce, residual and RMSNorm of the rows of a layer in one kernel, instead of three calls that go through memory in between.
//!
//! Between two layers of a model that is split over ranks, every rank has a part of each sum. The parts are added, the residual is added, the sum is the next residual, and its norm, times a weight, is
//! what the next layer reads, in the same elements or rounded to fp8:
//!
//! ```text
//! residual_out = round(x of rank 0 + x of rank 1 + ... + residual)
//! output       = round(residual_out / sqrt(mean(residual_out²) + epsilon) * weight)
//! ```
//!
//! Sums are made in f32, in the order of the ranks, the same on every rank and every time. Residual and weight have to be the same on every rank. As with [`Collectives`](crate::Collectives), every rank
//! makes the same calls in the same order, and a call is one kernel on the caller's stream, which can be captured in a graph.

use std::sync::Arc;

use weft_plan::Datatype;

use crate::choice::Way;
use crate::collective::{CollectiveError, DeviceSlice};
use crate::device::GpuError;
use crate::kernels::THREADS;
use crate::layout::{Layout, RANKS_MAX};
use crate::module::{Launch, Module, Text};
use crate::team::Team;

static TEXT: Text = Text {
    ptx: include_str!("../kernels/fused.ptx"),
    kernels: &[
        "weft_fused_packets_f16",
        "weft_fused_packets_bf16",
        "weft_fused_bulk_f16",
        "weft_fused_bulk_bf16",
    ],
};

/// Elements of a row at most: a block keeps its part of one in its shared memory.
pub const HIDDEN_MAX: u32 = 16_384;
/// What a vector holds: rows are whole vectors.
const VECTOR_ELEMENTS: u32 = 8;
const VECTOR_BYTES: u64 = 16;
const ELEMENT_BYTES: u64 = 2;
const SCALE_BYTES: u64 = 4;
/// Blocks that share a row at most: the lanes of a warp look for each other's sums.
const PARTS_MAX: u32 = 32;
/// Up to so many bytes from one rank to all together, packets are quicker than two meetings. As `examples/fused.rs` found it on an H200.
const PACKET_BYTES_MAX: u64 = 512 << 10;

/// What the results are rounded to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rounded {
    /// The elements of the input.
    Same,
    /// fp8 e4m3, after division by this.
    Fp8 { scale: f32 },
    /// fp8 e4m3 with a scale for each row: its largest magnitude over 448, and never less than 1 / (448 · 512). Results times their scale are what they stand for.
    Fp8ByRow,
}

/// What all ranks do together. The same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FusedNorm {
    pub rows: u32,
    /// Elements of a row: a multiple of eight, at most [`HIDDEN_MAX`].
    pub hidden: u32,
    /// bf16 or f16.
    pub datatype: Datatype,
    pub epsilon: f32,
    pub output: Rounded,
}

/// What one rank brings. Every address is a multiple of sixteen; `scales`, of four, is looked at only where there is a scale for each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedBuffers {
    pub input: DeviceSlice,
    pub residual: DeviceSlice,
    /// May be the residual itself.
    pub residual_out: DeviceSlice,
    /// `hidden` elements.
    pub weight: DeviceSlice,
    /// May be the input itself, where results are of its elements.
    pub output: DeviceSlice,
    pub scales: DeviceSlice,
}

/// How many bytes each buffer has to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedBytes {
    /// Input, residual and the new residual.
    pub rows: u64,
    pub weight: u64,
    pub output: u64,
    pub scales: u64,
}

impl FusedNorm {
    pub fn bytes(&self) -> FusedBytes {
        let elements = u64::from(self.rows) * u64::from(self.hidden);
        FusedBytes {
            rows: elements * ELEMENT_BYTES,
            weight: u64::from(self.hidden) * ELEMENT_BYTES,
            output: match self.output {
                Rounded::Same => elements * ELEMENT_BYTES,
                _ => elements,
            },
            scales: match self.output {
                Rounded::Fp8ByRow => u64::from(self.rows) * SCALE_BYTES,
                _ => 0,
            },
        }
    }

    fn check_shape(&self) -> Result<(), CollectiveError> {
        let Self {
            hidden,
            datatype,
            epsilon,
            output,
            ..
        } = *self;
        if !matches!(datatype, Datatype::Bf16 | Datatype::F16) {
            return Err(CollectiveError::NotReduced { datatype });
        }
        if hidden == 0 || hidden % VECTOR_ELEMENTS != 0 || hidden > HIDDEN_MAX {
            return Err(CollectiveError::BadRow {
                hidden: u64::from(hidden),
                multiple: u64::from(VECTOR_ELEMENTS),
                most: u64::from(HIDDEN_MAX),
            });
        }
        let scale = match output {
            Rounded::Fp8 { scale } => scale,
            _ => 1.0,
        };
        if !(epsilon.is_finite() && epsilon >= 0.0 && scale.is_finite() && scale > 0.0) {
            return Err(CollectiveError::BadNumber);
        }
        Ok(())
    }

    /// What is wrong with a rank's buffers, if anything is.
    pub(crate) fn check(&self, of: &FusedBuffers) -> Result<(), CollectiveError> {
        self.check_shape()?;
        let bytes = self.bytes();
        let needed = [
            (of.input, bytes.rows, VECTOR_BYTES),
            (of.residual, bytes.rows, VECTOR_BYTES),
            (of.weight, bytes.weight, VECTOR_BYTES),
            (of.residual_out, bytes.rows, VECTOR_BYTES),
            (of.output, bytes.output, VECTOR_BYTES),
            (of.scales, bytes.scales, SCALE_BYTES),
        ];
        for (slice, needed, line) in needed {
            if needed == 0 {
                continue;
            }
            if slice.bytes < needed {
                return Err(CollectiveError::BufferTooSmall {
                    needed,
                    found: slice.bytes,
                });
            }
            if slice.address % line != 0 || slice.address.checked_add(slice.bytes).is_none() {
                return Err(CollectiveError::Misaligned {
                    address: slice.address,
                    bytes: line,
                });
            }
        }
        // What is written lies apart from everything else, but for the two that may be in place.
        let written = 3;
        for (nth, (slice, bytes, _)) in needed.iter().enumerate().skip(written) {
            for (other_nth, (other, others, _)) in needed.iter().enumerate().take(nth) {
                let may_be_one = match (other_nth, nth) {
                    (1, 3) => true,
                    (0, 4) => self.output == Rounded::Same,
                    _ => false,
                };
                let apart = slice.address + bytes <= other.address || other.address + others <= slice.address;
                let empty = *bytes == 0 || *others == 0;
                if !(empty || apart || may_be_one && slice.address == other.address) {
                    return Err(CollectiveError::Overlap);
                }
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice {
    way: Way,
    /// Blocks that share a row.
    parts: u32,
    blocks: u32,
}

/// The same on every rank. Of few rows each is shared by several blocks, down to one unit of a row for each thread; of many, each block has one at a time.
fn choose(norm: &FusedNorm, ranks: usize, way: Option<Way>, blocks_max: u32) -> Result<Choice, CollectiveError> {
    let (bytes, all) = (norm.bytes().rows, ranks as u64);
    let way = way.unwrap_or(match bytes.saturating_mul(all) <= PACKET_BYTES_MAX && ranks > 1 {
        true => Way::OneShot,
        false => Way::Bulk,
    });
    let (rows, units) = match way {
        Way::OneShot if bytes <= Layout::ONE_HOP_BYTES_MAX => (norm.rows, norm.hidden / 4),
        Way::Bulk => (norm.rows.div_ceil(ranks as u32), norm.hidden / 8),
        _ => return Err(CollectiveError::NotThisWay),
    };
    let rows = rows.clamp(1, blocks_max.max(1));
    let parts = (blocks_max / rows).clamp(1, units.div_ceil(THREADS).clamp(1, PARTS_MAX));
    Ok(Choice {
        way,
        parts,
        blocks: rows * parts,
    })
}

/// What a block keeps of a row: as many units of each thread as the one that has most.
fn kept_bytes(hidden: u32, choice: Choice) -> u32 {
    let (units, bytes) = match choice.way {
        Way::Bulk => (hidden / 8, 16),
        _ => (hidden / 4, 8),
    };
    units.div_ceil(choice.parts * THREADS) * THREADS * bytes
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct LocalView {
    input: u64,
    residual: u64,
    residual_out: u64,
    output: u64,
    scales: u64,
    input_reference: u64,
    residual_out_reference: u64,
    output_reference: u64,
    scales_reference: u64,
}

/// What kernels are told of a call. The same fields as `Fused` in `fused.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct FusedView {
    locals: [LocalView; RANKS_MAX],
    weights: [u64; RANKS_MAX],
    rows: u32,
    hidden: u32,
    output: u32,
    epsilon: f32,
    scale: f32,
    parts: u32,
}

const _: () = assert!(size_of::<LocalView>() == 72 && size_of::<FusedView>() == 8 * 72 + 64 + 24);

impl FusedView {
    fn new(norm: &FusedNorm) -> FusedView {
        let (output, scale) = match norm.output {
            Rounded::Same => (0, 1.0),
            Rounded::Fp8 { scale } => (1, scale),
            Rounded::Fp8ByRow => (2, 1.0),
        };
        FusedView {
            locals: [LocalView::default(); RANKS_MAX],
            weights: [0; RANKS_MAX],
            rows: norm.rows,
            hidden: norm.hidden,
            output,
            epsilon: norm.epsilon,
            scale,
            parts: 1,
        }
    }
}

/// The fused kernels of a team.
#[derive(Clone, Debug)]
pub struct FusedNorms {
    team: Arc<Team>,
    module: Arc<Module>,
    blocks_max: u32,
}

impl FusedNorms {
    /// The driver compiles the kernels when they are first asked for.
    pub fn new(team: &Arc<Team>) -> Result<FusedNorms, CollectiveError> {
        // Of rows that have no elements, so that nothing is looked at.
        let nothing = FusedView::new(&FusedNorm {
            rows: 0,
            hidden: 0,
            datatype: Datatype::Bf16,
            epsilon: 0.0,
            output: Rounded::Same,
        });
        let module = Module::shared(team.device(), &TEXT, nothing)?;
        let kept = HIDDEN_MAX * ELEMENT_BYTES as u32;
        let each = (0..TEXT.kernels.len()).map(|kernel| module.blocks_max(team, kernel, THREADS, kept));
        let most = each.collect::<Result<Vec<u32>, GpuError>>()?.into_iter().min();
        Ok(FusedNorms {
            team: team.clone(),
            module,
            blocks_max: most.unwrap_or(1),
        })
    }

    pub fn team(&self) -> &Arc<Team> {
        &self.team
    }

    /// Puts one rank's part on a stream. That it has gone well is known from [`Team::check`] when the stream has come past it. `way`: one-shot or bulk; every rank has to say the same.
    ///
    /// # Safety
    /// All buffers must be memory that this device reaches, and stay until the kernels of all ranks have ended; the stream must be one of this device's.
    pub unsafe fn call(
        &self,
        stream: u64,
        rank: usize,
        norm: &FusedNorm,
        buffers: &FusedBuffers,
        way: Option<Way>,
    ) -> Result<(), CollectiveError> {
        // SAFETY: the caller's promise.
        unsafe { self.put(stream, rank, norm, std::slice::from_ref(buffers), way) }
    }

    /// Which way a call takes that asks for none.
    pub(crate) fn way(&self, norm: &FusedNorm) -> Result<Way, CollectiveError> {
        Ok(choose(norm, self.team.ranks(), None, self.blocks_max)?.way)
    }

    /// All ranks of this process at once, in one launch: `buffers` in the order of their ranks.
    ///
    /// # Safety
    /// As for [`call`](FusedNorms::call).
    pub unsafe fn call_all(
        &self,
        stream: u64,
        norm: &FusedNorm,
        buffers: &[FusedBuffers],
        way: Option<Way>,
    ) -> Result<(), CollectiveError> {
        let here = self.team.here();
        if buffers.len() != here.len() {
            return Err(CollectiveError::WrongBuffers {
                needed: here.len(),
                found: buffers.len(),
            });
        }
        // SAFETY: the caller's promise.
        unsafe { self.put(stream, here.start, norm, buffers, way) }
    }

    /// # Safety
    /// As for [`call`](FusedNorms::call).
    unsafe fn put(
        &self,
        stream: u64,
        first: usize,
        norm: &FusedNorm,
        buffers: &[FusedBuffers],
        way: Option<Way>,
    ) -> Result<(), CollectiveError> {
        for (rank, buffers) in (first..).zip(buffers) {
            self.team.check(rank)?;
            norm.check(buffers)?;
        }
        if norm.rows == 0 {
            return Ok(());
        }
        let choice = choose(norm, self.team.ranks(), way, self.blocks_max)?;
        let mut view = FusedView::new(norm);
        view.parts = choice.parts;
        let bytes = norm.bytes();
        for (nth, buffers) in buffers.iter().enumerate() {
            view.weights[nth] = buffers.weight.address;
            let reach = |slice: DeviceSlice, bytes: u64| match choice.way {
                Way::Bulk if bytes > 0 => self
                    .team
                    .reference(slice.address, bytes)
                    .ok_or(CollectiveError::NotReachable { address: slice.address }),
                _ => Ok(0),
            };
            view.locals[nth] = LocalView {
                input: buffers.input.address,
                residual: buffers.residual.address,
                residual_out: buffers.residual_out.address,
                output: buffers.output.address,
                scales: buffers.scales.address,
                input_reference: reach(buffers.input, bytes.rows)?,
                residual_out_reference: reach(buffers.residual_out, bytes.rows)?,
                output_reference: reach(buffers.output, bytes.output)?,
                scales_reference: reach(buffers.scales, bytes.scales)?,
            };
        }
        // In the order of the text.
        let kernel = usize::from(choice.way == Way::Bulk) * 2 + usize::from(norm.datatype == Datatype::Bf16);
        let launch = Launch {
            kernel,
            blocks: choice.blocks,
            ranks: buffers.len() as u32,
            threads: THREADS,
            shared_bytes: kept_bytes(norm.hidden, choice),
        };
        // SAFETY: the view is what these kernels take; the rest is the caller's promise.
        Ok(unsafe { self.module.launch(launch, stream, self.team.view(first)?, view) }?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn norm(rows: u32, hidden: u32) -> FusedNorm {
        FusedNorm {
            rows,
            hidden,
            datatype: Datatype::Bf16,
            epsilon: 1e-6,
            output: Rounded::Same,
        }
    }

    fn slice(address: u64, bytes: u64) -> DeviceSlice {
        DeviceSlice { address, bytes }
    }

    fn buffers() -> FusedBuffers {
        FusedBuffers {
            input: slice(0x10000, 512),
            residual: slice(0x20000, 512),
            residual_out: slice(0x30000, 512),
            weight: slice(0x40000, 128),
            output: slice(0x50000, 512),
            scales: slice(0x60000, 16),
        }
    }

    #[test]
    fn kernels_are_in_the_text() {
        for name in TEXT.kernels {
            assert!(TEXT.ptx.contains(&format!(".entry {name}(")), "{name}");
        }
        assert_eq!(TEXT.ptx.matches(".entry ").count(), TEXT.kernels.len());
        let source = include_str!("../kernels/fused.cu");
        assert!(source.contains("SAME = 0, E4M3_STATIC = 1, E4M3_BY_ROW = 2 "));
    }

    #[test]
    fn lengths_follow_what_results_are_rounded_to() {
        let same = norm(4, 64);
        assert_eq!(
            (same.bytes().rows, same.bytes().output, same.bytes().scales),
            (512, 512, 0)
        );
        let by_row = FusedNorm {
            output: Rounded::Fp8ByRow,
            ..same
        };
        assert_eq!((by_row.bytes().output, by_row.bytes().scales), (256, 16));
    }

    #[test]
    fn wrong_shapes_and_buffers_are_told_apart() {
        let (norm, right) = (norm(4, 64), buffers());
        assert_eq!(norm.check(&right), Ok(()));
        let bad_row = |hidden| {
            let shape = FusedNorm { hidden, ..norm };
            matches!(shape.check(&right), Err(CollectiveError::BadRow { .. }))
        };
        assert!(bad_row(0) && bad_row(12) && bad_row(HIDDEN_MAX + 8) && !bad_row(8));
        for (epsilon, scale) in [(f32::NAN, 1.0), (-1.0, 1.0), (1e-6, 0.0), (1e-6, f32::INFINITY)] {
            let shape = FusedNorm {
                epsilon,
                output: Rounded::Fp8 { scale },
                ..norm
            };
            assert_eq!(shape.check(&right), Err(CollectiveError::BadNumber));
        }
        let wide = FusedNorm {
            datatype: Datatype::F32,
            ..norm
        };
        assert!(matches!(wide.check(&right), Err(CollectiveError::NotReduced { .. })));
        let with = |change: &dyn Fn(&mut FusedBuffers)| {
            let mut buffers = right;
            change(&mut buffers);
            norm.check(&buffers)
        };
        assert_eq!(with(&|of| of.residual_out = of.residual), Ok(()));
        assert_eq!(with(&|of| of.output = of.input), Ok(()));
        assert_eq!(with(&|of| of.output = of.residual), Err(CollectiveError::Overlap));
        assert_eq!(
            with(&|of| of.output.address = of.input.address + 16),
            Err(CollectiveError::Overlap)
        );
        assert_eq!(with(&|of| of.residual_out = of.output), Err(CollectiveError::Overlap));
        assert_eq!(
            with(&|of| of.weight.address = of.output.address + 256),
            Err(CollectiveError::Overlap)
        );
        let askew = with(&|of| of.input.address += 8);
        assert!(matches!(askew, Err(CollectiveError::Misaligned { bytes: 16, .. })));
        let short = with(&|of| of.weight.bytes = 127);
        assert!(matches!(
            short,
            Err(CollectiveError::BufferTooSmall {
                needed: 128,
                found: 127
            })
        ));
        // In place only where elements are of one size.
        let eight = FusedNorm {
            output: Rounded::Fp8ByRow,
            ..norm
        };
        let mut in_place = right;
        in_place.output = in_place.input;
        assert_eq!(eight.check(&in_place), Err(CollectiveError::Overlap));
        let mut short = right;
        short.scales.bytes = 15;
        assert!(matches!(
            eight.check(&short),
            Err(CollectiveError::BufferTooSmall { .. })
        ));
    }

    #[test]
    fn few_rows_are_shared_and_every_choice_fits() {
        const MOST: u32 = 49;
        for ranks in 1..=8 {
            for rows in [1, 2, 5, 16, 17, 128, 1000, 100_000] {
                for hidden in [8, 1024, 2048, 7168, 16_384] {
                    for most in [1, 3, MOST, 256] {
                        let norm = norm(rows, hidden);
                        let choice = choose(&norm, ranks, None, most).unwrap();
                        let what = format!("{ranks} ranks, {norm:?}, {choice:?}");
                        assert!((1..=most).contains(&choice.blocks), "{what}");
                        assert!(
                            choice.parts <= PARTS_MAX && choice.blocks.is_multiple_of(choice.parts),
                            "{what}"
                        );
                        assert!(
                            choice.way == Way::Bulk || norm.bytes().rows <= Layout::ONE_HOP_BYTES_MAX,
                            "{what}"
                        );
                        // Blocks that share a row do so once in a call.
                        let rows = match choice.way {
                            Way::Bulk => rows.div_ceil(ranks as u32),
                            _ => rows,
                        };
                        assert!(choice.parts == 1 || choice.blocks / choice.parts == rows, "{what}");
                        let kept = kept_bytes(hidden, choice);
                        assert!(kept <= HIDDEN_MAX * 2 && kept * choice.parts >= hidden * 2, "{what}");
                    }
                }
            }
        }
        let small = choose(&norm(1, 7168), 8, None, MOST).unwrap();
        assert_eq!((small.way, small.parts, small.blocks), (Way::OneShot, 7, 7));
        let large = choose(&norm(4096, 7168), 8, None, MOST).unwrap();
        assert_eq!((large.way, large.parts, large.blocks), (Way::Bulk, 1, 49));
        assert_eq!(
            choose(&norm(1, 64), 2, Some(Way::TwoShot), MOST),
            Err(CollectiveError::NotThisWay)
        );
        assert_eq!(
            choose(&norm(4096, 7168), 2, Some(Way::OneShot), MOST),
            Err(CollectiveError::NotThisWay)
        );
    }
}
