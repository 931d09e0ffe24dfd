//! What travels on a byte stream between two agents: heads that are decoded here, and payloads that never are.
//!
//! A frame is four bytes (kind, and the length of the body in 24 bits), then the body. [`Frame::ReadData`] and
//! [`Frame::WriteData`] announce a payload that follows the body and goes straight between the socket and registered memory.
//! A move is a request, any number of bounded data frames, and an end that alone says whether the bytes before it count: so a
//! sender that must let go of its memory in the middle fills the frame with zeros and says so.
//!
//! ```
//! use weft_fabric::tcp::frame::{Frame, decode, encode};
//! let mut bytes = Vec::new();
//! encode(&Frame::ReadData { op: 7, len: 4096 }, &mut bytes);
//! let (frame, used) = decode(&bytes).unwrap().expect("the frame is whole");
//! assert_eq!(frame, Frame::ReadData { op: 7, len: 4096 });
//! assert_eq!(used, bytes.len());
//! ```

use weft_plan::{Spans, Time};
use weft_protocol::session;
use weft_protocol::wire::{DecodeError, Reader, Writer};
use weft_protocol::{Arrival, AtomicAct, Refusal, RegionKey};

/// The first bytes on every connection.
pub const MAGIC: u64 = u64::from_le_bytes(*b"weft-tcp");
/// Ends of different versions do not talk.
pub const VERSION: u32 = 3;
/// The most bytes a body may have.
pub const BODY_BYTES_MAX: usize = 1 << 20;
/// The most bytes a message may have.
pub const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// The most bytes a message may have whose sender is not known yet: what a session says first is shorter.
pub const STRANGER_MESSAGE_BYTES_MAX: usize = session::MAX_MESSAGE_BYTES;
/// The most runs a request may name.
pub const RUNS_MAX: usize = 16 << 10;
/// The most payload bytes one data frame announces.
pub const DATA_BYTES_MAX: u64 = 4 << 20;
/// The most bytes one move may have.
pub const MOVE_BYTES_MAX: u64 = 1 << 30;
/// The most requests that one side may leave unanswered on a connection.
pub const REQUESTS_MAX: usize = 1024;
/// The most runs that the unanswered requests on a connection may name together.
pub const REQUESTED_RUNS_MAX: usize = 256 << 10;
/// The most connections a path has.
pub const CONNECTIONS_MAX: u32 = 64;
/// Kind and length.
pub const HEAD_BYTES: usize = 4;

/// One frame, without its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The opener's first frame: which path this connection belongs to, and when it was sent on the opener's clock.
    Hello {
        version: u32,
        path: u128,
        index: u32,
        connections: u32,
        sent: Time,
    },
    /// The answer: the opener's time comes back beside the time here.
    Welcome {
        version: u32,
        echo: Time,
        sent: Time,
    },
    /// All connections of the path have been joined.
    Ready,
    Ping {
        sent: Time,
    },
    Pong {
        echo: Time,
        read: Time,
    },
    ReadRequest(ReadRequest),
    /// `len` bytes of the answer to a read follow.
    ReadData {
        op: u64,
        len: u64,
    },
    ReadEnd {
        op: u64,
        outcome: Result<Option<u64>, Ended>,
    },
    WriteRequest(WriteRequest),
    /// `len` bytes of a write follow.
    WriteData {
        op: u64,
        len: u64,
    },
    /// The sender's last word on a write: whether the bytes before it count.
    WriteEnd {
        op: u64,
        complete: bool,
    },
    WriteAck {
        op: u64,
        outcome: Result<Option<u64>, Ended>,
    },
    /// The asker of a read wants no more of it. The target may stop early; its end comes all the same.
    Cancel {
        op: u64,
    },
    Message(Vec<u8>),
    AtomicRequest(AtomicRequest),
    /// What the word held, or why it was left alone.
    AtomicReply {
        op: u64,
        outcome: Result<u64, Refusal>,
    },
}

/// Asks for the bytes of `spans`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    pub op: u64,
    /// On the asker's clock.
    pub deadline: Time,
    pub key: RegionKey,
    pub spans: Spans,
    pub checksum: bool,
}

