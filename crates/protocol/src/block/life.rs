//! The life of a block: open while bytes arrive, sealed when every byte of every part has come with its checksum, visible once it can be found.
//!
//! The states are types. An [`Index`](super::Index) takes nothing but a [`Sealed`] block and gives the [`Visible`] one back, so that half a
//! block cannot be found, whatever fails in between.
//!
//! ```
//! use weft_protocol::block::{BlockId, HitRule, Open, Part, Shape, checksum};
//! let shape = Shape::new(vec![Part::new("kv", 4, HitRule::AllBlocks)])?;
//! let mut block = Open::new(BlockId::from_bytes([1; 16]), &shape);
//! block.fill(0, 2, 2, checksum(b"cd"))?;
//! let block = block.seal().unwrap_err().block;      // two bytes are missing, and nothing is lost
//! let mut block = block;
//! block.fill(0, 0, 2, checksum(b"ab"))?;
//! assert_eq!(block.seal().unwrap().sums(), [checksum(b"abcd")]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::sync::Arc;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use thiserror::Error;

use super::{BlockId, Slot};

/// Of which blocks of a prefix a part must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HitRule {
    /// Of all: attention, and the indexers of sparse attention.
    AllBlocks,
    /// Of the last so many only: states, and layers with a sliding window.
    TrailingBlocks(u32),
}

/// A named piece of every block: what one kind of layer keeps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    pub name: String,
    pub bytes: u32,
    pub rule: HitRule,
}

impl Part {
    pub fn new(name: &str, bytes: u32, rule: HitRule) -> Part {
        let name = name.to_string();
        Part { name, bytes, rule }
    }
}

/// What the blocks of a namespace are made of. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    parts: Arc<[Part]>,
}

/// Parts that no block can have.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    #[error("a block has between 1 and {} parts, not {count}", Shape::PARTS_MAX)]
    Parts { count: usize },
    #[error("two parts are called `{name}`")]
    TwiceNamed { name: String },
    #[error("the part `{name}` has no bytes")]
    Empty { name: String },
    #[error("the part `{name}` must be there in the last 0 blocks, which says nothing")]
    NoTrailing { name: String },
    #[error("a block has at most 4 GiB, and these parts have {bytes} bytes")]
    TooLarge { bytes: u64 },
}

impl Shape {
    pub const PARTS_MAX: usize = 8;

    pub fn new(parts: Vec<Part>) -> Result<Shape, ShapeError> {
        if !(1..=Shape::PARTS_MAX).contains(&parts.len()) {
            return Err(ShapeError::Parts { count: parts.len() });
        }
        for (at, part) in parts.iter().enumerate() {
            let name = part.name.clone();
            if parts[..at].iter().any(|other| other.name == name) {
                return Err(ShapeError::TwiceNamed { name });
            }
            if part.bytes == 0 {
                return Err(ShapeError::Empty { name });
            }
            if part.rule == HitRule::TrailingBlocks(0) {
                return Err(ShapeError::NoTrailing { name });
            }
        }
        let bytes = parts.iter().map(|part| u64::from(part.bytes)).sum();
        if bytes > u64::from(u32::MAX) {
            return Err(ShapeError::TooLarge { bytes });
        }
        Ok(Shape { parts: parts.into() })
    }

    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// How many blocks of a chain are a hit, given for each of them which parts are there, as bits: every part by its rule. A block that is
    /// not there at all has no parts.
    pub fn hit(&self, present: impl IntoIterator<Item = u8>) -> usize {
        let mut streaks = [0u32; Shape::PARTS_MAX];
        let mut hit = 0;
        for (at, present) in present.into_iter().enumerate() {
            let length = at as u32 + 1;
            let mut whole = true;
            for (nth, part) in self.parts.iter().enumerate() {
                let there = present >> nth & 1 == 1;
                streaks[nth] = if there { streaks[nth] + 1 } else { 0 };
                match part.rule {
                    // No longer prefix can be a hit either.
                    HitRule::AllBlocks if !there => return hit,
                    HitRule::AllBlocks => {}
                    HitRule::TrailingBlocks(last) => whole &= streaks[nth] >= last.min(length),
                }
            }
            if whole {
                hit = at + 1;
            }
        }
        hit
    }
}

