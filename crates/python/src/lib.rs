//! The Python package: a thin layer over the Rust API.
//!
//! Two rules keep Python and the progress thread from waiting for each other. Whoever calls into the agent lets other Python
//! threads run meanwhile; and nothing that runs inside the agent ever waits for Python: references are given back later, and
//! `asyncio` is told by a thread of its own.
//!
//! The `weft` command is in the same module, so that one wheel holds both and what they share once.

mod agent;
mod asyncio;
mod atomic;
mod borrow;
mod communicator;
mod conversion;
mod errors;
mod hand_off;
mod inbox;
mod memory;
mod nixl;
mod pages;
mod peer;
mod porter;
mod rows;
mod seal;
mod spans;
mod store;
mod team;
mod transfer;
mod waiting;

use pyo3::prelude::*;

#[pymodule]
mod _weft {
    #[pymodule_export]
    use super::agent::Agent;
    #[pymodule_export]
    use super::borrow::Borrowed;
    #[pymodule_export]
    use super::communicator::{Communicator, Pending, Schedule};
    #[pymodule_export]
    use super::conversion::Conversion;
    #[pymodule_export]
    use super::hand_off::{Desk, HandOff};
    #[pymodule_export]
    use super::inbox::Notification;
    #[pymodule_export]
    use super::memory::Memory;
    #[pymodule_export]
    use super::nixl::{NixlAgent, NixlRequest, NixlSide};
    #[pymodule_export]
    use super::pages::{Pages, Spans};
    #[pymodule_export]
    use super::peer::{Peer, Prepared, Region};
    #[pymodule_export]
    use super::porter::{Line, Porter};
    #[pymodule_export]
    use super::rows::{Experts, Norms, Symmetric};
    #[pymodule_export]
    use super::seal::Seal;
    #[pymodule_export]
    use super::store::{Answer, Held, Space, Store};
    #[pymodule_export]
    use super::team::Team;
    #[pymodule_export]
    use super::transfer::{Summary, Transfer};

    use std::ffi::OsString;

    use pyo3::prelude::*;

    /// Does what a command line of `weft` asks for, and returns the exit code. See `weft/__main__.py`.
    #[pyfunction]
    fn command(py: Python<'_>, arguments: Vec<OsString>, again: Vec<OsString>) -> u8 {
        py.detach(|| weft_cli::run(arguments, again))
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("_NUMBERS", super::communicator::numbers(module.py())?)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
