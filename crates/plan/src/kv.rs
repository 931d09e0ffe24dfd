//! Where the blocks of a paged KV cache lie in the region that holds it.
//!
//! Engines store the same cache in different orders: `[layers][K/V][blocks]`, a pair of K and V in each block, or all layers
//! of a block together. A [`KvLayout`] is the shape and one stride for each dimension, so that two ends with different orders
//! still name the same bytes in the same sequence.
//!
//! ```
//! use weft_plan::{KvLayout, KvOrder, KvShape};
//! let shape = KvShape { layers: 2, parts: 2, blocks: 100, block_bytes: 4096 };
//! let layers_outermost = KvLayout::layers_outermost(shape)?;
//! let blocks_outermost = KvLayout::blocks_outermost(shape)?;
//!
//! // Blocks 7 and 8 touch in each of the four planes of the first, and all planes of a block touch in the second.
//! let near = layers_outermost.spans([7, 8])?;
//! assert_eq!((near.bytes(), near.count(), near.runs().len()), (8 * 4096, 4, 1));
//! let far = blocks_outermost.spans([3, 50])?;
//! assert_eq!((far.bytes(), far.count()), (8 * 4096, 8));
//! // Two ends of the second kind do better by naming whole blocks.
//! assert_eq!(blocks_outermost.spans_in(KvOrder::BlockLayerPart, [3, 50])?.count(), 2);
//!
//! assert!(layers_outermost.spans([100]).is_err());
//! # Ok::<(), weft_plan::kv::KvError>(())
//! ```

use thiserror::Error;

use crate::spans::{Span, Spans};
use crate::strides::{Misfit, extent};

/// How many of what a cache has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    pub layers: u32,
    /// Two where K and V are apart, one where they are not (as in latent attention).
    pub parts: u32,
    pub blocks: u64,
    /// One part of one layer of one block: tokens × heads × head size × element size.
    pub block_bytes: u64,
}

/// How many bytes lie between the starts of neighbours in each dimension, and before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvStrides {
    pub base: u64,
    pub layer: u64,
    pub part: u64,
    pub block: u64,
}

/// In which sequence a span list names the bytes. Both ends of a transfer must use the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvOrder {
    /// All blocks of the first layer's K, then of its V, then of the next layer.
    #[default]
    LayerPartBlock,
    /// K and V of each block of the first layer, then of the next layer.
    LayerBlockPart,
    /// All layers of the first block, then of the next block.
    BlockLayerPart,
}

/// A shape and its strides, checked: no two blocks overlap and none ends past 2^64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    shape: KvShape,
    strides: KvStrides,
    end: u64,
}

/// A layout or a block that cannot be: fix the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KvError {
    #[error("the cache has no {dimension}")]
    Empty { dimension: &'static str },
    #[error("the cache ends past 2^64 bytes")]
    TooLarge,
    #[error("a stride of {stride} bytes makes one {dimension} overlap the next, which takes {extent} bytes")]
    Overlap {
        dimension: &'static str,
        stride: u64,
        extent: u64,
    },
    #[error("block {block} of a cache of {blocks} blocks")]
    NoSuchBlock { block: u64, blocks: u64 },
    #[error("the blocks asked for hold more than 2^64 bytes")]
    TooManyBytes,
}

impl From<Misfit> for KvError {
    fn from(misfit: Misfit) -> KvError {
        match misfit {
            Misfit::Overlap {
                dimension,
                stride,
                extent,
            } => KvError::Overlap {
                dimension,
                stride,
                extent,
            },
            Misfit::TooLarge => KvError::TooLarge,
        }
    }
}

impl KvLayout {
    /// `[layers][parts][blocks]`, dense.
    pub fn layers_outermost(shape: KvShape) -> Result<KvLayout, KvError> {
        let block = shape.block_bytes;
        let part = times(block, shape.blocks)?;
        let layer = times(part, shape.parts.into())?;
        KvLayout::with_strides(
            shape,
            KvStrides {
                base: 0,
                layer,
                part,
                block,
            },
        )
    }

    /// `[layers][blocks][parts]`, dense: the K and V of a block touch.
    pub fn parts_innermost(shape: KvShape) -> Result<KvLayout, KvError> {
        let part = shape.block_bytes;
        let block = times(part, shape.parts.into())?;
        let layer = times(block, shape.blocks)?;
        KvLayout::with_strides(
            shape,
            KvStrides {
                base: 0,
                layer,
                part,
                block,
            },
        )
    }