/// A block that bytes are still arriving for. It cannot be found.
#[derive(Clone, Debug)]
pub struct Open {
    id: BlockId,
    shape: Shape,
    /// Which parts this block is to have, as bits.
    wanted: u8,
    /// What has arrived: (part, offset, length, checksum), in order, no two overlapping.
    filled: Vec<(u8, u32, u32, u64)>,
}

/// Bytes that have no place in the block. Nothing of it has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FillError {
    #[error("the block has no part {part}")]
    NoPart { part: usize },
    #[error("bytes {offset} to {end} are not all in part {part}, which has {bytes}")]
    Outside {
        part: usize,
        offset: u32,
        end: u64,
        bytes: u32,
    },
    #[error("byte {offset} of part {part} has arrived before")]
    Twice { part: usize, offset: u32 },
}

/// A block of which bytes are missing, given back as it was.
#[derive(Clone, Debug, Error)]
#[error("the block {} is not whole: byte {offset} of its part `{part}` has not arrived", block.id)]
pub struct Unsealed {
    pub block: Open,
    pub part: String,
    pub offset: u32,
}

impl Open {
    /// A block that is to have all parts.
    pub fn new(id: BlockId, shape: &Shape) -> Open {
        Open::with_parts(id, shape, u8::MAX)
    }

    /// A block that is to have some parts only, as bits: a block in the middle of a prompt needs no state.
    pub fn with_parts(id: BlockId, shape: &Shape, parts: u8) -> Open {
        let all = u8::MAX >> (8 - shape.parts.len());
        Open {
            id,
            shape: shape.clone(),
            wanted: parts & all,
            filled: Vec::new(),
        }
    }

    /// Bytes of a part have arrived, and this is their checksum (CRC-64/NVME, as transfers compute it).
    pub fn fill(&mut self, part: usize, offset: u32, length: u32, sum: u64) -> Result<(), FillError> {
        let known = self.shape.parts.get(part).filter(|_| self.wanted >> part & 1 == 1);
        let bytes = known.ok_or(FillError::NoPart { part })?.bytes;
        let end = u64::from(offset) + u64::from(length);
        if end > u64::from(bytes) {
            return Err(FillError::Outside {
                part,
                offset,
                end,
                bytes,
            });
        }
        if length == 0 {
            return Ok(());
        }
        let key = (part as u8, offset);
        let at = self.filled.partition_point(|(part, offset, ..)| (*part, *offset) < key);
        let same = |nth: usize| self.filled.get(nth).filter(|span| usize::from(span.0) == part);
        if let Some((_, before, length, _)) = at.checked_sub(1).and_then(same)
            && before + length > offset
        {
            return Err(FillError::Twice { part, offset });
        }
        if let Some((_, after, ..)) = same(at)
            && u64::from(*after) < end
        {
            return Err(FillError::Twice { part, offset: *after });
        }
        self.filled.insert(at, (part as u8, offset, length, sum));
        Ok(())
    }

    /// Closes the block, if every byte of every part has arrived.
    pub fn seal(self) -> Result<Sealed, Box<Unsealed>> {
        let mut sums = Vec::with_capacity(self.shape.parts.len());
        let mut spans = self.filled.iter().peekable();
        let mut bytes = 0;
        for (nth, part) in self.shape.parts.iter().enumerate() {
            let (mut sum, mut end) = (0, 0);
            while let Some((_, _, length, piece)) =
                spans.next_if(|(part, offset, ..)| usize::from(*part) == nth && *offset == end)
            {
                sum = if end == 0 {
                    *piece
                } else {
                    combine(sum, *piece, *length)
                };
                end += length;
            }
            if self.wanted >> nth & 1 == 0 {
                sums.push(0);
            } else if end < part.bytes {
                let part = part.name.clone();
                return Err(Box::new(Unsealed {
                    block: self,
                    part,
                    offset: end,
                }));
            } else {
                sums.push(sum);
                bytes += part.bytes;
            }
        }
        Ok(Sealed {
            id: self.id,
            parts: self.wanted,
            bytes,
            sums,
        })
    }
}

/// The checksum of bytes that blocks are sealed with: CRC-64/NVME, the same that transfers and object stores compute.
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(Crc64Nvme, bytes)
}

fn combine(first: u64, second: u64, length: u32) -> u64 {
    crc_fast::checksum_combine(Crc64Nvme, first, second, length.into())
}

