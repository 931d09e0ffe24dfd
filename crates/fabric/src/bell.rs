//! What a progress thread sleeps on: the transports' descriptors, and one that any thread can ring.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::fork::NotInherited;

/// A descriptor that is never readable, for a transport that nothing wakes.
pub(crate) fn silent() -> io::Result<NotInherited<OwnedFd>> {
    // SAFETY: a system call without pointers; what it returns is checked before it is owned.
    NotInherited::open(|| unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) })
}

/// Sleep until a transport has something to do, or somebody rings.
#[derive(Debug)]
pub struct Bell {
    epoll: NotInherited<OwnedFd>,
    event: NotInherited<OwnedFd>,
}

/// Readable while it has been rung, or something that it watches is ready, for whoever polls many such things.
impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Bell {
    /// Watches these descriptors until it is dropped.
    pub fn new<'a>(watched: impl Iterator<Item = BorrowedFd<'a>>) -> io::Result<Bell> {
        let epoll = new_epoll()?;
        // SAFETY: a system call without pointers; what it returns is checked before it is owned.
        let event = NotInherited::open(|| unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) })?;
        let bell = Bell { epoll, event };
        bell.watch(bell.event.as_fd())?;
        for fd in watched {
            bell.watch(fd)?;
        }
        Ok(bell)
    }

    /// Watches one more descriptor, until that is closed or the bell is dropped.
    pub fn watch(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let mut interest = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: fd.as_raw_fd() as u64,
        };
        let (epoll, fd) = (self.epoll.as_raw_fd(), fd.as_raw_fd());
        // SAFETY: `interest` is valid for the call and both descriptors are open.
        if unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &mut interest) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Wakes whoever sleeps, or keeps the next one from falling asleep.
    pub fn ring(&self) {
        let one = 1u64;
        // SAFETY: eight bytes are read from a live local. A full counter is as good as a rung bell, so the result is not needed.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Sleeps until something happens, or for `most`; tells whether somebody rang.
    pub fn sleep(&self, most: Option<Duration>) -> bool {
        let timeout = most.map(|most| libc::timespec {
            tv_sec: most.as_secs().min(i32::MAX as u64) as libc::time_t,
            tv_nsec: most.subsec_nanos().into(),
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
        // SAFETY: the array holds as many events as the call is told; the timeout is null or points at a live local.
        let woken = unsafe {
            libc::epoll_pwait2(
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                events.len() as i32,
                timeout,
                std::ptr::null(),
            )
        };
        let rung = |event: &libc::epoll_event| event.u64 == self.event.as_raw_fd() as u64;
        if !events.iter().take(woken.max(0) as usize).any(rung) {
            return false;
        }
        let mut count = 0u64;
        // SAFETY: eight bytes are written to a live local. An empty counter is no error: somebody else has read it.
        unsafe { libc::read(self.event.as_raw_fd(), (&raw mut count).cast(), 8) };
        true
    }
}

/// Something that watches descriptors, and is one itself.
pub(crate) fn new_epoll() -> io::Result<NotInherited<OwnedFd>> {
    // SAFETY: a system call without pointers; what it returns is checked before it is owned.
    NotInherited::open(|| unsafe { owned(libc::epoll_create1(libc::EPOLL_CLOEXEC)) })
}

/// # Safety
/// `fd` must be a descriptor that nobody else owns, or negative.
unsafe fn owned(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller hands over a fresh descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_heard_once_also_before_the_sleep() {
        let bell = Bell::new(std::iter::empty()).unwrap();
        assert!(!bell.sleep(Some(Duration::ZERO)));
        bell.ring();
        bell.ring();
        assert!(bell.sleep(None));
        assert!(!bell.sleep(Some(Duration::ZERO)));
    }
}
