//! Fused norms on any memory, also among processes: what peers have to reach goes through the heap, some rows at a time.
//!
//! By packets nothing but the heap is reached, so small calls are one kernel and nothing else. In bulk every rank reads the inputs of all and writes the results of all, which is staged where it does not lie in
//! memory that is known to them.

use super::{Carrier, Part};
use crate::choice::Way;
use crate::collective::{CollectiveError, DeviceSlice};
use crate::fused::{FusedBuffers, FusedNorm, FusedNorms};

/// So that what is rounded to fp8 lies well in every piece: rows are multiples of eight elements.
const ROWS_TOGETHER: u32 = 2;
const LINE: u64 = 16;

/// How rows of a call lie in the stage: input, new residual, output and scales, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stage {
    rows: u32,
    residual_out: u64,
    output: u64,
    scales: u64,
}

impl Stage {
    /// With as many rows as `most` bytes have room for. It depends on nothing but what all ranks agree on, so all of them cut alike.
    fn new(norm: &FusedNorm, most: u64) -> Result<Stage, CollectiveError> {
        let of = |rows| FusedNorm { rows, ..*norm }.bytes();
        let together = of(ROWS_TOGETHER);
        let each = 2 * together.rows + together.output.next_multiple_of(LINE) + together.scales;
        // Once for the end of the outputs, once for that of the scales.
        let groups = most.saturating_sub(2 * LINE) / each;
        let rows = u32::try_from(groups).unwrap_or(u32::MAX).saturating_mul(ROWS_TOGETHER);
        if rows == 0 {
            return Err(CollectiveError::BufferTooSmall {
                needed: each + 2 * LINE,
                found: most,
            });
        }
        let rows = rows.min(norm.rows);
        let bytes = of(rows);
        let output = 2 * bytes.rows;
        Ok(Stage {
            rows,
            residual_out: bytes.rows,
            output,
            scales: (output + bytes.output).next_multiple_of(LINE),
        })
    }
}

impl Carrier {
    /// Puts this rank's part of a fused norm on a stream, after the call before it on whatever stream that was. That it has gone well is known from [`Team::check`](crate::Team::check) when the
    /// stream has come past it.
    ///
    /// # Safety
    /// All buffers must be memory of this device, and stay until the stream has come past the call; those that peers reach, until the streams of all ranks have. The stream must be one of this device's.
    pub unsafe fn norm(
        &self,
        stream: u64,
        norms: &FusedNorms,
        norm: &FusedNorm,
        buffers: &FusedBuffers,
    ) -> Result<(), CollectiveError> {
        let rank = self.rank();
        self.team().check(rank)?;
        norm.check(buffers)?;
        let one_kernel = !self.team().is_far() || norms.way(norm)? != Way::Bulk;
        let put = || {
            if one_kernel {
                // SAFETY: the caller's promise. Packets touch the caller's memory by this rank's kernel alone.
                return unsafe { norms.call(stream, rank, norm, buffers, None) };
            }
            let stage = Stage::new(norm, 2 * self.plan.bytes)?;
            (0..norm.rows).step_by(stage.rows as usize).try_for_each(|first| {
                let rows = stage.rows.min(norm.rows - first);
                // SAFETY: the caller's promise.
                unsafe { self.put_rows(stream, norms, norm, buffers, stage, first, rows) }
            })
        };
        // SAFETY: the caller's promise.
        unsafe { self.in_order(stream, put) }
    }

