//! `weft bench`: how fast this machine moves memory, and how fast it should.

pub mod transfer;

use clap::Subcommand;

use crate::complaint::Complaint;
use crate::ends::Overrides;

/// Measure how fast memory moves, beside what the machine allows and what the model predicts
#[derive(Debug, Subcommand)]
pub enum Bench {
    Transfer(transfer::Transfer),
}

impl Bench {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        match self {
            Bench::Transfer(verb) => verb.run(overrides),
        }
    }
}
