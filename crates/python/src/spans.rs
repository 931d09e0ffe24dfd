//! Which bytes, as Python writes it.

use std::ffi::CStr;
use std::fmt::Display;

use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use weft::{Span, Spans};

use crate::errors::invalid;

const PAIRS: &str = "spans are pairs of an offset and a length, an array of n rows of these two, or a tuple of a block size \
                     and the indices of blocks";
const INDICES: &str = "the indices of blocks are a list or an array, of one dimension, of whole numbers from 0 on";

/// Spans from `None`, from what [`Pages`](crate::pages::Pages) computed, from pairs of offset and length, or from a block size and block indices.
pub fn parse(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Spans>> {
    let Some(value) = value.filter(|value| !value.is_none()) else {
        return Ok(None);
    };
    if let Ok(spans) = value.cast::<crate::pages::Spans>() {
        return Ok(Some(Spans::clone(&spans.get().inner)));
    }
    let mut spans = Spans::new();
    // A tuple that begins with a number is blocks; everything else is pairs.
    match value.cast::<PyTuple>() {
        Ok(tuple) if tuple.len() == 2 && tuple.get_item(0)?.extract::<u64>().is_ok() => {
            let (block, indices) = tuple.extract::<(u64, Bound<'_, PyAny>)>()?;
            blocks(&mut spans, block, &indices)?;
        }
        _ => pairs(&mut spans, value)?,
    }
    Ok(Some(spans))
}

fn pairs(spans: &mut Spans, value: &Bound<'_, PyAny>) -> PyResult<()> {
    if let Some(array) = Array::of(value, PAIRS)? {
        if array.shape.len() != 2 || array.shape[1] != 2 {
            return Err(invalid(PAIRS));
        }
        let mut rows = array.numbers.chunks_exact(2);
        return rows.try_for_each(|row| push(spans, row[0], row[1]));
    }
    for pair in value.try_iter().map_err(|_| invalid(PAIRS))? {
        let pair = pair?;
        if let Ok(tuple) = pair.cast::<PyTuple>()
            && tuple.len() == 2
        {
            push(
                spans,
                whole(&tuple.get_item(0)?, PAIRS)?,
                whole(&tuple.get_item(1)?, PAIRS)?,
            )?;
            continue;
        }
        let items = pair.try_iter().map_err(|_| invalid(PAIRS))?;
        let items: Vec<Bound<'_, PyAny>> = items.take(3).collect::<PyResult<_>>()?;
        let [offset, len] = &items[..] else {
            return Err(invalid(PAIRS));
        };
        push(spans, whole(offset, PAIRS)?, whole(len, PAIRS)?)?;
    }
    Ok(())
}

fn blocks(spans: &mut Spans, block: u64, indices: &Bound<'_, PyAny>) -> PyResult<()> {
    if let Some(array) = Array::of(indices, INDICES)? {
        if array.shape.len() != 1 {
            return Err(invalid(INDICES));
        }
        let mut indices = array.numbers.into_iter();
        return indices.try_for_each(|index| push_block(spans, block, index));
    }
    for index in indices.try_iter().map_err(|_| invalid(INDICES))? {
        push_block(spans, block, whole(&index?, INDICES)?)?;
    }
    Ok(())
}

/// An array of integers, copied out without making a Python object of each.
pub struct Array {
    pub shape: Vec<usize>,
    pub numbers: Vec<u64>,
}

impl Array {
    /// `None` where it is not an array of integers of a usual size.
    pub fn of(value: &Bound<'_, PyAny>, expected: &str) -> PyResult<Option<Array>> {
        // Lists and tuples are what most calls give, and each way to find out that they are no array raises an exception first.
        if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
            return Ok(None);
        }
        let read = [
            Array::typed::<i64>,
            Array::typed::<i32>,
            Array::typed::<u64>,
            Array::typed::<u32>,
        ];
        let mut found = read.iter().map(|read| read(value, expected));
        found.find_map(Result::transpose).transpose()
    }

    fn typed<T>(value: &Bound<'_, PyAny>, expected: &str) -> PyResult<Option<Array>>
    where
        T: Element + Copy + TryInto<u64> + Display,
    {
        let Ok(buffer) = PyBuffer::<T>::get(value) else {
            return Ok(None);
        };
        if !in_our_byte_order(buffer.format()) {
            return Ok(None);
        }
        let numbers = buffer.to_vec(value.py())?.into_iter().map(|number| {
            let whole = number.try_into();
            whole.map_err(|_| invalid(format!("{expected}; not {number}")))
        });
        Ok(Some(Array {
            shape: buffer.shape().to_vec(),
            numbers: numbers.collect::<PyResult<_>>()?,
        }))
    }
}

/// An element type is taken for its size alone, whichever byte comes first in it.
fn in_our_byte_order(format: &CStr) -> bool {
    match format.to_bytes().first() {
        Some(b'<') => cfg!(target_endian = "little"),
        Some(b'>' | b'!') => cfg!(target_endian = "big"),
        _ => true,
    }
}

fn whole(value: &Bound<'_, PyAny>, expected: &str) -> PyResult<u64> {
    value.extract().map_err(|_| invalid(format!("{expected}; not {value}")))
}

fn push_block(spans: &mut Spans, block: u64, index: u64) -> PyResult<()> {
    let offset = index.checked_mul(block);
    let offset = offset.ok_or_else(|| invalid(format!("block {index} begins past 2^64")))?;
    push(spans, offset, block)
}

fn push(spans: &mut Spans, offset: u64, len: u64) -> PyResult<()> {
    let fits = offset.checked_add(len).is_some() && spans.bytes().checked_add(len).is_some();
    if !fits {
        return Err(invalid(format!("a span of {len} bytes at {offset} ends past 2^64")));
    }
    spans.push(Span { offset, len });
    Ok(())
}