/// Announces bytes for `spans`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteRequest {
    pub op: u64,
    /// On the asker's clock.
    pub deadline: Time,
    pub key: RegionKey,
    pub spans: Spans,
    pub checksum: bool,
    pub arrival: Option<Arrival>,
}

/// Asks for an atomic operation on the word at `offset`. There is no way to take it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    pub op: u64,
    /// On the asker's clock.
    pub deadline: Time,
    pub key: RegionKey,
    pub offset: u64,
    pub act: AtomicAct,
}

/// Why a move ended without all of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The asker wanted it so.
    Aborted,
    Refused(Refusal),
}

mod kind {
    pub const HELLO: u8 = 1;
    pub const WELCOME: u8 = 2;
    pub const READY: u8 = 3;
    pub const PING: u8 = 4;
    pub const PONG: u8 = 5;
    pub const READ_REQUEST: u8 = 6;
    pub const READ_DATA: u8 = 7;
    pub const READ_END: u8 = 8;
    pub const WRITE_REQUEST: u8 = 9;
    pub const WRITE_DATA: u8 = 10;
    pub const WRITE_END: u8 = 11;
    pub const WRITE_ACK: u8 = 12;
    pub const CANCEL: u8 = 13;
    pub const MESSAGE: u8 = 14;
    pub const ATOMIC_REQUEST: u8 = 15;
    pub const ATOMIC_REPLY: u8 = 16;
}

/// Appends a frame.
///
/// # Panics
/// Where the body would be longer than [`BODY_BYTES_MAX`]; the limits on runs and messages keep it below.
pub fn encode(frame: &Frame, out: &mut Vec<u8>) {
    if let Frame::Message(payload) = frame {
        return encode_message(payload, out);
    }
    let start = out.len();
    out.extend_from_slice(&[0; HEAD_BYTES]);
    let mut w = Writer {
        buf: std::mem::take(out),
    };
    let kind = encode_body(frame, &mut w);
    *out = w.buf;
    let head = head(kind, out.len() - start - HEAD_BYTES);
    out[start..start + HEAD_BYTES].copy_from_slice(&head);
}

/// Appends a message that somebody else owns.
///
/// # Panics
/// Where it is longer than [`MESSAGE_BYTES_MAX`].
pub fn encode_message(payload: &[u8], out: &mut Vec<u8>) {
    encode_message_head(payload.len(), out);
    out.extend_from_slice(payload);
}

/// What precedes a message of `len` bytes, for whoever sends them from where they lie.
///
/// # Panics
/// Where it is longer than [`MESSAGE_BYTES_MAX`].
pub fn encode_message_head(len: usize, out: &mut Vec<u8>) {
    assert!(len <= MESSAGE_BYTES_MAX, "a message of {len} bytes");
    out.extend_from_slice(&head(kind::MESSAGE, len));
}

/// The first frame in `bytes` and how many of them it takes; `None` while it is not whole yet.
pub fn decode(bytes: &[u8]) -> Result<Option<(Frame, usize)>, DecodeError> {
    let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else {
        return Ok(None);
    };
    let head = u32::from_le_bytes(*head);
    let (kind, len) = (head as u8, (head >> 8) as usize);
    // A wrong kind or length is known before the body has come, so nobody can make us wait for it.
    if len > body_bytes_max(kind)? {
        return Err(DecodeError::TooLong);
    }
    let Some(body) = bytes.get(HEAD_BYTES..HEAD_BYTES + len) else {
        return Ok(None);
    };
    let mut r = Reader::new(body);
    let frame = decode_body(kind, &mut r)?;
    r.end()?;
    Ok(Some((frame, HEAD_BYTES + len)))
}

/// What somebody whom nobody knows yet has said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A frame that may be listened to, and how many bytes it takes.
    Frame(Frame, usize),
    /// Not all of one yet.
    Part,
    /// It asks for something that is served to peers only, or says more than strangers may. The rest of it is not looked at.
    NotForStrangers,
}

