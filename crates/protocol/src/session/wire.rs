//! The session's messages as bytes.
//!
//! Greetings (hello, challenge, proof, welcome, introduction, refusal) begin with a magic number and, where it matters, the versions spoken, in
//! a form that no version may change. Messages of an established session begin with one byte of kind and end with a code of
//! [`CODE_BYTES`](super::keys::CODE_BYTES):
//!
//! ```text
//! traffic   01  number  next expected  selective bitmap  { sequence  control }*  code
//! join      02  session  number  label  code
//! traffic   03  as above, from an end that is worried and wants an answer at once
//! ```

use std::sync::Arc;

use weft_plan::{Place, Time};

use super::config::{
    MAX_ADDRESS_BYTES, MAX_ADDRESSES, MAX_GRANT_BYTES, MAX_GRANTS, MAX_MESSAGE_BYTES, MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES, Versions,
};
use super::event::{CloseReason, LeaseId, NotificationId, SessionId};
use super::keys::{CODE_BYTES, PROOF_BYTES, Proof};
use crate::error::Refusal;
use crate::region::{Epoch, RegionKey, RemoteRegion};
use crate::transport::{Grant, PeerAddress};
use crate::wire::{DecodeError, Reader, Writer};

const MAGIC: &[u8; 4] = b"WEFT";
const KIND_TRAFFIC: u8 = 1;
const KIND_JOIN: u8 = 2;
const KIND_TRAFFIC_WORRIED: u8 = 3;
const GREETING_HELLO: u8 = 1;
const GREETING_CHALLENGE: u8 = 2;
const GREETING_PROOF: u8 = 3;
const GREETING_REFUSAL: u8 = 4;
const GREETING_WELCOME: u8 = 5;
const GREETING_INTRODUCTION: u8 = 6;

/// The bytes of a selective acknowledgement: one bit for each message after the next expected one.
pub(super) const SELECTIVE_BYTES: usize = 32;
/// What a traffic message adds to its controls, at most.
pub(super) const TRAFFIC_OVERHEAD: usize = 1 + 10 + 10 + 1 + SELECTIVE_BYTES + CODE_BYTES;
/// What a control's sequence and length add to it, at most.
pub(super) const CONTROL_OVERHEAD: usize = 10 + 3;
/// The largest control: it fits a message of its own.
pub(super) const MAX_CONTROL_BYTES: usize = MAX_MESSAGE_BYTES - TRAFFIC_OVERHEAD - CONTROL_OVERHEAD;

const _: () = assert!(MAX_PAYLOAD_BYTES + 64 <= MAX_CONTROL_BYTES);
const _: () = assert!(MAX_GRANTS * (MAX_GRANT_BYTES + MAX_NAME_BYTES + 6) + MAX_NAME_BYTES + 128 <= MAX_CONTROL_BYTES);
const _: () = assert!(MAX_ADDRESSES * (MAX_ADDRESS_BYTES + 2) + 2 * MAX_NAME_BYTES + 256 <= MAX_MESSAGE_BYTES);

/// What the first message on a path that a peer has opened is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Peek {
    /// A new session: hand the message to [`Session::accept`](super::Session::accept)'s.
    Hello,
    /// A further path of this session, if there is one and the message turns out to be authentic.
    Join { session: SessionId },
}

/// Looks at the first message on a path that a peer has opened, believing nothing.
pub fn peek(bytes: &[u8]) -> Result<Peek, DecodeError> {
    match Message::decode(bytes)? {
        Message::Hello { .. } => Ok(Peek::Hello),
        Message::Join { session } => Ok(Peek::Join { session }),
        _ => Err(DecodeError::Invalid),
    }
}

/// A message, as far as it can be told apart without a key.
#[derive(Debug)]
pub(super) enum Message<'a> {
    /// The versions are known before the rest is read, because the rest may be of a version that is not ours.
    Hello(Opening<'a>),
    Challenge(Opening<'a>),
    Proof {
        proof: Proof,
    },
    Welcome(Signed<'a>),
    Introduction(Signed<'a>),
    /// `echo` is from the nonce of the end that is refused, so that only somebody who saw its greeting can refuse it.
    Refusal {
        echo: u128,
        reason: GreetingRefusal,
    },
    Join {
        session: SessionId,
    },
    Traffic,
}

/// All that an end says before it has proof of the other: which versions it speaks, and a number that nobody has used before.
#[derive(Debug)]
pub(super) struct Opening<'a> {
    pub(super) versions: Versions,
    rest: Reader<'a>,
}

impl Opening<'_> {
    /// What a refusal must repeat: the same place in every version.
    pub(super) fn echo(&self) -> Result<u128, DecodeError> {
        self.rest.clone().u128_fixed()
    }

    /// The nonce, of an opening of our own version.
    pub(super) fn nonce(mut self) -> Result<Nonce, DecodeError> {
        let nonce = read_array(&mut self.rest)?;
        self.rest.end()?;
        Ok(nonce)
    }
}

/// An introduction and the code that vouches for it.
#[derive(Debug)]
pub(super) struct Signed<'a> {
    pub(super) introduction: &'a [u8],
    pub(super) code: Proof,
}

