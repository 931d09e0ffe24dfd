//! Which bytes, as Python writes it.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use weft::{Span, Spans};

use crate::errors::invalid;

/// Spans from `None`, from pairs of offset and length, or from a block size and block indices.
pub fn parse(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Spans>> {
    let Some(value) = value.filter(|value| !value.is_none()) else {
        return Ok(None);
    };
    // A tuple of a number and something that is not one is blocks; everything else is pairs.
    if let Ok((block, indices)) = value.extract::<(u64, Bound<'_, PyAny>)>()
        && indices.extract::<u64>().is_err()
    {
        return blocks(block, &indices).map(Some);
    }
    let mut spans = Spans::new();
    for pair in value.try_iter()? {
        let (offset, len) = pair?.extract::<(u64, u64)>().map_err(|_| {
            invalid("spans are pairs of an offset and a length, or a block size and the indices of blocks")
        })?;
        push(&mut spans, offset, len)?;
    }
    Ok(Some(spans))
}

fn blocks(block: u64, indices: &Bound<'_, PyAny>) -> PyResult<Spans> {
    let mut spans = Spans::new();
    let mut add = |index: u64| match index.checked_mul(block) {
        Some(offset) => push(&mut spans, offset, block),
        None => Err(invalid(format!("block {index} begins past 2^64"))),
    };
    let known = each::<i64>(indices, &mut add)?
        || each::<i32>(indices, &mut add)?
        || each::<u64>(indices, &mut add)?
        || each::<u32>(indices, &mut add)?;
    if !known {
        for index in indices.try_iter()? {
            add(index?.extract()?)?;
        }
    }
    Ok(spans)
}

/// Goes through an array of integers without making a Python object of each. False where it is not an array of this type.
fn each<T>(indices: &Bound<'_, PyAny>, add: &mut impl FnMut(u64) -> PyResult<()>) -> PyResult<bool>
where
    T: Element + Copy + TryInto<u64> + std::fmt::Display,
{
    let Ok(array) = PyBuffer::<T>::get(indices) else {
        return Ok(false);
    };
    if array.dimensions() != 1 {
        return Err(invalid("block indices have one dimension"));
    }
    for index in array.to_vec(indices.py())? {
        add(index
            .try_into()
            .map_err(|_| invalid(format!("there is no block {index}")))?)?;
    }
    Ok(true)
}

fn push(spans: &mut Spans, offset: u64, len: u64) -> PyResult<()> {
    let fits = offset.checked_add(len).is_some() && spans.bytes().checked_add(len).is_some();
    if !fits {
        return Err(invalid(format!("a span of {len} bytes at {offset} ends past 2^64")));
    }
    spans.push(Span { offset, len });
    Ok(())
}
