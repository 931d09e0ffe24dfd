//! Conversions of blocks by the processor: [`weft_plan::conversion`] on raw memory.
//!
//! What is moved goes by the copy loops of [`crate::copy`] where runs are long, past the cache where all of it is large; short ones
//! go through the cache, because past it they were slower.
//! What is cast goes 64 elements at a time through floats in registers and the nearest cache; the arithmetic is that of `plan`, compiled for each instruction set.

mod cast;
#[cfg(test)]
mod tests;

use std::ptr;

use weft_plan::conversion::{Conversion, Nest, NestKind, Stretch};
use weft_protocol::Refusal;

use crate::copy::{STREAM_MIN_BYTES, copy_cached, copy_streaming};
use crate::memory::HostMemory;
use crate::reduce::InstructionSet;

/// Runs of so many bytes and more are worth a call of the copy loops.
const LONG_RUN: u64 = 1 << 10;

/// Where a conversion takes place. What it has no scales of may be anywhere.
#[derive(Clone, Copy, Debug)]
pub struct HostEnds {
    pub from: *const u8,
    pub from_scales: *const u8,
    pub to: *mut u8,
    pub to_scales: *mut u8,
}

/// The memories of a conversion, each with the offset that it counts from.
#[derive(Clone, Copy, Debug)]
pub struct ConversionMemories<'a> {
    pub from: (&'a HostMemory, u64),
    pub from_scales: (&'a HostMemory, u64),
    pub to: (&'a HostMemory, u64),
    pub to_scales: (&'a HostMemory, u64),
}

/// Converts between memories of the host. Refused where a memory is too short, or may vanish in the middle, as what was mapped from a file does.
///
/// What is read and what is written may lie in one memory, but not overlap; others may change what is read meanwhile, and then it is unspecified which of their values are converted.
pub fn convert_memories(conversion: &Conversion, memories: ConversionMemories<'_>) -> Result<(), Refusal> {
    let [from, from_scales, to, to_scales] = conversion.ends();
    let place = |(memory, offset): (&HostMemory, u64), len: u64| {
        if len == 0 {
            return Ok(ptr::dangling_mut());
        }
        let end = offset.checked_add(len).ok_or(Refusal::OutOfBounds)?;
        if end > weft_protocol::Memory::len(memory) {
            return Err(Refusal::OutOfBounds);
        }
        if memory.may_vanish() {
            return Err(Refusal::Unsupported);
        }
        // SAFETY: within the memory, as just checked.
        Ok(unsafe { memory.as_ptr().add(offset as usize) })
    };
    let ends = HostEnds {
        from: place(memories.from, from)?,
        from_scales: place(memories.from_scales, from_scales)?,
        to: place(memories.to, to)?,
        to_scales: place(memories.to_scales, to_scales)?,
    };
    // SAFETY: all that the conversion touches lies within the memories, which live as long as this call.
    unsafe { convert(conversion, ends) };
    Ok(())
}

/// Carries a conversion out, with the best instructions that this processor has.
///
/// # Safety
/// The ends must be valid for reads and for writes of as many bytes as [`Conversion::ends`] says, and what is read must not overlap what is written. Others may change what is read
/// meanwhile: then it is unspecified which of their values are converted.
pub unsafe fn convert(conversion: &Conversion, ends: HostEnds) {
    // SAFETY: the caller's promise; the instructions are there.
    unsafe { convert_with(InstructionSet::best(), conversion, ends) }
}

/// The same with these instructions: for tests and measurements.
///
/// # Safety
/// As for [`convert`], and the processor must have them.
unsafe fn convert_with(instructions: InstructionSet, conversion: &Conversion, ends: HostEnds) {
    let past_cache = conversion.bytes_written() >= STREAM_MIN_BYTES as u64;
    for at in conversion.stretches() {
        let nest = &conversion.nests()[at.nest as usize];
        // SAFETY: the caller's promise: a stretch lies within the ends.
        unsafe {
            match nest.kind {
                NestKind::Move => move_runs(
                    nest,
                    ends.from.add(at.from as usize),
                    ends.to.add(at.to as usize),
                    past_cache,
                ),
                NestKind::MoveScales => {
                    let (from, to) = (at.from_scales as usize, at.to_scales as usize);
                    move_runs(nest, ends.from_scales.add(from), ends.to_scales.add(to), false);
                }
                NestKind::Cast { .. } => cast::cast_runs(instructions, nest, place(&ends, at)),
            }
        }
    }
    if past_cache {
        fence();
    }
}

/// # Safety
/// The stretch must lie within the ends.
unsafe fn place(ends: &HostEnds, at: &Stretch) -> HostEnds {
    // SAFETY: the caller's promise. Scales that are nowhere begin at offset zero.
    unsafe {
        HostEnds {
            from: ends.from.add(at.from as usize),
            from_scales: ends.from_scales.add(at.from_scales as usize),
            to: ends.to.add(at.to as usize),
            to_scales: ends.to_scales.add(at.to_scales as usize),
        }
    }
}

/// # Safety
/// The runs of the nest must lie within what the pointers are valid for.
unsafe fn move_runs(nest: &Nest, from: *const u8, to: *mut u8, past_cache: bool) {
    let run = nest.run as usize;
    if nest.run >= LONG_RUN {
        return nest.each_run(|at| {
            // SAFETY: the caller's promise.
            unsafe {
                let (from, to) = (from.add(at.from as usize), to.add(at.to as usize));
                match past_cache {
                    true => copy_streaming(to, from, run),
                    false => copy_cached(to, from, run),
                }
            }
        });
    }
    nest.each_run(|at| {
        // SAFETY: the caller's promise. What others change meanwhile is copied in one state or the other.
        unsafe { ptr::copy(from.add(at.from as usize), to.add(at.to as usize), run) };
    });
}

/// Streaming stores are weakly ordered: without this, a peer could be told of bytes that are still on their way.
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this architecture has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
