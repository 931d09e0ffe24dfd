//! Where bytes live.

use std::fmt;

use serde::{Deserialize, Serialize};

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
