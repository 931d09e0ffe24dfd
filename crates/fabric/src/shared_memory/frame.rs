//! The datagrams of a path.
//!
//! Everything here comes from another process: sizes are bounded, numbers are checked, and what does not fit is an error.

use weft_plan::Spans;
use weft_protocol::region::{Access, Epoch, RegionKey};
use weft_protocol::wire::{DecodeError, Reader, Writer};
use weft_protocol::{Arrival, AtomicAct, Direction, Refusal};

use weft_gpu::EXPORT_BYTES;

use super::ledger::{Entry, LEDGER_ENTRIES};

/// Changes with every change to the frames or to the words in shared memory.
const VERSION: u32 = 3;
const MAGIC: u64 = 0x7765_6674_5f73_686d;

pub(super) const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// The largest datagram: a message, and room for what goes around it.
pub(super) const MAX_DATAGRAM_BYTES: usize = MAX_MESSAGE_BYTES + 256;
/// The most runs that one bounce request names; at the largest encoding of a run they fit into a datagram.
pub(super) const MAX_BOUNCE_RUNS: usize = 1024;

/// The first byte of a message, which is sent in two parts so that its bytes are not copied.
pub(super) const MESSAGE: u8 = 1;

/// One datagram, decoded.
#[derive(Debug, PartialEq)]
pub(super) enum Frame<'a> {
    /// The first datagram each way, with the ledger and the hazard of its sender.
    Hello {
        epoch: Epoch,
        hazard_tag: u32,
    },
    Message(&'a [u8]),
    Arrived(Arrival),
    /// "Let me reach the region behind this key."
    Ask {
        ask: u32,
        key: RegionKey,
    },
    Answer {
        ask: u32,
        answer: Result<Answer, Refusal>,
    },
    /// A region is gone: unmap it, so that its pages can be freed.
    Forget(Entry),
    /// The sender's bounce ring, with its file.
    Ring,
    Bounce(Bounce),
    Bounced {
        slot: u32,
        result: Result<(), Refusal>,
    },
    Atomic(AtomicAsk),
    AtomicAnswer {
        ask: u32,
        found: Result<u64, Refusal>,
    },
}

/// How a region can be reached. A mapped one comes with its file, and one of a device with a file or a handle of the driver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub len: u64,
    pub access: Access,
    pub entry: Entry,
    /// The address in its owner, for memory that has no file.
    pub foreign: Option<u64>,
    pub device: Option<OfDevice>,
}

/// Memory of a device, as its owner describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OfDevice {
    /// Where it is in its owner.
    pub address: u64,
    pub export: [u8; EXPORT_BYTES],
}

/// "Copy these bytes of your region into, or out of, this slot of my ring."
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Bounce {
    pub slot: u32,
    pub generation: u32,
    pub direction: Direction,
    /// Reads back what the same path has written, which needs no right to read.
    pub verify: bool,
    /// On the clock that all processes of a host share.
    pub deadline_mono_ns: u64,
    pub key: RegionKey,
    pub spans: Spans,
}

/// "Carry this out on a word of your region", where the asker cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AtomicAsk {
    pub ask: u32,
    /// On the clock that all processes of a host share.
    pub deadline_mono_ns: u64,
    pub key: RegionKey,
    pub offset: u64,
    pub act: AtomicAct,
}