    /// `[blocks][layers][parts]`, dense: all of a block is one piece.
    pub fn blocks_outermost(shape: KvShape) -> Result<KvLayout, KvError> {
        let part = shape.block_bytes;
        let layer = times(part, shape.parts.into())?;
        let block = times(layer, shape.layers.into())?;
        KvLayout::with_strides(
            shape,
            KvStrides {
                base: 0,
                layer,
                part,
                block,
            },
        )
    }

    /// Any order, with gaps where there are some.
    pub fn with_strides(shape: KvShape, strides: KvStrides) -> Result<KvLayout, KvError> {
        let dimensions = [
            ("layer", strides.layer, u64::from(shape.layers)),
            ("part", strides.part, u64::from(shape.parts)),
            ("block", strides.block, shape.blocks),
        ];
        for (dimension, count) in [
            ("layer", u64::from(shape.layers)),
            ("part", shape.parts.into()),
            ("block", shape.blocks),
            ("byte in a block", shape.block_bytes),
        ] {
            if count == 0 {
                return Err(KvError::Empty { dimension });
            }
        }
        let extent = extent(shape.block_bytes, dimensions)?;
        let end = strides.base.checked_add(extent).ok_or(KvError::TooLarge)?;
        Ok(KvLayout { shape, strides, end })
    }

    pub fn shape(&self) -> KvShape {
        self.shape
    }
    pub fn strides(&self) -> KvStrides {
        self.strides
    }
    /// How long a region must be to hold the cache.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The bytes of `blocks` in all layers, in the default order.
    pub fn spans<B>(&self, blocks: B) -> Result<Spans, KvError>
    where
        B: IntoIterator<Item = u64, IntoIter: Clone>,
    {
        self.spans_in(KvOrder::default(), blocks)
    }

    /// The bytes of `blocks` in all layers, in the sequence that both ends agreed on.
    pub fn spans_in<B>(&self, order: KvOrder, blocks: B) -> Result<Spans, KvError>
    where
        B: IntoIterator<Item = u64, IntoIter: Clone>,
    {
        let blocks = blocks.into_iter();
        let mut bytes = 0u64;
        let per_block = self.bytes_per_block();
        for block in blocks.clone() {
            if block >= self.shape.blocks {
                return Err(KvError::NoSuchBlock {
                    block,
                    blocks: self.shape.blocks,
                });
            }
            bytes = bytes.checked_add(per_block).ok_or(KvError::TooManyBytes)?;
        }

        let mut spans = Spans::new();
        let (layers, parts) = (0..self.shape.layers, 0..self.shape.parts);
        match order {
            KvOrder::LayerPartBlock => {
                for layer in layers {
                    for part in parts.clone() {
                        blocks
                            .clone()
                            .for_each(|block| spans.push(self.piece(layer, part, block)));
                    }
                }
            }
            KvOrder::LayerBlockPart => {
                for layer in layers {
                    for block in blocks.clone() {
                        parts
                            .clone()
                            .for_each(|part| spans.push(self.piece(layer, part, block)));
                    }
                }
            }
            KvOrder::BlockLayerPart => {
                for block in blocks {
                    for layer in layers.clone() {
                        parts
                            .clone()
                            .for_each(|part| spans.push(self.piece(layer, part, block)));
                    }
                }
            }
        }
        Ok(spans)
    }

    /// All layers and parts of one block.
    pub fn bytes_per_block(&self) -> u64 {
        // The whole cache fits into 64 bits, hence so does a block.
        self.shape.block_bytes * u64::from(self.shape.layers) * u64::from(self.shape.parts)
    }

    fn piece(&self, layer: u32, part: u32, block: u64) -> Span {
        // Each index is below its count, so that no sum passes `end`, which was checked.
        let KvStrides {
            base,
            layer: layer_stride,
            part: part_stride,
            block: block_stride,
        } = self.strides;
        Span {
            offset: base + u64::from(layer) * layer_stride + u64::from(part) * part_stride + block * block_stride,
            len: self.shape.block_bytes,
        }
    }
}

