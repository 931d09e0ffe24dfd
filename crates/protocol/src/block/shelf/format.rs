//! What is in the files of a tier: its header, twice; and of each extent a header and one record a slot.
//!
//! ```text
//! weft.tier      two pages: the header, twice; the copy with the higher sequence counts
//! ext-N.data     payloads only: slot i at i × stride
//! ext-N.index    a page: the extent's header; then a record of 64 bytes a slot, none of which crosses a sector
//! ```
//!
//! Whatever is read is hostile: lengths are checked, numbers bounded, and a record that is not whole is none.

use crc_fast::CrcAlgorithm::{Crc32Iscsi, Crc64Nvme};
use thiserror::Error;

use super::super::{BlockId, Shape};

/// Files of a later version are refused, never changed.
pub const VERSION: u32 = 1;
pub const PAGE_BYTES: usize = 4096;
pub const RECORD_BYTES: usize = 64;
pub const RECORDS_A_PAGE: u32 = (PAGE_BYTES / RECORD_BYTES) as u32;
/// Both copies of a tier's header.
pub const HEADER_FILE_BYTES: usize = 2 * PAGE_BYTES;
pub const HEADER_FILE: &str = "weft.tier";
/// More than any disk holds; what a header may make anybody allocate stays bounded.
pub const EXTENTS_MAX: u32 = 1 << 16;
pub const SLOTS_MAX: u64 = 1 << 26;

const TIER_MAGIC: [u8; 8] = *b"WEFTTIER";
const EXTENT_MAGIC: [u8; 8] = *b"WEFTEXT\0";

/// How a tier's room is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Of a whole block, at most.
    pub block_bytes: u32,
    /// Of one extent.
    pub slots: u32,
    pub extents: u32,
}

/// Room that cannot be divided so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GeometryError {
    #[error("a capacity of {capacity} bytes is below one extent, which has {extent}")]
    BelowOneExtent { capacity: u64, extent: u64 },
    #[error("an extent of {extent} bytes has no room for a block of {block}, which takes {stride}")]
    ExtentTooSmall { extent: u64, block: u32, stride: u64 },
    #[error(
        "{extents} extents of {slots} slots are more than a tier can have ({EXTENTS_MAX}, and {SLOTS_MAX} slots in all)"
    )]
    TooMany { extents: u64, slots: u64 },
}

impl Geometry {
    pub fn new(block_bytes: u32, extent_bytes: u64, capacity: u64) -> Result<Geometry, GeometryError> {
        let stride = stride(block_bytes);
        let slots = extent_bytes / stride.max(1);
        if slots == 0 || block_bytes == 0 {
            return Err(GeometryError::ExtentTooSmall {
                extent: extent_bytes,
                block: block_bytes,
                stride,
            });
        }
        if capacity < extent_bytes {
            return Err(GeometryError::BelowOneExtent {
                capacity,
                extent: extent_bytes,
            });
        }
        let extents = capacity / extent_bytes;
        let all = extents.checked_mul(slots).filter(|all| *all <= SLOTS_MAX);
        match (u32::try_from(extents), u32::try_from(slots)) {
            (Ok(extents), Ok(slots)) if all.is_some() && extents <= EXTENTS_MAX => Ok(Geometry {
                block_bytes,
                slots,
                extents,
            }),
            _ => Err(GeometryError::TooMany { extents, slots }),
        }
    }

    /// From the beginning of a slot to that of the next: whole pages, so that payloads go past the page cache.
    pub fn stride(&self) -> u64 {
        stride(self.block_bytes)
    }
    pub fn data_bytes(&self) -> u64 {
        self.stride() * u64::from(self.slots)
    }
    pub fn index_bytes(&self) -> u64 {
        (PAGE_BYTES + self.pages() as usize * PAGE_BYTES) as u64
    }
    /// Of records, of one extent.
    pub fn pages(&self) -> u32 {
        self.slots.div_ceil(RECORDS_A_PAGE)
    }
    /// Of all extents.
    pub fn slots_total(&self) -> usize {
        self.slots as usize * self.extents as usize
    }

    fn is_sound(&self) -> bool {
        let all = u64::from(self.slots) * u64::from(self.extents);
        self.block_bytes > 0 && self.slots > 0 && (1..=EXTENTS_MAX).contains(&self.extents) && all <= SLOTS_MAX
    }
}

