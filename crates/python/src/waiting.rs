//! Calls that wait: other Python threads run meanwhile, and whoever sits at the keyboard can end them.

use std::cell::RefCell;
use std::rc::Rc;

use pyo3::prelude::*;

use crate::errors::raise;

thread_local! {
    /// What the handler of a signal has raised while this thread waited: `KeyboardInterrupt`, as a rule.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Made once a thread: calls are often shorter than an allocation.
    static IS_WANTED: Rc<dyn Fn() -> bool> = Rc::new(has_signal);
}

/// Does something that may wait. Ctrl-C ends the wait, and what was begun is given up.
pub fn waiting<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, weft::Error> + Send) -> PyResult<T> {
    waiting_for(py, work)?.map_err(|error| raise(py, &error))
}

/// The same for work whose outcome is the caller's to tell.
pub fn waiting_for<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    let done = py.detach(|| weft::interruptible(IS_WANTED.with(Rc::clone), work));
    match RAISED.take() {
        // Whatever came of the work: an exception of a signal is not to be lost.
        Some(raised) => {
            py.detach(|| drop(done));
            Err(raised)
        }
        None => Ok(done),
    }
}

/// Whether a signal has come whose handler raises something. Python runs handlers on its main thread and nowhere else.
fn has_signal() -> bool {
    let looked = Python::try_attach(|py| py.check_signals());
    match looked {
        Some(Ok(())) => false,
        Some(Err(raised)) => {
            RAISED.set(Some(raised));
            true
        }
        // The interpreter is going away.
        None => true,
    }
}
