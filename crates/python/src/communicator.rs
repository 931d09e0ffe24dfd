//! One rank of a group, for Python.

mod elements;
mod pending;
mod raw;
mod request;

use std::time::Duration;

use pyo3::prelude::*;
use weft::{Epoch, JoinOptions, Member, Rank};

use crate::agent::Agent;
use crate::errors::{invalid, raise};
use crate::memory::duration;
use elements::{Elements, operator};
use request::{Kind, Request};

pub use pending::Pending;
pub use raw::numbers;

/// One rank of a group of processes that call the same things in the same order.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Communicator {
    inner: weft::Communicator,
}

/// A schedule of the caller's own, verified.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Schedule {
    inner: weft::Schedule,
}

#[pymethods]
impl Schedule {
    /// Reads a schedule as `weft explain --render json` writes it.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Schedule> {
        let read = weft::Schedule::from_json(text);
        let inner = read.map_err(|error| {
            let cause = std::error::Error::source(&error).map_or_else(String::new, |cause| format!(": {cause}"));
            invalid(format!("{error}{cause}"))
        })?;
        Ok(Schedule { inner })
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn ranks(&self) -> u32 {
        self.inner.problem().ranks
    }

    #[getter]
    fn collective(&self) -> &'static str {
        self.inner.problem().collective.name()
    }

    fn __repr__(&self) -> String {
        format!(
            "<weft.Schedule {:?}, {} among {}>",
            self.name(),
            self.collective(),
            self.ranks()
        )
    }
}

/// What every call can be told.
struct Manner<'a> {
    /// The name of an algorithm, or a `Schedule`.
    algorithm: Option<&'a Bound<'a, PyAny>>,
    deterministic: bool,
    deadline: Option<f64>,
    wait: bool,
}

