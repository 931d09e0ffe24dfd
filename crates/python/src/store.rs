//! A store of KV blocks: `weft.Store`.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use weft::store::{
    self, Block, BlockId, BlockShape, Condition, Durability, FileTier, GetOutcome, Hint, HitRule, Parent, Part, Purged,
    PutOutcome, Wanted, WriteTo,
};

use crate::agent::Agent;
use crate::asyncio::{Outcome, future_of};
use crate::errors::{TimedOut, invalid, raise};
use crate::memory::{Memory, duration};
use crate::transfer::SIGNAL_CHECK;
use crate::waiting::waiting;

/// A block that has come or gone: its id, whether it is there now, the tier's number and what that is made of.
type Event<'py> = (Bound<'py, PyBytes>, bool, usize, &'static str);

/// Of a part: bytes, and of how many trailing blocks it must be there; of all, where nothing is said.
#[derive(FromPyObject)]
enum PartOf {
    Bytes(u32),
    Trailing(u32, u32),
}

/// What blocks of one model and one tenant are called by.
///
/// Keywords are the fields of a namespace, all of which must be given: `none` where there is nothing to say.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Space {
    pub inner: store::Space,
}

#[pymethods]
impl Space {
    #[new]
    #[pyo3(signature = (**fields))]
    fn new(py: Python<'_>, fields: Option<&Bound<'_, PyDict>>) -> PyResult<Space> {
        let mut given: Vec<(String, String)> = Vec::new();
        for (name, value) in fields.into_iter().flatten() {
            given.push((name.extract()?, value.str()?.extract()?));
        }
        let pairs = given.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let inner = store::Space::new(pairs).map_err(|error| raise(py, &error))?;
        Ok(Space { inner })
    }

    /// Ids of the blocks of a prompt, one for each that is full.
    fn chain<'py>(&self, py: Python<'py>, tokens: Vec<u32>) -> Vec<Bound<'py, PyBytes>> {
        let ids = self.inner.chain(&tokens);
        ids.iter().map(|id| PyBytes::new(py, id.as_bytes())).collect()
    }

    /// The id of the block that an engine calls by a key of its own.
    fn key<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let id = self.inner.key(key).map_err(|error| raise(py, &error))?;
        Ok(PyBytes::new(py, id.as_bytes()))
    }
}

/// Blocks of KV caches, in memory and in files of a directory, with their checksums.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Store {
    inner: Mutex<Option<store::Store>>,
    bytes: u32,
}

