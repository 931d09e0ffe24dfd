//! Exceptions that mirror the Rust errors, fields included.

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use weft::{Failure, TransferFailed};

create_exception!(weft, Error, PyException, "What any call of Weft can raise.");
create_exception!(weft, TransferError, Error, "A transfer ended without success.");
create_exception!(weft, Expired, TransferError, "The deadline passed.");
create_exception!(weft, Cancelled, TransferError, "The caller cancelled it.");
create_exception!(weft, Refused, TransferError, "The target said no.");
create_exception!(
    weft,
    PathLost,
    TransferError,
    "The path was lost and there was no other."
);
create_exception!(
    weft,
    ChecksumMismatch,
    TransferError,
    "The bytes at the two ends differ."
);
create_exception!(weft, PeerLost, Error, "The session is over: connect again.");
create_exception!(weft, ConnectError, Error, "No session came about.");
create_exception!(weft, TimedOut, Error, "What was waited for did not happen in time.");
create_exception!(weft, Full, Error, "Too much is under way already: try again later.");
create_exception!(weft, InvalidCall, Error, "The call makes no sense as it is.");
create_exception!(weft, NotBorrowable, Error, "The region cannot be mapped.");
create_exception!(weft, LeaseEnded, Error, "The lease is over.");
create_exception!(weft, StillInUse, Error, "A peer is still inside the memory.");
create_exception!(
    weft,
    SettingsError,
    Error,
    "A setting is unknown or has a value that makes no sense."
);
create_exception!(
    weft,
    RendezvousError,
    Error,
    "The place where agents find each other failed."
);
create_exception!(weft, SystemError, Error, "The operating system refused something.");
create_exception!(weft, Stopped, Error, "The agent has been stopped.");

pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    macro_rules! add {
        ($($name:ident),*) => { $( module.add(stringify!($name), module.py().get_type::<$name>())?; )* };
    }
    add!(
        Error,
        TransferError,
        Expired,
        Cancelled,
        Refused,
        PathLost,
        ChecksumMismatch,
        PeerLost,
        ConnectError,
        TimedOut
    );
    add!(
        Full,
        InvalidCall,
        NotBorrowable,
        LeaseEnded,
        StillInUse,
        SettingsError,
        RendezvousError,
        SystemError,
        Stopped
    );
    Ok(())
}

/// The exception for an error.
pub fn raise(py: Python<'_>, error: &weft::Error) -> PyErr {
    let text = error.to_string();
    match error {
        weft::Error::Transfer(failed) => transfer_failed(py, failed, text),
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
        weft::Error::Connect(_) => ConnectError::new_err(text),
        weft::Error::TimedOut { .. } => TimedOut::new_err(text),
        weft::Error::Full(_) => Full::new_err(text),
        weft::Error::Leg(_) | weft::Error::Peer(_) | weft::Error::Region(_) | weft::Error::NoRendezvous { .. } => {
            InvalidCall::new_err(text)
        }
        weft::Error::NotBorrowable { .. } => NotBorrowable::new_err(text),
        weft::Error::LeaseEnded => LeaseEnded::new_err(text),
        weft::Error::StillInUse { .. } => StillInUse::new_err(text),
        weft::Error::Settings(_) | weft::Error::Secret(_) => SettingsError::new_err(text),
        weft::Error::Rendezvous(_) => RendezvousError::new_err(text),
        weft::Error::Stopped => Stopped::new_err(text),
        _ => SystemError::new_err(text),
    }
}

/// For arguments that are wrong before anything is asked of the agent.
pub fn invalid(text: impl Into<String>) -> PyErr {
    PyValueError::new_err(text.into())
}

fn transfer_failed(py: Python<'_>, failed: &TransferFailed, text: String) -> PyErr {
    let exception = match failed.cause() {
        Failure::Expired => Expired::new_err(text),
        Failure::Cancelled => Cancelled::new_err(text),
        Failure::Refused(_) => Refused::new_err(text),
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

/// Fields make an exception more useful; failing to set one must not hide it.
fn with(py: Python<'_>, exception: PyErr, set: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<()>) -> PyErr {
    let _ = set(exception.value(py));
    exception
}
