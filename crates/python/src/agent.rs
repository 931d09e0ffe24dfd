//! The agent.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyTuple};
use weft::settings::TABLE;
use weft::{Access, BucketOptions, Direct, FileOptions, HostMemory, ObjectOptions};

use crate::asyncio::in_thread;
use crate::errors::{invalid, raise};
use crate::inbox::{Inbox, NextNotification, Notification};
use crate::memory::{Memory, after_stream, duration, of_object, within};
use crate::peer::Peer;
use crate::spans;
use crate::transfer::{SIGNAL_CHECK, Transfer};
use crate::waiting::waiting;

/// Registers memory, publishes it, connects to other agents and moves bytes.
///
/// Keywords are settings, with an underscore for the dot: `tcp_connections=2`. One that does not exist raises `SettingsError`, which
/// names the nearest one that does.
///
/// A timeout, in seconds, that is not given is the setting `deadline`.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Agent {
    inbox: Arc<Inbox>,
}

impl Agent {
    pub fn live(&self) -> PyResult<weft::Agent> {
        self.inbox.agent()
    }
}

impl Agent {
    /// Starts an agent as it is described, with settings as Python's keywords give them.
    pub fn start(
        py: Python<'_>,
        mut builder: weft::AgentBuilder,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Agent> {
        for (key, value) in settings.into_iter().flatten() {
            let (key, value) = setting(key.extract()?, &value)?;
            builder = builder.set(&key, value);
        }
        let agent = waiting(py, || builder.start())?;
        // The setting `log` was checked with the others, but its own grammar only the log knows.
        weft::observe::print_log(&agent.settings().log).map_err(|error| raise(py, &error.into()))?;
        Ok(Agent {
            inbox: Arc::new(Inbox::new(agent)),
        })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It ends with its last handle: a communicator may still need it. An interpreter that is going away takes it along.
        let _ = Python::try_attach(|py| py.detach(|| drop(self.inbox.take())));
    }
}

#[pymethods]
impl Agent {
    #[new]
    #[pyo3(signature = (name, *, listen = None, secret = None, **settings))]
    fn new(
        py: Python<'_>,
        name: &str,
        listen: Option<&str>,
        secret: Option<&str>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Agent> {
        let mut builder = weft::Agent::builder(name);
        if let Some(listen) = listen {
            builder = builder.listen(listen);
        }
        if let Some(secret) = secret {
            builder = builder.secret(secret);
        }
        Agent::start(py, builder, settings)
    }

    /// Its name, as peers know it.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.live()?.name().to_owned())
    }

    /// Which life of the agent this is: a later one of the same name has a larger number.
    #[getter]
    fn epoch(&self) -> PyResult<u64> {
        Ok(self.live()?.epoch().0)
    }

    /// The settings in force, as text, by their keys. A secret stays hidden.
    #[getter]
    fn settings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let settings = PyDict::new(py);
        for (row, value, _) in self.live()?.settings().rows() {
            settings.set_item(row.key, value)?;
        }
        Ok(settings)
    }

