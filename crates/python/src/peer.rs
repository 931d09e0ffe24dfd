//! A connected agent: its regions, transfers with it, notifications to it.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use weft::{Direction, Spans};

use crate::asyncio::in_thread;
use crate::atomic;
use crate::borrow::Borrowed;
use crate::errors::{invalid, raise};
use crate::memory::{Memory, after_stream, duration, within};
use crate::spans;
use crate::transfer::Transfer;
use crate::waiting::waiting;

/// A connected agent: one session with one life of it. When that ends, connect again.
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

/// What every transfer can be told.
struct Wishes {
    deadline: Option<Duration>,
    checksum: Option<bool>,
    notify: Option<Vec<u8>>,
    after: Option<Arc<dyn weft::Ready>>,
}

impl Wishes {
    fn new(deadline: Option<f64>, checksum: Option<bool>, notify: Option<Vec<u8>>) -> PyResult<Wishes> {
        Ok(Wishes {
            deadline: deadline.map(duration).transpose()?,
            checksum,
            notify,
            after: None,
        })
    }

    fn after(self, after: Option<Arc<dyn weft::Ready>>) -> Wishes {
        Wishes { after, ..self }
    }
}

/// One pair of regions, and which bytes of them.
struct Leg<'py> {
    local: Bound<'py, Memory>,
    remote: Bound<'py, Region>,
    /// Here and there; all of both where nothing is said.
    spans: Option<(Spans, Spans)>,
}

impl<'py> Leg<'py> {
    fn new(
        (local, local_spans): (Bound<'py, Memory>, Option<&Bound<'py, PyAny>>),
        (remote, remote_spans): (Bound<'py, Region>, Option<&Bound<'py, PyAny>>),
    ) -> PyResult<Leg<'py>> {
        // What is said of one side holds for both, unless the other is described too.
        let spans = match (spans::parse(local_spans)?, spans::parse(remote_spans)?) {
            (Some(here), Some(there)) => Some((here, there)),
            (Some(both), None) | (None, Some(both)) => Some((both.clone(), both)),
            (None, None) => None,
        };
        Ok(Leg { local, remote, spans })
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

    fn posted<'py>(
        &self,
        direction: Direction,
        (local, local_spans): (&Bound<'py, Memory>, Option<&Bound<'py, PyAny>>),
        (remote, spans): (&Bound<'py, Region>, Option<&Bound<'py, PyAny>>),
        wishes: Wishes,
    ) -> PyResult<Transfer> {
        let mut leg = [Leg::new((local.clone(), local_spans), (remote.clone(), spans))?];
        let described = self.described(direction, &mut leg, wishes)?;
        posted(local.py(), described)
    }

    fn prepared<'py>(
        &self,
        direction: Direction,
        (local, local_spans): (&Bound<'py, Memory>, Option<&Bound<'py, PyAny>>),
        (remote, spans): (&Bound<'py, Region>, Option<&Bound<'py, PyAny>>),
        wishes: Wishes,
    ) -> PyResult<Prepared> {
        let mut leg = [Leg::new((local.clone(), local_spans), (remote.clone(), spans))?];
        let described = self.described(direction, &mut leg, wishes)?;
        prepared(local.py(), described)
    }

    /// Describes what `direction` and legs say, or raises what is wrong with them.
    fn described<'a>(
        &'a self,
        direction: Direction,
        legs: &'a mut [Leg<'_>],
        wishes: Wishes,
    ) -> PyResult<weft::TransferBuilder<'a>> {
        let mut described = self.inner.transfer(direction);
        for Leg { local, remote, spans } in legs {
            let (local, remote) = (local.get(), remote.get());
            if direction == Direction::Read && !local.writable {
                return Err(invalid("this memory is read-only, so nothing can be read into it"));
            }
            described = match spans.take() {
                Some((here, there)) => described.leg(&local.inner, here, &remote.inner, there),
                None => described.whole_leg(&local.inner, &remote.inner),
            };
        }
        let Wishes {
            deadline,
            checksum,
            notify,
            after,
        } = wishes;
        if let Some(deadline) = deadline {
            described = described.deadline(deadline);
        }
        if let Some(after) = after {
            described = described.after(after);
        }
        if let Some(on) = checksum {
            described = described.checksum(on);
        }
        if let Some(payload) = &notify {
            described = described.notify(payload);
        }
        Ok(described)
    }
}

