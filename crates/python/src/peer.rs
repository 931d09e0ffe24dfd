//! A connected agent: its regions, transfers with it, notifications to it.

use std::ffi::c_int;
use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use weft::Direction;

use crate::errors::{LeaseEnded, invalid, raise};
use crate::memory::{Memory, duration, export};
use crate::spans;
use crate::transfer::Transfer;

/// A connected agent.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Peer {
    pub inner: weft::Peer,
}

/// A region that a peer has published.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Region {
    inner: weft::Remote,
}

/// A checked transfer that can be posted again and again.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Prepared {
    inner: weft::Prepared,
}

/// A peer's region, mapped read-only, for as long as its lease.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Borrowed {
    inner: weft::Borrowed,
}

/// The keywords that every transfer takes.
#[derive(Default)]
struct Wishes<'py> {
    local_spans: Option<Bound<'py, PyAny>>,
    deadline: Option<Duration>,
    checksum: Option<bool>,
    notify: Option<Vec<u8>>,
}

impl<'py> Wishes<'py> {
    fn parse(keywords: Option<&Bound<'py, PyDict>>) -> PyResult<Wishes<'py>> {
        let mut wishes = Wishes::default();
        for (key, value) in keywords.into_iter().flatten() {
            let given = !value.is_none();
            match key.extract::<&str>()? {
                "local_spans" => wishes.local_spans = given.then_some(value),
                "deadline" => wishes.deadline = given.then(|| duration(value.extract()?)).transpose()?,
                "checksum" => wishes.checksum = given.then(|| value.extract()).transpose()?,
                "notify" => wishes.notify = given.then(|| value.extract()).transpose()?,
                other => return Err(PyTypeError::new_err(format!("a transfer takes no keyword {other:?}"))),
            }
        }
        Ok(wishes)
    }
}

impl Peer {
    fn describe(
        &self,
        direction: Direction,
        local: &Bound<'_, Memory>,
        remote: &Region,
        spans: Option<&Bound<'_, PyAny>>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<weft::Prepared> {
        let py = local.py();
        let local = local.get();
        let wishes = Wishes::parse(keywords)?;
        if direction == Direction::Read && !local.writable {
            return Err(invalid("this memory is read-only, so nothing can be read into it"));
        }
        let mut described = match direction {
            Direction::Read => self.inner.read(&local.inner, &remote.inner),
            Direction::Write => self.inner.write(&local.inner, &remote.inner),
        };
        let (there, here) = (spans::parse(spans)?, spans::parse(wishes.local_spans.as_ref())?);
        // What is said of one side holds for both, unless the other is described too.
        match (here, there) {
            (Some(here), Some(there)) => described = described.spans(here, there),
            (Some(both), None) | (None, Some(both)) => described = described.spans(both.clone(), both),
            (None, None) => {}
        }
        if let Some(deadline) = wishes.deadline {
            described = described.deadline(deadline);
        }
        if let Some(on) = wishes.checksum {
            described = described.checksum(on);
        }
        if let Some(payload) = &wishes.notify {
            described = described.notify(payload);
        }
        py.detach(|| described.prepare()).map_err(|error| raise(py, &error))
    }
}

fn post(keep: &Bound<'_, PyAny>, prepared: &weft::Prepared) -> PyResult<Transfer> {
    let py = keep.py();
    let inner = py.detach(|| prepared.post()).map_err(|error| raise(py, &error))?;
    Ok(Transfer {
        inner,
        keep: keep.clone().unbind(),
    })
}

#[pymethods]
impl Peer {
    /// From the remote region into local memory.
    #[pyo3(signature = (local, remote, spans = None, **keywords))]
    fn read(
        &self,
        local: &Bound<'_, Memory>,
        remote: &Region,
        spans: Option<&Bound<'_, PyAny>>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Transfer> {
        post(
            local.as_any(),
            &self.describe(Direction::Read, local, remote, spans, keywords)?,
        )
    }

    /// The same as `read`, checked now and posted later, as often as wanted.
    #[pyo3(signature = (local, remote, spans = None, **keywords))]
    fn prepare_read(
        &self,
        local: &Bound<'_, Memory>,
        remote: &Region,
        spans: Option<&Bound<'_, PyAny>>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Prepared> {
        Ok(Prepared {
            inner: self.describe(Direction::Read, local, remote, spans, keywords)?,
        })
    }

