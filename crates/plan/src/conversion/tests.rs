use proptest::prelude::*;
use std::collections::BTreeMap;

use crate::datatype::{E4m3, Element, bf16, f16};
use crate::pages::{PagesShape, PagesStrides};

use super::*;

/// What any pages of these counts look like: dimensions in any order, with gaps.
#[derive(Clone, Debug)]
struct Shuffled {
    order: Vec<usize>,
    gaps: [u64; 4],
    base: u64,
}

fn any_order() -> impl Strategy<Value = Shuffled> {
    let order = Just(vec![0usize, 1, 2, 3]).prop_shuffle();
    let gaps = prop_oneof![Just([0; 4]), prop::array::uniform4(0u64..3)];
    (order, gaps, 0u64..5).prop_map(|(order, gaps, base)| Shuffled { order, gaps, base })
}

impl Shuffled {
    fn pages(&self, shape: PagesShape) -> Pages {
        let heads = shape.heads.end - shape.heads.start;
        let counts = [shape.parts, shape.blocks, shape.tokens, heads];
        let (mut strides, mut extent) = ([0; 4], shape.unit_bytes);
        for (gap, dimension) in self.gaps.into_iter().zip(&self.order) {
            strides[*dimension] = extent + gap;
            extent = strides[*dimension] * counts[*dimension];
        }
        let [part, block, token, head] = strides;
        let strides = PagesStrides {
            base: self.base,
            part,
            block,
            token,
            head,
        };
        Pages::with_strides(shape, strides).expect("strides that step over what lies within")
    }
}

#[derive(Clone, Debug)]
struct End {
    pages: Pages,
    elements: Elements,
    blocks: Vec<u64>,
}

impl End {
    fn side(&self) -> PagedEnd<'_> {
        let (pages, blocks) = (&self.pages, &self.blocks[..]);
        PagedEnd {
            table: Table { pages, blocks },
            elements: &self.elements,
        }
    }
    fn place(&self, pages: &Pages, part: u64, token: u64, head: u64) -> usize {
        let (shape, strides) = (pages.shape(), pages.strides());
        let at = strides.base
            + part * strides.part
            + self.blocks[(token / shape.tokens) as usize] * strides.block
            + token % shape.tokens * strides.token
            + (head - shape.heads.start) * strides.head;
        at as usize
    }
    fn scale_bytes(&self) -> usize {
        match &self.elements.scales {
            Scales::Beside(scales) => scales.end() as usize,
            _ => 0,
        }
    }
}

const CAST: [Datatype; 4] = [Datatype::F32, Datatype::F16, Datatype::Bf16, Datatype::Fp8E4m3];

fn any_end(parts: u64, heads: Range<u64>, elements: u64) -> impl Strategy<Value = End> {
    let of = (0usize..4, 0u8..3, any_order(), any_order());
    (of, 1u64..9, 1u64..9, prop::collection::vec(-20i32..20, 2)).prop_flat_map(
        move |((datatype, scaled, order, scale_order), blocks, tokens, exponents)| {
            let datatype = CAST[datatype];
            let shape = PagesShape {
                blocks,
                tokens,
                heads: heads.clone(),
                parts,
                unit_bytes: elements * datatype.size() as u64,
            };
            let of_part = |part: u64| Factor::new(1.5 * 2f32.powi(exponents[part as usize])).unwrap();
            let scales = match scaled {
                1 if datatype == Datatype::Fp8E4m3 => Scales::PerPart((0..parts).map(of_part).collect()),
                2 if datatype == Datatype::Fp8E4m3 => {
                    let unit_bytes = SCALE_BYTES;
                    Scales::Beside(Box::new(scale_order.pages(PagesShape {
                        unit_bytes,
                        ..shape.clone()
                    })))
                }
                _ => Scales::One,
            };
            let (pages, elements) = (order.pages(shape), Elements { datatype, scales });
            Just((0..blocks).collect::<Vec<u64>>())
                .prop_shuffle()
                .prop_map(move |table| End {
                    pages: pages.clone(),
                    elements: elements.clone(),
                    blocks: table,
                })
        },
    )
}

/// Two ends that share heads 3 to 5.
fn any_two() -> impl Strategy<Value = (End, End)> {
    (1u64..3, prop_oneof![1u64..7, Just(16), Just(64)])
        .prop_flat_map(|(parts, elements)| (any_end(parts, 1..5, elements), any_end(parts, 3..8, elements)))
}

