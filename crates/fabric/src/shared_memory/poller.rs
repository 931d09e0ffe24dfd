//! Which sockets have something for us.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use weft_protocol::PathId;

const LISTENER: u64 = u64::MAX;
/// Events taken at a time.
const EVENTS: usize = 64;

#[derive(Debug)]
pub(super) struct Poller {
    epoll: OwnedFd,
}

/// Something has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Caller,
    Path(PathId),
}

impl Poller {
    pub(super) fn new() -> io::Result<Poller> {
        // SAFETY: no preconditions.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Poller { epoll })
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(super) fn watch_listener(&self, listener: &OwnedFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, listener.as_raw_fd(), libc::EPOLLIN, LISTENER)
    }

    pub(super) fn watch(&self, path: PathId, socket: &impl AsRawFd) -> io::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLRDHUP;
        self.control(libc::EPOLL_CTL_ADD, socket.as_raw_fd(), events, path.0.into())
    }

    /// Also tells when there is room to send, or no longer does.
    pub(super) fn watch_room(&self, path: PathId, socket: &impl AsRawFd, room: bool) -> io::Result<()> {
        let events = libc::EPOLLIN | libc::EPOLLRDHUP | if room { libc::EPOLLOUT } else { 0 };
        self.control(libc::EPOLL_CTL_MOD, socket.as_raw_fd(), events, path.0.into())
    }

    /// Only tells when the other end has closed.
    pub(super) fn watch_end(&self, path: PathId, socket: &impl AsRawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, socket.as_raw_fd(), libc::EPOLLRDHUP, path.0.into())
    }

    /// Whether nothing has happened on any socket: the cheapest question that the kernel answers about a peer's life.
    pub(super) fn is_quiet(&self) -> bool {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: there is room for the one event that is asked for.
        unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), &mut event, 1, 0) == 0 }
    }

    /// What has happened by now.
    pub(super) fn events(&self) -> impl Iterator<Item = Event> + use<> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        // SAFETY: there is room for as many events as are asked for.
        let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), EVENTS as libc::c_int, 0) };
        let count = usize::try_from(count).unwrap_or(0);
        events.into_iter().take(count).map(|event| match event.u64 {
            LISTENER => Event::Caller,
            path => Event::Path(PathId(path as u32)),
        })
    }

    fn control(&self, action: libc::c_int, fd: RawFd, events: libc::c_int, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: token,
        };
        // SAFETY: the event outlives the call.
        if unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), action, fd, &mut event) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// A descriptor held only so that there is one to give up.
pub(super) fn reserve_descriptor() -> io::Result<OwnedFd> {
    Ok(File::open("/dev/null")?.into())
}
