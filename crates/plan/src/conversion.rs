//! Blocks of a paged cache that become blocks of another: other layouts, other element types, by one program.
//!
//! [`Pages`](crate::pages::Pages) says where the tokens and heads of a layer lie, and [`Elements`] what their numbers are. From two ends so described,
//! [`convert`] computes a [`Conversion`]: which bytes of one become which bytes of the other. It is a few [`Nest`]s, loops that thousands of
//! [`Stretch`]es share, so that it stays small, and so that one launch on a GPU carries all of it out. Whoever moves bytes walks through it: the processor
//! (`weft_fabric::conversion`), a kernel (`weft_gpu::Converter`); [`Conversion::apply`] is what it means, in safe code that is short enough to be read as a definition.
//!
//! ```
//! use weft_plan::conversion::{EndBytes, Elements, Factor, Narrowing, Scales, PagedEnd, convert};
//! use weft_plan::Datatype;
//! use weft_plan::pages::{Pages, Table};
//! // Blocks of 16 tokens, heads before tokens, bf16; and blocks of 64, tokens before heads, fp8 with one scale for K and one for V.
//! let (prefill, bf16) = (Pages::heads_first(100, 16, 0..2, 256)?, Elements::of(Datatype::Bf16));
//! let scales = Scales::PerPart(vec![Factor::new(0.5).unwrap(), Factor::new(0.25).unwrap()]);
//! let (decode, fp8) = (Pages::tokens_first(100, 64, 0..4, 128)?, Elements { datatype: Datatype::Fp8E4m3, scales });
//! let from = PagedEnd { table: Table { pages: &prefill, blocks: &[7, 3, 9] }, elements: &bf16 };
//! let to = PagedEnd { table: Table { pages: &decode, blocks: &[5] }, elements: &fp8 };
//! assert!(convert(from, to, 0..40, 0..2, Narrowing::Refused).is_err());
//! let conversion = convert(from, to, 0..40, 0..2, Narrowing::Allowed)?;
//! assert_eq!((conversion.bytes_read(), conversion.bytes_written()), (2 * 2 * 40 * 256, 2 * 2 * 40 * 128));
//!
//! let (source, mut target) = (vec![0u8; prefill.end() as usize], vec![0u8; decode.end() as usize]);
//! conversion.apply(EndBytes { from: &source, from_scales: &[], to: &mut target, to_scales: &mut [] });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod nest;
mod reference;
#[cfg(test)]
mod tests;

use std::ops::Range;

use thiserror::Error;

use crate::Datatype;
use crate::pages::{Pages, PagesError, Stretches, Table};

pub use nest::{Loop, Nest, NestKind, SCALE_BYTES, Scale};
pub use reference::EndBytes;

/// What the numbers of a layer are.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Elements {
    /// How each is written.
    pub datatype: Datatype,
    /// What it is multiplied with to be a number.
    pub scales: Scales,
}

/// What the elements of fp8 are multiplied with to be the numbers that they stand for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scales {
    /// They are the numbers.
    #[default]
    One,
    /// One for each part, known beforehand: K's and V's.
    PerPart(Vec<Factor>),
    /// One f32 for each token of each head of each part, at these places: pages like those of the elements, of units of four bytes. Whoever writes the elements chooses the scales.
    Beside(Box<Pages>),
}

/// A scale that is known beforehand: so large or small that its inverse is a normal number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor(u32);

