//! What one end brings into a session, and the bounds that both ends keep.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;
use weft_plan::Time;

use crate::region::Epoch;
use crate::transport::PeerAddress;

/// The most bytes of one session message, so that it fits a datagram.
pub const MAX_MESSAGE_BYTES: usize = 60 * 1024;
/// The most bytes of a notification's payload.
pub const MAX_PAYLOAD_BYTES: usize = 48 * 1024;
/// The longest name of an agent, of its host, or of a published region.
pub const MAX_NAME_BYTES: usize = 256;
/// The most addresses that an agent may announce, and the longest of them.
pub const MAX_ADDRESSES: usize = 64;
pub const MAX_ADDRESS_BYTES: usize = 512;
/// The most regions that one agent may have published to one peer at a time.
pub const MAX_REGIONS: usize = 4096;
/// The most grants of one region, and the largest of them.
pub const MAX_GRANTS: usize = 8;
pub const MAX_GRANT_BYTES: usize = 4096;
/// The most notifications that may wait for their data at one end.
pub const MAX_HELD: usize = 4096;
/// The most leases that one end may have asked for at a time.
pub const MAX_LEASES: usize = 1024;
/// The most paths of one session.
pub const MAX_PATHS: usize = 64;
/// Events that may wait to be taken. When so many wait, the peer's messages are left unacknowledged, which slows it down.
pub const MAX_EVENTS: usize = 4096;

/// What one end brings into a session.
#[derive(Clone, Debug)]
pub struct Config {
    pub name: String,
    pub epoch: Epoch,
    pub secret: Secret,
    /// Tells whether two agents share a machine.
    pub host: String,
    /// Where the peer may open further paths to this end.
    pub addresses: Vec<PeerAddress>,
    /// The protocol versions that this end speaks.
    pub versions: Versions,
    /// Refuse a peer of another name, where one is expected.
    pub expected_name: Option<String>,
    /// Refuse another life of the peer, where one is expected.
    pub expected_epoch: Option<Epoch>,
    /// How long this end stays silent before it sends a sign of life.
    pub heartbeat: Time,
    /// How long the peer may be silent before it counts as lost.
    pub silence_max: Time,
    /// Control messages that may wait to be acknowledged; one more is not accepted.
    pub max_queued_messages: usize,
    /// Bytes of the same.
    pub max_queued_bytes: usize,
}

impl Config {
    /// The defaults: a sign of life each second, loss after five of silence.
    pub fn new(name: impl Into<String>, epoch: Epoch, secret: Secret) -> Config {
        Config {
            name: name.into(),
            epoch,
            secret,
            host: String::new(),
            addresses: Vec::new(),
            versions: Versions::CURRENT,
            expected_name: None,
            expected_epoch: None,
            heartbeat: Time::from_secs(1),
            silence_max: Time::from_secs(5),
            max_queued_messages: 8192,
            max_queued_bytes: 32 << 20,
        }
    }

    /// Whether a session can be had with this. A session started with less ends at once with the same error.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.name.is_empty() || self.name.len() > MAX_NAME_BYTES {
            return Err(ConfigError::Name);
        }
        if self.host.len() > MAX_NAME_BYTES {
            return Err(ConfigError::Host);
        }
        if self.addresses.len() > MAX_ADDRESSES || self.addresses.iter().any(|a| a.0.len() > MAX_ADDRESS_BYTES) {
            return Err(ConfigError::Addresses);
        }
        if self.versions.min > self.versions.max {
            return Err(ConfigError::Versions);
        }
        if self.heartbeat == Time::ZERO || self.silence_max <= self.heartbeat {
            return Err(ConfigError::Heartbeat);
        }
        Ok(())
    }
}

/// A configuration that no session can be had with: fix the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error("an agent's name has 1 to {MAX_NAME_BYTES} bytes")]
    Name,
    #[error("a host's name has at most {MAX_NAME_BYTES} bytes")]
    Host,
    #[error("an agent has at most {MAX_ADDRESSES} addresses of at most {MAX_ADDRESS_BYTES} bytes")]
    Addresses,
    #[error("the lowest version is above the highest")]
    Versions,
    #[error("a heartbeat must be longer than nothing and shorter than the silence that means loss")]
    Heartbeat,
}

/// What both agents know and nobody else does. It never crosses the wire.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<[u8]>);

impl Secret {
    pub fn new(bytes: &[u8]) -> Secret {
        Secret(bytes.into())
    }
    /// To be looked at, never to be sent or printed.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A range of protocol versions, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Versions {
    pub min: u16,
    pub max: u16,
}

impl Versions {
    pub const CURRENT: Versions = Versions { min: 2, max: 2 };

    /// The highest version that both speak.
    pub fn shared(self, other: Versions) -> Option<u16> {
        let version = self.max.min(other.max);
        (version >= self.min.max(other.min)).then_some(version)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.min == self.max {
            write!(f, "{}", self.min)
        } else {
            write!(f, "{} to {}", self.min, self.max)
        }
    }
}
