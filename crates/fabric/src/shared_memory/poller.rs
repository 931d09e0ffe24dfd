//! Which sockets have something for us.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use weft_protocol::PathId;

use crate::bell::new_epoll;
use crate::fork::NotInherited;

const LISTENER: u64 = u64::MAX;
/// Beside the number of a path: it is the peer's process that something has happened to.
const PROCESS: u64 = 1 << 32;
/// Events taken at a time.
const EVENTS: usize = 64;

#[derive(Debug)]
pub(super) struct Poller {
    epoll: NotInherited<OwnedFd>,
}

/// Something has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Caller,
    Path(PathId),
    /// The peer's process has ended.
    Ended(PathId),
}

impl Poller {
    pub(super) fn new() -> io::Result<Poller> {
        Ok(Poller { epoll: new_epoll()? })
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(super) fn watch_listener(&self, listener: &impl AsRawFd) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, listener.as_raw_fd(), libc::EPOLLIN, LISTENER)
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

    /// What has happened by now.
    pub(super) fn events(&self) -> impl Iterator<Item = Event> + use<> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        // SAFETY: there is room for as many events as are asked for.
        let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), EVENTS as libc::c_int, 0) };
        let count = usize::try_from(count).unwrap_or(0);
        let tokens = events.into_iter().take(count).map(|event| event.u64);
        tokens.map(|token| match token {
            LISTENER => Event::Caller,
            ended if ended & PROCESS != 0 => Event::Ended(PathId(ended as u32)),
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

/// A path that the poller watches: its socket, and the process at the other end. To be dropped before they are closed, because the kernel
/// goes on telling of what is closed here while another process still has it.
#[derive(Debug)]
pub(super) struct Watch {
    poller: Arc<Poller>,
    path: PathId,
    socket: Option<RawFd>,
    process: Option<RawFd>,
}

impl Watch {
    pub(super) fn new(poller: &Arc<Poller>, path: PathId, socket: &impl AsRawFd) -> io::Result<Watch> {
        let (socket, events) = (socket.as_raw_fd(), libc::EPOLLIN | libc::EPOLLRDHUP);
        poller.control(libc::EPOLL_CTL_ADD, socket, events, path.0.into())?;
        Ok(Watch {
            poller: Arc::clone(poller),
            path,
            socket: Some(socket),
            process: None,
        })
    }

    /// Tells nothing of the socket any more, which is closed at the other end and would be told of for ever.
    pub(super) fn forget_socket(&mut self) {
        if let Some(socket) = self.socket.take() {
            // Nothing is left to be done where it fails.
            let _ = self.poller.control(libc::EPOLL_CTL_DEL, socket, 0, 0);
        }
    }

    /// Also tells when the process at the other end has ended, whoever may still hold its socket.
    pub(super) fn process(&mut self, process: &impl AsRawFd) -> io::Result<()> {
        let (process, token) = (process.as_raw_fd(), u64::from(self.path.0) | PROCESS);
        self.poller
            .control(libc::EPOLL_CTL_ADD, process, libc::EPOLLIN, token)?;
        self.process = Some(process);
        Ok(())
    }

    /// Whether nothing has happened on any socket or to any process: the cheapest question that the kernel answers about a peer's life.
    pub(super) fn is_quiet(&self) -> bool {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: there is room for the one event that is asked for.
        unsafe { libc::epoll_wait(self.poller.epoll.as_raw_fd(), &mut event, 1, 0) == 0 }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        for fd in [self.socket, self.process].into_iter().flatten() {
            // Nothing is left to be done where it fails.
            let _ = self.poller.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
        }
    }
}

/// A descriptor held only so that there is one to give up.
pub(super) fn reserve_descriptor() -> io::Result<OwnedFd> {
    Ok(File::open("/dev/null")?.into())
}
