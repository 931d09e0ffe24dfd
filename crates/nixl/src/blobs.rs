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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Registration {
    /// The name that its region is published under.
    pub region: String,
    /// The owner's own address of the first byte, because NIXL's descriptors are addresses.
    pub base: u64,
    pub len: u64,
}

/// Where there is no NIXL to carry the two: what one agent says of itself to another, all of it or a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Introduction {
    pub name: String,
    /// None where only registrations are added to what is known already.
    pub connection: Option<Connection>,
    /// Whether these are all registrations that the agent has, and others are none any more.
    pub is_whole: bool,
    pub registrations: Vec<(Segment, Registration)>,
}

/// What kind of memory a registration is of. They are in order, so that lists can be searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Segment {
    Host,
    /// Of the device with this number at its owner's.
    Device(u64),
}

/// What each begins with, the last byte being the version.
const CONNECTION: &[u8] = b"weft-nixl-connection\x01";
const REGISTRATION: &[u8] = b"weft-nixl-registration\x01";
const INTRODUCTION: &[u8] = b"weft-nixl-introduction\x01";

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

impl Introduction {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = INTRODUCTION.to_vec();
        put(&mut bytes, &self.name);
        put_bytes(
            &mut bytes,
            &self.connection.as_ref().map_or(Vec::new(), Connection::encode),
        );
        bytes.push(self.is_whole.into());
        for (segment, registration) in &self.registrations {
            // No device has the number of host memory: devices are counted from zero.
            let number = match segment {
                Segment::Host => u64::MAX,
                Segment::Device(number) => *number,
            };
            bytes.extend(number.to_le_bytes());
            put_bytes(&mut bytes, &registration.encode());
        }
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Introduction, Trouble> {
        let (name, connection, is_whole, mut rest) = bytes
            .strip_prefix(INTRODUCTION)
            .and_then(|rest| {
                let (name, rest) = text(rest)?;
                let (connection, rest) = piece(rest)?;
                let (is_whole, rest) = rest.split_first()?;
                (*is_whole <= 1).then_some((name, connection, *is_whole == 1, rest))
            })
            .ok_or(Trouble::Foreign("metadata"))?;
        let connection = match connection {
            [] => None,
            bytes => Some(Connection::decode(bytes)?),
        };
        if connection.as_ref().is_some_and(|connection| connection.name != name) {
            return Err(Trouble::Foreign("metadata"));
        }
        let mut registrations = Vec::new();
        while !rest.is_empty() {
            let (segment, after) = number(rest).ok_or(Trouble::Foreign("metadata"))?;
            let (registration, after) = piece(after).ok_or(Trouble::Foreign("metadata"))?;
            let segment = match segment {
                u64::MAX => Segment::Host,
                number => Segment::Device(number),
            };
            registrations.push((segment, Registration::decode(registration)?));
            rest = after;
        }
        Ok(Introduction {
            name,
            connection,
            is_whole,
            registrations,
        })
    }
}

fn put(bytes: &mut Vec<u8>, text: &str) {
    put_bytes(bytes, text.as_bytes());
}

fn put_bytes(bytes: &mut Vec<u8>, piece: &[u8]) {
    bytes.extend((piece.len() as u32).to_le_bytes());
    bytes.extend(piece);
}

fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*number), rest))
}

fn text(bytes: &[u8]) -> Option<(String, &[u8])> {
    let (text, rest) = piece(bytes)?;
    Some((String::from_utf8(text.to_vec()).ok()?, rest))
}

fn piece(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
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
        fn introductions_come_back(
            name in ".{0,20}",
            address in proptest::option::of(".{0,40}"),
            is_whole: bool,
            regions in proptest::collection::vec((".{0,20}", 0..u64::MAX / 2, 0..u64::MAX / 2, any::<u64>()), 0..5),
        ) {
            let connection = address.map(|address| Connection { name: name.clone(), address, epoch: 7 });
            let registrations = regions.into_iter().map(|(region, base, len, number)| {
                let segment = if number == u64::MAX || number % 2 == 0 { Segment::Host } else { Segment::Device(number) };
                (segment, Registration { region, base, len })
            });
            let introduction = Introduction { name, connection, is_whole, registrations: registrations.collect() };
            let bytes = introduction.encode();
            prop_assert_eq!(&Introduction::decode(&bytes).unwrap(), &introduction);
            for end in 0..bytes.len() {
                // Cut between two registrations, it is a shorter one.
                match Introduction::decode(&bytes[..end]) {
                    Ok(shorter) => prop_assert!(shorter.registrations.len() < introduction.registrations.len()),
                    Err(error) => prop_assert!(matches!(error, Trouble::Foreign(_))),
                }
            }
        }

        #[test]
        fn anything_is_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for start in [&b""[..], CONNECTION, REGISTRATION, INTRODUCTION] {
                crate::harness::blobs(&[start, &bytes].concat());
            }
        }

        #[test]
        fn what_was_changed_on_the_way_is_decoded_or_refused(
            changes: Vec<(proptest::sample::Index, u8)>,
        ) {
            let connection = Connection { name: "a".into(), address: "127.0.0.1:7".into(), epoch: 1 };
            let region = Registration { region: "nixl/0".into(), base: 4096, len: 64 };
            let introduction = Introduction {
                name: "a".into(),
                connection: Some(connection),
                is_whole: true,
                registrations: vec![(Segment::Host, region.clone()), (Segment::Device(3), region)],
            };
            let mut bytes = introduction.encode();
            for (at, byte) in changes.into_iter().take(4) {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            crate::harness::blobs(&bytes);
        }
    }

    #[test]
    fn an_introduction_with_the_connection_of_another_agent_is_refused() {
        let connection = Connection {
            name: "b".into(),
            address: "c".into(),
            epoch: 1,
        };
        let introduction = Introduction {
            name: "a".into(),
            connection: Some(connection),
            is_whole: false,
            registrations: Vec::new(),
        };
        assert!(Introduction::decode(&introduction.encode()).is_err());
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
