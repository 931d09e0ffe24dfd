//! One io_uring.
//!
//! Whoever turns an agent submits, and that is any of several threads, one after the other. So the ring is not that of a single issuer
//! (`IORING_SETUP_SINGLE_ISSUER`), and cannot defer completions to it (`DEFER_TASKRUN`): the kernel would refuse the second thread, and completions would wait
//! for the first to come back. A thread of the ring's own could have both, at the price of two hand-overs for each request.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::kernel::{Act, Ask, Bytes, Ended, NoRing};
use crate::fork::NotInherited;

/// Files that can be registered; more are reached by their descriptors.
const FILES_MAX: u32 = 512;
/// Memory that can be registered, as pieces.
const BUFFERS_MAX: u32 = 128;
/// The kernel registers no larger one.
const BUFFER_BYTES_MAX: u64 = 1 << 30;
/// What a cancel is told by.
const OF_A_CANCEL: u64 = u64::MAX;

/// A request as the kernel wants it. Files that are registered and those that are not are of two types, which share no trait that can be named.
macro_rules! entry {
    ($act:expr, $file:expr, $fd:expr) => {
        match $act {
            Act::Read(Bytes {
                offset,
                memory: [memory],
                buffer,
            }) => {
                let (start, len) = (memory.iov_base.cast(), memory.iov_len as u32);
                match buffer {
                    Some(buffer) => opcode::ReadFixed::new($file, start, len, buffer).offset(offset).build(),
                    None => opcode::Read::new($file, start, len).offset(offset).build(),
                }
            }
            Act::Write(Bytes {
                offset,
                memory: [memory],
                buffer,
            }) => {
                let (start, len) = (memory.iov_base.cast(), memory.iov_len as u32);
                match buffer {
                    Some(buffer) => opcode::WriteFixed::new($file, start, len, buffer)
                        .offset(offset)
                        .build(),
                    None => opcode::Write::new($file, start, len).offset(offset).build(),
                }
            }
            Act::Read(Bytes { offset, memory, .. }) => opcode::Readv::new($file, memory.as_ptr(), memory.len() as u32)
                .offset(offset)
                .build(),
            Act::Write(Bytes { offset, memory, .. }) => {
                opcode::Writev::new($file, memory.as_ptr(), memory.len() as u32)
                    .offset(offset)
                    .build()
            }
            Act::SyncData => opcode::Fsync::new($file).flags(types::FsyncFlags::DATASYNC).build(),
            Act::SyncAll => opcode::Fsync::new($file).build(),
            Act::Rename(from, to) => {
                let directory = types::Fd($fd);
                opcode::RenameAt::new(directory, from.as_ptr(), directory, to.as_ptr()).build()
            }
        }
    };
}

pub(super) struct Ring {
    ring: NotInherited<IoUring>,
    /// Which places among the registered files are taken; empty where none can be registered.
    files: Vec<bool>,
    buffers: Vec<bool>,
    /// Cancels that have not been told of: each takes a place among the completions.
    cancels: usize,
    unsubmitted: bool,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({})", self.ring.as_raw_fd())
    }
}

impl Ring {
    pub fn start(depth: usize, event: BorrowedFd<'_>) -> Result<Ring, NoRing> {
        let entries = (depth as u32).next_power_of_two().clamp(8, 4096);
        let build = || {
            let mut builder = IoUring::builder();
            // A cancel for every request, and what is asked for meanwhile.
            builder.setup_clamp().setup_cqsize(4 * entries).dontfork();
            builder.build(entries)
        };
        let ring = NotInherited::open(build).map_err(no_ring)?;
        let mut probe = Probe::new();
        ring.submitter()
            .register_probe(&mut probe)
            .map_err(|_| NoRing::TooOld)?;
        if !probe.is_supported(opcode::RenameAt::CODE) {
            return Err(NoRing::TooOld);
        }
        let mut ring = Ring {
            ring,
            files: Vec::new(),
            buffers: Vec::new(),
            cancels: 0,
            unsubmitted: false,
        };
        ring.try_out()?;
        let submitter = ring.ring.submitter();
        submitter.register_eventfd(event.as_raw_fd()).map_err(no_ring)?;
        let files = submitter.register_files(&[-1; FILES_MAX as usize]).is_ok();
        let buffers = submitter.register_buffers_sparse(BUFFERS_MAX).is_ok();
        ring.files = vec![false; if files { FILES_MAX as usize } else { 0 }];
        ring.buffers = vec![false; if buffers { BUFFERS_MAX as usize } else { 0 }];
        Ok(ring)
    }

    /// Rings can be made in places where they cannot be used.
    fn try_out(&mut self) -> Result<(), NoRing> {
        let nothing = opcode::Nop::new().build().user_data(OF_A_CANCEL);
        // SAFETY: it refers to no memory.
        let pushed = unsafe { self.push(&nothing) };
        pushed.then_some(()).ok_or(NoRing::System(libc::EBUSY))?;
        loop {
            match self.ring.submitter().submit_and_wait(1) {
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                other => break other.map(drop).map_err(no_ring)?,
            }
        }
        self.cancels += 1;
        self.reap(&mut Vec::new());
        Ok(())
    }