/// A list of legs, as Python gives it.
struct Legs<'py> {
    direction: Direction,
    legs: Vec<Leg<'py>>,
}

impl<'py> Legs<'py> {
    fn of(direction: &str, legs: &Bound<'py, PyAny>) -> PyResult<Legs<'py>> {
        let direction = match direction {
            "read" => Direction::Read,
            "write" => Direction::Write,
            other => {
                return Err(invalid(format!(
                    "a transfer is a \"read\" or a \"write\", not a {other:?}"
                )));
            }
        };
        let mut parsed = Vec::new();
        for leg in legs.try_iter()? {
            let (local, here, remote, there) = leg?.extract::<LegTuple<'_>>().map_err(|_| {
                invalid("a leg is a tuple of a Memory, its spans or None, a Region, and its spans or None")
            })?;
            parsed.push(Leg::new((local, Some(&here)), (remote, Some(&there)))?);
        }
        if parsed.is_empty() {
            return Err(invalid("a transfer has at least one leg"));
        }
        Ok(Legs {
            direction,
            legs: parsed,
        })
    }
}

fn prepared(py: Python<'_>, described: weft::TransferBuilder<'_>) -> PyResult<Prepared> {
    let inner = py.detach(|| described.prepare()).map_err(|error| raise(py, &error))?;
    Ok(Prepared { inner })
}

/// What is small is copied here and now, while other threads of Python run.
fn posted(py: Python<'_>, described: weft::TransferBuilder<'_>) -> PyResult<Transfer> {
    let inner = py.detach(|| described.post()).map_err(|error| raise(py, &error))?;
    Ok(Transfer { inner })
}

#[pymethods]
impl Peer {
    /// From the remote region into local memory.
    ///
    /// `spans` says which bytes of the remote region, `local_spans` which of the local memory; what is said of one side holds for both
    /// unless the other is described too. Where nothing is said of either, all of both is meant, and sizes that differ raise `InvalidCall`.
    /// `notify` is delivered to the peer after the bytes are in place. With a `stream` of the GPU that the local memory is of, it begins after what is on the
    /// stream now.
    #[pyo3(signature = (local, remote, spans = None, *, local_spans = None, deadline = None, checksum = None, notify = None, stream = None))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn read<'py>(
        &self,
        local: &Bound<'py, Memory>,
        remote: &Bound<'py, Region>,
        spans: Option<&Bound<'py, PyAny>>,
        local_spans: Option<&Bound<'py, PyAny>>,
        deadline: Option<f64>,
        checksum: Option<bool>,
        notify: Option<Vec<u8>>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Transfer> {
        let wishes = Wishes::new(deadline, checksum, notify)?.after(after_stream(stream, local.get())?);
        self.posted(Direction::Read, (local, local_spans), (remote, spans), wishes)
    }