fn stride(block_bytes: u32) -> u64 {
    u64::from(block_bytes).next_multiple_of(PAGE_BYTES as u64)
}

/// The names of an extent's two files.
pub fn extent_files(extent: u32) -> (String, String) {
    (format!("ext-{extent:05}.data"), format!("ext-{extent:05}.index"))
}

/// Which tier files belong to: by chance, when it is made.
pub type TierId = [u8; 16];

/// What a tier says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub tier: TierId,
    /// Of the header itself.
    pub sequence: u64,
    /// How often the tier has been opened: the upper bits of the sequences of its records.
    pub epoch: u32,
    pub geometry: Geometry,
    /// A digest of the parts that its blocks are made of.
    pub shape: u64,
}

/// Why a tier's header is none. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HeaderError {
    #[error("the tier was written by a later version ({version}; this one knows {VERSION})")]
    Newer { version: u32 },
    #[error("neither copy of the tier's header is whole")]
    NotWhole,
    #[error("the tier's header says what cannot be")]
    Unsound,
    #[error("the tier has blocks of {has} bytes, and not of {asked}")]
    OtherBlocks { has: u32, asked: u32 },
    #[error("the tier's extents have {has} slots, and not {asked}: keep the extent size it was made with")]
    OtherExtents { has: u32, asked: u32 },
    #[error("the tier's blocks are made of other parts")]
    OtherParts,
}

impl Header {
    /// The header of a tier that is made now.
    pub fn first(tier: TierId, geometry: Geometry, shape: &Shape) -> Header {
        Header {
            tier,
            sequence: 1,
            epoch: 1,
            geometry,
            shape: shape_digest(shape),
        }
    }

    /// The header for the next opening, which must be written before anything else is: with another budget, if it is to have one.
    pub fn opened(&self, asked: Geometry, shape: &Shape) -> Result<Header, HeaderError> {
        let has = self.geometry;
        if has.block_bytes != asked.block_bytes {
            let (has, asked) = (has.block_bytes, asked.block_bytes);
            return Err(HeaderError::OtherBlocks { has, asked });
        }
        if has.slots != asked.slots {
            let (has, asked) = (has.slots, asked.slots);
            return Err(HeaderError::OtherExtents { has, asked });
        }
        if self.shape != shape_digest(shape) {
            return Err(HeaderError::OtherParts);
        }
        Ok(Header {
            sequence: self.sequence.checked_add(1).ok_or(HeaderError::Unsound)?,
            epoch: self.epoch.checked_add(1).ok_or(HeaderError::Unsound)?,
            geometry: asked,
            ..*self
        })
    }

    /// Where in the file it goes: the copy that is older is written over.
    pub fn offset(&self) -> u64 {
        (self.sequence % 2) * PAGE_BYTES as u64
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut page = Page::new(TIER_MAGIC);
        page.put(&self.tier);
        page.put(&self.sequence.to_le_bytes());
        page.put(&self.epoch.to_le_bytes());
        page.put(&self.geometry.block_bytes.to_le_bytes());
        page.put(&self.geometry.slots.to_le_bytes());
        page.put(&self.geometry.extents.to_le_bytes());
        page.put(&self.shape.to_le_bytes());
        page.close()
    }

    /// Out of both copies, the one that counts.
    pub fn decode(file: &[u8]) -> Result<Header, HeaderError> {
        let mut best: Option<Header> = None;
        for copy in file.chunks_exact(PAGE_BYTES).take(2) {
            let Some(mut page) = Reader::open(copy, TIER_MAGIC) else {
                continue;
            };
            if page.version > VERSION {
                return Err(HeaderError::Newer { version: page.version });
            }
            let header = Header {
                tier: page.take(),
                sequence: page.u64(),
                epoch: page.u32(),
                geometry: Geometry {
                    block_bytes: page.u32(),
                    slots: page.u32(),
                    extents: page.u32(),
                },
                shape: page.u64(),
            };
            if best.is_none_or(|best| best.sequence < header.sequence) {
                best = Some(header);
            }
        }
        let best = best.ok_or(HeaderError::NotWhole)?;
        best.geometry.is_sound().then_some(best).ok_or(HeaderError::Unsound)
    }
}

