//! What NIXL carries from agent to agent for its back ends: where an agent is, and which of its regions a registration is. Anybody may have written it.

use weft::{Epoch, Member};

use crate::trouble::Trouble;

/// Where an agent is: its name, its life, its address. No secret is among it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    pub name: String,
    pub address: String,
    pub epoch: u64,
}

/// A registration, as peers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The name that its region is published under.
    pub region: String,
    /// The owner's own address of the first byte, because NIXL's descriptors are addresses.
    pub base: u64,
    pub len: u64,
}

/// What each begins with, the last byte being the version.
const CONNECTION: &[u8] = b"weft-nixl-connection\x01";
const REGISTRATION: &[u8] = b"weft-nixl-registration\x01";

impl Connection {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = [CONNECTION, &self.epoch.to_le_bytes()].concat();
        put(&mut bytes, &self.name);
        put(&mut bytes, &self.address);
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Connection, Trouble> {
        let decoded = || {
            let (epoch, rest) = number(bytes.strip_prefix(CONNECTION)?)?;
            let (name, rest) = text(rest)?;
            let (address, rest) = text(rest)?;
            rest.is_empty().then_some(Connection { name, address, epoch })
        };
        decoded().ok_or(Trouble::Foreign("connection"))
    }

    pub fn member(&self) -> Member {
        Member {
            address: self.address.clone(),
            epoch: Epoch(self.epoch),
        }
    }
}

impl Registration {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = [REGISTRATION, &self.base.to_le_bytes(), &self.len.to_le_bytes()].concat();
        put(&mut bytes, &self.region);
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Registration, Trouble> {
        let decoded = || {
            let (base, rest) = number(bytes.strip_prefix(REGISTRATION)?)?;
            let (len, rest) = number(rest)?;
            let (region, rest) = text(rest)?;
            base.checked_add(len)?;
            rest.is_empty().then_some(Registration { region, base, len })
        };
        decoded().ok_or(Trouble::Foreign("registration"))
    }
}

fn put(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*number), rest))
}

fn text(bytes: &[u8]) -> Option<(String, &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (text, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    Some((String::from_utf8(text.to_vec()).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn connections_come_back(name in ".{0,40}", address in ".{0,80}", epoch: u64) {
            let connection = Connection { name, address, epoch };
            let bytes = connection.encode();
            prop_assert_eq!(Connection::decode(&bytes).unwrap(), connection);
            for end in 0..bytes.len() {
                prop_assert!(Connection::decode(&bytes[..end]).is_err());
            }
            prop_assert!(Connection::decode(&[&bytes[..], b"x"].concat()).is_err());
        }

        #[test]
        fn registrations_come_back(region in ".{0,40}", base in 0..u64::MAX / 2, len in 0..u64::MAX / 2) {
            let registration = Registration { region, base, len };
            let bytes = registration.encode();
            prop_assert_eq!(Registration::decode(&bytes).unwrap(), registration);
            for end in 0..bytes.len() {
                prop_assert!(Registration::decode(&bytes[..end]).is_err());
            }
        }

        #[test]
        fn anything_is_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Connection::decode(&[CONNECTION, &bytes].concat());
            let _ = Registration::decode(&[REGISTRATION, &bytes].concat());
        }
    }

    #[test]
    fn a_region_that_wraps_around_is_refused() {
        let registration = Registration {
            region: "nixl/0".into(),
            base: u64::MAX,
            len: 2,
        };
        assert!(Registration::decode(&registration.encode()).is_err());
    }

    #[test]
    fn one_is_not_taken_for_the_other() {
        let connection = Connection {
            name: "a".into(),
            address: "b".into(),
            epoch: 1,
        };
        assert!(Registration::decode(&connection.encode()).is_err());
    }
}
