//! A peer's memory, read where it lies.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use weft::fork::Origin;

use crate::errors::{LeaseEnded, forked};
use crate::memory::export;

/// A peer's region, mapped read-only: `numpy.frombuffer(borrowed)`.
///
/// The end of the `with` gives the lease back, or the last reference does. Views that are still out keep it until they go.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Borrowed {
    nbytes: u64,
    origin: Origin,
    lent: Mutex<Lent>,
}

#[derive(Debug)]
struct Lent {
    /// Empty once the lease has been given back.
    inner: Option<Arc<weft::Borrowed>>,
    /// How many views are out. They need the pages, so the last one gives the lease back where `release` could not.
    views: usize,
    released: bool,
}

impl Borrowed {
    pub fn new(inner: weft::Borrowed) -> Borrowed {
        Borrowed {
            nbytes: inner.len(),
            origin: Origin::here(),
            lent: Mutex::new(Lent {
                inner: Some(Arc::new(inner)),
                views: 0,
                released: false,
            }),
        }
    }

    fn lent(&self) -> MutexGuard<'_, Lent> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes who needs the pages, and gives the lease back if nobody does any more.
    fn let_go(&self, py: Python<'_>, change: impl FnOnce(&mut Lent)) {
        let unneeded = {
            let mut lent = self.lent();
            change(&mut lent);
            let needed = lent.views > 0 || !lent.released;
            if needed { None } else { lent.inner.take() }
        };
        py.detach(|| drop(unneeded));
    }
}

#[pymethods]
impl Borrowed {
    /// How many bytes it has.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Whether the lease still holds and has not been given back.
    #[getter]
    fn held(&self, py: Python<'_>) -> bool {
        let inner = {
            let lent = self.lent();
            lent.inner.clone().filter(|_| !lent.released)
        };
        py.detach(|| inner.is_some_and(|inner| inner.remaining().is_some()))
    }

    /// Gives the lease back: now, or with the last view that is still out. There are no new views from now on.
    fn release(&self, py: Python<'_>) {
        self.let_go(py, |lent| lent.released = true);
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.nbytes)?)
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.release(py);
    }

    /// # Safety
    /// Called by Python with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (py, borrowed) = (slf.py(), slf.get());
        borrowed.origin.check().map_err(forked)?;
        let inner = {
            let mut lent = borrowed.lent();
            let Some(inner) = lent.inner.clone().filter(|_| !lent.released) else {
                return Err(LeaseEnded::new_err("the lease has been given back"));
            };
            lent.views += 1;
            inner
        };
        let start = inner.as_ptr().cast_mut();
        let held = py.detach(move || inner.remaining().is_some());
        let filled = if held {
            // SAFETY: the pages stay mapped while a view is counted, and the view, which is read-only, keeps the object alive.
            unsafe { export(slf.as_any(), (start, borrowed.nbytes, true), view, flags) }
        } else {
            Err(LeaseEnded::new_err("the lease is over"))
        };
        if filled.is_err() {
            borrowed.let_go(py, |lent| lent.views -= 1);
        }
        filled
    }

    /// # Safety
    /// Called by Python once for each view that was filled.
    unsafe fn __releasebuffer__(&self, py: Python<'_>, _view: *mut ffi::Py_buffer) {
        self.let_go(py, |lent| lent.views -= 1);
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state = if self.held(py) { "held" } else { "over" };
        format!("<weft.Borrowed, {} bytes, {state}>", self.nbytes)
    }
}
