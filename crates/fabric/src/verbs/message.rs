//! What the two ends of a path say to each other by SEND: frames, and the packets that carry them.
//!
//! A packet fills at most one receive buffer, and is at most what goes over the wire in one piece: a queue pair that fails has then
//! either received it whole or not begun to, and no buffer goes down with it. Every packet returns the receive buffers that its sender has made free again
//! since the last one; a packet of nothing else needs no credit itself. A frame longer than a packet goes in several, one
//! after the other: queue pairs keep the order of what is sent.

use weft_plan::{Spans, Time};
use weft_protocol::wire::{DecodeError, Reader, Writer};
use weft_protocol::{Access, Arrival, AtomicAct, Refusal, RegionKey};

use super::rail::Mtu;

/// A receive buffer.
pub(super) const PACKET_BYTES: usize = 4096;
/// What every path can carry in one piece.
const PACKET_BYTES_MIN: usize = 256;
const HEAD_BYTES: usize = 4;
/// The most bytes a message may have.
pub(super) const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// The longest frame: a message and its kind.
pub(super) const FRAME_BYTES_MAX: usize = MESSAGE_BYTES_MAX + 1;
/// Runs of the spans that one checksum is asked of.
pub(super) const SUM_RUNS_MAX: usize = 4096;
/// Bytes that one checksum is asked of: whoever computes it does nothing else meanwhile.
pub(super) const SUM_BYTES_MAX: u64 = 16 << 20;
/// Slots that tags of arrivals are bound to.
pub(super) const TAG_SLOTS: u16 = 1 << 12;

/// The bytes of the largest packet on one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PacketSize(usize);

impl PacketSize {
    /// As large as the path's MTU, of this code, and a receive buffer allow.
    pub(super) fn of_mtu(code: u8) -> PacketSize {
        let mtu = Mtu::from_code(code.into()).map_or(PACKET_BYTES_MIN, Mtu::bytes);
        PacketSize(mtu.clamp(PACKET_BYTES_MIN, PACKET_BYTES))
    }

    /// What one packet carries of a frame.
    fn body(self) -> usize {
        self.0 - HEAD_BYTES
    }
}

const FIRST: u8 = 1;
const LAST: u8 = 2;

mod kind {
    pub const MESSAGE: u8 = 1;
    pub const RESOLVE: u8 = 2;
    pub const RESOLVED: u8 = 3;
    pub const REVOKE: u8 = 4;
    pub const REVOKED: u8 = 5;
    pub const BIND: u8 = 6;
    pub const ARRIVED: u8 = 7;
    pub const SUM: u8 = 8;
    pub const SUMMED: u8 = 9;
    pub const PROBE: u8 = 10;
    pub const READY: u8 = 11;
    pub const BYE: u8 = 12;
    pub const ATOMIC_ASK: u8 = 13;
    pub const ATOMIC_ANSWER: u8 = 14;
    pub const READ_CLOCK: u8 = 15;
    pub const CLOCK: u8 = 16;
}

/// One thing that an end says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Bytes for the session.
    Message(Vec<u8>),
    /// "I have this key. Where is the memory?"
    Resolve {
        key: RegionKey,
    },
    Resolved {
        key: RegionKey,
        answer: Result<Location, Refusal>,
    },
    /// "Let go of this region of mine, and say so."
    Revoke {
        slot: u32,
    },
    /// "No work request of mine that names this region of yours is left."
    Revoked {
        slot: u32,
    },
    /// "From here on this slot stands for this tag."
    Bind {
        slot: u16,
        tag: u64,
    },
    /// An arrival that does not fit into the bits of an immediate.
    Arrived(Arrival),
    /// "What is the checksum of these bytes of yours?"
    Sum {
        serial: u64,
        key: RegionKey,
        spans: Spans,
    },
    Summed {
        serial: u64,
        sum: Result<u64, Refusal>,
    },
    /// Nothing. Whoever waits for an answer sends one to find out whether anybody is left to give it.
    Probe,
    /// The first frame of whoever opened the path.
    Ready,
    /// The last frame.
    Bye,
    /// "Do this to a word of yours."
    AtomicAsk(AtomicAsk),
    /// What the word held, or why it was left alone.
    AtomicAnswer {
        serial: u64,
        found: Result<u64, Refusal>,
    },
    /// "It is this late here. How late is it there?"
    ReadClock {
        sent: Time,
    },
    Clock {
        /// From the question.
        sent: Time,
        read: Time,
    },
}

