//! The platform: which machines there are, what is in them, and what their links cost.
//!
//! One file is to serve selection, the model and the simulator, so that all three speak of the same machines. Discovery writes it,
//! people edit it, and [`Platform::from_toml`] refuses what does not hold together, with the line or the field at fault.
//!
//! ```
//! use weft_plan::{Bytes, Platform};
//! let platform = Platform::laptop();
//! let tcp = platform.transports["tcp"];
//! assert!(tcp.time(Bytes(1 << 20), 1) > tcp.time(Bytes(4096), 1));
//! assert_eq!(Platform::from_toml(&platform.to_toml())?, platform);
//! # Ok::<(), weft_plan::platform::PlatformError>(())
//! ```

mod cores;
mod endpoint;
mod error;
mod validate;

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::cost::LinkCost;
use crate::cost::kernels::DeviceCosts;
use crate::units::{Bandwidth, Bytes, Picos};

pub use cores::{CoreListError, Cores};
pub use endpoint::{Endpoint, EndpointError, Part};
pub use error::{Fault, PlatformError};

/// Machines, links between their parts, and what each transport costs on them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Platform {
    pub name: String,
    /// What a transfer costs from post to completion, by the name of the transport. `shared_memory` is memory that Weft
    /// allocated, `shared_memory.foreign` is memory that it did not.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub transports: BTreeMap<String, LinkCost>,
    /// What a message of a collective costs, from being offered to having been taken, between two ranks that each send and receive, by the
    /// name of the transport. Where nothing is said, it is as much as a transfer.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub messages: BTreeMap<String, LinkCost>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub machines: Vec<Machine>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    pub name: String,
    pub memory: Option<Bytes>,
    /// How fast one core copies: the limit of every transport that copies.
    pub memcpy: Option<Memcpy>,
    /// How fast one core reduces two arrays into one, in bytes of the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduction: Option<Bandwidth>,
    /// What it costs ranks of this machine to take messages straight from each other's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arena: Option<Arena>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numa: Vec<NumaNode>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Gpu>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<Nic>,
}

/// Bandwidth of one core's memcpy, counting each byte once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memcpy {
    /// Between buffers larger than any cache.
    pub streaming: Bandwidth,
    /// Between buffers that stay in the core's own cache.
    pub cached: Bandwidth,
}

/// Messages between ranks that see each other's memory. Sending is saying where the bytes are; whoever receives copies them, or
/// reduces them with its own in the same pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arena {
    /// From one rank's word to another's having seen it.
    pub latency: Picos,
    /// The same where there are more ranks than cores, so that the other may have to be given a core first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<Picos>,
    /// How fast a rank copies what another has, while the other does the same.
    pub copy: Memcpy,
    /// How fast it reduces that with its own, in bytes of the result.
    pub reduce: Memcpy,
    /// How fast it copies what another has only just written, and what is therefore in the other's cache alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fresh: Option<Bandwidth>,
    /// The cache that the ranks share. Of buffers that together are larger, the rest is streamed.
    pub cache: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaNode {
    pub id: u16,
    pub cores: Cores,
    pub memory: Option<Bytes>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Counted in the order of the bus addresses.
    pub ordinal: u16,
    pub name: String,
    /// The bus address, `0000:17:00.0`.
    pub pci: Option<String>,
    pub numa: Option<u16>,
    pub memory: Option<Bytes>,
    /// What kernels between ranks take there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub costs: Option<DeviceCosts>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// The name of the interface, `eth0`.
    pub name: String,
    pub kind: NicKind,
    pub up: bool,
    /// As the hardware says; virtual interfaces say nothing.
    pub bandwidth: Option<Bandwidth>,
    pub mtu: Option<Bytes>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    pub numa: Option<u16>,
    pub pci: Option<String>,
    /// The RDMA device behind the interface, `mlx5_0`.
    pub rdma: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NicKind {
    Loopback,
    Ethernet,
    Infiniband,
    /// No hardware behind it: a bridge, a tunnel, one end of a veth pair.
    Virtual,
}

/// A wire between two parts. It carries both directions at once, each at this cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    pub from: Endpoint,
    pub to: Endpoint,
    pub cost: LinkCost,
}

/// More text than the description of a hundred thousand machines.
const MAX_FILE_BYTES: usize = 256 << 20;

impl Platform {
    /// A machine such as one develops on: what predictions rest on where nothing was measured.
    pub fn laptop() -> Platform {
        Platform::from_toml(include_str!("platform/laptop.toml")).expect("the embedded platform holds together")
    }

    /// Reads a platform file and checks that it holds together.
    pub fn from_toml(text: &str) -> Result<Platform, PlatformError> {
        if text.len() > MAX_FILE_BYTES {
            return Err(PlatformError::TooLong {
                bytes: text.len(),
                max: MAX_FILE_BYTES,
            });
        }
        let platform: Platform = toml::from_str(text).map_err(|error| PlatformError::from_toml(text, &error))?;
        platform.validate()?;
        Ok(platform)
    }

    /// The file that [`Platform::from_toml`] reads back as this platform.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("every field of a platform has a form in TOML")
    }

    pub fn machine(&self, name: &str) -> Option<&Machine> {
        self.machines.iter().find(|m| m.name == name)
    }
}

impl Machine {
    pub fn core_count(&self) -> usize {
        self.numa.iter().map(|node| node.cores.len()).sum()
    }
}

#[cfg(test)]
mod tests;
