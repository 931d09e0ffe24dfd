//! What the Python module `weft.nixl` stands on: an agent of NIXL's kind, its descriptors and its transfers.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use weft::Direction;
use weft_nixl::stand_in::{Asked, Bytes, Side, StandIn};
use weft_nixl::{OFFERED, Segment, Stage, Status, Trouble};

use crate::spans::Array;
use crate::waiting::waiting_for;

/// An agent of NIXL's kind.
#[derive(Debug)]
#[pyclass(frozen, module = "weft", name = "_NixlAgent")]
pub struct NixlAgent {
    inner: Option<StandIn>,
}

/// Descriptors with the registrations that they lie in.
#[derive(Debug)]
#[pyclass(frozen, module = "weft", name = "_NixlSide")]
pub struct NixlSide {
    inner: Side,
}

/// A transfer that was asked for.
#[derive(Debug)]
#[pyclass(frozen, module = "weft", name = "_NixlRequest")]
pub struct NixlRequest {
    inner: Mutex<State>,
}

#[derive(Debug)]
struct State {
    asked: Asked,
    /// When it was last posted, and how long that call took.
    posted: Option<(Duration, Duration)>,
    /// The first look at it after its end, from the post on.
    seen: Option<(Instant, Option<Duration>)>,
}

impl Drop for NixlAgent {
    fn drop(&mut self) {
        let inner = self.inner.take();
        // Closing waits for its threads. An interpreter that is going away takes it along.
        let _ = Python::try_attach(|py| {
            py.detach(|| {
                if let Some(agent) = &inner {
                    agent.close();
                }
            });
        });
    }
}

impl NixlAgent {
    fn agent(&self) -> &StandIn {
        self.inner
            .as_ref()
            .expect("it is taken when it is dropped, and not before")
    }
}

#[pymethods]
impl NixlAgent {
    #[new]
    fn new(py: Python<'_>, name: &str, kind: &str, parameters: Vec<(String, String)>) -> PyResult<NixlAgent> {
        let inner = told(py, || StandIn::start(name, kind, parameters))?;
        Ok(NixlAgent { inner: Some(inner) })
    }

