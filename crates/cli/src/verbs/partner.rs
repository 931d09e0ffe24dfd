//! The hidden verb `weft partner`: the second process of `demo` and `bench`. See [`crate::partner`].

use std::io::{BufRead, Write};

use clap::Args;

use crate::complaint::{Complain, Complaint, Exit};
use crate::desk::{Desk, Post};
use crate::ends::{Allocation, Overrides};
use crate::partner::Answer;

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
        say(&desk.ready())?;
        for line in std::io::stdin().lock().lines() {
            let line = line.or_complain(Exit::Failed, || "The orders could not be read.".to_string())?;
            let order = serde_json::from_str(&line).or_complain(Exit::Usage, || format!("Not an order: {line}."))?;
            say(&desk.carry_out(&order)?)?;
        }
        Ok(())
    }
}

fn say(answer: &Answer) -> Result<(), Complaint> {
    let complain = || "The answer could not be given.".to_string();
    let line = serde_json::to_string(answer).or_complain(Exit::Failed, complain)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .or_complain(Exit::Failed, complain)
}
