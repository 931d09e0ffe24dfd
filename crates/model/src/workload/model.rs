//! Transformers and their kin, described by the numbers that decide what they cost.
//!
//! A model is a few [`Stack`]s of equal layers. A layer mixes over the sequence (attention of some kind, or a state that runs along it),
//! then feeds each token forward (densely, or through the experts that a router chooses); either half may be absent. Parameters and
//! multiplications follow from that, and the suite compares them with what the authors publish.
//!
//! ```
//! use weft_model::workload::model::Model;
//! let model = Model::named("llama-3.1-70b")?;
//! assert_eq!(model.layers(), 80);
//! assert!((model.parameters() / 70.6e9 - 1.0).abs() < 0.01);
//! # Ok::<(), weft_model::workload::model::ModelError>(())
//! ```

mod catalogue;
mod count;
mod error;
mod weights;

use serde::{Deserialize, Serialize};

pub use error::ModelError;
pub use weights::Weights;

/// A model as its authors describe it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    pub name: String,
    /// Other names it goes by, in tables and on model hubs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The width of the residual stream.
    pub hidden: u32,
    pub vocabulary: u32,
    /// The output projection is the embedding, transposed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tied: bool,
    /// Learned positions; zero where positions are rotated in.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub positions: u32,
    pub stacks: Vec<Stack>,
    /// Extra layers that predict further tokens while training, each with a projection of two hidden states into one and a use of the
    /// output projection.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub predictors: u32,
    /// Billions of parameters, as published: what the suite compares with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<f64>,
    /// Billions of parameters that one token meets, as published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published_active: Option<f64>,
}

/// Equal layers. Where they lie among the others does not matter to what they cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stack {
    pub layers: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mixer: Option<Mixer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feed: Option<Feed>,
}

/// How a layer lets tokens see each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Mixer {
    /// Attention with grouped keys and values.
    Attention {
        heads: u32,
        kv_heads: u32,
        head: u32,
        /// How far back a token looks, where that is bounded.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        window: Option<u32>,
        /// Queries and the output go through a narrower space.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        narrow: Option<Narrow>,
        /// The output is gated by a projection as wide as the queries.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        gated: bool,
    },
    /// Multi-head latent attention: keys and values are kept as one vector of `kv_rank + rope` for all heads.
    Latent {
        heads: u32,
        query_rank: u32,
        kv_rank: u32,
        nope: u32,
        rope: u32,
        value: u32,
    },
    /// A state-space layer (Mamba-2): `heads · head` channels, each with a state of `state`.
    StateSpace {
        heads: u32,
        head: u32,
        state: u32,
        groups: u32,
    },
    /// A gated delta rule (linear attention): one matrix of state for each value head.
    Delta {
        key_heads: u32,
        value_heads: u32,
        key: u32,
        value: u32,
    },
}

/// Low-rank factors around an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Narrow {
    pub query: u32,
    pub output: u32,
    /// Into how many groups the heads are divided before the output's first factor.
    pub groups: u32,
}

/// What a layer does to each token by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Feed {
    Dense { inner: u32, gated: bool },
    Experts(Experts),
}

/// A router and the experts it chooses from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    pub experts: u32,
    /// How many of them a token goes to.
    pub chosen: u32,
    /// The inner width of one expert.
    pub inner: u32,
    pub gated: bool,
    /// The inner width of what every token goes through besides.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared: u32,
    /// Their products have biases, which kernels fused for experts without them cannot add.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub biased: bool,
    /// The width in which routed experts work, where it is not the hidden one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<u32>,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests;