impl Store {
    pub fn live(&self) -> PyResult<store::Store> {
        let store = lock(&self.inner).clone();
        store.ok_or_else(|| invalid("the store has been closed"))
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (agent, parts, *, memory = None, directory = None, capacity = None, extent = None, durability = "process", write = "through", policy = "adaptive", deadline = None, promote = true, shares = None, events = 0, queue = None, peers = None, meet = false))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn new(
        py: Python<'_>,
        agent: &Agent,
        parts: &Bound<'_, PyDict>,
        memory: Option<u64>,
        directory: Option<PathBuf>,
        capacity: Option<u64>,
        extent: Option<u64>,
        durability: &str,
        write: &str,
        policy: &str,
        deadline: Option<f64>,
        promote: bool,
        shares: Option<&Bound<'_, PyDict>>,
        events: usize,
        queue: Option<u64>,
        peers: Option<Vec<String>>,
        meet: bool,
    ) -> PyResult<Store> {
        let mut described = Vec::new();
        for (name, part) in parts {
            let (bytes, rule) = match part.extract()? {
                PartOf::Bytes(bytes) => (bytes, HitRule::AllBlocks),
                PartOf::Trailing(bytes, last) => (bytes, HitRule::TrailingBlocks(last)),
            };
            described.push(Part::new(&name.extract::<String>()?, bytes, rule));
        }
        let shape = BlockShape::new(described).map_err(|error| invalid(error.to_string()))?;
        let mut builder = store::Store::builder(&agent.live()?, &shape)
            .promote(promote)
            .events(events);
        builder = builder.policy(
            policy
                .parse()
                .map_err(|error: store::UnknownPolicy| invalid(error.to_string()))?,
        );
        if let Some(bytes) = memory {
            builder = builder.memory(bytes);
        }
        if let Some(deadline) = deadline {
            builder = builder.deadline(duration(deadline)?);
        }
        match (directory, capacity) {
            (Some(directory), Some(capacity)) => {
                let mut tier = FileTier::new(directory, capacity);
                if let Some(extent) = extent {
                    tier = tier.extent_bytes(extent);
                }
                if let Some(queue) = queue {
                    tier = tier.queue_bytes(queue);
                }
                tier = tier.durability(match durability {
                    "process" => Durability::Process,
                    "power" => Durability::Power,
                    other => return Err(invalid(format!("durability is process or power, not {other:?}"))),
                });
                tier = tier.write(match write {
                    "through" => WriteTo::Through,
                    "back" => WriteTo::Back,
                    other => return Err(invalid(format!("write is through or back, not {other:?}"))),
                });
                builder = builder.files(tier);
            }
            (None, None) => {}
            _ => return Err(invalid("a tier of files needs its directory and its capacity")),
        }
        for (tenant, part) in shares.into_iter().flatten() {
            builder = builder.share(&tenant.extract::<String>()?, part.extract()?);
        }
        match (peers, meet) {
            (Some(_), true) => return Err(invalid("give the addresses of other stores, or have it meet them")),
            (Some(addresses), false) => builder = builder.with_peers(store::Peers::at(addresses)),
            (None, true) => {
                let agent = agent.live()?;
                let met = py
                    .detach(|| store::Peers::met_by_settings(&agent))
                    .map_err(|error| raise(py, &error))?;
                let met =
                    met.ok_or_else(|| invalid("the agent's settings name no rendezvous to meet other stores at"))?;
                builder = builder.with_peers(met);
            }
            (None, false) => {}
        }
        let bytes = shape.parts().iter().map(|part| part.bytes).sum();
        let inner = waiting(py, || builder.open())?;
        let inner = Mutex::new(Some(inner));
        Ok(Store { inner, bytes })
    }

    /// Puts blocks from memory, which must stay as it is until the answer: for each, in which tiers it is, as bits.
    #[pyo3(signature = (space, memory, ids, *, offsets = None, parts = None, parent = None, chained = true))]
    #[expect(clippy::too_many_arguments, reason = "most are keywords")]
    fn put(
        &self,
        py: Python<'_>,
        space: &Space,
        memory: &Memory,
        ids: Vec<Vec<u8>>,
        offsets: Option<Vec<u64>>,
        parts: Option<Vec<u8>>,
        parent: Option<Vec<u8>>,
        chained: bool,
    ) -> PyResult<Answer> {
        let ids = block_ids(&ids)?;
        let offsets = self.offsets(offsets, ids.len())?;
        let parts = parts.unwrap_or_else(|| vec![u8::MAX; ids.len()]);
        if parts.len() != ids.len() {
            return Err(invalid(format!("{} blocks, and parts of {}", ids.len(), parts.len())));
        }
        let first = parent.map(|parent| block_id(&parent)).transpose()?;
        let block = |(nth, id): (usize, &BlockId)| Block {
            id: *id,
            offset: offsets[nth],
            parts: parts[nth],
            parent: match (chained, nth, first) {
                (true, 0, Some(parent)) => Parent::Is(parent),
                (true, ..) => Parent::Before,
                (false, ..) => Parent::None,
            },
        };
        let blocks: Vec<Block> = ids.iter().enumerate().map(block).collect();
        let store = self.live()?;
        let put = py.detach(|| store.put(&space.inner, &memory.inner, &blocks));
        Ok(Answer {
            inner: Kind::Put(put.map_err(|error| raise(py, &error))?),
        })
    }

