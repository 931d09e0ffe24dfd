//! A second process with an agent of its own, for verbs that need two: this program again, with the hidden verb `partner`, or
//! `weft bench transfer --listen` on another host.
//!
//! A child takes its orders as a [`Worker`], beside what the two do through Weft, so that what is verified does not rest on what is being
//! tested. With another
//! host they say the same in notifications between two agents that do nothing else, so that nobody is obeyed who has not
//! proved the secret.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use weft::{Agent, Peer};
use weft_plan::Spans;

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{self, Allocation, Overrides};
use crate::pattern::shuffled;
use crate::ping_pong::Serve;
use crate::program;
use crate::worker::Worker;

/// The name under which a partner publishes its region, and that under which the other end does, where it is written back to.
pub const REGION: &str = "partner";
pub const NEAR_REGION: &str = "near";

/// How long an order may take: filling and comparing large regions does.
const ANSWER_WAIT: Duration = Duration::from_secs(120);

/// What the parent asks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum Order {
    /// Start an agent; what was started before ends. For a partner that was not started for this.
    Open {
        transport: String,
        region_bytes: u64,
        allocation: Allocation,
        echo: bool,
    },
    /// Fill the region with the pattern of this seed.
    Fill { seed: u64 },
    /// Compare what was written into the region with the pattern of this seed.
    Check { seed: u64, blocks: Blocks },
    /// Write every ping back.
    PingPong(Serve),
    /// What have the transports counted?
    Counters,
    /// How much CPU time has the process used?
    CpuTime,
}

/// What the child answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum Answer {
    Ready {
        address: String,
    },
    Filled,
    Checked {
        first_difference: Option<u64>,
    },
    PingPonged {
        pings: u64,
    },
    Counters {
        counts: Vec<(String, u64)>,
    },
    CpuTime {
        ns: u64,
    },
    /// It could not be done.
    Failed {
        reason: String,
    },
}

/// `count` of the first `slots` blocks, in an order that the seed decides, another one at each end. Both processes compute it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Blocks {
    pub bytes: u64,
    pub count: u64,
    pub slots: u64,
    pub seed: u64,
}

impl Blocks {
    /// The spans in the parent's region.
    pub fn near(&self) -> Spans {
        self.spans(self.seed)
    }
    /// The spans in the partner's region.
    pub fn far(&self) -> Spans {
        self.spans(!self.seed)
    }
    pub fn total(&self) -> u64 {
        self.bytes * self.count
    }

    fn spans(&self, seed: u64) -> Spans {
        let blocks = shuffled(self.slots, seed).into_iter().take(self.count as usize);
        Spans::paged(0, self.bytes, blocks)
    }
}

/// What the partner is to be.
#[derive(Clone, Copy, Debug)]
pub struct Role<'a> {
    pub name: &'a str,
    pub region_bytes: u64,
    pub allocation: Allocation,
    /// Send every notification back.
    pub echo: bool,
}

/// A partner at work. Dropping it ends its process, where it was started for this.
#[derive(Debug)]
pub struct Partner {
    line: Line,
    address: String,
}

/// How orders reach the partner.
#[derive(Debug)]
enum Line {
    Child(Worker),
    Host { peer: Peer, agent: Agent },
}

impl Partner {
    /// Starts a second process on this host.
    pub fn spawn(role: Role<'_>, overrides: &Overrides) -> Result<Partner, Complaint> {
        let mut command = program::again();
        command.args(overrides.as_flags());
        command.args(["partner", "--name", role.name]);
        command.args(["--bytes", &role.region_bytes.to_string()]);
        match role.allocation {
            Allocation::Mapped => {}
            Allocation::Foreign => {
                command.arg("--foreign");
            }
            Allocation::Gpu => {
                command.arg("--gpu");
            }
        }
        if role.echo {
            command.arg("--echo");
        }
        let line = Line::Child(Worker::spawn(&mut command, "The second process")?);
        Partner {
            line,
            address: String::new(),
        }
        .ready()
    }

