//! Transfers under way, and how they ended.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::asyncio::{Outcome, future_of};
use crate::errors::{TimedOut, raise};
use crate::memory::duration;

/// How often a wait looks whether the user has pressed Ctrl-C.
pub const SIGNAL_CHECK: Duration = Duration::from_millis(100);

/// A transfer under way. It goes on by itself; dropping it does not end it.
///
/// `await transfer` gives its summary. Cancelling whoever awaits it does not cancel the transfer: `cancel` does.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Transfer {
    pub inner: weft::Transfer,
}

/// How a transfer that succeeded went.
#[derive(Debug)]
#[pyclass(frozen, get_all, module = "weft")]
pub struct Summary {
    /// How many bytes were moved.
    pub bytes: u64,
    /// In how many operations.
    pub parts: u32,
    /// How many of them had to be repeated.
    pub retries: u32,
    /// From the post to the end.
    pub seconds: f64,
    /// The transport that carried most of it.
    pub transport: &'static str,
}

#[pymethods]
impl Transfer {
    /// Waits for the end, which comes at the deadline at the latest; with `timeout`, no longer than that.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Summary> {
        let end = timeout
            .map(duration)
            .transpose()?
            .and_then(|timeout| Instant::now().checked_add(timeout));
        // What is small has ended when it was posted: then nobody else has to be let run.
        if self.inner.is_ended()
            && let Some(outcome) = self.inner.poll()
        {
            return finished(py, outcome);
        }
        loop {
            let left = end.map_or(SIGNAL_CHECK, |end| end.saturating_duration_since(Instant::now()));
            if let Some(outcome) = py.detach(|| self.inner.wait_for(left.min(SIGNAL_CHECK))) {
                return finished(py, outcome);
            }
            py.check_signals()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(TimedOut::new_err("the transfer is still under way"));
            }
        }
    }

    /// The summary, or `None` while it is under way. Raises if the transfer failed.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Summary>> {
        py.detach(|| self.inner.poll())
            .map(|outcome| finished(py, outcome))
            .transpose()
    }

    /// Whether it has ended, one way or the other.
    #[getter]
    fn done(&self) -> bool {
        self.inner.is_ended()
    }

    /// Ends it early. Its memory is free for other use once `wait` returns.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.inner.cancel());
    }

    fn __await__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let transfer = self.inner.clone();
        let ended = async move {
            let outcome = transfer.await;
            let give: Outcome = Box::new(move |py| Ok(Py::new(py, finished(py, outcome)?)?.into_any()));
            give
        };
        future_of(py, ended)?.call_method0("__await__")
    }

    fn __repr__(&self) -> &'static str {
        if self.inner.is_ended() {
            "<weft.Transfer, ended>"
        } else {
            "<weft.Transfer, under way>"
        }
    }
}

#[pymethods]
impl Summary {
    fn __repr__(&self) -> String {
        format!(
            "<weft.Summary, {} bytes over {} in {:.6} s>",
            self.bytes, self.transport, self.seconds
        )
    }
}

fn finished(py: Python<'_>, outcome: Result<weft::Summary, weft::Error>) -> PyResult<Summary> {
    let summary = outcome.map_err(|error| raise(py, &error))?;
    Ok(Summary {
        bytes: summary.bytes,
        parts: summary.parts,
        retries: summary.retries,
        seconds: summary.ended.saturating_sub(summary.started).as_secs_f64(),
        transport: summary.transport(),
    })
}
