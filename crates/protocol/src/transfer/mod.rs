//! Transfers: lists of spans, cut into parts and carried over lanes until every byte is where it belongs.

pub mod cut;

pub use cut::{PartLimits, cut};
