//! Where bytes live.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Where bytes live. Storage is a place like any other, so a spill is a transfer like any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Host memory, on a NUMA node where that is known.
    Dram { numa: Option<u16> },
    /// Memory of the GPU with this ordinal on its machine.
    Gpu { ordinal: u16 },
    /// A file on a local file system.
    File,
    /// An object in an object store.
    Object,
}

impl Place {
    /// Host memory on no particular NUMA node.
    pub const DRAM: Place = Place::Dram { numa: None };

    pub const fn kind(self) -> PlaceKind {
        match self {
            Place::Dram { .. } => PlaceKind::Dram,
            Place::Gpu { .. } => PlaceKind::Gpu,
            Place::File => PlaceKind::File,
            Place::Object => PlaceKind::Object,
        }
    }
}

/// A place without its number: what a transport's capabilities depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PlaceKind {
    Dram,
    Gpu,
    File,
    Object,
}

/// Text that names no place.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{text}` is no place; known are dram, dram:N, gpu:N, file and object")]
pub struct UnknownPlace {
    pub text: String,
}

impl FromStr for Place {
    type Err = UnknownPlace;
    fn from_str(text: &str) -> Result<Place, UnknownPlace> {
        let number = |digits: &str| digits.parse().ok().filter(|_| !digits.starts_with('+'));
        let place = match text.split_once(':') {
            None => match text {
                "dram" => Some(Place::DRAM),
                "file" => Some(Place::File),
                "object" => Some(Place::Object),
                _ => None,
            },
            Some(("dram", node)) => number(node).map(|node| Place::Dram { numa: Some(node) }),
            Some(("gpu", ordinal)) => number(ordinal).map(|ordinal| Place::Gpu { ordinal }),
            Some(_) => None,
        };
        place.ok_or_else(|| UnknownPlace {
            text: text.chars().take(64).collect(),
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Dram { numa: None } => write!(f, "dram"),
            Place::Dram { numa: Some(node) } => write!(f, "dram:{node}"),
            Place::Gpu { ordinal } => write!(f, "gpu:{ordinal}"),
            Place::File => write!(f, "file"),
            Place::Object => write!(f, "object"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_read_back() {
        for place in [
            Place::DRAM,
            Place::Dram { numa: Some(3) },
            Place::Gpu { ordinal: 7 },
            Place::File,
            Place::Object,
        ] {
            assert_eq!(place.to_string().parse(), Ok(place));
        }
        for text in ["", "gpu", "gpu:", "gpu:+1", "gpu:-1", "gpu:70000", "disk", "dram:0:1"] {
            assert!(text.parse::<Place>().is_err(), "{text}");
        }
    }
}
