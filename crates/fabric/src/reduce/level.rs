//! What an instruction set must offer for the kernels to be written once.

use std::mem;
use std::ptr;

use weft_plan::datatype::{E4m3, E5m2, Element, bf16, f16};

use super::arithmetic::{Arithmetic, Lane};
use super::kernel::{Kernels, Kind, Op, fold};

/// Bytes of a cache line: what kernels load, reduce and store at a time.
pub(super) const LINE: usize = 64;

/// The instructions that kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InstructionSet {
    /// Those that every processor of the architecture has.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl InstructionSet {
    /// All, the best last.
    pub const ALL: &[InstructionSet] = &[
        InstructionSet::Portable,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2,
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512,
    ];

    /// The best that this processor has.
    pub fn best() -> InstructionSet {
        let mut best_first = InstructionSet::ALL.iter().rev();
        let best = best_first.find(|set| set.is_available());
        best.copied().unwrap_or(InstructionSet::Portable)
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            InstructionSet::Portable => true,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }
}

/// One instruction set. Every method is inlined into the kernel's entry, which is compiled for these instructions; that is also why all
/// are unsafe.
pub(super) trait Level: Sized {
    /// A line of memory in registers.
    type Block: Copy;
    /// Sixteen floats.
    type F32: Arithmetic;
    /// Eight floats.
    type F64: Arithmetic;

    unsafe fn load(from: *const u8) -> Self::Block;
    unsafe fn store(block: Self::Block, to: *mut u8);
    /// Stores past the cache to the beginning of a line.
    unsafe fn stream(block: Self::Block, to: *mut u8);
    /// Makes streamed lines visible before anything that is stored later.
    unsafe fn fence();
    /// Asks for the line at an address, which need not be valid.
    unsafe fn prefetch(at: *const u8);

    /// As [`Level::load`], of fewer bytes than a line; the rest is zero.
    #[inline(always)]
    unsafe fn load_part(from: *const u8, bytes: usize) -> Self::Block {
        let mut line = [0u8; LINE];
        // SAFETY: the caller vouches for the bytes, which are fewer than a line.
        unsafe {
            ptr::copy_nonoverlapping(from, line.as_mut_ptr(), bytes);
            Self::load(line.as_ptr())
        }
    }
    /// As [`Level::store`], of fewer bytes than a line.
    #[inline(always)]
    unsafe fn store_part(block: Self::Block, to: *mut u8, bytes: usize) {
        let mut line = [0u8; LINE];
        // SAFETY: as in `load_part`.
        unsafe {
            Self::store(block, line.as_mut_ptr());
            ptr::copy_nonoverlapping(line.as_ptr(), to, bytes);
        }
    }

    unsafe fn widen_f64(block: Self::Block) -> Self::F64;
    unsafe fn narrow_f64(wide: Self::F64) -> Self::Block;
    unsafe fn widen_f32(block: Self::Block) -> Self::F32;
    unsafe fn narrow_f32(wide: Self::F32) -> Self::Block;
    unsafe fn widen_f16(block: Self::Block) -> [Self::F32; 2];
    /// The narrowing methods know no NaN but the one that arithmetic leaves.
    unsafe fn narrow_f16(wide: [Self::F32; 2]) -> Self::Block;
    unsafe fn widen_bf16(block: Self::Block) -> [Self::F32; 2];
    unsafe fn narrow_bf16(wide: [Self::F32; 2]) -> Self::Block;
    unsafe fn widen_e4m3(block: Self::Block) -> [Self::F32; 4];
    unsafe fn narrow_e4m3(wide: [Self::F32; 4]) -> Self::Block;
    unsafe fn widen_e5m2(block: Self::Block) -> [Self::F32; 4];
    unsafe fn narrow_e5m2(wide: [Self::F32; 4]) -> Self::Block;

    /// The kernels, compiled for these instructions.
    fn kernels<K: Kind<Self>, O: Op>() -> Kernels;
}

/// Plain Rust, in a form that compilers turn into vector instructions.
pub(super) struct Portable;

/// The elements of a line, sixteen by sixteen, `M` times.
#[inline(always)]
fn widen<E: Element<Wide = f32>, const M: usize>(line: [u8; LINE]) -> [[Lane<f32>; 16]; M] {
    const { assert!(size_of::<[[E; 16]; M]>() == LINE) };
    // SAFETY: of equal size, as just checked, and elements are plain numbers in which all bits are allowed.
    let elements: [[E; 16]; M] = unsafe { mem::transmute_copy(&line) };
    let mut wide = [[Lane(0.0); 16]; M];
    for (wide, elements) in wide.iter_mut().zip(elements) {
        for i in 0..16 {
            wide[i] = Lane(elements[i].widen());
        }
    }
    wide
}

