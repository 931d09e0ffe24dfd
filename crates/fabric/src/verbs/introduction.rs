//! How two rails get to know each other: datagrams on the rail itself, so that a rail which does not reach the peer is found
//! out before anything depends on it.
//!
//! Whoever opens a path sends an introduction and repeats it until it is answered. The answer to a repeated one is the same as
//! to the first: the token says which path is meant, and only the two ends know it. A goodbye says that the sender's queue
//! pair is gone, where it could not be said on the path.

use std::net::Ipv4Addr;

use weft_protocol::wire::{DecodeError, Reader, Writer};

use super::address::Doorstep;

/// No datagram is longer.
pub(super) const LETTER_BYTES_MAX: usize = 128;
/// The device puts the sender's route before every datagram.
pub(super) const ROUTE_BYTES: usize = 40;
const MAGIC: u64 = u64::from_le_bytes(*b"weftverb");
const VERSION: u8 = 1;

mod kind {
    pub const INTRODUCTION: u8 = 1;
    pub const ANSWER: u8 = 2;
    pub const NO_ROOM: u8 = 3;
    pub const GOODBYE: u8 = 4;
}

/// One datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Letter {
    Introduction {
        token: u128,
        /// Where the sender believes to be. The answer goes where the datagram came from, with the key from here.
        from: Doorstep,
        end: QueueEnd,
    },
    Answer {
        token: u128,
        end: QueueEnd,
    },
    /// The answer of a rail that has as many paths as it can.
    NoRoom {
        token: u128,
    },
    Goodbye {
        token: u128,
    },
}

/// What one end of a path must know of the other's queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueEnd {
    pub qpn: u32,
    /// The number of the first packet that it sends.
    pub psn: u32,
    /// The number of its packet size.
    pub mtu: u8,
    /// Reads and atomics that it answers at a time.
    pub reads: u8,
    /// Packets that it can receive before it has returned a credit.
    pub credits: u16,
}

impl Letter {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u64_fixed(MAGIC).u8(VERSION);
        match self {
            Letter::Introduction { token, from, end } => {
                w.u8(kind::INTRODUCTION).u128_fixed(*token);
                w.buf.extend_from_slice(&from.gid);
                w.varint(from.lid.into())
                    .varint(from.qpn.into())
                    .varint(from.qkey.into());
                encode_end(&mut w, end);
            }
            Letter::Answer { token, end } => {
                w.u8(kind::ANSWER).u128_fixed(*token);
                encode_end(&mut w, end);
            }
            Letter::NoRoom { token } => {
                w.u8(kind::NO_ROOM).u128_fixed(*token);
            }
            Letter::Goodbye { token } => {
                w.u8(kind::GOODBYE).u128_fixed(*token);
            }
        }
        debug_assert!(w.buf.len() <= LETTER_BYTES_MAX);
        w.buf
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Letter, DecodeError> {
        if bytes.len() > LETTER_BYTES_MAX {
            return Err(DecodeError::TooLong);
        }
        let mut r = Reader::new(bytes);
        if r.u64_fixed()? != MAGIC || r.u8()? != VERSION {
            return Err(DecodeError::Invalid);
        }
        let (kind, token) = (r.u8()?, r.u128_fixed()?);
        let letter = match kind {
            kind::INTRODUCTION => Letter::Introduction {
                token,
                from: Doorstep {
                    gid: r.take(16)?.try_into().expect("sixteen bytes were taken"),
                    lid: u16::try_from(r.varint()?).map_err(|_| DecodeError::Overflow)?,
                    qpn: number24(&mut r)?,
                    qkey: r.u32()?,
                },
                end: decode_end(&mut r)?,
            },
            kind::ANSWER => Letter::Answer {
                token,
                end: decode_end(&mut r)?,
            },
            kind::NO_ROOM => Letter::NoRoom { token },
            kind::GOODBYE => Letter::Goodbye { token },
            _ => return Err(DecodeError::Invalid),
        };
        r.end()?;
        Ok(letter)
    }
}

/// The address that a datagram came from, out of the route before it: an IPv6 header or its like on InfiniBand, an IPv4 header in the
/// last of these bytes on RoCE over IPv4.
pub(super) fn sender(route: &[u8; ROUTE_BYTES]) -> Option<[u8; 16]> {
    let (_, ipv4) = route.split_last_chunk::<20>()?;
    let is_ipv4 = ipv4[0] == 0x45;
    // What stands before an IPv4 header need not be zero, and what ends an IPv6 header may look like one.
    if route[0] >> 4 == 6 && !(is_ipv4 && has_right_sum(ipv4)) {
        return route[8..24].try_into().ok();
    }
    let address: [u8; 4] = ipv4[12..16].try_into().ok().filter(|_| is_ipv4)?;
    Some(Ipv4Addr::from(address).to_ipv6_mapped().octets())
}

