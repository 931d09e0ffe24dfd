//! What the weights and the cache are stored in.

use super::ServingError;
use crate::system::Precision;
use crate::workload::model::{Feed, Model};

/// Storage by role. Operands that a GPU has no units for are widened before the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantisation {
    /// Projections of the attention.
    pub attention: Precision,
    /// Feed-forward that every token goes through.
    pub dense: Precision,
    pub experts: Precision,
    pub cache: Precision,
}

impl Quantisation {
    pub fn bf16() -> Quantisation {
        Quantisation {
            attention: Precision::Bf16,
            dense: Precision::Bf16,
            experts: Precision::Bf16,
            cache: Precision::Bf16,
        }
    }

    /// Everything in 8 bits.
    pub fn fp8(_model: &Model) -> Quantisation {
        Quantisation {
            attention: Precision::Fp8,
            dense: Precision::Fp8,
            experts: Precision::Fp8,
            cache: Precision::Fp8,
        }
    }

    /// Products in 4 bits. Published checkpoints of models with experts keep the attention at 16 bits.
    pub fn fp4(model: &Model) -> Quantisation {
        let routed = model
            .stacks
            .iter()
            .any(|stack| matches!(stack.feed, Some(Feed::Experts(_))));
        Quantisation {
            attention: if routed { Precision::Bf16 } else { Precision::Fp4 },
            dense: Precision::Fp4,
            experts: Precision::Fp4,
            cache: Precision::Fp8,
        }
    }

    /// As engines name them: one for ordinary products, one for experts. An empty name is 16 bits.
    pub fn named(model: &Model, products: &str, experts: &str) -> Result<Quantisation, ServingError> {
        let of = |name: &str| match name.trim().to_ascii_lowercase().as_str() {
            "" | "bf16" | "fp16" | "float16" | "bfloat16" => Ok(Quantisation::bf16()),
            "fp8" | "fp8_block" | "fp8_static" | "w8a8" | "int8_wo" => Ok(Quantisation::fp8(model)),
            "nvfp4" | "fp4" | "mxfp4" | "w4a16_mxfp4" | "w4a8_mxfp4_mxfp8" | "int4_wo" => Ok(Quantisation::fp4(model)),
            other => Err(ServingError::UnknownQuantisation {
                name: other.chars().take(80).collect(),
            }),
        };
        let (products, experts) = (of(products)?, of(experts)?);
        Ok(Quantisation {
            experts: experts.experts,
            ..products
        })
    }

    /// What a stored weight takes, its scale included: one of 8 bits for 16 weights of 4.
    pub(super) fn weight_bytes(precision: Precision) -> f64 {
        match precision {
            Precision::Fp4 => 0.5 + 1.0 / 16.0,
            other => other.bytes(),
        }
    }
}