    /// The parameters that are offered.
    #[staticmethod]
    fn offered() -> Vec<&'static str> {
        OFFERED.to_vec()
    }

    /// Whether memory of devices can be registered here.
    #[staticmethod]
    fn has_devices(py: Python<'_>) -> bool {
        py.detach(StandIn::has_devices)
    }

    /// Registers memory, which the caller vouches for until it is deregistered.
    fn register(&self, py: Python<'_>, kind: u8, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let list = rows_of(kind, rows, 3)?;
        // SAFETY: whoever registers addresses keeps the bytes there until they are deregistered; NIXL's API asks the same.
        told(py, || unsafe { self.agent().register(&list) })
    }

    fn deregister(&self, py: Python<'_>, kind: u8, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let list = rows_of(kind, rows, 3)?;
        told(py, || self.agent().deregister(&list))
    }

    /// What other agents have to know of this one; of some of its memory only, where that is said.
    #[pyo3(signature = (part = None, with_connection = true))]
    fn introduction<'py>(
        &self,
        py: Python<'py>,
        part: Option<(u8, Bound<'_, PyAny>)>,
        with_connection: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = match part {
            None => py.detach(|| self.agent().introduction()),
            Some((kind, rows)) => {
                let list = rows_of(kind, &rows, 3)?;
                told(py, || self.agent().part_of_introduction(&list, with_connection))?
            }
        };
        Ok(PyBytes::new(py, &bytes))
    }

    /// Learns of another agent, and tells its name.
    fn meet(&self, py: Python<'_>, introduction: &[u8]) -> PyResult<String> {
        told(py, || self.agent().meet(introduction))
    }

    fn forget(&self, py: Python<'_>, agent: &str) -> PyResult<()> {
        told(py, || self.agent().forget(agent))
    }

    fn knows(&self, agent: &str, kind: u8, rows: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.agent().knows(agent, &rows_of(kind, rows, 3)?))
    }

    fn connect(&self, py: Python<'_>, agent: &str) -> PyResult<()> {
        told(py, || self.agent().connect(agent))
    }

    /// Looks up where descriptors lie. With five columns a row is so many blocks at a stride.
    #[pyo3(signature = (agent, kind, rows, columns = 3))]
    fn side(
        &self,
        py: Python<'_>,
        agent: Option<&str>,
        kind: u8,
        rows: &Bound<'_, PyAny>,
        columns: usize,
    ) -> PyResult<NixlSide> {
        let list = rows_of(kind, rows, columns)?;
        let inner = told(py, || self.agent().side(agent, list.into_iter()))?;
        Ok(NixlSide { inner })
    }

    /// Prepares a transfer. Without indices, it is of all descriptors.
    #[pyo3(signature = (write, here, here_indices, there, there_indices, notification = None))]
    #[expect(clippy::too_many_arguments, reason = "one call of Python's")]
    fn ask(
        &self,
        py: Python<'_>,
        write: bool,
        here: &NixlSide,
        here_indices: Option<&Bound<'_, PyAny>>,
        there: &NixlSide,
        there_indices: Option<&Bound<'_, PyAny>>,
        notification: Option<Vec<u8>>,
    ) -> PyResult<NixlRequest> {
        let direction = if write { Direction::Write } else { Direction::Read };
        let here_rows = indices(here_indices, &here.inner)?;
        let there_rows = indices(there_indices, &there.inner)?;
        let asked = told(py, || {
            let (here, there) = ((&here.inner, &here_rows[..]), (&there.inner, &there_rows[..]));
            self.agent().ask(direction, here, there, notification)
        })?;
        let state = State {
            asked,
            posted: None,
            seen: None,
        };
        Ok(NixlRequest {
            inner: Mutex::new(state),
        })
    }

    /// Whether it has ended by the time of the return.
    #[pyo3(signature = (request, notification = None))]
    fn post(&self, py: Python<'_>, request: &NixlRequest, notification: Option<Vec<u8>>) -> PyResult<bool> {
        told(py, || {
            let mut state = request.lock();
            let (began, start) = (Instant::now(), since_the_epoch());
            let stage = self.agent().post(&mut state.asked, notification)?;
            state.posted = Some((start, began.elapsed()));
            state.seen = Some((began, None));
            Ok(state.look(stage))
        })
    }

    /// Whether it has ended.
    fn check(&self, py: Python<'_>, request: &NixlRequest) -> PyResult<bool> {
        told(py, || {
            let mut state = request.lock();
            let stage = self.agent().check(&state.asked)?;
            Ok(state.look(stage))
        })
    }

    fn notify(&self, py: Python<'_>, agent: &str, message: &[u8]) -> PyResult<()> {
        told(py, || self.agent().notify(agent, message))
    }

    /// All that has been told since, with who told it.
    fn notifications<'py>(&self, py: Python<'py>) -> Vec<(String, Bound<'py, PyBytes>)> {
        let told = py.detach(|| self.agent().notifications());
        let told = told.into_iter();
        told.map(|(agent, message)| (agent, PyBytes::new(py, &message)))
            .collect()
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.agent().close());
    }
}

#[pymethods]
impl NixlSide {
    fn __len__(&self) -> usize {
        self.inner.len()
    }
}

#[pymethods]
impl NixlRequest {
    /// Calls it off, if it is under way. Afterwards nobody touches its memory.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        told(py, || self.lock().asked.end())
    }

    /// In microseconds: when it was posted, how long that call took, how long all of it; then its bytes, and its descriptors. None before its end.
    fn telemetry(&self, py: Python<'_>) -> Option<(u64, u64, u64, u64, usize)> {
        // Whoever has the lock may be waiting, and look for signals meanwhile, for which it needs Python.
        py.detach(|| self.lock().telemetry())
    }
}

impl NixlRequest {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn telemetry(&self) -> Option<(u64, u64, u64, u64, usize)> {
        let (start, posting) = self.posted?;
        let ended = self.seen?.1?;
        // Nothing takes no time at all, and the end is not before the post has returned.
        let whole = |time: Duration| time.as_micros().max(1) as u64;
        let took = self.asked.took().filter(|took| !took.is_zero()).unwrap_or(ended);
        let (bytes, descriptors) = (self.asked.bytes, self.asked.descriptors);
        Some((
            whole(start),
            whole(posting),
            whole(took.max(posting)),
            bytes,
            descriptors,
        ))
    }

