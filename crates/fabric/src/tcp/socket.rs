//! Sockets and the epoll descriptor: the system calls of this transport, and all of its unsafe code but one.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, TcpKeepalive, Type};

use super::TcpOptions;
use crate::bell::new_epoll;
use crate::fork::NotInherited;
use crate::memory::copy_checked;

/// A socket of this process. Its peer is told at once when the process dies, whoever was forked from it.
pub(super) type Socket = NotInherited<socket2::Socket>;

/// Addresses and lengths for one system call. They point into registered memory or into buffers of the connection, which
/// outlive the call because the caller holds both.
#[derive(Debug, Default)]
pub(super) struct Vectors {
    list: Vec<libc::iovec>,
    bytes: usize,
    /// Some of the memory may vanish. System calls notice that by themselves; whoever copies otherwise has to look.
    may_vanish: bool,
    /// Bytes found no memory where they were to go.
    missed: bool,
}

// SAFETY: the addresses are only ever used by the system call that they were collected for; between calls the list is empty.
unsafe impl Send for Vectors {}

impl Vectors {
    /// IOV_MAX on Linux.
    pub(super) const MAX: usize = 1024;

    pub(super) fn clear(&mut self) {
        self.list.clear();
        self.bytes = 0;
        self.may_vanish = false;
    }
    /// Some of what is collected is memory that may vanish.
    pub(super) fn beware(&mut self) {
        self.may_vanish = true;
    }
    /// Whether bytes have found no memory where they were to go since this was last asked.
    pub(super) fn take_missed(&mut self) -> bool {
        std::mem::take(&mut self.missed)
    }
    /// Sends from everything collected; how many bytes the kernel took.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        send(socket, &mut self.list)
    }
    /// Receives into everything collected; 0 means that the peer has closed.
    pub(super) fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        receive(socket, &mut self.list)
    }
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
    pub(super) fn is_full(&self) -> bool {
        self.list.len() >= Vectors::MAX
    }
    pub(super) fn room(&self) -> usize {
        Vectors::MAX.saturating_sub(self.list.len())
    }
    pub(super) fn push(&mut self, ptr: *mut u8, len: usize) {
        if len == 0 {
            return;
        }
        self.bytes += len;
        if let Some(last) = self.list.last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == ptr
        {
            last.iov_len += len;
            return;
        }
        self.list.push(libc::iovec {
            iov_base: ptr.cast(),
            iov_len: len,
        });
    }
    /// Copies bytes that were received elsewhere to where the vectors point; returns how many fitted. Those that find no memory there count,
    /// too: they are gone.
    pub(super) fn fill(&mut self, mut bytes: &[u8]) -> usize {
        let mut filled = 0;
        for vector in &self.list {
            let len = vector.iov_len.min(bytes.len());
            // SAFETY: the vector points to `iov_len` writable bytes that outlive this call, as for a system call, unless they may have
            // vanished; both copies tolerate overlap.
            unsafe {
                match self.may_vanish {
                    true => self.missed |= !copy_checked(vector.iov_base.cast(), bytes.as_ptr(), len),
                    false => std::ptr::copy(bytes.as_ptr(), vector.iov_base.cast(), len),
                }
            }
            bytes = &bytes[len..];
            filled += len;
        }
        filled
    }
    /// Hands everything collected over in slices, for encryption, until `take` says that it wants no more.
    pub(super) fn hand_over(&self, mut take: impl FnMut(&[u8]) -> io::Result<bool>) -> io::Result<()> {
        // Registered memory may change at any moment, so it is copied before anything forms a reference to it.
        let mut copy = [0u8; 16 << 10];
        for vector in &self.list {
            let mut at = 0;
            while at < vector.iov_len {
                let len = (vector.iov_len - at).min(copy.len());
                let from = vector.iov_base.cast::<u8>().wrapping_add(at);
                // SAFETY: within the vector, which points to readable bytes that outlive this call, unless they may have vanished.
                unsafe {
                    match self.may_vanish {
                        true if !copy_checked(copy.as_mut_ptr(), from, len) => {
                            return Err(io::Error::from_raw_os_error(libc::EFAULT));
                        }
                        true => {}
                        false => std::ptr::copy(from, copy.as_mut_ptr(), len),
                    }
                }
                if !take(&copy[..len])? {
                    return Ok(());
                }
                at += len;
            }
        }
        Ok(())
    }
}