/// As [`decode`], of a sender that nobody vouches for: of whatever length it says its frame is, little is kept, and nothing is decoded but what
/// two ends need to come to know each other.
pub fn decode_from_stranger(bytes: &[u8]) -> Result<Heard, DecodeError> {
    let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else {
        return Ok(Heard::Part);
    };
    let head = u32::from_le_bytes(*head);
    let (kind, len) = (head as u8, (head >> 8) as usize);
    match kind {
        kind::HELLO..=kind::PONG => {}
        kind::MESSAGE if len <= STRANGER_MESSAGE_BYTES_MAX => {}
        _ if len > body_bytes_max(kind)? => return Err(DecodeError::TooLong),
        _ => return Ok(Heard::NotForStrangers),
    }
    Ok(match decode(bytes)? {
        Some((frame, used)) => Heard::Frame(frame, used),
        None => Heard::Part,
    })
}

/// Feeds bytes to the decoder as a connection would, and checks what must hold for any input. For fuzzers and property tests.
pub(crate) fn check_frames(bytes: &[u8]) {
    let mut rest = bytes;
    if let Ok(Heard::Frame(frame, used)) = decode_from_stranger(bytes) {
        assert_eq!(decode(bytes), Ok(Some((frame, used))));
        assert!(used <= HEAD_BYTES + STRANGER_MESSAGE_BYTES_MAX);
    }
    while let Ok(Some((frame, used))) = decode(rest) {
        assert!(used >= HEAD_BYTES && used <= rest.len());
        if let Frame::ReadRequest(ReadRequest { spans, .. }) | Frame::WriteRequest(WriteRequest { spans, .. }) = &frame
        {
            assert!(spans.runs().len() <= RUNS_MAX && spans.bytes() <= MOVE_BYTES_MAX);
        }
        let mut again = Vec::new();
        encode(&frame, &mut again);
        let (same, _) = decode(&again)
            .expect("what was encoded decodes")
            .expect("what was encoded is whole");
        assert_eq!(same, frame);
        rest = &rest[used..];
    }
}

fn head(kind: u8, len: usize) -> [u8; HEAD_BYTES] {
    assert!(len <= BODY_BYTES_MAX, "a frame body of {len} bytes");
    (u32::from(kind) | (len as u32) << 8).to_le_bytes()
}

fn body_bytes_max(kind: u8) -> Result<usize, DecodeError> {
    match kind {
        kind::READ_REQUEST | kind::WRITE_REQUEST => Ok(BODY_BYTES_MAX),
        kind::MESSAGE => Ok(MESSAGE_BYTES_MAX),
        kind::ATOMIC_REQUEST => Ok(128),
        kind::HELLO..=kind::CANCEL | kind::ATOMIC_REPLY => Ok(64),
        _ => Err(DecodeError::Invalid),
    }
}

fn encode_body(frame: &Frame, w: &mut Writer) -> u8 {
    match frame {
        Frame::Hello {
            version,
            path,
            index,
            connections,
            sent,
        } => {
            w.u64_fixed(MAGIC).varint(u64::from(*version)).u128_fixed(*path);
            w.varint(u64::from(*index))
                .varint(u64::from(*connections))
                .varint(sent.as_ns());
            kind::HELLO
        }
        Frame::Welcome { version, echo, sent } => {
            w.u64_fixed(MAGIC)
                .varint(u64::from(*version))
                .varint(echo.as_ns())
                .varint(sent.as_ns());
            kind::WELCOME
        }
        Frame::Ready => kind::READY,
        Frame::Ping { sent } => {
            w.varint(sent.as_ns());
            kind::PING
        }
        Frame::Pong { echo, read } => {
            w.varint(echo.as_ns()).varint(read.as_ns());
            kind::PONG
        }
        Frame::ReadRequest(request) => {
            encode_request(w, request.op, request.deadline, &request.key);
            w.u8(u8::from(request.checksum)).spans(&request.spans);
            kind::READ_REQUEST
        }
        Frame::ReadData { op, len } => {
            w.varint(*op).varint(*len);
            kind::READ_DATA
        }
        Frame::ReadEnd { op, outcome } => {
            w.varint(*op);
            encode_outcome(w, outcome);
            kind::READ_END
        }
        Frame::WriteRequest(request) => {
            encode_request(w, request.op, request.deadline, &request.key);
            w.u8(u8::from(request.checksum) | u8::from(request.arrival.is_some()) << 1);
            if let Some(Arrival { tag, index }) = request.arrival {
                w.varint(tag).varint(u64::from(index));
            }
            w.spans(&request.spans);
            kind::WRITE_REQUEST
        }
        Frame::WriteData { op, len } => {
            w.varint(*op).varint(*len);
            kind::WRITE_DATA
        }
        Frame::WriteEnd { op, complete } => {
            w.varint(*op).u8(u8::from(*complete));
            kind::WRITE_END
        }
        Frame::WriteAck { op, outcome } => {
            w.varint(*op);
            encode_outcome(w, outcome);
            kind::WRITE_ACK
        }
        Frame::Cancel { op } => {
            w.varint(*op);
            kind::CANCEL
        }
        Frame::Message(payload) => {
            w.buf.extend_from_slice(payload);
            kind::MESSAGE
        }
        Frame::AtomicRequest(request) => {
            encode_request(w, request.op, request.deadline, &request.key);
            w.varint(request.offset).act(request.act);
            kind::ATOMIC_REQUEST
        }
        Frame::AtomicReply { op, outcome } => {
            w.varint(*op).found(*outcome);
            kind::ATOMIC_REPLY
        }
    }
}

