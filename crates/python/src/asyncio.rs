//! From the agent's progress to Python's event loop.
//!
//! One thread turns the futures of all agents and hands what comes out to the event loops that wait for it. Waking it takes
//! neither a lock of Python's nor any time, so the progress thread never waits for Python.

use std::future::Future;
use std::pin::Pin;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use pyo3::prelude::*;

/// What a future gives back: the result for Python, made once Python is at hand.
pub type Outcome = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// A Python future of the running event loop that ends as `future` does.
pub fn future_of<'py>(
    py: Python<'py>,
    future: impl Future<Output = Outcome> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let awaited = event_loop.call_method0("create_future")?;
    let task = Arc::new(Task {
        turn: Mutex::new(Some(Box::pin(future))),
        event_loop: event_loop.unbind(),
        awaited: awaited.clone().unbind(),
    });
    // The thread takes tasks for as long as the process lives.
    let _ = turner()?.send(task);
    Ok(awaited)
}

struct Task {
    turn: Mutex<Option<Pin<Box<dyn Future<Output = Outcome> + Send>>>>,
    event_loop: Py<PyAny>,
    awaited: Py<PyAny>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        if let Ok(queue) = turner() {
            let _ = queue.send(self);
        }
    }
}

fn turner() -> PyResult<&'static Sender<Arc<Task>>> {
    static QUEUE: OnceLock<Sender<Arc<Task>>> = OnceLock::new();
    if let Some(queue) = QUEUE.get() {
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
    Ok(QUEUE.get_or_init(|| sender))
}

fn turn(task: &Arc<Task>) {
    let mut slot = task.turn.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(future) = slot.as_mut() else { return };
    let waker = Waker::from(Arc::clone(task));
    if let Poll::Ready(outcome) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
        *slot = None;
        drop(slot);
        // An event loop that was closed meanwhile has nobody waiting.
        let _ = Python::try_attach(|py| deliver(py, task, outcome));
    }
}

fn deliver(py: Python<'_>, task: &Task, outcome: Outcome) -> PyResult<()> {
    let (value, exception) = match outcome(py) {
        Ok(value) => (value, py.None()),
        Err(error) => (py.None(), error.into_value(py).into_any()),
    };
    let settle = wrap_pyfunction!(settle, py)?;
    let arguments = (settle, &task.awaited, value, exception);
    task.event_loop
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
