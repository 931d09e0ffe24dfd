//! Words for other agents that strangers carry.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use weft::settings::{Settings, Sources};

use crate::agent::setting;
use crate::errors::{raise, raise_unbelieved};
use crate::memory::duration;

/// Closes words, and opens those that others with the same secret have closed under the same label.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Seal {
    inner: weft::Seal,
}

#[pymethods]
impl Seal {
    #[new]
    #[pyo3(signature = (label, **settings))]
    fn new(py: Python<'_>, label: &str, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Seal> {
        let inner = weft::Seal::new(label, &settings_of(py, settings)?).map_err(|error| raise(py, &error))?;
        Ok(Seal { inner })
    }

    /// Seals words about something, which whoever opens them has to name, for so many seconds.
    fn close<'py>(&self, py: Python<'py>, words: &[u8], about: &[u8], seconds: f64) -> PyResult<Bound<'py, PyBytes>> {
        let sealed = self.inner.close(words, about, duration(seconds)?);
        sealed
            .map(|sealed| PyBytes::new(py, &sealed))
            .map_err(|error| raise_unbelieved(py, error))
    }

    /// The words, where they are to be believed.
    fn open<'py>(&self, py: Python<'py>, sealed: &[u8], about: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let words = self.inner.open(sealed, about);
        words
            .map(|words| PyBytes::new(py, words))
            .map_err(|error| raise_unbelieved(py, error))
    }
}

/// The settings of agents, for what needs no agent but its secret.
pub fn settings_of(py: Python<'_>, given: Option<&Bound<'_, PyDict>>) -> PyResult<Settings> {
    let failed = |error: weft::settings::SettingsError| raise(py, &error.into());
    let mut sources = Sources::of_process().map_err(failed)?;
    for (key, value) in given.into_iter().flatten() {
        let (key, value) = setting(key.extract()?, &value)?;
        sources = sources.set(&key, &value);
    }
    Settings::from_sources(&sources).map_err(failed)
}