fn decode_body(kind: u8, r: &mut Reader<'_>) -> Result<Frame, DecodeError> {
    Ok(match kind {
        kind::HELLO => {
            magic(r)?;
            let (version, path) = (r.u32()?, r.u128_fixed()?);
            let (index, connections, sent) = (r.u32()?, r.u32()?, time(r)?);
            if connections > CONNECTIONS_MAX || index >= connections {
                return Err(DecodeError::Invalid);
            }
            Frame::Hello {
                version,
                path,
                index,
                connections,
                sent,
            }
        }
        kind::WELCOME => {
            magic(r)?;
            Frame::Welcome {
                version: r.u32()?,
                echo: time(r)?,
                sent: time(r)?,
            }
        }
        kind::READY => Frame::Ready,
        kind::PING => Frame::Ping { sent: time(r)? },
        kind::PONG => Frame::Pong {
            echo: time(r)?,
            read: time(r)?,
        },
        kind::READ_REQUEST => {
            let (op, deadline, key) = decode_request(r)?;
            let flags = flags(r, 1)?;
            Frame::ReadRequest(ReadRequest {
                op,
                deadline,
                key,
                spans: spans(r)?,
                checksum: flags & 1 != 0,
            })
        }
        kind::READ_DATA => {
            let (op, len) = data(r)?;
            Frame::ReadData { op, len }
        }
        kind::READ_END => Frame::ReadEnd {
            op: r.varint()?,
            outcome: decode_outcome(r)?,
        },
        kind::WRITE_REQUEST => {
            let (op, deadline, key) = decode_request(r)?;
            let flags = flags(r, 3)?;
            let arrival = if flags & 2 != 0 {
                Some(Arrival {
                    tag: r.varint()?,
                    index: r.u32()?,
                })
            } else {
                None
            };
            Frame::WriteRequest(WriteRequest {
                op,
                deadline,
                key,
                spans: spans(r)?,
                checksum: flags & 1 != 0,
                arrival,
            })
        }
        kind::WRITE_DATA => {
            let (op, len) = data(r)?;
            Frame::WriteData { op, len }
        }
        kind::WRITE_END => Frame::WriteEnd {
            op: r.varint()?,
            complete: flags(r, 1)? != 0,
        },
        kind::WRITE_ACK => Frame::WriteAck {
            op: r.varint()?,
            outcome: decode_outcome(r)?,
        },
        kind::CANCEL => Frame::Cancel { op: r.varint()? },
        kind::MESSAGE => Frame::Message(r.take(r.remaining())?.to_vec()),
        kind::ATOMIC_REQUEST => {
            let (op, deadline, key) = decode_request(r)?;
            Frame::AtomicRequest(AtomicRequest {
                op,
                deadline,
                key,
                offset: r.varint()?,
                act: r.act()?,
            })
        }
        kind::ATOMIC_REPLY => Frame::AtomicReply {
            op: r.varint()?,
            outcome: r.found()?,
        },
        _ => return Err(DecodeError::Invalid),
    })
}

