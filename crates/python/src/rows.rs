//! What a team on GPUs does with rows beside its collectives: fused norms, tokens to experts and back, and memory that all ranks reach. Calls are on bare addresses, put on a stream of the caller's.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use weft::gpu::{
    CollectiveError, CombineBuffers, DeviceSlice, DispatchBuffers, FusedBuffers, FusedNorm, FusedNorms, Moe, MoeError,
    MoeHandle, MoeSettings, Received, Rounded, Sent,
};
use weft::{Datatype, DeviceTeam};

use crate::communicator::Communicator;
use crate::errors::{GpuError, invalid, over_capacity, raise};
use crate::memory::duration;
use crate::team::Team;
use crate::waiting::waiting;

type Place = (u64, u64);

fn slice((address, bytes): Place) -> DeviceSlice {
    DeviceSlice { address, bytes }
}

/// Memory of this rank's device that the kernels of all ranks of a team reach. It is there for as long as the object, or the team.
#[derive(Debug)]
#[pyclass(frozen, module = "weft", name = "_Symmetric")]
pub struct Symmetric {
    inner: weft::Symmetric,
}

#[pymethods]
impl Symmetric {
    /// Every rank calls it, for as many bytes and the same purpose.
    #[staticmethod]
    #[pyo3(signature = (team, communicator, nbytes, *, deadline, purpose = 0))]
    fn form(
        py: Python<'_>,
        team: &Bound<'_, Team>,
        communicator: &Bound<'_, Communicator>,
        nbytes: u64,
        deadline: f64,
        purpose: u64,
    ) -> PyResult<Symmetric> {
        let team = team.get().live()?;
        let deadline = duration(deadline)?;
        let group = communicator.get().inner();
        let formed = waiting(py, || team.symmetric(group, nbytes, purpose, deadline))?;
        // All ranks are told the same.
        formed
            .map(|inner| Symmetric { inner })
            .map_err(|none| GpuError::new_err(none.to_string()))
    }

    #[getter]
    fn address(&self) -> u64 {
        self.inner.address()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }
}

/// The fused kernels of a team.
#[derive(Debug)]
#[pyclass(frozen, module = "weft", name = "_Norms")]
pub struct Norms {
    team: Py<Team>,
    norms: FusedNorms,
}

#[pymethods]
impl Norms {
    /// The driver compiles the kernels, which takes it seconds the first time on a machine.
    #[staticmethod]
    fn load(py: Python<'_>, team: Py<Team>) -> PyResult<Norms> {
        let live = team.get().live()?;
        let norms = waiting(py, || {
            let norms = FusedNorms::new(live.carrier()?.team());
            norms.map_err(|error| live.explain(error))
        })?;
        Ok(Norms { team, norms })
    }

    /// Puts a call on a stream. `scale` is of fp8 with one scale for all, where it is above zero; with `by_row` there is one for each row; with neither, results are of the elements of the input.
    #[expect(clippy::too_many_arguments, reason = "a call of its own for each would cost more")]
    fn call(
        &self,
        py: Python<'_>,
        rows: u32,
        hidden: u32,
        datatype: usize,
        epsilon: f32,
        scale: f32,
        by_row: bool,
        input: Place,
        residual: Place,
        weight: Place,
        residual_out: Place,
        output: Place,
        scales: Place,
        stream: u64,
    ) -> PyResult<()> {
        let team = self.team.get().live()?;
        let datatype = Datatype::ALL.get(datatype).copied();
        let norm = FusedNorm {
            rows,
            hidden,
            datatype: datatype.ok_or_else(|| invalid("a number that stands for nothing"))?,
            epsilon,
            output: match (by_row, scale) {
                (true, _) => Rounded::Fp8ByRow,
                (false, 0.0) => Rounded::Same,
                (false, scale) => Rounded::Fp8 { scale },
            },
        };
        let buffers = FusedBuffers {
            input: slice(input),
            residual: slice(residual),
            residual_out: slice(residual_out),
            weight: slice(weight),
            output: slice(output),
            scales: slice(scales),
        };
        waiting(py, || {
            let carrier = team.carrier()?;
            // SAFETY: whoever calls vouches for stream and memory: both are torch's, which keeps memory until the stream on which it is used has come past that.
            let put = unsafe { carrier.norm(stream, &self.norms, &norm, &buffers) };
            put.map_err(|error| team.explain(error))
        })
    }
}

/// Dispatch and combine for one kind of layer, with the memory that they need.
#[derive(Debug)]
#[pyclass(frozen, module = "weft", name = "_Experts")]
pub struct Experts {
    team: Py<Team>,
    moe: Moe,
    handle: Mutex<MoeHandle>,
    memory: weft::Symmetric,
}

/// Where parts of the memory begin.
const LINE: u64 = 256;

