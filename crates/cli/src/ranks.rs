//! The ranks of a group as processes of their own, for `weft bench collective`: this program again, with the hidden verb `rank`.
//!
//! Each takes its orders as a [`Worker`], beside what the ranks do through Weft. An order goes to all ranks before the first answer is awaited, because a collective takes all of them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::complaint::{Complain, Complaint, Exit};
use crate::ends::{Allocation, Overrides};
use crate::program;
use crate::verbs::random_word;
use crate::worker::Worker;

/// A collective to be done over and over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exercise {
    pub collective: String,
    /// Of the larger of a rank's buffers.
    pub bytes: u64,
    pub datatype: String,
    /// As the communicator chooses, where there is none.
    pub algorithm: Option<String>,
    /// A schedule in JSON, to run by instead.
    #[serde(default)]
    pub schedule: Option<String>,
    #[serde(default)]
    pub deterministic: bool,
    /// With elements as codes of this kind.
    #[serde(default)]
    pub quantized: Option<String>,
    pub allocation: Allocation,
    pub in_place: bool,
    /// Write the input before every call.
    #[serde(default)]
    pub fresh: bool,
}

/// What the parent asks of every rank.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum Order {
    /// Do this once, look at the result, and say how long it takes.
    Try(Exercise),
    /// Do the same so many times, and the whole so often.
    Measure { iterations: u64, repeats: u64 },
}

/// What a rank answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
pub enum Answer {
    /// The group is complete.
    Ready,
    Tried(Tried),
    Measured(Measured),
    /// It could not be done.
    Failed {
        reason: String,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tried {
    pub correct: bool,
    pub algorithm: String,
    /// The shortest of a few.
    pub ns: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// By repeat: the mean time of an iteration.
    pub mean_ns: Vec<f64>,
    /// Of all iterations.
    pub p50_ns: u64,
    pub p99_ns: u64,
    /// How long it all took, and how much CPU time the process used meanwhile.
    pub wall_ns: u64,
    pub cpu_ns: u64,
}

/// What kind of group.
#[derive(Clone, Copy, Debug)]
pub struct Formation {
    pub count: u32,
    /// Exchange messages through shared memory.
    pub arena: bool,
    /// Keep each rank on a core of its own.
    pub pin: bool,
}

/// Ranks at work. Dropping them ends their processes.
#[derive(Debug)]
pub struct Ranks {
    all: Vec<Worker>,
    _meeting_place: MeetingPlace,
}

impl Ranks {
    /// Starts processes and lets them form a group.
    pub fn spawn(formation: Formation, overrides: &Overrides) -> Result<Ranks, Complaint> {
        let Formation { count, arena, pin } = formation;
        let meeting_place = MeetingPlace::make()?;
        let overrides = overrides.with("rendezvous", format!("dir:{}", meeting_place.0.display()));
        let mut all = Vec::new();
        for rank in 0..count {
            let mut command = program::again();
            command.args(overrides.as_flags());
            command.args(["rank", "--rank", &rank.to_string(), "--ranks", &count.to_string()]);
            if !arena {
                command.arg("--no-arena");
            }
            if pin {
                command.args(["--core", &rank.to_string()]);
            }
            all.push(Worker::spawn(&mut command, format!("Rank {rank}"))?);
        }
        let mut ranks = Ranks {
            all,
            _meeting_place: meeting_place,
        };
        for answer in ranks.answers()? {
            match answer {
                Answer::Ready => {}
                other => return Err(out_of_turn(&other)),
            }
        }
        Ok(ranks)
    }

    pub fn attempt(&mut self, exercise: &Exercise) -> Result<Vec<Tried>, Complaint> {
        let tried = |answer| match answer {
            Answer::Tried(tried) => Ok(tried),
            other => Err(out_of_turn(&other)),
        };
        self.order(&Order::Try(exercise.clone()))?;
        self.answers()?.into_iter().map(tried).collect()
    }

    pub fn measure(&mut self, iterations: u64, repeats: u64) -> Result<Vec<Measured>, Complaint> {
        let measured = |answer| match answer {
            Answer::Measured(measured) => Ok(measured),
            other => Err(out_of_turn(&other)),
        };
        self.order(&Order::Measure { iterations, repeats })?;
        self.answers()?.into_iter().map(measured).collect()
    }

    fn order(&mut self, order: &Order) -> Result<(), Complaint> {
        self.all.iter_mut().try_for_each(|worker| worker.order(order))
    }

    /// One answer of every rank. Of several failures the first is reported; all ranks name the same culprit.
    fn answers(&mut self) -> Result<Vec<Answer>, Complaint> {
        let answers: Vec<Result<Answer, Complaint>> = self.all.iter_mut().enumerate().map(answer).collect();
        answers.into_iter().collect()
    }
}

fn answer((rank, worker): (usize, &mut Worker)) -> Result<Answer, Complaint> {
    match worker.answer()? {
        Answer::Failed { reason } => {
            let sentence = format!("Rank {rank} could not do its part: {}", reason.trim_end());
            Err(Complaint::new(Exit::Failed, sentence))
        }
        answer => Ok(answer),
    }
}

fn out_of_turn(answer: &Answer) -> Complaint {
    Complaint::new(Exit::Failed, format!("A rank answered something else: {answer:?}."))
}

/// A directory where the ranks find each other, gone afterwards.
#[derive(Debug)]
struct MeetingPlace(PathBuf);

impl MeetingPlace {
    fn make() -> Result<MeetingPlace, Complaint> {
        let path = std::env::temp_dir().join(format!("weft-ranks-{:016x}", random_word()?));
        std::fs::create_dir(&path).or_complain(Exit::Failed, || {
            format!("The directory {} could not be made.", path.display())
        })?;
        Ok(MeetingPlace(path))
    }
}

impl Drop for MeetingPlace {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