/// A block that is whole, with the checksum of each part.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a sealed block is found only once an index has it"]
pub struct Sealed {
    id: BlockId,
    parts: u8,
    bytes: u32,
    sums: Vec<u64>,
}

impl Sealed {
    /// A name of so many bytes that nobody will read: what replays and benches put into an index.
    pub fn name_only(id: BlockId, bytes: u32) -> Sealed {
        let (parts, sums) = (u8::MAX, Vec::new());
        Sealed { id, parts, bytes, sums }
    }

    /// A block that was sealed in an earlier life, of which a record tells.
    pub(super) fn recorded(id: BlockId, parts: u8, bytes: u32) -> Sealed {
        let sums = Vec::new();
        Sealed { id, parts, bytes, sums }
    }

    pub fn id(&self) -> BlockId {
        self.id
    }

    /// Which parts there are, as bits.
    pub fn parts(&self) -> u8 {
        self.parts
    }

    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// The checksum of each part; zero where the block does not have it.
    pub fn sums(&self) -> &[u64] {
        &self.sums
    }

    /// The checksum of the parts that there are, one after the other.
    pub fn payload_sum(&self, shape: &Shape) -> u64 {
        self.sum_after(0, shape)
    }

    /// One number for all of it, bound to the block's name: CRC-64/NVME over id, length and parts. Bytes of another block do not have it, and
    /// nothing is read a second time for it.
    pub fn bound_sum(&self, shape: &Shape) -> u64 {
        let mut bound = [0; 20];
        bound[..16].copy_from_slice(self.id.as_bytes());
        bound[16..].copy_from_slice(&self.bytes.to_le_bytes());
        self.sum_after(checksum(&bound), shape)
    }

    fn sum_after(&self, start: u64, shape: &Shape) -> u64 {
        let there = shape.parts().iter().zip(&self.sums).enumerate();
        let there = there.filter(|(nth, _)| self.parts >> nth & 1 == 1);
        there.fold(start, |sum, (_, (part, piece))| combine(sum, *piece, part.bytes))
    }
}

