//! Layers of paged caches, and the bytes that two of them have in common.

use std::sync::Arc;

use pyo3::prelude::*;
use weft::pages::{self, PagesShape, PagesStrides, Table};

use crate::errors::invalid;

/// Which bytes of a region, in a sequence.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Spans {
    pub inner: Arc<weft::Spans>,
}

/// One layer of a paged cache, as one end holds it.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Pages {
    inner: pages::Pages,
}

#[pymethods]
impl Spans {
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }
    fn __len__(&self) -> usize {
        usize::try_from(self.inner.count()).unwrap_or(usize::MAX)
    }
    #[getter]
    fn runs(&self) -> usize {
        self.inner.runs().len()
    }
}

#[pymethods]
impl Pages {
    #[new]
    #[pyo3(signature = (*, blocks, tokens, heads, parts, unit_bytes, base, part_stride, block_stride, token_stride, head_stride))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords, each of which has its name in Python"
    )]
    fn new(
        blocks: u64,
        tokens: u64,
        heads: (u64, u64),
        parts: u64,
        unit_bytes: u64,
        base: u64,
        part_stride: u64,
        block_stride: u64,
        token_stride: u64,
        head_stride: u64,
    ) -> PyResult<Pages> {
        let shape = PagesShape {
            blocks,
            tokens,
            heads: heads.0..heads.1,
            parts,
            unit_bytes,
        };
        let strides = PagesStrides {
            base,
            part: part_stride,
            block: block_stride,
            token: token_stride,
            head: head_stride,
        };
        let inner = pages::Pages::with_strides(shape, strides).map_err(|error| invalid(error.to_string()))?;
        Ok(Pages { inner })
    }

    #[getter]
    fn tokens(&self) -> u64 {
        self.inner.shape().tokens
    }
    #[getter]
    fn heads(&self) -> (u64, u64) {
        let heads = &self.inner.shape().heads;
        (heads.start, heads.end)
    }
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.end()
    }

    fn pair(
        &self,
        py: Python<'_>,
        blocks: Vec<u64>,
        other: &Bound<'_, Pages>,
        other_blocks: Vec<u64>,
        tokens: (u64, u64),
        heads: (u64, u64),
    ) -> PyResult<(Spans, Spans)> {
        let (near, far) = (&self.inner, &other.get().inner);
        let paired = py.detach(|| {
            let near = Table {
                pages: near,
                blocks: &blocks,
            };
            let far = Table {
                pages: far,
                blocks: &other_blocks,
            };
            pages::pair(near, far, tokens.0..tokens.1, heads.0..heads.1)
        });
        let (here, there) = paired.map_err(|error| invalid(error.to_string()))?;
        let spans = |inner| Spans { inner: Arc::new(inner) };
        Ok((spans(here), spans(there)))
    }
}