#[pymethods]
impl Communicator {
    #[new]
    #[pyo3(signature = (agent, name, rank, size, *, members = None, timeout = None, deadline = None, shared_memory = true, channels = None))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn new(
        py: Python<'_>,
        agent: &Agent,
        name: &str,
        rank: u32,
        size: u32,
        members: Option<Vec<(String, u64)>>,
        timeout: Option<f64>,
        deadline: Option<f64>,
        shared_memory: bool,
        channels: Option<u16>,
    ) -> PyResult<Communicator> {
        let agent = agent.live()?;
        let defaults = JoinOptions::new(name, Rank(rank), size);
        let or = |seconds: Option<f64>, default: Duration| seconds.map_or(Ok(default), duration);
        let options = JoinOptions {
            timeout: or(timeout, defaults.timeout)?,
            deadline: or(deadline, defaults.deadline)?,
            arena: shared_memory,
            channels: channels.unwrap_or(defaults.channels),
            ..defaults
        };
        let members = members.map(|members| {
            let members = members.into_iter();
            let members = members.map(|(address, epoch)| Member {
                address,
                epoch: Epoch(epoch),
            });
            members.collect::<Vec<Member>>()
        });
        let joined = py.detach(|| match members {
            Some(members) => weft::Communicator::meet(&agent, options, &members),
            None => weft::Communicator::join(&agent, options),
        });
        let inner = joined.map_err(|error| raise(py, &error))?;
        Ok(Communicator { inner })
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.inner.rank().0
    }

    #[getter]
    fn size(&self) -> u32 {
        self.inner.size()
    }

    /// Every rank ends with the reduction of all inputs.
    #[pyo3(signature = (data, output = None, *, op = "sum", datatype = None, algorithm = None, deterministic = false, quantized = None, block = 128, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn all_reduce(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        output: Option<&Bound<'_, PyAny>>,
        op: &str,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        deterministic: bool,
        quantized: Option<&str>,
        block: u32,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let output = output.unwrap_or(data);
        let data = Elements::of(data, datatype, false)?;
        if let Some(code) = quantized {
            if algorithm.is_some() || !wait {
                return Err(invalid("a quantised call takes no algorithm, and waits".to_owned()));
            }
            let output = Elements::of(output, datatype, true)?;
            return self.quantized(py, data, output, op, (code, block), deadline);
        }
        let request = Request {
            operator: operator(op)?,
            ..Request::new(Kind::AllReduce, data, Elements::of(output, datatype, true)?)
        };
        self.make(
            py,
            request,
            &Manner {
                algorithm,
                deterministic,
                deadline,
                wait,
            },
        )
    }

    /// Every rank ends with all inputs, one after the other.
    #[pyo3(signature = (data, output, *, counts = None, datatype = None, algorithm = None, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn all_gather(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        counts: Option<Vec<u64>>,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let data = Elements::of(data, datatype, false)?;
        let request = Request {
            counts,
            ..Request::new(Kind::AllGather, data, Elements::of(output, datatype, true)?)
        };
        self.make(
            py,
            request,
            &Manner {
                algorithm,
                deterministic: false,
                deadline,
                wait,
            },
        )
    }

    /// Each rank ends with the reduction of everyone's block for it.
    #[pyo3(signature = (data, output, *, op = "sum", counts = None, datatype = None, algorithm = None, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        op: &str,
        counts: Option<Vec<u64>>,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let data = Elements::of(data, datatype, false)?;
        let request = Request {
            counts,
            operator: operator(op)?,
            ..Request::new(Kind::ReduceScatter, data, Elements::of(output, datatype, true)?)
        };
        self.make(
            py,
            request,
            &Manner {
                algorithm,
                deterministic: false,
                deadline,
                wait,
            },
        )
    }

    /// Every rank ends with the root's data, in the same place.
    #[pyo3(signature = (data, root = 0, *, datatype = None, algorithm = None, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn broadcast(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        root: u32,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let data = Elements::of(data, datatype, root != self.rank())?;
        let request = Request {
            root: Rank(root),
            ..Request::new(Kind::Broadcast, data, Elements::nothing())
        };
        self.make(
            py,
            request,
            &Manner {
                algorithm,
                deterministic: false,
                deadline,
                wait,
            },
        )
    }

    /// The root ends with the reduction of all inputs.
    #[pyo3(signature = (data, output = None, root = 0, *, op = "sum", datatype = None, algorithm = None, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn reduce(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        output: Option<&Bound<'_, PyAny>>,
        root: u32,
        op: &str,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let output = self.at_root(root, output, "output")?;
        let data = Elements::of(data, datatype, false)?;
        let request = Request {
            root: Rank(root),
            operator: operator(op)?,
            ..Request::new(Kind::Reduce, data, Elements::maybe(output, datatype, true)?)
        };
        self.make(
            py,
            request,
            &Manner {
                algorithm,
                deterministic: false,
                deadline,
                wait,
            },
        )
    }

    /// The root ends with all inputs, one after the other.
    #[pyo3(signature = (data, output = None, root = 0, *, counts = None, datatype = None, algorithm = None, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn gather(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        output: Option<&Bound<'_, PyAny>>,
        root: u32,
        counts: Option<Vec<u64>>,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let output = self.at_root(root, output, "output")?;
        let data = Elements::of(data, datatype, false)?;
        let request = Request {
            root: Rank(root),
            counts,
            ..Request::new(Kind::Gather, data, Elements::maybe(output, datatype, true)?)
        };
        self.make(
            py,
            request,
            &Manner {
                algorithm,
                deterministic: false,
                deadline,
                wait,
            },
        )
    }

    /// Each rank ends with the root's block for it.
    #[pyo3(signature = (data, output, root = 0, *, counts = None, datatype = None, algorithm = None, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn scatter(
        &self,
        py: Python<'_>,
        data: Option<&Bound<'_, PyAny>>,
        output: &Bound<'_, PyAny>,
        root: u32,
        counts: Option<Vec<u64>>,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let data = self.at_root(root, data, "data")?;
        let output = Elements::of(output, datatype, true)?;
        let request = Request {
            root: Rank(root),
            counts,
            datatype: output.datatype,
            ..Request::new(Kind::Scatter, Elements::maybe(data, datatype, false)?, output)
        };
        self.make(
            py,
            request,
            &Manner {
                algorithm,
                deterministic: false,
                deadline,
                wait,
            },
        )
    }

    /// The block of each rank for each other.
    #[pyo3(signature = (data, output, *, sent = None, received = None, datatype = None, algorithm = None, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn all_to_all(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        sent: Option<Vec<u64>>,
        received: Option<Vec<u64>>,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        if sent.is_some() != received.is_some() {
            return Err(invalid("give both what is sent and what is received, or neither"));
        }
        let data = Elements::of(data, datatype, false)?;
        let request = Request {
            counts: sent,
            received,
            ..Request::new(Kind::AllToAll, data, Elements::of(output, datatype, true)?)
        };
        self.make(
            py,
            request,
            &Manner {
                algorithm,
                deterministic: false,
                deadline,
                wait,
            },
        )
    }

    /// Sends to one rank, which must receive as many elements.
    #[pyo3(signature = (data, to, *, datatype = None, deadline = None, wait = true))]
    fn send(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        to: u32,
        datatype: Option<&str>,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let request = Request {
            root: Rank(to),
            ..Request::new(Kind::Send, Elements::of(data, datatype, false)?, Elements::nothing())
        };
        self.make(py, request, &Manner::plain(deadline, wait))
    }

    /// Receives what one rank sends.
    #[pyo3(signature = (data, source, *, datatype = None, deadline = None, wait = true))]
    fn receive(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        source: u32,
        datatype: Option<&str>,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let request = Request {
            root: Rank(source),
            ..Request::new(Kind::Receive, Elements::of(data, datatype, true)?, Elements::nothing())
        };
        self.make(py, request, &Manner::plain(deadline, wait))
    }

    /// Nobody ends before everybody has begun.
    #[pyo3(signature = (*, deadline = None, wait = true))]
    fn barrier(&self, py: Python<'_>, deadline: Option<f64>, wait: bool) -> PyResult<Option<Pending>> {
        let request = Request::new(Kind::Barrier, Elements::nothing(), Elements::nothing());
        self.make(py, request, &Manner::plain(deadline, wait))
    }

    /// Ranks that give the same colour form a group of their own, ordered by `key`; those that give none form none.
    #[pyo3(signature = (color, key = 0))]
    fn split(&self, py: Python<'_>, color: Option<u32>, key: u32) -> PyResult<Option<Communicator>> {
        let part = py.detach(|| self.inner.split(color, key));
        let part = part.map_err(|error| raise(py, &error))?;
        Ok(part.map(|inner| Communicator { inner }))
    }

    /// After a failure, a group of those that are left.
    #[pyo3(signature = (timeout = 10.0))]
    fn shrink(&self, py: Python<'_>, timeout: f64) -> PyResult<Communicator> {
        let timeout = duration(timeout)?;
        let inner = py.detach(|| self.inner.shrink(timeout));
        let inner = inner.map_err(|error| raise(py, &error))?;
        Ok(Communicator { inner })
    }

    /// A group with more ranks: those of this one keep theirs, and new ones join under the same name and size.
    fn grow(&self, py: Python<'_>, name: &str, size: u32) -> PyResult<Communicator> {
        let inner = py.detach(|| self.inner.grow(name, size));
        let inner = inner.map_err(|error| raise(py, &error))?;
        Ok(Communicator { inner })
    }

    /// A collective on memory that the caller vouches for, for whoever counts microseconds.
    ///
    /// Without `keep` it is over when this returns; with it, `keep` is what keeps the memory where it is until the call has ended.
    #[pyo3(signature = (kind, input, output, datatype, operator, root, deadline, keep = None, counts = None, received = None))]
    #[expect(clippy::too_many_arguments, reason = "a call of its own for each would cost more")]
    fn _raw(
        &self,
        py: Python<'_>,
        kind: u8,
        input: (usize, usize),
        output: (usize, usize),
        datatype: usize,
        operator: usize,
        root: u32,
        deadline: f64,
        keep: Option<Py<PyAny>>,
        counts: Option<Vec<u64>>,
        received: Option<Vec<u64>>,
    ) -> PyResult<Option<Pending>> {
        let wait = keep.is_none();
        let request = raw::Raw {
            kind,
            input,
            output,
            datatype,
            operator,
            root,
            counts,
            received,
        };
        let request = request.with_owner(py, keep)?;
        self.make(py, request, &Manner::plain(Some(deadline), wait))
    }

    fn __repr__(&self) -> String {
        format!("<weft.Communicator, rank {} of {}>", self.rank(), self.size())
    }
}

