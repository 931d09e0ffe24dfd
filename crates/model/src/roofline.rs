//! How long a GPU computes: matrix products, attention, and what only streams through memory.
//!
//! A kernel takes as long as the slower of its arithmetic and its memory traffic, and a fixed time besides. Arithmetic runs at the peak of
//! the precision times a fraction that kernels of a generation of GPUs reach on large operands; the fixed time is what makes small
//! operands slow. These few fractions are all that is calibrated here, against the training tables under `ground_truth/`; times are in
//! seconds, because they are summed by the million before anybody reads them.
//!
//! ```
//! use weft_model::roofline::{Product, Recipe, Roofline};
//! use weft_model::system::System;
//! let h100 = System::named("dgx-h100")?;
//! let bf16 = Roofline::of(&h100.gpu, Recipe::Bf16).unwrap();
//! let fp8 = Roofline::of(&h100.gpu, Recipe::Fp8).unwrap();
//! let large = Product { rows: 8192.0, columns: 8192.0, depth: 8192.0 };
//! assert!(fp8.product(large) < bf16.product(large));
//! # Ok::<(), weft_model::system::SystemError>(())
//! ```

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::system::{Accelerator, Generation, Precision};

/// What the operands of a model's matrix products are rounded to, and by which scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Recipe {
    Bf16,
    Fp16,
    /// One scale for a tensor.
    Fp8,
    /// One scale for each block of 32.
    Mxfp8,
    /// One scale for each block of 16, with a rotation before and random rounding.
    Nvfp4,
}

/// A matrix product of `rows × depth` with `depth × columns`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    pub rows: f64,
    pub columns: f64,
    pub depth: f64,
}

/// What one GPU reaches in one recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    recipe: Recipe,
    /// Operations a second of large products in the recipe.
    narrow: f64,
    /// Operations a second of large products in 16 bits.
    half: f64,
    /// Operations a second of fused attention, which stays in 16 bits.
    attention: f64,
    /// Bytes a second of kernels that stream.
    memory: f64,
    kernel: f64,
}

/// The fractions of their peaks that kernels of one generation reach.
#[derive(Clone, Copy, Debug)]
struct Reached {
    half: f64,
    eighth: f64,
    fourth: f64,
    attention: f64,
    /// The share of the peak memory bandwidth that element-wise kernels reach.
    memory: f64,
}

/// What a kernel takes beyond its arithmetic: launch, and the filling of the pipeline. What training steps lose around a product beyond this
/// is a constant of the training model.
const KERNEL: f64 = 5e-6;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RooflineError {
    #[error("this GPU has no units for {0}")]
    NoUnits(Recipe),
    #[error("no such recipe; known are bf16, fp16, fp8, mxfp8 and nvfp4")]
    UnknownRecipe,
}

impl Roofline {
    pub fn of(gpu: &Accelerator, recipe: Recipe) -> Result<Roofline, RooflineError> {
        let reached = Reached::by(gpu.generation);
        let peak = |precision| gpu.flops(precision).ok_or(RooflineError::NoUnits(recipe));
        let half_peak = peak(Precision::Bf16)?;
        let half = half_peak * reached.half;
        let narrow = match recipe {
            Recipe::Bf16 | Recipe::Fp16 => half,
            Recipe::Fp8 | Recipe::Mxfp8 => peak(Precision::Fp8)? * reached.eighth,
            Recipe::Nvfp4 => peak(Precision::Fp4)? * reached.fourth,
        };
        Ok(Roofline {
            recipe,
            narrow,
            half,
            attention: half_peak * reached.attention,
            memory: gpu.memory_bandwidth.bytes_per_sec() as f64 * reached.memory,
            kernel: KERNEL,
        })
    }

    pub fn recipe(&self) -> Recipe {
        self.recipe
    }

    /// A product with weights, in the recipe. The result is in 16 bits.
    pub fn product(&self, product: Product) -> f64 {
        self.bounded(product, self.narrow, self.recipe.operand_bytes())
    }

    /// As many products of one shape as there are groups, launched at once.
    pub fn grouped(&self, groups: f64, product: Product) -> f64 {
        let bytes = product.bytes(self.recipe.operand_bytes());
        let each = (product.operations() / self.narrow).max(bytes / self.memory);
        groups * each + self.kernel
    }

    /// Fused attention of so many operations.
    pub fn attention(&self, operations: f64) -> f64 {
        operations / self.attention
    }

    /// A kernel that only reads and writes.
    pub fn stream(&self, bytes: f64) -> f64 {
        bytes / self.memory
    }

    /// Large products in the recipe, in operations a second.
    pub fn product_rate(&self) -> f64 {
        self.narrow
    }

    /// Large products in 16 bits, in operations a second.
    pub fn half_rate(&self) -> f64 {
        self.half
    }

    /// The fixed time of a kernel.
    pub fn kernel(&self) -> f64 {
        self.kernel
    }

    /// The same GPU where software reaches only a share of what it reaches at its best.
    pub fn scaled(self, share: f64) -> Roofline {
        Roofline {
            narrow: self.narrow * share,
            half: self.half * share,
            ..self
        }
    }

