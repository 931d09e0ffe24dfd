//! What is wrong with the parameters of a fabric, and which of them.

use thiserror::Error;

/// A parameter that no network can be made of: fix the file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{field}: {fault}")]
pub struct FabricError {
    /// As it is written in the file: `radix`, `sides[1]`.
    pub field: String,
    pub fault: FabricFault,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FabricFault {
    #[error("{value} is less than {least}")]
    TooFew { value: u64, least: u64 },
    #[error("{value} is more than {most}")]
    TooMany { value: u64, most: u64 },
    #[error("{value} is not a multiple of {of}")]
    NotAMultiple { value: u64, of: u64 },
    #[error("nothing moves at a bandwidth of zero")]
    NoBandwidth,
    #[error("{ranks} ranks of a node need it")]
    Missing { ranks: u64 },
    #[error("the network would have more than {most} links")]
    TooLarge { most: u64 },
}

/// More links than half a million ports need in three tiers; their numbers fit 32 bits.
pub(super) const MAX_LINKS: u64 = 1 << 30;

pub(super) fn fault(field: impl Into<String>, fault: FabricFault) -> FabricError {
    FabricError {
        field: field.into(),
        fault,
    }
}

/// Checks that a count is within bounds.
pub(super) fn within(field: &str, value: u32, least: u64, most: u64) -> Result<(), FabricError> {
    let value = u64::from(value);
    if value < least {
        return Err(fault(field, FabricFault::TooFew { value, least }));
    }
    if value > most {
        return Err(fault(field, FabricFault::TooMany { value, most }));
    }
    Ok(())
}

pub(super) fn multiple(field: &str, value: u32, of: u32) -> Result<(), FabricError> {
    let (value, of) = (u64::from(value), u64::from(of));
    match value.is_multiple_of(of) {
        true => Ok(()),
        false => Err(fault(field, FabricFault::NotAMultiple { value, of })),
    }
}

pub(super) fn moves(field: &str, wire: super::Wire) -> Result<(), FabricError> {
    match wire.bandwidth.bytes_per_sec() {
        0 => Err(fault(format!("{field}.bandwidth"), FabricFault::NoBandwidth)),
        _ => Ok(()),
    }
}

/// Checks that all links together can be numbered.
pub(super) fn numbered(field: &str, links: u64) -> Result<(), FabricError> {
    match links <= MAX_LINKS {
        true => Ok(()),
        false => Err(fault(field, FabricFault::TooLarge { most: MAX_LINKS })),
    }
}
