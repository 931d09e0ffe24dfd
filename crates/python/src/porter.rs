//! What an engine's scheduler hands over and does not wait for: `weft.Porter`; and the order in which blocks leave, for engines that keep them: `weft.Line`.

use std::collections::HashMap;
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use weft::store::{self, BlockAt, BlockId, Errand, Hint, PorterOptions};

use crate::errors::{invalid, raise};
use crate::memory::{Memory, duration};
use crate::store::{Space, Store};
use crate::transfer::SIGNAL_CHECK;

/// Carries batches of blocks between an engine's memory and a store, on a thread of its own. Blocks are called by the engine's keys.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Porter {
    inner: Mutex<Option<Arc<store::Porter>>>,
}

impl Drop for Porter {
    fn drop(&mut self) {
        // It waits for its thread, and Python may go on meanwhile.
        let porter = lock(&self.inner).take();
        Python::try_attach(|py| py.detach(|| drop(porter)));
    }
}

/// An errand that has ended: its number, which blocks are where they were to be, bytes, seconds, and why not all are.
type Ended = (u64, Vec<bool>, u64, f64, Option<String>);

/// A block that has come or gone: its key, whether it is there now, the tier's number and what it is made of.
type Event = (Py<PyBytes>, bool, usize, &'static str);

impl Porter {
    fn with<T>(&self, ask: impl FnOnce(&store::Porter) -> Result<T, weft::Error>) -> PyResult<Result<T, weft::Error>> {
        // Who waits for it keeps nobody else from asking.
        let porter = lock(&self.inner).clone();
        match porter {
            Some(porter) => Ok(ask(&porter)),
            None => Err(invalid("the porter has been closed")),
        }
    }

    fn send(&self, py: Python<'_>, job: u64, errand: Errand) -> PyResult<()> {
        let sent = self.with(|porter| porter.send(job, errand))?;
        sent.map_err(|error| raise(py, &error))
    }
}

#[pymethods]
impl Porter {
    #[new]
    #[pyo3(signature = (store, space, *, queue = None, under_way = None, events = false))]
    fn new(
        py: Python<'_>,
        store: &Store,
        space: &Space,
        queue: Option<u64>,
        under_way: Option<u64>,
        events: bool,
    ) -> PyResult<Porter> {
        let defaults = PorterOptions::default();
        let options = PorterOptions {
            queue_bytes: queue.unwrap_or(defaults.queue_bytes),
            under_way_bytes: under_way.unwrap_or(defaults.under_way_bytes),
            names: events,
        };
        let porter = store::Porter::new(&store.live()?, &space.inner, options);
        Ok(Porter {
            inner: Mutex::new(Some(Arc::new(porter.map_err(|error| raise(py, &error))?))),
        })
    }

    /// Puts blocks that lie at these offsets, one after the other in a prompt; the first follows `after`, where that is given.
    #[pyo3(signature = (job, memory, keys, offsets, *, after = None))]
    fn put(
        &self,
        py: Python<'_>,
        job: u64,
        memory: &Memory,
        keys: Vec<Vec<u8>>,
        offsets: Vec<u64>,
        after: Option<Vec<u8>>,
    ) -> PyResult<()> {
        let mut records = records(memory, keys, offsets)?;
        if let Some(first) = records.first_mut() {
            first.after = after;
        }
        self.send(py, job, Errand::Put(records))
    }

    /// Reads blocks to these offsets. Where one is not done, anything lies there.
    fn get(&self, py: Python<'_>, job: u64, memory: &Memory, keys: Vec<Vec<u8>>, offsets: Vec<u64>) -> PyResult<()> {
        writable(memory)?;
        self.send(py, job, Errand::Get(records(memory, keys, offsets)?))
    }

    /// The same as `put`, each block from the beginning of a memory of its own.
    fn put_each(&self, py: Python<'_>, job: u64, memories: Vec<PyRef<'_, Memory>>, keys: Vec<Vec<u8>>) -> PyResult<()> {
        self.send(py, job, Errand::Put(each(&memories, keys)?))
    }

    /// The same as `get`, each block to the beginning of a memory of its own.
    fn get_each(&self, py: Python<'_>, job: u64, memories: Vec<PyRef<'_, Memory>>, keys: Vec<Vec<u8>>) -> PyResult<()> {
        for memory in &memories {
            writable(memory)?;
        }
        self.send(py, job, Errand::Get(each(&memories, keys)?))
    }

    /// Asks which of these are there.
    fn find(&self, py: Python<'_>, job: u64, keys: Vec<Vec<u8>>) -> PyResult<()> {
        self.send(py, job, Errand::Find(keys))
    }

    /// Removes these, unless they are held or others follow them.
    fn evict(&self, py: Python<'_>, job: u64, keys: Vec<Vec<u8>>) -> PyResult<()> {
        self.send(py, job, Errand::Evict(keys))
    }

    /// A request has gone through these, from its head on; `over` says that its session will not come back. Nothing is told of it.
    #[pyo3(signature = (keys, *, over = false))]
    fn used(&self, py: Python<'_>, keys: Vec<Vec<u8>>, over: bool) -> PyResult<()> {
        let hint = Hint {
            over,
            ..Hint::default()
        };
        self.send(py, 0, Errand::Use { keys, hint })
    }

    /// Whether a block is there, by what the index says now.
    fn has(&self, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        self.with(|porter| porter.has(key))?.map_err(|error| raise(py, &error))
    }

    /// What has ended since the last time.
    fn ended(&self) -> PyResult<Vec<Ended>> {
        let ended = self.with(|porter| Ok(porter.take_ended()))?.unwrap_or_default();
        let told = |ended: store::ErrandEnd| (ended.job, ended.done, ended.bytes, ended.took.as_secs_f64(), ended.why);
        Ok(ended.into_iter().map(told).collect())
    }

    /// What has come and gone, no more than `most` of it; how many events were lost; and how many could not be named so far.
    #[pyo3(signature = (most = 4096))]
    fn events(&self, py: Python<'_>, most: usize) -> PyResult<(Vec<Event>, u64, u64)> {
        let taken = self.with(|porter| porter.take_events(most))?;
        let (events, lost, unnamed) = taken.map_err(|error| raise(py, &error))?;
        let told =
            |(key, stored, tier, kind): store::NamedEvent| (PyBytes::new(py, &key).unbind(), stored, tier, kind.name());
        Ok((events.into_iter().map(told).collect(), lost, unnamed))
    }

    /// A descriptor that is readable when something has ended that nobody has taken.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.with(|porter| Ok(porter.descriptor().as_raw_fd()))?.unwrap_or(-1))
    }

    /// Whether nothing waits and nothing is under way.
    #[getter]
    fn idle(&self) -> PyResult<bool> {
        Ok(self.with(|porter| Ok(porter.is_idle()))?.unwrap_or(true))
    }

    /// Errands that ended at once because they did not fit.
    #[getter]
    fn refused(&self) -> PyResult<u64> {
        Ok(self.with(|porter| Ok(porter.refused()))?.unwrap_or(0))
    }

    /// Waits until nothing waits and nothing is under way, at most so many seconds; says whether that came about.
    fn drain(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let end = Instant::now() + duration(timeout)?;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let wait = left.min(SIGNAL_CHECK);
            let drained = py
                .detach(|| self.with(|porter| Ok(porter.drain(wait))))?
                .unwrap_or(true);
            if drained || left <= SIGNAL_CHECK {
                return Ok(drained);
            }
            py.check_signals()?;
        }
    }

    /// Ends what is under way; what waits comes to nothing.
    fn close(&self, py: Python<'_>) {
        let porter = lock(&self.inner).take();
        py.detach(|| drop(porter));
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}