fn magic(r: &mut Reader<'_>) -> Result<(), DecodeError> {
    if r.u64_fixed()? == MAGIC {
        Ok(())
    } else {
        Err(DecodeError::Invalid)
    }
}

fn time(r: &mut Reader<'_>) -> Result<Time, DecodeError> {
    r.varint().map(Time::from_ns)
}

fn flags(r: &mut Reader<'_>, known: u8) -> Result<u8, DecodeError> {
    let flags = r.u8()?;
    if flags & !known == 0 {
        Ok(flags)
    } else {
        Err(DecodeError::Invalid)
    }
}

fn data(r: &mut Reader<'_>) -> Result<(u64, u64), DecodeError> {
    let (op, len) = (r.varint()?, r.varint()?);
    match len {
        0 => Err(DecodeError::Invalid),
        1..=DATA_BYTES_MAX => Ok((op, len)),
        _ => Err(DecodeError::TooLong),
    }
}

fn spans(r: &mut Reader<'_>) -> Result<Spans, DecodeError> {
    let spans = r.spans(RUNS_MAX)?;
    if spans.bytes() > MOVE_BYTES_MAX {
        return Err(DecodeError::TooLong);
    }
    Ok(spans)
}

fn encode_request(w: &mut Writer, op: u64, deadline: Time, key: &RegionKey) {
    w.varint(op).varint(deadline.as_ns()).key(key);
}

fn decode_request(r: &mut Reader<'_>) -> Result<(u64, Time, RegionKey), DecodeError> {
    Ok((r.varint()?, time(r)?, r.key()?))
}

fn encode_outcome(w: &mut Writer, outcome: &Result<Option<u64>, Ended>) {
    match outcome {
        Ok(None) => w.u8(0),
        Ok(Some(sum)) => w.u8(1).u64_fixed(*sum),
        Err(Ended::Aborted) => w.u8(2),
        Err(Ended::Refused(refusal)) => w.u8(3).refusal(*refusal),
    };
}