fn number(datatype: Datatype, bytes: &[u8]) -> f32 {
    match datatype {
        Datatype::F32 => f32::read(bytes),
        Datatype::F16 => f16::read(bytes).to_f32(),
        Datatype::Bf16 => bf16::read(bytes).to_f32(),
        _ => E4m3::read(bytes).to_f32(),
    }
}

fn written(datatype: Datatype, number: f32) -> Vec<u8> {
    let mut bytes = vec![0; datatype.size()];
    match datatype {
        Datatype::F32 if number.is_nan() => f32::from_bits(0x7fc0_0000).write(&mut bytes),
        Datatype::F32 => number.write(&mut bytes),
        Datatype::F16 if number.is_nan() => f16::from_bits(0x7e00).write(&mut bytes),
        Datatype::F16 => f16::from_f32(number).write(&mut bytes),
        Datatype::Bf16 if number.is_nan() => bf16::from_bits(0x7fc0).write(&mut bytes),
        Datatype::Bf16 => bf16::from_f32(number).write(&mut bytes),
        _ => E4m3::from_f32(number).write(&mut bytes),
    }
    bytes
}

/// Byte by place, of what is written to the elements and to the scales.
type Written = (BTreeMap<usize, u8>, BTreeMap<usize, u8>);

/// One element after the other, by nothing but where each is.
fn naive(from: &End, to: &End, source: &[u8], source_scales: &[u8], tokens: Range<u64>, heads: Range<u64>) -> Written {
    let (mut out, mut out_scales) = (BTreeMap::new(), BTreeMap::new());
    let (old, new) = (&from.elements, &to.elements);
    let count = old.of_unit(&from.pages).unwrap() as usize;
    let same = old.datatype == new.datatype
        && (old.scales == new.scales || matches!((&old.scales, &new.scales), (Scales::Beside(_), Scales::Beside(_))));
    let put = |map: &mut BTreeMap<usize, u8>, at: usize, bytes: &[u8]| {
        for (nth, byte) in bytes.iter().enumerate() {
            assert!(map.insert(at + nth, *byte).is_none(), "a byte that is written twice");
        }
    };
    for part in 0..from.pages.shape().parts {
        for token in tokens.clone() {
            for head in heads.clone() {
                let (read, write) = (
                    from.place(&from.pages, part, token, head),
                    to.place(&to.pages, part, token, head),
                );
                let scale_of = |end: &End| match &end.elements.scales {
                    Scales::Beside(scales) => Some(end.place(scales, part, token, head)),
                    _ => None,
                };
                let (size, new_size) = (old.datatype.size(), new.datatype.size());
                let unit = &source[read..read + count * size];
                if same {
                    put(&mut out, write, unit);
                    if let (Some(a), Some(b)) = (scale_of(from), scale_of(to)) {
                        put(&mut out_scales, b, &source_scales[a..a + 4]);
                    }
                    continue;
                }
                let factor = match &old.scales {
                    Scales::One => 1.0,
                    Scales::PerPart(factors) => factors[part as usize].value(),
                    Scales::Beside(_) => f32::read(&source_scales[scale_of(from).unwrap()..]),
                };
                let numbers: Vec<f32> = unit
                    .chunks(size)
                    .map(|bytes| number(old.datatype, bytes) * factor)
                    .collect();
                let inverse = match &new.scales {
                    Scales::One => 1.0,
                    Scales::PerPart(factors) => 1.0 / factors[part as usize].value(),
                    Scales::Beside(_) => {
                        let greatest = numbers.iter().fold(0f32, |most, x| most.max(x.abs()));
                        let scale = match numbers.iter().all(|x| x.is_finite()) {
                            true => (greatest * (1.0 / 448.0 * (1.0 - 2.0 * f32::EPSILON))).max(f32::MIN_POSITIVE),
                            false => f32::NAN,
                        };
                        put(&mut out_scales, scale_of(to).unwrap(), &scale.to_ne_bytes());
                        1.0 / scale
                    }
                };
                for (nth, number) in numbers.iter().enumerate() {
                    put(
                        &mut out,
                        write + nth * new_size,
                        &written(new.datatype, number * inverse),
                    );
                }
            }
        }
    }
    (out, out_scales)
}

