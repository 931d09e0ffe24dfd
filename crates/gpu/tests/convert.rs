//! Conversions of blocks, on a device: the same bytes as the plan says, and no other byte touched.

use std::sync::Arc;

use weft_gpu::{ConversionEnds, ConvertError, Converter, Device, DeviceMemory, DeviceProgram, ProgramError, Stream};
use weft_plan::Datatype;
use weft_plan::conversion::{
    Conversion, Elements, EndBytes, Factor, Narrowing, PagedEnd, SCALE_BYTES, Scales, convert,
};
use weft_plan::pages::{Pages, PagesShape, PagesStrides, Table};
use weft_testing::{Need, has};

const CAST: [Datatype; 4] = [Datatype::F32, Datatype::F16, Datatype::Bf16, Datatype::Fp8E4m3];

/// Numbers by chance, the same every time.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
    fn shuffled(&mut self, count: u64) -> Vec<u64> {
        let mut all: Vec<u64> = (0..count).collect();
        (1..all.len())
            .rev()
            .for_each(|nth| all.swap(nth, self.below(nth as u64 + 1) as usize));
        all
    }
}

fn device() -> Option<Arc<Device>> {
    has(Need::Gpu).then(|| Device::open(0).expect("a device"))
}

/// Where the four memories of a conversion lie in one piece of a device's memory.
struct Bench {
    converter: Converter,
    memory: DeviceMemory,
}

impl Bench {
    fn new(device: &Arc<Device>, len: u64) -> Bench {
        Bench {
            converter: Converter::new(device).expect("a converter"),
            memory: DeviceMemory::allocate(device, len).expect("memory"),
        }
    }

    /// What is in the memories afterwards: of elements and of scales, both of what was written.
    fn convert(&self, conversion: &Conversion, memories: &[Vec<u8>; 4]) -> Result<[Vec<u8>; 2], ConvertError> {
        let mut at = 0;
        let places = [0, 1, 2, 3].map(|nth| {
            let place = at;
            self.memory.write(place, &memories[nth]).expect("bytes there");
            at += (memories[nth].len() as u64).next_multiple_of(256);
            place
        });
        let [from, from_scales, to, to_scales] = places.map(|place| self.memory.address() + place);
        let ends = ConversionEnds {
            from,
            from_scales,
            to,
            to_scales,
        };
        // SAFETY: all of them lie within the memory, which lives longer.
        unsafe { self.converter.convert(&[(conversion, ends)]) }?;
        let back = |nth: usize| {
            let mut bytes = vec![0; memories[nth].len()];
            self.memory.read(places[nth], &mut bytes).expect("bytes back");
            bytes
        };
        // What was read is as it was.
        assert!(back(0) == memories[0] && back(1) == memories[1]);
        Ok([back(2), back(3)])
    }
}

fn expected(conversion: &Conversion, memories: &[Vec<u8>; 4]) -> [Vec<u8>; 2] {
    let [from, from_scales, to, to_scales] = memories;
    let (mut to, mut to_scales) = (to.clone(), to_scales.clone());
    conversion.apply(EndBytes {
        from,
        from_scales,
        to: &mut to,
        to_scales: &mut to_scales,
    });
    [to, to_scales]
}

fn scale_bytes(elements: &Elements) -> u64 {
    match &elements.scales {
        Scales::Beside(scales) => scales.end(),
        _ => 0,
    }
}

fn any_pages(chance: &mut Chance, aligned: bool, shape: PagesShape) -> Pages {
    let counts = [
        shape.parts,
        shape.blocks,
        shape.tokens,
        shape.heads.end - shape.heads.start,
    ];
    let gap = if aligned {
        16 * chance.below(3)
    } else {
        4 * chance.below(5)
    };
    let (mut strides, mut extent) = ([0; 4], shape.unit_bytes.next_multiple_of(4));
    for dimension in chance.shuffled(4) {
        strides[dimension as usize] = extent + gap;
        extent = strides[dimension as usize] * counts[dimension as usize];
    }
    let [part, block, token, head] = strides;
    let strides = PagesStrides {
        base: gap,
        part,
        block,
        token,
        head,
    };
    Pages::with_strides(shape, strides).expect("strides that step over what lies within")
}

fn any_end(chance: &mut Chance, tokens: u64, parts: u64, elements: u64) -> (Pages, Elements, Vec<u64>) {
    let datatype = chance.one_of(&CAST);
    let block_tokens = 1 + chance.below(20);
    let shape = PagesShape {
        blocks: tokens.div_ceil(block_tokens) + chance.below(3),
        tokens: block_tokens,
        heads: 0..5,
        parts,
        unit_bytes: elements * datatype.size() as u64,
    };
    let aligned = chance.below(2) == 0;
    let scales = match (datatype, chance.below(3)) {
        (Datatype::Fp8E4m3, 1) => {
            let factor = |part| Factor::new(0.37 + part as f32).expect("a scale");
            Scales::PerPart((0..parts).map(factor).collect())
        }
        (Datatype::Fp8E4m3, 2) => {
            let unit_bytes = SCALE_BYTES;
            Scales::Beside(Box::new(any_pages(
                chance,
                aligned,
                PagesShape {
                    unit_bytes,
                    ..shape.clone()
                },
            )))
        }
        _ => Scales::One,
    };
    let blocks = chance.shuffled(shape.blocks);
    (any_pages(chance, aligned, shape), Elements { datatype, scales }, blocks)
}

