//! What can go wrong, grouped by what the caller can do next.

use std::fmt;
use std::sync::Arc;

use thiserror::Error as ThisError;
use weft_fabric::arena::ArenaError;
use weft_fabric::cuda::GpuError;
use weft_fabric::file::FileError;
use weft_fabric::fork::Forked;
use weft_fabric::memory::MemoryError;
use weft_plan::Rank;
use weft_plan::cost::PlacementError;
use weft_plan::platform::PlatformError;
use weft_protocol::agent::{AtomicError, ConnectError, PeerError, RegionError};
use weft_protocol::group::NoQuorum;
use weft_protocol::session::{SessionError, SessionLoss};
use weft_protocol::transfer::{SubmitError, TransferError};
use weft_protocol::{Failure, LegError, Refusal};

use crate::communicator::{CallError, CollectiveFailed, DeviceCause};
use crate::hand_off::HandOffError;
use crate::observe::ObserveError;
use crate::proxy::TeamFailed;
use crate::rendezvous::RendezvousError;
use crate::settings::{SecretError, SettingsError};
use crate::store::StoreError;

impl From<FileError> for Error {
    fn from(error: FileError) -> Error {
        Error::File(Arc::new(error))
    }
}

#[cfg(feature = "s3")]
impl From<weft_fabric::object::ObjectError> for Error {
    fn from(error: weft_fabric::object::ObjectError) -> Error {
        Error::Object(Arc::new(error))
    }
}