/// Bytes of middling numbers and of any bits at all.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    (0..len).map(|_| next() as u8).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]
    #[test]
    fn what_is_converted_is_what_one_element_after_the_other_gives(
        (from, to) in any_two(), begin in 0.0..1.0, end in 0.0..1.0, seed: u64,
    ) {
        let room = |end: &End| end.blocks.len() as u64 * end.pages.shape().tokens;
        let most = room(&from).min(room(&to)) as f64;
        let (a, b) = ((begin * most) as u64, (end * most) as u64);
        let (tokens, heads) = (a.min(b)..a.max(b), 3..5);
        let conversion = convert(from.side(), to.side(), tokens.clone(), heads.clone(), Narrowing::Allowed).unwrap();
        let exact = from.elements.fit_into(&to.elements);
        prop_assert_eq!(convert(from.side(), to.side(), tokens.clone(), heads.clone(), Narrowing::Refused).is_ok(), exact);

        let (source, scales) = (noise(from.pages.end() as usize, seed), noise(from.scale_bytes(), !seed));
        let (target, target_scales) = (noise(to.pages.end() as usize, seed ^ 1), noise(to.scale_bytes(), seed ^ 2));
        let (expected, expected_scales) = naive(&from, &to, &source, &scales, tokens.clone(), heads.clone());
        let (mut into, mut into_scales) = (target.clone(), target_scales.clone());
        let ends = EndBytes { from: &source, from_scales: &scales, to: &mut into, to_scales: &mut into_scales };
        conversion.apply(ends);
        for (found, before, expected) in [(&into, &target, &expected), (&into_scales, &target_scales, &expected_scales)] {
            for (at, byte) in found.iter().enumerate() {
                prop_assert_eq!(*byte, expected.get(&at).copied().unwrap_or(before[at]), "at {}", at);
            }
        }
        prop_assert_eq!(conversion.bytes_written(), expected.len() as u64);
        let [reads, read_scales, writes, write_scales] = conversion.ends();
        prop_assert!(reads <= source.len() as u64 && read_scales <= scales.len() as u64);
        prop_assert_eq!(writes, expected.keys().max().map_or(0, |at| *at as u64 + 1));
        prop_assert_eq!(write_scales, expected_scales.keys().max().map_or(0, |at| *at as u64 + 1));
    }

    #[test]
    fn nothing_is_lost_where_elements_fit(code: u8, bits: u16) {
        for (from, to) in [(Datatype::Fp8E4m3, Datatype::F16), (Datatype::Fp8E4m3, Datatype::Bf16), (Datatype::Bf16, Datatype::F32),
            (Datatype::F16, Datatype::F32), (Datatype::Fp8E4m3, Datatype::F32)] {
            prop_assert!(Elements::of(from).fit_into(&Elements::of(to)) && !Elements::of(to).fit_into(&Elements::of(from)));
            let bytes = match from.size() { 1 => vec![code], _ => bits.to_ne_bytes().to_vec() };
            let one = number(from, &bytes);
            let there = written(to, one);
            prop_assert!(one.is_nan() || written(from, number(to, &there)) == bytes);
        }
    }
}

fn one_block(pages: &Pages) -> Table<'_> {
    Table { pages, blocks: &[0] }
}

#[test]
fn a_program_is_as_short_as_it_can_be() {
    let bytes = Elements::of(Datatype::Bf16);
    let pages = Pages::heads_first(100, 16, 0..4, 128).unwrap();
    let near: Vec<u64> = (0..50).collect();
    let far: Vec<u64> = (50..100).rev().collect();
    let side = |pages, blocks| PagedEnd {
        table: Table { pages, blocks },
        elements: &bytes,
    };
    // EndBytes that are alike move whole blocks: a loop over K and V, one run for each.
    let alike = convert(
        side(&pages, &near),
        side(&pages, &far),
        0..800,
        0..4,
        Narrowing::Refused,
    )
    .unwrap();
    assert_eq!((alike.nests().len(), alike.stretches().len()), (1, 50));
    assert_eq!((alike.nests()[0].run, alike.nests()[0].runs()), (16 * 4 * 128, 2));
    assert!(alike.is_move());
    // Tokens before heads, and blocks of 64: a run for each token of each head, and a nest for the last, shorter stretch.
    let other = Pages::tokens_first(100, 64, 0..4, 128).unwrap();
    let turned = convert(
        side(&pages, &near),
        side(&other, &far),
        0..790,
        0..4,
        Narrowing::Refused,
    )
    .unwrap();
    assert_eq!((turned.nests().len(), turned.stretches().len()), (2, 50));
    assert_eq!((turned.nests()[0].run, turned.nests()[0].runs()), (128, 2 * 16 * 4));
    assert_eq!(turned.nests()[1].runs(), 2 * 6 * 4);
    let mut both = alike.clone();
    both.append(&turned);
    both.append(&alike);
    assert_eq!((both.nests().len(), both.stretches().len()), (3, 150));
}

