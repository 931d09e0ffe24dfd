//! The hidden verb `weft partner`: the second process of `demo` and `bench`. See [`crate::partner`].

use clap::Args;

use crate::complaint::Complaint;
use crate::desk::{Desk, Post};
use crate::ends::{Allocation, Overrides};
use crate::worker;

#[derive(Debug, Args)]
pub struct Partner {
    #[arg(long)]
    name: String,
    #[arg(long)]
    bytes: u64,
    #[arg(long)]
    foreign: bool,
    #[arg(long)]
    gpu: bool,
    #[arg(long)]
    echo: bool,
}

impl Partner {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        let post = Post {
            name: &self.name,
            region_bytes: self.bytes,
            allocation: match (self.foreign, self.gpu) {
                (true, _) => Allocation::Foreign,
                (false, true) => Allocation::Gpu,
                (false, false) => Allocation::Mapped,
            },
            echo: self.echo,
        };
        let desk = Desk::open(&post, overrides)?;
        worker::say(&desk.ready())?;
        worker::serve(|order| desk.carry_out(&order))
    }
}