fn send(socket: BorrowedFd<'_>, list: &mut [libc::iovec]) -> io::Result<usize> {
    // SAFETY: an all-zero msghdr is a valid empty one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = list.as_mut_ptr();
    message.msg_iovlen = list.len();
    // SAFETY: the vectors point to memory that outlives the call and that the kernel only reads.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

fn receive(socket: BorrowedFd<'_>, list: &mut [libc::iovec]) -> io::Result<usize> {
    let received = if let [only] = list {
        // SAFETY: the vector points to memory that outlives the call; whoever else touches it does so by raw copies.
        unsafe { libc::recv(socket.as_raw_fd(), only.iov_base, only.iov_len, libc::MSG_DONTWAIT) }
    } else {
        // SAFETY: an all-zero msghdr is a valid empty one.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = list.as_mut_ptr();
        message.msg_iovlen = list.len();
        // SAFETY: as above, for each of the vectors.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) }
    };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Drops up to `len` received bytes inside the kernel, without copying them anywhere.
pub(super) fn discard(socket: BorrowedFd<'_>, len: usize) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: with MSG_TRUNC a TCP socket writes nothing to the buffer, so a null one is fine.
    let dropped = unsafe { libc::recv(socket.as_raw_fd(), std::ptr::null_mut(), len, flags) };
    usize::try_from(dropped).map_err(|_| io::Error::last_os_error())
}

/// Random bits that nobody can guess.
pub(super) fn random() -> io::Result<u128> {
    let mut bytes = [0u8; 16];
    // SAFETY: the buffer is ours and its length is given.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if n == bytes.len() as isize {
        Ok(u128::from_le_bytes(bytes))
    } else {
        Err(io::Error::last_os_error())
    }
}

/// A listening socket, and where it listens.
pub(super) fn listen(address: SocketAddr) -> io::Result<(Socket, SocketAddr)> {
    let socket = new_socket(address)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(1024)?;
    let bound = socket
        .local_addr()?
        .as_socket()
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))?;
    Ok((socket, bound))
}

/// A socket that is connecting.
pub(super) fn connect(peer: SocketAddr, options: &TcpOptions) -> io::Result<Socket> {
    let socket = new_socket(peer)?;
    prepare_for(&socket, peer, options)?;
    if let Some(local) = options.source {
        socket.bind(&SockAddr::from(SocketAddr::new(local, 0)))?;
    }
    match socket.connect(&SockAddr::from(peer)) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e),
        _ => Ok(socket),
    }
}

/// The next connection that waits to be accepted, and where it comes from. Nothing more is done for it until it has said something.
pub(super) fn accept(listener: &Socket) -> io::Result<(Socket, IpAddr)> {
    let mut from = None;
    let socket = NotInherited::open(|| {
        let (socket, address) = listener.accept4(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC)?;
        from = address.as_socket();
        Ok(socket)
    })?;
    let from = from.ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))?;
    Ok((socket, from.ip().to_canonical()))
}

/// How many descriptors this process may have.
pub(super) fn descriptors_max() -> Option<usize> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is ours.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    usize::try_from(limit.rlim_cur).ok().filter(|_| asked == 0)
}

fn new_socket(address: SocketAddr) -> io::Result<Socket> {
    let (domain, kind) = (Domain::for_address(address), Type::STREAM.nonblocking());
    NotInherited::open(|| socket2::Socket::new(domain, kind, Some(Protocol::TCP)))
}

/// Sets up a socket for a peer.
pub(super) fn prepare(socket: &Socket, options: &TcpOptions) -> io::Result<()> {
    let peer = socket.peer_addr()?.as_socket();
    let peer = peer.ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))?;
    prepare_for(socket, peer, options)
}

fn prepare_for(socket: &Socket, peer: SocketAddr, options: &TcpOptions) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if peer.ip().to_canonical().is_loopback() {
        // Within a host nothing is lost and nobody is to be fair to, so pacing (BBR, where it is the default) only costs.
        // Reno is always there and always allowed; were it not, the default would do.
        let _ = socket.set_tcp_congestion(b"reno");
    }
    let silence = Duration::from(options.silence_max);
    // Three probes in the second half of the time that a peer may be silent.
    let keepalive = TcpKeepalive::new()
        .with_time((silence / 2).max(Duration::from_secs(1)))
        .with_interval((silence / 6).max(Duration::from_secs(1)))
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(silence))?;
    if let Some(bytes) = options.socket_buffer_bytes {
        socket.set_send_buffer_size(bytes)?;
        socket.set_recv_buffer_size(bytes)?;
    }
    Ok(())
}

/// Waits for descriptors; is one itself.
#[derive(Debug)]
pub(super) struct Epoll(NotInherited<OwnedFd>);

impl Epoll {
    pub(super) const BATCH: usize = 64;

    pub(super) fn new() -> io::Result<Epoll> {
        Ok(Epoll(new_epoll()?))
    }

    pub(super) fn add(&self, fd: BorrowedFd<'_>, token: u64, writable: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, libc::EPOLLIN | room(writable))
    }
    pub(super) fn change(&self, fd: BorrowedFd<'_>, token: u64, writable: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, libc::EPOLLIN | room(writable))
    }
    /// As `change`, but what comes in is left where it is, and only the connection's failure is told.
    pub(super) fn turn_deaf(&self, fd: BorrowedFd<'_>, token: u64, writable: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, room(writable))
    }
    pub(super) fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, 0)
    }

    fn control(&self, what: libc::c_int, fd: BorrowedFd<'_>, token: u64, events: libc::c_int) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: token,
        };
        // SAFETY: both descriptors are open and the event outlives the call.
        match unsafe { libc::epoll_ctl(self.0.as_raw_fd(), what, fd.as_raw_fd(), &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The tokens of the descriptors on which something has happened so far, without waiting.
    pub(super) fn look(&self, happened: &mut Vec<u64>) {
        happened.clear();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; Epoll::BATCH];
        // SAFETY: the array has room for as many events as are asked for.
        let n = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), events.len() as libc::c_int, 0) };
        // Without a timeout the only error left is an interruption, which means nothing happened.
        happened.extend(events[..usize::try_from(n).unwrap_or(0)].iter().map(|event| event.u64));
    }
}

fn room(writable: bool) -> libc::c_int {
    if writable { libc::EPOLLOUT } else { 0 }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