impl Factor {
    /// From 2⁻¹⁰⁰ to 2¹⁰⁰.
    pub fn new(value: f32) -> Option<Factor> {
        let limit = f32::from_bits((127 + 100) << 23);
        (1.0 / limit..=limit).contains(&value).then(|| Factor(value.to_bits()))
    }
    /// The number that it is.
    pub fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl Elements {
    /// Numbers as they are.
    pub fn of(datatype: Datatype) -> Elements {
        Elements {
            datatype,
            scales: Scales::One,
        }
    }

    /// How many a token of a head has, where the description makes sense.
    pub fn of_unit(&self, pages: &Pages) -> Result<u64, ConversionError> {
        let (shape, size) = (pages.shape(), self.datatype.size() as u64);
        if !shape.unit_bytes.is_multiple_of(size) {
            let (unit_bytes, datatype) = (shape.unit_bytes, self.datatype);
            return Err(ConversionError::PartOfElement { unit_bytes, datatype });
        }
        match &self.scales {
            Scales::One => {}
            _ if self.datatype != Datatype::Fp8E4m3 => {
                let datatype = self.datatype;
                return Err(ConversionError::ScaledWide { datatype });
            }
            Scales::PerPart(factors) if factors.len() as u64 != shape.parts => {
                let (factors, parts) = (factors.len(), shape.parts);
                return Err(ConversionError::FactorsOfParts { factors, parts });
            }
            Scales::Beside(scales) => {
                let of = scales.shape();
                let alike = (of.blocks, of.tokens, &of.heads, of.parts)
                    == (shape.blocks, shape.tokens, &shape.heads, shape.parts);
                if !alike || of.unit_bytes != SCALE_BYTES {
                    return Err(ConversionError::OtherScales);
                }
            }
            Scales::PerPart(_) => {}
        }
        Ok(shape.unit_bytes / size)
    }

    /// Whether every number that these can be is one that those can be, so that nothing is lost.
    pub fn fit_into(&self, other: &Elements) -> bool {
        use Datatype::{Bf16, F16, F32, Fp8E4m3};
        let unscaled = self.scales == Scales::One && other.scales == Scales::One;
        match (self.datatype, other.datatype) {
            // The same codes with the same scales, wherever these lie.
            (from, to) if from == to => match (&self.scales, &other.scales) {
                (Scales::Beside(_), Scales::Beside(_)) => true,
                (from, to) => from == to,
            },
            (F16 | Bf16, F32) => true,
            (Fp8E4m3, F16 | Bf16 | F32) => unscaled,
            _ => false,
        }
    }
}

/// Whether a conversion may lose what the elements of its target cannot tell apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Narrowing {
    #[default]
    Refused,
    Allowed,
}

/// Two ends of which one cannot become the other, or a description that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConversionError {
    #[error(transparent)]
    Pages(#[from] PagesError),
    #[error("{unit_bytes} bytes for a token of a head are no whole number of elements of {datatype}")]
    PartOfElement { unit_bytes: u64, datatype: Datatype },
    #[error("elements of {datatype} have no scales; those of fp8_e4m3 may")]
    ScaledWide { datatype: Datatype },
    #[error("{factors} scales for {parts} parts")]
    FactorsOfParts { factors: usize, parts: u64 },
    #[error("the pages of the scales are not those of the elements, with units of {SCALE_BYTES} bytes")]
    OtherScales,
    #[error("one end has {from} elements for a token of a head, the other {to}: another model")]
    OtherElements { from: u64, to: u64 },
    #[error("one end has {from} parts, the other {to}; of parts that are packed together say so by Pages::apart")]
    OtherParts { from: u64, to: u64 },
    #[error("no conversion from {from} to {to}; f32, f16, bf16 and fp8_e4m3 become each other")]
    NoCast { from: Datatype, to: Datatype },
    #[error("{from} as {to} loses some of what the numbers are, and nobody has allowed it")]
    Lossy { from: Datatype, to: Datatype },
    #[error("more than 2^31 elements of one block, or loops that are too long")]
    TooLarge,
}

/// One end: where the tokens of a sequence lie, and what they are.
#[derive(Clone, Copy, Debug)]
pub struct PagedEnd<'a> {
    /// Where the tokens lie.
    pub table: Table<'a>,
    /// What their numbers are.
    pub elements: &'a Elements,
}

/// Where one walk through a nest begins: offsets in the memories of the elements, and of their scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The place of its nest.
    pub nest: u32,
    /// Of what is read.
    pub from: u64,
    /// Of what is written.
    pub to: u64,
    /// Of the scales of what is read.
    pub from_scales: u64,
    /// Of the scales of what is written.
    pub to_scales: u64,
}

/// Which bytes become which, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversion {
    nests: Vec<Nest>,
    stretches: Vec<Stretch>,
}