    /// # Safety
    /// As for [`norm`](Carrier::norm).
    #[expect(clippy::too_many_arguments, reason = "a call, and which of its rows")]
    unsafe fn put_rows(
        &self,
        stream: u64,
        norms: &FusedNorms,
        norm: &FusedNorm,
        whole: &FusedBuffers,
        stage: Stage,
        first: u32,
        rows: u32,
    ) -> Result<(), CollectiveError> {
        let before = FusedNorm { rows: first, ..*norm }.bytes();
        let norm = FusedNorm { rows, ..*norm };
        let bytes = norm.bytes();
        let part = |of: DeviceSlice, at: u64, bytes: u64| DeviceSlice {
            address: of.address + at,
            bytes,
        };
        // Where a part of a buffer is worked on, and whether that is where it lies.
        let place = |of: DeviceSlice, at: u64, bytes: u64, staged: u64| {
            let own = part(of, at, bytes);
            match bytes == 0 || self.team().reference(own.address, bytes).is_some() {
                true => (own, true),
                false => {
                    let address = self.plan.input + staged;
                    (DeviceSlice { address, bytes }, false)
                }
            }
        };
        let (input, input_lies_there) = place(whole.input, before.rows, bytes.rows, 0);
        let (residual_out, residual_lies_there) =
            place(whole.residual_out, before.rows, bytes.rows, stage.residual_out);
        let (output, output_lies_there) = place(whole.output, before.output, bytes.output, stage.output);
        let (scales, scales_lie_there) = place(whole.scales, before.scales, bytes.scales, stage.scales);
        let buffers = FusedBuffers {
            input,
            residual: part(whole.residual, before.rows, bytes.rows),
            residual_out,
            weight: whole.weight,
            output,
            scales,
        };
        let all = |bytes: u64| Part {
            at: 0,
            rows: 1,
            row: bytes,
            stride: bytes,
        };
        // SAFETY: the caller's promise; what is staged lies in the heap, which lives as long as the team.
        unsafe {
            if !input_lies_there {
                let from = whole.input.address + before.rows;
                self.copy_in(stream, input.address, from, &all(bytes.rows))?;
            }
            norms.call(stream, self.rank(), &norm, &buffers, Some(Way::Bulk))?;
            for (lies_there, to, at, from) in [
                (residual_lies_there, whole.residual_out, before.rows, residual_out),
                (output_lies_there, whole.output, before.output, output),
                (scales_lie_there, whole.scales, before.scales, scales),
            ] {
                if !lies_there {
                    self.copy_out(stream, to.address + at, from.address, &all(from.bytes))?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fused::Rounded;
    use weft_plan::Datatype;

    fn norm(rows: u32, hidden: u32, output: Rounded) -> FusedNorm {
        FusedNorm {
            rows,
            hidden,
            datatype: Datatype::Bf16,
            epsilon: 1e-6,
            output,
        }
    }

    #[test]
    fn rows_in_the_stage_lie_apart_and_fit() {
        for output in [Rounded::Same, Rounded::Fp8 { scale: 1.0 }, Rounded::Fp8ByRow] {
            for hidden in [8, 24, 4096, 7168, 16_384] {
                for rows in [1, 2, 3, 7, 64, 1001, 100_000] {
                    for most in [1 << 18, 64 << 20] {
                        let call = norm(rows, hidden, output);
                        let stage = Stage::new(&call, most).unwrap();
                        let bytes = norm(stage.rows, hidden, output).bytes();
                        assert!(stage.rows == rows || stage.rows.is_multiple_of(2), "{stage:?}");
                        assert!(stage.residual_out >= bytes.rows);
                        assert!(stage.output >= stage.residual_out + bytes.rows);
                        assert!(stage.scales >= stage.output + bytes.output);
                        assert!(stage.scales + bytes.scales <= most, "{stage:?} {hidden} {output:?}");
                        for at in [stage.residual_out, stage.output, stage.scales] {
                            assert_eq!(at % LINE, 0, "{stage:?}");
                        }
                        // Every piece of the caller's buffers begins where kernels want it.
                        let before = norm(stage.rows, hidden, output).bytes();
                        if stage.rows < rows {
                            assert_eq!((before.rows % LINE, before.output % LINE), (0, 0), "{stage:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_stage_without_room_for_two_rows_is_refused() {
        let call = norm(4, 16_384, Rounded::Same);
        let refused = Stage::new(&call, 3 * 2 * 16_384 * 2);
        assert!(
            matches!(refused, Err(CollectiveError::BufferTooSmall { .. })),
            "{refused:?}"
        );
        assert_eq!(Stage::new(&call, 3 * 2 * 16_384 * 2 + 32).unwrap().rows, 2);
    }
}
