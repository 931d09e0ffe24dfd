//! What peers have told an agent, and who in Python waits for it.
//!
//! A notification must not be lost with a waiter that is cancelled, at whatever moment: also when it has been woken already and
//! has not run since. So waking a waiter hands it nothing. The notification lies in the inbox until some waiter runs and takes
//! it, as in `asyncio.Queue`.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use weft::fork::OfProcess;

use crate::agent::Agent;
use crate::asyncio::{Outcome, future_of};
use crate::errors::{Stopped, forked};
use crate::peer::Peer;

/// What a peer has told this agent.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Notification {
    peer: Py<Peer>,
    payload: Vec<u8>,
}

#[pymethods]
impl Notification {
    /// Who told it.
    #[getter]
    fn peer(&self, py: Python<'_>) -> Py<Peer> {
        self.peer.clone_ref(py)
    }

    /// What was told.
    #[getter]
    fn payload(&self) -> &[u8] {
        &self.payload
    }

    fn __repr__(&self) -> String {
        format!(
            "<weft.Notification from {:?}, {} bytes>",
            self.peer.get().inner.name(),
            self.payload.len()
        )
    }
}

/// An agent until it is closed, and what was told to it that nobody has taken yet. A forked child has no part in it.
#[derive(Debug)]
pub struct Inbox {
    own: OfProcess<Own>,
}

#[derive(Debug)]
struct Own {
    agent: RwLock<Option<weft::Agent>>,
    told: Mutex<VecDeque<weft::Notification>>,
    bell: Arc<Bell>,
}

impl Inbox {
    pub fn new(agent: weft::Agent) -> Inbox {
        Inbox {
            own: OfProcess::new(Own {
                agent: RwLock::new(Some(agent)),
                told: Mutex::default(),
                bell: Arc::default(),
            }),
        }
    }

    fn own(&self) -> PyResult<&Own> {
        self.own.get().map_err(forked)
    }

    pub fn agent(&self) -> PyResult<weft::Agent> {
        let agent = self.own()?.agent.read().unwrap_or_else(PoisonError::into_inner);
        agent
            .clone()
            .ok_or_else(|| Stopped::new_err("the agent has been closed"))
    }

    /// Stops the agent and ends every wait. In a forked child there is nothing to stop.
    pub fn close(&self) {
        if let Some(agent) = self.take() {
            agent.close();
        }
        if let Ok(own) = self.own.get() {
            own.bell.ring();
        }
    }

    /// Lets go of the agent, which ends with its last handle.
    pub fn take(&self) -> Option<weft::Agent> {
        let own = self.own.get().ok()?;
        let agent = own.agent.write().unwrap_or_else(PoisonError::into_inner).take();
        own.told().clear();
        agent
    }

    /// The next notification, if it comes within `timeout`.
    pub fn next(&self, py: Python<'_>, timeout: Duration) -> PyResult<Option<Notification>> {
        let (own, agent) = (self.own()?, self.agent()?);
        let deadline = agent.settings().deadline;
        let told = py.detach(|| {
            let left_over = own.told().pop_front();
            let told = left_over.or_else(|| agent.next_notification(timeout));
            // If the agent was closed meanwhile, this is its end, which waits for threads.
            drop(agent);
            told
        });
        let Some(told) = told else { return Ok(None) };
        let peer = Peer {
            inner: told.from,
            deadline,
        };
        Ok(Some(Notification {
            peer: Py::new(py, peer)?,
            payload: told.payload,
        }))
    }
}

impl Own {
    fn told(&self) -> MutexGuard<'_, VecDeque<weft::Notification>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is something for a waiter to run for; if not, the bell rings when there is.
    fn look(&self) -> bool {
        let agent = self.agent.read().unwrap_or_else(PoisonError::into_inner);
        let Some(agent) = &*agent else { return true };
        if !self.told().is_empty() {
            return true;
        }
        // A bell that hangs in the agent already rings for whatever comes after it was hung there.
        if std::mem::replace(&mut self.bell.state().hung, true) {
            return false;
        }
        let waker = Waker::from(self.bell.clone());
        match pin!(agent.notified()).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(told) => {
                self.told().push_back(told);
                self.bell.ring();
                true
            }
            Poll::Pending => false,
        }
    }
}

/// Wakes every waiter. It is all that the agent knows of them, and hangs in the agent at most once, however many come and go.
#[derive(Debug, Default)]
struct Bell {
    state: Mutex<BellState>,
}

#[derive(Debug, Default)]
struct BellState {
    hung: bool,
    waiters: HashMap<u64, Waker>,
    next_ticket: u64,
}

impl Bell {
    fn state(&self) -> MutexGuard<'_, BellState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        let waiters = {
            let mut state = self.state();
            state.hung = false;
            std::mem::take(&mut state.waiters)
        };
        waiters.into_values().for_each(Waker::wake);
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

/// Ends when there may be a notification to take, or the agent is closed. It does not keep the agent from being closed.
struct Waiting {
    inbox: Arc<Inbox>,
    ticket: u64,
}

impl Waiting {
    fn new(inbox: Arc<Inbox>) -> Waiting {
        let ticket = inbox.own.get().map_or(0, |own| {
            let mut state = own.bell.state();
            state.next_ticket += 1;
            state.next_ticket - 1
        });
        Waiting { inbox, ticket }
    }
}

impl Future for Waiting {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        let waker = context.waker().clone();
        let over = self.inbox.own.get().map_or(true, |own| {
            // Before looking, so that what comes in between wakes it.
            own.bell.state().waiters.insert(self.ticket, waker);
            own.look()
        });
        if over {
            return Poll::Ready(Box::new(|py| Ok(py.None())));
        }
        Poll::Pending
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Ok(own) = self.inbox.own.get() {
            own.bell.state().waiters.remove(&self.ticket);
        }
    }
}

/// What `notification_async` returns, for `await`: a loop of looking and waiting.
#[derive(Debug)]
#[pyclass(frozen)]
pub struct NextNotification {
    /// An agent that somebody waits for is not dropped.
    _agent: Py<Agent>,
    inbox: Arc<Inbox>,
    /// The iterator of the Python future that is awaited now.
    waiting: Mutex<Option<Py<PyAny>>>,
}

impl NextNotification {
    pub fn new(agent: Py<Agent>, inbox: Arc<Inbox>) -> NextNotification {
        NextNotification {
            _agent: agent,
            inbox,
            waiting: Mutex::default(),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl NextNotification {
    fn __await__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        loop {
            let waiting = self.waiting().take();
            if let Some(iterator) = waiting {
                match iterator.call_method0(py, "__next__") {
                    Ok(blocked_on) => {
                        *self.waiting() = Some(iterator);
                        return Ok(blocked_on);
                    }
                    Err(end) if end.is_instance_of::<PyStopIteration>(py) => {}
                    Err(error) => return Err(error),
                }
            }
            if let Some(told) = self.inbox.next(py, Duration::ZERO)? {
                return Err(PyStopIteration::new_err((Py::new(py, told)?,)));
            }
            let iterator = future_of(py, Waiting::new(self.inbox.clone()))?.call_method0("__await__")?;
            *self.waiting() = Some(iterator.unbind());
        }
    }
}
