//! Registered memory, and the two ways in which Python objects share theirs: the buffer protocol and DLPack.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyMemoryView};

use crate::errors::{invalid, raise};
use crate::waiting::waiting;

/// Memory that an agent has registered. It has the buffer protocol: `numpy.frombuffer(memory)`.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Memory {
    pub inner: weft::Memory,
    pub writable: bool,
    /// The agent's, for calls that name none.
    pub deadline: Duration,
}

#[pymethods]
impl Memory {
    /// How many bytes it has.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.len()
    }

    /// Whether peers on this host can map it instead of copying through the kernel.
    #[getter]
    fn mappable(&self) -> bool {
        self.inner.is_mappable()
    }

    /// Whether it may be changed, here and by peers.
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    /// What it is: `"host"`, `"gpu"`, `"file"` or `"object"`.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.inner.place() {
            weft::Place::Gpu { .. } => "gpu",
            weft::Place::File => "file",
            weft::Place::Object => "object",
            _ => "host",
        }
    }

    /// The GPU whose memory it is, by its number; `None` for other memory.
    #[getter]
    fn device(&self) -> Option<u16> {
        match self.inner.place() {
            weft::Place::Gpu { ordinal } => Some(ordinal),
            _ => None,
        }
    }

    /// How other libraries find memory of a GPU: `torch.as_tensor(memory, device="cuda")`.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let address = self.inner.device_address();
        let address = address.ok_or_else(|| PyAttributeError::new_err("this is host memory"))?;
        let described = PyDict::new(py);
        described.set_item("shape", (self.inner.len(),))?;
        described.set_item("typestr", "|u1")?;
        described.set_item("data", (address, !self.writable))?;
        described.set_item("version", 3)?;
        Ok(described)
    }

    /// What the word at `offset` holds: eight bytes, little-endian, at a multiple of eight.
    fn read_word(&self, py: Python<'_>, offset: u64) -> PyResult<u64> {
        self.inner.read_word(offset).map_err(|error| raise(py, &error))
    }

    /// Adds to the word at `offset`, wrapping around, and gives what it held. Atomic with the operations of all peers.
    fn fetch_add(&self, py: Python<'_>, offset: u64, value: u64) -> PyResult<u64> {
        self.may_change()?;
        self.inner.fetch_add(offset, value).map_err(|error| raise(py, &error))
    }

    /// Stores `new` in the word at `offset` if it is `expected`, and gives what it held. Atomic likewise.
    fn compare_swap(&self, py: Python<'_>, offset: u64, expected: u64, new: u64) -> PyResult<u64> {
        self.may_change()?;
        let swapped = self.inner.compare_swap(offset, expected, new);
        swapped.map_err(|error| raise(py, &error))
    }

    /// Withdraws and releases the memory; afterwards no peer touches it.
    #[pyo3(signature = (timeout = None))]
    fn release(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = within(timeout, self.deadline)?;
        waiting(py, || self.inner.release(timeout))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.inner.len())?)
    }

    fn __repr__(&self) -> String {
        let kind = match self.kind() {
            "file" => "of a file",
            "object" => "of an object",
            _ if self.inner.is_mappable() => "allocated",
            _ => "registered",
        };
        format!("<weft.Memory, {} bytes, {kind}>", self.inner.len())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        waiting(py, || match self.inner.release(self.deadline) {
            // A forked child that leaves the block has nothing to release.
            Err(weft::Error::Forked(_)) => Ok(()),
            released => released,
        })
    }

    /// # Safety
    /// Called by Python with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get();
        if memory.inner.as_ptr().is_null() {
            return Err(PyBufferError::new_err(match memory.kind() {
                "file" | "object" => "a file or an object has no memory to look into: copy from it",
                _ => "this memory is a GPU's; torch and others find it by __cuda_array_interface__",
            }));
        }
        let exported = (memory.inner.as_ptr(), memory.inner.len(), !memory.writable);
        // SAFETY: the pointer is good for the length while the object lives, and the view keeps the object alive.
        unsafe { export(slf.as_any(), exported, view, flags) }
    }
}

impl Memory {
    fn may_change(&self) -> PyResult<()> {
        if self.writable {
            Ok(())
        } else {
            Err(invalid("this memory is read-only, so nothing in it can be changed"))
        }
    }
}