/// An atomic operation that is asked for. There is no way to take it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AtomicAsk {
    pub serial: u64,
    /// On the asker's clock.
    pub deadline: Time,
    pub key: RegionKey,
    pub offset: u64,
    pub act: AtomicAct,
}

/// Where a region is, for the device of a peer that has shown its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    /// What the device calls the first byte.
    pub iova: u64,
    pub len: u64,
    pub rkey: u32,
    pub access: Access,
    /// Its words are operated on by devices.
    pub atomics: bool,
}

impl Frame {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        match self {
            Frame::Message(payload) => {
                w.u8(kind::MESSAGE).buf.extend_from_slice(payload);
            }
            Frame::Resolve { key } => {
                w.u8(kind::RESOLVE).key(key);
            }
            Frame::Resolved { key, answer } => {
                w.u8(kind::RESOLVED).key(key);
                match answer {
                    Ok(location) => w
                        .u8(0)
                        .u64_fixed(location.iova)
                        .varint(location.len)
                        .varint(location.rkey.into())
                        .access(location.access)
                        .u8(location.atomics.into()),
                    Err(refusal) => w.u8(1).refusal(*refusal),
                };
            }
            Frame::Revoke { slot } => {
                w.u8(kind::REVOKE).varint((*slot).into());
            }
            Frame::Revoked { slot } => {
                w.u8(kind::REVOKED).varint((*slot).into());
            }
            Frame::Bind { slot, tag } => {
                w.u8(kind::BIND).varint((*slot).into()).u64_fixed(*tag);
            }
            Frame::Arrived(Arrival { tag, index }) => {
                w.u8(kind::ARRIVED).u64_fixed(*tag).varint((*index).into());
            }
            Frame::Sum { serial, key, spans } => {
                w.u8(kind::SUM).varint(*serial).key(key).spans(spans);
            }
            Frame::Summed { serial, sum } => {
                w.u8(kind::SUMMED).varint(*serial);
                match sum {
                    Ok(sum) => w.u8(0).u64_fixed(*sum),
                    Err(refusal) => w.u8(1).refusal(*refusal),
                };
            }
            Frame::Probe => {
                w.u8(kind::PROBE);
            }
            Frame::Ready => {
                w.u8(kind::READY);
            }
            Frame::Bye => {
                w.u8(kind::BYE);
            }
            Frame::AtomicAsk(ask) => {
                w.u8(kind::ATOMIC_ASK).varint(ask.serial).varint(ask.deadline.as_ns());
                w.key(&ask.key).varint(ask.offset).act(ask.act);
            }
            Frame::AtomicAnswer { serial, found } => {
                w.u8(kind::ATOMIC_ANSWER).varint(*serial).found(*found);
            }
            Frame::ReadClock { sent } => {
                w.u8(kind::READ_CLOCK).varint(sent.as_ns());
            }
            Frame::Clock { sent, read } => {
                w.u8(kind::CLOCK).varint(sent.as_ns()).varint(read.as_ns());
            }
        }
        w.buf
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Frame, DecodeError> {
        if bytes.len() > FRAME_BYTES_MAX {
            return Err(DecodeError::TooLong);
        }
        let mut r = Reader::new(bytes);
        let frame = match r.u8()? {
            kind::MESSAGE => Frame::Message(r.take(r.remaining())?.to_vec()),
            kind::RESOLVE => Frame::Resolve { key: r.key()? },
            kind::RESOLVED => Frame::Resolved {
                key: r.key()?,
                answer: answer(&mut r, location)?,
            },
            kind::REVOKE => Frame::Revoke { slot: r.u32()? },
            kind::REVOKED => Frame::Revoked { slot: r.u32()? },
            kind::BIND => {
                let slot = u16::try_from(r.varint()?).ok().filter(|slot| *slot < TAG_SLOTS);
                Frame::Bind {
                    slot: slot.ok_or(DecodeError::Invalid)?,
                    tag: r.u64_fixed()?,
                }
            }
            kind::ARRIVED => Frame::Arrived(Arrival {
                tag: r.u64_fixed()?,
                index: r.u32()?,
            }),
            kind::SUM => Frame::Sum {
                serial: r.varint()?,
                key: r.key()?,
                spans: spans(&mut r)?,
            },
            kind::SUMMED => Frame::Summed {
                serial: r.varint()?,
                sum: answer(&mut r, Reader::u64_fixed)?,
            },
            kind::PROBE => Frame::Probe,
            kind::READY => Frame::Ready,
            kind::BYE => Frame::Bye,
            kind::ATOMIC_ASK => Frame::AtomicAsk(AtomicAsk {
                serial: r.varint()?,
                deadline: time(&mut r)?,
                key: r.key()?,
                offset: r.varint()?,
                act: r.act()?,
            }),
            kind::ATOMIC_ANSWER => Frame::AtomicAnswer {
                serial: r.varint()?,
                found: r.found()?,
            },
            kind::READ_CLOCK => Frame::ReadClock { sent: time(&mut r)? },
            kind::CLOCK => Frame::Clock {
                sent: time(&mut r)?,
                read: time(&mut r)?,
            },
            _ => return Err(DecodeError::Invalid),
        };
        r.end()?;
        Ok(frame)
    }
}

