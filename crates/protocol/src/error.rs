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
    /// its deadline, and must not be repeated elsewhere before the far end has confirmed that the path is closed. An atomic
    /// operation may have been carried out in either case, and is never repeated.
    #[error("the path was lost: {loss}")]
    PathLost { loss: Loss, fenced: bool },
    /// The bytes at the two ends differ.
    #[error("checksum mismatch")]
    ChecksumMismatch,
    /// An atomic operation was sent, and no answer came before the deadline: whether it was carried out is not known.
    #[error("the deadline passed without an answer")]
    Unanswered,
}

impl Failure {
    /// Whether an atomic operation that ended like this may have been carried out. After any other failure it certainly has not
    /// been, and will not be.
    pub fn may_have_happened(&self) -> bool {
        matches!(self, Failure::PathLost { .. } | Failure::Unanswered)
    }
}

/// Why a target would not touch its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
#[repr(u8)]
pub enum Refusal {
    #[error("no region has this key")]
    UnknownKey,
    #[error("the key belongs to another life of the peer, or to another agent")]
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
    #[error("the word is not aligned to eight bytes")]
    Misaligned,
    /// A file that memory was mapped from has become shorter, or the memory was unmapped while it was registered.
    #[error("the memory of the region is not there any more")]
    NoMemory,
    /// A file system, or what somebody may use of it, is full.
    #[error("there is no room left where the bytes were to go")]
    NoRoom,
    #[error("what the bytes were to be written to is read-only")]
    ReadOnly,
    /// An input/output error: a disk failed, or was pulled.
    #[error("the device failed")]
    DeviceFailed,
    /// What serves the bytes is not there to be asked, or does not answer: try again later.
    #[error("what serves the bytes cannot be reached")]
    NotReached,
    /// It wants fewer requests: try again later.
    #[error("what serves the bytes asks for fewer requests")]
    Throttled,
    /// Wrong, missing or expired credentials, or too few rights: give others.
    #[error("what serves the bytes does not accept these credentials")]
    Denied,
    /// The bucket is not there any more, and all that was in it.
    #[error("what the bytes were in is not there")]
    NoContainer,
}

impl Refusal {
    /// Every refusal, at the place of its code.
    pub const ALL: [Refusal; 18] = [
        Refusal::UnknownKey,
        Refusal::StaleEpoch,
        Refusal::Released,
        Refusal::OutOfBounds,
        Refusal::NotReadable,
        Refusal::NotWritable,
        Refusal::Late,
        Refusal::Malformed,
        Refusal::Unsupported,
        Refusal::Misaligned,
        Refusal::NoMemory,
        Refusal::NoRoom,
        Refusal::ReadOnly,
        Refusal::DeviceFailed,
        Refusal::NotReached,
        Refusal::Throttled,
        Refusal::Denied,
        Refusal::NoContainer,
    ];

    /// Its number on every wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The refusal with this number. One that only a later version knows is still a refusal: it counts as
    /// [`Refusal::Unsupported`], after which the same memory may be tried another way.
    pub fn from_code(code: u8) -> Refusal {
        Refusal::ALL
            .get(usize::from(code))
            .copied()
            .unwrap_or(Refusal::Unsupported)
    }
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
    #[error("the peer cannot be reached")]
    Unreachable,
    #[error("nobody is there: the peer's host refused the connection")]
    Refused,
    /// An error number of the operating system.
    #[error("system error {0}")]
    System(i32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_has_a_code_and_every_code_a_refusal() {
        for (place, refusal) in Refusal::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(refusal.code()), place);
            assert_eq!(Refusal::from_code(refusal.code()), refusal);
        }
        assert_eq!(Refusal::from_code(Refusal::ALL.len() as u8), Refusal::Unsupported);
        assert_eq!(Refusal::from_code(u8::MAX), Refusal::Unsupported);
    }
}
