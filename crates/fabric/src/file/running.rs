//! An operation that has been accepted, and what of it the kernel has.

use std::sync::Arc;

use weft_plan::Time;
use weft_protocol::{Direction, Failure, Memory, Move, OpId, PathId, Refusal, RegionKey};

use super::layout::{Layout, Request};
use super::place::FileMemory;
use crate::memory::HostMemory;

/// No operation has this number.
pub(super) const NOBODY: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct Running {
    pub path: PathId,
    pub id: OpId,
    pub deadline: Time,
    pub work: Work,
    pub uses: [RegionKey; 2],
    /// Requests that the kernel has, or is to be given again.
    pub open: u32,
    /// Nothing more of it is begun, and this is why.
    pub ending: Option<Failure>,
    /// Not all that was begun came to its end.
    pub incomplete: bool,
}

#[derive(Debug)]
pub(super) enum Work {
    Move(Box<Moving>),
    Commit(Committing),
}

#[derive(Debug)]
pub(super) struct Moving {
    pub part: Move,
    pub file: Arc<dyn Memory>,
    pub host: Arc<dyn Memory>,
    pub file_is_far: bool,
    pub layout: Layout,
    /// The next request to begin.
    pub next: usize,
    /// Where the host's memory is registered with the ring.
    pub buffer: Option<u16>,
    /// The checksum of the memory when it was handed over.
    pub handed_over: Option<u64>,
}

impl Moving {
    pub fn to_file(&self) -> bool {
        (self.part.direction == Direction::Write) == self.file_is_far
    }

    pub fn file(&self) -> &FileMemory {
        file_of(&*self.file).expect("looked at when it was accepted")
    }

    pub fn host(&self) -> &HostMemory {
        let host = self.host.as_any().downcast_ref();
        host.expect("looked at when it was accepted")
    }

    /// The checksum of the host's bytes, in the order of the leg.
    pub fn sum(&self) -> Result<u64, Refusal> {
        let (leg, range) = (&self.part.leg, self.part.range.clone());
        match self.file_is_far {
            true => self.host.sum(leg.local_spans().pieces(range)),
            false => self.host.sum(leg.remote_spans().pieces(range)),
        }
    }
}

/// A commit, step by step.
#[derive(Debug)]
pub(super) struct Committing {
    pub file: Arc<dyn Memory>,
    /// The next step; none once all have been begun.
    pub next: Option<Step>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Data,
    Name,
    Directory,
}

impl Committing {
    pub fn file(&self) -> &FileMemory {
        file_of(&*self.file).expect("looked at when it was accepted")
    }

    /// What comes after a step.
    pub fn after(&self, step: Step) -> Option<Step> {
        let naming = self.file().naming()?;
        match step {
            Step::Data if !naming.is_taken() => Some(Step::Name),
            Step::Data => (!naming.is_lasting()).then_some(Step::Directory),
            Step::Name => Some(Step::Directory),
            Step::Directory => None,
        }
    }
}

impl Running {
    pub fn uses(&self, key: &RegionKey) -> bool {
        self.uses.contains(key)
    }

    /// Whether its file must not be reached through the page cache.
    pub fn is_only_direct(&self) -> bool {
        matches!(&self.work, Work::Move(moving) if moving.file().is_only_direct())
    }

    /// Whether something of it is left to begin.
    pub fn has_more(&self) -> bool {
        self.ending.is_none()
            && match &self.work {
                Work::Move(moving) => moving.next < moving.layout.requests.len(),
                Work::Commit(commit) => commit.next.is_some(),
            }
    }
}

/// A request that the kernel has.
#[derive(Debug)]
pub(super) struct Flight {
    /// Whose it is; nobody's once its operation has ended without it.
    pub of: u64,
    pub act: Flown,
    pub request: Request,
    /// Bytes of it that have moved.
    pub done: u64,
    pub past: bool,
    pub staging: Option<u16>,
    pub buffer: Option<u16>,
    pub memory: Vec<libc::iovec>,
    /// The first piece of memory that is not done.
    pub first: usize,
    pub retries: u8,
    pub is_asked_to_stop: bool,
    /// It went to the threads although there is a ring.
    pub by_threads: bool,
    /// What must stay open although its operation has ended.
    pub keeps: Option<Arc<dyn Memory>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flown {
    Read,
    Write,
    Commit(Step),
}

// SAFETY: the addresses are of memory that registered regions, or the transport itself, keep; no thread is bound to it.
unsafe impl Send for Flight {}

impl Default for Flight {
    fn default() -> Flight {
        Flight {
            of: NOBODY,
            act: Flown::Read,
            request: Request::default(),
            done: 0,
            past: false,
            staging: None,
            buffer: None,
            memory: Vec::new(),
            first: 0,
            retries: 0,
            is_asked_to_stop: false,
            by_threads: false,
            keeps: None,
        }
    }
}

impl Flight {
    /// Leaves out what has moved.
    pub fn advance(&mut self, mut bytes: u64) {
        self.done += bytes;
        while let Some(piece) = self.memory.get_mut(self.first)
            && bytes > 0
        {
            let step = bytes.min(piece.iov_len as u64);
            piece.iov_base = piece.iov_base.cast::<u8>().wrapping_add(step as usize).cast();
            piece.iov_len -= step as usize;
            bytes -= step;
            if piece.iov_len == 0 {
                self.first += 1;
            }
        }
    }
}

pub(super) fn file_of(memory: &dyn Memory) -> Option<&FileMemory> {
    memory.as_any().downcast_ref()
}

/// What an error of the system means for whoever asked.
pub(super) fn refusal(error: i32) -> Refusal {
    match error {
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Refusal::NoRoom,
        libc::EROFS | libc::EPERM | libc::EACCES => Refusal::ReadOnly,
        // The memory, or the file, has gone.
        libc::EFAULT | libc::ESTALE | libc::ENOENT | libc::ENOTDIR => Refusal::NoMemory,
        _ => Refusal::DeviceFailed,
    }
}