impl Frame<'_> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        match self {
            Frame::Hello { epoch, hazard_tag } => {
                w.u8(0).u64_fixed(MAGIC).varint(VERSION.into());
                w.u64_fixed(epoch.0).varint((*hazard_tag).into());
            }
            Frame::Message(payload) => {
                w.u8(MESSAGE);
                w.buf.extend_from_slice(payload);
            }
            Frame::Arrived(arrival) => {
                w.u8(2).u64_fixed(arrival.tag).varint(arrival.index.into());
            }
            Frame::Ask { ask, key } => {
                w.u8(3).varint((*ask).into()).key(key);
            }
            Frame::Answer { ask, answer } => {
                w.u8(4).varint((*ask).into());
                match answer {
                    Err(refusal) => {
                        w.u8(0).refusal(*refusal);
                    }
                    Ok(answer) => {
                        w.u8(match answer.device {
                            None => 1 + u8::from(answer.foreign.is_some()),
                            Some(_) => 3,
                        });
                        w.varint(answer.len).access(answer.access);
                        write_entry(&mut w, answer.entry);
                        if let Some(device) = &answer.device {
                            w.u64_fixed(device.address);
                            w.buf.extend_from_slice(&device.export);
                        } else if let Some(address) = answer.foreign {
                            w.u64_fixed(address);
                        }
                    }
                }
            }
            Frame::Forget(entry) => {
                w.u8(5);
                write_entry(&mut w, *entry);
            }
            Frame::Ring => {
                w.u8(6);
            }
            Frame::Bounce(bounce) => {
                let write = bounce.direction == Direction::Write;
                w.u8(7).varint(bounce.slot.into()).varint(bounce.generation.into());
                w.u8(u8::from(write) | u8::from(bounce.verify) << 1);
                w.u64_fixed(bounce.deadline_mono_ns)
                    .key(&bounce.key)
                    .spans(&bounce.spans);
            }
            Frame::Bounced { slot, result } => {
                w.u8(8).varint((*slot).into());
                match result {
                    Ok(()) => w.u8(1),
                    Err(refusal) => w.u8(0).refusal(*refusal),
                };
            }
            Frame::Atomic(ask) => {
                w.u8(9).varint(ask.ask.into()).u64_fixed(ask.deadline_mono_ns);
                w.key(&ask.key).varint(ask.offset).act(ask.act);
            }
            Frame::AtomicAnswer { ask, found } => {
                w.u8(10).varint((*ask).into()).found(*found);
            }
        }
        w.buf
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Frame<'_>, DecodeError> {
        let mut r = Reader::new(bytes);
        let frame = match r.u8()? {
            0 => {
                if r.u64_fixed()? != MAGIC || r.u32()? != VERSION {
                    return Err(DecodeError::Invalid);
                }
                Frame::Hello {
                    epoch: Epoch(r.u64_fixed()?),
                    hazard_tag: r.u32()?,
                }
            }
            MESSAGE => {
                if r.remaining() > MAX_MESSAGE_BYTES {
                    return Err(DecodeError::TooLong);
                }
                Frame::Message(r.take(r.remaining())?)
            }
            2 => Frame::Arrived(Arrival {
                tag: r.u64_fixed()?,
                index: r.u32()?,
            }),
            3 => Frame::Ask {
                ask: r.u32()?,
                key: r.key()?,
            },
            4 => Frame::Answer {
                ask: r.u32()?,
                answer: match r.u8()? {
                    0 => Err(r.refusal()?),
                    kind @ 1..=3 => Ok(Answer {
                        len: r.varint()?,
                        access: r.access()?,
                        entry: read_entry(&mut r)?,
                        foreign: if kind == 2 { Some(r.u64_fixed()?) } else { None },
                        device: if kind == 3 { Some(read_device(&mut r)?) } else { None },
                    }),
                    _ => return Err(DecodeError::Invalid),
                },
            },
            5 => Frame::Forget(read_entry(&mut r)?),
            6 => Frame::Ring,
            7 => {
                let (slot, generation, flags) = (r.u32()?, r.u32()?, r.u8()?);
                if flags > 3 {
                    return Err(DecodeError::Invalid);
                }
                Frame::Bounce(Bounce {
                    slot,
                    generation,
                    direction: if flags & 1 != 0 {
                        Direction::Write
                    } else {
                        Direction::Read
                    },
                    verify: flags & 2 != 0,
                    deadline_mono_ns: r.u64_fixed()?,
                    key: r.key()?,
                    spans: r.spans(MAX_BOUNCE_RUNS)?,
                })
            }
            8 => Frame::Bounced {
                slot: r.u32()?,
                result: match r.u8()? {
                    0 => Err(r.refusal()?),
                    1 => Ok(()),
                    _ => return Err(DecodeError::Invalid),
                },
            },
            9 => Frame::Atomic(AtomicAsk {
                ask: r.u32()?,
                deadline_mono_ns: r.u64_fixed()?,
                key: r.key()?,
                offset: r.varint()?,
                act: r.act()?,
            }),
            10 => Frame::AtomicAnswer {
                ask: r.u32()?,
                found: r.found()?,
            },
            _ => return Err(DecodeError::Invalid),
        };
        r.end()?;
        Ok(frame)
    }
}

/// What must hold for any datagram: see [`crate::harness`].
pub(crate) fn check(bytes: &[u8]) {
    if let Ok(frame) = Frame::decode(bytes) {
        if let Frame::Bounce(bounce) = &frame {
            assert!(bounce.spans.runs().len() <= MAX_BOUNCE_RUNS);
        }
        assert_eq!(Frame::decode(&frame.encode()).as_ref(), Ok(&frame));
    }
}

fn write_entry(w: &mut Writer, entry: Entry) {
    w.varint(entry.index.into()).varint(entry.word);
}