    /// Reads blocks into memory: for each how many bytes it has, and 0 for a miss, which leaves anything in its place.
    #[pyo3(signature = (memory, ids, *, offsets = None))]
    fn get(&self, py: Python<'_>, memory: &Memory, ids: Vec<Vec<u8>>, offsets: Option<Vec<u64>>) -> PyResult<Answer> {
        if !memory.writable {
            return Err(invalid("this memory is read-only, so nothing can be read into it"));
        }
        let ids = block_ids(&ids)?;
        let offsets = self.offsets(offsets, ids.len())?;
        let wanted = ids.iter().zip(&offsets);
        let wanted: Vec<Wanted> = wanted
            .map(|(id, offset)| Wanted {
                id: *id,
                offset: *offset,
            })
            .collect();
        let store = self.live()?;
        let got = py.detach(|| store.get(&memory.inner, &wanted));
        Ok(Answer {
            inner: Kind::Get(got.map_err(|error| raise(py, &error))?),
        })
    }

    /// How many blocks of a chain, from the first on, are a hit. They count as used; `over` says that their session will not come back.
    #[pyo3(signature = (ids, *, over = false))]
    fn match_prefix(&self, py: Python<'_>, ids: Vec<Vec<u8>>, over: bool) -> PyResult<usize> {
        let (ids, store) = (block_ids(&ids)?, self.live()?);
        let hint = Hint {
            over,
            ..Hint::default()
        };
        py.detach(|| store.match_prefix_with(&ids, hint))
            .map_err(|error| raise(py, &error))
    }

    /// Keeps the leading blocks of a chain that are there from leaving, until it is released, or not there any more.
    fn hold(&self, py: Python<'_>, ids: Vec<Vec<u8>>) -> PyResult<Held> {
        let (ids, store) = (block_ids(&ids)?, self.live()?);
        let held = py.detach(|| store.hold(&ids)).map_err(|error| raise(py, &error))?;
        Ok(Held {
            count: held.count(),
            inner: Mutex::new(Some(held)),
        })
    }

    /// Removes blocks, unless they are held or others follow them; says how many are nowhere any more.
    fn evict(&self, py: Python<'_>, ids: Vec<Vec<u8>>) -> PyResult<usize> {
        let (ids, store) = (block_ids(&ids)?, self.live()?);
        py.detach(|| store.evict(&ids)).map_err(|error| raise(py, &error))
    }

    /// Removes all that a tenant has, for good: how many records were erased, and how many blocks stay because they are held.
    fn purge(&self, py: Python<'_>, tenant: &str) -> PyResult<Answer> {
        let store = self.live()?;
        let purged = py.detach(|| store.purge(tenant)).map_err(|error| raise(py, &error))?;
        Ok(Answer {
            inner: Kind::Purge(purged),
        })
    }

    /// Begins to read blocks from files into memory; says of how many.
    fn prefetch(&self, py: Python<'_>, ids: Vec<Vec<u8>>) -> PyResult<usize> {
        let (ids, store) = (block_ids(&ids)?, self.live()?);
        py.detach(|| store.prefetch(&ids)).map_err(|error| raise(py, &error))
    }