fn decode_outcome(r: &mut Reader<'_>) -> Result<Result<Option<u64>, Ended>, DecodeError> {
    Ok(match r.u8()? {
        0 => Ok(None),
        1 => Ok(Some(r.u64_fixed()?)),
        2 => Err(Ended::Aborted),
        3 => Err(Ended::Refused(r.refusal()?)),
        _ => return Err(DecodeError::Invalid),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use weft_plan::Run;
    use weft_protocol::Epoch;

    use super::*;

    fn any_spans() -> impl Strategy<Value = Spans> {
        prop::collection::vec((0u64..1 << 40, 1u64..1 << 12, 0u64..1 << 20, 1u64..20), 0..40).prop_map(|runs| {
            let mut spans = Spans::new();
            for (offset, len, gap, count) in runs {
                let stride = if count == 1 { len } else { len + gap };
                spans.push_run(Run {
                    offset,
                    len,
                    stride,
                    count,
                });
            }
            spans
        })
    }

    fn any_key() -> impl Strategy<Value = RegionKey> {
        (any::<u64>(), any::<u32>(), any::<u128>()).prop_map(|(epoch, slot, secret)| RegionKey {
            epoch: Epoch(epoch),
            slot,
            secret,
        })
    }

    fn any_outcome() -> impl Strategy<Value = Result<Option<u64>, Ended>> {
        prop_oneof![
            any::<Option<u64>>().prop_map(Ok),
            Just(Err(Ended::Aborted)),
            prop::sample::select(&Refusal::ALL[..]).prop_map(|refusal| Err(Ended::Refused(refusal))),
        ]
    }

    fn any_time() -> impl Strategy<Value = Time> {
        any::<u64>().prop_map(Time::from_ns)
    }

    fn any_atomic() -> impl Strategy<Value = Frame> {
        let act = prop_oneof![
            any::<u64>().prop_map(AtomicAct::FetchAdd),
            any::<[u64; 2]>().prop_map(|[expected, new]| AtomicAct::CompareSwap { expected, new }),
        ];
        let found = prop_oneof![
            any::<u64>().prop_map(Ok),
            prop::sample::select(&Refusal::ALL[..]).prop_map(Err),
        ];
        prop_oneof![
            (any::<u64>(), any_time(), any_key(), any::<u64>(), act).prop_map(|(op, deadline, key, offset, act)| {
                Frame::AtomicRequest(AtomicRequest {
                    op,
                    deadline,
                    key,
                    offset,
                    act,
                })
            }),
            (any::<u64>(), found).prop_map(|(op, outcome)| Frame::AtomicReply { op, outcome }),
        ]
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        let any_arrival =
            proptest::option::of((any::<u64>(), any::<u32>()).prop_map(|(tag, index)| Arrival { tag, index }));
        prop_oneof![
            (any::<u32>(), any::<u128>(), 0u32..8, any_time()).prop_map(|(version, path, index, sent)| Frame::Hello {
                version,
                path,
                index,
                connections: 8,
                sent
            }),
            (any::<u32>(), any_time(), any_time()).prop_map(|(version, echo, sent)| Frame::Welcome {
                version,
                echo,
                sent
            }),
            Just(Frame::Ready),
            any_time().prop_map(|sent| Frame::Ping { sent }),
            (any_time(), any_time()).prop_map(|(echo, read)| Frame::Pong { echo, read }),
            (any::<u64>(), any_time(), any_key(), any_spans(), any::<bool>()).prop_map(
                |(op, deadline, key, spans, checksum)| Frame::ReadRequest(ReadRequest {
                    op,
                    deadline,
                    key,
                    spans,
                    checksum
                })
            ),
            (
                any::<u64>(),
                any_time(),
                any_key(),
                any_spans(),
                any::<bool>(),
                any_arrival
            )
                .prop_map(|(op, deadline, key, spans, checksum, arrival)| Frame::WriteRequest(
                    WriteRequest {
                        op,
                        deadline,
                        key,
                        spans,
                        checksum,
                        arrival
                    }
                )),
            (any::<u64>(), 1..=DATA_BYTES_MAX).prop_map(|(op, len)| Frame::ReadData { op, len }),
            (any::<u64>(), 1..=DATA_BYTES_MAX).prop_map(|(op, len)| Frame::WriteData { op, len }),
            (any::<u64>(), any_outcome()).prop_map(|(op, outcome)| Frame::ReadEnd { op, outcome }),
            (any::<u64>(), any_outcome()).prop_map(|(op, outcome)| Frame::WriteAck { op, outcome }),
            (any::<u64>(), any::<bool>()).prop_map(|(op, complete)| Frame::WriteEnd { op, complete }),
            any::<u64>().prop_map(|op| Frame::Cancel { op }),
            prop::collection::vec(any::<u8>(), 0..300).prop_map(Frame::Message),
            any_atomic(),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_the_wire_and_are_never_believed_before_they_are_whole(frame in any_frame(), cut in any::<prop::sample::Index>()) {
            let mut bytes = Vec::new();
            encode(&frame, &mut bytes);
            let (same, used) = decode(&bytes).unwrap().unwrap();
            prop_assert_eq!(used, bytes.len());
            prop_assert_eq!(same, frame);
            prop_assert_eq!(decode(&bytes[..cut.index(bytes.len())]), Ok(None));
            check_frames(&bytes);
        }

        #[test]
        fn garbage_is_refused_not_believed(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            check_frames(&bytes);
        }

        #[test]
        fn a_frame_with_flipped_bytes_is_refused_or_another_frame(frame in any_frame(), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let mut bytes = Vec::new();
            encode(&frame, &mut bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            check_frames(&bytes);
        }
    }

    #[test]
    fn what_cannot_be_is_refused_before_its_body_comes() {
        let head = |kind: u8, len: u32| (u32::from(kind) | len << 8).to_le_bytes();
        assert_eq!(decode(&head(0, 0)), Err(DecodeError::Invalid));
        assert_eq!(decode(&head(200, 1)), Err(DecodeError::Invalid));
        assert_eq!(
            decode(&head(kind::MESSAGE, MESSAGE_BYTES_MAX as u32 + 1)),
            Err(DecodeError::TooLong)
        );
        assert_eq!(decode(&head(kind::PING, 65)), Err(DecodeError::TooLong));
        assert_eq!(decode(&head(kind::READ_REQUEST, 0xff_ffff)), Err(DecodeError::TooLong));
    }
}
