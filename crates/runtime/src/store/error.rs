//! What a store refuses, each with what would be right.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;
use weft_protocol::block::NameError;
use weft_protocol::block::directory::MembersError;
use weft_protocol::block::shelf::format::{GeometryError, HeaderError};

/// Why a store did not do what it was asked to: fix the call, or the directory.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error("a store needs a tier: memory, or a directory of files")]
    NoTier,
    #[error("a block of {bytes} bytes is more than a store takes")]
    BlockTooLarge { bytes: u64 },
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    #[error("{} is in use by another store", path.display())]
    InUse { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Header { path: PathBuf, source: HeaderError },
    #[error("{step} {}: {source}", path.display())]
    Io {
        step: &'static str,
        path: PathBuf,
        source: Arc<io::Error>,
    },
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("another store of this agent works with others already")]
    AmongOthersAlready,
    #[error(transparent)]
    Members(#[from] MembersError),
    #[error("blocks are put from host memory and read into it")]
    NotHostMemory,
    #[error("a block at {offset} takes {bytes} bytes, and the memory has {has}")]
    Outside { offset: u64, bytes: u64, has: u64 },
    #[error("the store's blocks have {known} parts, and {parts:#b} names others, or none")]
    NoSuchPart { parts: u8, known: usize },
}

impl StoreError {
    pub(super) fn io(step: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> StoreError {
        let path = path.into();
        move |source| StoreError::Io {
            step,
            path,
            source: Arc::new(source),
        }
    }
}