    /// Which blocks have come and gone since the last time: id, whether it is there now, the tier's number, and what that is made of; and how many events were
    /// lost before these. Where `events` was not given to the store there are none.
    #[pyo3(signature = (most = 4096))]
    fn take_events<'py>(&self, py: Python<'py>, most: usize) -> PyResult<(Vec<Event<'py>>, u64)> {
        let taken = self.live()?.take_events(most).map_err(|error| raise(py, &error))?;
        let told = taken.events.iter().map(|event| {
            (
                PyBytes::new(py, event.id.as_bytes()),
                event.stored,
                event.tier,
                event.kind.name(),
            )
        });
        Ok((told.collect(), taken.lost))
    }

    /// Who has blocks: for each in which tiers it is here, as bits, and the names of the agents that have it elsewhere.
    fn find(&self, py: Python<'_>, ids: Vec<Vec<u8>>) -> PyResult<Answer> {
        let (ids, store) = (block_ids(&ids)?, self.live()?);
        let found = py.detach(|| store.find(&ids)).map_err(|error| raise(py, &error))?;
        Ok(Answer {
            inner: Kind::Find(found),
        })
    }

    /// What it holds and what has happened, as plain values.
    fn stat<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stat = self.live()?.stat().map_err(|error| raise(py, &error))?;
        let told = PyDict::new(py);
        told.set_item("misses", stat.misses)?;
        let mut tiers = Vec::new();
        for tier in stat.tiers {
            let one = PyDict::new(py);
            one.set_item("name", tier.name)?;
            one.set_item("slots", tier.slots)?;
            one.set_item("blocks", tier.blocks)?;
            one.set_item("hits", tier.hits)?;
            one.set_item("queued", tier.queued)?;
            let aside = match tier.condition {
                Condition::Serving => None,
                Condition::Aside { trouble, .. } => Some(trouble.to_string()),
            };
            one.set_item("aside", aside)?;
            let tally = tier.tally;
            for (name, count) in [
                ("puts", tally.puts),
                ("stored", tally.stored),
                ("already_there", tally.already_there),
                ("refused", tally.refused),
                ("failed", tally.failed),
                ("under_way", tally.under_way),
                ("removed", tally.removed),
                ("recovered", tier.counts.recovered),
                ("torn", tier.counts.torn),
                ("wrong", tier.counts.wrong),
                ("scrubbed", tier.counts.scrubbed),
            ] {
                one.set_item(name, count)?;
            }
            tiers.push(one);
        }
        told.set_item("tiers", tiers)?;
        if let Some(members) = self.live()?.members().map_err(|error| raise(py, &error))? {
            let names: Vec<&str> = members.members.iter().map(|member| member.name.as_str()).collect();
            let silent = members.members.iter().filter(|member| member.silent);
            let silent: Vec<&str> = silent.map(|member| member.name.as_str()).collect();
            told.set_item("members", names)?;
            told.set_item("silent", silent)?;
            told.set_item("members_trouble", members.trouble)?;
            told.set_item("fetched", members.counts.fetched)?;
            told.set_item("lent", members.counts.lent)?;
        }
        Ok(told)
    }

    /// Waits for what is under way and closes it.
    fn close(&self, py: Python<'_>) {
        let store = lock(&self.inner).take();
        py.detach(|| drop(store));
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}

impl Store {
    /// Side by side, where nothing is said.
    fn offsets(&self, given: Option<Vec<u64>>, count: usize) -> PyResult<Vec<u64>> {
        match given {
            None => Ok((0..count as u64).map(|nth| nth * u64::from(self.bytes)).collect()),
            Some(given) if given.len() == count => Ok(given),
            Some(given) => Err(invalid(format!("{count} blocks, and {} offsets", given.len()))),
        }
    }
}

/// Blocks that do not leave. Use it in a `with`, or release it.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Held {
    inner: Mutex<Option<store::Held>>,
    count: usize,
}

#[pymethods]
impl Held {
    /// How many blocks of the chain are held.
    #[getter]
    fn count(&self) -> usize {
        self.count
    }

    /// Lets them leave again; a second time it does nothing.
    fn release(&self, py: Python<'_>) {
        let held = lock(&self.inner).take();
        py.detach(|| drop(held));
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.release(py);
    }
}

/// An answer of a store that is under way: wait for it, poll it, or await it.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Answer {
    inner: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Put(store::Answer<Vec<PutOutcome>>),
    Get(store::Answer<Vec<GetOutcome>>),
    Purge(store::Answer<Purged>),
    Find(store::Answer<Vec<store::Whereabouts>>),
}

/// What an answer says.
enum Said {
    Put(Vec<PutOutcome>),
    Get(Vec<GetOutcome>),
    Purge(Purged),
    Find(Vec<store::Whereabouts>),
}