#[test]
fn packed_parts_are_taken_apart() {
    let packed = Pages::with_strides(
        PagesShape {
            blocks: 4,
            tokens: 2,
            heads: 0..3,
            parts: 1,
            unit_bytes: 16,
        },
        PagesStrides {
            base: 0,
            part: 0,
            block: 96,
            token: 16,
            head: 32,
        },
    )
    .unwrap();
    let apart = packed.apart(2).unwrap();
    assert_eq!(
        (apart.shape().parts, apart.shape().unit_bytes, apart.end()),
        (2, 8, packed.end())
    );
    assert_eq!(packed.apart(3), None);
    assert_eq!(apart.apart(2), None);
    let plain = Pages::tokens_first(4, 2, 0..3, 8).unwrap();
    let bytes = Elements::of(Datatype::Bf16);
    let side = |pages| PagedEnd {
        table: one_block(pages),
        elements: &bytes,
    };
    assert_eq!(
        convert(side(&packed), side(&plain), 0..2, 0..3, Narrowing::Refused),
        Err(ConversionError::OtherParts { from: 1, to: 2 })
    );
    let conversion = convert(side(&apart), side(&plain), 0..2, 0..3, Narrowing::Refused).unwrap();
    let source: Vec<u8> = (0..packed.end()).map(|byte| byte as u8).collect();
    let mut target = vec![0; plain.end() as usize];
    conversion.apply(EndBytes {
        from: &source,
        from_scales: &[],
        to: &mut target,
        to_scales: &mut [],
    });
    // V of token 1 of head 2: the second half of the unit there, the second part here.
    let there = &source[2 * 32 + 16 + 8..][..8];
    assert_eq!(&target[(4 * 2 * 3 + 3 + 2) * 8..][..8], there);
}

#[test]
fn what_cannot_be_is_refused_and_named() {
    let pages = Pages::heads_first(4, 16, 0..2, 128).unwrap();
    let wide = Pages::heads_first(4, 16, 0..2, 256).unwrap();
    let try_with = |a: (&Pages, &Elements), b: (&Pages, &Elements)| {
        let side = |(pages, elements)| PagedEnd {
            table: one_block(pages),
            elements,
        };
        convert(side(a), side(b), 0..16, 0..2, Narrowing::Allowed).map(drop)
    };
    let of = Elements::of;
    let (bf16, fp8, i8s) = (of(Datatype::Bf16), of(Datatype::Fp8E4m3), of(Datatype::I8));
    assert_eq!(
        try_with((&pages, &bf16), (&pages, &fp8)),
        Err(ConversionError::OtherElements { from: 64, to: 128 })
    );
    assert_eq!(
        try_with((&wide, &bf16), (&pages, &i8s)),
        Err(ConversionError::NoCast {
            from: Datatype::Bf16,
            to: Datatype::I8
        })
    );
    // What is not cast may be anything.
    assert_eq!(try_with((&pages, &i8s), (&pages, &i8s)), Ok(()));
    let odd = Pages::heads_first(4, 16, 0..2, 127).unwrap();
    assert!(matches!(
        try_with((&odd, &bf16), (&odd, &bf16)),
        Err(ConversionError::PartOfElement { unit_bytes: 127, .. })
    ));
    let scaled = |datatype, scales| Elements { datatype, scales };
    let one = Factor::new(1.0).unwrap();
    assert!(matches!(
        try_with(
            (&pages, &scaled(Datatype::Bf16, Scales::PerPart(vec![one, one]))),
            (&pages, &bf16)
        ),
        Err(ConversionError::ScaledWide { .. })
    ));
    assert_eq!(
        try_with(
            (&wide, &bf16),
            (&pages, &scaled(Datatype::Fp8E4m3, Scales::PerPart(vec![one])))
        ),
        Err(ConversionError::FactorsOfParts { factors: 1, parts: 2 })
    );
    assert_eq!(
        try_with(
            (&wide, &bf16),
            (
                &pages,
                &scaled(Datatype::Fp8E4m3, Scales::Beside(Box::new(pages.clone())))
            )
        ),
        Err(ConversionError::OtherScales)
    );
    assert!(matches!(
        try_with((&wide, &bf16), (&Pages::heads_first(4, 16, 5..7, 128).unwrap(), &fp8)),
        Err(ConversionError::Pages(PagesError::NoSuchHeads { .. }))
    ));
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-38] {
        assert_eq!(Factor::new(bad), None);
    }
}
