//! The real transports and the memory they touch. No policy lives here: what moves, when and over which path is decided above.

pub mod arena;
pub mod bell;
pub mod calibrate;
pub mod clock;
pub mod conversion;
pub mod copy;
pub mod cpu;
pub mod crowd;
pub mod cuda;
pub mod discover;
mod far_clock;
pub mod file;
pub mod fork;
pub mod harness;
mod here;
pub mod kernels;
pub mod memory;
#[cfg(feature = "s3")]
pub mod object;
pub mod reduce;
pub mod shared_memory;
mod sync;
pub mod tcp;
pub mod verbs;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use weft_plan::{LinkCost, Platform, Time};
use weft_protocol::{Failure, PathId, Progress, Refusal, RegionKey, Transport};

pub use clock::Clock;
pub use file::{FileHere, FileHereOptions, FileMemory, FileOptions};
pub use memory::{HostMemory, Seen};
pub use shared_memory::{SharedMemory, SharedMemoryOptions};

/// What a transport is taken to cost where nobody has measured it.
fn cost_unmeasured(transport: &str) -> LinkCost {
    Platform::laptop().transports[transport]
}

/// A transport that a thread can sleep on.
pub trait Live: Transport {
    /// Readable whenever [`Transport::poll`] has something to do.
    fn wake_fd(&self) -> BorrowedFd<'_>;
    /// When [`Transport::poll`] must be called even if the descriptor stays silent.
    fn next_timeout(&self) -> Option<Time>;
    /// What it has done since it started, by name; nothing where it does not count.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    /// Says that somebody is about to sleep on the descriptor. [`Progress::Busy`]: something came in meanwhile; poll instead.
    ///
    /// For transports that must ask to be woken, which is worth nothing to a thread that never sleeps.
    fn arm(&mut self) -> Progress {
        Progress::Idle
    }
    /// A peer's region where it lies, read-only and without a copy. `None` until the peer has answered: ask again.
    fn borrow(&mut self, path: PathId, key: &RegionKey) -> Result<Option<Arc<dyn Seen>>, Failure> {
        let _ = (path, key);
        Err(Refusal::Unsupported.into())
    }
}