#[pymethods]
impl Experts {
    /// Every rank calls it, with the same numbers. Without `capacity` rows are in slots.
    #[staticmethod]
    #[pyo3(signature = (team, communicator, *, hidden, experts, top_k, tokens_max, capacity, narrow, deadline))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords")]
    fn form(
        py: Python<'_>,
        team: Py<Team>,
        communicator: &Bound<'_, Communicator>,
        hidden: u32,
        experts: u32,
        top_k: u32,
        tokens_max: u32,
        capacity: Option<u32>,
        narrow: bool,
        deadline: f64,
    ) -> PyResult<Experts> {
        let live = team.get().live()?;
        let settings = MoeSettings {
            hidden,
            experts,
            top_k,
            tokens_max,
            received: capacity.map_or(Received::Slots, |capacity| Received::Compact { capacity }),
            sent: if narrow { Sent::Fp8 } else { Sent::Bf16 },
        };
        let made = waiting(py, || {
            let team = live.carrier()?.team();
            Ok(Moe::new(team, settings).and_then(|moe| Ok((moe.handle()?, moe))))
        })?;
        let (handle, moe) = made.map_err(|error| moe_failed(py, &live, error))?;
        let bytes = parts(&moe).iter().map(|bytes| bytes.next_multiple_of(LINE)).sum();
        let deadline = duration(deadline)?;
        let group = communicator.get().inner();
        let formed = waiting(py, || live.symmetric(group, bytes, fingerprint(&settings), deadline))?;
        let memory = formed.map_err(|none| GpuError::new_err(none.to_string()))?;
        Ok(Experts {
            team,
            moe,
            handle: Mutex::new(handle),
            memory,
        })
    }

    /// Where rows, scales, experts and weights of rows, and results lie.
    fn places(&self) -> Vec<Place> {
        let mut at = self.memory.address();
        let place = |bytes: u64| {
            let place = (at, bytes);
            at += bytes.next_multiple_of(LINE);
            place
        };
        parts(&self.moe).map(place).to_vec()
    }

    /// Puts a dispatch on a stream, into the memory that is here.
    #[expect(clippy::too_many_arguments, reason = "a call of its own for each would cost more")]
    fn dispatch(
        &self,
        py: Python<'_>,
        tokens: u32,
        input: Place,
        experts: Place,
        weights: Place,
        counts: Place,
        stream: u64,
    ) -> PyResult<()> {
        let team = self.team.get().live()?;
        let [rows, scales, row_experts, row_weights, _] = self.known_places();
        let buffers = DispatchBuffers {
            tokens,
            input: slice(input),
            experts: slice(experts),
            weights: slice(weights),
            rows,
            scales,
            counts: slice(counts),
            row_experts,
            row_weights,
        };
        let put = waiting(py, || {
            let carrier = team.carrier()?;
            let mut handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
            let rank = carrier.rank();
            // SAFETY: whoever calls vouches for stream and memory, as for collectives; what others write is the team's.
            let put = || unsafe { self.moe.dispatch(stream, rank, &buffers, &mut handle) };
            // SAFETY: the same.
            Ok(unsafe { carrier.in_order(stream, put) })
        })?;
        put.map_err(|error| moe_failed(py, &team, error))
    }

    /// Puts a combine on a stream, out of the memory that is here.
    fn combine(&self, py: Python<'_>, weights: Place, output: Place, stream: u64) -> PyResult<()> {
        let team = self.team.get().live()?;
        let [.., results] = self.known_places();
        let buffers = CombineBuffers {
            input: results,
            weights: slice(weights),
            output: slice(output),
        };
        let put = waiting(py, || {
            let carrier = team.carrier()?;
            let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
            let rank = carrier.rank();
            // SAFETY: as for a dispatch.
            let put = || unsafe { self.moe.combine(stream, rank, &buffers, &handle) };
            // SAFETY: the same.
            Ok(unsafe { carrier.in_order(stream, put) })
        })?;
        put.map_err(|error| moe_failed(py, &team, error))
    }

    /// Raises what has become of calls that the stream has come past.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let team = self.team.get().live()?;
        let rank = team.carrier().map_err(|error| raise(py, &error))?.rank();
        self.moe.check(rank).map_err(|error| moe_failed(py, &team, error))
    }
}

impl Experts {
    fn known_places(&self) -> [DeviceSlice; 5] {
        let mut places = [DeviceSlice { address: 0, bytes: 0 }; 5];
        for (known, place) in places.iter_mut().zip(self.places()) {
            *known = slice(place);
        }
        places
    }
}

/// How long rows, scales, experts and weights of rows, and results are.
fn parts(moe: &Moe) -> [u64; 5] {
    let bytes = moe.shape().bytes();
    [
        bytes.rows,
        bytes.scales,
        bytes.row_experts,
        bytes.row_weights,
        bytes.results,
    ]
}

/// A number that is another one for other settings, so that ranks that disagree find out. It need not be kept from anybody.
fn fingerprint(settings: &MoeSettings) -> u64 {
    let capacity = match settings.received {
        Received::Slots => 0,
        Received::Compact { capacity } => capacity,
    };
    let narrow = u32::from(settings.sent == Sent::Fp8);
    let words = [
        settings.hidden,
        settings.experts,
        settings.top_k,
        settings.tokens_max,
        capacity,
        narrow,
    ];
    words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        (hash ^ u64::from(*word)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn moe_failed(py: Python<'_>, team: &DeviceTeam, error: MoeError) -> PyErr {
    match error {
        MoeError::Collective(error) => explained(py, team, error),
        MoeError::OverCapacity { rank, needed, capacity } => {
            over_capacity(py, error.to_string(), rank, needed, capacity)
        }
        _ => invalid(error.to_string()),
    }
}

fn explained(py: Python<'_>, team: &DeviceTeam, error: CollectiveError) -> PyErr {
    raise(py, &team.explain(error))
}
