//! The process at the other end of a path: its number, and whether the number still is its own.
//!
//! The kernel copies between processes by number, and numbers are used again: once the owner of a region has died, its number may be that
//! of a stranger, with memory at the same address. So a path holds a descriptor of the process itself, taken from its socket, which
//! tells when the process has ended. Nothing is copied once that has been noticed, and a copy during which it happened has not succeeded.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use super::socket::Socket;
use crate::fork::NotInherited;

/// Since Linux 6.5. The number is the same on every architecture that this runs on.
const SO_PEERPIDFD: libc::c_int = 77;

/// A peer's process.
#[derive(Debug)]
pub(super) struct Process {
    number: libc::pid_t,
    /// Readable once the process has ended.
    descriptor: NotInherited<OwnedFd>,
}

impl Process {
    /// The process that connected, or that listened when we did; `None` where it cannot be seen from here, or not be held on to.
    pub(super) fn at_end_of(socket: &Socket) -> Option<Process> {
        let number = socket.peer_pid()?;
        let descriptor = NotInherited::open(|| of_socket(socket)).or_else(|error| match error.raw_os_error() {
            Some(libc::ENOPROTOOPT) => NotInherited::open(|| of_number(socket, number)),
            _ => Err(error),
        });
        let descriptor = descriptor.ok()?;
        Some(Process { number, descriptor })
    }

    pub(super) fn number(&self) -> libc::pid_t {
        self.number
    }

    /// Whether it has ended, so that its number may be somebody else's.
    pub(super) fn has_ended(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.descriptor.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry, no waiting.
        unsafe { libc::poll(&mut poll, 1, 0) > 0 }
    }
}

impl AsRawFd for Process {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}

/// The kernel remembers the process behind a socket, not only its number.
fn of_socket(socket: &Socket) -> io::Result<OwnedFd> {
    let mut fd: RawFd = -1;
    let mut len = mem::size_of::<RawFd>() as libc::socklen_t;
    let place = ptr::from_mut(&mut fd).cast();
    // SAFETY: the result has a place of the length given.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, place, &mut len) };
    owned(if rc == 0 { fd } else { -1 })
}

/// For older kernels: the process that has the number now, if it is the one that had it while the socket was open.
///
/// A process that died before this, whose socket a child of it holds open, and whose number was used again already, is taken for the
/// one that has the number.
fn of_number(socket: &Socket, number: libc::pid_t) -> io::Result<OwnedFd> {
    let gone = || io::Error::from_raw_os_error(libc::ESRCH);
    let started = started(number).ok_or_else(gone)?;
    // SAFETY: a plain call; a descriptor is returned or nothing is done.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
    let descriptor = owned(fd as RawFd)?;
    let same = self::started(number) == Some(started) && !socket.is_hung_up();
    if same { Ok(descriptor) } else { Err(gone()) }
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// When a process started, in ticks since the boot.
fn started(number: libc::pid_t) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // The name, in brackets, may hold anything.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends of a path; the far one belongs to this process.
    fn pair(name: &str) -> (Socket, Socket) {
        let name = format!("weft-test-{name}-{}", std::process::id());
        let listener = Socket::listen(&name).unwrap();
        let near = Socket::connect(&name).unwrap();
        let far = Socket::accept(std::os::fd::AsFd::as_fd(&listener)).unwrap();
        (near, far)
    }

    #[test]
    fn a_process_that_lives_is_held_on_to_by_socket_and_by_number() {
        let (near, far) = pair("lives");
        for socket in [&near, &far] {
            let process = Process::at_end_of(socket).unwrap();
            assert_eq!(process.number(), std::process::id() as libc::pid_t);
            assert!(!process.has_ended());
        }
        let number = near.peer_pid().unwrap();
        assert!(of_number(&near, number).is_ok());
        drop(far);
        let hung_up = of_number(&near, number).unwrap_err();
        assert_eq!(hung_up.raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn a_number_that_nobody_has_is_nobody() {
        let (near, _far) = pair("nobody");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let number = child.id() as libc::pid_t;
        child.wait().unwrap();
        assert!(of_number(&near, number).is_err());
    }
}