fn times(a: u64, b: u64) -> Result<u64, KvError> {
    a.checked_mul(b).ok_or(KvError::TooLarge)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const ORDERS: [KvOrder; 3] = [
        KvOrder::LayerPartBlock,
        KvOrder::LayerBlockPart,
        KvOrder::BlockLayerPart,
    ];

    fn any_layout() -> impl Strategy<Value = KvLayout> {
        let dimensions = (1u32..5, 1u32..3, 1u64..9, 1u64..5);
        (dimensions, 0u64..3, prop::array::uniform3(0u64..3), 0usize..6).prop_map(
            |((layers, parts, blocks, block_bytes), base, gaps, order)| {
                let shape = KvShape {
                    layers,
                    parts,
                    blocks,
                    block_bytes,
                };
                let counts = [u64::from(layers), u64::from(parts), blocks];
                let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
                let mut strides = [0; 3];
                let mut extent = block_bytes;
                for (gap, dimension) in gaps.into_iter().zip(orders[order]) {
                    strides[dimension] = extent + gap;
                    extent = strides[dimension] * counts[dimension];
                }
                let [layer, part, block] = strides;
                KvLayout::with_strides(
                    shape,
                    KvStrides {
                        base,
                        layer,
                        part,
                        block,
                    },
                )
                .expect("strides that step over what lies within")
            },
        )
    }

    fn bytes_of(spans: &Spans) -> Vec<u64> {
        spans
            .pieces(0..spans.bytes())
            .flat_map(|s| s.offset..s.offset + s.len)
            .collect()
    }

    proptest! {
        #[test]
        fn spans_are_the_bytes_of_the_naive_list(layout in any_layout(), picks in prop::collection::vec(any::<u64>(), 0..20)) {
            let (shape, strides) = (layout.shape(), layout.strides());
            let blocks: Vec<u64> = picks.into_iter().map(|p| p % shape.blocks).collect();
            let piece = |layer: u32, part: u32, block: u64| {
                let start =
                    strides.base + u64::from(layer) * strides.layer + u64::from(part) * strides.part + block * strides.block;
                start..start + shape.block_bytes
            };
            let mut pieces = Vec::new();
            for (nth, &block) in blocks.iter().enumerate() {
                for layer in 0..shape.layers {
                    (0..shape.parts).for_each(|part| pieces.push((nth, layer, part, piece(layer, part, block))));
                }
            }
            for order in ORDERS {
                pieces.sort_by_key(|&(nth, layer, part, _)| match order {
                    KvOrder::LayerPartBlock => (layer as usize, part as usize, nth),
                    KvOrder::LayerBlockPart => (layer as usize, nth, part as usize),
                    KvOrder::BlockLayerPart => (nth, layer as usize, part as usize),
                });
                let naive: Vec<u64> = pieces.iter().flat_map(|(.., bytes)| bytes.clone()).collect();
                prop_assert_eq!(bytes_of(&layout.spans_in(order, blocks.iter().copied()).unwrap()), naive);
            }
        }

        #[test]
        fn no_byte_belongs_to_two_blocks_and_none_lies_past_the_end(layout in any_layout()) {
            let all = bytes_of(&layout.spans(0..layout.shape().blocks).unwrap());
            let last = all.iter().copied().max().unwrap();
            prop_assert_eq!(last + 1, layout.end());
            let len = all.len();
            prop_assert_eq!(all.into_iter().collect::<HashSet<_>>().len(), len);
        }

        #[test]
        fn hostile_numbers_are_an_error_and_never_a_panic(
            layers: u32, parts: u32, blocks: u64, block_bytes: u64, strides: [u64; 4], pick: u64,
        ) {
            let shape = KvShape { layers, parts, blocks, block_bytes };
            let [base, layer, part, block] = strides;
            let _ = KvLayout::layers_outermost(shape);
            let _ = KvLayout::blocks_outermost(shape);
            let _ = KvLayout::parts_innermost(shape);
            let one = KvShape { layers: 1, parts: 1, ..shape };
            if let Ok(layout) = KvLayout::with_strides(one, KvStrides { base, layer, part, block }) {
                let _ = layout.spans([pick]);
            }
        }
    }

    const SHAPE: KvShape = KvShape {
        layers: 4,
        parts: 2,
        blocks: 10,
        block_bytes: 16,
    };

    #[test]
    fn mistakes_are_named() {
        let layout = KvLayout::layers_outermost(SHAPE).unwrap();
        assert_eq!(
            layout.spans([3, 10]),
            Err(KvError::NoSuchBlock { block: 10, blocks: 10 })
        );
        let none = KvShape { parts: 0, ..SHAPE };
        assert_eq!(
            KvLayout::blocks_outermost(none),
            Err(KvError::Empty { dimension: "part" })
        );
        let huge = KvShape {
            blocks: u64::MAX,
            ..SHAPE
        };
        assert_eq!(KvLayout::layers_outermost(huge), Err(KvError::TooLarge));
        let strides = KvStrides {
            block: 15,
            ..layout.strides()
        };
        assert_eq!(
            KvLayout::with_strides(SHAPE, strides),
            Err(KvError::Overlap {
                dimension: "block",
                stride: 15,
                extent: 16
            })
        );
    }
}
