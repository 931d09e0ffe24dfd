//! A second process with an agent of its own, for verbs that need two: this program again, with the hidden verb `partner`.
//!
//! The two talk in lines of JSON over the child's standard input and output, beside what they do through Weft, so that what is
//! verified does not rest on what is being tested. The child ends when its input does: it cannot outlive the parent.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use weft_plan::Spans;

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{Allocation, Overrides};
use crate::pattern::shuffled;

/// The name under which a partner publishes its region.
pub const REGION: &str = "partner";

/// What the parent asks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum Order {
    /// Fill the region with the pattern of this seed.
    Fill { seed: u64 },
    /// Compare what was written into the region with the pattern of this seed.
    Check { seed: u64, blocks: Blocks },
    /// How much CPU time has the process used?
    CpuTime,
}

/// What the child answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum Answer {
    Ready { address: String },
    Filled,
    Checked { first_difference: Option<u64> },
    CpuTime { ns: u64 },
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

/// A running partner. Dropping it ends the process.
#[derive(Debug)]
pub struct Partner {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    address: String,
}

impl Partner {
    pub fn spawn(role: Role<'_>, overrides: &Overrides) -> Result<Partner, Complaint> {
        let complain = || "The second process could not be started.".to_string();
        let program = std::env::current_exe().or_complain(Exit::Failed, complain)?;
        let mut command = Command::new(program);
        command.args(overrides.as_flags());
        command.args(["partner", "--name", role.name]);
        command.args(["--bytes", &role.region_bytes.to_string()]);
        if role.allocation == Allocation::Foreign {
            command.arg("--foreign");
        }
        if role.echo {
            command.arg("--echo");
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .or_complain(Exit::Failed, complain)?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both ends were asked to be pipes");
        };
        let mut partner = Partner {
            child,
            orders,
            answers: BufReader::new(answers),
            address: String::new(),
        };
        match partner.answer()? {
            Answer::Ready { address } => partner.address = address,
            other => return Err(partner.out_of_turn(&other)),
        }
        Ok(partner)
    }

    /// Where its agent can be reached.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn fill(&mut self, seed: u64) -> Result<(), Complaint> {
        match self.ask(&Order::Fill { seed })? {
            Answer::Filled => Ok(()),
            other => Err(self.out_of_turn(&other)),
        }
    }

    /// Where the partner's bytes first differ from what was written to it.
    pub fn check(&mut self, seed: u64, blocks: Blocks) -> Result<Option<u64>, Complaint> {
        match self.ask(&Order::Check { seed, blocks })? {
            Answer::Checked { first_difference } => Ok(first_difference),
            other => Err(self.out_of_turn(&other)),
        }
    }

    pub fn cpu_time_ns(&mut self) -> Result<u64, Complaint> {
        match self.ask(&Order::CpuTime)? {
            Answer::CpuTime { ns } => Ok(ns),
            other => Err(self.out_of_turn(&other)),
        }
    }

    /// Sends a signal to the process: SIGKILL, SIGSTOP, SIGCONT.
    pub fn signal(&self, signal: Signal) -> Result<(), Complaint> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).or_complain(Exit::Failed, || {
            "The second process could not be signalled.".to_string()
        })
    }

    fn ask(&mut self, order: &Order) -> Result<Answer, Complaint> {
        let mut line =
            serde_json::to_string(order).or_complain(Exit::Failed, || "An order has no JSON.".to_string())?;
        line.push('\n');
        self.orders
            .write_all(line.as_bytes())
            .or_complain(Exit::Failed, || "The second process no longer listens.".to_string())?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Answer, Complaint> {
        let mut line = String::new();
        let gone = || "The second process gave no answer; what it said is above.".to_string();
        self.answers.read_line(&mut line).or_complain(Exit::Failed, gone)?;
        if line.is_empty() {
            return Err(Complaint::new(Exit::Failed, gone()));
        }
        serde_json::from_str(&line).or_complain(Exit::Failed, || "The second process answered nonsense.".to_string())
    }

    fn out_of_turn(&self, answer: &Answer) -> Complaint {
        Complaint::new(
            Exit::Failed,
            format!("The second process answered something else: {answer:?}."),
        )
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        // It may be frozen or dead already; both calls are then without effect, and there is nothing to report.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
