//! Threads and handles over the pure code: the API that people call.
#![forbid(unsafe_code)]

mod agent;
mod atomic;
mod borrow;
mod communicator;
pub mod conversion;
mod driver;
mod ending;
mod error;
pub mod hand_off;
pub mod harness;
mod interrupt;
pub mod matched;
mod memory;
#[cfg(feature = "s3")]
mod objects;
pub mod observe;
mod peer;
pub mod proxy;
pub mod rendezvous;
mod report;
mod seal;
pub mod settings;
pub mod store;
mod transfer;
mod transports;

pub use agent::{Agent, AgentBuilder, Arrival, Notification, RailCounters};
pub use atomic::{AtomicBuilder, AtomicOperation};
pub use borrow::Borrowed;
pub use communicator::{
    Call, CallError, CollectiveFailed, Communicator, DeviceCause, DeviceTeam, DeviceTeamOptions, JoinOptions, Member,
    NoTeam, Operator, Part, Pending, QuantizedOptions, Schedule, ShrinkOptions, Symmetric, Way,
};
pub use driver::Turns;
pub use error::{AtomicFailed, Error, TransferFailed};
pub use interrupt::interruptible;
pub use memory::Memory;
#[cfg(feature = "s3")]
pub use objects::bucket_options;
pub use peer::{CopyBuilder, Peer, Prepared, Remote, TransferBuilder};
pub use seal::Seal;
pub use transfer::Transfer;
pub use weft_fabric::cuda as gpu;
pub use weft_fabric::cuda::{
    AfterStream, Device, DeviceMemory, GpuError, Launch, Module, Stream, StreamEvent, TeamView,
};
pub use weft_fabric::file::{Direct, FileError, FileMemory, FileOptions};
pub use weft_fabric::fork;
pub use weft_fabric::memory::{DmaBufMemory, HostMemory};
#[cfg(feature = "s3")]
pub use weft_fabric::object::{Bucket, BucketOptions, ObjectError, ObjectMemory, ObjectOptions};
pub use weft_plan::algorithms::Algorithm;
pub use weft_plan::cost::{Candidate, UnknownCandidate};
pub use weft_plan::datatype::UnknownDatatype;
pub use weft_plan::datatype::quantized;
pub use weft_plan::kv::{KvLayout, KvShape};
pub use weft_plan::pages;
pub use weft_plan::schedule::encode::DecodeError;
pub use weft_plan::{Bytes, Datatype, Place, Rank, Reduction, Run, Span, Spans, Time};
pub use weft_protocol::agent::{AtomicError, ConnectError, PeerError, RegionError};
pub use weft_protocol::group::{Cause, Function, NoQuorum, Quorum};
pub use weft_protocol::memory::Digest;
pub use weft_protocol::region::{Access, Epoch, RemoteRegion};
pub use weft_protocol::session::{SealError, SessionError, SessionLoss};
pub use weft_protocol::transfer::{SubmitError, Summary, TransferError};
pub use weft_protocol::{Direction, Failure, Flag, LegError, Loss, Ready, Refusal};
