//! What kernels cost that inference engines bring along: constants of [`device`](crate::device), calibrated as the files say.

use serde::{Deserialize, Serialize};

use weft_plan::units::{Bandwidth, Bytes, Picos};

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelCosts {
    pub all_reduce: AllReduceKernel,
    /// Where a kernel pushes data with flags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pushed: Option<Pushed>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_few: Option<ExpertsFew>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_many: Option<ExpertsMany>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Tokens>,
}

/// All-reduce by loading from every peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllReduceKernel {
    /// Launch and barrier, replayed from a graph.
    pub barrier: Picos,
    /// Between the reduction of the parts and their exchange.
    pub second_barrier: Picos,
    /// What a GPU loads from its peers.
    pub bandwidth: Bandwidth,
    /// No call takes less that is not replayed from a graph.
    pub eager: Picos,
}

/// All-reduce by pushing everything to every peer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pushed {
    pub start: Picos,
    /// More than this is left to NCCL.
    pub largest: Bytes,
    /// The share of the link's bandwidth that it reaches.
    pub efficiency: f64,
}

/// Dispatch and combine for few tokens: a message for every expert of every token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertsFew {
    pub dispatch: Picos,
    pub combine: Picos,
    /// What every expert adds to the start.
    pub dispatch_expert: Picos,
    pub combine_expert: Picos,
    /// Shares of the link's bandwidth.
    pub dispatch_efficiency: f64,
    pub combine_efficiency: f64,
    /// What one SM takes for one token; there are no more of them at work than there are experts.
    pub token_on_sm: Picos,
}

/// Dispatch and combine for many tokens: a message for every rank that a token goes to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertsMany {
    pub dispatch: Picos,
    pub combine: Picos,
    /// What one SM copies.
    pub dispatch_sm: Bandwidth,
    pub combine_sm: Bandwidth,
    /// The share of the link's bandwidth that all of them reach.
    pub efficiency: f64,
}

/// Exchange of tokens within a large scale-up domain.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tokens {
    /// Finding out who gets what.
    pub prepare: PreparedCosts,
    /// With a handshake between sender and receiver.
    pub dispatch: CopiedCosts,
    pub combine: CopiedCosts,
    /// Straight into, and out of, the other's memory.
    pub put: Started,
    pub get: Started,
    /// Making a token smaller before it is combined, and larger after.
    pub quantize: Picos,
    /// The share of the link's bandwidth that copies reach.
    pub efficiency: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreparedCosts {
    pub start: Picos,
    pub doubling: Picos,
    pub token: Picos,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopiedCosts {
    pub start: Picos,
    /// What every doubling of the group adds.
    pub doubling: Picos,
    /// What a copy of a token costs beside its bytes.
    pub copy: Picos,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Started {
    pub start: Picos,
    pub doubling: Picos,
}
