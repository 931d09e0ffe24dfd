//! The walk of the kernel through its words, in Rust: the same units, chunks, lanes and items, over bytes of the host.

use proptest::prelude::*;
use weft_plan::conversion::{Elements, EndBytes, Factor, Narrowing, PagedEnd, Scales, convert};
use weft_plan::datatype::{E4m3, Element, bf16, f16};
use weft_plan::pages::{Pages, PagesShape, PagesStrides, Table};

use super::*;

/// What a device would do to memory that begins at address 0.
fn walk(program: &DeviceProgram, memory: &mut [u8]) {
    for launched in &program.launches {
        for unit in 0..launched.units {
            let mut nests = launched.nests.iter();
            let nest = nests.rfind(|nest| unit >= nest.first_unit).unwrap();
            let nth = (unit - nest.first_unit) / nest.chunks;
            let chunk = unit - nest.first_unit - nth * nest.chunks;
            let at = &launched.stretches[(nest.first_stretch + nth) as usize];
            if nest.flags & LONG_RUN != 0 {
                quantise(nest, at, chunk * nest.by_run.by, memory);
                continue;
            }
            for i in chunk * CHUNK..(chunk + 1) * CHUNK {
                if i < nest.items {
                    carry_out(nest, at, i, memory);
                }
            }
        }
    }
}

struct Item {
    a: u32,
    b: u32,
    c: u32,
    within: u32,
}

impl Item {
    fn of(nest: &NestWords, i: u32) -> Item {
        let run = nest.by_run.quotient_of(i);
        let outer = nest.by_inner.quotient_of(run);
        let a = nest.by_middle.quotient_of(outer);
        Item {
            a,
            b: outer - a * nest.by_middle.by,
            c: run - outer * nest.by_inner.by,
            within: i - run * nest.by_run.by,
        }
    }
    fn at(&self, strides: &[u64; 3]) -> usize {
        (u64::from(self.a) * strides[0] + u64::from(self.b) * strides[1] + u64::from(self.c) * strides[2]) as usize
    }
}

fn size(code: u32) -> usize {
    [1, 4, 2, 2, 1][code as usize]
}

fn get(code: u32, bytes: &[u8]) -> f32 {
    match code {
        CODE_F32 => f32::read(bytes),
        CODE_F16 => f16::read(bytes).to_f32(),
        CODE_BF16 => bf16::read(bytes).to_f32(),
        _ => E4m3::read(bytes).to_f32(),
    }
}

fn put(code: u32, number: f32, bytes: &mut [u8]) {
    match code {
        CODE_F32 if number.is_nan() => f32::from_bits(0x7fc0_0000).write(bytes),
        CODE_F32 => number.write(bytes),
        CODE_F16 if number.is_nan() => f16::from_bits(0x7e00).write(bytes),
        CODE_F16 => f16::from_f32(number).write(bytes),
        CODE_BF16 if number.is_nan() => bf16::from_bits(0x7fc0).write(bytes),
        CODE_BF16 => bf16::from_f32(number).write(bytes),
        _ => E4m3::from_f32(number).write(bytes),
    }
}

fn factor_of(nest: &NestWords, at: &StretchWords, item: &Item, memory: &[u8]) -> f32 {
    match nest.flags & FROM_BESIDE {
        0 => nest.factor,
        _ => f32::read(&memory[at.from_scales as usize + item.at(&nest.from_scale_strides)..]),
    }
}

