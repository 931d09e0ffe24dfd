//! Whether to read a prefix or to compute it again: `plan` decides, with what the caller knows of computing and of the tier.

use weft_plan::fetch::{Fetch, FetchCost, FetchError, Prefill};

use super::{BlockId, Space, Store};
use crate::error::Error;

/// What to do with a prefix that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Worth {
    /// Nothing of it is there.
    Nothing,
    /// Read so many blocks, and compute the rest.
    Read { blocks: usize, fetch: Fetch },
    /// Compute all of it: reading would take longer. Both figures are in the reason.
    Compute(FetchError),
}

impl Store {
    /// How much of a chain that is there to read, given what computing takes (`recompute`) and what reading from the slowest tier that has it takes (`cost`).
    /// The blocks count as used, as with [`match_prefix`](Store::match_prefix).
    pub fn match_worth(
        &self,
        space: &Space,
        chain: &[BlockId],
        prompt_tokens: u32,
        recompute: &dyn Prefill,
        cost: &FetchCost,
    ) -> Result<Worth, Error> {
        let there = self.match_prefix(chain)?;
        let block = u32::try_from(space.block_tokens).unwrap_or(u32::MAX);
        let tokens = u32::try_from(there).unwrap_or(u32::MAX).saturating_mul(block);
        if there == 0 {
            return Ok(Worth::Nothing);
        }
        Ok(match recompute.fetch(cost, prompt_tokens, tokens, block) {
            Ok(fetch) => Worth::Read {
                blocks: (fetch.tokens / block) as usize,
                fetch,
            },
            Err(slower) => Worth::Compute(slower),
        })
    }
}
