//! Schedules of the caller's own, which a call may run by instead of an algorithm.

use std::fmt;
use std::sync::Arc;

use weft_plan::collective::Problem;
use weft_plan::cost::Candidate;
use weft_plan::schedule::encode::{self, DecodeError};
use weft_plan::schedule::{Fault, Listed, Program, verify};
use weft_protocol::memory::Digest;

/// A program of the caller's own, which has been verified: it can be wrong for a call, but it does what it says. Clones are the same.
///
/// ```
/// use weft::Schedule;
/// let text = r#"{"name": "swap", "problem": {"collective": "all-reduce", "ranks": 2, "in_place": false}, "ranks": []}"#;
/// assert!(Schedule::from_json(text).is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    inner: Arc<Inner>,
}

#[derive(Debug, PartialEq, Eq)]
struct Inner {
    schedule: encode::Schedule,
    digest: u64,
}

impl Schedule {
    /// Reads a file such as `weft explain --render json` writes, and verifies it.
    pub fn from_json(text: &str) -> Result<Schedule, DecodeError> {
        Ok(Schedule::verified(encode::from_json(text)?))
    }

    /// Any program, verified and written out.
    pub fn of(name: &str, problem: Problem, program: &dyn Program) -> Result<Schedule, Fault> {
        verify(&problem, program)?;
        Ok(Schedule::verified(encode::Schedule::of(name, problem, program)))
    }

    fn verified(schedule: encode::Schedule) -> Schedule {
        let mut digest = Digest::default();
        digest.update(encode::to_json(&schedule).as_bytes());
        let digest = digest.finish();
        Schedule {
            inner: Arc::new(Inner { schedule, digest }),
        }
    }

    pub fn name(&self) -> &str {
        &self.inner.schedule.name
    }
    /// What it solves.
    pub fn problem(&self) -> &Problem {
        &self.inner.schedule.problem
    }
    /// What ranks that run by the same schedule have in common.
    pub fn digest(&self) -> u64 {
        self.inner.digest
    }

    pub(super) fn program(&self) -> &Listed {
        &self.inner.schedule.program
    }
}

/// By what a call runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    Algorithm(Candidate),
    Schedule(Schedule),
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Algorithm(candidate) => candidate.fmt(f),
            Way::Schedule(schedule) => write!(f, "schedule {} ({:016x})", schedule.name(), schedule.digest()),
        }
    }
}