impl<'a> Signed<'a> {
    fn decode(mut r: Reader<'a>) -> Result<Signed<'a>, DecodeError> {
        let len = r.remaining().checked_sub(PROOF_BYTES).ok_or(DecodeError::Truncated)?;
        let introduction = r.take(len)?;
        let code = read_array(&mut r)?;
        Ok(Signed { introduction, code })
    }
}

pub(super) type Nonce = [u8; 32];

/// Why an end does not go on with a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GreetingRefusal {
    OtherVersion { theirs: Versions },
    WrongSecret,
    OneSelf,
    NameTaken,
    Unwanted,
}

impl<'a> Message<'a> {
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Message<'a>, DecodeError> {
        if bytes.len() > MAX_MESSAGE_BYTES {
            return Err(DecodeError::TooLong);
        }
        let mut r = Reader::new(bytes);
        match r.u8()? {
            KIND_TRAFFIC | KIND_TRAFFIC_WORRIED => return Ok(Message::Traffic),
            KIND_JOIN => {
                let session = SessionId(r.u128_fixed()?);
                return Ok(Message::Join { session });
            }
            first if first == MAGIC[0] => {}
            _ => return Err(DecodeError::Invalid),
        }
        if r.take(MAGIC.len() - 1)? != &MAGIC[1..] {
            return Err(DecodeError::Invalid);
        }
        match r.u8()? {
            GREETING_HELLO => Ok(Message::Hello(Opening {
                versions: read_versions(&mut r)?,
                rest: r,
            })),
            GREETING_CHALLENGE => Ok(Message::Challenge(Opening {
                versions: read_versions(&mut r)?,
                rest: r,
            })),
            GREETING_WELCOME => Ok(Message::Welcome(Signed::decode(r)?)),
            GREETING_INTRODUCTION => Ok(Message::Introduction(Signed::decode(r)?)),
            GREETING_PROOF => {
                let proof = read_array(&mut r)?;
                r.end()?;
                Ok(Message::Proof { proof })
            }
            GREETING_REFUSAL => {
                let echo = r.u128_fixed()?;
                let reason = match r.u8()? {
                    0 => GreetingRefusal::OtherVersion {
                        theirs: read_versions(&mut r)?,
                    },
                    1 => GreetingRefusal::WrongSecret,
                    2 => GreetingRefusal::OneSelf,
                    3 => GreetingRefusal::NameTaken,
                    4 => GreetingRefusal::Unwanted,
                    _ => return Err(DecodeError::Invalid),
                };
                r.end()?;
                Ok(Message::Refusal { echo, reason })
            }
            _ => Err(DecodeError::Invalid),
        }
    }
}

/// What an end says of itself once it has proof of the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    pub(super) name: String,
    pub(super) epoch: Epoch,
    pub(super) host: String,
    pub(super) addresses: Vec<PeerAddress>,
    pub(super) silence_max: Time,
}

impl Introduction {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.str(&self.name).u64_fixed(self.epoch.0).str(&self.host);
        w.varint(self.silence_max.as_ns());
        w.varint(self.addresses.len() as u64);
        for address in &self.addresses {
            w.str(&address.0);
        }
        w.buf
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Introduction, DecodeError> {
        let mut r = Reader::new(bytes);
        let name = read_name(&mut r)?;
        let epoch = Epoch(r.u64_fixed()?);
        let host = r.str(MAX_NAME_BYTES)?.to_owned();
        let silence_max = Time::from_ns(r.varint()?);
        let count = read_count(&mut r, MAX_ADDRESSES)?;
        let mut addresses = Vec::with_capacity(count);
        for _ in 0..count {
            addresses.push(PeerAddress(r.str(MAX_ADDRESS_BYTES)?.to_owned()));
        }
        r.end()?;
        Ok(Introduction {
            name,
            epoch,
            host,
            addresses,
            silence_max,
        })
    }
}

