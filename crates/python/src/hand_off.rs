//! What `weft/hand_off.py` stands on: a worker that hands off, with plain values in and out.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use weft::hand_off::{self, Cache, Event, HandOffError, Layer, Options, Prompt, Wanted};

use crate::agent::Agent;
use crate::errors::{invalid, raise};
use crate::memory::{Memory, duration};
use crate::pages::Pages;
use crate::seal::settings_of;
use crate::waiting::waiting;

/// Slot, stamp, seconds.
type Lease = (u32, u64, f64);
/// The name of the hand-off, addresses, blocks, tokens and the lease.
type Origin = (String, Vec<String>, Vec<u64>, u64, Lease);

fn lease((slot, stamp, lasts): Lease) -> PyResult<hand_off::Lease> {
    let lasts = duration(lasts)?.into();
    Ok(hand_off::Lease { slot, stamp, lasts })
}

fn lease_said(lease: hand_off::Lease) -> Lease {
    (lease.slot, lease.stamp, Duration::from(lease.lasts).as_secs_f64())
}

fn origin((hand_off, addresses, blocks, tokens, leased): Origin) -> PyResult<hand_off::Origin> {
    let lease = lease(leased)?;
    Ok(hand_off::Origin {
        hand_off,
        addresses,
        blocks,
        tokens,
        lease,
    })
}

/// See `weft.hand_off.Desk`.
#[derive(Debug)]
#[pyclass(frozen, module = "weft", name = "_Desk")]
pub struct Desk {
    inner: hand_off::Desk,
}

#[pymethods]
impl Desk {
    #[new]
    #[pyo3(signature = (**settings))]
    fn new(py: Python<'_>, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Desk> {
        let inner = hand_off::Desk::new(&settings_of(py, settings)?).map_err(|error| raise(py, &error))?;
        Ok(Desk { inner })
    }

    fn lease(&self, seconds: f64) -> PyResult<Option<Lease>> {
        Ok(self.inner.lease(duration(seconds)?).map(lease_said))
    }

    fn give_back(&self, leased: Lease) -> PyResult<()> {
        self.inner.give_back(lease(leased)?);
        Ok(())
    }

    fn write<'py>(&self, py: Python<'py>, said: Origin, about: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let ticket = self.inner.write(&origin(said)?, about);
        let ticket = ticket.map_err(|error| raise(py, &error))?;
        Ok(PyBytes::new(py, &ticket))
    }

    fn open(&self, py: Python<'_>, ticket: &[u8], about: &[u8]) -> PyResult<Origin> {
        let found = self.inner.open(ticket, about).map_err(|error| raise(py, &error))?;
        let lease = lease_said(found.lease);
        Ok((found.hand_off, found.addresses, found.blocks, found.tokens, lease))
    }

    fn offer<'py>(&self, py: Python<'py>, addresses: Vec<String>, seconds: f64) -> PyResult<Bound<'py, PyBytes>> {
        let offer = self.inner.offer(&addresses, duration(seconds)?);
        let offer = offer.map_err(|error| raise(py, &error))?;
        Ok(PyBytes::new(py, &offer))
    }

    fn open_offer(&self, py: Python<'_>, offer: &[u8], name: &str, seconds: f64) -> PyResult<Vec<String>> {
        let found = self.inner.open_offer(offer, name, duration(seconds)?);
        found.map_err(|error| raise(py, &error))
    }
}

/// See `weft.hand_off.HandOff`.
#[derive(Debug)]
#[pyclass(frozen, module = "weft", name = "_HandOff")]
pub struct HandOff {
    /// Until it is closed.
    inner: Mutex<Option<hand_off::HandOff>>,
}

/// An event: the name of the hand-off, whether it is the end of something that was wanted, why it ended or is free (in a word and in a sentence; nothing where it
/// went well), and of one that went well its bytes, seconds and transports.
type Told = (String, bool, Option<(&'static str, String)>, u64, f64, Vec<String>);

impl HandOff {
    fn live(&self) -> PyResult<hand_off::HandOff> {
        let closed = || invalid(HandOffError::Closed.to_string());
        hold(&self.inner).clone().ok_or_else(closed)
    }

    fn call<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&hand_off::HandOff) -> Result<T, weft::Error> + Send,
    ) -> PyResult<T> {
        let live = self.live()?;
        let done = py.detach(|| {
            let done = work(&live);
            // It may have been closed meanwhile, and this be the last that holds it.
            drop(live);
            done
        });
        done.map_err(|error| raise(py, &error))
    }
}

