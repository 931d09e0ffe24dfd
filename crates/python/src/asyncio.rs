//! From the agent's progress to Python's event loop.
//!
//! One thread turns the futures of all agents and hands what comes out to the event loops that wait for it. Waking it takes
//! neither a lock of Python's nor any time, so the progress thread never waits for Python.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use pyo3::PyClass;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use weft::fork::{OfProcess, PerProcess};

use crate::errors::raise;

/// What a future gives back: the result for Python, made once Python is at hand.
pub type Outcome = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// A Python future of the running event loop that ends as `future` does. Cancelling it drops `future`.
pub fn future_of<'py>(
    py: Python<'py>,
    future: impl Future<Output = Outcome> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let awaited = event_loop.call_method0("create_future")?;
    let task = Arc::new(Task {
        pending: OfProcess::new(Mutex::new(Some(Pending {
            future: Box::pin(future),
            event_loop: event_loop.unbind(),
            awaited: awaited.clone().unbind(),
        }))),
    });
    awaited.call_method1("add_done_callback", (Forget { task: task.clone() },))?;
    // The thread takes tasks for as long as the process lives.
    let _ = turner()?.send(task);
    Ok(awaited)
}

/// A coroutine that does something which only waits, in a thread of its own. Cancelling it ends the wait.
pub fn in_thread<'py, T, C>(
    py: Python<'py>,
    work: impl FnOnce() -> Result<T, weft::Error> + Send + 'static,
    give: impl FnOnce(T) -> C + Send + 'static,
) -> PyResult<Bound<'py, PyAny>>
where
    T: Send + 'static,
    C: Into<PyClassInitializer<C>> + PyClass,
{
    let begin = move |py: Python<'_>| {
        let turned = Waited::begin(work)?;
        let ended = async move {
            let outcome = turned.await;
            let give: Outcome = Box::new(move |py| {
                let value = outcome.map_err(|error| raise(py, &error))?;
                Ok(Py::new(py, give(value))?.into_any())
            });
            give
        };
        Ok(future_of(py, ended)?.unbind())
    };
    let begin = Begin {
        begin: Mutex::new(Some(Box::new(begin))),
    };
    py.import("weft._awaited")?.call_method1("awaited", (begin,))
}

/// Begins something when it is first awaited, inside the event loop that waits for it.
#[pyclass(frozen)]
struct Begin {
    begin: Mutex<Option<Beginning>>,
}

type Beginning = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

#[pymethods]
impl Begin {
    fn __call__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let begin = self.begin.lock().unwrap_or_else(PoisonError::into_inner).take();
        match begin {
            Some(begin) => begin(py),
            None => Err(PyRuntimeError::new_err("this has been awaited already")),
        }
    }
}

/// Something that a thread waits for. Dropping it ends that wait.
struct Waited<T> {
    slot: Arc<Mutex<WaitedSlot<T>>>,
    unwanted: Arc<AtomicBool>,
}

struct WaitedSlot<T> {
    outcome: Option<Result<T, weft::Error>>,
    waker: Option<Waker>,
}

impl<T: Send + 'static> Waited<T> {
    fn begin(work: impl FnOnce() -> Result<T, weft::Error> + Send + 'static) -> PyResult<Waited<T>> {
        let waited = Waited {
            slot: Arc::new(Mutex::new(WaitedSlot {
                outcome: None,
                waker: None,
            })),
            unwanted: Arc::default(),
        };
        let (slot, unwanted) = (waited.slot.clone(), waited.unwanted.clone());
        let wait = move || {
            let outcome = weft::interruptible(Rc::new(move || unwanted.load(Ordering::Acquire)), work);
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            slot.outcome = Some(outcome);
            let waker = slot.waker.take();
            drop(slot);
            waker.into_iter().for_each(Waker::wake);
        };
        std::thread::Builder::new()
            .name("weft-waiting".to_owned())
            .spawn(wait)?;
        Ok(waited)
    }
}

impl<T> Future for Waited<T> {
    type Output = Result<T, weft::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        match slot.outcome.take() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                slot.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<T> Drop for Waited<T> {
    fn drop(&mut self) {
        self.unwanted.store(true, Ordering::Release);
    }
}

/// Something to turn until it is done or nobody waits for it any more. Wakers of it may linger, so it holds nothing then.
struct Task {
    pending: OfProcess<Mutex<Option<Pending>>>,
}

struct Pending {
    future: Pin<Box<dyn Future<Output = Outcome> + Send>>,
    event_loop: Py<PyAny>,
    awaited: Py<PyAny>,
}

impl Task {
    fn take(&self) -> Option<Pending> {
        let pending = self.pending.get().ok()?;
        pending.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        if let Ok(queue) = turner() {
            let _ = queue.send(self);
        }
    }
}

/// Called by the event loop when what was awaited is done, which a cancelled future is before its task.
#[pyclass(frozen)]
struct Forget {
    task: Arc<Task>,
}

#[pymethods]
impl Forget {
    fn __call__(&self, py: Python<'_>, _awaited: &Bound<'_, PyAny>) {
        py.detach(|| drop(self.task.take()));
    }
}

fn turner() -> PyResult<&'static Sender<Arc<Task>>> {
    // A forked child has no thread of its parent's, and starts its own.
    static QUEUE: PerProcess<OnceLock<Sender<Arc<Task>>>> = PerProcess::new();
    let known = QUEUE.get_or_make(OnceLock::new);
    if let Some(queue) = known.get() {
        return Ok(queue);
    }
    let (sender, receiver) = channel::<Arc<Task>>();
    std::thread::Builder::new()
        .name("weft-asyncio".to_owned())
        .spawn(move || {
            for task in receiver {
                turn(&task);
            }
        })?;
    Ok(known.get_or_init(|| sender))
}

fn turn(task: &Arc<Task>) {
    let Ok(pending) = task.pending.get() else { return };
    let mut slot = pending.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(pending) = slot.as_mut() else { return };
    let waker = Waker::from(Arc::clone(task));
    if let Poll::Ready(outcome) = pending.future.as_mut().poll(&mut Context::from_waker(&waker)) {
        let ended = slot.take();
        drop(slot);
        // An event loop that was closed meanwhile has nobody waiting.
        let _ = Python::try_attach(|py| ended.map(|pending| deliver(py, &pending, outcome)));
    }
}

fn deliver(py: Python<'_>, pending: &Pending, outcome: Outcome) -> PyResult<()> {
    let (value, exception) = match outcome(py) {
        Ok(value) => (value, py.None()),
        Err(error) => (py.None(), error.into_value(py).into_any()),
    };
    let settle = wrap_pyfunction!(settle, py)?;
    let arguments = (settle, &pending.awaited, value, exception);
    pending
        .event_loop
        .call_method1(py, "call_soon_threadsafe", arguments)
        .map(drop)
}

/// Runs on the event loop. Whoever waited may have been cancelled meanwhile.
#[pyfunction]
fn settle(awaited: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>, exception: &Bound<'_, PyAny>) -> PyResult<()> {
    if awaited.call_method0("done")?.is_truthy()? {
        return Ok(());
    }
    match exception.is_none() {
        true => awaited.call_method1("set_result", (value,)),
        false => awaited.call_method1("set_exception", (exception,)),
    }
    .map(drop)
}
