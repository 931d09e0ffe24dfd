//! `weft bench`: how fast this machine moves memory and does collectives, and how fast it should; what stores would hit.

pub mod collective;
pub mod file;
pub mod gpu;
pub mod store;
pub mod transfer;

use clap::Subcommand;
use serde::Serialize;

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::Overrides;

/// Measure how fast memory moves, beside what the machine allows and what the model predicts
#[derive(Debug, Subcommand)]
pub enum Bench {
    Transfer(transfer::Transfer),
    Collective(collective::Collective),
    File(file::File),
    Gpu(gpu::Gpu),
    Store(store::Store),
}

impl Bench {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        match self {
            Bench::Transfer(verb) => verb.run(overrides),
            Bench::Collective(verb) => verb.run(overrides),
            Bench::File(verb) => verb.run(overrides),
            Bench::Gpu(verb) => verb.run(overrides),
            Bench::Store(verb) => verb.run(overrides),
        }
    }
}

fn print_json(value: &impl Serialize) -> Result<(), Complaint> {
    let line = serde_json::to_string(value).or_complain(Exit::Failed, || "A result has no JSON.".to_string())?;
    outln!("{line}");
    Ok(())
}
