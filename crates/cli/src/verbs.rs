//! One file per verb. A verb is the struct that clap parses and a `run` that does it.

pub mod bench;
pub mod completions;
pub mod copy;
pub mod demo;
pub mod doctor;
pub mod explain;
pub mod list;
pub mod man;
pub mod nixl;
pub mod partner;
pub mod plan_serving;
pub mod plan_training;
pub mod rank;
pub mod serve;
pub mod show;
pub mod sim;
pub mod store;
pub mod validate;

use crate::complaint::{Complaint, Exit};

/// The CPU time that this process has used, all threads together.
pub fn cpu_time_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Eight bytes that nobody can guess.
pub fn random_word() -> Result<u64, Complaint> {
    getrandom::u64()
        .map_err(|error| Complaint::new(Exit::Failed, format!("The system gives no random numbers: {error}.")))
}
