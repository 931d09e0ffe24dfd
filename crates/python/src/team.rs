//! The ranks of a group as a team on GPUs: calls on bare addresses, put on a stream of the caller's.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use weft::gpu::{Buffers, Collective, DeviceSlice};
use weft::{Datatype, DeviceTeam, DeviceTeamOptions, Reduction};

use crate::communicator::{Communicator, Kind};
use crate::errors::{invalid, raise};
use crate::memory::duration;
use crate::waiting::waiting;

/// One rank of a team. Calls return when they are on the stream, not when they are done.
#[derive(Debug)]
#[pyclass(frozen, module = "weft", name = "_Team")]
pub struct Team {
    inner: Mutex<Option<Arc<DeviceTeam>>>,
}

#[pymethods]
impl Team {
    /// Makes the ranks of a group a team: every rank calls it. Or says why there can be none, which is the same on all ranks.
    #[staticmethod]
    #[pyo3(signature = (communicator, device, *, deadline, ranks_a_device = 1, piece_bytes = None))]
    fn form(
        py: Python<'_>,
        communicator: &Bound<'_, Communicator>,
        device: u16,
        deadline: f64,
        ranks_a_device: u32,
        piece_bytes: Option<u64>,
    ) -> PyResult<(Option<Team>, String)> {
        let mut options = DeviceTeamOptions::new(device, duration(deadline)?);
        options.ranks_a_device = ranks_a_device;
        options.piece_bytes = piece_bytes.unwrap_or(options.piece_bytes);
        let group = communicator.get().inner();
        let team = waiting(py, || group.device_team(options))?;
        Ok(match team {
            Ok(team) => (
                Some(Team {
                    inner: Mutex::new(Some(Arc::new(team))),
                }),
                String::new(),
            ),
            Err(none) => (None, none.to_string()),
        })
    }

    /// What kernels reduce: the numbers of datatypes and of operators.
    #[staticmethod]
    fn reduced() -> (Vec<usize>, Vec<usize>) {
        let datatypes = [Datatype::F32, Datatype::F16, Datatype::Bf16, Datatype::I32];
        let numbers = |datatype| Datatype::ALL.iter().position(|known| *known == datatype);
        let datatypes = datatypes.into_iter().filter_map(numbers).collect();
        (datatypes, (0..Reduction::ALL.len()).collect())
    }

    /// Puts a collective on a stream: the numbers are those of `Communicator._raw`, the memory is the device's.
    #[expect(clippy::too_many_arguments, reason = "a call of its own for each would cost more")]
    fn call(
        &self,
        py: Python<'_>,
        kind: u8,
        input: (u64, u64),
        output: (u64, u64),
        datatype: usize,
        operator: usize,
        root: u32,
        stream: u64,
    ) -> PyResult<()> {
        let team = self.live()?;
        let kind = Kind::ALL.get(usize::from(kind)).copied();
        let datatype = Datatype::ALL.get(datatype).copied();
        let (Some(kind), Some(datatype)) = (kind, datatype) else {
            return Err(invalid("a number that stands for nothing"));
        };
        let reduction = || {
            let known = Reduction::ALL.get(operator).copied();
            known.ok_or_else(|| invalid("kernels do not reduce by this"))
        };
        let size = datatype.size() as u64;
        let ranks = team.carrier().map_err(|error| raise(py, &error))?.team().ranks() as u64;
        let collective = match kind {
            Kind::AllReduce => Collective::AllReduce {
                count: output.1 / size,
                datatype,
                reduction: reduction()?,
            },
            Kind::ReduceScatter => Collective::ReduceScatter {
                count: output.1 / size,
                datatype,
                reduction: reduction()?,
            },
            Kind::AllGather => Collective::AllGather { bytes: input.1 },
            Kind::AllToAll => Collective::AllToAll { bytes: input.1 / ranks },
            Kind::Broadcast => Collective::Broadcast {
                bytes: output.1,
                root: root as usize,
            },
            _ => return Err(invalid("kernels do not do this")),
        };
        let slice = |(address, bytes)| DeviceSlice { address, bytes };
        let buffers = Buffers {
            input: slice(input),
            output: slice(output),
        };
        waiting(py, || {
            let carrier = team.carrier()?;
            // SAFETY: whoever calls vouches for stream and memory: both are torch's, which keeps memory until the stream on which it is used has come past that.
            let put = unsafe { carrier.call(stream, collective, buffers) };
            put.map_err(|error| team.explain(error))
        })
    }

    /// Puts a barrier on a stream.
    fn barrier(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let team = self.live()?;
        waiting(py, || {
            let carrier = team.carrier()?;
            // SAFETY: whoever calls vouches for the stream.
            let put = unsafe { carrier.barrier(stream) };
            put.map_err(|error| team.explain(error))
        })
    }

    /// Raises what has become of the team, if it is not whole any more. What is on streams may still fail.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.live()?.check().map_err(|error| raise(py, &error))
    }

    /// Ends all waits of kernels, here and soon at the other ranks. Nothing can be asked of the team afterwards.
    fn abort(&self) {
        if let Ok(team) = self.live() {
            team.abort();
        }
    }

    /// Lets go of the team, after all that is on the device.
    fn close(&self, py: Python<'_>) {
        let team = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(team));
    }
}

impl Team {
    pub fn live(&self) -> PyResult<Arc<DeviceTeam>> {
        let team = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        team.ok_or_else(|| invalid("the team has been closed"))
    }
}
