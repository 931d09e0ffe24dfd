//! Why something did not happen, grouped by what the caller can do next.

use thiserror::Error;

/// Why an operation failed. Failure is also a completion: after it, the operation touches no byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum Failure {
    /// The caller asked for it.
    #[error("cancelled")]
    Cancelled,
    /// The deadline passed.
    #[error("the deadline passed")]
    Expired,
    /// The target said no: fix the call, or ask the peer for a current key.
    #[error("refused by the target: {0}")]
    Refused(#[from] Refusal),
    /// The path went away: try another one.
    ///
    /// `fenced` says that the far end can no longer act on what was sent. Where it is false, a write may still land until
    /// its deadline, and must not be repeated elsewhere before the far end has confirmed that the path is closed.
    #[error("the path was lost: {loss}")]
    PathLost { loss: Loss, fenced: bool },
    /// The bytes at the two ends differ.
    #[error("checksum mismatch")]
    ChecksumMismatch,
}

/// Why a target would not touch its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum Refusal {
    #[error("no region has this key")]
    UnknownKey,
    #[error("the key belongs to an earlier life of the peer")]
    StaleEpoch,
    #[error("the region has been released by its owner")]
    Released,
    #[error("a span lies outside its region")]
    OutOfBounds,
    #[error("the region may not be read by peers")]
    NotReadable,
    #[error("the region may not be written by peers")]
    NotWritable,
    #[error("the deadline had passed when the request reached the target")]
    Late,
    #[error("the request was malformed")]
    Malformed,
    #[error("the transport cannot reach this memory")]
    Unsupported,
}

/// Why a path went away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum Loss {
    #[error("closed by this side")]
    Closed,
    #[error("closed by the peer, or the peer died")]
    ClosedByPeer,
    #[error("the peer did not answer in time")]
    Silent,
    #[error("the peer sent something that is not the protocol")]
    Garbage,
    #[error("the peer refused the connection")]
    Unreachable,
    /// An error number of the operating system.
    #[error("system error {0}")]
    System(i32),
}