impl Communicator {
    /// What only the root has to give.
    fn at_root<'a, 'py>(
        &self,
        root: u32,
        given: Option<&'a Bound<'py, PyAny>>,
        what: &str,
    ) -> PyResult<Option<&'a Bound<'py, PyAny>>> {
        match (root == self.rank(), given) {
            (true, None) => Err(invalid(format!("the root has to give {what}"))),
            (true, given) => Ok(given),
            (false, _) => Ok(None),
        }
    }

    fn quantized(
        &self,
        py: Python<'_>,
        data: Elements,
        output: Elements,
        op: &str,
        (code, block): (&str, u32),
        deadline: Option<f64>,
    ) -> PyResult<Option<Pending>> {
        let code = code
            .parse()
            .map_err(|error: weft::quantized::UnknownCode| invalid(error.to_string()))?;
        let block = weft::quantized::Block::of(block);
        let block = block.ok_or_else(|| invalid("blocks are of 32, 64 or 128 elements".to_owned()))?;
        let reduction = op
            .parse()
            .map_err(|_| invalid(format!("there is no reduction {op:?}")))?;
        if data.datatype != weft::Datatype::F32 || output.datatype != weft::Datatype::F32 {
            return Err(invalid("only f32 is quantised".to_owned()));
        }
        let options = weft::QuantizedOptions {
            reduction,
            deadline: deadline.map(duration).transpose()?,
            ..weft::QuantizedOptions::new(weft::quantized::Quantization { code, block })
        };
        let (data, output) = (data.part, output.part);
        let done = py.detach(|| self.inner.all_reduce_quantized(data, output, options));
        done.map_err(|error| raise(py, &error))?;
        Ok(None)
    }

