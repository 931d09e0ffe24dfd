//! What stores tell each other, as bytes. They come from other machines: every length is bounded before anything is kept.

use weft_plan::Time;

use super::super::BlockId;
use crate::wire::{DecodeError, Reader, Writer};

/// Raised with every change of what is said.
pub const VERSION: u8 = 1;
/// Blocks that one message publishes.
pub const ENTRIES_MAX: usize = 3000;
/// Blocks that one message asks for.
pub const IDS_MAX: usize = 1024;
/// Blocks that one message wants to read.
pub const READ_MAX: usize = 256;
/// Holders of one block that an answer names.
pub const REPLICAS_MAX: usize = 4;
/// Holders that one answer names.
const HOLDERS_MAX: usize = 256;
const ENTRY_BYTES: usize = 18;
const ID_BYTES: usize = 16;
/// Nobody keeps a block where it is for a reader longer than this, whatever the reader says.
pub const LASTS_MAX: Time = Time::from_secs(60);

/// Which tiers of one holder have a block, and which parts of it, as bits. No tiers: it has it no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    pub id: BlockId,
    pub tiers: u8,
    pub parts: u8,
}

/// One holder of a block, by its place in the list of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    pub holder: u8,
    pub tiers: u8,
    pub parts: u8,
}

/// Where a block that somebody wants to read is, and what its bytes must sum up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// Which of the holder's published regions.
    pub region: u8,
    /// In which of its tiers it was found.
    pub tier: u8,
    pub parts: u8,
    pub length: u32,
    pub offset: u64,
    /// Of this life of its slot.
    pub sequence: u64,
    /// [Bound](super::super::shelf::format::bound_sum) to id, sequence and length.
    pub sum: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// I keep blocks of this shape.
    Hello {
        shape: u64,
    },
    /// What I have, and have no more. Of others nobody may speak.
    Publish {
        entries: Vec<Said>,
    },
    /// Who has these?
    Ask {
        ask: u64,
        ids: Vec<BlockId>,
    },
    /// One list of holders a block; a holder is a digest of its name and epoch.
    Answer {
        ask: u64,
        holders: Vec<u64>,
        found: Vec<Vec<Named>>,
    },
    /// Keep these where they are, for so long, and say where.
    Read {
        loan: u64,
        lasts: Time,
        ids: Vec<BlockId>,
    },
    Lent {
        loan: u64,
        blocks: Vec<Option<Lent>>,
    },
    /// I read no more of what this loan was about.
    Done {
        loan: u64,
    },
    /// What you lent me was not what it summed up to.
    Doubt {
        ids: Vec<BlockId>,
    },
}

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(VERSION);
        match self {
            Message::Hello { shape } => {
                w.u8(0).u64_fixed(*shape);
            }
            Message::Publish { entries } => {
                w.u8(1).varint(entries.len() as u64);
                w.buf.reserve(entries.len() * ENTRY_BYTES);
                for entry in entries {
                    w.buf.extend_from_slice(entry.id.as_bytes());
                    w.buf.extend_from_slice(&[entry.tiers, entry.parts]);
                }
            }
            Message::Ask { ask, ids } => {
                w.u8(2).varint(*ask);
                write_ids(&mut w, ids);
            }
            Message::Answer { ask, holders, found } => {
                w.u8(3).varint(*ask).varint(holders.len() as u64);
                for holder in holders {
                    w.u64_fixed(*holder);
                }
                w.varint(found.len() as u64);
                for named in found {
                    w.u8(named.len() as u8);
                    for one in named {
                        w.buf.extend_from_slice(&[one.holder, one.tiers, one.parts]);
                    }
                }
            }
            Message::Read { loan, lasts, ids } => {
                w.u8(4).varint(*loan).varint(lasts.as_ns());
                write_ids(&mut w, ids);
            }
            Message::Lent { loan, blocks } => {
                w.u8(5).varint(*loan).varint(blocks.len() as u64);
                for block in blocks {
                    let Some(lent) = block else {
                        w.u8(0);
                        continue;
                    };
                    w.u8(1).u8(lent.region).u8(lent.tier).u8(lent.parts);
                    w.varint(lent.length.into()).varint(lent.offset);
                    w.u64_fixed(lent.sequence).u64_fixed(lent.sum);
                }
            }
            Message::Done { loan } => {
                w.u8(6).varint(*loan);
            }
            Message::Doubt { ids } => {
                w.u8(7);
                write_ids(&mut w, ids);
            }
        }
        w.buf
    }

    pub fn decode(bytes: &[u8]) -> Result<Message, DecodeError> {
        let mut r = Reader::new(bytes);
        if r.u8()? != VERSION {
            return Err(DecodeError::Invalid);
        }
        let message = match r.u8()? {
            0 => Message::Hello { shape: r.u64_fixed()? },
            1 => {
                let count = count(&mut r, ENTRIES_MAX)?;
                let entries = r.take(count * ENTRY_BYTES)?.chunks_exact(ENTRY_BYTES);
                let entry = |bytes: &[u8]| Said {
                    id: id(&bytes[..ID_BYTES]),
                    tiers: bytes[ID_BYTES],
                    parts: bytes[ID_BYTES + 1],
                };
                Message::Publish {
                    entries: entries.map(entry).collect(),
                }
            }
            2 => Message::Ask {
                ask: r.varint()?,
                ids: read_ids(&mut r, IDS_MAX)?,
            },
            3 => {
                let ask = r.varint()?;
                let mut holders = Vec::new();
                for _ in 0..count(&mut r, HOLDERS_MAX)? {
                    holders.push(r.u64_fixed()?);
                }
                let mut found = Vec::new();
                for _ in 0..count(&mut r, IDS_MAX)? {
                    let replicas = usize::from(r.u8()?);
                    if replicas > REPLICAS_MAX {
                        return Err(DecodeError::Invalid);
                    }
                    let mut named = Vec::with_capacity(replicas);
                    for _ in 0..replicas {
                        let (holder, tiers, parts) = (r.u8()?, r.u8()?, r.u8()?);
                        if usize::from(holder) >= holders.len() || tiers == 0 {
                            return Err(DecodeError::Invalid);
                        }
                        named.push(Named { holder, tiers, parts });
                    }
                    found.push(named);
                }
                Message::Answer { ask, holders, found }
            }
            4 => {
                let (loan, lasts) = (r.varint()?, Time::from_ns(r.varint()?));
                if lasts > LASTS_MAX {
                    return Err(DecodeError::Invalid);
                }
                let ids = read_ids(&mut r, READ_MAX)?;
                Message::Read { loan, lasts, ids }
            }
            5 => {
                let loan = r.varint()?;
                let mut blocks = Vec::new();
                for _ in 0..count(&mut r, READ_MAX)? {
                    blocks.push(match r.u8()? {
                        0 => None,
                        1 => Some(Lent {
                            region: r.u8()?,
                            tier: r.u8()?,
                            parts: r.u8()?,
                            length: r.u32()?,
                            offset: r.varint()?,
                            sequence: r.u64_fixed()?,
                            sum: r.u64_fixed()?,
                        }),
                        _ => return Err(DecodeError::Invalid),
                    });
                }
                Message::Lent { loan, blocks }
            }
            6 => Message::Done { loan: r.varint()? },
            7 => Message::Doubt {
                ids: read_ids(&mut r, READ_MAX)?,
            },
            _ => return Err(DecodeError::Invalid),
        };
        r.end()?;
        Ok(message)
    }
}

fn count(r: &mut Reader, most: usize) -> Result<usize, DecodeError> {
    let count = usize::try_from(r.varint()?).unwrap_or(usize::MAX);
    if count > most {
        return Err(DecodeError::Invalid);
    }
    Ok(count)
}

fn id(bytes: &[u8]) -> BlockId {
    BlockId::from_bytes(bytes.try_into().expect("sixteen bytes"))
}

fn write_ids(w: &mut Writer, ids: &[BlockId]) {
    w.varint(ids.len() as u64);
    for id in ids {
        w.buf.extend_from_slice(id.as_bytes());
    }
}

fn read_ids(r: &mut Reader, most: usize) -> Result<Vec<BlockId>, DecodeError> {
    let count = count(r, most)?;
    Ok(r.take(count * ID_BYTES)?.chunks_exact(ID_BYTES).map(id).collect())
}
