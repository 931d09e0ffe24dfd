//! What the two sides of a hand-off tell each other, as bytes. They come from other machines: every length is bounded before anything is kept.

use std::ops::Range;

use weft_plan::Time;

use super::cache::{CACHE_BYTES_MAX, Cache, LAYERS_MAX, list};
use super::{Lease, Origin, Over};
use crate::wire::{DecodeError, Reader, Writer};

/// Raised with every change of what is said.
pub const VERSION: u8 = 1;
/// Names of hand-offs.
pub const NAME_BYTES_MAX: usize = 64;
/// No engine has more workers, and no prompt more blocks or tokens.
pub const ADDRESSES_MAX: usize = 4096;
const ADDRESS_BYTES_MAX: usize = 4096;
pub const BLOCKS_MAX: u64 = 1 << 22;
pub const TOKENS_MAX: u64 = 1 << 32;
/// Ranges of heads that one worker asks of another, each of other layers.
const SHARES_MAX: usize = LAYERS_MAX;
const WAY_BYTES_MAX: usize = 64;
/// Nobody holds blocks, or waits, for longer.
pub const LASTS_MAX: Time = Time::from_secs(86_400);
/// Nor for less: a lease is renewed several times while it lasts, and each of these has to be later than the one before.
pub const LASTS_MIN: Time = Time::from_ms(1);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// What do you hold?
    Describe,
    Cache(Cache),
    /// Somebody here still waits for it.
    Renew {
        hand_off: String,
    },
    /// One of so many readers wants no more of it. It is said until it was heard, over however many sessions that takes.
    Done {
        hand_off: String,
        readers: u32,
    },
    Heard {
        hand_off: String,
    },
    Reserve(Reserve),
    /// These layers have landed up to this token, from this worker.
    Landed {
        landing: u64,
        layers: Vec<u32>,
        upto: u64,
        bytes: u64,
        way: String,
    },
    /// Nothing more will land.
    Failed {
        landing: u64,
        why: Over,
    },
}

/// Room that one worker of the reading side has made, and what it wants to land there from the one that is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reserve {
    pub hand_off: String,
    pub landing: u64,
    /// From the first token that is missing to the end.
    pub tokens: Range<u64>,
    /// The prompt has so many, and this digest.
    pub prompt_tokens: u64,
    pub digest: [u8; 32],
    pub blocks: u64,
    pub readers: u32,
    /// How long a write may take.
    pub lasts: Time,
    pub shares: Vec<AskedShare>,
}

/// Heads of layers, these by their place in the cache of whoever asks. Of one worker, heads of a layer that follow each other; so a layer is in one share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedShare {
    pub heads: Range<u64>,
    pub layers: Vec<u32>,
}

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(VERSION);
        match self {
            Message::Describe => w.u8(0),
            Message::Cache(cache) => w.u8(1).bytes(&cache.encode()),
            Message::Renew { hand_off } => w.u8(2).str(hand_off),
            Message::Done { hand_off, readers } => w.u8(3).str(hand_off).varint((*readers).into()),
            Message::Heard { hand_off } => w.u8(4).str(hand_off),
            Message::Reserve(reserve) => {
                w.u8(5).str(&reserve.hand_off).varint(reserve.landing);
                for number in [
                    reserve.tokens.start,
                    reserve.tokens.end,
                    reserve.prompt_tokens,
                    reserve.blocks,
                ] {
                    w.varint(number);
                }
                w.buf.extend_from_slice(&reserve.digest);
                w.varint(reserve.readers.into())
                    .varint(reserve.lasts.as_ns())
                    .varint(reserve.shares.len() as u64);
                for share in &reserve.shares {
                    w.varint(share.heads.start).varint(share.heads.end);
                    write_layers(&mut w, &share.layers);
                }
                &mut w
            }
            Message::Landed {
                landing,
                layers,
                upto,
                bytes,
                way,
            } => {
                w.u8(6).varint(*landing).varint(*upto).varint(*bytes).str(way);
                write_layers(&mut w, layers);
                &mut w
            }
            Message::Failed { landing, why } => w.u8(7).varint(*landing).u8(why.code()),
        };
        w.buf
    }

    pub fn decode(bytes: &[u8]) -> Result<Message, DecodeError> {
        let mut r = Reader::new(bytes);
        if r.u8()? != VERSION {
            return Err(DecodeError::Invalid);
        }
        let message = match r.u8()? {
            0 => Message::Describe,
            1 => Message::Cache(Cache::decode(r.bytes(CACHE_BYTES_MAX)?)?),
            2 => Message::Renew {
                hand_off: name(&mut r)?,
            },
            3 => Message::Done {
                hand_off: name(&mut r)?,
                readers: readers(&mut r)?,
            },
            4 => Message::Heard {
                hand_off: name(&mut r)?,
            },
            5 => Message::Reserve(reserve(&mut r)?),
            6 => {
                let (landing, upto, bytes) = (r.varint()?, r.varint()?, r.varint()?);
                let way = r.str(WAY_BYTES_MAX)?.to_owned();
                let layers = read_layers(&mut r)?;
                Message::Landed {
                    landing,
                    layers,
                    upto,
                    bytes,
                    way,
                }
            }
            7 => Message::Failed {
                landing: r.varint()?,
                why: Over::from_code(r.u8()?),
            },
            _ => return Err(DecodeError::Invalid),
        };
        r.end()?;
        Ok(message)
    }
}

