//! The bytes of tokens in a paged cache, named in one sequence by two ends that page them differently.
//!
//! Two engines may cut the same sequence into blocks of different sizes, put heads before tokens or tokens before heads, and hold different
//! heads, as tensor parallelism of different degrees makes them do. [`Pages`] describes one layer of one end completely, so that either end
//! can compute what the other holds where; [`pair`] names the tokens and heads that both have as two span lists of the same bytes, which
//! one transfer moves.
//!
//! ```
//! use weft_plan::pages::{Pages, Table, pair};
//! // Blocks of 16 tokens, heads before tokens; and blocks of 64, tokens before heads. A token of a head has 128 bytes.
//! let prefill = Pages::heads_first(100, 16, 0..2, 128)?;
//! let decode = Pages::tokens_first(100, 64, 0..4, 128)?;
//! let (from, to) = (Table { pages: &prefill, blocks: &[7, 3, 9] }, Table { pages: &decode, blocks: &[5] });
//! let (there, here) = pair(from, to, 0..40, 0..2)?;
//! assert_eq!((there.bytes(), here.bytes()), (2 * 2 * 40 * 128, 2 * 2 * 40 * 128));
//! # Ok::<(), weft_plan::pages::PagesError>(())
//! ```

use std::ops::Range;

use thiserror::Error;

use crate::spans::{Span, Spans};
use crate::strides::{Misfit, extent};

/// One layer of a paged cache, as one end holds it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pages {
    shape: PagesShape,
    strides: PagesStrides,
    end: u64,
}

/// How many of what a layer has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PagesShape {
    pub blocks: u64,
    /// Of a block.
    pub tokens: u64,
    /// Which of the model's heads this end holds.
    pub heads: Range<u64>,
    /// Two where K and V are apart, one where they are not (as in latent attention).
    pub parts: u64,
    /// One token of one head of one part: head size × element size.
    pub unit_bytes: u64,
}

/// How many bytes lie between the starts of neighbours in each dimension, and before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PagesStrides {
    pub base: u64,
    pub part: u64,
    pub block: u64,
    pub token: u64,
    pub head: u64,
}

/// Where the tokens of one sequence are: token *t* is in the block `blocks[t / tokens]`.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    pub pages: &'a Pages,
    pub blocks: &'a [u64],
}

/// A layout that cannot be, or two that do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PagesError {
    #[error("the layer has no {dimension}")]
    Empty { dimension: &'static str },
    #[error("the layer ends past 2^64 bytes")]
    TooLarge,
    #[error("a stride of {stride} bytes makes one {dimension} overlap the next, which takes {extent} bytes")]
    Overlap {
        dimension: &'static str,
        stride: u64,
        extent: u64,
    },
    #[error(
        "one end has {near} bytes for a token of a head and {near_parts} parts, the other {far} bytes and {far_parts} parts"
    )]
    OtherUnits {
        near: u64,
        near_parts: u64,
        far: u64,
        far_parts: u64,
    },
    #[error("heads {asked:?} of an end that holds heads {held:?}")]
    NoSuchHeads { asked: Range<u64>, held: Range<u64> },
    #[error("tokens up to {asked} of a sequence with blocks for {held}")]
    NoSuchTokens { asked: u64, held: u64 },
    #[error("block {block} of a layer of {blocks} blocks")]
    NoSuchBlock { block: u64, blocks: u64 },
}

impl From<Misfit> for PagesError {
    fn from(misfit: Misfit) -> PagesError {
        match misfit {
            Misfit::Overlap {
                dimension,
                stride,
                extent,
            } => PagesError::Overlap {
                dimension,
                stride,
                extent,
            },
            Misfit::TooLarge => PagesError::TooLarge,
        }
    }
}

impl Pages {
    /// `[parts][blocks][heads][tokens]`, dense.
    pub fn heads_first(blocks: u64, tokens: u64, heads: Range<u64>, unit_bytes: u64) -> Result<Pages, PagesError> {
        let token = unit_bytes;
        let head = times(token, tokens)?;
        let block = times(head, heads.end.saturating_sub(heads.start))?;
        let strides = PagesStrides {
            base: 0,
            part: times(block, blocks)?,
            block,
            token,
            head,
        };
        Pages::with_strides(PagesShape::of(blocks, tokens, heads, unit_bytes), strides)
    }

