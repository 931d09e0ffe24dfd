//! The real transports and the memory they touch. No policy lives here: what moves, when and over which path is decided above.

pub mod clock;
pub mod copy;
pub mod memory;
pub mod registration;
pub mod shared_memory;

use std::os::fd::BorrowedFd;

use weft_plan::Time;
use weft_protocol::Transport;

pub use clock::Clock;
pub use memory::HostMemory;
pub use registration::RegistrationCache;
pub use shared_memory::{SharedMemory, SharedMemoryOptions};

/// A transport that a thread can sleep on.
pub trait Live: Transport {
    /// Readable whenever [`Transport::poll`] has something to do.
    fn wake_fd(&self) -> BorrowedFd<'_>;
    /// When [`Transport::poll`] must be called even if the descriptor stays silent.
    fn next_timeout(&self) -> Option<Time>;
}
