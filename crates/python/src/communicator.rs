//! One rank of a group, for Python.

mod elements;
mod pending;
mod raw;
mod request;

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use weft::rendezvous::World;
use weft::{Epoch, JoinOptions, Member, Rank};

use crate::agent::Agent;
use crate::errors::{invalid, raise};
use crate::memory::duration;
use crate::waiting::waiting;
use elements::{Elements, operator};
use request::Request;

pub use pending::Pending;
pub use raw::numbers;
pub use request::Kind;

/// One rank of a group of processes that call the same things in the same order.
///
/// They find each other through the agent's rendezvous, or by `members`: the `address` and `epoch` of each rank's agent. `timeout` is how
/// long to wait for all of them, `deadline` that of calls that name none. `from_env` takes all of it from the launcher.
///
/// Calls of one communicator run one after the other, in the order in which they are made. Data is anything with the buffer protocol or
/// DLPack in host memory, or `Memory`; `datatype` says what its elements are where the object does not (f64, f32, f16, bf16, fp8_e4m3,
/// fp8_e5m2, i8 to i64, u8 to u64). `algorithm` is the name of one, with the number of portions behind a slash where there are several
/// (`ring/16`), or a `Schedule`; by default the fastest by the platform file of the setting `platform` runs. With `wait=False` a call gives
/// a `Pending` and goes on by itself; until its end nobody may touch its data.
///
/// A call that fails raises `CollectiveError` on every rank, in that call or in its next one (`calls_ended` counts those that ended well); the group is
/// of no further use then: see `shrink`.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Communicator {
    inner: weft::Communicator,
    agent: Py<Agent>,
}

/// How to join a group, beside its name.
struct Joining {
    timeout: Option<f64>,
    deadline: Option<f64>,
    shared_memory: bool,
    channels: Option<u16>,
}

impl Joining {
    fn over(self, defaults: JoinOptions) -> PyResult<JoinOptions> {
        let or = |seconds: Option<f64>, default: Duration| seconds.map_or(Ok(default), duration);
        Ok(JoinOptions {
            timeout: or(self.timeout, defaults.timeout)?,
            deadline: or(self.deadline, defaults.deadline)?,
            arena: self.shared_memory,
            channels: self.channels.unwrap_or(defaults.channels),
            ..defaults
        })
    }
}

/// A schedule of one's own for a collective, verified. All ranks of a call must give the same.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Schedule {
    inner: weft::Schedule,
}

