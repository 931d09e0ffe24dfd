//! Why a transfer did not happen, and how much of it did.

use std::ops::Range;

use thiserror::Error;

use super::PeerId;
use crate::error::{Failure, Loss};

/// Bytes of one leg of a request, the legs counted from zero.
pub type LegRange = (usize, Range<u64>);

/// A transfer that ended without success. Nothing of it is open any more.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{cause}, over {transport}, after {bytes_done} of {bytes_total} bytes")]
pub struct TransferError {
    pub peer: PeerId,
    pub cause: Failure,
    /// The last setback of a part before the cause, where there was one: why a transfer that expired had not got further.
    pub setback: Option<Failure>,
    /// The transport of the part that failed, else the one that would have carried the next part, else `none`.
    pub transport: &'static str,
    pub bytes_done: u64,
    pub bytes_total: u64,
    /// What has been moved: for a read it is in place, for a write it is at the peer.
    pub done: Vec<LegRange>,
    /// What has not been moved, or only in part.
    pub undone: Vec<LegRange>,
}

/// A transfer that was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    #[error("as many transfers as the limits allow are under way; wait for one to end")]
    TooManyTransfers,
    #[error("as many transfers that are told to one peer as it can keep apart are under way; wait for one to end")]
    TooManyAnnounced,
    #[error("as many atomic operations as one peer may have open are under way; wait for one to end")]
    TooManyAtomics,
    #[error("more than 2^64 bytes")]
    TooLarge,
    #[error("the peer is gone: {0}")]
    PeerGone(Loss),
}
