//! Where a rail is reached: written into the address that travels with the session, read from a peer's.

use std::fmt::Write;

use weft_protocol::PeerAddress;

pub(super) const NAME: &str = "verbs";

/// Text of a rail's identity that is believed at most.
const IDENTITY_BYTES_MAX: usize = 128;

/// The unreliable queue pair that answers introductions on a rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Doorstep {
    pub gid: [u8; 16],
    /// Zero on RoCE.
    pub lid: u16,
    pub qpn: u32,
    pub qkey: u32,
}

impl Doorstep {
    /// The GID comes first, so that the addresses of two rails of one network begin alike; `identity` is for people.
    pub(super) fn address(&self, identity: &str) -> PeerAddress {
        let mut text = format!("{NAME}:");
        for byte in self.gid {
            let _ = write!(text, "{byte:02x}");
        }
        let _ = write!(text, ".{:x}.{:x}.{:x}.{identity}", self.lid, self.qpn, self.qkey);
        PeerAddress(text)
    }

    /// What an address says, if it is one of this transport's.
    pub(super) fn parse(address: &PeerAddress) -> Option<Doorstep> {
        if address.transport() != NAME {
            return None;
        }
        let mut fields = address.rest().splitn(5, '.');
        let mut next = || fields.next();
        let (gid, lid, qpn, qkey, identity) = (next()?, next()?, next()?, next()?, next()?);
        if gid.len() != 32 || identity.len() > IDENTITY_BYTES_MAX {
            return None;
        }
        let qpn = number(qpn)?;
        Some(Doorstep {
            gid: u128::from_str_radix(gid, 16)
                .ok()
                .filter(|_| gid.bytes().all(|b| b.is_ascii_hexdigit()))?
                .to_be_bytes(),
            lid: u16::try_from(number(lid)?).ok()?,
            // Queue pair numbers have 24 bits.
            qpn: (qpn < 1 << 24).then_some(qpn)?,
            qkey: number(qkey)?,
        })
    }
}

fn number(hex: &str) -> Option<u32> {
    // `from_str_radix` takes a sign as well.
    let digits = hex.bytes().all(|b| b.is_ascii_hexdigit());
    u32::from_str_radix(hex, 16).ok().filter(|_| digits)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn addresses_are_read_as_they_were_written(gid: [u8; 16], lid: u16, qpn in 0u32..1 << 24, qkey: u32, identity in "[a-z0-9_/.:]{0,40}") {
            let doorstep = Doorstep { gid, lid, qpn, qkey };
            prop_assert_eq!(Doorstep::parse(&doorstep.address(&identity)), Some(doorstep));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "(verbs:)?[0-9a-f.+]{0,60}") {
            let _ = Doorstep::parse(&PeerAddress(text));
        }
    }

    #[test]
    fn what_is_not_an_address_of_a_rail_is_refused() {
        for text in [
            "tcp:127.0.0.1:1",
            "verbs:",
            "verbs:00.0.1.2.x",
            "verbs:fe80000000000000000000000000000g.0.1.2.x",
            "verbs:+e800000000000000000000000000001.0.1.2.x",
            "verbs:fe800000000000000000000000000001.0.1000000.2.x",
            "verbs:fe800000000000000000000000000001.10000.1.2.x",
            "verbs:fe800000000000000000000000000001.0.1.2",
        ] {
            assert_eq!(Doorstep::parse(&PeerAddress(text.into())), None, "{text}");
        }
    }
}
