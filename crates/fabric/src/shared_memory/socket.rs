//! The socket of a path: whole datagrams in order, descriptors beside them, and the kernel's word on who is at the other end.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use crate::fork::NotInherited;

/// The most descriptors that ride on one datagram.
pub(super) const MAX_FDS: usize = 2;

/// One end of a path.
#[derive(Debug)]
pub(super) struct Socket {
    fd: NotInherited<OwnedFd>,
}

/// What came in.
#[derive(Debug)]
pub(super) enum Received {
    Datagram {
        len: usize,
        files: Files,
        /// Descriptors were sent that this process had no room for, or more than allowed.
        files_lost: bool,
    },
    /// Nothing now.
    Nothing,
    /// Nothing ever again.
    Closed,
}

/// The descriptors of one datagram, in order.
pub(super) type Files = [Option<OwnedFd>; MAX_FDS];

/// A control buffer with the alignment that the kernel's headers want.
#[repr(C, align(8))]
struct Control([u8; 64]);

impl Socket {
    /// Starts listening under an abstract name, which goes away with the socket.
    pub(super) fn listen(name: &str) -> io::Result<NotInherited<OwnedFd>> {
        let fd = NotInherited::open(new_socket)?;
        let (address, len) = abstract_address(name)?;
        // SAFETY: the address is valid for the length given.
        check(unsafe { libc::bind(fd.as_raw_fd(), ptr::from_ref(&address).cast(), len) })?;
        // SAFETY: a plain call on a descriptor we own.
        check(unsafe { libc::listen(fd.as_raw_fd(), 1024) })?;
        Ok(fd)
    }

    pub(super) fn connect(name: &str) -> io::Result<Socket> {
        let fd = NotInherited::open(new_socket)?;
        let (address, len) = abstract_address(name)?;
        // SAFETY: the address is valid for the length given.
        check(unsafe { libc::connect(fd.as_raw_fd(), ptr::from_ref(&address).cast(), len) })?;
        Ok(Socket { fd })
    }

