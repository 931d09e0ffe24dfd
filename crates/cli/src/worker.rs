//! Another process of this program that takes orders: lines of JSON to its standard input, and as many answers from its standard output.
//!
//! It ends when its input does, so it cannot outlive whoever started it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::complaint::{Complain, Complaint, Exit};

/// The process, as whoever started it sees it. Dropping it ends the process.
#[derive(Debug)]
pub struct Worker {
    name: String,
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts it; `name` begins the sentences that complain of it.
    pub fn spawn(command: &mut Command, name: impl Into<String>) -> Result<Worker, Complaint> {
        let name = name.into();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .or_complain(Exit::Failed, || format!("{name} could not be started."))?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both ends were asked to be pipes");
        };
        let answers = BufReader::new(answers);
        Ok(Worker {
            name,
            child,
            orders,
            answers,
        })
    }

    pub fn process(&self) -> &Child {
        &self.child
    }

    pub fn order(&mut self, order: &impl Serialize) -> Result<(), Complaint> {
        let sent = self.orders.write_all(&line(order)?);
        sent.or_complain(Exit::Failed, || format!("{} no longer listens.", self.name))
    }

    /// Waits for its next answer.
    pub fn answer<A: DeserializeOwned>(&mut self) -> Result<A, Complaint> {
        let gone = || format!("{} gave no answer; what it said is above.", self.name);
        let mut line = String::new();
        self.answers.read_line(&mut line).or_complain(Exit::Failed, gone)?;
        if line.is_empty() {
            return Err(Complaint::new(Exit::Failed, gone()));
        }
        serde_json::from_str(&line).or_complain(Exit::Failed, || format!("{} answered nonsense.", self.name))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may be frozen or dead already; both calls are then without effect, and there is nothing to report.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the process that was started: carries out orders, one after the other, until nobody gives any more.
pub fn serve<O: DeserializeOwned, A: Serialize>(
    mut carry_out: impl FnMut(O) -> Result<A, Complaint>,
) -> Result<(), Complaint> {
    for line in std::io::stdin().lock().lines() {
        let line = line.or_complain(Exit::Failed, || "The orders could not be read.".to_string())?;
        let order = serde_json::from_str(&line).or_complain(Exit::Usage, || format!("Not an order: {line}."))?;
        say(&carry_out(order)?)?;
    }
    Ok(())
}

/// In the process that was started: one answer.
pub fn say(answer: &impl Serialize) -> Result<(), Complaint> {
    let line = line(answer)?;
    let mut out = std::io::stdout().lock();
    out.write_all(&line)
        .and_then(|()| out.flush())
        .or_complain(Exit::Failed, || "The answer could not be given.".to_string())
}

fn line(words: &impl Serialize) -> Result<Vec<u8>, Complaint> {
    let mut line =
        serde_json::to_vec(words).or_complain(Exit::Failed, || "An order or its answer has no JSON.".to_string())?;
    line.push(b'\n');
    Ok(line)
}