/// What a refusal of an end with this nonce must repeat.
pub(super) fn echo(nonce: &Nonce) -> u128 {
    u128::from_le_bytes(std::array::from_fn(|i| nonce[i]))
}

pub(super) fn encode_hello(versions: Versions, nonce: &Nonce) -> Vec<u8> {
    encode_opening(GREETING_HELLO, versions, nonce)
}

pub(super) fn encode_challenge(versions: Versions, nonce: &Nonce) -> Vec<u8> {
    encode_opening(GREETING_CHALLENGE, versions, nonce)
}

/// The nonce comes first, at the same place in every version, so that one end can refuse another without being able to read the rest.
fn encode_opening(kind: u8, versions: Versions, nonce: &Nonce) -> Vec<u8> {
    let mut w = greeting(kind);
    write_versions(&mut w, versions);
    w.buf.extend_from_slice(nonce);
    w.buf
}

pub(super) fn encode_welcome(introduction: &[u8], code: &Proof) -> Vec<u8> {
    encode_signed(GREETING_WELCOME, introduction, code)
}

pub(super) fn encode_introduction(introduction: &[u8], code: &Proof) -> Vec<u8> {
    encode_signed(GREETING_INTRODUCTION, introduction, code)
}

fn encode_signed(kind: u8, introduction: &[u8], code: &Proof) -> Vec<u8> {
    let mut w = greeting(kind);
    w.buf.extend_from_slice(introduction);
    w.buf.extend_from_slice(code);
    w.buf
}

pub(super) fn encode_proof(proof: &Proof) -> Vec<u8> {
    let mut w = greeting(GREETING_PROOF);
    w.buf.extend_from_slice(proof);
    w.buf
}

pub(super) fn encode_refusal(echo: u128, reason: GreetingRefusal) -> Vec<u8> {
    let mut w = greeting(GREETING_REFUSAL);
    w.u128_fixed(echo);
    match reason {
        // The versions are those of the end that refuses: theirs, to the end that reads this.
        GreetingRefusal::OtherVersion { theirs } => write_versions(w.u8(0), theirs),
        GreetingRefusal::WrongSecret => w.u8(1),
        GreetingRefusal::OneSelf => w.u8(2),
        GreetingRefusal::NameTaken => w.u8(3),
        GreetingRefusal::Unwanted => w.u8(4),
    };
    w.buf
}

/// "This path belongs to our session": everything but the code.
pub(super) fn encode_join(session: SessionId, number: u64, label: u64) -> Vec<u8> {
    let mut w = Writer::new();
    w.u8(KIND_JOIN).u128_fixed(session.0).varint(number).varint(label);
    w.buf
}

/// The number and label of a join, which must be known before its code can be checked.
pub(super) fn decode_join(bytes: &[u8]) -> Result<(u64, u64), DecodeError> {
    let body = bytes
        .len()
        .checked_sub(CODE_BYTES)
        .ok_or(DecodeError::Truncated)
        .map(|len| &bytes[..len])?;
    let mut r = Reader::new(body);
    r.take(1 + 16)?;
    let (number, label) = (r.varint()?, r.varint()?);
    r.end()?;
    Ok((number, label))
}

/// The head of a traffic message; controls follow.
pub(super) fn begin_traffic(worried: bool, number: u64, next: u64, selective: &[u8], room: usize) -> Writer {
    let kind = if worried { KIND_TRAFFIC_WORRIED } else { KIND_TRAFFIC };
    let mut w = Writer {
        buf: Vec::with_capacity(room + TRAFFIC_OVERHEAD),
    };
    w.u8(kind).varint(number).varint(next).bytes(selective);
    w
}

/// A traffic message whose code has been checked and removed.
#[derive(Debug)]
pub(super) struct Traffic<'a> {
    /// The sender has not heard of this end for a while and wants an answer at once.
    pub(super) worried: bool,
    pub(super) number: u64,
    /// The sequence of the first control that the sender has not received.
    pub(super) next: u64,
    /// Bit `i` says that control `next + 1 + i` has been received.
    pub(super) selective: &'a [u8],
    rest: Reader<'a>,
}