    fn make(&self, py: Python<'_>, request: Request, manner: &Manner<'_>) -> PyResult<Option<Pending>> {
        let way = manner.algorithm.map(way).transpose()?;
        let deadline = manner.deadline.map(duration).transpose()?;
        let deterministic = manner.deterministic;
        let wait = manner.wait;
        let made = py.detach(|| {
            let mut call = request.call(&self.inner);
            call = match way {
                Some(weft::Way::Algorithm(candidate)) => call.algorithm(candidate),
                Some(weft::Way::Schedule(schedule)) => call.schedule(&schedule),
                None => call,
            };
            if deterministic {
                call = call.deterministic();
            }
            if let Some(deadline) = deadline {
                call = call.deadline(deadline);
            }
            match wait {
                true => call.run().map(|()| None),
                false => call.start().map(Some),
            }
        });
        let pending = made.map_err(|error| raise(py, &error))?;
        Ok(pending.map(|inner| Pending { inner }))
    }
}

/// By what a call is to run: the name of an algorithm, or a `Schedule`.
fn way(given: &Bound<'_, PyAny>) -> PyResult<weft::Way> {
    if let Ok(schedule) = given.cast::<Schedule>() {
        return Ok(weft::Way::Schedule(schedule.get().inner.clone()));
    }
    let name: String = given.extract()?;
    let known = name
        .parse()
        .map_err(|error: weft::UnknownCandidate| invalid(error.to_string()))?;
    Ok(weft::Way::Algorithm(known))
}

impl Manner<'_> {
    fn plain(deadline: Option<f64>, wait: bool) -> Manner<'static> {
        Manner {
            algorithm: None,
            deterministic: false,
            deadline,
            wait,
        }
    }
}