/// Is the checksum of an IPv4 header its own?
fn has_right_sum(header: &[u8; 20]) -> bool {
    let words = header
        .chunks_exact(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

fn encode_end(w: &mut Writer, end: &QueueEnd) {
    w.varint(end.qpn.into())
        .varint(end.psn.into())
        .u8(end.mtu)
        .u8(end.reads)
        .varint(end.credits.into());
}

fn decode_end(r: &mut Reader<'_>) -> Result<QueueEnd, DecodeError> {
    let end = QueueEnd {
        qpn: number24(r)?,
        psn: number24(r)?,
        mtu: r.u8()?,
        reads: r.u8()?,
        credits: u16::try_from(r.varint()?).map_err(|_| DecodeError::Overflow)?,
    };
    // Two credits are the least with which an arrival and the binding of its tag can be sent.
    if !(1..=5).contains(&end.mtu) || end.credits < 2 {
        return Err(DecodeError::Invalid);
    }
    Ok(end)
}

/// Numbers of queue pairs and packets have 24 bits.
fn number24(r: &mut Reader<'_>) -> Result<u32, DecodeError> {
    let number = r.u32()?;
    if number < 1 << 24 {
        Ok(number)
    } else {
        Err(DecodeError::Overflow)
    }
}

/// What must hold for any datagram: see [`crate::harness`].
pub(crate) fn check(bytes: &[u8]) {
    if let Ok(letter) = Letter::decode(bytes) {
        let again = letter.encode();
        assert!(again.len() <= LETTER_BYTES_MAX);
        assert_eq!(Letter::decode(&again).as_ref(), Ok(&letter));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_end() -> impl Strategy<Value = QueueEnd> {
        (0u32..1 << 24, 0u32..1 << 24, 1u8..=5, any::<u8>(), 2u16..).prop_map(|(qpn, psn, mtu, reads, credits)| {
            QueueEnd {
                qpn,
                psn,
                mtu,
                reads,
                credits,
            }
        })
    }

    fn any_letter() -> impl Strategy<Value = Letter> {
        let any_doorstep = (any::<[u8; 16]>(), any::<u16>(), 0u32..1 << 24, any::<u32>())
            .prop_map(|(gid, lid, qpn, qkey)| Doorstep { gid, lid, qpn, qkey });
        prop_oneof![
            (any::<u128>(), any_doorstep, any_end()).prop_map(|(token, from, end)| Letter::Introduction {
                token,
                from,
                end
            }),
            (any::<u128>(), any_end()).prop_map(|(token, end)| Letter::Answer { token, end }),
            any::<u128>().prop_map(|token| Letter::NoRoom { token }),
            any::<u128>().prop_map(|token| Letter::Goodbye { token }),
        ]
    }

    #[test]
    fn the_sender_is_who_the_network_says() {
        let mut ipv6 = [0u8; ROUTE_BYTES];
        ipv6[0] = 0x60;
        ipv6[8..24].copy_from_slice(&[0xfe; 16]);
        assert_eq!(sender(&ipv6), Some([0xfe; 16]));
        // The end of an address that looks like the beginning of another header.
        ipv6[20] = 0x45;
        assert_eq!(sender(&ipv6).map(|gid| gid[12]), Some(0x45));
        let mut ipv4 = [0u8; ROUTE_BYTES];
        ipv4[20] = 0x45;
        ipv4[32..36].copy_from_slice(&[10, 77, 0, 2]);
        let expected = "::ffff:10.77.0.2".parse::<std::net::Ipv6Addr>().map(|ip| ip.octets());
        assert_eq!(sender(&ipv4), expected.clone().ok());
        // Anything may stand before a header whose checksum is right.
        ipv4[0] = 0x60;
        assert_ne!(sender(&ipv4), expected.clone().ok());
        let sum: u32 = ipv4[20..]
            .chunks(2)
            .map(|w| u32::from(w[0]) << 8 | u32::from(w[1]))
            .sum();
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        ipv4[30..32].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(sender(&ipv4), expected.ok());
        assert_eq!(sender(&[0; ROUTE_BYTES]), None);
    }

    proptest! {
        #[test]
        fn letters_survive_the_wire(letter in any_letter()) {
            let bytes = letter.encode();
            prop_assert!(bytes.len() <= LETTER_BYTES_MAX);
            prop_assert_eq!(Letter::decode(&bytes), Ok(letter));
        }

        #[test]
        fn a_letter_with_flipped_or_missing_bytes_is_refused_or_another_letter(letter in any_letter(), at in any::<prop::sample::Index>(), flip in 1u8..) {
            let mut bytes = letter.encode();
            let at = at.index(bytes.len());
            check(&bytes[..at]);
            bytes[at] ^= flip;
            check(&bytes);
        }

        #[test]
        fn garbage_is_refused_not_believed(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            check(&bytes);
        }
    }
}