    fn bounded(&self, product: Product, rate: f64, operand: f64) -> f64 {
        (product.operations() / rate).max(product.bytes(operand) / self.memory) + self.kernel
    }
}

impl Product {
    pub fn operations(&self) -> f64 {
        2.0 * self.rows * self.columns * self.depth
    }

    /// Both operands once, and a result in 16 bits.
    fn bytes(&self, operand: f64) -> f64 {
        (self.rows + self.columns) * self.depth * operand + self.rows * self.columns * 2.0
    }
}

impl Recipe {
    pub const ALL: [Recipe; 5] = [Recipe::Bf16, Recipe::Fp16, Recipe::Fp8, Recipe::Mxfp8, Recipe::Nvfp4];

    pub fn name(self) -> &'static str {
        match self {
            Recipe::Bf16 => "bf16",
            Recipe::Fp16 => "fp16",
            Recipe::Fp8 => "fp8",
            Recipe::Mxfp8 => "mxfp8",
            Recipe::Nvfp4 => "nvfp4",
        }
    }

    /// The precision whose peak counts.
    pub fn precision(self) -> Precision {
        match self {
            Recipe::Bf16 => Precision::Bf16,
            Recipe::Fp16 => Precision::Fp16,
            Recipe::Fp8 | Recipe::Mxfp8 => Precision::Fp8,
            Recipe::Nvfp4 => Precision::Fp4,
        }
    }

    /// What an element of an operand takes, its scale included.
    pub fn operand_bytes(self) -> f64 {
        match self {
            Recipe::Bf16 | Recipe::Fp16 => 2.0,
            Recipe::Fp8 => 1.0,
            Recipe::Mxfp8 => 1.0 + 1.0 / 32.0,
            Recipe::Nvfp4 => 0.5 + 1.0 / 16.0,
        }
    }

    /// Whether operands must be rounded from 16 bits first.
    pub fn rounds(self) -> bool {
        !matches!(self, Recipe::Bf16 | Recipe::Fp16)
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Recipe {
    type Err = RooflineError;

    /// Reads the names that tables use, in any case: `FP8-CS` is [`Recipe::Fp8`], `FP8-MX` is [`Recipe::Mxfp8`].
    fn from_str(text: &str) -> Result<Recipe, RooflineError> {
        let text = text.trim().to_ascii_lowercase();
        match text.as_str() {
            "bf16" => Ok(Recipe::Bf16),
            "fp16" => Ok(Recipe::Fp16),
            "fp8" | "fp8-cs" | "fp8-ds" => Ok(Recipe::Fp8),
            "mxfp8" | "fp8-mx" | "fp8-sc" => Ok(Recipe::Mxfp8),
            "nvfp4" | "fp4" => Ok(Recipe::Nvfp4),
            _ => Err(RooflineError::UnknownRecipe),
        }
    }
}

impl Reached {
    /// Calibrated against dense training steps: A100 by three sources of 2021 to 2024, H100 by three, Blackwell by two. What no row speaks of
    /// (Ada, workstation cards) is taken to be as Hopper.
    fn by(generation: Generation) -> Reached {
        match generation {
            Generation::Ampere => Reached {
                half: 0.779,
                eighth: 0.779,
                fourth: 0.779,
                attention: 0.61,
                memory: 0.80,
            },
            Generation::Blackwell | Generation::BlackwellPcie => Reached {
                half: 0.604,
                eighth: 0.534,
                fourth: 0.494,
                attention: 0.595,
                memory: 0.75,
            },
            _ => Reached {
                half: 0.705,
                eighth: 0.608,
                fourth: 0.608,
                attention: 0.684,
                memory: 0.80,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::System;

    #[test]
    fn names_read_back() {
        for recipe in Recipe::ALL {
            assert_eq!(recipe.name().parse(), Ok(recipe));
        }
        assert_eq!("FP8-CS".parse(), Ok(Recipe::Fp8));
        assert_eq!("int3".parse::<Recipe>(), Err(RooflineError::UnknownRecipe));
    }

    #[test]
    fn a_gpu_without_units_says_so() {
        let a100 = System::named("dgx-a100").unwrap();
        assert_eq!(
            Roofline::of(&a100.gpu, Recipe::Fp8),
            Err(RooflineError::NoUnits(Recipe::Fp8))
        );
    }

    #[test]
    fn few_rows_are_bound_by_memory_and_many_by_arithmetic() {
        let gpu = System::named("dgx-h100").unwrap().gpu;
        let roofline = Roofline::of(&gpu, Recipe::Bf16).unwrap();
        let product = |rows| Product {
            rows,
            columns: 8192.0,
            depth: 8192.0,
        };
        let one = roofline.product(product(1.0));
        assert!((one / roofline.product(product(16.0)) - 1.0).abs() < 0.01);
        let weights = 8192.0 * 8192.0 * 2.0 / roofline.memory;
        assert!(one > weights && one < weights + 2.0 * roofline.kernel());
        let many = product(65536.0);
        assert!(roofline.product(many) < 1.01 * many.operations() / roofline.product_rate() + roofline.kernel());
    }
}
