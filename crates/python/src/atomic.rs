//! Atomic operations on a peer's words: called and waited for, or awaited.

use std::time::Duration;

use pyo3::prelude::*;

use crate::asyncio::{Outcome, future_of};
use crate::errors::raise;
use crate::transfer::SIGNAL_CHECK;

/// Posts an operation and waits for what the word held before.
pub fn wait(py: Python<'_>, described: weft::AtomicBuilder<'_>, deadline: Option<Duration>) -> PyResult<u64> {
    let operation = post(py, described, deadline)?;
    loop {
        if let Some(outcome) = py.detach(|| operation.wait_for(SIGNAL_CHECK)) {
            return outcome.map_err(|error| raise(py, &error));
        }
        py.check_signals()?;
    }
}

/// Posts an operation and gives an awaitable of what the word held before.
pub fn awaited<'py>(
    py: Python<'py>,
    described: weft::AtomicBuilder<'_>,
    deadline: Option<Duration>,
) -> PyResult<Bound<'py, PyAny>> {
    let operation = post(py, described, deadline)?;
    let ended = async move {
        let outcome = operation.await;
        let give: Outcome = Box::new(move |py| {
            let before = outcome.map_err(|error| raise(py, &error))?;
            Ok(before.into_pyobject(py)?.into_any().unbind())
        });
        give
    };
    future_of(py, ended)
}

fn post(
    py: Python<'_>,
    described: weft::AtomicBuilder<'_>,
    deadline: Option<Duration>,
) -> PyResult<weft::AtomicOperation> {
    let described = match deadline {
        Some(deadline) => described.deadline(deadline),
        None => described,
    };
    py.detach(|| described.post()).map_err(|error| raise(py, &error))
}