fn writable(memory: &Memory) -> PyResult<()> {
    match memory.writable {
        true => Ok(()),
        false => Err(invalid("this memory is read-only, so nothing can be read into it")),
    }
}

fn records(memory: &Memory, keys: Vec<Vec<u8>>, offsets: Vec<u64>) -> PyResult<Vec<BlockAt>> {
    if keys.len() != offsets.len() {
        return Err(invalid(format!("{} keys, and {} offsets", keys.len(), offsets.len())));
    }
    let record = |(key, offset)| BlockAt {
        key,
        memory: memory.inner.clone(),
        offset,
        after: None,
    };
    Ok(keys.into_iter().zip(offsets).map(record).collect())
}

fn each(memories: &[PyRef<'_, Memory>], keys: Vec<Vec<u8>>) -> PyResult<Vec<BlockAt>> {
    if keys.len() != memories.len() {
        return Err(invalid(format!("{} keys, and {} memories", keys.len(), memories.len())));
    }
    let record = |(key, memory): (Vec<u8>, &PyRef<'_, Memory>)| BlockAt {
        key,
        memory: memory.inner.clone(),
        offset: 0,
        after: None,
    };
    Ok(keys.into_iter().zip(memories).map(record).collect())
}

/// Who leaves next of blocks that an engine keeps, by one of the store's policies.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Line {
    inner: Mutex<Names>,
}

