//! A call under way.

use std::time::Instant;

use pyo3::prelude::*;

use crate::asyncio::{Outcome, future_of};
use crate::errors::{TimedOut, raise};
use crate::memory::duration;
use crate::transfer::SIGNAL_CHECK;

/// A call under way. It goes on by itself; dropping it does not end it. `await pending` waits for its end.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Pending {
    pub inner: weft::Pending,
}

#[pymethods]
impl Pending {
    /// Waits for the end, which comes at the deadline at the latest; with `timeout`, no longer than that.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let end = timeout
            .map(duration)
            .transpose()?
            .and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = end.map_or(SIGNAL_CHECK, |end| end.saturating_duration_since(Instant::now()));
            if let Some(outcome) = py.detach(|| self.inner.wait_for(left.min(SIGNAL_CHECK))) {
                return outcome.map_err(|error| raise(py, &error));
            }
            py.check_signals()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(TimedOut::new_err("the call is still under way"));
            }
        }
    }

    /// Whether it has ended well; `False` while it is under way. Raises if it failed.
    fn poll(&self, py: Python<'_>) -> PyResult<bool> {
        match py.detach(|| self.inner.poll()) {
            Some(outcome) => outcome.map(|()| true).map_err(|error| raise(py, &error)),
            None => Ok(false),
        }
    }

    /// Whether it has ended, one way or the other.
    #[getter]
    fn done(&self) -> bool {
        self.inner.is_ended()
    }

    fn __await__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let pending = self.inner.clone();
        let ended = async move {
            let outcome = pending.await;
            let give: Outcome = Box::new(move |py| match outcome {
                Ok(()) => Ok(py.None()),
                Err(error) => Err(raise(py, &error)),
            });
            give
        };
        future_of(py, ended)?.call_method0("__await__")
    }

    fn __repr__(&self) -> &'static str {
        if self.inner.is_ended() {
            "<weft.Pending, ended>"
        } else {
            "<weft.Pending, under way>"
        }
    }
}
