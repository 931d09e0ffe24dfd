//! The rail as something to sleep on. The device is asked to wake a sleeper only when there is going to be one.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use weft_plan::Time;
use weft_protocol::Progress;

use super::Verbs;
use crate::Live;
use crate::bell::new_epoll;
use crate::fork::NotInherited;

impl Live for Verbs {
    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn next_timeout(&self) -> Option<Time> {
        if !self.ready.is_empty() {
            return Some(Time::ZERO);
        }
        Some(self.next_due()).filter(|due| *due != Time::MAX)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.counters.by_name()
    }

    fn arm(&mut self) -> Progress {
        if self.armed {
            // Somebody may have been woken, or have come back for another reason while the device was telling.
            let told = self.completions.acknowledge();
            self.counters.wakeups += u64::from(told);
            self.armed = told == 0;
        }
        if !self.armed && !self.gone {
            self.completions.arm();
            self.counters.arms += 1;
            self.armed = true;
        }
        self.setup.hush();
        let now = self.clock.now();
        self.look_at_events(now);
        // What had come before the device was asked wakes nobody.
        if self.turn(now) || !self.ready.is_empty() {
            self.slept_until = Time::ZERO;
            return Progress::Busy;
        }
        self.slept_until = self.earliest;
        Progress::Idle
    }
}

/// A descriptor that is readable whenever one of these is.
pub(super) fn watch<const N: usize>(watched: [BorrowedFd<'_>; N]) -> io::Result<NotInherited<OwnedFd>> {
    let epoll = new_epoll()?;
    for fd in watched {
        let mut interest = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: fd.as_raw_fd() as u64,
        };
        // SAFETY: `interest` is valid for the call and both descriptors are open.
        if unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut interest) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(epoll)
}

/// Takes a descriptor out that would be readable for ever.
pub(super) fn unwatch(epoll: &OwnedFd, watched: BorrowedFd<'_>) {
    // SAFETY: both descriptors are open, and no event is passed. That it is not there any more is as good.
    unsafe {
        libc::epoll_ctl(
            epoll.as_raw_fd(),
            libc::EPOLL_CTL_DEL,
            watched.as_raw_fd(),
            std::ptr::null_mut(),
        )
    };
}