    /// # Safety
    /// What the entry points at must stay until it has ended.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: nobody else has this ring, and this one submits in one thread at a time.
        let mut queue = unsafe { self.ring.submission_shared() };
        // SAFETY: the caller's promise.
        if unsafe { queue.push(entry) }.is_ok() {
            drop(queue);
            self.unsubmitted = true;
            return true;
        }
        false
    }

    /// # Safety
    /// As for [`Kernel::ask`](super::kernel::Kernel::ask).
    pub unsafe fn ask(&mut self, ask: Ask<'_>) -> bool {
        let entry = match ask.file.slot {
            Some(slot) => entry!(ask.act, types::Fixed(slot), ask.file.fd),
            None => entry!(ask.act, types::Fd(ask.file.fd), ask.file.fd),
        };
        let entry = entry.user_data(ask.token);
        // SAFETY: the caller's promise.
        unsafe { self.push(&entry) || self.flush() && self.push(&entry) }
    }

    pub fn cancel(&mut self, token: u64) {
        let entry = opcode::AsyncCancel::new(token).build().user_data(OF_A_CANCEL);
        // SAFETY: it refers to no memory.
        if unsafe { self.push(&entry) || self.flush() && self.push(&entry) } {
            self.cancels += 1;
        }
    }

    pub fn flush(&mut self) -> bool {
        if !self.unsubmitted {
            return true;
        }
        // What cannot be taken now (EAGAIN, EBUSY, EINTR) stays where it is, and is offered again.
        let _ = self.ring.submitter().submit();
        // SAFETY: as in `push`.
        self.unsubmitted = !unsafe { self.ring.submission_shared() }.is_empty();
        !self.unsubmitted
    }

    pub fn reap(&mut self, ended: &mut Vec<Ended>) {
        // SAFETY: nobody else has this ring.
        let queue = unsafe { self.ring.completion_shared() };
        for entry in queue {
            match entry.user_data() {
                OF_A_CANCEL => self.cancels -= 1,
                token => ended.push(Ended {
                    token,
                    result: entry.result(),
                }),
            }
        }
    }

    pub fn has_ended(&mut self) -> bool {
        // SAFETY: as in `reap`.
        !unsafe { self.ring.completion_shared() }.is_empty()
    }

    /// Registers a file, where there is a place for it.
    pub fn add_file(&mut self, fd: RawFd) -> Option<u32> {
        let slot = self.files.iter().position(|taken| !taken)?;
        let updated = self.ring.submitter().register_files_update(slot as u32, &[fd]);
        self.files[slot] = matches!(updated, Ok(1));
        self.files[slot].then_some(slot as u32)
    }

    pub fn remove_file(&mut self, slot: u32) {
        // Where it fails the kernel keeps the file open, and the place is taken.
        let updated = self.ring.submitter().register_files_update(slot, &[-1]);
        self.files[slot as usize] = !matches!(updated, Ok(1));
    }

    /// Registers memory, which is then pinned. `Err` is the system's error.
    ///
    /// # Safety
    /// The memory must be there until it is removed again.
    pub unsafe fn add_buffer(&mut self, address: *mut u8, len: u64) -> Result<u16, i32> {
        if len == 0 || len > BUFFER_BYTES_MAX {
            return Err(libc::EINVAL);
        }
        let slot = self.buffers.iter().position(|taken| !taken).ok_or(libc::ENOSPC)?;
        let memory = libc::iovec {
            iov_base: address.cast(),
            iov_len: len as usize,
        };
        // SAFETY: the caller's promise.
        let added = unsafe {
            self.ring
                .submitter()
                .register_buffers_update(slot as u32, &[memory], None)
        };
        added.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        self.buffers[slot] = true;
        Ok(slot as u16)
    }

    pub fn remove_buffer(&mut self, slot: u16) {
        let nothing = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        // SAFETY: an empty place refers to no memory.
        let removed = unsafe {
            self.ring
                .submitter()
                .register_buffers_update(slot.into(), &[nothing], None)
        };
        self.buffers[slot as usize] = removed.is_err();
    }
}

fn no_ring(error: io::Error) -> NoRing {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => NoRing::Missing,
        Some(libc::EPERM | libc::EACCES) => match disabled() {
            0 => NoRing::Denied,
            how => NoRing::Disabled(how),
        },
        Some(libc::ENOMEM) => NoRing::MemoryLimit,
        Some(libc::EMFILE | libc::ENFILE) => NoRing::Descriptors,
        other => NoRing::System(other.unwrap_or(0)),
    }
}

fn disabled() -> u32 {
    let told = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    told.ok().and_then(|told| told.trim().parse().ok()).unwrap_or(0)
}
