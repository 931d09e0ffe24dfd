//! What software loses beyond what GPUs and links allow: one constant for each effect, and which software has which effect.
//!
//! The constants were found together, by least squares over all rows of `training_steps.csv` and `megatron_bridge_perf.csv`; none belongs to a
//! model, a system or a row.

use serde::{Deserialize, Serialize};

/// What a training framework does and does not do. The default is a Megatron-Core of 2026.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Software {
    /// The share of the roofline's rates that its products reach.
    pub reached: f64,
    /// Attention is one kernel. Otherwise scores go through memory.
    pub fused_attention: bool,
    /// Sequences are divided between tensor-parallel blocks.
    pub sequence_parallel: bool,
    /// The products of all experts of a GPU, and what is between them, are one kernel. Otherwise they are a loop.
    pub fused_experts: bool,
    /// Tokens travel to experts while another microbatch computes; that takes several chunks a stage.
    pub hidden_dispatch: bool,
    /// Replicas divide the state of the optimizer.
    pub sharded_optimizer: bool,
    /// What an element of a gradient takes on its way between replicas.
    pub gradient_bytes: f64,
}

impl Software {
    /// Megatron-LM of 2021: attention in pieces, nothing divided beyond tensors and stages.
    pub const MEGATRON_2021: Software = Software {
        reached: 1.0,
        fused_attention: false,
        sequence_parallel: false,
        fused_experts: false,
        hidden_dispatch: false,
        sharded_optimizer: false,
        gradient_bytes: 4.0,
    };
    /// The same a year later, with sequence parallelism.
    pub const MEGATRON_2022: Software = Software {
        sequence_parallel: true,
        sharded_optimizer: true,
        ..Software::MEGATRON_2021
    };
    /// Megatron-Core of 2024.
    pub const MEGATRON_2024: Software = Software {
        fused_attention: true,
        ..Software::MEGATRON_2022
    };
    /// NeMo of 2025.
    pub const NEMO_2025: Software = Software {
        gradient_bytes: 2.0,
        ..Software::MEGATRON_2024
    };
    /// Megatron-Core as of containers 26.04.
    pub const MEGATRON_26_04: Software = Software {
        hidden_dispatch: true,
        ..Software::NEMO_2025
    };
    /// Megatron-Core as of containers 26.06.
    pub const MEGATRON_26_06: Software = Software {
        fused_experts: true,
        ..Software::MEGATRON_26_04
    };
    /// What the first frameworks for a new generation of GPUs reach of what later ones do: NeMo 25.05 on Blackwell.
    pub const EARLY: f64 = 0.88;
    /// What Megatron-LM reached in MegaScale's comparison of what MegaScale did.
    pub const UNTUNED: f64 = 0.766;
}

impl Default for Software {
    fn default() -> Software {
        Software::MEGATRON_26_06
    }
}

/// Around each product of a layer, in seconds: kernels too small to count, launches, and the last wave that does not fill the GPU.
pub(super) const AROUND_PRODUCT: f64 = 100e-6;
/// Passes through memory over the residual stream of each half of a layer, forward and backward.
pub(super) const RESIDUAL_PASSES: f64 = 18.7;
/// Passes over the heads of an attention: rotation, transposition.
pub(super) const HEAD_PASSES: f64 = 6.0;
/// Passes over the channels of a state-space layer: convolution, gate, scan.
pub(super) const STATE_PASSES: f64 = 93.0;
/// Passes over the inner width of a feed-forward.
pub(super) const INNER_PASSES: f64 = 9.0;
/// Passes over tokens that are sorted by expert, and back, in each of forward, backward by inputs and backward by weights.
pub(super) const SORTING_PASSES: f64 = 2.0;
/// Passes over scores where attention is not one kernel.
pub(super) const SCORE_PASSES: f64 = 20.4;
/// The share of the 16-bit peak that products of scores reach where attention is not one kernel.
pub(super) const SCORE_PRODUCTS: f64 = 0.5;
/// Passes over operands to round them to four bits, with the rotation and the random numbers; eight bits are rounded by the kernels before.
pub(super) const ROUNDING_PASSES: f64 = 2.1;
/// How much longer a scan takes than its operations at 30 % of the 16-bit peak would.
pub(super) const SCAN: f64 = 6.4;
/// What a layer of experts takes to launch, forward and backward.
pub(super) const EXPERT_LAYER: f64 = 1.5e-3;
/// What each expert of a GPU adds where they are a loop: in 16 bits, and where operands are rounded for each.
pub(super) const EXPERT_EACH: f64 = 0.10e-3;
pub(super) const EXPERT_EACH_ROUNDED: f64 = 0.226e-3;
/// Passes over the inner width of experts that have biases, where kernels are not fused.
pub(super) const BIAS_PASSES: f64 = 61.7;
/// Bytes that the loss reads and writes for each entry of the vocabulary.
pub(super) const LOSS_BYTES: f64 = 25.0;
/// How much of the output projection comes on top of a stage that has as many layers as the others.
pub(super) const OUTPUT_ON_TOP: f64 = 0.69;
/// Bytes read and written for each parameter of an optimizer's shard.
pub(super) const OPTIMIZER_BYTES: f64 = 30.0;
/// Seconds that a step takes however small it is.
pub(super) const FIXED: f64 = 0.076;
/// What stragglers and the clock of hot GPUs add.
pub(super) const JITTER: f64 = 0.02;
/// The shares of communication that compute does not hide.
pub(super) const TENSOR_EXPOSED: f64 = 0.284;
pub(super) const HANDOVER_EXPOSED: f64 = 0.24;
pub(super) const DISPATCH_EXPOSED: f64 = 0.90;
pub(super) const HIDDEN_DISPATCH_EXPOSED: f64 = 0.26;
pub(super) const REPLICAS_EXPOSED: f64 = 0.305;
/// The share of a microbatch under which gathering parameters can hide.
pub(super) const GATHER_HIDDEN: f64 = 0.8;
