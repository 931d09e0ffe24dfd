//! A connection's bytes, plain or encrypted: the rest of the transport does not know which.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use super::socket::{self, Socket, Vectors};
use super::tls::TlsStream;

#[derive(Debug)]
pub(super) enum Stream {
    Plain(Socket),
    Tls(Box<TlsStream>),
}

impl Stream {
    pub(super) fn socket(&self) -> &Socket {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(tls) => tls.socket(),
        }
    }
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }
    /// Sends from the vectors and empties them; fewer bytes than they hold means that the socket is full.
    pub(super) fn send(&mut self, vectors: &mut Vectors) -> io::Result<usize> {
        let sent = match self {
            Stream::Plain(socket) => vectors.send(socket.as_fd()),
            Stream::Tls(tls) => tls.send(vectors),
        };
        vectors.clear();
        sent
    }
    /// Receives into the vectors and empties them; 0 means that the peer has closed.
    pub(super) fn receive(&mut self, vectors: &mut Vectors) -> io::Result<usize> {
        let received = match self {
            Stream::Plain(socket) => vectors.receive(socket.as_fd()),
            Stream::Tls(tls) => tls.receive(vectors),
        };
        vectors.clear();
        received
    }
    /// Drops up to `len` received bytes.
    pub(super) fn discard(&mut self, len: usize) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket::discard(socket.as_fd(), len),
            Stream::Tls(tls) => tls.discard(len),
        }
    }
    /// Pushes out what encryption still holds; whether all of it went.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Stream::Plain(_) => Ok(true),
            Stream::Tls(tls) => tls.flush(),
        }
    }
    /// Have bytes been decrypted that nobody has received yet?
    pub(super) fn holds_plaintext(&self) -> bool {
        match self {
            Stream::Plain(_) => false,
            Stream::Tls(tls) => tls.holds_plaintext(),
        }
    }
    /// Does receiving less than was asked for mean that there is no more for now?
    pub(super) fn short_means_empty(&self) -> bool {
        matches!(self, Stream::Plain(_))
    }
}
