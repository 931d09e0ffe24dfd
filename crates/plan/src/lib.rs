//! What should move, by which way, at what cost.
//!
//! Everything here is a pure function of its arguments: no clock, no I/O, no threads. That is what lets the real world
//! and the simulated one share it.
#![forbid(unsafe_code)]

pub mod algorithms;
pub mod collective;
pub mod conversion;
pub mod cost;
pub mod datatype;
pub mod fetch;
pub mod harness;
pub mod kv;
pub mod pages;
pub mod place;
pub mod platform;
pub mod route;
pub mod schedule;
pub mod spans;
pub mod spot;
mod strides;
pub mod units;

pub use collective::{Collective, Problem};
pub use cost::LinkCost;
pub use datatype::{Datatype, Reduction};
pub use kv::{KvLayout, KvOrder, KvShape, KvStrides};
pub use place::{Place, PlaceKind};
pub use platform::{Machine, Platform};
pub use route::{Route, route};
pub use schedule::Program;
pub use spans::{Run, Span, Spans};
pub use units::{Bandwidth, Bytes, Picos, Rank, Time};