impl<'a> Traffic<'a> {
    pub(super) fn decode(opened: &'a [u8]) -> Result<Traffic<'a>, DecodeError> {
        let mut r = Reader::new(opened);
        Ok(Traffic {
            worried: r.u8()? == KIND_TRAFFIC_WORRIED,
            number: r.varint()?,
            next: r.varint()?,
            selective: r.bytes(SELECTIVE_BYTES)?,
            rest: r,
        })
    }

    /// The next control's sequence and bytes.
    pub(super) fn next_control(&mut self) -> Result<Option<(u64, &'a [u8])>, DecodeError> {
        if self.rest.remaining() == 0 {
            return Ok(None);
        }
        let sequence = self.rest.varint()?;
        Ok(Some((sequence, self.rest.bytes(MAX_CONTROL_BYTES)?)))
    }
}

/// What the ends tell each other, in order and once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Control<'a> {
    Publish {
        name: &'a str,
        region: RemoteRegion,
    },
    Withdraw {
        name: &'a str,
    },
    Notify {
        payload: &'a [u8],
        after: Option<After>,
    },
    /// A notification that had to wait for its data has been handed on.
    Delivered {
        id: NotificationId,
    },
    /// Forget what has arrived under this tag, and the notifications that wait for it.
    Revoke {
        tag: u64,
    },
    Fence {
        label: u64,
    },
    FenceDone {
        label: u64,
    },
    /// A path that was announced under this label has been used, and is lost: what has arrived over it counts.
    Joined {
        label: u64,
    },
    LeaseAsk {
        id: LeaseId,
        region: RegionKey,
        duration: Time,
    },
    LeaseRenew {
        id: LeaseId,
        duration: Time,
    },
    LeaseAnswer {
        id: LeaseId,
        granted: Result<Time, Refusal>,
    },
    LeaseReturn {
        id: LeaseId,
    },
    Goodbye {
        reason: CloseReason,
    },
}

/// Hold a notification until `parts` parts of `tag` are in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct After {
    pub(super) id: NotificationId,
    pub(super) tag: u64,
    pub(super) parts: u32,
}

impl<'a> Control<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        match self {
            Control::Publish { name, region } => write_region(w.u8(1).str(name), region),
            Control::Withdraw { name } => w.u8(2).str(name),
            Control::Notify { payload, after: None } => {
                w.buf.reserve_exact(payload.len() + 4);
                w.u8(3).bytes(payload)
            }
            Control::Notify {
                payload,
                after: Some(after),
            } => {
                w.buf.reserve_exact(payload.len() + 29);
                w.u8(4).varint(after.id.0).varint(after.tag);
                w.varint(u64::from(after.parts)).bytes(payload)
            }
            Control::Delivered { id } => w.u8(5).varint(id.0),
            Control::Revoke { tag } => w.u8(6).varint(*tag),
            Control::Fence { label } => w.u8(7).varint(*label),
            Control::FenceDone { label } => w.u8(8).varint(*label),
            Control::LeaseAsk { id, region, duration } => w.u8(9).varint(id.0).key(region).varint(duration.as_ns()),
            Control::LeaseRenew { id, duration } => w.u8(10).varint(id.0).varint(duration.as_ns()),
            Control::LeaseAnswer { id, granted: Ok(time) } => w.u8(11).varint(id.0).varint(time.as_ns()),
            Control::LeaseAnswer {
                id,
                granted: Err(refusal),
            } => w.u8(12).varint(id.0).refusal(*refusal),
            Control::LeaseReturn { id } => w.u8(13).varint(id.0),
            Control::Goodbye { reason } => w.u8(14).u8(match reason {
                CloseReason::Done => 0,
                CloseReason::NameTaken => 1,
                CloseReason::Replaced => 2,
                CloseReason::Misbehaved => 3,
                CloseReason::Leaving => 4,
            }),
            Control::Joined { label } => w.u8(15).varint(*label),
        };
        w.buf
    }

    pub(super) fn decode(bytes: &'a [u8]) -> Result<Control<'a>, DecodeError> {
        let mut r = Reader::new(bytes);
        let control = match r.u8()? {
            1 => Control::Publish {
                name: read_region_name(&mut r)?,
                region: read_region(&mut r)?,
            },
            2 => Control::Withdraw {
                name: read_region_name(&mut r)?,
            },
            3 => Control::Notify {
                payload: r.bytes(MAX_PAYLOAD_BYTES)?,
                after: None,
            },
            4 => {
                let after = After {
                    id: NotificationId(r.varint()?),
                    tag: r.varint()?,
                    parts: r.u32()?,
                };
                Control::Notify {
                    payload: r.bytes(MAX_PAYLOAD_BYTES)?,
                    after: Some(after),
                }
            }
            5 => Control::Delivered {
                id: NotificationId(r.varint()?),
            },
            6 => Control::Revoke { tag: r.varint()? },
            7 => Control::Fence { label: r.varint()? },
            8 => Control::FenceDone { label: r.varint()? },
            9 => Control::LeaseAsk {
                id: LeaseId(r.varint()?),
                region: r.key()?,
                duration: Time::from_ns(r.varint()?),
            },
            10 => Control::LeaseRenew {
                id: LeaseId(r.varint()?),
                duration: Time::from_ns(r.varint()?),
            },
            11 => Control::LeaseAnswer {
                id: LeaseId(r.varint()?),
                granted: Ok(Time::from_ns(r.varint()?)),
            },
            12 => Control::LeaseAnswer {
                id: LeaseId(r.varint()?),
                granted: Err(r.refusal()?),
            },
            13 => Control::LeaseReturn {
                id: LeaseId(r.varint()?),
            },
            15 => Control::Joined { label: r.varint()? },
            14 => Control::Goodbye {
                reason: match r.u8()? {
                    0 => CloseReason::Done,
                    1 => CloseReason::NameTaken,
                    2 => CloseReason::Replaced,
                    3 => CloseReason::Misbehaved,
                    4 => CloseReason::Leaving,
                    _ => return Err(DecodeError::Invalid),
                },
            },
            _ => return Err(DecodeError::Invalid),
        };
        r.end()?;
        Ok(control)
    }
}