#[test]
fn any_two_ends_are_converted_as_the_plan_says_and_nothing_else_is_touched() {
    let Some(device) = device() else { return };
    let bench = Bench::new(&device, 64 << 20);
    let mut casts = 0;
    for seed in 0..300 {
        let mut chance = Chance(seed);
        let parts = 1 + chance.below(2);
        let elements = chance.one_of(&[1, 3, 8, 16, 64, 72, 80, 100, 128, 576, 1000]);
        let (from, from_elements, from_blocks) = any_end(&mut chance, 50, parts, elements);
        let (to, to_elements, to_blocks) = any_end(&mut chance, 50, parts, elements);
        let side = |pages, blocks, elements| PagedEnd {
            table: Table { pages, blocks },
            elements,
        };
        let tokens = chance.below(10)..40 + chance.below(11);
        let conversion = convert(
            side(&from, &from_blocks, &from_elements),
            side(&to, &to_blocks, &to_elements),
            tokens,
            1..1 + 1 + chance.below(4),
            Narrowing::Allowed,
        )
        .expect("a conversion");
        casts += u32::from(!conversion.is_move());
        let lens = [
            from.end(),
            scale_bytes(&from_elements),
            to.end(),
            scale_bytes(&to_elements),
        ];
        let mut memories = lens.map(|len| chance.bytes(len));
        // Sensible scales, mostly: of any bits half would be too large for anything to be left.
        for scale in memories[1].chunks_exact_mut(4) {
            scale.copy_from_slice(&(2f32.powi(chance.below(20) as i32 - 10) * 1.37).to_ne_bytes());
        }
        let found = bench.convert(&conversion, &memories);
        let found = found.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let expected = expected(&conversion, &memories);
        let differs = |nth: usize| found[nth].iter().zip(&expected[nth]).position(|(a, b)| a != b);
        assert!(
            found == expected,
            "seed {seed}: at {:?} and {:?}: {:?}",
            differs(0),
            differs(1),
            conversion.nests()
        );
    }
    assert!(casts > 150);
}

/// All bits of what has 8 or 16, and as many by chance of what has 32; specials among them.
fn all_bits(datatype: Datatype, chance: &mut Chance) -> Vec<u8> {
    let count = 1u32 << 16;
    match datatype.size() {
        1 => (0..count).map(|bits| bits as u8).collect(),
        2 => (0..count).flat_map(|bits| (bits as u16).to_ne_bytes()).collect(),
        _ => (0..count)
            .flat_map(|nth| {
                let high = nth << 16;
                (high | ((chance.next() as u32 & 0xffff) * (nth & 1))).to_ne_bytes()
            })
            .collect(),
    }
}

#[test]
fn every_cast_of_every_bits_is_that_of_the_plan() {
    let Some(device) = device() else { return };
    let bench = Bench::new(&device, 8 << 20);
    let mut chance = Chance(3);
    let blocks: Vec<u64> = (0..64).collect();
    for from in CAST {
        for to in CAST {
            for (scaled_from, scaled_to) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 2), (1, 2)] {
                let narrow = |datatype, scaled| scaled == 0 || datatype == Datatype::Fp8E4m3;
                if !narrow(from, scaled_from) || !narrow(to, scaled_to) {
                    continue;
                }
                // 65,536 elements: 64 blocks of 8 tokens of 2 heads, 64 elements each.
                let end = |datatype: Datatype, scaled: u32| {
                    let unit = 64 * datatype.size() as u64;
                    let shape = |unit_bytes| PagesShape {
                        blocks: 64,
                        tokens: 8,
                        heads: 0..2,
                        parts: 1,
                        unit_bytes,
                    };
                    let strides = |unit: u64| PagesStrides {
                        base: 0,
                        part: 0,
                        block: 16 * unit,
                        token: 2 * unit,
                        head: unit,
                    };
                    let of = |unit| Pages::with_strides(shape(unit), strides(unit)).expect("pages");
                    let scales = match scaled {
                        0 => Scales::One,
                        1 => Scales::PerPart(vec![Factor::new(0.0173).expect("a scale")]),
                        _ => Scales::Beside(Box::new(of(SCALE_BYTES))),
                    };
                    (of(unit), Elements { datatype, scales })
                };
                let ((from_pages, from_elements), (to_pages, to_elements)) =
                    (end(from, scaled_from), end(to, scaled_to));
                let side = |pages, elements| PagedEnd {
                    table: Table { pages, blocks: &blocks },
                    elements,
                };
                let ends = (side(&from_pages, &from_elements), side(&to_pages, &to_elements));
                let conversion = convert(ends.0, ends.1, 0..512, 0..2, Narrowing::Allowed).expect("a conversion");
                let mut scales = chance.bytes(scale_bytes(&from_elements));
                for scale in scales.chunks_exact_mut(4) {
                    scale.copy_from_slice(&(2f32.powi(chance.below(60) as i32 - 30) * 1.1).to_ne_bytes());
                }
                let memories = [
                    all_bits(from, &mut chance),
                    scales,
                    chance.bytes(to_pages.end()),
                    chance.bytes(scale_bytes(&to_elements)),
                ];
                let found = bench.convert(&conversion, &memories).expect("converted");
                assert!(
                    found == expected(&conversion, &memories),
                    "{from} to {to}, scaled {scaled_from} and {scaled_to}"
                );
            }
        }
    }
}

