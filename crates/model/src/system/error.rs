//! What is wrong with the file of a system, and where.

use thiserror::Error;
use weft_plan::spot::Spot;

/// Why there is no such system, or its file is not one.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SystemError {
    #[error("the file of a system with {bytes} bytes; {max} is the most")]
    TooLong { bytes: usize, max: usize },
    /// Not TOML, or not the fields of a system.
    #[error("{0}")]
    Unreadable(Spot),
    /// Every field is well formed, but they do not hold together.
    #[error("{field}: {fault}")]
    Inconsistent {
        /// As a path: `gpu.tflops.bf16`.
        field: String,
        fault: SystemFault,
    },
    /// The same, where the text that says so is known.
    #[error("line {line}, at `{field}`: {fault}")]
    Refused {
        line: usize,
        field: String,
        fault: SystemFault,
    },
    #[error("there is no system `{name}`")]
    NoSuchSystem { name: String },
}

/// How a system does not hold together.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum SystemFault {
    #[error("is empty")]
    Empty,
    #[error("nothing moves at a bandwidth of zero")]
    NoBandwidth,
    #[error("{value} is not between {least} and {most}")]
    OutOfRange { value: f64, least: f64, most: f64 },
}
