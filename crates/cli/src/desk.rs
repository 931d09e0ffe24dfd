//! The partner's side of [`crate::partner`]: an agent, its region, and what is done with them when an order comes.

use std::time::{Duration, Instant};

use weft::{Access, Agent, Memory};

use crate::complaint::{Complaint, Exit};
use crate::ends::{self, Allocation, Overrides};
use crate::partner::{Answer, NEAR_REGION, Order, REGION};
use crate::pattern::Pattern;
use crate::ping_pong::{PingPong, Serve};
use crate::verbs::cpu_time_ns;

/// Longer than any run of the verbs that need an echo; the thread ends with the process.
const ECHO_WAIT: Duration = Duration::from_secs(24 * 3600);
/// How long the end that connects may take to do so.
const PEER_WAIT: Duration = Duration::from_secs(10);

/// An agent that does what it is told.
#[derive(Debug)]
pub struct Desk {
    agent: Agent,
    memory: Memory,
}

/// What the agent of a desk is to be.
#[derive(Clone, Debug)]
pub struct Post<'a> {
    pub name: &'a str,
    pub region_bytes: u64,
    pub allocation: Allocation,
    pub echo: bool,
}

impl Desk {
    pub fn open(post: &Post<'_>, overrides: &Overrides) -> Result<Desk, Complaint> {
        let agent = overrides.start(post.name)?;
        let memory = ends::acquire(&agent, post.region_bytes, post.allocation)?;
        agent
            .publish(REGION, &memory, Access::READ_WRITE)
            .map_err(|error| ends::explain(&error, "The region could not be published."))?;
        if post.echo {
            let agent = agent.clone();
            std::thread::spawn(move || echo(&agent));
        }
        Ok(Desk { agent, memory })
    }

    /// That it is there, and where.
    pub fn ready(&self) -> Answer {
        Answer::Ready {
            address: self.agent.address(),
        }
    }

    pub fn carry_out(&self, order: &Order) -> Result<Answer, Complaint> {
        Ok(match *order {
            Order::Open { .. } => self.ready(),
            Order::Fill { seed } => {
                ends::fill(&self.memory, Pattern(seed));
                Answer::Filled
            }
            Order::Check { seed, blocks } => Answer::Checked {
                first_difference: ends::first_difference(&self.memory, &blocks.far(), Pattern(seed), &blocks.near()),
            },
            Order::PingPong(serve) => Answer::PingPonged {
                pings: self.ping_pong(serve)?,
            },
            Order::Counters => Answer::Counters {
                counts: counts(&self.agent),
            },
            Order::CpuTime => Answer::CpuTime { ns: cpu_time_ns() },
        })
    }

    fn ping_pong(&self, serve: Serve) -> Result<u64, Complaint> {
        let start = Instant::now();
        let peer = loop {
            match self.agent.peers().into_iter().next() {
                Some(peer) => break peer,
                None if start.elapsed() < PEER_WAIT => std::thread::sleep(Duration::from_millis(1)),
                None => return Err(Complaint::new(Exit::Unreachable, "Nobody has connected.")),
            }
        };
        let near = peer
            .region(NEAR_REGION, PEER_WAIT)
            .map_err(|error| ends::explain(&error, "The other end has published no region."))?;
        PingPong::new(&self.agent, &peer, &self.memory, &near, serve)?.answer()
    }
}

/// What an agent's transports have counted, all rails together.
pub fn counts(agent: &Agent) -> Vec<(String, u64)> {
    let mut totals: Vec<(String, u64)> = Vec::new();
    for rail in agent.counters() {
        for (name, count) in rail.counts {
            match totals.iter_mut().find(|(known, _)| known == name) {
                Some((_, total)) => *total += count,
                None => totals.push((name.to_string(), count)),
            }
        }
    }
    totals
}

fn echo(agent: &Agent) {
    while let Some(notification) = agent.next_notification(ECHO_WAIT) {
        // A peer that has left needs no answer.
        let _ = notification.from.notify(&notification.payload);
    }
}
