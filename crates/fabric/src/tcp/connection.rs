//! One connection: a stream, what goes out on it and what comes in, and how it came to belong to a path.

use std::io;

use weft_protocol::Loss;
use weft_protocol::wire::DecodeError;

use super::frame::{self, Frame};
use super::inbound::Inbound;
use super::outbound::{Flushed, Outbound};
use super::socket::{Epoll, Vectors};
use super::stream::Stream;
use crate::Clock;
use crate::far_clock::FarClock;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: Stream,
    pub(super) inbound: Inbound,
    pub(super) outbound: Outbound,
    pub(super) token: u64,
    pub(super) join: Join,
    /// Whether epoll has been asked to say when the socket has room.
    pub(super) awaits_room: bool,
    /// It asks for something that is not for strangers, and waits until its path is vouched for.
    pub(super) held: bool,
    /// What follows the last message of a stranger is left for the next turn.
    pub(super) unheard: bool,
    /// Bytes of moves that this side has open here.
    pub(super) open_bytes: u64,
    /// Runs of moves that this side has open here.
    pub(super) open_runs: usize,
}

/// How far a connection is on its way into a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Join {
    Connecting,
    AwaitsHello,
    AwaitsWelcome,
    AwaitsPong,
    Joined,
}

/// Why a connection is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone {
    pub(super) loss: Loss,
    /// The peer's kernel has said so: nobody there acts on what was sent.
    pub(super) fenced: bool,
}

impl Gone {
    pub(super) const GARBAGE: Gone = Gone {
        loss: Loss::Garbage,
        fenced: false,
    };
}

impl From<DecodeError> for Gone {
    fn from(_: DecodeError) -> Gone {
        Gone::GARBAGE
    }
}

impl From<io::Error> for Gone {
    fn from(error: io::Error) -> Gone {
        let (loss, fenced) = match (error.kind(), error.raw_os_error()) {
            (io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe, _) => {
                (Loss::ClosedByPeer, true)
            }
            (io::ErrorKind::ConnectionRefused, _) => (Loss::Refused, true),
            (io::ErrorKind::TimedOut, _) => (Loss::Silent, false),
            (_, Some(errno)) => (Loss::System(errno), false),
            // Only the TLS layer has errors without a number: the peer is not who it should be, or does not speak TLS.
            (_, None) => (Loss::Garbage, false),
        };
        Gone { loss, fenced }
    }
}

/// No hello is longer than this.
const HELLO_BYTES_MAX: usize = 256;

impl Connection {
    pub(super) fn new(stream: Stream, token: u64, join: Join) -> Connection {
        Connection {
            stream,
            inbound: Inbound::new(),
            outbound: Outbound::default(),
            token,
            join,
            awaits_room: join == Join::Connecting,
            held: false,
            unheard: false,
            open_bytes: 0,
            open_runs: 0,
        }
    }

    /// Sends what there is to send, and asks to be told of room where the socket is full.
    pub(super) fn flush(
        &mut self,
        far_clock: &FarClock,
        clock: Clock,
        vectors: &mut Vectors,
        epoll: &Epoll,
        sends: u32,
    ) -> Result<Flushed, Gone> {
        let flushed = self
            .outbound
            .flush(&mut self.stream, far_clock, clock, vectors, sends)?;
        if self.outbound.is_abused() {
            return Err(Gone::GARBAGE);
        }
        self.watch(epoll, flushed == Flushed::Blocked)?;
        Ok(flushed)
    }

    pub(super) fn watch(&mut self, epoll: &Epoll, awaits_room: bool) -> io::Result<()> {
        if awaits_room != self.awaits_room {
            self.awaits_room = awaits_room;
            self.listen(epoll)?;
        }
        Ok(())
    }

    /// Leaves what comes in where it is, at the sender's expense.
    pub(super) fn hold(&mut self, epoll: &Epoll) -> io::Result<()> {
        self.held = true;
        self.listen(epoll)
    }

    /// The peer is known: it may say as much as it likes, and what it has said is heard.
    pub(super) fn welcome(&mut self, epoll: &Epoll) -> io::Result<()> {
        self.inbound.widen();
        self.held = false;
        self.listen(epoll)
    }

    fn listen(&self, epoll: &Epoll) -> io::Result<()> {
        match self.held {
            true => epoll.turn_deaf(self.stream.fd(), self.token, self.awaits_room),
            false => epoll.change(self.stream.fd(), self.token, self.awaits_room),
        }
    }

    /// Receives the opener's first frame.
    pub(super) fn receive_first(&mut self, vectors: &mut Vectors) -> Result<Option<Frame>, Gone> {
        match self.inbound.receive_heads(&mut self.stream, vectors) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(e) => return Err(e.into()),
        }
        let Some((frame, used)) = frame::decode(self.inbound.buffered())? else {
            // A hello is short; whoever announces more has something else in mind.
            let patient = self.inbound.buffered().len() <= HELLO_BYTES_MAX;
            return if patient { Ok(None) } else { Err(Gone::GARBAGE) };
        };
        self.inbound.consume_head(used);
        Ok(Some(frame))
    }
}
