//! Calls on bare addresses: what an integration uses that has the addresses at hand and looks after the memory itself.

use std::any::Any;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use weft::{Datatype, HostMemory, Part, Rank};

use super::elements::{numbered_operator, operator_names};
use super::request::{Kind, Request};
use crate::errors::invalid;

/// The numbers that stand for collectives, datatypes and operators in `_raw`, by name: whoever calls it takes them from here.
pub fn numbers(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    fn numbered<'py>(py: Python<'py>, names: impl Iterator<Item = &'static str>) -> PyResult<Bound<'py, PyDict>> {
        let numbers = PyDict::new(py);
        for (number, name) in names.enumerate() {
            numbers.set_item(name, number)?;
        }
        Ok(numbers)
    }
    let all = PyDict::new(py);
    all.set_item("kinds", numbered(py, Kind::ALL.into_iter().map(Kind::name))?)?;
    all.set_item(
        "datatypes",
        numbered(py, Datatype::ALL.into_iter().map(Datatype::name))?,
    )?;
    all.set_item("operators", numbered(py, operator_names())?)?;
    Ok(all)
}

pub struct Raw {
    pub kind: u8,
    pub input: (usize, usize),
    pub output: (usize, usize),
    pub datatype: usize,
    pub operator: usize,
    pub root: u32,
    pub counts: Option<Vec<u64>>,
    pub received: Option<Vec<u64>>,
}

impl Raw {
    /// `owner` keeps both buffers where they are; without one, the caller does, who waits.
    pub fn with_owner(self, py: Python<'_>, owner: Option<Py<PyAny>>) -> PyResult<Request> {
        let kind = Kind::ALL.get(usize::from(self.kind)).copied();
        let datatype = Datatype::ALL.get(self.datatype).copied();
        let operator = numbered_operator(self.operator);
        let (Some(kind), Some(datatype), Some(operator)) = (kind, datatype, operator) else {
            return Err(invalid("a number that stands for nothing"));
        };
        let input = part(self.input, owner.as_ref().map(|owner| owner.clone_ref(py)))?;
        Ok(Request {
            kind,
            input,
            output: part(self.output, owner)?,
            datatype,
            operator,
            root: Rank(self.root),
            counts: self.counts,
            received: self.received,
        })
    }
}

fn part((start, len): (usize, usize), owner: Option<Py<PyAny>>) -> PyResult<Part> {
    let fits = isize::try_from(len).is_ok() && start.checked_add(len).is_some();
    if !fits || (start == 0 && len > 0) {
        return Err(invalid("an address that cannot be"));
    }
    let owner: Box<dyn Any + Send + Sync> = match owner {
        Some(owner) => Box::new(owner),
        None => Box::new(()),
    };
    // SAFETY: whoever calls `_raw` vouches for the memory until the call has ended: it waits for that, or gives the object that
    // keeps the memory, which is dropped with it.
    let host = unsafe { HostMemory::from_raw(start as *mut u8, len, owner) };
    Ok(host.into())
}
