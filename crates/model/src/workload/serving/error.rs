use thiserror::Error;

use crate::device::DeviceModelError;
use crate::system::Precision;

/// A deployment that cannot be, or a question that has no answer: fix the call.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ServingError {
    #[error("no engine is called `{name}`; known are vllm, sglang and trtllm")]
    UnknownEngine { name: String },
    #[error("no way to quantise is called `{name}`; known are bf16, fp8, fp8_block and nvfp4")]
    UnknownQuantisation { name: String },
    #[error("{what} must be at least one and at most {most}, not {value}")]
    OutOfRange { what: &'static str, value: u64, most: u64 },
    #[error("experts are divided over {experts} GPUs, and the attention before them over {attention}")]
    Uneven { attention: u32, experts: u32 },
    #[error("`{gpu}` computes in none of {wanted}, bf16 and fp16")]
    NoUnits { gpu: String, wanted: Precision },
    #[error(transparent)]
    Collective(#[from] DeviceModelError),
    #[error("the model takes {needed_gb:.0} GB of each GPU, and {available_gb:.0} GB are there for it")]
    DoesNotFit { needed_gb: f64, available_gb: f64 },
}
