//! The end of a link, written `machine/part`: `node0/gpu:1`, `node0/nic:eth0`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

use crate::place::Place;

/// A part of a machine that a link ends at.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    pub machine: String,
    pub part: Part,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Part {
    Place(Place),
    Nic(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EndpointError {
    #[error("`{text}` is not `machine/part`")]
    NoPart { text: String },
    #[error("`{part}` is no part of a machine; known are dram, dram:N, gpu:N, file, object and nic:NAME")]
    UnknownPart { part: String },
}

impl FromStr for Endpoint {
    type Err = EndpointError;
    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        let (machine, part) = text
            .split_once('/')
            .filter(|(machine, part)| !machine.is_empty() && !part.is_empty())
            .ok_or_else(|| EndpointError::NoPart { text: text.to_owned() })?;
        let part = match part.strip_prefix("nic:").filter(|name| !name.is_empty()) {
            Some(nic) => Part::Nic(nic.to_owned()),
            None => Part::Place(
                part.parse()
                    .map_err(|_| EndpointError::UnknownPart { part: part.to_owned() })?,
            ),
        };
        Ok(Endpoint {
            machine: machine.to_owned(),
            part,
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.part {
            Part::Place(place) => write!(f, "{}/{place}", self.machine),
            Part::Nic(name) => write!(f, "{}/nic:{name}", self.machine),
        }
    }
}

impl Serialize for Endpoint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Endpoint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Endpoint, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}