fn greeting(kind: u8) -> Writer {
    let mut w = Writer::new();
    w.buf.extend_from_slice(MAGIC);
    w.u8(kind);
    w
}

fn write_versions(w: &mut Writer, versions: Versions) -> &mut Writer {
    w.varint(u64::from(versions.min)).varint(u64::from(versions.max))
}

fn read_versions(r: &mut Reader<'_>) -> Result<Versions, DecodeError> {
    let mut version = || u16::try_from(r.varint()?).map_err(|_| DecodeError::Overflow);
    let (min, max) = (version()?, version()?);
    if min > max {
        return Err(DecodeError::Invalid);
    }
    Ok(Versions { min, max })
}

fn read_array<const N: usize>(r: &mut Reader<'_>) -> Result<[u8; N], DecodeError> {
    r.take(N)?.try_into().map_err(|_| DecodeError::Truncated)
}

fn read_count(r: &mut Reader<'_>, max: usize) -> Result<usize, DecodeError> {
    match usize::try_from(r.varint()?) {
        Ok(count) if count <= max => Ok(count),
        _ => Err(DecodeError::TooLong),
    }
}

fn read_name(r: &mut Reader<'_>) -> Result<String, DecodeError> {
    read_region_name(r).map(str::to_owned)
}

fn read_region_name<'a>(r: &mut Reader<'a>) -> Result<&'a str, DecodeError> {
    match r.str(MAX_NAME_BYTES)? {
        "" => Err(DecodeError::Invalid),
        name => Ok(name),
    }
}

pub(super) fn write_region<'w>(w: &'w mut Writer, region: &RemoteRegion) -> &'w mut Writer {
    w.key(&region.key).varint(region.len).access(region.access);
    match region.place {
        Place::Dram { numa: None } => w.u8(0),
        Place::Dram { numa: Some(node) } => w.u8(1).varint(u64::from(node)),
        Place::Gpu { ordinal } => w.u8(2).varint(u64::from(ordinal)),
        Place::File => w.u8(3),
        Place::Object => w.u8(4),
    };
    w.varint(region.grants.len() as u64);
    for (transport, grant) in region.grants.iter() {
        w.str(transport).bytes(&grant.0);
    }
    w
}

pub(super) fn read_region(r: &mut Reader<'_>) -> Result<RemoteRegion, DecodeError> {
    let (key, len, access) = (r.key()?, r.varint()?, r.access()?);
    let narrow = |v: u64| u16::try_from(v).map_err(|_| DecodeError::Overflow);
    let place = match r.u8()? {
        0 => Place::Dram { numa: None },
        1 => Place::Dram {
            numa: Some(narrow(r.varint()?)?),
        },
        2 => Place::Gpu {
            ordinal: narrow(r.varint()?)?,
        },
        3 => Place::File,
        4 => Place::Object,
        _ => return Err(DecodeError::Invalid),
    };
    let count = read_count(r, MAX_GRANTS)?;
    let mut grants = Vec::with_capacity(count);
    for _ in 0..count {
        let transport = r.str(MAX_NAME_BYTES)?.to_owned();
        grants.push((transport, Grant(r.bytes(MAX_GRANT_BYTES)?.to_vec())));
    }
    Ok(RemoteRegion {
        key,
        len,
        place,
        access,
        grants: Arc::from(grants),
    })
}
