use std::num::NonZeroU64;

use proptest::prelude::*;
use weft_plan::datatype::f16;
use weft_plan::{Datatype, Reduction};

use super::*;

fn available() -> impl Iterator<Item = InstructionSet> {
    let sets = InstructionSet::ALL.iter().copied();
    sets.filter(|set| set.is_available())
}

/// A buffer whose bytes begin so far after the beginning of a line.
struct Shifted {
    bytes: Vec<u8>,
    at: usize,
    len: usize,
}

const GUARD: u8 = 0xa5;

impl Shifted {
    fn new(contents: &[u8], shift: usize) -> Shifted {
        let mut bytes = vec![GUARD; contents.len() + 256];
        let at = bytes.as_ptr().align_offset(64) + shift;
        bytes[at..at + contents.len()].copy_from_slice(contents);
        Shifted {
            bytes,
            at,
            len: contents.len(),
        }
    }
    fn as_ptr(&self) -> *const u8 {
        self.bytes[self.at..].as_ptr()
    }
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.bytes[self.at..].as_mut_ptr()
    }
    fn contents(&self) -> &[u8] {
        let (before, rest) = self.bytes.split_at(self.at);
        let (contents, after) = rest.split_at(self.len);
        assert!(before.iter().chain(after).all(|&b| b == GUARD), "written outside");
        contents
    }
}

/// One call of everything, on every instruction set, beside the reference.
fn check(datatype: Datatype, reduction: Reduction, sources: &[Vec<u8>], shifts: [usize; 3], divisor: u64) {
    let len = sources[0].len();
    let count = len / datatype.size();
    let slices: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
    let (mut pair, mut all) = (vec![0; len], vec![0; len]);
    let finish = NonZeroU64::new(divisor).filter(|_| reduction == Reduction::Avg);
    let fold = |into: &mut [u8], sources: &[&[u8]]| match finish {
        Some(by) => datatype.average(by.get(), into, sources).unwrap(),
        None => datatype.fold(reduction, into, sources).unwrap(),
    };
    fold(&mut pair, &slices[..2]);
    fold(&mut all, &slices);
    let shifted: Vec<Shifted> = sources
        .iter()
        .enumerate()
        .map(|(i, source)| Shifted::new(source, shifts[i % 3]))
        .collect();
    let from: Vec<*const u8> = shifted.iter().map(Shifted::as_ptr).collect();
    for set in available() {
        let mut reducer = Reducer::with(set, datatype, reduction);
        if let Some(by) = finish {
            reducer = reducer.finishing(by);
        }
        for cache in [Cache::BySize, Cache::Keep, Cache::Bypass] {
            let name = format!("{reducer:?}, {cache:?}, {count} elements");
            let blank = vec![0x11; len];
            let mut to = [Shifted::new(&blank, shifts[2]), Shifted::new(&blank, shifts[2])];
            let [first, second] = &mut to;
            // SAFETY: all buffers hold `count` elements.
            unsafe { reducer.combine(first.as_mut_ptr(), from[0], from[1], count, cache) };
            assert!(first.contents() == pair, "combine: {name}");
            // SAFETY: as many elements in every source as in the destination.
            unsafe { reducer.combine_many(first.as_mut_ptr(), &from, count, cache) };
            assert!(first.contents() == all, "combine_many: {name}");
            // SAFETY: the two destinations are different, and hold as many.
            unsafe {
                reducer.combine_both(
                    [first.as_mut_ptr(), second.as_mut_ptr()],
                    from[0],
                    from[1],
                    count,
                    cache,
                );
            }
            assert!(
                first.contents() == pair && second.contents() == pair,
                "combine_both: {name}"
            );
            let mut odd = Shifted::new(&blank, shifts[0]);
            // SAFETY: lying differently changes nothing of how much they hold.
            unsafe { reducer.combine_both([first.as_mut_ptr(), odd.as_mut_ptr()], from[0], from[1], count, cache) };
            assert!(odd.contents() == pair, "combine_both, lying differently: {name}");
            let mut ours = Shifted::new(&sources[0], shifts[1]);
            // SAFETY: a destination may be the first source.
            unsafe { reducer.combine(ours.as_mut_ptr(), ours.as_ptr(), from[1], count, cache) };
            assert!(ours.contents() == pair, "in place: {name}");
            let mut ours = Shifted::new(&sources[1], shifts[1]);
            // SAFETY: a destination may be the second source.
            unsafe { reducer.combine(ours.as_mut_ptr(), from[0], ours.as_ptr(), count, cache) };
            assert!(ours.contents() == pair, "in the place of the second: {name}");
            let mut ours = Shifted::new(&sources[0], shifts[1]);
            // SAFETY: both hold `count` elements, and are not the same.
            unsafe { reducer.reduce_into(ours.as_mut_ptr(), from[1], count) };
            assert!(ours.contents() == pair, "reduce_into: {name}");
        }
    }
}

fn datatype() -> impl Strategy<Value = Datatype> {
    proptest::sample::select(Datatype::ALL.to_vec())
}

fn reduction() -> impl Strategy<Value = Reduction> {
    proptest::sample::select(Reduction::ALL.to_vec())
}

