//! What a shelf asks for, what it tells, and why it refuses.

use thiserror::Error;

use super::super::books::PutError;
use super::super::{BlockId, Open};
use super::Read;
use super::format::TenantKey;

/// What went wrong with a tier's medium, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Error)]
#[non_exhaustive]
pub enum Trouble {
    #[error("the file system is full")]
    NoRoom,
    #[error("the file system is read-only")]
    ReadOnly,
    #[error("the device has failed")]
    DeviceFailed,
    #[error("the device did not answer in time")]
    Late,
    #[error("the bytes are not there any more")]
    BytesGone,
    #[error("the move was refused")]
    Refused,
}

/// Names a put under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PutId(pub(super) u64);

/// Names a purge under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PurgeId(pub(super) u64);

/// A payload is to be written here. Sum it meanwhile, [fill](Open::fill) the block, and hand it [back](super::Shelf::on_written).
#[derive(Debug)]
pub struct Write {
    pub put: PutId,
    pub extent: u32,
    /// Within the extent's data.
    pub offset: u64,
    pub length: u32,
    pub open: Open,
    /// It has to last before it counts as written.
    pub commit: bool,
}

#[derive(Debug)]
pub enum ShelfPut {
    Write(Write),
    AlreadyThere,
}

/// Why a put was refused. It is counted, and nothing else has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PutRefused {
    #[error(transparent)]
    Books(#[from] PutError),
    #[error("{queued} bytes are under way, and {limit} are the limit")]
    QueueFull { queued: u64, limit: u64 },
    #[error("the tier is set aside: {trouble}")]
    Aside { trouble: Trouble },
    #[error("every slot that is free of blocks is being read or written")]
    NoSlot,
    #[error("the tier has {limit} tenants, and takes no more")]
    Tenants { limit: usize },
    #[error("the block has none of its parts")]
    NoParts,
}

/// Why a put that was under way came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PutFailed {
    #[error(transparent)]
    Medium(#[from] Trouble),
    #[error("its tenant was purged meanwhile")]
    Purged,
}

/// Pages of records to be written, copied, [`PAGES_MAX`](super::PAGES_MAX) at most: at most one such write is under way an extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pages {
    pub extent: u32,
    /// Which pages of records, in order: page n is at (n + 1) pages of the index file.
    pub pages: Vec<u32>,
    /// Of all of them, one after the other.
    pub bytes: Vec<u8>,
    pub commit: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShelfEvent {
    /// Acknowledged, and to be found; or not.
    PutDone {
        put: PutId,
        id: BlockId,
        ended: Result<(), PutFailed>,
    },
    /// So many records are erased, where it went well.
    PurgeDone {
        purge: PurgeId,
        ended: Result<u64, Trouble>,
    },
    /// A block has left. Where somebody has a use for its bytes they stay until the read is ended.
    Removed {
        id: BlockId,
        parent: Option<BlockId>,
        tenant: TenantKey,
        parts: u8,
        read: Option<Read>,
    },
}

/// What has happened on a shelf, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Found at the start.
    pub recovered: u64,
    /// Records that were not whole.
    pub torn: u64,
    /// Records of a block of which a later one counts.
    pub older: u64,
    /// Whole records that were left out: of more tenants than there may be, of a time to come, or more than there is room for.
    pub left_out: u64,
    /// Extents that are another's, and are left alone.
    pub strange: u64,
    /// Payloads that were not what was written.
    pub wrong: u64,
    /// Reads that the medium failed.
    pub unread: u64,
    pub scrubbed: u64,
    pub erased: u64,
    pub set_aside: u64,
    pub returned: u64,
}