/// Why a call did not do what it was asked to.
#[derive(Clone, Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A transfer ended without success. The error says how far it came.
    #[error(transparent)]
    Transfer(Box<TransferFailed>),
    /// An atomic operation brought no answer. The error says whether it may have been carried out.
    #[error(transparent)]
    Atomic(Box<AtomicFailed>),
    /// The session is over: connect again.
    #[error("the session with {peer:?} is over: {cause}")]
    PeerLost { peer: String, cause: SessionLoss },
    /// No session came about: check the address, the secret and the versions.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Check the spelling, or the name service.
    #[error("{address:?} is not an address, nor the name of a host that can be found: {source}")]
    NoSuchHost {
        address: String,
        source: Arc<std::io::Error>,
    },
    /// What was waited for did not happen in time: wait longer, or find out why.
    #[error("timed out waiting for {what}")]
    TimedOut { what: String },
    /// The caller is wanted elsewhere: see [`interruptible`](crate::interruptible).
    #[error("the wait was interrupted")]
    Interrupted,
    /// Too much is under way already: try again later.
    #[error("not accepted, because too much is under way: {0}")]
    Full(PeerError),
    /// The call makes no sense as it is: fix it.
    #[error(transparent)]
    Leg(#[from] LegError),
    #[error("this was not accepted: {0}")]
    Peer(PeerError),
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Memory belongs to the agent that registered it: register it with this one too.
    #[error("the memory was registered with agent {registered_with:?}, not with {used_with:?}")]
    OtherAgent { registered_with: String, used_with: String },
    #[error("{what} was refused: {refusal}")]
    Refused { what: String, refusal: Refusal },
    /// The device, or the way to it: the reason says what is missing.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A file is no place: fix the call, or make room.
    #[error(transparent)]
    File(Arc<FileError>),
    /// A bucket or an object is no place: fix the call, or what serves it.
    #[cfg(feature = "s3")]
    #[error(transparent)]
    Object(Arc<weft_fabric::object::ObjectError>),
    #[error("{name:?} cannot be borrowed: {why}")]
    NotBorrowable { name: String, why: &'static str },
    /// The owner may have changed or taken back what was borrowed: borrow it again.
    #[error("the lease is over")]
    LeaseEnded,
    /// The communicator is of no further use: shrink it.
    #[error(transparent)]
    Collective(Box<CollectiveFailed>),
    /// A call between GPUs has failed, and so has its team. What its calls were to write is anything.
    #[error("{why}")]
    Device {
        /// Who is to blame, where that is known.
        rank: Option<Rank>,
        cause: DeviceCause,
        why: String,
    },
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the ranks that are left of {group:?} have gone on without this one")]
    LeftOut { group: String },
    /// Others may go on elsewhere: find out why they are out of reach, or shrink without a quorum.
    #[error("what is left of {group:?} does not go on: {short}")]
    NoQuorum { group: String, short: NoQuorum },
    #[error("no group came about: {0}")]
    Formation(String),
    /// Ranks that count with different costs would choose different algorithms: give all of them the same platform file.
    #[error("rank {} goes by the platform {theirs}, and this one by {ours}", rank.0)]
    DifferentPlatforms { rank: Rank, theirs: String, ours: String },
    /// The platform file says too little for this group.
    #[error(transparent)]
    Placement(#[from] PlacementError),
    #[error("{} is not a platform file: {source}", path.display())]
    Platform {
        path: std::path::PathBuf,
        source: Arc<PlatformError>,
    },
    #[error(transparent)]
    Arena(#[from] Arc<ArenaError>),
    /// Something about a store: fix the call, or its directory.
    #[error(transparent)]
    Store(#[from] Box<StoreError>),
    /// Something about hand-offs: the call, the cache or the ticket is wrong.
    #[error(transparent)]
    HandOff(#[from] Box<HandOffError>),
    /// The team of kernels is of no further use: make another.
    #[error(transparent)]
    Team(Box<TeamFailed>),
    #[error("no rendezvous is set, so {name:?} cannot be looked up: set `rendezvous`, or connect by address")]
    NoRendezvous { name: String },
    /// A peer is frozen inside the memory: the memory must stay as it is until the peer goes on or is gone.
    #[error("a peer is still inside the region after {waited:?}; it is revoked, but its memory must not be reused yet")]
    StillInUse { waited: std::time::Duration },
    #[error(transparent)]
    Settings(#[from] Arc<SettingsError>),
    #[error(transparent)]
    Secret(#[from] Arc<SecretError>),
    #[error(transparent)]
    Rendezvous(#[from] Arc<RendezvousError>),
    #[error(transparent)]
    Observe(#[from] Arc<ObserveError>),
    #[error(transparent)]
    Memory(#[from] Arc<MemoryError>),
    #[error("transport {transport} did not start: {source}")]
    Transport {
        transport: &'static str,
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    #[error("cannot read {}: {source}", path.display())]
    Certificate {
        path: std::path::PathBuf,
        source: Arc<rustls_pki_types::pem::Error>,
    },
    #[error("{step} failed: {source}")]
    System {
        step: &'static str,
        source: Arc<std::io::Error>,
    },
    /// The agent has been stopped. An atomic operation that was under way may have been carried out.
    #[error("the agent has been stopped")]
    Stopped,
    /// What the call is about was made before a fork, by the parent of this process: make an agent after the fork, or do not fork. An atomic
    /// operation that the parent has asked for may have been carried out.
    #[error(transparent)]
    Forked(#[from] Forked),
}

/// A transfer that ended without success: with whom, over what, how far it came, and why.
#[derive(Clone, Debug)]
pub struct TransferFailed {
    pub peer: String,
    pub error: TransferError,
}

impl TransferFailed {
    pub(crate) fn new(peer: &str, error: TransferError) -> TransferFailed {
        TransferFailed {
            peer: peer.to_owned(),
            error,
        }
    }
    pub fn cause(&self) -> Failure {
        self.error.cause
    }
}

impl fmt::Display for TransferFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TransferError {
            cause,
            transport,
            bytes_done,
            bytes_total,
            ..
        } = &self.error;
        write!(
            f,
            "transfer with {:?} over {transport} failed after {bytes_done} of {bytes_total} bytes: {cause}",
            self.peer
        )
    }
}

impl std::error::Error for TransferFailed {}

/// An atomic operation that brought no answer: with whom, over what, why, and what is known of it.
#[derive(Clone, Debug)]
pub struct AtomicFailed {
    pub peer: String,
    pub error: AtomicError,
}

impl AtomicFailed {
    pub(crate) fn new(peer: &str, error: AtomicError) -> AtomicFailed {
        AtomicFailed {
            peer: peer.to_owned(),
            error,
        }
    }
    pub fn cause(&self) -> Failure {
        self.error.cause
    }
}

impl fmt::Display for AtomicFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "atomic operation with {:?} failed: {}", self.peer, self.error)
    }
}

impl std::error::Error for AtomicFailed {}

impl Error {
    pub(crate) fn system(step: &'static str) -> impl FnOnce(std::io::Error) -> Error {
        move |source| Error::System {
            step,
            source: Arc::new(source),
        }
    }

    /// Whether an atomic operation that ended like this may have been carried out. Otherwise it certainly has not been.
    pub fn may_have_happened(&self) -> bool {
        match self {
            Error::Atomic(failed) => failed.error.may_have_happened,
            Error::Stopped | Error::Forked(_) => true,
            _ => false,
        }
    }

    /// The number that the operating system gave, which lies at the bottom of the error.
    pub fn os_error(&self) -> Option<i32> {
        let mut source = match self {
            Error::System { source, .. } => return source.raw_os_error(),
            other => std::error::Error::source(other),
        };
        while let Some(error) = source {
            if let Some(error) = error.downcast_ref::<std::io::Error>() {
                return error.raw_os_error();
            }
            source = error.source();
        }
        None
    }

    /// Why a transfer or an atomic operation failed, where that is what this is.
    pub fn failure(&self) -> Option<Failure> {
        match self {
            Error::Transfer(failed) => Some(failed.error.cause),
            Error::Atomic(failed) => Some(failed.error.cause),
            _ => None,
        }
    }
}

impl From<TransferFailed> for Error {
    fn from(failed: TransferFailed) -> Error {
        Error::Transfer(Box::new(failed))
    }
}

impl From<AtomicFailed> for Error {
    fn from(failed: AtomicFailed) -> Error {
        Error::Atomic(Box::new(failed))
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Error {
        Error::Store(Box::new(error))
    }
}

impl From<HandOffError> for Error {
    fn from(error: HandOffError) -> Error {
        Error::HandOff(Box::new(error))
    }
}

impl From<CollectiveFailed> for Error {
    fn from(failed: CollectiveFailed) -> Error {
        Error::Collective(Box::new(failed))
    }
}

impl From<RendezvousError> for Error {
    fn from(error: RendezvousError) -> Error {
        match error {
            RendezvousError::Interrupted => Error::Interrupted,
            other => Error::Rendezvous(Arc::new(other)),
        }
    }
}

impl From<PeerError> for Error {
    fn from(error: PeerError) -> Error {
        match error {
            PeerError::Session(SessionError::QueueFull)
            | PeerError::Submit(
                SubmitError::TooManyTransfers | SubmitError::TooManyAnnounced | SubmitError::TooManyAtomics,
            ) => Error::Full(error),
            other => Error::Peer(other),
        }
    }
}

macro_rules! shared_source {
    ($($source:ty => $variant:ident),*) => {$(
        impl From<$source> for Error {
            fn from(source: $source) -> Error {
                Error::$variant(Arc::new(source))
            }
        }
    )*};
}

// Errors are cloned to every handle that waits, and these sources hold an io::Error, which cannot be.
shared_source!(SettingsError => Settings, SecretError => Secret, MemoryError => Memory, ObserveError => Observe,
    ArenaError => Arena);