/// Elements of all kinds: any bits, and for floats the odd ones more often than chance would have them.
fn contents(datatype: Datatype, count: usize) -> impl Strategy<Value = Vec<u8>> {
    let specials: Vec<u64> = match datatype {
        Datatype::F64 => [0.0, -0.0, 1.0, f64::MAX, f64::INFINITY, f64::NEG_INFINITY, f64::NAN]
            .map(f64::to_bits)
            .to_vec(),
        Datatype::F32 => [0.0, -0.0, 1.0, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]
            .map(|x| u64::from(x.to_bits()))
            .to_vec(),
        Datatype::F16 => vec![0, 0x8000, 0x3c00, 0x7bff, 0x7c00, 0xfc00, 0x7e01],
        Datatype::Bf16 => vec![0, 0x8000, 0x3f80, 0x7f7f, 0x7f80, 0xff80, 0xff81],
        _ => vec![0, 1, 0x7f, 0x80, 0xff, 0x7fff, 1 << 31, 1 << 63, u64::MAX],
    };
    let element = prop_oneof![3 => any::<u64>(), 1 => proptest::sample::select(specials)];
    proptest::collection::vec(element, count).prop_map(move |elements| {
        let bytes = |element: u64| element.to_le_bytes().into_iter().take(datatype.size());
        elements.into_iter().flat_map(bytes).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_kernel_is_the_reference_bit_for_bit(
        (datatype, reduction, sources) in (datatype(), reduction(), 2usize..7, 0usize..400)
            .prop_flat_map(|(datatype, reduction, sources, count)| {
                let sources = proptest::collection::vec(contents(datatype, count), sources);
                (Just(datatype), Just(reduction), sources)
            }),
        shifts: [u8; 3],
        divisor in 0u64..10,
    ) {
        check(datatype, reduction, &sources, shifts.map(|s| usize::from(s % 65)), divisor);
    }
}

/// Every datatype with every reduction once, long enough for all loops.
#[test]
fn all_datatypes_and_reductions() {
    let mut state = 1u64;
    for datatype in Datatype::ALL {
        let sources: Vec<Vec<u8>> = (0..3)
            .map(|_| {
                let byte = |_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                    (state >> 56) as u8
                };
                (0..datatype.size() * 333).map(byte).collect()
            })
            .collect();
        for reduction in Reduction::ALL {
            for divisor in [0, 2, 3, 8] {
                let size = datatype.size();
                check(datatype, reduction, &sources, [0, 3, 0], divisor);
                check(datatype, reduction, &sources, [1, 0, size], divisor);
            }
        }
    }
}

#[test]
fn every_pair_of_eight_bit_elements() {
    let all: Vec<u8> = (0..=255).collect();
    let each: Vec<u8> = all.iter().flat_map(|&a| [a; 256]).collect();
    let cycle = all.repeat(256);
    for datatype in [Datatype::Fp8E4m3, Datatype::Fp8E5m2, Datatype::I8, Datatype::U8] {
        for reduction in Reduction::ALL {
            check(datatype, reduction, &[each.clone(), cycle.clone()], [0; 3], 3);
        }
    }
}

/// Every f16 beside zeros: widened, left alone, narrowed again; and halved, which meets every rounding of subnormals.
#[test]
fn every_sixteen_bit_float() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    let zeros = vec![0; all.len()];
    let reversed: Vec<u8> = (0..=u16::MAX).rev().flat_map(u16::to_ne_bytes).collect();
    for datatype in [Datatype::F16, Datatype::Bf16] {
        check(datatype, Reduction::Sum, &[all.clone(), zeros.clone()], [0; 3], 0);
        check(datatype, Reduction::Avg, &[all.clone(), zeros.clone()], [0; 3], 2);
        check(datatype, Reduction::Prod, &[all.clone(), reversed.clone()], [0; 3], 0);
    }
    let one = f16::from_f32(1.0).to_ne_bytes().repeat(1 << 16);
    check(Datatype::F16, Reduction::Prod, &[all.clone(), one], [0; 3], 0);
}

#[test]
fn large_results_go_past_the_cache_and_are_the_same() {
    let len = STREAM_MIN_BYTES + 8 * 77;
    let sources: Vec<Vec<u8>> = [7, 11, 13]
        .map(|k: usize| (0..len).map(|i| (i * k + i / 251) as u8).collect())
        .to_vec();
    check(Datatype::I64, Reduction::Sum, &sources, [0, 3, 8], 0);
    check(Datatype::U8, Reduction::Max, &sources, [0, 3, 61], 0);
}

#[test]
fn one_source_is_copied_or_divided() {
    let from = [3.0f32, -7.0, 1e-45, f32::from_bits(0x7fa0_0001)];
    for set in available() {
        let average = Reducer::with(set, Datatype::F32, Reduction::Avg);
        let mut to = [0f32; 4];
        // SAFETY: four elements each.
        unsafe { average.combine_many(to.as_mut_ptr().cast(), &[from.as_ptr().cast()], 4, Cache::Keep) };
        assert_eq!(to.map(f32::to_bits), from.map(f32::to_bits));
        let last = average.finishing(NonZeroU64::new(3).unwrap());
        // SAFETY: both arrays have four elements.
        unsafe { last.combine_many(to.as_mut_ptr().cast(), &[from.as_ptr().cast()], 4, Cache::Keep) };
        assert_eq!(
            to.map(f32::to_bits),
            [1.0, -7.0 / 3.0, 0.0, f32::from_bits(0x7fc0_0000)].map(f32::to_bits)
        );
    }
}