/// What an extent's index file begins with.
pub fn extent_header(tier: &TierId, extent: u32, geometry: &Geometry) -> Vec<u8> {
    let mut page = Page::new(EXTENT_MAGIC);
    page.put(tier);
    page.put(&extent.to_le_bytes());
    page.put(&geometry.slots.to_le_bytes());
    page.put(&geometry.block_bytes.to_le_bytes());
    page.close()
}

/// What an index file turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExtentKind {
    /// This extent of this tier.
    Own,
    /// Nothing has been written to it, or its header is not whole: it is to be made anew, without records.
    Fresh,
    /// Another tier's, another extent of this one, or no extent at all: left alone.
    Strange,
}

pub fn extent_kind(index: &[u8], tier: &TierId, extent: u32, geometry: &Geometry) -> ExtentKind {
    let Some(page) = index.get(..PAGE_BYTES) else {
        return ExtentKind::Fresh;
    };
    let torn = page.starts_with(&EXTENT_MAGIC) && Reader::open(page, EXTENT_MAGIC).is_none();
    if page == extent_header(tier, extent, geometry) {
        ExtentKind::Own
    } else if torn || page.iter().all(|byte| *byte == 0) {
        ExtentKind::Fresh
    } else {
        ExtentKind::Strange
    }
}

/// Of which tenant a block is: eight bytes of a digest of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantKey(pub u64);

impl TenantKey {
    pub fn of(name: &str) -> TenantKey {
        let digest = blake3::derive_key("weft block tenant, version 1", name.as_bytes());
        TenantKey(u64::from_le_bytes(digest[..8].try_into().expect("eight bytes")))
    }
}

/// What is written of a block beside its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub id: BlockId,
    /// The first half of its parent's id; zero where it has none.
    pub parent: u64,
    /// Of the whole tier: of two records of one block, the higher counts.
    pub sequence: u64,
    /// Of id, sequence, length and payload: a payload of another block, or of an earlier life of the slot, does not have it.
    pub sum: u64,
    pub length: u32,
    pub parts: u8,
    pub tenant: TenantKey,
}

/// What is in a slot's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Nothing,
    /// Not whole: written when the power failed, or damaged since.
    Torn,
    /// Purged, or found to be wrong.
    Erased,
    Block(Record),
}

const SEALED: u8 = 1;
const ERASED: u8 = 2;

impl Record {
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..16].copy_from_slice(self.id.as_bytes());
        bytes[16..24].copy_from_slice(&self.parent.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.sum.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.tenant.0.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.length.to_le_bytes());
        bytes[52] = SEALED;
        bytes[53] = self.parts;
        close_record(bytes)
    }

    /// The record of a slot whose block is never to be found again.
    pub fn erased() -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[52] = ERASED;
        close_record(bytes)
    }

    pub fn decode(bytes: &[u8; RECORD_BYTES], geometry: &Geometry) -> Found {
        if bytes.iter().all(|byte| *byte == 0) {
            return Found::Nothing;
        }
        let sum = u32::from_le_bytes(bytes[60..].try_into().expect("four bytes"));
        if sum != crc32(&bytes[..60]) {
            return Found::Torn;
        }
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let id: [u8; 16] = bytes[..16].try_into().expect("sixteen bytes");
        let length = u32::from_le_bytes(bytes[48..52].try_into().expect("four bytes"));
        match bytes[52] {
            ERASED => Found::Erased,
            SEALED if id != [0; 16] && (1..=geometry.block_bytes).contains(&length) => Found::Block(Record {
                id: BlockId::from_bytes(id),
                parent: u64_at(16),
                sequence: u64_at(24),
                sum: u64_at(32),
                tenant: TenantKey(u64_at(40)),
                length,
                parts: bytes[53],
            }),
            _ => Found::Torn,
        }
    }

    /// Whether bytes with this checksum are the ones that were written.
    pub fn is_of(&self, payload_sum: u64) -> bool {
        self.sum == bound_sum(&self.id, self.sequence, self.length, payload_sum)
    }
}

