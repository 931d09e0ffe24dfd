//! What is wrong with a platform file, and where.

use thiserror::Error;

use super::Endpoint;
use crate::spot::Spot;

#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum PlatformError {
    #[error("a platform file of {bytes} bytes; {max} is the most")]
    TooLong { bytes: usize, max: usize },
    /// Not TOML, or not the fields of a platform.
    #[error("{0}")]
    Unreadable(Spot),
    /// Every field is well formed, but they do not hold together.
    #[error("{field}: {fault}")]
    Inconsistent {
        /// As a path: `machines[0].nics[1].numa`.
        field: String,
        fault: Fault,
    },
}

/// How a platform does not hold together.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Fault {
    #[error("is empty")]
    Empty,
    #[error("`{name}` is there twice")]
    Twice { name: String },
    #[error("the machine has no NUMA node {id}")]
    NoSuchNumaNode { id: u16 },
    #[error("there is no `{endpoint}`")]
    NoSuchEndpoint { endpoint: Endpoint },
    #[error("the link ends where it begins")]
    LinkToItself,
    #[error("nothing moves at a bandwidth of zero")]
    NoBandwidth,
    #[error("`{name}` holds a `/`, `:`, space or control character")]
    BadName { name: String },
}

impl PlatformError {
    pub(in crate::platform) fn from_toml(text: &str, error: &toml::de::Error) -> PlatformError {
        PlatformError::Unreadable(Spot::of(text, error))
    }
}