#[inline(always)]
fn narrow<E: Element<Wide = f32>, const M: usize>(wide: [[Lane<f32>; 16]; M]) -> [u8; LINE] {
    const { assert!(size_of::<[[E; 16]; M]>() == LINE) };
    let mut elements = [[E::narrow(0.0); 16]; M];
    for (elements, wide) in elements.iter_mut().zip(wide) {
        for i in 0..16 {
            elements[i] = E::narrow(wide[i].0);
        }
    }
    // SAFETY: as in `widen`.
    unsafe { mem::transmute_copy(&elements) }
}

// What makes the methods safe: pointers are valid by the caller's promise, and lanes are plain numbers in which all bits are allowed.
#[allow(unsafe_op_in_unsafe_fn)]
impl Level for Portable {
    type Block = [u8; LINE];
    type F32 = [Lane<f32>; 16];
    type F64 = [Lane<f64>; 8];

    #[inline(always)]
    unsafe fn load(from: *const u8) -> [u8; LINE] {
        from.cast::<[u8; LINE]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(block: [u8; LINE], to: *mut u8) {
        to.cast::<[u8; LINE]>().write_unaligned(block)
    }
    #[inline(always)]
    unsafe fn stream(block: [u8; LINE], to: *mut u8) {
        Self::store(block, to)
    }
    #[inline(always)]
    unsafe fn fence() {}
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}

    #[inline(always)]
    unsafe fn widen_f64(block: [u8; LINE]) -> Self::F64 {
        mem::transmute(block)
    }
    #[inline(always)]
    unsafe fn narrow_f64(wide: Self::F64) -> [u8; LINE] {
        mem::transmute(wide)
    }
    #[inline(always)]
    unsafe fn widen_f32(block: [u8; LINE]) -> Self::F32 {
        mem::transmute(block)
    }
    #[inline(always)]
    unsafe fn narrow_f32(wide: Self::F32) -> [u8; LINE] {
        mem::transmute(wide)
    }
    #[inline(always)]
    unsafe fn widen_f16(block: [u8; LINE]) -> [Self::F32; 2] {
        widen::<f16, 2>(block)
    }
    #[inline(always)]
    unsafe fn narrow_f16(wide: [Self::F32; 2]) -> [u8; LINE] {
        narrow::<f16, 2>(wide)
    }
    #[inline(always)]
    unsafe fn widen_bf16(block: [u8; LINE]) -> [Self::F32; 2] {
        widen::<bf16, 2>(block)
    }
    #[inline(always)]
    unsafe fn narrow_bf16(wide: [Self::F32; 2]) -> [u8; LINE] {
        narrow::<bf16, 2>(wide)
    }
    #[inline(always)]
    unsafe fn widen_e4m3(block: [u8; LINE]) -> [Self::F32; 4] {
        widen::<E4m3, 4>(block)
    }
    #[inline(always)]
    unsafe fn narrow_e4m3(wide: [Self::F32; 4]) -> [u8; LINE] {
        narrow::<E4m3, 4>(wide)
    }
    #[inline(always)]
    unsafe fn widen_e5m2(block: [u8; LINE]) -> [Self::F32; 4] {
        widen::<E5m2, 4>(block)
    }
    #[inline(always)]
    unsafe fn narrow_e5m2(wide: [Self::F32; 4]) -> [u8; LINE] {
        narrow::<E5m2, 4>(wide)
    }

    fn kernels<K: Kind<Portable>, O: Op>() -> Kernels {
        Kernels {
            pair: |to, from, bytes, divisor, stream| {
                // SAFETY: the caller's promise, handed on.
                unsafe { fold::<Portable, K, O, 1>(to, &from, bytes, divisor, stream) }
            },
            pair_both: |to, from, bytes, divisor, stream| {
                // SAFETY: the caller's promise, handed on.
                unsafe { fold::<Portable, K, O, 2>(to, &from, bytes, divisor, stream) }
            },
            many: |to, from, bytes, divisor, stream| {
                // SAFETY: the caller's promise, handed on.
                unsafe { fold::<Portable, K, O, 1>(to, from, bytes, divisor, stream) }
            },
        }
    }
}
