//! The hidden verb `weft partner`: the second process of `demo` and `bench`. See [`crate::partner`].

use std::io::{BufRead, Write};
use std::time::Duration;

use clap::Args;
use weft::{Access, Agent};

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{self, Allocation, Overrides};
use crate::partner::{Answer, Order, REGION};
use crate::pattern::Pattern;

/// Longer than any run of the verbs that need an echo; the thread ends with the process.
const ECHO_WAIT: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug, Args)]
pub struct Partner {
    #[arg(long)]
    name: String,
    #[arg(long)]
    bytes: u64,
    #[arg(long)]
    foreign: bool,
    #[arg(long)]
    echo: bool,
}

impl Partner {
    pub fn run(self, overrides: &Overrides) -> Result<(), Complaint> {
        let agent = overrides.start(&self.name)?;
        let allocation = if self.foreign {
            Allocation::Foreign
        } else {
            Allocation::Mapped
        };
        let memory = ends::acquire(&agent, self.bytes, allocation)?;
        agent
            .publish(REGION, &memory, Access::READ_WRITE)
            .map_err(|error| ends::explain(&error, "The region could not be published."))?;
        if self.echo {
            let agent = agent.clone();
            std::thread::spawn(move || echo(&agent));
        }
        say(&Answer::Ready {
            address: agent.address(),
        })?;
        for line in std::io::stdin().lock().lines() {
            let line = line.or_complain(Exit::Failed, || "The orders could not be read.".to_string())?;
            let order = serde_json::from_str(&line).or_complain(Exit::Usage, || format!("Not an order: {line}."))?;
            say(&match order {
                Order::Fill { seed } => {
                    ends::fill(&memory, Pattern(seed));
                    Answer::Filled
                }
                Order::Check { seed, blocks } => Answer::Checked {
                    first_difference: ends::first_difference(&memory, &blocks.far(), Pattern(seed), &blocks.near()),
                },
                Order::CpuTime => Answer::CpuTime {
                    ns: super::cpu_time_ns(),
                },
            })?;
        }
        Ok(())
    }
}

fn echo(agent: &Agent) {
    while let Some(notification) = agent.next_notification(ECHO_WAIT) {
        // A peer that has left needs no answer.
        let _ = notification.from.notify(&notification.payload);
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
