use proptest::prelude::*;

use super::*;

/// A layout of `heads` with its dimensions in any order and gaps between them.
fn any_pages(heads: Range<u64>, parts: u64, unit_bytes: u64) -> impl Strategy<Value = Pages> {
    let order = Just(vec![0usize, 1, 2, 3]).prop_shuffle();
    (1u64..12, 1u64..9, 0u64..3, prop::array::uniform4(0u64..3), order).prop_map(
        move |(blocks, tokens, base, gaps, order)| {
            let counts = [parts, blocks, tokens, heads.end - heads.start];
            let mut strides = [0; 4];
            let mut extent = unit_bytes;
            for (gap, dimension) in gaps.into_iter().zip(order) {
                strides[dimension] = extent + gap;
                extent = strides[dimension] * counts[dimension];
            }
            let [part, block, token, head] = strides;
            let shape = PagesShape {
                blocks,
                tokens,
                heads: heads.clone(),
                parts,
                unit_bytes,
            };
            let strides = PagesStrides {
                base,
                part,
                block,
                token,
                head,
            };
            Pages::with_strides(shape, strides).expect("strides that step over what lies within")
        },
    )
}

fn bytes_of(spans: &Spans) -> Vec<u64> {
    spans
        .pieces(0..spans.bytes())
        .flat_map(|s| s.offset..s.offset + s.len)
        .collect()
}

/// Every byte, by what it is: part, token, head, position.
fn naive(table: Table, tokens: &Range<u64>, heads: &Range<u64>) -> std::collections::BTreeMap<u64, [u64; 4]> {
    let (shape, strides) = (table.pages.shape(), table.pages.strides());
    let mut all = std::collections::BTreeMap::new();
    for part in 0..shape.parts {
        for token in tokens.clone() {
            for head in heads.clone() {
                let block = table.blocks[(token / shape.tokens) as usize];
                let start = strides.base
                    + part * strides.part
                    + block * strides.block
                    + token % shape.tokens * strides.token
                    + (head - shape.heads.start) * strides.head;
                for byte in 0..shape.unit_bytes {
                    assert!(all.insert(start + byte, [part, token, head, byte]).is_none());
                }
            }
        }
    }
    all
}

/// Two ends that share heads 3 to 5, with as many different blocks as their sequences need.
fn any_two() -> impl Strategy<Value = (Pages, Vec<u64>, Pages, Vec<u64>)> {
    (1u64..3, 1u64..4)
        .prop_flat_map(|(parts, unit)| (any_pages(1..5, parts, unit), any_pages(3..8, parts, unit)))
        .prop_flat_map(|(near, far)| {
            let table = |pages: &Pages| Just((0..pages.shape().blocks).collect::<Vec<u64>>()).prop_shuffle();
            (table(&near), table(&far), Just(near), Just(far))
        })
        .prop_map(|(near_blocks, far_blocks, near, far)| (near, near_blocks, far, far_blocks))
}

proptest! {
    #[test]
    fn both_ends_name_the_same_bytes_in_the_same_sequence(
        (near, near_blocks, far, far_blocks) in any_two(), from in 0.0..1.0, to in 0.0..1.0,
    ) {
        let near = Table { pages: &near, blocks: &near_blocks };
        let far = Table { pages: &far, blocks: &far_blocks };
        let room = |table: Table| table.blocks.len() as u64 * table.pages.shape().tokens;
        let most = room(near).min(room(far)) as f64;
        let (a, b) = ((from * most) as u64, (to * most) as u64);
        let (tokens, heads) = (a.min(b)..a.max(b), 3..5);
        let (here, there) = pair(near, far, tokens.clone(), heads.clone()).unwrap();
        let (named_here, named_there) = (naive(near, &tokens, &heads), naive(far, &tokens, &heads));
        let (here, there) = (bytes_of(&here), bytes_of(&there));
        prop_assert_eq!(here.len(), named_here.len());
        prop_assert_eq!(there.len(), named_there.len());
        for (a, b) in here.iter().zip(&there) {
            prop_assert_eq!(named_here[a], named_there[b]);
        }
    }

    #[test]
    fn hostile_numbers_are_an_error_and_never_a_panic(
        counts: [u64; 4], unit_bytes: u64, heads_end: u64, strides: [u64; 5], block: u64, to: u64,
    ) {
        let [blocks, tokens, parts, start] = counts;
        let shape = PagesShape { blocks, tokens, heads: start..heads_end, parts, unit_bytes };
        let [base, part, of_block, token, head] = strides;
        let _ = Pages::heads_first(blocks, tokens, start..heads_end, unit_bytes);
        let one = PagesShape { parts: 1, tokens: 1, heads: start..start.saturating_add(1), ..shape.clone() };
        for shape in [shape, one] {
            if let Ok(pages) = Pages::with_strides(shape, PagesStrides { base, part, block: of_block, token, head }) {
                let table = Table { pages: &pages, blocks: &[block] };
                let few = to.min(1);
                let _ = pair(table, table, 0..to, start..start);
                let _ = pair(table, table, 0..few, start..start.saturating_add(1));
            }
        }
    }
}

#[test]
fn ends_that_page_alike_move_whole_blocks() {
    let pages = Pages::heads_first(100, 16, 0..4, 128).unwrap();
    let near = Table {
        pages: &pages,
        blocks: &[4, 5, 6],
    };
    let far = Table {
        pages: &pages,
        blocks: &[50, 51, 52],
    };
    let (here, there) = pair(near, far, 0..48, 0..4).unwrap();
    // One piece of K and one of V.
    assert_eq!((here.count(), there.count()), (2, 2));
}

#[test]
fn half_of_the_heads_is_one_piece_a_block_where_heads_come_first() {
    let whole = Pages::heads_first(100, 16, 0..4, 128).unwrap();
    let half = Pages::heads_first(100, 16, 2..4, 128).unwrap();
    let near = Table {
        pages: &whole,
        blocks: &[1, 5],
    };
    let far = Table {
        pages: &half,
        blocks: &[2, 9],
    };
    let (here, _) = pair(near, far, 0..32, 2..4).unwrap();
    assert_eq!((here.count(), here.runs().len()), (4, 2));
}

#[test]
fn mistakes_are_named() {
    let pages = Pages::tokens_first(10, 4, 0..2, 8).unwrap();
    let table = Table {
        pages: &pages,
        blocks: &[3, 10],
    };
    assert_eq!(
        pair(table, table, 0..8, 0..2).unwrap_err(),
        PagesError::NoSuchBlock { block: 10, blocks: 10 }
    );
    assert_eq!(
        pair(table, table, 0..9, 0..2).unwrap_err(),
        PagesError::NoSuchTokens { asked: 9, held: 8 }
    );
    assert_eq!(
        pair(table, table, 0..4, 1..3).unwrap_err(),
        PagesError::NoSuchHeads {
            asked: 1..3,
            held: 0..2
        }
    );
    let wider = Pages::tokens_first(10, 4, 0..2, 16).unwrap();
    let far = Table {
        pages: &wider,
        blocks: &[3],
    };
    assert!(matches!(
        pair(table, far, 0..4, 0..2),
        Err(PagesError::OtherUnits { near: 8, far: 16, .. })
    ));
    assert_eq!(
        Pages::tokens_first(0, 4, 0..2, 8),
        Err(PagesError::Empty { dimension: "block" })
    );
}