    /// `[parts][blocks][tokens][heads]`, dense.
    pub fn tokens_first(blocks: u64, tokens: u64, heads: Range<u64>, unit_bytes: u64) -> Result<Pages, PagesError> {
        let head = unit_bytes;
        let token = times(head, heads.end.saturating_sub(heads.start))?;
        let block = times(token, tokens)?;
        let strides = PagesStrides {
            base: 0,
            part: times(block, blocks)?,
            block,
            token,
            head,
        };
        Pages::with_strides(PagesShape::of(blocks, tokens, heads, unit_bytes), strides)
    }

    /// Any order, with gaps where there are some.
    pub fn with_strides(shape: PagesShape, strides: PagesStrides) -> Result<Pages, PagesError> {
        let dimensions = [
            ("part", strides.part, shape.parts),
            ("block", strides.block, shape.blocks),
            ("token", strides.token, shape.tokens),
            ("head", strides.head, shape.heads.end.saturating_sub(shape.heads.start)),
        ];
        if let Some((dimension, ..)) = dimensions.iter().find(|(.., count)| *count == 0) {
            return Err(PagesError::Empty { dimension });
        }
        if shape.unit_bytes == 0 {
            return Err(PagesError::Empty { dimension: "byte" });
        }
        let extent = extent(shape.unit_bytes, dimensions)?;
        let end = strides.base.checked_add(extent).ok_or(PagesError::TooLarge)?;
        Ok(Pages { shape, strides, end })
    }

    pub fn shape(&self) -> &PagesShape {
        &self.shape
    }
    pub fn strides(&self) -> PagesStrides {
        self.strides
    }
    /// How long a region must be to hold the layer.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// The same bytes with as many more parts: of a layer whose units hold K and V one behind the other, what they are apart. `None` where units cannot be parted so.
    pub fn apart(&self, parts: u64) -> Option<Pages> {
        let shape = &self.shape;
        if shape.parts != 1 || parts == 0 || !shape.unit_bytes.is_multiple_of(parts) {
            return None;
        }
        let unit_bytes = shape.unit_bytes / parts;
        let shape = PagesShape {
            parts,
            unit_bytes,
            ..shape.clone()
        };
        let strides = PagesStrides {
            part: unit_bytes,
            ..self.strides
        };
        Pages::with_strides(shape, strides).ok()
    }

    /// Whether the heads of a token touch, and both lie within one block's part.
    fn heads_touch(&self) -> bool {
        self.strides.head == self.shape.unit_bytes || self.shape.heads.end - self.shape.heads.start == 1
    }
    fn parts_within_block(&self) -> bool {
        self.shape.parts == 1 || self.strides.part < self.strides.block
    }

    pub(crate) fn offset(&self, part: u64, block: u64, token: u64, head: u64) -> u64 {
        // Each index is below its count, so that no sum passes `end`, which was checked.
        let strides = &self.strides;
        strides.base
            + part * strides.part
            + block * strides.block
            + token * strides.token
            + (head - self.shape.heads.start) * strides.head
    }
}

impl PagesShape {
    /// K and V apart.
    fn of(blocks: u64, tokens: u64, heads: Range<u64>, unit_bytes: u64) -> PagesShape {
        PagesShape {
            blocks,
            tokens,
            heads,
            parts: 2,
            unit_bytes,
        }
    }
}

