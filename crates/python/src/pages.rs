//! Layers of paged caches, and the bytes that two of them have in common.

use std::sync::Arc;

use pyo3::prelude::*;
use weft::pages::{self, PagesShape, PagesStrides, Table};

use crate::errors::invalid;

/// Which bytes of a region, in a sequence. `len` is how many pieces they are in.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Spans {
    pub inner: Arc<weft::Spans>,
}

/// One layer of a paged KV cache as one end holds it: `blocks` of `tokens`, of which this end has the `heads` from the first up to but not
/// including the second, `parts` (two where K and V are apart), `unit_bytes` for one token of one head of one part, and in bytes where the
/// first lies and how far apart neighbours of each kind are.
#[derive(Debug)]
#[pyclass(frozen, module = "weft")]
pub struct Pages {
    pub inner: pages::Pages,
}

#[pymethods]
impl Spans {
    /// How many bytes they are.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }
    fn __len__(&self) -> usize {
        usize::try_from(self.inner.count()).unwrap_or(usize::MAX)
    }
    /// Pieces at a regular stride count as one here, and travel as one.
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

    /// How many tokens a block has.
    #[getter]
    fn tokens(&self) -> u64 {
        self.inner.shape().tokens
    }
    /// The first head that is held here, and the first that is not any more.
    #[getter]
    fn heads(&self) -> (u64, u64) {
        let heads = &self.inner.shape().heads;
        (heads.start, heads.end)
    }
    /// How long a region must be to hold the layer.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.end()
    }

    /// The same bytes with as many parts: of a layer whose units hold K and V one behind the other, what they are apart.
    fn apart(&self, parts: u64) -> PyResult<Pages> {
        let inner = self.inner.apart(parts);
        let inner =
            inner.ok_or_else(|| invalid("units of one part, which so many parts share evenly, can be taken apart"))?;
        Ok(Pages { inner })
    }

    /// The bytes of some tokens and heads of one sequence, here and at another end, for `Peer.transfer`.
    ///
    /// `blocks` and `other_blocks` are the sequence's from its first token on.
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