fn carry_out(nest: &NestWords, at: &StretchWords, i: u32, memory: &mut [u8]) {
    let item = Item::of(nest, i);
    if nest.flags & TO_BESIDE != 0 {
        // The first lane of those that have the run does it for all of them here.
        if item.within == 0 {
            quantise(nest, at, i, memory);
        }
        return;
    }
    let (width, within) = (nest.width as usize, item.within as usize);
    let (read, written) = (size(nest.from), size(nest.to));
    let from = at.from as usize + item.at(&nest.from_strides) + within * width * read;
    let to = at.to as usize + item.at(&nest.to_strides) + within * width * written;
    if nest.from == BYTES {
        assert!(
            from.is_multiple_of(width) && to.is_multiple_of(width),
            "a vector that is not aligned"
        );
        return memory.copy_within(from..from + width, to);
    }
    assert!(from.is_multiple_of(width * read) && to.is_multiple_of(width * written));
    let factor = factor_of(nest, at, &item, memory);
    for nth in 0..width {
        let number = get(nest.from, &memory[from + nth * read..]) * factor * nest.inverse;
        put(nest.to, number, &mut memory[to + nth * written..]);
    }
}

fn quantise(nest: &NestWords, at: &StretchWords, i: u32, memory: &mut [u8]) {
    let item = Item::of(nest, i);
    assert_eq!(item.within, 0);
    let from = at.from as usize + item.at(&nest.from_strides);
    let to = at.to as usize + item.at(&nest.to_strides);
    let factor = factor_of(nest, at, &item, memory);
    let elements = (nest.items_a_run * nest.width) as usize;
    let numbers: Vec<f32> = (0..elements)
        .map(|nth| get(nest.from, &memory[from + nth * size(nest.from)..]) * factor)
        .collect();
    let greatest = numbers.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap();
    let scale = match greatest >= 0x7f80_0000 {
        true => f32::NAN,
        false => (f32::from_bits(greatest) * SHRINK).max(f32::MIN_POSITIVE),
    };
    for (nth, number) in numbers.into_iter().enumerate() {
        memory[to + nth] = E4m3::from_f32(number * (1.0 / scale)).0;
    }
    let place = at.to_scales as usize + item.at(&nest.to_scale_strides);
    scale.write(&mut memory[place..]);
}

const CAST: [Datatype; 4] = [Datatype::F32, Datatype::F16, Datatype::Bf16, Datatype::Fp8E4m3];

/// Dimensions in any order, and gaps of so many bytes between them.
fn pages(order: &[usize], gap: u64, shape: PagesShape) -> Pages {
    let counts = [
        shape.parts,
        shape.blocks,
        shape.tokens,
        shape.heads.end - shape.heads.start,
    ];
    let (mut strides, mut extent) = ([0; 4], shape.unit_bytes);
    for dimension in order {
        strides[*dimension] = extent + gap;
        extent = strides[*dimension] * counts[*dimension];
    }
    let [part, block, token, head] = strides;
    let strides = PagesStrides {
        base: gap,
        part,
        block,
        token,
        head,
    };
    Pages::with_strides(shape, strides).unwrap()
}

#[derive(Clone, Debug)]
struct End {
    datatype: Datatype,
    scaled: u8,
    order: Vec<usize>,
    gap: u64,
    tokens: u64,
}

fn any_end() -> impl Strategy<Value = End> {
    let order = Just(vec![0usize, 1, 2, 3]).prop_shuffle();
    (0usize..4, 0u8..3, order, 0u64..4, 1u64..9).prop_map(|(datatype, scaled, order, gap, tokens)| End {
        datatype: CAST[datatype],
        scaled,
        order,
        gap: [0, 4, 16, 24][gap as usize],
        tokens,
    })
}

