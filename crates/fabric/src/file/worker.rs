//! Plain calls on threads of its own, where there is no io_uring: each makes one request after the other.

use std::collections::VecDeque;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::kernel::{Act, Ask, Ended};
use crate::fork::NotInherited;

/// Requests that are under way at a time. One that is stuck keeps its thread; the others go on.
const THREADS: usize = 4;

/// The threads, and what they have been asked for.
#[derive(Debug)]
pub(super) struct Worker {
    desk: Arc<Desk>,
}

#[derive(Debug)]
struct Desk {
    state: Mutex<State>,
    called: Condvar,
    /// Rung whenever something has ended.
    event: NotInherited<OwnedFd>,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Job>,
    ended: Vec<Ended>,
    closed: bool,
}

#[derive(Debug)]
struct Job {
    token: u64,
    fd: RawFd,
    call: Call,
}

#[derive(Debug)]
enum Call {
    Read(u64, Vec<Stretch>),
    Write(u64, Vec<Stretch>),
    SyncData,
    SyncAll,
    Rename(CString, CString),
}

/// A stretch of memory, as the kernel wants it.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct Stretch(libc::iovec);

// SAFETY: an address and a length. Whoever asks promises that the memory is there until the request has ended.
unsafe impl Send for Stretch {}

impl Worker {
    pub fn start(event: OwnedFd) -> io::Result<Worker> {
        let desk = Arc::new(Desk {
            state: Mutex::default(),
            called: Condvar::new(),
            event: NotInherited::new(event),
        });
        let worker = Worker { desk };
        for _ in 0..THREADS {
            let desk = Arc::clone(&worker.desk);
            let thread = std::thread::Builder::new().name("weft-file".into());
            thread.spawn(move || desk.work())?;
        }
        Ok(worker)
    }

    /// # Safety
    /// As for [`Kernel::ask`](super::kernel::Kernel::ask).
    pub unsafe fn ask(&mut self, ask: Ask<'_>) -> bool {
        let stretches = |memory: &[libc::iovec]| memory.iter().copied().map(Stretch).collect();
        let call = match ask.act {
            Act::Read(bytes) => Call::Read(bytes.offset, stretches(bytes.memory)),
            Act::Write(bytes) => Call::Write(bytes.offset, stretches(bytes.memory)),
            Act::SyncData => Call::SyncData,
            Act::SyncAll => Call::SyncAll,
            Act::Rename(from, to) => Call::Rename(from.to_owned(), to.to_owned()),
        };
        self.desk.lock().waiting.push_back(Job {
            token: ask.token,
            fd: ask.file.fd,
            call,
        });
        self.desk.called.notify_one();
        true
    }

    /// What has not begun ends; what has cannot be stopped.
    pub fn cancel(&mut self, token: u64) {
        let mut state = self.desk.lock();
        if let Some(at) = state.waiting.iter().position(|job| job.token == token) {
            state.waiting.remove(at);
            let result = -libc::ECANCELED;
            state.ended.push(Ended { token, result });
            drop(state);
            self.desk.ring();
        }
    }

    pub fn reap(&mut self, ended: &mut Vec<Ended>) {
        ended.append(&mut self.desk.lock().ended);
    }

    pub fn has_ended(&mut self) -> bool {
        !self.desk.lock().ended.is_empty()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // They go by themselves, also out of a call that never ends: nobody waits for them here.
        self.desk.lock().closed = true;
        self.desk.called.notify_all();
    }
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        let one = 1u64;
        // SAFETY: eight bytes of a live local. A full counter is as good as a rung bell.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    fn work(&self) {
        loop {
            let mut state = self.lock();
            let job = loop {
                if let Some(job) = state.waiting.pop_front() {
                    break job;
                }
                if state.closed {
                    return;
                }
                state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            drop(state);
            // SAFETY: whoever asked promised that all of it is there until it has ended.
            let result = unsafe { carry_out(&job) };
            let token = job.token;
            self.lock().ended.push(Ended { token, result });
            self.ring();
        }
    }
}

/// # Safety
/// The memory of the job must be there.
unsafe fn carry_out(job: &Job) -> i32 {
    let fd = job.fd;
    let vector = |stretches: &[Stretch]| (stretches.as_ptr().cast::<libc::iovec>(), stretches.len() as i32);
    // SAFETY: the caller's promise; names end in zero, and the vectors are as long as is said.
    let result = unsafe {
        match &job.call {
            Call::Read(offset, memory) => {
                let (start, count) = vector(memory);
                libc::preadv(fd, start, count, *offset as libc::off_t)
            }
            Call::Write(offset, memory) => {
                let (start, count) = vector(memory);
                libc::pwritev(fd, start, count, *offset as libc::off_t)
            }
            Call::SyncData => libc::fdatasync(fd) as isize,
            Call::SyncAll => libc::fsync(fd) as isize,
            Call::Rename(from, to) => libc::renameat(fd, from.as_ptr(), fd, to.as_ptr()) as isize,
        }
    };
    match result {
        0.. => result as i32,
        _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}