    /// Where other agents reach this one, as one string for `connect`.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<String> {
        let agent = self.live()?;
        Ok(py.detach(|| agent.address()))
    }

    /// The peers that are connected now, whoever came to whom.
    #[getter]
    fn peers(&self, py: Python<'_>) -> PyResult<Vec<Peer>> {
        let agent = self.live()?;
        let deadline = agent.settings().deadline;
        let peers = py.detach(|| agent.peers()).into_iter();
        Ok(peers.map(|inner| Peer { inner, deadline }).collect())
    }

    /// The metrics as Prometheus reads them; empty unless `metrics_listen` is set.
    #[getter]
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let agent = self.live()?;
        Ok(py.detach(|| agent.metrics()))
    }

    /// Memory that Weft allocates: zeroed, and mapped by peers on this host instead of copied through the kernel.
    #[pyo3(signature = (nbytes, *, device = None))]
    fn allocate(&self, py: Python<'_>, nbytes: usize, device: Option<u16>) -> PyResult<Memory> {
        let agent = self.live()?;
        let allocate = || match device {
            Some(ordinal) => agent.allocate_device(ordinal, nbytes as u64),
            None => agent.allocate(nbytes),
        };
        let inner = py.detach(allocate).map_err(|error| raise(py, &error))?;
        Ok(Memory {
            inner,
            writable: true,
            deadline: agent.settings().deadline,
        })
    }

    /// Registers the memory of anything with the buffer protocol, DLPack or `__cuda_array_interface__`, of the host or of a GPU, without copying it. The
    /// object is kept alive.
    #[pyo3(signature = (object, writable = true))]
    fn register(&self, py: Python<'_>, object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Memory> {
        let agent = self.live()?;
        let shared = of_object(object, writable)?;
        if shared.len == 0 {
            return Err(invalid("there is no memory to register"));
        }
        if let Some(ordinal) = shared.device {
            let (address, len, owner) = (shared.start as u64, shared.len as u64, Box::new(shared.owner));
            let register = || {
                let device = weft::Device::open(ordinal)?;
                // SAFETY: the owner keeps the memory allocated until it is dropped, which the agent does last.
                let memory = unsafe { weft::DeviceMemory::foreign(&device, address, len, owner) }?;
                agent.register_device(memory)
            };
            let inner = py.detach(register).map_err(|error| raise(py, &error))?;
            return Ok(Memory {
                inner,
                writable,
                deadline: agent.settings().deadline,
            });
        }
        // SAFETY: the owner keeps the memory where it is until it is dropped, which the agent does last. Python objects hand
        // their memory out to many at once, so nobody holds a Rust reference to it.
        let host = unsafe { HostMemory::from_raw(shared.start, shared.len, Box::new(shared.owner)) };
        let inner = py.detach(|| agent.register(host)).map_err(|error| raise(py, &error))?;
        Ok(Memory {
            inner,
            writable,
            deadline: agent.settings().deadline,
        })
    }

    /// Opens a file or a block device as a place: `copy` moves bytes between it and memory, and nobody else waits meanwhile. With `size`, a file that is not
    /// there, or is shorter, is made that long; `direct` says whether it goes past the page cache, by itself where the file system can. With `replace` a new
    /// file is written, which takes the name when a copy with `commit` has ended.
    #[pyo3(signature = (path, size = None, *, write = true, direct = None, sparse = false, replace = false, staged = false))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn open_file(
        &self,
        py: Python<'_>,
        path: PathBuf,
        size: Option<u64>,
        write: bool,
        direct: Option<bool>,
        sparse: bool,
        replace: bool,
        staged: bool,
    ) -> PyResult<Memory> {
        let agent = self.live()?;
        let direct = match direct {
            None => Direct::Auto,
            Some(true) => Direct::On,
            Some(false) => Direct::Off,
        };
        let options = size.map_or_else(FileOptions::default, FileOptions::sized);
        let options = options.write(write).direct(direct).sparse(sparse);
        let options = options.replace(replace).staged(staged);
        let inner = py
            .detach(|| agent.open_file(path, options))
            .map_err(|error| raise(py, &error))?;
        Ok(Memory {
            inner,
            writable: write,
            deadline: agent.settings().deadline,
        })
    }

    /// Opens an object, `s3://BUCKET/NAME`, as a place: `copy` moves bytes between it and memory. Without `size` the server is asked how large it is. What is
    /// copied to it becomes the object by a copy with `commit`, as a whole. Who serves the bucket say `endpoint` and `region`, else the settings `object_endpoint` and
    /// `object_region`, else the environment (`AWS_…`), which has the credentials too.
    #[pyo3(signature = (url, size = None, *, write = true, part_bytes = None, endpoint = None, region = None))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn open_object(
        &self,
        py: Python<'_>,
        url: &str,
        size: Option<u64>,
        write: bool,
        part_bytes: Option<u64>,
        endpoint: Option<String>,
        region: Option<String>,
    ) -> PyResult<Memory> {
        let agent = self.live()?;
        let mut options = size
            .map_or_else(ObjectOptions::default, ObjectOptions::sized)
            .write(write);
        if let Some(bytes) = part_bytes {
            options = options.part_bytes(bytes);
        }
        let mut with = BucketOptions::default();
        (with.endpoint, with.region) = (endpoint, region);
        let inner = py
            .detach(|| agent.open_object_at(url, with, options))
            .map_err(|error| raise(py, &error))?;
        Ok(Memory {
            inner,
            writable: write,
            deadline: agent.settings().deadline,
        })
    }

    /// Copies between two places of this agent, memory of the host or a GPU, files or objects: an ordinary transfer, on a `stream` after what is there now. With
    /// `commit`, what is written lasts when it has ended: the file has its name, and the object is there.
    #[pyo3(signature = (source, target, *, source_spans = None, target_spans = None, deadline = None, checksum = None, stream = None, commit = false))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn copy(
        &self,
        py: Python<'_>,
        source: &Memory,
        target: &Memory,
        source_spans: Option<&Bound<'_, PyAny>>,
        target_spans: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        checksum: Option<bool>,
        stream: Option<&Bound<'_, PyAny>>,
        commit: bool,
    ) -> PyResult<Transfer> {
        if !target.writable {
            return Err(invalid("this memory is read-only, so nothing can be copied into it"));
        }
        let on_device = if source.inner.device_address().is_some() {
            source
        } else {
            target
        };
        let after = after_stream(stream, on_device)?;
        let mut described = self
            .live()?
            .copy(&source.inner, &target.inner)
            .map_err(|error| raise(py, &error))?;
        match (spans::parse(source_spans)?, spans::parse(target_spans)?) {
            (Some(from), Some(to)) => described = described.spans(from, to),
            (Some(both), None) | (None, Some(both)) => described = described.spans(both.clone(), both),
            (None, None) => {}
        }
        if let Some(deadline) = deadline {
            described = described.deadline(duration(deadline)?);
        }
        if let Some(on) = checksum {
            described = described.checksum(on);
        }
        if let Some(after) = after {
            described = described.after(after);
        }
        if commit {
            described = described.commit();
        }
        let inner = py.detach(|| described.post()).map_err(|error| raise(py, &error))?;
        Ok(Transfer { inner })
    }

    /// Lets peers reach memory under a name, until it is withdrawn or released or the agent is closed. Nobody has to hold the memory
    /// meanwhile.
    #[pyo3(signature = (name, memory, read = true, write = false))]
    fn publish(&self, py: Python<'_>, name: &str, memory: &Memory, read: bool, write: bool) -> PyResult<()> {
        if write && !memory.writable {
            return Err(invalid(
                "this memory is read-only, so peers cannot be let to write to it",
            ));
        }
        let agent = self.live()?;
        let access = Access { read, write };
        py.detach(|| agent.publish(name, &memory.inner, access))
            .map_err(|error| raise(py, &error))
    }

    /// Takes a published name back. Peers are refused from now on.
    fn withdraw(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        let agent = self.live()?;
        py.detach(|| agent.withdraw(name)).map_err(|error| raise(py, &error))
    }

    /// Connects to an agent by its `address`, or by `host:port`.
    #[pyo3(signature = (address, timeout = None))]
    fn connect(&self, py: Python<'_>, address: &str, timeout: Option<f64>) -> PyResult<Peer> {
        let agent = self.live()?;
        let deadline = agent.settings().deadline;
        let timeout = within(timeout, deadline)?;
        let inner = waiting(py, || agent.connect_within(address, timeout))?;
        Ok(Peer { inner, deadline })
    }

    /// Connects to an agent by its name, looked up through the rendezvous.
    #[pyo3(signature = (name, timeout = None))]
    fn connect_named(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<Peer> {
        let agent = self.live()?;
        let deadline = agent.settings().deadline;
        let timeout = within(timeout, deadline)?;
        let inner = waiting(py, || agent.connect_named(name, timeout))?;
        Ok(Peer { inner, deadline })
    }

    /// The same as `connect`, for `await`. Cancelling it gives the attempt up.
    #[pyo3(signature = (address, timeout = None))]
    fn connect_async<'py>(
        &self,
        py: Python<'py>,
        address: String,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let agent = self.live()?;
        let deadline = agent.settings().deadline;
        let timeout = within(timeout, deadline)?;
        let connect = move || agent.connect_within(&address, timeout);
        in_thread(py, connect, move |inner| Peer { inner, deadline })
    }

    /// The same as `connect_named`, for `await`. Cancelling it gives the attempt up.
    #[pyo3(signature = (name, timeout = None))]
    fn connect_named_async<'py>(
        &self,
        py: Python<'py>,
        name: String,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let agent = self.live()?;
        let deadline = agent.settings().deadline;
        let timeout = within(timeout, deadline)?;
        let connect = move || agent.connect_named(&name, timeout);
        in_thread(py, connect, move |inner| Peer { inner, deadline })
    }

    /// The next notification, from whichever peer; `None` where none comes in time, which without a timeout is never.
    #[pyo3(signature = (timeout = None))]
    fn notification(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Notification>> {
        let end = timeout
            .map(duration)
            .transpose()?
            .and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = end.map_or(SIGNAL_CHECK, |end| end.saturating_duration_since(Instant::now()));
            let told = self.inbox.next(py, left.min(SIGNAL_CHECK))?;
            if told.is_some() {
                return Ok(told);
            }
            py.check_signals()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                return Ok(None);
            }
        }
    }

    /// The next notification, for `await`. A wait that is cancelled leaves it to the next one; closing the agent ends the wait with
    /// `Stopped`.
    fn notification_async(slf: Py<Self>) -> NextNotification {
        let inbox = slf.get().inbox.clone();
        NextNotification::new(slf, inbox)
    }

    /// Stops the agent, whoever still holds something of it. Transfers under way end with an error, its communicators end and the other
    /// ranks are told, and what it has published is withdrawn.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inbox.close());
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        self.live().map_or("<weft.Agent, closed>".to_owned(), |agent| {
            format!("<weft.Agent {:?}>", agent.name())
        })
    }
}

/// A keyword and its value as the table of settings has them: `tcp_connections=4` is `tcp.connections = 4`, a list is written
/// with commas, and a duration may be a number of seconds.
pub fn setting(keyword: String, value: &Bound<'_, PyAny>) -> PyResult<(String, String)> {
    let row = TABLE.iter().find(|row| row.key.replace('.', "_") == keyword);
    let text = if let Ok(flag) = value.cast::<PyBool>() {
        flag.is_true().to_string()
    } else if let Ok(items) = value.cast::<PyList>() {
        let items: Vec<String> = items
            .iter()
            .map(|item| Ok(item.str()?.to_string()))
            .collect::<PyResult<_>>()?;
        items.join(",")
    } else if row.is_some_and(|row| row.kind == "duration") && value.extract::<f64>().is_ok() {
        format!("{}ns", duration(value.extract()?)?.as_nanos())
    } else {
        value.str()?.to_string()
    };
    Ok((row.map_or(keyword, |row| row.key.to_owned()), text))
}