#[pymethods]
impl HandOff {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "what a worker is, given by name in Python")]
    fn new(
        py: Python<'_>,
        agent: &Agent,
        meaning: Vec<(String, String)>,
        rank: u32,
        ranks: u32,
        layers: Vec<(String, u32, u64, Py<Pages>)>,
        memories: Vec<Py<Memory>>,
        deadline: f64,
        lease: f64,
        landing_bytes: u64,
        checksum: bool,
    ) -> PyResult<HandOff> {
        let layers = layers.into_iter().map(|(name, region, granule, pages)| Layer {
            name,
            region,
            granule,
            pages: pages.get().inner.clone(),
        });
        let cache = Cache::new(meaning, rank, ranks, layers.collect()).map_err(|error| invalid(error.to_string()))?;
        let memories: Vec<weft::Memory> = memories.iter().map(|memory| memory.get().inner.clone()).collect();
        let options = Options {
            deadline: duration(deadline)?,
            lease: duration(lease)?,
            landing_bytes,
            checksum,
        };
        let agent = agent.live()?;
        let opened = py.detach(|| hand_off::HandOff::open(&agent, cache, &memories, options));
        let opened = opened.map_err(|error| raise(py, &error))?;
        Ok(HandOff {
            inner: Mutex::new(Some(opened)),
        })
    }

    fn offer<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        blocks: Vec<u64>,
        tokens: u64,
        about: &[u8],
    ) -> PyResult<Bound<'py, PyBytes>> {
        let ticket = self.call(py, |live| live.offer(name, &blocks, tokens, about))?;
        Ok(PyBytes::new(py, &ticket))
    }

    fn offer_leased(&self, py: Python<'_>, name: &str, leased: Lease) -> PyResult<()> {
        let lease = lease(leased)?;
        self.call(py, |live| live.offer_leased(name, lease))
    }

    fn compute(&self, py: Python<'_>, name: &str, blocks: Vec<u64>, tokens: u64, digest: [u8; 32]) -> PyResult<()> {
        self.call(py, |live| live.compute(name, Prompt { blocks, tokens, digest }))
    }

    fn computed(&self, py: Python<'_>, name: &str, layer: Option<usize>, upto: u64) -> PyResult<()> {
        self.call(py, |live| live.computed(name, layer, upto))
    }

    fn preempt(&self, py: Python<'_>, name: &str, timeout: f64) -> PyResult<()> {
        let (live, timeout) = (self.live()?, duration(timeout)?);
        waiting(py, move || live.preempt(name, timeout))
    }

    fn stop(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.call(py, |live| live.stop(name))
    }

    fn want(&self, py: Python<'_>, ticket: &[u8], about: &[u8], readers: u32) -> PyResult<String> {
        self.call(py, |live| live.want(ticket, about, readers))
    }

    fn want_from(&self, py: Python<'_>, said: Origin, readers: u32) -> PyResult<()> {
        let origin = origin(said)?;
        self.call(py, |live| live.want_from(origin, readers).map(drop))
    }

    fn want_pushed(&self, py: Python<'_>, name: &str, addresses: Vec<String>, readers: u32) -> PyResult<()> {
        self.call(py, |live| live.want_pushed(name, &addresses, readers))
    }

    fn fetch(
        &self,
        py: Python<'_>,
        name: &str,
        blocks: Vec<u64>,
        tokens: (u64, u64),
        prompt_tokens: u64,
        digest: [u8; 32],
    ) -> PyResult<()> {
        let wanted = Wanted {
            blocks,
            tokens: tokens.0..tokens.1,
            prompt_tokens,
            digest,
        };
        self.call(py, |live| live.fetch(name, wanted))
    }

    fn leave(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.call(py, |live| live.leave(name))
    }

    fn event(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<Told>> {
        let (live, timeout) = (self.live()?, duration(timeout)?);
        let event = waiting(py, move || live.next_event(timeout))?;
        Ok(event.and_then(|event| match event {
            Event::Ended {
                name,
                outcome: Ok(done),
            } => {
                let seconds = Duration::from(done.took).as_secs_f64();
                Some((name, true, None, done.bytes, seconds, done.ways))
            }
            Event::Ended {
                name,
                outcome: Err(reason),
            } => Some((
                name,
                true,
                Some((reason.cause(), reason.to_string())),
                0,
                0.0,
                Vec::new(),
            )),
            Event::Free { name, why } => Some((name, false, Some((why.cause(), why.to_string())), 0, 0.0, Vec::new())),
            _ => None,
        }))
    }

    fn under_way(&self, py: Python<'_>) -> PyResult<(usize, usize, u64)> {
        self.call(py, |live| live.under_way())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let closed = hold(&self.inner).take();
            drop(closed);
        });
    }
}

impl Drop for HandOff {
    fn drop(&mut self) {
        // An interpreter that is going away takes it along.
        let _ = Python::try_attach(|py| py.detach(|| drop(hold(&self.inner).take())));
    }
}

fn hold(inner: &Mutex<Option<hand_off::HandOff>>) -> MutexGuard<'_, Option<hand_off::HandOff>> {
    inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
