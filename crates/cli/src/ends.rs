//! The command's dealings with [`weft::Agent`]: settings from flags, memory with a pattern in it, errors as complaints.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft::settings::{Origin, Settings, Sources};
use weft::{Agent, ConnectError, Error, Failure, Memory};
use weft_plan::Spans;

use crate::complaint::{Complain, Complaint, Exit};
use crate::pattern::Pattern;

/// How much of a region is looked at or written at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// What `--set` said, and what a verb adds to it. It wins over file and environment.
#[derive(Clone, Debug, Default)]
pub struct Overrides(Vec<(String, String)>);

impl Overrides {
    pub fn parse(flags: &[String]) -> Result<Overrides, Complaint> {
        let pairs = flags.iter().map(|flag| match flag.split_once('=') {
            Some((key, value)) => Ok((key.trim().to_string(), value.trim().to_string())),
            None => Err(Complaint::new(Exit::Usage, format!("--set {flag} has no value."))
                .try_this(format!("--set {flag}=VALUE; `weft doctor` lists the settings"))),
        });
        Ok(Overrides(pairs.collect::<Result<_, _>>()?))
    }

    pub fn with(&self, key: &str, value: impl Into<String>) -> Overrides {
        let mut more = self.clone();
        more.0.push((key.to_string(), value.into()));
        more
    }

    /// The flags that would bring the same about in another process.
    pub fn as_flags(&self) -> impl Iterator<Item = String> + '_ {
        self.0.iter().map(|(key, value)| format!("--set={key}={value}"))
    }

    /// The settings in force: default, file, environment, and these.
    pub fn settings(&self) -> Result<Settings, Complaint> {
        let complain = |error| {
            Complaint::new(Exit::Usage, "The settings are not valid.")
                .because(&error)
                .try_this("`weft doctor` lists every setting with its value and where it came from")
        };
        let mut sources = Sources::of_process().map_err(complain)?;
        for (key, value) in &self.0 {
            sources = sources.set(key, value);
        }
        Settings::from_sources(&sources).map_err(complain)
    }

    /// For verbs that start and end peers themselves: no log, unless somebody has asked for one.
    pub fn without_log(&self) -> Result<Overrides, Complaint> {
        let settings = self.settings()?;
        let asked = settings
            .rows()
            .iter()
            .any(|(row, _, origin)| row.key == "log" && **origin != Origin::Default);
        Ok(if asked { self.clone() } else { self.with("log", "off") })
    }

    pub fn start(&self, name: &str) -> Result<Agent, Complaint> {
        let mut settings = self.settings()?;
        weft::observe::print_log(&settings.log)
            .or_complain(Exit::Usage, || "The log cannot be printed.".to_string())?;
        settings.name.get_or_insert_with(|| name.to_string());
        Agent::start(settings).map_err(|error| {
            explain(&error, "The agent could not be started.").try_this("`weft doctor` says what is missing")
        })
    }
}

/// Who allocated the memory, which decides how another process reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Allocation {
    /// By Weft: a peer on this machine maps it.
    Mapped,
    /// By somebody else: the kernel copies it between processes.
    Foreign,
    /// By Weft, on the first GPU: a peer on this machine maps it.
    #[value(skip)]
    Gpu,
}

pub fn acquire(agent: &Agent, bytes: u64, allocation: Allocation) -> Result<Memory, Complaint> {
    let len = usize::try_from(bytes).or_complain(Exit::Usage, || format!("{bytes} bytes do not fit this machine."))?;
    match allocation {
        Allocation::Mapped => agent.allocate(len),
        Allocation::Foreign => agent.register_vec(vec![0; len]),
        Allocation::Gpu => agent.allocate_device(0, bytes),
    }
    .map_err(|error| explain(&error, &format!("{} could not be had.", weft_plan::Bytes(bytes))))
}

/// Fills a whole region with a pattern.
pub fn fill(memory: &Memory, pattern: Pattern) {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut offset = 0;
    while offset < memory.len() {
        let part = &mut chunk[..(memory.len() - offset).min(CHUNK_BYTES as u64) as usize];
        pattern.fill(offset, part);
        memory.write(offset, part);
        offset += part.len() as u64;
    }
}

/// Compares, byte by byte, `here` of a region with what stands at `there` of a pattern. The first difference, as an offset here.
pub fn first_difference(memory: &Memory, here: &Spans, pattern: Pattern, there: &Spans) -> Option<u64> {
    let mut chunk = vec![0; CHUNK_BYTES];
    for (near, far, len) in weft_plan::spans::paired(here, there, 0..here.bytes()) {
        let mut done = 0;
        while done < len {
            let part = &mut chunk[..(len - done).min(CHUNK_BYTES as u64) as usize];
            memory.read(near + done, part);
            if let Some(at) = pattern.first_difference(far + done, part) {
                return Some(near + at - far);
            }
            done += part.len() as u64;
        }
    }
    None
}

/// How long verbs wait for a partner on this machine to answer.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A complaint about an error of the library, with the exit code and the advice that suit it.
pub fn explain(error: &Error, sentence: &str) -> Complaint {
    let (exit, remedy) = match error {
        Error::Settings(_) => (
            Exit::Usage,
            Some("`weft doctor` lists every setting and where its value came from"),
        ),
        Error::Secret(_) => (
            Exit::Usage,
            Some("set WEFT_SECRET, or WEFT_SECRET_FILE to a file that only you can read"),
        ),
        Error::Connect(ConnectError::NoSession { .. }) => (
            Exit::Refused,
            Some("both ends need the same secret (WEFT_SECRET) and the same version of Weft"),
        ),
        Error::Connect(_) => (
            Exit::Unreachable,
            Some("check the address, and that the other end is running"),
        ),
        Error::PeerLost { .. } => (Exit::Unreachable, None),
        Error::Transfer(failed) => match failed.cause() {
            Failure::PathLost { .. } | Failure::Expired => (Exit::Unreachable, None),
            Failure::Refused(_) => (Exit::Refused, None),
            Failure::ChecksumMismatch => (Exit::Differs, None),
            _ => (Exit::Failed, None),
        },
        Error::Refused { .. } => (Exit::Refused, None),
        Error::Transport { .. } => (Exit::Failed, Some("`weft doctor` says what the transport needs")),
        _ => (Exit::Failed, None),
    };
    let complaint = Complaint::new(exit, sentence).because(error);
    match remedy {
        Some(remedy) => complaint.try_this(remedy),
        None => complaint,
    }
}