    /// Asks `weft bench transfer --listen` on another host to be the partner.
    pub fn hire(role: Role<'_>, transport: &str, at: &str, overrides: &Overrides) -> Result<Partner, Complaint> {
        let agent = overrides.with("transports", "tcp").start("bench-orders")?;
        let peer = agent
            .connect(at)
            .map_err(|error| ends::explain(&error, &format!("Nobody takes orders at {at}.")))?;
        let line = Line::Host { peer, agent };
        let mut partner = Partner {
            line,
            address: String::new(),
        };
        partner.order(&Order::Open {
            transport: transport.to_string(),
            region_bytes: role.region_bytes,
            allocation: role.allocation,
            echo: role.echo,
        })?;
        partner.ready()
    }

    /// Where its agent can be reached.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn fill(&mut self, seed: u64) -> Result<(), Complaint> {
        match self.ask(&Order::Fill { seed })? {
            Answer::Filled => Ok(()),
            other => Err(out_of_turn(&other)),
        }
    }

    /// Where the partner's bytes first differ from what was written to it.
    pub fn check(&mut self, seed: u64, blocks: Blocks) -> Result<Option<u64>, Complaint> {
        match self.ask(&Order::Check { seed, blocks })? {
            Answer::Checked { first_difference } => Ok(first_difference),
            other => Err(out_of_turn(&other)),
        }
    }

    /// Lets the partner write pings back until the last; [`Partner::end_ping_pong`] hears that it was.
    pub fn start_ping_pong(&mut self, serve: Serve) -> Result<(), Complaint> {
        self.order(&Order::PingPong(serve))
    }

    pub fn end_ping_pong(&mut self) -> Result<u64, Complaint> {
        match self.answer()? {
            Answer::PingPonged { pings } => Ok(pings),
            other => Err(out_of_turn(&other)),
        }
    }

    pub fn counters(&mut self) -> Result<Vec<(String, u64)>, Complaint> {
        match self.ask(&Order::Counters)? {
            Answer::Counters { counts } => Ok(counts),
            other => Err(out_of_turn(&other)),
        }
    }

    pub fn cpu_time_ns(&mut self) -> Result<u64, Complaint> {
        match self.ask(&Order::CpuTime)? {
            Answer::CpuTime { ns } => Ok(ns),
            other => Err(out_of_turn(&other)),
        }
    }

    /// Sends a signal to the process: SIGKILL, SIGSTOP, SIGCONT.
    ///
    /// # Panics
    /// Where the partner is on another host.
    pub fn signal(&self, signal: Signal) -> Result<(), Complaint> {
        let Line::Child(worker) = &self.line else {
            panic!("only a child can be signalled");
        };
        kill_process(Pid::from_child(worker.process()), signal).or_complain(Exit::Failed, || {
            "The second process could not be signalled.".to_string()
        })
    }

    fn ready(mut self) -> Result<Partner, Complaint> {
        match self.answer()? {
            Answer::Ready { address } => self.address = address,
            other => return Err(out_of_turn(&other)),
        }
        Ok(self)
    }

    fn ask(&mut self, order: &Order) -> Result<Answer, Complaint> {
        self.order(order)?;
        self.answer()
    }

    fn order(&mut self, order: &Order) -> Result<(), Complaint> {
        match &mut self.line {
            Line::Child(worker) => worker.order(order),
            Line::Host { peer, .. } => {
                let text =
                    serde_json::to_vec(order).or_complain(Exit::Failed, || "An order has no JSON.".to_string())?;
                peer.notify(&text)
                    .map_err(|error| ends::explain(&error, "The other host no longer listens."))
            }
        }
    }

    fn answer(&mut self) -> Result<Answer, Complaint> {
        let answer = match &mut self.line {
            Line::Child(worker) => worker.answer()?,
            Line::Host { agent, .. } => {
                let gone = || Complaint::new(Exit::Unreachable, "The other host gave no answer.");
                let text = agent.next_notification(ANSWER_WAIT).ok_or_else(gone)?.payload;
                serde_json::from_slice(&text)
                    .or_complain(Exit::Failed, || "The other host answered nonsense.".to_string())?
            }
        };
        match answer {
            Answer::Failed { reason } => {
                let sentence = format!("The other end could not do its part: {}", reason.trim_end());
                Err(Complaint::new(Exit::Failed, sentence))
            }
            answer => Ok(answer),
        }
    }
}

fn out_of_turn(answer: &Answer) -> Complaint {
    let sentence = format!("The second process answered something else: {answer:?}.");
    Complaint::new(Exit::Failed, sentence)
}
