//! A connected agent: its regions, transfers with it, notifications to it.

use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use weft::{Direction, Spans};

use crate::asyncio::in_thread;
use crate::atomic;
use crate::borrow::Borrowed;
use crate::errors::{invalid, raise};
use crate::memory::{Memory, duration, within};
use crate::spans;
use crate::transfer::Transfer;

/// A connected agent.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Peer {
    pub inner: weft::Peer,
    /// The agent's, for calls that name none.
    pub deadline: Duration,
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

/// One pair of regions, and which bytes of them.
struct Leg<'py> {
    local: Bound<'py, Memory>,
    remote: Bound<'py, Region>,
    here: Spans,
    there: Spans,
}

impl<'py> Leg<'py> {
    fn new(
        (local, local_spans): (Bound<'py, Memory>, Option<&Bound<'py, PyAny>>),
        (remote, remote_spans): (Bound<'py, Region>, Option<&Bound<'py, PyAny>>),
    ) -> PyResult<Leg<'py>> {
        // What is said of one side holds for both, unless the other is described too.
        let (here, there) = match (spans::parse(local_spans)?, spans::parse(remote_spans)?) {
            (Some(here), Some(there)) => (here, there),
            (Some(both), None) | (None, Some(both)) => (both.clone(), both),
            (None, None) => {
                let all = Spans::contiguous(0, local.get().inner.len().min(remote.get().inner.len()));
                (all.clone(), all)
            }
        };
        Ok(Leg {
            local,
            remote,
            here,
            there,
        })
    }
}

type LegTuple<'py> = (
    Bound<'py, Memory>,
    Bound<'py, PyAny>,
    Bound<'py, Region>,
    Bound<'py, PyAny>,
);

