use proptest::prelude::*;
use weft_plan::Datatype;
use weft_plan::conversion::{
    Elements, EndBytes, Factor, Narrowing, PagedEnd, SCALE_BYTES, Scales, convert as conversion_of,
};
use weft_plan::pages::{Pages, PagesShape, PagesStrides, Table};

use super::*;

const CAST: [Datatype; 4] = [Datatype::F32, Datatype::F16, Datatype::Bf16, Datatype::Fp8E4m3];

fn noise(len: u64, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let next = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as u8
    };
    (0..len).map(next).collect()
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
    (0usize..4, 0u8..3, order, prop_oneof![Just(0u64), 1u64..40], 1u64..20).prop_map(
        |(datatype, scaled, order, gap, tokens)| End {
            datatype: CAST[datatype],
            scaled,
            order,
            gap,
            tokens,
        },
    )
}

impl End {
    fn pages(&self, shape: PagesShape) -> Pages {
        let counts = [
            shape.parts,
            shape.blocks,
            shape.tokens,
            shape.heads.end - shape.heads.start,
        ];
        let (mut strides, mut extent) = ([0; 4], shape.unit_bytes);
        for dimension in &self.order {
            strides[*dimension] = extent + self.gap;
            extent = strides[*dimension] * counts[*dimension];
        }
        let [part, block, token, head] = strides;
        let strides = PagesStrides {
            base: self.gap,
            part,
            block,
            token,
            head,
        };
        Pages::with_strides(shape, strides).unwrap()
    }

    fn describe(&self, blocks: u64, elements: u64) -> (Pages, Elements) {
        let shape = PagesShape {
            blocks,
            tokens: self.tokens,
            heads: 0..3,
            parts: 2,
            unit_bytes: elements * self.datatype.size() as u64,
        };
        let narrow = self.datatype == Datatype::Fp8E4m3;
        let factor = |value| Factor::new(value).unwrap();
        let scales = match self.scaled {
            1 if narrow => Scales::PerPart(vec![factor(0.37), factor(0.5)]),
            2 if narrow => Scales::Beside(Box::new(self.pages(PagesShape {
                unit_bytes: SCALE_BYTES,
                ..shape.clone()
            }))),
            _ => Scales::One,
        };
        let datatype = self.datatype;
        (self.pages(shape), Elements { datatype, scales })
    }
}

fn scale_bytes(elements: &Elements) -> u64 {
    match &elements.scales {
        Scales::Beside(scales) => scales.end(),
        _ => 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn every_instruction_set_does_what_the_conversion_means(
        near in any_end(), far in any_end(), elements in prop_oneof![1u64..9, Just(64), Just(72), Just(128), Just(1500)], seed: u64,
    ) {
        const TOKENS: u64 = 23;
        let tables = [&near, &far].map(|end| (0..TOKENS.div_ceil(end.tokens)).rev().collect::<Vec<u64>>());
        let (from, from_elements) = near.describe(tables[0].len() as u64, elements);
        let (to, to_elements) = far.describe(tables[1].len() as u64, elements);
        let side = |pages, blocks, elements| PagedEnd { table: Table { pages, blocks }, elements };
        let conversion = conversion_of(
            side(&from, &tables[0], &from_elements), side(&to, &tables[1], &to_elements), 1..TOKENS, 1..3, Narrowing::Allowed,
        ).unwrap();
        let (source, scales) = (noise(from.end(), seed), noise(scale_bytes(&from_elements), !seed));
        let (target, target_scales) = (noise(to.end(), seed ^ 1), noise(scale_bytes(&to_elements), seed ^ 2));
        let (mut expected, mut expected_scales) = (target.clone(), target_scales.clone());
        conversion.apply(EndBytes { from: &source, from_scales: &scales, to: &mut expected, to_scales: &mut expected_scales });
        for instructions in InstructionSet::ALL.iter().filter(|set| set.is_available()) {
            let (mut found, mut found_scales) = (target.clone(), target_scales.clone());
            let ends = HostEnds {
                from: source.as_ptr(), from_scales: scales.as_ptr(), to: found.as_mut_ptr(), to_scales: found_scales.as_mut_ptr(),
            };
            // SAFETY: all four are as long as the layouts that the conversion was computed from.
            unsafe { convert_with(*instructions, &conversion, ends) };
            prop_assert!(found == expected && found_scales == expected_scales, "{:?} by {:?}", conversion.nests(), instructions);
        }
    }
}

#[test]
fn what_is_large_goes_past_the_cache_and_arrives_all_the_same() {
    // 16 MiB of runs of 256 bytes, turned; and the same in whole blocks.
    let (near, far) = (
        Pages::heads_first(512, 16, 0..4, 256).unwrap(),
        Pages::tokens_first(512, 16, 0..4, 256).unwrap(),
    );
    let (there, back) = ((0..512).collect::<Vec<u64>>(), (0..512).rev().collect::<Vec<u64>>());
    let bf16 = Elements::of(Datatype::Bf16);
    let source = noise(near.end(), 7);
    for to in [&far, &near] {
        let side = |pages, blocks| PagedEnd {
            table: Table { pages, blocks },
            elements: &bf16,
        };
        let conversion = conversion_of(
            side(&near, &there),
            side(to, &back),
            0..512 * 16,
            0..4,
            Narrowing::Refused,
        )
        .unwrap();
        let mut expected = vec![0; to.end() as usize];
        conversion.apply(EndBytes {
            from: &source,
            from_scales: &[],
            to: &mut expected,
            to_scales: &mut [],
        });
        let (from, into) = (
            HostMemory::from_vec(source.clone()),
            HostMemory::from_vec(vec![0; to.end() as usize]),
        );
        let memories = ConversionMemories {
            from: (&from, 0),
            from_scales: (&from, 0),
            to: (&into, 0),
            to_scales: (&into, 0),
        };
        convert_memories(&conversion, memories).unwrap();
        assert!(into.snapshot() == expected);
        let short = HostMemory::from_vec(vec![0; 16]);
        for memories in [
            ConversionMemories {
                to: (&short, 0),
                ..memories
            },
            ConversionMemories {
                from: (&from, 1),
                ..memories
            },
            ConversionMemories {
                from: (&from, u64::MAX),
                ..memories
            },
        ] {
            assert_eq!(convert_memories(&conversion, memories), Err(Refusal::OutOfBounds));
        }
    }
}