impl End {
    fn describe(&self, blocks: u64, parts: u64, elements: u64) -> (Pages, Elements) {
        let shape = PagesShape {
            blocks,
            tokens: self.tokens,
            heads: 0..3,
            parts,
            unit_bytes: elements * self.datatype.size() as u64,
        };
        let narrow = self.datatype == Datatype::Fp8E4m3;
        let scales = match self.scaled {
            1 if narrow => Scales::PerPart((0..parts).map(|part| Factor::new(0.3 + part as f32).unwrap()).collect()),
            2 if narrow => {
                let shape = PagesShape {
                    unit_bytes: 4,
                    ..shape.clone()
                };
                Scales::Beside(Box::new(pages(&self.order, self.gap, shape)))
            }
            _ => Scales::One,
        };
        let datatype = self.datatype;
        (pages(&self.order, self.gap, shape), Elements { datatype, scales })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]
    #[test]
    fn the_walk_of_the_kernel_does_what_the_conversion_means(
        near in any_end(), far in any_end(), parts in 1u64..3, elements in prop_oneof![1u64..9, Just(64), Just(72), Just(576)],
        layers in 1u64..4, seed: u64,
    ) {
        const TOKENS: u64 = 19;
        let tables = [&near, &far].map(|end| (0..TOKENS.div_ceil(end.tokens)).rev().collect::<Vec<u64>>());
        let (from, from_elements) = near.describe(tables[0].len() as u64, parts, elements);
        let (to, to_elements) = far.describe(tables[1].len() as u64, parts, elements);
        let side = |pages, blocks, elements| PagedEnd { table: Table { pages, blocks }, elements };
        let conversion = convert(
            side(&from, &tables[0], &from_elements), side(&to, &tables[1], &to_elements), 2..TOKENS, 1..3, Narrowing::Allowed,
        ).unwrap();

        // Each layer has its four memories one after the other.
        let lens = [
            from.end(),
            match &from_elements.scales { Scales::Beside(scales) => scales.end(), _ => 0 },
            to.end(),
            match &to_elements.scales { Scales::Beside(scales) => scales.end(), _ => 0 },
        ].map(|len| len.next_multiple_of(64));
        let layer = lens.iter().sum::<u64>();
        let mut state = seed;
        let mut memory: Vec<u8> = (0..layer * layers).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as u8
        }).collect();
        let mut expected = memory.clone();
        let mut places = Vec::new();
        for nth in 0..layers {
            let base = nth * layer;
            places.push(ConversionEnds { from: base, from_scales: base + lens[0], to: base + lens[0] + lens[1], to_scales: base + lens[0] + lens[1] + lens[2] });
            let (a, rest) = expected[base as usize..(base + layer) as usize].split_at_mut(lens[0] as usize);
            let (b, rest) = rest.split_at_mut(lens[1] as usize);
            let (c, d) = rest.split_at_mut(lens[2] as usize);
            conversion.apply(EndBytes { from: a, from_scales: b, to: c, to_scales: d });
        }
        let all: Vec<_> = places.iter().map(|ends| (&conversion, *ends)).collect();
        let program = DeviceProgram::new(&all).unwrap();
        prop_assert_eq!(program.bytes(), conversion.bytes_written() * layers);
        walk(&program, &mut memory);
        prop_assert!(memory == expected, "{:?}", conversion.nests());
    }

    #[test]
    fn divisions_are_exact(by in 1u32..1 << 31, n in 0u32..1 << 31) {
        for by in [by, by.next_power_of_two().min(1 << 30), by % 97 + 1] {
            prop_assert_eq!(Divisor::by(by).quotient_of(n), n / by);
            prop_assert_eq!(Divisor::by(by).quotient_of(n / by * by), n / by);
        }
    }
}

#[test]
fn the_ends_of_divisions_are_exact() {
    for by in [1, 2, 3, 5, 7, 641, (1 << 30) - 1, 1 << 30, (1 << 31) - 1] {
        for n in [0, 1, by - 1, by, by + 1, (1 << 31) - 1] {
            let n = n.min((1 << 31) - 1);
            assert_eq!(Divisor::by(by).quotient_of(n), n / by, "{n} / {by}");
        }
    }
}