impl Conversion {
    /// The loops that stretches share.
    pub fn nests(&self) -> &[Nest] {
        &self.nests
    }
    /// In no particular order: no byte is written by two of them.
    pub fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }
    /// Whether there is nothing to be done.
    pub fn is_empty(&self) -> bool {
        self.stretches.is_empty()
    }
    /// Whether bytes are moved, and none of them changed.
    pub fn is_move(&self) -> bool {
        self.nests.iter().all(|nest| nest.kind.is_move())
    }
    /// Of elements, scales not counted.
    pub fn bytes_read(&self) -> u64 {
        self.sum(Nest::bytes_read)
    }
    /// Of elements, scales not counted.
    pub fn bytes_written(&self) -> u64 {
        self.sum(Nest::bytes_written)
    }
    fn sum(&self, of: impl Fn(&Nest) -> u64) -> u64 {
        let all = self.stretches.iter();
        all.fold(0, |sum: u64, at| sum.saturating_add(of(&self.nests[at.nest as usize])))
    }

    /// How long the memories have to be: of what is read, of its scales, of what is written, of its scales.
    pub fn ends(&self) -> [u64; 4] {
        let mut ends = [0u64; 4];
        for at in &self.stretches {
            let found = self.nests[at.nest as usize].ends(at);
            ends.iter_mut()
                .zip(found)
                .for_each(|(end, found)| *end = (*end).max(found));
        }
        ends
    }

    /// Appends what another one does, so that one walk does both: of the same memories.
    pub fn append(&mut self, other: &Conversion) {
        let places: Vec<u32> = other.nests.iter().map(|nest| self.place_of(nest)).collect();
        let moved = |at: &Stretch| Stretch {
            nest: places[at.nest as usize],
            ..*at
        };
        self.stretches.extend(other.stretches.iter().map(moved));
    }

    fn place_of(&mut self, nest: &Nest) -> u32 {
        let known = self.nests.iter().position(|known| known == nest);
        let place = known.unwrap_or_else(|| {
            self.nests.push(nest.clone());
            self.nests.len() - 1
        });
        place as u32
    }
}

/// Which bytes of one end become which bytes of the other: of these tokens and heads.
pub fn convert(
    from: PagedEnd,
    to: PagedEnd,
    tokens: Range<u64>,
    heads: Range<u64>,
    loss: Narrowing,
) -> Result<Conversion, ConversionError> {
    let (from_pages, to_pages) = (from.table.pages, to.table.pages);
    let (elements, others) = (from.elements.of_unit(from_pages)?, to.elements.of_unit(to_pages)?);
    let (parts, other_parts) = (from_pages.shape().parts, to_pages.shape().parts);
    if parts != other_parts {
        return Err(ConversionError::OtherParts {
            from: parts,
            to: other_parts,
        });
    }
    if elements != others {
        let (from, to) = (elements, others);
        return Err(ConversionError::OtherElements { from, to });
    }
    let kind = nest::kinds(from.elements, to.elements, parts)?;
    if loss == Narrowing::Refused && !from.elements.fit_into(to.elements) {
        let (from, to) = (from.elements.datatype, to.elements.datatype);
        return Err(ConversionError::Lossy { from, to });
    }
    let mut conversion = Conversion::default();
    if tokens.is_empty() || heads.is_empty() {
        return Ok(conversion);
    }
    from.table.check(&tokens, &heads)?;
    to.table.check(&tokens, &heads)?;

    // Stretches of as many tokens share their nests.
    let mut known: Vec<(u64, Vec<(u64, u32)>)> = Vec::new();
    for stretch in Stretches::of(from_pages.shape().tokens, to_pages.shape().tokens, tokens) {
        let at = match known.iter().position(|(count, _)| *count == stretch.count) {
            Some(at) => at,
            None => {
                let mut places = Vec::new();
                for (part, nest) in nest::nests(&from, &to, &kind, elements, stretch.count, heads.end - heads.start)? {
                    places.push((part, conversion.place_of(&nest)));
                }
                known.push((stretch.count, places));
                known.len() - 1
            }
        };
        let begin = |side: &PagedEnd, pages: &Pages, part: u64| {
            let (block, token) = side.table.place_of(stretch.first);
            pages.offset(part, block, token, heads.start)
        };
        for (part, nest) in &known[at].1 {
            let scale = |side: &PagedEnd| match &side.elements.scales {
                Scales::Beside(scales) => begin(side, scales, *part),
                _ => 0,
            };
            conversion.stretches.push(Stretch {
                nest: *nest,
                from: begin(&from, from_pages, *part),
                to: begin(&to, to_pages, *part),
                from_scales: scale(&from),
                to_scales: scale(&to),
            });
        }
    }
    Ok(conversion)
}
