//! The real transports and the memory they touch. No policy lives here: what moves, when and over which path is decided above.

pub mod clock;
pub mod copy;
pub mod memory;

use std::os::fd::BorrowedFd;

use weft_plan::Time;
use weft_protocol::Transport;

pub use clock::Clock;
pub use memory::HostMemory;

/// A transport that a thread can sleep on.
pub trait Live: Transport {
    /// Readable whenever [`Transport::poll`] has something to do.
    fn wake_fd(&self) -> BorrowedFd<'_>;
    /// When [`Transport::poll`] must be called even if the descriptor stays silent.
    fn next_timeout(&self) -> Option<Time>;
}