#[derive(Debug)]
struct Names {
    line: store::BlockLine,
    space: store::Space,
    keys: HashMap<BlockId, Vec<u8>>,
}

impl Names {
    fn id(&self, py: Python<'_>, key: &[u8]) -> PyResult<BlockId> {
        self.space.key(key).map_err(|error| raise(py, &error))
    }

    fn ids(&self, py: Python<'_>, keys: &[Vec<u8>]) -> PyResult<Vec<BlockId>> {
        keys.iter().map(|key| self.id(py, key)).collect()
    }
}

#[pymethods]
impl Line {
    #[new]
    #[pyo3(signature = (blocks, policy = "adaptive"))]
    fn new(blocks: usize, policy: &str) -> PyResult<Line> {
        let kind: store::Kind = policy
            .parse()
            .map_err(|error: store::UnknownPolicy| invalid(error.to_string()))?;
        Ok(Line {
            inner: Mutex::new(Names {
                line: store::BlockLine::new(kind, blocks),
                space: store::Space::nameless(),
                keys: HashMap::new(),
            }),
        })
    }

    /// A block has come, and may leave; with `pinned` it may not yet.
    #[pyo3(signature = (key, *, pinned = false))]
    fn insert(&self, py: Python<'_>, key: &[u8], pinned: bool) -> PyResult<()> {
        let mut names = lock(&self.inner);
        let id = names.id(py, key)?;
        let inserted = names.line.insert(id);
        inserted.map_err(|full| invalid(full.to_string()))?;
        names.keys.insert(id, key.to_vec());
        names.line.pin(&id, pinned);
        Ok(())
    }

    /// It must stay, or may leave again. `False` where it is not there, or was so already.
    fn pin(&self, py: Python<'_>, key: &[u8], pinned: bool) -> PyResult<bool> {
        let mut names = lock(&self.inner);
        let id = names.id(py, key)?;
        Ok(names.line.pin(&id, pinned))
    }

    /// It is gone for a reason of its own. `False` where it was not there.
    fn remove(&self, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        let mut names = lock(&self.inner);
        let id = names.id(py, key)?;
        names.keys.remove(&id);
        Ok(names.line.remove(&id))
    }

    /// A request has gone through these, from its head on; those that are not here are passed over.
    #[pyo3(signature = (keys, *, over = false))]
    fn request(&self, py: Python<'_>, keys: Vec<Vec<u8>>, over: bool) -> PyResult<()> {
        let mut names = lock(&self.inner);
        let ids = names.ids(py, &keys)?;
        names.line.request(&ids, over);
        Ok(())
    }

    /// So many leave, and none of the kept; `None` where there are not as many.
    fn leave(&self, py: Python<'_>, count: usize, kept: Vec<Vec<u8>>) -> PyResult<Option<Vec<Py<PyBytes>>>> {
        let mut names = lock(&self.inner);
        let kept = names.ids(py, &kept)?;
        let Some(gone) = names.line.leave(count, &kept) else {
            return Ok(None);
        };
        let mut keys = Vec::with_capacity(gone.len());
        for id in gone {
            let key = names.keys.remove(&id).unwrap_or_default();
            keys.push(PyBytes::new(py, &key).unbind());
        }
        Ok(Some(keys))
    }

    fn __len__(&self) -> usize {
        lock(&self.inner).line.len()
    }

    /// How many may leave.
    #[getter]
    fn idle(&self) -> usize {
        lock(&self.inner).line.idle()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