fn read_device(r: &mut Reader<'_>) -> Result<OfDevice, DecodeError> {
    let address = r.u64_fixed()?;
    let mut export = [0; EXPORT_BYTES];
    export.copy_from_slice(r.take(EXPORT_BYTES)?);
    Ok(OfDevice { address, export })
}

fn read_entry(r: &mut Reader<'_>) -> Result<Entry, DecodeError> {
    let index = r.u32()?;
    if index >= LEDGER_ENTRIES {
        return Err(DecodeError::Overflow);
    }
    Ok(Entry {
        index,
        word: r.varint()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samples() -> Vec<Frame<'static>> {
        let key = RegionKey {
            epoch: Epoch(77),
            slot: 900,
            secret: u128::MAX - 5,
        };
        let entry = Entry {
            index: LEDGER_ENTRIES - 1,
            word: u64::MAX,
        };
        let answer = Answer {
            len: 1 << 40,
            access: Access::READ,
            entry,
            foreign: None,
            device: None,
        };
        let foreign = Answer {
            foreign: Some(0x7fff_1234_5678),
            device: None,
            access: Access::READ_WRITE,
            ..answer
        };
        let of_device = Answer {
            device: Some(OfDevice {
                address: u64::MAX - 9,
                export: std::array::from_fn(|at| at as u8),
            }),
            ..answer
        };
        let bounce = Bounce {
            slot: 3,
            generation: 9,
            direction: Direction::Write,
            verify: false,
            deadline_mono_ns: u64::MAX,
            key,
            spans: Spans::paged(4096, 64, [1, 5, 2]),
        };
        let ask = AtomicAsk {
            ask: u32::MAX,
            deadline_mono_ns: u64::MAX,
            key,
            offset: 1 << 40,
            act: AtomicAct::CompareSwap {
                expected: 1,
                new: u64::MAX,
            },
        };
        let mut frames = vec![
            Frame::Hello {
                epoch: Epoch(5),
                hazard_tag: u32::MAX,
            },
            Frame::Message(b"bytes"),
            Frame::Message(b""),
            Frame::Arrived(Arrival {
                tag: u64::MAX,
                index: 4,
            }),
            Frame::Ask { ask: 1, key },
            Frame::Answer {
                ask: 1,
                answer: Ok(answer),
            },
            Frame::Answer {
                ask: 2,
                answer: Ok(foreign),
            },
            Frame::Answer {
                ask: 4,
                answer: Ok(of_device),
            },
            Frame::Forget(entry),
            Frame::Ring,
            Frame::Bounce(bounce),
            Frame::Bounced {
                slot: 1,
                result: Ok(()),
            },
            Frame::Atomic(AtomicAsk {
                act: AtomicAct::FetchAdd(u64::MAX),
                ..ask
            }),
            Frame::Atomic(ask),
            Frame::AtomicAnswer { ask: 9, found: Ok(7) },
        ];
        for refusal in Refusal::ALL {
            frames.push(Frame::Answer {
                ask: 3,
                answer: Err(refusal),
            });
            frames.push(Frame::AtomicAnswer {
                ask: 4,
                found: Err(refusal),
            });
            frames.push(Frame::Bounced {
                slot: 2,
                result: Err(refusal),
            });
        }
        frames
    }

    #[test]
    fn frames_survive_the_wire_and_truncated_ones_are_refused() {
        for frame in samples() {
            let bytes = frame.encode();
            assert!(bytes.len() <= MAX_DATAGRAM_BYTES);
            assert_eq!(Frame::decode(&bytes).unwrap(), frame);
            if !matches!(frame, Frame::Message(_)) {
                for end in 0..bytes.len() {
                    assert!(Frame::decode(&bytes[..end]).is_err(), "{frame:?} cut at {end}");
                }
                let longer = [&bytes[..], b"x"].concat();
                assert!(Frame::decode(&longer).is_err(), "{frame:?} with a byte too many");
            }
        }
    }

    #[test]
    fn another_version_is_refused() {
        let mut bytes = Frame::Hello {
            epoch: Epoch(5),
            hazard_tag: 1,
        }
        .encode();
        bytes[9] += 1;
        assert_eq!(Frame::decode(&bytes), Err(DecodeError::Invalid));
    }

    proptest! {
        #[test]
        fn garbage_is_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            check(&bytes);
        }

        #[test]
        fn flipped_bits_are_decoded_or_refused(which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut bytes = which.get(&samples()).encode();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            check(&bytes);
        }
    }
}