#[pymethods]
impl Schedule {
    /// Reads one such as `weft explain --render json` writes. Raises `InvalidCall` with rank, step and op where it is wrong.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Schedule> {
        let read = weft::Schedule::from_json(text);
        let inner = read.map_err(|error| {
            let cause = std::error::Error::source(&error).map_or_else(String::new, |cause| format!(": {cause}"));
            invalid(format!("{error}{cause}"))
        })?;
        Ok(Schedule { inner })
    }

    /// What it calls itself.
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    /// For how many ranks it is.
    #[getter]
    fn ranks(&self) -> u32 {
        self.inner.problem().ranks
    }

    /// What it does, by name.
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
    all_or_nothing: bool,
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
        agent: Py<Agent>,
        name: &str,
        rank: u32,
        size: u32,
        members: Option<Vec<(String, u64)>>,
        timeout: Option<f64>,
        deadline: Option<f64>,
        shared_memory: bool,
        channels: Option<u16>,
    ) -> PyResult<Communicator> {
        let live = agent.get().live()?;
        let joining = Joining {
            timeout,
            deadline,
            shared_memory,
            channels,
        };
        let options = joining.over(JoinOptions::new(name, Rank(rank), size))?;
        let members = members.map(|members| {
            let members = members.into_iter();
            let members = members.map(|(address, epoch)| Member {
                address,
                epoch: Epoch(epoch),
            });
            members.collect::<Vec<Member>>()
        });
        let inner = waiting(py, || match members {
            Some(members) => weft::Communicator::meet(&live, options, &members),
            None => weft::Communicator::join(&live, options),
        })?;
        Ok(Communicator { inner, agent })
    }

    /// Joins all processes that a launcher has started together (torchrun, MPI, Slurm), as the rank that its variables name. All of them
    /// give the same name.
    ///
    /// Without an `agent` one is made, to which `settings` apply as they do to `Agent`; it is the attribute `agent`, and ends with the
    /// communicator. On one host the variables of the launcher are enough. Ranks on several hosts need the same secret too
    /// (`WEFT_SECRET`), and have to be told where rank 0 is (`MASTER_ADDR`, `MASTER_PORT`), unless the launcher does that.
    #[staticmethod]
    #[pyo3(signature = (name = "world", *, agent = None, timeout = None, deadline = None, shared_memory = true, channels = None, **settings))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn from_env(
        py: Python<'_>,
        name: &str,
        agent: Option<Py<Agent>>,
        timeout: Option<f64>,
        deadline: Option<f64>,
        shared_memory: bool,
        channels: Option<u16>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Communicator> {
        let world = World::of_process().map_err(|error| raise(py, &error.into()))?;
        let agent = match agent {
            Some(_) if settings.is_some_and(|settings| !settings.is_empty()) => {
                return Err(invalid(
                    "settings are for an agent that is made; this one is there already",
                ));
            }
            Some(agent) => agent,
            None => {
                let builder = weft::Agent::builder(&format!("{name}-{}", world.rank)).for_world(&world);
                Py::new(py, Agent::start(py, builder, settings)?)?
            }
        };
        let live = agent.get().live()?;
        let joining = Joining {
            timeout,
            deadline,
            shared_memory,
            channels,
        };
        let options = joining.over(JoinOptions::of_world(name, &world))?;
        let inner = waiting(py, || weft::Communicator::join(&live, options))?;
        Ok(Communicator { inner, agent })
    }

    /// The agent that it belongs to.
    #[getter]
    fn agent(&self, py: Python<'_>) -> Py<Agent> {
        self.agent.clone_ref(py)
    }

    /// The position of this process in the group, from zero.
    #[getter]
    fn rank(&self) -> u32 {
        self.inner.rank().0
    }

    /// How many ranks the group has.
    #[getter]
    fn size(&self) -> u32 {
        self.inner.size()
    }

    /// How many calls have ended well on this rank. It is also the number of the first that has not, as errors tell it.
    #[getter]
    fn calls_ended(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.inner.calls_ended())
            .map_err(|error| raise(py, &error))
    }

    /// In a group that is what is left of another (`shrink`): how many calls of that one have ended well on every rank of this; else None.
    /// A rank whose old group had ended more has results that others do not have.
    #[getter]
    fn calls_ended_before(&self) -> Option<u64> {
        self.inner.calls_ended_before()
    }

    /// Every rank ends with the reduction of all data; in place where there is no output.
    ///
    /// `deterministic` chooses the algorithm by size and number of ranks alone, so that the result has the same bits wherever the ranks
    /// are. With `all_or_nothing` the output holds what it held before, or all of the result, at the price of memory of its size and a copy;
    /// without, it is partly written when the call fails, and in place the data is lost with it. `quantized` sends f32 as codes of eight
    /// bits, `block` of which share a scale, for sum and avg: with m the sum over all ranks of the greatest magnitude in an element's block,
    /// a sum is off by at most about m/127 (int8) or m/14 (fp8_e4m3). Such a call waits.
    #[pyo3(signature = (data, output = None, *, op = "sum", datatype = None, algorithm = None, deterministic = false, quantized = None, block = 128, all_or_nothing = false, deadline = None, wait = true))]
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
        all_or_nothing: bool,
        deadline: Option<f64>,
        wait: bool,
    ) -> PyResult<Option<Pending>> {
        let output = output.unwrap_or(data);
        let data = Elements::of(data, datatype, false)?;
        if let Some(code) = quantized {
            if algorithm.is_some() || all_or_nothing || !wait {
                return Err(invalid(
                    "a quantised call takes no algorithm, waits, and is not all or nothing".to_owned(),
                ));
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
                all_or_nothing,
                deadline,
                wait,
            },
        )
    }

    /// Every rank ends with all data, one after the other. `counts` are the elements of each rank, where they differ.
    #[pyo3(signature = (data, output, *, counts = None, datatype = None, algorithm = None, all_or_nothing = false, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn all_gather(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        counts: Option<Vec<u64>>,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        all_or_nothing: bool,
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
                all_or_nothing,
                deadline,
                wait,
            },
        )
    }

    /// Each rank ends with the reduction of everyone's block for it.
    #[pyo3(signature = (data, output, *, op = "sum", counts = None, datatype = None, algorithm = None, all_or_nothing = false, deadline = None, wait = true))]
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
        all_or_nothing: bool,
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
                all_or_nothing,
                deadline,
                wait,
            },
        )
    }

    /// Every rank ends with the root's data, in the same place.
    #[pyo3(signature = (data, root = 0, *, datatype = None, algorithm = None, all_or_nothing = false, deadline = None, wait = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn broadcast(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        root: u32,
        datatype: Option<&str>,
        algorithm: Option<&Bound<'_, PyAny>>,
        all_or_nothing: bool,
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
                all_or_nothing,
                deadline,
                wait,
            },
        )
    }

    /// The root ends with the reduction of all data; others give no output.
    #[pyo3(signature = (data, output = None, root = 0, *, op = "sum", datatype = None, algorithm = None, all_or_nothing = false, deadline = None, wait = true))]
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
        all_or_nothing: bool,
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
                all_or_nothing,
                deadline,
                wait,
            },
        )
    }

    /// The root ends with all data, one after the other; others give no output.
    #[pyo3(signature = (data, output = None, root = 0, *, counts = None, datatype = None, algorithm = None, all_or_nothing = false, deadline = None, wait = true))]
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
        all_or_nothing: bool,
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
                all_or_nothing,
                deadline,
                wait,
            },
        )
    }

    /// Each rank ends with the root's block for it; others give no data.
    #[pyo3(signature = (data, output, root = 0, *, counts = None, datatype = None, algorithm = None, all_or_nothing = false, deadline = None, wait = true))]
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
        all_or_nothing: bool,
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
                all_or_nothing,
                deadline,
                wait,
            },
        )
    }

    /// Block r of rank s becomes block s of rank r. `sent` and `received` are elements by rank, where they differ.
    #[pyo3(signature = (data, output, *, sent = None, received = None, datatype = None, algorithm = None, all_or_nothing = false, deadline = None, wait = true))]
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
        all_or_nothing: bool,
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
                all_or_nothing,
                deadline,
                wait,
            },
        )
    }

    /// Sends to one rank, which must `receive` as many elements.
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
        let part = waiting(py, || self.inner.split(color, key))?;
        Ok(part.map(|inner| self.beside(py, inner)))
    }

    /// After a failure, a group of those that are left. All of them must call this; whoever does not in time is left out. Where so few are left that others may go on
    /// elsewhere, this raises `NoQuorum`; with `quorum=False` whoever is left goes on, and that no two parts of a group do is up to the caller.
    #[pyo3(signature = (timeout = 10.0, *, quorum = true))]
    fn shrink(&self, py: Python<'_>, timeout: f64, quorum: bool) -> PyResult<Communicator> {
        let options = weft::ShrinkOptions::new(duration(timeout)?);
        let options = if quorum { options } else { options.without_quorum() };
        let inner = waiting(py, || self.inner.shrink_with(options))?;
        Ok(self.beside(py, inner))
    }

    /// A group with more ranks: those of this one keep theirs, and new ones join under the same name and size.
    fn grow(&self, py: Python<'_>, name: &str, size: u32) -> PyResult<Communicator> {
        let inner = waiting(py, || self.inner.grow(name, size))?;
        Ok(self.beside(py, inner))
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
    pub fn inner(&self) -> &weft::Communicator {
        &self.inner
    }

    /// Another group of the same agent.
    fn beside(&self, py: Python<'_>, inner: weft::Communicator) -> Communicator {
        let agent = self.agent.clone_ref(py);
        Communicator { inner, agent }
    }

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
        waiting(py, || self.inner.all_reduce_quantized(data, output, options))?;
        Ok(None)
    }

    fn make(&self, py: Python<'_>, request: Request, manner: &Manner<'_>) -> PyResult<Option<Pending>> {
        let way = manner.algorithm.map(way).transpose()?;
        let deadline = manner.deadline.map(duration).transpose()?;
        let (deterministic, all_or_nothing) = (manner.deterministic, manner.all_or_nothing);
        let wait = manner.wait;
        let pending = waiting(py, || {
            let mut call = request.call(&self.inner);
            call = match way {
                Some(weft::Way::Algorithm(candidate)) => call.algorithm(candidate),
                Some(weft::Way::Schedule(schedule)) => call.schedule(&schedule),
                None => call,
            };
            if deterministic {
                call = call.deterministic();
            }
            if all_or_nothing {
                call = call.all_or_nothing();
            }
            if let Some(deadline) = deadline {
                call = call.deadline(deadline);
            }
            match wait {
                true => call.run().map(|()| None),
                false => call.start().map(Some),
            }
        })?;
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
            all_or_nothing: false,
            deadline,
            wait,
        }
    }
}
