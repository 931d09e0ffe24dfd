//! What machines that nobody has here would take: systems of GPUs and the networks between them, training and serving on them, and how far
//! all of it is from measurements.
//!
//! The room is as pure as `plan`, on which it stands: no clock, no I/O, no threads. Who moves bytes does not need it: it is for the
//! simulator, the command, and whoever plans a cluster. The files under `systems/` and `ground_truth/` are embedded here.
#![forbid(unsafe_code)]

pub mod device;
pub mod fabric;
pub mod handover;
pub mod harness;
pub mod roofline;
pub mod system;
pub mod validate;
pub mod workload;
