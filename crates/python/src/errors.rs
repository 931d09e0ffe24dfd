//! From the Rust errors to the exceptions of `weft/_errors.py`, fields included.

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::import_exception;
use pyo3::prelude::*;
use weft::hand_off::{CallError, HandOffError};
use weft::store::StoreError;
use weft::{AtomicFailed, Cause, CollectiveFailed, Failure, FileError, SealError, TransferFailed};

import_exception!(weft._errors, TransferError);
import_exception!(weft._errors, Expired);
import_exception!(weft._errors, Cancelled);
import_exception!(weft._errors, Refused);
import_exception!(weft._errors, TransferRefused);
import_exception!(weft._errors, PathLost);
import_exception!(weft._errors, ChecksumMismatch);
import_exception!(weft._errors, AtomicError);
import_exception!(weft._errors, AtomicRefused);
import_exception!(weft._errors, OutcomeUnknown);
import_exception!(weft._errors, PeerLost);
import_exception!(weft._errors, CollectiveError);
import_exception!(weft._errors, LeftOut);
import_exception!(weft._errors, NoQuorum);
import_exception!(weft._errors, ConnectError);
import_exception!(weft._errors, TimedOut);
import_exception!(weft._errors, Full);
import_exception!(weft._errors, InvalidCall);
import_exception!(weft._errors, GpuError);
import_exception!(weft._errors, OverCapacity);
import_exception!(weft._errors, NotBorrowable);
import_exception!(weft._errors, LeaseEnded);
import_exception!(weft._errors, StillInUse);
import_exception!(weft._errors, SettingsError);
import_exception!(weft._errors, RendezvousError);
import_exception!(weft._errors, OsFailure);
import_exception!(weft._errors, Stopped);
import_exception!(weft._errors, Forked);
import_exception!(weft._errors, NotBelieved);

/// The exception for an error.
pub fn raise(py: Python<'_>, error: &weft::Error) -> PyErr {
    let text = error.to_string();
    match error {
        weft::Error::Transfer(failed) => transfer_failed(py, failed, text),
        weft::Error::Atomic(failed) => atomic_failed(py, failed, text),
        weft::Error::PeerLost { peer, cause } => {
            let exception = PeerLost::new_err(text);
            with(py, exception, |value| {
                value.setattr("peer", peer)?;
                value.setattr("cause", cause.to_string())
            })
        }
        weft::Error::Refused { refusal, .. } => {
            let exception = Refused::new_err(text);
            with(py, exception, |value| value.setattr("cause", refusal.to_string()))
        }
        weft::Error::Collective(failed) => collective_failed(py, failed, text),
        weft::Error::LeftOut { .. } => LeftOut::new_err(text),
        weft::Error::NoQuorum { short, .. } => {
            let exception = NoQuorum::new_err(text);
            let missing: Vec<u32> = short.missing.iter().map(|rank| rank.0).collect();
            with(py, exception, |value| {
                value.setattr("missing", missing)?;
                value.setattr("needed", short.needed)
            })
        }
        weft::Error::Connect(_) | weft::Error::Formation(_) | weft::Error::DifferentPlatforms { .. } => {
            ConnectError::new_err(text)
        }
        weft::Error::TimedOut { .. } => TimedOut::new_err(text),
        weft::Error::Full(_) => Full::new_err(text),
        weft::Error::Leg(_)
        | weft::Error::Peer(_)
        | weft::Error::Region(_)
        | weft::Error::OtherAgent { .. }
        | weft::Error::Call(_)
        | weft::Error::NoRendezvous { .. } => InvalidCall::new_err(text),
        weft::Error::HandOff(error) => match **error {
            HandOffError::Ticket(error) => raise_unbelieved(py, error),
            HandOffError::Unreadable(_) => not_believed(py, text, "malformed"),
            HandOffError::ComeBefore => not_believed(py, text, "used"),
            HandOffError::Call(error) => {
                let cause = match error {
                    CallError::TooMany => "TooMany",
                    CallError::Used | CallError::Repeated => "Repeated",
                    _ => "Invalid",
                };
                with(py, InvalidCall::new_err(text), |value| value.setattr("cause", cause))
            }
            _ => InvalidCall::new_err(text),
        },
        weft::Error::Store(error) if !matches!(**error, StoreError::Io { .. }) => InvalidCall::new_err(text),
        weft::Error::Device { rank, cause, .. } => device_failed(py, *rank, *cause, text),
        weft::Error::Gpu(_) => GpuError::new_err(text),
        weft::Error::File(error) if !matches!(**error, FileError::Open { .. } | FileError::NoRoom { .. }) => {
            InvalidCall::new_err(text)
        }
        weft::Error::Object(error) if error.refusal().is_none() => InvalidCall::new_err(text),
        weft::Error::NotBorrowable { .. } => NotBorrowable::new_err(text),
        weft::Error::LeaseEnded => LeaseEnded::new_err(text),
        weft::Error::StillInUse { .. } => StillInUse::new_err(text),
        weft::Error::Settings(_)
        | weft::Error::Secret(_)
        | weft::Error::Platform { .. }
        | weft::Error::Placement(_) => SettingsError::new_err(text),
        weft::Error::Rendezvous(_) => RendezvousError::new_err(text),
        weft::Error::Stopped => Stopped::new_err(text),
        weft::Error::Interrupted => PyKeyboardInterrupt::new_err(text),
        weft::Error::Forked(_) => Forked::new_err(text),
        other => match other.os_error() {
            Some(number) => OsFailure::new_err((number, text)),
            None => OsFailure::new_err(text),
        },
    }
}

