//! Systems of GPUs: what a prediction must know of an accelerator, its node, and the two networks that join them.
//!
//! A [`Platform`](weft_plan::Platform) lists the machines that somebody has; a [`System`] says how a kind of machine is built, so that any number of
//! them can be predicted. The files under `systems/` are embedded and found by name; each constant there carries its source. A
//! file may name another as its `base` and say only what differs.
//!
//! ```
//! use weft_model::system::{Precision, System};
//! let system = System::named("dgx-h200")?;
//! assert_eq!(system.node.gpus, 8);
//! assert!(system.gpu.flops(Precision::Bf16).unwrap() > 9e14);
//! // Names that measurements use are known too.
//! assert_eq!(System::named("h200_sxm")?, system);
//! # Ok::<(), weft_model::system::SystemError>(())
//! ```

mod collectives;
mod error;
mod kernels;
mod shipped;
mod text;

use std::fmt;

use serde::{Deserialize, Serialize};

use weft_plan::units::{Bandwidth, Bytes};

pub use collectives::{CollectiveCosts, ExchangeCosts, Fill, InSwitch, Ll, Ll128, NetworkHops, Simple};
pub use error::{SystemError, SystemFault};
pub use kernels::{
    AllReduceKernel, CopiedCosts, ExpertsFew, ExpertsMany, KernelCosts, PreparedCosts, Pushed, Started, Tokens,
};

/// A kind of GPU machine, and how many of them are joined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    pub name: String,
    /// Other names that this system is known by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    #[serde(default)]
    pub summary: String,
    pub gpu: Accelerator,
    pub node: Node,
    pub scale_up: ScaleUp,
    pub scale_out: ScaleOut,
    pub collectives: CollectiveCosts,
    pub kernels: KernelCosts,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accelerator {
    pub name: String,
    pub generation: Generation,
    /// Streaming multiprocessors, or what is counted in their place.
    pub sms: u32,
    pub memory: Bytes,
    pub memory_bandwidth: Bandwidth,
    pub l2: Bytes,
    /// Dense peak rates.
    pub tflops: Tflops,
}

/// GPUs that run the same instructions, and communicate by the same kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Generation {
    Ampere,
    Ada,
    Hopper,
    Blackwell,
    /// Blackwell without NVLink.
    BlackwellPcie,
    Battlemage,
}

/// Dense peak rates by the precision of the operands, in 10¹² operations a second. What is absent, or zero, cannot be computed
/// in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tflops {
    pub fp64: Option<f64>,
    pub fp32: Option<f64>,
    pub tf32: Option<f64>,
    pub bf16: Option<f64>,
    pub fp16: Option<f64>,
    pub fp8: Option<f64>,
    pub fp4: Option<f64>,
    pub int8: Option<f64>,
}

/// What the operands of a matrix product are stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    Fp64,
    Fp32,
    Tf32,
    Bf16,
    Fp16,
    Fp8,
    Fp4,
    Int8,
}

/// What is within one chassis.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    pub gpus: u32,
    /// Between a GPU and its host's memory, each direction.
    pub host_link: Bandwidth,
}

/// The network whose GPUs reach each other's memory by load and store.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleUp {
    pub kind: ScaleUpKind,
    /// How many GPUs it joins. It may span nodes.
    pub domain: u32,
    /// Of one GPU, each direction.
    pub bandwidth: Bandwidth,
    /// Whether its switches reduce and multicast.
    pub in_network_reduction: bool,
    /// What is left of the bandwidth once more than two GPUs communicate, where bridges and sockets are between them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beyond_pair: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ScaleUpKind {
    /// Every GPU reaches every other at its full bandwidth.
    Nvswitch,
    /// Through the hosts' PCIe switches and sockets.
    Pcie,
}

/// The network between domains.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleOut {
    pub kind: ScaleOutKind,
    /// Of a node.
    pub nics: u32,
    /// Of one NIC, each direction.
    pub rate: Bandwidth,
    /// The share of the rate that data reaches.
    pub efficiency: f64,
    pub hops: NetworkHops,
    /// What it takes to fill a pipeline through the NICs.
    pub fill: Fill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ScaleOutKind {
    Infiniband,
    Roce,
    Efa,
    Ethernet,
}