/// Fills a view of memory that `owner` keeps alive.
///
/// # Safety
/// The memory stays valid while `owner` lives, and `view` is what Python passed.
pub unsafe fn export(
    owner: &Bound<'_, PyAny>,
    (start, len, readonly): (*mut u8, u64, bool),
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("no view was given"));
    }
    let len = ffi::Py_ssize_t::try_from(len)?;
    // SAFETY: the view is valid, as the caller says; Python's own function fills it and takes a reference to the owner.
    let filled = unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start.cast(), len, readonly.into(), flags) };
    if filled == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(owner.py()))
    }
}

/// The memory of a Python object, and what keeps it where it is.
pub struct Shared {
    pub start: *mut u8,
    pub len: usize,
    /// The GPU that it is memory of, by its number.
    pub device: Option<u16>,
    /// Dropped by whichever thread lets go of the memory last; without Python at hand, the reference is given back later.
    pub owner: Py<PyAny>,
}

/// The memory behind anything with the buffer protocol or DLPack. It must be contiguous.
pub fn of_object(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Shared> {
    match PyMemoryView::from(object) {
        Ok(view) => of_buffer(&view, writable),
        Err(_) if object.hasattr("__dlpack__")? => of_dlpack(object),
        Err(_) if object.hasattr("__cuda_array_interface__")? => of_cuda_array(object, writable),
        Err(_) => Err(invalid(
            "only objects with the buffer protocol, DLPack or __cuda_array_interface__ can be registered",
        )),
    }
}

fn of_buffer(view: &Bound<'_, PyMemoryView>, writable: bool) -> PyResult<Shared> {
    let buffer = PyUntypedBuffer::get(view.as_any())?;
    if !buffer.is_c_contiguous() {
        return Err(invalid("only contiguous memory can be registered"));
    }
    if writable && buffer.readonly() {
        return Err(invalid("this memory is read-only: register it with writable=False"));
    }
    // The memory view itself holds on to the object's memory, and, unlike the buffer, can be dropped by any thread at once.
    Ok(Shared {
        start: buffer.buf_ptr().cast(),
        len: buffer.len_bytes(),
        device: None,
        owner: view.clone().into_any().unbind(),
    })
}

/// The beginning of DLPack's `DLManagedTensor`, as its specification lays it out.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype_code: u8,
    dtype_bits: u8,
    dtype_lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

const DL_CPU: i32 = 1;
const DL_CUDA: i32 = 2;
/// Host memory that CUDA has pinned.
const DL_CUDA_HOST: i32 = 3;
const ELSEWHERE: &str = "only tensors in host memory or on a CUDA device can be registered";

fn of_dlpack(object: &Bound<'_, PyAny>) -> PyResult<Shared> {
    let (device, _): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    if ![DL_CPU, DL_CUDA, DL_CUDA_HOST].contains(&device) {
        return Err(invalid(ELSEWHERE));
    }
    // Asked for nothing newer, everyone hands out the first layout, which is called "dltensor".
    let capsule = object.call_method0("__dlpack__")?.cast_into::<PyCapsule>()?;
    let pointer = capsule.pointer_checked(Some(c"dltensor"))?.cast::<DlTensor>();
    // SAFETY: a capsule of this name points to a DLManagedTensor, which begins with a DLTensor; both live until the capsule
    // is consumed or dropped, and we hold it.
    let tensor = unsafe { pointer.as_ref() };
    // Some say of pinned memory that it is the host's in one place, and CUDA's in the other.
    let is_host = |kind: i32| kind == DL_CPU || kind == DL_CUDA_HOST;
    if tensor.device_type != device && !(is_host(tensor.device_type) && is_host(device)) || tensor.ndim < 0 {
        return Err(invalid(ELSEWHERE));
    }
    let ordinal = u16::try_from(tensor.device_id).map_err(|_| invalid(ELSEWHERE));
    let on_device = (device == DL_CUDA).then_some(ordinal).transpose()?;
    let dimensions = tensor.ndim as usize;
    let list = |start: *const i64| -> Vec<i64> {
        if start.is_null() {
            return Vec::new();
        }
        // SAFETY: DLPack promises `ndim` numbers wherever the pointer is not null.
        unsafe { std::slice::from_raw_parts(start, dimensions) }.to_vec()
    };
    let (shape, strides) = (list(tensor.shape), list(tensor.strides));
    let mut elements: i64 = 1;
    for (index, extent) in shape.iter().enumerate().rev() {
        // The stride of a dimension with one element, or none, says nothing.
        if *extent > 1 && strides.get(index).is_some_and(|stride| *stride != elements) {
            return Err(invalid("only contiguous memory can be registered"));
        }
        elements = elements
            .checked_mul(*extent)
            .filter(|count| *count >= 0)
            .ok_or_else(|| invalid("a tensor too large"))?;
    }
    let bits = u64::from(tensor.dtype_bits) * u64::from(tensor.dtype_lanes);
    let bytes = u64::try_from(elements)?
        .checked_mul(bits)
        .ok_or_else(|| invalid("a tensor too large"))?
        .div_ceil(8);
    let offset = usize::try_from(tensor.byte_offset)?;
    let start = tensor.data.cast::<u8>().wrapping_add(offset);
    Ok(Shared {
        start,
        len: usize::try_from(bytes)?,
        device: on_device,
        owner: capsule.into_any().unbind(),
    })
}

/// Numba's way, and that of libraries that do not know DLPack. It does not name the device; the driver knows it.
fn of_cuda_array(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Shared> {
    let described = object.getattr("__cuda_array_interface__")?.cast_into::<PyDict>()?;
    let item = |name: &str| {
        let found = described.get_item(name)?;
        found.ok_or_else(|| invalid(format!("__cuda_array_interface__ without {name}")))
    };
    if described.get_item("strides")?.is_some_and(|strides| !strides.is_none()) {
        return Err(invalid("only contiguous memory can be registered"));
    }
    let ((address, read_only), shape): ((u64, bool), Vec<u64>) = (item("data")?.extract()?, item("shape")?.extract()?);
    if writable && read_only {
        return Err(invalid("this memory is read-only: register it with writable=False"));
    }
    let typestr: String = item("typestr")?.extract()?;
    let size: u64 = typestr
        .get(2..)
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| invalid(format!("a type {typestr:?} in __cuda_array_interface__")))?;
    let bytes = shape.iter().try_fold(size, |bytes, extent| bytes.checked_mul(*extent));
    let bytes = bytes.ok_or_else(|| invalid("a tensor too large"))?;
    // It may load the driver, which takes its time.
    let found = object.py().detach(|| weft::Device::of_address(address));
    Ok(Shared {
        start: address as *mut u8,
        len: usize::try_from(bytes)?,
        device: Some(found.map_err(|error| raise(object.py(), &error.into()))?),
        owner: object.clone().unbind(),
    })
}

/// What a transfer has to come after: all that is on a stream of `memory`'s device now. A stream is its handle, or anything with `cuda_stream`.
pub fn after_stream(stream: Option<&Bound<'_, PyAny>>, memory: &Memory) -> PyResult<Option<Arc<dyn weft::Ready>>> {
    let Some(stream) = stream.filter(|stream| !stream.is_none()) else {
        return Ok(None);
    };
    let handle: u64 = match stream.getattr_opt("cuda_stream")? {
        Some(handle) => handle.extract()?,
        None => stream.extract()?,
    };
    let ordinal = memory
        .device()
        .ok_or_else(|| invalid("a stream is for memory of a GPU, and this is the host's"))?;
    let recorded = stream.py().detach(|| {
        let device = weft::Device::open(ordinal)?;
        // SAFETY: the caller says that it is a stream of this device, and keeps it.
        unsafe { weft::StreamEvent::record(&device, handle) }
    });
    let event = recorded.map_err(|error| raise(stream.py(), &error.into()))?;
    Ok(Some(Arc::new(weft::AfterStream::new(event))))
}

pub fn duration(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| invalid(format!("{seconds} seconds is not a duration")))
}

/// The seconds that a call was given, or the agent's deadline.
pub fn within(timeout: Option<f64>, deadline: Duration) -> PyResult<Duration> {
    timeout.map_or(Ok(deadline), duration)
}