fn answer<'a, T>(
    r: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, DecodeError>,
) -> Result<Result<T, Refusal>, DecodeError> {
    match r.u8()? {
        0 => read(r).map(Ok),
        1 => r.refusal().map(Err),
        _ => Err(DecodeError::Invalid),
    }
}

fn time(r: &mut Reader<'_>) -> Result<Time, DecodeError> {
    r.varint().map(Time::from_ns)
}

/// Runs may overlap, so that a few of them can name more bytes than anybody has.
fn spans(r: &mut Reader<'_>) -> Result<Spans, DecodeError> {
    let spans = r.spans(SUM_RUNS_MAX)?;
    if spans.bytes() > SUM_BYTES_MAX {
        return Err(DecodeError::TooLong);
    }
    Ok(spans)
}

fn location(r: &mut Reader<'_>) -> Result<Location, DecodeError> {
    let location = Location {
        iova: r.u64_fixed()?,
        len: r.varint()?,
        rkey: r.u32()?,
        access: r.access()?,
        atomics: match r.u8()? {
            0 => false,
            1 => true,
            _ => return Err(DecodeError::Invalid),
        },
    };
    // Every address within the region can then be computed without a look at the numbers.
    location.iova.checked_add(location.len).ok_or(DecodeError::Overflow)?;
    Ok(location)
}

/// A frame on its way out, packet by packet.
#[derive(Debug)]
pub(super) struct Parcel {
    content: Content,
    packed: usize,
}

#[derive(Debug)]
enum Content {
    Frame(Vec<u8>),
    /// A message that its poster still owns: it is not copied before its turn.
    Message(std::sync::Arc<[u8]>),
}

impl Parcel {
    pub(super) fn frame(frame: &Frame) -> Parcel {
        Parcel {
            content: Content::Frame(frame.encode()),
            packed: 0,
        }
    }

    pub(super) fn message(payload: std::sync::Arc<[u8]>) -> Parcel {
        Parcel {
            content: Content::Message(payload),
            packed: 0,
        }
    }

    fn len(&self) -> usize {
        match &self.content {
            Content::Frame(bytes) => bytes.len(),
            Content::Message(payload) => payload.len() + 1,
        }
    }

    /// Has a packet of it been made? Then the others must follow, or the peer could not make sense of what comes next.
    pub(super) fn is_begun(&self) -> bool {
        self.packed > 0
    }
    pub(super) fn is_packed(&self) -> bool {
        self.packed == self.len()
    }

    /// How long its next packet is.
    pub(super) fn next_packet_bytes(&self, size: PacketSize) -> usize {
        HEAD_BYTES + (self.len() - self.packed).min(size.body())
    }

