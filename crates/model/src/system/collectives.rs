//! What collectives between GPUs cost: the constants of the model in [`device`](crate::device).
//!
//! They are few and physical, one set for a generation of GPUs on its links, and calibrated; the files say against what.

use serde::{Deserialize, Serialize};

use weft_plan::units::{Bandwidth, Bytes, Picos};

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectiveCosts {
    /// From the call to the first byte and from the last to the end, replayed from a graph.
    pub launch: Picos,
    pub ll: Ll,
    pub ll128: Ll128,
    pub simple: Simple,
    pub exchange: ExchangeCosts,
    /// Where the switches of the scale-up network reduce.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_switch: Option<InSwitch>,
}

/// The protocol that sends a flag with every four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ll {
    pub hop: Picos,
    /// Of data, a GPU and direction.
    pub bandwidth: Bandwidth,
    /// What it takes to start once a message is spread over all channels.
    pub spread_start: Picos,
    /// What every hop takes longer then.
    pub spread_hop: Picos,
}

/// The protocol that sends a flag with every 120 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ll128 {
    pub hop: Picos,
    /// The share of the link's bandwidth that it reaches.
    pub efficiency: f64,
}

/// The protocol that sends chunks, and fences them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Simple {
    pub start: Picos,
    pub hop: Picos,
    /// The share of the link's bandwidth that it reaches.
    pub efficiency: f64,
    /// How fast a GPU moves what it keeps for itself.
    pub copy: Bandwidth,
    pub fill: Fill,
}

/// Messages between every pair.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExchangeCosts {
    pub start: Picos,
    /// For each other rank.
    pub peer: Picos,
    /// What large messages take longer to start.
    pub large_start: Picos,
    /// From which size on a message is large.
    pub large_bytes: Bytes,
    /// The share of the link's bandwidth that it reaches.
    pub efficiency: f64,
    /// How fast a GPU moves what it keeps for itself.
    pub copy: Bandwidth,
    pub fill: Fill,
}

/// Reduction and multicast in the switches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InSwitch {
    pub start: Picos,
    /// At which share of the link's bandwidth the result comes out.
    pub efficiency: f64,
    pub fill: Fill,
}

/// A pipeline fills for a time that grows with its chunks, and those grow with the data up to some size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fill {
    pub time: Picos,
    /// From this size on chunks grow no more.
    pub bytes: Bytes,
}

/// From GPU to GPU through two NICs, by protocol.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkHops {
    pub ll: Picos,
    pub ll128: Picos,
    pub simple: Picos,
    /// What is added once every channel posts messages of its own.
    pub spread: Picos,
}

impl Fill {
    /// In seconds, for so many bytes.
    pub(crate) fn seconds(&self, bytes: f64) -> f64 {
        self.time.as_secs_f64() * (bytes / (self.bytes.0 as f64).max(1.0)).min(1.0)
    }
}