impl System {
    /// The names of the systems that are shipped.
    pub fn names() -> impl Iterator<Item = &'static str> {
        shipped::FILES.iter().map(|(name, _)| *name)
    }

    /// The file of a shipped system, with the sources of its constants.
    pub fn shipped(name: &str) -> Option<&'static str> {
        let named = System::named(name).ok()?.name;
        shipped::FILES
            .iter()
            .find(|(known, _)| *known == named)
            .map(|(_, text)| *text)
    }

    /// A shipped system, by its name or another that it is known by.
    pub fn named(name: &str) -> Result<System, SystemError> {
        if let Some((_, text)) = shipped::FILES.iter().find(|(known, _)| *known == name) {
            return System::from_toml(text);
        }
        let lower = name.to_ascii_lowercase();
        for (_, text) in shipped::FILES {
            let system = System::from_toml(text)?;
            if system.name == lower || system.aliases.contains(&lower) {
                return Ok(system);
            }
        }
        Err(SystemError::NoSuchSystem {
            name: name.chars().take(80).collect(),
        })
    }

    /// Reads the file of a system, laid over its base where it has one, and checks that it holds together.
    pub fn from_toml(file: &str) -> Result<System, SystemError> {
        text::read(file)
    }

    /// The file that [`System::from_toml`] reads back as this system.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("every field of a system has a form in TOML")
    }

    /// What the NICs of a node carry together, each direction.
    pub fn node_rate(&self) -> Bandwidth {
        let rate = self.scale_out.rate.bytes_per_sec();
        Bandwidth::from_bytes_per_sec(rate.saturating_mul(u64::from(self.scale_out.nics)))
    }

    /// A GPU's share of its node's NICs, each direction.
    pub fn nic_share(&self) -> Bandwidth {
        Bandwidth::from_bytes_per_sec(self.node_rate().bytes_per_sec() / u64::from(self.node.gpus.max(1)))
    }

    fn validate(&self) -> Result<(), SystemError> {
        let at = |field: &str, fault| {
            let field = field.to_owned();
            Err(SystemError::Inconsistent { field, fault })
        };
        if self.name.is_empty() {
            return at("name", SystemFault::Empty);
        }
        let counts = [
            ("gpu.sms", self.gpu.sms, 1 << 16),
            ("node.gpus", self.node.gpus, 1 << 10),
            ("scale_up.domain", self.scale_up.domain, 1 << 20),
            ("scale_out.nics", self.scale_out.nics, 1 << 10),
        ];
        for (field, count, most) in counts {
            if !(1..=most).contains(&count) {
                let (value, least, most) = (f64::from(count), 1.0, f64::from(most));
                return at(field, SystemFault::OutOfRange { value, least, most });
            }
        }
        let speeds = [
            ("gpu.memory_bandwidth", self.gpu.memory_bandwidth),
            ("node.host_link", self.node.host_link),
            ("scale_up.bandwidth", self.scale_up.bandwidth),
            ("scale_out.rate", self.scale_out.rate),
            ("collectives.ll.bandwidth", self.collectives.ll.bandwidth),
            ("collectives.simple.copy", self.collectives.simple.copy),
            ("collectives.exchange.copy", self.collectives.exchange.copy),
            ("kernels.all_reduce.bandwidth", self.kernels.all_reduce.bandwidth),
        ];
        for (field, speed) in speeds {
            if speed == Bandwidth::default() {
                return at(field, SystemFault::NoBandwidth);
            }
        }
        for precision in Precision::ALL {
            if let Some(value) = self.gpu.tflops.of(precision)
                && !(0.0..=1e9).contains(&value)
            {
                let (least, most) = (0.0, 1e9);
                return at(
                    &format!("gpu.tflops.{precision}"),
                    SystemFault::OutOfRange { value, least, most },
                );
            }
        }
        for (field, value) in self.shares() {
            if !(1e-6..=1.0).contains(&value) {
                let (least, most) = (1e-6, 1.0);
                return at(field, SystemFault::OutOfRange { value, least, most });
            }
        }
        Ok(())
    }

    /// Every field that is a share of something.
    fn shares(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let (collectives, kernels) = (&self.collectives, &self.kernels);
        [
            ("scale_up.beyond_pair", self.scale_up.beyond_pair.unwrap_or(1.0)),
            ("scale_out.efficiency", self.scale_out.efficiency),
            ("collectives.ll128.efficiency", collectives.ll128.efficiency),
            ("collectives.simple.efficiency", collectives.simple.efficiency),
            ("collectives.exchange.efficiency", collectives.exchange.efficiency),
            (
                "collectives.in_switch.efficiency",
                collectives.in_switch.map_or(1.0, |switch| switch.efficiency),
            ),
            (
                "kernels.pushed.efficiency",
                kernels.pushed.map_or(1.0, |pushed| pushed.efficiency),
            ),
            (
                "kernels.experts_few.dispatch_efficiency",
                kernels.experts_few.map_or(1.0, |few| few.dispatch_efficiency),
            ),
            (
                "kernels.experts_few.combine_efficiency",
                kernels.experts_few.map_or(1.0, |few| few.combine_efficiency),
            ),
            (
                "kernels.experts_many.efficiency",
                kernels.experts_many.map_or(1.0, |many| many.efficiency),
            ),
            (
                "kernels.tokens.efficiency",
                kernels.tokens.map_or(1.0, |tokens| tokens.efficiency),
            ),
        ]
        .into_iter()
    }
}

impl Accelerator {
    /// Dense peak operations a second; `None` where the GPU has no units for the precision.
    pub fn flops(&self, precision: Precision) -> Option<f64> {
        let tflops = self.tflops.of(precision).filter(|tflops| *tflops > 0.0)?;
        Some(tflops * 1e12)
    }
}

impl Tflops {
    pub fn of(&self, precision: Precision) -> Option<f64> {
        match precision {
            Precision::Fp64 => self.fp64,
            Precision::Fp32 => self.fp32,
            Precision::Tf32 => self.tf32,
            Precision::Bf16 => self.bf16,
            Precision::Fp16 => self.fp16,
            Precision::Fp8 => self.fp8,
            Precision::Fp4 => self.fp4,
            Precision::Int8 => self.int8,
        }
    }
}

impl Precision {
    pub const ALL: [Precision; 8] = [
        Precision::Fp64,
        Precision::Fp32,
        Precision::Tf32,
        Precision::Bf16,
        Precision::Fp16,
        Precision::Fp8,
        Precision::Fp4,
        Precision::Int8,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp64 => "fp64",
            Precision::Fp32 => "fp32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::Fp16 => "fp16",
            Precision::Fp8 => "fp8",
            Precision::Fp4 => "fp4",
            Precision::Int8 => "int8",
        }
    }

    /// What an element takes in memory.
    pub fn bytes(self) -> f64 {
        match self {
            Precision::Fp64 => 8.0,
            Precision::Fp32 | Precision::Tf32 => 4.0,
            Precision::Bf16 | Precision::Fp16 => 2.0,
            Precision::Fp8 | Precision::Int8 => 1.0,
            Precision::Fp4 => 0.5,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
