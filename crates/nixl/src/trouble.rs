//! What can go wrong, and which of NIXL's numbers says so. The text goes to standard error, because NIXL carries numbers only.

use thiserror::Error;
use weft::{Failure, PeerError, SubmitError};

use crate::abi::Status;

#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Trouble {
    #[error(transparent)]
    Weft(#[from] weft::Error),
    #[error("{0}")]
    Invalid(String),
    /// From an agent with another back end under the same name, or another version of this one.
    #[error("this is no {0} of a Weft back end of this version")]
    Foreign(&'static str),
    #[error("nothing is known of agent {0:?}: load its metadata first")]
    UnknownAgent(String),
    #[error("{len} bytes at {address:#x} are not registered by {agent}, or not known to be")]
    Unregistered { address: usize, len: usize, agent: String },
    #[error("agent {agent:?} has nothing published under {region:?} any more")]
    Stale { agent: String, region: String },
    #[error("the memory has been deregistered")]
    Deregistered,
    #[error("{messages} notifications to this agent itself wait to be taken, and there is no room for more")]
    Untaken { messages: usize },
    #[error("it is still under way")]
    UnderWay,
    #[error("it has not been posted")]
    NotPosted,
    #[error("{0} is not supported")]
    Unsupported(&'static str),
}

impl Trouble {
    pub fn status(&self) -> Status {
        match self {
            Trouble::Weft(error) => of(error),
            Trouble::Invalid(_) => Status::InvalidParam,
            Trouble::Foreign(_) => Status::Mismatch,
            Trouble::UnknownAgent(_) | Trouble::Unregistered { .. } => Status::NotFound,
            Trouble::Stale { .. } | Trouble::Deregistered => Status::NotAllowed,
            Trouble::Untaken { .. } => Status::Backend,
            Trouble::UnderWay => Status::RepostActive,
            Trouble::NotPosted => Status::NotPosted,
            Trouble::Unsupported(_) => Status::NotSupported,
        }
    }

    /// Tells whoever reads the log.
    pub fn log(&self, doing: &str) {
        log(Level::Error, &format!("{doing}: {self}"));
    }
}

fn of(error: &weft::Error) -> Status {
    match error {
        weft::Error::Transfer(failed) => match failed.cause() {
            // NIXL knows no deadlines: by one, too, the transfer was called off.
            Failure::Cancelled | Failure::Expired => Status::Canceled,
            Failure::Refused(_) => Status::NotAllowed,
            Failure::PathLost { .. } => Status::RemoteDisconnect,
            Failure::ChecksumMismatch => Status::Mismatch,
            _ => Status::Backend,
        },
        weft::Error::PeerLost { .. }
        | weft::Error::Connect(_)
        | weft::Error::NoSuchHost { .. }
        | weft::Error::TimedOut { .. }
        | weft::Error::Peer(PeerError::NotConnected | PeerError::Submit(SubmitError::PeerGone(_))) => {
            Status::RemoteDisconnect
        }
        weft::Error::Refused { .. } | weft::Error::Forked(_) => Status::NotAllowed,
        weft::Error::Leg(_) | weft::Error::Settings(_) | weft::Error::Peer(_) => Status::InvalidParam,
        weft::Error::Gpu(_) => Status::NotSupported,
        // Too much under way, memory that a frozen peer is inside of, files, threads.
        _ => Status::Backend,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Warning,
    Error,
}

/// As far as the level of NIXL's own log wants it.
pub fn log(level: Level, text: &str) {
    let least = match std::env::var("NIXL_LOG_LEVEL").as_deref() {
        Ok("FATAL") => return,
        Ok("ERROR") => Level::Error,
        _ => Level::Warning,
    };
    if level >= least {
        eprintln!("weft: {text}");
    }
}