    /// Writes the next packet and returns its length. It returns `credits` to the peer.
    pub(super) fn pack(&mut self, credits: u16, size: PacketSize, into: &mut [u8]) -> usize {
        let total = self.next_packet_bytes(size);
        let body = &mut into[HEAD_BYTES..total];
        let at = self.packed;
        match &self.content {
            Content::Frame(bytes) => body.copy_from_slice(&bytes[at..at + body.len()]),
            Content::Message(payload) => match at {
                0 => {
                    body[0] = kind::MESSAGE;
                    let rest = &mut body[1..];
                    rest.copy_from_slice(&payload[..rest.len()]);
                }
                _ => body.copy_from_slice(&payload[at - 1..at - 1 + body.len()]),
            },
        }
        self.packed += total - HEAD_BYTES;
        let first = if at == 0 { FIRST } else { 0 };
        let last = if self.is_packed() { LAST } else { 0 };
        head(first | last, credits, into);
        total
    }
}

/// How long a packet is that only returns credits.
pub(super) const CREDITS_BYTES: usize = HEAD_BYTES;

/// Writes a packet that only returns credits.
pub(super) fn pack_credits(credits: u16, into: &mut [u8]) -> usize {
    head(0, credits, into);
    HEAD_BYTES
}

fn head(flags: u8, credits: u16, into: &mut [u8]) {
    let [low, high] = credits.to_le_bytes();
    into[..HEAD_BYTES].copy_from_slice(&[flags, 0, low, high]);
}

/// A packet as it was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet<'a> {
    pub credits: u16,
    /// None in a packet that only returns credits.
    pub piece: Option<Piece<'a>>,
}

/// A piece of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece<'a> {
    first: bool,
    last: bool,
    body: &'a [u8],
}

impl<'a> Packet<'a> {
    pub(super) fn decode(bytes: &'a [u8], size: PacketSize) -> Result<Packet<'a>, DecodeError> {
        let (head, body) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(DecodeError::Truncated)?;
        let [flags, zero, low, high] = *head;
        if zero != 0 || flags & !(FIRST | LAST) != 0 || body.len() > size.body() {
            return Err(DecodeError::Invalid);
        }
        // A middle piece fills its packet, so that it cannot be taken for one that only returns credits, nor be made of nothing.
        let full = body.len() == size.body();
        let piece = match (flags & FIRST != 0, flags & LAST != 0, body.is_empty()) {
            (false, false, true) => None,
            (first, last, false) if last || full => Some(Piece { first, last, body }),
            _ => return Err(DecodeError::Invalid),
        };
        Ok(Packet {
            credits: u16::from_le_bytes([low, high]),
            piece,
        })
    }
}

/// Puts frames together again.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    bytes: Vec<u8>,
    begun: bool,
}

impl Assembly {
    /// Takes the next piece, and returns the frame that it completes.
    pub(super) fn take(&mut self, piece: Piece<'_>) -> Result<Option<Frame>, DecodeError> {
        if piece.first == self.begun {
            return Err(DecodeError::Invalid);
        }
        if piece.first && piece.last {
            return Frame::decode(piece.body).map(Some);
        }
        if self.bytes.len() + piece.body.len() > FRAME_BYTES_MAX {
            return Err(DecodeError::TooLong);
        }
        self.begun = !piece.last;
        self.bytes.extend_from_slice(piece.body);
        if !piece.last {
            return Ok(None);
        }
        let bytes = std::mem::take(&mut self.bytes);
        Frame::decode(&bytes).map(Some)
    }
}

/// What must hold for any packets: see [`crate::harness`].
pub(crate) fn check(bytes: &[u8]) {
    let mut assembly = Assembly::default();
    let size = PacketSize::of_mtu(bytes.first().copied().unwrap_or(0) % 8);
    for chunk in bytes.chunks(size.0) {
        let Ok(Packet { piece: Some(piece), .. }) = Packet::decode(chunk, size) else {
            continue;
        };
        let Ok(Some(frame)) = assembly.take(piece) else {
            continue;
        };
        if let Frame::Sum { spans, .. } = &frame {
            assert!(spans.runs().len() <= SUM_RUNS_MAX && spans.bytes() <= SUM_BYTES_MAX);
        }
        assert_eq!(Frame::decode(&frame.encode()).as_ref(), Ok(&frame));
    }
    if let Ok(frame) = Frame::decode(bytes) {
        assert_eq!(Frame::decode(&frame.encode()).as_ref(), Ok(&frame));
    }
}

#[cfg(test)]
mod tests;