/// CRC-64/NVME over id, sequence, length and payload, out of the payload's own: no second pass over the bytes.
pub fn bound_sum(id: &BlockId, sequence: u64, length: u32, payload_sum: u64) -> u64 {
    let mut bound = [0; 28];
    bound[..16].copy_from_slice(id.as_bytes());
    bound[16..24].copy_from_slice(&sequence.to_le_bytes());
    bound[24..].copy_from_slice(&length.to_le_bytes());
    let start = crc_fast::checksum(Crc64Nvme, &bound);
    crc_fast::checksum_combine(Crc64Nvme, start, payload_sum, length.into())
}

/// The first half of a block's id, as records name parents.
pub(super) fn first_half(id: &BlockId) -> u64 {
    u64::from_le_bytes(id.as_bytes()[..8].try_into().expect("eight bytes"))
}

fn shape_digest(shape: &Shape) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("weft block shape, version 1");
    for part in shape.parts() {
        hasher.update(&(part.name.len() as u64).to_le_bytes());
        hasher.update(part.name.as_bytes());
        hasher.update(&part.bytes.to_le_bytes());
    }
    u64::from_le_bytes(hasher.finalize().as_bytes()[..8].try_into().expect("eight bytes"))
}

fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(Crc32Iscsi, bytes) as u32
}