/// A block that can be found, by whoever looks into the index that it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visible {
    pub id: BlockId,
    pub slot: Slot,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id() -> BlockId {
        BlockId::from_bytes([5; 16])
    }

    use super::checksum as crc;

    fn hybrid() -> Shape {
        Shape::new(vec![
            Part::new("attention", 64, HitRule::AllBlocks),
            Part::new("state", 32, HitRule::TrailingBlocks(1)),
            Part::new("window", 16, HitRule::TrailingBlocks(3)),
        ])
        .unwrap()
    }

    #[test]
    fn shapes_that_mean_nothing_are_refused() {
        let part = |name: &str, bytes, rule| Part::new(name, bytes, rule);
        let all = HitRule::AllBlocks;
        assert_eq!(Shape::new(vec![]), Err(ShapeError::Parts { count: 0 }));
        let nine = (0..9).map(|n| part(&n.to_string(), 1, all)).collect();
        assert_eq!(Shape::new(nine), Err(ShapeError::Parts { count: 9 }));
        let name = "a".to_string();
        let twice = vec![part("a", 1, all), part("a", 2, all)];
        assert_eq!(Shape::new(twice), Err(ShapeError::TwiceNamed { name: name.clone() }));
        assert_eq!(
            Shape::new(vec![part("a", 0, all)]),
            Err(ShapeError::Empty { name: name.clone() })
        );
        let none = vec![part("a", 1, HitRule::TrailingBlocks(0))];
        assert_eq!(Shape::new(none), Err(ShapeError::NoTrailing { name }));
        let large = vec![part("a", u32::MAX, all), part("b", 1, all)];
        assert_eq!(Shape::new(large), Err(ShapeError::TooLarge { bytes: 1 << 32 }));
    }

    #[test]
    fn bytes_outside_twice_or_of_no_part_change_nothing() {
        let mut open = Open::with_parts(id(), &hybrid(), 0b101);
        open.fill(0, 16, 16, 1).unwrap();
        assert_eq!(open.fill(3, 0, 1, 0), Err(FillError::NoPart { part: 3 }));
        assert_eq!(open.fill(1, 0, 1, 0), Err(FillError::NoPart { part: 1 }));
        let outside = FillError::Outside {
            part: 0,
            offset: 60,
            end: 65,
            bytes: 64,
        };
        assert_eq!(open.fill(0, 60, 5, 0), Err(outside));
        assert!(matches!(
            open.fill(0, u32::MAX, u32::MAX, 0),
            Err(FillError::Outside { .. })
        ));
        for (offset, length) in [(16, 16), (31, 1), (15, 2), (0, 64), (17, 3)] {
            assert!(matches!(
                open.fill(0, offset, length, 0),
                Err(FillError::Twice { part: 0, .. })
            ));
        }
        assert_eq!(open.filled, [(0, 16, 16, 1)]);
        let unsealed = open.seal().unwrap_err();
        assert_eq!((unsealed.part.as_str(), unsealed.offset), ("attention", 0));
    }

    #[test]
    fn the_bound_sum_is_that_of_id_length_and_parts_and_of_no_other_block() {
        let shape = hybrid();
        let (attention, window) = ([7u8; 64], [9u8; 16]);
        let seal = |id| {
            let mut open = Open::with_parts(id, &shape, 0b101);
            open.fill(2, 0, 16, crc(&window)).unwrap();
            open.fill(0, 0, 64, crc(&attention)).unwrap();
            open.seal().unwrap()
        };
        let sealed = seal(id());
        let whole = [&id().as_bytes()[..], &80u32.to_le_bytes(), &attention, &window].concat();
        assert_eq!(sealed.bound_sum(&shape), crc(&whole));
        assert_ne!(
            seal(BlockId::from_bytes([6; 16])).bound_sum(&shape),
            sealed.bound_sum(&shape)
        );
    }

    #[test]
    fn a_prefix_ends_where_any_part_does() {
        let shape = hybrid();
        assert_eq!(shape.hit([0b111; 4]), 4);
        assert_eq!(
            shape.hit([0b111, 0b111, 0b110, 0b111]),
            2,
            "attention is missing in the third"
        );
        assert_eq!(
            shape.hit([0b101, 0b101, 0b111, 0b101]),
            3,
            "the state is there after the third only"
        );
        assert_eq!(
            shape.hit([0b111, 0b011, 0b111, 0b111]),
            1,
            "the window reaches back to the second"
        );
        assert_eq!(shape.hit([0b111, 0b011, 0b111, 0b111, 0b111]), 5, "and no longer does");
        assert_eq!(shape.hit([0b011, 0b001]), 0);
        assert_eq!(shape.hit([]), 0);
    }

    proptest! {
        #[test]
        fn a_block_seals_when_its_last_byte_has_come_in_whatever_order(
            cuts in proptest::collection::btree_set(1u32..96, 0..12),
            order in any::<u64>(),
        ) {
            let shape = hybrid();
            let bytes: Vec<u8> = (0..112).map(|n| n as u8 ^ 0x5a).collect();
            // Spans of all parts in one row: 64, 32 and 16 bytes.
            let mut edges: Vec<u32> = cuts.into_iter().chain([0, 64, 96, 112]).collect();
            edges.sort();
            edges.dedup();
            let mut spans: Vec<(u32, u32)> = edges.windows(2).map(|pair| (pair[0], pair[1])).collect();
            let mixed = crate::Seeded::new(order).shuffled(spans.len() as u64);
            spans = mixed.into_iter().map(|nth| spans[nth as usize]).collect();
            let mut open = Open::new(id(), &shape);
            for (from, to) in spans {
                open = open.seal().unwrap_err().block;
                let (part, start) = match from { 0..64 => (0, 0), 64..96 => (1, 64), _ => (2, 96) };
                open.fill(part, from - start, to - from, crc(&bytes[from as usize..to as usize])).unwrap();
            }
            let sealed = open.seal().unwrap();
            prop_assert_eq!(sealed.sums(), [crc(&bytes[..64]), crc(&bytes[64..96]), crc(&bytes[96..])]);
            prop_assert_eq!(sealed.bytes(), 112);
        }

        #[test]
        fn hits_are_what_the_rules_say_word_by_word(present in proptest::collection::vec(0u8..8, 0..24)) {
            let whole = |length: usize| {
                (0..length).all(|at| present[at] & 1 == 1)
                    && (length.saturating_sub(1)..length).all(|at| present[at] & 2 == 2)
                    && (length.saturating_sub(3)..length).all(|at| present[at] & 4 == 4)
            };
            let longest = (0..=present.len()).rev().find(|length| whole(*length)).unwrap();
            prop_assert_eq!(hybrid().hit(present.iter().copied()), longest);
        }
    }
}