/// The same where a fork is all that can be the matter.
pub fn forked(error: weft::fork::Forked) -> PyErr {
    Forked::new_err(error.to_string())
}

/// For arguments that are wrong before anything is asked of the agent.
pub fn invalid(text: impl Into<String>) -> PyErr {
    InvalidCall::new_err(text.into())
}

/// For sealed words that nobody should act on.
pub fn raise_unbelieved(py: Python<'_>, error: SealError) -> PyErr {
    let reason = match error {
        SealError::Forged => "forged",
        SealError::Expired => "expired",
        SealError::AboutAnother => "about another",
        // Too long, too short, or of a version that is not known.
        _ => "malformed",
    };
    not_believed(py, error.to_string(), reason)
}

fn not_believed(py: Python<'_>, text: String, reason: &str) -> PyErr {
    let exception = NotBelieved::new_err(text);
    with(py, exception, |value| value.setattr("reason", reason))
}

fn transfer_failed(py: Python<'_>, failed: &TransferFailed, text: String) -> PyErr {
    let exception = match failed.cause() {
        Failure::Expired => Expired::new_err(text),
        Failure::Cancelled => Cancelled::new_err(text),
        Failure::Refused(_) => TransferRefused::new_err(text),
        Failure::PathLost { .. } => PathLost::new_err(text),
        Failure::ChecksumMismatch => ChecksumMismatch::new_err(text),
        _ => TransferError::new_err(text),
    };
    let error = &failed.error;
    let done: Vec<_> = error
        .done
        .iter()
        .map(|(leg, range)| (*leg, range.start, range.end))
        .collect();
    let undone: Vec<_> = error
        .undone
        .iter()
        .map(|(leg, range)| (*leg, range.start, range.end))
        .collect();
    with(py, exception, |value| {
        value.setattr("peer", &failed.peer)?;
        value.setattr("transport", error.transport)?;
        value.setattr("cause", error.cause.to_string())?;
        value.setattr("bytes_done", error.bytes_done)?;
        value.setattr("bytes_total", error.bytes_total)?;
        value.setattr("done", done)?;
        value.setattr("undone", undone)
    })
}

fn atomic_failed(py: Python<'_>, failed: &AtomicFailed, text: String) -> PyErr {
    let error = &failed.error;
    let exception = match error.cause {
        _ if error.may_have_happened => OutcomeUnknown::new_err(text),
        Failure::Refused(_) => AtomicRefused::new_err(text),
        _ => AtomicError::new_err(text),
    };
    with(py, exception, |value| {
        value.setattr("peer", &failed.peer)?;
        value.setattr("transport", error.transport)?;
        value.setattr("cause", error.cause.to_string())?;
        value.setattr("may_have_happened", error.may_have_happened)
    })
}

fn collective_failed(py: Python<'_>, failed: &CollectiveFailed, text: String) -> PyErr {
    let exception = CollectiveError::new_err(text);
    let cause = match failed.cause() {
        Cause::Lost => "lost",
        Cause::WrongCall => "wrong call",
        Cause::Late => "late",
        Cause::Withdrew => "withdrew",
        _ => "broken",
    };
    with(py, exception, |value| {
        value.setattr("rank", failed.blamed().0)?;
        value.setattr("cause", cause)?;
        value.setattr("step", failed.abort.step)?;
        value.setattr("called", failed.called.map(|called| called.to_string()))?;
        let others = failed.others.iter();
        let others: Vec<(u32, String)> = others.map(|(rank, status)| (rank.0, status.call.to_string())).collect();
        value.setattr("others", others)
    })
}

/// A call between GPUs that was wrong from the beginning is the caller's; what has failed is the group's.
fn device_failed(py: Python<'_>, rank: Option<weft::Rank>, cause: weft::DeviceCause, text: String) -> PyErr {
    let cause = match cause {
        weft::DeviceCause::Lost => "lost",
        weft::DeviceCause::Late => "late",
        weft::DeviceCause::Withdrew => "withdrew",
        weft::DeviceCause::Refused => return invalid(text),
    };
    with(py, CollectiveError::new_err(text), |value| {
        value.setattr("rank", rank.map(|rank| rank.0))?;
        value.setattr("cause", cause)?;
        value.setattr("step", 0)?;
        value.setattr("called", py.None())?;
        value.setattr("others", Vec::<(u32, String)>::new())
    })
}

/// Tokens for which a rank had no room.
pub fn over_capacity(py: Python<'_>, text: String, rank: usize, needed: u64, capacity: u64) -> PyErr {
    with(py, OverCapacity::new_err(text), |value| {
        value.setattr("rank", rank)?;
        value.setattr("needed", needed)?;
        value.setattr("capacity", capacity)
    })
}

/// Fields make an exception more useful; failing to set one must not hide it.
fn with(py: Python<'_>, exception: PyErr, set: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<()>) -> PyErr {
    let _ = set(exception.value(py));
    exception
}
