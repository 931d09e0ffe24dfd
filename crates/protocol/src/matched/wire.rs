//! What the two ends of a channel say.

use super::{ChannelError, GROUP_MAX};
use crate::wire::{DecodeError, Reader, Writer};

/// A receive as its sender is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receive {
    pub tag: i32,
    /// How many bytes it has room for.
    pub len: u64,
    /// Where: a region that the sender was told of under this number, and how far into it.
    pub region: u32,
    pub offset: u64,
    /// Under which a long message arrives.
    pub number: u32,
}

/// A word of one end to the other. All but the first are said to a channel of the other end, by the number that it has there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// To a listener: a channel is to be opened, which has this number here.
    Open {
        token: u128,
        from: u64,
    },
    /// It is, under this number.
    Opened {
        from: u64,
    },
    Refused,
    /// The sender may write here.
    Region {
        number: u32,
        region: Vec<u8>,
    },
    /// It may not any more.
    Forget {
        number: u32,
    },
    /// Receives, in the order in which they were posted.
    Posted(Vec<Receive>),
    /// The nth message of a tag. Its bytes follow.
    Eager {
        tag: i32,
        nth: u64,
    },
    Coming {
        number: u32,
        len: u64,
    },
    Landed {
        number: u32,
        len: u64,
    },
    /// Has this come?
    Lost {
        number: u32,
    },
    /// It has, or is to go again under another number.
    Answer {
        number: u32,
        anew: Option<u32>,
    },
    Closed,
}

const OPEN: u8 = 1;
const OPENED: u8 = 2;
const REFUSED: u8 = 3;
const REGION: u8 = 4;
const FORGET: u8 = 5;
const POSTED: u8 = 6;
const EAGER: u8 = 7;
const COMING: u8 = 8;
const LANDED: u8 = 9;
const LOST: u8 = 10;
const ANSWER: u8 = 11;
const CLOSED: u8 = 12;

/// Sixteen kibibytes hold the longest grants there are.
const REGION_BYTES_MAX: usize = 40 << 10;

impl Message {
    /// For the channel that has this number at the other end.
    pub fn encode(&self, to: u64) -> Vec<u8> {
        let mut w = Writer::new();
        match self {
            Message::Open { token, from } => w.u8(OPEN).varint(to).u128_fixed(*token).varint(*from),
            Message::Opened { from } => w.u8(OPENED).varint(to).varint(*from),
            Message::Refused => w.u8(REFUSED).varint(to),
            Message::Region { number, region } => w.u8(REGION).varint(to).varint(u64::from(*number)).bytes(region),
            Message::Forget { number } => w.u8(FORGET).varint(to).varint(u64::from(*number)),
            Message::Posted(receives) => {
                w.u8(POSTED).varint(to).varint(receives.len() as u64);
                for r in receives {
                    w.varint(u64::from(r.tag.cast_unsigned())).varint(r.len);
                    w.varint(u64::from(r.region))
                        .varint(r.offset)
                        .varint(u64::from(r.number));
                }
                &mut w
            }
            Message::Eager { tag, nth } => w
                .u8(EAGER)
                .varint(to)
                .varint(u64::from(tag.cast_unsigned()))
                .varint(*nth),
            Message::Coming { number, len } => w.u8(COMING).varint(to).varint(u64::from(*number)).varint(*len),
            Message::Landed { number, len } => w.u8(LANDED).varint(to).varint(u64::from(*number)).varint(*len),
            Message::Lost { number } => w.u8(LOST).varint(to).varint(u64::from(*number)),
            Message::Answer { number, anew } => {
                w.u8(ANSWER).varint(to).varint(u64::from(*number));
                w.varint(anew.map_or(0, |anew| u64::from(anew) + 1))
            }
            Message::Closed => w.u8(CLOSED).varint(to),
        };
        w.buf
    }

    /// Whom a word is for, the word, and the bytes after it, which only an eager message has.
    pub fn decode(bytes: &[u8]) -> Result<(u64, Message, &[u8]), ChannelError> {
        read(bytes).map_err(|_| ChannelError::Misbehaved("it says what cannot be read"))
    }
}

fn read(bytes: &[u8]) -> Result<(u64, Message, &[u8]), DecodeError> {
    let mut r = Reader::new(bytes);
    let kind = r.u8()?;
    let to = r.varint()?;
    let message = match kind {
        OPEN => Message::Open {
            token: r.u128_fixed()?,
            from: r.varint()?,
        },
        OPENED => Message::Opened { from: r.varint()? },
        REFUSED => Message::Refused,
        REGION => {
            let number = r.u32()?;
            let region = r.bytes(REGION_BYTES_MAX)?.to_vec();
            Message::Region { number, region }
        }
        FORGET => Message::Forget { number: r.u32()? },
        POSTED => {
            let count = r.varint()? as usize;
            if count > GROUP_MAX {
                return Err(DecodeError::TooLong);
            }
            let mut receives = Vec::with_capacity(count);
            for _ in 0..count {
                receives.push(Receive {
                    tag: r.u32()?.cast_signed(),
                    len: r.varint()?,
                    region: r.u32()?,
                    offset: r.varint()?,
                    number: r.u32()?,
                });
            }
            Message::Posted(receives)
        }
        EAGER => {
            let tag = r.u32()?.cast_signed();
            let nth = r.varint()?;
            let rest = r.remaining();
            return Ok((to, Message::Eager { tag, nth }, r.take(rest)?));
        }
        COMING => Message::Coming {
            number: r.u32()?,
            len: r.varint()?,
        },
        LANDED => Message::Landed {
            number: r.u32()?,
            len: r.varint()?,
        },
        LOST => Message::Lost { number: r.u32()? },
        ANSWER => {
            let lost = r.u32()?;
            let anew = match r.varint()?.checked_sub(1) {
                None => None,
                Some(anew) => Some(u32::try_from(anew).map_err(|_| DecodeError::Overflow)?),
            };
            Message::Answer { number: lost, anew }
        }
        CLOSED => Message::Closed,
        _ => return Err(DecodeError::Invalid),
    };
    r.end()?;
    Ok((to, message, &[]))
}