fn reserve(r: &mut Reader) -> Result<Reserve, DecodeError> {
    let (hand_off, landing) = (name(r)?, r.varint()?);
    let (first, end, prompt_tokens, blocks) = (r.varint()?, r.varint()?, r.varint()?, r.varint()?);
    let digest = r.take(32)?.try_into().map_err(|_| DecodeError::Truncated)?;
    let (readers, lasts) = (readers(r)?, Time::from_ns(r.varint()?));
    let sensible =
        first < end && end <= prompt_tokens && prompt_tokens <= TOKENS_MAX && 0 < blocks && blocks <= BLOCKS_MAX;
    if !sensible || lasts == Time::ZERO || lasts > LASTS_MAX {
        return Err(DecodeError::Invalid);
    }
    let (mut shares, mut asked) = (Vec::new(), [false; LAYERS_MAX]);
    for _ in 0..list(r, SHARES_MAX)? {
        let heads = r.varint()?..r.varint()?;
        let layers = read_layers(r)?;
        // A few bytes name a thousand layers: what is asked for twice would be kept twice, and written twice.
        let again = |layer: &u32| std::mem::replace(&mut asked[*layer as usize], true);
        if heads.is_empty() || layers.is_empty() || layers.iter().any(again) {
            return Err(DecodeError::Invalid);
        }
        shares.push(AskedShare { heads, layers });
    }
    Ok(Reserve {
        hand_off,
        landing,
        tokens: first..end,
        prompt_tokens,
        digest,
        blocks,
        readers,
        lasts,
        shares,
    })
}

/// Layers are mostly all of them, so that runs are written: where each begins, and how many there are.
fn write_layers(w: &mut Writer, layers: &[u32]) {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &layer in layers {
        match runs.last_mut() {
            Some((first, count)) if first.checked_add(*count) == Some(layer) => *count += 1,
            _ => runs.push((layer, 1)),
        }
    }
    w.varint(runs.len() as u64);
    for (first, count) in runs {
        w.varint(first.into()).varint(count.into());
    }
}

fn read_layers(r: &mut Reader) -> Result<Vec<u32>, DecodeError> {
    let mut layers = Vec::new();
    for _ in 0..list(r, LAYERS_MAX)? {
        let (first, count) = (r.u32()?, r.u32()?);
        let end = first
            .checked_add(count)
            .filter(|end| *end <= LAYERS_MAX as u32 && count > 0);
        let end = end.ok_or(DecodeError::Invalid)?;
        if layers.len() + count as usize > LAYERS_MAX || layers.last().is_some_and(|last| *last >= first) {
            return Err(DecodeError::Invalid);
        }
        // Runs that touch are one run, so that a list is written in one way only.
        if layers.last().is_some_and(|last| *last + 1 == first) {
            return Err(DecodeError::Invalid);
        }
        layers.extend(first..end);
    }
    Ok(layers)
}

/// Where the workers of an engine are, one each.
pub fn encode_addresses(addresses: &[String]) -> Vec<u8> {
    let mut w = Writer::new();
    w.u8(VERSION);
    write_addresses(&mut w, addresses);
    w.buf
}

pub fn decode_addresses(bytes: &[u8]) -> Result<Vec<String>, DecodeError> {
    let mut r = Reader::new(bytes);
    if r.u8()? != VERSION {
        return Err(DecodeError::Invalid);
    }
    let addresses = read_addresses(&mut r)?;
    r.end()?;
    Ok(addresses)
}

fn write_addresses(w: &mut Writer, addresses: &[String]) {
    w.varint(addresses.len() as u64);
    addresses.iter().for_each(|address| {
        w.str(address);
    });
}

fn read_addresses(r: &mut Reader) -> Result<Vec<String>, DecodeError> {
    let mut addresses = Vec::new();
    for _ in 0..list(r, ADDRESSES_MAX)? {
        addresses.push(r.str(ADDRESS_BYTES_MAX)?.to_owned());
    }
    match addresses.is_empty() || addresses.iter().any(String::is_empty) {
        true => Err(DecodeError::Invalid),
        false => Ok(addresses),
    }
}

fn name(r: &mut Reader) -> Result<String, DecodeError> {
    match r.str(NAME_BYTES_MAX)? {
        "" => Err(DecodeError::Invalid),
        name => Ok(name.to_owned()),
    }
}

fn readers(r: &mut Reader) -> Result<u32, DecodeError> {
    match r.u32()? {
        readers @ 1.. if readers as usize <= ADDRESSES_MAX => Ok(readers),
        _ => Err(DecodeError::Invalid),
    }
}

impl Origin {
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(VERSION).str(&self.hand_off);
        w.varint(self.lease.slot.into())
            .varint(self.lease.stamp)
            .varint(self.lease.lasts.as_ns());
        w.varint(self.tokens);
        write_addresses(&mut w, &self.addresses);
        w.varint(self.blocks.len() as u64);
        self.blocks.iter().for_each(|block| {
            w.varint(*block);
        });
        w.buf
    }

    /// Reads words that have been unsealed; what no holder says is refused all the same.
    pub fn decode(bytes: &[u8]) -> Result<Origin, DecodeError> {
        let mut r = Reader::new(bytes);
        if r.u8()? != VERSION {
            return Err(DecodeError::Invalid);
        }
        let hand_off = name(&mut r)?;
        let lease = Lease {
            slot: r.u32()?,
            stamp: r.varint()?,
            lasts: Time::from_ns(r.varint()?),
        };
        let tokens = r.varint()?;
        if !lease.is_sensible() || tokens > TOKENS_MAX {
            return Err(DecodeError::Invalid);
        }
        let addresses = read_addresses(&mut r)?;
        let mut blocks = Vec::new();
        for _ in 0..list(&mut r, BLOCKS_MAX as usize)? {
            blocks.push(r.varint()?);
        }
        r.end()?;
        Ok(Origin {
            hand_off,
            addresses,
            blocks,
            tokens,
            lease,
        })
    }
}
