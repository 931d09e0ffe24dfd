//! What the elements of a buffer are, and what it means to reduce them.
//!
//! This room holds the meaning of a reduction, in safe code that is short enough to be read as a definition. The kernels that
//! run on real memory are tested against it bit by bit, and the simulated world uses it as it is. The rules:
//!
//! - **Order.** A reduction of several buffers is a left fold in the order in which they are given.
//! - **Rounding.** f64 and f32 are added and multiplied in their own precision, to nearest, ties to even. f16, bf16 and fp8 are
//!   widened to f32, folded there, and rounded once at the end, to nearest, ties to even. A fold of three narrow buffers may
//!   therefore differ from two folds of two: the former rounds less.
//! - **Overflow** of floats is an infinity. fp8 e4m3 has none and saturates at ±448, infinities included. Both are as torch 2.15 converts
//!   to its `float8_e5m2` and `float8_e4m3fn`.
//! - **NaN.** A reduction with a NaN among its operands is NaN, also min and max. There is one NaN in results, the positive quiet one
//!   without payload, so that the bits are the same on every processor. (In fp8, the code 0x7f.)
//! - **Zeros.** −0 is less than +0 in min and max, so that neither depends on the order of its operands.
//! - **Integers** wrap around in sum and product.
//! - **Average** is the sum in the sense above, divided by the number of contributions and rounded once: floats to nearest, integers
//!   towards zero. An integer sum that has wrapped around gives the average of what it has wrapped to.
//!
//! ```
//! use weft_plan::{Datatype, Reduction};
//! let (a, b) = ([250u8, 1, 2], [10u8, 1, 2]);
//! let mut into = [0; 3];
//! Datatype::U8.fold(Reduction::Sum, &mut into, &[&a, &b])?;
//! assert_eq!(into, [4, 2, 4]);
//! # Ok::<(), weft_plan::datatype::UnevenBuffers>(())
//! ```

mod element;
mod float8;
pub mod quantized;
mod reference;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use element::{Element, Number};
pub use float8::{E4m3, E5m2};
pub use half::{bf16, f16};
pub use reference::UnevenBuffers;

/// What the elements of a buffer are. In memory they are in the byte order of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Datatype {
    #[serde(rename = "f64")]
    F64,
    #[serde(rename = "f32")]
    F32,
    /// IEEE binary16.
    #[serde(rename = "f16")]
    F16,
    /// The upper half of an f32.
    #[serde(rename = "bf16")]
    Bf16,
    /// Four bits of exponent, three of mantissa, no infinity, one NaN of each sign: torch's `float8_e4m3fn`.
    #[serde(rename = "fp8_e4m3")]
    Fp8E4m3,
    /// The upper half of an f16: torch's `float8_e5m2`.
    #[serde(rename = "fp8_e5m2")]
    Fp8E5m2,
    #[serde(rename = "i8")]
    I8,
    #[serde(rename = "i16")]
    I16,
    #[serde(rename = "i32")]
    I32,
    #[serde(rename = "i64")]
    I64,
    #[serde(rename = "u8")]
    U8,
    #[serde(rename = "u16")]
    U16,
    #[serde(rename = "u32")]
    U32,
    #[serde(rename = "u64")]
    U64,
}

impl Datatype {
    pub const ALL: [Datatype; 14] = [
        Datatype::F64,
        Datatype::F32,
        Datatype::F16,
        Datatype::Bf16,
        Datatype::Fp8E4m3,
        Datatype::Fp8E5m2,
        Datatype::I8,
        Datatype::I16,
        Datatype::I32,
        Datatype::I64,
        Datatype::U8,
        Datatype::U16,
        Datatype::U32,
        Datatype::U64,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Datatype::F64 | Datatype::I64 | Datatype::U64 => 8,
            Datatype::F32 | Datatype::I32 | Datatype::U32 => 4,
            Datatype::F16 | Datatype::Bf16 | Datatype::I16 | Datatype::U16 => 2,
            Datatype::Fp8E4m3 | Datatype::Fp8E5m2 | Datatype::I8 | Datatype::U8 => 1,
        }
    }

    /// Whether reductions of it round.
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Datatype::F64 | Datatype::F32 | Datatype::F16 | Datatype::Bf16 | Datatype::Fp8E4m3 | Datatype::Fp8E5m2
        )
    }

    /// The name in text and files.
    pub const fn name(self) -> &'static str {
        match self {
            Datatype::F64 => "f64",
            Datatype::F32 => "f32",
            Datatype::F16 => "f16",
            Datatype::Bf16 => "bf16",
            Datatype::Fp8E4m3 => "fp8_e4m3",
            Datatype::Fp8E5m2 => "fp8_e5m2",
            Datatype::I8 => "i8",
            Datatype::I16 => "i16",
            Datatype::I32 => "i32",
            Datatype::I64 => "i64",
            Datatype::U8 => "u8",
            Datatype::U16 => "u16",
            Datatype::U32 => "u32",
            Datatype::U64 => "u64",
        }
    }
}

/// How elements from several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    Sum,
    Prod,
    Min,
    Max,
    /// The sum, divided by the number of ranks at the very end. Until then it is combined like a sum.
    Avg,
}

impl Reduction {
    pub const ALL: [Reduction; 5] = [
        Reduction::Sum,
        Reduction::Prod,
        Reduction::Min,
        Reduction::Max,
        Reduction::Avg,
    ];

    /// The name in text and files.
    pub const fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Prod => "prod",
            Reduction::Min => "min",
            Reduction::Max => "max",
            Reduction::Avg => "avg",
        }
    }
}

/// Text that names no datatype.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "`{text}` is no datatype; known are f64, f32, f16, bf16, fp8_e4m3, fp8_e5m2, i8, i16, i32, i64, u8, u16, u32 and u64"
)]
pub struct UnknownDatatype {
    pub text: String,
}

/// Text that names no reduction.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{text}` is no reduction; known are sum, prod, min, max and avg")]
pub struct UnknownReduction {
    pub text: String,
}

/// What of a wrong name is repeated in the complaint about it.
fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

impl FromStr for Datatype {
    type Err = UnknownDatatype;
    fn from_str(text: &str) -> Result<Datatype, UnknownDatatype> {
        let found = Datatype::ALL.into_iter().find(|datatype| datatype.name() == text);
        found.ok_or_else(|| UnknownDatatype { text: shown(text) })
    }
}

impl FromStr for Reduction {
    type Err = UnknownReduction;
    fn from_str(text: &str) -> Result<Reduction, UnknownReduction> {
        let found = Reduction::ALL.into_iter().find(|reduction| reduction.name() == text);
        found.ok_or_else(|| UnknownReduction { text: shown(text) })
    }
}

impl fmt::Display for Datatype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Named {
        datatype: Datatype,
        reduction: Reduction,
    }

    #[test]
    fn names_read_back_and_files_use_the_same() {
        for datatype in Datatype::ALL {
            assert_eq!(datatype.to_string().parse(), Ok(datatype));
            for reduction in Reduction::ALL {
                assert_eq!(reduction.to_string().parse(), Ok(reduction));
                let named = Named { datatype, reduction };
                let text = toml::to_string(&named).unwrap();
                assert_eq!(
                    text,
                    format!("datatype = \"{datatype}\"\nreduction = \"{reduction}\"\n")
                );
                assert_eq!(toml::from_str::<Named>(&text).unwrap(), named);
            }
        }
        assert!("F32".parse::<Datatype>().is_err());
        assert_eq!(
            "mean".parse::<Reduction>().unwrap_err().to_string(),
            "`mean` is no reduction; known are sum, prod, min, max and avg"
        );
    }
}