#[test]
fn layers_that_are_alike_share_a_nest_and_a_launch() {
    let pages = Pages::heads_first(64, 16, 0..8, 256).unwrap();
    let turned = Pages::tokens_first(64, 16, 0..8, 256).unwrap();
    let (blocks, bf16) = ((0..64).collect::<Vec<u64>>(), Elements::of(Datatype::Bf16));
    let side = |pages| PagedEnd {
        table: Table { pages, blocks: &blocks },
        elements: &bf16,
    };
    let conversion = convert(side(&pages), side(&turned), 0..1024, 0..8, Narrowing::Refused).unwrap();
    let ends = |nth: u64| ConversionEnds {
        from: nth << 32,
        to: nth << 32 | 1 << 31,
        ..ConversionEnds::default()
    };
    let all: Vec<_> = (0..80).map(|nth| (&conversion, ends(nth))).collect();
    let program = DeviceProgram::new(&all).unwrap();
    assert_eq!(program.launches(), 1);
    let launched = &program.launches[0];
    assert_eq!((launched.nests.len(), launched.stretches.len()), (1, 80 * 64));
    assert_eq!((launched.nests[0].width, launched.nests[0].items_a_run), (16, 16));
    // What the device reads is what the words are, one after the other.
    let list = launched.list();
    assert_eq!(list.len(), 184 + 80 * 64 * 32);
    assert_eq!(list[20..24], 16u32.to_ne_bytes());
    assert_eq!(list[184 + 32 * 64..][..8], (1u64 << 32).to_ne_bytes());
    let words = launched.words(4096);
    assert_eq!(
        (words.nests, words.stretches, words.count, words.units),
        (4096, 4096 + 184, 1, launched.units)
    );
}

#[test]
fn what_a_device_cannot_address_is_refused() {
    let from = Pages::heads_first(1, 1, 0..1, 8).unwrap();
    let to = Pages::heads_first(1, 1, 0..1, 4).unwrap();
    let (bf16, fp8) = (Elements::of(Datatype::Bf16), Elements::of(Datatype::Fp8E4m3));
    let table = |pages| Table { pages, blocks: &[0] };
    let conversion = convert(
        PagedEnd {
            table: table(&from),
            elements: &bf16,
        },
        PagedEnd {
            table: table(&to),
            elements: &fp8,
        },
        0..1,
        0..1,
        Narrowing::Allowed,
    )
    .unwrap();
    let with = |from| {
        DeviceProgram::new(&[(
            &conversion,
            ConversionEnds {
                from,
                ..ConversionEnds::default()
            },
        )])
        .map(drop)
    };
    let datatype = Datatype::Bf16;
    assert_eq!(with(1), Err(ProgramError::Misaligned { datatype }));
    assert_eq!(with(u64::MAX - 7), Err(ProgramError::PastTheEnd));
    assert_eq!(with(4096), Ok(()));
}

#[test]
fn the_numbers_are_those_of_the_kernel() {
    let source = include_str!("../../kernels/convert.cu");
    for line in [
        format!("NESTS_MAX = {NESTS_MAX};"),
        format!("DEPTH = {};", CHUNK / LANES),
        format!(
            "BYTES = {BYTES}, CODE_F32 = {CODE_F32}, CODE_F16 = {CODE_F16}, CODE_BF16 = {CODE_BF16}, CODE_E4M3 = {CODE_E4M3}"
        ),
        format!(
            "FROM_FIXED = {FROM_FIXED}, FROM_BESIDE = {FROM_BESIDE}, TO_FIXED = {TO_FIXED}, TO_BESIDE = {TO_BESIDE}, LONG_RUN = {LONG_RUN}"
        ),
    ] {
        assert!(source.contains(&line), "{line}");
    }
    let text = include_str!("../../kernels/convert.ptx");
    let mut kernels = 0;
    for from in BYTES..=CODE_E4M3 {
        for to in BYTES..=CODE_E4M3 {
            // Bytes stay bytes, and what is as wide as it was is moved; but for codes whose scales change.
            if (from == to && from != BYTES && from != CODE_E4M3) || (from == BYTES) != (to == BYTES) {
                continue;
            }
            let nest = NestWords {
                from,
                to,
                ..NestWords::default()
            };
            let launched = Launched {
                nests: vec![nest],
                ..Launched::default()
            };
            assert!(
                text.contains(&format!(".entry {}(", launched.kernel())),
                "{}",
                launched.kernel()
            );
            kernels += 1;
        }
    }
    assert_eq!((text.matches(".entry ").count(), kernels), (14, 14));
}