impl Said {
    fn give(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Said::Put(outcomes) => {
                let tiers: Vec<u32> = outcomes.iter().map(|outcome| outcome.tiers.into()).collect();
                Ok(tiers.into_pyobject(py)?.into_any().unbind())
            }
            Said::Get(outcomes) => {
                let bytes = |outcome: &GetOutcome| match outcome {
                    GetOutcome::Hit { bytes, .. } | GetOutcome::Elsewhere { bytes, .. } => *bytes,
                    GetOutcome::Miss => 0,
                };
                let bytes: Vec<u32> = outcomes.iter().map(bytes).collect();
                Ok(bytes.into_pyobject(py)?.into_any().unbind())
            }
            Said::Find(found) => {
                let one = |there: store::Whereabouts| {
                    let names: Vec<String> = there.elsewhere.into_iter().map(|(name, _)| name).collect();
                    (there.here, names)
                };
                let found: Vec<(u8, Vec<String>)> = found.into_iter().map(one).collect();
                Ok(found.into_pyobject(py)?.into_any().unbind())
            }
            Said::Purge(purged) => match purged.failed {
                None => Ok((purged.erased, purged.left).into_pyobject(py)?.into_any().unbind()),
                Some(trouble) => Err(crate::errors::OsFailure::new_err(format!(
                    "not all is erased: {trouble}"
                ))),
            },
        }
    }
}

impl Kind {
    fn wait_for(&self, timeout: std::time::Duration) -> Option<Result<Said, weft::Error>> {
        match self {
            Kind::Put(answer) => answer.wait_for(timeout).map(|said| said.map(Said::Put)),
            Kind::Get(answer) => answer.wait_for(timeout).map(|said| said.map(Said::Get)),
            Kind::Purge(answer) => answer.wait_for(timeout).map(|said| said.map(Said::Purge)),
            Kind::Find(answer) => answer.wait_for(timeout).map(|said| said.map(Said::Find)),
        }
    }

    async fn ended(self) -> Result<Said, weft::Error> {
        match self {
            Kind::Put(answer) => answer.await.map(Said::Put),
            Kind::Get(answer) => answer.await.map(Said::Get),
            Kind::Purge(answer) => answer.await.map(Said::Purge),
            Kind::Find(answer) => answer.await.map(Said::Find),
        }
    }
}

#[pymethods]
impl Answer {
    /// Waits for it; with `timeout`, in seconds, no longer than that.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let end = timeout
            .map(duration)
            .transpose()?
            .and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = end.map_or(SIGNAL_CHECK, |end| end.saturating_duration_since(Instant::now()));
            if let Some(said) = py.detach(|| self.inner.wait_for(left.min(SIGNAL_CHECK))) {
                return said.map_err(|error| raise(py, &error))?.give(py);
            }
            py.check_signals()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                return Err(TimedOut::new_err("the answer is still under way"));
            }
        }
    }

    /// Whether it has come.
    #[getter]
    fn done(&self) -> bool {
        match &self.inner {
            Kind::Put(answer) => answer.is_ended(),
            Kind::Get(answer) => answer.is_ended(),
            Kind::Purge(answer) => answer.is_ended(),
            Kind::Find(answer) => answer.is_ended(),
        }
    }

    fn __await__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let answer = self.inner.clone();
        let ended = async move {
            let said = answer.ended().await;
            let give: Outcome = Box::new(move |py| said.map_err(|error| raise(py, &error))?.give(py));
            give
        };
        future_of(py, ended)?.call_method0("__await__")
    }
}

fn block_id(bytes: &[u8]) -> PyResult<BlockId> {
    let whole: Result<[u8; 16], _> = bytes.try_into();
    match whole {
        Ok(id) if id != [0; 16] => Ok(BlockId::from_bytes(id)),
        _ => Err(invalid(
            "a block id has sixteen bytes, and not all are zero: `Space.chain` and `Space.key` make them",
        )),
    }
}

fn block_ids(ids: &[Vec<u8>]) -> PyResult<Vec<BlockId>> {
    ids.iter().map(|id| block_id(id)).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
