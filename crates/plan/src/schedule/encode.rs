//! Programs as JSON, so that schedules made elsewhere can be brought, and ours taken away.
//!
//! The file names its problem and lists the ops of every rank and step. What is read is verified before it is handed out, so that a
//! wrong schedule is an error with rank, step and op, and never a wrong result.
//!
//! ```
//! use weft_plan::algorithms::Ring;
//! use weft_plan::collective::{Collective, Problem};
//! use weft_plan::schedule::encode::{Schedule, from_json, to_json};
//! let problem = Problem::new(Collective::AllReduce, 3);
//! let text = to_json(&Schedule::of("ring", problem, &Ring::new(problem).unwrap()));
//! let schedule = from_json(&text)?;
//! assert_eq!(schedule.problem, problem);
//! # Ok::<(), weft_plan::schedule::encode::DecodeError>(())
//! ```

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Fault, Listed, Op, Program, Shape, verify};
use crate::collective::{Buffer, Extent, Problem};
use crate::units::Rank;

/// Text of more bytes than this is not looked at.
const MAX_TEXT_BYTES: usize = 16 << 20;
/// A verifier's memory and time for a file are bounded by these.
const MAX_RANKS: u32 = 1 << 10;
const MAX_CHUNKS: u64 = 1 << 22;
const MAX_CHUNKS_TOUCHED: u64 = 1 << 25;

/// A program with its name and the problem that it solves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    pub name: String,
    pub problem: Problem,
    pub program: Listed,
}

/// Why a file is not a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DecodeError {
    #[error("a schedule of {bytes} bytes; {max} is the most")]
    TooLong { bytes: usize, max: usize },
    #[error("line {line}, column {column}: {message}")]
    Unreadable {
        line: usize,
        column: usize,
        message: String,
    },
    #[error("`{field}` comes to {value}; {max} is the most")]
    TooMuch { field: &'static str, value: u64, max: u64 },
    #[error("`ranks` lists {listed} ranks, and the problem has {ranks}")]
    WrongRanks { listed: usize, ranks: u32 },
    #[error("the schedule is not right")]
    Wrong(#[from] Fault),
}

/// The file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    problem: Problem,
    #[serde(default = "one")]
    pieces: u32,
    #[serde(default = "one_channel")]
    channels: u16,
    /// Chunks of scratch on every rank.
    #[serde(default)]
    scratch: u32,
    /// What these are as long as, by rank; the common size where nothing is said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    scratch_extents: Vec<Vec<Extent>>,
    /// By rank, step and op.
    ranks: Vec<Vec<Vec<Op>>>,
}

fn one() -> u32 {
    1
}
fn one_channel() -> u16 {
    1
}

impl Schedule {
    /// Any program, written out.
    pub fn of(name: &str, problem: Problem, program: &dyn Program) -> Schedule {
        Schedule {
            name: name.to_owned(),
            problem,
            program: Listed::of(program),
        }
    }
}

/// The text that [`from_json`] reads back as this schedule: one line a step.
pub fn to_json(schedule: &Schedule) -> String {
    let shape = schedule.program.shape();
    let value = |value: Result<String, serde_json::Error>| value.expect("every field of a schedule has a form in JSON");
    let mut text = format!(
        "{{\n  \"name\": {},\n  \"problem\": {},\n  \"pieces\": {}, \"channels\": {}, \"scratch\": {},\n",
        value(serde_json::to_string(&schedule.name)),
        value(serde_json::to_string(&schedule.problem)),
        shape.pieces,
        shape.channels,
        shape.scratch,
    );
    let extents = schedule.program.scratch_extents();
    let plain = |list: &Vec<Extent>| {
        let common = (0u32..).map(|chunk| Extent::common(chunk % shape.pieces));
        list.iter().copied().eq(common.take(list.len()))
    };
    if !extents.iter().all(plain) {
        text.push_str(&format!(
            "  \"scratch_extents\": {},\n",
            value(serde_json::to_string(extents))
        ));
    }
    text.push_str("  \"ranks\": [");
    for (rank, steps) in schedule.program.ranks().iter().enumerate() {
        text.push_str(if rank == 0 { "\n    [" } else { ",\n    [" });
        for (step, ops) in steps.iter().enumerate() {
            text.push_str(if step == 0 { "\n      " } else { ",\n      " });
            text.push_str(&value(serde_json::to_string(ops)));
        }
        text.push_str("\n    ]");
    }
    text.push_str("\n  ]\n}\n");
    text
}

/// Reads a schedule and verifies it.
pub fn from_json(text: &str) -> Result<Schedule, DecodeError> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(DecodeError::TooLong {
            bytes: text.len(),
            max: MAX_TEXT_BYTES,
        });
    }
    let file: File = serde_json::from_str(text).map_err(|error| DecodeError::Unreadable {
        line: error.line(),
        column: error.column(),
        message: error
            .to_string()
            .split(" at line ")
            .next()
            .unwrap_or_default()
            .to_owned(),
    })?;
    let most = |field, value: u64, max: u64| match value <= max {
        true => Ok(()),
        false => Err(DecodeError::TooMuch { field, value, max }),
    };
    let problem = file.problem;
    most("problem.ranks", problem.ranks.into(), MAX_RANKS.into())?;
    if file.ranks.len() != problem.ranks as usize {
        return Err(DecodeError::WrongRanks {
            listed: file.ranks.len(),
            ranks: problem.ranks,
        });
    }
    problem.check().map_err(Fault::from)?;
    let chunks = (0..problem.ranks).map(Rank).map(|rank| {
        let blocks = [Buffer::Input, Buffer::Output].map(|buffer| u64::from(problem.blocks(rank, buffer)));
        (blocks[0] + blocks[1]) * u64::from(file.pieces)
    });
    most("pieces", chunks.fold(0, u64::saturating_add), MAX_CHUNKS)?;
    most(
        "scratch",
        u64::from(file.scratch) * u64::from(problem.ranks),
        MAX_CHUNKS,
    )?;
    let touched = file.ranks.iter().flatten().flatten().map(|op| {
        let slices = op.reads().chain(op.writes());
        1 + slices.map(|slice| u64::from(slice.count)).sum::<u64>()
    });
    most("ranks", touched.fold(0, u64::saturating_add), MAX_CHUNKS_TOUCHED)?;
    let shape = Shape {
        ranks: problem.ranks,
        steps: 0,
        pieces: file.pieces,
        scratch: file.scratch,
        channels: file.channels,
    };
    let program = Listed::new(shape, file.ranks).with_scratch(file.scratch_extents);
    verify(&problem, &program)?;
    Ok(Schedule {
        name: file.name,
        problem,
        program,
    })
}