    pub(super) fn accept(listener: BorrowedFd<'_>) -> io::Result<Socket> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let fd = NotInherited::open(|| {
            // SAFETY: no address is asked for.
            let fd = unsafe { libc::accept4(listener.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), flags) };
            check(fd)?;
            // SAFETY: a fresh descriptor that nobody else owns.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        })?;
        Ok(Socket { fd })
    }

    /// The process at the other end, where it is visible from here.
    pub(super) fn peer_pid(&self) -> Option<libc::pid_t> {
        self.credentials().map(|peer| peer.pid).filter(|&pid| pid > 0)
    }

    /// Whether the other end belongs to the user that runs this process, or to root.
    pub(super) fn is_of_own_user(&self) -> bool {
        // SAFETY: no preconditions; it cannot fail.
        let own = unsafe { libc::geteuid() };
        self.credentials().is_some_and(|peer| peer.uid == own || peer.uid == 0)
    }

    /// Who the other end was when it connected or listened, by the kernel's word.
    fn credentials(&self) -> Option<libc::ucred> {
        // SAFETY: all-zero credentials are valid ones to be overwritten.
        let mut credentials: libc::ucred = unsafe { mem::zeroed() };
        let mut len = mem::size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the result has a place of the length given.
        let rc = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                ptr::from_mut(&mut credentials).cast(),
                &mut len,
            )
        };
        (rc == 0).then_some(credentials)
    }

    /// Sends one datagram made of two parts. `Ok(false)`: the socket is full.
    pub(super) fn send(&self, head: &[u8], body: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let mut parts = [iovec(head), iovec(body)];
        let mut control = Control([0; 64]);
        // SAFETY: an all-zero header is a valid empty one.
        let mut header: libc::msghdr = unsafe { mem::zeroed() };
        header.msg_iov = parts.as_mut_ptr();
        header.msg_iovlen = if body.is_empty() { 1 } else { 2 };
        if !files.is_empty() {
            assert!(files.len() <= MAX_FDS, "few descriptors ride on a datagram");
            let bytes = mem::size_of_val(files) as libc::c_uint;
            // SAFETY: the control buffer is aligned and large enough for MAX_FDS descriptors, so the macros stay inside it.
            unsafe {
                header.msg_control = ptr::from_mut(&mut control).cast();
                header.msg_controllen = libc::CMSG_SPACE(bytes) as _;
                let message = libc::CMSG_FIRSTHDR(&header);
                (*message).cmsg_level = libc::SOL_SOCKET;
                (*message).cmsg_type = libc::SCM_RIGHTS;
                (*message).cmsg_len = libc::CMSG_LEN(bytes) as _;
                let data = libc::CMSG_DATA(message).cast::<RawFd>();
                for (i, file) in files.iter().enumerate() {
                    data.add(i).write_unaligned(file.as_raw_fd());
                }
            }
        }
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the header refers to buffers that outlive the call.
        if unsafe { libc::sendmsg(self.fd.as_raw_fd(), &header, flags) } >= 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS) => Ok(false),
            // Too many descriptors are on their way: the peer has to take some first.
            Some(libc::ETOOMANYREFS) => Ok(false),
            _ => Err(error),
        }
    }

    pub(super) fn receive(&self, into: &mut [u8]) -> io::Result<Received> {
        loop {
            match self.receive_once(into) {
                // A peer that closed with unread data makes one such error; what it sent before is still behind it.
                Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => return Ok(Received::Nothing),
                other => return other,
            }
        }
    }

    fn receive_once(&self, into: &mut [u8]) -> io::Result<Received> {
        let mut part = libc::iovec {
            iov_base: into.as_mut_ptr().cast(),
            iov_len: into.len(),
        };
        let mut control = Control([0; 64]);
        // SAFETY: an all-zero header is a valid empty one.
        let mut header: libc::msghdr = unsafe { mem::zeroed() };
        header.msg_iov = &mut part;
        header.msg_iovlen = 1;
        header.msg_control = ptr::from_mut(&mut control).cast();
        // SAFETY: a computation only.
        header.msg_controllen = unsafe { libc::CMSG_SPACE((MAX_FDS * mem::size_of::<RawFd>()) as libc::c_uint) } as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the header refers to buffers that outlive the call.
        let len = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &mut header, flags) };
        let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
        let files = take_files(&header);
        if len == 0 {
            return Ok(Received::Closed);
        }
        if header.msg_flags & libc::MSG_TRUNC != 0 {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        Ok(Received::Datagram {
            len,
            files,
            files_lost: header.msg_flags & libc::MSG_CTRUNC != 0,
        })
    }

    /// Has the other end closed, or died? Asked of the kernel, whatever is still unread.
    pub(super) fn is_hung_up(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.fd.as_raw_fd(),
            events: libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: one entry, no waiting.
        let rc = unsafe { libc::poll(&mut poll, 1, 0) };
        rc > 0 && poll.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) != 0
    }

    /// Tells the other end that nothing more will be sent. Its own closing can then still be seen.
    pub(super) fn finish_sending(&self) {
        // SAFETY: a plain call on a descriptor we own; there is nothing to do where the peer is gone already.
        unsafe { libc::shutdown(self.fd.as_raw_fd(), libc::SHUT_WR) };
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn take_files(header: &libc::msghdr) -> Files {
    let mut files: Files = [None, None];
    let mut taken = 0;
    // SAFETY: the kernel filled the control buffer and its length, and the macros walk no further than that. Every descriptor in
    // it is fresh and owned by nobody else.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while !message.is_null() {
            if (*message).cmsg_level == libc::SOL_SOCKET && (*message).cmsg_type == libc::SCM_RIGHTS {
                let bytes = ((*message).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(message).cast::<RawFd>();
                for i in 0..bytes / mem::size_of::<RawFd>() {
                    let file = OwnedFd::from_raw_fd(data.add(i).read_unaligned());
                    if let Some(place) = files.get_mut(taken) {
                        *place = Some(file);
                        taken += 1;
                    }
                }
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
    files
}

fn new_socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no preconditions.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    check(fd)?;
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn abstract_address(name: &str) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: an all-zero address is a valid one.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    // The first byte stays zero: that is what makes the name abstract.
    let room = &mut address.sun_path[1..];
    if name.is_empty() || name.len() > room.len() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    for (to, from) in room.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let len = mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((address, len as libc::socklen_t))
}

fn iovec(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

fn check(rc: libc::c_int) -> io::Result<()> {
    if rc < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
