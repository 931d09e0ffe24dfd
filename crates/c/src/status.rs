//! The numbers that functions return. Those of the header, and held against it.

use std::ffi::{CStr, c_char};

use weft::{Failure, PeerError, RegionError, SessionError, SubmitError};

macro_rules! statuses {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        /// What a function returns.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(i32)]
        pub enum Status { $($name = $number),* }

        /// By number and name.
        pub const ALL: &[(i32, &CStr)] = &[$(($number, $text)),*];
    };
}

statuses! {
    Ok = 0, c"WEFT_OK";
    Pending = 1, c"WEFT_PENDING";
    None = 2, c"WEFT_NONE";
    InvalidArgument = -1, c"WEFT_ERROR_INVALID_ARGUMENT";
    Version = -2, c"WEFT_ERROR_VERSION";
    Settings = -3, c"WEFT_ERROR_SETTINGS";
    Name = -4, c"WEFT_ERROR_NAME";
    Refused = -5, c"WEFT_ERROR_REFUSED";
    Gpu = -6, c"WEFT_ERROR_GPU";
    Forked = -7, c"WEFT_ERROR_FORKED";
    Full = -20, c"WEFT_ERROR_FULL";
    TimedOut = -21, c"WEFT_ERROR_TIMED_OUT";
    Expired = -22, c"WEFT_ERROR_EXPIRED";
    Cancelled = -23, c"WEFT_ERROR_CANCELLED";
    StillInUse = -24, c"WEFT_ERROR_STILL_IN_USE";
    Checksum = -25, c"WEFT_ERROR_CHECKSUM";
    Connect = -40, c"WEFT_ERROR_CONNECT";
    PeerLost = -41, c"WEFT_ERROR_PEER_LOST";
    UnknownOutcome = -42, c"WEFT_ERROR_UNKNOWN_OUTCOME";
    Rendezvous = -43, c"WEFT_ERROR_RENDEZVOUS";
    Collective = -60, c"WEFT_ERROR_COLLECTIVE";
    NoQuorum = -61, c"WEFT_ERROR_NO_QUORUM";
    System = -80, c"WEFT_ERROR_SYSTEM";
    Stopped = -81, c"WEFT_ERROR_STOPPED";
    Panic = -82, c"WEFT_ERROR_PANIC";
}

/// A status as C hands it in: any number.
pub type StatusNumber = i32;

impl From<()> for Status {
    fn from((): ()) -> Status {
        Status::Ok
    }
}

impl Status {
    pub fn of(error: &weft::Error) -> Status {
        match error {
            weft::Error::Transfer(failed) => Status::of_failure(failed.cause()),
            weft::Error::Atomic(failed) if failed.error.may_have_happened => Status::UnknownOutcome,
            weft::Error::Atomic(failed) => Status::of_failure(failed.cause()),
            weft::Error::PeerLost { .. } => Status::PeerLost,
            weft::Error::Refused { .. } => Status::Refused,
            weft::Error::Collective(_) => Status::Collective,
            weft::Error::LeftOut { .. } | weft::Error::NoQuorum { .. } => Status::NoQuorum,
            weft::Error::Connect(_)
            | weft::Error::NoSuchHost { .. }
            | weft::Error::Formation(_)
            | weft::Error::DifferentPlatforms { .. } => Status::Connect,
            weft::Error::TimedOut { .. } => Status::TimedOut,
            weft::Error::Full(_) => Status::Full,
            weft::Error::Peer(error) => Status::of_peer(error),
            weft::Error::Region(error) => match error {
                RegionError::NotPublished { .. } | RegionError::NameTaken { .. } => Status::Name,
                RegionError::NotRegistered(_) => Status::Refused,
                RegionError::Unpublishable {
                    error: SessionError::TooManyRegions,
                    ..
                } => Status::Full,
                _ => Status::InvalidArgument,
            },
            weft::Error::Leg(_) | weft::Error::OtherAgent { .. } | weft::Error::Call(_) => Status::InvalidArgument,
            weft::Error::Gpu(_) => Status::Gpu,
            weft::Error::StillInUse { .. } => Status::StillInUse,
            weft::Error::Settings(_)
            | weft::Error::Secret(_)
            | weft::Error::Platform { .. }
            | weft::Error::Placement(_) => Status::Settings,
            weft::Error::Rendezvous(_) | weft::Error::NoRendezvous { .. } => Status::Rendezvous,
            weft::Error::Stopped => Status::Stopped,
            weft::Error::Forked(_) => Status::Forked,
            // Memory, transports, files, threads.
            _ => Status::System,
        }
    }

    fn of_failure(failure: Failure) -> Status {
        match failure {
            Failure::Cancelled => Status::Cancelled,
            Failure::Expired => Status::Expired,
            Failure::Refused(_) => Status::Refused,
            Failure::PathLost { .. } => Status::PeerLost,
            Failure::ChecksumMismatch => Status::Checksum,
            Failure::Unanswered => Status::UnknownOutcome,
            _ => Status::System,
        }
    }

    fn of_peer(error: &PeerError) -> Status {
        match error {
            PeerError::NotConnected | PeerError::Submit(SubmitError::PeerGone(_)) => Status::PeerLost,
            PeerError::Submit(SubmitError::TooManyAnnounced) | PeerError::Session(SessionError::TooManyHeld) => {
                Status::Full
            }
            _ => Status::InvalidArgument,
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn weft_status_name(status: StatusNumber) -> *const c_char {
    let known = ALL.iter().find(|(number, _)| *number == status);
    known.map_or(c"an unknown status", |(_, name)| name).as_ptr()
}
