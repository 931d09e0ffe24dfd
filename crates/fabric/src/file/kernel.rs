//! What is asked of the kernel, and by which of two means: io_uring, or plain calls on threads of its own.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::time::Duration;

use thiserror::Error;

use super::ring::Ring;
use super::worker::Worker;

/// By which means files are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Means {
    /// io_uring where there is one, else threads.
    #[default]
    Auto,
    /// A transport without io_uring does not start. File systems in user space are reached by threads all the same: see
    /// [`FileMemory::is_of_fuse`](super::FileMemory::is_of_fuse).
    Ring,
    Thread,
}

/// Why there is no io_uring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum NoRing {
    #[error("it was asked for")]
    Asked,
    #[error("switched off for this process (sysctl kernel.io_uring_disabled = {0})")]
    Disabled(u32),
    #[error("not permitted: a filter of system calls (seccomp), as container runtimes have by default")]
    Denied,
    #[error("this kernel has none")]
    Missing,
    #[error("this kernel's is too old: 5.11 is needed")]
    TooOld,
    #[error("too little memory may be locked for it (RLIMIT_MEMLOCK)")]
    MemoryLimit,
    #[error("too many descriptors are open")]
    Descriptors,
    #[error("system error {0}")]
    System(i32),
}

/// One request. Everything it points at stays until it has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask<'a> {
    pub token: u64,
    pub act: Act<'a>,
    pub file: Target,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Act<'a> {
    Read(Bytes<'a>),
    Write(Bytes<'a>),
    /// What was written lasts: the data, and what is needed to find it.
    SyncData,
    SyncAll,
    /// Within a directory.
    Rename(&'a CStr, &'a CStr),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Bytes<'a> {
    pub offset: u64,
    pub memory: &'a [libc::iovec],
    /// The memory is within this registered buffer.
    pub buffer: Option<u16>,
}

/// A descriptor, and where it is registered, if it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub fd: RawFd,
    pub slot: Option<u32>,
}

/// How a request ended: a count of bytes, or a negative error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub token: u64,
    pub result: i32,
}

/// One of the two.
#[derive(Debug)]
pub(super) enum Kernel {
    Ring(Box<Ring>),
    Thread(Worker),
}

impl Kernel {
    /// Starts what is wanted, and says why it is not io_uring, where it is not.
    pub fn start(means: Means, depth: usize, event: BorrowedFd<'_>) -> io::Result<(Kernel, Option<NoRing>)> {
        let reason = match means {
            Means::Thread => NoRing::Asked,
            Means::Auto | Means::Ring => match Ring::start(depth, event) {
                Ok(ring) => return Ok((Kernel::Ring(Box::new(ring)), None)),
                Err(reason) if means == Means::Ring => return Err(io::Error::other(reason)),
                Err(reason) => reason,
            },
        };
        Ok((Kernel::threads(event)?, Some(reason)))
    }

    pub fn threads(event: BorrowedFd<'_>) -> io::Result<Kernel> {
        let worker = Worker::start(event.as_fd().try_clone_to_owned()?)?;
        Ok(Kernel::Thread(worker))
    }

    /// Takes a request; false where it has no room now.
    ///
    /// # Safety
    /// The memory, the names and the descriptor must stay as they are until the request has ended.
    pub unsafe fn ask(&mut self, ask: Ask<'_>) -> bool {
        match self {
            // SAFETY: the caller's promise.
            Kernel::Ring(ring) => unsafe { ring.ask(ask) },
            // SAFETY: the caller's promise.
            Kernel::Thread(worker) => unsafe { worker.ask(ask) },
        }
    }

    /// Tries to end a request early. It ends in any case, and is told by [`reap`](Kernel::reap).
    pub fn cancel(&mut self, token: u64) {
        match self {
            Kernel::Ring(ring) => ring.cancel(token),
            Kernel::Thread(worker) => worker.cancel(token),
        }
    }

    /// Hands over what was asked for; false where the kernel would not take all of it yet.
    pub fn flush(&mut self) -> bool {
        match self {
            Kernel::Ring(ring) => ring.flush(),
            Kernel::Thread(_) => true,
        }
    }

    /// What has ended.
    pub fn reap(&mut self, ended: &mut Vec<Ended>) {
        match self {
            Kernel::Ring(ring) => ring.reap(ended),
            Kernel::Thread(worker) => worker.reap(ended),
        }
    }

    pub fn has_ended(&mut self) -> bool {
        match self {
            Kernel::Ring(ring) => ring.has_ended(),
            Kernel::Thread(worker) => worker.has_ended(),
        }
    }

    pub fn ring(&mut self) -> Option<&mut Ring> {
        match self {
            Kernel::Ring(ring) => Some(ring),
            Kernel::Thread(_) => None,
        }
    }
}

/// Empties the counter of an event.
pub(super) fn calm(event: BorrowedFd<'_>) {
    use std::os::fd::AsRawFd;
    let mut count = 0u64;
    // SAFETY: eight bytes are written to a live local; a counter that is empty is no error.
    unsafe { libc::read(event.as_raw_fd(), (&raw mut count).cast(), 8) };
}

/// Waits until an event comes, so long at most.
pub(super) fn wait(event: BorrowedFd<'_>, most: Duration) {
    use std::os::fd::AsRawFd;
    let mut interest = libc::pollfd {
        fd: event.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one structure, which is live.
    unsafe { libc::poll(&mut interest, 1, most.as_millis().min(60_000) as i32) };
}