    /// From local memory into the remote region.
    #[pyo3(signature = (local, remote, spans = None, **keywords))]
    fn write(
        &self,
        local: &Bound<'_, Memory>,
        remote: &Region,
        spans: Option<&Bound<'_, PyAny>>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Transfer> {
        post(
            local.as_any(),
            &self.describe(Direction::Write, local, remote, spans, keywords)?,
        )
    }

    /// The same as `write`, checked now and posted later, as often as wanted.
    #[pyo3(signature = (local, remote, spans = None, **keywords))]
    fn prepare_write(
        &self,
        local: &Bound<'_, Memory>,
        remote: &Region,
        spans: Option<&Bound<'_, PyAny>>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Prepared> {
        Ok(Prepared {
            inner: self.describe(Direction::Write, local, remote, spans, keywords)?,
        })
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn connected(&self, py: Python<'_>) -> bool {
        py.detach(|| self.inner.is_connected())
    }

    /// The transports that carry transfers to this peer now.
    #[getter]
    fn transports(&self, py: Python<'_>) -> Vec<&'static str> {
        py.detach(|| self.inner.transports())
    }

    /// The names that the peer has published so far.
    #[getter]
    fn region_names(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.inner.region_names())
    }

    /// A region by the name that the peer publishes it under, waiting for that if need be.
    #[pyo3(signature = (name, timeout = 10.0))]
    fn region(&self, py: Python<'_>, name: &str, timeout: f64) -> PyResult<Region> {
        let timeout = duration(timeout)?;
        let inner = py
            .detach(|| self.inner.region(name, timeout))
            .map_err(|error| raise(py, &error))?;
        Ok(Region { inner })
    }

    #[pyo3(signature = (name, timeout = 10.0))]
    fn region_async<'py>(slf: &Bound<'py, Self>, name: &str, timeout: f64) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("asyncio")?
            .call_method1("to_thread", (slf.getattr("region")?, name, timeout))
    }

    /// Sends a notification, which arrives once.
    fn notify(&self, py: Python<'_>, payload: &[u8]) -> PyResult<()> {
        py.detach(|| self.inner.notify(payload))
            .map_err(|error| raise(py, &error))
    }

    /// Maps a region of a peer on this host, for `lease` seconds. Nothing is copied.
    #[pyo3(signature = (remote, lease = 60.0))]
    fn borrow(&self, py: Python<'_>, remote: &Region, lease: f64) -> PyResult<Borrowed> {
        let lease = duration(lease)?;
        let inner = py
            .detach(|| self.inner.borrow(&remote.inner, lease))
            .map_err(|error| raise(py, &error))?;
        Ok(Borrowed { inner })
    }

    /// Ends the session. Transfers under way end with an error.
    fn disconnect(&self, py: Python<'_>) {
        py.detach(|| self.inner.disconnect());
    }

    fn __repr__(&self) -> String {
        format!("<weft.Peer {:?}>", self.inner.name())
    }
}

#[pymethods]
impl Region {
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.len()
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.inner.len())?)
    }

    fn __repr__(&self) -> String {
        format!("<weft.Region {:?}, {} bytes>", self.inner.name(), self.inner.len())
    }
}

#[pymethods]
impl Prepared {
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }

    /// Starts the transfer.
    fn post(slf: &Bound<'_, Self>) -> PyResult<Transfer> {
        post(slf.as_any(), &slf.get().inner)
    }
}

#[pymethods]
impl Borrowed {
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.len()
    }

    /// Whether the lease still holds.
    #[getter]
    fn held(&self, py: Python<'_>) -> bool {
        py.detach(|| self.inner.remaining()).is_some()
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.inner.len())?)
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// The lease ends with the last reference; here nothing is forced, because views may still be out.
    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {}

    /// # Safety
    /// Called by Python with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let borrowed = slf.get();
        if slf.py().detach(|| borrowed.inner.remaining()).is_none() {
            return Err(LeaseEnded::new_err("the lease is over"));
        }
        let exported = (borrowed.inner.as_ptr().cast_mut(), borrowed.inner.len(), true);
        // SAFETY: the pages stay mapped while the object lives, and the view, which is read-only, keeps it alive.
        unsafe { export(slf.as_any(), exported, view, flags) }
    }
}