impl Peer {
    /// What has no error of its own raises this one in a forked child.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.check_process().map_err(|error| raise(py, &error))
    }

    fn one<'py>(
        &self,
        direction: Direction,
        local: &Bound<'py, Memory>,
        remote: &Bound<'py, Region>,
        spans: Option<&Bound<'py, PyAny>>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Prepared> {
        let wishes = Wishes::parse(keywords)?;
        let here = (local.clone(), wishes.local_spans.as_ref());
        let leg = Leg::new(here, (remote.clone(), spans))?;
        self.prepared(local.py(), direction, &[leg], &wishes)
    }

    fn many<'py>(
        &self,
        direction: &str,
        legs: &Bound<'py, PyAny>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Prepared> {
        let direction = match direction {
            "read" => Direction::Read,
            "write" => Direction::Write,
            other => {
                return Err(invalid(format!(
                    "a transfer is a \"read\" or a \"write\", not a {other:?}"
                )));
            }
        };
        let wishes = Wishes::parse(keywords)?;
        if wishes.local_spans.is_some() {
            return Err(PyTypeError::new_err(
                "each leg has its local spans, so there is no such keyword",
            ));
        }
        let mut parsed = Vec::new();
        for leg in legs.try_iter()? {
            let (local, here, remote, there) = leg?.extract::<LegTuple<'py>>().map_err(|_| {
                invalid("a leg is a tuple of a Memory, its spans or None, a Region, and its spans or None")
            })?;
            parsed.push(Leg::new((local, Some(&here)), (remote, Some(&there)))?);
        }
        if parsed.is_empty() {
            return Err(invalid("a transfer has at least one leg"));
        }
        self.prepared(legs.py(), direction, &parsed, &wishes)
    }

    fn prepared(
        &self,
        py: Python<'_>,
        direction: Direction,
        legs: &[Leg<'_>],
        wishes: &Wishes<'_>,
    ) -> PyResult<Prepared> {
        let mut described = self.inner.transfer(direction);
        for leg in legs {
            let (local, remote) = (leg.local.get(), leg.remote.get());
            if direction == Direction::Read && !local.writable {
                return Err(invalid("this memory is read-only, so nothing can be read into it"));
            }
            described = described.leg(&local.inner, leg.here.clone(), &remote.inner, leg.there.clone());
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
        let inner = py.detach(|| described.prepare()).map_err(|error| raise(py, &error))?;
        Ok(Prepared { inner })
    }
}

#[pymethods]
impl Peer {
    /// From the remote region into local memory.
    #[pyo3(signature = (local, remote, spans = None, **keywords))]
    fn read<'py>(
        &self,
        local: &Bound<'py, Memory>,
        remote: &Bound<'py, Region>,
        spans: Option<&Bound<'py, PyAny>>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Transfer> {
        self.one(Direction::Read, local, remote, spans, keywords)?
            .post(local.py())
    }

    /// The same as `read`, checked now and posted later, as often as wanted.
    #[pyo3(signature = (local, remote, spans = None, **keywords))]
    fn prepare_read<'py>(
        &self,
        local: &Bound<'py, Memory>,
        remote: &Bound<'py, Region>,
        spans: Option<&Bound<'py, PyAny>>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Prepared> {
        self.one(Direction::Read, local, remote, spans, keywords)
    }

    /// From local memory into the remote region.
    #[pyo3(signature = (local, remote, spans = None, **keywords))]
    fn write<'py>(
        &self,
        local: &Bound<'py, Memory>,
        remote: &Bound<'py, Region>,
        spans: Option<&Bound<'py, PyAny>>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Transfer> {
        self.one(Direction::Write, local, remote, spans, keywords)?
            .post(local.py())
    }

    /// The same as `write`, checked now and posted later, as often as wanted.
    #[pyo3(signature = (local, remote, spans = None, **keywords))]
    fn prepare_write<'py>(
        &self,
        local: &Bound<'py, Memory>,
        remote: &Bound<'py, Region>,
        spans: Option<&Bound<'py, PyAny>>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Prepared> {
        self.one(Direction::Write, local, remote, spans, keywords)
    }

    /// A transfer of several legs, each a tuple of a memory, its spans, a region, and its spans.
    #[pyo3(signature = (direction, legs, **keywords))]
    fn transfer<'py>(
        &self,
        direction: &str,
        legs: &Bound<'py, PyAny>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Transfer> {
        self.many(direction, legs, keywords)?.post(legs.py())
    }

    /// The same as `transfer`, checked now and posted later, as often as wanted.
    #[pyo3(signature = (direction, legs, **keywords))]
    fn prepare_transfer<'py>(
        &self,
        direction: &str,
        legs: &Bound<'py, PyAny>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Prepared> {
        self.many(direction, legs, keywords)
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn connected(&self, py: Python<'_>) -> PyResult<bool> {
        self.check(py)?;
        Ok(py.detach(|| self.inner.is_connected()))
    }

    /// The transports that carry transfers to this peer now.
    #[getter]
    fn transports(&self, py: Python<'_>) -> PyResult<Vec<&'static str>> {
        self.check(py)?;
        Ok(py.detach(|| self.inner.transports()))
    }

    /// Waits until transfers can go over `transport`.
    #[pyo3(signature = (transport, timeout = None))]
    fn wait_for_transport(&self, py: Python<'_>, transport: &str, timeout: Option<f64>) -> PyResult<()> {
        let timeout = within(timeout, self.deadline)?;
        py.detach(|| self.inner.wait_for_transport(transport, timeout))
            .map_err(|error| raise(py, &error))
    }

    /// The names that the peer has published so far.
    #[getter]
    fn region_names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.check(py)?;
        Ok(py.detach(|| self.inner.region_names()))
    }

    /// A region by the name that the peer publishes it under, waiting for that if need be.
    #[pyo3(signature = (name, timeout = None))]
    fn region(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<Region> {
        let timeout = within(timeout, self.deadline)?;
        let inner = py
            .detach(|| self.inner.region(name, timeout))
            .map_err(|error| raise(py, &error))?;
        Ok(Region { inner })
    }

    #[pyo3(signature = (name, timeout = None))]
    fn region_async<'py>(slf: &Bound<'py, Self>, name: &str, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        in_thread(slf, "region", name, timeout)
    }

    /// Adds to a word of the remote region and gives what it held.
    #[pyo3(signature = (remote, offset, value, *, deadline = None))]
    fn fetch_add(
        &self,
        py: Python<'_>,
        remote: &Region,
        offset: u64,
        value: u64,
        deadline: Option<f64>,
    ) -> PyResult<u64> {
        let deadline = deadline.map(duration).transpose()?;
        atomic::wait(py, self.inner.fetch_add(&remote.inner, offset, value), deadline)
    }

    /// The same, for `await`.
    #[pyo3(signature = (remote, offset, value, *, deadline = None))]
    fn fetch_add_async<'py>(
        &self,
        py: Python<'py>,
        remote: &Region,
        offset: u64,
        value: u64,
        deadline: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let deadline = deadline.map(duration).transpose()?;
        atomic::awaited(py, self.inner.fetch_add(&remote.inner, offset, value), deadline)
    }

    /// Stores `new` in a word of the remote region if it is `expected`, and gives what it held.
    #[pyo3(signature = (remote, offset, expected, new, *, deadline = None))]
    fn compare_swap(
        &self,
        py: Python<'_>,
        remote: &Region,
        offset: u64,
        expected: u64,
        new: u64,
        deadline: Option<f64>,
    ) -> PyResult<u64> {
        let deadline = deadline.map(duration).transpose()?;
        let described = self.inner.compare_swap(&remote.inner, offset, expected, new);
        atomic::wait(py, described, deadline)
    }

    /// The same, for `await`.
    #[pyo3(signature = (remote, offset, expected, new, *, deadline = None))]
    fn compare_swap_async<'py>(
        &self,
        py: Python<'py>,
        remote: &Region,
        offset: u64,
        expected: u64,
        new: u64,
        deadline: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let deadline = deadline.map(duration).transpose()?;
        let described = self.inner.compare_swap(&remote.inner, offset, expected, new);
        atomic::awaited(py, described, deadline)
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
        Ok(Borrowed::new(inner))
    }

    #[pyo3(signature = (remote, lease = 60.0))]
    fn borrow_async<'py>(
        slf: &Bound<'py, Self>,
        remote: &Bound<'py, Region>,
        lease: f64,
    ) -> PyResult<Bound<'py, PyAny>> {
        in_thread(slf, "borrow", remote, Some(lease))
    }

    /// Ends the session. Transfers under way end with an error.
    fn disconnect(&self, py: Python<'_>) -> PyResult<()> {
        self.check(py)?;
        py.detach(|| self.inner.disconnect());
        Ok(())
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

    /// Whether this agent may read it.
    #[getter]
    fn readable(&self) -> bool {
        self.inner.region().access.read
    }

    /// Whether this agent may write to it.
    #[getter]
    fn writable(&self) -> bool {
        self.inner.region().access.write
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
    fn post(&self, py: Python<'_>) -> PyResult<Transfer> {
        let inner = py.detach(|| self.inner.post()).map_err(|error| raise(py, &error))?;
        Ok(Transfer { inner })
    }
}
