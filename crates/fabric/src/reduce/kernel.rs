//! The loops, written once for all datatypes, reductions and instruction sets, and the choice among what they are compiled into.

// Functions hand their caller's promise on: the processor has the instructions of the level, and pointers are valid for what is read and written.
#![allow(unsafe_op_in_unsafe_fn)]

use std::marker::PhantomData;
use std::mem;

use weft_plan::Datatype;
use weft_plan::datatype::Number;

use super::arithmetic::{Arithmetic, Divisor, Lane};
use super::level::{InstructionSet, LINE, Level, Portable};
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};

/// How far ahead the sources are asked for when the results go past the cache.
const AHEAD: usize = 1024;
/// How many lines of a source are taken at a time.
const TOGETHER: usize = 2;

/// The entries for one datatype and one operation. All take destinations, sources, the number of bytes, the divisor, and whether to
/// store past the cache.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    pub(super) pair: unsafe fn([*mut u8; 1], [*const u8; 2], usize, &Divisor, bool),
    pub(super) pair_both: unsafe fn([*mut u8; 2], [*const u8; 2], usize, &Divisor, bool),
    pub(super) many: unsafe fn([*mut u8; 1], &[*const u8], usize, &Divisor, bool),
}

/// The entries of one instruction set: the loops, compiled for the instructions that it has.
#[cfg(target_arch = "x86_64")]
macro_rules! entries {
    ($level:ident, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn pair<K: Kind<$level>, O: Op>(
            to: [*mut u8; 1],
            from: [*const u8; 2],
            bytes: usize,
            by: &Divisor,
            stream: bool,
        ) {
            fold::<$level, K, O, 1>(to, &from, bytes, by, stream)
        }

        #[target_feature(enable = $features)]
        unsafe fn pair_both<K: Kind<$level>, O: Op>(
            to: [*mut u8; 2],
            from: [*const u8; 2],
            bytes: usize,
            by: &Divisor,
            stream: bool,
        ) {
            fold::<$level, K, O, 2>(to, &from, bytes, by, stream)
        }

        #[target_feature(enable = $features)]
        unsafe fn many<K: Kind<$level>, O: Op>(
            to: [*mut u8; 1],
            from: &[*const u8],
            bytes: usize,
            by: &Divisor,
            stream: bool,
        ) {
            fold::<$level, K, O, 1>(to, from, bytes, by, stream)
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use entries;

/// A reduction as a kernel knows it.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    Sum,
    Product,
    Lesser,
    Greater,
    /// A sum that is divided at the end.
    Average,
}

impl Kernels {
    pub(super) fn find(instructions: InstructionSet, datatype: Datatype, operation: Operation) -> Kernels {
        match instructions {
            InstructionSet::Portable => for_datatype::<Portable>(datatype, operation),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => for_datatype::<Avx2>(datatype, operation),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => for_datatype::<Avx512>(datatype, operation),
        }
    }
}

fn for_datatype<L: Level>(datatype: Datatype, operation: Operation) -> Kernels {
    match datatype {
        Datatype::F64 => for_operation::<L, F64>(operation),
        Datatype::F32 => for_operation::<L, F32>(operation),
        Datatype::F16 => for_operation::<L, F16>(operation),
        Datatype::Bf16 => for_operation::<L, Bf16>(operation),
        Datatype::Fp8E4m3 => for_operation::<L, Fp8E4m3>(operation),
        Datatype::Fp8E5m2 => for_operation::<L, Fp8E5m2>(operation),
        Datatype::U8 => for_operation::<L, Integer<u8, 64>>(operation),
        Datatype::U16 => for_operation::<L, Integer<u16, 32>>(operation),
        Datatype::U32 => for_operation::<L, Integer<u32, 16>>(operation),
        Datatype::U64 => for_operation::<L, Integer<u64, 8>>(operation),
        Datatype::I8 => for_operation::<L, Integer<i8, 64>>(operation),
        Datatype::I16 => for_operation::<L, Integer<i16, 32>>(operation),
        Datatype::I32 => for_operation::<L, Integer<i32, 16>>(operation),
        Datatype::I64 => for_operation::<L, Integer<i64, 8>>(operation),
    }
}

fn for_operation<L: Level, K: Kind<L>>(operation: Operation) -> Kernels {
    match operation {
        Operation::Sum => L::kernels::<K, Sum>(),
        Operation::Product => L::kernels::<K, Product>(),
        Operation::Lesser => L::kernels::<K, Lesser>(),
        Operation::Greater => L::kernels::<K, Greater>(),
        Operation::Average => L::kernels::<K, Average>(),
    }
}

/// Reduces all sources into all destinations.
///
/// # Safety
/// The processor has the instructions of the level. Sources are valid for reads and destinations for writes of so many bytes, which are
/// whole elements. A destination is equal to a source or overlaps nothing. To stream, destinations lie alike within their
/// lines, at a whole element.
#[inline(always)]
pub(super) unsafe fn fold<L: Level, K: Kind<L>, O: Op, const D: usize>(
    to: [*mut u8; D],
    from: &[*const u8],
    bytes: usize,
    divisor: &Divisor,
    stream: bool,
) {
    let mut at = 0;
    // Less than a line: the head, up to where a line begins, and later the tail.
    let mut part = if stream { to[0].align_offset(LINE).min(bytes) } else { 0 };
    // SAFETY: `at` and what is accessed from there on stay within the caller's bytes. A streamed line begins where the head has ended:
    // at the beginning of a line.
    unsafe {
        loop {
            if part > 0 {
                fold_part::<L, K, O, D>(to, from, at, part, divisor);
                at += part;
            }
            while bytes - at >= TOGETHER * LINE {
                if stream {
                    prefetch_lines::<L>(from, at + AHEAD);
                }
                let blocks = fold_lines::<L, K, O, TOGETHER>(from, at, divisor);
                for (line, &block) in blocks.iter().enumerate() {
                    for to in to {
                        let to = to.add(at + line * LINE);
                        if stream {
                            L::stream(block, to)
                        } else {
                            L::store(block, to)
                        }
                    }
                }
                at += TOGETHER * LINE;
            }
            if at == bytes {
                break;
            }
            part = (bytes - at).min(LINE);
        }
        if stream {
            L::fence();
        }
    }
}

/// # Safety
/// The processor has the instructions of the level.
#[inline(always)]
unsafe fn prefetch_lines<L: Level>(from: &[*const u8], at: usize) {
    for source in from {
        for line in 0..TOGETHER {
            L::prefetch(source.wrapping_add(at + line * LINE));
        }
    }
}

/// # Safety
/// As for [`fold`], of `N` whole lines.
#[inline(always)]
unsafe fn fold_lines<L: Level, K: Kind<L>, O: Op, const N: usize>(
    from: &[*const u8],
    at: usize,
    divisor: &Divisor,
) -> [L::Block; N] {
    let mut wide = load_lines::<L, K, N>(from[0].add(at));
    for source in &from[1..] {
        wide = O::apply(wide, load_lines::<L, K, N>(source.add(at)));
    }
    let wide = O::finish(wide, divisor);
    let mut blocks = [K::narrow(wide[0]); N];
    for line in 1..N {
        blocks[line] = K::narrow(wide[line]);
    }
    blocks
}

/// # Safety
/// As for [`fold`], of `N` whole lines.
#[inline(always)]
unsafe fn load_lines<L: Level, K: Kind<L>, const N: usize>(from: *const u8) -> [K::Wide; N] {
    let mut wide = [K::widen(L::load(from)); N];
    for (line, wide) in wide.iter_mut().enumerate().skip(1) {
        *wide = K::widen(L::load(from.add(line * LINE)));
    }
    wide
}

/// # Safety
/// As for [`fold`], of at most one line.
#[inline(always)]
unsafe fn fold_part<L: Level, K: Kind<L>, O: Op, const D: usize>(
    to: [*mut u8; D],
    from: &[*const u8],
    at: usize,
    bytes: usize,
    divisor: &Divisor,
) {
    let mut wide = K::widen(L::load_part(from[0].add(at), bytes));
    for &source in &from[1..] {
        wide = O::apply(wide, K::widen(L::load_part(source.add(at), bytes)));
    }
    let block = K::narrow(O::finish(wide, divisor));
    for to in to {
        L::store_part(block, to.add(at), bytes);
    }
}

/// An operation on lanes.
pub(super) trait Op {
    unsafe fn apply<A: Arithmetic>(a: A, b: A) -> A;
    /// What is done with the result of all.
    #[inline(always)]
    unsafe fn finish<A: Arithmetic>(all: A, _divisor: &Divisor) -> A {
        all
    }
}

struct Sum;
struct Product;
struct Lesser;
struct Greater;
struct Average;

impl Op for Sum {
    #[inline(always)]
    unsafe fn apply<A: Arithmetic>(a: A, b: A) -> A {
        a.sum(b)
    }
}
impl Op for Product {
    #[inline(always)]
    unsafe fn apply<A: Arithmetic>(a: A, b: A) -> A {
        a.product(b)
    }
}
impl Op for Lesser {
    #[inline(always)]
    unsafe fn apply<A: Arithmetic>(a: A, b: A) -> A {
        a.lesser(b)
    }
}
impl Op for Greater {
    #[inline(always)]
    unsafe fn apply<A: Arithmetic>(a: A, b: A) -> A {
        a.greater(b)
    }
}
impl Op for Average {
    #[inline(always)]
    unsafe fn apply<A: Arithmetic>(a: A, b: A) -> A {
        a.sum(b)
    }
    #[inline(always)]
    unsafe fn finish<A: Arithmetic>(all: A, divisor: &Divisor) -> A {
        all.divided(divisor)
    }
}

/// A datatype on an instruction set: how a line of it becomes lanes to reckon with, and back.
pub(super) trait Kind<L: Level> {
    type Wide: Arithmetic;
    unsafe fn widen(block: L::Block) -> Self::Wide;
    unsafe fn narrow(wide: Self::Wide) -> L::Block;
}

struct F64;
struct F32;
struct F16;
struct Bf16;
struct Fp8E4m3;
struct Fp8E5m2;
/// `N` integers fill a line. Compilers know their arithmetic on every instruction set.
struct Integer<T, const N: usize>(PhantomData<T>);

// Six times the same two lines: which methods of the level belong to the kind.
macro_rules! float_kind {
    ($kind:ident, $wide:ty, $widen:ident, $narrow:ident) => {
        impl<L: Level> Kind<L> for $kind {
            type Wide = $wide;
            #[inline(always)]
            unsafe fn widen(block: L::Block) -> $wide {
                L::$widen(block)
            }
            #[inline(always)]
            unsafe fn narrow(wide: $wide) -> L::Block {
                L::$narrow(wide)
            }
        }
    };
}

float_kind!(F64, L::F64, widen_f64, narrow_f64);
float_kind!(F32, L::F32, widen_f32, narrow_f32);
float_kind!(F16, [L::F32; 2], widen_f16, narrow_f16);
float_kind!(Bf16, [L::F32; 2], widen_bf16, narrow_bf16);
float_kind!(Fp8E4m3, [L::F32; 4], widen_e4m3, narrow_e4m3);
float_kind!(Fp8E5m2, [L::F32; 4], widen_e5m2, narrow_e5m2);

impl<L: Level, T: Number, const N: usize> Kind<L> for Integer<T, N> {
    type Wide = [Lane<T>; N];
    #[inline(always)]
    unsafe fn widen(block: L::Block) -> [Lane<T>; N] {
        const { assert!(size_of::<L::Block>() == LINE && size_of::<[Lane<T>; N]>() == LINE) };
        // SAFETY: of equal size, as just checked, and all bits are integers.
        unsafe { mem::transmute_copy(&block) }
    }
    #[inline(always)]
    unsafe fn narrow(wide: [Lane<T>; N]) -> L::Block {
        // SAFETY: as above.
        unsafe { mem::transmute_copy(&wide) }
    }
}