    fn look(&mut self, stage: Stage) -> bool {
        if stage == Stage::Done
            && let Some((began, ended @ None)) = &mut self.seen
        {
            *ended = Some(began.elapsed());
        }
        stage == Stage::Done
    }
}

fn since_the_epoch() -> Duration {
    let now = std::time::SystemTime::now();
    now.duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

/// Does something that may wait, and raises NIXL's exception for what goes wrong.
fn told<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, Trouble> + Send) -> PyResult<T> {
    waiting_for(py, work)?.map_err(|trouble| raise(py, &trouble))
}

fn raise(py: Python<'_>, trouble: &Trouble) -> PyErr {
    let (class, number) = match trouble.status() {
        Status::NotPosted => ("nixlNotPostedError", "NOT_POSTED"),
        Status::InvalidParam => ("nixlInvalidParamError", "INVALID_PARAM"),
        Status::NotFound => ("nixlNotFoundError", "NOT_FOUND"),
        Status::Mismatch => ("nixlMismatchError", "MISMATCH"),
        Status::NotAllowed => ("nixlNotAllowedError", "NOT_ALLOWED"),
        Status::RepostActive => ("nixlRepostActiveError", "REPOST_ACTIVE"),
        Status::NotSupported => ("nixlNotSupportedError", "NOT_SUPPORTED"),
        Status::RemoteDisconnect => ("nixlRemoteDisconnectError", "REMOTE_DISCONNECT"),
        Status::Canceled => ("nixlCancelledError", "CANCELED"),
        Status::Unknown => ("nixlUnknownError", "UNKNOWN"),
        Status::Backend | Status::InProgress | Status::Success => ("nixlBackendError", "BACKEND"),
    };
    let text = PyString::new(py, &format!("NIXL_ERR_{number}: {trouble}"));
    let made = py
        .import("weft.nixl._bindings")
        .and_then(|module| module.getattr(class)?.call1((text,)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// Rows of an address, a length and a device; and where there are five columns, a stride and a count.
fn rows_of(kind: u8, rows: &Bound<'_, PyAny>, columns: usize) -> PyResult<Vec<Bytes>> {
    let wrong = || PyValueError::new_err(format!("descriptors are rows of {columns} whole numbers"));
    let numbers = match Array::of(rows, "descriptors are whole numbers from 0 on")? {
        Some(array) => array.numbers,
        // Without a row there is no address that could be looked at.
        None if rows.len().is_ok_and(|rows| rows == 0) => Vec::new(),
        None => return Err(wrong()),
    };
    if !matches!(columns, 3 | 5) || numbers.len() % columns != 0 {
        return Err(wrong());
    }
    let mut list = Vec::new();
    for row in numbers.chunks_exact(columns) {
        let segment = match kind {
            0 => Segment::Host,
            1 => Segment::Device(row[2]),
            _ => return Err(wrong()),
        };
        let (stride, count) = if columns == 5 { (row[3], row[4]) } else { (0, 1) };
        if list.len() as u64 + count.min(ROWS_MAX) > ROWS_MAX || count > ROWS_MAX {
            return Err(PyValueError::new_err(format!("more than {ROWS_MAX} descriptors")));
        }
        for block in 0..count {
            let address = block.checked_mul(stride).and_then(|offset| row[0].checked_add(offset));
            let address = address.ok_or_else(|| PyValueError::new_err("descriptors that begin past 2^64"))?;
            list.push(Bytes {
                segment,
                address: address as usize,
                len: row[1] as usize,
            });
        }
    }
    Ok(list)
}

/// As many as a side may have.
const ROWS_MAX: u64 = 1 << 24;

fn indices(given: Option<&Bound<'_, PyAny>>, side: &Side) -> PyResult<Vec<u64>> {
    let Some(given) = given else {
        return Ok((0..side.len() as u64).collect());
    };
    const EXPECTED: &str = "the indices of descriptors are whole numbers from 0 on";
    match Array::of(given, EXPECTED)? {
        Some(array) if array.shape.len() == 1 => Ok(array.numbers),
        Some(_) => Err(PyValueError::new_err(EXPECTED)),
        None => given.extract(),
    }
}