fn close_record(mut bytes: [u8; RECORD_BYTES]) -> [u8; RECORD_BYTES] {
    let sum = crc32(&bytes[..60]);
    bytes[60..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// A page being filled from its beginning; its last four bytes are its checksum, in every version.
struct Page {
    bytes: Vec<u8>,
    at: usize,
}

impl Page {
    fn new(magic: [u8; 8]) -> Page {
        let bytes = vec![0; PAGE_BYTES];
        let mut page = Page { bytes, at: 0 };
        page.put(&magic);
        page.put(&VERSION.to_le_bytes());
        page
    }
    fn put(&mut self, value: &[u8]) {
        self.bytes[self.at..self.at + value.len()].copy_from_slice(value);
        self.at += value.len();
    }
    fn close(mut self) -> Vec<u8> {
        let sum = crc32(&self.bytes[..PAGE_BYTES - 4]);
        self.bytes[PAGE_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
        self.bytes
    }
}

/// A page whose checksum is right, being read from its beginning.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    version: u32,
}

impl<'a> Reader<'a> {
    fn open(bytes: &'a [u8], magic: [u8; 8]) -> Option<Reader<'a>> {
        let (body, sum) = bytes.split_at_checked(PAGE_BYTES - 4)?;
        let whole = sum == crc32(body).to_le_bytes() && body.starts_with(&magic);
        let mut page = Reader {
            bytes,
            at: 8,
            version: 0,
        };
        page.version = whole.then(|| page.u32())?;
        Some(page)
    }
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let value = self.bytes[self.at..self.at + N].try_into().expect("within the page");
        self.at += N;
        value
    }
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::block::{HitRule, Part};

    fn shape() -> Shape {
        Shape::new(vec![Part::new("kv", 5000, HitRule::AllBlocks)]).unwrap()
    }

    fn geometry() -> Geometry {
        Geometry::new(5000, 1 << 20, 4 << 20).unwrap()
    }

    #[test]
    fn room_is_divided_or_refused() {
        assert_eq!(
            geometry(),
            Geometry {
                block_bytes: 5000,
                slots: 128,
                extents: 4
            }
        );
        assert_eq!((geometry().stride(), geometry().index_bytes()), (8192, 3 * 4096));
        let below = Geometry::new(5000, 1 << 20, (1 << 20) - 1);
        assert!(matches!(below, Err(GeometryError::BelowOneExtent { .. })));
        assert!(matches!(
            Geometry::new(5000, 8191, 1 << 20),
            Err(GeometryError::ExtentTooSmall { .. })
        ));
        assert!(matches!(
            Geometry::new(1, 4096, u64::MAX),
            Err(GeometryError::TooMany { .. })
        ));
        assert!(matches!(
            Geometry::new(u32::MAX, u64::MAX, u64::MAX),
            Err(GeometryError::TooMany { .. })
        ));
    }

    #[test]
    fn the_newer_header_counts_and_a_later_version_is_refused() {
        let first = Header::first([7; 16], geometry(), &shape());
        let second = first.opened(geometry(), &shape()).unwrap();
        assert_ne!(first.offset(), second.offset());
        let mut file = vec![0; HEADER_FILE_BYTES];
        for header in [first, second] {
            let at = header.offset() as usize;
            file[at..at + PAGE_BYTES].copy_from_slice(&header.encode());
        }
        assert_eq!(Header::decode(&file), Ok(second));
        let at = second.offset() as usize;
        file[at + 100] ^= 1;
        assert_eq!(
            Header::decode(&file),
            Ok(first),
            "a copy that is not whole does not count"
        );
        assert_eq!(Header::decode(&file[..100]), Err(HeaderError::NotWhole));
        file[8] = 2;
        file[PAGE_BYTES + 8] = 2;
        for copy in file.chunks_exact_mut(PAGE_BYTES) {
            let sum = crc32(&copy[..PAGE_BYTES - 4]);
            copy[PAGE_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
        }
        assert_eq!(Header::decode(&file), Err(HeaderError::Newer { version: 2 }));
    }

    #[test]
    fn a_tier_of_other_blocks_is_refused_with_both_sizes() {
        let first = Header::first([7; 16], geometry(), &shape());
        let other = Geometry::new(6000, 1 << 20, 4 << 20).unwrap();
        let refused = first.opened(other, &shape());
        assert_eq!(refused, Err(HeaderError::OtherBlocks { has: 5000, asked: 6000 }));
        let parts = Shape::new(vec![Part::new("state", 5000, HitRule::AllBlocks)]).unwrap();
        assert_eq!(first.opened(geometry(), &parts), Err(HeaderError::OtherParts));
        let smaller = Geometry::new(5000, 1 << 20, 1 << 20).unwrap();
        assert_eq!(
            first.opened(smaller, &shape()).unwrap().geometry.extents,
            1,
            "a budget may change"
        );
    }

    #[test]
    fn extents_of_others_are_strange_and_empty_ones_fresh() {
        let header = extent_header(&[7; 16], 3, &geometry());
        let kind = |index: &[u8], extent| extent_kind(index, &[7; 16], extent, &geometry());
        assert_eq!(kind(&header, 3), ExtentKind::Own);
        assert_eq!(kind(&header, 4), ExtentKind::Strange);
        assert_eq!(extent_kind(&header, &[8; 16], 3, &geometry()), ExtentKind::Strange);
        assert_eq!(kind(&[0; PAGE_BYTES], 3), ExtentKind::Fresh);
        assert_eq!(kind(&[], 3), ExtentKind::Fresh);
        let mut torn = header;
        torn[30] ^= 1;
        assert_eq!(kind(&torn, 3), ExtentKind::Fresh);
        torn[0] ^= 1;
        assert_eq!(kind(&torn, 3), ExtentKind::Strange, "no extent's");
    }

    proptest! {
        #[test]
        fn a_record_comes_back_and_any_flipped_bit_makes_it_none(
            id in any::<[u8; 16]>(), parent: u64, sequence: u64, payload in proptest::collection::vec(any::<u8>(), 1..200),
            parts: u8, tenant: u64, bit in 0..8 * RECORD_BYTES,
        ) {
            prop_assume!(id != [0; 16]);
            let id = BlockId::from_bytes(id);
            let (length, payload_sum) = (payload.len() as u32, crate::block::checksum(&payload));
            let sum = bound_sum(&id, sequence, length, payload_sum);
            let whole = [&id.as_bytes()[..], &sequence.to_le_bytes(), &length.to_le_bytes(), &payload].concat();
            prop_assert_eq!(sum, crate::block::checksum(&whole));
            let record = Record { id, parent, sequence, sum, length, parts, tenant: TenantKey(tenant) };
            prop_assert!(record.is_of(payload_sum) && !record.is_of(payload_sum ^ 1));
            let mut bytes = record.encode();
            prop_assert_eq!(Record::decode(&bytes, &geometry()), Found::Block(record));
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Record::decode(&bytes, &geometry()), Found::Torn);
        }

        #[test]
        fn whatever_bytes_a_header_is_made_of_nothing_unsound_comes_out(bytes in proptest::collection::vec(any::<u8>(), 0..HEADER_FILE_BYTES + 1)) {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.geometry.is_sound());
            }
        }
    }
}