#[test]
fn thousands_of_blocks_of_many_layers_go_in_one_launch_again_and_again() {
    let Some(device) = device() else { return };
    const LAYERS: u64 = 8;
    const BLOCKS: u64 = 512;
    let mut chance = Chance(11);
    let (from, to) = (
        Pages::heads_first(BLOCKS, 16, 0..2, 256).expect("pages"),
        Pages::tokens_first(BLOCKS / 4, 64, 0..2, 128).expect("pages"),
    );
    let (bf16, fp8) = (Elements::of(Datatype::Bf16), Elements::of(Datatype::Fp8E4m3));
    let (near, far) = (chance.shuffled(BLOCKS), chance.shuffled(BLOCKS / 4));
    let side = |pages, blocks, elements| PagedEnd {
        table: Table { pages, blocks },
        elements,
    };
    let ends = (side(&from, &near[..], &bf16), side(&to, &far[..], &fp8));
    let conversion = convert(ends.0, ends.1, 0..BLOCKS * 16, 0..2, Narrowing::Allowed).expect("a conversion");
    let source = DeviceMemory::allocate(&device, LAYERS * from.end()).expect("memory");
    let target = DeviceMemory::allocate(&device, LAYERS * to.end()).expect("memory");
    let bytes = chance.bytes(source.len());
    source.write(0, &bytes).expect("bytes there");
    let places: Vec<ConversionEnds> = (0..LAYERS)
        .map(|layer| ConversionEnds {
            from: source.address() + layer * from.end(),
            to: target.address() + layer * to.end(),
            ..ConversionEnds::default()
        })
        .collect();
    let all: Vec<_> = places.iter().map(|ends| (&conversion, *ends)).collect();
    let program = DeviceProgram::new(&all).expect("a program");
    assert_eq!(program.launches(), 1);
    let converter = Converter::new(&device).expect("a converter");
    let prepared = converter.prepare(&program).expect("prepared");
    let stream = Stream::new(&device).expect("a stream");
    let mut expected = vec![0; target.len() as usize];
    for (layer, to) in expected.chunks_mut(to.end() as usize).enumerate() {
        let from = &bytes[layer * from.end() as usize..][..from.end() as usize];
        conversion.apply(EndBytes {
            from,
            from_scales: &[],
            to,
            to_scales: &mut [],
        });
    }
    for round in 0..200 {
        // What was there before must not look right.
        target.write(0, &vec![round as u8 | 0x80; 4096]).expect("bytes there");
        // SAFETY: both memories, and what was prepared, live until the stream has been waited for.
        unsafe { converter.launch(&prepared, stream.handle()) }.expect("launched");
        stream.synchronize().expect("done");
        let mut first = vec![0; 4096];
        target.read(0, &mut first).expect("bytes back");
        assert!(first == expected[..4096], "round {round}");
    }
    let mut found = vec![0; target.len() as usize];
    target.read(0, &mut found).expect("bytes back");
    assert!(found == expected);
}

#[test]
fn what_is_misaligned_is_refused() {
    let Some(device) = device() else { return };
    let bench = Bench::new(&device, 1 << 20);
    let (bf16, fp8) = (Elements::of(Datatype::Bf16), Elements::of(Datatype::Fp8E4m3));
    let (from, to) = (
        Pages::heads_first(4, 16, 0..2, 256).expect("pages"),
        Pages::heads_first(4, 16, 0..2, 128).expect("pages"),
    );
    let side = |pages, elements| PagedEnd {
        table: Table { pages, blocks: &[2] },
        elements,
    };
    let conversion =
        convert(side(&from, &bf16), side(&to, &fp8), 0..16, 0..2, Narrowing::Allowed).expect("a conversion");
    let ends = ConversionEnds {
        from: bench.memory.address() + 1,
        to: bench.memory.address() + (512 << 10),
        ..ConversionEnds::default()
    };
    // SAFETY: it is refused; all would lie within the memory.
    let refused = unsafe { bench.converter.convert(&[(&conversion, ends)]) };
    let datatype = Datatype::Bf16;
    assert_eq!(
        refused,
        Err(ConvertError::Program(ProgramError::Misaligned { datatype }))
    );
}
