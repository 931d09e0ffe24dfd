//! Blocks of a paged cache that become blocks of another: other layouts, other element types.

use pyo3::prelude::*;
use weft::Datatype;
use weft::conversion::{self, ConversionPlace, Elements, Factor, Narrowing, PagedEnd, Scales};
use weft::pages::Table;

use crate::errors::{invalid, raise};
use crate::memory::Memory;
use crate::pages::Pages;

/// How tokens and heads of a sequence in one cache become those of another, computed once and run as often as one likes.
///
/// `blocks` and `other_blocks` are the sequence's from its first token on. `elements` and `other_elements` are `"bf16"`, `"f16"`, `"f32"` or `"fp8_e4m3"`, or anything else that stays as it is.
/// `scales` are what elements of fp8 are multiplied with to be the numbers that they stand for: none, one float for each part, or `Pages` of four-byte units in memory. What would lose
/// some of the numbers raises `InvalidCall`, unless it is `lossy`.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Conversion {
    inner: conversion::Conversion,
}

/// What scales are in Python.
#[derive(FromPyObject)]
enum SaidScales {
    Beside(Py<Pages>),
    PerPart(Vec<f32>),
}

fn elements(datatype: &str, scales: Option<SaidScales>) -> PyResult<Elements> {
    let datatype: Datatype = datatype
        .parse()
        .map_err(|error: weft::UnknownDatatype| invalid(error.to_string()))?;
    let scales = match scales {
        None => Scales::One,
        Some(SaidScales::Beside(pages)) => Scales::Beside(Box::new(pages.get().inner.clone())),
        Some(SaidScales::PerPart(factors)) => {
            let factors = factors.into_iter().map(Factor::new).collect::<Option<Vec<Factor>>>();
            Scales::PerPart(factors.ok_or_else(|| invalid("a scale is a number between 2**-100 and 2**100"))?)
        }
    };
    Ok(Elements { datatype, scales })
}

#[pymethods]
impl Conversion {
    #[new]
    #[pyo3(signature = (
        pages, blocks, other, other_blocks, tokens, heads, *, elements = "bf16", other_elements = None, scales = None, other_scales = None, lossy = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "two ends, which Python names")]
    fn new(
        py: Python<'_>,
        pages: &Bound<'_, Pages>,
        blocks: Vec<u64>,
        other: &Bound<'_, Pages>,
        other_blocks: Vec<u64>,
        tokens: (u64, u64),
        heads: (u64, u64),
        elements: &str,
        other_elements: Option<&str>,
        scales: Option<SaidScales>,
        other_scales: Option<SaidScales>,
        lossy: bool,
    ) -> PyResult<Conversion> {
        let (near, far) = (&pages.get().inner, &other.get().inner);
        let near_elements = self::elements(elements, scales)?;
        let far_elements = self::elements(other_elements.unwrap_or(elements), other_scales)?;
        let loss = if lossy { Narrowing::Allowed } else { Narrowing::Refused };
        let computed = py.detach(|| {
            let side = |pages, blocks, elements| PagedEnd {
                table: Table { pages, blocks },
                elements,
            };
            let (from, to) = (
                side(near, &blocks[..], &near_elements),
                side(far, &other_blocks[..], &far_elements),
            );
            conversion::convert(from, to, tokens.0..tokens.1, heads.0..heads.1, loss)
        });
        let inner = computed.map_err(|error| invalid(error.to_string()))?;
        Ok(Conversion { inner })
    }

    /// Bytes of elements that are read.
    #[getter]
    fn nbytes_read(&self) -> u64 {
        self.inner.bytes_read()
    }
    /// Bytes of elements that are written.
    #[getter]
    fn nbytes_written(&self) -> u64 {
        self.inner.bytes_written()
    }
    /// Whether bytes are moved, and none of them changed.
    #[getter]
    fn is_move(&self) -> bool {
        self.inner.is_move()
    }

    /// Converts from one memory into another, both the host's or both of one GPU, and waits until it is done. Scales that lie in memory are in the same memories, unless others are named.
    #[pyo3(signature = (memory, other, *, scales = None, other_scales = None))]
    fn run(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, Memory>,
        other: &Bound<'_, Memory>,
        scales: Option<&Bound<'_, Memory>>,
        other_scales: Option<&Bound<'_, Memory>>,
    ) -> PyResult<()> {
        let to_scales = other_scales.unwrap_or(other);
        if !other.get().writable || !to_scales.get().writable {
            return Err(invalid("what is converted is written to memory that may be changed"));
        }
        let inner = |memory: &Bound<'_, Memory>| memory.get().inner.clone();
        let (near, far) = (inner(memory), inner(other));
        let (near_scales, far_scales) = (scales.map(inner), other_scales.map(inner));
        let done = py.detach(|| {
            let from = ConversionPlace {
                scales: near_scales.as_ref().map(|scales| (scales, 0)),
                ..ConversionPlace::of(&near)
            };
            let to = ConversionPlace {
                scales: far_scales.as_ref().map(|scales| (scales, 0)),
                ..ConversionPlace::of(&far)
            };
            conversion::run(&self.inner, from, to)
        });
        done.map_err(|error| raise(py, &error))
    }
}