    /// The same as `read`, checked now and posted later, as often as wanted.
    #[pyo3(signature = (local, remote, spans = None, *, local_spans = None, deadline = None, checksum = None, notify = None))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn prepare_read<'py>(
        &self,
        local: &Bound<'py, Memory>,
        remote: &Bound<'py, Region>,
        spans: Option<&Bound<'py, PyAny>>,
        local_spans: Option<&Bound<'py, PyAny>>,
        deadline: Option<f64>,
        checksum: Option<bool>,
        notify: Option<Vec<u8>>,
    ) -> PyResult<Prepared> {
        let wishes = Wishes::new(deadline, checksum, notify)?;
        self.prepared(Direction::Read, (local, local_spans), (remote, spans), wishes)
    }

    /// From local memory into the remote region.
    ///
    /// `spans` says which bytes of the remote region, `local_spans` which of the local memory; what is said of one side holds for both
    /// unless the other is described too. Where nothing is said of either, all of both is meant, and sizes that differ raise `InvalidCall`.
    /// `notify` is delivered to the peer after the bytes are in place. With a `stream` of the GPU that the local memory is of, it begins after what is on the
    /// stream now.
    #[pyo3(signature = (local, remote, spans = None, *, local_spans = None, deadline = None, checksum = None, notify = None, stream = None))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn write<'py>(
        &self,
        local: &Bound<'py, Memory>,
        remote: &Bound<'py, Region>,
        spans: Option<&Bound<'py, PyAny>>,
        local_spans: Option<&Bound<'py, PyAny>>,
        deadline: Option<f64>,
        checksum: Option<bool>,
        notify: Option<Vec<u8>>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Transfer> {
        let wishes = Wishes::new(deadline, checksum, notify)?.after(after_stream(stream, local.get())?);
        self.posted(Direction::Write, (local, local_spans), (remote, spans), wishes)
    }

    /// The same as `write`, checked now and posted later, as often as wanted.
    #[pyo3(signature = (local, remote, spans = None, *, local_spans = None, deadline = None, checksum = None, notify = None))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn prepare_write<'py>(
        &self,
        local: &Bound<'py, Memory>,
        remote: &Bound<'py, Region>,
        spans: Option<&Bound<'py, PyAny>>,
        local_spans: Option<&Bound<'py, PyAny>>,
        deadline: Option<f64>,
        checksum: Option<bool>,
        notify: Option<Vec<u8>>,
    ) -> PyResult<Prepared> {
        let wishes = Wishes::new(deadline, checksum, notify)?;
        self.prepared(Direction::Write, (local, local_spans), (remote, spans), wishes)
    }

    /// A transfer of several legs, one region a layer, say: each a tuple of a memory, its spans, a region, and its spans.
    #[pyo3(signature = (direction, legs, *, deadline = None, checksum = None, notify = None))]
    fn transfer(
        &self,
        direction: &str,
        legs: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        checksum: Option<bool>,
        notify: Option<Vec<u8>>,
    ) -> PyResult<Transfer> {
        let wishes = Wishes::new(deadline, checksum, notify)?;
        let mut given = Legs::of(direction, legs)?;
        posted(legs.py(), self.described(given.direction, &mut given.legs, wishes)?)
    }

    /// The same as `transfer`, checked now and posted later, as often as wanted.
    #[pyo3(signature = (direction, legs, *, deadline = None, checksum = None, notify = None))]
    fn prepare_transfer(
        &self,
        direction: &str,
        legs: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        checksum: Option<bool>,
        notify: Option<Vec<u8>>,
    ) -> PyResult<Prepared> {
        let wishes = Wishes::new(deadline, checksum, notify)?;
        let mut given = Legs::of(direction, legs)?;
        prepared(legs.py(), self.described(given.direction, &mut given.legs, wishes)?)
    }

    /// The name of the agent at the other end.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// Whether the session still lives.
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
        waiting(py, || self.inner.wait_for_transport(transport, timeout))
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
        let inner = waiting(py, || self.inner.region(name, timeout))?;
        Ok(Region { inner })
    }

    /// The same as `region`, for `await`.
    #[pyo3(signature = (name, timeout = None))]
    fn region_async<'py>(&self, py: Python<'py>, name: String, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let timeout = within(timeout, self.deadline)?;
        let peer = self.inner.clone();
        in_thread(py, move || peer.region(&name, timeout), |inner| Region { inner })
    }

    /// Adds to the word at `offset` of the remote region, wrapping around, and gives what it held.
    ///
    /// A word is eight bytes, little-endian, at a multiple of eight, in a region published with `read=True, write=True`. The operation is
    /// atomic with all others on the word, whatever way they come, and with the owner's; not with transfers.
    ///
    /// It is carried out once or not at all. `OutcomeUnknown` says that it was sent and that nobody knows which.
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

    /// The same, for `await`. It is posted by the call; cancelling the wait does not take it back.
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

    /// Stores `new` in the word at `offset` of the remote region if it is `expected`, and gives what it held: `expected` means that it was
    /// stored. Otherwise as `fetch_add`.
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
        let inner = waiting(py, || self.inner.borrow(&remote.inner, lease))?;
        Ok(Borrowed::new(inner))
    }

    /// The same as `borrow`, for `await`.
    #[pyo3(signature = (remote, lease = 60.0))]
    fn borrow_async<'py>(&self, py: Python<'py>, remote: &Region, lease: f64) -> PyResult<Bound<'py, PyAny>> {
        let lease = duration(lease)?;
        let (peer, remote) = (self.inner.clone(), remote.inner.clone());
        in_thread(py, move || peer.borrow(&remote, lease), Borrowed::new)
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
    /// What it is published as.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// How many bytes it has.
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
    /// How many bytes each post moves.
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