impl Table<'_> {
    /// The block of a token of the sequence, and its place there. The token is one that was checked.
    pub(crate) fn place_of(&self, token: u64) -> (u64, u64) {
        let tokens = self.pages.shape.tokens;
        (self.blocks[(token / tokens) as usize], token % tokens)
    }

    pub(crate) fn check(&self, tokens: &Range<u64>, heads: &Range<u64>) -> Result<(), PagesError> {
        let shape = &self.pages.shape;
        let held = &shape.heads;
        if heads.start < held.start || heads.end > held.end {
            return Err(PagesError::NoSuchHeads {
                asked: heads.clone(),
                held: held.clone(),
            });
        }
        let room = (self.blocks.len() as u64).saturating_mul(shape.tokens);
        if tokens.end > room {
            return Err(PagesError::NoSuchTokens {
                asked: tokens.end,
                held: room,
            });
        }
        let used = tokens.start / shape.tokens..tokens.end.div_ceil(shape.tokens);
        let mut blocks = self.blocks[used.start as usize..used.end as usize].iter();
        match blocks.find(|&&block| block >= shape.blocks) {
            Some(&block) => Err(PagesError::NoSuchBlock {
                block,
                blocks: shape.blocks,
            }),
            None => Ok(()),
        }
    }

    fn push(
        &self,
        part: u64,
        stretch: &TokenStretch,
        heads: &Range<u64>,
        heads_within_tokens: bool,
        spans: &mut Spans,
    ) {
        let (pages, shape) = (self.pages, &self.pages.shape);
        let (block, first) = self.place_of(stretch.first);
        let tokens = first..first + stretch.count;
        if heads_within_tokens {
            let len = (heads.end - heads.start) * shape.unit_bytes;
            for token in tokens {
                let offset = pages.offset(part, block, token, heads.start);
                spans.push(Span { offset, len });
            }
            return;
        }
        for head in heads.clone() {
            for token in tokens.clone() {
                let offset = pages.offset(part, block, token, head);
                let len = shape.unit_bytes;
                spans.push(Span { offset, len });
            }
        }
    }
}

/// Tokens that lie in one block at either end.
pub(crate) struct TokenStretch {
    pub first: u64,
    pub count: u64,
}

/// The tokens of a sequence, stretch by stretch, of ends with blocks of so many tokens.
#[derive(Clone)]
pub(crate) struct Stretches {
    near: u64,
    far: u64,
    left: Range<u64>,
}

impl Stretches {
    pub fn of(near: u64, far: u64, tokens: Range<u64>) -> Stretches {
        let left = tokens;
        Stretches { near, far, left }
    }
}

impl Iterator for Stretches {
    type Item = TokenStretch;
    fn next(&mut self) -> Option<TokenStretch> {
        let Range { start: first, end } = self.left;
        if first >= end {
            return None;
        }
        let block_end = |size: u64| (first / size + 1).saturating_mul(size);
        self.left.start = block_end(self.near).min(block_end(self.far)).min(end);
        let count = self.left.start - first;
        Some(TokenStretch { first, count })
    }
}

/// The bytes of some tokens and heads at two ends, in the same sequence.
pub fn pair(near: Table, far: Table, tokens: Range<u64>, heads: Range<u64>) -> Result<(Spans, Spans), PagesError> {
    let (near_shape, far_shape) = (&near.pages.shape, &far.pages.shape);
    if near_shape.unit_bytes != far_shape.unit_bytes || near_shape.parts != far_shape.parts {
        return Err(PagesError::OtherUnits {
            near: near_shape.unit_bytes,
            near_parts: near_shape.parts,
            far: far_shape.unit_bytes,
            far_parts: far_shape.parts,
        });
    }
    let (mut here, mut there) = (Spans::new(), Spans::new());
    if tokens.is_empty() || heads.is_empty() {
        return Ok((here, there));
    }
    near.check(&tokens, &heads)?;
    far.check(&tokens, &heads)?;
    // Any sequence is right. The one in which most pieces touch at both ends makes the fewest spans.
    let heads_within_tokens = near.pages.heads_touch() && far.pages.heads_touch();
    let parts_within_blocks = near.pages.parts_within_block() && far.pages.parts_within_block();
    let mut add = |part: u64, stretch: &TokenStretch| {
        near.push(part, stretch, &heads, heads_within_tokens, &mut here);
        far.push(part, stretch, &heads, heads_within_tokens, &mut there);
    };
    let all = Stretches::of(near_shape.tokens, far_shape.tokens, tokens);
    let parts = 0..near_shape.parts;
    if parts_within_blocks {
        all.for_each(|stretch| parts.clone().for_each(|part| add(part, &stretch)));
    } else {
        parts.for_each(|part| all.clone().for_each(|stretch| add(part, &stretch)));
    }
    Ok((here, there))
}

fn times(a: u64, b: u64) -> Result<u64, PagesError> {
    a.checked_mul(b).ok_or(PagesError::TooLarge)
}

#[cfg(test)]
mod tests;
